//! Workers, and the seats they take.
//!
//! [`DataflowSeats`] are the places of one process in a run; each is taken by one thread, which becomes a worker there
//! ([`DataflowWorker`]). A step runs detached from the interpreter; logic in Python attaches for itself. A worker on the main
//! thread parks in ticks so that Ctrl-C is heard; others park until they are woken, also by [`DataflowSeats::stop`].

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use penstock_cluster::session::MeshDoor;
use penstock_coord::{Barrier, Sequencer};
use penstock_dataflow::{Door, Endpoint, Error, FabricGuard, JoinError, Ticket, Waker, Worker};
use pyo3::prelude::*;

use super::block::PyCause;
use super::coordination::{DataflowBarrier, DataflowSequencer, Pickled, Slot};
use super::failure;
use super::home::{Address, Home, Key, busy};
use super::input::InputState;
use super::roll::Site;
use super::stream::{DataflowScope, ScopeState};
use super::time::Level;
use crate::enter::{enter, locked, timeout};
use crate::errors::{self, Kind};
use crate::fork::Owner;

/// How often a joiner looks whether it was stopped.
const JOIN_TICK: Duration = Duration::from_millis(50);

/// How to stop the workers of a process from any thread.
#[derive(Default)]
pub(crate) struct StopSignal {
    stopped: AtomicBool,
    reason: Mutex<String>,
    wakers: Mutex<Vec<Waker>>,
    /// Workers whose program was told that the run has ended.
    heard: Mutex<Vec<usize>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl StopSignal {
    fn stop(&self, reason: &str) {
        let mut first = lock(&self.reason);
        if !self.stopped.load(Ordering::Acquire) {
            *first = reason.to_owned();
            self.stopped.store(true, Ordering::Release);
        }
        drop(first);
        lock(&self.wakers).iter().for_each(Waker::wake);
    }

    fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// Ends a worker that finds itself stopped.
    fn obey(&self, worker: &Worker) {
        if self.stopped.load(Ordering::Acquire) {
            let reason = lock(&self.reason).clone();
            worker.abort(Error::Aborted { worker: worker.index(), reason });
        }
    }
}

/// The workers' places of one process in a run.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct DataflowSeats {
    owner: Owner,
    process: usize,
    processes: usize,
    endpoints: Mutex<Vec<Option<Endpoint>>>,
    guard: Mutex<Option<FabricGuard>>,
    /// How many workers it began with.
    founders: usize,
    door: Option<Door>,
    /// Where processes come that join.
    port: Mutex<Option<MeshDoor>>,
    signal: Arc<StopSignal>,
}

impl DataflowSeats {
    pub(crate) fn new(process: usize, processes: usize, endpoints: Vec<Endpoint>, guard: Option<FabricGuard>) -> Self {
        let founders = endpoints.len();
        DataflowSeats {
            owner: Owner::here(),
            process,
            processes,
            endpoints: Mutex::new(endpoints.into_iter().map(Some).collect()),
            guard: Mutex::new(guard),
            founders,
            door: None,
            port: Mutex::default(),
            signal: Arc::default(),
        }
    }

    /// Seats of one process to which more workers may come through the door.
    pub(crate) fn joinable(
        process: usize,
        processes: usize,
        endpoints: Vec<Endpoint>,
        door: Door,
        guard: Option<FabricGuard>,
    ) -> Self {
        let mut seats = DataflowSeats::new(process, processes, endpoints, guard);
        seats.door = Some(door);
        seats
    }

    /// The door, while the seats are open.
    pub(crate) fn door(&self) -> Option<&Door> {
        self.door.as_ref()
    }

    /// The place of the first worker of this process, once.
    pub(crate) fn first(&self, py: Python<'_>) -> Option<Endpoint> {
        locked(py, &self.endpoints, |endpoints| endpoints.first_mut().and_then(Option::take))
    }

    /// Takes in processes until it is closed.
    pub(crate) fn keep(&self, port: MeshDoor) {
        *lock(&self.port) = Some(port);
    }
}

#[pymethods]
impl DataflowSeats {
    /// Index of this process.
    #[getter]
    pub(crate) fn process(&self) -> usize {
        self.process
    }

    /// How many processes there are.
    #[getter]
    fn processes(&self) -> usize {
        self.processes
    }

    /// Workers of each process.
    #[getter]
    fn threads(&self) -> usize {
        self.founders
    }

    /// Waits for the place of one worker more: its seat and its index; none when all dataflows are finished.
    fn admit(&self, py: Python<'_>) -> PyResult<Option<(usize, usize)>> {
        self.owner.check(py, "Seats")?;
        let door = self.door.as_ref().ok_or_else(|| {
            errors::raise(Kind::Value, "nobody can join these seats: they were made for fixed workers")
        })?;
        let given = py.detach(|| door.ask(1).and_then(Ticket::seats));
        match given {
            Ok(seats) => {
                let index = seats.first().map_or(0, Endpoint::index);
                let seat = locked(py, &self.endpoints, |endpoints| {
                    endpoints.extend(seats.into_iter().map(Some));
                    endpoints.len() - 1
                });
                Ok(Some((seat, index)))
            }
            Err(JoinError::Stopped(error)) => Err(failure::raise(py, &error, usize::MAX)),
            Err(_) => Ok(None),
        }
    }

    /// Makes the calling thread the worker on a seat of this process; `main`: it is the thread that hears signals.
    fn worker(&self, py: Python<'_>, thread: usize, main: bool) -> PyResult<DataflowWorker> {
        self.owner.check(py, "Seats")?;
        let taken = locked(py, &self.endpoints, |endpoints| endpoints.get_mut(thread).and_then(Option::take));
        let endpoint = taken.ok_or_else(|| {
            let message = format!("seat {thread} of {} is taken or does not exist", self.founders);
            errors::raise(Kind::Value, &message)
        })?;
        Ok(DataflowWorker::new(endpoint, self.signal.clone(), main))
    }

    /// Whether the program of a worker here was told that the run has ended: it unwinds by itself.
    fn heard(&self, py: Python<'_>, index: usize) -> bool {
        locked(py, &self.signal.heard, |heard| heard.contains(&index))
    }

    /// Stops all workers of the run, here and in the other processes: their next step raises. From any thread.
    fn stop(&self, py: Python<'_>, reason: &str) -> PyResult<()> {
        self.owner.check(py, "Seats")?;
        py.detach(|| {
            self.signal.stop(reason);
            if let Some(guard) = &*lock(&self.guard) {
                let worker = self.process * self.founders;
                guard.abort(Error::Aborted { worker, reason: reason.to_owned() });
            }
        });
        Ok(())
    }

    /// Leaves the run: ends its connections. After the workers have ended; again: nothing.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.owner.check(py, "Seats")?;
        py.detach(|| {
            drop(lock(&self.port).take());
            let endpoints = std::mem::take(&mut *lock(&self.endpoints));
            drop(endpoints);
            let guard = lock(&self.guard).take();
            drop(guard);
        });
        Ok(())
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(errors::no_pickle("DataflowSeats", "each process of a run connects for itself"))
    }
}

impl Drop for DataflowSeats {
    fn drop(&mut self) {
        if !self.owner.is_here() {
            // A forked child: the threads and the meaning of the sockets are the parent's.
            std::mem::forget(lock(&self.guard).take());
            std::mem::forget(lock(&self.port).take());
            std::mem::forget(std::mem::take(&mut *lock(&self.endpoints)));
        }
    }
}

/// What handles that step a worker know of it.
#[derive(Clone)]
pub(crate) struct Post {
    pub(crate) index: usize,
    /// It is on the thread that hears signals.
    pub(crate) main: bool,
    signal: Arc<StopSignal>,
    /// How many workers there were after the last step.
    peers: Arc<AtomicUsize>,
    /// Whether the program was told that its links are congested, and has not been woken since by their end.
    congested: Arc<AtomicBool>,
}

impl Post {
    /// Ends a worker that was stopped from outside, or that has built other dataflows than one that has ended.
    pub(crate) fn watch(&self, worker: &mut Worker, home: &Home) -> Result<(), Error> {
        self.signal.obey(worker);
        if let Some(error) = home.site.disagreement(self.index) {
            worker.abort(error);
            worker.step()?;
        }
        Ok(())
    }

    /// A step, or several, have been done.
    pub(crate) fn stepped(&self, worker: &Worker) {
        self.peers.store(worker.peers(), Ordering::Relaxed);
    }

    /// The exception of an error; where it ended this worker, its program has heard of that from now on.
    pub(crate) fn raise(&self, py: Python<'_>, error: &Error) -> PyErr {
        if !matches!(error, Error::Member { .. }) {
            locked(py, &self.signal.heard, |heard| heard.push(self.index));
        }
        failure::raise(py, error, self.index)
    }
}

/// One worker, bound to the thread that made it.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct DataflowWorker {
    address: Address,
    post: Post,
}

impl DataflowWorker {
    fn new(endpoint: Endpoint, signal: Arc<StopSignal>, main: bool) -> Self {
        let (index, peers) = (endpoint.index(), endpoint.peers());
        let mut worker = Worker::new(endpoint);
        lock(&signal.wakers).push(worker.waker());
        let site = Site::open(&mut worker);
        let post = Post { index, main, signal, peers: Arc::new(AtomicUsize::new(peers)), congested: Arc::default() };
        DataflowWorker { address: Home::open(worker, site), post }
    }

    /// One step, and what it means for the program: whether one of its dataflows is unfinished.
    fn step_here(&self, worker: &mut Worker, home: &Home) -> Result<bool, Error> {
        self.post.watch(worker, home)?;
        worker.step()?;
        self.post.stepped(worker);
        self.post.watch(worker, home)?;
        Ok(worker.dataflows() > home.site.own())
    }

    /// Builds a dataflow of `penstock-coord` beside the program's; all workers do it at the same place.
    fn beside<X: 'static>(
        &self,
        py: Python<'_>,
        name: &'static str,
        make: impl FnOnce(&mut Worker) -> X + Send,
    ) -> PyResult<Key<Slot<X>>> {
        let made = self.address.drive(py, "making a barrier or sequencer", |worker, home| {
            if home.site.is_building() {
                return None;
            }
            home.site.note(name);
            let made = make(worker);
            Some(self.address.keep(name, Slot::new(made)))
        })?;
        made.ok_or_else(|| {
            errors::raise(
                Kind::Graph,
                &format!("a {name} is made inside a dataflow that is being built: end that first"),
            )
        })
    }

    fn told(&self, py: Python<'_>, outcome: Result<bool, Error>) -> PyResult<bool> {
        outcome.map_err(|error| self.post.raise(py, &error))
    }

    /// Parks until there is something to do, then steps.
    fn pump(&self, py: Python<'_>, limit: Option<Duration>) -> PyResult<bool> {
        drop(self.address.home(py, "Worker")?);
        let idle = |worker: &Worker, home: &Home| worker.dataflows() > home.site.own() && !worker.has_work();
        // That a peer has taken what was sent is no work, but what a program may wait for, who was told so before this call.
        let congested = AtomicBool::new(self.post.congested.swap(false, Ordering::Relaxed));
        let wait = |wait: Option<Duration>, last: bool| {
            self.address.away(|worker, home| {
                congested.fetch_or(worker.is_congested(), Ordering::Relaxed);
                let waits = idle(worker, home) && !self.post.signal.is_stopped();
                if waits {
                    worker.park(wait);
                    home.sweep();
                }
                let goes_on = congested.load(Ordering::Relaxed) && !worker.is_congested();
                let over = waits && idle(worker, home) && !self.post.signal.is_stopped() && !goes_on;
                (last || !over).then(|| self.step_here(worker, home))
            })
        };
        let outcome = match self.post.main {
            // Only this thread hears signals, so it must look for them.
            true => match enter(py, limit, |tick| wait(Some(tick), false).ok_or_else(|| busy("step_or_park")))? {
                Some(outcome) => Some(outcome),
                None => py.detach(|| wait(Some(Duration::ZERO), true)).flatten(),
            },
            false => py.detach(|| wait(limit, true)).flatten(),
        };
        self.told(py, outcome.ok_or_else(|| busy("step_or_park"))?)
    }
}

#[pymethods]
impl DataflowWorker {
    /// Index of this worker among all workers.
    #[getter]
    fn index(&self) -> usize {
        self.post.index
    }

    /// How many workers there were after the last step.
    #[getter]
    fn peers(&self) -> usize {
        self.post.peers.load(Ordering::Relaxed)
    }

    /// Takes its place, once all dataflows are built: true at a worker that joins a run, which waits for it.
    fn bootstrap(&self, py: Python<'_>) -> PyResult<bool> {
        let outcome = self.address.drive(py, "bootstrap()", |worker, _| {
            loop {
                self.post.signal.obey(worker);
                if let Some(joined) = worker.try_bootstrap()? {
                    self.post.stepped(worker);
                    return Ok(joined);
                }
                worker.park(Some(JOIN_TICK));
            }
        })?;
        self.told(py, outcome)
    }

    /// Leaves the run; its dataflows are gone then.
    fn leave(&self, py: Python<'_>) -> PyResult<()> {
        let begun = self.address.drive(py, "leave()", |worker, _| worker.start_leaving().map(|()| true))?;
        self.told(py, begun)?;
        loop {
            let leaves = self.address.drive(py, "leave()", |worker, _| worker.is_leaving())?;
            if !self.told(py, leaves)? || !self.pump(py, None)? {
                return Ok(());
            }
        }
    }

    /// Begins a dataflow; `start` ends it.
    fn open(&self, py: Python<'_>, name: &str) -> PyResult<DataflowScope> {
        let made = self.address.drive(py, "dataflow()", |worker, home| {
            let (scope, open) = home.site.build(worker, name)?;
            let state = ScopeState { scope: Level::Root(scope), depth: 1, open, bounded: false };
            Some(DataflowScope::new(&self.address, state))
        })?;
        made.ok_or_else(|| {
            errors::raise(Kind::Graph, &format!("dataflow {name:?} begins inside another one: end that first"))
        })
    }

    /// Starts the dataflow that was begun.
    fn start(&self, py: Python<'_>) -> PyResult<()> {
        let outcome = self.address.drive(py, "dataflow()", |worker, home| {
            home.site.start(worker);
            if let Some(error) = home.site.disagreement(worker.index()) {
                worker.abort(error);
            }
            match worker.failure() {
                Some(_) => worker.step(),
                None => Ok(true),
            }
        })?;
        self.told(py, outcome).map(drop)
    }

    /// A rendezvous of all workers.
    fn barrier(&self, py: Python<'_>) -> PyResult<DataflowBarrier> {
        let key = self.beside(py, "barrier", Barrier::new)?;
        Ok(DataflowBarrier::new(key, self.post.clone()))
    }

    /// One order of what all workers push.
    fn sequencer(&self, py: Python<'_>) -> PyResult<DataflowSequencer> {
        let key = self.beside(py, "sequencer", Sequencer::<Pickled>::new)?;
        DataflowSequencer::new(py, key, self.post.clone())
    }

    /// Whether more data waits for other processes than their links should hold.
    #[getter]
    fn is_congested(&self, py: Python<'_>) -> PyResult<bool> {
        let congested = self.address.drive(py, "is_congested", |worker, _| worker.is_congested())?;
        self.post.congested.store(congested, Ordering::Relaxed);
        Ok(congested)
    }

    /// Does what can be done now. True while a dataflow is unfinished.
    fn step(&self, py: Python<'_>) -> PyResult<bool> {
        let outcome = self.address.drive(py, "step()", |worker, home| self.step_here(worker, home))?;
        self.told(py, outcome)
    }

    /// Parks while there is nothing to do, for at most `timeout` seconds, then steps.
    #[pyo3(signature = (timeout=None))]
    fn step_or_park(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let limit = self::timeout(timeout)?;
        self.pump(py, limit)
    }

    /// Ends the program: closes its inputs, tells the other workers, and steps until all dataflows are finished everywhere.
    fn finish(&self, py: Python<'_>) -> PyResult<()> {
        let home = self.address.home(py, "Worker")?;
        home.all::<InputState>().iter().for_each(|input| input.close());
        home.all::<Slot<Barrier>>().iter().for_each(|barrier| barrier.end());
        home.all::<Slot<Sequencer<Pickled>>>().iter().for_each(|sequencer| sequencer.end());
        home.site.end(self.post.index);
        drop(home);
        while self.pump(py, None)? {}
        Ok(())
    }

    /// Stops this worker and all its peers, because its program raised this exception.
    fn abort(&self, py: Python<'_>, exception: &Bound<'_, PyAny>) -> PyResult<()> {
        let cause = Arc::new(PyCause::new(py, PyErr::from_value(exception.clone())));
        self.address.drive(py, "abort()", |worker, _| {
            worker.abort(Error::Program { worker: worker.index(), source: cause });
        })
    }

    /// Drops the worker and everything that belongs to it. Again: nothing.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        match self.address.home(py, "Worker") {
            Ok(home) => drop(home),
            Err(error) if error.get_type(py).name()? == "ClosedError" => return Ok(()),
            Err(error) => return Err(error),
        }
        py.detach(|| self.address.close());
        Ok(())
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(errors::no_pickle("DataflowWorker", "a worker is its thread"))
    }
}
