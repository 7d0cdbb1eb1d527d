//! A resident worker process: [`Member`].
//!
//! Python calls `run` on the process's main thread, which stays there, detached, for the whole life of the member and
//! comes back every 25 ms for signals. User functions travel cloudpickled; they are unpickled only from an
//! authenticated driver, and a function's exception goes back the same way.

use std::cell::RefCell;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use penstock_cluster as cluster;
use penstock_cluster::{End, Failure, GroupHost, Loader, Store};
use penstock_plan::{CallError, Callbacks};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::aside;
use crate::calls::PyCalls;
use crate::ending;
use crate::errors::{self, Kind, Problem};
use crate::fork::Owner;
use crate::registry::{keys, limits};
use crate::store;

/// Longest pickled exception that goes to the driver: beside it goes what it says and where it was raised.
const ORIGIN_BYTES: usize = 8 << 20;

/// Reads the functions of a plan and writes exceptions, both cloudpickled; files of checkpoints are Python's.
struct Pickles;

impl Loader for Pickles {
    fn load(&self, attachment: &[u8]) -> Result<Arc<dyn Callbacks>, CallError> {
        let load = |py: Python<'_>| -> PyResult<Arc<dyn Callbacks>> {
            if attachment.is_empty() {
                return Ok(PyCalls::new(PyList::empty(py).as_any())? as Arc<dyn Callbacks>);
            }
            // What it says of a module that is not here is what people can act on.
            let functions = py.import("penstock.spark._tasks.functions")?;
            let calls = functions.call_method1("load_at_member", (PyBytes::new(py, attachment),))?;
            Ok(PyCalls::new(&calls)? as Arc<dyn Callbacks>)
        };
        let step = "loading the functions of the flow";
        ending::attach(|py| load(py).map_err(|error| errors::call_error(py, step, error)))
            .unwrap_or_else(|| Err(CallError::new(step, "Python is shutting down")))
    }

    fn write_origin(&self, error: &CallError) -> Vec<u8> {
        let Some(origin) = error.origin.as_ref().and_then(|origin| origin.downcast_ref::<Py<PyAny>>()) else {
            return Vec::new();
        };
        let write = |py: Python<'_>| -> PyResult<Vec<u8>> {
            let bytes = py.import("cloudpickle")?.call_method1("dumps", (origin.bind(py),))?;
            let bytes = bytes.cast::<PyBytes>()?.as_bytes();
            Ok(if bytes.len() > ORIGIN_BYTES { Vec::new() } else { bytes.to_vec() })
        };
        // One that does not pickle, or to too much: the facts in the reply have to do.
        ending::attach(|py| write(py).unwrap_or_default()).unwrap_or_default()
    }

    fn store(&self, checkpoint: &str) -> Result<Arc<dyn Store>, Failure> {
        store::open(checkpoint)
    }
}

/// The resident end of the registry in a worker process.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct Member {
    owner: Owner,
    id: u64,
    address: String,
    /// None once it runs.
    inner: Option<Mutex<Option<cluster::Member<GroupHost>>>>,
}

#[pymethods]
impl Member {
    #[new]
    #[pyo3(signature = (registry, key, info="{}", silence=None, staging_bytes=None, spill_folders=None))]
    fn new(
        py: Python<'_>,
        registry: String,
        key: &[u8],
        info: &str,
        silence: Option<f64>,
        staging_bytes: Option<u64>,
        spill_folders: Option<Vec<PathBuf>>,
    ) -> PyResult<Self> {
        let (keys, mut limits) = (self::keys(key)?, self::limits(silence)?);
        limits.staging_bytes = staging_bytes.unwrap_or(limits.staging_bytes);
        limits.spill_folders = spill_folders.unwrap_or_default();
        let info = serde_json::from_str(info)
            .map_err(|error| errors::raise(Kind::Value, &format!("info must be a JSON object: {error}")))?;
        let host = GroupHost::new(Arc::new(Pickles)).silent_after(limits.silence);
        let join = move || cluster::Member::connect_to(&registry, keys, info, host, limits);
        let member = aside::once(py, "Member", join)?.map_err(|error| errors::from_cluster(&error))?;
        let (id, address) = (member.id(), member.address().to_owned());
        Ok(Self { owner: Owner::here(), id, address, inner: Some(Mutex::new(Some(member))) })
    }

    /// The id that the registry gave.
    #[getter]
    fn id(&self) -> u64 {
        self.id
    }

    /// The data port that feeds and drains dial: ``host:port``.
    #[getter]
    fn address(&self) -> &str {
        &self.address
    }

    /// Serves until the driver, a signal or a broken connection ends it: ``(how, why)``.
    fn run(&self, py: Python<'_>) -> PyResult<(&'static str, String)> {
        let member = self.take(py)?.ok_or(Problem::Closed("Member"))?;
        let (end, signal) = py.detach(|| {
            let signal = RefCell::new(None);
            let end = member.run(&|| match Python::try_attach(|py| py.check_signals()) {
                Some(Ok(())) => false,
                Some(Err(error)) => {
                    *signal.borrow_mut() = Some(error);
                    true
                }
                None => true, // the interpreter is going away
            });
            (end, signal.into_inner())
        });
        if let Some(signal) = signal {
            return Err(signal);
        }
        Ok(match end {
            End::Stopped => ("stopped", String::new()),
            End::Dismissed { reason } => ("dismissed", reason),
            End::RegistryLost { reason } => ("registry_lost", reason),
            End::Interrupted => ("interrupted", String::new()),
        })
    }

    /// Ends a member that does not run yet. Harmless when done twice.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        match self.take(py)? {
            Some(member) => aside::once(py, "Member", move || drop(member)),
            None => Ok(()),
        }
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, pyo3::types::PyTuple>) -> PyResult<()> {
        self.close(py)
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(errors::no_pickle("Member", "make one in the process that is to be the member"))
    }
}

impl Member {
    fn take(&self, py: Python<'_>) -> PyResult<Option<cluster::Member<GroupHost>>> {
        self.owner.check(py, "Member")?;
        let inner = self.inner.as_ref().expect("only Drop takes it");
        Ok(py.detach(|| inner.lock().map(|mut slot| slot.take()).map_err(|_| Problem::Poisoned("Member")))?)
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        if !self.owner.is_here() {
            // The parent's sockets and threads.
            std::mem::forget(self.inner.take());
            return;
        }
        if let Some(inner) = self.inner.take() {
            // Ending joins threads, some of which may need the interpreter that a finalizer holds.
            let ending = std::thread::Builder::new().name("penstock-close".into());
            let _ = ending.spawn(move || drop(inner));
        }
    }
}
