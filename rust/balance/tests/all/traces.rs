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
        let verdict = self.balancer.look(&self.owners, &rows, self.workers);
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

/// Workers that do so many rows in a busy second, and what they do of what comes; what is left over waits.
fn sized(offered: &dyn Fn(usize) -> f64, looks: usize) -> (Vec<u32>, f64) {
    let per_worker = 1_000.0;
    let mut sizer = Sizer::new(SizerPolicy { least: 1, most: 8, busy: 0.8, patience: 2 });
    let (mut workers, mut waiting, mut worst) = (1_u32, 0.0_f64, 0.0_f64);
    let mut sizes = Vec::new();
    for look in 0..looks {
        let comes = offered(look);
        let can = per_worker * f64::from(workers);
        let done = (waiting + comes).min(can);
        waiting = waiting + comes - done;
        worst = worst.max(waiting / per_worker);
        let busy = Duration::from_secs_f64(done / per_worker);
        if let Some(size) = sizer.look(Demand { workers, offered: comes, rows: done as u64, busy }) {
            workers = size;
        }
        sizes.push(workers);
    }
    (sizes, worst)
}

#[test]
fn the_number_of_workers_follows_a_step_at_once_and_stands_still_before_and_after() {
    let (sizes, _) = sized(&|look| if look < 50 { 700.0 } else { 3_100.0 }, 100);
    assert!(sizes[..50].iter().all(|size| *size == 1), "{sizes:?}");
    assert!(sizes[52..].iter().all(|size| *size == 4), "one jump, in two looks: {sizes:?}");
}

#[test]
fn day_and_night_change_it_rarely_and_nothing_piles_up() {
    let (sizes, worst) = sized(&|look| 2_500.0 + 2_000.0 * (look as f64 / 100.0).sin(), 1_300);
    let changes = sizes.windows(2).filter(|pair| pair[0] != pair[1]).count();
    assert!((8..=30).contains(&changes), "{changes} changes over two days");
    assert!(worst < 8.0, "{worst} worker-seconds waited");
    assert!(sizes.iter().all(|size| (1..=8).contains(size)));
}

#[test]
fn noise_around_a_boundary_does_not_make_it_swing() {
    let mut dice = Dice(3);
    let noise: Vec<f64> = (0..1_000).map(|_| 1_600.0 + 60.0 * (dice.roll() - 0.5)).collect();
    let (sizes, _) = sized(&|look| noise[look], 1_000);
    let changes = sizes.windows(2).filter(|pair| pair[0] != pair[1]).count();
    assert!(changes <= 40, "{changes} changes");
}

#[test]
fn nothing_measured_asks_for_nothing() {
    let mut sizer = Sizer::new(SizerPolicy { least: 2, most: 4, busy: 0.8, patience: 1 });
    let none = Demand { workers: 2, offered: 5_000.0, rows: 0, busy: Duration::ZERO };
    assert_eq!(sizer.look(none), None);
    let odd = Demand { workers: 2, offered: f64::NAN, rows: 10, busy: Duration::from_secs(1) };
    assert_eq!(sizer.look(odd), None);
    let idle = Demand { workers: 2, offered: 0.0, rows: 10, busy: Duration::from_secs(1) };
    assert_eq!((0..9).filter_map(|_| sizer.look(idle)).next(), None, "least is the least");
    let flood = Demand { workers: 2, offered: 1e12, rows: 10, busy: Duration::from_secs(1) };
    assert_eq!(sizer.look(flood), Some(4), "and most the most");
}
