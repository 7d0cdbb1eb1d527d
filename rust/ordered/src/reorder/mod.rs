//! Buffers that put the outputs of concurrent workers back into the order of their inputs.
//!
//! Owns: the trait [`Reorder`], why an item may be refused, and three buffers behind that trait: [`NonBlocking`], which is the one
//! to use, and its comparators [`Flagged`] (the hand-over of the slides) and [`Locked`] (one lock around everything).
//!
//! Every input has a number, counted from 0 without gaps; every number is sent once, with 0 to k outputs inside its item. The sink
//! is called with them in the order of the numbers, by one thread at a time. Adding an item is apart from emitting it: who finds
//! another thread emitting leaves its item to that one and goes back to work.
//!
//! A buffer has a fixed number of slots: number `t` fits while `next <= t < next + slots`. An item that does not fit comes back
//! ([`Refused`]) and nothing has changed. The thread that holds number `next` is never refused, so a ring of one slot makes progress
//! as long as refused senders try again rather than block.
//!
//! After "Scaling Ordered Stream Processing on Shared-Memory Multicores", part "Reordering Outputs". Departures: the right to emit
//! is handed over by a counter instead of a flag and a second look; a slot is a value that names its number instead of a pointer
//! that may be NULL, so that neither a late nor a repeated number is taken for another, and the exchange that claims it is the test
//! for room, too; `next` is published once per round; a sink that panics breaks the buffer in a
//! way that every sender is told.

use super::sync;

mod handover;
mod locked;
mod ring;
mod unlocked;

pub use locked::Locked;
pub use unlocked::{Flagged, NonBlocking};

use std::fmt;

/// The most slots that a buffer may have.
pub const MOST_SLOTS: usize = 1 << 24;

/// A buffer that restores the order of numbered items.
pub trait Reorder<T: Send>: Send + Sync {
    /// Puts the item of number `t` into its slot; if nobody emits at the moment, emits all that is in order.
    ///
    /// Never waits for another thread, except for the lock of [`Locked`]. When the sink panics in this call the item of number `t` was
    /// taken all the same; it is later calls that say so, and [`broken`](Self::broken).
    ///
    /// # Errors
    /// The item comes back when it does not fit now or never will; see [`Refusal`].
    fn send(&self, t: u64, item: T) -> Result<(), Refused<T>>;

    /// All numbers before this one have left the sink. Published once per round of emission, so a lower bound.
    fn next(&self) -> u64;

    /// How many numbers from [`next`](Self::next) on fit.
    fn slots(&self) -> usize;

    /// What the sink said when it panicked, if it did.
    fn broken(&self) -> Option<&str>;
}

/// Why an item was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// Its number is `slots` or more beyond the next one to leave: try again later.
    Full,
    /// Its number has left already.
    Past,
    /// Its number was sent and waits in its slot.
    Repeated,
    /// The sink has panicked: nothing leaves any more.
    Broken,
}

/// An item that was not taken, with the reason.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", .why.told(*.t, *.next))]
pub struct Refused<T> {
    /// The item, as it was.
    pub item: T,
    /// Its number.
    pub t: u64,
    /// A lower bound of the number that leaves next.
    pub next: u64,
    /// The reason.
    pub why: Refusal,
}

impl Refusal {
    fn told(self, t: u64, next: u64) -> String {
        match self {
            Self::Full => format!("number {t} does not fit yet, {next} has to leave first; send it again later"),
            Self::Past => format!("number {t} has left already; every number is sent once"),
            Self::Repeated => format!("number {t} was sent already; every number is sent once"),
            Self::Broken => format!("number {t} cannot leave: the sink has panicked at number {next}"),
        }
    }
}

impl<T> fmt::Debug for Refused<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { item: _, t, next, why } = self;
        f.debug_struct("Refused").field("t", t).field("next", next).field("why", why).finish_non_exhaustive()
    }
}

/// A number of slots with which no buffer can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a reorder buffer of {slots} slots: give it 1 to {MOST_SLOTS}")]
pub struct NoSlots {
    /// What was asked for.
    pub slots: usize,
}

/// Checks a number of slots.
fn enough(slots: usize) -> Result<usize, NoSlots> {
    if (1..=MOST_SLOTS).contains(&slots) { Ok(slots) } else { Err(NoSlots { slots }) }
}

/// What a panic said.
fn said(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "the sink panicked".to_owned())
}
