//! Rows in the format of `arrow-row` that were kept: in files, and on their way between members.
//!
//! Invariant: whatever their bytes are, reading them ends with columns or an error. The crate checks texts, yet where a row ends before its
//! columns do it panics, which is one more way to be damaged here.

use std::panic::{AssertUnwindSafe, catch_unwind};

use arrow_array::ArrayRef;
use arrow_row::RowConverter;
use arrow_schema::ArrowError;

/// The columns of rows.
///
/// # Errors
/// They are none of this converter.
pub(crate) fn columns<'a>(
    converter: &RowConverter,
    rows: impl Iterator<Item = &'a [u8]>,
) -> Result<Vec<ArrayRef>, ArrowError> {
    let parser = converter.parser();
    let read = || converter.convert_rows(rows.map(|row| parser.parse(row)));
    catch_unwind(AssertUnwindSafe(read))
        .unwrap_or_else(|_| Err(ArrowError::InvalidArgumentError("corrupt state: a row is none".into())))
}
