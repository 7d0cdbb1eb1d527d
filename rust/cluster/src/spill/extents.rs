//! Which parts of a file are in use.
//!
//! Extents are handed out first fit and merge when they are given back, so a file that holds blocks of many epochs is
//! as long as the most that was ever held at once, give or take gaps, and shrinks when its end falls free.
//!
//! Invariants: free extents are disjoint, not adjacent, not empty and end before `end`.

use std::collections::BTreeMap;

/// The extents of one file.
#[derive(Debug, Default)]
pub(super) struct Extents {
    /// Free ones below `end`: offset to length.
    free: BTreeMap<u64, u64>,
    end: u64,
}

impl Extents {
    /// Where `len` bytes may go.
    pub(super) fn take(&mut self, len: u64) -> u64 {
        let fits = self.free.iter().find(|(_, free)| **free >= len).map(|(at, free)| (*at, *free));
        let Some((at, free)) = fits else {
            self.end += len;
            return self.end - len;
        };
        self.free.remove(&at);
        if free > len {
            self.free.insert(at + len, free - len);
        }
        at
    }

    /// Gives back what was taken; returns whether the file may be cut to [`end`](Self::end).
    pub(super) fn give(&mut self, at: u64, len: u64) -> bool {
        if len == 0 {
            return false;
        }
        let (mut from, mut to) = (at, at + len);
        if let Some((&before, &free)) = self.free.range(..at).next_back() {
            debug_assert!(before + free <= at, "an extent is given back once");
            if before + free == at {
                self.free.remove(&before);
                from = before;
            }
        }
        if let Some(free) = self.free.remove(&to) {
            to += free;
        }
        if to == self.end {
            self.end = from;
            return true;
        }
        self.free.insert(from, to - from);
        false
    }

    /// Length that the file must have.
    pub(super) fn end(&self) -> u64 {
        self.end
    }

    /// Bytes in use.
    #[cfg(test)]
    fn used(&self) -> u64 {
        self.end - self.free.values().sum::<u64>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn gaps_are_used_again_and_the_end_falls_back() {
        let mut extents = Extents::default();
        let taken: Vec<u64> = (0..4).map(|_| extents.take(10)).collect();
        assert_eq!(taken, [0, 10, 20, 30]);
        assert!(!extents.give(10, 10));
        assert!(!extents.give(20, 10));
        assert_eq!(extents.take(15), 10, "neighbours have merged");
        assert!(!extents.give(0, 10));
        assert!(extents.give(30, 10));
        assert_eq!(extents.end(), 25);
        assert!(extents.give(10, 15));
        assert_eq!(extents.end(), 0);
    }

    proptest! {
        /// No two extents in use overlap, and nothing is lost.
        #[test]
        fn equals_a_list(deeds in prop::collection::vec((any::<bool>(), 0usize..20, 1u64..50), 1..200)) {
            let mut extents = Extents::default();
            let mut held: Vec<(u64, u64)> = Vec::new();
            for (take, which, len) in deeds {
                if take || held.is_empty() {
                    let at = extents.take(len);
                    prop_assert!(held.iter().all(|(other, long)| at + len <= *other || other + long <= at));
                    prop_assert!(at + len <= extents.end());
                    held.push((at, len));
                } else {
                    let (at, len) = held.swap_remove(which % held.len());
                    extents.give(at, len);
                }
                prop_assert_eq!(extents.used(), held.iter().map(|(_, len)| len).sum::<u64>());
                prop_assert_eq!(extents.end(), held.iter().map(|(at, len)| at + len).max().unwrap_or(0).max(extents.end()));
            }
            for (at, len) in held {
                extents.give(at, len);
            }
            prop_assert_eq!(extents.end(), 0);
        }
    }
}
