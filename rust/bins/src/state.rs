//! S: hosts the bins and applies records in time order.
//!
//! State is installed as it comes. Data is stashed by time; a time is applied once neither data nor state can still
//! come at or before it, post-dated records first. One capability, for the least pending time, stands for all
//! post-dated records.
//!
//! *Ahead of the state.* While bins are on their way what is for the others is applied (`ahead`), as soon as data cannot come any more at or before
//! its time. When F has started a configuration everything before it has been applied on all workers; rows of times for which it holds, as far as F
//! knows, are here because the bin is this worker's from its time on. Such a bin is in service here (it stayed, or has come whole) or still to
//! come, and one that leaves gets none of them; so a bin in service is what it is to be.
//!
//! Invariants: the times of a bin are applied in ascending order, and while it is in service; blocks without keys, which speak of all bins, are
//! applied when all are here, and nothing of their time or later before that.
//!
//! Source: Megaphone §3.4, §4.3; M-04, M-11. Departure: there all rows at or after the time of a migration wait for all of its bins.

use std::cmp::Reverse;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Bound::{Excluded, Unbounded};
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;

use penstock_dataflow::{Activator, Frontiers, Input, Output};
use penstock_progress::{Capability, Timestamp, TotalOrder};

use crate::arrival::{Arrivals, Destination};
use crate::bin::BinState;
use crate::block::Block;
use crate::error::{BinsError, BoxError};
use crate::message::{Addressed, BinPart, Record, Told};
use crate::route::Shared;
use crate::routing::Routing;
use crate::stats::BinEvent;
use crate::table::BinTable;

/// Input ports of S, in the order in which they are added.
const DATA: usize = 0;
const STATE: usize = 1;

/// The output port on which S tells of the state that comes.
const TOLD: usize = 1;

/// Everything the logic gets for one time.
pub struct Moment<'a, T: Timestamp, D, S: BinState, P, O: 'static> {
    /// The right to send at this time.
    pub capability: &'a Capability<T>,
    /// The time.
    pub time: &'a T,
    /// The blocks of this time: senders ascending, each sender's in the order in which it sent them; blocks without keys last.
    pub blocks: Vec<D>,
    /// Post-dated records that are due, by bin, in the order in which they were made. They come before the blocks.
    pub due: Vec<(u32, P)>,
    /// The bins of this worker; those only of what is given may be changed, or all where a block without keys is.
    pub bins: &'a mut BinTable<S>,
    /// Takes records for this time or later.
    pub later: &'a mut Later<T, P>,
    /// Takes output at this time.
    pub out: &'a mut Outbox<'a, T, O>,
    /// Blocks that the logic puts here come back at this time, before it is done, when what it gave has gone on: for a logic that makes more
    /// than should be held at once.
    pub again: &'a mut Vec<D>,
}

/// Records that the logic post-dates.
#[derive(Debug)]
pub struct Later<T, P> {
    now: T,
    records: Vec<(u32, T, P)>,
}

impl<T: Timestamp + TotalOrder, P> Later<T, P> {
    pub(crate) fn new(now: T) -> Self {
        Self { now, records: Vec::new() }
    }

    /// Takes what another one of the same time has taken.
    pub(crate) fn extend<Q>(&mut self, other: Later<T, Q>, wrap: impl Fn(Q) -> P) {
        self.records.extend(other.records.into_iter().map(|(bin, time, record)| (bin, time, wrap(record))));
    }

    /// Has `record` come back for `bin`, of which rows or records were given, at `time`. At the present time it comes back at once, after this call.
    ///
    /// # Errors
    /// [`BinsError::Postdated`] when `time` is before the present one (M-04); nothing changes.
    pub fn at(&mut self, bin: u32, time: T, record: P) -> Result<(), BinsError> {
        if time < self.now {
            let (now, asked) = (format!("{:?}", self.now), format!("{time:?}"));
            return Err(BinsError::Postdated { now, asked });
        }
        self.records.push((bin, time, record));
        Ok(())
    }
}

/// Output at one time.
pub struct Outbox<'a, T: Timestamp, O: 'static> {
    output: &'a mut Output<T, O>,
    capability: &'a Capability<T>,
}

impl<T: Timestamp, O: 'static> Outbox<'_, T, O> {
    /// Sends a block.
    pub fn give(&mut self, block: O) {
        self.output.session(self.capability).give(block);
    }

    pub(crate) fn lend(&mut self) -> Outbox<'_, T, O> {
        Outbox { output: self.output, capability: self.capability }
    }
}

/// The edges of S.
pub(crate) struct Ports<T: Timestamp, D: Block, P: Record, O: 'static> {
    pub(crate) data: Input<T, Addressed<D>>,
    pub(crate) states: Input<T, Addressed<BinPart<T, P>>>,
    pub(crate) output: Output<T, O>,
    pub(crate) told: Output<T, Addressed<Told>>,
}

/// Blocks of one time with their senders.
type Stashed<T, D> = (Capability<T>, Vec<(usize, D)>);

/// The operator S on one worker.
pub(crate) struct StateOperator<T: Timestamp, D: Block, S: BinState, P: Record, O: 'static, L> {
    ports: Ports<T, D, P, O>,
    shared: Rc<Shared<T, S, P>>,
    logic: L,
    arrivals: Arrivals<T>,
    /// By worker of another process that sends bins, the right to tell it: at the time of the state, on an edge that holds back no frontier.
    senders: BTreeMap<usize, Capability<T>>,
    stash: BTreeMap<T, Stashed<T, D>>,
    /// For the least pending time.
    least: Option<Capability<T>>,
    /// The time that is begun and not done, and the blocks that are left of it.
    begun: Option<(T, Capability<T>, Vec<D>)>,
    /// What was applied ahead of the state of a migration, and what was not.
    ahead: Option<Ahead<T>>,
    /// Bins that have come in this run.
    came: Vec<u32>,
    hot_first: bool,
    wake: Activator,
}

/// How far S is ahead of the state of a migration.
struct Ahead<T> {
    /// When its bins move.
    since: T,
    /// Of the blocks up to this time those rows are left whose bins are shut.
    looked: Option<T>,
    /// Bins for which rows are left, and how many. They stay shut when they have come, until what is left is looked through again.
    shut: HashMap<u32, u64>,
    /// How many rows are left, and of these for bins that have come.
    left: u64,
    ready: u64,
    /// Bins that are shut and were not asked for, and those that were.
    unasked: Vec<u32>,
    asked: HashSet<u32>,
}

/// Rows that are left are looked through when those whose bins have come are one in so many of them, whether bins came or rows: so each is looked at
/// about so often, and rows of a bin that has come do not wait for the others for ever.
const WORTH: u64 = 16;
/// And when there are no more than these.
const FEW: u64 = 1 << 12;

impl<T, D, S, P, O, L> StateOperator<T, D, S, P, O, L>
where
    T: Timestamp + TotalOrder,
    D: Block,
    S: BinState,
    P: Record,
    O: 'static,
    L: FnMut(Moment<'_, T, D, S, P, O>) -> Result<(), BoxError>,
{
    pub(crate) fn new(
        ports: Ports<T, D, P, O>,
        shared: Rc<Shared<T, S, P>>,
        hot_first: bool,
        wake: Activator,
        logic: L,
    ) -> Self {
        let (arrivals, stash) = (Arrivals::new(), BTreeMap::new());
        let senders = BTreeMap::new();
        Self {
            ports,
            shared,
            logic,
            arrivals,
            senders,
            stash,
            least: None,
            begun: None,
            ahead: None,
            came: Vec::new(),
            hot_first,
            wake,
        }
    }

    /// One run: state, then data, then every time that is complete.
    pub(crate) fn run(&mut self, frontiers: &Frontiers<'_, T>) -> Result<(), BoxError> {
        self.settle(frontiers)?;
        self.receive_state()?;
        while let Some((capability, block)) = self.ports.data.next() {
            let from = capability.sender();
            let entry = self.stash.entry(capability.time().clone());
            entry.or_insert_with(|| (capability.retain(), Vec::new())).1.push((from, block.content));
        }
        if let Some((time, capability, blocks)) = self.begun.take() {
            self.call(time, capability, blocks, Vec::new())?;
        }
        while let (None, Some(time)) = (&self.begun, self.next_time()) {
            if frontiers.less_equal(DATA, &time) || frontiers.less_equal(STATE, &time) {
                break;
            }
            self.apply(time)?;
        }
        self.go_ahead(frontiers)?;
        if self.begun.is_some() {
            self.wake.activate();
        }
        // Bins that left took their records along.
        self.hold(None);
        Ok(())
    }

    fn receive_state(&mut self) -> Result<(), BoxError> {
        let shared = Rc::clone(&self.shared);
        let mut taken = BTreeMap::<usize, u64>::new();
        loop {
            let Some((capability, part)) = self.ports.states.next() else { break };
            let time = capability.time();
            let from = Some(capability.sender()).filter(|from| !(shared.local)(*from));
            if let Some(from) = from {
                self.senders.entry(from).or_insert_with(|| capability.retain_for(TOLD));
                *taken.entry(from).or_default() += part.content.weight();
            }
            let (mut later, mut whole) = (false, None);
            let told = |bin, what, bytes| {
                later |= what == BinEvent::Pending;
                whole = Some(bin).filter(|_| what == BinEvent::Installed).or(whole);
                shared.stats.bytes_in.fetch_add(bytes as u64, Relaxed);
                shared.stats.record(shared.index, bin, time.clone(), what, bytes as u64);
            };
            shared.receive(|to| self.arrivals.part(time, from, part.content, to, told))?;
            if let Some(bin) = whole {
                shared.stats.owned.fetch_add(1, Relaxed);
                shared.stats.moved_in.fetch_add(1, Relaxed);
                self.came.push(bin);
            }
            if later {
                let held = capability.retain();
                drop(capability);
                self.hold(Some(&held));
            }
        }
        for (sender, bytes) in taken.into_iter().filter(|(_, bytes)| *bytes > 0) {
            self.tell(sender, Told::Taken(bytes));
        }
        if self.arrivals.is_empty() {
            self.senders.clear();
        }
        Ok(())
    }

    fn tell(&mut self, sender: usize, told: Told) {
        if let Some(capability) = self.senders.get(&sender) {
            self.ports.told.session(capability).give(Addressed { to: sender as u32, content: told });
        }
    }

    /// Asks for the bins that rows wait for, each once.
    fn ask(&mut self, ahead: &mut Ahead<T>) {
        let mut wanted = BTreeMap::<usize, Vec<(u64, u32)>>::new();
        let Ahead { shut, unasked, asked, .. } = ahead;
        unasked.retain(|bin| match (asked.contains(bin), shut.get(bin), self.arrivals.sender(*bin)) {
            (false, Some(rows), Some(from)) => {
                asked.insert(*bin);
                wanted.entry(from).or_default().push((*rows, *bin));
                false
            }
            // It may not be announced yet.
            (false, Some(_), None) => self.shared.table.borrow().get(*bin).is_none(),
            _ => false,
        });
        for (sender, mut bins) in wanted {
            bins.sort_unstable_by_key(|(rows, bin)| (Reverse(*rows), *bin));
            self.tell(sender, Told::Wanted(bins.into_iter().map(|(_, bin)| bin).collect()));
        }
    }

    fn settle(&mut self, frontiers: &Frontiers<'_, T>) -> Result<(), BinsError> {
        let table = self.shared.table.borrow();
        self.arrivals.settle(|bin| table.coming(bin), |time| !frontiers.less_equal(STATE, time))
    }

    /// Applies what is for bins in service, while others are on their way: see the module.
    fn go_ahead(&mut self, frontiers: &Frontiers<'_, T>) -> Result<(), BoxError> {
        let came = std::mem::take(&mut self.came);
        let moving = self.shared.moving.borrow().clone().filter(|moving| frontiers.less_equal(STATE, &moving.since));
        let Some(moving) = moving else {
            self.ahead = None;
            return Ok(());
        };
        let ahead = self.ahead.take().filter(|ahead| ahead.since == moving.since);
        let mut ahead = ahead.unwrap_or_else(|| Ahead::new(moving.since.clone()));
        came.iter().for_each(|bin| ahead.came(*bin));
        while self.begun.is_none() {
            ahead.reopen();
            let Some(time) = self.next_ahead(&ahead) else { break };
            let known = moving.until.as_ref().is_none_or(|until| time < *until);
            let of_all = |(_, blocks): &Stashed<T, D>| blocks.iter().any(|(_, block)| block.hashes().is_none());
            if !known || frontiers.less_equal(DATA, &time) || self.stash.get(&time).is_some_and(of_all) {
                break;
            }
            self.apply_ahead(time, &mut ahead)?;
        }
        if self.hot_first {
            self.ask(&mut ahead);
        }
        self.ahead = Some(ahead);
        Ok(())
    }

    /// The least time for which there are blocks that were not looked at, or records for bins that are open.
    fn next_ahead(&self, ahead: &Ahead<T>) -> Option<T> {
        let (pending, table) = (self.shared.pending.borrow(), self.shared.table.borrow());
        let blocks = match &ahead.looked {
            Some(looked) => self.stash.range::<T, _>((Excluded(looked), Unbounded)).next(),
            None => self.stash.first_key_value(),
        };
        let due = pending.least_of(|bin| ahead.is_open(&table, bin));
        blocks.map(|(time, _)| time).into_iter().chain(due).min().cloned()
    }

    /// Applies what there is at a time for bins that are open, and counts what is left.
    fn apply_ahead(&mut self, time: T, ahead: &mut Ahead<T>) -> Result<(), BoxError> {
        let mut open = Vec::new();
        let mut given = None;
        if ahead.looked.as_ref().is_none_or(|looked| *looked < time)
            && let Entry::Occupied(mut entry) = self.stash.entry(time.clone())
        {
            ahead.looked = Some(time.clone());
            let (capability, blocks) = entry.get_mut();
            let (table, active) = (self.shared.table.borrow(), self.shared.active.borrow());
            let mut left = Vec::new();
            blocks.sort_by_key(|(from, _)| *from);
            for (from, block) in std::mem::take(blocks) {
                ahead.part(block, &table, &active, &mut |is_open, part| match is_open {
                    true => open.push(part),
                    false => left.push((from, part)),
                });
            }
            given = Some(capability.clone());
            *blocks = left;
            if blocks.is_empty() {
                entry.remove();
            }
        }
        let due = {
            let table = self.shared.table.borrow();
            self.shared.pending.borrow_mut().take_due_of(&time, |bin| ahead.is_open(&table, bin))
        };
        if open.is_empty() && due.is_empty() {
            return Ok(());
        }
        let capability = match given {
            Some(capability) => capability,
            None => self.least.as_ref().expect("pending records have a capability").delayed(&time)?,
        };
        let records = (due.len() + open.iter().map(Block::len).sum::<usize>()) as u64;
        self.shared.stats.applied.fetch_add(records, Relaxed);
        self.shared.stats.ahead.fetch_add(records, Relaxed);
        self.call(time, capability, open, due)
    }

    /// The least time for which there is something to apply.
    fn next_time(&self) -> Option<T> {
        let pending = self.shared.pending.borrow();
        let stashed = self.stash.first_key_value().map(|(time, _)| time);
        stashed.into_iter().chain(pending.least()).min().cloned()
    }

    fn apply(&mut self, time: T) -> Result<(), BoxError> {
        let (capability, mut blocks) = match self.stash.entry(time.clone()) {
            Entry::Occupied(entry) => entry.remove(),
            Entry::Vacant(_) => {
                let least = self.least.as_ref().expect("pending records have a capability");
                (least.delayed(&time)?, Vec::new())
            }
        };
        blocks.sort_by_key(|(from, block)| (block.hashes().is_none(), *from));
        let due = self.shared.pending.borrow_mut().take_due(&time);
        let records = due.len() + blocks.iter().map(|(_, block)| block.len()).sum::<usize>();
        self.shared.stats.applied.fetch_add(records as u64, Relaxed);
        self.call(time, capability, blocks.into_iter().map(|(_, block)| block).collect(), due)
    }

    fn call(&mut self, time: T, capability: Capability<T>, blocks: Vec<D>, due: Vec<(u32, P)>) -> Result<(), BoxError> {
        let mut later = Later::new(time.clone());
        let mut again = Vec::new();
        {
            let mut out = Outbox { output: &mut self.ports.output, capability: &capability };
            let mut bins = self.shared.table.borrow_mut();
            (self.logic)(Moment {
                capability: &capability,
                time: &time,
                blocks,
                due,
                bins: &mut bins,
                later: &mut later,
                out: &mut out,
                again: &mut again,
            })?;
            let mut pending = self.shared.pending.borrow_mut();
            for (bin, at, record) in later.records {
                if bins.get(bin).is_none() {
                    return Err(BinsError::Absent { bin }.into());
                }
                pending.push(bin, at, record);
            }
        }
        self.hold(Some(&capability));
        if !again.is_empty() {
            self.begun = Some((time, capability, again));
        }
        Ok(())
    }

    /// Makes the one pending capability that of the least pending time; `source` is at or before that time if the capability held
    /// is not.
    fn hold(&mut self, source: Option<&Capability<T>>) {
        let pending = self.shared.pending.borrow();
        let Some(least) = pending.least() else {
            self.least = None;
            return;
        };
        match (&mut self.least, source) {
            (Some(held), _) if held.time() <= least => {
                held.downgrade(least).expect("compared above");
            }
            (held, Some(source)) => {
                *held = Some(source.delayed(least).expect("records are made at or before their time"));
            }
            (_, None) => unreachable!("a record for {least:?} came without a capability"),
        }
    }
}

impl<T: Ord> Ahead<T> {
    fn new(since: T) -> Self {
        let (shut, unasked, asked) = (HashMap::new(), Vec::new(), HashSet::new());
        Self { since, looked: None, shut, left: 0, ready: 0, unasked, asked }
    }

    /// Whether all of a bin is here and nothing that is before is left for it.
    fn is_open<S: BinState>(&self, table: &BinTable<S>, bin: u32) -> bool {
        table.get(bin).is_some() && !self.shut.contains_key(&bin)
    }

    /// Gives the rows of a block whose bins are open, and those that are left, which are counted.
    fn part<S: BinState, D: Block>(
        &mut self,
        block: D,
        table: &BinTable<S>,
        active: &Routing,
        give: &mut dyn FnMut(bool, D),
    ) {
        let Some(hashes) = block.hashes() else { return give(false, block) };
        let (mut open, mut last) = (Vec::with_capacity(hashes.len()), None);
        for &hash in hashes {
            let bin = active.bin_of(hash);
            let is_open = match last {
                Some((same, is_open)) if same == bin => is_open,
                _ => self.is_open(table, bin),
            };
            last = Some((bin, is_open));
            if !is_open {
                *self.shut.entry(bin).or_insert_with(|| {
                    self.unasked.push(bin);
                    0
                }) += 1;
                self.left += 1;
                self.ready += u64::from(table.get(bin).is_some());
            }
            open.push(u32::from(is_open));
        }
        match open.iter().sum::<u32>() as usize {
            0 if !open.is_empty() => give(false, block),
            all if all == open.len() => give(true, block),
            _ => block.split(&open, &mut |is_open, part| give(is_open == 1, part)),
        }
    }

    /// A bin has come.
    fn came(&mut self, bin: u32) {
        self.ready += self.shut.get(&bin).copied().unwrap_or(0);
    }

    /// Opens the bins that have come and that rows are left for, if it is worth it to look through what is left again.
    fn reopen(&mut self) {
        if self.ready > 0 && (self.left <= FEW || self.ready * WORTH >= self.left) {
            // What is looked at is counted anew.
            self.shut.clear();
            (self.left, self.ready, self.looked) = (0, 0, None);
        }
    }
}

impl<T, S: BinState, P> Shared<T, S, P> {
    /// Lets arrivals work on what F and S share.
    fn receive<R>(&self, act: impl FnOnce(&mut Destination<'_, T, S, P>) -> R) -> R {
        let mut table = self.table.borrow_mut();
        let mut pending = self.pending.borrow_mut();
        let (name, shelf, new_state) = (&*self.name, &self.shelf, &*self.new_state);
        let (table, pending) = (&mut *table, &mut *pending);
        act(&mut Destination { name, table, pending, shelf, new_state, record: self.record })
    }
}
