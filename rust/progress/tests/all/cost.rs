//! What operations cost on large structures, in comparisons of times rather than in seconds.

use std::cell::Cell;
use std::cmp::Ordering;
use std::rc::Rc;

use penstock_progress::nest::Nest;
use penstock_progress::{
    Capability, ChangeBatch, MutableAntichain, Notificator, PartialOrder, PathSummary, PostDated, Product, Timestamp,
};
use serde::{Deserialize, Serialize};

thread_local! {
    static COMPARED: Cell<u64> = const { Cell::new(0) };
}

/// How often two times are compared while something runs.
fn comparisons<R>(work: impl FnOnce() -> R) -> (u64, R) {
    let before = COMPARED.get();
    let result = work();
    (COMPARED.get() - before, result)
}

/// A time that counts its comparisons.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq, Default, Serialize, Deserialize)]
struct Counted<T>(T);

impl<T> Counted<T> {
    fn count() {
        COMPARED.set(COMPARED.get() + 1);
    }
}

impl<T: Ord> PartialOrd for Counted<T> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<T: Ord> Ord for Counted<T> {
    fn cmp(&self, other: &Self) -> Ordering {
        Self::count();
        self.0.cmp(&other.0)
    }
}

impl<T: PartialOrder> PartialOrder for Counted<T> {
    const DIMENSION: usize = T::DIMENSION;
    fn less_equal(&self, other: &Self) -> bool {
        Self::count();
        self.0.less_equal(&other.0)
    }
    fn lower_bound(&self, other: &Self) -> Option<Self> {
        Self::count();
        self.0.lower_bound(&other.0).map(Counted)
    }
}

impl<T, S: PathSummary<T>> PathSummary<Counted<T>> for Counted<S> {
    fn results_in(&self, time: &Counted<T>) -> Option<Counted<T>> {
        self.0.results_in(&time.0).map(Counted)
    }
    fn followed_by(&self, next: &Self) -> Option<Self> {
        self.0.followed_by(&next.0).map(Counted)
    }
}

impl<T: Timestamp> Timestamp for Counted<T> {
    type Summary = Counted<T::Summary>;
    fn minimum() -> Self {
        Self(T::minimum())
    }
}

type Total = Counted<u64>;
type Pair = Counted<Product<u64, u64>>;
type Triple = Counted<Product<Product<u64, u64>, u64>>;

fn pair(outer: u64, inner: u64) -> Pair {
    Counted(Product::new(outer, inner))
}

/// Numbers below `2^bits`, each once, in an order without pattern.
fn shuffled(bits: u32) -> impl Iterator<Item = u64> {
    (0..1u64 << bits).map(move |at| at.wrapping_mul(0x9E37_79B9_7F4A_7C15 | 1) & ((1 << bits) - 1))
}

const BITS: u32 = if cfg!(miri) { 6 } else { 20 };
/// The most comparisons that a step logarithmic in the number of times may take.
const STEP: u64 = 220;

#[test]
fn a_million_live_times_in_a_total_order() {
    let mut frontier = MutableAntichain::<Total>::new();
    let (filling, ()) = comparisons(|| {
        shuffled(BITS).for_each(|time| drop(frontier.update_iter([(Counted(time), 1)])));
    });
    assert_eq!(frontier.live(), 1 << BITS);
    let (emptying, ()) = comparisons(|| {
        for time in 0..1u64 << BITS {
            assert_eq!(frontier.frontier(), [Counted(time)]);
            frontier.update_iter([(Counted(time), -1)]);
        }
    });
    assert!(frontier.is_empty() && frontier.live() == 0);
    assert!(filling < STEP << BITS, "{filling} comparisons to fill");
    assert!(emptying < STEP << BITS, "{emptying} comparisons to empty");
}

/// A square of pairs leaves row by row, so that at every step the rest of it lies above the frontier.
#[test]
fn a_square_of_live_pairs_above_one_minimum() {
    let bits = BITS - 4;
    let side = 1u64 << (bits / 2);
    let mut frontier = MutableAntichain::<Pair>::new();
    let (filling, ()) = comparisons(|| {
        shuffled(bits).for_each(|at| drop(frontier.update_iter([(pair(at / side, at % side), 1)])));
    });
    assert_eq!((frontier.live(), frontier.frontier()), (1 << bits, [pair(0, 0)].as_slice()));
    let (emptying, ()) = comparisons(|| {
        for outer in 0..side {
            for inner in 0..side {
                assert!(frontier.less_equal(&pair(outer, inner)) && frontier.frontier().len() <= 2);
                frontier.update_iter([(pair(outer, inner), -1)]);
            }
        }
    });
    assert!(frontier.is_empty());
    assert!(filling < (2 * STEP) << bits, "{filling} comparisons to fill");
    assert!(emptying < (2 * STEP) << bits, "{emptying} comparisons to empty");
}

/// A worker whose input stays behind hears that others consumed many epochs before it hears of their production.
#[test]
fn owed_times_of_a_total_order_are_passed_over() {
    let bits = if cfg!(miri) { 6 } else { 16 };
    let many = 1u64 << bits;
    let mut frontier = MutableAntichain::<Total>::from_elem(Counted(0));
    let (owing, ()) = comparisons(|| {
        for time in shuffled(bits) {
            assert_eq!(frontier.update_iter([(Counted(time + 1), -1)]).len(), 0);
        }
    });
    assert_eq!((frontier.live() as u64, frontier.frontier()), (many + 1, [Counted(0)].as_slice()));
    // The only live time lies before all of them, then behind them. Without a comparison a scan of what lies between costs time only,
    // and would take a minute here.
    let (moving, ()) = comparisons(|| {
        for turn in 0..many {
            let (goes, comes) = if turn % 2 == 0 { (0, many + 1) } else { (many + 1, 0) };
            assert_eq!(frontier.update_iter([(Counted(comes), 1), (Counted(goes), -1)]).len(), 2);
        }
    });
    let (producing, ()) = comparisons(|| {
        for time in shuffled(bits) {
            assert_eq!(frontier.update_iter([(Counted(time + 1), 1)]).len(), 0);
        }
    });
    assert_eq!((frontier.live(), frontier.frontier()), (1, [Counted(0)].as_slice()));
    for (what, compared) in [("to owe", owing), ("to move", moving), ("to produce", producing)] {
        assert!(compared < STEP << bits, "{compared} comparisons {what}");
    }
}

/// The same among pairs, in both forms that few and many counts take.
#[test]
fn owed_pairs_are_passed_over() {
    for bits in if cfg!(miri) { [3, 6] } else { [9, 13] } {
        let side = 1u64 << (bits / 2);
        let mut frontier = MutableAntichain::<Pair>::from_elem(pair(0, 0));
        shuffled(bits).for_each(|at| drop(frontier.update_iter([(pair(1 + at / side, at % side), -1)])));
        let (moving, ()) = comparisons(|| {
            for turn in 1..=1 << bits {
                let changes = frontier.update_iter([(pair(0, turn - 1), -1), (pair(0, turn), 1)]);
                assert_eq!(changes.len(), 2, "the owed ones are never live");
            }
        });
        assert!(moving < (2 * STEP) << bits, "{moving} comparisons over 2^{bits} owed pairs");
    }
}

/// Counts of both signs come and go anywhere.
#[test]
fn random_changes_of_both_signs() {
    let bits: u32 = if cfg!(miri) { 6 } else { 15 };
    fn run<T: PartialOrder + Ord + Clone>(bits: u32, at: impl Fn(u64) -> T) -> u64 {
        let mut frontier = MutableAntichain::<T>::new();
        let (compared, ()) = comparisons(|| {
            for (step, time) in shuffled(bits).enumerate() {
                let diff = [1, -1, 2, -2][step / 3 % 4];
                frontier.update_iter([(at(time), diff)]);
                if step % 3 == 0 {
                    frontier.update_iter([(at(time / 2), -diff), (at(time + 1), diff)]);
                }
            }
        });
        compared
    }
    let total = run::<Total>(bits, Counted);
    assert!(total < (3 * STEP) << bits, "{total} comparisons of integers");
    let side = 1u64 << (bits / 2);
    let pairs = run::<Pair>(bits, |at| pair(at / side, at % side));
    assert!(pairs < (6 * STEP) << bits, "{pairs} comparisons of pairs");
}

#[test]
fn a_cube_of_live_triples() {
    a_cube(|outer, middle, inner| -> Triple { Counted(Product::new(Product::new(outer, middle), inner)) });
}

/// The times of scopes of any depth are no worse than triples.
#[test]
fn a_cube_of_live_nests() {
    a_cube(|outer, middle, inner| -> Counted<Nest<true>> { Counted(Nest::from(vec![inner, middle, outer])) });
}

fn a_cube<T: PartialOrder + Ord + Clone + std::fmt::Debug>(at: impl Fn(u64, u64, u64) -> T + Copy) {
    let side = if cfg!(miri) { 3u64 } else { 24 };
    let cube = || (0..side * side * side).map(move |n| at(n / side / side, n / side % side, n % side));
    let mut frontier = MutableAntichain::<T>::new();
    let live = side * side * side;
    frontier.update_iter(cube().map(|time| (time, 1)));
    assert_eq!(frontier.frontier(), [at(0, 0, 0)]);
    let (emptying, ()) = comparisons(|| cube().for_each(|time| drop(frontier.update_iter([(time, -1)]))));
    assert!(frontier.is_empty());
    assert!(emptying < 4 * STEP * live, "{emptying} comparisons for {live} times");
}

/// A hundred thousand requests wait while the frontier moves and lets few of them go at a time.
#[test]
fn notifications_pass_over_those_that_wait() {
    let bits: u32 = if cfg!(miri) { 6 } else { 17 };
    let side = 1u64 << (bits / 2);
    let rows = 1u64 << bits.div_ceil(2);
    let changes = Rc::default();
    let mut notificator = Notificator::new();
    let (asking, ()) = comparisons(|| {
        for at in shuffled(bits) {
            notificator.notify_at(Capability::mint(pair(at / side, at % side), Rc::clone(&changes)));
        }
    });
    assert_eq!(notificator.len(), 1 << bits);
    // A frontier of several elements; what lies below all of them is complete and comes out, in lexicographic order.
    let (mut delivered, mut asked) = (0u64, 0u64);
    let (compared, ()) = comparisons(|| {
        for outer in (0..rows).step_by(8) {
            for inner in (0..side).step_by(8) {
                let frontier = [pair(outer, inner + 8), pair(outer + 4, inner + 4), pair(outer + 8, 0)];
                let mut last = None;
                while let Some(capability) = notificator.next(&[&frontier]) {
                    assert!(!frontier.iter().any(|element| element.less_equal(capability.time())));
                    assert!(last.replace(*capability.time()).is_none_or(|last| last < *capability.time()));
                    delivered += 1;
                }
                asked += 1;
            }
        }
    });
    assert_eq!((delivered, notificator.len()), ((1 << bits) - 16, 16));
    while notificator.next(&[]).is_some() {}
    assert!(asking < (4 * STEP) << bits, "{asking} comparisons to ask");
    assert!(compared < 8 * STEP * (delivered + asked), "{compared} comparisons for {delivered} in {asked} rounds");
    assert!(changes.is_empty());
}

/// Nothing is ready: asking again and again costs nothing that grows with what waits.
#[test]
fn a_blocked_notificator_is_asked_for_free() {
    let bits: u32 = if cfg!(miri) { 6 } else { 17 };
    let changes = Rc::default();
    let mut notificator = Notificator::new();
    for at in shuffled(bits) {
        notificator.notify_at(Capability::mint(pair(1 + at % 300, at), Rc::clone(&changes)));
    }
    let (compared, ()) = comparisons(|| {
        for _ in 0..100 {
            assert!(notificator.next(&[&[], &[pair(1, 0)]]).is_none());
        }
    });
    assert!(compared <= 100, "{compared} comparisons");
}

#[test]
fn a_million_post_dated_records() {
    let mut queue = PostDated::<Total, u64, ()>::new();
    let (pushing, ()) = comparisons(|| shuffled(BITS).for_each(|time| queue.push(Counted(time / 2), time, ())));
    assert_eq!((queue.len(), queue.least()), (1 << BITS, Some(&Counted(0))));
    let (draining, ()) = comparisons(|| {
        for step in 1..=16u64 {
            let frontier = [Counted(step << (BITS - 5))];
            let ready = queue.drain_ready(&frontier).inspect(|record| assert!(record.0 < frontier[0])).count();
            assert_eq!(ready, 1 << (BITS - 4));
        }
    });
    assert!(queue.is_empty());
    assert!(pushing < STEP << BITS, "{pushing} comparisons to push");
    assert!(draining < STEP << BITS, "{draining} comparisons to drain");
}

/// Records at one time are handed out one by one from either end of patience.
#[test]
fn a_million_records_at_one_time() {
    let mut queue = PostDated::<Total, u64, ()>::new();
    (0..1u64 << BITS).for_each(|at| queue.push(Counted(3), at, ()));
    let (draining, ()) = comparisons(|| {
        assert!(queue.drain_ready(&[]).map(|record| record.1).eq(0..1 << BITS));
    });
    assert!(draining < 100, "{draining} comparisons");
}

/// Reading an unchanged batch costs nothing, however often it is read.
#[test]
fn an_idle_change_batch_is_not_compacted() {
    let mut batch = ChangeBatch::<Total>::new();
    batch.extend(shuffled(12).map(|time| (Counted(time), 1)));
    assert_eq!(batch.len(), 1 << 12);
    let (compared, ()) = comparisons(|| {
        for _ in 0..1000 {
            batch.compact();
            assert!(!batch.is_empty() && batch.len() == 1 << 12 && batch.iter().len() == 1 << 12);
        }
    });
    assert_eq!(compared, 0);
}
