//! Faults planted in copies of the machines and in the simulated flow: the simulation has to find every one of them.

include!(concat!(env!("OUT_DIR"), "/mutants.rs"));

#[path = "support/runs.rs"]
mod runs;
#[path = "support/sim/mod.rs"]
mod sim;

/// Runs until something is violated; how many runs it took.
fn found(name: &str, finds: &str) -> Option<u64> {
    sim::with_fault(name, || {
        (0..150).find(|seed| {
            let run = || match finds {
                "schedules" => runs::random(*seed),
                sequence => runs::run(runs::sequence(sequence, *seed)),
            };
            // A broken invariant of the machines themselves counts as well.
            std::panic::catch_unwind(run).map_or(true, |violation| violation.is_some())
        })
    })
}

#[test]
fn the_table_follows_the_code() {
    println!("texts that are not found exactly once: {STALE:?}");
    assert!(STALE.is_empty() && MUTANTS.len() >= 20);
}

/// One part of the faults, so that parts run at once. What a planted fault breaks is not to be read in the log.
fn find_all(part: usize) {
    static QUIET: std::sync::Once = std::sync::Once::new();
    QUIET.call_once(|| std::panic::set_hook(Box::new(|_| {})));
    let mine = MUTANTS.iter().skip(part).step_by(2);
    let missed = mine.filter(|(name, finds)| {
        let runs = found(name, finds);
        println!("{name}: {runs:?}");
        runs.is_none()
    });
    let missed: Vec<&str> = missed.map(|(name, _)| *name).collect();
    println!("not found: {missed:?}");
    assert!(missed.is_empty());
}

#[test]
fn every_planted_fault_is_found() {
    find_all(0);
}

#[test]
fn every_other_planted_fault_is_found() {
    find_all(1);
}
