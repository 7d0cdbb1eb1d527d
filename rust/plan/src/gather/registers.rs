//! How many distinct values there are, about: registers of HyperLogLog with the estimator of Ertl ("New cardinality estimation algorithms
//! for HyperLogLog sketches", 2017, algorithm 6), which needs no tables of corrections and is as good for few values as for many.
//!
//! 2^p registers, p from 4 to 18; a hash goes to the register of its top p bits and counts the leading zeros of the others, plus 1. The standard
//! error is 1.04 / sqrt(2^p). While fewer than a quarter of them are taken the bytes are a sorted list of `register << 8 | value`,
//! little-endian words of 4 bytes; from then on a byte per register.

use super::{set_word, word};

pub(crate) const LEAST: u8 = 4;
pub(crate) const MOST: u8 = 18;

/// The fewest bits whose standard error is at most this; `None` if those are too many.
pub(crate) fn bits_for(error: f64) -> Option<u8> {
    (LEAST..=MOST).find(|&p| 1.04 / f64::from(1_u32 << p).sqrt() <= error)
}

fn is_list(registers: &[u8], p: u8) -> bool {
    registers.len() < 1 << p
}

/// Adds the hash of a value.
pub(crate) fn insert(registers: &mut Box<[u8]>, hash: u64, p: u8) {
    let register = (hash >> (64 - p)) as u32;
    let value = ((hash << p).leading_zeros().min(64 - u32::from(p)) + 1) as u8;
    raise(registers, register, value, p);
}

fn raise(registers: &mut Box<[u8]>, register: u32, value: u8, p: u8) {
    if !is_list(registers, p) {
        let at = &mut registers[register as usize];
        *at = value.max(*at);
        return;
    }
    let count = registers.len() / 4;
    let (mut low, mut high) = (0, count);
    while low < high {
        let middle = (low + high) / 2;
        if word(registers, middle * 4) >> 8 < register { low = middle + 1 } else { high = middle }
    }
    let entry = register << 8 | u32::from(value);
    if low < count && word(registers, low * 4) >> 8 == register {
        let entry = entry.max(word(registers, low * 4));
        set_word(registers, low * 4, entry);
        return;
    }
    let mut list = std::mem::take(registers).into_vec();
    if (list.len() + 4) < 1 << p {
        list.splice(low * 4..low * 4, entry.to_le_bytes());
        *registers = list.into();
        return;
    }
    *registers = vec![0; 1 << p].into();
    list.chunks_exact(4).for_each(|entry| registers[(word(entry, 0) >> 8) as usize] = entry[0]);
    registers[register as usize] = value;
}

/// Adds all of others.
pub(crate) fn merge(registers: &mut Box<[u8]>, others: &[u8], p: u8) {
    if is_list(others, p) {
        others.chunks_exact(4).for_each(|entry| raise(registers, word(entry, 0) >> 8, entry[0], p));
    } else {
        (0..).zip(others).filter(|(_, value)| **value > 0).for_each(|(at, &value)| raise(registers, at, value, p));
    }
}

/// Whether these bytes are registers.
pub(crate) fn is_sound(registers: &[u8], p: u8) -> bool {
    let most = 64 - p + 1;
    if !is_list(registers, p) {
        return registers.len() == 1 << p && registers.iter().all(|value| *value <= most);
    }
    let entries: Vec<u32> = registers.chunks_exact(4).map(|entry| word(entry, 0)).collect();
    registers.len().is_multiple_of(4)
        && entries.iter().all(|entry| entry >> 8 < 1 << p && (1..=most).contains(&(*entry as u8)))
        && entries.is_sorted_by(|a, b| a >> 8 < b >> 8)
}

/// How many distinct hashes there were, about.
pub(crate) fn estimate(registers: &[u8], p: u8) -> u64 {
    let (m, most) = (1_u32 << p, usize::from(64 - p));
    // How many registers have each value.
    let mut counts = [0_u32; 66];
    if is_list(registers, p) {
        registers.chunks_exact(4).for_each(|entry| counts[usize::from(entry[0])] += 1);
        counts[0] = m - (registers.len() / 4) as u32;
    } else {
        registers.iter().for_each(|value| counts[usize::from(*value)] += 1);
    }
    let m = f64::from(m);
    let mut z = m * tau(1.0 - f64::from(counts[most + 1]) / m);
    for value in (1..=most).rev() {
        z = 0.5 * (z + f64::from(counts[value]));
    }
    z += m * sigma(f64::from(counts[0]) / m);
    (m * m / (2.0 * std::f64::consts::LN_2) / z).round() as u64
}

fn sigma(mut x: f64) -> f64 {
    if x == 1.0 {
        return f64::INFINITY;
    }
    let (mut y, mut z) = (1.0, x);
    loop {
        x *= x;
        let before = z;
        z += x * y;
        y += y;
        if z == before {
            return z;
        }
    }
}

fn tau(mut x: f64) -> f64 {
    if x == 0.0 || x == 1.0 {
        return 0.0;
    }
    let (mut y, mut z) = (1.0, 1.0 - x);
    loop {
        x = x.sqrt();
        let before = z;
        y *= 0.5;
        z -= (1.0 - x) * (1.0 - x) * y;
        if z == before {
            return z / 3.0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::hash_int;

    fn of(values: impl Iterator<Item = i64>, p: u8) -> Box<[u8]> {
        let mut registers = Box::default();
        values.for_each(|value| insert(&mut registers, hash_int(value), p));
        registers
    }

    /// Root mean square of the relative error over many sets, beside the one that is stated.
    #[test]
    fn the_error_is_as_stated() {
        for p in [4, 9, 12] {
            let stated = 1.04 / f64::from(1_u32 << p).sqrt();
            for count in [1_i64, 10, 100, 1_000, 30_000] {
                let sets = if count < 30_000 { 200 } else { 40 };
                let squares = (0..sets).map(|set: i64| {
                    let from = set * 1_000_003;
                    let found = estimate(&of(from..from + count, p), p);
                    (found as f64 / count as f64 - 1.0).powi(2)
                });
                let error = (squares.sum::<f64>() / sets as f64).sqrt();
                assert!(error <= 1.3 * stated, "2^{p} registers, {count} values: {error} of {stated}");
            }
        }
    }

    #[test]
    fn order_and_parts_make_no_difference() {
        for count in [0, 3, 60, 500, 5_000] {
            for p in [4, 8, 11] {
                let all = of(0..count, p);
                assert_eq!(all, of((0..count).rev(), p));
                let mut merged = of(0..count / 2, p);
                merge(&mut merged, &of(count / 3..count, p), p);
                assert_eq!(all, merged);
                assert!(is_sound(&all, p) && is_sound(&merged, p));
            }
        }
        assert_eq!(estimate(&[], 12), 0);
        assert_eq!(estimate(&vec![64 - 12 + 1; 1 << 12], 12), u64::MAX);
        assert_eq!((bits_for(0.02), bits_for(0.26), bits_for(0.002)), (Some(12), Some(4), None));
    }
}
