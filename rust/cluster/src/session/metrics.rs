//! Counters of one listener.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use serde::Serialize;

/// Counters of one listener; shared, only ever growing.
#[derive(Debug, Default)]
pub struct Metrics {
    pub(crate) accepted: AtomicU64,
    pub(crate) refused: AtomicU64,
    pub(crate) refused_secret: AtomicU64,
    pub(crate) refused_malformed: AtomicU64,
    pub(crate) refused_slow: AtomicU64,
    pub(crate) refused_crowded: AtomicU64,
    pub(crate) refused_exhausted: AtomicU64,
    pub(crate) refused_role: AtomicU64,
    pub(crate) refused_stale: AtomicU64,
    pub(crate) refused_plain: AtomicU64,
}

/// The values of [`Metrics`] at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MetricsSnapshot {
    /// Connections that authenticated themselves.
    pub accepted: u64,
    /// Connections closed before they could do anything; the sum of the following.
    pub refused: u64,
    /// A proof or certificate was wrong: another secret, a key of another role or scope, a replayed or a reflected message.
    pub refused_secret: u64,
    /// Garbage, another version, too much, or an early end.
    pub refused_malformed: u64,
    /// The handshake took too long.
    pub refused_slow: u64,
    /// Too many handshakes at once: it came, or it had said nothing when another one came.
    pub refused_crowded: u64,
    /// No descriptor or thread was left to serve one more.
    pub refused_exhausted: u64,
    /// The role is not served on this port, or there is no key for it here.
    pub refused_role: u64,
    /// A mesh connection of a generation that is over, or meant for another member.
    pub refused_stale: u64,
    /// It was not encrypted and comes from another host, or `tls="always"` is wanted.
    pub refused_plain: u64,
}

impl Metrics {
    /// Reads all counters; the sum may lag behind its parts.
    pub fn snapshot(&self) -> MetricsSnapshot {
        MetricsSnapshot {
            accepted: self.accepted.load(Relaxed),
            refused: self.refused.load(Relaxed),
            refused_secret: self.refused_secret.load(Relaxed),
            refused_malformed: self.refused_malformed.load(Relaxed),
            refused_slow: self.refused_slow.load(Relaxed),
            refused_crowded: self.refused_crowded.load(Relaxed),
            refused_exhausted: self.refused_exhausted.load(Relaxed),
            refused_role: self.refused_role.load(Relaxed),
            refused_stale: self.refused_stale.load(Relaxed),
            refused_plain: self.refused_plain.load(Relaxed),
        }
    }

    pub(crate) fn refuse(&self, reason: &AtomicU64) {
        reason.fetch_add(1, Relaxed);
        self.refused.fetch_add(1, Relaxed);
    }
}
