//! The door to user code: what a plan asks of the language it is embedded in.
//!
//! A plan carries call numbers, never functions; the host resolves them through [`Callbacks`]. Calls happen once per block and once per
//! epoch, never per row or per bin: a call gets a block's rows grouped by bin together with the states of all those bins.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use arrow_array::RecordBatch;
use penstock_bins::Encoding;

use crate::error::StateFault;
use crate::op::{Bins, take_rows};
use crate::state::foreign_of;

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
    /// The call was given up because the host is stopping: nothing went wrong.
    pub broken_off: bool,
}

impl CallError {
    /// An error with a message and nothing else known.
    pub fn new(step: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            step: step.into(),
            file: String::new(),
            line: 0,
            row: None,
            message: message.into(),
            origin: None,
            broken_off: false,
        }
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

/// What a call gives beside its rows: for each block the number of the side, of those that its step declares, in their order. Schemas are the
/// declared ones (checked by the caller).
pub type SideRows = Vec<(usize, RecordBatch)>;

/// The user functions of a plan, by call number.
pub trait Callbacks: Send + Sync {
    /// Applies call `call` to a block. The result's schema is the declared one (checked by the caller).
    fn map(&self, call: usize, batch: &RecordBatch, sides: &mut SideRows) -> Result<RecordBatch, CallError>;

    /// Begins to expand a block by call `call`; nothing is made before it is asked for. `skip` says whether inputs that fail are left
    /// out.
    fn expand(&self, call: usize, _batch: &RecordBatch, _skip: bool) -> Result<Box<dyn Expansion>, CallError> {
        Err(CallError::new(format!("call {call}"), "these functions expand nothing"))
    }

    /// Fresh state of one bin for the stateful call `call`.
    fn new_state(&self, call: usize) -> Box<dyn ForeignState>;

    /// Applies a block to the states of its bins, each bin's rows in input order, and returns the rows to emit.
    fn apply(&self, call: usize, _block: &mut Grouped<'_>, _sides: &mut SideRows) -> Result<RecordBatch, CallError> {
        Err(CallError::new(format!("call {call}"), "these functions keep no state"))
    }

    /// Ends an epoch on all bins of a worker, for calls that see epochs; returns the rows to emit.
    fn end_epoch(
        &self,
        call: usize,
        _end: &EpochEnd,
        _states: &mut States<'_>,
        _sides: &mut SideRows,
    ) -> Result<Vec<RecordBatch>, CallError> {
        Err(CallError::new(format!("call {call}"), "these functions do not work by epochs"))
    }

    /// The host stops: calls under way may be given up (with [`CallError::broken_off`]). Called from any thread.
    fn stop(&self) {}
}

/// What is left of a block that a flat map expands.
pub trait Expansion {
    /// Inputs that are left, one that has begun included.
    fn left(&self) -> u64;

    /// Makes up to `room` rows more, those of sides included, in blocks of the declared columns. Fewer while inputs are left means that they
    /// should be handed on first.
    fn draw(&mut self, room: usize, sides: &mut SideRows) -> (Vec<RecordBatch>, Result<(), Spoiled>);
}

/// An expansion failed.
#[derive(Debug)]
pub struct Spoiled {
    /// The input that failed, as people read it, and how many rows it had given before. None: the call itself is at fault.
    pub input: Option<(String, u64)>,
    /// Why.
    pub error: CallError,
}

impl From<CallError> for Spoiled {
    fn from(error: CallError) -> Self {
        Spoiled { input: None, error }
    }
}

/// What a call that sees epochs is told at the end of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EpochEnd {
    /// The watermark while the epoch's rows came, in microseconds.
    pub before_us: Option<i64>,
    /// The watermark that the epoch ends with, in microseconds; `i64::MAX` at the end of input.
    pub after_us: Option<i64>,
    /// Processing time of the epoch, in milliseconds since 1970; none where all input is one epoch (a batch job).
    pub clock_ms: Option<i64>,
}

/// The states of one step on one worker.
pub struct States<'a> {
    bins: &'a mut dyn Bins,
    spent: &'a mut Vec<(u32, u64)>,
}

impl<'a> States<'a> {
    /// Of these bins; what is spent on single ones is noted behind what is there.
    pub(crate) fn new(bins: &'a mut dyn Bins, spent: &'a mut Vec<(u32, u64)>) -> Self {
        Self { bins, spent }
    }

    /// A call has taken so many nanoseconds for this bin alone: see [`OwnCosts`](crate::op::OwnCosts).
    pub fn spend(&mut self, bin: u32, ns: u64) {
        self.spent.push((bin, ns));
    }

    /// The bins held here, ascending.
    #[must_use]
    pub fn held(&self) -> Vec<u32> {
        self.bins.held()
    }

    /// The state of a bin that is held here, as [`Callbacks::new_state`] made it.
    ///
    /// # Panics
    /// When the bin is not held here, or its state is of another type.
    pub fn of<S: ForeignState>(&mut self, bin: u32) -> &mut S {
        let state: &mut dyn Any = foreign_of(self.bins, bin).expect("the operator names bins that it holds");
        state.downcast_mut().expect("the states of a call are of one type")
    }
}

/// A block's rows grouped by bin.
pub struct Grouped<'a> {
    /// The block.
    pub batch: &'a RecordBatch,
    /// Rows of the block, bin after bin, in input order within a bin.
    pub rows: &'a [u32],
    /// The bins, ascending, each with its part of `rows`.
    pub runs: &'a [(u32, Range<usize>)],
    /// Their states.
    pub states: States<'a>,
}

impl Grouped<'_> {
    /// The obvious way: one bin after the other.
    ///
    /// # Errors
    /// The first of `apply`.
    pub fn each<S: ForeignState>(
        &mut self,
        mut apply: impl FnMut(&mut S, &RecordBatch) -> Result<RecordBatch, CallError>,
    ) -> Result<RecordBatch, CallError> {
        fn failed(error: impl fmt::Display) -> CallError {
            CallError::new("the rows of a bin", error.to_string())
        }
        let mut made = Vec::new();
        for (bin, run) in self.runs {
            let rows = take_rows(self.batch, &self.rows[run.clone()]).map_err(failed)?;
            made.push(apply(self.states.of(*bin), &rows)?);
        }
        let schema = made.first().map(RecordBatch::schema).expect("a block has rows");
        arrow_select::concat::concat_batches(&schema, &made).map_err(failed)
    }
}

/// Keys whose state could not be read, such as one whose class is gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unreadable {
    /// How many.
    pub keys: u64,
    /// One of them, in short.
    pub key: String,
    /// Why that one.
    pub reason: String,
}

/// The state of one bin that lives in another language, for instance a dict of Python objects.
///
/// The methods mirror those of a bin's native state; see `penstock_bins` for what each promises.
pub trait ForeignState: Any + Send {
    /// Makes the next chunk of the encoding's extent, of any size; none after the last. What has changed is told in chunks of entries
    /// ([`penstock_files::Chunk`]), the rest as it likes, but for how entries begin.
    fn encode(&self, encoding: &mut Encoding) -> Result<Option<Vec<u8>>, StateFault>;
    /// Takes one chunk made by `encode`.
    fn absorb(&mut self, chunk: &[u8]) -> Result<(), StateFault>;
    /// Takes one chunk of a record of changes, of which newer ones may follow: what cannot be read of it is remembered as
    /// [`unreadable`](Self::unreadable) until something newer of its key comes.
    fn restore(&mut self, chunk: &[u8]) -> Result<(), StateFault> {
        self.absorb(chunk)
    }
    /// Gives its keys as they are to states of the same step, by the hashes of the keys: how bins are split and merged. False, and nothing was
    /// given, where it cannot or must not, as when an undo would want them back: then they go by chunks.
    fn hand_over(
        &self,
        _part_of: &dyn Fn(u64) -> Option<usize>,
        _parts: &mut [&mut (dyn ForeignState + 'static)],
    ) -> Result<bool, StateFault> {
        Ok(false)
    }
    /// Keys whose newest state in what was [restored](Self::restore) could not be read.
    fn unreadable(&self) -> Result<Option<Unreadable>, StateFault> {
        Ok(None)
    }
    /// Estimated bytes held.
    fn bytes(&self) -> usize;
    /// Keys held.
    fn keys(&self) -> usize;
    /// An epoch begins: forget older undo information.
    fn mark(&mut self);
    /// Back to the last mark.
    fn rollback(&mut self) -> Result<(), StateFault>;
    /// Nothing will be undone until the next mark.
    fn settle(&mut self) {
        self.mark();
    }
    /// Whether nothing is held.
    fn is_empty(&self) -> bool {
        self.keys() == 0
    }
}
