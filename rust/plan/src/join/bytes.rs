//! The bytes of a block's rows as they are kept: those of `arrow-row`, which of numbers alone are written row by row, for the rows that are asked for.

use arrow_array::ArrayRef;
use arrow_buffer::ScalarBuffer;
use arrow_row::{RowConverter, Rows};
use arrow_schema::ArrowError;

use crate::column::longs;

/// Bytes of a number in a row: 1, that it is no null, and the number, the sign turned over.
const LONG: usize = 1 + size_of::<i64>();

/// See the module.
pub(super) enum Bytes {
    Longs(Longs),
    Rows(Rows),
}

impl Bytes {
    /// Of these columns, whose converter it is.
    pub(super) fn new(converter: &RowConverter, columns: &[ArrayRef]) -> Result<Self, ArrowError> {
        Ok(match Longs::new(columns) {
            Some(longs) => Self::Longs(longs),
            None => Self::Rows(converter.convert_columns(columns)?),
        })
    }

    #[inline]
    pub(super) fn row(&mut self, row: usize) -> &[u8] {
        match self {
            Self::Longs(longs) => longs.row(row),
            Self::Rows(rows) => rows.row(row).data(),
        }
    }
}

/// Columns of 64 bits with a sign and without nulls.
pub(super) struct Longs {
    columns: Vec<ScalarBuffer<i64>>,
    /// Of the row that was asked for last.
    bytes: Vec<u8>,
}

impl Longs {
    /// None where a column is another.
    pub(super) fn new(columns: &[ArrayRef]) -> Option<Self> {
        let columns = longs(columns)?;
        let bytes = vec![1; columns.len() * LONG];
        Some(Self { columns, bytes })
    }

    #[inline]
    pub(super) fn row(&mut self, row: usize) -> &[u8] {
        for (place, column) in self.bytes.chunks_exact_mut(LONG).zip(&self.columns) {
            place[1..].copy_from_slice(&(column[row] ^ i64::MIN).to_be_bytes());
        }
        &self.bytes
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow_array::{Date64Array, Int64Array, StringArray, TimestampNanosecondArray};
    use arrow_row::SortField;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn rows_of_longs_are_those_of_arrow(rows in prop::collection::vec(any::<[i64; 3]>(), 1..20), from in 0usize..20, kind in 0..3) {
            let column = |at: usize| rows.iter().map(|row| row[at]).collect::<Vec<i64>>();
            let last: ArrayRef = match kind {
                0 => Arc::new(StringArray::from_iter_values(column(2).iter().map(i64::to_string))),
                1 => Arc::new(column(2).into_iter().map(|value| (value > 0).then_some(value)).collect::<Int64Array>()),
                _ => Arc::new(Date64Array::from(column(2))),
            };
            let columns: [ArrayRef; 3] = [
                Arc::new(Int64Array::from(column(0))),
                Arc::new(TimestampNanosecondArray::from(column(1)).with_timezone("Europe/Vienna")),
                last,
            ];
            let from = from.min(rows.len());
            let columns = columns.map(|column| column.slice(from, rows.len() - from));
            let fields = columns.iter().map(|column| SortField::new(column.data_type().clone())).collect();
            let converter = RowConverter::new(fields).unwrap();
            let mut bytes = Bytes::new(&converter, &columns).unwrap();
            let plain = kind == 2 || kind == 1 && columns[2].null_count() == 0;
            prop_assert_eq!(matches!(bytes, Bytes::Longs(_)), plain);
            for (row, expected) in converter.convert_columns(&columns).unwrap().iter().enumerate() {
                prop_assert_eq!(bytes.row(row), expected.data());
            }
        }
    }
}
