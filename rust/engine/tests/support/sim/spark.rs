//! Spark: offsets, batches, stages with tasks that fail and are tried twice at once, sinks, stops, and the commit log.

use std::collections::{BTreeMap, BTreeSet};

use super::Dice;
use super::ledger::{Out, Row, hash};
use super::world::{QUERY, World};
use crate::machine::{EngineError, Event, Failure, Kind, MemberId, Piece, Receipt, Setup};

/// How far the watermark stays behind.
pub const LATENESS: i64 = 60;
/// Attempts of a task before its stage fails.
const TASK_TRIES: u32 = 3;

/// What Spark wrote of a batch before it called.
#[derive(Clone, Debug)]
pub struct Offsets {
    pub rows: Vec<Row>,
    pub clock: i64,
}

/// One run of the streaming query.
#[derive(Debug)]
pub struct Run {
    pub driver: usize,
    pub alive: bool,
    /// The batch that it asks for next.
    pub next: u64,
    /// The call under way: its epoch, and whether it is the end of input.
    pub call: Option<(u64, bool)>,
    /// Jobs of earlier calls are cancelled.
    pub job: u64,
}

/// A stage of feed tasks.
struct Stage {
    run: usize,
    job: u64,
    ticket: u64,
    receipts: BTreeMap<u32, Receipt>,
    open: usize,
}

#[derive(Default)]
pub struct Spark {
    pub offsets: BTreeMap<u64, Offsets>,
    /// Batches committed.
    pub commits: u64,
    pub sink: BTreeMap<u64, Vec<Out>>,
    pub runs: Vec<Run>,
    stages: BTreeMap<u64, Stage>,
    attempts: u64,
    pub finished: bool,
    /// Whether the end of the input is asked for again since some of its results went with a member.
    pub ends_again: bool,
    /// The driver whose engine has run the final epoch.
    pub ended_by: Option<usize>,
    /// Whether the end of the input failed when another engine took over: its manifest may be there.
    half_finished: bool,
    /// Sinks that raise from now on, and tasks that die.
    pub bad_sinks: u32,
    pub bad_tasks: u32,
    /// Whether the source gives other rows when it is read again.
    pub unstable: bool,
    /// Batches that were read before.
    fed: BTreeSet<u64>,
    /// So many batches are planned anew when they are asked for again: the user removes their offsets.
    pub anew: u32,
    /// By batch, how often other rows were planned for it.
    editions: BTreeMap<u64, u64>,
    /// A copy of the checkpoint: files, and how many batches were committed.
    copy: Option<(BTreeMap<String, Vec<u8>>, u64)>,
}

impl World {
    /// The user starts the query from its checkpoint.
    pub fn spark_starts(&mut self, driver: usize) {
        // Another program is told that the query has ended, and how to have the end again.
        self.spark.ends_again &= self.spark.ended_by == Some(driver);
        self.spark.runs.push(Run { driver, alive: true, next: self.spark.commits, call: None, job: 0 });
        let run = self.spark.runs.len() - 1;
        // A user may edit functions before starting again.
        self.functions += u64::from(self.dice.once_in(3));
        let program = self.program();
        self.hear(driver, Event::Open { query: QUERY.into(), program });
        self.soon(20, move |world| world.trigger(run));
    }

    fn rows_of(&self, epoch: u64) -> Vec<Row> {
        let edition = self.spark.editions.get(&epoch).copied().unwrap_or(0);
        let mut dice = Dice(self.scenario.seed ^ epoch.wrapping_mul(0x0B5E_55ED) ^ edition << 48);
        let mut rows = Vec::new();
        // Some batches are of earlier rows only.
        let now = epoch as i64 * 40 - if dice.once_in(4) { 90 } else { 0 };
        let ended = dice.below(12);
        for _ in 0..dice.between(3, 14) {
            let key = dice.below(12);
            if key != ended {
                let time = now + dice.below(60) as i64 - if dice.once_in(6) { 150 } else { 0 };
                rows.push(Row { key, amount: dice.between(1, 9) as i64, time, last: false });
            }
        }
        if dice.once_in(2) {
            rows.push(Row { key: ended, amount: 1, time: now, last: true });
        }
        rows
    }

    /// Spark makes or repeats a batch and calls our function.
    pub fn trigger(&mut self, run: usize) {
        if !self.spark.runs[run].alive || self.spark.runs[run].call.is_some() {
            return;
        }
        let (epoch, driver) = (self.spark.runs[run].next, self.spark.runs[run].driver);
        if epoch < self.spark.commits {
            // Another run has written the logs.
            self.spark.runs[run].alive = false;
            return self.restart(run);
        }
        let committed = epoch.checked_sub(1);
        let wall = 1_000_000 + self.now as i64;
        self.spark.runs[run].job += 1;
        if epoch == self.scenario.batches {
            if self.spark.finished {
                self.look_for_results(driver, epoch);
            }
            self.spark.runs[run].call = Some((epoch, true));
            self.reached("finish called");
            return self.hear(driver, Event::Finish { query: QUERY.into(), clock_ms: wall, committed });
        }
        self.plan_anew(run, epoch);
        let rows = self.rows_of(epoch);
        // Clocks jump.
        let jump = if epoch % 3 == 2 { 700 } else { 0 };
        let clock_ms = self.spark.offsets.entry(epoch).or_insert(Offsets { rows, clock: wall - jump }).clock;
        self.spark.runs[run].call = Some((epoch, false));
        self.reached("batch called");
        let planned_ms = Some(clock_ms);
        let clock_ms = if super::planted("clock from the wall") { wall } else { clock_ms };
        self.hear(driver, Event::Batch { query: QUERY.into(), epoch, clock_ms, planned_ms, committed });
    }

    /// Before the query was started the user has removed the offsets of the batch that comes again; there may be other rows by now.
    fn plan_anew(&mut self, run: usize, epoch: u64) {
        let alone = (0..).zip(&self.spark.runs).all(|(at, one)| at == run || !one.alive);
        if self.spark.anew == 0 || !alone || self.spark.offsets.remove(&epoch).is_none() {
            return;
        }
        self.spark.anew -= 1;
        if !self.dice.once_in(3) {
            *self.spark.editions.entry(epoch).or_default() += 1;
        }
        self.spark.fed.remove(&epoch);
        self.reached("planned anew");
    }

    /// Our function returns, or raises.
    pub fn call_returns(&mut self, driver: usize, epoch: u64, error: Option<EngineError>) {
        let calling = |run: &Run| run.driver == driver && run.call.is_some_and(|(of, _)| of == epoch || of > 0);
        let Some(at) = self.spark.runs.iter().rposition(calling) else {
            return self.violate(format!("a call for epoch {epoch} ends that nobody made"));
        };
        let (called, finish) = self.spark.runs[at].call.take().expect("just found");
        self.spark.runs[at].job += 1;
        self.spark.half_finished |= finish && matches!(error, Some(EngineError::Fenced { .. }));
        if matches!(error, Some(EngineError::Closed)) {
            self.spark.runs[at].alive = false;
            return;
        }
        if called != epoch {
            self.violate(format!("a call for epoch {called} ends as one for epoch {epoch}"));
        }
        match error {
            None if finish => {
                if std::mem::take(&mut self.spark.ends_again) {
                    self.reached("ended again");
                    self.check_finish(epoch);
                } else if self.spark.finished {
                    self.reached("finished again");
                } else {
                    self.check_finish(epoch);
                    self.spark.finished = true;
                }
                self.after(0, move |world| world.after_finish(at, epoch));
            }
            None => {
                self.reached("returned");
                // Between the return and the commit anything may happen, a stop too.
                let (alive, planned) = (self.spark.runs[at].alive, self.planned(epoch));
                self.soon(12, move |world| {
                    let run = &world.spark.runs[at];
                    if world.planned(epoch) != planned {
                        world.note(|| format!("batch {epoch} was planned anew before it was committed"));
                    } else if (run.alive && world.drivers[run.driver].alive) || (alive && world.dice.once_in(2)) {
                        world.commit(at, epoch);
                    } else {
                        world.note(|| format!("batch {epoch} returned and was not committed"));
                    }
                });
            }
            Some(error) => self.query_fails(at, epoch, error),
        }
    }

    /// Spark's time of a batch as its offsets say it.
    fn planned(&self, epoch: u64) -> Option<i64> {
        self.spark.offsets.get(&epoch).map(|offsets| offsets.clock)
    }

    fn commit(&mut self, run: usize, epoch: u64) {
        if self.spark.commits > epoch {
            self.note(|| format!("run {run} finds batch {epoch} committed by another one"));
            self.spark.runs[run].alive = false;
            return self.restart(run);
        }
        self.note(|| format!("Spark commits batch {epoch}"));
        self.spark.commits = epoch + 1;
        self.spark.runs[run].next = epoch + 1;
        self.reached("committed");
        self.check_commit(epoch);
        let (driver, alive) = (self.spark.runs[run].driver, self.spark.runs[run].alive);
        if !alive {
            return;
        }
        self.tell_commit(driver);
        if self.dice.once_in(3) {
            self.soon(20, move |world| world.hear(driver, Event::Committed { query: QUERY.into(), epoch }));
        }
        let pause = if self.dice.once_in(4) { self.dice.below(400) } else { self.dice.below(20) };
        self.after(pause, move |world| world.trigger(run));
    }

    /// Whoever watches the commit log sees a batch in it, or that nothing runs that would write it, after a while.
    pub fn tell_commit(&mut self, driver: usize) {
        let commits = self.spark.commits;
        let runs = self.spark.runs.iter().any(|run| run.alive && run.driver == driver);
        let seen = |epoch: &mut u64| *epoch < commits || !runs;
        let Some(epoch) = self.drivers[driver].watched.take_if(seen) else { return };
        let query = || QUERY.into();
        let event = match epoch < commits {
            true => Event::Committed { query: query(), epoch },
            false => Event::Rests { query: query(), epoch },
        };
        self.soon(60, move |world| {
            if matches!(event, Event::Rests { .. }) {
                world.reached("rests");
            }
            world.hear(driver, event);
        });
    }

    fn query_fails(&mut self, run: usize, epoch: u64, error: EngineError) {
        self.note(|| format!("run {run} fails in batch {epoch}: {error}"));
        let driver = self.spark.runs[run].driver;
        let stopped = !std::mem::take(&mut self.spark.runs[run].alive);
        let excused = self.is_excused(driver, stopped, &error);
        self.reached(match &error {
            EngineError::Held { .. } => "held",
            EngineError::Fenced { .. } => "fenced",
            EngineError::Abandoned { .. } => "abandoned",
            EngineError::StateLost { .. } => "state lost",
            EngineError::Store { .. } => "store failed",
            EngineError::Sink { .. } => "sink failed",
            EngineError::Feed { .. } => "feed failed",
            EngineError::NoMembers { .. } => "no members",
            EngineError::Finished { .. } => "finished",
            EngineError::Damaged { .. } => "damaged",
            EngineError::NotReplayable { .. } => "not replayable",
            _ => "other failure",
        });
        let others = self.spark.runs.iter().any(|run| run.alive);
        self.tell_commit(driver);
        let shut_out =
            matches!(error, EngineError::Held { .. } | EngineError::Fenced { .. } | EngineError::NoManifest { .. });
        match &error {
            _ if excused && shut_out && others => return,
            _ if excused => {}
            EngineError::Finished { .. } if self.spark.finished || self.spark.half_finished => return self.end(None),
            EngineError::StateLost { .. } if !self.scenario.durable && self.times("crash") > 0 => {
                return self.end(Some(error));
            }
            EngineError::Damaged { .. } if self.times("damage") > 0 => return self.end(Some(error)),
            // One that was never whole, as the user knows: nobody was told that it is there.
            EngineError::Damaged { name, .. } if self.torn.contains(name) => {
                self.storage.files.remove(name);
                // `...-GENERATION-NONCE`: a further try of the same attempt.
                let same = |one: &String| {
                    one.rsplit_once('-').map(|(head, _)| head) == name.rsplit_once('-').map(|(head, _)| head)
                };
                let whole = self.storage.files.keys().filter(|one| !self.torn.contains(*one)).any(same);
                if whole {
                    return self.violate(format!("{name} is in the way, though a whole one of its attempt is there"));
                }
            }
            EngineError::NotReplayable { .. } if self.spark.unstable => return self.end(Some(error)),
            // The user knows why, and what the sink had.
            EngineError::NotReplayable { note: Some(note), .. } if self.times("planned anew") > 0 => {
                if self.storage.files.remove(note).is_none() {
                    return self.violate(format!("{note} is not there: {error}"));
                }
            }
            EngineError::Refused(_) if self.times("planned anew") > 0 && !self.scenario.durable => {
                return self.end(Some(error));
            }
            _ => {
                let endured = &self.drivers[driver].endured;
                return self.violate(format!("batch {epoch} fails although it need not, after {endured:?}: {error}"));
            }
        }
        self.restart(run);
    }

    /// The user starts the query again, in the same program where that lives.
    pub fn restart(&mut self, run: usize) {
        let driver = self.spark.runs[run].driver;
        let pause = self.dice.between(5, 400);
        self.reached("restarted");
        if self.times("restarted") > 60 {
            return self.violate("the query fails again and again".into());
        }
        self.after(pause, move |world| {
            if world.spark.runs.iter().any(|run| run.alive) {
                return;
            }
            // The user goes to the program that holds the checkpoint, where one does.
            let holder = world.storage.holder();
            let holds = |one: &super::world::Driver| one.alive && Some(one.nonce) == holder;
            let driver = match world.drivers.iter().position(holds) {
                Some(holder) => holder,
                None if world.drivers[driver].alive => driver,
                None => world.new_driver(),
            };
            world.spark_starts(driver);
        });
    }

    /// The query is stopped: its thread is interrupted, its jobs are cancelled.
    pub fn stop_run(&mut self) {
        let Some(at) = self.spark.runs.iter().position(|run| run.alive) else { return };
        let driver = self.spark.runs[at].driver;
        self.spark.runs[at].alive = false;
        self.reached("stopped");
        self.tell_commit(driver);
        if self.spark.runs[at].call.is_some() {
            self.hear(driver, Event::Stop { query: QUERY.into() });
            if self.spark.runs[at].call.is_some() {
                self.violate("a stop does not end the call".into());
            }
        } else {
            self.restart(at);
        }
    }

    pub fn edit_run(&mut self) {
        let idle = |run: &Run| run.alive && run.call.is_none();
        let Some(at) = self.spark.runs.iter().position(idle) else { return };
        self.spark.runs[at].alive = false;
        self.functions += 1;
        self.reached("edited");
        self.spark_starts(self.spark.runs[at].driver);
    }

    pub fn copy_checkpoint(&mut self) {
        if self.spark.runs.iter().any(|run| run.alive && run.call.is_none()) {
            self.spark.copy = Some((self.storage.files.clone(), self.spark.commits));
        }
    }

    pub fn put_back(&mut self) {
        let idle = |run: &Run| run.alive && run.call.is_none();
        let Some(at) = self.spark.runs.iter().position(idle) else { return };
        let Some((files, commits)) = self.spark.copy.clone().filter(|(_, commits)| *commits < self.spark.commits)
        else {
            return;
        };
        self.spark.runs[at].alive = false;
        self.storage.files = files;
        self.spark.commits = commits;
        // What came out goes back as well, and the source gives its rows again.
        self.spark.sink.retain(|epoch, _| *epoch < commits);
        self.spark.offsets.retain(|epoch, _| *epoch < commits);
        self.spark.fed.retain(|epoch| *epoch < commits);
        self.salts.retain(|epoch, _| *epoch < commits);
        self.reached("put back");
        self.spark_starts(self.spark.runs[at].driver);
    }

    // Feeding

    pub fn feed(&mut self, driver: usize, ticket: u64, epoch: u64, members: Vec<MemberId>) {
        self.reached("feed asked");
        let Some(run) = self.spark.runs.iter().rposition(|run| run.driver == driver && run.call.is_some()) else {
            return self.violate("a feed for no call".into());
        };
        let mut rows = self.spark.offsets[&epoch].rows.clone();
        let again = !self.spark.fed.insert(epoch);
        if self.spark.unstable && again {
            rows[0].amount += 1;
        }
        for at in (1..rows.len()).rev() {
            rows.swap(at, self.dice.below(at as u64 + 1) as usize);
        }
        let parts = self.dice.between(1, 4) as usize;
        let mut partitions: Vec<Vec<Row>> = vec![Vec::new(); parts];
        for row in rows {
            partitions[self.dice.below(parts as u64) as usize].push(row);
        }
        partitions.retain(|rows| !rows.is_empty());
        self.sequence_stage(run, ticket, epoch, partitions, members);
    }

    fn sequence_stage(
        &mut self,
        run: usize,
        ticket: u64,
        epoch: u64,
        partitions: Vec<Vec<Row>>,
        members: Vec<MemberId>,
    ) {
        let job = self.spark.runs[run].job;
        let stage = self.spark.attempts << 8;
        self.spark.attempts += 1;
        let open = partitions.len();
        if open == 0 {
            let driver = self.spark.runs[run].driver;
            return self.soon(8, move |world| world.hear(driver, Event::Fed { ticket, outcome: Ok(()) }));
        }
        self.spark.stages.insert(stage, Stage { run, job, ticket, receipts: BTreeMap::new(), open });
        for (partition, rows) in (0..).zip(partitions) {
            // Speculation: two attempts at once, of which the first receipt counts.
            let copies = if self.dice.once_in(8) { 2 } else { 1 };
            for _ in 0..copies {
                let (rows, members) = (rows.clone(), members.clone());
                self.soon(15, move |world| world.task(stage, epoch, partition, rows, members, 1));
            }
        }
    }

    fn task(&mut self, stage: u64, epoch: u64, partition: u32, rows: Vec<Row>, members: Vec<MemberId>, tries: u32) {
        let Some(running) = self.spark.stages.get(&stage) else { return };
        let run = &self.spark.runs[running.run];
        let driver = run.driver;
        if !run.alive || run.job != running.job || !self.drivers[driver].alive {
            self.spark.stages.remove(&stage);
            return;
        }
        if running.receipts.contains_key(&partition) {
            // Its rows are staged all the same, and must not count.
            let member = members[partition as usize % members.len()];
            self.spark.attempts += 1;
            let attempt = self.spark.attempts;
            if let Some(process) = self.processes.get_mut(&member) {
                process.staged.insert((epoch, partition, attempt), rows);
            }
            return;
        }
        self.spark.attempts += 1;
        let attempt = self.spark.attempts;
        let member = members[partition as usize % members.len()];
        let dies = self.spark.bad_tasks > 0;
        if dies {
            self.spark.bad_tasks -= 1;
            self.reached("task died");
        }
        let staged = match self.processes.get_mut(&member) {
            Some(process) => {
                process.staged.insert((epoch, partition, attempt), rows.clone());
                true
            }
            None => false,
        };
        if dies || !staged {
            if tries == TASK_TRIES {
                self.drivers[driver].endured.stage_failed |= staged;
                let stage = self.spark.stages.remove(&stage).expect("it runs");
                let kind = if staged { Kind::Internal } else { Kind::Echo };
                let failure = Failure::new(kind, format!("task of partition {partition} failed {tries} times"));
                return self.hear(driver, Event::Fed { ticket: stage.ticket, outcome: Err(failure) });
            }
            return self.soon(10, move |world| world.task(stage, epoch, partition, rows, members, tries + 1));
        }
        let receipt = Receipt {
            source: 0,
            partition,
            attempt,
            member,
            rows: rows.len() as u64,
            max_event_time: rows.iter().map(|row| row.time).max(),
            hash: rows.iter().fold(0, |sum, row| sum.wrapping_add(hash(&(row.key << 32 ^ row.amount as u64 ^ 7)))),
        };
        let running = self.spark.stages.get_mut(&stage).expect("it runs");
        running.receipts.insert(partition, receipt);
        if running.receipts.len() < running.open {
            return;
        }
        self.reached("staged");
        let done = self.spark.stages.remove(&stage).expect("it runs");
        let delay = if self.dice.once_in(4) { 80 } else { self.dice.below(8) };
        self.after(delay, move |world| {
            let run = &world.spark.runs[done.run];
            if run.alive && run.job == done.job {
                for receipt in done.receipts.into_values() {
                    if world.dice.once_in(20) {
                        world.hear(driver, Event::Receipt { ticket: done.ticket, receipt });
                    }
                    world.hear(driver, Event::Receipt { ticket: done.ticket, receipt });
                }
                world.reached("fed");
                world.hear(driver, Event::Fed { ticket: done.ticket, outcome: Ok(()) });
            }
        });
    }

    // The sink

    pub fn sink(&mut self, driver: usize, ticket: u64, epoch: u64, pieces: Vec<Piece>) {
        self.reached("sink called");
        let Some(run) = self.spark.runs.iter().rposition(|run| run.driver == driver && run.call.is_some()) else {
            return self.violate("a sink for no call".into());
        };
        if self.spark.runs[run].call.is_some_and(|(_, finish)| finish) {
            self.spark.ended_by = Some(driver);
        }
        let job = self.spark.runs[run].job;
        let endured = &mut self.drivers[driver].endured;
        endured.lost_before_sink = endured.lost.len();
        let calls = &mut endured.sink_calls;
        *calls += 1;
        if *calls > if self.scenario.retry_sink { Setup::default().sink_tries } else { 1 } {
            let calls = *calls;
            self.violate(format!("the sink of batch {epoch} is called {calls} times in one call"));
        }
        if self.spark.finished && !self.spark.ends_again {
            self.violate("the sink of a finished query is called again".into());
        }
        let delay = self.dice.between(1, 30);
        self.after(delay, move |world| {
            let mut rows = Vec::new();
            for piece in pieces {
                let process = world.processes.get(&piece.member);
                match process.and_then(|one| one.outputs.get(&epoch)?.get(&piece.number)) {
                    Some(some) if some.len() as u64 == piece.rows => rows.extend(some.iter().copied()),
                    Some(_) => return world.violate(format!("{piece:?} of epoch {epoch} has other rows")),
                    None => {
                        let failure = Failure::new(Kind::Echo, format!("member {} does not answer", piece.member.0));
                        return world.sunk(run, job, ticket, Err(failure));
                    }
                }
            }
            let delay = world.dice.between(1, 40);
            world.after(delay, move |world| {
                let live = world.spark.runs[run].job == job && world.drivers[driver].alive;
                if !live && world.dice.once_in(2) {
                    return;
                }
                if live && world.spark.bad_sinks > 0 {
                    world.spark.bad_sinks -= 1;
                    world.reached("sink raised");
                    world.drivers[driver].endured.raised = true;
                    return world.sunk(run, job, ticket, Err(Failure::new(Kind::User, "the sink raised")));
                }
                // It writes its batch id, whoever asked for it.
                if live || world.spark.commits <= epoch {
                    world.spark.sink.insert(epoch, rows);
                }
                world.sunk(run, job, ticket, Ok(()));
            });
        });
    }

    fn sunk(&mut self, run: usize, job: u64, ticket: u64, outcome: Result<(), Failure>) {
        let driver = self.spark.runs[run].driver;
        if self.spark.runs[run].job == job {
            self.reached("sink returned");
            self.hear(driver, Event::Sunk { ticket, outcome });
        }
    }
}
