//! `noisy-neighbour`: records exchanged by key and counted by two workers, alone and beside one thread that only burns CPU.
//! What counts is which part of its own quiet rate each side keeps.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Instant;

use penstock_dataflow::{Pipeline, Worker, execute, fabric};
use timely::container::CapacityContainerBuilder;
use timely::dataflow::ProbeHandle;
use timely::dataflow::channels::pact::Exchange;
use timely::dataflow::operators::{Input as _, Operator as _, Probe as _};

use crate::Numbers;
use crate::harness::{Better, Case, Options, Paired, Report, compare, median};

const WORKERS: usize = 2;
/// Records of one worker and epoch, records of a block, distinct keys.
const EPOCH: usize = 1 << 16;
const BLOCK: usize = 1 << 12;
const KEYS: u64 = 1 << 16;
/// Epochs that may be under way.
const SLACK: u64 = 2;

/// Multiply and fold, for both sides: the hash map is not what is measured.
#[derive(Default)]
struct Fold(u64);

impl Hasher for Fold {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }
    fn write_u64(&mut self, word: u64) {
        let product = u128::from(word ^ self.0).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = (product as u64) ^ ((product >> 64) as u64);
    }
}

type Blocks = CapacityContainerBuilder<Vec<u64>>;
type Counts = HashMap<u64, u64, BuildHasherDefault<Fold>>;

/// Runs the bench.
///
/// # Panics
/// When a worker of either side fails or loses a record.
pub fn run(options: &Options, report: &mut Report) {
    let epochs = if options.quick { 16 } else { 32 };
    for (park, what) in [(false, "spinning"), (true, "step_or_park")] {
        let mut rates = [vec![], vec![], vec![], vec![]];
        let [quiet, noisy, peer_quiet, peer_noisy] = &mut rates;
        let kept = compare(
            options.budget(2),
            || kept(quiet, noisy, || ours(epochs)),
            || kept(peer_quiet, peer_noisy, || peer(epochs, park)),
        );
        let rates = rates.map(|rates| kept.kept(&rates));
        let of = kept.clone();
        let case = format!("w2 kept beside one CPU hog vs timely 0.31 {what}");
        let case = Case::new(case, "of the quiet rate", Better::Higher, kept);
        let names = ["ours_quiet_m_per_s", "ours_noisy_m_per_s", "peer_quiet_m_per_s", "peer_noisy_m_per_s"];
        report.case(names.iter().zip(&rates).fold(case, |case, (name, rates)| case.with(name, median(rates))));
        let [quiet, ours, peer_quiet, peer] = rates;
        for (condition, ours, peer) in [("beside one CPU hog", ours, peer), ("quiet", quiet, peer_quiet)] {
            let case = format!("w2 keys=2^16 {condition} vs timely 0.31 {what}");
            report.case(Case::new(case, "M records/s", Better::Higher, Paired { ours, peer, ..of.clone() }));
        }
    }
}

/// The part of the quiet rate that is left beside a hog.
fn kept(quiet: &mut Vec<f64>, noisy: &mut Vec<f64>, mut rate: impl FnMut() -> f64) -> f64 {
    let alone = rate();
    let stop = Arc::new(AtomicBool::new(false));
    let flag = stop.clone();
    let hog = std::thread::spawn(move || {
        let mut numbers = Numbers(1);
        while !flag.load(Ordering::Relaxed) {
            std::hint::black_box(numbers.next());
        }
    });
    let beside = rate();
    stop.store(true, Ordering::Relaxed);
    hog.join().expect("the hog does not panic");
    quiet.push(alone);
    noisy.push(beside);
    beside / alone
}

/// Millions of records per second through both workers.
fn rate(epochs: u64, seconds: Vec<f64>, counted: u64) -> f64 {
    let records = (epochs as usize * EPOCH * WORKERS) as u64;
    assert_eq!(counted, records, "records were lost");
    records as f64 / 1e6 / seconds.into_iter().fold(0.0, f64::max)
}

fn keys(index: usize) -> Vec<u64> {
    Numbers(index as u64).take(EPOCH).map(|number| number % KEYS).collect()
}

fn ours(epochs: u64) -> f64 {
    let (start, total) = (Arc::new(Barrier::new(WORKERS)), Arc::new(AtomicU64::new(0)));
    let sum = total.clone();
    let threads = execute(fabric::threads(WORKERS), move |worker: &mut Worker| {
        let pool = keys(worker.index());
        let sum = sum.clone();
        let (mut input, probe) = worker.dataflow::<u64, _>("count", |scope| {
            let (input, stream) = scope.new_input::<Vec<u64>>();
            let counted = stream.exchange_by(|key| *key).unary::<u64, _>(Pipeline, "count", |_| {
                let mut counts = Counts::default();
                move |input, _, frontiers| {
                    input.for_each(|_, block: Vec<u64>| {
                        block.into_iter().for_each(|key| *counts.entry(key).or_insert(0) += 1)
                    });
                    if frontiers.frontier(0).is_empty() {
                        sum.fetch_add(counts.drain().map(|(_, count)| count).sum(), Ordering::Relaxed);
                    }
                    Ok(())
                }
            });
            (input, counted.probe().0)
        });
        start.wait();
        let begin = Instant::now();
        for epoch in 1..=epochs {
            pool.chunks(BLOCK).for_each(|block| input.send(block.to_vec()));
            input.advance_to(epoch)?;
            while probe.less_than(&epoch.saturating_sub(SLACK)) {
                worker.step_or_park(None)?;
            }
        }
        while probe.less_than(&epochs) {
            worker.step_or_park(None)?;
        }
        Ok::<_, penstock_dataflow::BoxError>(begin.elapsed().as_secs_f64())
    });
    let seconds = threads.into_iter().map(|thread| thread.join().expect("no panic").expect("no error")).collect();
    rate(epochs, seconds, total.load(Ordering::Relaxed))
}

fn peer(epochs: u64, park: bool) -> f64 {
    let (start, total) = (Arc::new(Barrier::new(WORKERS)), Arc::new(AtomicU64::new(0)));
    let sum = total.clone();
    let guards = timely::execute(timely::Config::process(WORKERS), move |worker| {
        let pool = keys(worker.index());
        let sum = sum.clone();
        let probe = ProbeHandle::new();
        let mut input = worker.dataflow::<u64, _, _>(|scope| {
            let (input, stream) = scope.new_input::<Vec<u64>>();
            let counted =
                stream.unary_frontier::<Blocks, _, _, _>(Exchange::new(|key: &u64| *key), "count", move |_, _| {
                    let mut counts = Counts::default();
                    move |(input, frontier), _output| {
                        input.for_each_time(|_, blocks| {
                            blocks
                                .for_each(|block| block.drain(..).for_each(|key| *counts.entry(key).or_insert(0) += 1));
                        });
                        if frontier.is_empty() {
                            sum.fetch_add(counts.drain().map(|(_, count)| count).sum(), Ordering::Relaxed);
                        }
                    }
                });
            counted.probe_with(&probe);
            input
        });
        start.wait();
        let begin = Instant::now();
        let step = |worker: &mut timely::worker::Worker| if park { worker.step_or_park(None) } else { worker.step() };
        for epoch in 1..=epochs {
            pool.chunks(BLOCK).for_each(|block| input.send_batch(&mut block.to_vec()));
            input.advance_to(epoch);
            while probe.less_than(&epoch.saturating_sub(SLACK)) {
                step(worker);
            }
        }
        while probe.less_than(&epochs) {
            step(worker);
        }
        begin.elapsed().as_secs_f64()
    });
    let seconds = guards.expect("threads").join().into_iter().map(|time| time.expect("no panic")).collect();
    rate(epochs, seconds, total.load(Ordering::Relaxed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_count_every_record() {
        assert!(ours(2) > 0.0 && peer(2, false) > 0.0 && peer(2, true) > 0.0);
    }
}
