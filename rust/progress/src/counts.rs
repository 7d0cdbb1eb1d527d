//! Counts per time in `Ord` order, for [`crate::MutableAntichain`].
//!
//! Live times mostly move like a queue: the newest enters at the end, the oldest leaves at the front. A ring serves that in
//! a few nanoseconds and needs no nodes. Work far from both ends of a long ring would move many entries, so the first such
//! change turns the ring into a tree, in logarithmic time from then on; once short again it becomes a ring. Both turns are
//! paid for by the changes that lead to them.

use std::collections::{BTreeMap, VecDeque, btree_map::Entry};
use std::ops::Bound;

/// The most entries that a change in a ring may move.
const MOVED: usize = 256;
/// A tree shorter than this becomes a ring.
const SHORT: usize = MOVED / 4;

/// Nonzero counts by time.
#[derive(Clone, Debug)]
pub(crate) enum Counts<T> {
    Ring(VecDeque<(T, i64)>),
    Tree(BTreeMap<T, i64>),
}

impl<T> Counts<T> {
    pub(crate) fn new() -> Self {
        Self::Ring(VecDeque::new())
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Ring(ring) => ring.len(),
            Self::Tree(tree) => tree.len(),
        }
    }
}

impl<T: Ord> Counts<T> {
    /// Adds to a count; returns it before and after.
    #[inline]
    pub(crate) fn add(&mut self, time: T, diff: i64) -> (i64, i64) {
        match self {
            Self::Ring(ring) => {
                let found = find(ring, &time);
                let (at, length) = (found.unwrap_or_else(|at| at), ring.len());
                let moved = at.min(length - at);
                match found {
                    Ok(at) => {
                        let before = ring[at].1;
                        ring[at].1 += diff;
                        if ring[at].1 != 0 {
                            return (before, before + diff);
                        }
                        if at == 0 {
                            ring.pop_front();
                            return (before, 0);
                        }
                        if moved <= MOVED {
                            ring.remove(at);
                            return (before, 0);
                        }
                        ring[at].1 = before;
                    }
                    Err(_) if diff == 0 => return (0, 0),
                    Err(at) if at == length => {
                        ring.push_back((time, diff));
                        return (0, diff);
                    }
                    Err(at) if moved <= MOVED => {
                        ring.insert(at, (time, diff));
                        return (0, diff);
                    }
                    Err(_) => {}
                }
                *self = Self::Tree(std::mem::take(ring).into_iter().collect());
                self.add(time, diff)
            }
            Self::Tree(tree) => {
                let result = match tree.entry(time) {
                    Entry::Vacant(_) if diff == 0 => (0, 0),
                    Entry::Vacant(entry) => (0, *entry.insert(diff)),
                    Entry::Occupied(mut entry) => {
                        let before = *entry.get();
                        *entry.get_mut() += diff;
                        if before + diff == 0 {
                            entry.remove();
                        }
                        (before, before + diff)
                    }
                };
                if tree.len() < SHORT {
                    *self = Self::Ring(std::mem::take(tree).into_iter().collect());
                }
                result
            }
        }
    }

    pub(crate) fn get(&self, time: &T) -> i64 {
        match self {
            Self::Ring(ring) => find(ring, time).map_or(0, |at| ring[at].1),
            Self::Tree(tree) => tree.get(time).copied().unwrap_or(0),
        }
    }

    /// The first time with a positive count.
    #[inline]
    pub(crate) fn first_live(&self) -> Option<&T> {
        match self {
            Self::Ring(ring) => ring.iter().find(|entry| entry.1 > 0).map(|entry| &entry.0),
            Self::Tree(tree) => tree.iter().find(|entry| *entry.1 > 0).map(|entry| entry.0),
        }
    }

    /// The times strictly after `time` with a positive count, in order.
    pub(crate) fn live_after<'a>(&'a self, time: &T) -> impl Iterator<Item = &'a T> + use<'a, T> {
        let (ring, tree) = match self {
            Self::Ring(ring) => {
                let from = find(ring, time).map_or_else(|at| at, |at| at + 1);
                (Some(ring.range(from..)), None)
            }
            Self::Tree(tree) => (None, Some(tree.range((Bound::Excluded(time), Bound::Unbounded)))),
        };
        ring.into_iter()
            .flatten()
            .map(|entry| (&entry.0, entry.1))
            .chain(tree.into_iter().flatten().map(|entry| (entry.0, *entry.1)))
            .filter(|entry| entry.1 > 0)
            .map(|entry| entry.0)
    }

    /// All nonzero counts in order of time.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&T, i64)> {
        let (ring, tree) = match self {
            Self::Ring(ring) => (Some(ring.iter()), None),
            Self::Tree(tree) => (None, Some(tree.iter())),
        };
        ring.into_iter()
            .flatten()
            .map(|entry| (&entry.0, entry.1))
            .chain(tree.into_iter().flatten().map(|entry| (entry.0, *entry.1)))
    }
}

/// Position of a time, or where it would go; the ends first.
#[inline]
fn find<T: Ord>(ring: &VecDeque<(T, i64)>, time: &T) -> Result<usize, usize> {
    let Some(back) = ring.back() else {
        return Err(0);
    };
    if *time > back.0 {
        return Err(ring.len());
    }
    if *time == back.0 {
        return Ok(ring.len() - 1);
    }
    if *time == ring[0].0 {
        return Ok(0);
    }
    ring.binary_search_by(|entry| entry.0.cmp(time))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_rings_become_trees_and_back() {
        let mut counts = Counts::new();
        for time in 0..4096u64 {
            assert_eq!(counts.add(2 * time, 1), (0, 1));
        }
        assert!(matches!(counts, Counts::Ring(_)));
        assert_eq!(counts.add(4097, -1), (0, -1));
        assert!(matches!(counts, Counts::Tree(_)));
        assert_eq!(counts.add(4097, 1), (-1, 0));
        assert_eq!((counts.len(), counts.get(&4096), counts.get(&4097)), (4096, 1, 0));
        assert_eq!(counts.live_after(&4096).next(), Some(&4098));
        for time in 0..4090u64 {
            assert_eq!(counts.add(2 * time, -1), (1, 0));
        }
        assert!(matches!(counts, Counts::Ring(_)));
        assert_eq!(counts.first_live(), Some(&8180));
    }

    #[test]
    fn removal_in_the_middle_keeps_the_count() {
        let mut counts = Counts::new();
        for time in 0..2000u64 {
            counts.add(time, 2);
        }
        assert_eq!(counts.add(1000, -2), (2, 0));
        assert!(matches!(counts, Counts::Tree(_)));
        assert_eq!((counts.len(), counts.get(&1000), counts.get(&999)), (1999, 0, 2));
    }
}
