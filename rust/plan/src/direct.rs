//! From records to the rows of their keys in many tables at once, where a table has too few records of a block to be worth a call.
//!
//! The tables that some records need are opened together; then all those records are found, and then all are changed, accumulator by
//! accumulator, so that the reads of many rows are under way at once and a bin costs next to nothing. Only keys that are there are found: the rest
//! is left for [`crate::group::GroupBy::add`]. All records of one key are found, or all are left, so they keep their order.
//!
//! Variants tried, ns a record of the operator with hashing and sorting (int64 keys, count, blocks of 65,536 rows, all keys there; fastest
//! twentieth of many blocks in turn on one busy machine):
//!
//! | keys, bins | a call per bin | as they come | the same, rows touched first | sorted by bin, many bins at once |
//! |---|---|---|---|---|
//! | 2^10, 2^8 | 6.9 | 5.7 | 6.3 | |
//! | 2^10, 2^12 | 7.2 | | 13.0 | 8.0 |
//! | 2^16, 2^8 | 8.3 | 10.9 | 11.4 | |
//! | 2^16, 2^12 | 13-17 | | 16.2 | 10.4-12.4 |
//! | 2^20, 2^8 | 17.2 | 27.6 | 22.7 | |
//! | 2^20, 2^12 | 28.6 | | | 25.1 |
//! | 2^20, 2^16 | 86-156 | | 175 | 60-63 |
//!
//! 64 records a bin: 18.3 by bin, 19.8 many at once; 32: 20.8 and 20.5. Where changes are listed or can be undone, all this is slower than a
//! call per bin (2^10 keys 8.0 by bin, 11.4 as they come; 2^12 bins 45 by bin, 53 many at once), so such tables are not lent.
//!
//! Sorting by the top 8 bits only and opening whole ranges of bins: 28.7 with 2^12 bins, 73 with 2^16. A single table for the bins of a worker would
//! make bins free, but moving one within the process would copy it, about 4 ns a byte, instead of a pointer.
//!
//! Departure: many tables at once, where a block has few records of a bin, or all state is small; else bin by bin.

use crate::acc::{Blobs, Input, Place, Wrapped};
use crate::error::OpError;
use crate::group::Part;
use crate::op::Bins;
use crate::partition::{ByBin, bin_of};
use crate::record::Shape;
use crate::state::State;
use crate::table::{Everywhere, Open, Table};

/// Records that are under way at once.
const BATCH: usize = 256;

/// A block's records may be found in the order in which they are while the tables together have fewer words than this: then they are in the
/// second cache, and nothing is won by going through them bin by bin.
const CACHED_WORDS: usize = 1 << 16;

/// What a block's records are added to and with.
pub(crate) struct Adding<'a> {
    pub(crate) shape: &'a Shape,
    pub(crate) inputs: &'a [Input],
    pub(crate) pane: i64,
}

/// Memory that is used from block to block.
#[derive(Default)]
pub(crate) struct Direct {
    of: Vec<u32>,
    at: Vec<u32>,
    rows: Vec<u32>,
    missed: Vec<u32>,
    left: Left,
}

/// Records whose keys were not found.
#[derive(Default)]
pub(crate) struct Left {
    pub(crate) hashes: Vec<u64>,
    pub(crate) rows: Vec<u32>,
}

/// Why records could not be added.
pub(crate) enum Failed {
    /// The sum of this aggregate wrapped.
    Wrapped(usize),
    Op(OpError),
}

impl From<(usize, Wrapped)> for Failed {
    fn from((at, _): (usize, Wrapped)) -> Self {
        Self::Wrapped(at)
    }
}

impl Direct {
    /// Adds the records of a block in their order, if the tables are small and can be lent. Says whether they were.
    pub(crate) fn add_unsorted(
        &mut self,
        bins: &mut dyn Bins,
        adding: &Adding<'_>,
        hashes: &[u64],
    ) -> Result<bool, Failed> {
        let bits = bins.bits();
        let mut words = 0;
        let mut tables: Vec<Open<'_>> = Vec::with_capacity(1 << bits);
        for state in bins.states() {
            let Some(table) = open(state, adding.pane) else { return Ok(false) };
            words += table.words();
            if words > CACHED_WORDS {
                return Ok(false);
            }
            tables.push(table);
        }
        self.begin();
        for (hashes, begin) in hashes.chunks(BATCH).zip((0..).step_by(BATCH)) {
            self.of.clear();
            self.of.extend(hashes.iter().map(|&hash| bin_of(hash, bits)));
            self.rows.clear();
            self.rows.extend(begin..begin + hashes.len() as u32);
            self.add_batch(&mut tables, adding, hashes, false)?;
        }
        Ok(true)
    }

    /// Adds the records of a block that were sorted by bin. `with_rows` says whether their rows were, too. Says whether
    /// all tables could be lent: the records of others are left.
    pub(crate) fn add_sorted(
        &mut self,
        bins: &mut dyn Bins,
        adding: &Adding<'_>,
        sorted: &ByBin,
        with_rows: bool,
    ) -> Result<bool, Failed> {
        self.begin();
        let mut lent = true;
        let mut states = bins.states();
        let mut next_bin = 0;
        let mut tables: Vec<Open<'_>> = Vec::with_capacity(BATCH);
        let mut opening: Vec<&mut State> = Vec::with_capacity(BATCH);
        let mut runs = sorted.runs();
        while let Some(first) = runs.first() {
            let from = first.at.start;
            tables.clear();
            self.of.clear();
            let mut count = 0;
            for run in runs.iter().take(BATCH) {
                if count > 0 && run.at.end > from + BATCH {
                    break;
                }
                let state = states.nth((run.bin - next_bin) as usize).flatten();
                next_bin = run.bin + 1;
                opening.push(state.ok_or(Failed::Op(OpError::BinMissing { bin: run.bin }))?);
                self.of.extend(std::iter::repeat_n(count as u32, run.at.len()));
                count += 1;
            }
            std::hint::black_box(opening.iter().fold(0, |sum, state| sum ^ state.touch_head()));
            tables.extend(opening.drain(..).map(|state| {
                let table = open(Some(state), adding.pane);
                lent &= table.is_some();
                table.unwrap_or_default()
            }));
            let end = runs[count - 1].at.end;
            runs = &runs[count..];
            self.rows.clear();
            match with_rows {
                true => self.rows.extend_from_slice(&sorted.rows()[from..end]),
                false => self.rows.resize(end - from, 0),
            }
            self.add_batch(&mut tables, adding, &sorted.hashes()[from..end], true)?;
        }
        Ok(lent)
    }

    fn begin(&mut self) {
        self.left.hashes.clear();
        self.left.rows.clear();
    }

    /// Adds records with these hashes that are rows `rows` of the block to the tables `of`.
    fn add_batch(
        &mut self,
        tables: &mut [Open<'_>],
        adding: &Adding<'_>,
        hashes: &[u64],
        touch: bool,
    ) -> Result<(), Failed> {
        let stride = adding.shape.stride();
        match stride {
            2 => self.find::<2>(tables, 2, hashes, touch),
            3 => self.find::<3>(tables, 3, hashes, touch),
            4 => self.find::<4>(tables, 4, hashes, touch),
            stride => self.find::<0>(tables, stride, hashes, touch),
        }
        let (of, at) = (&self.of[..], &self.at[..]);
        for (index, ((kind, offset), input)) in adding.shape.accs().zip(adding.inputs).enumerate() {
            let place = Place { kind, stride, offset };
            let mut cells = Everywhere { tables: &mut *tables, of, at };
            let done = place.update(&mut cells, &mut Blobs::default(), input, &self.rows);
            done.map_err(|wrapped| (index, wrapped))?;
        }
        Ok(())
    }

    /// Finds the records, and puts aside those whose keys are not there.
    #[inline]
    fn find<const STRIDE: usize>(&mut self, tables: &[Open<'_>], stride: usize, hashes: &[u64], touch: bool) {
        let stride = if STRIDE == 0 { stride } else { STRIDE };
        let Self { of, at, rows, missed, left } = self;
        at.clear();
        at.extend(hashes.iter().zip(&*of).map(|(&hash, &of)| tables[of as usize].begin(hash)));
        if touch {
            // What is read is not looked at yet, so the reads of many rows are under way at once.
            let rows = of.iter().zip(&*at);
            std::hint::black_box(rows.fold(0, |sum, (&of, &at)| sum ^ tables[of as usize].word(stride, at)));
        }
        missed.resize(hashes.len().max(missed.len()), 0);
        let mut misses = 0;
        for (i, (&hash, (&of, &at))) in hashes.iter().zip(of.iter().zip(&*at)).enumerate() {
            missed[misses] = i as u32;
            misses += usize::from(!tables[of as usize].holds(stride, at, hash));
        }
        let (mut next, among) = (0, misses);
        for place in 0..among {
            let i = missed[place] as usize;
            let (position, found) = tables[of[i] as usize].look_around(stride, at[i], hashes[i]);
            at[i] = position;
            missed[next] = i as u32;
            next += usize::from(!found);
        }
        let (mut gone, misses) = (0, next);
        for next in 0..misses {
            let i = missed[next] as usize;
            match tables[of[i] as usize].find(stride, hashes[i]) {
                Some(position) => at[i] = position,
                None => {
                    left.hashes.push(hashes[i]);
                    left.rows.push(rows[i]);
                    missed[gone] = i as u32;
                    gone += 1;
                }
            }
        }
        if gone > 0 {
            let mut gone = missed[..gone].iter().map(|&i| i as usize).peekable();
            let mut kept = 0;
            for i in 0..hashes.len() {
                if gone.next_if_eq(&i).is_none() {
                    (of[kept], at[kept], rows[kept]) = (of[i], at[i], rows[i]);
                    kept += 1;
                }
            }
            [of, at, rows].into_iter().for_each(|memory| memory.truncate(kept));
        }
    }

    /// The records of the last block whose keys were not found, in the order in which they came.
    pub(crate) fn left(&self) -> &Left {
        &self.left
    }
}

/// The table of a bin, `None` where it cannot be lent. One that is not there finds nothing.
fn open(state: Option<&mut State>, pane: i64) -> Option<Open<'_>> {
    let table = state.and_then(State::panes_mut).and_then(|panes| panes.existing_mut(pane));
    table.map_or_else(|| Some(Open::default()), Table::open)
}

/// Divides records that are sorted by bin into parts of one bin each.
pub(crate) fn parts_of(hashes: &[u64], bits: u8, pane: i64, parts: &mut Vec<Part>) {
    parts.clear();
    let mut start = 0;
    for same in hashes.chunk_by(|a, b| bin_of(*a, bits) == bin_of(*b, bits)) {
        parts.push(Part { bin: bin_of(same[0], bits), pane, at: start..start + same.len() });
        start += same.len();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use arrow_array::cast::AsArray;
    use arrow_array::types::Int64Type;
    use arrow_array::{ArrayRef, Int64Array, RecordBatch};
    use penstock_bins::{BinTable, Routing};
    use proptest::prelude::*;

    use crate::hash::unhash_int;
    use crate::op::KeyedOp;
    use crate::spec::{AggSpec, Nulls, SourceSpec};
    use crate::{
        CallError, Callbacks, Emit, ForeignState, KeyedSpec, OpError, Output, Plan, PlanSpec, State, StepSpec,
    };

    struct NoCalls;

    impl Callbacks for NoCalls {
        fn map(&self, _: usize, batch: &RecordBatch) -> Result<RecordBatch, CallError> {
            Ok(batch.clone())
        }

        fn new_state(&self, call: usize) -> Box<dyn ForeignState> {
            unreachable!("no state of call {call}")
        }
    }

    fn rows(rows: &[(i64, Option<i64>)]) -> RecordBatch {
        let keys: ArrayRef = Arc::new(Int64Array::from_iter_values(rows.iter().map(|row| row.0)));
        let values: ArrayRef = Arc::new(rows.iter().map(|row| row.1).collect::<Int64Array>());
        RecordBatch::try_from_iter_with_nullable([("k", keys, false), ("v", values, true)]).unwrap()
    }

    struct Rig {
        keyed: KeyedSpec,
        table: BinTable<State>,
        op: Box<dyn KeyedOp>,
    }

    impl Rig {
        fn new(bits: u8, aggregates: &[&str], emit: Emit) -> Self {
            let source = SourceSpec {
                name: "input".into(),
                schema: rows(&[]).schema(),
                event_time: None,
                lateness_ms: 0,
                order_by: Vec::new(),
                idle_after_ms: None,
            };
            let column = |function: &str| (function != "count").then(|| "v".to_string());
            let aggs = aggregates.iter().map(|&function| AggSpec {
                name: function.into(),
                function: function.into(),
                column: column(function),
                ..AggSpec::default()
            });
            let steps = vec![
                StepSpec::KeyBy { columns: vec!["k".into()], nulls: Nulls::Group },
                StepSpec::Agg { emit: Some(emit), aggs: aggs.collect(), operator: None },
            ];
            let plan = Plan::compile(PlanSpec::line(source, steps)).unwrap();
            let keyed = plan.keyed().next().unwrap().clone();
            let calls: Arc<dyn Callbacks> = Arc::new(NoCalls);
            let routing = Routing::from_owners(vec![0; 1 << bits]).unwrap();
            let table = BinTable::fresh(&routing, 0, &|| keyed.new_state(&calls));
            let op = keyed.operator(&calls).unwrap();
            Self { keyed, table, op }
        }

        fn apply(&mut self, block: &[(i64, Option<i64>)]) -> Result<(), OpError> {
            let block = rows(block);
            let hashes = self.keyed.hashes(&block)?;
            self.op.apply(&mut self.table, 0, &self.keyed.carry(block)?, &hashes, &mut |_| {})
        }

        /// The rows that the epoch changed, or, at the end of the input, all.
        fn end_epoch(&mut self, last: bool) -> BTreeMap<i64, Vec<Option<i64>>> {
            let mut changed = BTreeMap::new();
            let mut take = |output| {
                let Output::Rows(rows) = output else { panic!("nothing is late") };
                for row in 0..rows.num_rows() {
                    let cell =
                        |column: &ArrayRef| column.is_valid(row).then(|| column.as_primitive::<Int64Type>().value(row));
                    let mut cells = rows.columns().iter().map(cell);
                    let key = cells.next().unwrap().unwrap();
                    assert!(changed.insert(key, cells.collect()).is_none(), "{key} twice");
                }
            };
            if last {
                self.op.watermark(&mut self.table, i64::MAX, &mut take).unwrap();
            }
            self.op.end_epoch(&mut self.table, &mut take).unwrap();
            changed
        }
    }

    /// Count, sum and least value of each key.
    #[derive(Clone, Default)]
    struct Oracle(BTreeMap<i64, (i64, Vec<i64>)>);

    impl Oracle {
        fn apply(&mut self, block: &[(i64, Option<i64>)]) {
            for (key, value) in block {
                let entry = self.0.entry(*key).or_default();
                entry.0 += 1;
                entry.1.extend(value);
            }
        }

        fn row(&self, key: i64) -> Vec<Option<i64>> {
            let (count, values) = &self.0[&key];
            let sum = (!values.is_empty()).then(|| values.iter().sum());
            vec![Some(*count), sum, values.iter().min().copied()]
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        /// Many records a bin (found as they come), few (found bin by bin), with keys that are there and new ones, marks and undo.
        #[test]
        fn it_adds_up_as_a_map_does(
            epochs in prop::collection::vec((1usize..1200, 1u64..900, any::<bool>(), any::<u64>()), 1..6),
            bits in prop::sample::select(vec![0u8, 2, 4, 9]),
            marks in any::<bool>(),
            counts_only in any::<bool>(),
            emit in prop::sample::select(vec![Emit::Final, Emit::Update]),
        ) {
            let aggregates: &[&str] = if counts_only { &["count"] } else { &["count", "sum", "min"] };
            let mut rig = Rig::new(bits, aggregates, emit);
            let mut oracle = Oracle::default();
            for (epoch, (len, keys, undone, seed)) in (0..).zip(epochs) {
                let number = |i: usize| (i as u64 + 1).wrapping_mul(seed | 1).rotate_left(23) ^ seed;
                // The key that has no position is one of them.
                let key = |i: usize| match number(i) % keys {
                    3 => unhash_int(0),
                    key => key as i64,
                };
                let value = |i: usize| (number(i) % 7 > 0).then_some((number(i) % 1000) as i64 - 500);
                let block: Vec<_> = (0..len).map(|i| (key(i), value(i))).collect();
                if marks {
                    rig.table.mark_all(epoch);
                    if undone {
                        rig.apply(&block[len / 2..]).unwrap();
                        rig.apply(&block).unwrap();
                        rig.table.rollback_all().unwrap();
                    }
                }
                rig.apply(&block).unwrap();
                rig.apply(&block[len / 3..]).unwrap();
                oracle.apply(&block);
                oracle.apply(&block[len / 3..]);
                if emit == Emit::Update {
                    let row = |key: i64| (key, oracle.row(key)[..aggregates.len()].to_vec());
                    let expected: BTreeMap<_, _> = block.iter().map(|(key, _)| row(*key)).collect();
                    prop_assert_eq!(rig.end_epoch(false), expected);
                }
            }
            let held = rig.table.owned().map(|(_, state)| penstock_bins::BinState::keys(state)).sum::<usize>();
            prop_assert_eq!(held, oracle.0.len());
            if emit == Emit::Final {
                let row = |key: &i64| (*key, oracle.row(*key)[..aggregates.len()].to_vec());
                prop_assert_eq!(rig.end_epoch(true), oracle.0.keys().map(row).collect::<BTreeMap<_, _>>());
            }
        }
    }

    #[test]
    fn a_bin_that_is_not_here_is_named() {
        for (bits, len) in [(2, 2000), (9, 300)] {
            let mut rig = Rig::new(bits, &["count"], Emit::Final);
            let block: Vec<_> = (0..len).map(|key| (key, None)).collect();
            rig.apply(&block).unwrap();
            rig.apply(&block).unwrap();
            let bin = crate::partition::bin_of(crate::hash_int(5), bits);
            drop(rig.table.uninstall(bin));
            assert!(matches!(rig.apply(&block), Err(OpError::BinMissing { bin: missing }) if missing == bin));
        }
    }
}
