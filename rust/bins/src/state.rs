//! S: hosts the bins and applies records in time order.
//!
//! State is installed as it comes. Data is stashed by time; a time is applied once neither data nor state can still
//! come at or before it, post-dated records first. One capability, for the least pending time, stands for all
//! post-dated records.
//!
//! Invariant: times are applied in ascending order; a bin's records are applied only while the bin is in the table.
//!
//! Source: Megaphone §3.4, §4.3; M-04, M-11.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;

use penstock_dataflow::{Activator, Frontiers, Input, Output};
use penstock_progress::{Capability, Timestamp, TotalOrder};

use crate::arrival::{Arrivals, Destination};
use crate::bin::BinState;
use crate::block::Block;
use crate::error::{BinsError, BoxError};
use crate::message::{Addressed, BinPart, Record};
use crate::route::Shared;
use crate::stats::BinEvent;
use crate::table::BinTable;

/// Input ports of S, in the order in which they are added.
const DATA: usize = 0;
const STATE: usize = 1;

/// The output port on which S tells what it has taken in.
const TAKEN: usize = 1;

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
    /// The bins of this worker.
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
    /// Has `record` come back for `bin` at `time`. At the present time it comes back at once, after this call.
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
}

/// The edges of S.
pub(crate) struct Ports<T: Timestamp, D: Block, P: Record, O: 'static> {
    pub(crate) data: Input<T, Addressed<D>>,
    pub(crate) states: Input<T, Addressed<BinPart<T, P>>>,
    pub(crate) output: Output<T, O>,
    pub(crate) taken: Output<T, Addressed<u64>>,
}

/// Blocks of one time with their senders.
type Stashed<T, D> = (Capability<T>, Vec<(usize, D)>);

/// The operator S on one worker.
pub(crate) struct StateOperator<T: Timestamp, D: Block, S: BinState, P: Record, O: 'static, L> {
    ports: Ports<T, D, P, O>,
    shared: Rc<Shared<T, S, P>>,
    logic: L,
    arrivals: Arrivals<T>,
    stash: BTreeMap<T, Stashed<T, D>>,
    /// For the least pending time.
    least: Option<Capability<T>>,
    /// The time that is begun and not done, and the blocks that are left of it.
    begun: Option<(T, Capability<T>, Vec<D>)>,
    wake: Activator,
}

impl<T, D, S, P, O, L> StateOperator<T, D, S, P, O, L>
where
    T: Timestamp + TotalOrder,
    D: Block,
    S: BinState,
    P: Record,
    O: 'static,
    L: FnMut(Moment<'_, T, D, S, P, O>) -> Result<(), BoxError>,
{
    pub(crate) fn new(ports: Ports<T, D, P, O>, shared: Rc<Shared<T, S, P>>, wake: Activator, logic: L) -> Self {
        let (arrivals, stash) = (Arrivals::new(), BTreeMap::new());
        Self { ports, shared, logic, arrivals, stash, least: None, begun: None, wake }
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
        if self.begun.is_some() {
            self.wake.activate();
        }
        // Bins that left took their records along.
        self.hold(None);
        Ok(())
    }

    fn receive_state(&mut self) -> Result<(), BoxError> {
        let shared = Rc::clone(&self.shared);
        // By sender, with the right to tell it: at the time of the state, on an edge that holds back no frontier. Whoever joins has no other.
        let mut taken = BTreeMap::<usize, (Capability<T>, u64)>::new();
        loop {
            let Some((capability, part)) = self.ports.states.next() else { break };
            let time = capability.time();
            let foreign = !(shared.local)(capability.sender());
            if foreign && part.content.weight() > 0 {
                let entry = taken.entry(capability.sender());
                entry.or_insert_with(|| (capability.retain_for(TAKEN), 0)).1 += part.content.weight();
            }
            let arrived = shared.receive(|to| self.arrivals.part(time, foreign, part.content, to))?;
            let Some((bin, what, bytes)) = arrived else { continue };
            shared.stats.bytes_in.fetch_add(bytes as u64, Relaxed);
            shared.stats.record(shared.index, bin, time.clone(), what, bytes as u64);
            if what == BinEvent::Pending {
                let held = capability.retain();
                drop(capability);
                self.hold(Some(&held));
            }
        }
        for (sender, (telling, bytes)) in taken {
            self.ports.taken.session(&telling).give(Addressed { to: sender as u32, content: bytes });
        }
        Ok(())
    }

    fn settle(&mut self, frontiers: &Frontiers<'_, T>) -> Result<(), BinsError> {
        let shared = &*self.shared;
        let passed = |time: &T| !frontiers.less_equal(STATE, time);
        let table = shared.table.borrow();
        for (bin, time) in self.arrivals.settle(|bin| table.coming(bin), passed)? {
            shared.stats.record(shared.index, bin, time, BinEvent::Installed, 0);
            shared.stats.owned.fetch_add(1, Relaxed);
            shared.stats.moved_in.fetch_add(1, Relaxed);
        }
        Ok(())
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
        let mut later = Later { now: time.clone(), records: Vec::new() };
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
