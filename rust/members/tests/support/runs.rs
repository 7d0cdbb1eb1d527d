//! Random runs of a world.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::collections::BTreeMap;
use std::sync::Arc;

use penstock_progress::{PathSummary, Product};

use crate::common::{Graph, Random, SmallTime};
use crate::machine::list::Change;
use crate::machine::message::Bundle;
use crate::machine::{Host, Id, Lane, Limits, List, Member, Message, Standing};
use crate::world::{Action, Plan, Time, World};

/// More steps than any run takes that gets anywhere.
const PATIENCE: u64 = 40_000;

/// Seeds that found what no earlier one did.
pub(crate) const FOUND: [u64; 7] = [339, 874, 950, 1585, 1666, 2056, 5459];

/// What happened in runs.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    pub seats: usize,
    pub closed: usize,
    pub stayed: usize,
    pub refused: usize,
    pub asks: usize,
    pub died: usize,
    pub doomed: usize,
}

impl Seen {
    pub(crate) fn add(&mut self, other: &Seen) {
        self.seats += other.seats;
        self.closed += other.closed;
        self.stayed += other.stayed;
        self.refused += other.refused;
        self.asks += other.asks;
        self.died += other.died;
        self.doomed += other.doomed;
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Weather {
    Calm,
    Rough,
    Deadly,
}

pub(crate) fn calm(seed: u64) -> Result<Seen, String> {
    by_time(seed, Weather::Calm)
}

pub(crate) fn rough(seed: u64) -> Result<Seen, String> {
    by_time(seed, Weather::Rough)
}

pub(crate) fn deadly(seed: u64) -> Result<Seen, String> {
    by_time(seed, Weather::Deadly)
}

fn by_time(seed: u64, weather: Weather) -> Result<Seen, String> {
    match seed % 3 {
        0 | 1 => run::<u64>(seed, weather),
        _ => run::<Product<u64, u64>>(seed, weather),
    }
}

fn run<T: Time>(seed: u64, weather: Weather) -> Result<Seen, String> {
    let mut random = Random(seed);
    let graph = Graph::<T>::random(&mut random, false);
    let limits = match weather {
        Weather::Calm => Limits { join: PATIENCE, serve: PATIENCE },
        _ => Limits { join: 100 + random.next() % 3000, serve: 50 + random.next() % 400 },
    };
    let founders = 1 + random.below(3);
    let server = random.chance(50).then(|| random.below(founders));
    let dataflows = 1 + random.next() % 2;
    // Whether operators wait for times, and who has asked to leave does nothing but that: its program waits until it has left.
    let waits = seed % 4 == 1;
    let plan = Plan { founders, dataflows, limits, server, lanes: &[Lane::Data, Lane::Behind], early: waits };
    let mut world = World::new(graph, plan);
    let (mut joins, mut leaves) = (random.below(5), random.below(4));
    let (mut budget, mut controls) = (random.below(120), random.below(6));
    let mut deaths = match weather {
        Weather::Calm => 0,
        _ => 1 + random.below(2),
    };
    // Whether all may ask to leave.
    let all = seed % 7 < 3;
    let mut repeats = if weather == Weather::Calm { 0 } else { random.below(10) };
    // Who rests until when.
    let mut rests: Vec<(Id, u64)> = Vec::new();
    // Which links carry nothing until when.
    let mut slow: Vec<(Id, Id, u64)> = Vec::new();
    let mut died = 0;
    // Much time passes between two joins.
    let mut clock = 0;
    let mut now = 0;
    loop {
        now += 1;
        clock += 1;
        if now > PATIENCE {
            return Err(format!("nothing is settled after {PATIENCE} steps: {}", world.why_not_quiet()));
        }
        let ids = world.ids();
        let comes =
            joins > 0 || leaves > 0 && ids.iter().any(|id| world.may_leave(*id) && (all || world.has_others(*id)));
        let comes = comes || weather == Weather::Deadly && deaths > 0;
        if ids.is_empty() || world.quiet() && (world.doomed || !comes) {
            break;
        }
        if !ids.iter().any(|id| world.watches_clock(*id)) {
            clock += 2 * PATIENCE;
        }
        let at = ids[random.below(ids.len())];
        if rests.iter().any(|(id, until)| *id == at && now < *until) {
            continue;
        }
        let dataflow = random.next() % dataflows;
        let sits = waits && world.leaves(at);
        let action = match random.below(25) {
            0..=3 if sits => continue,
            0 | 1 if budget > 0 => {
                let Some((capability, time)) = pick(&world, at, dataflow, &mut random) else { continue };
                let targets = world.targets(at);
                budget -= 1;
                Action::Send { at, dataflow, capability, to: targets[random.below(targets.len())], time }
            }
            2 | 3 => {
                let Some((capability, time)) = pick(&world, at, dataflow, &mut random) else { continue };
                // While somebody is to come there is something to come for.
                if joins > 0 && random.chance(90) {
                    continue;
                }
                let keep = budget > 0 && random.chance(60);
                budget -= usize::from(keep);
                Action::Move { at, dataflow, capability, time: keep.then_some(time) }
            }
            4..=6 => {
                if let Some(wait) = world.complete(at, dataflow) {
                    let targets = world.targets(at);
                    let to = (budget > 0).then(|| targets[random.below(targets.len())]);
                    budget -= usize::from(to.is_some());
                    world.act(Action::Notify { at, dataflow, wait, to })?;
                    continue;
                }
                let messages = world.messages(at, dataflow);
                if messages.is_empty() {
                    continue;
                }
                let message = random.below(messages.len());
                let (target, time) = messages[message].clone();
                let mut keep = Vec::new();
                let outputs = &world.graph.nodes[target.node / 10].2[target.port];
                if waits && budget > 0 && !outputs.is_empty() && random.chance(50) {
                    budget -= 1;
                    let port = random.below(outputs.len());
                    world.act(Action::Await { at, dataflow, message, port })?;
                    continue;
                }
                for (port, paths) in outputs.iter().enumerate() {
                    for path in paths.elements() {
                        if budget > 0
                            && !sits
                            && random.chance(50)
                            && let Some(time) = path.results_in(&time)
                        {
                            budget -= 1;
                            keep.push((port, time));
                        }
                    }
                }
                Action::Consume { at, dataflow, message, keep }
            }
            7 | 8 => {
                if !world.owes(at, dataflow, random.chance(80)) {
                    continue;
                }
                Action::Cast(at, dataflow)
            }
            9 if controls > 0 => {
                controls -= 1;
                Action::Broadcast(at)
            }
            10 if joins > 0 && random.chance(20) => {
                if !world.member(at).is_some_and(|member| member.is_seated()) {
                    continue;
                }
                let count = (1 + random.below(2)).min(joins);
                joins -= count;
                Action::Admit { at, count, now: clock }
            }
            11 if leaves > 0 && random.chance(20) => {
                if world.may_leave(at) && (all || world.has_others(at)) {
                    leaves -= 1;
                    Action::Leave(at)
                } else {
                    continue;
                }
            }
            12 => Action::Drain(at),
            13 => {
                if !world.watches_clock(at) {
                    continue;
                }
                Action::Tick(at, clock)
            }
            14 if deaths > 0 && random.chance(15) => {
                let joins = world.member(at).is_some_and(|member| {
                    !member.is_current() || member.list().standing(at) == Some(Standing::Joining)
                });
                let certain = ids
                    .iter()
                    .all(|id| world.member(*id).is_some_and(|other| other.list().standing(at) != Some(Standing::Full)));
                if weather == Weather::Rough && !(joins && certain) {
                    continue;
                }
                died += 1;
                deaths -= 1;
                Action::Crash(at)
            }
            15 if repeats > 0 => {
                repeats -= 1;
                Action::Repeat(at, ids[random.below(ids.len())])
            }
            16 if weather == Weather::Rough && random.chance(10) => {
                rests.push((at, now + random.next() % 1500));
                continue;
            }
            17 if random.chance(5) => {
                slow.push((ids[random.below(ids.len())], at, now + random.next() % 2500));
                continue;
            }
            _ => {
                slow.retain(|(.., until)| now < *until);
                let rests = |from, to| slow.iter().any(|link| (link.0, link.1) == (from, to));
                let coming: Vec<_> = world.loaded().filter(|key| key.1 == at && !rests(key.0, key.1)).collect();
                if coming.is_empty() {
                    continue;
                }
                let (from, to, lane) = coming[random.below(coming.len())];
                Action::Deliver(from, to, lane)
            }
        };
        let said = format!("{action:?}");
        world.act(action).map_err(|what| format!("step {now}, {said}: {what}"))?;
    }
    world.check_end()?;
    if weather == Weather::Calm && world.refused > 0 {
        return Err(format!("{} joiners were refused without a fault", world.refused));
    }
    let (seats, closed, stayed) = (world.seats, world.closed, world.stayed);
    let (refused, asks) = (world.refused, world.asks);
    Ok(Seen { seats, closed, stayed, refused, asks, died, doomed: usize::from(world.doomed) })
}

/// Notes whose bundles are taken in.
struct Notes(Vec<Id>);

impl Host for Notes {
    type Part = Id;
    fn cast(&mut self, _: u64) -> Option<Id> {
        None
    }
    fn absorb(&mut self, _: u64, sender: &Id) -> bool {
        self.0.push(*sender);
        true
    }
    fn snapshot(&mut self, _: u64) -> Id {
        0
    }
    fn begin(&mut self, _: u64, _: &Id) -> bool {
        true
    }
    fn grant(&mut self, _: u64) -> Option<Id> {
        None
    }
    fn hand_over(&mut self, _: u64) -> Option<Id> {
        None
    }
    fn take(&mut self, _: u64, _: &Id) {}
}

/// Worker 1 is gone, and its last bundle waits for one of worker 2, whose link is slow: what rests on that of worker 1 waits too. Rare in random runs.
pub(crate) fn gone(_: u64) -> Result<Seen, String> {
    let mut member = Member::<Id>::founder(3, 4, Limits { join: 10, serve: 10 });
    member.open(0);
    let mut notes = Notes(Vec::new());
    let leaving = List::founded(4).after(Change::Leaving(1)).ok_or("one of four may leave")?;
    let closed = Change::Closed { leaver: 1, finals: BTreeMap::from([(0, 1)]) };
    let closed = leaving.after(closed).ok_or("it is leaving")?;
    let marker = |list: &List| Message::Marker { list: Arc::new(list.clone()), next: BTreeMap::new(), grant: None };
    let bundle = |sender: Id, after: Vec<(Id, u64)>| Message::Bundle(0, Bundle { number: 0, after, part: sender });
    let come = [
        (1, bundle(1, vec![(2, 0)])),
        (0, marker(&leaving)),
        (1, marker(&leaving)),
        (0, marker(&closed)),
        (1, marker(&closed)),
        (0, bundle(0, vec![(1, 0)])),
        (2, bundle(2, Vec::new())),
    ];
    for (from, message) in come {
        member.accept(from, Lane::Urgent, message, &mut notes).map_err(|failure| failure.to_string())?;
    }
    match notes.0[..] {
        [2, 1, 0] => Ok(Seen::default()),
        _ => Err(format!("bundles were taken in in the order of {:?}", notes.0)),
    }
}

/// A capability of a worker, and a time that it allows.
fn pick<T: Time>(world: &World<T>, at: Id, dataflow: u64, random: &mut Random) -> Option<(usize, T)> {
    let held = world.capabilities(at, dataflow);
    if held.is_empty() {
        return None;
    }
    let chosen = random.below(held.len());
    let time = <T as SmallTime>::summary(random, false).results_in(&held[chosen].1)?;
    Some((chosen, time))
}
