//! Whether a pipeline is worth its workers, or faster on the thread of its owner.
//!
//! Pure: it is told what was measured and answers with a lane. The rule: begin on the caller's thread; then caller and workers take turns, a
//! [`Trial`] of periods of [`PIECE_NS`]; the lane that gave more items per second of wall time stays. Workers have to be better by
//! [`GAIN`]: a tie goes to the caller, who needs one core. What was chosen is kept for [`KEEP_NS`] (longer for long envelopes, less the first
//! time), twice as long each time that it is confirmed, and at least until what trials have lost is a [`SHARE`] of the time. Where the work
//! per item has doubled or halved since, it is measured earlier, as soon as that share allows a trial of such work. Envelopes of less than
//! [`FLOOR_NS`] of work never leave the caller: handing one over costs as much.
//!
//! A period lasts for some envelopes at least, which may be dear. So workers that cannot win are given up as soon as their first results
//! say so: `workers` envelopes at a time, each taking as long as these have, are a speed. And few dear envelopes are let in while workers
//! are tried, since all that is inside has to come out before the caller goes on; that time is part of what the trial costs.
//!
//! Why wall time: it contains what a model would leave out, such as a lock that all operators share, other load on the cores, and what the
//! owner does between two pulls.
//!
//! Invariant: what was under way when the lane changed is neither one's figure.

use penstock_trial::{Allowance, Rule, Side, Trial};

/// Where envelopes run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lane {
    /// On the thread that pulls.
    Caller,
    /// On the workers.
    Workers,
}

const FIRST_NS: u64 = 100_000;
const PIECE_NS: u64 = 400_000;
/// Of cheap envelopes so many are a period of the caller.
const PIECE_MOST: u64 = 64;
/// What is kept is looked at after so much work.
const LOOK_NS: u64 = 2_000_000;
/// From so long on what workers have told shows whether they can win; and by how much they may be better than their first envelopes show.
const LONG_NS: u64 = 20_000_000;
const ROUGH: f64 = 1.5;
const FLOOR_NS: u64 = 1_500;
const CHEAP_NS: u64 = 20_000;
const DEAR_NS: u64 = 1_000_000;
/// How much faster workers must be; and where the caller has won before, so that noise does not turn it.
const GAIN: f64 = 0.15;
const GAIN_AGAIN: f64 = 0.33;
const KEEP_NS: u64 = 50_000_000;
const KEEP_ENVELOPES: u64 = 64;
const KEEP_MOST_NS: u64 = 5_000_000_000;
/// What of the time trials may lose.
const SHARE: f64 = 0.05;

#[derive(Debug)]
pub(crate) struct Fallback {
    workers: u64,
    lane: Lane,
    phase: Phase,
    keep_ns: u64,
    won: Option<Lane>,
    /// Whether envelopes took less than [`CHEAP_NS`] of work at the decision.
    cheap: bool,
    /// Whether anything was decided yet.
    seen: bool,
    allowance: Allowance,
    /// By how much workers fell short of the caller in the last trial.
    shortfall: f64,
    /// Whether an envelope takes [`DEAR_NS`] of work on the caller.
    dear: bool,
    /// Since the lane was entered, or kept.
    turn: Window,
    /// What is measured: after the first envelopes of workers, which come together.
    window: Window,
    /// Envelopes that do not count after a change of the lane.
    skip: u64,
    /// Windows in a row in which the work had shifted.
    shifts: u32,
    /// Work per item on the caller and on the workers, as of late; and at the last decision.
    work: (f64, f64),
    decided_work: f64,
}

#[derive(Debug)]
enum Phase {
    Trying(Trial),
    /// Until then.
    Keeping(u64),
}

#[derive(Clone, Copy, Debug, Default)]
struct Window {
    begun_ns: u64,
    envelopes: u64,
    items: u64,
    work_ns: u64,
}

impl Window {
    fn begin(now_ns: u64) -> Self {
        Self { begun_ns: now_ns, ..Self::default() }
    }

    fn add(&mut self, items: usize, work_ns: u64) {
        self.envelopes += 1;
        self.items += items.max(1) as u64;
        self.work_ns += work_ns;
    }

    fn time_ns(&self, now_ns: u64) -> u64 {
        now_ns.saturating_sub(self.begun_ns)
    }

    /// Items per nanosecond.
    fn rate(&self, now_ns: u64) -> f64 {
        self.items as f64 / self.time_ns(now_ns).max(1) as f64
    }

    /// Nanoseconds of work per item.
    fn work_each(&self) -> f64 {
        self.work_ns as f64 / self.items.max(1) as f64
    }
}

/// The caller is the incumbent: workers have to prove themselves.
fn trial(gain: f64) -> Phase {
    Phase::Trying(Trial::new(Rule { wins: 3, losses: 2, gain, sweep: Some((2, 1.5)) }))
}

impl Fallback {
    pub(crate) fn new(workers: usize) -> Self {
        Self {
            workers: workers as u64,
            lane: Lane::Caller,
            phase: trial(GAIN),
            keep_ns: KEEP_NS,
            won: None,
            cheap: false,
            seen: false,
            allowance: Allowance::new(SHARE),
            shortfall: 0.0,
            dear: false,
            turn: Window::default(),
            window: Window::default(),
            skip: 0,
            shifts: 0,
            work: (0.0, 0.0),
            decided_work: 0.0,
        }
    }

    pub(crate) fn lane(&self) -> Lane {
        self.lane
    }

    /// How many envelopes may be inside at most.
    pub(crate) fn most_inside(&self) -> usize {
        let tried = matches!(self.phase, Phase::Trying(_)) && self.lane == Lane::Workers;
        if tried && self.dear { 2 * self.workers as usize } else { usize::MAX }
    }

    /// Whether it is enough to be told of some of the envelopes: the choice is the caller, who would pay more for clocks than for work.
    pub(crate) fn is_settled(&self) -> bool {
        matches!(self.phase, Phase::Keeping(_)) && self.lane == Lane::Caller && self.cheap
    }

    /// An envelope is about to start where nothing ran before: time before it does not count.
    pub(crate) fn starts(&mut self, now_ns: u64) {
        if self.turn.envelopes == 0 {
            self.turn = Window::begin(now_ns);
        }
        if self.window.envelopes == 0 {
            self.window = Window::begin(now_ns);
        }
    }

    /// An output was handed over: on which lane it was made, how many items went in, and how long operators worked on it.
    pub(crate) fn done(&mut self, now_ns: u64, lane: Lane, items: usize, work_ns: u64) {
        if lane != self.lane {
            // What workers still had when the caller was to go on.
            let lost_ns = self.turn.time_ns(now_ns) as f64 * self.shortfall;
            self.allowance.spend(now_ns, lost_ns as u64);
            (self.turn, self.window) = (Window::begin(now_ns), Window::begin(now_ns));
            return;
        }
        self.turn.add(items, work_ns);
        if self.skip > 0 {
            self.skip -= 1;
            self.window = Window::begin(now_ns);
        } else {
            self.window.add(items, work_ns);
        }
        match self.phase {
            Phase::Keeping(until_ns) => self.kept(now_ns, until_ns),
            Phase::Trying(trial) => match lane {
                Lane::Caller => self.sampled(now_ns, trial),
                Lane::Workers => self.tried(now_ns, trial),
            },
        }
    }

    fn sampled(&mut self, now_ns: u64, mut trial: Trial) {
        let window = self.window;
        let enough_ns = if self.seen { PIECE_NS } else { FIRST_NS };
        if window.work_ns < enough_ns && window.envelopes < PIECE_MOST {
            return;
        }
        self.work.0 = window.work_each();
        self.dear = window.work_ns / window.envelopes >= DEAR_NS;
        if window.work_ns / window.envelopes < FLOOR_NS {
            return self.decide(now_ns, Lane::Caller);
        }
        let winner = trial.judge(window.rate(now_ns), self.turn.time_ns(now_ns));
        debug_assert!(winner.is_none(), "the caller is first in each pair");
        self.phase = Phase::Trying(trial);
        self.enter(now_ns, Lane::Workers);
    }

    fn tried(&mut self, now_ns: u64, mut trial: Trial) {
        let (window, turn) = (self.window, self.turn);
        self.work.1 = turn.work_each();
        let spent_ns = turn.time_ns(now_ns);
        let most = self.workers as f64 / self.work.1.max(f64::MIN_POSITIVE);
        if spent_ns >= LONG_NS && trial.is_hopeless(if self.skip > 0 { ROUGH * most } else { most }) {
            trial.give_up(most, spent_ns);
            return self.end(now_ns, &trial, Lane::Caller);
        }
        if window.time_ns(now_ns) < PIECE_NS || window.envelopes < 2 * self.workers {
            return;
        }
        match trial.judge(window.rate(now_ns), spent_ns) {
            Some(Side::Incumbent) => self.end(now_ns, &trial, Lane::Caller),
            Some(Side::Challenger) => self.end(now_ns, &trial, Lane::Workers),
            None => {
                self.shortfall = trial.shortfall();
                self.phase = Phase::Trying(trial);
                self.enter(now_ns, Lane::Caller);
            }
        }
    }

    fn kept(&mut self, now_ns: u64, until_ns: u64) {
        // Look at the work of a window, not of one envelope that may be unlike the others.
        if self.window.work_ns < LOOK_NS && self.window.envelopes < PIECE_MOST {
            return;
        }
        let work = self.window.work_each();
        let worth = self.window.work_ns / self.window.envelopes >= FLOOR_NS || self.lane == Lane::Workers;
        let shifted = match self.lane {
            Lane::Caller => work > 2.0 * self.decided_work,
            Lane::Workers => work < 0.5 * self.decided_work,
        };
        self.shifts = if shifted { self.shifts + 1 } else { 0 };
        let dearer = if self.decided_work > 0.0 { work / self.decided_work } else { 1.0 };
        let shifted = self.shifts >= 2 && self.allowance.allows(now_ns, dearer);
        if worth && (shifted || now_ns >= until_ns && self.allowance.allows(now_ns, 1.0)) {
            if shifted {
                self.won = None;
            }
            self.phase = trial(if self.won == Some(Lane::Caller) { GAIN_AGAIN } else { GAIN });
            self.enter(now_ns, Lane::Caller);
        } else {
            self.window = Window::begin(now_ns);
        }
    }

    fn end(&mut self, now_ns: u64, trial: &Trial, lane: Lane) {
        self.allowance.spend(now_ns, trial.lost_ns());
        self.shortfall = trial.shortfall();
        self.decide(now_ns, lane);
    }

    fn decide(&mut self, now_ns: u64, lane: Lane) {
        let again = self.won.replace(lane) == Some(lane);
        let each_ns = self.turn.work_ns / self.turn.envelopes.max(1);
        self.cheap = each_ns < CHEAP_NS;
        let first = !std::mem::replace(&mut self.seen, true);
        let least = KEEP_NS.max(KEEP_ENVELOPES * each_ns) / if first { 4 } else { 1 };
        self.keep_ns = if again { (self.keep_ns * 2).clamp(least, KEEP_MOST_NS.max(least)) } else { least };
        self.decided_work = if lane == Lane::Caller { self.work.0 } else { self.work.1 };
        self.phase = Phase::Keeping(now_ns + self.keep_ns);
        self.enter(now_ns, lane);
        self.skip = 0;
    }

    fn enter(&mut self, now_ns: u64, lane: Lane) {
        // The first results of several workers come together: they say when it began, not how fast it is.
        self.skip = if lane == Lane::Workers { self.workers } else { 0 };
        self.lane = lane;
        self.shifts = 0;
        (self.turn, self.window) = (Window::begin(now_ns), Window::begin(now_ns));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs for so long in virtual time: what an envelope of 8 items takes on either lane; the share of envelopes on the workers.
    fn run(fallback: &mut Fallback, now_ns: &mut u64, for_ns: u64, work_ns: u64, workers_ns: u64) -> f64 {
        let (end, mut workers, mut all) = (*now_ns + for_ns, 0, 0);
        while *now_ns < end {
            let lane = fallback.lane();
            fallback.starts(*now_ns);
            *now_ns += if lane == Lane::Caller { work_ns } else { workers_ns };
            fallback.done(*now_ns, lane, 8, work_ns);
            workers += u64::from(lane == Lane::Workers);
            all += 1;
        }
        workers as f64 / all as f64
    }

    /// The same with as many envelopes inside as a pipeline lets in, of which each takes a worker `held_ns`; what of the time was lost beside
    /// the caller.
    fn regret(workers: usize, envelopes: u64, work_ns: u64, workers_ns: u64, held_ns: u64) -> f64 {
        const IN_FLIGHT: usize = 64;
        let (mut fallback, mut now_ns, mut inside, mut lost_ns) = (Fallback::new(workers), 0, 0, 0);
        for _ in 0..envelopes {
            if fallback.lane() == Lane::Workers {
                if inside == 0 {
                    fallback.starts(now_ns);
                }
                inside = inside.max(fallback.most_inside().min(IN_FLIGHT));
            }
            let lane = if inside > 0 { Lane::Workers } else { Lane::Caller };
            if lane == Lane::Workers {
                inside -= 1;
                now_ns += workers_ns;
                lost_ns += workers_ns.saturating_sub(work_ns);
                fallback.done(now_ns, lane, 1, held_ns);
            } else {
                fallback.starts(now_ns);
                now_ns += work_ns;
                fallback.done(now_ns, lane, 1, work_ns);
            }
        }
        lost_ns as f64 / now_ns as f64
    }

    #[test]
    fn dear_work_that_does_not_gain_is_seldom_tried() {
        for workers in [2, 8] {
            for work_ns in [50_000, 1_000_000, 100_000_000, 10_000_000_000] {
                // Slower by a half or by two thirds; operators wait for each other, or what is slow lies between them.
                for workers_ns in [work_ns * 3 / 2, work_ns * 3] {
                    for held_ns in [workers_ns * workers as u64, work_ns] {
                        // So many that the first trial, which nothing was known before, hardly counts.
                        let lost = regret(workers, 200_000, work_ns, workers_ns, held_ns);
                        assert!(
                            lost < 0.05,
                            "{lost} with {workers} workers, {work_ns} ns and {workers_ns} ns on workers"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn workers_that_cannot_win_are_given_up_when_their_first_results_say_so() {
        // One envelope takes a second; on eight workers that hold a lock all the time each takes eight.
        let mut fallback = Fallback::new(8);
        fallback.starts(0);
        fallback.done(1_000_000_000, Lane::Caller, 1, 1_000_000_000);
        assert_eq!((fallback.lane(), fallback.most_inside()), (Lane::Workers, 16));
        for at in 2..=8 {
            fallback.done(at * 1_000_000_000, Lane::Workers, 1, 8_000_000_000);
            assert_eq!(fallback.lane(), Lane::Workers, "as fast as the caller, and it is the first round");
        }
        fallback.done(9_000_000_000, Lane::Workers, 1, 8_000_000_000);
        assert_eq!(fallback.lane(), Lane::Caller, "eight have told");
        // Three times as slow: the first one says enough.
        let mut fallback = Fallback::new(8);
        fallback.starts(0);
        fallback.done(1_000_000_000, Lane::Caller, 1, 1_000_000_000);
        fallback.done(4_000_000_000, Lane::Workers, 1, 24_000_000_000);
        assert_eq!(fallback.lane(), Lane::Caller);
    }

    #[test]
    fn what_was_under_way_at_a_change_is_nobodys() {
        let mut fallback = Fallback::new(2);
        fallback.starts(0);
        fallback.done(10_000_000, Lane::Caller, 1, 10_000_000);
        assert_eq!(fallback.lane(), Lane::Workers);
        let mut now_ns = 10_000_000;
        while fallback.lane() == Lane::Workers {
            now_ns += 6_000_000;
            fallback.done(now_ns, Lane::Workers, 1, 12_000_000);
        }
        let before = fallback.work.0;
        for _ in 0..4 {
            now_ns += 6_000_000;
            fallback.done(now_ns, Lane::Workers, 1, 12_000_000);
            assert_eq!((fallback.lane(), fallback.work.0, fallback.window.items), (Lane::Caller, before, 0));
        }
    }

    #[test]
    fn dear_work_goes_to_the_workers() {
        for work_ns in [20_000, 1_000_000, 300_000_000] {
            let (mut fallback, mut now) = (Fallback::new(2), 0);
            let share = run(&mut fallback, &mut now, work_ns * 1000, work_ns, work_ns / 2 + 1000);
            assert!(share > 0.9, "{work_ns}: {share}");
        }
    }

    #[test]
    fn work_that_does_not_gain_stays_with_the_caller_and_costs_little() {
        for work_ns in [2_000, 50_000, 1_000_000] {
            let (mut fallback, mut now) = (Fallback::new(2), 0);
            run(&mut fallback, &mut now, 300_000_000, work_ns, work_ns * 3);
            let share = run(&mut fallback, &mut now, 5_000_000_000, work_ns, work_ns * 3);
            assert!(share < 0.03, "{work_ns}: {share}");
        }
    }

    #[test]
    fn tiny_work_never_leaves_the_caller() {
        let (mut fallback, mut now) = (Fallback::new(2), 0);
        assert_eq!(run(&mut fallback, &mut now, 100_000_000, 800, 400), 0.0);
    }

    #[test]
    fn it_follows_costs_both_ways() {
        let (mut fallback, mut now) = (Fallback::new(2), 0);
        run(&mut fallback, &mut now, 1_000_000_000, 1_000, 3_000);
        assert_eq!(fallback.lane(), Lane::Caller);
        let share = run(&mut fallback, &mut now, 100_000_000, 100_000, 52_000);
        assert!(share > 0.85, "{share}");
        let share = run(&mut fallback, &mut now, 100_000_000, 1_000, 3_000);
        assert!(share < 0.15, "{share}");
    }

    #[test]
    fn the_first_envelope_alone_decides_nothing_for_ever() {
        // Its first call is cold: 100 times as dear. Workers then seem better, until the caller is measured again.
        let (mut fallback, mut now) = (Fallback::new(2), 0);
        fallback.starts(now);
        now += 5_000_000;
        fallback.done(now, Lane::Caller, 8, 5_000_000);
        let share = run(&mut fallback, &mut now, 1_000_000_000, 50_000, 60_000);
        assert!(share < 0.2, "{share}");
    }
}
