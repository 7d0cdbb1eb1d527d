//! Aggregates: what each function accepts and returns, and the columns of accumulators that compute it.
//!
//! Nulls are skipped: `sum`, `min`, `max` and `mean` of no value are null; `count` without a column counts rows, with one its valid values.
//! Integer sums are exact in 128 bits and checked when a value is emitted, so an overflow depends on the data alone, never on workers or
//! arrival order. Float sums, variances and deviations follow arrival order in their last bits, as means of decimals do whose sum leaves 128 bits
//! on its way: a sum of decimals is an error there. Minima and maxima order floats totally, NaN above everything.
//!
//! What is found *by* another column (`min_by`, `max_by`, and by event time `first` and `last`) is the least or greatest pair of both: among rows of one least
//! value of the other column the least value, a null being less than all values, and for the greatest the greatest. So it does not depend on
//! the order of rows, as Spark's does there. Rows in which the other column is null do not count; there -0.0 is 0.0 and all NaNs are one.
//! Distinct values are those of keys: one zero, one NaN.

use std::cell::RefCell;
use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::{Float32Type, Float64Type};
use arrow_array::{
    Array, ArrayRef, Decimal128Array, Float32Array, Float64Array, Int64Array, RecordBatch, UInt64Array, new_null_array,
};
use arrow_buffer::{NullBuffer, ScalarBuffer};
use arrow_row::{RowConverter, SortField};
use arrow_schema::extension::{EXTENSION_TYPE_METADATA_KEY, EXTENSION_TYPE_NAME_KEY};
use arrow_schema::{ArrowError, DataType, Field, Metadata};

use crate::acc::{Input, Kind, decimals};
use crate::bytes::{ByteColumn, byte_array};
use crate::column::{self, Codes, storable};
use crate::ddl::ddl;
use crate::error::{OpError, StepName};
use crate::gather::{histogram, registers};
use crate::hash::hash_columns;
use crate::record::Records;
use crate::row_format;

/// An aggregate function.
#[derive(Clone, Copy, Debug, PartialEq)]
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
    /// The value where another column is least.
    MinBy,
    /// The value where another column is greatest.
    MaxBy,
    /// The value at the least event time.
    First,
    /// The value at the greatest event time.
    Last,
    /// Variance of a sample as Float64; null for one value.
    Variance,
    /// Variance of all there is, as Float64.
    VarPop,
    /// Square root of the variance of a sample; null for one value.
    Stddev,
    /// Square root of the variance of all there is.
    StddevPop,
    /// How many distinct values there are.
    CountDistinct,
    /// The same, about, from 2^bits registers.
    ApproxCountDistinct {
        /// 4 to 18.
        bits: u8,
    },
    /// The value with a share of all values at or below it, about, as Float64.
    ApproxQuantile {
        /// The share.
        q: f64,
        /// The relative error is at most 2^-(digits + 1); at most 16.
        digits: u8,
    },
}

/// What an option of an aggregate must be.
pub(crate) type Need = (&'static str, Box<str>, &'static str);

impl Function {
    /// The function of this name with these options; those of others are left alone. `None` if there is none.
    ///
    /// # Errors
    /// The option, its value, and what it must be.
    pub(crate) fn parse(name: &str, q: Option<f64>, error: Option<f64>) -> Option<Result<Self, Need>> {
        let wrong = |name, value: Option<f64>, need| {
            Some(Err((name, value.map_or("none".into(), |value| value.to_string().into()), need)))
        };
        Some(Ok(match name {
            "count" => Self::Count,
            "sum" => Self::Sum,
            "min" => Self::Min,
            "max" => Self::Max,
            "mean" => Self::Mean,
            "min_by" => Self::MinBy,
            "max_by" => Self::MaxBy,
            "first" => Self::First,
            "last" => Self::Last,
            "variance" => Self::Variance,
            "var_pop" => Self::VarPop,
            "stddev" => Self::Stddev,
            "stddev_pop" => Self::StddevPop,
            "count_distinct" => Self::CountDistinct,
            "approx_count_distinct" => {
                match Some(error.unwrap_or(0.02)).filter(|error| *error <= 1.0).and_then(registers::bits_for) {
                    Some(bits) => Self::ApproxCountDistinct { bits },
                    None => {
                        return wrong(
                            "error",
                            error,
                            "is at least 0.0021 and at most 1; count_distinct counts exactly",
                        );
                    }
                }
            }
            "approx_quantile" => {
                let Some(share) = q.filter(|q| (0.0..=1.0).contains(q)) else {
                    return wrong("q", q, "is a share from 0 to 1, such as 0.5");
                };
                match Some(error.unwrap_or(0.01)).filter(|error| *error <= 1.0).and_then(histogram::digits_for) {
                    Some(digits) => Self::ApproxQuantile { q: share, digits },
                    None => return wrong("error", error, "is at least 0.00001 and at most 1"),
                }
            }
            _ => return None,
        }))
    }

    /// The function as [`kept`](Self::kept) wrote it.
    pub(crate) fn read(text: &str) -> Option<Self> {
        let mut words = text.split(' ');
        let (name, mut number) = (words.next()?, || words.next()?.parse::<f64>().ok());
        let known = |function: Self| (function.kept() == text).then_some(function);
        match name {
            "approx_count_distinct" => {
                let bits = number().filter(|bits| (4.0..=18.0).contains(bits))? as u8;
                known(Self::ApproxCountDistinct { bits })
            }
            "approx_quantile" => {
                let q = number().filter(|q| (0.0..=1.0).contains(q))?;
                let digits = number().filter(|digits| (0.0..=16.0).contains(digits))? as u8;
                known(Self::ApproxQuantile { q, digits })
            }
            _ => Self::parse(text, None, None)?.ok(),
        }
    }

    /// The function with its options, as it stands in manifests.
    pub(crate) fn kept(self) -> String {
        match self {
            Self::ApproxCountDistinct { bits } => format!("approx_count_distinct {bits}"),
            Self::ApproxQuantile { q, digits } => format!("approx_quantile {q} {digits}"),
            other => other.name().into(),
        }
    }

    /// Whether it finds a value by another column.
    pub(crate) fn reads_two(self) -> bool {
        matches!(self, Self::MinBy | Self::MaxBy | Self::First | Self::Last)
    }

    /// Whether the other column is that of event time.
    pub(crate) fn is_timed(self) -> bool {
        matches!(self, Self::First | Self::Last)
    }

    /// Whether what it gives is a value of the column.
    fn gives_a_value(self) -> bool {
        matches!(self, Self::Min | Self::Max) || self.reads_two()
    }

    /// Whether its value is never null.
    pub(crate) fn is_count(self) -> bool {
        matches!(self, Self::Count | Self::CountDistinct | Self::ApproxCountDistinct { .. })
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Count => "count",
            Self::Sum => "sum",
            Self::Min => "min",
            Self::Max => "max",
            Self::Mean => "mean",
            Self::MinBy => "min_by",
            Self::MaxBy => "max_by",
            Self::First => "first",
            Self::Last => "last",
            Self::Variance => "variance",
            Self::VarPop => "var_pop",
            Self::Stddev => "stddev",
            Self::StddevPop => "stddev_pop",
            Self::CountDistinct => "count_distinct",
            Self::ApproxCountDistinct { .. } => "approx_count_distinct",
            Self::ApproxQuantile { .. } => "approx_quantile",
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
    /// The column by which a value is found, and its type.
    pub by: Option<(usize, DataType)>,
    /// Type of the output column.
    pub output: DataType,
    /// What makes it an extension type, as the input column's.
    pub(crate) extension: Metadata,
    pub(crate) kind: Kind,
}

impl Aggregate {
    /// The columns that it reads.
    pub(crate) fn columns(&self) -> impl Iterator<Item = usize> {
        self.column.into_iter().chain(self.by.iter().map(|by| by.0))
    }

    /// The same, to be set.
    pub(crate) fn columns_mut(&mut self) -> impl Iterator<Item = &mut usize> {
        self.column.iter_mut().chain(self.by.iter_mut().map(|by| &mut by.0))
    }

    /// Resolves a function over a column type. `Err` says in words what the function needs.
    pub(crate) fn resolve(
        name: &str,
        function: Function,
        column: Option<(usize, &DataType)>,
        by: Option<(usize, &DataType)>,
    ) -> Result<Self, &'static str> {
        use DataType::*;
        let rows = |data_type: &DataType| RowConverter::supports_fields(&[SortField::new(data_type.clone())]);
        let (kind, output) = match (function, column) {
            (Function::Count, None) => (Kind::Rows, Int64),
            (Function::Count, Some(_)) => (Kind::Valid, Int64),
            (_, None) => return Err("needs a column"),
            (Function::Sum | Function::Mean, Some((_, input))) => {
                let (kind, sum) = match input {
                    Int8 | Int16 | Int32 | Int64 => (Kind::Int { unsigned: false }, Int64),
                    UInt8 | UInt16 | UInt32 | UInt64 => (Kind::Int { unsigned: true }, UInt64),
                    Float32 | Float64 => (Kind::Float, Float64),
                    Decimal128(_, scale) => {
                        (Kind::Decimal { mean: function == Function::Mean }, Decimal128(38, *scale))
                    }
                    _ => return Err("a sum or mean needs integers, floats or a 128-bit decimal"),
                };
                (kind, if function == Function::Mean { Float64 } else { sum })
            }
            (Function::Variance | Function::VarPop | Function::Stddev | Function::StddevPop, Some((_, input))) => {
                match input {
                    input if input.is_integer() => {}
                    Float32 | Float64 | Decimal128(_, _) => {}
                    _ => return Err("a variance or deviation needs integers, floats or a 128-bit decimal"),
                }
                (Kind::Moments, Float64)
            }
            (Function::ApproxQuantile { digits, .. }, Some((_, input))) => {
                match input {
                    input if input.is_integer() => {}
                    Float32 | Float64 | Decimal128(_, _) => {}
                    _ => return Err("an approximate quantile needs integers, floats or a 128-bit decimal"),
                }
                (Kind::Histogram(digits), Float64)
            }
            (Function::CountDistinct | Function::ApproxCountDistinct { .. }, Some((_, input))) => {
                let plain = column::plain_type(input);
                if storable(plain).is_err() {
                    return Err("distinct values need a column with equality");
                }
                let kind = match function {
                    Function::ApproxCountDistinct { bits } => Kind::Registers(bits),
                    _ => Kind::Set { fixed: column::is_integer_like(plain) || matches!(plain, Float32 | Float64) },
                };
                (kind, Int64)
            }
            (Function::MinBy | Function::MaxBy | Function::First | Function::Last, Some((_, input))) => {
                let Some((_, by)) = by else { return Err("needs a second column, by which its value is found") };
                if by.is_nested() || matches!(by, Dictionary(_, _) | RunEndEncoded(_, _)) || !rows(by) {
                    return Err("the column by which a value is found needs an order");
                }
                storable(input)?;
                (Kind::Bytes { greatest: matches!(function, Function::MaxBy | Function::Last) }, input.clone())
            }
            (Function::Min | Function::Max, Some((_, input))) => {
                let greatest = function == Function::Max;
                let kind = match input {
                    Dictionary(_, _) => return Err("a dictionary column: convert it to its value type first"),
                    RunEndEncoded(_, _) => return Err("a run-end encoded column: convert it to its value type first"),
                    Float32 | Float64 => Kind::Code { greatest },
                    other if column::is_integer_like(other) => Kind::Code { greatest },
                    Decimal128(_, _) => Kind::Wide { greatest },
                    other if !other.is_nested() && rows(other) => Kind::Bytes { greatest },
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
            by: by.map(|(at, data_type)| (at, data_type.clone())),
            output,
            extension: Metadata::default(),
            kind,
        })
    }

    /// The same of a column of this field: a value of it is of its type, also where that is an extension type.
    pub(crate) fn of(mut self, input: Option<&Field>) -> Self {
        if let Some(input) = input.filter(|input| self.function.gives_a_value() && *input.data_type() == self.output) {
            self.extension = input.metadata().clone();
            self.extension
                .retain(|name, _| [EXTENSION_TYPE_NAME_KEY, EXTENSION_TYPE_METADATA_KEY].contains(&name.as_str()));
        }
        self
    }

    /// The output column.
    pub(crate) fn field(&self, nullable: bool) -> Field {
        Field::new(&self.name, self.output.clone(), nullable).with_metadata(self.extension.clone())
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

/// Numbers of any kind as floats; a decimal as the nearest one, as Spark casts it.
fn numbers(array: &ArrayRef) -> Result<ScalarBuffer<f64>, ArrowError> {
    Ok(match array.data_type() {
        DataType::Float32 | DataType::Float64 => floats(array),
        DataType::Decimal128(_, scale) => {
            let unit = 10f64.powi(i32::from(*scale));
            column::raw::<i128>(array).iter().map(|&value| value as f64 / unit).collect()
        }
        DataType::UInt64 => column::raw::<u64>(array).iter().map(|&value| value as f64).collect(),
        _ => column::codes(array).expect("integers have codes").values.iter().map(|&value| value as f64).collect(),
    })
}

impl Aggregator {
    pub(crate) fn new(spec: Aggregate) -> Result<Self, ArrowError> {
        let types: &[DataType] = match (spec.kind, &spec.input, &spec.by) {
            (Kind::Bytes { .. }, Some(input), Some((_, by))) => &[by.clone(), input.clone()],
            (Kind::Bytes { .. }, Some(input), None) if !ByteColumn::supports(input) => std::slice::from_ref(input),
            (Kind::Set { fixed: false }, Some(input), _) if !ByteColumn::supports(column::plain_type(input)) => {
                std::slice::from_ref(column::plain_type(input))
            }
            _ => return Ok(Self { spec, rows: None }),
        };
        let converter = RowConverter::new(types.iter().cloned().map(SortField::new).collect())?;
        let nulls: Vec<ArrayRef> = types.iter().map(|data_type| new_null_array(data_type, 1)).collect();
        let null = converter.convert_columns(&nulls)?.row(0).as_ref().into();
        Ok(Self { spec, rows: Some((converter, null)) })
    }

    pub(crate) fn prepare(&self, batch: &RecordBatch) -> Result<Input, ArrowError> {
        let Some(at) = self.spec.column else { return Ok(Input::Rows) };
        let array = batch.column(at);
        let some = |nulls: Option<NullBuffer>| nulls.filter(|nulls| nulls.null_count() > 0);
        let nulls = some(array.nulls().cloned());
        if let (Some((at, _)), Some((converter, _))) = (&self.spec.by, &self.rows) {
            let by = column::one_zero(batch.column(*at))?;
            let nulls = some(by.logical_nulls());
            return Ok(Input::Ordered(converter.convert_columns(&[by, column::one_nan(array)?])?, nulls));
        }
        Ok(match self.spec.kind {
            Kind::Moments => Input::Float(numbers(array)?, nulls),
            Kind::Histogram(digits) => {
                let numbers = numbers(array)?;
                let buckets = numbers.iter().map(|&value| histogram::bucket_of(value, digits)).collect();
                Input::Buckets(buckets, nulls, RefCell::default())
            }
            Kind::Registers(_) => {
                let array = column::plain(array)?;
                let nulls = some(array.logical_nulls());
                Input::Hashes(hash_columns(&[array])?, nulls)
            }
            Kind::Set { fixed } => {
                let array = column::one_zero(&column::plain(array)?)?;
                let nulls = some(array.logical_nulls());
                match (&self.rows, fixed) {
                    (Some((converter, _)), _) => Input::Ordered(converter.convert_columns(&[array])?, nulls),
                    (None, true) => Input::Code(match array.data_type() {
                        DataType::Float32 | DataType::Float64 => {
                            Codes { values: floats(&array).iter().map(|v| v.to_bits() as i64).collect(), nulls }
                        }
                        _ => column::codes(&array).expect("resolved to a type with codes"),
                    }),
                    (None, false) => Input::Bytes(ByteColumn::of(&array).expect("bytes or a converter"), nulls),
                }
            }
            Kind::Rows => Input::Rows,
            Kind::Valid => Input::Valid(array.logical_nulls()),
            Kind::Int { .. } => Input::Int(column::codes(array).expect("integers have codes")),
            Kind::Decimal { .. } | Kind::Wide { .. } => Input::Decimal(column::raw::<i128>(array), nulls),
            Kind::Float => Input::Float(floats(array), nulls),
            Kind::Bytes { .. } => match (&self.rows, ByteColumn::of(array)) {
                (Some((converter, _)), _) => {
                    Input::Ordered(converter.convert_columns(&[column::one_nan(array)?])?, nulls)
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

    /// The output column of all `records`, whose accumulator begins at word `at`. `key` has the key of a record in words.
    pub(crate) fn finish(
        &self,
        records: &Records,
        at: usize,
        step: &StepName,
        key: impl Fn(usize) -> Option<String>,
    ) -> Result<ArrayRef, OpError> {
        let overflow = |record| OpError::Overflow {
            step: step.clone(),
            column: self.spec.name.clone(),
            data_type: ddl(&self.spec.output),
            key: key(record),
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
                (Kind::Decimal { .. }, Some(DataType::Decimal128(_, scale))) => {
                    let unit = 10f64.powi(i32::from(*scale));
                    let mean = |(sum, n)| sum / unit / n as f64;
                    n().zip(wide()).map(|cell| mean(decimals(cell))).collect()
                }
                (Kind::Float, _) => value().zip(n()).map(|(sum, n)| f64::from_bits(sum) / n as f64).collect(),
                _ => wide().zip(n()).map(|(sum, n)| sum as f64 / n as f64).collect(),
            };
            return Ok(Arc::new(Float64Array::new(means.into(), nulls())));
        }
        Ok(match self.spec.kind {
            Kind::Moments => {
                let (sample, root) = match self.spec.function {
                    Function::Variance => (true, false),
                    Function::VarPop => (false, false),
                    Function::Stddev => (true, true),
                    _ => (false, true),
                };
                let least = 1 + u64::from(sample);
                let of = |(n, squares): (u64, u64)| {
                    let variance = f64::from_bits(squares) / (n - u64::from(sample)) as f64;
                    if root { variance.sqrt() } else { variance }
                };
                let all = n().zip(records.column(at + 2));
                Arc::new(all.map(|cell| (cell.0 >= least).then(|| of(cell))).collect::<Float64Array>())
            }
            Kind::Set { .. } => {
                Arc::new(Int64Array::new(records.column(at + 2).map(|count| count as i64).collect(), None))
            }
            Kind::Registers(bits) => {
                let estimate = |word| if word == 0 { 0 } else { registers::estimate(records.blob(word), bits) };
                let count = |word| i64::try_from(estimate(word)).unwrap_or(i64::MAX);
                Arc::new(Int64Array::new(value().map(count).collect(), None))
            }
            Kind::Histogram(digits) => {
                let Function::ApproxQuantile { q, .. } = self.spec.function else { unreachable!("only of quantiles") };
                let quantile = |word: u64| (word != 0).then(|| histogram::quantile(records.blob(word), q, digits));
                Arc::new(value().map(quantile).collect::<Float64Array>())
            }
            Kind::Rows | Kind::Valid => Arc::new(Int64Array::new(n().map(|n| n as i64).collect(), None)),
            Kind::Int { unsigned: false } => {
                let sums = wide().enumerate().map(|(at, sum)| i64::try_from(sum).map_err(|_| overflow(at)));
                Arc::new(Int64Array::new(sums.collect::<Result<_, _>>()?, nulls()))
            }
            Kind::Int { unsigned: true } => {
                let sums = wide().enumerate().map(|(at, sum)| u64::try_from(sum).map_err(|_| overflow(at)));
                Arc::new(UInt64Array::new(sums.collect::<Result<_, _>>()?, nulls()))
            }
            Kind::Decimal { .. } => {
                let limit = 10i128.pow(38);
                if let Some(at) = wide().position(|sum| !(-limit < sum && sum < limit)) {
                    return Err(overflow(at));
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
                    // What it is found by stands before it.
                    row_format::columns(converter, rows)?.pop().expect("at least one column")
                }
                None => byte_array(&self.spec.output, value().map(|word| (word != 0).then(|| records.blob(word))))?,
            },
        })
    }
}
