//! A cluster of members in one thread: links with lanes, books over the real ledgers, and an observer who sees everything.
//!
//! What it checks, at every step: no frontier passes a message or capability that exists anywhere, on a link or in other hands too (S2);
//! frontiers never go back; data come only to those who are full members of the sender's list, and behind no marker of a later one (S5);
//! who leaves has nothing (S12). Operators may wait for times, with capabilities that they alone hold. At the end: all counts are zero everywhere, joins and leaves have ended (L1, L4), every member knows all control that was ever
//! broadcast, and nothing of who is gone is remembered.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::hash::{Hash, Hasher};
use std::rc::Rc;

use penstock_progress::ledger::{Change, Untold};
use penstock_progress::{Antichain, Ledger, Location, PathSummary, Port, Source, Target, Tracker};

use crate::common::{Graph, SmallTime};
use crate::faults::planted;
use crate::machine::list::Change as ListChange;
use crate::machine::{Failure, Host, Id, Lane, Limits, List, Member, Message, Output, Standing};

pub(crate) type Part<T> = Vec<Change<T>>;

/// A kind of time that states can be compared by.
pub(crate) trait Time: SmallTime + Hash {}
impl<T: SmallTime + Hash> Time for T {}

/// What travels on a link.
#[derive(Clone, Debug, Hash)]
pub(crate) enum Item<T> {
    Protocol(Message<Part<T>>),
    /// A record, with the version of the list that it was routed by.
    Data {
        dataflow: u64,
        target: Target,
        time: T,
        version: u64,
    },
    /// A record that everybody has to know.
    Control {
        number: u64,
        version: u64,
    },
    /// All control that a joiner must know and was not sent.
    Routing(BTreeSet<u64>),
    /// The link ended.
    End,
    /// The run ends.
    Abort(Failure),
}

/// A capability that an operator keeps until nothing can come at this time any more.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Await<T> {
    target: Target,
    until: T,
    source: Source,
    time: T,
}

/// One dataflow on one worker.
#[derive(Clone, Debug)]
struct Books<T: Time> {
    ledger: Ledger<T>,
    capabilities: Vec<(Source, T)>,
    messages: Vec<(Target, T)>,
    /// What operators hold until a time is complete at one of their inputs.
    awaits: Vec<Await<T>>,
    untold: BTreeMap<(Location, T), i64>,
    known: BTreeMap<Target, Antichain<T>>,
}

impl<T: Time> Books<T> {
    fn count(&mut self, location: Location, time: T, diff: i64, share: bool) {
        self.ledger.count(location, time.clone(), diff, share);
        if share {
            let count = self.untold.entry((location, time)).or_insert(0);
            *count += diff;
            if *count == 0 {
                self.untold.retain(|_, count| *count != 0);
            }
        }
    }

    /// Whether no operator has anything to do any more.
    fn is_worked_off(&self) -> bool {
        self.messages.is_empty() && self.awaits.is_empty()
    }

    fn settle(&mut self) -> bool {
        let fits = self.ledger.apply(|_, _, _| {}).is_ok();
        self.ledger.tracker_mut().propagate();
        fits
    }
}

/// The worker around a member.
#[derive(Clone, Debug)]
struct Site<T: Time> {
    books: BTreeMap<u64, Books<T>>,
    controls: BTreeSet<u64>,
    /// Capabilities given away and taken since the world looked.
    given: Vec<(u64, Source, T)>,
    taken: Vec<(u64, Source, T)>,
}

fn source(location: Location) -> Source {
    match location.port {
        Port::Source(port) => Source { node: location.node, port },
        Port::Target(_) => panic!("a capability at an input"),
    }
}

impl<T: Time> Host for Site<T> {
    type Part = Part<T>;

    fn cast(&mut self, dataflow: u64) -> Option<Part<T>> {
        let books = self.books.get_mut(&dataflow)?;
        if !books.ledger.owes() {
            return None;
        }
        let mut part = Vec::new();
        books.ledger.cast(|location, time, diff| part.push((location, time, diff)));
        books.untold.clear();
        Some(part)
    }

    fn absorb(&mut self, dataflow: u64, part: &Part<T>) -> bool {
        let Some(books) = self.books.get_mut(&dataflow) else { return false };
        books.ledger.absorb(part.iter().cloned());
        books.settle()
    }

    fn snapshot(&mut self, dataflow: u64) -> Part<T> {
        let ledger = &mut self.books.get_mut(&dataflow).expect("it is open").ledger;
        // What a host that did not look would send.
        let all =
            |ledger: &Ledger<T>| ledger.tracker().accumulated().map(|((at, time), count)| (at, time, count)).collect();
        ledger.snapshot(|_| false).unwrap_or_else(|Untold| all(ledger))
    }

    fn begin(&mut self, dataflow: u64, snapshot: &Part<T>) -> bool {
        let Some(books) = self.books.get_mut(&dataflow) else { return false };
        books.ledger.begin(snapshot.iter().cloned()).is_ok() && books.settle()
    }

    fn grant(&mut self, dataflow: u64) -> Option<Part<T>> {
        let books = self.books.get_mut(&dataflow)?;
        let held: BTreeSet<(Source, T)> = books.capabilities.iter().cloned().collect();
        for (source, time) in &held {
            books.count((*source).into(), time.clone(), 1, true);
        }
        books.settle();
        self.given.extend(held.iter().map(|(source, time)| (dataflow, *source, time.clone())));
        (!held.is_empty()).then(|| held.into_iter().map(|(source, time)| (source.into(), time, 1)).collect())
    }

    fn hand_over(&mut self, dataflow: u64) -> Option<Part<T>> {
        let held = std::mem::take(&mut self.books.get_mut(&dataflow)?.capabilities);
        self.given.extend(held.iter().map(|(source, time)| (dataflow, *source, time.clone())));
        (!held.is_empty()).then(|| held.into_iter().map(|(source, time)| (source.into(), time, 1)).collect())
    }

    fn take(&mut self, dataflow: u64, capabilities: &Part<T>) {
        let Some(books) = self.books.get_mut(&dataflow) else { return };
        for (location, time, _) in capabilities {
            books.capabilities.push((source(*location), time.clone()));
            self.taken.push((dataflow, source(*location), time.clone()));
        }
    }
}

#[derive(Clone, Debug)]
struct Worker<T: Time> {
    member: Member<Part<T>>,
    site: Site<T>,
    failed: Option<Failure>,
    leaving: bool,
    /// This leaver has handed over what it held when nothing could come for it any more.
    bequeathed: bool,
    /// Whether it knows what was broadcast before it came, and who waits for it to.
    routed: bool,
    waiting: Vec<Id>,
    /// Whom it routed to under the list before.
    before: Vec<Id>,
}

/// What may happen next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Action<T> {
    Deliver(Id, Id, Lane),
    /// A record from a capability of a worker to another, at this time, along the edges of its output.
    Send {
        at: Id,
        dataflow: u64,
        capability: usize,
        to: Id,
        time: T,
    },
    /// A capability moves to a later time, or is dropped.
    Move {
        at: Id,
        dataflow: u64,
        capability: usize,
        time: Option<T>,
    },
    /// A record is worked off; capabilities are kept for outputs at these times.
    Consume {
        at: Id,
        dataflow: u64,
        message: usize,
        keep: Vec<(usize, T)>,
    },
    /// A record is worked off when its time is complete; until then a capability for an output is kept.
    Await {
        at: Id,
        dataflow: u64,
        message: usize,
        port: usize,
    },
    /// A time is complete for which an operator waited: it sends with what it kept, to this worker or to nobody, and drops it.
    Notify {
        at: Id,
        dataflow: u64,
        wait: usize,
        to: Option<Id>,
    },
    Broadcast(Id),
    Cast(Id, u64),
    Admit {
        at: Id,
        count: usize,
        now: u64,
    },
    Leave(Id),
    /// A leaver hands over what it holds, once at first and once when all is worked off.
    Drain(Id),
    Crash(Id),
    /// The second to last item of a lane comes twice, if members must bear that.
    Repeat(Id, Id),
    Tick(Id, u64),
}

/// Options of a world.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub founders: usize,
    pub dataflows: u64,
    pub limits: Limits,
    /// Who joiners ask first.
    pub server: Option<Id>,
    /// Lanes of data.
    pub lanes: &'static [Lane],
    /// Whether leavers hand over what they hold before all is worked off, as those do whose operators wait for times.
    pub early: bool,
}

#[derive(Clone)]
pub(crate) struct World<T: Time> {
    pub graph: Rc<Graph<T>>,
    pub plan: Plan,
    workers: BTreeMap<Id, Worker<T>>,
    links: BTreeMap<(Id, Id, Lane), VecDeque<Item<T>>>,
    /// Capabilities on their way.
    limbo: Vec<(u64, Source, T)>,
    controls: u64,
    dead: BTreeSet<Id>,
    /// Who died.
    crashed: BTreeSet<Id>,
    /// A full member died: everybody has to learn it.
    pub doomed: bool,
    pub seats: usize,
    pub refused: usize,
    pub closed: usize,
    pub stayed: usize,
    pub asks: usize,
    tickets: u64,
}

impl<T: Time> World<T> {
    pub(crate) fn new(graph: Graph<T>, plan: Plan) -> Self {
        let mut world = World {
            graph: Rc::new(graph),
            workers: BTreeMap::new(),
            links: BTreeMap::new(),
            limbo: Vec::new(),
            controls: 0,
            dead: BTreeSet::new(),
            crashed: BTreeSet::new(),
            doomed: false,
            seats: 0,
            refused: 0,
            closed: 0,
            stayed: 0,
            asks: 0,
            tickets: 0,
            plan,
        };
        for id in 0..world.plan.founders {
            let mut member = Member::founder(id, world.plan.founders, world.plan.limits);
            let mut site = world.site(&mut member);
            for books in site.books.values_mut() {
                books.ledger.found(world.graph.sources(), world.plan.founders);
                books.ledger.tracker_mut().propagate();
                books.capabilities = world.graph.sources().into_iter().map(|source| (source, T::minimum())).collect();
            }
            world.workers.insert(
                id,
                Worker {
                    member,
                    site,
                    failed: None,
                    leaving: false,
                    bequeathed: false,
                    routed: true,
                    waiting: Vec::new(),
                    before: Vec::new(),
                },
            );
        }
        world
    }

    fn site(&self, member: &mut Member<Part<T>>) -> Site<T> {
        let tracker = || self.graph.build().expect("cycles advance by construction");
        let books = (0..self.plan.dataflows).map(|dataflow| {
            member.open(dataflow);
            let (ledger, untold) = (Ledger::new(tracker()), BTreeMap::new());
            let (capabilities, messages, known) = (Vec::new(), Vec::new(), BTreeMap::new());
            (dataflow, Books { ledger, capabilities, messages, awaits: Vec::new(), untold, known })
        });
        Site { books: books.collect(), controls: BTreeSet::new(), given: Vec::new(), taken: Vec::new() }
    }

    pub(crate) fn ids(&self) -> Vec<Id> {
        self.workers.keys().copied().collect()
    }

    pub(crate) fn member(&self, id: Id) -> Option<&Member<Part<T>>> {
        self.workers.get(&id).map(|worker| &worker.member)
    }

    fn acts(&self, id: Id) -> bool {
        self.workers.get(&id).is_some_and(|worker| worker.failed.is_none() && worker.member.is_seated())
    }

    /// Who may be sent data by a worker.
    pub(crate) fn targets(&self, at: Id) -> Vec<Id> {
        let Some(worker) = self.workers.get(&at) else { return Vec::new() };
        let list = worker.member.list();
        let leaving = list.leaving().filter(|_| planted("data go to leavers"));
        list.full().chain(leaving).collect()
    }

    pub(crate) fn capabilities(&self, at: Id, dataflow: u64) -> &[(Source, T)] {
        self.workers.get(&at).filter(|_| self.acts(at)).map_or(&[], |worker| &worker.site.books[&dataflow].capabilities)
    }

    pub(crate) fn messages(&self, at: Id, dataflow: u64) -> &[(Target, T)] {
        self.workers.get(&at).filter(|_| self.acts(at)).map_or(&[], |worker| &worker.site.books[&dataflow].messages)
    }

    /// A wait of an operator of this worker that is over.
    pub(crate) fn complete(&self, at: Id, dataflow: u64) -> Option<usize> {
        let books = &self.workers.get(&at).filter(|_| self.acts(at))?.site.books[&dataflow];
        let tracker = books.ledger.tracker();
        books.awaits.iter().position(|wait| !reaches(tracker.frontier(wait.target), &wait.until))
    }

    /// The links with something on them.
    pub(crate) fn loaded(&self) -> impl Iterator<Item = (Id, Id, Lane)> + '_ {
        let alive = |key: &(Id, Id, Lane)| self.workers.get(&key.1).is_some_and(|worker| worker.failed.is_none());
        self.links.iter().filter(move |(key, link)| !link.is_empty() && alive(key)).map(|(key, _)| *key)
    }

    /// Whether a cast would tell something; with `must`, something that matters now.
    pub(crate) fn owes(&mut self, at: Id, dataflow: u64, must: bool) -> bool {
        if !self.acts(at) {
            return false;
        }
        let Some(worker) = self.workers.get_mut(&at) else { return false };
        let ledger = &mut worker.site.books.get_mut(&dataflow).expect("it is open").ledger;
        !worker.member.is_alone() && if must { ledger.must_cast() } else { ledger.owes() }
    }

    pub(crate) fn may_drain(&self, at: Id) -> bool {
        self.workers.get(&at).is_some_and(|worker| {
            worker.failed.is_none()
                && worker.member.may_drain()
                && (self.plan.early && !worker.bequeathed || worker.site.books.values().all(Books::is_worked_off))
        })
    }

    /// Whether a worker may ask to leave, the last one and all at the same time too.
    pub(crate) fn may_leave(&self, at: Id) -> bool {
        self.acts(at)
            && !self.workers[&at].leaving
            && self.workers[&at].member.list().standing(at) == Some(Standing::Full)
    }

    /// Whether it has asked to leave, and was not told that it stays.
    pub(crate) fn leaves(&self, at: Id) -> bool {
        self.workers.get(&at).is_some_and(|worker| worker.leaving)
    }

    /// Whether there is somebody who has not asked to leave but for this worker.
    pub(crate) fn has_others(&self, at: Id) -> bool {
        self.workers.iter().any(|(id, worker)| *id != at && worker.member.is_seated() && !worker.leaving)
    }

    /// Does one thing. What cannot be done now is skipped.
    pub(crate) fn act(&mut self, action: Action<T>) -> Result<(), String> {
        match action {
            Action::Deliver(from, to, lane) => self.deliver(from, to, lane)?,
            Action::Send { at, dataflow, capability, to, time } => {
                let Some((source, held)) = self.capabilities(at, dataflow).get(capability).cloned() else {
                    return Ok(());
                };
                if !held.less_equal(&time) || !self.targets(at).contains(&to) {
                    return Ok(());
                }
                self.emit(at, dataflow, source, &time, to);
                self.settle(at, dataflow)?;
            }
            Action::Move { at, dataflow, capability, time } => {
                let Some((source, held)) = self.capabilities(at, dataflow).get(capability).cloned() else {
                    return Ok(());
                };
                match time {
                    Some(time) if held.less_equal(&time) => {
                        self.count(at, dataflow, source.into(), time.clone(), 1);
                        self.books(at, dataflow).capabilities[capability].1 = time;
                    }
                    Some(_) => return Ok(()),
                    None => drop(self.books(at, dataflow).capabilities.swap_remove(capability)),
                }
                self.count(at, dataflow, source.into(), held, -1);
                self.settle(at, dataflow)?;
            }
            Action::Consume { at, dataflow, message, keep } => {
                if message >= self.messages(at, dataflow).len() {
                    return Ok(());
                }
                let (target, time) = self.books(at, dataflow).messages.swap_remove(message);
                self.count(at, dataflow, target.into(), time.clone(), -1);
                for (port, later) in keep {
                    let paths = &self.graph.nodes[target.node / 10].2[target.port][port];
                    if paths
                        .elements()
                        .iter()
                        .filter_map(|path| path.results_in(&time))
                        .any(|least| least.less_equal(&later))
                    {
                        let source = Source::new(target.node, port);
                        self.count(at, dataflow, source.into(), later.clone(), 1);
                        self.books(at, dataflow).capabilities.push((source, later));
                    }
                }
                self.settle(at, dataflow)?;
            }
            Action::Await { at, dataflow, message, port } => {
                let Some((target, until)) = self.messages(at, dataflow).get(message).cloned() else { return Ok(()) };
                let paths = &self.graph.nodes[target.node / 10].2[target.port][port];
                let Some(time) = paths.elements().iter().find_map(|path| path.results_in(&until)) else {
                    return Ok(());
                };
                self.books(at, dataflow).messages.swap_remove(message);
                self.count(at, dataflow, target.into(), until.clone(), -1);
                let source = Source::new(target.node, port);
                self.count(at, dataflow, source.into(), time.clone(), 1);
                self.books(at, dataflow).awaits.push(Await { target, until, source, time });
                self.settle(at, dataflow)?;
            }
            Action::Notify { at, dataflow, wait, to } => {
                let Await { source, time, .. } = self.books(at, dataflow).awaits.swap_remove(wait);
                if let Some(to) = to {
                    self.emit(at, dataflow, source, &time, to);
                }
                self.count(at, dataflow, source.into(), time, -1);
                self.settle(at, dataflow)?;
            }
            Action::Broadcast(at) => {
                if !self.acts(at) {
                    return Ok(());
                }
                let (number, version) = (self.controls, self.workers[&at].member.list().version);
                self.controls += 1;
                let mut targets = self.targets(at);
                if planted("a list is adopted inside a block") && !self.workers[&at].before.is_empty() {
                    targets.clone_from(&self.workers[&at].before);
                }
                for to in targets {
                    if to == at {
                        self.worker(at).site.controls.insert(number);
                    } else {
                        let lane = self.plan.lanes[0];
                        self.links.entry((at, to, lane)).or_default().push_back(Item::Control { number, version });
                    }
                }
                // Who leaves gets none of its own, and needs none.
                self.worker(at).site.controls.insert(number);
            }
            Action::Cast(at, dataflow) => self.with(at, |member, site| {
                member.cast(dataflow, site);
                Ok(())
            })?,
            Action::Admit { at, count, now } => {
                if self.acts(at) {
                    self.tickets += 1;
                    let ticket = self.tickets;
                    self.with(at, |member, site| {
                        member.admit(ticket, count);
                        member.tick(now, site)
                    })?;
                }
            }
            Action::Leave(at) => {
                if self.may_leave(at) {
                    self.worker(at).leaving = true;
                    self.with(at, |member, site| member.leave(site))?;
                }
            }
            Action::Drain(at) => {
                if self.plan.early && self.may_drain(at) && !std::mem::replace(&mut self.worker(at).bequeathed, true) {
                    self.with(at, |member, site| member.bequeath(site).map(drop))?;
                }
                if self.may_drain(at) {
                    self.with(at, |member, site| member.drained(site).map(drop))?;
                }
            }
            Action::Crash(at) => self.crash(at),
            Action::Repeat(from, to) => {
                if let Some(link) = self.links.get_mut(&(from, to, Lane::Urgent))
                    && let Some(item) = link.back().cloned()
                    && let Item::Protocol(message) = &item
                    && !matches!(message, Message::Bundle(..) | Message::Legacy(_) | Message::Marker { .. })
                    && !matches!(message, Message::Request(crate::machine::message::Request::Admit { .. }))
                {
                    link.push_back(item);
                }
            }
            Action::Tick(at, now) => {
                if self.workers.get(&at).is_some_and(|worker| worker.failed.is_none()) {
                    self.with(at, |member, site| member.tick(now, site))?;
                }
            }
        }
        Ok(())
    }

    /// Whether somebody joins, as far as this worker knows: else it is not ticked.
    pub(crate) fn watches_clock(&self, at: Id) -> bool {
        self.workers.get(&at).is_some_and(|worker| {
            let list = worker.member.list();
            list.members.is_empty() || list.joining().next().is_some() || !worker.member.is_seated()
        })
    }

    fn worker(&mut self, at: Id) -> &mut Worker<T> {
        self.workers.get_mut(&at).expect("it is there")
    }

    fn books(&mut self, at: Id, dataflow: u64) -> &mut Books<T> {
        self.worker(at).site.books.get_mut(&dataflow).expect("it is open")
    }

    fn count(&mut self, at: Id, dataflow: u64, location: Location, time: T, diff: i64) {
        let share = !self.workers[&at].member.is_alone();
        self.books(at, dataflow).count(location, time, diff, share);
    }

    /// Sends a record along the edges of an output.
    fn emit(&mut self, at: Id, dataflow: u64, source: Source, time: &T, to: Id) {
        let targets = self.graph.edges.iter().filter(|edge| edge.0 == source).map(|edge| edge.1);
        for target in targets.collect::<Vec<_>>() {
            self.count(at, dataflow, target.into(), time.clone(), 1);
            if to == at {
                self.books(at, dataflow).messages.push((target, time.clone()));
            } else {
                let version = self.workers[&at].member.list().version;
                let lane = self.plan.lanes[target.node / 10 % self.plan.lanes.len()];
                let item = Item::Data { dataflow, target, time: time.clone(), version };
                self.links.entry((at, to, lane)).or_default().push_back(item);
            }
        }
    }

    fn settle(&mut self, at: Id, dataflow: u64) -> Result<(), String> {
        self.books(at, dataflow).settle();
        self.safe(at)
    }

    /// Lets a member do something, and carries out what it wants.
    fn with(
        &mut self,
        at: Id,
        run: impl FnOnce(&mut Member<Part<T>>, &mut Site<T>) -> Result<(), Failure>,
    ) -> Result<(), String> {
        let Some(worker) = self.workers.get_mut(&at) else { return Ok(()) };
        if worker.failed.is_some() {
            return Ok(());
        }
        let before: Vec<Id> = worker.member.list().full().collect();
        let result = run(&mut worker.member, &mut worker.site);
        let (outputs, given, taken) =
            (worker.member.outputs(), std::mem::take(&mut worker.site.given), std::mem::take(&mut worker.site.taken));
        self.limbo.extend(given);
        for capability in taken {
            match self.limbo.iter().position(|other| *other == capability) {
                Some(found) => drop(self.limbo.swap_remove(found)),
                None => return Err(format!("worker {at} takes {capability:?}, which nobody gave")),
            }
        }
        if let Err(failure) = result {
            let Failure::Lost(lost) = failure else { return Err(format!("worker {at} fails: {failure}")) };
            let list = self.workers[&at].member.list();
            let member = list.speakers.contains(&lost)
                || matches!(list.standing(lost), Some(Standing::Full | Standing::Leaving));
            if !self.crashed.contains(&lost) || !member && !list.members.is_empty() {
                return Err(format!("worker {at} fails: {failure}"));
            }
            if list.members.is_empty() && !self.doomed {
                // Its join has not begun.
                self.refused += 1;
                self.crash(at);
                return Ok(());
            }
            self.doomed = true;
            for to in self.ids() {
                self.links.entry((at, to, Lane::Urgent)).or_default().push_back(Item::Abort(failure.clone()));
            }
            self.worker(at).failed = Some(failure);
            return Ok(());
        }
        for output in outputs {
            match output {
                Output::Send { to, lane, message } => {
                    if matches!(message, Message::Ask { .. }) {
                        self.asks += 1;
                    }
                    if to == at {
                        return Err(format!("worker {at} sends itself {message:?}"));
                    }
                    if !self.dead.contains(&to) {
                        self.links.entry((at, to, lane)).or_default().push_back(Item::Protocol(message));
                    }
                }
                Output::Adopted(list) => {
                    list.check().map_err(|fault| format!("worker {at} uses a list of {fault}"))?;
                    self.worker(at).before.clone_from(&before);
                    if planted("routing is copied when the list is adopted") {
                        self.route(at, &list);
                    }
                }
                Output::Settled(_) if planted("routing is copied when the list is adopted") => {}
                Output::Settled(list) => self.route(at, &list),
                Output::Admitted { joiners, .. } => {
                    for id in joiners {
                        let mut member = Member::joiner(id, self.plan.server, self.plan.limits);
                        let site = self.site(&mut member);
                        let worker = Worker {
                            member,
                            site,
                            failed: None,
                            leaving: false,
                            bequeathed: false,
                            routed: false,
                            waiting: Vec::new(),
                            before: Vec::new(),
                        };
                        if self.workers.insert(id, worker).is_some() || self.dead.contains(&id) {
                            return Err(format!("id {id} was given out twice"));
                        }
                        for lost in self.crashed.clone().into_iter().filter(|_| self.doomed) {
                            self.links.entry((lost, id, Lane::Urgent)).or_default().push_back(Item::End);
                        }
                    }
                }
                Output::Crowded(home) => return Err(format!("there is no room for {home:?}")),
                Output::Seated => self.seats += 1,
                Output::Alone => {
                    let Worker { leaving, member, .. } = self.worker(at);
                    let others = member.list().members.iter().filter(|other| *other.1 != Standing::Leaving).count() - 1;
                    if !std::mem::take(leaving) || others > 0 {
                        return Err(format!("worker {at} is told that it is the last one, of {:?}", member.list()));
                    }
                    self.stayed += 1;
                }
                Output::Refused => {
                    self.refused += 1;
                    self.workers.remove(&at);
                    self.dead.insert(at);
                    self.links.retain(|key, _| key.1 != at);
                }
                Output::Closed => {
                    let site = &self.workers[&at].site;
                    let mut books = site.books.values();
                    if !books
                        .all(|books| books.capabilities.is_empty() && books.is_worked_off() && books.untold.is_empty())
                    {
                        return Err(format!("worker {at} goes with something in its hands"));
                    }
                    // A joiner, for whom nobody waits, may still send a marker, or ask what others answer.
                    let counts = |item: &Item<T>| match item {
                        Item::Protocol(message) => matches!(message, Message::Bundle(..) | Message::Legacy(_)),
                        Item::Data { .. } | Item::Control { .. } | Item::Routing(_) => true,
                        Item::End | Item::Abort(_) => false,
                    };
                    let coming = self.links.iter().find(|(key, link)| key.1 == at && link.iter().any(counts));
                    if let Some((key, link)) = coming.filter(|_| !self.doomed) {
                        return Err(format!("worker {at} goes, and {key:?} still has {link:?}"));
                    }
                    self.closed += 1;
                    self.workers.remove(&at);
                    self.dead.insert(at);
                    self.links.retain(|key, _| key.1 != at);
                }
            }
        }
        if self.workers.contains_key(&at) { self.safe(at) } else { Ok(()) }
    }

    /// When everything under the old list has come, its server tells the new member all control that it was not sent.
    fn route(&mut self, at: Id, list: &List) {
        if let ListChange::Seated { joiner, granter } = list.change
            && granter == at
        {
            if !self.workers[&at].routed {
                self.worker(at).waiting.push(joiner);
                return;
            }
            let routing = Item::Routing(self.workers[&at].site.controls.clone());
            self.links.entry((at, joiner, self.plan.lanes[0])).or_default().push_back(routing);
        }
    }

    fn deliver(&mut self, from: Id, to: Id, lane: Lane) -> Result<(), String> {
        if self.workers.get(&to).is_none_or(|worker| worker.failed.is_some()) {
            return Ok(());
        }
        let Some(item) = self.links.get_mut(&(from, to, lane)).and_then(VecDeque::pop_front) else { return Ok(()) };
        let check = |worker: &Worker<T>, version: u64| {
            let list = worker.member.list();
            let here = list.version == version && list.standing(to) != Some(Standing::Full);
            let late = worker.member.may_drain() || !worker.member.is_current() || worker.member.is_over();
            (here || late).then(|| format!("worker {to} gets data of list {version} from {from} under {list:?}"))
        };
        match item {
            Item::Protocol(message) => self.with(to, |member, site| member.accept(from, lane, message, site)),
            Item::Data { dataflow, target, time, version } => {
                if let Some(wrong) = check(&self.workers[&to], version) {
                    return Err(wrong);
                }
                self.books(to, dataflow).messages.push((target, time));
                Ok(())
            }
            Item::Control { number, version } => {
                if let Some(wrong) = check(&self.workers[&to], version) {
                    return Err(wrong);
                }
                self.worker(to).site.controls.insert(number);
                Ok(())
            }
            Item::Routing(controls) => {
                self.worker(to).site.controls.extend(controls);
                self.worker(to).routed = true;
                for joiner in std::mem::take(&mut self.worker(to).waiting) {
                    let routing = Item::Routing(self.workers[&to].site.controls.clone());
                    self.links.entry((to, joiner, self.plan.lanes[0])).or_default().push_back(routing);
                }
                Ok(())
            }
            Item::Abort(failure) => {
                self.worker(to).failed = Some(failure);
                Ok(())
            }
            Item::End => {
                // What was sent is read before the link is seen to end.
                let before = |key: &&(Id, Id, Lane)| (key.0, key.1) == (from, to) && !self.links[*key].is_empty();
                if let Some((_, _, before)) = self.links.keys().find(before).copied() {
                    self.links.entry((from, to, lane)).or_default().push_front(Item::End);
                    return self.deliver(from, to, before);
                }
                self.with(to, |member, site| member.lost(from, site))
            }
        }
    }

    fn crash(&mut self, at: Id) {
        let Some(worker) = self.workers.remove(&at) else { return };
        self.dead.insert(at);
        // Whoever is a full member in anybody's list, or in its own; but for who has told all that it is closed.
        let closed = {
            let list = worker.member.list();
            !list.members.is_empty() && list.standing(at).is_none()
        };
        let standing = |worker: &Worker<T>| worker.member.list().standing(at);
        let full = |standing| matches!(standing, Some(Standing::Full | Standing::Leaving));
        if full(standing(&worker)) || !closed && self.workers.values().any(|other| full(standing(other))) {
            self.doomed = true;
        }
        self.crashed.insert(at);
        self.links.retain(|key, _| key.1 != at);
        for to in self.ids() {
            self.links.entry((at, to, Lane::Urgent)).or_default().push_back(Item::End);
        }
    }

    /// Nothing that exists anywhere is behind the frontiers of this worker, and they did not go back.
    fn safe(&mut self, at: Id) -> Result<(), String> {
        let Some(worker) = self.workers.get(&at) else { return Ok(()) };
        if !worker.member.is_current() || worker.failed.is_some() || self.doomed {
            return Ok(());
        }
        for (dataflow, books) in &worker.site.books {
            let tracker = books.ledger.tracker();
            let source_passed = |source: &Source, time: &T| !reaches(tracker.source_frontier(*source), time);
            let target_passed = |target: &Target, time: &T| !reaches(tracker.frontier(*target), time);
            for (other, worker) in &self.workers {
                let theirs = &worker.site.books[dataflow];
                if let Some((source, time)) =
                    theirs.capabilities.iter().find(|(source, time)| source_passed(source, time))
                {
                    return Err(format!("worker {at} passed {time:?} at {source:?}, which worker {other} may send"));
                }
                if let Some(wait) = theirs.awaits.iter().find(|wait| source_passed(&wait.source, &wait.time)) {
                    return Err(format!("worker {at} passed {wait:?} of an operator of worker {other}"));
                }
                if let Some((target, time)) = theirs.messages.iter().find(|(target, time)| target_passed(target, time))
                {
                    return Err(format!("worker {at} passed {time:?} at {target:?}, which waits at worker {other}"));
                }
            }
            for (_, source, time) in self.limbo.iter().filter(|capability| capability.0 == *dataflow) {
                if source_passed(source, time) {
                    return Err(format!("worker {at} passed {time:?} at {source:?}, which is changing hands"));
                }
            }
            for (key, item) in self.links.iter().flat_map(|(key, link)| link.iter().map(move |item| (key, item))) {
                if let Item::Data { dataflow: of, target, time, .. } = item
                    && of == dataflow
                    && target_passed(target, time)
                {
                    return Err(format!("worker {at} passed {time:?} at {target:?}, which is on {key:?}"));
                }
            }
        }
        for books in self.worker(at).site.books.values_mut() {
            let changes = books.ledger.tracker_mut().drain_changes();
            for (target, time, diff) in &changes {
                let before = books.known.get(target);
                if *diff > 0 && before.is_some_and(|before| !before.less_equal(time)) {
                    return Err(format!("the frontier of {target:?} at worker {at} went back to {time:?}"));
                }
            }
            for (target, _, _) in changes {
                let frontier = books.ledger.tracker().frontier(target).iter().cloned().collect();
                books.known.insert(target, frontier);
            }
        }
        Ok(())
    }

    /// Whether nothing is left to happen.
    pub(crate) fn quiet(&mut self) -> bool {
        if self.doomed {
            return self.workers.values().all(|worker| worker.failed.is_some());
        }
        let ids = self.ids();
        self.loaded().next().is_none()
            && ids.iter().all(|id| (0..self.plan.dataflows).all(|dataflow| !self.owes(*id, dataflow, false)))
            && self.workers.values().all(|worker| {
                worker.member.is_seated()
                    && worker.member.is_settled()
                    && !worker.leaving
                    && worker.member.list().members.values().all(|standing| *standing == Standing::Full)
                    && worker.site.books.values().all(|books| books.capabilities.is_empty() && books.is_worked_off())
            })
    }

    pub(crate) fn why_not_quiet(&self) -> String {
        let links: Vec<_> = self.links.iter().filter(|(_, link)| !link.is_empty()).collect();
        let workers: Vec<_> = self
            .workers
            .iter()
            .map(|(id, worker)| {
                let books = worker.site.books.values();
                let held: Vec<_> =
                    books.map(|books| (&books.capabilities, &books.messages, &books.awaits, &books.untold)).collect();
                (id, &worker.failed, worker.leaving, held, &worker.member)
            })
            .collect();
        format!("doomed {}, links {links:?}, workers {workers:#?}", self.doomed)
    }

    /// What must hold when nothing is left to happen.
    pub(crate) fn check_end(&self) -> Result<(), String> {
        if self.doomed {
            return Ok(());
        }
        if !self.limbo.is_empty() {
            return Err(format!("{:?} never arrived", self.limbo));
        }
        let Some(first) = self.workers.values().next() else { return Err("nobody is left".to_owned()) };
        for (at, worker) in &self.workers {
            if worker.member.list() != first.member.list() {
                return Err(format!("worker {at} has {:?}, not {:?}", worker.member.list(), first.member.list()));
            }
            if let Some(what) = worker.member.remembers() {
                return Err(format!("worker {at} still remembers {what}"));
            }
            for (dataflow, books) in &worker.site.books {
                let tracker = books.ledger.tracker();
                if !tracker.is_done() {
                    let counts: Vec<_> = tracker.accumulated().collect();
                    return Err(format!("worker {at} still counts {counts:?} in {dataflow}"));
                }
                if !ended(tracker) {
                    return Err(format!("worker {at} still expects something in {dataflow}"));
                }
            }
            if worker.site.controls.len() as u64 != self.controls {
                return Err(format!("worker {at} knows {:?} of {} controls", worker.site.controls, self.controls));
            }
        }
        Ok(())
    }

    /// What tells states apart.
    pub(crate) fn fingerprint(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        for (id, worker) in &self.workers {
            (id, &worker.member, &worker.failed, &worker.site.controls).hash(&mut hasher);
            (worker.leaving, worker.bequeathed).hash(&mut hasher);
            for books in worker.site.books.values() {
                let (mut held, mut messages) = (books.capabilities.clone(), books.messages.clone());
                let mut awaits = books.awaits.clone();
                held.sort_unstable();
                messages.sort_unstable();
                awaits.sort_unstable();
                (held, messages, awaits, &books.untold).hash(&mut hasher);
                let mut counts: Vec<_> = books.ledger.tracker().accumulated().collect();
                counts.sort_unstable();
                counts.hash(&mut hasher);
            }
        }
        for (key, link) in self.links.iter().filter(|(_, link)| !link.is_empty()) {
            (key, link).hash(&mut hasher);
        }
        (&self.dead, self.doomed, self.controls).hash(&mut hasher);
        hasher.finish()
    }
}

fn reaches<T: Time>(frontier: &[T], time: &T) -> bool {
    frontier.iter().any(|element| element.less_equal(time))
}

fn ended<T: Time>(tracker: &Tracker<T>) -> bool {
    tracker.locations().all(|location| match location.port {
        Port::Target(port) => tracker.frontier(Target::new(location.node, port)).is_empty(),
        Port::Source(port) => tracker.source_frontier(Source::new(location.node, port)).is_empty(),
    })
}
