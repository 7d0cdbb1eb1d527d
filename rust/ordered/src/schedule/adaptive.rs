//! The scheduler that chooses among the four by what it measures.
//!
//! The rule. Every heuristic serves two slices, in two rounds; a slice lasts [`SLICE_NS`] and until [`SLICE_ITEMS`] items have left the
//! pipeline (at most [`LONGEST_NS`]). The one that got most items out per second is kept, where figures within [`TIE`] count as equal and
//! the order LIP, ET, CT, QST decides: of equally fast ones the first has the least items in flight, hence the lowest latency. It is kept for
//! [`KEEP_NS`], twice as long each time that it wins again, up to [`KEEP_MOST_NS`]; and in any case until what the slices of the others
//! have lost beside it is a [`SHARE`] of the time. It is looked at again at once when the loads shift: when the cost or the selectivity
//! of some operator is twice or half of what it was at the decision.
//!
//! Why. Which heuristic is best depends on costs, selectivities and bounds that change while a pipeline runs, and their order differs
//! from machine to machine; what is wanted is throughput, and it can be measured for the price of a few slices. Two rounds, because a
//! slice that others on the machine disturbed should not decide alone.
//!
//! Invariants: the current choice is an atomic that `pick` reads; the measurements stand behind a lock that `observe` only tries.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::{Ct, Et, Lip, Load, Qst, Scheduler};

const SLICE_NS: u64 = 2_000_000;
const SLICE_ITEMS: u64 = 32;
const LONGEST_NS: u64 = 50_000_000;
const ROUNDS: usize = 2;
const TIE: f64 = 0.03;
const KEEP_NS: u64 = 100_000_000;
const KEEP_MOST_NS: u64 = 3_200_000_000;
/// What of the time slices of the others may lose.
const SHARE: f64 = 0.05;
/// In the order that decides between equals.
const KINDS: usize = 4;

/// Tries LIP, ET, CT and QST for a slice each and keeps the one with the best throughput.
#[derive(Debug, Default)]
pub struct Adaptive {
    lip: Lip,
    et: Et,
    ct: Ct,
    qst: Qst,
    current: AtomicUsize,
    trial: Mutex<Trial>,
}

#[derive(Debug, Default)]
struct Trial {
    phase: Phase,
    begun: Option<(u64, u64)>,
    best: Option<usize>,
    keep_ns: u64,
    /// How long the last trial is paid for.
    owed_ns: u64,
    /// Cost and selectivity of every operator at the decision.
    seen: Vec<(Option<f64>, Option<f64>)>,
}

#[derive(Debug)]
enum Phase {
    /// How many slices are over; what left per nanosecond, summed per heuristic; and how long each was served.
    Trying(usize, [f64; KINDS], [u64; KINDS]),
    Keeping,
}

impl Default for Phase {
    fn default() -> Self {
        Self::Trying(0, [0.0; KINDS], [0; KINDS])
    }
}

impl Trial {
    /// Takes note; the heuristic to use from now on, if it changes.
    fn observe(&mut self, now_ns: u64, left: u64, loads: &[Load]) -> Option<usize> {
        let Some((since_ns, before)) = self.begun else {
            self.begun = Some((now_ns, left));
            return None;
        };
        let (time_ns, items) = (now_ns.saturating_sub(since_ns), left.saturating_sub(before));
        match &mut self.phase {
            Phase::Trying(over, rates, served_ns) => {
                let ripe = time_ns >= SLICE_NS && (items >= SLICE_ITEMS || time_ns >= LONGEST_NS);
                if !ripe {
                    return None;
                }
                self.begun = Some((now_ns, left));
                rates[*over % KINDS] += items as f64 / time_ns as f64;
                served_ns[*over % KINDS] += time_ns;
                *over += 1;
                if *over < ROUNDS * KINDS {
                    return Some(*over % KINDS);
                }
                let top = rates.iter().copied().fold(0.0, f64::max);
                let best = rates.iter().position(|rate| *rate >= top * (1.0 - TIE)).unwrap_or(0);
                let again = self.best.replace(best) == Some(best);
                self.keep_ns = if again { (self.keep_ns * 2).min(KEEP_MOST_NS) } else { KEEP_NS };
                let lost = rates.iter().zip(&*served_ns).map(|(rate, ns)| *ns as f64 * (1.0 - rate / top));
                // Where nothing left at all nothing was lost.
                self.owed_ns = if top > 0.0 { (lost.sum::<f64>() / SHARE) as u64 } else { 0 };
                self.seen = figures(loads).collect();
                self.phase = Phase::Keeping;
                Some(best)
            }
            Phase::Keeping => {
                let shifted = self.shifted(loads);
                if shifted {
                    self.best = None;
                }
                if !shifted && time_ns < self.keep_ns.max(self.owed_ns) {
                    return None;
                }
                self.phase = Phase::default();
                self.begun = Some((now_ns, left));
                Some(0)
            }
        }
    }

    fn shifted(&self, loads: &[Load]) -> bool {
        let moved = |then: Option<f64>, now: Option<f64>| match (then, now) {
            (Some(then), Some(now)) => now > 2.0 * then || now < 0.5 * then,
            (then, now) => then.is_some() != now.is_some(),
        };
        self.seen.iter().zip(figures(loads)).any(|(then, now)| moved(then.0, now.0) || moved(then.1, now.1))
    }
}

fn figures(loads: &[Load]) -> impl Iterator<Item = (Option<f64>, Option<f64>)> {
    loads.iter().map(|load| (load.cost_ns, load.selectivity))
}

impl Adaptive {
    fn used(&self) -> &dyn Scheduler {
        match self.current.load(Ordering::Relaxed) {
            0 => &self.lip,
            1 => &self.et,
            2 => &self.ct,
            _ => &self.qst,
        }
    }
}

impl Scheduler for Adaptive {
    fn pick(&self, loads: &[Load]) -> Option<usize> {
        self.used().pick(loads)
    }

    fn observe(&self, now_ns: u64, left: u64, loads: &[Load]) {
        // With one operator all choose alike.
        if loads.len() < 2 {
            return;
        }
        if let Ok(mut trial) = self.trial.try_lock()
            && let Some(choice) = trial.observe(now_ns, left, loads)
        {
            self.current.store(choice, Ordering::Relaxed);
        }
    }

    fn name(&self) -> String {
        format!("adaptive ({})", self.used().name())
    }
}

#[cfg(test)]
mod tests {
    use super::super::vectors::load;
    use super::*;

    /// Runs in virtual time: items per millisecond that each heuristic gets out, in the order of the tie.
    struct Clock {
        adaptive: Adaptive,
        loads: [Load; 2],
        now_ns: u64,
        left: f64,
        used_ns: [u64; KINDS],
    }

    impl Clock {
        fn new() -> Self {
            let loads = [load(9, 0), load(9, 0)];
            Self { adaptive: Adaptive::default(), loads, now_ns: 0, left: 0.0, used_ns: [0; KINDS] }
        }

        fn run(&mut self, ms: u64, rates: [f64; KINDS]) {
            self.used_ns = [0; KINDS];
            for _ in 0..ms * 10 {
                let at = self.adaptive.current.load(Ordering::Relaxed);
                self.now_ns += 100_000;
                self.left += rates[at] / 10.0;
                self.used_ns[at] += 100_000;
                self.adaptive.observe(self.now_ns, self.left as u64, &self.loads);
            }
        }

        fn share(&self, at: usize) -> f64 {
            self.used_ns[at] as f64 / self.used_ns.iter().sum::<u64>() as f64
        }
    }

    #[test]
    fn the_fastest_is_kept() {
        for best in 0..KINDS {
            let mut rates = [100.0; KINDS];
            rates[best] = 150.0;
            let mut clock = Clock::new();
            clock.run(2000, rates);
            assert!(clock.share(best) > 0.8, "{best}: {:?}", clock.used_ns);
            clock.run(8000, rates);
            assert!(clock.share(best) > 0.95, "{best}: {:?}", clock.used_ns);
        }
    }

    #[test]
    fn of_equals_the_one_with_the_least_in_flight() {
        let mut clock = Clock::new();
        clock.run(2000, [98.0, 100.0, 100.0, 100.0]);
        assert!(clock.share(0) > 0.8, "{:?}", clock.used_ns);
        assert_eq!(clock.adaptive.name(), "adaptive (lip)");
    }

    #[test]
    fn it_looks_again_when_the_loads_shift() {
        let mut clock = Clock::new();
        clock.run(10_000, [100.0, 150.0, 100.0, 100.0]);
        clock.loads[1].cost_ns = Some(250.0);
        clock.run(100, [100.0, 100.0, 100.0, 150.0]);
        assert!(clock.share(3) > 0.5, "{:?}", clock.used_ns);
        clock.loads[0].selectivity = Some(0.4);
        clock.run(100, [100.0, 100.0, 150.0, 100.0]);
        assert!(clock.share(2) > 0.5, "{:?}", clock.used_ns);
    }

    #[test]
    fn it_notices_without_a_shift_too() {
        let mut clock = Clock::new();
        clock.run(10_000, [100.0, 150.0, 100.0, 100.0]);
        clock.run(10_000, [100.0, 100.0, 100.0, 150.0]);
        assert!(clock.share(3) > 0.5, "{:?}", clock.used_ns);
    }

    #[test]
    fn dear_items_are_not_spent_on_trials() {
        // Slices end by the clock, 8 of 50 ms, and one heuristic is much better: three quarters of a trial are lost.
        let mut clock = Clock::new();
        clock.run(400, [0.01, 0.4, 0.01, 0.01]);
        clock.run(5_000, [0.01, 0.4, 0.01, 0.01]);
        assert!(clock.share(1) > 0.95, "{:?}", clock.used_ns);
        clock.run(50_000, [0.01, 0.4, 0.01, 0.01]);
        assert!(clock.share(1) > 0.93, "{:?}", clock.used_ns);
    }

    #[test]
    fn a_pipeline_that_stands_still_ends_its_slices() {
        let mut clock = Clock::new();
        clock.run(1000, [0.0; KINDS]);
        assert!(clock.used_ns.iter().all(|ns| *ns > 0), "{:?}", clock.used_ns);
    }
}
