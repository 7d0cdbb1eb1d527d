//! Radix partition of a block's rows by bin: once per block, then everything works bin by bin.
//!
//! Stable, so rows of one key keep their order. The hashes move along with the rows, so that what follows reads them in sequence; up to
//! 2^12 bins take one pass (measured: 2 ns a record), more of them two over half the bits each.

use std::ops::Range;

use crate::op::Bins;

/// The rows of a block grouped by a small integer, groups ascending; reuses its memory from block to block.
#[derive(Default)]
pub(crate) struct Partition {
    rows: Vec<u32>,
    runs: Vec<(u32, Range<usize>)>,
    starts: Vec<u32>,
}

/// The bin of a hash: its top `bits` bits.
#[inline]
pub(crate) fn bin_of(hash: u64, bits: u8) -> u32 {
    if bits == 0 { 0 } else { (hash >> (64 - u32::from(bits))) as u32 }
}

/// Above so many bits a pass over all counters costs more than a second pass over the rows.
const ONE_PASS_BITS: u8 = 12;

/// Rows of one bin that lie together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) bin: u32,
    /// Where in [`ByBin::hashes`] and [`ByBin::rows`].
    pub(crate) at: Range<usize>,
}

/// The rows of a block by bin, bins ascending; reuses its memory from block to block.
#[derive(Default)]
pub(crate) struct ByBin {
    sorted: Hashed,
    half: Hashed,
    runs: Vec<Run>,
    starts: Vec<u32>,
}

#[derive(Default)]
struct Hashed {
    hashes: Vec<u64>,
    rows: Vec<u32>,
}

impl Hashed {
    fn iter(&self) -> impl Iterator<Item = (u64, u32)> + Clone {
        // Where rows are not wanted there are none: their places are taken by zeros.
        self.hashes.iter().copied().zip(self.rows.iter().copied().chain(std::iter::repeat(0)))
    }

    /// Puts `items` in the order of the bits of their hash that `shift` and `mask` choose; equal ones stay in order.
    fn scatter(
        &mut self,
        items: impl Iterator<Item = (u64, u32)> + Clone,
        (shift, mask): (u32, usize),
        with_rows: bool,
        starts: &mut Vec<u32>,
    ) {
        let digit = |hash: u64| (hash >> shift) as usize & mask;
        starts.clear();
        starts.resize(mask + 1, 0);
        let mut len = 0;
        items.clone().for_each(|(hash, _)| {
            starts[digit(hash)] += 1;
            len += 1;
        });
        let mut start = 0;
        for count in starts.iter_mut() {
            start += std::mem::replace(count, start);
        }
        self.hashes.resize(len, 0);
        self.rows.resize(if with_rows { len } else { 0 }, 0);
        for (hash, row) in items {
            let at = &mut starts[digit(hash)];
            self.hashes[*at as usize] = hash;
            if with_rows {
                self.rows[*at as usize] = row;
            }
            *at += 1;
        }
    }
}

impl ByBin {
    /// Sorts all rows of a block; their numbers only when they are wanted.
    pub(crate) fn all(&mut self, hashes: &[u64], bits: u8, with_rows: bool) {
        self.sort(hashes.iter().copied().zip(0..), bits, with_rows);
    }

    /// Sorts some rows of a block, in their order.
    pub(crate) fn some(&mut self, hashes: &[u64], rows: &[u32], bits: u8) {
        self.sort(rows.iter().map(|&row| (hashes[row as usize], row)), bits, true);
    }

    /// Sorts rows with these hashes, in their order.
    pub(crate) fn these(&mut self, hashes: &[u64], rows: &[u32], bits: u8) {
        self.sort(hashes.iter().copied().zip(rows.iter().copied()), bits, true);
    }

    fn sort(&mut self, items: impl Iterator<Item = (u64, u32)> + Clone, bits: u8, with_rows: bool) {
        let Self { sorted, half, runs, starts } = self;
        // The top bits; a shift by all 64 is none, and then the mask is 0.
        let digits = |from: u8, to: u8| ((64 - u32::from(to)) % 64, (1_usize << (to - from)) - 1);
        if bits <= ONE_PASS_BITS {
            sorted.scatter(items, digits(0, bits), with_rows, starts);
        } else {
            half.scatter(items, digits(bits / 2, bits), with_rows, starts);
            sorted.scatter(half.iter(), digits(0, bits / 2), with_rows, starts);
        }
        runs.clear();
        let hashes = &sorted.hashes[..];
        let mut start = 0;
        while start < hashes.len() {
            let bin = bin_of(hashes[start], bits);
            let len = match bits <= ONE_PASS_BITS {
                true => starts[bin as usize] as usize - start,
                false => hashes[start..].iter().take_while(|&&hash| bin_of(hash, bits) == bin).count(),
            };
            runs.push(Run { bin, at: start..start + len });
            start += len;
        }
    }

    /// Divides the runs of bins that are split, by part; rows of one key keep their order. Where none is split it costs nothing.
    pub(crate) fn refine(&mut self, bins: &dyn Bins) {
        if !bins.is_split() {
            return;
        }
        let Self { sorted, runs, .. } = self;
        let mut refined = Vec::with_capacity(runs.len());
        for run in runs.drain(..) {
            if bins.holds(run.bin) {
                refined.push(run);
                continue;
            }
            let with_rows = !sorted.rows.is_empty();
            let row = |at: usize| if with_rows { sorted.rows[at] } else { 0 };
            let item = |at: usize| (bins.bin_of(sorted.hashes[at]), sorted.hashes[at], row(at));
            let mut items: Vec<(u32, u64, u32)> = run.at.clone().map(item).collect();
            items.sort_by_key(|(part, ..)| *part);
            for (at, (part, hash, row)) in run.at.zip(items) {
                sorted.hashes[at] = hash;
                if with_rows {
                    sorted.rows[at] = row;
                }
                match refined.last_mut() {
                    Some(Run { bin, at: last }) if *bin == part && last.end == at => last.end = at + 1,
                    _ => refined.push(Run { bin: part, at: at..at + 1 }),
                }
            }
        }
        *runs = refined;
    }

    /// The hashes, bin after bin.
    pub(crate) fn hashes(&self) -> &[u64] {
        &self.sorted.hashes
    }

    /// The rows, bin after bin; none when they were not wanted.
    pub(crate) fn rows(&self) -> &[u32] {
        &self.sorted.rows
    }

    /// The bins that have rows, ascending.
    pub(crate) fn runs(&self) -> &[Run] {
        &self.runs
    }
}

impl Partition {
    /// Groups `rows` by `group(row) < groups`.
    pub(crate) fn group(&mut self, rows: &[u32], groups: usize, group: impl Fn(u32) -> u32) {
        self.runs.clear();
        self.rows.clear();
        if groups > 4096.max(rows.len() * 4) {
            // Few rows in many groups: comparing is cheaper than a pass over all counters.
            self.rows.extend_from_slice(rows);
            self.rows.sort_by_key(|&row| group(row));
            for (at, &row) in self.rows.iter().enumerate() {
                match self.runs.last_mut() {
                    Some((last, run)) if *last == group(row) => run.end = at + 1,
                    _ => self.runs.push((group(row), at..at + 1)),
                }
            }
            return;
        }
        self.starts.clear();
        self.starts.resize(groups, 0);
        for &row in rows {
            self.starts[group(row) as usize] += 1;
        }
        let mut start = 0;
        for (at, count) in self.starts.iter_mut().enumerate() {
            let end = start + *count;
            if *count > 0 {
                self.runs.push((at as u32, start as usize..end as usize));
            }
            *count = start;
            start = end;
        }
        self.rows.resize(rows.len(), 0);
        for &row in rows {
            let at = &mut self.starts[group(row) as usize];
            self.rows[*at as usize] = row;
            *at += 1;
        }
    }

    /// All rows, group after group.
    pub(crate) fn rows(&self) -> &[u32] {
        &self.rows
    }

    /// The groups that have rows, ascending, each with its rows in their given order.
    pub(crate) fn runs(&self) -> impl Iterator<Item = (u32, &[u32])> {
        self.runs.iter().map(|(group, run)| (*group, &self.rows[run.clone()]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_group_stably() {
        let rows: Vec<u32> = (0..1_000).collect();
        let group = |row: u32| row.wrapping_mul(2_654_435_761) >> 24;
        for groups in [256, 1 << 20] {
            let mut partition = Partition::default();
            partition.group(&rows, groups, group);
            let mut seen = Vec::new();
            let mut last = None;
            for (of, run) in partition.runs() {
                assert!(last < Some(of));
                last = Some(of);
                assert!(run.is_sorted() && run.iter().all(|&row| group(row) == of));
                seen.extend_from_slice(run);
            }
            assert_eq!(seen, partition.rows());
            seen.sort_unstable();
            assert_eq!(seen, rows);
        }
    }

    #[test]
    fn hashes_and_rows_come_bin_by_bin_in_order() {
        let hashes: Vec<u64> = (0..3_000).map(|i| crate::hash::hash_int(i % 700)).collect();
        let odd: Vec<u32> = (0..3_000).filter(|row| row % 2 == 1).collect();
        let mut by_bin = ByBin::default();
        for bits in [0, 1, 8, 12, 13, 15, 20] {
            for (rows, with_rows) in [(None, true), (None, false), (Some(&odd), true)] {
                match rows {
                    None => by_bin.all(&hashes, bits, with_rows),
                    Some(rows) if bits % 2 == 0 => by_bin.some(&hashes, rows, bits),
                    Some(rows) => {
                        let some: Vec<u64> = rows.iter().map(|&row| hashes[row as usize]).collect();
                        by_bin.these(&some, rows, bits);
                    }
                }
                let mut expected: Vec<u32> = rows.cloned().unwrap_or_else(|| (0..3_000).collect());
                expected.sort_by_key(|&row| bin_of(hashes[row as usize], bits));
                assert_eq!(by_bin.rows(), if with_rows { &expected[..] } else { &[] });
                let sorted: Vec<u64> = expected.iter().map(|&row| hashes[row as usize]).collect();
                assert_eq!(by_bin.hashes(), sorted);
                let mut next = 0;
                for run in by_bin.runs() {
                    assert!(run.at.start == next && !run.at.is_empty());
                    assert!(sorted[run.at.clone()].iter().all(|&hash| bin_of(hash, bits) == run.bin));
                    next = run.at.end;
                }
                assert_eq!(next, sorted.len());
                assert!(by_bin.runs().windows(2).all(|pair| pair[0].bin < pair[1].bin));
            }
        }
    }

    #[test]
    fn zero_bits_is_one_bin() {
        assert_eq!(bin_of(u64::MAX, 0), 0);
        assert_eq!(bin_of(u64::MAX, 20), (1 << 20) - 1);
        assert_eq!(bin_of(1 << 63, 1), 1);
    }
}
