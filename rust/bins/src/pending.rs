//! Post-dated records, kept per bin so that they move with it.
//!
//! Every bin has an ordered map time → records; an index holds each bin's least time. Push and pop cost the logarithm
//! of the number of times; taking a bin costs the records of that bin and nothing else.
//!
//! Invariant: the index holds exactly one entry, the least time, for every bin that has records.
//!
//! Source: Megaphone §4.3 (extended notificator, a priority queue of (time, key, val)); M-11. Departure: two levels instead of
//! one queue, since uninstalling one bin of many must not search all of them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Bound::{Excluded, Unbounded};

/// Records that wait for their time.
#[derive(Debug)]
pub struct Pending<T, P> {
    bins: HashMap<u32, BTreeMap<T, Vec<P>>>,
    least: BTreeSet<(T, u32)>,
    len: usize,
}

impl<T, P> Default for Pending<T, P> {
    fn default() -> Self {
        Self { bins: HashMap::new(), least: BTreeSet::new(), len: 0 }
    }
}

impl<T: Ord + Clone, P> Pending<T, P> {
    /// Adds a record of `bin` for `time`.
    pub fn push(&mut self, bin: u32, time: T, record: P) {
        let times = self.bins.entry(bin).or_default();
        let before = times.first_key_value().map(|(least, _)| least);
        if before.is_none_or(|least| time < *least) {
            if let Some(least) = before {
                self.least.remove(&(least.clone(), bin));
            }
            self.least.insert((time.clone(), bin));
        }
        times.entry(time).or_default().push(record);
        self.len += 1;
    }

    /// The least time at which a record waits.
    #[must_use]
    pub fn least(&self) -> Option<&T> {
        self.least.first().map(|(time, _)| time)
    }

    /// Number of records.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True when nothing waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Takes all records due at or before `now`, in (time, bin, insertion) order.
    pub fn take_due(&mut self, now: &T) -> Vec<(u32, P)> {
        self.take_due_of(now, |_| true)
    }

    /// The least time at which a record of one of these bins waits. Cost: the bins before it.
    pub(crate) fn least_of(&self, open: impl Fn(u32) -> bool) -> Option<&T> {
        self.least.iter().find(|(_, bin)| open(*bin)).map(|(time, _)| time)
    }

    /// Takes what is due of these bins, as [`take_due`](Self::take_due) does of all.
    pub(crate) fn take_due_of(&mut self, now: &T, open: impl Fn(u32) -> bool) -> Vec<(u32, P)> {
        let mut due = Vec::new();
        // What is put back is later than what is taken, so it is met on the way, and bins that are not open once.
        let mut at = Unbounded;
        let is_due = |entry: &&(T, u32)| entry.0 <= *now;
        while let Some((time, bin)) =
            self.least.range((at, Unbounded)).take_while(is_due).find(|(_, bin)| open(*bin)).cloned()
        {
            self.least.remove(&(time.clone(), bin));
            if let Some(times) = self.bins.get_mut(&bin) {
                if let Some((_, records)) = times.pop_first() {
                    due.extend(records.into_iter().map(|record| (bin, record)));
                }
                match times.first_key_value() {
                    Some((next, _)) => _ = self.least.insert((next.clone(), bin)),
                    None => _ = self.bins.remove(&bin),
                }
            }
            at = Excluded((time, bin));
        }
        self.len -= due.len();
        due
    }

    /// Takes all records of one bin, in (time, insertion) order.
    pub fn take_bin(&mut self, bin: u32) -> Vec<(T, P)> {
        let times = self.bins.remove(&bin).unwrap_or_default();
        if let Some((least, _)) = times.first_key_value() {
            self.least.remove(&(least.clone(), bin));
        }
        let mut records = Vec::new();
        for (time, list) in times {
            records.extend(list.into_iter().map(|record| (time.clone(), record)));
        }
        self.len -= records.len();
        records
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Clone, Debug)]
    enum Deed {
        Push(u32, u8),
        Due(u8),
        Bin(u32),
    }

    fn deed() -> impl Strategy<Value = Deed> {
        prop_oneof![
            5 => (0u32..4, any::<u8>()).prop_map(|(b, t)| Deed::Push(b, t)),
            1 => any::<u8>().prop_map(Deed::Due),
            1 => (0u32..4).prop_map(Deed::Bin),
        ]
    }

    proptest! {
        #[test]
        fn equals_a_sorted_list(deeds in prop::collection::vec(deed(), 0..200)) {
            let mut pending = Pending::default();
            let mut list: Vec<(u8, u32, usize)> = Vec::new();
            for (i, deed) in deeds.into_iter().enumerate() {
                match deed {
                    Deed::Push(bin, time) => {
                        pending.push(bin, time, i);
                        list.push((time, bin, i));
                        list.sort_unstable();
                    }
                    Deed::Due(now) => {
                        let expected: Vec<_> = list.iter().filter(|e| e.0 <= now).map(|e| (e.1, e.2)).collect();
                        list.retain(|e| e.0 > now);
                        prop_assert_eq!(pending.take_due(&now), expected);
                    }
                    Deed::Bin(bin) => {
                        let expected: Vec<_> = list.iter().filter(|e| e.1 == bin).map(|e| (e.0, e.2)).collect();
                        list.retain(|e| e.1 != bin);
                        prop_assert_eq!(pending.take_bin(bin), expected);
                    }
                }
                prop_assert_eq!(pending.len(), list.len());
                prop_assert_eq!(pending.is_empty(), list.is_empty());
                prop_assert_eq!(pending.least(), list.first().map(|e| &e.0));
            }
        }
    }

    #[test]
    fn a_million_pending() {
        const N: u64 = 1_000_000;
        let mut pending = Pending::default();
        for i in 0..N {
            let scattered = i.wrapping_mul(0x9E37_79B9_7F4A_7C15);
            pending.push((scattered >> 54) as u32, scattered % N, i);
        }
        assert_eq!(pending.len(), N as usize);
        let moved = pending.take_bin(17);
        assert!(moved.windows(2).all(|w| w[0].0 <= w[1].0));
        let mut seen = moved.len();
        let mut last = None;
        while let Some(least) = pending.least().copied() {
            assert!(last < Some(least));
            last = Some(least);
            let due = pending.take_due(&least);
            assert!(!due.is_empty() && due.iter().all(|(bin, _)| *bin != 17));
            seen += due.len();
        }
        assert_eq!(seen, N as usize);
    }
}
