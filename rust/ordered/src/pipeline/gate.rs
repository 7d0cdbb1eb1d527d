//! How much is in a pipeline, and whether more may come in.
//!
//! Counts envelopes, items and bytes from admission until the output is handed over, or dropped, wherever they are: waiting, worked on, waiting
//! for their order, or ready. An envelope's share follows what it holds, so outputs that explode close the gate. Invariants: envelopes never exceed their
//! limit; items and bytes exceed theirs only by what envelopes that were inside already have grown by, or by one envelope that alone
//! is larger than the limit. Counts are never negative: only who holds an envelope changes its share.
//!
//! So a window of envelopes that all explode at once exceeds a limit by what they grow, and nothing comes in until it is below again.
//!
//! Explored by `tests/models.rs`.

use super::sync::{AtomicUsize, Ordering};

/// What an envelope counts for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Share {
    pub(crate) items: usize,
    pub(crate) bytes: usize,
}

/// How much may be in a pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    pub(crate) envelopes: usize,
    pub(crate) items: usize,
    pub(crate) bytes: usize,
}

pub(crate) struct Gate {
    limits: Limits,
    envelopes: AtomicUsize,
    items: AtomicUsize,
    bytes: AtomicUsize,
}

impl Gate {
    pub(crate) fn new(limits: Limits) -> Self {
        let zero = || AtomicUsize::new(0);
        Self { limits, envelopes: zero(), items: zero(), bytes: zero() }
    }

    /// Takes an envelope in, if there is room. Callers take turns.
    pub(crate) fn admit(&self, share: Share) -> bool {
        let within = |count: &AtomicUsize, more: usize, limit: usize| {
            count.load(Ordering::Acquire).checked_add(more).is_some_and(|sum| sum <= limit)
        };
        let envelopes = self.envelopes.load(Ordering::Acquire);
        let room = envelopes == 0
            || (envelopes < self.limits.envelopes
                && within(&self.items, share.items, self.limits.items)
                && within(&self.bytes, share.bytes, self.limits.bytes));
        if room {
            self.envelopes.fetch_add(1, Ordering::Relaxed);
            self.items.fetch_add(share.items, Ordering::Relaxed);
            self.bytes.fetch_add(share.bytes, Ordering::Relaxed);
        }
        room
    }

    /// An envelope inside has become larger or smaller.
    pub(crate) fn change(&self, before: Share, after: Share) {
        change(&self.items, before.items, after.items);
        change(&self.bytes, before.bytes, after.bytes);
    }

    /// An envelope has left.
    pub(crate) fn leave(&self, share: Share) {
        self.change(share, Share::default());
        // Release: whoever sees the place sees all of the envelope gone.
        self.envelopes.fetch_sub(1, Ordering::Release);
    }

    pub(crate) fn envelopes(&self) -> usize {
        self.envelopes.load(Ordering::Acquire)
    }

    pub(crate) fn held(&self) -> Share {
        Share { items: self.items.load(Ordering::Relaxed), bytes: self.bytes.load(Ordering::Relaxed) }
    }
}

fn change(count: &AtomicUsize, before: usize, after: usize) {
    if after > before {
        count.fetch_add(after - before, Ordering::Relaxed);
    } else if after < before {
        count.fetch_sub(before - after, Ordering::Relaxed);
    }
}
