//! Evening loads out unaided: watches what each bin gets, and says when moving some is worth it.
//!
//! A load is what a bin costs, in any unit: rows, or nanoseconds of work, which say more where rows of one key cost more than another's. Whether a look
//! says anything is judged by rows.
//!
//! A controller that moves at every sign of skew oscillates: loads of a moment are noise, a hot key wanders, and moving costs. So skew must
//! stand for several looks in a row before anything moves; loads are the means of just these looks, so that what was before they began to
//! differ does not blur them; what moves evens out to below what started it; and after a move comes a rest, in which its effect shows.
//!
//! Bins that are split or merged between two looks, as those that hold too much are one after the other, begin nothing anew ([`Balancer::recut`]): what
//! workers have is the same. Only where one that is split has nearly half of a worker's share, its parts have to be seen first, since moves are of them.
//!
//! Invariants: behind a verdict with moves come `patience` looks of rest, and then as many that must show skew again; moves are made only when the skew that is expected afterwards is
//! clearly lower; loads belong to bins, so they stay true when bins move.

use std::collections::{BTreeMap, VecDeque};

use crate::{Bin, Shift, evened, skew};

/// When to move.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Policy {
    /// What the most loaded worker may have, as a multiple of the mean ([`skew`]): 1.5 is half as much again. Above it, bins move.
    pub trigger: f64,
    /// The multiple of the mean to which they are evened out; at most `trigger`.
    pub tolerance: f64,
    /// Looks in a row that must show it, at least 1.
    pub patience: u32,
    /// Rows in a look below which it says nothing.
    pub least_rows: u64,
    /// Bytes of state above which a bin is split, whatever its load; `None` for any.
    pub most_bytes: Option<u64>,
}

impl Default for Policy {
    fn default() -> Self {
        Self { trigger: 1.5, tolerance: 1.2, patience: 3, least_rows: 1_000, most_bytes: Some(64 << 20) }
    }
}

/// Why something is done, or nothing.
#[derive(Clone, Debug, PartialEq)]
pub enum Why {
    /// Too few rows came to say anything.
    Quiet,
    /// No worker has too much.
    Even,
    /// Skew, but not yet for long enough, or bins have moved just now.
    Waiting {
        /// Looks that must still show it.
        looks: u32,
    },
    /// One bin alone is more than a worker should have: moving does not help, dividing it would.
    HotBin {
        /// The bin.
        bin: usize,
        /// Its load as a share of the mean load of a worker.
        share: f64,
    },
    /// A worker has too much of bins none of which is too hot: each that it gave away would make another worker the fullest. Dividing one helps.
    Packed {
        /// The worker.
        worker: u32,
        /// The heaviest of its bins.
        bin: usize,
        /// The load that parts of that may have for two to be beside the worker's other bins, as a share of the mean load of a worker; `None` where the
        /// bin has so little that it may be chance, and is not worth it.
        part: Option<f64>,
    },
    /// Skew that moving some bins lowers.
    Skewed,
}

/// What a look says.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// Skew of the loads over the last looks.
    pub skew: f64,
    /// Skew after the moves; as `skew` without.
    pub expected: f64,
    /// What to move now; usually nothing.
    pub moves: Vec<Shift<usize>>,
    /// Why.
    pub why: Why,
}

/// Of the skew above 1 that moving must take away to be worth it.
const WORTH: f64 = 0.25;

/// Of a worker's share a bin has so much, in each look, that is worth dividing where none is too hot: it has more where there is one more than workers.
const HEAVY: f64 = 0.45;

/// Of a worker's share a part is asked to be no less.
const LEAST_PART: f64 = 0.125;

/// Watches loads.
///
/// # Examples
/// ```
/// use penstock_balance::{Balancer, Policy, Why};
/// let mut balancer = Balancer::new(Policy { least_rows: 1, patience: 2, ..Policy::default() });
/// let (owners, rows) = ([0, 0, 1, 1], [40, 30, 5, 5]);
/// assert_eq!(balancer.look(&owners, &rows, 80, 2).why, Why::Waiting { looks: 1 });
/// let verdict = balancer.look(&owners, &rows, 80, 2);
/// assert_eq!((verdict.moves.len(), verdict.moves[0].what), (1, 1));
/// ```
#[derive(Clone, Debug)]
pub struct Balancer {
    policy: Policy,
    /// Load of each bin in the last looks that said something, as many as patience asks for.
    looks: VecDeque<Vec<u64>>,
    over: u32,
    /// Looks that the last moves are still given.
    rest: u32,
}

impl Balancer {
    /// One that has seen nothing.
    #[must_use]
    pub fn new(policy: Policy) -> Self {
        Self { policy, looks: VecDeque::new(), over: 0, rest: 0 }
    }

    /// Goes on with other bins, which are parts of those `before` or have some of them as parts: what a bin got is spread evenly over its hashes. Where
    /// one that is split got nearly half of a worker's share, what was seen counts for nothing.
    ///
    /// # Examples
    /// ```
    /// use penstock_balance::{Balancer, Policy};
    /// let mut balancer = Balancer::new(Policy { least_rows: 1, patience: 2, ..Policy::default() });
    /// balancer.look(&[0, 0, 1, 1], &[40, 40, 10, 10], 100, 2);
    /// balancer.recut(&[(0, 2), (1, 2), (2, 2), (3, 2)], &[(0, 2), (1, 2), (2, 2), (6, 3), (7, 3)], 2);
    /// let verdict = balancer.look(&[0, 0, 1, 1, 1], &[40, 40, 10, 5, 5], 100, 2);
    /// assert_eq!(verdict.moves.len(), 1);
    /// ```
    pub fn recut(&mut self, before: &[Bin], now: &[Bin], workers: u32) {
        self.looks.retain(|look| look.len() == before.len());
        let first = |(prefix, bits): Bin| u64::from(prefix) << (u32::BITS - u32::from(bits));
        let at: BTreeMap<u64, usize> = before.iter().enumerate().map(|(place, bin)| (first(*bin), place)).collect();
        // Of a part the bin that it is of, or the bin itself.
        let of = |bin: Bin| {
            at.range(..=first(bin)).next_back().map(|(_, place)| *place).filter(|place| before[*place].1 <= bin.1)
        };
        let total: u64 = self.looks.iter().flatten().sum();
        let heavy = HEAVY * total as f64 / f64::from(workers.max(1));
        let is_heavy = |place: usize| self.looks.iter().map(|look| look[place]).sum::<u64>() as f64 >= heavy;
        if now.iter().any(|bin| of(*bin).is_some_and(|place| before[place].1 < bin.1 && is_heavy(place))) {
            *self = Self::new(self.policy);
            return;
        }
        for look in &mut self.looks {
            let load = |bin: &Bin| match of(*bin) {
                Some(place) => {
                    // To the row: all parts together have what it has.
                    let (by, load) = (bin.1 - before[place].1, u128::from(look[place]));
                    let low = u128::from(bin.0 & ((1 << by) - 1));
                    (((load * (low + 1)) >> by) - ((load * low) >> by)) as u64
                }
                None => {
                    let end = first(*bin) + (1 << (u32::BITS - u32::from(bin.1)));
                    at.range(first(*bin)..end).map(|(_, place)| look[*place]).sum()
                }
            };
            *look = now.iter().map(load).collect();
        }
    }

    /// Judges the load of each bin since the last look, in which `came` rows came. All `workers` may own bins. What the verdict moves is taken to be on its way: the
    /// next looks bring the owners as they are then.
    ///
    /// # Panics
    /// When there are not as many loads as owners.
    pub fn look(&mut self, owners: &[u32], new: &[u64], came: u64, workers: u32) -> Verdict {
        assert_eq!(owners.len(), new.len(), "loads of each bin");
        let patience = self.policy.patience.max(1);
        if came >= self.policy.least_rows {
            self.looks.push_back(new.to_vec());
        }
        self.looks.retain(|look| look.len() == new.len());
        while self.looks.len() > patience as usize {
            self.looks.pop_front();
        }
        let loads: Vec<u64> = (0..new.len()).map(|bin| self.looks.iter().map(|look| look[bin]).sum()).collect();
        let of_workers = |owners: &dyn Fn(usize) -> u32| {
            let mut sums = vec![0; workers as usize];
            for (bin, load) in loads.iter().enumerate() {
                if let Some(sum) = sums.get_mut(owners(bin) as usize) {
                    *sum += load;
                }
            }
            sums
        };
        let now = skew(&of_workers(&|bin| owners[bin]));
        let nothing = |why| Verdict { skew: now, expected: now, moves: Vec::new(), why };
        if came < self.policy.least_rows {
            return nothing(Why::Quiet);
        }
        let rests = self.rest > 0;
        self.rest = self.rest.saturating_sub(1);
        self.over = if now > self.policy.trigger && !rests { self.over + 1 } else { 0 };
        if now <= self.policy.trigger {
            return nothing(Why::Even);
        }
        if self.over < patience {
            return nothing(Why::Waiting { looks: self.rest + patience - self.over });
        }
        let moves = evened(owners, &loads, &vec![true; workers as usize], self.policy.tolerance);
        let mut after = owners.to_vec();
        for shift in &moves {
            after[shift.what] = shift.to;
        }
        let expected = skew(&of_workers(&|bin| after[bin]));
        if now - expected < WORTH * (now - 1.0) {
            let hottest = (0..loads.len()).max_by_key(|bin| loads[*bin]).unwrap_or(0);
            let mean = loads.iter().sum::<u64>() as f64 / f64::from(workers);
            let share = |bin: usize| loads[bin] as f64 / mean;
            // Whom no move relieves: others may be relieved by moves as soon as this one is, too.
            let sums = of_workers(&|bin| after[bin]);
            let fullest = (0..workers).max_by_key(|worker| sums[*worker as usize]).unwrap_or(0);
            let of_fullest = (0..loads.len()).filter(|bin| after[*bin] == fullest).max_by_key(|bin| loads[*bin]);
            return nothing(match of_fullest.filter(|_| share(hottest) <= self.policy.trigger) {
                Some(bin) => {
                    let others = sums[fullest as usize] as f64 / mean - share(bin);
                    let part = ((self.policy.tolerance - others) / 2.0).max(LEAST_PART);
                    let mean_of = |look: &[u64]| look.iter().sum::<u64>() as f64 / f64::from(workers);
                    let is_heavy = self.looks.iter().all(|look| look[bin] as f64 >= HEAVY * mean_of(look));
                    Why::Packed { worker: fullest, bin, part: is_heavy.then_some(part) }
                }
                None => Why::HotBin { bin: hottest, share: share(hottest) },
            });
        }
        (self.over, self.rest) = (0, patience);
        Verdict { skew: now, expected, moves, why: Why::Skewed }
    }
}
