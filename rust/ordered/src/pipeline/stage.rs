//! One operator of a pipeline: its queue, its reorder buffer, its figures, and how it works on an envelope.
//!
//! Invariants: envelopes are fed in the order of their tickets by one thread at a time (the ingress, or who emits from the buffer before);
//! `workers <= most`; what the buffer before emits is in the queue before a worker is woken; no panic of an operator, or of a payload
//! that is asked or dropped, leaves this module: an envelope that was taken from the queue goes on, with the panic as its error, or, behind
//! the stop, with nothing. No payload is dropped within a sink: what drops it may end the pipeline, which waits for workers that send.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};

use crossbeam::queue::SegQueue;

use super::envelope::{Assembly, Content, DonePart, Envelope, Kept, Label, Outcome, Part, Work, said};
use super::gate::Share;
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
                Err(Fault::Panicked { operator: self.at, name: Arc::clone(&self.name), message: said(panic) })
            }
        }
    }

    /// Asks a payload what it weighs.
    fn weigh(&self, payload: P) -> Outcome<(P, Share), E> {
        // Kept outside of the guard: if it panics, it is not dropped in the middle of that.
        let payload = Kept::new(payload);
        let share = self.guard(|| Ok(Share { items: payload.get().items(), bytes: payload.get().bytes() }))?;
        Ok((payload.into_inner(), share))
    }

    /// What this operator gave, and its weight; 0 where that cannot be said.
    fn weighed(&self, outcome: Outcome<P, E>) -> (Outcome<P, E>, Share) {
        match outcome.and_then(|payload| self.weigh(payload)) {
            Ok((payload, share)) => (Ok(payload), share),
            Err(fault) => (Err(fault), Share::default()),
        }
    }

    /// Adds an envelope to the queue. Callers take turns, in the order of tickets.
    pub(super) fn feed(&self, envelope: Envelope<P, E>) {
        match envelope.content {
            Content::Parts(parts) => {
                self.counters.came();
                // The last part gets the reference that the others were made from: who is last has to find it among the parts.
                let count = parts.len();
                let assemblies = std::iter::repeat_n(Arc::new(Assembly::new(envelope.label, count)), count);
                for (at, (assembly, part)) in assemblies.zip(parts).enumerate() {
                    self.add(part.partition, part.share.items.max(1), Work::Part(assembly, at, part));
                }
            }
            Content::Data(_) => {
                self.counters.came();
                // What is not split needs no partition's order: it failed, or is empty.
                let partition = match &self.kind {
                    Kind::Partitioned(_, partitions) => (envelope.label.ticket % *partitions as u64) as usize,
                    _ => 0,
                };
                self.add(partition, envelope.label.weight, Work::Whole(envelope));
            }
            Content::Dropped => self.send(envelope),
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
            Input::Keyed(queue) => {
                let mut done = 0;
                // Each call is for what one partition has now, and that is often one piece.
                while done < quantum {
                    match queue.consume(quantum - done, operate) {
                        0 => break,
                        more => done += more,
                    }
                }
                done
            }
        }
    }

    /// Prepares what goes to this operator, and weighs that again: splits it if it works by partition.
    fn prepare(&self, outcome: Outcome<P, E>, share: Share) -> (Content<P, E>, Share) {
        let whole = |(outcome, share)| (Content::Data(Kept::new(outcome)), share);
        let (operator, payload) = match (&self.kind, outcome) {
            (Kind::Partitioned(operator, _), Ok(payload)) => (operator, payload),
            (_, outcome) => return whole((outcome, share)),
        };
        match self.split(payload) {
            Ok(parts) if parts.is_empty() => whole(self.weighed(self.guard(|| operator.merge(Vec::new())))),
            Ok(parts) => {
                let mut share = Share::default();
                for part in &parts {
                    share.items += part.share.items;
                    share.bytes += part.share.bytes;
                }
                (Content::Parts(parts), share)
            }
            Err(fault) => whole((Err(fault), Share::default())),
        }
    }

    fn split(&self, payload: P) -> Outcome<Vec<Part<P>>, E> {
        let Kind::Partitioned(operator, partitions) = &self.kind else { unreachable!("nothing else splits") };
        let parts = self.guard(|| operator.split(payload))?;
        // From here on each is dropped alone, whatever happens.
        let parts = parts.into_iter().map(|(partition, part)| (partition, Kept::new(part))).collect::<Vec<_>>();
        if let Some((partition, _)) = parts.iter().find(|(partition, _)| partition >= partitions) {
            let (partition, partitions) = (*partition, *partitions);
            return Err(Fault::NoSuchPartition {
                operator: self.at,
                name: Arc::clone(&self.name),
                partition,
                partitions,
            });
        }
        let weighed = parts.into_iter().map(|(partition, part)| {
            let (part, share) = self.weigh(part.into_inner())?;
            Ok(Part { partition, payload: Kept::new(part), share })
        });
        weighed.collect()
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
                    let outcome = outcome.into_inner().and_then(|payload| self.call(turn, payload));
                    envelope.content = Content::Data(Kept::new(outcome));
                }
                let spent_ns = self.hub.lap(now);
                envelope.label.work_ns += spent_ns;
                self.counters.worked(items, spent_ns);
                let Content::Data(outcome) = envelope.content else { unreachable!("whole envelopes have no parts") };
                self.finished(envelope.label, outcome.into_inner(), items, now);
            }
            Work::Part(assembly, at, part) => {
                let Part { partition: _, payload, share: Share { items, .. } } = part;
                let number = assembly.label.number;
                self.hub.holds(worker, self.at, number, *now);
                self.counters.taken(items.max(1));
                let Kind::Partitioned(operator, _) = &self.kind else {
                    unreachable!("only partitioned operators get parts")
                };
                let payload = payload.into_inner();
                let outcome = self.guard(|| operator.operate(Turn { worker, number }, partition, payload));
                let work_ns = self.hub.lap(now);
                self.counters.worked(items, work_ns);
                let _ = assembly.done.push(DonePart { at, partition, outcome: Kept::new(outcome), work_ns });
                if let Some(assembly) = Arc::into_inner(assembly) {
                    self.merge(assembly, now);
                }
            }
        }
        self.hub.lets_go(worker);
    }

    /// Drops a piece from the queue, behind the stop.
    pub(super) fn discard(&self, work: Work<P, E>) {
        match work {
            Work::Whole(Envelope { label, content }) => {
                self.counters.taken(label.weight);
                drop(content);
                self.dropped(label);
            }
            Work::Part(assembly, _, part) => {
                self.counters.taken(part.share.items.max(1));
                drop(part);
                if let Some(Assembly { label, done }) = Arc::into_inner(assembly) {
                    drop(done);
                    self.dropped(label);
                }
            }
        }
    }

    fn dropped(&self, label: Label) {
        let mut envelope = Envelope { label, content: Content::Dropped };
        self.hub.recount(&mut envelope, Share::default());
        self.send(envelope);
    }

    /// The last part of an envelope is done.
    fn merge(&self, assembly: Assembly<P, E>, now: &mut u64) {
        // Others of its parts may have been dropped.
        if self.hub.stops() {
            let Assembly { label, done } = assembly;
            drop(done);
            return self.dropped(label);
        }
        let parts = assembly.parts();
        let mut label = assembly.label;
        let items = label.share.items;
        label.work_ns += parts.iter().map(|part| part.work_ns).sum::<u64>();
        let outcome = self.put_together(parts.into_iter().map(|part| (part.partition, part.outcome)));
        let merge_ns = self.hub.lap(now);
        label.work_ns += merge_ns;
        self.counters.aside(merge_ns);
        self.finished(label, outcome, items, now);
    }

    /// Merges parts, or gives the error of the first that failed.
    fn put_together(&self, outcomes: impl IntoIterator<Item = (usize, Kept<Outcome<P, E>>)>) -> Outcome<P, E> {
        let Kind::Partitioned(operator, _) = &self.kind else { unreachable!("only partitioned operators get parts") };
        let mut parts = Vec::new();
        let mut failed = None;
        for (partition, outcome) in outcomes {
            match outcome.into_inner() {
                Ok(part) => parts.push((partition, Kept::new(part))),
                // Each on its own way out.
                Err(fault) if failed.is_some() => drop(Kept::new(fault)),
                Err(fault) => failed = Some(fault),
            }
        }
        match failed {
            Some(fault) => Err(fault),
            None => {
                let parts = parts.into_iter().map(|(partition, part)| (partition, part.into_inner())).collect();
                self.guard(|| operator.merge(parts))
            }
        }
    }

    /// Works on a whole envelope on the thread of the owner, also by partition, past the queues. Reads the clock if it is given; then
    /// the envelope stands for so many.
    pub(super) fn inline(&self, turn: Turn, payload: P, clock: &mut Option<u64>, stands_for: u64) -> Outcome<P, E> {
        let (payload, share) = self.weigh(payload)?;
        if let Some(now) = clock {
            self.hub.holds(turn.worker, self.at, turn.number, *now);
        }
        let (outcome, made) = self.weighed(self.call(turn, payload));
        let each = clock.as_mut().map(|now| (self.hub.lap(now), stands_for));
        self.counters.passed(share.items, made.items, each);
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
            Kind::Partitioned(operator, _) => {
                let done = self.split(payload)?.into_iter().map(|Part { partition, payload, .. }| {
                    let payload = payload.into_inner();
                    (partition, Kept::new(self.guard(|| operator.operate(turn, partition, payload))))
                });
                // All of them, as on workers: the state of every partition sees its part.
                let done = done.collect::<Vec<_>>();
                self.put_together(done)
            }
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
                    Some((partition, Kept::new(end)))
                });
                let ends = ends.collect::<Vec<_>>();
                (!ends.is_empty()).then(|| self.put_together(ends))
            }
        }
    }

    /// Sends an envelope that this operator is done with.
    fn finished(&self, label: Label, outcome: Outcome<P, E>, items: usize, now: &mut u64) {
        let (outcome, share) = self.weighed(outcome);
        self.counters.gave(items, share.items);
        let Some(next) = &self.next else {
            return self.leave(Envelope { label, content: Content::Data(Kept::new(outcome)) }, share);
        };
        let (content, share) = next.prepare(outcome, share);
        let split_ns = self.hub.lap(now);
        next.counters.aside(split_ns);
        let label = Label { work_ns: label.work_ns + split_ns, ..label };
        self.leave(Envelope { label, content }, share);
    }

    fn leave(&self, mut envelope: Envelope<P, E>, share: Share) {
        self.hub.recount(&mut envelope, share);
        self.counters.made(envelope.label.weight);
        self.send(envelope);
    }

    fn send(&self, envelope: Envelope<P, E>) {
        // A ticket is admitted only when it fits into every buffer, so this is our own mistake, and no output would ever come.
        if let Err(refused) = self.ring.send(envelope.label.ticket, envelope) {
            self.hub.breaks(format!("operator {} ({}): {refused}", self.at, self.name));
        } else if let Some(why) = self.ring.broken() {
            self.hub.breaks(format!("operator {} ({}): {why}", self.at, self.name));
        }
    }

    /// Splits for this operator on the thread of the owner, which then feeds it.
    pub(super) fn enter(&self, label: Label, payload: P) {
        let (content, share) = self.prepare(Ok(payload), label.share);
        let mut envelope = Envelope { label, content };
        self.hub.recount(&mut envelope, share);
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::super::{Builder, Options};
    use super::*;

    struct One;

    impl Payload for One {
        fn items(&self) -> usize {
            1
        }

        fn bytes(&self) -> usize {
            8
        }
    }

    /// Three turns of a worker at the one operator, with a hundred envelopes before it: the numbers of what it takes.
    fn turns(builder: Builder<One, ()>) -> Vec<Vec<u64>> {
        let pipeline = builder.build(Options { workers: 2, ..Options::default() }).expect("good options");
        let stage = &pipeline.core.stages[0];
        for number in 0..100 {
            let share = Share { items: 1, bytes: 8 };
            stage.enter(Label { number, ticket: number, share, entered: 1, work_ns: 0, weight: 1 }, One);
        }
        let turn = || {
            let mut numbers = Vec::new();
            let done = stage.consume(64, &mut |_, work| match work {
                Work::Whole(envelope) => numbers.push(envelope.label.number),
                Work::Part(assembly, ..) => numbers.push(assembly.label.number),
            });
            assert_eq!(done, numbers.len());
            numbers
        };
        vec![turn(), turn(), turn()]
    }

    #[test]
    fn a_turn_is_a_quantum_also_where_there_is_state() {
        let expected: [Vec<u64>; 3] = [(0..64).collect(), (64..100).collect(), Vec::new()];
        assert_eq!(turns(Builder::new().stateless("free", |_, one| Ok(one))), expected);
        assert_eq!(turns(Builder::new().stateful("kept", |_, one| Ok(one))), expected);
        let next = AtomicUsize::new(0);
        let split = move |one| Ok(vec![(next.fetch_add(1, Ordering::Relaxed) % 3, one)]);
        let parted =
            Builder::new().partitioned("parted", 3, split, |_, _, one| Ok(one), |mut parts| Ok(parts.remove(0).1));
        assert_eq!(turns(parted), expected);
    }
}
