//! Times as Python sees them, and the Rust types behind them.
//!
//! At the root a time is an int; a nested scope appends a coordinate, so a time there is a tuple, outermost first, under the
//! product order. Rust sees four types, whatever the depth: `u64` and a pair, whose orders of dimension one and two the progress
//! tracking exploits, and from the third coordinate on [`Nest`], of any depth.
//!
//! Departure: inside, times are innermost first, without trailing zeros: the two common depths are plain types, any
//! other depth is one more.

pub(crate) use penstock_progress::nest::Nest;
use penstock_progress::timestamp::{Product, Timestamp};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyTuple};
use smallvec::SmallVec;

use crate::errors::{self, Kind, Later};

/// A pair, which is the time of a scope in a scope.
pub(crate) type Pair = Product<u64, u64>;

/// Coordinates of a time, outermost first.
pub(crate) type Coordinates = SmallVec<[u64; 4]>;

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
    shown(py, &time.coordinates(depth))
}

/// Python's form of the time with these coordinates. Makes objects, and with them the collector may run code of anybody's.
pub(crate) fn shown<'py>(py: Python<'py>, coordinates: &[u64]) -> PyResult<Bound<'py, PyAny>> {
    match coordinates {
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
    // True is 1 to Python, and hardly meant.
    let coordinate =
        |value: &Bound<'_, PyAny>| if value.is_instance_of::<PyBool>() { None } else { value.extract::<u64>().ok() };
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
pub(crate) fn backward<T: Time>(who: &'static str, held: &T, asked: &T, depth: usize) -> Later {
    let (held, asked) = (held.coordinates(depth), asked.coordinates(depth));
    let build = move |py: Python<'_>| -> PyResult<PyErr> {
        let (held, asked) = (shown(py, &held)?, shown(py, &asked)?);
        let message = format!("{who} at time {held} cannot go to {asked}, which is not at or after it");
        Ok(errors::raise_with(py, Kind::Time, &message, |facts| {
            facts.set_item("held", &held)?;
            facts.set_item("asked", &asked)
        }))
    };
    Later::new(move |py| build(py).unwrap_or_else(|error| error))
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
