//! What flow control costs: the clique flow within bounds, beside the same flow without (F-13).
//!
//! As in the paper the input is small enough to fit in memory without bounds, and the bounds are a range near the best. Each
//! repeat takes the next of them, so the range of the paired ratio is over bounds as well as over repeats.

use std::cell::Cell;
use std::sync::Arc;

use crate::clique_flow::{self, Control, Graph};
use crate::harness::{Better, Case, Options, Report, compare};

/// N and B times the number of threads, of both scopes.
const RANGE: [(u64, u64); 4] = [(2, 1_000), (4, 1_000), (4, 4_000), (8, 2_000)];

/// Runs the bench.
///
/// # Panics
/// When a flow fails or finds other cliques than the loops do.
pub fn run(options: &Options, report: &mut Report) {
    let sizes: &[(usize, u32, u64)] =
        if options.quick { &[(3, 14, 150_000), (4, 13, 60_000)] } else { &[(3, 16, 900_000), (4, 15, 250_000)] };
    for (size, scale, draws) in sizes {
        let graph = Arc::new(Graph::rmat(*scale, *draws, 42));
        let expected = graph.count(*size);
        for workers in [1, 2] {
            let timed = |control| {
                let taken = clique_flow::run(&graph, *size, workers, control);
                assert_eq!(taken.cliques, expected, "{control:?}");
                taken.seconds * 1e3
            };
            let turn = Cell::new(0);
            let within = || {
                let (batches, each) = RANGE[turn.replace(turn.get() + 1) % RANGE.len()];
                let outer = (batches, each * workers as u64);
                timed(Control::Bounded(outer, (*size == 4).then_some(outer)))
            };
            let paired = compare(options.budget(3 * sizes.len()), within, || timed(Control::Free));
            let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
            let overhead = mean(&paired.ours) / mean(&paired.peer) - 1.0;
            let case = format!("{size}-cliques w{workers} N=2-8 B=1000-4000 per thread vs no flow control");
            report.case(
                Case::new(case, "ms", Better::Lower, paired)
                    .with("edges", graph.edges())
                    .with("cliques", expected)
                    .with("overhead_percent_mean", 100.0 * overhead),
            );
            let paired = compare(options.budget(6 * sizes.len()), || timed(Control::Adaptive), || timed(Control::Free));
            let case = format!("{size}-cliques w{workers} adaptive vs no flow control");
            report.case(Case::new(case, "ms", Better::Lower, paired).with("edges", graph.edges()));
        }
    }
}
