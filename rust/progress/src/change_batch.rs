//! Signed counts per key, compacted lazily.
//!
//! The batch is a sorted, distinct prefix (which may hold zeros) and an unsorted tail. A new update is added to the last
//! entry where the key is the same; otherwise it joins the tail. Once the tail has outgrown the prefix, both are sorted and
//! summed. Where that showed many repetitions of few keys, updates look for their entry in the prefix first: at the entry
//! after the one that was found last, which serves times that come round in order, then behind the end, then by binary
//! search. So the memory follows the live distinct keys and not the updates seen, and a batch that has not changed since its
//! last compaction has nothing to do.
//!
//! Source: ChangeBatch of the rescaling paper (§3.2.2, §3.4.1). Departures: combining in the prefix, fewer and larger sorts,
//! a vector that keeps its memory rather than two inline entries.

/// A tail shorter than this never forces a compaction.
const TAIL: usize = 64;
/// The longest prefix that an update searches.
const SEARCHED: usize = 128;
/// Up to this length sorting costs no more than a wrong guess of whether it is needed.
const FEW: usize = 20;
/// How many times the prefix may the batch grow to before it is compacted again, after a compaction that found repetitions.
const GROWTH: usize = 4;
/// The same after a compaction that did not pay, for nearly all keys were distinct.
const GROWTH_DISTINCT: usize = 16;

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
    updates: Vec<(T, i64)>,
    /// Length of the sorted, distinct prefix.
    clean: usize,
    /// How many entries of the prefix became zero.
    zeros: usize,
    /// The length at which the tail is compacted.
    limit: usize,
    /// Whether keys repeat so much that an update is likely to find its entry in the prefix.
    search: bool,
    /// Where in the prefix the next update is looked for first.
    hint: usize,
}

/// The changes leaving a [`ChangeBatch`] or a frontier. May be ignored: what is not consumed is dropped.
#[derive(Debug)]
pub struct Drain<'a, T>(std::vec::Drain<'a, (T, i64)>);

impl<T> Iterator for Drain<'_, T> {
    type Item = (T, i64);
    #[inline]
    fn next(&mut self) -> Option<(T, i64)> {
        self.0.next()
    }
    #[inline]
    fn size_hint(&self) -> (usize, Option<usize>) {
        self.0.size_hint()
    }
}

impl<T> ExactSizeIterator for Drain<'_, T> {}

impl<T> Default for ChangeBatch<T> {
    fn default() -> Self {
        Self { updates: Vec::new(), clean: 0, zeros: 0, limit: TAIL, search: false, hint: 0 }
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
        self.forget();
    }

    /// Entries held now, compacted or not. At most sixteen times the keys that had a count when it was last compacted,
    /// plus a constant.
    pub fn held(&self) -> usize {
        self.updates.len()
    }

    /// Whether there is nothing to compact.
    #[inline]
    pub fn is_compact(&self) -> bool {
        self.clean == self.updates.len() && self.zeros == 0
    }

    /// There are no entries any more.
    #[inline]
    fn forget(&mut self) {
        (self.clean, self.zeros, self.limit, self.search) = (0, 0, TAIL, false);
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
    #[inline(always)] // Left to itself the compiler calls it in some crates, which doubles the cost of the common case.
    pub fn update(&mut self, key: T, diff: i64) {
        if diff == 0 {
            return;
        }
        if let Some(last) = self.updates.last_mut() {
            if last.0 == key {
                last.1 += diff;
                if last.1 == 0 || last.1 == diff {
                    self.last_turned();
                }
                return;
            }
            if self.search {
                return self.update_searching(key, diff);
            }
        }
        self.push(key, diff);
    }

    #[inline]
    fn push(&mut self, key: T, diff: i64) {
        self.updates.push((key, diff));
        if self.updates.len() >= self.limit {
            self.compact_tail();
        }
    }

    /// The last entry became zero, or it was zero, which only entries of the prefix can be.
    #[inline(never)]
    fn last_turned(&mut self) {
        if self.updates.pop_if(|last| last.1 == 0).is_some() {
            self.clean = self.clean.min(self.updates.len());
        } else {
            self.zeros -= 1;
        }
    }

    /// Adds to an entry of the prefix.
    #[inline]
    fn add_found(&mut self, at: usize, diff: i64) {
        let count = &mut self.updates[at].1;
        let before = *count;
        *count += diff;
        self.zeros = self.zeros + usize::from(*count == 0) - usize::from(before == 0);
        self.hint = if at + 1 == self.clean { 0 } else { at + 1 };
    }

    #[inline(never)]
    fn update_searching(&mut self, key: T, diff: i64) {
        let clean = self.clean;
        if self.updates[..clean].get(self.hint).is_some_and(|entry| entry.0 == key) {
            return self.add_found(self.hint, diff);
        }
        if clean == self.updates.len() && self.updates.last().is_none_or(|last| last.0 < key) {
            // Behind everything: the prefix grows, if it may.
            if clean < SEARCHED {
                self.updates.push((key, diff));
                self.clean += 1;
                return;
            }
        } else if let Ok(at) = self.updates[..clean].binary_search_by(|entry| entry.0.cmp(&key)) {
            self.add_found(at, diff);
            return;
        }
        self.push(key, diff);
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

    /// Compacts because the tail is long, and decides how to go on.
    #[cold]
    fn compact_tail(&mut self) {
        let before = self.updates.len();
        self.compact_changed();
        let kept = self.clean;
        self.search = kept > 0 && kept < SEARCHED && 2 * kept <= before;
        self.hint = 0;
        let growth = if 8 * kept > 7 * before { GROWTH_DISTINCT } else { GROWTH };
        self.limit = growth * kept + TAIL;
    }

    #[inline(never)]
    fn compact_changed(&mut self) {
        let summed = consolidate(&mut self.updates, self.clean);
        if summed || self.zeros > 0 {
            self.updates.retain(|entry| entry.1 != 0);
        }
        self.clean = self.updates.len();
        self.zeros = 0;
        self.limit = GROWTH * self.clean + TAIL;
    }

    /// Empties the batch into an iterator of compacted changes in key order. What is not consumed is dropped.
    #[inline]
    pub fn drain(&mut self) -> Drain<'_, T> {
        // A single entry may be a zero of the prefix.
        if self.updates.len() > 1 || self.zeros > 0 {
            self.compact();
        }
        if self.clean > 0 || self.search {
            self.forget();
        }
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

/// Sorts changes whose first `clean` ones are sorted and distinct, and sums equal keys. Returns whether there were any.
fn consolidate<T: Ord>(changes: &mut Vec<(T, i64)>, clean: usize) -> bool {
    if changes.len() > FEW && changes[clean.max(1) - 1..].windows(2).all(|pair| pair[0].0 < pair[1].0) {
        return false;
    }
    changes.sort_unstable_by(|a, b| a.0.cmp(&b.0));
    let before = changes.len();
    changes.dedup_by(|next, kept| {
        let same = next.0 == kept.0;
        if same {
            kept.1 += next.1;
        }
        same
    });
    changes.len() < before
}

/// Empties a list of a few changes into an iterator in which equal keys are summed and zeros dropped, in key order.
#[inline]
pub(crate) fn drain_net<T: Ord>(changes: &mut Vec<(T, i64)>) -> Drain<'_, T> {
    let plain = changes.len() < 2 || changes.len() == 2 && changes[0].0 < changes[1].0;
    if !plain && consolidate(changes, 0) {
        changes.retain(|change| change.1 != 0);
    }
    Drain(changes.drain(..))
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
        for key in 0..if cfg!(miri) { 3_000 } else { 1_000_000u64 } {
            batch.update(key + 4, 1);
            batch.update(key, -1);
            assert!(batch.held() <= 8 * GROWTH_DISTINCT + TAIL + SEARCHED, "{} entries at {key}", batch.held());
        }
        assert_eq!(batch.len(), 8);
    }

    /// A count in the sorted prefix that became zero is alone once the entries behind it have gone.
    #[test]
    fn a_zero_that_is_left_alone_is_not_handed_out() {
        let mut batch = ChangeBatch::new();
        (0..64u64).for_each(|update| batch.update(update % 2, 1));
        assert!(batch.search);
        batch.update(0, -32);
        batch.update(1, -32);
        assert_eq!(batch.drain().collect::<Vec<_>>(), []);
        assert!(batch.is_compact() && batch.is_empty());
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
    fn what_cancels_at_once_takes_no_room() {
        let mut batch = ChangeBatch::new();
        for key in 0..1000 {
            batch.update(key, 1);
            batch.update(key, -1);
            assert_eq!(batch.held(), 0);
        }
        assert!(batch.is_empty() && batch.updates.capacity() < 8);
    }

    #[test]
    fn repeated_keys_are_combined_and_not_collected() {
        let rounds = if cfg!(miri) { 30 } else { 1000 };
        let mut batch = ChangeBatch::new();
        for update in 0..100 * rounds {
            batch.update(update % 100 * 7, 1);
            // The first keys seemed to be distinct.
            let most = if update < 2000 { GROWTH_DISTINCT * TAIL + TAIL } else { 100 };
            assert!(batch.held() <= most, "{} entries at {update}", batch.held());
        }
        assert!(batch.search);
        batch.extend((0..100).map(|key| (key * 7, -rounds)));
        assert!(batch.is_empty());
    }

    /// A count in the sorted prefix that becomes zero and then is the last entry of all.
    #[test]
    fn a_zero_that_becomes_the_last_entry_counts_again() {
        let mut batch = ChangeBatch::new();
        (0..64u64).for_each(|update| batch.update(update % 4, 1));
        assert!(batch.search);
        batch.update(9, 1);
        batch.update(5, 1);
        batch.update(9, -1);
        batch.update(5, -1);
        assert_eq!((batch.held(), batch.zeros), (5, 1));
        batch.update(9, 2);
        assert_eq!(batch.zeros, 0);
        assert_eq!(batch.drain().last(), Some((9, 2)));
    }
}
