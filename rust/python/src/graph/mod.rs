//! Graphs: edges read from text, indices, searches for patterns in them, and changes.
//!
//! Owns: what nodes are called on the way in ([`Ids`], [`ends`]), and how a call ends that writes a file ([`published`]).
//! Numbers keep their Arrow type.

use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, Ordering};

use arrow_array::{Array, ArrayRef};
use arrow_schema::DataType;
use crossbeam::channel::bounded;
use penstock_graph::cliques;
use penstock_graph::domain::Domain;
use penstock_graph::{GraphError, Index, Pattern};
use pyo3::prelude::*;

use crate::arrow::import_batch;
use crate::aside;
use crate::errors::{self, Kind, Problem};

mod build;
mod deltas;
mod index;
mod search;
mod text;

pub(crate) use build::{GraphBuilder, GraphFileBuilder};
pub(crate) use deltas::{GraphChanges, GraphDeltas};
pub(crate) use index::GraphIndex;
pub(crate) use search::GraphSearch;
pub(crate) use text::GraphText;

/// Most edges that are taken before somebody else may have the lock, and Python looks at signals.
const PIECE: usize = 8192;

/// What nodes are called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ids {
    Signed,
    Unsigned,
    Text,
}

impl Ids {
    pub(crate) fn read(name: &str) -> PyResult<Self> {
        match name {
            "signed" => Ok(Self::Signed),
            "unsigned" => Ok(Self::Unsigned),
            "text" => Ok(Self::Text),
            _ => Err(errors::raise(Kind::Config, &format!("ids {name:?}: one of signed, unsigned and text"))),
        }
    }

    pub(crate) fn of(index: &Index) -> Self {
        match index.domain {
            Domain::Numbers(_) => Self::Unsigned,
            Domain::Signed(_) => Self::Signed,
            Domain::Texts { .. } => Self::Text,
        }
    }

    pub(crate) fn arrow(self) -> DataType {
        match self {
            Self::Signed => DataType::Int64,
            Self::Unsigned => DataType::UInt64,
            Self::Text => DataType::LargeUtf8,
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Signed => "signed",
            Self::Unsigned => "unsigned",
            Self::Text => "text",
        }
    }
}

/// Why the detached part of a call failed. It becomes an exception when the caller is attached again and holds no lock.
#[derive(Debug)]
pub(crate) enum Trouble {
    Graph(GraphError),
    Arrow(arrow_schema::ArrowError),
    Handle(Problem),
    /// Nodes of deltas have no number left.
    Full,
}

impl From<GraphError> for Trouble {
    fn from(error: GraphError) -> Self {
        Self::Graph(error)
    }
}

impl From<Trouble> for PyErr {
    fn from(trouble: Trouble) -> PyErr {
        match trouble {
            Trouble::Graph(error) => errors::from_graph(&error),
            Trouble::Arrow(error) => errors::arrow(&error),
            Trouble::Handle(problem) => problem.into(),
            Trouble::Full => errors::raise(Kind::Schema, "more than 2^32 - 1 nodes: deltas cannot number them"),
        }
    }
}

/// A finished detached part of a call.
pub(crate) fn done<T>(outcome: Result<T, GraphError>) -> PyResult<T> {
    outcome.map_err(|error| errors::from_graph(&error))
}

/// Does a job that names a file at its end aside. Ctrl-C sets `stop`, at which the job looks, and comes out when the job has
/// ended: from then on nothing that it made appears anywhere, and nothing that it has begun is left.
pub(crate) fn published<T: Send + 'static>(
    py: Python<'_>,
    class: &'static str,
    stop: &AtomicBool,
    job: impl FnOnce() -> Result<T, GraphError> + Send + 'static,
) -> PyResult<T> {
    let (under_way, ended) = bounded::<Infallible>(0);
    let outcome = aside::once(py, class, move || {
        let _under_way = under_way; // dropped behind what the job has
        job()
    });
    if outcome.is_err() {
        stop.store(true, Ordering::Relaxed);
        let _closed = py.detach(|| ended.recv());
    }
    done(outcome?)
}

/// Drops what may be large where nobody waits for it; it has nothing of Python's.
fn let_go(large: impl Send + 'static) {
    // Without a thread it is dropped here.
    let _ = std::thread::Builder::new().spawn(move || drop(large));
}

/// The first two columns of a batch, checked to be nodes of that kind without nulls.
pub(crate) fn ends(ids: Ids, name: &str, edges: &Bound<'_, PyAny>) -> PyResult<(ArrayRef, ArrayRef)> {
    let batch = import_batch(edges)?;
    if batch.num_columns() < 2 {
        let message = format!("relation {name:?} has {} columns: edges need two", batch.num_columns());
        return Err(errors::raise(Kind::Schema, &message));
    }
    let (from, to) = (batch.column(0).clone(), batch.column(1).clone());
    for (column, field) in [&from, &to].into_iter().zip(batch.schema_ref().fields()) {
        let wanted = ids.arrow();
        if *column.data_type() != wanted {
            let message = format!(
                "relation {name:?}: column {:?} is {}, but nodes of this index are {wanted}",
                field.name(),
                column.data_type()
            );
            return Err(errors::raise(Kind::Schema, &message));
        }
        if column.null_count() > 0 {
            // Callers tell in which row of all batches.
            let message = format!("relation {name:?}: column {:?} has nulls, but an edge has two nodes", field.name());
            return Err(errors::raise(Kind::Schema, &message));
        }
    }
    Ok((from, to))
}

/// The pattern of cliques, and the order to bind its variables in.
#[pyfunction]
pub(crate) fn graph_clique(relation: &str, size: usize) -> PyResult<(String, Vec<String>)> {
    let pattern = done(cliques::pattern(relation, size))?;
    let atom = |atom: &penstock_graph::Atom| {
        format!("{}({}, {})", atom.relation, pattern.variables[atom.from], pattern.variables[atom.to])
    };
    let body = pattern.body.iter().map(atom).collect::<Vec<_>>().join(", ");
    let text = format!("{}({}) :- {body}", pattern.name, pattern.columns().collect::<Vec<_>>().join(", "));
    Ok((text, pattern.variables))
}

/// Relations and columns of a pattern, which is checked as far as that needs no data.
#[pyfunction]
pub(crate) fn graph_pattern(text: &str) -> PyResult<(Vec<String>, Vec<String>)> {
    let pattern = Pattern::parse(text).map_err(|error| errors::from_graph(&error.into()))?;
    let own = |names: Vec<&str>| names.into_iter().map(String::from).collect();
    Ok((own(pattern.relations()), own(pattern.columns().collect())))
}
