//! User code with state per key: a block's rows go, grouped by bin, to the bins' own state objects.
//!
//! Owns the two keyed steps of this kind. [`StatefulMapOp`] calls once per block and emits what comes back. [`GroupStateOp`] hands the
//! rows over as they come and calls once at the end of the epoch, with the watermarks and the processing time of the epoch: what a
//! function sees then depends on the epoch alone, not on how its rows were cut into blocks.
//!
//! Invariant: one call per block and one per epoch, whatever the number of bins; so the price of a call (a few microseconds for
//! Python) is shared by the rows of a block.

use std::sync::Arc;

use arrow_array::RecordBatch;
use arrow_schema::SchemaRef;

use crate::callback::{Callbacks, EpochEnd, Grouped, States};
use crate::column::{EventTime, codes};
use crate::error::{OpError, StepName};
use crate::op::{Bins, KeyedOp, Output, Sink, check_hashes, conform, send, take_rows};
use crate::partition::{Partition, bin_of};
use crate::state::foreign_of;

/// What both steps are made of.
pub(crate) struct Foreign {
    pub(crate) step: StepName,
    pub(crate) call: usize,
    pub(crate) schema: SchemaRef,
    pub(crate) callbacks: Arc<dyn Callbacks>,
    by_bin: Partition,
}

impl Foreign {
    pub(crate) fn new(step: StepName, call: usize, schema: SchemaRef, callbacks: Arc<dyn Callbacks>) -> Self {
        Self { step, call, schema, callbacks, by_bin: Partition::default() }
    }

    /// Hands `rows` of a block to the call, in one go.
    fn apply(
        &mut self,
        bins: &mut dyn Bins,
        batch: &RecordBatch,
        hashes: &[u64],
        rows: &[u32],
    ) -> Result<RecordBatch, OpError> {
        let bits = bins.bits();
        self.by_bin.group(rows, 1 << bits, |row| bin_of(hashes[row as usize], bits));
        let mut end = 0;
        let runs = self.by_bin.runs().map(|(bin, rows)| {
            let start = end;
            end += rows.len();
            foreign_of(bins, bin).map(|_| (bin, start..end))
        });
        let runs = runs.collect::<Result<Vec<_>, _>>()?;
        let states = States::new(bins);
        let mut block = Grouped { batch, rows: self.by_bin.rows(), runs: &runs, states };
        Ok(self.callbacks.apply(self.call, &mut block)?)
    }

    fn emit(&self, made: &RecordBatch, out: &mut Sink<'_>) -> Result<(), OpError> {
        send(conform(&self.step, &self.schema, made)?, Output::Rows, out);
        Ok(())
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
        let made = self.0.apply(bins, batch, hashes, &all)?;
        self.0.emit(&made, out)
    }

    fn watermark(&mut self, _: &mut dyn Bins, _: i64, _: &mut Sink<'_>) -> Result<(), OpError> {
        Ok(())
    }

    fn end_epoch(&mut self, _: &mut dyn Bins, _: &mut Sink<'_>) -> Result<(), OpError> {
        Ok(())
    }

    fn resume(&mut self, _: i64) {}
}

/// The groups of an epoch in, rows out at its end; see the module.
pub(crate) struct GroupStateOp {
    foreign: Foreign,
    /// Rows at or before the watermark in this column are late.
    late_by: Option<EventTime>,
    before_us: Option<i64>,
    after_us: Option<i64>,
    clock_ms: Option<i64>,
}

impl GroupStateOp {
    pub(crate) fn new(foreign: Foreign, late_by: Option<EventTime>) -> Self {
        Self { foreign, late_by, before_us: None, after_us: None, clock_ms: None }
    }

    /// The rows that are in time, and those that are late.
    fn divide(&self, batch: &RecordBatch) -> (Vec<u32>, Vec<u32>) {
        let rows = 0..batch.num_rows() as u32;
        let (Some(time), Some(watermark)) = (&self.late_by, self.before_us) else {
            return (rows.collect(), Vec::new());
        };
        let Some(codes) = codes(batch.column(time.column)) else { return (rows.collect(), Vec::new()) };
        // Watermarks count in milliseconds here, as those of Spark do.
        let limit = watermark.div_euclid(1_000) * 1_000;
        rows.partition(|&row| {
            let valid = codes.nulls.as_ref().is_none_or(|nulls| nulls.is_valid(row as usize));
            !valid || time.to_us(codes.values[row as usize]).is_none_or(|us| us > limit)
        })
    }
}

impl KeyedOp for GroupStateOp {
    fn apply(
        &mut self,
        bins: &mut dyn Bins,
        _: usize,
        batch: &RecordBatch,
        hashes: &[u64],
        out: &mut Sink<'_>,
    ) -> Result<(), OpError> {
        check_hashes(batch, hashes)?;
        let (rows, late) = self.divide(batch);
        if !late.is_empty() {
            send(take_rows(batch, &late)?, Output::Late, out);
        }
        if rows.is_empty() {
            return Ok(());
        }
        let made = self.foreign.apply(bins, batch, hashes, &rows)?;
        self.foreign.emit(&made, out)
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
        let made = self.foreign.callbacks.end_epoch(self.foreign.call, &end, &mut States::new(bins))?;
        made.iter().try_for_each(|batch| self.foreign.emit(batch, out))
    }

    fn resume(&mut self, watermark_us: i64) {
        (self.before_us, self.after_us) = (Some(watermark_us), Some(watermark_us));
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
}

impl MapCall {
    /// Calls the function and checks what it returns.
    ///
    /// # Errors
    /// [`OpError::Call`] of the user's code, [`OpError::Schema`] when it returns another schema than declared.
    pub fn apply(&self, callbacks: &Arc<dyn Callbacks>, batch: &RecordBatch) -> Result<RecordBatch, OpError> {
        conform(&self.step, &self.schema, &callbacks.map(self.call, batch)?)
    }
}
