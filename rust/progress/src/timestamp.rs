//! Timestamps, the summaries of paths between them, and the nesting of scopes.
//!
//! A path summary says how far a time advances along a path, at least: a time at the path's start, or any later one that
//! is still to come there, appears at its end at the summary's result or later. Laws (`tests/all/laws.rs`), for a summary `s`
//! and times `a ≤ b`: `a ≤ s(a)` (never backwards), `s(a) ≤ s(b)` (monotone, which makes the image of a frontier a
//! frontier), the default summary is the identity, and `r.followed_by(s)` of a time is at most `s(r(time))` and equal to it
//! unless coordinates overflow. A summary strictly above the identity moves every time strictly forward: that is what
//! makes a cycle legal. `None` means that the result lies beyond every representable time, so nothing can appear there.
//!
//! Source: Naiad's structured timestamps as used by the papers (Megaphone §3.1, Faucet §3). Flow time is ours.

use std::fmt::{self, Debug};
use std::hash::Hash;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::order::{PartialOrder, TotalOrder};

/// A logical, partially ordered time. `Ord` must extend the partial order, see [`crate::order`].
pub trait Timestamp:
    Clone + Eq + Ord + Hash + Debug + PartialOrder + Serialize + DeserializeOwned + Send + Sync + 'static
{
    /// How times advance along paths.
    type Summary: PathSummary<Self>;

    /// The time at or before every other.
    fn minimum() -> Self;
}

/// The least advance of a time along a path. `Default` is the identity.
pub trait PathSummary<T>: Clone + Eq + Ord + Hash + Debug + PartialOrder + Default + Send + Sync + 'static {
    /// The earliest time at the path's end for a time at its start; `None` when it is not representable.
    fn results_in(&self, time: &T) -> Option<T>;

    /// The summary of this path extended by another; `None` when no time survives it.
    fn followed_by(&self, next: &Self) -> Option<Self>;
}

/// A timestamp of a nested scope that refines the times `O` of the scope around it.
pub trait Refines<O: Timestamp>: Timestamp {
    /// The earliest inner time for an outer one.
    fn to_inner(outer: O) -> Self;
    /// The outer time of an inner one: the appended coordinate is stripped.
    fn to_outer(self) -> O;
    /// The outer advance that an inner summary guarantees.
    fn summarize(path: Self::Summary) -> O::Summary;
}

macro_rules! integer_time {
    ($($integer:ty),*) => {$(
        impl Timestamp for $integer {
            type Summary = $integer;
            #[inline]
            fn minimum() -> Self { 0 }
        }
        impl PathSummary<$integer> for $integer {
            #[inline]
            fn results_in(&self, time: &$integer) -> Option<$integer> { self.checked_add(*time) }
            #[inline]
            fn followed_by(&self, next: &Self) -> Option<Self> { self.checked_add(*next) }
        }
        impl Refines<()> for $integer {
            fn to_inner((): ()) -> Self { 0 }
            fn to_outer(self) {}
            fn summarize(_: Self::Summary) {}
        }
    )*};
}

integer_time!(u32, u64, usize);

impl Timestamp for () {
    type Summary = ();
    fn minimum() {}
}

impl PathSummary<()> for () {
    fn results_in(&self, (): &()) -> Option<()> {
        Some(())
    }
    fn followed_by(&self, (): &()) -> Option<()> {
        Some(())
    }
}

impl<T: Timestamp> Refines<T> for T {
    fn to_inner(outer: T) -> T {
        outer
    }
    fn to_outer(self) -> T {
        self
    }
    fn summarize(path: T::Summary) -> T::Summary {
        path
    }
}

/// A pair under the product order: both coordinates must agree. `(0, 5)` and `(1, 0)` are incomparable. `Ord` is
/// lexicographic. Serves as time (outer scope, coordinate of the nested scope) and as summary.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct Product<A, B> {
    /// The time of the scope around.
    pub outer: A,
    /// The coordinate that the nested scope appends.
    pub inner: B,
}

impl<A, B> Product<A, B> {
    /// Pairs an outer and an inner coordinate.
    #[inline]
    pub const fn new(outer: A, inner: B) -> Self {
        Self { outer, inner }
    }
}

impl<A: Debug, B: Debug> Debug for Product<A, B> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "({:?}, {:?})", self.outer, self.inner)
    }
}

impl<A: PartialOrder, B: PartialOrder> PartialOrder for Product<A, B> {
    // The lexicographic orders of the pair, each coordinate leading once, realise the product of two total orders.
    const DIMENSION: usize = A::DIMENSION.saturating_add(B::DIMENSION);

    #[inline]
    fn less_equal(&self, other: &Self) -> bool {
        self.outer.less_equal(&other.outer) && self.inner.less_equal(&other.inner)
    }

    #[inline]
    fn lower_bound(&self, other: &Self) -> Option<Self> {
        Some(Self::new(self.outer.lower_bound(&other.outer)?, self.inner.lower_bound(&other.inner)?))
    }
}

impl<A: Timestamp, B: Timestamp> Timestamp for Product<A, B> {
    type Summary = Product<A::Summary, B::Summary>;
    fn minimum() -> Self {
        Self::new(A::minimum(), B::minimum())
    }
}

impl<A, B, P, Q> PathSummary<Product<A, B>> for Product<P, Q>
where
    P: PathSummary<A>,
    Q: PathSummary<B>,
{
    #[inline]
    fn results_in(&self, time: &Product<A, B>) -> Option<Product<A, B>> {
        Some(Product::new(self.outer.results_in(&time.outer)?, self.inner.results_in(&time.inner)?))
    }
    #[inline]
    fn followed_by(&self, next: &Self) -> Option<Self> {
        Some(Self::new(self.outer.followed_by(&next.outer)?, self.inner.followed_by(&next.inner)?))
    }
}

impl<A: Timestamp, B: Timestamp> Refines<A> for Product<A, B> {
    fn to_inner(outer: A) -> Self {
        Self::new(outer, B::minimum())
    }
    fn to_outer(self) -> A {
        self.outer
    }
    fn summarize(path: Self::Summary) -> A::Summary {
        path.outer
    }
}

/// The time of a flow: epoch, then slice, lexicographic and therefore totally ordered.
///
/// A product of the two would be unsound here: closing an epoch must close all of its slices.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct FlowTime {
    /// Spark's batch id, or the block number of a local source.
    pub epoch: u64,
    /// One bounded block of input within the epoch.
    pub slice: u32,
}

impl FlowTime {
    /// The time of a slice in an epoch.
    #[inline]
    pub const fn new(epoch: u64, slice: u32) -> Self {
        Self { epoch, slice }
    }
}

impl Debug for FlowTime {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "({}, {})", self.epoch, self.slice)
    }
}

/// The advance of a [`FlowTime`]: with `epochs == 0` the slice grows by `slices`; otherwise the epoch grows and the slice
/// starts again at `slices`. Ordered lexicographically, which is the pointwise order of the functions.
///
/// Where an epoch runs out of slices the result is the start of the next epoch: times of that epoch may still follow, so
/// neither "never" nor the last slice again would be sound (the first loses them, the second lets a loop support itself).
/// A composition forgets where its parts would have run out; it is then earlier than they are, hence safe.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub struct FlowSummary {
    /// Epochs to add.
    pub epochs: u64,
    /// Slices to add within the epoch, or the slice to start at in a later one.
    pub slices: u32,
}

impl FlowSummary {
    /// The advance by a number of epochs and slices.
    #[inline]
    pub const fn new(epochs: u64, slices: u32) -> Self {
        Self { epochs, slices }
    }
}

macro_rules! lexicographic {
    ($($pair:ty),*) => {$(
        impl PartialOrder for $pair {
            const DIMENSION: usize = 1;
            #[inline]
            fn less_equal(&self, other: &Self) -> bool { self <= other }
            #[inline]
            fn less_than(&self, other: &Self) -> bool { self < other }
            #[inline]
            fn lower_bound(&self, other: &Self) -> Option<Self> { Some(*self.min(other)) }
        }
        impl TotalOrder for $pair {}
    )*};
}

lexicographic!(FlowTime, FlowSummary);

impl Timestamp for FlowTime {
    type Summary = FlowSummary;
    #[inline]
    fn minimum() -> Self {
        Self::new(0, 0)
    }
}

impl PathSummary<FlowTime> for FlowSummary {
    #[inline]
    fn results_in(&self, time: &FlowTime) -> Option<FlowTime> {
        if self.epochs == 0 {
            match time.slice.checked_add(self.slices) {
                Some(slice) => Some(FlowTime::new(time.epoch, slice)),
                None => Some(FlowTime::new(time.epoch.checked_add(1)?, 0)),
            }
        } else {
            Some(FlowTime::new(time.epoch.checked_add(self.epochs)?, self.slices))
        }
    }
    #[inline]
    fn followed_by(&self, next: &Self) -> Option<Self> {
        if next.epochs == 0 {
            match self.slices.checked_add(next.slices) {
                Some(slices) => Some(Self::new(self.epochs, slices)),
                None => Some(Self::new(self.epochs.checked_add(1)?, 0)),
            }
        } else {
            Some(Self::new(self.epochs.checked_add(next.epochs)?, next.slices))
        }
    }
}

impl Refines<()> for FlowTime {
    fn to_inner((): ()) -> Self {
        Self::minimum()
    }
    fn to_outer(self) {}
    fn summarize(_: FlowSummary) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn product_times_may_be_incomparable() {
        let (a, b) = (Product::new(0u64, 5u64), Product::new(1u64, 0u64));
        assert!(!a.less_equal(&b) && !b.less_equal(&a));
        assert!(Product::new(0u64, 0u64).less_than(&a));
        assert!(!a.less_than(&a) && a.less_equal(&a));
    }

    #[test]
    fn closing_an_epoch_closes_its_slices() {
        let next = FlowTime::new(4, 0);
        assert!(FlowTime::new(3, u32::MAX).less_than(&next));
        assert_eq!(FlowSummary::new(1, 0).results_in(&FlowTime::new(3, 9)), Some(next));
        assert_eq!(FlowSummary::new(0, 1).results_in(&FlowTime::new(3, u32::MAX)), Some(next));
        assert_eq!(FlowSummary::new(0, 1).results_in(&FlowTime::new(u64::MAX, u32::MAX)), None);
        assert_eq!(FlowSummary::new(1, 0).results_in(&FlowTime::new(u64::MAX, 0)), None);
    }

    #[test]
    fn entering_appends_and_leaving_strips() {
        let inner = <Product<FlowTime, u64> as Refines<FlowTime>>::to_inner(FlowTime::new(2, 7));
        assert_eq!(inner, Product::new(FlowTime::new(2, 7), 0));
        let later = Product::new(inner.outer, 12);
        assert_eq!(<Product<FlowTime, u64> as Refines<FlowTime>>::to_outer(later), FlowTime::new(2, 7));
        let path = Product::new(FlowSummary::new(1, 0), 3);
        assert_eq!(<Product<FlowTime, u64> as Refines<FlowTime>>::summarize(path), FlowSummary::new(1, 0));
    }

    #[test]
    fn dimension_counts_the_coordinates() {
        assert_eq!(<Product<FlowTime, u64>>::DIMENSION, 2);
        assert_eq!(<Product<(), u64>>::DIMENSION, 1);
        assert_eq!(<Product<Product<u64, u64>, u64>>::DIMENSION, 3);
    }
}
