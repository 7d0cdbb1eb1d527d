//! Coordination of workers, made of dataflow and nothing else.
//!
//! | module | owns |
//! |---|---|
//! | [`barrier`] | a rendezvous of all workers, once or many times |
//! | [`sequencer`] | one order of what all workers push, read the same by everyone |
//! | [`error`] | why waiting or pushing failed |
//!
//! Both are compositions of an input, a broadcast and a probe. They need no lock, no clock and no thread of their own, run wherever
//! workers run, in threads or processes, and while a worker waits, all its other dataflows go on.
//!
//! ```
//! use penstock_coord::{Barrier, Sequencer};
//! use penstock_dataflow::{BoxError, execute, fabric};
//!
//! let threads = execute(fabric::threads(2), |worker| {
//!     let mut barrier = Barrier::new(worker);
//!     let mut sequencer = Sequencer::new(worker);
//!     barrier.wait(worker)?; // all workers are here
//!     sequencer.push(format!("from worker {}", worker.index()))?;
//!     let both = (sequencer.wait_next(worker, None)?, sequencer.wait_next(worker, None)?);
//!     Ok::<_, BoxError>(both)
//! });
//! let mut logs = threads.into_iter().map(|thread| thread.join().unwrap().unwrap());
//! assert_eq!(logs.next(), logs.next()); // the same order on both
//! ```
//!
//! Source: timely's posts on barriers and on sequencing (B-01 to B-11).

pub mod barrier;
pub mod error;
pub mod sequencer;

pub use barrier::Barrier;
pub use error::CoordError;
pub use sequencer::{Entry, Pusher, Sequencer};
