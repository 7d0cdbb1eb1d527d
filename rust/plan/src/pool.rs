//! The small tables of a worker's bins side by side in one stretch of memory, found by bin without reading the bins' own lines.
//!
//! A bin whose table is small lends its rows to the pool of the operator that adds to it. What a record needs then is one entry of eight
//! bytes, which says where the rows of its bin begin, and the cache line of its row: as in one table for all bins. Records of a batch are found together and then
//! changed together, accumulator by accumulator, so that the reads of many rows are under way at once.
//!
//! Invariants: the rows of a bin are either in its state or in one pool, and then the state has the lease; a segment is a table of this crate
//! without its two keys that have no position (see [`crate::table`]), so it is copied as it is. Whatever a state is asked for besides adding (to be encoded, marked, undone,
//! given out) it answers with its own rows: it takes them home first, or from a copy. A state that leaves its worker takes them along,
//! so bins move, are recorded and undone one by one as ever.
//!
//! Only tables whose keys are their hashes, whose values are words, and whose changes are neither listed nor undone are lent: for the
//! others a change is more than its row. A segment is at most [`MOST_WORDS`], so that taking a bin home costs about as much as moving it does
//! anyway. What finds no room is left for [`crate::group::GroupBy::add`]; all records of one key are added, or all are left, so they keep their order.
//!
//! Layouts tried, CPU ns a record with sorting, 2^20 keys, on a machine that others kept busy (the fastest of many blocks; a record costs
//! 33 with one table):
//!
//! | bins | heads in boxes | heads of 128 bytes side by side | of 64 bytes | a pool, sorted by bin | a pool, sorted by 8 bits | a pool, as they come |
//! |---|---|---|---|---|---|---|
//! | 2^8 | 35.1 | 36.1 | 33.4 | 34.9 | 34.8 | 33.0 |
//! | 2^12 | 39.5 | 38.1 | 36.3 | 37.2 | 36.8 | 34.7 |
//! | 2^16 | 60.6 | 62.5 | 53.2 | 41.2 | 37.1 | 37.5 |
//!
//! Since then in a row on another such machine, where a record costs 19.7 with one table: the pool sorted by 8 bits 25.5 (2^12) and 26.0 (2^16), with all
//! rows of a batch read before any is compared 19.0 and 19.8, and as they come, as it is now, 18.0 and 19.5. Segments of 8 KiB leave out the
//! tables of 2^11 bins, 22.5 instead of 18.3; of 128 KiB gain no more.
//!
//! Departure: tables of several bins share memory. One table ordered by hash would do without the entries, but it holds nothing for
//! bins of other workers only where a worker's bins are neighbours.
//!
//! A count of rows in a pool that the caches hold is one pass: see [`Adder::count`].

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::acc::{Blobs, Cells, Input, Place, Wrapped};
use crate::error::OpError;
use crate::group::Part;
use crate::op::Bins;
use crate::partition::bin_of;
use crate::record::Shape;
use crate::table::{GROUP, LINE, Table};

/// Words of the largest segment: 32 KiB.
pub(crate) const MOST_WORDS: usize = 1 << 12;

/// Records that are under way at once.
const BATCH: usize = 256;

/// While the rows of a pool have no more words than this they are in the second cache.
const CACHED_WORDS: usize = 1 << 16;

/// Segments that are not used any more may be one part in so many of those that are.
const GARBAGE: usize = 4;

/// Blocks after which bins that were refused are asked again.
const ASK_AGAIN: u32 = 256;

/// Where the rows of a bin are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Segment {
    /// The first word, of those behind `Pool::first`.
    begin: u32,
    /// Positions - 1.
    mask: u32,
}

/// The segment of bins that lend nothing: a group of vacant rows. Nothing is ever found there.
const NOWHERE: Segment = Segment { begin: 0, mask: 0 };

/// See the module.
pub(crate) struct Pool {
    words: Vec<u64>,
    /// The first word that begins a cache line.
    first: usize,
    stride: usize,
    segments: Vec<Segment>,
    /// Keys of each bin.
    used: Vec<u32>,
    /// Bins that were asked and lend nothing.
    refused: Vec<bool>,
    asked: u32,
    /// Words of segments in use, and of those that were.
    live: usize,
    garbage: usize,
}

/// A pool as its operator and the states that lend to it share it. Only one thread ever asks: the worker's.
pub(crate) type Shared = Arc<Mutex<Pool>>;

pub(crate) fn lock(pool: &Shared) -> MutexGuard<'_, Pool> {
    // No code of others runs under the lock, and what is in it is rows: a panic leaves them whole or ends their worker.
    pool.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a state has in place of its rows.
pub(crate) struct Lease {
    pool: Shared,
    bin: u32,
}

impl Lease {
    pub(crate) fn keys(&self) -> usize {
        lock(&self.pool).used[self.bin as usize] as usize
    }

    pub(crate) fn bytes(&self) -> usize {
        let pool = lock(&self.pool);
        pool.words_of(pool.segments[self.bin as usize]) * 8
    }

    /// A copy of the rows as a table.
    pub(crate) fn copy(&self, shape: &Shape) -> Table {
        lock(&self.pool).copy(shape, self.bin)
    }

    /// The rows, which are not in the pool any more.
    pub(crate) fn end(self, shape: &Shape) -> Table {
        lock(&self.pool).give_back(shape, self.bin)
    }

    /// The same by whoever has the lock of `pool`; the lease comes back where it is of another pool.
    pub(crate) fn end_in(self, pool: &mut Pool, shared: &Shared, shape: &Shape) -> Result<Table, Self> {
        if Arc::ptr_eq(&self.pool, shared) { Ok(pool.give_back(shape, self.bin)) } else { Err(self) }
    }
}

/// What becomes of a record.
enum Found {
    /// Its row begins at this word.
    At(u32),
    /// Its key is there now, and rows of the batch may have moved.
    Moved,
    /// Its bin lends nothing.
    Left,
}

impl Pool {
    /// For `2^bits` bins with tables of this shape.
    pub(crate) fn shared(shape: &Shape, bits: u8) -> Shared {
        let bins = 1 << bits;
        let mut pool = Self {
            words: Vec::new(),
            first: 0,
            stride: shape.stride(),
            segments: vec![NOWHERE; bins],
            used: vec![0; bins],
            refused: vec![false; bins],
            asked: 0,
            live: 0,
            garbage: 0,
        };
        pool.rebuild(0);
        Arc::new(Mutex::new(pool))
    }

    /// Number of bins it is for.
    pub(crate) fn bins(&self) -> usize {
        self.segments.len()
    }

    /// Whether its rows do not fit into the second cache.
    pub(crate) fn is_large(&self) -> bool {
        self.live > CACHED_WORDS
    }

    fn words_of(&self, segment: Segment) -> usize {
        if segment == NOWHERE { 0 } else { (segment.mask as usize + 1) * self.stride }
    }

    fn rows(&self, segment: Segment) -> &[u64] {
        let begin = self.first + segment.begin as usize;
        &self.words[begin..begin + self.words_of(segment)]
    }

    fn copy(&self, shape: &Shape, bin: u32) -> Table {
        Table::of_rows(shape, self.rows(self.segments[bin as usize]), self.used[bin as usize])
    }

    fn give_back(&mut self, shape: &Shape, bin: u32) -> Table {
        let table = self.copy(shape, bin);
        self.free(bin);
        self.used[bin as usize] = 0;
        table
    }

    fn free(&mut self, bin: u32) {
        let segment = std::mem::replace(&mut self.segments[bin as usize], NOWHERE);
        let words = self.words_of(segment);
        self.live -= words;
        self.garbage += words;
    }

    /// Room for so many positions more; none where places cannot be told any more.
    fn make(&mut self, positions: usize) -> Option<Segment> {
        let words = positions * self.stride;
        if self.words.len() + words > self.words.capacity() {
            self.rebuild(words);
        }
        let begin = u32::try_from(self.words.len() - self.first).ok().filter(|&begin| begin < u32::MAX / 2)?;
        self.words.resize(self.words.len() + words, 0);
        self.live += words;
        Some(Segment { begin, mask: positions as u32 - 1 })
    }

    /// Lays all segments side by side in the order of their bins, with room for so many words and a few more.
    fn rebuild(&mut self, more: usize) {
        let none = GROUP * self.stride;
        let mut words = Vec::<u64>::with_capacity(none + self.live + self.live / GARBAGE + more + LINE);
        // Where alignment cannot be had, rows are merely slower.
        let first = words.as_ptr().align_offset(LINE * 8).min(LINE - 1);
        words.resize(first + none, 0);
        for bin in 0..self.segments.len() {
            let segment = self.segments[bin];
            if segment != NOWHERE {
                self.segments[bin].begin = (words.len() - first) as u32;
                words.extend_from_slice(self.rows(segment));
            }
        }
        (self.words, self.first, self.garbage) = (words, first, 0);
    }

    /// The word where the row with this hash begins, or the vacancy where it belongs.
    fn probe(&self, segment: Segment, hash: u64) -> Result<u32, u32> {
        let position = hash as u32 & segment.mask;
        let mut group = position & !(GROUP as u32 - 1);
        loop {
            for turn in 0..GROUP as u32 {
                let position = group | (position + turn) & (GROUP as u32 - 1);
                let word = segment.begin + position * self.stride as u32;
                match self.words[self.first + word as usize] {
                    0 => return Err(word),
                    found if found == hash => return Ok(word),
                    _ => {}
                }
            }
            group = (group + GROUP as u32) & segment.mask;
        }
    }

    /// The row of a key that is not in its group, made where it is new.
    fn take_in(&mut self, shared: &Shared, bins: &mut dyn Bins, (hash, bin): (u64, u32)) -> Result<Found, OpError> {
        if hash == 0 || self.refused[bin as usize] {
            return Ok(Found::Left);
        }
        if self.segments[bin as usize] == NOWHERE {
            let state = bins.state(bin).ok_or(OpError::BinMissing { bin })?;
            let lent = state.panes_mut().is_some_and(|panes| panes.lend(self, shared, bin));
            self.refused[bin as usize] = !lent;
            return Ok(if lent { Found::Moved } else { Found::Left });
        }
        let segment = self.segments[bin as usize];
        let vacant = match self.probe(segment, hash) {
            Ok(word) => return Ok(Found::At(word)),
            Err(vacant) => vacant,
        };
        let (used, positions) = (self.used[bin as usize] as usize, segment.mask as usize + 1);
        if used < positions * 3 / 4 {
            self.words[self.first + vacant as usize] = hash;
            self.used[bin as usize] += 1;
            return Ok(Found::At(vacant));
        }
        if !self.grow(bin) {
            let state = bins.state(bin).ok_or(OpError::BinMissing { bin })?;
            if let Some(panes) = state.panes_mut() {
                panes.take_home(self, shared);
            }
            self.refused[bin as usize] = true;
        }
        Ok(Found::Moved)
    }

    /// Twice the positions for a bin, unless that is too many.
    fn grow(&mut self, bin: u32) -> bool {
        let positions = (self.segments[bin as usize].mask as usize + 1) * 2;
        if positions * self.stride > MOST_WORDS {
            return false;
        }
        let Some(segment) = self.make(positions) else { return false };
        let old = self.segments[bin as usize];
        for position in 0..=old.mask as usize {
            let from = self.first + old.begin as usize + position * self.stride;
            let hash = self.words[from];
            if hash != 0 {
                let to = self.probe(segment, hash).expect_err("every key is there once");
                self.words.copy_within(from..from + self.stride, self.first + to as usize);
            }
        }
        self.free(bin);
        self.segments[bin as usize] = segment;
        true
    }

    /// Takes the rows of a bin, unless they are too many; says whether it did.
    pub(crate) fn borrow(&mut self, bin: u32, rows: &[u64], keys: usize) -> bool {
        let positions = (rows.len() / self.stride).max(GROUP);
        if positions * self.stride > MOST_WORDS || self.segments[bin as usize] != NOWHERE {
            return false;
        }
        let Some(segment) = self.make(positions) else { return false };
        let begin = self.first + segment.begin as usize;
        self.words[begin..begin + rows.len()].copy_from_slice(rows);
        self.segments[bin as usize] = segment;
        self.used[bin as usize] = keys as u32;
        true
    }

    /// Between two blocks: tidies up.
    fn tidy(&mut self) {
        if self.garbage > self.live / GARBAGE + CACHED_WORDS / 8 {
            self.rebuild(0);
        }
        self.asked += 1;
        if self.asked == ASK_AGAIN {
            self.asked = 0;
            self.refused.fill(false);
        }
    }
}

/// A state that lends its rows.
pub(crate) fn lease(pool: &Shared, bin: u32) -> Lease {
    Lease { pool: pool.clone(), bin }
}

/// What a block's records are added with.
pub(crate) struct Adding<'a> {
    pub(crate) shape: &'a Shape,
    pub(crate) inputs: &'a [Input],
}

/// Memory that is used from block to block.
#[derive(Default)]
pub(crate) struct Adder {
    at: Vec<u32>,
    rows: Vec<u32>,
    missed: Vec<u32>,
    left: Left,
}

/// Records whose bins lend nothing.
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

/// Records at words of a pool.
struct At<'a> {
    words: &'a mut [u64],
    at: &'a [u32],
}

impl Cells for At<'_> {
    fn len(&self) -> usize {
        self.at.len()
    }

    #[inline]
    fn cell(&mut self, place: Place, i: usize) -> &mut [u64] {
        let word = self.at[i] as usize + place.offset;
        &mut self.words[word..word + place.kind.words()]
    }
}

impl Adder {
    /// Adds the records of a block, by their hashes and in their order. What is not added is [left](Self::left).
    pub(crate) fn add(
        &mut self,
        shared: &Shared,
        bins: &mut dyn Bins,
        adding: &Adding<'_>,
        hashes: &[u64],
    ) -> Result<(), Failed> {
        self.left.hashes.clear();
        self.left.rows.clear();
        let pool = &mut *lock(shared);
        if matches!(adding.inputs, [Input::Rows]) && !pool.is_large() {
            self.count(pool, shared, bins, hashes).map_err(Failed::Op)?;
            pool.tidy();
            return Ok(());
        }
        for (hashes, begin) in hashes.chunks(BATCH).zip((0_u32..).step_by(BATCH)) {
            self.rows.clear();
            self.rows.extend(begin..begin + hashes.len() as u32);
            self.find_all(pool, shared, bins, hashes).map_err(Failed::Op)?;
            for (index, ((kind, offset), input)) in adding.shape.accs().zip(adding.inputs).enumerate() {
                let place = Place { kind, stride: pool.stride, offset };
                let mut cells = At { words: &mut pool.words[pool.first..], at: &self.at };
                let done = place.update(&mut cells, &mut Blobs::default(), input, &self.rows);
                done.map_err(|Wrapped| Failed::Wrapped(index))?;
            }
        }
        pool.tidy();
        Ok(())
    }

    /// Counts records of a pool that is in the caches, each where it is found: nothing is written down between finding and counting.
    fn count(&mut self, pool: &mut Pool, shared: &Shared, bins: &mut dyn Bins, hashes: &[u64]) -> Result<(), OpError> {
        let bits = bins.bits();
        for (hashes, begin) in hashes.chunks(BATCH).zip((0_u32..).step_by(BATCH)) {
            let misses = self.count_found(pool, bits, hashes);
            for next in 0..misses {
                let i = self.missed[next];
                let hash = hashes[i as usize];
                loop {
                    match pool.take_in(shared, bins, (hash, bin_of(hash, bits)))? {
                        Found::At(word) => pool.words[pool.first + word as usize + 1] += 1,
                        Found::Moved => continue,
                        Found::Left => {
                            self.left.hashes.push(hash);
                            self.left.rows.push(begin + i);
                        }
                    }
                    break;
                }
            }
        }
        Ok(())
    }

    /// Counts the records of a batch that are at their positions or in the groups around them; lists and counts the others. No branch depends on
    /// what is read.
    #[inline]
    fn count_found(&mut self, pool: &mut Pool, bits: u8, hashes: &[u64]) -> usize {
        let Pool { words, first, segments, .. } = pool;
        let (words, missed) = (&mut words[*first..], &mut self.missed);
        missed.resize(hashes.len().max(missed.len()), 0);
        let mut misses = 0;
        for (i, &hash) in hashes.iter().enumerate() {
            let Segment { begin, mask } = segments[bin_of(hash, bits) as usize];
            let at = begin as usize + (hash as u32 & mask) as usize * 2;
            let row = &mut words[at..at + 2];
            let found = (row[0] == hash) & (hash != 0);
            row[1] += u64::from(found);
            missed[misses] = i as u32;
            misses += usize::from(!found);
        }
        let mut next = 0;
        for place in 0..misses {
            let i = missed[place];
            let hash = hashes[i as usize];
            let Segment { begin, mask } = segments[bin_of(hash, bits) as usize];
            let group = begin as usize + (hash as u32 & mask & !(GROUP as u32 - 1)) as usize * 2;
            let rows = &mut words[group..group + GROUP * 2];
            let (mut found, mut turns) = (0, 0);
            for turn in 0..GROUP {
                let equal = usize::from(rows[turn * 2] == hash);
                found |= equal;
                turns += equal * turn;
            }
            found *= usize::from(hash != 0);
            rows[(turns & (GROUP - 1)) * 2 + 1] += found as u64;
            missed[next] = i;
            next += 1 - found;
        }
        next
    }

    /// Finds the rows of a batch, new ones among them, and puts aside the records whose bins lend nothing.
    fn find_all(
        &mut self,
        pool: &mut Pool,
        shared: &Shared,
        bins: &mut dyn Bins,
        hashes: &[u64],
    ) -> Result<(), OpError> {
        let bits = bins.bits();
        loop {
            let misses = match pool.stride {
                2 => self.find::<2>(pool, bits, hashes),
                3 => self.find::<3>(pool, bits, hashes),
                4 => self.find::<4>(pool, bits, hashes),
                _ => self.find::<0>(pool, bits, hashes),
            };
            let (mut gone, mut moved) = (0, false);
            for next in 0..misses {
                let i = self.missed[next];
                let hash = hashes[i as usize];
                match pool.take_in(shared, bins, (hash, bin_of(hash, bits)))? {
                    Found::At(word) => self.at[i as usize] = word,
                    Found::Moved => moved = true,
                    Found::Left => {
                        self.missed[gone] = i;
                        gone += 1;
                    }
                }
            }
            if !moved {
                self.leave(hashes, gone);
                return Ok(());
            }
        }
    }

    /// Puts aside the first so many records of `missed`.
    fn leave(&mut self, hashes: &[u64], gone: usize) {
        if gone == 0 {
            return;
        }
        let Self { at, rows, missed, left, .. } = self;
        let mut missed = missed[..gone].iter().map(|&i| i as usize).peekable();
        let mut kept = 0;
        for i in 0..hashes.len() {
            if missed.next_if_eq(&i).is_some() {
                left.hashes.push(hashes[i]);
                left.rows.push(rows[i]);
            } else {
                (at[kept], rows[kept]) = (at[i], rows[i]);
                kept += 1;
            }
        }
        at.truncate(kept);
        rows.truncate(kept);
    }

    /// Looks for keys at their positions and then in the groups around them; lists and counts those that are not there. No branch
    /// depends on what is read.
    #[inline]
    fn find<const STRIDE: usize>(&mut self, pool: &Pool, bits: u8, hashes: &[u64]) -> usize {
        let stride = if STRIDE == 0 { pool.stride } else { STRIDE };
        let words = &pool.words[pool.first..];
        let Self { at, missed, .. } = self;
        let segment = |hash: u64| pool.segments[bin_of(hash, bits) as usize];
        at.clear();
        at.extend(hashes.iter().map(|&hash| {
            let Segment { begin, mask } = segment(hash);
            begin + (hash as u32 & mask) * stride as u32
        }));
        if pool.is_large() {
            // All rows are read before one is compared: what is written down by comparing waits for its row, and reads behind it wait with it.
            std::hint::black_box(at.iter().fold(0, |sum, &at| sum ^ words[at as usize]));
        }
        missed.resize(hashes.len().max(missed.len()), 0);
        let mut misses = 0;
        for (i, (&hash, &at)) in hashes.iter().zip(&*at).enumerate() {
            missed[misses] = i as u32;
            misses += usize::from((words[at as usize] != hash) | (hash == 0));
        }
        let (mut next, among) = (0, misses);
        for place in 0..among {
            let i = missed[place] as usize;
            let hash = hashes[i];
            let Segment { begin, mask } = segment(hash);
            let group = begin as usize + (hash as u32 & mask & !(GROUP as u32 - 1)) as usize * stride;
            let rows = &words[group..group + GROUP * stride];
            let (mut found, mut turns) = (0, 0);
            for turn in 0..GROUP {
                let equal = usize::from(rows[turn * stride] == hash);
                found |= equal;
                turns += equal * turn;
            }
            at[i] = (group + turns * stride) as u32;
            missed[next] = i as u32;
            next += 1 - found * usize::from(hash != 0);
        }
        next
    }

    /// The records of the last block that were not added, in the order in which they came.
    pub(crate) fn left(&self) -> &Left {
        &self.left
    }
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
    use penstock_bins::{BinState, BinTable, Encoding, Extent, Routing};
    use proptest::prelude::*;

    use super::MOST_WORDS;
    use crate::hash::unhash_int;
    use crate::op::KeyedOp;
    use crate::spec::{AggSpec, Nulls, SourceSpec};
    use crate::{
        CallError, Callbacks, Emit, ForeignState, KeyedSpec, OpError, Output, Plan, PlanSpec, SideRows, State, StepSpec,
    };

    struct NoCalls;

    impl Callbacks for NoCalls {
        fn map(&self, _: usize, batch: &RecordBatch, _: &mut SideRows) -> Result<RecordBatch, CallError> {
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
        #![proptest_config(penstock_cases::cases(24))]
        /// Many records a bin (found as they come), few (found bin by bin), with keys that are there and new ones, marks and undo.
        #[test]
        fn it_adds_up_as_a_map_does(
            epochs in prop::collection::vec((1usize..1200, 1u64..900, any::<bool>(), any::<u64>()), 1..6),
            bits in prop::sample::select(vec![0u8, 2, 4, 9, 12]),
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
            let held = rig.table.owned().map(|(_, state)| state.keys()).sum::<usize>();
            prop_assert_eq!(held, oracle.0.len());
            if emit == Emit::Final {
                let row = |key: &i64| (*key, oracle.row(*key)[..aggregates.len()].to_vec());
                prop_assert_eq!(rig.end_epoch(true), oracle.0.keys().map(row).collect::<BTreeMap<_, _>>());
            }
        }
    }

    /// Chunks of all of a state.
    fn chunks(state: &State) -> Vec<Vec<u8>> {
        let mut encoding = Encoding::of(Extent::All);
        std::iter::from_fn(|| state.encode(&mut encoding).unwrap()).collect()
    }

    proptest! {
        #![proptest_config(penstock_cases::cases(32))]
        /// Bins that lend their rows go from worker to worker, whole or in chunks, and every record counts once.
        #[test]
        fn bins_that_lend_move_like_others(
            deeds in prop::collection::vec((0u8..4, 0usize..600, any::<u64>()), 1..24),
            bits in prop::sample::select(vec![0u8, 3, 8]),
            many in any::<bool>(),
        ) {
            let aggregates = &["count", "sum", "min"];
            let mut rigs = [Rig::new(bits, aggregates, Emit::Final), Rig::new(bits, aggregates, Emit::Final)];
            rigs[1].table = BinTable::new(bits).unwrap();
            let mut owners = vec![0; 1 << bits];
            let mut oracle = Oracle::default();
            for (deed, len, seed) in deeds {
                let bin = (seed % (1 << bits)) as u32;
                let (from, to) = (owners[bin as usize], 1 - owners[bin as usize]);
                match deed {
                    0 => {
                        let state = rigs[from].table.uninstall(bin).unwrap();
                        rigs[to].table.install(bin, state).unwrap();
                        owners[bin as usize] = to;
                    }
                    1 => {
                        let mut new = rigs[from].keyed.new_state(&(Arc::new(NoCalls) as Arc<dyn Callbacks>));
                        let old = rigs[from].table.get(bin).unwrap();
                        chunks(old).iter().for_each(|chunk| new.absorb(chunk).unwrap());
                        prop_assert_eq!(new.keys(), old.keys());
                        prop_assert_eq!(new.is_empty(), old.is_empty());
                        drop(rigs[from].table.uninstall(bin));
                        rigs[to].table.install(bin, Box::new(new)).unwrap();
                        owners[bin as usize] = to;
                    }
                    _ => {
                        let keys = if many { 5_000 } else { 300 };
                        let number = |i: usize| crate::hash_int(seed as i64 ^ i as i64);
                        let rows = (0..len).map(|i| ((number(i) % keys) as i64, Some((number(i) >> 40) as i64)));
                        let rows: Vec<_> = rows.collect();
                        for (worker, rig) in rigs.iter_mut().enumerate() {
                            let is_here =
                                |key: i64| owners[crate::partition::bin_of(crate::hash_int(key), bits) as usize] == worker;
                            let mine: Vec<_> = rows.iter().copied().filter(|row| is_here(row.0)).collect();
                            rig.apply(&mine).unwrap();
                        }
                        oracle.apply(&rows);
                    }
                }
            }
            let mut found = rigs[0].end_epoch(true);
            for (key, row) in rigs[1].end_epoch(true) {
                prop_assert!(found.insert(key, row).is_none(), "{} on both workers", key);
            }
            let row = |key: &i64| (*key, oracle.row(*key));
            prop_assert_eq!(found, oracle.0.keys().map(row).collect::<BTreeMap<_, _>>());
        }
    }

    #[test]
    fn small_tables_are_lent_and_large_ones_are_not() {
        let mut rig = Rig::new(2, &["count"], Emit::Final);
        let lent = |rig: &mut Rig| {
            let states = (0..4).map(|bin| rig.table.get_mut(bin).unwrap().panes_mut().unwrap().is_lent());
            states.collect::<Vec<bool>>()
        };
        let block = |keys: i64| (0..keys).map(|key| (key, None)).collect::<Vec<_>>();
        rig.apply(&block(400)).unwrap();
        assert_eq!(lent(&mut rig), [true; 4]);
        assert_eq!(rig.table.owned().map(|(_, state)| state.keys()).sum::<usize>(), 400);
        assert!(rig.table.owned().all(|(_, state)| (1..=MOST_WORDS * 8).contains(&state.bytes())));
        rig.apply(&block(8_000)).unwrap();
        assert_eq!(lent(&mut rig), [false; 4]);
        assert_eq!(rig.table.owned().map(|(_, state)| state.keys()).sum::<usize>(), 8_000);
        let mut small = Rig::new(2, &["count"], Emit::Final);
        small.apply(&block(400)).unwrap();
        small.table.mark_all(1);
        assert_eq!(lent(&mut small), [false; 4], "what can be undone is more than its rows");
        small.apply(&block(400)).unwrap();
        assert_eq!(lent(&mut small), [false; 4]);
        small.table.rollback_all().unwrap();
        assert!(small.end_epoch(true).values().all(|row| *row == [Some(1)]));
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
