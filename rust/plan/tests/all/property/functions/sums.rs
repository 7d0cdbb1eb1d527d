//! Functions with state of each row's key, which speak at once and at the end of the epoch.

use super::super::{Bag, Row};
use super::state::{Bin, Value, option, read_option};
use super::{Call, int, number};
use crate::common::Cell;

/// What a key has.
#[derive(Clone, Debug, Default)]
pub(in crate::property) struct Kept {
    /// Of all epochs before.
    before: i64,
    /// Of this one: the sum, the rows, and the last time of one.
    now: i64,
    rows: i64,
    last: Option<i64>,
    /// Times of rows that are not over, and their values.
    timers: Vec<(i64, i64)>,
}

impl Value for Kept {
    fn put(&self) -> Vec<i64> {
        let mut numbers = vec![self.before, self.now, self.rows];
        numbers.extend(option(self.last));
        numbers.extend(self.timers.iter().flat_map(|(time, value)| [*time, *value]));
        numbers
    }

    fn read(numbers: &[i64]) -> Self {
        let timers = numbers[5..].chunks(2).map(|pair| (pair[0], pair[1])).collect();
        Self { before: numbers[0], now: numbers[1], rows: numbers[2], last: read_option(&numbers[3..]), timers }
    }
}

/// The state of a bin; of all keys, for the oracle.
pub(in crate::property) type Memory = Bin<Kept>;

impl Memory {
    pub(in crate::property) fn apply(&mut self, call: &Call, row: &Row) -> Row {
        let (time, value) = (number(&row[1]), number(&row[2]).unwrap_or(0));
        let kept = self.change(&row[..1].to_vec());
        let Call::Sums { after } = call else {
            kept.before = (kept.before * 31 + value).rem_euclid(1_009);
            return vec![row[0].clone(), row[1].clone(), int(kept.before), row[3].clone()];
        };
        (kept.now, kept.rows, kept.last) = (kept.now + value, kept.rows + 1, kept.last.max(time));
        kept.timers.extend(time.map(|time| (time + after, value)));
        vec![row[0].clone(), row[1].clone(), int((kept.before + value).rem_euclid(97)), row[3].clone()]
    }

    /// What it has to say when the watermark is so far, in milliseconds.
    pub(in crate::property) fn end_epoch(&mut self, reached: i64) -> Bag {
        let mut made = Bag::new();
        for key in self.keys.keys().cloned().collect::<Vec<_>>() {
            let kept = &self.keys[&key];
            let due = kept.timers.iter().any(|(time, _)| *time <= reached);
            if kept.rows == 0 && !due {
                continue;
            }
            let kept = self.change(&key);
            if kept.rows > 0 {
                kept.before = (kept.before * 31 + kept.now + kept.rows).rem_euclid(1_009);
                made.push(vec![key[0].clone(), kept.last.map_or(Cell::Null, int), int(kept.before), Cell::text("end")]);
                (kept.now, kept.rows, kept.last) = (0, 0, None);
            }
            for (time, value) in kept.timers.extract_if(.., |(time, _)| *time <= reached) {
                let value = int((kept.before + value).rem_euclid(97));
                made.push(vec![key[0].clone(), int(time), value, Cell::text("due")]);
            }
            if kept.timers.is_empty() && kept.before % 3 == 0 {
                self.keys.remove(&key);
            }
        }
        made
    }
}
