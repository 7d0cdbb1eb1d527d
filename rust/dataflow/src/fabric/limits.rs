//! How much may wait for a process, and how long it may say nothing.
//!
//! Invariant: a process that lives and has its turn when the system gives it one is never silent for [`Limits::silence`]. Of two beats that are due
//! one is left out when something else went in between, each may be late by a third ([`Limits::is_due`]), and no thread can be asked to look more
//! often than [`LEAST`]: 2 * 4/3 beats of at least that are less than four.

use std::time::Duration;

use crate::error::Error;

/// Limits of the links of a fabric over processes; see [`super::processes_with`]. All processes use the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of data that may be under way to one process, in buffers here, on the wire and in its mailboxes, before the workers
    /// here count as congested. Progress is never held back and not counted. Default 64 MiB.
    pub link_bytes: usize,
    /// A link over which nothing else went for this long carries a beat, sent by a thread of the fabric: a worker may be busy
    /// for as long as it wants. Default 5 s, at least 10 ms.
    pub beat: Duration,
    /// A process from which nothing came for this long, not even a beat, is lost. Default 60 s, at least four beats.
    pub silence: Duration,
    /// A process that took no byte for this long while some waited for it is lost. Default 60 s, at least 40 ms.
    pub stall: Duration,
}

/// The least time after which a thread that was put aside surely had its turn again on a machine that is not overloaded: one tick of a scheduler
/// with 100 of them a second.
const LEAST: Duration = Duration::from_millis(10);

/// How many beats, or looks at what a process takes, it may miss.
const MISSES: u32 = 4;

impl Default for Limits {
    fn default() -> Self {
        Limits {
            link_bytes: 64 << 20,
            beat: Duration::from_secs(5),
            silence: Duration::from_secs(60),
            stall: Duration::from_secs(60),
        }
    }
}

impl Limits {
    pub(super) fn check(&self) -> Result<(), Error> {
        let (silence, stall) = (self.beat.saturating_mul(MISSES), LEAST * MISSES);
        let short = |name: &str, time: Duration, least: Duration, why: &str| {
            format!("{name} {time:?} must be at least {least:?}: {why}")
        };
        let reason = if self.link_bytes == 0 {
            "link_bytes is 0: no data could ever be sent".to_string()
        } else if self.beat < LEAST {
            short("beat", self.beat, LEAST, "a thread does not have its turn more often")
        } else if self.silence < silence {
            short("silence", self.silence, silence, &format!("{MISSES} times the beat of {:?}", self.beat))
        } else if self.stall < stall {
            short("stall", self.stall, stall, "a process that lives would be given up before it had its turn")
        } else {
            return Ok(());
        };
        Err(Error::Setup { reason })
    }

    /// How often the links are looked at.
    pub(super) fn tick(&self) -> Duration {
        self.beat.min(self.stall / MISSES)
    }

    /// Whether a beat is due, so long after the one before: it comes with the look that is nearest.
    pub(super) fn is_due(&self, since: Duration) -> bool {
        since + self.tick() / 2 >= self.beat
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Between two beats, of which the first is left out, at the latest.
    #[test]
    fn who_lives_is_not_silent_for_too_long() {
        let milliseconds = Duration::from_millis;
        for (beat, stall) in [(5_000, 60_000), (5_000, 19_900), (5_000, 13_320), (10, 40), (11, 40), (600_000, 40)] {
            let (beat, stall) = (milliseconds(beat), milliseconds(stall));
            let limits = Limits { beat, stall, silence: beat * 4, ..Limits::default() };
            limits.check().unwrap();
            let looks = (1..).find(|looks| limits.is_due(limits.tick() * *looks)).unwrap();
            let longest = 2 * looks * limits.tick();
            assert!(longest <= limits.silence * 3 / 4, "{limits:?}: up to {longest:?}");
        }
    }
}
