//! Probes: read-only views of a frontier, shared by everyone in the worker who asks.
//!
//! The dataflow feeds a probe with the changes of its stream's frontier; whoever holds the handle reads it, also operators
//! without a data edge to it. A probe asked before its first update reports the minimum time: nothing has been ruled out
//! yet, and in particular it is not done.
//!
//! A handle is typed by its scope's timestamp, so a time of a scope with other times does not compile:
//!
//! ```compile_fail
//! use penstock_progress::{ProbeHandle, Product};
//! let probe = ProbeHandle::<u64>::new();
//! probe.less_than(&Product::new(3u64, 0u64));
//! ```
//!
//! Source: Faucet §3, Megaphone §4.3.

use std::cell::{Ref, RefCell};
use std::fmt::{self, Debug};
use std::rc::Rc;

use crate::antichain::MutableAntichain;
use crate::timestamp::Timestamp;

/// A shared view of a frontier. Clones see the same frontier.
///
/// ```
/// use penstock_progress::ProbeHandle;
/// let probe = ProbeHandle::<u64>::new();
/// assert!(probe.less_equal(&0) && !probe.done());
/// probe.update([(4, 1)]);
/// assert!(!probe.less_than(&4) && probe.less_equal(&4));
/// probe.update([(4, -1)]);
/// assert!(probe.done());
/// ```
pub struct ProbeHandle<T: Timestamp> {
    state: Rc<RefCell<State<T>>>,
}

struct State<T> {
    frontier: MutableAntichain<T>,
    /// Whether `frontier` still holds the minimum in place of what is not known yet.
    waiting: bool,
}

impl<T: Timestamp> ProbeHandle<T> {
    /// A probe that nobody feeds yet.
    pub fn new() -> Self {
        let state = State { frontier: MutableAntichain::from_elem(T::minimum()), waiting: true };
        Self { state: Rc::new(RefCell::new(state)) }
    }

    /// Whether some element of the frontier is strictly less than `time`: whether a time before it may still appear.
    pub fn less_than(&self, time: &T) -> bool {
        self.borrow().less_than(time)
    }

    /// Whether some element of the frontier is less than or equal to `time`: whether it may still appear.
    pub fn less_equal(&self, time: &T) -> bool {
        self.borrow().less_equal(time)
    }

    /// Whether the frontier is empty: nothing more comes.
    pub fn done(&self) -> bool {
        self.borrow().is_empty()
    }

    /// Reads the frontier.
    pub fn with_frontier<R>(&self, read: impl FnOnce(&[T]) -> R) -> R {
        read(self.borrow().frontier())
    }

    /// Applies changes of the frontier, for the dataflow that feeds the probe. The first call, also with no changes, ends
    /// the wait described in the module. A handle fed by several streams shows the lower bound of them all.
    pub fn update(&self, changes: impl IntoIterator<Item = (T, i64)>) {
        let mut state = self.state.borrow_mut();
        let initial = std::mem::take(&mut state.waiting).then(|| (T::minimum(), -1));
        state.frontier.update_iter(changes.into_iter().chain(initial));
    }

    fn borrow(&self) -> Ref<'_, MutableAntichain<T>> {
        Ref::map(self.state.borrow(), |state| &state.frontier)
    }
}

impl<T: Timestamp> Default for ProbeHandle<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T: Timestamp> Clone for ProbeHandle<T> {
    fn clone(&self) -> Self {
        Self { state: Rc::clone(&self.state) }
    }
}

impl<T: Timestamp> Debug for ProbeHandle<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.with_frontier(|frontier| formatter.debug_tuple("ProbeHandle").field(&frontier).finish())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clones_share_and_first_update_replaces_the_minimum() {
        let probe = ProbeHandle::<u64>::new();
        let reader = probe.clone();
        assert!(!reader.done() && reader.less_than(&1));
        probe.update([(0, 1)]);
        assert_eq!(reader.with_frontier(<[u64]>::to_vec), [0]);
        probe.update([(0, -1), (2, 1)]);
        assert!(!reader.less_than(&2) && reader.less_equal(&2) && reader.less_than(&3));
        probe.update([(2, -1)]);
        assert!(reader.done() && !reader.less_equal(&u64::MAX));
    }

    #[test]
    fn a_stream_without_any_source_is_done_at_once() {
        let probe = ProbeHandle::<u64>::new();
        probe.update([]);
        assert!(probe.done());
    }

    #[test]
    fn several_streams_show_their_lower_bound() {
        let probe = ProbeHandle::<u64>::new();
        probe.update([(0, 1)]);
        probe.update([(0, 1)]);
        probe.update([(0, -1), (9, 1)]);
        assert!(probe.less_equal(&0));
        probe.update([(0, -1), (5, 1)]);
        assert_eq!(probe.with_frontier(<[u64]>::to_vec), [5]);
    }
}
