//! Where a pointstamp can be: the ports of the nodes of a graph.

use serde::{Deserialize, Serialize};

/// An output port of a node.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct Source {
    /// The node.
    pub node: usize,
    /// Which of its outputs.
    pub port: usize,
}

impl Source {
    /// An output port of a node.
    pub const fn new(node: usize, port: usize) -> Self {
        Self { node, port }
    }
}

/// An input port of a node.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct Target {
    /// The node.
    pub node: usize,
    /// Which of its inputs.
    pub port: usize,
}

impl Target {
    /// An input port of a node.
    pub const fn new(node: usize, port: usize) -> Self {
        Self { node, port }
    }
}

/// A side and position at a node.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum Port {
    /// An input.
    Target(usize),
    /// An output.
    Source(usize),
}

/// Where a pointstamp is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct Location {
    /// The node.
    pub node: usize,
    /// Which of its ports.
    pub port: Port,
}

impl From<Source> for Location {
    fn from(source: Source) -> Self {
        Self { node: source.node, port: Port::Source(source.port) }
    }
}

impl From<Target> for Location {
    fn from(target: Target) -> Self {
        Self { node: target.node, port: Port::Target(target.port) }
    }
}
