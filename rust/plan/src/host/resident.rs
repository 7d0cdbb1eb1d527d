//! The bins of one query in one process, while no generation runs.
//!
//! Owns the shelf on which the tables of an ended generation left their bins. The next generation names the epoch it
//! begins with; bins come back as they were then, whether that epoch failed or was never begun.
//!
//! Departure: there is no `rollback` of resident state. A generation starts with its first epoch, and an inventory
//! tells which bins a process has for it.

use penstock_bins::{BinState, Shelf};

use crate::state::State;

/// See the module.
#[derive(Debug)]
pub struct Resident {
    pub(crate) shelf: Shelf<State>,
    pub(crate) fresh: bool,
    pub(crate) ops: Vec<String>,
}

impl Resident {
    /// Nothing yet: the first generation starts with empty bins.
    #[must_use]
    pub fn fresh() -> Self {
        Resident { shelf: Shelf::new(), fresh: true, ops: Vec::new() }
    }

    /// Nothing, and nothing is made: for a process that joins a query whose bins are elsewhere. A generation that gives it a bin is
    /// refused with [`HostError::MissingBins`](super::HostError::MissingBins).
    #[must_use]
    pub fn nothing() -> Self {
        Resident { fresh: false, ..Self::fresh() }
    }

    /// The bins whose state at the beginning of `epoch` is here, by the name of their keyed step, in the plan's
    /// order; ascending. In a generation that begins with `epoch`, their owners
    /// must be workers of this process.
    #[must_use]
    pub fn inventory(&self, epoch: u64) -> Vec<(String, Vec<u32>)> {
        self.ops.iter().map(|name| (name.clone(), self.shelf.inventory(name, epoch))).collect()
    }

    /// Keys over all bins and keyed steps.
    #[must_use]
    pub fn keys(&self) -> u64 {
        self.shelf.sum(|state| state.keys() as u64)
    }

    /// Bytes of state over all bins and keyed steps.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.shelf.sum(|state| state.bytes() as u64)
    }
}
