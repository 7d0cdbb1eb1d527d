//! A running keyed count: the group of workers that `keyed-count`, `bins-overhead` and the criterion benches drive.
//!
//! Input goes the way of every flow: released by epoch, cut into slices, hashed, routed by bin, applied in time order, with progress.

use std::sync::Arc;

use arrow_array::RecordBatch;
use arrow_array::cast::AsArray;
use arrow_array::types::Int64Type;
use crossbeam::channel::{Receiver, unbounded};
use penstock_dataflow::fabric;
use penstock_plan::host::{Event, Group, GroupConfig, PartitionRows, Resident};
use penstock_plan::spec::{AggSpec, Nulls, PlanSpec, SourceSpec, StepSpec};
use penstock_plan::{CallError, Callbacks, Emit, ForeignState, Plan, SideRows};

use crate::block;

/// For plans without functions of the user.
#[derive(Debug)]
pub(crate) struct NoCalls;

impl Callbacks for NoCalls {
    fn map(&self, call: usize, _: &RecordBatch, _: &mut SideRows) -> Result<RecordBatch, CallError> {
        Err(CallError::new("bench", format!("no call {call}")))
    }

    fn new_state(&self, call: usize) -> Box<dyn ForeignState> {
        unreachable!("the benched plan has no stateful call {call}")
    }
}

/// A keyed count on worker threads of this process: one epoch per block of keys.
pub struct KeyedCount {
    group: Group,
    events: Receiver<Event>,
    workers: usize,
    epoch: u64,
    emitted: Emitted,
}

/// What epochs have given back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Emitted {
    /// Rows.
    pub rows: u64,
    /// Sum of key times count over them.
    pub sum: u64,
}

impl Emitted {
    /// With one row more.
    pub fn add(&mut self, key: u64, count: u64) {
        self.rows += 1;
        self.sum = self.sum.wrapping_add(key.wrapping_mul(count));
    }
}

impl KeyedCount {
    /// Starts `workers` threads with `2^bits` bins. With [`Emit::Update`] each epoch gives back the keys that it changed, with their
    /// counts; with [`Emit::Final`] only [`finish`](Self::finish) gives counts.
    ///
    /// # Panics
    /// When the plan of the bench is refused, which would be a bug of the bench.
    #[must_use]
    pub fn start(workers: usize, bits: u8, emit: Emit) -> Self {
        let source = SourceSpec {
            name: "input".into(),
            schema: block(&[]).schema(),
            event_time: None,
            lateness_ms: 0,
            idle_after_ms: None,
            order_by: Vec::new(),
        };
        let count = AggSpec { name: "n".into(), function: "count".into(), column: None, ..AggSpec::default() };
        let steps = vec![
            StepSpec::KeyBy { columns: vec!["k".into()], nulls: Nulls::Group },
            StepSpec::Agg { emit: Some(emit), aggs: vec![count], operator: None },
        ];
        let plan = Plan::compile(PlanSpec::line(source, steps)).expect("the plan of the bench");
        let config = GroupConfig::founding(Arc::new(plan), Arc::new(NoCalls), bits, workers as u32);
        let (sender, events) = unbounded();
        let group = Group::start(config, fabric::threads(workers), Resident::fresh(), sender).expect("a fresh group");
        Self { group, events, workers, epoch: 0, emitted: Emitted::default() }
    }

    fn release(&mut self, keys: &RecordBatch, watermark: Option<i64>) {
        let input = PartitionRows { source: 0, partition: 0, batches: vec![keys.clone().into()], rows_before: 0 };
        self.group.release(self.epoch, vec![input], watermark).expect("a small epoch");
        self.epoch += 1;
    }

    fn wait(&mut self, epochs: usize) -> Vec<RecordBatch> {
        let mut rows = Vec::new();
        for _ in 0..epochs * self.workers {
            match self.events.recv() {
                Ok(Event::EpochDone { outputs, .. }) => rows.extend(outputs.into_iter().map(|rows| rows.into_here())),
                other => panic!("a worker failed: {other:?}"),
            }
        }
        rows
    }

    /// Counts one block of keys and waits until it is counted.
    ///
    /// # Panics
    /// When a worker fails.
    pub fn count(&mut self, keys: &RecordBatch) {
        self.count_all(std::slice::from_ref(keys));
    }

    /// Counts blocks, an epoch each, and waits until all are counted.
    ///
    /// # Panics
    /// When a worker fails.
    pub fn count_all(&mut self, blocks: &[RecordBatch]) {
        for keys in blocks {
            self.release(keys, None);
        }
        for rows in self.wait(blocks.len()) {
            let [keys, counts] = [0, 1].map(|column| rows.column(column).as_primitive::<Int64Type>().values());
            keys.iter().zip(counts).for_each(|(&key, &count)| self.emitted.add(key as u64, count as u64));
        }
    }

    /// What epochs have given back so far.
    #[must_use]
    pub fn emitted(&self) -> Emitted {
        self.emitted
    }

    /// Ends the threads and returns how many keys were held.
    #[must_use]
    pub fn keys(self) -> u64 {
        self.group.stop().0.keys()
    }

    /// Ends the input of a count with [`Emit::Final`] and returns the count of each key below `keys`.
    ///
    /// # Panics
    /// When a worker fails, or a key is not below `keys` or comes twice.
    #[must_use]
    pub fn finish(mut self, keys: usize) -> Vec<u64> {
        self.release(&block(&[]), Some(i64::MAX));
        let mut counts = vec![0; keys];
        for rows in self.wait(1) {
            let (key, n) = (rows.column(0).as_primitive::<Int64Type>(), rows.column(1).as_primitive::<Int64Type>());
            for (&key, &n) in key.values().iter().zip(n.values()) {
                let before = std::mem::replace(&mut counts[key as usize], n as u64);
                assert_eq!(before, 0, "key {key} comes once");
            }
        }
        drop(self.group.stop());
        counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_counts_what_it_says() {
        let mut count = KeyedCount::start(2, 4, Emit::Final);
        count.count(&block(&[1, 2, 3, 2]));
        count.count_all(&[block(&[3, 4]), block(&[4])]);
        assert_eq!(count.emitted(), Emitted::default());
        assert_eq!(count.finish(5), [0, 1, 2, 2, 2]);
        let mut count = KeyedCount::start(2, 4, Emit::Update);
        count.count_all(&[block(&[1, 2, 3, 2]), block(&[4])]);
        assert_eq!((count.emitted().rows, count.keys()), (4, 4));
    }
}
