//! When keys have rows that may be over: their hashes by the time behind which a watermark finds them.
//!
//! Many keys have the same end (of a window, or of a millisecond), so one search takes or gives many of them.
//!
//! Invariant: no end without a hash.

use std::collections::BTreeMap;

/// Hashes for which an empty list keeps its memory, and how many such lists there are.
const KEPT: usize = 1 << 12;
const SPARE: usize = 64;

/// The keys of one end.
#[derive(Default)]
struct Same {
    hashes: Vec<u64>,
    /// Whether they descend, so that the last is the least.
    sorted: bool,
}

/// See the module.
#[derive(Default)]
pub(super) struct Ends {
    by_end: BTreeMap<i64, Same>,
    len: usize,
    spare: Vec<Vec<u64>>,
}

impl Ends {
    #[inline]
    pub(super) fn push(&mut self, end: i64, hash: u64) {
        let spare = &mut self.spare;
        let new = || Same { hashes: spare.pop().unwrap_or_default(), sorted: false };
        let same = self.by_end.entry(end).or_insert_with(new);
        same.hashes.push(hash);
        same.sorted = false;
        self.len += 1;
    }

    /// The first end.
    #[inline]
    pub(super) fn first(&self) -> Option<i64> {
        self.by_end.first_key_value().map(|(end, _)| *end)
    }

    /// Takes a hash of the first end, if that is before a watermark; of those of one end the least.
    #[inline]
    pub(super) fn pop_before(&mut self, watermark: i64) -> Option<u64> {
        let mut first = self.by_end.first_entry().filter(|first| *first.key() < watermark)?;
        let same = first.get_mut();
        if !same.sorted {
            same.hashes.sort_unstable_by(|a, b| b.cmp(a));
            same.sorted = true;
        }
        let hash = same.hashes.pop();
        if same.hashes.is_empty() {
            let empty = first.remove().hashes;
            if empty.capacity() <= KEPT && self.spare.len() < SPARE {
                self.spare.push(empty);
            }
        }
        self.len -= 1;
        hash
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }
}

#[cfg(test)]
mod tests {
    use std::cmp::Reverse;
    use std::collections::BinaryHeap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn ends_come_as_from_a_heap(deeds in prop::collection::vec((0i64..8, prop::option::of(0u64..20)), 0..200)) {
            let (mut ends, mut heap) = (Ends::default(), BinaryHeap::new());
            for (end, hash) in deeds {
                match hash {
                    Some(hash) => {
                        ends.push(end, hash);
                        heap.push(Reverse((end, hash)));
                    }
                    None => {
                        let first = heap.peek().is_some_and(|Reverse((first, _))| *first < end);
                        let popped = if first { heap.pop().map(|Reverse((_, hash))| hash) } else { None };
                        prop_assert_eq!(ends.pop_before(end), popped);
                    }
                }
                prop_assert_eq!(ends.first(), heap.peek().map(|Reverse((end, _))| *end));
                prop_assert_eq!(ends.len(), heap.len());
            }
        }
    }
}
