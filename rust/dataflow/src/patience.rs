//! How long a worker that waits looks again before it parks.
//!
//! Waking a parked thread costs microseconds, which is more than a whole round of a barrier on a quiet machine; looking again
//! burns the processor that the awaited worker may need. So a worker learns: a wait that looking again would have covered
//! doubles the time that the next one looks, any longer wait halves it. It is never more than [`LONGEST`], so a worker
//! that waits long uses no processor.

use std::time::Duration;

/// The longest that a worker looks again before it parks.
const LONGEST: Duration = Duration::from_micros(30);
/// The shortest.
const SHORTEST: Duration = Duration::from_micros(1);

/// What a worker has learned about its waits.
#[derive(Debug)]
pub(crate) struct Patience {
    looking: Duration,
}

impl Patience {
    pub(crate) fn new() -> Self {
        Patience { looking: LONGEST }
    }

    /// Whether a wait that has taken so long is no longer worth looking.
    pub(crate) fn is_over(&self, waited: Duration) -> bool {
        waited >= self.looking
    }

    /// A wait took so long.
    pub(crate) fn learn(&mut self, waited: Duration) {
        self.looking = if waited <= LONGEST { self.looking * 2 } else { self.looking / 2 }.clamp(SHORTEST, LONGEST);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_waits_shorten_the_looking_and_short_ones_restore_it() {
        let mut patience = Patience::new();
        for _ in 0..20 {
            patience.learn(Duration::from_millis(1));
        }
        assert!(patience.is_over(SHORTEST));
        for _ in 0..20 {
            patience.learn(Duration::from_micros(20));
        }
        assert!(patience.is_over(LONGEST) && !patience.is_over(LONGEST - Duration::from_nanos(1)));
    }
}
