//! M-23: epochs that fail at any point, also in the middle of a migration, are rolled back; nothing is lost or doubled.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use crate::common::fleet::{self, Layout, Process};
use crate::common::{self, Block, Dice, Load, Output, Row, Sums, apply, config_with, hash, random_batch};
use penstock_bins::{
    BinTable, BinsError, BoxError, Command, Config, ControlInput, Keyed, Moment, Shelf, stateful_divided,
};
use penstock_dataflow::Worker;
use proptest::prelude::*;

const TICKS: u64 = 20;

/// Goes off once, wherever it burns down.
struct Fuse(AtomicI64);

impl Fuse {
    fn burn(&self, how: &str) -> Result<(), BoxError> {
        match self.0.fetch_sub(1, Relaxed) {
            1 if how == "panic" => panic!("the fuse went off"),
            1 => Err("the fuse went off".into()),
            _ => Ok(()),
        }
    }
}

/// Values that post-date nothing: flows that roll back keep their timers in their bins.
fn load(dice: &mut Dice, bits: u8, workers: usize, epochs: u64) -> Load {
    let ship_bytes = common::ship_bytes(dice);
    let mut load = Load {
        bits,
        workers,
        data: vec![BTreeMap::new(); workers],
        control: BTreeMap::new(),
        marks: BTreeSet::new(),
        ship_bytes,
    };
    let mut routing = load.initial();
    for tick in 0..epochs * TICKS {
        for times in &mut load.data {
            let rows: Vec<Row> = (0..dice.below(4)).map(|_| (dice.below(60), dice.below(10) as i64)).collect();
            times.insert(tick, vec![rows]);
        }
        // The first instant of an epoch is the mark's.
        if tick % TICKS > 0 && dice.below(4) == 0 {
            load.control.insert(tick, random_batch(dice, &mut routing, workers));
        }
    }
    load
}

struct Run {
    load: Load,
    epochs: u64,
    /// Epochs before this one are committed.
    committed: AtomicU64,
    fuse: Fuse,
    in_logic: &'static str,
    tables: Mutex<HashMap<usize, BinTable<Sums>>>,
}

/// One worker of one generation: from the first epoch that is not committed to the end, or to the fuse.
fn program(run: &Arc<Run>, worker: &mut Worker, process: &Process<Sums>, begin: u64) -> Result<(), BoxError> {
    let index = worker.index();
    let table = run.tables.lock().unwrap().remove(&index).ok_or("no table")?;
    let routing = match begin.checked_sub(1) {
        Some(last) => run.load.routing_at(last * TICKS + TICKS - 1),
        None => run.load.initial(),
    };
    let config = Config { ship_bytes: run.load.ship_bytes, ..config_with(worker, process, &routing, table) };
    let burning = Arc::clone(run);
    let (mut data, control, counts) = worker.dataflow::<u64, _>("epochs", |scope| {
        let (data, blocks) = scope.new_input::<Block>();
        let (control, commands) = scope.new_input();
        let logic = move |moment: Moment<'_, u64, Block, Sums, Row, Vec<Output>>| {
            for (hashed, key, value) in moment.blocks.into_iter().flat_map(Keyed::into_hashed_rows) {
                burning.fuse.burn(burning.in_logic)?;
                let bin = moment.bins.bin_of(hashed);
                let state = moment.bins.get_mut(bin).ok_or(BinsError::Absent { bin })?;
                assert!(apply(state.entry(key), value).is_none());
            }
            Ok(())
        };
        let counts = stateful_divided(&blocks, &commands, config, common::divide(), logic)?;
        Ok::<_, BinsError>((data, control, counts))
    })?;
    let mut control = ControlInput::new(control, routing, worker.peers());
    if index == 0 {
        for (time, commands) in run.load.control.range(begin * TICKS..) {
            control.schedule(*time, commands.clone())?;
        }
    } else {
        control.close();
    }
    for epoch in begin..run.epochs {
        for tick in epoch * TICKS..(epoch + 1) * TICKS {
            data.advance_to(tick)?;
            for rows in &run.load.data[index][&tick] {
                data.send(Keyed::new(rows.clone(), hash));
            }
            if index == 0 {
                control.advance_to(tick)?;
            }
            run.fuse.burn("error")?;
            worker.step()?;
        }
        let end = (epoch + 1) * TICKS;
        // The first instant of the next epoch: control never has commands for it.
        data.advance_to(end)?;
        if index == 0 {
            control.advance_to(end)?;
        }
        while counts.probe.less_than(&end) {
            run.fuse.burn("error")?;
            worker.step_or_park(None)?;
        }
        run.committed.fetch_max(epoch + 1, Relaxed);
        run.fuse.burn("error")?;
        counts.table.borrow_mut().mark_all(epoch + 1);
        process.shelf.close_epoch(epoch);
    }
    control.close();
    data.close();
    while worker.step_or_park(None)? {}
    Ok(())
}

/// Rebuilds the tables of all processes for an epoch.
fn rebuild(run: &Run, layout: Layout, shelves: &[Shelf<Sums>], epoch: u64) -> HashMap<usize, BinTable<Sums>> {
    let routing = epoch.checked_sub(1).map_or(run.load.initial(), |e| run.load.routing_at(e * TICKS + TICKS - 1));
    let mut tables = HashMap::new();
    for (process, shelf) in shelves.iter().enumerate() {
        let workers: Vec<u32> =
            (0..layout.workers()).filter(|w| layout.process_of(*w) == process).map(|w| w as u32).collect();
        let rebuilt = shelf.rebuild("sums", epoch, &routing, &workers).unwrap();
        assert_eq!(rebuilt.missing, [] as [u32; 0], "process {process} lost bins");
        tables.extend(rebuilt.tables.into_iter().map(|(worker, table)| (worker as usize, table)));
        assert_eq!(shelf.counts(), (0, 0));
    }
    tables
}

fn check(seed: u64, layout: Layout, bits: u8, epochs: u64) -> usize {
    let mut dice = Dice(seed);
    let load = load(&mut dice, bits, layout.workers(), epochs);
    let shelves = fleet::shelves::<Sums>(layout);
    let mut tables = HashMap::new();
    for worker in 0..layout.workers() {
        let mut table = BinTable::fresh(&load.initial(), worker as u32, &common::new_state);
        table.mark_all(0);
        tables.insert(worker, table);
    }
    let mut committed = 0;
    let mut failures = 0;
    loop {
        let length = if failures < 6 { 1 + dice.below(600) } else { u64::MAX / 2 };
        let run = Arc::new(Run {
            load: load.clone(),
            epochs,
            committed: AtomicU64::new(committed),
            fuse: Fuse(AtomicI64::new(length as i64)),
            in_logic: if dice.below(2) == 0 { "panic" } else { "error" },
            tables: Mutex::new(tables),
        });
        let shared = Arc::clone(&run);
        let begin = committed;
        let (results, _) =
            fleet::run(layout, &shelves, move |worker, process| program(&shared, worker, process, begin));
        // Tables that no worker took deposit their bins like the others.
        run.tables.lock().unwrap().clear();
        committed = run.committed.load(Relaxed);
        let failed = results.iter().any(Result::is_err);
        tables = rebuild(&run, layout, &shelves, committed);
        if !failed {
            assert_eq!(committed, epochs);
            break;
        }
        failures += 1;
    }
    let mut got = HashMap::new();
    for (worker, table) in &tables {
        for (bin, state) in table.owned() {
            assert_eq!(load.routing_at(u64::MAX).owner_of(bin), *worker as u32);
            for (key, sum) in state.iter() {
                assert_eq!(got.insert(*key, *sum), None, "key {key} is held twice");
            }
        }
    }
    let cuts =
        load.control.values().flatten().filter(|one| matches!(one, Command::Split { .. } | Command::Merge { .. }));
    CUTS.fetch_add(cuts.count() as u64, Relaxed);
    let expected: HashMap<u64, u64> =
        common::oracle(&load).into_iter().map(|(key, history)| (key, history.last().unwrap().1)).collect();
    assert_eq!(got, expected);
    failures
}

proptest! {
    #![proptest_config(penstock_cases::cases(40))]

    #[test]
    fn threads(seed: u64, workers in 1usize..4, bits in 0u8..5) {
        check(seed, Layout::Threads(workers), bits, 5);
    }

    #[test]
    fn processes(seed: u64, processes in 2usize..4, threads in 1usize..3, bits in 1u8..5) {
        check(seed, Layout::Apart { processes, threads }, bits, 5);
    }
}

proptest! {
    #![proptest_config(penstock_cases::cases(8))]

    #[test]
    fn processes_over_tcp(seed: u64, threads in 1usize..3, bits in 1u8..5) {
        check(seed, Layout::Tcp { processes: 2, threads }, bits, 4);
    }
}

/// Splits and merges in all loads.
static CUTS: AtomicU64 = AtomicU64::new(0);

/// The tests above are worth something only if epochs do fail, and bins are split.
#[test]
fn fuses_go_off() {
    let failures: usize = (0..10).map(|seed| check(seed, Layout::Apart { processes: 2, threads: 2 }, 3, 5)).sum();
    assert!(failures >= 10, "{failures} failures in ten runs");
    let cuts = CUTS.load(Relaxed);
    assert!(cuts >= 100, "{cuts} splits and merges");
}
