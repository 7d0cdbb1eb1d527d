//! Scopes: where streams and operators are made.

use std::any::Any;
use std::rc::Rc;
use std::sync::Arc;

use penstock_progress::timestamp::{Refines, Timestamp};

use crate::activate::Activator;
use crate::fabric::Waker;
use crate::input::InputHandle;
use crate::nested::{Nested, NestedRegion};
use crate::region::{Body, Parent, Region};
use crate::stream::Stream;

/// A scope of a dataflow that is being built. Clones are the same scope.
pub struct Scope<T: Timestamp> {
    pub(crate) region: Rc<Region<T>>,
}

impl<T: Timestamp> Scope<T> {
    pub(crate) fn new(region: Rc<Region<T>>) -> Self {
        Scope { region }
    }

    /// Index of the worker.
    pub fn index(&self) -> usize {
        self.region.core.index()
    }

    /// How many workers there are now.
    pub fn peers(&self) -> usize {
        self.region.core.peers()
    }

    /// Whether the worker of this rank is a thread of this process: blocks go to it as they are.
    pub fn is_local(&self, rank: usize) -> bool {
        let core = &self.region.core;
        core.target(rank, false).is_some_and(|id| core.is_local(id))
    }

    /// The place of this worker among those that blocks are routed to, from 0 on: see [`Worker::rank`](crate::Worker::rank).
    pub fn rank(&self) -> Option<usize> {
        Some(self.region.core.rank()).filter(|rank| *rank != usize::MAX)
    }

    /// Whether blocks are routed to the worker of this index.
    pub fn has_member(&self, index: usize) -> bool {
        self.region.core.target(index, true).is_some()
    }

    /// Whether workers may join and leave while it runs.
    pub fn is_joinable(&self) -> bool {
        self.region.core.membership().is_some()
    }

    /// Whether this worker joins a run that others began, or did so: its operators began without capabilities.
    pub fn joins(&self) -> bool {
        self.region.core.membership().is_some_and(|membership| membership.joins())
    }

    /// The scope's name, after those around it.
    pub fn path(&self) -> &str {
        &self.region.path
    }

    /// For an operator that makes more than it is given: whether it may send now, as [`Worker::is_congested`](crate::Worker::is_congested) tells of
    /// sources. If not, it runs again when it may, and should send nothing until then. What it takes in meanwhile is its own to bound.
    /// Cost: a look at one flag per other process.
    pub fn has_room(&self, operator: &Activator) -> bool {
        self.region.core.has_room(operator)
    }

    /// Wakes the worker from any thread.
    pub fn waker(&self) -> Waker {
        self.region.core.waker()
    }

    /// A stream that the program feeds. Each worker feeds its own part.
    pub fn new_input<D: Clone + 'static>(&self) -> (InputHandle<T, D>, Stream<T, D>) {
        InputHandle::open(self)
    }

    /// What the workers of this process have in common at this place of the graph: the first to build it makes it, the others get the
    /// same value. Workers of other processes have their own. As with operators, all workers ask for the same in the same order.
    ///
    /// ```
    /// use std::sync::atomic::{AtomicU64, Ordering};
    /// use penstock_dataflow::{BoxError, Error, execute, fabric};
    ///
    /// let threads = execute(fabric::threads(3), |worker| {
    ///     let count = worker.dataflow::<u64, _>("counted", |scope| {
    ///         let count = scope.common(|| AtomicU64::new(0));
    ///         count.fetch_add(1, Ordering::Relaxed);
    ///         count
    ///     });
    ///     // It ends when all workers have built it.
    ///     while worker.step_or_park(None)? {}
    ///     Ok::<_, BoxError>(count)
    /// });
    /// for thread in threads {
    ///     assert_eq!(thread.join().unwrap()?.load(Ordering::Relaxed), 3);
    /// }
    /// # Ok::<(), Error>(())
    /// ```
    pub fn common<V: Any + Send + Sync>(&self, make: impl FnOnce() -> V) -> Arc<V> {
        self.region.core.common(make)
    }

    /// Builds a scope within this one, whose times refine those of this one. Streams cross its border with
    /// [`Stream::enter`] and [`Stream::leave`].
    pub fn nested<I: Refines<T>, R>(&self, name: &str, build: impl FnOnce(&mut Scope<I>) -> R) -> R {
        let outer = &self.region;
        // The node must exist before the region that refers to it; its body follows at once.
        let node = outer.next_node();
        let parent = Parent { region: Rc::downgrade(outer), node };
        let inner: Rc<Region<I>> =
            Region::new(outer.core.clone(), outer.family.clone(), outer.operator_name(name), Some(Box::new(parent)));
        let nested: Rc<dyn Nested<T>> = Rc::new(NestedRegion::<T, I>::new(inner.clone()));
        outer.add_node(name, Body::Nested(nested));
        build(&mut Scope::new(inner))
    }
}

impl<T: Timestamp> Clone for Scope<T> {
    fn clone(&self) -> Self {
        Scope { region: self.region.clone() }
    }
}

impl<T: Timestamp> std::fmt::Debug for Scope<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scope").field("path", &self.path()).finish()
    }
}
