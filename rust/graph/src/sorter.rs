//! Numbers in order, without repeats, however many there are: what memory does not hold goes to a scratch file as sorted runs.
//!
//! Invariants: at most `most` numbers are in memory, and a buffer per run; runs of one size are merged when there are many,
//! so that there are never more than a few dozen; what [`Sorter::merge`] gives ascends strictly.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::collections::binary_heap::PeekMut;
use std::io;
use std::ops::Range;

use crate::scratch::{Reader, Scratch};

/// Runs of one level that become one run of the next.
const FAN: usize = 64;

/// Numbers in order, without repeats, however many there are.
pub(crate) struct Sorter {
    scratch: Scratch,
    most: usize,
    values: Vec<u64>,
    /// Sorted runs; level `i` has runs made of `FAN` to the `i` pieces of memory.
    levels: Vec<Vec<Range<u64>>>,
}

impl Sorter {
    /// Keeps at most `most` numbers in memory.
    pub(crate) fn new(scratch: &Scratch, most: usize) -> Self {
        let most = most.max(2);
        Self { scratch: scratch.clone(), most, values: Vec::with_capacity(most), levels: Vec::new() }
    }

    pub(crate) fn push(&mut self, value: u64) -> io::Result<()> {
        self.values.push(value);
        if self.values.len() < self.most { Ok(()) } else { self.spill() }
    }

    fn spill(&mut self) -> io::Result<()> {
        self.sort();
        if self.values.len() < self.most / 2 {
            return Ok(()); // mostly repeats
        }
        let mut run = self.scratch.put(&self.values)?;
        self.values.clear();
        for level in 0.. {
            if self.levels.len() == level {
                self.levels.push(Vec::new());
            }
            self.levels[level].push(run);
            if self.levels[level].len() < FAN {
                break;
            }
            let runs = std::mem::take(&mut self.levels[level]);
            let size = runs.iter().map(|run| run.end - run.start).sum();
            let mut writer = self.scratch.writer(self.scratch.reserve(size), 8192);
            let mut merge = Merge::new(&self.scratch, runs, Vec::new(), self.most)?;
            while let Some(value) = merge.next()? {
                writer.push(value)?;
            }
            run = writer.finish()?;
        }
        Ok(())
    }

    fn sort(&mut self) {
        self.values.sort_unstable();
        self.values.dedup();
    }

    /// All numbers, ascending, each once.
    pub(crate) fn merge(mut self) -> io::Result<Merge> {
        self.sort();
        let runs = self.levels.into_iter().flatten().collect();
        Merge::new(&self.scratch, runs, self.values, self.most)
    }
}

/// Sorted runs as one.
pub(crate) struct Merge {
    runs: Vec<Reader<u64>>,
    /// The run that was in memory, and how much of it is behind.
    own: (Vec<u64>, usize),
    heads: BinaryHeap<Reverse<(u64, usize)>>,
    last: Option<u64>,
}

impl Merge {
    fn new(scratch: &Scratch, runs: Vec<Range<u64>>, own: Vec<u64>, most: usize) -> io::Result<Self> {
        let buffer = (most / 4 / runs.len().max(1)).clamp(16, 1 << 16);
        let mut merge = Self {
            runs: runs.into_iter().map(|run| scratch.reader(run, buffer)).collect(),
            own: (own, 0),
            heads: BinaryHeap::new(),
            last: None,
        };
        for at in 0..=merge.runs.len() {
            if let Some(value) = merge.take(at)? {
                merge.heads.push(Reverse((value, at)));
            }
        }
        Ok(merge)
    }

    fn take(&mut self, run: usize) -> io::Result<Option<u64>> {
        if let Some(run) = self.runs.get_mut(run) {
            return run.next();
        }
        self.own.1 += 1;
        Ok(self.own.0.get(self.own.1 - 1).copied())
    }

    /// No more numbers than this come from here on.
    pub(crate) fn most(&self) -> u64 {
        let runs = self.runs.iter().map(Reader::left).sum::<u64>();
        runs + self.own.0.len().saturating_sub(self.own.1) as u64 + self.heads.len() as u64
    }

    pub(crate) fn next(&mut self) -> io::Result<Option<u64>> {
        loop {
            let Some(&Reverse((value, run))) = self.heads.peek() else { return Ok(None) };
            match self.take(run)? {
                Some(next) => *self.heads.peek_mut().expect("it was there") = Reverse((next, run)),
                None => drop(self.heads.peek_mut().map(PeekMut::pop)),
            }
            if self.last != Some(value) {
                self.last = Some(value);
                return Ok(self.last);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn numbers_come_in_order_and_once_however_many_runs_there_are() {
        let mut seed = 3_u64;
        let mut random = |most: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % most
        };
        for (count, most) in [(0, 4), (3, 4), (100, 7), (2_000, 2), (20_000, 100)] {
            let scratch = Scratch::new(&std::env::temp_dir(), Arc::default()).unwrap();
            let mut sorter = Sorter::new(&scratch, most);
            let values = (0..count).map(|_| random(count / 2 + 1)).collect::<Vec<_>>();
            values.iter().for_each(|&value| sorter.push(value).unwrap());
            assert!(sorter.values.len() <= most);
            let mut merge = sorter.merge().unwrap();
            let found = std::iter::from_fn(|| merge.next().unwrap()).collect::<Vec<_>>();
            let wanted = values.into_iter().collect::<std::collections::BTreeSet<_>>();
            assert_eq!(found, wanted.into_iter().collect::<Vec<_>>(), "{count} numbers, {most} at a time");
        }
    }
}
