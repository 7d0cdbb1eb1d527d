//! Late rows of all steps of a plan in one schema, for hosts that keep and send rows of one.
//!
//! Where there is one kind of them they are themselves. Of several kinds each is a struct column of its own, under the name of its
//! [`LateOutput`], and a row has one that is not null.

use std::collections::HashMap;
use std::sync::Arc;

use arrow_array::{Array, ArrayRef, RecordBatch, StructArray, new_null_array};
use arrow_schema::{ArrowError, DataType, Field, Fields, Schema, SchemaRef};

use crate::plan::{LateOutput, Plan};

/// See the module.
#[derive(Clone, Debug)]
pub struct LateRows {
    schema: SchemaRef,
    /// How many kinds there are.
    kinds: usize,
    /// The kind of each keyed step and side.
    of: HashMap<(usize, usize), usize>,
}

impl LateRows {
    /// Those of a plan.
    #[must_use]
    pub fn of(plan: &Plan) -> Self {
        let outputs = plan.late_outputs();
        let schema = match &outputs[..] {
            [] => plan.sources()[0].schema.clone(), // nobody asks
            [one] => one.schema.clone(),
            several => Arc::new(Schema::new(several.iter().map(column).collect::<Vec<_>>())),
        };
        let of = outputs.iter().enumerate().flat_map(|(kind, output)| output.of.iter().map(move |of| (*of, kind)));
        Self { schema, kinds: outputs.len(), of: of.collect() }
    }

    /// Columns.
    #[must_use]
    pub fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    /// Late rows of a side of a keyed step.
    ///
    /// # Errors
    /// None for rows of its schema.
    ///
    /// # Panics
    /// When the step has none.
    pub fn pack(&self, step: usize, side: usize, batch: RecordBatch) -> Result<RecordBatch, ArrowError> {
        if self.kinds <= 1 {
            return Ok(batch);
        }
        let (own, rows) = (self.of[&(step, side)], batch.num_rows());
        let columns = self.schema.fields().iter().enumerate().map(|(kind, field)| -> Result<ArrayRef, ArrowError> {
            match field.data_type() {
                DataType::Struct(fields) if kind == own => {
                    Ok(Arc::new(StructArray::try_new(fields.clone(), batch.columns().to_vec(), None)?))
                }
                other => Ok(new_null_array(other, rows)),
            }
        });
        RecordBatch::try_new(self.schema.clone(), columns.collect::<Result<_, _>>()?)
    }

    /// The kind of late rows that [`pack`](Self::pack) made, and they themselves.
    #[must_use]
    pub fn unpack(&self, batch: &RecordBatch) -> (usize, RecordBatch) {
        if self.kinds <= 1 {
            return (0, batch.clone());
        }
        let full = batch.columns().iter().position(|column| column.null_count() < column.len());
        let kind = full.expect("each row is of a kind");
        let column = batch.column(kind).as_any().downcast_ref::<StructArray>().expect("a kind is a struct");
        (kind, column.into())
    }
}

fn column(output: &LateOutput) -> Field {
    let fields: Fields =
        output.schema.fields().iter().map(|field| field.as_ref().clone().with_nullable(true)).collect();
    Field::new(&output.name, DataType::Struct(fields), true)
}
