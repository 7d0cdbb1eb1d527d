//! A cluster in a loop: every stage of a plan on some workers, each with its bins and its operator, nothing concurrent.
//!
//! Bins move on request, by pointer or through their chunks; an epoch can be run, thrown away and run again.
#![allow(dead_code, unreachable_pub)] // each test binary uses a part of it

use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::*;
use arrow_array::{Array, RecordBatch};
use arrow_schema::DataType;
use penstock_bins::{BinState, BinTable, Block, Encoding, Routing};
use penstock_plan::chain::Stateless;
use penstock_plan::{
    CallError, Callbacks, FlowBlock, ForeignState, Grouped, KeyedOp, KeyedSpec, OpError, Output, Plan, PlanSpec,
    SideRows, State, StateFault,
};

/// A value to compare; every NaN is equal.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cell {
    Null,
    Int(i128),
    Float(u64),
    Text(String),
}

impl Cell {
    pub fn float(value: f64) -> Self {
        Self::Float(if value.is_nan() { f64::NAN.to_bits() } else { value.to_bits() })
    }

    pub fn text(value: &str) -> Self {
        Self::Text(value.into())
    }

    pub fn maybe(value: Option<impl Into<i128>>) -> Self {
        value.map_or(Self::Null, |value| Self::Int(value.into()))
    }
}

fn cell(array: &dyn Array, row: usize) -> Cell {
    if array.is_null(row) {
        return Cell::Null;
    }
    let wide = || array.to_data().buffer::<i64>(0)[row];
    match array.data_type() {
        DataType::Boolean => Cell::Int(array.as_boolean().value(row).into()),
        DataType::Int16 => Cell::Int(array.as_primitive::<Int16Type>().value(row).into()),
        DataType::Int32 => Cell::Int(array.as_primitive::<Int32Type>().value(row).into()),
        DataType::UInt64 => Cell::Int(array.as_primitive::<UInt64Type>().value(row).into()),
        DataType::Date32 => Cell::Int(array.as_primitive::<Date32Type>().value(row).into()),
        DataType::Int64 | DataType::Timestamp(_, _) => Cell::Int(wide().into()),
        DataType::Float64 => Cell::float(array.as_primitive::<Float64Type>().value(row)),
        DataType::Float32 => Cell::float(array.as_primitive::<Float32Type>().value(row).into()),
        DataType::Decimal128(_, _) => Cell::Int(array.as_primitive::<Decimal128Type>().value(row)),
        DataType::Utf8 => Cell::text(array.as_string::<i32>().value(row)),
        other => panic!("the tests do not read {other}"),
    }
}

/// The rows of a block.
pub fn cells(batch: &RecordBatch) -> Vec<Vec<Cell>> {
    (0..batch.num_rows()).map(|row| batch.columns().iter().map(|column| cell(column, row)).collect()).collect()
}

/// The rows of blocks as a sorted bag.
pub fn bag(batches: &[RecordBatch]) -> Vec<Vec<Cell>> {
    let mut rows: Vec<Vec<Cell>> = Vec::new();
    for batch in batches {
        assert!(batch.num_rows() > 0 && batch.num_rows() <= penstock_plan::BLOCK_ROWS);
        rows.extend(cells(batch));
    }
    rows.sort();
    rows
}

/// Counts per key of the first column: emits the block with a running count per key appended to the state, as `(key, seen)`.
#[derive(Default)]
pub struct Counting {
    live: std::collections::BTreeMap<i64, i64>,
    saved: Option<std::collections::BTreeMap<i64, i64>>,
}

impl Counting {
    fn apply(&mut self, rows: &RecordBatch) -> Result<RecordBatch, CallError> {
        let keys = rows.column(0).as_primitive::<Int64Type>();
        let values = rows.column(1).as_primitive::<Int64Type>();
        let mut seen = Vec::new();
        for row in 0..rows.num_rows() {
            if values.value(row) == -1 {
                return Err(CallError { row: Some(row), ..CallError::new("count", "minus one") });
            }
            // The order within a key matters.
            let state = self.live.entry(keys.value(row)).or_insert(1);
            *state = state.wrapping_mul(31).wrapping_add(values.value(row));
            seen.push(*state);
        }
        let seen = arrow_array::Int64Array::from(seen);
        Ok(RecordBatch::try_from_iter([("k", rows.column(0).clone()), ("seen", Arc::new(seen) as _)]).unwrap())
    }
}

impl ForeignState for Counting {
    fn encode(&self, encoding: &mut Encoding) -> Result<Option<Vec<u8>>, StateFault> {
        let left = encoding.place(|| self.live.clone().into_iter());
        Ok(left.next().map(|(key, seen)| [key.to_le_bytes(), seen.to_le_bytes()].concat()))
    }

    fn absorb(&mut self, chunk: &[u8]) -> Result<(), StateFault> {
        let short = || StateFault::Foreign(CallError::new("count", "short"));
        let (key, seen) = chunk.split_first_chunk().ok_or_else(short)?;
        let seen = seen.try_into().map_err(|_| short())?;
        self.live.insert(i64::from_le_bytes(*key), i64::from_le_bytes(seen));
        Ok(())
    }

    fn bytes(&self) -> usize {
        self.live.len() * 16
    }

    fn keys(&self) -> usize {
        self.live.len()
    }

    fn mark(&mut self) {
        self.saved = Some(self.live.clone());
    }

    fn rollback(&mut self) -> Result<(), StateFault> {
        self.live = self.saved.clone().unwrap_or_default();
        Ok(())
    }
}

/// Call 0 passes blocks on; every state counts.
pub struct TestCalls;

impl Callbacks for TestCalls {
    fn map(&self, _: usize, batch: &RecordBatch, _: &mut SideRows) -> Result<RecordBatch, CallError> {
        Ok(batch.clone())
    }

    fn new_state(&self, _: usize) -> Box<dyn ForeignState> {
        Box::<Counting>::default()
    }

    fn apply(&self, _: usize, block: &mut Grouped<'_>, _: &mut SideRows) -> Result<RecordBatch, CallError> {
        block.each(Counting::apply)
    }
}

struct Stage {
    keyed: KeyedSpec,
    owners: Vec<u32>,
    workers: Vec<(BinTable<State>, Box<dyn KeyedOp>)>,
}

/// Moves bin `bin` (modulo the bins) of stage `stage` (modulo the stages) to worker `to` (modulo the workers).
#[derive(Clone, Debug)]
pub struct Move {
    pub stage: usize,
    pub bin: u32,
    pub to: u32,
    pub through_bytes: bool,
}

/// See the module.
pub struct Cluster {
    plan: Plan,
    stages: Vec<Stage>,
    calls: Arc<dyn Callbacks>,
    watermark: i64,
    pub rows: Vec<RecordBatch>,
    pub late: Vec<RecordBatch>,
}

impl Cluster {
    pub fn new(spec: PlanSpec, bits: u8, workers: u32) -> Self {
        // Through its text, as a host receives it.
        let plan = Plan::from_json(&spec.to_json()).unwrap();
        let calls: Arc<dyn Callbacks> = Arc::new(TestCalls);
        let stages = plan
            .keyed()
            .map(|keyed| {
                let routing = Routing::new(bits, workers as usize).unwrap();
                let owners: Vec<u32> = (0..1u32 << bits).map(|bin| bin % workers).collect();
                let new_state = || keyed.new_state(&calls);
                let worker = |worker| (BinTable::fresh(&routing, worker, &new_state), keyed.operator(&calls).unwrap());
                Stage { keyed: keyed.clone(), owners, workers: (0..workers).map(worker).collect() }
            })
            .collect();
        Self { plan, stages, calls, watermark: i64::MIN, rows: Vec::new(), late: Vec::new() }
    }

    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    fn pass(&mut self, stage: usize, outputs: Vec<Output>) -> Result<(), OpError> {
        for output in outputs {
            match output {
                Output::Late(batch) => {
                    assert_eq!(batch.schema(), self.stages[stage].keyed.routed);
                    self.late.push(batch);
                }
                Output::Side(..) => panic!("no step here has a side output"),
                Output::Rows(batch) => {
                    assert_eq!(batch.schema(), self.stages[stage].keyed.output);
                    assert!((1..=penstock_plan::BLOCK_ROWS).contains(&batch.num_rows()));
                    self.feed(stage + 1, batch)?;
                }
            }
        }
        Ok(())
    }

    /// Feeds a block to a stage.
    pub fn feed(&mut self, at: usize, batch: RecordBatch) -> Result<(), OpError> {
        let Some(stage) = self.stages.get_mut(at) else {
            self.rows.push(batch);
            return Ok(());
        };
        let mut batch = batch;
        for step in &self.plan.stages()[at].inlets[0].pre {
            let Stateless::Map(map) = step else { panic!("{} is no map", step.step()) };
            batch = map.apply(&self.calls, &batch)?.0;
        }
        let routed = stage.keyed.assign_after(&batch, self.watermark)?;
        assert_eq!(routed.schema(), stage.keyed.routed);
        let hashes = stage.keyed.hashes(&routed)?;
        let routed = stage.keyed.carry(routed)?;
        let bits = stage.owners.len().trailing_zeros() as u8;
        let owners: Vec<u32> =
            hashes.iter().map(|&hash| stage.owners[penstock_bins::bin(hash, bits) as usize]).collect();
        let mut parts = Vec::new();
        FlowBlock::keyed(routed, hashes).split(&owners, &mut |worker, part| parts.push((worker, part)));
        let mut outputs = Vec::new();
        for (worker, part) in parts {
            let FlowBlock::Rows { batch, hashes, .. } = part else { panic!("rows stay rows") };
            let (bins, op) = &mut stage.workers[worker as usize];
            op.apply(bins, 0, &batch, &hashes, &mut |output| outputs.push(output))?;
        }
        self.pass(at, outputs)
    }

    /// Ends an epoch: the watermark, if it moves, then the end.
    pub fn close(&mut self, watermark: i64) -> Result<(), OpError> {
        self.watermark = self.watermark.max(watermark);
        for at in 0..self.stages.len() {
            let mut outputs = Vec::new();
            for (bins, op) in &mut self.stages[at].workers {
                op.watermark(bins, watermark, &mut |output| outputs.push(output))?;
                op.end_epoch(bins, &mut |output| outputs.push(output))?;
            }
            self.pass(at, outputs)?;
        }
        Ok(())
    }

    pub fn mark(&mut self) {
        self.stages.iter_mut().flat_map(|stage| &mut stage.workers).for_each(|(bins, _)| bins.mark_all(0));
    }

    /// Back to the mark, with new operators that know the watermark of then or learn it from their bins.
    pub fn rollback(&mut self, watermark: i64, resume: bool) {
        self.watermark = watermark;
        for stage in &mut self.stages {
            for (bins, op) in &mut stage.workers {
                bins.rollback_all().unwrap();
                *op = stage.keyed.operator(&self.calls).unwrap();
                if resume {
                    op.resume(watermark);
                }
            }
        }
    }

    pub fn watermark(&self) -> i64 {
        self.watermark
    }

    pub fn relocate(&mut self, moved: &Move) {
        let stages = self.stages.len();
        let stage = &mut self.stages[moved.stage % stages];
        let bin = moved.bin as usize % stage.owners.len();
        let to = moved.to % stage.workers.len() as u32;
        let from = std::mem::replace(&mut stage.owners[bin], to);
        let mut state = stage.workers[from as usize].0.uninstall(bin as u32).unwrap();
        if moved.through_bytes {
            let mut copy = Box::new(stage.keyed.new_state(&self.calls));
            let mut encoding = Encoding::new();
            while let Some(chunk) = state.encode(&mut encoding).unwrap() {
                assert!(chunk.len() <= 1 << 20);
                copy.absorb(&chunk).unwrap();
            }
            assert_eq!((copy.keys(), copy.is_empty()), (state.keys(), state.is_empty()));
            state = copy;
            state.mark();
        }
        stage.workers[to as usize].0.install(bin as u32, state).unwrap();
    }

    pub fn keys(&self) -> usize {
        self.stages
            .iter()
            .flat_map(|stage| &stage.workers)
            .flat_map(|(bins, _)| bins.owned())
            .map(|(_, s)| s.keys())
            .sum()
    }

    pub fn bytes(&self) -> usize {
        self.stages
            .iter()
            .flat_map(|stage| &stage.workers)
            .flat_map(|(bins, _)| bins.owned())
            .map(|(_, s)| s.bytes())
            .sum()
    }

    pub fn take(&mut self) -> (Vec<Vec<Cell>>, Vec<Vec<Cell>>) {
        (bag(&std::mem::take(&mut self.rows)), bag(&std::mem::take(&mut self.late)))
    }
}
