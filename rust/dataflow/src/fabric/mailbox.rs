//! The queue of one worker, and the doorbell that ends its park.
//!
//! Invariant: a message is in the queue before the doorbell rings, and a ring is kept until the next park. So a worker that looks
//! into its queue before it parks sleeps through no message, whenever it comes.
//!
//! Explored by `tests/models.rs`.

use super::sync::{Parker, Queue, Unparker};

pub(crate) struct Mailbox<M> {
    pub(crate) queue: Queue<M>,
    doorbell: Unparker,
}

impl<M> Mailbox<M> {
    /// A mailbox, and the parker that only its worker holds.
    pub(crate) fn new() -> (Self, Parker) {
        let parker = Parker::new();
        let doorbell = parker.unparker().clone();
        (Mailbox { queue: Queue::new(), doorbell }, parker)
    }

    /// Adds a message and rings.
    pub(crate) fn push(&self, message: M) {
        self.queue.push(message);
        self.ring();
    }

    /// Ends the current or the next park of the worker.
    pub(crate) fn ring(&self) {
        self.doorbell.unpark();
    }
}
