//! A region: the nodes and edges of one scope, with their progress.
//!
//! Node 0 stands for the outside: its sources are the streams that enter, its targets the streams that leave. While the graph is
//! built, ports register their counts; [`Region::check`] makes the tracker and [`Region::found`] its first counts. In each step the worker collects the counts of
//! all regions ([`AnyRegion::harvest`]), applies those of all workers ([`Region::apply`]), carries the frontiers to the operators
//! ([`Region::propagate`]) and runs those with something to do ([`Region::sweep`]).
//!
//! Initial capabilities: one per output and founding worker, so every founder starts from the same counts without a message.

use std::any::Any;
use std::borrow::Cow;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::{Rc, Weak};
use std::sync::Arc;

use penstock_progress::antichain::Antichain;
use penstock_progress::capability::Capability;
use penstock_progress::change_batch::ChangeBatch;
use penstock_progress::ledger::{Change, Ledger};
use penstock_progress::meter::Meter;
use penstock_progress::probe::ProbeHandle;
use penstock_progress::reachability::{GraphBuilder, GraphError, Location, Port, Source, Target};
use penstock_progress::timestamp::Timestamp;

use crate::activate::{Activator, Flags, Mark};
use crate::channel::Counts;
use crate::core::Core;
use crate::error::{BoxError, Error, panic_message};
use crate::membership::Slot;
use crate::nested::Nested;
use crate::operator::Frontiers;
use crate::wire::{decode_serde, encode_serde};

/// What all regions of one dataflow share.
pub(crate) struct Family {
    pub(crate) name: String,
    pub(crate) regions: RefCell<Vec<Rc<dyn AnyRegion>>>,
    /// Whether it has something to do.
    pub(crate) mark: Rc<Mark>,
    pub(crate) alive: Cell<bool>,
}

impl Family {
    /// A meter for a port of any region: when something is counted there, the next step looks at this dataflow.
    pub(crate) fn meter<T>(&self) -> Counts<T> {
        let mark = self.mark.clone();
        Rc::new(Meter::with_bell(Rc::new(move || mark.count())))
    }
}

/// The count changes of one region in one bundle.
pub(crate) trait Part: Send + Sync {
    fn encode(&self, out: &mut Vec<u8>);
    fn is_empty(&self) -> bool;
    fn as_any(&self) -> &dyn Any;
    fn as_any_mut(&mut self) -> &mut dyn Any;
}

struct Changes<T>(Vec<Change<T>>);

impl<T: Timestamp> Part for Changes<T> {
    fn encode(&self, out: &mut Vec<u8>) {
        encode_serde(&self.0, out);
    }
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

/// A part that came from another process: decoded by the region that it is for, and passed on as it is.
pub(crate) struct Foreign(pub(crate) Vec<u8>);

impl Part for Foreign {
    fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.0);
    }
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

/// The changes in a part of this process or another one; none when they are of another type of time.
fn changes<T: Timestamp>(part: &dyn Any) -> Option<Cow<'_, [Change<T>]>> {
    if let Some(Changes(changes)) = part.downcast_ref::<Changes<T>>() {
        return Some(Cow::Borrowed(changes));
    }
    match part.downcast_ref::<Foreign>()? {
        Foreign(bytes) if bytes.is_empty() => Some(Cow::Owned(Vec::new())),
        Foreign(bytes) => decode_serde(bytes).ok().map(Cow::Owned),
    }
}

/// A region without its type of time.
pub(crate) trait AnyRegion {
    /// [`Region::apply`], where nobody outside is shown the changes: of the outermost region.
    fn apply(&self) -> Result<(), Error>;
    /// [`Region::propagate`].
    fn propagate(&self);
    /// [`Region::sweep`].
    fn sweep(&self) -> Result<(), Error>;
    /// Collects what this worker counted since the last call, to be applied here and, if wanted, to be shared.
    fn harvest(&self, share: bool);
    /// Whether what is to be shared may move a frontier: whether some of it is not behind another live time.
    fn must_share(&self) -> bool;
    /// An empty part for this region.
    fn new_part(&self) -> Box<dyn Part>;
    /// Moves what is to be shared into a part, in place of what it held.
    fn share(&self, part: &mut dyn Part);
    /// Takes in the changes of another worker; false when they are of another type.
    fn absorb(&self, part: &dyn Any) -> bool;
    /// Takes in the changes of a worker of another process; false when they cannot be decoded.
    fn absorb_bytes(&self, bytes: &[u8]) -> bool;
    /// Whether something is to be harvested or applied.
    fn is_dirty(&self) -> bool;
    /// Whether no pointstamp is left.
    fn is_done(&self) -> bool;
    /// How many times are counted now, at how many places.
    fn live_counts(&self) -> usize;
    /// Describes the graph, for comparison with other workers.
    fn describe(&self, out: &mut String);
    /// Drops operators and channels.
    fn dismantle(&self);
    /// Whether the others have not been told something.
    fn owes(&self) -> bool;
    /// All counts in force that others do not derive by themselves. Nothing waits to be applied or told.
    fn snapshot(&self) -> Box<dyn Part>;
    /// Begins with a snapshot, in a region that counts nothing; false when it is of another one.
    fn load(&self, part: &dyn Any) -> bool;
    /// Derives the rest once all regions are loaded: of the outermost one.
    fn stand(&self);
    /// Counts one capability more, for somebody else, of each that is held for a claimed output.
    fn grant(&self) -> Box<dyn Part>;
    /// Has nothing more announced for claimed outputs; whether all that was is sent.
    fn retire(&self) -> bool;
    /// Names what is held for claimed outputs, which somebody else holds from now on.
    fn hand_over(&self) -> Box<dyn Part>;
    /// Gives capabilities, which are counted already, to who claims them.
    fn take(&self, part: &dyn Any);
    /// For who claims something and was given nothing there will be nothing.
    fn seat(&self);
    /// Whether no block waits and no operator holds anything, but what is claimed.
    fn is_worked_off(&self) -> bool;
}

/// The logic of an operator.
pub(crate) type Logic<T> = Box<dyn FnMut(&Frontiers<'_, T>) -> Result<(), BoxError>>;

/// An input of an operator, as the progress tracking sees it.
pub(crate) struct InputPort<S> {
    /// By output: how times advance on the way; empty when no path leads there.
    pub(crate) summaries: Vec<Antichain<S>>,
    /// Whether blocks come from other workers as well, over a channel.
    pub(crate) exchanged: bool,
    /// The blocks that wait.
    pub(crate) queue: Rc<dyn Waiting>,
}

/// A queue without the type of what it holds.
pub(crate) trait Waiting {
    fn is_empty(&self) -> bool;
}

impl<X> Waiting for RefCell<std::collections::VecDeque<X>> {
    fn is_empty(&self) -> bool {
        self.borrow().is_empty()
    }
}

/// The ports of an operator.
pub(crate) struct Ports<T: Timestamp> {
    pub(crate) inputs: RefCell<Vec<InputPort<T::Summary>>>,
    /// By output: the counts of its capabilities.
    pub(crate) outputs: RefCell<Vec<Counts<T>>>,
}

/// What a node is.
pub(crate) enum Body<T: Timestamp> {
    /// Node 0.
    Outside,
    /// Announced by a builder; a graph with such a node is refused.
    Unbuilt,
    /// An operator.
    Operator { ports: Rc<Ports<T>>, logic: Rc<RefCell<Logic<T>>>, notify: bool },
    /// A view of a frontier, and who is to run when it moves.
    Probe { handle: ProbeHandle<T>, wake: Vec<Activator> },
    /// A nested scope.
    Nested(Rc<dyn Nested<T>>),
}

struct Node<T: Timestamp> {
    name: String,
    body: Body<T>,
}

/// A nested scope and its node.
type NestedNode<T> = (usize, Rc<dyn Nested<T>>);

/// The typed link from a nested region to the one around it.
pub(crate) struct Parent<T: Timestamp> {
    pub(crate) region: Weak<Region<T>>,
    pub(crate) node: usize,
}

/// Paths through the nodes of a region: by node, input and output.
pub(crate) type Summaries<S> = Vec<Vec<Vec<Antichain<S>>>>;

/// See the module.
pub(crate) struct Region<T: Timestamp> {
    pub(crate) core: Rc<Core>,
    pub(crate) family: Rc<Family>,
    pub(crate) path: String,
    pub(crate) flags: Rc<Flags>,
    parent: Option<Box<dyn Any>>,
    nodes: RefCell<Vec<Node<T>>>,
    pub(crate) edges: RefCell<Vec<(Source, Target)>>,
    meters: RefCell<Vec<(Location, Counts<T>)>>,
    /// Empty between uses.
    collected: RefCell<ChangeBatch<T>>,
    pub(crate) entering: Cell<usize>,
    pub(crate) leaving: Cell<usize>,
    /// Once the graph is checked.
    ledger: RefCell<Option<Ledger<T>>>,
    nested: RefCell<Vec<NestedNode<T>>>,
    moved: Cell<bool>,
    /// Of a joinable run, once the graph is checked: what this worker holds of each output, in the places of their meters.
    held: RefCell<Vec<Option<Holding<T>>>>,
    /// Of a joinable run: the outputs whose capabilities may be given to this worker.
    claims: RefCell<BTreeMap<Location, Rc<Slot<T>>>>,
}

/// The name of the operators that [`crate::Scope::feedback`] makes.
pub(crate) const FEEDBACK: &str = "feedback";

/// Why a graph is refused, with the operators of a cycle by their names.
fn told<T: Timestamp>(error: &GraphError, nodes: &[Node<T>]) -> String {
    let GraphError::CycleDoesNotAdvance { cycle } = error else { return error.to_string() };
    let mut passed: Vec<usize> = cycle.iter().map(|location| location.node).collect();
    passed.dedup();
    if passed.len() > 1 && passed.first() == passed.last() {
        passed.pop();
    }
    // A loop is told from where it was opened.
    let opened = passed.iter().position(|node| nodes[*node].name == FEEDBACK).unwrap_or(0);
    passed.rotate_left(opened);
    let names: Vec<_> = passed.iter().chain(passed.first()).map(|node| nodes[*node].name.as_str()).collect();
    format!(
        "a cycle does not advance time, so what is in it could go round for ever at one time: {}; give its feedback an advance of at \
         least 1",
        names.join(" -> ")
    )
}

impl<T: Timestamp> Region<T> {
    pub(crate) fn new(core: Rc<Core>, family: Rc<Family>, path: String, parent: Option<Box<dyn Any>>) -> Rc<Self> {
        let region = Rc::new(Region {
            core,
            flags: Rc::new(Flags::new(family.mark.clone())),
            family: family.clone(),
            path,
            parent,
            nodes: RefCell::new(vec![Node { name: "outside".to_string(), body: Body::Outside }]),
            edges: RefCell::new(Vec::new()),
            meters: RefCell::new(Vec::new()),
            collected: RefCell::default(),
            entering: Cell::new(0),
            leaving: Cell::new(0),
            ledger: RefCell::new(None),
            nested: RefCell::new(Vec::new()),
            moved: Cell::new(true),
            held: RefCell::default(),
            claims: RefCell::default(),
        });
        family.regions.borrow_mut().push(region.clone());
        region
    }

    /// The node of this region in the region `outer`, if that is the one around it.
    pub(crate) fn node_in<O: Timestamp>(&self, outer: &Rc<Region<O>>) -> Option<usize> {
        let parent = self.parent.as_ref()?.downcast_ref::<Parent<O>>()?;
        std::ptr::eq(parent.region.as_ptr(), Rc::as_ptr(outer)).then_some(parent.node)
    }

    pub(crate) fn add_node(&self, name: &str, body: Body<T>) -> usize {
        let mut nodes = self.nodes.borrow_mut();
        if let Body::Nested(nested) = &body {
            self.nested.borrow_mut().push((nodes.len(), nested.clone()));
        }
        nodes.push(Node { name: name.to_string(), body });
        nodes.len() - 1
    }

    /// Index of the node that is added next.
    pub(crate) fn next_node(&self) -> usize {
        self.nodes.borrow().len()
    }

    pub(crate) fn set_body(&self, node: usize, body: Body<T>) {
        self.nodes.borrow_mut()[node].body = body;
    }

    pub(crate) fn add_meter(&self, location: Location, counts: Counts<T>) {
        self.meters.borrow_mut().push((location, counts));
    }

    /// Records that the graph cannot run; the next step reports it.
    pub(crate) fn refuse(&self, reason: String) {
        self.core.fail(self.refusal(reason));
    }

    fn refusal(&self, reason: String) -> Error {
        Error::Graph { dataflow: self.path.clone(), worker: self.core.index(), reason }
    }

    /// Checks the graph and makes the tracker, which counts nothing yet. Nested regions first.
    pub(crate) fn check(&self) -> Result<Summaries<T::Summary>, Error> {
        let nodes = self.nodes.borrow();
        let mut builder = GraphBuilder::new();
        let mut summaries = Summaries::<T::Summary>::new();
        for (index, node) in nodes.iter().enumerate() {
            let (inputs, outputs, summary) = match &node.body {
                Body::Outside => {
                    let (inputs, outputs) = (self.leaving.get(), self.entering.get());
                    (inputs, outputs, vec![vec![Antichain::new(); outputs]; inputs])
                }
                Body::Unbuilt if node.name == FEEDBACK => {
                    return Err(self.refusal(
                        "a loop is open: feedback was called and connect_loop was not, so it was never built"
                            .to_owned(),
                    ));
                }
                Body::Unbuilt => return Err(self.refusal(format!("operator {:?} was never built", node.name))),
                Body::Operator { ports, .. } => {
                    let (inputs, outputs) = (ports.inputs.borrow(), ports.outputs.borrow().len());
                    (inputs.len(), outputs, inputs.iter().map(|input| input.summaries.clone()).collect())
                }
                Body::Probe { .. } => (1, 0, vec![Vec::new()]),
                Body::Nested(nested) => {
                    let summary = nested.check()?;
                    let (inputs, outputs) = nested.ports();
                    (inputs, outputs, summary)
                }
            };
            builder.add_node(index, inputs, outputs, summary.clone());
            summaries.push(summary);
        }
        for (from, to) in self.edges.borrow().iter() {
            builder.add_edge(*from, *to);
        }
        let tracker = builder.build().map_err(|error| self.refusal(told(&error, &nodes)))?;
        if self.core.membership().is_some() {
            let claims = self.claims.borrow();
            let holding = |(location, _): &(Location, Counts<T>)| {
                let times = claims.contains_key(location).then(Vec::new);
                matches!(location.port, Port::Source(_)).then_some(Holding { total: 0, times })
            };
            *self.held.borrow_mut() = self.meters.borrow().iter().map(holding).collect();
        }
        *self.ledger.borrow_mut() = Some(Ledger::new(tracker));
        Ok(summaries)
    }

    /// Gives the checked graph the counts that every one of so many founders begins with, and its operators their first run.
    /// Without founders it has the counts of a snapshot already. Nested regions first.
    pub(crate) fn found(&self, founders: Option<usize>) {
        let nodes = self.nodes.borrow();
        let mut ledger = self.ledger.borrow_mut();
        let Some(ledger) = ledger.as_mut() else { return };
        for (node, body) in nodes.iter().map(|node| &node.body).enumerate() {
            match body {
                Body::Operator { ports, .. } => {
                    let sources = (0..ports.outputs.borrow().len()).map(|port| Source { node, port });
                    if let Some(founders) = founders {
                        if self.core.membership().is_some() {
                            sources.clone().for_each(|source| self.hold(source.into(), &T::minimum(), 1));
                        }
                        ledger.found(sources, founders);
                    }
                    self.flags.raise(node);
                }
                Body::Probe { handle, .. } => handle.update([]),
                Body::Nested(nested) => nested.found(founders, &mut |port, time| {
                    ledger.tracker_mut().update_source(Source { node, port }, time, 1);
                }),
                Body::Outside | Body::Unbuilt => {}
            }
        }
    }

    /// Applies what was harvested here and what came from others, nested regions first; each change is shown to `each`.
    pub(crate) fn apply(&self, mut each: impl FnMut(Location, &T, i64)) -> Result<(), Error> {
        let mut ledger = self.ledger.borrow_mut();
        let Some(ledger) = ledger.as_mut() else { return Ok(()) };
        for (node, nested) in self.nested.borrow().iter() {
            nested.surface(&mut |port, time, diff| {
                self.moved.set(true);
                let source = Source { node: *node, port };
                each(source.into(), &time, diff);
                ledger.tracker_mut().update_source(source, time, diff);
            })?;
        }
        if ledger.is_waiting() {
            self.moved.set(true);
            ledger.apply(each).map_err(|error| self.refusal(format!("progress of a peer: {error}")))?;
        }
        Ok(())
    }

    /// Applies a change of the frontier around this region.
    pub(crate) fn outer_change(&self, port: usize, time: T, diff: i64) {
        if let Some(ledger) = self.ledger.borrow_mut().as_mut() {
            self.moved.set(true);
            ledger.tracker_mut().update_source(Source { node: 0, port }, time, diff);
        }
    }

    /// Carries changed counts to the frontiers of operators, probes and nested regions.
    pub(crate) fn propagate(&self) {
        if self.moved.replace(false) {
            let nodes = self.nodes.borrow();
            if let Some(ledger) = self.ledger.borrow_mut().as_mut() {
                let tracker = ledger.tracker_mut();
                tracker.propagate();
                tracker.each_change(|target, time, diff| match &nodes[target.node].body {
                    Body::Operator { notify: true, .. } => self.flags.raise(target.node),
                    Body::Nested(nested) => nested.outer_change(target.port, time, diff),
                    Body::Probe { handle, wake } => {
                        handle.update([(time, diff)]);
                        wake.iter().for_each(Activator::activate);
                    }
                    Body::Operator { .. } | Body::Outside | Body::Unbuilt => {}
                });
            }
        }
        for (_, nested) in self.nested.borrow().iter() {
            nested.propagate();
        }
    }

    /// Runs the activated operators, in the order in which they were built.
    pub(crate) fn sweep(&self) -> Result<(), Error> {
        let count = self.nodes.borrow().len();
        for index in 1..count {
            if !self.family.mark.is_pending() {
                return Ok(());
            }
            let nested = match &self.nodes.borrow()[index].body {
                Body::Nested(nested) => Some(nested.clone()),
                _ => None,
            };
            if let Some(nested) = nested {
                nested.sweep()?;
            } else if self.flags.take(index) {
                self.run(index)?;
                if self.core.is_stopped() {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    fn run(&self, index: usize) -> Result<(), Error> {
        let (logic, inputs) = match &self.nodes.borrow()[index].body {
            Body::Operator { logic, ports, .. } => (logic.clone(), ports.inputs.borrow().len()),
            _ => return Ok(()),
        };
        let ledger = self.ledger.borrow();
        let Some(ledger) = ledger.as_ref() else { return Ok(()) };
        let frontiers = Frontiers::new(ledger.tracker(), index, inputs);
        let outcome = catch_unwind(AssertUnwindSafe(|| (logic.borrow_mut())(&frontiers)));
        let name = || self.operator_name(&self.nodes.borrow()[index].name);
        match outcome {
            Ok(Ok(())) => Ok(()),
            Ok(Err(cause)) => {
                Err(Error::Operator { name: name(), worker: self.core.index(), source: Arc::from(cause) })
            }
            Err(panic) => {
                let name = self.core.take_origin().unwrap_or_else(name);
                Err(Error::Panic { name, worker: self.core.index(), message: panic_message(&*panic) })
            }
        }
    }

    /// The full name of an operator: with its dataflow and scopes.
    pub(crate) fn operator_name(&self, name: &str) -> String {
        format!("{}/{name}", self.path)
    }

    /// Claims what this worker is given of the capabilities of an output.
    pub(crate) fn claim(&self, output: Location, slot: Rc<Slot<T>>) {
        self.claims.borrow_mut().insert(output, slot);
    }

    /// What is held for claimed outputs.
    fn claimed(&self) -> Vec<Change<T>> {
        let (meters, held) = (self.meters.borrow(), self.held.borrow());
        let mut claimed = Vec::new();
        for ((location, _), holding) in meters.iter().zip(held.iter()) {
            let times = holding.iter().flat_map(|holding| holding.times.iter().flatten());
            claimed.extend(times.map(|(time, count)| (*location, time.clone(), *count)));
        }
        claimed
    }

    /// Counts what this worker holds of an output.
    fn hold(&self, output: Location, time: &T, count: i64) {
        let place = self.meters.borrow().iter().position(|(location, _)| *location == output);
        let mut held = self.held.borrow_mut();
        if let Some(Some(holding)) = place.and_then(|place| held.get_mut(place)) {
            holding.add(time, count);
        }
    }

    /// Locations whose counts are not zero, with their times and counts.
    pub(crate) fn counts(&self) -> Vec<(Location, T, i64)> {
        let ledger = self.ledger.borrow();
        let live = ledger.iter().flat_map(|ledger| ledger.tracker().accumulated());
        live.map(|((location, time), count)| (location, time, count)).collect()
    }
}

/// The capabilities that this worker holds of one output.
struct Holding<T> {
    total: i64,
    /// By time, where somebody claims them. An input does, which holds one: so these are few.
    times: Option<Vec<(T, i64)>>,
}

impl<T: PartialEq + Clone> Holding<T> {
    #[inline]
    fn add(&mut self, time: &T, count: i64) {
        self.total += count;
        let Some(times) = &mut self.times else { return };
        match times.iter().position(|(other, _)| other == time) {
            None => times.push((time.clone(), count)),
            Some(at) => {
                times[at].1 += count;
                if times[at].1 == 0 {
                    times.swap_remove(at);
                }
            }
        }
    }
}

impl<T: Timestamp> AnyRegion for Region<T> {
    fn apply(&self) -> Result<(), Error> {
        Region::apply(self, |_, _, _| {})
    }

    fn propagate(&self) {
        Region::propagate(self);
    }

    fn sweep(&self) -> Result<(), Error> {
        Region::sweep(self)
    }

    fn harvest(&self, share: bool) {
        let mut ledger = self.ledger.borrow_mut();
        let Some(ledger) = ledger.as_mut() else { return };
        let mut collected = self.collected.borrow_mut();
        let mut held = self.held.borrow_mut();
        for (place, (location, counts)) in self.meters.borrow().iter().enumerate() {
            if !counts.has_rung() {
                continue;
            }
            counts.collect(&mut collected);
            let mut holding = held.get_mut(place).and_then(Option::as_mut);
            for (time, diff) in collected.drain() {
                if let Some(holding) = &mut holding {
                    holding.add(&time, diff);
                }
                ledger.count(*location, time, diff, share);
            }
        }
    }

    fn must_share(&self) -> bool {
        self.ledger.borrow_mut().as_mut().is_none_or(Ledger::must_cast)
    }

    fn new_part(&self) -> Box<dyn Part> {
        Box::new(Changes::<T>(Vec::new()))
    }

    fn share(&self, part: &mut dyn Part) {
        let Changes(changes) =
            part.as_any_mut().downcast_mut::<Changes<T>>().expect("the parts of a bundle are those of its regions");
        changes.clear();
        if let Some(ledger) = self.ledger.borrow_mut().as_mut() {
            ledger.cast(|location, time, diff| changes.push((location, time, diff)));
        }
    }

    fn absorb(&self, part: &dyn Any) -> bool {
        let Some(changes) = changes::<T>(part) else { return false };
        if let Some(ledger) = self.ledger.borrow_mut().as_mut() {
            ledger.absorb(changes.iter().cloned());
        }
        true
    }

    fn absorb_bytes(&self, bytes: &[u8]) -> bool {
        let Ok(changes) = decode_serde::<Vec<Change<T>>>(bytes) else { return false };
        if let Some(ledger) = self.ledger.borrow_mut().as_mut() {
            ledger.absorb(changes);
        }
        true
    }

    fn is_dirty(&self) -> bool {
        self.ledger.borrow().as_ref().is_some_and(Ledger::is_waiting)
            || self.meters.borrow().iter().any(|(_, counts)| !counts.is_empty())
    }

    fn is_done(&self) -> bool {
        self.ledger.borrow().as_ref().is_none_or(|ledger| ledger.tracker().is_done()) && !self.is_dirty()
    }

    fn live_counts(&self) -> usize {
        self.ledger.borrow().as_ref().map_or(0, |ledger| ledger.tracker().accumulated().count())
    }

    fn describe(&self, out: &mut String) {
        use std::fmt::Write;
        let mut line = |text: std::fmt::Arguments<'_>| {
            // Writing to a string cannot fail.
            let _ = out.write_fmt(text);
        };
        let (path, time) = (&self.path, std::any::type_name::<T>());
        line(format_args!("scope {path:?} with times {time} and {} streams that enter\n", self.entering.get()));
        for (index, node) in self.nodes.borrow().iter().enumerate().skip(1) {
            line(format_args!("node {index} of {path:?} is {:?}", node.name));
            if let Body::Operator { ports, .. } = &node.body {
                line(format_args!(" with {} outputs and paths", ports.outputs.borrow().len()));
                for input in ports.inputs.borrow().iter() {
                    line(format_args!(" {:?}{}", input.summaries, if input.exchanged { " exchanged" } else { "" }));
                }
            }
            line(format_args!("\n"));
        }
        for (from, to) in self.edges.borrow().iter() {
            let (Source { node, port }, Target { node: reader, port: input }) = (from, to);
            line(format_args!(
                "edge in {path:?} from output {port} of node {node} to input {input} of node {reader}\n"
            ));
        }
    }

    fn dismantle(&self) {
        self.nested.borrow_mut().clear();
        self.meters.borrow_mut().clear();
        // Logic may own anything, also handles whose drop looks at this region: take it out before it is dropped. And what it
        // owns may panic in its drop, which must not keep the others alive, nor meet a second panic of theirs.
        let nodes = std::mem::take(&mut *self.nodes.borrow_mut());
        for Node { name, body } in nodes {
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| drop(body))) {
                self.core.take_origin();
                let (name, message) = (self.operator_name(&name), panic_message(&*panic));
                self.core.fail(Error::Panic { name, worker: self.core.index(), message });
            }
        }
        *self.ledger.borrow_mut() = None;
    }

    fn owes(&self) -> bool {
        self.ledger.borrow_mut().as_mut().is_some_and(Ledger::owes)
    }

    fn snapshot(&self) -> Box<dyn Part> {
        let nodes = self.nodes.borrow();
        let derived = |location: Location| {
            let border = |node: usize| matches!(nodes[node].body, Body::Outside | Body::Nested(_));
            matches!(location.port, Port::Source(_)) && border(location.node)
        };
        let mut ledger = self.ledger.borrow_mut();
        let changes = ledger.as_mut().map(|ledger| ledger.snapshot(derived));
        let changes = changes.unwrap_or(Ok(Vec::new())).expect("who takes a snapshot has told everything");
        Box::new(Changes(changes))
    }

    fn load(&self, part: &dyn Any) -> bool {
        let Some(changes) = changes::<T>(part) else { return false };
        self.moved.set(true);
        self.ledger.borrow_mut().as_mut().is_none_or(|ledger| ledger.begin(changes.iter().cloned()).is_ok())
    }

    fn stand(&self) {
        self.found(None);
    }

    fn grant(&self) -> Box<dyn Part> {
        let mut granted = self.claimed();
        let mut ledger = self.ledger.borrow_mut();
        for (location, time, count) in &mut granted {
            *count = 1;
            if let Some(ledger) = ledger.as_mut() {
                ledger.count(*location, time.clone(), 1, true);
            }
        }
        Box::new(Changes(granted))
    }

    fn retire(&self) -> bool {
        let mut sent = true;
        self.claims.borrow().values().for_each(|slot| sent &= slot.retire());
        sent
    }

    fn hand_over(&self) -> Box<dyn Part> {
        let given = self.claimed();
        self.claims.borrow().values().for_each(|slot| slot.revoke());
        for holding in self.held.borrow_mut().iter_mut().flatten() {
            if let Some(times) = &mut holding.times {
                holding.total = 0;
                times.clear();
            }
        }
        Box::new(Changes(given))
    }

    fn take(&self, part: &dyn Any) {
        let Some(given) = changes::<T>(part) else { return };
        for (location, time, count) in given.iter() {
            let meters = self.meters.borrow();
            let Some((_, counts)) = meters.iter().find(|(other, _)| other == location) else { continue };
            // Nobody holds more than that; who says so is not believed.
            let Some(others) = u32::try_from(*count).ok().and_then(|count| count.checked_sub(1)) else { continue };
            let counts = counts.clone();
            drop(meters);
            self.hold(*location, time, *count);
            // An output is sent to with one; the others are let go at once.
            if others > 0 {
                counts.update(time.clone(), -i64::from(others));
            }
            let capability = Capability::adopt(time.clone(), counts);
            if let Some(slot) = self.claims.borrow().get(location) {
                slot.give(capability);
            }
        }
    }

    fn seat(&self) {
        self.claims.borrow().values().for_each(|slot| slot.seat());
    }

    fn is_worked_off(&self) -> bool {
        let read = |node: &Node<T>| match &node.body {
            Body::Operator { ports, .. } => ports.inputs.borrow().iter().all(|input| input.queue.is_empty()),
            _ => true,
        };
        self.nodes.borrow().iter().all(read)
            && !self.is_dirty()
            && self.held.borrow().iter().flatten().all(|holding| holding.total == 0)
    }
}
