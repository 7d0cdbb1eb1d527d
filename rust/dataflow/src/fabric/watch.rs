//! The thread that watches the links of a process: it sends beats over idle ones and finds peers that are connected but hung.
//!
//! A process is lost when nothing was heard from it for [`Limits::silence`], or when it took no byte for [`Limits::stall`] while
//! some waited for it. Beats come from this thread, not from workers: a worker that is busy in one long operator stays
//! quiet, and its process does not. When this process itself was suspended the clocks start anew.
//!
//! Departure: beats per link from one thread per process, since the standard library's sockets have no keepalive that
//! reports in time.

use std::io::{self, Read};
use std::net::Shutdown;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::time::{Duration, Instant};

use super::Shared;
use super::limits::Limits;
use super::link::Outbox;
use super::stream::Hangup;
use crate::error::Error;

/// When something last came over a link.
pub(super) struct Ear {
    origin: Instant,
    heard_ms: AtomicU64,
}

impl Ear {
    pub(super) fn new() -> Self {
        Ear { origin: Instant::now(), heard_ms: AtomicU64::new(0) }
    }

    pub(super) fn hear(&self) {
        self.heard_ms.store(self.origin.elapsed().as_millis() as u64, Ordering::Release);
    }

    pub(super) fn silent(&self) -> Duration {
        self.origin.elapsed().saturating_sub(Duration::from_millis(self.heard_ms.load(Ordering::Acquire)))
    }
}

/// A stream that remembers when it last brought something.
pub(super) struct Heard {
    pub(super) stream: Box<dyn Read + Send>,
    pub(super) ear: Arc<Ear>,
}

impl Read for Heard {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = self.stream.read(into)?;
        self.ear.hear();
        Ok(count)
    }
}

/// What the thread knows of one link.
pub(super) struct Watched {
    outbox: Arc<Outbox>,
    /// Gone with the link.
    hangup: Weak<Hangup>,
    ear: Arc<Ear>,
    /// Bytes offered when the last beat was due.
    offered: u64,
    /// Bytes taken, and since when no more.
    accepted: u64,
    since: Instant,
}

impl Watched {
    pub(super) fn new(outbox: Arc<Outbox>, hangup: &Arc<Hangup>, ear: Arc<Ear>) -> Self {
        Watched { outbox, hangup: Arc::downgrade(hangup), ear, offered: 0, accepted: 0, since: Instant::now() }
    }

    fn lost(&self, reason: String, shared: &Shared) {
        let process = self.outbox.process();
        shared.link_lost(process, Error::PeerLost { process, reason });
        // Whoever of our threads is blocked on this stream must end.
        if let Some(hangup) = self.hangup.upgrade() {
            hangup(Shutdown::Both);
        }
    }
}

/// Ends the thread, and gives it the links of processes that join.
#[derive(Default)]
pub(super) struct Stop {
    stopped: Mutex<bool>,
    changed: Condvar,
    fresh: Mutex<Vec<Watched>>,
}

impl Stop {
    pub(super) fn stop(&self) {
        *self.stopped.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = true;
        self.changed.notify_all();
    }

    /// One more link to watch, from the next tick on.
    pub(super) fn add(&self, link: Watched) {
        self.fresh.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push(link);
    }

    /// Waits for one tick; true when it is over.
    fn wait(&self, tick: Duration) -> bool {
        let stopped = self.stopped.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let (stopped, _) = self
            .changed
            .wait_timeout_while(stopped, tick, |stopped| !*stopped)
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        *stopped
    }
}

/// Whether we were stopped ourselves, or starved, between two looks: what came meanwhile is not read yet, and nobody else is to blame.
pub(super) fn suspended(between: Duration, tick: Duration, limits: &Limits) -> bool {
    between > tick + limits.silence.min(limits.stall) / 2
}

/// The watching thread.
pub(super) fn watch(limits: Limits, shared: &Shared, stop: &Stop) {
    let mut links = Vec::new();
    let tick = limits.tick();
    let (mut looked, mut beat) = (Instant::now(), Instant::now());
    while !stop.wait(tick) {
        let now = Instant::now();
        let due = limits.is_due(now.duration_since(beat));
        if due {
            beat = now;
        }
        let suspended = suspended(now.duration_since(looked), tick, &limits);
        looked = now;
        links.append(&mut stop.fresh.lock().unwrap_or_else(|poisoned| poisoned.into_inner()));
        links.retain_mut(|link: &mut Watched| {
            let Some((offered, accepted)) = link.outbox.traffic() else { return false };
            if suspended {
                link.ear.hear();
                link.since = now;
                return true;
            }
            if accepted != link.accepted || accepted >= offered {
                (link.accepted, link.since) = (accepted, now);
            }
            let (silent, stalled) = (link.ear.silent(), now.duration_since(link.since));
            if silent >= limits.silence {
                link.lost(
                    format!("connected, but nothing was heard from it for {:.1} s", silent.as_secs_f64()),
                    shared,
                );
                return false;
            }
            if stalled >= limits.stall {
                let (waiting, seconds) = (offered - accepted, stalled.as_secs_f64());
                let reason = format!("took none of the {waiting} bytes that wait for it in {seconds:.1} s");
                link.lost(reason, shared);
                return false;
            }
            if due {
                if link.offered == offered {
                    link.outbox.send_beat();
                }
                link.offered = link.outbox.traffic().map_or(offered, |(offered, _)| offered);
            }
            true
        });
    }
}
