//! What the machines hear and what they ask for. Plain data.
//!
//! An effect that is answered carries a ticket; its answer carries the ticket back. A ticket whose question is moot is forgotten, so that late
//! and repeated answers change nothing. Executors do effects in the order in which they come, at most once, and decide nothing.

use std::collections::BTreeMap;

use penstock_balance::Strategy;
use serde::{Deserialize, Serialize};

use crate::error::{EngineError, Failure, StoreError};
use crate::manifest::{Claim, Contents, DataFile, Manifest, Plan, Shown};
use crate::range::{Layout, Range};

/// Spark's id of a query.
pub type QueryId = String;
/// Names a question.
pub type Ticket = u64;
/// Names a user's migration or rescale.
pub type Handle = u64;

/// A resident process. Given by the registry, never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct MemberId(pub u64);

/// Which life of a query's workers a frame is of, and among whom: in every frame that another life must refuse.
///
/// Departure: what lets go of an epoch or of a query ([`Request::CloseEpoch`], [`Request::Settle`], [`Request::Discard`], [`Request::Conclude`],
/// [`Request::Drop`]) has none, nor have feeds and drains. It is true whoever is a member: an epoch that was committed is so in each later
/// life, and rows are staged before it is known who will run them. A member that refused one as old would keep what nobody asks for again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Stamp {
    /// Ascends over all claims of a checkpoint.
    pub generation: u64,
    /// Ascends with every change of the member list.
    pub membership: u64,
}

/// What a feed task tells: the rows of a source in a partition that a member has staged. Delivered receipts are the commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Receipt {
    /// Number of the source.
    #[serde(default)]
    pub source: u8,
    /// Spark's partition.
    pub partition: u32,
    /// Spark's task attempt, unique in the application.
    pub attempt: u64,
    /// Who has the rows.
    pub member: MemberId,
    /// How many.
    pub rows: u64,
    /// Greatest event time, microseconds.
    pub max_event_time: Option<i64>,
    /// Sum of the rows' hashes, modulo 2^64: the same whatever their order and partitions.
    pub hash: u64,
}

/// Committed rows of a source in one partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Commit {
    /// Number of the source.
    #[serde(default)]
    pub source: u8,
    /// Spark's partition.
    pub partition: u32,
    /// The attempt that counts.
    pub attempt: u64,
    /// Its rows.
    pub rows: u64,
    /// Rows of all smaller partitions, and of all sources before.
    pub rows_before: u64,
}

/// Frozen output of one worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    /// Where it is.
    pub member: MemberId,
    /// Its number there.
    pub number: u32,
    /// Its rows.
    pub rows: u64,
    /// Its late rows.
    pub late_rows: u64,
    /// Its rows of each side output, in the order of the plan.
    pub side_rows: Vec<u64>,
}

/// What one query is to move.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moving {
    /// Whose.
    pub query: QueryId,
    /// The user's handle.
    pub handle: Handle,
    /// What; planned when its turn comes.
    pub wish: Wish,
}

/// What a user wants to move.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Wish {
    /// Equal shares, up to one range, by as few moves as possible.
    Even,
    /// The worker of each range afterwards, by first hash.
    To(Vec<u32>),
    /// Only these ranges; of one that is split all its parts.
    Moves(Vec<(Range, u32)>),
    /// No range moves, but for parts that are merged: they come together first.
    Recut(Recut),
}

/// Ranges that become others, between two epochs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Recut {
    /// Each becomes its parts, where it is.
    Split {
        /// Which.
        ranges: Vec<Range>,
        /// By how many bits parts are longer.
        by: u8,
    },
    /// All parts of each become one.
    Merge {
        /// What they are to be.
        ranges: Vec<Range>,
    },
}

/// Why a member is sent away.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Dismissal {
    /// Another attempt of its task serves the slot.
    Spare,
    /// Its executor has a member, another one has none.
    Crowded,
    /// The slot is not wanted any more, or the engine is closed.
    Unneeded,
}

/// Ranges by the name of their operator.
pub type Ranges = BTreeMap<String, Vec<Range>>;

/// Begin a generation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start {
    /// Of the generation.
    pub stamp: Stamp,
    /// All members; ranks are indices.
    pub members: Vec<MemberId>,
    /// Index of the receiver.
    pub rank: u32,
    /// Workers of each member.
    pub threads: u32,
    /// No range has fewer bits, in no generation of the engine: what has more is a part of a bin.
    pub bits: u8,
    /// Who owns what, by operator, all of the same ranges; worker `rank * threads + thread`.
    pub layouts: BTreeMap<String, Layout>,
    /// The next epoch.
    pub epoch: u64,
    /// Watermark so far, microseconds.
    pub watermark: Option<i64>,
    /// Whether all state begins empty; else it is what was kept and loaded.
    pub fresh: bool,
}

/// Run an epoch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Release {
    /// Of the generation.
    pub stamp: Stamp,
    /// The epoch.
    pub epoch: u64,
    /// What counts of what is staged here.
    pub feeds: Vec<Commit>,
    /// Watermark at its end, microseconds.
    pub watermark: Option<i64>,
    /// Its processing time, milliseconds.
    pub clock_ms: i64,
    /// Whether it is the final one.
    pub finish: bool,
}

/// What a member is asked, about one query.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// End the workers; tell which ranges' state at the beginning of `epoch` is here.
    Stop {
        /// Of the generation that begins: whatever is older has ended.
        stamp: Stamp,
        /// The epoch that it begins with.
        epoch: u64,
    },
    /// See that the claim can be read as it was made, so that this is the folder which the driver means; read these ranges, perhaps none, from
    /// files, for the next start.
    Load {
        /// Of the generation that begins.
        stamp: Stamp,
        /// The engine's.
        claim: Claim,
        /// What.
        ranges: Ranges,
        /// From where; newest last.
        files: Vec<DataFile>,
    },
    /// Begin a generation.
    Start(Start),
    /// Run an epoch.
    Release(Release),
    /// Write what the epoch changed.
    Write {
        /// Of the generation that ran it.
        stamp: Stamp,
        /// The epoch.
        epoch: u64,
    },
    /// Merge files into one.
    Merge {
        /// Of the present generation.
        stamp: Stamp,
        /// Which; newest last.
        files: Vec<DataFile>,
    },
    /// Move ranges step by step. To the member of worker 0.
    Migrate {
        /// Of the present generation.
        stamp: Stamp,
        /// Names it.
        handle: Handle,
        /// Range and new worker, of every operator; step by step.
        steps: Vec<Vec<(Range, u32)>>,
        /// See [`Event::Migrate`].
        max_pause_ms: Option<u32>,
        /// See [`Event::Migrate`].
        #[serde(default)]
        drains: bool,
        /// The epoch that it is prepared for, which is released next: the first step takes effect before its rows are routed.
        at_epoch: Option<u64>,
    },
    /// Split or merge ranges, of every operator, between two epochs. Answered, and cancelled, as a migration of one step.
    Recut {
        /// Of the present generation.
        stamp: Stamp,
        /// Names it.
        handle: Handle,
        /// What.
        recut: Recut,
    },
    /// Let a migration end after the step under way.
    CancelMigration {
        /// Of the present generation.
        stamp: Stamp,
        /// Which.
        handle: Handle,
    },
    /// Forget the outputs of this epoch and those before.
    CloseEpoch {
        /// The epoch.
        epoch: u64,
    },
    /// Nothing undoes this epoch any more: forget what is kept for that alone.
    Settle {
        /// The epoch.
        epoch: u64,
    },
    /// Forget what is staged for an epoch.
    Discard {
        /// The epoch.
        epoch: u64,
    },
    /// The final epoch has returned: end the workers, forget the state, keep the outputs.
    Conclude,
    /// Forget the query.
    Drop,
}

/// What a member answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// Done.
    Done,
    /// Stopped; this is here.
    Inventory(Ranges),
    /// An epoch is complete here.
    Released {
        /// Frozen outputs by worker: number, rows, late rows, rows of side outputs.
        pieces: Vec<(u32, u64, u64, Vec<u64>)>,
    },
    /// Files are written.
    Written(Vec<DataFile>),
    /// A migration has ended.
    Migrated {
        /// The epoch and slice from which each of its steps that was done holds.
        times: Vec<(u64, u32)>,
        /// Why no more, where that was not its end or the user's wish; the workers go on.
        refused: Option<Failure>,
    },
}

/// What storage answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stored {
    /// What the checkpoint holds.
    Contents(Contents),
    /// Whether the claim was made: there was none of its number.
    Claimed(bool),
    /// The newest claim.
    NewestClaim {
        /// Its number, 0 where there is none.
        number: u64,
        /// Who made it, where the store may let two engines make one of the same number.
        nonce: Option<u64>,
    },
    /// Written.
    Written,
    /// Deleted, as far as the store lets it.
    Deleted,
}

/// What an engine hears.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Event {
    /// A resident has joined.
    MemberUp {
        /// Which one.
        slot: u32,
        /// Its id.
        member: MemberId,
        /// Where it runs.
        executor: String,
        /// How many executors there are.
        executors: u32,
    },
    /// A member is gone, for good: its connection ended or it was silent.
    MemberLost {
        /// Which.
        member: MemberId,
        /// Why.
        reason: String,
    },
    /// The executor of a member is going and waits for its tasks to end: the member is to end by itself, another one to come in its place.
    Leaving {
        /// Which.
        member: MemberId,
    },
    /// A member answers.
    Answer {
        /// The question.
        ticket: Ticket,
        /// What it says.
        answer: Result<Answer, Failure>,
    },
    /// The workers of a member failed while nothing was asked of them.
    GroupFailed {
        /// Whose.
        query: QueryId,
        /// Of which generation.
        stamp: Stamp,
        /// Why.
        failure: Failure,
    },
    /// A query is going to ask, or to ask with other functions: a generation begins with them.
    Open {
        /// Its id.
        query: QueryId,
        /// What is to be known of it.
        program: Program,
    },
    /// Spark calls with a batch.
    Batch {
        /// Whose.
        query: QueryId,
        /// Which.
        epoch: u64,
        /// Spark's own time of the batch, milliseconds: durable before the call.
        clock_ms: i64,
        /// The same where Spark has told it: then a batch of another time is another batch, planned anew.
        #[serde(default)]
        planned_ms: Option<i64>,
        /// The last batch in Spark's commit log.
        committed: Option<u64>,
    },
    /// Spark's commit log has a batch; told while the query is idle.
    Committed {
        /// Whose.
        query: QueryId,
        /// Which.
        epoch: u64,
    },
    /// Spark does not run the query and its commit log does not have the batch: that comes again when the query is started again.
    Rests {
        /// Whose.
        query: QueryId,
        /// Which.
        epoch: u64,
    },
    /// The user ends the input.
    Finish {
        /// Whose.
        query: QueryId,
        /// Milliseconds.
        clock_ms: i64,
        /// The last batch in Spark's commit log.
        committed: Option<u64>,
    },
    /// Nobody waits for the call under way any more: the Spark query was stopped, or the user interrupted.
    Stop {
        /// Which.
        query: QueryId,
    },
    /// A user wants a query forgotten.
    Drop {
        /// Which.
        query: QueryId,
    },
    /// Spark delivers a receipt of a feed.
    Receipt {
        /// The feed.
        ticket: Ticket,
        /// The receipt.
        receipt: Receipt,
    },
    /// The stage of a feed has ended; all receipts were delivered before.
    Fed {
        /// The feed.
        ticket: Ticket,
        /// Why it failed, if so; an echo where a member could not be reached.
        outcome: Result<(), Failure>,
    },
    /// The sink has returned or raised.
    Sunk {
        /// The call.
        ticket: Ticket,
        /// What it raised, if so; an echo where a member could not be read from.
        outcome: Result<(), Failure>,
    },
    /// Storage answers.
    Stored {
        /// The question.
        ticket: Ticket,
        /// What it says.
        outcome: Result<Stored, StoreError>,
    },
    /// A timer has run out.
    Timer {
        /// Which.
        ticket: Ticket,
    },
    /// A user moves, splits or merges ranges, of all operators alike, when the migrations asked for before have ended. Of several queries either all are
    /// taken up or none.
    Migrate {
        /// Whose and what.
        moves: Vec<Moving>,
        /// How it is cut into steps.
        strategy: Strategy,
        /// Milliseconds that no step may pause for longer, where one step's ranges allow it: steps are taken together as long as they stay
        /// within it. None: one by one.
        max_pause_ms: Option<u32>,
        /// Each step but the first waits until the rows that waited when the one before was complete have been worked off.
        #[serde(default)]
        drains: bool,
        /// Of each query the epoch that it is prepared for: its first step takes effect before any row of that epoch, whatever moves then.
        at_epoch: Option<u64>,
    },
    /// A user wants no further step.
    CancelMigration {
        /// The user's handle.
        handle: Handle,
    },
    /// A user wants another number of residents.
    Rescale {
        /// The user's handle.
        handle: Handle,
        /// How many.
        workers: u32,
        /// Task slots that can be had beyond those held.
        free: u32,
    },
    /// A user wants the number of residents from before a rescale.
    CancelRescale {
        /// The user's handle.
        handle: Handle,
    },
    /// The engine closes.
    Close,
}

/// What is to be known of a query.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Program {
    /// Operators with state, and sources.
    pub plan: Plan,
    /// How far the watermark of each source stays behind its greatest event time, microseconds; none for a source without event time.
    pub lateness_us: Vec<Option<i64>>,
    /// How long each source may have no rows before the watermark goes on without it, milliseconds; none behind the end.
    #[serde(default)]
    pub idle_after_ms: Vec<Option<i64>>,
    /// Whether state is durable.
    pub durable: bool,
    /// Names the functions that members run: other ones have another number.
    pub functions: u64,
    /// Names and types of the columns that are fed.
    #[serde(default)]
    pub columns: String,
    /// Names and types of the columns that come out, those of late rows and side outputs included.
    #[serde(default)]
    pub output: String,
}

impl Program {
    /// The watermark where the sources have reached these, and last had rows at those times: the least. It waits for every source with event
    /// time, but for those that have been silent for too long; while all are silent there is none.
    #[must_use]
    pub fn watermark(&self, reached: &[Option<i64>], heard_ms: &[Option<i64>], clock_ms: i64) -> Option<i64> {
        let silent = |source: usize| {
            let at = |of: &[Option<i64>]| of.get(source).copied().flatten();
            let since = at(heard_ms).map(|heard| clock_ms.saturating_sub(heard));
            at(&self.idle_after_ms).zip(since).is_some_and(|(limit, since)| since >= limit)
        };
        let timed =
            self.lateness_us.iter().enumerate().filter(|(source, lateness)| lateness.is_some() && !silent(*source));
        timed.map(|(source, _)| reached.get(source).copied().flatten()).min().flatten()
    }

    /// Whether the watermark depends on when sources had rows.
    #[must_use]
    pub fn may_be_idle(&self) -> bool {
        self.idle_after_ms.iter().any(Option::is_some)
    }
}

/// How a query stands, for people.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Facts {
    /// In words: what the query does or is.
    pub status: &'static str,
    /// Whether its ranges can move now.
    pub running: bool,
    /// Whether its final epoch has run.
    pub finished: bool,
    /// Whether its state is gone.
    pub lost: bool,
    /// The functions that its members begin with, by the number of their program: the last that was asked for and does not contradict the state.
    pub functions: u64,
    /// The last epoch that was completed.
    pub epoch: Option<u64>,
    /// Rows that came too late, over all epochs.
    pub late_rows: u64,
    /// Workers of the present generation.
    pub workers: u32,
    /// Those of them that are to go, and get nothing any more.
    pub leaving: Vec<u32>,
}

/// How a rescale stands, for people.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RescaleFacts {
    /// The user's handle.
    pub handle: Handle,
    /// Members that there are to be.
    pub workers: u32,
    /// Whether the user has thought better of it.
    pub cancelled: bool,
    /// Members that are there and stay.
    pub serving: u32,
    /// Slots that are to be given up.
    pub leaving: u32,
    /// Ranges that have moved, over all queries.
    pub moved: u32,
    /// Ranges that move now, or will for equal shares.
    pub to_move: u32,
    /// What is waited for; empty when it has ended.
    pub waits: Vec<Wait>,
}

/// What a rescale waits for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub enum Wait {
    /// Members that have not come: no task slot is theirs yet.
    Slots {
        /// How many.
        missing: u32,
    },
    /// The end of a batch.
    Epoch {
        /// Of which query.
        query: QueryId,
        /// Which one.
        epoch: u64,
    },
    /// Workers that begin on another set of members.
    Generation {
        /// Of which query.
        query: QueryId,
    },
    /// Ranges that move.
    Moves {
        /// Of which query.
        query: QueryId,
    },
    /// Spark's commit of the last batch, or its call with the next.
    Commit {
        /// Of which query.
        query: QueryId,
        /// The last batch.
        epoch: u64,
    },
    /// Spark's next call: the query goes back to where the last batch began.
    Batch {
        /// Of which query.
        query: QueryId,
    },
    /// A query whose last batch failed, or was not committed: it has to be started again, or dropped.
    Restart {
        /// Of which query.
        query: QueryId,
    },
    /// A query whose end broke off, and may be durable: it has to be asked for again, or the query dropped.
    Finish {
        /// Of which query.
        query: QueryId,
    },
}

/// What an engine asks for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub enum Effect {
    /// Keep a resident running in this slot from now on.
    StartResident {
        /// The slot.
        slot: u32,
    },
    /// End the resident of this slot, and run none.
    RetireResident {
        /// The slot.
        slot: u32,
    },
    /// Send a member away that is not needed.
    Dismiss {
        /// The member.
        member: MemberId,
        /// Why.
        why: Dismissal,
    },
    /// Ask a member; answered by [`Event::Answer`] or by the member's loss.
    Call {
        /// The question.
        ticket: Ticket,
        /// Whom.
        member: MemberId,
        /// About which query.
        query: QueryId,
        /// What.
        request: Request,
    },
    /// Run the feed stage of a batch; answered by receipts and [`Event::Fed`].
    Feed {
        /// The question.
        ticket: Ticket,
        /// Whose.
        query: QueryId,
        /// Which epoch.
        epoch: u64,
        /// Who takes rows.
        members: Vec<MemberId>,
    },
    /// Call the sink; answered by [`Event::Sunk`].
    Sink {
        /// The question.
        ticket: Ticket,
        /// Whose.
        query: QueryId,
        /// Which epoch.
        epoch: u64,
        /// What it reads.
        pieces: Vec<Piece>,
    },
    /// Read what the checkpoint holds, and ask the registry of the newest claim whether it lives.
    ReadCheckpoint {
        /// The question.
        ticket: Ticket,
        /// Whose.
        query: QueryId,
        /// Of batches before, manifests and notes are wanted by name only. Where there is no manifest of this batch or a later one, the newest is
        /// wanted all the same: it says whose the checkpoint is.
        since: u64,
        /// Manifests that are wanted by name only, too: what they say is known, and never changes.
        known: Vec<String>,
    },
    /// Create a claim where there is none of its number.
    CreateClaim {
        /// The question.
        ticket: Ticket,
        /// Whose.
        query: QueryId,
        /// Registry's address is filled in by the executor.
        claim: Claim,
    },
    /// Read which claim is the newest.
    ReadClaims {
        /// The question.
        ticket: Ticket,
        /// Whose.
        query: QueryId,
        /// The number of ours: of one that has another nobody needs to know more.
        claim: u64,
    },
    /// Write a manifest under its name.
    WriteManifest {
        /// The question.
        ticket: Ticket,
        /// Whose.
        query: QueryId,
        /// What.
        manifest: Box<Manifest>,
    },
    /// Write what a sink is called with now; no answer.
    WriteShown {
        /// Whose.
        query: QueryId,
        /// What.
        shown: Shown,
    },
    /// Delete files of the checkpoint, in this order.
    Delete {
        /// The question.
        ticket: Ticket,
        /// Whose.
        query: QueryId,
        /// Which.
        names: Vec<String>,
    },
    /// Tell when Spark's commit log has this batch, while Spark runs the query; answered by [`Event::Committed`] or [`Event::Rests`], or by
    /// the next call.
    WatchCommit {
        /// Whose.
        query: QueryId,
        /// Which.
        epoch: u64,
    },
    /// Ring after so many milliseconds.
    Timer {
        /// The question.
        ticket: Ticket,
        /// Milliseconds.
        after_ms: u64,
    },
    /// Let Spark's call for a batch, or the user's for the end, return.
    Complete {
        /// Whose.
        query: QueryId,
        /// Which epoch.
        epoch: u64,
    },
    /// Let it raise.
    Fail {
        /// Whose.
        query: QueryId,
        /// Which epoch.
        epoch: u64,
        /// What.
        error: EngineError,
    },
    /// A user's migration has its turn.
    Moving {
        /// The user's handle.
        handle: Handle,
        /// Ranges that are to move.
        ranges: u32,
    },
    /// A user's migration has ended.
    Moved {
        /// The user's handle.
        handle: Handle,
        /// Steps that were done.
        outcome: Result<u32, EngineError>,
    },
    /// A user's rescale has ended.
    Rescaled {
        /// The user's handle.
        handle: Handle,
        /// Workers now.
        outcome: Result<u32, EngineError>,
        /// Ranges that have moved for it, over all queries.
        moved: u32,
    },
    /// A query is forgotten, here and at the members.
    Dropped {
        /// Which.
        query: QueryId,
        /// Why not, if so.
        outcome: Result<(), EngineError>,
    },
}
