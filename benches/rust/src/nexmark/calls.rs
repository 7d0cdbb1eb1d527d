//! The functions that the flows of NEXMark map blocks with, in Rust: what `penstock.workloads.nexmark.steps` does with pyarrow.
//!
//! So a plan as Python writes it runs without Python. Invariant: same rows in the same order; the bench compares what comes out.

use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::Int64Type;
use arrow_array::{ArrayRef, BooleanArray, Int64Array, RecordBatch};
use arrow_schema::{ArrowError, Schema};
use arrow_select::filter::filter_record_batch;
use penstock_plan::{CallError, Callbacks, ForeignState, SideRows};
use serde_json::Value;

use super::events::ints;

/// One function.
#[derive(Clone, Debug)]
enum Call {
    Currency,
    Auctions,
    People,
    Category,
    Average,
    /// Columns of bids that may win: what they are called, what they were.
    Valid(Vec<(String, String)>),
    /// Columns by new names, as those.
    Named(Vec<(String, String)>),
}

/// The functions of a plan by the numbers of their calls.
#[derive(Debug)]
pub(crate) struct Calls(Vec<Call>);

impl Calls {
    /// As Python tells them: an object each, of its name and, of `named`, the pairs of names.
    ///
    /// # Errors
    /// A function that is not known here.
    pub(crate) fn new(told: &Value) -> Result<Self, String> {
        let call = |one: &Value| match one["name"].as_str() {
            Some("convert_currency") => Ok(Call::Currency),
            Some("select_auctions") => Ok(Call::Auctions),
            Some("select_people") => Ok(Call::People),
            Some("select_category") => Ok(Call::Category),
            Some("average") => Ok(Call::Average),
            Some(name @ ("valid" | "named")) => serde_json::from_value(one["columns"].clone())
                .map(if name == "valid" { Call::Valid } else { Call::Named })
                .map_err(|error| format!("the columns of {one}: {error}")),
            _ => Err(format!("{one} has no twin in Rust")),
        };
        let calls = told.as_array().ok_or_else(|| format!("{told} is no list of functions"))?;
        Ok(Self(calls.iter().map(call).collect::<Result<_, _>>()?))
    }
}

impl Callbacks for Calls {
    fn map(&self, call: usize, batch: &RecordBatch, _: &mut SideRows) -> Result<RecordBatch, CallError> {
        self.0[call].map(batch).map_err(|error| CallError::new(format!("call {call}"), error.to_string()))
    }

    fn new_state(&self, call: usize) -> Box<dyn ForeignState> {
        unreachable!("the plan has no stateful call {call}")
    }
}

impl Call {
    fn map(&self, batch: &RecordBatch) -> Result<RecordBatch, ArrowError> {
        match self {
            Self::Currency => {
                let prices = ints(batch, "price").iter().map(|price| (price * 89).div_euclid(100));
                let prices: ArrayRef = Arc::new(Int64Array::from_iter_values(prices));
                let at = batch.schema().index_of("price")?;
                let mut columns = batch.columns().to_vec();
                columns[at] = prices;
                RecordBatch::try_new(batch.schema(), columns)
            }
            Self::Auctions => {
                filter_record_batch(batch, &BooleanArray::from_unary(column(batch, "auction"), |id| id % 123 == 0))
            }
            Self::People => {
                let state = batch.column_by_name("state").expect("people have one").as_string::<i32>();
                let local = BooleanArray::from_unary(state, |state| matches!(state, "OR" | "ID" | "CA"));
                named(
                    &filter_record_batch(batch, &local)?,
                    [("seller", "id"), ("name", "name"), ("city", "city"), ("state", "state")],
                )
            }
            Self::Category => {
                let found =
                    filter_record_batch(batch, &BooleanArray::from_unary(column(batch, "category"), |id| id == 10))?;
                named(&found, [("id", "id"), ("seller", "seller")])
            }
            Self::Valid(columns) => {
                let [price, reserve] = ["price", "reserve"].map(|name| column(batch, name));
                let valid = BooleanArray::from_binary(price, reserve, |price, reserve| price >= reserve);
                filter_record_batch(&renamed(batch, columns)?, &valid)
            }
            Self::Average => {
                let pairs = ints(batch, "sum_price").iter().zip(ints(batch, "n"));
                let means: ArrayRef = Arc::new(Int64Array::from_iter_values(pairs.map(|(sum, n)| sum / n)));
                let fields = batch.schema().fields().iter().cloned().collect::<Vec<_>>();
                let mean = arrow_schema::Field::new("avg_price", arrow_schema::DataType::Int64, true);
                let schema = Schema::new([fields, vec![Arc::new(mean)]].concat());
                RecordBatch::try_new(Arc::new(schema), [batch.columns(), &[means]].concat())
            }
            Self::Named(columns) => renamed(batch, columns),
        }
    }
}

fn column<'a>(batch: &'a RecordBatch, name: &str) -> &'a Int64Array {
    batch.column_by_name(name).expect("a column of the query").as_primitive::<Int64Type>()
}

fn renamed(batch: &RecordBatch, columns: &[(String, String)]) -> Result<RecordBatch, ArrowError> {
    named(batch, columns.iter().map(|(new, old)| (new.as_str(), old.as_str())))
}

/// These columns by new names.
fn named<'a>(
    batch: &RecordBatch,
    columns: impl IntoIterator<Item = (&'a str, &'a str)>,
) -> Result<RecordBatch, ArrowError> {
    let schema = batch.schema();
    let (mut fields, mut chosen) = (Vec::new(), Vec::new());
    for (new, old) in columns {
        let at = schema.index_of(old)?;
        fields.push(schema.field(at).clone().with_name(new));
        chosen.push(batch.column(at).clone());
    }
    RecordBatch::try_new(Arc::new(Schema::new(fields)), chosen)
}
