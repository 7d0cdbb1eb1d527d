//! `queues`: items of skewed partitions through the hybrid queue, beside the partitioned and the shared one.
//!
//! Items are numbered and dealt to partitions by a fixed skew. Each worker admits items while few wait and fewer than the window are
//! on their way, consumes, and sends what it has done to a reorder buffer; latency is from admission to the sink behind it. Every
//! item costs a spinning loop. *bound* is what the same threads do without queues, or less where the hottest partition, on which
//! only one worker may work, allows no more. Violations are items that were worked on after a later one of their partition.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use penstock_ordered::queue::{Hybrid, PartitionQueue, Partitioned, Shared};
use penstock_ordered::reorder::{NonBlocking, Reorder};

use crate::Numbers;
use crate::harness::{Better, Case, Options, Report, compare};
use crate::machine;
use crate::reorder::{calibrate, spun};

/// Items between admission and the sink.
const WINDOW: u64 = 1024;
/// Items that wait for each worker.
const AHEAD: u64 = 4;
/// Items of one partition before its worker looks elsewhere.
const QUANTUM: usize = 16;
/// How long one repeat should take.
const REPEAT: Duration = Duration::from_millis(60);

/// What one repeat gave.
#[derive(Clone, Debug, Default)]
struct Run {
    seconds: f64,
    p50_us: f64,
    p99_us: f64,
    violations: u64,
    /// The busiest worker's items over those of the mean.
    imbalance: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Skew {
    Uniform,
    Zipf(f64),
    Hot,
}

impl Skew {
    fn name(self) -> String {
        match self {
            Self::Uniform => "uniform".into(),
            Self::Zipf(exponent) => format!("zipf {exponent:.1}"),
            Self::Hot => "one key 50 %".into(),
        }
    }

    /// The share of each partition.
    fn shares(self, partitions: usize) -> Vec<f64> {
        let mut weights: Vec<f64> = match self {
            Self::Uniform => vec![1.0; partitions],
            Self::Zipf(exponent) => (1..=partitions).map(|rank| (rank as f64).powf(-exponent)).collect(),
            Self::Hot => vec![1.0; partitions],
        };
        if self == Self::Hot {
            weights[0] = (partitions - 1).max(1) as f64;
        }
        let whole: f64 = weights.iter().sum();
        weights.iter_mut().for_each(|weight| *weight /= whole);
        weights
    }

    /// The partition of each item.
    fn deal(self, partitions: usize, items: u64) -> Vec<usize> {
        let mut up_to = self.shares(partitions);
        for at in 1..partitions {
            up_to[at] += up_to[at - 1];
        }
        let random = Numbers(17).map(|number| (number >> 11) as f64 / (1_u64 << 53) as f64);
        let of = |share: f64| up_to.partition_point(|end| *end <= share).min(partitions - 1);
        random.take(items as usize).map(of).collect()
    }
}

/// Runs the bench.
///
/// # Panics
/// When items are lost, leave out of order, or a queue that has to keep the order of partitions does not.
pub fn run(options: &Options, report: &mut Report) {
    let skews: &[(Skew, usize)] = if options.quick {
        &[(Skew::Uniform, 8), (Skew::Zipf(1.5), 256), (Skew::Hot, 256)]
    } else {
        &[(Skew::Uniform, 8), (Skew::Zipf(1.0), 256), (Skew::Zipf(1.5), 256), (Skew::Hot, 8), (Skew::Hot, 256)]
    };
    let costs: &[u64] = if options.quick { &[10_000] } else { &[1_000, 10_000] };
    let turn_ns = calibrate();
    let threads: Vec<_> = [2, 4, 8, 16].into_iter().filter(|threads| *threads <= machine::cores().max(2)).collect();
    let cases = skews.len() * costs.len() * threads.len() * 3;
    for &workers in &threads {
        for &cost_ns in costs {
            for &(skew, partitions) in skews {
                let items = REPEAT.as_nanos() as u64 * workers.min(machine::cores()) as u64 / cost_ns;
                let dealt = skew.deal(partitions, items);
                let turns = (cost_ns as f64 / turn_ns).round() as u64;
                let name = format!("item={} µs {} of {partitions} threads={workers}", cost_ns / 1000, skew.name());
                for peer in ["bound", "partitioned", "shared"] {
                    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
                    let paired = compare(
                        options.budget(cases),
                        || rate(&mut ours, items, one(&Hybrid::new(partitions), &dealt, workers, turns)),
                        || match peer {
                            "bound" => bound(&dealt, partitions, workers, turns),
                            "partitioned" => {
                                rate(&mut theirs, items, one(&Partitioned::new(partitions), &dealt, workers, turns))
                            }
                            _ => rate(&mut theirs, items, one(&Shared::new(partitions), &dealt, workers, turns)),
                        },
                    );
                    let ordered = if peer == "shared" { &ours } else { &[ours.as_slice(), &theirs].concat() };
                    assert!(ordered.iter().all(|run| run.violations == 0), "{name}: a partition out of order");
                    let of_pairs = |runs: &[Run]| if runs.is_empty() { Vec::new() } else { paired.kept(runs) };
                    let (ours, theirs) = (of_pairs(&ours), of_pairs(&theirs));
                    let case = Case::new(format!("{name}, hybrid vs {peer}"), "k items/s", Better::Higher, paired)
                        .with("window", WINDOW)
                        .with("quantum", QUANTUM)
                        .with("items", items);
                    report.case(told(told(case, "ours", &ours), "peer", &theirs));
                }
            }
        }
    }
}

/// Keeps the run; thousand items in a second.
fn rate(runs: &mut Vec<Run>, items: u64, run: Run) -> f64 {
    let rate = items as f64 / run.seconds / 1e3;
    runs.push(run);
    rate
}

/// Medians of the runs as conditions of the case; violations in all of them.
fn told(case: Case, side: &str, runs: &[Run]) -> Case {
    if runs.is_empty() {
        return case;
    }
    let median = |of: fn(&Run) -> f64| crate::harness::median(&runs.iter().map(of).collect::<Vec<_>>());
    case.with(&format!("{side}_p50_us"), median(|run| run.p50_us))
        .with(&format!("{side}_p99_us"), median(|run| run.p99_us))
        .with(&format!("{side}_imbalance"), median(|run| run.imbalance))
        .with(&format!("{side}_violations"), runs.iter().map(|run| run.violations).sum::<u64>())
}

/// What the cores could do in thousand items a second, given the hottest partition.
fn bound(dealt: &[usize], partitions: usize, workers: usize, turns: u64) -> f64 {
    let mut counts = vec![0_u64; partitions];
    dealt.iter().for_each(|partition| counts[*partition] += 1);
    let hottest = counts.into_iter().max().unwrap_or(0) as f64 / dealt.len() as f64;
    let each = dealt.len() as u64 / workers as u64;
    let begin = Instant::now();
    std::thread::scope(|scope| {
        for worker in 0..workers as u64 {
            scope.spawn(move || (0..each).for_each(|item| _ = spun(worker * each + item, turns)));
        }
    });
    let of_all = each as f64 * workers as f64 / begin.elapsed().as_secs_f64() / 1e3;
    of_all.min(of_all / workers as f64 / hottest)
}

struct Item {
    number: u64,
    begun: Instant,
}

/// All items through a queue and a reorder buffer.
fn one(queue: &dyn PartitionQueue<Item>, dealt: &[usize], workers: usize, turns: u64) -> Run {
    let items = dealt.len() as u64;
    let (mut latencies, mut expected) = (Vec::with_capacity(dealt.len()), 0);
    let sink = |t: u64, begun: Instant| {
        assert_eq!(t, std::mem::replace(&mut expected, t + 1), "out of order");
        latencies.push(begun.elapsed().as_nanos() as u64);
    };
    let buffer = NonBlocking::new(WINDOW as usize, sink).expect("there are slots");
    let seen: Vec<_> = (0..queue.partitions()).map(|_| AtomicU64::new(0)).collect();
    let violations = AtomicU64::new(0);
    let (ingress, started) = (Mutex::new(0_u64), AtomicU64::new(0));
    let done: Vec<_> = (0..workers).map(|_| AtomicU64::new(0)).collect();
    let work = |worker: usize| {
        let mut operate = |partition: usize, item: Item| {
            started.fetch_add(1, Ordering::Relaxed);
            spun(item.number, turns);
            if seen[partition].fetch_max(item.number + 1, Ordering::Relaxed) > item.number {
                violations.fetch_add(1, Ordering::Relaxed);
            }
            assert!(buffer.send(item.number, item.begun).is_ok(), "the window is as large as the ring");
            done[worker].fetch_add(1, Ordering::Relaxed);
        };
        while buffer.next() < items {
            // Whoever finds the ingress free admits some; a longer queue would only be waited in.
            if let Ok(mut next) = ingress.try_lock() {
                while *next < items.min(buffer.next() + WINDOW)
                    && *next < started.load(Ordering::Relaxed) + AHEAD * workers as u64
                {
                    queue.add(dealt[*next as usize], Item { number: *next, begun: Instant::now() });
                    *next += 1;
                }
            }
            if queue.consume(QUANTUM, &mut operate) == 0 {
                std::thread::yield_now();
            }
        }
    };
    let begin = Instant::now();
    std::thread::scope(|scope| {
        for worker in 1..workers {
            let work = &work;
            scope.spawn(move || work(worker));
        }
        work(0);
    });
    let seconds = begin.elapsed().as_secs_f64();
    drop(buffer);
    assert_eq!(latencies.len(), dealt.len(), "items are lost");
    latencies.sort_unstable();
    let at = |share: f64| latencies[((latencies.len() - 1) as f64 * share) as usize] as f64 / 1e3;
    let most = done.iter().map(|done| done.load(Ordering::Relaxed)).max().unwrap_or(0);
    Run {
        seconds,
        p50_us: at(0.5),
        p99_us: at(0.99),
        violations: violations.into_inner(),
        imbalance: most as f64 * workers as f64 / items as f64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_are_dealt_by_the_skew() {
        let share = |skew: Skew, partitions| {
            let dealt = skew.deal(partitions, 100_000);
            dealt.iter().filter(|partition| **partition == 0).count() as f64 / 1e5
        };
        assert!((share(Skew::Uniform, 8) - 0.125).abs() < 0.01);
        assert!((share(Skew::Hot, 8) - 0.5).abs() < 0.01 && (share(Skew::Hot, 256) - 0.5).abs() < 0.01);
        // The harmonic number of 256 is 6.124; with exponent 1.5 the sum is 2.487.
        assert!((share(Skew::Zipf(1.0), 256) - 1.0 / 6.124).abs() < 0.01);
        assert!((share(Skew::Zipf(1.5), 256) - 1.0 / 2.487).abs() < 0.01);
    }

    #[test]
    fn everything_comes_through_every_queue() {
        let dealt = Skew::Hot.deal(8, 3_000);
        for workers in [1, 3] {
            let hybrid = one(&Hybrid::new(8), &dealt, workers, 20);
            let partitioned = one(&Partitioned::new(8), &dealt, workers, 20);
            one(&Shared::new(8), &dealt, workers, 20);
            assert_eq!((hybrid.violations, partitioned.violations), (0, 0));
            assert!(hybrid.p50_us <= hybrid.p99_us && hybrid.imbalance >= 0.99, "{hybrid:?}");
        }
    }
}
