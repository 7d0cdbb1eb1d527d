//! Windowed aggregates over panes.
//!
//! Windows `[s, s + size)` start at multiples of `every`, behind an offset (negative times floor). All this is done on an *axis*: event time less the
//! offset, or where windows are days of a time zone, the number of the day, in microseconds as if each had 24 hours. Panes are named by where
//! they start on it; watermarks and the bounds that come out are instants. A pane is a stretch that no window cuts: of
//! gcd(size, every) where windows overlap, else the window itself. A row is added once, to its pane, and a window merges its panes when it
//! fires. A window fires when the watermark reaches its end, if it holds a row; windows that begin before the first event are windows like
//! others. A pane is dropped when no open window needs it. A row is late when all its windows have fired; it goes to the side output and
//! changes nothing. Rows without an event time go there too. Where `every > size` there are gaps: a row in one has no window, so it is
//! in no result and never late.
//!
//! Bins whose panes are plain rows lend them, so that a block is added to one table and a window is merged once for all of them: see [`crate::common`].
//!
//! Windows that overlap much, of aggregates that can be taken away again, are rolled from one to the next instead: see [`Panes::roll`]. Where a top step
//! is all that follows, of a bin's rows of a window only those come out that can be among the [best](Best); where that is the greatest count,
//! bins before it tell how much it is at least, and a bin that cannot have as much is not read.
//!
//! Each bin keeps how far it has fired, so a bin that moves to a worker with another history never fires a window twice.
//!
//! Windows that close together come out in rounds: one call gives them until it has given [`ROUND_ROWS`] or [`ROUND_BYTES`], or has looked at
//! [`ROUND_LOOKED`] rows, and says whether that was all. Of a bin, or of those that lend, one window is never divided. Between two rounds a bin is as at a
//! watermark that has reached the windows that were given; what is gathered of a block of output waits for the next round, so blocks are what they would be
//! without rounds.

use std::borrow::Cow;
use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::BTreeMap;

use arrow_array::RecordBatch;

use crate::column::{self, EVENT_TIME_LIMIT_US, EventTime};
use crate::common::{self, Borrowed};
use crate::error::{OpError, StepName};
use crate::group::{GroupBy, Part};
use crate::op::{BLOCK_ROWS, Bins, KeyedOp, Output, Sink, bytes_of, check_hashes, send, take_rows};
use crate::panes::Panes;
use crate::partition::{ByBin, Partition, bin_of};
use crate::state::{State, panes_of};
use crate::table::Table;
use crate::zone::{DAY_US, Zone};

/// How event time is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// Into windows that are the same for all keys.
    Windows(Windows),
    /// Into sessions of each key, by the gap in microseconds that ends one.
    Sessions(i64),
}

/// Tumbling (`size == every`), sliding (`size > every`) or apart (`size < every`) windows, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Windows {
    size_us: i64,
    every_us: i64,
    /// Length of a pane; panes start at multiples of it where windows overlap, else where windows start.
    pane_us: i64,
    /// Where the first window behind 0 starts.
    offset_us: i64,
    /// Whose days they are.
    zone: Option<Zone>,
}

/// Windows that hold a time from which on they are rolled: a pane is merged twice, once to take it away.
const LEAST_OVERLAP: i64 = 4;

/// Rows that a round gives, about.
const ROUND_ROWS: usize = 2 * BLOCK_ROWS;
/// Bytes that a round gives, about.
const ROUND_BYTES: usize = 8 << 20;
/// Rows that a round merges or searches, about: windows of which few rows come out take time too. Tests have many rounds.
const ROUND_LOOKED: usize = if cfg!(test) { 64 } else { 1 << 22 };

/// Windows of a row, and panes of a window, at most: each is looked at.
const MOST_PARTS: i64 = 1 << 20;

fn gcd(a: i64, b: i64) -> i64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

impl Windows {
    /// Windows of `size_us` every `every_us`.
    ///
    /// # Errors
    /// The name of the option that is out of range and why: both must be positive and at most about 73,000 years, a row in at most 2^20 windows,
    /// and a window of at most 2^20 panes.
    pub fn new(size_us: i64, every_us: i64) -> Result<Self, (&'static str, &'static str)> {
        if size_us < 1 {
            return Err(("size_us", "must be positive"));
        }
        if size_us > EVENT_TIME_LIMIT_US {
            return Err(("size_us", "is longer than the range of event times"));
        }
        if every_us < 1 {
            return Err(("every_us", "must be positive"));
        }
        if every_us > EVENT_TIME_LIMIT_US {
            return Err(("every_us", "is longer than the range of event times"));
        }
        let pane_us = if size_us > every_us { gcd(size_us, every_us) } else { size_us };
        if size_us / every_us > MOST_PARTS {
            return Err((
                "every_us",
                "makes each row one of more than 1,048,576 windows; is its unit that of the size?",
            ));
        }
        if size_us / pane_us > MOST_PARTS {
            return Err(("every_us", "cuts a window into more than 1,048,576 parts; choose one that divides the size"));
        }
        Ok(Self { size_us, every_us, pane_us, offset_us: 0, zone: None })
    }

    /// The same so much later, and as days of a zone.
    ///
    /// # Errors
    /// The name of the option that is out of range and why.
    pub(crate) fn placed(self, offset_us: i64, zone: Option<Zone>) -> Result<Self, (&'static str, &'static str)> {
        if !(0..self.every_us).contains(&offset_us) {
            return Err(("offset_us", "is from 0 to less than the distance between two starts"));
        }
        for (name, us) in [("size_us", self.size_us), ("every_us", self.every_us)] {
            if zone.is_some() && us % DAY_US != 0 {
                return Err((name, "is no number of whole days, as windows in a time zone are"));
            }
        }
        Ok(Self { offset_us, zone, ..self })
    }

    /// How much later than at multiples of their distance they start.
    pub fn offset_us(&self) -> i64 {
        self.offset_us
    }

    /// The name of the time zone whose days they are.
    pub fn zone(&self) -> Option<&'static str> {
        self.zone.map(Zone::name)
    }

    /// Where an instant is on the axis.
    pub(crate) fn axis(&self, us: i64) -> i64 {
        match self.zone {
            None => us - self.offset_us,
            Some(zone) => zone.day(us, self.offset_us) * DAY_US,
        }
    }

    /// The instant of a start or end on the axis.
    pub(crate) fn instant(&self, axis: i64) -> i64 {
        match self.zone {
            None => axis.saturating_add(self.offset_us),
            Some(zone) => zone.begin(axis.div_euclid(DAY_US), self.offset_us),
        }
    }

    /// Puts instants on the axis.
    pub(crate) fn to_axis(self, times: &mut [i64]) {
        let Some(zone) = self.zone else {
            // Rows without a time have the least one.
            return times.iter_mut().for_each(|time| *time = time.wrapping_sub(self.offset_us));
        };
        let (mut day, mut within) = (0, 0..0);
        for time in times.iter_mut().filter(|time| **time != i64::MIN) {
            if !within.contains(time) {
                day = zone.day(*time, self.offset_us);
                within = zone.begin(day, self.offset_us)..zone.begin(day + 1, self.offset_us);
            }
            *time = day * DAY_US;
        }
    }

    /// Length of a window.
    pub fn size_us(&self) -> i64 {
        self.size_us
    }

    /// Distance between the starts of windows.
    pub fn every_us(&self) -> i64 {
        self.every_us
    }

    /// Whether a window holds a time.
    pub(crate) fn hold(&self, time: i64) -> bool {
        time.rem_euclid(self.every_us) < self.size_us
    }

    /// Start of the pane that holds a time of a window.
    pub(crate) fn pane(&self, time: i64) -> i64 {
        match self.size_us > self.every_us {
            true => time.div_euclid(self.pane_us) * self.pane_us,
            false => self.last_start(time),
        }
    }

    /// The times around one that the same windows hold.
    pub(crate) fn stretch(&self, time: i64) -> std::ops::Range<i64> {
        let start = self.last_start(time);
        match (self.size_us > self.every_us, self.hold(time)) {
            (true, _) => self.pane(time)..self.pane(time) + self.pane_us,
            (false, true) => start..start + self.size_us,
            (false, false) => start + self.size_us..start + self.every_us,
        }
    }

    /// Whether a window shares so much with the next one that taking away and adding is cheaper than merging again.
    fn overlap_much(&self) -> bool {
        self.size_us / self.every_us >= LEAST_OVERLAP
    }

    /// Start of the last window that begins at or before a time: the last that holds it, if any does.
    pub(crate) fn last_start(&self, time: i64) -> i64 {
        time.div_euclid(self.every_us) * self.every_us
    }

    /// Start and end, as instants, of the last window that begins at or before a time. Where a zone leaves a day out others have one of the two.
    pub(crate) fn last(&self, time: i64) -> (i64, i64) {
        let start = self.last_start(time);
        (self.instant(start), self.instant(start + self.size_us))
    }

    /// Start of the first window that holds a pane.
    pub(crate) fn first_start(&self, pane: i64) -> i64 {
        // Damaged state may have any.
        let pane = pane.clamp(-2 * EVENT_TIME_LIMIT_US, EVENT_TIME_LIMIT_US);
        let least = pane + self.pane_us - self.size_us;
        -(-least).div_euclid(self.every_us) * self.every_us
    }

    /// Start of the first window still open at a watermark: rows before it are late, panes before it are done.
    pub(crate) fn first_open(&self, watermark: i64) -> i64 {
        if watermark > 2 * EVENT_TIME_LIMIT_US {
            return i64::MAX;
        }
        if watermark < -2 * EVENT_TIME_LIMIT_US {
            return i64::MIN;
        }
        (self.axis(watermark) - self.size_us).div_euclid(self.every_us) * self.every_us + self.every_us
    }

    /// The watermark behind which the window that starts at `start` is the first that is open. None where a zone leaves a day out: the one before ends
    /// at the same instant.
    fn reached(&self, start: i64) -> Option<i64> {
        let watermark = self.instant(start.saturating_add(self.size_us - self.every_us));
        (self.first_open(watermark) == start).then_some(watermark)
    }

    /// The starts of the windows that hold a time, ascending.
    pub(crate) fn starts(&self, time: i64) -> impl Iterator<Item = i64> {
        let (first, last) = (self.first_start(self.pane(time)), self.last_start(time));
        (first..=last).step_by(self.every_us as usize).filter(move |_| self.hold(time))
    }
}

/// What is wanted of the rows of a window: those whose rank by an aggregate is at most `n`, as [`Top`](crate::top::Top) ranks them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Best {
    /// Ranks up to this are wanted.
    pub n: usize,
    /// Which of the aggregates: one that counts.
    pub aggregate: usize,
    /// Whether the greatest has rank 1.
    pub descending: bool,
}

impl Best {
    /// The positions of the rows that are wanted, of rows with their counts.
    fn of(self, rows: impl Iterator<Item = (usize, u64)>, positions: &mut Vec<usize>, counts: &mut Vec<u64>) {
        positions.clear();
        counts.clear();
        // Less is better.
        let rows = rows.map(|(position, count)| (position, if self.descending { !count } else { count }));
        if self.n == 1 {
            let mut least = u64::MAX;
            for (position, count) in rows {
                if count < least {
                    positions.clear();
                    least = count;
                }
                if count == least {
                    positions.push(position);
                }
            }
            return;
        }
        rows.for_each(|(position, count)| {
            positions.push(position);
            counts.push(count);
        });
        if counts.len() > self.n {
            let mut sorted = counts.clone();
            let (_, &mut last, _) = sorted.select_nth_unstable(self.n - 1);
            let mut at = counts.iter();
            positions.retain(|_| at.next().is_some_and(|count| *count <= last));
        }
    }
}

/// Event times of a block in microseconds; rows without one are listed apart.
pub(crate) fn event_times(
    step: &StepName,
    event_time: &EventTime,
    column_at: usize,
    batch: &RecordBatch,
) -> Result<(Vec<i64>, Vec<u32>), OpError> {
    let codes = column::codes(batch.column(column_at)).expect("event time has codes");
    if codes.nulls.is_none()
        && let Some(times) = event_time.all_to_us(&codes.values)
    {
        return Ok((times, Vec::new()));
    }
    let mut times = Vec::with_capacity(batch.num_rows());
    let mut absent = Vec::new();
    for (row, &code) in codes.values.iter().enumerate() {
        if codes.nulls.as_ref().is_some_and(|nulls| nulls.is_null(row)) {
            absent.push(row as u32);
            times.push(i64::MIN);
            continue;
        }
        times.push(event_time.to_us(code).ok_or_else(|| OpError::EventTime {
            step: step.clone(),
            column: event_time.name.clone(),
            row,
            value: code,
        })?);
    }
    Ok((times, absent))
}

/// The bounds of a row's window are no values of its event time's type: nanoseconds end in 1677 and 2262.
#[cold]
pub(crate) fn beyond(step: &StepName, event_time: &EventTime, at: usize, batch: &RecordBatch, row: u32) -> OpError {
    let codes = column::codes(batch.column(at)).expect("event time has codes");
    let (row, column) = (row as usize, event_time.name.clone());
    OpError::EventTime { step: step.clone(), column, row, value: codes.values[row] }
}

/// See the module.
pub(crate) struct WindowOp {
    group_by: GroupBy,
    windows: Windows,
    event_time: EventTime,
    watermark: i64,
    scratch: Table,
    /// The panes of the bins that lend them.
    common: Borrowed<Panes>,
    by_pane: Partition,
    by_bin: ByBin,
    parts: Vec<Part>,
    giving: Giving,
    /// The word of a row that says whether anything is left of it, where windows are rolled.
    rolls: Option<usize>,
    /// What is left to fire of the watermark; none when all has.
    firing: Option<Firing>,
}

/// What is left to fire: bins in an order that the first round has chosen.
enum Firing {
    /// Those that lend, and then the others.
    All,
    /// These, from the last one on.
    Bins(Vec<u32>),
}

/// What a round has done.
#[derive(Default)]
struct Round {
    rows: Cell<usize>,
    bytes: Cell<usize>,
    looked: Cell<usize>,
}

impl Round {
    fn give(&self, output: &Output) {
        if let Output::Rows(batch) = output {
            self.rows.set(self.rows.get() + batch.num_rows());
            self.bytes.set(self.bytes.get() + bytes_of(batch));
        }
    }

    fn look(&self, rows: usize) {
        self.looked.set(self.looked.get() + rows);
    }

    fn is_over(&self) -> bool {
        self.rows.get() >= ROUND_ROWS || self.bytes.get() >= ROUND_BYTES || self.looked.get() >= ROUND_LOOKED
    }
}

/// Which rows of a window come out.
struct Giving {
    /// With the word that counts.
    best: Option<(Best, usize)>,
    /// Where only the greatest is wanted: of windows that fire now the greatest of the bins so far.
    most: BTreeMap<i64, u64>,
    positions: Vec<usize>,
    counts: Vec<u64>,
}

impl Giving {
    /// The word of which only the greatest is wanted.
    fn greatest(&self) -> Option<usize> {
        self.best.filter(|(best, _)| best.n == 1 && best.descending).map(|(_, word)| word)
    }

    /// Whether rows of a window are wanted that have so much, or at most so much: no rows of it had more.
    fn wants(&self, start: i64, most: u64) -> bool {
        self.most.get(&start).is_none_or(|before| *before <= most)
    }

    /// Gives rows that have most of all in a part of a window.
    fn give_first(
        &mut self,
        group_by: &mut GroupBy,
        start: i64,
        table: &Table,
        (most, positions): (u64, &[usize]),
        out: &mut Sink<'_>,
    ) -> Result<(), OpError> {
        if !self.wants(start, most) {
            return Ok(());
        }
        self.most.insert(start, most);
        group_by.emit(start, table, positions.iter().copied(), out)
    }

    /// Gives the rows of a table of which a word is not 0, all where none is named: those that are wanted.
    fn give(
        &mut self,
        group_by: &mut GroupBy,
        start: i64,
        (table, left): (&Table, Option<usize>),
        out: &mut Sink<'_>,
    ) -> Result<(), OpError> {
        let is_there = |&position: &usize| left.is_none_or(|left| table.row(position)[left] > 0);
        let Some((best, word)) = self.best else {
            return group_by.emit(start, table, table.taken().filter(is_there), out);
        };
        if let Some(word) = self.greatest() {
            let mut positions = std::mem::take(&mut self.positions);
            let most = table.most(word, left, &mut positions);
            let given = self.give_first(group_by, start, table, (most, &positions), out);
            self.positions = positions;
            return given;
        }
        let Self { positions, counts, .. } = self;
        match left {
            // What is vacant has nothing left either.
            Some(left) => {
                let rows = table.rows().filter(|(_, row)| row[left] > 0);
                best.of(rows.map(|(position, row)| (position, row[word])), positions, counts);
            }
            None => {
                let rows = table.taken().map(|position| (position, table.row(position)[word]));
                best.of(rows, positions, counts);
            }
        }
        group_by.emit(start, table, self.positions.iter().copied(), out)
    }
}

impl WindowOp {
    pub(crate) fn new(group_by: GroupBy, windows: Windows, event_time: EventTime, best: Option<Best>) -> Self {
        let scratch = Table::new(&group_by.shape);
        let (by_pane, by_bin, parts, positions, counts) = Default::default();
        let word = |best: &Best| group_by.shape.accs().nth(best.aggregate).map(|(_, word)| (*best, word));
        let giving = Giving { best: best.as_ref().and_then(word), most: BTreeMap::new(), positions, counts };
        let rolls = group_by.shape.parts().filter(|_| windows.overlap_much());
        let (common, watermark, firing) = (Borrowed::default(), i64::MIN, None);
        Self {
            group_by,
            windows,
            event_time,
            watermark,
            scratch,
            common,
            by_pane,
            by_bin,
            parts,
            giving,
            rolls,
            firing,
        }
    }

    /// Fires what is left of the watermark until the round is over. Says whether that was all.
    fn fire_some(&mut self, bins: &mut dyn Bins, round: &Round, out: &mut Sink<'_>) -> Result<bool, OpError> {
        let mut others = match self.firing.take() {
            Some(Firing::Bins(others)) => others,
            // Where what was lent has been divided meanwhile, its bins are among the others, each as far as all had come.
            Some(Firing::All) | None => {
                if let Some(lent) = self.common.whole() {
                    let mut lent = common::lock(&lent);
                    let panes = lent.whole().expect("else it is not lent");
                    if !self.fire(panes, round, out)? {
                        self.firing = Some(Firing::All);
                        return Ok(false);
                    }
                }
                self.common.limit();
                self.others(bins)
            }
        };
        while let Some(&bin) = others.last() {
            // One that has gone is fired where it is.
            if round.is_over() || (bins.holds(bin) && !self.fire(panes_of(bins, bin)?, round, out)?) {
                self.firing = Some(Firing::Bins(others));
                return Ok(false);
            }
            others.pop();
        }
        Ok(true)
    }

    /// The bins that do not lend, the first one to fire at the end.
    fn others(&mut self, bins: &mut dyn Bins) -> Vec<u32> {
        let lent = self.common.whole();
        let lends = |bin: u32| lent.as_ref().is_some_and(|lent| common::lock(lent).has(bin));
        let mut others: Vec<u32> = bins.held().into_iter().filter(|bin| !lends(*bin)).collect();
        if self.giving.greatest().is_some() {
            // The bins that had most say early what the others need not be searched for.
            others.sort_by_cached_key(|bin| {
                Reverse(bins.state(*bin).and_then(State::panes_mut).map(|panes| panes.most()))
            });
        }
        others.reverse();
        others
    }

    /// Fires the windows of one bin, or of all that lend, that end in `(fired, watermark]`, until the round is over. Says whether these were all.
    fn fire(&mut self, panes: &mut Panes, round: &Round, out: &mut Sink<'_>) -> Result<bool, OpError> {
        let windows = self.windows;
        let mut reached = self.watermark;
        let mut open = windows.first_open(reached);
        let mut start = windows.first_open(panes.fired());
        let (mut spoke, mut all) = (false, true);
        while let Some(pane) = panes.first_pane_at(start) {
            // Skip windows that hold nothing.
            start = start.max(windows.first_start(pane));
            if start >= open {
                break;
            }
            if round.is_over()
                && let Some(before) = windows.reached(start)
            {
                (reached, open, all) = (before, start, false);
                break;
            }
            let window = start..start + windows.size_us;
            match (panes.range(window.clone()).take(2).count(), self.rolls) {
                // No window holds this pane: only damaged state has such.
                (0, _) => break,
                (1, _) => {
                    let only = panes.range(window).next().expect("there is one");
                    round.look(only.len());
                    self.giving.give(&mut self.group_by, start, (only, None), out)?;
                }
                (_, Some(left)) => {
                    let greatest = self.giving.greatest();
                    let rolled = panes.roll(&mut self.group_by, window, left, greatest)?;
                    round.look(rolled.sum().len());
                    match greatest {
                        None => self.giving.give(&mut self.group_by, start, (rolled.sum(), Some(left)), out)?,
                        Some(word) if self.giving.wants(start, rolled.most()) => {
                            rolled.search(word, left);
                            self.giving.give_first(&mut self.group_by, start, rolled.sum(), rolled.first(), out)?;
                        }
                        Some(_) => {}
                    }
                }
                (_, None) => {
                    round.look(panes.range(window.clone()).map(Table::len).sum());
                    self.group_by.merge(&mut self.scratch, panes.range(window))?;
                    self.giving.give(&mut self.group_by, start, (&self.scratch, None), out)?;
                }
            }
            spoke = true;
            start += windows.every_us;
        }
        if spoke {
            panes.speak();
        }
        if let Some(left) = self.rolls {
            panes.roll_past(&mut self.group_by, open, left)?;
        }
        panes.drop_before(open);
        panes.set_fired(reached);
        Ok(all)
    }

    /// Asks all bins here that have fired as far as this worker whether they lend.
    fn borrow(&mut self, bins: &mut dyn Bins) {
        let Self { common, group_by, watermark, .. } = self;
        if Panes::can_lend(&group_by.shape) && *watermark < i64::MAX {
            common.ask(bins, || {
                let mut panes = Panes::new(group_by.shape.clone());
                panes.set_fired(*watermark);
                panes
            });
            common.wait();
        }
    }
}

impl KeyedOp for WindowOp {
    fn apply(
        &mut self,
        bins: &mut dyn Bins,
        _: usize,
        batch: &RecordBatch,
        hashes: &[u64],
        out: &mut Sink<'_>,
    ) -> Result<(), OpError> {
        check_hashes(batch, hashes)?;
        let (mut times, mut late) = event_times(&self.group_by.step, &self.event_time, self.event_time.column, batch)?;
        self.windows.to_axis(&mut times);
        let (keys, inputs) = self.group_by.prepare(batch)?;
        let open = self.windows.first_open(self.watermark);
        let mut rows = Vec::with_capacity(times.len());
        let mut absent = late.iter().copied().peekable();
        let (mut too_late, mut panes) = (Vec::new(), Vec::new());
        let mut row = 0;
        while let Some(&time) = times.get(row) {
            if absent.next_if_eq(&(row as u32)).is_some() {
                row += 1;
                continue;
            }
            // Of rows that come together nearly all are of one pane, and then all are late or none is.
            let within = self.windows.stretch(time);
            let run = row..row + times[row..].iter().take_while(|time| within.contains(*time)).count();
            row = run.end;
            if !self.windows.hold(time) {
                continue;
            }
            let these = run.start as u32..run.end as u32;
            if time < open {
                too_late.extend(these);
                continue;
            }
            // A window that could not be told of would end the run when it closes, again after each restart.
            let first = self.windows.instant(self.windows.first_start(self.windows.pane(time)));
            let last = self.windows.instant(self.windows.last_start(time) + self.windows.size_us());
            if self.event_time.from_us(first).and(self.event_time.from_us(last)).is_none() {
                return Err(beyond(&self.group_by.step, &self.event_time, self.event_time.column, batch, these.start));
            }
            rows.extend(these);
            panes.push(self.windows.pane(time));
            times[run].fill(self.windows.pane(time));
        }
        // By pane, then by bin: each bin's rows come out pane after pane, in order within one.
        panes.dedup();
        if panes.len() > 1 {
            panes.sort_unstable();
            panes.dedup();
            let rank = |row: u32| panes.binary_search(&times[row as usize]).expect("every row's pane is listed") as u32;
            self.by_pane.group(&rows, panes.len(), rank);
            rows.copy_from_slice(self.by_pane.rows());
        }
        // Rows of bins that lend are apart.
        let (bits, lent) = (bins.bits(), self.common.whole());
        let mut common = Vec::new();
        if let Some(lent) = &lent {
            let lent = common::lock(lent);
            let lends = |row: &u32| lent.has(bin_of(hashes[*row as usize], bits));
            if rows.iter().all(lends) {
                common = std::mem::take(&mut rows);
            } else {
                common.extend(rows.extract_if(.., |row| lends(row)));
            }
        }
        self.by_bin.some(hashes, &rows, bins.bits());
        self.by_bin.refine(bins);
        let mut fired = self.watermark;
        for run in self.by_bin.runs() {
            let panes = panes_of(bins, run.bin)?;
            fired = fired.max(panes.fired());
            // One that was read from files need not know: windows that are closed take no row.
            panes.set_fired(self.watermark);
        }
        if fired > self.watermark {
            // The watermark is one for all workers; a bin that has seen it proves it to a worker that joined later.
            self.watermark = fired;
            return self.apply(bins, 0, batch, hashes, out);
        }
        self.parts.clear();
        for run in self.by_bin.runs() {
            let mut start = run.at.start;
            let of = |row: u32| times[row as usize];
            for rows in self.by_bin.rows()[run.at.clone()].chunk_by(|&a, &b| of(a) == of(b)) {
                self.parts.push(Part { bin: run.bin, pane: of(rows[0]), at: start..start + rows.len() });
                start += rows.len();
            }
        }
        self.group_by.add(bins, (&keys, &inputs), (self.by_bin.hashes(), self.by_bin.rows()), &self.parts)?;
        if let Some(lent) = lent {
            let mut lent = common::lock(&lent);
            let panes = lent.whole().expect("it was whole, and nothing was asked of a bin that lends");
            panes.set_fired(self.watermark);
            for rows in common.chunk_by(|&a, &b| times[a as usize] == times[b as usize]) {
                let table = panes.table_mut(times[rows[0] as usize]);
                let (first, last) = (rows[0] as usize, rows[rows.len() - 1] as usize);
                let hashes = match last - first == rows.len() - 1 {
                    true => Cow::Borrowed(&hashes[first..=last]),
                    false => rows.iter().map(|&row| hashes[row as usize]).collect(),
                };
                self.group_by.add_to(table, (&keys, &inputs), (&hashes, rows))?;
            }
        }
        late.append(&mut too_late);
        late.sort_unstable();
        if !late.is_empty() {
            send(take_rows(batch, &late)?, Output::Late, out);
        }
        Ok(())
    }

    fn watermark(&mut self, bins: &mut dyn Bins, watermark_us: i64, out: &mut Sink<'_>) -> Result<(), OpError> {
        while !self.watermark_some(bins, watermark_us, out)? {}
        Ok(())
    }

    fn watermark_some(&mut self, bins: &mut dyn Bins, watermark_us: i64, out: &mut Sink<'_>) -> Result<bool, OpError> {
        if watermark_us > self.watermark {
            self.watermark = watermark_us;
            self.giving.most.clear();
            self.firing = Some(Firing::All);
        } else if watermark_us < self.watermark || self.firing.is_none() {
            return Ok(true);
        }
        let round = Round::default();
        let mut give = |output| {
            round.give(&output);
            out(output);
        };
        if !self.fire_some(bins, &round, &mut give)? {
            return Ok(false);
        }
        self.borrow(bins);
        self.group_by.flush(out)?;
        Ok(true)
    }

    fn end_epoch(&mut self, _: &mut dyn Bins, _: &mut Sink<'_>) -> Result<(), OpError> {
        Ok(())
    }

    fn resume(&mut self, watermark_us: i64) {
        (self.watermark, self.firing) = (watermark_us, None);
        // What was gathered is of windows that fire again, or elsewhere.
        _ = self.group_by.flush(&mut |_| {});
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::ops::Range;
    use std::sync::Arc;

    use arrow_array::cast::AsArray;
    use arrow_array::types::Int64Type;
    use arrow_array::{ArrayRef, Int64Array};
    use penstock_bins::{BinState, BinTable, Encoding, Extent, Routing};
    use proptest::prelude::*;

    use super::*;
    use crate::common::ASK_AGAIN;
    use crate::hash::unhash_int;
    use crate::spec::{AggSpec, Nulls, Per, SourceSpec, StepSpec, WindowKind};
    use crate::{CallError, Callbacks, ForeignState, KeyedKind, KeyedSpec, Plan, PlanSpec, SideRows, State};

    struct NoCalls;

    impl Callbacks for NoCalls {
        fn map(&self, _: usize, batch: &RecordBatch, _: &mut SideRows) -> Result<RecordBatch, CallError> {
            Ok(batch.clone())
        }

        fn new_state(&self, call: usize) -> Box<dyn ForeignState> {
            unreachable!("no state of call {call}")
        }
    }

    /// Key, value, time in milliseconds.
    type Input = (Option<i64>, Option<i64>, i64);

    fn rows(rows: &[Input]) -> RecordBatch {
        let keys: ArrayRef = Arc::new(rows.iter().map(|row| row.0).collect::<Int64Array>());
        let values: ArrayRef = Arc::new(rows.iter().map(|row| row.1).collect::<Int64Array>());
        let times: ArrayRef = Arc::new(Int64Array::from_iter_values(rows.iter().map(|row| row.2)));
        RecordBatch::try_from_iter_with_nullable([("k", keys, true), ("v", values, true), ("t", times, false)]).unwrap()
    }

    /// Windows of `size` ms every ms, in which values are counted, counted where they are, and added; and ranked by one of the counts.
    fn plan(size: i64, top: Option<(u64, &str, bool)>) -> Plan {
        let source = SourceSpec {
            name: "input".into(),
            schema: rows(&[]).schema(),
            event_time: Some("t".into()),
            lateness_ms: 0,
            order_by: Vec::new(),
            idle_after_ms: None,
        };
        let agg = |name: &str, function: &str, column: Option<&str>| AggSpec {
            name: name.into(),
            function: function.into(),
            column: column.map(Into::into),
            ..AggSpec::default()
        };
        let window = StepSpec::Window {
            kind: WindowKind::Sliding,
            size_us: size * 1000,
            every_us: Some(1000),
            offset_us: None,
            zone: None,
        };
        let aggs = vec![agg("sum", "sum", Some("v")), agg("n", "count", None), agg("valid", "count", Some("v"))];
        let mut steps = vec![
            StepSpec::KeyBy { columns: vec!["k".into()], nulls: Nulls::Group },
            window,
            StepSpec::Agg { emit: None, aggs, operator: None },
        ];
        steps.extend(top.map(|(n, by, descending)| {
            let (by, per, operator) = (by.into(), Per::Window, None);
            StepSpec::Top { n, by, descending, per, operator }
        }));
        Plan::compile(PlanSpec::line(source, steps)).unwrap()
    }

    /// Start of a window, key, sum, rows, valid values.
    type Row = (i64, Option<i64>, Option<i64>, i64, i64);

    struct Rig {
        keyed: KeyedSpec,
        table: BinTable<State>,
        op: Box<dyn KeyedOp>,
        /// Whether a bin moves between rounds.
        moves: bool,
    }

    impl Rig {
        fn new(plan: &Plan) -> Self {
            let keyed = plan.keyed().next().unwrap().clone();
            let calls: Arc<dyn Callbacks> = Arc::new(NoCalls);
            let table = BinTable::fresh(&Routing::from_owners(vec![0; 4]).unwrap(), 0, &|| keyed.new_state(&calls));
            let op = keyed.operator(&calls).unwrap();
            Self { keyed, table, op, moves: false }
        }

        fn apply(&mut self, block: &[Input]) {
            let block = rows(block);
            let hashes = self.keyed.hashes(&block).unwrap();
            self.op.apply(&mut self.table, 0, &block, &hashes, &mut |_| panic!("nothing is late")).unwrap();
        }

        fn watermark(&mut self, ms: Option<i64>) -> BTreeSet<Row> {
            let mut found = BTreeSet::new();
            while !self.round(ms, &mut found) {
                if self.moves {
                    self.move_a_bin();
                }
            }
            assert!(self.round(ms, &mut BTreeSet::new()), "a watermark that is done does nothing");
            found
        }

        /// Says whether the watermark is done.
        fn round(&mut self, ms: Option<i64>, found: &mut BTreeSet<Row>) -> bool {
            let us = ms.map_or(i64::MAX, |ms| ms * 1000);
            let mut take = |output| {
                let Output::Rows(rows) = output else { panic!("nothing is late") };
                let cells = |at: usize| rows.column(at).as_primitive::<Int64Type>().iter().collect::<Vec<_>>();
                let columns: Vec<_> = (0..rows.num_columns()).map(cells).collect();
                for cells in (0..rows.num_rows()).map(|at| columns.iter().map(|column| column[at]).collect::<Vec<_>>())
                {
                    let cell = |column: usize| cells[column];
                    let row = (cell(0).unwrap(), cell(2), cell(3), cell(4).unwrap(), cell(5).unwrap());
                    assert!(found.insert(row), "{row:?} twice");
                }
            };
            self.op.watermark_some(&mut self.table, us, &mut take).unwrap()
        }

        /// Bin 1 goes away and comes back, as it does between workers.
        fn move_a_bin(&mut self) {
            let calls: Arc<dyn Callbacks> = Arc::new(NoCalls);
            let mut new = self.keyed.new_state(&calls);
            let old = self.table.uninstall(1).unwrap();
            let mut encoding = Encoding::of(Extent::All);
            while let Some(chunk) = old.encode(&mut encoding).unwrap() {
                new.absorb(&chunk).unwrap();
            }
            self.table.install(1, Box::new(new)).unwrap();
        }
    }

    /// The rows of the windows that end in `(fired, watermark]`, from all that has come.
    fn expected(all: &[Input], size: i64, fired: i64, watermark: Option<i64>) -> BTreeSet<Row> {
        let mut found = BTreeMap::<(i64, Option<i64>), (Option<i64>, i64, i64)>::new();
        for &(key, value, time) in all {
            for start in time - size + 1..=time {
                if start + size <= fired || watermark.is_some_and(|watermark| start + size > watermark) {
                    continue;
                }
                let (sum, n, valid) = found.entry((start, key)).or_default();
                *n += 1;
                if let Some(value) = value {
                    *sum = Some(sum.unwrap_or(0) + value);
                    *valid += 1;
                }
            }
        }
        found.into_iter().map(|((start, key), (sum, n, valid))| (start, key, sum, n, valid)).collect()
    }

    /// Of each window the rows of the first `n` ranks by a number.
    fn best(rows: &BTreeSet<Row>, n: usize, number: impl Fn(&Row) -> i64) -> BTreeSet<Row> {
        let better = |row: &&Row| rows.iter().filter(|other| other.0 == row.0 && number(other) < number(row)).count();
        rows.iter().filter(|row| better(row) < n).copied().collect()
    }

    proptest! {
        #![proptest_config(penstock_cases::cases(48))]
        /// Windows that are rolled, and others, with rows out of order, epochs that are undone, also between two rounds, gaps, and a bin that moves.
        #[test]
        fn windows_hold_what_they_hold(
            epochs in prop::collection::vec((0i64..40, 0usize..60, 1i64..20, any::<u64>(), 0u8..32), 1..8),
            size in prop::sample::select(vec![1i64, 2, 3, 4, 7, 30]),
            top in prop::option::of((1u64..4, any::<bool>(), any::<bool>())),
        ) {
            let ranked = top.map(|(n, valid, descending)| (n, if valid { "valid" } else { "n" }, descending));
            let plan = plan(size, ranked);
            let KeyedKind::Window { best: told, .. } = &plan.keyed().next().unwrap().kind else { panic!("a window") };
            prop_assert_eq!(told.is_some(), top.is_some());
            let mut rig = Rig::new(&plan);
            let (mut all, mut fired) = (Vec::<Input>::new(), i64::MIN / 1_000_000);
            let check = |found: BTreeSet<Row>, expected: BTreeSet<Row>| -> Result<(), TestCaseError> {
                let Some((n, valid, descending)) = top else {
                    prop_assert_eq!(found, expected);
                    return Ok(());
                };
                let number = |row: &Row| if valid { row.4 } else { row.3 } * if descending { -1 } else { 1 };
                prop_assert!(found.is_subset(&expected), "{found:?} of {expected:?}");
                prop_assert_eq!(best(&found, n as usize, number), best(&expected, n as usize, number));
                Ok(())
            };
            let mut now = 0;
            for (epoch, (step, len, keys, seed, deed)) in (0..).zip(epochs) {
                let number = |i: usize| (i as u64 + 1).wrapping_mul(seed | 1).rotate_left(23) ^ seed;
                let row = |i: usize| {
                    let key = match number(i) as i64 % keys {
                        0 => None,
                        1 => Some(unhash_int(0)),
                        key => Some(key),
                    };
                    // In windows that are open.
                    let time = (now - size + (number(i) >> 20) as i64 % (step + 2 * size)).max(fired - size + 1);
                    (key, (number(i) % 5 > 0).then_some((number(i) >> 40) as i64 % 100), time)
                };
                let block: Vec<Input> = (0..len).map(row).collect();
                if deed & 1 > 0 {
                    rig.table.mark_all(epoch);
                }
                if deed & 3 == 3 {
                    rig.apply(&block);
                    match deed & 8 > 0 {
                        true => _ = rig.round(Some(now + step), &mut BTreeSet::new()),
                        false => _ = rig.watermark(Some(now + step)),
                    }
                    rig.table.rollback_all().unwrap();
                    rig.op.resume(fired.saturating_mul(1000));
                }
                if deed & 4 > 0 {
                    rig.move_a_bin();
                }
                rig.apply(&block);
                all.extend(block);
                now += step;
                // What came within an epoch is not undone here.
                rig.moves = deed & 16 > 0;
                check(rig.watermark(Some(now)), expected(&all, size, fired, Some(now)))?;
                rig.moves = false;
                fired = fired.max(now);
            }
            check(rig.watermark(None), expected(&all, size, fired, None))?;
            prop_assert!(rig.table.owned().all(|(_, state)| state.is_empty()));
        }
    }

    /// Bins lend, come home when one moves, and lend again; a twin whose epochs are marked lends nothing.
    #[test]
    fn bins_that_lend_are_what_they_would_be() {
        for (size, top) in [(8, None), (8, Some((1, "n", true))), (1, None)] {
            let plan = plan(size, top);
            let (mut rig, mut twin) = (Rig::new(&plan), Rig::new(&plan));
            let (mut lent, mut homes) = (0, 0);
            for time in 0..4 * i64::from(ASK_AGAIN) {
                let key = |i: i64| (i * i % 97 > time % 5).then_some((time / 3 * 7 + i * i) % 97);
                let block: Vec<Input> = (0..60).map(|i| (key(i), Some(i), time - i % 3 % size)).collect();
                twin.table.mark_all(time as u64);
                rig.apply(&block);
                twin.apply(&block);
                let given = [rig.watermark(Some(time)), twin.watermark(Some(time))];
                // Where only the best are wanted, others may come out.
                let [given, expected] =
                    given.map(|rows| if top.is_some() { best(&rows, 1, |row| -row.3) } else { rows });
                assert_eq!(given, expected, "at {time}");
                let lends = |state: &mut State| state.panes_mut().is_some_and(|panes| panes.is_lent());
                lent += u32::from(lends(rig.table.get_mut(0).unwrap()));
                assert!(!lends(twin.table.get_mut(0).unwrap()));
                for ((bin, state), (_, other)) in rig.table.owned().zip(twin.table.owned()) {
                    assert_eq!((state.keys(), state.is_empty()), (other.keys(), other.is_empty()), "{bin} at {time}");
                }
                if time % 100 == 99 {
                    rig.move_a_bin();
                    homes += 1;
                }
            }
            assert!(homes > 1 && lent > ASK_AGAIN, "{lent} times");
        }
    }

    #[test]
    fn bins_that_lend_come_home_between_two_rounds() {
        for (size, top) in [(8, None), (8, Some((1, "n", true))), (3, None), (1, None)] {
            for homes in [false, true] {
                let mut rig = Rig::new(&plan(size, top));
                let block = |time: i64| (0..90).map(move |i| (Some(i * (1 + time % 3) % 97), Some(i), time));
                let mut all: Vec<Input> = block(0).collect();
                rig.apply(&all);
                assert!(rig.watermark(Some(0)).is_empty());
                let lends = |rig: &mut Rig| rig.table.get_mut(0).unwrap().panes_mut().unwrap().is_lent();
                assert!(lends(&mut rig));
                let rest: Vec<Input> = (1..30).flat_map(block).collect();
                rig.apply(&rest);
                all.extend(rest);
                let mut given = BTreeSet::new();
                assert!(!rig.round(Some(25), &mut given) && lends(&mut rig));
                if homes {
                    rig.move_a_bin();
                }
                while !rig.round(Some(25), &mut given) {}
                assert_eq!(lends(&mut rig), !homes);
                for (watermark, fired) in [(Some(25), 0), (None, 25)] {
                    let mut expected = expected(&all, size, fired, watermark);
                    if watermark.is_none() {
                        given = rig.watermark(None);
                    }
                    if top.is_some() {
                        (given, expected) = (best(&given, 1, |row| -row.3), best(&expected, 1, |row| -row.3));
                    }
                    assert_eq!(given, expected, "windows of {size}, {top:?}, to {watermark:?}");
                }
            }
        }
    }

    /// There was no 2011-12-30 in Samoa: windows that end with it and with the day before end at one instant.
    #[test]
    fn rounds_end_between_windows_that_end_apart() {
        let windows = Windows::new(2 * DAY_US, DAY_US).unwrap().placed(0, Zone::find("Pacific/Apia")).unwrap();
        let starts = |days: Range<i64>| days.map(|day| day * DAY_US).filter(|start| windows.reached(*start).is_none());
        assert_eq!(starts(15_000..15_700).collect::<Vec<_>>(), [15_337 * DAY_US]);
        for windows in [(7, 3), (4, 4), (3, 7)].map(|(size, every)| Windows::new(size, every).unwrap()) {
            let windows = windows.placed(windows.every_us() - 1, None).unwrap();
            for start in (-20..20).map(|at| at * windows.every_us()) {
                let end = windows.instant(start + windows.size_us());
                assert!(windows.reached(start).is_some_and(|reached| reached < end && windows.first_open(end) > start));
            }
        }
    }

    #[test]
    fn a_sum_that_is_rolled_forgets_keys_that_have_gone() {
        let mut rig = Rig::new(&plan(8, None));
        let bytes = |rig: &Rig| rig.table.owned().map(|(_, state)| state.bytes()).sum::<usize>();
        let mut most = 0;
        for time in 0..400 {
            let block: Vec<Input> = (0..100).map(|key| (Some(time * 100 + key), None, time)).collect();
            rig.apply(&block);
            assert_eq!(rig.watermark(Some(time)).len() as i64, 100 * time.clamp(0, 8));
            if time == 40 {
                most = bytes(&rig);
            }
        }
        assert!(bytes(&rig) <= 2 * most, "{} bytes, {most} when the first windows had closed", bytes(&rig));
    }

    #[test]
    fn a_top_step_tells_what_it_wants_only_where_it_alone_takes_all_rows_of_a_window() {
        let told = |top| {
            let plan = plan(4, top);
            let KeyedKind::Window { best, .. } = plan.keyed().next().unwrap().kind.clone() else { panic!("a window") };
            best
        };
        assert_eq!(told(Some((2, "n", true))), Some(Best { n: 2, aggregate: 1, descending: true }));
        assert_eq!(told(Some((1, "valid", false))), Some(Best { n: 1, aggregate: 2, descending: false }));
        assert_eq!(told(Some((1, "sum", true))), None, "a sum may be null");
        assert_eq!(told(Some((1, "k", true))), None, "a key");
        assert_eq!(told(None), None);
    }
}
