//! Two processes of one worker each in one thread, turn by turn: nothing that moves overtakes the record of the epoch before,
//! and while bins move fewer slices are under way.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use arrow_array::{ArrayRef, Int64Array, RecordBatch};
use arrow_schema::{DataType, Field, Schema};
use penstock_bins::{Command as Cut, Routing, bin, range_of};
use penstock_dataflow::{Worker, fabric};
use penstock_files::{Chunk, Entry};
use penstock_pace::{Cadence, Moves, Order, StepReport};

use super::build::{self, Shared};
use super::feed::{PartitionRows, deal};
use super::group::GroupConfig;
use super::record::Record;
use super::resident::Resident;
use super::stats::Gauges;
use super::worker::{Command, End, Release, Told, WorkerLoop};
use crate::callback::{CallError, Callbacks, ForeignState, SideRows};
use crate::hash::hash_int;
use crate::plan::Plan;
use crate::spec::schema_to_text;

const BITS: u8 = 2;

struct NoCalls;

impl Callbacks for NoCalls {
    fn map(&self, _: usize, batch: &RecordBatch, _: &mut SideRows) -> Result<RecordBatch, CallError> {
        Ok(batch.clone())
    }

    fn new_state(&self, call: usize) -> Box<dyn ForeignState> {
        unreachable!("no state of call {call}")
    }
}

fn rows(keys: &[i64]) -> RecordBatch {
    let column: ArrayRef = Arc::new(Int64Array::from(keys.to_vec()));
    RecordBatch::try_from_iter([("k", column)]).unwrap()
}

fn counted() -> Schema {
    let field = |name| Field::new(name, DataType::Int64, false);
    Schema::new(vec![field("k"), field("n")])
}

struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

pub(super) struct Pair {
    pub(super) loops: Vec<WorkerLoop>,
    /// By epoch, what each worker took of it.
    pub(super) records: BTreeMap<u64, Vec<Vec<Record>>>,
    pub(super) migrated: usize,
    /// Of the last migration.
    pub(super) steps: Vec<StepReport>,
}

impl Pair {
    pub(super) fn new(window: u32) -> Self {
        let text = format!(
            r#"{{"version":2,"sources":[{{"schema":"{}"}}],"steps":[{{"op":"key_by","columns":["k"]}},
               {{"op":"agg","emit":"update","aggs":[{{"name":"n","fn":"count"}}]}}{}]}}"#,
            schema_to_text(&rows(&[]).schema()),
            // The end of the flow is some steps behind the bins.
            format!(r#",{{"op":"map_batches","call":0,"schema":"{}"}}"#, schema_to_text(&counted())).repeat(4)
        );
        let plan = Arc::new(Plan::from_json(&text).unwrap());
        let mut config = GroupConfig::founding(plan, Arc::new(NoCalls), BITS, 2);
        (config.journal, config.record, config.window, config.ship_bytes) = (true, true, window, 1);
        let loops = fabric::threads(2).into_iter().map(|endpoint| {
            let shared = Shared::new(&config, &[endpoint.index()], &mut Resident::fresh()).unwrap();
            let mut worker = Worker::new(endpoint);
            let built = build::build(&mut worker, &config, &shared, None).unwrap();
            WorkerLoop::new(worker, built, build::pace(&config), Arc::new(Gauges::new(&[])))
        });
        Self { loops: loops.collect(), records: BTreeMap::new(), migrated: 0, steps: Vec::new() }
    }

    pub(super) fn release(&mut self, epoch: u64, keys: [&[i64]; 2]) {
        for (worker, keys) in self.loops.iter_mut().zip(keys) {
            let input = PartitionRows { source: 0, partition: 0, batches: vec![rows(keys).into()], rows_before: 0 };
            let slices = deal(vec![input], 2, 1, false).unwrap().remove(0).into();
            let end = Some(End { watermark: None, clock_ms: None });
            worker.command(Command::Release(Release { epoch, slices, end }));
        }
    }

    pub(super) fn turn(&mut self, worker: usize) -> bool {
        let mut told = Vec::new();
        let busy = self.loops[worker].turn(&mut |item| told.push(item)).unwrap();
        for item in told {
            match item {
                Told::Epoch { epoch, record, .. } => self.records.entry(epoch).or_default().push(record),
                Told::Migrated(migrated) => {
                    assert_eq!(migrated.refused, None);
                    self.migrated += 1;
                    self.steps = migrated.steps;
                }
                Told::Rows { .. } => panic!("nobody asked for rows"),
            }
        }
        busy
    }
}

/// All bins move, some are split, or one is merged again, its parts together first; `routing` is where that leads.
fn deed(dice: &mut Dice, routing: &mut Routing) -> Vec<Moves> {
    let present: Vec<u32> = routing.bins_owned().map(|(bin, _)| bin).collect();
    let whole = |part: &u32| bin(range_of(*part, BITS).unwrap().first(), BITS);
    let mut moves = |part: u32| (part, dice.below(2) as u32);
    let moves: Vec<(u32, u32)> = present.iter().map(|part| moves(*part)).collect();
    let split: Vec<u32> = present.iter().map(whole).filter(|whole| !present.contains(whole)).collect();
    let deeds = match (dice.below(3), split.first()) {
        (0, _) => vec![Moves::Steps(vec![moves])],
        (1, Some(&merged)) => {
            let parts = present.into_iter().filter(|part| whole(part) == merged).map(|part| (part, 1)).collect();
            vec![Moves::Steps(vec![parts]), Moves::Recut(vec![Cut::Merge { bin: merged }])]
        }
        _ => {
            let fine =
                moves.into_iter().filter(|(part, some)| *some == 1 && range_of(*part, BITS).unwrap().length() < 5);
            vec![Moves::Recut(fine.map(|(bin, _)| Cut::Split { bin, bits: 1 }).collect())]
        }
    };
    for deed in &deeds {
        let commands: Vec<Cut> = match deed {
            Moves::Recut(commands) => commands.clone(),
            Moves::Steps(steps) => steps.iter().flatten().map(|&(bin, worker)| Cut::Move { bin, worker }).collect(),
            Moves::Then(..) => unreachable!("nothing is prepared here"),
        };
        commands.iter().for_each(|command| drop(routing.apply(command).unwrap()));
    }
    deeds
}

/// Runs epochs with keys of each worker and migrations under way; turns come as the dice fall.
fn run(seed: u64) {
    const EPOCHS: u64 = 5;
    let mut dice = Dice(seed);
    let mut pair = Pair::new(2);
    let (mut asked, mut released) = (0, 0);
    let mut routing = Routing::new(BITS, 2).unwrap();
    let mut counts = BTreeMap::<u64, BTreeMap<u64, u64>>::new();
    // A worker's turns come in runs, so that the other lags behind.
    let mut turns = 0_u64;
    while pair.records.len() < EPOCHS as usize
        || pair.records.values().any(|records| records.len() < 2)
        || pair.migrated < asked
    {
        turns += 1;
        assert!(turns < 100_000, "seed {seed} hangs");
        if released < EPOCHS && dice.below(8) == 0 {
            let before = released.checked_sub(1).and_then(|last| counts.get(&last).cloned()).unwrap_or_default();
            let counted = counts.entry(released).or_insert(before);
            let keys = [(); 2].map(|()| (0..dice.below(7)).map(|_| dice.below(12) as i64).collect::<Vec<_>>());
            keys.iter().flatten().for_each(|key| *counted.entry(hash_int(*key)).or_default() += 1);
            pair.release(released, [&keys[0], &keys[1]]);
            released += 1;
        }
        if asked < 12 && dice.below(6) == 0 {
            for plan in deed(&mut dice, &mut routing) {
                let order = Order { handle: asked as u64, plan, cadence: Cadence::default(), at_epoch: None };
                pair.loops[0].command(Command::Migrate(order));
                asked += 1;
            }
        }
        let worker = dice.below(2) as usize;
        for _ in 0..=dice.below(12) {
            pair.turn(worker);
        }
    }
    let mut found = BTreeMap::new();
    for (epoch, records) in pair.records {
        let mut told = BTreeSet::new();
        for record in records.into_iter().flatten() {
            assert!(told.insert(record.range), "seed {seed}: two records of {} in epoch {epoch}", record.range);
            assert_eq!(record.base, epoch == 0);
            for chunk in &record.chunks {
                for entry in Chunk::parse(chunk).unwrap().entries() {
                    if let Entry::Put { hash, value, .. } = entry.unwrap() {
                        assert!(record.range.contains(hash));
                        found.insert(hash, u64::from_le_bytes(value[..8].try_into().unwrap()));
                    }
                }
            }
        }
        assert_eq!(found, counts[&epoch], "seed {seed}: the state after epoch {epoch}");
    }
}

/// Runs an epoch; returns how many slices of the first worker were under way at most. The other worker does nothing for so long that it is all
/// that may. In the midst of it all bins move to `to`.
fn most_under_way(pair: &mut Pair, epoch: u64, to: Option<u32>) -> usize {
    let keys: Vec<i64> = (0..80).collect();
    pair.release(epoch, [&keys, &[]]);
    let mut most = 0;
    while pair.loops[0].under_way() == 0 {
        pair.turn(0);
        pair.turn(1);
    }
    if let Some(to) = to {
        let plan = Moves::Steps(vec![(0..1 << BITS).map(|bin| (bin, to)).collect()]);
        pair.loops[0].command(Command::Migrate(Order {
            handle: epoch,
            plan,
            cadence: Cadence::default(),
            at_epoch: None,
        }));
        let migrated = pair.migrated;
        while pair.migrated == migrated {
            pair.turn(0);
            pair.turn(1);
        }
    }
    while pair.records.get(&epoch).is_none_or(|records| records.len() < 2) {
        for _ in 0..20 {
            pair.turn(0);
            most = most.max(pair.loops[0].under_way());
        }
        pair.turn(1);
    }
    most
}

#[test]
fn fewer_slices_are_under_way_while_bins_move() {
    const WINDOW: u32 = 9;
    let mut pair = Pair::new(WINDOW);
    let moves = [None, Some(1), None, None, Some(0), None, None];
    let most: Vec<usize> = (0..).zip(moves).map(|(epoch, to)| most_under_way(&mut pair, epoch, to)).collect();
    assert_eq!(most, [9, 3, 3, 9, 3, 3, 9]);
}

#[test]
fn idle_moves_wait_for_the_record() {
    (0..300).for_each(run);
}
