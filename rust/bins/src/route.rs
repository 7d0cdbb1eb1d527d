//! F: routes data by the configuration of its time, and starts migrations.
//!
//! Data in advance of the control frontier is stashed with its capability. Control is staged with a capability on the state
//! output, which keeps S from passing its time; workers with nothing to send for a configuration let go of it as soon as
//! it is compiled, the others when they have sent.
//!
//! Invariants: the state output depends on control alone (M-08: its summary has no path from the data input); per
//! sender and time, blocks leave in the order in which they came.
//!
//! Source: Megaphone §3.4, §4.3. Departures: control is not re-broadcast (the edge into F is a broadcast already); within
//! a process a bin's state moves as a ticket.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use penstock_dataflow::{Frontiers, Input, Output};
use penstock_progress::{Capability, ProbeHandle, Timestamp, TotalOrder};

use crate::bin::BinState;
use crate::block::{Block, route_block};
use crate::configuration::{Configuration, Configurations, Outcome};
use crate::control::{Control, Move};
use crate::error::{BinsError, BoxError, ControlError};
use crate::message::{Addressed, Piece, Record};
use crate::pending::Pending;
use crate::routing::Routing;
use crate::shelf::Shelf;
use crate::stateful::EpochOf;
use crate::stats::{Stats, What};
use crate::table::BinTable;

/// Input port of control at F; data is port 0.
pub(crate) const CONTROL: usize = 1;

/// Output ports of F, in the order in which they are added.
pub(crate) const ROUTED: usize = 0;
pub(crate) const STATE: usize = 1;

/// Post-dated records in one message between processes.
const RECORDS_PER_MESSAGE: usize = 1024;

/// What F and S of one worker share.
pub(crate) struct Shared<T, S: BinState, P> {
    pub(crate) name: String,
    pub(crate) index: usize,
    pub(crate) table: Rc<RefCell<BinTable<S>>>,
    pub(crate) pending: Rc<RefCell<Pending<T, P>>>,
    pub(crate) shelf: Shelf<S>,
    pub(crate) local: Rc<dyn Fn(usize) -> bool>,
    pub(crate) new_state: Rc<dyn Fn() -> S>,
    pub(crate) begins: EpochOf<T>,
    pub(crate) stats: Arc<Stats<T>>,
}

/// The edges of F.
pub(crate) struct Ports<T: Timestamp, D: Block, P: Record> {
    pub(crate) data: Input<T, D>,
    pub(crate) control: Input<T, Vec<Control>>,
    pub(crate) routed: Output<T, Addressed<D>>,
    pub(crate) states: Output<T, Addressed<Piece<T, P>>>,
}

/// What F is built from.
pub(crate) struct RouteParts<T: Timestamp, D: Block, S: BinState, P: Record> {
    pub(crate) ports: Ports<T, D, P>,
    pub(crate) shared: Rc<Shared<T, S, P>>,
    pub(crate) routing: Routing,
    /// S's output frontier.
    pub(crate) probe: ProbeHandle<T>,
    /// The routing by which bins lie now, for the host to read.
    pub(crate) active: Rc<RefCell<Routing>>,
    pub(crate) rejected: Rc<RefCell<Vec<(T, ControlError)>>>,
    /// Tells members from absent workers.
    pub(crate) present: Rc<dyn Fn(u32) -> bool>,
}

/// The operator F on one worker.
pub(crate) struct RouteOperator<T: Timestamp, D: Block, S: BinState, P: Record> {
    parts: RouteParts<T, D, S, P>,
    configurations: Configurations<T>,
    /// Rights to send state, by time of the control that needs them.
    held: BTreeMap<T, Capability<T>>,
    stash: BTreeMap<T, (Capability<T>, Vec<D>)>,
    /// Time of the last started configuration that moves bins, until S has passed it.
    moving: Option<T>,
    owners: Vec<u32>,
}

impl<T, D, S, P> RouteOperator<T, D, S, P>
where
    T: Timestamp + TotalOrder,
    D: Block,
    S: BinState,
    P: Record,
{
    pub(crate) fn new(parts: RouteParts<T, D, S, P>) -> Self {
        Self {
            configurations: Configurations::new(parts.routing.clone()),
            parts,
            held: BTreeMap::new(),
            stash: BTreeMap::new(),
            moving: None,
            owners: Vec::new(),
        }
    }

    /// One run: control, then data, then the configurations that may start.
    pub(crate) fn run(&mut self, frontiers: &Frontiers<'_, T>) -> Result<(), BoxError> {
        while let Some((capability, controls)) = self.parts.ports.control.next() {
            if controls.is_empty() {
                // No configuration comes of it, so nothing would ever let go of its time.
                continue;
            }
            let time = capability.time().clone();
            self.held.entry(time.clone()).or_insert_with(|| capability.retain_for(STATE));
            self.configurations.stage(time, controls);
        }
        self.compile(frontiers.frontier(CONTROL));
        self.moving.take_if(|time| !self.parts.probe.less_equal(time));
        self.release();
        while let Some((capability, block)) = self.parts.ports.data.next() {
            let time = capability.time();
            if self.configurations.uncertain(time) {
                let time = time.clone();
                self.stash.entry(time).or_insert_with(|| (capability.retain_for(ROUTED), Vec::new())).1.push(block);
            } else {
                let capability = capability.retain_for(ROUTED);
                self.route(&capability, block);
            }
        }
        let probe = self.parts.probe.clone();
        while let Some(configuration) = self.configurations.start(|time| probe.less_than(time)) {
            self.migrate(configuration)?;
        }
        Ok(())
    }

    /// Turns control that is complete into configurations.
    fn compile(&mut self, frontier: &[T]) {
        let here = self.parts.shared.index as u32;
        for outcome in self.configurations.advance(frontier, &*self.parts.present) {
            match outcome {
                Outcome::Pending(configuration) => {
                    if configuration.moves.iter().all(|m| m.from != here) {
                        self.held.remove(&configuration.time);
                    }
                }
                Outcome::Rejected { time, error } => {
                    self.held.remove(&time);
                    self.parts.rejected.borrow_mut().push((time, error));
                }
            }
        }
    }

    /// Routes what was stashed for times that are certain now.
    fn release(&mut self) {
        while let Some(entry) = self.stash.first_entry() {
            if self.configurations.uncertain(entry.key()) {
                break;
            }
            let (capability, blocks) = entry.remove();
            for block in blocks {
                self.route(&capability, block);
            }
        }
    }

    /// Sends a block's rows to their owners at its time.
    fn route(&mut self, capability: &Capability<T>, block: D) {
        let Self { parts, configurations, owners, moving, .. } = self;
        let here = parts.shared.index as u32;
        let rows = block.len() as u64;
        let routing = configurations.routing_at(capability.time()).expect("asked only for certain times");
        let mut session = parts.ports.routed.session(capability);
        route_block(block, routing, here, owners, &mut |to, content| session.give(Addressed { to, content }));
        parts.shared.stats.routed.fetch_add(rows, Relaxed);
        if moving.is_some() {
            parts.shared.stats.routed_moving.fetch_add(rows, Relaxed);
        }
    }

    /// Sends away the bins that leave this worker, and lets go of the configuration's time.
    fn migrate(&mut self, configuration: Configuration<T>) -> Result<(), BinsError> {
        let Configuration { time, moves } = configuration;
        self.parts.active.borrow_mut().forward(&moves);
        if !moves.is_empty() {
            self.moving = Some(time.clone());
        }
        let Some(capability) = self.held.remove(&time) else { return Ok(()) };
        let here = self.parts.shared.index as u32;
        let mut session = self.parts.ports.states.session(&capability);
        for m in moves.into_iter().filter(|m| m.from == here) {
            self.parts.shared.ship(m, &time, &mut |piece| {
                session.give(Addressed { to: m.to, content: piece });
            })?;
        }
        Ok(())
    }
}

impl<T, S, P> Shared<T, S, P>
where
    T: Timestamp,
    S: BinState,
    P: Record,
{
    /// Uninstalls a bin and sends its pieces.
    fn ship(&self, m: Move, time: &T, send: &mut dyn FnMut(Piece<T, P>)) -> Result<(), BinsError> {
        let bin = m.bin;
        let mut table = self.table.borrow_mut();
        let state = table.get(bin).ok_or(BinsError::Absent { bin })?;
        self.stats.record(self.index, bin, time.clone(), What::Prepare, 0);
        let near = (self.local)(m.to as usize);
        let mut chunks = Vec::new();
        if !near {
            // Encoded where it lies: should that panic, the table still has it.
            state.encode(&mut |chunk| chunks.push(chunk));
        }
        send(Piece::Prepare { bin, epoch: table.epoch(), chunks: chunks.len() as u64 });
        for chunk in chunks {
            self.stats.bytes_out.fetch_add(chunk.len() as u64, Relaxed);
            send(Piece::State { bin, chunk });
        }
        let mut held = table.uninstall_held(bin).ok_or(BinsError::Absent { bin })?;
        if near {
            let ticket = self.shelf.put(&self.name, bin, held)?;
            send(Piece::Shelved { bin, ticket });
        } else {
            held.begins = (self.begins)(time);
            self.shelf.retain(&self.name, bin, held)?;
        }
        self.stats.owned.fetch_sub(1, Relaxed);
        self.stats.moved_out.fetch_add(1, Relaxed);
        let mut records = self.pending.borrow_mut().take_bin(bin).into_iter();
        loop {
            let limit = if near { usize::MAX } else { RECORDS_PER_MESSAGE };
            let some: Vec<_> = records.by_ref().take(limit).collect();
            if some.is_empty() {
                return Ok(());
            }
            send(Piece::Pending { bin, records: some });
        }
    }
}
