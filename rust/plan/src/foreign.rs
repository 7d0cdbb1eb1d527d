//! User code with state per key: each bin's rows go, in order, to the bin's own state object.
//!
//! One call per block and bin, so its price (a few microseconds for Python) is shared by the bin's rows.

use std::sync::Arc;

use arrow_array::RecordBatch;
use arrow_schema::SchemaRef;

use crate::error::{OpError, StepName};
use crate::op::{Bins, KeyedOp, Output, Sink, check_hashes, conform, send, take_rows};
use crate::partition::{Partition, bin_of};
use crate::state::foreign_of;

/// See the module.
pub(crate) struct StatefulMapOp {
    step: StepName,
    schema: SchemaRef,
    by_bin: Partition,
}

impl StatefulMapOp {
    pub(crate) fn new(step: StepName, schema: SchemaRef) -> Self {
        Self { step, schema, by_bin: Partition::default() }
    }
}

impl KeyedOp for StatefulMapOp {
    fn apply(
        &mut self,
        bins: &mut dyn Bins,
        batch: &RecordBatch,
        hashes: &[u64],
        out: &mut Sink<'_>,
    ) -> Result<(), OpError> {
        check_hashes(batch, hashes)?;
        let bits = bins.bits();
        let all: Vec<u32> = (0..batch.num_rows() as u32).collect();
        self.by_bin.group(&all, 1 << bits, |row| bin_of(hashes[row as usize], bits));
        for (bin, _) in self.by_bin.runs() {
            foreign_of(bins, bin)?;
        }
        for (bin, rows) in self.by_bin.runs() {
            let whole = rows.len() == batch.num_rows();
            let rows = if whole { batch.clone() } else { take_rows(batch, rows)? };
            let made = foreign_of(bins, bin)?.apply(&rows)?;
            send(conform(&self.step, &self.schema, &made)?, Output::Rows, out);
        }
        Ok(())
    }

    fn watermark(&mut self, _: &mut dyn Bins, _: i64, _: &mut Sink<'_>) -> Result<(), OpError> {
        Ok(())
    }

    fn end_epoch(&mut self, _: &mut dyn Bins, _: &mut Sink<'_>) -> Result<(), OpError> {
        Ok(())
    }

    fn resume(&mut self, _: i64) {}
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
    pub fn apply(&self, callbacks: &Arc<dyn crate::Callbacks>, batch: &RecordBatch) -> Result<RecordBatch, OpError> {
        conform(&self.step, &self.schema, &callbacks.map(self.call, batch)?)
    }
}
