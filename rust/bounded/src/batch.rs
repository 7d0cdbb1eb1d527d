//! The coordinate that a bounded scope appends to times: the number of a batch.
//!
//! Batches of one outer time are numbered 0, 1, 2, ... on each worker; the workers share the numbers, so batch 3 of an outer time is
//! what all workers admit as their fourth. It is finished once the probe has passed it, which is when none of them has anything
//! of it or of an earlier one left.
//!
//! [`Batch`] cannot be advanced along a path (its summary says nothing), unlike a plain integer: a loop that advanced it would move data
//! out of the batch that it was admitted with, and the window would open too early. So a loop in the body needs a scope of its
//! own, and a graph without one is refused.
//!
//! Departure: no path advances the batch, as said above.

use std::fmt;

use penstock_progress::nest::Nest;
use penstock_progress::order::{PartialOrder, TotalOrder};
use penstock_progress::timestamp::{FlowTime, PathSummary, Product, Refines, Timestamp};
use serde::{Deserialize, Serialize};

/// Number of a batch within one outer time.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct Batch(pub u64);

/// Times of a bounded scope: those of the scope around it, and the batch.
pub type Batched<T> = Product<T, Batch>;

impl fmt::Debug for Batch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "batch {}", self.0)
    }
}

impl PartialOrder for Batch {
    const DIMENSION: usize = 1;
    #[inline]
    fn less_equal(&self, other: &Self) -> bool {
        self <= other
    }
    #[inline]
    fn less_than(&self, other: &Self) -> bool {
        self < other
    }
    #[inline]
    fn lower_bound(&self, other: &Self) -> Option<Self> {
        Some(*self.min(other))
    }
}

impl TotalOrder for Batch {}

impl Timestamp for Batch {
    type Summary = ();
    fn minimum() -> Self {
        Batch(0)
    }
}

impl PathSummary<Batch> for () {
    #[inline]
    fn results_in(&self, time: &Batch) -> Option<Batch> {
        Some(*time)
    }
    #[inline]
    fn followed_by(&self, (): &()) -> Option<()> {
        Some(())
    }
}

/// Times of a nested scope whose last coordinate can number batches.
///
/// Law: for `a <= b`, `outer` and `number` as given come back from [`BatchTime::number`] and [`Refines::to_outer`], and
/// `numbered(outer, a)` is at or before `numbered(outer, b)`; number 0 is [`Refines::to_inner`].
pub trait BatchTime<O: Timestamp>: Refines<O> {
    /// The time of a batch.
    fn numbered(outer: O, number: u64) -> Self;
    /// The batch of a time.
    fn number(&self) -> u64;
    /// The batch in words.
    fn show(&self) -> String {
        format!("{self:?}")
    }
}

impl<O: Timestamp> BatchTime<O> for Product<O, Batch> {
    fn numbered(outer: O, number: u64) -> Self {
        Product::new(outer, Batch(number))
    }
    fn number(&self) -> u64 {
        self.inner.0
    }
}

/// For scopes whose times must be plain integers. A loop that advances the batch is then a mistake that nobody finds.
impl<O: Timestamp> BatchTime<O> for Product<O, u64> {
    fn numbered(outer: O, number: u64) -> Self {
        Product::new(outer, number)
    }
    fn number(&self) -> u64 {
        self.inner
    }
}

/// For scopes of any depth. As for plain integers, a loop needs a scope of its own.
macro_rules! nested {
    ($inner:ty => $($outer:ty),*) => {$(
        impl BatchTime<$outer> for $inner {
            fn numbered(outer: $outer, number: u64) -> Self {
                <Self as Refines<$outer>>::to_inner(outer).with_innermost(number)
            }
            fn number(&self) -> u64 {
                self.innermost()
            }
        }
    )*};
}

nested!(Nest<true> => Product<u64, u64>, Nest<false>);
nested!(Nest<false> => Nest<true>);

impl BatchTime<FlowTime> for Product<FlowTime, Nest<true>> {
    fn numbered(outer: FlowTime, number: u64) -> Self {
        Product::new(outer, Nest::minimum().with_innermost(number))
    }
    fn number(&self) -> u64 {
        self.inner.innermost()
    }
    fn show(&self) -> String {
        show(self.outer, &self.inner)
    }
}

/// Hosts number the slices with data from 2^31 on; the coordinates in between are those of the scopes around.
fn show<const ODD: bool>(time: FlowTime, inner: &Nest<ODD>) -> String {
    let around: Vec<u64> = Vec::from(inner.clone()).into_iter().skip(1).rev().collect();
    let around = if around.is_empty() { String::new() } else { format!(", {around:?}") };
    format!("batch {} of epoch {}, slice {}{around}", inner.innermost(), time.epoch, time.slice & (u32::MAX >> 1))
}

/// As `nested`, for the scopes of a flow.
macro_rules! nested_in_flow {
    ($inner:literal in $outer:literal) => {
        impl BatchTime<Product<FlowTime, Nest<$outer>>> for Product<FlowTime, Nest<$inner>> {
            fn numbered(outer: Product<FlowTime, Nest<$outer>>, number: u64) -> Self {
                let Product { outer, inner } = <Self as Refines<Product<FlowTime, Nest<$outer>>>>::to_inner(outer);
                Product::new(outer, inner.with_innermost(number))
            }
            fn number(&self) -> u64 {
                self.inner.innermost()
            }
            fn show(&self) -> String {
                show(self.outer, &self.inner)
            }
        }
    };
}

nested_in_flow!(true in false);
nested_in_flow!(false in true);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_of_a_flow_are_shown_in_words() {
        type Outer = Product<FlowTime, Nest<true>>;
        type Inner = Product<FlowTime, Nest<false>>;
        let outer = Outer::numbered(FlowTime::new(3, (1 << 31) + 7), 5);
        assert_eq!(BatchTime::<FlowTime>::show(&outer), "batch 5 of epoch 3, slice 7");
        let inner = Inner::numbered(outer.clone(), 2);
        assert_eq!((BatchTime::<Outer>::number(&inner), Refines::<Outer>::to_outer(inner.clone())), (2, outer));
        assert_eq!(BatchTime::<Outer>::show(&inner), "batch 2 of epoch 3, slice 7, [5]");
    }

    fn lawful<I: BatchTime<u64>>() {
        assert_eq!(I::numbered(7, 0), I::to_inner(7));
        for (low, high) in [(0, 0), (0, 5), (5, 6), (6, u64::MAX)] {
            let (one, two) = (I::numbered(7, low), I::numbered(7, high));
            assert!(one.less_equal(&two) && one <= two);
            assert_eq!((two.number(), two.to_outer()), (high, 7));
        }
        assert!(!I::numbered(7, 1).less_equal(&I::numbered(8, 0)));
    }

    #[test]
    fn numbers_come_back_in_order() {
        lawful::<Product<u64, Batch>>();
        lawful::<Product<u64, u64>>();
    }

    #[test]
    fn no_path_changes_the_batch() {
        type Summary = <Batched<u64> as Timestamp>::Summary;
        let path: Summary = Product::new(3, ());
        assert_eq!(path.results_in(&Product::new(1, Batch(9))), Some(Product::new(4, Batch(9))));
        let twice = PathSummary::<Batched<u64>>::followed_by(&path, &path);
        assert_eq!(twice, Some(Product::new(6, ())));
    }
}
