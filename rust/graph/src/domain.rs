//! The identifiers of users as dense numbers, and back.
//!
//! A domain numbers the distinct identifiers of all relations of an index in ascending order, so results do not depend on
//! the order of the input. Identifiers are 64-bit numbers or texts, not both. Dense numbers have 32 bits.

use std::collections::HashMap;

use crate::csr::Section;
use crate::error::GraphError;

/// Most nodes of an index.
pub const MOST_NODES: u64 = u32::MAX as u64;

/// Identifiers by dense number.
#[derive(Clone, Debug)]
pub enum Domain {
    /// Numbers, ascending.
    Numbers(Section<u64>),
    /// Signed numbers, ascending, with their sign bit turned round ([`turned`]), so that they are in order as they are.
    Signed(Section<u64>),
    /// Texts, ascending bytewise: text `i` is `bytes[ends[i] .. ends[i + 1]]`.
    Texts {
        /// Where texts end; one more than there are texts, the first is 0.
        ends: Section<u64>,
        /// All texts.
        bytes: Section<u8>,
    },
}

impl Domain {
    /// How many nodes there are.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Numbers(numbers) | Self::Signed(numbers) => numbers.get().len(),
            Self::Texts { ends, .. } => ends.get().len() - 1,
        }
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The identifier of a node, as text for people.
    ///
    /// # Panics
    /// When there is no such node.
    #[must_use]
    pub fn show(&self, node: u32) -> String {
        match self {
            Self::Numbers(numbers) => numbers.get()[node as usize].to_string(),
            Self::Signed(numbers) => signed(numbers.get()[node as usize]).to_string(),
            Self::Texts { ends, bytes } => String::from_utf8_lossy(text(ends.get(), bytes.get(), node)).into_owned(),
        }
    }
}

/// A signed number with its sign bit turned round: smaller numbers have smaller codes.
#[must_use]
pub fn turned(number: i64) -> u64 {
    number.cast_unsigned() ^ (1 << 63)
}

/// The signed number of a code.
#[must_use]
pub fn signed(code: u64) -> i64 {
    (code ^ (1 << 63)).cast_signed()
}

/// The bytes of text `node`.
#[must_use]
pub fn text<'a>(ends: &[u64], bytes: &'a [u8], node: u32) -> &'a [u8] {
    &bytes[ends[node as usize] as usize..ends[node as usize + 1] as usize]
}

/// Numbers of all relations to dense numbers.
pub(crate) struct Ranks {
    pub(crate) sorted: Vec<u64>,
    /// All numbers from `base` to the greatest, where they are close enough.
    words: Vec<Word>,
    /// A multiple of 64 that is not above the least. (Signed numbers from 0 on are all above 2^63 here.)
    base: u64,
}

/// Sixty-four numbers that follow one another: which of them there are, and how many before them.
#[derive(Clone, Copy, Debug, Default)]
struct Word {
    bits: u64,
    before: u32,
}

impl Ranks {
    pub(crate) fn new(numbers: impl Iterator<Item = u64> + Clone) -> Result<Self, GraphError> {
        let ends = (0_u64, u64::MAX, 0);
        let (count, least, greatest) =
            numbers.clone().fold(ends, |(n, min, max), id| (n + 1, u64::min(min, id), u64::max(max, id)));
        let base = if count == 0 { 0 } else { least & !63 };
        let span = greatest.max(base) - base;
        // Sixteen bytes for 64 numbers: eight for each that is given at most.
        if span / 32 <= count {
            let mut words = vec![Word::default(); if count == 0 { 0 } else { span as usize / 64 + 1 }];
            numbers.for_each(|id| words[(id - base) as usize / 64].bits |= 1 << (id % 64));
            let nodes = words.iter().map(|word| u64::from(word.bits.count_ones())).sum::<u64>();
            if nodes > MOST_NODES {
                return Err(too_many(nodes as usize));
            }
            let mut sorted = Vec::with_capacity(nodes as usize);
            for (at, word) in (0..).zip(&mut words) {
                word.before = sorted.len() as u32;
                sorted.extend((0..64).filter(|bit| word.bits >> bit & 1 == 1).map(|bit| base + at * 64 + bit));
            }
            return Ok(Self { sorted, words, base });
        }
        let mut sorted = numbers.collect::<Vec<_>>();
        sorted.sort_unstable();
        sorted.dedup();
        sorted.shrink_to_fit();
        if sorted.len() as u64 > MOST_NODES {
            return Err(too_many(sorted.len()));
        }
        Ok(Self { sorted, words: Vec::new(), base: 0 })
    }

    /// The rank of a number that was among those given.
    pub(crate) fn of(&self, number: u64) -> u32 {
        match self.words.is_empty() {
            false => {
                let Word { bits, before } = self.words[(number - self.base) as usize / 64];
                before + (bits & ((1 << (number % 64)) - 1)).count_ones()
            }
            true => self.sorted.binary_search(&number).expect("every number was given") as u32,
        }
    }
}

fn too_many(count: usize) -> GraphError {
    GraphError::TooMany { what: "nodes", count: count as u64, most: MOST_NODES }
}

/// Collects texts, numbering them as they first come.
#[derive(Debug, Default)]
pub(crate) struct Texts {
    numbers: HashMap<Box<str>, u32>,
    bytes: usize,
}

impl Texts {
    pub(crate) fn number(&mut self, text: &str) -> Result<u32, GraphError> {
        if let Some(&number) = self.numbers.get(text) {
            return Ok(number);
        }
        let number = u32::try_from(self.numbers.len()).map_err(|_| too_many(self.numbers.len()))?;
        self.numbers.insert(text.into(), number);
        self.bytes += text.len();
        Ok(number)
    }

    /// How many texts there are, of how many bytes.
    pub(crate) fn held(&self) -> (usize, usize) {
        (self.numbers.len(), self.bytes)
    }

    /// The domain, and the rank of each number.
    pub(crate) fn finish(self) -> (Domain, Vec<u32>) {
        let mut all = self.numbers.into_iter().collect::<Vec<_>>();
        all.sort_unstable();
        let mut ranks = vec![0; all.len()];
        let (mut ends, mut bytes) = (vec![0_u64], Vec::new());
        for (rank, (text, number)) in all.into_iter().enumerate() {
            ranks[number as usize] = rank as u32;
            bytes.extend_from_slice(text.as_bytes());
            ends.push(bytes.len() as u64);
        }
        (Domain::Texts { ends: ends.into(), bytes: bytes.into() }, ranks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_ranks_however_far_apart_they_are() {
        for (step, from) in [1, 3, 31, 32, 33, 63, 64, 65, 1_000, 1 << 40]
            .into_iter()
            .flat_map(|step| [0, 1, 63, 64, 100, 1 << 63, (1 << 63) - 70].map(|from| (step, from)))
        {
            let numbers: Vec<u64> = (0..200).rev().flat_map(|at| [from + at * step, from + at * step]).collect();
            let ranks = Ranks::new(numbers.iter().copied()).unwrap();
            let sorted: Vec<u64> = (0..200).map(|at| from + at * step).collect();
            assert_eq!(ranks.sorted, sorted, "step {step} from {from}");
            assert!((0..).zip(&sorted).all(|(rank, number)| ranks.of(*number) == rank), "step {step} from {from}");
            assert_eq!(ranks.words.is_empty(), step > 64, "close ones are numbered in place, wherever they begin");
        }
        let last = Ranks::new([u64::MAX, u64::MAX - 1].into_iter()).unwrap();
        assert_eq!((last.of(u64::MAX - 1), last.of(u64::MAX)), (0, 1));
        assert!(Ranks::new(std::iter::empty()).unwrap().sorted.is_empty());
        let ends = Ranks::new([u64::MAX, 0].into_iter()).unwrap();
        assert_eq!((ends.of(0), ends.of(u64::MAX)), (0, 1));
    }
}
