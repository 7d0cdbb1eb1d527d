//! The fabric: mailboxes of workers, and how messages reach them.
//!
//! Every worker owns one mailbox: a multi-producer queue with a doorbell that wakes the worker when it is parked. A message names a
//! channel and a worker; nothing else is allocated per channel, so a channel needs no endpoints to be filled in when the set of
//! workers changes (our departure from rescaling R§3.1, which stores typed endpoints per channel).
//!
//! Invariants: messages of one sender to one receiver arrive in order within a lane; an abort reaches every worker of the fabric,
//! parked or not; the first cause wins and is what all workers report.

mod frame;
mod link;
mod process;
mod stream;

use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use crossbeam::queue::SegQueue;
use crossbeam::sync::{Parker, Unparker};

pub use frame::MAX_BODY_BYTES;
pub use process::{FabricGuard, FabricTag, processes};
pub use stream::{Duplex, Hangup};

use crate::error::Error;
use link::Outbox;

/// What a message carries.
pub(crate) enum Payload {
    /// A value, from a thread of this process.
    Typed(Box<dyn Any + Send>),
    /// Bytes, from another process.
    Bytes(Vec<u8>),
}

/// A message in a mailbox.
pub(crate) struct Envelope {
    pub(crate) channel: u64,
    pub(crate) from: usize,
    pub(crate) payload: Payload,
}

/// Which queue a message waits in when it leaves the process: progress never waits behind data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lane {
    Progress,
    Data,
}

/// The queue of one worker, and its doorbell.
pub(crate) struct Mailbox {
    queue: SegQueue<Envelope>,
    doorbell: Unparker,
}

impl Mailbox {
    fn push(&self, envelope: Envelope) {
        self.queue.push(envelope);
        self.doorbell.unpark();
    }
}

/// Where a worker is.
enum Route {
    Local(Arc<Mailbox>),
    Remote(Arc<Outbox>),
}

/// What the workers of one process share.
pub(crate) struct Shared {
    routes: Vec<Route>,
    aborted: AtomicBool,
    cause: Mutex<Option<Error>>,
    /// Dataflows of local workers that are not finished: leaving with some is not a clean goodbye.
    live: AtomicUsize,
    first_local: usize,
}

impl Shared {
    fn new(routes: Vec<Route>, first_local: usize) -> Self {
        Shared {
            routes,
            aborted: AtomicBool::new(false),
            cause: Mutex::new(None),
            live: AtomicUsize::new(0),
            first_local,
        }
    }

    fn cause(&self) -> MutexGuard<'_, Option<Error>> {
        self.cause.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn is_aborted(&self) -> bool {
        self.aborted.load(Ordering::Acquire)
    }

    /// Stops the fabric: wakes every local worker and, unless the news came from there, tells the other processes.
    /// The first cause wins.
    fn abort(&self, error: Error, tell_others: bool) {
        {
            let mut cause = self.cause();
            if cause.is_some() {
                return;
            }
            *cause = Some(error.clone());
            self.aborted.store(true, Ordering::Release);
        }
        let mut told: Vec<*const Outbox> = Vec::new();
        for route in &self.routes {
            match route {
                Route::Local(mailbox) => mailbox.doorbell.unpark(),
                Route::Remote(outbox) if tell_others => {
                    if !told.contains(&Arc::as_ptr(outbox)) {
                        told.push(Arc::as_ptr(outbox));
                        outbox.send_abort(self.first_local, &error);
                    }
                }
                Route::Remote(_) => {}
            }
        }
    }
}

/// The seat of one worker: made by [`threads`] or [`processes`], moved into the worker's thread.
pub struct Endpoint {
    index: usize,
    shared: Arc<Shared>,
    mailbox: Arc<Mailbox>,
    parker: Parker,
}

impl Endpoint {
    /// Index of this worker among all workers of the fabric.
    pub fn index(&self) -> usize {
        self.index
    }

    /// How many workers the fabric has now. Ask each time: do not keep the answer.
    pub fn peers(&self) -> usize {
        self.shared.routes.len()
    }

    /// A handle that wakes this worker from any thread.
    pub fn waker(&self) -> Waker {
        Waker { mailbox: self.mailbox.clone() }
    }

    /// Whether that worker is a thread of this process. An index that is out of range is not.
    pub(crate) fn is_local(&self, worker: usize) -> bool {
        matches!(self.shared.routes.get(worker), Some(Route::Local(_)))
    }

    /// Sends to any worker but this one. Typed payloads go to local workers, bytes to the others.
    pub(crate) fn send(&self, to: usize, channel: u64, payload: Payload, lane: Lane) {
        match (&self.shared.routes[to], payload) {
            (Route::Local(mailbox), payload) => mailbox.push(Envelope { channel, from: self.index, payload }),
            (Route::Remote(outbox), Payload::Bytes(body)) => {
                if let Err(error) = outbox.send(channel, self.index, to, lane, body) {
                    self.shared.abort(error, true);
                }
            }
            (Route::Remote(_), Payload::Typed(_)) => unreachable!("typed payload for worker {to} of another process"),
        }
    }

    pub(crate) fn receive(&self) -> Option<Envelope> {
        self.mailbox.queue.pop()
    }

    pub(crate) fn waiting(&self) -> usize {
        self.mailbox.queue.len()
    }

    pub(crate) fn has_mail(&self) -> bool {
        !self.mailbox.queue.is_empty()
    }

    pub(crate) fn park(&self, timeout: Option<Duration>) {
        match timeout {
            Some(timeout) => self.parker.park_timeout(timeout),
            None => self.parker.park(),
        }
    }

    pub(crate) fn abort(&self, error: Error) {
        self.shared.abort(error, true);
    }

    pub(crate) fn is_aborted(&self) -> bool {
        self.shared.is_aborted()
    }

    pub(crate) fn failure(&self) -> Option<Error> {
        if self.is_aborted() { self.shared.cause().clone() } else { None }
    }

    pub(crate) fn dataflow_opened(&self) {
        self.shared.live.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn dataflow_closed(&self) {
        self.shared.live.fetch_sub(1, Ordering::AcqRel);
    }
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Endpoint").field("index", &self.index).field("peers", &self.peers()).finish()
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
        self.mailbox.doorbell.unpark();
    }
}

impl std::fmt::Debug for Waker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Waker")
    }
}

/// A mailbox and the parker that only its worker holds.
fn mailbox() -> (Arc<Mailbox>, Parker) {
    let parker = Parker::new();
    let doorbell = parker.unparker().clone();
    (Arc::new(Mailbox { queue: SegQueue::new(), doorbell }), parker)
}

/// Seats for `workers` workers, all of them threads of this process. No thread is started.
///
/// # Panics
/// When `workers` is 0.
pub fn threads(workers: usize) -> Vec<Endpoint> {
    assert!(workers > 0, "a fabric has at least one worker");
    let (boxes, parkers): (Vec<_>, Vec<_>) = (0..workers).map(|_| mailbox()).unzip();
    let routes = boxes.iter().map(|mailbox| Route::Local(mailbox.clone())).collect();
    seats(Arc::new(Shared::new(routes, 0)), boxes, parkers)
}

fn seats(shared: Arc<Shared>, boxes: Vec<Arc<Mailbox>>, parkers: Vec<Parker>) -> Vec<Endpoint> {
    let first = shared.first_local;
    boxes
        .into_iter()
        .zip(parkers)
        .enumerate()
        .map(|(thread, (mailbox, parker))| Endpoint { index: first + thread, shared: shared.clone(), mailbox, parker })
        .collect()
}
