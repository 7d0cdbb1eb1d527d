//! What all operators of one pipeline share: the sleepers, the gate, the outputs that are ready, who works on what.
//!
//! Invariants: outputs are pushed in the order of their numbers, by whoever emits from the last reorder buffer; an output is pushed before
//! its owner is woken; whatever is in a queue is published before a worker is woken.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crossbeam::queue::{ArrayQueue, SegQueue};
use crossbeam::sync::Parker;
use crossbeam::utils::CachePadded;

use super::envelope::{Content, Envelope};
use super::gate::{Gate, Limits, Share};
use super::payload::Payload;
use super::sleepers::Sleepers;

/// Threads that may wait in `pull` and `push_wait` of one pipeline at a time without polling.
const OWNERS: usize = 64;

pub(super) struct Hub<P, E> {
    pub(super) workers: Sleepers,
    owners: Sleepers,
    seats: ArrayQueue<(usize, Parker)>,
    pub(super) gate: Gate,
    output: SegQueue<Envelope<P, E>>,
    /// The weight of what is in `output`.
    ready: AtomicUsize,
    /// Weight that has left the last operator, and outputs.
    left: AtomicU64,
    stop: AtomicBool,
    broken: OnceLock<String>,
    began: Instant,
    held: Box<[CachePadded<Held>]>,
}

/// What a worker has in hand.
#[derive(Default)]
struct Held {
    /// The number of the operator, plus one; 0 for nothing.
    operator: AtomicUsize,
    number: AtomicU64,
    since_ns: AtomicU64,
}

/// An envelope that a worker has in hand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InHand {
    /// The worker.
    pub worker: usize,
    /// The number of the operator, from 0.
    pub operator: usize,
    /// The number of the envelope.
    pub number: u64,
    /// For how long.
    pub time: Duration,
}

impl<P: Payload, E> Hub<P, E> {
    /// For this many workers, whose sleepers are given, and the owner.
    pub(super) fn new(workers: Sleepers, seats: usize, limits: Limits) -> Self {
        let parkers = (0..OWNERS).map(|_| Parker::new()).collect::<Vec<_>>();
        let owners = Sleepers::new(parkers.iter().map(|parker| parker.unparker().clone()).collect());
        let free = ArrayQueue::new(OWNERS);
        for seat in parkers.into_iter().enumerate() {
            let _ = free.push(seat);
        }
        Self {
            workers,
            owners,
            seats: free,
            gate: Gate::new(limits),
            output: SegQueue::new(),
            ready: AtomicUsize::new(0),
            left: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            broken: OnceLock::new(),
            began: Instant::now(),
            held: (0..seats).map(|_| CachePadded::default()).collect(),
        }
    }

    pub(super) fn now_ns(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// The time since `now`, which becomes the present.
    pub(super) fn lap(&self, now: &mut u64) -> u64 {
        let then = std::mem::replace(now, self.now_ns());
        *now - then
    }

    /// Puts out what has come to its turn.
    pub(super) fn emit(&self, envelope: Envelope<P, E>) {
        if let Content::Dropped = envelope.content {
            return self.gate.leave(envelope.label.share);
        }
        self.left.fetch_add(envelope.label.weight as u64, Ordering::Relaxed);
        self.ready.fetch_add(envelope.label.weight, Ordering::Relaxed);
        self.output.push(envelope);
        self.owners.wake_all();
    }

    pub(super) fn take(&self) -> Option<Envelope<P, E>> {
        if self.ready() == 0 {
            return None;
        }
        let envelope = self.output.pop()?;
        self.ready.fetch_sub(envelope.label.weight, Ordering::Relaxed);
        Some(envelope)
    }

    pub(super) fn has_output(&self) -> bool {
        !self.output.is_empty()
    }

    /// The weight of the outputs that are ready.
    pub(super) fn ready(&self) -> usize {
        self.ready.load(Ordering::Relaxed)
    }

    pub(super) fn left(&self) -> u64 {
        self.left.load(Ordering::Relaxed)
    }

    /// Counts anew what the envelope holds.
    pub(super) fn recount(&self, envelope: &mut Envelope<P, E>, share: Share) {
        self.gate.change(envelope.label.share, share);
        envelope.label.share = share;
        envelope.label.weight = share.items.max(1);
    }

    pub(super) fn stops(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Ends the workers as soon as they are done with what they have in hand, and all waits.
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.workers.wake_all();
        self.owners.wake_all();
    }

    /// The order cannot be kept any more: this pipeline is broken, and says so.
    pub(super) fn breaks(&self, why: String) {
        let _ = self.broken.set(why);
        self.stop();
    }

    pub(super) fn broken(&self) -> Option<&str> {
        self.broken.get().map(String::as_str)
    }

    /// Whether an owner waits; see [`Sleepers::any`].
    pub(super) fn owners_wait(&self) -> bool {
        self.owners.any()
    }

    pub(super) fn wake_owners(&self) {
        self.owners.wake_all();
    }

    /// Waits until `ready`, something was put out or given back, or the deadline (for ever without one).
    pub(super) fn wait(&self, deadline: Option<Instant>, mut ready: impl FnMut() -> bool) {
        let Some((seat, parker)) = self.seats.pop() else {
            // More waiting threads than seats: these look again by the clock.
            std::thread::sleep(Duration::from_millis(1));
            return;
        };
        self.owners.announce(seat);
        if !ready() {
            match deadline {
                Some(deadline) => parker.park_deadline(deadline),
                None => parker.park(),
            }
        }
        self.owners.retract(seat);
        let _ = self.seats.push((seat, parker));
    }

    pub(super) fn holds(&self, worker: usize, operator: usize, number: u64, now_ns: u64) {
        let held = &self.held[worker];
        held.number.store(number, Ordering::Relaxed);
        held.since_ns.store(now_ns, Ordering::Relaxed);
        held.operator.store(operator + 1, Ordering::Release);
    }

    pub(super) fn lets_go(&self, worker: usize) {
        self.held[worker].operator.store(0, Ordering::Release);
    }

    pub(super) fn in_hand(&self) -> Vec<InHand> {
        let now_ns = self.now_ns();
        let held = self.held.iter().enumerate().filter_map(|(worker, held)| {
            let operator = held.operator.load(Ordering::Acquire).checked_sub(1)?;
            let time = Duration::from_nanos(now_ns.saturating_sub(held.since_ns.load(Ordering::Relaxed)));
            Some(InHand { worker, operator, number: held.number.load(Ordering::Relaxed), time })
        });
        held.collect()
    }
}
