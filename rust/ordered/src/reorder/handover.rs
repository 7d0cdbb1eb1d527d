//! Who may emit: the right is with one thread at a time and passes on without waiting.
//!
//! Owns: the two ways, [`Counter`] and [`Flag`]. Invariants: (exclusive) between an [`arrive`](Handover::arrive) or
//! [`leave`](Handover::leave) that returned true and the next `leave` of the same thread no other call returns true, and each
//! such stretch happens before the next one; (nothing stranded) an item that was put before a call of `arrive` is seen by its
//! thread or by the one that has the right, before that one gives it up for good.
#![allow(unsafe_code)]

use super::sync::{AtomicBool, AtomicUsize, Ordering};

/// A way to hand the right to emit over.
///
/// # Safety
/// Implementations keep (exclusive), on which the access to the sink relies.
pub(super) unsafe trait Handover: Send + Sync {
    /// Nobody has the right.
    fn new() -> Self;

    /// Called after an item was put. Whether this thread has the right now; otherwise who has it was told to look again.
    fn arrive(&self) -> bool;

    /// Called after all that was in order was emitted. `seen`, 1 after `arrive`, is how many arrivals this thread has answered for.
    /// Whether it (still, or again) has the right and has to emit once more.
    fn leave(&self, seen: &mut usize, ready: impl Fn() -> bool) -> bool;
}

/// Counts arrivals that nobody has answered for yet: who makes it 1 has the right until it makes it 0.
///
/// Both steps read and write in one, so the second look of the slides is part of the step that gives the right up: an arrival comes
/// either before it, and is counted, or after it, and finds 0.
pub(super) struct Counter(AtomicUsize);

// SAFETY: (exclusive) `arrive` returns true only to who found 0. The count stays above 0 until the `leave` of that thread subtracts
// all of it, since `seen` is what it has found there, and others only add. Each change reads what the one before has written, with
// acquire and release, so one thread's stretch happens before the next one's.
unsafe impl Handover for Counter {
    fn new() -> Self {
        Self(AtomicUsize::new(0))
    }

    fn arrive(&self) -> bool {
        // Release: the item, for who has the right. Acquire: the sink, from who had it.
        self.0.fetch_add(1, Ordering::AcqRel) == 0
    }

    fn leave(&self, seen: &mut usize, _: impl Fn() -> bool) -> bool {
        // Release: the sink, to who comes next. Acquire: the items of all who were counted.
        *seen = self.0.fetch_sub(*seen, Ordering::AcqRel) - *seen;
        *seen > 0
    }
}

/// A flag that is tried, cleared, and followed by a second look, as in the slides.
///
/// Were it cleared by a store, the look behind it could come first, and an item whose sender has still found the flag set would stay
/// behind. So it is cleared by an exchange, which reads what such senders have written (a full fence would do, too, but the
/// model checker takes that for wrong).
pub(super) struct Flag(AtomicBool);

// SAFETY: (exclusive) only who changes the flag from false to true is told so, and only that thread sets it to false again. Taking
// acquires what clearing has released.
unsafe impl Handover for Flag {
    fn new() -> Self {
        Self(AtomicBool::new(false))
    }

    fn arrive(&self) -> bool {
        !self.0.swap(true, Ordering::AcqRel)
    }

    fn leave(&self, _: &mut usize, ready: impl Fn() -> bool) -> bool {
        self.0.swap(false, Ordering::AcqRel);
        ready() && !self.0.swap(true, Ordering::AcqRel)
    }
}
