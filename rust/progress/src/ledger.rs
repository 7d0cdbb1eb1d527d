//! The counts of one scope on one worker: those in force, those to be applied, and those that the others have not been told.
//!
//! What this worker counts is applied here at once and told to the others in its next bundle, which goes out when some of it may
//! move a frontier (see the private module `outgoing`). Keeping changes back is always safe, since counts that a peer does not know to be gone hold
//! its frontiers back; and it ends, since a frontier that stands still elsewhere because of a count that is gone here stands at
//! a time that nothing is before, here as well.
//!
//! Invariant: the counts in force are the initial ones, all changes of this worker, and those of the bundles taken in. So the
//! tracker is the record of all updates ever exchanged, on a lone worker too, which tells nobody.
//!
//! A snapshot is that record with the next number of each sender ([`Caster::snapshot`](crate::Caster::snapshot)). It holds changes
//! that were sent and no others: who begins with it also gets the next bundle of this worker, with what was unsent, and would count that twice. So
//! a worker that owes something casts it before ([`Ledger::snapshot`] refuses otherwise).

use crate::outgoing::Outgoing;
use crate::reachability::{Location, Port, Source, Target, Tracker, UnknownLocation};
use crate::timestamp::Timestamp;

/// A change of the count of one time at one location.
pub type Change<T> = (Location, T, i64);

/// A worker that has something to tell the others was asked for a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there are changes that were not cast: a snapshot would hold them, and the next bundle as well")]
pub struct Untold;

/// See the module.
#[derive(Clone, Debug)]
pub struct Ledger<T: Timestamp> {
    tracker: Tracker<T>,
    /// To be applied.
    inbox: Vec<Change<T>>,
    /// Changes of this worker that its peers have not been told.
    outgoing: Outgoing<T>,
}

impl<T: Timestamp> Ledger<T> {
    /// A ledger that begins with what the tracker counts.
    pub fn new(tracker: Tracker<T>) -> Self {
        Ledger { tracker, inbox: Vec::new(), outgoing: Outgoing::new() }
    }

    /// The counts in force and what follows from them.
    pub fn tracker(&self) -> &Tracker<T> {
        &self.tracker
    }

    /// As [`Ledger::tracker`], for what every worker derives by itself.
    pub fn tracker_mut(&mut self) -> &mut Tracker<T> {
        &mut self.tracker
    }

    /// A change that this worker makes. With `share`, others are told with a later cast.
    pub fn count(&mut self, location: Location, time: T, diff: i64, share: bool) {
        if share {
            self.outgoing.update(location, time.clone(), diff);
        }
        self.inbox.push((location, time, diff));
    }

    /// Takes in the changes of a bundle of another worker.
    pub fn absorb(&mut self, changes: impl IntoIterator<Item = Change<T>>) {
        self.inbox.extend(changes);
    }

    /// Whether changes wait to be applied.
    pub fn is_waiting(&self) -> bool {
        !self.inbox.is_empty()
    }

    /// Applies what was counted and absorbed; each change is shown to `each`.
    ///
    /// # Errors
    /// [`UnknownLocation`] when a peer names a location that the graph lacks: the ledger is of no use any more.
    pub fn apply(&mut self, mut each: impl FnMut(Location, &T, i64)) -> Result<(), UnknownLocation> {
        for (location, time, diff) in self.inbox.drain(..) {
            each(location, &time, diff);
            self.tracker.update(location, time, diff)?;
        }
        Ok(())
    }

    /// Whether what the others have not been told may move a frontier: whether some of it is not behind another live time.
    pub fn must_cast(&mut self) -> bool {
        let Ledger { tracker, outgoing, .. } = self;
        outgoing.must_share(|location, time| {
            let frontier = match location.port {
                Port::Target(port) => tracker.frontier(Target { node: location.node, port }),
                Port::Source(port) => tracker.source_frontier(Source { node: location.node, port }),
            };
            !frontier.iter().any(|earlier| earlier.less_than(time))
        })
    }

    /// Hands out all that the others have not been told, summed: what a bundle of this worker says about this scope.
    pub fn cast(&mut self, each: impl FnMut(Location, T, i64)) {
        self.outgoing.share(each);
    }

    /// The counts in force, but for locations that each worker derives by itself: what another worker can begin with.
    ///
    /// # Errors
    /// [`Untold`] when something waits to be applied or to be told.
    pub fn snapshot(&mut self, derived: impl Fn(Location) -> bool) -> Result<Vec<Change<T>>, Untold> {
        if self.is_waiting() || self.owes() {
            return Err(Untold);
        }
        let counts = self.tracker.accumulated().filter(|((location, _), _)| !derived(*location));
        Ok(counts.map(|((location, time), count)| (location, time, count)).collect())
    }

    /// Begins with a snapshot, in a ledger that counts nothing yet.
    ///
    /// # Errors
    /// [`UnknownLocation`] when the snapshot is of another graph.
    pub fn begin(&mut self, snapshot: impl IntoIterator<Item = Change<T>>) -> Result<(), UnknownLocation> {
        for (location, time, count) in snapshot {
            self.tracker.update(location, time, count)?;
        }
        Ok(())
    }

    /// Begins as a founder: with one capability of each of `founders` workers per output, at the first time.
    pub fn found(&mut self, outputs: impl IntoIterator<Item = Source>, founders: usize) {
        for output in outputs {
            self.tracker.update_source(output, T::minimum(), founders as i64);
        }
    }

    /// Whether there is something that the others have not been told.
    pub fn owes(&mut self) -> bool {
        !self.outgoing.is_empty()
    }
}
