//! One migration as its host drives it: issue a step at a time, await it, issue the next.
//!
//! Invariants: at most one step, or some that are issued together, is in flight; a step is done when S's output frontier has left its time; a cancelled
//! migration issues nothing more, and what is in flight still completes (bins are never between two owners).
//!
//! Source: Megaphone §3.3 (await completion), §4.4 (the host may leave a gap before it issues the next step).

use std::collections::BTreeMap;

use penstock_balance::Strategy;
use penstock_progress::{ProbeHandle, Timestamp};

use super::{PlanStep, commands, steps};
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
/// assert_eq!(migration.issue(7, 1).map(|commands| commands.len()), Some(1));
/// probe.update([(7, 1)]);
/// assert!(!migration.observe(&probe), "7 is still possible");
/// probe.update([(7, -1), (8, 1)]);
/// assert!(migration.observe(&probe) && migration.is_done());
/// # Ok::<(), penstock_bins::BinsError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Migration<T> {
    steps: Vec<PlanStep>,
    /// In place of the moves of its one step.
    commands: Vec<Command>,
    issued: usize,
    /// Its time, and how many steps it is.
    in_flight: Option<(T, usize)>,
    cancelled: bool,
}

/// How far a migration is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MigrationProgress<T> {
    /// Steps of the whole migration.
    pub steps: usize,
    /// Steps issued, completed or under way.
    pub steps_issued: usize,
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
        Self { steps, commands: Vec::new(), issued: 0, in_flight: None, cancelled: false }
    }

    /// One step of any commands: splits and merges.
    #[must_use]
    pub fn of_commands(commands: Vec<Command>) -> Self {
        Self { commands, ..Self::from_steps(vec![PlanStep::new()]) }
    }

    /// The step to issue now: `None` while one is in flight, and when there is none left.
    #[must_use]
    pub fn next_step(&self) -> Option<&[(u32, u32)]> {
        if self.cancelled || self.in_flight.is_some() {
            return None;
        }
        self.steps.get(self.issued).map(Vec::as_slice)
    }

    /// Issues the next steps at `time`, so many as one, at least one: their commands, for the host to schedule at that time. A bin
    /// that several of them name goes where the last one says. `None` like [`next_step`](Self::next_step).
    pub fn issue(&mut self, time: T, most: usize) -> Option<Vec<Command>> {
        self.next_step()?;
        let left = &self.steps[self.issued..];
        let together = &left[..most.clamp(1, left.len())];
        let latest: BTreeMap<u32, u32> = together.iter().flatten().copied().collect();
        let mut commands = commands(&latest.into_iter().collect::<Vec<_>>());
        commands.append(&mut self.commands);
        self.issued += together.len();
        self.in_flight = (!commands.is_empty()).then_some((time, together.len()));
        Some(commands)
    }

    /// Reads the probe of S's output; true when that completed the step in flight.
    pub fn observe(&mut self, probe: &ProbeHandle<T>) -> bool {
        self.in_flight.take_if(|(time, _)| !probe.less_equal(time)).is_some()
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
        let done = self.issued - self.in_flight.as_ref().map_or(0, |(_, steps)| *steps);
        let bins = |steps: &[PlanStep]| steps.iter().map(Vec::len).sum();
        MigrationProgress {
            steps: self.steps.len(),
            steps_issued: self.issued,
            steps_done: done,
            bins: bins(&self.steps),
            bins_done: bins(&self.steps[..done]),
            in_flight: self.in_flight.as_ref().map(|(time, _)| time.clone()),
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
        assert_eq!(migration.issue(6, 1).unwrap().len(), 3);
        assert!(migration.next_step().is_none() && migration.issue(7, 1).is_none());
        assert!(!migration.observe(&probe));
        assert_eq!(migration.progress().bins_done, 0);
        probe.update([(5, -1), (7, 1)]);
        assert!(migration.observe(&probe));
        assert!(!migration.observe(&probe), "a step completes once");
        let progress = migration.progress();
        assert_eq!((progress.steps, progress.steps_done, progress.bins, progress.bins_done), (2, 1, 4, 3));
        assert_eq!(migration.issue(7, 1), Some(vec![Command::Move { bin: 7, worker: 1 }]));
        migration.cancel();
        assert!(!migration.is_done());
        probe.update([(7, -1)]);
        assert!(migration.observe(&probe) && migration.is_done());
    }

    #[test]
    fn a_step_without_moves_awaits_nothing() {
        let mut migration = Migration::<u64>::from_steps(vec![vec![], vec![(1, 1)], vec![]]);
        assert_eq!(migration.issue(3, 1), Some(vec![]));
        assert_eq!(migration.progress().steps_done, 1);
        assert_eq!(migration.issue(3, 1), Some(vec![Command::Move { bin: 1, worker: 1 }]));
        assert!(migration.issue(4, 1).is_none() && !migration.is_done());
        let probe = ProbeHandle::new();
        probe.update([(4, 1)]);
        assert!(migration.observe(&probe));
        assert_eq!(migration.issue(4, 1), Some(vec![]));
        assert!(migration.is_done());
    }

    #[test]
    fn steps_that_are_issued_together_are_one_and_the_last_word_on_a_bin_counts() {
        let steps = vec![vec![(1, 1)], vec![(2, 1), (1, 3)], vec![(4, 1)]];
        let mut migration = Migration::<u64>::from_steps(steps);
        let probe = ProbeHandle::new();
        probe.update([(3, 1)]);
        let moves = [(1, 3), (2, 1)].map(|(bin, worker)| Command::Move { bin, worker });
        assert_eq!(migration.issue(3, 2), Some(moves.to_vec()));
        assert_eq!(migration.progress().steps_done, 0);
        probe.update([(3, -1), (4, 1)]);
        assert!(migration.observe(&probe));
        assert_eq!(migration.progress().steps_done, 2);
        assert_eq!(migration.issue(4, usize::MAX), Some(vec![Command::Move { bin: 4, worker: 1 }]));
        probe.update([(4, -1)]);
        assert!(migration.observe(&probe) && migration.is_done());
    }

    #[test]
    fn cancel_before_the_end_leaves_steps_unissued() {
        let (from, to) = (Routing::new(3, 1).unwrap(), Routing::new(3, 2).unwrap());
        let mut migration = Migration::<u64>::new(Strategy::Fluid, &from, &to).unwrap();
        migration.cancel();
        assert!(migration.is_done() && migration.issue(0, 1).is_none());
        let progress = migration.progress();
        assert!(progress.cancelled && progress.steps_done == 0 && progress.steps == 4);
        let nothing = Migration::<u64>::new(Strategy::Fluid, &to, &to).unwrap();
        assert!(nothing.is_done());
    }
}
