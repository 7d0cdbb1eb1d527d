//! All schedules of a small cluster, over the real machine, caster and ledger: three workers, of which one joins, or one or two leave, two capabilities
//! that are moved, sent with and dropped, one death, one repeated message, one deadline that passes, each at any moment.
//!
//! Every state is visited once; what tells states apart is all of the machine, the books and the links. The lane of state that moves is emptied at once:
//! it carries nothing but markers here, like that of data.
//!
//! `PENSTOCK_STATES=5000000 cargo test -p penstock-members --test all model` goes on for longer where the whole is too large.

use std::collections::HashSet;

use penstock_progress::{Antichain, Source, Target};

use crate::common::Graph;
use crate::machine::{Id, Lane, Limits};
use crate::world::{Action, Plan, World};

/// What may still happen.
#[derive(Clone, Copy, Debug, Hash)]
struct Left {
    admits: usize,
    /// Who may ask to leave, among the first two workers.
    leaves: [bool; 2],
    sends: usize,
    /// Whether the operator of everybody waits for the time of a record that has come, and who has asked to leave does nothing of its own any more.
    /// What is counted is told at once then, or these would be too many states.
    waits: bool,
    moves: usize,
    crashes: usize,
    repeats: usize,
    delays: usize,
}

const NOTHING: Left =
    Left { admits: 0, leaves: [false; 2], sends: 0, waits: false, moves: 0, crashes: 0, repeats: 0, delays: 0 };

type State = (World<u64>, Left);

/// An input, and an operator that reads it on any worker; where it waits it has an output.
fn start(founders: usize, waits: bool) -> World<u64> {
    let nodes = match waits {
        true => vec![(0, 1, vec![]), (1, 1, vec![vec![Antichain::from_elem(0)]])],
        false => vec![(0, 1, vec![]), (1, 0, vec![vec![]])],
    };
    let edges = vec![(Source::new(0, 0), Target::new(10, 0))];
    let limits = Limits { join: 10, serve: 10 };
    let plan = Plan { founders, dataflows: 1, limits, server: None, lanes: &[Lane::Data], early: true };
    let mut world = World::new(Graph { nodes, edges }, plan);
    for at in (0..founders).filter(|_| waits) {
        world.act(Action::Send { at, dataflow: 0, capability: 0, to: at, time: 0 }).unwrap();
        world.act(Action::Await { at, dataflow: 0, message: 0, port: 0 }).unwrap();
        world.act(Action::Cast(at, 0)).unwrap();
    }
    world
}

/// What is done at once: the lanes that carry nothing but markers are emptied.
fn at_once(world: &mut World<u64>, waits: bool) -> Option<Action<u64>> {
    let empties = |lane| lane == Lane::Behind || waits && lane == Lane::Data;
    let marker = world.loaded().find(|key| empties(key.2)).map(|(from, to, lane)| Action::Deliver(from, to, lane));
    let mut casts = world.ids().into_iter().filter(|_| waits);
    marker.or_else(|| casts.find(|at| world.owes(*at, 0, false)).map(|at| Action::Cast(at, 0)))
}

/// Everything that may happen next.
fn actions(state: &mut State) -> Vec<(Action<u64>, Left)> {
    let (world, left) = state;
    let left = *left;
    let mut actions: Vec<(Action<u64>, Left)> =
        world.loaded().map(|(from, to, lane)| (Action::Deliver(from, to, lane), left)).collect();
    let ids = world.ids();
    for at in ids.iter().copied() {
        if world.owes(at, 0, false) {
            actions.push((Action::Cast(at, 0), left));
        }
        let sits = left.waits && world.leaves(at);
        for (capability, (_, time)) in world.capabilities(at, 0).iter().enumerate().filter(|_| !sits) {
            // Nobody may be admitted by a cluster that has nothing to do any more.
            actions.push((Action::Move { at, dataflow: 0, capability, time: None }, left));
            if left.moves > 0 {
                let left = Left { moves: left.moves - 1, ..left };
                actions.push((Action::Move { at, dataflow: 0, capability, time: Some(time + 1) }, left));
            }
            if left.sends > 0 {
                let left = Left { sends: left.sends - 1, ..left };
                for to in world.targets(at) {
                    actions.push((Action::Send { at, dataflow: 0, capability, to, time: *time }, left));
                }
            }
        }
        if let Some(wait) = world.complete(at, 0) {
            actions.push((Action::Notify { at, dataflow: 0, wait, to: None }, left));
        }
        for message in 0..world.messages(at, 0).len() {
            actions.push((Action::Consume { at, dataflow: 0, message, keep: Vec::new() }, left));
        }
        if left.admits > 0 && at == 0 {
            let now = if left.delays > 0 { 0 } else { 10 };
            actions.push((Action::Admit { at, count: 1, now }, Left { admits: left.admits - 1, ..left }));
        }
        if left.leaves.get(at) == Some(&true) && world.may_leave(at) {
            let mut leaves = left.leaves;
            leaves[at] = false;
            actions.push((Action::Leave(at), Left { leaves, ..left }));
        }
        if world.may_drain(at) {
            actions.push((Action::Drain(at), left));
        }
        if left.crashes > 0 {
            actions.push((Action::Crash(at), Left { crashes: left.crashes - 1, ..left }));
        }
        if left.delays > 0 {
            actions.push((Action::Tick(at, 10), Left { delays: left.delays - 1, ..left }));
        }
    }
    if left.repeats > 0 {
        let links: Vec<(Id, Id, Lane)> = world.loaded().filter(|key| key.2 == Lane::Urgent).collect();
        let repeats = left.repeats - 1;
        actions.extend(links.into_iter().map(|(from, to, _)| (Action::Repeat(from, to), Left { repeats, ..left })));
    }
    actions
}

/// States of a space that is too large to be visited as a whole.
fn limit() -> usize {
    std::env::var("PENSTOCK_STATES").map_or(10_000, |text| text.parse().expect("a number of states"))
}

/// Visits every state, or more than `limit` of them; how many there were, how many ends, and whether that is all.
fn explore(founders: usize, left: Left, limit: usize) -> (usize, usize, bool) {
    let mut seen: HashSet<u64> = HashSet::new();
    let mut ends = 0;
    let mut work: Vec<State> = vec![(start(founders, left.waits), left)];
    while let Some(mut state) = work.pop() {
        let actions = actions(&mut state);
        if actions.iter().all(|(action, _)| !matches!(action, Action::Deliver(..))) && state.0.quiet() {
            state.0.check_end().unwrap_or_else(|what| panic!("{what}"));
            ends += 1;
        } else if actions.is_empty() {
            panic!("nothing can happen, and it is not over: {}", state.0.why_not_quiet());
        }
        for (action, left) in actions {
            let mut world = state.0.clone();
            let said = format!("{action:?}");
            let mut result = world.act(action);
            while result.is_ok()
                && let Some(action) = at_once(&mut world, left.waits)
            {
                result = world.act(action);
            }
            result.unwrap_or_else(|what| panic!("{said}: {what}"));
            use std::hash::{DefaultHasher, Hash, Hasher};
            let mut hasher = DefaultHasher::new();
            (world.fingerprint(), left).hash(&mut hasher);
            if seen.insert(hasher.finish()) {
                work.push((world, left));
            }
        }
        if seen.len() > limit {
            return (seen.len(), ends, false);
        }
    }
    (seen.len(), ends, true)
}

fn all(name: &str, founders: usize, left: Left, whole: bool) {
    let (states, ends, complete) = explore(founders, left, if whole { usize::MAX } else { limit() });
    println!("{name}: {states} states, {ends} ends, {}", if complete { "all" } else { "not all" });
    assert!(ends > 0 && (complete || !whole), "{name}: {states} states and {ends} ends");
}

#[test]
fn a_lone_worker_is_joined() {
    all("a lone worker is joined", 1, Left { admits: 1, sends: 1, ..NOTHING }, true);
}

#[test]
fn a_lone_worker_is_joined_while_one_dies() {
    all("a lone worker is joined while one dies", 1, Left { admits: 1, crashes: 1, ..NOTHING }, true);
}

#[test]
fn a_lone_worker_is_joined_while_things_go_wrong() {
    let left = Left { admits: 1, sends: 1, crashes: 1, repeats: 1, delays: 1, ..NOTHING };
    all("a lone worker is joined while things go wrong", 1, left, false);
}

#[test]
fn two_workers_are_joined() {
    all("two workers are joined", 2, Left { admits: 1, sends: 1, moves: 1, ..NOTHING }, false);
}

/// Three workers, four updates, one death, one repeat, one delay.
#[test]
fn two_workers_are_joined_while_things_go_wrong() {
    let left = Left { admits: 1, sends: 2, moves: 2, crashes: 1, repeats: 1, delays: 1, ..NOTHING };
    all("two workers are joined while things go wrong", 2, left, false);
}

#[test]
fn the_first_of_two_leaves() {
    all("the first of two leaves", 2, Left { leaves: [true, false], sends: 1, ..NOTHING }, true);
}

/// One of them goes, and the other one is told that it cannot, whichever of both asks first.
#[test]
fn both_of_two_leave() {
    all("both of two leave", 2, Left { leaves: [true; 2], ..NOTHING }, true);
}

/// Who joins may take the place of the last one, or comes too late for that.
#[test]
fn both_of_two_leave_while_one_joins() {
    all("both of two leave while one joins", 2, Left { admits: 1, leaves: [true; 2], repeats: 1, ..NOTHING }, false);
}

/// Who leaves may wait for what the other one's inputs hold, whose program does nothing any more: both leave, in any order.
#[test]
fn two_of_three_leave() {
    all("two of three leave", 3, Left { leaves: [true; 2], waits: true, ..NOTHING }, false);
}
