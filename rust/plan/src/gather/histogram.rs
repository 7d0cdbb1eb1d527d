//! Quantiles, about: how many values there are in buckets whose widths grow with the values (DDSketch, Masson et al., VLDB 2019, with the
//! buckets that the bits of a float give, instead of logarithms: so they are equal on every machine).
//!
//! With d digits the buckets of a power of two are 2^d of one width; a value is told as the middle of its bucket, which is off by at most 2^-(d+1) of
//! it. There is a bucket for each sign, exponent and d bits of the mantissa, so values of any size keep that error and buckets are never
//! collapsed: values over ten orders of magnitude take some 34 * 2^d of them. Numbers below 2^-1022 count as 0, infinities and NaN (above all numbers) are buckets of their own.
//!
//! Entries of 12 bytes, `bucket: i32, values: u64`, little-endian, ascending by bucket.

use std::cmp::Ordering;

pub(crate) const MOST: u8 = 16;
const ENTRY: usize = 12;
const NAN: i32 = i32::MAX;
/// Of one with so many times as many entries all are not copied to add others.
const FEW: usize = 64;

/// The fewest digits whose error is at most this; `None` if those are too many.
pub(crate) fn digits_for(error: f64) -> Option<u8> {
    (0..=MOST).find(|&digits| error_of(digits) <= error)
}

/// The greatest relative error.
pub(crate) fn error_of(digits: u8) -> f64 {
    0.5 / f64::from(1_u32 << digits)
}

fn bucket_of(value: f64, digits: u8) -> i32 {
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

/// Adds a value.
pub(crate) fn insert(histogram: &mut Box<[u8]>, value: f64, digits: u8) {
    add(histogram, bucket_of(value, digits), 1);
}

/// Adds all of another. Cost: both, read once, or less where the other one has little.
pub(crate) fn merge(histogram: &mut Box<[u8]>, other: &[u8]) {
    if other.len() < histogram.len() / FEW {
        return other.chunks_exact(ENTRY).for_each(|entry| add(histogram, bucket(entry), values(entry)));
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
        entries.extend_from_slice(&one.or(other).expect("one of them is next")[..4]);
        entries.extend_from_slice(&sum.to_le_bytes());
    }
    *histogram = entries.into();
}

fn add(histogram: &mut Box<[u8]>, to: i32, more: u64) {
    let (mut low, mut high) = (0, histogram.len() / ENTRY);
    while low < high {
        let middle = (low + high) / 2;
        if bucket(&histogram[middle * ENTRY..]) < to { low = middle + 1 } else { high = middle }
    }
    let at = low * ENTRY;
    if histogram.get(at..at + ENTRY).is_some_and(|entry| bucket(entry) == to) {
        let sum = values(&histogram[at..]).saturating_add(more);
        histogram[at + 4..at + ENTRY].copy_from_slice(&sum.to_le_bytes());
        return;
    }
    let mut entries = std::mem::take(histogram).into_vec();
    entries.splice(at..at, to.to_le_bytes().into_iter().chain(more.to_le_bytes()));
    *histogram = entries.into();
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
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(values: &[f64], digits: u8) -> Box<[u8]> {
        let mut histogram = Box::default();
        values.iter().for_each(|&value| insert(&mut histogram, value, digits));
        histogram
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
