//! Linear pipelines of operators whose output is that of a serial run, on many workers.
//!
//! Owns: [`Pipeline`], its [`Builder`], the operators' traits, and how the owner of a pipeline pushes and pulls. Invariants: outputs come in the
//! order of the inputs, one for each, an error in the place of the output it stands for; an operator with state works on one envelope at a time
//! (of each partition), in order; at most `in_flight` envelopes are inside, and no worker ever waits for another one or for the owner.
//!
//! Every operator has its own queue and its own reorder buffer, whose sink feeds the next one's queue: each alone keeps order, so
//! which worker serves which operator when ([`schedule`](crate::schedule)) is a matter of speed alone. Room is reserved when an envelope is
//! admitted, in every buffer at once; so nobody who emits finds the next queue full.
//!
//! Where handing work over costs more than it gains the pipeline runs on the thread that pulls, past all queues, one envelope at a time;
//! see [`Mode`]. What operators give at the end of the input is asked for on that thread, too, once everything has left.
//!
//! After "Scaling Ordered Stream Processing on Shared-Memory Multicores". Departures: envelopes of items instead of tuples; room reserved at
//! admission; the owner's thread where handing over costs more than it gains; the producer of a queue
//! is whoever emits from the buffer before it; an input that fails fills its slot with the error.

mod builder;
mod core;
mod envelope;
mod fallback;
mod gate;
mod hub;
mod payload;
mod places;
mod sleepers;
mod stage;
mod stats;
mod sync;
mod worker;

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam::sync::Parker;

pub use builder::{BuildError, Builder, MOST_PARTITIONS, MOST_WORKERS, NoSuchName, Options, QueueKind, ReorderKind};
pub use hub::InHand;
pub use payload::{Fault, Partitioned, Payload, Stateful, Turn};
pub use stats::{OperatorStats, Stats};

use self::core::Core;
use envelope::{Content, Envelope, Kept, Label, Outcome};
use fallback::{Fallback, Lane};
use gate::Share;

/// How long a thread that waits for room goes without looking again.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// What the fallback says: the workers; the caller, and to measure each envelope; the caller, and to measure one of [`SOME`].
const WORKERS: u8 = 0;
const MEASURED: u8 = 1;
const SETTLED: u8 = 2;
const SOME: u64 = 8;

/// Where operators run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Mode {
    /// On the workers where that is faster, as measured while running; else on the thread that pulls.
    #[default]
    Auto,
    /// On the thread that pulls, one envelope at a time.
    Inline,
    /// On the workers.
    Parallel,
}

/// What follows an error.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum OnError {
    /// The end: outputs before it come, then the error, then the end; all else is dropped, what is in hand once it is finished.
    #[default]
    Stop,
    /// What comes after it.
    GoOn,
}

/// A payload that was not taken.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotTaken<P> {
    /// There is no room now: pull first.
    #[error("the pipeline is full: pull an output first")]
    Full(P),
    /// The input was closed, or the pipeline has ended.
    #[error("the input of the pipeline is closed")]
    Closed(P),
}

impl<P> fmt::Debug for NotTaken<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if matches!(self, Self::Full(_)) { "Full" } else { "Closed" })
    }
}

impl<P> NotTaken<P> {
    /// The payload.
    pub fn into_inner(self) -> P {
        match self {
            Self::Full(payload) | Self::Closed(payload) => payload,
        }
    }
}

/// What a pull brings.
#[derive(Debug)]
pub enum Pulled<P, E> {
    /// The output of this number.
    Output {
        /// Its position in the input; outputs of the end come after all inputs.
        number: u64,
        /// What the last operator gave.
        payload: P,
    },
    /// The error in the place of this number.
    Error {
        /// Its position in the input.
        number: u64,
        /// Which operator failed, and how.
        error: Fault<E>,
    },
    /// Nothing came in time.
    Nothing,
    /// Nothing will come any more.
    End,
}

/// A running pipeline. Dropping it aborts it and waits for what is in hand.
///
/// Any thread may push, pull, and ask; pushes take turns, and so do pulls.
pub struct Pipeline<P: Payload, E: Send + 'static> {
    core: Arc<Core<P, E>>,
    options: Options,
    ingress: Mutex<Ingress<P>>,
    egress: Mutex<Egress<P, E>>,
    fallback: Mutex<Fallback>,
    advice: AtomicU8,
    /// How many envelopes it wants inside at most.
    most_inside: AtomicUsize,
    threads: Mutex<Vec<JoinHandle<()>>>,
    pulled: AtomicU64,
    inline: AtomicU64,
    nudged: AtomicBool,
    process: u32,
}

struct Ingress<P> {
    number: u64,
    ticket: u64,
    closed: bool,
    /// For the thread that pulls: at most one.
    backlog: VecDeque<(u64, Share, Kept<P>)>,
    /// Whether what is inside is for the thread that pulls, or was.
    inline: bool,
    /// Of the workers that were not started yet.
    parkers: Vec<Parker>,
    most_bytes: usize,
}

struct Egress<P, E> {
    /// What operators gave at the end of the input.
    last: VecDeque<(u64, Kept<Outcome<P, E>>)>,
    finished: bool,
    ended: bool,
}

impl<P, E> Egress<P, E> {
    /// Ends; what is left is dropped once nothing is locked, since what a payload does at its end may pull.
    fn end(mut egress: MutexGuard<'_, Self>) {
        egress.ended = true;
        let last = std::mem::take(&mut egress.last);
        drop(egress);
        drop(last);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<P: Payload, E: Send + 'static> Pipeline<P, E> {
    fn new(core: Core<P, E>, options: Options, parkers: Vec<Parker>) -> Self {
        let ingress = Ingress {
            number: 0,
            ticket: 0,
            closed: false,
            backlog: VecDeque::new(),
            inline: false,
            parkers,
            most_bytes: 0,
        };
        let egress = Egress { last: VecDeque::new(), finished: false, ended: false };
        Self {
            core: Arc::new(core),
            fallback: Mutex::new(Fallback::new(options.workers)),
            advice: AtomicU8::new(MEASURED),
            most_inside: AtomicUsize::new(usize::MAX),
            options,
            ingress: Mutex::new(ingress),
            egress: Mutex::new(egress),
            threads: Mutex::new(Vec::new()),
            pulled: AtomicU64::new(0),
            inline: AtomicU64::new(0),
            nudged: AtomicBool::new(false),
            process: std::process::id(),
        }
    }

    fn lane(&self) -> Lane {
        match self.options.mode {
            _ if self.options.workers <= 1 => Lane::Caller,
            Mode::Inline => Lane::Caller,
            Mode::Parallel => Lane::Workers,
            Mode::Auto if self.advice.load(Ordering::Relaxed) == WORKERS => Lane::Workers,
            Mode::Auto => Lane::Caller,
        }
    }

    /// Tells the fallback, and keeps what it says where no lock is needed to read it.
    fn advise(&self, tell: impl FnOnce(&mut Fallback)) {
        let mut fallback = lock(&self.fallback);
        tell(&mut fallback);
        self.most_inside.store(fallback.most_inside(), Ordering::Relaxed);
        let advice = match fallback.lane() {
            Lane::Workers => WORKERS,
            Lane::Caller if fallback.is_settled() => SETTLED,
            Lane::Caller => MEASURED,
        };
        self.advice.store(advice, Ordering::Relaxed);
    }

    /// Whether this pipeline chooses between the lanes.
    fn chooses(&self) -> bool {
        self.options.mode == Mode::Auto && self.options.workers > 1
    }

    /// Takes an envelope in. Never waits, and no thread of the pipeline ever waits for what it does.
    ///
    /// # Errors
    /// When it is full or closed; the payload comes back.
    pub fn try_push(&self, payload: P) -> Result<(), NotTaken<P>> {
        let (core, hub) = (&*self.core, &*self.core.hub);
        let mut ingress = lock(&self.ingress);
        if ingress.closed || hub.stops() {
            return Err(NotTaken::Closed(payload));
        }
        let share = Share { items: payload.items(), bytes: payload.bytes() };
        let lane = self.lane();
        let inside = hub.gate.envelopes();
        let alone = inside == 0;
        if ((lane == Lane::Caller || ingress.inline) && !alone) || inside >= self.most_inside.load(Ordering::Relaxed) {
            return Err(NotTaken::Full(payload));
        }
        if lane == Lane::Workers {
            while !core.fits(ingress.ticket) {
                // Everything was pulled, and who emitted it is about to say so in its buffer.
                if !alone {
                    return Err(NotTaken::Full(payload));
                }
                std::thread::yield_now();
            }
        }
        if !hub.gate.admit(share) {
            return Err(NotTaken::Full(payload));
        }
        let number = ingress.number;
        ingress.number += 1;
        ingress.most_bytes = ingress.most_bytes.max(hub.gate.held().bytes);
        if lane == Lane::Workers && self.start(&mut ingress) {
            let ticket = ingress.ticket;
            ingress.ticket += 1;
            ingress.inline = false;
            if alone && self.chooses() {
                self.advise(|fallback| fallback.starts(hub.now_ns()));
            }
            let weight = share.items.max(1);
            let label = Label { number, ticket, share, entered: share.items, work_ns: 0, weight };
            core.enters(ticket);
            core.stages[0].enter(label, payload);
        } else {
            ingress.inline = true;
            ingress.backlog.push_back((number, share, Kept::new(payload)));
            // Who waits looks into the backlog under this lock, so a look is enough here.
            if hub.owners_wait() {
                drop(ingress);
                hub.wake_owners();
            }
        }
        Ok(())
    }

    /// Starts the workers if that was not done; false when none could be started.
    fn start(&self, ingress: &mut Ingress<P>) -> bool {
        let mut threads = lock(&self.threads);
        for (worker, parker) in std::mem::take(&mut ingress.parkers).into_iter().enumerate() {
            let core = Arc::clone(&self.core);
            let builder = std::thread::Builder::new().name(format!("penstock-o{worker}"));
            // Fewer workers than asked for are no error: the others do the work.
            threads.extend(builder.spawn(move || worker::run(&core, worker, &parker)));
        }
        !threads.is_empty()
    }

    /// Takes an envelope in, waiting for room. Where one thread pushes and pulls, nothing makes room meanwhile.
    ///
    /// # Errors
    /// When it is full until the time is over, or closed; the payload comes back.
    pub fn push_wait(&self, payload: P, timeout: Duration) -> Result<(), NotTaken<P>> {
        let deadline = Instant::now().checked_add(timeout);
        let mut payload = payload;
        loop {
            let before = self.pulled.load(Ordering::Acquire);
            payload = match self.try_push(payload) {
                Err(NotTaken::Full(payload)) => payload,
                other => return other,
            };
            let now = Instant::now();
            if deadline.is_some_and(|deadline| now >= deadline) {
                return Err(NotTaken::Full(payload));
            }
            let look = now + LOOK_AGAIN;
            let until = deadline.map_or(look, |deadline| deadline.min(look));
            self.core.hub.wait(Some(until), || self.pulled.load(Ordering::Acquire) != before || self.core.hub.stops());
        }
    }

    /// Brings the next output, waiting for it. Runs operators on this thread where that is faster; see [`Mode`].
    pub fn pull(&self, timeout: Duration) -> Pulled<P, E> {
        if let Some(pulled) = self.try_pull() {
            return pulled;
        }
        let deadline = Instant::now().checked_add(timeout);
        loop {
            if let Some(pulled) = self.try_pull() {
                return pulled;
            }
            if self.nudged.swap(false, Ordering::AcqRel) || deadline.is_some_and(|deadline| Instant::now() >= deadline)
            {
                return Pulled::Nothing;
            }
            let hub = &self.core.hub;
            let nudged = || self.nudged.load(Ordering::Acquire);
            hub.wait(deadline, || nudged() || hub.has_output() || hub.stops() || self.has_inline() || self.is_over());
        }
    }

    /// Ends the wait of one `pull`, or of the next one that would wait: it brings nothing.
    pub fn nudge(&self) {
        self.nudged.store(true, Ordering::Release);
        self.core.hub.wake_owners();
    }

    fn has_inline(&self) -> bool {
        !lock(&self.ingress).backlog.is_empty()
    }

    /// Whether all that was pushed has been pulled and no more will come.
    fn is_over(&self) -> bool {
        lock(&self.ingress).closed && self.core.hub.gate.envelopes() == 0
    }

    fn try_pull(&self) -> Option<Pulled<P, E>> {
        let hub = &self.core.hub;
        let mut egress = lock(&self.egress);
        if egress.ended {
            return Some(Pulled::End);
        }
        if let Some(why) = hub.broken() {
            Egress::end(egress);
            let number = self.pulled.load(Ordering::Relaxed);
            return Some(Pulled::Error { number, error: Fault::Broken { why: why.to_owned() } });
        }
        if hub.stops() {
            Egress::end(egress);
            return Some(Pulled::End);
        }
        if let Some(Envelope { label: Label { number, share, entered, work_ns, .. }, content }) = hub.take() {
            // Workers drop what waits, behind the stop, and may have dropped what was before this.
            if hub.stops() {
                drop(egress);
                drop(content);
                hub.gate.leave(share);
                return None;
            }
            let Content::Data(outcome) = content else { unreachable!("only a partitioned operator gets parts") };
            self.leaves(share, Lane::Workers, entered, Some(work_ns));
            return Some(self.hand_over(egress, number, outcome.into_inner()));
        }
        let waiting = lock(&self.ingress).backlog.pop_front();
        if let Some((number, share, payload)) = waiting {
            let (outcome, work_ns) = self.run(number, payload.into_inner());
            self.leaves(share, Lane::Caller, share.items, work_ns);
            self.inline.fetch_add(1, Ordering::Relaxed);
            return Some(self.hand_over(egress, number, outcome));
        }
        // In this order: what was dropped behind the stop has left, too.
        if !self.is_over() || hub.stops() {
            return None;
        }
        if !egress.finished {
            egress.finished = true;
            self.finish(&mut egress);
            if hub.stops() {
                // Who stopped it meanwhile could not drop what operators gave at their end.
                Egress::end(egress);
                return Some(Pulled::End);
            }
        }
        match egress.last.pop_front() {
            Some((number, outcome)) => Some(self.hand_over(egress, number, outcome.into_inner())),
            None => {
                egress.ended = true;
                hub.stop();
                Some(Pulled::End)
            }
        }
    }

    /// All operators on this thread; how long it took, if that was measured.
    fn run(&self, number: u64, payload: P) -> (Outcome<P, E>, Option<u64>) {
        let hub = &self.core.hub;
        let settled = self.advice.load(Ordering::Relaxed) == SETTLED;
        let mut clock = (!settled || number.is_multiple_of(SOME)).then(|| hub.now_ns());
        let began = clock;
        if let Some(now) = clock
            && self.chooses()
        {
            self.advise(|fallback| fallback.starts(now));
        }
        let turn = Turn { worker: self.options.workers, number };
        let stands_for = if settled { SOME } else { 1 };
        let mut stages = self.core.stages.iter();
        let outcome = stages.try_fold(payload, |payload, stage| stage.inline(turn, payload, &mut clock, stands_for));
        (outcome, clock.zip(began).map(|(now, began)| now - began))
    }

    /// What operators give at the end of the input; each passes the operators behind.
    fn finish(&self, egress: &mut Egress<P, E>) {
        let mut clock = Some(self.core.hub.now_ns());
        let mut number = lock(&self.ingress).number;
        for (at, stage) in self.core.stages.iter().enumerate() {
            let turn = |number| Turn { worker: self.options.workers, number };
            if let Some(outcome) = stage.finish(turn(number)) {
                let behind = &self.core.stages[at + 1..];
                let pass = |payload| {
                    behind.iter().try_fold(payload, |payload, stage| stage.inline(turn(number), payload, &mut clock, 1))
                };
                let outcome = outcome.and_then(pass);
                egress.last.push_back((number, Kept::new(outcome)));
                number += 1;
            }
        }
    }

    fn leaves(&self, share: Share, lane: Lane, items: usize, work_ns: Option<u64>) {
        let hub = &self.core.hub;
        hub.gate.leave(share);
        self.pulled.fetch_add(1, Ordering::Release);
        hub.wake_owners();
        if let Some(work_ns) = work_ns
            && self.chooses()
        {
            self.advise(|fallback| fallback.done(hub.now_ns(), lane, items, work_ns));
        }
    }

    fn hand_over(&self, egress: MutexGuard<'_, Egress<P, E>>, number: u64, outcome: Outcome<P, E>) -> Pulled<P, E> {
        match outcome {
            Ok(payload) => Pulled::Output { number, payload },
            Err(error) => {
                if self.options.on_error == OnError::Stop {
                    Egress::end(egress);
                    self.abort();
                }
                Pulled::Error { number, error }
            }
        }
    }

    /// Says that no more input comes. What is inside still comes out, then what operators give at the end, then the end.
    pub fn close(&self) {
        lock(&self.ingress).closed = true;
        self.core.hub.wake_owners();
    }

    /// Stops: what workers have in hand they finish; all else is dropped, by them as they end, so that nothing is left behind a
    /// [`join`](Self::join); pulls bring the end.
    pub fn abort(&self) {
        let hub = &self.core.hub;
        let mut ingress = lock(&self.ingress);
        ingress.closed = true;
        let dropped = std::mem::take(&mut ingress.backlog);
        drop(ingress);
        hub.stop();
        for (_, share, payload) in dropped {
            drop(payload);
            hub.gate.leave(share);
        }
        // One that pulls at the moment does so the next time.
        let last = self.egress.try_lock().map(|mut egress| std::mem::take(&mut egress.last));
        drop(last);
    }

    /// The figures so far.
    pub fn stats(&self) -> Stats {
        let (core, hub) = (&*self.core, &*self.core.hub);
        let operators = core.stages.iter().map(|stage| stage.counters.stats(&stage.name, stage.load())).collect();
        let held = hub.gate.held();
        let (pushed, most_bytes) = {
            let ingress = lock(&self.ingress);
            (ingress.number, ingress.most_bytes)
        };
        Stats {
            operators,
            in_hand: hub.in_hand(),
            pushed,
            pulled: self.pulled.load(Ordering::Relaxed),
            inline: self.inline.load(Ordering::Relaxed),
            in_flight: hub.gate.envelopes(),
            items: held.items,
            bytes: held.bytes,
            most_bytes,
            threads: lock(&self.threads).len(),
            parallel: self.lane() == Lane::Workers,
            scheduler: core.scheduler.name(),
        }
    }
}

impl<P: Payload, E: Send + 'static> Drop for Pipeline<P, E> {
    fn drop(&mut self) {
        self.abort();
        self.join();
    }
}

impl<P: Payload, E: Send + 'static> Pipeline<P, E> {
    /// Waits until the workers have ended, which they do behind `abort`, or when all has come out behind `close`.
    pub fn join(&self) {
        // In a process that was forked from the one that made it, its threads do not exist.
        if std::process::id() != self.process {
            return;
        }
        let threads = std::mem::take(&mut *lock(&self.threads));
        for thread in threads {
            // An operator may hold the last reference to its own pipeline.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
        // What a push had under way when the pipeline broke may have come in behind the workers.
        if self.core.hub.stops() {
            self.core.clear();
        }
    }
}

impl<P: Payload, E: Send + 'static> fmt::Debug for Pipeline<P, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.core.stages.iter().map(|stage| &*stage.name).collect::<Vec<_>>();
        f.debug_struct("Pipeline").field("operators", &names).field("options", &self.options).finish_non_exhaustive()
    }
}
