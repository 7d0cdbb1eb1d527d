//! The whole cluster in simulation: the sequences that break a naive protocol, and random schedules by seed. See `support/sim`.

use crate::machine::EngineError;
use crate::runs;
use crate::sim::world::World;

/// Runs a sequence with several seeds; every run has to reach these milestones, in some of them each.
fn sequence(name: &str, milestones: &[&str]) -> Vec<World> {
    seeds(8, name, milestones)
}

fn seeds(count: u64, name: &str, milestones: &[&str]) -> Vec<World> {
    let worlds: Vec<World> = (0..count).map(|seed| World::new(runs::sequence(name, seed)).run()).collect();
    for world in &worlds {
        if let Some(violation) = runs::finished(world) {
            panic!("sequence {name:?}, seed {}: {violation}", world.scenario.seed);
        }
    }
    for milestone in milestones {
        assert!(worlds.iter().any(|world| world.times(milestone) > 0), "{name}: nowhere {milestone}");
    }
    worlds
}

#[test]
fn sequence_01_state_output_and_manifest_are_of_one_attempt() {
    let worlds = sequence("1 one attempt", &["crash", "loaded"]);
    assert!(worlds.iter().any(|world| world.times("sink called") > 5), "some sink is called again");
    assert!(worlds.iter().all(|world| world.times("restarted") == 0), "by the engine itself");
    sequence("1 one attempt again", &["stopped", "loaded"]);
}

#[test]
fn sequence_02_a_crash_before_the_manifest_after_it_and_after_the_commit() {
    sequence("2 crash before the manifest", &["loaded", "manifest torn"]);
    sequence("2 crash after the manifest", &["loaded"]);
    sequence("2 crash after the commit", &["loaded"]);
}

#[test]
fn sequence_03_a_bin_that_moves_takes_the_touched_keys_along() {
    sequence("3 a bin moves after a key was touched", &["moved"]);
}

#[test]
fn sequence_04_idle_moves_wait_until_the_record_is_taken() {
    sequence("4 idle moves wait for the record", &["moved"]);
}

#[test]
fn sequence_05_members_come_and_go_between_the_request_and_the_mark() {
    sequence("5 rescale", &["rescaled", "sink failed", "abandoned"]);
    sequence("5 rescale without a checkpoint", &["rescaled", "stopped"]);
    sequence("5 rescale while it rests", &["rescaled", "stopped", "rests"]);
    for world in sequence("5 executors go", &["rescaled"]) {
        assert_eq!(["draining", "drained", "restarted"].map(|what| world.times(what)), [2, 2, 0]);
    }
    sequence("5 rescale and back", &["rescaled", "watched", "cancelled while some leave", "cancelled while some come"]);
}

#[test]
fn sequence_05_functions_are_edited_while_workers_begin() {
    let worlds: Vec<World> =
        (0..40).map(|seed| World::new(runs::sequence("5 edited while workers begin", seed)).run()).collect();
    let violated = worlds.iter().find_map(|world| Some((world.scenario.seed, runs::finished(world)?)));
    assert_eq!(violated, None);
    assert!(worlds.iter().filter(|world| world.times("edited") > 0).count() > 5);
}

#[test]
fn a_checkpoint_is_put_back_while_its_engine_lives() {
    let worlds: Vec<World> =
        (0..40).map(|seed| World::new(runs::sequence("a checkpoint is put back", seed)).run()).collect();
    let violated = worlds.iter().find_map(|world| Some((world.scenario.seed, runs::finished(world)?)));
    assert_eq!(violated, None);
    assert!(worlds.iter().filter(|world| world.times("put back") > 0).count() > 5);
}

#[test]
fn a_batch_is_planned_anew() {
    let worlds: Vec<World> =
        (0..60).map(|seed| World::new(runs::sequence("a batch is planned anew", seed)).run()).collect();
    let violated = worlds.iter().find_map(|world| Some((world.scenario.seed, runs::finished(world)?)));
    assert_eq!(violated, None);
    let anew = |world: &&World| world.times("planned anew") > 0;
    let durable = |world: &&World| world.scenario.durable;
    assert!(worlds.iter().filter(anew).filter(durable).count() > 20);
    assert!(worlds.iter().filter(anew).any(|world| world.times("not replayable") > 0 && world.ended.is_none()));
}

#[test]
fn sequence_06_the_clock_of_a_batch_is_the_same_when_it_is_replayed() {
    sequence("6 the clock is Spark's own", &["loaded", "restarted"]);
}

#[test]
fn sequence_07_a_damaged_file_is_named_and_refused() {
    let worlds = sequence("7 a damaged file is refused", &["damage"]);
    for world in &worlds {
        let Some(EngineError::Damaged { name, .. }) = &world.ended else { panic!("{:?}", world.ended) };
        assert!(world.storage.files.contains_key(name), "{name} is a file of the checkpoint");
        assert_eq!(world.spark.commits, 2, "nothing goes on from an older one");
    }
}

#[test]
fn sequence_08_lost_is_what_no_survivor_has() {
    sequence("8 lost is what nobody has", &["moved", "crash"]);
}

#[test]
fn sequence_09_other_rows_than_the_sink_saw_are_an_error() {
    let worlds = sequence("9 the source is not replayable", &["not replayable"]);
    let told = |world: &&World| matches!(world.ended, Some(EngineError::NotReplayable { .. }));
    assert!(worlds.iter().filter(told).count() > 4);
}

#[test]
fn sequence_09_another_engine_knows_what_the_sink_saw() {
    let worlds = sequence("9 other rows for another engine", &["not replayable", "restarted"]);
    // In one or another the driver dies when the batch is committed.
    let told: Vec<&World> = worlds.iter().filter(|world| world.times("not replayable") > 0).collect();
    assert!(told.len() > 5);
    for world in told {
        let Some(EngineError::NotReplayable { note: Some(note), .. }) = &world.ended else {
            panic!("{:?}", world.ended)
        };
        assert!(world.storage.files.contains_key(note), "{note} is a file of the checkpoint");
    }
}

#[test]
fn sequence_10_the_sink_is_called_again_for_a_loss_and_so_often() {
    let worlds = sequence("10 the sink fails", &["crash"]);
    let failed = |world: &&World| world.times("sink failed") > 0;
    assert!(worlds.iter().filter(|world| !world.scenario.retry_sink).any(|world| failed(&world)));
}

#[test]
fn sequence_11_the_end_comes_once() {
    seeds(30, "11 finish once", &["finished again", "finished", "ended again"]);
}

#[test]
fn sequence_12_two_engines() {
    seeds(16, "12 two engines", &["held", "fenced"]);
}

#[test]
fn sequence_12_two_engines_that_claim_at_once() {
    sequence("12 two engines claim at once", &["claim overwritten", "fenced"]);
}

#[test]
fn a_store_that_fails_costs_time_and_nothing_else() {
    sequence("store fails", &["store failed"]);
}

#[test]
fn a_slow_store_mixes_no_attempts() {
    sequence("the store is slow", &["loaded"]);
}

#[test]
fn a_member_that_dies_with_its_rows_is_fed_around() {
    sequence("a member dies with its rows", &["crash", "loaded"]);
}

#[test]
fn merged_files_stand_for_those_they_were_made_of() {
    sequence("files are merged", &["merged", "loaded"]);
}

#[test]
fn files_stay_few() {
    for world in sequence("files stay few", &["merged", "crash"]) {
        let (seed, times) = (world.scenario.seed, world.times("merged"));
        assert!(times > 1, "seed {seed}: merged {times} times");
    }
}

#[test]
fn a_new_engine_keeps_the_manifests_of_the_one_before() {
    sequence("manifests are kept", &["restarted", "loaded"]);
}

#[test]
fn migrations_end_with_their_generation() {
    sequence("migrations are cut off", &["cut off"]);
}

#[test]
fn sequence_13_bins_are_split_and_merged_while_members_come_and_go() {
    sequence("13 bins are split and merged", &["splitting", "merging", "moved", "loaded", "rescaled"]);
    sequence("13 undone to before a split", &["moved", "stopped", "restarted"]);
    sequence("13 splits are cut off", &["splitting", "cut off"]);
}

#[test]
fn members_that_lose_each_other_begin_again() {
    sequence("members lose each other", &["group started"]);
}

/// Random schedules that are tried when nobody names others.
const USUAL: u64 = 300;
/// What they are for, what strikes and what comes of it: each of it happens in one of so many at least.
const SCHEDULED: [&str; 2] = [
    "crash, executor gone, silent, draining, no slots, mesh cut, driver gone, second engine, store refused, task died, sink raised, \
     stopped, dropped, edited, put back, planned anew, moving, splitting, merging, rescaling",
    "loaded, moved, cut off, rescaled, drained, merged, rests, finished again, ended again, abandoned, held, fenced, state lost, \
     store failed, sink failed, feed failed",
];

#[test]
fn schedules() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let seeds = match number("PENSTOCK_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("PENSTOCK_SEEDS").unwrap_or(USUAL),
    };
    let all = seeds.end - seeds.start >= USUAL;
    // A broken invariant of the machines counts as well, and is to be replayed like the rest.
    let ran = |seed| std::panic::catch_unwind(|| runs::random(seed)).unwrap_or_else(|_| Some("it panics".to_owned()));
    let part = |part: u64| {
        let mine = seeds.clone().filter(|seed| seed % 2 == part);
        let failed: Vec<(u64, String)> = mine.filter_map(|seed| Some((seed, ran(seed)?))).collect();
        (failed, runs::SEEN.take())
    };
    let ((mut failed, mut seen), (others, more)) = std::thread::scope(|scope| {
        let other = scope.spawn(|| part(1));
        (part(0), other.join().expect("what panics is caught"))
    });
    failed.extend(others);
    more.into_iter().for_each(|(what, times)| *seen.entry(what).or_default() += times);
    println!("{seen:?}");
    for (seed, violation) in &failed {
        println!("seed {seed}: {violation}");
    }
    if let Some((seed, violation)) = failed.iter().min() {
        let count = failed.len();
        panic!("{count} seeds fail, the first is {seed}: {violation}\nreplay: {}", replay(*seed));
    }
    let scheduled = SCHEDULED.iter().flat_map(|some| some.split(", "));
    let missed: Vec<&str> = scheduled.filter(|what| !seen.contains_key(*what)).collect();
    assert!(!all || missed.is_empty(), "in no run: {missed:?}");
}

/// What runs one seed again, and shows what happens.
fn replay(seed: u64) -> String {
    let module = module_path!().split_once("::").map_or("", |(_, path)| path);
    format!(
        "PENSTOCK_SEED={seed} PENSTOCK_TRACE=1 cargo test -p penstock-engine --test all {module}::schedules -- --exact --nocapture"
    )
}

#[test]
fn the_command_that_replays_a_seed_runs_its_test() {
    let command = replay(7);
    let name = command.split_once("--test all ").and_then(|(_, rest)| rest.split_once(' ')).unwrap().0;
    let own = std::env::current_exe().unwrap();
    let listed = std::process::Command::new(own).args([name, "--exact", "--list"]).output().unwrap();
    assert_eq!(String::from_utf8(listed.stdout).unwrap().lines().next(), Some("simulation::schedules: test"));
}
