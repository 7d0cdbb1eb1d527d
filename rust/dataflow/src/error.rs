//! The errors of this crate: why a worker stopped, and how misuse is refused.
//!
//! [`Error`] is cloned to every worker of a fabric when one of them fails, so that each `step()` names the same operator, worker
//! and cause. It carries data; prose is made by `Display` only.

use std::error::Error as StdError;
use std::sync::Arc;

use penstock_members::list::MAX_MEMBERS;
use serde::{Deserialize, Serialize};

/// What operator logic and programs may fail with.
pub type BoxError = Box<dyn StdError + Send + Sync>;

/// Why a worker stopped. Fatal for the fabric: every worker of it reports the same error.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The logic of an operator returned an error.
    #[error("operator {name:?} on worker {worker} failed: {source}")]
    Operator {
        /// Name of the operator, with its scopes.
        name: String,
        /// Worker on which it ran.
        worker: usize,
        /// What the logic returned.
        source: Arc<dyn StdError + Send + Sync>,
    },
    /// The logic of an operator, or a program, panicked.
    #[error("{name:?} on worker {worker} panicked: {message}")]
    Panic {
        /// Name of the operator, with its scopes, or `program`.
        name: String,
        /// Worker on which it ran.
        worker: usize,
        /// The panic's message.
        message: String,
    },
    /// The program of a worker returned an error.
    #[error("program of worker {worker} failed: {source}")]
    Program {
        /// Worker on which it ran.
        worker: usize,
        /// What the program returned.
        source: Arc<dyn StdError + Send + Sync>,
    },
    /// A worker stopped the fabric.
    #[error("aborted by worker {worker}: {reason}")]
    Aborted {
        /// Worker that stopped it.
        worker: usize,
        /// Why.
        reason: String,
    },
    /// The connection to a process ended without its goodbye, or it is connected but hung.
    #[error("lost process {process}: {reason}")]
    PeerLost {
        /// The process that is gone.
        process: usize,
        /// What was seen.
        reason: String,
    },
    /// A process sent bytes that are not a frame of this fabric.
    #[error("process {process} broke the protocol: {fault}")]
    Protocol {
        /// The process that sent them.
        process: usize,
        /// What was wrong.
        fault: ProtocolFault,
    },
    /// Two workers built different graphs.
    #[error("worker {worker} built another graph than worker {peer}: {detail}")]
    GraphMismatch {
        /// Worker that found out.
        worker: usize,
        /// Worker that it disagrees with.
        peer: usize,
        /// Dataflow or channel, and the two sides.
        detail: String,
    },
    /// A progress message is missing (C-05).
    #[error("progress of {dataflow:?} from worker {worker}: expected message {expected}, got {got}")]
    SequenceGap {
        /// Name of the dataflow.
        dataflow: String,
        /// Sender.
        worker: usize,
        /// Number that was next.
        expected: u64,
        /// Number that came.
        got: u64,
    },
    /// A graph that cannot run: refused before its first step.
    #[error("dataflow {dataflow:?} on worker {worker} cannot run: {reason}")]
    Graph {
        /// Name of the dataflow, with scopes.
        dataflow: String,
        /// Worker that built it.
        worker: usize,
        /// What is wrong.
        reason: String,
    },
    /// An exchange named a worker that does not exist.
    #[error("exchange into {name:?} routed a block to worker {target} of {peers}")]
    Route {
        /// Operator that the channel leads to.
        name: String,
        /// Worker asked for.
        target: usize,
        /// Workers there are.
        peers: usize,
    },
    /// A session was opened with a capability of another output.
    #[error("operator {name:?} on worker {worker} sent at {time} with a capability that is not for that output")]
    WrongCapability {
        /// Operator.
        name: String,
        /// Worker on which it ran.
        worker: usize,
        /// Time of the capability.
        time: String,
    },
    /// A block is larger than a frame may be.
    #[error("a message of {bytes} bytes exceeds the limit of {limit} bytes; split the block")]
    TooLarge {
        /// Encoded size.
        bytes: usize,
        /// Greatest size allowed.
        limit: usize,
    },
    /// A worker of a joinable fabric cannot do that, or not now.
    #[error("worker {worker}: {fault}")]
    Member {
        /// Which.
        worker: usize,
        /// What is wrong.
        fault: MemberFault,
    },
    /// A stream, file or thread that the fabric needs could not be set up.
    #[error("cannot set up the fabric: {reason}")]
    Setup {
        /// What failed.
        reason: String,
    },
}

/// What a member of a joinable fabric cannot do, or why its run ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MemberFault {
    /// It was to step or send before it had its place.
    #[error(
        "call bootstrap() once all dataflows are built, and before anything is sent or stepped: others may join here"
    )]
    NotBootstrapped,
    /// A dataflow that a joiner could not have.
    #[error("dataflow {0:?} was built after bootstrap(): build all dataflows of a joinable run before")]
    BuiltLate(String),
    /// The others do not wait for this joiner any more.
    #[error("its join was withdrawn: it took too long, or was given up")]
    Withdrawn,
    /// All is done.
    #[error("it joins when all dataflows are finished")]
    Over,
    /// Nobody would be left.
    #[error("it is the only one and cannot leave; end its inputs instead, or let another one join first")]
    Alone,
    /// It has left, or does not take part yet.
    #[error("it does not take part now, so it cannot leave")]
    NotSeated,
    /// Members are fixed.
    #[error("the workers of this fabric are fixed; make it with fabric::joinable")]
    Fixed,
    /// A member is gone without having left.
    #[error("worker {0} was lost, which took part in the run")]
    Lost(usize),
    /// A list of members is missing.
    #[error("worker {peer} uses member list {got}, and {here} is used here")]
    Skipped {
        /// Who sent it.
        peer: usize,
        /// Version here.
        here: u64,
        /// Version there.
        got: u64,
    },
}

/// What was wrong with received bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProtocolFault {
    /// The frame does not begin with the magic number.
    #[error("bad magic number {0:#010x}")]
    Magic(u32),
    /// Another frame format.
    #[error("frame version {0}")]
    Version(u8),
    /// Unknown kind of frame.
    #[error("frame kind {0}")]
    Kind(u8),
    /// The frame belongs to another query.
    #[error("frame of query {0}")]
    Query(u64),
    /// The frame belongs to another generation.
    #[error("frame of generation {0}")]
    Generation(u64),
    /// The sender is not a worker of that process.
    #[error("sender {0} is not a worker of that process")]
    Sender(usize),
    /// The receiver is not a worker of this process.
    #[error("receiver {0} is not a worker of this process")]
    Receiver(usize),
    /// The length exceeds the limit.
    #[error("length {0} exceeds the limit")]
    Length(u64),
    /// Header or body do not match their checksum.
    #[error("checksum mismatch")]
    Checksum,
    /// The body of a frame cannot be decoded.
    #[error("undecodable body on channel {0}")]
    Body(u64),
    /// It asks for, or names, workers that no run can have.
    #[error("{0} workers, and a run has 1 to {MAX_MEMBERS}")]
    Workers(u64),
}

/// An input cannot go back: state unchanged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("input holds {held:?} and cannot move to {asked:?}")]
pub struct InputError<T: std::fmt::Debug> {
    /// Time that the input holds.
    pub held: T,
    /// Time asked for.
    pub asked: T,
}

/// A handle of a dataflow was used after its end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("dataflow {dataflow:?} has ended: it finished, failed or was dropped")]
pub struct Ended {
    /// Name of the dataflow.
    pub dataflow: String,
}

/// A session was refused: state unchanged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("operator {name:?} cannot send at {time:?}: {}", if *.ended { "its dataflow has ended" } else { "the capability is not for that output" })]
pub struct SessionError<T: std::fmt::Debug> {
    /// Time of the capability.
    pub time: T,
    /// Operator that refused.
    pub name: String,
    /// Whether the dataflow has ended; else the capability is not for that output.
    pub ended: bool,
}

/// What was to go round a loop has no next time: the cause of an [`Error::Operator`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("what goes round a loop at time {time} comes out {advance} later, which is beyond the last time there is")]
pub struct LoopEnd {
    /// Time of the block.
    pub time: String,
    /// By how much the loop advances it.
    pub advance: String,
}

/// The cause of an error that came from another process: its text.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct RemoteCause(pub String);

/// What of an [`Error`] crosses a process boundary.
#[derive(Serialize, Deserialize)]
pub(crate) enum Report {
    Operator { name: String, worker: usize, text: String },
    Panic { name: String, worker: usize, text: String },
    Program { worker: usize, text: String },
    Other { worker: usize, text: String },
    Lost { process: usize, text: String },
}

impl Report {
    pub(crate) fn of(error: &Error, reporter: usize) -> Self {
        match error {
            Error::Operator { name, worker, source } => {
                Report::Operator { name: name.clone(), worker: *worker, text: source.to_string() }
            }
            Error::Panic { name, worker, message } => {
                Report::Panic { name: name.clone(), worker: *worker, text: message.clone() }
            }
            Error::Program { worker, source } => Report::Program { worker: *worker, text: source.to_string() },
            Error::PeerLost { process, reason } => Report::Lost { process: *process, text: reason.clone() },
            Error::Aborted { worker, reason } => Report::Other { worker: *worker, text: reason.clone() },
            other => Report::Other { worker: reporter, text: other.to_string() },
        }
    }

    /// With a text of at most so many bytes, and how many there were.
    pub(crate) fn cut(mut self, limit: usize) -> Self {
        let (Report::Operator { text, .. }
        | Report::Panic { text, .. }
        | Report::Program { text, .. }
        | Report::Other { text, .. }
        | Report::Lost { text, .. }) = &mut self;
        let bytes = text.len();
        if bytes > limit {
            text.truncate(text.floor_char_boundary(limit));
            text.push_str(&format!("... ({bytes} bytes)"));
        }
        self
    }

    pub(crate) fn into_error(self) -> Error {
        match self {
            Report::Operator { name, worker, text } => {
                Error::Operator { name, worker, source: Arc::new(RemoteCause(text)) }
            }
            Report::Panic { name, worker, text } => Error::Panic { name, worker, message: text },
            Report::Program { worker, text } => Error::Program { worker, source: Arc::new(RemoteCause(text)) },
            Report::Other { worker, text } => Error::Aborted { worker, reason: text },
            Report::Lost { process, text } => Error::PeerLost { process, reason: text },
        }
    }
}

/// The text of a caught panic.
pub(crate) fn panic_message(payload: &(dyn std::any::Any + Send)) -> String {
    if let Some(text) = payload.downcast_ref::<&str>() {
        (*text).to_string()
    } else if let Some(text) = payload.downcast_ref::<String>() {
        text.clone()
    } else {
        "panic without a message".to_string()
    }
}
