//! What a group of workers tells about itself: counters, latency samples, the log of moved bins.
//!
//! Owns the shared cells that workers write once per slice or epoch and a host drains when it asks.
//! Times are nanoseconds since the Unix epoch, taken from a monotonic clock anchored once per process,
//! so that a timeline never runs backwards.

use std::collections::BTreeMap;
use std::sync::Mutex;

use penstock_bins::{Costs, Routing, Stats, range_of};
use penstock_bounded::Monitor;
use penstock_files::Range;
use serde::{Deserialize, Serialize};

/// One slice that passed through the whole plan.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct SliceSample {
    /// When the probe passed it, nanoseconds since the Unix epoch.
    pub ended_ns: u64,
    /// From handing the slice to the dataflow to the probe passing it, nanoseconds.
    pub latency_ns: u64,
    /// Rows of the slice.
    pub rows: u64,
}

/// One entry of the log of moving bins.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BinMove {
    /// Keyed step of the plan, counted from 0.
    pub op: usize,
    /// Worker that wrote the entry.
    pub worker: u32,
    /// The bin.
    pub bin: u32,
    /// `prepare`, `state`, `pending` or `installed`.
    pub what: String,
    /// Bytes of state in the message that the entry is about; 0 inside a process, where the bin itself changes hands.
    pub bytes: u64,
    /// When, nanoseconds since the Unix epoch.
    pub at_ns: u64,
    /// Rows this worker had routed by then: rows between the first `prepare` and the last `state` were
    /// processed while state moved.
    pub routed_rows: u64,
}

/// Counters of one worker.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct WorkerStats {
    /// Absolute index of the worker.
    pub worker: usize,
    /// Bins owned, per keyed step.
    pub bins: Vec<u32>,
    /// Live keys over all bins and keyed steps.
    pub keys: u64,
    /// Bytes of state over all bins and keyed steps.
    pub state_bytes: u64,
    /// Input rows fed by this worker; where one feeds all ([`GroupConfig::gather`](super::GroupConfig::gather)), those that it was dealt.
    pub rows: u64,
    /// Late rows seen by this worker.
    pub late_rows: u64,
    /// Epochs completed.
    pub epochs: u64,
    /// Nanoseconds that it has not been parked since it began.
    #[serde(default)]
    pub busy_ns: u64,
    /// Bounded scopes: bounded parts and flat maps.
    #[serde(default)]
    pub scopes: Vec<ScopeStats>,
}

/// A bounded scope on one worker; see [`penstock_bounded::Stats`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ScopeStats {
    /// The step.
    pub step: String,
    /// Batches that may be unfinished, now.
    pub batches: u64,
    /// Rows of a batch, now.
    pub batch_size: u64,
    /// `fixed`, `growing`, `settled` or `short` (of memory).
    pub phase: String,
    /// How often a bound was raised to stay.
    pub raises: u64,
    /// How often a bound shrank.
    pub shrinks: u64,
    /// Rows per second in the last period that was judged.
    pub rate: Option<f64>,
    /// Batches admitted so far.
    pub admitted: u64,
    /// Their rows.
    pub admitted_rows: u64,
    /// Batches admitted and not finished.
    pub unfinished: u64,
    /// Their rows.
    pub unfinished_rows: u64,
    /// The most batches that were unfinished.
    pub maximum: u64,
    /// The most rows that were unfinished.
    pub maximum_rows: u64,
    /// Inputs that wait before the scope.
    pub buffered: u64,
    /// Inputs whose expansion failed and that were left out.
    pub failed: u64,
    /// The first of them, and why.
    pub failures: Vec<String>,
    /// The batch that is unfinished for longest: its time.
    pub holding: Option<String>,
}

/// Failures that are shown.
const FAILURES: usize = 10;

impl ScopeStats {
    pub(crate) fn of(step: &str, monitor: &Monitor) -> Self {
        let stats = monitor.stats();
        ScopeStats {
            step: step.to_owned(),
            batches: stats.batches,
            batch_size: stats.batch_size,
            phase: format!("{:?}", stats.phase).to_lowercase(),
            raises: stats.raises,
            shrinks: stats.shrinks,
            rate: stats.rate,
            admitted: stats.admitted,
            admitted_rows: stats.admitted_items,
            unfinished: stats.unfinished,
            unfinished_rows: stats.unfinished_items,
            maximum: stats.maximum,
            maximum_rows: stats.maximum_items,
            buffered: stats.buffered,
            failed: stats.failed,
            failures: monitor.failures().iter().take(FAILURES).map(ToString::to_string).collect(),
            holding: stats.holding,
        }
    }
}

/// What the bins of a keyed step got and cost on the workers of a process since they began; see [`Group::loads`](crate::host::Group::loads).
/// Python adds it up over processes and says which bin costs what (`penstock._loads`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct StepLoads {
    /// Rows of each bin, by sample.
    pub rows: Vec<u64>,
    /// Rows of the parts of bins that are or were split, by their numbers; they count among those of their bins, too.
    pub part_rows: BTreeMap<u32, u64>,
    /// What they cost.
    #[serde(flatten)]
    pub costs: Costs,
}

impl StepLoads {
    pub(crate) fn of<T>(stats: &Stats<T>) -> Self {
        Self { rows: stats.loads(), part_rows: stats.part_loads(), costs: stats.costs() }
    }
}

/// Answer to [`Group::stats`](crate::host::Group::stats).
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct GroupStats {
    /// One entry per local worker.
    pub workers: Vec<WorkerStats>,
    /// Slices completed since the last call.
    pub slices: Vec<SliceSample>,
    /// Bin moves logged since the last call.
    pub moves: Vec<BinMove>,
    /// Originals that are kept of bins which moved to other processes.
    #[serde(default)]
    pub originals: usize,
}

/// Samples kept between two calls of `stats`; older ones are dropped first.
const SAMPLES: usize = 1 << 16;

#[derive(Debug, Default)]
struct Cells {
    stats: WorkerStats,
    slices: std::collections::VecDeque<SliceSample>,
    owners: Vec<Vec<u32>>,
    /// With the parts of those that are split; empty while none is.
    bins: Vec<Vec<(Range, u32)>>,
    /// Bytes of state of the bins that the worker has, per keyed step.
    bytes: Vec<Vec<(u32, u64)>>,
    members: Vec<u32>,
}

/// All bins with their owners by these routings, where any is split.
pub(crate) fn ranges(
    routings: impl Iterator<Item = impl std::ops::Deref<Target = Routing>> + Clone,
) -> Vec<Vec<(Range, u32)>> {
    if !routings.clone().any(|routing| routing.is_split()) {
        return Vec::new();
    }
    let all = |routing: &Routing| {
        let range = |(bin, owner)| (range_of(bin, routing.bits()).expect("a bin of the routing"), owner);
        routing.bins_owned().map(range).collect()
    };
    routings.map(|routing| all(&routing)).collect()
}

/// The cells of one worker, written by its thread and read by the host.
#[derive(Debug)]
pub(crate) struct Gauges(Mutex<Cells>);

impl Gauges {
    /// Of a worker that begins with these routings.
    pub(crate) fn new(routings: &[Routing]) -> Self {
        let owners = routings.iter().map(|routing| routing.owners().to_vec()).collect();
        let bins = ranges(routings.iter());
        Self(Mutex::new(Cells { owners, bins, ..Cells::default() }))
    }

    fn cells(&self) -> std::sync::MutexGuard<'_, Cells> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    pub(crate) fn update(&self, change: impl FnOnce(&mut WorkerStats, &mut Vec<Vec<u32>>)) {
        let cells = &mut *self.cells();
        change(&mut cells.stats, &mut cells.owners);
    }

    pub(crate) fn sample(&self, sample: SliceSample) {
        let mut cells = self.cells();
        if cells.slices.len() == SAMPLES {
            cells.slices.pop_front();
        }
        cells.slices.push_back(sample);
    }

    pub(crate) fn collect(&self, into: &mut GroupStats) {
        let mut cells = self.cells();
        into.workers.push(cells.stats.clone());
        into.slices.extend(cells.slices.drain(..));
    }

    /// All bins with their owners.
    pub(crate) fn bins(&self) -> Vec<Vec<(Range, u32)>> {
        let cells = self.cells();
        if !cells.bins.is_empty() {
            return cells.bins.clone();
        }
        let all = |owners: &Vec<u32>| {
            let bits = owners.len().ilog2() as u8;
            let bin = |(bin, owner): (u32, &u32)| Some((Range::new(bin, bits)?, *owner));
            (0..).zip(owners).filter_map(bin).collect()
        };
        cells.owners.iter().map(all).collect()
    }

    pub(crate) fn tell_bins(&self, bins: Vec<Vec<(Range, u32)>>) {
        self.cells().bins = bins;
    }

    /// Bytes of state of each bin that the worker has, per keyed step, by the numbers of the bins.
    pub(crate) fn bytes(&self) -> Vec<Vec<(u32, u64)>> {
        self.cells().bytes.clone()
    }

    pub(crate) fn tell_bytes(&self, bytes: Vec<Vec<(u32, u64)>>) {
        self.cells().bytes = bytes;
    }

    pub(crate) fn owners(&self) -> Vec<Vec<u32>> {
        self.cells().owners.clone()
    }

    pub(crate) fn tell_members(&self, members: Vec<u32>) {
        self.cells().members = members;
    }

    pub(crate) fn members(&self) -> Vec<u32> {
        self.cells().members.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loads_are_told_under_the_names_that_python_reads() {
        let costs = Costs {
            rest_ns: 7,
            spent_ns: vec![1, 2],
            part_spent_ns: BTreeMap::from([(5, 2)]),
            met: vec![8, 0],
            part_met: BTreeMap::from([(6, 8)]),
        };
        let loads = StepLoads { rows: vec![16, 8], part_rows: BTreeMap::from([(5, 8)]), costs };
        let told = serde_json::json!({
            "rows": [16, 8], "part_rows": {"5": 8}, "rest_ns": 7,
            "spent_ns": [1, 2], "part_spent_ns": {"5": 2}, "met": [8, 0], "part_met": {"6": 8},
        });
        assert_eq!(serde_json::to_value(&loads).unwrap(), told);
    }
}
