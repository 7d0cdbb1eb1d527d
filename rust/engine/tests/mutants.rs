//! Faults planted in copies of the machines and in the simulated flow: the simulation has to find every one of them.

include!(concat!(env!("OUT_DIR"), "/mutants.rs"));

#[path = "support/runs.rs"]
mod runs;
#[path = "support/sim/mod.rs"]
mod sim;

/// What a run violates, if anything.
fn violated(finds: &str, seed: u64) -> Option<String> {
    let run = || match finds {
        "schedules" => runs::random(seed),
        sequence => runs::run(runs::sequence(sequence, seed)),
    };
    // A broken invariant of the machines themselves counts as well.
    std::panic::catch_unwind(run).unwrap_or_else(|_| Some("it panics".to_owned()))
}

/// Runs until something is violated, and once more with nothing planted, where nothing is to be; what was wrong with that.
fn missed(name: &str, finds: &str) -> Option<String> {
    let seed = sim::with_fault(name, || (0..150).find(|seed| violated(finds, *seed).is_some()));
    println!("{name}: {seed:?}");
    let Some(seed) = seed else { return Some(format!("{name}: not found")) };
    violated(finds, seed)
        .map(|what| format!("{name}: {finds:?} fails with seed {seed} when nothing is planted: {what}"))
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
    let missed: Vec<String> = mine.filter_map(|(name, finds)| missed(name, finds)).collect();
    println!("{missed:#?}");
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
