//! The driver's end of a cluster: [`Registry`].

use std::sync::Arc;
use std::time::Duration;

use penstock_cluster as cluster;
use penstock_cluster::session::{Keys, Limits, Role, Secret};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::aside;
use crate::enter::{enter, timeout};
use crate::errors::{self, Kind};
use crate::fork::Owner;

/// A secret or keys from Python; anything else is refused without showing it.
pub(crate) fn keys(bytes: &[u8]) -> PyResult<Keys> {
    Keys::from_bytes(bytes).map_err(|error| errors::from_cluster(&error))
}

fn secret(bytes: &[u8]) -> PyResult<Secret> {
    let bytes = bytes
        .try_into()
        .map_err(|_| errors::raise(Kind::Config, &format!("the secret must be 32 bytes, not {}", bytes.len())))?;
    Secret::new(bytes).map_err(|error| errors::from_cluster(&error))
}

/// Makes the key of a role under a scope: ``"member"`` of a slot, ``"feed"`` or ``"drain"`` of ``"<query> <epoch>"``, ``"mesh"`` of any.
/// With `always` it is for connections that are encrypted also where they do not leave the host.
#[pyfunction]
#[pyo3(signature = (secret, role, scope, always=false))]
pub(crate) fn key_of<'py>(
    py: Python<'py>,
    secret: &[u8],
    role: &str,
    scope: &str,
    always: bool,
) -> PyResult<Bound<'py, PyBytes>> {
    let secret = self::secret(secret)?;
    let keys = match role {
        "member" => Keys::member(&secret, scope),
        "feed" => Keys::of(&secret, Role::Feed, scope),
        "drain" => Keys::of(&secret, Role::Drain, scope),
        "mesh" => Keys::mesh(&secret),
        _ => {
            let message = format!("role={role:?} must be \"member\", \"feed\", \"drain\" or \"mesh\"");
            return Err(errors::raise(Kind::Value, &message));
        }
    };
    let keys = if always { keys.always_encrypted() } else { keys };
    Ok(PyBytes::new(py, &keys.to_bytes()))
}

/// The number by which an engine of this secret marks its claims on checkpoints.
#[pyfunction]
pub(crate) fn claim_of(secret: &[u8]) -> PyResult<u64> {
    Ok(self::secret(secret)?.claim())
}

/// How long a member may be silent, in seconds, as limits; the default without.
pub(crate) fn limits(silence: Option<f64>) -> PyResult<Limits> {
    match silence {
        None => Ok(Limits::default()),
        Some(seconds) => match Duration::try_from_secs_f64(seconds) {
            Ok(silence) if silence >= Duration::from_millis(100) => Ok(Limits::patient(silence)),
            _ => Err(errors::raise(Kind::Config, &format!("silence={seconds} must be at least 0.1 seconds"))),
        },
    }
}

/// Counters of a listener as a dict.
fn metrics<'py>(py: Python<'py>, metrics: &cluster::session::MetricsSnapshot) -> PyResult<Bound<'py, PyDict>> {
    let facts = PyDict::new(py);
    let value = serde_json::to_value(metrics).map_err(|error| errors::raise(Kind::Engine, &error.to_string()))?;
    for (name, count) in value.as_object().into_iter().flatten() {
        facts.set_item(name, count.as_u64())?;
    }
    Ok(facts)
}

/// Who is a member, requests to them, their answers.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct Registry {
    owner: Owner,
    inner: Option<Arc<cluster::Registry>>,
}

#[pymethods]
impl Registry {
    #[new]
    #[pyo3(signature = (host, port, secret, advertise=None, silence=None, always=false))]
    fn new(
        py: Python<'_>,
        host: String,
        port: u16,
        secret: &[u8],
        advertise: Option<String>,
        silence: Option<f64>,
        always: bool,
    ) -> PyResult<Self> {
        let (keys, limits) = (Keys::all(&self::secret(secret)?), limits(silence)?);
        let keys = if always { keys.always_encrypted() } else { keys };
        let bind = move || cluster::Registry::bind_with(&host, port, advertise.as_deref(), keys, limits);
        let registry = aside::once(py, "Registry", bind)?.map_err(|error| errors::from_cluster(&error))?;
        Ok(Self { owner: Owner::here(), inner: Some(Arc::new(registry)) })
    }

    /// What members dial: ``host:port``.
    #[getter]
    fn address(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.inner(py)?.address().to_owned())
    }

    /// Members that are connected now: id -> what it said about itself, as JSON.
    fn members(&self, py: Python<'_>) -> PyResult<Vec<(u64, String)>> {
        let inner = self.inner(py)?;
        let members = py.detach(|| inner.members());
        Ok(members.into_iter().map(|member| (member.member, member.info.to_string())).collect())
    }

    /// Sends a request (JSON) and returns its call id; the answer comes by `poll`.
    #[pyo3(signature = (member, body, attachment=None))]
    fn send(&self, py: Python<'_>, member: u64, body: String, attachment: Option<&[u8]>) -> PyResult<u64> {
        let inner = self.inner(py)?;
        let attachment = attachment.unwrap_or_default().to_vec();
        py.detach(|| inner.send(member, body, attachment)).map_err(|error| errors::from_cluster(&error))
    }

    /// Waits up to `timeout` seconds for something to happen; returns everything that has, in order.
    #[pyo3(signature = (timeout=None))]
    fn poll<'py>(&self, py: Python<'py>, timeout: Option<f64>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let inner = self.inner(py)?;
        let events = enter(py, self::timeout(timeout)?, |wait: Duration| {
            let events = inner.poll(wait);
            Ok::<_, PyErr>((!events.is_empty()).then_some(events))
        })?;
        events.unwrap_or_default().into_iter().map(|event| shown(py, event)).collect()
    }

    /// Tells a member to go; its end comes as a lost event.
    fn dismiss(&self, py: Python<'_>, member: u64, reason: String) -> PyResult<()> {
        let inner = self.inner(py)?;
        py.detach(|| inner.dismiss(member, &reason)).map_err(|error| errors::from_cluster(&error))
    }

    /// Counters of the listener: accepted and refused connections, by reason.
    fn metrics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let inner = self.inner(py)?;
        metrics(py, &inner.metrics())
    }

    /// Ends all connections (members then end themselves). Harmless when done twice.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let inner = self.inner(py)?.clone();
        aside::once(py, "Registry", move || inner.close())
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, pyo3::types::PyTuple>) -> PyResult<()> {
        self.close(py)
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(errors::no_pickle("Registry", "ship its address"))
    }
}

fn shown(py: Python<'_>, event: cluster::RegistryEvent) -> PyResult<Bound<'_, PyDict>> {
    use cluster::RegistryEvent::{Joined, Lost, Message, Reply};
    let facts = PyDict::new(py);
    match event {
        Joined { member, info } => {
            facts.set_item("event", "joined")?;
            facts.set_item("member", member)?;
            facts.set_item("info", info.to_string())?;
        }
        Lost { member, reason, calls } => {
            facts.set_item("event", "lost")?;
            facts.set_item("member", member)?;
            facts.set_item("reason", reason)?;
            facts.set_item("calls", calls)?;
        }
        Reply { member, call, body, attachment } => {
            facts.set_item("event", "reply")?;
            facts.set_item("member", member)?;
            facts.set_item("call", call)?;
            facts.set_item("body", body.to_string())?;
            facts.set_item("attachment", PyBytes::new(py, &attachment))?;
        }
        Message { member, body, attachment } => {
            facts.set_item("event", "message")?;
            facts.set_item("member", member)?;
            facts.set_item("body", body.to_string())?;
            facts.set_item("attachment", PyBytes::new(py, &attachment))?;
        }
    }
    Ok(facts)
}

impl Registry {
    fn inner(&self, py: Python<'_>) -> PyResult<&Arc<cluster::Registry>> {
        self.owner.check(py, "Registry")?;
        Ok(self.inner.as_ref().expect("only Drop takes it"))
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        if !self.owner.is_here() {
            // The parent's sockets and threads.
            std::mem::forget(self.inner.take());
            return;
        }
        // Closing joins threads, none of which needs the interpreter; not in a finalizer, though.
        if let Some(inner) = self.inner.take() {
            let closing = std::thread::Builder::new().name("penstock-close".into());
            // Without a thread to spare the sockets end with the process.
            let _ = closing.spawn(move || drop(inner));
        }
    }
}
