//! Inputs as Python handles.

use std::cell::RefCell;

use penstock_dataflow::InputHandle;
use pyo3::prelude::*;

use super::block::Block;
use super::home::{Address, Key};
use super::time::{Coordinates, Level, Nest, Pair, Time, backward, each, parse, shown};
use crate::errors::{self, Kind, Later};

type Inputs = Level<
    InputHandle<u64, Block>,
    InputHandle<Pair, Block>,
    InputHandle<Nest<true>, Block>,
    InputHandle<Nest<false>, Block>,
>;

/// An input that is open, or was. Nothing of it is borrowed while Python code runs, as that of an error.
pub(crate) struct InputState {
    input: RefCell<Option<Inputs>>,
    depth: usize,
}

impl InputState {
    pub(crate) fn new(input: Inputs, depth: usize) -> Self {
        InputState { input: RefCell::new(Some(input)), depth }
    }

    /// Ends the input; nothing when it is closed already.
    pub(crate) fn close(&self) {
        let input = self.input.borrow_mut().take();
        drop(input);
    }

    fn send(&self, block: Option<Block>) -> Result<(), Later> {
        let mut input = self.input.borrow_mut();
        let input = input.as_mut().ok_or_else(|| closed("send"))?;
        let Some(block) = block else { return Ok(()) };
        each!(input, input => {
            if input.is_void() {
                return Err(void("send"));
            }
            let early = input.is_early();
            input.try_send(block).map_err(|error| match early {
                true => {
                    let why = "send before bootstrap(), at a worker that joins: it has no place yet";
                    errors::later(Kind::Dataflow, why.into())
                }
                false => errors::later(Kind::Closed, error.to_string()),
            })
        })
    }

    fn advance_to(&self, time: &[u64]) -> Result<(), Later> {
        let mut input = self.input.borrow_mut();
        let input = input.as_mut().ok_or_else(|| closed("advance_to"))?;
        each!(input, input => {
            if input.is_void() {
                return Err(void("advance_to"));
            }
            let time = Time::from_coordinates(time);
            input.advance_to(time).map_err(|error| backward("an input", &error.held, &error.asked, self.depth))
        })
    }

    fn time(&self) -> Option<Coordinates> {
        let input = self.input.borrow();
        each!(input.as_ref()?, input => (!input.is_void()).then(|| input.time().coordinates(self.depth)))
    }
}

/// Feeds a stream.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct DataflowInput {
    key: Key<InputState>,
}

impl DataflowInput {
    pub(crate) fn new(address: &Address, state: InputState) -> Self {
        DataflowInput { key: address.keep("Input", state) }
    }
}

fn closed(doing: &str) -> Later {
    errors::later(Kind::Closed, format!("{doing} on an input that is closed: nothing can come after its end"))
}

fn void(doing: &str) -> Later {
    let why = "the worker that let this one join had closed its own by then, or this one leaves";
    errors::later(Kind::Closed, format!("{doing} on an input that takes nothing: {why}"))
}

#[pymethods]
impl DataflowInput {
    /// Sends a block at the current time.
    fn send(&self, py: Python<'_>, block: &Bound<'_, PyAny>) -> PyResult<()> {
        let state = self.key.get(py)?;
        let block = Block::from_python(block)?;
        state.send(block).map_err(|why| why.raise(py))
    }

    /// Moves to a later time: nothing more comes before it.
    fn advance_to(&self, py: Python<'_>, time: &Bound<'_, PyAny>) -> PyResult<()> {
        let state = self.key.get(py)?;
        let time = parse(time, state.depth)?;
        state.advance_to(&time).map_err(|why| why.raise(py))
    }

    /// The current time; None when it is closed.
    #[getter]
    fn time<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let state = self.key.get(py)?;
        state.time().map(|time| shown(py, &time)).transpose()
    }

    /// Ends the input. Again: nothing.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.key.get(py)?.close();
        Ok(())
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(errors::no_pickle("DataflowInput", "each worker feeds its own"))
    }
}
