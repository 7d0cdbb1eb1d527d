//! The sequencer without dataflow, progress or messages: what any schedule of pushes and steps must come out as.

use std::collections::VecDeque;

/// An element: time, worker, place in its block, value.
pub(crate) type Placed<T> = (u64, usize, usize, T);

/// One block of a worker, on its way to one other.
struct Block<T> {
    time: u64,
    worker: usize,
    values: Vec<T>,
}

/// All workers at once.
pub(crate) struct Naive<T> {
    /// By worker: its counter.
    pub(crate) counters: Vec<u64>,
    pushed: Vec<Vec<T>>,
    mail: Vec<VecDeque<Block<T>>>,
    /// Everything that was sent, in no particular order.
    sent: Vec<Placed<T>>,
}

impl<T: Clone> Naive<T> {
    pub(crate) fn new(workers: usize) -> Self {
        Naive {
            counters: vec![0; workers],
            pushed: vec![Vec::new(); workers],
            mail: (0..workers).map(|_| VecDeque::new()).collect(),
            sent: Vec::new(),
        }
    }

    pub(crate) fn push(&mut self, worker: usize, value: T) {
        self.pushed[worker].push(value);
    }

    /// One step of a worker: sends what was pushed, then reads what has come and moves beyond it.
    pub(crate) fn step(&mut self, worker: usize) {
        let values = std::mem::take(&mut self.pushed[worker]);
        if !values.is_empty() {
            let time = self.counters[worker];
            self.counters[worker] += 1;
            let placed = values.iter().cloned().enumerate().map(|(index, value)| (time, worker, index, value));
            self.sent.extend(placed);
            for (_, mail) in self.mail.iter_mut().enumerate().filter(|(to, _)| *to != worker) {
                mail.push_back(Block { time, worker, values: values.clone() });
            }
        }
        for block in self.mail[worker].drain(..) {
            assert!(block.worker != worker && !block.values.is_empty());
            self.counters[worker] = self.counters[worker].max(block.time + 1);
        }
    }

    /// The log: what was sent, sorted by place.
    pub(crate) fn log(&self) -> Vec<Placed<T>> {
        let mut log = self.sent.clone();
        log.sort_by_key(|(time, worker, index, _)| (*time, *worker, *index));
        log
    }
}
