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
//! Each bin keeps how far it has fired, so a bin that moves to a worker with another history never fires a window twice.

use arrow_array::RecordBatch;

use crate::column::{self, EVENT_TIME_LIMIT_US, EventTime};
use crate::error::{OpError, StepName};
use crate::group::{GroupBy, Part};
use crate::op::{Bins, KeyedOp, Output, Sink, check_hashes, send, take_rows};
use crate::panes::Panes;
use crate::partition::{ByBin, Partition};
use crate::state::panes_of;
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

fn gcd(a: i64, b: i64) -> i64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

impl Windows {
    /// Windows of `size_us` every `every_us`.
    ///
    /// # Errors
    /// The name of the option that is out of range and why: both must be positive and at most about 73,000 years.
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

    /// Start of the last window that begins at or before a time: the last that holds it, if any does.
    pub(crate) fn last_start(&self, time: i64) -> i64 {
        time.div_euclid(self.every_us) * self.every_us
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

    /// The starts of the windows that hold a time, ascending.
    pub(crate) fn starts(&self, time: i64) -> impl Iterator<Item = i64> {
        let (first, last) = (self.first_start(self.pane(time)), self.last_start(time));
        (first..=last).step_by(self.every_us as usize).filter(move |_| self.hold(time))
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

/// See the module.
pub(crate) struct WindowOp {
    group_by: GroupBy,
    windows: Windows,
    event_time: EventTime,
    watermark: i64,
    scratch: Table,
    by_pane: Partition,
    by_bin: ByBin,
    parts: Vec<Part>,
}

impl WindowOp {
    pub(crate) fn new(group_by: GroupBy, windows: Windows, event_time: EventTime) -> Self {
        let scratch = Table::new(&group_by.shape);
        let (by_pane, by_bin, parts) = Default::default();
        Self { group_by, windows, event_time, watermark: i64::MIN, scratch, by_pane, by_bin, parts }
    }

    /// Fires the windows of one bin that end in `(fired, watermark]`.
    fn fire(&mut self, panes: &mut Panes, watermark: i64, out: &mut Sink<'_>) -> Result<(), OpError> {
        let windows = self.windows;
        let open = windows.first_open(watermark);
        let mut start = windows.first_open(panes.fired());
        let mut spoke = false;
        while let Some(pane) = panes.first_pane_at(start) {
            // Skip windows that hold nothing.
            start = start.max(windows.first_start(pane));
            if start >= open {
                break;
            }
            let mut held = panes.range(start..start + windows.size_us);
            match (held.next(), held.next()) {
                (Some(only), None) => self.group_by.emit(start, only, only.taken(), out)?,
                (Some(first), Some(second)) => {
                    self.group_by.merge(&mut self.scratch, [first, second].into_iter().chain(held))?;
                    self.group_by.emit(start, &self.scratch, self.scratch.taken(), out)?;
                }
                // No window holds this pane: only damaged state has such.
                (None, _) => break,
            }
            spoke = true;
            start += windows.every_us;
        }
        if spoke {
            panes.speak();
        }
        panes.drop_before(open);
        panes.set_fired(watermark);
        Ok(())
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
        let mut too_late = Vec::new();
        for row in 0..times.len() as u32 {
            let time = &mut times[row as usize];
            if absent.next_if_eq(&row).is_some() || !self.windows.hold(*time) {
                continue;
            }
            if *time < open {
                too_late.push(row);
                continue;
            }
            *time = self.windows.pane(*time);
            rows.push(row);
        }
        // By pane, then by bin: each bin's rows come out pane after pane, in order within one.
        let mut panes: Vec<i64> = rows.iter().map(|&row| times[row as usize]).collect();
        panes.dedup();
        if panes.len() > 1 {
            panes.sort_unstable();
            panes.dedup();
            let rank = |row: u32| panes.binary_search(&times[row as usize]).expect("every row's pane is listed") as u32;
            self.by_pane.group(&rows, panes.len(), rank);
            rows.copy_from_slice(self.by_pane.rows());
        }
        self.by_bin.some(hashes, &rows, bins.bits());
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
        late.append(&mut too_late);
        late.sort_unstable();
        if !late.is_empty() {
            send(take_rows(batch, &late)?, Output::Late, out);
        }
        Ok(())
    }

    fn watermark(&mut self, bins: &mut dyn Bins, watermark_us: i64, out: &mut Sink<'_>) -> Result<(), OpError> {
        if watermark_us <= self.watermark {
            return Ok(());
        }
        self.watermark = watermark_us;
        for bin in bins.held() {
            self.fire(panes_of(bins, bin)?, watermark_us, out)?;
        }
        self.group_by.flush(out)
    }

    fn end_epoch(&mut self, _: &mut dyn Bins, _: &mut Sink<'_>) -> Result<(), OpError> {
        Ok(())
    }

    fn resume(&mut self, watermark_us: i64) {
        self.watermark = watermark_us;
    }
}
