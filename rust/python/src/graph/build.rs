//! Edges collected to an index: in memory, or by way of scratch files to an index file.
//!
//! Invariant: edges are added in pieces, between which Python looks at signals; what an interrupt or an error leaves half added
//! makes no index: the builder is spent.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use arrow_array::cast::AsArray;
use arrow_array::types::{Int64Type, UInt64Type};
use arrow_array::{Array, ArrayRef};
use penstock_graph::cliques::Orientation;
use penstock_graph::large::Shape;
use penstock_graph::{Builder, GraphError, LargeBuilder, Loops, Repeats};
use pyo3::prelude::*;

use crate::aside;
use crate::enter::{enter, locked};
use crate::errors::{self, Kind, Problem};
use crate::graph::{GraphIndex, Ids, PIECE, Trouble, done, ends, let_go, published};

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

/// Does `add` with a builder and one piece after the other of so many rows, and looks at signals in between.
fn pieces<B: Send + 'static>(
    py: Python<'_>,
    class: &'static str,
    builder: &Mutex<Option<B>>,
    rows: usize,
    mut add: impl FnMut(&mut B, usize, usize) -> Result<(), GraphError> + Send,
) -> PyResult<()> {
    let mut first = 0;
    let added = enter(py, None, |_| {
        let mut builder = builder.lock().unwrap_or_else(PoisonError::into_inner);
        let builder = builder.as_mut().ok_or(Trouble::Handle(Problem::Closed(class)))?;
        let piece = PIECE.min(rows - first);
        add(builder, first, piece)?;
        first += piece;
        Ok::<_, Trouble>((first == rows).then_some(()))
    });
    if added.is_err() {
        let_go(locked(py, builder, Option::take));
    }
    added.map(drop)
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

    /// Adds edges: the first two columns of a batch, int64, uint64 or (large) text as the builder was told. When that is broken
    /// off midway the builder is spent.
    fn add(&self, py: Python<'_>, name: &str, edges: &Bound<'_, PyAny>) -> PyResult<()> {
        let (from, to) = ends(self.ids, name, edges)?;
        pieces(py, "GraphBuilder", &self.builder, from.len(), |builder, first, rows| {
            put(builder, self.ids, name, &from.slice(first, rows), &to.slice(first, rows))
        })
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
    builder: Arc<Mutex<Option<LargeBuilder>>>,
}

#[pymethods]
impl GraphFileBuilder {
    /// `folder` is where scratch files are; `memory` is in bytes.
    #[new]
    fn new(ids: &str, folder: PathBuf, memory: usize) -> PyResult<Self> {
        let ids = Ids::read(ids)?;
        let stop = Arc::new(AtomicBool::new(false));
        let builder = done(LargeBuilder::new(fresh(ids), &folder, memory, stop.clone()))?;
        Ok(Self { ids, stop, builder: Arc::new(Mutex::new(Some(builder))) })
    }

    /// Names a relation and says what happens to its self-loops (keep, drop, refuse). Repeated edges count once.
    fn relation(&self, py: Python<'_>, name: &str, self_loops: &str) -> PyResult<()> {
        let loops = loops(self_loops)?;
        let named = locked(py, &self.builder, |builder| builder.as_mut().map(|builder| builder.relation(name, loops)));
        Ok(named.ok_or(Problem::Closed("GraphFileBuilder"))?)
    }

    /// Adds edges: the first two columns of a batch, int64, uint64 or (large) text as the builder was told. When that is broken
    /// off midway the builder is spent.
    fn add(&self, py: Python<'_>, name: &str, edges: &Bound<'_, PyAny>) -> PyResult<()> {
        const CLASS: &str = "GraphFileBuilder";
        let (from, to) = ends(self.ids, name, edges)?;
        let mut first = 0;
        let added = loop {
            if self.stop.load(Ordering::Relaxed) {
                return Err(Problem::Spent(CLASS).into());
            }
            let held = enter(py, None, |_| {
                let mut builder = self.builder.lock().unwrap_or_else(PoisonError::into_inner);
                let builder = builder.as_mut().ok_or(Trouble::Handle(Problem::Closed(CLASS)))?;
                let rows = PIECE.min(from.len() - first);
                let (from, to) = (from.slice(first, rows), to.slice(first, rows));
                let is_full = builder.hold(|piece| put(piece, self.ids, name, &from, &to))?;
                first += rows;
                Ok::<_, Trouble>((is_full || rows < PIECE).then_some(is_full))
            });
            match held {
                Ok(Some(true)) => {}
                other => break other.map(drop),
            }
            // The lock is kept by whoever brings them to disk, so nobody adds or finishes meanwhile.
            let builder = self.builder.clone();
            let spill = move || {
                let mut builder = builder.lock().unwrap_or_else(PoisonError::into_inner);
                builder.as_mut().map_or(Ok(()), LargeBuilder::spill)
            };
            if let Err(error) = aside::once(py, CLASS, spill).and_then(done).and_then(|()| py.check_signals()) {
                break Err(error);
            }
        };
        if added.is_err() {
            self.stop.store(true, Ordering::Relaxed);
        }
        added
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
