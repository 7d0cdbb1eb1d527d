//! One worker of a group: its dataflow under the pacer, what it tells its host, and its counters.
//!
//! Owns the worker's inputs and probes. `turn` never blocks; the group's threads park between turns, the
//! inline host calls it in the caller's thread. When what is sent is said by [`Pacer`].
//!
//! Departure: where a plan is metered, a worker that has told 8 MiB which nobody took stops stepping. That is behind
//! the last operator, so no edge of the dataflow is full and loops cannot lock up.

use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow_array::RecordBatch;
use penstock_dataflow::{BoxError, Error, Worker};
use penstock_pace::{Driven, Leader, Migrated, Order, Pacer, Probes, SEAL, first, unix_ns};
use penstock_progress::FlowTime;

use super::build::{Built, Counts, WORTH_TELLING, Worth};
use super::feed::Cut;
use super::record::Record;
use super::rows::Rows;
use super::stats::{Gauges, SliceSample};
use crate::block::FlowBlock;
use crate::op::bytes_of;

/// One epoch's share of a worker.
pub(crate) type Release = penstock_pace::Release<Cut, End>;

/// What an epoch ends with.
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

/// Runtime settings of a worker, equal on all workers of a generation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    /// Slices (order-sensitive flows: rows) that may be under way beyond the probe.
    pub(crate) window: u32,
    /// Whether so many rows of a worker's own may be, wherever they are.
    pub(crate) apart: bool,
    /// Whether bins are marked before each epoch.
    pub(crate) journal: bool,
    /// Whether outputs are told as they are made.
    pub(crate) eager: bool,
    /// Whether what an epoch changed is told with it.
    pub(crate) record: bool,
    /// Whether an epoch begins when the one before is complete.
    pub(crate) one_by_one: bool,
    /// Whether rows are dealt to workers that join and leave.
    pub(crate) gather: bool,
}

/// The dataflow of a worker, as the pacer drives it.
struct Seat {
    worker: Worker,
    built: Built,
    gauges: Arc<Gauges>,
    /// Where rows are dealt to others: who takes part, and the watermark that was sent last.
    members: Option<Vec<u32>>,
    reached: Option<i64>,
}

pub(crate) struct WorkerLoop {
    seat: Seat,
    pacer: Pacer<Cut, End>,
    pace: Pace,
    /// When the counters were written, what that cost, and where the output stood.
    began: Instant,
    measured: (Instant, Duration, Option<FlowTime>),
    /// Whether an epoch was completed since.
    unmeasured: bool,
    /// When the figures of the bounded scopes were written: also in the middle of an epoch, which may never end.
    scopes_told: Instant,
    /// When rows were told before their epoch was complete.
    rows_told: Instant,
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
/// How long rows of an epoch that takes longer wait until there are enough to tell them.
const ROWS_EVERY: Duration = Duration::from_millis(250);
/// How old the figures of a bounded scope may be while its worker is busy.
const SCOPES_EVERY: Duration = Duration::from_millis(20);
impl Driven for Seat {
    type Slice = Cut;
    type End = End;
    type Error = Error;

    fn probes(&self) -> &Probes {
        &self.built.probes
    }

    fn time(&self) -> FlowTime {
        self.built.time()
    }

    fn advance(&mut self, to: FlowTime) {
        self.built.advance(to);
    }

    fn mark(&mut self, epoch: u64) {
        self.built.mark(epoch);
    }

    fn changes(&self) -> u64 {
        self.built.changes()
    }

    fn is_congested(&self) -> bool {
        self.worker.is_congested()
    }

    fn send(&mut self, cut: Cut) -> Result<(Instant, u64), Error> {
        let rows = cut.num_rows() as u64;
        let block = cut.read().map_err(|error| self.refuse("input", error))?;
        let now = Instant::now();
        if self.members.is_none() {
            self.gauges.update(|stats, _| stats.rows += rows);
        }
        self.built.input().send(block);
        Ok((now, rows))
    }

    fn end(&mut self, end: End) {
        if let Some(clock) = end.clock_ms {
            self.built.input().send(FlowBlock::Clock(clock));
        }
        if let Some(watermark) = end.watermark {
            self.reached = Some(watermark);
            self.built.input().send(FlowBlock::Watermark(watermark));
        }
        self.built.input().send(FlowBlock::EndEpoch);
    }
}

impl Seat {
    /// Sees who has come and gone. All that was sent up to now may have been so before a joiner was there: it gets bins later than
    /// that, and is told the watermark. Says whether anybody has, and where the input stood when somebody came.
    fn welcome(&mut self) -> (bool, Option<FlowTime>) {
        let Some(known) = &mut self.members else { return (false, None) };
        let now = self.worker.members();
        if *known == now {
            return (false, None);
        }
        // Not always the one with the greatest number: of several that join, the first may be the last to have its place.
        let come = now.iter().any(|id| known.binary_search(id).is_err());
        self.gauges.tell_members(now.clone());
        *known = now;
        if !come {
            return (true, None);
        }
        if let Some(watermark) = self.reached {
            self.built.input().send(FlowBlock::Begin(watermark));
        }
        (true, Some(self.built.time()))
    }

    /// An error of the host's own, as that of an operator: all workers end with it.
    fn refuse(&self, name: &str, error: BoxError) -> Error {
        let error = Error::Operator { name: name.to_owned(), worker: self.worker.index(), source: Arc::from(error) };
        self.worker.abort(error.clone());
        self.worker.failure().unwrap_or(error)
    }
}

impl WorkerLoop {
    pub(crate) fn new(worker: Worker, mut built: Built, pace: Pace, gauges: Arc<Gauges>) -> Self {
        let leader = match (worker.index(), built.control.take()) {
            (0, Some(control)) => Some(Leader::new(control)),
            _ => None, // dropping the handle closes the control input of a follower
        };
        let index = worker.index();
        gauges.update(|stats, _| stats.worker = index);
        // Alone there is nobody to wait for.
        let overlaps = !pace.one_by_one && (worker.peers() > 1 || pace.gather);
        let Pace { window, journal, record, .. } = pace;
        let apart = pace.apart && worker.peers() > 1;
        let pacer =
            Pacer::new(penstock_pace::Pace { window, apart, journal, record, overlaps }, leader, built.goes_on());
        let few_bins = built.owners().iter().map(Vec::len).sum::<usize>() <= FEW_BINS;
        let seat = Seat { worker, built, gauges, members: pace.gather.then(Vec::new), reached: None };
        let mut this = WorkerLoop {
            seat,
            pacer,
            pace,
            began: Instant::now(),
            measured: (Instant::now(), Duration::ZERO, None),
            unmeasured: false,
            scopes_told: Instant::now(),
            rows_told: Instant::now(),
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
            Command::Release(release) => self.pacer.release(release),
            Command::Migrate(order) => self.pacer.order(order),
            Command::Cancel(handle) => self.pacer.cancel(handle),
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
        self.seat.worker.step()?;
        // Before the leader sees the time of it passed: what one keyed step refused is not to be told as done.
        if let Some(error) = self.seat.built.rejected() {
            return Err(self.seat.refuse("control", error.into()));
        }
        let (mut busy, joined) = self.seat.welcome();
        if let Some(sent) = joined {
            self.pacer.hold(sent);
        }
        busy |= self.pacer.turn(&mut self.seat, &mut |migrated| told(Told::Migrated(migrated)))?;
        if self.pace.eager {
            let waited = self.rows_told.elapsed() >= ROWS_EVERY;
            self.tell_rows(if waited { Worth::default() } else { WORTH_TELLING }, told)?;
        }
        busy |= self.complete(told)?;
        if self.measure_in() == Some(Duration::ZERO) {
            self.measure();
        }
        if !self.seat.built.monitors.is_empty() && self.scopes_told.elapsed() >= SCOPES_EVERY {
            self.scopes_told = Instant::now();
            let scopes = self.seat.built.monitors.stats();
            self.seat.gauges.update(|stats, _| stats.scopes = scopes);
        }
        Ok(busy)
    }

    /// Parks until a message or a command arrives, or the counters are to be written.
    pub(crate) fn park(&mut self) -> Result<(), Error> {
        self.seat.worker.step_or_park(self.measure_in()).map(drop)
    }

    /// When to write the counters; `None` while they are right, or an epoch is under way and none was completed since. Between epochs the
    /// output moves only with bins, and has passed a move when the bins are where they are to be.
    fn measure_in(&self) -> Option<Duration> {
        let (at, cost, reached) = self.measured;
        let stale = self.unmeasured || self.pacer.rests() && first(&self.seat.built.probes.output) != reached;
        stale.then(|| (cost * MEASURE_SHARE).saturating_sub(at.elapsed()))
    }

    /// Slices of this worker's that are on their way.
    #[cfg(test)]
    pub(crate) fn under_way(&self) -> usize {
        self.pacer.under_way()
    }

    /// Tells outputs of epochs where they are `worth` it.
    fn tell_rows(&mut self, worth: Worth, told: &mut dyn FnMut(Told)) -> Result<(), Error> {
        let refused = |error| self.seat.refuse("output", error);
        let mut found = Vec::new();
        while let Some((epoch, rows)) = self.seat.built.outputs.take_worth(worth).map_err(refused)? {
            found.push((epoch, rows, false));
        }
        while let Some((epoch, rows)) = self.seat.built.beside.take_worth(worth).map_err(refused)? {
            found.push((epoch, rows, true));
        }
        if !found.is_empty() {
            self.rows_told = Instant::now();
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
        while let Some(flight) = self.pacer.landed(&self.seat.built.probes) {
            self.seat.gauges.sample(SliceSample {
                ended_ns: unix_ns(now),
                latency_ns: now.duration_since(flight.sent).as_nanos() as u64,
                rows: flight.rows,
            });
        }
        let mut completed = false;
        while let Some(epoch) = self.pacer.completed(&self.seat.built.probes) {
            if self.pace.eager {
                self.tell_rows(Worth::default(), told)?;
            }
            // Before anything else of this turn or a later one: what comes behind the epoch waits at its seal.
            if self.pace.record {
                let held = self.seat.built.time();
                debug_assert_eq!(held, FlowTime::new(epoch + 1, SEAL), "the input waits at the seal for the record");
            }
            let record = self.record(epoch)?;
            let outputs = self.seat.built.outputs.take(epoch);
            let (beside, counts) = self.seat.built.beside.take(epoch);
            self.late_rows += counts.late;
            if !self.pace.journal {
                self.seat.built.close(epoch);
            }
            self.seat.gauges.update(|stats, _| stats.epochs += 1);
            let (at, cost, _) = self.measured;
            self.unmeasured = true;
            if self.few_bins && self.pacer.is_done() || at.elapsed() >= cost * MEASURE_SHARE {
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
            self.seat.built.record(epoch, &mut record).map_err(|error| self.seat.refuse("record", error))?;
        }
        Ok(record)
    }

    /// Writes the counters into the worker's cells. Cost: one pass over the owned bins.
    fn measure(&mut self) {
        let began = Instant::now();
        self.seat.built.measure(&self.seat.gauges, self.began.elapsed().saturating_sub(self.seat.worker.parked()));
        let late_rows = self.late_rows;
        self.seat.gauges.update(|stats, _| stats.late_rows = late_rows);
        self.measured = (Instant::now(), began.elapsed(), first(&self.seat.built.probes.output));
        self.unmeasured = false;
    }

    /// Refreshes the counters after bins have moved between epochs.
    pub(crate) fn refresh(&mut self) {
        self.measure();
    }
}
