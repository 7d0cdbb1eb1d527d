//! Members join, leave and die in the middle of random dataflows, in an order that a seed decides: see `support/world.rs`.
//!
//! `PENSTOCK_SEEDS=10000 cargo test -p penstock-members --test all simulation` tries more seeds than the usual 300.

use crate::runs;

fn seeds() -> Vec<u64> {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().expect("a number of seeds"));
    if let Some(seed) = number("PENSTOCK_SEED") {
        return vec![seed];
    }
    let few = number("PENSTOCK_SEEDS").unwrap_or(300);
    (0..few).chain(runs::FOUND.into_iter().filter(|seed| *seed >= few)).collect()
}

fn try_all(test: &str, run: fn(u64) -> Result<runs::Seen, String>) -> runs::Seen {
    let mut all = runs::Seen::default();
    for seed in seeds() {
        match run(seed) {
            Ok(seen) => all.add(&seen),
            Err(what) => {
                panic!(
                    "{what}\nreplay: PENSTOCK_SEED={seed} cargo test -p penstock-members --test all simulation::{test}"
                )
            }
        }
    }
    println!("{test}: {all:?}");
    all
}

/// Without faults every join ends well, and every leave, but for that of the last one.
#[test]
fn members_come_and_go_while_records_flow() {
    let seen = try_all("members_come_and_go_while_records_flow", runs::calm);
    let many = seeds().len() >= 100;
    assert!(!many || seen.seats > 300 && seen.closed > 300 && seen.stayed > 30 && seen.asks > 20, "{seen:?}");
}

/// Servers and joiners that rest, repeated messages, joiners that die: a join ends one way or the other and leaves nothing behind.
#[test]
fn joins_that_fail_leave_nothing_behind() {
    let seen = try_all("joins_that_fail_leave_nothing_behind", runs::rough);
    let many = seeds().len() >= 100;
    assert!(!many || seen.seats > 100 && seen.refused > 10 && seen.died > 20, "{seen:?}");
}

/// A member that dies at any moment ends the run for all, joiners too, with the same cause.
#[test]
fn a_member_that_dies_ends_the_run_for_all() {
    let seen = try_all("a_member_that_dies_ends_the_run_for_all", runs::deadly);
    assert!(seeds().len() < 100 || seen.doomed > 100, "{seen:?}");
}

/// A bundle that rests on the last one of who is gone waits until that is taken in.
#[test]
fn who_is_gone_has_not_said_all_while_its_last_bundle_waits() {
    runs::gone(0).unwrap();
}
