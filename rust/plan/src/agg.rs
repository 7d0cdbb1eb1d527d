//! Aggregates: what each function accepts and returns, and the columns of accumulators that compute it.
//!
//! Nulls are skipped: `sum`, `min`, `max` and `mean` of no value are null; `count` without a column counts rows, with one its valid values.
//! Integer sums are exact in 128 bits and checked when a value is emitted, so an overflow depends on the data alone, never on workers or
//! arrival order. Float sums follow arrival order in their last bits. Minima and maxima order floats totally, NaN above everything.

use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::{Float32Type, Float64Type};
use arrow_array::{
    Array, ArrayRef, Decimal128Array, Float32Array, Float64Array, Int64Array, RecordBatch, UInt64Array, new_null_array,
};
use arrow_buffer::{NullBuffer, ScalarBuffer};
use arrow_row::{RowConverter, SortField};
use arrow_schema::{ArrowError, DataType};

use crate::acc::{Input, Kind};
use crate::bytes::{ByteColumn, byte_array};
use crate::column::{self, Codes};
use crate::error::{OpError, StepName};
use crate::record::Records;
use crate::row_format;

/// An aggregate function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Function {
    /// Rows, or valid values of a column.
    Count,
    /// Sum: Int64, UInt64, Float64 or Decimal128(38).
    Sum,
    /// Least value, of the column's type.
    Min,
    /// Greatest value, of the column's type.
    Max,
    /// Mean as Float64.
    Mean,
}

impl Function {
    /// The function of this name.
    pub fn parse(name: &str) -> Option<Self> {
        Some(match name {
            "count" => Self::Count,
            "sum" => Self::Sum,
            "min" => Self::Min,
            "max" => Self::Max,
            "mean" => Self::Mean,
            _ => return None,
        })
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Count => "count",
            Self::Sum => "sum",
            Self::Min => "min",
            Self::Max => "max",
            Self::Mean => "mean",
        }
    }
}

/// One aggregate of a step with its column resolved.
#[derive(Clone, Debug, PartialEq)]
pub struct Aggregate {
    /// Name of the output column.
    pub name: String,
    /// The function.
    pub function: Function,
    /// Input column, for all but a plain count.
    pub column: Option<usize>,
    /// Type of the input column.
    pub input: Option<DataType>,
    /// Type of the output column.
    pub output: DataType,
    pub(crate) kind: Kind,
}

impl Aggregate {
    /// Resolves a function over a column type. `Err` says in words what the function needs.
    pub(crate) fn resolve(
        name: &str,
        function: Function,
        column: Option<(usize, &DataType)>,
    ) -> Result<Self, &'static str> {
        use DataType::*;
        let (kind, output) = match (function, column) {
            (Function::Count, None) => (Kind::Rows, Int64),
            (Function::Count, Some(_)) => (Kind::Valid, Int64),
            (_, None) => return Err("needs a column"),
            (Function::Sum | Function::Mean, Some((_, input))) => {
                let (kind, sum) = match input {
                    Int8 | Int16 | Int32 | Int64 => (Kind::Int { unsigned: false }, Int64),
                    UInt8 | UInt16 | UInt32 | UInt64 => (Kind::Int { unsigned: true }, UInt64),
                    Float32 | Float64 => (Kind::Float, Float64),
                    Decimal128(_, scale) => (Kind::Decimal, Decimal128(38, *scale)),
                    _ => return Err("a sum or mean needs integers, floats or a 128-bit decimal"),
                };
                (kind, if function == Function::Mean { Float64 } else { sum })
            }
            (Function::Min | Function::Max, Some((_, input))) => {
                let greatest = function == Function::Max;
                let kind = match input {
                    Dictionary(_, _) => return Err("a dictionary column: convert it to its value type first"),
                    Float32 | Float64 => Kind::Code { greatest },
                    other if column::is_integer_like(other) => Kind::Code { greatest },
                    Decimal128(_, _) => Kind::Wide { greatest },
                    other if !other.is_nested() && RowConverter::supports_fields(&[SortField::new(other.clone())]) => {
                        Kind::Bytes { greatest }
                    }
                    _ => return Err("a minimum or maximum needs a column with an order"),
                };
                (kind, input.clone())
            }
        };
        Ok(Self {
            name: name.into(),
            function,
            column: column.map(|(at, _)| at),
            input: column.map(|(_, data_type)| data_type.clone()),
            output,
            kind,
        })
    }
}

/// An aggregate at work: prepares a block's column and turns accumulators into an output column.
pub(crate) struct Aggregator {
    pub(crate) spec: Aggregate,
    /// Converter and the bytes of a null, for [`Kind::Bytes`] of values that are no byte strings.
    rows: Option<(RowConverter, Box<[u8]>)>,
}

/// Maps a float's bits to a signed integer in the same (total) order, and back: the map is its own inverse.
fn flip64(bits: i64) -> i64 {
    bits ^ (((bits >> 63) as u64) >> 1) as i64
}

fn flip32(bits: i32) -> i32 {
    bits ^ (((bits >> 31) as u32) >> 1) as i32
}

fn floats(array: &ArrayRef) -> ScalarBuffer<f64> {
    match array.data_type() {
        DataType::Float32 => array.as_primitive::<Float32Type>().values().iter().map(|&v| f64::from(v)).collect(),
        _ => array.as_primitive::<Float64Type>().values().clone(),
    }
}

impl Aggregator {
    pub(crate) fn new(spec: Aggregate) -> Result<Self, ArrowError> {
        let rows = match (spec.kind, &spec.input) {
            (Kind::Bytes { .. }, Some(input)) if !ByteColumn::supports(input) => {
                let converter = RowConverter::new(vec![SortField::new(input.clone())])?;
                let null = converter.convert_columns(&[new_null_array(input, 1)])?;
                let null = null.row(0).as_ref().into();
                Some((converter, null))
            }
            _ => None,
        };
        Ok(Self { spec, rows })
    }

    pub(crate) fn prepare(&self, batch: &RecordBatch) -> Result<Input, ArrowError> {
        let Some(at) = self.spec.column else { return Ok(Input::Rows) };
        let array = batch.column(at);
        let nulls = array.nulls().filter(|nulls| nulls.null_count() > 0).cloned();
        Ok(match self.spec.kind {
            Kind::Rows => Input::Rows,
            Kind::Valid => Input::Valid(array.logical_nulls()),
            Kind::Int { .. } => Input::Int(column::codes(array).expect("integers have codes")),
            Kind::Decimal | Kind::Wide { .. } => Input::Decimal(column::raw::<i128>(array), nulls),
            Kind::Float => Input::Float(floats(array), nulls),
            Kind::Bytes { .. } => match (&self.rows, ByteColumn::of(array)) {
                (Some((converter, _)), _) => {
                    Input::Ordered(converter.convert_columns(std::slice::from_ref(array))?, nulls)
                }
                (None, column) => Input::Bytes(column.expect("bytes or a converter: decided in new"), nulls),
            },
            Kind::Code { .. } => Input::Code(match array.data_type() {
                // One NaN: the greatest value of the order.
                DataType::Float32 => {
                    let ordered = |v: &f32| if v.is_nan() { i32::MAX } else { flip32(v.to_bits() as i32) };
                    let values = array.as_primitive::<Float32Type>().values().iter();
                    Codes { values: values.map(|v| i64::from(ordered(v))).collect(), nulls }
                }
                DataType::Float64 => {
                    let ordered = |v: &f64| if v.is_nan() { i64::MAX } else { flip64(v.to_bits() as i64) };
                    let values = array.as_primitive::<Float64Type>().values().iter();
                    Codes { values: values.map(ordered).collect(), nulls }
                }
                DataType::UInt64 => {
                    let mut codes = column::codes(array).expect("integers have codes");
                    codes.values = codes.values.iter().map(|&code| code ^ i64::MIN).collect();
                    codes
                }
                _ => column::codes(array).expect("resolved to a type with codes"),
            }),
        })
    }

    /// Whether it reads rows of the block, not just their number.
    pub(crate) fn reads_rows(&self) -> bool {
        self.spec.kind != Kind::Rows
    }

    /// The output column of all `records`, whose accumulator begins at word `at`.
    pub(crate) fn finish(&self, records: &Records, at: usize, step: &StepName) -> Result<ArrayRef, OpError> {
        let overflow = || OpError::Overflow {
            step: step.clone(),
            column: self.spec.name.clone(),
            data_type: self.spec.output.to_string(),
        };
        let n = || records.column(at);
        let value = || records.column(at + 1);
        let wide = || {
            value().zip(records.column(at + 2)).map(|(low, high)| (u128::from(high) << 64 | u128::from(low)) as i128)
        };
        let nulls = || {
            let nulls: NullBuffer = n().map(|n| n > 0).collect();
            Some(nulls).filter(|nulls| nulls.null_count() > 0)
        };
        if self.spec.function == Function::Mean {
            let means: Vec<f64> = match (self.spec.kind, &self.spec.input) {
                (Kind::Decimal, Some(DataType::Decimal128(_, scale))) => {
                    let unit = 10f64.powi(i32::from(*scale));
                    wide().zip(n()).map(|(sum, n)| sum as f64 / unit / n as f64).collect()
                }
                (Kind::Float, _) => value().zip(n()).map(|(sum, n)| f64::from_bits(sum) / n as f64).collect(),
                _ => wide().zip(n()).map(|(sum, n)| sum as f64 / n as f64).collect(),
            };
            return Ok(Arc::new(Float64Array::new(means.into(), nulls())));
        }
        Ok(match self.spec.kind {
            Kind::Rows | Kind::Valid => Arc::new(Int64Array::new(n().map(|n| n as i64).collect(), None)),
            Kind::Int { unsigned: false } => {
                let sums: Option<Vec<i64>> = wide().map(|sum| i64::try_from(sum).ok()).collect();
                Arc::new(Int64Array::new(sums.ok_or_else(overflow)?.into(), nulls()))
            }
            Kind::Int { unsigned: true } => {
                let sums: Option<Vec<u64>> = wide().map(|sum| u64::try_from(sum).ok()).collect();
                Arc::new(UInt64Array::new(sums.ok_or_else(overflow)?.into(), nulls()))
            }
            Kind::Decimal => {
                let limit = 10i128.pow(38);
                if wide().any(|sum| !(-limit < sum && sum < limit)) {
                    return Err(overflow());
                }
                let array = Decimal128Array::new(wide().collect(), nulls());
                Arc::new(array.with_data_type(self.spec.output.clone()))
            }
            Kind::Wide { .. } => {
                let array = Decimal128Array::new(wide().collect(), nulls());
                Arc::new(array.with_data_type(self.spec.output.clone()))
            }
            Kind::Float => Arc::new(Float64Array::new(value().map(f64::from_bits).collect(), nulls())),
            Kind::Code { .. } => match &self.spec.output {
                DataType::Float32 => {
                    let values = value().map(|code| f32::from_bits(flip32(code as i32) as u32));
                    Arc::new(Float32Array::new(values.collect(), nulls()))
                }
                DataType::Float64 => {
                    let values = value().map(|code| f64::from_bits(flip64(code as i64) as u64));
                    Arc::new(Float64Array::new(values.collect(), nulls()))
                }
                DataType::UInt64 => {
                    let values = value().map(|code| code as i64 ^ i64::MIN).collect();
                    column::from_codes(&DataType::UInt64, values, nulls())?
                }
                other => column::from_codes(other, value().map(|code| code as i64).collect(), nulls())?,
            },
            Kind::Bytes { .. } => match &self.rows {
                Some((converter, null)) => {
                    let rows = value().map(|word| if word == 0 { null } else { records.blob(word) });
                    row_format::columns(converter, rows)?.remove(0)
                }
                None => byte_array(&self.spec.output, value().map(|word| (word != 0).then(|| records.blob(word))))?,
            },
        })
    }
}
