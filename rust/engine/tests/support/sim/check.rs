//! What has to hold: a serial oracle, and the comparison of every committed batch, the state after it and the end with it.

use std::collections::{BTreeMap, BTreeSet};

use super::ledger::{Out, Tagged, Value};
use super::spark::LATENESS;
use super::world::{QUERY, World};
use crate::machine::{Event, Request, Stamp};

/// The serial flow up to some batch.
#[derive(Default)]
struct Oracle {
    state: BTreeMap<u64, Value>,
    out: Vec<Out>,
    watermark: Option<i64>,
    clock: i64,
    late: u64,
}

impl World {
    fn oracle(&self, batches: u64) -> Oracle {
        let mut oracle = Oracle::default();
        for epoch in 0..batches {
            let offsets = &self.spark.offsets[&epoch];
            oracle.out.clear();
            oracle.clock = oracle.clock.max(offsets.clock);
            for row in &offsets.rows {
                if oracle.watermark.is_some_and(|watermark| row.time < watermark) {
                    oracle.late += 1;
                    continue;
                }
                let tagged = Tagged { row: *row, salt: 0, clock: oracle.clock, epoch };
                oracle.out.push(oracle.state.entry(row.key).or_default().take(tagged));
                if row.last {
                    oracle.state.remove(&row.key);
                }
            }
            let reached = offsets.rows.iter().map(|row| row.time).max().map(|time| time - LATENESS);
            oracle.watermark = oracle.watermark.max(reached);
        }
        oracle
    }

    /// Spark has committed a batch: output, state and manifest are the serial flow's, and of one attempt.
    pub fn check_commit(&mut self, epoch: u64) {
        let oracle = self.oracle(epoch + 1);
        let Some(sunk) = self.spark.sink.get(&epoch) else {
            return self.violate(format!("batch {epoch} is committed and its sink has nothing"));
        };
        let salts: BTreeSet<u64> = sunk.iter().map(|row| row.4).collect();
        let mut plain: Vec<Out> = sunk.iter().map(|row| (row.0, row.1, row.2, row.3, 0)).collect();
        let mut expected = oracle.out.clone();
        plain.sort_unstable();
        expected.sort_unstable();
        if plain != expected {
            return self.violate(format!("batch {epoch} gives {plain:?} where the serial flow gives {expected:?}"));
        }
        if salts.len() > 1 {
            return self.violate(format!("the output of batch {epoch} is of attempts {salts:?}"));
        }
        if !self.scenario.durable {
            return;
        }
        let contents = self.storage.contents(false, 0, &[]);
        let manifest = match contents.serving(epoch) {
            Ok(Some(manifest)) => manifest.clone(),
            Ok(None) => return self.violate(format!("batch {epoch} is committed and has no manifest")),
            Err((name, error)) => return self.violate(format!("{name} {error}")),
        };
        let (named, there) = (manifest.files.len() as u64, contents.files.len() as u64);
        if let Some(few) = self.scenario.few.filter(|few| named > *few || there > 2 * few) {
            return self.violate(format!("batch {epoch} has {named} files of {there}, at most {few} were to be there"));
        }
        for kept in epoch.saturating_sub(self.scenario.keep.into())..epoch {
            let state = match contents.serving(kept) {
                Ok(Some(manifest)) => self.storage.state(&manifest.files).map(drop).map_err(|error| error.to_string()),
                Ok(None) => Err("is not there".to_owned()),
                Err((name, error)) => Err(format!("{name} {error}")),
            };
            if let Err(error) = state {
                return self.violate(format!("batch {epoch} is committed, and what is kept of batch {kept}: {error}"));
            }
        }
        let salt = manifest.generation;
        if self.salts.values().any(|earlier| *earlier > salt) {
            self.violate(format!("attempt {salt} of batch {epoch} comes after {:?}", self.salts));
        }
        self.salts.insert(epoch, salt);
        let strict = self.times("second engine") == 0;
        if strict && salts.iter().any(|one| *one != salt) {
            self.violate(format!("the output of batch {epoch} is of attempt {salts:?}, its manifest of {salt}"));
        }
        let told = (manifest.watermarks[0], manifest.clock_ms, manifest.late_rows);
        if told != (oracle.watermark, oracle.clock, oracle.late) {
            let expected = (oracle.watermark, oracle.clock, oracle.late);
            self.violate(format!(
                "the manifest of batch {epoch} says {told:?} where the serial flow says {expected:?}"
            ));
        }
        match self.storage.state(&manifest.files) {
            Err(error) => self.violate(format!("the state of batch {epoch} cannot be read: {error}")),
            Ok(state) => {
                let held: BTreeMap<u64, Value> =
                    state.into_iter().filter_map(|(key, value)| Some((key, value?))).collect();
                let plain: BTreeMap<u64, Value> =
                    held.iter().map(|(key, value)| (*key, Value { salt: 0, ..*value })).collect();
                if plain != oracle.state {
                    let expected = &oracle.state;
                    return self.violate(format!("the state of batch {epoch} is {plain:?} instead of {expected:?}"));
                }
                for (key, value) in held {
                    if strict && self.salts.get(&(value.epoch - 1)) != Some(&value.salt) {
                        let (of, is) = (value.epoch - 1, value.salt);
                        self.violate(format!("key {key} after batch {epoch} is of attempt {is} at batch {of}"));
                    }
                }
            }
        }
    }

    /// The final epoch gave every key that was there, once.
    pub fn check_finish(&mut self, epoch: u64) {
        let oracle = self.oracle(epoch);
        let expected: Vec<(u64, i64)> = oracle.state.iter().map(|(key, value)| (*key, value.sum)).collect();
        let sunk = self.spark.sink.get(&epoch).cloned().unwrap_or_default();
        let mut given: Vec<(u64, i64)> = sunk.iter().map(|row| (row.0, row.2)).collect();
        given.sort_unstable();
        if given != expected {
            self.violate(format!("the final epoch gives {given:?} instead of {expected:?}"));
        }
    }

    /// Workers begin with the functions of that moment, and an epoch runs with those that were given last.
    pub fn check_functions(&mut self, driver: usize, request: &Request) {
        let one = &mut self.drivers[driver];
        match request {
            Request::Start(start) => _ = one.started.insert(start.stamp.generation, one.functions),
            Request::Release(release) => {
                let (started, given) = (one.started.get(&release.stamp.generation).copied(), one.functions);
                if started != Some(given) {
                    let epoch = release.epoch;
                    self.violate(format!("epoch {epoch} runs functions {started:?} where {given} were given"));
                }
            }
            _ => {}
        }
    }

    /// No two workers of one generation own a bin.
    pub fn check_owners(&mut self, driver: usize, stamp: Stamp) {
        let mut seen = BTreeSet::new();
        let members = self.processes.values().filter(|one| one.driver == driver);
        let groups = members.filter_map(|one| one.group.as_ref()).filter(|one| one.stamp == stamp && !one.failed);
        let owned = groups.flat_map(|group| &group.loops).flat_map(|one| one.owned());
        if let Some(range) = owned.into_iter().find(|range| !seen.insert(*range)) {
            self.violate(format!("two workers of generation {} own range {range}", stamp.generation));
        }
    }

    /// When nothing moves any more the engine knows who has what.
    pub fn check_layout(&mut self, driver: usize, generation: u64) {
        let engine = &self.drivers[driver].engine;
        let Some(facts) = engine.facts(QUERY).filter(|facts| facts.running) else { return };
        let known = engine.layouts(QUERY).first().map(|layout| layout.ranges().to_vec()).unwrap_or_default();
        let members = self.processes.values().filter(|one| one.driver == driver);
        let groups = members.filter_map(|one| one.group.as_ref());
        let whole = groups.filter(|one| one.stamp.generation == generation && !one.failed);
        let loops: Vec<_> = whole.flat_map(|group| &group.loops).collect();
        if loops.len() != facts.workers as usize {
            return; // some are gone, which the engine has still to hear
        }
        let owned = loops.iter().flat_map(|one| one.owned().into_iter().map(|range| (range, one.index() as u32)));
        let mut owned: Vec<_> = owned.collect();
        owned.sort_unstable_by_key(|(range, _)| range.first());
        if owned != known {
            self.violate(format!("the workers of generation {generation} have {owned:?}, the engine says {known:?}"));
        }
    }

    /// A query that is finished stays so: asked again after a restart it gives nothing twice.
    pub fn after_finish(&mut self, run: usize, epoch: u64) {
        self.spark.runs[run].alive = false;
        let driver = self.spark.runs[run].driver;
        let stuck = self.processes.iter().find(|(_, one)| one.driver == driver && one.drains && !one.silent);
        if let Some(member) = stuck.map(|(member, _)| member.0).filter(|_| self.drivers[driver].alive) {
            self.violate(format!("member {member} blocks its executor after the end of the query"));
        }
        if !self.scenario.durable || self.times("finished again") > 0 {
            return self.end(None);
        }
        if self.drivers[driver].alive && self.times("ended again") == 0 && self.dice.once_in(3) {
            return self.lose_results(run, epoch);
        }
        // Every call of a user ends, without the engine's doing so, or with it.
        let patience = if self.dice.once_in(2) { 12_000 } else { 0 };
        self.after(patience, move |world| world.begin_again(driver, patience > 0));
    }

    fn begin_again(&mut self, driver: usize, patient: bool) {
        if !self.drivers[driver].alive {
            return self.end(None);
        }
        if patient {
            self.reached("patient");
            self.check_handles(driver);
        }
        self.hear(driver, Event::Close);
        self.check_handles(driver);
        self.crash_driver(driver);
        let ask_again = self.dice.once_in(2);
        self.after(50, move |world| {
            if world.times("second engine") > 0 {
                return world.end(None);
            }
            let driver = world.new_driver();
            let committed = world.spark.commits.checked_sub(1);
            if ask_again {
                return world.spark_starts(driver);
            }
            // Spark asks for another batch instead.
            let program = world.program();
            let epoch = world.spark.commits;
            world.hear(driver, Event::Open { query: QUERY.into(), program });
            world.spark.runs.push(super::spark::Run {
                driver,
                alive: true,
                next: epoch,
                call: Some((epoch, false)),
                job: 1,
            });
            world.hear(driver, Event::Batch { query: QUERY.into(), epoch, clock_ms: 0, planned_ms: None, committed });
        });
    }

    /// Before a finished query is asked for its results again: what is not all there has to be given again.
    pub fn look_for_results(&mut self, driver: usize, epoch: u64) {
        // Members may have left with results, or nobody hears them.
        let mine = self.processes.values().filter(|one| one.driver == driver && !one.silent);
        let there: usize =
            mine.filter_map(|one| one.outputs.get(&epoch)).flat_map(|one| one.values()).map(Vec::len).sum();
        let given = self.spark.sink.get(&epoch).map_or(0, Vec::len);
        if self.spark.ended_by == Some(driver) && there < given {
            self.spark.sink.remove(&epoch);
            self.spark.ends_again = true;
        }
    }

    /// A member dies with results of the final epoch, before the user has read them and asks for them again.
    fn lose_results(&mut self, run: usize, epoch: u64) {
        let has = |one: &super::hosts::Process| {
            one.outputs.get(&epoch).is_some_and(|pieces| pieces.values().any(|rows| !rows.is_empty()))
        };
        let driver = self.spark.runs[run].driver;
        let mine = self.processes.iter().filter(|(_, one)| one.driver == driver && !one.silent && has(one));
        if let Some(member) = mine.map(|(member, _)| *member).next() {
            self.reached("crash");
            self.end_process(member, "it was killed with results");
        }
        self.after(300, move |world| {
            if !world.drivers[driver].alive {
                return world.end(None);
            }
            if world.spark.runs.iter().any(|run| run.driver == driver && run.call.is_some()) {
                return; // the query was started again, and is ended so
            }
            world.look_for_results(driver, epoch);
            let committed = world.spark.commits.checked_sub(1);
            let clock_ms = 1_000_000 + world.now as i64;
            world.spark.runs[run].alive = true;
            world.spark.runs[run].job += 1;
            world.spark.runs[run].call = Some((epoch, true));
            world.hear(driver, Event::Finish { query: QUERY.into(), clock_ms, committed });
        });
    }

    fn check_handles(&mut self, driver: usize) {
        let open: Vec<u64> =
            self.drivers[driver].handles.iter().filter(|(_, ended)| !**ended).map(|(handle, _)| *handle).collect();
        if !open.is_empty() {
            self.violate(format!("calls {open:?} of engine {driver} never end"));
        }
    }

    /// The run is over.
    pub fn end(&mut self, error: Option<crate::machine::EngineError>) {
        self.ended = error;
        self.after(0, World::end_now);
    }

    fn end_now(&mut self) {
        for driver in 0..self.drivers.len() {
            if self.drivers[driver].alive {
                self.hear(driver, Event::Close);
                self.check_handles(driver);
            }
        }
        self.check_restarts();
        self.done = true;
    }
}
