//! What lies in queues and reorder buffers: envelopes, and the parts of one that was split.
//!
//! An [`Assembly`] is shared by the parts of one envelope. Each part leaves its result there; the last one to let go of it gets it whole
//! ([`Arc::into_inner`]) and goes on with the envelope. So nobody counts and nobody waits.

use std::sync::Arc;

use crossbeam::queue::ArrayQueue;

use super::gate::Share;
use super::payload::{Fault, Payload};

pub(super) type Outcome<P, E> = Result<P, Fault<E>>;

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
    Data(Outcome<P, E>),
    /// Split for the partitioned operator that comes next; not empty.
    Parts(Vec<(usize, P)>),
}

impl<P: Payload, E> Content<P, E> {
    pub(super) fn share(&self) -> Share {
        let mut share = Share::default();
        let mut add = |payload: &P| {
            share.items += payload.items();
            share.bytes += payload.bytes();
        };
        match self {
            Self::Data(outcome) => outcome.iter().for_each(add),
            Self::Parts(parts) => parts.iter().for_each(|(_, part)| add(part)),
        }
        share
    }
}

/// What a worker takes from a queue.
pub(super) enum Work<P, E> {
    Whole(Envelope<P, E>),
    Part(Arc<Assembly<P, E>>, usize, P),
}

/// An envelope whose parts are under way.
pub(super) struct Assembly<P, E> {
    pub(super) label: Label,
    /// Results as they come.
    pub(super) done: ArrayQueue<Piece<P, E>>,
}

pub(super) struct Piece<P, E> {
    /// Its position in the split.
    pub(super) at: usize,
    pub(super) partition: usize,
    pub(super) outcome: Outcome<P, E>,
    pub(super) work_ns: u64,
}

impl<P, E> Assembly<P, E> {
    pub(super) fn new(label: Label, pieces: usize) -> Self {
        Self { label, done: ArrayQueue::new(pieces.max(1)) }
    }

    /// The pieces in the order of the split.
    pub(super) fn pieces(&self) -> Vec<Piece<P, E>> {
        let mut pieces = std::iter::from_fn(|| self.done.pop()).collect::<Vec<_>>();
        pieces.sort_unstable_by_key(|piece| piece.at);
        pieces
    }
}
