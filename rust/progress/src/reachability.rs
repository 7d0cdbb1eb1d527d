//! Which times may still reach which port, given the live pointstamps of the whole dataflow.
//!
//! A location is an input port (a *target*) or an output port (a *source*) of a node. Edges lead from sources to targets and
//! keep times; inside a node, paths lead from targets to sources and advance times by the node's summaries. A pointstamp is
//! a time at a location: a message queued at a target, or a capability held for a source.
//!
//! Per location the tracker keeps two counted frontiers: `stamps`, of the pointstamps there, and `implied`, which counts
//! each element of the location's own `stamps` frontier and each image, along an incoming path, of an element of the
//! `implied` frontier at the path's start. Its frontier is the answer. Only differences of frontiers travel.
//!
//! Why that ends, and is right, on graphs with cycles. Differences wait in a heap by (time, rank), where ranks order the
//! locations topologically along the paths that need not advance time; [`GraphBuilder::build`] refuses a graph without
//! such an order. Processing a difference at (t, l) creates differences only at times at or after t (summaries never go
//! back, and a frontier loses t only to times at or after it), and at t itself only at higher ranks. So all differences for
//! (t, l) are present, and are summed, when the first is taken: each (time, rank) is applied once, with its final value.
//! In particular support that runs only around a cycle cancels: the withdrawal of what an element implied one turn later
//! meets the assertion of the element that it exposed before either is applied.
//! A difference popped for t may leave stale later elements in a frontier; their withdrawal is already on the heap,
//! caused by t's own change, and is applied at its own time.
//!
//! Source: rescaling paper §2, §3.2.2; Naiad's could-result-in relation. Departure: topological ranks, so that no location
//! flickers within a time.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use serde::{Deserialize, Serialize};

use crate::antichain::{Antichain, MutableAntichain};
use crate::change_batch::ChangeBatch;
use crate::order::PartialOrder;
use crate::timestamp::{PathSummary, Timestamp};

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

/// A pointstamp names a location that the graph lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the graph has no location {location:?}")]
pub struct UnknownLocation {
    /// The location named.
    pub location: Location,
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
        let mut seen = std::collections::BTreeSet::new();
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

/// The state at one location.
struct Site<T: Timestamp> {
    location: Location,
    stamps: MutableAntichain<T>,
    implied: MutableAntichain<T>,
    paths: Vec<(usize, T::Summary)>,
}

/// The live pointstamps of a dataflow and the frontiers that they imply.
///
/// Changes are counted at once and reach the frontiers with [`Tracker::propagate`].
pub struct Tracker<T: Timestamp> {
    /// Sites by rank.
    sites: Vec<Site<T>>,
    /// Per node, the ranks of its targets and of its sources.
    ranks: BTreeMap<usize, (Vec<usize>, Vec<usize>)>,
    /// Differences to `implied`, by time and rank.
    work: BinaryHeap<Reverse<(T, usize, i64)>>,
    /// Net changes of target frontiers since the last drain.
    changes: ChangeBatch<(Target, T)>,
    /// How many pointstamps have a count other than zero.
    live: usize,
}

impl<T: Timestamp> Tracker<T> {
    fn new(locations: &[Location], paths: Vec<Vec<(usize, T::Summary)>>, order: &[usize]) -> Self {
        let mut rank_of = vec![0; order.len()];
        for (rank, at) in order.iter().enumerate() {
            rank_of[*at] = rank;
        }
        let mut ranks: BTreeMap<usize, (Vec<usize>, Vec<usize>)> = BTreeMap::new();
        for (at, location) in locations.iter().enumerate() {
            let node = ranks.entry(location.node).or_default();
            match location.port {
                Port::Target(_) => node.0.push(rank_of[at]),
                Port::Source(_) => node.1.push(rank_of[at]),
            }
        }
        let sites = order.iter().map(|at| Site {
            location: locations[*at],
            stamps: MutableAntichain::new(),
            implied: MutableAntichain::new(),
            paths: paths[*at].iter().map(|(to, summary)| (rank_of[*to], summary.clone())).collect(),
        });
        Self { sites: sites.collect(), ranks, work: BinaryHeap::new(), changes: ChangeBatch::new(), live: 0 }
    }

    fn rank(&self, location: Location) -> Result<usize, UnknownLocation> {
        let node = self.ranks.get(&location.node);
        let rank = match location.port {
            Port::Target(port) => node.and_then(|node| node.0.get(port)),
            Port::Source(port) => node.and_then(|node| node.1.get(port)),
        };
        rank.copied().ok_or(UnknownLocation { location })
    }

    fn known(&self, location: Location) -> usize {
        self.rank(location).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Changes the count of a pointstamp that may come from outside, such as from a peer.
    ///
    /// # Errors
    /// [`UnknownLocation`]; nothing changes.
    pub fn update(&mut self, location: Location, time: T, diff: i64) -> Result<(), UnknownLocation> {
        let rank = self.rank(location)?;
        self.change(rank, time, diff);
        Ok(())
    }

    /// Changes the count of a capability for an output.
    ///
    /// # Panics
    /// If the graph lacks the port.
    pub fn update_source(&mut self, source: Source, time: T, diff: i64) {
        self.change(self.known(source.into()), time, diff);
    }

    /// Changes the count of messages at an input.
    ///
    /// # Panics
    /// If the graph lacks the port.
    pub fn update_target(&mut self, target: Target, time: T, diff: i64) {
        self.change(self.known(target.into()), time, diff);
    }

    fn change(&mut self, rank: usize, time: T, diff: i64) {
        let stamps = &mut self.sites[rank].stamps;
        let before = stamps.live();
        for (time, diff) in stamps.update_iter([(time, diff)]) {
            self.work.push(Reverse((time, rank, diff)));
        }
        self.live = self.live + stamps.live() - before;
    }

    /// Carries all changes to the frontiers.
    pub fn propagate(&mut self) {
        while let Some(Reverse((time, rank, mut diff))) = self.work.pop() {
            while let Some(Reverse((_, _, more))) = self.work.peek().filter(|next| next.0.1 == rank && next.0.0 == time)
            {
                diff += more;
                self.work.pop();
            }
            if diff == 0 {
                continue;
            }
            let site = &mut self.sites[rank];
            for (time, diff) in site.implied.update_iter([(time, diff)]) {
                for (to, summary) in &site.paths {
                    if let Some(time) = summary.results_in(&time) {
                        self.work.push(Reverse((time, *to, diff)));
                    }
                }
                if let Port::Target(port) = site.location.port {
                    self.changes.update((Target { node: site.location.node, port }, time), diff);
                }
            }
        }
    }

    /// The net changes of target frontiers since the last call, by target, then time.
    pub fn drain_changes(&mut self) -> Vec<(Target, T, i64)> {
        self.changes.drain().map(|((target, time), diff)| (target, time, diff)).collect()
    }

    /// The times that may still arrive at an input, as of the last propagation.
    ///
    /// # Panics
    /// If the graph lacks the port.
    pub fn frontier(&self, target: Target) -> &[T] {
        self.sites[self.known(target.into())].implied.frontier()
    }

    /// The times that may still be sent from an output, as of the last propagation.
    ///
    /// # Panics
    /// If the graph lacks the port.
    pub fn source_frontier(&self, source: Source) -> &[T] {
        self.sites[self.known(source.into())].implied.frontier()
    }

    /// Whether no pointstamp is live: every count is zero. A negative count is not: its production is on its way.
    pub fn is_done(&self) -> bool {
        self.live == 0
    }

    /// Every pointstamp with its count, if not zero: the sum of all changes ever made.
    pub fn accumulated(&self) -> impl Iterator<Item = ((Location, T), i64)> + '_ {
        self.sites
            .iter()
            .flat_map(|site| site.stamps.counts().map(|(time, count)| ((site.location, time.clone()), count)))
    }

    /// The locations of the graph.
    pub fn locations(&self) -> impl Iterator<Item = Location> + '_ {
        self.sites.iter().map(|site| site.location)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timestamp::Product;

    fn by<S>(summary: S) -> Antichain<S> {
        Antichain::from_elem(summary)
    }

    /// 0: input -> 1: merge of input and loop -> 2: advances by one -> back to 1; 1 -> 3: end.
    fn cyclic(step: u64) -> GraphBuilder<u64> {
        let mut graph = GraphBuilder::new();
        graph.add_node(0, 0, 1, vec![]);
        graph.add_node(1, 2, 1, vec![vec![by(0)], vec![by(0)]]);
        graph.add_node(2, 1, 1, vec![vec![by(step)]]);
        graph.add_node(3, 1, 0, vec![vec![]]);
        graph.add_edge(Source::new(0, 0), Target::new(1, 0));
        graph.add_edge(Source::new(1, 0), Target::new(2, 0));
        graph.add_edge(Source::new(2, 0), Target::new(1, 1));
        graph.add_edge(Source::new(1, 0), Target::new(3, 0));
        graph
    }

    #[test]
    fn support_around_a_cycle_vanishes_with_its_cause() {
        let mut tracker = cyclic(1).build().unwrap();
        tracker.update_source(Source::new(0, 0), 0, 1);
        tracker.propagate();
        assert_eq!(tracker.frontier(Target::new(1, 1)), [1]);
        assert_eq!(tracker.frontier(Target::new(3, 0)), [0]);
        assert_eq!(tracker.drain_changes().len(), 4);
        tracker.update_source(Source::new(0, 0), 0, -1);
        tracker.update_target(Target::new(2, 0), 7, 1);
        tracker.propagate();
        assert_eq!(tracker.frontier(Target::new(1, 0)), []);
        assert_eq!(tracker.frontier(Target::new(1, 1)), [8]);
        assert_eq!(tracker.frontier(Target::new(2, 0)), [7]);
        assert_eq!(tracker.source_frontier(Source::new(1, 0)), [8]);
        tracker.update_target(Target::new(2, 0), 7, -1);
        assert!(tracker.is_done());
        tracker.propagate();
        assert!(tracker.locations().all(|location| {
            match location.port {
                Port::Target(port) => tracker.frontier(Target::new(location.node, port)).is_empty(),
                Port::Source(port) => tracker.source_frontier(Source::new(location.node, port)).is_empty(),
            }
        }));
    }

    #[test]
    fn an_idle_cycle_is_refused_with_its_locations() {
        let Err(GraphError::CycleDoesNotAdvance { cycle }) = cyclic(0).build() else { panic!("accepted") };
        assert_eq!(cycle.len(), 4);
        assert!(cycle.contains(&Target::new(2, 0).into()) && cycle.contains(&Source::new(1, 0).into()));
        let from = cycle.iter().position(|at| *at == Target::new(2, 0).into()).unwrap();
        assert_eq!(cycle[(from + 1) % 4], Source::new(2, 0).into());
    }

    #[test]
    fn mistakes_are_typed() {
        let missing = |edit: fn(&mut GraphBuilder<u64>)| {
            let mut graph = cyclic(1);
            edit(&mut graph);
            graph.build().err().unwrap()
        };
        let (from, to) = (Source::new(0, 0), Target::new(1, 9));
        assert_eq!(
            missing(|graph| graph.add_edge(Source::new(0, 0), Target::new(1, 9))),
            GraphError::UnknownLocation { from, to, missing: to.into() }
        );
        assert_eq!(missing(|graph| graph.add_node(3, 0, 0, vec![])), GraphError::DuplicateNode { node: 3 });
        assert_eq!(
            missing(|graph| graph.add_node(9, 1, 2, vec![vec![Antichain::new()]])),
            GraphError::SummaryShape { node: 9, inputs: 1, outputs: 2, shape: vec![1] }
        );
    }

    #[test]
    fn a_foreign_location_changes_nothing() {
        let mut tracker = cyclic(1).build().unwrap();
        let location = Source::new(4, 0).into();
        assert_eq!(tracker.update(location, 0, 1), Err(UnknownLocation { location }));
        assert!(tracker.is_done());
        tracker.update(Source::new(0, 0).into(), 0, -1).unwrap();
        assert!(!tracker.is_done());
        assert_eq!(tracker.accumulated().collect::<Vec<_>>(), [((Source::new(0, 0).into(), 0), -1)]);
    }

    #[test]
    fn product_times_keep_both_coordinates() {
        let mut graph = GraphBuilder::<Product<u64, u64>>::new();
        graph.add_node(0, 0, 1, vec![]);
        graph.add_node(1, 1, 1, vec![vec![by(Product::new(0, 1))]]);
        graph.add_node(2, 2, 1, vec![vec![by(Product::default())], vec![by(Product::default())]]);
        graph.add_edge(Source::new(0, 0), Target::new(2, 0));
        graph.add_edge(Source::new(2, 0), Target::new(1, 0));
        graph.add_edge(Source::new(1, 0), Target::new(2, 1));
        let mut tracker = graph.build().unwrap();
        tracker.update_source(Source::new(0, 0), Product::new(2, 0), 1);
        tracker.update_target(Target::new(1, 0), Product::new(0, 5), 1);
        tracker.propagate();
        assert_eq!(tracker.frontier(Target::new(1, 0)), [Product::new(0, 5), Product::new(2, 0)]);
        assert_eq!(tracker.frontier(Target::new(2, 1)), [Product::new(0, 6), Product::new(2, 1)]);
    }
}
