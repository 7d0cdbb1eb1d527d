//! Capabilities: the right to send at a time or later.
//!
//! Every capability stands for one count of its time in the [`Meter`] that it shares with its output. Cloning adds one,
//! dropping takes one, whatever ends it: a panic in user logic unwinds through `Drop` and releases it as well.
//! A capability moves only to times in advance of its own.
//!
//! Source: Megaphone §3.1.

use std::fmt::{self, Debug};
use std::rc::Rc;

use crate::meter::Meter;
use crate::timestamp::Timestamp;

/// A capability was asked for a time that it does not allow.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CapabilityError {
    /// The time asked for is not in advance of the held one.
    #[error("a capability for {held} does not reach {asked}, which is not in advance of it")]
    NotInAdvance {
        /// The capability's time.
        held: String,
        /// The time asked for.
        asked: String,
    },
}

/// The right to send at [`Capability::time`] or later. Counted: see the module.
pub struct Capability<T: Timestamp> {
    time: T,
    changes: Rc<Meter<T>>,
}

impl<T: Timestamp> Capability<T> {
    /// Makes a capability and counts it.
    pub fn mint(time: T, changes: Rc<Meter<T>>) -> Self {
        changes.update(time.clone(), 1);
        Self { time, changes }
    }

    /// Makes the capability for a count that exists already, such as the initial one of an output.
    pub fn adopt(time: T, changes: Rc<Meter<T>>) -> Self {
        Self { time, changes }
    }

    /// The earliest time at which it allows to send.
    #[inline]
    pub fn time(&self) -> &T {
        &self.time
    }

    /// A further capability for a time in advance of this one's.
    ///
    /// # Errors
    /// [`CapabilityError::NotInAdvance`]; nothing changes.
    pub fn delayed(&self, time: &T) -> Result<Self, CapabilityError> {
        self.check(time)?;
        Ok(Self::mint(time.clone(), Rc::clone(&self.changes)))
    }

    /// Moves this capability to a time in advance of its own.
    ///
    /// # Errors
    /// [`CapabilityError::NotInAdvance`]; nothing changes.
    pub fn downgrade(&mut self, time: &T) -> Result<(), CapabilityError> {
        self.check(time)?;
        if self.time != *time {
            self.changes.update(time.clone(), 1);
            self.changes.update(std::mem::replace(&mut self.time, time.clone()), -1);
        }
        Ok(())
    }

    /// From now on it stands for no count: somebody else holds what it stood for.
    pub fn detach(&mut self) {
        self.changes = Rc::default();
    }

    /// Whether it belongs to the output that owns this meter.
    #[inline]
    pub fn valid_for(&self, changes: &Rc<Meter<T>>) -> bool {
        Rc::ptr_eq(&self.changes, changes)
    }

    /// Whether both belong to one output.
    pub(crate) fn same_output(&self, other: &Self) -> bool {
        self.valid_for(&other.changes)
    }

    fn check(&self, time: &T) -> Result<(), CapabilityError> {
        if self.time.less_equal(time) { Ok(()) } else { Err(self.not_in_advance(time)) }
    }

    #[cold]
    fn not_in_advance(&self, time: &T) -> CapabilityError {
        CapabilityError::NotInAdvance { held: format!("{:?}", self.time), asked: format!("{time:?}") }
    }
}

impl<T: Timestamp> Clone for Capability<T> {
    fn clone(&self) -> Self {
        Self::mint(self.time.clone(), Rc::clone(&self.changes))
    }
}

impl<T: Timestamp> Drop for Capability<T> {
    fn drop(&mut self) {
        self.changes.release(self.time.clone());
    }
}

impl<T: Timestamp> Debug for Capability<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Capability").field("time", &self.time).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;
    use crate::change_batch::ChangeBatch;
    use crate::timestamp::Product;

    type Changes<T> = Rc<Meter<T>>;

    fn drain<T: Ord>(changes: &Changes<T>) -> Vec<(T, i64)> {
        let mut all = ChangeBatch::new();
        changes.collect(&mut all);
        all.drain().collect()
    }

    #[test]
    fn counts_follow_clone_downgrade_and_drop() {
        let changes = Changes::<u64>::default();
        let mut first = Capability::mint(3, Rc::clone(&changes));
        let second = first.clone();
        assert_eq!(drain(&changes), [(3, 2)]);
        first.downgrade(&5).unwrap();
        assert_eq!(drain(&changes), [(3, -1), (5, 1)]);
        let third = first.delayed(&5).unwrap();
        drop((first, second, third));
        assert_eq!(drain(&changes), [(3, -1), (5, -1)]);
        drop(Capability::adopt(0, Rc::clone(&changes)));
        assert_eq!(drain(&changes), [(0, -1)]);
        let mut fourth = Capability::adopt(0, Rc::clone(&changes));
        fourth.detach();
        fourth.downgrade(&9).unwrap();
        assert!(!fourth.valid_for(&changes));
        drop(fourth);
        assert!(changes.is_empty());
    }

    #[test]
    fn backward_moves_change_nothing() {
        let changes = Changes::default();
        let mut held = Capability::adopt(Product::new(0u64, 5u64), Rc::clone(&changes));
        let asked = Product::new(1, 0);
        let error = held.downgrade(&asked).unwrap_err();
        assert_eq!(error, CapabilityError::NotInAdvance { held: "(0, 5)".to_owned(), asked: "(1, 0)".to_owned() });
        assert_eq!(held.delayed(&asked).unwrap_err(), error);
        assert_eq!(*held.time(), Product::new(0, 5));
        assert!(changes.is_empty());
    }

    #[test]
    fn a_panic_releases() {
        let changes = Changes::<u64>::default();
        let held = Capability::mint(1, Rc::clone(&changes));
        let result = catch_unwind(AssertUnwindSafe(move || {
            let _later = held.delayed(&7).unwrap();
            panic!("user logic");
        }));
        assert!(result.is_err() && changes.is_empty());
    }

    #[test]
    fn knows_its_output() {
        let (one, two) = (Changes::<u64>::default(), Changes::<u64>::default());
        let held = Capability::mint(1, Rc::clone(&one));
        assert!(held.valid_for(&one) && !held.valid_for(&two));
    }
}
