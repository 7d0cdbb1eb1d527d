//! Random joins and leaves of the real workers: see `support/rescaling.rs`.
//!
//! `PENSTOCK_SEEDS=10000 cargo test -p penstock-dataflow --test all rescaling` tries more seeds than the usual; a seed that
//! fails says how to run it again.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::runs::{Seen, simulate};

/// The seeds to try: `PENSTOCK_SEED` alone, or `PENSTOCK_SEEDS` from 0 on.
fn seeds(usual: u64) -> Range<u64> {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().expect("a number of seeds"));
    if let Some(seed) = number("PENSTOCK_SEED") {
        return seed..seed + 1;
    }
    0..number("PENSTOCK_SEEDS").unwrap_or(usual)
}

fn try_all(test: &str, usual: u64, linked: bool) -> Seen {
    let mut all = Seen::default();
    for seed in seeds(usual) {
        match catch_unwind(AssertUnwindSafe(|| simulate(seed, linked))) {
            Ok(seen) => all.add(seen),
            Err(panic) => {
                eprintln!("replay: PENSTOCK_SEED={seed} cargo test -p penstock-dataflow --test all rescaling::{test}");
                std::panic::resume_unwind(panic);
            }
        }
    }
    println!("{all:?}");
    all
}

#[test]
fn processes_that_come_and_go_give_the_sums_of_one() {
    let all = try_all("processes_that_come_and_go_give_the_sums_of_one", 60, true);
    let many = seeds(60).count() >= 60;
    assert!(!many || all.joined > 60 && all.left > 30 && all.first_left > 10 && all.died > 3, "{all:?}");
}

#[test]
fn members_that_come_and_go_give_the_sums_of_one() {
    let all = try_all("members_that_come_and_go_give_the_sums_of_one", 60, false);
    let many = seeds(60).count() >= 60;
    assert!(!many || all.joined > 60 && all.left > 30 && all.first_left > 10 && all.refused > 5, "{all:?}");
}
