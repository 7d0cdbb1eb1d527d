//! Time and peak memory of the clique flow over N and B (F-12), beside the bounds that the paper calls large enough.
//!
//! B at N = 4, and N at B = 1000 per thread; every measurement in a process of its own, beside one with N = 4 and B = 1000 per
//! thread. Two last cases let the bounds be found, and have none. One scope around the whole join, as in the experiment of the
//! paper. `penstock bench --record` draws the curves.

use crate::clique_flow::Control;
use crate::faucet_child::{Taken, Task, Work};
use crate::harness::{Better, Case, Options, Paired, Report, ended};
use crate::machine::Meter;

/// B, or N, of the curves.
const SIZES: [u64; 9] = [1, 3, 10, 30, 100, 1_000, 10_000, 100_000, 1_000_000];
const BATCHES: [u64; 6] = [1, 2, 3, 4, 8, 16];

/// Runs the bench.
///
/// # Panics
/// When a child process fails.
pub fn run(options: &Options, report: &mut Report) {
    let (scale, draws, repeats) = if options.quick { (13, 40_000, 1) } else { (14, 150_000, 5) };
    for workers in [1, 2] {
        let large = 1_000 * workers as u64;
        let mut asked: Vec<(&str, String, Control)> = Vec::new();
        for size in SIZES {
            if !options.quick || [10, 100, 1_000, 100_000].contains(&size) {
                asked.push(("B", format!("N=4 B={size}"), Control::Bounded((4, size), None)));
            }
        }
        for batches in BATCHES {
            if !options.quick || [1, 2, 8].contains(&batches) {
                asked.push(("N", format!("N={batches} B={large}"), Control::Bounded((batches, large), None)));
            }
        }
        asked.push(("adaptive", "adaptive".to_string(), Control::Adaptive));
        asked.push(("none", "no flow control".to_string(), Control::Free));
        for (sweep, name, control) in asked {
            let work = Work::Cliques { timely: false, scale, draws, size: 4 };
            let run = |control| Task { work, workers, control }.in_child();
            let meter = Meter::start();
            let (mut ours, mut peer): (Vec<Taken>, Vec<Taken>) = Default::default();
            while ours.is_empty() || (ours.len() < repeats && !ended()) {
                ours.push(run(control));
                peer.push(run(Control::Bounded((4, large), None)));
            }
            let usage = meter.stop();
            assert!(ours.iter().zip(&peer).all(|(ours, peer)| ours.found == peer.found));
            let milliseconds = |side: &[Taken]| side.iter().map(|taken| taken.seconds * 1e3).collect();
            let paired = Paired::new(milliseconds(&ours), milliseconds(&peer), usage);
            let most = |side: &[Taken]| side.iter().map(|taken| taken.peak_mib).fold(0.0, f64::max);
            let (batches, batch_size) = ours[ours.len() - 1].bounds;
            let case = format!("4-cliques w{workers} {name} vs N=4 B={large}");
            report.case(
                Case::new(case, "ms", Better::Lower, paired)
                    .with("workers", workers)
                    .with("sweep", sweep)
                    .with("batches", batches)
                    .with("batch_size", batch_size)
                    .with("peak_mib", most(&ours))
                    .with("peer_peak_mib", most(&peer))
                    .with("edges", ours[0].edges)
                    .with("cliques", ours[0].found),
            );
        }
    }
}
