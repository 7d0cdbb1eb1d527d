//! `bins-overhead`: a keyed count with more and more bins, beside the same count with a single bin, and beside timely.
//!
//! 2^10 and 2^20 keys, epochs of 65,536 records, all keys there before the time is taken. The peer is ourselves without bins, on one worker, as in
//! Megaphone §5.2 (whose figures collapse past 2^12 bins); and timely with a hash map and a fast hash, which has no bins, on one
//! and two workers. The counts of both sides must be equal.

use std::sync::Arc;
use std::time::Instant;

use penstock_plan::Emit;

use crate::counting::KeyedCount;
use crate::harness::{Better, Case, Options, Report, compare, millions_per_second};
use crate::keyed_count::{Hash, Peer};
use crate::{Numbers, block};

const ROWS: usize = 1 << 16;
const EPOCHS: usize = 16;

/// Runs the bench.
///
/// # Panics
/// When a worker fails, or the two sides have counted differently.
pub fn run(options: &Options, report: &mut Report) {
    // Bits of the number of keys, of the number of bins; workers beside timely, none beside one bin.
    let own: &[u8] = if options.quick { &[4, 8, 12, 16, 20] } else { &[4, 6, 8, 10, 12, 14, 16, 18, 20] };
    let own = own.iter().map(|&bits| (20, bits, None));
    let few = [8, 12, 16].map(|bits| (10, bits, None));
    let workers =
        |workers| [10, 20].into_iter().flat_map(move |keys| [8, 12, 16].map(|bits| (keys, bits, Some(workers))));
    let beside: Vec<_> = if options.quick { Vec::new() } else { workers(1).chain(workers(2)).collect() };
    let cases: Vec<(u32, u8, Option<usize>)> = own.chain(few).chain(beside).collect();
    for &(keys, bits, workers) in &cases {
        case(options, report, cases.len(), (keys, bits, workers));
    }
}

fn case(options: &Options, report: &mut Report, cases: usize, (key_bits, bits, beside): (u32, u8, Option<usize>)) {
    let begin = Instant::now();
    let keys = 1_usize << key_bits;
    let workers = beside.unwrap_or(1);
    let mut numbers = Numbers(7).map(|number| number % keys as u64);
    let input = (0..EPOCHS).map(|_| Arc::new(numbers.by_ref().take(ROWS).collect::<Vec<u64>>())).collect::<Vec<_>>();
    let signed = |keys: &[u64]| block(&keys.iter().map(|&key| key as i64).collect::<Vec<_>>());
    let blocks = input.iter().map(|keys| signed(keys)).collect::<Vec<_>>();
    let all = (0..keys as u64).collect::<Vec<_>>();
    let mut ours = KeyedCount::start(workers, bits, Emit::Final);
    all.chunks(ROWS).for_each(|some| ours.count(&signed(some)));
    let budget = || options.budget(cases).saturating_sub(begin.elapsed());
    let (paired, equal, name) = if beside.is_some() {
        let peer = Peer::start(workers, Hash::Fast, Emit::Final);
        all.chunks(ROWS).for_each(|some| peer.count_all(&[Arc::new(some.to_vec())]));
        let paired = compare(
            budget(),
            || millions_per_second(EPOCHS * ROWS, || ours.count_all(&blocks)),
            || millions_per_second(EPOCHS * ROWS, || peer.count_all(&input)),
        );
        (paired, ours.finish(keys) == peer.finish(keys).0, "timely 0.31 fast hash")
    } else {
        let mut peer = KeyedCount::start(1, 0, Emit::Final);
        all.chunks(ROWS).for_each(|some| peer.count(&signed(some)));
        let paired = compare(
            budget(),
            || millions_per_second(EPOCHS * ROWS, || ours.count_all(&blocks)),
            || millions_per_second(EPOCHS * ROWS, || peer.count_all(&blocks)),
        );
        (paired, ours.finish(keys) == peer.finish(keys), "one bin")
    };
    assert!(equal, "the two sides have counted differently");
    let case = format!("w{workers} keys=2^{key_bits} bins=2^{bits} vs {name}");
    report.case(Case::new(case, "M records/s", Better::Higher, paired).with("rows_an_epoch", ROWS));
}
