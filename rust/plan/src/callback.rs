//! The door to user code: what a plan asks of the language it is embedded in.
//!
//! A plan carries call numbers, never functions; the host resolves them through [`Callbacks`]. Calls happen once per block or once per
//! (block, bin), never per row.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use arrow_array::RecordBatch;

use crate::error::StateFault;

/// User code failed. Carries where, so that the user finds the line, and the original exception where there is one.
#[derive(Clone)]
pub struct CallError {
    /// The step's name as the user knows it.
    pub step: String,
    /// Source file of the user's function.
    pub file: String,
    /// Line in `file`, from 1; 0 when unknown.
    pub line: u32,
    /// Row of the block that failed, when known.
    pub row: Option<usize>,
    /// The message.
    pub message: String,
    /// The original exception, for the host to raise as the cause.
    pub origin: Option<Arc<dyn Any + Send + Sync>>,
}

impl CallError {
    /// An error with a message and nothing else known.
    pub fn new(step: impl Into<String>, message: impl Into<String>) -> Self {
        Self { step: step.into(), file: String::new(), line: 0, row: None, message: message.into(), origin: None }
    }
}

impl fmt::Debug for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CallError")
            .field("step", &self.step)
            .field("file", &self.file)
            .field("line", &self.line)
            .field("row", &self.row)
            .field("message", &self.message)
            .finish_non_exhaustive()
    }
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.step, self.message)?;
        if !self.file.is_empty() {
            write!(f, " ({}:{})", self.file, self.line)?;
        }
        if let Some(row) = self.row {
            write!(f, " in row {row}")?;
        }
        Ok(())
    }
}

impl std::error::Error for CallError {}

/// The user functions of a plan, by call number.
pub trait Callbacks: Send + Sync {
    /// Applies call `call` to a block. The result's schema is the declared one (checked by the caller).
    fn map(&self, call: usize, batch: &RecordBatch) -> Result<RecordBatch, CallError>;

    /// Fresh state of one bin for the stateful call `call`.
    fn new_state(&self, call: usize) -> Box<dyn ForeignState>;
}

/// The state of one bin that lives in another language, for instance a dict of Python objects.
///
/// The methods mirror those of a bin's native state; see `penstock_bins` for what each promises.
pub trait ForeignState: Send {
    /// Applies this bin's rows, in input order, and returns the rows to emit.
    fn apply(&mut self, rows: &RecordBatch) -> Result<RecordBatch, CallError>;
    /// Writes the state as chunks; any number, any size.
    fn encode(&self, chunk: &mut dyn FnMut(Vec<u8>));
    /// Takes one chunk written by `encode`.
    fn absorb(&mut self, chunk: &[u8]) -> Result<(), StateFault>;
    /// Estimated bytes held.
    fn bytes(&self) -> usize;
    /// Keys held.
    fn keys(&self) -> usize;
    /// An epoch begins: forget older undo information.
    fn mark(&mut self);
    /// Back to the last mark.
    fn rollback(&mut self);
    /// Whether nothing is held.
    fn is_empty(&self) -> bool {
        self.keys() == 0
    }
}
