//! Frontiers: antichains as sets, and antichains maintained from counts.
//!
//! A frontier holds the minimal times that may still appear. A time is *in advance of* it, hence still possible, if some
//! element is less than or equal to it; the empty frontier says that nothing more comes.
//!
//! [`MutableAntichain`] keeps signed counts of times and the minimal ones among those with positive count. Negative counts
//! are legal: a consumption may be heard of before its production. They are kept apart: however many there are, no search for
//! minimal times looks at them. Costs per change, for n times with counts, and of those that are live a frontier of width w: O(log n) under total orders; for pairs of totally ordered coordinates O(log n + w), and as much again for each
//! time that enters the frontier when one leaves; otherwise O(w log n) where times have lower bounds and are spread well,
//! O(n · w) at worst.
//!
//! Source: Megaphone Def. 1-2, Faucet §3. Departure: no rebuilding over all live times; see [`PartialOrder::DIMENSION`].

use std::fmt::Debug;

use smallvec::SmallVec;

use crate::change_batch::{Drain, drain_net};
use crate::counts::Counts;
use crate::order::PartialOrder;

/// A set of mutually incomparable elements. Equality is that of sets.
#[derive(Clone, Debug)]
pub struct Antichain<T> {
    elements: SmallVec<[T; 1]>,
}

impl<T> Default for Antichain<T> {
    fn default() -> Self {
        Self { elements: SmallVec::new() }
    }
}

impl<T> Antichain<T> {
    /// The empty antichain: nothing is in advance of it.
    pub fn new() -> Self {
        Self::default()
    }

    /// The antichain of one element.
    pub fn from_elem(element: T) -> Self {
        Self { elements: SmallVec::from_buf([element]) }
    }

    /// The elements, in no particular order.
    pub fn elements(&self) -> &[T] {
        &self.elements
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.elements.is_empty()
    }

    /// How many elements there are.
    pub fn len(&self) -> usize {
        self.elements.len()
    }

    /// Removes all elements.
    pub fn clear(&mut self) {
        self.elements.clear();
    }
}

impl<T: PartialOrder> Antichain<T> {
    /// Inserts an element unless one at or below it is present, and removes those above it. Returns whether it was inserted.
    pub fn insert(&mut self, element: T) -> bool {
        if self.less_equal(&element) {
            return false;
        }
        self.elements.retain(|other| !element.less_equal(other));
        self.elements.push(element);
        true
    }

    /// Whether some element is less than or equal to `time`: whether `time` is in advance of this frontier.
    pub fn less_equal(&self, time: &T) -> bool {
        self.elements.iter().any(|element| element.less_equal(time))
    }

    /// Whether some element is strictly less than `time`.
    pub fn less_than(&self, time: &T) -> bool {
        self.elements.iter().any(|element| element.less_than(time))
    }
}

impl<T: Eq> PartialEq for Antichain<T> {
    fn eq(&self, other: &Self) -> bool {
        self.len() == other.len() && self.elements.iter().all(|element| other.elements.contains(element))
    }
}

impl<T: Eq> Eq for Antichain<T> {}

impl<T: PartialOrder> FromIterator<T> for Antichain<T> {
    fn from_iter<I: IntoIterator<Item = T>>(elements: I) -> Self {
        let mut antichain = Self::new();
        for element in elements {
            antichain.insert(element);
        }
        antichain
    }
}

impl<T> IntoIterator for Antichain<T> {
    type Item = T;
    type IntoIter = smallvec::IntoIter<[T; 1]>;
    fn into_iter(self) -> Self::IntoIter {
        self.elements.into_iter()
    }
}

/// The antichain of the minimal times with positive count.
///
/// ```
/// use penstock_progress::MutableAntichain;
/// let mut frontier = MutableAntichain::from_elem(0u64);
/// assert_eq!(frontier.update_iter([(3, 1), (5, 1)]).count(), 0);
/// assert_eq!(frontier.update_iter([(0, -1)]).collect::<Vec<_>>(), [(0, -1), (3, 1)]);
/// assert_eq!(frontier.frontier(), [3]);
/// ```
#[derive(Clone, Debug)]
pub struct MutableAntichain<T> {
    counts: Counts<T>,
    /// The minimal live times, ascending by `Ord`.
    frontier: Vec<T>,
    /// Scratch: changes of the frontier during one update.
    changes: Vec<(T, i64)>,
}

impl<T> Default for MutableAntichain<T> {
    fn default() -> Self {
        Self { counts: Counts::new(), frontier: Vec::new(), changes: Vec::new() }
    }
}

impl<T> MutableAntichain<T> {
    /// No live times.
    pub fn new() -> Self {
        Self::default()
    }

    /// The minimal times with positive count, ascending by `Ord`.
    #[inline]
    pub fn frontier(&self) -> &[T] {
        &self.frontier
    }

    /// Whether the frontier is empty. Counts may be negative all the same, see [`Self::live`].
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.frontier.is_empty()
    }

    /// How many times have a count other than zero.
    pub fn live(&self) -> usize {
        self.counts.len()
    }
}

impl<T: PartialOrder + Ord + Clone> MutableAntichain<T> {
    /// One time, counted once.
    pub fn from_elem(time: T) -> Self {
        let mut antichain = Self::new();
        antichain.update_iter([(time, 1)]);
        antichain
    }

    /// Applies changes of counts, all of them before this returns, and drains the net changes of the frontier: `-1` for
    /// each element that left, `+1` for each that entered.
    pub fn update_iter(&mut self, updates: impl IntoIterator<Item = (T, i64)>) -> Drain<'_, T> {
        if T::DIMENSION <= 1 {
            for (time, diff) in updates {
                self.counts.add(&time, diff);
            }
            let least = self.counts.first_live();
            if least != self.frontier.first() {
                match (self.frontier.first_mut(), least) {
                    (Some(first), Some(least)) => {
                        self.changes.push((std::mem::replace(first, least.clone()), -1));
                        self.changes.push((least.clone(), 1));
                    }
                    (_, Some(least)) => {
                        self.changes.push((least.clone(), 1));
                        self.frontier.push(least.clone());
                    }
                    (_, None) => self.changes.extend(self.frontier.pop().map(|time| (time, -1))),
                }
            }
        } else {
            for (time, diff) in updates {
                let change = self.counts.add(&time, diff);
                if change.before <= 0 && change.after > 0 {
                    self.enter(time);
                } else if change.before > 0 && change.after <= 0 {
                    self.leave(time, change.behind);
                }
            }
        }
        drain_net(&mut self.changes)
    }

    /// A time became live.
    fn enter(&mut self, time: T) {
        let Err(at) = self.frontier.binary_search(&time) else {
            return;
        };
        // The linear order extends the partial one: what is below `time` lies before it, what is above behind it. In two
        // dimensions the second coordinate falls along the frontier, so the neighbours decide for all.
        let before = &self.frontier[..at];
        let dominated = match T::DIMENSION {
            2 => before.last().is_some_and(|last| last.less_equal(&time)),
            _ => before.iter().any(|other| other.less_equal(&time)),
        };
        if dominated {
            return;
        }
        if T::DIMENSION == 2 {
            let behind = self.frontier[at..].iter();
            let above = behind.take_while(|other| time.less_equal(other)).count();
            self.changes.extend(self.frontier.drain(at..at + above).map(|other| (other, -1)));
        } else {
            let Self { frontier, changes, .. } = self;
            frontier.retain(|other| {
                let above = time.less_equal(other);
                if above {
                    changes.push((other.clone(), -1));
                }
                !above
            });
        }
        self.changes.push((time.clone(), 1));
        self.frontier.insert(at, time);
    }

    /// A time is live no more: if it was minimal, others may now be. `behind` says where in the counts they are.
    fn leave(&mut self, time: T, mut behind: usize) {
        let Ok(mut place) = self.frontier.binary_search(&time) else {
            return;
        };
        let Self { counts, frontier, changes } = self;
        if T::DIMENSION == 2 {
            // Whatever lies behind the next element of the frontier and above the one that left is above that element too,
            // and of the elements before a time the last one decides for all. The first time that is found takes the place
            // of the one that left.
            let first = counts.exposed(behind, &time, frontier.get(place + 1), |other| {
                place > 0 && frontier[place - 1].less_equal(other)
            });
            let Some((other, next)) = first else {
                changes.push((frontier.remove(place), -1));
                return;
            };
            changes.push((std::mem::replace(&mut frontier[place], other.clone()), -1));
            changes.push((other.clone(), 1));
            behind = next;
            place += 1;
            while let Some((other, next)) = counts.exposed(behind, &frontier[place - 1], frontier.get(place), |other| {
                frontier[place - 1].less_equal(other)
            }) {
                changes.push((other.clone(), 1));
                frontier.insert(place, other.clone());
                behind = next;
                place += 1;
            }
        } else {
            let mut after = frontier.remove(place);
            changes.push((time, -1));
            while let Some((other, next)) =
                counts.exposed(behind, &after, None, |other| frontier.iter().any(|below| below.less_equal(other)))
            {
                changes.push((other.clone(), 1));
                place = frontier.partition_point(|element| element < other);
                frontier.insert(place, other.clone());
                (behind, after) = (next, other.clone());
            }
        }
    }

    /// Whether some element of the frontier is less than or equal to `time`.
    #[inline]
    pub fn less_equal(&self, time: &T) -> bool {
        self.frontier.iter().any(|element| element.less_equal(time))
    }

    /// Whether some element of the frontier is strictly less than `time`.
    #[inline]
    pub fn less_than(&self, time: &T) -> bool {
        self.frontier.iter().any(|element| element.less_than(time))
    }

    /// The count of a time, zero if it has none.
    pub fn count_for(&self, time: &T) -> i64 {
        self.counts.get(time)
    }

    /// All counts other than zero, in order of time.
    pub fn counts(&self) -> impl Iterator<Item = (&T, i64)> {
        self.counts.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timestamp::Product;

    fn at(outer: u64, inner: u64) -> Product<u64, u64> {
        Product::new(outer, inner)
    }

    #[test]
    fn dominated_elements_change_nothing() {
        let mut antichain = Antichain::from_elem(at(0, 5));
        assert!(antichain.insert(at(1, 0)));
        assert!(!antichain.insert(at(1, 5)) && !antichain.insert(at(1, 0)));
        assert_eq!(antichain, [at(1, 0), at(0, 5)].into_iter().collect());
        assert!(antichain.less_equal(&at(1, 0)) && !antichain.less_than(&at(1, 0)));
        assert!(!antichain.less_equal(&at(0, 4)));
        assert!(antichain.insert(at(0, 0)));
        assert_eq!(antichain.elements(), [at(0, 0)]);
        antichain.clear();
        assert!(antichain.is_empty() && !antichain.less_equal(&at(9, 9)));
    }

    #[test]
    fn one_update_reports_net_changes() {
        let mut frontier = MutableAntichain::from_elem(4u64);
        assert_eq!(frontier.update_iter([(4, -1), (2, 1), (4, 1), (2, -1)]).count(), 0);
        let changes: Vec<_> = frontier.update_iter([(4, -1), (7, 1), (9, 1)]).collect();
        assert_eq!(changes, [(4, -1), (7, 1)]);
        assert_eq!((frontier.count_for(&9), frontier.count_for(&4), frontier.live()), (1, 0, 2));
    }

    #[test]
    fn negative_counts_wait_for_their_production() {
        let mut frontier = MutableAntichain::from_elem(5u64);
        assert_eq!(frontier.update_iter([(1, -1)]).count(), 0);
        assert_eq!(frontier.update_iter([(1, 1)]).count(), 0);
        frontier.update_iter([(1, -1), (5, -1)]);
        assert!(frontier.is_empty() && frontier.live() == 1);
        frontier.update_iter([(1, 1)]);
        assert!(frontier.is_empty() && frontier.live() == 0);
    }

    #[test]
    fn leaving_exposes_only_what_nothing_else_covers() {
        let mut frontier = MutableAntichain::new();
        frontier.update_iter([(at(0, 9), 1), (at(1, 3), 1), (at(4, 0), 1)]);
        frontier.update_iter([(at(1, 7), 1), (at(2, 5), 1), (at(3, 4), 1), (at(3, 9), 1), (at(5, 3), 1)]);
        let changes: Vec<_> = frontier.update_iter([(at(1, 3), -1)]).collect();
        assert_eq!(changes, [(at(1, 3), -1), (at(1, 7), 1), (at(2, 5), 1), (at(3, 4), 1)]);
        assert_eq!(frontier.frontier(), [at(0, 9), at(1, 7), at(2, 5), at(3, 4), at(4, 0)]);
        assert_eq!(frontier.update_iter([(at(0, 0), 1)]).len(), 6);
    }
}
