//! The hybrid queue: a master queue of tokens in arrival order, and a queue per partition.
//!
//! Invariants: an item's token is pushed after the item, so who counts a token finds its item. `taken` of a partition counts the tokens
//! that were popped and whose items are not done; who makes it 1 owns the partition until it makes it 0 or passes it on, and only the
//! owner pops from the partition. An ownership that is passed on is a token of its own in the master queue: the count stays above
//! 0 meanwhile, so that nobody else takes the partition.

use super::PartitionQueue;
use super::sync::{AtomicUsize, Ordering, Padded, Queue};

/// The queue to use for items whose order within their partition matters.
///
/// Work is taken in the order in which items came. A token of a partition that another worker owns is delegated to that worker by
/// counting it; what costs is one counter per partition and one more queue.
#[derive(Debug)]
pub struct Hybrid<T> {
    master: Queue<Token>,
    parts: Box<[Padded<Part<T>>]>,
    added: Padded<AtomicUsize>,
    done: Padded<AtomicUsize>,
}

#[derive(Debug)]
struct Part<T> {
    items: Queue<T>,
    taken: AtomicUsize,
}

#[derive(Debug)]
enum Token {
    /// An item of this partition was added.
    Item(usize),
    /// Who pops this owns the partition.
    Owner(usize),
}

impl<T: Send> Hybrid<T> {
    /// For this many partitions.
    #[must_use]
    pub fn new(partitions: usize) -> Self {
        let part = || Padded::new(Part { items: Queue::new(), taken: AtomicUsize::new(0) });
        let zero = || Padded::new(AtomicUsize::new(0));
        Self { master: Queue::new(), parts: (0..partitions).map(|_| part()).collect(), added: zero(), done: zero() }
    }

    /// The next partition that this thread owns.
    fn own(&self) -> Option<usize> {
        loop {
            match self.master.pop()? {
                Token::Owner(partition) => return Some(partition),
                // Acquire: what the owner before did. Release: nothing; but the item was there before its token.
                Token::Item(partition) => {
                    if self.parts[partition].taken.fetch_add(1, Ordering::AcqRel) == 0 {
                        return Some(partition);
                    }
                }
            }
        }
    }
}

impl<T: Send> PartitionQueue<T> for Hybrid<T> {
    fn add(&self, partition: usize, item: T) {
        self.parts[partition].items.push(item);
        self.added.fetch_add(1, Ordering::Relaxed);
        self.master.push(Token::Item(partition));
    }

    fn consume(&self, quantum: usize, operate: &mut dyn FnMut(usize, T)) -> usize {
        let Some(partition) = self.own() else { return 0 };
        let mut turn = Turn { queue: self, partition, done: 0 };
        loop {
            let item = self.parts[partition].items.pop();
            let after = After { turn: &mut turn, panicked: true };
            operate(partition, item.expect("an item is added before its token"));
            if !after.more(quantum) {
                break;
            }
        }
        turn.done
    }

    fn len(&self) -> usize {
        let done = self.done.load(Ordering::Relaxed);
        self.added.load(Ordering::Relaxed).saturating_sub(done)
    }

    fn partitions(&self) -> usize {
        self.parts.len()
    }
}

/// A partition that this thread owns.
struct Turn<'a, T> {
    queue: &'a Hybrid<T>,
    partition: usize,
    done: usize,
}

impl<T> Drop for Turn<'_, T> {
    fn drop(&mut self) {
        self.queue.done.fetch_add(self.done, Ordering::Relaxed);
    }
}

/// What is due after each item, also after a panic.
struct After<'t, 'a, T> {
    turn: &'t mut Turn<'a, T>,
    panicked: bool,
}

impl<T> After<'_, '_, T> {
    /// Whether this thread goes on with the partition.
    fn more(mut self, quantum: usize) -> bool {
        self.panicked = false;
        let left = self.count();
        let pause = self.turn.done >= quantum;
        if left && pause {
            self.pass_on();
        }
        left && !pause
    }

    /// Counts the item as done; whether others were delegated to this thread.
    fn count(&mut self) -> bool {
        self.turn.done += 1;
        let taken = &self.turn.queue.parts[self.turn.partition].taken;
        // Release: the state of the partition, to who owns it next. Acquire: the items of delegated tokens.
        taken.fetch_sub(1, Ordering::AcqRel) > 1
    }

    fn pass_on(&self) {
        self.turn.queue.master.push(Token::Owner(self.turn.partition));
    }
}

impl<T> Drop for After<'_, '_, T> {
    fn drop(&mut self) {
        if self.panicked && self.count() {
            self.pass_on();
        }
    }
}
