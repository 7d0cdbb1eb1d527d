//! How much may wait for a process, and how long it may say nothing.

use std::time::Duration;

use crate::error::Error;

/// Limits of the links of a fabric over processes; see [`super::processes_with`]. All processes use the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of data that may be under way to one process, in buffers here, on the wire and in its mailboxes, before the workers
    /// here count as congested. Progress is never held back and not counted. Default 64 MiB.
    pub link_bytes: usize,
    /// A link over which nothing else went for this long carries a beat, sent by a thread of the fabric: a worker may be busy
    /// for as long as it wants. Default 5 s.
    pub beat: Duration,
    /// A process from which nothing came for this long, not even a beat, is lost. Default 60 s.
    pub silence: Duration,
    /// A process that took no byte for this long while some waited for it is lost. Default 60 s.
    pub stall: Duration,
}

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
        let reason = if self.link_bytes == 0 {
            "link_bytes is 0: no data could ever be sent".to_string()
        } else if self.beat.is_zero() || self.stall.is_zero() {
            format!("beat {:?} and stall {:?} must be more than nothing", self.beat, self.stall)
        } else if self.silence < self.beat * 4 {
            format!("silence {:?} must be at least four times the beat of {:?}", self.silence, self.beat)
        } else {
            return Ok(());
        };
        Err(Error::Setup { reason })
    }

    /// How often the links are looked at.
    pub(super) fn tick(&self) -> Duration {
        self.beat.min(self.silence / 4).min(self.stall / 4).max(Duration::from_millis(1))
    }
}
