//! `migration`: what a migration does to the latency of a count that goes on, by strategy, state, bins, load and transport; and [`hot_first`].
//!
//! Open loop (M-17): every [`TICK`] each of two workers owes a block of records, whatever became of those before. What counts is the time
//! from when a block was due to when its effects are complete, so a stall shows as latency and never as fewer records. Workers make their load
//! themselves: on two cores a third thread would measure the scheduler. The rate is half of what the same count does when it need not wait.
//!
//! A run rests, moves half the bins of worker 0 to worker 1 (a quarter of the state, M-18), rests, and moves them back, which is told
//! apart. In process, workers are threads and a bin moves as a pointer; over TCP, the other worker is a [process](other) of its own, connected over
//! loopback, and bins are encoded, shipped and taken in.
//!
//! Each setup is run some rounds, all strategies and the peer in turn, and figures are medians of them. From five minutes of time on there are
//! sweeps as well (M-21): 2^4 to 2^14 bins, 2^16 to 2^27 keys as memory allows, a quarter to three quarters of the rate.
//!
//! Figures are the greatest latency of a block that met the move. Where that is not above what there is at rest, it has no ratio; and what is
//! allowed is judged only where rest takes less, or the move takes more than both.
//!
//! The peer is to stop and restart (M-22): all workers encode their state at the same time, and new ones with the other routing take it in, while
//! blocks fall due; processes leave it in files of the system's temporary folder, which is not written to disk by then.
//! Both sides must have counted every record.

mod course;
mod other;
mod seen;
mod steady;

use std::borrow::Cow;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use penstock_bins::{BinState, BoxError, Routing, SHIP_BYTES, Shelf, Strategy};
use penstock_dataflow::{Worker, execute, fabric};
use serde_json::json;

use self::course::{Bins, Course, Domain, Driven, End, TICK, WORKERS, Watch, decoded, drive, due, encoded, ticks};
pub use self::other::serve;
use self::other::{Place, beside};
use self::seen::{Seen, Span, caught_up, most_ms};
pub use self::steady::run as bins_latency;
use crate::harness::{Better, Case, Options, Paired, Report, ended, median};
use crate::machine::{Meter, Usage};

/// One row of the table of cases.
#[derive(Clone, Copy, Debug)]
struct Setup {
    tcp: bool,
    domain: Domain,
    /// Records as a part of what there is room for.
    load: f64,
    shipping: Shipping,
}

/// The course of those who start again, by what came of those before and when their clock began.
type Again<'a> = dyn Fn(&[Driven], Instant) -> Course + 'a;

/// How state is shipped; see [`Course`].
#[derive(Clone, Copy, Debug)]
struct Shipping {
    bytes: usize,
    hot_first: bool,
}

impl Default for Shipping {
    fn default() -> Self {
        Self { bytes: SHIP_BYTES, hot_first: true }
    }
}

/// The strategies with their names, and what they may add to the latency: a part of that at rest, and milliseconds.
const STRATEGIES: [(&str, Option<(f64, f64)>); 4] =
    [("all-at-once", Some((1.0, 10.0))), ("batched", Some((0.5, 5.0))), ("fluid", Some((0.2, 1.0))), ("matched", None)];

/// Bins of a step that takes some.
const STEP: usize = 16;
/// How often each setup is run, in turn with stop and restart: one run in some meets a pause of the machine.
const ROUNDS: usize = 3;
/// Seconds from which on there are sweeps.
const LONG: f64 = 300.0;
/// The load but in the sweep of it.
const HALF: f64 = 0.5;
/// Bytes that a key takes at most in what a run holds at one time: the state as it was, that of the run, and it encoded.
const HELD: u64 = 120;

/// Keys and bins, as powers of two, and loads.
type Sizes = Vec<(u32, u8, f64)>;

/// What is measured when there is time, for each transport.
fn sizes(options: &Options) -> Sizes {
    if options.quick {
        return vec![(12, 6, HALF)];
    }
    let mut all = vec![(16, 8, HALF), (16, 12, HALF), (20, 8, HALF), (20, 12, HALF), (22, 8, HALF), (22, 12, HALF)];
    if options.seconds.is_some_and(|seconds| seconds >= LONG) {
        all.extend([(20, 4, HALF), (20, 14, HALF), (22, 12, 0.25), (22, 12, 0.75)]);
        let memory = available_bytes().unwrap_or(0);
        all.extend([(25, 12, HALF), (27, 12, HALF)].into_iter().filter(|(keys, ..)| (HELD << keys) <= memory));
    }
    all
}

/// Memory that nobody uses, where the system tells.
fn available_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

/// Runs the bench.
///
/// # Panics
/// When a worker fails or loses a record.
pub fn run(options: &Options, report: &mut Report) {
    let sizes = sizes(options);
    let setup = |tcp, (keys, bits, load): (u32, u8, f64)| {
        let domain = Domain { keys: 1 << keys, bits, skewed: false };
        Setup { tcp, domain, load, shipping: Shipping::default() }
    };
    let setups = [false, true].into_iter().flat_map(|tcp| sizes.iter().map(move |size| setup(tcp, *size)));
    let runs = 2 * sizes.len() * (STRATEGIES.len() + 1) * ROUNDS;
    // Two moves and three rests; a move lasts as long as it does.
    let rest = options.budget(runs).div_f64(4.0).clamp(Duration::from_millis(40), Duration::from_secs(2));
    for setup in setups {
        // Made once: a copy takes a tenth of the time.
        let full = setup.full();
        let rate = setup.capacity(&full, rest) * setup.load;
        // Gigabytes take a minute to run once.
        let rounds = if ended() || setup.domain.keys > 1 << 25 { 1 } else { ROUNDS };
        let (meter, mut restarts, mut moved) = (Meter::start(), Vec::new(), STRATEGIES.map(|_| Vec::new()));
        for _ in 0..rounds {
            restarts.push(setup.restart(&full, rate, rest));
            for ((name, _), moved) in STRATEGIES.iter().zip(&mut moved) {
                let strategy = Strategy::parse(name, STEP).expect("a strategy with bins in its steps");
                moved.push(setup.migrate(&full, strategy, rate, rest));
            }
        }
        let usage = meter.stop();
        for ((name, allowed), moved) in STRATEGIES.into_iter().zip(moved) {
            report.case(case(setup, name, allowed, rate, &moved, &restarts, usage));
        }
        if ended() {
            break;
        }
    }
}

/// `hot-first`: how long rows wait for bins that move all at once to another process, while half of the rows are for four of the sixty-four
/// bins that move: asked for by who waits for them, beside the order of the control.
///
/// With a budget of a megabyte under way, so that most of the state waits to be sent, whichever way; a fast link hides the order.
///
/// # Panics
/// When a worker fails or loses a record.
pub fn hot_first(options: &Options, report: &mut Report) {
    let (sizes, bits): (&[u32], u8) = if options.quick { (&[14], 6) } else { (&[20, 22, 23], 8) };
    for keys in sizes {
        let domain = Domain { keys: 1 << keys, bits, skewed: true };
        let way = |hot_first| {
            let shipping = Shipping { bytes: 1 << 20, hot_first };
            Setup { tcp: true, domain, load: HALF, shipping }
        };
        let full = way(true).full();
        let budget = options.budget(sizes.len());
        let rest = budget.div_f64(60.0).clamp(Duration::from_millis(40), Duration::from_millis(500));
        let rate = way(true).capacity(&full, rest) * HALF;
        let (meter, begin, mut seen) = (Meter::start(), Instant::now(), [Vec::new(), Vec::new()]);
        while seen[1].len() < ROUNDS || begin.elapsed() < budget && !ended() {
            for (seen, hot_first) in seen.iter_mut().zip([true, false]) {
                seen.push(way(hot_first).migrate(&full, Strategy::AllAtOnce, rate, rest));
            }
            if ended() {
                break;
            }
        }
        report.case(hot_case(domain, rate, &seen, meter.stop()));
    }
}

/// What asking for bins showed beside the order of the control. What counts is the move there; the one back has no hot bins that are apart.
fn hot_case(domain: Domain, rate: f64, [asked, plain]: &[Vec<Seen>; 2], usage: Usage) -> Case {
    let most = |of: &[Seen], class: usize| -> Vec<f64> {
        of.iter().map(|seen| most_ms(&seen.rows[class], &seen.moves[0])).collect()
    };
    let paired = Paired::new(most(asked, 1), most(plain, 1), usage);
    let middle = |of: &[Seen], class: usize| median(&most(of, class));
    let lasted = |of: &[Seen]| median(&of.iter().map(|seen| seen.moves[0].seconds()).collect::<Vec<_>>());
    let rest = |of: &[Seen]| median(&of.iter().map(Seen::at_rest_ms).collect::<Vec<_>>());
    let title = format!(
        "tcp keys=2^{} bins=2^{} half of the rows in 4 bins, vs the order of the control",
        domain.keys.ilog2(),
        domain.bits
    );
    Case::new(title, "ms at most", Better::Lower, paired)
        .with("keys", domain.keys)
        .with("bins", 1_u64 << domain.bits)
        .with("records_per_s", rate)
        .with("rows", "of the hot bins")
        .with("moving_ms", middle(asked, 2))
        .with("staying_ms", middle(asked, 0))
        .with("duration_s", lasted(asked))
        .with("rest_p999_ms", rest(asked))
        .with("peer_moving_ms", middle(plain, 2))
        .with("peer_staying_ms", middle(plain, 0))
        .with("peer_duration_s", lasted(plain))
        .with("peer_rest_p999_ms", rest(plain))
}

/// What the rounds of a strategy showed; whatever is one figure is the median, and the series is of the run with the median of what we add.
fn case(
    setup: Setup,
    name: &str,
    allowed: Option<(f64, f64)>,
    rate: f64,
    moved: &[Seen],
    restarts: &[Seen],
    usage: Usage,
) -> Case {
    let extra = |seen: &Seen, number: usize| seen.most_ms(&seen.moves[number]) - seen.at_rest_ms();
    let most = |seen: &Seen| seen.most_ms(&seen.moves[0]);
    let of = |runs: &[Seen], figure: &dyn Fn(&Seen) -> f64| runs.iter().map(figure).collect::<Vec<_>>();
    let middle = |runs: &[Seen], figure: &dyn Fn(&Seen) -> f64| median(&of(runs, figure));
    let typical = |runs: &[Seen]| {
        let mut order: Vec<usize> = (0..runs.len()).collect();
        order.sort_by(|a, b| extra(&runs[*a], 0).total_cmp(&extra(&runs[*b], 0)));
        order[order.len() / 2]
    };
    let (typically, restarted) = (&moved[typical(moved)], &restarts[typical(restarts)]);
    let place = if setup.tcp { "tcp" } else { "threads" };
    let paired = Paired::new(of(moved, &most), of(restarts, &most), usage);
    let typical_extra = middle(moved, &|seen| extra(seen, 0));
    let Domain { keys, bits, .. } = setup.domain;
    let load = if setup.load == HALF { String::new() } else { format!(" load={}", setup.load) };
    let title = format!("{place} keys=2^{} bins=2^{bits}{load} {name} vs stop and restart", keys.ilog2());
    let case = Case::new(title, "ms at most", Better::Lower, paired)
        .with("strategy", name)
        .with("transport", place)
        .with("keys", keys)
        .with("bins", 1_u64 << bits)
        .with("offered", setup.load)
        .with("records_per_s", rate)
        .with("rest_p999_ms", middle(moved, &Seen::at_rest_ms))
        .with("extra_ms", typical_extra)
        .with("duration_s", middle(moved, &|seen| seen.moves[0].seconds()))
        .with("return_extra_ms", middle(moved, &|seen| extra(seen, 1)))
        .with("return_duration_s", middle(moved, &|seen| seen.moves[1].seconds()))
        .with("added_mib", middle(moved, &|seen| seen.added_mib))
        .with("restart_rest_p999_ms", middle(restarts, &Seen::at_rest_ms))
        .with("restart_extra_ms", middle(restarts, &|seen| extra(seen, 0)))
        .with("restart_duration_s", middle(restarts, &|seen| seen.moves[0].seconds()))
        .with("restart_added_mib", middle(restarts, &|seen| seen.added_mib))
        .with("state_mib", typically.state_mib)
        .with("moves", json!(typically.moves.iter().map(|span| [span.begin, span.end]).collect::<Vec<_>>()))
        .with("series", json!(typically.series()))
        .with("restart_series", json!(restarted.series()));
    let case = match allowed.and_then(|allowed| of_allowed(allowed, middle(moved, &Seen::at_rest_ms), typical_extra)) {
        Some(share) => case.with("of_allowed", share),
        None => case,
    };
    if is_above_rest(typical_extra) { case } else { case.without_ratio("not above rest") }
}

/// Whether a move is told apart from rest, by what it adds to the latency at rest, ms: by a tenth of a tick.
fn is_above_rest(extra_ms: f64) -> bool {
    extra_ms > TICK.as_secs_f64() * 1e3 / 10.0
}

/// What a move adds, as a share of what it may add: a part of the latency at rest, and milliseconds. None where rest alone reaches that and
/// what is added, which is then lost in what is there anyway; more than rest and than what is allowed is too much all the same.
fn of_allowed((part, ms): (f64, f64), rest_ms: f64, extra_ms: f64) -> Option<f64> {
    let allowed = (part * rest_ms).max(ms);
    (rest_ms < allowed || extra_ms > allowed.max(rest_ms)).then(|| extra_ms.max(0.0) / allowed)
}

/// Numbers of folders that runs have left state in.
static FOLDERS: AtomicU64 = AtomicU64::new(0);

/// A folder of its own, while it lives.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        let number = FOLDERS.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("penstock-bench-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("the temporary folder takes folders");
        Self(folder)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl Setup {
    /// All keys with no counts, by worker; over TCP the other process fills its own.
    fn full(self) -> Vec<Bins> {
        let here = if self.tcp { 1 } else { WORKERS };
        (0..here).map(|worker| self.domain.filled(worker)).collect()
    }

    /// State of all workers, MiB.
    fn state_mib(self, full: &[Bins]) -> f64 {
        let here: usize = full.iter().flatten().map(|(_, state)| state.bytes()).sum();
        here as f64 * (WORKERS as f64 / full.len() as f64) / f64::from(1 << 20)
    }

    /// Runs both workers as threads over a course, from the routing and the bins given.
    fn threads(course: &Course, routing: &Routing, bins: Vec<Bins>) -> Vec<(Driven, Bins)> {
        let bins = Mutex::new(bins.into_iter().map(Some).collect::<Vec<_>>());
        let (course, routing, shelf) = (course.clone(), routing.clone(), Shelf::new());
        let threads = execute(fabric::threads(WORKERS), move |worker: &mut Worker| -> Result<_, BoxError> {
            let mine = bins.lock().expect("nobody panics with it")[worker.index()].take();
            drive(worker, &course, &routing, mine.expect("each takes its own once"), shelf.clone(), false)
        });
        threads.into_iter().map(|thread| thread.join().expect("no panic").expect("no worker fails")).collect()
    }

    /// Runs both workers over a course, from home and these bins, and then over the one that this makes of when it began and where it ended, from
    /// the other routing on: stopped and restarted.
    fn drive(
        self,
        course: &Course,
        bins: Vec<Bins>,
        again: Option<&Again<'_>>,
    ) -> (Vec<Driven>, Option<(Vec<Driven>, f64)>) {
        if self.tcp {
            let folder = again.map(|_| Folder::new());
            let place = Place { into: folder.as_ref().map(|folder| &*folder.0), ..Place::default() };
            let (before, clock) = beside(course, place, None, || bins.into_iter().next().expect("its own"));
            let after = again.zip(folder).map(|(again, folder)| {
                let (course, mut watch) = (again(&before, clock), Watch::new());
                let place = Place { moved: true, from: Some(&folder.0), into: None };
                let (after, _) = beside(&course, place, Some(clock), || place.bins(self.domain, 0));
                watch.look(true);
                (after, watch.added_mib())
            });
            return (before, after);
        }
        let (clock, home) = (course.begins(), self.domain.home());
        let ended = Self::threads(&Course { clock, ..course.clone() }, &home, bins);
        let (before, bins): (Vec<Driven>, Vec<Bins>) = ended.into_iter().unzip();
        let after = again.map(|again| {
            let (course, mut watch) = (again(&before, clock), Watch::new());
            let bins = restarted(self.domain, bins, &mut watch);
            let after = Self::threads(&course, &self.domain.moved(), bins);
            (after.into_iter().map(|(driven, _)| driven).collect(), watch.added_mib())
        });
        (before, after)
    }

    /// Records a second when nobody waits for ticks.
    fn capacity(self, full: &[Bins], time: Duration) -> f64 {
        let course = self.course(4096, ticks(time).clamp(50, 400), Strategy::Fluid, Vec::new());
        let (driven, _) = self.drive(&Course { paced: false, ..course }, full.to_vec(), None);
        let sent: u64 = driven.iter().map(|driven| driven.sent).sum();
        let ends = || driven.iter().flat_map(|driven| &driven.blocks).map(|(_, end)| *end);
        let first = ends().fold(f64::INFINITY, f64::min);
        sent as f64 / (ends().fold(0.0, f64::max) - first).max(f64::MIN_POSITIVE)
    }

    fn course(self, rows: usize, rest: u64, strategy: Strategy, to: Vec<Routing>) -> Course {
        let Shipping { bytes: ship_bytes, hot_first } = self.shipping;
        Course {
            domain: self.domain,
            rows,
            clock: Instant::now(),
            first: 0,
            rest,
            to,
            strategy,
            paced: true,
            ship_bytes,
            hot_first,
            end: End::default(),
        }
    }

    fn rows(self, rate: f64) -> usize {
        (rate * TICK.as_secs_f64() / WORKERS as f64).max(1.0) as usize
    }

    fn migrate(self, full: &[Bins], strategy: Strategy, rate: f64, rest: Duration) -> Seen {
        let to = vec![self.domain.moved(), self.domain.home()];
        let course = self.course(self.rows(rate), ticks(rest), strategy, to);
        let (driven, _) = self.drive(&course, full.to_vec(), None);
        check(&driven, 0);
        self.seen(driven, full)
    }

    /// Stops, encodes all, and starts again with the routing that a migration leads to.
    fn restart(self, full: &[Bins], rate: f64, rest: Duration) -> Seen {
        let course = self.course(self.rows(rate), ticks(rest), Strategy::Fluid, Vec::new());
        let next = |before: &[Driven]| before.iter().map(|driven| driven.next).max().expect("there are two");
        let again =
            |before: &[Driven], clock| Course { first: next(before), clock, end: End::default(), ..course.clone() };
        let (before, after) = self.drive(&course, full.to_vec(), Some(&again));
        let (after, added_mib) = after.expect("it was asked for");
        let sent = before.iter().map(|driven| driven.sent).sum();
        // The pause begins with the first block that the new workers owe: what falls due while there are none is not at rest.
        let begin = due(next(&before));
        check(&after, sent);
        let before = self.seen(before, full);
        let calm = before.at_rest_ms() / 1e3 + TICK.as_secs_f64() * 2.0;
        let mut all = self.seen(after, full);
        all.moves = vec![Span { begin, end: caught_up(begin, calm, &all.blocks) }];
        all.blocks.extend(before.blocks);
        all.blocks.sort_by(|a, b| a.0.total_cmp(&b.0));
        all.added_mib = added_mib;
        all
    }

    fn seen(self, driven: Vec<Driven>, full: &[Bins]) -> Seen {
        let mut all = Seen { state_mib: self.state_mib(full), ..Seen::default() };
        for driven in driven {
            all.blocks.extend(driven.blocks);
            all.moves.extend(driven.moves);
            // Threads are one process, of which the leader tells.
            all.added_mib += driven.added_mib;
            for (all, rows) in all.rows.iter_mut().zip(driven.rows) {
                all.extend(rows);
            }
        }
        all.blocks.sort_by(|a, b| a.0.total_cmp(&b.0));
        all
    }
}

/// What threads have, encoded by each at the same time, and taken in by those that have it in the other routing.
fn restarted(domain: Domain, bins: Vec<Bins>, watch: &mut Watch) -> Vec<Bins> {
    let chunks: Vec<(u32, Vec<u8>)> = std::thread::scope(|scope| {
        let threads = bins.into_iter().map(|bins| scope.spawn(move || encoded(bins).collect::<Vec<_>>()));
        let threads: Vec<_> = threads.collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("no panic")).collect()
    });
    watch.look(true);
    let moved = domain.moved();
    let taken = std::thread::scope(|scope| {
        let (chunks, moved) = (&chunks, &moved);
        let take = |worker: usize| {
            let own = move |(bin, _): &&(u32, Vec<u8>)| moved.owner_of(*bin) as usize == worker;
            let own = chunks.iter().filter(own).map(|(bin, chunk)| (*bin, Cow::Borrowed(&chunk[..])));
            scope.spawn(move || decoded(moved, worker, own))
        };
        let threads: Vec<_> = (0..WORKERS).map(take).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    watch.look(true);
    taken
}

/// Every record that was sent is counted.
fn check(driven: &[Driven], before: u64) {
    let counted: u64 = driven.iter().map(|driven| driven.counted).sum();
    let sent: u64 = driven.iter().map(|driven| driven.sent).sum();
    assert_eq!(counted, sent + before, "records were lost or counted twice");
}

#[cfg(test)]
mod tests {
    use super::*;

    const REST: Duration = Duration::from_millis(30);

    fn setup(tcp: bool, keys: u64, skewed: bool) -> Setup {
        let domain = Domain { keys, bits: if skewed { 5 } else { 4 }, skewed };
        Setup { tcp, domain, load: HALF, shipping: Shipping::default() }
    }

    #[test]
    fn a_quarter_of_the_bins_moves_there_and_back_and_no_record_is_lost() {
        for tcp in [false, true] {
            let setup = setup(tcp, 500, false);
            let quarter = setup.domain.home().moves_to(&setup.domain.moved()).unwrap();
            assert_eq!(quarter.len(), 4);
            for (name, _) in STRATEGIES {
                let strategy = Strategy::parse(name, 2).unwrap();
                let seen = setup.migrate(&setup.full(), strategy, 20_000.0, REST);
                assert_eq!(seen.moves.len(), 2, "{name}");
                assert!(seen.moves[0].begin >= REST.as_secs_f64() / 2.0 && seen.moves[0].end < seen.moves[1].begin);
                assert!(seen.moves.iter().all(|span| span.end.is_finite() && span.seconds() >= 0.0), "{seen:?}");
                let ticks = seen.blocks.len() as u64;
                assert!(ticks >= 2 * 3 * super::ticks(REST), "{ticks} blocks in three rests of two workers");
                assert!(seen.at_rest_ms() > 0.0 && seen.most_ms(&seen.moves[0]) > 0.0);
                assert!(seen.series().iter().all(|[from, middle, most]| *from >= 0.0 && middle <= most));
            }
        }
    }

    #[test]
    fn stopping_and_restarting_counts_every_record_and_shows_its_pause() {
        for tcp in [false, true] {
            let setup = setup(tcp, 500, false);
            let seen = setup.restart(&setup.full(), 20_000.0, REST);
            let [span] = seen.moves[..] else { panic!("one pause") };
            // What the second workers owe first was due when the pause began, so no block of the pause counts as at rest, however short the
            // first workers took to end. Both rest for as many ticks as they were told.
            let (before, after): (Vec<_>, Vec<_>) = seen.blocks.iter().copied().partition(|(due, _)| *due < span.begin);
            assert_eq!(after[0].0, span.begin, "the first block of the second workers");
            let least = before.len().min(after.len()) as u64;
            assert!(least >= 2 * super::ticks(REST), "{} and {}", before.len(), after.len());
            let waited = after[0].1.max(after[1].1) * 1e3;
            assert!(seen.most_ms(&span) >= waited, "{waited} ms");
            assert!(span.end >= span.begin && seen.blocks.is_sorted_by(|a, b| a.0 <= b.0));
            assert!(setup.capacity(&setup.full(), REST) > 0.0);
        }
    }

    #[test]
    fn rows_of_hot_bins_of_others_that_move_and_of_those_that_stay_are_told_apart() {
        let setup = setup(true, 4_000, true);
        for hot_first in [true, false] {
            let setup = Setup { shipping: Shipping { bytes: 1 << 10, hot_first }, ..setup };
            let full = setup.full();
            let seen = setup.migrate(&full, Strategy::AllAtOnce, 400_000.0, REST);
            assert!(seen.rows.iter().all(|rows| rows.len() > 20), "{:?}", seen.rows.each_ref().map(Vec::len));
            let case = hot_case(
                setup.domain,
                1.0,
                &[vec![seen], vec![setup.migrate(&full, Strategy::AllAtOnce, 400_000.0, REST)]],
                Usage::default(),
            );
            let line = case.to_json("hot-first", &Options::default());
            assert!(line["ours"].as_f64().unwrap() > 0.0 && line["peer"].as_f64().unwrap() > 0.0, "{line}");
        }
    }

    #[test]
    fn what_there_is_time_and_memory_for_is_measured() {
        let of = |seconds, quick| sizes(&Options { seconds, quick });
        assert_eq!((of(None, true).len(), of(None, false).len()), (1, 6));
        let long = of(Some(LONG), false);
        assert!(long.len() >= 10 && long.contains(&(20, 14, HALF)) && long.contains(&(22, 12, 0.75)), "{long:?}");
    }

    /// Rounds of one move that begins at 0.1 s, of blocks that take a millisecond at rest and so much beside the move.
    fn rounds(beside_ms: f64) -> Vec<Seen> {
        let blocks =
            (0..1000).map(|at| (f64::from(at) * 1e-3, if at == 101 { beside_ms } else { 1.0 } * 1e-3)).collect();
        let moves = vec![Span { begin: 0.1, end: 0.11 }, Span { begin: 0.5, end: 0.51 }];
        vec![Seen { blocks, moves, ..Seen::default() }]
    }

    #[test]
    fn a_move_that_is_not_above_rest_has_its_figure_and_no_ratio() {
        let setup = setup(false, 1 << 10, false);
        let told = |ours: f64, allowed| {
            let case = case(setup, "fluid", allowed, 1.0, &rounds(ours), &rounds(40.0), Usage::default());
            case.to_json("migration", &Options::default())
        };
        let above = told(5.0, Some((0.2, 10.0)));
        let figure = |line: &serde_json::Value, name: &str| line[name].as_f64().unwrap();
        assert!((figure(&above, "ours") - 5.0).abs() < 1e-9 && (figure(&above, "peer") - 40.0).abs() < 1e-9);
        assert!((figure(&above, "ratio") - 8.0).abs() < 1e-9, "{above}");
        assert!((figure(&above["conditions"], "of_allowed") - 0.4).abs() < 1e-9, "{above}");
        let below = told(1.01, Some((0.2, 1.0)));
        assert!((figure(&below, "ours") - 1.01).abs() < 1e-9 && below["ratio"].is_null(), "{below}");
        assert_eq!(below["conditions"]["no_ratio"], "not above rest");
        assert!(below["conditions"].get("of_allowed").is_none(), "rest alone takes what is allowed: {below}");
        let far = figure(&told(9.0, Some((0.2, 1.0)))["conditions"], "of_allowed");
        assert!((far - 8.0).abs() < 1e-9, "{far} times what is allowed, and more than rest: too much");
    }
}
