//! Member processes: the member's machine, its workers, staging, frozen outputs and its side of storage.

use std::collections::BTreeMap;

use penstock_bins::{BinTable, Command, Routing, Shelf, number_of, range_of};
use penstock_dataflow::fabric;

use super::flow::{End, Loop, LoopSetup, Record, Share, Told};
use super::ledger::{Ledger, Out, Row, Value, hash};
use super::planted;
use super::storage::Storage;
use super::world::{QUERY, World};
use crate::machine::{
    Claim, DataFile, Event, Failure, Kind, Member, MemberEffect, MemberEvent, MemberId, Range, Ranges, Recut, Release,
    Stamp, Start,
};

/// One resident process.
pub struct Process {
    pub driver: usize,
    pub slot: u32,
    /// Whether its engine knows of it.
    pub joined: bool,
    pub executor: String,
    /// Whether the driver has given it up: nothing that it says is heard.
    pub silent: bool,
    /// Whether its executor is going.
    pub drains: bool,
    /// Of the bins of its engine.
    bits: u8,
    machine: Member,
    shelf: Shelf<Ledger>,
    restored: BTreeMap<Range, BTreeMap<u64, Value>>,
    pub group: Option<Group>,
    /// What the workers took at the end of an epoch.
    record: Option<(Stamp, u64, Record)>,
    /// By epoch: outputs by worker.
    pub outputs: BTreeMap<u64, BTreeMap<u32, Vec<Out>>>,
    pub staged: BTreeMap<(u64, u32, u64), Vec<Row>>,
}

/// The workers of one generation.
pub struct Group {
    pub stamp: Stamp,
    pub loops: Vec<Loop>,
    /// Its workers are over: what they leave is as it was, also bins that were on their way between two epochs.
    pub failed: bool,
    life: u64,
}

impl World {
    /// A resident starts and joins the registry.
    pub fn join(&mut self, driver: usize, slot: u32) {
        self.members += 1;
        let member = MemberId(self.members);
        let executor = format!("executor {}", self.dice.below(4));
        let process = Process {
            driver,
            slot,
            executor: executor.clone(),
            joined: false,
            silent: false,
            drains: false,
            bits: self.drivers[driver].bits,
            machine: Member::new(),
            shelf: Shelf::new(),
            restored: BTreeMap::new(),
            group: None,
            record: None,
            outputs: BTreeMap::new(),
            staged: BTreeMap::new(),
        };
        self.processes.insert(member, process);
        self.reached("member up");
        self.send(1_000 + member.0, driver as u64, move |world| {
            world.hear(driver, Event::MemberUp { slot, member, executor: executor.clone(), executors: 2 });
            if let Some(process) = world.processes.get_mut(&member) {
                process.joined = true;
            }
            // Spark runs a second attempt beside one that serves now and then.
            if world.processes.contains_key(&member) && world.dice.once_in(12) {
                world.members += 1;
                let member = MemberId(world.members);
                world.hear(driver, Event::MemberUp { slot, member, executor, executors: 1 });
            }
        });
    }

    /// A process is gone; its driver sees the end of the connection.
    pub fn end_process(&mut self, member: MemberId, why: &str) {
        let Some(process) = self.processes.remove(&member) else { return };
        let (driver, silent, reason) = (process.driver, process.silent, why.to_owned());
        drop(process);
        self.note(|| format!("member {} ends: {why}", member.0));
        if silent {
            return; // its loss was told
        }
        self.send(1_000 + member.0, driver as u64, move |world| {
            let delay = world.dice.below(40);
            world.after(delay, move |world| {
                if world.dice.once_in(10) {
                    world.hear(driver, Event::MemberLost { member, reason: reason.clone() });
                }
                world.hear(driver, Event::MemberLost { member, reason });
            });
        });
    }

    /// The member's machine hears something, and what it asks for is done.
    pub fn tell_member(&mut self, member: MemberId, event: MemberEvent) {
        let Some(process) = self.processes.get_mut(&member) else { return };
        let effects = process.machine.step(event.clone());
        self.note(|| format!("member {} <- {event:?}", member.0));
        for effect in effects {
            self.note(|| format!("member {} -> {effect:?}", member.0));
            self.member_effect(member, effect);
        }
    }

    /// A member says something to its driver; what is under way when it is given up is not heard either.
    fn say(&mut self, member: MemberId, driver: usize, event: Event) {
        self.send(1_000 + member.0, driver as u64, move |world| {
            if world.processes.get(&member).is_none_or(|one| !one.silent) {
                world.hear(driver, event);
            }
        });
    }

    fn later(&mut self, member: MemberId, most: u64, event: MemberEvent) {
        self.soon(most, move |world| world.tell_member(member, event));
    }

    fn member_effect(&mut self, member: MemberId, effect: MemberEffect) {
        let Some(process) = self.processes.get_mut(&member) else { return };
        let driver = process.driver;
        match effect {
            MemberEffect::Reply { ticket, answer } => {
                let twice = self.dice.once_in(30).then(|| answer.clone());
                for answer in std::iter::once(answer).chain(twice) {
                    self.say(member, driver, Event::Answer { ticket, answer });
                }
            }
            MemberEffect::Tell { stamp, failure } => {
                let twice = self.dice.once_in(10).then(|| failure.clone());
                for failure in std::iter::once(failure).chain(twice) {
                    self.say(member, driver, Event::GroupFailed { query: QUERY.into(), stamp, failure });
                }
            }
            MemberEffect::EndGroup { epoch } => {
                process.group = None; // its tables leave their bins on the shelf
                process.restored.clear();
                process.record = None;
                let bits = process.bits;
                let bins = process.shelf.inventory("sums", epoch);
                let range = |bin: u32| range_of(bin, bits).expect("a bin");
                let ranges = Ranges::from([("sums".into(), bins.into_iter().map(range).collect())]);
                self.later(member, 8, MemberEvent::Ended(ranges));
            }
            MemberEffect::LoadRanges { ticket, claim, ranges, files } => {
                let delay = self.store_delay(60);
                self.after(delay, move |world| world.load_ranges(member, ticket, &claim, &ranges, &files));
            }
            MemberEffect::StartGroup(start) => {
                let outcome = self.start_group(member, start);
                if outcome.is_ok() {
                    self.schedule_turn(member);
                }
                self.later(member, 5, MemberEvent::Started(outcome));
            }
            MemberEffect::ReleaseInput(release) => self.release_input(member, release),
            MemberEffect::Migrate { handle, steps, max_pause_ms, drains, at_epoch } => {
                let bits = process.bits;
                let number = |(range, to): (Range, u32)| (number_of(range, bits).expect("a bin or part of one"), to);
                let plain = |step: Vec<(Range, u32)>| step.into_iter().map(number).collect();
                if let Some(group) = &mut process.group {
                    let steps = steps.into_iter().map(plain).collect();
                    group.loops[0].migrate(handle, steps, max_pause_ms, drains, at_epoch);
                }
            }
            MemberEffect::Recut { handle, recut } => {
                let number = |range: Range| number_of(range, process.bits).expect("a bin or part of one");
                let commands = match recut {
                    Recut::Split { ranges, by } => {
                        let split = |range| Command::Split { bin: number(range), bits: by };
                        ranges.into_iter().map(split).collect()
                    }
                    Recut::Merge { ranges } => {
                        ranges.into_iter().map(|range| Command::Merge { bin: number(range) }).collect()
                    }
                };
                if let Some(group) = &mut process.group {
                    group.loops[0].recut(handle, commands);
                }
            }
            MemberEffect::CancelMigration { handle } => {
                if let Some(group) = &mut process.group {
                    group.loops[0].cancel(handle);
                }
            }
            MemberEffect::WriteFiles { ticket, stamp, epoch } => self.write_files(member, ticket, stamp, epoch),
            MemberEffect::MergeFiles { ticket, stamp, files } => {
                let delay = self.store_delay(20);
                self.after(delay, move |world| world.merge_files(member, ticket, stamp, &files));
            }
            MemberEffect::CloseOutputs { epoch } => {
                process.outputs.retain(|one, _| *one > epoch);
                process.shelf.settle_epoch(epoch);
            }
            MemberEffect::SettleEpoch { epoch } => _ = process.shelf.settle_epoch(epoch),
            MemberEffect::DropState => {
                process.group = None;
                process.shelf = Shelf::new();
                process.restored.clear();
                process.record = None;
            }
            MemberEffect::DiscardStaged { epoch } => process.staged.retain(|(one, _, _), _| *one > epoch),
            MemberEffect::DropAll => {
                process.group = None;
                process.shelf = Shelf::new();
                process.restored.clear();
                process.record = None;
                process.outputs.clear();
                process.staged.clear();
            }
        }
    }

    fn start_group(&mut self, member: MemberId, start: Start) -> Result<(), Failure> {
        let internal = |what: String| Failure::new(Kind::Internal, what);
        let process = self.processes.get_mut(&member).expect("it is here");
        let threads = start.threads as usize;
        let seed = self.scenario.seed ^ start.stamp.generation;
        let fabric = self
            .fabrics
            .entry((process.driver, start.stamp.generation))
            .or_insert_with(|| fabric::shuffled(start.members.len() * threads, seed).into_iter().map(Some).collect());
        let layout = &start.layouts["sums"];
        let routing = Routing::of_ranges(start.bits, layout.ranges()).map_err(|error| internal(error.to_string()))?;
        let workers: Vec<u32> = (0..start.threads).map(|thread| start.rank * start.threads + thread).collect();
        let mut tables: Vec<(u32, BinTable<Ledger>)> = if start.fresh {
            process.shelf = Shelf::new();
            workers.iter().map(|worker| (*worker, BinTable::fresh(&routing, *worker, &Ledger::default))).collect()
        } else {
            let undone = start.epoch + u64::from(planted("survivors do not undo"));
            let rebuilt = process.shelf.rebuild("sums", undone, &routing, &workers);
            let rebuilt = match rebuilt {
                Ok(rebuilt) => rebuilt,
                Err(error) => {
                    let what = format!("member {} cannot rebuild: {error}", member.0);
                    self.violate(what.clone());
                    return Err(internal(what));
                }
            };
            let mut tables = rebuilt.tables;
            for bin in rebuilt.missing {
                let restored = range_of(bin, start.bits).and_then(|range| process.restored.remove(&range));
                let Some(map) = restored else {
                    let what = format!("member {} owns bin {bin} and neither has nor loaded it", member.0);
                    self.violate(what.clone());
                    return Err(internal(what));
                };
                let owner = routing.owner_of(bin);
                let (_, table) = tables.iter_mut().find(|(worker, _)| *worker == owner).expect("a local worker");
                table.install(bin, Box::new(Ledger::of(map))).map_err(|error| internal(error.to_string()))?;
            }
            tables
        };
        process.restored.clear();
        // Bins may move in idle slices before the epoch is marked at its cut.
        tables.iter_mut().for_each(|(_, table)| table.unmark(start.epoch));
        let mut loops = Vec::new();
        for (worker, table) in tables {
            let endpoint = fabric[worker as usize].take().expect("each worker starts once in a generation");
            let setup = LoopSetup {
                endpoint,
                routing: routing.clone(),
                table,
                shelf: process.shelf.clone(),
                local: workers.iter().map(|worker| *worker as usize).collect(),
                epoch: start.epoch,
                watermark: start.watermark,
                salt: start.stamp.generation,
            };
            loops.push(Loop::new(setup).map_err(|error| internal(error.to_string()))?);
        }
        process.outputs.retain(|epoch, _| *epoch < start.epoch);
        let life = self.members << 32 | start.stamp.generation;
        process.group = Some(Group { stamp: start.stamp, loops, failed: false, life });
        self.reached("group started");
        Ok(())
    }

    fn release_input(&mut self, member: MemberId, release: Release) {
        let process = self.processes.get_mut(&member).expect("it is here");
        let mut rows = Vec::new();
        for commit in &release.feeds {
            match process.staged.get(&(release.epoch, commit.partition, commit.attempt)) {
                Some(staged) if staged.len() as u64 == commit.rows => rows.extend(staged.iter().copied()),
                _ => {
                    return self.violate(format!("member {} is to release {commit:?}, which is not staged", member.0));
                }
            }
        }
        let Some(group) = &mut process.group else { return };
        let count = group.loops.len();
        for (at, one) in group.loops.iter_mut().enumerate() {
            let own: Vec<Row> = rows.iter().copied().skip(at).step_by(count).collect();
            let end = End { watermark: release.watermark, clock: release.clock_ms, finish: release.finish };
            one.release(Share { epoch: release.epoch, slices: own.chunks(3).map(<[_]>::to_vec).collect(), end });
        }
    }

    fn schedule_turn(&mut self, member: MemberId) {
        let Some(life) = self.processes.get(&member).and_then(|one| Some(one.group.as_ref()?.life)) else { return };
        self.soon(3, move |world| world.turn(member, life));
    }

    /// Workers of a process take turns; what they tell goes to the machine.
    fn turn(&mut self, member: MemberId, life: u64) {
        let Some(process) = self.processes.get_mut(&member) else { return };
        let Some(group) = process.group.as_mut().filter(|group| group.life == life) else { return };
        let (stamp, driver, now) = (group.stamp, process.driver, self.now);
        let (mut told, mut failed, mut busy) = (Vec::new(), None, false);
        for one in group.loops.iter_mut().filter(|one| one.has_work()) {
            let worker = one.index() as u32;
            let mut some = Vec::new();
            match one.turn(now, &mut some) {
                Ok(more) => busy |= more,
                Err(error) => failed = Some(error.to_string()),
            }
            told.extend(some.into_iter().map(|one| (worker, one)));
        }
        group.failed |= failed.is_some();
        let moved = !told.is_empty() || busy;
        let mut events = Vec::new();
        for (worker, one) in told {
            match one {
                Told::Epoch { epoch, rows, late, record } => {
                    let made = rows.len() as u64;
                    process.outputs.entry(epoch).or_default().insert(worker, rows);
                    match &mut process.record {
                        Some((was, of, all)) if *was == stamp && *of == epoch => all.extend(record),
                        other => *other = Some((stamp, epoch, record)),
                    }
                    events.push(MemberEvent::EpochDone {
                        epoch,
                        worker,
                        rows: made,
                        late_rows: late,
                        side_rows: Vec::new(),
                    });
                }
                Told::Migrated { handle, times, refused } => {
                    let refused = refused.map(|error| Failure::new(Kind::Data, error));
                    events.push(MemberEvent::MigrationDone { handle, times, refused });
                }
            }
        }
        if let Some(error) = &failed {
            // An operator that fails is a fault of the flow or the protocol; a peer that is gone is not.
            let ours = error.contains("failed") || error.contains("panicked");
            if ours && !error.contains("aborted") {
                self.violate(format!("member {}: {error}", member.0));
            }
            events.push(MemberEvent::Failed(Failure::new(Kind::Echo, error.clone())));
        }
        for event in events {
            if matches!(event, MemberEvent::EpochDone { .. }) {
                self.reached("epoch done");
            }
            self.tell_member(member, event);
        }
        if moved {
            self.check_owners(driver, stamp);
        }
        if failed.is_none() {
            let pause = match (self.dice.once_in(6), busy) {
                (true, _) => self.dice.between(5, 60),
                (_, true) => self.dice.below(3),
                (_, false) => self.dice.between(3, 12),
            };
            self.after(pause, move |world| world.turn(member, life));
        }
    }

    // Storage

    fn load_ranges(&mut self, member: MemberId, ticket: u64, claim: &Claim, ranges: &Ranges, files: &[DataFile]) {
        let Some(driver) = self.processes.get(&member).map(|one| one.driver) else { return };
        let outcome = match self.store_works() {
            Err(_) => {
                self.refuse(driver, Some(member));
                Err(Failure::new(Kind::Store, "the store is down"))
            }
            Ok(()) if !self.storage.has(claim) => Err(Failure::new(Kind::Data, "the claim is not here")),
            Ok(()) => self.storage.restored(files).map_err(Failure::from),
        };
        let outcome = outcome.map(|keys| {
            let process = self.processes.get_mut(&member).expect("it is here");
            for range in ranges.values().flatten() {
                let own = keys.iter().filter(|(key, _)| range.contains(hash(key)));
                process.restored.insert(*range, own.map(|(key, value)| (*key, *value)).collect());
            }
            Vec::new()
        });
        self.reached("loaded");
        self.tell_member(member, MemberEvent::Stored { ticket, outcome });
    }

    fn write_files(&mut self, member: MemberId, ticket: u64, stamp: Stamp, epoch: u64) {
        self.reached("write asked");
        let process = &self.processes[&member];
        let driver = process.driver;
        let record = match &process.record {
            Some((was, of, record)) if *was == stamp && *of == epoch => record,
            _ => {
                let outcome = Err(Failure::new(Kind::Stale, "no such record"));
                return self.later(member, 3, MemberEvent::Stored { ticket, outcome });
            }
        };
        let generation = stamp.generation;
        let bytes = Storage::segments(record);
        let empty = record.is_empty();
        let delay = self.store_delay(60);
        // Two writes of one record may be under way at once: each has a name of its own.
        let own = if planted("a record has one name") { 0 } else { ticket };
        let name = format!("data-{generation:020}-{epoch:020}-{:08x}{own:08x}", member.0);
        if self.dice.once_in(self.scenario.slow) {
            // It is given up, and arrives all the same, or in part.
            let (late, whole) = (name.clone(), self.dice.once_in(2));
            let cut = if whole { bytes.len() } else { bytes.len() / 2 };
            let landing = bytes[..cut].to_vec();
            let delay = self.dice.between(30, 600);
            self.after(delay, move |world| _ = world.storage.files.insert(late, landing));
            self.refuse(driver, Some(member));
            let outcome = Err(Failure::new(Kind::Store, "the store does not answer"));
            return self.later(member, 30, MemberEvent::Stored { ticket, outcome });
        }
        self.after(delay, move |world| {
            if !world.processes.contains_key(&member) {
                // The process died while it wrote.
                if world.dice.once_in(2) {
                    let cut = bytes.len() / 2;
                    world.storage.files.insert(name, bytes[..cut].to_vec());
                }
                return;
            }
            let outcome = match world.store_works() {
                Ok(()) if empty => Ok(Vec::new()),
                Ok(()) => Ok(vec![world.storage.put(name, bytes, epoch, generation)]),
                Err(_) => {
                    let cut = bytes.len() / 2;
                    world.storage.files.insert(name, bytes[..cut].to_vec());
                    world.refuse(driver, Some(member));
                    Err(Failure::new(Kind::Store, "the store is down"))
                }
            };
            world.reached("written");
            world.tell_member(member, MemberEvent::Stored { ticket, outcome });
        });
    }

    /// A file is written in part, and then has its name: a part that somebody deletes meanwhile is gone.
    fn merge_files(&mut self, member: MemberId, ticket: u64, stamp: Stamp, files: &[DataFile]) {
        if !self.processes.contains_key(&member) {
            return;
        }
        let generation = stamp.generation;
        let epoch = files.iter().map(|file| file.epoch).max().unwrap_or(0);
        let merged = match self.store_works() {
            Err(_) => Err(Failure::new(Kind::Store, "the store is down")),
            Ok(()) => self.storage.merged(files, 1 + (ticket % 2) as u32).map_err(Failure::from),
        };
        self.reached("merging files");
        let parts = match merged {
            Ok(parts) => parts,
            Err(failure) => return self.tell_member(member, MemberEvent::Stored { ticket, outcome: Err(failure) }),
        };
        let name = format!("data-{generation:020}-{epoch:020}-{ticket:08x}");
        let part = format!(".{name}.{ticket:x}");
        let [bytes, rest @ ..] = &parts[..] else { unreachable!("there is one") };
        self.storage.files.insert(part.clone(), bytes[..bytes.len() / 2].to_vec());
        // One of several is whole while the next is written.
        for (number, bytes) in (1..).zip(rest) {
            self.storage.put(format!("{name}{number}"), bytes.clone(), epoch, generation);
        }
        let delay = self.dice.between(1, self.scenario.merge_ms);
        self.after(delay, move |world| {
            if !world.processes.contains_key(&member) {
                return;
            }
            let outcome = match world.storage.files.remove(&part) {
                Some(_) => {
                    let name = |number| if number == 0 { name.clone() } else { format!("{name}{number}") };
                    let put = |(number, bytes)| world.storage.put(name(number), bytes, epoch, generation);
                    Ok((0..).zip(parts).map(put).collect())
                }
                None => Err(Failure::new(Kind::Store, format!("{part} is not there"))),
            };
            world.reached(if outcome.is_ok() { "merged" } else { "not merged" });
            // Of a generation that has ended it is not wanted.
            if outcome.is_err() && world.scenario.few.is_some() && world.times("crash") == 0 {
                world.violate(format!("{part} was deleted while it was written"));
            }
            // Others look into the folder before the engine hears of it.
            world.later(member, 60, MemberEvent::Stored { ticket, outcome });
        });
    }
}
