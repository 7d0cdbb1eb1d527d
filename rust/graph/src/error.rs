//! Why a graph, a pattern or a file is refused.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::pattern::PatternError;

/// Every error of this crate; whatever was refused is as it was before.
#[derive(Debug, Error)]
pub enum GraphError {
    /// The pattern is wrong, or does not fit the relations.
    #[error(transparent)]
    Pattern(#[from] PatternError),
    /// The attribute order given by the caller cannot be used.
    #[error("order {order:?}: {problem}")]
    Order {
        /// As given.
        order: Vec<String>,
        /// What is wrong with it.
        problem: String,
    },
    /// More nodes or edges than the index can number, or more relations than its file can have.
    #[error("{count} {what}: there may be at most {most}")]
    TooMany {
        /// What there is too much of.
        what: &'static str,
        /// How many there are.
        count: u64,
        /// How many there may be.
        most: u64,
    },
    /// An edge from a node to itself, where the caller wants none.
    #[error("relation {relation:?} has a self-loop at {node}; drop it, or let self-loops be kept or dropped")]
    SelfLoop {
        /// The relation.
        relation: String,
        /// The node.
        node: String,
    },
    /// An edge that was given twice, where the caller wants none.
    #[error(
        "relation {relation:?} has the edge {from} -> {to} more than once{counting}; let repeated edges be dropped"
    )]
    Repeated {
        /// The relation.
        relation: String,
        /// Where it starts.
        from: String,
        /// Where it ends.
        to: String,
        /// What counts as one edge, where direction and relation do not matter.
        counting: &'static str,
    },
    /// Sources and targets of different lengths, or names among numbers.
    #[error("relation {relation:?}: {problem}")]
    Edges {
        /// The relation.
        relation: String,
        /// What is wrong.
        problem: String,
    },
    /// A number that makes no sense.
    #[error("{name} {value}: {wanted}")]
    Argument {
        /// What it is called.
        name: &'static str,
        /// As given.
        value: u64,
        /// What is allowed.
        wanted: &'static str,
    },
    /// A file that is no index of this release, or a damaged one.
    #[error("{}: {problem}; build the index again", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The system refused to read or write.
    #[error("{}: {source}", path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A line of an edge list that is no edge.
    #[error("{place}, line {line}: {problem}")]
    Line {
        /// Name of the file.
        place: String,
        /// From 1.
        line: u64,
        /// What is wrong with it.
        problem: String,
    },
    /// Matches of an epoch are asked for when the next one has begun.
    #[error("these changes are of an epoch that is over: another one has begun; take them before")]
    Over,
    /// A thread of the crew could not be started, or panicked.
    #[error("a thread of the search failed: {0}")]
    Thread(String),
}
