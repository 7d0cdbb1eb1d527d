//! Delivery of times that a frontier has passed.
//!
//! A time is *complete* under some frontiers when it is in advance of none of them: no message at or before it can come.
//! [`Notificator`] holds capabilities until their time is complete; [`PostDated`] holds records without any capability, so
//! that its owner keeps one capability, for the least of them.
//!
//! Times are handed out in `Ord` order, which extends the partial order: of two comparable complete times the lesser comes
//! first. Under total orders the search ends at the first incomplete time; otherwise it passes over the incomplete ones.
//!
//! Source: Faucet §3; Megaphone §4.3 (post-dated records).

use std::collections::BTreeMap;

use smallvec::SmallVec;

use crate::capability::Capability;
use crate::timestamp::Timestamp;

fn complete<T: Timestamp>(time: &T, frontiers: &[&[T]]) -> bool {
    !frontiers.iter().any(|frontier| frontier.iter().any(|element| element.less_equal(time)))
}

/// Hands back capabilities once their times are complete.
///
/// Requests for one time and output form a group, delivered exactly once; a request made after the delivery starts a new
/// group.
#[derive(Debug)]
pub struct Notificator<T: Timestamp> {
    pending: BTreeMap<T, SmallVec<[Capability<T>; 1]>>,
}

impl<T: Timestamp> Notificator<T> {
    /// Nothing requested.
    pub fn new() -> Self {
        Self { pending: BTreeMap::new() }
    }

    /// Asks for one delivery of this capability when its time is complete. O(log n).
    pub fn notify_at(&mut self, capability: Capability<T>) {
        let group = self.pending.entry(capability.time().clone()).or_default();
        if !group.iter().any(|held| held.same_output(&capability)) {
            group.push(capability);
        }
    }

    /// The capability of the earliest pending time that is in advance of none of the frontiers.
    pub fn next(&mut self, frontiers: &[&[T]]) -> Option<Capability<T>> {
        let mut times = self.pending.keys();
        let time = match T::DIMENSION {
            0 | 1 => times.next().filter(|time| complete(*time, frontiers)),
            _ => times.find(|time| complete(*time, frontiers)),
        }?
        .clone();
        let group = self.pending.get_mut(&time)?;
        let capability = (!group.is_empty()).then(|| group.remove(0));
        if group.is_empty() {
            self.pending.remove(&time);
        }
        capability
    }

    /// How many distinct times are pending.
    pub fn len(&self) -> usize {
        self.pending.len()
    }

    /// Whether nothing is pending.
    pub fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }

    /// The pending times, ascending.
    pub fn pending(&self) -> impl Iterator<Item = &T> {
        self.pending.keys()
    }
}

impl<T: Timestamp> Default for Notificator<T> {
    fn default() -> Self {
        Self::new()
    }
}

/// Records for later times: a priority queue by time, first in first out within a time. O(log n) per record.
#[derive(Clone, Debug)]
pub struct PostDated<T, K, V> {
    records: BTreeMap<(T, u64), (K, V)>,
    pushed: u64,
}

impl<T, K, V> Default for PostDated<T, K, V> {
    fn default() -> Self {
        Self { records: BTreeMap::new(), pushed: 0 }
    }
}

impl<T: Timestamp, K, V> PostDated<T, K, V> {
    /// No records.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a record for a time.
    pub fn push(&mut self, time: T, key: K, value: V) {
        self.records.insert((time, self.pushed), (key, value));
        self.pushed += 1;
    }

    /// Removes, one by one, the records whose time is not in advance of `frontier`, in order of time, then insertion.
    /// What the iterator has not handed out stays pending.
    pub fn drain_ready<'a>(&'a mut self, frontier: &'a [T]) -> Ready<'a, T, K, V> {
        Ready { queue: self, frontier, after: None }
    }

    /// The least time by `Ord`, for which the owner must hold a capability. Under a partial order it is one of possibly
    /// several minimal ones; see [`PostDated::times`].
    pub fn least(&self) -> Option<&T> {
        self.records.first_key_value().map(|(key, _)| &key.0)
    }

    /// The time of every record, ascending.
    pub fn times(&self) -> impl Iterator<Item = &T> {
        self.records.keys().map(|key| &key.0)
    }

    /// Every record in order of time, then insertion.
    pub fn iter(&self) -> impl Iterator<Item = (&T, &K, &V)> {
        self.records.iter().map(|(key, record)| (&key.0, &record.0, &record.1))
    }

    /// Removes and returns the records that match, such as those of a bin that moves, in order of time, then insertion.
    /// O(n).
    pub fn extract(&mut self, mut matches: impl FnMut(&T, &K, &V) -> bool) -> Vec<(T, K, V)> {
        let mut taken = Vec::new();
        for ((time, position), (key, value)) in std::mem::take(&mut self.records) {
            if matches(&time, &key, &value) {
                taken.push((time, key, value));
            } else {
                self.records.insert((time, position), (key, value));
            }
        }
        taken
    }

    /// How many records are pending.
    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// Whether no record is pending.
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }
}

/// The records that [`PostDated::drain_ready`] removes.
#[derive(Debug)]
pub struct Ready<'a, T, K, V> {
    queue: &'a mut PostDated<T, K, V>,
    frontier: &'a [T],
    /// The last record seen, ready or not; used where ready ones may lie behind others.
    after: Option<(T, u64)>,
}

impl<T: Timestamp, K, V> Iterator for Ready<'_, T, K, V> {
    type Item = (T, K, V);

    fn next(&mut self) -> Option<(T, K, V)> {
        use std::ops::Bound::{Excluded, Unbounded};
        if T::DIMENSION <= 1 {
            let entry = self.queue.records.first_entry().filter(|entry| complete(&entry.key().0, &[self.frontier]))?;
            let ((time, _), (key, value)) = entry.remove_entry();
            return Some((time, key, value));
        }
        let from = self.after.as_ref().map_or(Unbounded, Excluded);
        let ready = self.queue.records.range((from, Unbounded)).map(|(key, _)| key);
        let found = { ready }.find(|key| complete(&key.0, &[self.frontier]))?.clone();
        let (key, value) = self.queue.records.remove(&found)?;
        let time = found.0.clone();
        self.after = Some(found);
        Some((time, key, value))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;

    use super::*;
    use crate::change_batch::ChangeBatch;
    use crate::timestamp::Product;

    type Changes<T> = Rc<RefCell<ChangeBatch<T>>>;

    #[test]
    fn delivers_each_group_once_and_never_early() {
        let changes = Changes::<u64>::default();
        let mut notificator = Notificator::new();
        for time in [7, 3, 3, 5] {
            notificator.notify_at(Capability::mint(time, Rc::clone(&changes)));
        }
        assert_eq!(changes.borrow_mut().iter().copied().collect::<Vec<_>>(), [(3, 1), (5, 1), (7, 1)]);
        assert!(notificator.next(&[&[3]]).is_none());
        assert!(notificator.next(&[&[], &[2]]).is_none());
        assert_eq!(notificator.next(&[&[6], &[]]).map(|held| *held.time()), Some(3));
        assert_eq!(notificator.next(&[&[6], &[5]]).map(|held| *held.time()), None);
        assert_eq!(notificator.next(&[&[6]]).map(|held| *held.time()), Some(5));
        assert_eq!(notificator.next(&[&[7]]).map(|held| *held.time()), None);
        assert_eq!(notificator.next(&[]).map(|held| *held.time()), Some(7));
        assert!(notificator.is_empty() && changes.borrow_mut().is_empty());
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

    #[test]
    fn a_million_records_come_back_in_order() {
        let mut queue = PostDated::new();
        let count = 1_000_000u64;
        for record in 0..count {
            queue.push(record.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 48, record, ());
        }
        assert_eq!(queue.len(), 1_000_000);
        let half = 1u64 << 15;
        let mut last = (0, 0);
        let mut seen = 0;
        for (time, record, ()) in queue.drain_ready(&[half]) {
            assert!(time < half && (seen == 0 || last < (time, record)));
            last = (time, record);
            seen += 1;
        }
        assert!(queue.least().is_some_and(|least| *least >= half));
        assert_eq!(seen + queue.drain_ready(&[]).count(), 1_000_000);
        assert!(queue.is_empty());
    }

    #[test]
    fn an_abandoned_iterator_loses_nothing() {
        let mut queue = PostDated::new();
        for time in 0..4u64 {
            queue.push(time, 'k', time);
        }
        assert_eq!(queue.drain_ready(&[3]).next(), Some((0, 'k', 0)));
        assert_eq!(queue.drain_ready(&[3]).map(|record| record.2).collect::<Vec<_>>(), [1, 2]);
        assert_eq!(queue.extract(|time, _, _| *time == 3), [(3, 'k', 3)]);
        assert!(queue.is_empty());
    }
}
