//! Counters of one operator, shared by the workers of a process, and the log of its migrations.
//!
//! Counters are relaxed atomics, touched once per block or per bin, never per record. The log keeps the latest
//! [`LOG_ENTRIES`] entries for the timeline and for tests.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::bin::bin;

/// Entries kept in the log; older ones are forgotten.
pub const LOG_ENTRIES: usize = 1 << 16;

/// What happened to a bin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BinEvent {
    /// F uninstalled it and announced it.
    Prepare,
    /// S received its state, or a chunk of it.
    State,
    /// S received post-dated records of it.
    Pending,
    /// S may work on it: all of it is here.
    Installed,
    /// It was made of a bin that was split, or of parts that were merged.
    Cut,
}

/// One entry of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogEntry<T> {
    /// Where it happened.
    pub worker: usize,
    /// The bin.
    pub bin: u32,
    /// The time at which the bin moves.
    pub time: T,
    /// What happened.
    pub what: BinEvent,
    /// Bytes of state in the message; 0 when the bin itself changed hands inside a process.
    pub bytes: u64,
    /// Monotonic nanoseconds since the statistics began.
    pub at_ns: u64,
    /// Records routed by then, all workers of the process together.
    pub routed: u64,
}

/// Counters and log of one operator in one process.
#[derive(Debug)]
pub struct Stats<T> {
    begun: Instant,
    pub(crate) owned: AtomicU64,
    pub(crate) moved_in: AtomicU64,
    pub(crate) moved_out: AtomicU64,
    pub(crate) bytes_in: AtomicU64,
    pub(crate) bytes_out: AtomicU64,
    pub(crate) applied: AtomicU64,
    pub(crate) ahead: AtomicU64,
    pub(crate) routed: AtomicU64,
    pub(crate) routed_moving: AtomicU64,
    log: Mutex<Log<T>>,
    /// Records that were routed.
    loads: Tally,
    /// What the logic says of single bins.
    met: Tally,
    spent: Tally,
    rest_ns: AtomicU64,
}

/// Of so many records of a block one is counted, for all of them.
pub const SAMPLE: usize = 8;

/// Up to so many records are counted at even distances: chance tells less of few.
const FEW: usize = 64 * SAMPLE;

/// Counts by bin, those of its parts among them, and by part.
#[derive(Debug, Default)]
struct Tally {
    /// Of each worker in this process.
    bins: Mutex<Vec<Arc<[AtomicU64]>>>,
    /// Of the parts of bins that are split, all workers of this process together.
    parts: Mutex<BTreeMap<u32, u64>>,
}

impl Tally {
    /// The counts of one more worker.
    fn of_worker(&self, bins: usize) -> Arc<[AtomicU64]> {
        let counts: Arc<[AtomicU64]> = (0..bins).map(|_| AtomicU64::new(0)).collect();
        self.bins.lock().unwrap_or_else(PoisonError::into_inner).push(counts.clone());
        counts
    }

    fn bins(&self) -> Vec<u64> {
        let known = self.bins.lock().unwrap_or_else(PoisonError::into_inner);
        let bins = known.iter().map(|counts| counts.len()).max().unwrap_or(0);
        (0..bins)
            .map(|bin| known.iter().filter_map(|counts| counts.get(bin)).map(|count| count.load(Relaxed)).sum())
            .collect()
    }

    fn parts(&self) -> BTreeMap<u32, u64> {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn add_to_parts(&self, parts: impl Iterator<Item = (u32, u64)>) {
        let mut known = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        for (part, more) in parts {
            *known.entry(part).or_default() += more;
        }
    }
}

/// Nobody else writes here, so no locked addition.
fn add(counts: &[AtomicU64], bin: u32, more: u64) {
    let count = &counts[bin as usize];
    count.store(count.load(Relaxed) + more, Relaxed);
}

/// What the logic of an operator has cost, on all workers of a process since they began: of single bins what was measured or met there, by their
/// numbers and those of their parts, which count as those of the bin, too; and the rest.
///
/// The rest is not divided here, since it is every bin's in proportion to its records, whoever had them and when: a worker that has few at a time spends
/// more on each, and that is no property of its bins.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Costs {
    /// Nanoseconds that belong to no bin alone.
    pub rest_ns: u64,
    /// Nanoseconds by bin; empty where nothing was measured.
    pub spent_ns: Vec<u64>,
    /// Nanoseconds by part.
    pub part_spent_ns: BTreeMap<u32, u64>,
    /// Records that it has made for each bin, by sample; empty where that is not told.
    pub met: Vec<u64>,
    /// The same by part.
    pub part_met: BTreeMap<u32, u64>,
}

/// Takes what the logic of one worker costs.
///
/// Cost: who calls it reads a clock twice for all that S gives at one time, some 50 ns, and adds up one number for each bin that was measured.
#[derive(Debug)]
pub struct Meter<T> {
    stats: Arc<Stats<T>>,
    bits: u8,
    spent: Option<Arc<[AtomicU64]>>,
    met: Option<Arc<[AtomicU64]>>,
}

impl<T> Meter<T> {
    /// Of one worker with bins of so many bits.
    #[must_use]
    pub fn new(stats: Arc<Stats<T>>, bits: u8) -> Self {
        Self { stats, bits, spent: None, met: None }
    }

    /// So much time has passed, of which so many nanoseconds were spent on these bins or parts alone.
    pub fn spend(&mut self, all: Duration, alone: &[(u32, u64)]) {
        let of_bins: u64 = alone.iter().map(|(_, ns)| ns).sum();
        let rest = u64::try_from(all.as_nanos()).unwrap_or(u64::MAX).saturating_sub(of_bins);
        self.stats.rest_ns.fetch_add(rest, Relaxed);
        if of_bins == 0 {
            return;
        }
        let (bits, bins) = (self.bits, 1 << self.bits);
        let counts = self.spent.get_or_insert_with(|| self.stats.spent.of_worker(bins));
        alone.iter().for_each(|(number, ns)| add(counts, whole(*number, bits), *ns));
        if alone.iter().any(|(number, _)| *number as usize >= bins) {
            self.stats.spent.add_to_parts(alone.iter().copied().filter(|(number, _)| *number as usize >= bins));
        }
    }

    /// Records were made for these hashes, of which each stands for [`SAMPLE`]; `number` is asked for their parts where any bin is split.
    pub fn meet(&mut self, hashes: &[u64], number: Option<impl Fn(u64) -> u32>) {
        if hashes.is_empty() {
            return;
        }
        let (bits, bins) = (self.bits, 1 << self.bits);
        let counts = self.met.get_or_insert_with(|| self.stats.met.of_worker(bins));
        hashes.iter().for_each(|hash| add(counts, bin(*hash, bits), SAMPLE as u64));
        if let Some(number) = number {
            let parts = hashes.iter().map(|hash| number(*hash)).filter(|number| *number as usize >= bins);
            self.stats.met.add_to_parts(parts.map(|part| (part, SAMPLE as u64)));
        }
    }
}

/// The bin that a part, or the bin itself, is of.
fn whole(number: u32, bits: u8) -> u32 {
    match number >> bits {
        0 => number,
        _ => {
            let length = number.ilog2();
            (number & !(1 << length)) >> (length - u32::from(bits))
        }
    }
}

/// How many records each bin gets, as one F sees them pass: of each eight one, at a place that moves on by block, so that of eight blocks alike every
/// record counts once. In a block of many records the places look like chance besides: keys that come in turn are told of alike by that block alone. A bin's count is right but for the square
/// root of it, times three.
///
/// Cost: a step of the generator, a read of a hash and an addition to a line of its own worker, for an eighth of them: 0.2 ns a record.
#[derive(Debug)]
pub(crate) struct Loads {
    counts: Arc<[AtomicU64]>,
    turn: usize,
}

impl Loads {
    /// Counts a block's records.
    pub(crate) fn count(&mut self, hashes: &[u64], bin: impl Fn(u64) -> u32) {
        self.turn = (self.turn + 3) % SAMPLE;
        drawn(hashes, self.turn).for_each(|hash| add(&self.counts, bin(hash), SAMPLE as u64));
    }

    /// Counts the same records of the block that was counted last by their parts, where those are of bins that are split.
    pub(crate) fn count_parts<T>(&self, stats: &Stats<T>, hashes: &[u64], part: impl Fn(u64) -> u32) {
        let parts = drawn(hashes, self.turn).map(part).filter(|part| *part as usize >= self.counts.len());
        stats.loads.add_to_parts(parts.map(|part| (part, SAMPLE as u64)));
    }
}

/// One of each [`SAMPLE`] records, by the upper bits of a linear congruential generator (Knuth's MMIX) and the block's turn; of fewer at the end one
/// or none.
fn drawn(hashes: &[u64], turn: usize) -> impl Iterator<Item = u64> {
    let (mut state, many) = (0_u64, hashes.len() > FEW);
    hashes.chunks(SAMPLE).filter_map(move |some| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        some.get((if many { (state >> 32) as usize } else { 0 } + turn) % SAMPLE).copied()
    })
}

#[derive(Debug)]
struct Log<T> {
    entries: VecDeque<LogEntry<T>>,
    /// Entries ever recorded; those before `total - entries.len()` are gone.
    total: usize,
}

/// The counters at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Bins held by the workers of this process.
    pub bins_owned: u64,
    /// Bins received, from threads and processes.
    pub bins_in: u64,
    /// Bins sent, to threads and processes.
    pub bins_out: u64,
    /// Bytes of state received from other processes.
    pub bytes_in: u64,
    /// Bytes of state sent to other processes.
    pub bytes_out: u64,
    /// Records given to the logic, post-dated ones included.
    pub records_applied: u64,
    /// Of these, those that did not wait for bins that were on their way.
    pub records_ahead: u64,
    /// Records routed.
    pub records_routed: u64,
    /// Records routed while a migration was in flight.
    pub records_routed_moving: u64,
}

impl<T> Stats<T> {
    /// All zero, log empty, clock started.
    #[must_use]
    pub fn new() -> Self {
        Self {
            begun: Instant::now(),
            owned: AtomicU64::new(0),
            moved_in: AtomicU64::new(0),
            moved_out: AtomicU64::new(0),
            bytes_in: AtomicU64::new(0),
            bytes_out: AtomicU64::new(0),
            applied: AtomicU64::new(0),
            ahead: AtomicU64::new(0),
            routed: AtomicU64::new(0),
            routed_moving: AtomicU64::new(0),
            log: Mutex::new(Log { entries: VecDeque::new(), total: 0 }),
            loads: Tally::default(),
            met: Tally::default(),
            spent: Tally::default(),
            rest_ns: AtomicU64::new(0),
        }
    }

    /// Records of each bin that the workers of this process have routed since they began, wherever the bin is; by sample, see `Loads`.
    #[must_use]
    pub fn loads(&self) -> Vec<u64> {
        self.loads.bins()
    }

    /// Records that the workers of this process have routed by the part that they fell into then, by sample; they count as those of the
    /// bin, too. What parts had stays when they are split or merged.
    #[must_use]
    pub fn part_loads(&self) -> BTreeMap<u32, u64> {
        self.loads.parts()
    }

    /// What the logic of the workers of this process has cost since they began, as their meters were told.
    #[must_use]
    pub fn costs(&self) -> Costs {
        Costs {
            rest_ns: self.rest_ns.load(Relaxed),
            spent_ns: self.spent.bins(),
            part_spent_ns: self.spent.parts(),
            met: self.met.bins(),
            part_met: self.met.parts(),
        }
    }

    /// Counts for one F.
    pub(crate) fn counts(&self, bins: usize) -> Loads {
        Loads { counts: self.loads.of_worker(bins), turn: 0 }
    }

    /// Reads all counters; each is exact, together they are no snapshot.
    #[must_use]
    pub fn counters(&self) -> Counters {
        Counters {
            bins_owned: self.owned.load(Relaxed),
            bins_in: self.moved_in.load(Relaxed),
            bins_out: self.moved_out.load(Relaxed),
            bytes_in: self.bytes_in.load(Relaxed),
            bytes_out: self.bytes_out.load(Relaxed),
            records_applied: self.applied.load(Relaxed),
            records_ahead: self.ahead.load(Relaxed),
            records_routed: self.routed.load(Relaxed),
            records_routed_moving: self.routed_moving.load(Relaxed),
        }
    }

    pub(crate) fn record(&self, worker: usize, bin: u32, time: T, what: BinEvent, bytes: u64) {
        let routed = self.routed.load(Relaxed);
        let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        let at_ns = self.begun.elapsed().as_nanos() as u64;
        if log.entries.len() == LOG_ENTRIES {
            log.entries.pop_front();
        }
        log.entries.push_back(LogEntry { worker, bin, time, what, bytes, at_ns, routed });
        log.total += 1;
    }
}

impl<T: Clone> Stats<T> {
    /// The latest entries, oldest first.
    #[must_use]
    pub fn log(&self) -> Vec<LogEntry<T>> {
        self.log_since(0).0
    }

    /// The entries that are still kept of those recorded after the first `seen`, oldest first, and how many were ever
    /// recorded: pass that as `seen` the next time.
    #[must_use]
    pub fn log_since(&self, seen: usize) -> (Vec<LogEntry<T>>, usize) {
        let log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = log.entries.len().min(log.total.saturating_sub(seen));
        (log.entries.iter().skip(log.entries.len() - kept).cloned().collect(), log.total)
    }
}

impl<T> Default for Stats<T> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_forgets_the_oldest() {
        let stats = Stats::new();
        for i in 0..LOG_ENTRIES as u64 + 3 {
            stats.record(0, 1, i, BinEvent::State, 0);
        }
        let log = stats.log();
        assert_eq!((log.len(), log[0].time), (LOG_ENTRIES, 3));
        assert!(log.windows(2).all(|w| w[0].at_ns <= w[1].at_ns));
    }

    #[test]
    fn keys_that_come_in_turn_are_all_counted() {
        // 64 bins in turn: with one place of eight in all of a block it would be an eighth of the bins.
        let stats = Stats::<u64>::new();
        let mut loads = stats.counts(64);
        let hashes: Vec<u64> = (0..1_000).map(|row| row % 64).collect();
        for block in 0..16 {
            loads.count(&hashes, |hash| hash as u32);
            loads.count_parts(&stats, &hashes, |hash| 64 + hash as u32);
            let told = stats.loads().iter().filter(|count| **count > 0).count();
            assert!(told > 40, "{told} of 64 bins after block {block}");
        }
        let bins = stats.loads();
        let exact: Vec<u64> =
            (0..64).map(|bin| 16 * hashes.iter().filter(|hash| **hash == bin).count() as u64).collect();
        assert_eq!(bins, exact, "each record twice in sixteen blocks, and eight for one");
        let parts: Vec<u64> = stats.part_loads().into_values().collect();
        assert_eq!(parts, bins, "the same records are counted by part");
    }

    #[test]
    fn costs_of_parts_count_as_those_of_their_bins_and_the_rest_as_nobodys() {
        let stats = Arc::new(Stats::<u64>::new());
        let mut meters = [Meter::new(stats.clone(), 2), Meter::new(stats.clone(), 2)];
        let quarter = crate::parts::number_of(penstock_files::Range::new(0b1101, 4).unwrap(), 2).unwrap();
        meters[0].spend(Duration::from_nanos(100), &[(0, 30), (quarter, 40)]);
        meters[1].spend(Duration::from_nanos(50), &[(3, 20), (quarter, 40)]);
        meters[1].meet(&[1 << 62, 0b1101 << 60], Some(|hash: u64| if hash >> 62 == 3 { quarter } else { 1 }));
        let costs = stats.costs();
        assert_eq!(costs.rest_ns, 30, "more than all is no less than nothing");
        assert_eq!((costs.spent_ns, costs.part_spent_ns), (vec![30, 0, 0, 100], BTreeMap::from([(quarter, 80)])));
        assert_eq!((costs.met, costs.part_met), (vec![0, 8, 0, 8], BTreeMap::from([(quarter, 8)])));
        assert_eq!((whole(3, 2), whole(0, 0), whole(3, 0)), (3, 0, 0));
    }
}
