//! The primitives of the crate over those of loom.

pub use loom::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
pub use loom::sync::{Mutex, MutexGuard};
pub use loom::thread::{spawn, yield_now};
// Not loom's: when a mutant fails, its drop would panic a second time. Nothing here depends on its counts.
pub use std::sync::{Arc, PoisonError};

/// Loom's, which notices two threads inside at once, or one without having seen what the other has done.
#[derive(Debug)]
pub struct UnsafeCell<T>(loom::cell::UnsafeCell<T>);

impl<T> UnsafeCell<T> {
    pub fn new(value: T) -> Self {
        Self(loom::cell::UnsafeCell::new(value))
    }
    pub fn with_mut<R>(&self, act: impl FnOnce(*mut T) -> R) -> R {
        self.0.with_mut(act)
    }
}

include!("contract.rs");
