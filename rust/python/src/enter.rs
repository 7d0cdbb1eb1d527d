//! The one way into long-running Rust code.
//!
//! [`enter`] detaches from the interpreter, so that other Python threads run, and comes back at least every [`TICK`]
//! to let Python handle signals: Ctrl-C ends any call within one tick. The work is given in steps that wait no longer
//! than they are told; a step never holds a lock when it returns, so nothing waits for the interpreter under a lock.
//!
//! [`locked`] is the way to what a lock guards. Attached threads take no lock, and whoever has one makes no Python object, an
//! exception included: what goes wrong under a lock leaves as a value of Rust and is converted when the caller is attached again.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use pyo3::prelude::*;

use crate::ending::pause;

/// Longest time between two looks at pending signals.
pub(crate) const TICK: Duration = Duration::from_millis(20);

/// Runs `step` detached until it returns a value, an error or `timeout` (from now) is over: then `None`.
///
/// `step(wait)` does what it can, waiting at most `wait`, and returns `None` when there is nothing yet. It is called
/// at least once, with a zero wait when `timeout` is zero.
pub(crate) fn enter<T, E>(
    py: Python<'_>,
    timeout: Option<Duration>,
    mut step: impl FnMut(Duration) -> Result<Option<T>, E> + Send,
) -> PyResult<Option<T>>
where
    T: Send,
    E: Send + Into<PyErr>,
{
    // A timeout too long for the clock is no timeout.
    let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    loop {
        let wait = deadline.map_or(TICK, |deadline| TICK.min(deadline.saturating_duration_since(Instant::now())));
        let outcome = py.detach(|| step(wait));
        pause(py);
        let outcome = outcome.map_err(Into::into)?;
        if outcome.is_some() {
            return Ok(outcome);
        }
        py.check_signals()?;
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return Ok(None);
        }
    }
}

/// Runs `work` detached with what `mutex` guards. `work` never attaches.
pub(crate) fn locked<S: Send, T: Send>(py: Python<'_>, mutex: &Mutex<S>, work: impl FnOnce(&mut S) -> T + Send) -> T {
    py.detach(|| work(&mut mutex.lock().unwrap_or_else(PoisonError::into_inner)))
}

/// A timeout given in seconds by Python: `None` waits for ever; negative, NaN and absurd values are refused.
pub(crate) fn timeout(seconds: Option<f64>) -> PyResult<Option<Duration>> {
    seconds
        .map(|seconds| {
            Duration::try_from_secs_f64(seconds).map_err(|_| {
                crate::errors::raise(
                    crate::errors::Kind::Value,
                    &format!("timeout must be a number of seconds >= 0, got {seconds}"),
                )
            })
        })
        .transpose()
}
