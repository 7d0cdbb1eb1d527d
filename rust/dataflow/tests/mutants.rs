//! Faults planted in a copy of the workers and of what links them: the simulation of processes that come and go has to find every one of them.
//! Those of the machine of members are planted in its own crate.

include!(concat!(env!("OUT_DIR"), "/mutants.rs"));

#[path = "support/faults.rs"]
mod faults;
#[path = "support/rescaling.rs"]
mod runs;

/// The first seed that finds a fault.
fn found(name: &'static str) -> Option<u64> {
    faults::with(name, || (0..120).find(|seed| std::panic::catch_unwind(|| runs::simulate(*seed, true)).is_err()))
}

#[test]
fn the_table_follows_the_code() {
    assert!(STALE.is_empty(), "texts that are not found exactly once: {STALE:?}");
    assert!(MUTANTS.len() >= 14, "{}", MUTANTS.len());
}

#[test]
fn every_planted_fault_is_found() {
    // What a planted fault breaks is not to be read in the log.
    std::panic::set_hook(Box::new(|_| {}));
    let mut missed = Vec::new();
    for name in MUTANTS {
        let (began, seed) = (std::time::Instant::now(), found(name));
        println!("{name}: {seed:?} in {:.1} s", began.elapsed().as_secs_f64());
        if seed.is_none() {
            missed.push(name);
        }
    }
    assert!(missed.is_empty(), "{missed:?}");
}
