//! One queue for all partitions, and a lock per partition.

use super::PartitionQueue;
use super::sync::{AtomicUsize, Mutex, Ordering, Padded, PoisonError, Queue};

/// Comparator that **breaks the order within partitions**: between taking an item and locking its partition another worker may
/// overtake. Workers that meet at a partition wait for each other.
///
/// Never use it for an operator with state.
#[derive(Debug)]
pub struct Shared<T> {
    items: Queue<(usize, T)>,
    locks: Box<[Padded<Mutex<()>>]>,
    added: Padded<AtomicUsize>,
    done: Padded<AtomicUsize>,
}

impl<T: Send> Shared<T> {
    /// For this many partitions.
    #[must_use]
    pub fn new(partitions: usize) -> Self {
        let zero = || Padded::new(AtomicUsize::new(0));
        let locks = (0..partitions).map(|_| Padded::new(Mutex::new(()))).collect();
        Self { items: Queue::new(), locks, added: zero(), done: zero() }
    }
}

impl<T: Send> PartitionQueue<T> for Shared<T> {
    fn add(&self, partition: usize, item: T) {
        assert!(partition < self.locks.len(), "partition {partition} of {}", self.locks.len());
        self.added.fetch_add(1, Ordering::Relaxed);
        self.items.push((partition, item));
    }

    fn consume(&self, quantum: usize, operate: &mut dyn FnMut(usize, T)) -> usize {
        let mut done = 0;
        while done < quantum.max(1)
            && let Some((partition, item)) = self.items.pop()
        {
            done += 1;
            self.done.fetch_add(1, Ordering::Relaxed);
            // The lock guards no data, so one that was poisoned is as good as any.
            let _guard = self.locks[partition].lock().unwrap_or_else(PoisonError::into_inner);
            operate(partition, item);
        }
        done
    }

    fn len(&self) -> usize {
        let done = self.done.load(Ordering::Relaxed);
        self.added.load(Ordering::Relaxed).saturating_sub(done)
    }

    fn partitions(&self) -> usize {
        self.locks.len()
    }
}
