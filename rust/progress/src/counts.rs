//! Counts per time in `Ord` order, for [`crate::MutableAntichain`].
//!
//! Times with positive counts are *live*, those with negative ones *owed*: a consumption was heard of before its production. They
//! are kept apart, so that whoever looks for a live time passes over no owed one: a worker whose input stays behind while another
//! one sends ten thousand epochs owes them all, and pays nothing for that when its frontier moves.
//!
//! Live times mostly move like a queue: the newest enters at the end, the oldest leaves at the front. A ring serves that in
//! a few nanoseconds and needs no nodes. A change that is far from both ends of a long ring would move many entries, and
//! under partial orders the next minimal times may lie anywhere in it; so the first such change, and the growth of a ring
//! of partially ordered times, turn it into a search tree, in logarithmic time from then on. Once short again it becomes a
//! ring. Both turns are paid for by the changes that lead to them.

use std::cmp::Ordering;
use std::collections::{VecDeque, vec_deque};
use std::iter::Peekable;

use crate::order::PartialOrder;
use crate::times::{Entries, Times};

/// The most entries that a change in a ring may move. Small under the slow interpreter, so that its tests reach trees.
const MOVED: usize = if cfg!(miri) { 8 } else { 256 };
/// The longest ring of partially ordered times.
const LONG: usize = 4 * MOVED;
/// A tree shorter than this becomes a ring.
const SHORT: usize = MOVED / 4;

/// Nonzero counts by time.
#[derive(Clone, Debug)]
pub(crate) struct Counts<T> {
    live: Store<T>,
    /// What is missing to zero. No time is in both.
    owed: Store<T>,
}

/// What a change did to a count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Change {
    pub(crate) before: i64,
    pub(crate) after: i64,
    /// Where [`Counts::exposed`] finds what lies behind the time, until the next change; of live times, and those that were.
    pub(crate) behind: usize,
}

impl<T> Counts<T> {
    pub(crate) fn new() -> Self {
        Self { live: Store::new(), owed: Store::new() }
    }

    pub(crate) fn len(&self) -> usize {
        self.live.len() + self.owed.len()
    }
}

impl<T: PartialOrder + Ord + Clone> Counts<T> {
    /// Adds to a count.
    #[inline]
    pub(crate) fn add(&mut self, time: &T, diff: i64) -> Change {
        if self.owed.len() > 0 {
            return self.add_owing(time, diff);
        }
        let change = self.live.add(time, diff);
        if change.after < 0 {
            self.owed.add(time, -change.after);
        }
        change
    }

    /// As [`Counts::add`] where some times are owed.
    #[inline(never)]
    fn add_owing(&mut self, time: &T, diff: i64) -> Change {
        let owed = self.owed.get(time);
        if owed == 0 {
            let change = self.live.add(time, diff);
            if change.after < 0 {
                self.owed.add(time, -change.after);
            }
            return change;
        }
        let (before, after) = (-owed, diff - owed);
        self.owed.add(time, -diff);
        let behind = if after > 0 { self.live.add(time, after).behind } else { 0 };
        Change { before, after, behind }
    }

    pub(crate) fn get(&self, time: &T) -> i64 {
        match self.live.get(time) {
            0 => -self.owed.get(time),
            count => count,
        }
    }

    /// The first live time.
    #[inline]
    pub(crate) fn first_live(&self) -> Option<&T> {
        match &self.live {
            Store::Ring(ring) => ring.front().map(|entry| &entry.0),
            Store::Tree(tree) => tree.iter().next().map(|entry| entry.0),
        }
    }

    /// The first live time behind `after` that lies before `until` and is not `dominated`, and where to
    /// go on behind it. `behind` is where the last change or this function said that the entries behind `after` are.
    pub(crate) fn exposed(
        &self,
        behind: usize,
        after: &T,
        until: Option<&T>,
        dominated: impl Fn(&T) -> bool,
    ) -> Option<(&T, usize)> {
        match &self.live {
            Store::Ring(ring) => {
                let mut at = behind;
                while let Some((time, _)) = ring.get(at) {
                    at += 1;
                    if until.is_some_and(|until| until <= time) {
                        return None;
                    }
                    if !dominated(time) {
                        return Some((time, at));
                    }
                }
                None
            }
            Store::Tree(tree) => {
                let blocked = |time: &T| until.is_some_and(|until| until <= time) || dominated(time);
                tree.first_free(Some(after), blocked).map(|entry| (entry.0, 0))
            }
        }
    }

    /// All nonzero counts in order of time.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&T, i64)> {
        let owed = self.owed.iter().map(|(time, count)| (time, -count));
        Merge { live: self.live.iter().peekable(), owed: owed.peekable() }
    }
}

/// Counts above zero by time.
#[derive(Clone, Debug)]
enum Store<T> {
    Ring(VecDeque<(T, i64)>),
    Tree(Times<T, i64>),
}

impl<T> Store<T> {
    fn new() -> Self {
        Self::Ring(VecDeque::new())
    }

    #[inline]
    fn len(&self) -> usize {
        match self {
            Self::Ring(ring) => ring.len(),
            Self::Tree(tree) => tree.len(),
        }
    }
}

impl<T: PartialOrder + Ord + Clone> Store<T> {
    /// Adds to a count. One that is not above zero then is not kept.
    #[inline]
    fn add(&mut self, time: &T, diff: i64) -> Change {
        match self {
            Self::Ring(ring) => {
                let found = find(ring, time);
                let (at, length) = (found.unwrap_or_else(|at| at), ring.len());
                let near = if T::DIMENSION <= 1 { at.min(length - at) <= MOVED } else { length <= LONG };
                match found {
                    Ok(at) => {
                        let count = &mut ring[at].1;
                        let before = *count;
                        let after = before + diff;
                        if after > 0 {
                            *count = after;
                            return Change { before, after, behind: at + 1 };
                        }
                        if at == 0 {
                            ring.pop_front();
                            return Change { before, after, behind: 0 };
                        }
                        if near {
                            ring.remove(at);
                            return Change { before, after, behind: at };
                        }
                    }
                    Err(behind) if diff <= 0 => return Change { before: 0, after: diff, behind },
                    Err(at) if near => {
                        if at == length {
                            ring.push_back((time.clone(), diff));
                        } else {
                            ring.insert(at, (time.clone(), diff));
                        }
                        return Change { before: 0, after: diff, behind: at + 1 };
                    }
                    Err(_) => {}
                }
                *self = Self::Tree(std::mem::take(ring).into_iter().collect());
                self.add(time, diff)
            }
            Self::Tree(tree) => {
                if diff > 0 {
                    let count = tree.entry(time.clone(), || 0);
                    let before = *count;
                    *count += diff;
                    return Change { before, after: *count, behind: 0 };
                }
                let before = tree.get(time).copied().unwrap_or(0);
                let after = before + diff;
                if after > 0 {
                    *tree.entry(time.clone(), || 0) = after;
                } else if before > 0 {
                    tree.remove(time);
                    if tree.len() < SHORT {
                        let counts = tree.iter().map(|(time, count)| (time.clone(), *count)).collect::<VecDeque<_>>();
                        let behind = counts.partition_point(|entry| entry.0 <= *time);
                        *self = Self::Ring(counts);
                        return Change { before, after, behind };
                    }
                }
                Change { before, after, behind: 0 }
            }
        }
    }

    fn get(&self, time: &T) -> i64 {
        match self {
            Self::Ring(ring) => find(ring, time).map_or(0, |at| ring[at].1),
            Self::Tree(tree) => tree.get(time).copied().unwrap_or(0),
        }
    }

    fn iter(&self) -> Iter<'_, T> {
        match self {
            Self::Ring(ring) => Iter::Ring(ring.iter()),
            Self::Tree(tree) => Iter::Tree(tree.iter()),
        }
    }
}

/// The counts of a [`Store`] in order of time.
#[derive(Debug)]
enum Iter<'a, T> {
    Ring(vec_deque::Iter<'a, (T, i64)>),
    Tree(Entries<'a, T, i64>),
}

impl<'a, T> Iterator for Iter<'a, T> {
    type Item = (&'a T, i64);
    fn next(&mut self) -> Option<Self::Item> {
        match self {
            Self::Ring(ring) => ring.next().map(|entry| (&entry.0, entry.1)),
            Self::Tree(tree) => tree.next().map(|entry| (entry.0, *entry.1)),
        }
    }
}

/// Live and owed counts, which share no time, in order.
struct Merge<L: Iterator, O: Iterator> {
    live: Peekable<L>,
    owed: Peekable<O>,
}

impl<'a, T: Ord + 'a, L, O> Iterator for Merge<L, O>
where
    L: Iterator<Item = (&'a T, i64)>,
    O: Iterator<Item = (&'a T, i64)>,
{
    type Item = (&'a T, i64);
    fn next(&mut self) -> Option<Self::Item> {
        match (self.live.peek(), self.owed.peek()) {
            (Some(live), Some(owed)) if owed.0 < live.0 => self.owed.next(),
            (Some(_), _) => self.live.next(),
            (None, _) => self.owed.next(),
        }
    }
}

/// Position of a time, or where it would go; the ends first.
#[inline]
fn find<T: Ord>(ring: &VecDeque<(T, i64)>, time: &T) -> Result<usize, usize> {
    let Some(back) = ring.back() else {
        return Err(0);
    };
    match time.cmp(&back.0) {
        Ordering::Greater => Err(ring.len()),
        Ordering::Equal => Ok(ring.len() - 1),
        Ordering::Less if *time == ring[0].0 => Ok(0),
        Ordering::Less => ring.binary_search_by(|entry| entry.0.cmp(time)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timestamp::Product;

    fn added(counts: &mut Counts<u64>, time: u64, diff: i64) -> (i64, i64) {
        let change = counts.add(&time, diff);
        (change.before, change.after)
    }

    #[test]
    fn long_rings_become_trees_and_back() {
        let long = 16 * MOVED as u64;
        let mut counts = Counts::new();
        for time in 0..long {
            assert_eq!(added(&mut counts, 2 * time, 1), (0, 1));
        }
        assert!(matches!(counts.live, Store::Ring(_)));
        assert_eq!(added(&mut counts, long + 1, 1), (0, 1));
        assert!(matches!(counts.live, Store::Tree(_)));
        assert_eq!(added(&mut counts, long + 1, -1), (1, 0));
        assert_eq!((counts.len() as u64, counts.get(&long), counts.get(&(long + 1))), (long, 1, 0));
        assert_eq!(counts.exposed(0, &long, None, |_| false), Some((&(long + 2), 0)));
        for time in 0..long - 1 {
            assert_eq!(added(&mut counts, 2 * time, -1), (1, 0));
        }
        assert!(matches!(counts.live, Store::Ring(_)));
        assert_eq!(counts.first_live(), Some(&(2 * long - 2)));
    }

    #[test]
    fn removal_in_the_middle_keeps_the_count() {
        let middle = 4 * MOVED as u64;
        let mut counts = Counts::new();
        for time in 0..2 * middle {
            counts.add(&time, 2);
        }
        assert_eq!(added(&mut counts, middle, -2), (2, 0));
        assert!(matches!(counts.live, Store::Tree(_)));
        assert_eq!((counts.len() as u64, counts.get(&middle), counts.get(&(middle - 1))), (2 * middle - 1, 0, 2));
    }

    #[test]
    fn what_is_owed_lies_apart_and_comes_back() {
        let owed = 8 * LONG as u64;
        let mut counts = Counts::new();
        counts.add(&owed, 3);
        for time in 0..owed {
            assert_eq!(added(&mut counts, time, -2), (0, -2));
        }
        assert_eq!((counts.live.len(), counts.len() as u64, counts.get(&7)), (1, owed + 1, -2));
        assert_eq!(counts.first_live(), Some(&owed));
        assert_eq!(added(&mut counts, owed, -5), (3, -2));
        assert_eq!((counts.first_live(), counts.get(&owed)), (None, -2));
        assert!(counts.iter().map(|entry| *entry.0).eq(0..=owed), "in order of time");
        assert_eq!((added(&mut counts, 9, 2), added(&mut counts, 11, 5)), ((-2, 0), (-2, 3)));
        assert_eq!((counts.first_live(), counts.get(&9), counts.get(&11)), (Some(&11), 0, 3));
        assert_eq!(
            counts.iter().skip(8).take(4).map(|entry| (*entry.0, entry.1)).collect::<Vec<_>>(),
            [(8, -2), (10, -2), (11, 3), (12, -2)]
        );
        assert_eq!((added(&mut counts, 11, -3), added(&mut counts, 1, 0)), ((3, 0), (-2, -2)));
        assert_eq!((counts.live.len(), counts.len() as u64), (0, owed - 1));
    }

    /// The position that a change reports is the right one in every form, also where the change ends a form.
    #[test]
    fn what_is_behind_a_change_is_found() {
        let last = 2 * LONG as u64;
        let at = |time: u64| Product::new(time, 0u64);
        let mut counts = Counts::new();
        for time in 0..=last {
            counts.add(&at(time), 1);
        }
        assert!(matches!(counts.live, Store::Tree(_)));
        for time in (1..last).rev() {
            let change = counts.add(&at(time), -1);
            assert_eq!((change.before, change.after), (1, 0));
            let found = counts.exposed(change.behind, &at(time), None, |_| false);
            assert_eq!(found.map(|found| *found.0), Some(at(last)), "{} are left", counts.len());
            assert!(counts.exposed(change.behind, &at(time), Some(&at(last)), |_| false).is_none());
        }
        assert!(matches!(counts.live, Store::Ring(_)));
        for (time, expected) in [(0, last), (last, last + 1)] {
            counts.add(&at(last + 1), 1);
            let change = counts.add(&at(time), 1);
            let found = counts.exposed(change.behind, &at(time), None, |_| false);
            assert_eq!(found.map(|found| found.0.outer), Some(expected));
        }
    }
}
