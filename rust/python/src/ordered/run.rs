//! [`OrderedRun`]: one native pipeline, as its Python driver sees it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crossbeam::channel::{Receiver, RecvTimeoutError, bounded};
use penstock_ordered::pipeline::{Builder, Fault, Mode, Options, Pipeline, Pulled, Turn};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::payload::{self, Broken, Object, Sort, Spec};
use crate::enter::{self, enter, locked};
use crate::errors::{self, Kind, Problem};
use crate::fork::Owner;

type Run = Pipeline<Object, Broken>;

/// A pipeline that runs, one that is ending in a thread of its own, or none.
enum State {
    Running(Arc<Run>),
    Ending(Receiver<()>),
    Ended,
}

/// One pipeline. It works while it is pulled from and until it is closed.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct OrderedRun {
    owner: Owner,
    state: Mutex<State>,
    nudged: AtomicBool,
}

#[pymethods]
impl OrderedRun {
    #[new]
    #[pyo3(signature = (operators, *, workers, in_flight, scheduler, queue))]
    fn new(
        py: Python<'_>,
        operators: Vec<Bound<'_, PyDict>>,
        workers: usize,
        in_flight: usize,
        scheduler: &str,
        queue: &str,
    ) -> PyResult<Self> {
        let refuse = |error: &dyn std::fmt::Display| errors::raise(Kind::Config, &error.to_string());
        let mut builder = Builder::<Object, Broken>::new();
        for given in &operators {
            let spec = Spec::read(given)?;
            let call = spec.call(py);
            builder = match spec.kind {
                Sort::Stateless => builder.stateless(spec.name, move |turn: Turn, given| call(turn.worker, given)),
                Sort::Stateful => builder.stateful(spec.name, move |turn: Turn, given| call(turn.worker, given)),
                Sort::Partitioned { partitions, split, merge } => builder.partitioned(
                    spec.name,
                    partitions,
                    move |given| payload::split(&split, given),
                    move |turn: Turn, _, part| call(turn.worker, part),
                    move |parts| payload::merge(&merge, parts),
                ),
            };
        }
        let options = Options {
            workers,
            in_flight,
            scheduler: scheduler.parse().map_err(|error| refuse(&error))?,
            queue: queue.parse().map_err(|error| refuse(&error))?,
            // The driver, who reads the input, bounds items and bytes, and decides where work runs.
            in_flight_bytes: usize::MAX,
            mode: Mode::Parallel,
            ..Options::default()
        };
        let run = py.detach(|| builder.build(options)).map_err(|error| refuse(&error))?;
        Ok(Self {
            owner: Owner::here(),
            state: Mutex::new(State::Running(Arc::new(run))),
            nudged: AtomicBool::new(false),
        })
    }

    /// Hands an object over; false when there is no room.
    fn try_push(&self, py: Python<'_>, object: &Bound<'_, PyAny>, bytes: usize) -> PyResult<bool> {
        let run = self.running(py)?;
        let given = Object::new(object, bytes)?;
        Ok(py.detach(move || run.try_push(given).is_ok()))
    }

    /// How many threads work for it: fewer than were asked for where no more could be started, none before the first object.
    #[getter]
    fn threads(&self, py: Python<'_>) -> PyResult<usize> {
        let run = self.running(py)?;
        Ok(py.detach(move || run.stats().threads))
    }

    /// The next object in order; None when there is none within `timeout` seconds, or somebody nudged.
    #[pyo3(signature = (timeout=None))]
    fn pull(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<Py<PyAny>>> {
        let run = self.running(py)?;
        let timeout = enter::timeout(timeout)?;
        let pulled = enter(py, timeout, |wait: Duration| match run.pull(wait) {
            Pulled::Output { payload, .. } => Ok(Some(Some(payload.object))),
            Pulled::Error { error, .. } => Err(fault(error)),
            Pulled::Nothing => Ok(self.nudged.swap(false, Ordering::AcqRel).then_some(None)),
            Pulled::End => Err(PyErr::from(Problem::Ended("OrderedRun"))),
        });
        // The last one to let go waits for the workers, who may need the interpreter for that.
        py.detach(move || drop(run));
        pulled.map(Option::flatten)
    }

    /// Ends the wait of a `pull`, or of the next one; harmless when closed.
    fn nudge(&self, py: Python<'_>) -> PyResult<()> {
        self.owner.check(py, "OrderedRun")?;
        self.nudged.store(true, Ordering::Release);
        if let Ok(run) = self.running(py) {
            py.detach(move || {
                run.nudge();
                drop(run);
            });
        }
        Ok(())
    }

    /// What each operator has done.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let run = self.running(py)?;
        let stats = py.detach(move || run.stats());
        let mut found = Vec::new();
        for operator in stats.operators {
            let facts = PyDict::new(py);
            facts.set_item("name", &*operator.name)?;
            facts.set_item("chunks_in", operator.envelopes_in)?;
            facts.set_item("chunks_out", operator.envelopes_out)?;
            facts.set_item("values_in", operator.items_in)?;
            facts.set_item("values_out", operator.items_out)?;
            facts.set_item("busy_s", operator.busy.as_secs_f64())?;
            facts.set_item("waiting", operator.load.input)?;
            facts.set_item("workers", operator.load.workers)?;
            facts.set_item("selectivity", operator.load.selectivity)?;
            facts.set_item("scheduler", &stats.scheduler)?;
            found.push(facts);
        }
        Ok(found)
    }

    /// Ends the run and waits for its workers, at most `limit` seconds. Whether all have ended.
    #[pyo3(signature = (limit=None))]
    fn close(&self, py: Python<'_>, limit: Option<f64>) -> PyResult<bool> {
        if !self.owner.is_here() {
            return Ok(true);
        }
        let limit = enter::timeout(limit)?;
        let Some(ending) = py.detach(|| self.end()) else { return Ok(true) };
        let ended = enter(py, limit, |wait: Duration| match ending.recv_timeout(wait) {
            Ok(()) | Err(RecvTimeoutError::Disconnected) => Ok::<_, PyErr>(Some(())),
            Err(RecvTimeoutError::Timeout) => Ok(None),
        })?;
        if ended.is_some() {
            locked(py, &self.state, |state| *state = State::Ended);
        }
        Ok(ended.is_some())
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(errors::no_pickle("OrderedRun", "ship the Pipeline and run it where it is needed"))
    }
}

impl OrderedRun {
    fn running(&self, py: Python<'_>) -> PyResult<Arc<Run>> {
        self.owner.check(py, "OrderedRun")?;
        let run = locked(py, &self.state, |state| match state {
            State::Running(run) => Some(run.clone()),
            _ => None,
        });
        run.ok_or_else(|| Problem::Closed("OrderedRun").into())
    }

    /// Lets the pipeline end in a thread of its own; what says that it has, unless it has already. For detached callers: without a
    /// thread the pipeline ends here, and its workers may need the interpreter for that.
    fn end(&self) -> Option<Receiver<()>> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match std::mem::replace(&mut *state, State::Ended) {
            State::Ended => None,
            State::Ending(ending) => {
                *state = State::Ending(ending.clone());
                Some(ending)
            }
            State::Running(run) => {
                let (done, ending) = bounded(1);
                // Not here: who pushes or emits may hold what `abort` needs, and wait for the interpreter.
                let end = move || {
                    run.abort();
                    // Others may hold it, too, such as who pulls: it is not for them to wait for the workers.
                    run.join();
                    drop(run);
                    let _ = done.send(());
                };
                // Without a thread the pipeline goes with the closure.
                let _ = std::thread::Builder::new().name("penstock-ordered-end".to_owned()).spawn(end);
                *state = State::Ending(ending.clone());
                Some(ending)
            }
        }
    }
}

impl Drop for OrderedRun {
    fn drop(&mut self) {
        if self.owner.is_here() {
            // The finalizer holds the interpreter, and it may be the interpreter's last.
            if Python::try_attach(|py| py.detach(|| self.end())).is_none() {
                self.end();
            }
        } else {
            // The parent's: its threads do not exist here, and its memory is a copy that nobody may touch.
            let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
            std::mem::forget(std::mem::replace(state, State::Ended));
        }
    }
}

/// Why a run stopped.
fn fault(error: Fault<Broken>) -> PyErr {
    match error {
        Fault::Failed { error, .. } => error.0,
        other => errors::raise(Kind::Engine, &other.to_string()),
    }
}
