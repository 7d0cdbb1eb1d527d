//! Where a worker's things live: in a table of the thread that made it.
//!
//! Workers, streams, inputs and capabilities of the dataflow layer belong to one thread; Python may carry a handle anywhere. So
//! each worker has a [`Home`] in a table of its thread, and a handle is a [`Key`] into it: plain numbers. Any other thread gets
//! a `ThreadError`, a forked child a `ForkError`, and whoever comes after the worker's end a `ClosedError`.
//!
//! Invariants: no borrow of a table lasts while foreign code (Python, drops of user objects) runs; a handle that is dropped on
//! its thread frees its thing at once, on any other it goes to the [`Trash`], which wakes the worker and is emptied by its next
//! step, so that a capability that the garbage collector finds elsewhere still lets the frontier go.
//!
//! Departure: a table of handles per thread, since workers are not `Send` and Python's handles go anywhere.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::ThreadId;

use crossbeam::queue::SegQueue;
use penstock_dataflow::{Waker, Worker};
use pyo3::prelude::*;

use super::roll::Site;
use crate::errors::{self, Kind};
use crate::fork::Owner;

static NEXT: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static HOMES: RefCell<HashMap<u64, Rc<Home>>> = RefCell::default();
}

/// What was dropped on other threads.
pub(crate) struct Trash {
    keys: SegQueue<u64>,
    waker: Waker,
}

/// What one worker owns on its thread.
pub(crate) struct Home {
    owner: Owner,
    /// None while it steps or builds.
    worker: RefCell<Option<Worker>>,
    pub(crate) site: Site,
    things: RefCell<HashMap<u64, Rc<dyn Any>>>,
    next: Cell<u64>,
    trash: Arc<Trash>,
}

impl Home {
    /// Takes a worker in; returns what handles need to find it.
    pub(crate) fn open(worker: Worker, site: Site) -> Address {
        let serial = NEXT.fetch_add(1, Ordering::Relaxed);
        let trash = Arc::new(Trash { keys: SegQueue::new(), waker: worker.waker() });
        let owner = Owner::here();
        let home = Home {
            owner,
            worker: RefCell::new(Some(worker)),
            site,
            things: RefCell::default(),
            next: Cell::new(0),
            trash: trash.clone(),
        };
        HOMES.with_borrow_mut(|homes| homes.insert(serial, Rc::new(home)));
        Address { owner, thread: std::thread::current().id(), serial, trash }
    }

    /// Frees what other threads have let go.
    pub(crate) fn sweep(&self) {
        while let Some(key) = self.trash.keys.pop() {
            self.remove(key);
        }
    }

    /// All things of one kind.
    pub(crate) fn all<X: 'static>(&self) -> Vec<Rc<X>> {
        self.things.borrow().values().filter_map(|thing| thing.clone().downcast().ok()).collect()
    }

    fn remove(&self, key: u64) {
        let thing = self.things.borrow_mut().remove(&key);
        drop(thing);
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        if !self.owner.is_here() {
            // A forked child's copy: the parent's threads and sockets are behind it, and not here.
            std::mem::forget(self.worker.take());
            std::mem::forget(self.things.take());
            self.site.forget();
        }
    }
}

/// Where a home is: what every handle of it holds.
#[derive(Clone)]
pub(crate) struct Address {
    owner: Owner,
    thread: ThreadId,
    serial: u64,
    trash: Arc<Trash>,
}

impl Address {
    /// The home, when the caller is in its process and thread and it still exists.
    pub(crate) fn home(&self, py: Python<'_>, class: &str) -> PyResult<Rc<Home>> {
        self.owner.check(py, class)?;
        if self.thread != std::thread::current().id() {
            let message = format!(
                "this {class} belongs to the thread of its worker and was used in another one: hand data over, for \
                 example through a queue, and let the worker's thread use it"
            );
            return Err(errors::raise(Kind::Thread, &message));
        }
        self.here().ok_or_else(|| errors::raise(Kind::Closed, &format!("the worker of this {class} has ended")))
    }

    fn here(&self) -> Option<Rc<Home>> {
        HOMES.try_with(|homes| homes.borrow().get(&self.serial).cloned()).ok().flatten()
    }

    /// Puts a thing into the home; the caller is on its thread.
    pub(crate) fn keep<X: 'static>(&self, class: &'static str, thing: X) -> Key<X> {
        self.share(class, Rc::new(thing))
    }

    /// As [`Address::keep`] for a thing that others hold as well.
    pub(crate) fn share<X: 'static>(&self, class: &'static str, thing: Rc<X>) -> Key<X> {
        let mut key = u64::MAX;
        if let Some(home) = self.here() {
            key = home.next.replace(home.next.get() + 1);
            home.things.borrow_mut().insert(key, thing);
        }
        Key { class, address: self.clone(), key, kind: PhantomData }
    }

    /// Runs `work` detached from the interpreter with the worker, which is away from home meanwhile.
    ///
    /// # Errors
    /// `ClosedError`, `ThreadError`, `ForkError`; a `DataflowError` when the worker is stepping already.
    pub(crate) fn drive<R: Send>(
        &self,
        py: Python<'_>,
        doing: &'static str,
        work: impl FnOnce(&mut Worker, &Home) -> R + Send,
    ) -> PyResult<R> {
        drop(self.home(py, "Worker")?);
        py.detach(|| self.away(work)).ok_or_else(|| busy(doing))
    }

    /// As [`Address::drive`] for callers that are detached already and have found the home before; none when the worker is
    /// stepping.
    pub(crate) fn away<R>(&self, work: impl FnOnce(&mut Worker, &Home) -> R) -> Option<R> {
        let home = self.here()?;
        home.sweep();
        let mut away = Away::take(&home)?;
        Some(work(away.worker(), &home))
    }

    /// Takes the worker and everything of it away, for good.
    pub(crate) fn close(&self) {
        let home = HOMES.try_with(|homes| homes.borrow_mut().remove(&self.serial)).ok().flatten();
        let Some(home) = home else { return };
        // What is dropped may run Python code that drops further handles: no borrow lasts over it.
        let worker = home.worker.borrow_mut().take();
        drop(worker);
        home.site.clear();
        let things = std::mem::take(&mut *home.things.borrow_mut());
        drop(things);
    }
}

/// `DataflowError`: the worker is in the middle of something.
pub(crate) fn busy(doing: &str) -> PyErr {
    errors::raise(
        Kind::Dataflow,
        &format!("{doing} inside the logic of an operator is not possible: its worker is in a step"),
    )
}

/// A worker away from home; it comes back also when a panic ends the work.
struct Away<'a> {
    home: &'a Home,
    worker: Option<Worker>,
}

impl<'a> Away<'a> {
    fn take(home: &'a Home) -> Option<Self> {
        let worker = home.worker.try_borrow_mut().ok()?.take()?;
        Some(Away { home, worker: Some(worker) })
    }

    fn worker(&mut self) -> &mut Worker {
        self.worker.as_mut().expect("taken only by drop")
    }
}

impl Drop for Away<'_> {
    fn drop(&mut self) {
        *self.home.worker.borrow_mut() = self.worker.take();
    }
}

/// A handle's way to a thing at home.
pub(crate) struct Key<X: 'static> {
    class: &'static str,
    address: Address,
    key: u64,
    kind: PhantomData<fn() -> X>,
}

impl<X: 'static> Key<X> {
    /// The thing.
    pub(crate) fn get(&self, py: Python<'_>) -> PyResult<Rc<X>> {
        let home = self.address.home(py, self.class)?;
        let thing = home.things.borrow().get(&self.key).cloned();
        let thing = thing.and_then(|thing| thing.downcast::<X>().ok());
        thing.ok_or_else(|| errors::raise(Kind::Closed, &format!("this {} is closed", self.class)))
    }

    /// The thing, for callers that have found the home already.
    pub(crate) fn find(&self, home: &Home) -> Option<Rc<X>> {
        let thing = home.things.borrow().get(&self.key).cloned()?;
        thing.downcast::<X>().ok()
    }

    /// Where the thing is.
    pub(crate) fn address(&self) -> &Address {
        &self.address
    }
}

impl<X: 'static> Drop for Key<X> {
    fn drop(&mut self) {
        let address = &self.address;
        if !address.owner.is_here() {
            return;
        }
        if address.thread == std::thread::current().id() {
            if let Some(home) = address.here() {
                home.remove(self.key);
            }
        } else {
            address.trash.keys.push(self.key);
            address.trash.waker.wake();
        }
    }
}
