//! How soon the next trial may begin: when what the last ones have lost is at most a share of the time since.

/// What trials may lose, as a share of the time.
///
/// ```
/// use penstock_trial::Allowance;
///
/// let mut allowance = Allowance::new(0.05);
/// assert!(allowance.allows(0, 1.0), "nothing was lost yet");
/// allowance.spend(100, 7);
/// assert!(!allowance.allows(239, 1.0) && allowance.allows(240, 1.0));
/// assert!(allowance.allows(120, 1.0 / 7.0), "work that costs a seventh of what it did then loses as much less");
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Allowance {
    share: f64,
    /// What was lost and is not made up for, as of `since_ns`.
    lost_ns: f64,
    since_ns: u64,
}

impl Allowance {
    /// So much of the time: 0.05 is 5 %.
    ///
    /// # Panics
    /// When the share is not above 0.
    #[must_use]
    pub fn new(share: f64) -> Self {
        assert!(share > 0.0, "with a share of {share} of the time there could only be one trial");
        Self { share, lost_ns: 0.0, since_ns: 0 }
    }

    /// A trial has ended and lost so much ([`Trial::lost_ns`](crate::Trial::lost_ns)). What those before it lost and nobody waited for stays.
    pub fn spend(&mut self, now_ns: u64, lost_ns: u64) {
        self.lost_ns = (self.lost_ns - self.earned_ns(now_ns)).max(0.0) + lost_ns as f64;
        self.since_ns = now_ns;
    }

    /// Whether a trial may begin now, which is expected to lose what the last ones did times `dearer`: what work costs now beside then.
    #[must_use]
    pub fn allows(&self, now_ns: u64, dearer: f64) -> bool {
        self.lost_ns * dearer <= self.earned_ns(now_ns)
    }

    fn earned_ns(&self, now_ns: u64) -> f64 {
        self.share * now_ns.saturating_sub(self.since_ns) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_waited_for_adds_up() {
        let mut allowance = Allowance::new(0.1);
        allowance.spend(0, 10);
        allowance.spend(50, 10);
        // Five of the first ten are made up for.
        assert!(!allowance.allows(199, 1.0) && allowance.allows(200, 1.0));
        allowance.spend(1_000, 10);
        assert!(!allowance.allows(1_099, 1.0) && allowance.allows(1_100, 1.0), "time without trials is not saved up");
    }

    #[test]
    fn dearer_work_waits_longer() {
        let mut allowance = Allowance::new(0.1);
        allowance.spend(0, 10);
        assert!(!allowance.allows(100, 2.0) && allowance.allows(200, 2.0));
    }
}
