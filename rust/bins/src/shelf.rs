//! Where bins rest while no table holds them.
//!
//! One shelf per state type serves all workers of a process. Three kinds of rest, by operator name and bin:
//! *moving* between two threads (the message carries only a ticket), *deposited* by a table that was dropped, and
//! *retained*: the original of a bin that was copied to another process, kept until the epoch closes.
//!
//! Two things make an original worth keeping, until both are over: see [`Shelf::settle_epoch`] and the next mark. It was here at the last mark: undone, it is the bin as the epoch began. Or it
//! left between two epochs: as it is, it is the bin as the next one begins, and so is the copy, should it have come; of equal
//! copies [`Shelf::rebuild`] keeps the one that the routing chooses. The first is over when the host knows that the epoch of the mark
//! will not be undone, the second when the copy is complete; so an idle stream keeps no original.
//!
//! Invariants: a bin has at most one moving or deposited state in a process, and at most one original for each epoch and
//! purpose. Workers mark an epoch one by one, but no record and no move of it
//! happens before the last of them did (see the crate's life of an epoch). Hence, whatever fails in an epoch, the state at the mark of every bin
//! that was in this process then is still in this process: in a table, on the shelf, or retained.
//!
//! Departure: all of it (Megaphone §4.4 leaves fault tolerance to the system beneath); M-23. Also originals of idle moves: the time
//! of a move (`Config::begins`) says which epoch begins with the bin as it is; only with a journal.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::bin::BinState;
use crate::error::BinsError;
use crate::parts::range_of;
use crate::routing::Routing;
use crate::table::{BinTable, Held};

/// Process-wide resting place of bins. Cloning gives another handle to the same shelf.
///
/// One lock guards it; it is taken once per bin moved, never on the path of data.
pub struct Shelf<S> {
    inner: Arc<Mutex<Inner<S>>>,
}

struct Inner<S> {
    operators: HashMap<String, BTreeMap<u32, Rest<S>>>,
    next_ticket: u64,
    /// No epoch up to this one will be undone.
    settled: Option<u64>,
}

struct Rest<S> {
    resting: Option<(Held<S>, u64)>,
    retained: Vec<Held<S>>,
}

/// What a state is, seen from the beginning of an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    /// Of another time.
    No,
    /// The bin's state, of which another process may have a copy.
    Copy,
    /// The bin's state, and the only one.
    Only,
}

/// Tables for a new generation.
#[derive(Debug)]
pub struct Rebuilt<S: BinState> {
    /// A table per local worker, in the order asked for.
    pub tables: Vec<(u32, BinTable<S>)>,
    /// Bins that local workers own but this process does not have: new, or to be restored. Ascending.
    pub missing: Vec<u32>,
}

impl<S: BinState> Shelf<S> {
    /// An empty shelf.
    #[must_use]
    pub fn new() -> Self {
        Self { inner: Arc::new(Mutex::new(Inner { operators: HashMap::new(), next_ticket: 0, settled: None })) }
    }

    fn lock(&self) -> MutexGuard<'_, Inner<S>> {
        // No code of states runs under the lock except rollback and drop, and each leaves the maps whole.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lays down a bin that moves to another thread; the ticket fetches it.
    pub(crate) fn put(&self, name: &str, bin: u32, held: Held<S>) -> Result<u64, BinsError> {
        let mut inner = self.lock();
        let ticket = inner.next_ticket;
        let rest = inner.rest(name, bin);
        if rest.resting.is_some() {
            return Err(BinsError::Occupied { bin });
        }
        rest.resting = Some((held, ticket));
        inner.next_ticket += 1;
        Ok(ticket)
    }

    /// Fetches a bin by its ticket.
    pub(crate) fn take(&self, name: &str, bin: u32, ticket: u64) -> Result<Held<S>, BinsError> {
        let mut inner = self.lock();
        let rest = inner.operators.get_mut(name).and_then(|bins| bins.get_mut(&bin));
        match rest.and_then(|rest| rest.resting.take_if(|(_, issued)| *issued == ticket)) {
            Some((held, _)) => Ok(held),
            None => Err(BinsError::NotShelved { name: name.to_owned(), bin, ticket }),
        }
    }

    /// Keeps the original of a bin that was copied to another process, if it serves any purpose: see the module.
    pub(crate) fn retain(&self, name: &str, bin: u32, held: Held<S>) -> Result<(), BinsError> {
        if (held.arrived || held.epoch.is_none()) && held.begins.is_none() {
            return Ok(());
        }
        let mut inner = self.lock();
        let retained = &mut inner.rest(name, bin).retained;
        if !held.arrived && retained.iter().any(|old| !old.arrived && old.epoch == held.epoch) {
            return Err(BinsError::TwoOriginals { bin });
        }
        if held.arrived && retained.iter().any(|old| old.begins == held.begins) {
            return Ok(()); // it was away and has come back: equal
        }
        retained.retain(|old| old.epoch == held.epoch);
        retained.push(held);
        Ok(())
    }

    /// Lays down the bins of a table that ends. A bin that rests here already stays; ours is not the newer one.
    pub(crate) fn deposit(&self, name: &str, bins: Vec<(u32, Held<S>)>) {
        if bins.is_empty() {
            return;
        }
        let mut inner = self.lock();
        for (bin, held) in bins {
            let ticket = inner.next_ticket;
            inner.next_ticket += 1;
            inner.rest(name, bin).resting.get_or_insert((held, ticket));
        }
    }

    /// `epoch` is over and will not be undone: drops the originals of bins that left this process in it or before; returns
    /// how many. Originals that were never marked go as well.
    pub fn close_epoch(&self, epoch: u64) -> usize {
        let mut closed = Vec::new();
        let mut inner = self.lock();
        for bins in inner.operators.values_mut() {
            for rest in bins.values_mut() {
                closed.extend(rest.retained.extract_if(.., |original| original.epoch <= Some(epoch)));
            }
            bins.retain(|_, rest| rest.resting.is_some() || !rest.retained.is_empty());
        }
        drop(inner);
        closed.len()
    }

    /// `epoch` and those before will not be undone, which only the host knows: drops the originals that were kept for that alone;
    /// returns how many.
    pub fn settle_epoch(&self, epoch: u64) -> usize {
        let mut inner = self.lock();
        inner.settled = inner.settled.max(Some(epoch));
        let freed = inner.free();
        drop(inner); // what is freed may be much: not under the lock
        freed.len()
    }

    /// The workers that these bins of an operator went to have all of them: originals that no undo needs go.
    pub(crate) fn have_come(&self, name: &str, bins: &[u32]) {
        let mut inner = self.lock();
        for bin in bins {
            let rest = inner.operators.get_mut(name).and_then(|rests| rests.get_mut(bin));
            rest.into_iter().flat_map(|rest| &mut rest.retained).for_each(|held| held.copied = true);
        }
        let freed = inner.free();
        drop(inner);
        drop(freed);
    }

    /// Bins at rest: moving or deposited, and retained originals.
    #[must_use]
    pub fn counts(&self) -> (usize, usize) {
        let inner = self.lock();
        let rests = inner.operators.values().flat_map(BTreeMap::values);
        rests.fold((0, 0), |(resting, retained), rest| {
            (resting + usize::from(rest.resting.is_some()), retained + rest.retained.len())
        })
    }

    /// The bins of operator `name`, ascending, whose state at the beginning of `epoch` is in this process: those that
    /// [`rebuild`](Self::rebuild) gives back. A bin that left this process between two epochs may be in another one as well.
    #[must_use]
    pub fn inventory(&self, name: &str, epoch: u64) -> Vec<u32> {
        let inner = self.lock();
        let rests = inner.operators.get(name).into_iter().flatten();
        rests.filter(|(_, rest)| rest.standing(epoch) != Standing::No).map(|(&bin, _)| bin).collect()
    }

    /// Sums `measure` over all states that rest here, without retained originals.
    #[must_use]
    pub fn sum(&self, measure: impl Fn(&S) -> u64) -> u64 {
        let inner = self.lock();
        let rests = inner.operators.values().flat_map(BTreeMap::values);
        rests.flat_map(|rest| &rest.resting).map(|(held, _)| measure(&held.state)).sum()
    }

    /// Builds the tables of a new generation for the operator `name` from what the last one left in this process: every bin as
    /// it was when `epoch` began, the tables marked with `epoch` and attached to this shelf.
    ///
    /// Call it when all workers of the process have ended (their tables are dropped). `routing` is the routing when `epoch`
    /// began; `workers` are the members in this process. What was marked with `epoch` is rolled back: bins that came
    /// from another process since are dropped, originals that went to one come back. What was last marked before
    /// `epoch`, or never since it was made for `epoch` ([`BinTable::unmark`]), is at the end of the epoch before (its worker had not begun
    /// `epoch`) and stays as it is; what was made for another epoch is dropped. Copies of bins that `routing` gives to another process are dropped.
    ///
    /// # Errors
    /// [`BinsError::Stranded`] when the only state of a bin is here and its owner is not among `workers`,
    /// [`BinsError::TwoOriginals`], [`BinsError::MarkedLater`], [`BinsError::Absent`] for a bin beyond the routing's last; the
    /// shelf is then unchanged. [`BinsError::Rollback`]: all bins are still here, and the same call may be tried again.
    pub fn rebuild(&self, name: &str, epoch: u64, routing: &Routing, workers: &[u32]) -> Result<Rebuilt<S>, BinsError> {
        let mut inner = self.lock();
        let mut tables = Vec::with_capacity(workers.len());
        let mut index = HashMap::new();
        for (i, &worker) in workers.iter().enumerate() {
            index.insert(worker, i);
            tables.push((worker, BinTable::new(routing.bits())?));
        }
        inner.missing(name, epoch, routing, workers)?;
        // Undone where they lie, all before any is taken: one that cannot go back costs no other.
        for (&bin, rest) in inner.operators.get_mut(name).into_iter().flatten() {
            rest.roll_back(bin, epoch)?;
        }
        for (bin, rest) in inner.operators.remove(name).unwrap_or_default() {
            if let Some(state) = rest.at(epoch)
                && let Some(&i) = routing.owner_at(bin).and_then(|owner| index.get(&owner))
            {
                tables[i].1.install(bin, state)?;
            }
        }
        drop(inner);
        for (_, table) in &mut tables {
            table.mark_all(epoch);
            table.attach(self.clone(), name.to_owned());
        }
        let missing = routing
            .bins_owned()
            .filter(|(bin, owner)| index.get(owner).is_some_and(|&i| tables[i].1.get(*bin).is_none()))
            .map(|(bin, _)| bin)
            .collect();
        Ok(Rebuilt { tables, missing })
    }

    /// The bins that [`rebuild`](Self::rebuild) would find missing; changes nothing.
    ///
    /// # Errors
    /// Those of `rebuild`.
    pub fn missing(&self, name: &str, epoch: u64, routing: &Routing, workers: &[u32]) -> Result<Vec<u32>, BinsError> {
        self.lock().missing(name, epoch, routing, workers)
    }
}

impl<S> Inner<S> {
    fn missing(&self, name: &str, epoch: u64, routing: &Routing, workers: &[u32]) -> Result<Vec<u32>, BinsError> {
        let nothing = BTreeMap::new();
        let bins = self.operators.get(name).unwrap_or(&nothing);
        for (&bin, rest) in bins {
            rest.check(bin, epoch, routing, |owner| workers.contains(&owner))?;
        }
        let here = |bin: &u32| bins.get(bin).is_some_and(|rest| rest.standing(epoch) != Standing::No);
        let owned = routing.bins_owned().filter(|(_, owner)| workers.contains(owner));
        Ok(owned.map(|(bin, _)| bin).filter(|bin| !here(bin)).collect())
    }

    /// Takes out the originals that serve nothing any more: their copies have come, and the epoch that they could undo is settled, or
    /// was another process's to undo.
    fn free(&mut self) -> Vec<Held<S>> {
        let mut freed = Vec::new();
        let settled = self.settled;
        let spare = |held: &mut Held<S>| held.copied && (held.arrived || held.epoch <= settled);
        for bins in self.operators.values_mut() {
            for rest in bins.values_mut() {
                freed.extend(rest.retained.extract_if(.., |held| spare(held)));
            }
            bins.retain(|_, rest| rest.resting.is_some() || !rest.retained.is_empty());
        }
        freed
    }

    fn rest(&mut self, name: &str, bin: u32) -> &mut Rest<S> {
        if !self.operators.contains_key(name) {
            self.operators.insert(name.to_owned(), BTreeMap::new());
        }
        let bins = self.operators.get_mut(name).expect("inserted above");
        bins.entry(bin).or_insert(Rest { resting: None, retained: Vec::new() })
    }
}

impl<S> Rest<S> {
    /// Whether the resting state is the bin's at the beginning of `epoch`, or can be rolled back to it.
    fn of_resting(&self, epoch: u64) -> Standing {
        match &self.resting {
            // It was never marked: it is what its own epoch begins with, whatever that has become elsewhere.
            Some((held, _)) if held.epoch.is_none() && held.begins.is_some_and(|begins| begins != epoch) => {
                Standing::No
            }
            // Its original may still be where it came from.
            Some((held, _)) if held.epoch < Some(epoch) && held.arrived => Standing::Copy,
            Some((held, _)) if held.epoch == Some(epoch) && !held.arrived && held.came => Standing::Copy,
            Some((held, _)) if held.epoch < Some(epoch) || !held.arrived => Standing::Only,
            _ => Standing::No,
        }
    }

    /// The same for an original: one of an older epoch has gone for good, unless it left between that and this one.
    fn of_retained(held: &Held<S>, epoch: u64) -> Standing {
        if held.begins == Some(epoch) {
            Standing::Copy
        } else if held.epoch == Some(epoch) && !held.arrived {
            if held.came { Standing::Copy } else { Standing::Only }
        } else {
            Standing::No
        }
    }

    /// The better of all.
    fn standing(&self, epoch: u64) -> Standing {
        let of = |standing: Standing| match standing {
            Standing::No => 0,
            Standing::Copy => 1,
            Standing::Only => 2,
        };
        let retained = self.retained.iter().map(|held| Self::of_retained(held, epoch));
        retained.chain([self.of_resting(epoch)]).max_by_key(|standing| of(*standing)).unwrap_or(Standing::No)
    }

    fn check(&self, bin: u32, epoch: u64, routing: &Routing, local: impl Fn(u32) -> bool) -> Result<(), BinsError> {
        let states = self.resting.iter().map(|(held, _)| held).chain(&self.retained);
        if let Some(marked) = states.filter_map(|held| held.epoch).find(|marked| *marked > epoch) {
            return Err(BinsError::MarkedLater { bin, marked, epoch });
        }
        let retained = self.retained.iter().map(|held| Self::of_retained(held, epoch));
        let all = || retained.clone().chain([self.of_resting(epoch)]);
        let only = all().filter(|standing| *standing == Standing::Only).count();
        if only > 1 || (only == 1 && all().any(|standing| standing == Standing::Copy)) {
            return Err(BinsError::TwoOriginals { bin });
        }
        if all().all(|standing| standing == Standing::No) {
            return Ok(());
        }
        match routing.owner_at(bin) {
            // It was split or merged since, or will be: its parts, or what it is part of, are elsewhere on this shelf.
            None if only == 0 && range_of(bin, routing.bits()).is_some() => Ok(()),
            None => Err(BinsError::Absent { bin }),
            Some(owner) if only == 1 && !local(owner) => Err(BinsError::Stranded { bin, owner }),
            Some(_) => Ok(()),
        }
    }
}

impl<S: BinState> Rest<S> {
    /// Undoes what happened since `epoch` began to the state that serves it.
    fn roll_back(&mut self, bin: u32, epoch: u64) -> Result<(), BinsError> {
        let held = if self.of_resting(epoch) == Standing::No {
            self.retained.iter_mut().find(|held| Self::of_retained(held, epoch) != Standing::No)
        } else {
            self.resting.as_mut().map(|(held, _)| held)
        };
        match held.filter(|held| held.epoch == Some(epoch)) {
            Some(held) => held.state.rollback().map_err(|source| BinsError::Rollback { bin, source }),
            None => Ok(()),
        }
    }

    /// The state that serves `epoch`.
    fn at(self, epoch: u64) -> Option<Box<S>> {
        let held = if self.of_resting(epoch) == Standing::No {
            self.retained.into_iter().find(|held| Self::of_retained(held, epoch) != Standing::No)
        } else {
            self.resting.map(|(held, _)| held)
        };
        held.map(|held| held.state)
    }
}

impl<S> Clone for Shelf<S> {
    fn clone(&self) -> Self {
        Self { inner: Arc::clone(&self.inner) }
    }
}

impl<S: BinState> Default for Shelf<S> {
    fn default() -> Self {
        Self::new()
    }
}

impl<S: BinState> std::fmt::Debug for Shelf<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (resting, retained) = self.counts();
        f.debug_struct("Shelf").field("resting", &resting).field("retained", &retained).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bin::Encoding;
    use crate::control::Command;
    use crate::error::StateError;
    use crate::keyed::KeyedMap;

    type Counts = KeyedMap<u64, u64>;

    /// A bin that held `value` when epoch 7 began, and holds 100 more now.
    fn held(value: u64, arrived: bool) -> Held<Counts> {
        held_since(value, arrived, 7)
    }

    fn held_since(value: u64, arrived: bool, epoch: u64) -> Held<Counts> {
        let mut state = Box::new(Counts::default());
        *state.entry(0) = value;
        state.mark();
        *state.entry(0) = value + 100;
        Held { state, arrived, came: false, epoch: Some(epoch), begins: None, copied: false }
    }

    /// A bin that left before epoch 8 began, with 100 more than when epoch 7 did.
    fn left(value: u64, arrived: bool) -> Held<Counts> {
        Held { begins: Some(8), ..held(value, arrived) }
    }

    fn value(table: &BinTable<Counts>, bin: u32) -> u64 {
        table.get(bin).unwrap().get(&0).copied().unwrap()
    }

    #[test]
    fn tickets_fetch_once() {
        let shelf = Shelf::new();
        let ticket = shelf.put("count", 3, held(1, false)).unwrap();
        assert!(matches!(shelf.put("count", 3, held(1, false)), Err(BinsError::Occupied { bin: 3 })));
        assert!(shelf.put("other", 3, held(1, false)).is_ok());
        assert!(matches!(shelf.take("count", 3, ticket + 9), Err(BinsError::NotShelved { .. })));
        assert!(shelf.take("count", 3, ticket).is_ok());
        assert!(matches!(shelf.take("count", 3, ticket), Err(BinsError::NotShelved { .. })));
    }

    #[test]
    fn a_failed_epoch_gives_back_originals() {
        let shelf = Shelf::new();
        let routing = Routing::from_owners(vec![4, 4, 5, 5]).unwrap();
        shelf.deposit("count", vec![(0, held(10, false)), (1, held(11, true))]);
        shelf.put("count", 2, held(12, true)).unwrap();
        shelf.retain("count", 2, held(22, false)).unwrap();
        shelf.retain("count", 2, held(32, true)).unwrap();
        assert!(matches!(shelf.retain("count", 2, held(0, false)), Err(BinsError::TwoOriginals { bin: 2 })));
        shelf.put("count", 3, held(13, false)).unwrap();
        assert_eq!(shelf.counts(), (4, 1));
        let rebuilt = shelf.rebuild("count", 7, &routing, &[4, 5]).unwrap();
        assert_eq!(rebuilt.missing, [1]);
        let [(4, four), (5, five)] = &rebuilt.tables[..] else { panic!("{rebuilt:?}") };
        assert_eq!((four.len(), value(four, 0)), (1, 10));
        assert_eq!((value(five, 2), value(five, 3)), (22, 13));
        assert_eq!(shelf.counts(), (0, 0));
        assert_eq!(four.epoch(), Some(7));
    }

    #[test]
    fn an_epoch_that_had_not_begun_here_changes_nothing() {
        let shelf = Shelf::new();
        let routing = Routing::from_owners(vec![0, 0]).unwrap();
        shelf.deposit("count", vec![(0, held(10, true))]);
        shelf.retain("count", 1, held(1, false)).unwrap();
        let mut rebuilt = shelf.rebuild("count", 8, &routing, &[0]).unwrap();
        assert_eq!(rebuilt.missing, [1], "it left for good in epoch 7");
        let table = &mut rebuilt.tables[0].1;
        assert_eq!(value(table, 0), 110);
        *table.get_mut(0).unwrap().entry(0) = 5;
        table.rollback_all().unwrap();
        assert_eq!(value(table, 0), 110, "the rebuilt table is marked");
    }

    #[test]
    fn a_bin_that_left_between_epochs_serves_both() {
        let here = Routing::from_owners(vec![0]).unwrap();
        let elsewhere = Routing::from_owners(vec![9]).unwrap();
        let filled = || {
            let shelf = Shelf::new();
            shelf.retain("count", 0, left(10, false)).unwrap();
            shelf
        };
        for (epoch, expected) in [(7, 10), (8, 110)] {
            let shelf = filled();
            assert_eq!(shelf.inventory("count", epoch), [0]);
            let rebuilt = shelf.rebuild("count", epoch, &here, &[0]).unwrap();
            assert_eq!(value(&rebuilt.tables[0].1, 0), expected);
        }
        assert_eq!(filled().inventory("count", 9), [] as [u32; 0]);
        let refused = filled().rebuild("count", 7, &elsewhere, &[0]);
        assert!(matches!(refused, Err(BinsError::Stranded { bin: 0, owner: 9 })), "the only one of that time");
        let shelf = filled();
        assert!(shelf.rebuild("count", 8, &elsewhere, &[0]).unwrap().missing.is_empty(), "the copy was chosen");
        assert_eq!(shelf.counts(), (0, 0));
        assert_eq!(filled().close_epoch(7), 1, "the next mark makes it useless");
    }

    /// Workers mark one by one: the receiver of a bin may have marked the epoch while its sender has not, and still has the original.
    #[test]
    fn a_bin_that_came_before_its_mark_gives_way_to_the_original() {
        let elsewhere = Routing::from_owners(vec![9]).unwrap();
        let here = Routing::from_owners(vec![0]).unwrap();
        let shelf = Shelf::new();
        let came = |marks: &[u64]| {
            let mut table = BinTable::<Counts>::new(0).unwrap();
            table.attach(shelf.clone(), "count".into());
            table.announced(0).unwrap();
            table.all_came(0, || *held(10, false).state).unwrap();
            marks.iter().for_each(|epoch| table.mark_all(*epoch));
            *table.get_mut(0).unwrap().entry(0) = 999;
        };
        came(&[8]);
        assert_eq!(shelf.inventory("count", 8), [0]);
        assert!(shelf.rebuild("count", 8, &elsewhere, &[0]).unwrap().missing.is_empty());
        assert_eq!(shelf.counts(), (0, 0));
        // With the next mark it is the only one again.
        came(&[8, 9]);
        let refused = shelf.rebuild("count", 9, &elsewhere, &[0]);
        assert!(matches!(refused, Err(BinsError::Stranded { bin: 0, owner: 9 })));
        assert_eq!(value(&shelf.rebuild("count", 9, &here, &[0]).unwrap().tables[0].1, 0), 110);
    }

    #[test]
    fn of_equal_copies_one_is_kept() {
        let here = Routing::from_owners(vec![0]).unwrap();
        let elsewhere = Routing::from_owners(vec![9]).unwrap();
        // It left and came back.
        let shelf = Shelf::new();
        shelf.retain("count", 0, left(10, false)).unwrap();
        shelf.deposit("count", vec![(0, held(10, true))]);
        assert_eq!(shelf.inventory("count", 8), [0]);
        let rebuilt = shelf.rebuild("count", 8, &here, &[0]).unwrap();
        assert_eq!(value(&rebuilt.tables[0].1, 0), 110);
        assert_eq!(shelf.counts(), (0, 0));
        // It came, and the original is chosen.
        let shelf = Shelf::new();
        shelf.deposit("count", vec![(0, held(10, true))]);
        assert!(shelf.rebuild("count", 8, &elsewhere, &[0]).unwrap().missing.is_empty());
        assert_eq!(shelf.counts(), (0, 0));
        // It came, and left again: as it is it serves the next epoch, undone it serves none.
        shelf.retain("count", 0, left(20, true)).unwrap();
        shelf.retain("count", 0, left(30, true)).unwrap();
        assert_eq!((shelf.inventory("count", 7), shelf.inventory("count", 8)), (vec![], vec![0]));
        assert_eq!(value(&shelf.rebuild("count", 8, &here, &[0]).unwrap().tables[0].1, 0), 120);
        // It left in the epoch, came back in it, and left again after it.
        let passed = || {
            let shelf = Shelf::new();
            shelf.retain("count", 0, held(40, false)).unwrap();
            shelf.retain("count", 0, left(70, true)).unwrap();
            assert_eq!(shelf.counts(), (0, 2));
            shelf
        };
        assert_eq!(value(&passed().rebuild("count", 7, &here, &[0]).unwrap().tables[0].1, 0), 40);
        assert_eq!(value(&passed().rebuild("count", 8, &here, &[0]).unwrap().tables[0].1, 0), 170);
    }

    #[test]
    fn what_is_missing_can_be_asked_before() {
        let shelf = Shelf::new();
        shelf.deposit("count", vec![(1, held(1, false)), (2, held(2, true))]);
        let routing = Routing::from_owners(vec![0, 0, 0, 5]).unwrap();
        assert_eq!(shelf.missing("count", 7, &routing, &[0]).unwrap(), [0, 2]);
        assert_eq!(shelf.counts(), (2, 0));
        assert_eq!(shelf.rebuild("count", 7, &routing, &[0]).unwrap().missing, [0, 2]);
    }

    #[test]
    fn closing_drops_originals_of_closed_epochs_only() {
        let shelf = Shelf::new();
        shelf.retain("count", 0, held_since(1, false, 7)).unwrap();
        shelf.retain("count", 1, held_since(1, false, 8)).unwrap();
        shelf.retain("count", 2, held_since(1, false, 7)).unwrap();
        shelf.retain("count", 2, held_since(1, false, 8)).unwrap();
        assert_eq!(shelf.counts(), (0, 3), "an original of a closed epoch gives way");
        assert_eq!(shelf.close_epoch(7), 1);
        assert_eq!(shelf.close_epoch(8), 2);
        assert_eq!(shelf.counts(), (0, 0));
    }

    #[test]
    fn a_refused_rebuild_changes_nothing() {
        let shelf = Shelf::new();
        shelf.deposit("count", vec![(0, held(1, false)), (1, held(2, false))]);
        let routing = Routing::from_owners(vec![0, 7]).unwrap();
        let refused = shelf.rebuild("count", 7, &routing, &[0]);
        assert!(matches!(refused, Err(BinsError::Stranded { bin: 1, owner: 7 })));
        let narrow = Routing::from_owners(vec![0]).unwrap();
        assert!(matches!(shelf.rebuild("count", 7, &narrow, &[0]), Err(BinsError::Absent { bin: 1 })));
        let refused = shelf.rebuild("count", 6, &routing, &[0, 7]);
        assert!(matches!(refused, Err(BinsError::MarkedLater { bin: 0, marked: 7, epoch: 6 })));
        shelf.retain("count", 0, held(3, false)).unwrap();
        let refused = shelf.rebuild("count", 7, &routing, &[0, 7]);
        assert!(matches!(refused, Err(BinsError::TwoOriginals { bin: 0 })));
        assert_eq!(shelf.counts(), (2, 1));
    }

    #[test]
    fn a_dropped_table_deposits() {
        let shelf = Shelf::new();
        let routing = Routing::new(1, 1).unwrap();
        let mut table = BinTable::fresh(&routing, 0, &Counts::default);
        *table.get_mut(1).unwrap().entry(4) = 4;
        table.attach(shelf.clone(), "count".into());
        drop(table);
        assert_eq!(shelf.counts(), (2, 0));
        let rebuilt = shelf.rebuild("count", 0, &routing, &[0]).unwrap();
        assert!(rebuilt.missing.is_empty());
        assert_eq!(rebuilt.tables[0].1.get(1).unwrap().get(&4), Some(&4));
    }

    /// What costs all parts of a bin for each of them does not come to an end here.
    #[test]
    fn a_generation_begins_with_many_parts() {
        let mut routing = Routing::new(1, 1).unwrap();
        routing.apply(&Command::Split { bin: 1, bits: 16 }).unwrap();
        let shelf = Shelf::new();
        let mut rebuilt = shelf.rebuild("count", 7, &routing, &[0]).unwrap();
        assert_eq!(rebuilt.missing.len(), (1 << 16) + 1);
        for bin in rebuilt.missing {
            rebuilt.tables[0].1.install(bin, Box::new(Counts::default())).unwrap();
        }
        rebuilt.tables[0].1.mark_all(7);
        drop(rebuilt.tables);
        assert_eq!(shelf.counts(), ((1 << 16) + 1, 0));
        let rebuilt = shelf.rebuild("count", 7, &routing, &[0]).unwrap();
        assert!(rebuilt.missing.is_empty());
        rebuilt.tables[0].1.check_owns(&routing, 0).unwrap();
    }

    /// What a generation that ended before its first mark has left is the state as its first epoch begins, and of no other time.
    #[test]
    fn a_bin_that_was_never_marked_serves_one_epoch() {
        let routing = Routing::from_owners(vec![0]).unwrap();
        for moving in [false, true] {
            let shelf = Shelf::new();
            let mut table = BinTable::fresh(&routing, 0, &Counts::default);
            table.attach(shelf.clone(), "count".into());
            table.unmark(7);
            if moving {
                shelf.put("count", 0, table.uninstall_held(0).unwrap()).unwrap();
            }
            drop(table);
            assert_eq!(shelf.inventory("count", 7), [0]);
            for other in [6, 8] {
                assert_eq!(shelf.inventory("count", other), [] as [u32; 0], "epoch {other}");
                assert_eq!(shelf.missing("count", other, &routing, &[0]).unwrap(), [0]);
            }
            assert!(shelf.rebuild("count", 7, &routing, &[0]).unwrap().missing.is_empty());
        }
        // A mark makes it like any other.
        let shelf = Shelf::new();
        let mut table = BinTable::fresh(&routing, 0, &Counts::default);
        table.attach(shelf.clone(), "count".into());
        table.unmark(7);
        table.mark_all(7);
        drop(table);
        assert_eq!(shelf.inventory("count", 8), [0]);
    }

    /// A state that cannot go back while it is stuck.
    #[derive(Debug)]
    struct Stuck(Arc<std::sync::atomic::AtomicBool>, u64);

    impl BinState for Stuck {
        fn encode(&self, _: &mut Encoding) -> Result<Option<Vec<u8>>, StateError> {
            Ok(None)
        }
        fn absorb(&mut self, _: &[u8]) -> Result<(), StateError> {
            Ok(())
        }
        fn bytes(&self) -> usize {
            0
        }
        fn keys(&self) -> usize {
            1
        }
        fn mark(&mut self) {}
        fn rollback(&mut self) -> Result<(), StateError> {
            if self.0.load(std::sync::atomic::Ordering::Relaxed) {
                return Err(StateError::new("stuck"));
            }
            self.1 = 0;
            Ok(())
        }
    }

    #[test]
    fn a_bin_that_cannot_go_back_is_named_and_costs_no_other() {
        let flag = |stuck| Arc::new(std::sync::atomic::AtomicBool::new(stuck));
        let (free, stuck) = (flag(false), flag(true));
        let shelf = Shelf::new();
        let bins = [&free, &free, &stuck, &free].map(|flag| Box::new(Stuck(Arc::clone(flag), 5)));
        let held = |state| Held { state, arrived: false, came: false, epoch: Some(7), begins: None, copied: false };
        shelf.deposit("count", (0..).zip(bins.map(held)).collect());
        let routing = Routing::new(2, 1).unwrap();
        for _ in 0..2 {
            let refused = shelf.rebuild("count", 7, &routing, &[0]);
            assert!(matches!(refused, Err(BinsError::Rollback { bin: 2, .. })), "{refused:?}");
            assert_eq!(shelf.inventory("count", 7), [0, 1, 2, 3]);
        }
        stuck.store(false, std::sync::atomic::Ordering::Relaxed);
        let rebuilt = shelf.rebuild("count", 7, &routing, &[0]).unwrap();
        assert!(rebuilt.tables[0].1.owned().all(|(_, state)| state.1 == 0) && rebuilt.missing.is_empty());
    }
}
