//! The protocol step by step, on two workers that the test steps itself.

use crate::common::duo::Duo;
use crate::common::fleet::Layout;
use crate::common::{Sums, hash};
use penstock_bins::{
    BinEvent, BinName, BinsError, Command, Control, ControlError, ControlInput, Routing, ScheduleError, bin,
};
use penstock_dataflow::InputHandle;

const BITS: u8 = 4;

/// A key in a bin of the given worker by the initial routing, other than those in `but`.
fn key_of(worker: u32, but: &[u64]) -> u64 {
    let routing = Routing::new(BITS, 2).unwrap();
    let free = |key: &u64| but.iter().all(|other| bin(hash(key), BITS) != bin(hash(other), BITS));
    (0..).find(|key| routing.owner(hash(key)) == worker && free(key)).unwrap()
}

fn bin_of(key: u64) -> u32 {
    bin(hash(&key), BITS)
}

fn two() -> (Duo, Routing) {
    let routing = Routing::new(BITS, 2).unwrap();
    (Duo::new(Layout::Threads(2), &routing), routing)
}

fn times(duo: &Duo) -> Vec<(u64, u64, u32)> {
    duo.outputs().into_iter().map(|(time, key, _, worker)| (time, key, worker)).collect()
}

/// Megaphone §3.5, Fig. 4 (M-13).
#[test]
fn the_papers_example() {
    let (mut duo, _) = two();
    let mut control = duo.lead();
    let a = key_of(0, &[]);
    let b = key_of(0, &[a]);
    let c = key_of(1, &[]);

    // (a) Control has reached 42: records at 43 and 44 wait.
    duo.data_to(43);
    duo.rigs[0].data.as_mut().unwrap().advance_to(44).unwrap();
    duo.send(0, vec![(a, 3)]);
    duo.send(1, vec![(c, 5)]);
    control.advance_to(42).unwrap();
    duo.settle();
    assert_eq!(times(&duo), []);
    assert_eq!(duo.frontier(), [42]);
    assert_eq!(duo.stats.counters().records_routed, 0, "both records wait in F");

    // (b) Control at 45 with an update of b at 45: both records proceed, b's record waits.
    duo.data_to(45);
    duo.send(1, vec![(b, 1)]);
    control.advance_to(45).unwrap();
    control.send(Control::batch(0, vec![Command::Move { bin: bin_of(b), worker: 1 }]));
    duo.settle();
    assert_eq!(times(&duo), [(43, c, 1), (44, a, 0)]);
    assert_eq!(duo.frontier(), [45]);
    assert!(duo.holds(0, bin_of(b)), "the configuration at 45 is not certain yet");

    // Control passes 45: b moves, although data at 45 may still come.
    control.advance_to(55).unwrap();
    duo.settle();
    assert!(!duo.holds(0, bin_of(b)) && duo.holds(1, bin_of(b)));
    assert_eq!(duo.frontier(), [45]);
    assert_eq!(times(&duo).len(), 2, "nothing at 45 is applied early");

    // (c) Data at 53 holds the output back though control is at 55; a record at 55 waits in F.
    duo.data_to(53);
    duo.rigs[0].data.as_mut().unwrap().advance_to(55).unwrap();
    duo.send(0, vec![(a, 2)]);
    duo.settle();
    assert_eq!(times(&duo), [(43, c, 1), (44, a, 0), (45, b, 1)]);
    assert_eq!(duo.frontier(), [53]);
    assert_eq!(duo.stats.counters().records_routed, 3);

    // Control past 55: the record is routed, not applied.
    control.advance_to(56).unwrap();
    duo.settle();
    assert_eq!(duo.stats.counters().records_routed, 4);
    assert_eq!(times(&duo).len(), 3);
    duo.data_to(56);
    duo.settle();
    assert_eq!(times(&duo).last(), Some(&(55, a, 0)));
    assert_eq!(duo.frontier(), [56]);
}

/// M-03: data and control reach 10, nothing else comes; the output reaches 10, and the bins have moved.
#[test]
fn an_idle_source_does_not_delay_a_migration() {
    for layout in [Layout::Threads(2), Layout::Apart { processes: 2, threads: 1 }] {
        let routing = Routing::new(BITS, 2).unwrap();
        let mut duo = Duo::new(layout, &routing);
        let mut control = ControlInput::new(duo.lead(), routing, 2);
        for time in 3..9 {
            let command = Command::Map(vec![(time % 2) as u32; 1 << BITS]);
            control.schedule(time, vec![command]).unwrap();
        }
        duo.data_to(10);
        control.advance_to(10).unwrap();
        duo.settle();
        assert_eq!(duo.frontier(), [10]);
        assert_eq!(duo.rigs[0].counts.table.borrow().len(), 1 << BITS);
        assert_eq!(duo.rigs[1].counts.table.borrow().len(), 0);
        let counters = duo.stats.counters();
        // 8 bins to worker 1, then five times all 16 to the other side.
        assert_eq!((counters.bins_in, counters.bins_out, counters.bins_owned), (88, 88, 16));
    }
}

/// M-08: F's state output depends on control only. Data stands at 5, where it may still bring records.
#[test]
fn data_alone_does_not_delay_the_state() {
    let (mut duo, routing) = two();
    let mut control = ControlInput::new(duo.lead(), routing, 2);
    let key = key_of(0, &[]);
    control.schedule(5, vec![Command::Move { bin: bin_of(key), worker: 1 }]).unwrap();
    duo.data_to(5);
    duo.send(1, vec![(key, 1)]);
    control.advance_to(1_000).unwrap();
    duo.settle();
    let installed =
        duo.stats.log().into_iter().filter(|e| e.what == BinEvent::Installed).map(|e| (e.worker, e.bin, e.time));
    assert_eq!(installed.collect::<Vec<_>>(), [(1, bin_of(key), 5)]);
    assert_eq!((duo.frontier(), times(&duo)), (vec![5], vec![]));
    // A later migration waits: S may still have to apply records at 5.
    let mut control = control;
    control.schedule(1_000, vec![Command::Move { bin: bin_of(key), worker: 0 }]).unwrap();
    control.advance_to(1_001).unwrap();
    duo.settle();
    assert!(duo.holds(1, bin_of(key)));
    duo.data_to(1_000);
    duo.settle();
    assert!(duo.holds(0, bin_of(key)));
    assert_eq!(times(&duo), [(5, key, 1)]);
}

/// M-08: F holds the time of a migration, so S applies nothing at or after it before the bin is there.
#[test]
fn state_holds_back_data_at_the_time_of_a_migration() {
    let (mut duo, _) = two();
    let mut control = duo.lead();
    let key = key_of(0, &[]);
    duo.send(0, vec![(key, 1)]);
    control.advance_to(4).unwrap();
    control.send(Control::batch(0, vec![Command::Move { bin: bin_of(key), worker: 1 }]));
    control.advance_to(9).unwrap();
    duo.rigs[0].data.as_mut().unwrap().advance_to(6).unwrap();
    duo.send(0, vec![(key, 2)]);
    duo.rigs[0].data = None;
    duo.settle();
    // Worker 1's data stands at 0: nothing before 4 is complete, so the bin stays, and data at 6 has been routed to 1.
    assert_eq!(duo.stats.counters().records_routed, 2);
    assert!(duo.holds(0, bin_of(key)));
    assert_eq!((duo.frontier(), times(&duo)), (vec![0], vec![]));
    duo.rigs[1].data = None;
    duo.settle();
    assert_eq!(times(&duo), [(0, key, 0), (6, key, 1)]);
}

/// M-05: control far ahead, late control refused.
#[test]
fn control_is_prepared_ahead_and_late_control_is_refused() {
    const AHEAD: u64 = 1_000_000;
    let (mut duo, routing) = two();
    let mut control = ControlInput::new(duo.lead(), routing, 2);
    let key = key_of(0, &[]);
    for i in 0..100 {
        let command = Command::Move { bin: bin_of(key), worker: (i % 2 == 0).into() };
        control.schedule(AHEAD + i, vec![command]).unwrap();
    }
    control.advance_to(AHEAD + 50).unwrap();
    for time in [0, 7, AHEAD - 1] {
        duo.data_to(time);
        duo.send(1, vec![(key, 1)]);
    }
    duo.settle();
    duo.data_to(AHEAD + 2);
    duo.settle();
    assert_eq!(times(&duo), [(0, key, 0), (7, key, 0), (AHEAD - 1, key, 0)]);
    assert!(duo.holds(1, bin_of(key)), "moved at {AHEAD}, back at the next, and on at the one after");

    let refused = control.schedule(AHEAD + 49, vec![Command::Noop]);
    assert_eq!(refused, Err(ScheduleError::Late { held: Some(AHEAD + 50), asked: AHEAD + 49 }));
    let refused = control.advance_to(3);
    assert_eq!(refused, Err(ScheduleError::Late { held: Some(AHEAD + 50), asked: 3 }));
    control.close();
    let refused = control.schedule(AHEAD + 500, vec![Command::Noop]);
    assert_eq!(refused, Err(ScheduleError::Late { held: None, asked: AHEAD + 500 }));
    duo.data_to(AHEAD + 100);
    duo.settle();
    assert!(duo.holds(0, bin_of(key)), "closing emits what is scheduled");
    assert_eq!(duo.frontier(), [AHEAD + 100]);
}

/// The raw input refuses late control as well.
#[test]
fn the_control_input_does_not_go_back() {
    let (mut duo, _) = two();
    let mut control: InputHandle<u64, Vec<Control>> = duo.lead();
    control.advance_to(9).unwrap();
    let refused = control.advance_to(8).unwrap_err();
    assert_eq!((refused.held, refused.asked), (9, 8));
}

/// M-06: every reject leaves routing, bins and sequence as they were, on all workers, and the dataflow goes on.
#[test]
fn refused_control_changes_nothing() {
    let (mut duo, routing) = two();
    let mut control = duo.lead();
    let moved = |bin, worker| Command::Move { bin, worker };
    let mut torn = Control::batch(0, vec![moved(0, 1), moved(1, 0)]);
    torn.pop();
    let bad = [
        (Control::batch(0, vec![Command::Map(vec![0; 3])]), ControlError::MapLength { length: 3, bins: 16 }),
        (Control::batch(0, vec![moved(16, 0)]), ControlError::BinOutOfRange { bin: BinName::new(16, 4), bins: 16 }),
        (Control::batch(0, vec![moved(0, 2)]), ControlError::AbsentWorker { worker: 2 }),
        (Control::batch(1, vec![moved(0, 1)]), ControlError::Sequence { found: 1, expected: 0 }),
        (torn, ControlError::Count { announced: 2, present: 1 }),
        (Control::batch(0, vec![moved(0, 1), moved(0, 0)]), ControlError::MovedTwice { bin: BinName::new(0, 4) }),
        (Control::batch(0, vec![Command::Map(vec![1; 16]), moved(0, 0)]), ControlError::MapNotAlone { others: 1 }),
    ];
    let mut expected = Vec::new();
    for (time, (batch, error)) in (1u64..).zip(bad) {
        control.advance_to(time).unwrap();
        control.send(batch);
        expected.push((time, error));
    }
    control.advance_to(20).unwrap();
    duo.data_to(20);
    duo.settle();
    assert_eq!(duo.frontier(), [20], "refused control holds nothing back");
    for rig in &duo.rigs {
        assert_eq!(*rig.counts.rejected.borrow(), expected);
        assert_eq!(*rig.counts.routing.borrow(), routing);
    }
    assert_eq!(duo.stats.counters().bins_out, 0);
    // Sequence 0 is still the next one.
    control.send(Control::batch(0, vec![moved(0, 1)]));
    control.advance_to(21).unwrap();
    duo.data_to(21);
    duo.settle();
    assert!(duo.holds(1, 0));
    assert_eq!(duo.rigs[1].counts.routing.borrow().owner_of(0), 1);
    assert_eq!(duo.rigs[0].counts.rejected.borrow().len(), 7);
}

/// Scheduling refuses what F would refuse, and merges what is scheduled for one time.
#[test]
fn control_is_checked_when_it_is_scheduled() {
    let (mut duo, routing) = two();
    let mut control = ControlInput::new(duo.lead(), routing, 2);
    let moved = |bin, worker| Command::Move { bin, worker };
    control.schedule(4, vec![moved(0, 1)]).unwrap();
    control.schedule(4, vec![moved(1, 0), Command::Noop]).unwrap();
    control.schedule(3, vec![Command::Map(vec![1; 16])]).unwrap();
    for (commands, error) in [
        (vec![moved(0, 0)], ControlError::MovedTwice { bin: BinName::new(0, 4) }),
        (vec![Command::Map(vec![0; 16])], ControlError::MapNotAlone { others: 2 }),
        (vec![moved(2, 1), moved(99, 1)], ControlError::BinOutOfRange { bin: BinName::new(99, 4), bins: 16 }),
        (vec![moved(2, 7)], ControlError::AbsentWorker { worker: 7 }),
        (vec![Command::Map(vec![0; 8])], ControlError::MapLength { length: 8, bins: 16 }),
    ] {
        assert_eq!(control.schedule(4, commands), Err(ScheduleError::Control(error)));
    }
    let mut owners = vec![1; 16];
    owners[1] = 0;
    assert_eq!(control.routing().owners(), owners);
    control.advance_to(5).unwrap();
    duo.data_to(5);
    duo.settle();
    assert_eq!(duo.rigs[1].counts.routing.borrow().owners(), owners);
    assert!(duo.rigs[1].counts.rejected.borrow().is_empty());
}

/// One control stream moves the bins of two operators at the same times, there and back.
#[test]
fn operators_share_control() {
    use penstock_bins::{Config, Keyed, Shelf, Stats, state_machine};
    use penstock_dataflow::{Worker, fabric};
    use std::sync::{Arc, Mutex};
    let routing = Routing::new(2, 2).unwrap();
    let (here, bin) = (routing.owner(hash(&8)), bin(hash(&8), 2));
    let there = 1 - here;
    let (shelf, stats, applied) = (Shelf::<Sums>::new(), Arc::new(Stats::new()), Arc::new(Mutex::new(Vec::new())));
    let mut workers: Vec<Worker> = fabric::threads(2).into_iter().map(Worker::new).collect();
    let mut rigs: Vec<_> = workers
        .iter_mut()
        .map(|worker| {
            let index = worker.index();
            worker.dataflow::<u64, _>("joint", |scope| {
                let (data, blocks) = scope.new_input::<Keyed<u64, u64>>();
                let (control, commands) = scope.new_input();
                let config =
                    |name: &str| Config::in_process(name, routing.clone(), index, shelf.clone(), Arc::clone(&stats));
                let machine = |name: &'static str, blocks| {
                    let sum = |key: &u64, value: u64, sum: &mut u64| {
                        *sum += value;
                        (*sum >= 10, Some((*key, *sum)))
                    };
                    let machine = state_machine(&blocks, &commands, config(name), sum).unwrap();
                    let applied = Arc::clone(&applied);
                    machine.output.inspect(move |time, rows| {
                        applied.lock().unwrap().extend(rows.iter().map(|(_, sum)| (*time, name, *sum, index as u32)));
                    });
                    machine
                };
                let first = machine("first", blocks);
                let again = first.output.map_blocks(|rows: Vec<(u64, u64)>| Keyed::new(rows, hash));
                let second = machine("second", again);
                (Some(data), Some(control), first, second)
            })
        })
        .collect();
    let mut control = ControlInput::new(rigs[0].1.take().unwrap(), routing, 2);
    rigs[1].1 = None;
    for (time, worker) in [(1, there), (3, here)] {
        control.schedule(time, vec![Command::Move { bin, worker }]).unwrap();
    }
    for time in 0..4 {
        rigs[0].0.as_mut().unwrap().send(Keyed::new(vec![(8, 4)], hash));
        for (data, ..) in &mut rigs {
            data.as_mut().unwrap().advance_to(time + 1).unwrap();
        }
        control.advance_to(time + 1).unwrap();
        while workers.iter().any(Worker::has_work) {
            workers.iter_mut().for_each(|worker| _ = worker.step().unwrap());
        }
        let owner = if (1..3).contains(&time) { there } else { here };
        for (index, (_, _, first, second)) in (0..).zip(&rigs) {
            assert!(second.probe.less_equal(&(time + 1)) && !second.probe.less_than(&(time + 1)));
            for operator in [first, second] {
                assert_eq!(operator.table.borrow().get(bin).is_some(), owner == index, "{time}");
                assert_eq!(operator.routing.borrow().owner_of(bin), owner);
                assert!(operator.rejected.borrow().is_empty());
            }
        }
    }
    // 4, 8, 12 and gone, 4 | 4, 12 and gone, 12 and gone, 4.
    let mut applied = std::mem::take(&mut *applied.lock().unwrap());
    applied.sort_unstable();
    let rows = [(0, 4, 4, here), (1, 8, 12, there), (2, 12, 12, there), (3, 4, 4, here)];
    let both = |(time, one, other, worker)| [(time, "first", one, worker), (time, "second", other, worker)];
    assert_eq!(applied, rows.into_iter().flat_map(both).collect::<Vec<_>>());
    assert_eq!(stats.counters().bins_in, 4, "two bins there and back");
}

/// A bin that moves at the first instant of an epoch that only one of the two workers has marked would lose its undo.
#[test]
fn a_move_between_two_marks_is_fatal() {
    for layout in [Layout::Threads(2), Layout::Apart { processes: 2, threads: 1 }] {
        let routing = Routing::new(BITS, 2).unwrap();
        let mut duo = Duo::new(layout, &routing);
        let mut control = ControlInput::new(duo.lead(), routing, 2);
        control.schedule(10, vec![Command::Move { bin: 0, worker: 1 }]).unwrap();
        duo.data_to(10);
        control.advance_to(11).unwrap();
        duo.rigs[0].counts.table.borrow_mut().mark_all(1);
        let error = (0..100).find_map(|_| duo.workers.iter_mut().find_map(|worker| worker.step().err()));
        let Some(penstock_dataflow::Error::Operator { source, .. }) = error else { panic!("{error:?}") };
        assert!(
            matches!(source.downcast_ref(), Some(BinsError::EpochDiffers { bin: 0, here: None, there: Some(1) })),
            "{source:?}"
        );
    }
}

/// A message of control without a command is nothing: it holds no time back and takes no place in the sequence.
#[test]
fn an_empty_batch_is_nothing() {
    let (mut duo, _) = two();
    let mut control = duo.lead();
    control.advance_to(3).unwrap();
    control.send(Vec::new());
    control.advance_to(5).unwrap();
    control.send(Control::batch(0, vec![Command::Move { bin: 0, worker: 1 }]));
    control.advance_to(9).unwrap();
    duo.data_to(9);
    duo.settle();
    assert_eq!(duo.frontier(), [9]);
    assert!(duo.holds(1, 0));
}

/// What is done at or after 5 while the output stands there, step by step; bins of worker 0 go to worker 1 at 5, piece by piece.
fn while_bins_move(
    moved: &[u64],
    prepare: impl FnOnce(&mut Duo, &mut ControlInput<u64>),
) -> (Vec<Vec<(u64, u64)>>, Duo) {
    let routing = Routing::new(BITS, 2).unwrap();
    let mut duo = Duo::shipping(Layout::Apart { processes: 2, threads: 1 }, &routing, 0);
    let mut control = ControlInput::new(duo.lead(), routing, 2);
    duo.send(0, moved.iter().map(|key| (*key, 1)).collect());
    duo.data_to(1);
    let moves = moved.iter().map(|key| Command::Move { bin: bin_of(*key), worker: 1 });
    control.schedule(5, moves.collect()).unwrap();
    prepare(&mut duo, &mut control);
    control.advance_to(20).unwrap();
    duo.data_to(15);
    let mut seen = Vec::new();
    while duo.step() {
        if duo.frontier() == [5] {
            let done = times(&duo).into_iter().filter(|(time, ..)| *time >= 5).map(|(time, key, _)| (time, key));
            seen.push(done.collect());
        }
    }
    (seen, duo)
}

/// Keys of worker 0 in three bins, the first two in the order in which their bins move, and one of worker 1.
fn four_keys() -> [u64; 4] {
    let a = key_of(0, &[]);
    let b = key_of(0, &[a]);
    let [first, second] = if bin_of(a) < bin_of(b) { [a, b] } else { [b, a] };
    [first, second, key_of(0, &[a, b]), key_of(1, &[])]
}

fn sorted(mut list: Vec<(u64, u64)>) -> Vec<(u64, u64)> {
    list.sort_unstable();
    list
}

/// Rows of bins that are here do not wait for those that are on their way, and those of one that has come do not wait for the others.
#[test]
fn a_bin_is_in_service_whatever_else_is_under_way() {
    let [first, second, stays, there] = four_keys();
    let (seen, duo) = while_bins_move(&[first, second], |duo, _| {
        for time in [6, 8] {
            duo.data_to(time);
            duo.send(1, [first, second, stays, there].map(|key| (key, 1)).to_vec());
        }
    });
    let of =
        |keys: &[u64]| sorted([6, 8].into_iter().flat_map(|time| keys.iter().map(move |key| (time, *key))).collect());
    assert!(seen.contains(&of(&[stays, there])), "{seen:?}");
    assert!(seen.contains(&of(&[first, stays, there])), "{seen:?}");
    assert!(seen.iter().all(|done| !done.contains(&(6, second)) || done.contains(&(8, first))), "{seen:?}");
    assert_eq!(times(&duo).len(), 2 + 8);
    assert_eq!(duo.frontier(), [15]);
    assert!(duo.stats.counters().records_ahead >= 6);
    for key in [first, second] {
        assert!(times(&duo).contains(&(8, key, 1)));
    }
}

/// A block without keys speaks of all bins: its time and those after it wait for them.
#[test]
fn blocks_without_keys_wait_for_all_bins() {
    let [first, _, stays, there] = four_keys();
    let (seen, duo) = while_bins_move(&[first], |duo, _| {
        for time in [6, 7, 8] {
            duo.data_to(time);
            duo.send(1, [first, stays, there].map(|key| (key, 1)).to_vec());
            for rig in duo.rigs.iter_mut().filter(|_| time == 7) {
                rig.data.as_mut().unwrap().send(crate::common::Block::local(Vec::new()));
            }
        }
    });
    assert!(seen.contains(&sorted(vec![(6, stays), (6, there)])), "{seen:?}");
    let waits = |done: &Vec<(u64, u64)>| done.iter().all(|(time, _)| *time < 7) || done.contains(&(6, first));
    assert!(seen.iter().all(waits), "{seen:?}");
    // Three rows of each time, and three keys once more at 7.
    assert_eq!(times(&duo).len(), 1 + 3 * 3 + 3);
}

/// A row at or after the next configuration waits until that has started: the bin may have to leave before it.
#[test]
fn nothing_overtakes_the_next_configuration() {
    let [first, second, stays, there] = four_keys();
    let (seen, duo) = while_bins_move(&[first], |duo, control| {
        control.schedule(8, vec![Command::Move { bin: bin_of(second), worker: 1 }]).unwrap();
        control.schedule(10, vec![Command::Move { bin: bin_of(second), worker: 0 }]).unwrap();
        for time in [7, 8, 11] {
            duo.data_to(time);
            duo.send(1, [first, second, stays, there].map(|key| (key, 1)).to_vec());
        }
    });
    assert!(seen.contains(&sorted(vec![(7, second), (7, stays), (7, there)])), "{seen:?}");
    let waits = |done: &Vec<(u64, u64)>| done.iter().all(|(time, _)| *time == 7) || done.contains(&(7, first));
    assert!(seen.iter().all(waits), "{seen:?}");
    let of_second: Vec<_> = times(&duo).into_iter().filter(|(_, key, _)| *key == second).collect();
    assert_eq!(of_second, [(7, second, 0), (8, second, 1), (11, second, 0)]);
}

/// Records that were post-dated before their bin moved come with it; those of other bins are due meanwhile.
#[test]
fn post_dated_records_are_due_in_bins_that_are_here() {
    let [first, _, stays, there] = four_keys();
    // A value of 11 comes back one tick later as 5.
    let (seen, duo) = while_bins_move(&[first], |duo, _| {
        duo.data_to(4);
        duo.send(0, vec![(first, 14), (stays, 14)]);
        duo.data_to(6);
        duo.send(1, vec![(there, 11), (first, 11)]);
    });
    assert!(seen.contains(&sorted(vec![(6, there), (7, there), (8, stays)])), "{seen:?}");
    let of_first: Vec<_> = times(&duo).into_iter().filter(|(_, key, _)| *key == first).collect();
    assert_eq!(of_first, [(0, first, 0), (4, first, 0), (6, first, 1), (7, first, 1), (8, first, 1)]);
}

/// A bin for which rows wait comes before those that nobody waits for.
#[test]
fn bins_that_rows_wait_for_come_first() {
    let mut keys = Vec::new();
    for _ in 0..5 {
        keys.push(key_of(0, &keys));
    }
    keys.sort_by_key(|key| bin_of(*key));
    let hot = keys[4];
    let (_, duo) = while_bins_move(&keys, |duo, _| {
        duo.data_to(6);
        duo.send(1, vec![(hot, 1), (keys[3], 1), (hot, 1)]);
    });
    let log = duo.stats.log();
    let come = log.iter().filter(|entry| entry.what == BinEvent::Installed).map(|entry| entry.bin).collect::<Vec<_>>();
    // One was begun before anybody could ask.
    let expected = [keys[0], hot, keys[3], keys[1], keys[2]].map(bin_of);
    assert_eq!(come, expected);
    assert_eq!(times(&duo).len(), 5 + 3);
}

/// What waits is not looked through for the sake of a few rows; rows of a bin that has come do not overtake those that are left for it.
#[test]
fn few_rows_of_a_bin_that_has_come_wait_for_more() {
    let [first, second, stays, _] = four_keys();
    let (seen, duo) = while_bins_move(&[first, second], |duo, _| {
        duo.data_to(6);
        let many = (0..5000).map(|_| (second, 1));
        duo.send(1, many.chain([(first, 1), (stays, 1)]).collect());
        duo.data_to(8);
        duo.send(1, vec![(first, 1), (stays, 1)]);
    });
    assert!(seen.contains(&vec![(6, stays), (8, stays)]), "nothing else yet");
    let of = |done: &Vec<(u64, u64)>, key| done.iter().any(|(_, other)| *other == key);
    assert!(seen.iter().all(|done| !of(done, first) || of(done, second)));
    let of_first = times(&duo).into_iter().filter(|(_, key, _)| *key == first);
    assert_eq!(of_first.collect::<Vec<_>>(), [(0, first, 0), (6, first, 1), (8, first, 1)]);
    assert_eq!(times(&duo).len(), 2 + 5000 + 4);
}

/// More may be rows that come when the bin is long here and the next one is not.
#[test]
fn rows_of_a_bin_that_has_come_wait_for_more_of_them_and_for_no_other_bin() {
    let [first, second, ..] = four_keys();
    let routing = Routing::new(BITS, 2).unwrap();
    let mut duo = Duo::shipping(Layout::Apart { processes: 2, threads: 1 }, &routing, 0);
    let mut control = ControlInput::new(duo.lead(), routing, 2);
    // Some chunks of state, each of which takes its time.
    let large = (0..).filter(|key| bin_of(*key) == bin_of(second)).take(1 << 16).map(|key| (key, 1));
    duo.send(0, large.chain([(first, 1)]).collect());
    duo.data_to(1);
    control.schedule(5, [first, second].map(|key| Command::Move { bin: bin_of(key), worker: 1 }).to_vec()).unwrap();
    control.advance_to(20).unwrap();
    duo.data_to(6);
    duo.send(1, (0..5000).map(|_| (second, 1)).chain([(first, 1)]).collect());
    duo.data_to(7);
    let of_first = |duo: &Duo| times(duo).into_iter().filter(|(time, key, _)| *time > 5 && *key == first).count();
    let on_its_way = |duo: &Duo| duo.frontier() == [5] && !duo.holds(1, bin_of(second));
    while !duo.holds(1, bin_of(first)) {
        assert!(duo.step());
    }
    assert!(on_its_way(&duo));
    assert_eq!(of_first(&duo), 0);
    duo.send(1, (0..400).map(|_| (first, 1)).collect());
    duo.data_to(8);
    while of_first(&duo) == 0 {
        assert!(duo.step());
    }
    assert!(on_its_way(&duo));
    assert_eq!(of_first(&duo), 401);
    duo.settle();
    assert_eq!(times(&duo).iter().filter(|(time, ..)| *time > 5).count(), 5401);
}
