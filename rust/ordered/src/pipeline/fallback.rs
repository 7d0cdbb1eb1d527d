//! Whether a pipeline is worth its workers, or faster on the thread of its owner.
//!
//! Pure: it is told what was measured and answers with a lane. The rule: begin on the caller's thread and measure one sample there
//! ([`SAMPLE_NS`] of work, at least one envelope); then measure the workers over a trial; keep what gave more items per second
//! of wall time. The first sample is short and its verdict on the workers is looked at again soon. Workers have to be better by
//! [`GAIN`]: a tie goes to the caller, who needs one core. What was chosen is kept for
//! [`KEEP_NS`] (longer for long envelopes), twice as long each time that it is confirmed. Where the work per item has doubled or halved since the
//! decision it is measured at once. Envelopes of less than [`FLOOR_NS`] of work never leave the caller: handing one over costs as much.
//!
//! Why wall time: it contains what a model would leave out, such as a lock that all operators share, other load on the cores, and what the
//! owner does between two pulls.

/// Where envelopes run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lane {
    /// On the thread that pulls.
    Caller,
    /// On the workers.
    Workers,
}

const SAMPLE_NS: u64 = 100_000;
const SAMPLE_MOST: u64 = 64;
/// The samples after the first, which should cost little, and may be cold or disturbed.
const SAMPLE_AGAIN_NS: u64 = 2_000_000;
/// A sample and a trial are the median of pieces, so that a piece in which others took the core does not decide.
const PIECE_NS: u64 = 400_000;
const PIECE_ENVELOPES: u64 = 12;
const PIECES: usize = 5;
const TRIAL_LONG_NS: u64 = 300_000_000;
const FLOOR_NS: u64 = 1_500;
const CHEAP_NS: u64 = 20_000;
/// The share of the caller's time that workers may need at most; and where the caller has won before, so that noise does not turn it.
const GAIN: f64 = 0.87;
const GAIN_AGAIN: f64 = 0.75;
const KEEP_NS: u64 = 50_000_000;
const KEEP_ENVELOPES: u64 = 64;
const KEEP_MOST_NS: u64 = 5_000_000_000;

#[derive(Debug)]
pub(crate) struct Fallback {
    workers: u64,
    lane: Lane,
    /// Still measuring, or until when the choice holds.
    until_ns: Option<u64>,
    keep_ns: u64,
    won: Option<Lane>,
    /// Whether envelopes took less than [`CHEAP_NS`] of work at the decision.
    cheap: bool,
    /// Whether anything was decided yet.
    seen: bool,
    window: Window,
    /// The pieces of a sample or trial: when the current one began with how much, and what those before took per item.
    piece: Window,
    pieces: Vec<f64>,
    /// Windows in a row in which the work had shifted.
    shifts: u32,
    caller_each: f64,
    /// Work per item at the last decision.
    decided_work: f64,
    /// Envelopes that do not count after a change of the lane.
    skip: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Window {
    begun_ns: u64,
    envelopes: u64,
    items: u64,
    work_ns: u64,
}

impl Window {
    fn wall_each(&self, now_ns: u64) -> f64 {
        now_ns.saturating_sub(self.begun_ns) as f64 / self.items.max(1) as f64
    }

    fn work_each(&self) -> f64 {
        self.work_ns as f64 / self.items.max(1) as f64
    }
}

impl Fallback {
    pub(crate) fn new(workers: usize) -> Self {
        let window = Window::default();
        let lane = Lane::Caller;
        let workers = workers as u64;
        Self {
            workers,
            lane,
            until_ns: None,
            keep_ns: KEEP_NS,
            won: None,
            cheap: false,
            seen: false,
            window,
            piece: window,
            pieces: Vec::new(),
            shifts: 0,
            caller_each: 0.0,
            decided_work: 0.0,
            skip: 0,
        }
    }

    pub(crate) fn lane(&self) -> Lane {
        self.lane
    }

    /// Whether it is enough to be told of some of the envelopes: the choice is the caller, who would pay more for clocks than for work.
    pub(crate) fn is_settled(&self) -> bool {
        self.until_ns.is_some() && self.lane == Lane::Caller && self.cheap
    }

    /// An envelope is about to start where nothing ran before: time before it does not count.
    pub(crate) fn starts(&mut self, now_ns: u64) {
        if self.window.envelopes == 0 {
            self.begin(now_ns);
        }
    }

    fn begin(&mut self, now_ns: u64) {
        self.window = Window { begun_ns: now_ns, ..Window::default() };
        self.piece = self.window;
    }

    /// An output was handed over: how many items went in, and how long operators worked on it.
    pub(crate) fn done(&mut self, now_ns: u64, items: usize, work_ns: u64) {
        if self.skip > 0 {
            self.skip -= 1;
            self.begin(now_ns);
            return;
        }
        let window = &mut self.window;
        window.envelopes += 1;
        window.items += items.max(1) as u64;
        window.work_ns += work_ns;
        match (self.until_ns, self.lane) {
            (None, Lane::Caller) => self.sampled(now_ns),
            (None, Lane::Workers) => self.tried(now_ns),
            (Some(until_ns), _) => self.kept(now_ns, until_ns),
        }
    }

    fn sampled(&mut self, now_ns: u64) {
        let (window, piece) = (self.window, self.piece);
        let piece_work_ns = window.work_ns - piece.work_ns;
        if piece_work_ns >= PIECE_NS || window.envelopes - piece.envelopes >= PIECE_ENVELOPES {
            self.piece_ends(now_ns);
        }
        let enough_ns = if self.seen { SAMPLE_AGAIN_NS } else { SAMPLE_NS };
        if window.work_ns < enough_ns && window.envelopes < SAMPLE_MOST {
            return;
        }
        self.caller_each = self.each(now_ns);
        if window.work_ns / window.envelopes < FLOOR_NS {
            self.decide(now_ns, Lane::Caller);
        } else {
            self.turn(now_ns, Lane::Workers, None);
        }
    }

    fn tried(&mut self, now_ns: u64) {
        let (window, piece) = (self.window, self.piece);
        let piece_ns = now_ns.saturating_sub(piece.begun_ns);
        if piece_ns >= PIECE_NS && window.envelopes - piece.envelopes >= 2 * self.workers {
            self.piece_ends(now_ns);
        }
        let long = now_ns.saturating_sub(window.begun_ns) >= TRIAL_LONG_NS;
        if self.pieces.len() >= PIECES || (long && !self.pieces.is_empty()) {
            let gain = if self.won == Some(Lane::Caller) { GAIN_AGAIN } else { GAIN };
            let better = self.each(now_ns) < gain * self.caller_each;
            self.decide(now_ns, if better { Lane::Workers } else { Lane::Caller });
        }
    }

    fn piece_ends(&mut self, now_ns: u64) {
        let items = self.window.items - self.piece.items;
        self.pieces.push(now_ns.saturating_sub(self.piece.begun_ns) as f64 / items.max(1) as f64);
        self.piece = Window { begun_ns: now_ns, ..self.window };
    }

    /// Wall time per item: the median of the pieces.
    fn each(&mut self, now_ns: u64) -> f64 {
        if self.pieces.is_empty() {
            return self.window.wall_each(now_ns);
        }
        self.pieces.sort_by(f64::total_cmp);
        self.pieces[self.pieces.len() / 2]
    }

    fn kept(&mut self, now_ns: u64, until_ns: u64) {
        // Look at the work of a window, not of one envelope that may be unlike the others.
        if self.window.work_ns < SAMPLE_AGAIN_NS && self.window.envelopes < SAMPLE_MOST {
            return;
        }
        let work = self.window.work_each();
        let worth = self.window.work_ns / self.window.envelopes >= FLOOR_NS;
        let shifted = match self.lane {
            Lane::Caller => work > 2.0 * self.decided_work,
            Lane::Workers => work < 0.5 * self.decided_work,
        };
        self.shifts = if shifted { self.shifts + 1 } else { 0 };
        let shifted = self.shifts >= 2;
        if (shifted || now_ns >= until_ns) && (worth || self.lane == Lane::Workers) {
            if shifted {
                self.won = None;
            }
            self.turn(now_ns, Lane::Caller, None);
        } else {
            self.window = Window { begun_ns: now_ns, ..Window::default() };
        }
    }

    fn decide(&mut self, now_ns: u64, lane: Lane) {
        let again = self.won.replace(lane) == Some(lane);
        let each_ns = self.window.work_ns / self.window.envelopes.max(1);
        self.cheap = each_ns < CHEAP_NS;
        let first = !std::mem::replace(&mut self.seen, true);
        let least = KEEP_NS.max(KEEP_ENVELOPES * each_ns) / if first { 4 } else { 1 };
        self.keep_ns = if again { (self.keep_ns * 2).clamp(least, KEEP_MOST_NS.max(least)) } else { least };
        self.decided_work = self.window.work_each();
        self.turn(now_ns, lane, Some(now_ns + self.keep_ns));
    }

    fn turn(&mut self, now_ns: u64, lane: Lane, until_ns: Option<u64>) {
        // What was under way when the lane changed is neither one's figure.
        self.skip =
            if lane == Lane::Workers && self.lane == Lane::Caller && until_ns.is_none() { self.workers } else { 0 };
        self.lane = lane;
        self.until_ns = until_ns;
        self.shifts = 0;
        self.pieces.clear();
        self.begin(now_ns);
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
            fallback.done(*now_ns, 8, work_ns);
            workers += u64::from(lane == Lane::Workers);
            all += 1;
        }
        workers as f64 / all as f64
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
        fallback.done(now, 8, 5_000_000);
        let share = run(&mut fallback, &mut now, 1_000_000_000, 50_000, 60_000);
        assert!(share < 0.2, "{share}");
    }
}
