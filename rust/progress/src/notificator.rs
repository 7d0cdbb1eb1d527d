//! Delivery of times that a frontier has passed.
//!
//! A time is *complete* under some frontiers when it is in advance of none of them: no message at or before it can come.
//! [`Notificator`] holds capabilities until their time is complete; [`crate::PostDated`] does the same for records.
//!
//! Times are handed out in `Ord` order, which extends the partial order: of two comparable complete times the lesser comes
//! first. The search is that of the module `times`: it ends at the first incomplete time under total orders and skips
//! groups of incomplete ones otherwise, O(w log n) for n pending times and frontiers of width w.
//!
//! Source: Faucet §3.

use smallvec::SmallVec;

use crate::capability::Capability;
use crate::times::Times;
use crate::timestamp::Timestamp;

pub(crate) fn complete<T: Timestamp>(time: &T, frontiers: &[&[T]]) -> bool {
    !frontiers.iter().any(|frontier| frontier.iter().any(|element| element.less_equal(time)))
}

/// Hands back capabilities once their times are complete.
///
/// Requests for one time and output form a group, delivered exactly once; a request made after the delivery starts a new
/// group.
///
/// ```
/// use std::rc::Rc;
/// use penstock_progress::{Capability, Notificator};
/// let mut notificator = Notificator::new();
/// notificator.notify_at(Capability::mint(3u64, Rc::default()));
/// assert!(notificator.next(&[&[3]]).is_none());
/// assert!(notificator.next(&[&[4]]).is_some_and(|capability| *capability.time() == 3));
/// ```
#[derive(Debug)]
pub struct Notificator<T: Timestamp> {
    pending: Times<T, SmallVec<[Capability<T>; 1]>>,
}

impl<T: Timestamp> Notificator<T> {
    /// Nothing requested.
    pub fn new() -> Self {
        Self { pending: Times::new() }
    }

    /// Asks for one delivery of this capability when its time is complete. O(log n).
    pub fn notify_at(&mut self, capability: Capability<T>) {
        let group = self.pending.entry(capability.time().clone(), SmallVec::new);
        if !group.iter().any(|held| held.same_output(&capability)) {
            group.push(capability);
        }
    }

    /// The capability of the earliest pending time that is in advance of none of the frontiers.
    pub fn next(&mut self, frontiers: &[&[T]]) -> Option<Capability<T>> {
        let free = self.pending.first_free(None, |time| !complete(time, frontiers));
        let time = free?.0.clone();
        let group = self.pending.entry(time.clone(), SmallVec::new);
        let capability = (!group.is_empty()).then(|| group.remove(0));
        if group.is_empty() {
            self.pending.remove(&time);
        }
        capability
    }

    /// Whether [`next`](Self::next) would give one.
    pub fn has_next(&mut self, frontiers: &[&[T]]) -> bool {
        self.pending.first_free(None, |time| !complete(time, frontiers)).is_some()
    }

    /// How many distinct times are pending.
    pub fn len(&self) -> usize {
        self.pending.len()
    }

    /// Whether nothing is pending.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The pending times, ascending.
    pub fn pending(&self) -> impl Iterator<Item = &T> {
        self.pending.iter().map(|entry| entry.0)
    }
}

impl<T: Timestamp> Default for Notificator<T> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;
    use crate::meter::Meter;
    use crate::timestamp::Product;

    type Changes<T> = Rc<Meter<T>>;

    #[test]
    fn delivers_each_group_once_and_never_early() {
        let changes = Changes::<u64>::default();
        let mut notificator = Notificator::new();
        for time in [7, 3, 3, 5] {
            notificator.notify_at(Capability::mint(time, Rc::clone(&changes)));
        }
        let mut held = crate::change_batch::ChangeBatch::new();
        changes.collect(&mut held);
        assert_eq!(held.drain().collect::<Vec<_>>(), [(3, 1), (5, 1), (7, 1)]);
        assert!(notificator.next(&[&[3]]).is_none());
        assert!(notificator.next(&[&[], &[2]]).is_none());
        assert!(!notificator.has_next(&[&[3]]) && notificator.has_next(&[&[4]]));
        assert_eq!(notificator.next(&[&[6], &[]]).map(|held| *held.time()), Some(3));
        assert_eq!(notificator.next(&[&[6], &[5]]).map(|held| *held.time()), None);
        assert_eq!(notificator.next(&[&[6]]).map(|held| *held.time()), Some(5));
        assert_eq!(notificator.next(&[&[7]]).map(|held| *held.time()), None);
        assert_eq!(notificator.next(&[]).map(|held| *held.time()), Some(7));
        changes.collect(&mut held);
        assert!(notificator.is_empty());
        assert_eq!(held.drain().collect::<Vec<_>>(), [(3, -1), (5, -1), (7, -1)]);
    }

    #[test]
    fn capabilities_of_different_outputs_are_different_groups() {
        let (one, two) = (Changes::<u64>::default(), Changes::<u64>::default());
        let mut notificator = Notificator::new();
        notificator.notify_at(Capability::mint(3, Rc::clone(&one)));
        notificator.notify_at(Capability::mint(3, Rc::clone(&two)));
        assert!(notificator.next(&[]).is_some_and(|held| held.valid_for(&one)));
        assert!(notificator.next(&[]).is_some_and(|held| held.valid_for(&two)));
        assert!(notificator.next(&[]).is_none());
    }

    #[test]
    fn incomparable_times_do_not_wait_for_each_other() {
        let changes = Changes::default();
        let mut notificator = Notificator::new();
        for (outer, inner) in [(0u64, 5u64), (1, 0), (2, 2)] {
            notificator.notify_at(Capability::mint(Product::new(outer, inner), Rc::clone(&changes)));
        }
        let frontier = [Product::new(0, 3)];
        assert_eq!(notificator.next(&[&frontier]).map(|held| *held.time()), Some(Product::new(1, 0)));
        assert_eq!(notificator.next(&[&frontier]).map(|held| *held.time()), Some(Product::new(2, 2)));
        assert!(notificator.next(&[&frontier]).is_none());
    }
}
