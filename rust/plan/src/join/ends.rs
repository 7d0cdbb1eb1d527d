//! When keys have rows that may be over: their hashes by the time behind which a watermark finds them.
//!
//! Many keys have the same end (of a window, or of a millisecond), so one search takes or gives many of them.
//!
//! Invariant: no end without a hash.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

/// Hashes for which an empty list keeps its memory, and how many such lists there are.
const KEPT: usize = 1 << 12;
const SPARE: usize = 64;
/// Bytes of an end in the tree, whose nodes ascending ends leave little more than half full.
const END_BYTES: usize = 76;

/// The keys of one end; most ends of rows have one.
enum Same {
    One(u64),
    Many {
        hashes: Vec<u64>,
        /// Whether they descend, so that the last is the least.
        sorted: bool,
    },
}

/// See the module.
#[derive(Default)]
pub(super) struct Ends {
    by_end: BTreeMap<i64, Same>,
    spare: Vec<Vec<u64>>,
    /// Hashes for which all lists together have memory.
    room: usize,
    /// Hashes, of which several may be the same.
    len: usize,
}

impl Ends {
    #[inline]
    pub(super) fn push(&mut self, end: i64, hash: u64) {
        self.len += 1;
        let same = match self.by_end.entry(end) {
            Entry::Vacant(vacant) => {
                vacant.insert(Same::One(hash));
                return;
            }
            Entry::Occupied(occupied) => occupied.into_mut(),
        };
        if let Same::One(first) = same {
            let mut hashes = self.spare.pop().unwrap_or_default();
            self.room -= hashes.capacity();
            hashes.push(*first);
            self.room += hashes.capacity();
            *same = Same::Many { hashes, sorted: false };
        }
        if let Same::Many { hashes, sorted } = same {
            self.room -= hashes.capacity();
            hashes.push(hash);
            self.room += hashes.capacity();
            *sorted = false;
        }
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
        let (hash, left) = match first.get_mut() {
            Same::One(hash) => (Some(*hash), 0),
            Same::Many { hashes, sorted } => {
                if !*sorted {
                    hashes.sort_unstable_by(|a, b| b.cmp(a));
                    *sorted = true;
                }
                (hashes.pop(), hashes.len())
            }
        };
        self.len -= 1;
        if left == 0
            && let Same::Many { hashes: empty, .. } = first.remove()
        {
            match empty.capacity() <= KEPT && self.spare.len() < SPARE {
                true => self.spare.push(empty),
                false => self.room -= empty.capacity(),
            }
        }
        hash
    }

    /// How many there are.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Memory that it takes, about.
    pub(super) fn bytes(&self) -> usize {
        END_BYTES * self.by_end.len() + 8 * self.room
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
                let lists = ends.by_end.values().map(|same| match same {
                    Same::One(_) => (1, 0),
                    Same::Many { hashes, .. } => (hashes.len(), hashes.capacity()),
                });
                let spare = ends.spare.iter().map(|list| (0, list.capacity()));
                let (len, room) = lists.chain(spare).fold((0, 0), |(len, room), (l, r)| (len + l, room + r));
                prop_assert_eq!((len, room), (heap.len(), ends.room));
                prop_assert_eq!(ends.len(), heap.len());
            }
        }
    }
}
