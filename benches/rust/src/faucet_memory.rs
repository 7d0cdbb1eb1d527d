//! Peak memory of the clique flow over the size of its input, within bounds and without (F-14), and of one input that becomes
//! a hundred million items (F-04).
//!
//! Every measurement is a process of its own, and memory is its resident set above the loaded graph. Without bounds all edges
//! are there at once and each step of the join runs to its end before the next, as in the paper. The largest graph is as that of
//! the figures for timely: 2^17 vertices, a million draws.

use crate::clique_flow::Control;
use crate::faucet_child::{Taken, Task, Work};
use crate::harness::{Better, Case, Options, Paired, Report, TIMELY, ended, median};
use crate::machine::Meter;

/// N and B of both scopes, on every worker.
const BOUNDS: (u64, u64) = (4, 1_000);
/// Processes of each side.
const TURNS: usize = 3;

/// Runs the bench.
///
/// # Panics
/// When a child process fails, or both sides do not find the same.
pub fn run(options: &Options, report: &mut Report) {
    let quick = [(3, 13), (3, 15), (4, 12), (4, 14)];
    let full = [(3, 13), (3, 15), (3, 17), (4, 13), (4, 15), (4, 16), (4, 17)];
    let cases: &[(usize, u32)] = if options.quick { &quick } else { &full };
    let turns = if options.quick { 1 } else { TURNS };
    for workers in [1, 2] {
        for (size, scale) in cases {
            if ended() {
                return;
            }
            let on = |timely| Work::Cliques { timely, scale: *scale, draws: 1_000_000 >> (17 - scale), size: *size };
            let timely = (Some(&(*size, *scale)) == cases.last()).then(|| on(true));
            let name = format!("{size}-cliques w{workers} 2^{scale} vertices");
            let bounded = Control::Bounded(BOUNDS, (*size == 4).then_some(BOUNDS));
            let sides = Sides { name, size: *size, work: on(false), workers, bounded, timely, turns };
            sides.measure(report);
        }
        let items = if options.quick { 10_000_000 } else { 100_000_000 };
        let (name, bounded) = (format!("1 input of {items} items w{workers}"), Control::Bounded(BOUNDS, None));
        let work = Work::Surge { items };
        Sides { name, size: 1, work, workers, bounded, timely: None, turns }.measure(report);
    }
}

/// The same work within bounds that are given and that are found, beside no flow control, and beside timely.
struct Sides {
    name: String,
    size: usize,
    work: Work,
    workers: usize,
    bounded: Control,
    /// The join on timely, where the program feeds edges in rounds.
    timely: Option<Work>,
    /// Processes of each side.
    turns: usize,
}

impl Sides {
    fn measure(self, report: &mut Report) {
        let Self { name, size, work, workers, bounded, timely, turns } = self;
        let meter = Meter::start();
        let mut tasks = vec![(work, bounded), (work, Control::Adaptive), (work, Control::Free)];
        tasks.extend(timely.map(|timely| (timely, Control::Bounded(BOUNDS, None))));
        // In turn, so that what stands beside each other was measured beside each other.
        let runs: Vec<Vec<Taken>> = (0..turns)
            .map(|_| tasks.iter().map(|&(work, control)| Task { work, workers, control }.in_child()).collect())
            .collect();
        let usage = meter.stop();
        let found = runs[0][0].found;
        assert!(runs.iter().flatten().all(|taken| taken.found == found), "all find the same");
        let of = |side: usize, figure: fn(&Taken) -> f64| runs.iter().map(|run| figure(&run[side])).collect::<Vec<_>>();
        let seconds = |side| median(&of(side, |taken| taken.seconds));
        let peaks = |side| of(side, |taken| taken.peak_mib);
        let given = format!("N={} B={}", BOUNDS.0, BOUNDS.1);
        let case = |name: String, ours: usize, peer: usize, bounds: &str| {
            Case::new(name, "MiB", Better::Lower, Paired::new(peaks(ours), peaks(peer), usage))
                .with("size", size)
                .with("workers", workers)
                .with("bounds", bounds)
                .with("edges", runs[0][ours].edges)
                .with("found", found)
                .with("seconds", seconds(ours))
        };
        for (ours, bounds, said) in [(0, "fixed", given.as_str()), (1, "adaptive", "adaptive")] {
            let most = runs.iter().map(|run| run[ours].maximum).max().unwrap_or(0);
            let (batches, batch_size) = runs[0][ours].bounds;
            let line = case(format!("{name} {said} vs no flow control"), ours, 2, bounds)
                .with("seconds_free", seconds(2))
                .with("time_ratio", seconds(2) / seconds(ours))
                .with("memory_share", median(&peaks(ours)) / median(&peaks(2)))
                .with("most_unfinished", most)
                .with("batches", batches)
                .with("batch_size", batch_size);
            report.case(line);
        }
        if timely.is_some() {
            let name = format!("{name} {given} vs timely {TIMELY} fed in rounds");
            let line = case(name, 0, 3, "beside timely")
                .with("seconds_timely", seconds(3))
                .with("time_ratio_timely", seconds(3) / seconds(0));
            report.case(line);
        }
    }
}
