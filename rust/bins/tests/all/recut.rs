//! M-24: bins that are split and merged while rows flow, and move part by part; beside the naive twin.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use crate::common::duo::Duo;
use crate::common::fleet::{self, Layout};
use crate::common::{self, Load, Trace, config, hash, run};
use penstock_bins::{
    BinEvent, BinName, BinState, BinTable, Command, Config, ControlError, ControlInput, Encoding, Extent, Keyed,
    Moment, Range, Routing, Shelf, StateError, Stats, number_of, stateful_divided,
};
use proptest::prelude::*;

fn part(prefix: u32, length: u8, bits: u8) -> u32 {
    number_of(Range::new(prefix, length).unwrap(), bits).unwrap()
}

/// Rows at every tick on every worker, with keys all over.
fn load(workers: usize, bits: u8, ticks: u64, control: BTreeMap<u64, Vec<Command>>) -> Load {
    let rows =
        |worker: u64, tick: u64| (0..8).map(move |i| ((tick * 7 + worker * 3 + i * 11) % 200, (tick + i) as i64 % 60));
    let data =
        (0..workers as u64).map(|worker| (0..ticks).map(|tick| (tick, vec![rows(worker, tick).collect()])).collect());
    Load { bits, workers, data: data.collect(), control, marks: [ticks / 2].into(), ship_bytes: 1000 }
}

fn checked(load: &Load, layout: Layout, seed: u64) -> usize {
    let trace: Trace = run(load, layout, seed);
    assert_eq!(trace.rejected, []);
    let cut = trace.log.iter().filter(|entry| entry.what == BinEvent::Cut).count();
    trace.check(load);
    cut
}

/// 2^4 bins, 2^8, and 2^4 again; parts move in between, and some of the work is done while they are split.
#[test]
fn all_bins_are_split_and_merged_again() {
    let bits = 4;
    for layout in
        [Layout::Threads(2), Layout::Apart { processes: 2, threads: 1 }, Layout::Tcp { processes: 2, threads: 1 }]
    {
        let moved = |worker: u32| {
            (0..1 << 8).map(move |bin| Command::Move { bin: part(bin, 8, bits), worker: (bin + worker) % 2 })
        };
        let control = BTreeMap::from([
            (10, (0..16).map(|bin| Command::Split { bin, bits: 4 }).collect()),
            (15, moved(0).collect()),
            (25, moved(1).collect()),
            (30, vec![Command::Map((0..16).map(|bin| bin % 2).collect())]),
            (35, (0..16).map(|bin| Command::Merge { bin }).collect()),
        ]);
        let cut = checked(&load(2, bits, 45, control), layout, 7);
        assert_eq!(cut, 256 + 16, "each was cut once, on the worker that had it");
    }
}

/// One hot bin alone, deeper and deeper; in the end all that is left of it is one bin.
#[test]
fn one_bin_is_split_alone() {
    let mut control = BTreeMap::new();
    let mut path = 1;
    for length in 3..=20_u8 {
        control.insert(u64::from(length), vec![Command::Split { bin: part(path, length - 1, 2), bits: 1 }]);
        path = (path << 1) | (u32::from(length) % 2);
    }
    control.insert(50, vec![Command::Move { bin: part(path, 20, 2), worker: 2 }]);
    control.insert(55, vec![Command::Map(vec![2; 4])]);
    control.insert(60, vec![Command::Merge { bin: 1 }]);
    let cut = checked(&load(3, 2, 65, control), Layout::Threads(3), 3);
    assert_eq!(cut, 2 * 18 + 1);
}

proptest! {
    #![proptest_config(penstock_cases::cases(30))]

    /// A split or merge in the middle of others that were prepared far ahead; of a part that moves at the same time elsewhere.
    #[test]
    fn splits_are_invisible(seed: u64, bits in 0u8..4, threads in 1usize..4) {
        let load = Load::random(seed, bits, threads, 30, 25);
        checked(&load, Layout::Threads(threads), seed);
        let load = Load::random(!seed, bits, 2 * threads, 20, 16);
        checked(&load, Layout::Apart { processes: 2, threads }, seed);
    }
}

/// What is scheduled later is checked against what comes before it, whichever was asked for first.
#[test]
fn what_is_scheduled_ahead_stays_possible() {
    let routing = Routing::new(1, 2).unwrap();
    let mut duo = Duo::new(Layout::Threads(2), &routing);
    let mut control = ControlInput::new(duo.lead(), routing, 2);
    let refused = |error: Result<(), penstock_bins::ScheduleError<u64>>| match error {
        Err(penstock_bins::ScheduleError::Control(error)) => error,
        other => panic!("{other:?}"),
    };
    control.schedule(5, vec![Command::Move { bin: 1, worker: 0 }]).unwrap();
    assert_eq!(
        refused(control.schedule(3, vec![Command::Split { bin: 1, bits: 2 }])),
        ControlError::Split { bin: BinName::new(1, 1) }
    );
    control.schedule(7, vec![Command::Split { bin: 1, bits: 2 }]).unwrap();
    let far = part(0b101, 3, 1);
    let absent = refused(control.schedule(6, vec![Command::Move { bin: far, worker: 1 }]));
    assert_eq!(absent, ControlError::BinOutOfRange { bin: BinName::new(far, 1), bins: 2 });
    // It is what users call it, and not the number 13.
    assert_eq!(absent.to_string(), "part (5, 3) is no part any more: what it was part of is whole");
    let merge = refused(control.schedule(9, vec![Command::Merge { bin: far }]));
    assert_eq!(merge.to_string(), "part (5, 3) is whole: there is nothing to merge");
    assert_eq!(
        refused(control.schedule(9, vec![Command::Merge { bin: 0 }])).to_string(),
        "bin 0 is whole: there is nothing to merge"
    );
    assert_eq!(refused(control.schedule(9, vec![Command::Merge { bin: 2 }])).to_string(), "bin 2 of 2 bins");
    control.schedule(8, vec![Command::Move { bin: far, worker: 1 }]).unwrap();
    assert_eq!(
        refused(control.schedule(9, vec![Command::Merge { bin: 1 }])),
        ControlError::Apart { bin: BinName::new(1, 1), one: 0, other: 1 }
    );
    assert_eq!(control.routing().owner_of(far), 1);
    assert_eq!(control.routing().owner_of(part(0b100, 3, 1)), 0);
    control.close();
}

/// A state that does not know the hashes of its keys refuses, on all workers alike, and the dataflow goes on.
#[test]
fn what_cannot_be_divided_is_refused() {
    let layout = Layout::Threads(2);
    let (results, _) = fleet::run(layout, &fleet::shelves(layout), move |worker, process| {
        let routing = Routing::new(1, 2)?;
        let mut rig = build_without(worker, config(worker, process, &routing))?;
        let mut data = rig.data.take().unwrap();
        let mut control = ControlInput::new(rig.control.take().unwrap(), routing, 2);
        if worker.index() == 0 {
            control.schedule(2, vec![Command::Split { bin: 1, bits: 1 }])?;
        }
        control.advance_to(5)?;
        control.close();
        data.send(Keyed::new(vec![(1, 1)], hash));
        data.close();
        while worker.step_or_park(None)? {}
        assert_eq!(rig.counts.rejected.take(), [(2, ControlError::Indivisible { bin: BinName::new(1, 1) })]);
        Ok(rig.counts.table.borrow().len())
    });
    assert_eq!(results.into_iter().map(Result::unwrap).sum::<usize>(), 2);
}

fn build_without(
    worker: &mut penstock_dataflow::Worker,
    config: penstock_bins::Config<u64, common::Sums>,
) -> Result<common::Rig, penstock_bins::BinsError> {
    worker.dataflow::<u64, _>("sums", |scope| {
        let (data, blocks) = scope.new_input::<common::Block>();
        let (control, commands) = scope.new_input();
        type Given<'a> = penstock_bins::Moment<'a, u64, common::Block, common::Sums, common::Row, Vec<common::Output>>;
        let counts = penstock_bins::stateful(&blocks, &commands, config, |_: Given<'_>| Ok(()))?;
        Ok(common::Rig { data: Some(data), control: Some(control), counts })
    })
}

/// Knows only whether it was handed over as it was.
#[derive(Default)]
struct Live(bool);

impl BinState for Live {
    fn encode(&self, _: &mut Encoding) -> Result<Option<Vec<u8>>, StateError> {
        Ok(None)
    }

    fn absorb(&mut self, _: &[u8]) -> Result<(), StateError> {
        Ok(())
    }

    fn bytes(&self) -> usize {
        0
    }

    fn keys(&self) -> usize {
        1
    }

    fn mark(&mut self) {}

    fn rollback(&mut self) -> Result<(), StateError> {
        Ok(())
    }

    fn divide(&self, ranges: &[Range], _: Extent, new: &dyn Fn() -> Self) -> Result<Vec<Self>, StateError> {
        Ok(ranges.iter().map(|_| new()).collect())
    }

    fn hand_over(&self, part_of: &dyn Fn(u64) -> Option<usize>, parts: &mut [Self]) -> Result<bool, StateError> {
        parts.iter_mut().for_each(|part| part.0 = true);
        Ok(part_of(u64::MAX).is_some())
    }
}

/// What a bin was is retained where an epoch may be undone, also one that has not begun: it would share with its parts what they change.
#[test]
fn states_are_handed_over_as_they_are_only_where_none_is_retained() {
    type Prepare = fn(&mut BinTable<Live>);
    let cases: [(Option<u64>, Prepare, bool); 4] = [
        (None, |_| {}, true),
        (Some(7), |table| table.unmark(7), false),
        (None, |table| table.mark_all(7), false),
        (Some(8), |table| table.mark_all(7), false),
    ];
    for (begins, prepare, is_live) in cases {
        for merges in [false, true] {
            let mut worker = penstock_dataflow::Worker::new(penstock_dataflow::fabric::threads(1).remove(0));
            let routing = Routing::new(1, 1).unwrap();
            let (shelf, stats) = (Shelf::new(), Arc::new(Stats::new()));
            let mut config = Config::<u64, Live>::in_process("live", routing.clone(), 0, shelf, stats);
            config.begins = Rc::new(move |_| begins);
            prepare(&mut config.table.borrow_mut());
            let table = config.table.clone();
            let (data, control) = worker.dataflow::<u64, _>("live", |scope| {
                let (data, blocks) = scope.new_input::<common::Block>();
                let (control, commands) = scope.new_input();
                type Given<'a> = Moment<'a, u64, common::Block, Live, common::Row, Vec<common::Output>>;
                stateful_divided(&blocks, &commands, config, common::divide(), |_: Given<'_>| Ok(())).unwrap();
                (data, control)
            });
            let mut control = ControlInput::new(control, routing, 1);
            control.schedule(2, vec![Command::Split { bin: 1, bits: 1 }]).unwrap();
            if merges {
                control.schedule(3, vec![Command::Merge { bin: 1 }]).unwrap();
            }
            control.advance_to(5).unwrap();
            control.close();
            drop(data);
            while worker.step().unwrap() {}
            let table = table.borrow();
            let made = if merges { vec![1] } else { vec![part(2, 2, 1), part(3, 2, 1)] };
            assert!(made.iter().all(|bin| table.get(*bin).unwrap().0 == is_live), "{begins:?} {merges}");
            assert!(!table.get(0).unwrap().0);
        }
    }
}
