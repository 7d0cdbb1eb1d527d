//! What rows say, in 64 bits: two feeds of a batch are compared by it.
//!
//! Sum modulo 2^64 over all rows of a hash of the row's values, so batching, order and partitions make no difference, and one row more, one
//! fewer or another value in a cell does. Column by column, into one hash per row. Floats count by their bits (-0.0 is not 0.0, and NaNs
//! differ by theirs); text and bytes by their bytes, whatever the Arrow layout; a null is no value, and what stands under it does not
//! matter; entries of a map in any order. It stands in checkpoints: equal rows of equal columns give the same in every release.
//!
//! Non-goals: forgers. Union, run-end encoded and list-view columns, which Spark does not have, are left out: [`Content::skipped`] names them.

use arrow_array::cast::AsArray;
use arrow_array::{Array, ArrayAccessor, ArrayRef, RecordBatch};
use arrow_buffer::{ArrowNativeType, NullBuffer};
use arrow_schema::{DataType, Schema};

use crate::hash::{hash_bytes, hash_int};

const VALUE: u64 = 0x9e37_79b9_7f4a_7c15;
const NULL: u64 = 0xd1b5_4a32_d192_ed03;

/// See the module.
///
/// # Examples
/// ```
/// # use std::sync::Arc;
/// # use arrow_array::{ArrayRef, Int64Array, RecordBatch};
/// use penstock_plan::Content;
/// let rows = |keys: Vec<i64>| {
///     RecordBatch::try_from_iter([("k", Arc::new(Int64Array::from(keys)) as ArrayRef)]).unwrap()
/// };
/// let [mut once, mut pieces] = [Content::new(&rows(vec![]).schema()), Content::new(&rows(vec![]).schema())];
/// once.add(&rows(vec![1, 2, 3]));
/// pieces.add(&rows(vec![3]));
/// pieces.add(&rows(vec![2, 1]));
/// assert_eq!(once.sum(), pieces.sum());
/// ```
#[derive(Clone, Debug)]
pub struct Content {
    columns: Vec<usize>,
    skipped: Vec<String>,
    sum: u64,
    hashes: Vec<u64>,
}

impl Content {
    /// Of no rows yet.
    #[must_use]
    pub fn new(schema: &Schema) -> Content {
        let known = |at: &usize| is_known(schema.field(*at).data_type());
        let (columns, unknown): (Vec<usize>, Vec<usize>) = (0..schema.fields().len()).partition(known);
        let skipped = unknown.into_iter().map(|at| schema.field(at).name().clone()).collect();
        Content { columns, skipped, sum: 0, hashes: Vec::new() }
    }

    /// Takes in rows, which have the columns of the schema. Nanoseconds for each value.
    pub fn add(&mut self, batch: &RecordBatch) {
        self.hashes.clear();
        self.hashes.resize(batch.num_rows(), 0);
        for at in &self.columns {
            mix(batch.column(*at), &mut self.hashes);
        }
        let rows = self.hashes.iter().map(|hash| hash_int(*hash as i64));
        self.sum = rows.fold(self.sum, u64::wrapping_add);
    }

    /// Sum of the rows' hashes.
    #[must_use]
    pub fn sum(&self) -> u64 {
        self.sum
    }

    /// Columns whose values do not count.
    #[must_use]
    pub fn skipped(&self) -> &[String] {
        &self.skipped
    }
}

fn is_known(kind: &DataType) -> bool {
    match kind {
        DataType::Union(..) | DataType::RunEndEncoded(..) | DataType::ListView(_) | DataType::LargeListView(_) => false,
        DataType::Struct(fields) => fields.iter().all(|field| is_known(field.data_type())),
        DataType::List(field)
        | DataType::LargeList(field)
        | DataType::FixedSizeList(field, _)
        | DataType::Map(field, _) => is_known(field.data_type()),
        DataType::Dictionary(_, values) => is_known(values),
        _ => true,
    }
}

fn fold(hash: u64, value: u64, by: u64) -> u64 {
    let product = u128::from(hash.rotate_left(23) ^ value ^ by) * u128::from(by | 1);
    (product as u64) ^ ((product >> 64) as u64)
}

/// Goes on with one value per row.
fn each(hashes: &mut [u64], nulls: Option<&NullBuffer>, value: impl Fn(usize) -> u64) {
    match nulls.filter(|nulls| nulls.null_count() > 0) {
        None => hashes.iter_mut().enumerate().for_each(|(row, hash)| *hash = fold(*hash, value(row), VALUE)),
        Some(nulls) => {
            for (row, hash) in hashes.iter_mut().enumerate() {
                *hash = match nulls.is_valid(row) {
                    true => fold(*hash, value(row), VALUE),
                    false => fold(*hash, 0, NULL),
                };
            }
        }
    }
}

/// Goes on with texts or bytes.
fn texts<V: AsRef<[u8]>>(hashes: &mut [u64], nulls: Option<&NullBuffer>, values: impl ArrayAccessor<Item = V>) {
    each(hashes, nulls, |row| hash_bytes(values.value(row).as_ref()));
}

/// Goes on with the column's value of each row.
fn mix(array: &ArrayRef, hashes: &mut [u64]) {
    let nulls = array.nulls();
    match array.data_type() {
        DataType::Null => each(hashes, None, |_| NULL),
        DataType::Boolean => {
            let values = array.as_boolean().values();
            each(hashes, nulls, |row| u64::from(values.value(row)));
        }
        DataType::Utf8 => texts(hashes, nulls, array.as_string::<i32>()),
        DataType::LargeUtf8 => texts(hashes, nulls, array.as_string::<i64>()),
        DataType::Utf8View => texts(hashes, nulls, array.as_string_view()),
        DataType::Binary => texts(hashes, nulls, array.as_binary::<i32>()),
        DataType::LargeBinary => texts(hashes, nulls, array.as_binary::<i64>()),
        DataType::BinaryView => texts(hashes, nulls, array.as_binary_view()),
        DataType::FixedSizeBinary(_) => texts(hashes, nulls, array.as_fixed_size_binary()),
        DataType::Struct(_) => {
            let mut inner = vec![0; hashes.len()];
            array.as_struct().columns().iter().for_each(|column| mix(column, &mut inner));
            each(hashes, nulls, |row| inner[row]);
        }
        DataType::List(_) => {
            listed(hashes, nulls, array.as_list::<i32>().values(), offsets(array.as_list::<i32>().value_offsets()))
        }
        DataType::LargeList(_) => {
            listed(hashes, nulls, array.as_list::<i64>().values(), offsets(array.as_list::<i64>().value_offsets()))
        }
        DataType::FixedSizeList(_, size) => {
            let size = usize::try_from(*size).unwrap_or(0);
            listed(
                hashes,
                nulls,
                array.as_fixed_size_list().values(),
                (0..=array.len()).map(|row| row * size).collect(),
            );
        }
        DataType::Map(..) => {
            let map = array.as_map();
            let ends = offsets(map.value_offsets());
            let (first, entries) = within(&(std::sync::Arc::new(map.entries().clone()) as ArrayRef), &ends);
            let sum = |row: usize| {
                let own = &entries[ends[row] - first..ends[row + 1] - first];
                own.iter().fold(own.len() as u64, |sum, entry| sum.wrapping_add(hash_int(*entry as i64)))
            };
            each(hashes, nulls, sum);
        }
        DataType::Dictionary(..) => {
            let dictionary = array.as_any_dictionary();
            let values = alone(dictionary.values());
            let empty = values.is_empty();
            let keys = if empty { vec![0; array.len()] } else { dictionary.normalized_keys() };
            let present = dictionary.values();
            // Null is what has no key, and what leads to a null.
            let valid = |row: usize| array.is_valid(row) && !empty && present.is_valid(keys[row]);
            let merged = NullBuffer::from_iter((0..array.len()).map(valid));
            each(hashes, Some(&merged), |row| values[keys[row]]);
        }
        kind => match kind.primitive_width() {
            Some(1) => numbers::<u8>(array, hashes, u64::from),
            Some(2) => numbers::<u16>(array, hashes, u64::from),
            Some(4) => numbers::<u32>(array, hashes, u64::from),
            Some(8) => numbers::<u64>(array, hashes, |value| value),
            // Not all that have this width stand at its multiples.
            Some(width) => {
                let data = array.to_data();
                let bytes = &data.buffers()[0].as_slice()[data.offset() * width..];
                each(hashes, nulls, |row| hash_bytes(&bytes[row * width..(row + 1) * width]));
            }
            None => {}
        },
    }
}

/// What has one width, by its bits.
fn numbers<T: ArrowNativeType>(array: &ArrayRef, hashes: &mut [u64], code: impl Fn(T) -> u64) {
    let data = array.to_data();
    let values = &data.buffer::<T>(0)[..array.len()];
    each(hashes, array.nulls(), |row| code(values[row]));
}

/// The hash of each value by itself.
fn alone(array: &ArrayRef) -> Vec<u64> {
    let mut hashes = vec![0; array.len()];
    mix(array, &mut hashes);
    hashes
}

fn offsets<O: arrow_array::OffsetSizeTrait>(offsets: &[O]) -> Vec<usize> {
    offsets.iter().map(|offset| offset.as_usize()).collect()
}

/// The hashes of those elements that the rows have, and which is the first: a slice of a batch has the elements of all of it.
fn within(elements: &ArrayRef, ends: &[usize]) -> (usize, Vec<u64>) {
    let (first, last) = (ends[0], ends[ends.len() - 1]);
    (first, alone(&elements.slice(first, last - first)))
}

fn listed(hashes: &mut [u64], nulls: Option<&NullBuffer>, elements: &ArrayRef, ends: Vec<usize>) {
    let (first, inner) = within(elements, &ends);
    each(hashes, nulls, |row| {
        let own = &inner[ends[row] - first..ends[row + 1] - first];
        own.iter().fold(own.len() as u64, |hash, element| fold(hash, *element, VALUE))
    });
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow_array::types::Int32Type;
    use arrow_array::{
        BooleanArray, Decimal128Array, DictionaryArray, Float64Array, Int64Array, ListArray, MapArray, NullArray,
        StringArray, StringViewArray, StructArray, UnionArray,
    };
    use arrow_buffer::OffsetBuffer;
    use arrow_schema::{Field, Fields};
    use proptest::prelude::*;

    use super::*;

    fn sum(batches: &[RecordBatch]) -> u64 {
        let mut content = Content::new(&batches[0].schema());
        batches.iter().for_each(|batch| content.add(batch));
        content.sum()
    }

    fn batch(columns: Vec<ArrayRef>) -> RecordBatch {
        RecordBatch::try_from_iter(columns.into_iter().enumerate().map(|(at, column)| (format!("c{at}"), column)))
            .unwrap()
    }

    fn one(column: impl Array + 'static) -> u64 {
        sum(&[batch(vec![Arc::new(column)])])
    }

    type Row = (Option<i64>, Option<String>, Option<bool>, f64, Option<Vec<Option<i32>>>);

    fn rows(rows: &[Row]) -> RecordBatch {
        let lists = rows.iter().map(|row| row.4.clone());
        let inner = Arc::new(Int64Array::from_iter(rows.iter().map(|row| row.0))) as ArrayRef;
        let text = Arc::new(StringArray::from_iter(rows.iter().map(|row| row.1.clone()))) as ArrayRef;
        let field = |name: &str, array: &ArrayRef| Field::new(name, array.data_type().clone(), true);
        let fields = Fields::from(vec![field("a", &inner), field("b", &text)]);
        let nulls = NullBuffer::from_iter(rows.iter().map(|row| row.2 != Some(false)));
        batch(vec![
            inner.clone(),
            text.clone(),
            Arc::new(BooleanArray::from_iter(rows.iter().map(|row| row.2))),
            Arc::new(Float64Array::from_iter_values(rows.iter().map(|row| row.3))),
            Arc::new(ListArray::from_iter_primitive::<Int32Type, _, _>(lists)),
            Arc::new(StructArray::new(fields, vec![inner, text], Some(nulls))),
            Arc::new(Decimal128Array::from_iter(rows.iter().map(|row| row.0.map(i128::from)))),
            Arc::new(rows.iter().map(|row| row.1.as_deref()).collect::<DictionaryArray<Int32Type>>()),
        ])
    }

    proptest! {
        #[test]
        fn neither_order_nor_batches_count_and_every_cell_does(
            mut given in proptest::collection::vec(
                (any::<Option<i64>>(), "[a-c]{0,20}".prop_map(Some), any::<Option<bool>>(), any::<f64>(),
                 proptest::option::of(proptest::collection::vec(any::<Option<i32>>(), 0..4))), 1..40),
            cuts in proptest::collection::vec(0_usize..40, 0..5),
            which in any::<prop::sample::Index>(),
            cell in 0..5,
        ) {
            let whole = rows(&given);
            let expected = sum(std::slice::from_ref(&whole));
            // Slices of one batch, and batches of their own in another order.
            let mut ends: Vec<usize> = cuts.into_iter().filter(|cut| *cut < given.len()).chain([0, given.len()]).collect();
            ends.sort_unstable();
            let slices: Vec<RecordBatch> = ends.windows(2).map(|at| whole.slice(at[0], at[1] - at[0])).collect();
            prop_assert_eq!(sum(&slices), expected);
            let half = given.len() / 2;
            let own = [rows(&given[half..]), rows(&given[..half])];
            prop_assert_eq!(sum(&own), expected);
            // Another cell, and a row less.
            let row = which.index(given.len());
            let before = given[row].clone();
            match cell {
                0 => given[row].0 = before.0.map_or(Some(0), |value| (value != 7).then_some(value ^ 1)),
                1 => given[row].1 = before.1.map(|text| text + "\0"),
                2 => given[row].2 = if before.2.is_none() { Some(true) } else { None },
                3 => given[row].3 = f64::from_bits(before.3.to_bits() ^ 1 << 63),
                _ => given[row].4 = before.4.map_or(Some(vec![]), |mut list| { list.push(None); Some(list) }),
            }
            prop_assert_ne!(sum(&[rows(&given)]), expected);
            given.remove(row);
            prop_assert_ne!(sum(&[rows(&given)]), expected);
        }
    }

    #[test]
    fn values_count_and_not_how_they_stand() {
        let texts = vec![Some("one"), None, Some("a text of more than twelve bytes")];
        let plain = one(StringArray::from(texts.clone()));
        assert_eq!(one(StringViewArray::from(texts.clone())), plain);
        assert_ne!(one(texts.iter().copied().collect::<DictionaryArray<Int32Type>>()), one(NullArray::new(3)));
        // What stands under a null does not matter.
        let hidden = |value| Int64Array::new(vec![1, value].into(), Some(NullBuffer::from(vec![true, false])));
        assert_eq!(one(hidden(2)), one(hidden(3)));
        assert_ne!(one(Float64Array::from(vec![0.0])), one(Float64Array::from(vec![-0.0])));
        // A value goes to another column, a row to another row.
        let pair = |a: Vec<i64>, b: Vec<i64>| {
            sum(&[batch(vec![Arc::new(Int64Array::from(a)), Arc::new(Int64Array::from(b))])])
        };
        assert_ne!(pair(vec![1], vec![2]), pair(vec![2], vec![1]));
        assert_ne!(pair(vec![1, 2], vec![3, 4]), pair(vec![1, 2], vec![4, 3]));
        assert_eq!(pair(vec![1, 2], vec![3, 4]), pair(vec![2, 1], vec![4, 3]));
        // A row twice is not no row: sums do not cancel.
        assert_ne!(pair(vec![1, 1], vec![2, 2]), pair(vec![], vec![]));
    }

    #[test]
    fn entries_of_a_map_have_no_order_and_those_of_a_list_do() {
        let map = |keys: Vec<&str>, values: Vec<i64>| {
            let (keys, values) = (Arc::new(StringArray::from(keys)), Arc::new(Int64Array::from(values)));
            let fields = Fields::from(vec![
                Field::new("key", DataType::Utf8, false),
                Field::new("value", DataType::Int64, true),
            ]);
            let entries = StructArray::new(fields.clone(), vec![keys, values], None);
            let field = Arc::new(Field::new("entries", DataType::Struct(fields), false));
            one(MapArray::new(field, OffsetBuffer::from_lengths([entries.len()]), entries, None, false))
        };
        assert_eq!(map(vec!["a", "b"], vec![1, 2]), map(vec!["b", "a"], vec![2, 1]));
        assert_ne!(map(vec!["a", "b"], vec![1, 2]), map(vec!["a", "b"], vec![2, 1]));
        let list = |values: Vec<i32>| {
            one(ListArray::from_iter_primitive::<Int32Type, _, _>([Some(values.into_iter().map(Some))]))
        };
        assert_ne!(list(vec![1, 2]), list(vec![2, 1]));
    }

    /// It stands in files: whoever changes it has to keep this one too.
    #[test]
    fn the_same_rows_give_the_same_in_every_release() {
        let row = |a, b: Option<&str>, c, d, e| (a, b.map(str::to_owned), c, d, e);
        let all = rows(&[
            row(Some(1), Some("one"), Some(true), 0.5, Some(vec![Some(1), None])),
            row(None, None, None, f64::NAN, None),
            row(Some(-1), Some(""), Some(false), -0.0, Some(vec![])),
        ]);
        assert_eq!(sum(&[all]), 12_005_475_776_825_283_223);
    }

    #[test]
    fn columns_that_cannot_be_hashed_are_named() {
        let union = UnionArray::try_new(
            [(0, Arc::new(Field::new("a", DataType::Int64, true)))].into_iter().collect(),
            vec![0, 0].into(),
            None,
            vec![Arc::new(Int64Array::from(vec![1, 2]))],
        );
        let rows = batch(vec![Arc::new(Int64Array::from(vec![1, 2])), Arc::new(union.unwrap())]);
        let mut content = Content::new(&rows.schema());
        content.add(&rows);
        assert_eq!(content.skipped(), ["c1"]);
        assert_eq!(content.sum(), one(Int64Array::from(vec![1, 2])));
    }
}
