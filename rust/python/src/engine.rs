//! The protocol of an engine: [`EngineProtocol`], which decides what Python does; and the files of a checkpoint that it speaks of.
//!
//! Events go in and effects come out as JSON text, tagged by their names as serde derives it. Nothing here waits.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use penstock_cluster::session::Session;
use penstock_engine::{Claim, Contents, Effect, Engine, EngineError, Event, Manifest, Named, Setup, Shown};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use serde_json::Value;

use crate::errors::{self, Kind};

/// The machine of one engine.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct EngineProtocol {
    engine: Mutex<Engine>,
}

#[pymethods]
impl EngineProtocol {
    #[new]
    fn new(setup: &str) -> PyResult<Self> {
        let setup: Setup = serde_json::from_str(setup).map_err(|error| wrong("setup", &error))?;
        Ok(Self { engine: Mutex::new(Engine::new(setup)) })
    }

    /// What to do first, as JSON.
    fn begin(&self) -> String {
        shown(&self.engine().begin())
    }

    /// Takes an event; returns what to do, in order. Both as JSON.
    fn step(&self, event: &str) -> PyResult<String> {
        let event: Event = serde_json::from_str(event).map_err(|error| wrong("event", &error))?;
        Ok(shown(&self.engine().step(event)))
    }

    /// How a query stands, as JSON; None for one that never asked.
    fn facts(&self, query: &str) -> Option<String> {
        let facts = self.engine().facts(query)?;
        Some(serde_json::to_string(&facts).expect("plain data becomes JSON"))
    }

    /// How the rescale under way stands, as JSON; None when there is none.
    fn rescaling(&self) -> Option<String> {
        let facts = self.engine().rescaling()?;
        Some(serde_json::to_string(&facts).expect("plain data becomes JSON"))
    }

    /// The bins of a query and the parts of those that are split, by hash, one list for each keyed step: prefix, its bits, and the worker.
    fn bins(&self, query: &str) -> Vec<Vec<(u32, u8, u32)>> {
        let engine = self.engine();
        let bin = |(range, owner): &(penstock_engine::Range, u32)| (range.prefix(), range.length(), *owner);
        engine.layouts(query).into_iter().map(|layout| layout.ranges().iter().map(bin).collect()).collect()
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(errors::no_pickle("EngineProtocol", "it lives in the driver"))
    }
}

impl EngineProtocol {
    fn engine(&self) -> MutexGuard<'_, Engine> {
        // A panic in a step reaches the executor, which ends every call.
        self.engine.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Name and bytes of the file of a claim, of a manifest, or of what a sink was shown, that is given as JSON.
#[pyfunction]
pub(crate) fn checkpoint_file<'py>(
    py: Python<'py>,
    kind: &str,
    content: &str,
) -> PyResult<(String, Bound<'py, PyBytes>)> {
    let (name, bytes) = match kind {
        "claim" => {
            let claim: Claim = serde_json::from_str(content).map_err(|error| wrong(kind, &error))?;
            (Claim::name(claim.number), penstock_engine::encode(&claim))
        }
        "manifest" => {
            let manifest: Manifest = serde_json::from_str(content).map_err(|error| wrong(kind, &error))?;
            (manifest.name(), penstock_engine::encode(&manifest))
        }
        "shown" => {
            let shown: Shown = serde_json::from_str(content).map_err(|error| wrong(kind, &error))?;
            (shown.name(), penstock_engine::encode(&shown))
        }
        _ => return Err(errors::raise(Kind::Value, &format!("kind={kind:?} is neither claim, manifest nor shown"))),
    };
    Ok((name, PyBytes::new(py, &bytes)))
}

/// Whether a listing of a checkpoint needs the content of the file of this name.
#[pyfunction]
pub(crate) fn checkpoint_reads(name: &str) -> bool {
    Named::parse(name).is_some_and(Named::is_read)
}

/// What a checkpoint holds, as JSON, of the names, sizes and contents of its files, where they were read.
#[pyfunction]
pub(crate) fn checkpoint_contents(files: Vec<(String, u64, Option<Vec<u8>>)>, held: bool) -> String {
    let mut contents = Contents { held, ..Contents::default() };
    for (name, size, bytes) in files {
        match bytes {
            Some(bytes) => contents.add(&name, size, &bytes),
            None => contents.list(&name, size),
        }
    }
    serde_json::to_string(&contents).expect("plain data becomes JSON")
}

/// Whether the registry of the engine whose claims have the number `claim` listens at ``host:port``; waits about `patience` seconds at most.
#[pyfunction]
pub(crate) fn registry_answers(py: Python<'_>, address: &str, claim: u64, patience: f64) -> PyResult<bool> {
    let patience = Duration::try_from_secs_f64(patience).unwrap_or(Duration::from_secs(1));
    py.detach(|| Session::answers(address, claim, patience)).map_err(|error| errors::from_cluster(&error))
}

fn wrong(what: &str, error: &serde_json::Error) -> PyErr {
    errors::raise(Kind::Value, &format!("this is no {what} of the engine's protocol: {error}"))
}

/// Effects as JSON; an error says beside its data what it is for people.
fn shown(effects: &[Effect]) -> String {
    let mut list = Vec::with_capacity(effects.len());
    for effect in effects {
        let mut value = serde_json::to_value(effect).expect("plain data becomes JSON");
        if let Some(error) = refusal(effect)
            && let Some(facts) = value.as_object_mut().and_then(|tagged| tagged.values_mut().next())
        {
            facts["text"] = error.to_string().into();
        }
        list.push(value);
    }
    Value::from(list).to_string()
}

fn refusal(effect: &Effect) -> Option<&EngineError> {
    match effect {
        Effect::Fail { error, .. } => Some(error),
        Effect::Moved { outcome, .. } | Effect::Rescaled { outcome, .. } => outcome.as_ref().err(),
        Effect::Dropped { outcome, .. } => outcome.as_ref().err(),
        _ => None,
    }
}
