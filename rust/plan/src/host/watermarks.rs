//! The watermark of a flow from what its sources have reached: the least of them.
//!
//! Invariants: it never goes back. It waits for every source that has event time, until that source has ended; those without event time
//! do not count. It is a function of the rows that were told of, not of how they were cut between two looks at it.

use crate::plan::Plan;

/// See the module.
///
/// # Examples
/// ```
/// # use penstock_plan::host::Watermarks;
/// let mut watermarks = Watermarks::new([Some(0), Some(10), None]);
/// watermarks.reach(0, 100);
/// assert_eq!(watermarks.now(), None, "the second source has not come yet");
/// watermarks.reach(1, 70);
/// assert_eq!(watermarks.now(), Some(60));
/// watermarks.end(1);
/// assert_eq!(watermarks.now(), Some(100));
/// ```
#[derive(Clone, Debug)]
pub struct Watermarks {
    sources: Vec<Reached>,
    now: Option<i64>,
}

#[derive(Clone, Debug)]
struct Reached {
    /// How far it stays behind, where the source has event time.
    lateness_us: Option<i64>,
    greatest: Option<i64>,
    ended: bool,
}

impl Watermarks {
    /// For sources by their lateness in microseconds, `None` for one without event time.
    #[must_use]
    pub fn new(lateness_us: impl IntoIterator<Item = Option<i64>>) -> Self {
        let sources = lateness_us.into_iter().map(|lateness_us| Reached { lateness_us, greatest: None, ended: false });
        Self { sources: sources.collect(), now: None }
    }

    /// For the sources of a plan.
    #[must_use]
    pub fn of(plan: &Plan) -> Self {
        Self::new(plan.sources().iter().map(|source| source.event_time.as_ref().map(|_| source.lateness_us)))
    }

    /// A source has rows of this event time, in microseconds since 1970.
    ///
    /// # Panics
    /// When there is no such source.
    pub fn reach(&mut self, source: usize, time_us: i64) {
        let reached = &mut self.sources[source];
        reached.greatest = reached.greatest.max(Some(time_us));
    }

    /// No rows of a source can come any more.
    ///
    /// # Panics
    /// When there is no such source.
    pub fn end(&mut self, source: usize) {
        self.sources[source].ended = true;
    }

    /// The watermark; `None` before all sources with event time have come, and without any.
    pub fn now(&mut self) -> Option<i64> {
        let timed = || self.sources.iter().filter_map(|source| Some((source, source.lateness_us?)));
        let reached = |(source, lateness): (&Reached, i64)| source.greatest.map(|time| time.saturating_sub(lateness));
        // Once all have ended nothing is waited for: the latest of them.
        let least = match timed().any(|(source, _)| !source.ended) {
            true => timed().filter(|(source, _)| !source.ended).map(reached).min().flatten(),
            false => timed().filter_map(reached).max(),
        };
        self.now = self.now.max(least);
        self.now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_least_and_never_goes_back() {
        let mut watermarks = Watermarks::new([Some(5), None, Some(0)]);
        assert_eq!(watermarks.now(), None);
        watermarks.reach(2, 50);
        watermarks.reach(1, 1_000);
        assert_eq!(watermarks.now(), None, "the first has not come");
        watermarks.reach(0, 30);
        assert_eq!(watermarks.now(), Some(25));
        watermarks.reach(0, 20);
        assert_eq!(watermarks.now(), Some(25), "a row behind the greatest");
        watermarks.reach(0, 90);
        assert_eq!(watermarks.now(), Some(50));
        watermarks.end(2);
        assert_eq!(watermarks.now(), Some(85), "one that has ended is not waited for");
        watermarks.end(0);
        assert_eq!(watermarks.now(), Some(85));
        assert_eq!(Watermarks::new([None, None]).now(), None);
    }

    #[test]
    fn a_source_that_ends_without_rows_holds_nothing_back() {
        let mut watermarks = Watermarks::new([Some(0), Some(0)]);
        watermarks.reach(0, 7);
        watermarks.end(1);
        assert_eq!(watermarks.now(), Some(7));
    }
}
