//! Bins that are split: the part that a hash falls into, and what each part has.
//!
//! A bin as the dataflow began is one of `2^bits`; its *parts* have longer prefixes, of up to [`MAX_BITS`] bits. A bin is named by one number, which
//! never changes its meaning: below `2^bits` it is the prefix of a bin that is whole, else a 1 and then the prefix.
//!
//! Invariants: parts are disjoint; where no bin is split nothing is kept, so that one look tells.
//!
//! Source: Megaphone §4.4 names splitting as future work; M-24. Ours: a prefix tree as one table per split bin, of the depth of its finest part, so
//! that finding a part is one look more, and to put or take out one costs its share of the table.

use std::fmt;
use std::ops::RangeInclusive;

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

/// A bin as its users name it, in errors.
///
/// # Examples
/// ```
/// use penstock_bins::BinName;
/// assert_eq!(BinName::new(0b1011, 4).to_string(), "bin 11");
/// assert_eq!(BinName::new(0b1_1011, 2).to_string(), "part (11, 4)");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BinName {
    number: u32,
    bits: u8,
}

impl BinName {
    /// Of the bin with this number, where bins were of `bits` bits at the beginning.
    #[must_use]
    pub fn new(number: u32, bits: u8) -> Self {
        Self { number, bits }
    }

    fn range(self) -> Option<Range> {
        range_of(self.number, self.bits).filter(|range| range.length() > self.bits)
    }

    pub(crate) fn is_part(self) -> bool {
        self.range().is_some()
    }
}

impl fmt::Display for BinName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.range() {
            Some(part) => write!(f, "part ({}, {})", part.prefix(), part.length()),
            None => write!(f, "bin {}", self.number),
        }
    }
}

/// The numbers of the bins, and parts of bins, that meet a range: those of one length follow each other.
pub(crate) fn meeting(range: Range, bits: u8) -> impl Iterator<Item = RangeInclusive<u32>> {
    let number = move |hash, length| number_of(Range::new(bin(hash, length), length)?, bits);
    (bits..=MAX_BITS).filter_map(move |length| Some(number(range.first(), length)?..=number(range.last(), length)?))
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

#[derive(Clone, Debug, PartialEq, Eq)]
struct Split {
    /// Bits by which the finest part is longer than the bin.
    depth: u8,
    /// Of each prefix of that length the number of its part, and its value.
    at: Vec<(u32, u32)>,
    /// How many parts are longer than the bin by so many bits.
    counts: [u32; MAX_BITS as usize + 1],
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

    /// The parts that a range meets, by hash.
    pub(crate) fn of(&self, range: Range) -> impl Iterator<Item = (u32, u32)> {
        let split = self.split.get(bin(range.first(), self.bits) as usize).and_then(Option::as_deref);
        split.into_iter().flat_map(move |split| split.of(range, self.bits))
    }

    /// All parts, by hash.
    pub(crate) fn all(&self) -> impl Iterator<Item = (u32, u32)> {
        let whole = (0..self.split.len() as u32).filter_map(|whole| range_of(whole, self.bits));
        whole.flat_map(|range| self.of(range))
    }

    /// The bin that a part is of.
    pub(crate) fn whole(&self, number: u32) -> Option<u32> {
        let range = range_of(number, self.bits)?;
        Some(bin(range.first(), self.bits))
    }

    /// Puts a part with its value in the place of those that it meets. Cost: its share of the bin; all of it where the finest parts become finer or
    /// coarser, which they do a few times while all are put or taken out one by one.
    pub(crate) fn set(&mut self, number: u32, value: u32) {
        let Some(range) = range_of(number, self.bits).filter(|range| range.length() > self.bits) else { return };
        self.replace(range, Some((number, value)));
    }

    /// Takes out what is in a range, at the same cost.
    pub(crate) fn unset(&mut self, range: Range) {
        self.replace(range, None);
    }

    fn replace(&mut self, range: Range, with: Option<(u32, u32)>) {
        if self.split.is_empty() && with.is_some() {
            self.split.resize_with(1 << self.bits, || None);
        }
        let Some(slot) = self.split.get_mut(bin(range.first(), self.bits) as usize) else { return };
        let before = usize::from(slot.is_some());
        let split = slot.get_or_insert_with(|| Box::new(Split::whole()));
        split.replace(range, self.bits, with);
        slot.take_if(|split| split.depth == 0);
        self.count = self.count + usize::from(slot.is_some()) - before;
        if self.count == 0 {
            self.split = Vec::new();
        }
    }
}

impl Split {
    /// A bin without parts.
    fn whole() -> Self {
        Self { depth: 0, at: vec![(NOTHING, NOTHING)], counts: [0; MAX_BITS as usize + 1] }
    }

    /// The parts that a range meets, by hash, of a bin of `bits` bits.
    fn of(&self, range: Range, bits: u8) -> impl Iterator<Item = (u32, u32)> {
        let (parts, mut last) = (self.at[self.places(range, bits)].iter().copied(), NOTHING);
        parts.filter(move |(number, _)| *number != NOTHING && std::mem::replace(&mut last, *number) != *number)
    }

    /// Where the prefixes of a range are, or the one that it is part of.
    fn places(&self, range: Range, bits: u8) -> std::ops::Range<usize> {
        let more = range.length() - bits;
        let prefix = range.prefix() as usize & ((1 << more) - 1);
        match self.depth.checked_sub(more) {
            Some(finer) => prefix << finer..(prefix + 1) << finer,
            None => {
                let place = prefix >> (more - self.depth);
                place..place + 1
            }
        }
    }

    /// Puts a part, if any, in the place of those that a range meets: its own.
    fn replace(&mut self, range: Range, bits: u8, with: Option<(u32, u32)>) {
        for (number, _) in self.of(range, bits).collect::<Vec<_>>() {
            let met = range_of(number, bits).expect("parts have ranges");
            let places = self.places(met, bits);
            self.at[places].fill((NOTHING, NOTHING));
            self.counts[usize::from(met.length() - bits)] -= 1;
        }
        if let Some(part) = with {
            let more = range.length() - bits;
            self.resize(self.depth.max(more));
            let places = self.places(range, bits);
            self.at[places].fill(part);
            self.counts[usize::from(more)] += 1;
        }
        let finest = self.counts.iter().rposition(|count| *count > 0);
        self.resize(finest.unwrap_or(0) as u8);
    }

    /// No part is longer than the bin by more bits than that.
    fn resize(&mut self, depth: u8) {
        if depth != self.depth {
            let at = |place: usize| self.at[(place << self.depth) >> depth];
            self.at = (0..1 << depth).map(at).collect();
            self.depth = depth;
        }
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
        #[test]
        fn bins_that_meet_are_those_that_intersect(
            bits in 0..=MAX_BITS,
            hash: u64,
            differs in 0..64_u32,
            more in [0..=MAX_BITS, 0..=MAX_BITS],
        ) {
            let range = |hash, more: u8| {
                let length = (bits + more).min(MAX_BITS);
                Range::new(bin(hash, length), length).unwrap()
            };
            let (one, other) = (range(hash, more[0]), range(hash ^ 1 << differs, more[1]));
            let met = meeting(one, bits).any(|numbers| numbers.contains(&number_of(other, bits).unwrap()));
            prop_assert_eq!(met, one.intersects(other));
        }

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
                let met = list.iter().filter(|(one, _)| one.intersects(range));
                let met: Vec<u32> = met.map(|(one, _)| number_of(*one, bits).unwrap()).collect();
                prop_assert_eq!(parts.of(range).map(|(number, _)| number).collect::<Vec<_>>(), met);
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
