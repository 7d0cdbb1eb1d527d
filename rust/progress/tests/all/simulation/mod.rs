//! Random graphs, random delays, one seed per run: see `cluster`.
//!
//! `PENSTOCK_SEEDS=10000 cargo test -p penstock-progress --test all simulation` tries more seeds than the usual 400; a seed that
//! fails prints the command that repeats it alone.

mod cluster;

use std::ops::Range;

use crate::common::SmallTime;
use cluster::{Cluster, Fault};
use penstock_progress::nest::Nest;
use penstock_progress::{FlowTime, Product};

/// What a run tells besides its verdict.
#[derive(Default)]
struct Seen {
    /// Whether the fault had an effect.
    struck: bool,
    notified: usize,
    snapshots: usize,
}

fn run<T: SmallTime>(seed: u64, fault: Option<Fault>, seen: &mut Seen) -> Result<(), String> {
    let mut cluster = Cluster::<T>::new(seed, fault);
    let result = cluster.run();
    seen.struck |= cluster.struck;
    seen.notified += cluster.notified;
    seen.snapshots += cluster.snapshots;
    result.map_err(|what| format!("{}: {what}", std::any::type_name::<T>()))
}

/// One run over each kind of time.
fn simulate(seed: u64, fault: Option<Fault>) -> (Seen, Result<(), String>) {
    let mut seen = Seen::default();
    let all = [
        run::<u64>,
        run::<FlowTime>,
        run::<Product<u64, u64>>,
        run::<Product<FlowTime, u64>>,
        run::<Product<Product<u64, u64>, u64>>,
        run::<Nest<true>>,
        run::<Product<FlowTime, Nest<false>>>,
    ];
    let result = all.iter().try_for_each(|run| run(seed, fault, &mut seen));
    (seen, result)
}

/// Tries seeds until one fails; what it says then ends with how to repeat it.
fn explore(seeds: Range<u64>, fault: Option<Fault>) -> Result<(usize, usize), String> {
    let (mut notified, mut snapshots) = (0, 0);
    for seed in seeds {
        let (seen, result) = simulate(seed, fault);
        result.map_err(|what| {
            format!("{what}\nreplay: PENSTOCK_SEED={seed} cargo test -p penstock-progress --test all simulation")
        })?;
        notified += seen.notified;
        snapshots += seen.snapshots;
    }
    Ok((notified, snapshots))
}

/// The seeds that the environment asks for.
fn seeds(one: Option<&str>, count: Option<&str>) -> Result<Range<u64>, String> {
    let number = |name, text: &str| text.parse::<u64>().map_err(|error| format!("{name}={text:?}: {error}"));
    if let Some(text) = one {
        let seed = number("PENSTOCK_SEED", text)?;
        let end = seed.checked_add(1).ok_or(format!("PENSTOCK_SEED={text:?}: the last seed is {}", u64::MAX - 1))?;
        return Ok(seed..end);
    }
    Ok(0..count.map_or(Ok(if cfg!(miri) { 2 } else { 400 }), |text| number("PENSTOCK_SEEDS", text))?)
}

#[test]
fn random_delays_are_safe_and_live() {
    let [one, count] = ["PENSTOCK_SEED", "PENSTOCK_SEEDS"].map(|name| std::env::var(name).ok());
    let seeds = seeds(one.as_deref(), count.as_deref()).unwrap_or_else(|error| panic!("{error}"));
    let many = seeds.end - seeds.start >= 100;
    match explore(seeds, None) {
        Ok((notified, snapshots)) => {
            assert!(notified > 0 || !many, "no run came to a notification");
            assert!(snapshots > 1000 || !many, "{snapshots} snapshots");
        }
        Err(what) => panic!("{what}"),
    }
}

#[test]
fn the_environment_is_read() {
    assert_eq!(seeds(Some("17"), Some("3")), Ok(17..18));
    assert_eq!(seeds(None, Some("10000")), Ok(0..10_000));
    assert!(seeds(None, None).is_ok_and(|seeds| seeds.end > 1));
    assert_eq!(seeds(Some("x"), None), Err("PENSTOCK_SEED=\"x\": invalid digit found in string".to_owned()));
    assert!(seeds(Some("18446744073709551615"), None).is_err() && seeds(None, Some("-1")).is_err());
}

/// A failing seed prints a command; its seed alone fails again in the same way, and only because of the fault.
#[test]
fn a_failing_seed_tells_how_to_repeat_it() {
    let said = explore(0..200, Some(Fault::TornStep)).expect_err("torn steps are noticed");
    let (what, replay) = said.split_once("\nreplay: ").expect("the last line is the command");
    let (seed, command) = replay.strip_prefix("PENSTOCK_SEED=").and_then(|rest| rest.split_once(' ')).expect("a seed");
    assert_eq!(command, "cargo test -p penstock-progress --test all simulation");
    let again = seeds(Some(seed), None).expect("it is a number");
    assert_eq!(explore(again.clone(), Some(Fault::TornStep)), Err(said.clone()), "{what}");
    assert!(explore(again, None).is_ok());
}

/// Seeds tried with a fault; under the slow interpreter too few for a share to mean anything.
const BROKEN: u64 = if cfg!(miri) { 1 } else { 60 };

/// How many of the seeds in which a fault struck are noticed, and how many there are.
fn noticed(fault: Fault, seeds: u64) -> (u64, u64) {
    let (mut noticed, mut struck) = (0, 0);
    for seed in 0..seeds {
        let (seen, result) = simulate(seed, Some(fault));
        struck += u64::from(seen.struck);
        noticed += u64::from(result.is_err());
        assert!(seen.struck || result.is_ok(), "seed {seed} fails without {fault:?}: {result:?}");
    }
    (noticed, struck)
}

/// Whatever is lost, repeated or reordered on a link is noticed every time.
#[test]
fn broken_links_are_noticed_always() {
    let faults = [Fault::LostBroadcast, Fault::DoubledBroadcast, Fault::OvertakingBroadcast, Fault::ForgottenChange];
    for fault in faults {
        let (noticed, struck) = noticed(fault, BROKEN);
        assert!(noticed == struck && struck >= BROKEN / 2, "{fault:?}: {noticed} of {struck}");
    }
}

/// The other faults need a schedule that they matter in.
#[test]
fn broken_rules_are_noticed() {
    let faults = [
        (Fault::TornStep, 20),
        (Fault::DroppedSummary, 10),
        (Fault::DeafNotificator, 5),
        (Fault::UncountedDowngrade, 50),
        (Fault::EarlySnapshot, 90),
        (Fault::SnapshotBehind, 90),
    ];
    for (fault, least) in faults {
        let (noticed, struck) = noticed(fault, BROKEN);
        assert!(cfg!(miri) || 100 * noticed >= least * struck && struck > 10, "{fault:?}: {noticed} of {struck}");
    }
}
