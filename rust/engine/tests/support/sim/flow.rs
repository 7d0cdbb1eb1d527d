//! The worker loop of the simulated flow, over the real dataflow, F, S, tables and shelf.
//!
//! It is the loop of `penstock_plan::host` (same names, same order within a turn) with the seal that durable state needs: slice 0 of an epoch is left by
//! a worker's input only when that worker has taken the record of the epoch before, and control starts at slice 1.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;

use penstock_bins::{
    BinTable, BinsError, BoxError, Command, Config, Control, ControlInput, Keyed, Migration, Moment, Range, Routing,
    Shelf, Stats, range_of, stateful_divided,
};
use penstock_dataflow::{Endpoint, Error, InputHandle, Worker};
use penstock_progress::{FlowTime, ProbeHandle};

use super::ledger::{Ledger, Out, Row, Tagged, Value, hash};
use super::planted;

pub const MARK: u32 = 1 << 31;
pub const CLOSE: u32 = u32::MAX;
const WINDOW: u32 = 2;

pub type Block = Keyed<u64, Tagged>;
/// What a worker takes of an epoch: by range, the changed keys with their values.
pub type Record = Vec<(Range, Vec<(u64, Option<Value>)>)>;

/// An epoch's share of a worker.
pub struct Share {
    pub epoch: u64,
    pub slices: VecDeque<Vec<Row>>,
    pub watermark: Option<i64>,
    pub clock: i64,
    pub finish: bool,
}

/// What a worker tells its host.
pub enum Told {
    Epoch { epoch: u64, rows: Vec<Out>, late: u64, record: Record },
    Migrated { handle: u64, times: Vec<(u64, u32)>, refused: Option<String> },
}

type Made = Rc<RefCell<BTreeMap<u64, Vec<Out>>>>;

struct Lead {
    control: ControlInput<FlowTime>,
    queue: VecDeque<Moves>,
}

struct Moves {
    handle: u64,
    migration: Migration<FlowTime>,
    together: usize,
    at_epoch: Option<u64>,
    /// When its steps took effect.
    times: Vec<(u64, u32)>,
    /// It takes effect between two epochs only.
    between: bool,
    refused: Option<String>,
}

pub struct Loop {
    worker: Worker,
    input: InputHandle<FlowTime, Block>,
    lead: Option<Lead>,
    sent: ProbeHandle<FlowTime>,
    control: ProbeHandle<FlowTime>,
    output: ProbeHandle<FlowTime>,
    table: Rc<RefCell<BinTable<Ledger>>>,
    shelf: Shelf<Ledger>,
    made: Made,
    late: u64,
    salt: u64,
    watermark: Option<i64>,
    queue: VecDeque<Share>,
    current: Option<(Share, u32)>,
    fed: VecDeque<(u64, Option<i64>)>,
    marked: bool,
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

fn first(probe: &ProbeHandle<FlowTime>) -> Option<FlowTime> {
    probe.with_frontier(|frontier| frontier.first().copied())
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
        let (input, control, sent, commands, output) = worker.dataflow::<FlowTime, _>("flow", |scope| {
            let (mut input, blocks) = scope.new_input::<Block>();
            let (mut control, commands) = scope.new_input::<Vec<Control>>();
            input.advance_to(start)?;
            control.advance_to(start)?;
            let (sent, blocks) = blocks.probe();
            let (passed, commands) = commands.probe();
            let built = stateful_divided(&blocks, &commands, config, Some(Rc::new(|(): &()| 0)), logic)?;
            Ok::<_, BoxError>((input, control, sent, passed, built.probe))
        })?;
        let peers = worker.peers();
        let lead =
            (index == 0).then(|| Lead { control: ControlInput::new(control, routing, peers), queue: VecDeque::new() });
        Ok(Loop {
            worker,
            input,
            lead,
            sent,
            control: commands,
            output,
            table,
            shelf: setup.shelf,
            made,
            late: 0,
            salt: setup.salt,
            watermark: setup.watermark,
            queue: VecDeque::new(),
            current: None,
            fed: VecDeque::new(),
            marked: false,
            busy: true,
        })
    }

    pub fn index(&self) -> usize {
        self.worker.index()
    }

    pub fn release(&mut self, share: Share) {
        self.busy = true;
        self.queue.push_back(share);
    }

    pub fn migrate(
        &mut self,
        handle: u64,
        steps: Vec<Vec<(u32, u32)>>,
        max_pause_ms: Option<u32>,
        at_epoch: Option<u64>,
    ) {
        self.busy = true;
        if let Some(lead) = &mut self.lead {
            // Steps that a limit lets go together, as the real leader does when they are quick.
            let together = if max_pause_ms.is_some() { 3 } else { 1 };
            let migration = Migration::from_steps(steps);
            let times = Vec::new();
            lead.queue.push_back(Moves { handle, migration, together, at_epoch, times, between: false, refused: None });
        }
    }

    pub fn recut(&mut self, handle: u64, commands: Vec<Command>) {
        self.busy = true;
        if let Some(lead) = &mut self.lead {
            let migration = Migration::of_commands(commands);
            lead.queue.push_back(Moves {
                handle,
                migration,
                together: 1,
                at_epoch: None,
                times: Vec::new(),
                between: true,
                refused: None,
            });
        }
    }

    pub fn cancel(&mut self, handle: u64) {
        self.busy = true;
        if let Some(lead) = &mut self.lead {
            lead.queue.iter_mut().filter(|one| one.handle == handle).for_each(|one| one.migration.cancel());
        }
    }

    /// The connection to a peer has ended.
    pub fn abort(&self) {
        let worker = self.worker.index();
        self.worker.abort(Error::Aborted { worker, reason: "the connection was cut".into() });
    }

    /// Bins that are here now.
    pub fn owned(&self) -> Vec<Range> {
        let table = self.table.borrow();
        table.owned().filter_map(|(bin, _)| range_of(bin, table.bits())).collect()
    }

    pub fn turn(&mut self, told: &mut Vec<Told>) -> Result<bool, Error> {
        self.worker.step()?;
        let mut busy = self.open();
        busy |= self.feed();
        let feeding = self.current.as_ref().map(|(share, _)| share.epoch).or(self.fed.back().map(|(epoch, _)| *epoch));
        if let Some(lead) = &mut self.lead {
            busy |= lead.turn(&self.sent, &self.output, feeding, told);
        }
        busy |= self.follow();
        busy |= self.complete(told);
        self.busy = busy;
        Ok(busy || self.worker.has_work())
    }

    /// Whether a turn would do something.
    pub fn has_work(&self) -> bool {
        self.busy || self.worker.has_work()
    }

    fn open(&mut self) -> bool {
        if self.current.is_some() || !self.fed.is_empty() {
            return false;
        }
        let Some(share) = self.queue.pop_front() else { return false };
        self.current = Some((share, MARK + 1));
        self.marked = false;
        true
    }

    /// All workers mark the same cut, each before its own first block.
    fn mark(&mut self, epoch: u64) -> bool {
        if self.marked {
            return true;
        }
        let start = FlowTime::new(epoch, MARK);
        self.advance(start);
        if !planted("marked before the others stand there")
            && first(&self.output).is_some_and(|reached| reached < start)
        {
            return false;
        }
        self.table.borrow_mut().mark_all(epoch);
        if let Some(last) = epoch.checked_sub(1) {
            self.shelf.close_epoch(last);
        }
        self.marked = true;
        true
    }

    fn advance(&mut self, time: FlowTime) {
        if *self.input.time() < time {
            self.input.advance_to(time).expect("compared");
        }
    }

    fn limit(&self, epoch: u64) -> u32 {
        match first(&self.output) {
            Some(time) if time.epoch == epoch => time.slice.max(MARK).saturating_add(WINDOW),
            Some(time) if time.epoch > epoch => CLOSE,
            Some(_) => MARK,
            None => CLOSE,
        }
    }

    fn feed(&mut self) -> bool {
        let Some(epoch) = self.current.as_ref().map(|(share, _)| share.epoch) else { return false };
        if !self.mark(epoch) {
            return false;
        }
        let mut sent = false;
        loop {
            let limit = self.limit(epoch);
            let (share, slice) = self.current.as_ref().expect("an epoch is open");
            let (next, slice) = (!share.slices.is_empty(), *slice);
            self.advance(FlowTime::new(epoch, if next { slice } else { CLOSE }));
            if !next || slice >= limit {
                break;
            }
            let (share, at) = self.current.as_mut().expect("an epoch is open");
            *at += 1;
            let rows = share.slices.pop_front().expect("there is one");
            let clock = share.clock;
            let (late, rows): (Vec<Row>, Vec<Row>) =
                rows.into_iter().partition(|row| self.watermark.is_some_and(|watermark| row.time < watermark));
            self.late += late.len() as u64;
            let tagged = |row: Row| (row.key, Tagged { row, salt: self.salt, clock, epoch });
            self.input.send(Keyed::new(rows.into_iter().map(tagged).collect(), hash));
            sent = true;
        }
        if let Some((share, _)) = self.current.take_if(|(share, _)| share.slices.is_empty()) {
            // The end of the epoch travels in its last slice, each worker's own.
            let row = Row { key: 0, amount: 0, time: 0, last: share.finish };
            let tagged = Tagged { row, salt: self.salt, clock: share.clock, epoch };
            self.input.send(Keyed::local(vec![(0, tagged)]));
            self.advance(FlowTime::new(epoch + 1, 0));
            self.fed.push_back((epoch, share.watermark));
            sent = true;
        }
        sent
    }

    fn follow(&mut self) -> bool {
        let unsealed = planted("slice 0 is no seal");
        if self.current.is_some() || !(unsealed || self.fed.is_empty()) {
            return false;
        }
        let held = *self.input.time();
        let control = match &self.lead {
            Some(lead) => lead.control.time().copied(),
            None => first(&self.control),
        };
        let Some(control) = control.filter(|control| control.epoch >= held.epoch) else { return false };
        let slice = if control.epoch > held.epoch { MARK } else { control.slice.min(MARK) };
        if slice <= held.slice {
            return false;
        }
        self.advance(FlowTime::new(held.epoch, slice));
        true
    }

    fn complete(&mut self, told: &mut Vec<Told>) -> bool {
        let mut completed = false;
        while let Some((epoch, watermark)) = self.fed.front().copied() {
            if self.output.less_equal(&FlowTime::new(epoch, CLOSE)) {
                break;
            }
            self.fed.pop_front();
            self.watermark = self.watermark.max(watermark);
            let table = self.table.borrow();
            let range = |bin| range_of(bin, table.bits()).expect("a bin of the table");
            let changed = table.owned().map(|(bin, state)| (range(bin), state.delta()));
            let record = changed.filter(|(_, keys)| !keys.is_empty()).collect();
            let rows = self.made.borrow_mut().remove(&epoch).unwrap_or_default();
            told.push(Told::Epoch { epoch, rows, late: std::mem::take(&mut self.late), record });
            completed = true;
        }
        completed
    }
}

impl Lead {
    fn turn(
        &mut self,
        sent: &ProbeHandle<FlowTime>,
        output: &ProbeHandle<FlowTime>,
        feeding: Option<u64>,
        told: &mut Vec<Told>,
    ) -> bool {
        self.pace(sent, output, feeding) | self.migrate(output, told)
    }

    fn pace(&mut self, sent: &ProbeHandle<FlowTime>, output: &ProbeHandle<FlowTime>, feeding: Option<u64>) -> bool {
        let held = *self.control.time().expect("open");
        let first_slice = u32::from(!planted("control at slice 0"));
        if held.slice < first_slice {
            self.control.advance_to(FlowTime::new(held.epoch, first_slice)).expect("forward");
        }
        let Some(epoch) = feeding.filter(|epoch| *epoch >= held.epoch) else { return false };
        let (Some(sent), Some(reached)) = (first(sent), first(output)) else { return false };
        let target = if reached == FlowTime::new(epoch, CLOSE) {
            FlowTime::new(epoch + 1, first_slice)
        } else if sent <= FlowTime::new(epoch, MARK) {
            FlowTime::new(epoch, MARK + 1)
        } else if sent.epoch == epoch {
            FlowTime::new(epoch, sent.slice.saturating_add(WINDOW))
        } else {
            FlowTime::new(epoch, CLOSE)
        };
        // What takes effect between two epochs waits for the next such time.
        let turn = self.queue.iter().find(|one| one.at_epoch.is_none());
        let target = match turn.is_some_and(|one| one.between && one.migration.next_step().is_some()) {
            true if held.slice >= MARK => target.min(FlowTime::new(held.epoch + 1, first_slice)),
            _ => target,
        };
        if target <= held {
            return false;
        }
        self.control.advance_to(target).expect("forward");
        true
    }

    fn migrate(&mut self, output: &ProbeHandle<FlowTime>, told: &mut Vec<Told>) -> bool {
        let turn = self.queue.iter().position(|one| one.at_epoch.is_none());
        let mut busy = false;
        let time = *self.control.time().expect("open");
        // What was prepared begins before anything else goes on, and at one time.
        let begins = |one: &Moves| one.at_epoch.is_some() && one.migration.progress().steps_issued == 0;
        let begun = self.queue.iter().any(begins);
        let mut sent = false;
        for (place, one) in self.queue.iter_mut().enumerate() {
            if one.at_epoch.is_none() && turn != Some(place) {
                continue;
            }
            busy |= one.migration.observe(output);
            let waits = if begun { !begins(one) } else { sent };
            if time.slice == CLOSE || waits || (one.between && time.slice >= MARK) {
                continue;
            }
            let first = begins(one);
            let Some(commands) = one.migration.issue(time, one.together) else { continue };
            if let Some(at) = one.at_epoch.filter(|_| first) {
                assert!(time <= FlowTime::new(at, MARK + 1), "prepared for {at}, begun at {time:?}");
            }
            busy = true;
            match self.control.schedule(time, commands) {
                Ok(()) => {
                    sent = true;
                    one.times.resize(one.migration.progress().steps_issued, (time.epoch, time.slice));
                }
                Err(error) => one.refused = Some(error.to_string()),
            }
        }
        if sent {
            self.control.advance_to(FlowTime::new(time.epoch, time.slice + 1)).expect("forward");
        }
        let all = std::mem::take(&mut self.queue).into_iter();
        let (done, left): (VecDeque<Moves>, _) = all.partition(|one| one.migration.is_done() || one.refused.is_some());
        self.queue = left;
        for Moves { handle, times, refused, .. } in done {
            told.push(Told::Migrated { handle, times, refused });
            busy = true;
        }
        busy
    }
}
