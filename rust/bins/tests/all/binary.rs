//! Two inputs into one operator, and rows that only go to their bins, against the naive twin: random rows of both sides, of which some come
//! again later, while bins move by control that both operators share.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;

use crate::common::fleet::{self, Layout, Process};
use crate::common::{Dice, Row, Sums, hash, ship_bytes};
use penstock_bins::{
    BinState, BinsError, Both, BoxError, Command, Config, ControlInput, Keyed, Moment, Routing, Shelf, Stats, bin,
    distribute, stateful_binary,
};
use penstock_dataflow::Worker;
use proptest::prelude::*;

const BITS: u8 = 3;
const TICKS: u64 = 12;

type Rows = Keyed<u64, i64>;
type Bins = Both<Sums, Sums>;
/// Time, side, key, state of its side after the row.
type Output = (u64, u8, u64, u64);

/// A row of one side, whose state depends on what the other side is; some come again, at once or later.
fn apply(side: u8, mine: &mut u64, theirs: u64, value: i64) -> Option<(u64, i64)> {
    *mine = mine.wrapping_mul(31).wrapping_add(theirs).wrapping_add(value as u64 + u64::from(side));
    (value >= 10 && value % 3 == i64::from(side)).then_some(((value % 4) as u64, value / 2))
}

#[derive(Clone)]
struct Load {
    /// By worker, side and tick.
    rows: Vec<[Vec<Vec<Row>>; 2]>,
    control: BTreeMap<u64, Vec<Command>>,
}

impl Load {
    fn random(dice: &mut Dice, workers: usize) -> Self {
        let rows = |dice: &mut Dice| (0..dice.below(6)).map(|_| (dice.below(12), dice.below(40) as i64)).collect();
        let side = |dice: &mut Dice| (0..TICKS).map(|_| rows(dice)).collect();
        let rows = (0..workers).map(|_| [(); 2].map(|()| side(dice))).collect();
        let worker = |dice: &mut Dice| dice.below(workers as u64) as u32;
        let batch = |dice: &mut Dice| match dice.below(3) {
            0 => vec![Command::Map((0..1 << BITS).map(|_| worker(dice)).collect())],
            _ => {
                let moved: BTreeSet<u32> = (0..4).map(|_| dice.below(1 << BITS) as u32).collect();
                moved.into_iter().map(|bin| Command::Move { bin, worker: worker(dice) }).collect()
            }
        };
        let mut control = BTreeMap::new();
        for tick in 0..TICKS {
            if dice.below(2) == 0 {
                control.insert(tick, batch(dice));
            }
        }
        Self { rows, control }
    }

    fn at(&self, side: usize, tick: u64) -> impl Iterator<Item = Row> {
        self.rows.iter().flat_map(move |worker| worker[side].get(tick as usize)).flatten().copied()
    }

    /// What comes of each key, in the order of application.
    fn outputs(&self) -> BTreeMap<u64, Vec<Output>> {
        let (mut states, mut later) = (BTreeMap::<u64, [u64; 2]>::new(), BTreeMap::<u64, [Vec<Row>; 2]>::new());
        let mut outputs = BTreeMap::<u64, Vec<Output>>::new();
        let mut times: BTreeSet<u64> = (0..TICKS).collect();
        while let Some(time) = times.pop_first() {
            let mut fresh = true;
            while fresh || later.contains_key(&time) {
                let due = later.remove(&time).unwrap_or_default();
                for (side, due) in due.into_iter().enumerate() {
                    for (key, value) in due.into_iter().chain(self.at(side, time).filter(|_| fresh)) {
                        let state = states.entry(key).or_default();
                        let theirs = state[1 - side];
                        if let Some((delay, value)) = apply(side as u8, &mut state[side], theirs, value) {
                            later.entry(time + delay).or_default()[side].push((key, value));
                            times.insert(time + delay);
                        }
                        outputs.entry(key).or_default().push((time, side as u8, key, state[side]));
                    }
                }
                fresh = false;
            }
            times.remove(&time);
        }
        outputs
    }

    /// The rows of the first side on the worker that has their bins then, by time.
    fn places(&self, worker: u32, initial: &Routing) -> Vec<(u64, u64)> {
        let mut routing = initial.clone();
        let mut rows = Vec::new();
        for tick in 0..TICKS {
            self.control.get(&tick).into_iter().flatten().for_each(|command| drop(routing.apply(command).unwrap()));
            let here = self.at(0, tick).filter(|(key, _)| routing.owner(hash(key)) == worker);
            rows.extend(here.map(|(key, _)| (tick, key)));
        }
        rows.sort_unstable();
        rows
    }
}

type Given<'a> = Moment<'a, u64, Rows, Bins, Row, Vec<Output>>;

/// The fold of either side.
fn fold(side: u8) -> impl FnMut(Given<'_>) -> Result<(), BoxError> {
    move |moment| {
        let mut outputs = Vec::new();
        let due = moment.due.into_iter().map(|(bin, (key, value))| {
            assert_eq!(bin, penstock_bins::bin(hash(&key), BITS), "a record is with its bin");
            (key, value)
        });
        let rows: Vec<Row> = due.chain(moment.blocks.iter().flat_map(|block| block.rows().to_vec())).collect();
        assert!(!rows.is_empty(), "a fold is called when there is something for it");
        for (key, value) in rows {
            let bin = bin(hash(&key), BITS);
            let Both { left, right } = moment.bins.get_mut(bin).ok_or("the bin is elsewhere")?;
            let (mine, theirs) = if side == 0 { (left, right) } else { (right, left) };
            let theirs = theirs.get(&key).copied().unwrap_or(0);
            let state = mine.entry(key);
            if let Some((delay, value)) = apply(side, state, theirs, value) {
                moment.later.at(bin, moment.time + delay, (key, value))?;
            }
            outputs.push((*moment.time, side, key, *state));
        }
        moment.out.give(outputs);
        Ok(())
    }
}

fn config<S: BinState + Default>(
    name: &str,
    worker: &Worker,
    layout: Layout,
    shelf: &Shelf<S>,
    ship_bytes: usize,
) -> Result<Config<u64, S>, BinsError> {
    let (index, routing) = (worker.index(), Routing::new(BITS, layout.workers())?);
    let here = layout.process_of(index);
    let config = Config::in_process(name, routing, index, shelf.clone(), Arc::new(Stats::new()));
    Ok(Config { local: Rc::new(move |other| layout.process_of(other) == here), ship_bytes, ..config })
}

type Found = (Vec<Output>, Vec<(u64, u64)>);

fn program(
    worker: &mut Worker,
    process: &Process<Bins>,
    nothing: &Shelf<()>,
    load: &Load,
    seed: u64,
) -> Result<Found, BoxError> {
    let (index, layout) = (worker.index(), process.layout);
    let mut dice = Dice(seed);
    let ship = ship_bytes(&mut dice);
    let mut dice = Dice(seed ^ (index as u64 + 1));
    let both = config("both", worker, layout, &process.shelf, ship)?;
    let places = config("places", worker, layout, nothing, ship)?;
    let (outputs, rows) = (Rc::new(RefCell::new(Vec::new())), Rc::new(RefCell::new(Vec::new())));
    let (seen, placed) = (Rc::clone(&outputs), Rc::clone(&rows));
    let (inputs, control, rejected) = worker.dataflow::<u64, _>("binary", |scope| {
        let ((left, lefts), (right, rights)) = (scope.new_input::<Rows>(), scope.new_input::<Rows>());
        let (control, commands) = scope.new_input();
        let control = ControlInput::new(control, Routing::new(BITS, layout.workers())?, layout.workers());
        let both = stateful_binary(&lefts, &rights, &commands, both, fold(0), fold(1))?;
        _ = both.output.inspect(move |_, outputs| seen.borrow_mut().extend(outputs.iter().copied()));
        let here = distribute(&lefts, &commands, places)?;
        _ = here.output.inspect(move |time, block| {
            placed.borrow_mut().extend(block.rows().iter().map(|(key, _)| (*time, *key)));
        });
        Ok::<_, BinsError>(([left, right], control, [both.rejected, here.rejected]))
    })?;
    let mut control = control;
    if index == 0 {
        for (time, commands) in &load.control {
            control.schedule(*time, commands.clone())?;
        }
    } else {
        control.close();
    }
    let mut inputs = inputs.map(Some);
    let (mut ticks, mut led) = ([0, 0], 0);
    while inputs.iter().any(Option::is_some) || led < TICKS {
        match dice.below(3) as usize {
            2 if led < TICKS => {
                led += 1;
                if index == 0 {
                    control.advance_to(led)?;
                }
            }
            side @ (0 | 1) => {
                if let Some(input) = &mut inputs[side] {
                    input.send(Rows::new(load.rows[index][side][ticks[side] as usize].clone(), hash));
                    ticks[side] += 1;
                    input.advance_to(ticks[side])?;
                }
                inputs[side].take_if(|input| *input.time() == TICKS);
            }
            _ => {}
        }
        for _ in 0..dice.below(4) {
            worker.step()?;
        }
    }
    control.close();
    while worker.step_or_park(None)? {}
    assert!(rejected.iter().all(|rejected| rejected.borrow().is_empty()));
    Ok((outputs.take(), rows.take()))
}

fn check(layout: Layout, seed: u64) {
    let load = Load::random(&mut Dice(seed), layout.workers());
    let (nothing, given) = (fleet::shelves::<()>(layout), load.clone());
    let (found, _) = fleet::run(layout, &fleet::shelves(layout), move |worker, process| {
        program(worker, process, &nothing[layout.process_of(worker.index())], &given, seed)
    });
    let initial = Routing::new(BITS, layout.workers()).unwrap();
    let mut outputs = BTreeMap::<u64, Vec<Output>>::new();
    for (worker, found) in found.into_iter().enumerate() {
        let (made, mut rows) = found.unwrap();
        rows.sort_unstable();
        assert_eq!(rows, load.places(worker as u32, &initial), "rows on worker {worker}");
        made.into_iter().for_each(|output| outputs.entry(output.2).or_default().push(output));
    }
    // A key is on one worker at a time, so the order within one is known.
    outputs.values_mut().for_each(|list| list.sort_by_key(|output| output.0));
    assert_eq!(outputs, load.outputs());
}

proptest! {
    #![proptest_config(penstock_cases::cases(40))]

    #[test]
    fn threads(seed: u64, workers in 1usize..4) {
        check(Layout::Threads(workers), seed);
    }

    #[test]
    fn processes_in_one(seed: u64) {
        check(Layout::Apart { processes: 2, threads: 1 }, seed);
    }
}

proptest! {
    #![proptest_config(penstock_cases::cases(8))]

    #[test]
    fn processes(seed: u64) {
        check(Layout::Tcp { processes: 2, threads: 2 }, seed);
    }
}
