//! Moving a table in chunks; see [`crate::panes`] for what stands before each.
//!
//! A chunk is the number of its rows, which of them have no position (they come first), the words of the rows, and then, as far as the
//! shape has them, the bytes of the keys, byte values, and flags of changed rows. Rows come in the order of their positions, so both sides
//! go through memory once; the receiving table has at least twice as many positions as rows, or such an order would pile them up.

use std::ops::Range;

use super::{Heap, LEAST_POSITIONS, NULL, Table, ZERO};
use crate::acc::Kind;
use crate::error::StateFault;
use crate::record::Shape;
use crate::slots::Slots;
use crate::wire::{Reader, put_u32, put_words};

impl Table {
    /// Cuts the positions into ranges whose rows encode to at most `limit` bytes each (a single row may exceed it).
    pub(crate) fn cut(&self, limit: usize) -> Vec<Range<usize>> {
        let fixed = self.stride() * 8 + usize::from(self.changed.is_some());
        let mut cuts: Vec<Range<usize>> = Vec::new();
        let (mut start, mut size) = (0, 8);
        if self.heap.is_none() && self.len() * fixed + size <= limit {
            cuts.extend((self.len() > 0).then(|| 0..self.positions() + 2));
            return cuts;
        }
        for position in self.taken() {
            let more = fixed + self.heap.as_ref().map_or(0, |heap| self.heap_len(heap, position));
            if size + more > limit && size > 8 {
                cuts.push(start..position);
                (start, size) = (position, 8);
            }
            size += more;
        }
        if size > 8 {
            cuts.push(start..self.positions() + 2);
        }
        cuts
    }

    fn heap_len(&self, heap: &Heap, position: usize) -> usize {
        let key = if self.key.has_bytes() { 4 + self.key_bytes(position).len() } else { 0 };
        let row = self.row(position);
        let packed = |word, kind: Kind| if word == 0 { 0 } else { kind.pack(heap.blobs.get(word)).len() };
        let value = |&(at, kind): &(usize, Kind)| 4 + packed(row[at], kind);
        key + heap.offsets.iter().map(value).sum::<usize>()
    }

    /// Writes the rows at a range of positions, without those of `without`; says how many.
    pub(crate) fn encode(&self, range: Range<usize>, without: Option<&Slots>, out: &mut Vec<u8>) -> usize {
        let specials = self.positions().max(range.start)..range.end.max(self.positions().max(range.start));
        let ordinary = range.start..range.end.min(self.positions());
        let stays = |position: usize| without.is_none_or(|without| !without.contains(position as u32));
        let rows = || self.taken_in(specials.clone()).chain(self.taken_in(ordinary.clone())).filter(|at| stays(*at));
        let special = |which: usize| {
            let position = self.positions() + which;
            u8::from(self.special[which] && range.contains(&position) && stays(position))
        };
        let mut words = Vec::with_capacity((range.len() * 3 / 4 + 2) * self.stride());
        if without.is_some() {
            rows().for_each(|position| words.extend_from_slice(self.row(position)));
        } else {
            self.taken_in(specials.clone()).for_each(|position| words.extend_from_slice(self.row(position)));
        }
        if without.is_none() && !ordinary.is_empty() {
            let all = &self.words[self.at(ordinary.start)..self.at(ordinary.end)];
            for row in all.chunks_exact(self.stride()).filter(|row| row[0] != 0) {
                words.extend_from_slice(row);
            }
        }
        put_u32(out, (words.len() / self.stride()) as u32);
        out.push(special(ZERO) | special(NULL) << 1);
        out.reserve_exact(words.len() * 8);
        put_words(out, &words);
        if self.key.has_bytes() {
            put_texts(out, rows().map(|position| Some(self.key_bytes(position))));
        }
        if let Some(heap) = &self.heap {
            for &(at, kind) in &heap.offsets {
                let value = |position| Some(self.row(position)[at]).filter(|&word| word != 0);
                put_texts(out, rows().map(|position| value(position).map(|word| kind.pack(heap.blobs.get(word)))));
            }
        }
        if let Some(changed) = &self.changed {
            out.extend(rows().map(|position| u8::from(changed.contains(position as u32))));
        }
        words.len() / self.stride()
    }

    /// Makes room for so many keys more, such that they may come in the order of their positions elsewhere.
    pub(super) fn reserve(&mut self, count: usize) {
        let room = self.used as usize + count;
        if self.positions() < room * 2 {
            self.relocate((room * 2).next_power_of_two().max(LEAST_POSITIONS), |_| true);
        }
    }

    /// Takes the rows of a chunk, as unchanged since the mark. A chunk that is wrong, or has a key that is here already, changes nothing.
    /// All that is here then is what a rollback returns to; what had changed before still counts as changed, since bins that are merged in
    /// the middle of an epoch come one after the other.
    pub(crate) fn absorb<'a>(&mut self, shape: &Shape, reader: &mut Reader<'a>) -> Result<(), StateFault> {
        let corrupt = |what| Err(StateFault::Corrupt { what });
        let count = reader.u32()? as usize;
        let special = reader.u8()?;
        let mut words: Vec<u64> = Vec::new();
        reader.items(count.saturating_mul(self.stride()), &mut words, u64::from_le_bytes)?;
        let keys = if self.key.has_bytes() { read_texts(reader, count)? } else { Vec::new() };
        let blobs = shape.blobs().map(|_| read_texts(reader, count)).collect::<Result<Vec<_>, _>>()?;
        let flags = if self.changed.is_some() { reader.take(count)? } else { &[] };
        reader.finish()?;
        let specials = [ZERO, NULL].into_iter().filter(|which| special >> which & 1 == 1).collect::<Vec<_>>();
        if special > 3 || specials.len() > count || (self.key.has_bytes() && special & 1 == 1) {
            return corrupt("the keys without a hash");
        }
        if keys.iter().any(Option::is_none) {
            return corrupt("the bytes of the keys");
        }
        let odd = words.chunks_exact(self.stride()).skip(specials.len()).any(|row| row[0] == 0);
        let empty = |(at, values): (usize, &Vec<Option<&[u8]>>)| {
            let mut rows = words.chunks_exact(self.stride()).zip(values);
            rows.any(|(row, value)| (row[at - 1] > 0) != value.is_some())
        };
        if odd || shape.blobs().zip(&blobs).any(empty) {
            return corrupt("the rows of a table");
        }
        let blobs = shape.accs().filter(|(kind, _)| kind.has_blob()).zip(&blobs).map(|((kind, at), values)| {
            let rows = words.chunks_exact(self.stride()).zip(values);
            let unpack = |(row, value): (&[u64], &Option<&'a [u8]>)| match value {
                None => Some(None),
                Some(value) => kind.unpack(&row[at..], value).map(Some),
            };
            rows.map(unpack).collect::<Option<Vec<_>>>()
        });
        let Some(blobs) = blobs.collect::<Option<Vec<_>>>() else { return corrupt("what a row has gathered") };
        self.reserve(count);
        let before = self.heap.as_ref().map_or((0, 0), |heap| (heap.keys.len(), heap.blobs.len()));
        let changed = self.undo.as_ref().map_or(0, |undo| undo.touched.list().len());
        let mut come = Vec::with_capacity(count);
        let mut twice = false;
        for (i, row) in words.chunks_exact(self.stride()).enumerate() {
            if self.heap.is_none() && i >= specials.len() {
                match self.probe(row[0], |_| true) {
                    Err(vacant) => {
                        self.take(vacant, row[0]);
                        self.row_mut(vacant).copy_from_slice(row);
                        come.push(vacant as u32);
                        continue;
                    }
                    Ok(_) => {
                        twice = true;
                        break;
                    }
                }
            }
            let len = self.len();
            let position = match (specials.get(i), keys.get(i)) {
                (Some(&which), _) => self.special(which),
                (None, Some(bytes)) => self.find_bytes(row[0], bytes.unwrap_or_default()),
                (None, None) => self.find_int(row[0]),
            };
            if self.len() == len {
                twice = true;
                break;
            }
            come.push(position as u32);
            let (at, stride) = (self.at(position), self.stride());
            let to = &mut self.words[at..at + stride];
            let number = to.get(1).copied().unwrap_or_default();
            to.copy_from_slice(row);
            to[0] = if specials.get(i).is_some() { 0 } else { row[0].max(1) };
            if let Some(heap) = &mut self.heap {
                if self.key.has_bytes() {
                    to[1] = number;
                }
                for ((at, _), values) in heap.offsets.iter().zip(&blobs) {
                    to[*at] = 0;
                    if let Some(value) = &values[i] {
                        heap.blobs.put(&mut to[*at], value);
                    }
                }
            }
        }
        if twice {
            let mut gone = Slots::default();
            come.iter().for_each(|&position| _ = gone.insert(position));
            self.relocate(self.positions(), |position| !gone.contains(position as u32));
            if let Some(heap) = &mut self.heap {
                heap.keys.truncate(before.0);
                heap.blobs.truncate(before.1);
            }
            return corrupt("a key comes twice");
        }
        for (&position, _) in come.iter().zip(flags).filter(|(_, flag)| **flag != 0) {
            self.set_changed(position as usize);
        }
        match (&self.undo, &mut self.heap) {
            (Some(_), _) => self.mark_again(changed),
            (None, Some(heap)) => heap.blobs.let_go(),
            (None, None) => {}
        }
        Ok(())
    }
}

/// Lengths, then bytes; a value that is not there has a length of its own.
fn put_texts<'a>(out: &mut Vec<u8>, texts: impl Iterator<Item = Option<&'a [u8]>> + Clone) {
    let len =
        |text: &[u8]| u32::try_from(text.len()).ok().filter(|&len| len < NO_TEXT).expect("a value is below 4 GiB");
    texts.clone().for_each(|text| put_u32(out, text.map_or(NO_TEXT, len)));
    texts.flatten().for_each(|text| out.extend_from_slice(text));
}

const NO_TEXT: u32 = u32::MAX;

fn read_texts<'a>(reader: &mut Reader<'a>, count: usize) -> Result<Vec<Option<&'a [u8]>>, StateFault> {
    let mut lens = Vec::new();
    reader.items(count, &mut lens, u32::from_le_bytes)?;
    lens.into_iter().map(|len| if len == NO_TEXT { Ok(None) } else { reader.take(len as usize).map(Some) }).collect()
}
