//! Virtual time, who lives in it, and how messages travel.

use std::collections::{BTreeMap, BTreeSet};

use penstock_balance::Strategy;
use penstock_dataflow::Endpoint;

use super::Dice;
use super::excuses::Endured;
use super::faults::Plan;
use super::hosts::Process;
use super::spark::Spark;
use super::storage::Storage;
use crate::machine::{
    Claim, Effect, Engine, EngineError, Event, Manifest, MemberEvent, MemberId, Operator, Plan as Flow, Program,
    Request, Setup, StoreError, Stored, Ticket, encode,
};

/// Something that happens at its time.
type Happening = Box<dyn FnOnce(&mut World)>;

/// One driver process with its engine.
pub struct Driver {
    pub engine: Engine,
    pub alive: bool,
    /// A claim that it had asked for was made when it was dead.
    pub late_claim: bool,
    pub nonce: u64,
    pub slots: BTreeMap<u32, u64>,
    pub bits: u8,
    /// What every call of a user came to: handle, and whether it ended.
    pub handles: BTreeMap<u64, bool>,
    /// Moves, splits and merges that are under way, with their generations.
    pub moving: BTreeMap<Ticket, u64>,
    /// The batch whose commit it wants to be told of.
    pub watched: Option<u64>,
    /// The functions that it was given last, and by generation those that workers began with.
    pub functions: u64,
    pub started: BTreeMap<u64, u64>,
    /// What it has been through since its call began, and the members that it wanted no more.
    pub endured: Endured,
    sent_away: BTreeSet<MemberId>,
}

/// What a run is made with.
#[derive(Clone, Debug)]
pub struct Scenario {
    pub seed: u64,
    pub workers: u32,
    pub threads: u32,
    pub bits: u8,
    pub batches: u64,
    pub durable: bool,
    pub retry_sink: bool,
    pub takeover: bool,
    /// Of two that make a claim of one number at the same time one is told that it came second.
    pub exclusive: bool,
    pub merge_files: usize,
    /// How long a merge of files takes at most.
    pub merge_ms: u64,
    /// A manifest names at most so many files, and twice as many are there.
    pub few: Option<u64>,
    /// Manifests that are kept.
    pub keep: u32,
    /// One operation of storage in so many is slow.
    pub slow: u64,
    pub faults: Plan,
}

pub struct World {
    pub scenario: Scenario,
    pub now: u64,
    pub dice: Dice,
    queue: BTreeMap<(u64, u64), Happening>,
    sequence: u64,
    links: BTreeMap<(u64, u64), u64>,
    pub drivers: Vec<Driver>,
    pub processes: BTreeMap<MemberId, Process>,
    pub fabrics: BTreeMap<(usize, u64), Vec<Option<Endpoint>>>,
    pub storage: Storage,
    pub spark: Spark,
    pub members: u64,
    /// A resident that is asked for waits until then.
    pub no_slots_until: u64,
    /// Number of the functions of the flow: edited ones have another.
    pub functions: u64,
    /// What is written now arrives in part, where that can be; manifests that did.
    tears: bool,
    pub torn: BTreeSet<String>,
    /// What must not be, in the order found.
    pub violations: Vec<String>,
    /// Attempt by epoch, as the sink has it.
    pub salts: BTreeMap<u64, u64>,
    pub trace: Option<Vec<String>>,
    /// Milestones that faults wait for.
    pub seen: BTreeMap<String, u64>,
    /// Whether nothing has struck but what an engine gets over by itself.
    pub only_mended: bool,
    pub events: u64,
    pub done: bool,
    /// Why the query ended before its batches, where it may.
    pub ended: Option<EngineError>,
}

pub const QUERY: &str = "q";
/// How long an engine waits for members.
pub const START_MS: u64 = 3_000;

impl World {
    pub fn new(scenario: Scenario) -> World {
        let dice = Dice(scenario.seed.wrapping_mul(0x2545_F491_4F6C_DD1D) ^ 0x5eed);
        let trace = std::env::var_os("PENSTOCK_TRACE").map(|_| Vec::new());
        World {
            scenario,
            now: 1_000,
            dice,
            queue: BTreeMap::new(),
            sequence: 0,
            links: BTreeMap::new(),
            drivers: Vec::new(),
            processes: BTreeMap::new(),
            fabrics: BTreeMap::new(),
            storage: Storage::default(),
            spark: Spark::default(),
            members: 0,
            no_slots_until: 0,
            functions: 0,
            tears: false,
            torn: BTreeSet::new(),
            violations: Vec::new(),
            salts: BTreeMap::new(),
            trace,
            seen: BTreeMap::new(),
            only_mended: true,
            events: 0,
            done: false,
            ended: None,
        }
    }

    /// Runs to the end; what was violated, if anything.
    pub fn run(mut self) -> World {
        self.new_driver();
        self.spark_starts(0);
        let horizon = 400_000;
        while let Some(((time, _), happening)) = self.queue.pop_first() {
            self.now = self.now.max(time);
            self.events += 1;
            happening(&mut self);
            self.strike();
            if !self.violations.is_empty() || self.done {
                break;
            }
            if self.now > horizon || self.events > 200_000 {
                self.violate(format!("it does not end: {}", self.under_way()));
                break;
            }
        }
        if !self.done && self.violations.is_empty() {
            self.violate(format!("nothing happens any more: {}", self.under_way()));
        }
        self
    }

    fn under_way(&self) -> String {
        let calls: Vec<String> = self.spark.runs.iter().map(|run| format!("{:?}", run.call)).collect();
        format!(
            "at {} after {} events, {} commits, calls {}",
            self.now,
            self.events,
            self.spark.commits,
            calls.join(" ")
        )
    }

    pub fn violate(&mut self, what: String) {
        self.note(|| format!("VIOLATION {what}"));
        self.violations.push(what);
    }

    pub fn note(&mut self, what: impl FnOnce() -> String) {
        if let Some(trace) = &mut self.trace {
            trace.push(format!("{:>7} {}", self.now, what()));
        }
    }

    /// A milestone that a fault may wait for.
    pub fn reached(&mut self, what: &str) {
        *self.seen.entry(what.to_owned()).or_default() += 1;
    }

    pub fn times(&self, what: &str) -> u64 {
        self.seen.get(what).copied().unwrap_or(0)
    }

    // Time

    pub fn after(&mut self, delay: u64, happening: impl FnOnce(&mut World) + 'static) {
        self.sequence += 1;
        self.queue.insert((self.now + delay, self.sequence), Box::new(happening));
    }

    /// Later, after a while that the dice choose.
    pub fn soon(&mut self, most: u64, happening: impl FnOnce(&mut World) + 'static) {
        let delay = self.dice.below(most + 1);
        self.after(delay, happening);
    }

    /// Over a link: in order with what went over it before.
    pub fn send(&mut self, from: u64, to: u64, happening: impl FnOnce(&mut World) + 'static) {
        let delay = if self.dice.once_in(20) { self.dice.below(60) } else { self.dice.below(6) };
        let at = (self.now + delay).max(self.links.get(&(from, to)).copied().unwrap_or(0));
        self.links.insert((from, to), at);
        self.sequence += 1;
        self.queue.insert((at, self.sequence), Box::new(happening));
    }

    // Drivers

    /// A new driver process, with an engine that begins.
    pub fn new_driver(&mut self) -> usize {
        let scenario = &self.scenario;
        let nonce = self.dice.next();
        // A restart may choose another number of workers and ranges.
        let (workers, bits) = match self.drivers.is_empty() {
            true => (scenario.workers, scenario.bits),
            false => (self.dice.between(1, 3) as u32, self.dice.between(1, 3) as u8),
        };
        let setup = Setup {
            workers,
            threads: self.scenario.threads,
            bits,
            takeover: self.scenario.takeover && !self.drivers.is_empty(),
            retry_sink: self.scenario.retry_sink,
            nonce,
            registry: format!("driver-{}", self.drivers.len()),
            backoff_ms: 20,
            loss_ms: 200,
            start_ms: START_MS,
            merge_files: self.scenario.merge_files,
            keep: self.scenario.keep,
            shares: Strategy::Fluid,
            max_pause_ms: None,
            ..Setup::default()
        };
        let mut engine = Engine::new(setup);
        let effects = engine.begin();
        self.drivers.push(Driver {
            engine,
            alive: true,
            late_claim: false,
            nonce,
            slots: BTreeMap::new(),
            bits,
            handles: BTreeMap::new(),
            moving: BTreeMap::new(),
            watched: None,
            functions: 0,
            started: BTreeMap::new(),
            endured: Endured::default(),
            sent_away: BTreeSet::new(),
        });
        let driver = self.drivers.len() - 1;
        self.perform(driver, effects);
        driver
    }

    pub fn program(&self) -> Program {
        let operator = Operator {
            name: "sums".into(),
            kind: "sum".into(),
            types: "long".into(),
            version: 1,
            columns: String::new(),
            reads: None,
        };
        let plan = Flow { operators: vec![operator], sources: vec!["rows".into()] };
        let functions = self.functions;
        Program {
            plan,
            lateness_us: vec![Some(super::spark::LATENESS)],
            idle_after_ms: Vec::new(),
            durable: self.scenario.durable,
            functions,
            columns: String::new(),
            // Every other edit gives other columns; where nothing is durable that may be refused.
            output: if self.scenario.durable { format!("columns {}", functions / 2) } else { String::new() },
        }
    }

    /// The engine of a driver hears something, and what it asks for is done.
    pub fn hear(&mut self, driver: usize, event: Event) {
        if !self.drivers[driver].alive {
            return;
        }
        self.note(|| format!("engine {driver} <- {event:?}"));
        let one = &mut self.drivers[driver];
        match &event {
            Event::Open { program, .. } => one.functions = program.functions,
            Event::Batch { .. } | Event::Finish { .. } => one.endured = Endured::default(),
            Event::MemberLost { member, .. } if !one.sent_away.contains(member) => {
                one.endured.lost.insert(*member);
            }
            _ => {}
        }
        let ended = match &event {
            Event::Answer { ticket, .. } => self.drivers[driver].moving.remove(ticket),
            _ => None,
        };
        let effects = self.drivers[driver].engine.step(event);
        self.perform(driver, effects);
        if let Some(generation) = ended
            && self.drivers[driver].moving.is_empty()
        {
            self.check_layout(driver, generation);
        }
    }

    fn perform(&mut self, driver: usize, effects: Vec<Effect>) {
        for effect in effects {
            self.note(|| format!("engine {driver} -> {effect:?}"));
            self.effect(driver, effect);
        }
    }

    fn effect(&mut self, driver: usize, effect: Effect) {
        match effect {
            Effect::StartResident { slot } => {
                let life = self.dice.next();
                self.drivers[driver].slots.insert(slot, life);
                let delay = self.dice.between(5, 120) + self.no_slots_until.saturating_sub(self.now);
                self.after(delay, move |world| {
                    if world.drivers[driver].alive && world.drivers[driver].slots.get(&slot) == Some(&life) {
                        world.join(driver, slot);
                    }
                });
            }
            Effect::RetireResident { slot } => {
                self.drivers[driver].slots.remove(&slot);
                // One before it may hang, or not have heard that it is given up.
                let found = self.processes.iter().rfind(|(_, one)| one.driver == driver && one.slot == slot);
                if let Some((member, drains)) = found.map(|(member, one)| (*member, one.drains)) {
                    if drains {
                        self.reached("drained");
                    }
                    self.send_away(driver, member, "it was told to end");
                }
            }
            Effect::Dismiss { member, .. } => self.send_away(driver, member, "it was not needed"),
            Effect::Call { ticket, member, request, .. } => {
                if let Request::Migrate { stamp, .. } | Request::Recut { stamp, .. } = &request {
                    let moving = &mut self.drivers[driver].moving;
                    moving.retain(|_, generation| *generation == stamp.generation);
                    moving.insert(ticket, stamp.generation);
                }
                self.check_functions(driver, &request);
                self.send(driver as u64, 1_000 + member.0, move |world| {
                    world.tell_member(member, MemberEvent::Asked { ticket, request });
                });
            }
            Effect::Feed { ticket, epoch, members, .. } => self.feed(driver, ticket, epoch, members),
            Effect::Sink { ticket, epoch, pieces, .. } => self.sink(driver, ticket, epoch, pieces),
            Effect::ReadCheckpoint { ticket, since, known, .. } => {
                self.reached("checkpoint asked");
                self.store(driver, ticket, move |world| {
                    let holder = world.storage.holder();
                    let answers = |one: &Driver| one.alive && Some(one.nonce) == holder;
                    let held = world.drivers.iter().enumerate().any(|(at, one)| at != driver && answers(one));
                    Stored::Contents(world.storage.contents(held, since, &known))
                });
            }
            Effect::CreateClaim { ticket, claim, .. } => {
                let holder = self.storage.holder();
                let held = |(at, one): (usize, &Driver)| at != driver && one.alive && Some(one.nonce) == holder;
                if !self.scenario.takeover && self.drivers.iter().enumerate().any(held) {
                    self.violate("a checkpoint is claimed whose engine answers".into());
                }
                let looked = !self.scenario.exclusive && !self.storage.files.contains_key(&Claim::name(claim.number));
                self.store(driver, ticket, move |world| {
                    if !world.drivers[driver].alive {
                        world.drivers[driver].late_claim = true;
                    }
                    if looked && !world.storage.claim(&claim) {
                        world.reached("claim overwritten");
                        world.storage.files.insert(Claim::name(claim.number), encode(&claim));
                    }
                    Stored::Claimed(world.storage.claim(&claim))
                });
            }
            Effect::ReadClaims { ticket, .. } => {
                self.store(driver, ticket, |world| Stored::NewestClaim {
                    number: world.storage.newest_claim(),
                    nonce: world.storage.holder(),
                });
            }
            Effect::WriteManifest { ticket, manifest, .. } => {
                self.reached("manifest asked");
                self.store(driver, ticket, move |world| {
                    world.write_manifest(&manifest);
                    Stored::Written
                });
            }
            Effect::WriteShown { shown, .. } => {
                self.soon(40, move |world| {
                    if world.storage.down_until <= world.now {
                        world.storage.files.insert(shown.name(), crate::machine::encode(&shown));
                    }
                });
            }
            Effect::Delete { ticket, names, .. } => self.store(driver, ticket, |world| {
                for name in names {
                    world.storage.files.remove(&name);
                }
                Stored::Deleted
            }),
            Effect::Timer { ticket, after_ms } => {
                self.after(after_ms, move |world| world.hear(driver, Event::Timer { ticket }));
            }
            Effect::WatchCommit { epoch, .. } => {
                self.reached("watched");
                self.drivers[driver].watched = Some(epoch);
                self.tell_commit(driver);
            }
            Effect::Complete { epoch, .. } => self.call_returns(driver, epoch, None),
            Effect::Fail { epoch, error, .. } => self.call_returns(driver, epoch, Some(error)),
            Effect::Moving { .. } => self.reached("moving"),
            Effect::Dropped { outcome, .. } => {
                if outcome.is_ok() {
                    // As another engine it is told then that the query has ended, and how to have the end again.
                    (self.spark.ended_by, self.spark.ends_again) = (None, false);
                }
                self.reached(if outcome.is_ok() { "dropped" } else { "not dropped" });
            }
            Effect::Moved { handle, outcome } => {
                self.drivers[driver].handles.insert(handle, true);
                self.reached(if outcome.is_ok() { "moved" } else { "cut off" });
            }
            Effect::Rescaled { handle, outcome, .. } => {
                self.drivers[driver].handles.insert(handle, true);
                self.reached(if outcome.is_ok() { "rescaled" } else { "not rescaled" });
            }
        }
    }

    fn send_away(&mut self, driver: usize, member: MemberId, why: &str) {
        self.drivers[driver].sent_away.insert(member);
        self.end_process(member, why);
    }

    fn write_manifest(&mut self, manifest: &Manifest) {
        let mut bytes = crate::machine::encode(manifest);
        if std::mem::take(&mut self.tears) {
            bytes.truncate(bytes.len() / 2);
            self.torn.insert(manifest.name());
            self.reached("manifest torn");
        }
        self.storage.files.insert(manifest.name(), bytes);
        self.reached("manifest written");
    }

    /// Whether storage works now; if not, whether the effect happens although it says that it did not.
    pub fn store_works(&mut self) -> Result<(), bool> {
        match self.now < self.storage.down_until {
            true => Err(self.dice.once_in(4)),
            false => Ok(()),
        }
    }

    /// How long storage takes.
    pub fn store_delay(&mut self, most: u64) -> u64 {
        match self.dice.once_in(self.scenario.slow) {
            true => self.dice.between(100, 600),
            false => self.dice.between(1, most),
        }
    }

    /// Asks storage for the driver, whose answer may be lost.
    fn store(&mut self, driver: usize, ticket: u64, act: impl FnOnce(&mut World) -> Stored + 'static) {
        let delay = self.store_delay(25);
        self.after(delay, move |world| {
            if !world.drivers[driver].alive {
                // What was on its way to the store may still arrive, whole or not.
                if world.dice.once_in(2) {
                    world.tears = world.dice.once_in(2);
                    act(world);
                    world.tears = false;
                }
                return;
            }
            let outcome = match world.store_works() {
                Ok(()) => Ok(act(world)),
                Err(happens) => {
                    world.refuse(driver, None);
                    if happens {
                        world.tears = world.dice.once_in(2);
                        act(world);
                        world.tears = false;
                    }
                    Err(StoreError::Unavailable("the store is down".into()))
                }
            };
            world.hear(driver, Event::Stored { ticket, outcome });
        });
    }
}
