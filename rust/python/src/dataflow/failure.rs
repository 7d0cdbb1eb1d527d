//! Why a worker stopped, as a Python exception.
//!
//! The worker on which an operator's logic raised gets that exception itself; every other worker of the run a `WorkerStopped`
//! that names the first cause, with the exception as its cause where it happened in this process.

use penstock_dataflow::{Error, LoopEnd, MemberFault};
use pyo3::exceptions::PyException;
use pyo3::prelude::*;

use super::block::PyCause;
use crate::errors::{self, Kind};

/// The exception of `error` for worker `me`.
pub(crate) fn raise(py: Python<'_>, error: &Error, me: usize) -> PyErr {
    let message = error.to_string();
    match error {
        Error::Operator { worker, source, .. } if *worker == me && source.is::<LoopEnd>() => {
            errors::raise(Kind::Time, &message)
        }
        Error::Operator { worker, source, .. } | Error::Program { worker, source } => {
            let cause = source.downcast_ref::<PyCause>().map(|cause| PyErr::from_value(cause.exception(py).clone()));
            match cause {
                Some(cause) if *worker == me && matches!(error, Error::Operator { .. }) => cause,
                cause => {
                    let made = stopped(py, *worker, &message);
                    made.set_cause(py, cause);
                    made
                }
            }
        }
        Error::Aborted { worker, .. } => stopped(py, *worker, &message),
        Error::Panic { worker, .. } if *worker != me => stopped(py, *worker, &message),
        Error::PeerLost { process, .. } => {
            errors::raise_with(py, Kind::WorkerLost, &message, |facts| facts.set_item("process", process))
        }
        Error::GraphMismatch { worker, peer, .. } => errors::raise_with(py, Kind::Graph, &message, |facts| {
            facts.set_item("worker", worker)?;
            facts.set_item("peer", peer)
        }),
        Error::Graph { dataflow, worker, .. } => errors::raise_with(py, Kind::Graph, &message, |facts| {
            facts.set_item("dataflow", dataflow)?;
            facts.set_item("worker", worker)
        }),
        Error::Member { fault: MemberFault::Over, .. } => errors::raise(Kind::Closed, &message),
        // In words of Python: fabrics are made by Rust programs.
        Error::Member { worker, fault: MemberFault::Fixed } => errors::raise(
            Kind::Dataflow,
            &format!(
                "worker {worker}: the workers of this run are fixed; call execute(..., join=1), or more, where some leave"
            ),
        ),
        Error::Protocol { .. } => errors::raise(Kind::Protocol, &message),
        Error::WrongCapability { .. } => errors::raise(Kind::Capability, &message),
        Error::TooLarge { .. } => errors::raise(Kind::Block, &message),
        _ => errors::raise(Kind::Dataflow, &message),
    }
}

/// What the user is told where a value of their function was refused: what `refused(error)` makes of it. Interrupts stay what they are.
pub(crate) fn refusal(py: Python<'_>, refused: &Py<PyAny>, error: PyErr) -> PyErr {
    if !error.is_instance_of::<PyException>(py) {
        return error;
    }
    match refused.bind(py).call1((error.into_value(py),)) {
        Ok(error) => PyErr::from_value(error),
        Err(error) => error,
    }
}

fn stopped(py: Python<'_>, worker: usize, message: &str) -> PyErr {
    errors::raise_with(py, Kind::WorkerStopped, &format!("stopped: {message}"), |facts| {
        facts.set_item("worker", worker)
    })
}
