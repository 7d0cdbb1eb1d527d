//! Rows beside the output of a plan in one schema, for hosts that keep and send rows of one: late rows, and those of side outputs.
//!
//! Where there is one kind of them they are themselves. Of several kinds each is a struct column of its own, under the name of its
//! [`LateOutput`](crate::plan::LateOutput) or [`SideOutput`](crate::plan::SideOutput), and a row has one that is not null. Kinds are numbered,
//! those of late rows first.

use std::collections::HashMap;
use std::sync::Arc;

use arrow_array::{Array, ArrayRef, RecordBatch, StructArray, new_null_array};
use arrow_schema::{ArrowError, DataType, Field, Fields, Schema, SchemaRef};

use crate::plan::Plan;

/// See the module.
#[derive(Clone, Debug)]
pub struct Beside {
    schema: SchemaRef,
    /// How many kinds there are, and how many of them are of late rows.
    kinds: (usize, usize),
    /// The kind of late rows of each keyed step and side.
    late: HashMap<(usize, usize), usize>,
    /// The kind of each side output.
    sides: HashMap<String, usize>,
}

impl Beside {
    /// Those of a plan.
    #[must_use]
    pub fn of(plan: &Plan) -> Self {
        let (lates, sides) = (plan.late_outputs(), plan.side_outputs());
        let first = lates.len();
        let late = lates.iter().enumerate().flat_map(|(kind, output)| output.of.iter().map(move |of| (*of, kind)));
        let late = late.collect();
        let named = sides.iter().enumerate().map(|(at, side)| (side.name.clone(), first + at)).collect();
        let mut kinds: Vec<(String, SchemaRef)> = lates.into_iter().map(|late| (late.name, late.schema)).collect();
        kinds.extend(sides.into_iter().map(|side| (side.name, side.schema)));
        let schema = match &kinds[..] {
            [] => plan.sources()[0].schema.clone(), // nobody asks
            [(_, schema)] => schema.clone(),
            several => {
                // A side may be called like a source.
                let mut fields: Vec<Field> = Vec::new();
                for (name, schema) in several {
                    let mut name = name.clone();
                    while fields.iter().any(|field| *field.name() == name) {
                        name.push('\'');
                    }
                    fields.push(column(&name, schema));
                }
                Arc::new(Schema::new(fields))
            }
        };
        Self { schema, kinds: (kinds.len(), first), late, sides: named }
    }

    /// Columns.
    #[must_use]
    pub fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    /// How many kinds there are.
    #[must_use]
    pub fn kinds(&self) -> usize {
        self.kinds.0
    }

    /// How many kinds of late rows there are: the first ones.
    #[must_use]
    pub fn late_kinds(&self) -> usize {
        self.kinds.1
    }

    /// The kind of the late rows of a side of a keyed step.
    ///
    /// # Panics
    /// When the step has none.
    #[must_use]
    pub fn late(&self, step: usize, side: usize) -> usize {
        self.late[&(step, side)]
    }

    /// The kind of the rows of a side output.
    ///
    /// # Panics
    /// When the plan has none of that name.
    #[must_use]
    pub fn side(&self, name: &str) -> usize {
        self.sides[name]
    }

    /// Rows of a kind.
    ///
    /// # Errors
    /// None for rows of its schema.
    pub fn pack(&self, own: usize, batch: RecordBatch) -> Result<RecordBatch, ArrowError> {
        if self.kinds() <= 1 {
            return Ok(batch);
        }
        let rows = batch.num_rows();
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

    /// The kind of what [`pack`](Self::pack) made, of at least one row.
    ///
    /// # Panics
    /// When it has no rows.
    #[must_use]
    pub fn kind(&self, batch: &RecordBatch) -> usize {
        if self.kinds() <= 1 {
            return 0;
        }
        let full = batch.columns().iter().position(|column| column.null_count() < column.len());
        full.expect("each row is of a kind")
    }

    /// The kind of what [`pack`](Self::pack) made, and the rows themselves.
    #[must_use]
    pub fn unpack(&self, batch: &RecordBatch) -> (usize, RecordBatch) {
        let kind = self.kind(batch);
        if self.kinds() <= 1 {
            return (kind, batch.clone());
        }
        let column = batch.column(kind).as_any().downcast_ref::<StructArray>().expect("a kind is a struct");
        (kind, column.into())
    }
}

fn column(name: &str, schema: &Schema) -> Field {
    let fields: Fields = schema.fields().iter().map(|field| field.as_ref().clone().with_nullable(true)).collect();
    Field::new(name, DataType::Struct(fields), true)
}
