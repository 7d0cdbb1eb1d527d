//! The worker threads of one process for one query and one generation.
//!
//! Owns the threads, their command queues and what they deposit when the generation ends. A group never
//! outlives its generation: a rollback, a join or a leave ends it and starts the next one with the bins
//! that it left in its [`Resident`].
//!
//! Departure: slices are 1,024 rows where something expands before a keyed step, which holds what a slice expands to
//! until the slice is complete. (On the batch host a Spark shuffle lies between, which spills.) What an engine's epoch
//! gives is frozen until the sink returns, in memory up to the staging budget, beyond it in files.

use std::collections::BTreeMap;
use std::error::Error as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use arrow_array::RecordBatch;
use crossbeam::channel::{Receiver, Sender, unbounded};
use penstock_balance::{Strategy, StrategyError};
use penstock_bins::{BinsError, Routing, range_of};
use penstock_dataflow::{BoxError, Endpoint, Waker, Worker};
use penstock_files::Range;
use penstock_pace::{Cadence, Migrated, Moves, Order, Refusal, StepReport};

use super::build::{self, Counts, Shared};
use super::feed::{PartitionRows, deal};
use super::record::Record;
use super::resident::Resident;
use super::rows::{Keep, Rows};
use super::stats::{Gauges, GroupStats, StepLoads};
use super::worker::{Command, End, Release, Told, WorkerLoop};
use crate::callback::{CallError, Callbacks};
use crate::error::OpError;
use crate::plan::Plan;

/// How to run a plan for one generation. Equal on all processes, but for the endpoints.
#[derive(Clone)]
pub struct GroupConfig {
    /// The compiled plan.
    pub plan: Arc<Plan>,
    /// The user's functions that the plan calls by number.
    pub callbacks: Arc<dyn Callbacks>,
    /// log2 of the number of bins, 0 to 20.
    pub bits: u8,
    /// For each keyed step the absolute worker index of every bin, and of the parts of those that are split.
    pub routings: Vec<Routing>,
    /// The next epoch.
    pub epoch: u64,
    /// Watermark reached so far, microseconds.
    pub watermark: Option<i64>,
    /// Slices that may be under way beyond the probe (default 8).
    pub window: u32,
    /// Rows of a slice at most (default 65,536; 16,384 with functions of the user, so that a migration waits less for one; 1,024 where
    /// they expand before a keyed step).
    pub slice_rows: usize,
    /// Keep what a rollback to the start of the epoch under way needs.
    pub journal: bool,
    /// Tell with each epoch what it changed ([`Record`]); only with a journal, whose marks say since when.
    pub record: bool,
    /// Bytes of state that each worker may have under way to other processes (default 8 MiB); see [`penstock_bins::Config`].
    pub ship_bytes: usize,
    /// The kinds of rows beside the output that are kept, by the numbers of [`Beside`](crate::Beside); others are only counted. None: all.
    pub wanted: Option<Vec<usize>>,
    /// Takes outputs, and rows beside them, as they are made; without it they stay in memory until their epoch is done, or are told.
    pub keep: Option<Arc<dyn Keep>>,
    /// Tell outputs as they are made, by [`Event::Rows`], and wait while the host has not [taken](Group::taken) them: for plans
    /// whose epochs may expand beyond memory.
    pub eager: bool,
    /// Begin an epoch when the one before is complete everywhere. Without it several workers overlap epochs, and what one tells of an epoch
    /// may come before what another tells of the one before.
    pub one_by_one: bool,
    /// The first worker is fed everything and takes all results; it deals rows to the others, which may join and leave while it runs
    /// ([`Crew`](super::Crew)). Not with a journal.
    pub gather: bool,
}

impl GroupConfig {
    /// A configuration for `workers` founding workers with `2^bits` bins dealt out evenly, from epoch 0.
    #[must_use]
    pub fn founding(plan: Arc<Plan>, callbacks: Arc<dyn Callbacks>, bits: u8, workers: u32) -> Self {
        let owners = (0..1_u32 << bits).map(|bin| bin % workers).collect::<Vec<_>>();
        let routing = Routing::from_owners(owners).expect("a power of two");
        let routings = vec![routing; plan.keyed_ops()];
        let slice_rows = match (plan.expands() && plan.keyed_ops() > 0, plan.has_calls()) {
            // A keyed step holds what becomes of a slice until the slice has gone through.
            (true, _) => 1 << 10,
            (false, true) => 1 << 14,
            (false, false) => 1 << 16,
        };
        GroupConfig {
            plan,
            callbacks,
            bits,
            routings,
            epoch: 0,
            watermark: None,
            window: 8,
            slice_rows,
            journal: false,
            record: false,
            ship_bytes: penstock_bins::SHIP_BYTES,
            wanted: None,
            keep: None,
            eager: false,
            one_by_one: false,
            gather: false,
        }
    }
}

/// What a group reports, in order per worker.
#[derive(Debug)]
pub enum Event {
    /// A local worker has completed an epoch: nothing of it can come any more.
    EpochDone {
        /// The epoch.
        epoch: u64,
        /// Absolute index of the worker.
        worker: usize,
        /// Output of the epoch on this worker.
        outputs: Vec<Rows>,
        /// Late rows and rows of side outputs that are kept, as [`Beside::pack`](crate::Beside::pack) makes them.
        beside: Vec<Rows>,
        /// How many of them there were, whether or not they are kept.
        counts: Counts,
        /// What the epoch changed in the bins that are here at its end; empty unless [`GroupConfig::record`].
        record: Vec<Record>,
    },
    /// Output of an epoch that is not complete; only where the host asked for it.
    Rows {
        /// The epoch.
        epoch: u64,
        /// Absolute index of the worker.
        worker: usize,
        /// The rows.
        rows: RecordBatch,
        /// Whether they go beside the output; then they may be of several kinds.
        beside: bool,
        /// What they count against the worker until they are [taken](Group::taken).
        bytes: usize,
    },
    /// Every step of a migration has been applied (leader's process only).
    MigrationDone {
        /// As given to [`Group::migrate`].
        handle: u64,
        /// Bins moved.
        moved: u32,
        /// Bytes of state that this process sent or received for it; what other processes exchange it cannot see.
        bytes: u64,
        /// The steps.
        steps: Vec<StepReport>,
    },
    /// A step of a migration was refused, or all of one that was prepared too late (leader's process only): nothing of it moved, and no step
    /// behind it was issued. The group goes on.
    MigrationRefused {
        /// As given to [`Group::migrate`].
        handle: u64,
        /// Why.
        error: Refusal,
        /// The steps that were completed before.
        steps: Vec<StepReport>,
    },
    /// A worker has ended with an error; the whole group is ending.
    Failed {
        /// Why.
        error: HostError,
    },
}

/// Why a group cannot start or go on.
#[derive(Clone, Debug, thiserror::Error)]
pub enum HostError {
    /// The dataflow failed: an operator, a panic, a lost peer, a broken protocol.
    #[error(transparent)]
    Dataflow(penstock_dataflow::Error),
    /// A function of the user raised.
    #[error(transparent)]
    Call(CallError),
    /// A step refuses the data.
    #[error("{0}")]
    Data(Arc<dyn std::error::Error + Send + Sync>),
    /// The bins do not fit the routing, or the protocol of moving them was broken.
    #[error(transparent)]
    Bins(Arc<BinsError>),
    /// The resident state lacks bins that this process should own.
    #[error("keyed step {op} lacks the state of {} bins (first: {:?}) that this process should own", bins.len(), bins.first())]
    MissingBins {
        /// Keyed step, counted from 0.
        op: usize,
        /// The bins.
        bins: Vec<u32>,
    },
    /// The system gives the process no further thread.
    #[error("no thread for worker {worker}: {message}")]
    Thread {
        /// Absolute index of the worker.
        worker: usize,
        /// What the system says.
        message: String,
    },
    /// An order-sensitive epoch has more rows than there are data slices.
    #[error(
        "row {rows} of one epoch of an order-sensitive flow does not fit: at most 2147483645 rows; make batches smaller (for example maxFilesPerTrigger)"
    )]
    EpochTooLarge {
        /// Position of the row in the epoch.
        rows: u64,
    },
    /// Input after the end of the input.
    #[error("the input has ended: nothing can be pushed after finish()")]
    Finished,
    /// `routings` do not fit the plan.
    #[error(
        "owners are given for {given} keyed steps of {bins} bins; the plan has {steps} keyed steps of {expected} bins"
    )]
    Owners {
        /// Routings given.
        given: usize,
        /// Bins of the offending one.
        bins: usize,
        /// Keyed steps of the plan.
        steps: usize,
        /// Bins expected.
        expected: usize,
    },
}

/// A group that did not start.
#[derive(Debug)]
pub struct NotStarted {
    /// Why.
    pub error: HostError,
    /// The bins, as they were.
    pub resident: Resident,
}

impl From<penstock_dataflow::Error> for HostError {
    fn from(error: penstock_dataflow::Error) -> Self {
        let penstock_dataflow::Error::Operator { source, .. } = &error else { return HostError::Dataflow(error) };
        if let Some(error) = source.downcast_ref::<OpError>() {
            return match error {
                OpError::Call(call) => HostError::Call(call.clone()),
                _ => HostError::Data(source.clone()),
            };
        }
        match source.downcast_ref::<BinsError>() {
            Some(error) => error.clone().into(),
            None => HostError::Dataflow(error),
        }
    }
}

impl From<OpError> for HostError {
    fn from(error: OpError) -> Self {
        HostError::Data(Arc::new(error))
    }
}

impl From<BoxError> for HostError {
    fn from(error: BoxError) -> Self {
        HostError::Data(Arc::from(error))
    }
}

impl From<BinsError> for HostError {
    fn from(error: BinsError) -> Self {
        // The user's code may be the reason.
        let mut cause: Option<&(dyn std::error::Error + 'static)> = error.source();
        while let Some(reason) = cause {
            if let Some(call) = reason.downcast_ref::<CallError>() {
                return HostError::Call(call.clone());
            }
            cause = reason.source();
        }
        HostError::Bins(Arc::new(error))
    }
}

/// A worker as its group sees it.
struct WorkerHandle {
    index: usize,
    commands: Sender<Command>,
    waker: Waker,
    gauges: Arc<Gauges>,
    thread: JoinHandle<Option<HostError>>,
}

impl WorkerHandle {
    fn tell(&self, command: Command) {
        // A send fails only when the thread has ended; its error has been told as an event.
        let _ = self.commands.send(command);
        self.waker.wake();
    }
}

/// See the module. Dropping a group without [`stop`](Group::stop) ends its threads and loses its bins.
pub struct Group {
    config: GroupConfig,
    shared: Arc<Shared>,
    workers: Vec<WorkerHandle>,
    stopping: Arc<AtomicBool>,
}

impl Group {
    /// Starts one thread per endpoint, with the bins of `resident` that `config.routings` give to them.
    ///
    /// # Errors
    /// `MissingBins` when `resident` is not fresh and lacks a bin, which is not loaded either; `Owners` when the routings do not fit. The bins come back
    /// as they were.
    pub fn start(
        config: GroupConfig,
        endpoints: Vec<Endpoint>,
        mut resident: Resident,
        events: Sender<Event>,
    ) -> Result<Group, Box<NotStarted>> {
        let local = endpoints.iter().map(Endpoint::index).collect::<Vec<_>>();
        let shared = match Shared::new(&config, &local, &mut resident) {
            Ok(shared) => Arc::new(shared),
            Err(error) => return Err(Box::new(NotStarted { error, resident })),
        };
        let mut group = Group { config, shared, workers: Vec::new(), stopping: Arc::new(AtomicBool::new(false)) };
        for endpoint in endpoints {
            let worker = endpoint.index();
            if let Err(error) = group.spawn(endpoint, events.clone()) {
                let error = HostError::Thread { worker, message: error.to_string() };
                let (bins, _) = group.stop(); // tables that no worker has taken are deposited by the last handle on them
                let resident = if resident.fresh { Resident::fresh() } else { bins };
                return Err(Box::new(NotStarted { error, resident }));
            }
        }
        Ok(group)
    }

    fn spawn(&mut self, endpoint: Endpoint, events: Sender<Event>) -> std::io::Result<()> {
        let index = endpoint.index();
        let (commands, inbox) = unbounded();
        let (send_waker, waker) = crossbeam::channel::bounded(1);
        let gauges = Arc::new(Gauges::new(&self.config.routings));
        let thread = Thread {
            config: self.config.clone(),
            shared: self.shared.clone(),
            inbox,
            events,
            gauges: gauges.clone(),
            stopping: self.stopping.clone(),
        };
        let thread = std::thread::Builder::new()
            .name(format!("penstock-{index}"))
            .spawn(move || thread.run(endpoint, &send_waker))?;
        let waker = waker.recv().expect("a worker sends its waker before anything can fail");
        self.workers.push(WorkerHandle { index, commands, waker, gauges, thread });
        Ok(())
    }

    /// Releases one epoch; epochs are released in ascending order. Then one `EpochDone` per local worker
    /// comes. `watermark` is the value reached at the end of the epoch, `i64::MAX` the end of the input.
    ///
    /// # Errors
    /// `EpochTooLarge`; nothing was released.
    pub fn release(&self, epoch: u64, inputs: Vec<PartitionRows>, watermark: Option<i64>) -> Result<(), HostError> {
        self.release_at(epoch, inputs, watermark, None)
    }

    /// Like [`release`](Group::release), with the processing time that functions with timeouts see.
    ///
    /// # Errors
    /// `EpochTooLarge`; nothing was released.
    pub fn release_at(
        &self,
        epoch: u64,
        inputs: Vec<PartitionRows>,
        watermark: Option<i64>,
        clock_ms: Option<i64>,
    ) -> Result<(), HostError> {
        self.tell_release(epoch, inputs, Some(End { watermark, clock_ms }))
    }

    /// Releases rows of an epoch that goes on in the next release: `EpochDone` comes as for any, but operators see neither a watermark nor
    /// an end of the epoch. Not with a journal, whose marks lie between epochs.
    ///
    /// # Errors
    /// `EpochTooLarge`; nothing was released.
    pub fn release_part(&self, epoch: u64, inputs: Vec<PartitionRows>) -> Result<(), HostError> {
        debug_assert!(!self.config.journal, "what a part leaves open would be marked as if it were complete");
        self.tell_release(epoch, inputs, None)
    }

    fn tell_release(&self, epoch: u64, inputs: Vec<PartitionRows>, end: Option<End>) -> Result<(), HostError> {
        let ordered = self.config.plan.needs_order();
        let dealt = deal(inputs, self.config.slice_rows, self.workers.len(), ordered)?;
        for (worker, slices) in self.workers.iter().zip(dealt) {
            worker.tell(Command::Release(Release { epoch, slices: slices.into(), end }));
        }
        Ok(())
    }

    /// Starts a migration; has an effect only in the process of worker 0. `MigrationDone` follows, or `MigrationRefused` when a bin
    /// or worker does not exist. Of several moves of one bin in a step the last counts, a step without moves is complete at once.
    /// How steps follow one another is said by a [`Cadence`], or the longest pause alone.
    pub fn migrate(&self, handle: u64, steps: Vec<Vec<(u32, u32)>>, cadence: impl Into<Cadence>) {
        if let Some(worker) = self.workers.first() {
            let (plan, cadence) = (Moves::Steps(steps), cadence.into());
            worker.tell(Command::Migrate(Order { handle, plan, cadence, at_epoch: None }));
        }
    }

    /// Like [`migrate`](Group::migrate), prepared for an epoch that is not released yet: the first step takes effect before any row of that epoch,
    /// whatever else is under way, and so does that of every other migration prepared for it. Called before the epoch is released.
    pub fn migrate_at(&self, epoch: u64, handle: u64, steps: Vec<Vec<(u32, u32)>>, cadence: impl Into<Cadence>) {
        if let Some(worker) = self.workers.first() {
            let (plan, cadence) = (Moves::Steps(steps), cadence.into());
            let order = Order { handle, plan, cadence, at_epoch: Some(epoch) };
            worker.tell(Command::Migrate(order));
        }
    }

    /// Like [`migrate_at`](Group::migrate_at), of bins that may move until then: those that are elsewhere when the epoch comes move, in
    /// steps that are planned then.
    ///
    /// # Errors
    /// A strategy with steps of no bins.
    pub fn prepare(
        &self,
        epoch: u64,
        handle: u64,
        moves: Vec<(u32, u32)>,
        strategy: Strategy,
        cadence: impl Into<Cadence>,
    ) -> Result<(), StrategyError> {
        strategy.check()?;
        if let Some(worker) = self.workers.first() {
            let (plan, cadence) = (Moves::Then(moves, strategy), cadence.into());
            let order = Order { handle, plan, cadence, at_epoch: Some(epoch) };
            worker.tell(Command::Migrate(order));
        }
        Ok(())
    }

    /// Splits and merges bins, all at one time between two epochs, when the migrations asked for before have ended. Told as a migration is. A bin and
    /// its parts are named as [`penstock_bins::number_of`] says.
    pub fn recut(&self, handle: u64, commands: Vec<penstock_bins::Command>) {
        if let Some(worker) = self.workers.first() {
            let (plan, cadence) = (Moves::Recut(commands), Cadence::default());
            let order = Order { handle, plan, cadence, at_epoch: None };
            worker.tell(Command::Migrate(order));
        }
    }

    /// All bins with their owners as the first local worker routes now, per keyed step, parts of bins that are split among them.
    #[must_use]
    pub fn bins(&self) -> Vec<Vec<(Range, u32)>> {
        self.workers.first().map(|worker| worker.gauges.bins()).unwrap_or_default()
    }

    /// Bytes of state of each bin that the local workers hold, and of each part, per keyed step, as of the figures of [`stats`](Self::stats), of which they are
    /// what [`WorkerStats::state_bytes`](super::WorkerStats::state_bytes) sums. A bin that is on its way may be told of by both workers, or by none.
    #[must_use]
    pub fn bin_bytes(&self) -> Vec<BTreeMap<Range, u64>> {
        let mut steps = Vec::new();
        for told in self.workers.iter().map(|worker| worker.gauges.bytes()) {
            steps.resize_with(told.len().max(steps.len()), BTreeMap::new);
            for (step, bins) in steps.iter_mut().zip(told) {
                let ranged = |(bin, bytes)| Some((range_of(bin, self.config.bits)?, bytes));
                bins.into_iter().filter_map(ranged).for_each(|(range, bytes)| {
                    let most: &mut u64 = step.entry(range).or_default();
                    *most = bytes.max(*most);
                });
            }
        }
        steps
    }

    /// The host has handed on rows that were told as [`Event::Rows`].
    pub fn taken(&self, worker: usize, bytes: usize) {
        if let Some(handle) = self.workers.iter().find(|handle| handle.index == worker) {
            handle.tell(Command::Taken(bytes));
        }
    }

    /// Lets a migration end after the step under way; `MigrationDone` tells the steps that were done. One that has ended, or is
    /// not known, is left alone.
    pub fn cancel(&self, handle: u64) {
        if let Some(worker) = self.workers.first() {
            worker.tell(Command::Cancel(handle));
        }
    }

    /// Counters now; samples and moves since the last call.
    #[must_use]
    pub fn stats(&self) -> GroupStats {
        let mut stats = GroupStats::default();
        for worker in &self.workers {
            worker.gauges.collect(&mut stats);
        }
        stats.moves = self.shared.drain_moves();
        stats.originals = self.shared.originals();
        stats
    }

    /// What each bin got and cost on the local workers since they began, per keyed step. Not a counter: as long as there are bins.
    #[must_use]
    pub fn loads(&self) -> Vec<StepLoads> {
        self.shared.loads()
    }

    /// Owner of each bin as the first local worker routes now, per keyed step; `u32::MAX` of one that is split. Not a counter: as long as there are bins.
    #[must_use]
    pub fn owners(&self) -> Vec<Vec<u32>> {
        self.workers.first().map(|worker| worker.gauges.owners()).unwrap_or_default()
    }

    /// `epoch` is complete everywhere, its output is in use, and it will not be undone: originals of bins that were kept for that
    /// go, now or as soon as their moves are complete.
    pub fn settle(&self, epoch: u64) {
        self.shared.settle(epoch);
    }

    /// The workers that take part as the first local worker sees it, ascending: all of them, unless they join and leave.
    #[must_use]
    pub fn members(&self) -> Vec<u32> {
        self.workers.first().map(|worker| worker.gauges.members()).unwrap_or_default()
    }

    /// Whether all threads have ended, after which [`stop`](Group::stop) does not block.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.workers.iter().all(|worker| worker.thread.is_finished())
    }

    /// Asks all workers to end at the next turn, without waiting for them.
    pub fn ask_to_stop(&self) {
        self.stopping.store(true, Ordering::Release);
        self.config.callbacks.stop();
        for worker in &self.workers {
            worker.tell(Command::Stop);
        }
    }

    /// Ends the threads and returns the bins, with the error that ended the group when there was one.
    /// Blocks while a user's function runs.
    #[must_use]
    pub fn stop(mut self) -> (Resident, Option<HostError>) {
        self.ask_to_stop();
        let mut failed = None;
        for worker in std::mem::take(&mut self.workers) {
            match worker.thread.join() {
                Ok(error) => failed = failed.or(error),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        (self.shared.collect(), failed)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.ask_to_stop();
    }
}

/// What a thread takes along.
struct Thread {
    config: GroupConfig,
    shared: Arc<Shared>,
    inbox: Receiver<Command>,
    events: Sender<Event>,
    gauges: Arc<Gauges>,
    stopping: Arc<AtomicBool>,
}

impl Thread {
    fn run(self, endpoint: Endpoint, waker: &Sender<Waker>) -> Option<HostError> {
        let mut worker = Worker::new(endpoint);
        let _ = waker.send(worker.waker());
        let index = worker.index();
        let error = match build::build(&mut worker, &self.config, &self.shared, None) {
            Ok(built) => match worker.bootstrap() {
                Ok(_) => {
                    let pace = build::pace(&self.config);
                    let mut worker = WorkerLoop::new(worker, built, pace, self.gauges.clone());
                    self.turns(index, &mut worker).err().map(HostError::from)
                }
                Err(error) => Some(error.into()),
            }, // dropping the worker's tables deposits their bins
            Err(error) => Some(error),
        };
        // A worker that ends first breaks off the others: after a stop that is no failure.
        let broken_off = |error: &HostError| {
            let echo = match error {
                HostError::Dataflow(_) => true,
                HostError::Call(call) => call.broken_off,
                _ => false,
            };
            echo && self.stopping.load(Ordering::Acquire)
        };
        let error = error.filter(|error| !broken_off(error));
        if let Some(error) = error.clone() {
            let _ = self.events.send(Event::Failed { error });
        }
        error
    }

    fn turns(&self, index: usize, worker: &mut WorkerLoop) -> Result<(), penstock_dataflow::Error> {
        loop {
            while let Ok(command) = self.inbox.try_recv() {
                worker.command(command);
            }
            // Blocking, not stepping: peers that need this worker wait as well, until the host takes what it was told.
            while worker.is_ahead() && !worker.stopped() {
                let Ok(command) = self.inbox.recv() else { return Ok(()) };
                worker.command(command);
            }
            if worker.stopped() {
                return Ok(());
            }
            let mut told = Vec::new();
            let result = worker.turn(&mut |item| told.push(item));
            let migrated = told.iter().any(|item| matches!(item, Told::Migrated(_)));
            if migrated {
                worker.refresh();
            }
            for item in told {
                self.tell(index, item);
            }
            // To park is to step once more: what comes then would be taken in behind what the host has not taken yet.
            if !result? && !worker.is_ahead() {
                worker.park()?;
            }
        }
    }

    fn tell(&self, worker: usize, told: Told) {
        let event = match told {
            Told::Epoch { epoch, outputs, beside, counts, record } => {
                Event::EpochDone { epoch, worker, outputs, beside, counts, record }
            }
            Told::Rows { epoch, rows, beside, bytes } => Event::Rows { epoch, worker, rows, beside, bytes },
            Told::Migrated(Migrated { handle, steps, refused: Some(error) }) => {
                Event::MigrationRefused { handle, error, steps }
            }
            Told::Migrated(migrated) => Event::MigrationDone {
                handle: migrated.handle,
                moved: migrated.steps.iter().map(|step| step.bins).sum(),
                bytes: self.shared.moved_bytes(),
                steps: migrated.steps,
            },
        };
        // A host that has gone no longer wants events.
        let _ = self.events.send(event);
    }
}
