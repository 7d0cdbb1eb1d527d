//! Benches of the core: against its peers, and against itself.
//!
//! `penstock-bench` (or `penstock bench`) measures beside other systems in one run, see [`harness`]; there is one module
//! per bench. `cargo bench` runs the criterion benches, which guard this project against its own past on one machine.
//! Shared by both: reproducible numbers and a running group of workers.

pub mod barrier;
pub mod change_batch;
pub mod empty_epoch;
pub mod frontier;
pub mod harness;
pub mod machine;
pub mod noisy_neighbour;
pub mod sequencer;

use std::sync::Arc;

use arrow_array::{ArrayRef, Int64Array, RecordBatch};
use crossbeam::channel::{Receiver, unbounded};
use penstock_dataflow::fabric;
use penstock_plan::host::{Event, Group, GroupConfig, Input, Resident};
use penstock_plan::{CallError, Callbacks, ForeignState, Plan};

/// A sequence of well-mixed 64-bit numbers (splitmix64), equal on every run.
#[derive(Clone, Debug)]
pub struct Numbers(pub u64);

impl Iterator for Numbers {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        Some(z ^ (z >> 31))
    }
}

struct NoCalls;

impl Callbacks for NoCalls {
    fn map(&self, call: usize, _: &RecordBatch) -> Result<RecordBatch, CallError> {
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
}

impl KeyedCount {
    /// Starts `workers` threads with `2^bits` bins.
    ///
    /// # Panics
    /// When the plan of the bench is refused, which would be a bug of the bench.
    #[must_use]
    pub fn start(workers: usize, bits: u8) -> Self {
        let mut schema = Vec::new();
        arrow_ipc::writer::StreamWriter::try_new(&mut schema, &block(&[]).schema())
            .expect("a schema is written to memory");
        let text = format!(
            r#"{{"version":1,"source":{{"schema":"{}"}},"steps":[{{"op":"key_by","columns":["k"]}},
                {{"op":"agg","emit":"final","aggs":[{{"name":"n","fn":"count"}}]}}]}}"#,
            base64(&schema)
        );
        let plan = Arc::new(Plan::from_json(&text).expect("the plan of the bench"));
        let config = GroupConfig::founding(plan, Arc::new(NoCalls), bits, workers as u32);
        let (sender, events) = unbounded();
        let group = Group::start(config, fabric::threads(workers), Resident::fresh(), sender).expect("a fresh group");
        Self { group, events, workers, epoch: 0 }
    }

    /// Counts one block of keys and waits until it is counted.
    ///
    /// # Panics
    /// When a worker fails.
    pub fn count(&mut self, keys: &RecordBatch) {
        let input = Input { partition: 0, batches: vec![keys.clone().into()], rows_before: 0 };
        self.group.release(self.epoch, vec![input], None).expect("a small epoch");
        self.epoch += 1;
        for _ in 0..self.workers {
            match self.events.recv() {
                Ok(Event::EpochDone { .. }) => {}
                other => panic!("a worker failed: {other:?}"),
            }
        }
    }

    /// Ends the threads and returns how many keys were held.
    #[must_use]
    pub fn keys(self) -> u64 {
        self.group.stop().0.keys()
    }
}

/// One column `k` of keys.
///
/// # Panics
/// Never: one column is a batch.
#[must_use]
pub fn block(keys: &[i64]) -> RecordBatch {
    let column: ArrayRef = Arc::new(Int64Array::from(keys.to_vec()));
    RecordBatch::try_from_iter([("k", column)]).expect("one column is a batch")
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let word = chunk.iter().fold(0_u32, |word, byte| word << 8 | u32::from(*byte)) << (8 * (3 - chunk.len()));
        for digit in 0..4 {
            let sextet = (word >> (18 - 6 * digit)) as usize & 63;
            text.push(if digit <= chunk.len() { DIGITS[sextet] as char } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bench_counts_what_it_says() {
        let mut count = KeyedCount::start(2, 4);
        count.count(&block(&[1, 2, 3, 2]));
        count.count(&block(&[3, 4]));
        assert_eq!(count.keys(), 4);
    }
}
