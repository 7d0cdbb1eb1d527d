//! Random schedules of more threads and items than every interleaving could cover, by shuttle: uniform ones, and ones with few
//! preemptions at the worst places (PCT). The same source files over its primitives.
//!
//! `PENSTOCK_SCHEDULES` is how many of each kind (100 by default), `PENSTOCK_SEED` where they begin; a failure prints the schedule.
#![allow(dead_code, unreachable_pub, missing_docs)]

#[path = "support"]
mod checked {
    #[path = "models.rs"]
    pub mod models;
    #[path = "../../src/queue/mod.rs"]
    pub mod queue;
    #[path = "../../src/reorder/mod.rs"]
    pub mod reorder;
    #[path = "shuttle.rs"]
    pub mod sync;
}

use checked::models;
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::{Config, Runner};

fn asked(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name}={text:?}: a number")))
}

fn schedules(what: &str, model: impl Fn() + Send + Sync + Copy + 'static) {
    let count = asked("PENSTOCK_SCHEDULES").unwrap_or(100) as usize;
    // The same in every test run unless asked otherwise; nightly ones bring their own.
    let seed = asked("PENSTOCK_SEED").unwrap_or(5);
    println!("shuttle: {what}: {count} random and {count} PCT schedules, PENSTOCK_SEED={seed}");
    Runner::new(RandomScheduler::new_from_seed(seed, count), Config::default()).run(model);
    Runner::new(PctScheduler::new_from_seed(seed, 3, count), Config::default()).run(model);
}

#[test]
fn items_leave_in_order() {
    for slots in [1, 2, 3, 8] {
        for reversed in [false, true] {
            let again = !reversed || slots > 1;
            schedules("non-blocking", move || models::in_order(models::non_blocking, 4, 24, slots, false, again));
            schedules("flagged", move || models::in_order(models::flagged, 3, 12, slots, false, again));
            schedules("locked", move || models::in_order(models::locked, 3, 12, slots, false, again));
            schedules("non-blocking, reversed", move || {
                models::in_order(models::non_blocking, 3, 12, slots, reversed, false)
            });
        }
    }
}

#[test]
fn repetitions_panics_and_readers() {
    schedules("next", || models::next_is_a_lower_bound(models::non_blocking));
    for slots in 1..=2 {
        schedules("repeated", move || models::taken_once(models::non_blocking, slots));
    }
    for at in 0..2 {
        schedules("panic, non-blocking", move || models::broken(models::non_blocking, at));
        schedules("panic, flagged", move || models::broken(models::flagged, at));
    }
}

#[test]
fn partitions_keep_their_order_and_lose_nothing() {
    const ITEMS: [usize; 14] = [0, 1, 1, 0, 0, 0, 1, 0, 1, 1, 0, 0, 1, 0];
    for quantum in [1, 2, 9] {
        for workers in 2..=4 {
            schedules("hybrid", move || models::hybrid(&ITEMS, workers, quantum));
            schedules("partitioned", move || models::partitioned(&ITEMS, workers, quantum));
        }
    }
}
