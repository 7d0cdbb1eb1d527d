//! A table lent to records that come in no order of tables: what finding and changing a row needs, without the table's own lines.
//!
//! Only for tables whose keys are their hashes, whose values are words, and whose changes are not listed. Keys are found and changed, never
//! added.

use super::{GROUP, Table};
use crate::acc::{Cells, Place};

/// See the module. One that is not there finds nothing.
#[derive(Default)]
pub(crate) struct Open<'a> {
    /// The rows, by position.
    words: &'a mut [u64],
    mask: u32,
}

impl Table {
    /// Lends the table; `None` when its keys or values are more than words, or a change needs more than the row.
    #[inline]
    pub(crate) fn open(&mut self) -> Option<Open<'_>> {
        if self.heap.is_some() || self.undo.is_some() || self.changed.is_some() {
            return None;
        }
        let words = self.words.get_mut(usize::from(self.first)..).unwrap_or_default();
        Some(Open { words, mask: self.mask })
    }
}

impl Open<'_> {
    /// Words of the rows.
    pub(crate) fn words(&self) -> usize {
        self.words.len()
    }

    /// Where the search for a hash begins.
    #[inline]
    pub(crate) fn begin(&self, hash: u64) -> u32 {
        hash as u32 & self.mask
    }

    /// The hash at a position.
    #[inline]
    pub(crate) fn word(&self, stride: usize, position: u32) -> u64 {
        self.words.get(position as usize * stride).copied().unwrap_or_default()
    }

    /// Whether the row at a position is that of a hash.
    #[inline]
    pub(crate) fn holds(&self, stride: usize, position: u32, hash: u64) -> bool {
        (self.word(stride, position) == hash) & (hash != 0)
    }

    /// The position of a hash in the group where its search began, and whether it is there: no branch depends on what is read.
    #[inline]
    pub(crate) fn look_around(&self, stride: usize, position: u32, hash: u64) -> (u32, bool) {
        let group = position & !(GROUP as u32 - 1);
        let Some(rows) = self.words.get(group as usize * stride..(group as usize + GROUP) * stride) else {
            return (position, false);
        };
        let (mut found, mut turns) = (0, 0);
        for turn in 0..GROUP {
            let equal = u32::from(rows[turn * stride] == hash);
            found |= equal;
            turns += equal * turn as u32;
        }
        (group + turns, (found == 1) & (hash != 0))
    }

    /// The position of a hash that is not where its search begins.
    pub(crate) fn find(&self, stride: usize, hash: u64) -> Option<u32> {
        if self.words.is_empty() || hash == 0 {
            return None;
        }
        let position = hash as u32 & self.mask;
        let mut group = position & !(GROUP as u32 - 1);
        loop {
            for turn in 0..GROUP as u32 {
                let position = group | (position + turn) & (GROUP as u32 - 1);
                match self.words[position as usize * stride] {
                    0 => return None,
                    word if word == hash => return Some(position),
                    _ => {}
                }
            }
            group = (group + GROUP as u32) & self.mask;
        }
    }
}

/// Records at positions of many tables.
pub(crate) struct Everywhere<'a, 'b> {
    pub(crate) tables: &'a mut [Open<'b>],
    /// The table of each record.
    pub(crate) of: &'a [u32],
    pub(crate) at: &'a [u32],
}

impl Cells for Everywhere<'_, '_> {
    fn len(&self) -> usize {
        self.at.len()
    }

    #[inline]
    fn cell(&mut self, place: Place, i: usize) -> &mut [u64] {
        place.cell(self.tables[self.of[i] as usize].words, self.at[i])
    }
}
