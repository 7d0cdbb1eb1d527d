//! Workers of this process in a flow that another process feeds: [`FlowCrew`].

use std::sync::{Arc, Mutex};

use crossbeam::channel::{Receiver, RecvTimeoutError, unbounded};
use penstock_dataflow::{JoinError, Ticket};
use penstock_plan::host::{Crew, CrewEvent, GroupConfig};
use pyo3::prelude::*;

use crate::calls::PyCalls;
use crate::dataflow::DataflowSeats;
use crate::enter::{enter, locked, timeout};
use crate::errors::{self, Kind, Problem};
use crate::fork::Owner;
use crate::local::told_as_json;
use crate::plan;

/// Workers of this process that join the run of a flow, compute, and leave.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct FlowCrew {
    owner: Owner,
    crew: Mutex<Option<Crew>>,
    events: Receiver<CrewEvent>,
}

#[pymethods]
impl FlowCrew {
    /// Asks for `workers` places at the door of the seats, and starts their threads when they are there. The plan, its functions and `bits` are
    /// those of the run.
    #[new]
    fn new(
        py: Python<'_>,
        plan: &str,
        calls: &Bound<'_, PyAny>,
        seats: &DataflowSeats,
        workers: usize,
        bits: u8,
    ) -> PyResult<Self> {
        let door = seats.door().cloned().ok_or_else(|| errors::raise(Kind::Value, "nobody can join these seats"))?;
        let plan = Arc::new(plan::compile(plan)?);
        let mut config = GroupConfig::founding(plan, PyCalls::new(calls)?, bits, 1);
        config.gather = true;
        let given = py.detach(|| door.ask(workers).and_then(Ticket::seats));
        let given = given.map_err(|error: JoinError| errors::raise(Kind::Engine, &error.to_string()))?;
        let (sender, events) = unbounded();
        let crew = py.detach(|| Crew::start(config, given, &sender)).map_err(|error| Problem::Host(Box::new(error)))?;
        Ok(Self { owner: Owner::here(), crew: Mutex::new(Some(crew)), events })
    }

    /// What a worker tells next: ``("joined" | "left", worker)``; None when `timeout` (seconds) is over.
    #[pyo3(signature = (timeout=None))]
    fn take(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<(&'static str, usize)>> {
        self.owner.check(py, "FlowCrew")?;
        let limit = self::timeout(timeout)?;
        enter(py, limit, |wait| match self.events.recv_timeout(wait) {
            Ok(CrewEvent::Joined { worker }) => Ok(Some(("joined", worker))),
            Ok(CrewEvent::Left { worker }) => Ok(Some(("left", worker))),
            Ok(CrewEvent::Failed { error, .. }) => Err(Problem::Host(Box::new(error))),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(Problem::Ended("FlowCrew")),
        })
    }

    /// Asks the workers to leave the run; their bins have moved away.
    fn leave(&self, py: Python<'_>) -> PyResult<()> {
        self.owner.check(py, "FlowCrew")?;
        locked(py, &self.crew, |crew| crew.iter().for_each(Crew::leave));
        Ok(())
    }

    /// What `LocalRun.stats` tells, of these workers. One that does not come to it within `patience` (seconds) tells what it told last.
    fn stats(&self, py: Python<'_>, patience: f64) -> PyResult<String> {
        self.owner.check(py, "FlowCrew")?;
        let patience = self::timeout(Some(patience))?.unwrap_or_default();
        let told = locked(py, &self.crew, |crew| {
            let crew = crew.as_ref()?;
            Some((crew.stats(patience), crew.loads()))
        });
        let (stats, loads) = told.ok_or(Problem::Closed("FlowCrew"))?;
        told_as_json(&stats, &[], &loads)
    }

    /// Asks the workers to end, without waiting for them. Harmless when done twice.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.owner.check(py, "FlowCrew")?;
        let crew = locked(py, &self.crew, Option::take);
        py.detach(|| drop(crew));
        Ok(())
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(errors::no_pickle("FlowCrew", "each process of a run starts its own"))
    }
}
