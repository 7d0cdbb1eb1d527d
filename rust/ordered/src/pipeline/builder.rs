//! How a pipeline is described and built.

use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, Mutex};

use crossbeam::queue::SegQueue;
use crossbeam::sync::Parker;

use super::core::Core;
use super::envelope::{Content, Envelope, Work};
use super::gate::Limits;
use super::hub::Hub;
use super::payload::{Partitioned, Payload, Stateful, Turn};
use super::sleepers::Sleepers;
use super::stage::{Input, Kind, Stage};
use super::stats::Counters;
use super::{Mode, OnError, Pipeline};
use crate::queue::{Hybrid, PartitionQueue, Partitioned as PartitionedQueue};
use crate::reorder::{Flagged, Locked, MOST_SLOTS, NonBlocking, Reorder};
use crate::schedule::{Scheduler, SchedulerKind};

/// The most workers of a pipeline.
pub const MOST_WORKERS: usize = 1024;
/// The most partitions of an operator.
pub const MOST_PARTITIONS: usize = 1 << 20;

/// The queue before operators with state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum QueueKind {
    /// Tokens in arrival order and a queue per partition: order and short waits.
    #[default]
    Hybrid,
    /// A queue per partition: order, and long waits. Comparator.
    Partitioned,
    /// One queue for all. Breaks the order of partitions, so a pipeline with state refuses it. Comparator.
    Shared,
}

/// The buffer behind every operator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ReorderKind {
    /// No lock; the right to emit is a counter.
    #[default]
    NonBlocking,
    /// No lock; a flag and fences. Comparator.
    Flagged,
    /// One lock. Comparator.
    Locked,
}

/// A name that nothing has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name:?} is no {what}: use {known}")]
pub struct NoSuchName {
    /// What was asked for.
    pub name: String,
    /// What kind of thing.
    pub what: &'static str,
    /// The names there are.
    pub known: &'static str,
}

impl FromStr for QueueKind {
    type Err = NoSuchName;

    fn from_str(name: &str) -> Result<Self, NoSuchName> {
        match name {
            "hybrid" => Ok(Self::Hybrid),
            "partitioned" => Ok(Self::Partitioned),
            "shared" => Ok(Self::Shared),
            _ => Err(NoSuchName { name: name.to_owned(), what: "queue", known: "hybrid, partitioned or shared" }),
        }
    }
}

impl FromStr for ReorderKind {
    type Err = NoSuchName;

    fn from_str(name: &str) -> Result<Self, NoSuchName> {
        let known = "non-blocking, flagged or locked";
        match name {
            "non-blocking" => Ok(Self::NonBlocking),
            "flagged" => Ok(Self::Flagged),
            "locked" => Ok(Self::Locked),
            _ => Err(NoSuchName { name: name.to_owned(), what: "reorder buffer", known }),
        }
    }
}

/// How a pipeline runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Worker threads, at most [`MOST_WORKERS`]; with 0 or 1 all runs on the thread that pulls. Default: the cores.
    pub workers: usize,
    /// The most envelopes inside, from admission until the output is pulled. Default 64.
    pub in_flight: usize,
    /// The most items inside; one envelope alone may have more. Default: no limit.
    pub in_flight_items: usize,
    /// The most bytes inside; likewise. Default 256 MiB.
    pub in_flight_bytes: usize,
    /// Which operator a free worker serves.
    pub scheduler: SchedulerKind,
    /// The queue before operators with state.
    pub queue: QueueKind,
    /// The buffer behind every operator.
    pub reorder: ReorderKind,
    /// Where operators run.
    pub mode: Mode,
    /// What follows an error.
    pub on_error: OnError,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            workers: std::thread::available_parallelism().map_or(1, usize::from),
            in_flight: 64,
            in_flight_items: usize::MAX,
            in_flight_bytes: 256 << 20,
            scheduler: SchedulerKind::default(),
            queue: QueueKind::default(),
            reorder: ReorderKind::default(),
            mode: Mode::default(),
            on_error: OnError::default(),
        }
    }
}

/// Why a pipeline cannot be built.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BuildError {
    /// Without an operator.
    #[error("a pipeline needs at least one operator")]
    Empty,
    /// Too many workers.
    #[error("{workers} workers: at most {MOST_WORKERS}")]
    Workers {
        /// What was asked for.
        workers: usize,
    },
    /// A bound that lets nothing in, or that no buffer can have.
    #[error("{name} is {value}: give it {least} to {most}")]
    Bound {
        /// Which option.
        name: &'static str,
        /// What was asked for.
        value: usize,
        /// The least.
        least: usize,
        /// The most.
        most: usize,
    },
    /// A partitioned operator with a number of partitions that cannot be.
    #[error("operator {name:?} has {partitions} partitions: give it 1 to {MOST_PARTITIONS}")]
    Partitions {
        /// Its name.
        name: String,
        /// What was asked for.
        partitions: usize,
    },
    /// The shared queue before an operator with state.
    #[error("operator {name:?} has state, and a shared queue breaks the order of its input: use hybrid or partitioned")]
    SharedQueue {
        /// Its name.
        name: String,
    },
}

/// A linear pipeline in the making: operators in the order in which envelopes pass them.
pub struct Builder<P, E> {
    operators: Vec<(String, Kind<P, E>, bool)>,
}

impl<P, E> Default for Builder<P, E> {
    fn default() -> Self {
        Self { operators: Vec::new() }
    }
}

impl<P, E> fmt::Debug for Builder<P, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.operators.iter().map(|(name, _, _)| name)).finish()
    }
}

impl<P: Payload, E: Send + 'static> Builder<P, E> {
    /// Without an operator yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an operator without state: any number of envelopes at a time.
    #[must_use]
    pub fn stateless(
        mut self,
        name: impl Into<String>,
        operate: impl Fn(Turn, P) -> Result<P, E> + Send + Sync + 'static,
    ) -> Self {
        self.operators.push((name.into(), Kind::Stateless(Box::new(operate)), false));
        self
    }

    /// Adds an operator whose state is divided by partition; see [`Partitioned`].
    #[must_use]
    pub fn partitioned(
        self,
        name: impl Into<String>,
        partitions: usize,
        split: impl Fn(P) -> Result<Vec<(usize, P)>, E> + Send + Sync + 'static,
        operate: impl Fn(Turn, usize, P) -> Result<P, E> + Send + Sync + 'static,
        merge: impl Fn(Vec<(usize, P)>) -> Result<P, E> + Send + Sync + 'static,
    ) -> Self {
        self.partitioned_operator(name, partitions, Closures { split, operate, merge })
    }

    /// Adds an operator whose state is divided by partition.
    #[must_use]
    pub fn partitioned_operator(
        mut self,
        name: impl Into<String>,
        partitions: usize,
        operator: impl Partitioned<P, E> + 'static,
    ) -> Self {
        let finishes = operator.finishes();
        self.operators.push((name.into(), Kind::Partitioned(Box::new(operator), partitions), finishes));
        self
    }

    /// Adds an operator with one state: one envelope at a time, in order.
    #[must_use]
    pub fn stateful(
        self,
        name: impl Into<String>,
        operate: impl FnMut(Turn, P) -> Result<P, E> + Send + 'static,
    ) -> Self {
        self.stateful_operator(name, Closure(operate))
    }

    /// Adds an operator with one state.
    #[must_use]
    pub fn stateful_operator(mut self, name: impl Into<String>, operator: impl Stateful<P, E> + 'static) -> Self {
        let finishes = operator.finishes();
        self.operators.push((name.into(), Kind::Stateful(Mutex::new(Box::new(operator))), finishes));
        self
    }

    /// Builds it. No thread is started before the first envelope that needs one.
    ///
    /// # Errors
    /// When it has no operator, or an option is out of its bounds.
    pub fn build(self, options: Options) -> Result<Pipeline<P, E>, BuildError> {
        let scheduler = options.scheduler.make();
        self.build_with(options, scheduler)
    }

    /// Builds it with a scheduler of one's own.
    ///
    /// # Errors
    /// As [`build`](Self::build).
    pub fn build_with(self, options: Options, scheduler: Box<dyn Scheduler>) -> Result<Pipeline<P, E>, BuildError> {
        self.check(&options)?;
        let parkers = (0..options.workers).map(|_| Parker::new()).collect::<Vec<_>>();
        let sleepers = Sleepers::new(parkers.iter().map(|parker| parker.unparker().clone()).collect());
        let limits =
            Limits { envelopes: options.in_flight, items: options.in_flight_items, bytes: options.in_flight_bytes };
        let hub = Arc::new(Hub::new(sleepers, options.workers + 1, limits));
        // From the last to the first: the sink of each buffer feeds the operator behind it.
        let mut stages: Vec<Arc<Stage<P, E>>> = Vec::new();
        for (at, (name, kind, finishes)) in self.operators.into_iter().enumerate().rev() {
            let next = stages.last().cloned();
            let counters = Arc::new(Counters::default());
            let (own, sink_next, sink_hub) = (Arc::clone(&counters), next.clone(), Arc::clone(&hub));
            let sink = move |_, envelope: Envelope<P, E>| {
                if !matches!(envelope.content, Content::Dropped) {
                    own.emitted(envelope.label.weight);
                }
                match &sink_next {
                    Some(next) => next.feed(envelope),
                    None => sink_hub.emit(envelope),
                }
            };
            let (most, input) = input(&kind, &options);
            let stage = Arc::new(Stage {
                at,
                name: name.into(),
                kind,
                most,
                finishes,
                input,
                ring: ring(options.reorder, 2 * options.in_flight, sink),
                next,
                counters,
                hub: Arc::clone(&hub),
            });
            stages.push(stage);
        }
        stages.reverse();
        Ok(Pipeline::new(Core::new(hub, stages, scheduler), options, parkers))
    }

    fn check(&self, options: &Options) -> Result<(), BuildError> {
        if self.operators.is_empty() {
            return Err(BuildError::Empty);
        }
        if options.workers > MOST_WORKERS {
            return Err(BuildError::Workers { workers: options.workers });
        }
        for (name, value, most) in [
            ("in_flight", options.in_flight, MOST_SLOTS / 2),
            ("in_flight_items", options.in_flight_items, usize::MAX),
            ("in_flight_bytes", options.in_flight_bytes, usize::MAX),
        ] {
            if value == 0 || value > most {
                return Err(BuildError::Bound { name, value, least: 1, most });
            }
        }
        for (name, kind, _) in &self.operators {
            if let Kind::Partitioned(_, partitions) = kind
                && !(1..=MOST_PARTITIONS).contains(partitions)
            {
                return Err(BuildError::Partitions { name: name.clone(), partitions: *partitions });
            }
            if options.queue == QueueKind::Shared && !matches!(kind, Kind::Stateless(_)) {
                return Err(BuildError::SharedQueue { name: name.clone() });
            }
        }
        Ok(())
    }
}

/// M and the queue of an operator.
fn input<P: Payload, E: Send + 'static>(kind: &Kind<P, E>, options: &Options) -> (usize, Input<P, E>) {
    let keyed = |partitions| {
        let queue: Box<dyn PartitionQueue<Work<P, E>>> = match options.queue {
            QueueKind::Partitioned => Box::new(PartitionedQueue::new(partitions)),
            QueueKind::Hybrid | QueueKind::Shared => Box::new(Hybrid::new(partitions)),
        };
        Input::Keyed(queue)
    };
    let workers = options.workers.max(1);
    match kind {
        Kind::Stateless(_) => (workers, Input::Free(Box::new(SegQueue::new()))),
        Kind::Partitioned(_, partitions) => (workers.min(*partitions), keyed(*partitions)),
        Kind::Stateful(_) => (1, keyed(1)),
    }
}

fn ring<P: Payload, E: Send + 'static>(
    kind: ReorderKind,
    slots: usize,
    sink: impl FnMut(u64, Envelope<P, E>) + Send + 'static,
) -> Box<dyn Reorder<Envelope<P, E>>> {
    let why = "the bounds of in_flight were checked";
    match kind {
        ReorderKind::NonBlocking => Box::new(NonBlocking::new(slots, sink).expect(why)),
        ReorderKind::Flagged => Box::new(Flagged::new(slots, sink).expect(why)),
        ReorderKind::Locked => Box::new(Locked::new(slots, sink).expect(why)),
    }
}

struct Closures<S, O, M> {
    split: S,
    operate: O,
    merge: M,
}

impl<P, E, S, O, M> Partitioned<P, E> for Closures<S, O, M>
where
    S: Fn(P) -> Result<Vec<(usize, P)>, E> + Send + Sync,
    O: Fn(Turn, usize, P) -> Result<P, E> + Send + Sync,
    M: Fn(Vec<(usize, P)>) -> Result<P, E> + Send + Sync,
{
    fn split(&self, payload: P) -> Result<Vec<(usize, P)>, E> {
        (self.split)(payload)
    }

    fn operate(&self, turn: Turn, partition: usize, part: P) -> Result<P, E> {
        (self.operate)(turn, partition, part)
    }

    fn merge(&self, parts: Vec<(usize, P)>) -> Result<P, E> {
        (self.merge)(parts)
    }
}

struct Closure<O>(O);

impl<P, E, O: FnMut(Turn, P) -> Result<P, E> + Send> Stateful<P, E> for Closure<O> {
    fn operate(&mut self, turn: Turn, payload: P) -> Result<P, E> {
        (self.0)(turn, payload)
    }
}
