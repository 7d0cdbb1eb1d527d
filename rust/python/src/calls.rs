//! The user's Python functions, behind the plan's `Callbacks`.
//!
//! Worker threads attach to the interpreter once per call, that is once per block (`map`) or per block and bin
//! (`apply`). What a function may take and return, and what its exception becomes, is decided in Python
//! (`penstock._calls`, `penstock._state`); this module converts data and carries the exception object along in
//! [`CallError::origin`], to be raised unchanged by the call that notices the failure.

use std::sync::Arc;

use arrow_array::RecordBatch as Batch;
use arrow_schema::{Schema, SchemaRef};
use penstock_plan::{CallError, Callbacks, ForeignState, StateFault};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyIterator, PyList};

use crate::arrow::{RecordBatch, import_batch, import_schema};
use crate::convert::{self, Misfit};
use crate::errors::{self, Kind};

/// The functions of one plan, by call number.
pub(crate) struct PyCalls {
    calls: Vec<Arc<Call>>,
}

struct Call {
    /// `MapCall` or `StatefulCall` of `penstock._calls`.
    object: Py<PyAny>,
    step: String,
    schema: Option<SchemaRef>,
    stateful: Option<Stateful>,
}

/// What a stateful call takes from each row.
struct Stateful {
    keys: Vec<String>,
    columns: Vec<String>,
}

impl PyCalls {
    /// Wraps the `calls` of `Flow.to_plan`.
    pub(crate) fn new(calls: &Bound<'_, PyAny>) -> PyResult<Arc<Self>> {
        let bind = calls.py().import("penstock._calls")?.getattr("bind")?;
        let calls = calls
            .try_iter()?
            .map(|entry| {
                let object = bind.call1((entry?.cast_into::<PyDict>()?,))?;
                let schema = object.getattr("schema")?;
                let stateful = object.getattr("kind")?.extract::<String>()? == "stateful";
                Ok(Arc::new(Call {
                    step: object.getattr("step")?.extract()?,
                    schema: if schema.is_none() { None } else { Some(import_schema(&schema)?) },
                    stateful: stateful
                        .then(|| {
                            Ok::<_, PyErr>(Stateful {
                                keys: object.getattr("keys")?.extract()?,
                                columns: object.getattr("columns")?.extract()?,
                            })
                        })
                        .transpose()?,
                    object: object.unbind(),
                }))
            })
            .collect::<PyResult<_>>()?;
        Ok(Arc::new(Self { calls }))
    }

    fn call(&self, call: usize) -> Result<&Arc<Call>, CallError> {
        self.calls.get(call).ok_or_else(|| {
            let known = self.calls.len();
            CallError::new(format!("call {call}"), format!("the plan names call {call}, but only {known} came with it"))
        })
    }
}

impl Callbacks for PyCalls {
    fn map(&self, call: usize, batch: &Batch) -> Result<Batch, CallError> {
        let call = self.call(call)?;
        attached(&call.step, |py| {
            let object = call.object.bind(py);
            let result = object.call1((RecordBatch::new(batch.clone()),))?;
            let made = import_batch(&result)?;
            match &call.schema {
                Some(schema) => declared(&made, schema)
                    .map_err(|reason| refused(object, &format!("what the function returned does not fit: {reason}"))),
                None => Ok(made),
            }
        })
    }

    fn new_state(&self, call: usize) -> Box<dyn ForeignState> {
        let state = match self.call(call) {
            Ok(call) => attached(&call.step, |py| Ok(call.object.bind(py).call_method0("new_state")?.unbind()))
                .map(|state| (call.clone(), state)),
            Err(error) => Err(error),
        };
        Box::new(PyState { state })
    }
}

/// The batch under the declared schema, when its columns are those: names and types, in any order.
pub(crate) fn declared(made: &Batch, schema: &SchemaRef) -> Result<Batch, String> {
    if made.schema_ref() == schema {
        return Ok(made.clone());
    }
    let mut columns = Vec::with_capacity(schema.fields().len());
    for field in schema.fields() {
        match made.column_by_name(field.name()) {
            Some(column) if column.data_type() == field.data_type() => columns.push(column.clone()),
            Some(column) => {
                let (name, found) = (field.name(), column.data_type());
                return Err(format!("column {name:?} has type {found}, declared is {}", field.data_type()));
            }
            None => {
                let there = names(made.schema_ref());
                return Err(format!("column {:?} is missing; there are {there}", field.name()));
            }
        }
    }
    if made.num_columns() != columns.len() {
        let (there, wanted) = (names(made.schema_ref()), names(schema));
        return Err(format!("the columns are {there}, declared are {wanted}"));
    }
    let options = arrow_array::RecordBatchOptions::new().with_row_count(Some(made.num_rows()));
    Batch::try_new_with_options(schema.clone(), columns, &options).map_err(|error| error.to_string())
}

fn names(schema: &Schema) -> String {
    let names: Vec<_> = schema.fields().iter().map(|field| format!("{:?}", field.name())).collect();
    if names.is_empty() { "no columns".to_owned() } else { names.join(", ") }
}

/// The exception of a result that does not fit, made by the call itself so that it names the user's file.
fn refused(call: &Bound<'_, PyAny>, reason: &str) -> PyErr {
    match call.call_method1("refused", (reason,)) {
        Ok(error) => PyErr::from_value(error),
        Err(error) => error,
    }
}

/// Runs `work` attached; a Python exception becomes a `CallError` that carries it.
fn attached<T>(step: &str, work: impl FnOnce(Python<'_>) -> PyResult<T>) -> Result<T, CallError> {
    let outcome = Python::try_attach(|py| work(py).map_err(|error| errors::call_error(py, step, error)));
    outcome.unwrap_or_else(|| Err(CallError::new(step, "Python is shutting down")))
}

/// State of one bin: a `penstock._state.BinState`, or why there is none.
struct PyState {
    state: Result<(Arc<Call>, Py<PyAny>), CallError>,
}

impl PyState {
    /// Runs `work` with the state, reporting an error as one that nobody can be told about.
    fn quietly<T: Default>(&self, work: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<T>) -> T {
        let Ok((_, state)) = &self.state else { return T::default() };
        Python::try_attach(|py| {
            let state = state.bind(py);
            work(state).unwrap_or_else(|error| {
                error.write_unraisable(py, Some(state));
                T::default()
            })
        })
        .unwrap_or_default()
    }
}

impl ForeignState for PyState {
    fn apply(&mut self, rows: &Batch) -> Result<Batch, CallError> {
        let (call, state) = self.state.as_ref().map_err(Clone::clone)?;
        let stateful = call.stateful.as_ref().ok_or_else(|| {
            CallError::new(&call.step, "the plan uses this call as a step with state, but it is a map")
        })?;
        let schema = call.schema.as_ref().ok_or_else(|| CallError::new(&call.step, "the call declares no schema"))?;
        attached(&call.step, |py| {
            let column = |name: &String| {
                let column = rows.column_by_name(name).ok_or_else(|| {
                    errors::raise(Kind::Schema, &format!("{}: the rows have no column {name:?}", call.step))
                })?;
                convert::to_list(py, column)
            };
            let keys = stateful.keys.iter().map(column).collect::<PyResult<Vec<_>>>()?;
            let keys = match <[_; 1]>::try_from(keys) {
                Ok([only]) => only,
                Err(several) => tuples(py, rows.num_rows(), &several)?,
            };
            let columns = PyList::new(py, stateful.columns.iter().map(column).collect::<PyResult<Vec<_>>>()?)?;
            let out = state.bind(py).call_method1(pyo3::intern!(py, "apply"), (keys, columns))?;
            convert::from_rows(out.cast::<PyList>()?, schema).map_err(|misfit| match misfit {
                Misfit::Other(error) => error,
                misfit => refused(call.object.bind(py), &misfit.reason()),
            })
        })
    }

    fn encode(&self, chunk: &mut dyn FnMut(Vec<u8>)) {
        // A state that cannot be pickled yields a chunk that says so, see `BinState.encode`.
        let chunks = self.quietly(|state| {
            let chunks = state.call_method0("encode")?;
            PyIterator::from_object(&chunks)?
                .map(|bytes| Ok(bytes?.cast::<PyBytes>()?.as_bytes().to_vec()))
                .collect::<PyResult<Vec<_>>>()
        });
        chunks.into_iter().for_each(chunk);
    }

    fn absorb(&mut self, chunk: &[u8]) -> Result<(), StateFault> {
        let (call, state) = self.state.as_ref().map_err(|error| StateFault::Foreign { message: error.to_string() })?;
        attached(&call.step, |py| {
            state.bind(py).call_method1("absorb", (PyBytes::new(py, chunk),))?;
            Ok(())
        })
        .map_err(|error| StateFault::Foreign { message: error.message })
    }

    fn bytes(&self) -> usize {
        self.quietly(|state| state.call_method0("bytes")?.extract())
    }

    fn keys(&self) -> usize {
        self.quietly(|state| state.call_method0("keys")?.extract())
    }

    fn mark(&mut self) {
        self.quietly(|state| state.call_method0("mark").map(drop));
    }

    fn rollback(&mut self) {
        self.quietly(|state| state.call_method0("rollback").map(drop));
    }
}

/// Rows of several columns as tuples; of none, as empty ones.
fn tuples<'py>(py: Python<'py>, rows: usize, columns: &[Bound<'py, PyList>]) -> PyResult<Bound<'py, PyList>> {
    let tuples = (0..rows)
        .map(|row| {
            let values = columns.iter().map(|column| column.get_item(row)).collect::<PyResult<Vec<_>>>()?;
            pyo3::types::PyTuple::new(py, values)
        })
        .collect::<PyResult<Vec<_>>>()?;
    PyList::new(py, tuples)
}
