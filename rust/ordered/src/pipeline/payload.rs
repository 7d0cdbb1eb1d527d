//! What passes through a pipeline, what operators are, and how they fail.
//!
//! Owns: [`Payload`], [`Turn`], the operators with state as traits, [`Fault`]. One envelope of input is one number and gives exactly one
//! envelope at every operator, with 0 to k items in it; so there are no holes, and the number is the same everywhere.

use std::fmt;
use std::sync::Arc;

/// A batch of 0 to k items that travels as one envelope.
pub trait Payload: Send + 'static {
    /// How many items it holds.
    fn items(&self) -> usize;

    /// About how many bytes it keeps in memory.
    fn bytes(&self) -> usize;
}

/// Who works on what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// The number of the worker, from 0. Who runs operators on the thread that pushes and pulls has the number of workers.
    pub worker: usize,
    /// The number of the envelope: its position in the input, from 0.
    pub number: u64,
}

/// An operator whose state is divided by partition: envelopes of different partitions may be worked on at a time.
pub trait Partitioned<P, E>: Send + Sync {
    /// Divides an envelope: at most one part per partition, partitions counted from 0.
    ///
    /// # Errors
    /// The user's; it takes the place of the envelope.
    fn split(&self, payload: P) -> Result<Vec<(usize, P)>, E>;

    /// Works on a part. The parts of a partition come one at a time, in the order of their numbers.
    ///
    /// # Errors
    /// The user's; of several parts that fail the first one in the order of the split counts.
    fn operate(&self, turn: Turn, partition: usize, part: P) -> Result<P, E>;

    /// Puts the parts together again, in the order of the split; from no part an empty envelope. Also what [`finish`](Self::finish)
    /// gave, in the order of the partitions.
    ///
    /// # Errors
    /// The user's.
    fn merge(&self, parts: Vec<(usize, P)>) -> Result<P, E>;

    /// Whether [`finish`](Self::finish) is called at the end of the input.
    fn finishes(&self) -> bool {
        false
    }

    /// What comes after the last envelope, of one partition. Called after all parts of that partition.
    ///
    /// # Errors
    /// The user's.
    fn finish(&self, turn: Turn, partition: usize) -> Result<Option<P>, E> {
        let _ = (turn, partition);
        Ok(None)
    }
}

/// An operator with one state: called for one envelope at a time, in order.
pub trait Stateful<P, E>: Send {
    /// Works on an envelope.
    ///
    /// # Errors
    /// The user's; it takes the place of the envelope.
    fn operate(&mut self, turn: Turn, payload: P) -> Result<P, E>;

    /// Whether [`finish`](Self::finish) is called at the end of the input.
    fn finishes(&self) -> bool {
        false
    }

    /// What comes after the last envelope.
    ///
    /// # Errors
    /// The user's.
    fn finish(&mut self, turn: Turn) -> Result<Option<P>, E> {
        let _ = turn;
        Ok(None)
    }
}

/// Why an envelope has no output. It takes the place of the output.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault<E> {
    /// The operator returned an error.
    #[error("operator {operator} ({name}) failed")]
    Failed {
        /// The number of the operator, from 0.
        operator: usize,
        /// Its name.
        name: Arc<str>,
        /// Its error.
        error: E,
    },
    /// The operator panicked.
    #[error("operator {operator} ({name}) panicked: {message}")]
    Panicked {
        /// The number of the operator, from 0.
        operator: usize,
        /// Its name.
        name: Arc<str>,
        /// What the panic said.
        message: String,
    },
    /// A split named a partition that the operator does not have.
    #[error("operator {operator} ({name}) has {partitions} partitions; its split named partition {partition}")]
    NoSuchPartition {
        /// The number of the operator, from 0.
        operator: usize,
        /// Its name.
        name: Arc<str>,
        /// What the split named.
        partition: usize,
        /// How many there are.
        partitions: usize,
    },
    /// The pipeline has broken an invariant of its own and was stopped.
    #[error("the pipeline is broken, which is a mistake in penstock: {why}")]
    Broken {
        /// What was seen.
        why: String,
    },
}

impl<E: fmt::Debug> fmt::Debug for Fault<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed { operator, name, error } => write!(f, "Failed({operator} {name}: {error:?})"),
            Self::Panicked { operator, name, message } => write!(f, "Panicked({operator} {name}: {message})"),
            Self::Broken { why } => write!(f, "Broken({why})"),
            Self::NoSuchPartition { operator, name, partition, partitions } => {
                write!(f, "NoSuchPartition({operator} {name}: {partition} of {partitions})")
            }
        }
    }
}
