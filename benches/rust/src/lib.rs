//! Benches of the core: against its peers, and against itself.
//!
//! `penstock-bench` (or `penstock bench`) measures beside other systems in one run, see [`harness`]; there is one module
//! per bench. `cargo bench` runs the criterion benches, which guard this project against its own past on one machine.
//! Shared by both: reproducible numbers and a running group of workers.

pub mod barrier;
pub mod bins_overhead;
pub mod change_batch;
pub mod clique_child;
pub mod clique_flow;
pub mod clique_peers;
pub mod cliques;
pub mod counting;
pub mod empty_epoch;
pub mod faucet_child;
pub mod faucet_memory;
pub mod faucet_overhead;
pub mod faucet_sensitivity;
pub mod frontier;
pub mod graphs;
pub mod harness;
pub mod join;
pub mod keyed_count;
pub mod machine;
pub mod migration;
pub mod nexmark;
pub mod noisy_neighbour;
pub mod queues;
pub mod reorder;
pub mod schedulers;
pub mod sequencer;
pub mod side;
pub mod surge_flow;

use std::sync::Arc;

use arrow_array::{ArrayRef, Int64Array, RecordBatch};

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

/// One column `k` of keys.
///
/// # Panics
/// Never: one column is a batch.
#[must_use]
pub fn block(keys: &[i64]) -> RecordBatch {
    let column: ArrayRef = Arc::new(Int64Array::from(keys.to_vec()));
    RecordBatch::try_from_iter([("k", column)]).expect("one column is a batch")
}
