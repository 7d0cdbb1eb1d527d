//! Rust errors become Python exceptions here and nowhere else.
//!
//! The classes live in Python (`penstock.errors`) so that they pickle and subclass builtins; this module imports
//! them once and instantiates them with their facts as keyword arguments.

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyDict;

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
    /// penstock.errors.ForkError
    Fork,
}

impl Kind {
    fn class(self) -> Option<&'static str> {
        match self {
            Kind::Type | Kind::Value => None,
            Kind::Schema => Some("SchemaError"),
            Kind::Engine => Some("EngineError"),
            Kind::Fork => Some("ForkError"),
        }
    }
}

fn module(py: Python<'_>) -> PyResult<&Bound<'_, PyAny>> {
    static MODULE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    MODULE
        .get_or_try_init(py, || Ok(py.import("penstock.errors")?.into_any().unbind()))
        .map(|module| module.bind(py))
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

/// The error of `__reduce__` on a handle: what it is and what to do instead.
pub(crate) fn no_pickle(class: &str, instead: &str) -> PyErr {
    PyTypeError::new_err(format!("penstock._native.{class} is a handle and cannot be pickled: {instead}"))
}

/// Qualified type name of `object`, for messages.
pub(crate) fn type_name(object: &Bound<'_, PyAny>) -> String {
    object.get_type().fully_qualified_name().map_or_else(|_| "an object".to_owned(), |name| name.to_string())
}
