//! A user's aggregate: what it keeps of rows, and what workers do with it, as they do with one in Python.

use std::collections::BTreeMap;

use arrow_schema::{DataType, SchemaRef};
use penstock_plan::EpochEnd;

use super::super::{Bag, Row};
use super::state::{Bin, Value};
use super::{fold, int, number};
use crate::common::Cell;

/// A user's aggregate.
#[derive(Clone, Debug)]
pub(crate) struct Gather {
    /// Key columns of the rows that it takes, in windows with the bounds of these before.
    pub(crate) keys: Vec<usize>,
    pub(crate) windowed: bool,
    pub(crate) sessions: bool,
    /// Without windows: it speaks of each key that an epoch touches, else at the end of input.
    pub(crate) updates: bool,
    pub(crate) names: SchemaRef,
    pub(crate) made: SchemaRef,
}

/// Rows, something of all of them, and the most of any.
#[derive(Clone, Debug, Default, PartialEq)]
pub(in crate::property) struct Gathered([i64; 3]);

impl Gather {
    /// Types of the columns that it makes.
    pub(crate) const MADE: [DataType; 3] = [DataType::Int64, DataType::Int64, DataType::Utf8];

    /// Of a row, without the bounds of a window.
    pub(in crate::property) fn of(row: &[Cell]) -> Gathered {
        let folded = fold(row);
        Gathered([1, folded % 1_009, folded % 100])
    }

    pub(in crate::property) fn merge(one: &Gathered, other: &Gathered) -> Gathered {
        let (Gathered([n, sum, most]), Gathered([more, add, last])) = (one, other);
        Gathered([n + more, (sum + add) % 1_009, *most.max(last)])
    }

    pub(in crate::property) fn finish(Gathered([n, sum, most]): &Gathered) -> Row {
        let word = ["", "b", "ccc", "more than a word holds"][*most as usize % 4];
        vec![int(*n), if sum % 11 == 0 { Cell::Null } else { int(*sum) }, Cell::text(word)]
    }

    fn bounds(&self) -> usize {
        if self.windowed { 2 } else { 0 }
    }
}

/// Bounds of a window; without windows nothing.
type Window = Option<(i64, i64)>;

/// What a key has, by window.
#[derive(Clone, Debug, Default)]
pub(super) struct Windows(BTreeMap<Window, Gathered>);

impl Value for Windows {
    fn put(&self) -> Vec<i64> {
        let numbers = self.0.iter().flat_map(|(window, Gathered([n, sum, most]))| {
            let (start, end) = window.unwrap_or_default();
            [i64::from(window.is_some()), start, end, *n, *sum, *most]
        });
        numbers.collect()
    }

    fn read(numbers: &[i64]) -> Self {
        let window = |part: &[i64]| (part[0] == 1).then_some((part[1], part[2]));
        Self(numbers.chunks(6).map(|part| (window(part), Gathered([part[3], part[4], part[5]]))).collect())
    }
}

impl Bin<Windows> {
    pub(super) fn take(&mut self, gather: &Gather, rows: &[Row]) {
        for row in rows {
            let (bounds, rest) = row.split_at(gather.bounds());
            let mut window = match bounds {
                [start, end] => Some((number(start).unwrap(), number(end).unwrap())),
                _ => None,
            };
            let key: Row = gather.keys.iter().map(|at| rest[*at].clone()).collect();
            let Windows(windows) = self.change(&key);
            let meets = |other: &Window| match (window, other) {
                (Some((start, end)), Some((other, last))) if gather.sessions => start <= *last && *other <= end,
                _ => window == *other,
            };
            let met: Vec<Window> = windows.keys().copied().filter(meets).collect();
            let mut gathered = Gather::of(rest);
            for other in met {
                gathered = Gather::merge(&windows.remove(&other).unwrap(), &gathered);
                let both = |(one, other): ((i64, i64), (i64, i64))| (one.0.min(other.0), one.1.max(other.1));
                window = window.zip(other).map(both);
            }
            windows.insert(window, gathered);
            if gather.updates && !self.waiting.contains(&key) {
                self.waiting.push(key);
            }
        }
    }

    pub(super) fn end_epoch(&mut self, gather: &Gather, end: &EpochEnd) -> Bag {
        let ended = end.after_us == Some(i64::MAX) && end.before_us != Some(i64::MAX);
        let touched = std::mem::take(&mut self.waiting);
        let mut made = Bag::new();
        if !gather.windowed {
            let keys = match (gather.updates, ended) {
                (true, _) => touched,
                (false, true) => self.keys.keys().cloned().collect(),
                (false, false) => Vec::new(),
            };
            made.extend(keys.into_iter().map(|key| {
                let row = Gather::finish(&self.keys[&key].0[&None]);
                [key, row].concat()
            }));
            return made;
        }
        let Some(after) = end.after_us else { return made };
        // A row at the very end of a session would still be of it.
        let last = after - i64::from(gather.sessions);
        let over = |window: &Window| window.unwrap().1.saturating_mul(1_000) <= last;
        for key in self.keys.keys().cloned().collect::<Vec<_>>() {
            if !self.keys[&key].0.keys().any(over) {
                continue;
            }
            let Windows(windows) = self.change(&key);
            for (window, gathered) in windows.extract_if(.., |window, _| over(window)) {
                let (start, end) = window.unwrap();
                made.push([vec![int(start), int(end)], key.clone(), Gather::finish(&gathered)].concat());
            }
            if windows.is_empty() {
                self.keys.remove(&key);
            }
        }
        made
    }
}
