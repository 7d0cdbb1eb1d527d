//! Quantiles, about: how many values there are in buckets whose widths grow with the values (DDSketch, Masson et al., VLDB 2019, with the
//! buckets that the bits of a float give, instead of logarithms: so they are equal on every machine).
//!
//! With d digits the buckets of a power of two are 2^d of one width; a value is told as the middle of its bucket, which is off by at most 2^-(d+1) of
//! it. There is a bucket for each sign, exponent and d bits of the mantissa, so values of any size keep that error and buckets are never
//! collapsed: values over ten orders of magnitude take some 34 * 2^d of them. Numbers below 2^-1022 count as 0, infinities and NaN (above all numbers) are buckets of their own.
//!
//! Entries of 12 bytes, `bucket: i32, values: u64`, little-endian, ascending by bucket. To add a bucket moves those above it, so what is added
//! comes many buckets at a time: what is there is counted where it stands ([`count`]), and the rest is gathered ([`Fresh`]) and merged at once.

use std::cmp::Ordering;

use crate::acc::Blobs;

pub(crate) const MOST: u8 = 16;
const ENTRY: usize = 12;
const NAN: i32 = i32::MAX;
/// Of one with so many times as many entries those between others are moved as they stand, and none is looked at.
const FEW: usize = 8;

/// The fewest digits whose error is at most this; `None` if those are too many.
pub(crate) fn digits_for(error: f64) -> Option<u8> {
    (0..=MOST).find(|&digits| error_of(digits) <= error)
}

/// The greatest relative error.
pub(crate) fn error_of(digits: u8) -> f64 {
    0.5 / f64::from(1_u32 << digits)
}

pub(crate) fn bucket_of(value: f64, digits: u8) -> i32 {
    if value.is_nan() {
        return NAN;
    }
    if value.abs() < f64::MIN_POSITIVE {
        return 0;
    }
    // At most 11 + 16 bits, and 1 at least: 0 is that of the numbers below.
    let size = (value.abs().to_bits() >> (52 - digits)) as i32;
    if value < 0.0 { -size } else { size }
}

/// The middle of a bucket.
fn middle(bucket: i32, digits: u8) -> f64 {
    if bucket == NAN {
        return f64::NAN;
    }
    let bits = u64::from(bucket.unsigned_abs()) << (52 - digits);
    let size = match f64::from_bits(bits) {
        size if bits == 0 || size.is_infinite() => size,
        _ => f64::from_bits(bits | 1 << (51 - digits)),
    };
    if bucket < 0 { -size } else { size }
}

fn bucket(entry: &[u8]) -> i32 {
    i32::from_le_bytes(entry[..4].try_into().expect("four bytes"))
}

fn values(entry: &[u8]) -> u64 {
    u64::from_le_bytes(entry[4..ENTRY].try_into().expect("eight bytes"))
}

/// A histogram of sorted buckets, one for each value.
fn of(sorted: impl Iterator<Item = i32>) -> Vec<u8> {
    let mut entries = Vec::new();
    for to in sorted {
        let last = entries.len().saturating_sub(ENTRY);
        if entries.is_empty() || bucket(&entries[last..]) != to {
            put(&mut entries, &to.to_le_bytes(), 1);
        } else {
            raise(&mut entries[last..], 1);
        }
    }
    entries
}

/// Counts a value more in its bucket; says whether there is such a bucket.
pub(crate) fn count(histogram: &mut [u8], to: i32) -> bool {
    find(histogram, to).map(|at| raise(&mut histogram[at..], 1)).is_ok()
}

/// Adds all of another. Cost: both, read once, or less where the other one has little.
pub(crate) fn merge(histogram: &mut Box<[u8]>, other: &[u8]) {
    if other.len() < histogram.len() / FEW {
        let mut left = Vec::new();
        for entry in other.chunks_exact(ENTRY) {
            match find(histogram, bucket(entry)) {
                Ok(at) => raise(&mut histogram[at..], values(entry)),
                Err(at) => left.push((at, entry)),
            }
        }
        return squeeze(histogram, &left);
    }
    let mut entries = Vec::with_capacity(histogram.len().max(other.len()));
    let (mut ours, mut theirs) = (histogram.chunks_exact(ENTRY).peekable(), other.chunks_exact(ENTRY).peekable());
    loop {
        let next = match (ours.peek(), theirs.peek()) {
            (Some(one), Some(other)) => bucket(one).cmp(&bucket(other)),
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (None, None) => break,
        };
        let one = ours.next_if(|_| next.is_le());
        let other = theirs.next_if(|_| next.is_ge());
        let sum = one.map_or(0, values).saturating_add(other.map_or(0, values));
        put(&mut entries, &one.or(other).expect("one of them is next")[..4], sum);
    }
    #[cfg(test)]
    tests::moved(entries.len());
    *histogram = entries.into();
}

/// Puts entries where they belong, ascending: none of their buckets is there. What stands above them moves once.
fn squeeze(histogram: &mut Box<[u8]>, new: &[(usize, &[u8])]) {
    if new.is_empty() {
        return;
    }
    let mut entries = std::mem::take(histogram).into_vec();
    let mut end = entries.len();
    entries.reserve_exact(new.len() * ENTRY);
    entries.resize(end + new.len() * ENTRY, 0);
    #[cfg(test)]
    tests::moved(entries.len());
    for (number, &(at, entry)) in new.iter().enumerate().rev() {
        let place = at + number * ENTRY;
        entries.copy_within(at..end, place + ENTRY);
        entries[place..place + ENTRY].copy_from_slice(entry);
        end = at;
    }
    *histogram = entries.into();
}

/// Where the entry of a bucket begins, or would.
fn find(histogram: &[u8], to: i32) -> Result<usize, usize> {
    let (mut low, mut high) = (0, histogram.len() / ENTRY);
    while low < high {
        let middle = (low + high) / 2;
        if bucket(&histogram[middle * ENTRY..]) < to { low = middle + 1 } else { high = middle }
    }
    let at = low * ENTRY;
    let is_there = histogram.get(at..at + ENTRY).is_some_and(|entry| bucket(entry) == to);
    if is_there { Ok(at) } else { Err(at) }
}

fn raise(entry: &mut [u8], more: u64) {
    let sum = values(entry).saturating_add(more);
    entry[4..ENTRY].copy_from_slice(&sum.to_le_bytes());
}

fn put(entries: &mut Vec<u8>, bucket: &[u8], values: u64) {
    entries.extend_from_slice(bucket);
    entries.extend_from_slice(&values.to_le_bytes());
}

/// Values of one table whose buckets their histograms do not have yet: to add a bucket costs the histogram, so they come together.
#[derive(Default)]
pub(crate) struct Fresh {
    /// The words that name the histograms, and buckets, some of them several times.
    buckets: Vec<(u64, i32)>,
    /// From so many on they are added, a share of what the histograms have: so what is moved for them is some times what is added.
    most: usize,
    /// So many rows of the table are still to come; behind the last one all are added.
    left: usize,
}

impl Fresh {
    const LEAST: usize = 256;
    const SHARE: usize = 4;

    /// So many rows of a table follow.
    pub(crate) fn begin(&mut self, rows: usize) {
        self.left = rows;
    }

    /// So many of them have come.
    pub(crate) fn pass(&mut self, rows: usize, blobs: &mut Blobs) {
        self.left = self.left.saturating_sub(rows);
        if self.left == 0 {
            self.settle(blobs);
        }
    }

    /// Keeps a value for the histogram that `word` names.
    pub(crate) fn push(&mut self, word: u64, bucket: i32, blobs: &mut Blobs) {
        self.buckets.push((word, bucket));
        if self.buckets.len() >= self.most.max(Self::LEAST) {
            self.most = self.settle(blobs) / Self::SHARE;
        }
    }

    /// Adds them; how many buckets those histograms have now.
    fn settle(&mut self, blobs: &mut Blobs) -> usize {
        self.buckets.sort_unstable();
        let of_each = self.buckets.chunk_by(|one, next| one.0 == next.0).map(|buckets| {
            let mut word = buckets[0].0;
            let more = of(buckets.iter().map(|&(_, bucket)| bucket));
            blobs.edit(&mut word, |found| {
                merge(found, &more);
                found.len() / ENTRY
            })
        });
        let have = of_each.sum();
        self.buckets.clear();
        have
    }
}

/// Whether these bytes are a histogram.
pub(crate) fn is_sound(histogram: &[u8], digits: u8) -> bool {
    let infinite = bucket_of(f64::INFINITY, digits);
    let entries = || histogram.chunks_exact(ENTRY);
    let least = bucket_of(f64::MIN_POSITIVE, digits);
    let is_bucket = |bucket: i32| bucket == 0 || bucket == NAN || (least..=infinite).contains(&bucket.saturating_abs());
    histogram.len().is_multiple_of(ENTRY)
        && entries().all(|entry| is_bucket(bucket(entry)) && values(entry) > 0)
        && entries().map(bucket).is_sorted_by(|a, b| a < b)
}

/// The value with at least a share `q` of all values at or below it, about; the least one for 0. NaN of none.
pub(crate) fn quantile(histogram: &[u8], q: f64, digits: u8) -> f64 {
    let entries = || histogram.chunks_exact(ENTRY);
    let all = entries().fold(0_u64, |sum, entry| sum.saturating_add(values(entry)));
    let rank = rank(q, all);
    let mut below = 0_u64;
    for entry in entries() {
        below = below.saturating_add(values(entry));
        if below >= rank {
            return middle(bucket(entry), digits);
        }
    }
    f64::NAN
}

/// The least number of values that is at least a share `q` of `all`. The product is rounded: 0.07 of 100 would be eight.
fn rank(q: f64, all: u64) -> u64 {
    let rank = ((q * all as f64).ceil() as u64).clamp(1, all.max(1));
    if rank > 1 && (rank - 1) as f64 / all as f64 >= q { rank - 1 } else { rank }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::cell::Cell;

    use proptest::prelude::*;

    use super::*;

    thread_local! {
        static MOVED: Cell<usize> = const { Cell::new(0) };
    }

    pub(super) fn moved(bytes: usize) {
        MOVED.set(MOVED.get() + bytes / ENTRY);
    }

    /// The entries that were moved in this thread to make room for others.
    pub(crate) fn entries_moved() -> usize {
        MOVED.take()
    }

    /// The twin: one value after the other.
    fn of(values: &[f64], digits: u8) -> Box<[u8]> {
        let mut histogram: Box<[u8]> = Box::default();
        for bucket in values.iter().map(|&value| bucket_of(value, digits)) {
            if !count(&mut histogram, bucket) {
                let mut entries = histogram.into_vec();
                let at = find(&entries, bucket).unwrap_err();
                entries.splice(at..at, bucket.to_le_bytes().into_iter().chain(1_u64.to_le_bytes()));
                histogram = entries.into();
            }
        }
        histogram
    }

    proptest! {
        #[test]
        fn many_at_a_time_is_one_after_the_other(
            values in prop::collection::vec(-1e3..1e3, 0..2_000), cuts in prop::collection::vec(0usize..2_000, 0..9), digits in 0u8..=MOST,
        ) {
            let mut histogram: Box<[u8]> = Box::default();
            let mut cuts = [cuts, vec![0, values.len()]].concat();
            cuts.iter_mut().for_each(|cut| *cut = (*cut).min(values.len()));
            cuts.sort_unstable();
            for part in cuts.windows(2).map(|ends| &values[ends[0]..ends[1]]) {
                let mut buckets: Vec<i32> = part.iter().map(|&value| bucket_of(value, digits)).collect();
                buckets.sort_unstable();
                merge(&mut histogram, &super::of(buckets.into_iter()));
            }
            prop_assert_eq!(histogram, of(&values, digits));
        }
    }

    #[test]
    fn few_are_squeezed_in_among_many() {
        let many: Vec<f64> = (1..=1_000).map(|number| f64::from(number * 4)).collect();
        // Below, above, between, twice between the same ones, and one that is there.
        let few = [-1.0, 1.0, 2_001.0, 2_002.0, 2_004.0, 3_999.0, 5_000.0];
        let mut histogram = of(&many, MOST);
        entries_moved();
        merge(&mut histogram, &of(&few, MOST));
        assert_eq!(histogram, of(&[&many[..], &few].concat(), MOST));
        assert_eq!(entries_moved(), 1_006, "once for all");
        merge(&mut histogram, &of(&few, MOST));
        assert_eq!(entries_moved(), 0, "those that are there are counted where they stand");
    }

    #[test]
    fn a_rank_is_the_least_that_is_enough() {
        for all in [1_u64, 7, 100, 180, 200, 1_000] {
            for percent in 0..=100 {
                let enough = (percent * all).div_ceil(100).max(1);
                assert_eq!(rank(percent as f64 / 100.0, all), enough, "{percent} % of {all}");
            }
        }
        let values = [vec![1.0; 7], vec![1_000.0; 93]].concat();
        assert!(quantile(&of(&values, MOST), 0.07, MOST) < 1.1);
    }

    proptest! {
        #[test]
        fn quantiles_are_within_their_error(
            mut values in prop::collection::vec(prop_oneof![
                -1e3..1e3, -1e300..1e300, -1e-300..1e-300, Just(0.0), Just(f64::INFINITY), Just(f64::NAN), (-9i32..9).prop_map(f64::from),
            ], 1..200),
            q in prop_oneof![0.0..1.0_f64, Just(0.0), Just(0.5), Just(1.0)], digits in 0u8..=MOST,
        ) {
            let histogram = of(&values, digits);
            prop_assert!(is_sound(&histogram, digits));
            let cut = values.len() / 3;
            let mut merged = of(&values[cut..], digits);
            merge(&mut merged, &of(&values[..cut], digits));
            prop_assert_eq!(&merged, &histogram, "order and parts make no difference");
            values.sort_by(|a, b| a.is_nan().cmp(&b.is_nan()).then(a.total_cmp(b)));
            let share = |rank: &usize| *rank as f64 / values.len() as f64 >= q;
            let rank = (1..=values.len()).find(share).unwrap();
            let (exact, found) = (values[rank - 1], quantile(&histogram, q, digits));
            let equal = exact == found || exact.is_nan() && found.is_nan() || found == 0.0 && exact.abs() < f64::MIN_POSITIVE;
            prop_assert!(equal || (found - exact).abs() <= error_of(digits) * exact.abs(), "{} for {}", found, exact);
        }
    }

    #[test]
    fn bounds_of_errors() {
        assert_eq!((digits_for(0.01), digits_for(0.5), digits_for(1e-6)), (Some(6), Some(0), None));
        assert!(quantile(&[], 0.5, 6).is_nan());
        assert_eq!(quantile(&of(&[f64::MAX, f64::MIN], 3), 0.0, 3), middle(bucket_of(f64::MIN, 3), 3));
        assert!(!is_sound(&[0; 11], 6) && !is_sound(&[0; 12], 6) && is_sound(&[], 6));
    }
}
