//! Dividing what is too hot for any worker or too large to move, and making one again what is neither: bins get parts with longer prefixes where the
//! load is, or the state.
//!
//! A bin that alone gets more than any worker may have cannot be evened out by moves. So it is split, as soon as that has stood for some looks, into
//! parts of which each is half a worker's share at most, were its load spread evenly over its hashes; the parts are then bins to who moves some. What
//! holds more bytes than the policy's limit holds rows up for too long when it moves, and is split into parts that are below it with some room. A bin that is
//! split, gets little and holds little becomes one again. The two are far apart, in load, in bytes and in time, so that what goes up and down does neither.
//!
//! Bins none of which is too hot may be so few that some worker has too many of them wherever they are: n + 1 bins on n workers. Then the balancer names
//! one of that worker's, and its parts are small enough for it to give some away ([`Divider::relieve`]).
//!
//! What no split divides is the load of one key, or its state. So a part that has nearly all of its bin's when it is a small part of it is left alone.
//!
//! Bytes are what tables take in memory, so parts may take half of what their bin took, having less room to grow: a bin is merged below a quarter of the limit.
//!
//! Invariants: a bin is split only when it was too hot, or too large, in each of `patience` looks, and merged only when it was cold and small in each of four times
//! as many; no part is longer than asked for; what is split for its size at one look is one bin, or [`LIMITS_AT_ONCE`] limits, and what is merged is as
//! much: either copies it.

use std::collections::BTreeMap;

use crate::Policy;

/// A bin or part of one: its prefix and the bits of that.
pub type Bin = (u32, u8);

/// What a look says should be divided, or be one again.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Division {
    /// Bins and parts that become `2^by`.
    pub splits: Vec<(Bin, u8)>,
    /// Bins whose parts become one.
    pub merges: Vec<Bin>,
    /// A part that one key makes hot, and its load as a share of the mean load of a worker.
    pub hot_key: Option<(Bin, f64)>,
    /// What holds more than the limit, the largest first.
    pub large: Vec<Large>,
}

/// A bin or part that holds more bytes than the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Large {
    /// Which.
    pub bin: Bin,
    /// What it holds.
    pub bytes: u64,
    /// What becomes of it.
    pub fate: Fate,
}

/// What becomes of a bin that is too large.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It becomes `2^by` parts now.
    Split {
        /// Bits.
        by: u8,
    },
    /// It is split when it has been too large for so many more looks; 0 where others are split first.
    Waits {
        /// Looks.
        looks: u32,
    },
    /// One key has nearly all of it, or it is as small a part as there can be.
    Stays,
}

/// Bits by which a bin is split at once.
const MOST_AT_ONCE: u8 = 4;
/// Bits by which a part is longer than its bin when nearly all of the load of that, or of its bytes, is one key's, or as good as that; and how much that is.
const KEY_DEPTH: u8 = 4;
const KEY_SHARE: f64 = 0.9;
/// Of what is too hot a bin may get so much, and of what is too large hold so much, and be merged.
const COLD: f64 = 0.25;
/// So many times longer it must stand.
const COLD_PATIENCE: u32 = 4;
/// Of the limit the parts of what is split hold so much at most, were it spread evenly over its hashes.
const FULL: f64 = 0.875;
/// What is split for its size at one look holds so many times the limit, or is one bin; what is merged likewise.
pub(crate) const LIMITS_AT_ONCE: u64 = 4;

/// Watches loads and sizes of bins and parts.
///
/// # Examples
/// ```
/// use penstock_balance::{Divider, Fate, Policy};
/// let policy = Policy { least_rows: 1, patience: 2, most_bytes: Some(64), ..Policy::default() };
/// let mut divider = Divider::new(policy, 1, 20);
/// let (bins, rows, small) = ([(0, 1), (1, 1)], [90, 10], [Some(1); 2]);
/// assert_eq!(divider.look(&bins, &rows, 100, &small, 2).splits, []);
/// assert_eq!(divider.look(&bins, &rows, 100, &small, 2).splits, [((0, 1), 2)]);
/// let (even, bytes) = ([50, 50], [Some(1), Some(210)]);
/// assert_eq!(divider.look(&bins, &even, 100, &bytes, 2).large[0].fate, Fate::Waits { looks: 1 });
/// assert_eq!(divider.look(&bins, &even, 100, &bytes, 2).splits, [((1, 1), 2)]);
/// ```
#[derive(Clone, Debug)]
pub struct Divider {
    policy: Policy,
    bits: u8,
    most_bits: u8,
    /// Looks in a row in which a bin or part was too hot.
    hot: BTreeMap<Bin, u32>,
    /// The same of those that were too large.
    large: BTreeMap<Bin, u32>,
    /// Looks in a row in which a bin that is split was cold and small.
    cold: BTreeMap<Bin, u32>,
}

/// What the parts of a bin have.
#[derive(Default)]
struct Whole {
    load: u64,
    /// Unless it is not known of all.
    bytes: Option<u64>,
}

impl Divider {
    /// One that has seen nothing, of bins of `bits` bits; parts have `most_bits` at most.
    #[must_use]
    pub fn new(policy: Policy, bits: u8, most_bits: u8) -> Self {
        let (hot, large, cold) = Default::default();
        Self { policy, bits, most_bits, hot, large, cold }
    }

    /// Judges the load of each bin and part since the last look, in which `came` rows came, and the bytes that it holds, where they are known. What it
    /// says is taken to be done: the next looks bring the bins as they are then. Sizes are judged whatever came; where few rows did, loads are not, and nothing is merged.
    ///
    /// # Panics
    /// When there are not as many loads, or bytes, as bins.
    pub fn look(&mut self, bins: &[Bin], loads: &[u64], came: u64, bytes: &[Option<u64>], workers: u32) -> Division {
        assert_eq!(bins.len(), loads.len(), "loads of each bin");
        assert_eq!(bins.len(), bytes.len(), "bytes of each bin");
        let mut split: BTreeMap<Bin, Whole> = BTreeMap::new();
        for ((bin, load), bytes) in bins.iter().zip(loads).zip(bytes).filter(|((bin, _), _)| bin.1 > self.bits) {
            let whole = split.entry(self.whole(*bin)).or_insert(Whole { load: 0, bytes: Some(0) });
            whole.load += load;
            whole.bytes = whole.bytes.zip(*bytes).map(|(sum, bytes)| sum + bytes);
        }
        let judged = came >= self.policy.least_rows.max(1);
        let mean = loads.iter().sum::<u64>() as f64 / f64::from(workers.max(1));
        let mut told = Division::default();
        let mut splits = BTreeMap::new();
        // For one worker nothing is.
        let too_hot = if workers > 1 { self.policy.trigger * mean } else { f64::INFINITY };
        if judged {
            self.divide_hot(bins, loads, (too_hot, mean), &split, &mut splits, &mut told);
        }
        self.divide_large(bins, bytes, &split, &mut splits, &mut told);
        if judged {
            self.unite(&split, COLD * too_hot, &mut told);
        }
        told.splits = splits.into_iter().collect();
        told
    }

    /// Splits a bin that the balancer would move if it were lighter, into parts of so much of the mean load of a worker at most
    /// ([`Why::Packed`](crate::Why::Packed)); unless one key has it, or nearly.
    pub fn relieve(&self, bins: &[Bin], loads: &[u64], (at, part): (usize, f64), workers: u32, told: &mut Division) {
        let (bin, load) = (bins[at], loads[at]);
        let whole = self.whole(bin);
        let all = bins.iter().zip(loads).filter(|(one, _)| one.1 > self.bits && self.whole(**one) == whole);
        let all = (bin.1 > self.bits).then(|| all.map(|(_, load)| load).sum());
        let mean = loads.iter().sum::<u64>() as f64 / f64::from(workers.max(1));
        if load > 0 && !self.is_one_key(bin, load, all) && told.splits.iter().all(|(one, _)| *one != bin) {
            told.splits.push((bin, self.depth(bin, load, part * mean)));
            told.splits.sort_unstable();
        }
    }

    fn whole(&self, (prefix, bits): Bin) -> Bin {
        (prefix >> (bits - self.bits), self.bits)
    }

    /// Whether a split of this part would give all that it has to one part again.
    fn is_one_key(&self, bin: Bin, has: u64, all: Option<u64>) -> bool {
        let nearly = |all| bin.1 - self.bits >= KEY_DEPTH && has as f64 >= KEY_SHARE * all as f64;
        all.is_some_and(nearly) || bin.1 >= self.most_bits
    }

    /// By how many bits to split what has so much, so that each part would have `most` at most.
    fn depth(&self, bin: Bin, has: u64, most: f64) -> u8 {
        let deepest = MOST_AT_ONCE.min(self.most_bits - bin.1);
        (1..deepest).find(|by| has as f64 / f64::from(1_u32 << by) <= most).unwrap_or(deepest)
    }

    fn divide_hot(
        &mut self,
        bins: &[Bin],
        loads: &[u64],
        (too_hot, mean): (f64, f64),
        split: &BTreeMap<Bin, Whole>,
        splits: &mut BTreeMap<Bin, u8>,
        told: &mut Division,
    ) {
        let before = std::mem::take(&mut self.hot);
        for (bin, load) in bins.iter().zip(loads).filter(|(_, load)| **load as f64 > too_hot) {
            let looks = before.get(bin).map_or(1, |looks| looks + 1);
            self.hot.insert(*bin, looks);
            let all = split.get(&self.whole(*bin)).map(|whole| whole.load);
            if self.is_one_key(*bin, *load, all) {
                told.hot_key = told.hot_key.or(Some((*bin, *load as f64 / mean)));
            } else if looks >= self.policy.patience.max(1) {
                splits.insert(*bin, self.depth(*bin, *load, mean / 2.0));
                self.hot.remove(bin);
            }
        }
    }

    fn divide_large(
        &mut self,
        bins: &[Bin],
        bytes: &[Option<u64>],
        split: &BTreeMap<Bin, Whole>,
        splits: &mut BTreeMap<Bin, u8>,
        told: &mut Division,
    ) {
        let Some(limit) = self.policy.most_bytes else { return };
        let patience = self.policy.patience.max(1);
        let before = std::mem::take(&mut self.large);
        let sized = bins.iter().zip(bytes).filter_map(|(bin, bytes)| Some((*bin, (*bytes)?)));
        let mut large: Vec<(Bin, u64)> = sized.filter(|(_, bytes)| *bytes > limit).collect();
        large.sort_unstable_by_key(|(bin, bytes)| (std::cmp::Reverse(*bytes), *bin));
        let most = limit.saturating_mul(LIMITS_AT_ONCE);
        let mut left = most;
        for (bin, bytes) in large {
            let looks = before.get(&bin).map_or(1, |looks| looks + 1).min(patience);
            self.large.insert(bin, looks);
            let all = split.get(&self.whole(bin)).and_then(|whole| whole.bytes);
            let fate = if self.is_one_key(bin, bytes, all) {
                Fate::Stays
            } else if looks < patience || (left < most && bytes > left) {
                Fate::Waits { looks: patience - looks }
            } else {
                left = left.saturating_sub(bytes);
                self.large.remove(&bin);
                let by = self.depth(bin, bytes, FULL * limit as f64);
                let by = splits.get(&bin).map_or(by, |hot| by.max(*hot));
                splits.insert(bin, by);
                Fate::Split { by }
            };
            told.large.push(Large { bin, bytes, fate });
        }
    }

    fn unite(&mut self, split: &BTreeMap<Bin, Whole>, hot: f64, told: &mut Division) {
        let before = std::mem::take(&mut self.cold);
        let patience = COLD_PATIENCE.saturating_mul(self.policy.patience.max(1));
        let mut ready = Vec::new();
        for (bin, whole) in split {
            let is_small = |limit: u64| whole.bytes.is_some_and(|bytes| (bytes as f64) < COLD * limit as f64);
            if (whole.load as f64) < hot && self.policy.most_bytes.is_none_or(is_small) {
                let looks = before.get(bin).map_or(1, |looks| looks + 1).min(patience);
                self.cold.insert(*bin, looks);
                if looks == patience {
                    ready.push((whole.bytes.unwrap_or(u64::MAX), *bin));
                }
            }
        }
        // The smallest first; the others are still cold at the next look.
        ready.sort_unstable();
        let limit = self.policy.most_bytes.or(Policy::default().most_bytes).unwrap_or(u64::MAX);
        let mut left = limit.saturating_mul(LIMITS_AT_ONCE);
        for (bytes, bin) in ready {
            if bytes > left && !told.merges.is_empty() {
                break;
            }
            left = left.saturating_sub(bytes);
            self.cold.remove(&bin);
            told.merges.push(bin);
        }
    }
}
