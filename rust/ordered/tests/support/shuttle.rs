//! The primitives of the crate over those of shuttle. The queue is its contract: first in, first out, behind a lock.

use std::collections::VecDeque;
use std::ops::Deref;

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

#[derive(Debug)]
pub struct Queue<T>(Mutex<VecDeque<T>>);

impl<T> Queue<T> {
    pub fn new() -> Self {
        Self(Mutex::new(VecDeque::new()))
    }
    pub fn push(&self, item: T) {
        self.0.lock().unwrap().push_back(item);
    }
    pub fn pop(&self) -> Option<T> {
        self.0.lock().unwrap().pop_front()
    }
    pub fn is_empty(&self) -> bool {
        self.0.lock().unwrap().is_empty()
    }
}

/// Cache lines are nothing that models know.
#[derive(Debug)]
pub struct Padded<T>(T);

impl<T> Padded<T> {
    pub fn new(value: T) -> Self {
        Self(value)
    }
}

impl<T> Deref for Padded<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}
