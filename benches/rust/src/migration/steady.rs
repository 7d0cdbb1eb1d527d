//! `bins-latency`: how long blocks of a count take while nothing moves, over the number of bins, beside the same count on timely with one
//! map for each worker (M-20).
//!
//! Open loop, as [`super`] has it; all keys are there before. The rate is one for all sides and cases: half of what ours does with 2^8
//! bins when it need not wait. So what cannot keep up shows a backlog that grows. Percentiles are of the blocks of all rounds, on both sides but
//! for those of the first [`WARM`], in which new threads meet all of their memory for the first time.

use std::cell::RefCell;
use std::collections::HashMap;
use std::hash::BuildHasherDefault;
use std::rc::Rc;
use std::sync::{Arc, Barrier, OnceLock};
use std::time::{Duration, Instant};

use penstock_bins::Strategy;
use timely::container::CapacityContainerBuilder;
use timely::dataflow::ProbeHandle;
use timely::dataflow::channels::pact::Exchange;
use timely::dataflow::operators::{Input as _, Operator as _, Probe as _};

use super::course::{Domain, TICK, WORKERS, due, mixed, ticks};
use super::seen::Latencies;
use super::{HALF, ROUNDS, Setup, Shipping, check};
use crate::Numbers;
use crate::harness::{Better, Case, Options, Paired, Report, ended, median};
use crate::keyed_count::Fast;
use crate::machine::{Meter, Usage};

/// Seconds of a round before anything counts.
const WARM: f64 = 0.1;
/// Parts of blocks that take no longer, and what they are called.
const SHARES: [(f64, &str); 4] = [(0.5, "p50_ms"), (0.9, "p90_ms"), (0.99, "p99_ms"), (0.9999, "p9999_ms")];

/// Runs the bench.
///
/// # Panics
/// When a worker of either side fails or loses a record.
pub fn run(options: &Options, report: &mut Report) {
    let (keys, bits): (u32, Vec<u8>) =
        if options.quick { (12, vec![4, 8]) } else { (22, (4..=20).step_by(2).collect()) };
    let setup = |bits| Setup {
        tcp: false,
        domain: Domain { keys: 1 << keys, bits, skewed: false },
        load: HALF,
        shipping: Shipping::default(),
    };
    let rest = options.budget(2 * bits.len() * ROUNDS).div_f64(1.5);
    let rest = rest.clamp(Duration::from_millis(40), Duration::from_secs(10)) + Duration::from_secs_f64(WARM);
    let usual = setup(8);
    let rate = usual.capacity(&usual.full(), rest) * HALF;
    for bits in bits {
        let setup = setup(bits);
        let (full, rows) = (setup.full(), setup.rows(rate));
        let (meter, mut ours, mut peer) = (Meter::start(), Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            let course = setup.course(rows, ticks(rest), Strategy::Fluid, Vec::new());
            let (driven, _) = setup.drive(&course, full.clone(), None);
            check(&driven, 0);
            ours.push(warm(driven.into_iter().flat_map(|driven| driven.blocks)));
            peer.push(warm(on_timely(setup.domain, rows, ticks(rest))));
            if ended() {
                break;
            }
        }
        report.case(case(setup.domain, rate, &ours, &peer, meter.stop()));
        if ended() {
            break;
        }
    }
}

fn case(domain: Domain, rate: f64, ours: &[Latencies], peer: &[Latencies], usage: Usage) -> Case {
    let of = |rounds: &[Latencies]| rounds.iter().map(|round| share(&sorted(round), 0.99)).collect();
    let title = format!("threads keys=2^{} bins=2^{} vs timely 0.31 one map", domain.keys.ilog2(), domain.bits);
    let case = Case::new(title, "ms p99", Better::Lower, Paired::new(of(ours), of(peer), usage))
        .with("keys", domain.keys)
        .with("warm_s", WARM)
        .with("bins", 1_u64 << domain.bits)
        .with("records_per_s", rate)
        .with("blocks", ours.iter().map(Vec::len).sum::<usize>());
    [("", ours), ("peer_", peer)].into_iter().fold(case, |case, (side, rounds)| {
        let all = sorted(&rounds.concat());
        let case =
            SHARES.iter().fold(case, |case, (part, name)| case.with(&format!("{side}{name}"), share(&all, *part)));
        let most = rounds.iter().map(|round| share(&sorted(round), 1.0)).collect::<Vec<_>>();
        case.with(&format!("{side}max_ms"), median(&most))
    })
}

fn warm(blocks: impl IntoIterator<Item = (f64, f64)>) -> Latencies {
    blocks.into_iter().filter(|(due, _)| *due >= WARM).collect()
}

/// Latencies in ms.
fn sorted(blocks: &Latencies) -> Vec<f64> {
    let mut all: Vec<f64> = blocks.iter().map(|(_, latency)| latency * 1e3).collect();
    all.sort_by(f64::total_cmp);
    all
}

/// What so large a part of them does not exceed.
fn share(sorted: &[f64], part: f64) -> f64 {
    let at = (sorted.len() as f64 * part).ceil() as usize;
    sorted[at.clamp(1, sorted.len()) - 1]
}

/// The same load on timely: when each block was due, and how long it took.
fn on_timely(domain: Domain, rows: usize, rest: u64) -> Latencies {
    let (ready, clock) = (Arc::new(Barrier::new(WORKERS)), Arc::new(OnceLock::new()));
    let guards = timely::execute(timely::Config::process(WORKERS), move |worker| {
        let (index, peers) = (worker.index() as u64, worker.peers() as u64);
        let mine = (0..domain.keys).filter(|key| mixed(*key) % peers == index).map(|key| (key, 0_u64));
        let counts = Rc::new(RefCell::new(mine.collect::<HashMap<u64, u64, BuildHasherDefault<Fast>>>()));
        let (into, probe) = (counts.clone(), ProbeHandle::new());
        let mut input = worker.dataflow::<u64, _, _>(|scope| {
            let (input, stream) = scope.new_input::<Vec<u64>>();
            let counted = stream.unary::<CapacityContainerBuilder<Vec<u64>>, _, _, _>(
                Exchange::new(|key: &u64| mixed(*key)),
                "count",
                move |_, _| {
                    move |input, _| {
                        let mut counts = into.borrow_mut();
                        input.for_each_time(|_, blocks| {
                            blocks
                                .for_each(|block| block.drain(..).for_each(|key| *counts.entry(key).or_insert(0) += 1));
                        });
                    }
                },
            );
            counted.probe_with(&probe);
            input
        });
        let mut numbers = Numbers(index + 1);
        ready.wait();
        let clock = *clock.get_or_init(|| Instant::now() + Duration::from_millis(100));
        let now = || Instant::now().saturating_duration_since(clock).as_secs_f64();
        let (mut next, mut done, mut blocks) = (0, 0, Vec::new());
        while done < rest {
            // What is due goes out, late or not, a few blocks at a time.
            let most = next + 16;
            while next < rest.min(most) && due(next) <= now() {
                let mut block = (0..rows).map(|_| (numbers.next().expect("no end") >> 1) % domain.keys).collect();
                input.send_batch(&mut block);
                next += 1;
                input.advance_to(next);
            }
            let wait = if next < rest { due(next) - now() } else { 0.0 };
            // Not longer than a tick: the clock may not have begun.
            let wait = Duration::from_secs_f64(wait.clamp(0.0, TICK.as_secs_f64()));
            worker.step_or_park(Some(wait));
            while done < next && !probe.less_equal(&done) {
                blocks.push((due(done), now() - due(done)));
                done += 1;
            }
        }
        drop(input);
        while worker.step() {}
        let counted: u64 = counts.borrow().values().sum();
        (blocks, counted)
    });
    let (blocks, counted): (Vec<_>, Vec<u64>) =
        guards.expect("threads").join().into_iter().map(|side| side.expect("no panic")).unzip();
    let sent = rest * rows as u64 * WORKERS as u64;
    assert_eq!(counted.iter().sum::<u64>(), sent, "records were lost or counted twice");
    blocks.concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_the_blocks_takes_no_longer() {
        let all: Vec<f64> = (1..=1_000).map(f64::from).collect();
        assert_eq!(
            [0.5, 0.9, 0.99, 0.9999, 1.0].map(|part| share(&all, part)),
            [500.0, 900.0, 990.0, 1_000.0, 1_000.0]
        );
        assert_eq!(share(&[7.0], 0.5), 7.0);
    }

    #[test]
    fn both_sides_owe_the_same_blocks() {
        let domain = Domain { keys: 500, bits: 4, skewed: false };
        let blocks = on_timely(domain, 20, 40);
        assert_eq!(blocks.len(), 40 * WORKERS);
        let dues = |worker: usize| blocks[40 * worker..].iter().take(40).map(|(due, _)| *due).collect::<Vec<_>>();
        assert_eq!(dues(0), (0..40).map(due).collect::<Vec<_>>());
        assert!(dues(0) == dues(1) && blocks.iter().all(|(_, latency)| *latency >= 0.0));
        let mut report = Report::new("bins-latency", &Options::default());
        run(&Options { quick: true, seconds: Some(0.2) }, &mut report);
        assert_eq!(report.cases(), 2);
    }
}
