//! Bins that are split and merged with the load and their size, beside the balancer that moves them: both are those of 2^12 cells of the hash.

use penstock_balance::{Balancer, Bin, Divider, Fate, Large, Policy, Why, skew};
use proptest::prelude::*;

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
    /// Looks that moved something.
    moves: usize,
    /// Skew of the loads as they truly are, by look.
    skews: Vec<f64>,
    hot_key: Option<(Bin, f64)>,
    large: Vec<Large>,
    /// What was told last is done: rows of these bins are not known yet.
    is_new: bool,
}

/// Bytes that a bin may hold here.
const LIMIT: u64 = 1 << 20;

impl Run {
    fn new(workers: u32) -> Self {
        let policy = Policy { most_bytes: Some(LIMIT), ..Policy::default() };
        let bins: Vec<Bin> = (0..1 << BITS).map(|prefix| (prefix, BITS)).collect();
        let owners = bins.iter().map(|(prefix, _)| prefix % workers).collect();
        let (balancer, divider) = (Balancer::new(Policy::default()), Divider::new(policy, BITS, MOST));
        let (splits, merges, moves, skews, hot_key, large, is_new) = Default::default();
        Self { balancer, divider, bins, owners, workers, splits, merges, moves, skews, hot_key, large, is_new }
    }

    /// What each bin has of what each cell has.
    fn sums(&self, of: &dyn Fn(usize) -> u64) -> Vec<u64> {
        let sum = |(prefix, bits): Bin| {
            let cells = 1_usize << (MOST - bits);
            (prefix as usize * cells..(prefix as usize + 1) * cells).map(of).sum::<u64>()
        };
        self.bins.iter().map(|bin| sum(*bin)).collect()
    }

    fn look(&mut self, rates: &dyn Fn(usize) -> u64) {
        self.look_at(rates, &|_| 1);
    }

    fn look_at(&mut self, rates: &dyn Fn(usize) -> u64, bytes: &dyn Fn(usize) -> u64) {
        let rows = self.sums(rates);
        let bytes: Vec<Option<u64>> = self.sums(bytes).into_iter().map(Some).collect();
        let mut sums = vec![0; self.workers as usize];
        self.owners.iter().zip(&rows).for_each(|(owner, rows)| sums[*owner as usize] += rows);
        self.skews.push(skew(&sums));
        if std::mem::take(&mut self.is_new) {
            return;
        }
        let came = rows.iter().sum();
        let verdict = self.balancer.look(&self.owners, &rows, came, self.workers);
        let mut told = self.divider.look(&self.bins, &rows, came, &bytes, self.workers);
        if let Why::Packed { bin, part: Some(part), .. } = verdict.why {
            self.divider.relieve(&self.bins, &rows, (bin, part), self.workers, &mut told);
        }
        (self.hot_key, self.large) = (told.hot_key, told.large);
        verdict.moves.iter().for_each(|shift| self.owners[shift.what] = shift.to);
        self.moves += usize::from(!verdict.moves.is_empty());
        let before = self.bins.clone();
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
            self.balancer.recut(&before, &self.bins, self.workers);
            self.is_new = true;
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

/// Rows of a cell at a look.
type Trace<'a> = dyn Fn(usize, usize) -> u64 + 'a;

/// One bin has so much that its worker of four has four times what each other has. The loads stand, grow, wander, come and go; in each stretch of
/// them it takes so many looks from the first that shows it.
#[test]
fn four_to_one_is_less_than_five_to_four_in_eight_looks_where_it_takes_a_split() {
    const HOT: u64 = 490;
    let step = |look: usize, cell: usize| if look >= 20 && within(7, cell) { HOT } else { 10 };
    let ramp = |look: usize, cell: usize| if within(7, cell) { HOT.min(10 + 4 * look as u64) } else { 10 };
    let wandering = |look: usize, cell: usize| if within(look / 30 * 37 % 64, cell) { HOT } else { 10 };
    // At night there are too few rows to say anything.
    let day = move |look: usize, cell: usize| {
        if look % 60 < 40 { step(look, cell) } else { u64::from(cell.is_multiple_of(8)) }
    };
    let traces: [(&str, &Trace, usize); 4] =
        [("step", &step, 1), ("ramp", &ramp, 1), ("wandering", &wandering, 14), ("day and night", &day, 1)];
    for (name, trace, splits) in traces {
        let mut run = Run::new(4);
        (0..400).for_each(|look| run.look(&|cell| trace(look, cell)));
        let skewed = |skew: &f64| *skew > Policy::default().trigger;
        let stretches = run.skews.chunk_by(|one, next| skewed(one) == skewed(next)).collect::<Vec<_>>();
        for (place, some) in stretches.iter().enumerate().filter(|(_, some)| skewed(&some[0])) {
            assert!(some.len() <= 8, "{name}: {some:?}");
            assert!(stretches.get(place + 1).is_none_or(|then| then[0] <= 1.25), "{name}: {:?}", stretches[place + 1]);
        }
        assert_eq!(run.splits, splits, "{name}");
    }
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
fn a_few_bins_more_than_workers_are_evened_out_by_splitting_one() {
    for (busy, workers) in [(5, 4), (6, 4), (9, 8), (10, 8)] {
        let mut run = Run::new(workers);
        run.looks(40, &|cell| if cell >> (MOST - BITS) < busy { 100 } else { 0 });
        let (trigger, skews) = (Policy::default().trigger, &run.skews);
        assert!(skews[0] > trigger || busy == 6, "{busy} on {workers}: {skews:?}");
        assert!(skews[12..].iter().all(|skew| *skew <= trigger), "{busy} on {workers}: {skews:?}");
        assert!(run.splits <= 2 && run.merges == 0, "{busy} on {workers}: {} splits", run.splits);
    }
}

#[test]
fn a_few_keys_more_than_workers_are_divided_until_each_is_alone_and_no_further() {
    let mut run = Run::new(4);
    run.looks(100, &|cell| if cell % 64 == 5 && cell >> (MOST - BITS) < 5 { 6_400 } else { 0 });
    assert!(run.splits <= 5 && run.merges == 0, "{} splits", run.splits);
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

/// Bytes of a cell that is one of a bin's which holds so many.
fn each(bytes: u64) -> u64 {
    bytes >> (MOST - BITS)
}

#[test]
fn what_grows_too_large_is_divided_and_one_again_when_it_has_shrunk_for_long() {
    for workers in [1, 4] {
        let mut run = Run::new(workers);
        // Some batches a day, as few rows as say nothing of loads: sizes are judged all the same.
        let of = |bytes: u64| move |cell: usize| if within(7, cell) { each(bytes) } else { each(LIMIT) };
        for _ in 0..3 {
            assert_eq!(run.splits, 0, "in each of three looks");
            run.look_at(&|_| 0, &of(LIMIT * 210 / 64));
        }
        assert_eq!((run.splits, run.bins.len()), (1, 63 + 4), "and not what is as large as it may be");
        assert_eq!(run.large[0].fate, Fate::Split { by: 2 });
        assert_eq!((run.large[0].bin, run.large[0].bytes / 1000), ((7, BITS), LIMIT * 210 / 64_000));
        // Half as large, and as it was again: neither one nor finer.
        for bytes in [LIMIT / 2, LIMIT * 3, LIMIT / 3, LIMIT * 7 / 2] {
            (0..40).for_each(|_| run.look_at(&|_| 10, &of(bytes)));
        }
        assert_eq!((run.splits, run.merges, run.large.len()), (1, 0, 0));
        (0..11).for_each(|_| run.look_at(&|_| 10, &of(LIMIT / 5)));
        run.look_at(&|_| 10, &of(LIMIT / 3));
        (0..11).for_each(|_| run.look_at(&|_| 10, &of(LIMIT / 5)));
        assert_eq!(run.merges, 0, "in each of twelve looks");
        run.look_at(&|_| 10, &of(LIMIT / 5));
        assert_eq!((run.splits, run.merges, run.bins), (1, 1, Run::new(workers).bins));
    }
}

#[test]
fn what_is_large_and_hot_stays_divided_until_it_is_neither() {
    let mut run = Run::new(4);
    let hot = |cell: usize| if within(7, cell) { 640 } else { 10 };
    let large = |cell: usize| if within(7, cell) { each(3 * LIMIT) } else { 1 };
    (0..3).for_each(|_| run.look_at(&hot, &large));
    assert_eq!((run.splits, run.bins.len()), (1, 63 + 8), "by what asks for more");
    (0..30).for_each(|_| run.look_at(&|_| 10, &large));
    (0..30).for_each(|_| run.look_at(&hot, &|_| 1));
    assert_eq!(run.merges, 0);
    (0..12).for_each(|_| run.look_at(&|_| 10, &|_| 1));
    assert_eq!((run.splits, run.merges), (1, 1));
}

#[test]
fn the_state_of_one_key_is_told_of_and_divided_no_further() {
    let mut run = Run::new(4);
    let key = 7 << 6 | 33;
    (0..60).for_each(|_| run.look_at(&|_| 10, &|cell| if cell == key { 30 * LIMIT } else { 1 }));
    let [Large { bin, bytes, fate: Fate::Stays }] = run.large[..] else { panic!("{:?}", run.large) };
    assert!(bin.1 >= BITS + 4 && bin.0 as usize == key >> (MOST - bin.1) && bytes > 30 * LIMIT);
    assert_eq!((run.splits, run.merges), (1, 0), "sixteen parts");
    // Others are, beside it.
    (0..3).for_each(|_| {
        run.look_at(&|_| 10, &|cell| {
            let own = if within(3, cell) { each(5 * LIMIT) } else { 1 };
            if cell == key { 30 * LIMIT } else { own }
        });
    });
    assert_eq!(run.splits, 2);
}

#[test]
fn many_that_are_too_large_are_divided_a_few_at_a_time_the_largest_first() {
    let mut run = Run::new(4);
    let bytes = |cell: usize| each(LIMIT * (2 + (cell as u64 >> (MOST - BITS)) % 3));
    (0..3).for_each(|_| run.look_at(&|_| 10, &bytes));
    assert_eq!(run.splits, 1, "four limits");
    assert_eq!(run.large.iter().filter(|large| large.fate == Fate::Waits { looks: 0 }).count(), 63);
    (0..126).for_each(|_| run.look_at(&|_| 10, &bytes));
    assert_eq!((run.large.len(), run.merges), (0, 0));
    // 22 of two limits, 21 of three, 21 of four, by parts of seven eighths at most.
    assert_eq!(run.bins.len(), 22 * 4 + 21 * 4 + 21 * 8);
}

/// While they were, which took as long as there was some, nothing was evened out: each split began all looks anew.
#[test]
fn loads_are_evened_out_while_bins_are_divided_for_their_size() {
    let mut run = Run::new(4);
    let bytes = |_: usize| each(16 * LIMIT);
    let hot = |cell: usize| if (cell >> (MOST - BITS)).is_multiple_of(4) { 40 } else { 10 };
    (0..20).for_each(|_| run.look_at(&|_| 10, &bytes));
    assert!(run.splits > 0 && run.moves == 0);
    (0..8).for_each(|_| run.look_at(&hot, &bytes));
    assert!(run.skews[20] > 2.2 && *run.skews.last().unwrap() <= 1.22, "{:?}", run.skews);
    assert!(run.large.len() > 30, "there are more to be divided");
    // And it stays so, with what they have in the end.
    let moves = run.moves;
    (0..300).for_each(|_| run.look_at(&hot, &bytes));
    assert!(run.skews[28..].iter().all(|skew| *skew <= 1.3), "{:?}", run.skews);
    assert_eq!((run.large.len(), run.moves), (0, moves));
}

#[test]
fn what_was_seen_of_bins_is_that_of_their_parts_and_of_what_they_are_parts_of() {
    let policy = Policy { least_rows: 1, patience: 3, trigger: 1.3, ..Policy::default() };
    let mut balancer = Balancer::new(policy);
    // By prefix, as they are told, which is not by hash.
    let one = [(0, 2), (1, 2), (3, 2), (4, 3), (10, 4), (11, 4)];
    let other = [(0, 2), (2, 2), (3, 2), (2, 3), (6, 4), (7, 4)];
    let (owners, loads_of_one, loads_of_other) = ([0, 0, 1, 0, 0, 0], [50, 36, 60, 20, 8, 8], [50, 36, 60, 18, 9, 9]);
    let looked = balancer.look(&owners, &loads_of_one, 182, 2);
    assert_eq!((looked.why, looked.skew), (Why::Waiting { looks: 2 }, 122.0 / 91.0));
    balancer.recut(&one, &other, 2);
    let looked = balancer.look(&owners, &loads_of_other, 182, 2);
    assert_eq!((looked.why, looked.skew), (Why::Waiting { looks: 1 }, 122.0 / 91.0));
    balancer.recut(&other, &one, 2);
    let looked = balancer.look(&owners, &loads_of_one, 182, 2);
    assert_eq!((looked.why, looked.skew), (Why::Skewed, 122.0 / 91.0));
    // Behind moves is rest, whatever is split or merged.
    balancer.recut(&one, &other, 2);
    assert_eq!(balancer.look(&owners, &loads_of_other, 182, 2).why, Why::Waiting { looks: 5 });
    // Of 41 rows four parts have 10, 10, 10 and 11: two of those are to go beside another bin, after which it is even.
    let mut balancer = Balancer::new(Policy { patience: 2, tolerance: 1.0, ..policy });
    let whole: Vec<Bin> = (0..8).map(|prefix| (prefix, 3)).collect();
    let parts: Vec<Bin> = (0..4).map(|prefix| (prefix, 5)).chain(whole[1..].iter().copied()).collect();
    balancer.look(&[0, 0, 0, 0, 1, 1, 1, 1], &[41, 41, 41, 41, 10, 10, 10, 10], 204, 2);
    balancer.recut(&whole, &parts, 2);
    let looked = balancer.look(&[0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1], &[0; 11], 1, 2);
    assert_eq!((looked.moves.len(), looked.expected), (3, 1.0));
    assert_eq!(looked.moves.iter().filter(|shift| shift.what < 4).count(), 2);
    // The parts of what has much of a worker's share are seen first.
    let mut balancer = Balancer::new(policy);
    (0..2).for_each(|_| drop(balancer.look(&[0, 0, 1], &[80, 20, 30], 130, 2)));
    balancer.recut(&[(0, 1), (2, 2), (3, 2)], &[(0, 2), (1, 2), (2, 2), (3, 2)], 2);
    let looked = balancer.look(&[0, 0, 0, 1], &[80, 0, 20, 30], 130, 2);
    assert_eq!(looked.why, Why::Waiting { looks: 2 });
}

#[test]
fn many_that_have_cooled_are_merged_a_few_at_a_time() {
    // Somebody has split all of them in two.
    let halves = (0..128).map(|prefix| (prefix, BITS + 1)).collect::<Vec<Bin>>();
    let mut run = Run::new(4);
    (run.owners, run.bins) = (halves.iter().map(|(prefix, _)| prefix % 4).collect(), halves);
    let bytes = |cell: usize| each(LIMIT / 64 * (1 + (cell as u64 >> (MOST - BITS)) % 15));
    let mut merges = Vec::new();
    for _ in 0..30 {
        let before = run.bins.clone();
        run.look_at(&|_| 10, &bytes);
        let gone = run.bins.iter().filter(|bin| !before.contains(bin)).map(|(bin, _)| *bin as usize);
        merges.extend(Some(gone.collect::<Vec<_>>()).filter(|merged| !merged.is_empty()));
    }
    let held = |bin: &usize| bytes(bin << (MOST - BITS)) << (MOST - BITS);
    let sums = merges.iter().map(|merged| merged.iter().map(held).sum::<u64>()).collect::<Vec<_>>();
    assert!(sums.len() > 1 && sums.iter().all(|sum| *sum <= 4 * LIMIT), "{sums:?}");
    assert_eq!((run.merges, run.bins.len()), (64, 64), "all in the end");
    assert!(merges[0].iter().map(held).max() <= merges[1].iter().map(held).min(), "the smallest first");
}

#[test]
fn what_nobody_tells_the_size_of_is_left_as_it_is() {
    let policy = Policy { most_bytes: Some(LIMIT), least_rows: 1, ..Policy::default() };
    let mut divider = Divider::new(policy, 0, MOST);
    for sizes in [[None, None], [Some(1), None]] {
        for _ in 0..30 {
            let told = divider.look(&[(0, 1), (1, 1)], &[1, 1], 2, &sizes, 1);
            assert_eq!((told.splits, told.merges, told.large), (vec![], vec![], vec![]));
        }
    }
    // Without a limit only loads count.
    let mut divider = Divider::new(Policy { most_bytes: None, ..policy }, 0, MOST);
    let looks = (0..12).map(|_| divider.look(&[(0, 1), (1, 1)], &[1, 1], 2, &[None, Some(u64::MAX)], 1).merges);
    assert_eq!(looks.last(), Some(vec![(0, 0)]));
}

proptest! {
    #![proptest_config(penstock_cases::cases(12))]

    /// State that grows wherever it likes is within the limit soon after, and what shrinks under a time to live to a fraction becomes whole again: once.
    #[test]
    fn state_that_grows_and_expires_is_split_on_the_way_up_and_merged_on_the_way_down(
        weights in prop::collection::vec(0u64..40, 64),
        slope in 1u64..12,
        workers in 1u32..6,
        hot in prop::option::of(0usize..64),
    ) {
        let mut run = Run::new(workers);
        // A cell has no more than a quarter of the limit, so parts can be below it. The hot key wanders.
        let height = |look: usize| if look < 100 { look as u64 } else { 100_u64.saturating_sub((look as u64 - 100) * slope) };
        let bytes = |look: usize| {
            let weights = &weights;
            move |cell: usize| weights[cell >> (MOST - BITS)] * (1 + cell as u64 % 5) * height(look) * (LIMIT / 80_000)
        };
        let rates = |look: usize| move |cell: usize| match hot {
            Some(hot) if within((hot + look / 15) % 64, cell) => 640,
            _ => 10,
        };
        for look in 0..100 {
            run.look_at(&rates(look), &bytes(look));
        }
        let (top, (splits, merges)) = (bytes(99), (run.splits, run.merges));
        for _ in 0..200 {
            run.look_at(&|_| 10, &top);
        }
        prop_assert!(run.sums(&top).into_iter().all(|bytes| bytes <= LIMIT), "{:?}", run.large);
        let whole: Vec<Bin> = Run::new(workers).bins;
        let large = |bin: &Bin| Run::new(workers).sums(&top)[bin.0 as usize] > LIMIT;
        prop_assert!(whole.iter().filter(|bin| large(bin)).all(|bin| !run.bins.contains(bin)));
        if hot.is_none() {
            prop_assert_eq!(merges, 0, "{} splits", splits);
        }
        let (splits, merges) = (run.splits, run.merges);
        for look in 100..400 {
            run.look_at(&|_| 10, &bytes(look));
        }
        prop_assert_eq!(run.splits, splits, "nothing is split on the way down");
        prop_assert!(run.bins == whole, "{:?}", run.bins);
        prop_assert!(run.merges - merges <= 64);
    }
}
