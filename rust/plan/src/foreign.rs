//! User code with state per key: a block's rows go, grouped by bin, to the bins' own state objects.
//!
//! Owns the two keyed operators of this kind. [`StatefulMapOp`] calls once per block and emits what comes back. [`EpochOp`] hands the
//! rows over as they come, too, and calls once more at the end of the epoch, with its watermarks and processing time: for groups, whose function
//! then sees what depends on the epoch alone and not on how its rows were cut into blocks, for timers and states that expire, and for aggregates
//! in windows, which come out there. Rows of a window that has closed are late, also those without event time. In sessions a row comes with
//! the one that it would be alone; which of these meet is the call's affair.
//!
//! Invariant: one call per block and one per epoch, whatever the number of bins; so the price of a call (a few microseconds for
//! Python) is shared by the rows of a block.

use std::sync::Arc;

use arrow_array::RecordBatch;
use arrow_schema::SchemaRef;

use crate::callback::{Callbacks, EpochEnd, Grouped, SideRows, States};
use crate::column::{EventTime, codes};
use crate::error::{OpError, StepName};
use crate::op::{Bins, KeyedOp, Output, OwnCosts, Sink, check_hashes, conform, send, take_rows};
use crate::partition::{Partition, bin_of};
use crate::spec::SideSpec;
use crate::state::foreign_of;
use crate::window::{Cut, event_times};

/// What both steps are made of.
pub(crate) struct Foreign {
    pub(crate) step: StepName,
    pub(crate) call: usize,
    pub(crate) schema: SchemaRef,
    pub(crate) callbacks: Arc<dyn Callbacks>,
    pub(crate) sides: Vec<SideSpec>,
    by_bin: Partition,
    /// What calls have spent on single bins.
    spent: Vec<(u32, u64)>,
}

impl Foreign {
    pub(crate) fn new(
        step: StepName,
        call: usize,
        schema: SchemaRef,
        callbacks: Arc<dyn Callbacks>,
        sides: &[SideSpec],
    ) -> Self {
        Self { step, call, schema, callbacks, sides: sides.to_vec(), by_bin: Partition::default(), spent: Vec::new() }
    }

    /// Hands `rows` of a block to the call, in one go, and what it makes on.
    fn apply(
        &mut self,
        bins: &mut dyn Bins,
        batch: &RecordBatch,
        hashes: &[u64],
        rows: &[u32],
        out: &mut Sink<'_>,
    ) -> Result<(), OpError> {
        let bits = bins.bits();
        match bins.is_split() {
            false => self.by_bin.group(rows, 1 << bits, |row| bin_of(hashes[row as usize], bits)),
            // Numbers of parts leave gaps.
            true => self.by_bin.group(rows, usize::MAX, |row| bins.bin_of(hashes[row as usize])),
        }
        let mut end = 0;
        let runs = self.by_bin.runs().map(|(bin, rows)| {
            let start = end;
            end += rows.len();
            foreign_of(bins, bin).map(|_| (bin, start..end))
        });
        let runs = runs.collect::<Result<Vec<_>, _>>()?;
        let states = States::new(bins, &mut self.spent);
        let mut block = Grouped { batch, rows: self.by_bin.rows(), runs: &runs, states };
        let mut beside = SideRows::new();
        let made = self.callbacks.apply(self.call, &mut block, &mut beside)?;
        self.emit(&[made], &beside, out)
    }

    fn own_costs(&mut self) -> OwnCosts {
        OwnCosts { spent: std::mem::take(&mut self.spent), met: Vec::new() }
    }

    fn emit(&self, made: &[RecordBatch], beside: &SideRows, out: &mut Sink<'_>) -> Result<(), OpError> {
        for batch in made {
            send(conform(&self.step, &self.schema, batch)?, Output::Rows, out);
        }
        sides(&self.step, &self.sides, beside, |side, batch| send(batch, |rows| Output::Side(side, rows), out))
    }
}

/// Rows in, rows out; see the module.
pub(crate) struct StatefulMapOp(pub(crate) Foreign);

impl KeyedOp for StatefulMapOp {
    fn apply(
        &mut self,
        bins: &mut dyn Bins,
        _: usize,
        batch: &RecordBatch,
        hashes: &[u64],
        out: &mut Sink<'_>,
    ) -> Result<(), OpError> {
        check_hashes(batch, hashes)?;
        if batch.num_rows() == 0 {
            return Ok(());
        }
        let all: Vec<u32> = (0..batch.num_rows() as u32).collect();
        self.0.apply(bins, batch, hashes, &all, out)
    }

    fn watermark(&mut self, _: &mut dyn Bins, _: i64, _: &mut Sink<'_>) -> Result<(), OpError> {
        Ok(())
    }

    fn end_epoch(&mut self, _: &mut dyn Bins, _: &mut Sink<'_>) -> Result<(), OpError> {
        Ok(())
    }

    fn resume(&mut self, _: i64) {}

    fn own_costs(&mut self) -> OwnCosts {
        self.0.own_costs()
    }
}

/// Which rows are late.
pub(crate) enum Late {
    Never,
    /// Those at or before the watermark in this column.
    Behind(EventTime),
    /// Those whose window, by the bounds in the first two columns, has closed; with the column of event time as it was before these.
    Closed(Cut, EventTime),
}

/// Rows in, rows out, then and at the end of an epoch; see the module.
pub(crate) struct EpochOp {
    foreign: Foreign,
    late: Late,
    before_us: Option<i64>,
    after_us: Option<i64>,
    clock_ms: Option<i64>,
}

impl EpochOp {
    pub(crate) fn new(foreign: Foreign, late: Late) -> Self {
        Self { foreign, late, before_us: None, after_us: None, clock_ms: None }
    }

    /// The rows that are in time, and those that are late.
    fn divide(&self, batch: &RecordBatch) -> Result<(Vec<u32>, Vec<u32>), OpError> {
        let rows = 0..batch.num_rows() as u32;
        match (&self.late, self.before_us) {
            (Late::Never, _) | (Late::Behind(_), None) => Ok((rows.collect(), Vec::new())),
            (Late::Behind(time), Some(watermark)) => {
                let Some(codes) = codes(batch.column(time.column)) else { return Ok((rows.collect(), Vec::new())) };
                // Watermarks count in milliseconds here, as those of Spark do.
                let limit = watermark.div_euclid(1_000) * 1_000;
                Ok(rows.partition(|&row| {
                    let valid = codes.nulls.as_ref().is_none_or(|nulls| nulls.is_valid(row as usize));
                    !valid || time.to_us(codes.values[row as usize]).is_none_or(|us| us > limit)
                }))
            }
            (Late::Closed(cut, time), watermark) => {
                let (ends, absent) = event_times(&self.foreign.step, time, 1, batch)?;
                let watermark = watermark.unwrap_or(i64::MIN);
                let open = |row: u32| ends[row as usize] > watermark && absent.binary_search(&row).is_err();
                let (open, mut late): (Vec<u32>, Vec<u32>) = rows.partition(|&row| open(row));
                if let (Cut::Windows(windows), false) = (cut, late.is_empty()) {
                    // Of a row's copies only the one in its last window reports it late: that window closes last.
                    let (mut times, _) = event_times(&self.foreign.step, time, time.column + 2, batch)?;
                    windows.to_axis(&mut times);
                    let (starts, _) = event_times(&self.foreign.step, time, 0, batch)?;
                    let last = |row: usize| windows.last(times[row]) == (starts[row], ends[row]);
                    late.retain(|row| absent.binary_search(row).is_ok() || last(*row as usize));
                }
                Ok((open, late))
            }
        }
    }
}

impl KeyedOp for EpochOp {
    fn apply(
        &mut self,
        bins: &mut dyn Bins,
        _: usize,
        batch: &RecordBatch,
        hashes: &[u64],
        out: &mut Sink<'_>,
    ) -> Result<(), OpError> {
        check_hashes(batch, hashes)?;
        let (rows, late) = self.divide(batch)?;
        if !late.is_empty() {
            send(take_rows(batch, &late)?, Output::Late, out);
        }
        if rows.is_empty() {
            return Ok(());
        }
        self.foreign.apply(bins, batch, hashes, &rows, out)
    }

    fn watermark(&mut self, _: &mut dyn Bins, watermark_us: i64, _: &mut Sink<'_>) -> Result<(), OpError> {
        self.after_us = self.after_us.max(Some(watermark_us));
        Ok(())
    }

    fn clock(&mut self, clock_ms: i64) {
        self.clock_ms = Some(clock_ms);
    }

    fn end_epoch(&mut self, bins: &mut dyn Bins, out: &mut Sink<'_>) -> Result<(), OpError> {
        let end = EpochEnd {
            before_us: self.before_us,
            after_us: self.after_us,
            clock_ms: std::mem::take(&mut self.clock_ms),
        };
        self.before_us = self.after_us;
        let mut beside = SideRows::new();
        let Foreign { callbacks, call, spent, .. } = &mut self.foreign;
        let made = callbacks.end_epoch(*call, &end, &mut States::new(bins, spent), &mut beside)?;
        self.foreign.emit(&made, &beside, out)
    }

    fn resume(&mut self, watermark_us: i64) {
        (self.before_us, self.after_us) = (Some(watermark_us), Some(watermark_us));
    }

    fn own_costs(&mut self) -> OwnCosts {
        self.foreign.own_costs()
    }
}

/// A stateless user function over blocks, as a plan holds it.
#[derive(Clone, Debug, PartialEq)]
pub struct MapCall {
    /// The step.
    pub step: StepName,
    /// Number of the call.
    pub call: usize,
    /// Declared output.
    pub schema: SchemaRef,
    /// Declared side outputs.
    pub sides: Vec<SideSpec>,
}

/// What a call gave beside its rows, under the declared schemas; nothing of no rows.
///
/// # Errors
/// [`OpError::Schema`] when it is of another schema than declared.
pub(crate) fn sides(
    step: &StepName,
    declared: &[SideSpec],
    made: &SideRows,
    mut take: impl FnMut(usize, RecordBatch),
) -> Result<(), OpError> {
    for (side, batch) in made {
        if batch.num_rows() > 0 {
            take(*side, conform(step, &declared[*side].schema, batch)?);
        }
    }
    Ok(())
}

impl MapCall {
    /// Calls the function and checks what it returns: rows, and those of its sides.
    ///
    /// # Errors
    /// [`OpError::Call`] of the user's code, [`OpError::Schema`] when it returns another schema than declared.
    pub fn apply(
        &self,
        callbacks: &Arc<dyn Callbacks>,
        batch: &RecordBatch,
    ) -> Result<(RecordBatch, SideRows), OpError> {
        let (mut made, mut beside) = (SideRows::new(), SideRows::new());
        let rows = conform(&self.step, &self.schema, &callbacks.map(self.call, batch, &mut made)?)?;
        sides(&self.step, &self.sides, &made, |side, batch| beside.push((side, batch)))?;
        Ok((rows, beside))
    }
}
