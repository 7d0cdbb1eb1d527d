//! Streams and scopes as Python handles, and the operators that need no logic of their own.
//!
//! Every method is one operator of `penstock-dataflow`, for whichever type of time the scope has. User functions are called once per
//! block by wrappers from `penstock.dataflow`, which loop over items and turn exceptions into `UserFunctionError`.

use std::cell::RefCell;
use std::rc::Rc;

use penstock_dataflow::{FeedbackHandle, OperatorBuilder, Pipeline, Scope, Stream};
use penstock_progress::ProbeHandle;
use pyo3::prelude::*;

use super::block::{Block, attached};
use super::bounded::{self, DataflowGate};
use super::exchange::{Spread, exchange};
use super::failure;
use super::home::{Address, Key};
use super::input::{DataflowInput, InputState};
use super::operator::{DataflowPorts, build};
use super::probe::{DataflowProbe, ProbeState};
use super::time::{Level, Nest, Pair, Time, both, each, lift, to_python};
use crate::errors::{self, Kind};

pub(crate) type Streams =
    Level<Stream<u64, Block>, Stream<Pair, Block>, Stream<Nest<true>, Block>, Stream<Nest<false>, Block>>;
pub(crate) type Scopes = Level<Scope<u64>, Scope<Pair>, Scope<Nest<true>>, Scope<Nest<false>>>;
type Loops = Level<
    FeedbackHandle<u64, Block>,
    FeedbackHandle<Pair, Block>,
    FeedbackHandle<Nest<true>, Block>,
    FeedbackHandle<Nest<false>, Block>,
>;

/// Raised while its dataflow is being built.
pub(crate) type Open = Rc<std::cell::Cell<bool>>;

pub(crate) struct ScopeState {
    pub(crate) scope: Scopes,
    pub(crate) depth: usize,
    pub(crate) open: Open,
    /// Its last coordinate numbers batches.
    pub(crate) bounded: bool,
}

pub(crate) struct StreamState {
    stream: Streams,
    depth: usize,
    open: Open,
}

impl StreamState {
    fn check(&self) -> PyResult<()> {
        match self.open.get() {
            true => Ok(()),
            false => {
                Err(errors::raise(Kind::Graph, "the dataflow of this stream is built: nothing can be added to it"))
            }
        }
    }
}

/// A scope of a dataflow that is being built.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct DataflowScope {
    key: Key<ScopeState>,
}

impl DataflowScope {
    pub(crate) fn new(address: &Address, state: ScopeState) -> Self {
        DataflowScope { key: address.keep("Scope", state) }
    }

    fn state(&self, py: Python<'_>) -> PyResult<Rc<ScopeState>> {
        let state = self.key.get(py)?;
        match state.open.get() {
            true => Ok(state),
            false => Err(errors::raise(Kind::Graph, "the dataflow of this scope is built: nothing can be added to it")),
        }
    }
}

/// The blocks that one output sends, on this worker.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct DataflowStream {
    key: Key<StreamState>,
}

impl DataflowStream {
    fn new(address: &Address, like: (usize, &Open), stream: Streams) -> Self {
        let (depth, open) = like;
        DataflowStream { key: address.keep("Stream", StreamState { stream, depth, open: open.clone() }) }
    }

    fn state(&self, py: Python<'_>) -> PyResult<Rc<StreamState>> {
        let state = self.key.get(py)?;
        state.check()?;
        Ok(state)
    }

    fn beside(&self, state: &StreamState, stream: Streams) -> Self {
        Self::new(self.key.address(), (state.depth, &state.open), stream)
    }
}

/// The open end of a loop.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct DataflowLoop {
    key: Key<RefCell<Option<Loops>>>,
}

#[pymethods]
impl DataflowScope {
    /// How many coordinates a time has here.
    #[getter]
    fn depth(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.key.get(py)?.depth)
    }

    /// The name of the scope, after those around it.
    #[getter]
    fn path(&self, py: Python<'_>) -> PyResult<String> {
        Ok(each!(&self.key.get(py)?.scope, scope => scope.path().to_owned()))
    }

    /// How many workers there are.
    #[getter]
    fn peers(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(each!(&self.key.get(py)?.scope, scope => scope.peers()))
    }

    /// Whether workers may join and leave the run.
    #[getter]
    fn joinable(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(each!(&self.key.get(py)?.scope, scope => scope.is_joinable()))
    }

    /// The number of this one.
    #[getter]
    fn index(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(each!(&self.key.get(py)?.scope, scope => scope.index()))
    }

    /// A stream that the program feeds, and the handle to feed it.
    fn input(&self, py: Python<'_>) -> PyResult<(DataflowInput, DataflowStream)> {
        let (state, address) = (self.state(py)?, self.key.address());
        macro_rules! open {
            ($($level:ident),*) => {
                match &state.scope {
                    $(Level::$level(scope) => {
                        let (handle, stream) = scope.new_input::<Block>();
                        (Level::$level(handle), Level::$level(stream))
                    })*
                }
            };
        }
        let (handle, stream) = open!(Root, Pair, Odd, Even);
        let input = DataflowInput::new(address, InputState::new(handle, state.depth));
        Ok((input, DataflowStream::new(address, (state.depth, &state.open), stream)))
    }

    /// A scope within this one.
    fn nested(&self, py: Python<'_>, name: &str) -> PyResult<DataflowScope> {
        let state = self.state(py)?;
        let scope = match &state.scope {
            Level::Root(scope) => Level::Pair(scope.nested::<Pair, _>(name, |inner| inner.clone())),
            Level::Pair(scope) => Level::Odd(scope.nested::<Nest<true>, _>(name, |inner| inner.clone())),
            Level::Odd(scope) => Level::Even(scope.nested::<Nest<false>, _>(name, |inner| inner.clone())),
            Level::Even(scope) => Level::Odd(scope.nested::<Nest<true>, _>(name, |inner| inner.clone())),
        };
        let (depth, open) = (state.depth + 1, state.open.clone());
        let nested = ScopeState { scope, depth, open, bounded: false };
        Ok(DataflowScope::new(self.key.address(), nested))
    }

    /// Opens a loop whose blocks come back with the innermost coordinate advanced by `advance`.
    fn feedback(&self, py: Python<'_>, advance: u64) -> PyResult<(DataflowLoop, DataflowStream)> {
        fn open<T: Time>(scope: &Scope<T>, advance: u64) -> (FeedbackHandle<T, Block>, Stream<T, Block>) {
            scope.feedback::<Block>(T::advance(advance))
        }
        let (state, address) = (self.state(py)?, self.key.address());
        if state.bounded {
            let message = "the last coordinate of a bounded scope is the batch: a loop in it needs a scope of its own, \
                           by iterate or nested";
            return Err(errors::raise(Kind::Graph, message));
        }
        macro_rules! split {
            ($($level:ident),*) => {
                match &state.scope {
                    $(Level::$level(scope) => {
                        let (handle, stream) = open(scope, advance);
                        (Level::$level(handle), Level::$level(stream))
                    })*
                }
            };
        }
        let (handle, stream) = split!(Root, Pair, Odd, Even);
        let handle = DataflowLoop { key: address.keep("loop", RefCell::new(Some(handle))) };
        Ok((handle, DataflowStream::new(address, (state.depth, &state.open), stream)))
    }

    /// An operator over any number of inputs, with one output: ``constructor(ports, capability)`` gives its logic.
    fn operator(
        &self,
        py: Python<'_>,
        name: &str,
        inputs: Vec<Bound<'_, DataflowStream>>,
        constructor: &Bound<'_, PyAny>,
    ) -> PyResult<DataflowStream> {
        let (state, address) = (self.state(py)?, self.key.address());
        let inputs = inputs.iter().map(|input| input.get().state(py)).collect::<PyResult<Vec<_>>>()?;
        macro_rules! build {
            ($($level:ident),*) => {
                match &state.scope {
                    $(Level::$level(scope) => {
                        let mut streams = Vec::with_capacity(inputs.len());
                        for input in &inputs {
                            let Level::$level(stream) = &input.stream else { return Err(strangers(name)) };
                            streams.push(stream);
                        }
                        let (ports, held) = (Level::$level, Level::$level);
                        Level::$level(build(scope, state.depth, name, &streams, constructor, address, ports, held)?)
                    })*
                }
            };
        }
        let stream = build!(Root, Pair, Odd, Even);
        Ok(DataflowStream::new(address, (state.depth, &state.open), stream))
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(errors::no_pickle("DataflowScope", "build the dataflow where it runs"))
    }
}

#[pymethods]
impl DataflowStream {
    /// Each block through ``call(block)``, which gives the next block or None; with `timed` ``call(time, block)``. ``refused(error)`` makes
    /// the error of what is no block.
    #[pyo3(signature = (name, call, timed, refused=None))]
    fn apply(
        &self,
        py: Python<'_>,
        name: &str,
        call: Py<PyAny>,
        timed: bool,
        refused: Option<Py<PyAny>>,
    ) -> PyResult<DataflowStream> {
        let state = self.state(py)?;
        let stream = lift!(&state.stream, stream => apply(stream, name, call, timed, refused, state.depth));
        Ok(self.beside(&state, stream))
    }

    /// The blocks of this and another stream.
    fn concat(&self, py: Python<'_>, other: &Bound<'_, DataflowStream>) -> PyResult<DataflowStream> {
        let (state, other) = (self.state(py)?, other.get().state(py)?);
        let stream = match (&state.stream, &other.stream) {
            (Level::Root(one), Level::Root(two)) => Level::Root(one.concat(two)),
            (Level::Pair(one), Level::Pair(two)) => Level::Pair(one.concat(two)),
            (Level::Odd(one), Level::Odd(two)) => Level::Odd(one.concat(two)),
            (Level::Even(one), Level::Even(two)) => Level::Even(one.concat(two)),
            _ => return Err(strangers("concat")),
        };
        Ok(self.beside(&state, stream))
    }

    /// Items to the worker that the hash of their key names: ``keys(block)`` gives the keys of a list's items.
    fn exchange_keys(
        &self,
        py: Python<'_>,
        name: &str,
        keys: Py<PyAny>,
        refused: Py<PyAny>,
    ) -> PyResult<DataflowStream> {
        self.spread(py, name, Spread::Keys { keys, refused })
    }

    /// Rows to the worker that the hash of these columns names.
    fn exchange_columns(&self, py: Python<'_>, name: &str, columns: Vec<String>) -> PyResult<DataflowStream> {
        self.spread(py, name, Spread::Columns(columns))
    }

    /// Items that are tuples, each to the worker whose number it begins with.
    fn exchange_owners(&self, py: Python<'_>, name: &str) -> PyResult<DataflowStream> {
        self.spread(py, name, Spread::Owners)
    }

    /// Every block to every worker.
    fn broadcast(&self, py: Python<'_>, name: &str) -> PyResult<DataflowStream> {
        self.spread(py, name, Spread::Broadcast)
    }

    /// A view of this stream's frontier. The operator of `wake` runs whenever it moves.
    #[pyo3(signature = (wake=None))]
    fn probe(&self, py: Python<'_>, wake: Option<&Bound<'_, DataflowPorts>>) -> PyResult<DataflowProbe> {
        let state = self.state(py)?;
        let wake = wake.map(|ports| ports.get().activator(py)).transpose()?;
        let probe = lift!(&state.stream, stream => {
            let mut handle = ProbeHandle::new();
            match wake {
                Some(wake) => stream.probe_waking(&mut handle, wake),
                None => stream.probe_with(&mut handle),
            };
            handle
        });
        Ok(DataflowProbe::new(self.key.address(), ProbeState { probe, depth: state.depth }))
    }

    /// This stream in a scope nested in its own.
    fn enter(&self, py: Python<'_>, inner: &Bound<'_, DataflowScope>) -> PyResult<DataflowStream> {
        let (state, inner) = (self.state(py)?, inner.get().state(py)?);
        let stream = match (&state.stream, &inner.scope) {
            (Level::Root(stream), Level::Pair(scope)) => Level::Pair(stream.enter(scope)),
            (Level::Pair(stream), Level::Odd(scope)) => Level::Odd(stream.enter(scope)),
            (Level::Odd(stream), Level::Even(scope)) => Level::Even(stream.enter(scope)),
            (Level::Even(stream), Level::Odd(scope)) => Level::Odd(stream.enter(scope)),
            _ => return Err(strangers("enter")),
        };
        let like = (inner.depth, &state.open);
        Ok(DataflowStream::new(self.key.address(), like, stream))
    }

    /// This stream in the scope around its own.
    fn leave(&self, py: Python<'_>, outer: &Bound<'_, DataflowScope>) -> PyResult<DataflowStream> {
        let (state, outer) = (self.state(py)?, outer.get().state(py)?);
        let stream = match (&state.stream, &outer.scope) {
            (Level::Pair(stream), Level::Root(scope)) => Level::Root(stream.leave(scope)),
            (Level::Odd(stream), Level::Pair(scope)) => Level::Pair(stream.leave(scope)),
            (Level::Odd(stream), Level::Even(scope)) => Level::Even(stream.leave(scope)),
            (Level::Even(stream), Level::Odd(scope)) => Level::Odd(stream.leave(scope)),
            _ => return Err(strangers("leave")),
        };
        let like = (outer.depth, &state.open);
        Ok(DataflowStream::new(self.key.address(), like, stream))
    }

    /// Opens a bounded scope behind this stream; `begin(block)` gives the lazy expansion of a block.
    #[pyo3(signature = (name, batches, batch_size, memory, begin))]
    fn bounded(
        &self,
        py: Python<'_>,
        name: &str,
        batches: Option<u64>,
        batch_size: Option<u64>,
        memory: Option<u64>,
        begin: Option<Py<PyAny>>,
    ) -> PyResult<(DataflowScope, DataflowStream, DataflowGate)> {
        let (state, address) = (self.state(py)?, self.key.address());
        let bounds = bounded::bounds(batches, batch_size, memory)?;
        let (scope, stream, gate) = bounded::open(address, &state.stream, name, bounds, begin);
        let depth = state.depth + 1;
        let inner = ScopeState { scope, depth, open: state.open.clone(), bounded: true };
        let stream = DataflowStream::new(address, (depth, &state.open), stream);
        Ok((DataflowScope::new(address, inner), stream, gate))
    }

    /// This stream behind the bounded scope that it closes.
    fn close_bounded(
        &self,
        py: Python<'_>,
        gate: &Bound<'_, DataflowGate>,
        outer: &Bound<'_, DataflowScope>,
    ) -> PyResult<DataflowStream> {
        let (state, outer) = (self.state(py)?, outer.get().state(py)?);
        let stream = gate.get().leave(py, &state.stream)?;
        Ok(DataflowStream::new(self.key.address(), (outer.depth, &state.open), stream))
    }

    /// Feeds a loop of this scope.
    fn connect_loop(&self, py: Python<'_>, feedback: &Bound<'_, DataflowLoop>) -> PyResult<()> {
        let (state, open) = (self.state(py)?, feedback.get().key.get(py)?);
        let Some(handle) = open.borrow_mut().take() else {
            return Err(errors::raise(Kind::Graph, "this loop is connected already"));
        };
        both!(&state.stream, handle, stream, handle => { owned(stream).connect_loop(handle); Ok(()) }, else Err(strangers("connect_loop")))
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(errors::no_pickle("DataflowStream", "build the dataflow where it runs"))
    }
}

impl DataflowStream {
    fn spread(&self, py: Python<'_>, name: &str, spread: Spread) -> PyResult<DataflowStream> {
        let state = self.state(py)?;
        let stream = lift!(&state.stream, stream => exchange(stream, name, spread));
        Ok(self.beside(&state, stream))
    }
}

#[pymethods]
impl DataflowLoop {
    fn __reduce__(&self) -> PyResult<()> {
        Err(errors::no_pickle("DataflowLoop", "build the dataflow where it runs"))
    }
}

/// Rows in memory of their own. What goes around a loop may be what came, held by whoever made it, who holds what it was made of: a chain with
/// a link for each round.
fn owned<T: Time>(stream: &Stream<T, Block>) -> Stream<T, Block> {
    stream.unary(Pipeline, "connect_loop", |_| {
        move |input, output, _| {
            while let Some((capability, block)) = input.next() {
                output.session(&capability).give(block.owned());
            }
            Ok(())
        }
    })
}

/// `GraphError`: streams of scopes that do not belong together.
fn strangers(name: &str) -> PyErr {
    let message =
        format!("{name}: the streams are of different scopes; enter and leave lead from one scope to the next");
    errors::raise(Kind::Graph, &message)
}

fn apply<T: Time>(
    stream: &Stream<T, Block>,
    name: &str,
    call: Py<PyAny>,
    timed: bool,
    refused: Option<Py<PyAny>>,
    depth: usize,
) -> Stream<T, Block> {
    let mut builder = OperatorBuilder::new(stream.scope(), name);
    builder.notify(false);
    let mut input = builder.input(stream, Pipeline);
    let (mut output, made) = builder.output::<Block>();
    builder.build(|_| {
        move |_| {
            if input.is_empty() {
                return Ok(());
            }
            attached(|py| {
                let call = call.bind(py);
                while let Some((capability, block)) = input.next() {
                    let next = match timed {
                        // An observer: the block goes on as it is.
                        true => {
                            call.call1((to_python(py, capability.time(), depth)?, block.to_python(py)?))?;
                            Some(block)
                        }
                        false => {
                            let made = call.call1((block.to_python(py)?,))?;
                            match made.is_none() {
                                true => None,
                                false => Block::from_python(&made).map_err(|error| match &refused {
                                    Some(refused) => failure::refusal(py, refused, error),
                                    None => error,
                                })?,
                            }
                        }
                    };
                    if let Some(block) = next {
                        output.session(&capability).give(block);
                    }
                }
                Ok(())
            })
        }
    });
    made
}
