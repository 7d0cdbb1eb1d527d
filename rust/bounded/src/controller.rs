//! Finds N and B while running: raises them until throughput flattens, lowers them while memory is short.
//!
//! Pure: it is told the time, what has finished on the workers of the process and how full the memory is, and answers with the bounds, which
//! hold for each of them. It watches for a period, longer when fewer than two windows of batches finished in it, and then judges:
//!
//! - growing: larger bounds (four times the batch size, then twice the batches) and those at hand take turns, period by period: a
//!   [`Trial`]. The larger ones stay if they win [`WINS`] pairs before they lose [`LOSSES`], with a gain in sum; those that win the first
//!   three clearly stay at once. Then it tries again;
//! - settled: it rests, at least until what trials have lost is a [`SHARE`] of the time, and then tries again, since bodies and
//!   machines change. Whatever lies above the first bounds has to prove itself once more then, against the next smaller ones, so luck does
//!   not add up;
//! - short of memory (the share at or above [`Limits::high`]): each period halves the batch size, at its least the number of batches,
//!   whatever throughput says, until the share is below [`Limits::low`]. The least bounds are a floor that still works: what fills
//!   memory may be no doing of the scope's, and batches of one item would not empty it;
//! - a period in which the batcher ran out of input says nothing about the bounds and is not judged, nor is the time until the
//!   batches of other bounds have finished.
//!
//! Source: Faucet §5.1: throughput is flat above a small number of batches and a threshold of the batch size, below which it
//! collapses; so a search that stops where it flattens ends with little memory at nearly full speed. Departure: the
//! paper leaves the choice to the user.

use penstock_trial::{Allowance, Rule, Side, Trial};

use crate::bounds::{BoundsError, PERIOD, check};

/// Pairs of periods that larger bounds have to win.
pub const WINS: u32 = 6;
/// Pairs of periods that they may not lose.
pub const LOSSES: u32 = 2;
/// Larger bounds that win the first so many pairs, each by this factor, stay at once.
const CLEAR: (u32, f64) = (3, 1.5);
/// What of the time trials may lose.
const SHARE: f64 = 0.05;

/// What an adaptive controller may do.
#[derive(Clone, Debug, PartialEq)]
pub struct Limits {
    /// Batches: least, first, most.
    pub batches: (u64, u64, u64),
    /// Items per batch: least, first, most.
    pub batch_size: (u64, u64, u64),
    /// How long to watch before a judgement, nanoseconds.
    pub period_ns: u64,
    /// A raise must gain this much throughput to stay: 0.05 is 5 %.
    pub gain: f64,
    /// Share of memory from which on the bounds shrink, and below which they may grow again.
    pub high: f64,
    /// See `high`.
    pub low: f64,
    /// Periods to rest before growth is tried again.
    pub rest: u32,
}

impl Default for Limits {
    fn default() -> Self {
        let period_ns = u64::try_from(PERIOD.as_nanos()).unwrap_or(u64::MAX);
        Limits {
            // What the paper found to be enough for nearly full speed on one worker.
            batches: (2, 4, 64),
            // A batch costs about as much as so many items: below, a scope does little but count batches.
            batch_size: (64, 1024, 1 << 20),
            period_ns,
            gain: 0.05,
            high: 0.85,
            low: 0.7,
            rest: 64,
        }
    }
}

impl Limits {
    pub(crate) fn check(&self) -> Result<(), BoundsError> {
        check(self.batches.0, self.batch_size.0)?;
        check(self.batches.2, self.batch_size.2)?;
        for (what, (least, first, most)) in [("batches", self.batches), ("batch_size", self.batch_size)] {
            if least > first || first > most {
                let (least, most) = if least > first { (least, first) } else { (first, most) };
                return Err(BoundsError::Reversed { what, least, most });
            }
        }
        Ok(())
    }
}

/// What the workers of a process have done so far in a scope.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Batches that have finished.
    pub batches: u64,
    /// Their items.
    pub items: u64,
    /// Batches that were admitted and have not.
    pub unfinished: u64,
}

/// What a controller is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Phase {
    /// The bounds were given.
    Fixed,
    /// Larger bounds are being tried.
    Growing,
    /// Larger bounds gained nothing; or there is room again and growth waits.
    Settled,
    /// Memory is short.
    Short,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Knob {
    Size,
    Batches,
}

/// Larger bounds beside smaller ones, in turn.
#[derive(Clone, Copy, Debug)]
struct Contest {
    knob: Knob,
    small: (u64, u64),
    large: (u64, u64),
    /// Whether the larger ones are in force already, and have to prove that again.
    again: bool,
    trial: Trial,
}

impl Contest {
    fn new(knob: Knob, small: (u64, u64), large: (u64, u64), again: bool, gain: f64) -> Self {
        let trial = Trial::new(Rule { wins: WINS, losses: LOSSES, gain, sweep: Some(CLEAR) });
        Contest { knob, small, large, again, trial }
    }

    /// The bounds of the period to come.
    fn bounds(&self) -> (u64, u64) {
        match self.trial.turn() {
            Side::Incumbent => self.small,
            Side::Challenger => self.large,
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum State {
    Trying(Contest),
    Resting { left: u32 },
    Short,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct Controller {
    limits: Limits,
    bounds: (u64, u64),
    state: State,
    /// Begin of the period that is being watched, and what had been done by then.
    since_ns: u64,
    since: Progress,
    /// When it was last told.
    told_ns: u64,
    /// After a change: so many batches of the old bounds may be unfinished. They are not judged.
    unsettled: u64,
    starved: bool,
    /// Begin of the period with the time before it in which batches of other bounds finished.
    begun_ns: u64,
    allowance: Allowance,
    rate: Option<f64>,
    raises: u64,
    shrinks: u64,
}

impl Controller {
    /// A controller that starts now.
    pub fn new(limits: Limits, now_ns: u64) -> Self {
        let bounds = (limits.batches.1, limits.batch_size.1);
        let mut controller = Controller {
            limits,
            bounds,
            state: State::Resting { left: 0 },
            since_ns: now_ns,
            since: Progress::default(),
            told_ns: now_ns,
            unsettled: 0,
            starved: false,
            begun_ns: now_ns,
            allowance: Allowance::new(SHARE),
            rate: None,
            raises: 0,
            shrinks: 0,
        };
        controller.raise(Knob::Size);
        controller
    }

    /// Number of batches and items per batch.
    pub fn bounds(&self) -> (u64, u64) {
        self.bounds
    }

    /// What it is doing.
    pub fn phase(&self) -> Phase {
        match self.state {
            State::Trying(_) => Phase::Growing,
            State::Resting { .. } => Phase::Settled,
            State::Short => Phase::Short,
        }
    }

    /// Items per second in the last period that was judged.
    pub fn rate(&self) -> Option<f64> {
        self.rate
    }

    /// How often a bound was raised to stay, and how often one shrank.
    pub fn moves(&self) -> (u64, u64) {
        (self.raises, self.shrinks)
    }

    /// When a period has passed: then memory is worth reading and [`Controller::observe`] worth a call.
    pub fn due_ns(&self) -> u64 {
        self.told_ns.saturating_add(self.limits.period_ns)
    }

    /// After a change of the bounds: how many batches have finished in all when those of the old ones have. Until
    /// [`Controller::settle`] is told so nothing is judged.
    pub fn settles_at(&self) -> Option<u64> {
        (self.unsettled > 0).then(|| self.since.batches + self.unsettled)
    }

    /// Takes in what has finished in all, to see whether the batches of the old bounds have.
    pub fn settle(&mut self, now_ns: u64, progress: Progress) {
        if self.settles_at().is_some_and(|batches| progress.batches >= batches) {
            let begun_ns = self.begun_ns;
            self.unsettled = 0;
            self.told_ns = now_ns;
            self.restart(now_ns, progress);
            self.begun_ns = begun_ns;
        }
    }

    /// A batcher had nothing more to admit: the period says nothing about the bounds.
    pub fn starved(&mut self) {
        self.starved = true;
    }

    /// Takes in what has finished in all, and the share of memory in use.
    pub fn observe(&mut self, now_ns: u64, progress: Progress, memory: Option<f64>) {
        self.told_ns = now_ns;
        if memory.is_some_and(|share| share >= self.limits.high) {
            self.shrink();
            self.unsettled = 0;
            self.restart(now_ns, progress);
            return;
        }
        if matches!(self.state, State::Short) {
            if memory.is_none_or(|share| share < self.limits.low) {
                self.state = State::Resting { left: self.limits.rest };
            }
            self.restart(now_ns, progress);
            return;
        }
        if self.settles_at().is_some() {
            return self.settle(now_ns, progress);
        }
        if self.starved {
            self.restart(now_ns, progress);
            return;
        }
        // The window of all workers, as far as it was full when the period began.
        let window = self.bounds.0.max(self.since.unfinished);
        if progress.batches.saturating_sub(self.since.batches) < 2 * window {
            return;
        }
        let elapsed_ns = now_ns.saturating_sub(self.since_ns).max(1);
        let rate = progress.items.saturating_sub(self.since.items) as f64 * 1e9 / elapsed_ns as f64;
        self.rate = Some(rate);
        let before = self.bounds;
        self.judge(now_ns, rate);
        self.unsettled = if self.bounds == before { 0 } else { progress.unfinished };
        self.restart(now_ns, progress);
    }

    fn restart(&mut self, now_ns: u64, progress: Progress) {
        (self.since_ns, self.begun_ns, self.since) = (now_ns, now_ns, progress);
        self.starved = false;
    }

    fn judge(&mut self, now_ns: u64, rate: f64) {
        let spent_ns = now_ns.saturating_sub(self.begun_ns);
        match &mut self.state {
            State::Trying(contest) => {
                let winner = contest.trial.judge(rate, spent_ns);
                self.bounds = contest.bounds();
                let Contest { knob, small, large, again, trial } = *contest;
                let Some(winner) = winner else { return };
                self.allowance.spend(now_ns, trial.lost_ns());
                match (winner, again) {
                    (Side::Challenger, false) => {
                        self.raises += 1;
                        self.bounds = large;
                        self.raise(knob);
                    }
                    (Side::Incumbent, false) => {
                        self.bounds = small;
                        match knob {
                            Knob::Size => self.raise(Knob::Batches),
                            Knob::Batches => self.rest(),
                        }
                    }
                    (Side::Challenger, true) => {
                        self.bounds = large;
                        match knob {
                            Knob::Batches => self.prove(Knob::Size),
                            Knob::Size => self.raise(Knob::Size),
                        }
                    }
                    (Side::Incumbent, true) => {
                        self.shrinks += 1;
                        self.bounds = small;
                        self.prove(knob);
                    }
                }
            }
            State::Resting { left: 0 | 1 } if self.allowance.allows(now_ns, 1.0) => self.prove(Knob::Batches),
            State::Resting { left } => *left = left.saturating_sub(1),
            State::Short => {}
        }
    }

    fn rest(&mut self) {
        self.state = State::Resting { left: self.limits.rest };
    }

    /// Tries a larger bound; of the other kind, or rests, where it is at its most.
    fn raise(&mut self, knob: Knob) {
        let (batches, size) = self.bounds;
        let large = match knob {
            Knob::Size => (batches, size.saturating_mul(4).min(self.limits.batch_size.2)),
            Knob::Batches => (batches.saturating_mul(2).min(self.limits.batches.2), size),
        };
        match (large == self.bounds, knob) {
            (false, _) => self.state = State::Trying(Contest::new(knob, self.bounds, large, false, self.limits.gain)),
            (true, Knob::Size) => self.raise(Knob::Batches),
            (true, Knob::Batches) => self.rest(),
        }
    }

    /// Has a bound above the first one prove itself again; where there is none, tries a larger one.
    fn prove(&mut self, knob: Knob) {
        let large = self.bounds;
        let small = match knob {
            Knob::Size => (large.0, (large.1 / 4).max(self.limits.batch_size.1)),
            Knob::Batches => ((large.0 / 2).max(self.limits.batches.1), large.1),
        };
        if small.0 < large.0 || small.1 < large.1 {
            let contest = Contest::new(knob, small, large, true, self.limits.gain);
            self.bounds = contest.bounds();
            self.state = State::Trying(contest);
        } else if knob == Knob::Batches {
            self.prove(Knob::Size);
        } else {
            self.raise(Knob::Size);
        }
    }

    fn shrink(&mut self) {
        // What was being tried is the first thing to go.
        if let State::Trying(contest) = self.state {
            self.bounds = contest.small;
        }
        self.state = State::Short;
        let (batches, size) = self.bounds;
        let (least_batches, least_size) = (self.limits.batches.0, self.limits.batch_size.0);
        let next = if size > least_size {
            (batches, (size / 2).max(least_size))
        } else {
            ((batches / 2).max(least_batches), size)
        };
        if next != self.bounds {
            self.shrinks += 1;
            self.bounds = next;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn modest() -> Limits {
        Limits { batches: (1, 2, 64), batch_size: (1, 64, 1 << 20), ..Limits::default() }
    }

    fn told(batches: u64, items: u64, unfinished: u64) -> Progress {
        Progress { batches, items, unfinished }
    }

    /// A machine whose throughput depends on the bounds, on a clock of its own.
    struct Simulated {
        controller: Controller,
        now_ns: u64,
        batches: u64,
        items: u64,
    }

    impl Simulated {
        fn new(limits: Limits) -> Self {
            Simulated { controller: Controller::new(limits, 0), now_ns: 0, batches: 0, items: 0 }
        }

        /// One period at this many items per second.
        fn period(&mut self, rate: impl Fn(u64, u64) -> f64, memory: Option<f64>) -> (u64, u64) {
            let period = self.controller.limits.period_ns;
            let (n, b) = self.controller.bounds();
            assert!(self.controller.due_ns() > self.now_ns);
            if let Some(batches) = self.controller.settles_at() {
                self.batches = batches;
                self.controller.settle(self.now_ns, self.progress());
            }
            self.now_ns += period;
            let done = (rate(n, b) * period as f64 / 1e9) as u64;
            self.items += done;
            self.batches += done / b;
            assert!(self.controller.due_ns() <= self.now_ns);
            self.controller.observe(self.now_ns, self.progress(), memory);
            self.controller.bounds()
        }

        fn progress(&self) -> Progress {
            told(self.batches, self.items, self.controller.bounds().0)
        }
    }

    /// As in the paper: batches below a threshold cost much, one batch alone waits for stragglers.
    fn flat_from(threshold: u64, batches: u64) -> impl Fn(u64, u64) -> f64 {
        move |n, b| 1e9 * (b as f64 / threshold as f64).min(1.0) * (n as f64 / batches as f64).min(1.0)
    }

    #[test]
    fn it_grows_until_throughput_flattens_and_then_rests() {
        let mut machine = Simulated::new(modest());
        let rate = flat_from(1_000, 4);
        for _ in 0..26 {
            assert_eq!(machine.controller.phase(), Phase::Growing);
            machine.period(&rate, Some(0.2));
        }
        assert_eq!(machine.controller.bounds(), (4, 1024), "the least powers that reach the plateau");
        assert_eq!(machine.controller.phase(), Phase::Settled);
        assert_eq!(machine.controller.moves(), (3, 0));
        assert_eq!(machine.controller.rate(), Some(1e9));
        for _ in 1..machine.controller.limits.rest {
            assert_eq!(machine.period(&rate, Some(0.2)), (4, 1024));
        }
    }

    #[test]
    fn after_a_rest_it_follows_a_machine_that_has_changed() {
        let mut machine = Simulated::new(Limits { rest: 5, ..modest() });
        for _ in 0..9 {
            machine.period(flat_from(64, 2), None);
        }
        assert_eq!((machine.controller.bounds(), machine.controller.phase()), ((2, 64), Phase::Settled));
        while machine.controller.phase() == Phase::Settled {
            machine.period(flat_from(16_000, 2), None);
        }
        while machine.controller.phase() == Phase::Growing {
            machine.period(flat_from(16_000, 2), None);
        }
        assert_eq!(machine.controller.bounds(), (2, 16_384));
    }

    #[test]
    fn it_never_leaves_its_limits() {
        let limits = Limits { batches: (2, 3, 5), batch_size: (10, 20, 50), rest: 1, ..Limits::default() };
        let mut machine = Simulated::new(limits);
        for turn in 0..60 {
            // More is always better, but now and then memory is short.
            let (n, b) = machine.period(|n, b| 1e8 * (n * b) as f64, Some(if turn % 20 > 14 { 0.9 } else { 0.1 }));
            assert!((2..=5).contains(&n) && (10..=50).contains(&b), "{n} batches of {b}");
        }
    }

    #[test]
    fn short_memory_shrinks_size_then_batches_and_room_lets_it_grow_again() {
        let limits = Limits { batches: (1, 4, 64), batch_size: (16, 64, 1 << 20), rest: 3, ..Limits::default() };
        let mut machine = Simulated::new(limits);
        let rate = flat_from(64, 4);
        let seen: Vec<_> = (0..6).map(|_| machine.period(&rate, Some(0.9))).collect();
        assert_eq!(seen, [(4, 32), (4, 16), (2, 16), (1, 16), (1, 16), (1, 16)]);
        assert_eq!((machine.controller.phase(), machine.controller.moves()), (Phase::Short, (0, 4)));
        // Between the two shares nothing moves.
        assert_eq!(machine.period(&rate, Some(0.8)), (1, 16));
        assert_eq!(machine.controller.phase(), Phase::Short);
        for _ in 0..4 {
            assert_eq!(machine.period(&rate, Some(0.3)), (1, 16), "it rests first");
        }
        while machine.controller.phase() == Phase::Growing || machine.controller.moves().0 == 0 {
            machine.period(&rate, Some(0.3));
        }
        assert_eq!(machine.controller.bounds(), (4, 64));
    }

    #[test]
    fn what_fills_memory_for_ever_leaves_bounds_that_work() {
        let mut machine = Simulated::new(Limits::default());
        for _ in 0..100 {
            machine.period(flat_from(64, 2), Some(0.99));
        }
        assert_eq!((machine.controller.bounds(), machine.controller.phase()), ((2, 64), Phase::Short));
    }

    #[test]
    fn a_raise_under_trial_is_taken_back_before_anything_shrinks() {
        let mut machine = Simulated::new(modest());
        assert_eq!(machine.period(flat_from(1_000, 2), Some(0.1)), (2, 256), "tried");
        assert_eq!(machine.period(flat_from(1_000, 2), Some(0.95)), (2, 32), "half of what it was before");
    }

    #[test]
    fn periods_without_input_or_with_too_few_batches_are_not_judged() {
        let mut machine = Simulated::new(modest());
        for _ in 0..10 {
            machine.controller.starved();
            assert_eq!(machine.period(flat_from(1_000, 4), None), (2, 64));
        }
        assert_eq!(machine.controller.rate(), None);
        // Three of the four batches that make two windows finish in the first period: it goes on watching.
        let mut slow = Controller::new(modest(), 0);
        slow.observe(20_000_000, told(3, 192, 2), None);
        assert_eq!(slow.rate(), None);
        slow.observe(40_000_000, told(4, 256, 2), None);
        assert_eq!(slow.rate(), Some(256.0 / 0.04));
        // Memory is looked at nevertheless.
        slow.observe(60_000_000, told(4, 256, 2), Some(1.0));
        assert_eq!(slow.phase(), Phase::Short);
    }

    #[test]
    fn what_is_left_of_other_bounds_is_not_judged() {
        let mut controller = Controller::new(Limits { period_ns: 10, ..modest() }, 0);
        controller.observe(10, told(4, 256, 2), None);
        assert_eq!((controller.bounds(), controller.settles_at()), ((2, 256), Some(6)));
        let rate = controller.rate();
        controller.settle(11, told(5, 320, 2));
        controller.observe(20, told(5, 320, 2), None);
        assert!(
            controller.settles_at().is_some() && controller.rate() == rate,
            "one of two batches of 64 has finished"
        );
        controller.settle(25, told(6, 384, 2));
        assert_eq!((controller.settles_at(), controller.due_ns()), (None, 35), "a period begins here");
        controller.observe(35, told(10, 384 + 1024, 2), None);
        assert_eq!((controller.rate(), controller.bounds()), (Some(1024.0 * 1e8), (2, 64)));
        // Memory does not wait for that.
        controller.observe(45, told(10, 384 + 1024, 2), Some(0.99));
        assert_eq!((controller.phase(), controller.settles_at()), (Phase::Short, None));
    }

    #[test]
    fn windows_are_those_of_all_workers() {
        // Three workers with two batches each: a period is two windows of six, and six are left of other bounds.
        let mut controller = Controller::new(Limits { period_ns: 10, ..modest() }, 0);
        controller.starved();
        controller.observe(10, told(0, 0, 6), None);
        controller.observe(20, told(11, 704, 6), None);
        assert_eq!((controller.rate(), controller.bounds()), (None, (2, 64)));
        controller.observe(30, told(12, 768, 6), None);
        assert_eq!((controller.bounds(), controller.settles_at()), ((2, 256), Some(18)));
    }

    #[test]
    fn one_unlucky_period_does_not_end_the_growth() {
        let mut machine = Simulated::new(modest());
        let rate = flat_from(1_000, 2);
        machine.period(&rate, None);
        assert_eq!(machine.period(|_, _| 1e6, None), (2, 64), "the larger bounds lost a pair");
        for _ in 0..2 * WINS {
            assert_eq!((machine.controller.phase(), machine.controller.moves()), (Phase::Growing, (0, 0)));
            machine.period(&rate, None);
        }
        assert_eq!((machine.controller.bounds(), machine.controller.moves()), ((2, 256), (1, 0)));
    }

    #[test]
    fn what_does_not_prove_itself_again_goes_back_to_the_first_bounds_and_no_further() {
        let mut machine = Simulated::new(Limits { rest: 2, ..modest() });
        while machine.controller.phase() == Phase::Growing {
            machine.period(flat_from(4_000, 8), None);
        }
        assert_eq!(machine.controller.bounds(), (8, 4096));
        for _ in 0..100 {
            machine.period(flat_from(4_000, 8), None);
            let (n, b) = machine.controller.bounds();
            assert!(n >= 4 && b >= 1024, "what is needed comes through every time: {n} batches of {b}");
        }
        for _ in 0..100 {
            machine.period(flat_from(16, 1), None);
        }
        while machine.controller.phase() == Phase::Growing {
            machine.period(flat_from(16, 1), None);
        }
        assert_eq!((machine.controller.bounds(), machine.controller.moves()), ((2, 64), (5, 5)));
    }

    #[test]
    fn trials_that_lose_much_are_rare() {
        // Larger bounds are ten times slower, so a trial of either kind loses two periods; and without a rest between.
        let mut machine = Simulated::new(Limits { rest: 1, ..modest() });
        let (mut larger, periods) = (0, 20_000);
        for _ in 0..periods {
            larger += u32::from(machine.controller.bounds() != (2, 64));
            machine.period(|n, b| if (n, b) == (2, 64) { 1e9 } else { 1e8 }, None);
        }
        let share = f64::from(larger) * 0.9 / f64::from(periods);
        assert!((0.03..=0.051).contains(&share), "{share} of the time was lost on trials");
    }

    #[test]
    fn luck_does_not_add_up() {
        // What is measured is noise, whatever the bounds are: of a factor of two, and with one period in four ten times slower.
        let noises: [fn(f64) -> f64; 2] = [|luck| 1.0 + luck, |luck| if luck < 0.25 { 0.1 } else { luck }];
        for noise in noises {
            let first = Limits::default();
            let mut machine = Simulated::new(first.clone());
            let (mut state, mut sum, periods) = (7u64, 0.0, 20_000);
            for _ in 0..periods {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let luck = (state >> 33) as f64 / f64::from(1u32 << 31);
                let (n, b) = machine.period(|_, _| 1e9 * noise(luck), None);
                sum += (n * b) as f64;
            }
            let mean = sum / f64::from(periods) / (first.batches.1 * first.batch_size.1) as f64;
            assert!(mean < 2.0, "{mean} times the first bounds on average");
        }
    }

    #[test]
    fn limits_are_checked() {
        let good = Limits::default();
        assert_eq!(good.check(), Ok(()));
        let zero = Limits { batches: (0, 1, 2), ..good.clone() };
        assert_eq!(zero.check(), Err(BoundsError::Zero { what: "batches" }));
        let reversed = Limits { batch_size: (8, 4, 16), ..good.clone() };
        assert_eq!(reversed.check(), Err(BoundsError::Reversed { what: "batch_size", least: 8, most: 4 }));
        let reversed = Limits { batches: (1, 9, 8), ..good.clone() };
        assert_eq!(reversed.check(), Err(BoundsError::Reversed { what: "batches", least: 9, most: 8 }));
        let many = Limits { batches: (1, 2, u64::MAX), ..good };
        assert!(matches!(many.check(), Err(BoundsError::Overflow { .. })));
    }
}
