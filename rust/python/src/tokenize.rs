//! Words of a text: maximal runs of the bytes `A-Z a-z`, lower-cased; every other byte separates.
//!
//! One pass over the bytes with a table look-up per byte, no branch on the letter itself, one output buffer of at most
//! the input's size. A bit over one nanosecond per byte.
//!
//! It is in the extension because `workloads.wordcount` of an installed wheel splits its text with it: 24 ns per byte by Python's `re`,
//! 28 by the kernels of pyarrow. What that costs: see `nexmark`.

use std::sync::Arc;

use arrow_array::types::ByteArrayType;
use arrow_array::{Array, ArrayRef, GenericByteArray, RecordBatch as Batch, StringArray, StringViewArray};
use arrow_array::{BinaryArray, LargeBinaryArray, LargeStringArray};
use arrow_buffer::{OffsetBuffer, ScalarBuffer};
use arrow_schema::{DataType, Field, Schema};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;

use crate::arrow::{RecordBatch, import_array};
use crate::errors::{self, Kind};

/// Lower-cased letter, or 0 for a separator.
const LETTER: [u8; 256] = {
    let mut table = [0; 256];
    let mut byte = b'a';
    while byte <= b'z' {
        table[byte as usize] = byte;
        table[byte.to_ascii_uppercase() as usize] = byte;
        byte += 1;
    }
    table
};

/// Collects words of one text after the other.
struct Words {
    letters: Vec<u8>,
    ends: Vec<i32>,
}

impl Words {
    /// Room for the words of `bytes` bytes of text; `None` when 32-bit offsets could not address them.
    fn for_bytes(bytes: usize) -> Option<Self> {
        i32::try_from(bytes).ok()?;
        let mut ends = Vec::with_capacity(bytes / 5 + 2);
        ends.push(0);
        Some(Self { letters: vec![0; bytes + 1], ends })
    }

    /// Appends the words of `text`; `at` letters are filled, the new fill is returned.
    fn push(&mut self, text: &[u8], mut at: usize) -> usize {
        // `letters` has one byte more than all texts together, so a write that is not kept still lands inside.
        let mut inside = false;
        for &byte in text {
            let letter = LETTER[byte as usize];
            self.letters[at] = letter;
            let is_letter = letter != 0;
            at += usize::from(is_letter);
            if inside && !is_letter {
                self.ends.push(at as i32);
            }
            inside = is_letter;
        }
        if inside {
            self.ends.push(at as i32);
        }
        at
    }

    fn finish(mut self, filled: usize) -> Batch {
        self.letters.truncate(filled);
        let offsets = OffsetBuffer::new(ScalarBuffer::from(self.ends));
        let words = StringArray::new(offsets, self.letters.into(), None);
        let schema = Schema::new(vec![Field::new("word", DataType::Utf8, false)]);
        Batch::try_new(Arc::new(schema), vec![Arc::new(words)]).expect("one column of the declared type")
    }
}

fn too_long(bytes: usize) -> PyErr {
    errors::raise(Kind::Value, &format!("text of {bytes} bytes is longer than 2 GiB: tokenize it in parts"))
}

fn of_texts<'a>(bytes: usize, texts: impl Iterator<Item = Option<&'a [u8]>>) -> Option<Batch> {
    let mut words = Words::for_bytes(bytes)?;
    let mut filled = 0;
    for text in texts.flatten() {
        filled = words.push(text, filled);
    }
    Some(words.finish(filled))
}

fn of_array(array: &ArrayRef) -> PyResult<Batch> {
    fn generic<T: ByteArrayType>(array: &GenericByteArray<T>) -> (usize, Option<Batch>)
    where
        T::Native: AsRef<[u8]>,
    {
        let bytes = array.iter().flatten().map(|text| text.as_ref().len()).sum();
        (bytes, of_texts(bytes, array.iter().map(|text| text.map(AsRef::as_ref))))
    }
    let any = array.as_any();
    let (bytes, batch) = if let Some(array) = any.downcast_ref::<StringArray>() {
        generic(array)
    } else if let Some(array) = any.downcast_ref::<LargeStringArray>() {
        generic(array)
    } else if let Some(array) = any.downcast_ref::<BinaryArray>() {
        generic(array)
    } else if let Some(array) = any.downcast_ref::<LargeBinaryArray>() {
        generic(array)
    } else if let Some(array) = any.downcast_ref::<StringViewArray>() {
        let bytes = array.iter().flatten().map(str::len).sum();
        (bytes, of_texts(bytes, array.iter().map(|text| text.map(str::as_bytes))))
    } else {
        let found = array.data_type();
        return Err(errors::raise(Kind::Type, &format!("tokenize takes strings or binaries, got {found}")));
    };
    batch.ok_or_else(|| too_long(bytes))
}

/// The words of a text, in order, as one column `word`.
#[pyfunction]
pub(crate) fn tokenize(py: Python<'_>, text: &Bound<'_, PyAny>) -> PyResult<RecordBatch> {
    let batch = if let Ok(bytes) = text.extract::<PyBackedBytes>() {
        py.detach(|| of_texts(bytes.len(), std::iter::once(Some(&bytes[..])))).ok_or_else(|| too_long(bytes.len()))?
    } else {
        let array = import_array(text)?;
        py.detach(|| of_array(&array))?
    };
    Ok(RecordBatch::new(batch))
}
