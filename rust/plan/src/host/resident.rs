//! The bins of one query in one process, while no generation runs.
//!
//! Owns the shelf on which the tables of an ended generation left their bins. The next generation names the epoch it
//! begins with; bins come back as they were then, whether that epoch failed or was never begun. Bins that come from elsewhere are
//! [made](Loaded::load) apart, which may take long, and [kept](Resident::keep) beside the shelf; they count only where a generation begins
//! that misses them.
//!
//! Departure: there is no `rollback` of resident state. A generation starts with its first epoch, and an inventory
//! tells which bins a process has for it.

use std::collections::HashMap;
use std::sync::Arc;

use penstock_bins::{BinState, BinsError, Shelf, range_of};
use penstock_files::Range;

use super::group::HostError;
use crate::callback::{Callbacks, Unreadable};
use crate::plan::Plan;
use crate::state::State;

/// See the module.
#[derive(Debug)]
pub struct Resident {
    pub(crate) shelf: Shelf<State>,
    pub(crate) fresh: bool,
    /// Of the bins of the last generation.
    pub(crate) bits: u8,
    pub(crate) ops: Vec<String>,
    pub(crate) loaded: Loaded,
}

/// Bins that were made from files, by the name of their keyed step and by range.
#[derive(Debug, Default)]
pub struct Loaded(HashMap<String, HashMap<Range, Box<State>>>);

/// Why a bin could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError<E> {
    /// Its chunks could not be had.
    #[error(transparent)]
    Chunks(E),
    /// They are not of its state.
    #[error(transparent)]
    State(HostError),
    /// Some of its keys have state that cannot be read.
    #[error("the state of {} and {} more keys cannot be read: {}", .0.key, .0.keys - 1, .0.reason)]
    Unreadable(Unreadable),
}

impl Resident {
    /// Nothing yet: the first generation starts with empty bins.
    #[must_use]
    pub fn fresh() -> Self {
        Resident { shelf: Shelf::new(), fresh: true, bits: 0, ops: Vec::new(), loaded: Loaded::default() }
    }

    /// Nothing, and nothing is made: for a process that joins a query whose bins are elsewhere. A generation that gives it a bin is
    /// refused with [`HostError::MissingBins`](super::HostError::MissingBins).
    #[must_use]
    pub fn nothing() -> Self {
        Resident { fresh: false, ..Self::fresh() }
    }

    /// Keeps bins for the next generation that misses them. Those that were loaded before give way. What is not loaded is not
    /// made anew, as in [`nothing`](Self::nothing).
    pub fn keep(&mut self, loaded: Loaded) {
        self.fresh = false;
        for (name, bins) in loaded.0 {
            self.loaded.0.entry(name).or_default().extend(bins);
        }
    }

    /// Forgets bins that were loaded and in no generation since.
    pub fn drop_loaded(&mut self) {
        self.loaded = Loaded::default();
    }

    /// The bins whose state at the beginning of `epoch` is here, without what was loaded, by the name of their keyed step, in the
    /// plan's order. In a generation that begins with `epoch`, their owners must be workers of this process; of a bin that was split or merged
    /// before it there are both, its parts and itself, and either will do.
    #[must_use]
    pub fn inventory(&self, epoch: u64) -> Vec<(String, Vec<Range>)> {
        let range = |bin| range_of(bin, self.bits).expect("a bin of the last generation");
        let ranges = |name| self.shelf.inventory(name, epoch).into_iter().map(range).collect();
        self.ops.iter().map(|name| (name.clone(), ranges(name))).collect()
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

impl Loaded {
    /// Makes the state of a bin of the keyed step of that name from what was recorded of it, oldest first
    /// ([`penstock_files::select`]), for a generation with such a bin or part of one; of nothing, that of a bin that has seen nothing. A bin that
    /// was loaded before gives way.
    ///
    /// # Errors
    /// What `chunks` say, chunks of another state, or keys whose newest value cannot be read. The bin is not loaded then.
    ///
    /// # Panics
    /// When the plan has no such keyed step.
    pub fn load<E>(
        &mut self,
        plan: &Plan,
        callbacks: &Arc<dyn Callbacks>,
        name: &str,
        range: Range,
        chunks: impl IntoIterator<Item = Result<Vec<u8>, E>>,
    ) -> Result<(), LoadError<E>> {
        let mut named = plan.keyed().filter(|keyed| keyed.operator == name);
        let mut state = named.next().expect("a keyed step of the plan").new_state(callbacks);
        let refused = |source| LoadError::State(BinsError::Chunk { bin: range.prefix(), source }.into());
        for chunk in chunks {
            state.restore(&chunk.map_err(LoadError::Chunks)?).map_err(refused)?;
        }
        if let Some(unreadable) = state.unreadable().map_err(refused)? {
            return Err(LoadError::Unreadable(unreadable));
        }
        self.0.entry(name.to_owned()).or_default().insert(range, Box::new(state));
        Ok(())
    }

    pub(crate) fn has(&self, name: &str, range: Range) -> bool {
        self.0.get(name).is_some_and(|bins| bins.contains_key(&range))
    }

    pub(crate) fn take(&mut self, name: &str, range: Range) -> Option<Box<State>> {
        self.0.get_mut(name)?.remove(&range)
    }
}
