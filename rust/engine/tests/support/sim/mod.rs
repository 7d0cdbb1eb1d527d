//! A whole cluster in one thread: the machines, the real dataflow of each member, and models of Spark, storage and network, in virtual time.
//!
//! A run depends on nothing but its seed. Every message of a link arrives in order, links overtake each other; every call, write and task takes
//! a time that the seed chooses. See `world` for what happens, `spark`, `hosts` and `storage` for the models, `faults` for what goes wrong,
//! `excuses` for what a user may hear of it, `check` for what has to hold.
#![allow(dead_code, unreachable_pub)]

pub mod check;
pub mod excuses;
pub mod faults;
pub mod flow;
pub mod hosts;
pub mod ledger;
pub mod spark;
pub mod storage;
pub mod world;

use std::cell::RefCell;

thread_local! {
    static PLANTED: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Whether this fault is planted in what runs on this thread.
pub fn planted(name: &str) -> bool {
    PLANTED.with_borrow(|planted| planted == name)
}

/// Plants a fault for what `run` does on this thread.
pub fn with_fault<R>(name: &str, run: impl FnOnce() -> R) -> R {
    PLANTED.set(name.to_owned());
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
    PLANTED.set(String::new());
    result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// A small generator of pseudo-random numbers (splitmix64).
#[derive(Clone)]
pub struct Dice(pub u64);

impl Dice {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Below `bound`, which is not 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// Once in `times`.
    pub fn once_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    /// From `low` to `high`.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }
}
