//! Where mesh connections wait for the generation that they belong to.
//!
//! Members get the request to start at different moments, so a connection of a lower process may
//! come before this member knows the generation: it waits here, for a bounded time. One that comes
//! too late is refused by whoever offers it, before.

use std::collections::HashMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::error::Failure;
use crate::session::Stream;

/// Most connections that wait; they come from members, so this is far away.
const MOST_WAITING: usize = 4096;

/// Query, generation, process that dialled.
type Key = (String, u64, usize);

#[derive(Default)]
pub(crate) struct Lobby {
    waiting: Mutex<HashMap<Key, (Stream, Instant)>>,
    changed: Condvar,
}

impl Lobby {
    fn waiting(&self) -> MutexGuard<'_, HashMap<Key, (Stream, Instant)>> {
        // Every change to the table is one step: it is consistent even after a panic.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A connection comes. A second one of the same process replaces the first.
    pub(crate) fn offer(&self, key: Key, stream: Stream, patience: Duration) -> Result<(), Failure> {
        self.expire(patience);
        let mut waiting = self.waiting();
        if waiting.len() >= MOST_WAITING {
            return Err(Failure::new("crowded", "too many mesh connections wait"));
        }
        waiting.insert(key, (stream, Instant::now()));
        self.changed.notify_all();
        Ok(())
    }

    /// Drops what has waited for longer: nobody starts that any more.
    pub(crate) fn expire(&self, patience: Duration) {
        self.waiting().retain(|_, (_, since)| since.elapsed() < patience);
    }

    /// Waits for a connection until `deadline`, or until `cancelled` after a [`Lobby::wake`].
    pub(crate) fn take(&self, key: &Key, deadline: Instant, cancelled: &dyn Fn() -> bool) -> Option<Stream> {
        let mut waiting = self.waiting();
        loop {
            if cancelled() {
                return None;
            }
            if let Some((stream, _)) = waiting.remove(key) {
                return Some(stream);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            let (held, _) = self.changed.wait_timeout(waiting, left).unwrap_or_else(PoisonError::into_inner);
            waiting = held;
        }
    }

    /// Drops what waits for this query up to a generation, and lets waiting takers look again.
    pub(crate) fn wake(&self, query: &str, generation: u64) {
        let mut waiting = self.waiting();
        waiting.retain(|(name, held, _), _| name != query || *held > generation);
        self.changed.notify_all();
    }

    /// Drops everything that waits, and lets waiting takers look again.
    pub(crate) fn clear(&self) {
        self.waiting().clear();
        self.changed.notify_all();
    }
}
