//! Operators: how they are built, and what their logic sees.
//!
//! Logic runs when a block arrives, when a frontier of its inputs moves, or on request by an [`Activator`]. It reads blocks from its
//! [`Input`]s and sends with a capability through its [`Output`]s. A block counts as consumed once its [`CapabilityRef`] is dropped;
//! whoever wants to send at its time later retains a capability before that. What logic leaves unread stays, but
//! brings no further run by itself.
//!
//! No right outlives what it stands for: a [`Session`] borrows the capability that it was opened with, so that cannot be downgraded or
//! dropped before; and while a [`CapabilityRef`] lives, wherever it is kept, its block is under way and holds all frontiers back. And nobody else
//! makes a right: [`Grant`] is sealed.
//!
//! Source: Megaphone §3.1, Faucet §3 (C-01, C-04).

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use penstock_progress::antichain::Antichain;
use penstock_progress::capability::{Capability, CapabilityError};
use penstock_progress::reachability::{Source, Target, Tracker};
use penstock_progress::timestamp::{PathSummary, Timestamp};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::activate::Activator;
use crate::channel::{Counts, Direct, Pact, Queue, SharedTee, Spread, Tee};
use crate::core::Core;
use crate::error::{BoxError, Error, SessionError};
use crate::lesson::Lesson;
use crate::membership::Slot;
use crate::region::{Body, Family, InputPort, Ports};
use crate::scope::Scope;
use crate::stream::Stream;

/// Builds one operator: inputs and outputs first, then [`OperatorBuilder::build`].
///
/// Every input leads to every output without advancing time, unless [`OperatorBuilder::input_with`] or
/// [`OperatorBuilder::output_with`] says otherwise. A builder that is dropped unbuilt makes the graph invalid.
pub struct OperatorBuilder<T: Timestamp> {
    scope: Scope<T>,
    name: String,
    node: usize,
    ports: Rc<Ports<T>>,
    notify: bool,
}

impl<T: Timestamp> OperatorBuilder<T> {
    /// Adds an operator to a scope.
    pub fn new(scope: &Scope<T>, name: &str) -> Self {
        let ports = Rc::new(Ports { inputs: RefCell::new(Vec::new()), outputs: RefCell::new(Vec::new()) });
        let node = scope.region.add_node(name, Body::Unbuilt);
        OperatorBuilder { scope: scope.clone(), name: scope.region.operator_name(name), node, ports, notify: true }
    }

    /// In a joinable run, claims for this worker the capability that it is given of the only output.
    pub(crate) fn claim(&self) -> Option<Rc<Slot<T>>> {
        let region = &self.scope.region;
        let slot = Slot::new(region.core.membership()?.joins());
        region.claim(Source { node: self.node, port: 0 }.into(), slot.clone());
        Some(slot)
    }

    /// Whether the logic runs when a frontier of its inputs moves. Default: yes.
    pub fn notify(&mut self, notify: bool) -> &mut Self {
        self.notify = notify;
        self
    }

    /// A handle that makes this operator run.
    pub fn activator(&self) -> Activator {
        Activator::new(self.scope.region.flags.clone(), self.node)
    }

    /// What a joiner's copy of this operator has to learn of that of a peer, in a joinable run.
    pub fn lesson<X: Serialize + DeserializeOwned + Send + 'static>(&self) -> Lesson<X> {
        Lesson::open(&self.scope.region.core, &self.activator())
    }

    /// Adds an input that leads to all outputs without advancing time.
    pub fn input<D: 'static>(&mut self, stream: &Stream<T, D>, pact: impl Pact<T, D>) -> Input<T, D> {
        let outputs = self.ports.outputs.borrow().len();
        self.input_with(stream, pact, vec![Antichain::from_elem(T::Summary::default()); outputs])
    }

    /// Adds an input; `summaries` says for each output that exists by now how times advance on the way there, an empty
    /// antichain that none goes there.
    pub fn input_with<D: 'static>(
        &mut self,
        stream: &Stream<T, D>,
        pact: impl Pact<T, D>,
        summaries: Vec<Antichain<T::Summary>>,
    ) -> Input<T, D> {
        let region = &self.scope.region;
        if summaries.len() != self.ports.outputs.borrow().len() {
            region.refuse(format!(
                "operator {:?}: {} summaries for {} outputs",
                self.name,
                summaries.len(),
                self.ports.outputs.borrow().len()
            ));
        }
        let wiring = pact.into_wiring().0;
        let queue: Queue<T, D> = Rc::new(RefCell::new(VecDeque::new()));
        let port = {
            let mut inputs = self.ports.inputs.borrow_mut();
            inputs.push(InputPort { summaries, exchanged: wiring.is_some(), queue: queue.clone() });
            inputs.len() - 1
        };
        let target = Target { node: self.node, port };
        let in_flight: Counts<T> = region.family.meter();
        let direct = Direct {
            queue: queue.clone(),
            in_flight: in_flight.clone(),
            activator: self.activator(),
            worker: region.core.index(),
        };
        region.add_meter(target.into(), in_flight.clone());
        let edge = match wiring {
            None => Box::new(direct) as Box<dyn crate::channel::Push<T, D>>,
            Some(routing) => Box::new(Spread::open(self.name.clone(), region.core.clone(), routing, direct)),
        };
        if !Rc::ptr_eq(&stream.scope.region, region) {
            region.refuse(format!("operator {:?} reads a stream of scope {:?}", self.name, stream.scope.region.path));
        } else {
            region.edges.borrow_mut().push((stream.source, target));
            stream.attach(edge);
        }
        Input { queue, in_flight, ports: self.ports.clone(), port }
    }

    /// Adds an output to which all inputs lead without advancing time.
    pub fn output<D: Clone + 'static>(&mut self) -> (Output<T, D>, Stream<T, D>) {
        self.output_of(Some(D::clone))
    }

    /// Adds an output; `summaries` says for each input that exists by now how times advance on the way.
    pub fn output_with<D: Clone + 'static>(
        &mut self,
        summaries: Vec<Antichain<T::Summary>>,
    ) -> (Output<T, D>, Stream<T, D>) {
        let output = self.output_of(Some(D::clone));
        let mut inputs = self.ports.inputs.borrow_mut();
        if summaries.len() != inputs.len() {
            self.scope.region.refuse(format!(
                "operator {:?}: {} summaries for {} inputs",
                self.name,
                summaries.len(),
                inputs.len()
            ));
        }
        for (input, summary) in inputs.iter_mut().zip(summaries) {
            if let Some(last) = input.summaries.last_mut() {
                *last = summary;
            }
        }
        drop(inputs);
        output
    }

    /// As [`OperatorBuilder::output`] for blocks that cannot be cloned: the stream has at most one reader.
    pub fn output_unshared<D: 'static>(&mut self) -> (Output<T, D>, Stream<T, D>) {
        self.output_of(None)
    }

    pub(crate) fn output_of<D: 'static>(&mut self, duplicate: Option<fn(&D) -> D>) -> (Output<T, D>, Stream<T, D>) {
        let counts: Counts<T> = self.scope.region.family.meter();
        let port = {
            let mut outputs = self.ports.outputs.borrow_mut();
            outputs.push(counts.clone());
            outputs.len() - 1
        };
        for input in self.ports.inputs.borrow_mut().iter_mut() {
            input.summaries.push(Antichain::from_elem(T::Summary::default()));
        }
        let source = Source { node: self.node, port };
        self.scope.region.add_meter(source.into(), counts.clone());
        let tee = Tee::shared(duplicate);
        let stream = Stream::new(source, tee.clone(), self.scope.clone());
        let (core, family) = (self.scope.region.core.clone(), self.scope.region.family.clone());
        (Output { tee, counts, core, family, name: self.name.clone() }, stream)
    }

    /// Finishes the operator. The constructor gets one capability per output at the minimum time, and returns the logic. At a worker
    /// that joins a run those are good for no output, since it has none there: to send with one stops the run.
    pub fn build<L>(self, constructor: impl FnOnce(Vec<Capability<T>>) -> L)
    where
        L: FnMut(&Frontiers<'_, T>) -> Result<(), BoxError> + 'static,
    {
        match self.try_build(|capabilities| Ok::<_, std::convert::Infallible>(constructor(capabilities))) {
            Ok(()) => {}
        }
    }

    /// As [`OperatorBuilder::build`], with a constructor that may fail.
    ///
    /// # Errors
    /// The constructor's; the operator is unbuilt then, and its graph invalid.
    pub fn try_build<L, E>(self, constructor: impl FnOnce(Vec<Capability<T>>) -> Result<L, E>) -> Result<(), E>
    where
        L: FnMut(&Frontiers<'_, T>) -> Result<(), BoxError> + 'static,
    {
        let joins = self.scope.region.core.membership().is_some_and(|membership| membership.joins());
        let adopt = |counts: &Counts<T>| {
            let counts = if joins { Rc::default() } else { counts.clone() };
            Capability::adopt(T::minimum(), counts)
        };
        let capabilities = self.ports.outputs.borrow().iter().map(adopt).collect();
        let _origin = self.scope.region.core.origin(&self.name);
        let logic = Rc::new(RefCell::new(Box::new(constructor(capabilities)?) as crate::region::Logic<T>));
        let body = Body::Operator { ports: self.ports.clone(), logic, notify: self.notify };
        self.scope.region.set_body(self.node, body);
        Ok(())
    }
}

/// The frontiers of an operator's inputs during one run of its logic.
pub struct Frontiers<'a, T: Timestamp> {
    tracker: &'a Tracker<T>,
    node: usize,
    inputs: usize,
}

impl<'a, T: Timestamp> Frontiers<'a, T> {
    pub(crate) fn new(tracker: &'a Tracker<T>, node: usize, inputs: usize) -> Self {
        Frontiers { tracker, node, inputs }
    }

    /// Number of inputs.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// The frontier of an input: the least times that may still arrive. Empty: finished.
    ///
    /// # Panics
    /// When there is no such input.
    pub fn frontier(&self, input: usize) -> &'a [T] {
        self.tracker.frontier(Target { node: self.node, port: input })
    }

    /// Whether `time` may still arrive at an input.
    pub fn less_equal(&self, input: usize, time: &T) -> bool {
        self.frontier(input).iter().any(|least| least.less_equal(time))
    }

    /// Whether a time before `time` may still arrive at an input.
    pub fn less_than(&self, input: usize, time: &T) -> bool {
        self.frontier(input).iter().any(|least| least.less_than(time))
    }

    /// The frontiers of all inputs, as a notificator takes them.
    pub fn all(&self) -> Vec<&'a [T]> {
        (0..self.inputs).map(|input| self.frontier(input)).collect()
    }
}

/// An input of an operator.
pub struct Input<T: Timestamp, D> {
    queue: Queue<T, D>,
    in_flight: Counts<T>,
    ports: Rc<Ports<T>>,
    port: usize,
}

impl<T: Timestamp, D> Input<T, D> {
    /// The next block and the right to send at its time.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> Option<(CapabilityRef<'_, T>, D)> {
        let (time, from, block) = self.queue.borrow_mut().pop_front()?;
        Some((CapabilityRef { time, from, in_flight: &self.in_flight, ports: &self.ports, port: self.port }, block))
    }

    /// Reads all waiting blocks.
    pub fn for_each(&mut self, mut each: impl FnMut(CapabilityRef<'_, T>, D)) {
        while let Some((capability, block)) = self.next() {
            each(capability, block);
        }
    }

    /// Number of waiting blocks.
    pub fn len(&self) -> usize {
        self.queue.borrow().len()
    }

    /// Whether no block waits.
    pub fn is_empty(&self) -> bool {
        self.queue.borrow().is_empty()
    }
}

/// The right to send that a block brings with it, until it is dropped: that consumes the block.
pub struct CapabilityRef<'a, T: Timestamp> {
    time: T,
    from: usize,
    in_flight: &'a Counts<T>,
    ports: &'a Ports<T>,
    port: usize,
}

impl<T: Timestamp> CapabilityRef<'_, T> {
    /// Time of the block.
    pub fn time(&self) -> &T {
        &self.time
    }

    /// The worker that sent the block.
    pub fn sender(&self) -> usize {
        self.from
    }

    /// A capability of output 0 at this time, or where the path from the input leads it.
    ///
    /// # Panics
    /// As [`CapabilityRef::retain_for`].
    pub fn retain(&self) -> Capability<T> {
        self.retain_for(0)
    }

    /// A capability of an output at this time, or where the path from the input leads it.
    ///
    /// # Panics
    /// When the operator declared no path from this input to that output: an error in the operator.
    pub fn retain_for(&self, output: usize) -> Capability<T> {
        match self.try_retain_for(output) {
            Some(capability) => capability,
            None => panic!("no path from input {} at {:?} to output {output}", self.port, self.time),
        }
    }

    /// As [`CapabilityRef::retain_for`]; none when no path leads there, or its end is beyond all times.
    pub fn try_retain_for(&self, output: usize) -> Option<Capability<T>> {
        let inputs = self.ports.inputs.borrow();
        let path = inputs.get(self.port)?.summaries.get(output)?.elements().first()?;
        let time = path.results_in(&self.time)?;
        Some(Capability::mint(time, self.ports.outputs.borrow().get(output)?.clone()))
    }

    /// A capability of output 0 at a later time.
    ///
    /// # Errors
    /// [`CapabilityError`] when `time` is not in advance of this one.
    pub fn delayed(&self, time: &T) -> Result<Capability<T>, CapabilityError> {
        self.retain().delayed(time)
    }
}

impl<T: Timestamp> Drop for CapabilityRef<'_, T> {
    fn drop(&mut self) {
        self.in_flight.release(self.time.clone());
    }
}

impl<T: Timestamp> std::fmt::Debug for CapabilityRef<'_, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CapabilityRef").field("time", &self.time).field("from", &self.from).finish()
    }
}

mod sealed {
    use super::Counts;

    /// Nobody outside implements it: they could say yes to every output, and make capabilities of its counts.
    pub trait IsFor<T> {
        /// Whether it is for the output with these counts.
        fn is_for(&self, output: &Counts<T>) -> bool;
    }
}

/// What allows to send at a time through an output: a [`Capability`] or the [`CapabilityRef`] of a block, and nothing else.
pub trait Grant<T: Timestamp>: sealed::IsFor<T> {
    /// The time at which it allows to send.
    fn granted(&self) -> &T;
}

impl<T: Timestamp> Grant<T> for Capability<T> {
    fn granted(&self) -> &T {
        self.time()
    }
}

impl<T: Timestamp> sealed::IsFor<T> for Capability<T> {
    fn is_for(&self, output: &Counts<T>) -> bool {
        self.valid_for(output)
    }
}

impl<T: Timestamp> Grant<T> for CapabilityRef<'_, T> {
    fn granted(&self) -> &T {
        &self.time
    }
}

impl<T: Timestamp> sealed::IsFor<T> for CapabilityRef<'_, T> {
    fn is_for(&self, output: &Counts<T>) -> bool {
        let outputs = self.ports.outputs.borrow();
        let Some(index) = outputs.iter().position(|counts| Rc::ptr_eq(counts, output)) else { return false };
        self.ports.inputs.borrow()[self.port].summaries[index]
            .elements()
            .iter()
            .any(|path| path.results_in(&self.time).is_some_and(|reached| reached.less_equal(&self.time)))
    }
}

/// An output of an operator.
pub struct Output<T: Timestamp, D> {
    tee: SharedTee<T, D>,
    counts: Counts<T>,
    core: Rc<Core>,
    family: Rc<Family>,
    name: String,
}

impl<T: Timestamp, D: 'static> Output<T, D> {
    /// Opens a session at the time of a capability. A capability of another output is an error in the operator: it stops the
    /// dataflow with [`Error::WrongCapability`], and what is given is dropped. So it is after the end of the dataflow.
    ///
    /// The session borrows the capability:
    ///
    /// ```
    /// # use penstock_dataflow::Output;
    /// # use penstock_progress::Capability;
    /// fn good(output: &mut Output<u64, &'static str>, capability: &mut Capability<u64>) {
    ///     output.session(capability).give("at its time");
    ///     capability.downgrade(&7).unwrap();
    ///     output.session(capability).give("at 7");
    /// }
    /// ```
    ///
    /// so nobody can give at a time for which no capability is held any more:
    ///
    /// ```compile_fail,E0502
    /// # use penstock_dataflow::Output;
    /// # use penstock_progress::Capability;
    /// fn bad(output: &mut Output<u64, &'static str>, capability: &mut Capability<u64>) {
    ///     let mut session = output.session(capability);
    ///     capability.downgrade(&7).unwrap();
    ///     session.give("too late"); // frontiers may have passed that time
    /// }
    /// ```
    ///
    /// ```compile_fail,E0505
    /// # use penstock_dataflow::{Input, Output};
    /// fn bad(input: &mut Input<u64, u32>, output: &mut Output<u64, u32>) {
    ///     let (capability, block) = input.next().unwrap();
    ///     let mut session = output.session(&capability);
    ///     drop(capability);
    ///     session.give(block);
    /// }
    /// ```
    ///
    /// nor with a right that is its own:
    ///
    /// ```compile_fail,E0277
    /// # use penstock_dataflow::Grant;
    /// struct Always(u64);
    /// impl Grant<u64> for Always {
    ///     fn granted(&self) -> &u64 {
    ///         &self.0
    ///     }
    /// }
    /// ```
    pub fn session<'a>(&'a mut self, grant: &'a impl Grant<T>) -> Session<'a, T, D> {
        let alive = self.family.alive.get();
        let valid = alive && grant.is_for(&self.counts);
        if alive && !valid {
            self.core.fail(Error::WrongCapability {
                name: self.name.clone(),
                worker: self.core.index(),
                time: format!("{:?}", grant.granted()),
            });
        }
        Session { time: grant.granted(), output: self, valid }
    }

    /// As [`Output::session`], but a capability of another output, or the end of the dataflow, is only refused.
    ///
    /// # Errors
    /// [`SessionError`]; nothing happened.
    pub fn try_session<'a>(&'a mut self, grant: &'a impl Grant<T>) -> Result<Session<'a, T, D>, SessionError<T>> {
        let ended = !self.family.alive.get();
        if ended || !grant.is_for(&self.counts) {
            return Err(SessionError { time: grant.granted().clone(), name: self.name.clone(), ended });
        }
        Ok(Session { time: grant.granted(), output: self, valid: true })
    }

    /// Whether a session at this capability would be of this output.
    pub fn accepts(&self, grant: &impl Grant<T>) -> bool {
        grant.is_for(&self.counts)
    }
}

/// Sends blocks at one time, while the capability for it is borrowed.
pub struct Session<'a, T: Timestamp, D> {
    output: &'a mut Output<T, D>,
    time: &'a T,
    valid: bool,
}

impl<T: Timestamp, D: 'static> Session<'_, T, D> {
    /// Sends one block: one message, one progress update. After the end of the dataflow it is dropped.
    pub fn give(&mut self, block: D) {
        if self.valid && self.output.family.alive.get() {
            self.output.tee.borrow_mut().push(self.time, block);
        }
    }

    /// The time of the session.
    pub fn time(&self) -> &T {
        self.time
    }
}
