//! `migration`: what a migration does to the latency of a count that goes on, by strategy, state, bins and transport.
//!
//! Open loop (M-17): every [`TICK`] each of two workers owes a block of records, whatever became of those before. What counts is the time
//! from when a block was due to when its effects are complete, so a stall shows as latency and never as fewer records. Workers make their load
//! themselves: on two cores a third thread would measure the scheduler. The rate is half of what the same count does when it need not wait.
//!
//! A run rests, moves half the bins of worker 0 to worker 1 (a quarter of the state, M-18), rests, and moves them back, which is told
//! apart. In process, workers are threads and a bin moves as a pointer; over TCP, each is a process to the other (two fabrics in one process,
//! connected over loopback), and bins are encoded, shipped and taken in.
//!
//! Each setup is run some rounds, all strategies and the peer in turn, and figures are medians of them. From five minutes of time on, a
//! gigabyte of state is moved, too.
//!
//! Figures are the greatest latency of a block that met the move. Where that is not above what there is at rest, it has no ratio; and what is
//! allowed is judged only where rest takes less, or the move takes more than both.
//!
//! The peer is to stop and restart (M-22): all state is encoded, and new workers with the other routing take it in, while blocks fall due.
//! Both sides must have counted every record.

use std::cell::RefCell;
use std::net::{TcpListener, TcpStream};
use std::rc::Rc;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use penstock_bins::{
    BinState, BinTable, BoxError, Config, ControlInput, Encoding, Keyed, KeyedMap, Migration, Moment, Routing, Shelf,
    Stateful, Stats, Strategy, bin, stateful,
};
use penstock_dataflow::fabric::{self, Duplex, FabricTag};
use penstock_dataflow::{Endpoint, Worker, execute};
use serde_json::json;

use crate::Numbers;
use crate::harness::{Better, Case, Options, Paired, Report, ended, median};
use crate::machine::{Meter, Usage, memory_bytes};

const WORKERS: usize = 2;
/// When blocks fall due.
const TICK: Duration = Duration::from_micros(500);
/// Ticks by which control is ahead of data, so that no block waits to be routed.
const LEAD: u64 = 4;
/// Length of a sample of the series.
const SAMPLE: Duration = Duration::from_millis(250);
/// How often memory is read.
const WATCH: Duration = Duration::from_millis(10);

type Counts = KeyedMap<u64, u64>;
type Bins = Vec<(u32, Box<Counts>)>;

/// One row of the table of cases.
#[derive(Clone, Copy, Debug)]
struct Setup {
    tcp: bool,
    keys: u64,
    bits: u8,
}

/// The strategies with their names, and what they may add to the latency: a part of that at rest, and milliseconds.
const STRATEGIES: [(&str, Option<(f64, f64)>); 4] =
    [("all-at-once", Some((1.0, 10.0))), ("batched", Some((0.5, 5.0))), ("fluid", Some((0.2, 1.0))), ("matched", None)];

/// Bins of a step that takes some.
const STEP: usize = 16;
/// How often each setup is run, in turn with stop and restart: one run in some meets a pause of the machine.
const ROUNDS: usize = 3;
/// Seconds from which on the state of a gigabyte is measured, which takes a minute for itself.
const LONG: f64 = 300.0;

/// Runs the bench.
///
/// # Panics
/// When a worker fails or loses a record.
pub fn run(options: &Options, report: &mut Report) {
    let sizes: &[(u32, &[u8])] = match options.quick {
        true => &[(12, &[6])],
        false => &[(16, &[8, 12]), (20, &[8, 12]), (22, &[8, 12]), (25, &[12])],
    };
    let long = options.seconds.is_some_and(|seconds| seconds >= LONG);
    let sizes = sizes.iter().filter(|(keys, _)| *keys <= 22 || long);
    let setups: Vec<Setup> = [false, true]
        .into_iter()
        .flat_map(|tcp| sizes.clone().map(move |size| (tcp, size)))
        .flat_map(|(tcp, (keys, bits))| bits.iter().map(move |&bits| Setup { tcp, keys: 1 << keys, bits }))
        .collect();
    let runs = setups.len() * (STRATEGIES.len() + 1) * ROUNDS;
    // Two moves and three rests; a move lasts as long as it does.
    let rest = options.budget(runs).div_f64(4.0).clamp(Duration::from_millis(40), Duration::from_secs(2));
    for setup in setups {
        // Made once: a copy takes a tenth of the time.
        let full = setup.full();
        let rate = setup.capacity(&full, rest) / 2.0;
        let rounds = if ended() { 1 } else { ROUNDS };
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
    let title = format!("{place} keys=2^{} bins=2^{} {name} vs stop and restart", setup.keys.ilog2(), setup.bits);
    let case = Case::new(title, "ms at most", Better::Lower, paired)
        .with("strategy", name)
        .with("transport", place)
        .with("keys", setup.keys)
        .with("bins", 1_u64 << setup.bits)
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

/// Seconds since the run began.
#[derive(Clone, Copy, Debug)]
struct Span {
    begin: f64,
    end: f64,
}

impl Span {
    fn seconds(&self) -> f64 {
        self.end - self.begin
    }
}

/// What a run showed.
#[derive(Debug, Default)]
struct Seen {
    /// When each block was due, and how long it took, seconds.
    blocks: Vec<(f64, f64)>,
    moves: Vec<Span>,
    added_mib: f64,
    state_mib: f64,
}

impl Seen {
    /// The 99.9th percentile of blocks that were due outside of moves and of what they left behind, ms.
    fn at_rest_ms(&self) -> f64 {
        let settled = |due: f64| self.moves.iter().all(|span| due < span.begin || due > span.end + 0.02);
        let mut rest: Vec<f64> =
            self.blocks.iter().filter(|(due, _)| settled(*due)).map(|(_, latency)| *latency).collect();
        rest.sort_by(f64::total_cmp);
        let at = (rest.len() * 999 / 1000).min(rest.len().saturating_sub(1));
        rest.get(at).copied().unwrap_or(0.0) * 1e3
    }

    /// The greatest latency of a block that met a move, ms.
    fn most_ms(&self, of: &Span) -> f64 {
        let met = self.blocks.iter().filter(|(due, latency)| due + latency >= of.begin && *due <= of.end);
        met.map(|(_, latency)| latency * 1e3).fold(0.0, f64::max)
    }

    /// For each sample its beginning in seconds, and the median and the greatest latency in ms.
    fn series(&self) -> Vec<[f64; 3]> {
        let sample = SAMPLE.as_secs_f64();
        let end = self.blocks.iter().map(|(due, _)| *due).fold(0.0, f64::max);
        let samples = (0..=(end / sample) as usize).filter_map(|number| {
            let from = number as f64 * sample;
            let inside = self.blocks.iter().filter(|(due, _)| (from..from + sample).contains(due));
            let mut inside: Vec<f64> = inside.map(|(_, latency)| latency * 1e3).collect();
            inside.sort_by(f64::total_cmp);
            Some([from, inside.get(inside.len() / 2).copied()?, *inside.last()?])
        });
        samples.collect()
    }
}

/// What a worker is to do from one tick on.
#[derive(Clone, Debug)]
struct Course {
    keys: u64,
    /// Records of a block.
    rows: usize,
    clock: Instant,
    first: u64,
    /// Ticks to rest before, between and after moves.
    rest: u64,
    /// Routings to move to, one after the other.
    to: Vec<Routing>,
    strategy: Strategy,
    /// Whether ticks are waited for.
    paced: bool,
    /// The tick at which it ends, as soon as worker 0 knows.
    end: Arc<OnceLock<u64>>,
}

/// What a worker has at the end of its course.
struct Driven {
    blocks: Vec<(f64, f64)>,
    moves: Vec<Span>,
    sent: u64,
    /// The first tick that was not sent.
    next: u64,
    added: f64,
    bins: Bins,
}

impl Setup {
    fn routing(self) -> Routing {
        Routing::new(self.bits, WORKERS).expect("few bins")
    }

    /// The routing with half the bins of worker 0 at worker 1.
    fn moved(self) -> Routing {
        let mut turn = false;
        let owner = |owner: &u32| {
            turn ^= *owner == 0;
            if *owner == 0 && turn { 1 } else { *owner }
        };
        Routing::from_owners(self.routing().owners().iter().map(owner).collect()).expect("the same workers")
    }

    /// All keys with no counts, by worker.
    fn full(self) -> Vec<Bins> {
        (0..WORKERS).map(|worker| self.filled(worker)).collect()
    }

    /// The keys of a worker with no counts.
    fn filled(self, worker: usize) -> Bins {
        let mut table = BinTable::fresh(&self.routing(), worker as u32, &Counts::default);
        for key in 0..self.keys {
            if let Some(state) = table.get_mut(bin(mixed(key), self.bits)) {
                *state.entry(key) = 0;
            }
        }
        table.take_all()
    }

    fn endpoints(self) -> (Vec<Endpoint>, Vec<fabric::FabricGuard>) {
        if !self.tcp {
            return (fabric::threads(WORKERS), Vec::new());
        }
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port of loopback");
        let ours = TcpStream::connect(listener.local_addr().expect("it is bound")).expect("it listens");
        let (theirs, _) = listener.accept().expect("it was connected");
        for stream in [&ours, &theirs] {
            stream.set_nodelay(true).expect("a socket of TCP");
        }
        let tag = FabricTag { query: 7, generation: 1 };
        let boxed = |stream: TcpStream| Some(Box::new(stream) as Box<dyn Duplex>);
        let made = [vec![None, boxed(ours)], vec![boxed(theirs), None]];
        let made = made.into_iter().enumerate().map(|(own, streams)| fabric::processes(own, 1, streams, tag));
        let made = made.collect::<Result<Vec<_>, _>>().expect("two processes over a stream");
        let (seats, guards): (Vec<_>, Vec<_>) = made.into_iter().unzip();
        (seats.into_iter().flatten().collect(), guards)
    }

    /// Runs both workers over a course, from the routing and the bins given.
    fn drive(self, course: &Course, routing: &Routing, bins: Vec<Bins>) -> Vec<Driven> {
        let (endpoints, guards) = self.endpoints();
        let bins = Arc::new(std::sync::Mutex::new(bins.into_iter().map(Some).collect::<Vec<_>>()));
        // Over TCP each worker is a process, and has a shelf of its own.
        let shelves: Vec<Shelf<Counts>> = match self.tcp {
            true => (0..WORKERS).map(|_| Shelf::new()).collect(),
            false => vec![Shelf::new(); WORKERS],
        };
        let (course, routing, tcp) = (course.clone(), routing.clone(), self.tcp);
        let threads = execute(endpoints, move |worker: &mut Worker| {
            let index = worker.index();
            let mine = bins.lock().expect("nobody panics with it")[index].take().expect("each takes its own once");
            let shelf = shelves[index].clone();
            drive(worker, &course, &routing, mine, shelf, tcp)
        });
        let driven = threads.into_iter().map(|thread| thread.join().expect("no panic").expect("no worker fails"));
        let driven: Vec<Driven> = driven.collect();
        // Each waits for the other's end of the connection.
        let leaving: Vec<_> = guards.into_iter().map(|guard| std::thread::spawn(move || drop(guard))).collect();
        leaving.into_iter().for_each(|thread| thread.join().expect("no panic"));
        driven
    }

    /// Records a second when nobody waits for ticks.
    fn capacity(self, full: &[Bins], time: Duration) -> f64 {
        let ticks = ticks(time);
        let course = Course {
            keys: self.keys,
            rows: 4096,
            clock: Instant::now(),
            first: 0,
            rest: ticks.clamp(50, 400),
            to: Vec::new(),
            strategy: Strategy::Fluid,
            paced: false,
            end: Arc::default(),
        };
        let driven = self.drive(&Course { clock: Instant::now(), ..course }, &self.routing(), full.to_vec());
        let sent: u64 = driven.iter().map(|driven| driven.sent).sum();
        let end = driven.iter().flat_map(|driven| driven.blocks.last()).map(|(_, end)| *end).fold(0.0, f64::max);
        sent as f64 / end
    }

    fn course(self, rate: f64, rest: Duration, strategy: Strategy, to: Vec<Routing>) -> Course {
        let rows = (rate * TICK.as_secs_f64() / WORKERS as f64).max(1.0) as usize;
        let (keys, rest) = (self.keys, ticks(rest));
        // Blocks fall due when the workers have started.
        let clock = Instant::now() + Duration::from_millis(100);
        Course { keys, rows, clock, first: 0, rest, to, strategy, paced: true, end: Arc::default() }
    }

    fn migrate(self, full: &[Bins], strategy: Strategy, rate: f64, rest: Duration) -> Seen {
        let (bins, state_mib) = (full.to_vec(), mib(full));
        let course = self.course(rate, rest, strategy, vec![self.moved(), self.routing()]);
        let driven = self.drive(&course, &self.routing(), bins);
        check(&driven, 0);
        seen(driven, state_mib)
    }

    /// Stops, encodes all, and starts again with the routing that a migration leads to.
    fn restart(self, full: &[Bins], rate: f64, rest: Duration) -> Seen {
        let (bins, state_mib) = (full.to_vec(), mib(full));
        let course = self.course(rate, rest, Strategy::Fluid, Vec::new());
        let before = self.drive(&course, &self.routing(), bins);
        let mut watch = Watch::new();
        let calm = seen_blocks(&before).at_rest_ms() / 1e3 + TICK.as_secs_f64() * 2.0;
        let (mut chunks, mut next, mut sent, mut blocks) = (Vec::new(), 0, 0, Vec::new());
        for driven in before {
            (next, sent) = (driven.next.max(next), sent + driven.sent);
            blocks.extend(driven.blocks);
            for (bin, state) in driven.bins {
                let mut encoding = Encoding::new();
                while let Some(chunk) = state.encode(&mut encoding).expect("counts can be written") {
                    chunks.push((bin, chunk));
                }
            }
        }
        watch.look(true);
        let mut tables: Vec<BinTable<Counts>> =
            (0..WORKERS).map(|worker| BinTable::fresh(&self.moved(), worker as u32, &Counts::default)).collect();
        for (bin, chunk) in chunks {
            let owner = self.moved().owner_of(bin) as usize;
            tables[owner].get_mut(bin).expect("it is the owner").absorb(&chunk).expect("what was just written");
        }
        watch.look(true);
        let bins = tables.into_iter().map(|mut table| table.take_all()).collect();
        let after = self.drive(&Course { first: next, end: Arc::default(), ..course }, &self.moved(), bins);
        check(&after, sent);
        let mut all = seen(after, state_mib);
        // The pause begins with the first block that the new workers owe: what falls due while there are none is not at rest.
        let begin = due(next);
        all.moves = vec![Span { begin, end: caught_up(begin, calm, &all.blocks) }];
        all.blocks.extend(blocks);
        all.blocks.sort_by(|a, b| a.0.total_cmp(&b.0));
        all.added_mib = watch.added_mib();
        all
    }
}

/// When a pause that began then is over: a block is in time again, so the backlog is part of it.
fn caught_up(begin: f64, calm: f64, blocks: &[(f64, f64)]) -> f64 {
    blocks.iter().filter(|(_, latency)| *latency > calm).map(|(due, latency)| due + latency).fold(begin, f64::max)
}

/// Spreads keys over all bits.
fn mixed(key: u64) -> u64 {
    Numbers(key).next().expect("no end")
}

/// When the blocks of a tick fall due, seconds.
fn due(tick: u64) -> f64 {
    tick as f64 * TICK.as_secs_f64()
}

fn ticks(time: Duration) -> u64 {
    (time.as_secs_f64() / TICK.as_secs_f64()).ceil() as u64
}

fn mib(bins: &[Bins]) -> f64 {
    bins.iter().flatten().map(|(_, state)| state.bytes()).sum::<usize>() as f64 / f64::from(1 << 20)
}

/// Every record that was sent is counted.
fn check(driven: &[Driven], before: u64) {
    let counted: u64 =
        driven.iter().flat_map(|driven| &driven.bins).flat_map(|(_, state)| state.iter()).map(|(_, n)| n).sum();
    let sent: u64 = driven.iter().map(|driven| driven.sent).sum();
    assert_eq!(counted, sent + before, "records were lost or counted twice");
}

fn seen_blocks(driven: &[Driven]) -> Seen {
    Seen { blocks: driven.iter().flat_map(|driven| driven.blocks.iter().copied()).collect(), ..Seen::default() }
}

fn seen(driven: Vec<Driven>, state_mib: f64) -> Seen {
    let mut all = Seen { state_mib, ..Seen::default() };
    for driven in driven {
        all.blocks.extend(driven.blocks);
        all.moves.extend(driven.moves);
        all.added_mib = all.added_mib.max(driven.added);
    }
    all.blocks.sort_by(|a, b| a.0.total_cmp(&b.0));
    all
}

/// The greatest memory of this process beyond that at the beginning.
struct Watch {
    begin: u64,
    most: u64,
    last: Instant,
}

impl Watch {
    fn new() -> Self {
        let begin = memory_bytes().unwrap_or(0);
        Self { begin, most: begin, last: Instant::now() }
    }

    fn look(&mut self, now: bool) {
        if now || self.last.elapsed() >= WATCH {
            self.last = Instant::now();
            self.most = self.most.max(memory_bytes().unwrap_or(0));
        }
    }

    fn added_mib(&self) -> f64 {
        (self.most - self.begin) as f64 / f64::from(1 << 20)
    }
}

/// One worker over its course.
fn drive(
    worker: &mut Worker,
    course: &Course,
    routing: &Routing,
    bins: Bins,
    shelf: Shelf<Counts>,
    tcp: bool,
) -> Result<Driven, BoxError> {
    let (index, bits) = (worker.index(), routing.bits());
    let mut table = BinTable::new(bits)?;
    for (bin, state) in bins {
        table.install(bin, state)?;
    }
    let mut config = Config::in_process("count", routing.clone(), index, shelf, Arc::new(Stats::new()));
    config.table = Rc::new(RefCell::new(table));
    config.local = Rc::new(move |other| !tcp || other == index);
    let (data, mut control, counts) = worker.dataflow::<u64, _>("count", |scope| {
        let (data, blocks) = scope.new_input::<Keyed<u64, ()>>();
        let (control, commands) = scope.new_input();
        let logic = move |moment: Moment<'_, u64, Keyed<u64, ()>, Counts, (), ()>| {
            for (hash, key, ()) in moment.blocks.into_iter().flat_map(Keyed::into_hashed_rows) {
                *moment.bins.get_mut(bin(hash, bits)).ok_or("a bin that is not here")?.entry(key) += 1;
            }
            Ok(())
        };
        let counts: Stateful<u64, Counts, ()> = stateful(&blocks, &commands, config, logic)?;
        Ok::<_, penstock_bins::BinsError>((data, ControlInput::new(control, routing.clone(), scope.peers()), counts))
    })?;
    let leads = index == 0;
    let start = course.first;
    let mut data = Some(data);
    data.iter_mut().try_for_each(|data| data.advance_to(start))?;
    match leads {
        true => control.advance_to(start + LEAD)?,
        false => control.close(),
    }
    let mut numbers = Numbers(index as u64 + 1);
    let (mut next, mut done, mut sent, mut ends) = (start, start, 0, None);
    let (mut blocks, mut spans, mut watch) = (Vec::new(), Vec::<Span>::new(), Watch::new());
    let (mut at, mut migration, mut calm) = (routing.clone(), None::<Migration<u64>>, start + course.rest);
    let mut to = course.to.iter();
    let now = || course.clock.elapsed().as_secs_f64();
    loop {
        // What is due goes out, late or not; without a pace, a few blocks ahead.
        let mut most = 16;
        while let Some(data) = &mut data
            && ends.is_none_or(|end| next < end)
            && most > 0
            && (if course.paced { due(next) <= now() } else { next < done + 2 * LEAD })
        {
            let rows = (0..course.rows).map(|_| (numbers.next().expect("no end") % course.keys, ())).collect();
            data.send(Keyed::new(rows, |key| mixed(*key)));
            (sent, next, most) = (sent + course.rows as u64, next + 1, most - 1);
            data.advance_to(next)?;
        }
        if leads && data.is_some() {
            let reached = next.max(done) + LEAD;
            if control.time().is_some_and(|time| *time < reached) {
                control.advance_to(reached)?;
            }
            if ends.is_some() {
                // Nothing more is begun.
            } else if let Some(moving) = &mut migration {
                if moving.observe(&counts.probe) && moving.is_done() {
                    spans.last_mut().expect("it began").end = now();
                    (migration, calm) = (None, next + course.rest);
                }
            } else if next >= calm {
                match to.next() {
                    Some(routing) => {
                        migration = Some(Migration::new(course.strategy, &at, routing)?);
                        at = routing.clone();
                        spans.push(Span { begin: now(), end: f64::INFINITY });
                    }
                    // All stop at the same tick, which the others have not reached.
                    None => _ = course.end.set(next + 2 * ticks(Duration::from_millis(5)) + LEAD),
                }
            }
            let time = *control.time().expect("it is open");
            if let Some(commands) = migration.as_mut().and_then(|moving| moving.issue(time, 1)) {
                control.schedule(time, commands)?;
                control.advance_to(time + 1)?;
            }
            watch.look(false);
        }
        ends = ends.or(course.end.get().copied().map(|end| end.max(next)));
        if ends.is_some_and(|end| next >= end) && data.take().is_some() {
            control.close();
        }
        let wait = if course.paced && data.is_some() { due(next) - now() } else { 0.0 };
        let alive = match wait > 0.0 {
            true => worker.step_or_park(Some(Duration::from_secs_f64(wait)))?,
            false => worker.step()?,
        };
        while done < next && !counts.probe.less_equal(&done) {
            let end = now();
            // Without a pace nothing is due: what counts is when it ended.
            blocks.push(if course.paced { (due(done), end - due(done)) } else { (due(done), end) });
            done += 1;
        }
        if !alive && done == next && data.is_none() {
            break;
        }
    }
    let bins = counts.table.borrow_mut().take_all();
    Ok(Driven { blocks, moves: spans, sent, next, added: watch.added_mib(), bins })
}

#[cfg(test)]
mod tests {
    use super::*;

    const REST: Duration = Duration::from_millis(30);

    #[test]
    fn a_quarter_of_the_bins_moves_there_and_back_and_no_record_is_lost() {
        for tcp in [false, true] {
            let setup = Setup { tcp, keys: 500, bits: 4 };
            let quarter = setup.routing().moves_to(&setup.moved()).unwrap();
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
        let setup = Setup { tcp: false, keys: 500, bits: 4 };
        let seen = setup.restart(&setup.full(), 20_000.0, REST);
        let [span] = seen.moves[..] else { panic!("one pause") };
        // What the second workers owe first was due when the pause began, so no block of the pause counts as at rest, however short the
        // first workers took to end. Both rest for as many ticks as they were told.
        let (before, after): (Vec<_>, Vec<_>) = seen.blocks.iter().copied().partition(|(due, _)| *due < span.begin);
        assert_eq!(after[0].0, span.begin, "the first block of the second workers");
        assert!(before.len().min(after.len()) as u64 >= 2 * super::ticks(REST), "{} and {}", before.len(), after.len());
        let waited = after[0].1.max(after[1].1) * 1e3;
        assert!(seen.most_ms(&span) >= waited, "{waited} ms");
        assert!(span.end >= span.begin && seen.blocks.is_sorted_by(|a, b| a.0 <= b.0));
        assert!(setup.capacity(&setup.full(), REST) > 0.0);
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
        let setup = Setup { tcp: false, keys: 1 << 10, bits: 4 };
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

    #[test]
    fn figures_are_those_of_the_blocks_that_met_a_move_and_of_those_that_did_not() {
        let (span, ms) = (Span { begin: 1.0, end: 1.5 }, 1e-3);
        // Before; under way when it begins; due in it; in its wake; at rest again.
        let blocks = vec![(0.5, 2.0 * ms), (0.99, 30.0 * ms), (1.2, 400.0 * ms), (1.51, 90.0 * ms), (1.9, 3.0 * ms)];
        let seen = Seen { blocks: blocks.clone(), moves: vec![span], ..Seen::default() };
        assert!((seen.most_ms(&span) - 400.0).abs() < 1e-9);
        assert!((seen.at_rest_ms() - 30.0).abs() < 1e-9, "what was due before it counts as at rest");
        assert_eq!(Seen { moves: vec![span], ..Seen::default() }.at_rest_ms(), 0.0);
        assert!((caught_up(1.0, 50.0 * ms, &blocks) - 1.6).abs() < 1e-9, "the last late one of them");
        assert_eq!(caught_up(1.0, 0.5, &blocks), 1.0, "nothing was late");
    }
}
