//! Operators with logic in Python: their ports, capabilities and notifications.
//!
//! The logic is a function without arguments, called when a block arrives or a frontier of the inputs moves; it reads and sends
//! through its [`DataflowPorts`]. Each block that is read brings a capability that lives as long as Python keeps it: the wrapper in
//! `penstock.dataflow` hands it out, and letting go of the last reference releases it, on whichever thread that happens.
//!
//! Invariant: no state of a port is borrowed while Python code runs.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use penstock_dataflow::{Activator, Input, OperatorBuilder, Output, Pipeline, Scope, Stream};
use penstock_progress::{Capability, Notificator, PartialOrder};
use pyo3::prelude::*;

use super::block::{Block, attached};
use super::home::{Address, Key};
use super::time::{
    Coordinates, Level, Nest, Pair, Time, backward, both, each, from_python, lift, parse, shown, to_python,
};
use crate::errors::{self, Kind, Later};

pub(crate) type Held = Level<Capability<u64>, Capability<Pair>, Capability<Nest<true>>, Capability<Nest<false>>>;
pub(crate) type AllPorts = Level<Rc<Ports<u64>>, Rc<Ports<Pair>>, Rc<Ports<Nest<true>>>, Rc<Ports<Nest<false>>>>;

/// The inputs of one operator, and its output.
pub(crate) struct Ports<T: Time> {
    name: String,
    inputs: Vec<RefCell<Input<T, Block>>>,
    output: RefCell<Output<T, Block>>,
    /// By input: the frontier as the present run of the logic sees it.
    frontiers: RefCell<Vec<Vec<T>>>,
    notificator: RefCell<Notificator<T>>,
    /// Whether the logic took a notification in its present run.
    notified: Cell<bool>,
    activator: Activator,
}

impl<T: Time> Ports<T> {
    fn input(&self, input: usize) -> PyResult<&RefCell<Input<T, Block>>> {
        self.inputs.get(input).ok_or_else(|| self.missing(input))
    }

    fn frontier(&self, input: usize) -> PyResult<Vec<T>> {
        let found = self.frontiers.borrow().get(input).cloned();
        found.ok_or_else(|| self.missing(input))
    }

    fn missing(&self, input: usize) -> PyErr {
        let message = format!("operator {:?} has no input {input}: there are {}", self.name, self.inputs.len());
        errors::raise(Kind::Value, &message)
    }

    fn give(&self, held: &Capability<T>, at: Option<T>, block: Block, state: &CapabilityState) -> Result<(), Later> {
        let backward = |at: &T| backward("a capability", held.time(), at, state.depth);
        let later = at.map(|at| held.delayed(&at).map_err(|_| backward(&at))).transpose()?;
        let mut output = self.output.borrow_mut();
        let mut session = output.try_session(later.as_ref().unwrap_or(held)).map_err(|error| {
            let (kind, why) = match (error.ended, state.late) {
                (true, _) => (Kind::Closed, "any more: its dataflow has ended"),
                (false, true) => (Kind::Capability, LATE),
                (false, false) => (Kind::Capability, "with a capability of another operator"),
            };
            errors::later(kind, format!("operator {:?} cannot send {why}", self.name))
        })?;
        session.give(block);
        Ok(())
    }
}

/// A capability that is held, or was.
pub(crate) struct CapabilityState {
    held: RefCell<Option<Held>>,
    depth: usize,
    /// It is what a constructor got at a worker that joins, or was made of it: it is for no output.
    late: bool,
}

const LATE: &str =
    "with what a constructor gets at a worker that joins, which is good for nothing: take the capabilities of blocks";

/// The right to send at a time or later.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct DataflowCapability {
    key: Key<CapabilityState>,
}

impl DataflowCapability {
    fn new(address: &Address, held: Held, depth: usize, late: bool) -> Self {
        let state = CapabilityState { held: RefCell::new(Some(held)), depth, late };
        DataflowCapability { key: address.keep("Capability", state) }
    }
}

fn dropped() -> Later {
    errors::later(Kind::Capability, "this capability was dropped: whoever wants to send later keeps it".into())
}

fn of_another_scope() -> Later {
    errors::later(Kind::Capability, "this capability is of another scope".into())
}

impl CapabilityState {
    fn time(&self) -> Option<Coordinates> {
        let held = self.held.borrow();
        held.as_ref().map(|held| each!(held, held => held.time().coordinates(self.depth)))
    }

    fn delayed(&self, time: &[u64]) -> Result<Held, Later> {
        fn delay<T: Time>(held: &Capability<T>, time: &[u64], depth: usize) -> Result<Capability<T>, Later> {
            let asked = T::from_coordinates(time);
            held.delayed(&asked).map_err(|_| backward("a capability", held.time(), &asked, depth))
        }
        let held = self.held.borrow();
        Ok(lift!(held.as_ref().ok_or_else(dropped)?, held => delay(held, time, self.depth)?))
    }

    fn downgrade(&self, time: &[u64]) -> Result<(), Later> {
        let mut held = self.held.borrow_mut();
        each!(held.as_mut().ok_or_else(dropped)?, held => {
            let time = Time::from_coordinates(time);
            held.downgrade(&time).map_err(|_| backward("a capability", held.time(), &time, self.depth))
        })
    }
}

#[pymethods]
impl DataflowCapability {
    /// The earliest time at which it allows to send; None when it was dropped.
    #[getter]
    fn time<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let state = self.key.get(py)?;
        state.time().map(|time| shown(py, &time)).transpose()
    }

    /// A further capability, for a time in advance of this one's.
    fn delayed(&self, py: Python<'_>, time: &Bound<'_, PyAny>) -> PyResult<DataflowCapability> {
        let state = self.key.get(py)?;
        let time = parse(time, state.depth)?;
        let later = state.delayed(&time).map_err(|why| why.raise(py))?;
        Ok(DataflowCapability::new(self.key.address(), later, state.depth, state.late))
    }

    /// Moves it to a time in advance of its own.
    fn downgrade(&self, py: Python<'_>, time: &Bound<'_, PyAny>) -> PyResult<()> {
        let state = self.key.get(py)?;
        let time = parse(time, state.depth)?;
        state.downgrade(&time).map_err(|why| why.raise(py))
    }

    /// Gives it up. Again: nothing.
    fn drop(&self, py: Python<'_>) -> PyResult<()> {
        let held = self.key.get(py)?.held.borrow_mut().take();
        std::mem::drop(held);
        Ok(())
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(errors::no_pickle("DataflowCapability", "it is a right of one worker; send its time"))
    }
}

struct PortsState {
    ports: AllPorts,
    depth: usize,
}

impl PortsState {
    fn send(&self, granted: &CapabilityState, at: Option<&[u64]>, block: Option<Block>) -> Result<(), Later> {
        let held = granted.held.borrow();
        let held = held.as_ref().ok_or_else(dropped)?;
        both!(&self.ports, held, ports, held => {
            let at = at.map(Time::from_coordinates);
            match block {
                Some(block) => ports.give(held, at, block, granted),
                None => Ok(()),
            }
        }, else Err(of_another_scope()))
    }

    fn notify_at(&self, granted: &CapabilityState) -> Result<(), Later> {
        let mut slot = granted.held.borrow_mut();
        let held = slot.as_ref().ok_or_else(dropped)?;
        let own = both!(&self.ports, held, ports, held => ports.output.borrow().accepts(held),
            else return Err(of_another_scope()));
        if !own {
            let message = match granted.late {
                true => format!("notify_at cannot be called {LATE}"),
                false => "notify_at takes a capability of this operator, and this one is another operator's".into(),
            };
            return Err(errors::later(Kind::Capability, message));
        }
        let Some(held) = slot.take() else { return Ok(()) };
        both!(&self.ports, held, ports, held => {
            ports.notificator.borrow_mut().notify_at(held);
            // Its time may be complete already: then no frontier will move for it.
            ports.activator.activate();
            Ok(())
        }, else Ok(()))
    }
}

/// What the logic of one operator reads from, sends to and waits for.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct DataflowPorts {
    key: Key<PortsState>,
}

impl DataflowPorts {
    /// What has the operator run.
    pub(crate) fn activator(&self, py: Python<'_>) -> PyResult<Activator> {
        Ok(each!(&self.key.get(py)?.ports, ports => ports.activator.clone()))
    }
}

#[pymethods]
impl DataflowPorts {
    /// The next block of an input as ``(capability, block)``; None when there is none now.
    fn next<'py>(&self, py: Python<'py>, input: usize) -> PyResult<Option<(DataflowCapability, Bound<'py, PyAny>)>> {
        macro_rules! take {
            ($state:expr, $($level:ident),*) => {
                match &$state.ports {
                    $(Level::$level(ports) => {
                        let mut port = ports.input(input)?.borrow_mut();
                        port.next().map(|(capability, block)| (Level::$level(capability.retain()), block))
                    })*
                }
            };
        }
        let state = self.key.get(py)?;
        let Some((held, block)) = take!(state, Root, Pair, Odd, Even) else { return Ok(None) };
        let capability = DataflowCapability::new(self.key.address(), held, state.depth, false);
        Ok(Some((capability, block.to_python(py)?)))
    }

    /// Sends a block with a capability, at its time or the later one `at`.
    #[pyo3(signature = (capability, block, at=None))]
    fn send(
        &self,
        py: Python<'_>,
        capability: &Bound<'_, DataflowCapability>,
        block: &Bound<'_, PyAny>,
        at: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let state = self.key.get(py)?;
        let granted = capability.get().key.get(py)?;
        let block = Block::from_python(block)?;
        let at = at.map(|at| parse(at, state.depth)).transpose()?;
        state.send(&granted, at.as_deref(), block).map_err(|why| why.raise(py))
    }

    /// The least times that may still come at an input.
    fn frontier<'py>(&self, py: Python<'py>, input: usize) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let state = self.key.get(py)?;
        each!(&state.ports, ports => ports.frontier(input)?.iter().map(|time| to_python(py, time, state.depth)).collect())
    }

    /// Whether this time may still come at an input.
    fn less_equal(&self, py: Python<'_>, input: usize, time: &Bound<'_, PyAny>) -> PyResult<bool> {
        let state = self.key.get(py)?;
        each!(&state.ports, ports => {
            let time = from_python(time, state.depth)?;
            Ok(ports.frontier(input)?.iter().any(|least| least.less_equal(&time)))
        })
    }

    /// Whether a time before this one may still come at an input.
    fn less_than(&self, py: Python<'_>, input: usize, time: &Bound<'_, PyAny>) -> PyResult<bool> {
        let state = self.key.get(py)?;
        each!(&state.ports, ports => {
            let time = from_python(time, state.depth)?;
            Ok(ports.frontier(input)?.iter().any(|least| least.less_than(&time)))
        })
    }

    /// Asks for one notification when the capability's time is complete at all inputs; takes the capability.
    fn notify_at(&self, py: Python<'_>, capability: &Bound<'_, DataflowCapability>) -> PyResult<()> {
        let (state, granted) = (self.key.get(py)?, capability.get().key.get(py)?);
        state.notify_at(&granted).map_err(|why| why.raise(py))
    }

    /// The capability of the earliest time that was asked for and is complete; None when there is none now.
    fn notification(&self, py: Python<'_>) -> PyResult<Option<DataflowCapability>> {
        macro_rules! take {
            ($state:expr, $($level:ident),*) => {
                match &$state.ports {
                    $(Level::$level(ports) => {
                        let frontiers = ports.frontiers.borrow();
                        let frontiers: Vec<&[_]> = frontiers.iter().map(Vec::as_slice).collect();
                        let next = ports.notificator.borrow_mut().next(&frontiers);
                        ports.notified.set(ports.notified.get() || next.is_some());
                        next.map(Level::$level)
                    })*
                }
            };
        }
        let state = self.key.get(py)?;
        let held = take!(state, Root, Pair, Odd, Even);
        Ok(held.map(|held| DataflowCapability::new(self.key.address(), held, state.depth, false)))
    }

    /// Makes the logic run again in the current or the next step.
    fn activate(&self, py: Python<'_>) -> PyResult<()> {
        each!(&self.key.get(py)?.ports, ports => ports.activator.activate());
        Ok(())
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(errors::no_pickle("DataflowPorts", "it belongs to the logic of one operator"))
    }
}

/// Builds an operator: ``constructor(ports, capability)`` gives its logic.
///
/// # Errors
/// What the constructor raises; the operator is unbuilt then, so that a program that goes on cannot start its graph.
#[allow(clippy::too_many_arguments)]
pub(crate) fn build<T: Time>(
    scope: &Scope<T>,
    depth: usize,
    name: &str,
    streams: &[&Stream<T, Block>],
    constructor: &Bound<'_, PyAny>,
    address: &Address,
    level: fn(Rc<Ports<T>>) -> AllPorts,
    hold: fn(Capability<T>) -> Held,
) -> PyResult<Stream<T, Block>> {
    let mut builder = OperatorBuilder::new(scope, name);
    let activator = builder.activator();
    let inputs: Vec<_> = streams.iter().map(|stream| RefCell::new(builder.input(stream, Pipeline))).collect();
    let (output, made) = builder.output::<Block>();
    let ports = Rc::new(Ports {
        name: name.to_owned(),
        frontiers: RefCell::new(vec![vec![T::minimum()]; inputs.len()]),
        inputs,
        output: RefCell::new(output),
        notificator: RefCell::default(),
        notified: Cell::new(false),
        activator,
    });
    builder.try_build(|mut capabilities| {
        let handle = DataflowPorts { key: address.keep("Operator", PortsState { ports: level(ports.clone()), depth }) };
        let held = capabilities.remove(0);
        let late = !ports.output.borrow().accepts(&held);
        let held = DataflowCapability::new(address, hold(held), depth, late);
        let logic = constructor.call1((handle, held))?.unbind();
        Ok::<_, PyErr>(move |frontiers: &penstock_dataflow::Frontiers<'_, T>| {
            for (seen, input) in ports.frontiers.borrow_mut().iter_mut().zip(0..) {
                seen.clear();
                seen.extend_from_slice(frontiers.frontier(input));
            }
            let unread = || ports.inputs.iter().map(|input| input.borrow().len()).sum::<usize>();
            let before = unread();
            attached(|py| logic.call0(py).map(drop))?;
            // Logic that stops in the middle of its input goes on in the next step; one that reads nothing waits for news.
            let stopped = (1..before).contains(&unread());
            // The same of notifications that are left: no frontier moves for them any more.
            let left = ports.notified.take() && {
                let frontiers = ports.frontiers.borrow();
                let frontiers: Vec<&[_]> = frontiers.iter().map(Vec::as_slice).collect();
                ports.notificator.borrow_mut().has_next(&frontiers)
            };
            if stopped || left {
                ports.activator.activate();
            }
            Ok(())
        })
    })?;
    Ok(made)
}
