//! Aggregates without a window, over all rows so far.
//!
//! `update` emits, at the end of each epoch, every key that got a row in it, with its new values. `final` emits every key once, when the
//! watermark reaches the end of input, and forgets them.

use arrow_array::RecordBatch;

use crate::error::OpError;
use crate::group::{GroupBy, Part};
use crate::op::{Bins, KeyedOp, Sink, check_hashes};
use crate::partition::ByBin;
use crate::state::panes_of;

/// When an aggregate without a window speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Emit {
    /// Changed keys at the end of each epoch.
    Update,
    /// All keys at the end of input.
    Final,
}

/// A running aggregate keeps everything in one pane.
const PANE: i64 = 0;

/// See the module.
pub(crate) struct RunningOp {
    group_by: GroupBy,
    emit: Emit,
    watermark: i64,
    by_bin: ByBin,
    parts: Vec<Part>,
}

impl RunningOp {
    pub(crate) fn new(group_by: GroupBy, emit: Emit) -> Self {
        Self { group_by, emit, watermark: i64::MIN, by_bin: ByBin::default(), parts: Vec::new() }
    }
}

impl KeyedOp for RunningOp {
    fn apply(
        &mut self,
        bins: &mut dyn Bins,
        batch: &RecordBatch,
        hashes: &[u64],
        _: &mut Sink<'_>,
    ) -> Result<(), OpError> {
        check_hashes(batch, hashes)?;
        let (keys, inputs) = self.group_by.prepare(batch)?;
        let bits = bins.bits();
        self.by_bin.all(hashes, bits, self.group_by.reads_rows(&keys));
        self.parts.clear();
        for run in self.by_bin.runs() {
            if !bins.holds(run.bin) {
                return Err(OpError::BinMissing { bin: run.bin });
            }
            self.parts.push(Part { bin: run.bin, pane: PANE, at: run.at.clone() });
        }
        self.group_by.add(bins, (&keys, &inputs), &self.by_bin, &self.parts)
    }

    fn watermark(&mut self, bins: &mut dyn Bins, watermark_us: i64, out: &mut Sink<'_>) -> Result<(), OpError> {
        if watermark_us <= self.watermark {
            return Ok(());
        }
        self.watermark = watermark_us;
        if watermark_us < i64::MAX || self.emit == Emit::Update {
            return Ok(());
        }
        for bin in bins.held() {
            let panes = panes_of(bins, bin)?;
            if let Some(table) = panes.existing_mut(PANE) {
                self.group_by.emit(0, table, table.taken(), out)?;
            }
            panes.drop_before(i64::MAX);
        }
        self.group_by.flush(out)
    }

    fn end_epoch(&mut self, bins: &mut dyn Bins, out: &mut Sink<'_>) -> Result<(), OpError> {
        if self.emit == Emit::Final {
            return Ok(());
        }
        for bin in bins.held() {
            if let Some(table) = panes_of(bins, bin)?.existing_mut(PANE) {
                self.group_by.emit(0, table, table.changed().iter().map(|&slot| slot as usize), out)?;
                table.settle();
            }
        }
        self.group_by.flush(out)
    }

    fn resume(&mut self, watermark_us: i64) {
        self.watermark = watermark_us;
    }
}
