//! The scheduler that chooses among the four by what it measures.
//!
//! The rule. One heuristic is in use; each of the others challenges it in turn, in a [`Trial`] of periods that last [`SLICE_NS`] and until
//! [`SLICE_ITEMS`] items have left the pipeline (at most [`LONGEST_NS`]). Who wins meets the next one. Figures within [`TIE`] count as equal, and the
//! order LIP, ET, CT, QST decides: of equally fast ones the first has the least items in flight, hence the lowest latency. Who is left is
//! kept for [`KEEP_NS`], twice as long each time that it wins again, up to [`KEEP_MOST_NS`]; and in any case until what trials have
//! lost is a [`SHARE`] of the time. They begin again earlier when the loads shift: when the cost or the selectivity of some operator is twice
//! or half of what it was at the decision; a trial of what costs more now has to wait as much longer.
//!
//! Why. Which heuristic is best depends on costs, selectivities and bounds that change while a pipeline runs, and their order differs
//! from machine to machine; what is wanted is throughput, and it can be measured for the price of a few slices. In pairs, because a
//! slice that others on the machine disturbed should not decide alone.
//!
//! Invariants: the current choice is an atomic that `pick` reads; the measurements stand behind a lock that `observe` only tries. What was
//! inside at a switch was queued by the heuristic before: a period begins when all of it has left.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use penstock_trial::{Allowance, Rule, Side, Trial};

use super::{Ct, Et, Lip, Load, Qst, Scheduler, Traffic};

const SLICE_NS: u64 = 2_000_000;
const SLICE_ITEMS: u64 = 32;
const LONGEST_NS: u64 = 50_000_000;
const TIE: f64 = 0.03;
const KEEP_NS: u64 = 100_000_000;
const KEEP_MOST_NS: u64 = 3_200_000_000;
/// What of the time trials may lose.
const SHARE: f64 = 0.05;
/// In the order that decides between equals.
const KINDS: usize = 4;

/// Tries LIP, ET, CT and QST against each other and keeps the one with the best throughput.
#[derive(Debug, Default)]
pub struct Adaptive {
    lip: Lip,
    et: Et,
    ct: Ct,
    qst: Qst,
    current: AtomicUsize,
    chooser: Mutex<Chooser>,
}

#[derive(Debug)]
struct Chooser {
    /// The best so far, and the one in use.
    best: usize,
    used: usize,
    contest: Option<Contest>,
    /// Who was kept last.
    kept: Option<usize>,
    keep_ns: u64,
    allowance: Allowance,
    /// When the one in use came into use.
    since_ns: Option<u64>,
    measured: Measured,
    /// Cost and selectivity of every operator at the decision.
    seen: Vec<(Option<f64>, Option<f64>)>,
}

/// The best so far against another one.
#[derive(Debug)]
struct Contest {
    challenger: usize,
    trial: Trial,
}

/// What the period under way is measured from.
#[derive(Clone, Copy, Debug)]
enum Measured {
    /// It begins when so many envelopes have left.
    Behind(u64),
    /// The time, and the items that had left.
    From(u64, u64),
}

impl Default for Chooser {
    fn default() -> Self {
        let (best, used) = (0, 0);
        Self {
            best,
            used,
            contest: Contest::next(best, None),
            kept: None,
            keep_ns: KEEP_NS,
            allowance: Allowance::new(SHARE),
            since_ns: None,
            measured: Measured::Behind(0),
            seen: Vec::new(),
        }
    }
}

impl Contest {
    /// The best so far against the one that comes after `last`, which is the last that it met.
    fn next(best: usize, last: Option<usize>) -> Option<Self> {
        let challenger = (last.map_or(0, |last| last + 1)..KINDS).find(|at| *at != best)?;
        // Of equals the first is kept.
        let gain = if challenger < best { -TIE } else { TIE };
        Some(Self { challenger, trial: Trial::new(Rule { wins: 2, losses: 2, gain, sweep: None }) })
    }
}

impl Chooser {
    /// Takes note; the heuristic to use from now on, if it changes.
    fn observe(&mut self, now_ns: u64, traffic: Traffic, loads: &[Load]) -> Option<usize> {
        let since_ns = *self.since_ns.get_or_insert(now_ns);
        let Some(contest) = &mut self.contest else { return self.keep(now_ns, since_ns, traffic, loads) };
        let (from_ns, before) = match self.measured {
            Measured::From(from_ns, before) => (from_ns, before),
            Measured::Behind(envelopes) => {
                if traffic.left >= envelopes {
                    self.measured = Measured::From(now_ns, traffic.items);
                }
                return None;
            }
        };
        let (time_ns, items) = (now_ns.saturating_sub(from_ns), traffic.items.saturating_sub(before));
        let ripe = time_ns >= SLICE_NS && (items >= SLICE_ITEMS || time_ns >= LONGEST_NS);
        if !ripe {
            return None;
        }
        let rate = items as f64 / time_ns as f64;
        let Some(winner) = contest.trial.judge(rate, now_ns.saturating_sub(since_ns)) else {
            let next = match contest.trial.turn() {
                Side::Incumbent => self.best,
                Side::Challenger => contest.challenger,
            };
            return self.switch(next, now_ns, traffic);
        };
        self.allowance.spend(now_ns, contest.trial.lost_ns());
        if winner == Side::Challenger {
            self.best = contest.challenger;
        }
        self.contest = Contest::next(self.best, Some(contest.challenger));
        if self.contest.is_none() {
            let again = self.kept.replace(self.best) == Some(self.best);
            self.keep_ns = if again { (self.keep_ns * 2).min(KEEP_MOST_NS) } else { KEEP_NS };
            self.seen = figures(loads).collect();
        }
        self.switch(self.best, now_ns, traffic)
    }

    fn keep(&mut self, now_ns: u64, since_ns: u64, traffic: Traffic, loads: &[Load]) -> Option<usize> {
        let dearer = self.dearer(loads);
        let over = match dearer {
            Some(dearer) => self.allowance.allows(now_ns, dearer),
            None => now_ns.saturating_sub(since_ns) >= self.keep_ns && self.allowance.allows(now_ns, 1.0),
        };
        if !over {
            return None;
        }
        if dearer.is_some() {
            self.kept = None;
        }
        self.contest = Contest::next(self.best, None);
        self.switch(self.best, now_ns, traffic)
    }

    /// Uses this one from now on; says so when it was not in use.
    fn switch(&mut self, to: usize, now_ns: u64, traffic: Traffic) -> Option<usize> {
        self.since_ns = Some(now_ns);
        if std::mem::replace(&mut self.used, to) == to {
            self.measured = Measured::From(now_ns, traffic.items);
            return None;
        }
        self.measured = Measured::Behind(traffic.entered);
        Some(to)
    }

    /// Where the loads have shifted since the decision: what an item costs in all beside then.
    fn dearer(&self, loads: &[Load]) -> Option<f64> {
        let moved = |then: Option<f64>, now: Option<f64>| match (then, now) {
            (Some(then), Some(now)) => now > 2.0 * then || now < 0.5 * then,
            (then, now) => then.is_some() != now.is_some(),
        };
        let shifted = |(then, now): (&(Option<f64>, Option<f64>), _)| {
            let now: (Option<f64>, Option<f64>) = now;
            moved(then.0, now.0) || moved(then.1, now.1)
        };
        if !self.seen.iter().zip(figures(loads)).any(shifted) {
            return None;
        }
        let (then, now): (f64, f64) = self
            .seen
            .iter()
            .zip(loads)
            .filter_map(|(then, load)| then.0.zip(load.cost_ns))
            .fold((0.0, 0.0), |sum, pair| (sum.0 + pair.0, sum.1 + pair.1));
        Some(if then > 0.0 { now / then } else { 1.0 })
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

    fn observe(&self, now_ns: u64, traffic: Traffic, loads: &[Load]) {
        // With one operator all choose alike.
        if loads.len() < 2 {
            return;
        }
        if let Ok(mut chooser) = self.chooser.try_lock()
            && let Some(choice) = chooser.observe(now_ns, traffic, loads)
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
    use std::collections::VecDeque;

    use super::super::vectors::load;
    use super::*;

    /// Runs in virtual time: items per millisecond that each heuristic gets out, in the order of the tie.
    struct Clock {
        adaptive: Adaptive,
        loads: [Load; 2],
        now_ns: u64,
        left: f64,
        /// Envelopes of one item that are inside: what queued them decides how fast they leave.
        inside: VecDeque<usize>,
        depth: usize,
        entered: u64,
        used_ns: [u64; KINDS],
        lost_ns: f64,
    }

    impl Clock {
        fn new() -> Self {
            Self::deep(0)
        }

        /// With so many envelopes inside.
        fn deep(depth: usize) -> Self {
            Self {
                adaptive: Adaptive::default(),
                loads: [load(9, 0), load(9, 0)],
                now_ns: 0,
                left: 0.0,
                inside: VecDeque::new(),
                depth,
                entered: 0,
                used_ns: [0; KINDS],
                lost_ns: 0.0,
            }
        }

        fn used(&self) -> usize {
            self.adaptive.current.load(Ordering::Relaxed)
        }

        fn run(&mut self, ms: u64, rates: [f64; KINDS]) {
            const STEP_NS: u64 = 100_000;
            let top = rates.iter().copied().fold(0.0, f64::max);
            (self.used_ns, self.lost_ns) = ([0; KINDS], 0.0);
            for _ in 0..ms * 10 {
                let at = self.used();
                while self.inside.len() < self.depth {
                    self.inside.push_back(at);
                    self.entered += 1;
                }
                let rate = rates[*self.inside.front().unwrap_or(&at)];
                let before = self.left as u64;
                self.now_ns += STEP_NS;
                self.left += rate / 10.0;
                let left = self.left as u64;
                self.inside.drain(..self.inside.len().min((left - before) as usize));
                self.used_ns[at] += STEP_NS;
                if top > 0.0 {
                    self.lost_ns += STEP_NS as f64 * (1.0 - rate / top);
                }
                let traffic = Traffic { entered: self.entered.max(left), left, items: left };
                self.adaptive.observe(self.now_ns, traffic, &self.loads);
            }
        }

        fn share(&self, at: usize) -> f64 {
            self.used_ns[at] as f64 / self.used_ns.iter().sum::<u64>() as f64
        }

        /// What of the time was lost beside the best.
        fn regret(&self) -> f64 {
            self.lost_ns / self.used_ns.iter().sum::<u64>() as f64
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
        // Also where it comes later.
        let mut clock = Clock::new();
        clock.run(2000, [50.0, 50.0, 50.0, 100.0]);
        assert_eq!(clock.adaptive.name(), "adaptive (qst)");
        clock.run(10_000, [98.0, 100.0, 100.0, 100.0]);
        assert_eq!(clock.adaptive.name(), "adaptive (lip)");
    }

    #[test]
    fn it_looks_again_when_the_loads_shift() {
        let mut clock = Clock::new();
        clock.run(10_000, [100.0, 150.0, 100.0, 100.0]);
        clock.loads[1].cost_ns = Some(250.0);
        clock.run(400, [100.0, 100.0, 100.0, 150.0]);
        assert!(clock.share(3) > 0.5, "{:?}", clock.used_ns);
        clock.loads[0].selectivity = Some(0.4);
        clock.run(400, [100.0, 100.0, 150.0, 100.0]);
        assert!(clock.share(2) > 0.5, "{:?}", clock.used_ns);
    }

    #[test]
    fn loads_that_shift_all_the_time_do_not_make_it_try_all_the_time() {
        let mut clock = Clock::new();
        let (mut lost_ns, mut time_ns) = (0.0, 0);
        for turn in 0..400 {
            clock.loads[1].cost_ns = Some(if turn % 2 == 0 { 100.0 } else { 300.0 });
            clock.run(50, [100.0, 10.0, 10.0, 10.0]);
            (lost_ns, time_ns) = (lost_ns + clock.lost_ns, time_ns + clock.used_ns.iter().sum::<u64>());
        }
        let regret = lost_ns / time_ns as f64;
        assert!(regret < 0.1, "{regret}");
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
        // Slices end by the clock, of 50 ms each, and one heuristic is much better: nearly all of a trial is lost.
        let mut clock = Clock::new();
        clock.run(1_000, [0.01, 0.4, 0.01, 0.01]);
        for ms in [5_000, 50_000, 500_000] {
            clock.run(ms, [0.01, 0.4, 0.01, 0.01]);
            // A trial more than the share allows may fall into the time.
            let most = SHARE + 300.0 / ms as f64;
            assert!(clock.regret() < most, "{ms} ms: {} {:?}", clock.regret(), clock.used_ns);
        }
    }

    #[test]
    fn what_was_inside_at_a_switch_counts_for_nobody() {
        // As much is inside as leaves in 10 ms: for a slice, and more, what leaves was queued by the one before.
        for best in 0..KINDS {
            let mut rates = [100.0; KINDS];
            rates[best] = 200.0;
            let mut clock = Clock::deep(1_000);
            clock.run(3_000, rates);
            clock.run(10_000, rates);
            assert_eq!(clock.used(), best);
            assert!(clock.share(best) > 0.9 && clock.regret() < 0.05, "{best}: {:?}", clock.used_ns);
        }
    }

    #[test]
    fn a_pipeline_that_stands_still_ends_its_slices() {
        let mut clock = Clock::new();
        clock.run(1000, [0.0; KINDS]);
        assert!(clock.used_ns.iter().all(|ns| *ns > 0), "{:?}", clock.used_ns);
    }
}
