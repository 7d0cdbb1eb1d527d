//! The engine's protocol as pure state machines: events in, effects out. No thread, socket, clock or file.
//!
//! The driver steps [`Engine`] (`penstock.spark`, module `executor`), a member [`Member`] (`cluster::member::actor`). `tests/` holds a
//! simulation of the whole cluster around them.
//!
//! | module | owns |
//! |---|---|
//! | `engine` | the roster and rescales; [`Engine`], which hands events to queries |
//! | `query` | one query: calls, checkpoint and claim, generations, epochs, moves and retention |
//! | `member` | [`Member`]: what a member does about what it is asked |
//! | `protocol`, `error` | events, effects, requests, answers; why something failed |
//! | `manifest` | manifests and claims, their form on disk, and which manifest serves |
//! | `range` | bins and their parts as ranges of the hash, layouts, which ranges a generation begins with |
//! | `roster` | slots, and the members that serve them |
//!
//! # A query
//!
//! ```text
//! Fresh ──batch──▶ Running ──loss, failure──▶ Broken ──next call──▶ Running        Finished: the final epoch has run
//!   ▲                                            │                                 Lost: nothing has the state
//!   └──────────── fenced, other logs ────────────┴── not durable, ranges missing ──▶ Lost
//! ```
//!
//! A call (batch, finish, or the engine's own regroup between two batches) goes through these phases; each ends by an answer, a loss or a timer:
//!
//! ```text
//! Claiming ─▶ Stopping ─▶ Gathering ─▶ Loading ─▶ Starting ─▶ Discarding ─▶ Feeding ─▶ Releasing ─▶ Serving ─▶ return
//!             └── a new generation, where one is needed ──┘                                       │
//!                        ▲                                                                        │
//!                        └──── a member was lost: survivors undo, the rest is loaded, fed again ◀─┘
//! ```
//!
//! *Serving*: members write their files while the sink runs; when both have ended the claims are read again and the manifest is
//! written; they are read once more and the call returns. A batch that is asked for again is served again while all that it is made of
//! stands, and computed again otherwise, by another attempt, whose sink is called again.
//!
//! # Invariants, and why
//!
//! - *State, output and manifest of a batch are of one attempt* (a generation). Attempts may differ where functions of the user are not
//!   pure; a manifest of one with the output of another would never be noticed.
//! - *Every question has a ticket, and what is moot is forgotten*: late, repeated and stray answers change nothing.
//! - *Every call ends*: each phase waits for something that ends, by its answer or by the loss of who was asked; attempts, calls of the sink and tries
//!   with storage are bounded.
//! - *Lost is what is in no inventory*, not what the dead member owned: an original may survive elsewhere.
//! - *The set of members changes between the request for a batch and its mark*, or when Spark is known to have committed the last batch:
//!   before that the originals that undo it are needed. Of a query that nobody asks for a batch, since its last one failed or was not
//!   committed, members go as soon as they are to, where its checkpoint has all that it has: it is read again then.
//! - *Rows are fed when the old ones are forgotten* everywhere, not merely told to: rows and requests come on different connections.
//! - *A file is never written twice under one name*: a write that was given up may still arrive, also in part.
//! - *A final epoch is undone to where it began* until it has returned; its manifest is no base of another epoch.
//! - *Manifests of the newest claim serve first*, generations ascend over claims, so an engine that was fenced is never taken for the present
//!   one, whatever it still writes.
//! - *What is durable decides* where logs and memory have gone different ways (another engine, hand-edited logs): the state here is dropped and read again.
//!
//! # Who executes what
//!
//! | Effect | Where |
//! |---|---|
//! | `StartResident`, `RetireResident`, `Dismiss` | `residents`: a thread of the slot resubmits its job with pauses |
//! | `Call` | `calls`: a frame with the request as it is; the start of a generation takes plan, functions and addresses along |
//! | `Feed`, `Sink` | `query`, in the thread that waits for the call: `mapInArrow(..).collect()`, and the user's function |
//! | `Complete`, `Fail`, `Dropped` | `query`: the call returns, or raises the exception that the failure came from |
//! | `Moving`, `Moved` | `moves`: the user's handle |
//! | `Rescaled` | `rescale`: the user's handle |
//! | `WatchCommit` | `commits`: a thread looks at Spark's commit log as long as something is to be told, a commit or that the query rests without one |
//! | `Timer` | `executor` |
//! | `ReadCheckpoint`, `CreateClaim`, `ReadClaims`, `WriteManifest`, `WriteShown`, `Delete` | `checkpoints`: a thread each |
//!
//! | [`MemberEffect`] | `cluster::Host` and the member's own |
//! |---|---|
//! | `EndGroup`, `DropState`, `DropAll` | `Host::stop` and `Host::drop_loaded`, then `Host::inventory(epoch)`, or the bins are dropped |
//! | `StartGroup` | `generation_mesh::connect`, then `Host::start` |
//! | `ReleaseInput`, `Migrate`, `Recut`, `CancelMigration` | staging and `Host::release`; `Host::migrate`; `Host::recut`; `Host::cancel` |
//! | `CloseOutputs`, `SettleEpoch`, `DiscardStaged` | outputs, `Host::settle`, staging |
//! | `LoadRanges` | a thread: `durable::open`, `Host::load_ranges`; then `Host::keep_loaded` |
//! | `WriteFiles`, `MergeFiles` | a thread: `durable::write_records`, `durable::merge_files` |
//! | `Reply`, `Tell` | answer and event, with the facts of a failure beside its kind |
//!
//! Non-goals: what a data file looks like inside, how rows are staged and outputs kept, what Python shows of all this.

mod engine;
mod error;
mod manifest;
mod member;
mod protocol;
mod query;
mod range;
mod roster;

pub use engine::{Engine, Setup};
pub use error::{EngineError, Failure, Kind, StoreError};
pub use manifest::{
    Changed, Claim, Contents, DataFile, FormatError, Manifest, Named, Operator, Plan, Shown, VERSION, decode, encode,
};
pub use member::{Member, MemberEffect, MemberEvent};
pub use protocol::{
    Answer, Commit, Dismissal, Effect, Event, Facts, Handle, MemberId, Moving, Piece, Program, QueryId, Ranges,
    Receipt, Recut, Release, Request, RescaleFacts, Stamp, Start, Stored, Ticket, Wait, Wish,
};
pub use range::{Layout, LayoutError, MAX_LENGTH, Range};
