//! What windowed and running aggregates share: a block's keys and inputs, and output rows on their way to a block.

use std::ops::Range;
use std::sync::Arc;

use arrow_array::{ArrayRef, RecordBatch, RecordBatchOptions};
use arrow_schema::{DataType, SchemaRef};
use smallvec::SmallVec;

use crate::acc::{Blobs, Input, Kind};
use crate::agg::{Aggregate, Aggregator};
use crate::column::{self, EventTime};
use crate::ddl::ddl;
use crate::error::{OpError, StepName};
use crate::key::{KeyCodec, KeyKind, Keys};
use crate::op::{Bins, Output, Sink};
use crate::record::{Records, Shape};
use crate::state::panes_of;
use crate::table::{Scratch, Table};
use crate::window::Windows;

/// Records whose rows are touched before any of them is updated: enough for all the misses a core can have under way, few enough that
/// their rows are still in the first cache. 64 to 1,024 measured alike.
const TOUCHED: usize = 256;
/// Positions for each key of what is merged from which on a table is made anew, and keys below which they do not matter.
const MOST_SPARSE: usize = 16;
const LEAST_SPARSE: usize = 1 << 10;

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
    /// Event time and windows, which sessions have none of, when output rows carry window bounds.
    bounds: Option<(EventTime, Option<Windows>)>,
    /// Output on its way: starts of windows, ends of those that have no length in common, and the rows.
    starts: Vec<i64>,
    ends: Vec<i64>,
    records: Records,
    positions: Vec<u32>,
    scratch: Scratch,
}

/// Records of one bin and pane that lie together.
pub(crate) struct Part {
    pub(crate) bin: u32,
    pub(crate) pane: i64,
    pub(crate) at: Range<usize>,
}

impl GroupBy {
    pub(crate) fn new(
        step: StepName,
        columns: Vec<usize>,
        types: Vec<DataType>,
        aggregates: &[Aggregate],
        schema: SchemaRef,
        bounds: Option<(EventTime, Option<Windows>)>,
        track: bool,
    ) -> Result<Self, OpError> {
        let shape = shape(&types, aggregates, track);
        let aggregators = aggregates.iter().cloned().map(Aggregator::new).collect::<Result<_, _>>()?;
        let records = Records::new(&shape);
        let codec = KeyCodec::new(columns, types)?;
        let (starts, ends, positions, scratch) = Default::default();
        Ok(Self { step, shape, codec, aggregators, schema, bounds, starts, ends, records, positions, scratch })
    }

    /// Whether updates read rows of the block besides the hashes.
    pub(crate) fn reads_rows(&self, keys: &Keys) -> bool {
        !matches!(keys, Keys::Unit | Keys::Int(None)) || self.aggregators.iter().any(Aggregator::reads_rows)
    }

    /// Adds records to the bins' tables, part by part. `parts` divide the records, which are rows of a block.
    pub(crate) fn add(
        &mut self,
        bins: &mut dyn Bins,
        (keys, inputs): (&Keys, &[Input]),
        (hashes, rows): (&[u64], &[u32]),
        parts: &[Part],
    ) -> Result<(), OpError> {
        let mut next = 0;
        while let Some(first) = parts.get(next) {
            let end = first.at.start + TOUCHED;
            let fit = parts[next..].iter().take_while(|part| part.at.end <= end).count();
            let group = &parts[next..next + fit.max(1)];
            next += group.len();
            if fit == 0 {
                // A part that is larger than a group is touched and updated in pieces.
                let table = panes_of(bins, first.bin)?.table_mut(first.pane);
                let rows = rows.get(first.at.clone()).unwrap_or_default();
                self.add_to(table, (keys, inputs), (&hashes[first.at.clone()], rows))?;
                continue;
            }
            // Two rounds: where a table is says only its bin, where its rows are only the table.
            let mut sum = 0;
            for part in group {
                sum ^= panes_of(bins, part.bin)?.table(part.pane).map_or(0, Table::touch_head);
            }
            std::hint::black_box(sum);
            for part in group {
                sum ^=
                    panes_of(bins, part.bin)?.table(part.pane).map_or(0, |table| table.touch(&hashes[part.at.clone()]));
            }
            std::hint::black_box(sum);
            for part in group {
                let table = panes_of(bins, part.bin)?.table_mut(part.pane);
                let rows = rows.get(part.at.clone()).unwrap_or_default();
                inputs.iter().for_each(|input| input.begin(part.at.len()));
                let done = table.update(&self.shape, keys, inputs, &hashes[part.at.clone()], rows, &mut self.scratch);
                done.map_err(|(at, _)| self.wrapped(at))?;
            }
        }
        Ok(())
    }

    /// Adds records to a table.
    pub(crate) fn add_to(
        &mut self,
        table: &mut Table,
        (keys, inputs): (&Keys, &[Input]),
        (hashes, rows): (&[u64], &[u32]),
    ) -> Result<(), OpError> {
        inputs.iter().for_each(|input| input.begin(hashes.len()));
        for start in (0..hashes.len()).step_by(TOUCHED) {
            let at = start..hashes.len().min(start + TOUCHED);
            std::hint::black_box(table.touch(&hashes[at.clone()]));
            let rows = rows.get(at.clone()).unwrap_or_default();
            let done = table.update(&self.shape, keys, inputs, &hashes[at], rows, &mut self.scratch);
            done.map_err(|(at, _)| self.wrapped(at))?;
        }
        Ok(())
    }

    /// Whether all values are words.
    pub(crate) fn plain(&self) -> bool {
        self.shape.blobs().next().is_none()
    }

    pub(crate) fn prepare(&self, batch: &RecordBatch) -> Result<(Keys, Vec<Input>), OpError> {
        let inputs = self.aggregators.iter().map(|aggregator| aggregator.prepare(batch)).collect::<Result<_, _>>()?;
        Ok((self.codec.encode(batch)?, inputs))
    }

    /// The error of aggregate `at`: its 128-bit sum has wrapped, or its set is full.
    pub(crate) fn wrapped(&self, at: usize) -> OpError {
        let spec = &self.aggregators[at].spec;
        let (step, column) = (self.step.clone(), spec.name.clone());
        match spec.kind {
            Kind::Set { .. } => OpError::TooManyDistinct { step, column },
            _ => OpError::Overflow { step, column, data_type: ddl(&spec.output), key: None },
        }
    }

    /// Adds what is at `positions` of `table` to the output, as rows of the window that starts at `start`; full blocks go to `out`.
    pub(crate) fn emit(
        &mut self,
        start: i64,
        table: &Table,
        positions: impl Iterator<Item = usize>,
        out: &mut Sink<'_>,
    ) -> Result<(), OpError> {
        let mut positions = positions.map(|position| position as u32);
        loop {
            let mut some = std::mem::take(&mut self.positions);
            some.clear();
            some.extend(positions.by_ref().take(TOUCHED));
            std::hint::black_box(table.touch_at(&some));
            for &position in &some {
                if self.bounds.is_some() {
                    self.starts.push(start);
                }
                self.records.push(&self.shape, table, position as usize);
                if self.records.are_many() {
                    self.flush(out)?;
                }
            }
            let last = some.len() < TOUCHED;
            self.positions = some;
            if last {
                return Ok(());
            }
        }
    }

    /// Adds a session to the output: its bounds, its key and its accumulators.
    pub(crate) fn emit_session(
        &mut self,
        (start, end): (i64, i64),
        key: (u64, bool, &[u8]),
        cells: (&[u64], &Blobs),
        out: &mut Sink<'_>,
    ) -> Result<(), OpError> {
        self.starts.push(start);
        self.ends.push(end);
        self.records.push_cells(&self.shape, key, cells);
        if self.records.are_many() { self.flush(out) } else { Ok(()) }
    }

    /// Merges tables of one bin into `into`.
    pub(crate) fn merge<'a>(
        &mut self,
        into: &mut Table,
        tables: impl Iterator<Item = &'a Table>,
    ) -> Result<(), OpError> {
        let tables: SmallVec<[&Table; 8]> = tables.collect();
        let keys: usize = tables.iter().map(|table| table.len()).sum();
        // One window of many keys would have all after it cleared and looked through at its size.
        if into.positions() > MOST_SPARSE * keys.max(LEAST_SPARSE) {
            *into = Table::new(&self.shape);
        } else {
            into.clear();
        }
        for table in tables {
            into.merge(&self.shape, table, &mut self.scratch).map_err(|(at, _)| self.wrapped(at))?;
        }
        Ok(())
    }

    /// Adds a table to `into`, or takes away one that was added. `into` has room for all its keys.
    pub(crate) fn roll(&mut self, into: &mut Table, table: &Table, away: bool) -> Result<(), OpError> {
        if away {
            into.part(&self.shape, table, &mut self.scratch);
            return Ok(());
        }
        into.merge(&self.shape, table, &mut self.scratch).map_err(|(at, _)| self.wrapped(at))
    }

    /// Of the rows of the table that was added last their positions, and where they went.
    pub(crate) fn met(&self) -> impl Iterator<Item = (usize, usize)> {
        self.scratch.met()
    }

    /// Sends what `emit` gathered.
    pub(crate) fn flush(&mut self, out: &mut Sink<'_>) -> Result<(), OpError> {
        let rows = self.records.len();
        if rows == 0 {
            return Ok(());
        }
        let batch = self.block(rows);
        self.starts.clear();
        self.ends.clear();
        self.records.clear();
        out(Output::Rows(batch?));
        Ok(())
    }

    /// Instants as a column of the type of event time.
    fn instants(&self, event_time: &EventTime, all: impl Iterator<Item = i64>) -> Result<ArrayRef, OpError> {
        let mut last = None;
        let code = |(row, us): (usize, i64)| match last {
            Some((before, code)) if before == us => Ok(code),
            _ => {
                let out_of_range =
                    || OpError::EventTime { step: self.step.clone(), column: event_time.name.clone(), row, value: us };
                let code = event_time.from_us(us).ok_or_else(out_of_range)?;
                last = Some((us, code));
                Ok::<_, OpError>(code)
            }
        };
        let codes = all.enumerate().map(code).collect::<Result<Vec<_>, _>>()?;
        Ok(column::from_codes(&event_time.data_type, codes, None)?)
    }

    fn block(&self, rows: usize) -> Result<RecordBatch, OpError> {
        let mut columns: Vec<ArrayRef> = Vec::with_capacity(self.schema.fields().len());
        if let Some((event_time, windows)) = &self.bounds {
            columns.extend(match windows {
                Some(windows) => {
                    let bound = |offset: i64| {
                        let mut last: Option<(i64, i64)> = None;
                        let instant = move |&start: &i64| match last {
                            Some((before, us)) if before == start => us,
                            _ => last.insert((start, windows.instant(start.saturating_add(offset)))).1,
                        };
                        self.instants(event_time, self.starts.iter().map(instant))
                    };
                    [bound(0)?, bound(windows.size_us())?]
                }
                None => [&self.starts, &self.ends]
                    .map(|all| self.instants(event_time, all.iter().copied()))
                    .into_iter()
                    .collect::<Result<Vec<_>, _>>()?
                    .try_into()
                    .expect("two columns"),
            });
        }
        let keys = self.codec.decode(&self.records)?;
        let names = self.schema.fields()[columns.len()..].iter().map(|field| field.name().as_str());
        let key = |row| (!keys.is_empty()).then(|| column::in_words(names.clone().zip(&keys), row));
        let all = self.aggregators.iter().zip(self.shape.accs());
        let aggregates = all.map(|(aggregator, (_, at))| aggregator.finish(&self.records, at, &self.step, key));
        let aggregates = aggregates.collect::<Result<Vec<_>, _>>()?;
        columns.extend(keys.iter().cloned().chain(aggregates));
        let options = RecordBatchOptions::new().with_row_count(Some(rows));
        Ok(RecordBatch::try_new_with_options(Arc::clone(&self.schema), columns, &options)?)
    }
}

#[cfg(test)]
mod tests {
    use arrow_array::cast::AsArray;
    use arrow_array::types::Float64Type;
    use arrow_array::{Decimal128Array, Float64Array, Int64Array, UInt64Array};
    use arrow_schema::{Field, Schema};

    use super::*;
    use crate::agg::Function;
    use crate::gather::histogram;
    use crate::op::BLOCK_ROWS;

    /// One aggregate of a column, of all rows.
    fn of_all(function: Function, column: &ArrayRef) -> (GroupBy, Table) {
        let aggregate = Aggregate::resolve("made", function, Some((0, column.data_type())), None).unwrap();
        let schema = Arc::new(Schema::new(vec![Field::new("made", aggregate.output.clone(), true)]));
        let step = StepName::new(0, "agg");
        let group_by = GroupBy::new(step, vec![], vec![], &[aggregate], schema, None, false).unwrap();
        let table = Table::new(&group_by.shape);
        (group_by, table)
    }

    fn add(group_by: &mut GroupBy, table: &mut Table, column: &ArrayRef) -> Result<(), OpError> {
        let batch = RecordBatch::try_from_iter([("x", Arc::clone(column))]).unwrap();
        let (keys, inputs) = group_by.prepare(&batch)?;
        let rows: Vec<u32> = (0..column.len() as u32).collect();
        let hashes = vec![crate::hash::hash_int(0); rows.len()];
        group_by.add_to(table, (&keys, &inputs), (&hashes, &rows))
    }

    fn told(group_by: &mut GroupBy, table: &Table) -> Result<ArrayRef, OpError> {
        let mut made = Vec::new();
        let mut out = |output| made.push(output);
        group_by.emit(0, table, table.taken(), &mut out)?;
        group_by.flush(&mut out)?;
        match &made[..] {
            [Output::Rows(batch)] => Ok(batch.column(0).clone()),
            _ => panic!("one block of one row"),
        }
    }

    fn number(group_by: &mut GroupBy, table: &Table) -> f64 {
        told(group_by, table).unwrap().as_primitive::<Float64Type>().value(0)
    }

    #[test]
    fn buckets_that_are_new_move_the_others_a_few_times_not_once_each() {
        let numbers = 300_000;
        // All orders of magnitude, in no order: nearly all are buckets of their own.
        let value = |number: u64| 10f64.powf((number * 7_919 % 600_011) as f64 / 1_000.0 - 300.0);
        let values: Vec<f64> = (0..numbers).map(value).collect();
        let function = Function::ApproxQuantile { q: 0.5, digits: histogram::MOST };
        let column = |values: &[f64]| Arc::new(Float64Array::from(values.to_vec())) as ArrayRef;
        let (mut group_by, mut table) = of_all(function, &column(&[]));
        histogram::tests::entries_moved();
        for block in values.chunks(BLOCK_ROWS) {
            add(&mut group_by, &mut table, &column(block)).unwrap();
        }
        let moved = histogram::tests::entries_moved();
        assert!(moved < 20 * values.len(), "{moved} entries moved for {} values", values.len());
        let mut sorted = values;
        sorted.sort_by(f64::total_cmp);
        let (exact, found) = (sorted[sorted.len().div_ceil(2) - 1], number(&mut group_by, &table));
        assert!((found - exact).abs() <= histogram::error_of(histogram::MOST) * exact, "{found} for {exact}");
    }

    fn decimals(values: &[i128], scale: i8) -> ArrayRef {
        Arc::new(Decimal128Array::from(values.to_vec()).with_precision_and_scale(38, scale).unwrap())
    }

    #[test]
    fn a_mean_of_decimals_goes_on_where_their_sum_leaves_128_bits() {
        let is = |found: f64, exact: f64| assert!((found / exact - 1.0).abs() < 1e-15, "{found} for {exact}");
        let most = 9 * 10_i128.pow(37);
        let (mut group_by, mut table) = of_all(Function::Mean, &decimals(&[], 2));
        let mut other = Table::new(&group_by.shape);
        add(&mut group_by, &mut table, &decimals(&[most; 5], 2)).unwrap();
        is(number(&mut group_by, &table), 9e35);
        add(&mut group_by, &mut table, &decimals(&[most - 50 * 10_i128.pow(36); 5], 2)).unwrap();
        is(number(&mut group_by, &table), 6.5e35);
        // One that has left them and one that has not become one, either way; and two that have.
        add(&mut group_by, &mut other, &decimals(&[-most; 1], 2)).unwrap();
        for (one, two, sum, n) in
            [(&table, &other, 56.0, 11.0), (&other, &table, 56.0, 11.0), (&table, &table, 130.0, 20.0)]
        {
            let mut into = Table::new(&group_by.shape);
            group_by.merge(&mut into, [one, two].into_iter()).unwrap();
            is(number(&mut group_by, &into), sum / n * 1e35);
        }
        add(&mut group_by, &mut table, &decimals(&[-most; 10], 2)).unwrap();
        is(number(&mut group_by, &table), -1.25e35);
    }

    #[test]
    fn the_error_of_a_sum_says_what_has_more_room_than_its_column_has() {
        let whole = Arc::new(Int64Array::from(vec![i64::MAX; 2])) as ArrayRef;
        let unsigned = Arc::new(UInt64Array::from(vec![u64::MAX; 2])) as ArrayRef;
        let most = 9 * 10_i128.pow(37);
        for (column, says) in [
            (whole, "overflows bigint; make the column decimal(38, 0) or double before"),
            (unsigned, "overflows UInt64; make the column decimal(38, 0) or double before"),
            // On its way, and in the end.
            (decimals(&[most; 2], 0), "overflows decimal(38,0); make the column double before"),
            (decimals(&[most, most / 9 + most / 90], 0), "overflows decimal(38,0); make the column double before"),
            (
                decimals(&[most; 2], 3),
                "overflows decimal(38,3); give the column a smaller scale, or make it double, before",
            ),
            (decimals(&[most; 2], -3), "overflows decimal(38,-3); make the column double before"),
        ] {
            let (mut group_by, mut table) = of_all(Function::Sum, &column);
            let added = add(&mut group_by, &mut table, &column);
            let error = added.and_then(|()| told(&mut group_by, &table)).unwrap_err().to_string();
            assert_eq!(error, format!("step 0 (agg): the sum in column 'made' {says}"));
        }
    }
}
