//! What members tell each other. All of it travels in the urgent lane, but for markers, which travel in all.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::de::{Error, Unexpected};
use serde::{Deserialize, Deserializer, Serialize};

use crate::list::{Home, Id, List, MAX_MEMBERS};

/// The lanes of a link: each keeps its order, and none waits for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Lane {
    /// Progress and what members tell each other.
    Urgent,
    /// Data.
    Data,
    /// State that moves.
    Behind,
}

/// All of them.
pub const LANES: [Lane; 3] = [Lane::Urgent, Lane::Data, Lane::Behind];

/// What one worker counted in one dataflow.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Bundle<P> {
    /// Its place among those of its sender in that dataflow.
    pub number: u64,
    /// Bundles of others that must have been taken in before: sender and number.
    pub after: Vec<(Id, u64)>,
    /// The changes.
    pub part: P,
}

/// Capabilities that change hands, by dataflow: with the bundles that count them, as in [`Bundle::after`].
pub type Grant<P> = BTreeMap<u64, (P, Vec<(Id, u64)>)>;

/// Counts with the next number of each sender: what a joiner begins with.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct State<P> {
    /// By sender: how many of its bundles are counted.
    pub next: BTreeMap<Id, u64>,
    /// The counts.
    pub counts: P,
}

/// Bundles of one sender in one dataflow, from `start` to before `end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Range {
    /// Which dataflow.
    pub dataflow: u64,
    /// Whose bundles.
    pub sender: Id,
    /// The first number.
    pub start: u64,
    /// The number after the last.
    pub end: u64,
}

/// Why a range is not served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, thiserror::Error)]
pub enum RangeFault {
    /// Nothing is recorded for who asks, or not in this attempt.
    #[error("nothing is recorded for worker {0}: it did not ask for a snapshot, or its join is over")]
    Unknown(Id),
    /// No such dataflow or sender.
    #[error("there is no worker {sender} in dataflow {dataflow}")]
    Nowhere {
        /// As asked.
        dataflow: u64,
        /// As asked.
        sender: Id,
    },
    /// It ends before it starts, or is empty.
    #[error("the range from {start} to before {end} is empty")]
    Empty {
        /// As asked.
        start: u64,
        /// As asked.
        end: u64,
    },
    /// Some of it is in the snapshot.
    #[error("the record begins with bundle {first}, and {start} was asked for: it is in the snapshot")]
    Dropped {
        /// As asked.
        start: u64,
        /// What the record begins with.
        first: u64,
    },
    /// Some of it goes to the joiner itself.
    #[error("bundles from {last} on go to the joiner itself, and up to {end} were asked for")]
    Beyond {
        /// As asked.
        end: u64,
        /// The first that is not recorded.
        last: u64,
    },
}

/// What a member wants of the lead.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Request {
    /// So many workers want to join. Of those that name one home all count as one.
    Admit {
        /// Where they run; the ticket is of the acceptor's choice.
        home: Home,
        /// At least 1, at most [`MAX_MEMBERS`].
        #[serde(deserialize_with = "joiners")]
        count: usize,
        /// The processes that theirs is connected with: nobody is admitted before it is with those of all members.
        linked: BTreeSet<usize>,
    },
    /// This joiner has all progress; that server is to grant it capabilities.
    Seat {
        /// Who.
        joiner: Id,
        /// Whose capabilities.
        granter: Id,
    },
    /// This joiner is lost or late.
    Withdraw(Id),
    /// This member wants to leave.
    Leave(Id),
    /// This leaver has nothing any more.
    Close {
        /// Who.
        leaver: Id,
        /// By dataflow: how many bundles it sent.
        finals: BTreeMap<u64, u64>,
    },
}

/// How many may be asked for.
fn joiners<'de, D: Deserializer<'de>>(deserializer: D) -> Result<usize, D::Error> {
    let count = usize::deserialize(deserializer)?;
    match (1..=MAX_MEMBERS).contains(&count) {
        true => Ok(count),
        false => Err(D::Error::invalid_value(Unexpected::Unsigned(count as u64), &"as many workers as a run may have")),
    }
}

/// What travels.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Message<P> {
    /// The sender has adopted this list: what follows in the urgent lane is sent under it.
    Marker {
        /// The list.
        list: Arc<List>,
        /// By dataflow: the number of the sender's next bundle.
        next: BTreeMap<u64, u64>,
        /// For a joiner that becomes a full member.
        grant: Option<Grant<P>>,
    },
    /// Progress of one dataflow.
    Bundle(u64, Bundle<P>),
    /// A joiner asks for a snapshot; answers name the attempt.
    Bootstrap {
        /// 1, 2, ...
        attempt: u64,
    },
    /// The answer, by dataflow.
    Snapshot {
        /// As asked.
        attempt: u64,
        /// By dataflow.
        states: Arc<BTreeMap<u64, State<P>>>,
    },
    /// A joiner asks for bundles that neither the snapshot nor a link has.
    Ask {
        /// Of the snapshot.
        attempt: u64,
        /// Which.
        range: Range,
    },
    /// The answer.
    Answer {
        /// As asked.
        attempt: u64,
        /// As asked.
        range: Range,
        /// The bundles, or why not.
        bundles: Result<Vec<Bundle<P>>, RangeFault>,
    },
    /// The joiner needs its server no more.
    Done {
        /// Of the snapshot.
        attempt: u64,
    },
    /// For the lead.
    Request(Request),
    /// The capabilities of a leaver, for the lead.
    Legacy(Grant<P>),
    /// The marker of the other lanes: what follows is sent under the list of this version, which the one of the urgent lane has.
    Mark(u64),
}
