//! `change-batch`: signed counts are updated one by one and drained, beside timely's `ChangeBatch`.
//!
//! One repeat works through a part of a stream of updates, half of them +1 and half -1, in batches of `n`; the figure is the
//! time per update, its share of the drain included. The stream is longer than what branch predictors remember, which was
//! seen to be some hundred thousand comparisons. Both sides are first seen to drain the same.

use std::hint::black_box;

use penstock_progress::ChangeBatch;
use timely::progress::ChangeBatch as Peer;

use crate::Numbers;
use crate::harness::{Better, Case, Options, Report, compare, nanoseconds_each};

const SIZES: [usize; 4] = [1, 8, 64, 16_384];
/// In a repeat: about a millisecond, which mostly fits into one time slice of a busy machine.
const UPDATES: usize = 1 << 16;
/// Parts of the stream.
const PARTS: usize = 16;

/// Runs the bench.
pub fn run(options: &Options, report: &mut Report) {
    let cases: Vec<(usize, Times)> = SIZES
        .iter()
        // A batch of one update has one time, whatever the times are.
        .flat_map(|n| TIMES[..if *n == 1 { 1 } else { TIMES.len() }].iter().map(|times| (*n, *times)))
        .collect();
    let budget = options.budget(cases.len());
    for (n, (name, time)) in cases {
        let updates: Vec<(u64, i64)> = (0..(PARTS * UPDATES) as u64)
            .zip(Numbers(n as u64))
            .map(|(at, number)| (time(at, number >> 1), if number & 1 == 0 { 1 } else { -1 }))
            .collect();
        let (mut ours, mut peer) = (ChangeBatch::new(), Peer::<u64>::new());
        for batch in updates.chunks(n) {
            batch.iter().for_each(|(time, diff)| ours.update(*time, *diff));
            batch.iter().for_each(|(time, diff)| peer.update(*time, *diff));
            assert!(ours.drain().eq(peer.drain()), "the sides drain differently");
        }
        let mut ours_parts = updates.chunks(UPDATES).cycle();
        let mut peer_parts = ours_parts.clone();
        let paired = compare(
            budget,
            || {
                let part = ours_parts.next().expect("it has no end");
                nanoseconds_each(UPDATES, || {
                    for batch in part.chunks(n) {
                        for (time, diff) in batch {
                            ours.update(*time, *diff);
                        }
                        for change in ours.drain() {
                            black_box(change);
                        }
                    }
                })
            },
            || {
                let part = peer_parts.next().expect("it has no end");
                nanoseconds_each(UPDATES, || {
                    for batch in part.chunks(n) {
                        for (time, diff) in batch {
                            peer.update(*time, *diff);
                        }
                        for change in peer.drain() {
                            black_box(change);
                        }
                    }
                })
            },
        );
        let case = format!("n={n} times={name} vs timely 0.31 ChangeBatch");
        report.case(Case::new(case, "ns/update", Better::Lower, paired));
    }
}

/// A kind of times: its name, and a time from the position of an update and a random number.
type Times = (&'static str, fn(u64, u64) -> u64);

const TIMES: [Times; 4] = [
    ("1", |_, _| 42),
    ("16 in turn", |at, _| at % 16),
    ("16 at random", |_, number| number % 16),
    ("distinct", |_, number| number),
];
