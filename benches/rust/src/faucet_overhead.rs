//! What flow control costs: the clique flow within bounds, beside the same flow without (F-13).
//!
//! As in the paper the input is small enough to fit in memory without bounds, and the bounds are a range near the best. Each
//! repeat takes the next of them, so the range of the paired ratio is over bounds as well as over repeats. Bounds that are found
//! while running stand beside no flow control as well, and beside the best of the range.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use crate::clique_flow::{self, Control, Graph};
use crate::harness::{Better, Case, Options, Paired, Report, compare, median};

/// N and B of both scopes, on every worker.
const RANGE: [(u64, u64); 4] = [(2, 1_000), (4, 1_000), (4, 4_000), (8, 2_000)];
/// Seconds of the whole bench, unless asked for.
const FULL_S: f64 = 180.0;

/// Runs the bench.
///
/// # Panics
/// When a flow fails or finds other cliques than the loops do.
pub fn run(options: &Options, report: &mut Report) {
    let sizes: &[(usize, u32, u64)] =
        if options.quick { &[(3, 14, 150_000), (4, 13, 40_000)] } else { &[(3, 16, 900_000), (4, 15, 250_000)] };
    let whole =
        if options.quick || options.seconds.is_some() { options.budget(1) } else { Duration::from_secs_f64(FULL_S) };
    let budget = whole / (6 * sizes.len()) as u32;
    for (size, scale, draws) in sizes {
        let graph = Arc::new(Graph::rmat(*scale, *draws, 42));
        let expected = graph.count(*size);
        for workers in [1, 2] {
            let timed = |control| {
                let taken = clique_flow::run(&graph, *size, workers, control);
                assert_eq!(taken.found, expected, "{control:?}");
                taken.seconds * 1e3
            };
            let within = |at: usize| {
                let bounds = RANGE[at % RANGE.len()];
                Control::Bounded(bounds, (*size == 4).then_some(bounds))
            };
            let turn = Cell::new(0);
            let next = || timed(within(turn.replace(turn.get() + 1)));
            let case = |name: &str, bounds: &str, paired: Paired| {
                let ratios: Vec<f64> = paired.ours.iter().zip(&paired.peer).map(|(ours, peer)| ours / peer).collect();
                Case::new(format!("{size}-cliques w{workers} {name}"), "ms", Better::Lower, paired)
                    .with("size", *size)
                    .with("workers", workers)
                    .with("bounds", bounds)
                    .with("edges", graph.edges())
                    .with("cliques", expected)
                    .with("time_ratio_min", ratios.iter().copied().fold(f64::INFINITY, f64::min))
                    .with("time_ratio_mean", ratios.iter().sum::<f64>() / ratios.len() as f64)
                    .with("time_ratio_max", ratios.iter().copied().fold(0.0, f64::max))
            };
            let paired = compare(budget, next, || timed(Control::Free));
            let mut times: [Vec<f64>; RANGE.len()] = Default::default();
            paired.turns.iter().zip(&paired.ours).for_each(|(turn, took)| times[turn % RANGE.len()].push(*took));
            report.case(case("N=2-8 B=1000-4000 vs no flow control", "fixed", paired));
            let paired = compare(budget, || timed(Control::Adaptive), || timed(Control::Free));
            report.case(case("adaptive vs no flow control", "adaptive", paired));
            let seen = (0..RANGE.len()).filter(|at| !times[*at].is_empty());
            let best = seen.min_by(|one, two| median(&times[*one]).total_cmp(&median(&times[*two]))).unwrap_or(0);
            let paired = compare(budget, || timed(Control::Adaptive), || timed(within(best)));
            let name = format!("adaptive vs best fixed N={} B={}", RANGE[best].0, RANGE[best].1);
            report.case(case(&name, "adaptive beside best", paired));
        }
    }
}
