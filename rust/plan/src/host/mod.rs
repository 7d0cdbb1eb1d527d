//! Hosts: the threads that run a compiled plan and hand it input, epoch by epoch.
//!
//! When what is sent, marked, recorded and moved is said by `penstock_pace`, whose clock of slices this is. Of an epoch, the watermark and
//! its end travel in the last slice; a flow with no epoch in flight is quiescent: no block, no capability, no timer of the
//! engine, only bins. A host whose whole input is one epoch releases it in parts: numbered like epochs, and only the last has an end.
//! All sources of a flow are fed through one input at the same times: which source a block is of is said by the block.
//!
//! Where the first worker *gathers* ([`GroupConfig::gather`]), the others are in processes that join its run and leave it ([`Crew`]), by the protocol
//! of `penstock_members`, in the middle of an epoch:
//! - It is the one founder, leads the members and never leaves, so its rank is 0 everywhere. Its input alone is open: rows go to the others
//!   in turn, marks to all, and what the last stage and the late outputs give comes back to it. So an epoch is done when it has seen it done.
//! - All bins begin with it. Who joins owns none; control gives it some, by its id, and takes them away before it is told to leave. That is
//!   the migration of threads: the host asks the members who there is and moves bins.
//! - Marks that were sent before a joiner was there do not reach it. So as soon as it is seen, all are told where the watermark stands (nothing
//!   new to those who know), and nothing moves at the time of that or before.
//!
//! Non-goals: staging, networks and membership (`cluster`), what a step computes (`keyed`).
//!
//! Departure: a local input is one epoch, released in parts, not one epoch per block: the batch host's rows must be its rows; so windows are
//! held until the input ends, unless it streams.

mod build;
mod chain;
mod crew;
mod feed;
#[cfg(test)]
mod gap;
mod group;
mod inline;
mod pieces;
mod record;
#[cfg(test)]
mod rescaling;
mod resident;
mod rows;
#[cfg(test)]
mod seal;
mod stats;
mod watermarks;
mod worker;

pub use build::Counts;
pub use crew::{Crew, CrewEvent};
pub use feed::PartitionRows;
pub use group::{Event, Group, GroupConfig, HostError, NotStarted};
pub use inline::{Inline, Pulled};
pub use penstock_pace::{CLOSE, Cadence, MARK, Refusal, StepReport};
pub use pieces::{Begin, End, Piece};
pub use record::Record;
pub use resident::{LoadError, Loaded, Resident};
pub use rows::{Keep, Rows, Stored};
pub use stats::{BinMove, GroupStats, ScopeStats, SliceSample, StepLoads, WorkerStats};
pub use watermarks::Watermarks;
