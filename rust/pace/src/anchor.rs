//! Instants, which only grow, as times of the world.

use std::sync::OnceLock;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Nanoseconds since the Unix epoch of a monotonic instant.
#[must_use]
pub fn unix_ns(at: Instant) -> u64 {
    static ANCHOR: OnceLock<(Instant, u64)> = OnceLock::new();
    let (instant, unix) = *ANCHOR.get_or_init(|| {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        (Instant::now(), since.as_nanos() as u64)
    });
    match at.checked_duration_since(instant) {
        Some(later) => unix + later.as_nanos() as u64,
        None => unix - instant.duration_since(at).as_nanos() as u64,
    }
}
