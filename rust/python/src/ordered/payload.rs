//! What travels through a pipeline ([`Object`]), why it stops ([`Broken`]), and the operators that Python gives ([`Spec`]).

use penstock_ordered::pipeline::Payload;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use super::resident;
use crate::ending;
use crate::errors::{self, Kind};

/// A Python object in an envelope.
pub(crate) struct Object {
    pub(crate) object: Py<PyAny>,
    items: usize,
    bytes: usize,
}

impl Object {
    /// Takes an object that says its `weight`.
    pub(crate) fn new(object: &Bound<'_, PyAny>, bytes: usize) -> PyResult<Self> {
        let items = object.getattr("weight")?.extract()?;
        Ok(Self { object: object.clone().unbind(), items, bytes })
    }
}

impl Payload for Object {
    fn items(&self) -> usize {
        self.items
    }

    fn bytes(&self) -> usize {
        self.bytes
    }
}

/// An operator raised, which ends the run: what users' functions raise is a value.
#[derive(Debug)]
pub(crate) struct Broken(pub(crate) PyErr);

impl Broken {
    /// The interpreter is shutting down: nobody will look at this.
    fn gone() -> Self {
        Self(pyo3::exceptions::PySystemExit::new_err("the interpreter is shutting down"))
    }
}

/// One operator, as Python describes it.
pub(crate) struct Spec {
    pub(crate) kind: Sort,
    pub(crate) name: String,
    call: Py<PyAny>,
}

/// Of which kind an operator is.
pub(crate) enum Sort {
    Stateless,
    Stateful,
    Partitioned { partitions: usize, split: Py<PyAny>, merge: Py<PyAny> },
}

impl Spec {
    pub(crate) fn read(given: &Bound<'_, PyDict>) -> PyResult<Self> {
        let need = |name: &str| {
            given.get_item(name)?.ok_or_else(|| {
                errors::raise(Kind::Value, &format!("an operator of an OrderedRun needs {name:?}, got {given}"))
            })
        };
        let kind: String = need("kind")?.extract()?;
        let kind = match kind.as_str() {
            "stateless" => Sort::Stateless,
            "stateful" => Sort::Stateful,
            "partitioned" => Sort::Partitioned {
                partitions: need("partitions")?.extract()?,
                split: need("split")?.unbind(),
                merge: need("merge")?.unbind(),
            },
            other => {
                return Err(errors::raise(
                    Kind::Value,
                    &format!("an operator is stateless, stateful or partitioned, got {other:?}"),
                ));
            }
        };
        Ok(Self { kind, name: need("name")?.extract()?, call: need("call")?.unbind() })
    }

    /// The operator as a function for the pipeline's workers.
    pub(crate) fn call(
        &self,
        py: Python<'_>,
    ) -> impl Fn(usize, Object) -> Result<Object, Broken> + Send + Sync + 'static {
        let call = self.call.clone_ref(py);
        move |worker, given| {
            ending::attach(|py| {
                resident::stay(py);
                let made = call.bind(py).call1((worker, given.object)).map_err(Broken)?;
                Object::new(&made, given.bytes).map_err(Broken)
            })
            .unwrap_or_else(|| Err(Broken::gone()))
        }
    }
}

/// The parts of a chunk: a list of objects that say their `partition`.
pub(crate) fn split(call: &Py<PyAny>, given: Object) -> Result<Vec<(usize, Object)>, Broken> {
    ending::attach(|py| {
        let parts = call.bind(py).call1((given.object,)).map_err(Broken)?;
        let mut made = Vec::new();
        for part in parts.try_iter().map_err(Broken)? {
            let part = part.map_err(Broken)?;
            let partition = part.getattr("partition").and_then(|partition| partition.extract()).map_err(Broken)?;
            made.push((partition, Object::new(&part, 0).map_err(Broken)?));
        }
        if let Some((_, first)) = made.first_mut() {
            first.bytes = given.bytes;
        }
        Ok(made)
    })
    .unwrap_or_else(|| Err(Broken::gone()))
}

/// The chunk that parts belong to.
pub(crate) fn merge(call: &Py<PyAny>, parts: Vec<(usize, Object)>) -> Result<Object, Broken> {
    ending::attach(|py| {
        let bytes = parts.iter().map(|(_, part)| part.bytes).sum();
        let parts = PyList::new(py, parts.into_iter().map(|(_, part)| part.object)).map_err(Broken)?;
        let made = call.bind(py).call1((parts,)).map_err(Broken)?;
        Object::new(&made, bytes).map_err(Broken)
    })
    .unwrap_or_else(|| Err(Broken::gone()))
}
