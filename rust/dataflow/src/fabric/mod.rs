//! The fabric: mailboxes of workers, and how messages reach them.
//!
//! Every worker owns one mailbox: a multi-producer queue with a doorbell that wakes the worker when it is parked. A message names a
//! channel and a worker; nothing else is allocated per channel, so a channel needs no endpoints to be filled in when the set of
//! workers changes (our departure from rescaling R§3.1, which stores typed endpoints per channel).
//!
//! Invariants: messages of one sender to one receiver arrive in order within a lane; an abort reaches every worker of the fabric,
//! parked or not, and all report one cause (module `verdict`). A seat that is dropped before its worker is made is such a
//! cause, since its peers would wait for that worker for ever.

mod commons;
mod door;
mod frame;
mod lanes;
mod limits;
mod link;
mod mailbox;
mod process;
mod shuffle;
mod stream;
mod sync;
mod verdict;
mod watch;

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crossbeam::sync::Parker;
use penstock_members::message::Bundle as MemberBundle;
use penstock_members::{Lane as MemberLane, Message};

pub use door::{Door, JoinError, Ticket, joinable, joinable_shuffled};

pub use frame::MAX_BODY_BYTES;
pub use limits::Limits;
pub use process::{
    FabricGuard, FabricTag, join_processes, joinable_processes, joinable_processes_with, processes, processes_with,
};
#[doc(hidden)]
pub use process::{Wire, simulated_process};
pub use stream::{Duplex, Hangup};

use crate::dataflow::Bundle;
use crate::error::Error;
use crate::membership::Told;
use commons::Commons;
pub(crate) use door::Asked;
use door::Hall;
use lanes::Lane;
use link::Outbox;
use shuffle::Shuffle;
use verdict::{Cause, Verdict};

/// How many kinds of frames there are, numbered from 0 on. For fuzzing.
#[doc(hidden)]
pub const FRAME_KINDS: usize = frame::Kind::ALL.len();

/// Reads frames of a fabric until something is none; how many there were. For fuzzing: links do the same with a socket.
#[doc(hidden)]
#[must_use]
pub fn fuzz_frames(mut bytes: &[u8], tag: FabricTag) -> usize {
    std::iter::from_fn(|| frame::read(&mut bytes, tag).ok()).count()
}

/// What a message carries.
pub(crate) enum Payload {
    /// Data from a thread of this process: a value.
    Typed(Box<dyn Any + Send>),
    /// Data from another process.
    Bytes(Vec<u8>),
    /// Data from another process that other data goes before.
    Behind(Vec<u8>),
    /// Progress.
    Progress(Progress),
    /// Progress of a joinable run, from a thread of this process. The channel is the dataflow.
    Bundle(MemberBundle<Told>),
    /// What else members tell each other, and the lane that it keeps its place in.
    Member(MemberLane, Box<Message<Told>>),
    /// What they tell each other, to or from another process.
    MemberBytes(MemberLane, Vec<u8>),
    /// The sender was given up before it had joined.
    Lost,
    /// This process has left, or is lost for that reason. Of a joinable fabric; nobody is the sender.
    Cut(usize, Option<Error>),
}

/// Progress of a dataflow on one worker.
pub(crate) enum Progress {
    /// From a thread of this process.
    Bundle(Arc<Bundle>),
    /// From another process.
    Bytes(Vec<u8>),
}

/// A message in a mailbox.
pub(crate) struct Envelope {
    pub(crate) channel: u64,
    pub(crate) from: usize,
    pub(crate) payload: Payload,
}

type Mailbox = mailbox::Mailbox<Envelope>;

/// Where a worker is.
#[derive(Clone)]
enum Route {
    Local(Arc<Mailbox>),
    Remote(Arc<Outbox>),
    /// It has left for good.
    Gone,
}

/// By id of a worker. Ids are never used again, so a table that lacks somebody is only old.
type Routes = Arc<Vec<Route>>;

/// One to each other process.
type Links = Arc<Vec<Arc<Outbox>>>;

/// What the workers of one process share.
pub(crate) struct Shared {
    /// Each seat keeps the table that it used last, and looks here when a list of members is adopted.
    routes: Mutex<Routes>,
    /// How many workers it began with: all there are ever, unless there is a hall. 0 while a process that joins does not know.
    founders: AtomicUsize,
    /// Of them, so many of each process.
    threads: usize,
    /// Where joiners wait, if any may come.
    hall: Option<Hall>,
    /// They grow where processes join.
    links: Mutex<Links>,
    process: usize,
    /// Whether a worker here takes, or took, part in the run: a process that only wants to join stops nobody.
    speaks: AtomicBool,
    verdict: Verdict,
    /// Dataflows of local workers that are not finished: leaving with some is not a clean goodbye.
    live: AtomicUsize,
    /// Local seats whose worker is not made yet: leaving with some is none either.
    vacant: AtomicUsize,
    /// Workers of the whole fabric that have left, and how many dataflows each had built.
    left: Mutex<Vec<(usize, u64)>>,
    left_count: AtomicUsize,
    first_local: AtomicUsize,
    commons: Commons,
}

impl Shared {
    fn new(
        routes: Vec<Route>,
        links: Vec<Arc<Outbox>>,
        process: usize,
        first_local: usize,
        hall: Option<Hall>,
    ) -> Self {
        let verdict = Verdict::new(links.iter().map(|outbox| outbox.process()));
        let founders = routes.len();
        let vacant = routes.iter().filter(|route| matches!(route, Route::Local(_))).count();
        // Joiners ask for common values at any time.
        let takers = if hall.is_some() { usize::MAX } else { vacant };
        Shared {
            founders: AtomicUsize::new(founders),
            threads: vacant,
            routes: Mutex::new(Arc::new(routes)),
            hall,
            links: Mutex::new(Arc::new(links)),
            vacant: AtomicUsize::new(vacant),
            process,
            speaks: AtomicBool::new(vacant > 0),
            verdict,
            live: AtomicUsize::new(0),
            left: Mutex::new(Vec::new()),
            left_count: AtomicUsize::new(0),
            first_local: AtomicUsize::new(first_local),
            commons: Commons::new(takers),
        }
    }

    fn links(&self) -> Links {
        self.links.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone()
    }

    fn founders(&self) -> usize {
        self.founders.load(Ordering::Acquire)
    }

    fn routes(&self) -> Routes {
        self.routes.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone()
    }

    /// Ends the park of every local worker, and the wait of who asked for seats.
    fn wake_all(&self) {
        for route in &*self.routes() {
            if let Route::Local(mailbox) = route {
                mailbox.ring();
            }
        }
        if let Some(hall) = &self.hall {
            hall.wake();
        }
    }

    /// Records that a worker takes part in nothing any more but in the first `built` dataflows.
    fn leave(&self, worker: usize, built: u64) {
        let mut left = self.left.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        left.push((worker, built));
        self.left_count.store(left.len(), Ordering::Release);
        drop(left);
        self.wake_all();
    }

    fn is_aborted(&self) -> bool {
        self.verdict.is_stopped()
    }

    /// Stops the fabric: wakes every local worker and tells the other processes.
    fn abort(&self, error: Error) {
        self.stop(None, Cause { origin: self.process, error });
    }

    /// As [`Shared::abort`], also for a cause that came from another process, which is passed on too. Each process tells a cause
    /// before its own goodbye, so nobody can see a process leave and take that for the cause, however late the words of the
    /// process where it began.
    fn stop(&self, from: Option<usize>, cause: Cause) {
        let first = self.first_local.load(Ordering::Acquire);
        let tell = |cause: &Cause| {
            if self.speaks.load(Ordering::Acquire) {
                self.links().iter().for_each(|outbox| outbox.send_abort(first, cause));
            }
        };
        if self.verdict.stop(from, cause, tell) {
            self.wake_all();
        }
    }
}

/// The seat of one worker: made by [`threads`] or [`processes`], moved into the worker's thread. One that is dropped before a
/// [`Worker`](crate::Worker) was made of it stops all workers of the fabric.
pub struct Endpoint {
    index: usize,
    founders: usize,
    shared: Arc<Shared>,
    routes: RefCell<Routes>,
    /// Those that a step looks at: without processes of which this seat has heard that they have left or are lost.
    links: RefCell<Links>,
    mailbox: Arc<Mailbox>,
    parker: Parker,
    /// Whether its worker was made.
    taken: Cell<bool>,
    /// Whether its worker may pass on what is asked at the door.
    seated: Cell<bool>,
    /// Who let it in, if it was made for one who joins.
    joins: Option<usize>,
    /// Between mailbox and worker, in a simulation.
    shuffle: Option<RefCell<Shuffle>>,
}

impl Endpoint {
    /// Index of this worker among all workers of the fabric.
    pub fn index(&self) -> usize {
        self.index
    }

    /// How many workers the fabric began with: where none join or leave, all there are.
    pub fn peers(&self) -> usize {
        self.founders
    }

    /// How many founders each process has.
    pub(crate) fn threads(&self) -> usize {
        self.shared.threads
    }

    /// Whether workers may join and leave.
    pub fn is_joinable(&self) -> bool {
        self.shared.hall.is_some()
    }

    /// Whether its worker joins a run that has begun.
    pub fn joins(&self) -> bool {
        self.joins.is_some()
    }

    /// Who let this joiner in: its server, unless that one leaves.
    pub(crate) fn host(&self) -> Option<usize> {
        self.joins
    }

    /// A worker was made of this seat, and answers for its end from now on.
    pub(crate) fn take(&self) {
        if !self.taken.replace(true) && self.joins.is_none() {
            self.shared.vacant.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// A handle that wakes this worker from any thread.
    pub fn waker(&self) -> Waker {
        Waker { mailbox: self.mailbox.clone() }
    }

    /// Whether that worker is a thread of this process. An index that is out of range is not.
    pub(crate) fn is_local(&self, worker: usize) -> bool {
        matches!(self.routes.borrow().get(worker), Some(Route::Local(_)))
    }

    /// What the workers of this process have in common at the n-th place; see [`Commons`].
    pub(crate) fn common<V: Any + Send + Sync>(&self, number: u64, make: impl FnOnce() -> V) -> Arc<V> {
        self.shared.commons.take(number, make)
    }

    /// Sends to any worker but this one. Values go to local workers, bytes to the others.
    pub(crate) fn send(&self, to: usize, channel: u64, payload: Payload) -> Result<(), Error> {
        match (&self.routes.borrow()[to], payload) {
            (Route::Local(mailbox), payload) => {
                mailbox.push(Envelope { channel, from: self.index, payload });
                Ok(())
            }
            (Route::Remote(outbox), Payload::Bytes(body)) => outbox.send(channel, self.index, to, Lane::Data, body),
            (Route::Remote(outbox), Payload::Behind(body)) => outbox.send(channel, self.index, to, Lane::Behind, body),
            (Route::Remote(outbox), Payload::Progress(Progress::Bytes(body))) => {
                outbox.send(channel, self.index, to, Lane::Urgent, body)
            }
            (Route::Remote(outbox), Payload::MemberBytes(lane, body)) => outbox.send_member(self.index, to, lane, body),
            // Who has left may still be told of lists that it needs no more.
            (Route::Gone, _) => Ok(()),
            (Route::Remote(_), _) => unreachable!("a value for worker {to} of another process"),
        }
    }

    /// Counts data that this worker has taken from one of another process.
    pub(crate) fn take_in(&self, from: usize, body_bytes: usize) {
        if let Some(Route::Remote(outbox)) = self.routes.borrow().get(from) {
            outbox.take_in(body_bytes);
        }
    }

    /// Tells the other processes what was taken from them.
    pub(crate) fn tell_taken(&self) {
        self.links.borrow().iter().for_each(|outbox| outbox.tell());
    }

    /// Whether more data is on its way to some process than the limit.
    pub(crate) fn is_congested(&self) -> bool {
        self.links.borrow().iter().any(|outbox| outbox.is_over())
    }

    /// Tells all workers that this one has built its last dataflow.
    pub(crate) fn leave(&self, built: u64) {
        self.shared.leave(self.index, built);
        self.shared.links().iter().for_each(|outbox| outbox.send_leave(self.index, built));
    }

    /// How many workers have left.
    pub(crate) fn left(&self) -> usize {
        self.shared.left_count.load(Ordering::Acquire)
    }

    /// A worker that left without building dataflow number `number`, and how many it had built.
    pub(crate) fn left_before(&self, number: u64) -> Option<(usize, u64)> {
        if self.left() == 0 {
            return None;
        }
        let left = self.shared.left.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        left.iter().find(|(_, built)| *built <= number).copied()
    }

    pub(crate) fn receive(&self) -> Option<Envelope> {
        match &self.shuffle {
            None => self.mailbox.queue.pop(),
            Some(shuffle) => shuffle.borrow_mut().next(),
        }
    }

    /// How many messages to receive now.
    pub(crate) fn waiting(&self) -> usize {
        match &self.shuffle {
            None => self.mailbox.queue.len(),
            Some(shuffle) => shuffle.borrow_mut().arriving(&self.mailbox.queue),
        }
    }

    pub(crate) fn has_mail(&self) -> bool {
        !self.mailbox.queue.is_empty() || self.shuffle.as_ref().is_some_and(|shuffle| !shuffle.borrow().is_empty())
    }

    pub(crate) fn park(&self, timeout: Option<Duration>) {
        match timeout {
            Some(timeout) => self.parker.park_timeout(timeout),
            None => self.parker.park(),
        }
    }

    pub(crate) fn abort(&self, error: Error) {
        self.shared.abort(error);
    }

    pub(crate) fn is_aborted(&self) -> bool {
        self.shared.is_aborted()
    }

    /// Why the fabric stopped, if it did. Waits for a moment when processes may have failed at the same time.
    pub(crate) fn failure(&self) -> Option<Error> {
        self.shared.verdict.report()
    }

    pub(crate) fn dataflow_opened(&self) {
        self.shared.live.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn dataflow_closed(&self) {
        self.shared.live.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        if !self.taken.get() && self.joins.is_some() {
            self.give_up();
        } else if !self.taken.get() {
            let reason = "its seat was dropped before the worker was made".to_string();
            self.shared.abort(Error::Aborted { worker: self.index, reason });
        }
        self.stand_up();
    }
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Endpoint").field("index", &self.index).field("joins", &self.joins).finish()
    }
}

/// Wakes one worker; cheap to clone, usable from any thread.
#[derive(Clone)]
pub struct Waker {
    mailbox: Arc<Mailbox>,
}

impl Waker {
    /// Ends the current or the next park of the worker. Costs one atomic exchange when it is not parked.
    pub fn wake(&self) {
        self.mailbox.ring();
    }
}

impl std::fmt::Debug for Waker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Waker")
    }
}

fn mailbox() -> (Arc<Mailbox>, Parker) {
    let (mailbox, parker) = Mailbox::new();
    (Arc::new(mailbox), parker)
}

/// Seats for `workers` workers, all of them threads of this process. No thread is started.
///
/// # Panics
/// When `workers` is 0.
pub fn threads(workers: usize) -> Vec<Endpoint> {
    local(workers, None)
}

fn local(workers: usize, hall: Option<Hall>) -> Vec<Endpoint> {
    assert!(workers > 0, "a fabric has at least one worker");
    let (boxes, parkers): (Vec<_>, Vec<_>) = (0..workers).map(|_| mailbox()).unzip();
    let routes = boxes.iter().map(|mailbox| Route::Local(mailbox.clone())).collect();
    seats(&Arc::new(Shared::new(routes, Vec::new(), 0, 0, hall)), boxes, parkers)
}

/// As [`threads`], but messages take an arbitrary number of steps and overtake each other, as the seed wants: for simulations.
/// When all workers are stepped by one thread, a run depends on nothing but the seed.
///
/// # Panics
/// When `workers` is 0.
pub fn shuffled(workers: usize, seed: u64) -> Vec<Endpoint> {
    let mut seats = threads(workers);
    for seat in &mut seats {
        seat.shuffle = Some(RefCell::new(Shuffle::new(seed ^ (seat.index as u64) << 32)));
    }
    seats
}

fn seats(shared: &Arc<Shared>, boxes: Vec<Arc<Mailbox>>, parkers: Vec<Parker>) -> Vec<Endpoint> {
    let first = shared.first_local.load(Ordering::Acquire);
    let places = boxes.into_iter().zip(parkers).enumerate();
    places.map(|(thread, (mailbox, parker))| seat(shared, first + thread, mailbox, parker, None)).collect()
}

fn seat(shared: &Arc<Shared>, index: usize, mailbox: Arc<Mailbox>, parker: Parker, joins: Option<usize>) -> Endpoint {
    let (routes, links) = (RefCell::new(shared.routes()), RefCell::new(shared.links()));
    let (founders, shared, taken, seated) = (shared.founders(), shared.clone(), Cell::new(false), Cell::new(true));
    let seat =
        Endpoint { index, founders, shared, routes, links, mailbox, parker, taken, seated, joins, shuffle: None };
    seat.sit_down()
}
