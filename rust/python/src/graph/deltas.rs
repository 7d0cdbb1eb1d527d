//! Changes of edges to changes of matches.
//!
//! The edges, and what the last epoch changed, are one state under one lock; whoever reads the changes takes it for a tick at
//! a time, and whoever feeds an epoch for a piece of it, between which Python looks at signals. Which epochs have been is in a
//! book with a lock of its own, so that who asks for them waits for no edges. An epoch can be read again until the next one
//! begins, so whoever failed with its rows gets them once more.
//!
//! Invariants: one call feeds an epoch from its first edge to its begin, and another one waits meanwhile; however it ends,
//! nothing of what it noted is left for the next. An epoch begins at once, in the state and in the book. Numbers of epochs come
//! from one source. Who takes both locks takes that of the book first.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use arrow_array::cast::AsArray;
use arrow_array::types::{Int64Type, UInt64Type};
use arrow_array::{Array, ArrayRef, Int8Array, Int64Array, LargeStringArray, RecordBatch as Batch, UInt64Array};
use arrow_schema::{DataType, Field, Schema as ArrowSchema};
use penstock_graph::Pattern;
use penstock_graph::delta::{Cursor, Deltas};
use penstock_graph::domain::{signed, turned};
use pyo3::prelude::*;

use crate::arrow::{RecordBatch, Schema, import_batch};
use crate::enter::{enter, locked};
use crate::errors::{self, Kind};
use crate::graph::{Ids, PIECE, Trouble, ends, let_go};

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

/// Edges, and what their nodes are called.
struct State {
    deltas: Deltas,
    names: Names,
}

/// Which epoch is held, and which have been.
#[derive(Default)]
struct Book {
    /// The thread that feeds an epoch now.
    feeds: Option<ThreadId>,
    /// How many epochs have begun.
    begun: u64,
    /// The number that the epoch held was given, if any.
    held: Option<u64>,
    /// The greatest number so far.
    last: Option<u64>,
    /// Whose numbers they are.
    source: Option<String>,
    /// The relations that the epoch held was fed for; None before the first.
    fed: Option<Vec<String>>,
}

impl Book {
    /// Whether an epoch of that number is the one that is held, so that it is only given again.
    fn expect(&self, epoch: u64, source: Option<&str>, relations: &[String]) -> Result<bool, Refused> {
        let again = self.held == Some(epoch);
        if again && relations.is_empty() {
            return Ok(true);
        }
        if self.last.is_some() && self.source.as_deref() != source {
            return Err(Refused::lost(format!(
                "epoch {epoch} comes from {}, but the epochs before came from {}: only one source of numbers can feed \
                 deltas, and a query with a new checkpoint is another one; make deltas of their own for it",
                called(source),
                called(self.source.as_deref())
            )));
        }
        if again {
            let fed = self.fed.as_deref().unwrap_or_default();
            if fed == relations {
                return Ok(true);
            }
            return Err(Refused::lost(format!(
                "epoch {epoch} has been fed for {}, and comes again for {}: epochs of one count feed deltas; feed all \
                 relations in one call",
                if fed.is_empty() { "nothing".to_owned() } else { fed.join(", ") },
                relations.join(", ")
            )));
        }
        Err(Refused::lost(match self.last {
            Some(last) if epoch <= last => format!(
                "epoch {epoch} has been: the last was {last}, and only the one fed last can be given again; make the \
                 deltas anew and feed them from the start"
            ),
            Some(last) if epoch > last + 1 => format!(
                "epoch {epoch} after {last}: the edges of the epochs between are missing; feed them first, or make the \
                 deltas anew"
            ),
            None if epoch > 0 && self.fed.is_none() => format!(
                "epoch {epoch} is the first that these deltas see: the edges of epochs 0 to {} are missing; feed what \
                 was there before without a number, then go on",
                epoch - 1
            ),
            _ => return Ok(false),
        }))
    }
}

/// Who gives numbers, for a message.
fn called(source: Option<&str>) -> &str {
    source.unwrap_or("a caller that names no source")
}

/// Why an epoch cannot be fed. It becomes an exception when the caller holds no lock.
struct Refused(Kind, String);

impl Refused {
    fn lost(problem: String) -> Self {
        Self(Kind::StateLost, problem)
    }
}

impl From<Refused> for PyErr {
    fn from(refused: Refused) -> PyErr {
        errors::raise(refused.0, &refused.1)
    }
}

/// Takes a lock. Callers are detached.
fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// This thread feeds an epoch. Whatever was noted and not begun is gone when it ends.
struct Claim<'a, 'py>(Python<'py>, &'a GraphDeltas);

impl Drop for Claim<'_, '_> {
    fn drop(&mut self) {
        let Self(py, of) = self;
        if let Some(noted) = locked(*py, &of.state, |state| state.deltas.discard()) {
            let_go(noted);
        }
        locked(*py, &of.book, |book| book.feeds = None);
    }
}

/// Edges that come or go: two columns of nodes, and how often each does.
type Noted = (ArrayRef, ArrayRef, Times);

enum Times {
    All(i64),
    Each(Int64Array),
}

/// Changes of edges to changes of the matches of a pattern.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct GraphDeltas {
    ids: Ids,
    schema: Arc<ArrowSchema>,
    book: Mutex<Book>,
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
        let state = Arc::new(Mutex::new(State { deltas: Deltas::new(&pattern), names: Names::default() }));
        Ok(Self { ids, schema: Arc::new(ArrowSchema::new(fields)), book: Mutex::default(), state })
    }

    /// Feeds an epoch and gives what it changed, and whether it is the one that is held, so that it is only given again.
    ///
    /// `edges` gives names of relations, batches, and how often their edges come (above 0) or go (below); None: the
    /// third column says it. It is not asked for an epoch that is held. What was noted is gone when anything fails; only an
    /// interrupt of what tidies up behind the begin leaves an epoch that has been fed.
    ///
    /// Raises `StateLost` when the number is neither that of the epoch held nor the next, comes from another source, or
    /// again for other relations; `StateError` when `edges` feed the deltas themselves.
    fn feed(
        &self,
        py: Python<'_>,
        epoch: Option<u64>,
        source: Option<String>,
        relations: Vec<String>,
        edges: &Bound<'_, PyAny>,
        rows: usize,
    ) -> PyResult<(GraphChanges, bool)> {
        let me = thread::current().id();
        let begins = |wait: Duration| {
            let mut book = held(&self.book);
            match book.feeds {
                Some(other) if other == me => {
                    let problem = "these deltas are being fed, and the edges that they get feed them again; feed one \
                                   epoch after the other";
                    return Err(Refused(Kind::State, problem.to_owned()));
                }
                Some(_) => {
                    drop(book);
                    thread::sleep(wait);
                    return Ok(None);
                }
                None => {}
            }
            if let Some(epoch) = epoch
                && book.expect(epoch, source.as_deref(), &relations)?
            {
                return Ok(Some(Some(held(&self.state).deltas.cursor())));
            }
            book.feeds = Some(me);
            Ok(Some(None))
        };
        if let Some(cursor) = enter(py, None, begins)?.flatten() {
            return Ok((self.given(cursor, rows), true));
        }
        let _claim = Claim(py, self);
        for noted in edges.try_iter()? {
            let (name, batch, times) = noted?.extract::<(String, Bound<'_, PyAny>, Option<i64>)>()?;
            let noted = self.read(&name, &batch, times)?;
            let mut rows = 0..0;
            enter(py, None, |_| {
                rows = rows.end..noted.0.len().min(rows.end + PIECE);
                self.note(&mut held(&self.state), &name, &noted, rows.clone())?;
                Ok::<_, Trouble>((rows.end == noted.0.len()).then_some(()))
            })?;
        }
        self.while_any(py, |deltas| deltas.prepare(PIECE))?;
        let cursor = py.detach(|| {
            let (mut book, mut state) = (held(&self.book), held(&self.state));
            state.deltas.turn();
            (book.begun, book.held, book.fed) = (book.begun + 1, epoch, Some(relations));
            if epoch.is_some() {
                (book.last, book.source) = (epoch, source);
            }
            state.deltas.cursor()
        });
        self.while_any(py, |deltas| deltas.settle(PIECE))?;
        Ok((self.given(cursor, rows), false))
    }

    /// How many epochs have been fed.
    #[getter]
    fn begun(&self, py: Python<'_>) -> u64 {
        locked(py, &self.book, |book| book.begun)
    }

    /// The number of the epoch that is held.
    #[getter]
    fn epoch(&self, py: Python<'_>) -> Option<u64> {
        locked(py, &self.book, |book| book.held)
    }

    /// What the epoch changed, from the start.
    #[pyo3(signature = (rows=8192))]
    fn changes(&self, py: Python<'_>, rows: usize) -> GraphChanges {
        self.given(locked(py, &self.state, |state| state.deltas.cursor()), rows)
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

impl GraphDeltas {
    /// Goes on as long as there is more, and looks at signals in between.
    fn while_any(&self, py: Python<'_>, mut step: impl FnMut(&mut Deltas) -> bool + Send) -> PyResult<()> {
        let ended = enter(py, None, |_| Ok::<_, Trouble>((!step(&mut held(&self.state).deltas)).then_some(())));
        ended.map(drop)
    }

    fn given(&self, cursor: Cursor, rows: usize) -> GraphChanges {
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

    fn read(&self, name: &str, edges: &Bound<'_, PyAny>, times: Option<i64>) -> PyResult<Noted> {
        let (from, to) = ends(self.ids, name, edges)?;
        if let Some(times) = times {
            return Ok((from, to, Times::All(times)));
        }
        let batch = import_batch(edges)?;
        let third = batch.columns().get(2).and_then(|column| column.as_primitive_opt::<Int64Type>());
        let Some(times) = third.filter(|times| times.null_count() == 0) else {
            let message = format!("relation {name:?}: no third column of int64 without nulls says what edges do");
            return Err(errors::raise(Kind::Schema, &message));
        };
        Ok((from, to, Times::Each(times.clone())))
    }

    fn note(&self, state: &mut State, name: &str, noted: &Noted, rows: Range<usize>) -> Result<(), Trouble> {
        let State { deltas, names } = state;
        let (from, to, times) = noted;
        let mut nodes = |column: &ArrayRef, row: usize| match self.ids {
            Ids::Signed => names.number(turned(column.as_primitive::<Int64Type>().value(row))),
            Ids::Unsigned => names.number(column.as_primitive::<UInt64Type>().value(row)),
            Ids::Text => names.text(column.as_string::<i64>().value(row)),
        };
        for row in rows {
            let (from, to) = (nodes(from, row)?, nodes(to, row)?);
            let times = match times {
                Times::All(times) => *times,
                Times::Each(times) => times.value(row),
            };
            deltas.change(name, from, to, times)?;
        }
        Ok(())
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
        let mut found = held(&self.found);
        let Found { cursor, columns, diffs } = &mut *found;
        let state = held(&self.state);
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
