//! The user's Python functions, behind the plan's `Callbacks`.
//!
//! Worker threads attach to the interpreter once per call, that is once per block, and once per epoch for calls that work by
//! epochs; never once per bin. What a function may take and return, and what its exception becomes, is decided in Python
//! (`penstock._functions.calls`, `penstock._functions.state`, `penstock._functions.groups`); this module converts data and carries the exception object
//! along in [`CallError::origin`], to be raised unchanged by the call that notices the failure.
//!
//! The numbers that a host asks of every bin (keys, bytes) and the mark of an epoch are kept on this side, so that asking and
//! marking need no interpreter.
//!
//! Departure: these are counters on the native side, since asking 256 bins through the interpreter cost more than an
//! epoch's work. Bytes are estimated now and then.

mod expand;

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use arrow_array::{Array, ArrayRef, RecordBatch as Batch, UInt32Array, make_array};
use arrow_schema::{DataType, Field, FieldRef, Schema, SchemaRef};
use penstock_files::{Chunk, ChunkWriter, Entry, is_entries};
use penstock_plan::hash::hash_columns_of;
use penstock_plan::{
    CallError, Callbacks, Encoding, EpochEnd, Expansion, Extent, ForeignState, Grouped, SideRows, StateFault, States,
    Unreadable, ddl,
};
use pyo3::call::PyCallArgs;
use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyIterator, PyList, PyTuple};

use crate::arrow::{RecordBatch, import_batch, import_schema};
use crate::convert::{self, Misfit};
use crate::ending;
use crate::errors;

/// The functions of one plan, by call number.
pub(crate) struct PyCalls {
    calls: Vec<Arc<Call>>,
    stopping: Arc<AtomicBool>,
    /// `penstock._functions.calls.BrokenOff`.
    broken_off: BrokenOff,
}

struct Call {
    /// A `MapCall`, `FlatMapCall`, `StatefulCall`, `TimedCall`, `GroupStateCall` or `AggregateCall`.
    object: Py<PyAny>,
    step: String,
    schema: Option<SchemaRef>,
    stateful: Option<Stateful>,
    /// The key columns of a call with state.
    keys: Option<SchemaRef>,
    /// Names and columns of its side outputs.
    sides: Vec<(String, SchemaRef)>,
}

/// What a call with state takes.
enum Stateful {
    /// Values of these columns, row by row.
    Rows { keys: Vec<String>, columns: Vec<String> },
    /// Whole blocks; it speaks at the end of the epoch.
    Blocks,
}

/// Tells a call in Python that the host is stopping.
#[pyclass(frozen, module = "penstock._native")]
struct StopFlag(Arc<AtomicBool>);

#[pymethods]
impl StopFlag {
    fn __call__(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl PyCalls {
    /// Wraps the `calls` of `Flow.to_plan`.
    pub(crate) fn new(calls: &Bound<'_, PyAny>) -> PyResult<Arc<Self>> {
        let py = calls.py();
        let module = py.import("penstock._functions.calls")?;
        let bind = module.getattr("bind")?;
        let broken_off = BrokenOff(Arc::new(module.getattr("BrokenOff")?.unbind()));
        let stopping = Arc::new(AtomicBool::new(false));
        let flag = Bound::new(py, StopFlag(stopping.clone()))?;
        let calls = calls
            .try_iter()?
            .map(|entry| {
                let object = bind.call1((entry?.cast_into::<PyDict>()?, &flag))?;
                let schema = object.getattr("schema")?;
                let keys = object.getattr_opt("key_types")?.map(|types| key_schema(&types)).transpose()?;
                let sides = object.getattr_opt("sides")?.map(|sides| sides_of(&sides)).transpose()?;
                let stateful = match object.getattr("kind")?.extract::<String>()?.as_str() {
                    "stateful" => Some(Stateful::Rows {
                        keys: object.getattr("keys")?.extract()?,
                        columns: object.getattr("columns")?.extract()?,
                    }),
                    "groups" => Some(Stateful::Blocks),
                    _ => None,
                };
                Ok(Arc::new(Call {
                    step: object.getattr("step")?.extract()?,
                    schema: if schema.is_none() { None } else { Some(import_schema(&schema)?) },
                    stateful,
                    keys,
                    sides: sides.unwrap_or_default(),
                    object: object.unbind(),
                }))
            })
            .collect::<PyResult<_>>()?;
        Ok(Arc::new(Self { calls, stopping, broken_off }))
    }

    fn call(&self, call: usize) -> Result<&Arc<Call>, CallError> {
        self.calls.get(call).ok_or_else(|| {
            let known = self.calls.len();
            CallError::new(format!("call {call}"), format!("the plan names call {call}, but only {known} came with it"))
        })
    }
}

impl PyCalls {
    fn attached<T>(&self, step: &str, work: impl FnOnce(Python<'_>) -> PyResult<T>) -> Result<T, CallError> {
        self.broken_off.attached(step, work)
    }
}

impl Callbacks for PyCalls {
    fn map(&self, call: usize, batch: &Batch, sides: &mut SideRows) -> Result<Batch, CallError> {
        let call = self.call(call)?;
        attached(&call.step, |py| {
            let object = call.object.bind(py);
            let result = call.parted(object.call1((RecordBatch::new(batch.clone()),))?, sides)?;
            let made = import_batch(&result)?;
            match &call.schema {
                Some(schema) => declared(&made, schema).map_err(|reason| {
                    let given = crate::arrow::Schema::new(made.schema());
                    refused_as(object, "refused", (format!("what the function returned does not fit: {reason}"), given))
                }),
                None => Ok(made),
            }
        })
    }

    fn expand(&self, call: usize, batch: &Batch, skip: bool) -> Result<Box<dyn Expansion>, CallError> {
        expand::begin(self.call(call)?, batch, skip, self.broken_off.clone())
    }

    fn new_state(&self, call: usize) -> Box<dyn ForeignState> {
        let made = self.call(call).and_then(|call| {
            attached(&call.step, |py| {
                let object = call.object.bind(py).call_method0("new_state")?;
                let states = object.getattr("states")?.cast_into::<PyDict>()?.unbind();
                Ok(PyBin::new(call.clone(), object.unbind(), states))
            })
        });
        Box::new(PyState(made.map(Arc::new)))
    }

    fn apply(&self, call: usize, block: &mut Grouped<'_>, sides: &mut SideRows) -> Result<Batch, CallError> {
        let call = self.call(call)?;
        let (Some(stateful), Some(schema)) = (&call.stateful, &call.schema) else {
            return Err(CallError::new(&call.step, "the plan uses this call as a step with state, but it is a map"));
        };
        let bins = bins(&mut block.states, block.runs.iter().map(|(bin, _)| *bin))?;
        let counts: Vec<usize> = block.runs.iter().map(|(_, run)| run.len()).collect();
        // Into the order of the bins, without the interpreter.
        let rows = UInt32Array::from(block.rows.to_vec());
        let whole = bins.len() == 1 && rows.len() == block.batch.num_rows();
        let grouped = |column: &ArrayRef| match whole {
            true => Ok(column.clone()),
            false => arrow_select::take::take(column, &rows, None)
                .map_err(|error| CallError::new(&call.step, error.to_string())),
        };
        let made = match stateful {
            Stateful::Rows { keys, columns } => {
                let mut taken: Vec<(&String, ArrayRef)> = Vec::new();
                for name in keys.iter().chain(columns) {
                    if taken.iter().all(|(known, _)| *known != name) {
                        let column = block
                            .batch
                            .column_by_name(name)
                            .ok_or_else(|| CallError::new(&call.step, format!("the rows have no column {name:?}")))?;
                        taken.push((name, grouped(column)?));
                    }
                }
                self.attached(&call.step, |py| {
                    let lists = taken
                        .iter()
                        .map(|(name, column)| convert::to_list(py, (&call.step, name), column))
                        .collect::<PyResult<Vec<_>>>()?;
                    let list = |name: &String| {
                        let at = taken.iter().position(|(known, _)| *known == name).expect("taken above");
                        lists[at].clone()
                    };
                    let key = |name: &String| {
                        let (_, column) = taken.iter().find(|(known, _)| *known == name).expect("taken above");
                        let zeroed = convert::one_zero(column);
                        if Arc::ptr_eq(&zeroed, column) {
                            return Ok(list(name));
                        }
                        convert::to_list(py, (&call.step, name), &zeroed)
                    };
                    let keys = keys.iter().map(key).collect::<PyResult<Vec<_>>>()?;
                    let keys = match <[_; 1]>::try_from(keys) {
                        Ok([only]) => only,
                        Err(several) => tuples(py, rows.len(), &several)?,
                    };
                    let columns = PyList::new(py, columns.iter().map(list))?;
                    let arguments = (objects(py, &bins)?, counts.as_slice(), keys, columns);
                    let out = call.object.bind(py).call_method1(pyo3::intern!(py, "apply"), arguments)?;
                    rows_out(call.object.bind(py), &call.parted(out, sides)?, schema)
                })
            }
            Stateful::Blocks => {
                let columns = block.batch.columns().iter().map(grouped).collect::<Result<Vec<_>, _>>()?;
                let options = arrow_array::RecordBatchOptions::new().with_row_count(Some(rows.len()));
                let batch = Batch::try_new_with_options(block.batch.schema(), columns, &options)
                    .map_err(|error| CallError::new(&call.step, error.to_string()))?;
                self.attached(&call.step, |py| {
                    let arguments = (objects(py, &bins)?, counts.as_slice(), RecordBatch::new(batch));
                    call.object.bind(py).call_method1(pyo3::intern!(py, "take"), arguments)?;
                    Ok(Batch::new_empty(schema.clone()))
                })
            }
        };
        let made = made?;
        ending::attach(|py| {
            for ((bin, (number, _)), rows) in bins.iter().zip(block.runs).zip(counts) {
                bin.measure(py, rows);
                bin.tell_spent(py, *number, &mut block.states);
            }
        });
        Ok(made)
    }

    fn end_epoch(
        &self,
        call: usize,
        end: &EpochEnd,
        states: &mut States<'_>,
        sides: &mut SideRows,
    ) -> Result<Vec<Batch>, CallError> {
        let call = self.call(call)?;
        let schema = call.schema.as_ref().ok_or_else(|| CallError::new(&call.step, "the call declares no schema"))?;
        let held = states.held();
        let bins = bins(states, held.iter().copied())?;
        self.attached(&call.step, |py| {
            let object = call.object.bind(py);
            let arguments = (objects(py, &bins)?, end.before_us, end.after_us, end.clock_ms);
            let made = call.parted(object.call_method1(pyo3::intern!(py, "end_epoch"), arguments)?, sides)?;
            let batches = match &call.stateful {
                Some(Stateful::Rows { .. }) => vec![rows_out(object, &made, schema)?],
                _ => {
                    let batches = made.try_iter()?.map(|batch| {
                        declared(&import_batch(&batch?)?, schema).map_err(|reason| {
                            refused(object, &format!("what the function returned does not fit: {reason}"))
                        })
                    });
                    batches.collect::<PyResult<Vec<_>>>()?
                }
            };
            for (bin, number) in bins.iter().zip(held) {
                bin.measure(py, 1);
                bin.tell_spent(py, number, states);
            }
            Ok(batches)
        })
    }

    fn stop(&self) {
        self.stopping.store(true, Ordering::Relaxed);
    }
}

/// Names and columns of side outputs: pairs in Python.
fn sides_of(sides: &Bound<'_, PyAny>) -> PyResult<Vec<(String, SchemaRef)>> {
    let pairs = sides.try_iter()?.map(|pair| {
        let (name, schema): (String, Bound<'_, PyAny>) = pair?.extract()?;
        Ok((name, import_schema(&schema)?))
    });
    pairs.collect()
}

impl Call {
    /// What a call has made: of one with side outputs with what goes there, which is taken off.
    fn parted<'py>(&self, made: Bound<'py, PyAny>, sides: &mut SideRows) -> PyResult<Bound<'py, PyAny>> {
        if self.sides.is_empty() {
            return Ok(made);
        }
        let (rows, beside): (Bound<'py, PyAny>, Bound<'py, PyList>) = made.extract()?;
        self.take_sides(&beside, sides)?;
        Ok(rows)
    }

    /// Pairs of the number of a side and what goes there: a list of tuples, or a batch.
    fn take_sides(&self, beside: &Bound<'_, PyList>, sides: &mut SideRows) -> PyResult<()> {
        for pair in beside {
            let (number, made): (usize, Bound<'_, PyAny>) = pair.extract()?;
            let (name, schema) = &self.sides[number];
            let object = self.object.bind(beside.py());
            let told = format!("side output {name:?}: ");
            let batch = match made.cast::<PyList>() {
                Ok(rows) => {
                    convert::from_rows(rows, schema).map_err(|found| refused_rows(object, rows, &told, found))?
                }
                Err(_) => declared(&import_batch(&made)?, schema).map_err(|reason| {
                    refused(object, &format!("{told}what the function gave does not fit: {reason}"))
                })?,
            };
            sides.push((number, batch));
        }
        Ok(())
    }
}

/// Rows that a step puts out, a list of tuples, as a batch.
fn rows_out(call: &Bound<'_, PyAny>, rows: &Bound<'_, PyAny>, schema: &SchemaRef) -> PyResult<Batch> {
    let rows = rows.cast::<PyList>()?;
    convert::from_rows(rows, schema).map_err(|found| refused_rows(call, rows, "", found))
}

/// What is behind some bins.
fn bins(states: &mut States<'_>, numbers: impl Iterator<Item = u32>) -> Result<Vec<Arc<PyBin>>, CallError> {
    numbers.map(|bin| states.of::<PyState>(bin).0.clone()).collect()
}

/// The Python objects of some bins, marked where an epoch has begun.
fn objects<'py>(py: Python<'py>, bins: &[Arc<PyBin>]) -> PyResult<Bound<'py, PyList>> {
    bins.iter().try_for_each(|bin| bin.catch_up(py))?;
    PyList::new(py, bins.iter().map(|bin| bin.object.bind(py)))
}

/// The batch under the declared schema, when its columns are those: names and types, in any order. What lists call their elements does not
/// matter: Arrow leaves it to who makes them, Spark says `element` and pyarrow `item`.
pub(crate) fn declared(made: &Batch, schema: &SchemaRef) -> Result<Batch, String> {
    let mut there = made.schema_ref().fields().iter().zip(made.columns());
    if let Some((field, _)) = there.find(|(_, column)| convert::has_null_inside(column)) {
        return Err(format!("column {:?} has a null inside, where its type is NOT NULL", field.name()));
    }
    if made.schema_ref() == schema {
        return Ok(made.clone());
    }
    let mut columns = Vec::with_capacity(schema.fields().len());
    for field in schema.fields() {
        match made.column_by_name(field.name()) {
            Some(column) if column.data_type() == field.data_type() => columns.push(column.clone()),
            Some(column) => match renamed(column, field.data_type(), false) {
                Some(column) => columns.push(column),
                None => {
                    let (name, found, wanted) = (field.name(), ddl(column.data_type()), ddl(field.data_type()));
                    return Err(format!("column {name:?} has type {found}, declared is {wanted}"));
                }
            },
            None => {
                let there = names(made.schema_ref());
                return Err(format!("column {:?} is missing; there are {there}", field.name()));
            }
        }
    }
    if made.num_columns() != columns.len() {
        let (there, wanted) = (names(made.schema_ref()), names(schema));
        return Err(format!("the columns are {there}, declared are {wanted}"));
    }
    let options = arrow_array::RecordBatchOptions::new().with_row_count(Some(made.num_rows()));
    Batch::try_new_with_options(schema.clone(), columns, &options).map_err(|error| error.to_string())
}

/// The column as one of another type, if that only has other names inside of lists and maps (or, where `free`, in this struct), and no null
/// is where it allows none.
fn renamed(column: &ArrayRef, to: &DataType, free: bool) -> Option<ArrayRef> {
    use DataType::{FixedSizeList, LargeList, LargeListView, List, ListView, Map, Struct};

    let found = column.data_type();
    if found == to {
        return Some(column.clone());
    }
    let entries = matches!(to, Map(_, _));
    let fields: Vec<&FieldRef> = match (found, to) {
        (List(_), List(item))
        | (LargeList(_), LargeList(item))
        | (ListView(_), ListView(item))
        | (LargeListView(_), LargeListView(item)) => vec![item],
        (FixedSizeList(_, found), FixedSizeList(item, size)) if found == size => vec![item],
        (Map(_, found), Map(entries, sorted)) if found == sorted => vec![entries],
        (Struct(found), Struct(fields)) if found.len() == fields.len() => {
            let same = found.iter().zip(fields).all(|(found, field)| found.name() == field.name());
            (free || same).then(|| fields.iter().collect())?
        }
        _ => return None,
    };
    let data = column.to_data();
    let children = data.child_data().iter().zip(fields);
    let children =
        children.map(|(child, field)| Some(renamed(&make_array(child.clone()), field.data_type(), entries)?.to_data()));
    let children = children.collect::<Option<Vec<_>>>()?;
    data.into_builder().data_type(to.clone()).child_data(children).build().ok().map(make_array)
}

fn names(schema: &Schema) -> String {
    let names: Vec<_> = schema.fields().iter().map(|field| format!("{:?}", field.name())).collect();
    if names.is_empty() { "no columns".to_owned() } else { names.join(", ") }
}

/// The exception of a result that does not fit, made by the call itself so that it names the user's file.
fn refused(call: &Bound<'_, PyAny>, reason: &str) -> PyErr {
    refused_as(call, "refused", (reason,))
}

/// The exception of rows that do not fit, which tells what the first such row came from; `told` goes before.
fn refused_rows(call: &Bound<'_, PyAny>, rows: &Bound<'_, PyList>, told: &str, found: Misfit) -> PyErr {
    match found {
        Misfit::Other(error) => error,
        found => refused_as(call, "refused", (format!("{told}{}", found.reason()), rows, found.place())),
    }
}

fn refused_as<'py>(call: &Bound<'py, PyAny>, method: &str, arguments: impl PyCallArgs<'py>) -> PyErr {
    match call.call_method1(method, arguments) {
        Ok(error) => PyErr::from_value(error),
        Err(error) => error,
    }
}

/// Runs `work` attached; a Python exception becomes a `CallError` that carries it.
fn attached<T>(step: &str, work: impl FnOnce(Python<'_>) -> PyResult<T>) -> Result<T, CallError> {
    let outcome = ending::attach(|py| work(py).map_err(|error| errors::call_error(py, step, error)));
    outcome.unwrap_or_else(|| Err(CallError::new(step, "Python is shutting down")))
}

/// The class of what is raised where a call is given up because the host stops.
#[derive(Clone)]
struct BrokenOff(Arc<Py<PyAny>>);

impl BrokenOff {
    /// Like [`attached`], for calls that can be given up.
    fn attached<T>(&self, step: &str, work: impl FnOnce(Python<'_>) -> PyResult<T>) -> Result<T, CallError> {
        let mut broken_off = false;
        let outcome = attached(step, |py| {
            work(py).inspect_err(|error| {
                broken_off = error.value(py).is_instance(self.0.bind(py)).unwrap_or(false);
            })
        });
        outcome.map_err(|error| CallError { broken_off, ..error })
    }
}

/// State of one bin.
struct PyBin {
    call: Arc<Call>,
    /// A `penstock._functions.state.BinState`.
    object: Py<PyAny>,
    /// Its dict from key to state: the same object for ever.
    states: Py<PyDict>,
    /// An epoch has begun that the object has not been told of.
    marked: AtomicBool,
    keys: AtomicUsize,
    /// Bytes of so many keys, by the last estimate.
    estimate: (AtomicUsize, AtomicUsize),
    /// Rows until the bytes are estimated again.
    rows_left: AtomicUsize,
}

/// Rows after which the bytes of a bin are estimated again, by keys: an estimate costs about as much as 30 rows.
const SAMPLE_EVERY: usize = 16;
const SAMPLE_LEAST: usize = 1024;

impl PyBin {
    fn new(call: Arc<Call>, object: Py<PyAny>, states: Py<PyDict>) -> Self {
        let zero = AtomicUsize::default;
        let (marked, estimate) = (AtomicBool::new(false), (zero(), zero()));
        Self { call, object, states, marked, keys: zero(), estimate, rows_left: zero() }
    }

    /// Tells the object of an epoch that has begun.
    fn catch_up(&self, py: Python<'_>) -> PyResult<()> {
        match self.marked.swap(false, Ordering::Relaxed) {
            true => self.object.bind(py).call_method0(pyo3::intern!(py, "mark")).map(drop),
            false => Ok(()),
        }
    }

    /// Takes the number of keys, and now and then the bytes, after `rows` rows.
    fn measure(&self, py: Python<'_>, rows: usize) {
        let keys = self.states.bind(py).len();
        self.keys.store(keys, Ordering::Relaxed);
        let left = self.rows_left.load(Ordering::Relaxed);
        if left > rows && keys <= 2 * self.estimate.1.load(Ordering::Relaxed) {
            self.rows_left.store(left - rows, Ordering::Relaxed);
            return;
        }
        self.rows_left.store(SAMPLE_EVERY * keys + SAMPLE_LEAST, Ordering::Relaxed);
        let object = self.object.bind(py);
        match object.call_method0(pyo3::intern!(py, "bytes")).and_then(|bytes| bytes.extract()) {
            Ok(bytes) => {
                self.estimate.0.store(bytes, Ordering::Relaxed);
                self.estimate.1.store(keys, Ordering::Relaxed);
            }
            Err(error) => error.write_unraisable(py, Some(object)),
        }
    }

    /// Tells what the object has counted that calls of the function took for it alone, and has it begin again.
    fn tell_spent(&self, py: Python<'_>, number: u32, states: &mut States<'_>) {
        let (object, name) = (self.object.bind(py), pyo3::intern!(py, "spent_s"));
        let spent = object.getattr(name).and_then(|spent| spent.extract::<f64>());
        match spent.and_then(|spent| if spent > 0.0 { object.setattr(name, 0.0).map(|()| spent) } else { Ok(0.0) }) {
            Ok(spent) if spent > 0.0 => states.spend(number, (spent * 1e9) as u64),
            Ok(_) => {}
            Err(error) => error.write_unraisable(py, Some(object)),
        }
    }

    /// By what keys took at the last estimate: chunks that come and keys that go count at once.
    fn bytes(&self) -> usize {
        let (bytes, keys) = (self.estimate.0.load(Ordering::Relaxed), self.estimate.1.load(Ordering::Relaxed));
        (bytes as u128 * self.keys.load(Ordering::Relaxed) as u128 / keys.max(1) as u128) as usize
    }
}

/// Columns of these types: pyarrow's, in a list.
fn key_schema(types: &Bound<'_, PyAny>) -> PyResult<SchemaRef> {
    let py = types.py();
    let fields = types.try_iter()?.enumerate().map(|(at, kind)| Ok((at.to_string(), kind?)));
    let fields = fields.collect::<PyResult<Vec<_>>>()?;
    let schema = import_schema(&convert::pyarrow(py)?.call_method1("schema", (fields,))?)?;
    // Keys of a dictionary are its values.
    let plain = |field: &Arc<Field>| match field.data_type() {
        DataType::Dictionary(_, values) => Arc::new(field.as_ref().clone().with_data_type(values.as_ref().clone())),
        _ => field.clone(),
    };
    Ok(Arc::new(Schema::new(schema.fields().iter().map(plain).collect::<Vec<_>>())))
}

/// What [`ForeignState::encode`] knows chunks by.
const ENTRIES_SHAPE: &[u8] = b"F\x01";

/// Where an encoding of a bin is: chunks that `encode` yields, then lists of what has changed.
#[derive(Default)]
struct Place {
    begun: bool,
    chunks: Option<Py<PyIterator>>,
    changes: Option<Py<PyIterator>>,
}

impl Place {
    /// Asks the object for what the extent needs.
    fn begin(&mut self, extent: Extent, object: &Bound<'_, PyAny>) -> PyResult<()> {
        if std::mem::replace(&mut self.begun, true) {
            return Ok(());
        }
        let iterate = |made: Bound<'_, PyAny>| Ok::<_, PyErr>(PyIterator::from_object(&made)?.unbind());
        if matches!(extent, Extent::All | Extent::Marked) {
            self.chunks = Some(iterate(object.call_method1("encode", (extent == Extent::All,))?)?);
        }
        if extent != Extent::All {
            self.changes = Some(iterate(object.call_method1("changes", (extent == Extent::Anew,))?)?);
        }
        Ok(())
    }
}

impl PyBin {
    /// The next chunk of an encoding.
    fn encode(&self, extent: Extent, place: &mut Place, object: &Bound<'_, PyAny>) -> PyResult<Option<Vec<u8>>> {
        let py = object.py();
        self.catch_up(py)?;
        place.begin(extent, object)?;
        if let Some(chunks) = &place.chunks {
            if let Some(chunk) = chunks.bind(py).clone().next() {
                return Ok(Some(chunk?.cast::<PyBytes>()?.as_bytes().to_vec()));
            }
            place.chunks = None;
        }
        let Some(changes) = &place.changes else { return Ok(None) };
        let list = changes.bind(py).clone().next();
        list.map(|list| self.entries(list?.cast::<PyList>()?)).transpose()
    }

    /// A chunk of entries of a list of keys, their bytes, and those of their states.
    fn entries(&self, list: &Bound<'_, PyList>) -> PyResult<Vec<u8>> {
        let hashes = self.hashes(list)?;
        let mut writer = ChunkWriter::new(ENTRIES_SHAPE);
        for (item, hash) in list.iter().zip(hashes) {
            let (_, key, value) =
                item.extract::<(Bound<'_, PyAny>, Bound<'_, PyBytes>, Option<Bound<'_, PyBytes>>)>()?;
            let key = key.as_bytes();
            writer.push(match &value {
                Some(value) => Entry::Put { hash, key, value: value.as_bytes() },
                None => Entry::Gone { hash, key },
            });
        }
        Ok(writer.finish())
    }

    /// The hashes of the keys of a list, by which their bins were chosen.
    fn hashes(&self, list: &Bound<'_, PyList>) -> PyResult<Vec<u64>> {
        let keys = self.call.keys.as_ref().ok_or_else(|| PyRuntimeError::new_err("a call without keys has state"))?;
        let apart = keys.fields().len() != 1;
        let rows = list.iter().map(|item| {
            let key = item.cast::<PyTuple>()?.get_item(0)?;
            // The keys of groups are tuples, also of one column.
            if apart || key.is_instance_of::<PyTuple>() {
                Ok(key)
            } else {
                Ok(PyTuple::new(list.py(), [key])?.into_any())
            }
        });
        let rows = PyList::new(list.py(), rows.collect::<PyResult<Vec<_>>>()?)?;
        let batch = convert::from_rows(&rows, keys).map_err(|misfit| match misfit {
            Misfit::Other(error) => error,
            misfit => PyTypeError::new_err(format!("a key of the state does not fit its columns: {}", misfit.reason())),
        })?;
        hash_columns_of(batch.columns(), batch.num_rows()).map_err(|error| errors::arrow(&error))
    }

    /// Takes a chunk of entries, but for those that cannot be read.
    fn restore(&self, chunk: &[u8], object: &Bound<'_, PyAny>) -> PyResult<()> {
        let wrong = |what: String| Err(PyValueError::new_err(what));
        let chunk = match Chunk::parse(chunk) {
            Ok(chunk) => chunk,
            Err(damage) => return wrong(format!("the state {damage}")),
        };
        if chunk.shape() != ENTRIES_SHAPE {
            return wrong("the state is not one of a step with a function".to_owned());
        }
        let py = object.py();
        let bytes = |bytes| PyBytes::new(py, bytes);
        let mut list = Vec::new();
        for entry in chunk.entries() {
            match entry {
                Ok(Entry::Put { key, value, .. }) => list.push((bytes(key), Some(bytes(value)))),
                Ok(Entry::Gone { key, .. }) => list.push((bytes(key), None)),
                Ok(_) => return wrong("the state has an entry that no step with a function makes".to_owned()),
                Err(damage) => return wrong(format!("the state {damage}")),
            }
        }
        object.call_method1("restore", (list,)).map(drop)
    }
}

/// State of one bin, or why there is none.
struct PyState(Result<Arc<PyBin>, CallError>);

impl PyState {
    /// Runs `work` with the state; a Python exception becomes a fault that carries it.
    fn with<T>(&self, work: impl FnOnce(&PyBin, &Bound<'_, PyAny>) -> PyResult<T>) -> Result<T, StateFault> {
        let bin = self.0.as_ref().map_err(|error| StateFault::Foreign(error.clone()))?;
        attached(&bin.call.step, |py| work(bin, bin.object.bind(py))).map_err(StateFault::Foreign)
    }
}

impl ForeignState for PyState {
    fn encode(&self, encoding: &mut Encoding) -> Result<Option<Vec<u8>>, StateFault> {
        let extent = encoding.extent();
        let place = encoding.place(Place::default);
        if extent == Extent::Changed && self.0.as_ref().is_ok_and(|bin| bin.marked.load(Ordering::Relaxed)) {
            return Ok(None); // nothing was touched since the mark, of which the object has not even been told
        }
        self.with(|bin, object| bin.encode(extent, place, object))
    }

    fn absorb(&mut self, chunk: &[u8]) -> Result<(), StateFault> {
        self.with(|bin, object| {
            let py = object.py();
            bin.catch_up(py)?;
            let taken = match is_entries(chunk) {
                true => bin.restore(chunk, object).and_then(|()| object.call_method0("require").map(drop)),
                false => object.call_method1("absorb", (PyBytes::new(py, chunk),)).map(drop),
            };
            bin.measure(py, 0);
            taken
        })
    }

    fn restore(&mut self, chunk: &[u8]) -> Result<(), StateFault> {
        self.with(|bin, object| {
            bin.catch_up(object.py())?;
            let taken = bin.restore(chunk, object);
            bin.measure(object.py(), 0);
            taken
        })
    }

    fn hand_over(
        &self,
        part_of: &dyn Fn(u64) -> Option<usize>,
        parts: &mut [&mut (dyn ForeignState + 'static)],
    ) -> Result<bool, StateFault> {
        let mut takers = Vec::with_capacity(parts.len());
        for part in &*parts {
            let Some(PyState(Ok(bin))) = (&**part as &dyn Any).downcast_ref::<PyState>() else { return Ok(false) };
            takers.push(bin.clone());
        }
        self.with(|bin, object| {
            let py = object.py();
            bin.catch_up(py)?;
            let Some(entries) = object.call_method0("entries")?.extract::<Option<Bound<'_, PyList>>>()? else {
                return Ok(false);
            };
            let dealt: Vec<_> = takers.iter().map(|_| PyList::empty(py)).collect();
            for (entry, hash) in entries.iter().zip(bin.hashes(&entries)?) {
                let part = part_of(hash).and_then(|part| dealt.get(part));
                part.ok_or_else(|| PyRuntimeError::new_err("a key of the state is in none of the parts"))?
                    .append(entry)?;
            }
            for (taker, entries) in takers.iter().zip(dealt) {
                taker.catch_up(py)?;
                taker.object.bind(py).call_method1("take", (entries,))?;
                taker.measure(py, 0);
            }
            Ok(true)
        })
    }

    fn unreadable(&self) -> Result<Option<Unreadable>, StateFault> {
        self.with(|_, object| {
            let told: Option<(u64, String, String)> = object.call_method0("unreadable")?.extract()?;
            Ok(told.map(|(keys, key, reason)| Unreadable { keys, key, reason }))
        })
    }

    fn bytes(&self) -> usize {
        self.0.as_ref().map_or(0, |bin| bin.bytes())
    }

    fn keys(&self) -> usize {
        self.0.as_ref().map_or(0, |bin| bin.keys.load(Ordering::Relaxed))
    }

    fn mark(&mut self) {
        if let Ok(bin) = &self.0 {
            bin.marked.store(true, Ordering::Relaxed);
        }
    }

    fn rollback(&mut self) -> Result<(), StateFault> {
        self.with(|bin, object| {
            bin.catch_up(object.py())?;
            object.call_method0("rollback")?;
            bin.measure(object.py(), usize::MAX);
            Ok(())
        })
    }
}

/// Rows of several columns as tuples; of none, as empty ones.
fn tuples<'py>(py: Python<'py>, rows: usize, columns: &[Bound<'py, PyList>]) -> PyResult<Bound<'py, PyList>> {
    let tuples = (0..rows)
        .map(|row| {
            let values = columns.iter().map(|column| column.get_item(row)).collect::<PyResult<Vec<_>>>()?;
            pyo3::types::PyTuple::new(py, values)
        })
        .collect::<PyResult<Vec<_>>>()?;
    PyList::new(py, tuples)
}
