//! One order of what all workers push, read the same by every worker.
//!
//! The dataflow is a source and a sink with a broadcast between them. What a worker pushed since its last step leaves as one block, at
//! the time of the source's capability, and the source moves to the next time. Every worker sorts the blocks by time and then
//! by sender, and releases those that the frontier has passed: no block can then still come before them.
//!
//! **Order.** Times are counters. A source that receives a block moves beyond its time (in the step that reads it, whether or not its
//! program pushes anything), as Lamport's clocks do. So elements are ordered by (counter, worker, place among the worker's own), which
//! needs no order on elements and keeps each worker's own pushes as they were; and an element pushed after another one was read
//! comes after it. An idle sequencer sends nothing and keeps nobody awake.
//!
//! **Departure from the post** (B-07, B-10): there sources stamp with the nanoseconds elapsed since each worker's start. Then delivery
//! waits until the slowest clock has passed the stamp: workers whose clocks began ten seconds apart deliver ten seconds late, and
//! every worker must be stepped without pause so that its time goes on. A counter follows the messages themselves.
//!
//! A worker that does not step holds everyone back; one that dropped or closed its sequencer does not. What is not read waits in
//! memory. There is no fault tolerance: when a worker fails, all stop with its error.
//!
//! A leaver pushes until nothing can come for it any more. What was pushed by then, also by operators, is sent.
//!
//! Who joins a run reads on from where the peer that serves it stood when it was let in: it learns what that one has not released (the key of a block is
//! unique, so what both were sent counts once). Until it is taught the peer releases nothing.
//!
//! Source: timely's post on sequencing (B-06 to B-11).

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::time::Duration;

use penstock_dataflow::{Activator, BoxError, Exchange, InputHandle, OperatorBuilder, Worker};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::CoordError;

/// An element with its place in the order: places are unique, ascending, and the same on every worker.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Entry<T> {
    /// Counter of the block that brought it.
    pub time: u64,
    /// Worker that pushed it.
    pub worker: usize,
    /// Place within its block.
    pub index: usize,
    /// What was pushed.
    pub element: T,
}

/// Time and sender of a block: unique.
type Place = (u64, usize);

/// What the handle shares with its operators.
struct Shared<T> {
    /// Pushed, not sent yet.
    pushed: RefCell<Vec<T>>,
    /// What sends; none once closed.
    input: RefCell<Option<InputHandle<u64, Vec<T>>>>,
    /// No more pushes: the capability goes when what was pushed is sent.
    closing: Cell<bool>,
    /// Released and not read.
    released: RefCell<VecDeque<Entry<T>>>,
    /// Whether nobody reads any more.
    unread: Cell<bool>,
    /// Whether all workers have closed and everything is released.
    ended: Cell<bool>,
    /// Whether the dataflow is there.
    alive: Cell<bool>,
}

impl<T> Shared<T> {
    /// Moves the source beyond a time that was received.
    fn follow(&self, time: u64) -> Result<(), BoxError> {
        if let Some(input) = self.input.borrow_mut().as_mut()
            && *input.time() <= time
        {
            input.advance_to(after(time)?).expect("the time after a later one");
        }
        Ok(())
    }
}

/// The next time: peers say what they like, also the last there is.
fn after(time: u64) -> Result<u64, BoxError> {
    time.checked_add(1)
        .ok_or_else(|| format!("an element was pushed at time {time}, and there is none after it").into())
}

/// Tells the handle when its dataflow is dropped.
struct Life<T>(Rc<Shared<T>>);

impl<T> Drop for Life<T> {
    fn drop(&mut self) {
        self.0.alive.set(false);
        // Without its dataflow it means nothing, and the handle may live long.
        drop(self.0.input.take());
    }
}

/// A shared log: every worker pushes, and every worker reads the same order. All workers make it at the same place of their
/// program.
///
/// ```
/// use penstock_coord::Sequencer;
/// use penstock_dataflow::{Worker, fabric};
///
/// let mut worker = Worker::new(fabric::threads(1).remove(0));
/// let mut sequencer = Sequencer::new(&mut worker);
/// sequencer.push('z')?;
/// sequencer.push('a')?;
/// assert_eq!(sequencer.next(), None); // not before a step
/// assert_eq!(sequencer.wait_next(&mut worker, None)?, Some('z'));
/// assert_eq!(sequencer.next(), Some('a'));
/// sequencer.close();
/// while worker.step()? {}
/// # Ok::<_, penstock_coord::CoordError>(())
/// ```
pub struct Sequencer<T>(Pusher<T>);

/// Pushes to a [`Sequencer`] beside its handle, as the logic of an operator does that runs while the handle waits. Belongs to the thread of
/// its worker; clones push to the same log. It ends with the sequencer.
///
/// ```
/// use penstock_coord::Sequencer;
/// use penstock_dataflow::{Worker, fabric};
///
/// let mut worker = Worker::new(fabric::threads(1).remove(0));
/// let mut sequencer = Sequencer::new(&mut worker);
/// let pusher = sequencer.pusher();
/// let mut input = worker.dataflow::<u64, _>("push", |scope| {
///     let (input, stream) = scope.new_input::<char>();
///     stream.inspect(move |_, letter| pusher.push(*letter).unwrap());
///     input
/// });
/// input.send('a');
/// assert_eq!(sequencer.wait_next(&mut worker, None)?, Some('a'));
/// # Ok::<_, penstock_coord::CoordError>(())
/// ```
pub struct Pusher<T> {
    owner: usize,
    shared: Rc<Shared<T>>,
    source: Activator,
}

impl<T> Pusher<T> {
    /// As [`Sequencer::push`].
    ///
    /// # Errors
    /// As there.
    pub fn push(&self, element: T) -> Result<(), CoordError> {
        let (what, worker) = ("sequencer", self.owner);
        if self.shared.closing.get() {
            return Err(CoordError::Closed { what, worker });
        }
        if !self.shared.alive.get() {
            return Err(CoordError::Gone { what, worker });
        }
        if self.shared.input.borrow().as_ref().is_some_and(|input| !input.announce()) {
            return Err(CoordError::Ended { what, worker });
        }
        let mut pushed = self.shared.pushed.borrow_mut();
        if pushed.is_empty() {
            self.source.activate();
        }
        pushed.push(element);
        Ok(())
    }

    /// As [`Sequencer::close`].
    pub fn close(&self) {
        if self.shared.closing.replace(true) {
            return;
        }
        if self.shared.pushed.borrow().is_empty() {
            drop(self.shared.input.take());
        } else {
            self.source.activate();
        }
    }

    /// As [`Sequencer::is_finished`].
    pub fn is_finished(&self) -> bool {
        self.shared.ended.get() && self.shared.released.borrow().is_empty()
    }
}

impl<T> Clone for Pusher<T> {
    fn clone(&self) -> Self {
        Pusher { owner: self.owner, shared: self.shared.clone(), source: self.source.clone() }
    }
}

impl<T> std::fmt::Debug for Pusher<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pusher").field("worker", &self.owner).finish_non_exhaustive()
    }
}

impl<T: Serialize + DeserializeOwned + Send + Clone + 'static> Sequencer<T> {
    /// A new sequencer: builds its dataflow.
    pub fn new(worker: &mut Worker) -> Self {
        let shared = Rc::new(Shared {
            pushed: RefCell::new(Vec::new()),
            input: RefCell::new(None),
            closing: Cell::new(false),
            released: RefCell::new(VecDeque::new()),
            unread: Cell::new(false),
            ended: Cell::new(false),
            alive: Cell::new(true),
        });
        let owner = worker.index();
        let source = worker.dataflow("sequencer", |scope| {
            let (input, stream) = scope.new_input::<Vec<T>>();
            *shared.input.borrow_mut() = Some(input);
            let mut builder = OperatorBuilder::new(scope, "source");
            builder.notify(false);
            let activator = builder.activator();
            let life = Life(shared.clone());
            builder.build(|_| {
                move |_| {
                    let shared = &life.0;
                    let mut held = shared.input.borrow_mut();
                    if let Some(input) = held.as_mut() {
                        let block = shared.pushed.take();
                        if !block.is_empty() {
                            // At a joiner only: what it pushed before it had its place.
                            input
                                .try_send(block)
                                .map_err(|_| CoordError::Ended { what: "sequencer", worker: owner })?;
                            // One block per time and worker, whenever the sink gets to read it.
                            input.advance_to(after(*input.time())?)?;
                        }
                        if shared.closing.get() {
                            *held = None;
                        }
                    }
                    Ok(())
                }
            });
            let members = scope.clone();
            let broadcast = Exchange::new(move |_: &u64, block: Vec<T>, route: &mut dyn FnMut(usize, Vec<T>)| {
                let own = members.rank();
                (0..members.peers()).filter(|rank| Some(*rank) != own).for_each(|rank| route(rank, block.clone()));
                if let Some(own) = own {
                    route(own, block);
                }
            });
            let shared = shared.clone();
            let members = scope.clone();
            let mut builder = OperatorBuilder::new(scope, "sink");
            let mut input = builder.input(&stream, broadcast);
            let lesson = builder.lesson::<BTreeMap<Place, Vec<T>>>();
            let mut waiting = BTreeMap::<Place, Vec<T>>::new();
            builder.build(|_| {
                move |frontiers| {
                    while let Some((capability, block)) = input.next() {
                        let time = *capability.time();
                        shared.follow(time)?;
                        waiting.insert((time, capability.sender()), block);
                    }
                    if let Some(known) = lesson.learn() {
                        known.keys().try_for_each(|(time, _)| shared.follow(*time))?;
                        waiting.extend(known);
                    }
                    if lesson.is_due() {
                        return Ok(());
                    }
                    for pupil in lesson.pupils() {
                        lesson.teach(pupil, waiting.clone());
                    }
                    if lesson.is_awaited() {
                        // What is released is not taught, and who joins may have been sent what follows it.
                        return Ok(());
                    }
                    if members.rank().is_none() {
                        // Others send nothing any more to one that leaves: what still comes has holes.
                        return Ok(());
                    }
                    let mut released = shared.released.borrow_mut();
                    while let Some(first) = waiting.first_entry() {
                        let (time, worker) = *first.key();
                        if frontiers.less_equal(0, &time) {
                            return Ok(());
                        }
                        let block = first.remove();
                        if !shared.unread.get() {
                            let entries = block.into_iter().enumerate();
                            released.extend(entries.map(|(index, element)| Entry { time, worker, index, element }));
                        }
                    }
                    shared.ended.set(frontiers.frontier(0).is_empty());
                    Ok(())
                }
            });
            activator
        });
        Sequencer(Pusher { owner, shared, source })
    }
}

impl<T> Sequencer<T> {
    /// Adds an element to the log. It leaves with the next step of the worker; what is pushed between two steps travels as
    /// one block.
    ///
    /// # Errors
    /// [`CoordError::Closed`] after [`Sequencer::close`], [`CoordError::Gone`] when the worker has stopped or left, [`CoordError::Ended`] at a joiner
    /// whose peer had closed its own, and at a leaver once nothing can come for it any more; nothing happens.
    /// A joiner learns that only with its place ([`Worker::bootstrap`]): what it pushed before stops the run then.
    pub fn push(&mut self, element: T) -> Result<(), CoordError> {
        self.0.push(element)
    }

    /// What pushes beside this handle, also while that waits.
    pub fn pusher(&self) -> Pusher<T> {
        self.0.clone()
    }

    /// The next element of the log, if it is known already. Does not step.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> Option<T> {
        self.next_entry().map(|entry| entry.element)
    }

    /// As [`Sequencer::next`], with the element's place in the order.
    pub fn next_entry(&mut self) -> Option<Entry<T>> {
        self.0.shared.released.borrow_mut().pop_front()
    }

    /// Runs the worker until there is a next element, at most for `limit`. None when all workers have closed and everything
    /// is read.
    ///
    /// # Errors
    /// [`CoordError::Worker`] when this or another worker has stopped, [`CoordError::Silence`] after `limit`,
    /// [`CoordError::Gone`], [`CoordError::OtherWorker`].
    pub fn wait_next(&mut self, worker: &mut Worker, limit: Option<Duration>) -> Result<Option<T>, CoordError> {
        Ok(self.wait_entry(worker, limit)?.map(|entry| entry.element))
    }

    /// As [`Sequencer::wait_next`], with the element's place in the order.
    ///
    /// # Errors
    /// As there.
    pub fn wait_entry(&mut self, worker: &mut Worker, limit: Option<Duration>) -> Result<Option<Entry<T>>, CoordError> {
        let (what, owner) = ("sequencer", self.0.owner);
        if worker.index() != owner {
            return Err(CoordError::OtherWorker { what, owner, worker: worker.index() });
        }
        let (shared, mut next) = (&self.0.shared, None);
        let known = worker.step_until(limit, || {
            next = shared.released.borrow_mut().pop_front();
            // Gone while waiting: the worker's dataflows were dropped, its error comes from the step below.
            next.is_some() || shared.ended.get() || !shared.alive.get()
        })?;
        match next {
            Some(entry) => Ok(Some(entry)),
            None if !known => Err(CoordError::Silence { waited: limit.unwrap_or_default() }),
            None if shared.ended.get() => Ok(None),
            None => {
                worker.step()?;
                Err(CoordError::Gone { what, worker: owner })
            }
        }
    }

    /// Ends the pushing of this worker; what it pushed is still sent, and reading goes on.
    pub fn close(&mut self) {
        self.0.close();
    }

    /// Whether all workers have closed and everything is read: nothing more comes.
    pub fn is_finished(&self) -> bool {
        self.0.is_finished()
    }

    /// The counter of this worker: what it pushes next gets this time or a later one. None when closed and sent.
    pub fn time(&self) -> Option<u64> {
        self.0.shared.input.borrow().as_ref().map(|input| *input.time())
    }
}

impl<T> Drop for Sequencer<T> {
    fn drop(&mut self) {
        self.close();
        self.0.shared.unread.set(true);
        self.0.shared.released.take();
    }
}

impl<T> std::fmt::Debug for Sequencer<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sequencer").field("worker", &self.0.owner).field("time", &self.time()).finish_non_exhaustive()
    }
}
