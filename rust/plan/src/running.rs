//! Aggregates without a window, over all rows so far.
//!
//! `update` emits, at the end of each epoch, every key that got a row in it, with its new values. `final` emits every key once, when the
//! watermark reaches the end of input, and forgets them.

use arrow_array::RecordBatch;

use crate::error::OpError;
use crate::group::GroupBy;
use crate::op::{Bins, KeyedOp, Sink, check_hashes};
use crate::partition::{Partition, bin_of};
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
    all: Vec<u32>,
    by_bin: Partition,
}

impl RunningOp {
    pub(crate) fn new(group_by: GroupBy, emit: Emit) -> Self {
        Self { group_by, emit, watermark: i64::MIN, all: Vec::new(), by_bin: Partition::default() }
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
        let rows = batch.num_rows() as u32;
        self.all.extend(self.all.len() as u32..rows);
        let bits = bins.bits();
        self.by_bin.group(&self.all[..rows as usize], 1 << bits, |row| bin_of(hashes[row as usize], bits));
        for (bin, _) in self.by_bin.runs() {
            panes_of(bins, bin)?;
        }
        for (bin, rows) in self.by_bin.runs() {
            let table = panes_of(bins, bin)?.table_mut(PANE);
            table.update(&keys, hashes, &inputs, rows).map_err(|(at, _)| self.group_by.wrapped(at))?;
        }
        Ok(())
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
                self.group_by.emit(0, table, 0..table.len(), out)?;
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
