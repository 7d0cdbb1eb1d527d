//! Which cause all workers of a fabric report when it stops.
//!
//! Processes may fail before they hear of each other. So each tells every other one cause, its own or else the first that it hears,
//! and reports none before all that could know a better one have told theirs, or have left. Better is what is no lost process, which
//! only follows from something else; then what began in the process with the lower index. All who hear each other so report
//! the same. Within a process the first cause stays.
//!
//! A process that is connected and says nothing holds up the report for [`PATIENCE`] at most; who is stopped by a cause of process 0
//! waits for nobody. What was reported once stays, whatever still comes.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::error::Error;

/// How long a report waits for processes that may know a better cause: telling takes one round trip between threads that do nothing
/// else.
const PATIENCE: Duration = Duration::from_secs(3);

/// Why a fabric stops, and in which process that began.
#[derive(Clone, Debug)]
pub(super) struct Cause {
    pub(super) origin: usize,
    pub(super) error: Error,
}

impl Cause {
    /// Less is better.
    fn rank(&self) -> (bool, usize) {
        (matches!(self.error, Error::PeerLost { .. }), self.origin)
    }
}

struct State {
    best: Option<(Cause, Instant)>,
    /// It was reported.
    settled: bool,
    /// The other processes that have told no cause and are still there.
    silent: BTreeSet<usize>,
}

impl State {
    fn is_decided(&self) -> bool {
        match &self.best {
            Some((cause, _)) if matches!(cause.error, Error::PeerLost { .. }) => self.silent.is_empty(),
            Some((cause, _)) => self.silent.range(..cause.origin).next().is_none(),
            None => false,
        }
    }
}

pub(super) struct Verdict {
    state: Mutex<State>,
    changed: Condvar,
    stopped: AtomicBool,
}

impl Verdict {
    /// For a process with these others.
    pub(super) fn new(others: impl IntoIterator<Item = usize>) -> Self {
        let state = State { best: None, settled: false, silent: others.into_iter().collect() };
        Verdict { state: Mutex::new(state), changed: Condvar::new(), stopped: AtomicBool::new(false) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// One more process, that joins.
    pub(super) fn begin(&self, process: usize) {
        self.state().silent.insert(process);
    }

    /// The cause so far, reported or not.
    pub(super) fn cause(&self) -> Option<Cause> {
        self.state().best.as_ref().map(|(cause, _)| cause.clone())
    }

    /// Whether a report would wait for nobody.
    #[cfg(test)]
    pub(super) fn is_decided(&self) -> bool {
        self.state().is_decided()
    }

    /// Whether the fabric stops.
    pub(super) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// A cause from this process, or what another one (`from`) tells. The first of all is handed to `tell`, before anybody can see
    /// that the fabric stops and leave; true for that one.
    pub(super) fn stop(&self, from: Option<usize>, cause: Cause, tell: impl FnOnce(&Cause)) -> bool {
        let mut state = self.state();
        let State { best, settled, silent } = &mut *state;
        if let Some(from) = from {
            silent.remove(&from);
        }
        let first = best.is_none();
        if let Some((known, _)) = best {
            if from.is_some() && !*settled && cause.rank() < known.rank() {
                *known = cause;
            }
        } else {
            tell(&cause);
            *best = Some((cause, Instant::now()));
            // Last: who sees it may leave, and the goodbye has to be behind the cause.
            self.stopped.store(true, Ordering::Release);
        }
        drop(state);
        self.changed.notify_all();
        first
    }

    /// A process has left or is lost: it tells nothing more.
    pub(super) fn ended(&self, process: usize) {
        self.state().silent.remove(&process);
        self.changed.notify_all();
    }

    /// The cause that all report, once it is known; `None` while nothing stops.
    pub(super) fn report(&self) -> Option<Error> {
        if !self.is_stopped() {
            return None;
        }
        let mut state = self.state();
        loop {
            let (cause, since) = state.best.as_ref()?;
            let left = (*since + PATIENCE).saturating_duration_since(Instant::now());
            if state.settled || state.is_decided() || left.is_zero() {
                let error = cause.error.clone();
                state.settled = true;
                return Some(error);
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cause(origin: usize) -> Cause {
        Cause { origin, error: Error::Aborted { worker: origin, reason: "test".to_string() } }
    }

    fn lost(origin: usize) -> Cause {
        Cause { origin, error: Error::PeerLost { process: 9, reason: "test".to_string() } }
    }

    fn worker(verdict: &Verdict) -> Option<usize> {
        match verdict.report()? {
            Error::Aborted { worker, .. } => Some(worker),
            _ => None,
        }
    }

    #[test]
    fn the_lowest_process_wins_and_is_waited_for() {
        let verdict = Verdict::new([0, 1, 3]);
        assert!(verdict.report().is_none());
        let mut told = Vec::new();
        assert!(verdict.stop(None, cause(2), |cause| told.push(cause.origin)));
        assert!(!verdict.stop(None, cause(0), |_| unreachable!("told once")), "the first of a process stays");
        assert!(!verdict.state().is_decided());
        assert!(!verdict.stop(Some(1), cause(1), |_| unreachable!("told once")));
        verdict.ended(0);
        assert_eq!(worker(&verdict), Some(1), "process 3 could know none that is better");
        verdict.stop(Some(3), cause(0), |_| ());
        assert_eq!((worker(&verdict), told), (Some(1), vec![2]), "what was reported stays");
    }

    #[test]
    fn a_lost_process_gives_way_to_what_made_it_leave() {
        let verdict = Verdict::new([0, 2]);
        verdict.stop(None, lost(1), |_| ());
        verdict.ended(0);
        assert!(!verdict.state().is_decided());
        verdict.stop(Some(2), cause(2), |_| ());
        assert_eq!(worker(&verdict), Some(2));
        let alone = Verdict::new([]);
        alone.stop(None, lost(0), |_| ());
        assert!(matches!(alone.report(), Some(Error::PeerLost { .. })));
    }
}
