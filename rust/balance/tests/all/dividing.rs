//! Bins that are split and merged with the load, beside the balancer that moves them: the load is that of 2^12 cells of the hash.

use penstock_balance::{Balancer, Bin, Divider, Policy, skew};

const BITS: u8 = 6;
const MOST: u8 = 12;

struct Run {
    balancer: Balancer,
    divider: Divider,
    bins: Vec<Bin>,
    owners: Vec<u32>,
    workers: u32,
    splits: usize,
    merges: usize,
    /// Skew of the loads as they truly are, by look.
    skews: Vec<f64>,
    hot_key: Option<(Bin, f64)>,
}

impl Run {
    fn new(workers: u32) -> Self {
        let bins: Vec<Bin> = (0..1 << BITS).map(|prefix| (prefix, BITS)).collect();
        let owners = bins.iter().map(|(prefix, _)| prefix % workers).collect();
        let (balancer, divider) = (Balancer::new(Policy::default()), Divider::new(Policy::default(), BITS, MOST));
        Self { balancer, divider, bins, owners, workers, splits: 0, merges: 0, skews: Vec::new(), hot_key: None }
    }

    fn look(&mut self, rates: &dyn Fn(usize) -> u64) {
        let load = |(prefix, bits): Bin| {
            let cells = 1_usize << (MOST - bits);
            (prefix as usize * cells..(prefix as usize + 1) * cells).map(rates).sum::<u64>()
        };
        let rows: Vec<u64> = self.bins.iter().map(|bin| load(*bin)).collect();
        let mut sums = vec![0; self.workers as usize];
        self.owners.iter().zip(&rows).for_each(|(owner, rows)| sums[*owner as usize] += rows);
        self.skews.push(skew(&sums));
        let verdict = self.balancer.look(&self.owners, &rows, self.workers);
        let told = self.divider.look(&self.bins, &rows, self.workers);
        self.hot_key = told.hot_key;
        verdict.moves.iter().for_each(|shift| self.owners[shift.what] = shift.to);
        for (bin @ (prefix, bits), by) in &told.splits {
            let at = self.bins.iter().position(|one| one == bin).expect("a bin that there is");
            let parts = (0..1 << by).map(|low| (prefix << by | low, bits + by));
            let owner = self.owners[at];
            self.bins.splice(at..=at, parts);
            self.owners.splice(at..=at, std::iter::repeat_n(owner, 1 << by));
        }
        for (prefix, bits) in &told.merges {
            let within = |bin: &Bin| bin.0 >> (bin.1 - bits) == *prefix;
            let at = self.bins.iter().position(within).expect("parts that there are");
            let count = self.bins.iter().filter(|bin| within(bin)).count();
            assert!(count > 1, "{prefix} is split");
            self.bins.splice(at..at + count, [(*prefix, *bits)]);
            self.owners.splice(at + 1..at + count, []);
        }
        if !told.splits.is_empty() || !told.merges.is_empty() {
            self.balancer = Balancer::new(Policy::default());
        }
        (self.splits, self.merges) = (self.splits + told.splits.len(), self.merges + told.merges.len());
    }

    fn looks(&mut self, looks: usize, rates: &dyn Fn(usize) -> u64) {
        (0..looks).for_each(|_| self.look(rates));
    }
}

/// Cells of the bin of this number.
fn within(bin: usize, cell: usize) -> bool {
    cell >> (MOST - BITS) == bin
}

#[test]
fn even_load_is_left_whole() {
    for workers in [1, 2, 4, 40] {
        let mut run = Run::new(workers);
        run.looks(100, &|_| 10);
        assert_eq!((run.splits, run.merges), (0, 0));
    }
}

#[test]
fn a_hot_bin_is_divided_until_moves_even_it_out_and_is_one_again_when_it_has_cooled() {
    let mut run = Run::new(4);
    run.looks(10, &|_| 10);
    // As much as all others together, evenly over its hashes.
    let hot = |cell: usize| if within(7, cell) { 640 } else { 10 };
    run.looks(30, &hot);
    assert_eq!((run.splits, run.merges), (1, 0));
    assert_eq!(run.bins.len(), 63 + 8, "its parts are half a worker's share at most");
    assert!(run.skews[12] > 2.0 && run.skews[20..].iter().all(|skew| *skew <= 1.22), "{:?}", run.skews);
    // It stays so through lulls that are shorter than a merge waits for.
    for _ in 0..5 {
        run.looks(8, &|_| 10);
        run.looks(4, &hot);
    }
    assert_eq!((run.splits, run.merges), (1, 0));
    run.looks(13, &|_| 10);
    assert_eq!((run.splits, run.merges, run.bins.len()), (1, 1, 64));
    assert_eq!(run.bins, Run::new(4).bins);
}

#[test]
fn a_hot_part_of_a_bin_is_divided_further() {
    let mut run = Run::new(4);
    // One eighth of the bin has all of its load.
    run.looks(40, &|cell| if within(7, cell) && cell % 64 < 8 { 5_120 } else { 10 });
    assert!(run.skews[30..].iter().all(|skew| *skew <= 1.22), "{:?}", run.skews);
    assert_eq!((run.splits, run.bins.len()), (2, 64 + 14));
    assert_eq!(run.hot_key, None);
}

#[test]
fn a_hot_key_is_told_of_and_divided_no_further() {
    let mut run = Run::new(4);
    run.looks(60, &|cell| if cell == 7 << 6 | 33 { 40_000 } else { 10 });
    let (bin, share) = run.hot_key.expect("it stays too hot");
    assert!(bin.1 >= BITS + 4 && bin.0 == (7 << 6 | 33) >> (MOST - bin.1), "{bin:?} has the key");
    assert!(share > 1.5 && run.splits == 2, "{share}, {} splits", run.splits);
}

#[test]
fn a_hot_bin_that_wanders_leaves_few_parts_behind() {
    let mut run = Run::new(4);
    for look in 0..400_usize {
        let hot = look / 10 * 37 % 64;
        run.look(&|cell| if within(hot, cell) { 640 } else { 10 });
    }
    assert!(run.splits <= 40 && run.splits - run.merges <= 3, "{} splits, {} merges", run.splits, run.merges);
    assert!(run.bins.len() <= 64 + 3 * 7);
}

#[test]
fn few_rows_and_one_worker_say_nothing() {
    let mut run = Run::new(4);
    run.looks(20, &|cell| u64::from(cell == 3) * 900);
    assert_eq!(run.splits, 0);
    let mut alone = Run::new(1);
    alone.looks(20, &|cell| if within(7, cell) { 640 } else { 10 });
    assert_eq!(alone.splits, 0);
}
