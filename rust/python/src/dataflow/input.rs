//! Inputs as Python handles.

use std::cell::RefCell;

use penstock_dataflow::InputHandle;
use pyo3::prelude::*;

use super::block::Block;
use super::home::{Address, Key};
use super::time::{Level, Nest, Pair, Time, backward, each, parse, to_python};
use crate::errors::{self, Kind};

type Inputs = Level<
    InputHandle<u64, Block>,
    InputHandle<Pair, Block>,
    InputHandle<Nest<true>, Block>,
    InputHandle<Nest<false>, Block>,
>;

/// An input that is open, or was.
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

fn closed(doing: &str) -> PyErr {
    errors::raise(Kind::Closed, &format!("{doing} on an input that is closed: nothing can come after its end"))
}

fn void(doing: &str) -> PyErr {
    let why = "the worker that let this one join had closed its own by then, or this one leaves";
    errors::raise(Kind::Closed, &format!("{doing} on an input that takes nothing: {why}"))
}

#[pymethods]
impl DataflowInput {
    /// Sends a block at the current time.
    fn send(&self, py: Python<'_>, block: &Bound<'_, PyAny>) -> PyResult<()> {
        let state = self.key.get(py)?;
        let block = Block::from_python(block)?;
        let mut input = state.input.borrow_mut();
        let input = input.as_mut().ok_or_else(|| closed("send"))?;
        let Some(block) = block else { return Ok(()) };
        each!(input, input => {
            if input.is_void() {
                return Err(void("send"));
            }
            let early = input.is_early();
            input.try_send(block).map_err(|error| match early {
                true => errors::raise(Kind::Dataflow, "send before bootstrap(), at a worker that joins: it has no place yet"),
                false => errors::raise(Kind::Closed, &error.to_string()),
            })
        })
    }

    /// Moves to a later time: nothing more comes before it.
    fn advance_to(&self, py: Python<'_>, time: &Bound<'_, PyAny>) -> PyResult<()> {
        let state = self.key.get(py)?;
        let time = parse(time, state.depth)?;
        let mut input = state.input.borrow_mut();
        let input = input.as_mut().ok_or_else(|| closed("advance_to"))?;
        each!(input, input => {
            if input.is_void() {
                return Err(void("advance_to"));
            }
            let time = Time::from_coordinates(&time);
            input.advance_to(time).map_err(|error| backward(py, "an input", &error.held, &error.asked, state.depth))
        })
    }

    /// The current time; None when it is closed.
    #[getter]
    fn time<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let state = self.key.get(py)?;
        let input = state.input.borrow();
        let Some(input) = input.as_ref() else { return Ok(None) };
        each!(input, input => match input.is_void() {
            true => Ok(None),
            false => to_python(py, input.time(), state.depth).map(Some),
        })
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
