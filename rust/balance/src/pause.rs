//! How many bins to move at once so that no step pauses for longer than it may.
//!
//! What a step costs is not known before: bins differ, and machines do. So the first step is one group, and from then on each is as many as the
//! dearest group seen lately allows. A step that took too long halves the next; a migration never stops for that, since one group is the least.
//!
//! Where one group takes so long that two might take too long, that may be what every step waits for whatever it moves (a call of a slow function, a
//! thread that gets no core) or a group that costs so much. Only a trial tells: two groups, which take hardly longer than one in the first case. Then
//! what counts is what a step takes beyond one group alone: it fills up the pause that is allowed, or, where one group alone exceeds that, adds at
//! most half of it. A trial that fails is repeated after twice as many steps, so few of them are too long.
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
    /// The latest steps of one group, at most [`ALONE`] of them.
    alone: VecDeque<Duration>,
    /// Steps of one group before the next trial, and how many there were before the last.
    rest: usize,
    rested: usize,
}

/// Of so many steps of one group the median is what such a step takes.
const ALONE: usize = 3;

/// Of the pause that is allowed, what is aimed at: what one step costs more than the one before.
const AIM: f64 = 0.8;

impl PauseLimit {
    /// No step is to take longer than that.
    #[must_use]
    pub fn new(most: Duration) -> Self {
        Self { most, groups: 1, alone: VecDeque::new(), rest: 0, rested: 1 }
    }

    /// For the next step, at least 1.
    #[must_use]
    pub fn groups(&self) -> usize {
        self.groups
    }

    /// A step of so many groups took that long.
    pub fn took(&mut self, groups: usize, time: Duration) {
        if groups <= 1 {
            if self.alone.len() == ALONE {
                self.alone.pop_front();
            }
            self.alone.push_back(time);
        }
        let most = if let Some(least) = self.least() {
            if groups <= 1 {
                self.groups = if self.rest == 0 { 2 } else { 1 };
                self.rest = self.rest.saturating_sub(1);
                return;
            }
            let (beyond, room) = (time.saturating_sub(least), self.room(least));
            if beyond > room && groups == 2 {
                self.rested = self.rested.saturating_mul(2);
                self.rest = self.rested;
            }
            match beyond {
                _ if beyond > room => groups / 2,
                _ if beyond > room / 2 => groups,
                _ => groups.saturating_mul(2),
            }
        } else {
            let each = time.as_secs_f64() / groups.max(1) as f64;
            let fits = if each > 0.0 { (self.most.as_secs_f64() * AIM / each) as usize } else { usize::MAX };
            fits.min(if time > self.most { groups / 2 } else { groups.saturating_mul(2) })
        };
        self.groups = most.max(1);
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
