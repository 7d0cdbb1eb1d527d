//! How many bins to move at once so that no step pauses for longer than it may.
//!
//! What a step costs is not known before: bins differ, and machines do. So the first step is one group, and from then on each is as many as the
//! dearest group seen lately allows. A step that took too long halves the next; a migration never stops for that, since one group is the least.
//!
//! Where one group takes so long that two might take too long, that may be what every step waits for whatever it moves (a call of a slow function, a
//! thread that gets no core) or a group that costs so much. Only a trial tells: two groups, which take hardly longer than one in the first case. Then
//! what counts is what a step takes beyond one group alone: it fills up the pause that is allowed, or, where one group alone exceeds that, adds at
//! most half of it. A trial that fails is repeated after twice as many steps, so few of them are too long. What every step waits for may end: a step that
//! takes less than one group did shows it at once, and now and then one group is measured again.
//!
//! Invariant: the number of groups grows at most by a factor of two from step to step.

use std::collections::VecDeque;
use std::time::Duration;

/// How many groups of moves to take at once.
///
/// # Examples
/// ```
/// use penstock_balance::PauseLimit;
/// use std::time::Duration;
/// let mut limit = PauseLimit::new(Duration::from_millis(50));
/// assert_eq!(limit.groups(), 1);
/// limit.took(1, Duration::from_millis(5));
/// assert_eq!(limit.groups(), 2, "twice as many at most, though ten would fit");
/// limit.took(2, Duration::from_millis(80));
/// assert_eq!(limit.groups(), 1);
/// ```
#[derive(Clone, Debug)]
pub struct PauseLimit {
    most: Duration,
    groups: usize,
    /// The latest steps of one group, or of more that took less, at most [`ALONE`] of them.
    alone: VecDeque<Duration>,
    /// Steps before the next trial of what was too many, how many there were before the last, and how many groups were not.
    rest: usize,
    rested: usize,
    ceiling: usize,
    /// Steps since one group was measured.
    since: usize,
    /// While it is measured again: how many times more, and the number of groups to go on with.
    again: Option<(usize, usize)>,
}

/// Of so many steps of one group the median is what such a step takes.
const ALONE: usize = 3;

/// After so many steps of several groups one is measured again.
const AGAIN: usize = 16;

/// Of the pause that is allowed, what is aimed at: what one step costs more than the one before.
const AIM: f64 = 0.8;

impl PauseLimit {
    /// No step is to take longer than that.
    #[must_use]
    pub fn new(most: Duration) -> Self {
        let (rest, rested, ceiling, since, again) = (0, 1, 1, 0, None);
        Self { most, groups: 1, alone: VecDeque::new(), rest, rested, ceiling, since, again }
    }

    /// For the next step, at least 1.
    #[must_use]
    pub fn groups(&self) -> usize {
        self.groups
    }

    /// A step of so many groups took that long.
    pub fn took(&mut self, groups: usize, time: Duration) {
        let before = self.least();
        self.since = if groups <= 1 { 0 } else { self.since + 1 };
        if groups <= 1 || before.is_some_and(|least| time < least) {
            if self.alone.len() == ALONE {
                self.alone.pop_front();
            }
            self.alone.push_back(time);
        }
        let (again, Some(least)) = (self.again.take(), self.least()) else {
            let each = time.as_secs_f64() / groups.max(1) as f64;
            let fits = if each > 0.0 { (self.most.as_secs_f64() * AIM / each) as usize } else { usize::MAX };
            let most = fits.min(if time > self.most { groups / 2 } else { groups.saturating_mul(2) });
            self.groups = most.max(1);
            return;
        };
        let next = match again {
            // It waits for less than it did, or happened to: one more says which.
            Some((left, then)) if groups <= 1 && left > 1 && before.is_some_and(|least| time < least) => {
                self.again = Some((left - 1, then));
                1
            }
            Some((_, then)) if groups <= 1 => then,
            _ if groups <= 1 => self.up_to(2),
            _ => self.beside(least, groups, time),
        };
        if next > 1 && self.since >= AGAIN {
            self.again = Some((ALONE, next));
        }
        self.groups = if self.again.is_some() { 1 } else { next };
    }

    /// So many, or what was not too many as long as that counts.
    fn up_to(&mut self, groups: usize) -> usize {
        let most = if self.rest == 0 { groups } else { groups.min(self.ceiling) };
        self.rest = self.rest.saturating_sub(1);
        most
    }

    /// For the next step, where this one of several took so long beside what one takes.
    fn beside(&mut self, least: Duration, groups: usize, time: Duration) -> usize {
        let (beyond, room) = (time.saturating_sub(least).as_secs_f64(), self.room(least).as_secs_f64());
        let others = (groups - 1) as f64 * AIM * room;
        let fits = if beyond > 0.0 { 1 + (others / beyond) as usize } else { usize::MAX };
        if beyond > room {
            self.rested = self.rested.saturating_mul(2);
            self.rest = self.rested;
            self.ceiling = fits.min(groups - 1);
            return self.ceiling;
        }
        self.up_to(fits.clamp(groups, groups.saturating_mul(2)))
    }

    /// What a step of one group takes, where two might take too long.
    fn least(&self) -> Option<Duration> {
        let mut sorted: Vec<Duration> = self.alone.iter().copied().collect();
        sorted.sort_unstable();
        let median = sorted.get(ALONE / 2).copied().filter(|_| sorted.len() == ALONE)?;
        (2.0 * median.as_secs_f64() > self.most.as_secs_f64() * AIM).then_some(median)
    }

    /// By how much a step may exceed what one group takes.
    fn room(&self, least: Duration) -> Duration {
        if least <= self.most { self.most - least } else { least / 2 }
    }
}
