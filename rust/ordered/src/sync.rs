//! The primitives that [`reorder`](crate::reorder) and [`queue`](crate::queue) synchronise threads with.
//!
//! Owns nothing. Both name them as `super::sync`, so that the models can compile the same source files over the primitives of a
//! model checker. For them the queue, crossbeam's here, is its contract behind a lock.

pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
pub(crate) use std::sync::{Mutex, MutexGuard, PoisonError};

pub(crate) use crossbeam::queue::SegQueue as Queue;
pub(crate) use crossbeam::utils::CachePadded as Padded;

/// A cell whose content is reached by pointer, as model checkers want it.
#[derive(Debug, Default)]
pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

impl<T> UnsafeCell<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }

    pub(crate) fn with_mut<R>(&self, act: impl FnOnce(*mut T) -> R) -> R {
        act(self.0.get())
    }
}
