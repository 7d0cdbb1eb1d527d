//! Peak memory of the clique flow over the size of its input, within bounds and without (F-14), and of one input that becomes
//! a hundred million items (F-04).
//!
//! Every measurement is a process of its own, and memory is its resident set above the loaded graph. Without bounds all edges
//! are there at once and each step of the join runs to its end before the next, as in the paper. The largest graph is as that of
//! the figures for timely: 2^17 vertices, a million draws.

use crate::clique_flow::Control;
use crate::faucet_child::{Taken, Task, Work};
use crate::harness::{Better, Case, Options, Paired, Report, TIMELY, ended};
use crate::machine::Meter;

/// N and B of both scopes, on every worker.
const BOUNDS: (u64, u64) = (4, 1_000);

/// Runs the bench.
///
/// # Panics
/// When a child process fails, or both sides do not find the same.
pub fn run(options: &Options, report: &mut Report) {
    let quick = [(3, 13), (3, 15), (4, 12), (4, 14)];
    let full = [(3, 13), (3, 15), (3, 17), (4, 13), (4, 15), (4, 16), (4, 17)];
    let cases: &[(usize, u32)] = if options.quick { &quick } else { &full };
    for workers in [1, 2] {
        for (size, scale) in cases {
            if ended() {
                return;
            }
            let on = |timely| Work::Cliques { timely, scale: *scale, draws: 1_000_000 >> (17 - scale), size: *size };
            let name = format!("{size}-cliques w{workers} 2^{scale} vertices");
            let inner = (*size == 4).then_some(BOUNDS);
            let fixed = beside(report, &name, *size, on(false), workers, inner);
            if Some(&(*size, *scale)) == cases.last() {
                beside_timely(report, &name, *size, on(true), workers, fixed);
            }
        }
        let items = if options.quick { 10_000_000 } else { 100_000_000 };
        beside(report, &format!("1 input of {items} items w{workers}"), 1, Work::Surge { items }, workers, None);
    }
}

/// Within bounds that are given and that are found, beside no flow control. What it took with those given.
fn beside(
    report: &mut Report,
    name: &str,
    size: usize,
    work: Work,
    workers: usize,
    inner: Option<(u64, u64)>,
) -> Taken {
    let meter = Meter::start();
    let run = |control| Task { work, workers, control }.in_child();
    let free = run(Control::Free);
    let [fixed, adaptive] = [Control::Bounded(BOUNDS, inner), Control::Adaptive].map(run);
    let usage = meter.stop();
    assert_eq!((fixed.found, adaptive.found), (free.found, free.found));
    let given = format!("N={} B={}", BOUNDS.0, BOUNDS.1);
    for (bounds, said, taken) in [("fixed", given.as_str(), fixed), ("adaptive", "adaptive", adaptive)] {
        let Taken { found, edges, seconds, peak_mib, maximum, bounds: (batches, batch_size) } = taken;
        let paired = Paired::new(vec![peak_mib], vec![free.peak_mib], usage);
        let case = Case::new(format!("{name} {said} vs no flow control"), "MiB", Better::Lower, paired)
            .with("size", size)
            .with("workers", workers)
            .with("bounds", bounds)
            .with("edges", edges)
            .with("found", found)
            .with("seconds", seconds)
            .with("seconds_free", free.seconds)
            .with("time_ratio", free.seconds / seconds)
            .with("memory_share", peak_mib / free.peak_mib)
            .with("most_unfinished", maximum)
            .with("batches", batches)
            .with("batch_size", batch_size);
        report.case(case);
    }
    fixed
}

/// Within bounds that are given, beside the join on timely, where the program feeds edges in rounds.
fn beside_timely(report: &mut Report, name: &str, size: usize, work: Work, workers: usize, ours: Taken) {
    let meter = Meter::start();
    let timely = Task { work, workers, control: Control::Bounded(BOUNDS, None) }.in_child();
    let usage = meter.stop();
    assert_eq!(timely.found, ours.found);
    let paired = Paired::new(vec![ours.peak_mib], vec![timely.peak_mib], usage);
    let name = format!("{name} N={} B={} vs timely {TIMELY} fed in rounds", BOUNDS.0, BOUNDS.1);
    let case = Case::new(name, "MiB", Better::Lower, paired)
        .with("size", size)
        .with("workers", workers)
        .with("bounds", "beside timely")
        .with("edges", ours.edges)
        .with("found", ours.found)
        .with("seconds", ours.seconds)
        .with("seconds_timely", timely.seconds)
        .with("time_ratio_timely", timely.seconds / ours.seconds);
    report.case(case);
}
