//! `empty-epoch`: every worker moves its input by one epoch without data and waits until the probe behind an exchange and a map
//! has passed it. Spinning against timely spinning; parking against timely parking, with what an idle second costs us.

use std::fs;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use penstock_dataflow::{Endpoint, Worker, execute, fabric};
use timely::dataflow::ProbeHandle;
use timely::dataflow::operators::vec::Map as _;
use timely::dataflow::operators::{Exchange as _, Input as _, Probe as _};

use crate::harness::{Better, Case, Options, Report, compare};

/// Epochs of one repeat.
pub(crate) const SPINNING: u64 = 8_000;
const PARKING: u64 = 4_000;

/// Runs the bench.
///
/// # Panics
/// When a worker of either side fails.
pub fn run(options: &Options, report: &mut Report) {
    let budget = options.budget(4);
    for workers in [1, 2] {
        let paired =
            compare(budget, || ours(fabric::threads(workers), SPINNING, false), || peer(workers, SPINNING, false));
        let case = format!("w{workers} spinning vs timely 0.31 spinning");
        report.case(Case::new(case, "us/epoch", Better::Lower, paired).with("epochs", SPINNING));
    }
    for workers in [1, 2] {
        let paired = compare(budget, || ours(fabric::threads(workers), PARKING, true), || peer(workers, PARKING, true));
        let case = format!("w{workers} step_or_park vs timely 0.31 step_or_park");
        let case = Case::new(case, "us/epoch", Better::Lower, paired).with("epochs", PARKING);
        report.case(case.with("idle_cpu_percent", idle_percent(workers)));
    }
}

/// Microseconds per epoch.
pub(crate) fn ours(seats: Vec<Endpoint>, epochs: u64, park: bool) -> f64 {
    let start = Arc::new(Barrier::new(seats.len()));
    let threads = execute(seats, move |worker: &mut Worker| {
        let (mut input, probe) = worker.dataflow::<u64, _>("epochs", |scope| {
            let (input, stream) = scope.new_input::<Vec<u64>>();
            (input, stream.exchange_by(|key| *key).map_blocks(|block| block).probe().0)
        });
        worker.bootstrap()?;
        start.wait();
        let begin = Instant::now();
        for epoch in 1..=epochs {
            input.advance_to(epoch)?;
            while probe.less_than(&epoch) {
                if park {
                    worker.step_or_park(None)?
                } else {
                    worker.step()?
                };
            }
        }
        Ok::<_, penstock_dataflow::BoxError>(begin.elapsed())
    });
    let times = threads.into_iter().map(|thread| thread.join().expect("no panic").expect("no error"));
    each(times.collect(), epochs)
}

pub(crate) fn peer(workers: usize, epochs: u64, park: bool) -> f64 {
    let start = Arc::new(Barrier::new(workers));
    let guards = timely::execute(timely::Config::process(workers), move |worker| {
        let probe = ProbeHandle::new();
        let mut input = worker.dataflow::<u64, _, _>(|scope| {
            let (input, stream) = scope.new_input::<Vec<u64>>();
            stream.exchange(|key| *key).map(|key| key).probe_with(&probe);
            input
        });
        start.wait();
        let begin = Instant::now();
        for epoch in 1..=epochs {
            input.advance_to(epoch);
            while probe.less_than(&epoch) {
                if park {
                    worker.step_or_park(None)
                } else {
                    worker.step()
                };
            }
        }
        begin.elapsed()
    });
    let times = guards.expect("threads").join().into_iter().map(|time| time.expect("no panic"));
    each(times.collect(), epochs)
}

fn each(times: Vec<Duration>, epochs: u64) -> f64 {
    times.into_iter().max().unwrap_or_default().as_secs_f64() * 1e6 / epochs as f64
}

/// CPU time, in percent of one CPU, that our parked workers use together in a second without input; `None` where the system does not tell.
fn idle_percent(workers: usize) -> Option<f64> {
    const IDLE: Duration = Duration::from_secs(1);
    let threads = execute(fabric::threads(workers), move |worker: &mut Worker| {
        let (mut input, probe) = worker.dataflow::<u64, _>("idle", |scope| {
            let (input, stream) = scope.new_input::<Vec<u64>>();
            (input, stream.exchange_by(|key| *key).map_blocks(|block| block).probe().0)
        });
        input.advance_to(1)?;
        while probe.less_than(&1) {
            worker.step_or_park(None)?;
        }
        let (before, end) = (cpu_ns(), Instant::now() + IDLE);
        while let Some(left) = end.checked_duration_since(Instant::now()) {
            worker.step_or_park(Some(left))?;
        }
        // Before it ends: what a thread has used goes with it.
        Ok::<_, penstock_dataflow::BoxError>(before.zip(cpu_ns()).map(|(before, after)| after.saturating_sub(before)))
    });
    let used = threads.into_iter().map(|thread| thread.join().expect("no panic").expect("no error"));
    let used = used.sum::<Option<u64>>()?;
    Some(100.0 * used as f64 / IDLE.as_nanos() as f64)
}

/// CPU time of the calling thread, in nanoseconds.
fn cpu_ns() -> Option<u64> {
    fs::read_to_string("/proc/thread-self/schedstat").ok()?.split(' ').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_finish_spinning_and_parking() {
        for workers in [1, 2] {
            for park in [false, true] {
                assert!(ours(fabric::threads(workers), 20, park) > 0.0 && peer(workers, 20, park) > 0.0);
            }
        }
    }

    #[test]
    fn what_idle_workers_use_is_counted() {
        // Each wakes once.
        assert!(idle_percent(2).is_none_or(|percent| percent > 0.0));
    }
}
