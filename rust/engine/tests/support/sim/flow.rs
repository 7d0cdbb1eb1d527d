//! A worker of the simulated flow: the pacer and the leader that run plans, in virtual time, over the real dataflow, F, S, tables and shelf.
//!
//! What a row means is its own: sums per key (`ledger`), whose records and outputs tell attempts apart.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use penstock_bins::{
    BinTable, BinsError, BoxError, Command, Config, Control, ControlInput, Keyed, Moment, Range, Routing, Shelf, Stats,
    range_of, stateful_divided,
};
use penstock_dataflow::{Endpoint, Error, InputHandle, Worker};
use penstock_progress::FlowTime;

use super::ledger::{Ledger, Out, Row, Tagged, Value, hash};
use crate::pace::{Cadence, Driven, Leader, MARK, Migrated, Moves, Order, Pace, Pacer, Probes, Refusal, Release};

/// Slices that may be under way.
const WINDOW: u32 = 4;
/// When virtual time began.
static BEGAN: LazyLock<Instant> = LazyLock::new(Instant::now);

pub type Block = Keyed<u64, Tagged>;
/// What a worker takes of an epoch: by range, the changed keys with their values.
pub type Record = Vec<(Range, Vec<(u64, Option<Value>)>)>;

/// An epoch's share of a worker.
pub struct Share {
    pub epoch: u64,
    pub slices: Vec<Vec<Row>>,
    pub end: End,
}

/// What an epoch ends with.
#[derive(Clone, Copy)]
pub struct End {
    pub watermark: Option<i64>,
    pub clock: i64,
    pub finish: bool,
}

/// Some rows of an epoch, and its processing time.
struct Slice {
    rows: Vec<Row>,
    clock: i64,
}

/// What a worker tells its host.
pub enum Told {
    Epoch { epoch: u64, rows: Vec<Out>, late: u64, record: Record },
    Migrated { handle: u64, times: Vec<(u64, u32)>, refused: Option<String> },
}

type Made = Rc<RefCell<BTreeMap<u64, Vec<Out>>>>;

/// The dataflow of a worker, as the pacer drives it.
struct Seat {
    worker: Worker,
    input: InputHandle<FlowTime, Block>,
    probes: Probes,
    table: Rc<RefCell<BinTable<Ledger>>>,
    shelf: Shelf<Ledger>,
    started: Rc<Cell<u64>>,
    late: u64,
    salt: u64,
    watermark: Option<i64>,
    /// Milliseconds of virtual time.
    now: u64,
}

pub struct Loop {
    seat: Seat,
    pacer: Pacer<Slice, End>,
    made: Made,
    /// Something was asked for, or the last turn did something.
    busy: bool,
}

/// What a loop starts with.
pub struct LoopSetup {
    pub endpoint: Endpoint,
    pub routing: Routing,
    pub table: BinTable<Ledger>,
    pub shelf: Shelf<Ledger>,
    pub local: Vec<usize>,
    pub epoch: u64,
    pub watermark: Option<i64>,
    pub salt: u64,
}

impl Driven for Seat {
    type Slice = Slice;
    type End = End;
    type Error = Error;

    fn probes(&self) -> &Probes {
        &self.probes
    }

    fn time(&self) -> FlowTime {
        *self.input.time()
    }

    fn advance(&mut self, to: FlowTime) {
        self.input.advance_to(to).expect("slices and epochs ascend");
    }

    fn mark(&mut self, epoch: u64) {
        self.table.borrow_mut().mark_all(epoch);
        if let Some(last) = epoch.checked_sub(1) {
            self.shelf.close_epoch(last);
        }
    }

    fn changes(&self) -> u64 {
        self.started.get()
    }

    fn is_congested(&self) -> bool {
        self.worker.is_congested()
    }

    fn send(&mut self, slice: Slice) -> Result<(Instant, u64), Error> {
        let Slice { rows, clock } = slice;
        let count = rows.len() as u64;
        let (late, rows): (Vec<Row>, Vec<Row>) =
            rows.into_iter().partition(|row| self.watermark.is_some_and(|watermark| row.time < watermark));
        self.late += late.len() as u64;
        let (salt, epoch) = (self.salt, self.time().epoch);
        let tagged = |row: Row| (row.key, Tagged { row, salt, clock, epoch });
        self.input.send(Keyed::new(rows.into_iter().map(tagged).collect(), hash));
        Ok((self.now(), count))
    }

    fn end(&mut self, end: End) {
        self.watermark = self.watermark.max(end.watermark);
        // It travels in the epoch's last slice, each worker's own.
        let row = Row { key: 0, amount: 0, time: 0, last: end.finish };
        let tagged = Tagged { row, salt: self.salt, clock: end.clock, epoch: self.time().epoch };
        self.input.send(Keyed::local(vec![(0, tagged)]));
    }

    fn now(&self) -> Instant {
        *BEGAN + Duration::from_millis(self.now)
    }
}

impl Loop {
    pub fn new(setup: LoopSetup) -> Result<Loop, BoxError> {
        let mut worker = Worker::new(setup.endpoint);
        let index = worker.index();
        let (routing, local) = (setup.routing.clone(), setup.local);
        let table = Rc::new(RefCell::new(setup.table));
        let config = Config {
            name: "sums".into(),
            routing: setup.routing,
            table: Rc::clone(&table),
            shelf: setup.shelf.clone(),
            local: Rc::new(move |worker| local.contains(&worker)),
            new_state: Rc::new(Ledger::default),
            begins: Rc::new(|time: &FlowTime| (time.slice < MARK).then_some(time.epoch)),
            record: true,
            ship_bytes: 64, // several pieces a bin
            hot_first: true,
            stats: Arc::new(Stats::new()),
        };
        let made = Made::default();
        let making = Rc::clone(&made);
        let logic = move |moment: Moment<'_, FlowTime, Block, Ledger, (), ()>| -> Result<(), BoxError> {
            let mut made = making.borrow_mut();
            for block in moment.blocks {
                let outputs = made.entry(moment.time.epoch).or_default();
                if !block.is_hashed() {
                    if !block.rows()[0].1.row.last {
                        continue;
                    }
                    for (_, state) in moment.bins.owned_mut() {
                        let held: Vec<(u64, Value)> = state.iter().map(|(key, value)| (*key, *value)).collect();
                        for (key, value) in held {
                            let tagged = block.rows()[0].1;
                            outputs.push((key, 0, value.sum, tagged.clock, tagged.salt));
                            state.remove(key);
                        }
                    }
                    continue;
                }
                for (hashed, key, tagged) in block.into_hashed_rows() {
                    let bin = moment.bins.bin_of(hashed);
                    let state = moment.bins.get_mut(bin).ok_or(BinsError::Absent { bin })?;
                    outputs.push(state.entry(key).take(tagged));
                    if tagged.row.last {
                        state.remove(key);
                    }
                }
            }
            Ok(())
        };
        let start = FlowTime::new(setup.epoch, 0);
        let (input, control, probes, started) = worker.dataflow::<FlowTime, _>("flow", |scope| {
            let (mut input, blocks) = scope.new_input::<Block>();
            let (mut control, commands) = scope.new_input::<Vec<Control>>();
            input.advance_to(start)?;
            control.advance_to(start)?;
            let (sent, blocks) = blocks.probe();
            let (passed, commands) = commands.probe();
            let built = stateful_divided(&blocks, &commands, config, Some(Rc::new(|(): &()| 0)), logic)?;
            let probes = Probes { input: sent, control: passed, output: built.probe };
            Ok::<_, BoxError>((input, control, probes, built.started))
        })?;
        let peers = worker.peers();
        let leader = (index == 0).then(|| Leader::new(ControlInput::new(control, routing, peers)));
        let pace = Pace { window: WINDOW, apart: false, journal: true, record: true, overlaps: true };
        let (shelf, salt, watermark) = (setup.shelf, setup.salt, setup.watermark);
        let seat = Seat { worker, input, probes, table, shelf, started, late: 0, salt, watermark, now: 0 };
        Ok(Loop { seat, pacer: Pacer::new(pace, leader, true), made, busy: true })
    }

    pub fn index(&self) -> usize {
        self.seat.worker.index()
    }

    pub fn release(&mut self, share: Share) {
        self.busy = true;
        let Share { epoch, slices, end } = share;
        let clock = end.clock;
        let slices: VecDeque<_> = (MARK + 1..).zip(slices.into_iter().map(|rows| Slice { rows, clock })).collect();
        self.pacer.release(Release { epoch, slices, end: Some(end) });
    }

    pub fn migrate(
        &mut self,
        handle: u64,
        steps: Vec<Vec<(u32, u32)>>,
        max_pause_ms: Option<u32>,
        drains: bool,
        at_epoch: Option<u64>,
    ) {
        self.busy = true;
        let max_pause = max_pause_ms.map(|ms| Duration::from_millis(ms.into()));
        self.pacer.order(Order { handle, plan: Moves::Steps(steps), cadence: Cadence { max_pause, drains }, at_epoch });
    }

    pub fn recut(&mut self, handle: u64, commands: Vec<Command>) {
        self.busy = true;
        let plan = Moves::Recut(commands);
        self.pacer.order(Order { handle, plan, cadence: Cadence::default(), at_epoch: None });
    }

    pub fn cancel(&mut self, handle: u64) {
        self.busy = true;
        self.pacer.cancel(handle);
    }

    /// The connection to a peer has ended.
    pub fn abort(&self) {
        let worker = self.index();
        self.seat.worker.abort(Error::Aborted { worker, reason: "the connection was cut".into() });
    }

    /// Bins that are here now.
    pub fn owned(&self) -> Vec<Range> {
        let table = self.seat.table.borrow();
        table.owned().filter_map(|(bin, _)| range_of(bin, table.bits())).collect()
    }

    /// Whether a turn would do something.
    pub fn has_work(&self) -> bool {
        self.busy || self.seat.worker.has_work()
    }

    pub fn turn(&mut self, now: u64, told: &mut Vec<Told>) -> Result<bool, Error> {
        self.seat.now = now;
        self.seat.worker.step()?;
        let mut busy = self.pacer.turn(&mut self.seat, &mut |migrated| {
            let Migrated { handle, steps, refused } = migrated;
            let late = matches!(refused, Some(Refusal::Passed { .. }));
            assert!(!late, "what is prepared comes before the rows of its epoch: {refused:?}");
            let times = steps.iter().flat_map(|step| vec![(step.epoch, step.slice); step.planned as usize]).collect();
            told.push(Told::Migrated { handle, times, refused: refused.map(|error| error.to_string()) });
        })?;
        while self.pacer.landed(&self.seat.probes).is_some() {}
        busy |= self.complete(told);
        self.busy = busy;
        Ok(busy || self.seat.worker.has_work())
    }

    fn complete(&mut self, told: &mut Vec<Told>) -> bool {
        let mut completed = false;
        while let Some(epoch) = self.pacer.completed(&self.seat.probes) {
            let table = self.seat.table.borrow();
            let range = |bin| range_of(bin, table.bits()).expect("a bin of the table");
            let changed = table.owned().map(|(bin, state)| (range(bin), state.delta()));
            let record = changed.filter(|(_, keys)| !keys.is_empty()).collect();
            let rows = self.made.borrow_mut().remove(&epoch).unwrap_or_default();
            told.push(Told::Epoch { epoch, rows, late: std::mem::take(&mut self.seat.late), record });
            completed = true;
        }
        completed
    }
}
