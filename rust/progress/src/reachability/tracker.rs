//! The live pointstamps of a dataflow and the frontiers that they imply; see [`crate::reachability`] for how and why.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::location::{Location, Port, Source, Target};
use crate::antichain::MutableAntichain;
use crate::change_batch::ChangeBatch;
use crate::timestamp::{PathSummary, Timestamp};

/// A pointstamp names a location that the graph lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the graph has no location {location:?}")]
pub struct UnknownLocation {
    /// The location named.
    pub location: Location,
}

/// The state at one location.
#[derive(Clone, Debug)]
struct Site<T: Timestamp> {
    location: Location,
    stamps: MutableAntichain<T>,
    implied: MutableAntichain<T>,
    paths: Vec<(usize, T::Summary)>,
}

/// The ranks of the ports of a node.
#[derive(Clone, Debug)]
struct Ranks {
    node: usize,
    targets: Vec<usize>,
    sources: Vec<usize>,
}

/// The live pointstamps of a dataflow and the frontiers that they imply.
///
/// Changes are counted at once and reach the frontiers with [`Tracker::propagate`].
#[derive(Clone, Debug)]
pub struct Tracker<T: Timestamp> {
    /// Sites by rank.
    sites: Vec<Site<T>>,
    /// By node.
    nodes: Vec<Ranks>,
    /// Differences to `implied`, by time and rank.
    work: BinaryHeap<Reverse<(T, usize, i64)>>,
    /// Net changes of target frontiers since the last drain.
    changes: ChangeBatch<(Target, T)>,
    /// How many pointstamps have a count other than zero.
    live: usize,
}

impl<T: Timestamp> Tracker<T> {
    /// The tracker of locations with the paths from each, as positions among the locations, and their topological order.
    pub(super) fn new(locations: &[Location], paths: Vec<Vec<(usize, T::Summary)>>, order: &[usize]) -> Self {
        let mut rank_of = vec![0; order.len()];
        for (rank, at) in order.iter().enumerate() {
            rank_of[*at] = rank;
        }
        // The locations of a node stand together, each side in the order of its ports.
        let mut nodes: Vec<Ranks> = Vec::new();
        for (at, location) in locations.iter().enumerate() {
            if nodes.last().is_none_or(|last| last.node != location.node) {
                nodes.push(Ranks { node: location.node, targets: Vec::new(), sources: Vec::new() });
            }
            if let Some(ranks) = nodes.last_mut() {
                match location.port {
                    Port::Target(_) => ranks.targets.push(rank_of[at]),
                    Port::Source(_) => ranks.sources.push(rank_of[at]),
                }
            }
        }
        nodes.sort_by_key(|ranks| ranks.node);
        let sites = order.iter().map(|at| Site {
            location: locations[*at],
            stamps: MutableAntichain::new(),
            implied: MutableAntichain::new(),
            paths: paths[*at].iter().map(|(to, summary)| (rank_of[*to], summary.clone())).collect(),
        });
        Self { sites: sites.collect(), nodes, work: BinaryHeap::new(), changes: ChangeBatch::new(), live: 0 }
    }

    fn rank(&self, location: Location) -> Result<usize, UnknownLocation> {
        // Nodes are mostly numbered 0, 1, 2..; then the number is the position.
        let node = match self.nodes.get(location.node) {
            Some(ranks) if ranks.node == location.node => Some(ranks),
            _ => {
                let found = self.nodes.binary_search_by_key(&location.node, |ranks| ranks.node);
                found.ok().map(|at| &self.nodes[at])
            }
        };
        let rank = match location.port {
            Port::Target(port) => node.and_then(|node| node.targets.get(port)),
            Port::Source(port) => node.and_then(|node| node.sources.get(port)),
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

    /// Carries all changes to the frontiers. Returns how many differences of implied frontiers that took: nothing where no
    /// frontier of pointstamps moved, and nothing for locations that what moved does not reach.
    pub fn propagate(&mut self) -> usize {
        let mut applied = 0;
        while let Some(Reverse((time, rank, mut diff))) = self.work.pop() {
            while let Some(Reverse((_, _, more))) = self.work.peek().filter(|next| next.0.1 == rank && next.0.0 == time)
            {
                diff += more;
                self.work.pop();
            }
            if diff == 0 {
                continue;
            }
            applied += 1;
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
        applied
    }

    /// The net changes of target frontiers since the last call, by target, then time.
    pub fn drain_changes(&mut self) -> Vec<(Target, T, i64)> {
        let mut changes = Vec::new();
        self.each_change(|target, time, diff| changes.push((target, time, diff)));
        changes
    }

    /// As [`Tracker::drain_changes`], one by one: allocates nothing.
    pub fn each_change(&mut self, mut each: impl FnMut(Target, T, i64)) {
        self.changes.drain().for_each(|((target, time), diff)| each(target, time, diff));
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
