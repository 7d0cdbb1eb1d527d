//! Ordered stream processing on the cores of one machine: many workers, the output of one.
//!
//! After "Scaling Ordered Stream Processing on Shared-Memory Multicores" (Prasaad, Ramalingam, Rajan, 2019). [`reorder`] puts
//! outputs back into the order of their inputs without a lock; [`queue`] hands the items of partitions to workers such that no
//! partition is worked on twice at a time; [`pipeline`] is linear pipelines of operators on both; [`schedule`] says which operator a free
//! worker serves.

pub mod pipeline;
pub mod queue;
pub mod reorder;
pub mod schedule;
mod sync;
