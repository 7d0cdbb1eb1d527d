//! Aggregates without a window, over all rows so far.
//!
//! `update` emits, at the end of each epoch, every key that got a row in it, with its new values. `final` emits every key once, when the
//! watermark reaches the end of input, and forgets them. `new` emits a key when its first row comes, and keeps it for ever.

use arrow_array::RecordBatch;

use crate::direct::{Adding, Direct, Failed, parts_of};
use crate::error::OpError;
use crate::group::{GroupBy, Part};
use crate::key::Keys;
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
    /// Keys of which nothing is kept, each when it first comes.
    New,
}

impl Emit {
    /// Whether tables list the rows that it speaks of.
    pub(crate) fn tracks(self) -> bool {
        self != Self::Final
    }
}

/// With at most so many bins, and so many records of a block for each of them, opening all tables costs little.
const MOST_OPEN_BITS: u8 = 8;
const LEAST_RECORDS: usize = 16;

/// Where bins have fewer records of a block than this, many are opened at once.
const FEW_RECORDS: usize = 32;

/// A running aggregate keeps everything in one pane.
const PANE: i64 = 0;

/// See the module.
pub(crate) struct RunningOp {
    group_by: GroupBy,
    emit: Emit,
    watermark: i64,
    by_bin: ByBin,
    direct: Direct,
    /// Whether the last block held so many new keys that looking for those that are there did not pay.
    many_new: bool,
    /// Whether the tables are too large to find records in the order in which they come. They seldom shrink.
    large: bool,
    /// Whether tables list their changes or can undo them, and so cannot be lent.
    logged: bool,
    parts: Vec<Part>,
}

impl RunningOp {
    pub(crate) fn new(group_by: GroupBy, emit: Emit) -> Self {
        Self {
            group_by,
            emit,
            watermark: i64::MIN,
            by_bin: ByBin::default(),
            direct: Direct::default(),
            many_new: false,
            large: false,
            logged: emit.tracks(),
            parts: Vec::new(),
        }
    }
}

/// Gives what has changed in a bin.
fn speak(group_by: &mut GroupBy, bins: &mut dyn Bins, bin: u32, out: &mut Sink<'_>) -> Result<(), OpError> {
    if let Some(table) = panes_of(bins, bin)?.existing_mut(PANE) {
        group_by.emit(0, table, table.changed().iter().map(|&slot| slot as usize), out)?;
        table.settle();
    }
    Ok(())
}

impl KeyedOp for RunningOp {
    fn apply(
        &mut self,
        bins: &mut dyn Bins,
        _: usize,
        batch: &RecordBatch,
        hashes: &[u64],
        out: &mut Sink<'_>,
    ) -> Result<(), OpError> {
        check_hashes(batch, hashes)?;
        let (keys, inputs) = self.group_by.prepare(batch)?;
        let bits = bins.bits();
        let reads_rows = self.group_by.reads_rows(&keys);
        let direct = matches!(keys, Keys::Unit | Keys::Int(None)) && self.group_by.plain();
        let direct = direct && !self.logged && !std::mem::take(&mut self.many_new);
        let adding = Adding { shape: &self.group_by.shape, inputs: &inputs, pane: PANE };
        let failed = |failed| match failed {
            Failed::Wrapped(at) => self.group_by.wrapped(at),
            Failed::Op(error) => error,
        };
        if direct && !self.large && bits <= MOST_OPEN_BITS && hashes.len() >> bits >= LEAST_RECORDS {
            self.large = !self.direct.add_unsorted(bins, &adding, hashes).map_err(failed)?;
            if !self.large {
                let left = self.direct.left();
                self.many_new = left.rows.len() > hashes.len() / 4;
                self.by_bin.some(hashes, &left.rows, bits);
                let sorted = (self.by_bin.hashes(), self.by_bin.rows());
                parts_of(sorted.0, bits, PANE, &mut self.parts);
                return self.group_by.add(bins, (&keys, &inputs), sorted, &self.parts);
            }
        }
        self.by_bin.all(hashes, bits, reads_rows);
        if direct && self.by_bin.runs().len() * FEW_RECORDS > hashes.len() {
            let lent = self.direct.add_sorted(bins, &adding, &self.by_bin, reads_rows).map_err(failed)?;
            self.logged |= !lent;
            let left = self.direct.left();
            self.many_new = left.rows.len() > hashes.len() / 4;
            parts_of(&left.hashes, bits, PANE, &mut self.parts);
            return self.group_by.add(bins, (&keys, &inputs), (&left.hashes, &left.rows), &self.parts);
        }
        self.parts.clear();
        for run in self.by_bin.runs() {
            if !bins.holds(run.bin) {
                return Err(OpError::BinMissing { bin: run.bin });
            }
            self.parts.push(Part { bin: run.bin, pane: PANE, at: run.at.clone() });
        }
        self.group_by.add(bins, (&keys, &inputs), (self.by_bin.hashes(), self.by_bin.rows()), &self.parts)?;
        if self.emit == Emit::New {
            for run in self.by_bin.runs() {
                speak(&mut self.group_by, bins, run.bin, out)?;
            }
            self.group_by.flush(out)?;
        }
        Ok(())
    }

    fn watermark(&mut self, bins: &mut dyn Bins, watermark_us: i64, out: &mut Sink<'_>) -> Result<(), OpError> {
        if watermark_us <= self.watermark {
            return Ok(());
        }
        self.watermark = watermark_us;
        if watermark_us < i64::MAX || self.emit.tracks() {
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
        if self.emit != Emit::Update {
            return Ok(());
        }
        for bin in bins.held() {
            speak(&mut self.group_by, bins, bin, out)?;
        }
        self.group_by.flush(out)
    }

    fn resume(&mut self, watermark_us: i64) {
        self.watermark = watermark_us;
    }
}
