//! Join of two sides on columns: rows of one key meet, whichever comes first, all of them or those whose times are near each other.
//!
//! A bin keeps the rows of both sides by key ([`sides`]), as arrow-row bytes. A row that comes is first joined with what is kept of the other side
//! and then kept itself, so each pair comes out once, at the time of its later row. Rows with a null in their key meet none, as in SQL: where
//! their side gives rows that meet none they come out at once, else they are left out before the exchange.
//!
//! *Without an interval* what came is kept for ever: of a semi- or anti-join one right row per key, and left rows until they meet one. That a row
//! meets none is known at the end of input, and there such rows come out (left, right, full, anti).
//!
//! *With an interval* (or in windows, which is an interval of length 0 of the last instants of windows with one start) a row whose time is before
//! the watermark is late: it goes to the side output and meets none, so what meets does not depend on the order of rows. A row is over when the
//! watermark is behind the last time that it can meet: then it goes, and if it has met none and its side gives such rows, it comes out. Rows
//! without a time are late. A watermark that is told again finds rows that were over when they came.
//!
//! With an end (`until`) a left row meets right rows from its own time up to a time of its own, which is a column, without that; it is over when the
//! watermark has reached that, and right rows when the watermark is behind them. All else is as with an interval.
//!
//! Where a right row meets at most one left row (`1:m`) one that has met is not kept, and one that waited goes when it meets; a left row that could
//! meet what another one meets is an error.
//!
//! Pairs come out as columns: of each side the rows that are in any, once, and of those as many as there are pairs ([`Pairs`]). A row that meets many of a
//! block is read once.
//!
//! Bins without undo lend what they keep, so that there is one index and one watermark for all of them: see [`crate::common`].
//!
//! Pairs come out in rounds: one call takes rows until it has given [`ROUND_ROWS`] or [`ROUND_BYTES`], and says how many it has taken.
//! One row's pairs are never divided: they are as many as rows of its key that are kept.

mod arena;
mod bytes;
mod ends;
mod sides;
mod waiting;

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::hint::black_box;
use std::sync::Arc;

use arrow_array::{ArrayRef, BooleanArray, RecordBatch, StringArray, StructArray, UInt32Array, new_null_array};
use arrow_buffer::NullBuffer;
use arrow_row::{RowConverter, SortField};
use arrow_schema::{DataType, Field, Schema, SchemaRef};
use arrow_select::filter::filter_record_batch;
use arrow_select::take::take;
use hashbrown::HashTable;
use hashbrown::hash_table::Entry;
use penstock_bins::SAMPLE;

use self::bytes::{Bytes, Longs};
use self::sides::Own;
pub(crate) use self::sides::{Rules, Sides};
use crate::column::{EventTime, in_words, plain};
use crate::common::{self, Borrowed, Shared};
use crate::error::{OpError, StepName};
use crate::hash::hash_bytes;
use crate::key::{KeyCodec, Keys};
use crate::op::{BLOCK_ROWS, Bins, KeyedOp, Output, OwnCosts, Sink, bin_among, check_hashes, send, take_rows};
use crate::row_format;
use crate::spec::JoinHow;
use crate::state::sides_of;
use crate::top::Top;
use crate::window::{Cut, Windows, event_times};

/// Of the pairs that come out together, about: a long text is in each pair of its row.
const BLOCK_BYTES: usize = 4 << 20;
/// Pairs of a round, about.
const ROUND_ROWS: usize = 2 * BLOCK_ROWS;
/// Bytes of the pairs of a round, about.
const ROUND_BYTES: usize = 2 * BLOCK_BYTES;

/// What a join matches, and what comes out.
#[derive(Clone, Debug, PartialEq)]
pub struct Join {
    /// Which rows come out.
    pub how: JoinHow,
    /// The left side and the right one.
    pub sides: [Joined; 2],
    /// The least and the greatest time of a right row behind that of the left row that it meets, in microseconds.
    pub within: Option<(i64, i64)>,
    /// The column of the left side with the time before which, from its own on, its row meets others.
    pub until: Option<Box<EventTime>>,
    /// Whether a right row meets at most one left row.
    pub once: bool,
    /// The windows to which rows are assigned on their way in: those of one window meet.
    pub windows: Option<Windows>,
    /// The side that blocks are assigned for; see [`KeyedSpec::side`](crate::KeyedSpec::side).
    pub(crate) own: usize,
}

/// A side of a join.
#[derive(Clone, Debug, PartialEq)]
pub struct Joined {
    /// Columns that enter.
    pub input: SchemaRef,
    /// Columns that are routed: the input, in windows behind their bounds.
    pub routed: SchemaRef,
    /// Columns of these that are compared, without the bounds.
    pub on: Vec<usize>,
    /// The column with the event time, of those that are routed.
    pub time: Option<EventTime>,
    /// Columns of these that are kept in state.
    pub kept: Vec<usize>,
    /// Columns of these that come out.
    pub taken: Vec<usize>,
}

impl Joined {
    /// Columns of rows in state.
    pub(crate) fn schema(&self) -> SchemaRef {
        Arc::new(self.routed.project(&self.kept).expect("columns that it has"))
    }

    /// The key of a row in words.
    fn said(&self, batch: &RecordBatch, row: usize) -> String {
        in_words(self.on.iter().map(|&at| (self.routed.field(at).name().as_str(), batch.column(at))), row)
    }

    /// Places of the keys in state.
    pub(crate) fn keys(&self) -> Vec<usize> {
        let place = |at: &usize| self.kept.iter().position(|kept| kept == at).expect("keys are kept");
        self.on.iter().map(place).collect()
    }
}

/// The nulls of some columns: a row is null where one of them is.
fn nulls(columns: &[usize], batch: &RecordBatch) -> Result<Option<NullBuffer>, OpError> {
    let mut valid: Option<NullBuffer> = None;
    for &at in columns {
        valid = NullBuffer::union(valid.as_ref(), plain(batch.column(at))?.logical_nulls().as_ref());
    }
    Ok(valid.filter(|valid| valid.null_count() > 0))
}

impl Join {
    pub(crate) fn rules(&self) -> Rules {
        Rules { until: self.until.is_some(), once: self.once, ..Rules::new(self.how, self.within) }
    }

    /// The rows of the side [`own`](Self::own) that have to be routed, once for each of their windows.
    pub(crate) fn assign(&self, step: &StepName, batch: &RecordBatch) -> Result<RecordBatch, OpError> {
        let side = &self.sides[self.own];
        let batch = match (&self.windows, &side.time) {
            (Some(windows), Some(time)) => {
                let time = EventTime { column: time.column - 2, ..time.clone() };
                Top::assign_windows(step, &Cut::Windows(*windows), &time, &side.routed, batch)?
            }
            _ => batch.clone(),
        };
        match nulls(&side.on, &batch)?.filter(|_| !self.rules().keeps(self.own)) {
            None => Ok(batch),
            Some(valid) => Ok(filter_record_batch(&batch, &BooleanArray::new(valid.into_inner(), None))?),
        }
    }

    /// What distinguishes its state from that of another join: see [`shape`].
    pub(crate) fn shape(&self) -> u64 {
        let [left, right] = &self.sides;
        shape((&left.schema(), &left.keys()), (&right.schema(), &right.keys()), &self.rule())
    }

    /// What its state depends on beside the rows, in words; none for an inner join without an interval.
    pub(crate) fn rule(&self) -> String {
        let mut words = match self.how {
            JoinHow::Inner => Vec::new(),
            how => vec![how.name().to_owned()],
        };
        if let Some((lower, upper)) = self.within {
            // By their places in state, which has the same columns whatever else is read of a source.
            // One that is not kept, as those of rows that are only asked for, has its name.
            let place = |side: &Joined| {
                let column = side.time.as_ref()?.column;
                let at = side.kept.iter().position(|kept| *kept == column);
                Some(at.map_or_else(|| format!("{:?}", side.routed.field(column).name()), |at| at.to_string()))
            };
            let times: Vec<String> = self.sides.iter().filter_map(place).collect();
            words.push(match (&self.until, &self.windows) {
                (Some(until), _) => format!("until column {}", until.column),
                (None, Some(windows)) => {
                    let place = crate::explain::place(windows.offset_us(), windows.zone());
                    format!("windows of {} us every {} us{place}", windows.size_us(), windows.every_us())
                }
                (None, None) => format!("within {lower} us to {upper} us"),
            });
            words.push(format!("by times {}", times.join(" and ")));
        }
        if self.once {
            words.push("1:m".into());
        }
        words.join(", ")
    }
}

/// What distinguishes the states of two joins: their rows and keys, and the [rule](Join::rule).
pub(crate) fn shape(left: (&Schema, &[usize]), right: (&Schema, &[usize]), rule: &str) -> u64 {
    let words = [left, right].map(|(schema, keys)| {
        let types: Vec<String> = schema.fields().iter().map(|field| field.data_type().to_string()).collect();
        format!("{} by {keys:?}", types.join(","))
    });
    let words = words.join(" with ");
    hash_bytes(if rule.is_empty() { words } else { format!("{words}: {rule}") }.as_bytes())
}

fn converter(schema: &Schema) -> Result<RowConverter, OpError> {
    Ok(RowConverter::new(schema.fields().iter().map(|field| SortField::new(field.data_type().clone())).collect())?)
}

/// A side of the operator.
struct Half {
    side: Joined,
    keys: KeyCodec,
    rows: RowConverter,
    /// Where rows that are kept say when they are over: event time, or the end of their window.
    time: Option<EventTime>,
    /// Where they say until when they meet others.
    until: Option<EventTime>,
}

/// See the module.
pub(crate) struct JoinOp {
    step: StepName,
    rules: Rules,
    /// Of its state.
    shape: u64,
    windows: Option<Windows>,
    halves: [Half; 2],
    /// Columns of the left side that have the value of one of the right side where only that has a row.
    merged: Vec<(usize, usize)>,
    output: SchemaRef,
    watermark: i64,
    /// At the end of an input without interval: the bin and key from which on rows come out that have met none.
    ended: Option<(u32, usize)>,
    /// The rows of the bins that lend them.
    common: Borrowed<Sides>,
    /// Of the others.
    due: Due,
    /// Memory for pairs; none while they come out.
    pairs: Option<Pairs>,
    /// Where the keys of some rows are kept, or [`NOT_THERE`].
    found: Vec<u32>,
    /// Bins of a block that are held.
    checked: Vec<bool>,
    /// Hashes of pairs that have come out, one of `SAMPLE`, until they are asked for.
    met: Vec<u64>,
}

/// Rows whose keys are looked up together.
const TOGETHER: usize = 128;
/// Of more bins than these each row asks for its own.
const CHECKED_BITS: u8 = 12;

/// Pairs that are to come out: rows of the block, and rows of the other side, whose bytes stand here once for many pairs.
struct Pairs {
    /// Bytes of the rows of both sides.
    weight: usize,
    mine: Vec<u32>,
    /// For each pair the row of the other side, by its number among these.
    which: Vec<u32>,
    theirs: Vec<u8>,
    ends: Vec<usize>,
    /// Rows that came last, by where they are kept.
    seen: Box<[Seen]>,
    /// What is seen now.
    turn: u32,
}

/// A row of the other side that is among those of some pairs.
#[derive(Clone, Copy, Default)]
struct Seen {
    place: u64,
    bin: u32,
    /// That of the pairs; 0 is of none.
    turn: u32,
    number: u32,
    /// Of its bytes.
    len: u32,
}

/// Rows that are looked for among those that came last, as a power of two.
const SEEN_BITS: u32 = 10;

impl Default for Pairs {
    fn default() -> Self {
        let seen = vec![Seen::default(); 1 << SEEN_BITS].into();
        let (mine, which, theirs, ends) = Default::default();
        Self { weight: 0, mine, which, theirs, ends, seen, turn: 1 }
    }
}

impl Pairs {
    /// A row of the block meets one whose bytes are here only now.
    #[inline]
    fn push(&mut self, row: u32, bytes: &[u8]) {
        self.mine.push(row);
        let number = self.keep(bytes);
        self.which.push(number);
    }

    /// A row of the block meets one of a bin: where that is kept, as long as these pairs are here, and its bytes, which are read once.
    #[inline]
    fn push_kept<'a>(&mut self, row: u32, (bin, place): (u32, u64), bytes: impl FnOnce() -> &'a [u8]) {
        self.mine.push(row);
        let mixed = (place ^ u64::from(bin) << 20).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let at = (mixed >> (u64::BITS - SEEN_BITS)) as usize;
        let seen = &self.seen[at];
        let number = if (seen.place, seen.bin, seen.turn) == (place, bin, self.turn) {
            self.weight += seen.len as usize;
            seen.number
        } else {
            let bytes = bytes();
            let number = self.keep(bytes);
            self.seen[at] = Seen { place, bin, turn: self.turn, number, len: bytes.len() as u32 };
            number
        };
        self.which.push(number);
    }

    /// A row of the other side by its number.
    #[inline]
    fn keep(&mut self, bytes: &[u8]) -> u32 {
        self.weight += bytes.len();
        self.theirs.extend_from_slice(bytes);
        self.ends.push(self.theirs.len());
        self.ends.len() as u32 - 1
    }

    /// Whether they are so many that they are to come out.
    #[inline]
    fn are_full(&self) -> bool {
        self.mine.len() >= BLOCK_ROWS || self.weight >= BLOCK_BYTES
    }

    /// Forgets what has come out.
    fn clear(&mut self) {
        self.theirs.clear();
        self.ends.clear();
        self.turn = self.turn.checked_add(1).unwrap_or_else(|| {
            self.seen.fill(Seen::default());
            1
        });
    }
}

/// Rows `rows` of columns, which are shared where those are all of them in their order.
fn taken(columns: &[&ArrayRef], rows: Vec<u32>) -> Result<Vec<ArrayRef>, OpError> {
    let all = columns.first().is_some_and(|column| column.len() == rows.len());
    if all && (0..).zip(&rows).all(|(at, row)| at == *row) {
        return Ok(columns.iter().map(|column| Arc::clone(column)).collect());
    }
    let rows = UInt32Array::from(rows);
    Ok(columns.iter().map(|column| take(column, &rows, None)).collect::<Result<_, _>>()?)
}

/// Entries of the past that are not worth being looked through.
const LEAST_STALE: usize = 64;

/// Which bins may have rows that are over, so that a watermark costs nothing for the others.
///
/// Invariant: each bin with rows that can be over, and that has not changed since it was asked for the last time, has its entry.
#[derive(Default)]
struct Due {
    /// By the watermark behind which they are.
    bins: BinaryHeap<Reverse<(i64, u32)>>,
    /// The entry of each bin that counts; others are of the past.
    counts: HashTable<(u32, i64)>,
}

impl Due {
    /// Rows of a bin may be over behind a watermark; none can where none is given.
    fn expect(&mut self, bin: u32, end: Option<i64>) {
        let before = self.counts.entry(spread(bin), |count| count.0 == bin, |count| spread(count.0));
        match (before, end) {
            (Entry::Occupied(before), Some(end)) if before.get().1 == end => return,
            (Entry::Occupied(mut before), Some(end)) => before.get_mut().1 = end,
            (Entry::Occupied(before), None) => _ = before.remove(),
            (Entry::Vacant(none), Some(end)) => _ = none.insert((bin, end)),
            (Entry::Vacant(_), None) => {}
        }
        self.bins.extend(end.map(|end| Reverse((end, bin))));
        if self.bins.len() > 2 * self.counts.len() + LEAST_STALE {
            self.bins = self.counts.iter().map(|&(bin, end)| Reverse((end, bin))).collect();
        }
    }

    /// A bin with rows that may be over behind this watermark.
    fn take(&mut self, watermark: i64) -> Option<u32> {
        while let Some(&Reverse((end, bin))) = self.bins.peek().filter(|Reverse((end, _))| *end < watermark) {
            self.bins.pop();
            if let Ok(count) = self.counts.find_entry(spread(bin), |count| *count == (bin, end)) {
                count.remove();
                return Some(bin);
            }
        }
        None
    }
}

/// Neighbours apart.
fn spread(bin: u32) -> u64 {
    u64::from(bin).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// The bins of a block's rows, of which some lend.
struct Lenders<'a> {
    bins: &'a mut dyn Bins,
    cut: (u8, bool),
    /// The rows of those that lend, and which do.
    whole: Option<&'a mut Sides>,
    lent: &'a [bool],
    /// Whether all bins of the block do.
    all: bool,
}

/// In place of where a key is kept.
const NOT_THERE: u32 = u32::MAX;

/// A block as the operator has read it.
struct Block<'a> {
    side: usize,
    batch: &'a RecordBatch,
    hashes: &'a [u64],
    keys: Keys,
    /// Event times, and the rows without one; none where the join has no interval.
    times: Option<(Vec<i64>, Vec<u32>)>,
    /// For each row the last time at which one can meet it, where rows say it.
    lasts: Option<Vec<i64>>,
    /// Rows whose key is null, if they come out.
    nulls: Option<NullBuffer>,
    /// How much before its event time a row counts.
    back: i64,
}

/// What becomes of a row that comes.
enum Come {
    /// It meets those of its time.
    At(i64),
    /// Nothing: it is late.
    Late,
    /// It comes out by itself: it has no key.
    Alone,
}

impl Block<'_> {
    #[inline]
    fn time(&self, row: usize, watermark: i64) -> Come {
        let mut time = 0;
        if let Some((times, absent)) = &self.times {
            time = times[row].saturating_sub(self.back);
            if time < watermark || !absent.is_empty() && absent.binary_search(&(row as u32)).is_ok() {
                return Come::Late;
            }
        }
        match self.nulls.as_ref().is_some_and(|valid| valid.is_null(row)) {
            true => Come::Alone,
            false => Come::At(time),
        }
    }
}

/// In place of a bin: all that lend.
const LENDERS: u32 = u32::MAX;

impl Lenders<'_> {
    /// Where the rows of a hash are, with the number of what they are in.
    #[inline]
    fn of(&mut self, hash: u64) -> Result<(u32, &mut Sides), OpError> {
        let bin = if self.all { LENDERS } else { bin_among(self.bins, self.cut, hash) };
        match &mut self.whole {
            Some(whole) if self.all || self.lent.get(bin as usize).is_some_and(|lent| *lent) => Ok((LENDERS, whole)),
            _ => Ok((bin, sides_of(self.bins, bin)?)),
        }
    }
}

/// Rows of each side that come out of state by themselves.
#[derive(Default)]
struct Alone {
    weight: usize,
    rows: [Vec<Box<[u8]>>; 2],
}

/// What a round has given.
#[derive(Default)]
struct Round {
    rows: usize,
    bytes: usize,
    /// Hashes of its pairs, one of `SAMPLE`.
    met: Vec<u64>,
}

impl Round {
    fn is_over(&self) -> bool {
        self.rows >= ROUND_ROWS || self.bytes >= ROUND_BYTES
    }
}

impl Half {
    /// The columns of rows that are kept.
    fn kept(&self, batch: &RecordBatch) -> Vec<ArrayRef> {
        self.side.kept.iter().map(|at| batch.column(*at).clone()).collect()
    }

    /// What is kept of rows.
    fn bytes(&self, batch: &RecordBatch) -> Result<Bytes, OpError> {
        Ok(Bytes::new(&self.rows, &self.kept(batch))?)
    }
}

impl JoinOp {
    /// For each row the last time at which one can meet it; where it says none, the last there is before the end.
    fn lasts(&self, until: &EventTime, batch: &RecordBatch) -> Result<Vec<i64>, OpError> {
        let (mut lasts, absent) = event_times(&self.step, until, until.column, batch)?;
        lasts.iter_mut().for_each(|last| *last = last.saturating_sub(1));
        absent.into_iter().for_each(|row| lasts[row as usize] = i64::MAX - 1);
        Ok(lasts)
    }

    pub(crate) fn new(
        step: StepName,
        keys: &[usize],
        join: &Join,
        types: Vec<DataType>,
        output: SchemaRef,
    ) -> Result<Self, OpError> {
        let half = |side: &Joined, keys: Vec<usize>, until: Option<EventTime>| -> Result<Half, OpError> {
            let time = match &join.windows {
                Some(_) => side.time.clone().map(|time| EventTime { column: 1, ..time }),
                None => side.time.clone().filter(|_| join.within.is_some()),
            };
            let (keys, rows) = (KeyCodec::new(keys, types.clone())?, converter(&side.schema())?);
            Ok(Half { side: side.clone(), keys, rows, time, until })
        };
        let [left, right] = &join.sides;
        let bounds = keys.len() - left.on.len();
        let right_keys = right.on.iter().copied().chain(0..bounds).collect();
        let merged = (0..right.routed.fields().len()).filter(|at| !join.how.is_filter() && !right.taken.contains(at));
        let merged = merged.filter_map(|at| Some((left.routed.index_of(right.routed.field(at).name()).ok()?, at)));
        let (merged, halves) = (
            merged.collect(),
            [half(left, keys.to_vec(), join.until.as_deref().cloned())?, half(right, right_keys, None)?],
        );
        let (rules, windows) = (join.rules(), join.windows);
        Ok(Self {
            step,
            rules,
            shape: join.shape(),
            windows,
            halves,
            merged,
            output,
            watermark: i64::MIN,
            ended: None,
            common: Borrowed::default(),
            due: Due::default(),
            pairs: None,
            found: Vec::new(),
            checked: Vec::new(),
            met: Vec::new(),
        })
    }

    /// Fails where a bin is not held, before anything has changed.
    fn check(&mut self, bins: &mut Lenders<'_>, hashes: &[u64]) -> Result<(), OpError> {
        if bins.all {
            return Ok(());
        }
        let few = bins.cut.0 <= CHECKED_BITS && !bins.cut.1;
        self.checked.clear();
        self.checked.extend_from_slice(if few { bins.lent } else { &[] });
        self.checked.resize(if few { 1 << bins.cut.0 } else { 0 }, false);
        bins.all = bins.whole.is_some();
        for &hash in hashes {
            let bin = bin_among(bins.bins, bins.cut, hash);
            if !few || !std::mem::replace(&mut self.checked[bin as usize], true) {
                bins.all = false;
                bins.of(hash)?;
            }
        }
        Ok(())
    }

    /// Gives pairs of rows of a block, which has these hashes.
    fn give(
        &self,
        side: usize,
        (batch, hashes): (&RecordBatch, &[u64]),
        pairs: &mut Pairs,
        round: &mut Round,
        out: &mut Sink<'_>,
    ) -> Result<(), OpError> {
        if pairs.mine.is_empty() {
            return Ok(());
        }
        let Pairs { mine, which, theirs, ends, weight, .. } = pairs;
        // Beginning at another one each time, so that every pair is as likely to count.
        round.met.extend(mine.iter().skip(round.rows % SAMPLE).step_by(SAMPLE).map(|row| hashes[*row as usize]));
        (round.rows, round.bytes) = (round.rows + mine.len(), round.bytes + std::mem::take(weight));
        let [own, other] = [&self.halves[side], &self.halves[1 - side]];
        let own: Vec<&ArrayRef> = own.side.taken.iter().map(|at| batch.column(*at)).collect();
        let own = taken(&own, std::mem::take(mine))?;
        let begins = [0].into_iter().chain(ends.iter().copied());
        let found = match other.side.taken.is_empty() {
            true => Vec::new(),
            false => row_format::columns(&other.rows, begins.zip(&*ends).map(|(begin, end)| &theirs[begin..*end]))?,
        };
        let found: Vec<&ArrayRef> = other.side.taken.iter().map(|at| &found[*at]).collect();
        let found = taken(&found, std::mem::take(which))?;
        pairs.clear();
        let columns = if side == 0 { [own, found] } else { [found, own] };
        out(Output::Rows(RecordBatch::try_new(self.output.clone(), columns.concat())?));
        Ok(())
    }

    /// Rows of a side that have met none, by their columns as they are routed.
    fn alone(&self, side: usize, columns: &[ArrayRef], rows: usize) -> Result<RecordBatch, OpError> {
        let left = self.halves[0].side.taken.len();
        let column = |(at, field): (usize, &Arc<Field>)| match (side, at.checked_sub(left)) {
            (0, None) => columns[self.halves[0].side.taken[at]].clone(),
            (1, Some(at)) => columns[self.halves[1].side.taken[at]].clone(),
            (_, here) => {
                let merged =
                    self.merged.iter().find(|(own, _)| here.is_none() && self.halves[0].side.taken[at] == *own);
                merged.map_or_else(|| new_null_array(field.data_type(), rows), |(_, right)| columns[*right].clone())
            }
        };
        let columns = self.output.fields().iter().enumerate().map(column).collect();
        Ok(RecordBatch::try_new(self.output.clone(), columns)?)
    }

    fn give_alone(&self, alone: &mut Alone, round: &mut Round, out: &mut Sink<'_>) -> Result<(), OpError> {
        let Alone { weight, rows } = std::mem::take(alone);
        round.bytes += weight;
        for (side, rows) in rows.into_iter().enumerate().filter(|(_, rows)| !rows.is_empty()) {
            round.rows += rows.len();
            let columns = row_format::columns(&self.halves[side].rows, rows.iter().map(|row| &**row))?;
            out(Output::Rows(self.alone(side, &columns, rows.len())?));
        }
        Ok(())
    }

    /// What the bins that lend have lent; those of which it was divided since take their shares.
    fn borrowed(&mut self, bins: &mut dyn Bins) -> Result<Option<Shared<Sides>>, OpError> {
        for bin in self.common.take_divided() {
            if bins.holds(bin) {
                sides_of(bins, bin)?;
            }
        }
        Ok(self.common.whole())
    }

    /// Lets go of rows that are over, of the bins that have any, earliest first. Says whether that was all.
    fn fire_some(&mut self, bins: &mut dyn Bins, out: &mut Sink<'_>) -> Result<bool, OpError> {
        let shared = self.borrowed(bins)?;
        let mut common = shared.as_ref().map(common::lock);
        let (whole, lent) = common.as_mut().and_then(|common| common.parts()).unzip();
        let lends = |bin: u32| lent.is_some_and(|lent| lent.get(bin as usize).is_some_and(|lent| *lent));
        for bin in bins.take_changed() {
            if bins.holds(bin) && !lends(bin) {
                let sides = sides_of(bins, bin)?;
                sides.tidy();
                self.due.expect(bin, sides.next_due());
            }
        }
        let (mut alone, mut round, mut all) = (Alone::default(), Round::default(), true);
        if let Some(whole) = whole {
            all = whole.fire(self.watermark, |side, row| self.take_alone((side, row), &mut alone, &mut round, out))?;
        }
        while all && let Some(bin) = self.due.take(self.watermark) {
            if !bins.holds(bin) || lends(bin) {
                continue;
            }
            let sides = sides_of(bins, bin)?;
            all = sides.fire(self.watermark, |side, row| self.take_alone((side, row), &mut alone, &mut round, out))?;
            self.due.expect(bin, sides.next_due());
        }
        self.give_alone(&mut alone, &mut round, out)?;
        Ok(all)
    }

    /// At the end of an input without interval: gives the rows that have met none. Says whether that was all.
    fn unmet_some(&mut self, bins: &mut dyn Bins, out: &mut Sink<'_>) -> Result<bool, OpError> {
        if !self.rules.keeps(0) && !self.rules.keeps(1) {
            return Ok(true);
        }
        let (first, mut key) = self.ended.unwrap_or_default();
        let (mut alone, mut round) = (Alone::default(), Round::default());
        for bin in bins.held().into_iter().filter(|bin| *bin >= first) {
            let take = |side: usize, row: &[u8]| self.take_alone((side, row), &mut alone, &mut round, out);
            let next = sides_of(bins, bin)?.unmet(std::mem::take(&mut key), take)?;
            if let Some(next) = next {
                self.ended = Some((bin, next));
                self.give_alone(&mut alone, &mut round, out)?;
                return Ok(false);
            }
        }
        self.ended = Some((u32::MAX, 0));
        self.give_alone(&mut alone, &mut round, out)?;
        Ok(true)
    }

    /// A row of a side comes out by itself. Says whether the round is over.
    fn take_alone(
        &self,
        (side, row): (usize, &[u8]),
        alone: &mut Alone,
        round: &mut Round,
        out: &mut Sink<'_>,
    ) -> Result<bool, OpError> {
        alone.weight += row.len();
        alone.rows[side].push(row.into());
        if alone.rows[side].len() == BLOCK_ROWS || alone.weight >= BLOCK_BYTES {
            self.give_alone(alone, round, out)?;
        }
        Ok(round.is_over())
    }

    /// Finds the keys of the next rows, and reads what will be read of them: so the reads of many are under way at once.
    #[inline]
    fn find_some(bins: &mut Lenders<'_>, block: &Block<'_>, from: usize, found: &mut Vec<u32>) -> Result<(), OpError> {
        found.clear();
        for (row, &hash) in block.hashes.iter().enumerate().skip(from).take(TOGETHER) {
            let (_, sides) = bins.of(hash)?;
            let at = sides.find(hash, block.keys.bytes(row));
            black_box(at.map(|at| sides.touch(at, block.side)));
            found.push(at.unwrap_or(NOT_THERE));
        }
        Ok(())
    }

    /// Takes rows of the block in until the round is over, and says how many.
    fn add_each(
        &self,
        bins: &mut Lenders<'_>,
        block: &Block<'_>,
        (pairs, round): (&mut Pairs, &mut Round),
        found: &mut Vec<u32>,
        (late, alone): (&mut Vec<u32>, &mut Vec<u32>),
        out: &mut Sink<'_>,
    ) -> Result<usize, OpError> {
        let &Block { side, batch, hashes, .. } = block;
        let mut rows = self.halves[side].bytes(batch)?;
        let mut done = 0;
        while done < hashes.len() && !round.is_over() {
            if done % TOGETHER == 0 {
                Self::find_some(bins, block, done, found)?;
            }
            let (row, hash, at) = (done, hashes[done], found[done % TOGETHER]);
            done += 1;
            let time = match block.time(row, self.watermark) {
                Come::At(time) => time,
                Come::Late => {
                    late.push(row as u32);
                    continue;
                }
                Come::Alone => {
                    alone.push(row as u32);
                    continue;
                }
            };
            let bytes = rows.row(row);
            let mut failed = Ok(());
            let (bin, sides) = bins.of(hash)?;
            let meets = |place: Option<u64>, other: &[u8]| {
                pairs.weight += bytes.len();
                match place {
                    Some(place) => pairs.push_kept(row as u32, (bin, place), || other),
                    None => pairs.push(row as u32, other),
                }
                if pairs.are_full() && failed.is_ok() {
                    failed = self.give(side, (batch, hashes), pairs, round, out);
                }
            };
            let key = (hash, block.keys.bytes(row), Some(at).filter(|at| *at != NOT_THERE));
            let own = sides.add(side, key, (time, block.lasts.as_ref().map(|lasts| lasts[row])), bytes, meets);
            failed?;
            match own {
                Own::Told => {}
                Own::Alone => alone.push(row as u32),
                Own::Twice => {
                    let (step, key) = (self.step.clone(), self.halves[side].side.said(batch, row));
                    return Err(OpError::Twice { step, key, row });
                }
            }
        }
        Ok(done)
    }

    /// The same of right rows that meet at most one left row: only those that meet none are kept, and become bytes.
    fn meet_one_each(
        &self,
        bins: &mut Lenders<'_>,
        block: &Block<'_>,
        (pairs, round): (&mut Pairs, &mut Round),
        found: &mut Vec<u32>,
        (late, alone): (&mut Vec<u32>, &mut Vec<u32>),
        out: &mut Sink<'_>,
    ) -> Result<usize, OpError> {
        let &Block { side, batch, hashes, .. } = block;
        let (mut unmet, mut times) = (Vec::new(), Vec::new());
        let mut done = 0;
        while done < hashes.len() && !round.is_over() {
            if done % TOGETHER == 0 {
                Self::find_some(bins, block, done, found)?;
            }
            let (row, hash, at) = (done, hashes[done], found[done % TOGETHER]);
            done += 1;
            let time = match block.time(row, self.watermark) {
                Come::At(time) => time,
                Come::Late => {
                    late.push(row as u32);
                    continue;
                }
                Come::Alone => {
                    alone.push(row as u32);
                    continue;
                }
            };
            let (bin, sides) = bins.of(hash)?;
            match if at == NOT_THERE { None } else { sides.meet_one(at, time) } {
                Some(place) => {
                    pairs.push_kept(row as u32, (bin, place), || sides.row_at(0, place));
                    if pairs.are_full() {
                        self.give(side, (batch, hashes), pairs, round, out)?;
                    }
                }
                None => {
                    unmet.push(row as u32);
                    times.push(time);
                }
            }
        }
        if !unmet.is_empty() {
            let half = &self.halves[side];
            let (mut bytes, whole) = match Longs::new(&half.kept(batch)) {
                Some(longs) => (Bytes::Longs(longs), true),
                None => (half.bytes(&take_rows(batch, &unmet)?)?, false),
            };
            for ((at, row), time) in unmet.into_iter().enumerate().zip(times) {
                let (row, hash) = (row as usize, hashes[row as usize]);
                let (_, sides) = bins.of(hash)?;
                let bytes = bytes.row(if whole { row } else { at });
                sides.wait((hash, block.keys.bytes(row)), time, bytes);
            }
        }
        Ok(done)
    }

    /// Of late rows those that report it: of a row's copies the one in its last window, which closes last.
    fn reporting(&self, half: &Half, batch: &RecordBatch, late: &mut Vec<u32>) -> Result<(), OpError> {
        let (Some(windows), Some(time), false) = (&self.windows, &half.side.time, late.is_empty()) else {
            return Ok(());
        };
        let (mut times, absent) = event_times(&self.step, time, time.column, batch)?;
        windows.to_axis(&mut times);
        let [starts, ends] = [0, 1].map(|bound| event_times(&self.step, time, bound, batch));
        let (starts, ends) = (starts?.0, ends?.0);
        let last = |row: usize| windows.last(times[row]) == (starts[row], ends[row]);
        late.retain(|row| absent.binary_search(row).is_ok() || last(*row as usize));
        Ok(())
    }
}

impl KeyedOp for JoinOp {
    fn apply(
        &mut self,
        bins: &mut dyn Bins,
        side: usize,
        batch: &RecordBatch,
        hashes: &[u64],
        out: &mut Sink<'_>,
    ) -> Result<(), OpError> {
        check_hashes(batch, hashes)?;
        let mut done = 0;
        while done < batch.num_rows() {
            let rest = batch.slice(done, batch.num_rows() - done);
            done += self.apply_some(bins, side, &rest, &hashes[done..], out)?;
        }
        Ok(())
    }

    fn apply_some(
        &mut self,
        bins: &mut dyn Bins,
        side: usize,
        batch: &RecordBatch,
        hashes: &[u64],
        out: &mut Sink<'_>,
    ) -> Result<usize, OpError> {
        check_hashes(batch, hashes)?;
        let (shape, rules) = (self.shape, self.rules);
        self.common.ask(bins, || Sides::new(shape, rules));
        let shared = self.borrowed(bins)?;
        let mut common = shared.as_ref().map(common::lock);
        let of_all = common.as_ref().is_some_and(|common| common.is_of_all());
        let (whole, lent) = common.as_mut().and_then(|common| common.parts()).unzip();
        let cut = (bins.bits(), bins.is_split());
        let all = of_all && whole.is_some() && !cut.1;
        let mut bins = Lenders { bins, cut, whole, lent: lent.unwrap_or_default(), all };
        self.check(&mut bins, hashes)?;
        let half = self.halves.get(side).ok_or(OpError::Side { side })?;
        let times = half.time.as_ref().map(|time| event_times(&self.step, time, time.column, batch)).transpose()?;
        let lasts = half.until.as_ref().map(|until| self.lasts(until, batch)).transpose()?;
        let keys = half.keys.encode(batch)?;
        let nulls = if self.rules.keeps(side) { nulls(&half.side.on, batch)? } else { None };
        // The last instant of a window is before its end.
        let back = i64::from(self.windows.is_some());
        let block = Block { side, batch, hashes, keys, times, lasts, nulls, back };
        let (mut pairs, mut round) = (self.pairs.take().unwrap_or_default(), Round::default());
        let mut found = std::mem::take(&mut self.found);
        let (mut late, mut alone) = (Vec::new(), Vec::new());
        let apart = (&mut late, &mut alone);
        let done = match self.rules.once && side == 1 {
            true => self.meet_one_each(&mut bins, &block, (&mut pairs, &mut round), &mut found, apart, out)?,
            false => self.add_each(&mut bins, &block, (&mut pairs, &mut round), &mut found, apart, out)?,
        };
        drop(common);
        self.common.limit();
        self.give(side, (batch, hashes), &mut pairs, &mut round, out)?;
        self.met.append(&mut round.met);
        (self.pairs, self.found) = (Some(pairs), found);
        if !alone.is_empty() {
            let rows = take_rows(batch, &alone)?;
            out(Output::Rows(self.alone(side, rows.columns(), rows.num_rows())?));
        }
        self.reporting(half, batch, &mut late)?;
        if !late.is_empty() {
            send(take_rows(batch, &late)?, Output::Late, out);
        }
        Ok(done)
    }

    fn watermark(&mut self, bins: &mut dyn Bins, watermark_us: i64, out: &mut Sink<'_>) -> Result<(), OpError> {
        while !self.watermark_some(bins, watermark_us, out)? {}
        Ok(())
    }

    fn watermark_some(&mut self, bins: &mut dyn Bins, watermark_us: i64, out: &mut Sink<'_>) -> Result<bool, OpError> {
        if watermark_us < self.watermark {
            return Ok(true);
        }
        self.watermark = watermark_us;
        match self.rules.hold {
            Some(_) => self.fire_some(bins, out),
            // Said once.
            None if watermark_us == i64::MAX => self.unmet_some(bins, out),
            None => Ok(true),
        }
    }

    fn end_epoch(&mut self, _: &mut dyn Bins, _: &mut Sink<'_>) -> Result<(), OpError> {
        self.common.wait();
        Ok(())
    }

    fn resume(&mut self, watermark_us: i64) {
        self.watermark = watermark_us;
    }

    fn own_costs(&mut self) -> OwnCosts {
        OwnCosts { spent: Vec::new(), met: std::mem::take(&mut self.met) }
    }
}

/// Tells what a join keeps: its rows with their side, `left` or `right`, as a value of the column of that name.
pub(crate) struct Told {
    halves: [(SchemaRef, RowConverter); 2],
    schema: SchemaRef,
}

impl Told {
    pub(crate) fn new(left: &SchemaRef, right: &SchemaRef) -> Result<Self, OpError> {
        let halves = [(left.clone(), converter(left)?), (right.clone(), converter(right)?)];
        Ok(Self { halves, schema: Self::columns(left, right) })
    }

    pub(crate) fn columns(left: &Schema, right: &Schema) -> SchemaRef {
        let row = |name: &str, schema: &Schema| {
            let fields = schema.fields().iter().map(|field| field.as_ref().clone().with_nullable(true));
            Field::new(name, DataType::Struct(fields.collect()), true)
        };
        Arc::new(Schema::new(vec![Field::new("side", DataType::Utf8, false), row("left", left), row("right", right)]))
    }

    fn block(&self, side: usize, rows: &[&[u8]]) -> Result<RecordBatch, OpError> {
        let values = row_format::columns(&self.halves[side].1, rows.iter().copied())?;
        let names = vec![["left", "right"][side]; rows.len()];
        let mut columns: Vec<ArrayRef> = vec![Arc::new(StringArray::from(names))];
        for at in [0, 1] {
            let DataType::Struct(fields) = self.schema.field(at + 1).data_type() else {
                unreachable!("a side is a struct")
            };
            columns.push(match at == side {
                true => Arc::new(StructArray::try_new(fields.clone(), values.clone(), None)?),
                false => Arc::new(StructArray::new_null(fields.clone(), rows.len())),
            });
        }
        Ok(RecordBatch::try_new(self.schema.clone(), columns)?)
    }
}

impl KeyedOp for Told {
    fn apply(
        &mut self,
        _: &mut dyn Bins,
        _: usize,
        _: &RecordBatch,
        _: &[u64],
        _: &mut Sink<'_>,
    ) -> Result<(), OpError> {
        Ok(())
    }

    fn watermark(&mut self, bins: &mut dyn Bins, _: i64, out: &mut Sink<'_>) -> Result<(), OpError> {
        for bin in bins.held() {
            let sides = sides_of(bins, bin)?;
            for side in [0, 1] {
                let rows: Vec<&[u8]> = sides.side(side).collect();
                for rows in rows.chunks(BLOCK_ROWS) {
                    out(Output::Rows(self.block(side, rows)?));
                }
            }
        }
        Ok(())
    }

    fn end_epoch(&mut self, _: &mut dyn Bins, _: &mut Sink<'_>) -> Result<(), OpError> {
        Ok(())
    }

    fn resume(&mut self, _: i64) {}
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use arrow_array::cast::AsArray;
    use arrow_array::types::Int64Type;
    use arrow_array::{Array, Int64Array};
    use penstock_bins::{BinState, BinTable, Encoding, Extent, Routing};
    use proptest::prelude::*;

    use super::*;
    use crate::common::ASK_AGAIN;
    use crate::spec::{NodeSpec, PLAN_VERSION, SourceSpec, StepSpec, Validate};
    use crate::{CallError, Callbacks, ForeignState, KeyedSpec, Plan, PlanSpec, SideRows, State};

    struct NoCalls;

    impl Callbacks for NoCalls {
        fn map(&self, call: usize, _: &RecordBatch, _: &mut SideRows) -> Result<RecordBatch, CallError> {
            unreachable!("no call {call}")
        }

        fn new_state(&self, call: usize) -> Box<dyn ForeignState> {
            unreachable!("no state of call {call}")
        }
    }

    /// Key, time in milliseconds, value.
    fn block(rows: &[[i64; 3]]) -> RecordBatch {
        let column = |at: usize| -> ArrayRef { Arc::new(Int64Array::from_iter_values(rows.iter().map(|row| row[at]))) };
        RecordBatch::try_from_iter_with_nullable([
            ("k", column(0), true),
            ("t", column(1), true),
            ("v", column(2), true),
        ])
        .unwrap()
    }

    /// A join of two sources of such rows.
    fn plan(how: JoinHow, within: Option<(i64, i64)>, until: bool) -> Plan {
        let source = |name: &str| SourceSpec {
            name: name.into(),
            schema: block(&[]).schema(),
            event_time: Some("t".into()),
            lateness_ms: 0,
            order_by: Vec::new(),
            idle_after_ms: None,
        };
        let join = StepSpec::Join {
            left: vec!["k".into()],
            right: vec!["k".into()],
            how,
            within,
            until: until.then(|| "v".into()),
            validate: until.then_some(Validate::OneToMany),
            windowed: false,
            suffix: Some("_right".into()),
            operator: None,
        };
        let steps = vec![NodeSpec { inputs: vec![0, 1], step: join }];
        let sources = vec![source("left"), source("right")];
        Plan::compile(PlanSpec { version: PLAN_VERSION, sources, steps }).unwrap()
    }

    struct Rig {
        keyed: [KeyedSpec; 2],
        table: BinTable<State>,
        op: Box<dyn KeyedOp>,
    }

    type Told = Vec<Vec<Option<i64>>>;

    fn rows(output: Output, told: &mut Told) {
        let Output::Rows(rows) = output else { panic!("nothing is late") };
        let cell = |column: &ArrayRef, row: usize| {
            let column = column.as_primitive::<Int64Type>();
            column.is_valid(row).then(|| column.value(row))
        };
        told.extend((0..rows.num_rows()).map(|row| rows.columns().iter().map(|column| cell(column, row)).collect()));
    }

    impl Rig {
        fn new(plan: &Plan) -> Self {
            let keyed = plan.keyed().next().unwrap().clone();
            let calls: Arc<dyn Callbacks> = Arc::new(NoCalls);
            let table = BinTable::fresh(&Routing::from_owners(vec![0; 4]).unwrap(), 0, &|| keyed.new_state(&calls));
            let op = keyed.operator(&calls).unwrap();
            Self { keyed: [0, 1].map(|side| keyed.side(side)), table, op }
        }

        /// What comes out of an epoch, in order.
        fn epoch(&mut self, sides: [&RecordBatch; 2], watermark: i64) -> Told {
            let mut told = Told::new();
            for (side, rows_of) in sides.into_iter().enumerate() {
                let hashes = self.keyed[side].hashes(rows_of).unwrap();
                self.op.apply(&mut self.table, side, rows_of, &hashes, &mut |output| rows(output, &mut told)).unwrap();
            }
            self.op.watermark(&mut self.table, watermark * 1000, &mut |output| rows(output, &mut told)).unwrap();
            self.op.end_epoch(&mut self.table, &mut |output| rows(output, &mut told)).unwrap();
            told.sort_unstable();
            told
        }

        /// Bin 1 goes away and comes back, as it does between workers.
        fn move_a_bin(&mut self) {
            let calls: Arc<dyn Callbacks> = Arc::new(NoCalls);
            let mut new = self.keyed[0].new_state(&calls);
            let old = self.table.uninstall(1).unwrap();
            let mut encoding = Encoding::of(Extent::All);
            while let Some(chunk) = old.encode(&mut encoding).unwrap() {
                new.absorb(&chunk).unwrap();
            }
            self.table.install(1, Box::new(new)).unwrap();
        }
    }

    /// Bins lend, come home when one moves, and lend again; a twin whose epochs are marked lends nothing.
    #[test]
    fn bins_that_lend_are_what_they_would_be() {
        let near = Some((-3_000, 5_000));
        for (how, within, until) in
            [(JoinHow::Full, near, false), (JoinHow::Right, None, true), (JoinHow::Inner, None, false)]
        {
            let plan = plan(how, within, until);
            let (mut rig, mut twin) = (Rig::new(&plan), Rig::new(&plan));
            let (mut lent, mut homes) = (0, 0);
            for time in 0..4 * i64::from(ASK_AGAIN) {
                // Left rows of a key follow one another.
                let left: Vec<[i64; 3]> = (0..8).map(|key| [time % 4 * 8 + key, time, time + 3]).collect();
                let right: Vec<[i64; 3]> = (0..40).map(|i| [i * i % 37, time + i % 3, i]).collect();
                let (left, right) = (block(&left), block(&right));
                twin.table.mark_all(time as u64);
                let given = [&mut rig, &mut twin].map(|rig| rig.epoch([&left, &right], time));
                assert_eq!(given[0], given[1], "{how:?} at {time}");
                lent += u32::from(rig.table.get_mut(0).unwrap().sides_mut().is_some_and(|sides| sides.is_lent()));
                assert!(!twin.table.get_mut(0).unwrap().sides_mut().is_some_and(|sides| sides.is_lent()));
                if time % 16 == 0 {
                    for ((bin, state), (_, other)) in rig.table.owned().zip(twin.table.owned()) {
                        assert_eq!(state.is_empty(), other.is_empty(), "{bin} at {time}");
                        assert!(state.keys() <= other.keys(), "those that went since the mark are there");
                    }
                }
                if time % 100 == 99 {
                    rig.move_a_bin();
                    homes += 1;
                }
            }
            assert!(homes > 1 && lent > ASK_AGAIN, "{lent} times");
        }
    }

    proptest! {
        /// Each bin comes when its last word says so, once.
        #[test]
        fn bins_are_due_as_they_said_last(deeds in prop::collection::vec((0u32..6, prop::option::of(0i64..20), any::<bool>()), 0..100)) {
            let (mut due, mut twin) = (Due::default(), BTreeMap::new());
            for (bin, end, takes) in deeds {
                match (takes, end) {
                    (true, watermark) => {
                        let watermark = watermark.unwrap_or(10);
                        let mut taken: Vec<u32> = std::iter::from_fn(|| due.take(watermark)).collect();
                        taken.sort_unstable();
                        let over: Vec<u32> = twin.iter().filter(|(_, end)| **end < watermark).map(|(bin, _)| *bin).collect();
                        prop_assert_eq!(taken, over);
                        twin.retain(|_, end| *end >= watermark);
                    }
                    (false, end) => {
                        due.expect(bin, end);
                        match end {
                            Some(end) => _ = twin.insert(bin, end),
                            None => _ = twin.remove(&bin),
                        }
                    }
                }
            }
        }
    }
}
