//! Figures of operators: what schedulers look at, and what the owner of a pipeline may ask for.
//!
//! Counts are relaxed and never reset; a snapshot taken while workers run may be off by what is in their hands. Cost and selectivity
//! are averages that follow changes: each piece of work counts for [`FADE`] of the new value.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crossbeam::utils::CachePadded;

use super::hub::InHand;
use super::places::Places;
use crate::schedule::Load;

const FADE: f64 = 0.1;
/// What no average has: it was never measured.
const NEVER: u64 = u64::MAX;

pub(super) struct Counters {
    fed: CachePadded<Fed>,
    done: CachePadded<Done>,
    pub(super) places: CachePadded<Places>,
}

/// Written by who feeds and who emits.
#[derive(Default)]
struct Fed {
    envelopes: AtomicU64,
    works: AtomicU64,
    arrived: AtomicU64,
    emitted: AtomicU64,
}

/// Written by the workers.
struct Done {
    taken: AtomicU64,
    made: AtomicU64,
    envelopes: AtomicU64,
    items_in: AtomicU64,
    items_out: AtomicU64,
    busy_ns: AtomicU64,
    window_ns: AtomicU64,
    cost: AtomicU64,
    selectivity: AtomicU64,
}

impl Default for Counters {
    fn default() -> Self {
        let zero = || AtomicU64::new(0);
        let done = Done {
            taken: zero(),
            made: zero(),
            envelopes: zero(),
            items_in: zero(),
            items_out: zero(),
            busy_ns: zero(),
            window_ns: zero(),
            cost: AtomicU64::new(NEVER),
            selectivity: AtomicU64::new(NEVER),
        };
        Self { fed: CachePadded::default(), done: CachePadded::new(done), places: CachePadded::new(Places::new()) }
    }
}

fn average(of: &AtomicU64) -> Option<f64> {
    let bits = of.load(Ordering::Relaxed);
    (bits != NEVER).then(|| f64::from_bits(bits))
}

/// A racing update may lose one measurement, which an average survives.
fn follow(of: &AtomicU64, new: f64) {
    let next = average(of).map_or(new, |old| old + FADE * (new - old));
    of.store(next.to_bits(), Ordering::Relaxed);
}

impl Counters {
    pub(super) fn came(&self) {
        self.fed.envelopes.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn arrived(&self, weight: usize) {
        // Release: who counts this finds the work in the queue.
        self.fed.works.fetch_add(1, Ordering::Relaxed);
        self.fed.arrived.fetch_add(weight as u64, Ordering::Release);
    }

    /// What a piece of work weighs, on average.
    pub(super) fn weight(&self) -> f64 {
        let works = self.fed.works.load(Ordering::Relaxed).max(1);
        (self.fed.arrived.load(Ordering::Relaxed) as f64 / works as f64).max(1.0)
    }

    /// All that has ever arrived.
    pub(super) fn arrivals(&self) -> u64 {
        self.fed.arrived.load(Ordering::Acquire)
    }

    pub(super) fn emitted(&self, weight: usize) {
        self.fed.emitted.fetch_add(weight as u64, Ordering::Relaxed);
    }

    pub(super) fn taken(&self, weight: usize) {
        self.done.taken.fetch_add(weight as u64, Ordering::Relaxed);
    }

    pub(super) fn made(&self, weight: usize) {
        self.done.made.fetch_add(weight as u64, Ordering::Relaxed);
        self.done.envelopes.fetch_add(1, Ordering::Relaxed);
    }

    /// Work on so many items.
    pub(super) fn worked(&self, items: usize, ns: u64) {
        self.done.items_in.fetch_add(items as u64, Ordering::Relaxed);
        self.done.busy_ns.fetch_add(ns, Ordering::Relaxed);
        if items > 0 {
            follow(&self.done.cost, ns as f64 / items as f64);
        }
    }

    /// An envelope of so many items was worked on past the queues. Of some only the time is taken, for those before as well.
    pub(super) fn passed(&self, items_in: usize, items_out: usize, each: Option<(u64, u64)>) {
        let done = &*self.done;
        self.fed.envelopes.fetch_add(1, Ordering::Relaxed);
        done.envelopes.fetch_add(1, Ordering::Relaxed);
        done.items_in.fetch_add(items_in as u64, Ordering::Relaxed);
        done.items_out.fetch_add(items_out as u64, Ordering::Relaxed);
        if let Some((ns, stands_for)) = each {
            done.busy_ns.fetch_add(ns * stands_for, Ordering::Relaxed);
            if items_in > 0 {
                follow(&done.cost, ns as f64 / items_in as f64);
                follow(&done.selectivity, items_out as f64 / items_in as f64);
            }
        }
    }

    /// So many items came out of an envelope with so many.
    pub(super) fn gave(&self, items_in: usize, items_out: usize) {
        self.done.items_out.fetch_add(items_out as u64, Ordering::Relaxed);
        if items_in > 0 {
            follow(&self.done.selectivity, items_out as f64 / items_in as f64);
        }
    }

    /// Splitting or merging for this operator took so long.
    pub(super) fn aside(&self, ns: u64) {
        self.done.busy_ns.fetch_add(ns, Ordering::Relaxed);
    }

    /// I.
    pub(super) fn waiting(&self) -> usize {
        let taken = self.done.taken.load(Ordering::Relaxed);
        self.fed.arrived.load(Ordering::Acquire).saturating_sub(taken) as usize
    }

    /// What is done and waits for its order.
    pub(super) fn unordered(&self) -> usize {
        let emitted = self.fed.emitted.load(Ordering::Relaxed);
        self.done.made.load(Ordering::Relaxed).saturating_sub(emitted) as usize
    }

    /// A new window begins.
    pub(super) fn window(&self) {
        self.done.window_ns.store(self.done.busy_ns.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    pub(super) fn load(&self, input: usize, output: usize, most: usize) -> Load {
        let done = &*self.done;
        let since = done.window_ns.load(Ordering::Relaxed);
        Load {
            input,
            output,
            selectivity: average(&done.selectivity),
            cost_ns: average(&done.cost),
            workers: self.places.taken(),
            most,
            spent_ns: done.busy_ns.load(Ordering::Relaxed).saturating_sub(since),
        }
    }

    pub(super) fn stats(&self, name: &Arc<str>, load: Load) -> OperatorStats {
        let done = &*self.done;
        OperatorStats {
            name: Arc::clone(name),
            envelopes_in: self.fed.envelopes.load(Ordering::Relaxed),
            envelopes_out: done.envelopes.load(Ordering::Relaxed),
            items_in: done.items_in.load(Ordering::Relaxed),
            items_out: done.items_out.load(Ordering::Relaxed),
            busy: Duration::from_nanos(done.busy_ns.load(Ordering::Relaxed)),
            load,
        }
    }
}

/// The figures of one operator.
#[derive(Clone, Debug)]
pub struct OperatorStats {
    /// Its name.
    pub name: Arc<str>,
    /// Envelopes that came to it, and that it is done with.
    pub envelopes_in: u64,
    /// See `envelopes_in`.
    pub envelopes_out: u64,
    /// Items that it has worked on.
    pub items_in: u64,
    /// Items that came out.
    pub items_out: u64,
    /// Worker time.
    pub busy: Duration,
    /// As its scheduler sees it: what waits before and behind it, cost, selectivity, workers.
    pub load: Load,
}

/// The figures of a pipeline.
#[derive(Clone, Debug)]
pub struct Stats {
    /// Its operators, in order.
    pub operators: Vec<OperatorStats>,
    /// What workers have in hand at the moment.
    pub in_hand: Vec<InHand>,
    /// Envelopes that were pushed.
    pub pushed: u64,
    /// Envelopes whose outputs were pulled.
    pub pulled: u64,
    /// Envelopes that ran on the thread of the owner.
    pub inline: u64,
    /// Envelopes inside, with their items and bytes: from admission until the output is pulled, or dropped.
    pub in_flight: usize,
    /// See `in_flight`.
    pub items: usize,
    /// See `in_flight`.
    pub bytes: usize,
    /// The most bytes that were inside at a time, as seen when envelopes came in.
    pub most_bytes: usize,
    /// Threads that were started.
    pub threads: usize,
    /// Whether envelopes run on the workers at the moment.
    pub parallel: bool,
    /// The scheduler; an adaptive one says what it uses.
    pub scheduler: String,
}
