//! A first worker that is fed everything, and crews that join it in the middle of an epoch, get its bins, and leave: the counts are exact.

use std::collections::BTreeMap;
use std::sync::Arc;

use crossbeam::channel::{Receiver, unbounded};
use penstock_dataflow::fabric;
use penstock_plan::host::{Crew, CrewEvent, Event, Group, GroupConfig, PartitionRows, Resident, Rows};
use penstock_plan::{CallError, Callbacks, ForeignState, SideRows};

use crate::group::{PATIENCE, read, rows};
use crate::host::counting;

struct NoCalls;

impl Callbacks for NoCalls {
    fn map(
        &self,
        _: usize,
        batch: &arrow_array::RecordBatch,
        _: &mut SideRows,
    ) -> Result<arrow_array::RecordBatch, CallError> {
        Ok(batch.clone())
    }

    fn new_state(&self, call: usize) -> Box<dyn ForeignState> {
        unreachable!("no state of call {call}")
    }
}

/// The next event that `wanted` takes; outputs on the way are added up.
fn until<T>(events: &Receiver<Event>, counts: &mut BTreeMap<i64, i64>, wanted: impl Fn(&Event) -> Option<T>) -> T {
    loop {
        let event = events.recv_timeout(PATIENCE).expect("the first worker goes on");
        let found = wanted(&event);
        match event {
            Event::EpochDone { outputs, .. } => {
                let outputs: Vec<_> = outputs.into_iter().map(Rows::into_here).collect();
                // Updates: the last one counts.
                read(&outputs).iter().for_each(|row| _ = counts.insert(row[0], row[1]));
            }
            Event::Failed { error } => panic!("{error}"),
            Event::MigrationRefused { error, .. } => panic!("{error}"),
            _ => {}
        }
        if let Some(found) = found {
            return found;
        }
    }
}

#[test]
fn counts_are_exact_while_crews_come_and_go() {
    let (mut seats, door) = fabric::joinable(1);
    let mut config = GroupConfig::founding(counting("update"), Arc::new(NoCalls), 4, 1);
    (config.gather, config.slice_rows, config.window, config.ship_bytes) = (true, 7, 4, 64);
    let (sender, events) = unbounded();
    let group = Group::start(config.clone(), vec![seats.remove(0)], Resident::fresh(), sender).unwrap();
    let (mut fed, mut counts) = (BTreeMap::new(), BTreeMap::new());
    let (mut epoch, mut handle) = (0, 0);
    let mut release = |group: &Group| {
        let values: Vec<_> = (0..100).map(|n: i64| vec![(n * n + epoch as i64) % 37, n]).collect();
        values.iter().for_each(|row| *fed.entry(row[0]).or_insert(0) += 1);
        let batches = vec![rows(&["k", "v"], &values).into()];
        group.release(epoch, vec![PartitionRows { source: 0, partition: 0, batches, rows_before: 0 }], None).unwrap();
        epoch += 1;
    };
    let mut migrate = |group: &Group, to: &[usize]| {
        let moves = (0..16).map(|bin| (bin, to[bin as usize % to.len()] as u32)).collect::<Vec<_>>();
        group.migrate(handle, moves.chunks(3).map(<[_]>::to_vec).collect(), None);
        handle += 1;
        handle - 1
    };
    let join = |count: usize| {
        let (sender, told) = unbounded();
        let crew = Crew::start(config.clone(), door.ask(count).unwrap().seats().unwrap(), &sender).unwrap();
        let joined = (0..count).map(|_| match told.recv_timeout(PATIENCE).unwrap() {
            CrewEvent::Joined { worker } => worker,
            other => panic!("{other:?}"),
        });
        let mut joined: Vec<usize> = joined.collect();
        joined.sort_unstable();
        (crew, told, joined)
    };
    let moved = |event: &Event, wanted: u64| match event {
        Event::MigrationDone { handle, .. } if *handle == wanted => Some(()),
        _ => None,
    };
    release(&group);
    let (first, first_told, ids) = join(2);
    release(&group);
    let under_way = migrate(&group, &ids);
    release(&group);
    until(&events, &mut counts, |event| moved(event, under_way));
    let told = first.stats(PATIENCE).workers;
    let held = told.iter().map(|worker| (worker.worker, worker.bins[0])).collect::<Vec<_>>();
    assert_eq!(held, [(1, 8), (2, 8)]);
    assert!(told.iter().all(|worker| worker.keys > 0 && worker.rows > 0), "{told:?}");
    let (second, _second_told, more) = join(2);
    assert_eq!((ids, more.clone()), (vec![1, 2], vec![3, 4]));
    release(&group);
    // The first two give all away and leave.
    let under_way = migrate(&group, &more);
    release(&group);
    until(&events, &mut counts, |event| moved(event, under_way));
    first.leave();
    for _ in 0..2 {
        let told = first_told.recv_timeout(PATIENCE).unwrap();
        assert!(matches!(told, CrewEvent::Left { .. }), "{told:?}");
    }
    let last = first.stats(PATIENCE).workers;
    assert!(last.iter().all(|worker| worker.bins == [0] && worker.epochs >= 3), "{last:?}");
    assert!(first.loads()[0].rows.iter().sum::<u64>() > 0);
    release(&group);
    let last = epoch - 1;
    until(&events, &mut counts, |event| {
        matches!(event, Event::EpochDone { epoch, .. } if *epoch == last).then_some(())
    });
    assert_eq!(counts, fed);
    assert_eq!(group.members(), [0, 3, 4]);
    drop(group.stop());
    drop(second);
}

/// Who comes is told the watermark at the time at which the first worker stands: that has to pass although nothing is fed and nothing moves.
#[test]
fn crews_leave_an_idle_run_that_gave_them_nothing() {
    let (mut seats, door) = fabric::joinable(1);
    let mut config = GroupConfig::founding(counting("update"), Arc::new(NoCalls), 4, 1);
    config.gather = true;
    let (sender, events) = unbounded();
    let group = Group::start(config.clone(), vec![seats.remove(0)], Resident::fresh(), sender).unwrap();
    let batches = vec![rows(&["k", "v"], &[vec![1, 2]]).into()];
    group.release(0, vec![PartitionRows { source: 0, partition: 0, batches, rows_before: 0 }], Some(5)).unwrap();
    until(&events, &mut BTreeMap::new(), |event| matches!(event, Event::EpochDone { .. }).then_some(()));
    for worker in 1..4 {
        let (sender, told) = unbounded();
        let crew = Crew::start(config.clone(), door.ask(1).unwrap().seats().unwrap(), &sender).unwrap();
        let joined = told.recv_timeout(PATIENCE).unwrap();
        assert!(matches!(joined, CrewEvent::Joined { worker: joined } if joined == worker), "{joined:?}");
        while group.members() != [0, worker as u32] {
            assert!(!group.has_ended());
        }
        crew.leave();
        let left = told.recv_timeout(PATIENCE).unwrap();
        assert!(matches!(left, CrewEvent::Left { worker: left } if left == worker), "{left:?}");
    }
    drop(group.stop());
}
