//! Peak memory of the clique flow over the size of its input, within bounds and without (F-14).
//!
//! Every measurement is a process of its own, and memory is its resident set above the loaded graph. Without bounds all edges
//! are there at once and each step of the join runs to its end before the next, as in the paper.

use crate::clique_flow::Control;
use crate::faucet_child::Task;
use crate::harness::{Better, Case, Options, Paired, Report};
use crate::machine::Meter;

/// Runs the bench.
///
/// # Panics
/// When a child process fails, or both sides do not find the same.
pub fn run(options: &Options, report: &mut Report) {
    let quick = [(3, 13), (3, 15), (4, 13), (4, 14)];
    let full = [(3, 13), (3, 15), (3, 17), (4, 13), (4, 15), (4, 16), (4, 17)];
    let cases: &[(usize, u32)] = if options.quick { &quick } else { &full };
    for workers in [1, 2] {
        for (size, scale) in cases {
            let task = |control| Task { scale: *scale, draws: 7 << *scale, size: *size, workers, control };
            let bounds = (4, 1_000 * workers as u64);
            let meter = Meter::start();
            let free = task(Control::Free).in_child();
            let ours = task(Control::Bounded(bounds, (*size == 4).then_some(bounds))).in_child();
            let adaptive = task(Control::Adaptive).in_child();
            let usage = meter.stop();
            assert_eq!((ours.cliques, adaptive.cliques), (free.cliques, free.cliques));
            for (name, taken) in [("N=4 B=1000 per thread", ours), ("adaptive", adaptive)] {
                let paired = Paired { ours: vec![taken.peak_mib], peer: vec![free.peak_mib], usage };
                let case = format!("{size}-cliques w{workers} 2^{scale} vertices {name} vs no flow control");
                report.case(
                    Case::new(case, "MiB", Better::Lower, paired)
                        .with("edges", taken.edges)
                        .with("cliques", taken.cliques)
                        .with("seconds", taken.seconds)
                        .with("seconds_free", free.seconds)
                        .with("time_ratio", free.seconds / taken.seconds)
                        .with("most_unfinished", taken.maximum)
                        .with("batches", taken.bounds.0)
                        .with("batch_size", taken.bounds.1),
                );
            }
        }
    }
}
