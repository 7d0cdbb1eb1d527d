//! What the tests share: programs on several workers.
#![allow(dead_code, unreachable_pub, unused_imports)]

#[path = "../../../dataflow/tests/support/mod.rs"]
mod fabrics;

pub use fabrics::everywhere;

use penstock_dataflow::{BoxError, Worker, execute, fabric};

/// Runs a program on so many threads; its results by worker.
pub fn run<R, F>(workers: usize, program: F) -> Vec<R>
where
    R: Send + 'static,
    F: Fn(&mut Worker) -> Result<R, BoxError> + Send + Sync + 'static,
{
    let threads = execute(fabric::threads(workers), program);
    threads.into_iter().map(|thread| thread.join().expect("workers catch panics").unwrap()).collect()
}

/// A reproducible sequence of numbers.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound
    }
}
