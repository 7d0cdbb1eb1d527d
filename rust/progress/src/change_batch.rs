//! Signed counts per key, compacted lazily.
//!
//! The batch is a sorted, distinct prefix and an unsorted tail. The first few updates only form a tail. Once there is a
//! prefix, an update appends to it when it comes after everything, or adds to its entry when the prefix is short enough to
//! search and
//! repetition likely; otherwise it joins the tail, and when the tail has outgrown the prefix both are merged. So the memory follows
//! the live distinct keys and not the updates seen, and a batch that has not changed since its last compaction has nothing
//! to do.
//!
//! Source: ChangeBatch of the rescaling paper (§3.2.2, §3.4.1). Departure: search in the prefix, merge instead of a full
//! sort.

use smallvec::SmallVec;

/// Entries kept without allocation.
const INLINE: usize = 2;
/// A tail shorter than this never forces a compaction.
const TAIL: usize = 64;
/// The longest prefix that an update searches.
const SEARCHED: usize = 64;
/// From this length on a sorted prefix is merged rather than sorted again.
const MERGED: usize = 128;

/// A multiset of keys with signed counts. Equal keys are summed, zeros dropped.
///
/// ```
/// use penstock_progress::ChangeBatch;
/// let mut batch = ChangeBatch::new();
/// batch.update("a", 1);
/// batch.update("b", 2);
/// batch.update("a", -1);
/// assert_eq!(batch.drain().collect::<Vec<_>>(), [("b", 2)]);
/// ```
#[derive(Clone, Debug)]
pub struct ChangeBatch<T> {
    updates: SmallVec<[(T, i64); INLINE]>,
    /// Length of the sorted, distinct prefix.
    clean: usize,
    /// Whether the prefix may hold zero counts.
    zeros: bool,
    /// Whether keys repeat so much that an update is likely to find its entry.
    search: bool,
}

/// The changes leaving a [`ChangeBatch`] or a frontier. May be ignored: what is not consumed is dropped.
#[derive(Debug)]
pub struct Drain<'a, T>(smallvec::Drain<'a, [(T, i64); INLINE]>);

impl<T> Iterator for Drain<'_, T> {
    type Item = (T, i64);
    #[inline]
    fn next(&mut self) -> Option<(T, i64)> {
        self.0.next()
    }
    fn size_hint(&self) -> (usize, Option<usize>) {
        self.0.size_hint()
    }
}

impl<T> ExactSizeIterator for Drain<'_, T> {}

impl<T> Default for ChangeBatch<T> {
    fn default() -> Self {
        Self { updates: SmallVec::new(), clean: 0, zeros: false, search: false }
    }
}

impl<T> ChangeBatch<T> {
    /// An empty batch; allocates nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Forgets everything, keeps the memory.
    pub fn clear(&mut self) {
        self.updates.clear();
        self.clean = 0;
        self.zeros = false;
    }

    /// Entries held now, compacted or not. At most four times the keys with a count, plus a constant.
    pub fn held(&self) -> usize {
        self.updates.len()
    }

    /// Whether there is nothing to compact.
    pub fn is_compact(&self) -> bool {
        self.clean == self.updates.len() && !self.zeros
    }
}

impl<T: Ord> ChangeBatch<T> {
    /// A batch of one change.
    pub fn from_change(key: T, diff: i64) -> Self {
        let mut batch = Self::new();
        batch.update(key, diff);
        batch
    }

    /// Adds `diff` to the count of `key`. Amortised O(log n).
    #[inline]
    pub fn update(&mut self, key: T, diff: i64) {
        if diff == 0 {
            return;
        }
        let length = self.updates.len();
        if let Some(last) = self.updates.last_mut() {
            if last.0 == key {
                last.1 += diff;
                self.zeros |= last.1 == 0;
                return;
            }
            if last.1 == 0 && self.clean < length {
                *last = (key, diff);
                return;
            }
        }
        if self.clean == 0 && length < TAIL {
            self.updates.push((key, diff));
        } else {
            self.update_within(key, diff);
        }
    }

    #[inline(never)]
    fn update_within(&mut self, key: T, diff: i64) {
        let clean = self.clean;
        if clean > 0 && clean == self.updates.len() && self.updates[clean - 1].0 < key {
            if self.updates[clean - 1].1 == 0 {
                self.updates[clean - 1] = (key, diff);
            } else {
                self.updates.push((key, diff));
                self.clean += 1;
            }
            return;
        }
        if self.search
            && clean <= SEARCHED
            && let Ok(at) = self.updates[..clean].binary_search_by(|entry| entry.0.cmp(&key))
        {
            self.updates[at].1 += diff;
            self.zeros |= self.updates[at].1 == 0;
            return;
        }
        self.updates.push((key, diff));
        if self.updates.len() - clean >= (3 * clean).max(TAIL) {
            self.compact();
        }
    }

    /// Adds all changes of an iterator.
    pub fn extend(&mut self, changes: impl IntoIterator<Item = (T, i64)>) {
        for (key, diff) in changes {
            self.update(key, diff);
        }
    }

    /// Sums equal keys and drops zeros. Free when nothing changed since the last time.
    #[inline]
    pub fn compact(&mut self) {
        if !self.is_compact() {
            self.compact_changed();
        }
    }

    #[inline(never)]
    fn compact_changed(&mut self) {
        let (clean, before) = (self.clean, self.updates.len());
        if clean < MERGED {
            self.updates.sort_unstable_by(|a, b| a.0.cmp(&b.0));
        } else if clean < before {
            self.updates[clean..].sort_unstable_by(|a, b| a.0.cmp(&b.0));
            if self.updates[clean].0 <= self.updates[clean - 1].0 {
                // Two sorted runs: the stable sort finds and merges them in linear time.
                self.updates.sort_by(|a, b| a.0.cmp(&b.0));
            }
        }
        // One pass over sorted entries: equal keys meet at `kept - 1`, which is given up when its sum is zero.
        let entries = &mut self.updates[..];
        let mut kept = 0;
        for at in 0..entries.len() {
            if kept > 0 && entries[kept - 1].0 == entries[at].0 {
                entries[kept - 1].1 += entries[at].1;
            } else {
                if kept > 0 && entries[kept - 1].1 == 0 {
                    kept -= 1;
                }
                if kept < at {
                    entries.swap(kept, at);
                }
                kept += 1;
            }
        }
        if kept > 0 && entries[kept - 1].1 == 0 {
            kept -= 1;
        }
        self.updates.truncate(kept);
        self.clean = kept;
        self.zeros = false;
        self.search = kept <= SEARCHED && 2 * kept <= before;
    }

    /// Empties the batch into an iterator of compacted changes in key order. What is not consumed is dropped.
    pub fn drain(&mut self) -> Drain<'_, T> {
        self.compact();
        self.clean = 0;
        Drain(self.updates.drain(..))
    }

    /// Moves all changes into another batch.
    pub fn drain_into(&mut self, other: &mut Self) {
        if other.updates.is_empty() {
            std::mem::swap(self, other);
        } else {
            other.extend(self.updates.drain(..));
        }
        self.clear();
    }

    /// Whether all counts are zero. Compacts.
    pub fn is_empty(&mut self) -> bool {
        self.compact();
        self.updates.is_empty()
    }

    /// How many keys have a count. Compacts.
    pub fn len(&mut self) -> usize {
        self.compact();
        self.updates.len()
    }

    /// The compacted changes in key order.
    pub fn iter(&mut self) -> std::slice::Iter<'_, (T, i64)> {
        self.compact();
        self.updates.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_and_drops_zeros() {
        let mut batch = ChangeBatch::from_change(3, 2);
        batch.extend([(1, 1), (3, -2), (2, 5), (1, 1), (9, 0)]);
        assert_eq!(batch.len(), 2);
        assert_eq!(batch.iter().copied().collect::<Vec<_>>(), [(1, 2), (2, 5)]);
        let mut other = ChangeBatch::from_change(2, -5);
        batch.drain_into(&mut other);
        assert!(batch.is_empty());
        assert_eq!(other.drain().collect::<Vec<_>>(), [(1, 2)]);
        assert!(other.is_empty());
    }

    #[test]
    fn size_follows_live_keys() {
        // A queue of four live keys that moves through a million.
        let mut batch = ChangeBatch::new();
        for key in 0..1_000_000u64 {
            batch.update(key + 4, 1);
            batch.update(key, -1);
            assert!(batch.held() <= 4 * TAIL + 2 * SEARCHED, "{} entries at {key}", batch.held());
        }
        assert_eq!(batch.len(), 8);
    }

    #[test]
    fn idle_compaction_does_nothing() {
        let mut batch = ChangeBatch::new();
        batch.extend([(5, 1), (1, 1), (5, -1)]);
        assert!(!batch.is_compact());
        batch.compact();
        assert!(batch.is_compact());
        let before = batch.updates.as_ptr();
        assert!(!batch.is_empty());
        assert_eq!((batch.len(), batch.updates.as_ptr()), (1, before));
    }

    #[test]
    fn few_updates_stay_inline() {
        let mut batch = ChangeBatch::new();
        for key in 0..1000 {
            batch.update(key, 1);
            batch.update(key, -1);
        }
        assert!(!batch.updates.spilled() && batch.is_empty());
    }
}
