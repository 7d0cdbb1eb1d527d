//! The real [`Host`]: plans compiled and run by `penstock_plan` on a fabric of authenticated
//! streams.
//!
//! Owns the translation between the member's words and those of the engine: errors become
//! [`Failure`]s whose `kind` the driver maps to an exception. User callables come from the
//! [`Loader`], which alone knows how to read the attachment of a start.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use arrow_array::RecordBatch;
use arrow_schema::SchemaRef;
use crossbeam::channel::Sender;
use penstock_bins::{BinsError, Command, Routing, number_of};
use penstock_dataflow::fabric::{self, Duplex};
use penstock_dataflow::{Error as FlowError, FabricGuard, FabricTag};
use penstock_engine::{Range, Ranges, Recut};
use penstock_files::{File, Index};
use penstock_plan::host::{
    Cadence, Event, Group, GroupConfig, HostError, Keep, LoadError, Loaded, PartitionRows, Record, Resident, StepReport,
};
use penstock_plan::{Beside, CallError, Callbacks, OpError, Plan, PlanError, Unreadable};
use serde_json::{Value, json};

use crate::durable::{Segment, Source, Store, Use, damaged, unreadable};
use crate::error::{ClusterError, Failure};
use crate::host::{Host, HostEvent, Launch, not_durable};
use crate::member::Member;
use crate::session::{Keys, Limits, Stream};
use crate::spill::SpillError;

/// Turns the attachment of a start into the callables of a plan, and a checkpoint into a store.
pub trait Loader: Send + Sync {
    /// Reads what the driver wrote. Called on a thread of the query.
    fn load(&self, attachment: &[u8]) -> Result<Arc<dyn Callbacks>, CallError>;

    /// Bytes from which the driver can rebuild the original exception; empty when there is none.
    fn write_origin(&self, error: &CallError) -> Vec<u8> {
        let _ = error;
        Vec::new()
    }

    /// Opens a checkpoint, which is a URL or path. Called on a thread of the query, which waits for nothing else meanwhile.
    ///
    /// # Errors
    /// There is none for such a place, or it cannot be reached; or no state is durable here.
    fn store(&self, checkpoint: &str) -> Result<Arc<dyn Store>, Failure> {
        let _ = checkpoint;
        Err(not_durable())
    }
}

/// Runs queries with `penstock_plan`.
pub struct GroupHost {
    loader: Arc<dyn Loader>,
    links: fabric::Limits,
}

impl GroupHost {
    /// A host whose callables come from `loader`.
    pub fn new(loader: Arc<dyn Loader>) -> Self {
        GroupHost { loader, links: fabric::Limits::default() }
    }

    /// The same, giving up peers that are connected but hung half a time later than the registry does after `silence`:
    /// the registry says who it is.
    #[must_use]
    pub fn silent_after(self, silence: Duration) -> Self {
        let links = fabric::Limits::default();
        let (silence, beat) = (silence * 3 / 2, links.beat.min(silence / 6));
        GroupHost { links: fabric::Limits { beat, silence, stall: silence, ..links }, ..self }
    }

    fn call_failure(&self, error: &CallError) -> Failure {
        let failure = Failure::new("user_function", error.message.clone())
            .with("step", error.step.as_str())
            .with("file", error.file.as_str())
            .with("line", error.line)
            .with("row", error.row);
        Failure { attachment: self.loader.write_origin(error), ..failure }
    }

    fn plan_failure(error: &PlanError) -> Failure {
        Failure::new("plan", error.to_string())
    }

    fn op_failure(&self, error: &OpError) -> Failure {
        let message = error.to_string();
        match error {
            OpError::Call(call) => self.call_failure(call),
            OpError::NullKey { step, column, row } => Failure::new("null_key", message)
                .with("step", step.to_string())
                .with("column", column.as_str())
                .with("row", *row),
            OpError::Schema { step, .. } => Failure::new("schema", message).with("step", step.to_string()),
            OpError::Overflow { step, column, .. } | OpError::TooManyDistinct { step, column } => {
                Failure::new("data", message).with("step", step.to_string()).with("column", column.as_str())
            }
            OpError::Twice { step, key, row } => {
                Failure::new("data", message).with("step", step.to_string()).with("key", key.as_str()).with("row", *row)
            }
            OpError::EventTime { step, column, row, value } => Failure::new("data", message)
                .with("step", step.to_string())
                .with("column", column.as_str())
                .with("row", *row)
                .with("value", *value),
            _ => Failure::new("internal", message),
        }
    }

    fn flow_failure(&self, error: &FlowError) -> Failure {
        let message = error.to_string();
        match error {
            FlowError::Operator { name, worker, source } => {
                let failure = if let Some(op) = source.downcast_ref::<OpError>() {
                    self.op_failure(op)
                } else if let Some(call) = source.downcast_ref::<CallError>() {
                    self.call_failure(call)
                } else if let Some(spill) = source.downcast_ref::<SpillError>() {
                    spill.to_failure()
                } else {
                    // Also what failed in another process, which tells the details itself.
                    Failure::new("operator", message)
                };
                failure.with("operator", name.as_str()).with("worker", *worker)
            }
            FlowError::Panic { name, worker, .. } => {
                Failure::new("panic", message).with("operator", name.as_str()).with("worker", *worker)
            }
            FlowError::Aborted { worker, .. } => Failure::new("aborted", message).with("worker", *worker),
            FlowError::PeerLost { process, .. } => Failure::new("peer_lost", message).with("process", *process),
            FlowError::Protocol { process, .. } => Failure::new("protocol", message).with("process", *process),
            FlowError::TooLarge { bytes, limit } => {
                Failure::new("too_large", message).with("bytes", *bytes).with("limit", *limit)
            }
            _ => Failure::new("internal", message),
        }
    }

    fn failure(&self, error: &HostError) -> Failure {
        match error {
            HostError::Call(call) => self.call_failure(call),
            HostError::Data(data) => match data.downcast_ref::<OpError>() {
                Some(op) => self.op_failure(op),
                None => Failure::new("data", data.to_string()),
            },
            HostError::Dataflow(flow) => self.flow_failure(flow),
            HostError::Bins(bins) => Failure::new("state", bins.to_string()),
            HostError::MissingBins { op, bins } => {
                Failure::new("state", error.to_string()).with("op", *op).with("bins", bins.clone())
            }
            HostError::EpochTooLarge { rows } => Failure::new("epoch_too_large", error.to_string()).with("rows", *rows),
            other => Failure::new("internal", other.to_string()),
        }
    }

    /// A state does not take what a file has of it.
    fn refused(file: &str, operator: &str, error: &HostError) -> Failure {
        damaged(file, format_args!("has state of {operator} that is not taken: {error}"))
    }
}

/// A compiled plan with its callables.
pub struct Program {
    plan: Arc<Plan>,
    callbacks: Arc<dyn Callbacks>,
}

impl Program {
    fn source(&self, number: u8) -> Result<&penstock_plan::Source, Failure> {
        let sources = self.plan.sources();
        sources.get(usize::from(number)).ok_or_else(|| {
            let message = format!("there is no source {number}, only {} of them", sources.len());
            Failure::new("plan", message)
        })
    }
}

/// The workers of one generation and the threads of their mesh.
pub struct Running {
    group: Group,
    fabric: FabricGuard,
    /// Of the keyed steps, in their order.
    operators: Vec<String>,
    /// Of its bins.
    bits: u8,
}

impl Running {
    /// What the workers call a range of the launch, or a part of one: it was checked by who asks.
    fn number(&self, range: Range) -> u32 {
        number_of(range, self.bits).expect("no range is wider than a bin")
    }

    fn segment(&self, record: Record) -> Segment {
        let Record { op, range, base, chunks } = record;
        Segment { operator: self.operators[op].clone(), range, base, chunks }
    }
}

impl Host for GroupHost {
    type Program = Program;
    type Bins = Resident;
    type Loaded = Loaded;
    type Group = Running;
    type Event = Event;

    fn load(&self, plan: &Value, attachment: &[u8]) -> Result<Program, Failure> {
        let plan = Plan::from_json(&plan.to_string()).map_err(|error| Self::plan_failure(&error))?;
        let callbacks = self.loader.load(attachment).map_err(|error| self.call_failure(&error))?;
        Ok(Program { plan: Arc::new(plan), callbacks })
    }

    fn input_schema(&self, program: &Program, source: u8) -> Result<SchemaRef, Failure> {
        Ok(program.source(source)?.schema.clone())
    }

    fn output_schema(&self, program: &Program, beside: bool) -> SchemaRef {
        match beside {
            true => Beside::of(&program.plan).schema().clone(),
            false => program.plan.output_schema().clone(),
        }
    }

    fn max_event_time(&self, program: &Program, source: u8, batch: &RecordBatch) -> Result<Option<i64>, Failure> {
        Ok(program.source(source)?.event_time.as_ref().and_then(|column| column.max_us(batch)))
    }

    fn empty(&self) -> Resident {
        Resident::fresh()
    }

    fn nothing(&self) -> Resident {
        Resident::nothing()
    }

    fn inventory(&self, bins: &Resident, epoch: u64) -> Ranges {
        bins.inventory(epoch).into_iter().collect()
    }

    fn keys(&self, bins: &Resident) -> u64 {
        bins.keys()
    }

    fn start(
        &self,
        program: &Arc<Program>,
        launch: &Launch,
        mesh: Vec<Option<Stream>>,
        bins: Resident,
        keep: Arc<dyn Keep>,
        events: Sender<Event>,
    ) -> Result<Running, (Failure, Option<Resident>)> {
        let streams = mesh.into_iter().map(|stream| stream.map(|stream| Box::new(stream) as Box<dyn Duplex>)).collect();
        let routings = match routings(&program.plan, launch) {
            Ok(routings) => routings,
            Err(failure) => return Err((failure, Some(bins))),
        };
        let tag = FabricTag { query: launch.query_number(), generation: launch.stamp.generation };
        let (endpoints, fabric) = match fabric::processes_with(launch.process, launch.threads, streams, tag, self.links)
        {
            Ok(made) => made,
            Err(error) => return Err((self.flow_failure(&error), Some(bins))),
        };
        let workers = (launch.processes * launch.threads) as u32;
        let founding = GroupConfig::founding(program.plan.clone(), program.callbacks.clone(), launch.bits, workers);
        let config = GroupConfig {
            routings,
            epoch: launch.epoch,
            watermark: launch.watermark,
            journal: true,
            record: launch.checkpoint.is_some(),
            keep: Some(keep),
            window: launch.window.unwrap_or(founding.window),
            slice_rows: launch.slice_rows.unwrap_or(founding.slice_rows),
            ..founding
        };
        match Group::start(config, endpoints, bins, events) {
            Ok(group) => Ok(Running { group, fabric, operators: names(&program.plan), bits: launch.bits }),
            Err(refused) => Err((self.failure(&refused.error), Some(refused.resident))),
        }
    }

    fn translate(&self, running: &Running, event: Event) -> HostEvent {
        match event {
            Event::EpochDone { epoch, worker, outputs, beside, counts, record } => {
                let record = record.into_iter().map(|record| running.segment(record)).collect();
                HostEvent::EpochDone {
                    epoch,
                    worker,
                    rows: outputs,
                    beside,
                    late_rows: counts.late,
                    side_rows: counts.sides,
                    record,
                }
            }
            Event::Rows { .. } => unreachable!("only a host that asks for it is told rows of an epoch under way"),
            Event::MigrationDone { handle, moved, bytes, steps } => {
                let times = times(&steps);
                let report = json!({ "moved": moved, "bytes": bytes, "steps": step_reports(&steps) });
                HostEvent::MigrationDone { handle, times, report }
            }
            Event::MigrationRefused { handle, error, steps } => {
                let message =
                    format!("step {} of the migration was refused, nothing of it moved: {error}", steps.len());
                let failure = Failure::new("migration", message).with("step", steps.len());
                let moved: u32 = steps.iter().map(|step| step.bins).sum();
                let report = json!({ "moved": moved, "bytes": 0, "steps": step_reports(&steps) });
                let times = times(&steps);
                HostEvent::MigrationFailed { handle, times, report, failure }
            }
            Event::Failed { error } => HostEvent::Failed { failure: self.failure(&error) },
        }
    }

    fn release(
        &self,
        running: &Running,
        epoch: u64,
        inputs: Vec<PartitionRows>,
        watermark: Option<i64>,
        clock_ms: i64,
    ) -> Result<(), Failure> {
        running.group.release_at(epoch, inputs, watermark, Some(clock_ms)).map_err(|error| self.failure(&error))
    }

    fn migrate(
        &self,
        running: &Running,
        handle: u64,
        steps: Vec<Vec<(Range, u32)>>,
        cadence: Cadence,
        at_epoch: Option<u64>,
    ) {
        let number = |(range, worker)| (running.number(range), worker);
        let steps = steps.into_iter().map(|step| step.into_iter().map(number).collect()).collect();
        match at_epoch {
            Some(epoch) => running.group.migrate_at(epoch, handle, steps, cadence),
            None => running.group.migrate(handle, steps, cadence),
        }
    }

    fn recut(&self, running: &Running, handle: u64, recut: &Recut) {
        let commands = match recut {
            Recut::Split { ranges, by } => {
                let split = |range: &Range| Command::Split { bin: running.number(*range), bits: *by };
                ranges.iter().map(split).collect()
            }
            Recut::Merge { ranges } => {
                ranges.iter().map(|range| Command::Merge { bin: running.number(*range) }).collect()
            }
        };
        running.group.recut(handle, commands);
    }

    fn cancel(&self, running: &Running, handle: u64) {
        running.group.cancel(handle);
    }

    fn settle(&self, running: &Running, epoch: u64) {
        running.group.settle(epoch);
    }

    fn stats(&self, running: &Running) -> Value {
        serde_json::to_value(running.group.stats()).expect("counters are JSON")
    }

    fn loads(&self, running: &Running) -> Value {
        let plain = |(range, bytes): (Range, u64)| (range.prefix(), range.length(), bytes);
        let bytes = running.group.bin_bytes().into_iter().map(|step| step.into_iter().map(plain).collect());
        let bytes: Vec<Vec<_>> = bytes.collect();
        json!({ "steps": running.group.loads(), "bytes": bytes })
    }

    fn stop(&self, running: Running) -> (Resident, Option<Failure>) {
        let Running { group, fabric, .. } = running;
        let (bins, error) = group.stop();
        // After the workers: leaving with a live dataflow would abort the others.
        drop(fabric);
        (bins, error.map(|error| self.failure(&error)))
    }

    fn store(&self, checkpoint: &str) -> Result<Arc<dyn Store>, Failure> {
        self.loader.store(checkpoint)
    }

    fn load_ranges(
        &self,
        program: &Program,
        ranges: &Ranges,
        files: &[File<Source>],
        wanted: &Use,
    ) -> Result<Loaded, Failure> {
        let names = names(&program.plan);
        let index = Index::of(files);
        index.expect(files, ranges.iter().flat_map(|(name, own)| own.iter().map(move |range| (&**name, *range))));
        let mut loaded = Loaded::default();
        let mut lost = Lost::default();
        for (operator, range) in ranges.iter().flat_map(|(name, ranges)| ranges.iter().map(move |range| (name, *range)))
        {
            wanted.check()?;
            if !names.contains(operator) {
                return Err(unknown(operator));
            }
            let mut chunks = index.select(files, operator, range);
            let made = loaded.load(&program.plan, &program.callbacks, operator, range, chunks.by_ref());
            match made {
                Ok(()) => {}
                Err(LoadError::Chunks(error)) => return Err(unreadable(error)),
                Err(LoadError::State(error)) => {
                    return Err(Self::refused(chunks.file().unwrap_or("-"), operator, &error));
                }
                // The others are read all the same: whoever has to mend it should know how much it is.
                Err(LoadError::Unreadable(keys)) => lost.add(operator, keys),
            }
        }
        lost.failure().map_or(Ok(loaded), Err)
    }

    fn keep_loaded(&self, bins: &mut Resident, loaded: Loaded) {
        bins.keep(loaded);
    }

    fn drop_loaded(&self, bins: &mut Resident) {
        bins.drop_loaded();
    }
}

/// Keys that cannot be read, by operator.
#[derive(Default)]
struct Lost(BTreeMap<String, Unreadable>);

impl Lost {
    fn add(&mut self, operator: &str, more: Unreadable) {
        match self.0.get_mut(operator) {
            Some(known) => known.keys += more.keys,
            None => _ = self.0.insert(operator.to_owned(), more),
        }
    }

    /// Why nothing was loaded.
    fn failure(self) -> Option<Failure> {
        let each = self.0.iter().map(|(operator, Unreadable { keys, key, reason })| {
            let more = if *keys > 1 { format!(" and of {} more keys", keys - 1) } else { String::new() };
            format!("operator {operator}: the state of key {key}{more} cannot be read ({reason})")
        });
        let each = each.collect::<Vec<_>>().join("; ");
        let message = format!(
            "{each}. Nothing has changed: put back what their pickles name and start the query again. Where that is gone for \
             good, a stand-in of that name will do, and a function that returns None for the state of these keys drops \
             them. penstock state CHECKPOINT --unpickle tells which they are"
        );
        let (operator, Unreadable { key, .. }) = self.0.first_key_value()?;
        let keys: u64 = self.0.values().map(|lost| lost.keys).sum();
        Some(
            Failure::new("unreadable", message)
                .with("operator", operator.as_str())
                .with("key", key.as_str())
                .with("keys", keys),
        )
    }
}

/// The names of the keyed steps, in their order: those of operators.
fn names(plan: &Plan) -> Vec<String> {
    plan.keyed().map(|keyed| keyed.operator.clone()).collect()
}

fn unknown(operator: &str) -> Failure {
    Failure::new("plan", format!("the plan and the layouts differ: operator {operator}"))
}

/// The routings in the order of the plan's keyed steps, which bear the operators' names.
fn routings(plan: &Plan, launch: &Launch) -> Result<Vec<Routing>, Failure> {
    let names = names(plan);
    if let Some(other) = launch.layouts.keys().find(|name| !names.contains(name)) {
        return Err(unknown(other));
    }
    let routing = |name: &String| {
        let layout = launch.layouts.get(name).ok_or_else(|| unknown(name))?;
        let misfit = |error: BinsError| Failure::new("protocol", format!("operator {name}: {error}"));
        Routing::of_ranges(launch.bits, layout.ranges()).map_err(misfit)
    };
    names.iter().map(routing).collect()
}

/// When each step of the list took effect.
fn times(steps: &[StepReport]) -> Vec<(u64, u32)> {
    let each = |step: &StepReport| std::iter::repeat_n((step.epoch, step.slice), step.planned as usize);
    steps.iter().flat_map(each).collect()
}

fn step_reports(steps: &[StepReport]) -> Vec<Value> {
    let report = |step: &StepReport| {
        let StepReport { step, bins, started_ns, ended_ns, paused_ns, epoch, .. } = *step;
        let times = (started_ns, ended_ns, paused_ns);
        json!({ "step": step, "bins": bins, "started_ns": times.0, "ended_ns": times.1, "paused_ns": times.2, "epoch": epoch })
    };
    steps.iter().map(report).collect()
}

impl Member<GroupHost> {
    /// Joins the registry at `host:port` with the real engine; see [`Member::connect_to`].
    ///
    /// # Errors
    /// As [`Member::connect_to`].
    pub fn connect(registry: &str, keys: Keys, info: Value, loader: Arc<dyn Loader>) -> Result<Self, ClusterError> {
        Self::connect_to(registry, keys, info, GroupHost::new(loader), Limits::default())
    }
}
