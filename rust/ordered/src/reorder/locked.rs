//! One lock around a buffer, as the baseline of the slides.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

use super::sync::{AtomicU64, Mutex, MutexGuard, Ordering, Padded, PoisonError};
use super::{NoSlots, Refusal, Refused, Reorder, enough, said};

/// Comparator: every send takes one lock and holds it while it emits.
///
/// It refuses what the others refuse; unlike them, a send waits while another one emits.
pub struct Locked<T, F> {
    slots: usize,
    next: Padded<AtomicU64>,
    said: OnceLock<String>,
    inner: Mutex<Inner<T, F>>,
}

struct Inner<T, F> {
    next: u64,
    /// From `next` on.
    waiting: VecDeque<Option<T>>,
    broken: bool,
    sink: F,
}

impl<T: Send, F: FnMut(u64, T) + Send> Locked<T, F> {
    /// With this many slots; what leaves goes to `sink`, which is called in order and must not send to the same buffer.
    ///
    /// # Errors
    /// For no slots at all, or more than [`MOST_SLOTS`](super::MOST_SLOTS).
    pub fn new(slots: usize, sink: F) -> Result<Self, NoSlots> {
        let inner = Inner { next: 0, waiting: VecDeque::new(), broken: false, sink };
        let next = Padded::new(AtomicU64::new(0));
        Ok(Self { slots: enough(slots)?, next, said: OnceLock::new(), inner: Mutex::new(inner) })
    }

    fn lock(&self) -> MutexGuard<'_, Inner<T, F>> {
        // The sink's panics are caught below, so nothing is half done when the lock comes back.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Send, F: FnMut(u64, T) + Send> Reorder<T> for Locked<T, F> {
    fn send(&self, t: u64, item: T) -> Result<(), Refused<T>> {
        let mut inner = self.lock();
        let Inner { next, waiting, broken, sink } = &mut *inner;
        let refused = |item, why| Err(Refused { item, t, next: *next, why });
        if *broken {
            return refused(item, Refusal::Broken);
        }
        let Some(ahead) = t.checked_sub(*next) else {
            return refused(item, Refusal::Past);
        };
        if ahead >= self.slots as u64 {
            return refused(item, Refusal::Full);
        }
        let at = ahead as usize;
        if waiting.get(at).is_some_and(Option::is_some) {
            return refused(item, Refusal::Repeated);
        }
        if waiting.len() <= at {
            waiting.resize_with(at + 1, || None);
        }
        waiting[at] = Some(item);
        while let Some(item) = waiting.front_mut().and_then(Option::take) {
            waiting.pop_front();
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| sink(*next, item))) {
                let _ = self.said.set(said(&*panic));
                *broken = true;
                break;
            }
            *next += 1;
        }
        self.next.store(*next, Ordering::Release);
        Ok(())
    }

    fn next(&self) -> u64 {
        self.next.load(Ordering::Acquire)
    }

    fn slots(&self) -> usize {
        self.slots
    }

    fn broken(&self) -> Option<&str> {
        self.said.get().map(String::as_str)
    }
}

impl<T, F> std::fmt::Debug for Locked<T, F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Locked").field("slots", &self.slots).finish_non_exhaustive()
    }
}
