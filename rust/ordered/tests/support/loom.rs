//! The primitives of the crate over those of loom. The queue is its contract: first in, first out, behind a lock.

use std::collections::VecDeque;
use std::ops::Deref;

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
