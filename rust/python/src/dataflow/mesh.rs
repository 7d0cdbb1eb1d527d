//! Seats for the workers of one process: alone, or connected with the other processes of a run.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use penstock_cluster::ClusterError;
use penstock_cluster::session::{MeshError, MeshPlan, MeshPort, Stream, join_mesh};
use penstock_dataflow::Error;
use penstock_dataflow::fabric::{self, Duplex, FabricTag, Limits};
use penstock_plan::hash_bytes;
use pyo3::prelude::*;

use super::worker::DataflowSeats;
use crate::aside;
use crate::enter::{locked, timeout};
use crate::errors::{self, Kind};
use crate::fork::Owner;
use crate::registry;

/// More threads than this in one process are a mistake.
const MAX_THREADS: usize = 1024;

fn checked(threads: usize) -> PyResult<usize> {
    match threads {
        1..=MAX_THREADS => Ok(threads),
        _ => {
            Err(errors::raise(Kind::Config, &format!("workers must be 1 to {MAX_THREADS} per process, got {threads}")))
        }
    }
}

/// Seats for `threads` workers of this process, without others. With `joinable`, more may join while they run.
#[pyfunction]
#[pyo3(signature = (threads, joinable=false))]
pub(crate) fn dataflow_alone(threads: usize, joinable: bool) -> PyResult<DataflowSeats> {
    let threads = checked(threads)?;
    if joinable {
        let (endpoints, door) = fabric::joinable(threads);
        return Ok(DataflowSeats::joinable(0, 1, endpoints, door, None));
    }
    Ok(DataflowSeats::new(0, 1, fabric::threads(threads), None))
}

fn tag(group: &str) -> FabricTag {
    FabricTag { query: hash_bytes(group.as_bytes()), generation: 0 }
}

fn refused(error: &Error) -> PyErr {
    errors::raise(Kind::Dataflow, &error.to_string())
}

/// Connects a process that joins the run `group` with those whose doors (`DataflowListener.welcome`) are given by process: seats without workers,
/// to which `admit` lets some come. Those that listen no more have left.
#[pyfunction]
#[pyo3(signature = (process, doors, key, group, timeout))]
pub(crate) fn dataflow_join(
    py: Python<'_>,
    process: usize,
    doors: Vec<(usize, String)>,
    key: &[u8],
    group: String,
    timeout: Option<f64>,
) -> PyResult<Option<DataflowSeats>> {
    let patience = self::timeout(timeout)?.unwrap_or(Duration::from_secs(u64::from(u32::MAX)));
    let (keys, tag, processes) = (registry::keys(key)?, tag(&group), process + 1);
    let cancelled = Arc::new(AtomicBool::new(false));
    let seen = cancelled.clone();
    let connected = aside::once(py, "join", move || join_mesh(&group, process, &doors, &keys, patience, &seen));
    if connected.is_err() {
        cancelled.store(true, Ordering::Release);
    }
    let streams = connected?.map_err(|error| raise(&error))?;
    if streams.is_empty() {
        return Ok(None);
    }
    let streams = streams.into_iter().map(|(to, stream)| (to, Box::new(stream) as Box<dyn Duplex>)).collect();
    let (door, guard) =
        fabric::join_processes(process, streams, tag, Limits::default()).map_err(|error| refused(&error))?;
    Ok(Some(DataflowSeats::joinable(process, processes, Vec::new(), door, Some(guard))))
}

/// A listener for one run of several processes.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct DataflowListener {
    owner: Owner,
    address: String,
    port: Mutex<Option<MeshPort>>,
}

impl DataflowListener {
    fn take(&self, py: Python<'_>) -> Option<MeshPort> {
        locked(py, &self.port, Option::take)
    }
}

#[pymethods]
impl DataflowListener {
    #[new]
    fn new(host: &str, port: u16) -> PyResult<Self> {
        let port = MeshPort::bind(host, port).map_err(|error| errors::from_cluster(&error))?;
        let address = port.address().to_string();
        Ok(DataflowListener { owner: Owner::here(), address, port: Mutex::new(Some(port)) })
    }

    /// Where it listens, as ``host:port``.
    #[getter]
    fn address(&self) -> &str {
        &self.address
    }

    /// Connects the process with all others and proves the key both ways; uses the listener up.
    #[pyo3(signature = (process, addresses, key, threads, group, timeout, joinable=false))]
    #[allow(clippy::too_many_arguments)]
    fn connect(
        &self,
        py: Python<'_>,
        process: usize,
        addresses: Vec<String>,
        key: &[u8],
        threads: usize,
        group: String,
        timeout: Option<f64>,
        joinable: bool,
    ) -> PyResult<DataflowSeats> {
        self.owner.check(py, "Listener")?;
        let threads = checked(threads)?;
        let patience = self::timeout(timeout)?.unwrap_or(Duration::from_secs(u64::from(u32::MAX)));
        let keys = registry::keys(key)?;
        let port = self.take(py).ok_or_else(|| errors::raise(Kind::Closed, "this listener was used or closed"))?;
        let processes = addresses.len();
        let tag = tag(&group);
        let plan = MeshPlan { group, process, threads, addresses };
        let cancelled = Arc::new(AtomicBool::new(false));
        let seen = cancelled.clone();
        let connected = aside::once(py, "mesh", move || port.connect(&plan, &keys, patience, &seen));
        if connected.is_err() {
            // Ctrl-C: the thread that connects is not waited for, it ends at its next look.
            cancelled.store(true, Ordering::Release);
        }
        let mesh = connected?.map_err(|error| raise(&error))?;
        let streams: Vec<Option<Box<dyn Duplex>>> =
            mesh.into_iter().map(|stream| stream.map(|stream| Box::new(stream) as Box<dyn Duplex>)).collect();
        if joinable {
            let made = fabric::joinable_processes(process, threads, streams, tag);
            let (endpoints, door, guard) = made.map_err(|error| refused(&error))?;
            return Ok(DataflowSeats::joinable(process, processes, endpoints, door, Some(guard)));
        }
        let made = fabric::processes(process, threads, streams, tag);
        let (endpoints, guard) = made.map_err(|error| refused(&error))?;
        Ok(DataflowSeats::new(process, processes, endpoints, Some(guard)))
    }

    /// Takes in processes that join the run of these seats (`dataflow_join`) until those are closed; uses the listener up.
    fn welcome(&self, py: Python<'_>, seats: &DataflowSeats, key: &[u8], group: &str) -> PyResult<()> {
        self.owner.check(py, "Listener")?;
        let keys = registry::keys(key)?;
        let door = seats.door().cloned().ok_or_else(|| {
            errors::raise(Kind::Value, "nobody can join these seats: they were made for fixed workers")
        })?;
        let port = self.take(py).ok_or_else(|| errors::raise(Kind::Closed, "this listener was used or closed"))?;
        // What is refused has a number that was used: its stream ends, and the run goes on.
        let joins = move |process: usize, stream: Stream| drop(door.link(process, Box::new(stream)));
        let kept = port.welcome(group, seats.process(), &keys, joins).map_err(|error| errors::from_cluster(&error))?;
        seats.keep(kept);
        Ok(())
    }

    /// Stops listening. Again: nothing.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.owner.check(py, "Listener")?;
        drop(self.take(py));
        Ok(())
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(errors::no_pickle("DataflowListener", "tell the others its address"))
    }
}

fn raise(error: &MeshError) -> PyErr {
    let lost = |process: usize| {
        Python::attach(|py| {
            errors::raise_with(py, Kind::WorkerLost, &error.to_string(), |facts| facts.set_item("process", process))
        })
    };
    match error {
        MeshError::Peer { source, .. } if source.is_authentication() => {
            errors::raise(Kind::Authentication, &error.to_string())
        }
        MeshError::Peer { source, .. } if matches!(**source, ClusterError::Refused(_)) => {
            errors::raise(Kind::Protocol, &error.to_string())
        }
        MeshError::Peer { process, .. } | MeshError::Absent { process, .. } => lost(*process),
        MeshError::Shape { .. } => errors::raise(Kind::Config, &error.to_string()),
        MeshError::Port(cause) => errors::from_cluster(cause),
        _ => errors::raise(Kind::Dataflow, &error.to_string()),
    }
}
