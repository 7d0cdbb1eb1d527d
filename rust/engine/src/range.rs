//! Which worker owns which range of the hash.
//!
//! A layout is a set of ranges that covers every hash once. Equal ranges of one length are the bins of today; a layout may mix
//! lengths, so that a hot range is split and cold ones are merged.
//!
//! Invariants: a layout covers every hash exactly once, and every range has one owner.

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
        let length = ranges[0].0.length();
        match ranges.iter().all(|(range, _)| range.length() == length) {
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
        let length = length.min(MAX_LENGTH);
        let bins = 0..1_u32 << length;
        Layout {
            ranges: bins.filter_map(|prefix| Some((Range::new(prefix, length)?, prefix % workers.max(1)))).collect(),
        }
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
        let owners: Vec<u32> = self.ranges.iter().map(|(_, owner)| *owner).collect();
        let moves = penstock_balance::balanced(&owners, keeps);
        moves.into_iter().map(|shift| (self.ranges[shift.what].0, shift.to)).collect()
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
