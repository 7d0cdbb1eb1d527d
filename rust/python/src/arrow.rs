//! Arrow data across the boundary: the PyCapsule interface, in both directions, without copying values.
//!
//! Owns the two data handles that Python sees, [`RecordBatch`] and [`Schema`], and the functions that take Arrow
//! data from any producer (pyarrow, polars, pandas, DuckDB). This is the only module of the project with `unsafe`: a
//! capsule is an untyped pointer, and only its name says what it points to.
//!
//! Invariants: a capsule is read only after its name was checked; a structure is *moved* out of it (its release
//! callback becomes null), so exactly one side releases it; what we export owns its buffers by reference count.
//! Values are never copied; a stream of several batches, which has to become one batch, is the only exception.
//! So a column that goes to and fro unchanged holds the one before it, each time: letting go of such a chain takes the same stack however long
//! it is, since what is let go of within a release waits for the end of that.
//!
//! These two handles are plain immutable data: unlike the others they stay usable after `fork`.
#![allow(unsafe_code)] // see the module header

use std::cell::RefCell;
use std::ffi::CStr;
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

use arrow_array::cast::AsArray;
use arrow_array::ffi::{FFI_ArrowArray, FFI_ArrowSchema, from_ffi};
use arrow_array::ffi_stream::{FFI_ArrowArrayStream, RecordBatchStreamReader};
use arrow_array::types::{Int16Type, Int32Type, Int64Type};
use arrow_array::{
    Array, ArrayRef, GenericListViewArray, GenericStringArray, OffsetSizeTrait, RecordBatch as Batch, StructArray,
    make_array,
};
use arrow_buffer::ArrowNativeType;
use arrow_data::ArrayData;
use arrow_schema::{DataType, Schema as ArrowSchema, SchemaRef};
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyTuple};

use crate::ending::Inside;
use crate::errors::{self, Kind};

const SCHEMA: &CStr = c"arrow_schema";
const ARRAY: &CStr = c"arrow_array";
const STREAM: &CStr = c"arrow_array_stream";

/// A batch of rows, handed to Arrow consumers without copying: ``pyarrow.record_batch(handle)``.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct RecordBatch {
    batch: Batch,
}

impl RecordBatch {
    pub(crate) fn new(batch: Batch) -> Self {
        Self { batch }
    }
}

#[pymethods]
impl RecordBatch {
    #[new]
    fn from_arrow(data: &Bound<'_, PyAny>) -> PyResult<Self> {
        import_batch(data).map(Self::new)
    }

    /// How many rows the batch has.
    #[getter]
    fn num_rows(&self) -> usize {
        self.batch.num_rows()
    }

    /// How many columns the batch has.
    #[getter]
    fn num_columns(&self) -> usize {
        self.batch.num_columns()
    }

    /// Bytes of memory that the batch keeps alive.
    #[getter]
    fn nbytes(&self) -> usize {
        self.batch.get_array_memory_size()
    }

    /// Names and types of the columns.
    #[getter]
    fn schema(&self) -> Schema {
        Schema::new(self.batch.schema())
    }

    fn __len__(&self) -> usize {
        self.batch.num_rows()
    }

    fn __repr__(&self) -> String {
        format!("<penstock.RecordBatch {} rows x {} columns>", self.batch.num_rows(), self.batch.num_columns())
    }

    /// The schema as an Arrow C schema capsule.
    fn __arrow_c_schema__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyCapsule>> {
        export_schema(py, self.batch.schema_ref())
    }

    /// The batch as a pair of Arrow C capsules (schema, array); `requested_schema` is only a wish and is not followed.
    #[pyo3(signature = (requested_schema=None))]
    fn __arrow_c_array__<'py>(
        &self,
        py: Python<'py>,
        requested_schema: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyTuple>> {
        let _ = requested_schema; // the interface lets a producer ignore it
        export_batch(py, &self.batch)
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(errors::no_pickle("RecordBatch", "convert it with pyarrow.record_batch(handle) and pickle that"))
    }
}

/// Names and types of columns, handed to Arrow consumers: ``pyarrow.schema(handle)``.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct Schema {
    schema: SchemaRef,
}

impl Schema {
    pub(crate) fn new(schema: SchemaRef) -> Self {
        Self { schema }
    }
}

#[pymethods]
impl Schema {
    #[new]
    fn from_arrow(data: &Bound<'_, PyAny>) -> PyResult<Self> {
        import_schema(data).map(Self::new)
    }

    /// Column names, in order.
    #[getter]
    fn names(&self) -> Vec<String> {
        self.schema.fields().iter().map(|field| field.name().clone()).collect()
    }

    fn __len__(&self) -> usize {
        self.schema.fields().len()
    }

    fn __repr__(&self) -> String {
        let columns: Vec<_> =
            self.schema.fields().iter().map(|field| format!("{}: {}", field.name(), field.data_type())).collect();
        format!("<penstock.Schema {}>", columns.join(", "))
    }

    /// The schema as an Arrow C schema capsule.
    fn __arrow_c_schema__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyCapsule>> {
        export_schema(py, &self.schema)
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(errors::no_pickle("Schema", "convert it with pyarrow.schema(handle) and pickle that"))
    }
}

/// The schema in a capsule of its own; the consumer moves it out, or the capsule releases it.
pub(crate) fn export_schema<'py>(py: Python<'py>, schema: &ArrowSchema) -> PyResult<Bound<'py, PyCapsule>> {
    let schema = FFI_ArrowSchema::try_from(schema).map_err(|error| errors::arrow(&error))?;
    PyCapsule::new_with_value(py, schema, SCHEMA)
}

/// The (schema, array) pair of one batch: a struct array whose children are the columns.
pub(crate) fn export_batch<'py>(py: Python<'py>, batch: &Batch) -> PyResult<Bound<'py, PyTuple>> {
    let schema = export_schema(py, batch.schema_ref())?;
    let data = StructArray::from(batch.clone()).into_data();
    let array = PyCapsule::new_with_value(py, export_array(&data), ARRAY)?;
    PyTuple::new(py, [schema, array])
}

type Release = unsafe extern "C" fn(*mut FFI_ArrowArray);

/// What arrow itself releases exported arrays with.
static RELEASE: OnceLock<Release> = OnceLock::new();

thread_local! {
    /// Arrays that wait for the release under way on this thread to end; none while there is none.
    static WAITING: RefCell<Option<Vec<FFI_ArrowArray>>> = const { RefCell::new(None) };
}

fn export_array(data: &ArrayData) -> FFI_ArrowArray {
    let mut array = FFI_ArrowArray::new(data);
    // SAFETY: `release` calls the callback that it takes the place of, which reads the private data that stays as it is.
    let own = unsafe { array.set_release(Some(release)) }.expect("a new array has a callback");
    RELEASE.get_or_init(|| own);
    array
}

/// Releases an array of ours, at once or at the end of the release within which it is called.
///
/// # Safety
/// As the C data interface says: `array` is one that [`export_array`] made, or to where it was moved, and nobody else uses it.
unsafe extern "C" fn release(array: *mut FFI_ArrowArray) {
    // SAFETY: the caller's promise. What is left behind is a released array, as the interface wants it.
    let mut array = unsafe { FFI_ArrowArray::from_raw(array) };
    // SAFETY: the callback is that of the same function of arrow which made this array and its private data.
    unsafe { array.set_release(RELEASE.get().copied()) };
    let mut next = Some(array);
    // A thread that ends has nobody to wait for.
    let waits = WAITING.try_with(|waiting| match &mut *waiting.borrow_mut() {
        Some(waiting) => {
            waiting.extend(next.take());
            true
        }
        none => {
            *none = Some(Vec::new());
            false
        }
    });
    if waits != Ok(false) {
        return;
    }
    while let Some(array) = next {
        drop(array);
        next = WAITING.with_borrow_mut(|waiting| waiting.as_mut().and_then(Vec::pop));
    }
    WAITING.set(None);
}

/// The pointer of a capsule whose name is `name`, refused with a TypeError otherwise.
fn pointer<T>(capsule: &Bound<'_, PyAny>, name: &CStr) -> PyResult<NonNull<T>> {
    let capsule = capsule.cast::<PyCapsule>().map_err(|_| {
        errors::raise(
            Kind::Type,
            &format!("expected a capsule named {}, got {}", name.to_string_lossy(), errors::type_name(capsule)),
        )
    })?;
    let pointer = capsule.pointer_checked(Some(name))?.cast::<T>();
    if !pointer.is_aligned() {
        return Err(errors::raise(Kind::Schema, "an Arrow capsule points to a misaligned structure"));
    }
    Ok(pointer)
}

/// Schema of any object with `__arrow_c_schema__` (a pyarrow schema, a batch, a data frame's schema).
pub(crate) fn import_schema(object: &Bound<'_, PyAny>) -> PyResult<SchemaRef> {
    if let Ok(own) = object.cast::<Schema>() {
        return Ok(own.get().schema.clone());
    }
    if let Ok(own) = object.cast::<RecordBatch>() {
        return Ok(own.get().batch.schema());
    }
    let py = object.py();
    let capsule = call(object, pyo3::intern!(py, "__arrow_c_schema__"), "an Arrow schema")?;
    let pointer = pointer::<FFI_ArrowSchema>(&capsule, SCHEMA)?;
    // SAFETY: the capsule's name, checked above, is the producer's promise that it holds an initialized ArrowSchema
    // (PyCapsule interface); `capsule` is alive for the whole use and the interpreter lock keeps others from moving
    // the structure out meanwhile. We only read it, so the capsule still owns and releases it.
    let schema = unsafe { pointer.as_ref() };
    if schema.release().is_none() {
        return Err(errors::raise(Kind::Schema, "this Arrow schema capsule was already consumed"));
    }
    ArrowSchema::try_from(schema).map(Arc::new).map_err(|error| errors::arrow(&error))
}

/// One batch from any object with `__arrow_c_array__` (of struct type) or `__arrow_c_stream__`.
pub(crate) fn import_batch(object: &Bound<'_, PyAny>) -> PyResult<Batch> {
    batch_of(object)?.map_err(|what| errors::raise(Kind::Type, &what))
}

/// As [`import_batch`]; in words what is wrong with an object that is no batch.
pub(crate) fn batch_of(object: &Bound<'_, PyAny>) -> PyResult<Result<Batch, String>> {
    if let Ok(own) = object.cast::<RecordBatch>() {
        return Ok(Ok(own.get().batch.clone()));
    }
    let py = object.py();
    if object.hasattr(pyo3::intern!(py, "__arrow_c_array__"))? {
        let (array, schema) = import_parts(object)?;
        let DataType::Struct(_) = array.data_type() else {
            let kind = array.data_type();
            return Ok(Err(format!("expected a record batch (a struct of columns), got an array of {kind}")));
        };
        if array.null_count() > 0 {
            return Err(errors::raise(Kind::Schema, "a record batch cannot have null rows"));
        }
        let rows = array.len();
        let columns = StructArray::from(array.to_data()).into_parts().1;
        let options = arrow_array::RecordBatchOptions::new().with_row_count(Some(rows));
        let batch = Batch::try_new_with_options(schema, columns, &options).map_err(|error| errors::arrow(&error))?;
        return readable(batch).map(Ok);
    }
    if object.hasattr(pyo3::intern!(py, "__arrow_c_stream__"))? {
        return readable(import_stream(object)?).map(Ok);
    }
    Ok(Err(format!(
        "expected Arrow data (an object with __arrow_c_array__ or __arrow_c_stream__, such as a pyarrow.RecordBatch), \
         got {}",
        errors::type_name(object)
    )))
}

/// The batch, when its texts are UTF-8, also those within other types: producers promise it and do not always check it, and everything after relies
/// on it.
fn readable(batch: Batch) -> PyResult<Batch> {
    for (field, column) in batch.schema_ref().fields().iter().zip(batch.columns()) {
        if let Some(row) = unreadable(column) {
            let place = if field.data_type().is_nested() { String::new() } else { format!(" in row {row}") };
            let message = format!("column {:?} holds text{place} that is not UTF-8: read it as binary", field.name());
            return Err(errors::raise(Kind::Schema, &message));
        }
    }
    Ok(batch)
}

/// The first value with text that is not UTF-8; of nested types one of its children's, also one that no row of theirs shows.
fn unreadable(column: &ArrayRef) -> Option<usize> {
    let within = |values: &ArrayRef, from: usize, to: usize| unreadable(&values.slice(from, to - from));
    match column.data_type() {
        DataType::Utf8 => unreadable_text(column.as_string::<i32>()),
        DataType::LargeUtf8 => unreadable_text(column.as_string::<i64>()),
        DataType::Utf8View => {
            let bytes = column.as_string_view().clone().to_binary_view();
            (0..bytes.len()).find(|&row| bytes.is_valid(row) && std::str::from_utf8(bytes.value(row)).is_err())
        }
        DataType::Dictionary(..) => unreadable(column.as_any_dictionary().values()),
        DataType::Struct(_) => column.as_struct().columns().iter().find_map(unreadable),
        DataType::List(_) => {
            let (lists, at) = (column.as_list::<i32>(), column.as_list::<i32>().value_offsets());
            within(lists.values(), at[0].as_usize(), at[lists.len()].as_usize())
        }
        DataType::LargeList(_) => {
            let (lists, at) = (column.as_list::<i64>(), column.as_list::<i64>().value_offsets());
            within(lists.values(), at[0].as_usize(), at[lists.len()].as_usize())
        }
        DataType::ListView(_) => unreadable_within(column.as_list_view::<i32>()),
        DataType::LargeListView(_) => unreadable_within(column.as_list_view::<i64>()),
        DataType::RunEndEncoded(ends, _) => match ends.data_type() {
            DataType::Int16 => unreadable(column.as_run::<Int16Type>().values()),
            DataType::Int32 => unreadable(column.as_run::<Int32Type>().values()),
            _ => unreadable(column.as_run::<Int64Type>().values()),
        },
        DataType::Union(fields, _) => {
            let union = column.as_union();
            fields.iter().find_map(|(id, _)| unreadable(union.child(id)))
        }
        DataType::Map(..) => {
            let maps = column.as_map();
            let at = maps.value_offsets();
            let entries: ArrayRef = Arc::new(maps.entries().clone());
            within(&entries, at[0].as_usize(), at[maps.len()].as_usize())
        }
        DataType::FixedSizeList(..) => unreadable(column.as_fixed_size_list().values()),
        _ => None,
    }
}

/// Of lists whose values may lie in any order.
fn unreadable_within<O: OffsetSizeTrait>(lists: &GenericListViewArray<O>) -> Option<usize> {
    let places = lists.offsets().iter().zip(lists.sizes()).map(|(at, size)| (at.as_usize(), size.as_usize()));
    let shown = places.filter(|(_, size)| *size > 0).map(|(at, size)| (at, at + size));
    let (from, to) = shown.reduce(|(from, to), (at, end)| (from.min(at), to.max(end)))?;
    unreadable(&lists.values().slice(from, to - from))
}

/// The first row that is not UTF-8. One pass over the bytes of all rows at once, row by row only where they are not plain ASCII.
fn unreadable_text<O: OffsetSizeTrait>(column: &GenericStringArray<O>) -> Option<usize> {
    let offsets = column.value_offsets();
    let at = |row: usize| offsets[row].as_usize();
    let bytes = column.value_data();
    if bytes[at(0)..at(column.len())].is_ascii() {
        return None;
    }
    (0..column.len()).find(|&row| column.is_valid(row) && std::str::from_utf8(&bytes[at(row)..at(row + 1)]).is_err())
}

/// One array of any type from an object with `__arrow_c_array__`.
pub(crate) fn import_array(object: &Bound<'_, PyAny>) -> PyResult<ArrayRef> {
    Ok(import_parts(object)?.0)
}

/// The array of `__arrow_c_array__`, and its schema when it is a struct (else one of no columns).
fn import_parts(object: &Bound<'_, PyAny>) -> PyResult<(ArrayRef, SchemaRef)> {
    let py = object.py();
    let pair = call(object, pyo3::intern!(py, "__arrow_c_array__"), "Arrow data")?;
    let pair = pair.cast::<PyTuple>()?;
    let (schema_capsule, array_capsule) = (pair.get_item(0)?, pair.get_item(1)?);
    let schema = pointer::<FFI_ArrowSchema>(&schema_capsule, SCHEMA)?;
    let array = pointer::<FFI_ArrowArray>(&array_capsule, ARRAY)?;
    // SAFETY: as in `import_schema`: checked name, living capsule, read only.
    let schema = unsafe { schema.as_ref() };
    // SAFETY: the checked name promises an initialized ArrowArray, valid for writes (a consumer is meant to move it);
    // the interpreter lock is held, so nobody else moves it at the same time. `from_raw` leaves a released structure
    // behind, which the capsule's destructor ignores: from here on only we release it.
    let array = unsafe { FFI_ArrowArray::from_raw(array.as_ptr()) };
    if schema.release().is_none() || array.release().is_none() {
        return Err(errors::raise(Kind::Schema, "these Arrow capsules were already consumed"));
    }
    let fields = match DataType::try_from(schema).map_err(|error| errors::arrow(&error))? {
        DataType::Struct(_) => ArrowSchema::try_from(schema).map_err(|error| errors::arrow(&error))?,
        _ => ArrowSchema::empty(),
    };
    // SAFETY: both structures come from one call of the producer, which promises that they agree (C data interface);
    // the array keeps its private data, and so all buffers, alive until the last Rust reference is dropped.
    let data = unsafe { from_ffi(array, schema) }.map_err(|error| errors::arrow(&error))?;
    Ok((make_array(data), Arc::new(fields)))
}

/// Every batch of a stream (a table, a reader, a data frame), joined to one.
fn import_stream(object: &Bound<'_, PyAny>) -> PyResult<Batch> {
    let py = object.py();
    let capsule = call(object, pyo3::intern!(py, "__arrow_c_stream__"), "an Arrow stream")?;
    let stream = pointer::<FFI_ArrowArrayStream>(&capsule, STREAM)?;
    // SAFETY: checked name, living capsule, interpreter lock held; `from_raw` moves the structure out and leaves a
    // released one, as for arrays.
    let stream = unsafe { FFI_ArrowArrayStream::from_raw(stream.as_ptr()) };
    // Its producer may wait for threads of its own that run Python, such as those of a file system.
    let inside = Inside::new();
    let read = py.detach(move || {
        let reader = RecordBatchStreamReader::try_new(stream)?;
        let schema = arrow_array::RecordBatchReader::schema(&reader);
        reader.collect::<Result<Vec<_>, _>>().map(|batches| (schema, batches))
    });
    drop(inside);
    let (schema, batches) = read.map_err(|error| errors::arrow(&error))?;
    match <[Batch; 1]>::try_from(batches) {
        Ok([batch]) => Ok(batch),
        Err(batches) => arrow_select::concat::concat_batches(&schema, &batches).map_err(|error| errors::arrow(&error)),
    }
}

fn call<'py>(
    object: &Bound<'py, PyAny>,
    method: &Bound<'py, pyo3::types::PyString>,
    wanted: &str,
) -> PyResult<Bound<'py, PyAny>> {
    if !object.hasattr(method)? {
        return Err(errors::raise(
            Kind::Type,
            &format!("expected {wanted} (an object with {method}), got {}", errors::type_name(object)),
        ));
    }
    object.call_method0(method)
}
