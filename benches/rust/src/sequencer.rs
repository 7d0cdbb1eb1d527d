//! `sequencer`: a log that all workers push to and read, beside timely's `synchronization::Sequencer`.
//!
//! Every worker pushes some numbers, steps, reads what there is, and so on; the time is that of worker 0 until it has read everything,
//! by element of the log. *one by one* pushes one number per worker and waits until all of that round are read, so it is the
//! round trip; both sides step without pause there.
//!
//! Outside the timed part every log is checked to hold all numbers, and the logs of all workers to be equal. Timely's are not always:
//! it sorts by each worker's clock, and elements of two workers that were stamped in the same nanosecond keep the order in which
//! they came. `peer_logs_differed` says in how many of its runs that was so.

use std::time::Instant;

use penstock_coord::Sequencer;
use penstock_dataflow::{BoxError, execute, fabric};
use timely::synchronization::Sequencer as Peer;

use crate::harness::{Better, Case, Options, Report, compare};

/// How numbers are pushed.
#[derive(Clone, Copy)]
struct Load {
    workers: usize,
    /// Numbers per step.
    pushes: usize,
    /// Whether each round waits until everything so far is read.
    rounds: bool,
}

/// Runs the bench.
///
/// # Panics
/// When a worker fails, numbers are missing, or our workers have read different logs.
pub fn run(options: &Options, report: &mut Report) {
    let load = |workers, pushes, rounds| Load { workers, pushes, rounds };
    let cases = [
        load(1, 1, false),
        load(1, 64, false),
        load(2, 1, false),
        load(2, 64, false),
        load(1, 1, true),
        load(2, 1, true),
    ];
    for load in cases {
        // On a busy machine a round trip of two workers that step without pause takes milliseconds.
        let steps = if load.pushes > 1 || (load.rounds && load.workers > 1) { 500 } else { 5_000 };
        let mut differed = 0;
        let paired = compare(
            options.budget(cases.len()),
            || {
                let (time, equal) = ours(load, steps);
                assert!(equal, "the workers have read different logs");
                time
            },
            || {
                let (time, equal) = peer(load, steps);
                differed += u64::from(!equal);
                time
            },
        );
        let way = if load.rounds { "one by one".to_owned() } else { format!("{} a step", load.pushes) };
        let case = format!("w{} {way} vs timely 0.31 Sequencer", load.workers);
        report.case(
            Case::new(case, "ns/element", Better::Lower, paired)
                .with("steps", steps)
                .with("peer_logs_differed", differed),
        );
    }
}

/// Drives one worker: `push` adds a number, `step` steps and reads what has come. Returns the time and the log.
fn drive(
    load: Load,
    steps: usize,
    index: usize,
    mut push: impl FnMut(u64),
    mut step: impl FnMut(&mut Vec<u64>),
) -> (f64, Vec<u64>) {
    let total = steps * load.pushes * load.workers;
    let mut log = Vec::with_capacity(total);
    let begin = Instant::now();
    for round in 0..steps {
        for place in 0..load.pushes {
            push(((index * steps + round) * load.pushes + place) as u64);
        }
        step(&mut log);
        while load.rounds && log.len() < (round + 1) * load.workers {
            step(&mut log);
        }
    }
    while log.len() < total {
        step(&mut log);
    }
    (begin.elapsed().as_nanos() as f64 / total as f64, log)
}

fn ours(load: Load, steps: usize) -> (f64, bool) {
    let threads = execute(fabric::threads(load.workers), move |worker| {
        let index = worker.index();
        let sequencer = std::cell::RefCell::new(Sequencer::new(worker));
        let push = |number| sequencer.borrow_mut().push(number).expect("it is open");
        let step = |log: &mut Vec<u64>| {
            worker.step().expect("no worker fails");
            let mut sequencer = sequencer.borrow_mut();
            log.extend(std::iter::from_fn(|| sequencer.next()));
        };
        Ok::<_, BoxError>(drive(load, steps, index, push, step))
    });
    let results = threads.into_iter().map(|thread| thread.join().expect("a worker panicked").expect("a worker failed"));
    check(load, steps, results.collect())
}

fn peer(load: Load, steps: usize) -> (f64, bool) {
    let timer = Instant::now();
    let guards = timely::execute(timely::Config::process(load.workers), move |worker| {
        let index = worker.index();
        let sequencer = std::cell::RefCell::new(Peer::new(worker, timer));
        let push = |number| sequencer.borrow_mut().push(number);
        let step = |log: &mut Vec<u64>| {
            worker.step();
            log.extend(&mut *sequencer.borrow_mut());
        };
        drive(load, steps, index, push, step)
    });
    let results = guards.expect("timely starts").join().into_iter().map(|result| result.expect("a worker failed"));
    check(load, steps, results.collect())
}

/// The time of worker 0, and whether all logs are equal, once each is seen to be complete.
fn check(load: Load, steps: usize, results: Vec<(f64, Vec<u64>)>) -> (f64, bool) {
    for (_, log) in &results {
        let mut log = log.clone();
        log.sort_unstable();
        assert!(log.into_iter().eq(0..(steps * load.pushes * load.workers) as u64), "numbers are missing");
    }
    (results[0].0, results.iter().all(|(_, log)| *log == results[0].1))
}
