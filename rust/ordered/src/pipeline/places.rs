//! The places of workers at a queue: how many may consume from it at a time.
//!
//! Invariant: who takes a place finds in the queue what was left there by all who gave one back before. So a worker that has just
//! parted and finds all places taken may go elsewhere, or to sleep: one of them was taken after it parted, by somebody who finds what it
//! has left. Nothing else tells of that, as an ownership that is passed on counts as no arrival.

use std::sync::atomic::{AtomicUsize, Ordering};

pub(super) struct Places(AtomicUsize);

impl Places {
    pub(super) fn new() -> Self {
        Self(AtomicUsize::new(0))
    }

    /// Takes one of so many places.
    pub(super) fn join(&self, most: usize) -> bool {
        let more = |taken| (taken < most).then_some(taken + 1);
        // Acquire: what those before left in the queue.
        self.0.fetch_update(Ordering::Acquire, Ordering::Relaxed, more).is_ok()
    }

    /// Gives it back.
    pub(super) fn part(&self) {
        // Release: what this one leaves in the queue.
        self.0.fetch_sub(1, Ordering::Release);
    }

    pub(super) fn taken(&self) -> usize {
        // Relaxed: one that has parted sees that at least, and so whoever took a place after it.
        self.0.load(Ordering::Relaxed)
    }
}
