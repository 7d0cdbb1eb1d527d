//! Days of a time zone: which holds an instant, and when one begins.
//!
//! A day is named by its number from 1970-01-01 on. It begins when clocks show its first time; where clocks skip that time, as much later as they
//! skip, and where they show it twice, at the first. So days are 23 to 25 hours long as a rule, and an hour that comes twice is in one day.
//! The rules are those of the IANA database that is built in, the same on every host of a release; the system's is not read. Beyond
//! the years -9999 to 9999 the difference to UTC stays as it is there.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Mutex;

use jiff::Timestamp;
use jiff::tz::{TimeZone, TimeZoneDatabase};

pub(crate) const DAY_US: i64 = 86_400_000_000;

/// A time zone, by its name.
#[derive(Clone, Copy)]
pub(crate) struct Zone {
    name: &'static str,
    rules: &'static TimeZone,
}

impl PartialEq for Zone {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for Zone {}

impl fmt::Debug for Zone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl Zone {
    /// The zone of this IANA name, in any case of letters. Zones that were found stay in memory.
    pub(crate) fn find(name: &str) -> Option<Self> {
        static FOUND: Mutex<BTreeMap<&'static str, Zone>> = Mutex::new(BTreeMap::new());
        let rules = TimeZoneDatabase::bundled().get(name).ok()?;
        let name = rules.iana_name()?.to_owned();
        let mut found = FOUND.lock().expect("nothing panics while it is held");
        if let Some(zone) = found.get(&*name) {
            return Some(*zone);
        }
        let zone = Zone { name: Box::leak(name.into_boxed_str()), rules: Box::leak(Box::new(rules)) };
        found.insert(zone.name, zone);
        Some(zone)
    }

    /// Its name.
    pub(crate) fn name(self) -> &'static str {
        self.name
    }

    /// What its clocks show then, as if it were UTC.
    fn local(self, us: i64) -> i64 {
        us + i64::from(self.rules.to_offset(timestamp(us)).seconds()) * 1_000_000
    }

    /// When day `day` begins, whose first time is `from_us` after midnight.
    pub(crate) fn begin(self, day: i64, from_us: i64) -> i64 {
        let local = day.saturating_mul(DAY_US).saturating_add(from_us);
        let clamped = timestamp(local);
        let shown = TimeZone::UTC.to_datetime(clamped);
        let instant = self.rules.to_ambiguous_timestamp(shown).compatible().unwrap_or(clamped);
        instant.as_microsecond().saturating_add(local.saturating_sub(clamped.as_microsecond()))
    }

    /// The day that holds an instant.
    pub(crate) fn day(self, us: i64, from_us: i64) -> i64 {
        let mut day = (self.local(us) - from_us).div_euclid(DAY_US);
        while self.begin(day, from_us) > us {
            day -= 1;
        }
        while self.begin(day + 1, from_us) <= us {
            day += 1;
        }
        day
    }
}

/// The instant, or the nearest that the rules are for: some days are left to the ends of their range.
fn timestamp(us: i64) -> Timestamp {
    const MARGIN_US: i64 = 400 * DAY_US;
    let (least, most) = (Timestamp::MIN.as_microsecond() + MARGIN_US, Timestamp::MAX.as_microsecond() - MARGIN_US);
    Timestamp::from_microsecond(us.clamp(least, most)).expect("clamped to the range")
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR_US: i64 = 3_600_000_000;

    fn hours(zone: &str, day: i64) -> i64 {
        let zone = Zone::find(zone).unwrap();
        (zone.begin(day + 1, 0) - zone.begin(day, 0)) / HOUR_US
    }

    #[test]
    fn days_are_as_long_as_clocks_say() {
        // 2024-03-31, 2024-10-27, 2024-10-28.
        assert_eq!([19_813, 20_023, 20_024].map(|day| hours("Europe/Berlin", day)), [23, 25, 24]);
        // Clocks went from 24:00 to 1:00 on 2017-10-14: the next day begins at 1:00 and has 23 hours.
        assert_eq!([17_453, 17_454].map(|day| hours("America/Sao_Paulo", day)), [24, 23]);
        // And from 24:00 back to 23:00 on 2018-02-17, which has 25.
        assert_eq!([17_579, 17_580].map(|day| hours("America/Sao_Paulo", day)), [25, 24]);
        // There was no 2011-12-30 in Samoa.
        assert_eq!([15_337, 15_338, 15_339].map(|day| hours("Pacific/Apia", day)), [24, 0, 24]);
        let berlin = Zone::find("europe/berlin").unwrap();
        assert_eq!((berlin.name(), berlin), ("Europe/Berlin", Zone::find("Europe/Berlin").unwrap()));
        assert!(Zone::find("Mars/Olympus").is_none() && Zone::find("").is_none());
    }

    #[test]
    fn an_instant_is_in_the_day_that_begins_before_it() {
        for name in ["Europe/Berlin", "America/Sao_Paulo", "Pacific/Apia", "Asia/Kathmandu", "UTC"] {
            let zone = Zone::find(name).unwrap();
            for from_us in [0, 6 * HOUR_US, 23 * HOUR_US + HOUR_US / 2] {
                for half in 0..48 * 365 * 3 {
                    let us = 1_300_000_000_000_000 + half * HOUR_US / 2 - half % 2;
                    let day = zone.day(us, from_us);
                    assert!(zone.begin(day, from_us) <= us && us < zone.begin(day + 1, from_us), "{us} in {name}");
                }
                for us in [i64::MIN / 4, -300_000_000_000_000_000, 300_000_000_000_000_000, i64::MAX / 4] {
                    let day = zone.day(us, from_us);
                    assert!(zone.begin(day, from_us) <= us && us < zone.begin(day + 1, from_us), "{us} in {name}");
                }
            }
        }
    }
}
