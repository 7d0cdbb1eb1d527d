//! What a function makes, item by item: [`Handover`].
//!
//! Every iterator of this package that users hold hands its results out here. A generator would die of the first
//! interrupt that lands in it, and what dies ends: the next call would take that for the end of the results. Python runs
//! signal handlers between two instructions of a function, never in the middle of this one, so here an item is either
//! handed out or still there.
//!
//! Invariants: a list counts as taken when it is here, which `fill` is told with the next call, so that it can give again
//! what got lost on its way; whatever `fill` raises changes nothing and ends nothing; no lock is held while Python runs.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::{PyRuntimeError, PyStopIteration};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyType};

use crate::ending::{Inside, pause};

/// An iterator over the items of the lists that a function gives.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct Handover {
    fill: Py<PyAny>,
    refusal: Py<PyType>,
    failure: Option<Py<PyType>>,
    busy: AtomicBool,
    held: Mutex<Held>,
}

#[derive(Default)]
struct Held {
    list: Option<Py<PyList>>,
    at: usize,
    taken: u64,
}

/// Who fills.
struct Busy<'a>(&'a AtomicBool);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

#[pymethods]
impl Handover {
    #[new]
    #[pyo3(signature = (fill, refusal, failure=None))]
    fn new(fill: Py<PyAny>, refusal: Py<PyType>, failure: Option<Py<PyType>>) -> Self {
        Self { fill, refusal, failure, busy: AtomicBool::new(false), held: Mutex::default() }
    }

    fn __iter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __next__<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        loop {
            if let Some(item) = self.pop(py) {
                return match &self.failure {
                    Some(failure) if item.get_type().is(failure) => {
                        Err(PyErr::from_value(item.getattr(pyo3::intern!(py, "error"))?))
                    }
                    _ => Ok(Some(item)),
                };
            }
            if self.busy.swap(true, Ordering::Acquire) {
                let text = "this iterator is being used: by another thread, or by its own function";
                return Err(PyErr::from_value(self.refusal.bind(py).call1((text,))?));
            }
            let busy = Busy(&self.busy);
            pause(py);
            let inside = Inside::new();
            let taken = self.held().taken;
            let made = self.fill.bind(py).call1((taken,)).map_err(|error| no_end(py, error))?;
            drop(inside);
            if made.is_none() {
                return Ok(None);
            }
            let list = made.cast_into::<PyList>()?.unbind();
            let before = {
                let mut held = self.held();
                (held.at, held.taken) = (0, taken + 1);
                held.list.replace(list)
            };
            drop(busy);
            drop(before);
        }
    }

    /// Drops what has not been handed out.
    fn clear(&self) {
        let before = self.held().list.take();
        drop(before);
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.fill)?;
        match self.held.try_lock() {
            Ok(held) => visit.call(&held.list),
            Err(_) => Ok(()),
        }
    }
}

/// What `fill` raised; StopIteration, the end of the items to whoever asks for one, as the cause of an error.
fn no_end(py: Python<'_>, error: PyErr) -> PyErr {
    if !error.is_instance_of::<PyStopIteration>(py) {
        return error;
    }
    let told = PyRuntimeError::new_err(
        "a function of this run raised StopIteration, as next(...) of an iterator at its end does; give next() a default",
    );
    told.set_cause(py, Some(error));
    told
}

impl Handover {
    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next item of the list that is here.
    fn pop<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        let mut held = self.held();
        // Not asked for what is not there: that makes an exception, and with it the collector may run code of the user's.
        let list = held.list.as_ref()?.bind(py);
        let item = if held.at < list.len() { list.get_item(held.at).ok() } else { None };
        let spent = match item {
            Some(_) => None,
            None => held.list.take(),
        };
        held.at += 1;
        drop(held);
        drop(spent);
        item
    }
}
