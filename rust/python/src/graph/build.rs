//! Edges collected to an index: in memory, or by way of scratch files to an index file.

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use arrow_array::cast::AsArray;
use arrow_array::types::{Int64Type, UInt64Type};
use arrow_array::{Array, ArrayRef};
use penstock_graph::cliques::Orientation;
use penstock_graph::large::Shape;
use penstock_graph::{Builder, GraphError, LargeBuilder, Loops, Repeats};
use pyo3::prelude::*;

use crate::aside;
use crate::enter::locked;
use crate::errors::{self, Kind, Problem};
use crate::graph::{GraphIndex, Ids, done, ends, published};

/// An empty builder for nodes of that kind.
fn fresh(ids: Ids) -> fn() -> Builder {
    match ids {
        Ids::Signed => Builder::signed,
        Ids::Unsigned => Builder::numbers,
        Ids::Text => Builder::texts,
    }
}

fn loops(name: &str) -> PyResult<Loops> {
    match name {
        "keep" => Ok(Loops::Keep),
        "drop" => Ok(Loops::Drop),
        "refuse" => Ok(Loops::Refuse),
        _ => {
            let message = format!("self_loops={name:?} must be \"keep\", \"drop\" or \"refuse\"");
            Err(errors::raise(Kind::Config, &message))
        }
    }
}

/// Both directions, forward only, or undirected and oriented by degree or degeneracy.
fn read(shape: &str) -> PyResult<Shape> {
    match shape {
        "both" => Ok(Shape::Both),
        "forward" => Ok(Shape::Forward),
        "degree" => Ok(Shape::Oriented(Orientation::Degree)),
        "degeneracy" => Ok(Shape::Oriented(Orientation::Degeneracy)),
        _ => {
            let message = format!("{shape:?}: one of \"degree\" and \"degeneracy\"");
            Err(errors::raise(Kind::Config, &message))
        }
    }
}

/// Adds columns that were checked to be nodes of that kind.
fn put(builder: &mut Builder, ids: Ids, name: &str, from: &ArrayRef, to: &ArrayRef) -> Result<(), GraphError> {
    match ids {
        Ids::Signed => {
            builder.signed_in(name, from.as_primitive::<Int64Type>().values(), to.as_primitive::<Int64Type>().values())
        }
        Ids::Unsigned => builder.numbers_in(
            name,
            from.as_primitive::<UInt64Type>().values(),
            to.as_primitive::<UInt64Type>().values(),
        ),
        Ids::Text => {
            let (from, to) = (from.as_string::<i64>(), to.as_string::<i64>());
            (0..from.len()).try_for_each(|row| builder.text_in(name, from.value(row), to.value(row)))
        }
    }
}

/// Collects the edges of relations.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct GraphBuilder {
    ids: Ids,
    builder: Mutex<Option<Builder>>,
}

impl GraphBuilder {
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Builder) -> Result<T, GraphError> + Send,
    ) -> PyResult<T> {
        let outcome = locked(py, &self.builder, |builder| builder.as_mut().map(work));
        done(outcome.ok_or(Problem::Closed("GraphBuilder"))?)
    }
}

#[pymethods]
impl GraphBuilder {
    #[new]
    fn new(ids: &str) -> PyResult<Self> {
        let ids = Ids::read(ids)?;
        Ok(Self { ids, builder: Mutex::new(Some(fresh(ids)())) })
    }

    /// Names a relation and says what happens to its self-loops (keep, drop, refuse) and repeated edges (drop, refuse).
    fn relation(&self, py: Python<'_>, name: &str, self_loops: &str, repeated: &str) -> PyResult<()> {
        let loops = loops(self_loops)?;
        let repeats = match repeated {
            "drop" => Repeats::Drop,
            "refuse" => Repeats::Refuse,
            _ => {
                let message = format!("repeated={repeated:?} must be \"drop\" or \"refuse\"");
                return Err(errors::raise(Kind::Config, &message));
            }
        };
        self.with(py, |builder| {
            builder.relation(name, loops, repeats);
            Ok(())
        })
    }

    /// Adds edges: the first two columns of a batch, int64, uint64 or (large) text as the builder was told.
    fn add(&self, py: Python<'_>, name: &str, edges: &Bound<'_, PyAny>) -> PyResult<()> {
        let (from, to) = ends(self.ids, name, edges)?;
        self.with(py, |builder| put(builder, self.ids, name, &from, &to))
    }

    /// Builds the index; the builder is spent. `shape`: both directions, forward only, or undirected and oriented by
    /// degree or degeneracy.
    fn finish(&self, py: Python<'_>, shape: &str) -> PyResult<GraphIndex> {
        let shape = read(shape)?;
        let work = move |builder: Builder| match shape {
            Shape::Both => builder.finish(),
            Shape::Forward => builder.finish_forward(),
            Shape::Oriented(orientation) => builder.finish_oriented(orientation),
        };
        let taken = locked(py, &self.builder, Option::take);
        let builder = taken.ok_or(Problem::Closed("GraphBuilder"))?;
        let index = done(aside::once(py, "GraphBuilder", move || work(builder))?)?;
        Ok(GraphIndex { index: Arc::new(index) })
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(errors::no_pickle("GraphBuilder", "build the index, save it and open the file"))
    }
}

/// Collects the edges of relations by way of scratch files: memory does not grow with the edges.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct GraphFileBuilder {
    ids: Ids,
    stop: Arc<AtomicBool>,
    builder: Mutex<Option<LargeBuilder>>,
}

/// Most edges that are added before memory is looked at again.
const PIECE: usize = 8192;

#[pymethods]
impl GraphFileBuilder {
    /// `folder` is where scratch files are; `memory` is in bytes.
    #[new]
    fn new(ids: &str, folder: PathBuf, memory: usize) -> PyResult<Self> {
        let ids = Ids::read(ids)?;
        let stop = Arc::new(AtomicBool::new(false));
        let builder = done(LargeBuilder::new(fresh(ids), &folder, memory, stop.clone()))?;
        Ok(Self { ids, stop, builder: Mutex::new(Some(builder)) })
    }

    /// Names a relation and says what happens to its self-loops (keep, drop, refuse). Repeated edges count once.
    fn relation(&self, py: Python<'_>, name: &str, self_loops: &str) -> PyResult<()> {
        let loops = loops(self_loops)?;
        let named = locked(py, &self.builder, |builder| builder.as_mut().map(|builder| builder.relation(name, loops)));
        Ok(named.ok_or(Problem::Closed("GraphFileBuilder"))?)
    }

    /// Adds edges: the first two columns of a batch, int64, uint64 or (large) text as the builder was told.
    fn add(&self, py: Python<'_>, name: &str, edges: &Bound<'_, PyAny>) -> PyResult<()> {
        let (from, to) = ends(self.ids, name, edges)?;
        let outcome = locked(py, &self.builder, |builder| {
            let builder = builder.as_mut()?;
            Some((0..from.len()).step_by(PIECE).try_for_each(|first| {
                let rows = PIECE.min(from.len() - first);
                let (from, to) = (from.slice(first, rows), to.slice(first, rows));
                builder.add(|piece| put(piece, self.ids, name, &from, &to))
            }))
        });
        done(outcome.ok_or(Problem::Closed("GraphFileBuilder"))?)
    }

    /// How often edges went to disk.
    #[getter]
    fn spilled(&self, py: Python<'_>) -> PyResult<usize> {
        let spilled = locked(py, &self.builder, |builder| builder.as_ref().map(LargeBuilder::spilled));
        Ok(spilled.ok_or(Problem::Closed("GraphFileBuilder"))?)
    }

    /// Writes the index to a file, which appears at once and whole; the builder is spent.
    fn finish(&self, py: Python<'_>, shape: &str, path: PathBuf) -> PyResult<()> {
        let shape = read(shape)?;
        let taken = locked(py, &self.builder, Option::take);
        let builder = taken.ok_or(Problem::Closed("GraphFileBuilder"))?;
        published(py, "GraphFileBuilder", &self.stop, move || builder.finish(shape, &path))
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(errors::no_pickle("GraphFileBuilder", "open the file that it writes"))
    }
}
