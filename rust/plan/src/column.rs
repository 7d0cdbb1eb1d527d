//! Integer-like columns as 64-bit codes and back, and the event-time column.
//!
//! A code is the value's own bits widened to 64 (an unsigned 64-bit value keeps its bits). Codes let keys, minima, maxima and event
//! times of sixteen Arrow types share one loop; 64-bit columns are not copied.

use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::{
    ArrowPrimitiveType, Float16Type, Float32Type, Float64Type, Int8Type, Int16Type, Int32Type, Int64Type, UInt8Type,
    UInt16Type, UInt32Type,
};
use arrow_array::{Array, ArrayRef, BooleanArray, PrimitiveArray, make_array};
use arrow_buffer::{NullBuffer, ScalarBuffer};
use arrow_row::{RowConverter, SortField};
use arrow_schema::{ArrowError, DataType, TimeUnit};
use arrow_select::take::take;

use crate::bytes::ByteColumn;

/// A column's codes and its nulls; codes under a null are arbitrary.
pub(crate) struct Codes {
    pub(crate) values: ScalarBuffer<i64>,
    pub(crate) nulls: Option<NullBuffer>,
}

/// The column with one zero and one NaN: -0.0 becomes 0.0 and any NaN the usual one, so that values that are equal to users are equal as
/// bytes. Other columns, and those that need no change, are shared.
pub(crate) fn one_zero(array: &ArrayRef) -> Result<ArrayRef, ArrowError> {
    unified(array, true)
}

/// The column with one NaN, which is above all numbers wherever it came from: some have a sign. Zeros stay as they are.
pub(crate) fn one_nan(array: &ArrayRef) -> Result<ArrayRef, ArrowError> {
    unified(array, false)
}

fn unified(array: &ArrayRef, zeros: bool) -> Result<ArrayRef, ArrowError> {
    // Adding 0.0 turns -0.0 into 0.0 and leaves every other number.
    macro_rules! floats {
        ($kind:ty, $zero:expr, $nan:expr) => {{
            let column = array.as_primitive::<$kind>();
            let plain = |v: <$kind as ArrowPrimitiveType>::Native| match v.is_nan() {
                true => $nan,
                false => {
                    if zeros {
                        v + $zero
                    } else {
                        v
                    }
                }
            };
            match column.values().iter().all(|&v| v.to_bits() == plain(v).to_bits()) {
                true => Arc::clone(array),
                false => Arc::new(column.unary::<_, $kind>(plain)),
            }
        }};
    }
    type Half = <Float16Type as ArrowPrimitiveType>::Native;
    Ok(match array.data_type() {
        DataType::Float16 => floats!(Float16Type, Half::ZERO, Half::NAN),
        DataType::Float32 => floats!(Float32Type, 0.0, f32::NAN),
        DataType::Float64 => floats!(Float64Type, 0.0, f64::NAN),
        nested if nested.is_nested() && has_floats(nested) => {
            let data = array.to_data();
            let children = data.child_data().iter().map(|child| {
                let child = make_array(child.clone());
                Ok(unified(&child, zeros)?.to_data())
            });
            let children = children.collect::<Result<Vec<_>, ArrowError>>()?;
            make_array(data.into_builder().child_data(children).build()?)
        }
        _ => Arc::clone(array),
    })
}

fn has_floats(data_type: &DataType) -> bool {
    use DataType::*;
    match data_type {
        List(item) | LargeList(item) | ListView(item) | LargeListView(item) | FixedSizeList(item, _) | Map(item, _) => {
            has_floats(item.data_type())
        }
        Struct(fields) => fields.iter().any(|field| has_floats(field.data_type())),
        RunEndEncoded(_, values) => has_floats(values.data_type()),
        Union(fields, _) => fields.iter().any(|(_, field)| has_floats(field.data_type())),
        Dictionary(_, values) => has_floats(values),
        plain => plain.is_floating(),
    }
}

/// The type of a column once a dictionary is looked up: keys and what comes of them are plain values.
pub(crate) fn plain_type(data_type: &DataType) -> &DataType {
    match data_type {
        DataType::Dictionary(_, values) => values,
        plain => plain,
    }
}

/// The column with its dictionary looked up; other columns are shared.
pub(crate) fn plain(array: &ArrayRef) -> Result<ArrayRef, ArrowError> {
    match array.as_any_dictionary_opt() {
        Some(dictionary) => take(dictionary.values(), dictionary.keys(), None),
        None => Ok(Arc::clone(array)),
    }
}

/// A row of some columns in words, such as `user = 7, page = "home"`.
pub(crate) fn in_words<'a>(columns: impl Iterator<Item = (&'a str, &'a ArrayRef)>, row: usize) -> String {
    let words = columns.map(|(name, column)| {
        let value = plain(&column.slice(row, 1)).ok();
        let value = value.map(|value| match ByteColumn::of(&value) {
            _ if value.is_null(0) => "null".into(),
            Some(text) => format!("{:?}", String::from_utf8_lossy(text.get(0))),
            // Arrow's own words: a type, a bracket, and each value in a line.
            None if !value.data_type().is_nested() => {
                let shown = format!("{value:?}");
                shown.lines().nth(2).unwrap_or_default().trim().trim_end_matches(',').to_owned()
            }
            None => format!("{value:?}").split_whitespace().collect::<Vec<_>>().join(" "),
        });
        format!("{name} = {}", value.unwrap_or_default())
    });
    words.collect::<Vec<_>>().join(", ")
}

/// Whether a type, or one that it is made of, is like this.
fn contains(data_type: &DataType, like: fn(&DataType) -> bool) -> bool {
    like(data_type)
        || match data_type {
            DataType::List(field)
            | DataType::LargeList(field)
            | DataType::FixedSizeList(field, _)
            | DataType::ListView(field)
            | DataType::LargeListView(field)
            | DataType::Map(field, _) => contains(field.data_type(), like),
            DataType::Struct(fields) => fields.iter().any(|field| contains(field.data_type(), like)),
            _ => false,
        }
}

fn is_encoded(data_type: &DataType) -> bool {
    matches!(data_type, DataType::Dictionary(_, _) | DataType::RunEndEncoded(_, _))
}

/// Whether values of a type can be kept as bytes that are equal exactly if they are, and come back with their own type; else why not.
pub(crate) fn storable(data_type: &DataType) -> Result<(), &'static str> {
    if contains(data_type, is_encoded) {
        return Err("which does not keep its type in state: convert it to its value type first");
    }
    let ordered = !contains(data_type, |data_type| matches!(data_type, DataType::Union(_, _)));
    match ordered && RowConverter::supports_fields(&[SortField::new(data_type.clone())]) {
        true => Ok(()),
        false => Err("which has no order or equality"),
    }
}

/// Whether the type has codes.
pub(crate) fn is_integer_like(data_type: &DataType) -> bool {
    use DataType::*;
    matches!(
        data_type,
        Boolean
            | Int8
            | Int16
            | Int32
            | Int64
            | UInt8
            | UInt16
            | UInt32
            | UInt64
            | Date32
            | Date64
            | Time32(_)
            | Time64(_)
            | Timestamp(_, _)
            | Duration(_)
    )
}

fn widen<T>(array: &dyn Array) -> ScalarBuffer<i64>
where
    T: ArrowPrimitiveType,
    T::Native: Into<i64>,
{
    raw::<T::Native>(array).iter().map(|&value| value.into()).collect()
}

/// The values of a fixed-width column whatever its logical type, without a copy.
pub(crate) fn raw<N: arrow_buffer::ArrowNativeType>(array: &dyn Array) -> ScalarBuffer<N> {
    let data = array.to_data();
    ScalarBuffer::new(data.buffers()[0].clone(), data.offset(), data.len())
}

/// The codes of a column; `None` for a type without codes.
pub(crate) fn codes(array: &dyn Array) -> Option<Codes> {
    use DataType::*;
    let values = match array.data_type() {
        Boolean => array.as_boolean().values().iter().map(i64::from).collect(),
        Int8 => widen::<Int8Type>(array),
        Int16 => widen::<Int16Type>(array),
        Int32 | Date32 | Time32(_) => widen::<Int32Type>(array),
        UInt8 => widen::<UInt8Type>(array),
        UInt16 => widen::<UInt16Type>(array),
        UInt32 => widen::<UInt32Type>(array),
        Int64 | UInt64 | Date64 | Time64(_) | Timestamp(_, _) | Duration(_) => raw::<i64>(array),
        _ => return None,
    };
    Some(Codes { values, nulls: array.nulls().filter(|nulls| nulls.null_count() > 0).cloned() })
}

/// The values of some columns of 64 bits with a sign and without nulls; `None` where one is another.
pub(crate) fn longs(columns: &[ArrayRef]) -> Option<Vec<ScalarBuffer<i64>>> {
    use DataType::{Date64, Duration, Int64, Time64, Timestamp};
    let values = |column: &ArrayRef| match column.data_type() {
        Int64 | Date64 | Time64(_) | Timestamp(..) | Duration(_) if column.null_count() == 0 => {
            Some(raw::<i64>(column))
        }
        _ => None,
    };
    columns.iter().map(values).collect()
}

fn narrow<T>(values: Vec<i64>, nulls: Option<NullBuffer>) -> ArrayRef
where
    T: ArrowPrimitiveType,
    T::Native: TryFrom<i64> + Default,
{
    // Codes under a null may be anything; every other code came from this type.
    let values = values.into_iter().map(|code| T::Native::try_from(code).unwrap_or_default());
    Arc::new(PrimitiveArray::<T>::new(values.collect(), nulls))
}

/// The column of type `data_type` that has these codes.
pub(crate) fn from_codes(
    data_type: &DataType,
    values: Vec<i64>,
    nulls: Option<NullBuffer>,
) -> Result<ArrayRef, ArrowError> {
    use DataType::*;
    let plain: ArrayRef = match data_type {
        Boolean => Arc::new(BooleanArray::new(values.iter().map(|&code| code != 0).collect(), nulls)),
        Int8 => narrow::<Int8Type>(values, nulls),
        Int16 => narrow::<Int16Type>(values, nulls),
        Int32 | Date32 | Time32(_) => narrow::<Int32Type>(values, nulls),
        UInt8 => narrow::<UInt8Type>(values, nulls),
        UInt16 => narrow::<UInt16Type>(values, nulls),
        UInt32 => narrow::<UInt32Type>(values, nulls),
        Int64 | UInt64 | Date64 | Time64(_) | Timestamp(_, _) | Duration(_) => {
            Arc::new(PrimitiveArray::<Int64Type>::new(values.into(), nulls))
        }
        other => return Err(ArrowError::InvalidArgumentError(format!("{other} has no integer codes"))),
    };
    if plain.data_type() == data_type {
        return Ok(plain);
    }
    Ok(make_array(plain.to_data().into_builder().data_type(data_type.clone()).build()?))
}

/// Event times are kept within this distance of 1970 so that window bounds never overflow (about 73,000 years), in microseconds.
pub(crate) const EVENT_TIME_LIMIT_US: i64 = i64::MAX / 4;

/// The event-time column: `Timestamp` of any unit, or `Int64` counting milliseconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventTime {
    /// Name of the column.
    pub name: String,
    /// Position of the column in its schema.
    pub column: usize,
    /// Its type; window bounds have the same.
    pub data_type: DataType,
}

impl EventTime {
    /// Whether a column of this type can carry event time.
    pub fn supports(data_type: &DataType) -> bool {
        matches!(data_type, DataType::Timestamp(_, _) | DataType::Int64)
    }

    fn unit(&self) -> TimeUnit {
        match self.data_type {
            DataType::Timestamp(unit, _) => unit,
            _ => TimeUnit::Millisecond,
        }
    }

    /// The shortest time that the column can tell apart, in whole microseconds (1 for finer units).
    pub fn resolution_us(&self) -> i64 {
        match self.unit() {
            TimeUnit::Second => 1_000_000,
            TimeUnit::Millisecond => 1_000,
            TimeUnit::Microsecond | TimeUnit::Nanosecond => 1,
        }
    }

    /// A value of the column in microseconds since 1970, rounded down; `None` when it is out of range.
    pub fn to_us(&self, value: i64) -> Option<i64> {
        let us = match self.unit() {
            TimeUnit::Nanosecond => Some(value.div_euclid(1_000)),
            _ => value.checked_mul(self.resolution_us()),
        };
        us.filter(|us| (-EVENT_TIME_LIMIT_US..=EVENT_TIME_LIMIT_US).contains(us))
    }

    /// [`to_us`](Self::to_us) of many values; `None` when one of them is out of range.
    pub(crate) fn all_to_us(&self, values: &[i64]) -> Option<Vec<i64>> {
        let (least, most) = values.iter().fold((i64::MAX, i64::MIN), |(a, b), &value| (a.min(value), b.max(value)));
        if !values.is_empty() {
            self.to_us(least).and(self.to_us(most))?;
        }
        Some(match self.unit() {
            TimeUnit::Nanosecond => values.iter().map(|value| value.div_euclid(1_000)).collect(),
            _ => values.iter().map(|value| value * self.resolution_us()).collect(),
        })
    }

    /// Microseconds since 1970 as a value of the column; `None` on overflow (nanoseconds only).
    pub fn from_us(&self, us: i64) -> Option<i64> {
        match self.unit() {
            TimeUnit::Nanosecond => us.checked_mul(1_000),
            _ => Some(us.div_euclid(self.resolution_us())),
        }
    }

    /// The greatest event time of a block in microseconds; `None` when it has no valid event time. Out-of-range values do not count:
    /// the step that windows them reports them.
    pub fn max_us(&self, batch: &arrow_array::RecordBatch) -> Option<i64> {
        let codes = codes(batch.column(self.column))?;
        let valid = |row: usize| codes.nulls.as_ref().is_none_or(|nulls| nulls.is_valid(row));
        (0..codes.values.len()).filter(|&row| valid(row)).filter_map(|row| self.to_us(codes.values[row])).max()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow_array::{
        Date32Array, Float64Array, Int16Array, ListArray, StringArray, TimestampNanosecondArray, UInt64Array,
    };

    #[test]
    fn a_row_in_words() {
        let list = ListArray::from_iter_primitive::<Int64Type, _, _>([Some(vec![Some(1), None])]);
        let columns: [(&str, ArrayRef); 8] = [
            ("u", Arc::new(UInt64Array::from(vec![u64::MAX]))),
            ("b", Arc::new(BooleanArray::from(vec![true]))),
            ("d", Arc::new(Date32Array::from(vec![19_723]))),
            ("t", Arc::new(TimestampNanosecondArray::from(vec![1_500_000_000]))),
            ("f", Arc::new(Float64Array::from(vec![-0.5]))),
            ("s", Arc::new(StringArray::from(vec!["a, b"]))),
            ("n", Arc::new(Int16Array::from(vec![None]))),
            ("l", Arc::new(list)),
        ];
        let words = in_words(columns.iter().map(|(name, column)| (*name, column)), 0);
        let (plain, list) = words.split_once(", l = ").unwrap();
        assert_eq!(
            plain,
            "u = 18446744073709551615, b = true, d = 2024-01-01, t = 1970-01-01T00:00:01.500, f = -0.5, s = \"a, b\", n = null"
        );
        assert!(list.contains("1, null"), "{list}");
    }

    #[test]
    fn codes_round_trip_with_types_and_nulls() {
        let arrays: Vec<ArrayRef> = vec![
            Arc::new(Int16Array::from(vec![Some(-3), None, Some(7)])),
            Arc::new(Date32Array::from(vec![Some(-3), None, Some(7)])),
            Arc::new(UInt64Array::from(vec![Some(u64::MAX), None, Some(7)])),
            Arc::new(BooleanArray::from(vec![Some(true), None, Some(false)])),
            Arc::new(TimestampNanosecondArray::from(vec![Some(-3), None, Some(7)]).with_timezone("UTC")),
        ];
        for array in arrays {
            let sliced = array.slice(1, 2);
            for array in [array, sliced] {
                let codes = codes(&array).unwrap();
                let back = from_codes(array.data_type(), codes.values.to_vec(), codes.nulls).unwrap();
                assert_eq!(&back, &array);
            }
        }
    }

    #[test]
    fn event_time_units_floor() {
        let column = |data_type| EventTime { name: "t".into(), column: 0, data_type };
        assert_eq!(column(DataType::Int64).to_us(-1), Some(-1_000));
        assert_eq!(column(DataType::Int64).to_us(i64::MAX), None);
        let nanos = column(DataType::Timestamp(TimeUnit::Nanosecond, None));
        assert_eq!(nanos.to_us(-1), Some(-1));
        assert_eq!(nanos.to_us(1_999), Some(1));
        assert_eq!(nanos.from_us(5), Some(5_000));
        assert_eq!(nanos.from_us(i64::MAX / 4), None);
        assert_eq!(column(DataType::Timestamp(TimeUnit::Second, None)).from_us(-2_000_000), Some(-2));
    }

    #[test]
    fn floats_have_one_zero_and_one_nan() {
        let odd = f64::from_bits(0xfff8_0000_0000_0001);
        let column: ArrayRef =
            Arc::new(Float64Array::from(vec![Some(-0.0), None, Some(odd), Some(-1.5), Some(f64::NAN)]));
        let plain = one_zero(&column).unwrap();
        let bits = |at: usize| plain.as_primitive::<Float64Type>().value(at).to_bits();
        assert_eq!((bits(0), bits(2), bits(3)), (0, f64::NAN.to_bits(), (-1.5f64).to_bits()));
        assert!(plain.is_null(1));
        assert!(Arc::ptr_eq(&one_zero(&plain).unwrap(), &plain), "nothing to change, nothing copied");
        let zeros = one_nan(&column).unwrap();
        let bits = |at: usize| zeros.as_primitive::<Float64Type>().value(at).to_bits();
        assert_eq!((bits(0), bits(2)), ((-0.0f64).to_bits(), f64::NAN.to_bits()));
        let list = |value| -> ArrayRef {
            Arc::new(ListArray::from_iter_primitive::<Float64Type, _, _>([None, Some([Some(1.0), Some(value)])]))
        };
        assert_eq!(&one_zero(&list(-0.0)).unwrap(), &list(0.0));
        let sliced = one_zero(&list(-0.0).slice(1, 1)).unwrap();
        assert_eq!(&sliced, &list(0.0).slice(1, 1));
    }
}
