//! Reading in few pieces: a store that is far away costs by the request, not by the byte.
//!
//! Owns: what has been read of a file and is still wanted. A small file is read as a whole when it is opened, of a larger one its end,
//! which has the index. Who has told which chunks will be wanted ([`Ahead::expect`]) gets those that lie together by one read.
//!
//! Invariants: nothing is read that is not between chunks that are wanted, but for the end of a file; a piece is dropped when all of it that was
//! wanted has been given; what was not expected, or is asked for once more, is read by itself.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::read::ReadAt;

/// Files of at most so many bytes are read at once.
const WHOLE_BYTES: u64 = 256 << 10;
/// Of larger ones so many at their end: an index of some 600 segments.
const END_BYTES: u64 = 16 << 10;
/// What lies between two chunks that are wanted is read with them when it is not longer: sooner done than another request.
const GAP_BYTES: u64 = 128 << 10;

/// A file and what is kept of it.
#[derive(Debug)]
pub(crate) struct Ahead<R> {
    source: R,
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    /// Of a file whose end was read: where that begins, and its bytes.
    end: (u64, Vec<u8>),
    /// What was expected, and is not arranged yet: offset and length.
    expected: Vec<(u64, u32)>,
    /// Pieces that will be read, by offset: where they end, and how many of their bytes are wanted.
    due: BTreeMap<u64, (u64, u64)>,
    /// Pieces that were read, by offset: their bytes, and how many are wanted still.
    read: BTreeMap<u64, (Vec<u8>, u64)>,
}

impl Kept {
    /// These bytes, where they have been read.
    fn take(&mut self, offset: u64, length: usize) -> Option<Vec<u8>> {
        let part = |from: u64, bytes: &[u8]| {
            let at = usize::try_from(offset.checked_sub(from)?).ok()?;
            bytes.get(at..at.checked_add(length)?).map(<[u8]>::to_vec)
        };
        if let Some(found) = part(self.end.0, &self.end.1) {
            return Some(found);
        }
        let (from, (bytes, wanted)) = self.read.range_mut(..=offset).next_back()?;
        let (from, found) = (*from, part(*from, bytes)?);
        *wanted = wanted.saturating_sub(length as u64);
        if *wanted == 0 {
            self.read.remove(&from);
        }
        Some(found)
    }
}

impl<R: ReadAt> Ahead<R> {
    pub(crate) fn new(source: R) -> Self {
        Ahead { source, kept: Mutex::default() }
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        // Each change to it is one step.
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the end of the file; all of a small one.
    pub(crate) fn read_end(&self, length: u64) -> io::Result<()> {
        let bytes = if length <= WHOLE_BYTES { length } else { END_BYTES };
        let from = length - bytes;
        let end = self.source.read_at(from, bytes as usize)?;
        // Of a file that is shorter or longer than it should be nothing is kept: whoever reads it sees that.
        if end.len() as u64 == bytes {
            self.kept().end = (from, end);
        }
        Ok(())
    }

    /// Forgets what was read at the end, unless it is the whole file.
    pub(crate) fn drop_end(&self) {
        let mut kept = self.kept();
        if kept.end.0 > 0 {
            kept.end = Default::default();
        }
    }

    /// These bytes will be read once more than was told before.
    pub(crate) fn expect(&self, parts: impl Iterator<Item = (u64, u32)>) {
        self.kept().expected.extend(parts);
    }

    /// What was expected is read in pieces of at most so many bytes, or of one part that is longer.
    pub(crate) fn arrange(&self, most: u64) {
        let mut kept = self.kept();
        let mut expected = std::mem::take(&mut kept.expected);
        expected.sort_unstable();
        let mut piece: Option<(u64, u64, u64)> = None;
        for (offset, length) in expected {
            let (end, length) = (offset + u64::from(length), u64::from(length));
            piece = match piece {
                // Who asks again for what is in it has no piece of its own.
                Some((from, until, wanted))
                    if end <= until || (offset <= until + GAP_BYTES && end.max(until) - from <= most) =>
                {
                    Some((from, until.max(end), wanted + length))
                }
                before => {
                    kept.due.extend(before.map(|(from, until, wanted)| (from, (until, wanted))));
                    Some((offset, end, length))
                }
            };
        }
        kept.due.extend(piece.map(|(from, until, wanted)| (from, (until, wanted))));
    }
}

impl<R: ReadAt> ReadAt for Ahead<R> {
    fn length(&self) -> io::Result<u64> {
        self.source.length()
    }

    fn read_at(&self, offset: u64, length: usize) -> io::Result<Vec<u8>> {
        let mut kept = self.kept();
        if let Some(found) = kept.take(offset, length) {
            return Ok(found);
        }
        let due = kept.due.range(..=offset).next_back().map(|(from, piece)| (*from, *piece));
        match due {
            Some((from, (until, wanted))) if offset + length as u64 <= until => {
                kept.due.remove(&from);
                let bytes = self.source.read_at(from, (until - from) as usize)?;
                if bytes.len() as u64 == until - from {
                    kept.read.insert(from, (bytes, wanted));
                }
            }
            _ => {}
        }
        kept.take(offset, length).map_or_else(|| self.source.read_at(offset, length), Ok)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    /// Bytes that tell where they are, and what was asked of them.
    struct Asked(Vec<u8>, RefCell<Vec<(u64, usize)>>);

    impl ReadAt for Asked {
        fn length(&self) -> io::Result<u64> {
            Ok(self.0.len() as u64)
        }

        fn read_at(&self, offset: u64, length: usize) -> io::Result<Vec<u8>> {
            self.1.borrow_mut().push((offset, length));
            self.0.read_at(offset, length)
        }
    }

    fn of(length: usize) -> Ahead<Asked> {
        let bytes = (0..length).map(|at| (at / 7) as u8).collect();
        Ahead::new(Asked(bytes, RefCell::default()))
    }

    fn asked(ahead: &Ahead<Asked>) -> Vec<(u64, usize)> {
        ahead.source.1.take()
    }

    fn same(ahead: &Ahead<Asked>, offset: usize, length: usize) {
        let found = ahead.read_at(offset as u64, length).unwrap();
        assert_eq!(found, ahead.source.0[offset..offset + length], "{offset} {length}");
    }

    #[test]
    fn a_small_file_is_read_at_once_and_of_a_large_one_its_end() {
        let small = of(1000);
        small.read_end(1000).unwrap();
        small.drop_end();
        [(0, 11), (988, 12), (500, 488), (11, 489)].into_iter().for_each(|(at, length)| same(&small, at, length));
        assert_eq!(asked(&small), [(0, 1000)]);
        let large = of(1 << 20);
        large.read_end(1 << 20).unwrap();
        same(&large, (1 << 20) - 12, 12);
        same(&large, 0, 11);
        assert_eq!(asked(&large), [((1 << 20) - END_BYTES, END_BYTES as usize), (0, 11)]);
        large.drop_end();
        same(&large, (1 << 20) - 12, 12);
        assert_eq!(asked(&large).len(), 1);
    }

    #[test]
    fn what_lies_together_comes_together() {
        let ahead = of(1 << 20);
        let parts = [(100, 50), (150, 50), (1000, 10), (400_000, 100), (400_100, 300_000), (700_100, 5)];
        ahead.expect(parts[3..].iter().copied());
        ahead.expect(parts[..3].iter().copied());
        ahead.arrange(2000);
        for (offset, length) in parts {
            same(&ahead, offset as usize, length as usize);
        }
        // One of 910 bytes, one that is alone though it is longer than a piece, and what is beside that.
        assert_eq!(asked(&ahead), [(100, 910), (400_000, 100), (400_100, 300_000), (700_100, 5)]);
        assert!(ahead.kept().read.is_empty() && ahead.kept().due.is_empty(), "nothing is kept that nobody wants");
        same(&ahead, 150, 50);
        assert_eq!(asked(&ahead), [(150, 50)], "once more, by itself");
    }

    #[test]
    fn two_readers_of_a_file_in_turn_read_it_once() {
        let ahead = of(1 << 20);
        let part = |number: u64| (number * 1000, 1000u32);
        ahead.expect((0..1000).map(part));
        // And a part that two ranges have.
        ahead.expect([part(3)].into_iter());
        ahead.arrange(100_000);
        for number in 0..500 {
            for (offset, length) in [part(number), part(500 + number)] {
                same(&ahead, offset as usize, length as usize);
            }
        }
        assert_eq!(asked(&ahead).len(), 10);
        same(&ahead, 3000, 1000);
        assert_eq!(asked(&ahead).len(), 0);
        assert!(ahead.kept().read.is_empty());
    }

    #[test]
    fn what_many_want_is_read_once_however_long_it_is() {
        let ahead = of(1 << 20);
        ahead.expect([(0, 50_000), (0, 50_000), (10_000, 40_000), (0, 50_000), (50_000, 100)].into_iter());
        ahead.arrange(2_000);
        for (offset, length) in [(0, 50_000), (10_000, 40_000), (0, 50_000), (50_000, 100), (0, 50_000)] {
            same(&ahead, offset, length);
        }
        assert_eq!(asked(&ahead), [(0, 50_000), (50_000, 100)]);
        assert!(ahead.kept().read.is_empty() && ahead.kept().due.is_empty());
    }

    #[test]
    fn a_store_that_gives_too_little_is_seen() {
        let ahead = of(1000);
        ahead.expect([(900, 50), (960, 500)].into_iter());
        ahead.arrange(1 << 20);
        assert_eq!(ahead.read_at(900, 50).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        same(&ahead, 900, 50);
    }
}
