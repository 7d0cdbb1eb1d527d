//! Panes by where they start.
//!
//! Nearly always there is one, or the last one is asked for: so the last ones lie side by side, the first of them in the bin itself. Rows of one epoch
//! may be of thousands of panes in any order, as where a whole table is; those before the last ones are in a tree, so that each costs the logarithm of
//! how many there are.
//!
//! Invariants: starts ascend, in the tree and behind it; no start is there twice; where there are panes, there are last ones.

use std::collections::BTreeMap;
use std::ops::{Bound, Range};

use smallvec::SmallVec;

use super::Pane;

/// Panes that lie side by side, at most.
const LAST: usize = 64;

/// See the module.
#[derive(Default)]
pub(super) struct Live {
    last: SmallVec<[Pane; 1]>,
    /// Those before; none where there are few.
    #[expect(clippy::box_collection, reason = "one word of a bin where there are few")]
    older: Option<Box<BTreeMap<i64, Pane>>>,
}

impl Live {
    #[inline]
    pub(super) fn last(&self) -> Option<&Pane> {
        self.last.last()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.last.is_empty()
    }

    /// The only one.
    pub(super) fn only(&self) -> Option<&Pane> {
        match (&self.last[..], &self.older) {
            ([only], None) => Some(only),
            _ => None,
        }
    }

    /// Where one of the last panes is, or where it belongs among them.
    #[inline]
    fn find(&self, start: i64) -> Result<usize, usize> {
        match self.last.last() {
            Some(last) if last.start == start => Ok(self.last.len() - 1),
            Some(last) if last.start > start => self.last.binary_search_by_key(&start, |pane| pane.start),
            _ => Err(self.last.len()),
        }
    }

    #[inline]
    pub(super) fn get(&self, start: i64) -> Option<&Pane> {
        match self.find(start) {
            Ok(at) => Some(&self.last[at]),
            Err(0) => self.older.as_ref()?.get(&start),
            Err(_) => None,
        }
    }

    #[inline]
    pub(super) fn get_mut(&mut self, start: i64) -> Option<&mut Pane> {
        match self.find(start) {
            Ok(at) => Some(&mut self.last[at]),
            Err(0) => self.older.as_mut()?.get_mut(&start),
            Err(_) => None,
        }
    }

    /// The pane that starts there. Where there is none it is made, knowing the last one if it comes behind it.
    #[inline]
    pub(super) fn get_or_make(&mut self, start: i64, make: impl FnOnce(Option<&Pane>) -> Pane) -> &mut Pane {
        match self.find(start) {
            Ok(at) => &mut self.last[at],
            Err(at) => self.make(at, start, make),
        }
    }

    fn make(&mut self, at: usize, start: i64, make: impl FnOnce(Option<&Pane>) -> Pane) -> &mut Pane {
        if at == 0 && (self.older.is_some() || self.last.len() >= LAST) {
            let older = self.older.get_or_insert_default();
            return older.entry(start).or_insert_with(|| make(None));
        }
        let pane = make(self.last.last().filter(|_| at == self.last.len()));
        self.last.insert(at, pane);
        let mut at = at;
        if self.last.len() > LAST {
            let many = LAST / 2;
            // One that was put among these is asked for there.
            let kept = many.min(at);
            self.older.get_or_insert_default().extend(self.last.drain(..kept).map(|pane| (pane.start, pane)));
            at -= kept;
        }
        &mut self.last[at]
    }

    /// Those that start at one or behind it, in order.
    pub(super) fn range(&self, starts: Range<i64>) -> impl Iterator<Item = &Pane> {
        let from = self.find(starts.start).unwrap_or_else(|at| at);
        // Those in the tree are before all of the last ones.
        let older = self.older.as_deref().filter(|_| from == 0 && starts.start < starts.end);
        let older = older.map(|older| older.range(starts.clone()).map(|(_, pane)| pane)).into_iter().flatten();
        older.chain(self.last[from..].iter().take_while(move |pane| pane.start < starts.end))
    }

    /// Where the first one starts that starts there or behind.
    pub(super) fn first_at(&self, at_least: i64) -> Option<i64> {
        self.next(Bound::Included(at_least)).map(|pane| pane.start)
    }

    /// The first one behind a start; of all where none is given.
    pub(super) fn behind(&self, start: Option<i64>) -> Option<&Pane> {
        self.next(start.map_or(Bound::Unbounded, Bound::Excluded))
    }

    fn next(&self, from: Bound<i64>) -> Option<&Pane> {
        let older = self.older.as_ref().and_then(|older| older.range((from, Bound::Unbounded)).next());
        older.map(|(_, pane)| pane).or_else(|| {
            let at = match from {
                Bound::Unbounded => 0,
                Bound::Included(start) => self.find(start).unwrap_or_else(|at| at),
                Bound::Excluded(start) => self.find(start).map_or_else(|at| at, |at| at + 1),
            };
            self.last.get(at)
        })
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Pane> {
        self.older.iter().flat_map(|older| older.values()).chain(&self.last)
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Pane> {
        self.older.iter_mut().flat_map(|older| older.values_mut()).chain(&mut self.last)
    }

    /// Takes all away, in order.
    pub(super) fn take(&mut self) -> impl Iterator<Item = Pane> {
        let Self { last, older } = std::mem::take(self);
        older.into_iter().flat_map(|older| older.into_values()).chain(last)
    }

    /// Takes those away that start before `end`, in order.
    pub(super) fn take_before(&mut self, end: i64) -> impl Iterator<Item = Pane> {
        let count = self.find(end).unwrap_or_else(|at| at);
        let older = match &mut self.older {
            Some(older) if count == 0 => {
                let rest = older.split_off(&end);
                let gone = std::mem::replace(&mut **older, rest);
                if older.is_empty() {
                    self.older = None;
                }
                Some(gone)
            }
            _ => self.older.take().map(|older| *older),
        };
        older.into_iter().flatten().map(|(_, pane)| pane).chain(self.last.drain(..count))
    }

    /// Takes one away.
    pub(super) fn remove(&mut self, start: i64) -> Option<Pane> {
        match self.find(start) {
            Ok(at) => {
                let pane = self.last.remove(at);
                self.refill();
                Some(pane)
            }
            Err(0) => {
                let older = self.older.as_mut()?;
                let pane = older.remove(&start);
                if older.is_empty() {
                    self.older = None;
                }
                pane
            }
            Err(_) => None,
        }
    }

    /// Where the last ones are gone those before are the last ones.
    fn refill(&mut self) {
        if !self.last.is_empty() {
            return;
        }
        if let Some(older) = &mut self.older {
            self.last.extend(std::iter::from_fn(|| older.pop_last()).take(LAST / 2).map(|(_, pane)| pane));
            self.last.reverse();
            if older.is_empty() {
                self.older = None;
            }
        }
    }

    /// Adds panes that start where there are none.
    pub(super) fn add(&mut self, panes: impl Iterator<Item = Pane>) {
        for pane in panes {
            let start = pane.start;
            self.get_or_make(start, |_| pane);
        }
    }

    /// Keeps those of which something holds.
    pub(super) fn retain(&mut self, keeps: impl Fn(&Pane) -> bool) {
        self.last.retain(|pane| keeps(pane));
        if let Some(older) = &mut self.older {
            older.retain(|_, pane| keeps(pane));
            if older.is_empty() {
                self.older = None;
            }
        }
        self.refill();
    }
}

#[cfg(test)]
mod tests {
    use arrow_schema::DataType;
    use proptest::prelude::*;

    use super::*;
    use crate::key::KeyKind;
    use crate::record::Shape;
    use crate::table::Table;

    fn starts<'a>(panes: impl Iterator<Item = &'a Pane>) -> Vec<i64> {
        panes.map(|pane| pane.start).collect()
    }

    proptest! {
        #[test]
        fn they_are_what_a_tree_is(deeds in prop::collection::vec((0_u8..12, -200_i64..200, 0_i64..100), 1..600)) {
            let shape = Shape { key: KeyKind::of(&[DataType::Int64]), accs: Default::default(), track: false };
            let (mut live, mut twin) = (Live::default(), std::collections::BTreeSet::new());
            for (deed, start, more) in deeds {
                match deed {
                    0 => {
                        let gone: Vec<i64> = live.take_before(start - 150).map(|pane| pane.start).collect();
                        let rest = twin.split_off(&(start - 150));
                        prop_assert_eq!(gone, std::mem::replace(&mut twin, rest).into_iter().collect::<Vec<_>>());
                    }
                    1 => prop_assert_eq!(live.remove(start).map(|pane| pane.start), twin.take(&start)),
                    2 if more < 5 => {
                        live.retain(|pane| pane.start % 3 != more % 3);
                        twin.retain(|one| one % 3 != more % 3);
                    }
                    3 if more < 2 => {
                        let gone: Vec<i64> = live.take().map(|pane| pane.start).collect();
                        prop_assert_eq!(gone, std::mem::take(&mut twin).into_iter().collect::<Vec<_>>());
                    }
                    _ => {
                        let behind = twin.last().is_none_or(|last| *last < start);
                        let mut seen = None;
                        let made = live.get_or_make(start, |last| {
                            seen = Some(last.map(|last| last.start));
                            Pane { start, table: Table::new(&shape), fresh: false }
                        });
                        prop_assert_eq!(made.start, start);
                        let last = twin.last().copied().filter(|_| behind);
                        prop_assert_eq!(seen, twin.insert(start).then_some(last));
                    }
                }
                prop_assert_eq!(starts(live.iter()), twin.iter().copied().collect::<Vec<_>>());
                let mut all = Vec::new();
                live.iter_mut().for_each(|pane| all.push(pane.start));
                prop_assert_eq!(all, starts(live.iter()));
                prop_assert_eq!(live.is_empty(), twin.is_empty());
                prop_assert_eq!(live.last().map(|pane| pane.start), twin.last().copied());
                prop_assert_eq!(live.only().map(|pane| pane.start), twin.first().copied().filter(|_| twin.len() == 1));
                let within = start..start + more;
                prop_assert_eq!(starts(live.range(within.clone())), twin.range(within).copied().collect::<Vec<_>>());
                prop_assert_eq!(live.first_at(start), twin.range(start..).next().copied());
                prop_assert_eq!(live.behind(Some(start)).map(|pane| pane.start), twin.range(start + 1..).next().copied());
                prop_assert_eq!(live.behind(None).map(|pane| pane.start), twin.first().copied());
                prop_assert_eq!(live.get(start).is_some(), twin.contains(&start));
                prop_assert_eq!(live.get_mut(start).is_some(), twin.contains(&start));
            }
        }
    }
}
