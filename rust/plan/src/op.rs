//! What every keyed operator is to the host: rows in, watermarks in, end of epoch in; blocks out.
//!
//! An operator holds no keyed state of its own: that lives in bins, which move between workers. It holds converters, scratch memory and the
//! watermark. The host calls it in the order of flow time: the rows of a slice, then, in the epoch's last slice, the watermark, then
//! the end of the epoch.

use arrow_array::cast::AsArray;
use arrow_array::{Array, ArrayRef, OffsetSizeTrait, RecordBatch};
use arrow_schema::{DataType, Schema, SchemaRef};

use crate::error::{OpError, StepName};
use crate::partition::bin_of;
use crate::state::State;

/// Output blocks have at most this many rows.
pub const BLOCK_ROWS: usize = 65_536;
/// Bytes of keys and values after which a block of output ends: columns of text hold less than 2^31.
pub(crate) const BLOCK_BYTES: usize = 64 << 20;

/// The bins a worker holds, as an operator sees them.
pub trait Bins {
    /// Number of top hash bits that name a bin, where none is split.
    fn bits(&self) -> u8;
    /// Whether parts of a bin are held here, so that [`bin_of`](Self::bin_of) is to be asked.
    fn is_split(&self) -> bool {
        false
    }
    /// The bin, or part of one, that a hash falls into.
    fn bin_of(&self, hash: u64) -> u32 {
        bin_of(hash, self.bits())
    }
    /// The state of a bin, when this worker holds it.
    fn state(&mut self, bin: u32) -> Option<&mut State>;
    /// Whether this worker holds a bin.
    fn holds(&self, bin: u32) -> bool;
    /// The bins this worker holds, ascending.
    fn held(&self) -> Vec<u32>;
    /// The bins that have come since the last call, or whose [`state`](Self::state) was asked for: each once and in no order. Some may have gone.
    fn take_changed(&mut self) -> Vec<u32>;
}

/// What an operator gives back.
#[derive(Clone, Debug)]
pub enum Output {
    /// Rows of the stage's output schema, at most [`BLOCK_ROWS`].
    Rows(RecordBatch),
    /// Rows of the stage's routed schema that came after all their windows had fired, or that have no event time.
    Late(RecordBatch),
    /// Rows of a side output, by its number among those of the step.
    Side(usize, RecordBatch),
}

/// Takes an operator's output, block by block.
pub type Sink<'a> = dyn FnMut(Output) + 'a;

/// What an operator knows of the cost of single bins.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OwnCosts {
    /// Nanoseconds that were spent on a bin alone, by its number; one may come several times.
    pub spent: Vec<(u32, u64)>,
    /// Hashes of rows that it has made where one that comes makes many: one of [`SAMPLE`](penstock_bins::SAMPLE).
    pub met: Vec<u64>,
}

/// One keyed stage on one worker.
pub trait KeyedOp {
    /// Applies a routed block of a side, 0 where it has one, to this worker's bins. Rows of one key are applied in their order.
    ///
    /// # Errors
    /// Faults of the data leave the state unchanged; a sum of decimals that wraps 128 bits and user code that fails do not: roll back.
    fn apply(
        &mut self,
        bins: &mut dyn Bins,
        side: usize,
        batch: &RecordBatch,
        hashes: &[u64],
        out: &mut Sink<'_>,
    ) -> Result<(), OpError>;

    /// Like [`apply`](Self::apply), of as many of the first rows as give about as much as should be held at once; returns how many: at least one,
    /// all but where rows give many others.
    ///
    /// # Errors
    /// As `apply`.
    fn apply_some(
        &mut self,
        bins: &mut dyn Bins,
        side: usize,
        batch: &RecordBatch,
        hashes: &[u64],
        out: &mut Sink<'_>,
    ) -> Result<usize, OpError> {
        self.apply(bins, side, batch, hashes, out)?;
        Ok(batch.num_rows())
    }

    /// Moves the watermark (microseconds since 1970; `i64::MAX` at the end of input) and fires what it completes. A watermark that is not
    /// above the current one does nothing.
    fn watermark(&mut self, bins: &mut dyn Bins, watermark_us: i64, out: &mut Sink<'_>) -> Result<(), OpError>;

    /// Like [`watermark`](Self::watermark), as far as `apply_some` goes; returns whether it is done.
    ///
    /// # Errors
    /// As `watermark`.
    fn watermark_some(&mut self, bins: &mut dyn Bins, watermark_us: i64, out: &mut Sink<'_>) -> Result<bool, OpError> {
        self.watermark(bins, watermark_us, out)?;
        Ok(true)
    }

    /// Ends an epoch: running aggregates emit the keys that changed.
    fn end_epoch(&mut self, bins: &mut dyn Bins, out: &mut Sink<'_>) -> Result<(), OpError>;

    /// Sets the watermark without firing, when a worker joins or an epoch was rolled back.
    fn resume(&mut self, watermark_us: i64);

    /// The processing time of the epoch that ends, in milliseconds since 1970: fixed by the host, equal when the epoch is repeated. Comes
    /// before the watermark.
    fn clock(&mut self, _clock_ms: i64) {}

    /// What it has learnt of the cost of single bins since the last call. What it says nothing of costs each of its rows the same.
    fn own_costs(&mut self) -> OwnCosts {
        OwnCosts::default()
    }
}

/// The bin that a hash falls into, of many: bins are asked only where one is split.
#[inline]
pub(crate) fn bin_among(bins: &dyn Bins, (bits, split): (u8, bool), hash: u64) -> u32 {
    if split { bins.bin_of(hash) } else { bin_of(hash, bits) }
}

pub(crate) fn check_hashes(batch: &RecordBatch, hashes: &[u64]) -> Result<(), OpError> {
    match batch.num_rows() == hashes.len() {
        true => Ok(()),
        false => Err(OpError::Hashes { rows: batch.num_rows(), hashes: hashes.len() }),
    }
}

fn words(schema: &Schema) -> String {
    let columns: Vec<String> =
        schema.fields().iter().map(|field| format!("{} {}", field.name(), field.data_type())).collect();
    format!("({})", columns.join(", "))
}

/// Gives a block the declared schema when its columns have the declared names and types. No data is copied.
///
/// # Errors
/// [`OpError::Schema`] naming both, or nulls in a column declared without.
pub fn conform(step: &StepName, declared: &SchemaRef, batch: &RecordBatch) -> Result<RecordBatch, OpError> {
    let found = batch.schema();
    if std::sync::Arc::ptr_eq(&found, declared) {
        return Ok(batch.clone());
    }
    let same = found.fields().len() == declared.fields().len()
        && found
            .fields()
            .iter()
            .zip(declared.fields())
            .all(|(a, b)| a.name() == b.name() && a.data_type().equals_datatype(b.data_type()));
    if !same {
        return Err(OpError::Schema { step: step.clone(), expected: words(declared), found: words(&found) });
    }
    let options = arrow_array::RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
    Ok(RecordBatch::try_new_with_options(declared.clone(), batch.columns().to_vec(), &options)?)
}

/// Rows `rows` of a block.
pub(crate) fn take_rows(batch: &RecordBatch, rows: &[u32]) -> Result<RecordBatch, OpError> {
    let rows = arrow_array::UInt32Array::from(rows.to_vec());
    Ok(arrow_select::take::take_record_batch(batch, &rows)?)
}

/// Bytes of the rows of a block, of which it may be a part. Cost: the rows of columns of views, else that of their number.
pub(crate) fn bytes_of(batch: &RecordBatch) -> usize {
    batch.columns().iter().map(weight).sum()
}

/// Arrow counts for a part of lists or views what the whole has.
fn weight(column: &ArrayRef) -> usize {
    fn list<O: OffsetSizeTrait>(values: &ArrayRef, at: &[O]) -> usize {
        let (from, to) = (at[0].as_usize(), at[at.len() - 1].as_usize());
        size_of_val(at) + weight(&values.slice(from, to - from))
    }
    match column.data_type() {
        DataType::List(_) => list(column.as_list::<i32>().values(), column.as_list::<i32>().value_offsets()),
        DataType::LargeList(_) => list(column.as_list::<i64>().values(), column.as_list::<i64>().value_offsets()),
        DataType::FixedSizeList(..) => weight(column.as_fixed_size_list().values()),
        DataType::Struct(_) => column.as_struct().columns().iter().map(weight).sum(),
        DataType::Utf8View => column.as_string_view().lengths().map(|length| 16 + length as usize).sum(),
        DataType::BinaryView => column.as_binary_view().lengths().map(|length| 16 + length as usize).sum(),
        _ => column.to_data().get_slice_memory_size().unwrap_or_default(),
    }
}

/// Rows of a batch that a block of it may have, by their number and their mean size.
pub(crate) fn block_rows(batch: &RecordBatch) -> usize {
    let (rows, bytes) = (batch.num_rows(), bytes_of(batch));
    if bytes <= BLOCK_BYTES { BLOCK_ROWS } else { (rows / bytes.div_ceil(BLOCK_BYTES)).clamp(1, BLOCK_ROWS) }
}

/// Sends `batch` in pieces of at most [`BLOCK_ROWS`] rows and about [`BLOCK_BYTES`], none of two rows more than twice that; nothing when it is empty.
pub(crate) fn send(batch: RecordBatch, wrap: impl Fn(RecordBatch) -> Output, out: &mut Sink<'_>) {
    let (rows, most) = (batch.num_rows(), block_rows(&batch));
    if rows <= most {
        if rows > 0 {
            out(wrap(batch));
        }
        return;
    }
    let uneven = most < BLOCK_ROWS;
    for start in (0..rows).step_by(most) {
        let piece = batch.slice(start, most.min(rows - start));
        if uneven { halves(piece, &wrap, out) } else { out(wrap(piece)) }
    }
}

/// Sends a piece as it is, or halves of it: what is large may stand together.
fn halves(piece: RecordBatch, wrap: &impl Fn(RecordBatch) -> Output, out: &mut Sink<'_>) {
    let rows = piece.num_rows();
    if rows < 2 || bytes_of(&piece) <= 2 * BLOCK_BYTES {
        return out(wrap(piece));
    }
    halves(piece.slice(0, rows / 2), wrap, out);
    halves(piece.slice(rows / 2, rows - rows / 2), wrap, out);
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow_array::builder::{ListBuilder, StringBuilder};
    use arrow_array::{ListArray, StringViewArray};
    use std::sync::Arc;

    fn lists(rows: usize, bytes: usize) -> ListArray {
        let mut lists = ListBuilder::new(StringBuilder::new());
        for _ in 0..rows {
            lists.values().append_value("x".repeat(bytes));
            lists.append(true);
        }
        lists.finish()
    }

    #[test]
    fn parts_of_lists_and_views_weigh_what_they_hold() {
        let views = StringViewArray::from_iter_values((0..64).map(|_| "y".repeat(1_000)));
        let columns: Vec<ArrayRef> = vec![Arc::new(lists(64, 1_000)), Arc::new(views)];
        let named = ["lists", "views"].into_iter().zip(columns);
        let batch = RecordBatch::try_from_iter(named).unwrap();
        let whole = bytes_of(&batch);
        let parts: Vec<usize> = (0..64).map(|row| bytes_of(&batch.slice(row, 1))).collect();
        assert!(whole > 2 * 64_000 && parts.iter().all(|part| (2_000..2_100).contains(part)), "{whole}: {parts:?}");
    }

    #[test]
    fn blocks_that_are_sent_end_by_their_bytes_too() {
        let batch = RecordBatch::try_from_iter([("lists", Arc::new(lists(200, 1 << 20)) as ArrayRef)]).unwrap();
        let mut rows = Vec::new();
        send(batch.clone(), Output::Rows, &mut |output| {
            let Output::Rows(part) = output else { panic!("rows stay rows") };
            assert!(bytes_of(&part) <= BLOCK_BYTES + (1 << 20));
            rows.push(part.num_rows());
        });
        assert_eq!((rows.iter().sum::<usize>(), rows.len()), (200, 4));
        assert_eq!(block_rows(&batch.slice(0, 60)), BLOCK_ROWS);
    }

    #[test]
    fn large_rows_that_stand_together_are_no_block() {
        let texts = (0..60_000).map(|row| if row < 200 { "x".repeat(1 << 20) } else { "y".to_owned() });
        let texts: ArrayRef = Arc::new(StringViewArray::from_iter_values(texts));
        let batch = RecordBatch::try_from_iter([("texts", texts)]).unwrap();
        let mut rows = 0;
        send(batch, Output::Rows, &mut |output| {
            let Output::Rows(part) = output else { panic!("rows stay rows") };
            assert!(bytes_of(&part) <= 2 * BLOCK_BYTES);
            rows += part.num_rows();
        });
        assert_eq!(rows, 60_000);
    }
}
