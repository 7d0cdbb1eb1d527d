//! M-01 and M-02 against the naive twin: random loads, random control, random interleavings, post-dated records.

use crate::common::fleet::Layout;
use crate::common::{Load, run};
use proptest::prelude::*;

fn check(seed: u64, layout: Layout, bits: u8, ticks: u64, batches: u64) {
    let load = Load::random(seed, bits, layout.workers(), ticks, batches);
    let trace = run(&load, layout, seed.rotate_left(17));
    assert_eq!(trace.rejected, []);
    trace.check(&load);
}

proptest! {
    #![proptest_config(penstock_cases::cases(40))]

    #[test]
    fn one_worker(seed: u64, bits in 0u8..5) {
        check(seed, Layout::Threads(1), bits, 20, 6);
    }

    #[test]
    fn two_threads(seed: u64, bits in 0u8..6) {
        check(seed, Layout::Threads(2), bits, 20, 10);
    }

    #[test]
    fn four_threads(seed: u64, bits in 1u8..5) {
        check(seed, Layout::Threads(4), bits, 16, 8);
    }

    #[test]
    fn two_processes_of_two_in_one(seed: u64, bits in 1u8..5) {
        check(seed, Layout::Apart { processes: 2, threads: 2 }, bits, 16, 8);
    }
}

proptest! {
    #![proptest_config(penstock_cases::cases(12))]

    #[test]
    fn two_processes_over_tcp(seed: u64, bits in 0u8..5, threads in 1usize..3) {
        check(seed, Layout::Tcp { processes: 2, threads }, bits, 16, 8);
    }
}

/// The runs above are of some worth only if rows overtake bins that are on their way.
#[test]
fn rows_overtake_bins_that_are_on_their_way() {
    for layout in [Layout::Threads(4), Layout::Apart { processes: 2, threads: 2 }] {
        let ahead = |seed| run(&Load::random(seed, 4, 4, 16, 8), layout, seed).ahead;
        assert!((0..100).any(|seed| ahead(seed) > 0), "{layout:?}");
    }
}
