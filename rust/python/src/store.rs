//! The folder of a checkpoint as the native workers use it: `penstock._storage`, which alone knows where files lie.
//!
//! Nothing of ours is waited for with the interpreter: pieces are made by the caller's thread and written by one that Python runs in, which
//! is detached while there is no piece. A file of which not all pieces came is given up.

use std::io;
use std::sync::Arc;
use std::thread;

use crossbeam::channel::{Receiver, bounded, select};
use penstock_cluster::{Failure, Store};
use pyo3::exceptions::{PyFileNotFoundError, PyOSError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::ending;

/// A `penstock._storage.Storage`.
struct PyStore(Py<PyAny>);

/// Opens the folder that a URL or path names.
pub(crate) fn open(checkpoint: &str) -> Result<Arc<dyn Store>, Failure> {
    let open = |py: Python<'_>| -> PyResult<Py<PyAny>> {
        Ok(py.import("penstock._storage")?.call_method1("open_storage", (checkpoint,))?.unbind())
    };
    let opened = ending::attach(|py| {
        open(py).map_err(|error| {
            // A store that cannot be reached may be reached later; what says so is the cause of an error of ours.
            let passing = |one: &PyErr| one.is_instance_of::<PyOSError>(py);
            let kind =
                if passing(&error) || error.cause(py).is_some_and(|cause| passing(&cause)) { "store" } else { "data" };
            Failure::new(kind, format!("the checkpoint cannot be opened: {}", error.value(py)))
        })
    });
    let store = opened.unwrap_or_else(|| Err(Failure::new("stopped", "Python is shutting down")))?;
    Ok(Arc::new(PyStore(store)))
}

/// Runs `work` with the interpreter; an exception becomes an error that keeps whether there is no such file.
fn attached<T>(work: impl FnOnce(Python<'_>) -> PyResult<T>) -> io::Result<T> {
    let done = ending::attach(|py| {
        work(py).map_err(|error| match error.is_instance_of::<PyFileNotFoundError>(py) {
            true => io::Error::new(io::ErrorKind::NotFound, error.to_string()),
            false => io::Error::other(error.to_string()),
        })
    });
    done.unwrap_or_else(|| Err(io::Error::other("Python is shutting down")))
}

impl Store for PyStore {
    fn read_at(&self, name: &str, offset: u64, length: usize) -> io::Result<Vec<u8>> {
        attached(|py| {
            let read = self.0.bind(py).call_method1(pyo3::intern!(py, "read"), (name, offset, length))?;
            Ok(read.cast::<PyBytes>()?.as_bytes().to_vec())
        })
    }

    fn write(&self, name: &str, pieces: &mut dyn Iterator<Item = io::Result<Vec<u8>>>) -> io::Result<u64> {
        let (send, inbox) = bounded(1);
        let (ends, ended) = bounded::<()>(0);
        thread::scope(|scope| {
            let write = move || {
                let _ends = ends;
                attached(|py| {
                    let pieces = Bound::new(py, Pieces(inbox))?;
                    let wrote = self.0.bind(py).call_method1(pyo3::intern!(py, "write"), (name, pieces))?;
                    wrote.extract()
                })
            };
            let writing = thread::Builder::new().name("penstock-store".into()).spawn_scoped(scope, write)?;
            let mut broken = None;
            loop {
                let piece = match pieces.next().transpose() {
                    Ok(piece) => piece,
                    Err(error) => {
                        broken = Some(error);
                        break;
                    }
                };
                let last = piece.is_none();
                // Whoever has raised may keep the other end for as long as its exception lives.
                let sent = select! {
                    send(send, piece) -> sent => sent.is_ok(),
                    recv(ended) -> _ => false,
                };
                if last || !sent {
                    break;
                }
            }
            drop(send);
            let wrote = writing.join().unwrap_or_else(|_| Err(io::Error::other("the writer panicked")));
            broken.map_or(wrote, Err)
        })
    }
}

/// Pieces on their way to a file, an iterator of bytes. `None` ends it; without that it raises.
#[pyclass(frozen, module = "penstock._native")]
struct Pieces(Receiver<Option<Vec<u8>>>);

#[pymethods]
impl Pieces {
    fn __iter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __next__<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        match py.detach(|| self.0.recv()) {
            Ok(piece) => Ok(piece.map(|piece| PyBytes::new(py, &piece))),
            Err(_) => Err(PyOSError::new_err("the file was given up")),
        }
    }
}
