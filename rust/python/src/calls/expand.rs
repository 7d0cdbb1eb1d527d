//! Expansions: the iterators of the user's flat maps, drawn from on demand.
//!
//! A call of Python per draw, for as many rows as there is room for. A function of rows gives tuples, which become a block here; how many are
//! drawn at once follows from their size, so that a draw of wide rows is no surge either. A function of batches gives blocks of any
//! length, which are cut here without copying.

use std::sync::Arc;

use arrow_array::RecordBatch as Batch;
use arrow_schema::SchemaRef;
use penstock_plan::{CallError, Expansion, SideRows, Spoiled};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use super::{BrokenOff, Call, attached, declared, refused_as, refused_rows};
use crate::arrow::{RecordBatch, import_batch};
use crate::convert;

/// Bytes of rows that one draw is after, and how many rows the first one takes.
const DRAW_BYTES: usize = 1 << 20;
const FIRST_DRAW: usize = 64;

/// What Python returns from a draw: what was made, inputs that are left, the failure of one with its text and the rows it had given,
/// and what goes to side outputs.
type Drawn<'py> = (Bound<'py, PyList>, u64, Option<(Option<String>, u64, Bound<'py, PyAny>)>, Bound<'py, PyList>);

/// Begins to expand a block.
pub(super) fn begin(
    call: &Arc<Call>,
    batch: &Batch,
    skip: bool,
    broken_off: BrokenOff,
) -> Result<Box<dyn Expansion>, CallError> {
    let schema = call.schema.clone().ok_or_else(|| CallError::new(&call.step, "the call declares no schema"))?;
    let (object, left, rows) = attached(&call.step, |py| {
        let object = call.object.bind(py);
        let rows: bool = object.getattr("rows")?.extract()?;
        let input = match rows {
            false => RecordBatch::new(batch.clone()).into_pyobject(py)?.into_any(),
            true => {
                let fields = batch.schema_ref().fields().iter().zip(batch.columns());
                let columns = fields.map(|(field, column)| convert::to_list(py, (&call.step, field.name()), column));
                PyList::new(py, columns.collect::<PyResult<Vec<_>>>()?)?.into_any()
            }
        };
        let begun = object.call_method1(pyo3::intern!(py, "begin"), (input, batch.num_rows(), skip))?;
        let left = begun.getattr(pyo3::intern!(py, "left"))?.extract()?;
        Ok((begun.unbind(), left, rows))
    })?;
    let most = FIRST_DRAW;
    Ok(Box::new(PyExpansion { call: call.clone(), broken_off, schema, object, left, rows, most, rest: None }))
}

struct PyExpansion {
    call: Arc<Call>,
    broken_off: BrokenOff,
    schema: SchemaRef,
    /// A `penstock._functions.expand.Expansion`.
    object: Py<PyAny>,
    left: u64,
    rows: bool,
    /// Rows that a draw may take at once, where the function is one of rows.
    most: usize,
    /// A block that was not handed on as a whole.
    rest: Option<Batch>,
}

impl Expansion for PyExpansion {
    fn left(&self) -> u64 {
        self.left.max(u64::from(self.rest.is_some()))
    }

    fn draw(&mut self, room: usize, sides: &mut SideRows) -> (Vec<Batch>, Result<(), Spoiled>) {
        if let Some(rest) = self.rest.take() {
            return (vec![self.cut(rest, room)], Ok(()));
        }
        let room_here = if self.rows { room.min(self.most) } else { room };
        match self.ask(room_here, sides) {
            Ok((Some(batch), spoiled)) => {
                if self.rows && batch.num_rows() > 0 {
                    let bytes = batch.get_array_memory_size() / batch.num_rows();
                    self.most = (DRAW_BYTES / bytes.max(1)).clamp(1, self.most * 4);
                }
                (vec![self.cut(batch, room)], spoiled)
            }
            Ok((None, spoiled)) => (Vec::new(), spoiled),
            Err(error) => (Vec::new(), Err(error.into())),
        }
    }
}

impl PyExpansion {
    /// At most `room` rows; the rest waits.
    fn cut(&mut self, batch: Batch, room: usize) -> Batch {
        if batch.num_rows() <= room {
            return batch;
        }
        self.rest = Some(batch.slice(room, batch.num_rows() - room));
        batch.slice(0, room)
    }

    fn ask(&mut self, room: usize, sides: &mut SideRows) -> Result<(Option<Batch>, Result<(), Spoiled>), CallError> {
        let step = self.call.step.as_str();
        self.broken_off.attached(step, |py| {
            let drawn = self.object.bind(py).call_method1(pyo3::intern!(py, "draw"), (room,))?;
            let (made, left, failure, beside): Drawn<'_> = drawn.cast::<PyTuple>()?.extract()?;
            self.left = left;
            self.call.take_sides(&beside, sides)?;
            let object = self.call.object.bind(py);
            let batch = match (self.rows, made.is_empty()) {
                (_, true) => None,
                (true, false) => Some(
                    convert::from_rows(&made, &self.schema).map_err(|found| refused_rows(object, &made, "", found))?,
                ),
                (false, false) => {
                    let batch = import_batch(&made.get_item(0)?)?;
                    let fitting = declared(&batch, &self.schema).map_err(|reason| {
                        let given = crate::arrow::Schema::new(batch.schema());
                        let reason = format!("what the function gave does not fit: {reason}");
                        refused_as(object, "refused_columns", (reason, given))
                    });
                    Some(fitting?)
                }
            };
            let spoiled = match failure {
                None => Ok(()),
                Some((input, before, error)) => {
                    let error = crate::errors::call_error(py, step, PyErr::from_value(error));
                    Err(Spoiled { input: input.map(|input| (input, before)), error })
                }
            };
            Ok((batch, spoiled))
        })
    }
}
