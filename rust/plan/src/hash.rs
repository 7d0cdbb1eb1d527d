//! The key hash. It is part of the format: bins on disk, on the wire and in shuffles are cut by it, so it never changes.
//!
//! One integer-like column: [`hash_int`] of its 64-bit code. One string or binary column: [`hash_bytes`] of its bytes, the same for every
//! Arrow layout of the text but for dictionaries and runs, which are looked up before ([`decoded`]). Any other key, and every composite one: `hash_bytes` of the arrow-row bytes of its columns, where floats
//! have one zero and one NaN. A null in a single column: [`NULL_HASH`]. A golden test pins the values.
//!
//! All 64 bits are well mixed: bins take the top ones, tables inside a bin index by the low ones.

use arrow_array::cast::AsArray;
use arrow_array::types::{Int16Type, Int32Type, Int64Type};
use arrow_array::{Array, ArrayRef, UInt64Array, new_null_array};
use arrow_buffer::ScalarBuffer;
use arrow_row::{RowConverter, SortField};
use arrow_schema::{ArrowError, DataType};
use arrow_select::take::take;

use crate::column;

const SEED: u64 = 0x7065_6e73_746f_636b; // "penstock" in ASCII
const EVEN: u64 = 0x9e37_79b9_7f4a_7c15;
const ODD: u64 = 0xd1b5_4a32_d192_ed03;

/// The hash of a null in a single-column key.
pub const NULL_HASH: u64 = 0x5bf0_3635_dcf5_d1c7;

fn finish(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    (product as u64) ^ ((product >> 64) as u64)
}

/// Takes 16 bytes in.
#[inline]
fn mix(state: u64, first: u64, second: u64) -> u64 {
    // The rotated state is kept beside the product, so a zero factor cannot wipe what came before.
    fold(first ^ EVEN, second ^ state) ^ state.rotate_left(29)
}

/// Hash of an integer's 64-bit code. A bijection: distinct keys never collide.
#[inline]
pub fn hash_int(code: i64) -> u64 {
    finish((code as u64).wrapping_add(EVEN))
}

/// The code whose [`hash_int`] is `hash`: tables keep the hash in place of the key.
#[inline]
pub(crate) fn unhash_int(hash: u64) -> i64 {
    let mut x = hash ^ (hash >> 31) ^ (hash >> 62);
    x = x.wrapping_mul(0x3196_42b2_d24d_8ec3);
    x = (x ^ (x >> 27) ^ (x >> 54)).wrapping_mul(0x96de_1b17_3f11_9089);
    (x ^ (x >> 30) ^ (x >> 60)).wrapping_sub(EVEN) as i64
}

/// Hash of a byte string: 16 bytes per step by folded multiplication, the tail padded with zeros, the length mixed in first.
#[inline]
pub fn hash_bytes(bytes: &[u8]) -> u64 {
    let word = |at: &[u8]| u64::from_le_bytes(at.try_into().expect("eight bytes"));
    let mut state = SEED ^ (bytes.len() as u64).wrapping_mul(ODD);
    let mut step = |block: &[u8]| state = mix(state, word(&block[..8]), word(&block[8..16]));
    let blocks = bytes.chunks_exact(16);
    let tail = blocks.remainder();
    blocks.for_each(&mut step);
    if !tail.is_empty() {
        let mut padded = [0u8; 16];
        padded[..tail.len()].copy_from_slice(tail);
        step(&padded);
    }
    finish(state)
}

/// Hashes rows of key columns; one hash per row. No columns: `rows` times the hash of the one empty key.
///
/// # Errors
/// A column whose type has no arrow-row form.
pub fn hash_columns_of(columns: &[ArrayRef], rows: usize) -> Result<Vec<u64>, ArrowError> {
    match columns {
        [] => Ok(vec![hash_int(0); rows]),
        _ => hash_columns(columns),
    }
}

/// Hashes rows of at least one key column; one hash per row. About 1 ns per integer row, 2 to 5 ns per short string.
///
/// # Errors
/// No column, or a column whose type has no arrow-row form.
pub fn hash_columns(columns: &[ArrayRef]) -> Result<Vec<u64>, ArrowError> {
    let easy = match columns {
        [] => return Err(ArrowError::InvalidArgumentError("a key needs a column".into())),
        [only] => hash_single(only),
        _ => hash_longs(columns),
    };
    if let Some(hashes) = easy {
        return Ok(hashes);
    }
    let fields = columns.iter().map(|column| SortField::new(column.data_type().clone())).collect();
    let plain = columns.iter().map(column::one_zero).collect::<Result<Vec<_>, _>>()?;
    let rows = RowConverter::new(fields)?.convert_columns(&plain)?;
    let mut hashes: Vec<u64> = rows.iter().map(|row| hash_bytes(row.as_ref())).collect();
    if let ([only], true) = (columns, columns[0].null_count() > 0) {
        for (row, hash) in hashes.iter_mut().enumerate() {
            if only.is_null(row) {
                *hash = NULL_HASH;
            }
        }
    }
    Ok(hashes)
}

/// A column of keys with its values in place of dictionaries and runs, so that equal keys have one hash however they are encoded; where
/// there are nulls alone, with nulls of a type. Other columns are shared.
///
/// # Errors
/// A dictionary or runs that do not hold together.
pub fn decoded(array: &ArrayRef) -> Result<ArrayRef, ArrowError> {
    macro_rules! runs {
        ($index:ty) => {
            if let Some(runs) = array.as_run_opt::<$index>() {
                let places = (0..array.len()).map(|row| runs.get_physical_index(row) as u64);
                return decoded(&take(runs.values(), &UInt64Array::from_iter_values(places), None)?);
            }
        };
    }
    match array.data_type() {
        DataType::Dictionary(..) => return decoded(&column::plain(array)?),
        DataType::Null => return Ok(new_null_array(&DataType::Int64, array.len())),
        DataType::RunEndEncoded(..) => {
            runs!(Int16Type);
            runs!(Int32Type);
            runs!(Int64Type);
        }
        _ => {}
    }
    Ok(array.clone())
}

/// The hashes of rows of some columns of 64 bits with a sign and without nulls: without rows of bytes being made of them.
fn hash_longs(columns: &[ArrayRef]) -> Option<Vec<u64>> {
    let values = column::longs(columns)?;
    Some(match &values[..] {
        [a, b] => rows_of_longs([a, b]),
        [a, b, c] => rows_of_longs([a, b, c]),
        values => {
            let mut bytes = vec![1; values.len() * LONG];
            let hash = |row: usize| {
                for (place, values) in bytes.chunks_exact_mut(LONG).zip(values) {
                    place[1..].copy_from_slice(&(values[row] ^ i64::MIN).to_be_bytes());
                }
                hash_bytes(&bytes)
            };
            (0..values[0].len()).map(hash).collect()
        }
    })
}

/// Bytes of a number in a row: 1, that it is no null, and the number, the sign turned over.
const LONG: usize = 1 + size_of::<i64>();

/// The hashes of the bytes of rows of two or three numbers. The bytes are put together as words, as which they are hashed.
fn rows_of_longs<const N: usize>(columns: [&ScalarBuffer<i64>; N]) -> Vec<u64> {
    const { assert!(N * LONG > 16 && N * LONG <= 32, "two blocks") };
    let columns = columns.map(|column| &column[..columns[0].len()]);
    let hash = |row: usize| {
        let mut words = [0_u64; 4];
        for (at, column) in columns.iter().enumerate() {
            let number = u128::from(((column[row] ^ i64::MIN) as u64).swap_bytes());
            let (word, shift) = (at * LONG / 8, at * LONG % 8 * 8);
            let placed = (number << 8 | 1) << shift;
            words[word] |= placed as u64;
            words[word + 1] |= (placed >> 64) as u64;
        }
        let mut state = SEED ^ ((N * LONG) as u64).wrapping_mul(ODD);
        for block in words.chunks_exact(2) {
            state = mix(state, block[0], block[1]);
        }
        finish(state)
    };
    (0..columns[0].len()).map(hash).collect()
}

fn hash_single(array: &ArrayRef) -> Option<Vec<u64>> {
    fn bytes<'a, B: AsRef<[u8]> + ?Sized + 'a>(values: impl Iterator<Item = Option<&'a B>>) -> Vec<u64> {
        values.map(|value| value.map_or(NULL_HASH, |value| hash_bytes(value.as_ref()))).collect()
    }
    Some(match array.data_type() {
        DataType::Utf8 => bytes(array.as_string::<i32>().iter()),
        DataType::LargeUtf8 => bytes(array.as_string::<i64>().iter()),
        DataType::Utf8View => bytes(array.as_string_view().iter()),
        DataType::Binary => bytes(array.as_binary::<i32>().iter()),
        DataType::LargeBinary => bytes(array.as_binary::<i64>().iter()),
        DataType::BinaryView => bytes(array.as_binary_view().iter()),
        DataType::FixedSizeBinary(_) => bytes(array.as_fixed_size_binary().iter()),
        _ => {
            let codes = column::codes(array)?;
            let mut hashes: Vec<u64> = codes.values.iter().map(|&code| hash_int(code)).collect();
            if let Some(nulls) = codes.nulls {
                for (row, hash) in hashes.iter_mut().enumerate() {
                    if nulls.is_null(row) {
                        *hash = NULL_HASH;
                    }
                }
            }
            hashes
        }
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow_array::{DurationSecondArray, Int64Array, TimestampMicrosecondArray};
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn integers_come_back_from_their_hashes(code in any::<i64>()) {
            prop_assert_eq!(unhash_int(hash_int(code)), code);
            prop_assert_eq!(hash_int(unhash_int(code as u64)), code as u64);
        }

        #[test]
        fn rows_of_longs_have_the_hashes_of_their_bytes(rows in prop::collection::vec(any::<[i64; 3]>(), 0..20), from in 0usize..20) {
            let column = |at: usize| rows.iter().map(|row| row[at]).collect::<Vec<i64>>();
            let columns: [ArrayRef; 3] = [
                Arc::new(Int64Array::from(column(0))),
                Arc::new(TimestampMicrosecondArray::from(column(1)).with_timezone("UTC")),
                Arc::new(DurationSecondArray::from(column(2))),
            ];
            let columns = columns.map(|column| column.slice(from.min(rows.len()), rows.len() - from.min(rows.len())));
            let fields = columns.iter().map(|column| SortField::new(column.data_type().clone())).collect();
            let bytes = RowConverter::new(fields).unwrap().convert_columns(&columns).unwrap();
            let expected: Vec<u64> = bytes.iter().map(|row| hash_bytes(row.as_ref())).collect();
            prop_assert_eq!(hash_columns(&columns).unwrap(), expected);
            prop_assert!(hash_longs(&columns).is_some());
            for columns in [&columns[..2], &[&columns[..], &columns[..2]].concat()] {
                let fields = columns.iter().map(|column| SortField::new(column.data_type().clone())).collect();
                let bytes = RowConverter::new(fields).unwrap().convert_columns(columns).unwrap();
                let expected: Vec<u64> = bytes.iter().map(|row| hash_bytes(row.as_ref())).collect();
                prop_assert_eq!(hash_longs(columns), Some(expected));
            }
        }
    }
}
