//! `bins-overhead`: a keyed count on one worker with more and more bins, beside the same count with a single bin.
//!
//! 2^20 keys, epochs of 65,536 records, all keys there before the time is taken. The peer is ourselves without bins, as in Megaphone §5.2 (whose
//! figures collapse past 2^12 bins). The counts of both must be equal.

use std::time::Instant;

use penstock_plan::Emit;

use crate::counting::KeyedCount;
use crate::harness::{Better, Case, Options, Report, compare, millions_per_second};
use crate::{Numbers, block};

const ROWS: usize = 1 << 16;
const EPOCHS: usize = 16;
const KEYS: usize = 1 << 20;

/// Runs the bench.
///
/// # Panics
/// When a worker fails, or the two sides have counted differently.
pub fn run(options: &Options, report: &mut Report) {
    let sizes: &[u8] = if options.quick { &[4, 8, 12, 16, 20] } else { &[4, 6, 8, 10, 12, 14, 16, 18, 20] };
    for &bits in sizes {
        let begin = Instant::now();
        let mut numbers = Numbers(7).map(|number| (number % KEYS as u64) as i64);
        let blocks = (0..EPOCHS).map(|_| block(&numbers.by_ref().take(ROWS).collect::<Vec<_>>())).collect::<Vec<_>>();
        let mut ours = KeyedCount::start(1, bits, Emit::Final);
        let mut peer = KeyedCount::start(1, 0, Emit::Final);
        for some in (0..KEYS as i64).collect::<Vec<_>>().chunks(ROWS) {
            ours.count(&block(some));
            peer.count(&block(some));
        }
        let paired = compare(
            options.budget(sizes.len()).saturating_sub(begin.elapsed()),
            || millions_per_second(EPOCHS * ROWS, || ours.count_all(&blocks)),
            || millions_per_second(EPOCHS * ROWS, || peer.count_all(&blocks)),
        );
        assert!(ours.finish(KEYS) == peer.finish(KEYS), "the two sides have counted differently");
        let case = format!("w1 keys=2^20 bins=2^{bits} vs one bin");
        report.case(Case::new(case, "M records/s", Better::Higher, paired).with("rows_an_epoch", ROWS));
    }
}
