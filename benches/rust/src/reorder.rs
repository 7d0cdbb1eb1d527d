//! `reorder`: items are worked on by threads and leave in order; the non-blocking buffer beside its comparators and peers.
//!
//! Every slot carries a batch of items, every item costs a spinning loop. Threads take numbers from one counter; the sink folds the
//! items into a checksum that depends on their order, compared with that of a serial run after every repeat. *unordered* is the bound:
//! the same work, each thread with a checksum of its own. Peers: the flag of the slides, one lock, rayon's `par_bridge` with a heap
//! behind a lock (unbounded), and oneTBB's `parallel_pipeline` where the system has it, with the best of [`TOKENS`] for the case, which is
//! found before anything counts.

use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::hint::black_box;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use penstock_ordered::reorder::{Flagged, Locked, NonBlocking, Refusal, Reorder};
use rayon::iter::{ParallelBridge, ParallelIterator};

use crate::harness::{Better, Case, Options, Report, compare};
use crate::machine;

mod tbb;

use tbb::Tbb;

/// Slots of a buffer.
const SLOTS: usize = 1024;
/// Tokens a thread that oneTBB is tried with: how many slots may be under way in its pipeline.
const TOKENS: [usize; 5] = [2, 4, 16, 64, 512];
/// How long one repeat should take.
const REPEAT: Duration = Duration::from_millis(30);

/// One case, without the peer.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    threads: usize,
    cost_ns: u64,
    batch: u64,
    slots: u64,
}

/// What one repeat gave.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    seconds: f64,
    sum: u64,
    /// Median and 99th percentile of the time from a slot's number to the sink, where it was taken.
    latency_ns: Option<(u64, u64)>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Side {
    NonBlocking,
    Unordered,
    Locked,
    Flagged,
    Rayon,
    Tbb,
}

const PEERS: [(Side, &str); 5] = [
    (Side::Unordered, "unordered"),
    (Side::Tbb, "oneTBB parallel_pipeline"),
    (Side::Locked, "locked"),
    (Side::Flagged, "flagged"),
    (Side::Rayon, "rayon par_bridge + heap"),
];

impl Shape {
    fn new(threads: usize, cost_ns: u64, batch: u64) -> Self {
        // The rest of what an item costs is some 40 ns per slot and 2 per item.
        let slot_ns = 40 + batch * (cost_ns + 2);
        let slots = (REPEAT.as_nanos() as u64 * threads.min(machine::cores()) as u64 / slot_ns).max(12);
        Self { threads, cost_ns, batch, slots }
    }

    fn name(&self) -> String {
        let cost = match self.cost_ns {
            1000.. => format!("{} µs", self.cost_ns / 1000),
            ns => format!("{ns} ns"),
        };
        format!("item={cost} batch={} threads={}", self.batch, self.threads)
    }

    fn items(&self) -> u64 {
        self.slots * self.batch
    }

    /// Worth its time: a slot takes at most 20 ms.
    fn sensible(&self) -> bool {
        self.cost_ns * self.batch <= 20_000_000
    }
}

/// Which cases: (threads, cost, batch, all peers or only the first two).
fn shapes(quick: bool) -> Vec<(Shape, usize)> {
    let mut shapes = Vec::new();
    if quick {
        let all = [(0, 1, 5), (100, 1, 5), (1_000, 1, 5), (100, 64, 3)];
        return all.into_iter().map(|(cost, batch, peers)| (Shape::new(2, cost, batch), peers)).collect();
    }
    for batch in [1, 64, 1024] {
        for cost in [0, 100, 1_000, 10_000, 100_000] {
            shapes.push((Shape::new(2, cost, batch), PEERS.len()));
        }
    }
    for threads in std::iter::once(1).chain(machine::wide()) {
        for cost in [0, 100, 1_000, 10_000] {
            shapes.push((Shape::new(threads, cost, 1), 3));
        }
    }
    shapes.retain(|(shape, _)| shape.sensible());
    shapes
}

/// Runs the bench.
///
/// # Panics
/// When a checksum differs from that of a serial run.
pub fn run(options: &Options, report: &mut Report) {
    let turn_ns = calibrate();
    let (tbb, told) = match Tbb::start() {
        Ok(tbb) => {
            let told = tbb.version.clone();
            (Some(RefCell::new(tbb)), told)
        }
        Err(reason) => {
            eprintln!("reorder: without oneTBB: {reason}");
            (None, format!("skipped: {reason}"))
        }
    };
    let shapes = shapes(options.quick);
    let cases = shapes.iter().map(|(_, peers)| peers).sum();
    for (shape, peers) in shapes {
        let turns = (shape.cost_ns as f64 / turn_ns).round() as u64;
        let expected = serial(&shape);
        let tokens = Cell::new(TOKENS[0]);
        let once = |side: Side, latency: bool| {
            let run = measured(side, &shape, turns, latency, tbb.as_ref().map(|tbb| (tbb, tokens.get())));
            let wanted = if side == Side::Unordered { expected.1 } else { expected.0 };
            assert_eq!(run.sum, wanted, "{side:?} did not give the output of a serial run: {}", shape.name());
            run
        };
        let rate = |side: Side| shape.items() as f64 / once(side, false).seconds / 1e6;
        for (side, peer) in &PEERS[..peers] {
            if *side == Side::Tbb && tbb.is_none() {
                continue;
            }
            if *side == Side::Tbb {
                let tried = |number| {
                    tokens.set(number);
                    // The first run may find cold what the second does not.
                    rate(Side::Tbb).max(rate(Side::Tbb))
                };
                tokens.set(best(&TOKENS, tried));
            }
            let paired = compare(options.budget(cases), || rate(Side::NonBlocking), || rate(*side));
            let mut case = Case::new(format!("{} vs {peer}", shape.name()), "M items/s", Better::Higher, paired)
                .with("slots", SLOTS)
                .with("slots_sent", shape.slots)
                .with("one_tbb", told.clone());
            if *side == Side::Tbb {
                case = case.with("tokens_a_thread", tokens.get()).with("tokens_tried", &TOKENS[..]);
            }
            if shape.batch == 1 && (1_000..=10_000).contains(&shape.cost_ns) {
                for (name, side) in [("ours", Side::NonBlocking), ("peer", *side)] {
                    if let Some((p50, p99)) = once(side, true).latency_ns {
                        case = case.with(&format!("{name}_p50_us"), p50 as f64 / 1e3);
                        case = case.with(&format!("{name}_p99_us"), p99 as f64 / 1e3);
                    }
                }
            }
            report.case(case);
        }
    }
}

/// The number at which there is the greatest rate; of equal ones the first.
fn best(numbers: &[usize], mut rate: impl FnMut(usize) -> f64) -> usize {
    let rates = numbers.iter().map(|&number| (number, rate(number)));
    rates.reduce(|best, next| if next.1 > best.1 { next } else { best }).expect("there are some").0
}

/// Nanoseconds of one turn of the spinning loop, undisturbed.
pub(crate) fn calibrate() -> f64 {
    const TURNS: u64 = 2_000_000;
    let once = |_| {
        let begin = Instant::now();
        black_box(spun(7, black_box(TURNS)));
        begin.elapsed().as_nanos() as f64 / TURNS as f64
    };
    (0..7).map(once).fold(f64::INFINITY, f64::min)
}

fn mixed(number: u64) -> u64 {
    let z = (number ^ (number >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z ^ (z >> 27)
}

/// The work on one item.
pub(crate) fn spun(number: u64, turns: u64) -> u64 {
    let mut x = number;
    for _ in 0..turns {
        x = (x ^ (x >> 29)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }
    black_box(x);
    mixed(number)
}

/// What is in a slot.
trait Payload: Send {
    fn make(t: u64, batch: u64, turns: u64) -> Self;
    fn each(&self, act: impl FnMut(u64));
}

impl Payload for u64 {
    fn make(t: u64, _: u64, turns: u64) -> Self {
        spun(t, turns)
    }
    fn each(&self, mut act: impl FnMut(u64)) {
        act(*self);
    }
}

impl Payload for Vec<u64> {
    fn make(t: u64, batch: u64, turns: u64) -> Self {
        (t * batch..(t + 1) * batch).map(|number| spun(number, turns)).collect()
    }
    fn each(&self, act: impl FnMut(u64)) {
        self.iter().copied().for_each(act);
    }
}

struct Slot<P> {
    payload: P,
    begun: Option<Instant>,
}

impl<P: Payload> Slot<P> {
    fn make(t: u64, shape: &Shape, turns: u64, latency: bool) -> Self {
        let begun = latency.then(Instant::now);
        Self { payload: P::make(t, shape.batch, turns), begun }
    }
}

/// The end of the line: a checksum that depends on the order.
#[derive(Default)]
struct Sink {
    sum: u64,
    latencies: Vec<u64>,
}

impl Sink {
    fn take<P: Payload>(&mut self, slot: &Slot<P>) {
        slot.payload.each(|value| self.sum = self.sum.wrapping_mul(31).wrapping_add(value));
        if let Some(begun) = slot.begun {
            self.latencies.push(begun.elapsed().as_nanos() as u64);
        }
    }

    fn run(mut self, begin: Instant) -> Run {
        let seconds = begin.elapsed().as_secs_f64();
        self.latencies.sort_unstable();
        let at = |share: f64| self.latencies[((self.latencies.len() - 1) as f64 * share) as usize];
        let latency_ns = (!self.latencies.is_empty()).then(|| (at(0.5), at(0.99)));
        Run { seconds, sum: self.sum, latency_ns }
    }
}

/// The checksums of the output in order, and without regard to the order.
fn serial(shape: &Shape) -> (u64, u64) {
    let fold = |(ordered, any): (u64, u64), number| {
        let value = mixed(number);
        (ordered.wrapping_mul(31).wrapping_add(value), any.wrapping_add(value))
    };
    (0..shape.items()).fold((0, 0), fold)
}

/// `tbb`: the program, and its tokens a thread.
fn measured(side: Side, shape: &Shape, turns: u64, latency: bool, tbb: Option<(&RefCell<Tbb>, usize)>) -> Run {
    match (side, shape.batch) {
        (Side::Tbb, _) => {
            let (tbb, tokens) = tbb.expect("checked before");
            tbb.borrow_mut().run(shape, tokens, turns, latency)
        }
        (_, 1) => threads::<u64>(side, shape, turns, latency),
        _ => threads::<Vec<u64>>(side, shape, turns, latency),
    }
}

fn threads<P: Payload>(side: Side, shape: &Shape, turns: u64, latency: bool) -> Run {
    let sink = Mutex::new(Sink::default());
    let mut own = Sink::default();
    if latency {
        own.latencies.reserve(shape.slots as usize);
    }
    let take = |_, slot: Slot<P>| own.take(&slot);
    let made = "there are slots";
    let begin = match side {
        Side::NonBlocking => through(&NonBlocking::new(SLOTS, take).expect(made), shape, turns, latency),
        Side::Locked => through(&Locked::new(SLOTS, take).expect(made), shape, turns, latency),
        Side::Flagged => through(&Flagged::new(SLOTS, take).expect(made), shape, turns, latency),
        Side::Unordered => unordered::<P>(shape, turns, &sink),
        Side::Rayon => bridged::<P>(shape, turns, latency, &sink),
        Side::Tbb => unreachable!("it is a program of its own"),
    };
    let whole = if matches!(side, Side::Unordered | Side::Rayon) {
        sink.into_inner().expect("no thread panicked")
    } else {
        own
    };
    whole.run(begin)
}

/// Each thread calls `act` with numbers until they are used up; when it began.
fn numbers(shape: &Shape, act: impl Fn(&mut dyn Iterator<Item = u64>) + Sync) -> Instant {
    let next = AtomicU64::new(0);
    let work = || {
        let taken = std::iter::from_fn(|| Some(next.fetch_add(1, Ordering::Relaxed)));
        act(&mut taken.take_while(|t| *t < shape.slots));
    };
    let begin = Instant::now();
    std::thread::scope(|scope| {
        for _ in 1..shape.threads {
            scope.spawn(work);
        }
        work();
    });
    begin
}

fn through<P: Payload>(buffer: &impl Reorder<Slot<P>>, shape: &Shape, turns: u64, latency: bool) -> Instant {
    numbers(shape, |taken| {
        for t in taken {
            let mut slot = Slot::make(t, shape, turns, latency);
            while let Err(refused) = buffer.send(t, slot) {
                assert_eq!(refused.why, Refusal::Full);
                slot = refused.item;
                std::thread::yield_now();
            }
        }
    })
}

fn unordered<P: Payload>(shape: &Shape, turns: u64, sink: &Mutex<Sink>) -> Instant {
    numbers(shape, |taken| {
        let mut sum = 0_u64;
        for t in taken {
            let slot = Slot::<P>::make(t, shape, turns, false);
            slot.payload.each(|value| sum = sum.wrapping_add(value));
        }
        let mut whole = sink.lock().expect("no thread panicked");
        whole.sum = whole.sum.wrapping_add(sum);
    })
}

/// An entry of the heap: the least number is the greatest.
struct Waiting<P>(Reverse<u64>, Slot<P>);

impl<P> PartialEq for Waiting<P> {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}
impl<P> Eq for Waiting<P> {}
impl<P> PartialOrd for Waiting<P> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl<P> Ord for Waiting<P> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.cmp(&other.0)
    }
}

fn bridged<P: Payload>(shape: &Shape, turns: u64, latency: bool, sink: &Mutex<Sink>) -> Instant {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(shape.threads).build().expect("threads");
    let waiting = Mutex::new((0, BinaryHeap::new()));
    let begin = Instant::now();
    pool.install(|| {
        (0..shape.slots).par_bridge().for_each(|t| {
            let slot = Slot::<P>::make(t, shape, turns, latency);
            let mut waiting = waiting.lock().expect("no thread panicked");
            let (next, heap) = &mut *waiting;
            heap.push(Waiting(Reverse(t), slot));
            while heap.peek().is_some_and(|first| first.0.0 == *next) {
                let Waiting(_, slot) = heap.pop().expect("it was there");
                sink.lock().expect("no thread panicked").take(&slot);
                *next += 1;
            }
        });
    });
    begin
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bench asserts it in every repeat; here without the time.
    #[test]
    fn every_side_gives_the_output_of_a_serial_run() {
        for batch in [1, 3] {
            let shape = Shape { threads: 3, cost_ns: 0, batch, slots: 2_000 };
            let (ordered, any) = serial(&shape);
            for (side, _) in PEERS.into_iter().chain([(Side::NonBlocking, "")]).filter(|(side, _)| *side != Side::Tbb) {
                let run = measured(side, &shape, 3, true, None);
                assert_eq!(run.sum, if side == Side::Unordered { any } else { ordered }, "{side:?}");
                assert_eq!(run.latency_ns.is_some(), side != Side::Unordered, "{side:?}");
            }
        }
    }

    #[test]
    fn the_c_program_agrees_where_there_is_one() {
        let Ok(mut tbb) = Tbb::start() else { return };
        for (batch, tokens) in [(1, TOKENS[0]), (3, TOKENS[0]), (1, TOKENS[4]), (3, TOKENS[4])] {
            let shape = Shape { threads: 2, cost_ns: 0, batch, slots: 500 };
            let run = tbb.run(&shape, tokens, 3, true);
            assert_eq!((run.sum, run.latency_ns.is_some()), (serial(&shape).0, true), "{batch} {tokens}");
        }
    }

    #[test]
    fn the_peer_has_the_number_with_which_it_is_fastest() {
        let mut tried = Vec::new();
        let found = best(&TOKENS, |number| {
            tried.push(number);
            [1.0, 3.0, 7.0, 7.0, 2.0][TOKENS.iter().position(|of| *of == number).unwrap()]
        });
        assert_eq!((found, &tried[..]), (16, &TOKENS[..]));
    }
}
