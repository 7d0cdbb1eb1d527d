//! The bins that one worker holds.
//!
//! F and S of a worker share one table (`Rc<RefCell<..>>`, no synchronisation): S's logic works on it, F uninstalls what
//! moves away.
//!
//! A bin is *in service*, *leaving* (parts of it are sent to another process, so it must not change) or *coming* (parts of it have still
//! to come). Only those in service are seen by the logic, which may be called while others are on their way.
//!
//! Invariants: a bin is in at most one table of the cluster, and there it is one of the three; `install` never replaces; a table that is dropped
//! with bins deposits them on the shelf it is attached to, those that are leaving too, so that the end of a generation, a panic or an abort loses no state.
//!
//! Source: Megaphone §4.2. Departure: undo by epoch. Bins that came from another process since the last mark are
//! flagged *arrived*: their past is in the sender's process, so undoing drops them here.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

use crate::bin::{BinState, bin, check_bits};
use crate::error::BinsError;
use crate::parts::{Parts, meeting, range_of};
use crate::routing::Routing;
use crate::shelf::Shelf;

/// The states of the bins that one worker owns, by bin number.
pub struct BinTable<S: BinState> {
    bits: u8,
    slots: Vec<Option<Box<S>>>,
    /// Parts of bins that are split, and where they are.
    split: BTreeMap<u32, Box<S>>,
    parts: Parts,
    arrived: BTreeSet<u32>,
    /// Bins that had arrived when the epoch was marked: where they came from, an original may stand until its worker has marked, too.
    came: BTreeSet<u32>,
    /// Bins that are sent to another process, until all is sent.
    leaving: BTreeMap<u32, Box<S>>,
    /// Bins from another process of which something has still to come: what has, once anything has, and in how many chunks.
    coming: BTreeMap<u32, (Option<Box<S>>, u64)>,
    /// Bins in service.
    held: usize,
    /// Bins that may have changed: those that are whole, each once; which these are; and parts.
    changed: Vec<u32>,
    is_changed: Vec<bool>,
    changed_parts: BTreeSet<u32>,
    /// The epoch that began at the last mark.
    epoch: Option<u64>,
    /// Without a mark: the epoch that begins with the bins as they are.
    begins: Option<u64>,
    home: Option<(Shelf<S>, String)>,
}

/// A state outside a table, with what its undo refers to.
pub(crate) struct Held<S> {
    pub(crate) state: Box<S>,
    /// It came from another process since the mark.
    pub(crate) arrived: bool,
    /// It came from another process before the mark, and after the one before that.
    pub(crate) came: bool,
    /// The epoch that began at its last mark.
    pub(crate) epoch: Option<u64>,
    /// The epoch that begins with the state as it is now: the bin left between two epochs, or its table was never marked.
    pub(crate) begins: Option<u64>,
    /// The process that it went to has all of it.
    pub(crate) copied: bool,
}

impl<S: BinState> BinTable<S> {
    /// An empty table for `2^bits` bins.
    ///
    /// # Errors
    /// [`BinsError::Bits`] above 20.
    pub fn new(bits: u8) -> Result<Self, BinsError> {
        check_bits(bits)?;
        let slots = (0..1usize << bits).map(|_| None).collect();
        Ok(Self {
            bits,
            slots,
            split: BTreeMap::new(),
            parts: Parts::new(bits),
            arrived: BTreeSet::new(),
            came: BTreeSet::new(),
            leaving: BTreeMap::new(),
            coming: BTreeMap::new(),
            held: 0,
            changed: Vec::new(),
            is_changed: vec![false; 1 << bits],
            changed_parts: BTreeSet::new(),
            epoch: None,
            begins: None,
            home: None,
        })
    }

    /// A table with a new state for every bin that `routing` gives to `worker`.
    #[must_use]
    pub fn fresh(routing: &Routing, worker: u32, new_state: &dyn Fn() -> S) -> Self {
        let mut table = Self::new(routing.bits()).expect("the bits of a routing");
        for (bin, _) in routing.bins_owned().filter(|(_, owner)| *owner == worker) {
            table.install(bin, Box::new(new_state())).expect("each bin is there once");
        }
        table
    }

    /// Whether a part of a bin is held, so that the bin of a hash is not just its top bits.
    #[inline]
    #[must_use]
    pub fn is_split(&self) -> bool {
        self.parts.any()
    }

    /// The bin, or part of one, that a hash falls into, as far as it is held here.
    #[inline]
    #[must_use]
    pub fn bin_of(&self, hash: u64) -> u32 {
        let found = if self.parts.any() { self.parts.find(hash) } else { None };
        found.map_or_else(|| bin(hash, self.bits), |(part, _)| part)
    }

    /// Bits of a bin number.
    #[must_use]
    pub fn bits(&self) -> u8 {
        self.bits
    }

    /// Number of bins in service.
    #[must_use]
    pub fn len(&self) -> usize {
        self.held
    }

    /// True when no bin is in service.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.held == 0
    }

    /// The state of a bin that is in service here.
    #[inline]
    #[must_use]
    pub fn get(&self, bin: u32) -> Option<&S> {
        match self.slots.get(bin as usize) {
            Some(slot) => slot.as_deref(),
            None => self.split.get(&bin).map(|state| &**state),
        }
    }

    /// The state of a bin that is in service here, to change.
    #[inline]
    #[must_use]
    pub fn get_mut(&mut self, bin: u32) -> Option<&mut S> {
        self.note(bin);
        match self.slots.get_mut(bin as usize) {
            Some(slot) => slot.as_deref_mut(),
            None => self.split.get_mut(&bin).map(|state| &mut **state),
        }
    }

    /// A bin may change.
    #[inline]
    fn note(&mut self, bin: u32) {
        match self.is_changed.get_mut(bin as usize) {
            Some(true) => {}
            Some(noted) => {
                *noted = true;
                self.changed.push(bin);
            }
            None => _ = self.changed_parts.insert(bin),
        }
    }

    /// The bins that have come since the last call, were given out to be changed or undone, each once and in no order; some of them may have gone.
    pub fn take_changed(&mut self) -> Vec<u32> {
        let mut changed = std::mem::take(&mut self.changed);
        changed.iter().for_each(|bin| self.is_changed[*bin as usize] = false);
        changed.extend(std::mem::take(&mut self.changed_parts));
        changed
    }

    /// Puts a bin where there is none.
    ///
    /// # Errors
    /// [`BinsError::Occupied`], also by a part of it; [`BinsError::Absent`] for a number that no bin has.
    pub fn install(&mut self, bin: u32, state: Box<S>) -> Result<(), BinsError> {
        let whole = self.check_free(bin)?;
        if bin == whole {
            self.slots[bin as usize] = Some(state);
        } else {
            self.split.insert(bin, state);
            self.parts.set(bin, 0);
        }
        self.held += 1;
        self.note(bin);
        Ok(())
    }

    /// The bin that `bin` is or is part of, where nothing of it is here, in service or on its way.
    fn check_free(&self, bin: u32) -> Result<u32, BinsError> {
        let range = range_of(bin, self.bits).ok_or(BinsError::Absent { bin })?;
        let whole = crate::bin::bin(range.first(), self.bits);
        let on_its_way = |numbers: RangeInclusive<u32>| {
            self.leaving.range(numbers.clone()).next().is_some() || self.coming.range(numbers).next().is_some()
        };
        let occupied = self.slots[whole as usize].is_some()
            || self.parts.of(range).next().is_some()
            || meeting(range, self.bits).any(on_its_way);
        if occupied { Err(BinsError::Occupied { bin }) } else { Ok(whole) }
    }

    /// Takes a bin out of service.
    fn take(&mut self, bin: u32) -> Option<Box<S>> {
        let state = match self.slots.get_mut(bin as usize) {
            Some(slot) => slot.take()?,
            None => {
                let state = self.split.remove(&bin)?;
                self.parts.unset(range_of(bin, self.bits)?);
                state
            }
        };
        self.held -= 1;
        Some(state)
    }

    fn states_mut(&mut self) -> impl Iterator<Item = &mut S> {
        let coming = self.coming.values_mut().filter_map(|(state, _)| state.as_mut());
        let on_their_way = self.leaving.values_mut().chain(coming);
        self.slots.iter_mut().flatten().chain(self.split.values_mut()).chain(on_their_way).map(|state| &mut **state)
    }

    /// Like [`install`](Self::install) for a bin that remembers how it came to this process.
    pub(crate) fn install_held(&mut self, bin: u32, held: Held<S>) -> Result<(), BinsError> {
        self.install(bin, held.state)?;
        if held.arrived {
            self.arrived.insert(bin);
        }
        if held.came {
            self.came.insert(bin);
        }
        Ok(())
    }

    /// A bin will come from another process. Should the table end before [`all_came`](Self::all_came), nothing of it counts.
    pub(crate) fn announced(&mut self, bin: u32) -> Result<(), BinsError> {
        self.check_free(bin)?;
        self.coming.insert(bin, (None, 0));
        Ok(())
    }

    /// A bin that is coming, for one more chunk; `new` makes one of which nothing has come.
    pub(crate) fn chunk_came(&mut self, bin: u32, new: impl FnOnce() -> S) -> Option<&mut S> {
        let (state, chunks) = self.coming.get_mut(&bin)?;
        *chunks += 1;
        Some(state.get_or_insert_with(|| Box::new(new())))
    }

    /// All of a bin that was coming is here: it is in service.
    pub(crate) fn all_came(&mut self, bin: u32, new: impl FnOnce() -> S) -> Result<(), BinsError> {
        let (state, _) = self.coming.remove(&bin).ok_or(BinsError::Unprepared { bin })?;
        self.arrived.insert(bin);
        self.install(bin, state.unwrap_or_else(|| Box::new(new())))
    }

    /// Of a bin of which something has still to come: how many chunks have.
    pub(crate) fn coming(&self, bin: u32) -> Option<u64> {
        self.coming.get(&bin).map(|(_, chunks)| *chunks)
    }

    /// A bin goes to another process: it is not in service any more, and stays as it is until it is [uninstalled](Self::uninstall_held). Nothing
    /// happens where there is none.
    pub(crate) fn begin_leaving(&mut self, bin: u32) {
        if let Some(state) = self.take(bin) {
            self.leaving.insert(bin, state);
        }
    }

    /// The state of a bin that is leaving.
    pub(crate) fn leaving(&self, bin: u32) -> Option<&S> {
        self.leaving.get(&bin).map(|state| &**state)
    }

    /// Takes a bin out.
    pub fn uninstall(&mut self, bin: u32) -> Option<Box<S>> {
        Some(self.uninstall_held(bin)?.state)
    }

    /// Takes a bin out, in service or leaving, together with what its undo refers to.
    pub(crate) fn uninstall_held(&mut self, bin: u32) -> Option<Held<S>> {
        let mut state = self.leaving.remove(&bin).or_else(|| self.take(bin))?;
        state.leave();
        let (arrived, came) = (self.arrived.remove(&bin), self.came.remove(&bin));
        Some(Held { state, arrived, came, epoch: self.epoch, begins: self.begins, copied: false })
    }

    /// The bins in service, ascending: those that are whole, then parts.
    pub fn owned(&self) -> impl Iterator<Item = (u32, &S)> {
        let whole = (0u32..).zip(&self.slots).filter_map(|(bin, slot)| Some((bin, slot.as_deref()?)));
        whole.chain(self.split.iter().map(|(bin, state)| (*bin, &**state)))
    }

    /// The bins in service, ascending, to change.
    pub fn owned_mut(&mut self) -> impl Iterator<Item = (u32, &mut S)> {
        let held: Vec<u32> = self.owned().map(|(bin, _)| bin).collect();
        held.into_iter().for_each(|bin| self.note(bin));
        let whole = (0u32..).zip(&mut self.slots).filter_map(|(bin, slot)| Some((bin, slot.as_deref_mut()?)));
        whole.chain(self.split.iter_mut().map(|(bin, state)| (*bin, &mut **state)))
    }

    /// `epoch` begins: [`BinState::mark`] on all bins. What arrived before is from now on like any other.
    pub fn mark_all(&mut self, epoch: u64) {
        (self.epoch, self.begins) = (Some(epoch), None);
        self.came = std::mem::take(&mut self.arrived);
        self.states_mut().for_each(BinState::mark);
    }

    /// No epoch has begun here, `epoch` will: undoing it leaves the bins as they are now, wherever they are then, and they serve no other.
    /// For a new generation that moves bins before it marks them.
    pub fn unmark(&mut self, epoch: u64) {
        (self.epoch, self.begins) = (None, Some(epoch));
    }

    /// For a generation that never marks: nothing is undone, [`BinState::settle`] on all bins.
    pub fn settle_all(&mut self) {
        (self.epoch, self.begins) = (None, None);
        self.states_mut().for_each(BinState::settle);
    }

    /// The epoch that began at the last mark.
    #[must_use]
    pub fn epoch(&self) -> Option<u64> {
        self.epoch
    }

    /// Back to the last mark: [`BinState::rollback`] on all bins; those that arrived since are dropped.
    ///
    /// Bins that left since are not brought back: between threads and processes that is [`Shelf::rebuild`]'s work.
    ///
    /// # Errors
    /// [`BinsError::Rollback`]; some bins are back then, and the others are as they were.
    pub fn rollback_all(&mut self) -> Result<(), BinsError> {
        self.coming.clear();
        for bin in std::mem::take(&mut self.arrived) {
            self.uninstall(bin);
        }
        while let Some((bin, state)) = self.leaving.pop_first() {
            self.install(bin, state)?;
        }
        self.owned_mut()
            .try_for_each(|(bin, state)| state.rollback().map_err(|source| BinsError::Rollback { bin, source }))
    }

    /// Takes all bins out, ascending.
    pub fn take_all(&mut self) -> Vec<(u32, Box<S>)> {
        self.take_all_held().into_iter().map(|(bin, held)| (bin, held.state)).collect()
    }

    fn take_all_held(&mut self) -> Vec<(u32, Held<S>)> {
        let (arrived, came) = (std::mem::take(&mut self.arrived), std::mem::take(&mut self.came));
        let (epoch, begins) = (self.epoch, self.begins);
        let bins: BTreeSet<u32> = self.owned().map(|(bin, _)| bin).chain(self.leaving.keys().copied()).collect();
        bins.into_iter()
            .filter_map(|bin| {
                let state = self.leaving.remove(&bin).or_else(|| self.take(bin));
                let (mut state, arrived, came) = (state?, arrived.contains(&bin), came.contains(&bin));
                state.leave();
                Some((bin, Held { state, arrived, came, epoch, begins, copied: false }))
            })
            .collect()
    }

    /// Names the shelf and the operator that this table's bins go to when it is dropped.
    pub(crate) fn attach(&mut self, shelf: Shelf<S>, name: String) {
        self.home = Some((shelf, name));
    }

    /// Refuses a table whose bins are not exactly those that `routing` gives to `worker`.
    pub(crate) fn check_owns(&self, routing: &Routing, worker: u32) -> Result<(), BinsError> {
        if self.bits != routing.bits() {
            return Err(BinsError::BitsDiffer { expected: routing.bits(), found: self.bits });
        }
        if let Some((bin, _)) = self.owned().find(|(bin, _)| routing.owner_at(*bin).is_none()) {
            return Err(BinsError::Absent { bin });
        }
        for (bin, owner) in routing.bins_owned() {
            match (owner == worker, self.get(bin).is_some()) {
                (true, false) => return Err(BinsError::Unrestored { bin, worker }),
                (false, true) => return Err(BinsError::Foreign { bin, worker, owner }),
                _ => {}
            }
        }
        Ok(())
    }
}

impl<S: BinState> Drop for BinTable<S> {
    fn drop(&mut self) {
        if let Some((shelf, name)) = self.home.take() {
            // Without those that are coming: part of a bin would pass for all of it.
            shelf.deposit(&name, self.take_all_held());
        }
    }
}

impl<S: BinState> std::fmt::Debug for BinTable<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BinTable").field("bits", &self.bits).field("held", &self.held).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use penstock_files::Range;

    use super::*;
    use crate::control::Command;
    use crate::keyed::KeyedMap;
    use crate::parts::number_of;

    type Counts = KeyedMap<u64, u64>;

    /// What costs all parts of a bin for each of them does not come to an end here.
    #[test]
    fn many_parts_come_and_go_one_by_one() {
        let mut routing = Routing::new(1, 1).unwrap();
        routing.apply(&Command::Split { bin: 0, bits: 16 }).unwrap();
        let parts: Vec<u32> = (0..1 << 16).map(|part| number_of(Range::new(part, 17).unwrap(), 1).unwrap()).collect();
        let mut table = BinTable::fresh(&routing, 0, &Counts::default);
        table.mark_all(0);
        let refuses = |table: &mut BinTable<Counts>| {
            let half = number_of(Range::new(0, 2).unwrap(), 1).unwrap();
            for bin in [0, half, parts[1]] {
                let refused = table.install(bin, Box::default());
                assert!(matches!(refused, Err(BinsError::Occupied { bin: other }) if other == bin), "{refused:?}");
            }
        };
        refuses(&mut table);
        parts.iter().for_each(|part| table.begin_leaving(*part));
        assert_eq!((table.len(), table.is_split()), (1, false));
        refuses(&mut table);
        table.rollback_all().unwrap();
        assert_eq!((table.len(), table.bin_of(1 << 47)), ((1 << 16) + 1, parts[1]));
        assert!(parts.iter().all(|part| table.uninstall(*part).is_some()));
        parts.iter().for_each(|part| table.announced(*part).unwrap());
        refuses(&mut table);
        parts.iter().for_each(|part| table.all_came(*part, Counts::default).unwrap());
        table.check_owns(&routing, 0).unwrap();
        table.rollback_all().unwrap();
        assert_eq!((table.len(), table.bin_of(1 << 47)), (1, 0));
        table.install(0, Box::default()).unwrap();
        assert_eq!(table.take_all().len(), 2);
    }

    fn table() -> BinTable<Counts> {
        BinTable::fresh(&Routing::new(2, 2).unwrap(), 1, &Counts::default)
    }

    #[test]
    fn owns_what_the_routing_says() {
        let routing = Routing::new(2, 2).unwrap();
        let mut table = table();
        assert_eq!(table.owned().map(|(bin, _)| bin).collect::<Vec<_>>(), [1, 3]);
        assert!(table.check_owns(&routing, 1).is_ok());
        assert!(matches!(table.check_owns(&routing, 0), Err(BinsError::Unrestored { bin: 0, worker: 0 })));
        let state = table.uninstall(3).unwrap();
        assert!(matches!(table.check_owns(&routing, 1), Err(BinsError::Unrestored { bin: 3, worker: 1 })));
        table.install(2, state).unwrap();
        assert!(matches!(table.check_owns(&routing, 1), Err(BinsError::Foreign { bin: 2, worker: 1, owner: 0 })));
        let wider = Routing::new(3, 2).unwrap();
        assert!(matches!(table.check_owns(&wider, 1), Err(BinsError::BitsDiffer { expected: 3, found: 2 })));
    }

    #[test]
    fn occupied_and_out_of_range_are_refused() {
        let mut table = table();
        assert!(matches!(table.install(1, Box::default()), Err(BinsError::Occupied { bin: 1 })));
        assert!(matches!(table.install(4, Box::default()), Err(BinsError::Absent { bin: 4 })));
        assert!(table.uninstall(0).is_none() && table.uninstall(9).is_none());
        assert_eq!(table.len(), 2);
    }

    #[test]
    fn what_may_have_changed_is_told_once() {
        fn told(table: &mut BinTable<Counts>) -> Vec<u32> {
            let mut bins = table.take_changed();
            bins.sort_unstable();
            bins
        }
        let mut table = table();
        assert_eq!(told(&mut table), [1, 3], "they have come");
        assert_eq!(told(&mut table), []);
        for bin in [3, 3, 0] {
            _ = table.get_mut(bin);
        }
        assert!(table.get(1).is_some());
        assert_eq!(told(&mut table), [0, 3], "also one that is not held");
        let half = crate::parts::number_of(Range::new(0b001, 3).unwrap(), 2).unwrap();
        table.install(half, Box::default()).unwrap();
        _ = table.get_mut(half);
        assert_eq!(told(&mut table), [half]);
        table.mark_all(0);
        table.rollback_all().unwrap();
        assert_eq!(told(&mut table), [1, 3, half]);
    }

    #[test]
    fn rollback_undoes_writes_and_drops_arrivals() {
        let mut table = table();
        *table.get_mut(1).unwrap().entry(5) = 1;
        table.mark_all(3);
        *table.get_mut(1).unwrap().entry(5) = 2;
        *table.get_mut(3).unwrap().entry(6) = 2;
        let held =
            Held { state: Box::default(), arrived: true, came: false, epoch: Some(3), begins: None, copied: false };
        table.install_held(0, held).unwrap();
        table.rollback_all().unwrap();
        assert_eq!(table.len(), 2);
        assert_eq!(table.get(1).unwrap().get(&5), Some(&1));
        assert!(table.get(3).unwrap().is_empty());
        assert_eq!(table.take_all().len(), 2);
        assert!(table.is_empty());
    }
}
