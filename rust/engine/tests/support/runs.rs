//! Runs of the simulation: by seed, and by the name of a sequence.

use std::cell::RefCell;
use std::collections::BTreeMap;

use crate::sim::Dice;
use crate::sim::faults::{Fault, Plan};
use crate::sim::world::{Scenario, World};

thread_local! {
    /// How often milestones were reached, over all runs of this thread.
    pub(crate) static SEEN: RefCell<BTreeMap<String, u64>> = const { RefCell::new(BTreeMap::new()) };
}

/// A run in which everything may happen; what was violated, if anything.
pub(crate) fn random(seed: u64) -> Option<String> {
    let mut dice = Dice(seed);
    run(Scenario {
        seed,
        workers: dice.between(1, 3) as u32,
        threads: dice.between(1, 2) as u32,
        bits: dice.between(1, 3) as u8,
        batches: dice.between(2, 5),
        durable: !dice.once_in(8),
        retry_sink: !dice.once_in(6),
        takeover: dice.once_in(4),
        merge_files: dice.between(2, 12) as usize,
        merge_ms: dice.between(1, 900),
        few: None,
        keep: dice.between(1, 3) as u32,
        slow: dice.between(3, 40),
        faults: Plan { scripted: Vec::new(), random: dice.below(9) as u32, rate: dice.between(10, 160) },
        exclusive: !dice.once_in(4),
    })
}

/// The sequences of events that break a naive protocol, by name.
pub(crate) fn sequence(name: &str, seed: u64) -> Scenario {
    let mut dice = Dice(seed ^ 0x5E0);
    let batch = dice.between(1, 3);
    let member = dice.below(3);
    let mut scenario = Scenario {
        seed,
        workers: 2 + (seed % 2) as u32,
        threads: 1 + (seed / 2 % 2) as u32,
        bits: 3,
        batches: 4,
        durable: true,
        retry_sink: true,
        takeover: false,
        exclusive: true,
        merge_files: 64,
        merge_ms: 300,
        few: None,
        keep: 1,
        slow: 20,
        faults: Plan::default(),
    };
    let at = |what: &'static str, times: u64, fault: Fault| (what, times, fault);
    let crash = Fault::CrashMember(member);
    scenario.faults.scripted = match name {
        "1 one attempt" => match seed % 3 {
            0 => vec![at("sink called", batch, crash)],
            1 => vec![at("sink returned", batch, crash)],
            _ => vec![at("write asked", 2 * batch, crash)],
        },
        "1 one attempt again" => match seed % 2 {
            // Computed, written, returned, and asked for again.
            0 => vec![at("returned", batch, Fault::Stop), at("returned", batch, crash)],
            _ => vec![at("manifest written", batch, Fault::Stop), at("abandoned", 1, crash)],
        },
        "2 crash before the manifest" => vec![
            at("sink called", if seed.is_multiple_of(3) { 1 } else { 99 }, crash),
            at("manifest asked", batch, Fault::CrashDriver),
        ],
        "2 crash after the manifest" => vec![at("manifest written", batch, Fault::CrashDriver)],
        "2 crash after the commit" => vec![at("committed", batch, Fault::CrashDriver)],
        "3 a bin moves after a key was touched" => {
            vec![at("fed", batch, Fault::MigrateAll), at("fed", batch + 1, Fault::MigrateAll)]
        }
        "4 idle moves wait for the record" => {
            scenario.batches = 8;
            (1..=8)
                .flat_map(|one| [at("fed", one, Fault::MigrateAll), at("epoch done", 3 * one, Fault::MigrateAll)])
                .collect()
        }
        "5 rescale" => {
            let workers = if seed % 4 < 2 { 1 } else { 4 };
            vec![
                at("sink called", batch, Fault::Rescale(workers)),
                match seed % 3 {
                    0 => at("sink called", batch, Fault::SinkRaises),
                    1 => at("returned", batch, Fault::Stop),
                    _ => at("batch called", batch + 1, Fault::Stop),
                },
                at("committed", 3, Fault::Rescale(2)),
            ]
        }
        "5 rescale without a checkpoint" => {
            scenario.durable = false;
            let workers = if seed % 4 < 2 { 1 } else { 4 };
            vec![at("sink called", batch, Fault::Rescale(workers)), at("returned", batch, Fault::Stop)]
        }
        "5 rescale while it rests" => {
            let workers = if seed % 4 < 2 { 1 } else { 4 };
            let when = if seed.is_multiple_of(2) { "returned" } else { "sink called" };
            vec![at("returned", 1, Fault::Rescale(workers)), at(when, batch + 1, Fault::Stop)]
        }
        "5 rescale and back" => {
            let workers = if seed % 4 < 2 { 1 } else { 4 };
            let when = ["rescaling", "rescaling", "group started", "epoch done"][(seed / 2 % 4) as usize];
            let times = if when == "rescaling" { 1 } else { 3 * batch };
            vec![
                at("returned", batch, Fault::Rescale(workers)),
                at(when, times, Fault::CancelRescale),
                at("committed", 3, Fault::Rescale(2)),
                at("committed", 3, Fault::CancelRescale),
            ]
        }
        "5 executors go" => {
            scenario.durable = seed.is_multiple_of(2);
            scenario.batches = 6;
            vec![
                at(if seed % 4 < 2 { "fed" } else { "returned" }, 1, Fault::Drain(member, false)),
                at("committed", 2, Fault::Rescale(scenario.workers + 1)),
                at("committed", 4, Fault::Drain(member + 1, false)),
            ]
        }
        "5 edited while workers begin" => {
            scenario.batches = 8;
            let begun = u64::from(scenario.workers);
            vec![
                at("committed", batch, Fault::Rescale(scenario.workers + 1)),
                at("group started", begun + 1, Fault::Edit),
                at("committed", batch + 3, Fault::Rescale(scenario.workers)),
                at("group started", 2 * begun + 2, Fault::Edit),
            ]
        }
        "6 the clock is Spark's own" => match seed % 2 {
            0 => vec![at("manifest asked", batch, Fault::CrashDriver)],
            _ => vec![at("sink called", batch, Fault::CrashDriver)],
        },
        "7 a damaged file is refused" => {
            let what = if seed.is_multiple_of(2) { Fault::Damage } else { Fault::DamageManifest };
            vec![at("committed", 2, what), at("committed", 2, Fault::CrashDriver)]
        }
        "8 lost is what nobody has" => {
            vec![at("fed", batch, Fault::MigrateAll), at("moved", 1, crash)]
        }
        "9 the source is not replayable" => {
            vec![at("sink called", batch, Fault::Unstable), at("sink called", batch, crash)]
        }
        "9 other rows for another engine" => {
            vec![at("manifest written", batch, Fault::Unstable), at("manifest written", batch, Fault::CrashDriver)]
        }
        "10 the sink fails" => {
            scenario.retry_sink = seed.is_multiple_of(2);
            (1..=4).map(|one| at("sink called", batch + one, Fault::CrashMember(member + one))).collect()
        }
        "11 finish once" => match seed % 5 {
            0 => vec![at("finish called", 1, Fault::CrashDriver)],
            1 => vec![at("manifest asked", 5, Fault::CrashDriver)],
            2 => vec![at("manifest written", 5, Fault::CrashDriver)],
            3 => vec![at("sink called", 5, crash)],
            _ => vec![at("manifest written", 5, Fault::StoreDown(900)), at("store failed", 1, crash)],
        },
        "12 two engines" => {
            scenario.takeover = seed.is_multiple_of(2);
            let when = ["sink called", "manifest asked", "returned", "batch called"][(seed / 2 % 4) as usize];
            vec![at(when, batch, Fault::SecondEngine)]
        }
        "12 two engines claim at once" => {
            // A write that was begun before the other one looked comes when that has long begun to work.
            (scenario.exclusive, scenario.slow) = (false, 2);
            vec![at("checkpoint asked", 1, Fault::SecondEngine)]
        }
        "a checkpoint is put back" => {
            scenario.batches = 8;
            let mut faults = vec![at("committed", batch, Fault::Copy)];
            match seed % 3 {
                // The claim is of an engine that is gone by then.
                0 => faults.push(at("committed", batch + 1, Fault::CrashDriver)),
                // Others have come since.
                1 => faults.push(at("committed", batch + 1, Fault::Rescale(scenario.workers + 1))),
                _ => {}
            }
            faults.push(at("committed", batch + 4, Fault::PutBack));
            if seed.is_multiple_of(2) {
                faults.push(at("put back", 1, crash));
            }
            faults
        }
        "a batch is planned anew" => {
            scenario.durable = !seed.is_multiple_of(4);
            let when = ["returned", "sink called", "fed", "written"][(seed / 4 % 4) as usize];
            let anew = at(when, if when == "written" { 2 * batch } else { batch }, Fault::PlanAnew);
            let again = match seed % 3 {
                0 => Fault::Stop,
                1 => Fault::SinkRaises,
                _ if scenario.durable => Fault::CrashDriver,
                _ => Fault::Stop,
            };
            scenario.retry_sink = again != Fault::SinkRaises;
            vec![anew.clone(), at(anew.0, anew.1, again)]
        }
        "store fails" => {
            let when = ["manifest asked", "write asked", "sink called", "finish called"][(seed % 4) as usize];
            let times = if when == "finish called" { 1 } else { batch };
            vec![
                at(when, times, Fault::StoreDown(dice.between(20, 900))),
                at("store failed", 1, Fault::CrashMember(member)),
            ]
        }
        "files are merged" => {
            scenario.merge_files = 2;
            scenario.batches = 6;
            vec![at("fed", 4, Fault::MigrateAll), at("committed", 5, Fault::CrashDriver)]
        }
        "files stay few" => {
            (scenario.batches, scenario.merge_files) = (60, 2);
            scenario.merge_ms = if seed.is_multiple_of(2) { 50 } else { 1_500 };
            scenario.slow = 1_000;
            // Each batch adds a file of each member until the merged one is used.
            let batches = 4 + scenario.merge_ms / 60;
            scenario.few = Some(8 * scenario.merge_files as u64 + batches * u64::from(scenario.workers));
            // The one that merges, or one that does not.
            let crash = Fault::CrashMember(1 - seed % 2);
            if seed % 4 > 1 { vec![at("merging files", 1, crash)] } else { Vec::new() }
        }
        "manifests are kept" => {
            // What the engine before has merged is named by its own manifests only.
            (scenario.batches, scenario.keep, scenario.merge_files) = (9, 3, 2);
            vec![at("committed", 5, Fault::CrashDriver)]
        }
        "the store is slow" => {
            scenario.slow = 2;
            vec![at("sink called", batch, crash.clone()), at("write asked", 5 * batch, crash)]
        }
        "a member dies with its rows" => {
            scenario.workers = 1 + (seed % 2) as u32;
            // Before they come, or after.
            let when = if seed % 4 < 2 { "staged" } else { "feed asked" };
            vec![at(when, batch, crash)]
        }
        "migrations are cut off" => (1..4)
            .flat_map(|one| [at("fed", one, Fault::MigrateAll), at("epoch done", 3 * one, Fault::CutMesh)])
            .collect(),
        "13 bins are split and merged" => {
            scenario.durable = !seed.is_multiple_of(4);
            scenario.batches = 8;
            let mut faults = vec![
                at("fed", 1, Fault::RecutAll),
                at("committed", 2, Fault::MigrateAll),
                at("committed", 3, Fault::Recut),
                at("committed", 5, Fault::Rescale(1 + seed as u32 % 3)),
                at("fed", 7, Fault::RecutAll),
                at("committed", 7, Fault::RecutAll),
            ];
            if scenario.durable {
                faults.push(at("sink called", 4, crash));
                faults.push(at("committed", 6, Fault::CrashDriver));
            }
            faults
        }
        "13 undone to before a split" => {
            scenario.durable = seed.is_multiple_of(2);
            vec![at("sink called", batch, Fault::RecutAll), at("moved", 1, Fault::Stop)]
        }
        "13 splits are cut off" => (1..4)
            .flat_map(|one| [at("fed", one, Fault::RecutAll), at("epoch done", 3 * one, Fault::CutMesh)])
            .collect(),
        "members lose each other" => vec![
            at("group started", batch, Fault::CutMesh),
            at("fed", batch, Fault::CutMesh),
            at("group started", batch + 4, Fault::CutMesh),
        ],
        other => panic!("no sequence {other:?}"),
    };
    scenario
}

/// Runs a scenario; what was violated, if anything.
pub(crate) fn run(scenario: Scenario) -> Option<String> {
    finished(&World::new(scenario).run())
}

/// What was violated in a run; shows what happened where that is wanted.
pub(crate) fn finished(world: &World) -> Option<String> {
    SEEN.with_borrow_mut(|seen| {
        for (what, times) in &world.seen {
            *seen.entry(what.clone()).or_default() += times;
        }
        *seen.entry("events".into()).or_default() += world.events;
        *seen.entry("ms of virtual time".into()).or_default() += world.now;
    });
    if let (Some(trace), false) = (&world.trace, world.violations.is_empty()) {
        println!("{:?}", world.scenario);
        trace.iter().for_each(|line| println!("{line}"));
    }
    world.violations.first().cloned()
}
