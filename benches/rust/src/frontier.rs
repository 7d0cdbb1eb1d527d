//! `frontier`: a maintained frontier moves by one, beside timely's `MutableAntichain`.

use std::hint::black_box;

use penstock_progress::MutableAntichain;
use timely::progress::frontier::MutableAntichain as Peer;

use crate::harness::{Better, Case, Options, Report, compare, nanoseconds_each};

/// Runs the bench.
pub fn run(options: &Options, report: &mut Report) {
    let sizes = [1_u64, 16, 256, 4_096];
    for live in sizes {
        let moves = if live > 256 { 1 << 10 } else { 1 << 16 };
        let mut ours = MutableAntichain::new();
        ours.update_iter((0..live).map(|time| (time, 1))).count();
        let mut peer = Peer::new();
        peer.update_iter((0..live).map(|time| (time, 1))).count();
        let (mut left, mut right) = (0, 0);
        let paired = compare(
            options.budget(sizes.len()),
            || {
                nanoseconds_each(moves, || {
                    for _ in 0..moves {
                        black_box(ours.update_iter([(left + live, 1), (left, -1)]).count());
                        left += 1;
                    }
                })
            },
            || {
                nanoseconds_each(moves, || {
                    for _ in 0..moves {
                        black_box(peer.update_iter([(right + live, 1), (right, -1)]).count());
                        right += 1;
                    }
                })
            },
        );
        assert_eq!(ours.frontier().iter().next(), Some(&left), "our frontier is elsewhere");
        assert_eq!(peer.frontier().first(), Some(&right), "the peer's frontier is elsewhere");
        let case = format!("live={live} vs timely 0.31 MutableAntichain");
        report.case(Case::new(case, "ns/move", Better::Lower, paired));
    }
}
