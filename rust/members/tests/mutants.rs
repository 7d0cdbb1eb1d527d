//! Faults planted in a copy of the machine and in the simulation: the simulation has to find every one of them.

include!(concat!(env!("OUT_DIR"), "/mutants.rs"));

#[path = "../../progress/tests/common/mod.rs"]
mod common;
#[path = "support/faults.rs"]
mod faults;
#[path = "support/runs.rs"]
mod runs;
#[path = "support/world.rs"]
mod world;

/// The first seed that finds a fault.
fn found(name: &'static str, finds: &str) -> Option<u64> {
    let run = match finds {
        "calm" => runs::calm,
        "rough" => runs::rough,
        "deadly" => runs::deadly,
        "gone" => runs::gone,
        other => panic!("there are no runs {other:?}"),
    };
    faults::with(name, || {
        // A broken invariant of the machine itself counts as well.
        runs::FOUND
            .into_iter()
            .chain(0..300)
            .find(|seed| std::panic::catch_unwind(|| run(*seed).is_err()).unwrap_or(true))
    })
}

#[test]
fn the_table_follows_the_code() {
    assert!(STALE.is_empty(), "texts that are not found exactly once: {STALE:?}");
    assert!(MUTANTS.len() >= 30, "{}", MUTANTS.len());
}

#[test]
fn every_planted_fault_is_found() {
    // What a planted fault breaks is not to be read in the log.
    std::panic::set_hook(Box::new(|_| {}));
    let missed: Vec<&str> = MUTANTS
        .iter()
        .filter(|(name, finds)| {
            let seed = found(name, finds);
            println!("{name}: {seed:?}");
            seed.is_none()
        })
        .map(|(name, _)| *name)
        .collect();
    println!("not found: {missed:?}");
    assert!(missed.is_empty());
}
