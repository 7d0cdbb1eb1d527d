//! Building the graph that is tracked.
//!
//! Owns: its nodes, edges and path summaries until they are checked, and the order of its locations along the paths that
//! need not advance time. A graph without such an order is refused, with the cycle.

use std::collections::{BTreeMap, BTreeSet};

use super::location::{Location, Source, Target};
use super::tracker::Tracker;
use crate::antichain::Antichain;
use crate::order::PartialOrder;
use crate::timestamp::Timestamp;

/// Why a graph cannot be tracked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GraphError {
    /// An edge names a node or port that the graph lacks.
    #[error("the edge {from:?} -> {to:?} names {missing:?}, which the graph lacks")]
    UnknownLocation {
        /// Start of the edge.
        from: Source,
        /// End of the edge.
        to: Target,
        /// The end that is missing.
        missing: Location,
    },
    /// A node was added twice.
    #[error("node {node} was added twice")]
    DuplicateNode {
        /// The node.
        node: usize,
    },
    /// A node's summaries do not have one row per input and one entry per output.
    #[error("node {node} with {inputs} inputs and {outputs} outputs has a summary of shape {shape:?}")]
    SummaryShape {
        /// The node.
        node: usize,
        /// Its inputs.
        inputs: usize,
        /// Its outputs.
        outputs: usize,
        /// The length of each row given.
        shape: Vec<usize>,
    },
    /// A cycle along which a time need not advance: a message could go round for ever at one time.
    #[error("a cycle that does not advance time passes through {cycle:?}")]
    CycleDoesNotAdvance {
        /// The locations of the cycle, in order.
        cycle: Vec<Location>,
    },
}

struct Node<T: Timestamp> {
    node: usize,
    inputs: usize,
    outputs: usize,
    summary: Vec<Vec<Antichain<T::Summary>>>,
}

/// Collects nodes and edges. Mistakes are reported by [`GraphBuilder::build`].
pub struct GraphBuilder<T: Timestamp> {
    nodes: Vec<Node<T>>,
    edges: Vec<(Source, Target)>,
}

impl<T: Timestamp> Default for GraphBuilder<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T: Timestamp> GraphBuilder<T> {
    /// An empty graph.
    pub fn new() -> Self {
        Self { nodes: Vec::new(), edges: Vec::new() }
    }

    /// Adds a node; `summary[input][output]` holds the least advances from input to output, empty where no path leads.
    pub fn add_node(&mut self, node: usize, inputs: usize, outputs: usize, summary: Vec<Vec<Antichain<T::Summary>>>) {
        self.nodes.push(Node { node, inputs, outputs, summary });
    }

    /// Adds an edge.
    pub fn add_edge(&mut self, from: Source, to: Target) {
        self.edges.push((from, to));
    }

    /// Checks the graph and makes its tracker, without pointstamps. O(ports + paths).
    ///
    /// # Errors
    /// [`GraphError`]: unknown or repeated nodes, misshapen summaries, a cycle that does not advance time.
    pub fn build(self) -> Result<Tracker<T>, GraphError> {
        let mut ports: BTreeMap<Location, usize> = BTreeMap::new();
        let mut locations = Vec::new();
        let mut seen = BTreeSet::new();
        for &Node { node, inputs, outputs, ref summary } in &self.nodes {
            if !seen.insert(node) {
                return Err(GraphError::DuplicateNode { node });
            }
            if summary.len() != inputs || summary.iter().any(|row| row.len() != outputs) {
                let shape = summary.iter().map(Vec::len).collect();
                return Err(GraphError::SummaryShape { node, inputs, outputs, shape });
            }
            let targets = (0..inputs).map(|port| Location::from(Target { node, port }));
            for location in targets.chain((0..outputs).map(|port| Source { node, port }.into())) {
                ports.insert(location, locations.len());
                locations.push(location);
            }
        }
        let mut paths: Vec<Vec<(usize, T::Summary)>> = vec![Vec::new(); locations.len()];
        for Node { node, summary, .. } in &self.nodes {
            for (input, row) in summary.iter().enumerate() {
                let from = ports[&Target { node: *node, port: input }.into()];
                for (output, antichain) in row.iter().enumerate() {
                    let to = ports[&Source { node: *node, port: output }.into()];
                    paths[from].extend(antichain.elements().iter().map(|summary| (to, summary.clone())));
                }
            }
        }
        for &(from, to) in &self.edges {
            let find = |missing: Location| {
                ports.get(&missing).copied().ok_or(GraphError::UnknownLocation { from, to, missing })
            };
            let (start, end) = (find(from.into())?, find(to.into())?);
            paths[start].push((end, T::Summary::default()));
        }
        let order = topological(&paths).map_err(|cycle| GraphError::CycleDoesNotAdvance {
            cycle: cycle.into_iter().map(|at| locations[at]).collect(),
        })?;
        Ok(Tracker::new(&locations, paths, &order))
    }
}

/// Orders the locations along the paths that need not advance time, or returns a cycle of such paths.
fn topological<S: PartialOrder + Default>(paths: &[Vec<(usize, S)>]) -> Result<Vec<usize>, Vec<usize>> {
    let identity = S::default();
    let idle = |at: usize| paths[at].iter().filter(|path| !identity.less_than(&path.1)).map(|path| path.0);
    let mut incoming = vec![0usize; paths.len()];
    for at in 0..paths.len() {
        idle(at).for_each(|to| incoming[to] += 1);
    }
    let mut order: Vec<usize> = (0..paths.len()).filter(|at| incoming[*at] == 0).collect();
    let mut done = 0;
    while done < order.len() {
        for to in idle(order[done]) {
            incoming[to] -= 1;
            if incoming[to] == 0 {
                order.push(to);
            }
        }
        done += 1;
    }
    if order.len() == paths.len() {
        return Ok(order);
    }
    // Every location that is left has a predecessor that is left: walking back must close a cycle.
    let mut before = vec![usize::MAX; paths.len()];
    for at in (0..paths.len()).filter(|at| incoming[*at] > 0) {
        idle(at).for_each(|to| before[to] = at);
    }
    let mut walk = vec![incoming.iter().position(|count| *count > 0).unwrap_or(0)];
    loop {
        let previous = before[walk[walk.len() - 1]];
        if let Some(closed) = walk.iter().position(|at| *at == previous) {
            let mut cycle = walk.split_off(closed);
            cycle.reverse();
            return Err(cycle);
        }
        walk.push(previous);
    }
}
