//! What every keyed operator is to the host: rows in, watermarks in, end of epoch in; blocks out.
//!
//! An operator holds no keyed state of its own: that lives in bins, which move between workers. It holds converters, scratch memory and the
//! watermark. The host calls it in the order of flow time: the rows of a slice, then, in the epoch's last slice, the watermark, then
//! the end of the epoch.

use arrow_array::RecordBatch;
use arrow_schema::{Schema, SchemaRef};

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
}

/// Takes an operator's output, block by block.
pub type Sink<'a> = dyn FnMut(Output) + 'a;

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

/// Bytes of the rows of a block, of which it may be a part.
pub(crate) fn bytes_of(batch: &RecordBatch) -> usize {
    batch.columns().iter().map(|column| column.to_data().get_slice_memory_size().unwrap_or_default()).sum()
}

/// Sends `batch` in pieces of at most [`BLOCK_ROWS`] rows; nothing when it is empty.
pub(crate) fn send(batch: RecordBatch, wrap: impl Fn(RecordBatch) -> Output, out: &mut Sink<'_>) {
    if batch.num_rows() <= BLOCK_ROWS {
        if batch.num_rows() > 0 {
            out(wrap(batch));
        }
        return;
    }
    for start in (0..batch.num_rows()).step_by(BLOCK_ROWS) {
        out(wrap(batch.slice(start, BLOCK_ROWS.min(batch.num_rows() - start))));
    }
}
