//! Columns to Python objects and back, for steps that take one row at a time.
//!
//! The common types (integers, floats, booleans, strings, binaries) are converted here, in one loop per column; every
//! other type goes through pyarrow (`to_pylist`, `pa.array`), so that dates, decimals, lists and structs look as they do
//! there. A NaN becomes one and the same object each time: as a key of a dict it then equals itself.

use std::sync::Arc;

use arrow_array::builder::{BooleanBuilder, GenericByteBuilder, PrimitiveBuilder};
use arrow_array::cast::AsArray;
use arrow_array::types::{
    ArrowPrimitiveType, BinaryType, ByteArrayType, Float16Type, Float32Type, Float64Type, Int8Type, Int16Type,
    Int32Type, Int64Type, LargeBinaryType, LargeUtf8Type, UInt8Type, UInt16Type, UInt32Type, UInt64Type, Utf8Type,
};
use arrow_array::{Array, ArrayRef, OffsetSizeTrait, RecordBatch as Batch};
use arrow_data::ArrayData;
use arrow_schema::{DataType, Field, Schema};
use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBool, PyFloat, PyInt, PyList, PyTuple};

use crate::arrow::{RecordBatch, import_array};

/// The values of a column as a list; step and column are named where that fails.
///
/// # Errors
/// A `SchemaError` for a value that Python's types do not hold, such as a date behind the year 9999.
pub(crate) fn to_list<'py>(
    py: Python<'py>,
    (step, name): (&str, &str),
    column: &ArrayRef,
) -> PyResult<Bound<'py, PyList>> {
    match column.data_type() {
        DataType::Int8 => integers::<Int8Type>(py, column),
        DataType::Int16 => integers::<Int16Type>(py, column),
        DataType::Int32 => integers::<Int32Type>(py, column),
        DataType::Int64 => integers::<Int64Type>(py, column),
        DataType::UInt8 => integers::<UInt8Type>(py, column),
        DataType::UInt16 => integers::<UInt16Type>(py, column),
        DataType::UInt32 => integers::<UInt32Type>(py, column),
        DataType::UInt64 => integers::<UInt64Type>(py, column),
        DataType::Float16 => floats::<Float16Type>(py, column),
        DataType::Float32 => floats::<Float32Type>(py, column),
        DataType::Float64 => floats::<Float64Type>(py, column),
        DataType::Boolean => PyList::new(py, column.as_boolean().iter().collect::<Vec<_>>()),
        DataType::Utf8 => list(py, column.as_string::<i32>().iter()),
        DataType::LargeUtf8 => list(py, column.as_string::<i64>().iter()),
        DataType::Utf8View => list(py, column.as_string_view().iter()),
        DataType::Binary => list(py, column.as_binary::<i32>().iter()),
        DataType::LargeBinary => list(py, column.as_binary::<i64>().iter()),
        _ => {
            let field = Field::new("c", column.data_type().clone(), true);
            let batch = Batch::try_new(Arc::new(Schema::new(vec![field])), vec![column.clone()])
                .map_err(|error| crate::errors::arrow(&error))?;
            let batch = pyarrow(py)?.call_method1("record_batch", (RecordBatch::new(batch),))?;
            let values = batch.call_method1("column", (0,))?.call_method0("to_pylist").map_err(|error| {
                if !error.is_instance_of::<PyOverflowError>(py) && !error.is_instance_of::<PyValueError>(py) {
                    return error;
                }
                let text = format!(
                    "{step}: column {name:?} of type {} has a value that Python's types do not hold ({}): filter it out or cast the column \
                     before the step",
                    column.data_type(),
                    error.value(py),
                );
                let told = crate::errors::raise(crate::errors::Kind::Schema, &text);
                told.set_cause(py, Some(error));
                told
            });
            Ok(values?.cast_into::<PyList>()?)
        }
    }
}

fn list<'py, T: IntoPyObject<'py>>(
    py: Python<'py>,
    values: impl ExactSizeIterator<Item = Option<T>>,
) -> PyResult<Bound<'py, PyList>> {
    PyList::new(py, values)
}

fn integers<'py, T>(py: Python<'py>, column: &ArrayRef) -> PyResult<Bound<'py, PyList>>
where
    T: ArrowPrimitiveType,
    T::Native: IntoPyObject<'py>,
{
    let column = column.as_primitive::<T>();
    match column.null_count() {
        0 => PyList::new(py, column.values().iter().copied()),
        _ => PyList::new(py, column.iter()),
    }
}

fn floats<'py, T>(py: Python<'py>, column: &ArrayRef) -> PyResult<Bound<'py, PyList>>
where
    T: ArrowPrimitiveType,
    T::Native: Into<f64>,
{
    static NAN: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let nan = NAN.get_or_try_init(py, || Ok::<_, PyErr>(py.import("math")?.getattr("nan")?.unbind()))?;
    let value = |value: Option<T::Native>| -> PyResult<Bound<'py, PyAny>> {
        match value.map(Into::<f64>::into) {
            None => Ok(py.None().into_bound(py)),
            Some(value) if value.is_nan() => Ok(nan.bind(py).clone()),
            Some(value) => Ok(value.into_pyobject(py)?.into_any()),
        }
    };
    PyList::new(py, column.as_primitive::<T>().iter().map(value).collect::<PyResult<Vec<_>>>()?)
}

/// The column as one of keys: -0.0 is the key 0.0, which the dict of states would otherwise have as the first row has it. Others, and those
/// that need no change, are shared.
pub(crate) fn one_zero(column: &ArrayRef) -> ArrayRef {
    fn of<T: ArrowPrimitiveType>(column: &ArrayRef, zero: T::Native) -> ArrayRef
    where
        T::Native: Into<f64>,
    {
        let values = column.as_primitive::<T>();
        let is_other = |value: T::Native| {
            let value: f64 = value.into();
            value == 0.0 && value.is_sign_negative()
        };
        match values.values().iter().any(|&value| is_other(value)) {
            true => Arc::new(values.unary::<_, T>(|value| if is_other(value) { zero } else { value })),
            false => column.clone(),
        }
    }
    match column.data_type() {
        DataType::Float16 => of::<Float16Type>(column, <Float16Type as ArrowPrimitiveType>::Native::ZERO),
        DataType::Float32 => of::<Float32Type>(column, 0.0),
        DataType::Float64 => of::<Float64Type>(column, 0.0),
        _ => column.clone(),
    }
}

/// pyarrow, imported once.
pub(crate) fn pyarrow(py: Python<'_>) -> PyResult<&Bound<'_, PyAny>> {
    static MODULE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    MODULE
        .get_or_try_init(py, || Ok::<_, PyErr>(py.import("pyarrow")?.into_any().unbind()))
        .map(|module| module.bind(py))
}

/// `penstock._wholes`, imported once.
fn wholes(py: Python<'_>) -> PyResult<&Bound<'_, PyAny>> {
    static MODULE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    MODULE
        .get_or_try_init(py, || Ok::<_, PyErr>(py.import("penstock._wholes")?.into_any().unbind()))
        .map(|module| module.bind(py))
}

/// Why rows do not fit a schema.
pub(crate) enum Misfit {
    /// A row is not a tuple of as many values as there are columns.
    Width {
        /// The row, and why not.
        reason: String,
        /// Which row it is.
        place: usize,
    },
    /// A value has no place in its column.
    Value {
        /// Name and type of the column.
        column: String,
        /// The value, and why not.
        reason: String,
        /// Which row it is in, where one alone is at fault.
        place: Option<usize>,
    },
    /// Something else failed.
    Other(PyErr),
}

impl Misfit {
    /// The reason in words.
    pub(crate) fn reason(&self) -> String {
        match self {
            Misfit::Width { reason, .. } => reason.clone(),
            Misfit::Value { column, reason, .. } => {
                format!("column {column} cannot hold what the step put out: {reason}")
            }
            Misfit::Other(error) => error.to_string(),
        }
    }

    /// The place of the row that does not fit.
    pub(crate) fn place(&self) -> Option<usize> {
        match self {
            Misfit::Width { place, .. } => Some(*place),
            Misfit::Value { place, .. } => *place,
            Misfit::Other(_) => None,
        }
    }

    fn of(field: &Field, reason: String) -> Self {
        Misfit::Value { column: described(field), reason, place: None }
    }
}

impl From<PyErr> for Misfit {
    fn from(error: PyErr) -> Self {
        Misfit::Other(error)
    }
}

/// Rows (a list of tuples) as a batch of `schema`.
pub(crate) fn from_rows(rows: &Bound<'_, PyList>, schema: &Arc<Schema>) -> Result<Batch, Misfit> {
    let width = schema.fields().len();
    let mut tuples = Vec::with_capacity(rows.len());
    for (place, row) in rows.iter().enumerate() {
        match row.cast_into::<PyTuple>() {
            Ok(row) if row.len() == width => tuples.push(row),
            Ok(row) => {
                let shown = short(row.as_any());
                let reason = format!(
                    "the step put out {shown}, a row of {} values where its schema has {width} columns",
                    row.len()
                );
                return Err(Misfit::Width { reason, place });
            }
            Err(error) => {
                let row = error.into_inner();
                let (shown, hint) = (short(&row), undeclared(&row));
                let reason = format!("the step put out {shown} as a row; rows are tuples{hint}");
                return Err(Misfit::Width { reason, place });
            }
        }
    }
    let py = rows.py();
    let hold = |at: usize, field: &Arc<Field>, rows: &[Bound<'_, PyTuple>]| {
        let column = from_values(py, field, rows.iter().map(|row| row.get_item(at)))?;
        let reason = match () {
            () if !field.is_nullable() && column.null_count() > 0 => "None, and it is NOT NULL",
            () if has_null_inside(&column) => "None inside, where its type is NOT NULL",
            () => return Ok(column),
        };
        Err(Misfit::of(field, reason.to_owned()))
    };
    let mut columns = Vec::with_capacity(width);
    for (at, field) in schema.fields().iter().enumerate() {
        match hold(at, field, &tuples) {
            Ok(column) => columns.push(column),
            // Which row it is costs nothing where all fit.
            Err(Misfit::Value { column, mut reason, .. }) => {
                let alone = |(place, row)| Some((place, hold(at, field, std::slice::from_ref(row)).err()?));
                let found = tuples.iter().enumerate().find_map(alone);
                let place = found.as_ref().map(|(place, _)| *place);
                if let Some((place, misfit)) = found {
                    if let Misfit::Value { reason: alone, .. } = misfit {
                        reason = alone;
                    }
                    if width > 1 {
                        reason += &format!(", in the row {}", short(tuples[place].as_any()));
                    }
                }
                return Err(Misfit::Value { column, reason, place });
            }
            Err(misfit) => return Err(misfit),
        }
    }
    let options = arrow_array::RecordBatchOptions::new().with_row_count(Some(tuples.len()));
    Batch::try_new_with_options(schema.clone(), columns, &options)
        .map_err(|error| Misfit::Other(crate::errors::arrow(&error)))
}

/// What helps whoever puts out rows for a side output that the step does not declare.
fn undeclared(row: &Bound<'_, PyAny>) -> String {
    let output = (crate::errors::type_name(row) == "penstock._sides.Side").then(|| row.getattr("name").ok()).flatten();
    output.map_or_else(String::new, |output| {
        format!("; the step declares no side outputs: add sides={{{}: \"...\"}} with its columns", short(&output))
    })
}

/// Whether a nested column has a null where its type allows none: pyarrow makes such columns, and they come in as they are.
pub(crate) fn has_null_inside(column: &ArrayRef) -> bool {
    fn is_wrong(data: &ArrayData) -> bool {
        data.validate_nulls().is_err() || data.child_data().iter().any(is_wrong)
    }
    column.data_type().is_nested() && is_wrong(&column.to_data())
}

fn short(value: &Bound<'_, PyAny>) -> String {
    let text = value.repr().map_or_else(|_| crate::errors::type_name(value), |text| text.to_string());
    if text.chars().count() <= 80 { text } else { text.chars().take(77).chain("...".chars()).collect() }
}

type Values<'a, 'py> = &'a mut dyn ExactSizeIterator<Item = PyResult<Bound<'py, PyAny>>>;

fn from_values<'py>(
    py: Python<'py>,
    field: &Arc<Field>,
    mut values: impl ExactSizeIterator<Item = PyResult<Bound<'py, PyAny>>>,
) -> Result<ArrayRef, Misfit> {
    let values: Values<'_, 'py> = &mut values;
    match field.data_type() {
        DataType::Int8 => primitives::<Int8Type>(field, values),
        DataType::Int16 => primitives::<Int16Type>(field, values),
        DataType::Int32 => primitives::<Int32Type>(field, values),
        DataType::Int64 => primitives::<Int64Type>(field, values),
        DataType::UInt8 => primitives::<UInt8Type>(field, values),
        DataType::UInt16 => primitives::<UInt16Type>(field, values),
        DataType::UInt32 => primitives::<UInt32Type>(field, values),
        DataType::UInt64 => primitives::<UInt64Type>(field, values),
        DataType::Float32 => singles(field, values),
        DataType::Float64 => doubles(field, values),
        DataType::Boolean => {
            let mut builder = BooleanBuilder::with_capacity(values.len());
            for value in values {
                let value = value?;
                builder.append_option(convert(field, &value, |value| value.extract::<bool>())?);
            }
            Ok(Arc::new(builder.finish()))
        }
        DataType::Utf8 => texts::<Utf8Type>(field, values),
        DataType::LargeUtf8 => texts::<LargeUtf8Type>(field, values),
        DataType::Binary => binaries::<BinaryType>(field, values),
        DataType::LargeBinary => binaries::<LargeBinaryType>(field, values),
        kind => {
            let values = PyList::new(py, values.collect::<PyResult<Vec<_>>>()?)?;
            let kind = pyarrow(py)?.call_method1(
                "schema",
                (crate::arrow::Schema::new(Arc::new(Schema::new(vec![Field::new("c", kind.clone(), true)]))),),
            )?;
            let kind = kind.call_method1("field", (0,))?.getattr("type")?;
            let cut = || -> PyResult<Option<(usize, String)>> {
                wholes(py)?.call_method1("first_cut", (&kind, &values))?.extract()
            };
            let refused = |(place, reason): (usize, String)| -> Result<ArrayRef, Misfit> {
                Err(Misfit::of(field, format!("{}, which {reason}", short(&values.get_item(place)?))))
            };
            let told = |error: PyErr| Misfit::of(field, error.value(py).to_string());
            // There is a value of maps at which pyarrow ends the process.
            let is_seen = has_maps(field.data_type());
            if is_seen && let Some(found) = cut().map_err(told)? {
                return refused(found);
            }
            let array = match pyarrow(py)?.call_method1("array", (&values, &kind)) {
                Ok(array) => array,
                Err(error) => match cut() {
                    Ok(Some(found)) if !is_seen => return refused(found),
                    // Of one value it is that.
                    _ if values.len() == 1 => {
                        let reason = format!("{} ({})", short(&values.get_item(0)?), error.value(py));
                        return Err(Misfit::of(field, reason));
                    }
                    _ => return Err(told(error)),
                },
            };
            match if is_seen { None } else { cut()? } {
                Some(found) => refused(found),
                None => Ok(import_array(&array)?),
            }
        }
    }
}

/// Whether values of a type are maps, or hold some.
fn has_maps(kind: &DataType) -> bool {
    match kind {
        DataType::Map(..) => true,
        DataType::Struct(fields) => fields.iter().any(|field| has_maps(field.data_type())),
        DataType::List(field)
        | DataType::LargeList(field)
        | DataType::ListView(field)
        | DataType::LargeListView(field)
        | DataType::FixedSizeList(field, _) => has_maps(field.data_type()),
        _ => false,
    }
}

fn described(field: &Field) -> String {
    format!("{:?} ({})", field.name(), penstock_plan::ddl(field.data_type()))
}

/// None for None, else what `extract` makes of the value.
fn convert<'a, 'py, T>(
    field: &Field,
    value: &'a Bound<'py, PyAny>,
    extract: impl FnOnce(&'a Bound<'py, PyAny>) -> PyResult<T>,
) -> Result<Option<T>, Misfit> {
    if value.is_none() {
        return Ok(None);
    }
    extract(value)
        .map(Some)
        .map_err(|error| Misfit::of(field, format!("{} ({})", short(value), error.value(value.py()))))
}

/// Whether this is True or False, which Python and numpy make numbers of without a word.
fn is_truth(value: &Bound<'_, PyAny>) -> bool {
    value.is_instance_of::<PyBool>()
        || !(value.is_exact_instance_of::<PyInt>() || value.is_exact_instance_of::<PyFloat>())
            && matches!(&*crate::errors::type_name(value), "numpy.bool" | "numpy.bool_")
}

fn primitives<'py, T>(field: &Field, values: Values<'_, 'py>) -> Result<ArrayRef, Misfit>
where
    T: ArrowPrimitiveType,
    T::Native: FromPyObjectOwned<'py>,
{
    let mut builder = PrimitiveBuilder::<T>::with_capacity(values.len());
    for value in values {
        let value = value?;
        let native = convert(field, &value, |value| match is_truth(value) {
            true => Err(PyTypeError::new_err("not a number")),
            false => value.extract::<T::Native>().map_err(Into::into),
        })?;
        builder.append_option(native);
    }
    Ok(Arc::new(builder.finish()))
}

/// The double of each number, of what is no float the nearest one, but for whole numbers that are none and for finite ones beyond all.
fn doubles(field: &Field, values: Values<'_, '_>) -> Result<ArrayRef, Misfit> {
    let mut builder = PrimitiveBuilder::<Float64Type>::with_capacity(values.len());
    for value in values {
        let value = value?;
        builder.append_option(convert(field, &value, |value| match value.cast_exact::<PyFloat>() {
            Ok(float) => Ok(float.value()),
            Err(_) => double(value),
        })?);
    }
    Ok(Arc::new(builder.finish()))
}

/// See [`doubles`].
fn double(value: &Bound<'_, PyAny>) -> PyResult<f64> {
    let number = nearest(value)?;
    // Python compares whole numbers as they are; those of numpy are made floats first.
    let whole = value.getattr_opt(pyo3::intern!(value.py(), "__index__"))?.and_then(|index| index.call0().ok());
    match whole {
        Some(whole) if !whole.eq(number)? => {
            Err(PyValueError::new_err("a double does not have it exactly: give float(number)"))
        }
        _ => Ok(number),
    }
}

/// The nearest double of a number; of finite ones it is finite.
fn nearest(value: &Bound<'_, PyAny>) -> PyResult<f64> {
    if is_truth(value) {
        return Err(PyTypeError::new_err("not a number"));
    }
    let number = value.extract::<f64>()?;
    if number.is_infinite() && !value.eq(number)? {
        return Err(PyValueError::new_err("beyond what a double holds"));
    }
    Ok(number)
}

/// The nearest single of each number; one that has none but infinity is refused.
fn singles(field: &Field, values: Values<'_, '_>) -> Result<ArrayRef, Misfit> {
    let mut builder = PrimitiveBuilder::<Float32Type>::with_capacity(values.len());
    for value in values {
        let value = value?;
        let number = convert(field, &value, |value| match value.cast_exact::<PyFloat>() {
            Ok(float) => Ok(float.value()),
            Err(_) => nearest(value),
        })?;
        if number.is_some_and(|number| number.is_finite() && (number as f32).is_infinite()) {
            return Err(Misfit::of(field, format!("{} is beyond what a float holds", short(&value))));
        }
        builder.append_option(number.map(|number| number as f32));
    }
    Ok(Arc::new(builder.finish()))
}

fn texts<'py, T>(field: &Field, values: Values<'_, 'py>) -> Result<ArrayRef, Misfit>
where
    T: ByteArrayType<Native = str>,
{
    let (mut builder, mut room) = bytes_of::<T>(values.len());
    for value in values {
        let value = value?;
        let text = convert(field, &value, |value| value.extract::<&str>())?;
        room.take(field, text.map_or(0, str::len))?;
        builder.append_option(text);
    }
    Ok(Arc::new(builder.finish()))
}

fn binaries<'py, T>(field: &Field, values: Values<'_, 'py>) -> Result<ArrayRef, Misfit>
where
    T: ByteArrayType<Native = [u8]>,
{
    let (mut builder, mut room) = bytes_of::<T>(values.len());
    for value in values {
        let value = value?;
        let bytes = convert(field, &value, |value| value.extract::<&[u8]>().map_err(Into::into))?;
        room.take(field, bytes.map_or(0, <[u8]>::len))?;
        builder.append_option(bytes);
    }
    Ok(Arc::new(builder.finish()))
}

fn bytes_of<T: ByteArrayType>(values: usize) -> (GenericByteBuilder<T>, Room) {
    let most = if T::Offset::IS_LARGE { i64::MAX as usize } else { i32::MAX as usize };
    (GenericByteBuilder::with_capacity(values, values * 8), Room { most, left: most })
}

/// Bytes that a column can still take: a builder of Arrow panics beyond them.
struct Room {
    most: usize,
    left: usize,
}

impl Room {
    fn take(&mut self, field: &Field, bytes: usize) -> Result<(), Misfit> {
        self.left = self.left.checked_sub(bytes).ok_or_else(|| {
            let most = self.most;
            Misfit::of(
                field,
                format!("more than {most} bytes in one batch: give fewer rows at a time, or less of each"),
            )
        })?;
        Ok(())
    }
}
