//! Graphs: edges read from text, indices, and searches for patterns in them.
//!
//! Numbers keep their Arrow type. A search is threads of the core (`penstock_graph::crew`); the handle
//! waits for them through [`enter`], and closing it, or dropping it, stops and joins them.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use arrow_array::builder::{LargeStringBuilder, UInt64Builder};
use arrow_array::cast::AsArray;
use arrow_array::types::{Int64Type, UInt64Type};
use arrow_array::{Array, ArrayRef, Int8Array, Int64Array, LargeStringArray, RecordBatch as Batch, UInt64Array};
use arrow_schema::{DataType, Field, Schema as ArrowSchema};
use penstock_graph::cliques::{self, Orientation};
use penstock_graph::crew::{Counting, Crew, Done, Matches, Next};
use penstock_graph::delta::Deltas;
use penstock_graph::domain::{Domain, signed, text, turned};
use penstock_graph::text::{Edge, EdgeText, Ids as TextIds};
use penstock_graph::{Builder, GraphError, Index, Loops, Pattern, Query, Repeats, Rows, Unit, file, units};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arrow::{RecordBatch, Schema, import_batch};
use crate::aside;
use crate::enter::{enter, timeout};
use crate::errors::{self, Kind, Problem};
use crate::fork::Owner;

/// What nodes are called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ids {
    Signed,
    Unsigned,
    Text,
}

impl Ids {
    fn read(name: &str) -> PyResult<Self> {
        match name {
            "signed" => Ok(Self::Signed),
            "unsigned" => Ok(Self::Unsigned),
            "text" => Ok(Self::Text),
            _ => Err(errors::raise(Kind::Config, &format!("ids {name:?}: one of signed, unsigned and text"))),
        }
    }

    fn of(index: &Index) -> Self {
        match index.domain {
            Domain::Numbers(_) => Self::Unsigned,
            Domain::Signed(_) => Self::Signed,
            Domain::Texts { .. } => Self::Text,
        }
    }

    fn arrow(self) -> DataType {
        match self {
            Self::Signed => DataType::Int64,
            Self::Unsigned => DataType::UInt64,
            Self::Text => DataType::LargeUtf8,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Signed => "signed",
            Self::Unsigned => "unsigned",
            Self::Text => "text",
        }
    }
}

/// A finished detached part of a call.
fn done<T>(outcome: Result<T, GraphError>) -> PyResult<T> {
    outcome.map_err(|error| errors::from_graph(&error))
}

/// Reads an edge list piece by piece into record batches of two columns.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct GraphText {
    ids: TextIds,
    reader: Mutex<EdgeText>,
}

#[pymethods]
impl GraphText {
    #[new]
    fn new(place: &str, ids: &str) -> PyResult<Self> {
        let ids = if Ids::read(ids)? == Ids::Text { TextIds::Texts } else { TextIds::Numbers };
        Ok(Self { ids, reader: Mutex::new(EdgeText::new(place, ids)) })
    }

    /// The edges of the next piece of the text; `last` says that no other follows.
    #[pyo3(signature = (text, last=false))]
    fn read(&self, py: Python<'_>, text: &[u8], last: bool) -> PyResult<RecordBatch> {
        let read = || {
            let mut reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner);
            let (mut from, mut to): (Vec<u64>, Vec<u64>) = Default::default();
            let mut names = [LargeStringBuilder::new(), LargeStringBuilder::new()];
            let mut each = |edge: Edge<'_>| {
                match edge {
                    Edge::Numbers(a, b) => {
                        from.push(a);
                        to.push(b);
                    }
                    Edge::Texts(a, b) => {
                        names[0].append_value(a);
                        names[1].append_value(b);
                    }
                }
                Ok(())
            };
            reader.push(text, &mut each)?;
            if last {
                reader.finish(&mut each)?;
            }
            let columns: [ArrayRef; 2] = match self.ids {
                TextIds::Numbers => [Arc::new(UInt64Array::from(from)), Arc::new(UInt64Array::from(to))],
                TextIds::Texts => names.map(|mut names| Arc::new(names.finish()) as ArrayRef),
            };
            Ok(columns)
        };
        let [from, to] = done(py.detach(read))?;
        let batch = Batch::try_from_iter([("src", from), ("dst", to)]).map_err(|error| errors::arrow(&error))?;
        Ok(RecordBatch::new(batch))
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(errors::no_pickle("GraphText", "read the file where it is needed"))
    }
}

/// The first two columns of a batch, checked to be nodes of that kind without nulls.
fn ends(ids: Ids, name: &str, edges: &Bound<'_, PyAny>) -> PyResult<(ArrayRef, ArrayRef)> {
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
        if let Some(row) = (0..column.len()).find(|&row| column.is_null(row)).filter(|_| column.null_count() > 0) {
            let message = format!(
                "relation {name:?}: column {:?} is null in row {row}: an edge has two nodes; filter such rows out",
                field.name()
            );
            return Err(errors::raise(Kind::Schema, &message));
        }
    }
    Ok((from, to))
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
        let outcome = py.detach(|| {
            let mut builder = self.builder.lock().unwrap_or_else(PoisonError::into_inner);
            builder.as_mut().map(work)
        });
        done(outcome.ok_or(Problem::Closed("GraphBuilder"))?)
    }
}

#[pymethods]
impl GraphBuilder {
    #[new]
    fn new(ids: &str) -> PyResult<Self> {
        let ids = Ids::read(ids)?;
        let builder = match ids {
            Ids::Signed => Builder::signed(),
            Ids::Unsigned => Builder::numbers(),
            Ids::Text => Builder::texts(),
        };
        Ok(Self { ids, builder: Mutex::new(Some(builder)) })
    }

    /// Names a relation and says what happens to its self-loops (keep, drop, refuse) and repeated edges (drop, refuse).
    fn relation(&self, py: Python<'_>, name: &str, self_loops: &str, repeated: &str) -> PyResult<()> {
        let loops = match self_loops {
            "keep" => Loops::Keep,
            "drop" => Loops::Drop,
            "refuse" => Loops::Refuse,
            _ => {
                let message = format!("self_loops={self_loops:?} must be \"keep\", \"drop\" or \"refuse\"");
                return Err(errors::raise(Kind::Config, &message));
            }
        };
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
        self.with(py, |builder| match self.ids {
            Ids::Signed => builder.signed_in(
                name,
                from.as_primitive::<Int64Type>().values(),
                to.as_primitive::<Int64Type>().values(),
            ),
            Ids::Unsigned => builder.numbers_in(
                name,
                from.as_primitive::<UInt64Type>().values(),
                to.as_primitive::<UInt64Type>().values(),
            ),
            Ids::Text => {
                let (from, to) = (from.as_string::<i64>(), to.as_string::<i64>());
                (0..from.len()).try_for_each(|row| builder.text_in(name, from.value(row), to.value(row)))
            }
        })
    }

    /// Builds the index; the builder is spent. `shape`: both directions, forward only, or undirected and oriented by
    /// degree or degeneracy.
    fn finish(&self, py: Python<'_>, shape: &str) -> PyResult<GraphIndex> {
        let work: fn(Builder) -> Result<Index, GraphError> = match shape {
            "both" => Builder::finish,
            "forward" => Builder::finish_forward,
            "degree" => |builder| builder.finish_oriented(Orientation::Degree),
            "degeneracy" => |builder| builder.finish_oriented(Orientation::Degeneracy),
            _ => {
                let message = format!("{shape:?}: one of \"degree\" and \"degeneracy\"");
                return Err(errors::raise(Kind::Config, &message));
            }
        };
        let taken = self.builder.lock().unwrap_or_else(PoisonError::into_inner).take();
        let builder = taken.ok_or(Problem::Closed("GraphBuilder"))?;
        let index = done(aside::once(py, "GraphBuilder", move || work(builder))?)?;
        Ok(GraphIndex { index: Arc::new(index) })
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(errors::no_pickle("GraphBuilder", "build the index, save it and open the file"))
    }
}

/// Relations ready to be searched: memory of this process, or a file that all processes of the host share.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct GraphIndex {
    index: Arc<Index>,
}

impl GraphIndex {
    fn query(&self, pattern: &str, order: Option<Vec<String>>) -> PyResult<Query> {
        let pattern = Pattern::parse(pattern).map_err(|error| errors::from_graph(&error.into()))?;
        let order = order.as_ref().map(|order| order.iter().map(String::as_str).collect::<Vec<_>>());
        done(Query::new(self.index.clone(), &pattern, order.as_deref()))
    }
}

#[pymethods]
impl GraphIndex {
    /// Maps a file that `save` wrote.
    #[staticmethod]
    fn open(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        let index = done(aside::once(py, "GraphIndex", move || file::open(&path))?)?;
        Ok(Self { index: Arc::new(index) })
    }

    /// Writes the index to a file, which appears at once and whole.
    fn save(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        let index = self.index.clone();
        done(aside::once(py, "GraphIndex", move || file::save(&index, &path))?)
    }

    /// What nodes are: signed, unsigned or text.
    #[getter]
    fn ids(&self) -> &'static str {
        Ids::of(&self.index).name()
    }

    /// Whether it is an undirected graph, oriented: matches are sets, whose nodes ascend.
    #[getter]
    fn sets(&self) -> bool {
        self.index.labels.is_some()
    }

    /// How many nodes all relations name.
    #[getter]
    fn nodes(&self) -> usize {
        self.index.nodes()
    }

    /// How many edges each relation has, by name.
    #[getter]
    fn relations(&self) -> Vec<(String, usize)> {
        let relations = self.index.relations.iter();
        relations.map(|relation| (relation.name.clone(), relation.forward.view().targets.len())).collect()
    }

    /// The order in which the attributes of a pattern are bound.
    #[pyo3(signature = (pattern, order=None))]
    fn order(&self, py: Python<'_>, pattern: &str, order: Option<Vec<String>>) -> PyResult<Vec<String>> {
        py.detach(|| self.query(pattern, order)).map(|query| query.order().to_vec())
    }

    /// Cuts the work of a pattern into about `parts` pieces of like size.
    #[pyo3(signature = (pattern, parts, order=None))]
    fn units(
        &self,
        py: Python<'_>,
        pattern: &str,
        parts: usize,
        order: Option<Vec<String>>,
    ) -> PyResult<Vec<(u32, u32, u32, u32)>> {
        let query = py.detach(|| self.query(pattern, order))?;
        let units = aside::once(py, "GraphIndex", move || units::split(&query, parts))?;
        Ok(units.into_iter().map(|unit| (unit.from.0, unit.from.1, unit.to.0, unit.to.1)).collect())
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(errors::no_pickle("GraphIndex", "save it and open the file where it is needed"))
    }
}

enum Work {
    Count(Counting),
    Rows(Matches),
}

/// Threads that search an index for a pattern: a count, or rows as they are found.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct GraphSearch {
    owner: Owner,
    query: Query,
    schema: Arc<ArrowSchema>,
    work: Mutex<Option<Work>>,
}

impl GraphSearch {
    /// One look at the work, waiting at most as long as the closure does.
    fn look<T>(&self, look: impl FnOnce(&Work) -> Result<T, GraphError>) -> Result<T, PyErr> {
        let work = self.work.lock().unwrap_or_else(PoisonError::into_inner);
        match work.as_ref() {
            Some(work) => look(work).map_err(|error| errors::from_graph(&error)),
            None => Err(Problem::Closed("GraphSearch").into()),
        }
    }

    fn batch(&self, rows: &Rows) -> Result<Batch, arrow_schema::ArrowError> {
        let places = rows.places(&self.query, self.query.index().labels.is_some());
        let columns = places.iter().map(|column| match &self.query.index().domain {
            Domain::Signed(ids) => {
                let ids = ids.get();
                let column = column.iter().map(|&place| signed(ids[place as usize]));
                Arc::new(Int64Array::from_iter_values(column)) as ArrayRef
            }
            Domain::Numbers(ids) => {
                let ids = ids.get();
                let mut numbers = UInt64Builder::with_capacity(column.len());
                column.iter().for_each(|&place| numbers.append_value(ids[place as usize]));
                Arc::new(numbers.finish())
            }
            Domain::Texts { ends, bytes } => {
                let (ends, bytes) = (ends.get(), bytes.get());
                let column = column.iter().map(|&place| String::from_utf8_lossy(text(ends, bytes, place)));
                Arc::new(LargeStringArray::from_iter_values(column))
            }
        });
        Batch::try_new(self.schema.clone(), columns.collect())
    }
}

#[pymethods]
impl GraphSearch {
    #[new]
    #[pyo3(signature = (index, pattern, *, count, order=None, workers=1, batches=64, batch_size=1024, rows=8192, in_order=false, unit=None))]
    #[expect(clippy::too_many_arguments, reason = "they are the options of one call")]
    fn new(
        py: Python<'_>,
        index: &GraphIndex,
        pattern: &str,
        count: bool,
        order: Option<Vec<String>>,
        workers: usize,
        batches: usize,
        batch_size: usize,
        rows: usize,
        in_order: bool,
        unit: Option<(u32, u32, u32, u32)>,
    ) -> PyResult<Self> {
        let query = py.detach(|| index.query(pattern, order))?;
        let unit = unit.map(|(root, place, end, cut)| Unit { from: (root, place), to: (end, cut) });
        if let Some(unit) = unit.filter(|unit| unit.to > Unit::whole(&query).to) {
            return Err(errors::raise(Kind::Value, &format!("{unit:?} is not part of this search")));
        }
        let crew = Crew { workers, batches, batch_size, rows, in_order, unit };
        let of = Ids::of(&index.index).arrow();
        let fields = query.columns().iter().map(|name| Field::new(name, of.clone(), false)).collect::<Vec<_>>();
        let start = || match count {
            true => Counting::start(&query, &crew).map(Work::Count),
            false => Matches::start(&query, &crew).map(Work::Rows),
        };
        let work = done(py.detach(start))?;
        let schema = Arc::new(ArrowSchema::new(fields));
        Ok(Self { owner: Owner::here(), query, schema, work: Mutex::new(Some(work)) })
    }

    /// Waits for the end of a count; None when `timeout` (seconds) is over.
    #[pyo3(signature = (timeout=None))]
    fn count<'py>(&self, py: Python<'py>, timeout: Option<f64>) -> PyResult<Option<Bound<'py, PyDict>>> {
        self.owner.check(py, "GraphSearch")?;
        let waited = enter(py, self::timeout(timeout)?, |wait| {
            self.look(|work| match work {
                Work::Count(counting) => counting.wait(wait),
                Work::Rows(_) => Ok(None),
            })
        })?;
        waited.map(|done| shown(py, done)).transpose()
    }

    /// The next rows, or at the end what a count tells; None when `timeout` (seconds) is over.
    #[pyo3(signature = (timeout=None))]
    fn next<'py>(
        &self,
        py: Python<'py>,
        timeout: Option<f64>,
    ) -> PyResult<(Option<RecordBatch>, Option<Bound<'py, PyDict>>)> {
        self.owner.check(py, "GraphSearch")?;
        let waited = enter(py, self::timeout(timeout)?, |wait| {
            let next = self.look(|work| match work {
                Work::Rows(matches) => matches.next_in(wait),
                Work::Count(_) => Ok(Next::Nothing),
            })?;
            Ok::<_, PyErr>(match next {
                Next::Rows(rows) => Some(Ok(self.batch(&rows).map_err(|error| errors::arrow(&error))?)),
                Next::End(done) => Some(Err(done)),
                Next::Nothing => None,
            })
        })?;
        match waited {
            Some(Ok(batch)) => Ok((Some(RecordBatch::new(batch)), None)),
            Some(Err(done)) => Ok((None, Some(shown(py, done)?))),
            None => Ok((None, None)),
        }
    }

    /// How many values of the first attribute are behind, and of how many.
    fn progress(&self, py: Python<'_>) -> PyResult<(u64, u64)> {
        self.owner.check(py, "GraphSearch")?;
        py.detach(|| {
            self.look(|work| match work {
                Work::Count(counting) => Ok(counting.progress()),
                Work::Rows(matches) => Ok(matches.progress()),
            })
        })
    }

    /// Stops and joins the threads. Harmless when done twice.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.owner.check(py, "GraphSearch")?;
        let work = self.work.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(work));
        Ok(())
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(errors::no_pickle("GraphSearch", "ship the pattern and the file of the index"))
    }
}

impl Drop for GraphSearch {
    fn drop(&mut self) {
        if !self.owner.is_here() {
            // Its threads exist in the parent only: nothing to join here.
            std::mem::forget(self.work.get_mut().unwrap_or_else(PoisonError::into_inner).take());
        }
    }
}

fn shown(py: Python<'_>, done: Done) -> PyResult<Bound<'_, PyDict>> {
    let facts = PyDict::new(py);
    facts.set_item("count", done.count)?;
    facts.set_item("prefixes", done.prefixes)?;
    facts.set_item("admitted_maximum", done.admitted_maximum)?;
    facts.set_item("batches_maximum", done.batches_maximum)?;
    Ok(facts)
}

/// Nodes numbered as they first come.
#[derive(Default)]
struct Names {
    numbers: HashMap<u64, u32>,
    ids: Vec<u64>,
    texts: HashMap<Arc<str>, u32>,
    names: Vec<Arc<str>>,
}

impl Names {
    fn full() -> PyErr {
        errors::raise(Kind::Schema, "more than 2^32 - 1 nodes: deltas cannot number them")
    }

    fn number(&mut self, id: u64) -> PyResult<u32> {
        if let Some(&node) = self.numbers.get(&id) {
            return Ok(node);
        }
        let node = u32::try_from(self.ids.len()).ok().filter(|node| *node < u32::MAX).ok_or_else(Self::full)?;
        self.numbers.insert(id, node);
        self.ids.push(id);
        Ok(node)
    }

    fn text(&mut self, name: &str) -> PyResult<u32> {
        if let Some(&node) = self.texts.get(name) {
            return Ok(node);
        }
        let node = u32::try_from(self.names.len()).ok().filter(|node| *node < u32::MAX).ok_or_else(Self::full)?;
        let name = Arc::<str>::from(name);
        self.texts.insert(name.clone(), node);
        self.names.push(name);
        Ok(node)
    }
}

/// Changes of edges to changes of the matches of a pattern.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct GraphDeltas {
    ids: Ids,
    schema: Arc<ArrowSchema>,
    state: Mutex<(Deltas, Names)>,
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
        let state = Mutex::new((Deltas::new(&pattern), Names::default()));
        Ok(Self { ids, schema: Arc::new(ArrowSchema::new(fields)), state })
    }

    /// Notes edges that come (`times` above 0) or go (below) in the epoch under way.
    fn change(&self, name: &str, edges: &Bound<'_, PyAny>, times: i64) -> PyResult<()> {
        let (from, to) = ends(self.ids, name, edges)?;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (deltas, names) = &mut *state;
        let mut nodes = |column: &ArrayRef, row: usize| match self.ids {
            Ids::Signed => names.number(turned(column.as_primitive::<Int64Type>().value(row))),
            Ids::Unsigned => names.number(column.as_primitive::<UInt64Type>().value(row)),
            Ids::Text => names.text(column.as_string::<i64>().value(row)),
        };
        for row in 0..from.len() {
            let (from, to) = (nodes(&from, row)?, nodes(&to, row)?);
            done(deltas.change(name, from, to, times))?;
        }
        Ok(())
    }

    /// Forgets what was noted in the epoch under way.
    fn discard(&self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).0.discard();
    }

    /// Ends the epoch: matches that went (diff -1), then those that came (1).
    fn commit(&self, py: Python<'_>) -> PyResult<Vec<RecordBatch>> {
        let work = || {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            let (deltas, names) = &mut *state;
            let head = deltas.pattern().head.clone();
            let (mut columns, mut diffs) = (vec![Vec::<u32>::new(); head.len()], Vec::new());
            deltas.commit(&mut |row, came| {
                columns.iter_mut().zip(&head).for_each(|(column, at)| column.push(row[*at]));
                diffs.push(if came { 1_i8 } else { -1 });
            });
            let mut batches = Vec::new();
            for first in (0..diffs.len()).step_by(1 << 16) {
                let rows = first..diffs.len().min(first + (1 << 16));
                let column = |column: &Vec<u32>| -> ArrayRef {
                    let nodes = column[rows.clone()].iter().map(|&node| node as usize);
                    match self.ids {
                        Ids::Signed => {
                            Arc::new(Int64Array::from_iter_values(nodes.map(|node| signed(names.ids[node]))))
                        }
                        Ids::Unsigned => Arc::new(UInt64Array::from_iter_values(nodes.map(|node| names.ids[node]))),
                        Ids::Text => {
                            Arc::new(LargeStringArray::from_iter_values(nodes.map(|node| &*names.names[node])))
                        }
                    }
                };
                let mut arrays = columns.iter().map(column).collect::<Vec<_>>();
                arrays.push(Arc::new(Int8Array::from(diffs[rows.clone()].to_vec())));
                batches.push(Batch::try_new(self.schema.clone(), arrays)?);
            }
            Ok(batches)
        };
        let batches = py.detach(work).map_err(|error| errors::arrow(&error))?;
        Ok(batches.into_iter().map(RecordBatch::new).collect())
    }

    /// The columns of what `commit` gives.
    #[getter]
    fn schema(&self) -> Schema {
        Schema::new(self.schema.clone())
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(errors::no_pickle("GraphDeltas", "make one where the edges come"))
    }
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
