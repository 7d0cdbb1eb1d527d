//! Counters of one operator, shared by the workers of a process, and the log of its migrations.
//!
//! Counters are relaxed atomics, touched once per block or per bin, never per record. The log keeps the latest
//! [`LOG_ENTRIES`] entries for the timeline and for tests.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

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
    /// Of each F in this process.
    loads: Mutex<Vec<Arc<[AtomicU64]>>>,
    /// Of the parts of bins that are split, all F of this process together.
    part_loads: Mutex<BTreeMap<u32, u64>>,
}

/// Of so many records of a block one is counted, for all of them.
const SAMPLE: usize = 8;

/// How many records each bin gets, as one F sees them pass: one of eight, beginning at another one in each block, so that every record is
/// as likely to count. A bin's count is right but for the square root of it, times three.
///
/// Cost: a read of a hash and an addition to a line of its own worker, for an eighth of them: 0.07 ns a record with 2^8 bins, 0.14 with 2^16.
#[derive(Debug)]
pub(crate) struct Loads {
    counts: Arc<[AtomicU64]>,
    turn: usize,
}

impl Loads {
    /// Counts a block's records.
    pub(crate) fn count(&mut self, hashes: &[u64], bin: impl Fn(u64) -> u32) {
        self.turn = (self.turn + 3) % SAMPLE;
        for &hash in hashes.iter().skip(self.turn).step_by(SAMPLE) {
            // Nobody else writes here, so no locked addition.
            let count = &self.counts[bin(hash) as usize];
            count.store(count.load(Relaxed) + SAMPLE as u64, Relaxed);
        }
    }

    /// Counts the same records of the block that was counted last by their parts, where those are of bins that are split.
    pub(crate) fn count_parts<T>(&self, stats: &Stats<T>, hashes: &[u64], part: impl Fn(u64) -> u32) {
        let parts = hashes.iter().skip(self.turn).step_by(SAMPLE).map(|&hash| part(hash));
        let mut loads = stats.part_loads.lock().unwrap_or_else(PoisonError::into_inner);
        for part in parts.filter(|part| *part as usize >= self.counts.len()) {
            *loads.entry(part).or_default() += SAMPLE as u64;
        }
    }
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
            loads: Mutex::default(),
            part_loads: Mutex::default(),
        }
    }

    /// Records of each bin that the workers of this process have routed since they began, wherever the bin is; by sample, see `Loads`.
    #[must_use]
    pub fn loads(&self) -> Vec<u64> {
        let known = self.loads.lock().unwrap_or_else(PoisonError::into_inner);
        let bins = known.iter().map(|counts| counts.len()).max().unwrap_or(0);
        (0..bins)
            .map(|bin| known.iter().filter_map(|counts| counts.get(bin)).map(|count| count.load(Relaxed)).sum())
            .collect()
    }

    /// Records that the workers of this process have routed by the part that they fell into then, by sample; they count as those of the
    /// bin, too. What parts had stays when they are split or merged.
    #[must_use]
    pub fn part_loads(&self) -> BTreeMap<u32, u64> {
        self.part_loads.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Counts for one F.
    pub(crate) fn counts(&self, bins: usize) -> Loads {
        let counts: Arc<[AtomicU64]> = (0..bins).map(|_| AtomicU64::new(0)).collect();
        self.loads.lock().unwrap_or_else(PoisonError::into_inner).push(counts.clone());
        Loads { counts, turn: 0 }
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
}
