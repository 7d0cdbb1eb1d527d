//! What a stream carries: a list of Python objects, or an Arrow record batch.
//!
//! Between threads a block goes by reference: the list, or the buffers. Between processes a list is pickled (protocol 5), a
//! batch is one Arrow IPC stream; both are made by the sender's exchange and taken apart by the receiver's, where an object that
//! does not pickle has a name and a step. Only processes that proved the secret of the run get that far.
//!
//! A list that comes from the program is copied (its references, not its objects), so the program may go on using its own.

use std::fmt;
use std::sync::Arc;

use arrow_array::RecordBatch as Batch;
use arrow_ipc::writer::StreamWriter;
use penstock_dataflow::{BoxError, Wire, WireError};
use penstock_plan::read_batch;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyList, PyTuple};

use crate::arrow::{RecordBatch, batch_of};
use crate::ending;
use crate::errors::{self, Kind};

/// See the module. Clones share the data.
#[derive(Clone)]
pub(crate) enum Block {
    /// Objects, never none.
    Items(Arc<Py<PyList>>),
    /// Rows, never none.
    Rows(Batch),
    /// A block on its way between processes.
    Packed(Arc<Packed>),
}

/// The form of a block between processes.
pub(crate) struct Packed {
    kind: u8,
    bytes: Vec<u8>,
}

static DUMPS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

const ITEMS: u8 = 0;
const ROWS: u8 = 1;

fn call<'py>(
    py: Python<'py>,
    cell: &'static PyOnceLock<Py<PyAny>>,
    module: &str,
    name: &str,
) -> PyResult<&'py Bound<'py, PyAny>> {
    cell.get_or_try_init(py, || Ok(py.import(module)?.getattr(name)?.unbind())).map(|function| function.bind(py))
}

impl Block {
    /// The block that a Python object is; `None` when it is empty.
    ///
    /// # Errors
    /// `BlockError` when it is neither a list nor Arrow data.
    pub(crate) fn from_python(object: &Bound<'_, PyAny>) -> PyResult<Option<Self>> {
        let py = object.py();
        if let Ok(list) = object.cast::<PyList>() {
            return Ok((!list.is_empty()).then(|| Block::of_list(list.get_slice(0, list.len()))));
        }
        if let Ok(tuple) = object.cast::<PyTuple>() {
            return Ok((!tuple.is_empty()).then(|| Block::of_list(tuple.to_list())));
        }
        if object.hasattr(pyo3::intern!(py, "__arrow_c_array__"))?
            || object.hasattr(pyo3::intern!(py, "__arrow_c_stream__"))?
        {
            let batch = batch_of(object)?.map_err(|what| {
                let message = format!("a block is a list of objects or a pyarrow.RecordBatch: {what}");
                errors::raise(Kind::Block, &message)
            })?;
            return Ok((batch.num_rows() > 0).then_some(Block::Rows(batch)));
        }
        let message =
            format!("a block is a list of objects or a pyarrow.RecordBatch, got {}", errors::type_name(object));
        Err(errors::raise(Kind::Block, &message))
    }

    /// The block of a list that nobody else changes.
    pub(crate) fn of_list(list: Bound<'_, PyList>) -> Self {
        Block::Items(Arc::new(list.unbind()))
    }

    /// What Python sees: the list, or a pyarrow batch that shares the buffers.
    pub(crate) fn to_python<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        static BATCH: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        match self {
            Block::Items(items) => Ok(items.bind(py).as_any().clone()),
            Block::Rows(batch) => {
                call(py, &BATCH, "pyarrow", "record_batch")?.call1((RecordBatch::new(batch.clone()),))
            }
            Block::Packed(packed) => packed.open(py)?.to_python(py),
        }
    }

    /// The same rows in memory of their own; objects are shared. Cost: one copy.
    pub(crate) fn owned(self) -> Self {
        match self {
            Block::Rows(batch) => Block::Rows(penstock_plan::owned(&batch)),
            other => other,
        }
    }

    /// The block in the form that leaves the process.
    ///
    /// # Errors
    /// What pickling raises.
    pub(crate) fn pack(&self, py: Python<'_>) -> PyResult<Self> {
        let packed = match self {
            Block::Items(items) => {
                let bytes = call(py, &DUMPS, "pickle", "dumps")?.call1((items.bind(py), 5))?;
                Packed { kind: ITEMS, bytes: bytes.cast::<PyBytes>()?.as_bytes().to_vec() }
            }
            Block::Rows(batch) => {
                let write = || {
                    let mut bytes = Vec::new();
                    let mut writer = StreamWriter::try_new(&mut bytes, batch.schema_ref())?;
                    writer.write(batch)?;
                    writer.finish()?;
                    drop(writer);
                    Ok(bytes)
                };
                let bytes = py.detach(write).map_err(|error| errors::arrow(&error))?;
                Packed { kind: ROWS, bytes }
            }
            Block::Packed(packed) => return Ok(Block::Packed(packed.clone())),
        };
        Ok(Block::Packed(Arc::new(packed)))
    }

    /// The first object that does not pickle by itself, in short.
    pub(crate) fn unpicklable(&self, py: Python<'_>) -> Option<String> {
        static SHORT: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        let Block::Items(items) = self else { return None };
        let dumps = call(py, &DUMPS, "pickle", "dumps").ok()?;
        let item = items.bind(py).iter().find(|item| dumps.call1((item, 5)).is_err())?;
        let short = call(py, &SHORT, "penstock._functions.short", "short").ok()?;
        short.call1((item,)).ok()?.extract().ok()
    }

    /// The block itself, when it came packed.
    pub(crate) fn unpack(self, py: Python<'_>) -> PyResult<Self> {
        match self {
            Block::Packed(packed) => packed.open(py),
            open => Ok(open),
        }
    }
}

impl Packed {
    fn open(&self, py: Python<'_>) -> PyResult<Block> {
        static LOADS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        match self.kind {
            ROWS => {
                let batch = py.detach(|| read_batch(&self.bytes[..])).map_err(|error| errors::arrow(&error))?;
                batch.map(Block::Rows).ok_or_else(|| errors::raise(Kind::Protocol, "a packed batch without rows"))
            }
            _ => {
                let list = call(py, &LOADS, "pickle", "loads")?.call1((PyBytes::new(py, &self.bytes),))?;
                Ok(Block::of_list(list.cast_into::<PyList>()?))
            }
        }
    }
}

/// A block on its way to a worker.
pub(crate) struct Parcel {
    pub(crate) to: usize,
    pub(crate) block: Block,
}

impl Wire for Parcel {
    fn encode(&self, out: &mut Vec<u8>) {
        // An exchange packs what leaves the process; anything else would be a mistake in it, which `decode` reports.
        if let Block::Packed(packed) = &self.block {
            out.push(packed.kind);
            out.extend_from_slice(&packed.bytes);
        }
    }

    fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        match bytes.split_first() {
            Some((&kind @ (ITEMS | ROWS), bytes)) => {
                let packed = Packed { kind, bytes: bytes.to_vec() };
                Ok(Parcel { to: 0, block: Block::Packed(Arc::new(packed)) })
            }
            Some((kind, _)) => Err(WireError(format!("no block of kind {kind}"))),
            None => Err(WireError("an empty block".to_owned())),
        }
    }
}

/// A Python exception on its way through the engine.
pub(crate) struct PyCause {
    exception: Py<PyAny>,
    text: String,
}

impl PyCause {
    pub(crate) fn new(py: Python<'_>, error: PyErr) -> Self {
        let text = error.to_string();
        PyCause { exception: error.into_value(py).into_any(), text }
    }

    /// The exception itself.
    pub(crate) fn exception<'py>(&self, py: Python<'py>) -> &Bound<'py, PyAny> {
        self.exception.bind(py)
    }
}

impl fmt::Debug for PyCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PyCause").field(&self.text).finish()
    }
}

impl fmt::Display for PyCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for PyCause {}

/// Runs `work` attached to the interpreter; what it raises becomes the error of the operator.
pub(crate) fn attached<R>(work: impl FnOnce(Python<'_>) -> PyResult<R>) -> Result<R, BoxError> {
    let outcome = ending::attach(|py| work(py).map_err(|error| BoxError::from(PyCause::new(py, error))));
    outcome.unwrap_or_else(|| Err("Python is shutting down".into()))
}
