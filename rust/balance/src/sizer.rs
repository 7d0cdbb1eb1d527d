//! How many workers the rate that comes needs.
//!
//! Source: DS2 (Kalavri et al., OSDI 2018): the true rate of a worker is what it does in the time that it is busy, so one measurement under any
//! load tells how many are needed, where utilisation alone only tells a direction. Departures: all operators of a query are one (workers host
//! all of them), and a change must be asked for by several looks in a row, down for longer than up, and only where there is room to spare.
//!
//! Queries share the workers: each has threads of its own in all of them, on the same CPUs. So what they keep busy adds up, and is rounded up once: ten
//! queries that need a tenth of a worker each need one together. But a thread that is ready while another query's has the CPU counts as busy, so where
//! queries are in each other's way the rate of each is too low, and what it seems to need too high, by the share of its time that the others are busy.
//! That share is known, so it is taken out again. The sum is then what the CPUs do, whatever the number of workers, and does not fall when some come and rise when
//! they go. Where there are CPUs for the threads of every query at once, too much is taken out: the sum is never less than what one query seems to need
//! alone, which is enough there.
//!
//! Invariants: there are fewer workers only when those that stay would be clearly less busy than they may be ([`ROOM`]), so noise about a boundary does
//! not make the number swing; while some query is not measured the sum is only known to be at least so much, so it asks for more workers and never
//! for fewer.

use std::time::Duration;

/// When to change the number of workers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SizerPolicy {
    /// The fewest workers, at least 1.
    pub least: u32,
    /// The most workers.
    pub most: u32,
    /// Threads of each worker, at least 1.
    pub threads: u32,
    /// Share of its time that a worker is to be busy: 0.8 leaves a fifth to catch up with.
    pub busy: f64,
    /// Looks in a row that must ask for more; three times as many for fewer.
    pub patience: u32,
}

/// What happened to one query between two looks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Demand {
    /// Rows per second that came to the source, processed or not.
    pub offered: f64,
    /// Rows that were processed.
    pub rows: u64,
    /// Time that threads of workers were busy with them, summed over threads.
    pub busy: Duration,
}

/// What a look says.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Size {
    /// Workers that the queries keep busy together, as far as they were measured.
    pub load: f64,
    /// Workers that this needs within the policy's limits, whatever was asked for before.
    pub needed: u32,
    /// The number to go to; as now while that is right.
    pub workers: u32,
    /// Looks that must still show it; 0 where it is time.
    pub looks: u32,
}

/// Of the share that a worker is to be busy, what it may be after others have gone.
const ROOM: f64 = 0.9;

/// Watches demand.
///
/// # Examples
/// ```
/// use penstock_balance::{Demand, Sizer, SizerPolicy};
/// use std::time::Duration;
/// let mut sizer = Sizer::new(SizerPolicy { least: 1, most: 8, threads: 1, busy: 0.8, patience: 1 });
/// // A worker does 1,000 rows in a busy second; 3,000 come: 3.75 workers at four fifths.
/// let demand = Demand { offered: 3_000.0, rows: 900, busy: Duration::from_millis(900) };
/// let size = sizer.look(1, &[sizer.load(demand)]).unwrap();
/// assert_eq!((size.workers, size.looks), (4, 0));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Sizer {
    policy: SizerPolicy,
    more: u32,
    fewer: u32,
    /// The most that was asked for by the looks that ask for fewer.
    kept: u32,
    /// How many workers there were at the last look: what was seen of another number says nothing of this one.
    workers: u32,
}

impl Sizer {
    /// One that has seen nothing.
    #[must_use]
    pub fn new(policy: SizerPolicy) -> Self {
        Self { policy, more: 0, fewer: 0, kept: 0, workers: 0 }
    }

    /// Workers that one query keeps busy with what comes, with what it waits for others; `None` while nothing was measured.
    #[must_use]
    pub fn load(&self, demand: Demand) -> Option<f64> {
        let busy = demand.busy.as_secs_f64() / f64::from(self.policy.threads.max(1));
        if demand.offered == 0.0 {
            return Some(0.0);
        }
        let measured = demand.rows > 0 && busy > 0.0 && demand.offered.is_finite();
        measured.then(|| (demand.offered * busy / demand.rows as f64).max(0.0))
    }

    fn workers_for(&self, load: f64, busy: f64) -> u32 {
        let wanted = (load / busy - 1e-9).ceil().max(0.0) as u32;
        let least = self.policy.least.max(1);
        wanted.clamp(least, self.policy.most.max(least))
    }

    /// What the queries that run need, each of which keeps so many of the `workers` busy ([`Sizer::load`]); `None` while none was measured.
    pub fn look(&mut self, workers: u32, loads: &[Option<f64>]) -> Option<Size> {
        let known: Vec<f64> = loads.iter().copied().flatten().collect();
        if known.is_empty() {
            return None;
        }
        if std::mem::replace(&mut self.workers, workers) != workers {
            (self.more, self.fewer) = (0, 0);
        }
        let load = together(&known, workers);
        let patience = self.policy.patience.max(1);
        let needed = self.workers_for(load, self.policy.busy);
        let enough = self.workers_for(load, self.policy.busy * ROOM);
        let (wanted, waits) = if needed > workers {
            (self.more, self.fewer) = (self.more + 1, 0);
            (needed, patience.saturating_sub(self.more))
        } else if enough < workers && known.len() == loads.len() {
            self.kept = if self.fewer == 0 { enough } else { self.kept.max(enough) };
            (self.more, self.fewer) = (0, self.fewer + 1);
            (self.kept, (3 * patience).saturating_sub(self.fewer))
        } else {
            (self.more, self.fewer) = (0, 0);
            (workers, 0)
        };
        if waits == 0 {
            (self.more, self.fewer) = (0, 0);
        }
        Some(Size { load, needed, workers: wanted, looks: waits })
    }
}

/// Workers that queries need which keep so many busy of those that they share, with what they wait for each other.
fn together(loads: &[f64], workers: u32) -> f64 {
    let share = |load: f64| (load / f64::from(workers.max(1))).min(1.0);
    let all: f64 = loads.iter().copied().map(share).sum();
    let alone: f64 = loads.iter().map(|load| load / (1.0 + all - share(*load))).sum();
    loads.iter().copied().fold(alone, f64::max)
}
