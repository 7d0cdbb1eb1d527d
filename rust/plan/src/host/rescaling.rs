//! Real plans on a first worker and on others that join its run, get bins, give them away and leave, at moments that a seed decides, over messages
//! that take as long as it wants; each epoch gives the rows that one worker alone gives.
//!
//! All in one thread: the loop of the first worker, the workers of crews, and a host that does as `_crew.py` does. Processes come and go, several at
//! once and in the middle of epochs, seats are given up, processes die before they take theirs, rescales are cancelled, bins move without any.
//! Once the workers are threads of one process, and once processes between which the seed moves the frames.
//!
//! `PENSTOCK_SEEDS=10000 cargo test -p penstock-plan --lib rescaling` tries more seeds than the usual; a seed that fails says how to run it
//! again.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::Int64Type;
use arrow_array::{Array, ArrayRef, BooleanArray, Int64Array, RecordBatch};
use arrow_schema::{DataType, Field, Schema};
use penstock_dataflow::fabric::{self, FabricGuard, FabricTag, Ticket, Wire};
use penstock_dataflow::{Door, Endpoint, Worker};
use penstock_pace::{Cadence, Moves, Order};

use super::build::{self, Shared};
use super::crew::{Guest, Turn};
use super::feed::{PartitionRows, deal};
use super::group::GroupConfig;
use super::resident::Resident;
use super::rows::Rows;
use super::stats::Gauges;
use super::worker::{Command, End, Release, Told, WorkerLoop};
use crate::callback::{CallError, Callbacks, EpochEnd, Expansion, ForeignState, Grouped, SideRows, Spoiled, States};
use crate::error::StateFault;
use crate::plan::Plan;
use crate::spec::schema_to_text;

const BITS: u8 = 3;
const TAG: FabricTag = FabricTag { query: 7, generation: 1 };

/// splitmix64.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

// Plans and their functions

fn schema(names: &[&str]) -> Schema {
    let kind = |name: &str| if name == "again" { DataType::Boolean } else { DataType::Int64 };
    Schema::new(names.iter().map(|name| Field::new(*name, kind(name), true)).collect::<Vec<_>>())
}

fn rows(names: &[&str], all: &[Vec<i64>]) -> RecordBatch {
    let column = |at: usize| -> ArrayRef {
        let values = all.iter().map(|row| row[at]);
        match names[at] {
            "again" => Arc::new(values.map(|value| Some(value != 0)).collect::<BooleanArray>()),
            _ => Arc::new(Int64Array::from_iter_values(values)),
        }
    };
    RecordBatch::try_new(Arc::new(schema(names)), (0..names.len()).map(column).collect()).unwrap()
}

fn read(batch: &RecordBatch) -> Vec<Vec<i64>> {
    let columns: Vec<_> = batch.columns().iter().map(|column| column.as_primitive::<Int64Type>()).collect();
    (0..batch.num_rows()).map(|row| columns.iter().map(|column| column.value(row)).collect()).collect()
}

const KVT: [&str; 3] = ["k", "v", "t"];
/// Calls: 0 and 1 are maps, 2 expands, the others keep state.
const PLUS: usize = 0;
const TIMED: usize = 4;
const TOLD: usize = 5;

struct Functions;

impl Callbacks for Functions {
    fn map(&self, call: usize, batch: &RecordBatch, _: &mut SideRows) -> Result<RecordBatch, CallError> {
        let mut all = read(batch);
        if call == PLUS {
            all.iter_mut().for_each(|row| row[1] += 1);
            return Ok(rows(&KVT, &all));
        }
        all.iter_mut().for_each(|row| {
            row[1] /= 2;
            row.push(i64::from(row[1] > 4));
        });
        Ok(rows(&["k", "v", "t", "again"], &all))
    }

    fn expand(&self, _: usize, batch: &RecordBatch, _: bool) -> Result<Box<dyn Expansion>, CallError> {
        Ok(Box::new(Each { inputs: read(batch).into(), made: VecDeque::new() }))
    }

    fn new_state(&self, _: usize) -> Box<dyn ForeignState> {
        Box::<Memory>::default()
    }

    fn apply(&self, call: usize, block: &mut Grouped<'_>, _: &mut SideRows) -> Result<RecordBatch, CallError> {
        block.each(|state: &mut Memory, batch| Ok(state.apply(call, batch)))
    }

    fn end_epoch(
        &self,
        call: usize,
        end: &EpochEnd,
        states: &mut States<'_>,
        _: &mut SideRows,
    ) -> Result<Vec<RecordBatch>, CallError> {
        let made: Vec<_> =
            states.held().into_iter().flat_map(|bin| states.of::<Memory>(bin).end_epoch(call, end)).collect();
        Ok(if made.is_empty() { Vec::new() } else { vec![rows(&KVT, &made)] })
    }
}

/// Rows of each row: as many as its value has left over by three.
struct Each {
    inputs: VecDeque<Vec<i64>>,
    made: VecDeque<Vec<i64>>,
}

impl Expansion for Each {
    fn left(&self) -> u64 {
        self.inputs.len() as u64 + u64::from(!self.made.is_empty())
    }

    fn draw(&mut self, room: usize, _: &mut SideRows) -> (Vec<RecordBatch>, Result<(), Spoiled>) {
        let mut drawn = Vec::new();
        while drawn.len() < room {
            if let Some(made) = self.made.pop_front() {
                drawn.push(made);
            } else if let Some(row) = self.inputs.pop_front() {
                self.made.extend((0..row[1].rem_euclid(3)).map(|more| vec![row[0], row[1] + more, row[2]]));
            } else {
                break;
            }
        }
        (vec![rows(&KVT, &drawn)], Ok(()))
    }
}

/// What a key has.
#[derive(Clone, Default)]
struct Kept {
    total: i64,
    /// Whether it was touched in this epoch.
    touched: bool,
    /// Times in milliseconds, and values.
    timers: Vec<(i64, i64)>,
}

/// The state of a bin.
#[derive(Default)]
struct Memory(BTreeMap<i64, Kept>);

impl Memory {
    fn apply(&mut self, call: usize, batch: &RecordBatch) -> RecordBatch {
        let mut made = Vec::new();
        for row in read(batch) {
            let kept = self.0.entry(row[0]).or_default();
            match call {
                // In any order: it speaks at the end of the epoch.
                TOLD => (kept.total, kept.touched) = (kept.total + row[1], true),
                // Rows out of order would show.
                _ => {
                    kept.total = (kept.total * 31 + row[1]) % 1_000_003;
                    made.push(vec![row[0], kept.total, row[2]]);
                    if call == TIMED {
                        kept.timers.push((row[2] + 150, row[1]));
                    }
                }
            }
        }
        rows(&KVT, &made)
    }

    fn end_epoch(&mut self, call: usize, end: &EpochEnd) -> Vec<Vec<i64>> {
        let mut made = Vec::new();
        for (key, kept) in &mut self.0 {
            if call == TOLD && std::mem::take(&mut kept.touched) {
                made.push(vec![*key, kept.total, end.clock_ms.unwrap_or(-1)]);
            }
            let reached = end.after_us.map_or(i64::MIN, |us| us / 1000);
            let mut due: Vec<_> = kept.timers.extract_if(.., |(time, _)| *time <= reached).collect();
            due.sort_unstable();
            for (time, value) in due {
                kept.total = (kept.total * 3 + value) % 1_000_003;
                made.push(vec![*key, kept.total, time]);
            }
        }
        made
    }
}

impl ForeignState for Memory {
    fn encode(&self, encoding: &mut penstock_bins::Encoding) -> Result<Option<Vec<u8>>, StateFault> {
        let left = encoding.place(|| self.0.clone().into_iter());
        let number = |(key, kept): (i64, Kept)| {
            let timers = kept.timers.iter().flat_map(|(time, value)| [*time, *value]);
            let numbers = [key, kept.total, i64::from(kept.touched)].into_iter().chain(timers);
            numbers.flat_map(i64::to_le_bytes).collect()
        };
        Ok(left.next().map(number))
    }

    fn absorb(&mut self, chunk: &[u8]) -> Result<(), StateFault> {
        let numbers: Vec<i64> = chunk.chunks(8).map(|word| i64::from_le_bytes(word.try_into().unwrap())).collect();
        let timers = numbers[3..].chunks(2).map(|pair| (pair[0], pair[1])).collect();
        let kept = Kept { total: numbers[1], touched: numbers[2] != 0, timers };
        assert!(self.0.insert(numbers[0], kept).is_none(), "a key came twice");
        Ok(())
    }

    fn bytes(&self) -> usize {
        24 * self.0.len()
    }

    fn keys(&self) -> usize {
        self.0.len()
    }

    fn mark(&mut self) {}

    fn rollback(&mut self) -> Result<(), StateFault> {
        unreachable!("nothing is undone without a journal")
    }
}

/// Steps of a plan, over `k`, `v` and the time `t` of one or two inputs. `{kvt}` and the like stand for schemas.
const PLANS: [&str; 10] = [
    // Updates.
    r#"{"op":"key_by","columns":["k"]},{"op":"agg","emit":"update","aggs":[{"name":"n","fn":"count"},{"name":"s","fn":"sum","column":"v"}]}"#,
    // Windows.
    r#"{"op":"key_by","columns":["k"]},{"op":"window","kind":"tumbling","size_us":400000},
       {"op":"agg","aggs":[{"name":"n","fn":"count"},{"name":"s","fn":"sum","column":"v"}]}"#,
    // State by the order of rows, then timers, each with what is behind it.
    r#"{"op":"stateful_map","call":3,"columns":["k"],"schema":"{kvt}"},{"op":"flat_map","call":2,"schema":"{kvt}","rows":true}"#,
    r#"{"op":"stateful_map","call":4,"ends":true,"columns":["k"],"schema":"{kvt}"},
       {"op":"stateful_map","call":5,"ends":true,"columns":["v"],"schema":"{kvt}"}"#,
    // A loop, a bounded part, and both before keys.
    r#"{"op":"iterate","again":"again","body":[{"op":"map_batches","call":1,"schema":"{kvta}"}]},
       {"op":"key_by","columns":["k"]},{"op":"agg","emit":"update","aggs":[{"name":"n","fn":"count"},{"name":"s","fn":"sum","column":"v"}]}"#,
    r#"{"op":"bounded","batches":2,"batch_size":3,"body":[{"op":"flat_map","call":2,"schema":"{kvt}","rows":true},
         {"op":"flat_map","call":2,"schema":"{kvt}","rows":true}]}"#,
    r#"{"op":"bounded","batches":1,"batch_size":2,"body":[{"op":"flat_map","call":2,"schema":"{kvt}","rows":true},
         {"op":"iterate","again":"again","body":[{"op":"map_batches","call":0,"schema":"{kvt}"},{"op":"map_batches","call":1,"schema":"{kvta}"}]}]},
       {"op":"stateful_map","call":5,"ends":true,"columns":["k"],"schema":"{kvt}"}"#,
    // Two keyed steps.
    r#"{"op":"distinct","columns":["k","v"]},{"op":"key_by","columns":["v"]},
       {"op":"agg","emit":"update","aggs":[{"name":"n","fn":"count"}]}"#,
    r#"{"inputs":[0,1],"op":"join","left":["k"],"right":["k"],"within":[-200000,200000],"suffix":"_b"},
       {"op":"key_by","columns":["v"]},{"op":"agg","emit":"update","aggs":[{"name":"n","fn":"count"},{"name":"s","fn":"sum","column":"v_b"}]}"#,
    // Windows of two inputs behind a loop, and the best of each.
    r#"{"inputs":[0,1],"op":"union"},{"op":"iterate","again":"again","body":[{"op":"map_batches","call":1,"schema":"{kvta}"}]},
       {"op":"window","kind":"sliding","size_us":400000,"every_us":200000},
       {"op":"top","n":2,"by":"v","per":"window"}"#,
];

fn plan(steps: &str) -> Arc<Plan> {
    let steps = steps.replace("{kvta}", &schema_to_text(&schema(&["k", "v", "t", "again"])));
    let steps = steps.replace("{kvt}", &schema_to_text(&schema(&KVT)));
    let source = |name: &str| {
        format!(r#"{{"name":"{name}","schema":"{}","event_time":"t","lateness_ms":0}}"#, schema_to_text(&schema(&KVT)))
    };
    let two = steps.contains("[0,1]");
    let sources = if two { [source("a"), source("b")].join(",") } else { source("a") };
    let text = format!(r#"{{"version":2,"sources":[{sources}],"steps":[{steps}]}}"#);
    Arc::new(Plan::from_json(&text).unwrap_or_else(|error| panic!("{error} in {text}")))
}

// What is fed and what comes of it

/// What is released as one epoch.
struct Fed {
    inputs: Vec<PartitionRows>,
    end: Option<End>,
}

fn feed(dice: &mut Dice, sources: usize, epochs: u64) -> Vec<Fed> {
    let mut reached = i64::MIN;
    let epoch = |epoch: u64| {
        let (mut inputs, mut before) = (Vec::new(), 0);
        for source in 0..sources {
            let row = |dice: &mut Dice| {
                let time = 300 * epoch as i64 + dice.below(600) as i64 - 300;
                vec![dice.below(11) as i64, dice.below(40) as i64, time]
            };
            let all: Vec<_> = (0..dice.below(40)).map(|_| row(dice)).collect();
            let batches = all.chunks(12).map(|some| rows(&KVT, some).into()).collect();
            inputs.push(PartitionRows { source: source as u8, partition: 0, batches, rows_before: before });
            before += all.len() as u64;
        }
        // Rows of an epoch that goes on in the next one have no end.
        let ends = epoch + 1 == epochs || dice.chance(85);
        let end = ends.then(|| {
            reached = reached.max((300 * (epoch as i64 + 1) - dice.below(400) as i64) * 1000);
            let watermark = if epoch + 1 == epochs { i64::MAX } else { reached };
            End { watermark: Some(watermark), clock_ms: Some(epoch as i64) }
        });
        Fed { inputs, end }
    };
    (0..epochs).map(epoch).collect()
}

/// By epoch, the rows and the late ones, as text.
#[derive(Debug, Default, PartialEq, Eq)]
struct Made(BTreeMap<u64, [Vec<String>; 2]>);

impl Made {
    fn add(&mut self, epoch: u64, late: bool, batch: &RecordBatch) {
        let cell = |column: &ArrayRef, row: usize| match column.as_primitive_opt::<Int64Type>() {
            Some(numbers) if !numbers.is_null(row) => numbers.value(row).to_string(),
            _ => format!("{:?}", column.slice(row, 1)),
        };
        let text = |row| batch.columns().iter().map(|column| cell(column, row)).collect::<Vec<_>>().join(" ");
        self.0.entry(epoch).or_default()[usize::from(late)].extend((0..batch.num_rows()).map(text));
    }

    fn sorted(mut self) -> Self {
        self.0.values_mut().flatten().for_each(|rows| rows.sort_unstable());
        self
    }
}

/// The worker that is fed, and what it has told.
struct First {
    worker: WorkerLoop,
    gauges: Arc<Gauges>,
    config: GroupConfig,
    made: Made,
    done: BTreeSet<u64>,
    migrated: BTreeSet<u64>,
}

impl First {
    fn new(seat: Endpoint, config: &GroupConfig) -> Self {
        let shared = Shared::new(config, &[0], &mut Resident::fresh()).unwrap();
        let mut worker = Worker::new(seat);
        let built = build::build(&mut worker, config, &shared, None).unwrap();
        assert!(!worker.bootstrap().unwrap());
        let gauges = Arc::new(Gauges::new(&config.routings));
        let worker = WorkerLoop::new(worker, built, build::pace(config), gauges.clone());
        let (made, done, migrated) = Default::default();
        First { worker, gauges, config: config.clone(), made, done, migrated }
    }

    fn release(&mut self, epoch: u64, fed: &Fed) {
        let ordered = self.config.plan.needs_order();
        let slices = deal(fed.inputs.clone(), self.config.slice_rows, 1, ordered).unwrap().remove(0).into();
        self.worker.command(Command::Release(Release { epoch, slices, end: fed.end }));
    }

    fn turn(&mut self) {
        let mut told = Vec::new();
        self.worker.turn(&mut |item| told.push(item)).unwrap_or_else(|error| panic!("the first worker: {error}"));
        for item in told {
            match item {
                Told::Epoch { epoch, outputs, beside, .. } => {
                    self.done.insert(epoch);
                    self.made.0.entry(epoch).or_default();
                    outputs.into_iter().for_each(|rows| self.made.add(epoch, false, &Rows::into_here(rows)));
                    beside.into_iter().for_each(|rows| self.made.add(epoch, true, &Rows::into_here(rows)));
                }
                Told::Rows { epoch, rows, beside, bytes } => {
                    let begun = epoch == 0 || self.done.contains(&(epoch - 1));
                    assert!(
                        begun || !self.config.one_by_one,
                        "rows of epoch {epoch} came before the end of the one before"
                    );
                    self.made.add(epoch, beside, &rows);
                    self.worker.command(Command::Taken(bytes));
                }
                Told::Migrated(migrated) => {
                    assert_eq!(migrated.refused, None);
                    self.migrated.insert(migrated.handle);
                    self.worker.refresh();
                }
            }
        }
    }
}

/// What one worker makes of it alone.
fn alone(config: &GroupConfig, fed: &[Fed]) -> Made {
    let config = GroupConfig { gather: false, eager: false, ..config.clone() };
    let mut first = First::new(fabric::threads(1).remove(0), &config);
    (0..).zip(fed).for_each(|(epoch, fed)| first.release(epoch, fed));
    while first.done.len() < fed.len() {
        first.turn();
    }
    first.made.sorted()
}

// Who comes and goes

/// The workers that a process asks for at once.
struct Crew {
    /// The process, where there are some.
    process: usize,
    ticket: Option<Ticket>,
    guests: Vec<(usize, Guest)>,
    joined: BTreeSet<usize>,
    leave: bool,
    /// It will not come any more.
    failed: bool,
}

impl Crew {
    fn has_ended(&self) -> bool {
        self.ticket.is_none() && self.guests.is_empty()
    }
}

/// What the host does, as `_crew.py` does it.
#[derive(Default)]
struct Rescale {
    /// Numbers of crews.
    coming: Vec<usize>,
    going: Vec<usize>,
    migration: Option<u64>,
    /// Whether bins were moved that could stay.
    shaken: bool,
    moved: bool,
    goes_back: bool,
}

/// The processes of a run, and who moves what they send.
#[derive(Default)]
struct Processes {
    seed: u64,
    /// None for one that has left or died.
    doors: Vec<Option<(Door, FabricGuard)>>,
    /// By process, and the one at the other end.
    wires: BTreeMap<(usize, usize), Wire>,
}

impl Processes {
    /// One more process with links to all others.
    fn start(&mut self, founding: usize) -> (Vec<Endpoint>, Door) {
        let process = self.doors.len();
        let seed = self.seed ^ (process as u64) << 48;
        let (seats, door, guard) = fabric::simulated_process(process, founding, founding, TAG, seed).unwrap();
        for (other, there) in self.doors.iter().enumerate() {
            let Some((there, _)) = there else { continue };
            self.wires.insert((process, other), door.wire(other).unwrap());
            self.wires.insert((other, process), there.wire(process).unwrap());
        }
        self.doors.push(Some((door.clone(), guard)));
        (seats, door)
    }

    /// Some frames of some link leave their lanes, and some arrive.
    fn carry(&self, dice: &mut Dice) {
        let Some((from, to)) = self.wires.keys().nth(dice.below(self.wires.len().max(1) as u64) as usize) else {
            return;
        };
        if let (Some(here), Some(there)) = (self.wires.get(&(*from, *to)), self.wires.get(&(*to, *from))) {
            (0..dice.below(6)).for_each(|_| here.take(dice.chance(50)));
            let count = dice.below(here.under_way() as u64 + 1);
            here.carry(there, count as usize).unwrap_or_else(|error| panic!("from {from} to {to}: {error}"));
        }
    }

    /// Ends a process as a signal does.
    fn kill(&mut self, process: usize) {
        self.doors[process] = None;
        for other in 0..self.doors.len() {
            if let Some(wire) = self.wires.remove(&(other, process)) {
                wire.cut();
            }
            self.wires.remove(&(process, other));
        }
    }
}

/// What happened in runs.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    joined: usize,
    left: usize,
    failed: usize,
    cancelled: usize,
    moved: usize,
    rows: usize,
    late: usize,
}

struct Run {
    dice: Dice,
    config: GroupConfig,
    first: First,
    /// Of threads of one process; else one of the processes'.
    door: Option<Door>,
    processes: Processes,
    crews: Vec<Crew>,
    now: Option<Rescale>,
    rescales: u64,
    handles: u64,
    seen: Seen,
}

impl Run {
    fn new(seed: u64, config: GroupConfig, linked: bool) -> Self {
        let mut processes = Processes { seed, ..Processes::default() };
        let (mut seats, door) = match linked {
            true => (processes.start(1).0, None),
            false => {
                let (seats, door) = fabric::joinable_shuffled(1, seed);
                (seats, Some(door))
            }
        };
        let first = First::new(seats.remove(0), &config);
        let mut dice = Dice(seed ^ 0x5eed);
        let rescales = 2 + dice.below(5);
        let (crews, seen) = (Vec::new(), Seen::default());
        Run { dice, config, first, door, processes, crews, now: None, rescales, handles: 0, seen }
    }

    /// The crews that are there, by number.
    fn there(&self) -> Vec<usize> {
        (0..self.crews.len()).filter(|at| !self.crews[*at].has_ended() && !self.crews[*at].failed).collect()
    }

    fn begin(&mut self) {
        self.rescales -= 1;
        let there = self.there();
        let mut rescale = Rescale::default();
        match self.dice.below(5) {
            0 | 1 if there.len() < 3 => {
                for _ in 0..=self.dice.below(2) {
                    rescale.coming.push(self.crews.len());
                    self.start();
                }
            }
            // Bins move, and that is all.
            4 => {}
            _ => {
                let count = self.dice.below(there.len() as u64 + 1) as usize;
                rescale.going = there[there.len() - count..].to_vec();
            }
        }
        self.now = Some(rescale);
    }

    fn start(&mut self) {
        let count = 1 + self.dice.below(3) as usize;
        let (process, door) = match &self.door {
            Some(door) => (0, door.clone()),
            None => (self.processes.doors.len(), self.processes.start(0).1),
        };
        let ticket = Some(door.ask(count).expect("more than none"));
        let (guests, joined) = Default::default();
        self.crews.push(Crew { process, ticket, guests, joined, leave: false, failed: false });
    }

    /// Those who come take their seats when they are there.
    fn seat(&mut self, at: usize) {
        let crew = &mut self.crews[at];
        let Some(ticket) = &crew.ticket else { return };
        if self.door.is_none() && self.dice.chance(1) {
            crew.ticket = None;
            self.fail(at);
            return;
        }
        let seats = match ticket.try_seats() {
            Ok(Some(seats)) => seats,
            Ok(None) => return,
            Err(error) => panic!("crew {at} gets no seats: {error}"),
        };
        crew.ticket = None;
        if self.dice.chance(10) {
            drop(seats);
            self.fail(at);
            return;
        }
        let local: Vec<usize> = seats.iter().map(Endpoint::index).collect();
        let shared = Shared::new(&self.config, &local, &mut Resident::fresh()).unwrap();
        for seat in seats {
            let id = seat.index();
            crew.guests.push((id, Guest::new(Worker::new(seat), &self.config, &shared).unwrap()));
        }
    }

    /// A crew ends of which nobody has taken a seat.
    fn fail(&mut self, at: usize) {
        self.seen.failed += 1;
        self.crews[at].failed = true;
        if self.door.is_none() {
            self.processes.kill(self.crews[at].process);
        }
    }

    fn step(&mut self, at: usize) {
        self.seat(at);
        let crew = &mut self.crews[at];
        if crew.guests.is_empty() {
            return;
        }
        let chosen = self.dice.below(crew.guests.len() as u64) as usize;
        for _ in 0..=self.dice.below(4) {
            let (id, guest) = &mut crew.guests[chosen];
            let turn = guest.turn(crew.leave, false).unwrap_or_else(|error| panic!("worker {id}: {error}"));
            match turn {
                Turn::Waited | Turn::Worked => {}
                Turn::Joined => {
                    self.seen.joined += 1;
                    crew.joined.insert(*id);
                }
                Turn::Ended => {
                    assert!(crew.leave, "worker {id} has left unasked");
                    self.seen.left += 1;
                    drop(crew.guests.remove(chosen));
                    break;
                }
            }
        }
        if self.door.is_none() && self.crews[at].has_ended() {
            // It says goodbye.
            self.processes.doors[self.crews[at].process] = None;
        }
    }

    /// Goes on with the rescale.
    fn drive(&mut self) {
        let Some(mut now) = self.now.take() else { return };
        let failed = now.coming.iter().any(|at| self.crews[*at].failed);
        let cancelled = !now.moved && self.dice.below(400) == 0;
        if !now.goes_back && (failed || cancelled) {
            self.seen.cancelled += usize::from(cancelled);
            (now.goes_back, now.moved) = (true, false);
            now.going = now.coming.drain(..).filter(|at| !self.crews[*at].failed).collect();
            if let Some(handle) = now.migration {
                self.first.worker.command(Command::Cancel(handle));
            }
        }
        if !self.goes_on(&mut now) {
            self.now = Some(now);
        }
    }

    /// Whether it has ended.
    fn goes_on(&mut self, now: &mut Rescale) -> bool {
        let members: BTreeSet<usize> = self.first.gauges.members().into_iter().map(|id| id as usize).collect();
        let there = |at: &usize| {
            let crew = &self.crews[*at];
            let all = !crew.guests.is_empty() && crew.joined.len() == crew.guests.len();
            all && crew.joined.is_subset(&members)
        };
        if !now.coming.iter().all(there) {
            return false;
        }
        if !now.moved {
            if let Some(handle) = now.migration {
                if self.first.migrated.contains(&handle) {
                    now.migration = None;
                }
                // What it has left undone, if anything, is looked for again.
                return false;
            }
            let stay = self.there().into_iter().filter(|at| !now.going.contains(at));
            let mut workers: Vec<usize> = stay.flat_map(|at| self.crews[at].joined.iter().copied()).collect();
            if workers.is_empty() {
                workers.push(0);
            }
            let owners = self.first.gauges.owners().first().cloned().unwrap_or_default();
            let shakes = !std::mem::replace(&mut now.shaken, true);
            let mut steps = Vec::new();
            for (bin, owner) in (0_u32..).zip(owners) {
                if !workers.contains(&(owner as usize)) || shakes && self.dice.chance(60) {
                    steps.push((bin, workers[self.dice.below(workers.len() as u64) as usize] as u32));
                }
            }
            now.moved = steps.is_empty();
            if !now.moved {
                let size = 1 + self.dice.below(8) as usize;
                let plan = Moves::Steps(steps.chunks(size).map(<[_]>::to_vec).collect());
                let order = Order { handle: self.handles, plan, cadence: Cadence::default(), at_epoch: None };
                self.first.worker.command(Command::Migrate(order));
                now.migration = Some(self.handles);
                self.handles += 1;
                self.seen.moved += steps.len();
                return false;
            }
        }
        now.going.iter().for_each(|at| self.crews[*at].leave = true);
        now.going.iter().all(|at| self.crews[*at].has_ended())
    }
}

/// One run; panics when something is wrong.
fn simulate(seed: u64, linked: bool) -> Seen {
    let mut dice = Dice(seed);
    let plan = plan(PLANS[seed as usize % PLANS.len()]);
    let mut config = GroupConfig::founding(plan.clone(), Arc::new(Functions), BITS, 1);
    (config.slice_rows, config.window) = (1 + dice.below(9) as usize, 1 + dice.below(4) as u32);
    (config.ship_bytes, config.gather) = (1 + dice.below(80) as usize, true);
    config.eager = plan.is_metered() && dice.chance(50);
    config.one_by_one = config.eager && dice.chance(50);
    let epochs = 2 + dice.below(6);
    let fed = feed(&mut dice, plan.sources().len(), epochs);
    let expected = alone(&config, &fed);
    let mut run = Run::new(seed, config, linked);
    let (mut released, mut turns) = (0, 0_u64);
    while run.first.done.len() < fed.len() || run.now.is_some() || run.rescales > 0 {
        turns += 1;
        assert!(turns < 100_000, "it hangs: {}", describe(&run, released));
        // Often more waits than is fed.
        if released < fed.len() && run.dice.below(60) == 0 {
            run.first.release(released as u64, &fed[released]);
            released += 1;
        }
        if run.now.is_none() && run.rescales > 0 && run.dice.below(20) == 0 {
            run.begin();
        }
        run.drive();
        if linked {
            for _ in 0..run.dice.below(4) {
                run.processes.carry(&mut run.dice);
            }
        }
        match run.dice.below(run.crews.len() as u64 + 1) {
            0 => (0..=run.dice.below(6)).for_each(|_| run.first.turn()),
            at => run.step(at as usize - 1),
        }
    }
    let made = std::mem::take(&mut run.first.made).sorted();
    for (epoch, expected) in &expected.0 {
        assert_eq!(&made.0[epoch], expected, "epoch {epoch} of plan {}", seed as usize % PLANS.len());
        run.seen.rows += expected[0].len();
        run.seen.late += expected[1].len();
    }
    run.seen
}

fn describe(run: &Run, released: usize) -> String {
    let crew = |crew: &Crew| {
        let ids: Vec<usize> = crew.guests.iter().map(|(id, _)| *id).collect();
        format!("{ids:?}, of which joined {:?}, leave {}, failed {}", crew.joined, crew.leave, crew.failed)
    };
    let crews = run.crews.iter().map(crew).collect::<Vec<_>>().join("; ");
    let now = run.now.as_ref().map(|now| (&now.coming, &now.going, now.migration, now.moved, now.goes_back));
    let (members, owners) = (run.first.gauges.members(), run.first.gauges.owners());
    format!("epochs done {:?} of {released}; {crews}; {now:?}; members {members:?}, owners {owners:?}", run.first.done)
}

/// Runs all seeds: `PENSTOCK_SEED` alone, or `PENSTOCK_SEEDS` from 0 on.
fn try_all(test: &str, usual: u64, linked: bool) {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().expect("a number of seeds"));
    let seeds = match number("PENSTOCK_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("PENSTOCK_SEEDS").unwrap_or(usual),
    };
    let (mut all, many) = (Seen::default(), seeds.end - seeds.start >= usual);
    for seed in seeds {
        match catch_unwind(AssertUnwindSafe(|| simulate(seed, linked))) {
            Ok(seen) => {
                all.joined += seen.joined;
                all.left += seen.left;
                all.failed += seen.failed;
                all.cancelled += seen.cancelled;
                all.moved += seen.moved;
                all.rows += seen.rows;
                all.late += seen.late;
            }
            Err(panic) => {
                eprintln!("replay: PENSTOCK_SEED={seed} cargo test -p penstock-plan --lib rescaling::{test}");
                std::panic::resume_unwind(panic);
            }
        }
    }
    println!("{all:?}");
    let all_kinds = [all.joined, all.left, all.failed, all.cancelled, all.moved, all.rows, all.late];
    assert!(!many || all_kinds.iter().all(|count| *count > 2), "{all:?}");
}

#[test]
fn processes_that_come_and_go_give_the_rows_of_one_worker() {
    try_all("processes_that_come_and_go_give_the_rows_of_one_worker", 36, true);
}

#[test]
fn threads_that_come_and_go_give_the_rows_of_one_worker() {
    try_all("threads_that_come_and_go_give_the_rows_of_one_worker", 36, false);
}
