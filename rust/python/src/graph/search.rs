//! Searches of an index.
//!
//! A search is threads of the core (`penstock_graph::crew`); the handle waits for them through [`enter`], and closing it, or
//! dropping it, stops and joins them.

use std::sync::{Arc, Mutex, PoisonError};

use arrow_array::builder::UInt64Builder;
use arrow_array::{ArrayRef, Int64Array, LargeStringArray, RecordBatch as Batch};
use arrow_schema::{Field, Schema as ArrowSchema};
use penstock_graph::crew::{Counting, Crew, Done, Matches, Next};
use penstock_graph::domain::{Domain, signed, text};
use penstock_graph::{GraphError, Query, Rows, Unit};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arrow::RecordBatch;
use crate::enter::{enter, locked, timeout};
use crate::errors::{self, Kind, Problem};
use crate::fork::Owner;
use crate::graph::{GraphIndex, Ids, Trouble, done};

enum Work {
    Count(Counting),
    Rows(Matches),
}

/// Threads that search an index for a pattern: a count, or rows as they are found.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct GraphSearch {
    owner: Owner,
    query: Query,
    schema: Arc<ArrowSchema>,
    work: Mutex<Option<Work>>,
}

impl GraphSearch {
    /// One look at the work, waiting at most as long as the closure does.
    fn look<T>(&self, look: impl FnOnce(&Work) -> Result<T, GraphError>) -> Result<T, Trouble> {
        let work = self.work.lock().unwrap_or_else(PoisonError::into_inner);
        match work.as_ref() {
            Some(work) => Ok(look(work)?),
            None => Err(Trouble::Handle(Problem::Closed("GraphSearch"))),
        }
    }

    fn batch(&self, rows: &Rows) -> Result<Batch, arrow_schema::ArrowError> {
        let places = rows.places(&self.query, self.query.index().labels.is_some());
        let columns = places.iter().map(|column| match &self.query.index().domain {
            Domain::Signed(ids) => {
                let ids = ids.get();
                let column = column.iter().map(|&place| signed(ids[place as usize]));
                Arc::new(Int64Array::from_iter_values(column)) as ArrayRef
            }
            Domain::Numbers(ids) => {
                let ids = ids.get();
                let mut numbers = UInt64Builder::with_capacity(column.len());
                column.iter().for_each(|&place| numbers.append_value(ids[place as usize]));
                Arc::new(numbers.finish())
            }
            Domain::Texts { ends, bytes } => {
                let (ends, bytes) = (ends.get(), bytes.get());
                let column = column.iter().map(|&place| String::from_utf8_lossy(text(ends, bytes, place)));
                Arc::new(LargeStringArray::from_iter_values(column))
            }
        });
        Batch::try_new(self.schema.clone(), columns.collect())
    }
}

#[pymethods]
impl GraphSearch {
    #[new]
    #[pyo3(signature = (index, pattern, *, count, order=None, workers=1, batches=64, batch_size=1024, rows=8192, in_order=false, unit=None))]
    #[expect(clippy::too_many_arguments, reason = "they are the options of one call")]
    fn new(
        py: Python<'_>,
        index: &GraphIndex,
        pattern: &str,
        count: bool,
        order: Option<Vec<String>>,
        workers: usize,
        batches: usize,
        batch_size: usize,
        rows: usize,
        in_order: bool,
        unit: Option<(u32, u32, u32, u32)>,
    ) -> PyResult<Self> {
        let query = py.detach(|| index.query(pattern, order))?;
        let unit = unit.map(|(root, place, end, cut)| Unit { from: (root, place), to: (end, cut) });
        if let Some(unit) = unit.filter(|unit| !unit.is_of(&query)) {
            let ((root, place), (end, cut)) = (unit.from, unit.to);
            let told = format!(
                "unit=({root}, {place}, {end}, {cut}) is no part of this search: take one that `units` gives for the same \
                 pattern and order"
            );
            return Err(errors::raise(Kind::Value, &told));
        }
        let crew = Crew { workers, batches, batch_size, rows, in_order, unit };
        let of = Ids::of(&index.index).arrow();
        let fields = query.columns().iter().map(|name| Field::new(name, of.clone(), false)).collect::<Vec<_>>();
        let start = || match count {
            true => Counting::start(&query, &crew).map(Work::Count),
            false => Matches::start(&query, &crew).map(Work::Rows),
        };
        let work = done(py.detach(start))?;
        let schema = Arc::new(ArrowSchema::new(fields));
        Ok(Self { owner: Owner::here(), query, schema, work: Mutex::new(Some(work)) })
    }

    /// Waits for the end of a count; None when `timeout` (seconds) is over.
    #[pyo3(signature = (timeout=None))]
    fn count<'py>(&self, py: Python<'py>, timeout: Option<f64>) -> PyResult<Option<Bound<'py, PyDict>>> {
        self.owner.check(py, "GraphSearch")?;
        let waited = enter(py, self::timeout(timeout)?, |wait| {
            self.look(|work| match work {
                Work::Count(counting) => counting.wait(wait),
                Work::Rows(_) => Ok(None),
            })
        })?;
        waited.map(|done| shown(py, done)).transpose()
    }

    /// The next rows, or at the end what a count tells; None when `timeout` (seconds) is over.
    #[pyo3(signature = (timeout=None))]
    fn next<'py>(
        &self,
        py: Python<'py>,
        timeout: Option<f64>,
    ) -> PyResult<(Option<RecordBatch>, Option<Bound<'py, PyDict>>)> {
        self.owner.check(py, "GraphSearch")?;
        let waited = enter(py, self::timeout(timeout)?, |wait| {
            let next = self.look(|work| match work {
                Work::Rows(matches) => matches.next_in(wait),
                Work::Count(_) => Ok(Next::Nothing),
            })?;
            Ok::<_, Trouble>(match next {
                Next::Rows(rows) => Some(Ok(self.batch(&rows).map_err(Trouble::Arrow)?)),
                Next::End(done) => Some(Err(done)),
                Next::Nothing => None,
            })
        })?;
        match waited {
            Some(Ok(batch)) => Ok((Some(RecordBatch::new(batch)), None)),
            Some(Err(done)) => Ok((None, Some(shown(py, done)?))),
            None => Ok((None, None)),
        }
    }

    /// How many values of the first attribute are behind, and of how many.
    fn progress(&self, py: Python<'_>) -> PyResult<(u64, u64)> {
        self.owner.check(py, "GraphSearch")?;
        let behind = py.detach(|| {
            self.look(|work| match work {
                Work::Count(counting) => Ok(counting.progress()),
                Work::Rows(matches) => Ok(matches.progress()),
            })
        });
        Ok(behind?)
    }

    /// Stops and joins the threads. Harmless when done twice.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        if !self.owner.is_here() {
            return Ok(()); // a `with` statement that a forked child leaves
        }
        let work = locked(py, &self.work, Option::take);
        py.detach(|| drop(work));
        Ok(())
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(errors::no_pickle("GraphSearch", "ship the pattern and the file of the index"))
    }
}

impl Drop for GraphSearch {
    fn drop(&mut self) {
        let work = self.work.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if !self.owner.is_here() {
            // Its threads exist in the parent only: nothing to join here.
            std::mem::forget(work);
        } else if work.is_some() {
            // Joining them takes a moment, in which others may run.
            Python::attach(|py| py.detach(|| drop(work)));
        }
    }
}

fn shown(py: Python<'_>, done: Done) -> PyResult<Bound<'_, PyDict>> {
    let facts = PyDict::new(py);
    facts.set_item("count", done.count)?;
    facts.set_item("prefixes", done.prefixes)?;
    facts.set_item("admitted_maximum", done.admitted_maximum)?;
    facts.set_item("batches_maximum", done.batches_maximum)?;
    Ok(facts)
}
