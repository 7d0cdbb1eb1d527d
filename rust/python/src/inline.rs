//! A flow, or one piece of it, in the calling thread: [`InlineRun`]. For Spark tasks: it starts no thread.
//!
//! The dataflow inside is bound to the thread that made it. The Python handle is not (Python may pass it anywhere), so
//! the dataflow lives in a table of its thread and the handle holds its number: any other thread gets a typed error
//! where it would otherwise need luck.
//!
//! It works only while it is pulled, in ticks between which signals are served: a flow that expands its input makes no more than
//! the caller takes.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use arrow_schema::SchemaRef;
use penstock_plan::host::{HostError, Inline, Pulled};
use pyo3::prelude::*;

use crate::arrow::{RecordBatch, import_batch};
use crate::calls::PyCalls;
use crate::enter::TICK;
use crate::errors::{self, Kind, Problem};
use crate::fork::Owner;
use crate::plan;

static NEXT: AtomicU64 = AtomicU64::new(0);
/// Runs whose handle was dropped in another thread; their own thread frees them when it next makes one.
static ORPHANS: Mutex<Vec<u64>> = Mutex::new(Vec::new());

thread_local! {
    static RUNS: RefCell<HashMap<u64, Inline>> = RefCell::default();
}

fn orphans() -> std::sync::MutexGuard<'static, Vec<u64>> {
    ORPHANS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One flow, or one piece of a plan, in the calling thread.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct InlineRun {
    owner: Owner,
    thread: std::thread::ThreadId,
    number: u64,
    /// Columns by input: source of the plan, or side of the keyed step that the piece begins with.
    inputs: Vec<SchemaRef>,
}

#[pymethods]
impl InlineRun {
    #[new]
    #[pyo3(signature = (plan, calls, piece=None))]
    fn new(py: Python<'_>, plan: &str, calls: &Bound<'_, PyAny>, piece: Option<usize>) -> PyResult<Self> {
        let plan = Arc::new(plan::compile(plan)?);
        let piece = piece.map(|number| plan::piece_of(&plan, number)).transpose()?;
        let inputs = match piece {
            None => plan.sources().iter().map(|source| source.schema.clone()).collect(),
            Some(piece) => plan.piece_inputs(piece),
        };
        let callbacks = PyCalls::new(calls)?;
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        py.detach(|| {
            let run = Inline::new(plan, callbacks, piece)?;
            RUNS.with_borrow_mut(|runs| {
                // Free what was dropped elsewhere; numbers of other threads stay for them.
                let mine: Vec<_> = {
                    let mut orphans = orphans();
                    let (mine, others) = orphans.drain(..).partition(|number| runs.contains_key(number));
                    *orphans = others;
                    mine
                };
                let freed: Vec<_> = mine.iter().filter_map(|number| runs.remove(number)).collect();
                runs.insert(number, run);
                freed
            });
            Ok(())
        })
        .map_err(|error: HostError| Problem::Host(Box::new(error)))?;
        Ok(Self { owner: Owner::here(), thread: std::thread::current().id(), number, inputs })
    }

    /// Takes one batch and returns what it makes at once, as a list of batches: all of it, or where the flow expands its input as
    /// much as is worth handing on; `pull` gives the rest.
    #[pyo3(signature = (batch, input=0))]
    fn push(&self, py: Python<'_>, batch: &Bound<'_, PyAny>, input: u8) -> PyResult<Vec<RecordBatch>> {
        let Some(schema) = self.inputs.get(usize::from(input)) else {
            let message = format!("there are {} inputs, there is no input {input}", self.inputs.len());
            return Err(errors::raise(Kind::Value, &message));
        };
        let batch = plan::fitting(&import_batch(batch)?, schema)?;
        self.with(py, |run| run.push(input, &batch))?;
        Ok(self.pull(py)?.unwrap_or_default())
    }

    /// Goes on with what was pushed: more of what it makes, or None when that was all.
    fn pull(&self, py: Python<'_>) -> PyResult<Option<Vec<RecordBatch>>> {
        loop {
            match self.with(py, |run| run.pull(TICK))? {
                Pulled::Made(made) => {
                    let full = made.into_iter().filter(|batch| batch.num_rows() > 0);
                    return Ok(Some(full.map(RecordBatch::new).collect()));
                }
                Pulled::Idle => return Ok(None),
                Pulled::Working => py.check_signals()?,
            }
        }
    }

    /// Ends the input and returns what was still open, as `push` does.
    fn finish(&self, py: Python<'_>) -> PyResult<Vec<RecordBatch>> {
        self.with(py, Inline::finish)?;
        Ok(self.pull(py)?.unwrap_or_default())
    }

    /// The bounded scopes of the flow, as JSON.
    fn scopes(&self, py: Python<'_>) -> PyResult<String> {
        let scopes = self.with(py, |run| Ok(run.scopes()))?;
        serde_json::to_string(&scopes).map_err(|error| errors::raise(Kind::Engine, &error.to_string()))
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(errors::no_pickle("InlineRun", "ship the flow and make a run where it is needed"))
    }
}

impl InlineRun {
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Inline) -> Result<T, HostError> + Send,
    ) -> PyResult<T> {
        self.owner.check(py, "InlineRun")?;
        if self.thread != std::thread::current().id() {
            return Err(errors::raise(Kind::Engine, "an InlineRun works only in the thread that made it"));
        }
        let number = self.number;
        Ok(py.detach(|| {
            // Out of the table while it runs: a user's function may make and use other runs. It comes back only
            // after success, so a failure or a panic leaves a handle that says so.
            let taken = RUNS.with_borrow_mut(|runs| runs.remove(&number));
            let Some(mut run) = taken else { return Err(Problem::Spent("InlineRun")) };
            match work(&mut run) {
                Ok(made) => {
                    RUNS.with_borrow_mut(|runs| runs.insert(number, run));
                    Ok(made)
                }
                Err(HostError::Finished) => {
                    RUNS.with_borrow_mut(|runs| runs.insert(number, run));
                    Err(Problem::Host(Box::new(HostError::Finished)))
                }
                Err(error) => Err(Problem::Host(Box::new(error))),
            }
        })?)
    }
}

impl Drop for InlineRun {
    fn drop(&mut self) {
        if !self.owner.is_here() {
            return; // the parent's run; its memory here is a copy that nobody may touch
        }
        if self.thread == std::thread::current().id() {
            let _ = RUNS.try_with(|runs| runs.try_borrow_mut().ok().and_then(|mut runs| runs.remove(&self.number)));
        } else {
            orphans().push(self.number);
        }
    }
}
