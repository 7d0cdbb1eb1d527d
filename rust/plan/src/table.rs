//! A keyed table: rows of words at the positions that the hashes of their keys give, open addressing with linear probing.
//!
//! A position is taken from the *low* bits of the hash. The top bits chose the bin and would all fall into one part of the table (measured:
//! 4 times slower). A row lies at its position itself, so that a record costs one cache miss; [`Table::touch`] takes the misses of many
//! records at once before [`Table::update`] needs their rows.
//!
//! Invariants: a vacant position has the word 0 first; the two keys that have no position, the integer whose hash is 0 and the null, lie
//! behind the last one; at most 3/4 of the positions are taken, so a search ends.
//!
//! Undo costs what was touched: a row is saved on the first write since the mark, and new keys are listed. The same trick lists the rows
//! changed within an epoch when the shape tracks them.
//!
//! Layouts tried, CPU ns a record on a machine whose caches others used too (int64 keys, count, 256 bins, blocks of 16,384 rows, all keys
//! there; tables alone):
//!
//! | keys | index, keys, counts apart | index, rows | rows in place | and touched first | and first probe without a branch |
//! |---|---|---|---|---|---|
//! | 2^16 | 12.7 | 13.1 | 17.8 | 16.4 | 10.9 |
//! | 2^20 | 50.7 | 50.4 | 32.4 | 26.0 | 22.9 |
//! | 2^24 | 69.0 | 68.9 | 48.8 | 37.8 | 29.9 |
//! | 2^20, 4,096 bins | 62.5 | 65.7 | 41.0 | 44.4 | 30.5 |
//!
//! Touching with prefetch instructions instead of loads was no faster (24.8, 38.3 with 4,096 bins), so the loop is safe code. Through the whole
//! path, searching by line and slices of 65,536 rows took 2^20 keys from 25 to 21, 4,096 bins from 59 to 37, one bin from 33 to 21.
//!
//! Departure: keys are their hashes where the hash is a bijection (see `key`), so a row keeps the hash only; and rows
//! lie at the positions that the low bits give, while the bin is the top bits.

mod changes;
mod chunk;
#[cfg(test)]
mod twin;

use std::ops::Range;

use crate::acc::{At, Blobs, Input, Kind, Place, Wrapped};
use crate::bytes::Texts;
use crate::hash::NULL_HASH;
use crate::key::{KeyKind, Keys};
use crate::record::Shape;
use crate::slots::Slots;

pub(crate) use changes::Row;

/// Words of a cache line, and positions that are searched as one. Groups of rows of two words are lines.
pub(crate) const LINE: usize = 8;
pub(crate) const GROUP: usize = 4;
/// Positions of the smallest table.
const LEAST_POSITIONS: usize = 8;
/// A table grows when fewer of the records at hand than this would find room if they were new.
const LEAST_ROOM: usize = 16;
/// The keys without a position: the integer whose hash is 0, and the null.
const ZERO: usize = 0;
const NULL: usize = 1;

/// Memory that updates use, and reuse from bin to bin.
#[derive(Default)]
pub(crate) struct Scratch {
    at: Vec<u32>,
    missed: Vec<u32>,
    ids: Vec<u64>,
    from: Vec<u32>,
}

/// What only keys of bytes and byte values need.
#[derive(Clone, Default)]
pub(crate) struct Heap {
    pub(crate) keys: Texts,
    pub(crate) blobs: Blobs,
    /// The words of a row that number byte values, and what those are of.
    offsets: Box<[(usize, Kind)]>,
}

impl Scratch {
    /// Of the rows of the table that was merged last their positions, and those that they went to; only where there was room for all.
    pub(crate) fn met(&self) -> impl Iterator<Item = (usize, usize)> {
        self.from.iter().zip(&self.at).map(|(&from, &at)| (from as usize, at as usize))
    }
}

struct Undo {
    /// Rows written since the mark, new ones included.
    touched: Slots,
    /// Old rows as they were: what they are, then their words.
    saved: Vec<u64>,
    /// At the mark: the rows listed as changed, how many keys there were, the length of the heap.
    changed: Slots,
    len: usize,
    heap: (usize, usize),
}

impl Undo {
    /// Saves the row at a position, unless it is already; `words` begin with the first row.
    #[inline]
    fn save(&mut self, position: u32, words: &[u64], stride: usize, positions: usize) {
        if self.touched.insert(position) {
            let what = (position as usize).checked_sub(positions).map_or(ORDINARY, |special| special as u64);
            let changed = if self.changed.contains(position) { CHANGED } else { 0 };
            self.saved.push(what | changed);
            self.saved.extend_from_slice(&words[position as usize * stride..][..stride]);
        }
    }
}

/// In a saved row's first word: an ordinary row or one of those without a position; plus [`CHANGED`].
const ORDINARY: u64 = 2;
const CHANGED: u64 = 1 << 8;

/// See the module. What an update reads of it is one cache line.
pub(crate) struct Table {
    /// The rows, from the first word that begins a cache line.
    words: Vec<u64>,
    first: u8,
    stride: u16,
    /// Positions - 1; 0 while there are none.
    mask: u32,
    /// Keys at positions.
    used: u32,
    special: [bool; 2],
    key: KeyKind,
    heap: Option<Box<Heap>>,
    changed: Option<Box<Slots>>,
    undo: Option<Box<Undo>>,
}

const _: () = assert!(size_of::<Table>() <= 64, "a cache line");

impl Table {
    pub(crate) fn new(shape: &Shape) -> Self {
        let offsets: Box<[_]> =
            shape.accs().filter(|(kind, _)| kind.has_blob()).map(|(kind, at)| (at + 1, kind)).collect();
        let heap = shape.key.has_bytes() || !offsets.is_empty();
        Self {
            words: Vec::new(),
            first: 0,
            stride: u16::try_from(shape.stride()).expect("at most 255 aggregates of 3 words"),
            mask: 0,
            used: 0,
            special: [false; 2],
            key: shape.key,
            heap: heap.then(|| Box::new(Heap { offsets, ..Heap::default() })),
            changed: shape.track.then(Box::default),
            undo: None,
        }
    }

    /// A table of rows that lie as those of [`Table::lendable`] do.
    pub(crate) fn of_rows(shape: &Shape, rows: &[u64], used: u32) -> Self {
        let mut table = Self::new(shape);
        if used > 0 {
            let words = vec![0; rows.len() + 2 * table.stride() + LINE - 1];
            let first = words.as_ptr().align_offset(LINE * 8).min(LINE - 1);
            (table.words, table.first, table.used) = (words, first as u8, used);
            table.mask = (rows.len() / table.stride() - 1) as u32;
            table.words[first..first + rows.len()].copy_from_slice(rows);
        }
        table
    }

    /// The rows by position, vacant ones among them, and how many keys they have; `None` where the table is more than that, or a change
    /// is more than its row.
    pub(crate) fn lendable(&self) -> Option<(&[u64], usize)> {
        let more = self.heap.is_some() || self.undo.is_some() || self.changed.is_some() || self.special != [false; 2];
        let from = usize::from(self.first);
        (!more).then(|| (&self.words[from..from + self.positions() * self.stride()], self.used as usize))
    }

    pub(crate) fn len(&self) -> usize {
        self.used as usize + usize::from(self.special[ZERO]) + usize::from(self.special[NULL])
    }

    pub(crate) fn positions(&self) -> usize {
        if self.words.is_empty() { 0 } else { self.mask as usize + 1 }
    }

    fn stride(&self) -> usize {
        self.stride.into()
    }

    /// Where the row at a position begins in `words`.
    #[inline]
    fn at(&self, position: usize) -> usize {
        usize::from(self.first) + position * self.stride()
    }

    #[inline]
    pub(crate) fn row(&self, position: usize) -> &[u64] {
        &self.words[self.at(position)..][..self.stride()]
    }

    #[inline]
    fn row_mut(&mut self, position: usize) -> &mut [u64] {
        let (at, stride) = (self.at(position), self.stride());
        &mut self.words[at..at + stride]
    }

    /// Whether a taken position holds the null key.
    #[inline]
    pub(crate) fn is_null(&self, position: usize) -> bool {
        position == self.positions() + NULL
    }

    /// The bytes of the key at a taken position; only for keys of bytes.
    pub(crate) fn key_bytes(&self, position: usize) -> &[u8] {
        if self.is_null(position) { &[] } else { self.heap().keys.get(self.row(position)[1] as usize) }
    }

    /// The byte value that a word names.
    pub(crate) fn blob(&self, word: u64) -> &[u8] {
        self.heap().blobs.get(word)
    }

    pub(crate) fn heap(&self) -> &Heap {
        self.heap.as_ref().expect("made with the table when keys or values are bytes")
    }

    /// All rows by position, vacant ones among them; the last two are of the keys without a position.
    pub(crate) fn rows(&self) -> impl Iterator<Item = (usize, &[u64])> {
        let rows = self.words.get(usize::from(self.first)..).unwrap_or_default();
        rows.chunks_exact(self.stride()).take(self.positions() + 2).enumerate()
    }

    /// A word of each of [`rows`](Self::rows).
    pub(crate) fn column(&self, word: usize) -> impl Iterator<Item = u64> {
        let words = self.words.get(usize::from(self.first) + word..).unwrap_or_default();
        words.iter().step_by(self.stride()).take(self.positions() + 2).copied()
    }

    /// The greatest value of a word, and the positions of all rows that have it. Of rows with nothing only those of which something is `left`,
    /// where that is told.
    pub(crate) fn most(&self, word: usize, left: Option<usize>, positions: &mut Vec<usize>) -> u64 {
        // What is vacant has nothing.
        let most = self.column(word).max().unwrap_or_default();
        positions.clear();
        match most {
            0 => {
                let is_there = |&at: &usize| left.is_none_or(|left| self.row(at)[left] > 0);
                positions.extend(self.taken().filter(is_there));
            }
            _ => {
                positions.extend((0..).zip(self.column(word)).filter(|(_, n)| *n == most).map(|(position, _)| position))
            }
        }
        most
    }

    /// The hash of the key at a taken position.
    pub(crate) fn hash_at(&self, position: usize) -> u64 {
        if self.is_null(position) { NULL_HASH } else { self.row(position)[0] }
    }

    /// Copies rows of another table of the same shape, whose keys are not here. Neither has a heap, undo or a list of changes.
    pub(crate) fn copy_from(&mut self, other: &Self, rows: impl Iterator<Item = usize> + Clone) {
        self.reserve(rows.clone().count());
        for from in rows {
            let row = other.row(from);
            let to = if other.is_null(from) { self.special(NULL) } else { self.find_int(row[0]) };
            self.row_mut(to).copy_from_slice(row);
        }
    }

    /// The rows by bin, under the same conditions.
    pub(crate) fn divided(&self, shape: &Shape, bin_of: impl Fn(u64) -> u32) -> Vec<(u32, Self)> {
        let mut rows: Vec<(u32, usize)> = self.taken().map(|at| (bin_of(self.hash_at(at)), at)).collect();
        rows.sort_unstable();
        let part = |rows: &[(u32, usize)]| {
            let mut table = Self::new(shape);
            table.copy_from(self, rows.iter().map(|(_, position)| *position));
            (rows[0].0, table)
        };
        rows.chunk_by(|a, b| a.0 == b.0).map(part).collect()
    }

    /// The taken positions among all, ascending.
    pub(crate) fn taken(&self) -> impl Iterator<Item = usize> + Clone {
        self.taken_in(0..self.positions() + 2)
    }

    /// The taken positions in a range; the last two of all are those of the keys without a position.
    pub(crate) fn taken_in(&self, range: Range<usize>) -> impl Iterator<Item = usize> + Clone {
        let positions = self.positions();
        range.filter(move |&position| match position.checked_sub(positions) {
            None => self.words[self.at(position)] != 0,
            Some(special) => self.special[special],
        })
    }

    /// Reads the table's own lines: where its rows are cannot be asked before.
    #[inline]
    pub(crate) fn touch_head(&self) -> u64 {
        self.words.len() as u64 ^ u64::from(self.used) ^ u64::from(self.undo.is_some())
    }

    /// Reads where the rows of these hashes are to be found, so that they are in the cache when they are needed. The sum keeps the
    /// compiler from leaving the reads out.
    #[inline]
    pub(crate) fn touch(&self, hashes: &[u64]) -> u64 {
        if self.words.is_empty() {
            return 0;
        }
        hashes.iter().fold(0, |sum, &hash| sum ^ self.words[self.at((hash as u32 & self.mask) as usize)])
    }

    /// The same for rows whose positions are known.
    pub(crate) fn touch_at(&self, positions: &[u32]) -> u64 {
        positions.iter().fold(0, |sum, &position| sum ^ self.words[self.at(position as usize)])
    }

    /// Adds a block's rows: record `i` has hash `hashes[i]` and is row `rows[i]`. Rows of one key keep their order. `rows` may be empty
    /// when keys and inputs do not need them.
    pub(crate) fn update(
        &mut self,
        shape: &Shape,
        keys: &Keys,
        inputs: &[Input],
        hashes: &[u64],
        rows: &[u32],
        scratch: &mut Scratch,
    ) -> Result<(), (usize, Wrapped)> {
        let mut start = 0;
        while start < hashes.len() {
            let Some(more) = self.room_for(hashes.len() - start) else { continue };
            let part = start..start + more;
            let (hashes, rows) = (&hashes[part.clone()], rows.get(part.clone()).unwrap_or_default());
            match keys {
                _ if shape.accs.is_empty() => {
                    self.add_keys(keys, hashes, rows);
                    start = part.end;
                    continue;
                }
                Keys::Unit | Keys::Int(None) => self.find_ints(hashes, scratch),
                keys => {
                    let row = |i: usize| rows[i] as usize;
                    self.find(hashes, |i| keys.bytes(row(i)), |i| keys.is_null(row(i)), scratch);
                }
            }
            self.prepare_write(&scratch.at);
            for (index, ((kind, offset), input)) in shape.accs().zip(inputs).enumerate() {
                let place = Place { kind, stride: self.stride(), offset };
                let mut none = Blobs::default();
                let blobs = self.heap.as_mut().map_or(&mut none, |heap| &mut heap.blobs);
                let words = &mut self.words[usize::from(self.first)..];
                let mut cells = At { words, at: &scratch.at };
                place.update(&mut cells, blobs, input, rows).map_err(|wrapped| (index, wrapped))?;
            }
            start = part.end;
        }
        Ok(())
    }

    /// Adds keys that nothing is kept of but that they are there: only new ones change the table. There is room for all.
    fn add_keys(&mut self, keys: &Keys, hashes: &[u64], rows: &[u32]) {
        for (i, &hash) in hashes.iter().enumerate() {
            let len = self.len();
            let row = || rows[i] as usize;
            let position = match keys {
                Keys::Unit | Keys::Int(None) => self.find_int(hash),
                keys if keys.is_null(row()) => self.special(NULL),
                _ if self.key.has_bytes() => self.find_bytes(hash, keys.bytes(row())),
                _ => self.find_int(hash),
            };
            if self.len() > len {
                self.set_changed(position);
            }
        }
    }

    /// Adds all of `other`, a table of the same shape, to this one.
    pub(crate) fn merge(&mut self, shape: &Shape, other: &Self, scratch: &mut Scratch) -> Result<(), (usize, Wrapped)> {
        self.meet(shape, other, false, scratch)
    }

    /// Takes all of `other`, which was merged into this one, away from it. Only of shapes that [part](Shape::parts); rows of which nothing
    /// is left stay until they are [left out](Self::sift).
    pub(crate) fn part(&mut self, shape: &Shape, other: &Self, scratch: &mut Scratch) {
        let parted = self.meet(shape, other, true, scratch);
        debug_assert!(parted.is_ok(), "nothing wraps that becomes less");
    }

    /// Leaves out the rows of which a word is 0.
    pub(crate) fn sift(&mut self, word: usize) {
        let keep: Vec<bool> = self.rows().map(|(_, row)| row[word] > 0).collect();
        let kept = keep.iter().filter(|keep| **keep).count();
        let least = (kept * 4 / 3 + 1).next_power_of_two() * 2;
        self.relocate(least.clamp(LEAST_POSITIONS, self.positions()), |position| keep[position]);
    }

    /// Adds all of `other`, or takes it away.
    fn meet(&mut self, shape: &Shape, other: &Self, away: bool, scratch: &mut Scratch) -> Result<(), (usize, Wrapped)> {
        // In a table with fewer positions, rows that come in the order of theirs would pile up.
        if self.positions() < other.positions() {
            self.relocate(other.positions(), |_| true);
        }
        let mut from = std::mem::take(&mut scratch.from);
        let mut ids = std::mem::take(&mut scratch.ids);
        from.clear();
        from.extend(other.taken().map(|position| position as u32));
        let mut start = 0;
        let mut done = Ok(());
        while start < from.len() && done.is_ok() {
            let Some(more) = self.room_for(from.len() - start) else { continue };
            let from = &from[start..start + more];
            ids.clear();
            ids.extend(from.iter().map(|&position| other.row(position as usize)[0]));
            self.find(&ids, |i| other.bytes_of(from[i]), |i| other.is_null(from[i] as usize), scratch);
            self.prepare_write(&scratch.at);
            for (index, (kind, offset)) in shape.accs().enumerate() {
                let place = Place { kind, stride: self.stride(), offset };
                let (mut none, others) = (Blobs::default(), Blobs::default());
                let blobs = self.heap.as_mut().map_or(&mut none, |heap| &mut heap.blobs);
                let others = other.heap.as_ref().map_or(&others, |heap| &heap.blobs);
                let (words, theirs) =
                    (&mut self.words[usize::from(self.first)..], &other.words[usize::from(other.first)..]);
                if away {
                    place.part(words, theirs, from, &scratch.at);
                    continue;
                }
                let merged = place.merge(words, blobs, (theirs, others), from, &scratch.at);
                done = done.and(merged.map_err(|wrapped| (index, wrapped)));
            }
            start += more;
        }
        (scratch.from, scratch.ids) = (from, ids);
        done
    }

    fn bytes_of(&self, position: u32) -> &[u8] {
        if self.key.has_bytes() { self.key_bytes(position as usize) } else { &[] }
    }

    /// Makes room for so many keys more.
    pub(crate) fn make_room(&mut self, keys: usize) {
        let least = (self.used as usize + keys) * 4 / 3 + 1;
        if keys > 0 && self.positions() < least {
            self.relocate(least.next_power_of_two().max(LEAST_POSITIONS), |_| true);
        }
    }

    /// How many of `wanted` keys find room even if all are new; makes some room and says nothing when those are too few.
    fn room_for(&mut self, wanted: usize) -> Option<usize> {
        let room = (self.positions() * 3 / 4).saturating_sub(self.used as usize);
        if room < wanted.min(LEAST_ROOM) {
            self.relocate((self.positions() * 2).max(LEAST_POSITIONS), |_| true);
            return None;
        }
        Some(room.min(wanted))
    }

    /// The positions of integer keys without nulls into `scratch.at`; new keys get one. There is room for all.
    fn find_ints(&mut self, hashes: &[u64], scratch: &mut Scratch) {
        let Scratch { at, missed, .. } = scratch;
        at.resize(hashes.len(), 0);
        missed.resize(hashes.len().max(missed.len()), 0);
        let words = &self.words[usize::from(self.first)..];
        let misses = match self.stride {
            2 => first_probes::<2>(words, 2, self.mask, hashes, at, missed),
            3 => first_probes::<3>(words, 3, self.mask, hashes, at, missed),
            4 => first_probes::<4>(words, 4, self.mask, hashes, at, missed),
            _ => first_probes::<0>(words, self.stride(), self.mask, hashes, at, missed),
        };
        for &i in &missed[..misses] {
            at[i as usize] = self.find_int(hashes[i as usize]) as u32;
        }
    }

    fn find_int(&mut self, hash: u64) -> usize {
        if hash == 0 {
            return self.special(ZERO);
        }
        self.probe(hash, |_| true).unwrap_or_else(|vacant| self.take(vacant, hash))
    }

    /// The positions of keys of any kind into `scratch.at`; new keys get one. There is room for all.
    fn find<'a>(
        &mut self,
        hashes: &[u64],
        bytes: impl Fn(usize) -> &'a [u8],
        null: impl Fn(usize) -> bool,
        scratch: &mut Scratch,
    ) {
        scratch.at.clear();
        for (i, &hash) in hashes.iter().enumerate() {
            let position = if null(i) {
                self.special(NULL)
            } else if self.key.has_bytes() {
                self.find_bytes(hash, bytes(i))
            } else {
                self.find_int(hash)
            };
            scratch.at.push(position as u32);
        }
    }

    fn find_bytes(&mut self, hash: u64, bytes: &[u8]) -> usize {
        // 0 means vacant; the bytes tell keys with equal hashes apart.
        let hash = hash.max(1);
        let keys = &self.heap().keys;
        match self.probe(hash, |row| keys.get(row[1] as usize) == bytes) {
            Ok(position) => position,
            Err(vacant) => {
                let heap = self.heap.as_mut().expect("keys of bytes have a heap");
                heap.keys.push(bytes);
                let number = heap.keys.len() as u64 - 1;
                self.take(vacant, hash);
                self.row_mut(vacant)[1] = number;
                vacant
            }
        }
    }

    /// Where the key with this hash is, or the vacancy where it belongs: around the group of its position, then group after group.
    #[inline]
    fn probe(&self, hash: u64, is: impl Fn(&[u64]) -> bool) -> Result<usize, usize> {
        let position = (hash as u32 & self.mask) as usize;
        let mut group = position & !(GROUP - 1);
        loop {
            for turn in 0..GROUP {
                let position = group | (position + turn) & (GROUP - 1);
                let row = self.row(position);
                if row[0] == hash && is(row) {
                    return Ok(position);
                }
                if row[0] == 0 {
                    return Err(position);
                }
            }
            group = (group + GROUP) & self.mask as usize;
        }
    }

    fn take(&mut self, vacant: usize, hash: u64) -> usize {
        self.row_mut(vacant)[0] = hash;
        self.used += 1;
        if let Some(undo) = &mut self.undo {
            undo.touched.insert(vacant as u32);
        }
        vacant
    }

    fn special(&mut self, which: usize) -> usize {
        let position = self.positions() + which;
        if !std::mem::replace(&mut self.special[which], true)
            && let Some(undo) = &mut self.undo
        {
            undo.touched.insert(position as u32);
        }
        position
    }

    /// Saves what a rollback needs and lists what changes.
    fn prepare_write(&mut self, at: &[u32]) {
        if let Some(undo) = &mut self.undo {
            let (words, stride) = (&self.words[usize::from(self.first)..], usize::from(self.stride));
            let positions = self.mask as usize + 1;
            for &position in at {
                undo.save(position, words, stride, positions);
            }
        }
        if let Some(changed) = &mut self.changed {
            for &position in at {
                changed.insert(position);
            }
        }
    }

    /// The positions changed since the last `settle`; none when the table does not track.
    pub(crate) fn changed(&self) -> &[u32] {
        self.changed.as_ref().map_or(&[], |changed| changed.list())
    }

    pub(crate) fn set_changed(&mut self, position: usize) {
        if let Some(changed) = &mut self.changed {
            changed.insert(position as u32);
        }
    }

    /// Forgets what changed.
    pub(crate) fn settle(&mut self) {
        if let Some(changed) = &mut self.changed {
            changed.clear();
        }
    }

    /// Starts recording undo from here. Cost: what was touched since the last mark.
    pub(crate) fn mark(&mut self) {
        let len = self.len();
        let mut undo = self.undo.take().unwrap_or_else(|| {
            let (touched, changed) = (Slots::default(), Slots::default());
            Box::new(Undo { touched, saved: Vec::new(), changed, len: 0, heap: (0, 0) })
        });
        self.compact();
        undo.touched.clear();
        undo.saved.clear();
        undo.changed.clear();
        self.changed().iter().for_each(|&position| _ = undo.changed.insert(position));
        undo.len = len;
        if let Some(heap) = &mut self.heap {
            heap.blobs.let_go();
            heap.blobs.keep();
            undo.heap = (heap.keys.len(), heap.blobs.len());
        }
        self.undo = Some(undo);
    }

    /// A mark from which on the first so many that were touched since the last one count as changed.
    fn mark_again(&mut self, changed: usize) {
        // A mark gives byte values other places, and rows stay where they are.
        let touched = self.undo.as_ref().map_or(Vec::new(), |undo| undo.touched.list()[..changed].to_vec());
        self.mark();
        let (from, stride, positions) = (usize::from(self.first), self.stride(), self.mask as usize + 1);
        if let Some(undo) = &mut self.undo {
            touched.into_iter().for_each(|position| undo.save(position, &self.words[from..], stride, positions));
        }
    }

    /// Keeps no undo until the next mark.
    pub(crate) fn keep_no_undo(&mut self) {
        self.undo = None;
        if let Some(heap) = &mut self.heap {
            heap.blobs.let_go();
        }
    }

    /// Back to the last mark; without one, nothing happens.
    pub(crate) fn rollback(&mut self) {
        let Some(mut undo) = self.undo.take() else { return };
        if self.len() > undo.len {
            // New keys go: all that was touched does, and what was saved comes back below.
            let touched = std::mem::take(&mut undo.touched);
            self.changed = self.changed.take().map(|_| Box::new(std::mem::take(&mut undo.changed)));
            self.relocate(self.positions(), |position| !touched.contains(position as u32));
        } else if let Some(changed) = &mut self.changed {
            **changed = std::mem::take(&mut undo.changed);
        }
        let saved = std::mem::take(&mut undo.saved);
        for row in saved.chunks_exact(1 + self.stride()) {
            let (what, row) = (row[0], &row[1..]);
            let position = match what & !CHANGED {
                ORDINARY => {
                    let found = self.probe(row[0], |found| !self.key.has_bytes() || found[1] == row[1]);
                    found.unwrap_or_else(|vacant| self.take(vacant, row[0]))
                }
                special => self.special(special as usize),
            };
            self.row_mut(position).copy_from_slice(row);
            if what & CHANGED != 0 {
                self.set_changed(position);
            }
        }
        if let Some(heap) = &mut self.heap {
            heap.keys.truncate(undo.heap.0);
            heap.blobs.truncate(undo.heap.1);
        }
        undo.touched.clear();
        undo.saved = saved;
        undo.saved.clear();
        undo.changed.clear();
        self.changed().iter().for_each(|&position| _ = undo.changed.insert(position));
        self.undo = Some(undo);
    }

    /// Moves the rows that `keep` names by their old positions to a table of `positions` positions; the others are gone. There is room.
    fn relocate(&mut self, positions: usize, keep: impl Fn(usize) -> bool) {
        let (stride, before) = (self.stride(), self.positions());
        let empty = vec![0; (positions + 2) * stride + LINE - 1];
        // A line is 64 bytes; where alignment cannot be had, rows are merely slower.
        let first = empty.as_ptr().align_offset(LINE * 8).min(LINE - 1);
        let old_first = std::mem::replace(&mut self.first, first as u8);
        let old = std::mem::replace(&mut self.words, empty);
        self.mask = u32::try_from(positions - 1).expect("one bin holds fewer than 2^32 keys");
        self.used = 0;
        let changed = self.changed.as_deref_mut().map(std::mem::take).unwrap_or_default();
        let [touched, marked] = match &mut self.undo {
            Some(undo) => [std::mem::take(&mut undo.touched), std::mem::take(&mut undo.changed)],
            None => Default::default(),
        };
        let sets = [changed, touched, marked];
        let mut moved: [Slots; 3] = Default::default();
        for (from, row) in old[usize::from(old_first)..].chunks_exact(stride).take(before + 2).enumerate() {
            let to = match from.checked_sub(before) {
                None if row[0] == 0 => continue,
                Some(special) if !self.special[special] => continue,
                Some(special) if !keep(from) => {
                    self.special[special] = false;
                    continue;
                }
                None if !keep(from) => continue,
                Some(special) => positions + special,
                None => {
                    self.used += 1;
                    self.probe(row[0], |_| false).expect_err("nothing is what is looked for")
                }
            };
            let at = usize::from(self.first) + to * stride;
            self.words[at..at + stride].copy_from_slice(row);
            for (_, moved) in sets.iter().zip(&mut moved).filter(|(set, _)| set.contains(from as u32)) {
                moved.insert(to as u32);
            }
        }
        let [changed, touched, marked] = moved;
        if let Some(set) = &mut self.changed {
            **set = changed;
        }
        if let Some(undo) = &mut self.undo {
            (undo.touched, undo.changed) = (touched, marked);
        }
    }

    /// Drops byte values that no row names any more, when they are more than half.
    fn compact(&mut self) {
        let len = self.len();
        let positions = self.positions();
        let Some(heap) = &mut self.heap else { return };
        if heap.blobs.len() <= 64 + 2 * len * heap.offsets.len() {
            return;
        }
        let old = std::mem::take(&mut heap.blobs);
        let rows = self.words[usize::from(self.first)..].chunks_exact_mut(self.stride.into()).take(positions + 2);
        for (position, row) in rows.enumerate() {
            let taken = position.checked_sub(positions).map_or(row[0] != 0, |special| self.special[special]);
            for &(offset, _) in heap.offsets.iter().filter(|_| taken) {
                let word = std::mem::take(&mut row[offset]);
                if word != 0 {
                    heap.blobs.put(&mut row[offset], old.get(word));
                }
            }
        }
    }

    /// Empties the table, keeping its memory; only for scratch tables without undo.
    pub(crate) fn clear(&mut self) {
        self.words.fill(0);
        self.used = 0;
        self.special = [false; 2];
        if let Some(heap) = &mut self.heap {
            heap.keys.truncate(0);
            heap.blobs.truncate(0);
        }
        self.settle();
    }

    /// Bytes held, by capacity.
    pub(crate) fn bytes(&self) -> usize {
        let undo = self
            .undo
            .as_ref()
            .map_or(0, |undo| undo.touched.heap_bytes() + undo.changed.heap_bytes() + undo.saved.capacity() * 8);
        let heap = self.heap.as_ref().map_or(0, |heap| heap.keys.heap_bytes() + heap.blobs.heap_bytes());
        self.words.capacity() * 8 + self.changed.as_ref().map_or(0, |changed| changed.heap_bytes()) + heap + undo
    }
}

/// Looks for integer keys at their positions and then in the groups around them. Finds the position of each, or lists it as missed; says
/// how many are missed.
///
/// No branch depends on what is read here, so that the reads of many records are under way at once and none is guessed wrong.
#[inline]
fn first_probes<const STRIDE: usize>(
    words: &[u64],
    stride: usize,
    mask: u32,
    hashes: &[u64],
    at: &mut [u32],
    missed: &mut [u32],
) -> usize {
    let stride = if STRIDE == 0 { stride } else { STRIDE };
    let mut misses = 0;
    for (i, (&hash, at)) in hashes.iter().zip(at.iter_mut()).enumerate() {
        let position = hash as u32 & mask;
        *at = position;
        missed[misses] = i as u32;
        misses += usize::from((words[position as usize * stride] != hash) | (hash == 0));
    }
    let (mut next, among) = (0, misses);
    for place in 0..among {
        let i = missed[place] as usize;
        let hash = hashes[i];
        let group = at[i] as usize & !(GROUP - 1);
        let rows = &words[group * stride..(group + GROUP) * stride];
        let (mut found, mut turns) = (0, 0);
        for turn in 0..GROUP {
            let equal = usize::from(rows[turn * stride] == hash);
            found |= equal;
            turns += equal * turn;
        }
        at[i] = (group + turns) as u32;
        missed[next] = i as u32;
        next += 1 - found * usize::from(hash != 0);
    }
    next
}
