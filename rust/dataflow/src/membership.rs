//! A worker as a member: its machine of `penstock_members`, and the books of its dataflows, which that machine reads and writes.
//!
//! Only a worker of a joinable fabric has one; others pay a look at an empty option per block that they exchange. Progress of a joinable
//! run goes through the machine, which numbers it; a message of the machine keeps its place among the blocks of its lane, and is handled
//! between blocks, so each block is sent under one list.
//!
//! Blocks are routed to *ranks*: places among the full members of the list in use, 0, 1, 2, ... without a gap. A worker's id never changes; its
//! rank does when one with a lower id leaves. On a fabric that is not joinable both are the same.
//!
//! Capabilities. A founder's operators begin with one per output, which all founders count. A joiner's begin with none: its constructors get
//! capabilities that are good for no output. What a joiner is granted are capabilities of outputs that somebody *claims*, which inputs do, at the
//! times at which its server holds them; that is the worker that led when it was admitted, unless that one leaves. Of the others nothing is granted, since an operator that was built without could do nothing with it.
//! So who leaves has to work off what its operators hold, and hands over what its inputs hold. What was *announced* for an input is sent before: a
//! leaver for which nothing can come any more, and whose operators have read what has, *retires*, so that nothing more is announced, and hands over when all that
//! was is sent. Operators that have something to do in every step do not keep it: they get a thousand.

use std::cell::{Cell, OnceCell, Ref, RefCell};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use penstock_members::list::Change;
use penstock_members::{Failure, Host, Limits, List, Member, Output, Standing};
use penstock_progress::capability::Capability;
use penstock_progress::timestamp::Timestamp;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::dataflow::SPARE;
use crate::error::{Error, MemberFault};
use crate::lesson::Pupils;
use crate::region::{AnyRegion, Family, Foreign, Part};

/// In milliseconds. Between threads a join takes as long as its program builds; a server that is busy in an operator answers later.
const LIMITS: Limits = Limits { join: 60_000, serve: 10_000 };

/// What members tell each other of one dataflow: counts or capabilities.
pub(crate) type Told = Arc<Content>;

/// See [`Told`].
pub(crate) struct Content {
    /// What the sender built: in its first bundle and in snapshots.
    graph: Option<Arc<str>>,
    /// By region; none when the sender has finished the dataflow.
    parts: Vec<Box<dyn Part>>,
}

impl Serialize for Content {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let bytes = |part: &dyn Part| {
            let mut bytes = Vec::new();
            if !part.is_empty() {
                part.encode(&mut bytes);
            }
            bytes
        };
        (self.graph.as_deref(), self.parts.iter().map(|part| bytes(&**part)).collect::<Vec<_>>()).serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let (graph, parts): (Option<Arc<str>>, Vec<Vec<u8>>) = Deserialize::deserialize(deserializer)?;
        let part = |bytes| -> Box<dyn Part> { Box::new(Foreign(bytes)) };
        Ok(Content { graph, parts: parts.into_iter().map(part).collect() })
    }
}

impl std::fmt::Debug for Content {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Content").field("parts", &self.parts.len()).finish()
    }
}

/// The books of one dataflow.
struct Book {
    graph: Arc<str>,
    /// Whether its graph was told: with the first bundle.
    told: Cell<bool>,
    /// Whether a server had finished it, so that all founders have built it.
    finished: Cell<bool>,
    /// What was cast, oldest first: what all members have read is filled again.
    cast: RefCell<VecDeque<Told>>,
    /// None once it is finished or dropped.
    open: Option<(Rc<Family>, Rc<dyn AnyRegion>)>,
}

/// The books of all dataflows that were built: the machine's host.
#[derive(Default)]
struct Books {
    books: BTreeMap<u64, Book>,
    /// What an error of the machine is to be called: it only knows that something is wrong.
    fault: Option<Fault>,
}

enum Fault {
    Graph(String),
    Error(Error),
}

/// How far a worker has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Its dataflows are being built.
    Building,
    /// It waits for its place.
    Joining,
    /// It takes part.
    Seated,
    /// It has asked to leave, and is seated again when it is the last one.
    Leaving,
    /// Nothing is routed to it, and what its inputs held is another's.
    Draining,
    /// It has handed over everything.
    Drained,
    /// It takes part in nothing any more.
    Gone,
}

/// See the module.
pub(crate) struct Membership {
    member: RefCell<Member<Told>>,
    books: RefCell<Books>,
    /// With their dataflows, those that have ended too: who teaches joiners.
    schools: RefCell<Vec<(u64, Rc<Pupils>)>>,
    /// Whom this worker is to teach when all that was sent before they were full members has come.
    awaited: RefCell<BTreeSet<usize>>,
    stage: Cell<Stage>,
    joins: bool,
    founders: usize,
    /// The process of everybody who ever was in a list here.
    homes: RefCell<BTreeMap<usize, usize>>,
    /// Of the full members.
    ids: RefCell<Vec<usize>>,
    /// Of this worker: `usize::MAX` when nothing is routed to it.
    rank: Cell<usize>,
    alone: Cell<bool>,
    /// Whether somebody joins.
    welcomes: Cell<bool>,
    /// Whether a member has finished all dataflows.
    over: Cell<bool>,
    /// Empty between uses.
    outputs: Cell<Vec<Output<Told>>>,
    began: Instant,
    simulated: bool,
}

impl Membership {
    /// Founders: how many, and how many of each process.
    pub(crate) fn new(index: usize, (founders, threads): (usize, usize), host: Option<usize>, simulated: bool) -> Self {
        // Its inputs begin where those of its server stand: that of who let it in is the same in each run. A simulation has all.
        let (joins, server) = (host.is_some(), host.filter(|_| !simulated || index.is_multiple_of(2)));
        let member = if joins {
            Member::joiner(index, server, LIMITS)
        } else {
            Member::founder_at(index, founders, threads, LIMITS)
        };
        let homes = member.list().homes.iter().map(|(id, home)| (*id, home.process)).collect();
        Membership {
            homes: RefCell::new(homes),
            member: RefCell::new(member),
            books: RefCell::default(),
            schools: RefCell::default(),
            awaited: RefCell::default(),
            stage: Cell::new(Stage::Building),
            joins,
            founders,
            ids: RefCell::new((0..founders).collect()),
            rank: Cell::new(if joins { usize::MAX } else { index }),
            alone: Cell::new(!joins && founders == 1),
            welcomes: Cell::new(false),
            over: Cell::new(false),
            outputs: Cell::default(),
            began: Instant::now(),
            simulated,
        }
    }

    pub(crate) fn stage(&self) -> Stage {
        self.stage.get()
    }

    pub(crate) fn set_stage(&self, stage: Stage) {
        self.stage.set(stage);
    }

    /// Whether it began outside of the run.
    pub(crate) fn joins(&self) -> bool {
        self.joins
    }

    /// Whether it has not had a place in the run yet, so that nothing counts on it.
    pub(crate) fn is_outside(&self) -> bool {
        self.joins && matches!(self.stage.get(), Stage::Building | Stage::Joining)
    }

    /// How many workers the run began with.
    pub(crate) fn founders(&self) -> usize {
        self.founders
    }

    /// Ids of the full members, by rank.
    pub(crate) fn ids(&self) -> Ref<'_, Vec<usize>> {
        self.ids.borrow()
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank.get()
    }

    /// Whether there is nobody to tell anything.
    pub(crate) fn is_alone(&self) -> bool {
        self.alone.get()
    }

    /// Routes by this list from now on.
    pub(crate) fn adopt(&self, me: usize, list: &List) {
        let ids: Vec<usize> = list.full().collect();
        self.rank.set(ids.iter().position(|id| *id == me).unwrap_or(usize::MAX));
        *self.ids.borrow_mut() = ids;
        self.homes.borrow_mut().extend(list.homes.iter().map(|(id, home)| (*id, home.process)));
        self.alone.set(list.members.len() <= 1);
        let welcomes = list.joining().next().is_some();
        let welcomed = self.welcomes.replace(welcomes);
        if let Change::Seated { joiner, granter } = list.change
            && granter == me
        {
            self.awaited.borrow_mut().insert(joiner);
        } else if welcomed && !welcomes {
            // What has waited for them may end.
            self.schools.borrow().iter().for_each(|(_, pupils)| pupils.activate());
        }
    }

    /// A dataflow was built: its books are open until [`Membership::close`].
    pub(crate) fn open(&self, number: u64, graph: Arc<str>, family: Rc<Family>, root: Rc<dyn AnyRegion>) {
        let (told, finished, cast) = (Cell::new(false), Cell::new(false), RefCell::default());
        let book = Book { graph, told, finished, cast, open: Some((family, root)) };
        self.books.borrow_mut().books.insert(number, book);
        self.member.borrow_mut().open(number);
    }

    /// A dataflow is finished, or dropped.
    pub(crate) fn close(&self, number: u64) {
        // The regions end after the books are free again.
        let open = self.books.borrow_mut().books.get_mut(&number).and_then(|book| {
            book.cast.take();
            book.open.take()
        });
        drop(open);
        let schools = self.schools.borrow();
        schools.iter().filter(|(dataflow, _)| *dataflow == number).for_each(|(_, pupils)| pupils.forget());
    }

    /// An operator of the dataflow that is being built teaches joiners.
    pub(crate) fn open_school(&self, number: u64, pupils: Rc<Pupils>) {
        self.schools.borrow_mut().push((number, pupils));
    }

    /// Whether this worker is to teach somebody when all that was sent before has come.
    pub(crate) fn has_pupils(&self) -> bool {
        !self.awaited.borrow().is_empty()
    }

    /// All that was sent before the list that made this joiner a full member has come.
    pub(crate) fn teach(&self, joiner: usize) {
        self.awaited.borrow_mut().remove(&joiner);
        let books = self.books.borrow();
        let schools = self.schools.borrow();
        for (number, pupils) in schools.iter() {
            match books.books.get(number).is_some_and(|book| book.open.is_some()) {
                true => pupils.come(joiner),
                false => pupils.dismiss(joiner),
            }
        }
    }

    /// Whether nobody who joins will have to be taught by this dataflow, and it has learnt itself.
    pub(crate) fn is_taught(&self, number: u64) -> bool {
        let schools = self.schools.borrow();
        let mut own = schools.iter().filter(|(dataflow, _)| *dataflow == number).map(|(_, pupils)| pupils).peekable();
        if own.peek().is_none() {
            return true;
        }
        if self.books.borrow().books.get(&number).is_some_and(|book| book.finished.get()) {
            own.for_each(|pupils| pupils.graduate());
            return true;
        }
        let welcomes = self.welcomes.get() && !self.over.get();
        !welcomes && self.awaited.borrow().is_empty() && own.all(|pupils| !pupils.is_due())
    }

    /// A member has finished all dataflows, and may be gone: who has not got its place by then gets none, and is not waited for.
    pub(crate) fn end(&self) {
        if !self.over.replace(true) {
            self.schools.borrow().iter().for_each(|(_, pupils)| pupils.activate());
        }
    }

    /// How many dataflows were built.
    pub(crate) fn built(&self) -> u64 {
        self.books.borrow().books.len() as u64
    }

    /// Whether every founder has told what it built in this dataflow, or has left.
    pub(crate) fn has_met_all(&self, me: usize, number: u64) -> bool {
        if self.books.borrow().books.get(&number).is_some_and(|book| book.finished.get()) {
            return true;
        }
        let member = self.member.borrow();
        let Some(caster) = member.caster(number) else { return false };
        let met = |id: usize| id == me || caster.expected(id) > 0 || !member.list().members.contains_key(&id);
        (0..self.founders).all(met)
    }

    /// Lets the machine do something with its books, and adds what it wants done to `outputs`.
    pub(crate) fn tend(
        &self,
        me: usize,
        outputs: &mut Vec<Output<Told>>,
        act: impl FnOnce(&mut Member<Told>, &mut Act<'_>) -> Result<(), Failure>,
    ) -> Result<(), Error> {
        let mut member = self.member.borrow_mut();
        let mut books = self.books.borrow_mut();
        let result = act(&mut member, &mut Act { books: &mut books });
        member.outputs_into(outputs);
        if result.is_ok() && books.fault.is_none() {
            return Ok(());
        }
        match (result, books.fault.take()) {
            (_, Some(Fault::Error(error))) => Err(error),
            (Err(failure), fault) => Err(name(me, failure, fault)),
            (Ok(()), _) => Ok(()),
        }
    }

    /// An empty vector for what the machine wants done, to be given back.
    pub(crate) fn outputs(&self) -> Vec<Output<Told>> {
        self.outputs.take()
    }

    pub(crate) fn give_back(&self, outputs: Vec<Output<Told>>) {
        self.outputs.set(outputs);
    }

    /// Asks the machine.
    pub(crate) fn member(&self) -> Ref<'_, Member<Told>> {
        self.member.borrow()
    }

    /// What the machine calls the time.
    pub(crate) fn now(&self) -> u64 {
        if self.simulated { 0 } else { self.began.elapsed().as_millis() as u64 }
    }

    /// Whether somebody joins whom this worker may have to withdraw, or who looks for another server.
    pub(crate) fn watches_clock(&self) -> bool {
        !self.simulated && (self.stage.get() == Stage::Joining || self.welcomes.get())
    }

    /// Whether nothing can come for this leaver any more.
    pub(crate) fn may_drain(&self) -> bool {
        self.member.borrow().may_drain()
    }

    /// Has nothing more announced for inputs of this leaver; whether all that was is sent.
    pub(crate) fn retire(&self) -> bool {
        let books = self.books.borrow();
        let mut sent = true;
        for (family, _) in books.books.values().filter_map(|book| book.open.as_ref()) {
            family.regions.borrow().iter().for_each(|region| sent &= region.retire());
        }
        sent
    }

    /// Whether no operator has anything any more, and none has a joiner to teach: nobody else would.
    pub(crate) fn is_worked_off(&self) -> bool {
        let worked_off = |book: &Book| book.open.as_ref().is_none_or(|(family, _)| is_worked_off(family));
        self.books.borrow().books.values().all(worked_off)
            && self.awaited.borrow().is_empty()
            && self.schools.borrow().iter().all(|(_, pupils)| pupils.is_empty())
    }

    /// Whether it takes part: what is asked for at the door reaches the lead by it.
    pub(crate) fn is_seated(&self) -> bool {
        self.member.borrow().is_seated()
    }

    /// Where a worker runs, or ran.
    pub(crate) fn process(&self, id: usize) -> Option<usize> {
        self.homes.borrow().get(&id).copied()
    }

    /// Who runs, or ran, in a process, with their standing now.
    pub(crate) fn members_at(&self, process: usize) -> Vec<(usize, Option<Standing>)> {
        let (homes, member) = (self.homes.borrow(), self.member.borrow());
        let there = homes.iter().filter(|(_, home)| **home == process);
        there.map(|(id, _)| (*id, member.list().standing(*id))).collect()
    }

    /// The operators of a joiner may send from now on.
    pub(crate) fn enliven(&self) {
        for (family, _) in self.books.borrow().books.values().filter_map(|book| book.open.as_ref()) {
            family.alive.set(true);
        }
    }
}

/// The error that a failure of the machine is.
fn name(me: usize, failure: Failure, fault: Option<Fault>) -> Error {
    let about = |fault| Error::Member { worker: me, fault };
    match failure {
        Failure::Gap { dataflow, gap } => {
            let dataflow = format!("dataflow {dataflow}");
            Error::SequenceGap { dataflow, worker: gap.worker, expected: gap.expected, got: gap.got }
        }
        Failure::Lost(id) => about(MemberFault::Lost(id)),
        Failure::Mismatch { dataflow, peer } => {
            let what = match fault {
                Some(Fault::Graph(difference)) => difference,
                _ => "one of both did not build it before the bootstrap".to_string(),
            };
            Error::GraphMismatch { worker: me, peer, detail: format!("dataflow number {}: {what}", dataflow + 1) }
        }
        Failure::Skipped { peer, here, got } => about(MemberFault::Skipped { peer, here, got }),
    }
}

fn is_worked_off(family: &Family) -> bool {
    !family.mark.is_pending() && family.regions.borrow().iter().all(|region| region.is_worked_off())
}

/// The host, while the machine acts.
pub(crate) struct Act<'a> {
    books: &'a mut Books,
}

impl Act<'_> {
    fn open(&self, dataflow: u64) -> Option<(&Book, &Rc<Family>, &Rc<dyn AnyRegion>)> {
        let book = self.books.books.get(&dataflow)?;
        let (family, root) = book.open.as_ref()?;
        Some((book, family, root))
    }

    /// Applies all that was counted here up to now.
    fn settle(&mut self, dataflow: u64) {
        let Some((_, family, root)) = self.open(dataflow) else { return };
        family.mark.collect();
        family.regions.borrow().iter().for_each(|region| region.harvest(true));
        let result = root.apply();
        root.propagate();
        if let Err(error) = result {
            self.books.fault = Some(Fault::Error(error));
        }
    }

    /// One part of each region, unless all are empty.
    fn gather(&mut self, dataflow: u64, part: impl Fn(&dyn AnyRegion) -> Box<dyn Part>) -> Option<Told> {
        self.settle(dataflow);
        let (_, family, _) = self.open(dataflow)?;
        let parts: Vec<_> = family.regions.borrow().iter().map(|region| part(&**region)).collect();
        // What was counted for whom it is given is to be cast at once.
        self.settle(dataflow);
        parts.iter().any(|part| !part.is_empty()).then(|| Arc::new(Content { graph: None, parts }))
    }
}

impl Host for Act<'_> {
    type Part = Told;

    fn cast(&mut self, dataflow: u64) -> Option<Told> {
        let (mut book, mut family, _) = self.open(dataflow)?;
        // A dataflow that had its turn has settled.
        if family.mark.has_counted() {
            self.settle(dataflow);
            (book, family, _) = self.open(dataflow)?;
        }
        let regions = family.regions.borrow();
        let first = !book.told.replace(true);
        if !first && !regions.iter().any(|region| region.owes()) {
            return None;
        }
        let mut cast = book.cast.borrow_mut();
        let read_by_all = cast.front_mut().is_some_and(|told| Arc::get_mut(told).is_some());
        let used = if read_by_all { cast.pop_front() } else { None };
        let mut told = used.unwrap_or_else(|| {
            let parts = regions.iter().map(|region| region.new_part()).collect();
            Arc::new(Content { graph: None, parts })
        });
        let content = Arc::get_mut(&mut told).expect("it was just made, or found to be ours alone");
        content.graph = first.then(|| book.graph.clone());
        for (region, part) in regions.iter().zip(&mut content.parts) {
            region.share(&mut **part);
        }
        if cast.len() < SPARE {
            cast.push_back(told.clone());
        }
        Some(told)
    }

    fn absorb(&mut self, dataflow: u64, told: &Told) -> bool {
        let Some(book) = self.books.books.get(&dataflow) else { return false };
        if let Some(difference) = differs(book, told) {
            self.books.fault = Some(Fault::Graph(difference));
            return false;
        }
        // Finished here: it is so everywhere, and others say what is known.
        let Some((family, _)) = &book.open else { return true };
        let regions = family.regions.borrow();
        family.mark.count();
        let fits = regions.len() == told.parts.len();
        if !fits || !regions.iter().zip(&told.parts).all(|(region, part)| region.absorb(part.as_any())) {
            self.books.fault = Some(Fault::Graph("the types of time differ".to_string()));
            return false;
        }
        true
    }

    fn snapshot(&mut self, dataflow: u64) -> Told {
        self.settle(dataflow);
        let Some(book) = self.books.books.get(&dataflow) else {
            return Arc::new(Content { graph: None, parts: Vec::new() });
        };
        let regions = book.open.as_ref().map(|(family, _)| family.regions.borrow());
        let parts = regions.iter().flat_map(|regions| regions.iter().map(|region| region.snapshot())).collect();
        Arc::new(Content { graph: Some(book.graph.clone()), parts })
    }

    fn begin(&mut self, dataflow: u64, told: &Told) -> bool {
        let Some(book) = self.books.books.get(&dataflow) else { return false };
        if let Some(difference) = differs(book, told) {
            self.books.fault = Some(Fault::Graph(difference));
            return false;
        }
        let Some((family, root)) = &book.open else { return true };
        let regions = family.regions.borrow();
        book.finished.set(told.parts.is_empty());
        let loaded = told.parts.is_empty()
            || regions.len() == told.parts.len()
                && regions.iter().zip(&told.parts).all(|(region, part)| region.load(part.as_any()));
        if !loaded {
            self.books.fault = Some(Fault::Graph("its counts are of other scopes".to_string()));
            return false;
        }
        root.stand();
        root.propagate();
        true
    }

    fn grant(&mut self, dataflow: u64) -> Option<Told> {
        self.gather(dataflow, |region| region.grant())
    }

    fn hand_over(&mut self, dataflow: u64) -> Option<Told> {
        self.gather(dataflow, |region| region.hand_over())
    }

    fn take(&mut self, dataflow: u64, capabilities: &Told) {
        let Some((_, family, _)) = self.open(dataflow) else { return };
        for (region, part) in family.regions.borrow().iter().zip(&capabilities.parts) {
            region.take(part.as_any());
        }
    }

    fn seat(&mut self) {
        for (family, _) in self.books.books.values().filter_map(|book| book.open.as_ref()) {
            family.regions.borrow().iter().for_each(|region| region.seat());
        }
    }
}

/// How the graph of a book differs from what was told, if that says so.
fn differs(book: &Book, told: &Told) -> Option<String> {
    crate::dataflow::difference(&book.graph, told.graph.as_deref()?)
}

/// Where a claimed output puts the capability that this worker is given for it.
pub(crate) struct Slot<T: Timestamp> {
    /// Whether its holder began without one and still has none. One that has its own could do nothing with another, since its time only
    /// moves on.
    wants: Cell<bool>,
    /// Whether something is to be sent with what is held.
    announced: Cell<bool>,
    /// Whether what is held will be handed over to another worker: nothing more is announced.
    retired: Cell<bool>,
    /// Whether what was held was handed over to another worker.
    revoked: Cell<bool>,
    given: RefCell<Option<Capability<T>>>,
    /// The time of what was given.
    time: OnceCell<T>,
}

impl<T: Timestamp> Slot<T> {
    pub(crate) fn new(wants: bool) -> Rc<Self> {
        let [announced, retired, revoked] = [false; 3].map(Cell::new);
        let (wants, given, time) = (Cell::new(wants), RefCell::default(), OnceCell::new());
        Rc::new(Slot { wants, announced, retired, revoked, given, time })
    }

    /// Something is to be sent with what is held; false when it will be, or is, somebody else's.
    fn announce(&self) -> bool {
        let keeps = !self.retired.get();
        if keeps {
            self.announced.set(true);
        }
        keeps
    }

    /// Nothing more is announced; whether what was is sent.
    pub(crate) fn retire(&self) -> bool {
        self.retired.set(true);
        !self.announced.get()
    }

    /// Gives a capability; what is not wanted is dropped.
    pub(crate) fn give(&self, capability: Capability<T>) {
        if self.wants.replace(false) {
            self.time.get_or_init(|| capability.time().clone());
            *self.given.borrow_mut() = Some(capability);
        }
    }

    /// Gives up what is still wanted.
    pub(crate) fn seat(&self) {
        if self.wants.get() {
            self.revoke();
        }
    }

    /// What was held here is somebody else's.
    pub(crate) fn revoke(&self) {
        self.wants.set(false);
        self.revoked.set(true);
        if let Some(mut capability) = self.given.take() {
            capability.detach();
        }
    }
}

/// What an input holds.
pub(crate) struct Held<T: Timestamp> {
    capability: Capability<T>,
    /// In a joinable run.
    slot: Option<Rc<Slot<T>>>,
}

impl<T: Timestamp> Held<T> {
    pub(crate) fn new(capability: Capability<T>, slot: Option<Rc<Slot<T>>>) -> Self {
        Held { capability, slot }
    }

    /// See [`Slot::announce`].
    pub(crate) fn announce(&self) -> bool {
        self.slot.as_ref().is_none_or(|slot| slot.announce())
    }

    /// Before a block is sent, which is what was announced; whether the capability is good for something.
    #[inline]
    pub(crate) fn spend(&mut self) -> bool {
        let Some(slot) = &self.slot else { return true };
        slot.announced.set(false);
        self.refresh()
    }

    /// Takes what was given, and gives up what was taken; whether the capability is good for something.
    fn refresh(&mut self) -> bool {
        let Some(slot) = &self.slot else { return true };
        if slot.revoked.get() {
            self.capability.detach();
        } else if let Some(capability) = slot.given.take() {
            self.capability = capability;
        }
        self.is_good()
    }

    /// Whether the capability is good for something, or will be with the next use.
    pub(crate) fn is_good(&self) -> bool {
        self.slot.as_ref().is_none_or(|slot| !slot.revoked.get() && !slot.wants.get())
    }

    pub(crate) fn time(&self) -> &T {
        let given = self.slot.as_ref().filter(|slot| slot.given.borrow().is_some());
        given.and_then(|slot| slot.time.get()).unwrap_or_else(|| self.capability.time())
    }

    /// Moves to a later time; false when it is not in advance.
    pub(crate) fn downgrade(&mut self, time: &T) -> bool {
        self.refresh();
        self.capability.time().less_equal(time) && self.capability.downgrade(time).is_ok()
    }
}

impl<T: Timestamp> Drop for Held<T> {
    fn drop(&mut self) {
        self.refresh();
        if let Some(slot) = &self.slot {
            slot.wants.set(false);
            slot.announced.set(false);
        }
    }
}
