//! Which worker owns which range of the hash.
//!
//! A layout is a set of ranges that covers every hash once. Equal ranges of one length are bins; what bins are split into is longer, so that a hot
//! range is divided and cold ones are whole.
//!
//! Invariants: a layout covers every hash exactly once, and every range has one owner.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

pub use penstock_files::{MAX_LENGTH, Range};
use serde::{Deserialize, Serialize};

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
    /// A range is to be split that is split.
    #[error("bin {0} is split already")]
    Split(Range),
    /// A range is to be merged that is one.
    #[error("bin {0} is not split")]
    Whole(Range),
    /// A range is named that is part of one that is whole.
    #[error("bin {0} is not there: what it would be part of is whole")]
    Absent(Range),
    /// A text is none of a layout.
    #[error("a layout that cannot be read")]
    Text,
    /// Parts would be shorter than ranges can be, or not shorter than what is split.
    #[error("bin {range} by {by} bits: parts have {MAX_LENGTH} bits at most, and more than what is split")]
    Fine {
        /// What is to be split.
        range: Range,
        /// By so many bits.
        by: u8,
    },
}

/// Who owns each range of one operator; owners are worker indices.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Layout {
    ranges: Vec<(Range, u32)>,
}

/// How a layout travels, to each member: one text, of which a driver of many members makes nothing per bin. Owners in order of the ranges, behind
/// the length of theirs: `3:0,1,0,1,0,1;4:0,0;3:1`.
impl From<Layout> for String {
    fn from(Layout { ranges }: Layout) -> String {
        let (mut text, mut before) = (String::with_capacity(4 * ranges.len()), None);
        for (range, owner) in ranges {
            let length = range.length();
            match before.replace(length) {
                Some(before) if before == length => text.push(','),
                None => write!(text, "{length}:").expect("a text takes all"),
                Some(_) => write!(text, ";{length}:").expect("a text takes all"),
            }
            write!(text, "{owner}").expect("a text takes all");
        }
        text
    }
}

impl TryFrom<String> for Layout {
    type Error = LayoutError;

    fn try_from(text: String) -> Result<Layout, LayoutError> {
        let (mut ranges, mut at) = (Vec::new(), 0_u64);
        for run in text.split(';') {
            let (length, owners) = run.split_once(':').ok_or(LayoutError::Text)?;
            let length: u8 = length.parse().ok().filter(|length| *length <= MAX_LENGTH).ok_or(LayoutError::Text)?;
            for owner in owners.split(',') {
                let owner = owner.parse().map_err(|_| LayoutError::Text)?;
                // What does not begin where a range of this length can overlaps the one before, or leaves a gap.
                let prefix = u32::try_from(at >> (MAX_LENGTH - length)).map_err(|_| LayoutError::Gap)?;
                let range = Range::new(prefix, length).ok_or(LayoutError::Gap)?;
                at += range.width();
                ranges.push((range, owner));
            }
        }
        Layout::new(ranges)
    }
}

impl Layout {
    /// `2^length` equal ranges dealt to workers `0..workers`.
    #[must_use]
    pub fn even(length: u8, workers: u32) -> Layout {
        Layout::dealt(refined(length, &[]), workers).expect("ranges of one length")
    }

    /// A layout of these ranges.
    ///
    /// # Errors
    /// They overlap, or leave a gap.
    pub fn new(mut ranges: Vec<(Range, u32)>) -> Result<Layout, LayoutError> {
        ranges.sort_by_key(|(range, _)| (range.first(), range.length()));
        if let Some(pair) = ranges.windows(2).find(|pair| pair[0].0.intersects(pair[1].0)) {
            return Err(LayoutError::Overlap(pair[0].0, pair[1].0));
        }
        match ranges.iter().map(|(range, _)| range.width()).sum::<u64>() == 1 << MAX_LENGTH {
            true => Ok(Layout { ranges }),
            false => Err(LayoutError::Gap),
        }
    }

    /// These ranges dealt to workers `0..workers`, one after the other.
    ///
    /// # Errors
    /// They overlap, or leave a gap.
    pub fn dealt(ranges: Vec<Range>, workers: u32) -> Result<Layout, LayoutError> {
        Layout::new(ranges.into_iter().zip((0..workers.max(1)).cycle()).collect())
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

    /// Gives a range that was there to a worker: what it was split into since, or merged into.
    pub(crate) fn hand(&mut self, range: Range, worker: u32) {
        let at = self.ranges.partition_point(|(known, _)| known.last() < range.first());
        let now = self.ranges[at..].iter_mut().take_while(|(known, _)| known.first() <= range.last());
        now.for_each(|(_, owner)| *owner = worker);
    }

    /// Who owns a range; None where there is no such range.
    #[must_use]
    pub fn owner_of(&self, range: Range) -> Option<u32> {
        self.position(range).map(|at| self.ranges[at].1)
    }

    /// The ranges that one holds, with their owners.
    #[must_use]
    pub fn within(&self, range: Range) -> &[(Range, u32)] {
        let at = self.places(range);
        &self.ranges[at]
    }

    /// Cuts a range into `2^by`, with its owner.
    ///
    /// # Errors
    /// There is no such range, or its parts would be too short.
    pub fn split(&mut self, range: Range, by: u8) -> Result<(), LayoutError> {
        let length = range.length().saturating_add(by);
        if by == 0 || length > MAX_LENGTH {
            return Err(LayoutError::Fine { range, by });
        }
        let Some(at) = self.position(range) else {
            return Err(if self.within(range).is_empty() {
                LayoutError::Absent(range)
            } else {
                LayoutError::Split(range)
            });
        };
        let owner = self.ranges[at].1;
        let first = range.prefix() << by;
        let parts = (first..first + (1 << by)).filter_map(|prefix| Some((Range::new(prefix, length)?, owner)));
        self.ranges.splice(at..=at, parts);
        Ok(())
    }

    /// Makes all parts of a range one, with the owner of the first.
    ///
    /// # Errors
    /// There are none.
    pub fn merge(&mut self, range: Range) -> Result<(), LayoutError> {
        if self.position(range).is_some() {
            return Err(LayoutError::Whole(range));
        }
        let at = self.places(range);
        let Some((_, owner)) = self.ranges[at.clone()].first().copied() else { return Err(LayoutError::Absent(range)) };
        self.ranges.splice(at, [(range, owner)]);
        Ok(())
    }

    /// Where the ranges stand that one holds.
    fn places(&self, range: Range) -> std::ops::Range<usize> {
        let from = self.ranges.partition_point(|(known, _)| known.first() < range.first());
        let held = self.ranges[from..].iter().take_while(|(known, _)| range.holds(*known)).count();
        from..from + held
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
        let owners: Vec<u32> = self.ranges.iter().map(|(_, owner)| *owner).collect();
        let moves = penstock_balance::balanced(&owners, keeps);
        moves.into_iter().map(|shift| (self.ranges[shift.what].0, shift.to)).collect()
    }
}

/// All ranges of a length, but where one of `parts` is longer: as short there as these ask for, so that each of them is one.
#[must_use]
pub(crate) fn refined(length: u8, parts: &[Range]) -> Vec<Range> {
    let mut ranges = Vec::new();
    let mut left = vec![(Range::ALL, parts.to_vec())];
    while let Some((range, mut parts)) = left.pop() {
        parts.retain(|part| range.holds(*part) && *part != range);
        match range.split().filter(|_| range.length() < length || !parts.is_empty()) {
            Some([low, high]) => left.extend([(high, parts.clone()), (low, parts)]),
            None => ranges.push(range),
        }
    }
    ranges
}

/// A range that a generation may begin with.
struct Choice {
    range: Range,
    /// Operators of which nobody holds it as such.
    lacks: u64,
    known: bool,
}

/// What ranges lack, by width, and how much of them is not known.
type Cost = (u64, u64);

/// Of these choices, which a range holds and which stand by first hash, longer ones behind, those that have each of its hashes once at the least cost.
fn cheapest(range: Range, choices: &[Choice]) -> Option<(Cost, Vec<Range>)> {
    let (own, inner) = match choices.split_first() {
        Some((own, inner)) if own.range == range => (Some(own), inner),
        _ => (None, choices),
    };
    let own = own.map(|own| ((own.lacks * range.width(), u64::from(!own.known) * range.width()), vec![range]));
    let parts = range.split().filter(|_| !inner.is_empty()).and_then(|[low, high]| {
        let at = inner.partition_point(|choice| choice.range.first() < high.first());
        let ((lacks, new), mut ranges) = cheapest(low, &inner[..at])?;
        let ((more, newer), others) = cheapest(high, &inner[at..])?;
        ranges.extend(others);
        Some(((lacks + more, new + newer), ranges))
    });
    own.into_iter().chain(parts).min_by_key(|(cost, _)| *cost)
}

/// The ranges to begin with where members hold these, by operator: the known ones, but what is not held as such and is held as what it was split from
/// or merged from. So it was when the epoch began that is asked for, or it was cut off while it was split or merged. All operators have the
/// same ranges: those of which least is missing, and of these the known ones.
#[must_use]
pub(crate) fn found(known: Vec<Range>, held: &BTreeMap<String, BTreeSet<Range>>) -> Vec<Range> {
    let operators = held.len() as u64;
    let mut choices = BTreeMap::new();
    let place = |range: Range| (range.first(), range.length());
    for range in known {
        choices.insert(place(range), Choice { range, lacks: operators, known: true });
    }
    for range in held.values().flatten().copied() {
        let choice = || Choice { range, lacks: operators, known: false };
        choices.entry(place(range)).or_insert_with(choice).lacks -= 1;
    }
    let choices: Vec<Choice> = choices.into_values().collect();
    cheapest(Range::ALL, &choices).expect("the known ranges have every hash").1
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

    #[test]
    fn a_layout_is_split_and_merged() {
        let range = |prefix, length| Range::new(prefix, length).unwrap();
        let mut layout = Layout::even(1, 2);
        layout.split(range(1, 1), 2).unwrap();
        assert_eq!(layout.split(range(1, 1), 1), Err(LayoutError::Split(range(1, 1))));
        assert_eq!(layout.split(range(0, 3), 1), Err(LayoutError::Absent(range(0, 3))));
        assert_eq!(layout.split(range(0, 1), 20), Err(LayoutError::Fine { range: range(0, 1), by: 20 }));
        assert_eq!(layout.split(range(0, 1), 0), Err(LayoutError::Fine { range: range(0, 1), by: 0 }));
        assert_eq!(layout.within(range(3, 2)), [(range(6, 3), 1), (range(7, 3), 1)]);
        assert_eq!(Layout::new(layout.ranges().to_vec()), Ok(layout.clone()));
        layout.merge(range(3, 2)).unwrap();
        assert_eq!(layout.merge(range(5, 3)), Err(LayoutError::Whole(range(5, 3))));
        assert_eq!(layout.merge(range(1, 3)), Err(LayoutError::Absent(range(1, 3))));
        layout.merge(range(1, 1)).unwrap();
        assert_eq!(layout, Layout::even(1, 2));
    }

    #[test]
    fn what_was_split_has_ranges_as_long_as_bins_at_least() {
        let range = |prefix, length| Range::new(prefix, length).unwrap();
        let parts = [range(4, 3), range(5, 3)];
        assert_eq!(refined(0, &parts), [range(0, 1), range(4, 3), range(5, 3), range(3, 2)]);
        assert_eq!(refined(2, &parts), [range(0, 2), range(1, 2), range(4, 3), range(5, 3), range(3, 2)]);
        assert_eq!(refined(3, &parts), refined(3, &[]));
        assert_eq!(refined(0, &[]), [Range::ALL]);
    }

    #[test]
    fn a_generation_begins_with_what_there_was_when_its_epoch_began() {
        let range = |prefix, length| Range::new(prefix, length).unwrap();
        let [whole, low, high] = [range(1, 1), range(2, 2), range(3, 2)];
        let held = |some: &[&[Range]]| {
            let set = |ranges: &&[Range]| ranges.iter().copied().collect();
            some.iter().enumerate().map(|(at, ranges)| (at.to_string(), set(ranges))).collect()
        };
        let other = range(0, 1);
        let (split, merged) = (vec![other, low, high], vec![other, whole]);
        // Before it was split, or when that was cut off; before it was merged.
        assert_eq!(found(split.clone(), &held(&[&[other, whole]])), merged);
        assert_eq!(found(merged.clone(), &held(&[&[other, low, high]])), split);
        // Both are there; or neither is, or not all of it.
        for known in [&split, &merged] {
            assert_eq!(found(known.clone(), &held(&[&[other, whole, low, high]])), *known);
            assert_eq!(found(known.clone(), &held(&[&[]])), *known);
        }
        assert_eq!(found(merged.clone(), &held(&[&[other, low]])), merged);
        // Half of it is lost with a member, and what it was before that is kept.
        assert_eq!(found(split.clone(), &held(&[&[whole, low]])), merged);
        // All operators begin with the same ranges: where less is missing.
        assert_eq!(found(split.clone(), &held(&[&[whole], &[whole, low, high]])), merged);
        assert_eq!(found(split.clone(), &held(&[&[whole], &[low, high]])), split);
        // Each part was split again since; and what it all was once is kept by one operator alone, or by both.
        let finest: Vec<Range> = [other].into_iter().chain((4..8).map(|prefix| range(prefix, 3))).collect();
        assert_eq!(found(finest.clone(), &held(&[&[other, whole, low, high], &[other, low, high]])), split);
        assert_eq!(found(finest, &held(&[&[other, whole, low, high], &[other, whole]])), merged);
    }

    proptest! {
        #[test]
        fn a_generation_begins_with_ranges_of_which_no_less_than_of_the_known_ones_is_held(
            splits in prop::collection::vec(0usize..16, 0..6),
            held in prop::collection::vec(prop::collection::btree_set((0u32..8, 0u8..4), 0..12), 1..4),
        ) {
            let mut layout = Layout::even(1, 1);
            for at in splits {
                let range = layout.ranges()[at % layout.ranges().len()].0;
                layout.split(range, 1).unwrap();
            }
            let known: Vec<Range> = layout.ranges().iter().map(|(range, _)| *range).collect();
            let sets = held.into_iter().map(|some| some.into_iter().filter_map(|(prefix, length)| Range::new(prefix, length)));
            let held: Vec<BTreeSet<Range>> = sets.map(Iterator::collect).collect();
            let lacks = |ranges: &[Range]| -> u64 {
                let one = |range: &Range| held.iter().filter(|some| !some.contains(range)).count() as u64 * range.width();
                ranges.iter().map(one).sum()
            };
            let named = held.iter().enumerate().map(|(at, some)| (at.to_string(), some.clone())).collect();
            let ranges = found(known.clone(), &named);
            prop_assert!(Layout::dealt(ranges.clone(), 1).is_ok());
            prop_assert!(ranges == known || lacks(&ranges) < lacks(&known));
            // No single range in the place of others, or others in the place of one, would do better.
            for one in held.iter().flatten() {
                let within: Vec<Range> = ranges.iter().copied().filter(|range| one.holds(*range)).collect();
                let covered = within.iter().map(|range| range.width()).sum::<u64>() == one.width();
                prop_assert!(!covered || lacks(&within) <= lacks(&[*one]));
            }
        }

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
