//! The naive twin: a single-threaded stateful operator, and the program that runs the real one on the same load.
#![allow(dead_code, unreachable_pub)]

pub mod duo;
pub mod fleet;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::rc::Rc;
use std::sync::{Arc, Mutex};

use fleet::{Layout, Process};
use penstock_bins::{
    BinTable, BinsError, BoxError, Command, Config, Control, ControlError, ControlInput, Divide, Keyed, KeyedMap,
    LogEntry, Moment, Range, Routing, Stateful, number_of, range_of, stateful_divided,
};
use penstock_dataflow::{InputHandle, Worker};

pub type Row = (u64, i64);
pub type Block = Keyed<u64, i64>;
pub type Sums = KeyedMap<u64, u64>;

/// One output: time, key, state after the record, worker.
pub type Output = (u64, u64, u64, u32);

/// Spreads keys over all bits.
pub fn hash(key: &u64) -> u64 {
    let mixed = (key ^ (key >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed ^ (mixed >> 32)
}

/// A small generator of pseudo-random numbers: equal seeds give equal loads.
pub struct Dice(pub u64);

impl Dice {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

/// What goes in.
#[derive(Clone, Debug)]
pub struct Load {
    pub bits: u8,
    pub workers: usize,
    /// By worker, then by time.
    pub data: Vec<BTreeMap<u64, Vec<Vec<Row>>>>,
    /// By time; every batch is acceptable.
    pub control: BTreeMap<u64, Vec<Command>>,
    /// Times at which each worker sends a block without keys.
    pub marks: BTreeSet<u64>,
    /// Bytes of state under way.
    pub ship_bytes: usize,
}

/// From one piece at a time to all at once.
pub fn ship_bytes(dice: &mut Dice) -> usize {
    [0, 1, 100, 1000, penstock_bins::SHIP_BYTES][dice.below(5) as usize]
}

impl Load {
    /// Random rows for each worker and tick, random control at random ticks.
    pub fn random(seed: u64, bits: u8, workers: usize, ticks: u64, batches: u64) -> Self {
        let mut dice = Dice(seed);
        let keys = 1 + dice.below(40);
        let data = (0..workers)
            .map(|_| {
                let mut times = BTreeMap::new();
                for tick in 0..ticks {
                    let blocks = (0..dice.below(3))
                        .map(|_| (0..dice.below(6)).map(|_| (dice.below(keys), dice.below(60) as i64)).collect())
                        .collect();
                    times.insert(tick, blocks);
                }
                times
            })
            .collect();
        let mut control = BTreeMap::new();
        let mut routing = Routing::new(bits, workers).unwrap();
        for tick in (0..batches).map(|_| dice.below(ticks)).collect::<BTreeSet<u64>>() {
            control.insert(tick, random_batch(&mut dice, &mut routing, workers));
        }
        let ship_bytes = ship_bytes(&mut dice);
        let marks = (0..dice.below(4)).map(|_| dice.below(ticks)).collect();
        Self { bits, workers, data, control, marks, ship_bytes }
    }

    pub fn initial(&self) -> Routing {
        Routing::new(self.bits, self.workers).unwrap()
    }

    /// The configuration function (M-02).
    pub fn routing_at(&self, time: u64) -> Routing {
        let mut routing = self.initial();
        for command in self.control.range(..=time).flat_map(|(_, commands)| commands) {
            routing.apply(command).unwrap();
        }
        routing
    }
}

/// Moves, splits and merges that `routing` takes, and takes.
pub fn random_batch(dice: &mut Dice, routing: &mut Routing, workers: usize) -> Vec<Command> {
    let bins = u64::from(routing.bins());
    let worker = |dice: &mut Dice| dice.below(workers as u64) as u32;
    let commands = match dice.below(10) {
        0 => vec![Command::Noop],
        1 => vec![Command::Map((0..bins).map(|_| worker(dice)).collect())],
        2 => vec![Command::Noop, Command::Map(vec![worker(dice); bins as usize])],
        3..6 => {
            let present: Vec<u32> = routing.bins_owned().map(|(bin, _)| bin).collect();
            let some = |dice: &mut Dice| present[dice.below(present.len() as u64) as usize];
            let moved: BTreeSet<u32> = (0..=dice.below(present.len() as u64)).map(|_| some(dice)).collect();
            moved.into_iter().map(|bin| Command::Move { bin, worker: worker(dice) }).collect()
        }
        kind => {
            // Of one bin or part each, what is possible: in, out, or away.
            let mut commands = Vec::new();
            for whole in 0..routing.bins() {
                let parts = || routing.bins_owned().filter(|(bin, _)| routing_whole(routing, *bin) == whole);
                let (bin, owner) = parts().nth(dice.below(parts().count() as u64) as usize).unwrap();
                let range = range_of(bin, routing.bits()).unwrap();
                let wider = Range::new(range.prefix() >> 1, range.length().saturating_sub(1));
                let wider = wider.and_then(|range| number_of(range, routing.bits()));
                commands.extend(match dice.below(4) {
                    0 | 1 if kind < 8 && range.length() < 6 => {
                        Some(Command::Split { bin, bits: 1 + dice.below(2) as u8 })
                    }
                    0 | 1 if dice.below(2) == 0 && parts().count() > 1 && parts().all(|(_, one)| one == owner) => {
                        Some(Command::Merge { bin: whole })
                    }
                    0 | 1 => wider.map(|bin| Command::Merge { bin }),
                    2 => Some(Command::Move { bin, worker: worker(dice) }),
                    _ => None,
                });
            }
            commands.retain(|command| routing.clone().apply(command).is_ok());
            commands
        }
    };
    commands.iter().for_each(|command| drop(routing.apply(command).unwrap()));
    commands
}

fn routing_whole(routing: &Routing, part: u32) -> u32 {
    penstock_bins::bin(range_of(part, routing.bits()).unwrap().first(), routing.bits())
}

/// One record's effect: order matters, and some records come back later with a smaller value.
pub fn apply(state: &mut u64, value: i64) -> Option<(u64, i64)> {
    *state = state.wrapping_mul(31).wrapping_add(value as u64 + 1);
    (value >= 10 && value % 3 != 0).then_some(((value % 5) as u64, value / 2))
}

/// What a block without keys does to each key.
pub fn mark(state: &mut u64, time: u64) {
    *state = state.wrapping_mul(37).wrapping_add(time);
}

/// The logic on bins, by [`apply`] and [`mark`].
pub fn logic(worker: u32, moment: Moment<'_, u64, Block, Sums, Row, Vec<Output>>) -> Result<(), BoxError> {
    let Moment { time, blocks, due, bins, later, out, again, .. } = moment;
    let mut outputs = Vec::new();
    let mut blocks = blocks.into_iter();
    // Of some times one block at a time.
    let most = if time % 3 == 0 { 1 } else { usize::MAX };
    let due = due.into_iter().map(|(bin, (key, value))| {
        assert_eq!(bins.bin_of(hash(&key)), bin, "a record is with its bin");
        (hash(&key), key, value)
    });
    let mut rows: Vec<_> = due.collect();
    let mut marks = 0;
    for block in blocks.by_ref().take(most) {
        match block.is_hashed() {
            true => {
                assert_eq!(marks, 0, "blocks without keys are last");
                rows.extend(block.into_hashed_rows());
            }
            false => marks += 1,
        }
    }
    for (hashed, key, value) in rows {
        let bin = bins.bin_of(hashed);
        let state = bins.get_mut(bin).ok_or_else(|| format!("key {key} at {time}: bin {bin} is not on {worker}"))?;
        let state = state.entry(key);
        if let Some((delay, value)) = apply(state, value) {
            later.at(bin, time + delay, (key, value))?;
        }
        outputs.push((*time, key, *state, worker));
    }
    for _ in 0..marks {
        for (_, state) in bins.owned_mut() {
            for key in state.iter().map(|(key, _)| *key).collect::<Vec<_>>() {
                let state = state.entry(key);
                mark(state, *time);
                outputs.push((*time, key, *state, worker));
            }
        }
    }
    out.give(outputs);
    again.extend(blocks);
    Ok(())
}

/// The naive twin: by key, (time, state) in the order of application.
pub fn oracle(load: &Load) -> HashMap<u64, Vec<(u64, u64)>> {
    let mut states: HashMap<u64, u64> = HashMap::new();
    let mut outputs: HashMap<u64, Vec<(u64, u64)>> = HashMap::new();
    let mut later: BTreeMap<u64, Vec<Row>> = BTreeMap::new();
    let mut times: BTreeSet<u64> = load.data.iter().flat_map(|times| times.keys().copied()).collect();
    times.extend(&load.marks);
    while let Some(time) = times.pop_first() {
        let data = load.data.iter().flat_map(|times| times.get(&time)).flatten().flatten().copied();
        let mut rows: Vec<Row> = later.remove(&time).unwrap_or_default().into_iter().chain(data).collect();
        let mut marked = load.marks.contains(&time);
        while !rows.is_empty() || marked {
            for (key, value) in rows {
                let state = states.entry(key).or_default();
                if let Some((delay, value)) = apply(state, value) {
                    later.entry(time + delay).or_default().push((key, value));
                    times.insert(time + delay);
                }
                outputs.entry(key).or_default().push((time, *state));
            }
            if std::mem::take(&mut marked) {
                for (key, state) in &mut states {
                    mark(state, time);
                    outputs.entry(*key).or_default().push((time, *state));
                }
            }
            rows = later.remove(&time).unwrap_or_default();
        }
        times.remove(&time);
    }
    outputs
}

/// What came out.
#[derive(Debug, Default)]
pub struct Trace {
    pub outputs: Vec<Output>,
    pub rejected: Vec<(u64, ControlError)>,
    pub log: Vec<LogEntry<u64>>,
    /// Records that did not wait for bins that were on their way.
    pub ahead: u64,
}

pub type SharedTrace = Arc<Mutex<Trace>>;

/// The operator under test on one worker, with its inputs.
pub struct Rig {
    pub data: Option<InputHandle<u64, Block>>,
    pub control: Option<InputHandle<u64, Vec<Control>>>,
    pub counts: Stateful<u64, Sums, Vec<Output>>,
}

/// Of a bin that can be split.
pub fn new_state() -> Sums {
    Sums::hashed(hash)
}

/// The hash of the key of a post-dated record.
pub fn divide() -> Divide<Row> {
    Some(Rc::new(|(key, _): &Row| hash(key)))
}

pub fn config(worker: &Worker, process: &Process<Sums>, routing: &Routing) -> Config<u64, Sums> {
    let table = BinTable::fresh(routing, worker.index() as u32, &new_state);
    config_with(worker, process, routing, table)
}

pub fn config_with(
    worker: &Worker,
    process: &Process<Sums>,
    routing: &Routing,
    table: BinTable<Sums>,
) -> Config<u64, Sums> {
    let (layout, index) = (process.layout, process.layout.process_of(worker.index()));
    Config {
        name: "sums".into(),
        routing: routing.clone(),
        table: Rc::new(RefCell::new(table)),
        shelf: process.shelf.clone(),
        local: Rc::new(move |other| layout.process_of(other) == index),
        new_state: Rc::new(new_state),
        begins: Rc::new(|_| None),
        record: false,
        ship_bytes: penstock_bins::SHIP_BYTES,
        hot_first: true,
        stats: Arc::clone(&process.stats),
    }
}

/// Builds the operator with [`logic`]; outputs go to `trace`.
pub fn build(worker: &mut Worker, config: Config<u64, Sums>, trace: &SharedTrace) -> Result<Rig, BinsError> {
    let (index, trace) = (worker.index() as u32, Arc::clone(trace));
    worker.dataflow::<u64, _>("sums", |scope| {
        let (data, blocks) = scope.new_input::<Block>();
        let (control, commands) = scope.new_input();
        let logic = move |moment: Moment<'_, u64, Block, Sums, Row, Vec<Output>>| logic(index, moment);
        let counts = stateful_divided(&blocks, &commands, config, divide(), logic)?;
        counts.output.inspect(move |_, outputs| trace.lock().unwrap().outputs.extend_from_slice(outputs));
        Ok(Rig { data: Some(data), control: Some(control), counts })
    })
}

/// Runs the whole load: every worker interleaves its data, the leader's control and steps at random.
pub fn run(load: &Load, layout: Layout, seed: u64) -> Trace {
    assert_eq!(load.workers, layout.workers());
    let trace = SharedTrace::default();
    let shelves = fleet::shelves(layout);
    let (shared, sent) = (Arc::clone(&trace), load.clone());
    let (results, stats) = fleet::run(layout, &shelves, move |worker, process| {
        let load = &sent;
        let config = Config { ship_bytes: load.ship_bytes, ..config(worker, process, &load.initial()) };
        let mut rig = build(worker, config, &shared)?;
        let index = worker.index();
        let mut dice = Dice(seed ^ (index as u64) << 32);
        let mut data = rig.data.take().unwrap();
        let mut control = ControlInput::new(rig.control.take().unwrap(), load.initial(), worker.peers());
        if index == 0 {
            for (time, commands) in &load.control {
                control.schedule(*time, commands.clone())?;
            }
        } else {
            control.close();
        }
        let end = load.data.iter().flat_map(|times| times.keys()).chain(load.control.keys()).max().map_or(0, |t| t + 1);
        let mut blocks = load.data[index].iter();
        let mut feeding = true;
        while feeding || control.time().is_some() {
            match dice.below(4) {
                0 if feeding => match blocks.next() {
                    Some((time, blocks)) => {
                        data.advance_to(*time)?;
                        if load.marks.contains(time) {
                            data.send(Keyed::local(Vec::new()));
                        }
                        for rows in blocks {
                            data.send(Keyed::new(rows.clone(), hash));
                        }
                    }
                    None => feeding = false,
                },
                1 => match control.time().copied() {
                    Some(time) if time < end => control.advance_to((time + 1 + dice.below(end / 4 + 2)).min(end))?,
                    Some(_) => control.close(),
                    None => {}
                },
                _ => _ = worker.step()?,
            }
        }
        data.close();
        while worker.step_or_park(None)? {}
        if index == 0 {
            shared.lock().unwrap().rejected = rig.counts.rejected.take();
        }
        Ok(())
    });
    for result in results {
        result.unwrap();
    }
    let mut trace = std::mem::take(&mut *trace.lock().unwrap());
    trace.ahead = stats.iter().map(|stats| stats.counters().records_ahead).sum();
    trace.log = stats.iter().flat_map(|stats| stats.log()).collect();
    trace
}

impl Trace {
    /// Checks M-01 (every key's history) and M-02 (each update happened where its configuration says).
    pub fn check(mut self, load: &Load) {
        let expected = oracle(load);
        let mut routings: HashMap<u64, Routing> = HashMap::new();
        for &(time, key, _, worker) in &self.outputs {
            let routing = routings.entry(time).or_insert_with(|| load.routing_at(time));
            assert_eq!(routing.owner(hash(&key)), worker, "key {key} at {time}");
        }
        self.outputs.sort_by_key(|output| output.0);
        let mut got: HashMap<u64, Vec<(u64, u64)>> = HashMap::new();
        for (time, key, state, _) in self.outputs {
            got.entry(key).or_default().push((time, state));
        }
        assert_eq!(got, expected);
    }
}
