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
use arrow_row::{RowConverter, Rows, SortField};
use arrow_schema::{ArrowError, DataType};

use crate::column::{self, Codes};
use crate::error::{OpError, StateFault, StepName};
use crate::lane::Lane;
use crate::wire::{Reader, put_items};

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

/// How an aggregate is stored; the byte is part of the state format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Rows,
    Valid,
    Int { unsigned: bool },
    Decimal,
    Float,
    Code { greatest: bool },
    Bytes { greatest: bool },
}

impl Kind {
    pub(crate) fn byte(self) -> u8 {
        match self {
            Self::Rows => 1,
            Self::Valid => 2,
            Self::Int { unsigned: false } => 3,
            Self::Int { unsigned: true } => 4,
            Self::Decimal => 5,
            Self::Float => 6,
            Self::Code { greatest: false } => 7,
            Self::Code { greatest: true } => 8,
            Self::Bytes { greatest: false } => 9,
            Self::Bytes { greatest: true } => 10,
        }
    }

    fn lane(self) -> Lane {
        match self {
            Self::Rows | Self::Valid => Lane::None,
            Self::Int { .. } | Self::Decimal => Lane::I128(Vec::new()),
            Self::Float => Lane::F64(Vec::new()),
            Self::Code { .. } => Lane::I64(Vec::new()),
            Self::Bytes { .. } => Lane::Bytes(Vec::new()),
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
    /// Converter and the bytes of a null, for [`Kind::Bytes`].
    rows: Option<(RowConverter, Box<[u8]>)>,
}

/// The column of a block in the form its accumulator reads.
pub(crate) enum Input {
    Rows,
    Valid(Option<NullBuffer>),
    Int(Codes),
    Decimal(ScalarBuffer<i128>, Option<NullBuffer>),
    Float(ScalarBuffer<f64>, Option<NullBuffer>),
    Code(Codes),
    Bytes(Rows, Option<NullBuffer>),
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
            (Kind::Bytes { .. }, Some(input)) => {
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
            Kind::Decimal => Input::Decimal(column::raw::<i128>(array), nulls),
            Kind::Float => Input::Float(floats(array), nulls),
            Kind::Bytes { .. } => {
                let (converter, _) = self.rows.as_ref().expect("made in new");
                Input::Bytes(converter.convert_columns(std::slice::from_ref(array))?, nulls)
            }
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

    /// The output column of all accumulators.
    pub(crate) fn finish(&self, acc: &Acc, step: &StepName) -> Result<ArrayRef, OpError> {
        let overflow = || OpError::Overflow {
            step: step.clone(),
            column: self.spec.name.clone(),
            data_type: self.spec.output.to_string(),
        };
        let nulls = || {
            let nulls: NullBuffer = acc.n.iter().map(|&n| n > 0).collect();
            Some(nulls).filter(|nulls| nulls.null_count() > 0)
        };
        if self.spec.function == Function::Mean {
            let means: Vec<f64> = match (&acc.lane, &self.spec.input) {
                (Lane::I128(sums), Some(DataType::Decimal128(_, scale))) => {
                    let unit = 10f64.powi(i32::from(*scale));
                    sums.iter().zip(&acc.n).map(|(&sum, &n)| sum as f64 / unit / n as f64).collect()
                }
                (Lane::I128(sums), _) => sums.iter().zip(&acc.n).map(|(&sum, &n)| sum as f64 / n as f64).collect(),
                (Lane::F64(sums), _) => sums.iter().zip(&acc.n).map(|(&sum, &n)| sum / n as f64).collect(),
                _ => unreachable!("a mean keeps a sum"),
            };
            return Ok(Arc::new(Float64Array::new(means.into(), nulls())));
        }
        Ok(match (self.spec.kind, &acc.lane) {
            (Kind::Rows | Kind::Valid, _) => Arc::new(Int64Array::from_iter_values(acc.n.iter().map(|&n| n as i64))),
            (Kind::Int { unsigned: false }, Lane::I128(sums)) => {
                let sums: Option<Vec<i64>> = sums.iter().map(|&sum| i64::try_from(sum).ok()).collect();
                Arc::new(Int64Array::new(sums.ok_or_else(overflow)?.into(), nulls()))
            }
            (Kind::Int { unsigned: true }, Lane::I128(sums)) => {
                let sums: Option<Vec<u64>> = sums.iter().map(|&sum| u64::try_from(sum).ok()).collect();
                Arc::new(UInt64Array::new(sums.ok_or_else(overflow)?.into(), nulls()))
            }
            (Kind::Decimal, Lane::I128(sums)) => {
                let limit = 10i128.pow(38);
                if sums.iter().any(|sum| !(-limit < *sum && *sum < limit)) {
                    return Err(overflow());
                }
                let array = Decimal128Array::new(sums.clone().into(), nulls());
                Arc::new(array.with_data_type(self.spec.output.clone()))
            }
            (Kind::Float, Lane::F64(sums)) => Arc::new(Float64Array::new(sums.clone().into(), nulls())),
            (Kind::Code { .. }, Lane::I64(best)) => match &self.spec.output {
                DataType::Float32 => {
                    let values = best.iter().map(|&code| f32::from_bits(flip32(code as i32) as u32));
                    Arc::new(Float32Array::new(values.collect(), nulls()))
                }
                DataType::Float64 => {
                    let values = best.iter().map(|&code| f64::from_bits(flip64(code) as u64));
                    Arc::new(Float64Array::new(values.collect(), nulls()))
                }
                DataType::UInt64 => {
                    let values = best.iter().map(|&code| code ^ i64::MIN).collect();
                    column::from_codes(&DataType::UInt64, values, nulls())?
                }
                other => column::from_codes(other, best.clone(), nulls())?,
            },
            (Kind::Bytes { .. }, Lane::Bytes(best)) => {
                let (converter, null) = self.rows.as_ref().expect("made in new");
                let parser = converter.parser();
                let rows = best.iter().zip(&acc.n).map(|(best, &n)| parser.parse(if n > 0 { best } else { null }));
                converter.convert_rows(rows)?.remove(0)
            }
            _ => unreachable!("an accumulator is made by its kind"),
        })
    }
}

/// One accumulator per slot: `n` values seen and, by kind, a sum or a best value.
#[derive(Clone)]
pub(crate) struct Acc {
    kind: Kind,
    n: Vec<u64>,
    lane: Lane,
}

/// A 128-bit sum wrapped.
pub(crate) struct Wrapped;

impl Acc {
    pub(crate) fn new(kind: Kind) -> Self {
        Self { kind, n: Vec::new(), lane: kind.lane() }
    }

    /// An empty accumulator of the same kind.
    pub(crate) fn fresh(&self) -> Self {
        Self::new(self.kind)
    }

    /// Grows to `len` slots; the new ones have seen nothing.
    pub(crate) fn resize(&mut self, len: usize) {
        self.n.resize(len, 0);
        self.lane.resize(len);
    }

    /// Adds row `rows[i]` of the block to slot `slots[i]`.
    pub(crate) fn update(&mut self, input: &Input, rows: &[u32], slots: &[u32]) -> Result<(), Wrapped> {
        fn each(nulls: &Option<NullBuffer>, rows: &[u32], slots: &[u32], mut f: impl FnMut(usize, usize)) {
            let pairs = rows.iter().zip(slots).map(|(&row, &slot)| (row as usize, slot as usize));
            match nulls {
                None => pairs.for_each(|(row, slot)| f(row, slot)),
                Some(nulls) => pairs.filter(|&(row, _)| nulls.is_valid(row)).for_each(|(row, slot)| f(row, slot)),
            }
        }
        let n = &mut self.n;
        let mut wrapped = false;
        match (input, &mut self.lane, self.kind) {
            (Input::Rows, _, _) => slots.iter().for_each(|&slot| n[slot as usize] += 1),
            (Input::Valid(nulls), _, _) => each(nulls, rows, slots, |_, slot| n[slot] += 1),
            (Input::Int(codes), Lane::I128(sums), Kind::Int { unsigned }) => {
                each(&codes.nulls, rows, slots, |row, slot| {
                    let code = codes.values[row];
                    sums[slot] += if unsigned { i128::from(code as u64) } else { i128::from(code) };
                    n[slot] += 1;
                })
            }
            (Input::Decimal(values, nulls), Lane::I128(sums), _) => each(nulls, rows, slots, |row, slot| {
                let (sum, over) = sums[slot].overflowing_add(values[row]);
                wrapped |= over;
                sums[slot] = sum;
                n[slot] += 1;
            }),
            (Input::Float(values, nulls), Lane::F64(sums), _) => each(nulls, rows, slots, |row, slot| {
                sums[slot] += values[row];
                n[slot] += 1;
            }),
            (Input::Code(codes), Lane::I64(best), Kind::Code { greatest }) => {
                each(&codes.nulls, rows, slots, |row, slot| {
                    let code = codes.values[row];
                    if n[slot] == 0 || (code > best[slot]) == greatest {
                        best[slot] = code;
                    }
                    n[slot] += 1;
                })
            }
            (Input::Bytes(values, nulls), Lane::Bytes(best), Kind::Bytes { greatest }) => {
                each(nulls, rows, slots, |row, slot| {
                    let value = values.row(row);
                    let value: &[u8] = value.as_ref();
                    if n[slot] == 0 || (value > &*best[slot]) == greatest {
                        best[slot] = value.into();
                    }
                    n[slot] += 1;
                })
            }
            _ => unreachable!("input and accumulator are made by one kind"),
        }
        if wrapped { Err(Wrapped) } else { Ok(()) }
    }

    /// Merges slot `i` of `other` into slot `slots[i]`.
    pub(crate) fn merge(&mut self, other: &Self, slots: &[u32]) -> Result<(), Wrapped> {
        let mut wrapped = false;
        for (from, &slot) in slots.iter().enumerate() {
            let slot = slot as usize;
            let seen = other.n[from];
            if seen == 0 {
                continue;
            }
            match (&mut self.lane, &other.lane, self.kind) {
                (Lane::None, _, _) => {}
                (Lane::I128(sums), Lane::I128(more), _) => {
                    let (sum, over) = sums[slot].overflowing_add(more[from]);
                    wrapped |= over;
                    sums[slot] = sum;
                }
                (Lane::F64(sums), Lane::F64(more), _) => sums[slot] += more[from],
                (Lane::I64(best), Lane::I64(more), Kind::Code { greatest }) => {
                    if self.n[slot] == 0 || (more[from] > best[slot]) == greatest {
                        best[slot] = more[from];
                    }
                }
                (Lane::Bytes(best), Lane::Bytes(more), Kind::Bytes { greatest }) => {
                    if self.n[slot] == 0 || (more[from] > best[slot]) == greatest {
                        best[slot] = more[from].clone();
                    }
                }
                _ => unreachable!("accumulators of one kind"),
            }
            self.n[slot] += seen;
        }
        if wrapped { Err(Wrapped) } else { Ok(()) }
    }

    pub(crate) fn push_from(&mut self, other: &Self, slot: usize) {
        self.n.push(other.n[slot]);
        self.lane.push_from(&other.lane, slot);
    }

    pub(crate) fn copy_from(&mut self, slot: usize, other: &Self, from: usize) {
        self.n[slot] = other.n[from];
        self.lane.copy_from(slot, &other.lane, from);
    }

    pub(crate) fn append(&mut self, other: &mut Self) {
        self.n.append(&mut other.n);
        self.lane.append(&mut other.lane);
    }

    pub(crate) fn truncate(&mut self, len: usize) {
        self.n.truncate(len);
        self.lane.truncate(len);
    }

    pub(crate) fn bytes(&self) -> usize {
        self.n.capacity() * 8 + self.lane.bytes()
    }

    pub(crate) fn encoded_len(&self, slot: usize) -> usize {
        8 + self.lane.encoded_len(slot)
    }

    pub(crate) fn encode(&self, slots: std::ops::Range<usize>, out: &mut Vec<u8>) {
        put_items(out, &self.n[slots.clone()], u64::to_le_bytes);
        self.lane.encode(slots, out);
    }

    pub(crate) fn decode(kind: Kind, reader: &mut Reader<'_>, count: usize) -> Result<Self, StateFault> {
        let mut acc = Self::new(kind);
        reader.items(count, &mut acc.n, u64::from_le_bytes)?;
        acc.lane.decode(reader, count)?;
        Ok(acc)
    }
}
