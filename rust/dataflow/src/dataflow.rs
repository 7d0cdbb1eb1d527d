//! A running dataflow: its regions, and the bundles in which workers tell each other their progress.
//!
//! One bundle holds the changes of all regions of one worker since its last one, so what was consumed and what that produced
//! travel together, also across the borders of scopes. Bundles are numbered 0, 1, 2, ... per sender; a gap is fatal. The first
//! one of each sender describes the graph that it built; a dataflow, also one without any source, is not done before that of every
//! worker has come. So nobody leaves while another has yet to build it, and graphs that differ are always noticed.
//!
//! A worker speaks only when that may move a frontier, and numbers what it says: see `ledger` and `caster` of `penstock_progress`.
//!
//! In a joinable fabric the same is said through the machine of the member (`membership`), which numbers it and keeps it for joiners.
//!
//! Source: rescaling R§3.2.2, §3.4.1 (C-05, R-04). Departures: one sequence per dataflow instead of one per scope (each region
//! still keeps its own accumulated counts); the graph travels as text, so that a mismatch can be named.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use penstock_progress::caster::{self, Gap};
use penstock_progress::timestamp::Timestamp;

use crate::activate::Mark;
use crate::core::{Core, Sink};
use crate::error::Error;
use crate::fabric::{Payload, Progress};
use crate::region::{AnyRegion, Family, Part, Region};
use crate::wire::encode_serde;

/// The progress of one worker since its last bundle.
pub(crate) struct Bundle {
    number: u64,
    /// The graph that the sender built, in the bundle numbered 0.
    graph: Option<Arc<str>>,
    /// By region; empty where nothing changed.
    parts: Vec<Box<dyn Part>>,
}

/// The bundle's form between processes: of the parts those that are not empty.
type BundleBytes<'a> = (u64, Option<&'a str>, Vec<(u64, Vec<u8>)>);

/// How many sent bundles are kept to be used again: more are only under way when a peer is far behind.
pub(crate) const SPARE: usize = 8;

/// Bundles that wait to be applied.
struct Inbox {
    bundles: RefCell<VecDeque<(usize, Progress)>>,
    mark: Rc<Mark>,
}

impl Sink for Inbox {
    fn accept(&self, from: usize, payload: Payload) -> Result<(), Error> {
        let progress = match payload {
            Payload::Progress(progress) => progress,
            // The sender has a data channel where we have progress; its first bundle will say what it built.
            _ => Progress::Bytes(Vec::new()),
        };
        self.bundles.borrow_mut().push_back((from, progress));
        self.mark.raise();
        Ok(())
    }
}

/// The sending and receiving of bundles, opened before the graph is built so that its channel comes first.
pub(crate) struct Caster {
    core: Rc<Core>,
    /// Of the dataflow.
    number: u64,
    channel: u64,
    inbox: Rc<Inbox>,
    numbers: RefCell<caster::Caster>,
    /// Sent bundles, oldest first: what all peers have read is filled again.
    sent: RefCell<VecDeque<Arc<Bundle>>>,
}

impl Caster {
    pub(crate) fn open(core: Rc<Core>, mark: Rc<Mark>, number: u64) -> Self {
        core.open_dataflow(number);
        let inbox = Rc::new(Inbox { bundles: RefCell::default(), mark });
        let sink = inbox.clone();
        let channel = core.open_channel(|_| sink);
        Caster { core, number, channel, inbox, numbers: RefCell::default(), sent: RefCell::default() }
    }

    /// Drops what was built of a dataflow that will not start.
    pub(crate) fn abandon(&self, family: &Family) {
        end(&self.core, family, self.number);
    }
}

/// A built dataflow.
pub(crate) struct Dataflow {
    core: Rc<Core>,
    family: Rc<Family>,
    root: Rc<dyn AnyRegion>,
    caster: Caster,
    /// What was built, to be compared with the other workers.
    graph: Arc<str>,
    /// How many dataflows this worker had built before.
    number: u64,
    /// It has never stepped: a graph without anything to do must still find out that it is done.
    fresh: Cell<bool>,
}

impl Dataflow {
    /// Checks the built graph and announces it to the other workers.
    pub(crate) fn start<T: Timestamp>(caster: Caster, root: Rc<Region<T>>) -> Result<Self, Error> {
        let (core, number) = (caster.core.clone(), caster.number);
        if let Err(error) = root.check() {
            end(&core, &root.family, number);
            return Err(error);
        }
        let joins = core.membership().is_some_and(|membership| membership.joins());
        if !joins {
            root.found(Some(core.membership().map_or(core.peers(), |membership| membership.founders())));
        }
        let mut description = String::new();
        for region in root.family.regions.borrow().iter() {
            region.describe(&mut description);
        }
        let (family, graph): (_, Arc<str>) = (root.family.clone(), description.into());
        if let Some(membership) = core.membership() {
            membership.open(number, graph.clone(), family.clone(), root.clone());
            // Until it has its place, nothing may be sent.
            family.alive.set(!joins);
        }
        let dataflow = Dataflow { core, family, root, caster, graph, number, fresh: Cell::new(true) };
        if !joins {
            dataflow.root.propagate();
            dataflow.cast();
        }
        dataflow.family.mark.start(number);
        Ok(dataflow)
    }

    /// How many dataflows this worker had built before.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Its turn in a step: takes in progress, runs what it or new blocks activated, and shares what that changed. True once it is
    /// done, after which it has no turn any more; else it is entered again when it has more to do.
    pub(crate) fn step(&self) -> Result<bool, Error> {
        self.fresh.set(false);
        self.receive()?;
        self.settle()?;
        if self.family.mark.is_pending() {
            self.root.sweep()?;
            self.settle()?;
        }
        self.cast();
        let mut done = self.is_done();
        if done && self.family.mark.is_pending() {
            // The last run, so that logic always sees the end of its inputs; without capabilities it can send nothing.
            self.root.sweep()?;
            done = self.is_done();
        }
        if !done {
            self.family.mark.turned(self.has_work());
        }
        Ok(done)
    }

    /// Applies what was received and what this worker counted.
    fn settle(&self) -> Result<(), Error> {
        let share = match self.core.membership() {
            None => self.core.peers() > 1,
            Some(membership) => !membership.is_alone(),
        };
        self.family.mark.collect();
        self.family.regions.borrow().iter().for_each(|region| region.harvest(share));
        self.root.apply()?;
        self.root.propagate();
        Ok(())
    }

    /// How many times are counted now, at how many places.
    pub(crate) fn live_counts(&self) -> usize {
        self.family.regions.borrow().iter().map(|region| region.live_counts()).sum()
    }

    /// An error when a worker has left that never built this dataflow, which can then not end.
    pub(crate) fn check_built(&self) -> Result<(), Error> {
        let Some((peer, built)) = self.core.endpoint().left_before(self.number) else { return Ok(()) };
        let mine = self.number + 1;
        Err(self.mismatch(peer, &format!("number {mine} here was never built there: it left after building {built}")))
    }

    /// Whether a step would do something.
    pub(crate) fn has_work(&self) -> bool {
        let mark = &self.family.mark;
        mark.is_pending()
            || self.fresh.get()
            || !self.caster.inbox.bundles.borrow().is_empty()
            || mark.has_counted() && self.family.regions.borrow().iter().any(|region| region.is_dirty())
    }

    /// Whether no message and no capability is left on any worker, all of which have built it.
    pub(crate) fn is_done(&self) -> bool {
        let met = || match self.core.membership() {
            None => self.caster.numbers.borrow().met() + 1 >= self.core.peers(),
            Some(membership) => membership.has_met_all(self.core.index(), self.number),
        };
        self.caster.inbox.bundles.borrow().is_empty()
            && self.family.regions.borrow().iter().all(|region| region.is_done())
            && met()
            && self.core.membership().is_none_or(|membership| membership.is_taught(self.number))
    }

    /// Tells all other workers what changed, when that may move a frontier of theirs; else keeps it for later.
    fn cast(&self) {
        let Caster { core, channel, numbers, sent, .. } = &self.caster;
        let (me, peers) = (core.index(), core.peers());
        let regions = self.family.regions.borrow();
        if let Some(membership) = core.membership() {
            let first = || membership.member().caster(self.number).is_some_and(|caster| caster.next() == 0);
            if !membership.is_alone() && (regions.iter().any(|region| region.must_share()) || first()) {
                drop(regions);
                core.tend(|member, books| {
                    member.cast(self.number, books);
                    Ok(())
                });
            }
            return;
        }
        let mut numbers = numbers.borrow_mut();
        if peers == 1 || (numbers.next() > 0 && !regions.iter().any(|region| region.must_share())) {
            return;
        }
        let number = numbers.number();
        let mut sent = sent.borrow_mut();
        let read_by_all = sent.front_mut().is_some_and(|bundle| Arc::get_mut(bundle).is_some());
        let used = if read_by_all { sent.pop_front() } else { None };
        let mut bundle = used.unwrap_or_else(|| {
            let parts = regions.iter().map(|region| region.new_part()).collect();
            Arc::new(Bundle { number, graph: None, parts })
        });
        let fresh = Arc::get_mut(&mut bundle).expect("it was just made, or found to be ours alone");
        fresh.number = number;
        fresh.graph = (number == 0).then(|| self.graph.clone());
        for (region, part) in regions.iter().zip(&mut fresh.parts) {
            region.share(&mut **part);
        }
        let mut bytes = None;
        for peer in (0..peers).filter(|peer| *peer != me) {
            let progress = if core.is_local(peer) {
                Progress::Bundle(bundle.clone())
            } else {
                Progress::Bytes(bytes.get_or_insert_with(|| bundle.encode()).clone())
            };
            core.send(peer, *channel, Payload::Progress(progress));
        }
        if sent.len() < SPARE {
            sent.push_back(bundle);
        }
    }

    /// Hands arrived bundles to the regions.
    fn receive(&self) -> Result<(), Error> {
        while let Some((from, progress)) = self.next_bundle() {
            let regions = self.family.regions.borrow();
            match progress {
                Progress::Bundle(bundle) => {
                    self.admit(from, bundle.number, bundle.graph.as_deref())?;
                    let fits = bundle.parts.len() == regions.len()
                        && regions.iter().zip(&bundle.parts).all(|(region, part)| region.absorb(part.as_any()));
                    if !fits {
                        return Err(self.mismatch(from, "the types of time differ"));
                    }
                }
                Progress::Bytes(bytes) => {
                    let (number, graph, parts) = crate::wire::borrow_serde::<BundleBytes<'_>>(&bytes)
                        .map_err(|_| self.mismatch(from, "what came for its progress is none"))?;
                    self.admit(from, number, graph)?;
                    for (region, bytes) in &parts {
                        if !regions.get(*region as usize).is_some_and(|region| region.absorb_bytes(bytes)) {
                            return Err(self.mismatch(from, "progress of a scope that is not there"));
                        }
                    }
                }
            }
        }
        Ok(())
    }

    fn next_bundle(&self) -> Option<(usize, Progress)> {
        self.caster.inbox.bundles.borrow_mut().pop_front()
    }

    /// Checks the number of a bundle, and with the first one the graph.
    fn admit(&self, from: usize, number: u64, graph: Option<&str>) -> Result<(), Error> {
        self.caster.numbers.borrow_mut().admit(from, number).map_err(|Gap { worker, expected, got }| {
            let dataflow = self.family.name.clone();
            Error::SequenceGap { dataflow, worker, expected, got }
        })?;
        if number == 0 {
            let theirs = graph.unwrap_or_default();
            if let Some(difference) = difference(&self.graph, theirs) {
                return Err(self.mismatch(from, &difference));
            }
        }
        Ok(())
    }

    fn mismatch(&self, peer: usize, what: &str) -> Error {
        let detail = format!("dataflow {:?}: {what}", self.family.name);
        Error::GraphMismatch { worker: self.core.index(), peer, detail }
    }
}

impl Drop for Dataflow {
    fn drop(&mut self) {
        end(&self.core, &self.family, self.number);
    }
}

/// Ends a dataflow: drops its operators, and what still comes for it from now on.
fn end(core: &Core, family: &Family, number: u64) {
    family.alive.set(false);
    core.close_dataflow(number);
    for region in family.regions.take() {
        region.dismantle();
    }
    if let Some(membership) = core.membership() {
        membership.close(number);
    }
}

impl Bundle {
    fn encode(&self) -> Vec<u8> {
        let parts = self.parts.iter().enumerate().filter(|(_, part)| !part.is_empty()).map(|(region, part)| {
            let mut bytes = Vec::new();
            part.encode(&mut bytes);
            (region as u64, bytes)
        });
        let form: BundleBytes<'_> = (self.number, self.graph.as_deref(), parts.collect());
        let mut bytes = Vec::new();
        encode_serde(&form, &mut bytes);
        bytes
    }
}

/// The first line in which two descriptions of a graph differ.
pub(crate) fn difference(here: &str, there: &str) -> Option<String> {
    let (mut mine, mut theirs) = (here.lines(), there.lines());
    loop {
        match (mine.next(), theirs.next()) {
            (None, None) => return None,
            (mine, theirs) if mine == theirs => {}
            (mine, theirs) => {
                let (mine, theirs) = (mine.unwrap_or("nothing more"), theirs.unwrap_or("nothing more"));
                return Some(format!("the graphs differ: {mine} here, {theirs} there"));
            }
        }
    }
}
