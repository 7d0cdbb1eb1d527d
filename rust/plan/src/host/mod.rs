//! Hosts: the threads that run a compiled plan and hand it input, epoch by epoch.
//!
//! Owns the clock of a flow. An epoch is released to every worker of a generation; each worker feeds
//! its share slice by slice, never more than a window of slices ahead of the probe on the plan's output, and than a third of one while bins move;
//! the watermark travels in the epoch's last slice; an epoch is done on a worker when the probe has
//! passed it, and a flow with no epoch in flight is quiescent: no block, no capability, no timer of the
//! engine, only bins. Where several workers count and nothing is marked between epochs, the next epoch is fed while the others
//! still count this one. A host whose whole input is one epoch releases it in parts: numbered like epochs, and only the last has an end.
//!
//! Slices of an epoch: 0 a seal, at which nothing is ever sent and nothing moves; `(0, MARK)` idle ticks, so that a migration finishes
//! between two batches; `MARK` the cut at which
//! bins are marked, nothing is ever sent at it; `(MARK, CLOSE)` data; `CLOSE` the watermark and the end of the epoch.
//!
//! Invariants
//! - The leader (worker 0 of the fabric) alone sends control. It keeps the control input at most a window
//!   ahead of the probe, so that a migration asked for now takes effect within a window of slices.
//! - The data input of a worker without work follows the control frontier: nobody silent holds a migration.
//! - All sources of a flow are fed through one input at the same times: which source a block is of is said by the block.
//! - With a journal, all workers mark their bins at one consistent cut: an epoch's first block is sent when
//!   the probe stands at `MARK`, that is, when every worker waits there and nothing earlier is under way; and control
//!   skips `MARK`, so no bin moves before every worker has marked.
//! - Where epochs are recorded, a worker takes its record of one ([`Record`]) in the turn in which it sees the epoch complete, and its data
//!   input waits at the seal of the next until then; control begins behind the seal. So no bin moves before both of its workers have
//!   taken their records, and a change is in one record only.
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
//! Source: Megaphone §3.3 (strategies as user-supplied data), §4.3; slices and watermarks are ours.
//!
//! Departures: a mark before the data, since a migration at the first slice of data could otherwise move a bin before
//! its worker had marked it. Control follows the probe of the data input and a window, not the probe of the output,
//! which control itself holds back. A local input is one epoch, released in parts, not one epoch per block: the batch
//! host's rows must be its rows; so windows are held until the input ends, unless it streams. Epochs overlap where no
//! journal needs a cut between them.

mod build;
mod chain;
mod crew;
mod feed;
#[cfg(test)]
mod gap;
mod group;
mod inline;
mod leader;
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
pub use group::{Cadence, Event, Group, GroupConfig, HostError, NotStarted, Refusal, StepReport};
pub use inline::{Inline, Pulled};
pub use pieces::{Begin, End, Piece};
pub use record::Record;
pub use resident::{LoadError, Loaded, Resident};
pub use rows::{Keep, Rows, Stored};
pub use stats::{BinMove, GroupStats, ScopeStats, SliceSample, StepLoads, WorkerStats};
pub use watermarks::Watermarks;

/// First slice of an epoch: no worker leaves it before it has taken the record of the epoch before.
const SEAL: u32 = 0;
/// Slice of an epoch at which bins are marked; smaller ones are idle ticks between two batches, greater ones data.
pub const MARK: u32 = 1 << 31;
/// Last slice of an epoch: the watermark and the end of the epoch travel in it.
pub const CLOSE: u32 = u32::MAX;
