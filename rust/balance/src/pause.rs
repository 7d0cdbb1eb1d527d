//! How many bins to move at once so that no step pauses for longer than it may.
//!
//! What a step costs is not known before: bins differ, and machines do. So the first step is one group, and from then on each is as many as the
//! dearest group seen lately allows. A step that took too long halves the next; a migration never stops for that, since one group is the least.
//!
//! Invariant: the number of groups grows at most by a factor of two from step to step.

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
}

/// Of the pause that is allowed, what is aimed at: what one step costs more than the one before.
const AIM: f64 = 0.8;

impl PauseLimit {
    /// No step is to take longer than that.
    #[must_use]
    pub fn new(most: Duration) -> Self {
        Self { most, groups: 1 }
    }

    /// For the next step, at least 1.
    #[must_use]
    pub fn groups(&self) -> usize {
        self.groups
    }

    /// A step of so many groups took that long.
    pub fn took(&mut self, groups: usize, time: Duration) {
        let each = time.as_secs_f64() / groups.max(1) as f64;
        let fits = if each > 0.0 { (self.most.as_secs_f64() * AIM / each) as usize } else { usize::MAX };
        let most = if time > self.most { self.groups / 2 } else { self.groups.saturating_mul(2) };
        self.groups = fits.min(most).max(1);
    }
}
