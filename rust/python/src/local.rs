//! A flow on worker threads of this process: [`LocalRun`].
//!
//! Each pushed batch is one epoch, of one source, in one piece or several. The watermark moves at its end: max(old, greatest event time -
//! lateness), the least over the sources that have not ended, so lateness depends on the input alone, not on threads, timing or the pieces. Or all of them
//! are one epoch (`whole`), as the input of a batch job is: then nothing depends on how the input is cut into batches, and no row is late. Results of a
//! batch are handed out when all workers have completed it, in order and by worker within it; of flows whose epochs may expand beyond memory as they are
//! made, behind all of the batch before: no worker begins a batch before that is complete everywhere.
//!
//! Any number of Python threads may call a `LocalRun` at once. Whoever waits takes the next event of the workers and
//! applies it to the shared books; the lock on them is taken only while detached from the interpreter and never held
//! while waiting.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use arrow_array::RecordBatch as Batch;
use crossbeam::channel::{Receiver, RecvTimeoutError, Sender, TryRecvError, bounded, select, unbounded};
use penstock_bins::{Command, Range, Strategy, number_of, range_of};
use penstock_dataflow::fabric;
use penstock_plan::host::{
    Cadence, Counts, Event, Group, GroupConfig, GroupStats, HostError, PartitionRows, Refusal, Resident, Rows,
    StepLoads, StepReport, Watermarks,
};
use penstock_plan::{Plan, Source};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::arrow::{RecordBatch, import_batch};
use crate::calls::PyCalls;
use crate::dataflow::DataflowSeats;
use crate::enter::{enter, timeout};
use crate::errors::{self, Kind, Problem};
use crate::fork::Owner;
use crate::plan;

const MAX_WORKERS: usize = 1024;

/// Worker threads of this process that run one flow.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct LocalRun {
    owner: Owner,
    inner: Option<Box<Inner>>,
}

struct Inner {
    plan: Arc<Plan>,
    workers: usize,
    /// Whether the workers that compute are in processes that join and leave.
    gathers: bool,
    bits: u8,
    ahead: usize,
    events: Receiver<Event>,
    /// Wakes who waits, and what says so to one `take`.
    nudges: (Sender<()>, Receiver<()>),
    nudged: AtomicBool,
    /// How many wait for an event.
    waiting: AtomicUsize,
    books: Mutex<Books>,
}

/// What is known about the run.
struct Books {
    /// None when closed.
    group: Option<Group>,
    /// Whether all that is pushed is one epoch, of which rows have no order.
    whole: bool,
    next_epoch: u64,
    watermarks: Watermarks,
    /// Processing time of the last epoch, milliseconds since 1970.
    clock_ms: i64,
    /// Released and not complete, by epoch.
    open: BTreeMap<u64, Epoch>,
    /// Complete, or told before it is, and not taken.
    ready: VecDeque<Ready>,
    /// Told of epochs behind the first one that is open: a worker has yet to tell that this is complete. It needs no other for that, so those that
    /// wait until this is taken hold nobody up.
    early: BTreeMap<u64, Vec<Ready>>,
    /// Rows that went beside the output, of epochs that are done at all workers or some.
    counts: Counts,
    /// The last epoch was released.
    finished: bool,
    /// Failures told so far; each worker tells at most one. None are kept when closed: an exception of Python's has the frames that it went through, and with
    /// them this run.
    failures: Vec<HostError>,
    /// Whether one was told, closed or not.
    failed: bool,
    next_migration: u64,
    /// None while under way.
    migrations: HashMap<u64, Option<Result<Report, Refusal>>>,
}

/// An epoch under way.
struct Epoch {
    /// What it counts of what may be under way.
    pieces: usize,
    /// Its output so far, by worker.
    done: BTreeMap<usize, (Vec<Batch>, Vec<Batch>)>,
}

/// A batch on its way in.
struct Input {
    rows: PartitionRows,
    /// Its greatest event time.
    reached: Option<i64>,
    /// Sources of which something waits to be pushed.
    at_hand: Vec<usize>,
    /// How long nobody has looked at the sources, all in all.
    away_ms: i64,
}

/// An output that nobody has taken yet.
struct Ready {
    kind: &'static str,
    batch: Batch,
    /// Who waits for its being taken, and what it counts.
    told: Option<(usize, usize)>,
}

#[derive(Clone)]
struct Report {
    moved: u32,
    bytes: u64,
    steps: Vec<StepReport>,
}

impl Books {
    fn apply(&mut self, event: Event, workers: usize) {
        match event {
            Event::EpochDone { epoch, worker, outputs, beside, counts, .. } => {
                self.counts.late += counts.late;
                self.counts.sides.iter_mut().zip(counts.sides).for_each(|(all, rows)| *all += rows);
                if let Some(open) = self.open.get_mut(&epoch) {
                    let here = |rows: Vec<Rows>| rows.into_iter().map(Rows::into_here).collect::<Vec<_>>();
                    open.done.insert(worker, (here(outputs), here(beside)));
                }
                // Epochs complete in order on each worker, so the first open one completes first.
                while let Some(entry) = self.open.first_entry() {
                    if let Some(early) = self.early.remove(entry.key()) {
                        self.ready.extend(early);
                    }
                    if entry.get().done.len() < workers {
                        break;
                    }
                    let (rows, beside): (Vec<_>, Vec<_>) = entry.remove().done.into_values().unzip();
                    let kinds = [("rows", rows), ("beside", beside)];
                    for (kind, batches) in kinds {
                        let full = batches.into_iter().flatten().filter(|batch| batch.num_rows() > 0);
                        self.ready.extend(full.map(|batch| Ready { kind, batch, told: None }));
                    }
                }
            }
            Event::Rows { epoch, worker, rows, beside, bytes } => {
                let kind = if beside { "beside" } else { "rows" };
                let ready = Ready { kind, batch: rows, told: Some((worker, bytes)) };
                let first = self.open.keys().next().copied().filter(|_| !self.whole);
                match first.is_none_or(|first| epoch <= first) {
                    true => self.ready.push_back(ready),
                    false => self.early.entry(epoch).or_default().push(ready),
                }
            }
            Event::MigrationDone { handle, moved, bytes, steps } => {
                self.migrations.insert(handle, Some(Ok(Report { moved, bytes, steps })));
            }
            Event::MigrationRefused { handle, error, .. } => {
                self.migrations.insert(handle, Some(Err(error)));
            }
            Event::Failed { error } => {
                self.failed = true;
                if self.group.is_some() {
                    self.failures.push(error);
                }
            }
        }
    }

    /// Pieces of the epochs that are not complete.
    fn under_way(&self) -> usize {
        self.open.values().map(|epoch| epoch.pieces).sum()
    }

    /// Lets workers go on that wait for their outputs to be taken.
    fn let_go(&mut self) {
        let told = self.ready.iter_mut().chain(self.early.values_mut().flatten());
        for (worker, bytes) in told.filter_map(|ready| ready.told.take()) {
            if let Some(group) = &self.group {
                group.taken(worker, bytes);
            }
        }
    }

    /// The error that ended the run, once it is known which worker failed first hand.
    fn failure(&self, workers: usize, ended: bool) -> Option<HostError> {
        let told_by_all = ended || self.failures.len() >= workers;
        // A user's error is the cause; "aborted" and "peer lost" are what the others saw of it.
        let rank = |error: &HostError| match error {
            HostError::Call(_) => 0,
            HostError::Dataflow(
                penstock_dataflow::Error::Aborted { .. } | penstock_dataflow::Error::PeerLost { .. },
            ) => 2,
            _ => 1,
        };
        let best = self.failures.iter().min_by_key(|error| rank(error))?;
        (told_by_all || rank(best) < 2).then(|| best.clone())
    }
}

impl Inner {
    fn check_moves(&self, moves: &[(u32, u32)]) -> PyResult<()> {
        let (bins, workers) = (1_u32 << self.bits, self.workers);
        // Whether a part is there is known when its turn comes.
        // Of workers that join and leave, control knows who is there.
        let absent = |worker: u32| !self.gathers && worker as usize >= workers;
        let wrong = |&&(bin, worker): &&(u32, u32)| range_of(bin, self.bits).is_none() || absent(worker);
        moves.iter().find(wrong).map_or(Ok(()), |(bin, worker)| {
            let about =
                format!("bin {bin} cannot move to worker {worker}: there are {bins} bins and {workers} workers");
            Err(errors::raise(Kind::Config, &about))
        })
    }

    fn source(&self, number: usize) -> PyResult<&Source> {
        let sources = self.plan.sources();
        sources.get(number).ok_or_else(|| {
            errors::raise(Kind::Config, &format!("source {number} is not there: the flow has {}", sources.len()))
        })
    }

    /// Applies `first` and what else the workers have told. Who waits for that looks again: it may be what he waits for.
    fn apply(&self, books: &mut Books, first: Option<Event>) {
        let mut told = false;
        for event in first.into_iter().chain(self.events.try_iter()) {
            books.apply(event, self.workers);
            told = true;
        }
        if told && self.waiting.load(Ordering::Acquire) > 0 {
            let _ = self.nudges.0.try_send(());
        }
    }

    fn with<T>(&self, work: impl FnOnce(&mut Books) -> T) -> Result<T, Problem> {
        self.books.lock().map(|mut books| work(&mut books)).map_err(|_| Problem::Poisoned("LocalRun"))
    }

    /// Applies what the workers have told, waiting up to `wait` for something, until `ready` is satisfied.
    fn step<T>(
        &self,
        wait: Duration,
        ready: &mut impl FnMut(&Inner, &mut Books) -> Result<Option<T>, Problem>,
    ) -> Result<Option<T>, Problem> {
        let mut look = |first: Option<Event>, ended: bool| {
            self.with(|books| {
                self.apply(books, first);
                let outcome = ready(self, books)?;
                if outcome.is_none() {
                    if let Some(error) = books.failure(self.workers, ended) {
                        return Err(Problem::Host(Box::new(error)));
                    }
                    if books.group.is_none() {
                        return Err(Problem::Closed("LocalRun"));
                    }
                }
                Ok(outcome)
            })?
        };
        if let Some(outcome) = look(None, false)? {
            return Ok(Some(outcome));
        }
        // Who does not wait takes no nudge of one who does.
        if wait.is_zero() {
            return match self.events.try_recv() {
                Ok(event) => look(Some(event), false),
                Err(TryRecvError::Empty) => Ok(None),
                Err(TryRecvError::Disconnected) => over(look(None, true)?),
            };
        }
        self.waiting.fetch_add(1, Ordering::AcqRel);
        let told = select! {
            recv(self.events) -> event => event.map_err(|_| RecvTimeoutError::Disconnected),
            recv(self.nudges.1) -> _ => Err(RecvTimeoutError::Timeout),
            default(wait) => Err(RecvTimeoutError::Timeout),
        };
        self.waiting.fetch_sub(1, Ordering::AcqRel);
        match told {
            Ok(event) => look(Some(event), false),
            Err(RecvTimeoutError::Timeout) => look(None, false),
            Err(RecvTimeoutError::Disconnected) => over(look(None, true)?),
        }
    }
}

/// What was waited for, when all threads have ended and no failure was told.
fn over<T>(outcome: Option<T>) -> Result<Option<T>, Problem> {
    outcome.map(Some).ok_or(Problem::Ended("LocalRun"))
}

#[pymethods]
impl LocalRun {
    #[new]
    #[pyo3(signature = (plan, calls, workers=1, bits=8, journal=false, ahead=4, whole=false, seats=None, wanted=None))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn new(
        py: Python<'_>,
        plan: &str,
        calls: &Bound<'_, PyAny>,
        workers: usize,
        bits: u8,
        journal: bool,
        ahead: usize,
        whole: bool,
        seats: Option<&DataflowSeats>,
        wanted: Option<Vec<usize>>,
    ) -> PyResult<Self> {
        if !(1..=MAX_WORKERS).contains(&workers) {
            return Err(errors::raise(Kind::Config, &format!("workers must be in 1..={MAX_WORKERS}, got {workers}")));
        }
        if bits > 20 {
            return Err(errors::raise(Kind::Config, &format!("bits must be at most 20, got {bits}")));
        }
        if ahead == 0 {
            return Err(errors::raise(Kind::Config, "ahead must be at least 1"));
        }
        if whole && journal {
            return Err(errors::raise(
                Kind::Config,
                "whole=True has one epoch and so nothing to go back to: leave journal out",
            ));
        }
        let plan = Arc::new(plan::compile(plan)?);
        let gathers = seats.is_some();
        if gathers && (journal || workers != 1) {
            let about = "a run with seats feeds one worker, which keeps no journal: leave workers and journal out";
            return Err(errors::raise(Kind::Config, about));
        }
        let endpoints = match seats {
            Some(seats) => {
                let first = seats.first(py).ok_or_else(|| errors::raise(Kind::Value, "the first seat is taken"))?;
                vec![first]
            }
            None => fabric::threads(workers),
        };
        let callbacks = PyCalls::new(calls)?;
        let mut config = GroupConfig::founding(plan.clone(), callbacks, bits, workers as u32);
        config.journal = journal;
        config.gather = gathers;
        config.wanted = wanted;
        // What an epoch expands to may be more than memory holds: it is handed out as it comes.
        // Of several workers what windows give stands in the order of the workers, when all have ended the epoch.
        config.eager = plan.is_metered() || (workers == 1 && plan.overlaps());
        config.one_by_one = config.eager && !whole;
        let (sender, events) = unbounded();
        let group = py
            .detach(|| Group::start(config, endpoints, Resident::fresh(), sender))
            .map_err(|refused| Problem::Host(Box::new(refused.error)))?;
        let books = Mutex::new(Books {
            group: Some(group),
            whole,
            next_epoch: 0,
            watermarks: Watermarks::of(&plan),
            clock_ms: i64::MIN,
            open: BTreeMap::new(),
            ready: VecDeque::new(),
            early: BTreeMap::new(),
            counts: Counts { late: 0, sides: vec![0; plan.side_outputs().len()] },
            finished: false,
            failures: Vec::new(),
            failed: false,
            next_migration: 0,
            migrations: HashMap::new(),
        });
        let (nudges, nudged, waiting) = (bounded(1), AtomicBool::new(false), AtomicUsize::new(0));
        let inner = Inner { plan, workers, gathers, bits, ahead, events, nudges, nudged, waiting, books };
        Ok(Self { owner: Owner::here(), inner: Some(Box::new(inner)) })
    }

    /// Hands one batch of a source, which becomes one epoch or a part of the only one, to the workers, or the pieces of one in a list; waits while
    /// `ahead` pieces are under way. False, and nothing was pushed, when they wait themselves until outputs are taken. `clock_ms` is its processing
    /// time, by default the system's; it never goes back. The only epoch has none, as a batch job. Not silent, for `idle_after`, are sources of which
    /// something is `at_hand`, and no source was while nobody looked: `away_ms`, all in all.
    #[pyo3(signature = (batch, clock_ms=None, source=0, at_hand=None, away_ms=0))]
    fn push(
        &self,
        py: Python<'_>,
        batch: &Bound<'_, PyAny>,
        clock_ms: Option<i64>,
        source: usize,
        at_hand: Option<Vec<usize>>,
        away_ms: i64,
    ) -> PyResult<bool> {
        let inner = self.inner(py)?;
        let from = inner.source(source)?;
        if py.detach(|| inner.with(|books| books.watermarks.has_ended(source)))? {
            let message = format!("source '{}' has ended: nothing more of it can be pushed", from.name);
            return Err(errors::raise(Kind::Engine, &message));
        }
        let fitting = |piece: &Bound<'_, PyAny>| plan::fitting(&import_batch(piece)?, &from.schema);
        let pieces = match batch.cast::<PyList>() {
            Ok(pieces) => pieces.iter().map(|piece| fitting(&piece)).collect::<PyResult<Vec<_>>>()?,
            Err(_) => vec![fitting(batch)?],
        };
        let times = from.event_time.iter().flat_map(|event_time| pieces.iter().map(|piece| event_time.max_us(piece)));
        let reached = times.max().flatten();
        let batches = pieces.into_iter().map(Into::into).collect();
        let input = PartitionRows { source: source as u8, partition: 0, batches, rows_before: 0 };
        let at_hand = at_hand.unwrap_or_default();
        at_hand.iter().try_for_each(|source| inner.source(*source).map(drop))?;
        self.release(py, Some(Input { rows: input, reached, at_hand, away_ms }), clock_ms)
    }

    /// No more batches of a source come: the watermark does not wait for it any more.
    fn end_source(&self, py: Python<'_>, source: usize) -> PyResult<()> {
        let inner = self.inner(py)?;
        inner.source(source)?;
        py.detach(|| inner.with(|books| books.watermarks.end(source)))?;
        Ok(())
    }

    /// Ends the input: the watermark becomes infinite, every window closes. Does not wait for the results; false as for `push`.
    #[pyo3(signature = (clock_ms=None))]
    fn finish(&self, py: Python<'_>, clock_ms: Option<i64>) -> PyResult<bool> {
        self.release(py, None, clock_ms)
    }

    /// The next output as ``("rows" | "beside", batch)``; None when `timeout` (seconds) is over, nothing more can come or somebody
    /// nudged.
    #[pyo3(signature = (timeout=None))]
    fn take(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<(&'static str, RecordBatch)>> {
        let inner = self.inner(py)?;
        let limit = self::timeout(timeout)?;
        let mut ready = |inner: &Inner, books: &mut Books| match books.ready.pop_front() {
            Some(Ready { kind, batch, told }) => {
                if let (Some((worker, bytes)), Some(group)) = (told, &books.group) {
                    group.taken(worker, bytes);
                }
                Ok(Some(Some((kind, batch))))
            }
            None if books.finished && books.open.is_empty() => Ok(Some(None)),
            None => Ok(inner.nudged.swap(false, Ordering::AcqRel).then_some(None)),
        };
        let taken = enter(py, limit, |wait| inner.step(wait, &mut ready))?.flatten();
        Ok(taken.map(|(kind, batch)| (kind, RecordBatch::new(batch))))
    }

    /// Rows of each side output in epochs that are done, whether or not they are kept.
    #[getter]
    fn side_rows(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        let inner = self.inner(py)?;
        Ok(py.detach(|| inner.with(|books| books.counts.sides.clone()))?)
    }

    /// Ends the wait of a `take`, or of the next one.
    fn nudge(&self, py: Python<'_>) -> PyResult<()> {
        let inner = self.inner(py)?;
        inner.nudged.store(true, Ordering::Release);
        let _ = inner.nudges.0.try_send(());
        Ok(())
    }

    /// Whether the input has ended and every result has been taken.
    #[getter]
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        let inner = self.inner(py)?;
        Ok(py.detach(|| {
            inner.with(|books| {
                for event in inner.events.try_iter() {
                    books.apply(event, inner.workers);
                }
                books.finished && books.open.is_empty() && books.ready.is_empty()
            })
        })?)
    }

    /// Starts moving bins: `steps` is a list of lists of ``(bin, worker)``, taken together as long as none pauses for longer than
    /// `max_pause` seconds, one by one without. With `drains` what waited when a step was complete is done before the next. Returns a handle
    /// for `wait_migration`.
    #[pyo3(signature = (steps, max_pause=None, drains=false))]
    fn migrate(
        &self,
        py: Python<'_>,
        steps: Vec<Vec<(u32, u32)>>,
        max_pause: Option<f64>,
        drains: bool,
    ) -> PyResult<u64> {
        let inner = self.inner(py)?;
        let cadence = Cadence { max_pause: timeout(max_pause)?, drains };
        steps.iter().try_for_each(|step| inner.check_moves(step))?;
        let started = py.detach(|| {
            inner.with(|books| {
                let group = books.group.as_ref().ok_or(Problem::Closed("LocalRun"))?;
                let handle = books.next_migration;
                group.migrate(handle, steps, cadence);
                books.next_migration += 1;
                books.migrations.insert(handle, None);
                Ok::<_, Problem>(handle)
            })
        })?;
        Ok(started?)
    }

    /// Prepares moves for an epoch that is not fed yet: ``(bin, worker)`` of bins that are elsewhere then, in steps that are planned then.
    /// Returns a handle for `wait_migration`.
    #[pyo3(signature = (at_epoch, moves, strategy, batch_bins, max_pause=None, drains=false))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn prepare(
        &self,
        py: Python<'_>,
        at_epoch: u64,
        moves: Vec<(u32, u32)>,
        strategy: &str,
        batch_bins: usize,
        max_pause: Option<f64>,
        drains: bool,
    ) -> PyResult<u64> {
        let inner = self.inner(py)?;
        let cadence = Cadence { max_pause: timeout(max_pause)?, drains };
        let refuse = |message: String| errors::raise(Kind::Config, &message);
        let strategy = Strategy::parse(strategy, batch_bins).map_err(|error| refuse(error.to_string()))?;
        inner.check_moves(&moves)?;
        let started = py.detach(|| {
            inner.with(|books| {
                let group = books.group.as_ref().ok_or(Problem::Closed("LocalRun"))?;
                if at_epoch < books.next_epoch {
                    return Ok(Err(books.next_epoch));
                }
                let handle = books.next_migration;
                group.prepare(at_epoch, handle, moves, strategy, cadence).expect("a strategy that was parsed");
                books.next_migration += 1;
                books.migrations.insert(handle, None);
                Ok::<_, Problem>(Ok(handle))
            })
        })??;
        started.map_err(|next| {
            refuse(format!("epoch {at_epoch} has passed: {next} is the first that something can be prepared for"))
        })
    }

    /// Splits bins by so many bits and merges others, between two epochs; each is ``(prefix, length)``. Returns a handle for
    /// `wait_migration`.
    fn recut(&self, py: Python<'_>, splits: Vec<((u32, u8), u8)>, merges: Vec<(u32, u8)>) -> PyResult<u64> {
        let inner = self.inner(py)?;
        if py.detach(|| inner.with(|books| books.whole))? && inner.plan.keyed().any(|keyed| keyed.waits_for_ends()) {
            return Err(errors::raise(
                Kind::Config,
                "rows wait in the bins of this flow for the end of the input, which is one epoch: bins can be split between two \
                 epochs only, so start the session with streaming=True",
            ));
        }
        let number = |(prefix, length): (u32, u8)| {
            let range = Range::new(prefix, length);
            range.and_then(|range| number_of(range, inner.bits)).ok_or_else(|| {
                let about = format!(
                    "({prefix}, {length}) is no bin: bins have {} to 20 bits, and prefixes below 2 to that",
                    inner.bits
                );
                errors::raise(Kind::Config, &about)
            })
        };
        let mut commands = Vec::new();
        for (bin, bits) in splits {
            commands.push(Command::Split { bin: number(bin)?, bits });
        }
        for bin in merges {
            commands.push(Command::Merge { bin: number(bin)? });
        }
        let started = py.detach(|| {
            inner.with(|books| {
                let group = books.group.as_ref().ok_or(Problem::Closed("LocalRun"))?;
                let handle = books.next_migration;
                group.recut(handle, commands);
                books.next_migration += 1;
                books.migrations.insert(handle, None);
                Ok::<_, Problem>(handle)
            })
        })?;
        Ok(started?)
    }

    /// All bins, of each keyed step: ``(prefix, length, worker)``.
    fn bins(&self, py: Python<'_>) -> PyResult<Vec<Vec<(u32, u8, u32)>>> {
        let plain = |(range, worker): (Range, u32)| (range.prefix(), range.length(), worker);
        self.of_group(py, |group| group.bins().into_iter().map(|step| step.into_iter().map(plain).collect()).collect())
    }

    /// Bytes of state of the bins that are here, of each keyed step: ``(prefix, length, bytes)``.
    fn bin_bytes(&self, py: Python<'_>) -> PyResult<Vec<Vec<(u32, u8, u64)>>> {
        let plain = |(range, bytes): (Range, u64)| (range.prefix(), range.length(), bytes);
        self.of_group(py, |group| {
            group.bin_bytes().into_iter().map(|step| step.into_iter().map(plain).collect()).collect()
        })
    }

    /// The workers that take part now, by index; the first is here, and all others compute where there are others.
    #[getter]
    fn members(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        self.of_group(py, Group::members)
    }

    /// Has workers go on that wait for their outputs to be taken: one that waits takes no part in joins and leaves.
    fn go_on(&self, py: Python<'_>) -> PyResult<()> {
        let inner = self.inner(py)?;
        py.detach(|| {
            inner.with(|books| {
                inner.apply(books, None);
                books.let_go();
            })
        })?;
        Ok(())
    }

    /// Whether the run has ended before its time.
    #[getter]
    fn failed(&self, py: Python<'_>) -> PyResult<bool> {
        let inner = self.inner(py)?;
        let failed = |books: &mut Books| {
            inner.apply(books, None);
            books.failed
        };
        Ok(py.detach(|| inner.with(failed))?)
    }

    /// The epoch that the next batch becomes.
    #[getter]
    fn next_epoch(&self, py: Python<'_>) -> PyResult<u64> {
        let inner = self.inner(py)?;
        Ok(py.detach(|| inner.with(|books| books.next_epoch))?)
    }

    /// Lets a migration end after the step under way; one that has ended is left alone.
    fn cancel_migration(&self, py: Python<'_>, handle: u64) -> PyResult<()> {
        let inner = self.inner(py)?;
        let told = py.detach(|| inner.with(|books| books.group.as_ref().map(|group| group.cancel(handle))))?;
        told.ok_or(Problem::Closed("LocalRun"))?;
        Ok(())
    }

    /// Waits for a migration: ``{"moved": bins, "bytes": n, "steps": [...]}``; None when `timeout` (seconds) is over.
    #[pyo3(signature = (handle, timeout=None))]
    fn wait_migration<'py>(
        &self,
        py: Python<'py>,
        handle: u64,
        timeout: Option<f64>,
    ) -> PyResult<Option<Bound<'py, PyDict>>> {
        let inner = self.inner(py)?;
        let limit = self::timeout(timeout)?;
        let mut ready = |_: &Inner, books: &mut Books| match books.migrations.get(&handle) {
            Some(None) => {
                // Whoever waits here takes nothing meanwhile: workers that wait for that would never move their bins.
                books.let_go();
                Ok(None)
            }
            Some(ended) => Ok(ended.clone()),
            None => Err(Problem::Unknown { what: "migration", handle }),
        };
        let Some(report) = enter(py, limit, |wait| inner.step(wait, &mut ready))? else {
            return Ok(None);
        };
        let report =
            report.map_err(|error| errors::raise(Kind::Engine, &format!("migration {handle} was refused: {error}")))?;
        let result = PyDict::new(py);
        result.set_item("moved", report.moved)?;
        result.set_item("bytes", report.bytes)?;
        let mut steps = Vec::with_capacity(report.steps.len());
        for report in report.steps {
            let entry = PyDict::new(py);
            entry.set_item("step", report.step)?;
            entry.set_item("bins", report.bins)?;
            entry.set_item("started_ns", report.started_ns)?;
            entry.set_item("ended_ns", report.ended_ns)?;
            entry.set_item("paused_ns", report.paused_ns)?;
            entry.set_item("epoch", report.epoch)?;
            steps.push(entry);
        }
        result.set_item("steps", steps)?;
        Ok(Some(result))
    }

    /// Counters of the workers and owners of the bins as JSON; latency samples and bin moves since the last call.
    fn stats(&self, py: Python<'_>) -> PyResult<String> {
        let inner = self.inner(py)?;
        let ask = |group: &Group| (group.stats(), group.owners(), group.loads());
        let told = py.detach(|| inner.with(|books| books.group.as_ref().map(ask)))?;
        let (stats, owners, loads) = told.ok_or(Problem::Closed("LocalRun"))?;
        told_as_json(&stats, &owners, &loads)
    }

    /// Stops the threads and drops the state. Harmless when done twice; after it every other method raises.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let inner = self.inner(py)?;
        let taken = py.detach(|| inner.with(|books| books.group.take()))?;
        let ended = taken.map_or(Ok(()), |group| {
            py.detach(|| group.ask_to_stop());
            // A worker inside a user's function ends when that returns; until then signals are served.
            enter(py, None, |wait| {
                match inner.events.recv_timeout(wait) {
                    Ok(_) => {}
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => return Ok(Some(())),
                }
                Ok::<_, Problem>(group.has_ended().then_some(()))
            })?;
            // What failed was told by the call that noticed it.
            let _ = py.detach(|| group.stop());
            Ok(())
        });
        // Also where an interrupt ended the wait. Dropped here, not under the lock: that may run code of the user's.
        let left = py.detach(|| {
            let told =
                inner.events.try_iter().filter(|event| matches!(event, Event::Failed { .. })).collect::<Vec<_>>();
            inner.with(|books| {
                books.failed |= !told.is_empty();
                (std::mem::take(&mut books.failures), told)
            })
        })?;
        drop(left);
        ended
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, pyo3::types::PyTuple>) -> PyResult<()> {
        self.close(py)
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(errors::no_pickle("LocalRun", "ship the flow and start a run where it is needed"))
    }
}

impl LocalRun {
    fn inner(&self, py: Python<'_>) -> PyResult<&Inner> {
        self.owner.check(py, "LocalRun")?;
        Ok(self.inner.as_ref().expect("only Drop takes it"))
    }

    /// What the workers are asked.
    fn of_group<T: Send>(&self, py: Python<'_>, ask: impl FnOnce(&Group) -> T + Send) -> PyResult<T> {
        let inner = self.inner(py)?;
        let told = py.detach(|| inner.with(|books| books.group.as_ref().map(ask)))?;
        Ok(told.ok_or(Problem::Closed("LocalRun"))?)
    }

    /// Releases an epoch when fewer than `ahead` pieces are under way: `None` is the last one. False when they wait for outputs to be taken.
    fn release(&self, py: Python<'_>, input: Option<Input>, clock_ms: Option<i64>) -> PyResult<bool> {
        let inner = self.inner(py)?;
        let last = input.is_none();
        let mut input = Some(input);
        let mut ready = |inner: &Inner, books: &mut Books| {
            if books.finished {
                return if last { Ok(Some(true)) } else { Err(Problem::Host(Box::new(HostError::Finished))) };
            }
            let failed = books.failure(inner.workers, false).is_some();
            if failed || books.group.is_none() || books.under_way() >= inner.ahead {
                // Pieces of a large epoch hold up nothing that is ready: it comes before what that epoch may fail with.
                let is_large = books.open.len() < inner.ahead;
                return Ok(books.ready.iter().any(|ready| is_large || ready.told.is_some()).then_some(false));
            }
            let (inputs, watermark) = match input.take().expect("released at most once") {
                Some(Input { rows, .. }) if books.whole => (vec![rows], None),
                Some(Input { rows, reached, at_hand, away_ms }) => {
                    let source = usize::from(rows.source);
                    books.clock_ms = books.clock_ms.max(clock_ms.unwrap_or_else(system_ms));
                    reached.into_iter().for_each(|time| books.watermarks.reach(source, time));
                    at_hand.into_iter().for_each(|source| books.watermarks.hear(source));
                    books.watermarks.tick(books.clock_ms.saturating_sub(away_ms));
                    (vec![rows], books.watermarks.now())
                }
                None => (Vec::new(), Some(i64::MAX)),
            };
            let group = books.group.as_ref().expect("checked above");
            let epoch = books.next_epoch;
            let pieces = inputs.iter().map(|input| input.batches.len()).sum::<usize>().max(1);
            let released = if books.whole {
                if last { group.release(epoch, inputs, watermark) } else { group.release_part(epoch, inputs) }
            } else {
                books.clock_ms = books.clock_ms.max(clock_ms.unwrap_or_else(system_ms));
                group.release_at(epoch, inputs, watermark, Some(books.clock_ms))
            };
            released.map_err(|error| Problem::Host(Box::new(error)))?;
            books.open.insert(epoch, Epoch { pieces, done: BTreeMap::new() });
            books.next_epoch += 1;
            books.finished = last;
            Ok(Some(true))
        };
        enter(py, None, |wait| inner.step(wait, &mut ready)).map(|released| released.unwrap_or_default())
    }
}

/// What the workers of a process tell, as JSON.
pub(crate) fn told_as_json(stats: &GroupStats, owners: &[Vec<u32>], loads: &[StepLoads]) -> PyResult<String> {
    let write = || -> serde_json::Result<String> {
        let mut told = serde_json::to_value(stats)?;
        told["owners"] = serde_json::to_value(owners)?;
        told["loads"] = serde_json::to_value(loads)?;
        Ok(told.to_string())
    };
    write().map_err(|error| errors::raise(Kind::Engine, &error.to_string()))
}

fn system_ms() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| since.as_millis() as i64)
}

impl Drop for LocalRun {
    fn drop(&mut self) {
        if self.owner.is_here() {
            // The finalizer holds the interpreter, so it must not wait for threads that may need it: tell them to end.
            let books = self.inner.as_mut().and_then(|inner| inner.books.get_mut().ok());
            if let Some(group) = books.and_then(|books| books.group.as_ref()) {
                group.ask_to_stop();
            }
            return;
        }
        // A forked child has the memory of the handle but not its threads; leave everything as it is.
        std::mem::forget(self.inner.take());
    }
}
