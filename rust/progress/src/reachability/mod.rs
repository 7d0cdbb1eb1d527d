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

mod graph;
mod location;
mod tracker;

pub use graph::{GraphBuilder, GraphError};
pub use location::{Location, Port, Source, Target};
pub use tracker::{Tracker, UnknownLocation};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::antichain::Antichain;
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

    /// The work follows what changed: not the size of the graph, nor how many pointstamps are live.
    #[test]
    fn work_follows_the_change() {
        const NODES: usize = if cfg!(miri) { 60 } else { 1000 };
        let mut graph = GraphBuilder::<u64>::new();
        graph.add_node(0, 0, 1, vec![]);
        for node in 1..NODES {
            graph.add_node(node, 1, 1, vec![vec![by(0)]]);
            graph.add_edge(Source::new(node - 1, 0), Target::new(node, 0));
        }
        let mut tracker = graph.build().unwrap();
        assert_eq!(tracker.propagate(), 0);
        tracker.update_source(Source::new(0, 0), 5, 1);
        assert_eq!(tracker.propagate(), 2 * NODES - 1);
        // What is not minimal where it is moves nothing.
        tracker.update_source(Source::new(0, 0), 5, 1);
        tracker.update_source(Source::new(0, 0), 8, 1);
        tracker.update_source(Source::new(0, 0), 8, -1);
        tracker.update_source(Source::new(NODES - 1, 0), 3, -1);
        assert_eq!(tracker.propagate(), 0);
        // What is covered from upstream ends where it is.
        tracker.update_source(Source::new(NODES / 2, 0), 6, 1);
        assert_eq!(tracker.propagate(), 1);
        assert!(tracker.drain_changes().len() == NODES - 1 && tracker.drain_changes().is_empty());
        // What is minimal reaches what is downstream of it, and withdraws there what it covers.
        tracker.update_target(Target::new(NODES - 10, 0), 4, 1);
        assert_eq!(tracker.propagate(), 20 + 19);
        let changes = tracker.drain_changes();
        assert!(changes.iter().all(|change| change.0.node >= NODES - 10) && changes.len() == 20);
        // A move by one: the old time goes and the new one comes, everywhere once.
        tracker.update_target(Target::new(NODES - 10, 0), 4, -1);
        tracker.update_source(Source::new(0, 0), 5, -2);
        tracker.update_source(Source::new(0, 0), 6, 1);
        let moves = tracker.propagate();
        assert!(moves <= 2 * (2 * NODES - 1) + 39, "{moves} differences");
        assert_eq!(tracker.frontier(Target::new(NODES - 1, 0)), [6]);
    }

    /// A scope in a scope: the inner loop advances the last coordinate, the outer one the middle and may restart the last.
    #[test]
    fn nested_loops_keep_the_coordinates_apart() {
        type Time = Product<Product<u64, u64>, u64>;
        let at = |epoch, outer, inner| -> Time { Product::new(Product::new(epoch, outer), inner) };
        let mut graph = GraphBuilder::<Time>::new();
        graph.add_node(0, 0, 1, vec![]);
        graph.add_node(1, 3, 1, vec![vec![by(at(0, 0, 0))]; 3]);
        graph.add_node(2, 1, 2, vec![vec![by(at(0, 0, 1)), by(at(0, 1, 0))]]);
        graph.add_node(3, 1, 0, vec![vec![]]);
        graph.add_edge(Source::new(0, 0), Target::new(1, 0));
        graph.add_edge(Source::new(1, 0), Target::new(2, 0));
        graph.add_edge(Source::new(2, 0), Target::new(1, 1));
        graph.add_edge(Source::new(2, 1), Target::new(1, 2));
        graph.add_edge(Source::new(1, 0), Target::new(3, 0));
        let mut tracker = graph.build().unwrap();
        tracker.update_source(Source::new(0, 0), at(2, 0, 0), 1);
        tracker.update_target(Target::new(2, 0), at(1, 3, 5), 1);
        tracker.propagate();
        assert_eq!(tracker.frontier(Target::new(1, 1)), [at(1, 3, 6), at(2, 0, 1)]);
        assert_eq!(tracker.frontier(Target::new(1, 2)), [at(1, 4, 5), at(2, 1, 0)]);
        assert_eq!(tracker.frontier(Target::new(3, 0)), [at(1, 3, 6), at(1, 4, 5), at(2, 0, 0)]);
        tracker.update_target(Target::new(2, 0), at(1, 3, 5), -1);
        tracker.propagate();
        assert_eq!(tracker.frontier(Target::new(3, 0)), [at(2, 0, 0)]);
    }
}
