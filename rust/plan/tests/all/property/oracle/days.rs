//! Windows that are days of a time zone. A day begins when clocks show its first time; where they skip that, as much later as they skip, and where
//! they show it twice, at the first. Of the rules of zones only what they are is shared with the operators: the offsets, and when these change.

use std::cell::RefCell;
use std::collections::BTreeMap;

use jiff::Timestamp;
use jiff::tz::TimeZoneDatabase;

use super::super::plans::CHANGES;

const DAY: i64 = 86_400_000;

/// Windows of so many days, from some day on, all in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Days {
    zone: &'static str,
    size: i64,
    every: i64,
    offset: i64,
}

impl Days {
    pub(super) fn new(zone: &str, size: i64, every: i64, offset: i64) -> Self {
        let known = CHANGES.iter().find(|(name, _)| *name == zone);
        Self { zone: known.expect("a zone of plans").0, size, every, offset }
    }

    /// The windows of a time, ascending.
    pub(super) fn of(self, time: i64) -> Vec<(i64, i64)> {
        let (days, every) = (self.size / DAY, self.every / DAY);
        // A day may begin a day and an offset away from where it does in UTC.
        let about = (time - self.offset).div_euclid(DAY);
        let starts = (about - days - 2..about + 3).filter(|day| day.rem_euclid(every) == 0);
        let windows = starts.map(|day| (self.begin(day), self.begin(day + days)));
        windows.filter(|(start, end)| (*start..*end).contains(&time)).collect()
    }

    fn begin(self, day: i64) -> i64 {
        thread_local! {
            static KNOWN: RefCell<BTreeMap<(&'static str, i64), i64>> = const { RefCell::new(BTreeMap::new()) };
        }
        let shown = day * DAY + self.offset;
        let found = || first_shown(self.zone, shown);
        KNOWN.with_borrow_mut(|known| *known.entry((self.zone, shown)).or_insert_with(found))
    }
}

/// When clocks show a time first, which is written as if it were UTC, or what comes behind it where they skip it.
fn first_shown(zone: &str, shown: i64) -> i64 {
    let rules = TimeZoneDatabase::bundled().get(zone).unwrap();
    let early = Timestamp::from_millisecond(shown - 3 * DAY).unwrap();
    let mut offset = i64::from(rules.to_offset(early).seconds()) * 1_000;
    for change in rules.following(early) {
        let (instant, until) = (shown - offset, change.timestamp().as_millisecond());
        let next = i64::from(change.offset().seconds()) * 1_000;
        let skipped = until + next > shown;
        if instant < until || skipped {
            return instant;
        }
        offset = next;
    }
    shown - offset
}

#[test]
fn clocks_change_when_plans_think_so() {
    for (zone, change) in CHANGES {
        let at = change.parse::<Timestamp>().unwrap();
        let rules = TimeZoneDatabase::bundled().get(zone).unwrap();
        let before = Timestamp::from_millisecond(at.as_millisecond() - 1).unwrap();
        assert_eq!(rules.following(before).next().unwrap().timestamp(), at, "{zone}");
        assert_ne!(rules.to_offset(before), rules.to_offset(at), "{zone}");
    }
    let hours = |zone, day: i64| (first_shown(zone, (day + 1) * DAY) - first_shown(zone, day * DAY)) / 3_600_000;
    // 2024-03-31, 2024-10-27, 2011-12-29 to 31, 1969-09-29 and 30.
    assert_eq!([19_813, 20_023].map(|day| hours("Europe/Berlin", day)), [23, 25]);
    assert_eq!([15_337, 15_338, 15_339].map(|day| hours("Pacific/Apia", day)), [24, 0, 24]);
    assert_eq!([-94, -93].map(|day| hours("Pacific/Kwajalein", day)), [24, 47]);
}
