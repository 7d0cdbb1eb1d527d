//! Byte strings: an arena of them, and the columns of text and binary that they come from and go back to.

use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::{BinaryType, ByteArrayType, LargeBinaryType, LargeUtf8Type, Utf8Type};
use arrow_array::{Array, ArrayRef, BinaryViewArray, FixedSizeBinaryArray, GenericByteArray, StringViewArray};
use arrow_buffer::{ArrowNativeType, Buffer, NullBuffer, OffsetBuffer, ScalarBuffer};
use arrow_schema::{ArrowError, DataType};

/// Byte strings 0, 1, 2... end to end.
#[derive(Clone, Debug, Default)]
pub(crate) struct Texts {
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

impl Texts {
    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    #[inline]
    pub(crate) fn get(&self, at: usize) -> &[u8] {
        let start = if at == 0 { 0 } else { self.ends[at - 1] };
        &self.bytes[start..self.ends[at]]
    }

    pub(crate) fn push(&mut self, text: &[u8]) {
        self.bytes.extend_from_slice(text);
        self.ends.push(self.bytes.len());
    }

    pub(crate) fn truncate(&mut self, len: usize) {
        self.ends.truncate(len);
        self.bytes.truncate(self.ends.last().copied().unwrap_or(0));
    }

    /// Bytes of all texts together.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.len()
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        self.bytes.capacity() + self.ends.capacity() * size_of::<usize>()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &[u8]> + Clone {
        (0..self.len()).map(|at| self.get(at))
    }
}

/// A column of text or binary in any Arrow layout, by row.
pub(crate) enum ByteColumn {
    Small(OffsetBuffer<i32>, Buffer),
    Large(OffsetBuffer<i64>, Buffer),
    Text(StringViewArray),
    Binary(BinaryViewArray),
    Fixed(FixedSizeBinaryArray),
}

impl ByteColumn {
    /// Whether values of this type are byte strings as they are.
    pub(crate) fn supports(data_type: &DataType) -> bool {
        use DataType::*;
        matches!(data_type, Utf8 | LargeUtf8 | Utf8View | Binary | LargeBinary | BinaryView | FixedSizeBinary(_))
    }

    pub(crate) fn of(array: &dyn Array) -> Option<Self> {
        fn small<T: ByteArrayType<Offset = i32>>(array: &dyn Array) -> ByteColumn {
            let array = array.as_bytes::<T>();
            ByteColumn::Small(array.offsets().clone(), array.values().clone())
        }
        fn large<T: ByteArrayType<Offset = i64>>(array: &dyn Array) -> ByteColumn {
            let array = array.as_bytes::<T>();
            ByteColumn::Large(array.offsets().clone(), array.values().clone())
        }
        Some(match array.data_type() {
            DataType::Utf8 => small::<Utf8Type>(array),
            DataType::Binary => small::<BinaryType>(array),
            DataType::LargeUtf8 => large::<LargeUtf8Type>(array),
            DataType::LargeBinary => large::<LargeBinaryType>(array),
            DataType::Utf8View => Self::Text(array.as_string_view().clone()),
            DataType::BinaryView => Self::Binary(array.as_binary_view().clone()),
            DataType::FixedSizeBinary(_) => Self::Fixed(array.as_fixed_size_binary().clone()),
            _ => return None,
        })
    }

    /// The bytes of a row; of a null, anything.
    #[inline]
    pub(crate) fn get(&self, row: usize) -> &[u8] {
        match self {
            Self::Small(ends, bytes) => &bytes[ends[row] as usize..ends[row + 1] as usize],
            Self::Large(ends, bytes) => &bytes[ends[row] as usize..ends[row + 1] as usize],
            Self::Text(array) => array.value(row).as_bytes(),
            Self::Binary(array) => array.value(row),
            Self::Fixed(array) => array.value(row),
        }
    }
}

/// The column of `data_type` that holds `values`; the text of a null is left out.
///
/// # Errors
/// Text that is not UTF-8, or 2 GiB and more in a column with small offsets.
pub(crate) fn byte_array<'a>(
    data_type: &DataType,
    values: impl Iterator<Item = Option<&'a [u8]>> + Clone,
) -> Result<ArrayRef, ArrowError> {
    fn plain<'a, T: ByteArrayType>(
        values: impl Iterator<Item = Option<&'a [u8]>> + Clone,
    ) -> Result<ArrayRef, ArrowError> {
        let total = values.clone().flatten().map(<[u8]>::len).sum::<usize>();
        if T::Offset::from_usize(total).is_none() {
            return Err(ArrowError::OffsetOverflowError(total));
        }
        let mut bytes = Vec::with_capacity(total);
        let (mut ends, mut valid) = (vec![T::Offset::default()], Vec::new());
        for value in values {
            bytes.extend_from_slice(value.unwrap_or_default());
            ends.push(T::Offset::from_usize(bytes.len()).expect("the total fits: checked above"));
            valid.push(value.is_some());
        }
        let ends = OffsetBuffer::new(ScalarBuffer::from(ends));
        let nulls = Some(NullBuffer::from(valid)).filter(|nulls| nulls.null_count() > 0);
        Ok(Arc::new(GenericByteArray::<T>::try_new(ends, Buffer::from_vec(bytes), nulls)?))
    }
    let text = |value: &'a [u8]| {
        std::str::from_utf8(value).map_err(|error| ArrowError::InvalidArgumentError(error.to_string()))
    };
    Ok(match data_type {
        DataType::Utf8 => plain::<Utf8Type>(values)?,
        DataType::Binary => plain::<BinaryType>(values)?,
        DataType::LargeUtf8 => plain::<LargeUtf8Type>(values)?,
        DataType::LargeBinary => plain::<LargeBinaryType>(values)?,
        DataType::Utf8View => {
            Arc::new(values.map(|value| value.map(text).transpose()).collect::<Result<StringViewArray, _>>()?)
        }
        DataType::BinaryView => Arc::new(values.collect::<BinaryViewArray>()),
        DataType::FixedSizeBinary(width) => {
            Arc::new(FixedSizeBinaryArray::try_from_sparse_iter_with_size(values, *width)?)
        }
        other => return Err(ArrowError::InvalidArgumentError(format!("{other} holds no byte strings"))),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow_array::{BinaryArray, LargeBinaryArray, LargeStringArray, StringArray};

    #[test]
    fn every_layout_comes_back() {
        let values = [Some(&b"abc"[..]), None, Some(b"a longer than inlined"), Some(b"")];
        let texts = values.map(|value| value.map(|value| std::str::from_utf8(value).unwrap()));
        let fixed = [Some(&b"abc"[..]), None, Some(b"def"), Some(b"ghi")];
        let arrays: [ArrayRef; 7] = [
            Arc::new(StringArray::from_iter(texts)),
            Arc::new(LargeStringArray::from_iter(texts)),
            Arc::new(StringViewArray::from_iter(texts)),
            Arc::new(BinaryArray::from_iter(values)),
            Arc::new(LargeBinaryArray::from_iter(values)),
            Arc::new(BinaryViewArray::from_iter(values)),
            Arc::new(FixedSizeBinaryArray::try_from_sparse_iter_with_size(fixed.into_iter(), 3).unwrap()),
        ];
        for array in arrays {
            for array in [array.clone(), array.slice(1, 2)] {
                let column = ByteColumn::of(&array).unwrap();
                let values = (0..array.len()).map(|row| array.is_valid(row).then(|| column.get(row)));
                assert_eq!(&byte_array(array.data_type(), values).unwrap(), &array);
            }
        }
        let odd = byte_array(&DataType::Utf8, [Some(&[0xff_u8][..])].into_iter());
        assert!(odd.is_err(), "text is UTF-8");
        assert!(byte_array(&DataType::Utf8View, [Some(&[0xff_u8][..])].into_iter()).is_err());
    }

    #[test]
    fn texts_are_kept_end_to_end() {
        let mut texts = Texts::default();
        ["one", "", "three"].iter().for_each(|text| texts.push(text.as_bytes()));
        assert_eq!(texts.iter().collect::<Vec<_>>(), [&b"one"[..], b"", b"three"]);
        texts.truncate(1);
        texts.push(b"2");
        assert_eq!((texts.len(), texts.get(1)), (2, &b"2"[..]));
    }
}
