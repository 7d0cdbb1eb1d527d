//! Workers of a process that takes part in the run of another one, which [gathers](super::GroupConfig::gather).
//!
//! Owns the threads: each builds the plan, joins, steps, and leaves when it is asked to. What they compute, and where its results go, is
//! decided by the first worker, which alone is fed.
//!
//! Invariants: a worker that is asked to leave owns no bin (control took them away before); the error of one that has not joined stops nobody else.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam::channel::{Sender, bounded};
use penstock_dataflow::{Endpoint, Waker, Worker};

use super::build::{self, Shared};
use super::group::{GroupConfig, HostError};
use super::resident::Resident;

/// How often one that waits for its place looks whether it was stopped.
const JOIN_TICK: Duration = Duration::from_millis(50);

/// What the workers tell, each for itself.
#[derive(Debug)]
pub enum CrewEvent {
    /// It has its place in the run.
    Joined {
        /// Its index.
        worker: usize,
    },
    /// It has left the run as asked, or all is done.
    Left {
        /// Its index.
        worker: usize,
    },
    /// It has failed; once it had joined, so has the run.
    Failed {
        /// Its index.
        worker: usize,
        /// Why.
        error: HostError,
    },
}

#[derive(Default)]
struct Wishes {
    leave: AtomicBool,
    stop: AtomicBool,
}

/// See the module. Dropped, it lets its threads end without waiting for them.
pub struct Crew {
    config: GroupConfig,
    wishes: Arc<Wishes>,
    threads: Vec<(Waker, JoinHandle<()>)>,
}

impl Crew {
    /// Starts one thread per seat. `config` is that of the first worker when the run began.
    ///
    /// # Errors
    /// When the bins do not fit the plan, or the system gives no thread; then those that were started end.
    pub fn start(config: GroupConfig, seats: Vec<Endpoint>, events: &Sender<CrewEvent>) -> Result<Crew, HostError> {
        let local = seats.iter().map(Endpoint::index).collect::<Vec<_>>();
        let shared = Arc::new(Shared::new(&config, &local, &mut Resident::fresh())?);
        let mut crew = Crew { config, wishes: Arc::default(), threads: Vec::new() };
        for seat in seats {
            let (worker, (wakes, waker)) = (seat.index(), bounded(1));
            let (config, shared, wishes, events) =
                (crew.config.clone(), shared.clone(), crew.wishes.clone(), events.clone());
            let thread = std::thread::Builder::new().name(format!("penstock-{worker}")).spawn(move || {
                let outcome = take_part(seat, &config, &shared, &wishes, &wakes, &events);
                let _ = events.send(match outcome {
                    Ok(()) => CrewEvent::Left { worker },
                    Err(error) => CrewEvent::Failed { worker, error },
                });
            });
            let thread = thread.map_err(|error| HostError::Thread { worker, message: error.to_string() })?;
            let waker = waker.recv().expect("a worker sends its waker before anything can fail");
            crew.threads.push((waker, thread));
        }
        Ok(crew)
    }

    /// Asks all workers to leave the run. They own no bin any more.
    pub fn leave(&self) {
        self.wishes.leave.store(true, Ordering::Release);
        self.wake();
    }

    /// Asks all workers to end at the next turn, without waiting for them: with them ends the run, unless they have left.
    pub fn ask_to_stop(&self) {
        self.wishes.stop.store(true, Ordering::Release);
        self.config.callbacks.stop();
        self.wake();
    }

    /// Whether all threads have ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.threads.iter().all(|(_, thread)| thread.is_finished())
    }

    fn wake(&self) {
        self.threads.iter().for_each(|(waker, _)| waker.wake());
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.ask_to_stop();
    }
}

fn take_part(
    seat: Endpoint,
    config: &GroupConfig,
    shared: &Shared,
    wishes: &Wishes,
    wakes: &Sender<Waker>,
    events: &Sender<CrewEvent>,
) -> Result<(), HostError> {
    let mut worker = Worker::new(seat);
    let _ = wakes.send(worker.waker());
    let mut built = build::build(&mut worker, config, shared, None)?;
    while worker.try_bootstrap()?.is_none() {
        if wishes.stop.load(Ordering::Acquire) {
            return Ok(());
        }
        worker.park(Some(JOIN_TICK));
    }
    // The first worker alone feeds and controls.
    drop((built.input.take(), built.control.take()));
    let _ = events.send(CrewEvent::Joined { worker: worker.index() });
    let mut leaves = false;
    while !wishes.stop.load(Ordering::Acquire) && !worker.has_left() {
        if !leaves && wishes.leave.load(Ordering::Acquire) {
            worker.start_leaving()?;
            leaves = true;
        }
        if !worker.step_or_park(None)? {
            break;
        }
    }
    Ok(())
}
