//! The thread of one query: starts and ends its generations, releases its epochs, answers.
//!
//! Everything that may take long for one query happens here, so that neither the control loop nor
//! another query waits for it. The thread never waits for an epoch either: it hears from the
//! workers by events and from the control loop by commands. Every request is answered exactly once,
//! also when the host panics.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crossbeam::channel::{Receiver, Sender, never, select, unbounded};
use serde_json::{Value, json};

use super::Incoming;
use super::core::{Core, Outgoing, Query};
use super::generation_mesh;
use super::outputs::Piece;
use crate::error::Failure;
use crate::host::{Host, HostEvent, Keep};
use crate::message::{Release, Resume, Start};

/// What the control loop asks for.
#[derive(Debug)]
pub(super) enum Command {
    Start { call: u64, start: Box<Start>, attachment: Vec<u8> },
    Release { call: u64, release: Release },
    Migrate { call: u64, generation: u64, handle: u64, steps: Vec<Vec<(u32, u32)>> },
    Cancel { call: u64, generation: u64, handle: u64 },
    Stop { call: u64, generation: u64, keep: bool, epoch: Option<u64> },
    Settle { call: u64, epoch: u64 },
    Stats { ticket: u64 },
    Drop { call: u64 },
    End,
}

impl Command {
    fn call(&self) -> Option<u64> {
        match self {
            Command::Start { call, .. }
            | Command::Release { call, .. }
            | Command::Migrate { call, .. }
            | Command::Cancel { call, .. }
            | Command::Stop { call, .. }
            | Command::Settle { call, .. }
            | Command::Drop { call } => Some(*call),
            Command::Stats { .. } | Command::End => None,
        }
    }
}

struct Running<H: Host> {
    group: H::Group,
    start: Start,
    events: Receiver<H::Event>,
    /// The epoch that may be released next.
    next: u64,
    failed: Option<Failure>,
    /// Released epochs: who asked, what has come out by worker.
    epochs: BTreeMap<u64, (u64, BTreeMap<usize, Piece>)>,
    /// Migrations by handle: who asked.
    migrations: BTreeMap<u64, u64>,
}

pub(super) struct Actor<H: Host> {
    core: Arc<Core<H>>,
    query: Arc<Query<H>>,
    commands: Receiver<Command>,
    incoming: Sender<Incoming>,
    running: Option<Running<H>>,
    /// Bins between generations; None while running, or lost.
    bins: Option<H::Bins>,
    /// The epoch that the last generation began with.
    began: u64,
    /// The last epoch that was completed here.
    completed: Option<u64>,
    unanswered: BTreeSet<u64>,
}

impl<H: Host> Actor<H> {
    pub(super) fn new(
        core: Arc<Core<H>>,
        query: Arc<Query<H>>,
        commands: Receiver<Command>,
        incoming: Sender<Incoming>,
    ) -> Self {
        let bins = Some(core.host.nothing());
        let unanswered = BTreeSet::new();
        let (running, began, completed) = (None, 0, None);
        Actor { core, query, commands, incoming, running, bins, began, completed, unanswered }
    }

    /// Serves until the query is dropped or the member ends.
    pub(super) fn run(mut self) {
        let silent = never();
        loop {
            let events = self.running.as_ref().map_or(&silent, |running| &running.events);
            let turn = select! {
                recv(self.commands) -> command => Turn::Command(command.unwrap_or(Command::End)),
                recv(events) -> event => match event {
                    Ok(event) => Turn::Event(event),
                    Err(_) => Turn::Silence,
                },
            };
            let last = matches!(turn, Turn::Command(Command::Drop { .. } | Command::End));
            if let Turn::Command(command) = &turn {
                self.unanswered.extend(command.call());
            }
            // Whatever a panic leaves behind is not used again: see the next lines.
            if catch_unwind(AssertUnwindSafe(|| self.turn(turn))).is_err() {
                self.running = None;
                self.bins = None;
                let failure = Failure::new("internal", "the engine panicked; see the member's log");
                for call in std::mem::take(&mut self.unanswered) {
                    self.core.reply(call, Err(failure.clone()));
                }
            }
            if last {
                return;
            }
        }
    }

    fn turn(&mut self, turn: Turn<H::Event>) {
        match turn {
            Turn::Event(event) => {
                let event = self.core.host.translate(event);
                self.event(event);
            }
            // The workers have ended: normally after they have said why.
            Turn::Silence => {
                if let Some(running) = &mut self.running {
                    running.events = never();
                }
                self.failed(Failure::new("internal", "the workers ended without an error"));
            }
            Turn::Command(Command::Start { call, start, attachment }) => {
                let answer = self.start(*start, &attachment);
                self.answer(call, answer);
            }
            Turn::Command(Command::Release { call, release }) => {
                if let Err(failure) = self.release(call, release) {
                    self.answer(call, Err(failure));
                }
            }
            Turn::Command(Command::Migrate { call, generation, handle, steps }) => {
                if let Err(failure) = self.migrate(call, generation, handle, steps) {
                    self.answer(call, Err(failure));
                }
            }
            Turn::Command(Command::Cancel { call, generation, handle }) => {
                let core = Arc::clone(&self.core);
                let answer = self.able(generation).map(|running| {
                    core.host.cancel(&running.group, handle);
                    json!({ "ok": true })
                });
                self.answer(call, answer);
            }
            Turn::Command(Command::Stop { call, generation, keep, epoch }) => {
                self.stop(call, generation, keep, epoch);
            }
            Turn::Command(Command::Settle { call, epoch }) => {
                // Between two generations nothing is kept for longer than the next one's first mark.
                if let Some(running) = &self.running {
                    self.core.host.settle(&running.group, epoch);
                }
                self.answer(call, Ok(json!({ "ok": true })));
            }
            Turn::Command(Command::Stats { ticket }) => {
                let query = self.query.name.clone();
                let body = self.stats();
                // The control loop has ended: nobody wants figures.
                let _ = self.incoming.send(Incoming::Stats { ticket, query, body });
            }
            Turn::Command(Command::Drop { call }) => {
                self.end_group();
                self.answer(call, Ok(json!({ "ok": true })));
            }
            Turn::Command(Command::End) => drop(self.end_group()),
        }
    }

    fn answer(&mut self, call: u64, answer: Result<Value, Failure>) {
        if self.unanswered.remove(&call) {
            self.core.reply(call, answer);
        }
    }

    fn start(&mut self, start: Start, attachment: &[u8]) -> Result<Value, Failure> {
        self.end_group();
        start.check().map_err(|what| Failure::new("protocol", what))?;
        self.query.check(start.generation)?;
        let program = Arc::new(self.core.host.load(&start.plan, attachment)?);
        let mesh = generation_mesh::connect(&self.core, &self.query, &start)?;
        let host = &self.core.host;
        if start.resume == Resume::Fresh {
            self.bins = Some(host.empty());
            self.completed = None;
        }
        self.began = start.epoch;
        self.completed = self.completed.filter(|last| *last < start.epoch);
        let Some(bins) = self.bins.take() else {
            return Err(Failure::new("state_lost", "the state of this query was lost here"));
        };
        let keys = host.keys(&bins);
        let (sender, events) = unbounded();
        self.query.shelf.cut(start.slice_rows);
        let keep = Arc::clone(&self.query.shelf) as Arc<dyn Keep>;
        let group = match host.start(&program, &start, mesh, bins, keep, sender) {
            Ok(group) => group,
            Err((failure, bins)) => {
                // Bins that were to be made in this generation are not there for the next.
                self.bins = if start.resume == Resume::Fresh { Some(host.nothing()) } else { bins };
                return Err(failure);
            }
        };
        self.query.set_program(program);
        self.query.staging().set_floor(start.epoch);
        self.query.outputs().reopen(if start.resume == Resume::Fresh { 0 } else { start.epoch });
        let next = start.epoch;
        let (failed, epochs, migrations) = Default::default();
        self.running = Some(Running { group, start, events, next, failed, epochs, migrations });
        Ok(json!({ "ok": true, "keys": keys }))
    }

    /// The group, when it can take requests of this generation.
    fn able(&mut self, generation: u64) -> Result<&mut Running<H>, Failure> {
        self.query.check(generation)?;
        match &mut self.running {
            Some(running) if running.start.generation == generation => match &running.failed {
                None => Ok(running),
                Some(failure) => Err(failure.clone()),
            },
            _ => Err(Failure::new("not_running", format!("generation {generation} is not running"))),
        }
    }

    fn release(&mut self, call: u64, release: Release) -> Result<(), Failure> {
        let epoch = release.epoch;
        let next = self.able(release.generation)?.next;
        if epoch != next {
            let message = format!("epoch {epoch} cannot be released, {next} is next");
            return Err(Failure::new("epoch", message).with("given", epoch).with("next", next));
        }
        let inputs = self.query.staging().select(epoch, &release.feeds)?;
        let watermark = if release.finish { Some(i64::MAX) } else { release.watermark };
        let core = Arc::clone(&self.core);
        let running = self.able(release.generation)?;
        core.host.release(&running.group, epoch, inputs, watermark, release.clock_ms)?;
        running.epochs.insert(epoch, (call, BTreeMap::new()));
        running.next += 1;
        self.query.staging().release(epoch, &release.feeds);
        Ok(())
    }

    fn migrate(&mut self, call: u64, generation: u64, handle: u64, steps: Vec<Vec<(u32, u32)>>) -> Result<(), Failure> {
        let core = Arc::clone(&self.core);
        let running = self.able(generation)?;
        let fail = |message: String| Err(Failure::new("migration", message));
        if running.start.process != 0 {
            return fail("only the member of worker 0 migrates".into());
        }
        let bins = 1u32 << running.start.bits;
        let workers = running.start.processes() * running.start.threads;
        let mut moves = steps.iter().flatten();
        if let Some((bin, worker)) = moves.find(|(b, w)| *b >= bins || *w as usize >= workers) {
            return fail(format!("no bin {bin} or no worker {worker}: {bins} bins, {workers} workers"));
        }
        if running.migrations.contains_key(&handle) {
            return fail(format!("migration {handle} is under way"));
        }
        running.migrations.insert(handle, call);
        core.host.migrate(&running.group, handle, steps);
        Ok(())
    }

    fn stop(&mut self, call: u64, generation: u64, keep: bool, epoch: Option<u64>) {
        if let Some(running) = &self.running
            && running.start.generation > generation
        {
            let failure = self.query.check(generation).err();
            let failure = failure.unwrap_or_else(|| Failure::new("internal", "generations differ"));
            return self.answer(call, Err(failure));
        }
        let failed = self.end_group();
        let epoch = epoch.unwrap_or_else(|| self.completed.map_or(self.began, |last| last + 1));
        if !keep {
            self.bins = Some(self.core.host.nothing());
        }
        let host = &self.core.host;
        let answer = match &self.bins {
            Some(bins) => Ok(json!({
                "ok": true,
                "keys": host.keys(bins),
                "inventory": host.inventory(bins, epoch),
                "completed": self.completed,
                "failed": failed.map(|failure| failure.to_body()["error"].take()),
            })),
            None => Err(Failure::new("state_lost", "the state of this query was lost here")),
        };
        self.answer(call, answer);
    }

    /// Ends the workers, if any, and takes their bins; answers what is still open.
    fn end_group(&mut self) -> Option<Failure> {
        let mut running = self.running.take()?;
        let (bins, error) = self.core.host.stop(running.group);
        self.bins = Some(bins);
        let events: Vec<H::Event> = running.events.try_iter().collect();
        for event in events {
            match self.core.host.translate(event) {
                HostEvent::EpochDone { epoch, worker, rows, late, late_rows } => {
                    let piece = Piece { rows: rows.into(), late: late.into(), late_rows };
                    let done = complete(&mut running.epochs, &running.start, epoch, worker, piece);
                    if let Some((call, pieces)) = done {
                        self.close_epoch(call, epoch, running.start.process, pieces);
                    }
                }
                HostEvent::MigrationDone { handle, report } => {
                    if let Some(call) = running.migrations.remove(&handle) {
                        self.answer(call, Ok(with_ok(report)));
                    }
                }
                HostEvent::MigrationFailed { handle, failure } => {
                    if let Some(call) = running.migrations.remove(&handle) {
                        self.answer(call, Err(failure));
                    }
                }
                HostEvent::Failed { failure } => drop(running.failed.get_or_insert(failure)),
            }
        }
        let failed = running.failed.or(error);
        let stopped = || Failure::new("stopped", "the generation was ended");
        let failure = failed.clone().unwrap_or_else(stopped);
        let calls = running.epochs.into_values().map(|(call, _)| call);
        for call in calls.chain(running.migrations.into_values()).collect::<Vec<_>>() {
            self.answer(call, Err(failure.clone()));
        }
        failed
    }

    fn event(&mut self, event: HostEvent) {
        let Some(running) = &mut self.running else { return };
        match event {
            HostEvent::EpochDone { epoch, worker, rows, late, late_rows } => {
                let piece = Piece { rows: rows.into(), late: late.into(), late_rows };
                let process = running.start.process;
                let done = complete(&mut running.epochs, &running.start, epoch, worker, piece);
                if let Some((call, pieces)) = done {
                    self.close_epoch(call, epoch, process, pieces);
                }
            }
            HostEvent::MigrationDone { handle, report } => {
                if let Some(call) = running.migrations.remove(&handle) {
                    self.answer(call, Ok(with_ok(report)));
                }
            }
            HostEvent::MigrationFailed { handle, failure } => {
                if let Some(call) = running.migrations.remove(&handle) {
                    self.answer(call, Err(failure));
                }
            }
            HostEvent::Failed { failure } => self.failed(failure),
        }
    }

    fn failed(&mut self, failure: Failure) {
        let Some(running) = &mut self.running else { return };
        if running.failed.is_some() {
            return;
        }
        running.failed = Some(failure.clone());
        let epochs = std::mem::take(&mut running.epochs).into_values().map(|(call, _)| call);
        let migrations = std::mem::take(&mut running.migrations).into_values();
        let calls: Vec<u64> = epochs.chain(migrations).collect();
        if calls.is_empty() {
            let mut body = failure.to_body();
            body["event"] = "failed".into();
            body["query"] = self.query.name.as_str().into();
            body["generation"] = running.start.generation.into();
            let attachment = failure.attachment;
            // The writer is gone only when the registry is.
            let _ = self.core.outgoing.send(Outgoing::Message { body, attachment });
            return;
        }
        for call in calls {
            self.answer(call, Err(failure.clone()));
        }
    }

    /// All workers here have completed an epoch.
    fn close_epoch(&mut self, call: u64, epoch: u64, process: usize, pieces: Vec<Piece>) {
        let first = process * pieces.len();
        let listed: Vec<Value> = pieces
            .iter()
            .enumerate()
            .map(|(index, piece)| {
                json!({
                    "piece": index,
                    "worker": first + index,
                    "rows": piece.row_count(),
                    "late_rows": piece.late_rows,
                })
            })
            .collect();
        let late_rows: u64 = pieces.iter().map(|piece| piece.late_rows).sum();
        self.query.outputs().freeze(epoch, pieces);
        self.query.staging().set_floor(epoch + 1);
        self.completed = Some(epoch);
        let body = json!({ "ok": true, "epoch": epoch, "pieces": listed, "late_rows": late_rows });
        self.answer(call, Ok(body));
    }

    fn stats(&self) -> Value {
        let staged_rows = self.query.staging().rows();
        let (open_epochs, output_rows) = self.query.outputs().size();
        let host = &self.core.host;
        let mut body = json!({
            "running": self.running.is_some(),
            "completed": self.completed,
            "staged_rows": staged_rows,
            "open_epochs": open_epochs,
            "output_rows": output_rows,
        });
        if let Some(running) = &self.running {
            body["generation"] = running.start.generation.into();
            body["next"] = running.next.into();
            body["failed"] = running.failed.is_some().into();
            body["group"] = host.stats(&running.group);
        }
        if let Some(bins) = &self.bins {
            body["keys"] = host.keys(bins).into();
        }
        body
    }
}

enum Turn<E> {
    Command(Command),
    Event(E),
    Silence,
}

fn with_ok(mut report: Value) -> Value {
    report["ok"] = true.into();
    report
}

/// Books what a worker has produced; returns caller and pieces when it was the last one.
fn complete(
    epochs: &mut BTreeMap<u64, (u64, BTreeMap<usize, Piece>)>,
    start: &Start,
    epoch: u64,
    worker: usize,
    piece: Piece,
) -> Option<(u64, Vec<Piece>)> {
    let (_, pieces) = epochs.get_mut(&epoch)?;
    pieces.insert(worker, piece);
    if pieces.len() < start.threads {
        return None;
    }
    let (call, pieces) = epochs.remove(&epoch)?;
    Some((call, pieces.into_values().collect()))
}
