//! The numbers of bundles: what the next one of this worker is called, and which ones of others may be taken in.
//!
//! Every worker numbers its bundles 0, 1, 2, ... A bundle is taken in after the one before it of the same sender and once: so the
//! state of a worker is the sum of, per sender, the first so many bundles. A number that is too high is a [`Gap`], which
//! is fatal; so is one that came before.
//!
//! Source: rescaling R§3.4.1 (R-04).

use std::collections::BTreeMap;

/// A bundle that does not follow the ones before it of its sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[error("bundle {got} of worker {worker} came where {expected} was expected")]
pub struct Gap {
    /// The sender.
    pub worker: usize,
    /// The number that its next bundle must have.
    pub expected: u64,
    /// The number that came.
    pub got: u64,
}

/// The numbers of one worker in one dataflow.
///
/// ```
/// use penstock_progress::caster::{Caster, Gap};
/// let mut caster = Caster::new();
/// assert_eq!([caster.number(), caster.number()], [0, 1]);
/// assert_eq!(caster.admit(7, 0), Ok(()));
/// assert_eq!(caster.admit(7, 2), Err(Gap { worker: 7, expected: 1, got: 2 }));
/// assert_eq!(caster.expected(7), 1);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Caster {
    /// Of the next bundle of this worker.
    next: u64,
    /// Of the next bundle of each other worker that a bundle has come from.
    expected: BTreeMap<usize, u64>,
}

impl Caster {
    /// Of a worker that has neither sent nor received.
    pub fn new() -> Self {
        Self::default()
    }

    /// How many bundles this worker has numbered.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// The number of a bundle that goes out now.
    pub fn number(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
    }

    /// How many bundles of that worker were taken in: the number of its next one.
    pub fn expected(&self, worker: usize) -> u64 {
        self.expected.get(&worker).copied().unwrap_or(0)
    }

    /// From how many workers a bundle was taken in.
    pub fn met(&self) -> usize {
        self.expected.len()
    }

    /// The next number of every sender as this worker, which is `me`, knows it: half of a snapshot, the other half of which are the
    /// counts of its ledgers at the same moment.
    pub fn snapshot(&self, me: usize) -> BTreeMap<usize, u64> {
        let mut next = self.expected.clone();
        next.insert(me, self.next);
        next
    }

    /// The numbers of a worker that has sent nothing and begins with a snapshot.
    pub fn resume(snapshot: BTreeMap<usize, u64>) -> Self {
        let expected = snapshot.into_iter().filter(|(_, next)| *next > 0).collect();
        Caster { next: 0, expected }
    }

    /// Those whose bundles were taken in.
    pub fn senders(&self) -> impl Iterator<Item = usize> + '_ {
        self.expected.keys().copied()
    }

    /// Forgets a worker that is gone for good: its id is never used again.
    pub fn forget(&mut self, worker: usize) {
        self.expected.remove(&worker);
    }

    /// Checks the number of a bundle that is taken in now. There is none after `u64::MAX - 1`.
    ///
    /// # Errors
    /// [`Gap`]; nothing changes.
    pub fn admit(&mut self, worker: usize, number: u64) -> Result<(), Gap> {
        match self.expected.get_mut(&worker) {
            // A peer's snapshot may begin anywhere.
            Some(expected) if *expected == number && number < u64::MAX => *expected += 1,
            None if number == 0 => drop(self.expected.insert(worker, 1)),
            known => return Err(Gap { worker, expected: known.map_or(0, |expected| *expected), got: number }),
        }
        Ok(())
    }
}
