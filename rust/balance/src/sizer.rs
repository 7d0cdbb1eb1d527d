//! How many workers the rate that comes needs.
//!
//! Source: DS2 (Kalavri et al., OSDI 2018): the true rate of a worker is what it does in the time that it is busy, so one measurement under any
//! load tells how many are needed, where utilisation alone only tells a direction. Departures: all operators of a query are one (workers host
//! all of them), and a change must be asked for by several looks in a row, down for longer than up.

use std::time::Duration;

/// When to change the number of workers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SizerPolicy {
    /// The fewest workers, at least 1.
    pub least: u32,
    /// The most workers.
    pub most: u32,
    /// Share of its time that a worker is to be busy: 0.8 leaves a fifth to catch up with.
    pub busy: f64,
    /// Looks in a row that must ask for more; three times as many for fewer.
    pub patience: u32,
}

/// What happened between two looks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Demand {
    /// Workers now.
    pub workers: u32,
    /// Rows per second that came to the source, processed or not.
    pub offered: f64,
    /// Rows that were processed.
    pub rows: u64,
    /// Time that workers were busy with them, summed over workers.
    pub busy: Duration,
}

/// Watches demand.
///
/// # Examples
/// ```
/// use penstock_balance::{Demand, Sizer, SizerPolicy};
/// use std::time::Duration;
/// let mut sizer = Sizer::new(SizerPolicy { least: 1, most: 8, busy: 0.8, patience: 1 });
/// // A worker does 1,000 rows in a busy second; 3,000 come: 3.75 workers at four fifths.
/// let demand = Demand { workers: 1, offered: 3_000.0, rows: 900, busy: Duration::from_millis(900) };
/// assert_eq!(sizer.look(demand), Some(4));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Sizer {
    policy: SizerPolicy,
    more: u32,
    fewer: u32,
    /// The most that was asked for by the looks that ask for fewer.
    kept: u32,
}

impl Sizer {
    /// One that has seen nothing.
    #[must_use]
    pub fn new(policy: SizerPolicy) -> Self {
        Self { policy, more: 0, fewer: 0, kept: 0 }
    }

    /// Workers that the demand needs within the policy's limits, whatever was asked for before; `None` while nothing was measured.
    #[must_use]
    pub fn needed(&self, demand: Demand) -> Option<u32> {
        let busy = demand.busy.as_secs_f64();
        if demand.rows == 0 || busy <= 0.0 || !demand.offered.is_finite() {
            return None;
        }
        let rate = demand.rows as f64 / busy;
        let wanted = (demand.offered / (rate * self.policy.busy) - 1e-9).ceil();
        Some((wanted.max(0.0) as u32).clamp(self.policy.least.max(1), self.policy.most.max(self.policy.least.max(1))))
    }

    /// The number of workers to change to, when it is time.
    pub fn look(&mut self, demand: Demand) -> Option<u32> {
        let needed = self.needed(demand)?;
        let patience = self.policy.patience.max(1);
        match needed.cmp(&demand.workers) {
            std::cmp::Ordering::Equal => (self.more, self.fewer) = (0, 0),
            std::cmp::Ordering::Greater => (self.more, self.fewer) = (self.more + 1, 0),
            std::cmp::Ordering::Less => {
                self.kept = if self.fewer == 0 { needed } else { self.kept.max(needed) };
                (self.more, self.fewer) = (0, self.fewer + 1);
            }
        }
        let asked = if self.more >= patience {
            needed
        } else if self.fewer >= 3 * patience {
            self.kept
        } else {
            return None;
        };
        (self.more, self.fewer) = (0, 0);
        Some(asked)
    }
}
