//! `join`: what it costs that workers may join, and what a join and a leave do to the latency of a run that goes on.
//!
//! *steady*: the same exchange and count by two workers that others may join, beside two that are fixed: instructions, as valgrind
//! counts them where it is installed, since times scatter by more than is looked for; and times. An empty epoch, beside timely's.
//!
//! *course*: two workers, later a third and a fourth, of which one leaves again. Open loop: every [`TICK`] worker 0, the one source, owes a block;
//! what counts is the time from when it was due to when its effects are complete. A record costs its worker time in which it waits, as for an
//! answer of a service: so two cores can be too few workers. *calm*: two would do (R-20: a spike at each join and no gain); *saturated*: two are
//! too few, and the latency falls when others have joined. In process, workers are threads; over TCP each is a process to the others
//! (fabrics that share nothing but sockets of loopback). The figure is the time from the wish until a record has come to the joiner, beside the start
//! of three workers anew until one has come to the third; its steps are told apart, and how many counts progress keeps (flat, but for epochs that
//! wait).

use std::cell::Cell;
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use penstock_dataflow::fabric::{self, Duplex, FabricGuard, FabricTag};
use penstock_dataflow::{
    BoxError, Door, Endpoint, Error, InputHandle, JoinError, Limits, MemberFault, OperatorBuilder, Pipeline, Worker,
    execute,
};
use penstock_progress::ProbeHandle;
use serde_json::json;

use crate::empty_epoch;
use crate::harness::{Better, Case, Options, Paired, Report, compare, nanoseconds_each};
use crate::machine::Meter;

/// When blocks fall due.
const TICK: Duration = Duration::from_millis(4);
/// Records of a block.
const ROWS: u64 = 800;
/// What a record costs its worker: two workers are busy for four and for thirteen tenths of a tick.
const CALM: Duration = Duration::from_nanos(4_000);
const SATURATED: Duration = Duration::from_nanos(13_000);
/// Workers of a course before others join.
const FOUNDERS: usize = 2;
/// After how many ticks the counts are counted.
const SIZED: u64 = 25;
/// Length of a sample of the series.
const SAMPLE: f64 = 0.1;
const TAG: FabricTag = FabricTag { query: 8, generation: 1 };

/// Runs the bench.
///
/// # Panics
/// When a worker fails or loses a record.
pub fn run(options: &Options, report: &mut Report) {
    let budget = options.budget(8);
    for (name, unit, sizes) in [
        ("epochs of 1,792 to 2,304 records", "instructions/record", &SIZES[..]),
        ("an empty epoch", "instructions/epoch", &[0][..]),
    ] {
        let meter = Meter::start();
        let each = |joinable| sizes.iter().map(|rows| instructions(joinable, *rows)).collect::<Option<Vec<f64>>>();
        let (Some(ours), Some(peer)) = (each(true), each(false)) else {
            eprintln!("penstock-bench: valgrind is not installed, so instructions are not counted");
            break;
        };
        let case = format!("w2 steady {name}, instructions: joinable vs fixed");
        let case = Case::new(case, unit, Better::Lower, Paired::new(ours, peer, meter.stop()));
        // Blocks of other lengths are other work, so the pairs say what being joinable costs, and medians over the lengths do not.
        report.case(case.with("part", "steady").with("rows_each", json!(sizes)).of_pairs());
    }
    let paired = compare(budget, || steady(true), || steady(false));
    let case = Case::new(format!("w2 steady {FULL_EPOCH}, time: joinable vs fixed"), "ns/epoch", Better::Lower, paired);
    report.case(case.with("part", "steady").with("rows", ROWS_EACH));
    let epochs = empty_epoch::SPINNING;
    let ours = || empty_epoch::ours(fabric::joinable(2).0, epochs, false);
    let paired = compare(budget, ours, || empty_epoch::peer(2, epochs, false));
    let case = "w2 joinable, empty epoch, spinning vs timely 0.31 spinning";
    report.case(Case::new(case, "us/epoch", Better::Lower, paired).with("part", "empty").with("epochs", epochs));
    let ticks = (budget.as_secs_f64() / 2.0).clamp(0.8, 6.0) / TICK.as_secs_f64();
    for tcp in [false, true] {
        for (load, cost) in [("calm", CALM), ("saturated", SATURATED)] {
            let meter = Meter::start();
            let course = course(tcp, cost, ticks as u64);
            let anew: Vec<f64> = (0..course.joins.len()).map(|_| start_anew(tcp, cost).0).collect();
            let usage = meter.stop();
            let whole = course.joins.iter().map(|steps| steps.iter().sum()).collect();
            let step = |at: usize| json!(course.joins.iter().map(|steps| steps[at]).collect::<Vec<f64>>());
            let place = if tcp { "tcp" } else { "threads" };
            let case = format!("{place} {load}: from the wish to the first record vs the start of three anew");
            let paired = Paired::new(whole, anew, usage);
            report.case(
                Case::new(case, "ms", Better::Lower, paired)
                    .with("part", "course")
                    .with("until", "a record has come, on both sides")
                    .with("transport", place)
                    .with("load", load)
                    .with("admitted_ms", step(0))
                    .with("built_ms", step(1))
                    .with("bootstrap_ms", step(2))
                    .with("first_record_ms", step(3))
                    .with("events", json!(course.events))
                    .with("series", json!(course.series()))
                    .with("live_counts", json!(course.sizes)),
            );
        }
    }
}

/// Each worker sends so many records in an epoch.
const ROWS_EACH: u64 = 1024;
const FULL_EPOCH: &str = "epoch of 2,048 records";
/// Records of a worker in an epoch, where instructions are counted. Several, because malloc takes other ways for other lengths of blocks, and not the
/// same in both kinds: of a single one the ratio is off by four percent to either side.
const SIZES: [u64; 9] = [896, 928, 960, 992, 1024, 1056, 1088, 1120, 1152];

fn seats(joinable: bool) -> Vec<Endpoint> {
    if joinable { fabric::joinable(2).0 } else { fabric::threads(2) }
}

/// An exchange and a count.
fn count(worker: &mut Worker) -> (InputHandle<u64, Vec<u64>>, ProbeHandle<u64>) {
    worker.dataflow::<u64, _>("steady", |scope| {
        let (input, stream) = scope.new_input::<Vec<u64>>();
        let counted = stream.exchange_by(|value| *value).unary::<u64, _>(Pipeline, "count", |_| {
            let mut counts = vec![0_u64; 1 << 12];
            move |input, _, _| {
                input.for_each(|_, block: Vec<u64>| block.iter().for_each(|at| counts[*at as usize & 0xfff] += 1));
                Ok(())
            }
        });
        (input, counted.probe().0)
    })
}

fn feed(input: &mut InputHandle<u64, Vec<u64>>, rows: u64, epoch: u64) {
    if rows > 0 {
        input.send((0..rows).map(|row| row.wrapping_mul(epoch)).collect());
    }
    input.advance_to(epoch).expect("a later epoch");
}

/// Nanoseconds of an epoch.
fn steady(joinable: bool) -> f64 {
    const EPOCHS: u64 = 1_000;
    let threads = execute(seats(joinable), move |worker: &mut Worker| {
        let (mut input, probe) = count(worker);
        worker.bootstrap()?;
        let mut run = |worker: &mut Worker, epochs: u64| -> Result<(), Error> {
            for _ in 0..epochs {
                let next = input.time() + 1;
                feed(&mut input, ROWS_EACH, next);
                worker.step_until(None, || !probe.less_than(&next))?;
            }
            Ok(())
        };
        run(worker, 100)?;
        let mut outcome = Ok(());
        let each = nanoseconds_each(EPOCHS as usize, || outcome = run(worker, EPOCHS));
        outcome?;
        Ok::<_, BoxError>(each)
    });
    let each = threads.into_iter().map(|thread| thread.join().expect("no panic").expect("no worker fails"));
    each.fold(0.0, f64::max)
}

/// `penstock-bench --steady KIND ROWS EPOCHS`: the same by one thread that steps both workers in turns, so the same instructions each time.
///
/// # Errors
/// What is wrong with the words, for people.
///
/// # Panics
/// When a worker fails.
pub fn serve(words: &[String]) -> Result<(), String> {
    let [kind, rows, epochs] = words else { return Err(format!("{words:?}: KIND ROWS EPOCHS are wanted")) };
    let number = |word: &String| word.parse::<u64>().map_err(|_| format!("{word:?} is no number"));
    let (rows, epochs) = (number(rows)?, number(epochs)?);
    let mut workers: Vec<Worker> = seats(kind == "joinable").into_iter().map(Worker::new).collect();
    let mut ends: Vec<_> = workers.iter_mut().map(count).collect();
    for worker in &mut workers {
        worker.bootstrap().expect("a founder");
    }
    let turn = |workers: &mut [Worker]| {
        workers.iter_mut().map(|worker| worker.step().expect("no worker fails")).filter(|more| *more).count() > 0
    };
    for epoch in 1..=epochs {
        ends.iter_mut().for_each(|(input, _)| feed(input, rows, epoch));
        while ends.iter().any(|(_, probe)| probe.less_than(&epoch)) {
            turn(&mut workers);
        }
    }
    drop(ends);
    while turn(&mut workers) {}
    Ok(())
}

/// Instructions of an epoch of both workers, as valgrind counts them, for each record if there are any; none where it is not installed. What comes
/// before the first epoch and behind the last is in both of two runs.
fn instructions(joinable: bool, rows: u64) -> Option<f64> {
    let (few, many) = (200, 600);
    let program = std::env::current_exe().ok()?;
    let of = |epochs: u64| {
        let mut command = Command::new("valgrind");
        command.args(["--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"]).arg(&program);
        let kind = if joinable { "joinable" } else { "fixed" };
        let output = command.args(["--steady", kind]).args([rows, epochs].map(|number| number.to_string())).output();
        let told = output.ok().filter(|output| output.status.success())?;
        read_count(&String::from_utf8_lossy(&told.stderr))
    };
    Some((of(many)? - of(few)?) / ((many - few) * (2 * rows).max(1)) as f64)
}

/// The number in `==7== I refs:   1,234`.
fn read_count(told: &str) -> Option<f64> {
    let (_, number) = told.lines().find_map(|line| line.split_once("refs:"))?;
    number.trim().replace(',', "").parse().ok()
}

/// What a course showed.
struct Course {
    /// When each block was due, and how long it took, seconds.
    blocks: Vec<(f64, f64)>,
    /// Seconds, and how many counts progress keeps at worker 0.
    sizes: Vec<[f64; 2]>,
    /// What was done when, seconds.
    events: Vec<(String, f64)>,
    /// Of each join in ms: until its seat is there, its dataflow is built, `bootstrap` returns, and a record has come.
    joins: Vec<[f64; 4]>,
}

impl Course {
    /// For each sample its beginning in seconds, and the median and the greatest latency in ms.
    fn series(&self) -> Vec<[f64; 3]> {
        let end = self.blocks.iter().map(|(due, _)| *due).fold(0.0, f64::max);
        let samples = (0..=(end / SAMPLE) as usize).filter_map(|number| {
            let from = number as f64 * SAMPLE;
            let inside = self.blocks.iter().filter(|(due, _)| (from..from + SAMPLE).contains(due));
            let mut inside: Vec<f64> = inside.map(|(_, latency)| latency * 1e3).collect();
            inside.sort_by(f64::total_cmp);
            Some([from, inside.get(inside.len() / 2).copied()?, *inside.last()?])
        });
        samples.collect()
    }
}

/// What the workers of a course know.
struct Plan {
    clock: Instant,
    cost: Duration,
    ticks: u64,
    /// Ticks at which somebody is to join.
    joins: [u64; 2],
    /// The tick at which the first joiner is to leave.
    leave: u64,
    leaves: AtomicBool,
    wish: Mutex<Sender<()>>,
    /// By worker that a record came to: when its dataflow was built, its bootstrap returned, and its first record came.
    steps: Mutex<Vec<(usize, [Instant; 3])>>,
    blocks: Mutex<Vec<(f64, f64)>>,
    sizes: Mutex<Vec<[f64; 2]>>,
    left: Mutex<Option<f64>>,
    seen: Mutex<u64>,
}

/// The program of every worker of a course.
fn follow(worker: &mut Worker, plan: &Arc<Plan>) -> Result<(), BoxError> {
    let (first, cost) = (Rc::new(Cell::new(None)), plan.cost);
    let (came, count) = (first.clone(), Rc::new(Cell::new(0_u64)));
    let counted = count.clone();
    let (input, probe) = worker.dataflow::<u64, _>("course", |scope| {
        let (input, stream) = scope.new_input::<Vec<u64>>();
        let mut builder = OperatorBuilder::new(scope, "serve");
        let mut blocks = builder.input(&stream.exchange_by(|value| *value), Pipeline);
        let (_, done) = builder.output::<u64>();
        let again = builder.activator();
        builder.build(move |_| {
            move |_| {
                // One a run: between them the worker hears of who joins.
                if let Some((_, block)) = blocks.next() {
                    came.set(came.get().or_else(|| Some(Instant::now())));
                    counted.set(counted.get() + block.len() as u64);
                    std::thread::sleep(cost * block.len() as u32);
                    again.activate();
                }
                Ok(())
            }
        });
        (input, done.probe().0)
    });
    let (mut input, built) = (Some(input), Instant::now());
    match worker.bootstrap() {
        // The run was over before it had its place.
        Err(Error::Member { fault: MemberFault::Over, .. }) => return Ok(()),
        joined => joined?,
    };
    let seated = Instant::now();
    if worker.index() == 0 {
        let mut source = input.take().ok_or("an input")?;
        let mut waiting = std::collections::VecDeque::new();
        let (mut blocks, mut sizes) = (Vec::new(), Vec::new());
        let due = |tick: u64| TICK * tick as u32;
        let mut look = |waiting: &mut std::collections::VecDeque<u64>| {
            while let Some(tick) = waiting.front().copied().filter(|tick| !probe.less_equal(tick)) {
                waiting.pop_front();
                let (due, now) = (due(tick), plan.clock.elapsed());
                blocks.push((due.as_secs_f64(), now.saturating_sub(due).as_secs_f64()));
            }
        };
        for tick in 0..plan.ticks {
            while plan.clock.elapsed() < due(tick) {
                let left = due(tick).saturating_sub(plan.clock.elapsed());
                worker.step_or_park(Some(left))?;
                look(&mut waiting);
            }
            source.send((0..ROWS).map(|row| row + tick).collect());
            waiting.push_back(tick);
            source.advance_to(tick + 1)?;
            worker.step()?;
            look(&mut waiting);
            if tick % SIZED == 0 {
                sizes.push([plan.clock.elapsed().as_secs_f64(), worker.live_counts() as f64]);
            }
            if plan.joins.contains(&tick) {
                plan.wish.lock().map_err(|_| "a panic")?.send(())?;
            }
            if tick == plan.leave {
                plan.leaves.store(true, Ordering::SeqCst);
            }
        }
        drop(source);
        while !waiting.is_empty() {
            worker.step_or_park(None)?;
            look(&mut waiting);
        }
        *plan.blocks.lock().map_err(|_| "a panic")? = blocks;
        *plan.sizes.lock().map_err(|_| "a panic")? = sizes;
    }
    drop(input);
    let leaves = worker.index() == 2;
    loop {
        let more = worker.step_or_park(None)?;
        if !more {
            break;
        }
        if leaves && plan.leaves.load(Ordering::SeqCst) {
            worker.leave()?;
            *plan.left.lock().map_err(|_| "a panic")? = Some(plan.clock.elapsed().as_secs_f64());
            break;
        }
    }
    *plan.seen.lock().map_err(|_| "a panic")? += count.get();
    if let Some(first) = first.get() {
        plan.steps.lock().map_err(|_| "a panic")?.push((worker.index(), [built, seated, first]));
    }
    Ok(())
}

type Threads = Vec<JoinHandle<Result<(), Error>>>;

/// The workers of a run, each a process to the others or all in one.
struct Fleet {
    tcp: bool,
    doors: Vec<Door>,
    guards: Vec<FabricGuard>,
    threads: Threads,
}

fn pair() -> (Box<dyn Duplex>, Box<dyn Duplex>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port of loopback");
    let ours = TcpStream::connect(listener.local_addr().expect("it is bound")).expect("it listens");
    (Box::new(ours), Box::new(listener.accept().expect("it was connected").0))
}

impl Fleet {
    fn found(tcp: bool, workers: usize, plan: &Arc<Plan>) -> Self {
        let mut fleet = Fleet { tcp, doors: Vec::new(), guards: Vec::new(), threads: Vec::new() };
        if !tcp {
            let (seats, door) = fabric::joinable(workers);
            fleet.doors.push(door);
            fleet.start(seats, plan);
            return fleet;
        }
        let empty = || (0..workers).map(|_| None).collect::<Vec<Option<Box<dyn Duplex>>>>();
        let mut streams: Vec<_> = (0..workers).map(|_| empty()).collect();
        for (one, two) in (0..workers).flat_map(|one| (one + 1..workers).map(move |two| (one, two))) {
            let (left, right) = pair();
            (streams[one][two], streams[two][one]) = (Some(left), Some(right));
        }
        for (process, streams) in streams.into_iter().enumerate() {
            let made = fabric::joinable_processes(process, 1, streams, TAG);
            let (seats, door, guard) = made.expect("processes over loopback");
            fleet.doors.push(door);
            fleet.guards.push(guard);
            fleet.start(seats, plan);
        }
        fleet
    }

    fn start(&mut self, seats: Vec<Endpoint>, plan: &Arc<Plan>) {
        let plan = plan.clone();
        self.threads.extend(execute(seats, move |worker: &mut Worker| follow(worker, &plan)));
    }

    /// When it was admitted; none where the run was over before.
    fn join(&mut self, plan: &Arc<Plan>) -> Option<Instant> {
        let door = if self.tcp {
            let process = self.doors.len();
            let dial = |(other, door): (usize, &Door)| {
                let (ours, theirs) = pair();
                door.link(process, theirs).expect("a new number");
                (other, ours)
            };
            let streams = self.doors.iter().enumerate().map(dial).collect();
            let made = fabric::join_processes(process, streams, TAG, Limits::default());
            let (door, guard) = made.expect("a process over loopback");
            self.doors.push(door.clone());
            self.guards.push(guard);
            door
        } else {
            self.doors[0].clone()
        };
        let seats = match door.ask(1).and_then(|ticket| ticket.seats()) {
            Err(JoinError::Over) => return None,
            seats => seats.expect("a run that goes on"),
        };
        let admitted = Instant::now();
        self.start(seats, plan);
        Some(admitted)
    }

    fn end(self) {
        for thread in self.threads {
            thread.join().expect("no panic").expect("no worker fails");
        }
        // Each waits for the others' ends of the connections.
        let leaving: Vec<_> = self.guards.into_iter().map(|guard| std::thread::spawn(move || drop(guard))).collect();
        leaving.into_iter().for_each(|thread| thread.join().expect("no panic"));
    }
}

fn plan(cost: Duration, ticks: u64, joins: [u64; 2], leave: u64) -> (Arc<Plan>, std::sync::mpsc::Receiver<()>) {
    let (wish, wishes) = channel();
    let plan = Plan {
        clock: Instant::now(),
        cost,
        ticks,
        joins,
        leave,
        leaves: AtomicBool::new(false),
        wish: Mutex::new(wish),
        steps: Mutex::default(),
        blocks: Mutex::default(),
        sizes: Mutex::default(),
        left: Mutex::default(),
        seen: Mutex::default(),
    };
    (Arc::new(plan), wishes)
}

fn milliseconds(from: Instant, to: Instant) -> f64 {
    to.saturating_duration_since(from).as_secs_f64() * 1e3
}

fn course(tcp: bool, cost: Duration, ticks: u64) -> Course {
    let (plan, wishes) = plan(cost, ticks, [ticks / 4, ticks / 2], ticks * 4 / 5);
    let mut fleet = Fleet::found(tcp, FOUNDERS, &plan);
    let mut asked = Vec::new();
    for _ in plan.joins {
        wishes.recv().expect("the source goes on");
        let wish = Instant::now();
        asked.extend(fleet.join(&plan).map(|admitted| (wish, admitted)));
    }
    fleet.end();
    let mut steps = std::mem::take(&mut *plan.steps.lock().expect("no panic"));
    steps.retain(|(index, _)| *index >= FOUNDERS);
    steps.sort_by_key(|(index, _)| *index);
    assert_eq!(*plan.seen.lock().expect("no panic"), ticks * ROWS, "no record is lost");
    let mut events = Vec::new();
    let mut joins = Vec::new();
    for ((wish, admitted), (_, [built, seated, first])) in asked.into_iter().zip(steps) {
        events.push(("join".to_owned(), milliseconds(plan.clock, seated) / 1e3));
        let parts = [(wish, admitted), (admitted, built), (built, seated), (seated, first)];
        joins.push(parts.map(|(from, to)| milliseconds(from, to)));
    }
    events.extend(plan.left.lock().expect("no panic").map(|left| ("leave".to_owned(), left)));
    let blocks = std::mem::take(&mut *plan.blocks.lock().expect("no panic"));
    let sizes = std::mem::take(&mut *plan.sizes.lock().expect("no panic"));
    Course { blocks, sizes, events, joins }
}

/// Milliseconds until a record has come to the third of three workers that were not there, as one comes to a worker that joins two; and until their
/// first block is done.
fn start_anew(tcp: bool, cost: Duration) -> (f64, f64) {
    let (plan, _wishes) = plan(cost, 1, [u64::MAX; 2], u64::MAX);
    let fleet = Fleet::found(tcp, FOUNDERS + 1, &plan);
    fleet.end();
    let (steps, blocks) = (plan.steps.lock().expect("no panic"), plan.blocks.lock().expect("no panic"));
    let (_, [.., first]) = steps.iter().find(|(index, _)| *index == FOUNDERS).expect("each has a share of a block");
    (milliseconds(plan.clock, *first), blocks.iter().map(|(_, latency)| latency * 1e3).fold(0.0, f64::max))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_join_and_leave_in_both_places() {
        for tcp in [false, true] {
            // On a busy machine one that joins may have no block of a short course.
            let courses = [40, 400, 4_000].map(|ticks| (ticks, move || course(tcp, Duration::from_nanos(100), ticks)));
            let mut tried = courses.into_iter().map(|(ticks, run)| (ticks, run()));
            let (ticks, course) = tried.find(|(_, course)| course.joins.len() == 2).expect("both have blocks");
            assert_eq!(course.blocks.len() as u64, ticks, "tcp {tcp}");
            let events: Vec<&str> = course.events.iter().map(|(what, _)| what.as_str()).collect();
            assert_eq!(events, ["join", "join", "leave"]);
            assert!(!course.series().is_empty() && course.sizes.iter().all(|[_, counts]| *counts > 0.0));
            // The time in which the first block is worked on does not count: a worker that joins has not done it either.
            let (first, done) = start_anew(tcp, Duration::from_micros(100));
            assert!(first > 0.0 && done - first >= 20.0, "at least 200 records of 0.1 ms: {first} to {done} ms");
        }
    }

    #[test]
    fn both_kinds_are_stepped_in_turns() {
        let words = |line: &str| line.split(' ').map(String::from).collect::<Vec<_>>();
        for kind in ["joinable", "fixed"] {
            assert_eq!(serve(&words(&format!("{kind} 16 20"))), Ok(()));
        }
        assert!(serve(&words("fixed 16 many")).is_err() && serve(&words("fixed")).is_err());
        assert!(steady(true) > 0.0);
    }

    #[test]
    fn the_count_of_valgrind_is_read() {
        assert_eq!(read_count("==7== Cachegrind\n==7== \n==7== I   refs:      1,234,567\n==7== "), Some(1_234_567.0));
        assert_eq!(read_count("==7== no such program"), None);
    }
}
