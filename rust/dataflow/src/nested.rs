//! Nested regions as nodes of the region around them.
//!
//! Progress of all regions of a dataflow travels in one bundle per step, so a block that crosses the border is counted once, at
//! the operator that will read it, and never at the border itself. What the outer region must know is which of its times the
//! inner pointstamps can still reach: each inner location has precomputed paths to the outputs of the scope, and the images of
//! its least pointstamps, stripped to outer times, are counted per output. (Of each location only the frontier counts: while a worker knows
//! of a block that was read and not yet of its having been sent, a count is below zero, and must not cancel what stands at another
//! location with the same outer time.) Their frontier is the capability that the scope's node
//! holds in the outer region. Every worker derives it from the same bundles, so it is never sent.
//!
//! Frontiers go the other way: the outer frontier at an input of the scope is a capability of node 0 inside. It is left out
//! of the derived capabilities, since the outer region follows that path on its own by the node's summary.
//!
//! Departure: only the frontier of an inner location counts outside, as said above.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use penstock_progress::antichain::{Antichain, MutableAntichain};
use penstock_progress::reachability::{Location, Port, Source, Target};
use penstock_progress::timestamp::{PathSummary, Refines, Timestamp};

use crate::error::Error;
use crate::region::{Region, Summaries};

/// Paths through a scope by input and output.
pub(crate) type Face<T> = Vec<Vec<Antichain<<T as Timestamp>::Summary>>>;

/// A nested region as the region around it, with time `T`, sees it.
pub(crate) trait Nested<T: Timestamp> {
    /// [`Region::check`] of what is inside.
    fn check(&self) -> Result<Face<T>, Error>;
    /// [`Region::found`] of what is inside; hands the capabilities with which the scope begins, by output, to `hold`.
    fn found(&self, founders: Option<usize>, hold: &mut dyn FnMut(usize, T));
    /// Number of inputs and outputs.
    fn ports(&self) -> (usize, usize);
    /// Applies changes inside; reports those of the scope's capabilities by output.
    fn surface(&self, hold: &mut dyn FnMut(usize, T, i64)) -> Result<(), Error>;
    fn outer_change(&self, port: usize, time: T, diff: i64);
    fn propagate(&self);
    fn sweep(&self) -> Result<(), Error>;
}

/// See the module.
pub(crate) struct NestedRegion<O: Timestamp, T: Timestamp> {
    inner: Rc<Region<T>>,
    /// By location: its paths to each output of the scope.
    exits: RefCell<BTreeMap<Location, Vec<Antichain<T::Summary>>>>,
    /// By location: the counts of its pointstamps.
    standing: RefCell<BTreeMap<Location, MutableAntichain<T>>>,
    /// By output of the scope: images of the frontiers of all locations.
    holds: RefCell<Vec<MutableAntichain<O>>>,
}

impl<O: Timestamp, T: Refines<O>> NestedRegion<O, T> {
    pub(crate) fn new(inner: Rc<Region<T>>) -> Self {
        NestedRegion { inner, exits: RefCell::default(), standing: RefCell::default(), holds: RefCell::default() }
    }

    /// Counts the images of one inner change; reports what that does to the frontiers.
    fn project(&self, location: Location, time: &T, diff: i64, hold: &mut dyn FnMut(usize, O, i64)) {
        if location.node == 0 {
            return;
        }
        let exits = self.exits.borrow();
        let Some(exits) = exits.get(&location) else { return };
        let mut standing = self.standing.borrow_mut();
        let (mut holds, counts) = (self.holds.borrow_mut(), standing.entry(location).or_default());
        for (time, diff) in counts.update_iter([(time.clone(), diff)]) {
            for (port, (paths, images)) in exits.iter().zip(holds.iter_mut()).enumerate() {
                let reached = paths.elements().iter().filter_map(|path| path.results_in(&time));
                for (time, diff) in images.update_iter(reached.map(|time| (time.to_outer(), diff))) {
                    hold(port, time, diff);
                }
            }
        }
    }
}

impl<O: Timestamp, T: Refines<O>> Nested<O> for NestedRegion<O, T> {
    fn check(&self) -> Result<Face<O>, Error> {
        let summaries = self.inner.check()?;
        let (inputs, outputs) = self.ports();
        let exits = paths_to_exits::<T>(&summaries, &self.inner.edges.borrow(), outputs);
        let summary = (0..inputs)
            .map(|port| match exits.get(&Source { node: 0, port }.into()) {
                Some(paths) => {
                    paths.iter().map(|paths| paths.elements().iter().cloned().map(T::summarize).collect()).collect()
                }
                None => vec![Antichain::new(); outputs],
            })
            .collect();
        *self.exits.borrow_mut() = exits;
        *self.holds.borrow_mut() = (0..outputs).map(|_| MutableAntichain::new()).collect();
        Ok(summary)
    }

    fn found(&self, founders: Option<usize>, hold: &mut dyn FnMut(usize, O)) {
        self.inner.found(founders);
        for (location, time, count) in self.inner.counts() {
            self.project(location, &time, count, &mut |_, _, _| {});
        }
        for (port, images) in self.holds.borrow().iter().enumerate() {
            images.frontier().iter().for_each(|time| hold(port, time.clone()));
        }
    }

    fn ports(&self) -> (usize, usize) {
        (self.inner.entering.get(), self.inner.leaving.get())
    }

    fn surface(&self, hold: &mut dyn FnMut(usize, O, i64)) -> Result<(), Error> {
        self.inner.apply(|location, time, diff| self.project(location, time, diff, hold))
    }

    fn outer_change(&self, port: usize, time: O, diff: i64) {
        self.inner.outer_change(port, T::to_inner(time), diff);
    }

    fn propagate(&self) {
        self.inner.propagate();
    }

    fn sweep(&self) -> Result<(), Error> {
        self.inner.sweep()
    }
}

/// For each location the least paths to each target of node 0. Walks backwards until nothing improves: every cycle advances
/// time, so a path that goes around adds nothing.
fn paths_to_exits<T: Timestamp>(
    summaries: &Summaries<T::Summary>,
    edges: &[(Source, Target)],
    outputs: usize,
) -> BTreeMap<Location, Vec<Antichain<T::Summary>>> {
    let mut incoming: BTreeMap<Location, Vec<(Location, T::Summary)>> = BTreeMap::new();
    for (from, to) in edges {
        incoming.entry((*to).into()).or_default().push(((*from).into(), T::Summary::default()));
    }
    for (node, summary) in summaries.iter().enumerate() {
        for (input, by_output) in summary.iter().enumerate() {
            for (output, paths) in by_output.iter().enumerate() {
                let end = Location { node, port: Port::Source(output) };
                let start = Location { node, port: Port::Target(input) };
                incoming.entry(end).or_default().extend(paths.elements().iter().map(|path| (start, path.clone())));
            }
        }
    }
    let mut exits: BTreeMap<Location, Vec<Antichain<T::Summary>>> = BTreeMap::new();
    let mut work: Vec<(Location, usize, T::Summary)> =
        (0..outputs).map(|port| (Target { node: 0, port }.into(), port, T::Summary::default())).collect();
    while let Some((at, output, path)) = work.pop() {
        let known = exits.entry(at).or_insert_with(|| vec![Antichain::new(); outputs]);
        if known[output].insert(path.clone()) {
            for (before, step) in incoming.get(&at).into_iter().flatten() {
                if let Some(longer) = step.followed_by(&path) {
                    work.push((*before, output, longer));
                }
            }
        }
    }
    exits
}
