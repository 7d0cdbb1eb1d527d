//! Probes as Python handles.

use penstock_progress::ProbeHandle;
use pyo3::prelude::*;

use super::home::{Address, Key};
use super::time::{Level, Nest, Pair, each, from_python, to_python};
use crate::errors;

pub(crate) struct ProbeState {
    pub(crate) probe: Level<ProbeHandle<u64>, ProbeHandle<Pair>, ProbeHandle<Nest<true>>, ProbeHandle<Nest<false>>>,
    pub(crate) depth: usize,
}

/// A view of a stream's frontier, over all workers.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct DataflowProbe {
    key: Key<ProbeState>,
}

impl DataflowProbe {
    pub(crate) fn new(address: &Address, state: ProbeState) -> Self {
        DataflowProbe { key: address.keep("Probe", state) }
    }
}

#[pymethods]
impl DataflowProbe {
    /// Whether a time before this one may still come.
    fn less_than(&self, py: Python<'_>, time: &Bound<'_, PyAny>) -> PyResult<bool> {
        let state = self.key.get(py)?;
        each!(&state.probe, probe => Ok(probe.less_than(&from_python(time, state.depth)?)))
    }

    /// Whether this time may still come.
    fn less_equal(&self, py: Python<'_>, time: &Bound<'_, PyAny>) -> PyResult<bool> {
        let state = self.key.get(py)?;
        each!(&state.probe, probe => Ok(probe.less_equal(&from_python(time, state.depth)?)))
    }

    /// Whether nothing more comes.
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(each!(&self.key.get(py)?.probe, probe => probe.done()))
    }

    /// The least times that may still come.
    fn frontier<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let state = self.key.get(py)?;
        each!(&state.probe, probe => {
            probe.with_frontier(|times| times.iter().map(|time| to_python(py, time, state.depth)).collect())
        })
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(errors::no_pickle("DataflowProbe", "ask it where it is and send the answer"))
    }
}
