//! Epochs that are released together: several workers feed the next while they still count the one before.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use arrow_array::cast::AsArray;
use arrow_array::types::Int64Type;
use arrow_array::{ArrayRef, Int64Array, RecordBatch};
use crossbeam::channel::{Receiver, unbounded};
use penstock_balance::Strategy;
use penstock_bins::{BinName, ControlError};
use penstock_dataflow::fabric;
use penstock_plan::host::{Event, Group, GroupConfig, MARK, PartitionRows, Refusal, Resident};
use penstock_plan::spec::{AggSpec, Nulls, PlanSpec, SourceSpec, StepSpec};
use penstock_plan::{CallError, Callbacks, Emit, ForeignState, Plan, SideRows};

const PATIENCE: Duration = Duration::from_secs(60);

fn keys(keys: impl IntoIterator<Item = i64>) -> RecordBatch {
    let column: ArrayRef = Arc::new(Int64Array::from_iter_values(keys));
    RecordBatch::try_from_iter([("k", column)]).unwrap()
}

/// Lets epoch 0 pass on the first worker only once a row of epoch 1 has been seen: the keys are the epochs.
#[derive(Default)]
struct Meeting(Mutex<bool>, Condvar);

impl Callbacks for Meeting {
    fn map(&self, _: usize, batch: &RecordBatch, _: &mut SideRows) -> Result<RecordBatch, CallError> {
        let mut next = self.0.lock().unwrap();
        if batch.column(0).as_primitive::<Int64Type>().value(0) == 1 {
            *next = true;
            self.1.notify_all();
        } else if batch.num_rows() == ROWS + 1 {
            let waited = self.1.wait_timeout_while(next, PATIENCE, |next| !*next).unwrap().1;
            if waited.timed_out() {
                return Err(CallError::new("meeting", "epoch 1 did not begin".to_string()));
            }
        }
        Ok(batch.clone())
    }

    fn new_state(&self, call: usize) -> Box<dyn ForeignState> {
        unreachable!("no state of call {call}")
    }
}

const ROWS: usize = 1024;

fn start(mapped: bool, workers: usize) -> (Group, Receiver<Event>) {
    let schema = keys([]).schema();
    let source = SourceSpec {
        name: "input".into(),
        schema: schema.clone(),
        event_time: None,
        lateness_ms: 0,
        order_by: Vec::new(),
        idle_after_ms: None,
    };
    let count = AggSpec { name: "n".into(), function: "count".into(), column: None, ..AggSpec::default() };
    let mut steps = vec![
        StepSpec::KeyBy { columns: vec!["k".into()], nulls: Nulls::Group },
        StepSpec::Agg { emit: Some(Emit::Update), aggs: vec![count], operator: None },
    ];
    if mapped {
        steps.insert(0, StepSpec::MapBatches { call: 0, schema, sides: vec![] });
    }
    let plan = Plan::compile(PlanSpec::line(source, steps)).unwrap();
    let mut config = GroupConfig::founding(Arc::new(plan), Arc::new(Meeting::default()), 4, workers as u32);
    config.slice_rows = 2 * ROWS;
    let (sender, events) = unbounded();
    (Group::start(config, fabric::threads(workers), Resident::fresh(), sender).unwrap(), events)
}

fn release(group: &Group, epoch: u64, block: RecordBatch) {
    group
        .release(
            epoch,
            vec![PartitionRows { source: 0, partition: 0, batches: vec![block.into()], rows_before: 0 }],
            None,
        )
        .unwrap();
}

#[test]
fn an_epoch_begins_while_the_one_before_is_under_way() {
    let (group, events) = start(true, 2);
    // One row more for the first worker than for the second.
    release(&group, 0, keys(std::iter::repeat_n(0, 2 * ROWS + 1)));
    release(&group, 1, keys(std::iter::repeat_n(1, 2 * ROWS)));
    let mut next = [0, 0];
    while next != [2, 2] {
        match events.recv_timeout(PATIENCE).unwrap() {
            Event::EpochDone { epoch, worker, .. } => {
                assert_eq!(epoch, std::mem::replace(&mut next[worker], epoch + 1))
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(group.stop().1.is_none());
}

#[test]
fn each_epoch_tells_its_own_changes_while_bins_move() {
    const EPOCHS: u64 = 30;
    for workers in [2, 3] {
        let (group, events) = start(false, workers);
        let blocks = (0..EPOCHS).map(|epoch| {
            // Epochs without rows, with fewer than slices, and with a slice for each worker.
            let rows = [0, 3, 700, 3 * ROWS][epoch as usize % 4];
            (0..rows as u64).map(|row| ((row * 31 + epoch * 17) % 301) as i64).collect::<Vec<_>>()
        });
        let blocks = blocks.collect::<Vec<_>>();
        for (epoch, block) in (0..).zip(&blocks) {
            release(&group, epoch, keys(block.iter().copied()));
            if epoch % 5 == 0 {
                let moves = |bin: u32| (bin, (bin + epoch as u32) % workers as u32);
                group.migrate(epoch, vec![(0..8).map(moves).collect(), (8..16).map(moves).collect()], None);
            }
        }
        let (mut done, mut migrated) = (0, 0);
        let mut told: BTreeMap<u64, BTreeMap<i64, i64>> = BTreeMap::new();
        while done < EPOCHS as usize * workers || migrated < EPOCHS / 5 {
            match events.recv_timeout(PATIENCE).expect("nothing hangs") {
                Event::EpochDone { epoch, outputs, .. } => {
                    done += 1;
                    for rows in outputs.into_iter().map(|rows| rows.into_here()) {
                        let column = |at: usize| rows.column(at).as_primitive::<Int64Type>().values().to_vec();
                        for (key, n) in column(0).into_iter().zip(column(1)) {
                            assert_eq!(told.entry(epoch).or_default().insert(key, n), None, "{key} twice in {epoch}");
                        }
                    }
                }
                Event::MigrationDone { .. } => migrated += 1,
                other => panic!("{other:?}"),
            }
        }
        let mut counts = BTreeMap::new();
        for (epoch, block) in (0..).zip(&blocks) {
            block.iter().for_each(|key| *counts.entry(*key).or_insert(0) += 1);
            let changed = block.iter().map(|key| (*key, counts[key])).collect::<BTreeMap<_, _>>();
            assert_eq!(told.remove(&epoch).unwrap_or_default(), changed, "{workers} workers, epoch {epoch}");
        }
        assert!(group.stop().1.is_none());
    }
}

/// Prepared migrations hold from their epochs on, several at one time, beside one that goes on bin by bin; the counts are those of no migration.
#[test]
fn what_is_prepared_holds_for_all_of_its_epoch() {
    const EPOCHS: u64 = 24;
    for (workers, mapped) in [(1, false), (2, false), (3, false)] {
        let (group, events) = start(mapped, workers);
        let to =
            |worker: u32, bins: std::ops::Range<u32>| bins.map(move |bin| (bin, worker % workers as u32)).collect();
        let prepared = |epoch: u64| -> [Vec<(u32, u32)>; 2] { [to(epoch as u32, 0..6), to(epoch as u32 + 1, 6..12)] };
        // One bin after the other, over many epochs.
        group.migrate(1000, (0..200).map(|step: u32| vec![(12 + step % 4, step % workers as u32)]).collect(), None);
        let at = [2, 3, 9, 17];
        for epoch in at {
            let [first, second] = prepared(epoch);
            group.migrate_at(epoch, epoch, vec![first], None);
            group.prepare(epoch, 100 + epoch, second, Strategy::AllAtOnce, None).unwrap();
        }
        group.prepare(12, 500, vec![(3, 0), (99, 0)], Strategy::Fluid, None).unwrap();
        group.prepare(EPOCHS + 9, 600, vec![(3, 0)], Strategy::Fluid, None).unwrap();
        assert!(group.prepare(5, 7, vec![], Strategy::Batched { size: 0 }, None).is_err());
        for epoch in 0..EPOCHS {
            release(&group, epoch, keys((0..3 * ROWS as i64).map(|row| row % 97)));
        }
        group.cancel(600);
        let mut counted: BTreeMap<u64, BTreeMap<i64, i64>> = BTreeMap::new();
        let (mut done, mut begun, mut refused, mut cancelled) = (0, BTreeMap::new(), 0, false);
        while done < EPOCHS as usize * workers || begun.len() < 2 * at.len() || refused < 1 || !cancelled {
            match events.recv_timeout(PATIENCE).expect("nothing hangs") {
                Event::EpochDone { epoch, outputs, .. } => {
                    done += 1;
                    for rows in outputs.into_iter().map(|rows| rows.into_here()) {
                        let column = |at: usize| rows.column(at).as_primitive::<Int64Type>().values().to_vec();
                        counted.entry(epoch).or_default().extend(column(0).into_iter().zip(column(1)));
                    }
                }
                Event::MigrationDone { handle: 600, steps, .. } => cancelled = steps.is_empty(),
                Event::MigrationDone { handle: 1000, .. } => {}
                Event::MigrationDone { handle, steps, .. } => {
                    assert!(steps.len() <= 1, "{handle}: {steps:?}");
                    begun.insert(handle, steps.first().map(|step| (step.epoch, step.slice)));
                }
                Event::MigrationRefused { handle: 500, error, steps } => {
                    let unknown = ControlError::BinOutOfRange { bin: BinName::new(99, 4), bins: 16 };
                    assert_eq!((error, steps.len()), (Refusal::Control(unknown), usize::from(workers == 2)));
                    refused += 1;
                }
                other => panic!("{other:?}"),
            }
        }
        for epoch in at {
            let (first, second) = (begun[&epoch], begun[&(100 + epoch)]);
            let (at, slice) = first.expect("its steps are given");
            assert!(
                at == epoch && slice <= MARK + 1,
                "{workers} workers: prepared for {epoch}, begun at {at}, {slice}"
            );
            assert!(second.is_none_or(|second| Some(second) == first), "{second:?} beside {first:?}");
        }
        for (epoch, keys) in counted {
            let each = |key: i64| (epoch as i64 + 1) * ((3 * ROWS as i64 - key + 96) / 97);
            assert!(
                keys.len() == 97 && keys.iter().all(|(key, n)| *n == each(*key)),
                "{workers} workers, epoch {epoch}"
            );
        }
        // Too late.
        group.migrate_at(3, 700, vec![vec![(0, 0)]], None);
        loop {
            match events.recv_timeout(PATIENCE).expect("it is told") {
                Event::MigrationRefused { handle: 700, error: Refusal::Passed { at_epoch: 3, now }, .. } => {
                    assert!(now >= EPOCHS - 1);
                    break;
                }
                Event::MigrationDone { handle: 1000, .. } => {}
                other => panic!("{other:?}"),
            }
        }
        assert!(group.stop().1.is_none());
    }
}
