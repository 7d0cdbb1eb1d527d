//! How a worker waits: it steps while there is work, looks again for a short while, then parks.
//!
//! Waking a parked thread costs microseconds, which is more than a whole round of a barrier on a quiet machine; looking again
//! burns the processor that the awaited worker may need. So each handle learns: a wait that looking again would have covered
//! doubles the time that the next one looks, any longer wait halves it. It is never more than [`LONGEST`], so a worker
//! that waits long uses no processor.

use std::time::{Duration, Instant};

use penstock_dataflow::{Error, Worker};

/// The longest that a worker looks again before it parks.
const LONGEST: Duration = Duration::from_micros(30);
/// The shortest.
const SHORTEST: Duration = Duration::from_micros(1);
/// How often to look between two readings of the clock.
const LOOKS: u32 = 16;

/// What one handle has learned about its waits.
#[derive(Debug)]
pub(crate) struct Patience {
    looking: Duration,
}

impl Patience {
    pub(crate) fn new() -> Self {
        Patience { looking: LONGEST }
    }

    /// Runs the worker until `done` has something. None after `limit`.
    pub(crate) fn until<R>(
        &mut self,
        worker: &mut Worker,
        limit: Option<Duration>,
        mut done: impl FnMut() -> Option<R>,
    ) -> Result<Option<R>, Error> {
        let mut waiting: Option<Instant> = None;
        let (mut looks, mut expired) = (0u32, false);
        loop {
            if let Some(result) = done() {
                if let Some(begin) = waiting {
                    self.learn(begin.elapsed());
                }
                return Ok(Some(result));
            }
            if expired {
                return Ok(None);
            }
            if worker.has_work() {
                worker.step()?;
                // Other dataflows may always have work: with a limit the clock is read after every step.
                expired = limit.is_some_and(|limit| waiting.get_or_insert_with(Instant::now).elapsed() >= limit);
                continue;
            }
            looks = looks.wrapping_add(1);
            if looks % LOOKS != 1 {
                std::hint::spin_loop();
                continue;
            }
            let waited = waiting.get_or_insert_with(Instant::now).elapsed();
            if waited >= self.looking {
                worker.step_or_park(limit.map(|limit| limit.saturating_sub(waited)))?;
            }
            expired = limit.is_some_and(|limit| waited >= limit);
        }
    }

    fn learn(&mut self, waited: Duration) {
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
        assert_eq!(patience.looking, SHORTEST);
        for _ in 0..20 {
            patience.learn(Duration::from_micros(20));
        }
        assert_eq!(patience.looking, LONGEST);
    }
}
