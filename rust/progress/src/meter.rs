//! Meters: what the capabilities or messages of one port change, counted until their owner collects it.
//!
//! A meter rings with its first change since it was last collected. So its owner need not look at meters at which nothing happened, and
//! learns of what happens outside of its own turns, such as a capability that a program drops between two steps. Invariant: a
//! meter that is not empty has rung. Nothing but orders of times runs while its batch is borrowed.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;

use crate::change_batch::ChangeBatch;

/// A change batch that many share: see the module.
///
/// ```
/// use std::{cell::Cell, rc::Rc};
/// use penstock_progress::{Capability, ChangeBatch, Meter};
/// let rung = Rc::new(Cell::new(0));
/// let bell = rung.clone();
/// let meter = Rc::new(Meter::with_bell(Rc::new(move || bell.set(bell.get() + 1))));
/// let mut capability = Capability::mint(3u64, meter.clone());
/// capability.downgrade(&5).unwrap();
/// assert_eq!(rung.get(), 1);
/// let mut changes = ChangeBatch::new();
/// meter.collect(&mut changes);
/// drop(capability);
/// assert_eq!((changes.drain().collect::<Vec<_>>(), rung.get()), (vec![(5, 1)], 2));
/// ```
pub struct Meter<T> {
    changes: RefCell<ChangeBatch<T>>,
    rung: Cell<bool>,
    bell: Option<Rc<dyn Fn()>>,
}

impl<T> Default for Meter<T> {
    fn default() -> Self {
        Self { changes: RefCell::default(), rung: Cell::new(false), bell: None }
    }
}

impl<T> Meter<T> {
    /// An empty meter that only counts.
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty meter that calls `bell`, which must not count anything.
    pub fn with_bell(bell: Rc<dyn Fn()>) -> Self {
        Self { bell: Some(bell), ..Self::default() }
    }

    /// Whether something was counted since it was last collected, even if it cancelled.
    #[inline]
    pub fn has_rung(&self) -> bool {
        self.rung.get()
    }

    #[inline]
    fn ring(&self) {
        if !self.rung.replace(true)
            && let Some(bell) = &self.bell
        {
            bell();
        }
    }
}

impl<T: Ord> Meter<T> {
    /// Counts a change.
    #[inline]
    pub fn update(&self, time: T, diff: i64) {
        self.changes.borrow_mut().update(time, diff);
        self.ring();
    }

    /// As an update by -1, for drops: it never panics. A count that should stay when the batch is borrowed, which it never is then,
    /// would only hold frontiers back.
    pub fn release(&self, time: T) {
        if let Ok(mut changes) = self.changes.try_borrow_mut() {
            changes.update(time, -1);
            drop(changes);
            self.ring();
        }
    }

    /// Moves what was counted into a batch, in addition to what is there.
    pub fn collect(&self, into: &mut ChangeBatch<T>) {
        self.rung.set(false);
        self.changes.borrow_mut().drain_into(into);
    }

    /// Whether all counts are zero.
    pub fn is_empty(&self) -> bool {
        !self.rung.get() || self.changes.borrow_mut().is_empty()
    }
}

impl<T: fmt::Debug> fmt::Debug for Meter<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Meter").field("changes", &self.changes).finish_non_exhaustive()
    }
}
