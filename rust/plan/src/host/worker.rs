//! One worker of a group: the loop that feeds slices, follows the control frontier and completes epochs.
//!
//! Owns the worker's inputs and probes. `turn` never blocks; the group's threads park between turns, the
//! inline host calls it in the caller's thread.
//!
//! Departure: where a plan is metered, a worker that has told 8 MiB which nobody took stops stepping. That is behind
//! the last operator, so no edge of the dataflow is full and loops cannot lock up.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow_array::RecordBatch;
use penstock_dataflow::{BoxError, Error, Worker};
use penstock_progress::FlowTime;

use super::build::{Built, Counts, WORTH_TELLING, Worth};
use super::feed::Slice;
use super::leader::{Leader, Migrated, Order, first};
use super::record::Record;
use super::rows::Rows;
use super::stats::{Gauges, SliceSample, unix_ns};
use super::{CLOSE, MARK, SEAL};
use crate::block::FlowBlock;
use crate::op::bytes_of;

/// One epoch's share of a worker.
#[derive(Debug)]
pub(crate) struct Release {
    pub(crate) epoch: u64,
    pub(crate) slices: VecDeque<Slice>,
    pub(crate) end: Option<End>,
}

/// What an epoch ends with. Without it the operators go on with the same epoch in the next one that is released.
#[derive(Clone, Copy, Debug)]
pub(crate) struct End {
    pub(crate) watermark: Option<i64>,
    pub(crate) clock_ms: Option<i64>,
}

/// What a host asks of a worker.
#[derive(Debug)]
pub(crate) enum Command {
    Release(Release),
    Migrate(Order),
    Cancel(u64),
    /// So many bytes of what was told as rows are in the hands of the host's caller.
    Taken(usize),
    Stop,
}

/// What a worker tells its host.
#[derive(Debug)]
pub(crate) enum Told {
    Epoch { epoch: u64, outputs: Vec<Rows>, beside: Vec<Rows>, counts: Counts, record: Vec<Record> },
    Rows { epoch: u64, rows: RecordBatch, beside: bool, bytes: usize },
    Migrated(Migrated),
}

/// A slice on its way through the plan.
struct Flight {
    time: FlowTime,
    sent: Instant,
    rows: u64,
}

/// Runtime settings of a worker, equal on all workers of a generation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    /// Slices (order-sensitive flows: rows) that may be under way beyond the probe.
    pub(crate) window: u32,
    /// Whether bins are marked before each epoch.
    pub(crate) journal: bool,
    /// Whether outputs are told as they are made.
    pub(crate) eager: bool,
    /// Whether what an epoch changed is told with it.
    pub(crate) record: bool,
    /// Whether rows are dealt to workers that join and leave.
    pub(crate) gather: bool,
}

pub(crate) struct WorkerLoop {
    worker: Worker,
    built: Built,
    pace: Pace,
    leader: Option<Leader>,
    queue: VecDeque<Release>,
    /// Epoch being fed.
    current: Option<Release>,
    /// Epochs that are fed and not yet complete, oldest first.
    fed: VecDeque<u64>,
    /// Slices that may be under way when they are of more than one epoch; 0: an epoch begins when the one before is complete.
    overlap: usize,
    marked: bool,
    /// How often bins had been moved when an epoch was last opened; that of an earlier generation is not known.
    changes: Option<u64>,
    /// Whether that was more often than when the one before was.
    moved: bool,
    /// Where rows are dealt to others: who takes part, and the watermark that was sent last.
    members: Option<Vec<u32>>,
    reached: Option<i64>,
    flights: VecDeque<Flight>,
    gauges: Arc<Gauges>,
    /// When the counters were written, what that cost, and where the output stood.
    began: Instant,
    measured: (Instant, Duration, Option<FlowTime>),
    /// Whether an epoch was completed since.
    unmeasured: bool,
    /// When the figures of the bounded scopes were written: also in the middle of an epoch, which may never end.
    scopes_told: Instant,
    /// Bytes of rows that were told and are not taken.
    untaken: usize,
    late_rows: u64,
    few_bins: bool,
    stopped: bool,
}

/// The counters follow what happens for at most one part in so many of a worker's time; with [`FEW_BINS`] they are right at
/// the end of every epoch that no other one waits behind.
const MEASURE_SHARE: u32 = 50;
const FEW_BINS: usize = 1 << 10;
/// Bytes that may be told and not taken.
const UNTAKEN_BYTES: usize = 8 << 20;
/// How old the figures of a bounded scope may be while its worker is busy.
const SCOPES_EVERY: Duration = Duration::from_millis(20);
/// Slices under way where epochs overlap: the wait for the others hides behind the slice of the next epoch. More of them gain nothing
/// and drive each other out of the caches.
const OVERLAP: usize = 3;
/// By how much fewer slices are under way while bins move. Always so few would cost: where calls of the user take anything
/// (exponentially distributed), batches took 11 % longer with 3 than with 8, each worker waiting for the other.
const CALMER: u32 = 3;

impl WorkerLoop {
    pub(crate) fn new(worker: Worker, mut built: Built, pace: Pace, gauges: Arc<Gauges>) -> Self {
        let leader = match (worker.index(), built.control.take()) {
            (0, Some(control)) => Some(Leader::new(control)),
            _ => None, // dropping the handle closes the control input of a follower
        };
        let index = worker.index();
        gauges.update(|stats, _| stats.worker = index);
        // Alone there is nobody to wait for; with a journal all bins are marked between two epochs.
        let overlap = if pace.journal || worker.peers() == 1 && !pace.gather { 0 } else { OVERLAP };
        let few_bins = built.owners().iter().map(Vec::len).sum::<usize>() <= FEW_BINS;
        let changes = (!built.goes_on()).then_some(0);
        let mut this = WorkerLoop {
            worker,
            built,
            pace,
            leader,
            queue: VecDeque::new(),
            current: None,
            fed: VecDeque::new(),
            overlap,
            marked: false,
            changes,
            moved: false,
            members: pace.gather.then(Vec::new),
            reached: None,
            flights: VecDeque::new(),
            gauges,
            began: Instant::now(),
            measured: (Instant::now(), Duration::ZERO, None),
            unmeasured: false,
            scopes_told: Instant::now(),
            untaken: 0,
            late_rows: 0,
            few_bins,
            stopped: false,
        };
        this.measure();
        this
    }

    pub(crate) fn stopped(&self) -> bool {
        self.stopped
    }

    /// Whether the host should take before more is made.
    pub(crate) fn is_ahead(&self) -> bool {
        self.untaken >= UNTAKEN_BYTES
    }

    pub(crate) fn command(&mut self, command: Command) {
        match command {
            Command::Release(release) => {
                if let Some(leader) = &mut self.leader {
                    leader.give(release.epoch);
                }
                self.queue.push_back(release);
            }
            Command::Migrate(order) => {
                if let Some(leader) = &mut self.leader {
                    leader.order(order);
                }
            }
            Command::Cancel(handle) => {
                if let Some(leader) = &mut self.leader {
                    leader.cancel(handle);
                }
            }
            Command::Taken(bytes) => self.untaken -= bytes,
            Command::Stop => self.stopped = true,
        }
    }

    /// One step of the dataflow; then feeds what the window allows, leads or follows, completes what the
    /// probe has passed, all by the frontiers after that step. Returns whether anything was done, that is,
    /// whether to come back before parking.
    ///
    /// # Errors
    /// The failure of an operator here or of a peer.
    pub(crate) fn turn(&mut self, told: &mut dyn FnMut(Told)) -> Result<bool, Error> {
        self.worker.step()?;
        // Before the leader sees the time of it passed: what one keyed step refused is not to be told as done.
        if let Some(error) = self.built.rejected() {
            return Err(self.refuse("control", error.into()));
        }
        let mut busy = self.welcome();
        busy |= self.open();
        busy |= self.feed()?;
        let window = self.window();
        if let Some(leader) = &mut self.leader {
            let feeding = self.current.as_ref().map(|release| release.epoch).or(self.fed.back().copied());
            busy |= leader.turn(&self.built.probes, feeding, window, &mut |migrated| told(Told::Migrated(migrated)));
        }
        busy |= self.follow();
        if self.pace.eager {
            self.tell_rows(WORTH_TELLING, told)?;
        }
        busy |= self.complete(told)?;
        if self.measure_in() == Some(Duration::ZERO) {
            self.measure();
        }
        if !self.built.monitors.is_empty() && self.scopes_told.elapsed() >= SCOPES_EVERY {
            self.scopes_told = Instant::now();
            let scopes = self.built.monitors.stats();
            self.gauges.update(|stats, _| stats.scopes = scopes);
        }
        Ok(busy)
    }

    /// Parks until a message or a command arrives, or the counters are to be written.
    pub(crate) fn park(&mut self) -> Result<(), Error> {
        self.worker.step_or_park(self.measure_in()).map(drop)
    }

    /// When to write the counters; `None` while they are right, or an epoch is under way and none was completed since. Between epochs the
    /// output moves only with bins, and has passed a move when the bins are where they are to be.
    fn measure_in(&self) -> Option<Duration> {
        let (at, cost, reached) = self.measured;
        let rests = self.current.is_none() && self.fed.is_empty();
        let stale = self.unmeasured || rests && first(&self.built.probes.output) != reached;
        stale.then(|| (cost * MEASURE_SHARE).saturating_sub(at.elapsed()))
    }

    /// Sees who has come and gone. All that was sent up to now may have been so before a joiner was there: it gets bins later than
    /// that, and is told the watermark.
    fn welcome(&mut self) -> bool {
        let Some(known) = &mut self.members else { return false };
        let now = self.worker.members();
        if *known == now {
            return false;
        }
        // Not always the one with the greatest number: of several that join, the first may be the last to have its place.
        let come = now.iter().any(|id| known.binary_search(id).is_err());
        self.gauges.tell_members(now.clone());
        *known = now;
        if come {
            if let Some(watermark) = self.reached {
                self.built.input().send(FlowBlock::Begin(watermark));
            }
            let sent = *self.built.input().time();
            if let Some(leader) = &mut self.leader {
                leader.hold(sent);
            }
        }
        true
    }

    /// Slices of this worker's that are on their way.
    #[cfg(test)]
    pub(crate) fn under_way(&self) -> usize {
        self.flights.len()
    }

    fn open(&mut self) -> bool {
        if self.current.is_some() || self.fed.len() > self.overlap {
            return false;
        }
        let Some(release) = self.queue.pop_front() else { return false };
        self.current = Some(release);
        self.marked = !self.pace.journal;
        let changes = Some(self.built.changes());
        self.moved = self.changes != changes;
        self.changes = changes;
        true
    }

    /// Slices that may be under way now: fewer in an epoch in which bins move, and in the one after, such as the first of a generation that
    /// goes on. A row waits behind all slices that are under way, and so does a step of a migration.
    fn window(&self) -> u32 {
        let moves = self.moved || self.changes != Some(self.built.changes());
        if moves { self.pace.window.div_ceil(CALMER) } else { self.pace.window }
    }

    /// With a journal, nothing is sent before every worker stands at `MARK` and no migration of an earlier
    /// time is under way: then all workers mark the same cut, each before its own first block.
    fn mark(&mut self, epoch: u64) -> bool {
        if self.marked {
            return true;
        }
        let start = FlowTime::new(epoch, MARK);
        self.built.advance(start);
        if first(&self.built.probes.output).is_some_and(|reached| reached < start) {
            return false;
        }
        self.built.mark(epoch);
        self.marked = true;
        true
    }

    /// Greatest data slice of `epoch` that may be sent now, exclusive.
    fn limit(&self, epoch: u64) -> u32 {
        match first(&self.built.probes.output) {
            Some(time) if time.epoch == epoch => time.slice.max(MARK).saturating_add(self.window()),
            Some(time) if time.epoch > epoch => CLOSE,
            Some(_) if self.flights.len() < self.overlap => CLOSE,
            Some(_) => MARK, // an earlier epoch is still under way somewhere
            None => CLOSE,
        }
    }

    fn feed(&mut self) -> Result<bool, Error> {
        let Some(epoch) = self.current.as_ref().map(|release| release.epoch) else {
            return Ok(false);
        };
        if !self.mark(epoch) {
            return Ok(false);
        }
        let mut sent = false;
        loop {
            let limit = self.limit(epoch);
            let release = self.current.as_mut().expect("an epoch is open: checked above");
            let next = release.slices.front().map(|(slice, _)| *slice);
            // The input always stands at the next slice to send: it holds back nobody's frontier longer
            // than it must.
            self.built.advance(FlowTime::new(epoch, next.unwrap_or(CLOSE)));
            // A congested link ends the park of this worker when it has room again.
            if next.is_none_or(|slice| slice >= limit) || self.worker.is_congested() {
                break;
            }
            let (slice, cut) = release.slices.pop_front().expect("the front was just read");
            let rows = cut.num_rows() as u64;
            let block = cut.read().map_err(|error| self.refuse("input", error))?;
            let time = FlowTime::new(epoch, slice);
            match self.flights.back_mut().filter(|flight| flight.time == time) {
                Some(flight) => flight.rows += rows,
                None => self.flights.push_back(Flight { time, sent: Instant::now(), rows }),
            }
            if self.members.is_none() {
                self.gauges.update(|stats, _| stats.rows += rows);
            }
            self.built.input().send(block);
            sent = true;
        }
        if let Some(release) = self.current.take_if(|release| release.slices.is_empty()) {
            if let Some(end) = release.end {
                if let Some(clock) = end.clock_ms {
                    self.built.input().send(FlowBlock::Clock(clock));
                }
                if let Some(watermark) = end.watermark {
                    self.reached = Some(watermark);
                    self.built.input().send(FlowBlock::Watermark(watermark));
                }
                self.built.input().send(FlowBlock::EndEpoch);
            }
            self.built.advance(FlowTime::new(epoch + 1, 0));
            self.fed.push_back(epoch);
            sent = true;
        }
        Ok(sent)
    }

    /// Without work of its own, the data input follows the control frontier through the idle slices, from the seal of an epoch on only
    /// when the record of the one before is taken.
    fn follow(&mut self) -> bool {
        if self.current.is_some() || (self.pace.record && !self.fed.is_empty()) {
            return false;
        }
        let held = *self.built.input().time();
        let control = match &self.leader {
            Some(leader) => Some(leader.time()),
            None => first(&self.built.probes.control),
        };
        let Some(control) = control.filter(|control| control.epoch >= held.epoch) else { return false };
        let slice = if control.epoch > held.epoch { MARK } else { control.slice.min(MARK) };
        if slice <= held.slice {
            return false;
        }
        self.built.advance(FlowTime::new(held.epoch, slice));
        true
    }

    /// Tells outputs of epochs where they are `worth` it.
    fn tell_rows(&mut self, worth: Worth, told: &mut dyn FnMut(Told)) -> Result<(), Error> {
        let refused = |error| self.refuse("output", error);
        let mut found = Vec::new();
        while let Some((epoch, rows)) = self.built.outputs.take_worth(worth).map_err(refused)? {
            found.push((epoch, rows, false));
        }
        while let Some((epoch, rows)) = self.built.beside.take_worth(worth).map_err(refused)? {
            found.push((epoch, rows, true));
        }
        for (epoch, rows, beside) in found {
            // Also of no columns: rows cost something.
            let bytes = bytes_of(&rows) + rows.num_rows();
            self.untaken += bytes;
            told(Told::Rows { epoch, rows, beside, bytes });
        }
        Ok(())
    }

    fn complete(&mut self, told: &mut dyn FnMut(Told)) -> Result<bool, Error> {
        let now = Instant::now();
        while let Some(flight) = self.flights.front() {
            if self.built.probes.output.less_equal(&flight.time) {
                break;
            }
            let flight = self.flights.pop_front().expect("the front was just read");
            self.gauges.sample(SliceSample {
                ended_ns: unix_ns(now),
                latency_ns: now.duration_since(flight.sent).as_nanos() as u64,
                rows: flight.rows,
            });
        }
        let mut completed = false;
        while let Some(&epoch) = self.fed.front() {
            if self.built.probes.output.less_equal(&FlowTime::new(epoch, CLOSE)) {
                break;
            }
            self.fed.pop_front();
            if self.pace.eager {
                self.tell_rows(Worth::default(), told)?;
            }
            // Before anything else of this turn or a later one: what comes behind the epoch waits at its seal.
            if self.pace.record {
                let held = *self.built.input().time();
                debug_assert_eq!(held, FlowTime::new(epoch + 1, SEAL), "the input waits at the seal for the record");
            }
            let record = self.record(epoch)?;
            let outputs = self.built.outputs.take(epoch);
            let (beside, counts) = self.built.beside.take(epoch);
            self.late_rows += counts.late;
            if !self.pace.journal {
                self.built.close(epoch);
            }
            self.gauges.update(|stats, _| stats.epochs += 1);
            let (at, cost, _) = self.measured;
            let last = self.current.is_none() && self.queue.is_empty() && self.fed.is_empty();
            self.unmeasured = true;
            if self.few_bins && last || at.elapsed() >= cost * MEASURE_SHARE {
                self.measure();
            }
            told(Told::Epoch { epoch, outputs, beside, counts, record });
            completed = true;
        }
        Ok(completed)
    }

    /// What the bins here changed in an epoch.
    fn record(&self, epoch: u64) -> Result<Vec<Record>, Error> {
        let mut record = Vec::new();
        if self.pace.record {
            self.built.record(epoch, &mut record).map_err(|error| self.refuse("record", error))?;
        }
        Ok(record)
    }

    /// An error of the host's own, as that of an operator: all workers end with it.
    fn refuse(&self, name: &str, error: BoxError) -> Error {
        let error = Error::Operator { name: name.to_owned(), worker: self.worker.index(), source: Arc::from(error) };
        self.worker.abort(error.clone());
        self.worker.failure().unwrap_or(error)
    }

    /// Writes the counters into the worker's cells. Cost: one pass over the owned bins.
    fn measure(&mut self) {
        let began = Instant::now();
        self.built.measure(&self.gauges, self.began.elapsed().saturating_sub(self.worker.parked()));
        let late_rows = self.late_rows;
        self.gauges.update(|stats, _| stats.late_rows = late_rows);
        self.measured = (Instant::now(), began.elapsed(), first(&self.built.probes.output));
        self.unmeasured = false;
    }

    /// Refreshes the counters after bins have moved between epochs.
    pub(crate) fn refresh(&mut self) {
        self.measure();
    }
}
