//! What sketches say of values, from the formulas: of all values at once, without their parts and their bytes.

use std::collections::BTreeMap;

use penstock_plan::{hash_bytes, hash_int};

use super::int;
use crate::common::Cell;

/// The estimate of Ertl ("New cardinality estimation algorithms for HyperLogLog sketches", 2017, algorithm 6) of how many distinct values there are,
/// of the fewest registers that are exact enough. The hashes of values are those of keys.
pub(super) fn distinct(values: &[&Cell], error: f64) -> i64 {
    let p = (4..=18).find(|p| 1.04 / f64::from(1 << p).sqrt() <= error).unwrap();
    let (m, q) = (f64::from(1 << p), 64 - p);
    let mut registers: BTreeMap<u64, u32> = BTreeMap::new();
    for value in values {
        let hash = match value {
            Cell::Text(text) => hash_bytes(text.as_bytes()),
            number => hash_int(int(number)),
        };
        // The place of the first bit that is set, of those that do not choose the register.
        let first = (1..=q).find(|at| hash >> (q - at) & 1 == 1).unwrap_or(q + 1);
        let register = registers.entry(hash >> q).or_default();
        *register = first.max(*register);
    }
    let count = |value: u32| registers.values().filter(|other| **other == value).count() as f64;
    let zeros = m - registers.len() as f64;
    let middle: f64 = (1..=q).map(|k| count(k) / 2_f64.powi(k as i32)).sum();
    let sum = m * sigma(zeros / m) + middle + m * tau(1.0 - count(q + 1) / m) / 2_f64.powi(q as i32);
    (m * m / (2.0 * std::f64::consts::LN_2) / sum).round() as i64
}

/// x + x^2 + 2 x^4 + 4 x^8 + ...
fn sigma(x: f64) -> f64 {
    if x == 1.0 {
        return f64::INFINITY;
    }
    x + (1..64).map(|k| x.powf(2_f64.powi(k)) * 2_f64.powi(k - 1)).sum::<f64>()
}

/// A third of 1 - x - (1 - x^(1/2))^2 / 2 - (1 - x^(1/4))^2 / 4 - ...
fn tau(x: f64) -> f64 {
    (1.0 - x - (1..64).map(|k| (1.0 - x.powf(2_f64.powi(-k))).powi(2) * 2_f64.powi(-k)).sum::<f64>()) / 3.0
}

/// The least value with a share of all at or below it, told as the middle of what has its power of two and some bits behind that, the fewest
/// that are exact enough.
pub(super) fn quantile(mut values: Vec<i64>, share: f64, error: f64) -> f64 {
    values.sort_unstable();
    // Shares of plans are of hundredths.
    let rank = ((share * 100.0).round() as usize * values.len()).div_ceil(100).max(1);
    let value = values[rank - 1];
    let parts = (0..=16).map(|digits| f64::from(1 << digits)).find(|parts| 0.5 / parts <= error).unwrap();
    if value == 0 {
        return 0.0;
    }
    let size = value.unsigned_abs() as f64;
    let power = 2_f64.powi(value.unsigned_abs().ilog2() as i32);
    let part = ((size / power - 1.0) * parts).floor();
    power * (1.0 + (part + 0.5) / parts) * value.signum() as f64
}
