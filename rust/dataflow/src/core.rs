//! What all dataflows of one worker share: its endpoint, its channels, and the error that stopped it.
//!
//! A channel is named by its dataflow and its place in it. So a name depends on nothing that was built before, and of a dataflow that is gone
//! one word is left here.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_members::list::Change;
use penstock_members::message::Bundle;
use penstock_members::{Failure, Lane, Member, Message, Output, Standing};

use crate::activate::Activator;
use crate::error::{Error, MemberFault, ProtocolFault};
use crate::fabric::{Asked, Endpoint, Envelope, Payload, Waker};
use crate::membership::{Act, Membership, Stage, Told};
use crate::wire::{decode_serde, encode_serde};

/// The receiving end of a channel.
pub(crate) trait Sink {
    /// Takes a message in.
    fn accept(&self, from: usize, payload: Payload) -> Result<(), Error>;
}

/// The channels of one dataflow, by place.
type Channels = Vec<Rc<dyn Sink>>;

/// The bits of a channel's name that are its place in the dataflow.
const PLACE_BITS: u32 = 32;

/// Dataflow and place of a channel.
fn parts(channel: u64) -> (usize, usize) {
    ((channel >> PLACE_BITS) as usize, (channel & ((1 << PLACE_BITS) - 1)) as usize)
}

/// The shared part of a worker.
pub(crate) struct Core {
    endpoint: Endpoint,
    /// By dataflow and place; `None` where the dataflow is gone and late messages are dropped.
    channels: RefCell<Vec<Option<Box<Channels>>>>,
    /// The dataflow that is built now, or was last.
    building: Cell<u64>,
    /// Messages for channels that this worker has not built yet.
    early: RefCell<HashMap<u64, Vec<Envelope>>>,
    fault: RefCell<Option<Error>>,
    faulty: Cell<bool>,
    /// Where the user's code was when it began to panic.
    origin: RefCell<Option<String>>,
    /// How many values it has in common with the other workers of its process.
    commons: Cell<u64>,
    parked: Cell<Duration>,
    /// Operators that wait for room on the links.
    wait_for_room: RefCell<Vec<Activator>>,
    /// In a joinable fabric. Boxed: most have none.
    membership: Option<Box<Membership>>,
    /// Of one that does not take part: why it will not. The others go on.
    private: RefCell<Option<Error>>,
}

/// A bundle and its bytes.
type Coded = (Bundle<Told>, Vec<u8>);

fn encoded(message: &Message<Told>) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode_serde(message, &mut bytes);
    bytes
}

/// The channel that messages of members name: none.
const NOWHERE: u64 = u64::MAX;

impl Core {
    pub(crate) fn new(endpoint: Endpoint) -> Self {
        endpoint.take();
        let membership = endpoint.is_joinable().then(|| {
            let (index, founders) = (endpoint.index(), endpoint.peers());
            let founders = (founders, endpoint.threads());
            Box::new(Membership::new(index, founders, endpoint.host(), endpoint.is_simulated()))
        });
        Core {
            membership,
            private: RefCell::new(None),
            endpoint,
            channels: RefCell::new(Vec::new()),
            building: Cell::new(0),
            early: RefCell::new(HashMap::new()),
            fault: RefCell::new(None),
            faulty: Cell::new(false),
            origin: RefCell::new(None),
            commons: Cell::new(0),
            parked: Cell::default(),
            wait_for_room: RefCell::default(),
        }
    }

    pub(crate) fn index(&self) -> usize {
        self.endpoint.index()
    }

    /// How many workers blocks are routed to.
    pub(crate) fn peers(&self) -> usize {
        match &self.membership {
            None => self.endpoint.peers(),
            Some(membership) => membership.ids().len(),
        }
    }

    /// The place of this worker among those that blocks are routed to; `usize::MAX` when it has none.
    pub(crate) fn rank(&self) -> usize {
        self.membership.as_ref().map_or(self.index(), |membership| membership.rank())
    }

    /// The worker that a routing function names, if blocks are routed to it. By id, blocks of one that leaves may stay with it until it holds none.
    #[inline]
    pub(crate) fn target(&self, asked: usize, by_id: bool) -> Option<usize> {
        match &self.membership {
            None => (asked < self.endpoint.peers()).then_some(asked),
            Some(membership) if by_id => {
                (asked == self.index() || membership.ids().binary_search(&asked).is_ok()).then_some(asked)
            }
            Some(membership) => membership.ids().get(asked).copied(),
        }
    }

    pub(crate) fn membership(&self) -> Option<&Membership> {
        self.membership.as_deref()
    }

    pub(crate) fn waker(&self) -> Waker {
        self.endpoint.waker()
    }

    pub(crate) fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    pub(crate) fn is_local(&self, worker: usize) -> bool {
        self.endpoint.is_local(worker)
    }

    pub(crate) fn send(&self, to: usize, channel: u64, payload: Payload) {
        self.note(self.endpoint.send(to, channel, payload));
    }

    /// Begins the channels of a dataflow: those that are opened from now on.
    pub(crate) fn open_dataflow(&self, number: u64) {
        let mut channels = self.channels.borrow_mut();
        let at = number as usize;
        if channels.len() <= at {
            channels.resize_with(at + 1, || None);
        }
        channels[at] = Some(Box::default());
        self.building.set(number);
    }

    /// The dataflow that is built now, or was last.
    pub(crate) fn building(&self) -> u64 {
        self.building.get()
    }

    /// The next channel of the dataflow that is built now: its name is equal on all workers, since all build the same graph.
    pub(crate) fn open_channel(&self, make: impl FnOnce(u64) -> Rc<dyn Sink>) -> u64 {
        let number = self.building.get();
        let place = self.with_channels(number, |channels| channels.len());
        let channel = number << PLACE_BITS | place as u64;
        let sink = make(channel);
        self.with_channels(number, |channels| channels.push(sink.clone()));
        let early = self.early.borrow_mut().remove(&channel);
        for envelope in early.into_iter().flatten() {
            self.note(sink.accept(envelope.from, envelope.payload));
        }
        channel
    }

    fn with_channels<R>(&self, number: u64, use_them: impl FnOnce(&mut Channels) -> R) -> R {
        let mut channels = self.channels.borrow_mut();
        let open = channels.get_mut(number as usize).and_then(Option::as_mut);
        use_them(open.expect("channels are opened while their dataflow is built"))
    }

    /// Forgets the channels of a dataflow: what came early or still comes for them is dropped.
    pub(crate) fn close_dataflow(&self, number: u64) {
        self.early.borrow_mut().retain(|channel, _| parts(*channel).0 != number as usize);
        let closed = self.channels.borrow_mut().get_mut(number as usize).and_then(Option::take);
        drop(closed);
    }

    /// The next value that the workers of this process have in common.
    pub(crate) fn common<V: Any + Send + Sync>(&self, make: impl FnOnce() -> V) -> Arc<V> {
        let number = self.commons.replace(self.commons.get() + 1);
        self.endpoint.common(number, make)
    }

    /// Moves what is in the mailbox now into the channels.
    pub(crate) fn deliver(&self) {
        let mut remote = false;
        for _ in 0..self.endpoint.waiting() {
            let Some(envelope) = self.endpoint.receive() else { break };
            match envelope.payload {
                Payload::Bytes(ref body) => {
                    remote = true;
                    self.endpoint.take_in(envelope.from, body.len());
                }
                Payload::Bundle(bundle) => {
                    self.hear_bundle(envelope.from, envelope.channel, bundle);
                    continue;
                }
                Payload::Member(lane, message) => {
                    self.hear(envelope.from, lane, *message);
                    continue;
                }
                Payload::MemberBytes(lane, body) => {
                    match decode_serde(&body) {
                        Ok(message) => self.hear(envelope.from, lane, message),
                        Err(_) => self.fail(self.garbled(envelope.from)),
                    }
                    continue;
                }
                Payload::Lost => {
                    self.tend(|member, books| member.given_up(envelope.from, books));
                    continue;
                }
                Payload::Cut(process, error) => {
                    self.endpoint.look_up();
                    self.lose(process, error);
                    continue;
                }
                _ => {}
            }
            let channels = self.channels.borrow();
            let (dataflow, place) = parts(envelope.channel);
            match channels.get(dataflow) {
                Some(None) => {}
                open => match open.and_then(|open| open.as_ref()?.get(place)) {
                    Some(sink) => self.note(sink.accept(envelope.from, envelope.payload)),
                    None => self.early.borrow_mut().entry(envelope.channel).or_default().push(envelope),
                },
            }
        }
        if remote {
            self.endpoint.tell_taken();
        }
    }

    /// A message of another member.
    fn hear(&self, from: usize, lane: Lane, message: Message<Told>) {
        match message {
            Message::Bundle(dataflow, bundle) => self.hear_bundle(from, dataflow, bundle),
            message => self.tend(|member, books| member.accept(from, lane, message, books)),
        }
    }

    /// Progress of another member.
    fn hear_bundle(&self, from: usize, dataflow: u64, bundle: Bundle<Told>) {
        let Some(membership) = &self.membership else { return };
        if dataflow >= membership.built() {
            let detail = format!("dataflow number {} was never built here", dataflow + 1);
            return self.fail(Error::GraphMismatch { worker: self.index(), peer: from, detail });
        }
        self.tend(|member, books| member.hear(from, dataflow, bundle, books));
    }

    /// Sends a message of this member. The bytes of a bundle are made once, however many processes it goes to: `coded` keeps them.
    fn post(&self, to: usize, lane: Lane, message: Message<Told>, coded: &mut Option<Coded>) {
        let payload = match message {
            Message::Bundle(dataflow, bundle) if self.is_local(to) => {
                return self.send(to, dataflow, Payload::Bundle(bundle));
            }
            message if self.is_local(to) => Payload::Member(lane, Box::new(message)),
            Message::Bundle(dataflow, bundle) => {
                let known = coded.take().filter(|(last, _)| Arc::ptr_eq(&last.part, &bundle.part));
                let (_, bytes) = coded.insert(known.unwrap_or_else(|| {
                    let bytes = encoded(&Message::Bundle(dataflow, bundle.clone()));
                    (bundle, bytes)
                }));
                Payload::MemberBytes(lane, bytes.clone())
            }
            message => Payload::MemberBytes(lane, encoded(&message)),
        };
        self.send(to, NOWHERE, payload);
    }

    /// What came from that worker is no message of a member.
    fn garbled(&self, from: usize) -> Error {
        let process = self.membership.as_ref().and_then(|membership| membership.process(from)).unwrap_or(0);
        Error::Protocol { process, fault: ProtocolFault::Body(NOWHERE) }
    }

    /// A process has left, or is lost: so are those of its workers that have not come.
    fn lose(&self, process: usize, error: Option<Error>) {
        let Some(membership) = &self.membership else { return };
        if error.is_none() && self.endpoint.is_over() {
            return;
        }
        for (id, standing) in membership.members_at(process) {
            match (standing, &error) {
                (Some(Standing::Joining), _) => self.tend(|member, books| member.lost(id, books)),
                // It has left after the last of its workers.
                (_, None) => {}
                (Some(_), Some(error)) => self.fail(error.clone()),
                (None, Some(error)) => {
                    let known = self.faulty.get();
                    self.tend(|member, books| member.lost(id, books));
                    if self.faulty.get() && !known {
                        *self.fault.borrow_mut() = Some(error.clone());
                    }
                }
            }
        }
    }

    /// Lets the machine of this member act, and does what it wants. Between blocks only.
    pub(crate) fn tend(&self, act: impl FnOnce(&mut Member<Told>, &mut Act<'_>) -> Result<(), Failure>) {
        let Some(membership) = &self.membership else { return };
        let mut outputs = membership.outputs();
        let result = membership.tend(self.index(), &mut outputs, act);
        if outputs.is_empty() {
            // As after most bundles that come.
            membership.give_back(outputs);
            return self.note(result);
        }
        let (mut cut, mut coded) = (Vec::new(), None);
        for output in &outputs {
            if let Output::Adopted(list) = output {
                // Markers go to those who are new.
                self.endpoint.extend(list);
                cut = self.endpoint.cut_among(list);
            }
        }
        for output in outputs.drain(..) {
            match output {
                Output::Send { to, lane, message } => self.post(to, lane, message, &mut coded),
                Output::Adopted(list) => membership.adopt(self.index(), &list),
                Output::Settled(list) => {
                    if let Change::Seated { joiner, granter } = list.change
                        && granter == self.index()
                    {
                        membership.teach(joiner);
                    }
                }
                // The list says where they are.
                Output::Admitted { .. } => {}
                Output::Crowded(home) => self.endpoint.refuse(home),
                Output::Seated => {
                    self.endpoint.speak();
                    membership.set_stage(Stage::Seated);
                    membership.enliven();
                }
                Output::Refused => {
                    let fault = MemberFault::Withdrawn;
                    self.fail(Error::Member { worker: self.index(), fault });
                }
                Output::Closed => self.go(),
                Output::Alone => membership.set_stage(Stage::Seated),
            }
        }
        membership.give_back(outputs);
        self.note(result);
        for (process, error) in cut {
            self.lose(process, error);
        }
    }

    /// Nobody counts on this worker any more.
    pub(crate) fn go(&self) {
        if let Some(membership) = &self.membership {
            membership.set_stage(Stage::Gone);
            self.endpoint.vacate();
            self.endpoint.stand_up();
        }
    }

    /// What a member does in every step before its dataflows.
    pub(crate) fn attend(&self) {
        let Some(membership) = &self.membership else { return };
        let asked = self.endpoint.is_asked() && membership.is_seated();
        if asked || membership.watches_clock() {
            let (asked, now) = (if asked { self.endpoint.asked() } else { Vec::new() }, membership.now());
            self.tend(|member, books| {
                asked.into_iter().for_each(|Asked { home, count, linked }| member.admit_at(home, count, linked));
                member.tick(now, books)
            });
        }
        if self.endpoint.is_over() {
            membership.end();
            if membership.stage() == Stage::Drained {
                // The others have finished, so nobody may be there to say goodbye to.
                self.go();
            }
        }
    }

    /// Something was to be sent by a worker that has not joined yet: its next step says so.
    #[cold]
    pub(crate) fn refuse_early(&self) {
        if self.membership.as_ref().is_some_and(|membership| membership.is_outside()) {
            self.fail(Error::Member { worker: self.index(), fault: MemberFault::NotBootstrapped });
        }
    }

    pub(crate) fn park(&self, timeout: Option<Duration>) {
        let began = Instant::now();
        self.endpoint.park(timeout);
        self.parked.set(self.parked.get() + began.elapsed());
    }

    /// Whether a source may send more; if not, it runs again when it may.
    pub(crate) fn has_room(&self, source: &Activator) -> bool {
        if !self.endpoint.is_congested() {
            return true;
        }
        let mut waiting = self.wait_for_room.borrow_mut();
        if !waiting.iter().any(|other| other.is(source)) {
            waiting.push(source.clone());
        }
        false
    }

    /// Whether some source waits for room and there is some.
    pub(crate) fn has_room_again(&self) -> bool {
        !self.wait_for_room.borrow().is_empty() && !self.endpoint.is_congested()
    }

    /// Has the sources run that wait for room, if there is some.
    pub(crate) fn tell_room(&self) {
        if self.has_room_again() {
            self.wait_for_room.take().iter().for_each(Activator::activate);
        }
    }

    /// How long it has been parked in all.
    pub(crate) fn parked(&self) -> Duration {
        self.parked.get()
    }

    /// Records an error that surfaces in the current or the next step. The first one stays.
    pub(crate) fn fail(&self, error: Error) {
        self.fault.borrow_mut().get_or_insert(error);
        self.faulty.set(true);
    }

    /// As [`Core::fail`], but also instead of a lost peer, which only followed from this.
    pub(crate) fn fail_rather(&self, error: Error) {
        if matches!(*self.fault.borrow(), Some(Error::PeerLost { .. })) {
            self.fault.take();
        }
        self.fail(error);
    }

    fn note(&self, result: Result<(), Error>) {
        if let Err(error) = result {
            self.fail(error);
        }
    }

    /// Spreads an error of this worker to all others.
    pub(crate) fn spread(&self) {
        if self.faulty.get()
            && let Some(error) = self.fault.borrow_mut().take()
        {
            if self.membership.as_ref().is_some_and(|membership| membership.is_outside()) {
                if matches!(error, Error::PeerLost { .. }) && !self.endpoint.speaks() {
                    // The others may know why; they hear nothing of this.
                    self.endpoint.give_up();
                    self.endpoint.abort(error);
                    return;
                }
                // It ends alone.
                if self.private.borrow_mut().replace(error).is_none() {
                    self.endpoint.give_up();
                    self.endpoint.stand_up();
                }
                return;
            }
            self.endpoint.abort(error);
        }
    }

    /// The error that stops this worker and all others, if any.
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.spread();
        if let Some(error) = &*self.private.borrow() {
            return Err(error.clone());
        }
        match self.endpoint.failure() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// Whether [`Core::check`] would fail: for use between operators.
    pub(crate) fn is_stopped(&self) -> bool {
        self.faulty.get() || self.endpoint.is_aborted()
    }

    /// Marks a stretch of code of the user: a panic that begins in it, and not in a stretch within it, has this name.
    pub(crate) fn origin<'a>(&'a self, name: &'a str) -> Origin<'a> {
        Origin { core: self, name }
    }

    /// Where the panic that was just caught began.
    pub(crate) fn take_origin(&self) -> Option<String> {
        self.origin.borrow_mut().take()
    }
}

/// See [`Core::origin`].
pub(crate) struct Origin<'a> {
    core: &'a Core,
    name: &'a str,
}

impl Drop for Origin<'_> {
    fn drop(&mut self) {
        if std::thread::panicking()
            && let Ok(mut origin) = self.core.origin.try_borrow_mut()
        {
            origin.get_or_insert_with(|| self.name.to_string());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::threads;

    struct Count(Rc<Cell<usize>>);

    impl Sink for Count {
        fn accept(&self, _: usize, _: Payload) -> Result<(), Error> {
            self.0.set(self.0.get() + 1);
            Ok(())
        }
    }

    #[test]
    fn channels_are_named_by_their_dataflow_whatever_was_built_before() {
        let mut seats = threads(2);
        let (there, here) = (Core::new(seats.remove(1)), Core::new(seats.remove(0)));
        let came = Rc::new(Cell::new(0));
        let open = || here.open_channel(|_| Rc::new(Count(came.clone())));
        here.open_dataflow(3);
        let (first, second) = (open(), open());
        assert_eq!([parts(first), parts(second)], [(3, 0), (3, 1)]);
        // To a dataflow that was never here, a channel of it, one that is to come, and one of the next dataflow.
        for channel in [0, second, second + 1, first + (1 << PLACE_BITS)] {
            there.send(0, channel, Payload::Bytes(Vec::new()));
        }
        here.deliver();
        assert_eq!((came.get(), here.early.borrow().len()), (1, 2));
        assert_eq!(open(), second + 1);
        assert_eq!((came.get(), here.early.borrow().len()), (2, 1));
        here.close_dataflow(3);
        there.send(0, first, Payload::Bytes(Vec::new()));
        here.deliver();
        assert_eq!((came.get(), here.early.borrow().len()), (2, 1), "what comes late is dropped");
        here.close_dataflow(4);
        assert!(here.early.borrow().is_empty(), "and what came early");
    }
}
