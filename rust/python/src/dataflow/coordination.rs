//! Barriers and sequencers of `penstock-coord` as Python handles.
//!
//! A wait runs in slices, so that Ctrl-C, a stop from outside and the roll are heard during it. Elements of a sequencer are
//! pickled (by cloudpickle, so functions may be pushed) where they are pushed and unpickled where they are read.
//!
//! Invariants: an element of a sequencer is the next one until it has been unpickled, so an interrupt there loses none; one whose unpickling
//! raised an `Exception` is read, so what cannot be unpickled keeps nobody from what is behind it. The logic of operators runs
//! while a wait holds the handle: what it may do with a sequencer goes through the [`Pusher`].

use std::cell::{Cell, RefCell};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use penstock_coord::{Barrier, CoordError, Entry, Pusher, Sequencer};
use penstock_dataflow::Worker;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyBytes;
use serde::de::{Error as _, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::home::{Home, Key, busy};
use super::worker::Post;
use crate::enter::{TICK, enter, timeout};
use crate::errors::{self, Kind};

/// A pickled element; clones share the bytes.
#[derive(Clone)]
pub(crate) struct Pickled(Arc<[u8]>);

impl Serialize for Pickled {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0)
    }
}

impl<'de> Deserialize<'de> for Pickled {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Bytes;
        impl Visitor<'_> for Bytes {
            type Value = Pickled;
            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("bytes")
            }
            fn visit_bytes<E: serde::de::Error>(self, bytes: &[u8]) -> Result<Pickled, E> {
                Ok(Pickled(bytes.into()))
            }
            fn visit_byte_buf<E: serde::de::Error>(self, bytes: Vec<u8>) -> Result<Pickled, E> {
                Ok(Pickled(bytes.into()))
            }
            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Pickled, E> {
                Err(E::custom(format!("text instead of bytes: {text:?}")))
            }
        }
        deserializer.deserialize_bytes(Bytes).map_err(D::Error::custom)
    }
}

/// A barrier or sequencer that is open, or was.
pub(crate) struct Slot<X> {
    value: RefCell<Option<X>>,
    /// The program of its worker has ended.
    over: Cell<bool>,
}

impl<X> Slot<X> {
    pub(crate) fn new(value: X) -> Self {
        Slot { value: RefCell::new(Some(value)), over: Cell::new(false) }
    }

    /// Gives the value up; nothing when it is gone. Whether that could be: not in the middle of a wait.
    fn close(&self) -> bool {
        let Ok(mut held) = self.value.try_borrow_mut() else { return false };
        let value = held.take();
        drop(held);
        drop(value);
        true
    }

    /// Gives the value up at the end of the program.
    pub(crate) fn end(&self) {
        self.over.set(true);
        self.close();
    }

    fn closed(&self, what: &str) -> PyErr {
        closed(what, self.over.get())
    }
}

/// What happened in a slice of a wait.
enum Slice<R> {
    Done(Result<R, CoordError>),
    /// Whether its program has ended.
    Closed(bool),
    Busy,
}

fn closed(what: &str, over: bool) -> PyErr {
    let why = if over { "takes nothing any more: its program has ended" } else { "is closed: make a new one" };
    errors::raise(Kind::Closed, &format!("this {what} {why}"))
}

fn raise(py: Python<'_>, error: &CoordError, post: &Post) -> PyErr {
    match error {
        CoordError::Worker(cause) => post.raise(py, cause),
        CoordError::Closed { .. } | CoordError::Gone { .. } | CoordError::Ended { .. } => {
            errors::raise(Kind::Closed, &error.to_string())
        }
        _ => errors::raise(Kind::Dataflow, &error.to_string()),
    }
}

/// Waits with the worker of a slot until `slice` has something, in slices.
fn wait<X: 'static, R: Send>(
    py: Python<'_>,
    key: &Key<Slot<X>>,
    post: &Post,
    what: &'static str,
    limit: Option<Duration>,
    slice: impl Fn(&mut X, &mut Worker, Duration) -> Result<R, CoordError> + Sync,
) -> PyResult<R> {
    drop(key.get(py)?);
    let begin = Instant::now();
    let missed = AtomicU64::new(0);
    let one = |wait: Duration| {
        let outcome = key.address().away(|worker, home: &Home| {
            let Some(slot) = key.find(home) else { return Slice::Closed(false) };
            let Ok(mut held) = slot.value.try_borrow_mut() else { return Slice::Busy };
            let Some(value) = held.as_mut() else { return Slice::Closed(slot.over.get()) };
            if let Err(error) = post.watch(worker, home) {
                return Slice::Done(Err(CoordError::Worker(error)));
            }
            let outcome = slice(value, worker, wait);
            post.stepped(worker);
            Slice::Done(outcome)
        });
        match outcome {
            Some(Slice::Done(Err(CoordError::Timeout { round, .. }))) => {
                missed.store(round, Ordering::Relaxed);
                Ok(None)
            }
            Some(Slice::Done(Err(CoordError::Silence { .. }))) => Ok(None),
            Some(Slice::Done(outcome)) => Ok(Some(outcome)),
            Some(Slice::Closed(over)) => Err(closed(what, over)),
            Some(Slice::Busy) | None => Err(busy(what)),
        }
    };
    let outcome = match post.main {
        true => enter(py, limit, one)?,
        // Nobody sends signals to this thread: only a stop has to be heard, and it wakes the worker.
        false => py.detach(|| {
            loop {
                // A stop from outside wakes the worker; the slices are for what does not.
                let left = limit.map(|limit| limit.saturating_sub(begin.elapsed()));
                match one(left.map_or(TICK, |left| left.min(TICK)))? {
                    Some(outcome) => return Ok::<_, PyErr>(Some(outcome)),
                    None if left.is_some_and(|left| left.is_zero()) => return Ok(None),
                    None => {}
                }
            }
        })?,
    };
    match outcome {
        Some(outcome) => outcome.map_err(|error| raise(py, &error, post)),
        None => {
            let (seconds, round) = (limit.unwrap_or_default().as_secs_f64(), missed.load(Ordering::Relaxed));
            let message =
                format!("{what}: nothing came from the other workers within {seconds} s; waiting again goes on");
            Err(errors::raise_with(py, Kind::CoordinationTimeout, &message, |facts| match round {
                0 => Ok(()),
                round => facts.set_item("round", round),
            }))
        }
    }
}

/// A rendezvous of all workers.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct DataflowBarrier {
    key: Key<Slot<Barrier>>,
    post: Post,
}

impl DataflowBarrier {
    pub(crate) fn new(key: Key<Slot<Barrier>>, post: Post) -> Self {
        DataflowBarrier { key, post }
    }

    fn with<R>(&self, py: Python<'_>, work: impl FnOnce(&mut Barrier) -> R) -> PyResult<R> {
        let slot = self.key.get(py)?;
        let mut held = slot.value.try_borrow_mut().map_err(|_| busy("a barrier"))?;
        let barrier = held.as_mut().ok_or_else(|| slot.closed("barrier"))?;
        barrier.usable().map_err(|error| raise(py, &error, &self.post))?;
        Ok(work(barrier))
    }
}

#[pymethods]
impl DataflowBarrier {
    /// Arrives and waits for all others; the round that was passed.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<u64> {
        let limit = self::timeout(timeout)?;
        // Arriving happens once, also when the wait is cut into slices or interrupted: `wait_timeout` goes on with its round.
        wait(py, &self.key, &self.post, "barrier.wait", limit, |barrier, worker, slice| {
            barrier.wait_timeout(worker, slice)
        })
    }

    /// Arrives without waiting; the round arrived for.
    fn advance(&self, py: Python<'_>) -> PyResult<u64> {
        self.with(py, Barrier::advance)
    }

    /// Whether all workers have arrived for a round, as far as the last step has learned.
    fn reached(&self, py: Python<'_>, round: u64) -> PyResult<bool> {
        self.with(py, |barrier| barrier.reached(round))
    }

    /// The last round that this worker has arrived for.
    #[getter]
    fn round(&self, py: Python<'_>) -> PyResult<u64> {
        self.with(py, |barrier| barrier.round())
    }

    /// Gives it up: this worker counts as arrived for ever. Again: nothing.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        match self.key.get(py)?.close() {
            true => Ok(()),
            false => {
                let message = "a barrier cannot be closed while its worker waits at it: close it after that";
                Err(errors::raise(Kind::Dataflow, message))
            }
        }
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(errors::no_pickle("DataflowBarrier", "each worker makes its own"))
    }
}

/// One order of what all workers push.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct DataflowSequencer {
    key: Key<Slot<Sequencer<Pickled>>>,
    pusher: Key<Pusher<Pickled>>,
    post: Post,
    /// The element that was taken and is not unpickled yet: the next one.
    taken: Mutex<Option<Entry<Pickled>>>,
    /// Locked while somebody waits or unpickles.
    reading: Mutex<()>,
}

impl DataflowSequencer {
    pub(crate) fn new(py: Python<'_>, key: Key<Slot<Sequencer<Pickled>>>, post: Post) -> PyResult<Self> {
        let slot = key.get(py)?;
        let pusher = slot.value.borrow().as_ref().map(Sequencer::pusher).ok_or_else(|| slot.closed("sequencer"))?;
        let pusher = key.address().keep("sequencer", pusher);
        Ok(DataflowSequencer { key, pusher, post, taken: Mutex::default(), reading: Mutex::default() })
    }

    /// What was taken; no Python code runs while it is held.
    fn taken(&self) -> MutexGuard<'_, Option<Entry<Pickled>>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next element, unpickled: the one that was taken before, else what `take` gives.
    fn read<'py>(
        &self,
        py: Python<'py>,
        take: impl FnOnce() -> PyResult<Option<Entry<Pickled>>>,
    ) -> PyResult<Option<(Bound<'py, PyAny>,)>> {
        static LOADS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        let loads = LOADS.get_or_try_init(py, || Ok::<_, PyErr>(py.import("pickle")?.getattr("loads")?.unbind()))?;
        drop(self.key.get(py)?);
        // Only its own worker's thread comes here: who finds it locked is called by the wait, or by what is unpickled.
        let Ok(_reading) = self.reading.try_lock() else {
            let message =
                "this sequencer is being read already: by a wait that runs this step, or by what it unpickles";
            return Err(errors::raise(Kind::Dataflow, message));
        };
        let kept = self.taken().clone();
        let next = match kept {
            Some(next) => next,
            None => match take()? {
                Some(next) => next,
                None => return Ok(None),
            },
        };
        *self.taken() = Some(next.clone());
        let outcome = loads.bind(py).call1((PyBytes::new(py, &next.element.0),));
        if outcome.as_ref().err().is_none_or(|error| error.is_instance_of::<PyException>(py)) {
            *self.taken() = None;
        }
        match outcome {
            Ok(made) => Ok(Some((made,))),
            Err(error) if error.is_instance_of::<PyException>(py) => {
                let Entry { time, worker, index, .. } = next;
                let message = format!(
                    "element {index} of what worker {worker} pushed at time {time} of this sequencer cannot be unpickled: \
                     {error}; it counts as read"
                );
                let made = errors::raise(Kind::Block, &message);
                made.set_cause(py, Some(error));
                Err(made)
            }
            Err(error) => Err(error),
        }
    }

    /// Pushes and looks beside the handle, which a wait may hold.
    fn beside<R>(&self, py: Python<'_>, work: impl FnOnce(&Pusher<Pickled>) -> R) -> PyResult<R> {
        let slot = self.key.get(py)?;
        if slot.value.try_borrow().is_ok_and(|held| held.is_none()) {
            return Err(slot.closed("sequencer"));
        }
        Ok(work(&*self.pusher.get(py)?))
    }

    fn with<R>(&self, py: Python<'_>, work: impl FnOnce(&mut Sequencer<Pickled>) -> R) -> PyResult<R> {
        let slot = self.key.get(py)?;
        let mut held = slot.value.try_borrow_mut().map_err(|_| busy("a sequencer"))?;
        held.as_mut().map(work).ok_or_else(|| slot.closed("sequencer"))
    }
}

#[pymethods]
impl DataflowSequencer {
    /// Adds an element; it leaves with the worker's next step.
    fn push(&self, py: Python<'_>, element: &Bound<'_, PyAny>) -> PyResult<()> {
        static DUMPS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        drop(self.key.get(py)?);
        let dumps =
            DUMPS.get_or_try_init(py, || Ok::<_, PyErr>(py.import("cloudpickle")?.getattr("dumps")?.unbind()))?;
        let bytes = dumps.bind(py).call1((element,)).map_err(|error| {
            let made = errors::raise(Kind::Block, &format!("this element cannot be pickled: {error}"));
            made.set_cause(py, Some(error));
            made
        })?;
        let pickled = Pickled(bytes.cast::<PyBytes>()?.as_bytes().into());
        self.beside(py, |pusher| pusher.push(pickled))?.map_err(|error| raise(py, &error, &self.post))
    }

    /// The next element as a tuple of one, when it is known already; does not step.
    fn next<'py>(&self, py: Python<'py>) -> PyResult<Option<(Bound<'py, PyAny>,)>> {
        self.read(py, || self.with(py, Sequencer::next_entry))
    }

    /// Waits for the next element; a tuple of one, None when all workers have closed and everything is read.
    #[pyo3(signature = (timeout=None))]
    fn wait_next<'py>(&self, py: Python<'py>, timeout: Option<f64>) -> PyResult<Option<(Bound<'py, PyAny>,)>> {
        let limit = self::timeout(timeout)?;
        self.read(py, || {
            wait(py, &self.key, &self.post, "sequencer.next", limit, |sequencer, worker, slice| {
                sequencer.wait_entry(worker, Some(slice))
            })
        })
    }

    /// Whether all workers have closed and everything is read.
    #[getter]
    fn finished(&self, py: Python<'_>) -> PyResult<bool> {
        self.beside(py, |pusher| pusher.is_finished() && self.taken().is_none())
    }

    /// Ends the pushing of this worker; reading goes on. Again: nothing.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.beside(py, Pusher::close)
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(errors::no_pickle("DataflowSequencer", "each worker makes its own"))
    }
}
