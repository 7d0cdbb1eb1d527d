//! What the threads of a pipeline share.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::envelope::Envelope;
use super::hub::Hub;
use super::payload::Payload;
use super::stage::Stage;
use crate::schedule::{Scheduler, Traffic};

pub(super) struct Core<P, E> {
    pub(super) hub: Arc<Hub<P, E>>,
    pub(super) stages: Vec<Arc<Stage<P, E>>>,
    pub(super) scheduler: Box<dyn Scheduler>,
    /// The next ticket.
    tickets: AtomicU64,
    /// When the window of CT began.
    window_ns: AtomicU64,
}

impl<P: Payload, E: Send + 'static> Core<P, E> {
    pub(super) fn new(hub: Arc<Hub<P, E>>, stages: Vec<Arc<Stage<P, E>>>, scheduler: Box<dyn Scheduler>) -> Self {
        Self { hub, stages, scheduler, tickets: AtomicU64::new(0), window_ns: AtomicU64::new(0) }
    }

    /// All that has ever arrived anywhere: changes whenever there is something new to do.
    pub(super) fn arrivals(&self) -> u64 {
        self.stages.iter().map(|stage| stage.counters.arrivals()).fold(0, u64::wrapping_add)
    }

    /// An envelope with this ticket comes to the first operator.
    pub(super) fn enters(&self, ticket: u64) {
        self.tickets.store(ticket + 1, Ordering::Relaxed);
    }

    /// What has gone through the workers. Items may be a few envelopes ahead.
    pub(super) fn traffic(&self) -> Traffic {
        let left = self.stages.last().map_or(0, |stage| stage.ring.next());
        Traffic { entered: self.tickets.load(Ordering::Relaxed), left, items: self.hub.left() }
    }

    /// Begins a new window when the current one is over; one worker does.
    pub(super) fn window(&self, now_ns: u64, length_ns: u64) {
        let began = self.window_ns.load(Ordering::Relaxed);
        let over = now_ns.saturating_sub(began) >= length_ns;
        if over && self.window_ns.compare_exchange(began, now_ns, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            self.stages.iter().for_each(|stage| stage.counters.window());
        }
    }

    /// Drops what waits, behind the stop. Who may have put something into a queue calls it afterwards, so nothing stays when all such
    /// have: what others put in meanwhile they find themselves.
    pub(super) fn clear(&self) {
        // In the order of the operators: what leaves a reorder buffer comes to the next queue.
        for stage in &self.stages {
            stage.consume(usize::MAX, &mut |_, work| stage.discard(work));
        }
        while let Some(Envelope { label, content }) = self.hub.take() {
            drop(content);
            self.hub.gate.leave(label.share);
        }
    }

    /// Whether a reorder buffer could still refuse this ticket.
    pub(super) fn fits(&self, ticket: u64) -> bool {
        self.stages.iter().all(|stage| ticket < stage.ring.next() + stage.ring.slots() as u64)
    }
}
