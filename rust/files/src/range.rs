//! Ranges of the key hash: bins, as routing, messages and files name them.

use serde::{Deserialize, Serialize};

/// The most bits of a prefix.
pub const MAX_LENGTH: u8 = 20;

/// All hashes whose top `length` bits are `prefix`.
///
/// # Examples
/// ```
/// use penstock_files::Range;
/// let [low, high] = Range::ALL.split().unwrap();
/// assert!(high.contains(u64::MAX) && !low.contains(u64::MAX));
/// assert!(Range::ALL.intersects(low) && !high.intersects(low));
/// assert_eq!(low.merged(high), Some(Range::ALL));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "(u32, u8)", try_from = "(u32, u8)")]
pub struct Range {
    prefix: u32,
    length: u8,
}

impl Range {
    /// Every hash.
    pub const ALL: Range = Range { prefix: 0, length: 0 };

    /// The range with this prefix of `length` bits; `None` where `prefix` has more bits, or `length` is above [`MAX_LENGTH`].
    #[must_use]
    pub fn new(prefix: u32, length: u8) -> Option<Range> {
        (length <= MAX_LENGTH && prefix >> length == 0).then_some(Range { prefix, length })
    }

    /// The prefix: among ranges of one length, the number of the bin.
    #[must_use]
    pub fn prefix(self) -> u32 {
        self.prefix
    }

    /// Bits of the prefix.
    #[must_use]
    pub fn length(self) -> u8 {
        self.length
    }

    /// Whether a hash belongs here.
    #[must_use]
    pub fn contains(self, hash: u64) -> bool {
        self.length == 0 || hash >> (64 - self.length) == u64::from(self.prefix)
    }

    /// Whether some hash belongs to both: one of them holds the other.
    #[must_use]
    pub fn intersects(self, other: Range) -> bool {
        let (short, long) = if self.length <= other.length { (self, other) } else { (other, self) };
        long.prefix >> (long.length - short.length) == short.prefix
    }

    /// The two halves.
    #[must_use]
    pub fn split(self) -> Option<[Range; 2]> {
        let half = |bit| Range::new(self.prefix << 1 | bit, self.length + 1);
        Some([half(0)?, half(1)?])
    }

    /// The range of which these are the halves.
    #[must_use]
    pub fn merged(self, other: Range) -> Option<Range> {
        let siblings = self.length > 0 && self.length == other.length && self.prefix ^ 1 == other.prefix;
        siblings.then(|| Range { prefix: self.prefix >> 1, length: self.length - 1 })
    }

    /// Whether all hashes of `other` are of this range.
    #[must_use]
    pub fn holds(self, other: Range) -> bool {
        self.length <= other.length && self.intersects(other)
    }

    /// The first hash, which orders disjoint ranges.
    #[must_use]
    pub fn first(self) -> u64 {
        if self.length == 0 { 0 } else { u64::from(self.prefix) << (64 - self.length) }
    }

    /// The last hash.
    #[must_use]
    pub fn last(self) -> u64 {
        self.first() | u64::MAX.checked_shr(u32::from(self.length)).unwrap_or(0)
    }

    /// The ranges that hold this one, itself among them, the longest first.
    pub(crate) fn holders(self) -> impl Iterator<Item = Range> {
        (0..=self.length).rev().map(move |length| Range { prefix: self.prefix >> (self.length - length), length })
    }

    /// Where it stands among ranges: by first hash, what holds others before them.
    pub(crate) fn place(self) -> (u64, u8) {
        (self.first(), self.length)
    }

    /// The places of the ranges that this one holds.
    pub(crate) fn held(self) -> std::ops::RangeInclusive<(u64, u8)> {
        self.place()..=(self.last(), MAX_LENGTH)
    }

    /// Hashes, in units of the shortest range there can be.
    #[must_use]
    pub fn width(self) -> u64 {
        1 << (MAX_LENGTH - self.length)
    }
}

impl From<Range> for (u32, u8) {
    fn from(range: Range) -> (u32, u8) {
        (range.prefix, range.length)
    }
}

impl TryFrom<(u32, u8)> for Range {
    type Error = String;

    fn try_from((prefix, length): (u32, u8)) -> Result<Range, String> {
        Range::new(prefix, length).ok_or_else(|| format!("there is no range {prefix}/{length}"))
    }
}

impl std::fmt::Display for Range {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.prefix, self.length)
    }
}
