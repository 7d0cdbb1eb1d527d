//! Target owners, by number of bins or by load, with few moves.
//!
//! Finding the fewest moves to a tolerance is as hard as bin packing. [`evened`] is greedy: of the most loaded worker it takes the bin that
//! evens it out best with the least loaded one, so large bins first; where no single bin helps, two change places.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use crate::Shift;

/// The load of the most loaded worker as a multiple of the mean of all, at least 1; 1 without load.
///
/// Of `n` workers of which one has `r` times what each of the others has, it is `r * n / (r + n - 1)`. So 4 : 1 is 1.6 on two workers and 2.3 on four,
/// and 1.2 : 1 is 1.09 and 1.14; the other way around 1.2 is 1.5 : 1 on two workers and 1.3 : 1 on four.
///
/// # Examples
/// ```
/// assert_eq!(penstock_balance::skew(&[30, 10]), 1.5);
/// assert_eq!(penstock_balance::skew(&[]), 1.0);
/// ```
#[must_use]
pub fn skew(loads: &[u64]) -> f64 {
    let total: u64 = loads.iter().sum();
    match loads.iter().max() {
        Some(most) if total > 0 => *most as f64 * loads.len() as f64 / total as f64,
        _ => 1.0,
    }
}

/// The moves to equal numbers of bins, up to one, among the workers that keep some; as few as possible, by bin. None keeps any: no moves.
///
/// # Examples
/// ```
/// use penstock_balance::{Shift, balanced};
/// assert_eq!(balanced(&[0, 1, 1, 0], &[true, true]), []);
/// assert_eq!(balanced(&[0, 0], &[true, true]), [Shift { what: 1, from: 0, to: 1 }]);
/// ```
#[must_use]
pub fn balanced(owners: &[u32], keeps: &[bool]) -> Vec<Shift<usize>> {
    let stay: Vec<usize> = (0..keeps.len()).filter(|worker| keeps[*worker]).collect();
    if stay.is_empty() {
        return Vec::new();
    }
    let mut held = vec![0_usize; keeps.len()];
    for owner in owners {
        if let Some(held) = held.get_mut(*owner as usize) {
            *held += 1;
        }
    }
    let mut ranked = stay.clone();
    ranked.sort_by_key(|worker| Reverse(held[*worker]));
    // Workers with many bins get the shares that are one larger.
    let (share, rest) = (owners.len() / stay.len(), owners.len() % stay.len());
    let mut room = vec![0; keeps.len()];
    for (place, worker) in ranked.iter().enumerate() {
        room[*worker] = share + usize::from(place < rest);
    }
    let mut spare = Vec::new();
    for (bin, &owner) in owners.iter().enumerate() {
        match room.get_mut(owner as usize) {
            Some(room) if *room > 0 => *room -= 1,
            _ => spare.push((bin, owner)),
        }
    }
    let mut takers = stay.into_iter().flat_map(|worker| std::iter::repeat_n(worker as u32, room[worker]));
    spare.into_iter().map_while(|(what, from)| Some(Shift { what, from, to: takers.next()? })).collect()
}

/// The moves after which no worker has more than `tolerance` times the mean load, where bins allow it; all bins of workers that keep none.
/// Few, by bin. Without any load every bin weighs the same.
///
/// A bin that alone exceeds what a worker may have stays, and its worker gives away what else it can.
///
/// # Panics
/// When there is not a load for each bin.
///
/// # Examples
/// ```
/// use penstock_balance::{Shift, evened};
/// let moves = evened(&[0, 0, 0, 1], &[50, 30, 20, 10], &[true, true], 1.2);
/// assert_eq!(moves, [Shift { what: 0, from: 0, to: 1 }]);
/// ```
#[must_use]
pub fn evened(owners: &[u32], loads: &[u64], keeps: &[bool], tolerance: f64) -> Vec<Shift<usize>> {
    assert_eq!(owners.len(), loads.len(), "a load for each bin");
    let stay: Vec<usize> = (0..keeps.len()).filter(|worker| keeps[*worker]).collect();
    if stay.is_empty() {
        return Vec::new();
    }
    let weights = if loads.iter().any(|load| *load > 0) { loads.to_vec() } else { vec![1; loads.len()] };
    let mut desk = Desk::new(owners, &weights, keeps);
    desk.even_out(&stay, tolerance.max(1.0));
    let moved = (0..).zip(owners).zip(&desk.owners).filter(|((_, from), to)| from != to);
    moved.map(|((what, from), to)| Shift { what, from: *from, to: *to }).collect()
}

/// Who would have what.
struct Desk<'a> {
    weights: &'a [u64],
    owners: Vec<u32>,
    /// Bins of each worker, by weight.
    held: Vec<BTreeSet<(u64, usize)>>,
    loads: Vec<u64>,
}

impl<'a> Desk<'a> {
    fn new(owners: &[u32], weights: &'a [u64], keeps: &[bool]) -> Self {
        let workers = keeps.len();
        let mut desk =
            Self { weights, owners: owners.to_vec(), held: vec![BTreeSet::new(); workers], loads: vec![0; workers] };
        let mut homeless = Vec::new();
        for (bin, &owner) in owners.iter().enumerate() {
            match keeps.get(owner as usize) {
                Some(true) => desk.put(bin, owner as usize),
                _ => homeless.push(bin),
            }
        }
        // The heaviest first, each to whom has least.
        homeless.sort_by_key(|bin| (Reverse(weights[*bin]), *bin));
        for bin in homeless {
            let to = (0..workers).filter(|worker| keeps[*worker]).min_by_key(|worker| desk.loads[*worker]);
            desk.put(bin, to.expect("some worker keeps bins"));
        }
        desk
    }

    fn put(&mut self, bin: usize, worker: usize) {
        self.owners[bin] = worker as u32;
        self.held[worker].insert((self.weights[bin], bin));
        self.loads[worker] += self.weights[bin];
    }

    fn take(&mut self, bin: usize, worker: usize) {
        self.held[worker].remove(&(self.weights[bin], bin));
        self.loads[worker] -= self.weights[bin];
    }

    fn even_out(&mut self, stay: &[usize], tolerance: f64) {
        let total: u64 = self.loads.iter().sum();
        let allowed = (total as f64 / stay.len() as f64 * tolerance) as u64;
        let mut open: Vec<usize> = stay.to_vec();
        // Each round lowers the sum of squares, or closes a worker.
        while let Some(&high) = open.iter().max_by_key(|worker| self.loads[**worker]) {
            if self.loads[high] <= allowed {
                break;
            }
            let low = *stay.iter().min_by_key(|worker| self.loads[**worker]).expect("somebody stays");
            let gap = self.loads[high] - self.loads[low];
            if let Some(bin) = self.closest(high, gap / 2, gap) {
                self.take(bin, high);
                self.put(bin, low);
            } else if let Some((heavy, light)) = self.exchange(high, low, gap) {
                self.take(heavy, high);
                self.take(light, low);
                self.put(heavy, low);
                self.put(light, high);
            } else {
                open.retain(|worker| *worker != high);
            }
        }
    }

    /// The bin of a worker whose weight is closest to what is wanted, above 0 and below the limit.
    fn closest(&self, worker: usize, wanted: u64, limit: u64) -> Option<usize> {
        let held = &self.held[worker];
        let below = held.range(..=(wanted, usize::MAX)).next_back().filter(|(weight, _)| *weight > 0);
        let above = held.range((wanted + 1, 0)..).next().filter(|(weight, _)| *weight < limit);
        let away = |(weight, _): &&(u64, usize)| weight.abs_diff(wanted);
        below.into_iter().chain(above).min_by_key(away).map(|(_, bin)| *bin)
    }

    /// A bin of one worker and a lighter one of another whose exchange evens the two out best.
    fn exchange(&self, high: usize, low: usize, gap: u64) -> Option<(usize, usize)> {
        let mut best: Option<(u64, usize, usize)> = None;
        for &(light, other) in &self.held[low] {
            // The heavier one weighs more by half of the gap, at best.
            if let Some(bin) = self.closest(high, light + gap / 2, light + gap)
                && self.weights[bin] > light
            {
                let away = (self.weights[bin] - light).abs_diff(gap / 2);
                if best.is_none_or(|(least, _, _)| away < least) {
                    best = Some((away, bin, other));
                }
            }
        }
        best.map(|(_, heavy, light)| (heavy, light))
    }
}
