//! Rows of words: how one key and its accumulators lie side by side, in tables and on their way out.
//!
//! A row is `[hash, (number of its key's bytes,) accumulators...]`, all 64-bit words, so that a key and what is counted for it share a
//! cache line (measured: one miss a record; with keys, counts and an index in columns of their own it was three).

use smallvec::SmallVec;

use crate::acc::{Blobs, Kind};
use crate::bytes::Texts;
use crate::key::KeyKind;
use crate::op::{BLOCK_BYTES, BLOCK_ROWS};
use crate::table::Table;

/// What the rows of a table hold; equal on both sides of a move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) key: KeyKind,
    pub(crate) accs: SmallVec<[Kind; 8]>,
    /// Whether changed rows are listed.
    pub(crate) track: bool,
}

impl Shape {
    /// Words before the first accumulator.
    fn head(&self) -> usize {
        1 + usize::from(self.key.has_bytes())
    }

    /// Words of a row.
    pub(crate) fn stride(&self) -> usize {
        self.head() + self.accs.iter().map(|kind| kind.words()).sum::<usize>()
    }

    /// The accumulators with their offsets in a row.
    pub(crate) fn accs(&self) -> impl Iterator<Item = (Kind, usize)> {
        self.accs.iter().scan(self.head(), |next, &kind| {
            let at = *next;
            *next += kind.words();
            Some((kind, at))
        })
    }

    /// The accumulators with their offsets from the first of them.
    pub(crate) fn cells(&self) -> impl Iterator<Item = (Kind, usize)> {
        let head = self.head();
        self.accs().map(move |(kind, at)| (kind, at - head))
    }

    /// The word of a row that is 0 when all that was merged into it has been taken away again; none where that cannot be done or told.
    pub(crate) fn parts(&self) -> Option<usize> {
        let parts = !self.key.has_bytes() && !self.track && self.accs.iter().all(|kind| kind.parts());
        self.accs().find(|(kind, _)| parts && *kind == Kind::Rows).map(|(_, at)| at)
    }

    /// The offsets of the words that number byte values.
    pub(crate) fn blobs(&self) -> impl Iterator<Item = usize> {
        self.accs().filter(|(kind, _)| kind.has_blob()).map(|(_, at)| at + 1)
    }
}

/// Rows without an index, on their way out.
#[derive(Default)]
pub(crate) struct Records {
    words: Vec<u64>,
    stride: usize,
    /// The bytes of each row's key, for keys of bytes.
    pub(crate) keys: Texts,
    /// The rows whose key is the null of a single column, ascending.
    pub(crate) nulls: Vec<u32>,
    /// Byte values; their words count from 1.
    pub(crate) blobs: Texts,
}

impl Records {
    pub(crate) fn new(shape: &Shape) -> Self {
        Self { stride: shape.stride(), ..Self::default() }
    }

    pub(crate) fn len(&self) -> usize {
        self.words.len() / self.stride
    }

    /// Whether they make a block of output, by rows or by bytes.
    pub(crate) fn are_many(&self) -> bool {
        self.len() >= BLOCK_ROWS || self.keys.bytes() + self.blobs.bytes() >= BLOCK_BYTES
    }

    /// Copies the row at a position of `table`.
    #[inline]
    pub(crate) fn push(&mut self, shape: &Shape, table: &Table, position: usize) {
        let start = self.words.len();
        match *table.row(position) {
            // Rows of known length are copied without a call.
            [a, b] => self.words.extend([a, b]),
            [a, b, c] => self.words.extend([a, b, c]),
            [a, b, c, d] => self.words.extend([a, b, c, d]),
            ref row => self.words.extend_from_slice(row),
        }
        if table.is_null(position) {
            self.nulls.push((start / self.stride) as u32);
        }
        if shape.key.has_bytes() {
            self.keys.push(table.key_bytes(position));
        }
        for (_, at) in shape.accs().filter(|(kind, _)| kind.tells_blob()) {
            let word = &mut self.words[start + at + 1];
            if *word != 0 {
                self.blobs.push(table.blob(*word));
                *word = self.blobs.len() as u64;
            }
        }
    }

    /// Adds a row of no table: its hash, whether its key is the null, the key's bytes, and its accumulators.
    pub(crate) fn push_cells(
        &mut self,
        shape: &Shape,
        (hash, null, key): (u64, bool, &[u8]),
        (words, blobs): (&[u64], &Blobs),
    ) {
        let start = self.words.len();
        self.words.push(hash);
        if null {
            self.nulls.push((start / self.stride) as u32);
        }
        if shape.key.has_bytes() {
            self.words.push(0);
            self.keys.push(key);
        }
        self.words.extend_from_slice(words);
        for (_, at) in shape.accs().filter(|(kind, _)| kind.tells_blob()) {
            let word = &mut self.words[start + at + 1];
            if *word != 0 {
                self.blobs.push(blobs.get(*word));
                *word = self.blobs.len() as u64;
            }
        }
    }

    /// One word of every row.
    pub(crate) fn column(&self, at: usize) -> impl ExactSizeIterator<Item = u64> + Clone {
        self.words.get(at..).unwrap_or_default().iter().step_by(self.stride).copied()
    }

    /// The byte value that a word names.
    pub(crate) fn blob(&self, word: u64) -> &[u8] {
        self.blobs.get(word as usize - 1)
    }

    /// Forgets all rows, keeping the memory.
    pub(crate) fn clear(&mut self) {
        self.words.clear();
        self.keys.truncate(0);
        self.nulls.clear();
        self.blobs.truncate(0);
    }
}
