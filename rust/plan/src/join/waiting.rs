//! Right rows that have met none, where they go with the watermark and one meets at most one left row: one behind the other, as they came.
//!
//! Most of them never meet any. So to keep one costs little more than a copy of its bytes, those that are over together go at once, and who looks
//! for one looks at the hashes of all ([`super::sides`] puts them among the others where that is too many).
//!
//! Invariants: `ends` ascend, and the last is the length of `bytes`; `times` are the least and the greatest time of the rows.

/// Bytes for which an empty one keeps its memory.
const KEPT: usize = 1 << 14;

/// A row that waits.
#[derive(Clone, Copy)]
pub(super) struct Waits<'a> {
    pub(super) hash: u64,
    pub(super) name: &'a [u8],
    pub(super) time: i64,
    pub(super) number: u32,
    pub(super) row: &'a [u8],
}

#[derive(Clone, Copy)]
struct Entry {
    time: i64,
    /// Where its name and row end, which stand behind those before it.
    end: usize,
    /// Bytes of its name.
    name: u32,
    number: u32,
}

/// See the module.
#[derive(Default)]
pub(super) struct Waiting {
    hashes: Vec<u64>,
    entries: Vec<Entry>,
    bytes: Vec<u8>,
    times: Option<(i64, i64)>,
}

impl Waiting {
    #[inline]
    pub(super) fn push(&mut self, waits: Waits<'_>) {
        let Waits { hash, name, time, number, row } = waits;
        self.bytes.extend_from_slice(name);
        self.bytes.extend_from_slice(row);
        let name = u32::try_from(name.len()).expect("a key is below 4 GiB");
        self.hashes.push(hash);
        self.entries.push(Entry { time, end: self.bytes.len(), name, number });
        self.note(time);
    }

    #[inline]
    fn note(&mut self, time: i64) {
        let (least, most) = self.times.unwrap_or((time, time));
        self.times = Some((least.min(time), most.max(time)));
    }

    /// The least and the greatest time of a row; none where there are no rows.
    #[inline]
    pub(super) fn times(&self) -> Option<(i64, i64)> {
        self.times
    }

    /// Of each row.
    #[inline]
    pub(super) fn hashes(&self) -> &[u64] {
        &self.hashes
    }

    fn get(&self, at: usize) -> Waits<'_> {
        let Entry { time, end, name, number } = self.entries[at];
        let begin = at.checked_sub(1).map_or(0, |before| self.entries[before].end);
        let (name, row) = self.bytes[begin..end].split_at(name as usize);
        Waits { hash: self.hashes[at], name, time, number, row }
    }

    /// The rows from the one with this number in their order on.
    pub(super) fn iter(&self, from: usize) -> impl Iterator<Item = Waits<'_>> {
        (from..self.entries.len()).map(|at| self.get(at))
    }

    /// Lets go of the rows that are not to be kept; after an error of all that were refused before it.
    pub(super) fn retain<E>(&mut self, mut keep: impl FnMut(Waits<'_>) -> Result<bool, E>) -> Result<(), E> {
        let (mut kept, mut begin, mut bytes, mut done) = (0, 0, 0, Ok(()));
        self.times = None;
        for at in 0..self.entries.len() {
            let Entry { time, end, name, number } = self.entries[at];
            let (of_key, row) = self.bytes[begin..end].split_at(name as usize);
            let stays = match &done {
                Ok(()) => keep(Waits { hash: self.hashes[at], name: of_key, time, number, row }),
                Err(_) => Ok(true),
            };
            if stays.unwrap_or_else(|error| {
                done = Err(error);
                true
            }) {
                self.bytes.copy_within(begin..end, bytes);
                bytes += end - begin;
                self.hashes[kept] = self.hashes[at];
                self.entries[kept] = Entry { time, end: bytes, name, number };
                kept += 1;
                self.note(time);
            }
            begin = end;
        }
        self.hashes.truncate(kept);
        self.entries.truncate(kept);
        self.bytes.truncate(bytes);
        done
    }

    pub(super) fn clear(&mut self) {
        if self.bytes() > KEPT {
            *self = Self::default();
            return;
        }
        self.hashes.clear();
        self.entries.clear();
        self.bytes.clear();
        self.times = None;
    }

    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Bytes that it takes.
    pub(super) fn bytes(&self) -> usize {
        8 * self.hashes.capacity() + size_of::<Entry>() * self.entries.capacity() + self.bytes.capacity()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    type Kept = (u64, Vec<u8>, i64, u32, Vec<u8>);

    fn all(waiting: &Waiting, from: usize) -> Vec<Kept> {
        let kept = |w: Waits<'_>| (w.hash, w.name.to_vec(), w.time, w.number, w.row.to_vec());
        waiting.iter(from).map(kept).collect()
    }

    proptest! {
        #[test]
        fn what_waits_equals_a_list(
            rows in prop::collection::vec((0u64..4, 0usize..3, -5i64..5, any::<u32>(), 0usize..4), 0..40),
            goes in prop::collection::vec((0u64..4, prop::option::of(0usize..20)), 0..4),
        ) {
            let (mut waiting, mut list) = (Waiting::default(), Vec::<Kept>::new());
            for (at, (hash, name, time, number, row)) in (0u8..).zip(rows) {
                let (name, row) = (vec![at; name], vec![at ^ 0xff; row]);
                waiting.push(Waits { hash, name: &name, time, number, row: &row });
                list.push((hash, name, time, number, row));
            }
            for (goes, fails) in goes {
                prop_assert_eq!(all(&waiting, 0), list.clone());
                prop_assert_eq!(all(&waiting, list.len() / 2), list[list.len() / 2..].to_vec());
                let times = || list.iter().map(|row| row.2);
                prop_assert_eq!(waiting.times(), times().min().zip(times().max()));
                let mut seen = 0;
                let done = waiting.retain(|row| {
                    seen += 1;
                    if Some(seen) == fails { Err(seen) } else { Ok(row.hash != goes) }
                });
                let failed = fails.filter(|at| (1..=list.len()).contains(at));
                prop_assert_eq!(done, failed.map_or(Ok(()), Err));
                let mut at = 0;
                list.retain(|row| {
                    at += 1;
                    row.0 != goes || failed.is_some_and(|failed| at >= failed)
                });
            }
            waiting.clear();
            prop_assert!(waiting.is_empty() && waiting.times().is_none() && waiting.hashes().is_empty());
        }
    }
}
