//! Laws of orders and path summaries, for every timestamp of the crate.

use std::cmp::Ordering;
use std::fmt::Debug;

use penstock_progress::caster::{Caster, Gap};
use penstock_progress::nest::Nest;
use penstock_progress::{FlowSummary, FlowTime, PartialOrder, PathSummary, Product, Refines, Timestamp, TotalOrder};
use proptest::prelude::*;

/// Values near both ends, so that equal, neighbouring and overflowing ones are all common.
fn word() -> impl Strategy<Value = u64> {
    prop_oneof![0..4u64, (u64::MAX - 3)..=u64::MAX, any::<u64>()]
}

fn half() -> impl Strategy<Value = u32> {
    prop_oneof![0..4u32, (u32::MAX - 3)..=u32::MAX, any::<u32>()]
}

fn time() -> impl Strategy<Value = FlowTime> {
    (word(), half()).prop_map(|(epoch, slice)| FlowTime::new(epoch, slice))
}

fn advance() -> impl Strategy<Value = FlowSummary> {
    (word(), half()).prop_map(|(epochs, slices)| FlowSummary::new(epochs, slices))
}

/// Coordinates of up to five scopes, few of them far from zero, so that lengths differ and zeros stand in between.
fn nest<const ODD: bool>() -> impl Strategy<Value = Nest<ODD>> {
    prop::collection::vec(prop_oneof![4 => 0..4u64, 1 => word()], 0..=5).prop_map(Nest::from)
}

fn pair<A: Strategy, B: Strategy>(a: A, b: B) -> impl Strategy<Value = Product<A::Value, B::Value>> {
    (a, b).prop_map(|(outer, inner)| Product::new(outer, inner))
}

fn order<T: PartialOrder + Ord + Debug>(a: &T, b: &T, c: &T) -> Result<(), TestCaseError> {
    prop_assert!(a.less_equal(a) && !a.less_than(a));
    prop_assert_eq!(a.less_equal(b) && b.less_equal(a), a == b);
    prop_assert_eq!(a.less_than(b), a.less_equal(b) && a != b);
    prop_assert!(!(a.less_equal(b) && b.less_equal(c)) || a.less_equal(c));
    prop_assert!(!a.less_equal(b) || a.cmp(b) != Ordering::Greater, "Ord must extend the partial order");
    let bound = a.lower_bound(b).expect("all times of this crate have lower bounds");
    prop_assert!(bound.less_equal(a) && bound.less_equal(b));
    prop_assert!(!(c.less_equal(a) && c.less_equal(b)) || c.less_equal(&bound), "the greatest of them");
    if T::DIMENSION <= 1 {
        prop_assert!(a.less_equal(b) || b.less_equal(a), "dimension 1 is total");
    }
    if T::DIMENSION == 2 {
        // What `Ord` is for the staircase: a < b < c, a ≤ c and not a ≤ b imply b ≤ c.
        let staircase = a < b && b < c && a.less_equal(c) && !a.less_equal(b);
        prop_assert!(!staircase || b.less_equal(c), "Ord must be one of the two linear orders");
    }
    Ok(())
}

fn total<T: TotalOrder + Ord>(a: &T, b: &T) -> Result<(), TestCaseError> {
    prop_assert_eq!(a.less_equal(b), a <= b);
    Ok(())
}

fn summary<T: Timestamp>(s: &T::Summary, r: &T::Summary, a: &T, b: &T) -> Result<(), TestCaseError> {
    let identity = T::Summary::default();
    prop_assert_eq!(identity.results_in(a), Some(a.clone()));
    prop_assert_eq!(identity.followed_by(s), Some(s.clone()));
    prop_assert_eq!(s.followed_by(&identity), Some(s.clone()));
    prop_assert!(T::minimum().less_equal(a));
    if let Some(later) = s.results_in(a) {
        prop_assert!(a.less_equal(&later), "never back");
        prop_assert!(!identity.less_than(s) || a.less_than(&later), "above the identity is strictly forward");
        // Pointwise order: a lesser summary reaches every time that a greater one reaches, no later.
        if r.less_equal(s) {
            let earlier = r.results_in(a);
            prop_assert!(earlier.is_some_and(|earlier| earlier.less_equal(&later)));
        }
    }
    if let (true, Some(later)) = (a.less_equal(b), s.results_in(b)) {
        let earlier = s.results_in(a);
        prop_assert!(earlier.is_some_and(|earlier| earlier.less_equal(&later)), "monotone");
    }
    // A composition is never later than its parts.
    if let Some(parts) = s.results_in(a).and_then(|between| r.results_in(&between)) {
        let whole = s.followed_by(r).and_then(|both| both.results_in(a));
        prop_assert!(whole.is_some_and(|whole| whole.less_equal(&parts)), "composition");
    }
    Ok(())
}

// Failures are reproduced by the values that proptest prints; no files are written.
proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..penstock_cases::cases(1500) })]

    #[test]
    fn integers(a in word(), b in word(), c in word(), s in word()) {
        order(&a, &b, &c)?;
        total(&a, &b)?;
        summary::<u64>(&s, &c, &a, &b)?;
        summary::<u64>(&(s >> 62), &(c >> 62), &a, &b)?;
        let exact = s.followed_by(&c).and_then(|both: u64| both.results_in(&a));
        prop_assert_eq!(exact, s.results_in(&a).and_then(|between: u64| c.results_in(&between)));
    }

    #[test]
    fn small_integers(a in half(), b in half(), c in half(), s in half()) {
        order(&a, &b, &c)?;
        summary::<u32>(&s, &c, &a, &b)?;
        summary::<usize>(&(s as usize), &(c as usize), &(a as usize), &(b as usize))?;
    }

    #[test]
    fn flow_times(a in time(), b in time(), c in time(), s in advance(), r in advance(), q in advance()) {
        order(&a, &b, &c)?;
        total(&a, &b)?;
        order(&s, &r, &q)?;
        summary::<FlowTime>(&s, &r, &a, &b)?;
        // Exact unless the first part runs out of slices.
        let parts = s.results_in(&a).and_then(|between| r.results_in(&between));
        let whole = s.followed_by(&r).and_then(|both| both.results_in(&a));
        prop_assert!(parts == whole || (s.epochs == 0 && a.slice.checked_add(s.slices).is_none()));
        let left = s.followed_by(&r).and_then(|both| both.followed_by(&q));
        let right = r.followed_by(&q).and_then(|both| s.followed_by(&both));
        let fits = [s, r, q].iter().try_fold(0u32, |sum, part| sum.checked_add(part.slices)).is_some();
        prop_assert!(left == right || !fits, "associative");
    }

    #[test]
    fn products(
        a in pair(word(), time()), b in pair(word(), time()), c in pair(word(), time()),
        s in pair(word(), advance()), r in pair(word(), advance()),
    ) {
        order(&a, &b, &c)?;
        order(&s, &r, &s)?;
        summary::<Product<u64, FlowTime>>(&s, &r, &a, &b)?;
    }

    #[test]
    fn small_products(times in prop::collection::vec((0..4u64, 0..4u64, 0..3u32), 3)) {
        let flat: Vec<_> = times.iter().map(|time| Product::new(time.0, time.1)).collect();
        order(&flat[0], &flat[1], &flat[2])?;
        let deep: Vec<_> = times.iter().map(|time| Product::new(Product::new(time.0, time.1), time.2)).collect();
        order(&deep[0], &deep[1], &deep[2])?;
        let right: Vec<_> = times.iter().map(|time| Product::new(time.0, Product::new(time.1, time.2))).collect();
        order(&right[0], &right[1], &right[2])?;
    }

    #[test]
    fn nests(a in nest::<true>(), b in nest::<true>(), c in nest::<true>(), s in nest::<true>(), r in nest::<true>()) {
        order(&a, &b, &c)?;
        summary::<Nest<true>>(&s, &r, &a, &b)?;
    }

    #[test]
    fn flows_in_nests(
        a in pair(time(), nest::<false>()), b in pair(time(), nest::<false>()), c in pair(time(), nest::<false>()),
        s in pair(advance(), nest::<false>()), r in pair(advance(), nest::<false>()),
    ) {
        order(&a, &b, &c)?;
        order(&s, &r, &s)?;
        summary::<Product<FlowTime, Nest<false>>>(&s, &r, &a, &b)?;
    }

    #[test]
    fn nesting(outer in time(), other in time(), inner in word(), s in pair(advance(), word())) {
        type Inner = Product<FlowTime, u64>;
        let entered = <Inner as Refines<FlowTime>>::to_inner(outer);
        prop_assert_eq!(<Inner as Refines<FlowTime>>::to_outer(entered), outer);
        prop_assert!(entered.less_equal(&Product::new(outer, inner)), "enters at the earliest");
        let entered_other = <Inner as Refines<FlowTime>>::to_inner(other);
        prop_assert_eq!(outer.less_equal(&other), entered.less_equal(&entered_other));
        if let Some(moved) = s.results_in(&Product::new(outer, inner)) {
            let path = <Inner as Refines<FlowTime>>::summarize(s);
            prop_assert_eq!(path.results_in(&outer), Some(<Inner as Refines<FlowTime>>::to_outer(moved)));
        }
    }
}

/// Where a peer's snapshot begins is for the peer to say.
#[test]
fn the_last_number_has_no_next_one() {
    let mut caster = Caster::resume([(7, u64::MAX - 1)].into());
    assert_eq!(caster.admit(7, u64::MAX - 1), Ok(()));
    let gap = Gap { worker: 7, expected: u64::MAX, got: u64::MAX };
    assert_eq!((caster.admit(7, u64::MAX), caster.expected(7)), (Err(gap), u64::MAX));
}
