//! What does not fit in memory: a file without a name, and sorted numbers that spill to it.
//!
//! The file loses its name as soon as it is open, so its space is free again however the process ends. Ranges of it are
//! reserved before they are written and written once; readers hold a range and a small buffer. A [`Scratch`] that is told to
//! stop fails at the next read or write.
//!
//! Invariant of a [`Sorter`]: at most `most` numbers are in memory; what [`Sorter::merge`] gives ascends without repeats.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::collections::binary_heap::PeekMut;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use bytemuck::Pod;

/// Runs of one level that become one run of the next.
const FAN: usize = 64;

/// A nameless file.
#[derive(Clone, Debug)]
pub(crate) struct Scratch {
    pub(crate) file: Arc<File>,
    end: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
}

impl Scratch {
    pub(crate) fn new(folder: &Path, stop: Arc<AtomicBool>) -> io::Result<Self> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = folder.join(format!("penstock-{}-{number}.scratch", std::process::id()));
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path)?;
        fs::remove_file(&path)?;
        Ok(Self { file: Arc::new(file), end: Arc::default(), stop })
    }

    /// One more, which stops with this one.
    pub(crate) fn another(&self, folder: &Path) -> io::Result<Self> {
        Self::new(folder, self.stop.clone())
    }

    /// Room for so many bytes, beginning at a multiple of 8.
    pub(crate) fn reserve(&self, bytes: u64) -> Range<u64> {
        let begin = self.end.fetch_add(bytes.next_multiple_of(8), Ordering::Relaxed);
        begin..begin + bytes
    }

    fn go_on(&self) -> io::Result<()> {
        if self.stop.load(Ordering::Relaxed) { Err(io::Error::other("stopped")) } else { Ok(()) }
    }

    /// Writes values to a range of their own.
    pub(crate) fn put<T: Pod>(&self, values: &[T]) -> io::Result<Range<u64>> {
        self.go_on()?;
        let range = self.reserve(size_of_val(values) as u64);
        self.file.write_all_at(bytemuck::cast_slice(values), range.start)?;
        Ok(range)
    }

    pub(crate) fn reader<T: Pod>(&self, range: Range<u64>, buffer: usize) -> Reader<T> {
        Reader { scratch: self.clone(), rest: range, buffer: Vec::new(), most: buffer.max(1), at: 0 }
    }

    pub(crate) fn writer<T: Pod>(&self, range: Range<u64>, buffer: usize) -> Writer<T> {
        Writer {
            scratch: self.clone(),
            begin: range.start,
            at: range.start,
            end: range.end,
            buffer: Vec::new(),
            buffer_most: buffer.max(1),
        }
    }
}

/// Reads the values of a range, one after the other.
pub(crate) struct Reader<T> {
    scratch: Scratch,
    rest: Range<u64>,
    buffer: Vec<T>,
    most: usize,
    at: usize,
}

impl<T: Pod> Reader<T> {
    /// The values that come next, as many as there are in memory; none at the end.
    pub(crate) fn piece(&mut self) -> io::Result<&[T]> {
        if self.at == self.buffer.len() {
            self.scratch.go_on()?;
            let left = (self.rest.end - self.rest.start) as usize / size_of::<T>();
            self.buffer.resize(left.min(self.most), T::zeroed());
            self.scratch.file.read_exact_at(bytemuck::cast_slice_mut(&mut self.buffer), self.rest.start)?;
            self.rest.start += size_of_val(&self.buffer[..]) as u64;
            self.at = 0;
        }
        let piece = &self.buffer[self.at..];
        self.at = self.buffer.len();
        Ok(piece)
    }

    pub(crate) fn next(&mut self) -> io::Result<Option<T>> {
        if self.at == self.buffer.len() {
            self.piece()?;
            self.at = 0;
        }
        let value = self.buffer.get(self.at).copied();
        self.at += usize::from(value.is_some());
        Ok(value)
    }
}

/// Writes values to a range, one after the other.
pub(crate) struct Writer<T> {
    scratch: Scratch,
    begin: u64,
    at: u64,
    end: u64,
    buffer: Vec<T>,
    buffer_most: usize,
}

impl<T: Pod> Writer<T> {
    pub(crate) fn push(&mut self, value: T) -> io::Result<()> {
        self.buffer.push(value);
        if self.buffer.len() < self.buffer_most { Ok(()) } else { self.flush() }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.scratch.go_on()?;
        let bytes: &[u8] = bytemuck::cast_slice(&self.buffer);
        assert!(self.at + bytes.len() as u64 <= self.end, "a range of a scratch file is too small");
        self.scratch.file.write_all_at(bytes, self.at)?;
        self.at += bytes.len() as u64;
        self.buffer.clear();
        Ok(())
    }

    /// The range that was written.
    pub(crate) fn finish(mut self) -> io::Result<Range<u64>> {
        self.flush()?;
        Ok(self.begin..self.at)
    }
}

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
        let left = |run: &Reader<u64>| (run.rest.end - run.rest.start) / 8 + (run.buffer.len() - run.at) as u64;
        self.runs.iter().map(left).sum::<u64>()
            + (self.own.0.len() - self.own.1.min(self.own.0.len())) as u64
            + self.heads.len() as u64
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

    #[test]
    fn a_scratch_that_is_stopped_fails() {
        let stop = Arc::new(AtomicBool::new(false));
        let scratch = Scratch::new(&std::env::temp_dir(), stop.clone()).unwrap();
        let range = scratch.put(&[1_u64, 2]).unwrap();
        stop.store(true, Ordering::Relaxed);
        assert!(scratch.put(&[1_u64]).is_err() && scratch.reader::<u64>(range, 8).next().is_err());
    }
}
