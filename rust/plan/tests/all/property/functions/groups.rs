//! A function of the groups of an epoch with a state and a timeout by key, and what workers do with it, as they do with one in Python.

use std::collections::BTreeMap;

use arrow_schema::SchemaRef;
use penstock_plan::EpochEnd;

use super::super::{Bag, Row};
use super::state::{Bin, Value, option, read_option};
use super::{fold, int, number};
use crate::common::Cell;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Timeout {
    None,
    Clock,
    EventTime,
}

/// A function of groups. It takes rows of the plain columns and makes such.
#[derive(Clone, Debug)]
pub(crate) struct Groups {
    /// The key, and of those a text if there are two.
    pub(crate) keys: Vec<usize>,
    pub(crate) names: SchemaRef,
    /// Whether the order of a key's rows changes what it makes.
    pub(crate) ordered: bool,
    pub(crate) timeout: Timeout,
    /// Milliseconds of a step of event time.
    pub(crate) unit: i64,
}

/// What a key has between calls: a state, and when the function is called though there are no rows.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::property) struct Group {
    pub(in crate::property) state: Option<i64>,
    pub(in crate::property) timeout: Option<i64>,
}

impl Group {
    pub(in crate::property) fn is_nothing(&self) -> bool {
        self.state.is_none() && self.timeout.is_none()
    }
}

impl Value for Group {
    fn put(&self) -> Vec<i64> {
        [option(self.state), option(self.timeout)].concat()
    }

    fn read(numbers: &[i64]) -> Self {
        Self { state: read_option(numbers), timeout: read_option(&numbers[2..]) }
    }
}

/// What a call is told beside its rows: times in milliseconds, in a batch job no watermark, but one before all.
#[derive(Clone, Copy, Debug)]
pub(in crate::property) struct Moment {
    pub(in crate::property) watermark: i64,
    pub(in crate::property) clock: i64,
}

/// In a batch job.
pub(in crate::property) const BATCH: Moment = Moment { watermark: -1, clock: 0 };

impl Groups {
    pub(in crate::property) fn key(&self, row: &Row) -> Row {
        self.keys.iter().map(|at| row[*at].clone()).collect()
    }

    /// What the function makes of the rows of a key, or, of none, of its timeout; and what is left of the key.
    pub(in crate::property) fn call(
        &self,
        key: &Row,
        rows: &[Row],
        state: Option<i64>,
        moment: Moment,
    ) -> (Bag, Group) {
        let words = rows.iter().map(|row| fold(row) % 1_009);
        let (before, count) = (state.unwrap_or(7), rows.len() as i64);
        let now = match self.ordered {
            _ if rows.is_empty() => before * 31 + 5,
            true => words.fold(before, |now, word| (now * 31 + word) % 1_009),
            false => before * 31 + words.sum::<i64>() + count,
        };
        let now = now % 1_009;
        let last = rows.iter().filter_map(|row| number(&row[1])).max();
        let time = match rows.is_empty() {
            true => (now % 2 == 0).then_some(moment.watermark),
            false => last,
        };
        let text = key.get(1).cloned().unwrap_or_else(|| Cell::text(if rows.is_empty() { "over" } else { "group" }));
        let row = |value: i64| vec![key[0].clone(), time.map_or(Cell::Null, int), int(value), text.clone()];
        let mut made = Bag::new();
        if now % 4 != 0 {
            made.push(row((now + moment.clock + moment.watermark).rem_euclid(97)));
        }
        if now % 5 == 1 {
            made.push(row(now));
        }
        let later = match self.timeout {
            Timeout::None => None,
            Timeout::Clock => Some(moment.clock + 50 + now % 100),
            Timeout::EventTime => Some(moment.watermark.max(last.unwrap_or(0)).max(0) + 1 + now % 20 * self.unit),
        };
        let state = match now % 7 {
            0 => None,
            1 => state,
            _ => Some(now),
        };
        (made, Group { state, timeout: later.filter(|_| now % 3 != 0) })
    }
}

impl Bin<Group> {
    /// `seen` is told of what the function sees, or makes of timeouts.
    pub(super) fn end_epoch(&mut self, groups: &Groups, end: &EpochEnd, seen: &mut dyn FnMut(&Row)) -> Bag {
        let mut by_key: BTreeMap<Row, Bag> = BTreeMap::new();
        for row in std::mem::take(&mut self.waiting) {
            seen(&row);
            by_key.entry(groups.key(&row)).or_default().push(row);
        }
        let mut made = Bag::new();
        let Some(clock) = end.clock_ms else {
            for (key, rows) in by_key {
                made.extend(self.call(groups, &key, &rows, BATCH));
            }
            return made;
        };
        let ms = |us: i64| us.div_euclid(1_000);
        let before = end.before_us.map_or(0, |us| ms(us).max(0));
        let ended = end.after_us == Some(i64::MAX);
        let after = end.after_us.filter(|_| !ended).map_or(before, |us| before.max(ms(us)));
        for (key, rows) in by_key {
            made.extend(self.call(groups, &key, &rows, Moment { watermark: before, clock }));
        }
        let (limit, watermark) = match groups.timeout {
            Timeout::Clock => (clock, before),
            Timeout::EventTime if ended => (i64::MAX, after),
            Timeout::EventTime => (after, after),
            Timeout::None => return made,
        };
        let is_due = |(_, group): &(&Row, &Group)| group.timeout.is_some_and(|timeout| timeout < limit);
        let due: Vec<Row> = self.keys.iter().filter(is_due).map(|(key, _)| key.clone()).collect();
        for key in due {
            let rows = self.call(groups, &key, &[], Moment { watermark, clock });
            rows.iter().for_each(&mut *seen);
            made.extend(rows);
        }
        made
    }

    fn call(&mut self, groups: &Groups, key: &Row, rows: &[Row], moment: Moment) -> Bag {
        let kept = self.change(key);
        let (made, left) = groups.call(key, rows, kept.state, moment);
        *kept = left;
        if left.is_nothing() {
            self.keys.remove(key);
        }
        made
    }
}
