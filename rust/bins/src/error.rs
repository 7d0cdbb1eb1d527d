//! What can go wrong: rejected control (state unchanged, the dataflow goes on) and fatal protocol faults.
//!
//! [`ControlError`] and [`ScheduleError`] are rejects. [`BinsError`] is misuse at build time, or, inside an operator,
//! fatal: the worker stops with it and its peers learn of it. [`StateError`] is what a state says that cannot be encoded, takes a
//! bad chunk, or cannot go back.

use std::sync::Arc;

use penstock_files::Range;

use crate::parts::BinName;

/// A boxed error, as operators return it.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Why a batch of control commands is refused. The configuration stays as it was.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ControlError {
    /// A full map with another number of bins than the operator has.
    #[error("map has {length} owners, operator has {bins} bins")]
    MapLength {
        /// Owners in the refused map.
        length: usize,
        /// Bins of the operator.
        bins: u32,
    },
    /// A bin number beyond the last bin, or a part that there is not.
    #[error("{}", absent(*bin, *bins))]
    BinOutOfRange {
        /// The refused bin.
        bin: BinName,
        /// Bins of the operator.
        bins: u32,
    },
    /// A worker that is no member.
    #[error("worker {worker} is absent")]
    AbsentWorker {
        /// The refused worker.
        worker: u32,
    },
    /// A batch out of sequence, or one whose commands disagree about their sequence.
    #[error("control sequence {found}, expected {expected}")]
    Sequence {
        /// The sequence found.
        found: u64,
        /// The sequence of the next acceptable batch.
        expected: u64,
    },
    /// A batch with more or fewer commands at its time than it announces.
    #[error("control batch announces {announced} commands, {present} present")]
    Count {
        /// What a command of the batch announces.
        announced: u32,
        /// Commands present at the time.
        present: usize,
    },
    /// Two moves of one bin at one time.
    #[error("{bin} moves twice at one time")]
    MovedTwice {
        /// The bin.
        bin: BinName,
    },
    /// A bin that is split, named as if it were whole.
    #[error("{bin} is split: name its parts, or merge them first")]
    Split {
        /// The bin.
        bin: BinName,
    },
    /// A merge of a bin that is not split.
    #[error("{bin} is whole: there is nothing to merge")]
    Whole {
        /// The bin.
        bin: BinName,
    },
    /// A merge of parts that are on different workers.
    #[error("the parts of {bin} are on workers {one} and {other}: move them together first")]
    Apart {
        /// The bin that they are of.
        bin: BinName,
        /// A worker that has some.
        one: u32,
        /// Another one.
        other: u32,
    },
    /// A split into parts of no or too many bits.
    #[error("{bin} cannot be split by {bits} bits: its parts have 1 bit more at least, and 20 in all at most")]
    TooFine {
        /// The bin.
        bin: BinName,
        /// Bits by which it was to be split.
        bits: u8,
    },
    /// A split of a state that cannot be divided.
    #[error("{bin} cannot be split: the operator's state does not know the hashes of its keys")]
    Indivisible {
        /// The bin.
        bin: BinName,
    },
    /// A full map beside another map or a move at one time.
    #[error("a full map shares its time with {others} other commands")]
    MapNotAlone {
        /// Commands beside the map, no-ops aside.
        others: usize,
    },
}

fn absent(bin: BinName, bins: u32) -> String {
    match bin.is_part() {
        true => format!("{bin} is no part any more: what it was part of is whole"),
        false => format!("{bin} of {bins} bins"),
    }
}

/// Why [`ControlInput`](crate::ControlInput) refuses to schedule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ScheduleError<T> {
    /// The time is already over at the control input.
    #[error("control for {asked:?}, but control time is already {held:?}")]
    Late {
        /// Where the control input stands; `None` when it is closed.
        held: Option<T>,
        /// The refused time.
        asked: T,
    },
    /// The commands themselves are refused.
    #[error(transparent)]
    Control(#[from] ControlError),
}

/// What a state could not do.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct StateError {
    message: String,
    #[source]
    source: Option<Arc<dyn std::error::Error + Send + Sync>>,
}

impl StateError {
    /// The reason in words.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), source: None }
    }

    /// Another error is the reason.
    pub fn from_source(source: impl std::error::Error + Send + Sync + 'static) -> Self {
        Self { message: source.to_string(), source: Some(Arc::new(source)) }
    }
}

/// Misuse at build time, and fatal faults of the migration protocol.
#[derive(Clone, Debug, thiserror::Error)]
pub enum BinsError {
    /// More bits than [`MAX_BITS`](crate::MAX_BITS).
    #[error("{bits} bin bits, at most 20")]
    Bits {
        /// The refused number.
        bits: u8,
    },
    /// A state that could not be divided.
    #[error("bin {bin} cannot be split: {source}")]
    Divide {
        /// The bin.
        bin: u32,
        /// Why.
        source: StateError,
    },
    /// No worker to own a bin.
    #[error("a routing needs at least one worker")]
    NoPeers,
    /// A number of owners that is no power of two up to 2^20.
    #[error("{length} owners are not 2^k, k in 0..=20")]
    Owners {
        /// The refused number.
        length: usize,
    },
    /// Ranges that do not have every hash once, each a bin or part of one.
    #[error("range {range} is no bin or part of one, or its hashes have several owners or none")]
    Ranges {
        /// The one that does not fit; all hashes where some have no owner.
        range: Range,
    },
    /// Two parts of one operator disagree about the number of bins.
    #[error("{found} bin bits where {expected} were configured")]
    BitsDiffer {
        /// Bits of the routing in force.
        expected: u8,
        /// Bits found.
        found: u8,
    },
    /// What a peer tells a joiner does not come of commands.
    #[error("configuration {at} of the {count} that a peer tells does not follow from the one before")]
    Lesson {
        /// Which of those that are pending; after the last where the number of batches does not fit.
        at: usize,
        /// How many there are.
        count: usize,
    },
    /// An initial routing names a worker that is no member.
    #[error("bin {bin} is owned by worker {worker}, who is absent")]
    AbsentOwner {
        /// The bin.
        bin: u32,
        /// Its owner.
        worker: u32,
    },
    /// A table lacks a bin that its worker owns: it was neither created nor restored.
    #[error("bin {bin} belongs to worker {worker} but is not in its table")]
    Unrestored {
        /// The bin.
        bin: u32,
        /// Its owner.
        worker: u32,
    },
    /// A table holds a bin that another worker owns.
    #[error("worker {worker} holds bin {bin}, which worker {owner} owns")]
    Foreign {
        /// The bin.
        bin: u32,
        /// The holder.
        worker: u32,
        /// The owner.
        owner: u32,
    },
    /// A bin arrives where there is one already.
    #[error("bin {bin} is already here")]
    Occupied {
        /// The bin.
        bin: u32,
    },
    /// A bin that should be here is not.
    #[error("bin {bin} is not here")]
    Absent {
        /// The bin.
        bin: u32,
    },
    /// State or pending records for a bin that was not prepared at that time.
    #[error("state for bin {bin} without a prepare")]
    Unprepared {
        /// The bin.
        bin: u32,
    },
    /// A bin moves between two workers of which only one has marked the epoch: the migration is of the epoch's first instant.
    #[error("bin {bin} comes with the mark of epoch {there:?} into a table marked with {here:?}")]
    EpochDiffers {
        /// The bin.
        bin: u32,
        /// The mark of the receiving table.
        here: Option<u64>,
        /// The mark of the sending table.
        there: Option<u64>,
    },
    /// A ticket that the shelf does not know.
    #[error("bin {bin} of {name} is not on the shelf under ticket {ticket}")]
    NotShelved {
        /// The operator.
        name: String,
        /// The bin.
        bin: u32,
        /// The ticket presented.
        ticket: u64,
    },
    /// A bin's state refused a chunk.
    #[error("bin {bin} refused a chunk: {source}")]
    Chunk {
        /// The bin.
        bin: u32,
        /// What the state said.
        source: StateError,
    },
    /// A bin's state could not be encoded; it stays where it is.
    #[error("bin {bin} cannot move: {source}")]
    Encode {
        /// The bin.
        bin: u32,
        /// What the state said.
        source: StateError,
    },
    /// A bin's state could not return to the mark.
    #[error("bin {bin} cannot go back to the beginning of its epoch: {source}")]
    Rollback {
        /// The bin.
        bin: u32,
        /// What the state said.
        source: StateError,
    },
    /// A bin of which fewer or more chunks came than its sender made, or not the end.
    #[error(
        "bin {bin} has come in part: {arrived} chunks of {}",
        announced.map_or_else(|| "an unknown number".to_owned(), |chunks| chunks.to_string())
    )]
    Incomplete {
        /// The bin.
        bin: u32,
        /// Chunks that came.
        arrived: u64,
        /// Chunks that its sender announced, if it did.
        announced: Option<u64>,
    },
    /// A bin of which fewer or more post-dated records came than its sender had.
    #[error("bin {bin} has come in part: {arrived} post-dated records of {announced}")]
    RecordsDiffer {
        /// The bin.
        bin: u32,
        /// Records that came.
        arrived: u64,
        /// Records that its sender announced.
        announced: u64,
    },
    /// A worker says that it took more state than was sent to it.
    #[error("worker {worker} took {taken} bytes of state, {sent} were under way")]
    Overdrawn {
        /// The worker.
        worker: usize,
        /// What it says.
        taken: u64,
        /// What was under way.
        sent: u64,
    },
    /// A post-dated record earlier than the time it was made at.
    #[error("post-dated to {asked}, but it is already {now}")]
    Postdated {
        /// The current time.
        now: String,
        /// The refused time.
        asked: String,
    },
    /// On rebuilding: a bin lies in this process but none of its workers owns it.
    #[error("bin {bin} rests here, but its owner {owner} is elsewhere")]
    Stranded {
        /// The bin.
        bin: u32,
        /// Its owner.
        owner: u32,
    },
    /// On rebuilding: two states both claim to be the bin's at the mark.
    #[error("bin {bin} has two states from before the mark")]
    TwoOriginals {
        /// The bin.
        bin: u32,
    },
    /// On rebuilding: a bin was marked with a later epoch, so the one asked for is over.
    #[error("bin {bin} is marked with epoch {marked}, and cannot go back to {epoch}")]
    MarkedLater {
        /// The bin.
        bin: u32,
        /// The epoch of its mark.
        marked: u64,
        /// The epoch asked for.
        epoch: u64,
    },
    /// Steps of size zero.
    #[error("a batched migration needs steps of at least one bin")]
    StepSize,
}
