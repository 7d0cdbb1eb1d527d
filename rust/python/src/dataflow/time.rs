//! Times as Python sees them, and the Rust types behind them.
//!
//! At the root a time is an int; a nested scope appends a coordinate, so a time there is a tuple, outermost first, under the
//! product order. Rust sees four types, whatever the depth: `u64` and a pair, whose orders of dimension one and two the progress
//! tracking exploits, and from the third coordinate on [`Nest`], of any depth.
//!
//! A [`Nest`] keeps its coordinates innermost first without zeros at the end, so that all times with the same coordinates are
//! equal, the least is empty whatever the depth, entering a scope puts a zero in front, and leaving takes one away: none needs
//! to know the depth. Its parameter alternates from scope to scope, because a scope's times must be of another type than
//! those of the scope around it.

use std::cmp::Ordering;
use std::fmt;

use penstock_progress::order::PartialOrder;
use penstock_progress::timestamp::{PathSummary, Product, Refines, Timestamp};
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use crate::errors::{self, Kind};

/// Coordinates of a time, outermost first.
pub(crate) type Coordinates = SmallVec<[u64; 4]>;

/// A time with three coordinates or more, and the summary of a path: see the module.
#[derive(Clone, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(from = "Vec<u64>", into = "Vec<u64>")]
pub(crate) struct Nest<const ODD: bool>(SmallVec<[u64; 4]>);

impl<const ODD: bool> Nest<ODD> {
    /// Of coordinates innermost first.
    fn of(mut coordinates: SmallVec<[u64; 4]>) -> Self {
        while coordinates.last() == Some(&0) {
            coordinates.pop();
        }
        Nest(coordinates)
    }

    /// The coordinate of the innermost scope.
    pub(crate) fn innermost(&self) -> u64 {
        self.at(0)
    }

    /// This time with another coordinate of the innermost scope.
    pub(crate) fn with_innermost(mut self, coordinate: u64) -> Self {
        match self.0.first_mut() {
            Some(first) => *first = coordinate,
            None => self.0.push(coordinate),
        }
        Nest::of(self.0)
    }

    fn at(&self, index: usize) -> u64 {
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
pub(crate) type Pair = Product<u64, u64>;

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
    };
}

refine!(false in true);
refine!(true in false);

/// A type of time that Python's ints and tuples stand for.
pub(crate) trait Time: Timestamp {
    /// The time with these coordinates, outermost first.
    fn from_coordinates(coordinates: &[u64]) -> Self;
    /// All coordinates, outermost first.
    fn coordinates(&self, depth: usize) -> Coordinates;
    /// The path that advances the innermost coordinate.
    fn advance(by: u64) -> Self::Summary;
}

impl Time for u64 {
    fn from_coordinates(coordinates: &[u64]) -> Self {
        coordinates[0]
    }
    fn coordinates(&self, _: usize) -> Coordinates {
        SmallVec::from_slice(&[*self])
    }
    fn advance(by: u64) -> u64 {
        by
    }
}

impl Time for Pair {
    fn from_coordinates(coordinates: &[u64]) -> Self {
        Pair::new(coordinates[0], coordinates[1])
    }
    fn coordinates(&self, _: usize) -> Coordinates {
        SmallVec::from_slice(&[self.outer, self.inner])
    }
    fn advance(by: u64) -> Pair {
        Pair::new(0, by)
    }
}

impl<const ODD: bool> Time for Nest<ODD> {
    fn from_coordinates(coordinates: &[u64]) -> Self {
        Nest::of(coordinates.iter().rev().copied().collect())
    }
    fn coordinates(&self, depth: usize) -> Coordinates {
        (0..depth).rev().map(|index| self.at(index)).collect()
    }
    fn advance(by: u64) -> Self {
        Nest::of(SmallVec::from_slice(&[by]))
    }
}

/// Python's form of a time.
pub(crate) fn to_python<'py, T: Time>(py: Python<'py>, time: &T, depth: usize) -> PyResult<Bound<'py, PyAny>> {
    let coordinates = time.coordinates(depth);
    match &coordinates[..] {
        [only] => Ok(only.into_pyobject(py)?.into_any()),
        several => Ok(PyTuple::new(py, several)?.into_any()),
    }
}

/// The coordinates of the time that Python means, in a scope of this depth. May run Python code, such as `__index__`: nothing
/// is borrowed meanwhile.
///
/// # Errors
/// `TimeError` that names the value, and what a time is in this scope.
pub(crate) fn parse(value: &Bound<'_, PyAny>, depth: usize) -> PyResult<Coordinates> {
    let coordinate = |value: &Bound<'_, PyAny>| value.extract::<u64>().ok();
    let found: Option<Coordinates> = match value.cast::<PyTuple>() {
        Ok(tuple) if depth > 1 && tuple.len() == depth => tuple.iter().map(|value| coordinate(&value)).collect(),
        Err(_) if depth == 1 => coordinate(value).map(|only| SmallVec::from_slice(&[only])),
        _ => None,
    };
    found.ok_or_else(|| foreign(value, depth))
}

/// As [`parse`], as a time.
pub(crate) fn from_python<T: Time>(value: &Bound<'_, PyAny>, depth: usize) -> PyResult<T> {
    Ok(T::from_coordinates(&parse(value, depth)?))
}

fn foreign(value: &Bound<'_, PyAny>, depth: usize) -> PyErr {
    let py = value.py();
    let shown = value.repr().map_or_else(|_| errors::type_name(value), |text| text.to_string());
    let wanted = match depth {
        1 => "an int from 0 to 2**64 - 1".to_owned(),
        depth => format!("a tuple of {depth} ints from 0 to 2**64 - 1, outermost scope first"),
    };
    errors::raise_with(py, Kind::Time, &format!("{shown} is not a time of this scope, which is {wanted}"), |facts| {
        facts.set_item("asked", value)?;
        facts.set_item("depth", depth)
    })
}

/// `TimeError`: `asked` is not in advance of `held`, which `who` holds.
pub(crate) fn backward<T: Time>(py: Python<'_>, who: &str, held: &T, asked: &T, depth: usize) -> PyErr {
    let build = || -> PyResult<PyErr> {
        let (held, asked) = (to_python(py, held, depth)?, to_python(py, asked, depth)?);
        let message = format!("{who} at time {held} cannot go to {asked}, which is not at or after it");
        Ok(errors::raise_with(py, Kind::Time, &message, |facts| {
            facts.set_item("held", &held)?;
            facts.set_item("asked", &asked)
        }))
    };
    build().unwrap_or_else(|error| error)
}

/// One value per type of time, such as the streams of scopes of any depth.
pub(crate) enum Level<A, B, C, D> {
    Root(A),
    Pair(B),
    Odd(C),
    Even(D),
}

/// Runs one generic body on the value of a level.
macro_rules! each {
    ($level:expr, $value:ident => $body:expr) => {
        match $level {
            $crate::dataflow::time::Level::Root($value) => $body,
            $crate::dataflow::time::Level::Pair($value) => $body,
            $crate::dataflow::time::Level::Odd($value) => $body,
            $crate::dataflow::time::Level::Even($value) => $body,
        }
    };
}

/// As [`each`], giving a value of the same level.
macro_rules! lift {
    ($level:expr, $value:ident => $body:expr) => {
        match $level {
            $crate::dataflow::time::Level::Root($value) => $crate::dataflow::time::Level::Root($body),
            $crate::dataflow::time::Level::Pair($value) => $crate::dataflow::time::Level::Pair($body),
            $crate::dataflow::time::Level::Odd($value) => $crate::dataflow::time::Level::Odd($body),
            $crate::dataflow::time::Level::Even($value) => $crate::dataflow::time::Level::Even($body),
        }
    };
}

/// As [`each`] for two values, which must be of one level; the last arm is for those that are not.
macro_rules! both {
    ($left:expr, $right:expr, $a:ident, $b:ident => $body:expr, else $other:expr) => {
        match ($left, $right) {
            ($crate::dataflow::time::Level::Root($a), $crate::dataflow::time::Level::Root($b)) => $body,
            ($crate::dataflow::time::Level::Pair($a), $crate::dataflow::time::Level::Pair($b)) => $body,
            ($crate::dataflow::time::Level::Odd($a), $crate::dataflow::time::Level::Odd($b)) => $body,
            ($crate::dataflow::time::Level::Even($a), $crate::dataflow::time::Level::Even($b)) => $body,
            _ => $other,
        }
    };
}

pub(crate) use {both, each, lift};

#[cfg(test)]
mod tests {
    use super::*;

    type Deep = Nest<true>;

    fn nest(coordinates: [u64; 3]) -> Deep {
        Deep::from_coordinates(&coordinates)
    }

    fn grid() -> Vec<[u64; 3]> {
        (0..27).map(|code| [code / 9, code / 3 % 3, code % 3]).collect()
    }

    #[test]
    fn orders_are_those_of_the_padded_coordinates() {
        for left in grid() {
            assert_eq!(nest(left).coordinates(3)[..], left);
            for right in grid() {
                let product = left.iter().zip(&right).all(|(l, r)| l <= r);
                assert_eq!(nest(left).less_equal(&nest(right)), product, "{left:?} {right:?}");
                assert_eq!(nest(left).cmp(&nest(right)), left.cmp(&right));
                let sum = [left[0] + right[0], left[1] + right[1], left[2] + right[2]];
                assert_eq!(nest(left).results_in(&nest(right)), Some(nest(sum)));
            }
        }
        assert_eq!(nest([u64::MAX, 0, 0]).sum(&nest([1, 0, 0])), None);
    }

    #[test]
    fn entering_appends_a_zero_and_leaving_strips() {
        for [a, b, c] in grid() {
            let inner = <Deep as Refines<Pair>>::to_inner(Pair::new(a, b));
            assert_eq!(inner, nest([a, b, 0]));
            assert_eq!(Refines::<Pair>::to_outer(nest([a, b, c])), Pair::new(a, b));
            let deeper = <Nest<false> as Refines<Deep>>::to_inner(nest([a, b, c]));
            assert_eq!(deeper.coordinates(4)[..], [a, b, c, 0]);
            let moved = Nest::<false>::advance(7).results_in(&deeper).unwrap();
            assert_eq!(moved.coordinates(4)[..], [a, b, c, 7]);
            assert_eq!(Refines::<Deep>::to_outer(moved.clone()), nest([a, b, c]));
            assert_eq!((moved.innermost(), moved.with_innermost(0)), (7, deeper));
        }
    }

    #[test]
    fn bytes_of_a_peer_are_brought_into_form() {
        let bytes = Vec::from(Nest::<true>::from(vec![3, 0, 0]));
        assert_eq!(bytes, [3]);
        assert_eq!(Nest::<true>::from(vec![0, 0]), Nest::minimum());
    }
}
