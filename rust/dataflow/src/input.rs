//! Inputs: streams that the program feeds between steps.

use std::rc::Rc;

use penstock_progress::timestamp::Timestamp;

use crate::channel::SharedTee;
use crate::core::Core;
use crate::error::{Ended, InputError};
use crate::membership::Held;
use crate::operator::{OperatorBuilder, Output};
use crate::region::Family;
use crate::scope::Scope;
use crate::stream::Stream;

/// Feeds a stream. Holds a capability at its current time, which nothing downstream can pass; dropping it closes the input.
///
/// What is sent moves at the worker's next step; only blocks for other workers leave at once. Sending never blocks and never
/// refuses: a program that feeds more than its peers take asks [`InputHandle::is_congested`] before each block.
///
/// The input of a worker that joins a run begins, with [`Worker::bootstrap`](crate::Worker::bootstrap), where that of the worker stands that led when it was let in; it has ended
/// if that one has. When a worker leaves, its inputs end once the worker that leads knows of it.
pub struct InputHandle<T: Timestamp, D> {
    tee: SharedTee<T, D>,
    held: Held<T>,
    family: Rc<Family>,
    core: Rc<Core>,
}

impl<T: Timestamp, D: Clone + 'static> InputHandle<T, D> {
    pub(crate) fn open(scope: &Scope<T>) -> (Self, Stream<T, D>) {
        let mut builder = OperatorBuilder::new(scope, "input");
        let (_, stream): (Output<T, D>, _) = builder.output();
        let claim = builder.claim();
        let mut first = None;
        builder.build(|mut capabilities| {
            first = capabilities.pop();
            |_| Ok(())
        });
        let capability = first.expect("one capability per output");
        let held = Held::new(capability, claim);
        let (tee, family, core) = (stream.tee.clone(), scope.region.family.clone(), scope.region.core.clone());
        (InputHandle { tee, held, family, core }, stream)
    }
}

impl<T: Timestamp, D> InputHandle<T, D> {
    /// Sends a block at the current time. After the dataflow's end, by an error, it is dropped; so it is where the input is void
    /// ([`InputHandle::is_void`]).
    pub fn send(&mut self, block: D) {
        if self.family.alive.get() {
            if self.held.spend() {
                self.tee.borrow_mut().push(self.held.time(), block);
            }
        } else {
            self.core.refuse_early();
        }
    }

    /// As [`InputHandle::send`], but says so when the dataflow, or the input, has ended.
    ///
    /// # Errors
    /// [`Ended`]; the block is dropped.
    pub fn try_send(&mut self, block: D) -> Result<(), Ended> {
        if self.has_ended() {
            self.core.refuse_early();
            return Err(Ended { dataflow: self.family.name.clone() });
        }
        self.send(block);
        Ok(())
    }

    /// Announces a block that a later step sends: a worker that leaves hands over no input before. The next block that is sent is the one that was
    /// announced. False when the input can send nothing, or this worker is about to hand it over.
    pub fn announce(&self) -> bool {
        (self.is_early() || !self.has_ended()) && self.held.announce()
    }

    /// Whether the dataflow has ended, by an error or because it was dropped. Also whether this is an input of a joiner whose peer had
    /// ended its own.
    pub fn has_ended(&self) -> bool {
        !self.family.alive.get() || !self.held.is_good()
    }

    /// Whether this worker takes part, and this input can send nothing though its dataflow goes on: the worker that let this one join had
    /// ended its own, or this one leaves.
    pub fn is_void(&self) -> bool {
        self.family.alive.get() && !self.held.is_good() && !self.is_early()
    }

    /// Whether this worker joins and has not taken its place: see [`Worker::bootstrap`](crate::Worker::bootstrap).
    pub fn is_early(&self) -> bool {
        self.core.membership().is_some_and(|membership| membership.is_outside())
    }

    /// Whether to send nothing now: see [`Worker::is_congested`](crate::Worker::is_congested).
    pub fn is_congested(&self) -> bool {
        self.core.endpoint().is_congested()
    }

    /// Moves to a later time: nothing more comes before it.
    ///
    /// # Errors
    /// [`InputError`] when `time` is not in advance of the current one; nothing changes.
    pub fn advance_to(&mut self, time: T) -> Result<(), InputError<T>> {
        if !self.family.alive.get() {
            self.core.refuse_early();
        }
        if !self.held.downgrade(&time) {
            return Err(InputError { held: self.time().clone(), asked: time });
        }
        Ok(())
    }

    /// The current time.
    pub fn time(&self) -> &T {
        self.held.time()
    }

    /// Ends the input.
    pub fn close(self) {}
}

impl<T: Timestamp, D> std::fmt::Debug for InputHandle<T, D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("InputHandle").field("time", self.time()).finish()
    }
}
