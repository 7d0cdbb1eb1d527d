//! Queues that hand the items of partitions to workers.
//!
//! Owns: the trait [`PartitionQueue`] and three queues behind it. [`Hybrid`] is the one to use. [`Partitioned`] keeps the order of each
//! partition, too, but takes partitions as it finds them, so that old items wait while younger ones of another partition go first.
//! [`Shared`] is simple and does **not** keep the order within a partition.
//!
//! Items are added by one thread at a time (the one ingress, or whoever emits from the buffer before). Workers call `consume`. Of the
//! first two queues: no partition is worked on by two threads at a time, and its items come in the order in which they were added.
//! Nothing waits: who finds a partition taken leaves its item to the worker that has it, or goes elsewhere.
//!
//! After "Scaling Ordered Stream Processing on Shared-Memory Multicores", part "Partitionable Stateful Operators". Departure: a worker
//! gives a partition back after a quantum of items, so that one hot partition cannot keep a worker from the others for ever.

use super::sync;

mod hybrid;
mod partitioned;
mod shared;

pub use hybrid::Hybrid;
pub use partitioned::Partitioned;
pub use shared::Shared;

/// The items of partitions, on their way to workers.
pub trait PartitionQueue<T: Send>: Send + Sync {
    /// Adds an item. Callers take turns: the order of a partition is the order of these calls.
    ///
    /// # Panics
    /// When there is no such partition.
    fn add(&self, partition: usize, item: T);

    /// Takes work if there is some: calls `operate` with the partition and the item, for up to `quantum` (at least one) items of one
    /// partition; with [`Shared`], of any. How many it were; 0 when there is nothing for this thread now.
    ///
    /// A worker calls this again until it returns 0. Then everything that was added before is done or left to a worker that has not
    /// seen 0 since. When `operate` panics its item counts as done, and the queue goes on.
    fn consume(&self, quantum: usize, operate: &mut dyn FnMut(usize, T)) -> usize;

    /// How many items wait, about.
    fn len(&self) -> usize;

    /// Whether none waits, about.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many partitions there are, numbered from 0.
    fn partitions(&self) -> usize;
}
