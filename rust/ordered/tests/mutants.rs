//! Seeded faults: the buffers and queues with one text changed, each of which a model has to notice.
//!
//! `cargo test -p penstock-ordered --test mutants -- --nocapture` says which gate noticed which fault, and when. The table is
//! `support/faults.in`; the build script makes the copies.
#![allow(dead_code, unreachable_pub, unused, missing_docs, clippy::all)]

#[path = "support/explore.rs"]
mod explore;
#[macro_use]
#[path = "support/gates.rs"]
mod gates;

#[path = "support"]
mod sound {
    #[path = "models.rs"]
    pub mod models;
    #[path = "../../src/queue/mod.rs"]
    pub mod queue;
    #[path = "../../src/reorder/mod.rs"]
    pub mod reorder;
    #[path = "loom.rs"]
    pub mod sync;
}

mod mutants {
    include!(concat!(env!("OUT_DIR"), "/mutants.rs"));
}

use gates::Gate;
use mutants::{MUTANTS, STALE};

/// What fails here says so by what it returns, and model checkers end executions by panics.
fn quiet() {
    std::panic::set_hook(Box::new(|_| {}));
}

#[test]
fn the_table_of_faults_follows_the_code() {
    assert_eq!(STALE, "", "the text of these faults is not in the code, or more than once");
}

/// Otherwise a gate would notice anything.
#[test]
fn the_code_as_it_is_passes_every_gate() {
    quiet();
    for (gate, run) in every_gate!(sound) {
        let noticed = run();
        println!("{gate:?}: {noticed:?} without a fault");
        assert!(noticed.is_none());
    }
}

#[test]
fn every_fault_is_noticed() {
    quiet();
    let mut unnoticed = Vec::new();
    for (name, gate, run) in MUTANTS {
        let outcome = run();
        match outcome {
            Some(executions) => println!("{name}: noticed by {gate:?} at execution {executions}"),
            None => unnoticed.push((name, gate)),
        }
    }
    println!("{} of {} faults were noticed", MUTANTS.len() - unnoticed.len(), MUTANTS.len());
    // The hook is quiet, so this has to be printed.
    println!("not noticed: {unnoticed:?}");
    assert!(unnoticed.is_empty());
}
