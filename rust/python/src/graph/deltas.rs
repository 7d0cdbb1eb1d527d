//! Changes of edges to changes of matches.
//!
//! The edges, and what the last epoch changed, are one state under one lock; whoever reads the changes takes it for a tick at
//! a time. An epoch that was given a number can be read again until the next one begins, so whoever failed with its rows
//! gets them once more.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use arrow_array::cast::AsArray;
use arrow_array::types::{Int64Type, UInt64Type};
use arrow_array::{Array, ArrayRef, Int8Array, Int64Array, LargeStringArray, RecordBatch as Batch, UInt64Array};
use arrow_schema::{DataType, Field, Schema as ArrowSchema};
use penstock_graph::Pattern;
use penstock_graph::delta::{Cursor, Deltas};
use penstock_graph::domain::{signed, turned};
use pyo3::prelude::*;

use crate::arrow::{RecordBatch, Schema};
use crate::enter::{enter, locked};
use crate::errors::{self, Kind};
use crate::graph::{Ids, Trouble, ends};

/// Nodes numbered as they first come.
#[derive(Default)]
struct Names {
    numbers: HashMap<u64, u32>,
    ids: Vec<u64>,
    texts: HashMap<Arc<str>, u32>,
    names: Vec<Arc<str>>,
}

impl Names {
    fn number(&mut self, id: u64) -> Result<u32, Trouble> {
        if let Some(&node) = self.numbers.get(&id) {
            return Ok(node);
        }
        let node = u32::try_from(self.ids.len()).ok().filter(|node| *node < u32::MAX).ok_or(Trouble::Full)?;
        self.numbers.insert(id, node);
        self.ids.push(id);
        Ok(node)
    }

    fn text(&mut self, name: &str) -> Result<u32, Trouble> {
        if let Some(&node) = self.texts.get(name) {
            return Ok(node);
        }
        let node = u32::try_from(self.names.len()).ok().filter(|node| *node < u32::MAX).ok_or(Trouble::Full)?;
        let name = Arc::<str>::from(name);
        self.texts.insert(name.clone(), node);
        self.names.push(name);
        Ok(node)
    }
}

/// Edges, what their nodes are called, and which epoch is held.
struct State {
    deltas: Deltas,
    names: Names,
    /// The number that the epoch held was given, if any.
    held: Option<u64>,
    /// The greatest number so far.
    last: Option<u64>,
    /// The relations that the epoch held was fed for; None before the first.
    fed: Option<Vec<String>>,
}

/// Changes of edges to changes of the matches of a pattern.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct GraphDeltas {
    ids: Ids,
    schema: Arc<ArrowSchema>,
    state: Arc<Mutex<State>>,
}

#[pymethods]
impl GraphDeltas {
    #[new]
    fn new(pattern: &str, ids: &str) -> PyResult<Self> {
        let ids = Ids::read(ids)?;
        let pattern = Pattern::parse(pattern).map_err(|error| errors::from_graph(&error.into()))?;
        let mut fields = pattern.columns().map(|name| Field::new(name, ids.arrow(), false)).collect::<Vec<_>>();
        if fields.iter().any(|field| field.name() == "diff") {
            return Err(errors::raise(
                Kind::Config,
                "a column named \"diff\" says what came and went; rename the variable",
            ));
        }
        fields.push(Field::new("diff", DataType::Int8, false));
        let (deltas, names) = (Deltas::new(&pattern), Names::default());
        let state = Arc::new(Mutex::new(State { deltas, names, held: None, last: None, fed: None }));
        Ok(Self { ids, schema: Arc::new(ArrowSchema::new(fields)), state })
    }

    /// Notes edges that come (`times` above 0) or go (below) in the epoch to come.
    fn change(&self, py: Python<'_>, name: &str, edges: &Bound<'_, PyAny>, times: i64) -> PyResult<()> {
        let (from, to) = ends(self.ids, name, edges)?;
        let noted = locked(py, &self.state, |State { deltas, names, .. }| {
            let mut nodes = |column: &ArrayRef, row: usize| match self.ids {
                Ids::Signed => names.number(turned(column.as_primitive::<Int64Type>().value(row))),
                Ids::Unsigned => names.number(column.as_primitive::<UInt64Type>().value(row)),
                Ids::Text => names.text(column.as_string::<i64>().value(row)),
            };
            for row in 0..from.len() {
                let (from, to) = (nodes(&from, row)?, nodes(&to, row)?);
                deltas.change(name, from, to, times)?;
            }
            Ok::<_, Trouble>(())
        });
        Ok(noted?)
    }

    /// Forgets what was noted of the epoch to come.
    fn discard(&self, py: Python<'_>) {
        locked(py, &self.state, |state| state.deltas.discard());
    }

    /// Whether an epoch of that number is the one that is held, so that it is only given again.
    ///
    /// Raises `StateLost` when it is neither that nor the next, or has edges of other relations.
    fn expect(&self, py: Python<'_>, epoch: u64, relations: Vec<String>) -> PyResult<bool> {
        let (held, last, fed) = locked(py, &self.state, |state| (state.held, state.last, state.fed.clone()));
        if held == Some(epoch) {
            let fed = fed.unwrap_or_default();
            if relations.is_empty() || fed == relations {
                return Ok(true);
            }
            let problem = format!(
                "epoch {epoch} has been fed for {}, and comes again for {}: epochs of one count feed deltas; feed all \
                 relations in one call",
                if fed.is_empty() { "nothing".to_owned() } else { fed.join(", ") },
                relations.join(", ")
            );
            return Err(errors::raise(Kind::StateLost, &problem));
        }
        let problem = match last {
            Some(last) if epoch <= last => format!(
                "epoch {epoch} has been: the last was {last}, and only the one fed last can be given again; make the \
                 deltas anew and feed them from the start"
            ),
            Some(last) if epoch > last + 1 => format!(
                "epoch {epoch} after {last}: the edges of the epochs between are missing; feed them first, or make the \
                 deltas anew"
            ),
            None if epoch > 0 && fed.is_none() => format!(
                "epoch {epoch} is the first that these deltas see: the edges of epochs 0 to {} are missing; feed what \
                 was there before without a number, then go on",
                epoch - 1
            ),
            _ => return Ok(false),
        };
        Err(errors::raise(Kind::StateLost, &problem))
    }

    /// Begins the epoch of what was noted; what the one before changed is forgotten.
    fn begin(&self, py: Python<'_>, epoch: Option<u64>, relations: Vec<String>) {
        locked(py, &self.state, |state| {
            state.deltas.begin();
            (state.held, state.last, state.fed) = (epoch, epoch.or(state.last), Some(relations));
        });
    }

    /// The number of the epoch that is held.
    #[getter]
    fn epoch(&self, py: Python<'_>) -> Option<u64> {
        locked(py, &self.state, |state| state.held)
    }

    /// What the epoch changed, from the start.
    #[pyo3(signature = (rows=8192))]
    fn changes(&self, py: Python<'_>, rows: usize) -> GraphChanges {
        let cursor = locked(py, &self.state, |state| state.deltas.cursor());
        let found = Found {
            cursor: Some(cursor),
            columns: vec![Vec::new(); self.schema.fields().len() - 1],
            diffs: Vec::new(),
        };
        GraphChanges {
            ids: self.ids,
            schema: self.schema.clone(),
            state: self.state.clone(),
            rows: rows.max(1),
            found: Mutex::new(found),
        }
    }

    /// The columns of what has changed.
    #[getter]
    fn schema(&self) -> Schema {
        Schema::new(self.schema.clone())
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(errors::no_pickle("GraphDeltas", "make one where the edges come"))
    }
}

/// The matches that an epoch changed, a batch at a time: those that went (diff -1), then those that came (1).
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct GraphChanges {
    ids: Ids,
    schema: Arc<ArrowSchema>,
    state: Arc<Mutex<State>>,
    rows: usize,
    found: Mutex<Found>,
}

/// Rows that wait for their batch to be full.
struct Found {
    /// None: there are no more.
    cursor: Option<Cursor>,
    columns: Vec<Vec<u32>>,
    diffs: Vec<i8>,
}

/// Nodes that are looked at between two looks at the clock.
const STEPS: usize = 1024;

impl GraphChanges {
    /// Searches until a batch is full, the end has come, or time is over: then None.
    fn look(&self, wait: Duration) -> Result<Option<Option<Batch>>, Trouble> {
        let deadline = Instant::now() + wait;
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        let Found { cursor, columns, diffs } = &mut *found;
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let head = &state.deltas.pattern().head;
        while let Some(at) = cursor.as_mut().filter(|_| diffs.len() < self.rows) {
            let room = self.rows - diffs.len();
            let mut each = |row: &[u32], came| {
                columns.iter_mut().zip(head).for_each(|(column, at)| column.push(row[*at]));
                diffs.push(if came { 1 } else { -1 });
            };
            if !state.deltas.next(at, room, STEPS, &mut each)? {
                *cursor = None;
            } else if Instant::now() >= deadline {
                return Ok(None);
            }
        }
        if diffs.is_empty() {
            return Ok(Some(None));
        }
        let mut arrays = Vec::new();
        for column in columns.iter_mut() {
            let nodes = std::mem::take(column).into_iter().map(|node| node as usize);
            let names = &state.names;
            arrays.push(match self.ids {
                Ids::Signed => Arc::new(Int64Array::from_iter_values(nodes.map(|node| signed(names.ids[node])))),
                Ids::Unsigned => Arc::new(UInt64Array::from_iter_values(nodes.map(|node| names.ids[node]))) as ArrayRef,
                Ids::Text => Arc::new(LargeStringArray::from_iter_values(nodes.map(|node| &*names.names[node]))),
            });
        }
        arrays.push(Arc::new(Int8Array::from(std::mem::take(diffs))));
        let batch = Batch::try_new(self.schema.clone(), arrays).map_err(Trouble::Arrow)?;
        Ok(Some(Some(batch)))
    }
}

#[pymethods]
impl GraphChanges {
    /// The next rows; None at the end.
    fn next(&self, py: Python<'_>) -> PyResult<Option<RecordBatch>> {
        Ok(enter(py, None, |wait| self.look(wait))?.flatten().map(RecordBatch::new))
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(errors::no_pickle("GraphChanges", "ship the batches"))
    }
}
