//! The primitives of the crate over those of shuttle.

pub use shuttle::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
pub use shuttle::sync::{Mutex, MutexGuard};
pub use shuttle::thread::{spawn, yield_now};
pub use std::sync::{Arc, PoisonError};

/// A cell that notices two threads inside at once.
pub struct UnsafeCell<T> {
    value: std::cell::UnsafeCell<T>,
    inside: AtomicBool,
}

impl<T> UnsafeCell<T> {
    pub fn new(value: T) -> Self {
        Self { value: std::cell::UnsafeCell::new(value), inside: AtomicBool::new(false) }
    }
    pub fn with_mut<R>(&self, act: impl FnOnce(*mut T) -> R) -> R {
        assert!(!self.inside.swap(true, Ordering::SeqCst), "two threads in one cell");
        let result = act(self.value.get());
        self.inside.store(false, Ordering::SeqCst);
        result
    }
}

include!("contract.rs");
