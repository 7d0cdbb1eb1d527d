//! Rows in memory of their own.
//!
//! A block of another language keeps everything alive that it came with, however little of it is left, and a block that gives columns back as they
//! came keeps the block before. Kernels of Arrow copy no more than they must: views keep the buffers of their values, dictionaries their values,
//! nulls are shared.
//!
//! Invariant: what is made shares no buffer with what it was made of, at any depth.

use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::{Array, ArrayRef, BinaryViewArray, RecordBatch, RecordBatchOptions, StringViewArray, make_array};
use arrow_schema::{ArrowError, DataType};
use arrow_select::concat::concat;

/// The same rows in memory of their own; a column that Arrow cannot copy stays as it is. Cost: one copy, of the values of dictionaries as well.
#[must_use]
pub fn owned(batch: &RecordBatch) -> RecordBatch {
    let columns = batch.columns().iter().map(|column| own(column).unwrap_or_else(|_| column.clone())).collect();
    let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
    RecordBatch::try_new_with_options(batch.schema(), columns, &options).unwrap_or_else(|_| batch.clone())
}

fn own(array: &ArrayRef) -> Result<ArrayRef, ArrowError> {
    // Of a single array it would make no copy.
    unshared(concat(&[array, &array.slice(0, 0)])?)
}

/// A copied array, without what copies share.
fn unshared(array: ArrayRef) -> Result<ArrayRef, ArrowError> {
    Ok(match array.data_type() {
        DataType::Utf8View => Arc::new(array.as_string_view().iter().collect::<StringViewArray>()),
        DataType::BinaryView => Arc::new(array.as_binary_view().iter().collect::<BinaryViewArray>()),
        kind if !shares(kind) => array,
        kind => {
            let whole = matches!(kind, DataType::Dictionary(..) | DataType::RunEndEncoded(..));
            let data = array.to_data();
            let children = data.child_data().iter().map(|child| {
                let child = make_array(child.clone());
                let made = if whole { own(&child) } else { unshared(child) };
                made.map(|made| made.to_data())
            });
            let children = children.collect::<Result<_, _>>()?;
            make_array(data.into_builder().child_data(children).build()?)
        }
    })
}

/// Whether a copy of such an array shares values with it.
fn shares(kind: &DataType) -> bool {
    match kind {
        DataType::Utf8View | DataType::BinaryView | DataType::Dictionary(..) | DataType::RunEndEncoded(..) => true,
        DataType::List(item)
        | DataType::LargeList(item)
        | DataType::ListView(item)
        | DataType::LargeListView(item)
        | DataType::FixedSizeList(item, _)
        | DataType::Map(item, _) => shares(item.data_type()),
        DataType::Struct(fields) => fields.iter().any(|field| shares(field.data_type())),
        DataType::Union(fields, _) => fields.iter().any(|(_, field)| shares(field.data_type())),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use arrow_array::builder::{Int32Builder, ListBuilder, MapBuilder, StringBuilder, StringViewBuilder};
    use arrow_array::types::Int32Type;
    use arrow_array::{
        BooleanArray, DictionaryArray, FixedSizeListArray, Int64Array, RunArray, StringArray, StructArray,
        new_null_array,
    };
    use arrow_buffer::NullBuffer;
    use arrow_data::ArrayData;
    use arrow_schema::Field;

    use super::*;

    const LONG: &str = "a value that is longer than twelve bytes";

    fn views() -> StringViewArray {
        [Some("short"), None, Some(LONG), Some("")].into_iter().collect()
    }

    /// Of every kind one, all of four rows.
    fn arrays() -> Vec<ArrayRef> {
        let mut lists = ListBuilder::new(StringViewBuilder::new());
        let mut maps = MapBuilder::new(None, StringBuilder::new(), Int32Builder::new());
        for row in 0..4 {
            (0..row).for_each(|at| lists.values().append_option((at != 1).then_some(LONG)));
            lists.append(row != 2);
            maps.keys().append_value(LONG);
            maps.values().append_option((row != 1).then_some(row));
            maps.append(row != 2).unwrap();
        }
        let words: DictionaryArray<Int32Type> = [Some(LONG), None, Some("b"), Some(LONG)].into_iter().collect();
        let runs: RunArray<Int32Type> = [LONG, LONG, "b", "b"].into_iter().collect();
        let field = |name, array: &dyn Array| Arc::new(Field::new(name, array.data_type().clone(), true));
        let nested = StructArray::try_new(
            vec![field("views", &views()), field("words", &words), field("none", &new_null_array(&DataType::Null, 4))]
                .into(),
            vec![Arc::new(views()), Arc::new(words.clone()), new_null_array(&DataType::Null, 4)],
            Some([true, false, true, true].as_slice().into()),
        );
        let pairs = views().slice(0, 4);
        let pairs: ArrayRef = concat(&[&pairs, &pairs]).unwrap();
        vec![
            Arc::new(Int64Array::from(vec![Some(1), None, Some(3), Some(4)])),
            Arc::new(BooleanArray::from(vec![Some(true), None, Some(false), Some(true)])),
            Arc::new(StringArray::from(vec![Some(LONG), None, Some(""), Some("b")])),
            Arc::new(views()),
            Arc::new(StringViewArray::from_iter_values(["a", "b", "c", "d"])),
            Arc::new([Some(LONG.as_bytes()), None, Some(b"b"), Some(b"")].into_iter().collect::<BinaryViewArray>()),
            Arc::new(words),
            Arc::new(runs),
            Arc::new(lists.finish()),
            Arc::new(maps.finish()),
            Arc::new(FixedSizeListArray::new(field("item", &pairs), 2, pairs, None)),
            Arc::new(nested.unwrap()),
        ]
    }

    /// Where its bytes are.
    fn places(array: &dyn Array) -> BTreeSet<usize> {
        fn add(data: &ArrayData, places: &mut BTreeSet<usize>) {
            let nulls = data.nulls().map(NullBuffer::buffer);
            let buffers = data.buffers().iter().chain(nulls).filter(|buffer| !buffer.is_empty());
            places.extend(buffers.map(|buffer| buffer.data_ptr().as_ptr() as usize));
            data.child_data().iter().for_each(|child| add(child, places));
        }
        let mut places = BTreeSet::new();
        add(&array.to_data(), &mut places);
        places
    }

    #[test]
    fn what_is_owned_is_equal_and_shares_nothing() {
        for array in arrays() {
            for array in [array.clone(), array.slice(1, 2), array.slice(0, 0)] {
                let made = own(&array).unwrap();
                assert_eq!(&made, &array);
                assert_eq!(made.data_type(), array.data_type());
                let shared = places(&made).intersection(&places(&array)).count();
                assert_eq!(shared, 0, "{:?}", array.data_type());
            }
        }
    }

    #[test]
    fn what_goes_around_stays_as_small_as_it_was() {
        for array in arrays() {
            let once = own(&array).unwrap();
            let often = (0..40).fold(once.clone(), |array, _| own(&array).unwrap());
            assert_eq!(places(&often).len(), places(&once).len(), "{:?}", array.data_type());
            assert_eq!(often.get_buffer_memory_size(), once.get_buffer_memory_size(), "{:?}", array.data_type());
        }
    }
}
