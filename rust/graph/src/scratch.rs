//! A file without a name for what does not fit in memory.
//!
//! The file loses its name as soon as it is open, so its space is free again however the process ends. Ranges of it are
//! reserved before they are written and written once; readers hold a range and a small buffer. A [`Scratch`] that is told to
//! stop fails at the next read or write.

use std::fs::{self, File, OpenOptions};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::SystemTime;

use bytemuck::Pod;

/// An error once `stop` is set.
pub(crate) fn go_on(stop: &AtomicBool) -> io::Result<()> {
    if stop.load(Ordering::Relaxed) { Err(io::Error::other("stopped")) } else { Ok(()) }
}

/// A file that nobody else has: `name` is given random numbers until there is none of that name. Processes on several hosts,
/// or in several containers, may have one number and share a folder.
pub(crate) fn fresh(name: impl Fn(u64) -> PathBuf) -> io::Result<(File, PathBuf)> {
    const TRIES: usize = 16;
    for left in (0..TRIES).rev() {
        // Keys of the standard hash are random for every process and differ from one to the next.
        let path = name(RandomState::new().hash_one(SystemTime::now()));
        match OpenOptions::new().read(true).write(true).create_new(true).open(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && left > 0 => {}
            opened => return Ok((opened?, path)),
        }
    }
    unreachable!("the last try returns")
}

/// A nameless file.
#[derive(Clone, Debug)]
pub(crate) struct Scratch {
    pub(crate) file: Arc<File>,
    end: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
}

impl Scratch {
    pub(crate) fn new(folder: &Path, stop: Arc<AtomicBool>) -> io::Result<Self> {
        let (file, path) = fresh(|random| folder.join(format!("penstock-{random:016x}.scratch")))?;
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

    pub(crate) fn go_on(&self) -> io::Result<()> {
        go_on(&self.stop)
    }

    /// What whoever writes for the same caller looks at.
    pub(crate) fn stop(&self) -> &Arc<AtomicBool> {
        &self.stop
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

    /// How many values are still to come.
    pub(crate) fn left(&self) -> u64 {
        (self.rest.end - self.rest.start) / size_of::<T>() as u64 + (self.buffer.len() - self.at) as u64
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scratch_that_is_stopped_fails() {
        let stop = Arc::new(AtomicBool::new(false));
        let scratch = Scratch::new(&std::env::temp_dir(), stop.clone()).unwrap();
        let range = scratch.put(&[1_u64, 2]).unwrap();
        stop.store(true, Ordering::Relaxed);
        assert!(scratch.put(&[1_u64]).is_err() && scratch.reader::<u64>(range, 8).next().is_err());
    }

    #[test]
    fn a_file_of_somebody_else_is_never_taken() {
        let folder = std::env::temp_dir().join(format!("penstock-fresh-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("0"), "another's").unwrap();
        let tries = std::cell::RefCell::new(Vec::new());
        let made = || {
            fresh(|random| {
                tries.borrow_mut().push(random);
                folder.join(format!("{}", (tries.borrow().len() - 1) / 2)) // each name twice
            })
        };
        assert_eq!(made().unwrap().1, folder.join("1"));
        assert_eq!(made().unwrap().1, folder.join("2"), "not what was made before");
        assert_eq!(fs::read(folder.join("0")).unwrap(), b"another's");
        let error = fresh(|_| folder.clone()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
        let mut random = tries.into_inner();
        let count = random.len();
        random.sort_unstable();
        random.dedup();
        assert_eq!(random.len(), count, "each try has a number of its own");
        fs::remove_dir_all(&folder).unwrap();
    }
}
