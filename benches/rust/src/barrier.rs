//! `barrier`: rounds of a re-usable barrier, beside timely's `synchronization::Barrier`.
//!
//! Each repeat starts the workers as threads, passes some rounds that do not count, and then times the rest on worker 0. *waiting* is
//! `wait` as programs call it: timely steps without pause, ours looks again for some microseconds and then parks. *parked* is the split
//! form with `step_or_park` on both sides, so that every wait parks.

use std::time::Instant;

use penstock_coord::Barrier;
use penstock_dataflow::{BoxError, execute, fabric};
use timely::synchronization::Barrier as Peer;

use crate::harness::{Better, Case, Options, Report, compare};

/// Rounds before the timed ones.
const WARM: u64 = 200;

/// Runs the bench.
///
/// # Panics
/// When a worker fails or misses a round.
pub fn run(options: &Options, report: &mut Report) {
    let cases = [(1, false), (2, false), (2, true)];
    for (workers, parked) in cases {
        // On a busy machine a round of two workers that step without pause takes milliseconds.
        let rounds = if workers == 1 { 20_000 } else { 1_000 };
        let paired =
            compare(options.budget(cases.len()), || ours(workers, rounds, parked), || peer(workers, rounds, parked));
        let way = if parked { "parked" } else { "waiting" };
        let case = format!("w{workers} {way} vs timely 0.31 Barrier");
        report.case(Case::new(case, "ns/round", Better::Lower, paired).with("rounds", rounds));
    }
}

fn ours(workers: usize, rounds: u64, parked: bool) -> f64 {
    let threads = execute(fabric::threads(workers), move |worker| {
        let mut barrier = Barrier::new(worker);
        let mut begin = Instant::now();
        for round in 0..WARM + rounds {
            if round == WARM {
                begin = Instant::now();
            }
            if parked {
                let arrived = barrier.advance();
                while !barrier.reached(arrived) {
                    worker.step_or_park(None)?;
                }
            } else {
                barrier.wait(worker)?;
            }
        }
        let each = begin.elapsed().as_nanos() as f64 / rounds as f64;
        assert_eq!(barrier.round(), WARM + rounds);
        Ok::<_, BoxError>(each)
    });
    let mut times =
        threads.into_iter().map(|thread| thread.join().expect("a worker panicked").expect("a worker failed"));
    let first = times.next().expect("a worker");
    times.for_each(drop);
    first
}

fn peer(workers: usize, rounds: u64, parked: bool) -> f64 {
    let guards = timely::execute(timely::Config::process(workers), move |worker| {
        let mut barrier = Peer::new(worker);
        let mut begin = Instant::now();
        for round in 0..WARM + rounds {
            if round == WARM {
                begin = Instant::now();
            }
            if parked {
                barrier.advance();
                while !barrier.reached() {
                    worker.step_or_park(None);
                }
            } else {
                barrier.wait();
            }
        }
        begin.elapsed().as_nanos() as f64 / rounds as f64
    });
    let mut times = guards.expect("timely starts").join().into_iter().map(|time| time.expect("a worker failed"));
    let first = times.next().expect("a worker");
    times.for_each(drop);
    first
}
