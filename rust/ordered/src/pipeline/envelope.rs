//! What lies in queues and reorder buffers: envelopes, and the parts of one that was split.
//!
//! Whatever users gave is [`Kept`] while the pipeline has it, so that its drop, whoever does it and why, ends no thread of the pipeline.
//! What it weighs is asked once, where a panic still becomes an error, and travels along.
//!
//! An [`Assembly`] is shared by the parts of one envelope. Each part leaves its result there; the last one to let go of it gets it whole
//! ([`Arc::into_inner`]) and goes on with the envelope. So nobody counts and nobody waits.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crossbeam::queue::ArrayQueue;

use super::gate::Share;
use super::payload::Fault;

pub(super) type Outcome<P, E> = Result<P, Fault<E>>;

/// Something of the user's: a panic in its drop is swallowed (the panic hook has told it).
#[derive(Debug)]
pub(super) struct Kept<T>(Option<T>);

impl<T> Kept<T> {
    pub(super) fn new(value: T) -> Self {
        Self(Some(value))
    }

    pub(super) fn get(&self) -> &T {
        self.0.as_ref().expect("only into_inner and drop take it")
    }

    pub(super) fn into_inner(mut self) -> T {
        self.0.take().expect("only this and drop take it")
    }
}

impl<T> Drop for Kept<T> {
    fn drop(&mut self) {
        let Some(value) = self.0.take() else { return };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| drop(value))) {
            // What a panic carries may panic in its drop, too.
            std::mem::forget(panic);
        }
    }
}

/// What a panic said.
pub(super) fn said(panic: Box<dyn std::any::Any + Send>) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let message = text.or_else(|| panic.downcast_ref::<String>().cloned());
    drop(Kept::new(panic));
    message.unwrap_or_else(|| "(no message)".to_owned())
}

/// One number, between two operators.
pub(super) struct Envelope<P, E> {
    pub(super) label: Label,
    pub(super) content: Content<P, E>,
}

#[derive(Clone, Copy)]
pub(super) struct Label {
    /// What its owner sees.
    pub(super) number: u64,
    /// Its number in the reorder buffers, which see only what runs on workers.
    pub(super) ticket: u64,
    /// What the gate has counted for it.
    pub(super) share: Share,
    /// Items with which it came in, and the time operators have spent on it.
    pub(super) entered: usize,
    pub(super) work_ns: u64,
    /// What it weighs in queues: its items, at least one.
    pub(super) weight: usize,
}

pub(super) enum Content<P, E> {
    Data(Kept<Outcome<P, E>>),
    /// Split for the partitioned operator that comes next; not empty.
    Parts(Vec<Part<P>>),
    /// Nothing any more, behind the stop. Its place passes the reorder buffers, so that what is behind it does not stay there.
    Dropped,
}

/// What one partition gets of an envelope.
pub(super) struct Part<P> {
    pub(super) partition: usize,
    pub(super) payload: Kept<P>,
    pub(super) share: Share,
}

/// What a worker takes from a queue.
pub(super) enum Work<P, E> {
    Whole(Envelope<P, E>),
    Part(Arc<Assembly<P, E>>, usize, Part<P>),
}

/// An envelope whose parts are under way.
pub(super) struct Assembly<P, E> {
    pub(super) label: Label,
    /// Results as they come.
    pub(super) done: ArrayQueue<DonePart<P, E>>,
}

pub(super) struct DonePart<P, E> {
    /// Its position in the split.
    pub(super) at: usize,
    pub(super) partition: usize,
    pub(super) outcome: Kept<Outcome<P, E>>,
    pub(super) work_ns: u64,
}

impl<P, E> Assembly<P, E> {
    pub(super) fn new(label: Label, parts: usize) -> Self {
        Self { label, done: ArrayQueue::new(parts.max(1)) }
    }

    /// The parts in the order of the split.
    pub(super) fn parts(&self) -> Vec<DonePart<P, E>> {
        let mut parts = std::iter::from_fn(|| self.done.pop()).collect::<Vec<_>>();
        parts.sort_unstable_by_key(|part| part.at);
        parts
    }
}
