//! Migrations as a host drives them: strategies, progress, cancelling; big bins and many post-dated records.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::duo::Duo;
use crate::common::fleet::{self, Layout};
use crate::common::{self, Dice, Load, Row, SharedTrace, Sums, Trace, build, config, hash};
use penstock_balance::PauseLimit;
use penstock_bins::{
    BinEvent, BinTable, BinsError, BoxError, Config, ControlInput, Counters, Keyed, KeyedMap, Migration, Moment,
    Routing, Shelf, Stats, Strategy, bin, state_machine, stateful,
};
use penstock_dataflow::{Error, Worker, fabric};
use proptest::prelude::{any, prop_oneof, proptest};
use proptest::strategy::{Just, Strategy as _};

/// Feeds ticks while the leader drives one migration after the other; what was sent is the load to check against.
fn drive(layout: Layout, bits: u8, plans: Vec<(Strategy, Routing)>, seed: u64) -> (Load, Trace) {
    let workers = layout.workers();
    let ship_bytes = common::ship_bytes(&mut Dice(seed));
    let empty = Load {
        bits,
        workers,
        data: vec![BTreeMap::new(); workers],
        control: BTreeMap::new(),
        marks: BTreeSet::new(),
        ship_bytes,
    };
    let (load, trace, done) = (Arc::new(Mutex::new(empty)), SharedTrace::default(), Arc::new(AtomicBool::new(false)));
    let (sent, shared) = (Arc::clone(&load), Arc::clone(&trace));
    let (results, stats) = fleet::run(layout, &fleet::shelves(layout), move |worker, process| {
        let initial = Routing::new(bits, workers)?;
        let config = Config { ship_bytes, ..config(worker, process, &initial) };
        let mut rig = build(worker, config, &shared)?;
        let index = worker.index();
        let mut dice = Dice(seed ^ index as u64);
        let mut data = rig.data.take().unwrap();
        let mut control = ControlInput::new(rig.control.take().unwrap(), initial, workers);
        let mut plans = plans.iter();
        let mut migration: Option<Migration<u64>> = None;
        if index > 0 {
            control.close();
        }
        for tick in 0.. {
            if index == 0 {
                if let Some(active) = &mut migration {
                    active.observe(&rig.counts.probe);
                    if let Some(commands) = active.issue(tick, 1) {
                        control.schedule(tick, commands.clone())?;
                        sent.lock().unwrap().control.insert(tick, commands);
                    }
                    if active.is_done() {
                        let progress = active.progress();
                        assert_eq!((progress.bins_done, progress.steps_done), (progress.bins, progress.steps));
                        migration = None;
                    }
                } else if let Some((strategy, to)) = plans.next() {
                    migration = Some(Migration::new(*strategy, &control.routing(), to)?);
                } else {
                    done.store(true, Relaxed);
                }
                control.advance_to(tick + 1)?;
            }
            let rows: Vec<Row> = (0..dice.below(8)).map(|_| (dice.below(50), dice.below(60) as i64)).collect();
            sent.lock().unwrap().data[index].insert(tick, vec![rows.clone()]);
            data.send(Keyed::new(rows, hash));
            data.advance_to(tick + 1)?;
            worker.step_until(None, || !rig.counts.probe.less_than(&tick.saturating_sub(3)))?;
            worker.step()?;
            if done.load(Relaxed) {
                break;
            }
        }
        control.close();
        data.close();
        while worker.step_or_park(None)? {}
        Ok(rig.counts.table.borrow().owned().map(|(bin, _)| bin).collect::<Vec<u32>>())
    });
    let load = load.lock().unwrap().clone();
    let end = load.routing_at(u64::MAX);
    for (worker, bins) in results.into_iter().enumerate() {
        let owned = (0..end.bins()).filter(|bin| end.owner_of(*bin) == worker as u32);
        assert_eq!(bins.unwrap(), owned.collect::<Vec<_>>());
    }
    let mut trace = std::mem::take(&mut *trace.lock().unwrap());
    trace.log = stats.iter().flat_map(|stats| stats.log()).collect();
    (load, trace)
}

fn strategy() -> impl proptest::strategy::Strategy<Value = Strategy> {
    prop_oneof![
        Just(Strategy::AllAtOnce),
        Just(Strategy::Fluid),
        (1usize..6).prop_map(|size| Strategy::Batched { size }),
        (1usize..4).prop_map(|size| Strategy::Matched { size })
    ]
}

fn check(layout: Layout, strategies: Vec<Strategy>, seed: u64) {
    let mut dice = Dice(seed);
    let target = |dice: &mut Dice| {
        let owner = |_| dice.below(layout.workers() as u64) as u32;
        Routing::from_owners((0..16).map(owner).collect()).unwrap()
    };
    let plans: Vec<_> = strategies.into_iter().map(|strategy| (strategy, target(&mut dice))).collect();
    let last = plans.last().map(|(_, to)| to.clone());
    let (load, trace) = drive(layout, 4, plans, seed);
    if let Some(last) = last {
        assert_eq!(load.routing_at(u64::MAX), last);
    }
    trace.check(&load);
}

proptest! {
    #![proptest_config(penstock_cases::cases(12))]

    #[test]
    fn threads(seed in any::<u64>(), strategies in proptest::collection::vec(strategy(), 1..4), workers in 1usize..5) {
        check(Layout::Threads(workers), strategies, seed);
    }

    #[test]
    fn processes(seed in any::<u64>(), strategies in proptest::collection::vec(strategy(), 1..3)) {
        check(Layout::Apart { processes: 2, threads: 1 }, strategies.clone(), seed);
        check(Layout::Tcp { processes: 2, threads: 2 }, strategies, seed);
    }
}

/// Records are processed between the first Prepare and the last State of a batched migration.
#[test]
fn a_batched_migration_overlaps_with_processing() {
    let routing = Routing::new(4, 2).unwrap();
    let mut duo = Duo::new(Layout::Threads(2), &routing);
    let mut control = ControlInput::new(duo.lead(), routing.clone(), 2);
    let to = Routing::from_owners(vec![1; 16]).unwrap();
    let mut migration = Migration::new(Strategy::Batched { size: 2 }, &routing, &to).unwrap();
    let mut tick = 0;
    let mut processed = Vec::new();
    while !migration.is_done() {
        if let Some(commands) = migration.issue(tick, 1) {
            control.schedule(tick, commands).unwrap();
        }
        duo.send((tick % 2) as usize, (0..100).map(|key| (key, 1)).collect());
        tick += 1;
        duo.data_to(tick);
        control.advance_to(tick).unwrap();
        duo.step();
        migration.observe(&duo.rigs[0].counts.probe);
        processed.push((migration.progress().bins_done, duo.outputs().len()));
    }
    let log = duo.stats.log();
    let first = log.iter().find(|event| event.what == BinEvent::Prepare).unwrap();
    let last = log.iter().rfind(|event| event.what == BinEvent::State).unwrap();
    assert!(last.routed >= first.routed + 300, "{} records routed in between", last.routed - first.routed);
    assert!(first.at_ns < last.at_ns);
    let at = |bins| processed.iter().find(|(done, _)| *done >= bins).unwrap().1;
    assert!(at(2) < at(4) && at(4) < at(8), "outputs grow from step to step: {processed:?}");
    assert!(duo.stats.counters().records_routed_moving > 0);
    assert_eq!(migration.progress().steps, 4);
}

/// How long bins are on their way is counted in turns, in each of which a piece of state crosses.
#[test]
fn steps_grow_and_shrink_with_what_they_cost() {
    const BITS: u8 = 5;
    const MOST: u64 = 30;
    let routing = Routing::from_owners(vec![0; 1 << BITS]).unwrap();
    let mut duo = Duo::shipping(Layout::Apart { processes: 2, threads: 1 }, &routing, 0);
    let mut control = ControlInput::new(duo.lead(), routing, 2);
    let large = 8..20;
    let of = |bin: u32| (1 << 63..).filter(move |key| penstock_bins::bin(hash(key), BITS) == bin);
    let keys = (0..1 << BITS).flat_map(|bin| of(bin).take(if large.contains(&bin) { 20_000 } else { 1 }));
    // Numbers that take ten bytes each: of a chunk there are some three thousand keys.
    duo.send(0, keys.map(|key| (key, -2)).collect());
    let mut migration = Migration::from_steps((0..1 << BITS).map(|bin| vec![(bin, 1)]).collect());
    let turns = Duration::from_secs;
    let mut limit = PauseLimit::new(turns(MOST));
    let (mut time, mut taken) = (0, Vec::new());
    while !migration.is_done() {
        time += 1;
        duo.data_to(time);
        control.advance_to(time).unwrap();
        duo.settle();
        let before = migration.progress().steps_done;
        control.schedule(time, migration.issue(time, limit.groups()).unwrap()).unwrap();
        control.advance_to(time + 1).unwrap();
        duo.data_to(time + 1);
        let mut paused = 0;
        while !migration.observe(&duo.rigs[0].counts.probe) {
            assert!(duo.step());
            paused += 1;
        }
        let bins = migration.progress().steps_done - before;
        limit.took(bins, turns(paused));
        taken.push((before, bins, paused));
    }
    let bins = |range: std::ops::Range<usize>| {
        let steps = taken.iter().filter(|(before, ..)| range.contains(before));
        steps.map(|(_, bins, _)| *bins).collect::<Vec<_>>()
    };
    assert_eq!(bins(0..15), [1, 2, 4, 8], "twice as many while they cost little: {taken:?}");
    assert!(taken[3].2 > 2 * MOST, "the last of these was of bins that cost much: {taken:?}");
    assert!(bins(15..20).iter().all(|bins| *bins <= 2), "{taken:?}");
    assert!(bins(20..32).contains(&4), "of the others they grow again: {taken:?}");
}

/// Bins of many chunks cross to another process and back; the threads of one process move pointers.
#[test]
fn big_bins_move_in_chunks() {
    const KEYS: u64 = 40_000;
    for (layout, bytes) in [
        (Layout::Threads(2), false),
        (Layout::Apart { processes: 2, threads: 1 }, true),
        (Layout::Tcp { processes: 2, threads: 1 }, true),
    ] {
        let (results, stats) =
            fleet::run::<KeyedMap<u64, u64>, _>(layout, &fleet::shelves(layout), |worker, process| {
                let routing = Routing::new(1, 2)?;
                let config = config(worker, process, &routing);
                let trace = SharedTrace::default();
                let mut rig = build(worker, config, &trace)?;
                let mut control = ControlInput::new(rig.control.take().unwrap(), routing, 2);
                let mut data = rig.data.take().unwrap();
                if worker.index() == 0 {
                    for (time, owner) in [(1, 1), (2, 0), (3, 1)] {
                        control.schedule(time, vec![penstock_bins::Command::Map(vec![owner; 2])])?;
                    }
                    data.send(Keyed::new((0..KEYS).map(|key| (key, 1)).collect(), hash));
                }
                control.close();
                data.advance_to(4)?;
                if worker.index() == 1 {
                    data.send(Keyed::new((0..KEYS).map(|key| (key, 2)).collect(), hash));
                }
                data.close();
                while worker.step_or_park(None)? {}
                let outputs = std::mem::take(&mut trace.lock().unwrap().outputs);
                Ok(outputs.into_iter().filter(|output| output.0 == 4).collect::<Vec<_>>())
            });
        let mut outputs: Vec<_> = results.into_iter().flat_map(Result::unwrap).collect();
        outputs.sort_unstable();
        assert_eq!(outputs.len(), KEYS as usize);
        assert!(outputs.iter().all(|(_, _, state, worker)| (*state, *worker) == (2 * 31 + 3, 1)));
        let sum = |field: fn(&Counters) -> u64| stats.iter().map(|stats| field(&stats.counters())).sum::<u64>();
        assert_eq!((sum(|c| c.bins_in), sum(|c| c.bins_out), sum(|c| c.bins_owned)), (5, 5, 2));
        assert_eq!(sum(|c| c.bytes_in), sum(|c| c.bytes_out));
        assert_eq!(sum(|c| c.bytes_in) > 0, bytes);
        if bytes {
            let log: Vec<_> = stats.iter().flat_map(|stats| stats.log()).collect();
            let chunks = |time| log.iter().filter(|e| e.what == BinEvent::State && e.time == time).count();
            assert!(chunks(2) > 2, "{} chunks for two bins", chunks(2));
        }
    }
}

type Later = Keyed<u64, u64>;

/// M-11: a million pending records, of which most move to another process and back before they are due.
#[test]
fn a_million_pending_records_move() {
    const RECORDS: u64 = 1_000_000;
    let layout = Layout::Apart { processes: 2, threads: 1 };
    let (results, _) = fleet::run::<KeyedMap<u64, u64>, _>(layout, &fleet::shelves(layout), |worker, process| {
        let routing = Routing::new(6, 2)?;
        let config = config(worker, process, &routing);
        let (mut data, control, counts) = worker.dataflow::<u64, _>("later", |scope| {
            let (data, blocks) = scope.new_input::<Later>();
            let (control, commands) = scope.new_input();
            let mut last = [0; 64];
            let logic = move |moment: Moment<'_, u64, Later, Sums, (u64, u64), u64>| {
                for (key, value) in moment.blocks.iter().flat_map(|block| block.rows()) {
                    moment.later.at(bin(hash(key), 6), 10 + value, (*key, *value))?;
                }
                for (bin, (key, value)) in &moment.due {
                    assert_eq!((10 + value, penstock_bins::bin(hash(key), 6)), (*moment.time, *bin));
                    assert!(last[*bin as usize] <= *moment.time);
                    last[*bin as usize] = *moment.time;
                    *moment.bins.get_mut(*bin).ok_or("bin elsewhere")?.entry(*key) += 1;
                }
                moment.out.give(moment.due.len() as u64);
                Ok(())
            };
            let counts = stateful(&blocks, &commands, config, logic)?;
            Ok::<_, BinsError>((data, control, counts))
        })?;
        let mut control = ControlInput::new(control, routing, 2);
        if worker.index() == 0 {
            for (time, owner) in [(2, 0), (3, 1), (10 + RECORDS / 8, 0)] {
                control.schedule(time, vec![penstock_bins::Command::Map(vec![owner; 64])])?;
            }
        }
        control.close();
        for i in 0..10 {
            let range = (0..RECORDS / 2).filter(|n| n % 10 == i).map(|n| 2 * n + worker.index() as u64);
            // A few thousand different times.
            data.send(Keyed::new(range.map(|n| (n, n * 2_654_435_761 % (RECORDS / 4) / 100 * 100)).collect(), hash));
        }
        data.close();
        while worker.step_or_park(None)? {}
        assert_eq!(counts.probe.with_frontier(<[u64]>::len), 0);
        Ok(counts.table.borrow().owned().map(|(_, state)| state.iter().map(|(_, n)| *n).sum::<u64>()).sum::<u64>())
    });
    let held: Vec<u64> = results.into_iter().map(Result::unwrap).collect();
    assert_eq!(held, [RECORDS, 0]);
}

/// A state whose chunks cannot be absorbed stops every worker with a typed error.
#[test]
fn a_bad_chunk_is_fatal() {
    #[derive(Default)]
    struct Broken;
    impl penstock_bins::BinState for Broken {
        fn encode(&self, _: &mut penstock_bins::Encoding) -> Result<Option<Vec<u8>>, penstock_bins::StateError> {
            Ok(Some(vec![1]))
        }
        fn absorb(&mut self, _: &[u8]) -> Result<(), penstock_bins::StateError> {
            Err(penstock_bins::StateError::new("not mine"))
        }
        fn bytes(&self) -> usize {
            0
        }
        fn keys(&self) -> usize {
            0
        }
        fn mark(&mut self) {}
        fn rollback(&mut self) -> Result<(), penstock_bins::StateError> {
            Ok(())
        }
    }
    let layout = Layout::Apart { processes: 2, threads: 1 };
    let (results, _) = fleet::run::<Broken, ()>(layout, &fleet::shelves(layout), |worker, process| {
        let routing = Routing::new(1, 2)?;
        let mut config = Config::in_process(
            "broken",
            routing.clone(),
            worker.index(),
            process.shelf.clone(),
            Arc::clone(&process.stats),
        );
        let here = worker.index();
        config.local = std::rc::Rc::new(move |other| other == here);
        let (data, control) = worker.dataflow::<u64, _>("broken", |scope| {
            let (data, blocks) = scope.new_input::<Later>();
            let (control, commands) = scope.new_input();
            let logic = |_: Moment<'_, u64, Later, Broken, (), ()>| Ok(());
            stateful(&blocks, &commands, config, logic)?;
            Ok::<_, BinsError>((data, control))
        })?;
        let mut control = ControlInput::new(control, routing, 2);
        if here == 0 {
            control.schedule(3, vec![penstock_bins::Command::Move { bin: 0, worker: 1 }])?;
        }
        control.close();
        data.close();
        while worker.step_or_park(None)? {}
        Ok(())
    });
    for result in results {
        let Err(Error::Operator { worker: 1, source, .. }) = result else { panic!("{result:?}") };
        assert!(matches!(source.downcast_ref(), Some(BinsError::Chunk { bin: 0, .. })), "{source:?}");
    }
}

/// M-04: a record post-dated to the past is refused, and so is one for a bin that is elsewhere.
#[test]
fn records_go_to_the_future_of_bins_that_are_here() {
    let outcome = |bin: u32, time: u64| {
        let mut worker = Worker::new(fabric::threads(1).remove(0));
        let routing = Routing::new(2, 1).unwrap();
        let config = Config::<u64, Sums>::in_process("late", routing, 0, Shelf::new(), Arc::new(Stats::new()));
        let (mut data, counts) = worker.dataflow::<u64, _>("late", |scope| {
            let (data, blocks) = scope.new_input::<Later>();
            let (_, commands) = scope.new_input();
            let logic = move |moment: Moment<'_, u64, Later, Sums, u8, u64>| -> Result<(), BoxError> {
                if moment.due.is_empty() {
                    moment.later.at(bin, time, 1)?;
                }
                moment.out.give(moment.due.len() as u64);
                Ok(())
            };
            (data, stateful(&blocks, &commands, config, logic).unwrap())
        });
        data.advance_to(5).unwrap();
        data.send(Keyed::new(vec![(1, 1)], hash));
        data.close();
        while worker.step()? {}
        assert!(counts.probe.done());
        Ok(counts.stats.counters().records_applied)
    };
    let error = |result: Result<u64, Error>| match result {
        Err(Error::Operator { source, .. }) => source.downcast_ref::<BinsError>().unwrap().to_string(),
        other => panic!("{other:?}"),
    };
    assert_eq!(outcome(3, 5).unwrap(), 2, "at the present time it comes back at once");
    assert_eq!(outcome(3, 500).unwrap(), 2);
    assert_eq!(error(outcome(3, 4)), "post-dated to 4, but it is already 5");
    assert_eq!(error(outcome(4, 6)), "bin 4 is not here");
}

/// A table that does not hold what the routing says, and a routing that names an absent worker, are refused at build time.
#[test]
fn a_wrong_table_is_refused() {
    let build = |routing: Routing, table: BinTable<Sums>| {
        let mut worker = Worker::new(fabric::threads(1).remove(0));
        worker.dataflow::<u64, _>("wrong", |scope| {
            let (_, blocks) = scope.new_input::<Later>();
            let (_, commands) = scope.new_input();
            let shelf = Shelf::new();
            let mut config = Config::in_process("wrong", routing, 0, shelf.clone(), Arc::new(Stats::new()));
            config.table = std::rc::Rc::new(std::cell::RefCell::new(table));
            let built = state_machine(&blocks, &commands, config, |_: &u64, _, _: &mut u64| (false, None::<u8>));
            built.map(drop).map_err(|error| (error, shelf.counts()))
        })
    };
    let all = Routing::new(2, 1).unwrap();
    let table = |routing: &Routing| BinTable::fresh(routing, 0, &Sums::default);
    assert!(matches!(build(all.clone(), BinTable::new(2).unwrap()), Err((BinsError::Unrestored { bin: 0, .. }, _))));
    assert!(matches!(build(all.clone(), BinTable::new(3).unwrap()), Err((BinsError::BitsDiffer { .. }, _))));
    let elsewhere = Routing::from_owners(vec![0, 0, 0, 1]).unwrap();
    assert!(matches!(
        build(elsewhere.clone(), table(&elsewhere)),
        Err((BinsError::AbsentOwner { bin: 3, worker: 1 }, (0, 0)))
    ));
    assert!(build(all.clone(), table(&all)).is_ok());
}
