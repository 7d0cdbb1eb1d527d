//! Why a call of a user or of Spark fails, and why a member could not do what it was asked. Data; prose is made by `Display`.

use serde::{Deserialize, Serialize};

use crate::manifest::FormatError;
use crate::protocol::MemberId;

/// Why storage did not do what was asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum StoreError {
    /// It may work later: no connection, slow, throttled.
    #[error("{0}")]
    Unavailable(String),
    /// A file is there and is not what was written.
    #[error("{name} {reason}")]
    Damaged {
        /// The file.
        name: String,
        /// What is wrong with it.
        reason: String,
    },
}

/// What kind of failure a member tells of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// A function of the user raised: trying again gives the same.
    User,
    /// The data is refused: trying again gives the same.
    Data,
    /// Another member's failure, or the end of the generation, seen from here.
    Echo,
    /// The request was of a generation that has ended.
    Stale,
    /// The state that was here is gone.
    State,
    /// Storage, for a while.
    Store,
    /// Storage, for good: a damaged file.
    Damaged,
    /// Ours.
    Internal,
}

/// A request that a member could not serve.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// What to do about it.
    pub kind: Kind,
    /// For people.
    pub message: String,
}

impl Failure {
    /// A failure of a kind.
    pub fn new(kind: Kind, message: impl Into<String>) -> Failure {
        Failure { kind, message: message.into() }
    }
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Failure {
        let kind = if matches!(error, StoreError::Damaged { .. }) { Kind::Damaged } else { Kind::Store };
        Failure::new(kind, error.to_string())
    }
}

/// Why a batch, a finish, a migration or a rescale failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, thiserror::Error)]
pub enum EngineError {
    /// The Spark query was stopped; the batch will be asked for again.
    #[error("the query was stopped during epoch {epoch}")]
    Abandoned {
        /// The epoch.
        epoch: u64,
    },
    /// One call at a time.
    #[error("epoch {running} of the query is still under way: {asked} has to wait")]
    Busy {
        /// Under way.
        running: u64,
        /// Asked for.
        asked: u64,
    },
    /// A batch that the state does not belong to.
    #[error("batch {asked} is asked for, but the state is at batch {at}: only {} can follow", at + 1)]
    OutOfOrder {
        /// Asked for.
        asked: u64,
        /// The last one completed.
        at: u64,
    },
    /// Results that a batch had cannot be served with other columns, and it cannot be computed again.
    #[error(
        "batch {epoch} was computed, its sink has returned, and the flow gives other columns now: run this batch once more \
         with the flow from before, or start a new query from batch 0 (a new checkpoint)"
    )]
    OtherOutput {
        /// The batch.
        epoch: u64,
    },
    /// The final epoch was given up when its end may have been durable.
    #[error(
        "the end of the query's input behind batch {after} was asked for and may be in its checkpoint, so batch {asked} comes too late: \
         call finish() again, which gives what was left"
    )]
    Finishing {
        /// The last batch.
        after: u64,
        /// Asked for.
        asked: u64,
    },
    /// The final epoch has run.
    #[error(
        "the query is finished after batch {after}: batch {asked} comes too late, finish() has ended its input for good; put back a copy \
         of the checkpoint from before it or delete its file manifest-...-finished-..., or start a new query from batch 0 (a new checkpoint)"
    )]
    Finished {
        /// The last batch.
        after: u64,
        /// Asked for.
        asked: u64,
    },
    /// To finish, the last batch must be committed.
    #[error(
        "batch {epoch} was computed but Spark has not committed it: start the query again, so that Spark replays it, then finish"
    )]
    Uncommitted {
        /// The batch.
        epoch: u64,
    },
    /// State is gone and nothing durable has it.
    #[error(
        "the state at the beginning of batch {epoch} is lost: {reason}; start a new query from batch 0 (a new checkpoint), and one that has \
         a checkpointLocation, which outlives its workers unless checkpoint=None"
    )]
    StateLost {
        /// The batch that needs it.
        epoch: u64,
        /// Where it was.
        reason: String,
        /// With which member it went, where that is known.
        member: Option<MemberId>,
    },
    /// The checkpoint has no manifest of the batch before.
    #[error(
        "batch {asked} is asked for, but the checkpoint has no state of batch {before}{others}: put back the manifest of \
         batch {before}, or start a new query from batch 0 (a new checkpoint)",
        before = asked.saturating_sub(1), others = others(*asked, *newest)
    )]
    NoManifest {
        /// Asked for.
        asked: u64,
        /// What there is.
        newest: Option<u64>,
    },
    /// A file of the checkpoint is damaged.
    #[error("{name} {reason}{}", remedy(reason))]
    Damaged {
        /// The file.
        name: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The checkpoint belongs to another query.
    #[error(
        "the checkpoint holds the state of query {found}, not of {query}: give each query a checkpoint= of its own, or \
         delete this folder if that query is gone for good"
    )]
    OtherQuery {
        /// Ours.
        query: String,
        /// Its.
        found: String,
    },
    /// The flow has changed in a way that state cannot follow.
    #[error(
        "the state is of {before}, the flow has {after}: it cannot be taken over. {} the step or source back as it was (a new step \
         beside it has a name= of its own), or start a new query from batch 0 (a new checkpoint)",
        put(renamed.as_deref())
    )]
    OtherPlan {
        /// Of the state.
        before: String,
        /// In the flow.
        after: String,
        /// The step's name where only its columns have other names.
        renamed: Option<String>,
    },
    /// Another engine serves the checkpoint.
    #[error(
        "the engine of claim {claim} serves this checkpoint, or the one that it was copied from: end it first, or take over with \
         pk.Engine(..., takeover=True)"
    )]
    Held {
        /// Its claim.
        claim: u64,
    },
    /// Another engine has taken the checkpoint over, or the claim has gone.
    #[error("{}", fenced(*claim, *by))]
    Fenced {
        /// Ours.
        claim: u64,
        /// The newest one in the checkpoint; 0 where there is none.
        by: u64,
    },
    /// Storage does not work.
    #[error("{what} failed {tries} times: {reason}; nothing is lost: mend the store, then start the query again")]
    Store {
        /// What was tried.
        what: &'static str,
        /// How often.
        tries: u32,
        /// The last reason.
        reason: String,
    },
    /// The source gave other rows for the same batch.
    #[error(
        "the source is not replayable: batch {epoch} had {before} rows when its sink was called, and now it has {now}, or others; the \
         sink may have written the first. Give the same rows again: from a source with offsets (files, Kafka, a table's log), without \
         random or current values in front of foreachBatch{}", forget(note.as_deref())
    )]
    NotReplayable {
        /// The batch.
        epoch: u64,
        /// Rows at first.
        before: u64,
        /// Rows now.
        now: u64,
        /// The file that tells of the first, where another engine called the sink.
        note: Option<String>,
    },
    /// Feeding failed for no reason of ours.
    #[error("feeding epoch {epoch} failed: {reason}")]
    Feed {
        /// The epoch.
        epoch: u64,
        /// Spark's reason.
        reason: String,
    },
    /// The sink raised, or has returned for an epoch whose state could not be written.
    #[error("{}", sunk(*epoch, reason, *returned))]
    Sink {
        /// The epoch.
        epoch: u64,
        /// What it raised, or why the state could not be written.
        reason: String,
        /// Whether it has returned.
        returned: bool,
    },
    /// A function of the user raised, or the data was refused.
    #[error("{0}")]
    Member(Failure),
    /// Members did not come.
    #[error(
        "{missing} of {wanted} workers are missing: free task slots, or raise start_timeout; then start the query again"
    )]
    NoMembers {
        /// How many.
        missing: u32,
        /// Of how many.
        wanted: u32,
    },
    /// Attempt after attempt broke off.
    #[error(
        "epoch {epoch} broke off {tries} times, at last: {reason}; \"member lost\" in the log says what becomes of the workers (memory limits, \
         preemption): mend that, then start the query again"
    )]
    Broken {
        /// The epoch.
        epoch: u64,
        /// How often.
        tries: u32,
        /// The last reason.
        reason: String,
    },
    /// More workers than there are slots.
    #[error("rescale({workers}): {held} task slots are held and {free} more are free")]
    NoSlots {
        /// Asked for.
        workers: u32,
        /// Slots that the engine has.
        held: u32,
        /// And could have besides.
        free: u32,
    },
    /// Members that were asked for and did not come.
    #[error("rescale({wanted}): {missing} of {wanted} workers have not come in {} s", .waited_ms / 1_000)]
    SlotsLate {
        /// So many have none.
        missing: u32,
        /// Asked for.
        wanted: u32,
        /// How long was waited.
        waited_ms: u64,
    },
    /// One rescale at a time.
    #[error("rescale({workers}): the engine goes to {to} workers just now")]
    Rescaling {
        /// Asked for.
        workers: u32,
        /// Under way.
        to: u32,
    },
    /// Moves or workers that do not exist.
    #[error("{0}")]
    Refused(String),
    /// Ranges move while workers run.
    #[error("the query {0}: its bins cannot move now")]
    NotRunning(&'static str),
    /// The generation ended before the migration did.
    #[error("the migration was cut off: {0}")]
    CutOff(String),
    /// The engine is closed.
    #[error("the engine is closed")]
    Closed,
}

/// What else a checkpoint has.
fn others(asked: u64, newest: Option<u64>) -> String {
    match newest {
        Some(newest) if newest >= asked => format!(
            "; the newest that it has is of batch {newest} (if another engine has gone on to that since Spark asked, start the query again)"
        ),
        Some(newest) => format!("; the newest that it has is of batch {newest}"),
        None => ", nor of any other batch".to_owned(),
    }
}

/// What became of a sink, or of what it has taken.
fn sunk(epoch: u64, reason: &str, returned: bool) -> String {
    match returned {
        true => format!(
            "the sink has returned for epoch {epoch}, but the state of that epoch is not durable: {reason}; start the query again, or call finish() again \
             where that failed: the sink is called with it once more"
        ),
        false => format!("the sink failed for epoch {epoch}: {reason}"),
    }
}

/// What to do where rows differ on purpose.
fn forget(note: Option<&str>) -> String {
    note.map_or(String::new(), |name| {
        format!(
            ". If you have changed what stands there, and the sink replaces what it has written of the batch: delete {name} in the \
             checkpoint and start the query again"
        )
    })
}

/// What to do about a file, unless the reason says so.
fn remedy(reason: &str) -> &'static str {
    match reason.contains("use the release") {
        true => "",
        false => ": put back the file, or start from a copy of the checkpoint",
    }
}

fn put(renamed: Option<&str>) -> String {
    renamed.map_or_else(
        || "Put".to_owned(),
        |name| {
            format!(
                "If these are the same columns under other names, say name={name:?} in that step, and in others of its kind without a name \
                 the names that they have now. Else put"
            )
        },
    )
}

fn fenced(claim: u64, by: u64) -> String {
    match by >= claim {
        true if by == claim => format!(
            "another engine has made claim {claim} on the checkpoint, too, and after this one: the checkpoint was put back from a \
             copy since, or its store cannot tell two that begin at one moment apart; the query goes on there, and to come back, close \
             that engine and start the query again"
        ),
        true => format!(
            "claim {by} has taken the checkpoint over from claim {claim}: another engine serves the query, which goes on \
             there; to come back, close that engine and start the query again"
        ),
        false => format!(
            "claim {claim} of this engine is gone from the checkpoint, where the newest is {by}: somebody has deleted files \
             while the query ran; put them back and start the query again, or start a new query (a new checkpoint)"
        ),
    }
}

impl From<(String, FormatError)> for EngineError {
    fn from((name, error): (String, FormatError)) -> EngineError {
        EngineError::Damaged { name, reason: error.to_string() }
    }
}
