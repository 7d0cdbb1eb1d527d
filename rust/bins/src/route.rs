//! F: routes data by the configuration of its time, and starts migrations.
//!
//! Data in advance of the control frontier is stashed with its capability. Control is staged with a capability on the state
//! output, which keeps S from passing its time; workers with nothing to send for a configuration let go of it as soon as
//! it is compiled, the others when they have sent.
//!
//! Invariants: the state output depends on control alone (M-08: its summary has no path from the data input); per
//! sender and time, blocks leave in the order in which they came.
//!
//! One that joins a run owns no bin and keeps data until it knows the configurations of a peer; control that both were told counts once.
//!
//! Source: Megaphone §3.4, §4.3. Departures: control is not re-broadcast (the edge into F is a broadcast already); within
//! a process a bin's state moves as a ticket; between processes it moves as there is room (see `shipment`).

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use penstock_dataflow::{Activator, Frontiers, Input, Lesson, Output};
use penstock_progress::{Capability, ProbeHandle, Timestamp, TotalOrder};

use crate::bin::{BinState, bin};
use crate::block::{Block, route_block};
use crate::configuration::{Configuration, Configurations, Outcome};
use crate::control::{Changes, Control};
use crate::error::{BinsError, BoxError, ControlError};
use crate::message::{Addressed, BinPart, Record, Told};
use crate::pending::Pending;
use crate::recut::Divide;
use crate::routing::Routing;
use crate::shelf::Shelf;
use crate::shipment::{Left, Shipment, UnderWay};
use crate::stateful::EpochOf;
use crate::stats::{Loads, Stats};
use crate::table::BinTable;

/// Input port of control at F; data is port 0.
pub(crate) const CONTROL: usize = 1;

/// Output ports of F, in the order in which they are added.
pub(crate) const ROUTED: usize = 0;
pub(crate) const STATE: usize = 1;

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
    pub(crate) record: bool,
    /// Bins that have left the process in the configuration that was started last, until it is complete.
    pub(crate) left: RefCell<Vec<u32>>,
    /// The routing by which bins lie now, for S and the host to read.
    pub(crate) active: Rc<RefCell<Routing>>,
    /// Configurations that F has started and that change anything, for the host to read.
    pub(crate) started: Rc<Cell<u64>>,
    /// The configuration whose bins are on their way, as F knows it; S looks here.
    pub(crate) moving: RefCell<Option<Moving<T>>>,
    /// Runs S when that changes.
    pub(crate) wake: OnceCell<Activator>,
    pub(crate) stats: Arc<Stats<T>>,
}

/// A configuration that this F has started and S has not passed everywhere: all before it has been applied, on all workers.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Moving<T> {
    /// Its time.
    pub(crate) since: T,
    /// It is the configuration of all times from then on and before this; no other is known where there is none.
    pub(crate) until: Option<T>,
}

/// The edges of F.
pub(crate) struct Ports<T: Timestamp, D: Block, P: Record> {
    pub(crate) data: Input<T, D>,
    pub(crate) control: Input<T, Vec<Control>>,
    /// What S of a worker tells of the state that goes to it. Leads to no output.
    pub(crate) told: Input<T, Addressed<Told>>,
    pub(crate) routed: Output<T, Addressed<D>>,
    pub(crate) states: Output<T, Addressed<BinPart<T, P>>>,
}

/// What F is built from.
pub(crate) struct RouteParts<T: Timestamp, D: Block, S: BinState, P: Record> {
    pub(crate) ports: Ports<T, D, P>,
    pub(crate) shared: Rc<Shared<T, S, P>>,
    pub(crate) routing: Routing,
    /// S's output frontier.
    pub(crate) probe: ProbeHandle<T>,
    /// Bytes of state that may be under way.
    pub(crate) ship_bytes: usize,
    pub(crate) rejected: Rc<RefCell<Vec<(T, ControlError)>>>,
    /// What it learns of a peer when it joins a run, and teaches those who do.
    pub(crate) lesson: Lesson<Configurations<T>>,
    /// Tells members from absent workers.
    pub(crate) present: Rc<dyn Fn(u32) -> bool>,
    /// Runs this F again.
    pub(crate) wake: Activator,
    /// How post-dated records are divided, where bins may be split.
    pub(crate) divide: Divide<P>,
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
    /// What is being sent away and the right to; no later configuration starts before it is all sent, since it holds back S.
    shipment: Option<(Capability<T>, Shipment<T, P>)>,
    under_way: UnderWay,
    owners: Vec<u32>,
    loads: Loads,
}

impl<T, D, S, P> RouteOperator<T, D, S, P>
where
    T: Timestamp + TotalOrder,
    D: Block,
    S: BinState,
    P: Record,
{
    pub(crate) fn new(parts: RouteParts<T, D, S, P>) -> Self {
        let loads = parts.shared.stats.counts(parts.routing.owners().len());
        Self {
            loads,
            configurations: match parts.divide {
                Some(_) => Configurations::new(parts.routing.clone()),
                None => Configurations::new(parts.routing.clone()).indivisible(),
            },
            under_way: UnderWay::new(parts.ship_bytes),
            shipment: None,
            parts,
            held: BTreeMap::new(),
            stash: BTreeMap::new(),
            moving: None,
            owners: Vec::new(),
        }
    }

    /// One run: control, then data, then the state for which there is room, then the configurations that may start.
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
        if let Some(peer) = self.parts.lesson.learn() {
            self.learn(peer)?;
        }
        if !self.parts.lesson.is_due() {
            self.compile(frontiers.frontier(CONTROL));
        }
        for pupil in self.parts.lesson.pupils() {
            self.parts.lesson.teach(pupil, self.configurations.clone());
        }
        if self.moving.take_if(|time| !self.parts.probe.less_equal(time)).is_some() {
            self.parts.shared.have_come();
        }
        self.release();
        loop {
            let Some((capability, block)) = self.parts.ports.data.next() else { break };
            let time = capability.time();
            if self.configurations.uncertain(time) {
                let time = time.clone();
                self.stash.entry(time).or_insert_with(|| (capability.retain_for(ROUTED), Vec::new())).1.push(block);
            } else {
                let routed = capability.retain_for(ROUTED);
                drop(capability);
                self.route(&routed, block);
            }
        }
        while let Some((capability, told)) = self.parts.ports.told.next() {
            match (told.content, &mut self.shipment) {
                (Told::Taken(bytes), _) => self.under_way.taken(capability.sender(), bytes)?,
                (Told::Wanted(bins), Some((_, shipment))) => shipment.want(bins),
                // It crossed the last of them.
                (Told::Wanted(_), None) => {}
            }
        }
        self.ship()?;
        let probe = self.parts.probe.clone();
        while let Some(configuration) = self.configurations.start(|time| probe.less_than(time)) {
            self.migrate(configuration)?;
        }
        self.tell();
        Ok(())
    }

    /// Tells S for which times the bins that are here may be worked on while others are on their way.
    fn tell(&self) {
        let until = || self.configurations.holds_until().cloned();
        let moving = self.moving.as_ref().map(|since| Moving { since: since.clone(), until: until() });
        let shared = &self.parts.shared;
        if *shared.moving.borrow() != moving {
            *shared.moving.borrow_mut() = moving;
            if let Some(wake) = shared.wake.get() {
                wake.activate();
            }
        }
    }

    /// Begins where a peer stands.
    fn learn(&mut self, peer: Configurations<T>) -> Result<(), BinsError> {
        let Self { configurations, held, parts, .. } = self;
        configurations.learn(peer)?;
        *parts.shared.active.borrow_mut() = configurations.active().clone();
        held.retain(|time, _| configurations.concerns(time, parts.shared.index as u32));
        Ok(())
    }

    /// Turns control that is complete into configurations.
    fn compile(&mut self, frontier: &[T]) {
        let here = self.parts.shared.index as u32;
        for outcome in self.configurations.advance(frontier, &*self.parts.present) {
            match outcome {
                Outcome::Pending(configuration) => {
                    let Changes { moves, recuts } = &configuration.changes;
                    if moves.iter().all(|m| m.from != here) && recuts.iter().all(|recut| recut.worker != here) {
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
        let Self { parts, configurations, owners, moving, loads, .. } = self;
        let here = parts.shared.index as u32;
        let rows = block.len() as u64;
        let routing = configurations.routing_at(capability.time()).expect("asked only for certain times");
        if let Some(hashes) = block.hashes() {
            loads.count(hashes, |hash| bin(hash, routing.bits()));
            if routing.is_split() {
                loads.count_parts(&parts.shared.stats, hashes, |hash| routing.bin_of(hash));
            }
        }
        let mut session = parts.ports.routed.session(capability);
        route_block(block, routing, here, owners, &mut |to, content| session.give(Addressed { to, content }));
        parts.shared.stats.routed.fetch_add(rows, Relaxed);
        if moving.is_some() {
            parts.shared.stats.routed_moving.fetch_add(rows, Relaxed);
        }
    }

    /// Splits and merges here, and begins to send away the bins that leave this worker; or lets go of the configuration's time.
    fn migrate(&mut self, configuration: Configuration<T>) -> Result<(), BinsError> {
        let Configuration { time, changes } = configuration;
        self.parts.shared.active.borrow_mut().forward(&changes);
        if !changes.is_empty() {
            self.moving = Some(time.clone());
            self.parts.shared.started.update(|started| started + 1);
        }
        let Some(capability) = self.held.remove(&time) else { return Ok(()) };
        let here = self.parts.shared.index as u32;
        let Changes { moves, recuts } = changes;
        for recut in recuts.iter().filter(|recut| recut.worker == here) {
            self.parts.shared.recut(recut, &time, &self.parts.divide)?;
        }
        let leaving = moves.into_iter().filter(|m| m.from == here);
        self.shipment = Some((capability, Shipment::new(time, leaving, &self.parts.shared)));
        self.ship()
    }

    /// Sends what there is room for; with the last part, lets go of the time.
    fn ship(&mut self) -> Result<(), BinsError> {
        let RouteParts { ports, shared, wake, .. } = &mut self.parts;
        if let Some((capability, shipment)) = &mut self.shipment {
            let mut session = ports.states.session(capability);
            let mut send = |to, content| session.give(Addressed { to, content });
            match shipment.send(shared, &mut self.under_way, &mut send)? {
                Left::Nothing => self.shipment = None,
                Left::NoRoom => {}
                Left::More => wake.activate(),
            }
        }
        Ok(())
    }
}
