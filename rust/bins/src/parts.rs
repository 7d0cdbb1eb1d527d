//! Bins that are split: the part that a hash falls into, and what each part has.
//!
//! A bin as the dataflow began is one of `2^bits`; its *parts* have longer prefixes, of up to [`MAX_BITS`] bits. A bin is named by one number, which
//! never changes its meaning: below `2^bits` it is the prefix of a bin that is whole, else a 1 and then the prefix.
//!
//! Invariants: parts are disjoint; where no bin is split nothing is kept, so that one look tells.
//!
//! Source: Megaphone §4.4 names splitting as future work; M-24. Ours: a prefix tree as one table per split bin, of the depth of its finest part, so
//! that finding a part is one look more.

use penstock_files::Range;

use crate::bin::{MAX_BITS, bin};

/// The number of a bin, where bins were of `bits` bits at the beginning; `None` for a range that is no bin: a coarser one.
///
/// # Examples
/// ```
/// use penstock_bins::{Range, number_of, range_of};
/// let fine = Range::new(0b1011, 4).unwrap();
/// assert_eq!(number_of(fine, 4), Some(0b1011));
/// assert_eq!(number_of(fine, 2), Some(0b1_1011));
/// assert_eq!(range_of(0b1_1011, 2), Some(fine));
/// assert_eq!((number_of(fine, 5), range_of(0b111, 2)), (None, None));
/// ```
#[must_use]
pub fn number_of(range: Range, bits: u8) -> Option<u32> {
    match range.length() {
        length if length == bits => Some(range.prefix()),
        length if length > bits => Some(1 << length | range.prefix()),
        _ => None,
    }
}

/// The range of a bin by its number; `None` for a number that no bin has.
#[must_use]
pub fn range_of(number: u32, bits: u8) -> Option<Range> {
    if number >> bits == 0 {
        return Range::new(number, bits);
    }
    let length = number.ilog2() as u8;
    if length <= bits || length > MAX_BITS {
        return None;
    }
    Range::new(number & !(1 << length), length)
}

/// Nothing is there.
const NOTHING: u32 = u32::MAX;

/// Parts of bins, each with a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Parts {
    bits: u8,
    /// By bin, as long as one is split.
    split: Vec<Option<Box<Split>>>,
    count: usize,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Split {
    /// Bits by which the finest part is longer than the bin.
    depth: u8,
    /// Of each prefix of that length the number of its part, and its value.
    at: Vec<(u32, u32)>,
}

impl Parts {
    pub(crate) fn new(bits: u8) -> Self {
        Self { bits, split: Vec::new(), count: 0 }
    }

    /// Whether there is any.
    #[inline]
    pub(crate) fn any(&self) -> bool {
        self.count > 0
    }

    /// The part that a hash falls into, and its value; `None` where there is none.
    pub(crate) fn find(&self, hash: u64) -> Option<(u32, u32)> {
        let split = self.split.get(bin(hash, self.bits) as usize)?.as_deref()?;
        let place = (hash << self.bits) >> (64 - split.depth);
        Some(split.at[place as usize]).filter(|(number, _)| *number != NOTHING)
    }

    /// The value of a part.
    pub(crate) fn get(&self, number: u32) -> Option<u32> {
        let range = range_of(number, self.bits)?;
        self.find(range.first()).filter(|(found, _)| *found == number).map(|(_, value)| value)
    }

    /// The parts of a bin that is split, by hash.
    pub(crate) fn of(&self, whole: u32) -> Vec<(u32, u32)> {
        let split = self.split.get(whole as usize).and_then(Option::as_deref);
        let mut parts: Vec<(u32, u32)> = split.iter().flat_map(|split| &split.at).copied().collect();
        parts.dedup();
        parts.retain(|(number, _)| *number != NOTHING);
        parts
    }

    /// All parts, by hash.
    pub(crate) fn all(&self) -> impl Iterator<Item = (u32, u32)> {
        (0..self.split.len() as u32).flat_map(|whole| self.of(whole))
    }

    /// The bin that a part is of.
    pub(crate) fn whole(&self, number: u32) -> Option<u32> {
        let range = range_of(number, self.bits)?;
        Some(bin(range.first(), self.bits))
    }

    /// Puts a part with its value in the place of those that it meets.
    pub(crate) fn set(&mut self, number: u32, value: u32) {
        let Some(range) = range_of(number, self.bits).filter(|range| range.length() > self.bits) else { return };
        self.replace(range, &[(number, value)]);
    }

    /// Takes out what is in a range.
    pub(crate) fn unset(&mut self, range: Range) {
        self.replace(range, &[]);
    }

    /// Puts disjoint parts of a range in the place of what is in it. Cost: all parts of the bin, however many are put.
    pub(crate) fn replace(&mut self, range: Range, with: &[(u32, u32)]) {
        let whole = bin(range.first(), self.bits);
        let ranged = |(number, value): (u32, u32)| Some((range_of(number, self.bits)?, (number, value)));
        let mut parts: Vec<(Range, (u32, u32))> = self.of(whole).into_iter().filter_map(ranged).collect();
        parts.retain(|(one, _)| !one.intersects(range));
        parts.extend(with.iter().copied().filter_map(ranged));
        let Some(longest) = parts.iter().map(|(range, _)| range.length()).max() else {
            if let Some(split) = self.split.get_mut(whole as usize)
                && split.take().is_some()
            {
                self.count -= 1;
            }
            if self.count == 0 {
                self.split = Vec::new();
            }
            return;
        };
        let depth = longest - self.bits;
        let mut at = vec![(NOTHING, NOTHING); 1 << depth];
        for (range, part) in parts {
            let each = 1_usize << (longest - range.length());
            let from = (range.prefix() as usize & ((1 << (range.length() - self.bits)) - 1)) * each;
            at[from..from + each].fill(part);
        }
        if self.split.is_empty() {
            self.split.resize_with(1 << self.bits, || None);
        }
        let before = self.split[whole as usize].replace(Box::new(Split { depth, at }));
        self.count += usize::from(before.is_none());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn numbers_name_one_range_each() {
        for bits in [0, 1, 5, 8, 20] {
            let mut seen = std::collections::BTreeMap::new();
            for length in bits..=(bits + 4).min(MAX_BITS) {
                for prefix in 0..(1u32 << length).min(300) {
                    let range = Range::new(prefix, length).unwrap();
                    let number = number_of(range, bits).unwrap();
                    assert_eq!(seen.insert(number, range), None);
                    assert_eq!(range_of(number, bits), Some(range));
                }
            }
            if let Some(length) = bits.checked_sub(1) {
                assert_eq!(number_of(Range::new(0, length).unwrap(), bits), None);
            }
            for none in [1 << bits, (1 << (bits + 1)) - 1, 1 << 21, u32::MAX] {
                assert_eq!(range_of(none, bits), None, "{none} at {bits} bits");
            }
        }
    }

    proptest! {
        /// Equals a list of ranges that is searched.
        #[test]
        fn finds_what_a_search_finds(
            bits in 0u8..4,
            deeds in prop::collection::vec((any::<u64>(), 1u8..7, 0u32..9, any::<bool>()), 0..40),
            hashes in prop::collection::vec(any::<u64>(), 50),
        ) {
            let mut parts = Parts::new(bits);
            let mut list: Vec<(Range, u32)> = Vec::new();
            for (hash, more, value, takes) in deeds {
                let range = Range::new(bin(hash, bits + more), bits + more).unwrap();
                list.retain(|(one, _)| !one.intersects(range));
                if takes {
                    parts.unset(range);
                } else {
                    parts.set(number_of(range, bits).unwrap(), value);
                    list.push((range, value));
                }
                prop_assert_eq!(parts.any(), !list.is_empty());
                for &hash in hashes.iter().chain([&hash]) {
                    let expected = list.iter().find(|(range, _)| range.contains(hash));
                    let expected = expected.map(|(range, value)| (number_of(*range, bits).unwrap(), *value));
                    prop_assert_eq!(parts.find(hash), expected);
                }
                list.sort_unstable_by_key(|(range, _)| range.first());
                let all: Vec<_> = list.iter().map(|(range, value)| (number_of(*range, bits).unwrap(), *value)).collect();
                prop_assert_eq!(parts.all().collect::<Vec<_>>(), all.clone());
                for (number, value) in all {
                    prop_assert_eq!(parts.get(number), Some(value));
                    prop_assert_eq!(parts.get(number + 1).is_some(), list.iter().any(|(range, _)| number_of(*range, bits) == Some(number + 1)));
                }
            }
            let mut canonical = Parts::new(bits);
            list.iter().for_each(|(range, value)| canonical.set(number_of(*range, bits).unwrap(), *value));
            prop_assert_eq!(&parts, &canonical);
            list.iter().for_each(|(range, _)| parts.unset(*range));
            prop_assert_eq!(parts, Parts::new(bits));
        }
    }
}
