//! Keys of keyed state: a block's key columns as comparable values, a store of distinct keys, and the way back to columns.
//!
//! One integer-like column is kept as 64-bit codes (a null is a key of its own); any other key as arrow-row bytes in one arena, with its
//! hash beside it. No key columns at all is the code 0: one group. Decoding restores the original types.
//! Floats have one zero and one NaN: -0.0 and 0.0 are the key 0.0.

use arrow_array::{ArrayRef, RecordBatch};
use arrow_buffer::NullBuffer;
use arrow_row::{RowConverter, Rows, SortField};
use arrow_schema::{ArrowError, DataType};

use crate::column::{self, Codes};
use crate::error::StateFault;
use crate::hash::{NULL_HASH, hash_int};
use crate::wire::{Reader, put_blob, put_items, put_u32};

/// How a key is stored; part of the state format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeyKind {
    Unit = 0,
    Int = 1,
    Rows = 2,
}

impl KeyKind {
    pub(crate) fn of(types: &[DataType]) -> Self {
        match types {
            [] => Self::Unit,
            [only] if column::is_integer_like(only) => Self::Int,
            _ => Self::Rows,
        }
    }
}

/// Turns key columns into keys and keys into columns.
pub(crate) struct KeyCodec {
    columns: Vec<usize>,
    types: Vec<DataType>,
    rows: Option<RowConverter>,
}

/// The keys of one block, by row.
pub(crate) enum Keys {
    Unit,
    Int(Codes),
    Rows(Rows),
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
        Ok(match (&self.rows, self.columns.as_slice()) {
            (Some(converter), columns) => {
                let columns = columns.iter().map(|&at| column::one_zero(batch.column(at)));
                let columns = columns.collect::<Result<Vec<_>, _>>()?;
                Keys::Rows(converter.convert_columns(&columns)?)
            }
            (None, []) => Keys::Unit,
            (None, &[at, ..]) => Keys::Int(column::codes(batch.column(at)).expect("integer keys have codes")),
        })
    }

    pub(crate) fn decode(&self, store: &KeyStore) -> Result<Vec<ArrayRef>, ArrowError> {
        match (store, &self.rows, self.types.as_slice()) {
            (KeyStore::Int { .. }, None, []) => Ok(Vec::new()),
            (KeyStore::Int { values, nulls }, None, [only]) => {
                let mut valid = vec![true; values.len()];
                nulls.iter().for_each(|&slot| valid[slot as usize] = false);
                let nulls = (!nulls.is_empty()).then(|| NullBuffer::from(valid));
                Ok(vec![column::from_codes(only, values.clone(), nulls)?])
            }
            (KeyStore::Rows { .. }, Some(converter), _) => {
                let parser = converter.parser();
                converter.convert_rows((0..store.len()).map(|slot| parser.parse(store.row_bytes(slot))))
            }
            _ => unreachable!("a store is made by its codec's kind"),
        }
    }
}

/// Distinct keys in slots 0, 1, 2...; also used with repetitions for output rows.
#[derive(Clone)]
pub(crate) enum KeyStore {
    /// `nulls` lists the slots (ascending) that hold a null; their value is 0.
    Int { values: Vec<i64>, nulls: Vec<u32> },
    /// Key `i` is `bytes[ends[i-1]..ends[i]]`.
    Rows { bytes: Vec<u8>, ends: Vec<usize>, hashes: Vec<u64> },
}

impl KeyStore {
    pub(crate) fn new(kind: KeyKind) -> Self {
        match kind {
            KeyKind::Unit | KeyKind::Int => Self::Int { values: Vec::new(), nulls: Vec::new() },
            KeyKind::Rows => Self::Rows { bytes: Vec::new(), ends: Vec::new(), hashes: Vec::new() },
        }
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Int { values, .. } => values.len(),
            Self::Rows { ends, .. } => ends.len(),
        }
    }

    /// The bytes of key `slot`; only for stores of bytes.
    pub(crate) fn row_bytes(&self, slot: usize) -> &[u8] {
        match self {
            Self::Rows { bytes, ends, .. } => &bytes[slot.checked_sub(1).map_or(0, |before| ends[before])..ends[slot]],
            Self::Int { .. } => unreachable!("integer keys have no bytes"),
        }
    }

    pub(crate) fn hash(&self, slot: usize) -> u64 {
        match self {
            Self::Int { values, nulls } if nulls.binary_search(&(slot as u32)).is_err() => hash_int(values[slot]),
            Self::Int { .. } => NULL_HASH,
            Self::Rows { hashes, .. } => hashes[slot],
        }
    }

    pub(crate) fn push_int(&mut self, value: Option<i64>) {
        match self {
            Self::Int { values, nulls } => {
                if value.is_none() {
                    nulls.push(values.len() as u32);
                }
                values.push(value.unwrap_or(0));
            }
            Self::Rows { .. } => unreachable!("an integer key in a store of bytes"),
        }
    }

    pub(crate) fn push_row(&mut self, row: &[u8], hash: u64) {
        match self {
            Self::Rows { bytes, ends, hashes } => {
                bytes.extend_from_slice(row);
                ends.push(bytes.len());
                hashes.push(hash);
            }
            Self::Int { .. } => unreachable!("key bytes in a store of integers"),
        }
    }

    /// The integer in `slot`, `None` for a null; only for stores of integers.
    pub(crate) fn int(&self, slot: usize) -> Option<i64> {
        match self {
            Self::Int { values, nulls } => nulls.binary_search(&(slot as u32)).is_err().then(|| values[slot]),
            Self::Rows { .. } => unreachable!("an integer asked of a store of bytes"),
        }
    }

    pub(crate) fn push_from(&mut self, other: &Self, slot: usize) {
        match other {
            Self::Int { .. } => self.push_int(other.int(slot)),
            Self::Rows { hashes, .. } => self.push_row(other.row_bytes(slot), hashes[slot]),
        }
    }

    pub(crate) fn truncate(&mut self, len: usize) {
        match self {
            Self::Int { values, nulls } => {
                values.truncate(len);
                nulls.retain(|&slot| (slot as usize) < len);
            }
            Self::Rows { bytes, ends, hashes } => {
                ends.truncate(len);
                hashes.truncate(len);
                bytes.truncate(ends.last().copied().unwrap_or(0));
            }
        }
    }

    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Int { values, nulls } => values.capacity() * 8 + nulls.capacity() * 4,
            Self::Rows { bytes, ends, hashes } => bytes.capacity() + (ends.capacity() + hashes.capacity()) * 8,
        }
    }

    /// Bytes that `encode` writes for `slot`, without the null list.
    pub(crate) fn encoded_len(&self, slot: usize) -> usize {
        match self {
            Self::Int { .. } => 8,
            Self::Rows { .. } => 12 + self.row_bytes(slot).len(),
        }
    }

    pub(crate) fn encode(&self, slots: std::ops::Range<usize>, out: &mut Vec<u8>) {
        match self {
            Self::Int { values, nulls } => {
                put_items(out, &values[slots.clone()], i64::to_le_bytes);
                let inside: Vec<u32> = nulls
                    .iter()
                    .filter(|&&slot| slots.contains(&(slot as usize)))
                    .map(|&slot| slot - slots.start as u32)
                    .collect();
                put_u32(out, inside.len() as u32);
                put_items(out, &inside, u32::to_le_bytes);
            }
            Self::Rows { hashes, .. } => {
                put_items(out, &hashes[slots.clone()], u64::to_le_bytes);
                slots.for_each(|slot| put_blob(out, self.row_bytes(slot)));
            }
        }
    }

    pub(crate) fn decode(kind: KeyKind, reader: &mut Reader<'_>, count: usize) -> Result<Self, StateFault> {
        let mut store = Self::new(kind);
        match &mut store {
            Self::Int { values, nulls } => {
                reader.items(count, values, i64::from_le_bytes)?;
                let null_count = reader.u32()? as usize;
                reader.items(null_count, nulls, u32::from_le_bytes)?;
                if nulls.iter().any(|&slot| slot as usize >= count) || !nulls.is_sorted_by(|a, b| a < b) {
                    return Err(StateFault::Corrupt { what: "the list of null keys" });
                }
            }
            Self::Rows { bytes, ends, hashes } => {
                reader.items(count, hashes, u64::from_le_bytes)?;
                for _ in 0..count {
                    let len = reader.u32()? as usize;
                    bytes.extend_from_slice(reader.take(len)?);
                    ends.push(bytes.len());
                }
            }
        }
        Ok(store)
    }
}
