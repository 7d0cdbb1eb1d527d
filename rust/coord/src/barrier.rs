//! A rendezvous of all workers.
//!
//! The dataflow of a barrier is an input and a probe on it, and no data ever flows. Its time is the round. Arriving moves the input
//! to the next round; a round is reached when the probe has passed all before it, which is when every worker has arrived for
//! it. A handle that is dropped closes its input, so the other workers go on without it: it counts as arrived for ever.
//!
//! Waiting steps the worker, so all its other dataflows go on meanwhile. When a worker fails, or its process dies, all waits end with
//! the cause.
//!
//! Source: timely's post on barriers (B-01 to B-05). Departures: the split form, time limits, and errors instead of an endless wait.

use std::time::Duration;

use penstock_dataflow::{InputHandle, Worker};
use penstock_progress::probe::ProbeHandle;

use crate::error::CoordError;

/// A rendezvous that all workers may pass any number of times. All workers make it at the same place of their program.
///
/// One round costs one progress message from each worker to each other, and no new dataflow.
///
/// ```
/// use penstock_coord::Barrier;
/// use penstock_dataflow::{BoxError, execute, fabric};
///
/// let threads = execute(fabric::threads(3), |worker| {
///     let mut barrier = Barrier::new(worker);
///     assert_eq!(barrier.wait(worker)?, 1);
///     // The split form: arrive, do something else, then look.
///     let round = barrier.advance();
///     worker.step_until(None, || barrier.reached(round))?;
///     Ok::<_, BoxError>(round)
/// });
/// for thread in threads {
///     assert_eq!(thread.join().unwrap().unwrap(), 2);
/// }
/// ```
#[derive(Debug)]
pub struct Barrier {
    owner: usize,
    input: InputHandle<u64, ()>,
    probe: ProbeHandle<u64>,
    /// The round of a wait that ended before its time: the next wait goes on with it.
    interrupted: Option<u64>,
}

impl Barrier {
    /// A new barrier: builds its dataflow.
    pub fn new(worker: &mut Worker) -> Self {
        let (input, probe) = worker.dataflow("barrier", |scope| {
            let (input, stream) = scope.new_input();
            (input, stream.probe().0)
        });
        Barrier { owner: worker.index(), input, probe, interrupted: None }
    }

    /// Meets all other workers once: builds a dataflow without anything in it and runs it until no worker can still put
    /// something into it.
    ///
    /// # Errors
    /// As [`Barrier::wait`].
    pub fn once(worker: &mut Worker) -> Result<(), CoordError> {
        let probe = worker.dataflow::<(), _>("rendezvous", |scope| scope.new_input::<()>().1.probe().0);
        worker.step_until(None, || probe.done())?;
        Ok(())
    }

    /// Arrives, and runs the worker until all others have arrived. Returns the round that was passed: 1, 2, 3...
    ///
    /// # Errors
    /// [`CoordError::Worker`] when this or another worker has stopped, [`CoordError::Gone`] when the worker's dataflows were
    /// dropped, as they are when it has left, [`CoordError::Ended`] where [`Barrier::usable`] says so, [`CoordError::OtherWorker`].
    pub fn wait(&mut self, worker: &mut Worker) -> Result<u64, CoordError> {
        self.meet(worker, None)
    }

    /// As [`Barrier::wait`], but not longer than `limit`. Arriving is not undone: after a timeout the next wait goes on
    /// with the same round.
    ///
    /// # Errors
    /// As [`Barrier::wait`], and [`CoordError::Timeout`].
    pub fn wait_timeout(&mut self, worker: &mut Worker, limit: Duration) -> Result<u64, CoordError> {
        self.meet(worker, Some(limit))
    }

    fn meet(&mut self, worker: &mut Worker, limit: Option<Duration>) -> Result<u64, CoordError> {
        let round = match self.interrupted.take() {
            Some(round) => round,
            None => {
                self.check(worker)?;
                self.advance()
            }
        };
        let outcome = self.wait_for(worker, round, limit);
        if matches!(outcome, Err(CoordError::Timeout { .. } | CoordError::OtherWorker { .. })) {
            self.interrupted = Some(round);
        }
        outcome.map(|()| round)
    }

    /// Arrives without waiting, and returns the round arrived for. May run any number of rounds ahead of the others.
    /// Nobody hears of it where [`Barrier::usable`] says so.
    pub fn advance(&mut self) -> u64 {
        let next = self.round() + 1;
        self.input.advance_to(next).expect("the next round is after this one");
        next
    }

    /// Whether all workers have arrived for a round. Says what the last step has learned; does not step.
    pub fn reached(&self, round: u64) -> bool {
        !self.probe.less_than(&round)
    }

    /// Runs the worker until all workers have arrived for a round that this one has arrived for.
    ///
    /// # Errors
    /// As [`Barrier::wait_timeout`], and [`CoordError::NotArrived`] for a round that would never come.
    pub fn wait_for(&self, worker: &mut Worker, round: u64, limit: Option<Duration>) -> Result<(), CoordError> {
        // A leaver may still reach the round after it has handed over its input, not after its dataflow was dropped.
        let reached = round <= self.round() && self.reached(round);
        if reached && worker.index() == self.owner {
            return Ok(());
        }
        self.check(worker)?;
        if round > self.round() {
            return Err(CoordError::NotArrived { asked: round, arrived: self.round() });
        }
        let dropped = || self.input.has_ended() && !self.input.is_void();
        match worker.step_until(limit, || self.reached(round) || dropped())? {
            _ if self.reached(round) => Ok(()),
            true => self.gone(worker),
            false => Err(CoordError::Timeout { round, waited: limit.unwrap_or_default() }),
        }
    }

    /// The last round that this worker has arrived for.
    pub fn round(&self) -> u64 {
        *self.input.time()
    }

    /// Whether this worker is one of those that meet. A joiner is not if its peer had closed its own handle, nor is a leaver that has handed
    /// over its inputs.
    ///
    /// # Errors
    /// [`CoordError::Ended`].
    pub fn usable(&self) -> Result<(), CoordError> {
        match self.input.is_void() {
            true => Err(CoordError::Ended { what: "barrier", worker: self.owner }),
            false => Ok(()),
        }
    }

    fn check(&self, worker: &mut Worker) -> Result<(), CoordError> {
        if worker.index() != self.owner {
            let (what, owner) = ("barrier", self.owner);
            return Err(CoordError::OtherWorker { what, owner, worker: worker.index() });
        }
        self.usable()?;
        match self.input.has_ended() {
            true => self.gone(worker),
            false => Ok(()),
        }
    }

    /// Why the dataflow was dropped.
    fn gone(&self, worker: &mut Worker) -> Result<(), CoordError> {
        // A stopped worker has dropped its dataflows as well: say why it stopped.
        worker.step()?;
        Err(CoordError::Gone { what: "barrier", worker: self.owner })
    }
}
