//! A process of its own, because the end of a bench is one for the whole process.

use std::cell::Cell;
use std::time::Duration;

use penstock_benches::harness::{compare, end_in};

#[test]
fn when_it_is_late_one_turn_that_counts_is_enough() {
    end_in(Duration::ZERO);
    let turns = Cell::new(0);
    let side = || {
        turns.set(turns.get() + 1);
        1.0
    };
    let paired = compare(Duration::from_secs(60), side, side);
    assert_eq!((paired.ours.len(), paired.peer.len(), turns.get()), (1, 1, 4));
}
