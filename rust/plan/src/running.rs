//! Aggregates without a window, over all rows so far.
//!
//! `update` emits, at the end of each epoch, every key that got a row in it, with its new values. `final` emits every key once, when the
//! watermark reaches the end of input, and forgets them. `new` emits a key when its first row comes, and keeps it for ever.

use arrow_array::RecordBatch;

use crate::acc::Input;
use crate::error::OpError;
use crate::group::{GroupBy, Part};
use crate::key::Keys;
use crate::op::{Bins, KeyedOp, Sink, check_hashes};
use crate::partition::ByBin;
use crate::pool::{self, Adder, Adding, Failed, Pool, parts_of};
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

/// Blocks that a pool is not asked for when it has left more than a quarter of the records: of large tables, or such as list their
/// changes or can undo them.
const PAUSE: u32 = 64;

/// A running aggregate keeps everything in one pane.
const PANE: i64 = 0;

/// See the module.
pub(crate) struct RunningOp {
    group_by: GroupBy,
    emit: Emit,
    watermark: i64,
    by_bin: ByBin,
    /// Of small tables; made with the first block.
    pool: Option<pool::Shared>,
    adder: Adder,
    /// Blocks for which the pool is not asked.
    pause: u32,
    parts: Vec<Part>,
}

impl RunningOp {
    pub(crate) fn new(group_by: GroupBy, emit: Emit) -> Self {
        Self {
            group_by,
            emit,
            watermark: i64::MIN,
            by_bin: ByBin::default(),
            pool: None,
            adder: Adder::default(),
            pause: 0,
            parts: Vec::new(),
        }
    }
}

impl RunningOp {
    /// Adds a block's records to the pool, and those that it leaves to the tables of their bins.
    fn add_to_pool(
        &mut self,
        bins: &mut dyn Bins,
        (keys, inputs): (&Keys, &[Input]),
        hashes: &[u64],
    ) -> Result<(), OpError> {
        let bits = bins.bits();
        let pool = match &self.pool {
            Some(pool) if pool::lock(pool).bins() == 1 << bits => pool,
            _ => self.pool.insert(Pool::shared(&self.group_by.shape, bits)),
        };
        let adding = Adding { shape: &self.group_by.shape, inputs };
        let done = self.adder.add(pool, bins, &adding, hashes);
        done.map_err(|failed| match failed {
            Failed::Wrapped(at) => self.group_by.wrapped(at),
            Failed::Op(error) => error,
        })?;
        let left = self.adder.left();
        if left.hashes.is_empty() {
            return Ok(());
        }
        self.pause = if left.hashes.len() > hashes.len() / 4 { PAUSE } else { 0 };
        self.by_bin.these(&left.hashes, &left.rows, bits);
        parts_of(self.by_bin.hashes(), bits, PANE, &mut self.parts);
        self.group_by.add(bins, (keys, inputs), (self.by_bin.hashes(), self.by_bin.rows()), &self.parts)
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
        let lent = matches!(keys, Keys::Unit | Keys::Int(None)) && self.group_by.plain() && !self.emit.tracks();
        // A pool knows no parts.
        if lent && self.pause == 0 && !bins.is_split() {
            return self.add_to_pool(bins, (&keys, &inputs), hashes);
        }
        self.pause = self.pause.saturating_sub(1);
        self.by_bin.all(hashes, bits, reads_rows);
        self.by_bin.refine(bins);
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
