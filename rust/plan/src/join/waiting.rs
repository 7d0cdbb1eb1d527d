//! Right rows that have met none, where they go with the watermark and one meets at most one left row: one behind the other, as they came.
//!
//! Most of them never meet any. So to keep one costs little more than a copy of its bytes, and those that are over together go at once. Rows whose
//! hashes end alike are a chain, so who looks for one passes few others; chains are made by the first that looks, often nobody before they go.
//! What is taken leaves a gap until the others move up.
//!
//! Invariants: ends ascend, and the last is the length of `bytes`; each row before `chained` that was not taken is in the chain of its hash, behind those that
//! came later, and no other is in any; the times of rows are between `times`.

use std::convert::Infallible;

use crate::room::spare;

/// Bytes for which an empty one keeps its memory.
const KEPT: usize = 1 << 20;
/// Chains are a power of two, at least this.
const LEAST_CHAINS: usize = 16;
/// So many gaps are not worth moving rows.
const LEAST_GONE: usize = if cfg!(test) { 2 } else { 64 };

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
    /// One more than the place of the next in its chain, 0 at the end.
    next: u32,
    gone: bool,
}

/// See the module.
#[derive(Default)]
pub(super) struct Waiting {
    hashes: Vec<u64>,
    entries: Vec<Entry>,
    bytes: Vec<u8>,
    times: Option<(i64, i64)>,
    /// By the last bits of a hash one more than the place of the first of its chain, 0 where it has none. As many as rows that are in one, or more.
    chains: Vec<u32>,
    /// Rows that are in chains: those that came before the others.
    chained: usize,
    gone: usize,
}

impl Waiting {
    #[inline]
    pub(super) fn push(&mut self, waits: Waits<'_>) {
        let Waits { hash, name, time, number, row } = waits;
        self.bytes.extend_from_slice(name);
        self.bytes.extend_from_slice(row);
        let name = u32::try_from(name.len()).expect("a key is below 4 GiB");
        self.hashes.push(hash);
        self.entries.push(Entry { time, end: self.bytes.len(), name, number, next: 0, gone: false });
        self.note(time);
    }

    #[inline]
    fn note(&mut self, time: i64) {
        let (least, most) = self.times.unwrap_or((time, time));
        self.times = Some((least.min(time), most.max(time)));
    }

    #[inline]
    fn chain_of(&self, hash: u64) -> usize {
        hash as usize & (self.chains.len() - 1)
    }

    #[inline]
    fn chain(&mut self, at: usize) {
        let chain = self.chain_of(self.hashes[at]);
        let place = u32::try_from(at + 1).expect("fewer than 2^32 rows wait");
        self.entries[at].next = std::mem::replace(&mut self.chains[chain], place);
    }

    /// Puts all rows into chains.
    #[inline]
    fn chain_all(&mut self) {
        if self.chained == self.entries.len() {
            return;
        }
        if self.entries.len() > self.chains.len() {
            self.unchain();
            self.chains.resize((2 * self.entries.len()).next_power_of_two().max(LEAST_CHAINS), 0);
        }
        (self.chained..self.entries.len()).for_each(|at| self.chain(at));
        self.chained = self.entries.len();
    }

    fn unchain(&mut self) {
        if self.chained > 0 {
            self.chains.fill(0);
            self.chained = 0;
        }
    }

    /// No row's time is less than the one or more than the other; none where there are no rows.
    #[inline]
    pub(super) fn times(&self) -> Option<(i64, i64)> {
        self.times
    }

    fn get(&self, at: usize) -> Waits<'_> {
        let Entry { time, end, name, number, .. } = self.entries[at];
        let begin = at.checked_sub(1).map_or(0, |before| self.entries[before].end);
        let (name, row) = self.bytes[begin..end].split_at(name as usize);
        Waits { hash: self.hashes[at], name, time, number, row }
    }

    /// The rows with their places, from a place on.
    pub(super) fn iter(&self, from: usize) -> impl Iterator<Item = (usize, Waits<'_>)> {
        (from..self.entries.len()).filter(|at| !self.entries[*at].gone).map(|at| (at, self.get(at)))
    }

    /// The places of the rows of a hash, the last first.
    #[inline]
    fn of(&mut self, hash: u64) -> impl Iterator<Item = usize> {
        self.chain_all();
        let this = &*self;
        let first = if this.chains.is_empty() { 0 } else { this.chains[this.chain_of(hash)] };
        let places = std::iter::successors(first.checked_sub(1), |at| this.entries[*at as usize].next.checked_sub(1));
        places.map(|at| at as usize).filter(move |at| this.hashes[*at] == hash)
    }

    /// Whether a row of this hash waits.
    #[inline]
    pub(super) fn has(&mut self, hash: u64) -> bool {
        self.of(hash).next().is_some()
    }

    /// Gives away the rows of a hash.
    pub(super) fn take(&mut self, hash: u64, mut each: impl FnMut(Waits<'_>)) {
        let places: Vec<usize> = self.of(hash).collect();
        for &at in places.iter().rev() {
            each(self.get(at));
            self.entries[at].gone = true;
        }
        if !places.is_empty() {
            self.unlink(hash);
        }
        self.gone += places.len();
        if self.is_empty() {
            self.clear();
        } else if self.gone > LEAST_GONE && self.gone > self.len() {
            let Ok(()) = self.retain(|_| Ok::<_, Infallible>(true));
        }
    }

    /// Takes the rows that are gone out of the chain of a hash: who looks again does not pass them.
    fn unlink(&mut self, hash: u64) {
        let chain = self.chain_of(hash);
        let (mut next, mut last) = (std::mem::take(&mut self.chains[chain]), None::<usize>);
        while let Some(at) = next.checked_sub(1).map(|at| at as usize) {
            let Entry { next: behind, gone, .. } = self.entries[at];
            if !gone {
                match last {
                    None => self.chains[chain] = next,
                    Some(last) => self.entries[last].next = next,
                }
                last = Some(at);
            }
            next = behind;
        }
        if let Some(last) = last {
            self.entries[last].next = 0;
        }
    }

    /// Lets go of the rows that are not to be kept; after an error of all that were refused before it.
    pub(super) fn retain<E>(&mut self, mut keep: impl FnMut(Waits<'_>) -> Result<bool, E>) -> Result<(), E> {
        let (mut kept, mut begin, mut bytes, mut done) = (0, 0, 0, Ok(()));
        self.times = None;
        for at in 0..self.entries.len() {
            let Entry { time, end, name, number, gone, .. } = self.entries[at];
            let (of_key, row) = self.bytes[begin..end].split_at(name as usize);
            let stays = match &done {
                _ if gone => Ok(false),
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
                self.entries[kept] = Entry { time, end: bytes, name, number, next: 0, gone: false };
                kept += 1;
                self.note(time);
            }
            begin = end;
        }
        if kept == 0 {
            self.clear();
        } else {
            self.hashes.truncate(kept);
            self.entries.truncate(kept);
            self.bytes.truncate(bytes);
            self.gone = 0;
            self.unchain();
            if self.bytes() > KEPT
                && let Some(room) = spare(kept, self.entries.capacity())
            {
                self.hashes.shrink_to(room);
                self.entries.shrink_to(room);
                self.bytes.shrink_to(2 * bytes);
                self.chains = Vec::new();
            }
        }
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
        self.unchain();
        (self.times, self.gone) = (None, 0);
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len() - self.gone
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes that it takes.
    pub(super) fn bytes(&self) -> usize {
        let rows = (8 + size_of::<Entry>()) * self.entries.capacity();
        rows + self.bytes.capacity() + 4 * self.chains.capacity()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    type Kept = (u64, Vec<u8>, i64, u32, Vec<u8>);

    fn all(waiting: &Waiting, from: usize) -> Vec<Kept> {
        let kept = |(_, w): (usize, Waits<'_>)| (w.hash, w.name.to_vec(), w.time, w.number, w.row.to_vec());
        waiting.iter(from).map(kept).collect()
    }

    proptest! {
        #[test]
        fn what_waits_equals_a_list(
            rows in prop::collection::vec((0u64..4, 0usize..3, -5i64..5, any::<u32>(), 0usize..4), 0..40),
            goes in prop::collection::vec((0u64..4, prop::option::of(0usize..20), any::<bool>()), 0..6),
        ) {
            let (mut waiting, mut list) = (Waiting::default(), Vec::<Kept>::new());
            for (at, (hash, name, time, number, row)) in (0u8..).zip(rows) {
                let (name, row) = (vec![at; name], vec![at ^ 0xff; row]);
                waiting.push(Waits { hash, name: &name, time, number, row: &row });
                list.push((hash, name, time, number, row));
            }
            for (goes, fails, takes) in goes {
                prop_assert_eq!(all(&waiting, 0), list.clone());
                prop_assert_eq!((waiting.len(), waiting.is_empty()), (list.len(), list.is_empty()));
                prop_assert!((0..4).all(|hash| waiting.has(hash) == list.iter().any(|row| row.0 == hash)));
                let from = waiting.iter(0).nth(list.len() / 2).map_or(usize::MAX, |(at, _)| at);
                prop_assert_eq!(all(&waiting, from), list[list.len() / 2..].to_vec());
                let times = waiting.times();
                prop_assert!(list.iter().all(|row| times.is_some_and(|(least, most)| (least..=most).contains(&row.2))));
                prop_assert!(!list.is_empty() || times.is_none());
                if takes {
                    let mut taken = Vec::new();
                    waiting.take(goes, |w| taken.push((w.hash, w.name.to_vec(), w.time, w.number, w.row.to_vec())));
                    prop_assert_eq!(taken, Vec::from_iter(list.extract_if(.., |row| row.0 == goes)));
                    continue;
                }
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
            prop_assert!(waiting.is_empty() && waiting.times().is_none() && !waiting.has(0));
        }
    }

    #[test]
    fn few_that_wait_on_take_no_memory_of_many_that_went() {
        let mut waiting = Waiting::default();
        for hash in 0..20_000 {
            waiting.push(Waits { hash, name: b"name", time: 0, number: hash as u32, row: &[hash as u8; 100] });
        }
        let most = waiting.bytes();
        assert!(waiting.has(7) && most > 2 * KEPT);
        let Ok(()) = waiting.retain(|waits| Ok::<_, Infallible>(waits.hash % 2_000 == 0));
        assert!(waiting.bytes() < most / 50, "{} of {most} bytes", waiting.bytes());
        let left = all(&waiting, 0);
        assert!((0..20_000).step_by(2_000).eq(left.iter().map(|row| row.0)) && left[1].4 == [2_000_u64 as u8; 100]);
        assert!(waiting.has(4_000) && !waiting.has(7));
    }
}
