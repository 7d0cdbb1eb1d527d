//! The primitives of this part of the crate, as `super::sync` of the modules that models compile over others.

pub(super) use crate::sync::{AtomicU64, AtomicUsize, Ordering, fence};
pub(super) use crossbeam::sync::Unparker;
