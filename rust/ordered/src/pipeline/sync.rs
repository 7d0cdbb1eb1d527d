//! The primitives of this part of the crate, as `super::sync` of the modules that models compile over others.

pub(super) use crossbeam::sync::Unparker;
pub(super) use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};
