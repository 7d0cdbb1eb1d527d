//! Rows on their way into or out of a group, which may lie elsewhere than in memory.
//!
//! A host that must bound its memory hands released rows in as [`Stored`] and takes outputs away through a [`Keep`]; the
//! group reads a stored block when its slice is due, and keeps nothing of it. What reading and keeping mean is the host's.

use std::fmt;
use std::sync::Arc;

use arrow_array::RecordBatch;
use penstock_dataflow::BoxError;

use crate::op::block_rows;

/// Rows that a host keeps somewhere.
pub trait Stored: Send + Sync + fmt::Debug {
    /// How many.
    fn num_rows(&self) -> usize;

    /// The rows; again when asked again. May wait for a disk.
    ///
    /// # Errors
    /// They cannot be had any more; the group ends with that error.
    fn read(&self) -> Result<RecordBatch, BoxError>;
}

/// Takes what a group has made.
pub trait Keep: Send + Sync {
    /// Keeps a block until the returned rows are dropped.
    ///
    /// # Errors
    /// There is no room; the group ends with that error.
    fn keep(&self, batch: RecordBatch) -> Result<Rows, BoxError>;
}

/// A block of rows.
#[derive(Clone, Debug)]
pub enum Rows {
    /// In memory.
    Here(RecordBatch),
    /// Wherever the host keeps them.
    Stored(Arc<dyn Stored>),
}

impl Rows {
    /// How many.
    #[must_use]
    pub fn num_rows(&self) -> usize {
        match self {
            Rows::Here(batch) => batch.num_rows(),
            Rows::Stored(stored) => stored.num_rows(),
        }
    }

    /// Rows that a block of them may have, so that it is no larger than what goes between processes; stored rows are a block.
    pub(crate) fn block_rows(&self) -> usize {
        match self {
            Rows::Here(batch) => block_rows(batch),
            Rows::Stored(stored) => stored.num_rows().max(1),
        }
    }

    /// The rows that a group without [`Keep`] has made.
    ///
    /// # Panics
    /// When they were stored.
    #[must_use]
    pub fn into_here(self) -> RecordBatch {
        match self {
            Rows::Here(batch) => batch,
            Rows::Stored(stored) => panic!("{stored:?} was kept elsewhere"),
        }
    }

    /// The rows themselves.
    ///
    /// # Errors
    /// Those of [`Stored::read`].
    pub fn read(&self) -> Result<RecordBatch, BoxError> {
        match self {
            Rows::Here(batch) => Ok(batch.clone()),
            Rows::Stored(stored) => stored.read(),
        }
    }
}

impl From<RecordBatch> for Rows {
    fn from(batch: RecordBatch) -> Self {
        Rows::Here(batch)
    }
}
