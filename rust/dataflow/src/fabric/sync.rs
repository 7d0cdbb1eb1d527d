//! The primitives of the modules that synchronise threads: `tests/models.rs` compiles those modules again with the primitives
//! of a model checker in their place.

pub(super) use std::sync::atomic::{AtomicBool, Ordering};
pub(super) use std::sync::{Condvar, Mutex, MutexGuard};

pub(super) use crossbeam::queue::SegQueue as Queue;
pub(super) use crossbeam::sync::{Parker, Unparker};
