//! Bounded scopes as Python handles: `penstock-bounded` over blocks.
//!
//! A bounded scope is opened from a stream, built in by Python, and closed by the stream that leaves it. Lists are handed out item by
//! item, record batches row by row as slices. A lazy expansion is an object of `penstock.dataflow` that holds the iterators of
//! one list: it is asked once per block for as many items as there is room for.
//!
//! Times in there are plain ints, whose last is the batch, so a loop of the scope itself is refused when it is opened.

use std::cell::RefCell;
use std::sync::Arc;

use arrow_array::RecordBatch as Batch;
use penstock_bounded::{BatchTime, Bounds, Egress, Expand, Faucet, Fault, Gate, Limits, Monitor};
use penstock_dataflow::{BoxError, Scope, Stream};
use penstock_progress::timestamp::Timestamp;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use super::block::{Block, attached};
use super::home::{Address, Key};
use super::stream::{Scopes, Streams};
use super::time::{Level, Nest, Pair};
use crate::errors::{self, Kind};

/// How blocks are handed out: as they are, or by `begin(list)`, which gives an expansion.
struct Hand {
    begin: Option<Py<PyAny>>,
}

/// What is left of a block.
enum Rest {
    Items { list: Arc<Py<PyList>>, at: usize, end: usize },
    Rows { batch: Batch, at: usize },
    Expansion { draw: Py<PyAny>, left: u64 },
}

/// What is collected for one block.
#[derive(Default)]
enum Gathered {
    #[default]
    Nothing,
    Items(Py<PyList>),
    Rows(Batch),
}

impl Hand {
    fn draw(rest: &mut Rest, room: usize, gathered: &mut Gathered) -> Result<usize, BoxError> {
        let fresh = match rest {
            Rest::Rows { batch, at } => {
                if !matches!(gathered, Gathered::Nothing) {
                    return Ok(0);
                }
                let count = room.min(batch.num_rows() - *at);
                *gathered = Gathered::Rows(batch.slice(*at, count));
                *at += count;
                return Ok(count);
            }
            Rest::Items { .. } | Rest::Expansion { .. } if matches!(gathered, Gathered::Rows(_)) => return Ok(0),
            Rest::Items { list, at, end } => attached(|py| {
                let slice = list.bind(py).get_slice(*at, (*at + room).min(*end));
                *at += slice.len();
                Ok(slice.unbind())
            })?,
            Rest::Expansion { draw, left } => attached(|py| {
                let (items, still): (Py<PyList>, u64) = draw.call1(py, (room,))?.extract(py)?;
                *left = still;
                Ok(items)
            })?,
        };
        attached(|py| {
            let fresh = fresh.bind(py);
            let count = fresh.len();
            match gathered {
                _ if count == 0 => {}
                Gathered::Items(items) => drop(items.bind(py).call_method1(pyo3::intern!(py, "extend"), (fresh,))?),
                _ => *gathered = Gathered::Items(fresh.clone().unbind()),
            }
            Ok(count)
        })
    }
}

impl Expand<Block> for Hand {
    type Inputs = Rest;
    type Gathered = Gathered;
    type Block = Block;

    fn load(&mut self, block: Block) -> Result<Rest, BoxError> {
        attached(|py| match (block.unpack(py)?, &self.begin) {
            (Block::Items(list), None) => {
                let end = list.bind(py).len();
                Ok(Rest::Items { list, at: 0, end })
            }
            (Block::Rows(batch), None) => Ok(Rest::Rows { batch, at: 0 }),
            (block, Some(begin)) => {
                let (draw, left) = begin.call1(py, (block.to_python(py)?,))?.extract(py)?;
                Ok(Rest::Expansion { draw, left })
            }
            (Block::Packed(_), None) => Err(errors::raise(Kind::Protocol, "a block that was not unpacked")),
        })
    }

    fn left(&self, rest: &Rest) -> u64 {
        match rest {
            Rest::Items { at, end, .. } => (end - at) as u64,
            Rest::Rows { batch, at } => (batch.num_rows() - at) as u64,
            Rest::Expansion { left, .. } => *left,
        }
    }

    fn fill(&mut self, rest: &mut Rest, room: usize, gathered: &mut Gathered) -> (usize, Result<(), Fault>) {
        match Hand::draw(rest, room, gathered) {
            Ok(count) => (count, Ok(())),
            Err(error) => (0, Err(Fault::Fatal(error))),
        }
    }

    fn seal(&mut self, gathered: Gathered, give: &mut dyn FnMut(Block)) -> Result<(), BoxError> {
        give(match gathered {
            Gathered::Items(items) => Block::Items(Arc::new(items)),
            Gathered::Rows(batch) => Block::Rows(batch),
            Gathered::Nothing => return Err("a block of nothing".into()),
        });
        Ok(())
    }
}

/// By the times of the scope around and of the scope itself.
enum Gates {
    Pair(Gate<u64, Pair>),
    First(Gate<Pair, Nest<true>>),
    Odd(Gate<Nest<false>, Nest<true>>),
    Even(Gate<Nest<true>, Nest<false>>),
}

pub(crate) struct GateState {
    gate: RefCell<Option<Gates>>,
    monitor: Monitor,
}

/// The end of a bounded scope, and its figures on this worker.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct DataflowGate {
    key: Key<GateState>,
}

/// The bounds that Python asks for; none of a number means that it is found while running.
pub(crate) fn bounds(batches: Option<u64>, size: Option<u64>, budget: Option<u64>) -> PyResult<Bounds> {
    Bounds::given(batches, size, budget, Limits::default())
        .map_err(|error| errors::raise(Kind::Config, &error.to_string()))
}

/// Opens a bounded scope behind a stream.
pub(crate) fn open(
    address: &Address,
    stream: &Streams,
    name: &str,
    bounds: Bounds,
    begin: Option<Py<PyAny>>,
) -> (Scopes, Streams, DataflowGate) {
    type Opened<O, I> = (Scope<I>, Stream<I, Block>, Gate<O, I>, Monitor);
    fn enter<O: Timestamp, I: BatchTime<O>>(
        stream: &Stream<O, Block>,
        name: &str,
        bounds: Bounds,
        begin: Option<Py<PyAny>>,
    ) -> Opened<O, I> {
        Faucet::<I, Block>::new(bounds).named(name).open(stream, Hand { begin })
    }
    let (scope, items, gate, monitor) = match stream {
        Level::Root(stream) => {
            let (scope, items, gate, monitor) = enter::<_, Pair>(stream, name, bounds, begin);
            (Level::Pair(scope), Level::Pair(items), Gates::Pair(gate), monitor)
        }
        Level::Pair(stream) => {
            let (scope, items, gate, monitor) = enter::<_, Nest<true>>(stream, name, bounds, begin);
            (Level::Odd(scope), Level::Odd(items), Gates::First(gate), monitor)
        }
        Level::Odd(stream) => {
            let (scope, items, gate, monitor) = enter::<_, Nest<false>>(stream, name, bounds, begin);
            (Level::Even(scope), Level::Even(items), Gates::Even(gate), monitor)
        }
        Level::Even(stream) => {
            let (scope, items, gate, monitor) = enter::<_, Nest<true>>(stream, name, bounds, begin);
            (Level::Odd(scope), Level::Odd(items), Gates::Odd(gate), monitor)
        }
    };
    let state = GateState { gate: RefCell::new(Some(gate)), monitor };
    (scope, items, DataflowGate { key: address.keep("bounded scope", state) })
}

impl DataflowGate {
    /// The stream in the scope around, once.
    pub(crate) fn leave(&self, py: Python<'_>, stream: &Streams) -> PyResult<Streams> {
        let state = self.key.get(py)?;
        let Some(gate) = state.gate.borrow_mut().take() else {
            return Err(errors::raise(Kind::Graph, "this bounded scope is closed already"));
        };
        Ok(match (gate, stream) {
            (Gates::Pair(mut gate), Level::Pair(stream)) => Level::Root(Egress::leave(stream.clone(), &mut gate)),
            (Gates::First(mut gate), Level::Odd(stream)) => Level::Pair(Egress::leave(stream.clone(), &mut gate)),
            (Gates::Odd(mut gate), Level::Odd(stream)) => Level::Even(Egress::leave(stream.clone(), &mut gate)),
            (Gates::Even(mut gate), Level::Even(stream)) => Level::Odd(Egress::leave(stream.clone(), &mut gate)),
            _ => {
                let message = "the body of a bounded scope gives back a stream of that scope";
                return Err(errors::raise(Kind::Graph, message));
            }
        })
    }
}

#[pymethods]
impl DataflowGate {
    /// The figures of the scope on this worker.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.key.get(py)?.monitor.stats();
        let facts = PyDict::new(py);
        for (name, value) in [
            ("batches", stats.batches),
            ("batch_size", stats.batch_size),
            ("raises", stats.raises),
            ("shrinks", stats.shrinks),
            ("admitted", stats.admitted),
            ("admitted_items", stats.admitted_items),
            ("unfinished", stats.unfinished),
            ("unfinished_items", stats.unfinished_items),
            ("maximum", stats.maximum),
            ("maximum_items", stats.maximum_items),
            ("buffered", stats.buffered),
        ] {
            facts.set_item(name, value)?;
        }
        facts.set_item("phase", format!("{:?}", stats.phase).to_lowercase())?;
        facts.set_item("rate", stats.rate)?;
        facts.set_item("holding", stats.holding)?;
        Ok(facts)
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(errors::no_pickle("DataflowGate", "build the dataflow where it runs"))
    }
}
