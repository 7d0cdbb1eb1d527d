//! The controllers on traces of load: a step, a ramp, a hot key that wanders, day and night. No thread, no clock.

use std::time::Duration;

use penstock_balance::{Balancer, Demand, Policy, Sizer, SizerPolicy, Verdict, Why, skew};

const BINS: usize = 256;

/// Numbers that look random and are the same every time.
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// About so many, as often as chance has it.
    fn about(&mut self, mean: f64) -> u64 {
        // The sum of twelve is near enough to a bell.
        let bell: f64 = (0..12).map(|_| self.roll()).sum::<f64>() - 6.0;
        (mean + bell * mean.sqrt()).max(0.0).round() as u64
    }
}

struct Run {
    balancer: Balancer,
    owners: Vec<u32>,
    workers: u32,
    dice: Dice,
    /// Skew of the loads as they truly are, by look.
    skews: Vec<f64>,
    /// Every move, by look.
    moved: Vec<(usize, usize, u32, u32)>,
    last: Option<Verdict>,
}

impl Run {
    fn new(owners: Vec<u32>, workers: u32) -> Self {
        let balancer = Balancer::new(Policy::default());
        Self { balancer, owners, workers, dice: Dice(7), skews: Vec::new(), moved: Vec::new(), last: None }
    }

    fn look(&mut self, rates: &dyn Fn(usize) -> f64) {
        let rows: Vec<u64> = (0..BINS).map(|bin| self.dice.about(rates(bin))).collect();
        let verdict = self.balancer.look(&self.owners, &rows, rows.iter().sum(), self.workers);
        for shift in &verdict.moves {
            assert_eq!(self.owners[shift.what], shift.from);
            self.owners[shift.what] = shift.to;
            self.moved.push((self.skews.len(), shift.what, shift.from, shift.to));
        }
        let mut sums = vec![0; self.workers as usize];
        (0..BINS).for_each(|bin| sums[self.owners[bin] as usize] += (rates(bin) * 100.0) as u64);
        self.skews.push(skew(&sums));
        self.last = Some(verdict);
    }
}

fn dealt(workers: u32) -> Vec<u32> {
    (0..BINS as u32).map(|bin| bin % workers).collect()
}

#[test]
fn even_load_is_left_alone_whatever_its_noise() {
    let mut run = Run::new(dealt(4), 4);
    for look in 0..1_000 {
        // From a row a bin to a thousand, by day and night.
        let day = 1.0 + 500.0 * (1.0 + (look as f64 / 50.0).sin());
        run.look(&|_| day);
    }
    assert_eq!(run.moved, []);
}

#[test]
fn a_skew_of_four_to_one_is_evened_out_in_three_looks_and_stays_so() {
    // Worker 0's bins get four times what those of the others get, from look 20 on.
    let mut run = Run::new(dealt(4), 4);
    let hot = dealt(4);
    for look in 0..300 {
        run.look(&|bin| if look >= 20 && hot[bin] == 0 { 400.0 } else { 100.0 });
    }
    assert!(run.skews[20] > 2.2, "{}", run.skews[20]);
    assert!(run.skews[22..].iter().all(|skew| *skew <= 1.22), "{:?}", &run.skews[20..30]);
    let moved: Vec<usize> = run.moved.iter().map(|(_, bin, _, _)| *bin).collect();
    let mut once = moved.clone();
    once.sort_unstable();
    once.dedup();
    assert_eq!(once.len(), moved.len(), "no bin moves twice under a load that stands");
    assert!(moved.len() <= 40, "{} of 64 hot bins", moved.len());
}

#[test]
fn skew_is_the_most_loaded_worker_as_a_multiple_of_the_mean() {
    // One worker gets four times what each other one does.
    assert_eq!(skew(&[4, 1]), 1.6);
    assert_eq!(skew(&[4, 1, 1, 1]), 16.0 / 7.0);
    // And six fifths.
    assert!((skew(&[6, 5]) - 1.09).abs() < 0.001);
    assert!((skew(&[6, 5, 5, 5]) - 1.143).abs() < 0.001);
}

#[test]
fn four_times_the_mean_is_evened_out_to_a_fifth_above_it_in_three_looks() {
    let mut run = Run::new(dealt(8), 8);
    let hot = dealt(8);
    for look in 0..100 {
        run.look(&|bin| if look >= 20 && hot[bin] == 0 { 700.0 } else { 100.0 });
    }
    assert!((run.skews[20] - 4.0).abs() < 0.01, "{}", run.skews[20]);
    assert!(run.skews[22..].iter().all(|skew| *skew <= 1.22), "{:?}", &run.skews[20..30]);
    assert!(run.moved.iter().all(|(look, ..)| *look == 22), "{:?}", run.moved);
}

#[test]
fn two_workers_come_from_four_to_one_to_six_to_five_where_the_tolerance_says_so() {
    let policy = Policy { tolerance: 1.09, ..Policy::default() };
    let mut run = Run { balancer: Balancer::new(policy), ..Run::new(dealt(2), 2) };
    let hot = dealt(2);
    for _ in 0..100 {
        run.look(&|bin| if hot[bin] == 0 { 400.0 } else { 100.0 });
    }
    assert_eq!(run.skews[0], 1.6);
    assert!(run.skews[2..].iter().all(|skew| *skew <= 1.1), "{:?}", &run.skews[..10]);
    assert!(run.moved.iter().all(|(look, ..)| *look == 2), "{:?}", run.moved);
}

#[test]
fn a_ramp_is_followed_with_few_moves() {
    let mut run = Run::new(dealt(4), 4);
    for look in 0..400 {
        let grown = 100.0 + look as f64 * 2.0;
        run.look(&|bin| if bin % 4 == 1 { grown } else { 100.0 });
    }
    assert!(run.skews.iter().all(|skew| *skew <= 1.7), "{:?}", run.skews.iter().copied().fold(0.0, f64::max));
    assert!(run.moved.len() <= 80, "{} moves", run.moved.len());
}

#[test]
fn a_hot_bin_that_wanders_does_not_set_bins_in_motion_faster_than_they_can_rest() {
    let mut run = Run::new(dealt(4), 4);
    for look in 0..400_usize {
        let hot = look / 10 * 37 % BINS;
        run.look(&|bin| if bin == hot { 12_000.0 } else { 100.0 });
    }
    let looks: Vec<usize> = {
        let mut looks: Vec<usize> = run.moved.iter().map(|(look, ..)| *look).collect();
        looks.dedup();
        looks
    };
    assert!(looks.windows(2).all(|pair| pair[1] - pair[0] >= 6), "rest lies between: {looks:?}");
    // 40 places of the hot bin; each move that follows one gives its worker's other bins away.
    assert!(looks.len() <= 40, "{}", looks.len());
}

#[test]
fn a_bin_hotter_than_a_worker_is_named_and_not_passed_around() {
    let mut run = Run::new(dealt(4), 4);
    for _ in 0..200 {
        run.look(&|bin| if bin == 42 { 100_000.0 } else { 100.0 });
    }
    let moves_of_the_hot = run.moved.iter().filter(|(_, bin, _, _)| *bin == 42).count();
    assert_eq!(moves_of_the_hot, 0);
    let last = run.last.unwrap();
    assert!(matches!(last.why, Why::HotBin { bin: 42, share } if share > 3.0), "{last:?}");
    assert!(run.moved.len() <= 64, "what else its worker has may go, once: {}", run.moved.len());
}

#[test]
fn a_worker_with_one_light_bin_too_many_is_told_of_and_nothing_is_divided() {
    let mut balancer = Balancer::new(Policy { trigger: 1.1, tolerance: 1.05, least_rows: 10, ..Policy::default() });
    // Four to three: as if by chance.
    let last = (0..9).map(|_| balancer.look(&[0, 0, 0, 0, 1, 1, 1], &[40; 7], 280, 2)).last().unwrap();
    assert!(matches!(last.why, Why::Packed { worker: 0, part: None, .. }), "{last:?}");
    // Of three equal ones on two workers one is worth it.
    let mut balancer = Balancer::new(Policy { trigger: 1.3, least_rows: 1, ..Policy::default() });
    let last = (0..3).map(|_| balancer.look(&[0, 0, 1], &[40; 3], 120, 2)).last().unwrap();
    assert!(matches!(last.why, Why::Packed { worker: 0, bin: 0 | 1, part: Some(part) } if part < 0.3), "{last:?}");
}

#[test]
fn joiners_get_their_part_of_the_load() {
    let mut run = Run::new(dealt(2), 2);
    (0..5).for_each(|_| run.look(&|_| 100.0));
    run.workers = 4;
    (0..10).for_each(|_| run.look(&|_| 100.0));
    assert!(*run.skews.last().unwrap() <= 1.25);
    assert_eq!(run.moved.len(), {
        let mut bins: Vec<usize> = run.moved.iter().map(|(_, bin, ..)| *bin).collect();
        bins.sort_unstable();
        bins.dedup();
        bins.len()
    });
}

/// Sizes by look as the sizer has them, and the most worker-seconds that ever waited. A worker does 1,000 rows in a busy second; what is left over
/// waits. The queries get `offered` rows each, and are in each other's way: of the time that all are busy each has its share.
fn sized(queries: usize, offered: &dyn Fn(usize) -> f64, looks: usize) -> (Vec<u32>, f64) {
    let per_worker = 1_000.0;
    let mut sizer = Sizer::new(SizerPolicy { least: 1, most: 8, threads: 1, busy: 0.8, patience: 2 });
    let (mut workers, mut waiting, mut worst) = (1_u32, 0.0_f64, 0.0_f64);
    let mut sizes = Vec::new();
    for look in 0..looks {
        let comes = offered(look);
        let can = per_worker * f64::from(workers) / queries as f64;
        let done = (waiting + comes).min(can);
        waiting = waiting + comes - done;
        worst = worst.max(waiting / per_worker);
        // Busy for as long as it has the CPU, and for as long as others that are busy meanwhile have it.
        let alone = done / per_worker;
        let busy = Duration::from_secs_f64(alone / (1.0 - (queries - 1) as f64 * alone / f64::from(workers)));
        let load = sizer.load(Demand { offered: comes, rows: done as u64, busy });
        if let Some(size) = sizer.look(workers, &vec![load; queries]).filter(|size| size.looks == 0) {
            workers = size.workers;
        }
        sizes.push(workers);
    }
    (sizes, worst)
}

fn changes(sizes: &[u32]) -> usize {
    sizes.windows(2).filter(|pair| pair[0] != pair[1]).count()
}

#[test]
fn the_number_of_workers_follows_a_step_at_once_and_stands_still_before_and_after() {
    let (sizes, _) = sized(1, &|look| if look < 50 { 700.0 } else { 3_100.0 }, 100);
    assert!(sizes[..50].iter().all(|size| *size == 1), "{sizes:?}");
    assert!(sizes[52..].iter().all(|size| *size == 4), "one jump, in two looks: {sizes:?}");
}

#[test]
fn the_number_of_workers_climbs_a_ramp_step_by_step_and_comes_down_again() {
    let ramp = |look: usize| 100.0 + 30.0 * if look < 200 { look } else { 400 - look } as f64;
    let (sizes, worst) = sized(1, &ramp, 400);
    let (up, down) = sizes.split_at(206);
    assert!(up.is_sorted() && down.is_sorted_by(|one, next| one >= next), "{sizes:?}");
    assert_eq!((sizes[0], *up.last().unwrap(), *down.last().unwrap()), (1, 8, 1));
    assert!(changes(&sizes) <= 14, "each number once on either side: {sizes:?}");
    assert!(worst < 0.5, "{worst} worker-seconds waited");
}

#[test]
fn day_and_night_change_it_rarely_and_nothing_piles_up() {
    let (sizes, worst) = sized(1, &|look| 2_500.0 + 2_000.0 * (look as f64 / 100.0).sin(), 1_300);
    let changes = changes(&sizes);
    assert!((8..=26).contains(&changes), "{changes} changes over two days");
    assert!(worst < 8.0, "{worst} worker-seconds waited");
    assert!(sizes.iter().all(|size| (1..=8).contains(size)));
}

#[test]
fn noise_around_a_boundary_does_not_make_it_swing() {
    for noise in [60.0, 160.0] {
        let mut dice = Dice(3);
        let offered: Vec<f64> = (0..1_000).map(|_| 1_600.0 + noise * (dice.roll() - 0.5)).collect();
        let (sizes, _) = sized(1, &|look| offered[look], 1_000);
        assert!(changes(&sizes) <= 2, "{} changes for noise of {noise}", changes(&sizes));
        assert_eq!(sizes.last(), Some(&3), "what it needs at worst");
    }
}

#[test]
fn queries_that_are_in_each_others_way_get_enough_workers_and_leave_them_be() {
    for queries in 2..5 {
        for offered in (100..1_600).step_by(50).map(f64::from) {
            let (sizes, _) = sized(queries, &|_| offered, 300);
            let enough = (offered * queries as f64 / 800.0).ceil().min(8.0) as u32;
            assert!(changes(&sizes) <= 4, "{queries} queries of {offered}: {sizes:?}");
            assert!(sizes[100..].iter().all(|size| *size == sizes[299]), "{queries} queries of {offered}: {sizes:?}");
            let above = sizes[299] - enough;
            assert!(above <= 1, "{queries} queries of {offered}: {} of {enough}", sizes[299]);
        }
    }
}

fn policy() -> SizerPolicy {
    SizerPolicy { least: 1, most: 8, threads: 1, busy: 0.8, patience: 1 }
}

#[test]
fn workers_of_several_threads_are_counted_as_workers() {
    let mut sizer = Sizer::new(SizerPolicy { threads: 2, ..policy() });
    // A thread does 1,000 rows in a busy second: 2,400 rows are work for three threads, so for two workers.
    let demand = Demand { offered: 2_400.0, rows: 2_000, busy: Duration::from_secs(2) };
    assert_eq!(sizer.load(demand), Some(1.2));
    let loads = [sizer.load(demand)];
    let size = sizer.look(1, &loads).unwrap();
    assert_eq!((size.needed, size.workers, size.looks), (2, 2, 0));
    let fewer = (0..3).filter_map(|_| sizer.look(4, &loads)).last().unwrap();
    assert_eq!((fewer.workers, fewer.looks), (2, 0), "four workers for what two do are too many");
}

#[test]
fn what_all_queries_need_counts_and_not_what_one_does() {
    let mut sizer = Sizer::new(policy());
    // Two queries with two workers: each has what it seems to need, and of that waits four ninths of the time for the other one. Together they do the
    // work of 1.78.
    let size = sizer.look(2, &[Some(1.6), Some(1.6)]).unwrap();
    assert_eq!((size.needed, size.workers, size.looks), (3, 3, 0));
    assert!((size.load - 2.0 * 1.6 / 1.8).abs() < 1e-9);
    // Where they have CPUs of their own, what the larger one needs is enough, and not less.
    let apart = sizer.look(4, &[Some(3.0), Some(0.3), Some(0.3)]).unwrap();
    assert_eq!((apart.load, apart.workers), (3.0, 4));
    // One has four times too many workers, the other one just enough.
    let sizes = (0..20).filter_map(|_| sizer.look(4, &[Some(0.4), Some(2.8)]));
    assert!(sizes.map(|size| size.workers).all(|size| size == 4));
    // Ten small ones fit on one worker.
    let last = (0..3).filter_map(|_| sizer.look(4, &[Some(0.04); 10])).last().unwrap();
    assert_eq!((last.needed, last.workers, last.looks), (1, 1, 0));
}

#[test]
fn a_query_that_is_not_measured_may_need_all_that_there_is() {
    let mut sizer = Sizer::new(policy());
    assert!((0..20).filter_map(|_| sizer.look(4, &[Some(0.1), None])).all(|size| size.workers == 4));
    assert_eq!(sizer.look(4, &[Some(4.0), None]).map(|size| (size.workers, size.looks)), Some((5, 0)));
    assert_eq!(sizer.look(4, &[None, None]), None);
    assert_eq!(sizer.look(4, &[]), None);
}

#[test]
fn nothing_measured_asks_for_nothing() {
    let mut sizer = Sizer::new(SizerPolicy { least: 2, most: 4, ..policy() });
    let none = Demand { offered: 5_000.0, rows: 0, busy: Duration::ZERO };
    assert_eq!(sizer.load(none), None);
    let odd = Demand { offered: f64::NAN, rows: 10, busy: Duration::from_secs(1) };
    assert_eq!(sizer.load(odd), None);
    let idle = sizer.load(Demand { offered: 0.0, rows: 0, busy: Duration::ZERO });
    assert_eq!(idle, Some(0.0), "what does not come needs nothing, whatever was measured");
    assert!((0..9).filter_map(|_| sizer.look(2, &[idle])).all(|size| size.workers == 2), "least is the least");
    let flood = sizer.load(Demand { offered: 1e12, rows: 10, busy: Duration::from_secs(1) });
    assert_eq!(sizer.look(2, &[flood]).map(|size| size.workers), Some(4), "and most the most");
}

#[test]
fn looks_at_another_number_of_workers_count_for_nothing() {
    let mut sizer = Sizer::new(policy());
    let first = sizer.look(8, &[Some(4.0)]).expect("it was measured");
    assert_eq!((first.workers, first.looks), (6, 2));
    // Somebody takes half of them: the looks of before would make them more again.
    let looks: Vec<_> = (0..3).filter_map(|_| sizer.look(4, &[Some(2.0)])).collect();
    assert_eq!(looks.iter().map(|look| (look.workers, look.looks)).collect::<Vec<_>>(), [(3, 2), (3, 1), (3, 0)]);
}
