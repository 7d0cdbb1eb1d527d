//! What windowed and running aggregates share: a block's keys and inputs, and output rows on their way to a block.

use std::sync::Arc;

use arrow_array::{ArrayRef, RecordBatch, RecordBatchOptions};
use arrow_schema::{DataType, SchemaRef};

use crate::agg::{Acc, Aggregate, Aggregator, Input};
use crate::column::{self, EventTime};
use crate::error::{OpError, StepName};
use crate::key::{KeyCodec, KeyKind, KeyStore, Keys};
use crate::op::{BLOCK_ROWS, Output, Sink};
use crate::table::{Shape, Table};

/// The shape of the tables of an aggregate.
pub(crate) fn shape(types: &[DataType], aggregates: &[Aggregate], track: bool) -> Shape {
    Shape { key: KeyKind::of(types), accs: aggregates.iter().map(|aggregate| aggregate.kind).collect(), track }
}

/// Keys, aggregates and output schema of one step at work.
pub(crate) struct GroupBy {
    pub(crate) step: StepName,
    pub(crate) shape: Shape,
    codec: KeyCodec,
    aggregators: Vec<Aggregator>,
    schema: SchemaRef,
    /// Event time and size of the window, when output rows carry window bounds.
    bounds: Option<(EventTime, i64)>,
    pending: Pending,
}

struct Pending {
    starts: Vec<i64>,
    keys: KeyStore,
    accs: Vec<Acc>,
}

impl GroupBy {
    pub(crate) fn new(
        step: StepName,
        columns: Vec<usize>,
        types: Vec<DataType>,
        aggregates: &[Aggregate],
        schema: SchemaRef,
        bounds: Option<(EventTime, i64)>,
        track: bool,
    ) -> Result<Self, OpError> {
        let shape = shape(&types, aggregates, track);
        let aggregators = aggregates.iter().cloned().map(Aggregator::new).collect::<Result<_, _>>()?;
        let pending = Pending {
            starts: Vec::new(),
            keys: KeyStore::new(shape.key),
            accs: shape.accs.iter().map(|&kind| Acc::new(kind)).collect(),
        };
        Ok(Self { step, shape, codec: KeyCodec::new(columns, types)?, aggregators, schema, bounds, pending })
    }

    pub(crate) fn prepare(&self, batch: &RecordBatch) -> Result<(Keys, Vec<Input>), OpError> {
        let inputs = self.aggregators.iter().map(|aggregator| aggregator.prepare(batch)).collect::<Result<_, _>>()?;
        Ok((self.codec.encode(batch)?, inputs))
    }

    /// The error of aggregate `at` wrapping its 128-bit sum.
    pub(crate) fn wrapped(&self, at: usize) -> OpError {
        let spec = &self.aggregators[at].spec;
        OpError::Overflow { step: self.step.clone(), column: spec.name.clone(), data_type: spec.output.to_string() }
    }

    /// Adds `slots` of `table` to the output, as rows of the window that starts at `start`; full blocks go to `out`.
    pub(crate) fn emit(
        &mut self,
        start: i64,
        table: &Table,
        slots: impl Iterator<Item = usize>,
        out: &mut Sink<'_>,
    ) -> Result<(), OpError> {
        for slot in slots {
            self.pending.starts.push(start);
            self.pending.keys.push_from(table.keys(), slot);
            self.pending.accs.iter_mut().zip(table.accs()).for_each(|(acc, from)| acc.push_from(from, slot));
            if self.pending.starts.len() == BLOCK_ROWS {
                self.flush(out)?;
            }
        }
        Ok(())
    }

    /// Sends what `emit` gathered.
    pub(crate) fn flush(&mut self, out: &mut Sink<'_>) -> Result<(), OpError> {
        let rows = self.pending.starts.len();
        if rows == 0 {
            return Ok(());
        }
        let batch = self.block(rows);
        self.pending.starts.clear();
        self.pending.keys.truncate(0);
        self.pending.accs.iter_mut().for_each(|acc| acc.truncate(0));
        out(Output::Rows(batch?));
        Ok(())
    }

    fn block(&self, rows: usize) -> Result<RecordBatch, OpError> {
        let mut columns: Vec<ArrayRef> = Vec::with_capacity(self.schema.fields().len());
        if let Some((event_time, size)) = &self.bounds {
            columns.extend(bounds(&self.step, event_time, &self.pending.starts, *size)?);
        }
        columns.extend(self.codec.decode(&self.pending.keys)?);
        for (aggregator, acc) in self.aggregators.iter().zip(&self.pending.accs) {
            columns.push(aggregator.finish(acc, &self.step)?);
        }
        let options = RecordBatchOptions::new().with_row_count(Some(rows));
        Ok(RecordBatch::try_new_with_options(Arc::clone(&self.schema), columns, &options)?)
    }
}

/// The columns `window_start` and `window_end` of windows given by their starts in microseconds.
pub(crate) fn bounds(
    step: &StepName,
    event_time: &EventTime,
    starts_us: &[i64],
    size_us: i64,
) -> Result<[ArrayRef; 2], OpError> {
    let column = |offset: i64| -> Result<ArrayRef, OpError> {
        let mut codes = Vec::with_capacity(starts_us.len());
        for (row, &start) in starts_us.iter().enumerate() {
            let code = event_time.from_us(start + offset).ok_or_else(|| OpError::EventTime {
                step: step.clone(),
                column: event_time.name.clone(),
                row,
                value: start,
            })?;
            codes.push(code);
        }
        Ok(column::from_codes(&event_time.data_type, codes, None)?)
    };
    Ok([column(0)?, column(size_us)?])
}
