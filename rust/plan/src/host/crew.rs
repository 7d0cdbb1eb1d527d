//! Workers of a process that takes part in the run of another one, which [gathers](super::GroupConfig::gather).
//!
//! Owns the threads: each builds the plan, joins, steps, and leaves when it is asked to. What they compute, and where its results go, is
//! decided by the first worker, which alone is fed.
//!
//! Invariants: a worker that is asked to leave owns no bin (control took them away before); the error of one that has not joined stops nobody else.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, Sender, bounded, unbounded};
use penstock_dataflow::{Endpoint, Error, Waker, Worker};
use penstock_pace::first;

use super::build::{self, Built, Shared};
use super::group::{GroupConfig, HostError};
use super::resident::Resident;
use super::stats::{Gauges, GroupStats, StepLoads};

/// How often one that waits for its place looks whether it was stopped.
const JOIN_TICK: Duration = Duration::from_millis(50);

/// What the workers tell, each for itself.
#[derive(Debug)]
pub enum CrewEvent {
    /// It has its place in the run.
    Joined {
        /// Its index.
        worker: usize,
    },
    /// It has left the run as asked, or all is done.
    Left {
        /// Its index.
        worker: usize,
    },
    /// It has failed; once it had joined, so has the run.
    Failed {
        /// Its index.
        worker: usize,
        /// Why.
        error: HostError,
    },
}

#[derive(Default)]
struct Wishes {
    leave: AtomicBool,
    stop: AtomicBool,
}

/// A worker as its crew sees it.
struct Hand {
    waker: Waker,
    gauges: Arc<Gauges>,
    asks: Sender<Ask>,
    thread: JoinHandle<()>,
}

/// Asks a worker to write its counters; it drops this when it has.
type Ask = Sender<()>;

/// See the module. Dropped, it lets its threads end without waiting for them.
pub struct Crew {
    config: GroupConfig,
    shared: Arc<Shared>,
    wishes: Arc<Wishes>,
    hands: Vec<Hand>,
}

impl Crew {
    /// Starts one thread per seat. `config` is that of the first worker when the run began.
    ///
    /// # Errors
    /// When the bins do not fit the plan, or the system gives no thread; then those that were started end.
    pub fn start(config: GroupConfig, seats: Vec<Endpoint>, events: &Sender<CrewEvent>) -> Result<Crew, HostError> {
        let local = seats.iter().map(Endpoint::index).collect::<Vec<_>>();
        let shared = Arc::new(Shared::new(&config, &local, &mut Resident::fresh())?);
        let mut crew = Crew { config, shared, wishes: Arc::default(), hands: Vec::new() };
        for seat in seats {
            let (worker, (wakes, waker), (asks, asked)) = (seat.index(), bounded(1), unbounded());
            let gauges = Arc::new(Gauges::new(&crew.config.routings));
            let (config, shared, wishes, events) =
                (crew.config.clone(), crew.shared.clone(), crew.wishes.clone(), events.clone());
            let told = Told { gauges: gauges.clone(), asked, began: Instant::now(), epoch: None };
            let thread = std::thread::Builder::new().name(format!("penstock-{worker}")).spawn(move || {
                let outcome = take_part(seat, &config, &shared, &wishes, (&wakes, told), &events);
                let _ = events.send(match outcome {
                    Ok(()) => CrewEvent::Left { worker },
                    Err(error) => CrewEvent::Failed { worker, error },
                });
            });
            let thread = thread.map_err(|error| HostError::Thread { worker, message: error.to_string() })?;
            let waker = waker.recv().expect("a worker sends its waker before anything can fail");
            crew.hands.push(Hand { waker, gauges, asks, thread });
        }
        Ok(crew)
    }

    /// Counters of the workers as they are now, and moves since the last call. Of one that does not come to it within `patience`, since it is in a
    /// function of the user, the counters of the last time that it was asked.
    #[must_use]
    pub fn stats(&self, patience: Duration) -> GroupStats {
        let (ask, done) = unbounded();
        for hand in &self.hands {
            // One that has ended has told its last.
            let _ = hand.asks.send(ask.clone());
            hand.waker.wake();
        }
        drop(ask);
        // Nothing is sent: it ends when all have dropped theirs.
        let _ = done.recv_timeout(patience);
        let mut stats = GroupStats::default();
        self.hands.iter().for_each(|hand| hand.gauges.collect(&mut stats));
        stats.moves = self.shared.drain_moves();
        stats
    }

    /// As [`Group::loads`](super::Group::loads).
    #[must_use]
    pub fn loads(&self) -> Vec<StepLoads> {
        self.shared.loads()
    }

    /// Asks all workers to leave the run. They own no bin any more, and nothing moves until they have left: who leaves hears of no control, and
    /// routes what it has by what it knows.
    pub fn leave(&self) {
        self.wishes.leave.store(true, Ordering::Release);
        self.wake();
    }

    /// Asks all workers to end at the next turn, without waiting for them: with them ends the run, unless they have left.
    pub fn ask_to_stop(&self) {
        self.wishes.stop.store(true, Ordering::Release);
        self.config.callbacks.stop();
        self.wake();
    }

    /// Whether all threads have ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.hands.iter().all(|hand| hand.thread.is_finished())
    }

    fn wake(&self) {
        self.hands.iter().for_each(|hand| hand.waker.wake());
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.ask_to_stop();
    }
}

/// What a worker tells of itself when it is asked.
struct Told {
    gauges: Arc<Gauges>,
    asked: Receiver<Ask>,
    began: Instant,
    /// In which it came, and the last that it has seen.
    epoch: Option<(u64, u64)>,
}

impl Told {
    fn tell(&mut self, worker: &Worker, built: &Built) {
        if let Some(now) = first(&built.probes.output) {
            let (came, _) = self.epoch.unwrap_or((now.epoch, now.epoch));
            self.epoch = Some((came, now.epoch));
        }
        built.measure(&self.gauges, self.began.elapsed().saturating_sub(worker.parked()));
        let epochs = self.epoch.map_or(0, |(came, now)| now - came);
        self.gauges.update(|stats, _| (stats.worker, stats.epochs) = (worker.index(), epochs));
    }

    fn answer(&mut self, worker: &Worker, built: &Built) {
        let asks: Vec<Ask> = self.asked.try_iter().collect();
        if !asks.is_empty() {
            self.tell(worker, built);
        }
    }
}

fn take_part(
    seat: Endpoint,
    config: &GroupConfig,
    shared: &Shared,
    wishes: &Wishes,
    (wakes, mut told): (&Sender<Waker>, Told),
    events: &Sender<CrewEvent>,
) -> Result<(), HostError> {
    let worker = Worker::new(seat);
    let _ = wakes.send(worker.waker());
    let mut guest = Guest::new(worker, config, shared)?;
    while !wishes.stop.load(Ordering::Acquire) {
        match guest.turn(wishes.leave.load(Ordering::Acquire), true)? {
            Turn::Waited => told.answer(&guest.worker, &guest.built),
            Turn::Joined => {
                told.tell(&guest.worker, &guest.built);
                let _ = events.send(CrewEvent::Joined { worker: guest.worker.index() });
            }
            Turn::Worked => told.answer(&guest.worker, &guest.built),
            Turn::Ended => break,
        }
    }
    told.tell(&guest.worker, &guest.built);
    Ok(())
}

/// What became of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// It has no place yet.
    Waited,
    /// It has one now.
    Joined,
    /// It took part.
    Worked,
    /// It has left, or all is done.
    Ended,
}

/// A worker that joins, takes part and leaves, turn by turn.
pub(super) struct Guest {
    pub(super) worker: Worker,
    pub(super) built: Built,
    joined: bool,
    leaves: bool,
}

impl Guest {
    /// Builds the plan.
    ///
    /// # Errors
    /// As [`build::build`].
    pub(super) fn new(mut worker: Worker, config: &GroupConfig, shared: &Shared) -> Result<Self, HostError> {
        let built = build::build(&mut worker, config, shared, None)?;
        Ok(Guest { worker, built, joined: false, leaves: false })
    }

    /// Does what can be done now; before that it may park while there is nothing.
    ///
    /// # Errors
    /// Why it does not join, or the run has ended.
    pub(super) fn turn(&mut self, leave: bool, park: bool) -> Result<Turn, Error> {
        let Guest { worker, built, joined, leaves } = self;
        if !*joined {
            if worker.try_bootstrap()?.is_none() {
                if park {
                    worker.park(Some(JOIN_TICK));
                }
                return Ok(Turn::Waited);
            }
            // The first worker alone feeds and controls.
            drop((built.input.take(), built.control.take()));
            *joined = true;
            return Ok(Turn::Joined);
        }
        if leave && !*leaves {
            worker.start_leaving()?;
            *leaves = true;
        }
        let more = if park { worker.step_or_park(None)? } else { worker.step()? };
        Ok(if more && !worker.has_left() { Turn::Worked } else { Turn::Ended })
    }
}
