//! A worker's half of time: which epoch is fed, how far, and which are done.
//!
//! Owns the epochs that were handed in and not told as done, and on worker 0 the [`Leader`]. Never blocks and steps no dataflow: who drives it
//! does, and asks then what is done.
//!
//! Order of a turn, which the invariants of the crate rest on: step the dataflow; [`Pacer::turn`]; [`Pacer::completed`] until it
//! says `None`, taking the record of each epoch that it tells before anything else of this turn or a later one.

use std::collections::VecDeque;
use std::time::Instant;

use penstock_progress::FlowTime;

use crate::leader::{Leader, Migrated, Order};
use crate::{CLOSE, MARK, Probes, SEAL, first};

/// Slices under way where epochs overlap: the wait for the others hides behind the slice of the next epoch. More of them gain nothing
/// and drive each other out of the caches.
const OVERLAP: usize = 3;
/// By how much fewer slices are under way while bins move. Always so few would cost: where calls of the user take anything
/// (exponentially distributed), batches took 11 % longer with 3 than with 8, each worker waiting for the other.
const CALMER: u32 = 3;

/// What is driven: the data input of one worker and the bins behind it.
pub trait Driven {
    /// What is sent at one time.
    type Slice;
    /// What an epoch ends with.
    type End;
    /// Why something could not be sent.
    type Error;

    /// What is seen of time, by the last step of the dataflow.
    fn probes(&self) -> &Probes;
    /// Where the data input stands.
    fn time(&self) -> FlowTime;
    /// Moves the data input to a time that is not before that.
    fn advance(&mut self, to: FlowTime);
    /// `epoch` begins and earlier ones are final: what is undone later is undone to here.
    fn mark(&mut self, epoch: u64);
    /// How often bins have been moved, split or merged, as this worker has seen it.
    fn changes(&self) -> u64;
    /// Whether links are full. When they have room again, the turn comes by itself.
    fn is_congested(&self) -> bool;
    /// Sends a slice where the data input stands; says when it was read and went, and how many rows it has.
    ///
    /// # Errors
    /// When it cannot be read. The run is over then.
    fn send(&mut self, slice: Self::Slice) -> Result<(Instant, u64), Self::Error>;
    /// Sends what an epoch ends with, in its last slice.
    fn end(&mut self, end: Self::End);
    /// Now; other than the machine's in a simulation.
    fn now(&self) -> Instant {
        Instant::now()
    }
}

/// One epoch's share of a worker.
#[derive(Debug)]
pub struct Release<S, E> {
    /// The epoch, not less than that of the one before.
    pub epoch: u64,
    /// What is sent, at slices of `(MARK, CLOSE)` in ascending order; several may be of one.
    pub slices: VecDeque<(u32, S)>,
    /// What it ends with. Without it the operators go on with the same epoch in the next one that is released.
    pub end: Option<E>,
}

/// Settings of a worker, equal on all workers of a generation.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Slices (order-sensitive flows: rows) that may be under way beyond the probe.
    pub window: u32,
    /// Whether so many rows of this worker's own may be under way however far ahead they are, in an order-sensitive flow whose workers
    /// each have stretches of it, as in flows whose slices each worker numbers for itself: what lies ahead of the first step that needs
    /// order is done meanwhile, and the rows wait there.
    pub apart: bool,
    /// Whether bins are marked before each epoch.
    pub journal: bool,
    /// Whether an epoch is recorded when it is done, before anything of the next one.
    pub record: bool,
    /// Whether an epoch may be fed while others still work on the one before; not with a journal.
    pub overlaps: bool,
}

/// A slice on its way through the flow.
#[derive(Clone, Copy, Debug)]
pub struct Flight {
    time: FlowTime,
    /// When it was sent.
    pub sent: Instant,
    /// The rows of this worker's in it.
    pub rows: u64,
}

/// See the module.
pub struct Pacer<S, E> {
    pace: Pace,
    leader: Option<Leader>,
    queue: VecDeque<Release<S, E>>,
    /// Epoch being fed.
    current: Option<Release<S, E>>,
    /// Epochs that are fed and not yet complete, oldest first.
    fed: VecDeque<u64>,
    /// Slices that may be under way when they are of more than one epoch; 0: an epoch begins when the one before is complete.
    overlap: usize,
    marked: bool,
    /// How often bins had been moved when an epoch was last opened; that of an earlier generation is not known.
    changes: Option<u64>,
    /// Whether that was more often than when the one before was.
    moved: bool,
    flights: VecDeque<Flight>,
    /// Rows of those.
    rows: u64,
    /// How many of them, the last ones, were sent beyond the window and wait for their turn.
    ahead: usize,
}

impl<S, E> Pacer<S, E> {
    /// A worker that begins; `leader` is that of worker 0, and `goes_on` says whether its bins come of an earlier generation.
    #[must_use]
    pub fn new(pace: Pace, leader: Option<Leader>, goes_on: bool) -> Self {
        let overlap = if pace.overlaps && !pace.journal { OVERLAP } else { 0 };
        Pacer {
            pace,
            leader,
            queue: VecDeque::new(),
            current: None,
            fed: VecDeque::new(),
            overlap,
            marked: false,
            changes: (!goes_on).then_some(0),
            moved: false,
            flights: VecDeque::new(),
            rows: 0,
            ahead: 0,
        }
    }

    /// Queues an epoch, or a part of one.
    pub fn release(&mut self, release: Release<S, E>) {
        if let Some(leader) = &mut self.leader {
            leader.give(release.epoch);
        }
        self.queue.push_back(release);
    }

    /// Queues a migration; the leader alone hears of it.
    pub fn order(&mut self, order: Order) {
        if let Some(leader) = &mut self.leader {
            leader.order(order);
        }
    }

    /// Issues no further step of a migration; the leader alone hears of it.
    pub fn cancel(&mut self, handle: u64) {
        if let Some(leader) = &mut self.leader {
            leader.cancel(handle);
        }
    }

    /// From now on nothing moves that does not move later than this.
    pub fn hold(&mut self, time: FlowTime) {
        if let Some(leader) = &mut self.leader {
            leader.hold(time);
        }
    }

    /// Whether no epoch is under way here.
    #[must_use]
    pub fn rests(&self) -> bool {
        self.current.is_none() && self.fed.is_empty()
    }

    /// Whether none is, and none waits.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.rests() && self.queue.is_empty()
    }

    /// Slices of this worker's that are on their way.
    #[must_use]
    pub fn under_way(&self) -> usize {
        self.flights.len()
    }

    /// Feeds what the window allows, leads or follows, all by the frontiers after the last step of the dataflow. Returns whether
    /// anything was done, that is, whether to come back before parking.
    ///
    /// # Errors
    /// Those of [`Driven::send`].
    pub fn turn<D>(&mut self, driven: &mut D, migrated: &mut dyn FnMut(Migrated)) -> Result<bool, D::Error>
    where
        D: Driven<Slice = S, End = E>,
    {
        let mut busy = self.open(driven);
        self.begin(driven);
        busy |= self.feed(driven)?;
        let window = self.window(driven);
        if let Some(leader) = &mut self.leader {
            let feeding = self.current.as_ref().map(|release| release.epoch).or(self.fed.back().copied());
            busy |= leader.turn(driven.probes(), feeding, window, driven.now(), migrated);
        }
        busy |= self.follow(driven);
        Ok(busy)
    }

    /// The oldest slice under way, if the probe has passed it.
    pub fn landed(&mut self, probes: &Probes) -> Option<Flight> {
        let landed = self.flights.front().is_some_and(|flight| !probes.output.less_equal(&flight.time));
        let mut flight = if landed { self.flights.pop_front()? } else { return None };
        self.rows -= flight.rows;
        if self.ahead > self.flights.len() {
            (self.ahead, flight.sent) = (self.flights.len(), Instant::now());
        }
        Some(flight)
    }

    /// What waits for its turn is not on its way: its time begins with that.
    fn begin(&mut self, driven: &impl Driven) {
        let Some(reached) = first(&driven.probes().output).filter(|_| self.ahead > 0) else { return };
        let limit = FlowTime::new(reached.epoch, reached.slice.max(MARK).saturating_add(self.window(driven)));
        let (now, waiting) = (driven.now(), self.flights.len() - self.ahead);
        for flight in self.flights.iter_mut().skip(waiting).take_while(|flight| flight.time < limit) {
            flight.sent = now;
            self.ahead -= 1;
        }
    }

    /// The oldest epoch that was fed, if it is done everywhere.
    pub fn completed(&mut self, probes: &Probes) -> Option<u64> {
        let done = self.fed.front().is_some_and(|epoch| !probes.output.less_equal(&FlowTime::new(*epoch, CLOSE)));
        if done { self.fed.pop_front() } else { None }
    }

    fn open(&mut self, driven: &impl Driven) -> bool {
        if self.current.is_some() || self.fed.len() > self.overlap {
            return false;
        }
        let Some(release) = self.queue.pop_front() else { return false };
        self.current = Some(release);
        self.marked = !self.pace.journal;
        let changes = Some(driven.changes());
        self.moved = self.changes != changes;
        self.changes = changes;
        true
    }

    /// Slices that may be under way now: fewer in an epoch in which bins move, and in the one after, such as the first of a generation that
    /// goes on. A row waits behind all slices that are under way, and so does a step of a migration.
    fn window(&self, driven: &impl Driven) -> u32 {
        let moves = self.moved || self.changes != Some(driven.changes());
        if moves { self.pace.window.div_ceil(CALMER) } else { self.pace.window }
    }

    /// With a journal, nothing is sent before every worker stands at `MARK` and no migration of an earlier
    /// time is under way: then all workers mark the same cut, each before its own first block.
    fn mark(&mut self, epoch: u64, driven: &mut impl Driven) -> bool {
        if self.marked {
            return true;
        }
        let start = FlowTime::new(epoch, MARK);
        driven.advance(start);
        if first(&driven.probes().output).is_some_and(|reached| reached < start) {
            return false;
        }
        driven.mark(epoch);
        self.marked = true;
        true
    }

    /// Greatest data slice of `epoch` that may be sent now, exclusive.
    fn limit(&self, epoch: u64, driven: &impl Driven) -> u32 {
        match first(&driven.probes().output) {
            Some(time) if time.epoch == epoch => time.slice.max(MARK).saturating_add(self.window(driven)),
            Some(time) if time.epoch > epoch => CLOSE,
            Some(_) if self.flights.len() < self.overlap => CLOSE,
            Some(_) => MARK, // an earlier epoch is still under way somewhere
            None => CLOSE,
        }
    }

    fn feed<D>(&mut self, driven: &mut D) -> Result<bool, D::Error>
    where
        D: Driven<Slice = S, End = E>,
    {
        let Some(epoch) = self.current.as_ref().map(|release| release.epoch) else {
            return Ok(false);
        };
        if !self.mark(epoch, driven) {
            return Ok(false);
        }
        let mut sent = false;
        loop {
            let near = self.limit(epoch, driven);
            let apart = self.pace.apart && near > MARK && self.rows < u64::from(self.window(driven));
            let limit = if apart { CLOSE } else { near };
            let release = self.current.as_mut().expect("an epoch is open: checked above");
            let next = release.slices.front().map(|(slice, _)| *slice);
            // The input always stands at the next slice to send: it holds back nobody's frontier longer
            // than it must.
            driven.advance(FlowTime::new(epoch, next.unwrap_or(CLOSE)));
            // A congested link ends the park of this worker when it has room again.
            if next.is_none_or(|slice| slice >= limit) || driven.is_congested() {
                break;
            }
            let (slice, content) = release.slices.pop_front().expect("the front was just read");
            let (sent_at, rows) = driven.send(content)?;
            let time = FlowTime::new(epoch, slice);
            self.rows += rows;
            match self.flights.back_mut().filter(|flight| flight.time == time) {
                Some(flight) => flight.rows += rows,
                None => {
                    self.flights.push_back(Flight { time, sent: sent_at, rows });
                    self.ahead += usize::from(slice >= near || self.ahead > 0);
                }
            }
            sent = true;
        }
        if let Some(release) = self.current.take_if(|release| release.slices.is_empty()) {
            if let Some(end) = release.end {
                driven.end(end);
            }
            driven.advance(FlowTime::new(epoch + 1, SEAL));
            self.fed.push_back(epoch);
            sent = true;
        }
        Ok(sent)
    }

    /// Without work of its own, the data input follows the control frontier through the idle slices, from the seal of an epoch on only
    /// when the record of the one before is taken.
    fn follow(&mut self, driven: &mut impl Driven) -> bool {
        if self.current.is_some() || (self.pace.record && !self.fed.is_empty()) {
            return false;
        }
        let held = driven.time();
        let control = match &self.leader {
            Some(leader) => Some(leader.time()),
            None => first(&driven.probes().control),
        };
        let Some(control) = control.filter(|control| control.epoch >= held.epoch) else { return false };
        let slice = if control.epoch > held.epoch { MARK } else { control.slice.min(MARK) };
        if slice <= held.slice {
            return false;
        }
        driven.advance(FlowTime::new(held.epoch, slice));
        true
    }
}
