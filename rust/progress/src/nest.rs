//! Times of scopes nested to any depth, which is known only when a dataflow is built.
//!
//! A nested scope appends a coordinate, under the product order. A [`Nest`] keeps coordinates innermost first without zeros
//! at the end, so that all times with the same coordinates are equal, the least is empty whatever the depth, entering a scope
//! puts a zero in front, and leaving takes one away: none needs to know the depth. Its parameter alternates from scope to
//! scope, because a scope's times must be of another type than those of the scope around it.
//!
//! It serves in two ways: as all coordinates of a time from the third on (around it a pair of integers), and as those that
//! scopes append to the [`FlowTime`] of a flow.

use std::cmp::Ordering;
use std::fmt;

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use crate::order::PartialOrder;
use crate::timestamp::{FlowSummary, FlowTime, PathSummary, Product, Refines, Timestamp};

/// Coordinates of nested scopes, as a time and as the summary of a path: see the module.
#[derive(Clone, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(from = "Vec<u64>", into = "Vec<u64>")]
pub struct Nest<const ODD: bool>(SmallVec<[u64; 4]>);

impl<const ODD: bool> Nest<ODD> {
    /// Of coordinates innermost first.
    pub fn of(mut coordinates: SmallVec<[u64; 4]>) -> Self {
        while coordinates.last() == Some(&0) {
            coordinates.pop();
        }
        Nest(coordinates)
    }

    /// The coordinate of the innermost scope.
    pub fn innermost(&self) -> u64 {
        self.at(0)
    }

    /// This time with another coordinate of the innermost scope.
    pub fn with_innermost(mut self, coordinate: u64) -> Self {
        match self.0.first_mut() {
            Some(first) => *first = coordinate,
            None => self.0.push(coordinate),
        }
        Nest::of(self.0)
    }

    /// A coordinate, counted from the innermost scope.
    pub fn at(&self, index: usize) -> u64 {
        self.0.get(index).copied().unwrap_or(0)
    }

    fn enter<const OTHER: bool>(&self) -> Nest<OTHER> {
        match self.0.is_empty() {
            true => Nest::default(),
            false => Nest(std::iter::once(0).chain(self.0.iter().copied()).collect()),
        }
    }

    fn leave<const OTHER: bool>(&self) -> Nest<OTHER> {
        Nest(self.0.iter().skip(1).copied().collect())
    }

    fn sum(&self, other: &Self) -> Option<Self> {
        let length = self.0.len().max(other.0.len());
        (0..length).map(|index| self.at(index).checked_add(other.at(index))).collect::<Option<_>>().map(Nest)
    }
}

impl<const ODD: bool> From<Vec<u64>> for Nest<ODD> {
    fn from(coordinates: Vec<u64>) -> Self {
        Nest::of(coordinates.into())
    }
}

impl<const ODD: bool> From<Nest<ODD>> for Vec<u64> {
    fn from(nest: Nest<ODD>) -> Self {
        nest.0.into_vec()
    }
}

impl<const ODD: bool> fmt::Debug for Nest<ODD> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().rev()).finish()
    }
}

impl<const ODD: bool> PartialOrder for Nest<ODD> {
    fn less_equal(&self, other: &Self) -> bool {
        self.0.len() <= other.0.len() && self.0.iter().zip(&other.0).all(|(own, theirs)| own <= theirs)
    }

    /// Of each coordinate the lesser one: zero where one of them has none.
    fn lower_bound(&self, other: &Self) -> Option<Self> {
        Some(Nest::of(self.0.iter().zip(&other.0).map(|(own, theirs)| *own.min(theirs)).collect()))
    }
}

/// Lexicographic from the outermost coordinate: what is longer has a greater one there, the others being zero.
impl<const ODD: bool> Ord for Nest<ODD> {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.len().cmp(&other.0.len()).then_with(|| self.0.iter().rev().cmp(other.0.iter().rev()))
    }
}

impl<const ODD: bool> PartialOrd for Nest<ODD> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<const ODD: bool> Timestamp for Nest<ODD> {
    type Summary = Self;
    fn minimum() -> Self {
        Nest::default()
    }
}

impl<const ODD: bool> PathSummary<Nest<ODD>> for Nest<ODD> {
    fn results_in(&self, time: &Self) -> Option<Self> {
        self.sum(time)
    }
    fn followed_by(&self, next: &Self) -> Option<Self> {
        self.sum(next)
    }
}

/// A pair, which is the time of a scope in a scope.
type Pair = Product<u64, u64>;

impl Refines<Pair> for Nest<true> {
    fn to_inner(outer: Pair) -> Self {
        Nest::of(SmallVec::from_slice(&[0, outer.inner, outer.outer]))
    }
    fn to_outer(self) -> Pair {
        Pair::new(self.at(2), self.at(1))
    }
    fn summarize(path: Self) -> Pair {
        Refines::<Pair>::to_outer(path)
    }
}

macro_rules! refine {
    ($inner:literal in $outer:literal) => {
        impl Refines<Nest<$outer>> for Nest<$inner> {
            fn to_inner(outer: Nest<$outer>) -> Self {
                outer.enter()
            }
            fn to_outer(self) -> Nest<$outer> {
                self.leave()
            }
            fn summarize(path: Self) -> Nest<$outer> {
                path.leave()
            }
        }

        impl Refines<Product<FlowTime, Nest<$outer>>> for Product<FlowTime, Nest<$inner>> {
            fn to_inner(time: Product<FlowTime, Nest<$outer>>) -> Self {
                Product::new(time.outer, time.inner.enter())
            }
            fn to_outer(self) -> Product<FlowTime, Nest<$outer>> {
                Product::new(self.outer, self.inner.leave())
            }
            fn summarize(path: Product<FlowSummary, Nest<$inner>>) -> Product<FlowSummary, Nest<$outer>> {
                Product::new(path.outer, path.inner.leave())
            }
        }
    };
}

refine!(false in true);
refine!(true in false);

#[cfg(test)]
mod tests {
    use super::*;

    /// Coordinates outermost first.
    fn nest<const ODD: bool>(coordinates: &[u64]) -> Nest<ODD> {
        Nest::of(coordinates.iter().rev().copied().collect())
    }

    fn grid() -> Vec<[u64; 3]> {
        (0..27).map(|code| [code / 9, code / 3 % 3, code % 3]).collect()
    }

    #[test]
    fn orders_are_those_of_the_padded_coordinates() {
        type Deep = Nest<true>;
        for left in grid() {
            let deep: Deep = nest(&left);
            assert_eq!([deep.at(2), deep.at(1), deep.at(0)], left);
            for right in grid() {
                let product = left.iter().zip(&right).all(|(l, r)| l <= r);
                assert_eq!(deep.less_equal(&nest(&right)), product, "{left:?} {right:?}");
                assert_eq!(deep.cmp(&nest(&right)), left.cmp(&right));
                let sum = [left[0] + right[0], left[1] + right[1], left[2] + right[2]];
                assert_eq!(deep.results_in(&nest(&right)), Some(nest(&sum)));
            }
        }
        assert_eq!(nest::<true>(&[u64::MAX, 0, 0]).sum(&nest(&[1, 0, 0])), None);
    }

    #[test]
    fn entering_appends_a_zero_and_leaving_strips() {
        type Flow<const ODD: bool> = Product<FlowTime, Nest<ODD>>;
        for [a, b, c] in grid() {
            let inner = <Nest<true> as Refines<Pair>>::to_inner(Pair::new(a, b));
            assert_eq!(inner, nest(&[a, b, 0]));
            assert_eq!(Refines::<Pair>::to_outer(nest::<true>(&[a, b, c])), Pair::new(a, b));
            let deeper = <Nest<false> as Refines<Nest<true>>>::to_inner(nest(&[a, b, c]));
            let moved = nest::<false>(&[7]).results_in(&deeper).unwrap();
            assert_eq!(moved, nest(&[a, b, c, 7]));
            assert_eq!(Refines::<Nest<true>>::to_outer(moved.clone()), nest(&[a, b, c]));
            assert_eq!((moved.innermost(), moved.with_innermost(0)), (7, deeper));
            let flow = FlowTime::new(a, b as u32);
            let first = <Flow<true> as Refines<FlowTime>>::to_inner(flow);
            let second = <Flow<false> as Refines<Flow<true>>>::to_inner(Product::new(flow, nest(&[c])));
            assert_eq!((first, &second), (Product::new(flow, nest(&[])), &Product::new(flow, nest(&[c, 0]))));
            assert_eq!(Refines::<Flow<true>>::to_outer(second), Product::new(flow, nest(&[c])));
            let path = Product::new(FlowSummary::new(0, 1), nest::<false>(&[c, 5]));
            assert_eq!(
                <Flow<false> as Refines<Flow<true>>>::summarize(path),
                Product::new(FlowSummary::new(0, 1), nest(&[c]))
            );
        }
    }

    #[test]
    fn bytes_of_a_peer_are_brought_into_form() {
        let bytes = Vec::from(Nest::<true>::from(vec![3, 0, 0]));
        assert_eq!(bytes, [3]);
        assert_eq!(Nest::<true>::from(vec![0, 0]), Nest::minimum());
    }
}
