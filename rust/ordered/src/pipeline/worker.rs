//! What a worker thread does: it asks the scheduler which operator to serve, serves a quantum, and parks where there is nothing to do.
//! At the end it drops what waits.
//!
//! Invariants: a worker parks only after a whole round in which nothing arrived and no operator that could run had anything for it; so
//! whatever is left behind by one that goes on is found by that one, or by who took its place ([`Places`](super::places::Places)). It
//! never waits for another worker. No panic ends it in silence: one that comes here (a scheduler's, or a mistake of ours) has lost an
//! envelope, so it ends the pipeline, and whoever pulls is told.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crossbeam::sync::Parker;

use super::core::Core;
use super::envelope::said;
use super::payload::Payload;
use crate::schedule::{self, Load};

/// About how long a worker stays with an operator.
const SLICE_NS: f64 = 100_000.0;
/// Pieces of work per turn, at most.
const QUANTUM: usize = 64;
/// The window of CT.
const WINDOW_NS: u64 = 10_000_000;

pub(super) fn run<P: Payload, E: Send + 'static>(core: &Arc<Core<P, E>>, worker: usize, parker: &Parker) {
    let guard = |act: &dyn Fn()| {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(act)) {
            core.hub.breaks(format!("worker {worker} panicked: {}", said(panic)));
        }
    };
    guard(&|| work(core, worker, parker));
    guard(&|| core.clear());
}

fn work<P: Payload, E: Send + 'static>(core: &Arc<Core<P, E>>, worker: usize, parker: &Parker) {
    let mut round = Round { core, worker, loads: Vec::new(), barred: vec![false; core.stages.len()], last: None };
    let mut seen = core.arrivals();
    while !core.hub.stops() {
        if round.serve() {
            seen = core.arrivals();
            round.barred.fill(false);
            continue;
        }
        // A round without work. What arrived since it began may have been for an operator that was looked at already.
        let arrivals = core.arrivals();
        if arrivals != seen {
            seen = arrivals;
            round.barred.fill(false);
            continue;
        }
        core.hub.workers.announce(worker);
        if core.arrivals() == seen && !core.hub.stops() {
            parker.park();
        }
        // Everything is looked at again, also after a wake without an arrival: it came from a worker which left something behind.
        core.hub.workers.retract(worker);
        seen = core.arrivals();
        round.barred.fill(false);
    }
}

struct Round<'c, P, E> {
    core: &'c Core<P, E>,
    worker: usize,
    loads: Vec<Load>,
    /// Operators that had nothing for this worker in this round.
    barred: Vec<bool>,
    last: Option<usize>,
}

impl<P: Payload, E: Send + 'static> Round<'_, P, E> {
    /// Serves one operator; false when no operator had anything.
    fn serve(&mut self) -> bool {
        loop {
            let Some(at) = self.choose() else { return false };
            let stage = &self.core.stages[at];
            if !stage.counters.places.join(stage.most) {
                self.barred[at] = true;
                continue;
            }
            let weight = stage.weight();
            let each_ns = self.loads[at].cost_ns.unwrap_or(SLICE_NS) * weight;
            let quantum = if each_ns > 0.0 { ((SLICE_NS / each_ns) as usize).clamp(1, QUANTUM) } else { QUANTUM };
            let mut now = self.core.hub.now_ns();
            let hub = &self.core.hub;
            let done = stage.consume(quantum, &mut |partition, work| {
                if hub.stops() {
                    stage.discard(work);
                } else {
                    stage.operate(self.worker, partition, work, &mut now);
                }
            });
            stage.counters.places.part();
            if done == 0 {
                self.barred[at] = true;
                continue;
            }
            self.core.scheduler.observe(now, self.core.traffic(), &self.loads);
            self.core.window(now, WINDOW_NS);
            self.last = Some(at);
            return true;
        }
    }

    fn choose(&mut self) -> Option<usize> {
        self.loads.clear();
        self.loads.extend(self.core.stages.iter().map(|stage| stage.load()));
        for (load, barred) in self.loads.iter_mut().zip(&self.barred) {
            if *barred {
                load.most = 0;
            }
        }
        let loads = &self.loads;
        let named = self.core.scheduler.pick(loads).filter(|at| loads.get(*at).is_some_and(Load::runnable));
        let at = named.or_else(|| schedule::latest(loads))?;
        // Who goes elsewhere and leaves work behind wakes somebody for it.
        if self.last.take().is_some_and(|last| last != at && loads[last].runnable()) {
            self.core.hub.workers.wake_one();
        }
        Some(at)
    }
}
