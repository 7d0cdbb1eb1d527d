//! The thread of one query: does what the protocol asks of a member.
//!
//! What happens when is decided by [`penstock_engine::Member`]; here its effects are done: workers are started and ended, epochs
//! released, outputs frozen, requests answered. Everything that may take long for one query happens here, so that neither the control loop
//! nor another query waits for it. The thread never waits for an epoch either: it hears from the workers by events and from the
//! control loop by commands. Every request is answered exactly once, also when the host panics.
//!
//! Files are read and written by threads of their own, one for each request, which end with the query: what a generation has not waited for
//! is of no more use when it ends, and does not become state.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, Sender, never, select, unbounded};
use penstock_engine::{
    Answer, Claim, DataFile, Handle, Member, MemberEffect, MemberEvent, Range, Ranges, Recut, Release, Request, Stamp,
    Start, Ticket,
};
use serde_json::{Value, json};

use super::Incoming;
use super::core::{Core, Outgoing, Query};
use super::generation_mesh;
use super::outputs::Piece;
use crate::durable::{self, Author, Checkpoint, Segment, Use};
use crate::error::Failure;
use crate::host::{Cadence, Host, HostEvent, Keep, Launch, not_durable};
use crate::message::Ask;

/// What the control loop asks for.
#[derive(Debug)]
pub(super) enum Command {
    Ask { call: u64, ask: Box<Ask>, attachment: Vec<u8> },
    Stats { ticket: u64, loads: bool },
    End,
}

struct Running<H: Host> {
    group: H::Group,
    launch: Launch,
    events: Receiver<H::Event>,
    /// What has come out, by epoch and thread.
    pieces: BTreeMap<u64, BTreeMap<u32, Piece>>,
    /// What the workers that have completed an epoch changed in it, until the next one is complete: a write may be asked for again.
    records: BTreeMap<u64, Vec<Segment>>,
    /// The last one that all have completed.
    record: Option<(u64, Arc<[Segment]>)>,
}

/// A request with all that came with it.
struct Begin {
    call: u64,
    ask: Box<Ask>,
    attachment: Vec<u8>,
}

/// Generations that have ended whose last figures are kept until somebody asks.
pub(super) const ENDED: usize = 16;

/// Failures whose facts are kept: the protocol answers with one of the last.
const CAUSES: usize = 64;

/// How reading or writing ended, and whether it was still of use.
type Stored<H> = (Ticket, Use, Result<Got<H>, Failure>);

enum Got<H: Host> {
    Files(Vec<DataFile>),
    Loaded(H::Loaded),
}

pub(super) struct Actor<H: Host> {
    core: Arc<Core<H>>,
    query: Arc<Query<H>>,
    commands: Receiver<Command>,
    incoming: Sender<Incoming>,
    member: Member,
    running: Option<Running<H>>,
    /// Bins between generations; None while running, or lost.
    bins: Option<H::Bins>,
    /// Starts that the protocol has yet to ask for.
    begins: BTreeMap<Stamp, Begin>,
    /// Requests that read or merge files, which the protocol has yet to ask for.
    reads: BTreeMap<Ticket, Begin>,
    /// Who asked for a migration.
    migrations: BTreeMap<Handle, u64>,
    /// What an answer says beside the protocol, by its request.
    extras: BTreeMap<u64, Value>,
    /// The facts behind the newest failures that the protocol was told of, at most [`CAUSES`].
    causes: VecDeque<Failure>,
    /// How reading and writing ended.
    stored: (Sender<Stored<H>>, Receiver<Stored<H>>),
    /// What reads and writes.
    jobs: Vec<JoinHandle<()>>,
    /// Whether what it does is of use to the present generation.
    wanted: Use,
    /// The checkpoint that was used last.
    checkpoint: Option<Arc<Checkpoint>>,
    /// The last epoch that was completed here.
    completed: Option<u64>,
    /// Generations that have ended since figures were asked for, with their last: a short one would never be heard of.
    ended: VecDeque<Value>,
    unanswered: BTreeSet<u64>,
    over: bool,
}

impl<H: Host> Actor<H> {
    pub(super) fn new(
        core: Arc<Core<H>>,
        query: Arc<Query<H>>,
        commands: Receiver<Command>,
        incoming: Sender<Incoming>,
    ) -> Self {
        Actor {
            bins: Some(core.host.nothing()),
            core,
            query,
            commands,
            incoming,
            member: Member::new(),
            running: None,
            begins: BTreeMap::new(),
            reads: BTreeMap::new(),
            migrations: BTreeMap::new(),
            extras: BTreeMap::new(),
            causes: VecDeque::new(),
            stored: unbounded(),
            jobs: Vec::new(),
            wanted: Use::default(),
            checkpoint: None,
            completed: None,
            ended: VecDeque::new(),
            unanswered: BTreeSet::new(),
            over: false,
        }
    }

    /// Serves until the query is dropped or the member ends.
    pub(super) fn run(mut self) {
        let silent = never();
        while !self.over {
            let events = self.running.as_ref().map_or(&silent, |running| &running.events);
            let turn = select! {
                recv(self.commands) -> command => Turn::Command(command.unwrap_or(Command::End)),
                recv(self.stored.1) -> stored => Turn::Stored(stored.expect("the other end is held here")),
                recv(events) -> event => match event {
                    Ok(event) => Turn::Event(event),
                    Err(_) => Turn::Silence,
                },
            };
            if let Turn::Command(Command::Ask { call, .. }) = &turn {
                self.unanswered.insert(*call);
            }
            // Whatever a panic leaves behind is not used again: see the next lines.
            if catch_unwind(AssertUnwindSafe(|| self.turn(turn))).is_err() {
                self.running = None;
                self.bins = None;
                self.member = Member::new();
                self.begins.clear();
                self.reads.clear();
                self.give_up();
                let failure = Failure::new("internal", "the engine panicked; see the member's log");
                for call in std::mem::take(&mut self.unanswered) {
                    self.core.reply(call, Err(failure.clone()));
                }
            }
        }
        self.give_up();
        self.query.staging().close();
        self.query.outputs().close(u64::MAX);
        // A store may hang for as long as it likes: nobody needs the state any more, nor what is read of it.
        drop((self.running, self.bins, self.stored));
        for job in self.jobs {
            // A panic in it was caught there.
            let _ = job.join();
        }
    }

    fn turn(&mut self, turn: Turn<H>) {
        match turn {
            Turn::Event(event) => {
                let Some(running) = &self.running else { return };
                let event = self.core.host.translate(&running.group, event);
                self.event(event);
            }
            // The workers have ended: normally after they have said why.
            Turn::Silence => {
                if let Some(running) = &mut self.running {
                    running.events = never();
                }
                self.failed(Failure::new("internal", "the workers ended without an error"));
            }
            Turn::Stored((ticket, wanted, outcome)) => {
                let outcome = outcome.and_then(|got| self.got(&wanted, got)).map_err(|failure| self.cause(failure));
                self.step(MemberEvent::Stored { ticket, outcome });
            }
            Turn::Command(Command::Ask { call, ask, attachment }) => {
                let request = ask.ask.clone();
                match &request {
                    Request::Start(start) => drop(self.begins.insert(start.stamp, Begin { call, ask, attachment })),
                    Request::Migrate { handle, .. } | Request::Recut { handle, .. } => {
                        self.migrations.insert(*handle, call);
                    }
                    Request::Load { .. } | Request::Merge { .. } => {
                        self.reads.insert(call, Begin { call, ask, attachment });
                    }
                    _ => {}
                }
                self.step(MemberEvent::Asked { ticket: call, request });
            }
            // Nobody waits for it any more: what is told once is for who does, and what stands behind it need not wait.
            Turn::Command(Command::Stats { ticket, .. }) if ticket < self.core.awaited.load(Relaxed) => {}
            Turn::Command(Command::Stats { ticket, loads }) => {
                let query = self.query.name.clone();
                let mut body = self.stats();
                if let Some(running) = self.running.as_ref().filter(|_| loads) {
                    body["loads"] = self.core.host.loads(&running.group);
                }
                // The control loop has ended: nobody wants figures.
                let _ = self.incoming.send(Incoming::Stats { ticket, query, body });
            }
            Turn::Command(Command::End) => {
                self.end_group();
                self.over = true;
            }
        }
    }

    /// The protocol hears something, and what it asks for is done.
    fn step(&mut self, event: MemberEvent) {
        let mut effects = VecDeque::from(self.member.step(event));
        while let Some(effect) = effects.pop_front() {
            if let Some(event) = self.perform(effect) {
                effects.extend(self.member.step(event));
            }
        }
    }

    /// Does an effect; returns what the protocol hears of it at once.
    fn perform(&mut self, effect: MemberEffect) -> Option<MemberEvent> {
        match effect {
            MemberEffect::Reply { ticket, answer } => self.reply(ticket, answer),
            MemberEffect::Tell { stamp, failure } => self.tell(stamp, failure),
            MemberEffect::EndGroup { epoch } => {
                self.end_group();
                return Some(MemberEvent::Ended(self.inventory(epoch)));
            }
            MemberEffect::StartGroup(start) => {
                let outcome = self.start(&start).map_err(|failure| self.cause(failure));
                return Some(MemberEvent::Started(outcome));
            }
            MemberEffect::ReleaseInput(release) => {
                let released = self.release(&release);
                return released.err().map(|failure| MemberEvent::Failed(self.cause(failure)));
            }
            MemberEffect::Migrate { handle, steps, max_pause_ms, drains, at_epoch } => {
                let max_pause = max_pause_ms.map(|ms| Duration::from_millis(ms.into()));
                let refused = self.migrate(handle, steps, Cadence { max_pause, drains }, at_epoch).err()?;
                let refused = Some(self.cause(refused));
                return Some(MemberEvent::MigrationDone { handle, times: Vec::new(), refused });
            }
            MemberEffect::Recut { handle, recut } => {
                let refused = self.recut(handle, &recut).err()?;
                let refused = Some(self.cause(refused));
                return Some(MemberEvent::MigrationDone { handle, times: Vec::new(), refused });
            }
            MemberEffect::CancelMigration { handle } => {
                if let Some(running) = &self.running {
                    self.core.host.cancel(&running.group, handle);
                }
            }
            MemberEffect::LoadRanges { ticket, claim, ranges, files } => self.load(ticket, claim, ranges, files),
            MemberEffect::WriteFiles { ticket, stamp, epoch } => self.write(ticket, stamp, epoch),
            MemberEffect::MergeFiles { ticket, stamp, files } => {
                let checkpoint = self.reads.remove(&ticket).and_then(|read| read.ask.checkpoint);
                let author = Author { member: self.core.member, generation: stamp.generation, epoch: 0 };
                self.store(ticket, checkpoint, move |_, store, wanted| {
                    durable::merge_files(store, author, &files, wanted).map(Got::Files)
                });
            }
            MemberEffect::CloseOutputs { epoch } => {
                self.query.outputs().close(epoch);
                // Spark has committed it: nobody asks for its files again.
                self.running.iter_mut().for_each(|running| _ = running.record.take_if(|(last, _)| *last <= epoch));
                self.settle(epoch);
            }
            MemberEffect::SettleEpoch { epoch } => self.settle(epoch),
            MemberEffect::DiscardStaged { epoch } => self.query.staging().discard(epoch),
            MemberEffect::DropState => {
                self.end_group();
                self.bins = Some(self.core.host.nothing());
            }
            MemberEffect::DropAll => {
                self.end_group();
                self.over = true;
            }
        }
        None
    }

    /// Tells the protocol of a failure in its words, and remembers the facts until it answers with it.
    fn cause(&mut self, failure: Failure) -> penstock_engine::Failure {
        let told = failure.told();
        if self.causes.len() == CAUSES {
            self.causes.pop_front();
        }
        self.causes.push_back(failure);
        told
    }

    /// The facts behind what the protocol says.
    fn facts(&self, told: penstock_engine::Failure) -> Failure {
        let known = self.causes.iter().rev().find(|cause| cause.message == told.message && cause.why() == told.kind);
        known.cloned().unwrap_or_else(|| Failure::of(told))
    }

    fn reply(&mut self, call: u64, answer: Result<Answer, penstock_engine::Failure>) {
        let extra = self.extras.remove(&call);
        self.reads.remove(&call);
        if !self.unanswered.remove(&call) {
            return;
        }
        let answer = answer.map_err(|told| self.facts(told)).map(|answer| {
            let mut body = extra.unwrap_or_else(|| json!({}));
            body["ok"] = true.into();
            body["answer"] = serde_json::to_value(answer).expect("plain data is JSON");
            body
        });
        self.core.reply(call, answer);
    }

    fn tell(&self, stamp: Stamp, failure: penstock_engine::Failure) {
        let failure = self.facts(failure);
        let mut body = failure.to_body();
        body["event"] = "failed".into();
        body["query"] = self.query.name.as_str().into();
        body["stamp"] = serde_json::to_value(stamp).expect("numbers are JSON");
        // The writer is gone only when the registry is.
        let _ = self.core.outgoing.send(Outgoing::Message { body, attachment: failure.attachment });
    }

    /// Sees that the checkpoint is the driver's, and reads the state of ranges, with the functions that came along.
    fn load(&mut self, ticket: Ticket, claim: Claim, ranges: Ranges, files: Vec<DataFile>) {
        let Some(Begin { ask, attachment, .. }) = self.reads.remove(&ticket) else { return };
        let member = self.core.member;
        self.store(ticket, ask.checkpoint.clone(), move |host, store, wanted| {
            durable::check_claim(&**store, &claim, member)?;
            if ranges.is_empty() {
                return Ok(Got::Files(Vec::new()));
            }
            let program = host.load(&ask.plan, &attachment)?;
            let files = durable::open(store, &files, wanted)?;
            host.load_ranges(&program, &ranges, &files, wanted).map(Got::Loaded)
        });
    }

    /// Writes the record of the last epoch.
    fn write(&mut self, ticket: Ticket, stamp: Stamp, epoch: u64) {
        let running = self.running.as_ref().filter(|running| running.launch.stamp == stamp);
        let checkpoint = running.and_then(|running| running.launch.checkpoint.clone());
        let record = running.and_then(|running| running.record.clone()).filter(|(last, _)| *last == epoch);
        let author = Author { member: self.core.member, generation: stamp.generation, epoch };
        self.store(ticket, checkpoint, move |_, store, wanted| {
            let gone = || Failure::new("stale_generation", format!("the record of epoch {epoch} is not here"));
            let (_, record) = record.ok_or_else(gone)?;
            durable::write_records(&**store, author, &record, wanted).map(Got::Files)
        });
    }

    /// Does something with a checkpoint on a thread of its own, whose end the protocol hears.
    fn store(
        &mut self,
        ticket: Ticket,
        checkpoint: Option<String>,
        work: impl FnOnce(&H, &Arc<dyn durable::Store>, &Use) -> Result<Got<H>, Failure> + Send + 'static,
    ) {
        self.jobs.retain(|job| !job.is_finished());
        let checkpoint = checkpoint.map(|url| self.open(url));
        let (core, stored, wanted) = (Arc::clone(&self.core), self.stored.0.clone(), self.wanted.clone());
        let (refused, still) = (stored.clone(), wanted.clone());
        let job = move || {
            let work = AssertUnwindSafe(|| {
                let store = checkpoint.ok_or_else(not_durable)?.store(&core.host)?;
                work(&core.host, &store, &wanted)
            });
            let panicked = || Failure::new("internal", "reading or writing state panicked; see the member's log");
            let outcome = catch_unwind(work).unwrap_or_else(|_| Err(panicked()));
            // The thread of the query has ended: nobody waits for it.
            let _ = stored.send((ticket, wanted, outcome));
        };
        match thread::Builder::new().name("penstock-files".into()).spawn(job) {
            Ok(job) => self.jobs.push(job),
            Err(error) => {
                let failure = Failure::new("internal", format!("start a thread: {error}"));
                let _ = refused.send((ticket, still, Err(failure)));
            }
        }
    }

    fn open(&mut self, url: String) -> Arc<Checkpoint> {
        let known = self.checkpoint.take().filter(|known| known.url == url);
        let known = known.unwrap_or_else(|| Arc::new(Checkpoint::new(url)));
        Arc::clone(self.checkpoint.insert(known))
    }

    /// Takes what was read or written. What was loaded for a generation that has ended since is not state.
    fn got(&mut self, wanted: &Use, got: Got<H>) -> Result<Vec<DataFile>, Failure> {
        let loaded = match got {
            Got::Files(files) => return Ok(files),
            Got::Loaded(loaded) => loaded,
        };
        wanted.check()?;
        if self.running.is_some() {
            return Err(Failure::new("internal", "workers run while state is loaded"));
        }
        let host = &self.core.host;
        host.keep_loaded(self.bins.get_or_insert_with(|| host.nothing()), loaded);
        Ok(Vec::new())
    }

    /// Whatever is read or written is of no more use.
    fn give_up(&mut self) {
        std::mem::take(&mut self.wanted).end();
    }

    fn inventory(&self, epoch: u64) -> Ranges {
        self.bins.as_ref().map(|bins| self.core.host.inventory(bins, epoch)).unwrap_or_default()
    }

    fn start(&mut self, start: &Start) -> Result<(), Failure> {
        self.causes.clear();
        let begin = self.begins.remove(&start.stamp);
        self.begins.retain(|stamp, _| *stamp > start.stamp);
        let Begin { call, ask, attachment } =
            begin.ok_or_else(|| Failure::new("internal", "a start that nobody sent"))?;
        let launch = ask.launch(start).map_err(|what| Failure::new("protocol", what))?;
        let began = Instant::now();
        let program = self.core.program(&self.query.name, &ask.plan, &attachment)?;
        let mesh = match generation_mesh::connect(&self.core, &self.query, &launch, &ask.peers, began) {
            Ok(mesh) => mesh,
            Err(failure) => {
                // It may have loaded for longer than a peer waits: the next start is in time.
                self.core.keep(&self.query.name, ask.plan, attachment, program);
                return Err(failure);
            }
        };
        let program = Arc::new(program);
        let host = &self.core.host;
        if start.fresh {
            self.bins = Some(host.empty());
            self.completed = None;
        }
        self.completed = self.completed.filter(|last| *last < start.epoch);
        let Some(bins) = self.bins.take() else {
            return Err(Failure::new("state_lost", "the state of this query was lost here"));
        };
        let keys = host.keys(&bins);
        let (sender, events) = unbounded();
        self.query.shelf.cut(launch.slice_rows);
        let keep = Arc::clone(&self.query.shelf) as Arc<dyn Keep>;
        let group = match host.start(&program, &launch, mesh, bins, keep, sender) {
            Ok(group) => group,
            Err((failure, bins)) => {
                // Bins that were to be made in this generation are not there for the next.
                self.bins = if start.fresh { Some(host.nothing()) } else { bins };
                return Err(failure);
            }
        };
        self.query.set_program(program);
        self.query.staging().set_floor(launch.epoch);
        self.query.outputs().reopen(if start.fresh { 0 } else { launch.epoch });
        self.extras.insert(call, json!({ "keys": keys }));
        let (pieces, records) = Default::default();
        self.running = Some(Running { group, launch, events, pieces, records, record: None });
        Ok(())
    }

    fn running(&self) -> Result<&Running<H>, Failure> {
        self.running.as_ref().ok_or_else(|| Failure::new("internal", "no workers run"))
    }

    fn release(&self, release: &Release) -> Result<(), Failure> {
        let epoch = release.epoch;
        let inputs = self.query.staging().select(epoch, &release.feeds)?;
        let group = &self.running()?.group;
        self.core.host.release(group, epoch, inputs, release.watermark, release.clock_ms)?;
        self.query.staging().release(epoch, &release.feeds);
        Ok(())
    }

    fn migrate(
        &self,
        handle: Handle,
        steps: Vec<Vec<(Range, u32)>>,
        cadence: Cadence,
        at_epoch: Option<u64>,
    ) -> Result<(), Failure> {
        let running = self.leading()?;
        let Launch { processes, threads, bits, .. } = running.launch;
        let workers = processes * threads;
        let unknown = |(range, worker): &&(Range, u32)| range.length() < bits || *worker as usize >= workers;
        if let Some((range, worker)) = steps.iter().flatten().find(unknown) {
            let message = format!("no range {range} of {bits} bits or more, or no worker {worker} of {workers}");
            return Err(Failure::new("migration", message));
        }
        self.core.host.migrate(&running.group, handle, steps, cadence, at_epoch);
        Ok(())
    }

    fn recut(&self, handle: Handle, recut: &Recut) -> Result<(), Failure> {
        let running = self.leading()?;
        let bits = running.launch.bits;
        let (Recut::Split { ranges, .. } | Recut::Merge { ranges }) = recut;
        if let Some(range) = ranges.iter().find(|range| range.length() < bits) {
            return Err(Failure::new("migration", format!("no range {range} of {bits} bits or more")));
        }
        self.core.host.recut(&running.group, handle, recut);
        Ok(())
    }

    /// The workers here, where they are those that say what moves.
    fn leading(&self) -> Result<&Running<H>, Failure> {
        let running = self.running()?;
        match running.launch.process {
            0 => Ok(running),
            _ => Err(Failure::new("migration", "only the member of worker 0 migrates")),
        }
    }

    fn settle(&self, epoch: u64) {
        // Between two generations nothing is kept for longer than the next one's first mark.
        if let Some(running) = &self.running {
            self.core.host.settle(&running.group, epoch);
        }
    }

    /// Ends the workers, if any, and takes their bins. What they said last is not heard any more.
    fn end_group(&mut self) {
        if let Some(running) = self.running.take() {
            if self.ended.len() == ENDED {
                self.ended.pop_front();
            }
            let last = self.core.host.stats(&running.group);
            self.ended.push_back(json!({ "generation": running.launch.stamp.generation, "group": last }));
            let (bins, _) = self.core.host.stop(running.group);
            self.bins = Some(bins);
        }
        if let Some(bins) = &mut self.bins {
            self.core.host.drop_loaded(bins);
        }
        self.give_up();
        self.migrations.clear();
    }

    fn event(&mut self, event: HostEvent) {
        match event {
            HostEvent::EpochDone { epoch, worker, rows, beside, late_rows, side_rows, record } => {
                let piece = Piece { rows: rows.into(), beside: beside.into(), late_rows, side_rows };
                self.epoch_done(epoch, worker, piece, record);
            }
            HostEvent::MigrationDone { handle, times, report } => self.migrated(handle, times, report, None),
            HostEvent::MigrationFailed { handle, times, report, failure } => {
                self.migrated(handle, times, report, Some(failure));
            }
            HostEvent::Failed { failure } => self.failed(failure),
        }
    }

    /// A worker has completed an epoch; with the last one its outputs freeze, before anybody hears of them.
    fn epoch_done(&mut self, epoch: u64, worker: usize, piece: Piece, record: Vec<Segment>) {
        let Some(running) = &mut self.running else { return };
        let threads = running.launch.threads;
        let worker = (worker % threads) as u32;
        let (rows, late_rows, side_rows) = (piece.row_count(), piece.late_rows, piece.side_rows.clone());
        let pieces = running.pieces.entry(epoch).or_default();
        pieces.insert(worker, piece);
        running.records.entry(epoch).or_default().extend(record);
        if pieces.len() == threads {
            let pieces = running.pieces.remove(&epoch).unwrap_or_default();
            running.record = Some((epoch, running.records.remove(&epoch).unwrap_or_default().into()));
            self.query.outputs().freeze(epoch, pieces.into_values().collect());
            self.query.staging().set_floor(epoch + 1);
            self.completed = Some(epoch);
        }
        self.step(MemberEvent::EpochDone { epoch, worker, rows, late_rows, side_rows });
    }

    fn migrated(&mut self, handle: Handle, times: Vec<(u64, u32)>, report: Value, refused: Option<Failure>) {
        if let Some(call) = self.migrations.remove(&handle) {
            self.extras.insert(call, json!({ "report": report }));
        }
        let refused = refused.map(|failure| self.cause(failure));
        self.step(MemberEvent::MigrationDone { handle, times, refused });
    }

    fn failed(&mut self, failure: Failure) {
        let told = self.cause(failure);
        self.step(MemberEvent::Failed(told));
    }

    fn stats(&mut self) -> Value {
        let staged_rows = self.query.staging().rows();
        let (open_epochs, output_rows) = self.query.outputs().size();
        let open_reads = self.query.outputs().reads();
        let host = &self.core.host;
        let mut body = json!({
            "running": self.running.is_some(),
            "completed": self.completed,
            "staged_rows": staged_rows,
            "open_epochs": open_epochs,
            "open_reads": open_reads,
            "output_rows": output_rows,
            "ended": self.ended.drain(..).collect::<Vec<_>>(),
        });
        if let Some(running) = &self.running {
            body["generation"] = running.launch.stamp.generation.into();
            body["group"] = host.stats(&running.group);
        }
        if let Some(bins) = &self.bins {
            body["keys"] = host.keys(bins).into();
        }
        body
    }
}

enum Turn<H: Host> {
    Command(Command),
    Event(H::Event),
    Stored(Stored<H>),
    Silence,
}

#[cfg(test)]
mod tests {
    use super::super::core::bare;
    use super::*;

    /// A generation may run for months, with moves that are refused and writes that fail.
    #[test]
    fn facts_of_the_newest_failures_are_kept() {
        let (core, _outbox) = bare();
        let query = core.add_query("q");
        let mut actor = Actor::new(core, query, never(), unbounded().0);
        let told: Vec<_> = (0..1_000u64)
            .map(|number| actor.cause(Failure::new("store", format!("write {number}")).with("number", number)))
            .collect();
        assert_eq!(actor.causes.len(), CAUSES);
        let facts = told.into_iter().map(|told| actor.facts(told).fields.get("number").and_then(Value::as_u64));
        let kept = 1_000 - CAUSES as u64;
        assert!((0..).zip(facts).all(|(number, fact)| fact == (number >= kept).then_some(number)));
    }
}
