//! What has changed in a table, row by row, as entries of files: see [`crate::panes`] for the keys.
//!
//! A value is the words of the accumulators, little-endian, with 1 for a byte value that is there; then those byte values, each behind its
//! length; then, where the shape tracks changes, whether the row is listed as changed.

use std::borrow::Cow;

use super::{NULL, Table};
use crate::error::StateFault;
use crate::slots::Slots;
use crate::wire::{Reader, put_blob};

/// A row as it came.
pub(crate) struct Row<'a> {
    pub(crate) hash: u64,
    pub(crate) null: bool,
    /// Of keys of bytes.
    pub(crate) key: &'a [u8],
    pub(crate) value: &'a [u8],
}

/// A row that was read.
struct Parsed<'a> {
    words: Vec<u64>,
    blobs: Vec<Option<Cow<'a, [u8]>>>,
    changed: bool,
}

impl Table {
    /// Words before the accumulators.
    fn head(&self) -> usize {
        1 + usize::from(self.key.has_bytes())
    }

    /// Positions of the rows that were written since the mark, if there was one.
    pub(crate) fn touched(&self) -> Option<&Slots> {
        self.undo.as_ref().map(|undo| &undo.touched)
    }

    /// Hash of the key at a position, and whether it is the null. Its bytes are added to `key`, its value to `value`.
    pub(crate) fn put_row(&self, position: usize, key: &mut Vec<u8>, value: &mut Vec<u8>) -> u64 {
        let (row, null) = (self.row(position), self.is_null(position));
        key.push(u8::from(null));
        if self.key.has_bytes() {
            key.extend_from_slice(self.key_bytes(position));
        }
        let offsets = self.heap.as_ref().map_or(&[][..], |heap| &heap.offsets);
        for (at, word) in row.iter().enumerate().skip(self.head()) {
            let is_number = offsets.iter().any(|(offset, _)| *offset == at);
            let word = if is_number { u64::from(*word != 0) } else { *word };
            value.extend_from_slice(&word.to_le_bytes());
        }
        for &(at, kind) in offsets.iter().filter(|(at, _)| row[*at] != 0) {
            put_blob(value, kind.pack(self.blob(row[at])));
        }
        if let Some(changed) = &self.changed {
            value.push(u8::from(changed.contains(position as u32)));
        }
        self.hash_at(position)
    }

    /// Takes rows in place of those that are here. They count as changed since the mark; undone, they stay. If one is wrong, none is taken.
    pub(crate) fn take_rows(&mut self, rows: &[Row<'_>]) -> Result<(), StateFault> {
        let parsed = rows.iter().map(|row| self.parse(row)).collect::<Result<Vec<_>, _>>()?;
        self.reserve(rows.len());
        let undo = self.undo.take();
        let mut come = Vec::with_capacity(rows.len());
        for (row, parsed) in rows.iter().zip(parsed) {
            let position = match (row.null, self.key.has_bytes()) {
                (true, _) => self.special(NULL),
                (false, true) => self.find_bytes(row.hash, row.key),
                (false, false) => self.find_int(row.hash),
            };
            self.set_row(position, parsed);
            come.push(position as u32);
        }
        self.undo = undo;
        let len = self.len();
        if let Some(undo) = &mut self.undo {
            let (words, stride) = (&self.words[usize::from(self.first)..], usize::from(self.stride));
            for position in come {
                if self.changed.as_ref().is_some_and(|changed| changed.contains(position)) {
                    undo.changed.insert(position);
                }
                undo.save(position, words, stride, self.mask as usize + 1);
            }
            undo.len = len;
            if let Some(heap) = &mut self.heap {
                heap.blobs.keep();
                undo.heap = (heap.keys.len(), heap.blobs.len());
            }
        }
        Ok(())
    }

    fn parse<'a>(&self, row: &Row<'a>) -> Result<Parsed<'a>, StateFault> {
        let corrupt = |what| Err(StateFault::Corrupt { what });
        if (row.null && !row.key.is_empty())
            || (!self.key.has_bytes() && !row.key.is_empty())
            || (row.null && !self.key.has_null())
        {
            return corrupt("the key of a row");
        }
        let mut reader = Reader::new(row.value);
        let mut words = Vec::with_capacity(self.stride() - self.head());
        reader.items(self.stride() - self.head(), &mut words, u64::from_le_bytes)?;
        let mut blobs = Vec::new();
        for &(at, kind) in self.heap.iter().flat_map(|heap| &heap.offsets) {
            let cell = &words[at - self.head() - 1..];
            // The count before it says whether there is a value.
            if cell[1] != u64::from(cell[0] > 0) {
                return corrupt("the values of a row");
            }
            if cell[1] == 0 {
                blobs.push(None);
                continue;
            }
            let Some(blob) = kind.unpack(cell, reader.blob()?) else { return corrupt("what a row has gathered") };
            blobs.push(Some(blob));
        }
        let changed = if self.changed.is_some() { reader.u8()? } else { 0 };
        reader.finish()?;
        if changed > 1 {
            return corrupt("the list of changed rows");
        }
        Ok(Parsed { words, blobs, changed: changed == 1 })
    }

    /// Overwrites the accumulators of a row.
    fn set_row(&mut self, position: usize, parsed: Parsed<'_>) {
        let (head, at, stride) = (self.head(), self.at(position), self.stride());
        let row = &mut self.words[at..at + stride];
        let heap = self.heap.as_deref_mut();
        let numbers: Vec<u64> = heap.iter().flat_map(|heap| heap.offsets.iter().map(|&(at, _)| row[at])).collect();
        row[head..].copy_from_slice(&parsed.words);
        if let Some(heap) = heap {
            for ((&(at, _), number), blob) in heap.offsets.iter().zip(numbers).zip(parsed.blobs) {
                row[at] = 0;
                if let Some(blob) = blob {
                    row[at] = number;
                    heap.blobs.put(&mut row[at], &blob);
                }
            }
        }
        match (&mut self.changed, parsed.changed) {
            (Some(changed), true) => _ = changed.insert(position as u32),
            (Some(changed), false) => changed.remove(position as u32),
            (None, _) => {}
        }
    }
}
