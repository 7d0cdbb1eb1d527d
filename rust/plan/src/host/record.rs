//! What an epoch changed in one bin, as a worker takes it.

use penstock_bins::{BinState, BinTable, Encoding, Extent, range_of};
use penstock_dataflow::BoxError;
use penstock_files::Range;

use crate::state::State;

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Keyed step, counted from 0.
    pub op: usize,
    /// The bin.
    pub range: Range,
    /// Whether it is all of the bin's state: nothing was there before the epoch.
    pub base: bool,
    /// Chunks of entries, as [`penstock_files::Segment`] has them; at least one.
    pub chunks: Vec<Vec<u8>>,
}

/// What has changed in the bins of a table since its mark, without bins in which nothing has.
pub(super) fn take(op: usize, table: &BinTable<State>, base: bool, out: &mut Vec<Record>) -> Result<(), BoxError> {
    for (bin, state) in table.owned() {
        let mut encoding = Encoding::of(Extent::Changed);
        let mut chunks = Vec::new();
        while let Some(chunk) = state.encode(&mut encoding)? {
            chunks.push(chunk);
        }
        if !chunks.is_empty() {
            let range = range_of(bin, table.bits()).expect("a table's bins are ranges");
            out.push(Record { op, range, base, chunks });
        }
    }
    Ok(())
}
