//! Dividing what is too hot for any worker, and making one again what is not: bins get parts with longer prefixes where the load is.
//!
//! A bin that alone gets more than any worker may have cannot be evened out by moves. So it is split, as soon as that has stood for some looks, into
//! parts of which each is half a worker's share at most, were its load spread evenly over its hashes; the parts are then bins to who moves some. A bin that is
//! split and gets little becomes one again. The two are far apart, in load and in time, so that a load that goes up and down does neither.
//!
//! What no split divides is the load of one key. So a part that has nearly all of the load of its bin when it is a small part of it is left alone.
//!
//! Invariants: a bin is split only when it was too hot in each of `patience` looks, and merged only when it was cold in each of four times as many; no
//! part is longer than asked for.

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
}

/// Bits by which a bin is split at once.
const MOST_AT_ONCE: u8 = 4;
/// Bits by which a part is longer than its bin when nearly all of the load of that is one key's, or as good as that; and how much that is.
const KEY_DEPTH: u8 = 4;
const KEY_SHARE: f64 = 0.9;
/// Of what is too hot a bin may get so much and be merged.
const COLD: f64 = 0.25;
/// So many times longer it must stand.
const COLD_PATIENCE: u32 = 4;

/// Watches loads of bins and parts.
///
/// # Examples
/// ```
/// use penstock_balance::{Divider, Policy};
/// let mut divider = Divider::new(Policy { least_rows: 1, patience: 2, ..Policy::default() }, 1, 20);
/// let (bins, rows) = ([(0, 1), (1, 1)], [90, 10]);
/// assert_eq!(divider.look(&bins, &rows, 2).splits, []);
/// assert_eq!(divider.look(&bins, &rows, 2).splits, [((0, 1), 2)]);
/// ```
#[derive(Clone, Debug)]
pub struct Divider {
    policy: Policy,
    bits: u8,
    most_bits: u8,
    /// Looks in a row in which a bin or part was too hot.
    hot: BTreeMap<Bin, u32>,
    /// Looks in a row in which a bin that is split was cold.
    cold: BTreeMap<Bin, u32>,
}

impl Divider {
    /// One that has seen nothing, of bins of `bits` bits; parts have `most_bits` at most.
    #[must_use]
    pub fn new(policy: Policy, bits: u8, most_bits: u8) -> Self {
        Self { policy, bits, most_bits, hot: BTreeMap::new(), cold: BTreeMap::new() }
    }

    /// Judges the rows that each bin and part got since the last look. What it says is taken to be done: the next looks bring the bins as
    /// they are then.
    ///
    /// # Panics
    /// When there are not as many rows as bins.
    pub fn look(&mut self, bins: &[Bin], rows: &[u64], workers: u32) -> Division {
        assert_eq!(bins.len(), rows.len(), "rows of each bin");
        let mut told = Division::default();
        let came: u64 = rows.iter().sum();
        if came < self.policy.least_rows.max(1) {
            return told;
        }
        let mean = came as f64 / f64::from(workers.max(1));
        let whole = |(prefix, bits): Bin| (prefix >> (bits - self.bits), self.bits);
        let mut split: BTreeMap<Bin, u64> = BTreeMap::new();
        for (bin, rows) in bins.iter().zip(rows).filter(|(bin, _)| bin.1 > self.bits) {
            *split.entry(whole(*bin)).or_default() += rows;
        }
        let too_hot = self.policy.trigger * mean;
        let patience = self.policy.patience.max(1);
        let before = std::mem::take(&mut self.hot);
        for (bin, rows) in bins.iter().zip(rows).filter(|(_, rows)| workers > 1 && **rows as f64 > too_hot) {
            let looks = before.get(bin).map_or(1, |looks| looks + 1);
            self.hot.insert(*bin, looks);
            let all = || split[&whole(*bin)] as f64;
            let one_key = bin.1 - self.bits >= KEY_DEPTH && *rows as f64 >= KEY_SHARE * all();
            if one_key || bin.1 >= self.most_bits {
                told.hot_key = told.hot_key.or(Some((*bin, *rows as f64 / mean)));
            } else if looks >= patience {
                let most = MOST_AT_ONCE.min(self.most_bits - bin.1);
                let by = (1..most).find(|by| *rows as f64 / f64::from(1_u32 << by) <= mean / 2.0).unwrap_or(most);
                told.splits.push((*bin, by));
                self.hot.remove(bin);
            }
        }
        let before = std::mem::take(&mut self.cold);
        for (bin, rows) in &split {
            if (*rows as f64) < COLD * too_hot {
                let looks = before.get(bin).map_or(1, |looks| looks + 1);
                match looks >= COLD_PATIENCE.saturating_mul(patience) {
                    true => told.merges.push(*bin),
                    false => _ = self.cold.insert(*bin, looks),
                }
            }
        }
        told
    }
}
