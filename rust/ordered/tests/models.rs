//! Every interleaving of the buffers and queues, by loom: the same source files, with its primitives in place of the usual ones.
//!
//! Plain `cargo test -p penstock-ordered --test models` takes some seconds. `PENSTOCK_LOOM_BOUND` raises the number of preemptions that
//! are tried where they are bounded (0: no bound), `PENSTOCK_LOOM_SECONDS` the time of each model.
#![allow(dead_code, unreachable_pub, missing_docs)]

#[path = "support"]
mod checked {
    #[path = "models.rs"]
    pub mod models;
    #[path = "../../src/queue/mod.rs"]
    pub mod queue;
    #[path = "../../src/reorder/mod.rs"]
    pub mod reorder;
    #[path = "loom.rs"]
    pub mod sync;
}
#[path = "support/explore.rs"]
mod explore;

use checked::models::{self, Make};
use explore::{explore, fails};

const ALL: [(&str, Make<u64>); 3] =
    [("non-blocking", models::non_blocking), ("flagged", models::flagged), ("locked", models::locked)];

/// The bound for a model of a buffer: `least` for the comparators, which take a hundred times as many interleavings.
fn bound(name: &str, of_ours: Option<usize>, least: usize) -> Option<usize> {
    if name == "non-blocking" { of_ours } else { Some(least) }
}

#[test]
fn two_threads() {
    for (name, make) in ALL {
        for slots in 1..=3 {
            let what = |items: u64| format!("{name}, {slots} slots, 2 threads, {items} items");
            let all = bound(name, None, 3);
            explore(&what(3), all, move || models::in_order(make, 2, 3, slots, false, false));
            explore(&what(4), Some(3), move || models::in_order(make, 2, 4, slots, false, false));
            explore(&(what(4) + " reversed"), all, move || models::in_order(make, 2, 4, slots, true, false));
        }
    }
}

#[test]
fn three_threads() {
    for (name, make) in ALL {
        for slots in 1..=3 {
            let what = |items: u64| format!("{name}, {slots} slots, 3 threads, {items} items");
            explore(&what(3), bound(name, Some(3), 2), move || models::in_order(make, 3, 3, slots, false, false));
            explore(&what(9), bound(name, Some(2), 1), move || models::in_order(make, 3, 9, slots, false, false));
        }
    }
}

/// Who is refused comes back until there is room, also with one slot.
#[test]
fn refused_senders_that_come_back_all_end() {
    for (name, make) in ALL {
        let what = format!("{name}, 1 slot, 2 threads, 3 items, refused ones come back");
        explore(&what, Some(2), move || models::in_order(make, 2, 3, 1, false, true));
    }
}

#[test]
fn next_is_a_lower_bound() {
    explore("non-blocking, next", None, || models::next_is_a_lower_bound(models::non_blocking));
    explore("flagged, next", None, || models::next_is_a_lower_bound(models::flagged));
    explore("locked, next", None, || models::next_is_a_lower_bound(models::locked));
}

#[test]
fn a_number_is_taken_once() {
    for (name, make) in ALL {
        for slots in 1..=2 {
            explore(&format!("{name}, repeated, {slots} slots"), Some(3), move || models::taken_once(make, slots));
        }
    }
    explore("late repetition", None, models::late_repetition);
}

#[test]
fn a_panic_strands_nobody() {
    for at in 0..2 {
        explore("non-blocking, panic", None, move || models::broken(models::non_blocking, at));
        explore("flagged, panic", Some(3), move || models::broken(models::flagged, at));
        explore("locked, panic", None, move || models::broken(models::locked, at));
    }
}

#[test]
fn partitions_keep_their_order_and_lose_nothing() {
    for quantum in [1, 9] {
        let what = |queue: &str, workers| format!("{queue}, quantum {quantum}, {workers} workers, 3 items");
        for (workers, bound) in [(2, 3), (3, 2)] {
            for items in [&[0, 0, 1], &[1, 1, 1]] {
                explore(&what("hybrid", workers), Some(bound), move || models::hybrid(items, workers - 1, quantum));
                explore(&what("partitioned", workers), Some(bound), move || {
                    models::partitioned(items, workers - 1, quantum)
                });
            }
        }
    }
}

/// The defect for which the hybrid queue is there.
#[test]
fn the_shared_queue_does_not_keep_the_order() {
    assert!(fails(Some(3), || models::shared_in_order(&[0, 0], 2)).is_some());
}
