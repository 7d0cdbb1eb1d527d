//! Who sleeps, and how one of them is woken without a lock.
//!
//! A thread that has found nothing to do announces itself, looks once more, and parks. A thread that makes something to do publishes
//! it first and then looks for a sleeper. Invariant: between the two writes and the two reads stands a full fence on either side, so
//! at least one of them sees the other: no sleeper misses what was published before the wake. Who clears a bit owes the
//! token; a token that comes late ends the next park early, which does no harm because every park is in a loop.
//!
//! Explored by `tests/models.rs`.

use super::sync::{AtomicU64, Ordering, Unparker, fence};

pub(crate) struct Sleepers {
    /// One bit per seat: sleeps, or is about to.
    asleep: Box<[AtomicU64]>,
    unparkers: Box<[Unparker]>,
}

impl Sleepers {
    /// One seat per unparker.
    pub(crate) fn new(unparkers: Vec<Unparker>) -> Self {
        let words = unparkers.len().div_ceil(64);
        Self { asleep: (0..words).map(|_| AtomicU64::new(0)).collect(), unparkers: unparkers.into() }
    }

    /// Says that this seat goes to sleep. After that it looks for work once more; parks only if there is none; and retracts.
    pub(crate) fn announce(&self, seat: usize) {
        self.asleep[seat / 64].fetch_or(1 << (seat % 64), Ordering::AcqRel);
        fence(Ordering::SeqCst);
    }

    /// Says that this seat is awake.
    pub(crate) fn retract(&self, seat: usize) {
        self.asleep[seat / 64].fetch_and(!(1 << (seat % 64)), Ordering::AcqRel);
    }

    /// Wakes one sleeper, if there is one. What it is woken for was published before.
    pub(crate) fn wake_one(&self) -> bool {
        fence(Ordering::SeqCst);
        for (at, word) in self.asleep.iter().enumerate() {
            let mut seen = word.load(Ordering::Relaxed);
            while seen != 0 {
                let bit = seen & seen.wrapping_neg();
                let before = word.fetch_and(!bit, Ordering::AcqRel);
                if before & bit != 0 {
                    self.unparkers[at * 64 + bit.trailing_zeros() as usize].unpark();
                    return true;
                }
                seen = before & !bit;
            }
        }
        false
    }

    /// Whether somebody sleeps. Enough of a look where both sides hold the same lock: this one while it publishes and looks here, the
    /// sleeper when it looks once more.
    pub(crate) fn any(&self) -> bool {
        self.asleep.iter().any(|word| word.load(Ordering::Relaxed) != 0)
    }

    /// Wakes all that sleep, each once. Not until nobody sleeps: one that finds nothing and sleeps again at once, on the processor of
    /// who wakes it, would keep both busy with each other.
    pub(crate) fn wake_all(&self) {
        fence(Ordering::SeqCst);
        for (at, word) in self.asleep.iter().enumerate() {
            if word.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let mut seen = word.fetch_and(0, Ordering::AcqRel);
            while seen != 0 {
                let bit = seen & seen.wrapping_neg();
                self.unparkers[at * 64 + bit.trailing_zeros() as usize].unpark();
                seen &= !bit;
            }
        }
    }
}
