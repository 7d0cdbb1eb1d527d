//! Time and peak memory of the clique flow over N and B (F-12), beside the bounds that the paper calls large enough.
//!
//! B at N = 4, and N at B = 1000 per thread; every measurement in a process of its own, beside one with N = 4 and B = 1000 per
//! thread. A last case lets the bounds be found. One scope around the whole join, as in the experiment of the paper.

use crate::clique_flow::Control;
use crate::faucet_child::Task;
use crate::harness::{Better, Case, Options, Paired, Report};
use crate::machine::Meter;

/// Runs the bench.
///
/// # Panics
/// When a child process fails.
pub fn run(options: &Options, report: &mut Report) {
    let (scale, draws, repeats) = if options.quick { (13, 50_000, 1) } else { (14, 150_000, 3) };
    for workers in [1, 2] {
        let large = 1_000 * workers as u64;
        let task = |control| Task { scale, draws, size: 4, workers, control };
        let mut asked: Vec<(String, Control)> = Vec::new();
        for size in [1, 10, 100, 1_000, 10_000, 100_000] {
            if size > 1 || !options.quick {
                asked.push((format!("N=4 B={size}"), Control::Bounded((4, size), None)));
            }
        }
        for batches in [1, 2, 8, 16] {
            asked.push((format!("N={batches} B={large}"), Control::Bounded((batches, large), None)));
        }
        asked.push(("adaptive".to_string(), Control::Adaptive));
        asked.push(("no flow control".to_string(), Control::Free));
        for (name, control) in asked {
            let meter = Meter::start();
            let (mut ours, mut peer, mut peak_mib, mut peer_mib) = (Vec::new(), Vec::new(), 0f64, 0f64);
            for _ in 0..repeats {
                let taken = task(control).in_child();
                let beside = task(Control::Bounded((4, large), None)).in_child();
                assert_eq!(taken.cliques, beside.cliques);
                ours.push(taken.seconds * 1e3);
                peer.push(beside.seconds * 1e3);
                peak_mib = peak_mib.max(taken.peak_mib);
                peer_mib = peer_mib.max(beside.peak_mib);
            }
            let paired = Paired { ours, peer, usage: meter.stop() };
            let case = format!("4-cliques w{workers} {name} vs N=4 B={large}");
            report.case(
                Case::new(case, "ms", Better::Lower, paired).with("peak_mib", peak_mib).with("peer_peak_mib", peer_mib),
            );
        }
    }
}
