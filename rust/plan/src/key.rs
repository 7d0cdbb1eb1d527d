//! Keys of keyed state: how a key is kept in a row, a block's key columns in the form that tables look up, and the way back.
//!
//! One integer-like column is kept as its 64-bit hash alone: [`hash_int`](crate::hash::hash_int) is a bijection, so the hash *is* the key and
//! a table never reads the key column. One column of text or binary is kept as its bytes, any other key as arrow-row bytes, both beside
//! their hash. A null of a single column is a key of its own. No key columns at all is the integer key 0: one group.
//! A dictionary is looked up first, and its keys come back as plain values. Floats have one zero and one NaN: -0.0 and 0.0 are the key 0.0, and every NaN is one key, also inside lists and structs.

use arrow_array::{Array, ArrayRef, RecordBatch};
use arrow_buffer::NullBuffer;
use arrow_row::{RowConverter, Rows, SortField};
use arrow_schema::{ArrowError, DataType};

use crate::bytes::{ByteColumn, byte_array};
use crate::column;
use crate::hash::unhash_int;
use crate::record::Records;
use crate::row_format;

/// How a key is stored; part of the state format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeyKind {
    Unit = 0,
    Int = 1,
    Rows = 2,
    Bytes = 3,
}

impl KeyKind {
    pub(crate) fn of(types: &[DataType]) -> Self {
        match types {
            [] => Self::Unit,
            [only] if column::is_integer_like(only) => Self::Int,
            [only] if ByteColumn::supports(only) => Self::Bytes,
            _ => Self::Rows,
        }
    }

    /// Whether a null is a key of its own.
    pub(crate) fn has_null(self) -> bool {
        matches!(self, Self::Int | Self::Bytes)
    }

    /// Whether the key is kept as bytes beside its hash.
    pub(crate) fn has_bytes(self) -> bool {
        matches!(self, Self::Rows | Self::Bytes)
    }
}

/// Turns key columns into keys and keys into columns.
pub(crate) struct KeyCodec {
    columns: Vec<usize>,
    types: Vec<DataType>,
    rows: Option<RowConverter>,
}

/// The keys of one block, by row; integer keys are their hashes.
pub(crate) enum Keys {
    Unit,
    Int(Option<NullBuffer>),
    Bytes(ByteColumn, Option<NullBuffer>),
    Rows(Rows),
}

impl Keys {
    /// Whether the key of a row is a null that is a key of its own.
    #[inline]
    pub(crate) fn is_null(&self, row: usize) -> bool {
        match self {
            Self::Int(nulls) | Self::Bytes(_, nulls) => nulls.as_ref().is_some_and(|nulls| nulls.is_null(row)),
            Self::Unit | Self::Rows(_) => false,
        }
    }

    /// The bytes of a row's key; none for integers.
    #[inline]
    pub(crate) fn bytes(&self, row: usize) -> &[u8] {
        match self {
            Self::Unit | Self::Int(_) => &[],
            Self::Bytes(column, _) => column.get(row),
            Self::Rows(rows) => rows.row(row).data(),
        }
    }
}

impl KeyCodec {
    pub(crate) fn new(columns: Vec<usize>, types: Vec<DataType>) -> Result<Self, ArrowError> {
        let rows = match KeyKind::of(&types) {
            KeyKind::Rows => Some(RowConverter::new(types.iter().cloned().map(SortField::new).collect())?),
            _ => None,
        };
        Ok(Self { columns, types, rows })
    }

    pub(crate) fn encode(&self, batch: &RecordBatch) -> Result<Keys, ArrowError> {
        if let Some(converter) = &self.rows {
            let columns = self.columns.iter().map(|&at| column::one_zero(&column::plain(batch.column(at))?));
            let columns = columns.collect::<Result<Vec<_>, _>>()?;
            return Ok(Keys::Rows(converter.convert_columns(&columns)?));
        }
        let Some(&at) = self.columns.first() else { return Ok(Keys::Unit) };
        // An integer key without nulls has not travelled: its hashes say all.
        let Some(array) = batch.columns().get(at) else { return Ok(Keys::Int(None)) };
        let array = column::plain(array)?;
        let nulls = array.nulls().filter(|nulls| nulls.null_count() > 0).cloned();
        Ok(match ByteColumn::of(&array) {
            Some(column) => Keys::Bytes(column, nulls),
            None => Keys::Int(nulls),
        })
    }

    /// The key columns of `records`.
    pub(crate) fn decode(&self, records: &Records) -> Result<Vec<ArrayRef>, ArrowError> {
        if let Some(converter) = &self.rows {
            return row_format::columns(converter, records.keys.iter());
        }
        let [only] = &self.types[..] else { return Ok(Vec::new()) };
        let mut valid = vec![true; records.len()];
        records.nulls.iter().for_each(|&row| valid[row as usize] = false);
        if ByteColumn::supports(only) {
            let values = records.keys.iter().zip(&valid).map(|(bytes, valid)| valid.then_some(bytes));
            return Ok(vec![byte_array(only, values)?]);
        }
        let codes = records.column(0).map(unhash_int).collect();
        let nulls = (!records.nulls.is_empty()).then(|| NullBuffer::from(valid));
        Ok(vec![column::from_codes(only, codes, nulls)?])
    }
}
