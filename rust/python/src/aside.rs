//! Calls that block on a socket, done aside so that Ctrl-C still works.
//!
//! An [`Aside`] is one thread that owns a value and does one job after the other with it. The caller waits in steps
//! ([`enter`](crate::enter::enter)); when it leaves early (a signal), the job goes on and its result is dropped. The
//! thread ends with the handle, after the job under way.

use std::time::Duration;

use crossbeam::channel::{RecvTimeoutError, Sender, bounded, unbounded};
use pyo3::prelude::*;

use crate::enter::enter;
use crate::errors::{self, Kind, Problem};

type Job<S> = Box<dyn FnOnce(&mut S) + Send>;

/// See the module.
pub(crate) struct Aside<S> {
    class: &'static str,
    jobs: Sender<Job<S>>,
}

impl<S: Send + 'static> Aside<S> {
    /// A thread that owns `value`; `class` names the handle in messages.
    pub(crate) fn new(class: &'static str, mut value: S) -> PyResult<Self> {
        let (jobs, todo) = unbounded::<Job<S>>();
        std::thread::Builder::new()
            .name(format!("penstock-{}", class.to_ascii_lowercase()))
            .spawn(move || todo.into_iter().for_each(|job| job(&mut value)))
            .map_err(|error| errors::raise(Kind::Engine, &format!("no thread for a {class}: {error}")))?;
        Ok(Self { class, jobs })
    }

    /// Does `job` aside and waits for what it returns.
    pub(crate) fn call<T: Send + 'static>(
        &self,
        py: Python<'_>,
        job: impl FnOnce(&mut S) -> T + Send + 'static,
    ) -> PyResult<T> {
        let (reply, outcome) = bounded(1);
        let class = self.class;
        let sent = self.jobs.send(Box::new(move |value| {
            // Nobody waits any more after a signal.
            let _ = reply.send(job(value));
        }));
        sent.map_err(|_| Problem::Poisoned(class))?;
        let waited = enter(py, None, |wait: Duration| match outcome.recv_timeout(wait) {
            Ok(made) => Ok(Some(made)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(Problem::Poisoned(class)),
        })?;
        waited.ok_or_else(|| Problem::Poisoned(class).into())
    }
}

/// Does one job in a thread of its own and waits for what it returns.
pub(crate) fn once<T: Send + 'static>(
    py: Python<'_>,
    class: &'static str,
    job: impl FnOnce() -> T + Send + 'static,
) -> PyResult<T> {
    Aside::new(class, ())?.call(py, |()| job())
}
