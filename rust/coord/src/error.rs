//! The errors of this crate.

use std::time::Duration;

use penstock_dataflow::Error;

/// Why waiting or pushing failed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CoordError {
    /// This worker, or a peer, has stopped: nobody is waited for any more.
    #[error("{0}")]
    Worker(#[source] Error),
    /// Some worker has not arrived in time. This worker stays arrived: the next wait goes on with the same round.
    #[error("round {round} was not reached by all workers within {waited:?}; wait again, or give the barrier up")]
    Timeout {
        /// Round waited for.
        round: u64,
        /// How long it was waited.
        waited: Duration,
    },
    /// Nothing was pushed anywhere in time.
    #[error("no element came within {waited:?}")]
    Silence {
        /// How long it was waited.
        waited: Duration,
    },
    /// Waiting for a round for which this worker itself has not arrived would never end.
    #[error("cannot wait for round {asked}: this worker has arrived for rounds up to {arrived}; call advance first")]
    NotArrived {
        /// Round asked for.
        asked: u64,
        /// Last round that this worker has arrived for.
        arrived: u64,
    },
    /// The handle was closed.
    #[error("the {what} of worker {worker} is closed: make a new one")]
    Closed {
        /// `sequencer`.
        what: &'static str,
        /// Worker that it belongs to.
        worker: usize,
    },
    /// The dataflow of this handle was dropped: by an error, or by the worker's end.
    #[error("the dataflow of the {what} of worker {worker} is gone: make a new one")]
    Gone {
        /// `barrier` or `sequencer`.
        what: &'static str,
        /// Worker that it belongs to.
        worker: usize,
    },
    /// The worker that let this one join had closed its own handle, or this one leaves.
    #[error(
        "the {what} of worker {worker} takes nothing: the worker that let it join had closed its own by then, or it leaves"
    )]
    Ended {
        /// `barrier` or `sequencer`.
        what: &'static str,
        /// Worker that it belongs to.
        worker: usize,
    },
    /// A handle was used with another worker than the one that it was made for.
    #[error("the {what} belongs to worker {owner} and was used with worker {worker}")]
    OtherWorker {
        /// `barrier` or `sequencer`.
        what: &'static str,
        /// Worker that it belongs to.
        owner: usize,
        /// Worker that it was used with.
        worker: usize,
    },
}

impl From<Error> for CoordError {
    fn from(error: Error) -> Self {
        CoordError::Worker(error)
    }
}
