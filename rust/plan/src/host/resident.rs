//! The bins of one query in one process, while no generation runs.
//!
//! Owns the shelf on which the tables of an ended generation left their bins, and the decision with which
//! content they come back: as they are after a regular end, as at the last mark after a failure.

use penstock_bins::{Resume, Shelf};
use serde::{Deserialize, Serialize};

use crate::state::State;

/// See the module.
pub struct Resident {
    pub(crate) shelf: Shelf<State>,
    pub(crate) fresh: bool,
    pub(crate) resume: Resume,
    pub(crate) ops: Vec<String>,
}

/// Where the state of one keyed step is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpInventory {
    /// Bins held by this process now, ascending.
    pub held: Vec<u32>,
    /// Bins whose state at the last mark is in this process, ascending.
    pub original: Vec<u32>,
}

/// Where the state of a query is, as far as this process knows; one entry per keyed step.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inventory {
    /// By keyed step of the plan.
    pub ops: Vec<OpInventory>,
}

impl Resident {
    /// Nothing yet: the first generation starts with empty bins.
    #[must_use]
    pub fn fresh() -> Self {
        Resident { shelf: Shelf::new(), fresh: true, resume: Resume::AsIs, ops: Vec::new() }
    }

    /// Lets the next generation start from the last mark, that is, from the end of the last complete epoch.
    pub fn rollback(&mut self) {
        self.resume = Resume::AtMark;
    }

    /// Which bins are here.
    #[must_use]
    pub fn inventory(&self) -> Inventory {
        let ops = self.ops.iter().map(|name| {
            let (held, original) = self.shelf.inventory(name);
            OpInventory { held, original }
        });
        Inventory { ops: ops.collect() }
    }

    /// Keys over all bins and keyed steps.
    #[must_use]
    pub fn keys(&self) -> u64 {
        self.shelf.sum(|state| penstock_bins::BinState::keys(state) as u64)
    }

    /// Bytes of state over all bins and keyed steps.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.shelf.sum(|state| penstock_bins::BinState::bytes(state) as u64)
    }
}
