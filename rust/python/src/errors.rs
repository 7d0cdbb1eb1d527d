//! Rust errors become Python exceptions here and nowhere else. (Failures that travel as JSON are read by
//! `penstock.errors.from_failure`, which this module also uses.)
//!
//! The classes live in Python (`penstock.errors`) so that they pickle and subclass builtins; this module imports
//! them once and instantiates them with their facts as keyword arguments.

use std::sync::Arc;

use penstock_cluster::{ClusterError, Failure};
use penstock_graph::GraphError;
use penstock_plan::host::HostError;
use penstock_plan::{CallError, OpError, PlanError};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyDict};

/// Which Python class an error becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// builtins.TypeError: an argument of the wrong Python type.
    Type,
    /// builtins.ValueError: an argument out of range.
    Value,
    /// penstock.errors.SchemaError
    Schema,
    /// penstock.errors.EngineError
    Engine,
    /// penstock.errors.PlanError
    Plan,
    /// penstock.errors.ConfigError
    Config,
    /// penstock.errors.KeyNullError
    KeyNull,
    /// penstock.errors.StateError
    State,
    /// penstock.errors.StateLost
    StateLost,
    /// penstock.errors.AuthenticationError
    Authentication,
    /// penstock.errors.ProtocolError
    Protocol,
    /// penstock.errors.ForkError
    Fork,
    /// penstock.errors.UserFunctionError
    UserFunction,
    /// penstock.errors.DataflowError
    Dataflow,
    /// penstock.errors.GraphError
    Graph,
    /// penstock.errors.PatternError
    Pattern,
    /// penstock.errors.StorageError
    Storage,
    /// penstock.errors.TimeError
    Time,
    /// penstock.errors.CapabilityError
    Capability,
    /// penstock.errors.BlockError
    Block,
    /// penstock.errors.ClosedError
    Closed,
    /// penstock.errors.ThreadError
    Thread,
    /// penstock.errors.WorkerStopped
    WorkerStopped,
    /// penstock.errors.WorkerLost
    WorkerLost,
    /// penstock.errors.CoordinationTimeout
    CoordinationTimeout,
}

impl Kind {
    fn class(self) -> Option<&'static str> {
        match self {
            Kind::Type | Kind::Value => None,
            Kind::Schema => Some("SchemaError"),
            Kind::Engine => Some("EngineError"),
            Kind::Plan => Some("PlanError"),
            Kind::Config => Some("ConfigError"),
            Kind::KeyNull => Some("KeyNullError"),
            Kind::State => Some("StateError"),
            Kind::StateLost => Some("StateLost"),
            Kind::Authentication => Some("AuthenticationError"),
            Kind::Protocol => Some("ProtocolError"),
            Kind::Fork => Some("ForkError"),
            Kind::UserFunction => Some("UserFunctionError"),
            Kind::Dataflow => Some("DataflowError"),
            Kind::Graph => Some("GraphError"),
            Kind::Pattern => Some("PatternError"),
            Kind::Storage => Some("StorageError"),
            Kind::Time => Some("TimeError"),
            Kind::Capability => Some("CapabilityError"),
            Kind::Block => Some("BlockError"),
            Kind::Closed => Some("ClosedError"),
            Kind::Thread => Some("ThreadError"),
            Kind::WorkerStopped => Some("WorkerStopped"),
            Kind::WorkerLost => Some("WorkerLost"),
            Kind::CoordinationTimeout => Some("CoordinationTimeout"),
        }
    }
}

fn module(py: Python<'_>) -> PyResult<&Bound<'_, PyAny>> {
    static MODULE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    MODULE.get_or_try_init(py, || Ok(py.import("penstock.errors")?.into_any().unbind())).map(|module| module.bind(py))
}

/// An exception of `kind` that says `message`.
pub(crate) fn raise(kind: Kind, message: &str) -> PyErr {
    Python::attach(|py| raise_with(py, kind, message, |_| Ok(())))
}

/// An exception of `kind` that says `message` and carries the facts that `fill` puts into its keyword arguments.
pub(crate) fn raise_with(
    py: Python<'_>,
    kind: Kind,
    message: &str,
    fill: impl FnOnce(&Bound<'_, PyDict>) -> PyResult<()>,
) -> PyErr {
    let Some(class) = kind.class() else {
        return match kind {
            Kind::Type => PyTypeError::new_err(message.to_owned()),
            _ => PyValueError::new_err(message.to_owned()),
        };
    };
    let build = || {
        let facts = PyDict::new(py);
        fill(&facts)?;
        module(py)?.getattr(class)?.call((message,), Some(&facts))
    };
    match build() {
        Ok(exception) => PyErr::from_value(exception),
        Err(error) => error,
    }
}

/// An error that is made once nothing is borrowed any more: to make one runs Python code, which may be anybody's.
pub(crate) struct Later(Box<dyn FnOnce(Python<'_>) -> PyErr>);

impl Later {
    pub(crate) fn new(make: impl FnOnce(Python<'_>) -> PyErr + 'static) -> Later {
        Later(Box::new(make))
    }

    pub(crate) fn raise(self, py: Python<'_>) -> PyErr {
        (self.0)(py)
    }
}

/// As [`raise`], once nothing is borrowed any more.
pub(crate) fn later(kind: Kind, message: String) -> Later {
    Later::new(move |py| raise_with(py, kind, &message, |_| Ok(())))
}

/// Arrow refused an operation on the user's data.
pub(crate) fn arrow(error: &arrow_schema::ArrowError) -> PyErr {
    raise(Kind::Schema, &format!("this Arrow data cannot be used: {error}"))
}

/// A Python exception raised inside a user's step, for the way through the engine.
pub(crate) fn call_error(py: Python<'_>, step: &str, error: PyErr) -> CallError {
    let exception = error.value(py);
    let fact = |name: &str| exception.getattr(name).ok();
    let message = match error.is_instance_of::<pyo3::exceptions::PyException>(py) {
        true => exception.str().map(|text| text.to_string()).unwrap_or_default(),
        false => format!("{} in {step}", type_name(exception)),
    };
    CallError {
        step: step.to_owned(),
        file: fact("file").and_then(|file| file.extract().ok()).unwrap_or_default(),
        line: fact("line").and_then(|line| line.extract().ok()).unwrap_or_default(),
        row: None,
        message,
        origin: Some(Arc::new(error.into_value(py).into_any())),
        broken_off: false,
    }
}

/// The exception of a failed user step: the one that Python raised, else one made of the facts.
pub(crate) fn from_call(error: &CallError) -> PyErr {
    Python::attach(|py| {
        if let Some(exception) = error.origin.as_ref().and_then(|origin| origin.downcast_ref::<Py<PyAny>>()) {
            return PyErr::from_value(exception.bind(py).clone());
        }
        raise_with(py, Kind::UserFunction, &error.to_string(), |facts| {
            facts.set_item("step", &error.step)?;
            facts.set_item("file", &error.file)?;
            facts.set_item("line", error.line)?;
            facts.set_item("row", error.row)
        })
    })
}

/// A plan that does not compile: a wrong column or type is a SchemaError, anything else a PlanError.
pub(crate) fn from_plan(error: &PlanError) -> PyErr {
    let kind = match error {
        PlanError::MissingColumn { .. }
        | PlanError::ColumnType { .. }
        | PlanError::LoopColumns { .. }
        | PlanError::UnionColumns { .. }
        | PlanError::JoinTypes { .. } => Kind::Schema,
        PlanError::Bounds { .. } | PlanError::SideOutput { .. } => Kind::Config,
        _ => Kind::Plan,
    };
    raise(kind, &error.to_string())
}

/// Data that a plan refuses while it runs.
pub(crate) fn from_op(error: &OpError) -> PyErr {
    let kind = match error {
        OpError::Call(call) => return from_call(call),
        OpError::NullKey { column, row, .. } => {
            return Python::attach(|py| {
                raise_with(py, Kind::KeyNull, &error.to_string(), |facts| {
                    facts.set_item("column", column)?;
                    facts.set_item("row", row)
                })
            });
        }
        OpError::Overflow { .. }
        | OpError::TooManyDistinct { .. }
        | OpError::NoWindow { .. }
        | OpError::EventTime { .. }
        | OpError::Twice { .. }
        | OpError::Schema { .. }
        | OpError::Arrow(_) => Kind::Schema,
        OpError::StateKind { .. } => Kind::State,
        OpError::Hashes { .. } | OpError::Side { .. } | OpError::BinMissing { .. } => Kind::Engine,
    };
    raise(kind, &error.to_string())
}

/// Why a group of workers does not start or go on.
pub(crate) fn from_host(error: &HostError) -> PyErr {
    match error {
        HostError::Call(call) => from_call(call),
        HostError::Data(data) => match data.downcast_ref::<OpError>() {
            Some(op) => from_op(op),
            None => raise(Kind::Schema, &data.to_string()),
        },
        HostError::Bins(bins) => raise(Kind::State, &bins.to_string()),
        HostError::Dataflow(dataflow) => raise(Kind::Engine, &dataflow.to_string()),
        HostError::MissingBins { .. } => raise(Kind::StateLost, &error.to_string()),
        HostError::Owners { .. } => raise(Kind::Config, &error.to_string()),
        HostError::EpochTooLarge { .. } | HostError::Finished | HostError::Thread { .. } => {
            raise(Kind::Engine, &error.to_string())
        }
    }
}

/// Why a graph, a pattern or an index is refused.
pub(crate) fn from_graph(error: &GraphError) -> PyErr {
    let message = error.to_string();
    Python::attach(|py| match error {
        GraphError::Pattern(pattern) => {
            raise_with(py, Kind::Pattern, &message, |facts| facts.set_item("place", pattern.place()))
        }
        GraphError::Line { place, line, .. } => raise_with(py, Kind::Schema, &message, |facts| {
            facts.set_item("file", place)?;
            facts.set_item("line", line)
        }),
        GraphError::Order { .. } | GraphError::Argument { .. } => raise(Kind::Config, &message),
        GraphError::File { path, .. } | GraphError::Io { path, .. } => {
            raise_with(py, Kind::Storage, &message, |facts| facts.set_item("paths", vec![path.display().to_string()]))
        }
        GraphError::SelfLoop { .. }
        | GraphError::Repeated { .. }
        | GraphError::Edges { .. }
        | GraphError::TooMany { .. } => raise(Kind::Schema, &message),
        GraphError::Over => raise(Kind::State, &message),
        GraphError::Thread(_) => raise(Kind::Engine, &message),
    })
}

/// What went wrong between driver and member.
pub(crate) fn from_cluster(error: &ClusterError) -> PyErr {
    let kind = match error {
        ClusterError::Refused(failure) => return from_failure(failure),
        ClusterError::Address { .. }
        | ClusterError::NothingToAdvertise { .. }
        | ClusterError::WeakSecret
        | ClusterError::BadKey { .. } => Kind::Config,
        ClusterError::Arrow(_) => Kind::Schema,
        ClusterError::UnknownMember { .. } => Kind::Engine,
        _ if error.is_authentication() => Kind::Authentication,
        _ => Kind::Protocol,
    };
    raise(kind, &error.to_string())
}

/// A request that the other side refused: what `penstock.errors.from_failure` makes of it.
fn from_failure(failure: &Failure) -> PyErr {
    let build = |py: Python<'_>| -> PyResult<PyErr> {
        let body = failure.to_body().to_string();
        let body = py.import("json")?.call_method1("loads", (body,))?.get_item("error")?;
        let made = module(py)?.call_method1("from_failure", (body, PyBytes::new(py, &failure.attachment)))?;
        Ok(PyErr::from_value(made))
    };
    Python::attach(|py| build(py).unwrap_or_else(|error| error))
}

/// Why a call on a handle failed, as it leaves the detached part of the call.
#[derive(Debug)]
pub(crate) enum Problem {
    /// The workers say so.
    Host(Box<HostError>),
    /// The handle (named) was closed.
    Closed(&'static str),
    /// The handle failed before and cannot be used again.
    Spent(&'static str),
    /// A panic happened while the handle was in use.
    Poisoned(&'static str),
    /// The workers have ended without saying why.
    Ended(&'static str),
    /// A number that the handle never gave out.
    Unknown {
        /// Number of what.
        what: &'static str,
        /// The number.
        handle: u64,
    },
}

impl From<Problem> for PyErr {
    fn from(problem: Problem) -> PyErr {
        let message = match problem {
            Problem::Host(error) => return from_host(&error),
            Problem::Unknown { what, handle } => {
                return raise(Kind::Value, &format!("there is no {what} {handle}"));
            }
            Problem::Closed(class) => format!("this {class} is closed"),
            Problem::Spent(class) => format!("this {class} failed before and cannot go on: make a new one"),
            Problem::Poisoned(class) => format!("this {class} is broken by an earlier panic: make a new one"),
            Problem::Ended(class) => format!("the workers of this {class} have ended"),
        };
        raise(Kind::Engine, &message)
    }
}

/// The error of `__reduce__` on a handle: what it is and what to do instead.
pub(crate) fn no_pickle(class: &str, instead: &str) -> PyErr {
    PyTypeError::new_err(format!("penstock._native.{class} is a handle and cannot be pickled: {instead}"))
}

/// Qualified type name of `object`, for messages.
pub(crate) fn type_name(object: &Bound<'_, PyAny>) -> String {
    object.get_type().fully_qualified_name().map_or_else(|_| "an object".to_owned(), |name| name.to_string())
}
