//! One operator of a pipeline: its queue, its reorder buffer, its figures, and how it works on an envelope.
//!
//! Invariants: envelopes are fed in the order of their tickets by one thread at a time (the ingress, or who emits from the buffer before);
//! `workers <= most`; what the buffer before emits is in the queue before a worker is woken; no panic of an operator leaves this module.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};

use crossbeam::queue::SegQueue;

use super::envelope::{Assembly, Content, Envelope, Outcome, Piece, Work};
use super::hub::Hub;
use super::payload::{Fault, Partitioned, Payload, Stateful, Turn};
use super::stats::Counters;
use crate::queue::PartitionQueue;
use crate::reorder::Reorder;
use crate::schedule::Load;

pub(super) type Operate<P, E> = dyn Fn(Turn, P) -> Result<P, E> + Send + Sync;

pub(super) enum Kind<P, E> {
    Stateless(Box<Operate<P, E>>),
    Partitioned(Box<dyn Partitioned<P, E>>, usize),
    /// The lock is never waited for: the queue hands envelopes out one at a time.
    Stateful(Mutex<Box<dyn Stateful<P, E>>>),
}

pub(super) enum Input<P, E> {
    /// Whoever comes takes the oldest.
    Free(Box<SegQueue<Work<P, E>>>),
    Keyed(Box<dyn PartitionQueue<Work<P, E>>>),
}

pub(super) struct Stage<P, E> {
    pub(super) at: usize,
    pub(super) name: Arc<str>,
    pub(super) kind: Kind<P, E>,
    pub(super) most: usize,
    pub(super) finishes: bool,
    pub(super) input: Input<P, E>,
    pub(super) ring: Box<dyn Reorder<Envelope<P, E>>>,
    pub(super) next: Option<Arc<Stage<P, E>>>,
    pub(super) counters: Arc<Counters>,
    pub(super) hub: Arc<Hub<P, E>>,
}

impl<P: Payload, E: Send + 'static> Stage<P, E> {
    /// Calls user code: its error or panic becomes a fault.
    fn guard<R>(&self, call: impl FnOnce() -> Result<R, E>) -> Outcome<R, E> {
        match catch_unwind(AssertUnwindSafe(call)) {
            Ok(result) => {
                result.map_err(|error| Fault::Failed { operator: self.at, name: Arc::clone(&self.name), error })
            }
            Err(panic) => {
                let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
                let message = text.or_else(|| panic.downcast_ref::<String>().cloned());
                let message = message.unwrap_or_else(|| "(no message)".to_owned());
                Err(Fault::Panicked { operator: self.at, name: Arc::clone(&self.name), message })
            }
        }
    }

    /// Adds an envelope to the queue. Callers take turns, in the order of tickets.
    pub(super) fn feed(&self, envelope: Envelope<P, E>) {
        self.counters.came();
        match envelope.content {
            Content::Parts(parts) => {
                // The last part gets the reference that the others were made from: who is last has to find it among the parts.
                let pieces = parts.len();
                let assemblies = std::iter::repeat_n(Arc::new(Assembly::new(envelope.label, pieces)), pieces);
                for (at, (assembly, (partition, part))) in assemblies.zip(parts).enumerate() {
                    let weight = part.items().max(1);
                    self.add(partition, weight, Work::Part(assembly, at, part));
                }
            }
            Content::Data(_) => {
                // What is not split needs no partition's order: it failed, or is empty.
                let partition = match &self.kind {
                    Kind::Partitioned(_, partitions) => (envelope.label.ticket % *partitions as u64) as usize,
                    _ => 0,
                };
                self.add(partition, envelope.label.weight, Work::Whole(envelope));
            }
        }
    }

    fn add(&self, partition: usize, weight: usize, work: Work<P, E>) {
        match &self.input {
            Input::Free(queue) => queue.push(work),
            Input::Keyed(queue) => queue.add(partition, work),
        }
        // After the push: who sees the weight finds the work.
        self.counters.arrived(weight);
        self.hub.workers.wake_one();
    }

    /// Takes up to `quantum` pieces of work; how many it were.
    pub(super) fn consume(&self, quantum: usize, operate: &mut dyn FnMut(usize, Work<P, E>)) -> usize {
        match &self.input {
            Input::Free(queue) => {
                for done in 0..quantum {
                    let Some(work) = queue.pop() else { return done };
                    operate(0, work);
                }
                quantum
            }
            Input::Keyed(queue) => queue.consume(quantum, operate),
        }
    }

    /// Prepares what goes to this operator: splits it if it works by partition.
    fn prepare(&self, content: Content<P, E>) -> Content<P, E> {
        let Kind::Partitioned(operator, partitions) = &self.kind else { return content };
        let split = |payload| {
            let parts = self.guard(|| operator.split(payload))?;
            match parts.iter().find(|(partition, _)| partition >= partitions) {
                None => Ok(parts),
                Some((partition, _)) => Err(Fault::NoSuchPartition {
                    operator: self.at,
                    name: Arc::clone(&self.name),
                    partition: *partition,
                    partitions: *partitions,
                }),
            }
        };
        match content {
            Content::Data(Ok(payload)) => match split(payload) {
                Ok(parts) if parts.is_empty() => Content::Data(self.guard(|| operator.merge(Vec::new()))),
                Ok(parts) => Content::Parts(parts),
                Err(fault) => Content::Data(Err(fault)),
            },
            other => other,
        }
    }

    /// Works on one piece from the queue.
    pub(super) fn operate(&self, worker: usize, partition: usize, work: Work<P, E>, now: &mut u64) {
        match work {
            Work::Whole(mut envelope) => {
                self.hub.holds(worker, self.at, envelope.label.number, *now);
                self.counters.taken(envelope.label.weight);
                let items = envelope.label.share.items;
                let turn = Turn { worker, number: envelope.label.number };
                // The partitioned ones get whole what failed or has no parts.
                if !matches!(self.kind, Kind::Partitioned(..))
                    && let Content::Data(outcome) = envelope.content
                {
                    envelope.content = Content::Data(outcome.and_then(|payload| self.call(turn, payload)));
                }
                let spent_ns = self.hub.lap(now);
                envelope.label.work_ns += spent_ns;
                self.counters.worked(items, spent_ns);
                self.finished(envelope, items, now);
            }
            Work::Part(assembly, at, part) => {
                let (number, items) = (assembly.label.number, part.items());
                self.hub.holds(worker, self.at, number, *now);
                self.counters.taken(items.max(1));
                let Kind::Partitioned(operator, _) = &self.kind else {
                    unreachable!("only partitioned operators get parts")
                };
                let outcome = self.guard(|| operator.operate(Turn { worker, number }, partition, part));
                let work_ns = self.hub.lap(now);
                self.counters.worked(items, work_ns);
                let _ = assembly.done.push(Piece { at, partition, outcome, work_ns });
                if let Some(assembly) = Arc::into_inner(assembly) {
                    self.merge(assembly, now);
                }
            }
        }
        self.hub.lets_go(worker);
    }

    /// The last part of an envelope is done.
    fn merge(&self, assembly: Assembly<P, E>, now: &mut u64) {
        let pieces = assembly.pieces();
        let mut label = assembly.label;
        let items = label.share.items;
        label.work_ns += pieces.iter().map(|piece| piece.work_ns).sum::<u64>();
        let content = Content::Data(self.put_together(pieces));
        let merge_ns = self.hub.lap(now);
        label.work_ns += merge_ns;
        let envelope = Envelope { label, content };
        self.counters.aside(merge_ns);
        self.finished(envelope, items, now);
    }

    fn put_together(&self, pieces: Vec<Piece<P, E>>) -> Outcome<P, E> {
        let Kind::Partitioned(operator, _) = &self.kind else { unreachable!("only partitioned operators get parts") };
        let parts = pieces.into_iter().map(|piece| piece.outcome.map(|part| (piece.partition, part)));
        let parts = parts.collect::<Result<Vec<_>, _>>()?;
        self.guard(|| operator.merge(parts))
    }

    /// Works on a whole envelope on the thread of the owner, also by partition, past the queues. Reads the clock if it is given; then
    /// the envelope stands for so many.
    pub(super) fn inline(&self, turn: Turn, payload: P, clock: &mut Option<u64>, stands_for: u64) -> Outcome<P, E> {
        let items = payload.items();
        if let Some(now) = clock {
            self.hub.holds(turn.worker, self.at, turn.number, *now);
        }
        let outcome = self.call(turn, payload);
        let each = clock.as_mut().map(|now| (self.hub.lap(now), stands_for));
        self.counters.passed(items, outcome.as_ref().map_or(0, Payload::items), each);
        if each.is_some() {
            self.hub.lets_go(turn.worker);
        }
        outcome
    }

    fn call(&self, turn: Turn, payload: P) -> Outcome<P, E> {
        match &self.kind {
            Kind::Stateless(operate) => self.guard(|| operate(turn, payload)),
            Kind::Stateful(operator) => {
                let mut operator = operator.lock().unwrap_or_else(PoisonError::into_inner);
                self.guard(|| operator.operate(turn, payload))
            }
            Kind::Partitioned(operator, _) => match self.prepare(Content::Data(Ok(payload))) {
                Content::Parts(parts) => {
                    let mut done = Vec::with_capacity(parts.len());
                    let mut failed = None;
                    for (partition, part) in parts {
                        // All of them, as on workers: the state of every partition sees its part.
                        match self.guard(|| operator.operate(turn, partition, part)) {
                            Ok(part) => done.push((partition, part)),
                            Err(fault) => drop(failed.get_or_insert(fault)),
                        }
                    }
                    failed.map_or_else(|| self.guard(|| operator.merge(done)), Err)
                }
                Content::Data(outcome) => outcome,
            },
        }
    }

    /// What comes at the end of the input, if anything does. Nothing is under way any more.
    pub(super) fn finish(&self, turn: Turn) -> Option<Outcome<P, E>> {
        if !self.finishes {
            return None;
        }
        match &self.kind {
            Kind::Stateless(_) => None,
            Kind::Stateful(operator) => {
                let mut operator = operator.lock().unwrap_or_else(PoisonError::into_inner);
                self.guard(|| operator.finish(turn)).transpose()
            }
            Kind::Partitioned(operator, partitions) => {
                let ends = (0..*partitions).filter_map(|partition| {
                    let end = self.guard(|| operator.finish(turn, partition)).transpose()?;
                    Some(end.map(|part| (partition, part)))
                });
                let ends = ends.collect::<Result<Vec<_>, _>>();
                match ends {
                    Ok(parts) if parts.is_empty() => None,
                    Ok(parts) => Some(self.guard(|| operator.merge(parts))),
                    Err(fault) => Some(Err(fault)),
                }
            }
        }
    }

    /// Sends an envelope that this operator is done with.
    fn finished(&self, mut envelope: Envelope<P, E>, items: usize, now: &mut u64) {
        let made = match &envelope.content {
            Content::Data(outcome) => outcome.as_ref().map_or(0, Payload::items),
            _ => 0,
        };
        self.counters.gave(items, made);
        if let Some(next) = &self.next {
            envelope.content = next.prepare(envelope.content);
            let split_ns = self.hub.lap(now);
            next.counters.aside(split_ns);
            envelope.label.work_ns += split_ns;
        }
        self.hub.recount(&mut envelope);
        self.counters.made(envelope.label.weight);
        self.send(envelope);
    }

    fn send(&self, envelope: Envelope<P, E>) {
        // A ticket is admitted only when it fits into every buffer, so this is our own mistake, and no output would ever come.
        if let Err(refused) = self.ring.send(envelope.label.ticket, envelope) {
            self.hub.breaks(format!("operator {} ({}): {refused}", self.at, self.name));
        }
    }

    /// Splits for this operator on the thread of the owner, which then feeds it.
    pub(super) fn enter(&self, mut envelope: Envelope<P, E>) {
        envelope.content = self.prepare(envelope.content);
        self.hub.recount(&mut envelope);
        self.feed(envelope);
    }

    /// What a piece of work weighs, on average.
    pub(super) fn weight(&self) -> f64 {
        self.counters.weight()
    }

    /// As the scheduler sees it.
    pub(super) fn load(&self) -> Load {
        let waiting = self.counters.waiting();
        let beyond = self.next.as_ref().map_or_else(|| self.hub.ready(), |next| next.counters.waiting());
        self.counters.load(waiting, self.counters.unordered() + beyond, self.most)
    }
}
