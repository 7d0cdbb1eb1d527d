//! The watermark of a flow from what its sources have reached: the least of them.
//!
//! Invariants: it never goes back. It waits for every source that has event time, until that source has ended or is idle; those without event
//! time do not count. It is a function of the rows that were told of, not of how they were cut between two looks at it, and where sources
//! can be idle of the times of [`tick`](Watermarks::tick), which the host gives: nothing here looks at a clock.
//!
//! A source is idle when for as long as it says it had no rows, whether it ever had any. While all that have not ended are idle the watermark stays:
//! nothing says how far time has gone. A source that comes back counts again; what it has behind the watermark is late.

use crate::plan::{Plan, Source};

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
    /// How long it may be silent, in milliseconds of processing time.
    idle_after_ms: Option<i64>,
    greatest: Option<i64>,
    /// Whether it has had rows since the last tick, and at which tick it was first looked at or had some.
    spoke: bool,
    heard_ms: Option<i64>,
    idle: bool,
    ended: bool,
}

impl Watermarks {
    /// For sources by their lateness in microseconds, `None` for one without event time.
    #[must_use]
    pub fn new(lateness_us: impl IntoIterator<Item = Option<i64>>) -> Self {
        Self::with_idle(lateness_us.into_iter().map(|lateness_us| (lateness_us, None)))
    }

    /// The same, with how long each source may have no rows, in milliseconds, before the watermark goes on without it.
    #[must_use]
    pub fn with_idle(sources: impl IntoIterator<Item = (Option<i64>, Option<i64>)>) -> Self {
        let sources = sources.into_iter().map(|(lateness_us, idle_after_ms)| Reached {
            lateness_us,
            idle_after_ms,
            greatest: None,
            spoke: false,
            heard_ms: None,
            idle: false,
            ended: false,
        });
        Self { sources: sources.collect(), now: None }
    }

    /// For the sources of a plan.
    #[must_use]
    pub fn of(plan: &Plan) -> Self {
        let lateness = |source: &Source| source.event_time.as_ref().map(|_| source.lateness_us);
        Self::with_idle(plan.sources().iter().map(|source| (lateness(source), source.idle_after_ms)))
    }

    /// It is this time, in milliseconds since 1970 or since anything: from now on sources without rows for too long are not waited for.
    pub fn tick(&mut self, clock_ms: i64) {
        for source in &mut self.sources {
            if std::mem::take(&mut source.spoke) || source.heard_ms.is_none() {
                source.heard_ms = source.heard_ms.max(Some(clock_ms));
            }
            let silent = source.heard_ms.map_or(0, |heard| clock_ms.saturating_sub(heard));
            source.idle = source.idle_after_ms.is_some_and(|limit| silent >= limit);
        }
    }

    /// A source has rows of this event time, in microseconds since 1970.
    ///
    /// # Panics
    /// When there is no such source.
    pub fn reach(&mut self, source: usize, time_us: i64) {
        let reached = &mut self.sources[source];
        reached.greatest = reached.greatest.max(Some(time_us));
        (reached.spoke, reached.idle) = (true, false);
    }

    /// A source has rows that wait to be told of: it is not silent.
    ///
    /// # Panics
    /// When there is no such source.
    pub fn hear(&mut self, source: usize) {
        self.sources[source].spoke = true;
    }

    /// Whether a source has [ended](Self::end).
    ///
    /// # Panics
    /// When there is no such source.
    #[must_use]
    pub fn has_ended(&self, source: usize) -> bool {
        self.sources[source].ended
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
            true => timed().filter(|(source, _)| !source.ended && !source.idle).map(reached).min().flatten(),
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
    fn a_silent_source_is_not_waited_for() {
        let mut watermarks = Watermarks::with_idle([(Some(0), None), (Some(0), Some(100)), (None, Some(1))]);
        watermarks.tick(1_000);
        watermarks.reach(0, 50);
        assert_eq!(watermarks.now(), None, "the second may come");
        watermarks.tick(1_099);
        assert_eq!(watermarks.now(), None, "not yet");
        watermarks.tick(1_100);
        assert_eq!(watermarks.now(), Some(50), "it never came");
        watermarks.reach(1, 20);
        watermarks.tick(1_150);
        watermarks.reach(0, 90);
        assert_eq!(watermarks.now(), Some(50), "it is back, and behind; the watermark never goes back");
        watermarks.reach(1, 60);
        watermarks.tick(1_200);
        watermarks.tick(1_299);
        assert_eq!(watermarks.now(), Some(60));
        watermarks.tick(1_300);
        assert_eq!(watermarks.now(), Some(90));
        // The first cannot be idle; with both silent or ended nothing says how far time has gone.
        watermarks.tick(9_999);
        watermarks.end(0);
        assert_eq!(watermarks.now(), Some(90));
        watermarks.reach(1, 200);
        assert_eq!(watermarks.now(), Some(200));
    }

    #[test]
    fn a_source_that_ends_without_rows_holds_nothing_back() {
        let mut watermarks = Watermarks::new([Some(0), Some(0)]);
        watermarks.reach(0, 7);
        watermarks.end(1);
        assert_eq!(watermarks.now(), Some(7));
    }
}
