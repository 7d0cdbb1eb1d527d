//! What all dataflows of one worker share: its endpoint, its channels, and the error that stopped it.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::fabric::{Endpoint, Envelope, Payload, Waker};

/// The receiving end of a channel.
pub(crate) trait Sink {
    /// Takes a message in.
    fn accept(&self, from: usize, payload: Payload) -> Result<(), Error>;
}

/// The shared part of a worker.
pub(crate) struct Core {
    endpoint: Endpoint,
    /// By channel; `None` where the dataflow is gone and late messages are dropped.
    channels: RefCell<Vec<Option<Rc<dyn Sink>>>>,
    /// Messages for channels that this worker has not built yet.
    early: RefCell<HashMap<u64, Vec<Envelope>>>,
    fault: RefCell<Option<Error>>,
    faulty: Cell<bool>,
    /// Where the user's code was when it began to panic.
    origin: RefCell<Option<String>>,
    /// How many values it has in common with the other workers of its process.
    commons: Cell<u64>,
    parked: Cell<Duration>,
}

impl Core {
    pub(crate) fn new(endpoint: Endpoint) -> Self {
        endpoint.take();
        Core {
            endpoint,
            channels: RefCell::new(Vec::new()),
            early: RefCell::new(HashMap::new()),
            fault: RefCell::new(None),
            faulty: Cell::new(false),
            origin: RefCell::new(None),
            commons: Cell::new(0),
            parked: Cell::default(),
        }
    }

    pub(crate) fn index(&self) -> usize {
        self.endpoint.index()
    }

    pub(crate) fn peers(&self) -> usize {
        self.endpoint.peers()
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

    /// Takes the next channel id: equal on all workers, since all build the same graph in the same order.
    pub(crate) fn open_channel(&self, make: impl FnOnce(u64) -> Rc<dyn Sink>) -> u64 {
        let channel = self.channels.borrow().len() as u64;
        let sink = make(channel);
        self.channels.borrow_mut().push(Some(sink.clone()));
        let early = self.early.borrow_mut().remove(&channel);
        for envelope in early.into_iter().flatten() {
            self.note(sink.accept(envelope.from, envelope.payload));
        }
        channel
    }

    /// Number of the next channel.
    pub(crate) fn next_channel(&self) -> u64 {
        self.channels.borrow().len() as u64
    }

    /// Forgets channels: what still comes for them is dropped.
    pub(crate) fn close_channels(&self, channels: std::ops::Range<u64>) {
        for channel in channels {
            self.channels.borrow_mut()[channel as usize] = None;
        }
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
            if let Payload::Bytes(body) = &envelope.payload {
                remote = true;
                self.endpoint.take_in(envelope.from, body.len());
            }
            let channels = self.channels.borrow();
            match channels.get(envelope.channel as usize) {
                Some(Some(sink)) => self.note(sink.accept(envelope.from, envelope.payload)),
                Some(None) => {}
                None => self.early.borrow_mut().entry(envelope.channel).or_default().push(envelope),
            }
        }
        if remote {
            self.endpoint.tell_taken();
        }
    }

    pub(crate) fn park(&self, timeout: Option<Duration>) {
        let began = Instant::now();
        self.endpoint.park(timeout);
        self.parked.set(self.parked.get() + began.elapsed());
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
            self.endpoint.abort(error);
        }
    }

    /// The error that stops this worker and all others, if any.
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.spread();
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
