//! How the benches against peers measure, and the one line of JSON that each case becomes.
//!
//! Owns: interleaving, repeats, and the shape of a result. Invariants: a ratio above 1 always means that ours is better by
//! that factor; `ours` and `peer` are medians and `ratio` is their quotient, or the median of the pairs where `ratio_of` says so, or null where `no_ratio` says
//! why; what the machine did meanwhile stands beside it.
//!
//! Only ratios taken side by side are worth anything on a machine that is shared, so [`compare`] runs both sides in
//! turn and changes who goes first. A pair from which the machine's host took CPU is measured again while there is time, and a
//! line that has one is marked. Both sides have to do the same work on the same input; each bench checks that
//! outside the part that is timed.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};

use crate::machine::{self, Usage};

/// The release of timely that the benches compare with.
pub const TIMELY: &str = "0.31.0";

/// Seconds that a whole bench may take: with `--quick`, and without.
const QUICK_S: f64 = 30.0;
const FULL_S: f64 = 60.0;
/// The greatest budget that can be asked for, seconds.
pub const MOST_S: f64 = 86_400.0;
/// Pairs of repeats: at least, also where the budget is spent, and at most.
const LEAST: usize = 3;
const MOST: usize = 201;

/// What the command line asks for.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Fewer or smaller cases, so that the bench ends within 45 s.
    pub quick: bool,
    /// Budget of the whole bench in seconds; default 30 when quick, else 60.
    pub seconds: Option<f64>,
}

impl Options {
    /// The time for one of `cases` cases, preparation included.
    #[must_use]
    pub fn budget(&self, cases: usize) -> Duration {
        let whole = self.seconds.unwrap_or(if self.quick { QUICK_S } else { FULL_S });
        Duration::from_secs_f64(whole / cases.max(1) as f64)
    }
}

/// When a quick bench has to come to its end, after it was asked for; see [`end_in`].
pub const QUICK_END: Duration = Duration::from_secs(38);

static END: OnceLock<Instant> = OnceLock::new();

/// From that moment on one turn that counts is enough for a case, also where three would be made: on a machine that
/// others keep busy a bench then says less, but ends in time. The first call counts.
pub fn end_in(time: Duration) {
    let _ = END.set(Instant::now() + time);
}

/// Whether the moment of [`end_in`] has come.
pub fn ended() -> bool {
    END.get().is_some_and(|end| Instant::now() >= *end)
}

/// Which direction of a figure is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Better {
    /// Times: the ratio is peer / ours.
    Lower,
    /// Rates: the ratio is ours / peer.
    Higher,
}

impl Better {
    fn ratio(self, ours: f64, peer: f64) -> f64 {
        match self {
            Self::Lower => peer / ours,
            Self::Higher => ours / peer,
        }
    }
}

/// The figures of both sides, one of each per repeat.
#[derive(Clone, Debug)]
pub struct Paired {
    /// Ours, in the order of the repeats.
    pub ours: Vec<f64>,
    /// The peer's, in the order of the repeats.
    pub peer: Vec<f64>,
    /// What this process and others used of the CPUs meanwhile.
    pub usage: Usage,
    /// The turn of each pair; that of the first one, which does not count, is 0. Empty for figures that were taken in another way.
    pub turns: Vec<usize>,
    /// Pairs that were set aside because the host took CPU from them, and measured again.
    pub again: usize,
    /// Whether pairs from which the host took CPU are among the figures: there was no time for enough others.
    pub disturbed: bool,
}

impl Paired {
    /// Figures that were taken in another way than by [`compare`].
    #[must_use]
    pub fn new(ours: Vec<f64>, peer: Vec<f64>, usage: Usage) -> Self {
        Self { ours, peer, usage, turns: Vec::new(), again: 0, disturbed: false }
    }

    /// Of what was noted in every turn, what belongs to the pairs that count.
    #[must_use]
    pub fn kept<T: Clone>(&self, every: &[T]) -> Vec<T> {
        self.turns.iter().map(|&turn| every[turn].clone()).collect()
    }

    /// Whether these figures are doubtful.
    #[must_use]
    pub fn is_noisy(&self) -> bool {
        let above = |cpus: Option<f64>| cpus.is_some_and(|cpus| cpus > machine::NOISY);
        let taken = if self.again > 0 { self.disturbed } else { above(self.usage.stolen) };
        taken || above(self.usage.foreign)
    }
}

/// Runs both sides in turn until the budget is spent, at least three times each, after one turn that does not count.
/// (Once when [`end_in`] says that it is late.)
///
/// Each closure does one repeat and returns its figure. Repeats of some 20 ms and more are best: long enough for the
/// clock and the scheduler, short enough that both sides see the same neighbours.
pub fn compare(budget: Duration, ours: impl FnMut() -> f64, peer: impl FnMut() -> f64) -> Paired {
    compare_beside(budget, ours, peer, machine::stolen)
}

/// [`compare`] with a clock of what the host has taken, seconds.
fn compare_beside(
    budget: Duration,
    mut ours: impl FnMut() -> f64,
    mut peer: impl FnMut() -> f64,
    stolen: impl Fn() -> Option<f64>,
) -> Paired {
    let begin = Instant::now();
    ours();
    peer();
    let meter = machine::Meter::start();
    let (mut quiet, mut disturbed) = (Vec::new(), Vec::new());
    let mut longest = Duration::ZERO;
    loop {
        let turns = quiet.len() + disturbed.len();
        let within = begin.elapsed() + longest <= budget;
        let more = match turns {
            0 => true,
            _ if ended() => false,
            // Only what counts counts while there is time; then all does.
            _ if within => quiet.len() < MOST,
            _ => turns < LEAST,
        };
        if !more {
            break;
        }
        let (turn, before) = (Instant::now(), stolen());
        let pair = if turns % 2 == 0 {
            let mine = ours();
            (mine, peer())
        } else {
            let other = peer();
            (ours(), other)
        };
        let took = turn.elapsed();
        longest = longest.max(took);
        let taken = stolen().zip(before).map_or(0.0, |(after, before)| after - before);
        let to = if taken > machine::NOISY * took.as_secs_f64() { &mut disturbed } else { &mut quiet };
        to.push((pair, turns + 1));
    }
    let usage = meter.stop();
    let missing = LEAST.saturating_sub(quiet.len()).min(disturbed.len());
    let (again, kept) = (disturbed.len(), disturbed.into_iter().take(missing));
    let (pairs, turns): (Vec<_>, _) = quiet.into_iter().chain(kept).unzip();
    let (ours, peer) = pairs.into_iter().unzip();
    Paired { ours, peer, usage, turns, again, disturbed: missing > 0 }
}

/// One result.
#[derive(Clone, Debug)]
pub struct Case {
    case: String,
    unit: String,
    better: Better,
    paired: Paired,
    /// Why there is no ratio, where there is none.
    no_ratio: Option<&'static str>,
    /// Whether the pairs are of different work each, so that medians over them are not comparable.
    of_pairs: bool,
    conditions: Map<String, Value>,
}

impl Case {
    /// A case that names the peer and the parameters, such as `w2 keys=2^20 vs timely 0.31 fast hash`.
    pub fn new(case: impl Into<String>, unit: impl Into<String>, better: Better, paired: Paired) -> Self {
        Self {
            case: case.into(),
            unit: unit.into(),
            better,
            paired,
            no_ratio: None,
            of_pairs: false,
            conditions: Map::new(),
        }
    }

    /// Adds what else one must know to repeat or judge the figure.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.conditions.insert(name.into(), value.into());
        self
    }

    /// Takes the ratio away, and says why: what is compared cannot be told apart from something else.
    #[must_use]
    pub fn without_ratio(mut self, why: &'static str) -> Self {
        self.no_ratio = Some(why);
        self
    }

    /// Says that each pair is of work of its own, the same on both sides: the ratio is then the median of the pairs', and all of them are one
    /// repeat.
    #[must_use]
    pub fn of_pairs(mut self) -> Self {
        self.of_pairs = true;
        self
    }

    /// How many times better ours is, from the medians, or from the pairs.
    #[must_use]
    pub fn ratio(&self) -> f64 {
        if self.of_pairs {
            return median(&self.pairs());
        }
        self.better.ratio(median(&self.paired.ours), median(&self.paired.peer))
    }

    /// The ratio of each pair.
    fn pairs(&self) -> Vec<f64> {
        let Paired { ours, peer, .. } = &self.paired;
        ours.iter().zip(peer).map(|(ours, peer)| self.better.ratio(*ours, *peer)).collect()
    }

    /// The result as it is printed.
    #[must_use]
    pub fn to_json(&self, bench: &str, options: &Options) -> Value {
        let Paired { ours, peer, usage, again, .. } = &self.paired;
        let pairs = self.pairs();
        let mut conditions = json!({
            "versions": {
                "penstock": env!("CARGO_PKG_VERSION"), "timely": TIMELY, "rustc": env!("PENSTOCK_RUSTC"),
            },
            "cores": machine::cores(),
            "cpu": machine::cpu(),
            "profile": env!("PENSTOCK_PROFILE"),
            "quick": options.quick,
            "repeats": if self.of_pairs { 1 } else { ours.len() },
            "better": if self.better == Better::Lower { "lower" } else { "higher" },
            "ratio_of": if self.of_pairs { "pairs" } else { "medians" },
            "paired_ratio": self.no_ratio.is_none().then(|| median(&pairs)),
            "paired_ratio_range": self.no_ratio.is_none().then(|| range(&pairs)),
            "own_cpu": usage.own,
            "foreign_cpu": usage.foreign,
            "stolen_cpu": usage.stolen,
            "pairs_again": again,
            "noisy": self.paired.is_noisy(),
            "load": machine::load(),
        });
        let told = conditions.as_object_mut().expect("it is an object");
        told.extend(self.no_ratio.map(|why| ("no_ratio".into(), why.into())));
        told.extend(self.conditions.clone());
        json!({
            "name": bench,
            "case": self.case,
            "unit": self.unit,
            "ours": median(ours),
            "peer": median(peer),
            "ratio": self.no_ratio.is_none().then(|| self.ratio()),
            "ours_range": range(ours),
            "peer_range": range(peer),
            "conditions": conditions,
        })
    }
}

/// Where the results of one bench go: standard output, one line each, as soon as they are there.
#[derive(Debug)]
pub struct Report {
    bench: &'static str,
    options: Options,
    cases: usize,
}

impl Report {
    /// For the bench of this name.
    #[must_use]
    pub fn new(bench: &'static str, options: &Options) -> Self {
        Self { bench, options: options.clone(), cases: 0 }
    }

    /// Prints a result.
    pub fn case(&mut self, case: Case) {
        use std::io::Write;
        self.cases += 1;
        let mut out = std::io::stdout().lock();
        let line = case.to_json(self.bench, &self.options);
        // Whoever read us is gone: there is nobody left to measure for.
        if writeln!(out, "{line}").and_then(|()| out.flush()).is_err() {
            std::process::exit(1);
        }
    }

    /// How many results there were so far.
    #[must_use]
    pub fn cases(&self) -> usize {
        self.cases
    }
}

/// Runs `work` once and returns how many nanoseconds each of its `items` took.
pub fn nanoseconds_each(items: usize, work: impl FnOnce()) -> f64 {
    let begin = Instant::now();
    work();
    begin.elapsed().as_nanos() as f64 / items as f64
}

/// Runs `work` once and returns how many millions of its `items` it did in a second.
pub fn millions_per_second(items: usize, work: impl FnOnce()) -> f64 {
    1e3 / nanoseconds_each(items, work)
}

/// The middle value; of an even number the mean of the two in the middle.
///
/// # Panics
/// When there is none.
#[must_use]
pub fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 { values[middle] } else { f64::midpoint(values[middle - 1], values[middle]) }
}

fn range(values: &[f64]) -> [f64; 2] {
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    [least, values.iter().copied().fold(f64::NEG_INFINITY, f64::max)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paired(ours: &[f64], peer: &[f64]) -> Paired {
        Paired::new(ours.to_vec(), peer.to_vec(), Usage::default())
    }

    #[test]
    fn above_one_is_better_for_times_and_for_rates() {
        let time = Case::new("t", "ns", Better::Lower, paired(&[1.0, 2.0, 9.0], &[8.0, 5.0, 6.0]));
        assert_eq!(time.ratio(), 3.0);
        let rate = Case::new("r", "M/s", Better::Higher, paired(&[1.0, 2.0, 9.0], &[8.0, 5.0, 6.0]));
        assert_eq!(rate.ratio(), 2.0 / 6.0);
    }

    #[test]
    fn pairs_of_different_work_are_judged_by_the_pairs() {
        // Ours is better in two of three, and worse by the medians, which are of different pairs.
        let case = Case::new("t", "instructions", Better::Lower, paired(&[4.0, 10.0, 1.0], &[5.0, 2.0, 2.0]));
        assert_eq!(case.ratio(), 0.5);
        let line = case.of_pairs().to_json("join", &Options::default());
        assert_eq!((line["ratio"].as_f64(), &line["conditions"]["ratio_of"]), (Some(1.25), &json!("pairs")));
        assert_eq!(line["conditions"]["repeats"], 1, "each was done once");
    }

    #[test]
    fn a_line_has_what_readers_of_it_rely_on() {
        let case = Case::new("w1 vs x", "ns", Better::Lower, paired(&[2.0, 4.0], &[8.0, 4.0])).with("rows", 7);
        let line = case.to_json("frontier", &Options::default());
        assert_eq!(
            (&line["name"], &line["case"], &line["unit"]),
            (&json!("frontier"), &json!("w1 vs x"), &json!("ns"))
        );
        assert_eq!(
            (line["ours"].as_f64(), line["peer"].as_f64(), line["ratio"].as_f64()),
            (Some(3.0), Some(6.0), Some(2.0))
        );
        assert_eq!((&line["ours_range"], &line["peer_range"]), (&json!([2.0, 4.0]), &json!([4.0, 8.0])));
        let conditions = &line["conditions"];
        assert_eq!(conditions["versions"]["timely"], TIMELY);
        assert_eq!((&conditions["rows"], &conditions["repeats"]), (&json!(7), &json!(2)));
        assert!(conditions["cores"].as_u64().is_some_and(|cores| cores > 0));
        assert_eq!(conditions["paired_ratio_range"], json!([1.0, 4.0]));
    }

    /// Compares two sides of a millisecond, of which the host takes an hour from some pairs; each gives the number of its pair.
    fn beside_a_host(budget: Duration, takes: impl Fn(usize) -> bool) -> Paired {
        let (turns, lost) = (std::cell::Cell::new(0), std::cell::Cell::new(0.0));
        let side = || {
            std::thread::sleep(Duration::from_millis(1));
            turns.set(turns.get() + 1);
            if turns.get() % 2 == 0 && takes(turns.get() / 2 - 1) {
                lost.set(lost.get() + 3_600.0);
            }
            f64::from(u32::try_from((turns.get() - 1) / 2).unwrap())
        };
        compare_beside(budget, side, side, || Some(lost.get()))
    }

    #[test]
    fn a_pair_from_which_the_host_took_time_is_measured_again() {
        // The first pair does not count; then every other one is disturbed.
        let found = beside_a_host(Duration::from_secs(60), |pair| pair % 2 == 0);
        assert!(found.ours.len() >= LEAST && found.again >= LEAST, "{found:?}");
        assert!(found.ours.iter().chain(&found.peer).all(|pair| pair % 2.0 == 1.0), "{found:?}");
        let all = (0..).map(f64::from).take(1_000).collect::<Vec<_>>();
        assert_eq!(found.kept(&all), found.ours, "what was noted in the same turns");
        assert!(!found.disturbed, "{found:?}");
        assert!(!Paired { usage: Usage { stolen: Some(0.9), ..Usage::default() }, ..found }.is_noisy());
    }

    #[test]
    fn a_host_that_always_takes_time_ends_no_bench_and_marks_the_line() {
        let found = beside_a_host(Duration::from_millis(20), |_| true);
        assert_eq!((found.ours.len(), found.disturbed, found.is_noisy()), (LEAST, true, true), "{found:?}");
        assert!(found.again >= LEAST);
        let line = Case::new("t", "ns", Better::Lower, found).to_json("frontier", &Options::default());
        assert_eq!(line["conditions"]["noisy"], true);
    }

    #[test]
    fn both_sides_take_turns_and_neither_is_always_first() {
        let order = std::cell::RefCell::new(String::new());
        let side = |name: char| {
            order.borrow_mut().push(name);
            1.0
        };
        let paired = compare(Duration::ZERO, || side('o'), || side('p'));
        assert_eq!((paired.ours.len(), paired.peer.len()), (3, 3));
        assert_eq!(order.into_inner(), "opoppoop");
    }

    #[test]
    fn the_budget_is_shared_by_the_cases_and_kept() {
        let options = Options { quick: true, seconds: Some(0.3) };
        assert_eq!(options.budget(3), Duration::from_millis(100));
        let begin = Instant::now();
        let spin = || nanoseconds_each(1, || std::thread::sleep(Duration::from_millis(2)));
        let paired = compare(options.budget(3), spin, spin);
        assert!((3..=50).contains(&paired.ours.len()), "{} repeats", paired.ours.len());
        assert!(begin.elapsed() >= Duration::from_millis(50));
    }

    #[test]
    fn the_peer_is_the_one_that_is_linked() {
        let manifest = include_str!("../Cargo.toml");
        assert!(manifest.contains(&format!("timely = \"={TIMELY}\"")), "TIMELY says {TIMELY}");
    }
}
