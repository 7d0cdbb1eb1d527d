//! A queue per partition, each with one worker at a time.
//!
//! Invariant: only who has changed a partition's flag from free to busy pops from it, and looks at it again after it has set it free:
//! setting it free reads what others have written there, so an item that somebody could not take because of the flag is seen.

use super::PartitionQueue;
use super::sync::{AtomicBool, AtomicUsize, Ordering, Padded, Queue};

/// Comparator: workers go round the partitions and stay with one for a quantum.
///
/// Keeps the order of each partition, but not the order of arrival between them: outputs of the partitions that come later in the round
/// are stuck in the reorder buffer.
#[derive(Debug)]
pub struct Partitioned<T> {
    parts: Box<[Padded<Part<T>>]>,
    round: Padded<AtomicUsize>,
    added: Padded<AtomicUsize>,
    done: Padded<AtomicUsize>,
}

#[derive(Debug)]
struct Part<T> {
    items: Queue<T>,
    busy: AtomicBool,
}

impl<T: Send> Partitioned<T> {
    /// For this many partitions.
    #[must_use]
    pub fn new(partitions: usize) -> Self {
        let part = || Padded::new(Part { items: Queue::new(), busy: AtomicBool::new(false) });
        let zero = || Padded::new(AtomicUsize::new(0));
        Self { parts: (0..partitions).map(|_| part()).collect(), round: zero(), added: zero(), done: zero() }
    }

    /// Works on a partition until its quantum is over or it is empty, unless another thread does.
    fn visit(&self, partition: usize, quantum: usize, operate: &mut dyn FnMut(usize, T)) -> usize {
        let part = &*self.parts[partition];
        while !part.items.is_empty() && !part.busy.swap(true, Ordering::AcqRel) {
            let mut turn = Turn { queue: self, part, done: 0 };
            while turn.done < quantum.max(1)
                && let Some(item) = part.items.pop()
            {
                turn.done += 1;
                operate(partition, item);
            }
            let done = turn.done;
            drop(turn);
            if done > 0 {
                return done;
            }
        }
        0
    }
}

impl<T: Send> PartitionQueue<T> for Partitioned<T> {
    fn add(&self, partition: usize, item: T) {
        self.parts[partition].items.push(item);
        self.added.fetch_add(1, Ordering::Relaxed);
    }

    fn consume(&self, quantum: usize, operate: &mut dyn FnMut(usize, T)) -> usize {
        let (count, first) = (self.parts.len(), self.round.fetch_add(1, Ordering::Relaxed));
        let found = (0..count).map(|step| self.visit(first.wrapping_add(step) % count, quantum, operate));
        found.into_iter().find(|done| *done > 0).unwrap_or(0)
    }

    fn len(&self) -> usize {
        let done = self.done.load(Ordering::Relaxed);
        self.added.load(Ordering::Relaxed).saturating_sub(done)
    }

    fn partitions(&self) -> usize {
        self.parts.len()
    }
}

/// A partition that this thread works on.
struct Turn<'a, T> {
    queue: &'a Partitioned<T>,
    part: &'a Part<T>,
    done: usize,
}

impl<T> Drop for Turn<'_, T> {
    fn drop(&mut self) {
        self.queue.done.fetch_add(self.done, Ordering::Relaxed);
        // A swap rather than a store: it reads what those who found the partition busy have written, so their items are seen.
        self.part.busy.swap(false, Ordering::AcqRel);
    }
}
