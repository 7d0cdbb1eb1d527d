//! Handles and `fork`: Spark forks Python workers, and a forked child has the parent's memory but none of its threads.
//!
//! A handle with threads, sockets or live Python state remembers the process that made it ([`Owner`]). In any other
//! process every method raises `ForkError`, and dropping the handle does nothing: it neither waits for threads that do
//! not exist there nor says goodbye on a socket that the parent still uses.

use pyo3::prelude::*;

use crate::errors::{self, Kind};

/// The process that made a handle.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Owner(u32);

impl Owner {
    /// The calling process.
    pub(crate) fn here() -> Self {
        Self(std::process::id())
    }

    /// Whether the calling process made the handle.
    pub(crate) fn is_here(self) -> bool {
        self.0 == std::process::id()
    }

    /// `ForkError` naming `class` unless the calling process made the handle.
    pub(crate) fn check(self, py: Python<'_>, class: &str) -> PyResult<()> {
        if self.is_here() {
            return Ok(());
        }
        let here = std::process::id();
        Err(errors::raise_with(
            py,
            Kind::Fork,
            &format!(
                "this {class} was made in process {} and is used in its forked child {here}, where its threads do not \
                 exist: make a new one there",
                self.0
            ),
            |facts| {
                facts.set_item("owner", self.0)?;
                facts.set_item("here", here)
            },
        ))
    }
}
