//! What goes wrong, and when: at a milestone that a test names, or wherever the dice say.

use penstock_balance::Strategy;

use super::hosts::Process;
use super::world::QUERY;
use super::world::World;
use crate::machine::{Event, MemberId, Moving, Range, Recut, Wish};

/// One thing that happens to the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A member process dies; which one, counted over those alive.
    CrashMember(u64),
    /// The executor of a member dies: all its members and feed tasks.
    CrashExecutor(u64),
    /// The driver gives up a member that is silent; it lives and works for so long, and nobody hears it.
    Silence(u64, u64),
    /// No task slot is free for so long.
    NoSlots(u64),
    /// The user stops the query, has the engine forget it, and starts it again.
    Drop,
    /// The driver process dies, its members follow.
    CrashDriver,
    /// Members lose their connections to each other and live.
    CutMesh,
    /// The store does not work for so long.
    StoreDown(u64),
    /// The user stops the query, and starts it again.
    Stop,
    /// The same at once and with other functions, where no batch is under way.
    Edit,
    /// Some ranges go to some workers.
    Migrate,
    /// All ranges go round, one after the other.
    MigrateAll,
    /// Some bin or part is split, or merged.
    Recut,
    /// All ranges are split, or merged into bins again.
    RecutAll,
    /// Another number of members.
    Rescale(u32),
    /// The user cancels the newest rescale.
    CancelRescale,
    /// The sink raises once.
    SinkRaises,
    /// Feed tasks die so often.
    TasksDie(u32),
    /// A second program runs the query from the same checkpoint.
    SecondEngine,
    /// The user copies the checkpoint, with Spark's logs in it, where no batch is under way.
    Copy,
    /// The user stops the query, puts the copy back and starts it again, in the same program.
    PutBack,
    /// A byte of the newest data file changes.
    Damage,
    /// A byte of the newest manifest changes.
    DamageManifest,
    /// The executor of a member is going; it waits for the member, but not for ever where `true`.
    Drain(u64, bool),
    /// The source gives other rows from now on.
    Unstable,
    /// The user removes the offsets of the next batch that comes again before it does.
    PlanAnew,
}

/// What goes wrong in a run.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// At the n-th time that a milestone is reached.
    pub scripted: Vec<(&'static str, u64, Fault)>,
    /// So many more, at any event.
    pub random: u32,
    /// One in so many events.
    pub rate: u64,
}

impl World {
    /// Lets happen what is due.
    pub fn strike(&mut self) {
        let due = |one: &(&'static str, u64, Fault)| self.times(one.0) >= one.1;
        if let Some(at) = self.scenario.faults.scripted.iter().position(due) {
            let (_, _, fault) = self.scenario.faults.scripted.remove(at);
            return self.happen(fault);
        }
        if self.scenario.faults.random > 0 && self.dice.once_in(self.scenario.faults.rate.max(1)) {
            self.scenario.faults.random -= 1;
            let fault = self.any_fault();
            let (returned, committed) = (self.times("returned") + 1, self.times("committed") + 1);
            // Few moments are between two batches, or between the return and the commit of one: these wait for it.
            let waiting = match fault {
                Fault::Stop if self.dice.once_in(3) => vec![("returned", returned, fault)],
                Fault::Edit => vec![("committed", committed, fault)],
                Fault::PutBack => vec![("committed", committed, Fault::Copy), ("committed", committed + 1, fault)],
                _ => return self.happen(fault),
            };
            self.scenario.faults.scripted.extend(waiting);
        }
    }

    fn any_fault(&mut self) -> Fault {
        match self.dice.below(42) {
            37..39 => Fault::PlanAnew,
            39..41 => Fault::Edit,
            41 if self.scenario.durable => Fault::PutBack,
            41 => Fault::Edit,
            31..33 => Fault::CrashExecutor(self.dice.below(4)),
            33..35 => Fault::Silence(self.dice.below(3), self.dice.between(1, 900)),
            35 => Fault::NoSlots(self.dice.between(100, 5_000)),
            36 if self.scenario.durable => Fault::Drop,
            36 => Fault::Silence(self.dice.below(3), 50),
            26..30 => Fault::Recut,
            30 => Fault::RecutAll,
            24..26 => Fault::Drain(self.dice.below(3), self.dice.once_in(3)),
            0..6 => Fault::CrashMember(self.dice.below(3)),
            6..8 => Fault::CrashDriver,
            8 => Fault::CutMesh,
            9..11 => Fault::StoreDown(self.dice.between(20, 900)),
            11..13 => Fault::Stop,
            13..17 => Fault::Migrate,
            17 => Fault::MigrateAll,
            18..20 => Fault::Rescale(self.dice.between(1, 4) as u32),
            20 => Fault::SinkRaises,
            21 => Fault::TasksDie(self.dice.between(1, 6) as u32),
            22 => Fault::SecondEngine,
            _ => Fault::CrashMember(self.dice.below(3)),
        }
    }

    fn handle(&mut self, driver: usize) -> u64 {
        let handles = &mut self.drivers[driver].handles;
        let handle = handles.len() as u64 + 1;
        handles.insert(handle, false);
        handle
    }

    fn live_driver(&self) -> Option<usize> {
        self.drivers.iter().rposition(|driver| driver.alive)
    }

    pub fn happen(&mut self, fault: Fault) {
        self.note(|| format!("FAULT {fault:?}"));
        self.only_mended &= fault.is_mended();
        match fault {
            Fault::CrashMember(which) => {
                let alive: Vec<MemberId> = self.processes.keys().copied().collect();
                if let Some(member) = alive.get(which as usize % alive.len().max(1)) {
                    self.reached("crash");
                    self.end_process(*member, "its process was killed");
                }
            }
            Fault::CrashExecutor(which) => {
                let alive: Vec<(usize, String)> =
                    self.processes.values().map(|one| (one.driver, one.executor.clone())).collect();
                let Some(gone) = alive.get(which as usize % alive.len().max(1)) else { return };
                let there = |one: &Process| (one.driver, &one.executor) == (gone.0, &gone.1);
                let members = self.processes.iter().filter(|(_, one)| there(one)).map(|(member, _)| *member);
                let members: Vec<MemberId> = members.collect();
                self.reached("executor gone");
                self.reached("crash");
                members.into_iter().for_each(|member| self.end_process(member, "its executor is gone"));
                self.spark.bad_tasks += self.dice.below(3) as u32;
            }
            Fault::Silence(which, time) => {
                let known: Vec<MemberId> = self
                    .processes
                    .iter()
                    .filter(|(_, one)| one.joined && !one.silent)
                    .map(|(member, _)| *member)
                    .collect();
                let Some(member) = known.get(which as usize % known.len().max(1)).copied() else { return };
                let process = self.processes.get_mut(&member).expect("it was listed");
                process.silent = true;
                let driver = process.driver;
                self.reached("silent");
                self.reached("crash");
                self.hear(driver, Event::MemberLost { member, reason: "it was silent".into() });
                self.after(time, move |world| world.end_process(member, "Spark has killed it"));
            }
            Fault::NoSlots(time) => {
                self.reached("no slots");
                self.no_slots_until = self.now + time;
            }
            Fault::Drop => {
                let Some(driver) = self.live_driver() else { return };
                if self.spark.runs.iter().find(|run| run.alive).is_some_and(|run| run.driver == driver) {
                    self.stop_run();
                    self.hear(driver, Event::Drop { query: QUERY.into() });
                }
            }
            Fault::Drain(which, killed) => {
                let known: Vec<MemberId> =
                    self.processes.iter().filter(|(_, one)| one.joined).map(|(member, _)| *member).collect();
                let Some(member) = known.get(which as usize % known.len().max(1)).copied() else { return };
                let process = self.processes.get_mut(&member).expect("it was listed");
                process.drains = true;
                let driver = process.driver;
                self.reached("draining");
                self.hear(driver, Event::Leaving { member });
                if killed {
                    self.soon(600, move |world| {
                        if world.processes.contains_key(&member) {
                            world.reached("crash");
                            world.end_process(member, "its executor was killed");
                        }
                    });
                }
            }
            Fault::CrashDriver => {
                if let Some(driver) = self.live_driver() {
                    self.reached("driver gone");
                    self.crash_driver(driver);
                    let run = self.spark.runs.iter().rposition(|run| run.driver == driver);
                    match run {
                        Some(run) => self.restart(run),
                        None => self.violate("a driver without a run".into()),
                    }
                }
            }
            Fault::CutMesh => {
                let groups = self.processes.values().filter_map(|one| one.group.as_ref());
                let loops: Vec<_> = groups.flat_map(|group| &group.loops).collect();
                let which = self.spark.commits as usize % loops.len().max(1);
                if let Some(one) = loops.get(which) {
                    one.abort();
                    self.reached("mesh cut");
                }
            }
            Fault::PlanAnew => self.spark.anew += 1,
            Fault::StoreDown(time) => self.storage.down_until = self.now + time,
            Fault::Stop => self.stop_run(),
            // What becomes of an end whose results are lost is looked at elsewhere.
            Fault::Edit if self.spark.finished => {}
            Fault::Edit => self.edit_run(),
            Fault::Copy => self.copy_checkpoint(),
            Fault::PutBack => self.put_back(),
            Fault::Migrate | Fault::MigrateAll => self.migrate(fault == Fault::MigrateAll),
            Fault::Recut | Fault::RecutAll => self.recut(fault == Fault::RecutAll),
            Fault::Rescale(workers) => {
                if let Some(driver) = self.live_driver() {
                    let handle = self.handle(driver);
                    self.reached("rescaling");
                    self.hear(driver, Event::Rescale { handle, workers, free: 4 });
                    if self.dice.once_in(3) {
                        self.soon(400, move |world| world.cancel_rescale(driver));
                    }
                }
            }
            Fault::CancelRescale => {
                if let Some(driver) = self.live_driver() {
                    self.cancel_rescale(driver);
                }
            }
            Fault::SinkRaises => self.spark.bad_sinks += 1,
            Fault::TasksDie(times) => self.spark.bad_tasks += times,
            Fault::SecondEngine => {
                if self.scenario.durable && self.live_driver().is_some() && !self.spark.finished {
                    self.reached("second engine");
                    let driver = self.new_driver();
                    self.spark_starts(driver);
                }
            }
            Fault::Damage | Fault::DamageManifest => {
                let kind = if fault == Fault::Damage { "data-" } else { "manifest-" };
                let fits = |(name, bytes): &(&String, &mut Vec<u8>)| name.starts_with(kind) && bytes.len() > 2;
                let newest = self.storage.files.iter_mut().rev().find(fits);
                if let Some((_, bytes)) = newest {
                    let at = bytes.len() / 2;
                    bytes[at] ^= 1;
                    self.reached("damage");
                }
            }
            Fault::Unstable => self.spark.unstable = true,
        }
    }

    /// Ends with a number of members that needs no further slot; what it waits for is always told.
    fn cancel_rescale(&mut self, driver: usize) {
        let Some(facts) = self.drivers[driver].engine.rescaling() else { return };
        if self.drivers[driver].alive && !facts.cancelled {
            self.reached(if facts.leaving > 0 { "cancelled while some leave" } else { "cancelled while some come" });
            let slots = self.drivers[driver].slots.len();
            self.hear(driver, Event::CancelRescale { handle: facts.handle });
            if self.drivers[driver].slots.len() > slots {
                self.violate("a rescale that is cancelled asks for a slot".into());
            }
            if self.drivers[driver].engine.rescaling().is_some_and(|facts| facts.waits.is_empty() && facts.leaving == 0)
            {
                self.violate("a rescale waits for nothing and goes on".into());
            }
        }
    }

    fn migrate(&mut self, all: bool) {
        let Some(driver) = self.live_driver() else { return };
        let bits = self.drivers[driver].bits;
        let known = self.ranges(driver);
        let workers = (self.drivers[driver].slots.len() as u32 * self.scenario.threads).max(1);
        let bins = 1_u64 << bits;
        let count = if all { bins } else { self.dice.between(1, bins) };
        let shift = self.dice.below(u64::from(workers)) as u32;
        let moves = (0..count)
            .map(|at| {
                let bin = if all { at } else { self.dice.below(bins) } as u32;
                let worker = if all { (bin + shift) % workers } else { self.dice.below(u64::from(workers)) as u32 };
                // Now and then a part by itself.
                let one = (!all && self.dice.once_in(2)).then(|| self.dice.below(known.len().max(1) as u64) as usize);
                let range = one.and_then(|at| known.get(at).copied());
                (range.unwrap_or_else(|| Range::new(bin, bits).expect("a bin")), worker)
            })
            .collect::<std::collections::BTreeMap<_, _>>();
        let wish = match self.dice.below(8) {
            0 if !all => Wish::Even,
            _ => Wish::Moves(moves.into_iter().collect()),
        };
        let size = if all { 1 } else { self.dice.between(1, 3) as usize };
        let strategy = if self.dice.once_in(3) { Strategy::Matched { size } } else { Strategy::Batched { size } };
        let max_pause_ms = self.dice.once_in(3).then_some(50);
        let handle = self.handle(driver);
        let facts = self.drivers[driver].engine.facts(QUERY);
        let last = facts.and_then(|facts| facts.epoch).unwrap_or(0);
        // For an epoch to come, one that runs, or one that is over.
        let at_epoch = self.dice.once_in(3).then(|| last + self.dice.below(4));
        let drains = self.dice.once_in(4);
        let moves = vec![Moving { query: QUERY.into(), handle, wish }];
        self.hear(driver, Event::Migrate { moves, strategy, max_pause_ms, drains, at_epoch });
        if self.dice.once_in(5) {
            self.soon(60, move |world| world.hear(driver, Event::CancelMigration { handle }));
        }
    }

    /// The ranges of the query as its engine has them now.
    fn ranges(&self, driver: usize) -> Vec<Range> {
        let layouts = self.drivers[driver].engine.layouts(QUERY);
        layouts.first().map(|layout| layout.ranges().iter().map(|(range, _)| *range).collect()).unwrap_or_default()
    }

    fn recut(&mut self, all: bool) {
        let Some(driver) = self.live_driver() else { return };
        let (bits, known) = (self.drivers[driver].bits, self.ranges(driver));
        let bins = || (0..1 << bits).filter_map(|bin| Range::new(bin, bits));
        let split: Vec<Range> = bins().filter(|bin| !known.contains(bin)).collect();
        let by = self.dice.between(1, 2) as u8;
        let recut = match (all, self.dice.once_in(2)) {
            (_, true) if all && split.len() == 1 << bits => Recut::Merge { ranges: split },
            (true, _) => {
                Recut::Split { ranges: known.into_iter().filter(|range| range.length() == bits).collect(), by }
            }
            (false, true) if !split.is_empty() => {
                Recut::Merge { ranges: vec![split[self.dice.below(split.len() as u64) as usize]] }
            }
            // Also what is split already.
            (false, _) => {
                let some = self.dice.below(known.len().max(1) as u64) as usize;
                let bin = Range::new(self.dice.below(1 << bits) as u32, bits).expect("a bin");
                let range = known.get(some).copied().filter(|_| !self.dice.once_in(4)).unwrap_or(bin);
                Recut::Split { ranges: vec![range], by }
            }
        };
        let handle = self.handle(driver);
        self.reached(if matches!(recut, Recut::Merge { .. }) { "merging" } else { "splitting" });
        let moves = vec![Moving { query: QUERY.into(), handle, wish: Wish::Recut(recut) }];
        let strategy = if self.dice.once_in(2) { Strategy::AllAtOnce } else { Strategy::Fluid };
        self.hear(driver, Event::Migrate { moves, strategy, max_pause_ms: None, drains: false, at_epoch: None });
        if self.dice.once_in(8) {
            self.soon(60, move |world| world.hear(driver, Event::CancelMigration { handle }));
        }
    }

    /// The program dies; what it started notices.
    pub fn crash_driver(&mut self, driver: usize) {
        self.drivers[driver].alive = false;
        self.reached("crash");
        for run in self.spark.runs.iter_mut().filter(|run| run.driver == driver) {
            run.alive = false;
            run.call = None;
            run.job += 1;
        }
        let members: Vec<MemberId> =
            self.processes.iter().filter(|(_, one)| one.driver == driver).map(|(member, _)| *member).collect();
        for member in members {
            self.soon(150, move |world| world.end_process(member, "its driver is gone"));
        }
    }
}
