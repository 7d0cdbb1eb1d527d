//! One migration as its host drives it: issue a step at a time, await it, issue the next.
//!
//! Invariants: at most one step is in flight; a step is done when S's output frontier has left its time; a cancelled
//! migration issues nothing more, and what is in flight still completes (bins are never between two owners).
//!
//! Source: Megaphone §3.3 (await completion), §4.4 (the host may leave a gap before it issues the next step).

use penstock_progress::{ProbeHandle, Timestamp};

use super::{PlanStep, Strategy, commands, steps};
use crate::control::Command;
use crate::error::BinsError;
use crate::routing::Routing;

/// A migration under way. Pure bookkeeping: the host owns the control input and the probe.
///
/// # Examples
/// ```
/// use penstock_bins::{Migration, Routing, Strategy};
/// use penstock_progress::ProbeHandle;
/// let (from, to) = (Routing::new(1, 1)?, Routing::new(1, 2)?);
/// let mut migration = Migration::<u64>::new(Strategy::Fluid, &from, &to)?;
/// let probe = ProbeHandle::new();
/// assert_eq!(migration.issue(7).map(|commands| commands.len()), Some(1));
/// probe.update([(7, 1)]);
/// assert!(!migration.observe(&probe), "7 is still possible");
/// probe.update([(7, -1), (8, 1)]);
/// assert!(migration.observe(&probe) && migration.is_done());
/// # Ok::<(), penstock_bins::BinsError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Migration<T> {
    steps: Vec<PlanStep>,
    issued: usize,
    in_flight: Option<T>,
    cancelled: bool,
}

/// How far a migration is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MigrationProgress<T> {
    /// Steps of the whole migration.
    pub steps: usize,
    /// Steps completed.
    pub steps_done: usize,
    /// Bins that move in the whole migration.
    pub bins: usize,
    /// Bins whose step is completed.
    pub bins_done: usize,
    /// Time of the step in flight.
    pub in_flight: Option<T>,
    /// No further step will be issued.
    pub cancelled: bool,
}

impl<T: Timestamp> Migration<T> {
    /// Plans the way from one routing to another.
    ///
    /// # Errors
    /// [`BinsError::BitsDiffer`], [`BinsError::StepSize`].
    pub fn new(strategy: Strategy, from: &Routing, to: &Routing) -> Result<Self, BinsError> {
        Ok(Self::from_steps(steps(strategy, from, to)?))
    }

    /// A migration by steps that were planned elsewhere. A step without moves is complete when it is issued.
    #[must_use]
    pub fn from_steps(steps: Vec<PlanStep>) -> Self {
        Self { steps, issued: 0, in_flight: None, cancelled: false }
    }

    /// The step to issue now: `None` while one is in flight, and when there is none left.
    #[must_use]
    pub fn next_step(&self) -> Option<&[(u32, u32)]> {
        if self.cancelled || self.in_flight.is_some() {
            return None;
        }
        self.steps.get(self.issued).map(Vec::as_slice)
    }

    /// Issues the next step at `time`: its commands, for the host to schedule at that time. `None` like
    /// [`next_step`](Self::next_step).
    pub fn issue(&mut self, time: T) -> Option<Vec<Command>> {
        let commands = commands(self.next_step()?);
        self.issued += 1;
        self.in_flight = (!commands.is_empty()).then_some(time);
        Some(commands)
    }

    /// Reads the probe of S's output; true when that completed the step in flight.
    pub fn observe(&mut self, probe: &ProbeHandle<T>) -> bool {
        self.in_flight.take_if(|time| !probe.less_equal(time)).is_some()
    }

    /// Issues nothing more. The step in flight, if any, completes: observe until [`is_done`](Self::is_done).
    pub fn cancel(&mut self) {
        self.cancelled = true;
    }

    /// Every issued step is completed and none is left to issue.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.in_flight.is_none() && (self.cancelled || self.issued == self.steps.len())
    }

    /// How far it is.
    #[must_use]
    pub fn progress(&self) -> MigrationProgress<T> {
        let done = self.issued - usize::from(self.in_flight.is_some());
        let bins = |steps: &[PlanStep]| steps.iter().map(Vec::len).sum();
        MigrationProgress {
            steps: self.steps.len(),
            steps_done: done,
            bins: bins(&self.steps),
            bins_done: bins(&self.steps[..done]),
            in_flight: self.in_flight.clone(),
            cancelled: self.cancelled,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_awaited_one_by_one_and_cancel_lets_the_last_finish() {
        let (from, to) = (Routing::new(3, 1).unwrap(), Routing::new(3, 2).unwrap());
        let mut migration = Migration::<u64>::new(Strategy::Batched { size: 3 }, &from, &to).unwrap();
        let probe = ProbeHandle::new();
        probe.update([(5, 1)]);
        assert_eq!(migration.next_step(), Some(&[(1, 1), (3, 1), (5, 1)][..]));
        assert_eq!(migration.issue(6).unwrap().len(), 3);
        assert!(migration.next_step().is_none() && migration.issue(7).is_none());
        assert!(!migration.observe(&probe));
        assert_eq!(migration.progress().bins_done, 0);
        probe.update([(5, -1), (7, 1)]);
        assert!(migration.observe(&probe));
        assert!(!migration.observe(&probe), "a step completes once");
        let progress = migration.progress();
        assert_eq!((progress.steps, progress.steps_done, progress.bins, progress.bins_done), (2, 1, 4, 3));
        assert_eq!(migration.issue(7), Some(vec![Command::Move { bin: 7, worker: 1 }]));
        migration.cancel();
        assert!(!migration.is_done());
        probe.update([(7, -1)]);
        assert!(migration.observe(&probe) && migration.is_done());
    }

    #[test]
    fn a_step_without_moves_awaits_nothing() {
        let mut migration = Migration::<u64>::from_steps(vec![vec![], vec![(1, 1)], vec![]]);
        assert_eq!(migration.issue(3), Some(vec![]));
        assert_eq!(migration.progress().steps_done, 1);
        assert_eq!(migration.issue(3), Some(vec![Command::Move { bin: 1, worker: 1 }]));
        assert!(migration.issue(4).is_none() && !migration.is_done());
        let probe = ProbeHandle::new();
        probe.update([(4, 1)]);
        assert!(migration.observe(&probe));
        assert_eq!(migration.issue(4), Some(vec![]));
        assert!(migration.is_done());
    }

    #[test]
    fn cancel_before_the_end_leaves_steps_unissued() {
        let (from, to) = (Routing::new(3, 1).unwrap(), Routing::new(3, 2).unwrap());
        let mut migration = Migration::<u64>::new(Strategy::Fluid, &from, &to).unwrap();
        migration.cancel();
        assert!(migration.is_done() && migration.issue(0).is_none());
        let progress = migration.progress();
        assert!(progress.cancelled && progress.steps_done == 0 && progress.steps == 4);
        let nothing = Migration::<u64>::new(Strategy::Fluid, &to, &to).unwrap();
        assert!(nothing.is_done());
    }
}
