//! Bins as ranges of the hash, and which worker owns which.
//!
//! A range is all hashes that begin with the same bits; a layout is a set of ranges that covers every hash once. Equal ranges of
//! one length are the bins of today; a layout may mix lengths, so that a hot range is split and cold ones are merged.
//!
//! Invariants: a layout covers every hash exactly once, and every range has one owner.

use serde::{Deserialize, Serialize};

/// The most bits of a prefix.
pub const MAX_LENGTH: u8 = 20;

/// All hashes whose top `length` bits are `prefix`.
///
/// # Examples
/// ```
/// use penstock_engine::Range;
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

    /// The first hash, which orders disjoint ranges.
    fn first(self) -> u64 {
        if self.length == 0 { 0 } else { u64::from(self.prefix) << (64 - self.length) }
    }

    /// Hashes, in units of the shortest range there can be.
    fn width(self) -> u64 {
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

/// Ranges that do not cover every hash once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// Two ranges have hashes in common.
    #[error("ranges {0} and {1} overlap")]
    Overlap(Range, Range),
    /// Some hash has no range.
    #[error("the ranges do not cover every hash")]
    Gap,
    /// A move names a range that the layout does not have.
    #[error("there is no range {0}")]
    Unknown(Range),
}

/// Who owns each range of one operator; owners are worker indices.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "Form", try_from = "Form")]
pub struct Layout {
    ranges: Vec<(Range, u32)>,
}

/// How a layout travels.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Form {
    /// Ranges of one length.
    Even {
        length: u8,
        owners: Vec<u32>,
    },
    Mixed {
        ranges: Vec<(Range, u32)>,
    },
}

impl From<Layout> for Form {
    fn from(Layout { ranges }: Layout) -> Form {
        let length = ranges[0].0.length;
        match ranges.iter().all(|(range, _)| range.length == length) {
            true => Form::Even { length, owners: ranges.into_iter().map(|(_, owner)| owner).collect() },
            false => Form::Mixed { ranges },
        }
    }
}

impl TryFrom<Form> for Layout {
    type Error = LayoutError;

    fn try_from(form: Form) -> Result<Layout, LayoutError> {
        match form {
            Form::Even { length, owners } => {
                let range = |prefix| Range::new(prefix, length).ok_or(LayoutError::Gap);
                Layout::new((0..).zip(owners).map(|(at, owner)| Ok((range(at)?, owner))).collect::<Result<_, _>>()?)
            }
            Form::Mixed { ranges } => Layout::new(ranges),
        }
    }
}

impl Layout {
    /// `2^length` equal ranges dealt to workers `0..workers`.
    #[must_use]
    pub fn even(length: u8, workers: u32) -> Layout {
        let bins = 0..1_u32 << length.min(MAX_LENGTH);
        Layout { ranges: bins.map(|prefix| (Range { prefix, length }, prefix % workers.max(1))).collect() }
    }

    /// A layout of these ranges.
    ///
    /// # Errors
    /// They overlap, or leave a gap.
    pub fn new(mut ranges: Vec<(Range, u32)>) -> Result<Layout, LayoutError> {
        ranges.sort_by_key(|(range, _)| (range.first(), range.length));
        if let Some(pair) = ranges.windows(2).find(|pair| pair[0].0.intersects(pair[1].0)) {
            return Err(LayoutError::Overlap(pair[0].0, pair[1].0));
        }
        match ranges.iter().map(|(range, _)| range.width()).sum::<u64>() == 1 << MAX_LENGTH {
            true => Ok(Layout { ranges }),
            false => Err(LayoutError::Gap),
        }
    }

    /// The ranges with their owners, by first hash.
    #[must_use]
    pub fn ranges(&self) -> &[(Range, u32)] {
        &self.ranges
    }

    /// Who owns a hash.
    #[must_use]
    pub fn owner(&self, hash: u64) -> u32 {
        let at = self.ranges.partition_point(|(range, _)| range.first() <= hash);
        self.ranges[at - 1].1
    }

    /// Gives a range to a worker.
    ///
    /// # Errors
    /// There is no such range.
    pub fn give(&mut self, range: Range, worker: u32) -> Result<(), LayoutError> {
        let at = self.position(range).ok_or(LayoutError::Unknown(range))?;
        self.ranges[at].1 = worker;
        Ok(())
    }

    /// Who owns a range; None where there is no such range.
    #[must_use]
    pub fn owner_of(&self, range: Range) -> Option<u32> {
        self.position(range).map(|at| self.ranges[at].1)
    }

    fn position(&self, range: Range) -> Option<usize> {
        let at = self.ranges.partition_point(|(known, _)| known.first() < range.first());
        self.ranges.get(at).is_some_and(|(known, _)| *known == range).then_some(at)
    }

    /// How many ranges each of the workers owns.
    #[must_use]
    pub fn shares(&self, workers: u32) -> Vec<u32> {
        let mut shares = vec![0; workers as usize];
        for (_, owner) in &self.ranges {
            if let Some(share) = shares.get_mut(*owner as usize) {
                *share += 1;
            }
        }
        shares
    }

    /// The moves to equal shares, up to one range, among the workers that may keep some; as few as possible.
    #[must_use]
    pub fn balanced(&self, keeps: &[bool]) -> Vec<(Range, u32)> {
        let stay: Vec<u32> = (0..).zip(keeps).filter(|(_, keeps)| **keeps).map(|(worker, _)| worker).collect();
        if stay.is_empty() {
            return Vec::new();
        }
        let held = self.shares(keeps.len() as u32);
        let mut ranked = stay.clone();
        ranked.sort_by_key(|worker| std::cmp::Reverse(held[*worker as usize]));
        // Workers with many ranges get the shares that are one larger.
        let (share, rest) = (self.ranges.len() / stay.len(), self.ranges.len() % stay.len());
        let mut room = vec![0; keeps.len()];
        for (place, worker) in ranked.iter().enumerate() {
            room[*worker as usize] = share + usize::from(place < rest);
        }
        let mut spare = Vec::new();
        for (range, owner) in &self.ranges {
            match room.get_mut(*owner as usize) {
                Some(room) if *room > 0 => *room -= 1,
                _ => spare.push(*range),
            }
        }
        let mut takers = stay.into_iter().flat_map(|worker| vec![worker; room[worker as usize]]);
        spare.into_iter().map_while(|range| Some((range, takers.next()?))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_layout_covers_every_hash_once() {
        let [low, high] = Range::ALL.split().unwrap();
        let [first, second] = low.split().unwrap();
        assert_eq!(Layout::new(vec![(high, 0), (first, 1)]), Err(LayoutError::Gap));
        assert_eq!(Layout::new(vec![(high, 0), (low, 1), (second, 2)]), Err(LayoutError::Overlap(low, second)));
        let mixed = Layout::new(vec![(high, 0), (second, 2), (first, 1)]).unwrap();
        assert_eq!([0, 1 << 62, 1 << 63, u64::MAX].map(|hash| mixed.owner(hash)), [1, 2, 0, 0]);
        assert_eq!(mixed.clone().give(low, 3), Err(LayoutError::Unknown(low)));
        assert_eq!([high, first, second, low].map(|range| mixed.owner_of(range)), [Some(0), Some(1), Some(2), None]);
        assert_eq!(Range::new(4, 2), None);
        for layout in [mixed, Layout::even(3, 2)] {
            let text = serde_json::to_string(&layout).unwrap();
            assert_eq!(serde_json::from_str::<Layout>(&text).unwrap(), layout, "{text}");
        }
        for wrong in [r#"{"length":1,"owners":[0]}"#, r#"{"length":1,"owners":[0,0,0]}"#, r#"{"ranges":[[[2,1],0]]}"#] {
            assert!(serde_json::from_str::<Layout>(wrong).is_err(), "{wrong}");
        }
        assert_eq!(Range::new(0, MAX_LENGTH).unwrap().split(), None);
        assert_eq!((high.merged(first), Range::ALL.merged(Range::ALL)), (None, None));
    }

    proptest! {
        #[test]
        fn balancing_moves_little_and_leaves_equal_shares(
            owners in prop::collection::vec(0u32..5, 16),
            keeps in prop::collection::vec(any::<bool>(), 5),
        ) {
            prop_assume!(keeps.contains(&true));
            let ranges = (0..).zip(&owners).map(|(prefix, owner)| (Range::new(prefix, 4).unwrap(), *owner)).collect();
            let mut layout = Layout::new(ranges).unwrap();
            let moves = layout.balanced(&keeps);
            prop_assert!(moves.iter().all(|(range, worker)| layout.owner(range.first()) != *worker));
            let stayers = keeps.iter().filter(|keeps| **keeps).count();
            moves.iter().for_each(|(range, worker)| layout.give(*range, *worker).unwrap());
            for (share, keeps) in layout.shares(5).into_iter().zip(&keeps) {
                let least = (16 / stayers) as u32;
                let allowed = if *keeps { least..=least + 1 } else { 0..=0 };
                prop_assert!(allowed.contains(&share));
            }
            prop_assert_eq!(layout.balanced(&keeps), vec![]);
        }
    }
}
