//! Records for later times.
//!
//! They are kept without any capability, so that their owner keeps one, for the least of them. They come back in `Ord`
//! order of their times once these are complete (see [`crate::notificator`]), first in first out within a time, at the cost
//! of a search there: O(log n) under total orders for n pending times.
//!
//! Source: Megaphone §4.3. Departure: what is ready is handed out one by one, and what is not taken stays.

use crate::notificator::complete;
use crate::times::Times;
use crate::timestamp::Timestamp;

/// A priority queue of records by time. O(log n) per record.
///
/// ```
/// use penstock_progress::PostDated;
/// let mut queue = PostDated::new();
/// queue.push(7u64, "key", 'b');
/// queue.push(5, "key", 'a');
/// assert_eq!(queue.least(), Some(&5));
/// assert_eq!(queue.drain_ready(&[6]).collect::<Vec<_>>(), [(5, "key", 'a')]);
/// assert_eq!(queue.len(), 1);
/// ```
#[derive(Clone, Debug)]
pub struct PostDated<T, K, V> {
    /// Never an empty list.
    records: Times<T, Vec<(K, V)>>,
    length: usize,
}

impl<T: Timestamp, K, V> Default for PostDated<T, K, V> {
    fn default() -> Self {
        Self { records: Times::new(), length: 0 }
    }
}

impl<T: Timestamp, K, V> PostDated<T, K, V> {
    /// No records.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a record for a time.
    pub fn push(&mut self, time: T, key: K, value: V) {
        self.records.entry(time, Vec::new).push((key, value));
        self.length += 1;
    }

    /// Removes, one by one, the records whose time is not in advance of `frontier`, in order of time, then insertion.
    /// What the iterator has not handed out stays pending.
    pub fn drain_ready<'a>(&'a mut self, frontier: &'a [T]) -> Ready<'a, T, K, V> {
        Ready { queue: self, frontier, group: None }
    }

    /// The least time by `Ord`, for which the owner must hold a capability. Under a partial order it is one of possibly
    /// several minimal ones; see [`PostDated::times`].
    pub fn least(&self) -> Option<&T> {
        self.records.iter().next().map(|entry| entry.0)
    }

    /// The time of every record, ascending.
    pub fn times(&self) -> impl Iterator<Item = &T> {
        self.iter().map(|record| record.0)
    }

    /// Every record in order of time, then insertion.
    pub fn iter(&self) -> impl Iterator<Item = (&T, &K, &V)> {
        self.records.iter().flat_map(|(time, group)| group.iter().map(move |(key, value)| (time, key, value)))
    }

    /// Removes and returns the records that match, such as those of a bin that moves, in order of time, then insertion.
    /// O(n log n).
    pub fn extract(&mut self, mut matches: impl FnMut(&T, &K, &V) -> bool) -> Vec<(T, K, V)> {
        let mut taken = Vec::new();
        let times: Vec<T> = self.records.iter().map(|entry| entry.0.clone()).collect();
        for time in times {
            let group = self.records.entry(time.clone(), Vec::new);
            for (key, value) in std::mem::take(group) {
                if matches(&time, &key, &value) {
                    taken.push((time.clone(), key, value));
                } else {
                    group.push((key, value));
                }
            }
            if group.is_empty() {
                self.records.remove(&time);
            }
        }
        self.length -= taken.len();
        taken
    }

    /// How many records are pending.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether no record is pending.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }
}

/// The records that [`PostDated::drain_ready`] removes.
#[derive(Debug)]
pub struct Ready<'a, T: Timestamp, K, V> {
    queue: &'a mut PostDated<T, K, V>,
    frontier: &'a [T],
    /// What is left of the time at hand.
    group: Option<(T, std::vec::IntoIter<(K, V)>)>,
}

impl<T: Timestamp, K, V> Iterator for Ready<'_, T, K, V> {
    type Item = (T, K, V);

    fn next(&mut self) -> Option<(T, K, V)> {
        loop {
            if let Some((time, group)) = &mut self.group
                && let Some((key, value)) = group.next()
            {
                return Some((time.clone(), key, value));
            }
            let records = &mut self.queue.records;
            let free = records.first_free(None, |time| !complete(time, &[self.frontier]));
            let time = free?.0.clone();
            let group = records.remove(&time)?;
            self.queue.length -= group.len();
            self.group = Some((time, group.into_iter()));
        }
    }
}

impl<T: Timestamp, K, V> Drop for Ready<'_, T, K, V> {
    fn drop(&mut self) {
        if let Some((time, group)) = self.group.take()
            && group.len() > 0
        {
            self.queue.length += group.len();
            self.queue.records.entry(time, Vec::new).extend(group);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_million_records_come_back_in_order() {
        let mut queue = PostDated::new();
        let count = if cfg!(miri) { 1_000 } else { 1_000_000u64 };
        for record in 0..count {
            queue.push(record.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 48, record, ());
        }
        assert_eq!(queue.len() as u64, count);
        let half = 1u64 << 15;
        let mut last = (0, 0);
        let mut seen = 0;
        for (time, record, ()) in queue.drain_ready(&[half]) {
            assert!(time < half && (seen == 0 || last < (time, record)));
            last = (time, record);
            seen += 1;
        }
        assert!(queue.least().is_some_and(|least| *least >= half));
        assert_eq!(seen + queue.drain_ready(&[]).count() as u64, count);
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
