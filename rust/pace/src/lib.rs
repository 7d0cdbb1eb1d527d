//! The pace of a flow in epochs: when a worker sends what, marks its bins and takes its record, and when bins move.
//!
//! Owns the clock of a flow, not what flows. An epoch is released to every worker of a generation; each sends its share slice by slice, never
//! more than a window of slices ahead of the probe on the output, and than a third of one while bins move, or where the slices of all
//! workers are numbered in one order, so many rows of its own however far ahead; what the epoch ends with travels in its last slice; an epoch is done on a worker when the probe has passed it. Where several workers count and nothing is marked
//! between epochs, the next epoch is fed while the others still count this one.
//!
//! Slices of an epoch: 0 a seal, at which nothing is ever sent and nothing moves; `(0, MARK)` idle ticks, so that a migration finishes
//! between two batches; `MARK` the cut at which bins are marked, nothing is ever sent at it; `(MARK, CLOSE)` data; `CLOSE` what the epoch ends
//! with.
//!
//! | module | owns |
//! |---|---|
//! | `pacer` | a worker's half: epochs that wait, the one that is fed, those that are not done ([`Pacer`]) |
//! | `leader` | the first worker's: the control input and the migrations on it ([`Leader`], [`Order`]) |
//! | `anchor` | instants as times of the world |
//!
//! Invariants
//! - The leader (worker 0 of the fabric) alone sends control. It keeps the control input at most a window
//!   ahead of the least data to send, so that a migration asked for now takes effect when what is under way is done.
//! - The data input of a worker without work follows the control frontier: nobody silent holds a migration.
//! - With a journal, all workers mark their bins at one consistent cut: an epoch's first block is sent when
//!   the probe stands at `MARK`, that is, when every worker waits there and nothing earlier is under way; and control
//!   skips `MARK`, so no bin moves before every worker has marked.
//! - Where epochs are recorded, the data input of a worker waits at the seal of the next one until [`Pacer::completed`] has told that it is done,
//!   and who asks takes the record then; control begins behind the seal. So no bin moves before both of its workers have
//!   taken their records, and a change is in one record only.
//!
//! The simulation of the engine runs this very loop in virtual time, and with faults planted in a copy (`rust/engine/build.rs`).
//!
//! Non-goals: what a slice is, what its rows mean, threads and parking: a host's.
//! Source: Megaphone §3.3 (strategies as user-supplied data), §4.3; slices and watermarks are ours.
//!
//! Departures: a mark before the data, since a migration at the first slice of data could otherwise move a bin before
//! its worker had marked it. Control follows the probe of the data input and a window, not the probe of the output,
//! which control itself holds back. Epochs overlap where no journal needs a cut between them.

mod anchor;
mod leader;
mod pacer;

use penstock_progress::{FlowTime, ProbeHandle};

pub use anchor::unix_ns;
pub use leader::{Cadence, Leader, Migrated, Moves, Order, Refusal, StepReport};
pub use pacer::{Driven, Flight, Pace, Pacer, Release};

/// First slice of an epoch: no worker leaves it before it has taken the record of the epoch before.
pub const SEAL: u32 = 0;
/// Slice of an epoch at which bins are marked; smaller ones are idle ticks between two batches, greater ones data.
pub const MARK: u32 = 1 << 31;
/// Last slice of an epoch: what it ends with travels in it.
pub const CLOSE: u32 = u32::MAX;

/// The first time of an epoch at which something may move.
fn behind_seal(epoch: u64) -> FlowTime {
    FlowTime::new(epoch, SEAL + 1)
}

/// What the workers can see of time.
pub struct Probes {
    /// The least data that any worker has still to send.
    pub input: ProbeHandle<FlowTime>,
    /// The least control that the leader has still to send.
    pub control: ProbeHandle<FlowTime>,
    /// The least time of which output may still come.
    pub output: ProbeHandle<FlowTime>,
}

/// The frontier, which is one time or none: flow time is totally ordered.
#[must_use]
pub fn first(probe: &ProbeHandle<FlowTime>) -> Option<FlowTime> {
    probe.with_frontier(|frontier| frontier.first().copied())
}
