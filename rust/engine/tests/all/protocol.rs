//! The engine by itself, without a simulation: members that do what they are asked at once, but for what a test holds back.

use std::collections::{BTreeMap, BTreeSet};

use penstock_balance::Strategy;
use penstock_engine::{
    Answer, Claim, Contents, DataFile, Dismissal, Effect, Engine, EngineError, Event, Failure, FormatError, Kind,
    Manifest, MemberId, Moving, Named, Operator, Plan, Program, Range, Ranges, Receipt, Recut, Request, Setup,
    StoreError, Stored, Ticket, Wait, Wish, encode,
};

const QUERY: &str = "q";

/// Answers what is not held back, and keeps all effects.
struct Script {
    engine: Engine,
    program: Program,
    /// Requests by their names that are not answered.
    hold: Vec<&'static str>,
    held: Vec<(Ticket, MemberId, Request)>,
    /// What has been done since it was looked at.
    done: Vec<Effect>,
    /// Calls of the sink.
    sinks: Vec<Effect>,
    /// The checkpoint of a durable query.
    store: Option<Contents>,
    /// Of the files that members write, should they write any.
    file_bytes: Option<u64>,
    /// How many manifests were read each time that the checkpoint was.
    reads: Vec<usize>,
}

fn migrated(times: &[(u64, u32)]) -> Answer {
    Answer::Migrated { times: times.to_vec(), refused: None }
}

fn name(request: &Request) -> String {
    let text = format!("{request:?}");
    text.split([' ', '(', '{']).next().unwrap_or_default().to_owned()
}

impl Script {
    fn new(workers: u32) -> Script {
        Script::with(Setup { workers, bits: 2, loss_ms: 7, ..Setup::default() })
    }

    /// With an empty checkpoint, and one manifest kept beside the newest.
    fn durable(workers: u32) -> Script {
        let mut script = Script::with(Setup { workers, bits: 2, loss_ms: 7, keep: 1, ..Setup::default() });
        (script.program.durable, script.store) = (true, Some(Contents::default()));
        script.open();
        script
    }

    fn with(setup: Setup) -> Script {
        let workers = setup.workers;
        let operator = Operator {
            name: "sums".into(),
            kind: "sum".into(),
            types: "long".into(),
            version: 1,
            columns: String::new(),
            reads: None,
        };
        let plan = Plan { operators: vec![operator], sources: vec!["rows".into()] };
        let program = Program { plan, functions: 1, ..Program::default() };
        let engine = Engine::new(setup);
        let (hold, held, done, sinks, store, file_bytes, reads) = Default::default();
        let mut script = Script { engine, program, hold, held, done, sinks, store, file_bytes, reads };
        let effects = script.engine.begin();
        script.perform(effects);
        for slot in 0..workers {
            let (member, executor) = (MemberId(u64::from(slot) + 1), format!("executor {slot}"));
            script.hear(Event::MemberUp { slot, member, executor, executors: workers });
        }
        script.open();
        script
    }

    fn open(&mut self) {
        self.hear(Event::Open { query: QUERY.into(), program: self.program.clone() });
    }

    fn batch(&mut self, epoch: u64) -> Vec<Effect> {
        self.done.clear();
        let committed = epoch.checked_sub(1);
        self.hear(Event::Batch { query: QUERY.into(), epoch, clock_ms: 0, planned_ms: None, committed });
        std::mem::take(&mut self.done)
    }

    fn finish(&mut self, committed: Option<u64>) -> Vec<Effect> {
        self.done.clear();
        self.hear(Event::Finish { query: QUERY.into(), clock_ms: 0, committed });
        std::mem::take(&mut self.done)
    }

    fn hear(&mut self, event: Event) {
        let effects = self.engine.step(event);
        self.perform(effects);
    }

    fn perform(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            self.done.push(effect.clone());
            self.sinks.extend(Some(effect.clone()).filter(|effect| matches!(effect, Effect::Sink { .. })));
            match effect {
                Effect::Call { ticket, member, request, .. } => match self.hold.contains(&name(&request).as_str()) {
                    true => self.held.push((ticket, member, request)),
                    false => self.answer(ticket, &request),
                },
                Effect::Feed { ticket, .. } if !self.hold.contains(&"Feed") => {
                    self.hear(Event::Fed { ticket, outcome: Ok(()) });
                }
                Effect::Sink { ticket, .. } if !self.hold.contains(&"Sink") => {
                    self.hear(Event::Sunk { ticket, outcome: Ok(()) });
                }
                effect => self.keep(effect),
            }
        }
    }

    /// Does to the checkpoint what the engine wishes, but for what is held back.
    fn keep(&mut self, effect: Effect) {
        let held = self.hold.iter().any(|name| format!("{effect:?}").starts_with(name));
        let Some(contents) = self.store.as_mut().filter(|_| !held) else { return };
        let (ticket, stored) = match effect {
            Effect::ReadCheckpoint { ticket, since, known, .. } => {
                let mut told = contents.clone();
                let unread = |name: &String| {
                    known.contains(name)
                        || matches!(Named::parse(name), Some(Named::Manifest { batch } | Named::Shown { batch }) if batch < since)
                };
                told.unread.extend(told.manifests.iter().map(|(name, _)| name).filter(|name| unread(name)).cloned());
                told.unread.extend(told.shown.iter().map(|(name, _)| name).filter(|name| unread(name)).cloned());
                told.manifests.retain(|(name, _)| !unread(name));
                told.shown.retain(|(name, _)| !unread(name));
                self.reads.push(told.manifests.len());
                (ticket, Stored::Contents(told))
            }
            Effect::ReadClaims { ticket, .. } => {
                let number = contents.newest_made();
                let made = contents.claims.iter().rev().find(|(one, _)| *one == number);
                let nonce = made.and_then(|(_, claim)| claim.as_ref().ok()).map(|claim| claim.nonce);
                (ticket, Stored::NewestClaim { number, nonce })
            }
            Effect::CreateClaim { ticket, claim, .. } => {
                contents.claims.push((claim.number, Ok(claim)));
                (ticket, Stored::Claimed(true))
            }
            Effect::WriteManifest { ticket, manifest, .. } => {
                contents.manifests.push((manifest.name(), Ok(*manifest)));
                (ticket, Stored::Written)
            }
            Effect::WriteShown { shown, .. } => return contents.shown.push((shown.name(), Ok(shown))),
            Effect::Delete { ticket, names, .. } => {
                contents.shown.retain(|(name, _)| !names.contains(name));
                contents.claims.retain(|(number, _)| !names.contains(&Claim::name(*number)));
                contents.manifests.retain(|(name, _)| !names.contains(name));
                contents.files.retain(|file| !names.contains(&file.name));
                (ticket, Stored::Deleted)
            }
            _ => return,
        };
        self.hear(Event::Stored { ticket, outcome: Ok(stored) });
    }

    fn answer(&mut self, ticket: Ticket, request: &Request) {
        let all: Vec<Range> = (0..4).map(|bin| Range::new(bin, 2).unwrap()).collect();
        let answer = match request {
            Request::Stop { .. } => Answer::Inventory(Ranges::from([("sums".into(), all)])),
            Request::Release(_) => Answer::Released { pieces: vec![(0, 1, 0, Vec::new())] },
            Request::Migrate { steps, .. } => {
                migrated(&(0..steps.len() as u32).map(|slice| (0, slice)).collect::<Vec<_>>())
            }
            Request::Recut { .. } => migrated(&[(0, 0)]),
            Request::Write { stamp, epoch } => Answer::Written(Vec::from_iter(self.file_bytes.map(|length| {
                let (epoch, generation) = (*epoch, stamp.generation);
                DataFile { name: format!("data-{ticket}"), length, checksum: 0, epoch, generation }
            }))),
            _ => Answer::Done,
        };
        self.hear(Event::Answer { ticket, answer: Ok(answer) });
    }

    /// Answers the oldest request that is held back.
    fn let_go(&mut self) {
        let (ticket, _, request) = self.held.remove(0);
        self.answer(ticket, &request);
    }

    fn fail(&mut self, at: usize, kind: Kind, message: &str) {
        let (ticket, ..) = self.held.remove(at);
        self.hear(Event::Answer { ticket, answer: Err(Failure::new(kind, message)) });
    }

    /// The sink that was held back returns.
    fn sunk(&mut self) {
        let sink = |effect: &Effect| match effect {
            Effect::Sink { ticket, .. } => Some(*ticket),
            _ => None,
        };
        let ticket = self.sinks.iter().rev().find_map(sink).expect("the sink was called");
        self.hear(Event::Sunk { ticket, outcome: Ok(()) });
    }

    fn ring(&mut self) {
        self.ring_after(7);
    }

    /// The last timer rings, which was set for so long.
    fn ring_after(&mut self, wanted_ms: u64) {
        let timer = |effect: &Effect| match effect {
            Effect::Timer { ticket, after_ms } => Some((*ticket, *after_ms)),
            _ => None,
        };
        let (ticket, after_ms) = self.done.iter().rev().find_map(timer).expect("a timer was set");
        assert_eq!(after_ms, wanted_ms);
        self.hear(Event::Timer { ticket });
    }

    fn migrate(&mut self, handle: u64, wish: Wish, size: usize) {
        let strategy = Strategy::Batched { size };
        let moves = vec![Moving { query: QUERY.into(), handle, wish }];
        self.hear(Event::Migrate { moves, strategy, max_pause_ms: None, drains: false, at_epoch: None });
    }

    fn prepare(&mut self, moves: &[(u64, &str, Wish)], size: usize, at_epoch: Option<u64>) {
        let moving = |(handle, query, wish): &(u64, &str, Wish)| Moving {
            query: (*query).into(),
            handle: *handle,
            wish: wish.clone(),
        };
        let (moves, strategy) = (moves.iter().map(moving).collect(), Strategy::Batched { size });
        self.hear(Event::Migrate { moves, strategy, max_pause_ms: None, drains: false, at_epoch });
    }

    fn owners(&self) -> Vec<u32> {
        let layouts = self.engine.layouts(QUERY);
        layouts[0].ranges().iter().map(|(_, owner)| *owner).collect()
    }

    fn errors(&mut self) -> Vec<EngineError> {
        let error = |effect: Effect| match effect {
            Effect::Fail { error, .. } => Some(error),
            _ => None,
        };
        std::mem::take(&mut self.done).into_iter().filter_map(error).collect()
    }

    /// How migrations have ended, by handle.
    fn moved(&mut self) -> BTreeMap<u64, Result<u32, String>> {
        let moved = |effect: Effect| match effect {
            Effect::Moved { handle, outcome } => Some((handle, outcome.map_err(|error| error.to_string()))),
            _ => None,
        };
        std::mem::take(&mut self.done).into_iter().filter_map(moved).collect()
    }
}

fn requests(effects: &[Effect]) -> Vec<String> {
    let request = |effect: &Effect| match effect {
        Effect::Call { request, .. } => Some(name(request)),
        _ => None,
    };
    let mut found: Vec<String> = effects.iter().filter_map(request).collect();
    found.dedup();
    found
}

fn completes(effects: &[Effect], epoch: u64) -> bool {
    effects.contains(&Effect::Complete { query: QUERY.into(), epoch })
}

#[test]
fn migrations_take_turns_and_are_planned_when_theirs_comes() {
    let mut script = Script::new(2);
    script.migrate(1, Wish::Even, 1);
    assert_eq!(script.moved()[&1].as_ref().unwrap_err(), "the query has not begun: its bins cannot move now");
    assert!(completes(&script.batch(0), 0));
    assert_eq!(script.owners(), [0, 1, 0, 1]);
    script.hold = vec!["Migrate"];
    script.migrate(2, Wish::To(vec![1; 4]), 1);
    script.migrate(3, Wish::To(vec![0, 1, 0, 1]), 9);
    script.migrate(4, Wish::Even, 1);
    script.migrate(5, Wish::To(vec![0; 4]), 1);
    // What is wrong whatever moves before is told at once.
    script.migrate(6, Wish::To(vec![0; 3]), 1);
    script.migrate(7, Wish::Moves(vec![(Range::new(1, 2).unwrap(), 2)]), 1);
    script.migrate(8, Wish::Moves(vec![(Range::new(1, 3).unwrap(), 1)]), 1);
    let twice = (Range::new(1, 2).unwrap(), 0);
    script.migrate(9, Wish::Moves(vec![twice, twice]), 1);
    let refused = script.moved();
    let told: Vec<&str> = refused.values().map(|outcome| outcome.as_ref().unwrap_err().as_str()).collect();
    assert_eq!(
        told,
        [
            "3 workers are named for 4 bins",
            "there is no worker 2: the query has workers 0 to 1",
            "bin 1/3 is not there: what it would be part of is whole",
            "bin 1 is to move twice"
        ]
    );
    assert_eq!(script.held.len(), 1, "one at a time");
    script.hear(Event::CancelMigration { handle: 5 });
    assert_eq!(script.moved(), [(5, Ok(0))].into(), "it waited");
    script.let_go();
    assert_eq!(script.owners(), [1; 4]);
    let Request::Migrate { steps, .. } = &script.held[0].2 else { panic!("{:?}", script.held) };
    assert_eq!(steps.concat().len(), 2, "back to where the first has taken them from");
    assert_eq!(steps.len(), 1);
    script.let_go();
    assert_eq!(script.moved(), [(2, Ok(2)), (3, Ok(1)), (4, Ok(0))].into(), "it was even again");
    assert_eq!(script.owners(), [0, 1, 0, 1]);
    // The one under way ends after its step, those that wait with the generation.
    script.migrate(10, Wish::To(vec![1; 4]), 1);
    script.migrate(11, Wish::Even, 1);
    script.hear(Event::MemberLost { member: MemberId(2), reason: "killed".into() });
    let cut = script.moved();
    assert!(cut.values().all(|outcome| outcome.as_ref().unwrap_err().contains("member 2 is gone: killed")), "{cut:?}");
    assert_eq!(cut.len(), 2);
}

/// A generation that is being begun is over within moments: nobody need know of it, and of those who come with it.
#[test]
fn a_migration_waits_for_workers_that_begin() {
    let growing = || {
        let mut script = Script::new(1);
        script.batch(0);
        script.hear(Event::Rescale { handle: 1, workers: 2, free: 1 });
        script.hear(Event::MemberUp { slot: 1, member: MemberId(2), executor: "executor 1".into(), executors: 2 });
        script.hold = vec!["Stop"];
        script.hear(Event::Committed { query: QUERY.into(), epoch: 0 });
        assert_eq!(script.held.len(), 1, "{:?}", script.done);
        script.migrate(2, Wish::To(vec![1; 4]), 4);
        script.migrate(3, Wish::To(vec![2; 4]), 4);
        script.migrate(4, Wish::Recut(Recut::Split { ranges: vec![Range::new(0, 2).unwrap()], by: 1 }), 4);
        script.migrate(5, Wish::Even, 4);
        script.hear(Event::CancelMigration { handle: 5 });
        assert_eq!(script.moved(), [(5, Ok(0))].into());
        script
    };
    let mut script = growing();
    script.prepare(&[(6, QUERY, Wish::Even), (7, "other", Wish::Even)], 4, None);
    let told = script.moved();
    assert!(told[&6].as_ref().unwrap_err().contains("goes back to its last completed epoch"), "all or none: {told:?}");
    script.hold = vec!["Start"];
    script.let_go();
    assert_eq!(script.held.len(), 2, "{:?}", script.done);
    script.hold.clear();
    script.let_go();
    script.let_go();
    let told = script.moved();
    let no_worker = "there is no worker 2: the query has workers 0 to 1".to_owned();
    assert_eq!(told, [(2, Ok(1)), (3, Err(no_worker)), (4, Ok(1))].into());
    assert_eq!(script.owners(), [1; 5]);
    assert!(completes(&script.batch(1), 1));
    // Where they cannot begin, nothing moves, and whoever asked is told.
    let mut script = growing();
    script.hold = vec!["Start"];
    script.let_go();
    script.fail(0, Kind::User, "a typo");
    let told = script.moved();
    assert_eq!(told.keys().copied().collect::<Vec<_>>(), [2, 3, 4]);
    assert!(told.values().all(|outcome| outcome.as_ref().unwrap_err().contains("a typo")), "{told:?}");
    // Nor where the workers are not asked again, and nobody is said to have failed.
    let mut script = growing();
    script.hear(Event::Drop { query: QUERY.into() });
    assert_eq!(script.moved().keys().copied().collect::<Vec<_>>(), [2, 3, 4]);
}

#[test]
fn how_steps_follow_one_another_is_handed_on() {
    let mut script = Script::new(2);
    script.batch(0);
    script.hold = vec!["Migrate"];
    let moves = vec![Moving { query: QUERY.into(), handle: 1, wish: Wish::To(vec![1; 4]) }];
    let strategy = Strategy::Batched { size: 1 };
    script.hear(Event::Migrate { moves, strategy, max_pause_ms: Some(9), drains: true, at_epoch: None });
    let Request::Migrate { max_pause_ms, drains, .. } = &script.held[0].2 else { panic!("{:?}", script.held) };
    assert_eq!((*max_pause_ms, *drains), (Some(9), true));
    script.let_go();
    assert_eq!(script.moved(), [(1, Ok(2))].into());
}

#[test]
fn what_is_prepared_for_an_epoch_begins_with_it() {
    let mut script = Script::new(2);
    script.batch(0);
    let prepare = |script: &mut Script, handle, wish, epoch| script.prepare(&[(handle, QUERY, wish)], 1, Some(epoch));
    prepare(&mut script, 1, Wish::To(vec![1; 4]), 0);
    let told = "epoch 0 has passed: 1 is the first that something can be prepared for";
    assert_eq!(script.moved()[&1].as_ref().unwrap_err(), told);
    prepare(&mut script, 2, Wish::To(vec![1; 4]), 2);
    prepare(&mut script, 3, Wish::To(vec![1, 1]), 3);
    assert_eq!(script.moved()[&3].as_ref().unwrap_err(), "2 workers are named for 4 bins");
    prepare(&mut script, 4, Wish::To(vec![0; 4]), 9);
    // It holds up nobody.
    script.migrate(5, Wish::To(vec![0, 1, 1, 1]), 4);
    assert_eq!(script.moved(), [(5, Ok(1))].into());
    assert!(!requests(&script.batch(1)).contains(&"Migrate".to_owned()));
    // Something else is under way when its epoch comes.
    script.hold = vec!["Migrate"];
    script.migrate(6, Wish::Moves(vec![(Range::new(3, 2).unwrap(), 0)]), 1);
    let asked = requests(&script.batch(2));
    let place = |name: &str| asked.iter().position(|one| one == name);
    assert!(place("Migrate") < place("Release"), "{asked:?}");
    let Request::Migrate { steps, at_epoch, .. } = &script.held[1].2 else { panic!("{:?}", script.held) };
    let bin = |prefix| Range::new(prefix, 2).unwrap();
    assert_eq!((steps.concat(), *at_epoch), (vec![(bin(0), 1), (bin(3), 1)], Some(2)), "bin 3 will be elsewhere");
    script.hold.clear();
    script.let_go();
    script.let_go();
    assert_eq!(script.moved(), [(6, Ok(1)), (2, Ok(2))].into());
    assert_eq!(script.owners(), [1; 4]);
    // A generation that ends does not end it, a query that ends does.
    prepare(&mut script, 8, Wish::Even, 7);
    script.hear(Event::MemberLost { member: MemberId(2), reason: "killed".into() });
    assert!(script.moved().is_empty());
    script.hear(Event::CancelMigration { handle: 4 });
    assert_eq!(script.moved(), [(4, Ok(0))].into(), "it still waited");
    script.hear(Event::Drop { query: QUERY.into() });
    assert_eq!(script.moved()[&8].as_ref().unwrap_err(), "the migration was cut off: the query was dropped");
}

#[test]
fn splits_and_merges_take_turns_and_are_checked_against_what_comes_before() {
    let mut script = Script::new(2);
    let range = |prefix, length| Range::new(prefix, length).unwrap();
    let split = |prefix, length, by| Wish::Recut(Recut::Split { ranges: vec![range(prefix, length)], by });
    let merge = |prefix, length| Wish::Recut(Recut::Merge { ranges: vec![range(prefix, length)] });
    script.migrate(1, split(1, 2, 1), 1);
    assert_eq!(script.moved()[&1].as_ref().unwrap_err(), "the query has not begun: its bins cannot move now");
    script.batch(0);
    script.hold = vec!["Recut", "Migrate"];
    script.migrate(2, split(1, 2, 1), 1);
    // Of what will be there when their turns come.
    script.migrate(3, split(3, 3, 2), 1);
    script.migrate(4, Wish::Moves(vec![(range(3, 3), 0), (range(2, 3), 1)]), 9);
    script.migrate(5, merge(1, 2), 9);
    script.migrate(6, split(1, 2, 1), 1);
    assert!(script.moved().is_empty());
    let wrong = |script: &mut Script, wish| {
        script.migrate(9, wish, 1);
        script.moved().remove(&9).expect("it is told at once").unwrap_err()
    };
    assert_eq!(wrong(&mut script, split(1, 2, 1)), "bin 1/2 is split already");
    assert_eq!(wrong(&mut script, merge(0, 2)), "bin 0/2 is not split");
    assert_eq!(wrong(&mut script, merge(0, 3)), "bin 0/3 is not there: what it would be part of is whole");
    assert_eq!(wrong(&mut script, merge(0, 1)), "there can be no bin 0/1: bins have 2 bits");
    let fine = "bin 0/2 by 19 bits: parts have 20 bits at most, and more than what is split";
    assert_eq!(wrong(&mut script, split(0, 2, 19)), fine);
    let twice = Recut::Split { ranges: vec![range(0, 2), range(0, 2)], by: 1 };
    assert_eq!(wrong(&mut script, Wish::Recut(twice)), "ranges 0/2 and 0/2 overlap");
    script.prepare(&[(9, QUERY, split(0, 2, 1))], 1, Some(7));
    assert!(script.moved()[&9].as_ref().unwrap_err().contains("between two epochs"));
    assert_eq!(script.held.len(), 1, "one at a time");
    script.let_go();
    assert_eq!(script.owners(), [0, 1, 1, 0, 1]);
    script.let_go();
    assert_eq!(script.owners(), [0, 1, 1, 1, 1, 1, 0, 1]);
    assert_eq!(script.moved(), [(2, Ok(1)), (3, Ok(1))].into());
    // What is said of a range that is split is said of its parts.
    script.let_go();
    assert_eq!(script.owners(), [0, 1, 0, 0, 0, 0, 0, 1]);
    // Parts come together first: the one that is elsewhere.
    let Request::Migrate { steps, .. } = &script.held[0].2 else { panic!("{:?}", script.held) };
    assert_eq!(steps.concat(), [(range(2, 3), 0)]);
    script.let_go();
    assert_eq!(script.moved(), [(4, Ok(1))].into(), "it goes on");
    script.let_go();
    assert_eq!(script.owners(), [0, 0, 0, 1]);
    assert_eq!(script.moved(), [(5, Ok(1))].into());
    // One that is cut off has changed nothing that anybody knows of.
    script.hear(Event::MemberLost { member: MemberId(2), reason: "killed".into() });
    assert!(script.moved()[&6].as_ref().unwrap_err().contains("member 2 is gone: killed"));
    assert_eq!(script.owners(), [0, 0, 0, 1]);
}

/// The workers take them between two steps of what is prepared, of which the first has moved what they split or merge.
#[test]
fn what_is_split_or_merged_before_a_prepared_migration_has_ended_is_where_that_has_moved_it() {
    let mut script = Script::new(2);
    let range = |prefix, length| Range::new(prefix, length).unwrap();
    script.batch(0);
    script.hold = vec!["Recut", "Migrate"];
    script.migrate(1, Wish::Recut(Recut::Split { ranges: vec![range(1, 2)], by: 1 }), 1);
    script.prepare(&[(2, QUERY, Wish::Moves(vec![(range(1, 2), 0), (range(0, 2), 1)]))], 1, Some(1));
    script.batch(1);
    script.let_go();
    assert_eq!(script.owners(), [0, 1, 1, 0, 1]);
    // Part of what is on its way goes back.
    script.prepare(&[(3, QUERY, Wish::Moves(vec![(range(3, 3), 1)]))], 1, Some(2));
    script.batch(2);
    let Request::Migrate { steps, .. } = &script.held[1].2 else { panic!("{:?}", script.held) };
    assert_eq!(steps.concat(), [(range(3, 3), 1)]);
    script.let_go();
    assert_eq!(script.moved(), [(2, Ok(2))].into());
    assert_eq!(script.owners(), [1, 0, 0, 0, 1]);
    script.let_go();
    assert_eq!(script.owners(), [1, 0, 1, 0, 1]);
    // Parts that a prepared one brings together, too.
    script.prepare(&[(5, QUERY, Wish::Moves(vec![(range(3, 3), 0), (range(0, 2), 0)]))], 1, Some(3));
    script.migrate(4, Wish::Recut(Recut::Merge { ranges: vec![range(1, 2)] }), 1);
    script.batch(3);
    script.let_go();
    script.held.rotate_left(1);
    script.let_go();
    script.let_go();
    assert_eq!(script.moved(), [(4, Ok(1)), (5, Ok(2))].into());
    assert_eq!(script.owners(), [0, 0, 0, 1]);
}

/// Each begins with its epoch, so a later one may move a bin again, and end, before an earlier one of several steps has ended.
#[test]
fn of_prepared_migrations_the_one_that_moved_a_bin_last_says_where_it_is() {
    let range = |prefix| Range::new(prefix, 2).unwrap();
    for (first, second, owners) in [
        ([(1, 9), (2, 9)], (2, 1), [0, 0, 0, 1]),
        ([(2, 7), (2, 9)], (2, 1), [1, 0, 0, 1]),
        ([(1, 9), (2, 9)], (3, 1), [0, 0, 0, 1]),
    ] {
        for last in [0, 1] {
            let mut script = Script::new(2);
            script.batch(0);
            script.hold = vec!["Migrate"];
            script.prepare(&[(1, QUERY, Wish::Moves(vec![(range(0), 1), (range(1), 0)]))], 1, Some(1));
            script.prepare(&[(2, QUERY, Wish::Moves(vec![(range(0), 0)]))], 1, Some(second.0));
            (1..=second.0).for_each(|epoch| assert!(completes(&script.batch(epoch), epoch)));
            let tickets = [script.held[0].0, script.held[1].0];
            let mut answers = [(tickets[0], migrated(&first)), (tickets[1], migrated(&[second]))];
            answers.rotate_left(1 - last);
            for (ticket, answer) in answers {
                script.hear(Event::Answer { ticket, answer: Ok(answer) });
            }
            assert_eq!(script.owners(), owners, "{first:?}, {second:?}, {last} last");
            assert_eq!(script.moved(), [(1, Ok(2)), (2, Ok(1))].into());
            // What has ended says nothing of what comes.
            script.hold.clear();
            script.migrate(3, Wish::To(vec![1, 1, 0, 0]), 9);
            assert_eq!(script.owners(), [1, 1, 0, 0]);
        }
    }
}

#[test]
fn a_merge_that_is_cancelled_while_parts_come_together_leaves_them() {
    let mut script = Script::new(2);
    let range = |prefix, length| Range::new(prefix, length).unwrap();
    script.batch(0);
    script.migrate(1, Wish::Recut(Recut::Split { ranges: vec![range(1, 2)], by: 1 }), 1);
    script.migrate(2, Wish::Moves(vec![(range(3, 3), 0)]), 1);
    script.hold = vec!["Migrate"];
    script.migrate(3, Wish::Recut(Recut::Merge { ranges: vec![range(1, 2)] }), 1);
    script.hear(Event::CancelMigration { handle: 3 });
    script.let_go();
    assert_eq!(script.moved(), [(1, Ok(1)), (2, Ok(1)), (3, Ok(1))].into());
    assert_eq!(script.owners().len(), 5, "its parts are together, and parts");
}

#[test]
fn of_several_queries_all_move_or_none() {
    let mut script = Script::new(2);
    script.batch(0);
    let evenly = |handle, query| (handle, query, Wish::To(vec![1; 4]));
    script.prepare(&[evenly(1, QUERY), evenly(2, "nobody")], 4, None);
    let told = script.moved();
    assert_eq!(told[&2].as_ref().unwrap_err(), "the query has not begun: its bins cannot move now");
    assert_eq!(
        told[&1].as_ref().unwrap_err(),
        "nothing moves: query nobody: the query has not begun: its bins cannot move now"
    );
    assert_eq!(script.owners(), [0, 1, 0, 1]);
    script.prepare(&[evenly(3, QUERY), evenly(4, QUERY)], 4, None);
    assert_eq!(script.moved(), [(3, Ok(1)), (4, Ok(0))].into());
}

#[test]
fn a_step_that_is_refused_leaves_what_was_done_before() {
    let mut script = Script::new(2);
    script.batch(0);
    script.hold = vec!["Migrate"];
    script.migrate(1, Wish::To(vec![1; 4]), 1);
    let (ticket, ..) = script.held.remove(0);
    let refused = Some(Failure::new(Kind::Internal, "too many"));
    script.hear(Event::Answer { ticket, answer: Ok(Answer::Migrated { times: vec![(0, 1)], refused }) });
    assert_eq!(script.moved()[&1].as_ref().unwrap_err(), "the migration was cut off: too many");
    assert_eq!(script.owners(), [1, 1, 0, 1]);
}

#[test]
fn edited_functions_go_on_from_the_state_in_a_new_generation() {
    let mut script = Script::new(1);
    script.batch(0);
    assert_eq!(requests(&script.batch(1)), ["CloseEpoch", "Release", "Settle"]);
    script.program.functions = 2;
    script.open();
    // A batch that was computed is served as it was.
    let again = script.batch(1);
    assert!(completes(&again, 1) && requests(&again) == ["Settle"], "{again:?}");
    assert_eq!(requests(&script.batch(2)), ["CloseEpoch", "Stop", "Start", "Release", "Settle"]);
    script.open();
    assert_eq!(requests(&script.batch(3)), ["CloseEpoch", "Release", "Settle"]);

    // Another flow is refused, and the one before goes on: of that are the functions that members begin with.
    let before = script.program.clone();
    let functions = |script: &Script| script.engine.facts(QUERY).unwrap().functions;
    script.program.functions = 3;
    script.program.plan.operators[0].types = "text".into();
    script.open();
    assert_eq!(functions(&script), 2);
    assert!(!completes(&script.batch(4), 4));
    script.program.plan.operators.clear();
    script.open();
    assert!(!completes(&script.batch(4), 4));
    script.program = before;
    script.open();
    let same = script.batch(4);
    assert!(completes(&same, 4) && requests(&same) == ["CloseEpoch", "Release", "Settle"], "{same:?}");
    script.program.functions = 4;
    script.open();
    assert_eq!(functions(&script), 4);
}

/// A query can be started again, with other functions, while its workers begin because others have come.
#[test]
fn functions_that_come_while_workers_begin_are_not_forgotten() {
    let mut script = Script::new(1);
    script.batch(0);
    script.hear(Event::Rescale { handle: 1, workers: 2, free: 1 });
    script.hear(Event::MemberUp { slot: 1, member: MemberId(2), executor: "executor 1".into(), executors: 2 });
    script.hold = vec!["Start"];
    script.hear(Event::Committed { query: QUERY.into(), epoch: 0 });
    assert_eq!(script.held.len(), 2, "{:?}", script.done);
    script.program.functions = 2;
    script.open();
    assert!(script.batch(1).is_empty());
    script.hold.clear();
    script.let_go();
    script.let_go();
    assert!(completes(&script.done, 1), "{:?}", script.done);
    let asked = requests(&script.done);
    let place = |name: &str| asked.iter().position(|one| one == name).unwrap_or(usize::MAX);
    assert!(place("Stop") < place("Start") && place("Start") < place("Release"), "{asked:?}");
}

#[test]
fn results_of_other_columns_are_made_again_while_that_can_be() {
    let mut script = Script::new(1);
    script.program.output = "n bigint".into();
    script.open();
    script.batch(0);
    script.hold = vec!["Sink"];
    script.batch(1);
    let fail = |script: &mut Script| {
        let Some(Effect::Sink { ticket, .. }) = script.sinks.last() else { panic!("the sink was not called") };
        let failure = Failure::new(Kind::User, "there is no column m");
        script.hear(Event::Sunk { ticket: *ticket, outcome: Err(failure) });
    };
    fail(&mut script);
    (script.program.functions, script.program.output) = (2, "m bigint".into());
    script.open();
    script.hold.clear();
    let again = script.batch(1);
    assert!(completes(&again, 1), "{again:?}");
    assert_eq!(requests(&again), ["Stop", "Start", "Release", "Settle"]);

    // Its sink has returned, and what would undo it is gone.
    (script.program.functions, script.program.output) = (3, "o bigint".into());
    script.open();
    script.batch(1);
    script.done.clear();
    script.hear(Event::Batch { query: QUERY.into(), epoch: 1, clock_ms: 0, planned_ms: None, committed: Some(0) });
    assert_eq!(script.errors(), [EngineError::OtherOutput { epoch: 1 }]);
    (script.program.functions, script.program.output) = (4, "m bigint".into());
    script.open();
    assert!(completes(&script.batch(1), 1), "the flow from before serves it");
    assert!(completes(&script.batch(2), 2));
}

#[test]
fn rows_of_other_columns_are_not_compared() {
    let mut script = Script::new(2);
    script.hold = vec!["Feed", "Sink"];
    let feed = |script: &mut Script, hash: u64| {
        let fed = |effect: &Effect| match effect {
            Effect::Feed { ticket, .. } => Some(*ticket),
            _ => None,
        };
        let ticket = script.done.iter().rev().find_map(fed).expect("it is fed");
        let (member, max_event_time) = (MemberId(1), None);
        let receipt = Receipt { source: 0, partition: 0, attempt: hash, member, rows: 2, max_event_time, hash };
        script.hear(Event::Receipt { ticket, receipt });
        script.hear(Event::Fed { ticket, outcome: Ok(()) });
    };
    for (columns, hash) in [("k bigint", 7), ("k bigint, v bigint", 9)] {
        script.program.columns = columns.into();
        script.program.functions += 1;
        script.open();
        script.done.clear();
        script.hear(Event::Batch { query: QUERY.into(), epoch: 0, clock_ms: 0, planned_ms: None, committed: None });
        feed(&mut script, hash);
        // The sink is under way when a member goes, with its part of the results.
        script.hear(Event::Stop { query: QUERY.into() });
        script.hear(Event::MemberLost { member: MemberId(2), reason: "killed".into() });
        let member = MemberId(2 + hash);
        script.hear(Event::MemberUp { slot: 1, member, executor: "executor 1".into(), executors: 2 });
    }
    let errors = script.errors();
    assert!(!errors.iter().any(|error| matches!(error, EngineError::NotReplayable { .. })), "{errors:?}");
    assert_eq!(script.sinks.len(), 2);
}

#[test]
fn the_cause_of_a_failure_is_told_whoever_is_first() {
    let mut script = Script::new(3);
    script.batch(0);
    script.hold = vec!["Release"];
    script.batch(1);
    script.fail(0, Kind::Echo, "a peer has failed");
    assert_eq!(script.errors(), [], "the cause is still to come");
    script.let_go();
    script.fail(0, Kind::User, "division by zero");
    assert_eq!(script.errors(), [EngineError::Member(Failure::new(Kind::User, "division by zero"))]);
    script.hold.clear();
    assert!(completes(&script.batch(1), 1));

    // Ours is told when no loss explains it.
    script.hold = vec!["Release"];
    script.batch(2);
    script.fail(0, Kind::Echo, "a peer has failed");
    script.fail(0, Kind::Internal, "a bug");
    script.held.clear();
    assert!(script.done.iter().all(|effect| !matches!(effect, Effect::Fail { .. })));
    script.ring();
    assert_eq!(script.errors(), [EngineError::Member(Failure::new(Kind::Internal, "a bug"))]);
    // An echo without a cause: it begins again.
    script.batch(2);
    script.fail(0, Kind::Echo, "a peer has failed");
    script.held.clear();
    script.hold.clear();
    script.ring();
    assert!(completes(&script.done, 2));
}

#[test]
fn a_feed_or_sink_that_fails_for_reasons_of_its_own_fails_at_once() {
    let mut script = Script::new(1);
    script.hold = vec!["Feed"];
    let fed = |effects: &[Effect]| {
        let ticket = |effect: &Effect| match effect {
            Effect::Feed { ticket, .. } | Effect::Sink { ticket, .. } => Some(*ticket),
            _ => None,
        };
        effects.iter().rev().find_map(ticket).expect("a feed or sink")
    };
    let ticket = fed(&script.batch(0));
    script.hear(Event::Fed { ticket, outcome: Err(Failure::new(Kind::Data, "no column v")) });
    assert_eq!(script.errors(), [EngineError::Feed { epoch: 0, reason: "no column v".into() }]);
    let ticket = fed(&script.batch(0));
    script.hear(Event::Fed { ticket, outcome: Err(Failure::new(Kind::Internal, "no executor")) });
    assert_eq!(script.done.last(), Some(&Effect::Timer { ticket: ticket + 1, after_ms: 7 }));
    script.ring();
    assert_eq!(script.errors(), [EngineError::Feed { epoch: 0, reason: "no executor".into() }]);

    script.hold = vec!["Sink"];
    let ticket = fed(&script.batch(0));
    script.hear(Event::Sunk { ticket, outcome: Err(Failure::new(Kind::User, "the disk is full")) });
    assert_eq!(script.errors(), [EngineError::Sink { epoch: 0, reason: "the disk is full".into(), returned: false }]);
    assert!(matches!(script.finish(None)[0], Effect::Fail { error: EngineError::Uncommitted { epoch: 0 }, .. }));
    script.hold.clear();
    assert!(completes(&script.batch(0), 0), "served again");
}

#[test]
fn a_sink_that_has_returned_has_not_failed() {
    let mut script = Script::with(Setup { workers: 2, bits: 2, retry_sink: false, ..Setup::default() });
    (script.program.durable, script.store) = (true, Some(Contents::default()));
    script.open();
    script.batch(0);
    let told = |script: &mut Script| script.errors().iter().map(EngineError::to_string).collect::<Vec<_>>();
    let text = |epoch: u64, reason: &str| {
        format!(
            "the sink has returned for epoch {epoch}, but the state of that epoch is not durable: {reason}; start the query again, or call \
             finish() again where that failed: the sink is called with it once more"
        )
    };
    script.hold = vec!["Write"];
    assert!(!completes(&script.batch(1), 1));
    script.hear(Event::MemberLost { member: MemberId(2), reason: "killed".into() });
    assert_eq!(told(&mut script), [text(1, "a member was lost before its state was written")]);
    script.held.clear();
    script.batch(1);
    script.fail(0, Kind::Internal, "no room");
    assert_eq!(told(&mut script), [text(1, "member 1 could not write its state: no room")]);
    script.hold.clear();
    assert!(completes(&script.batch(1), 1));
    assert_eq!(script.sinks.len(), 4, "once for the first batch, and for each attempt at the second");
}

#[test]
fn the_end_is_served_again_when_nobody_waited_and_ends_the_workers() {
    let mut script = Script::new(1);
    script.batch(0);
    script.hold = vec!["Sink"];
    script.finish(None);
    script.hear(Event::Stop { query: QUERY.into() });
    assert_eq!(script.errors(), [EngineError::Abandoned { epoch: 1 }]);
    script.hold.clear();
    let done = script.finish(None);
    assert!(completes(&done, 1));
    assert_eq!(requests(&done), ["Conclude"], "{done:?}");
    let again = script.finish(None);
    assert_eq!(again, [Effect::Complete { query: QUERY.into(), epoch: 1 }]);
    assert!(script.engine.facts(QUERY).unwrap().finished);
    script.migrate(1, Wish::Even, 1);
    assert_eq!(script.moved()[&1].as_ref().unwrap_err(), "the query is finished: its bins cannot move now");
}

/// The final epoch and the batch that comes instead of it have one number; what the sink saw of the first says nothing of the other.
#[test]
fn the_batch_behind_an_end_that_came_to_nothing_may_have_rows() {
    let mut script = Script::new(1);
    script.batch(0);
    script.hold = vec!["Sink"];
    script.finish(None);
    script.hear(Event::Stop { query: QUERY.into() });
    script.errors();
    script.hold = vec!["Feed"];
    let done = script.batch(1);
    let feed = done.iter().find_map(|effect| match effect {
        Effect::Feed { ticket, .. } => Some(*ticket),
        _ => None,
    });
    let ticket = feed.expect("rows are asked for");
    let receipt =
        Receipt { source: 0, partition: 0, attempt: 0, member: MemberId(1), rows: 3, max_event_time: None, hash: 5 };
    script.hear(Event::Receipt { ticket, receipt });
    script.done.clear();
    script.hear(Event::Fed { ticket, outcome: Ok(()) });
    assert!(completes(&script.done, 1), "{:?}", script.done);
}

#[test]
fn an_end_that_may_be_durable_is_not_taken_back() {
    let mut script = Script::durable(1);
    assert!(completes(&script.batch(0), 0));
    script.hold = vec!["WriteManifest"];
    assert!(!completes(&script.finish(Some(0)), 1));
    script.hear(Event::Stop { query: QUERY.into() });
    script.hold.clear();
    // Were it fed, and the file came after all, the next engine would refuse the batch behind it for ever.
    script.batch(1);
    script.hear(Event::Stop { query: QUERY.into() });
    let done = script.batch(1);
    let told = EngineError::Finishing { after: 0, asked: 1 };
    assert_eq!(done, [Effect::Fail { query: QUERY.into(), epoch: 1, error: told }]);
    assert!(completes(&script.finish(Some(0)), 1), "{:?}", script.done);
}

/// A copy that is put back is older than what the engine knew: nothing of it is too old.
#[test]
fn a_checkpoint_that_is_put_back_goes_on_in_an_engine_that_has_seen_more() {
    for missing in [false, true] {
        let mut script = Script::durable(2);
        for epoch in 0..7 {
            if epoch == 2 {
                script.hold = vec!["Delete"];
            }
            assert!(completes(&script.batch(epoch), epoch));
        }
        script.hold.clear();
        let mut copy = script.store.take().expect("it is durable");
        copy.manifests.retain(|(_, read)| read.as_ref().is_ok_and(|manifest| manifest.batch < 2));
        assert!(!copy.manifests.is_empty());
        script.store = Some(copy.clone());
        if missing {
            script.hear(Event::MemberLost { member: MemberId(2), reason: "killed".into() });
        }
        // Workers have run before: one that is missing is not waited for.
        let done = script.batch(2);
        assert!(completes(&done, 2), "{done:?}");
        let newest = |contents: &Contents| contents.manifests.last().cloned();
        let there = script.store.as_ref().expect("it is durable");
        assert!(there.manifests.contains(&newest(&copy).unwrap()), "{there:?}");
        if missing {
            let executor = "executor 1".to_owned();
            script.hear(Event::MemberUp { slot: 1, member: MemberId(3), executor, executors: 2 });
        }
        assert!(completes(&script.batch(3), 3));
    }
}

/// Of its manifests nothing is older than what the engine needs, as the engine sees it: all would be deleted, in answer to a deletion that was slow.
#[test]
fn nothing_is_deleted_of_a_checkpoint_that_is_put_back_while_its_engine_lives() {
    for other in [false, true] {
        let mut script = Script::durable(2);
        let mut copy = Contents::default();
        script.hold = vec!["Delete"];
        let mut held = None;
        for epoch in 0..9 {
            let done = script.batch(epoch);
            assert!(completes(&done, epoch));
            held = held.or(done.iter().find_map(|effect| match effect {
                Effect::Delete { ticket, .. } => Some(*ticket),
                _ => None,
            }));
            if epoch == 1 {
                copy = script.store.clone().expect("it is durable");
            }
        }
        if other {
            // Made by another engine behind the copy, and of the same number.
            copy = script.store.clone().expect("it is durable");
            copy.claims.iter_mut().for_each(|(_, claim)| claim.as_mut().expect("whole").nonce += 1);
        }
        script.store = Some(copy.clone());
        script.hold.clear();
        script.done.clear();
        let ticket = held.expect("older ones were to go");
        script.hear(Event::Stored { ticket, outcome: Ok(Stored::Deleted) });
        assert!(matches!(script.done[..], [Effect::ReadCheckpoint { .. }]), "{:?}", script.done);
        assert_eq!(script.store.as_ref().map(|there| there.manifests.len()), Some(copy.manifests.len()));
    }
}

/// A store that takes longer than a batch to delete; and one that refuses it is asked again, also where no batch follows.
#[test]
fn what_is_being_deleted_is_not_deleted_once_more() {
    let mut script = Script::durable(2);
    script.hold = vec!["Delete"];
    let deletes = |done: &[Effect]| -> Vec<Ticket> {
        let ticket = |effect: &Effect| match effect {
            Effect::Delete { ticket, .. } => Some(*ticket),
            _ => None,
        };
        done.iter().filter_map(ticket).collect()
    };
    let mut asked = Vec::new();
    for epoch in 0..9 {
        let done = script.batch(epoch);
        assert!(completes(&done, epoch));
        asked.extend(deletes(&done));
    }
    let [ticket] = asked[..] else { panic!("{asked:?}") };
    let refused = || StoreError::Unavailable("AccessDenied".into());
    script.done.clear();
    script.hear(Event::Stored { ticket, outcome: Err(refused()) });
    let [again] = deletes(&script.done)[..] else { panic!("{:?}", script.done) };
    script.hold.clear();
    script.done.clear();
    script.hear(Event::Stored { ticket: again, outcome: Err(refused()) });
    assert_eq!(script.done, [], "nothing has come since");
    let done = script.batch(9);
    assert!(completes(&done, 9) && deletes(&done).len() == 1, "{done:?}");
    let left = &script.store.as_ref().expect("it is durable").manifests;
    assert!(left.len() <= 4, "{left:?}");
}

/// However many are kept, and where nothing can be deleted: what is in a manifest never changes.
#[test]
fn a_manifest_is_read_once_to_clear_up() {
    for deletes in [true, false] {
        let mut store = Contents::default();
        for round in 0..3 {
            let mut script = Script::with(Setup { workers: 1, bits: 2, loss_ms: 7, keep: 20, ..Setup::default() });
            (script.program.durable, script.store) = (true, Some(std::mem::take(&mut store)));
            script.file_bytes = Some(10);
            script.open();
            if !deletes {
                script.hold = vec!["Delete"];
            }
            for epoch in 30 * round..30 * (round + 1) {
                assert!(completes(&script.batch(epoch), epoch));
                let asked = script.done.iter().find_map(|effect| match effect {
                    Effect::Delete { ticket, .. } => Some(*ticket),
                    _ => None,
                });
                if let Some(ticket) = asked.filter(|_| !deletes) {
                    let outcome = Err(StoreError::Unavailable("AccessDenied".into()));
                    script.hear(Event::Stored { ticket, outcome });
                }
                script.done.clear();
            }
            // What it begins with, and what its predecessor has left.
            let first = if round == 0 { 0 } else { 1 };
            assert_eq!(script.reads[0], first);
            let most = if round == 0 { 0 } else { 20 };
            assert!(script.reads[1] <= most && script.reads[2..].iter().all(|read| *read == 0), "{:?}", script.reads);
            store = script.store.take().expect("it is durable");
            let left: BTreeSet<&str> = store.manifests.iter().map(|(name, _)| name.as_str()).collect();
            let all = 30 * (round as usize + 1);
            assert!(if deletes { (21..24).contains(&left.len()) } else { left.len() == all }, "{left:?}");
        }
    }
}

/// As where a driver died while it wrote one, to a store that shows files before they are whole.
#[test]
fn a_torn_manifest_ends_the_clearing_up_until_its_batch_is_over_only() {
    let mut script = Script::durable(2);
    let torn = format!("manifest-{:020}-{:020}-{:016x}", 1, 1, 7);
    for epoch in 0..7 {
        assert!(completes(&script.batch(epoch), epoch));
        let store = script.store.as_mut().expect("it is durable");
        if epoch == 1 {
            store.manifests.push((torn.clone(), Err(FormatError::Length { found: 0, expected: 22 })));
        }
    }
    let store = script.store.as_ref().expect("it is durable");
    let left: Vec<&str> = store.manifests.iter().map(|(name, _)| &name[..29]).collect();
    assert!(!store.manifests.iter().any(|(name, _)| *name == torn), "{left:?}");
    assert!(left.len() < 5, "{left:?}");
}

#[test]
fn a_claim_of_the_same_number_that_another_engine_made_at_the_same_moment_counts() {
    let mut script = Script::durable(2);
    script.hold = vec!["Sink"];
    script.batch(0);
    let Some(contents) = &mut script.store else { panic!("it has a checkpoint") };
    let Some((1, Ok(claim))) = contents.claims.last_mut() else { panic!("{:?}", contents.claims) };
    claim.nonce += 1;
    script.sunk();
    let errors = script.errors();
    assert_eq!(errors, [EngineError::Fenced { claim: 1, by: 1 }]);
    let told = errors[0].to_string();
    assert!(told.contains("another engine has made claim 1") && told.contains("close that engine"), "{told}");
    assert!(script.store.is_some_and(|contents| contents.manifests.is_empty()), "nothing is written under it");
}

/// Spark asks an engine that is slow to read, and meanwhile the one before it goes on.
#[test]
fn who_comes_after_another_engine_has_gone_on_is_told_to_start_again() {
    let told = |newest| EngineError::NoManifest { asked: 2, newest }.to_string();
    let [gone_on, lost] = [Some(2), Some(0)].map(|newest| told(newest).contains("start the query again"));
    assert!(gone_on && !lost, "{} | {}", told(Some(2)), told(Some(0)));
}

#[test]
fn files_that_cannot_be_merged_are_not_read_again_at_every_batch() {
    let mut script = Script::durable(1);
    (script.file_bytes, script.hold) = (Some(10), vec!["Merge"]);
    let mut tried = Vec::new();
    for epoch in 0..100 {
        assert!(completes(&script.batch(epoch), epoch));
        if !script.held.is_empty() {
            tried.push(epoch);
            script.fail(0, Kind::Damaged, "file data-7 has other bytes than were written");
        }
    }
    // Batch 17 begins with 17 files, each of all the state.
    assert_eq!(tried, [17, 19, 23, 31, 47, 79]);
}

/// Who died while it took the checkpoint over has not taken it.
#[test]
fn part_of_a_claim_does_not_end_the_clearing_up() {
    let mut script = Script::durable(1);
    script.batch(0);
    let store = script.store.as_mut().expect("it is durable");
    let left = format!(".{}.0f", Claim::name(2));
    store.add(&left, 9, &[]);
    for epoch in 1..5 {
        assert!(completes(&script.batch(epoch), epoch));
    }
    let store = script.store.as_ref().expect("it is durable");
    let batches: Vec<u64> = store.manifests.iter().map(|(_, read)| read.as_ref().unwrap().batch).collect();
    assert_eq!(batches, [2, 3, 4]);
    assert!(store.files.iter().any(|file| file.name == left), "another engine may be at it");
}

/// Each source has a watermark, the flow the least of those of sources with event time; a row's place is by source, then partition.
#[test]
fn the_watermark_waits_for_every_source_with_event_time() {
    let mut script = Script::new(1);
    script.program.plan.sources = ["a", "b", "c"].map(str::to_owned).into();
    script.program.lateness_us = vec![Some(10), None, Some(0)];
    script.open();
    script.hold = vec!["Feed"];
    let mut fed = |epoch: u64, rows: &[(u8, u32, u64, Option<i64>)]| {
        let ticket = script.batch(epoch).into_iter().find_map(|effect| match effect {
            Effect::Feed { ticket, .. } => Some(ticket),
            _ => None,
        });
        let ticket = ticket.expect("rows are asked for");
        for &(source, partition, rows, max_event_time) in rows {
            let (member, attempt, hash) = (MemberId(1), 7, 1);
            let receipt = Receipt { source, partition, attempt, member, rows, max_event_time, hash };
            script.hear(Event::Receipt { ticket, receipt });
        }
        script.hear(Event::Fed { ticket, outcome: Ok(()) });
        let release = script.done.iter().find_map(|effect| match effect {
            Effect::Call { request: Request::Release(release), .. } => Some(release.clone()),
            _ => None,
        });
        let release = release.expect("the epoch runs");
        let places = release.feeds.iter().map(|feed| (feed.source, feed.partition, feed.rows_before));
        (release.watermark, places.collect::<Vec<_>>())
    };
    let first = fed(0, &[(1, 0, 5, None), (0, 1, 2, Some(100)), (0, 0, 3, Some(40))]);
    assert_eq!(first, (None, vec![(0, 0, 0), (0, 1, 3), (1, 0, 5)]), "c has not come");
    assert_eq!(fed(1, &[(2, 0, 1, Some(50))]).0, Some(50));
    assert_eq!(fed(2, &[(2, 0, 1, Some(20)), (1, 0, 1, Some(7))]).0, Some(50), "behind what c has reached");
    assert_eq!(fed(3, &[(2, 1, 1, Some(200)), (0, 0, 1, Some(60))]).0, Some(90));
    assert_eq!(fed(4, &[]).0, Some(90));
}

/// A source that may be idle is waited for as long as it says, by the clocks of epochs, also by an engine that goes on from a manifest; what it
/// has reached stays, and the watermark does not go back when it speaks again.
#[test]
fn a_silent_source_is_not_waited_for() {
    let mut program = Program { lateness_us: vec![Some(0), Some(0)], ..Program::default() };
    program.idle_after_ms = vec![None, Some(100)];
    assert!(program.may_be_idle());
    let at = |reached: [Option<i64>; 2], heard: [i64; 2], clock| program.watermark(&reached, &heard.map(Some), clock);
    assert_eq!(at([Some(50), None], [0, 0], 99), None, "it may come");
    assert_eq!(at([Some(50), None], [0, 0], 100), Some(50), "it never came");
    assert_eq!(at([Some(90), Some(20)], [150, 100], 199), Some(20));
    assert_eq!(at([Some(90), Some(20)], [200, 100], 200), Some(90));
    assert_eq!(program.watermark(&[Some(90), Some(20)], &[], 999), Some(20), "nothing is known of when it had rows");
    program.idle_after_ms = vec![Some(100), Some(100)];
    assert_eq!(program.watermark(&[Some(90), Some(20)], &[Some(0), Some(0)], 100), None, "all are silent");

    let mut script = Script::new(1);
    script.program.plan.sources = ["a", "b"].map(str::to_owned).into();
    script.program.lateness_us = vec![Some(0), Some(0)];
    script.program.idle_after_ms = vec![None, Some(100)];
    script.open();
    script.hold = vec!["Feed"];
    let mut fed = |epoch: u64, clock_ms: i64, rows: &[(u8, i64)]| {
        script.done.clear();
        script.hear(Event::Batch {
            query: QUERY.into(),
            epoch,
            clock_ms,
            planned_ms: None,
            committed: epoch.checked_sub(1),
        });
        let ticket = script.done.iter().find_map(|effect| match effect {
            Effect::Feed { ticket, .. } => Some(*ticket),
            _ => None,
        });
        let ticket = ticket.expect("rows are asked for");
        for &(source, time) in rows {
            let (member, attempt, partition, max_event_time) = (MemberId(1), 7, 0, Some(time));
            let receipt = Receipt { source, partition, attempt, member, rows: 1, max_event_time, hash: 1 };
            script.hear(Event::Receipt { ticket, receipt });
        }
        script.hear(Event::Fed { ticket, outcome: Ok(()) });
        let release = script.done.iter().find_map(|effect| match effect {
            Effect::Call { request: Request::Release(release), .. } => Some(release.clone()),
            _ => None,
        });
        release.expect("the epoch runs").watermark
    };
    assert_eq!(fed(0, 1_000, &[(0, 40)]), None);
    assert_eq!(fed(1, 1_099, &[(0, 50)]), None);
    assert_eq!(fed(2, 1_100, &[(0, 60)]), Some(60), "since the first batch");
    assert_eq!(fed(3, 1_150, &[(0, 70), (1, 10)]), Some(60), "it is back, and behind");
    assert_eq!(fed(4, 1_249, &[(0, 95)]), Some(60));
    assert_eq!(fed(5, 1_250, &[]), Some(95), "silent again, by a batch without rows");
    assert_eq!(fed(6, 1_260, &[(1, 200)]), Some(95));
    assert_eq!(fed(7, 1_270, &[(0, 150)]), Some(150));
}

/// A query that is started again with other options of its sources, and again, does not begin behind its watermark: windows that have closed would
/// take rows and come out a second time.
#[test]
fn the_watermark_does_not_go_back_when_options_of_sources_change() {
    let mut store = Contents::default();
    let mut run = |epoch: u64, clock_ms: i64, (lateness_us, idle_after_ms), rows: &[(u8, i64)]| -> Option<i64> {
        let mut script = Script::durable(1);
        script.store = Some(std::mem::take(&mut store));
        script.program.plan.sources = ["a", "b"].map(str::to_owned).into();
        (script.program.lateness_us, script.program.idle_after_ms) = (lateness_us, idle_after_ms);
        script.hold = vec!["Feed"];
        script.open();
        script.hear(Event::Batch {
            query: QUERY.into(),
            epoch,
            clock_ms,
            planned_ms: None,
            committed: epoch.checked_sub(1),
        });
        let feed = |effect: &Effect| match effect {
            Effect::Feed { ticket, .. } => Some(*ticket),
            _ => None,
        };
        let ticket = script.done.iter().find_map(feed).expect("rows are asked for");
        for &(source, time) in rows {
            let (member, max_event_time) = (MemberId(1), Some(time));
            let receipt = Receipt { source, partition: 0, attempt: 7, member, rows: 1, max_event_time, hash: 1 };
            script.hear(Event::Receipt { ticket, receipt });
        }
        script.hear(Event::Fed { ticket, outcome: Ok(()) });
        assert!(completes(&script.done, epoch), "{:?}", script.done);
        store = script.store.take().expect("it is durable");
        let released = |effect: &Effect| match effect {
            Effect::Call { request: Request::Release(release), .. } => Some(release.watermark),
            _ => None,
        };
        script.done.iter().find_map(released).expect("the epoch runs")
    };
    let both = || vec![Some(0), Some(0)];
    let idle = || vec![None, Some(100)];
    assert_eq!(run(0, 0, (both(), idle()), &[(0, 10), (1, 5)]), Some(5));
    assert_eq!(run(1, 100, (both(), idle()), &[(0, 50)]), Some(50), "b is idle");
    assert_eq!(run(2, 200, (both(), vec![]), &[(0, 60)]), Some(50), "b is waited for again");
    assert_eq!(run(3, 300, (both(), vec![]), &[(0, 70)]), Some(50));
    assert_eq!(run(4, 400, (vec![Some(0), None], vec![]), &[(0, 80)]), Some(80), "b has no event time");
    assert_eq!(run(5, 500, (both(), vec![]), &[(1, 60)]), Some(80));
    assert_eq!(run(6, 600, (both(), vec![]), &[(1, 70)]), Some(80));
}

#[test]
fn a_query_is_dropped_when_nothing_of_it_runs_and_all_have_forgotten_it() {
    let mut script = Script::new(2);
    script.hold = vec!["Release", "Drop"];
    script.batch(0);
    script.hear(Event::Drop { query: QUERY.into() });
    let busy = Err(EngineError::Busy { running: 0, asked: 0 });
    assert_eq!(script.done.pop(), Some(Effect::Dropped { query: QUERY.into(), outcome: busy }));
    script.let_go();
    script.let_go();
    let stamp = |effects: &[Effect]| {
        let generation = |effect: &Effect| match effect {
            Effect::Call { request: Request::Start(start), .. } => Some(start.stamp.generation),
            _ => None,
        };
        effects.iter().find_map(generation).expect("a start")
    };
    script.hear(Event::Drop { query: QUERY.into() });
    assert_eq!(script.engine.facts(QUERY), None);
    script.let_go();
    let dropped = Effect::Dropped { query: QUERY.into(), outcome: Ok(()) };
    assert!(!script.done.contains(&dropped));
    script.hear(Event::MemberLost { member: MemberId(2), reason: "killed".into() });
    assert!(script.done.contains(&dropped), "who is gone has forgotten it");
    // Another life of the query has other generations, and no state.
    script.hold.clear();
    script.open();
    let refused = script.batch(1);
    assert!(matches!(refused[0], Effect::Fail { error: EngineError::StateLost { epoch: 1, .. }, .. }), "{refused:?}");
    script.hear(Event::MemberUp { slot: 1, member: MemberId(3), executor: "executor 1".into(), executors: 2 });
    assert!(stamp(&script.batch(0)) > 1);
}

#[test]
fn a_lost_member_is_named_with_the_state_that_it_took_along() {
    let mut script = Script::new(2);
    script.batch(0);
    script.hold = vec!["Stop"];
    script.hear(Event::MemberLost { member: MemberId(2), reason: "killed".into() });
    script.batch(1);
    let (ticket, ..) = script.held.remove(0);
    let half = Ranges::from([("sums".into(), vec![Range::new(0, 2).unwrap(), Range::new(2, 2).unwrap()])]);
    script.hear(Event::Answer { ticket, answer: Ok(Answer::Inventory(half)) });
    let errors = script.errors();
    let EngineError::StateLost { epoch: 1, reason, member: Some(MemberId(2)) } = &errors[0] else {
        panic!("{errors:?}")
    };
    assert_eq!(reason, "2 ranges are at no member; member 2 is gone: killed");
    // Nor can the batch that failed for that come again.
    let end = script.finish(None);
    assert!(matches!(end[0], Effect::Fail { error: EngineError::StateLost { .. }, .. }), "{end:?}");
}

#[test]
fn members_that_leave_give_away_what_they_own_while_batches_pass() {
    let mut script = Script::new(2);
    script.batch(0);
    script.hear(Event::Rescale { handle: 1, workers: 1, free: 0 });
    let rescaled = Effect::Rescaled { handle: 1, outcome: Ok(1), moved: 2 };
    assert!(requests(&script.batch(1)).contains(&"Migrate".to_owned()));
    assert_eq!(script.owners(), [0; 4]);
    let done = script.batch(2);
    assert!(completes(&done, 2) && requests(&done).contains(&"Start".to_owned()), "{done:?}");
    let place = |wanted: &Effect| done.iter().position(|effect| effect == wanted);
    assert!(place(&Effect::RetireResident { slot: 1 }).is_some() && place(&rescaled).is_some(), "{done:?}");
    // And back: who comes takes part with the next batch.
    script.hear(Event::Rescale { handle: 2, workers: 2, free: 1 });
    script.hear(Event::MemberUp { slot: 1, member: MemberId(3), executor: "executor 1".into(), executors: 2 });
    let done = script.batch(3);
    assert!(requests(&done).contains(&"Migrate".to_owned()));
    assert!(done.contains(&Effect::Rescaled { handle: 2, outcome: Ok(2), moved: 2 }), "{done:?}");
    assert_eq!(script.owners().iter().filter(|owner| **owner == 0).count(), 2);
    for (workers, text) in [(0, "at least one worker"), (9, "2 task slots are held and 1 more are free")] {
        script.done.clear();
        script.hear(Event::Rescale { handle: 3, workers, free: 1 });
        let Some(Effect::Rescaled { outcome: Err(error), .. }) = script.done.pop() else { panic!("{workers}") };
        assert!(error.to_string().contains(text), "{error}");
    }
}

#[test]
fn nothing_moves_to_members_that_leave() {
    for rescales in [true, false] {
        let mut script = Script::new(2);
        script.batch(0);
        let range = |prefix| Range::new(prefix, 2).unwrap();
        script.migrate(7, Wish::Recut(Recut::Split { ranges: vec![range(3)], by: 1 }), 1);
        assert_eq!(script.owners(), [0, 1, 0, 1, 1]);
        assert_eq!(script.engine.facts(QUERY).unwrap().leaving, [0; 0]);
        script.hear(match rescales {
            true => Event::Rescale { handle: 1, workers: 1, free: 0 },
            false => Event::Leaving { member: MemberId(2) },
        });
        assert_eq!(script.engine.facts(QUERY).unwrap().leaving, [1]);
        // It takes until the end of a batch before it is gone; meanwhile somebody evens out.
        script.batch(1);
        assert_eq!(script.owners(), [0; 5], "{rescales}");
        script.moved();
        script.migrate(8, Wish::Even, 1);
        script.migrate(9, Wish::To(vec![0, 1, 0, 1]), 1);
        script.migrate(10, Wish::Moves(vec![(range(2), 1)]), 1);
        script.migrate(11, Wish::Moves(vec![(range(2), 0)]), 1);
        let refused = || Err("worker 1 leaves: nothing moves to it any more".to_owned());
        let told = BTreeMap::from([(8, Ok(0)), (9, refused()), (10, refused()), (11, Ok(0))]);
        assert_eq!((script.moved(), script.owners()), (told, vec![0; 5]), "{rescales}");
        let done = script.batch(2);
        assert!(done.contains(&Effect::RetireResident { slot: 1 }), "{rescales}: {done:?}");
    }
}

#[test]
fn what_is_merged_comes_together_with_a_member_that_stays() {
    let mut script = Script::new(2);
    script.batch(0);
    let range = |prefix, bits| Range::new(prefix, bits).unwrap();
    script.migrate(7, Wish::Recut(Recut::Split { ranges: vec![range(3, 2)], by: 2 }), 1);
    script.migrate(8, Wish::Moves(vec![(range(12, 4), 0)]), 1);
    assert_eq!(script.owners(), [0, 1, 0, 0, 1, 1, 1]);
    script.hold = vec!["Migrate"];
    script.hear(Event::Leaving { member: MemberId(2) });
    script.migrate(9, Wish::Recut(Recut::Merge { ranges: vec![range(3, 2)] }), 1);
    script.hold.clear();
    script.let_go();
    assert_eq!(script.owners()[3], 0, "three of its four parts were elsewhere");
}

#[test]
fn parts_that_are_merged_come_together_in_steps_as_shares_do() {
    let mut script = Script::with(Setup {
        workers: 2,
        bits: 2,
        shares: Strategy::Matched { size: 1 },
        max_pause_ms: Some(50),
        ..Setup::default()
    });
    script.batch(0);
    let ranges = || (0..4).map(|prefix| Range::new(prefix, 2).unwrap()).collect::<Vec<_>>();
    script.migrate(7, Wish::Recut(Recut::Split { ranges: ranges(), by: 1 }), 1);
    let apart = (0..8).map(|prefix| (Range::new(prefix, 3).unwrap(), prefix % 2)).collect();
    script.migrate(8, Wish::Moves(apart), 8);
    script.done.clear();
    let moves = vec![Moving { query: QUERY.into(), handle: 9, wish: Wish::Recut(Recut::Merge { ranges: ranges() }) }];
    let strategy = Strategy::AllAtOnce;
    script.hear(Event::Migrate { moves, strategy, max_pause_ms: None, drains: false, at_epoch: None });
    let request = script.done.iter().find_map(|effect| match effect {
        Effect::Call { request: Request::Migrate { steps, max_pause_ms, .. }, .. } => {
            Some((steps.clone(), *max_pause_ms))
        }
        _ => None,
    });
    let (steps, pause) = request.expect("they come together");
    assert_eq!((steps.iter().map(Vec::len).collect::<Vec<_>>(), pause), (vec![1; 4], Some(50)));
    assert_eq!(script.owners().len(), 4);
}

#[test]
fn a_member_whose_executor_goes_gives_away_what_it_owns_and_another_comes() {
    let mut script = Script::new(2);
    script.batch(0);
    script.done.clear();
    let leaving = || Event::Leaving { member: MemberId(1) };
    script.hear(leaving());
    let watch = Effect::WatchCommit { query: QUERY.into(), epoch: 0 };
    assert_eq!(script.done, [Effect::StartResident { slot: 2 }, watch], "Spark places nothing on its executor");
    script.done.clear();
    script.hear(leaving());
    script.hear(Event::Leaving { member: MemberId(9) });
    assert_eq!(script.done, [], "it is known");
    // A second attempt of its task, which Spark makes where it speculates, must not end the first by returning.
    script.hear(Event::MemberUp { slot: 0, member: MemberId(7), executor: "executor 1".into(), executors: 2 });
    assert_eq!(script.done, [Effect::Dismiss { member: MemberId(7), why: Dismissal::Spare }]);
    // Nobody waits for the other one: there may be no slot for it before this one has ended.
    script.hold = vec!["Migrate"];
    assert!(completes(&script.batch(1), 1));
    script.let_go();
    assert_eq!(script.owners(), [1; 4]);
    script.done.clear();
    script.hear(Event::Committed { query: QUERY.into(), epoch: 1 });
    assert!(script.done.contains(&Effect::RetireResident { slot: 0 }), "{:?}", script.done);
    script.hear(Event::MemberLost { member: MemberId(1), reason: "it was told to end".into() });
    assert!(!script.done.contains(&Effect::StartResident { slot: 0 }));
    // Who comes in its place gets its share.
    script.hold.clear();
    script.hear(Event::MemberUp { slot: 2, member: MemberId(3), executor: "executor 2".into(), executors: 2 });
    assert!(completes(&script.batch(2), 2));
    assert_eq!(script.owners().iter().filter(|owner| **owner == 1).count(), 2);
    // The last one keeps everything until another one is there.
    let mut script = Script::new(1);
    script.batch(0);
    script.hear(leaving());
    assert!(completes(&script.batch(1), 1) && script.owners() == [0; 4]);
    script.hear(Event::MemberUp { slot: 1, member: MemberId(2), executor: "executor 1".into(), executors: 2 });
    assert!(completes(&script.batch(2), 2));
    assert_eq!(script.owners(), [1; 4]);
    assert!(script.batch(3).contains(&Effect::RetireResident { slot: 0 }));
    // A rescale counts on no slot of an executor that goes.
    script.hear(Event::Leaving { member: MemberId(2) });
    script.done.clear();
    script.hear(Event::Rescale { handle: 1, workers: 3, free: 1 });
    let Some(Effect::Rescaled { outcome: Err(error), .. }) = script.done.pop() else { panic!("{:?}", script.done) };
    assert!(error.to_string().contains("1 task slots are held and 1 more are free"), "{error}");
}

#[test]
fn a_rescale_takes_effect_when_spark_has_committed_and_no_batch_comes() {
    let mut script = Script::new(2);
    script.batch(0);
    script.hear(Event::Rescale { handle: 1, workers: 3, free: 1 });
    let facts = script.engine.rescaling().expect("it runs");
    let last = Wait::Commit { query: QUERY.into(), epoch: 0 };
    assert_eq!((facts.handle, facts.workers, facts.serving, facts.leaving), (1, 3, 2, 0));
    // Nothing is new for the query yet.
    assert_eq!((facts.waits, facts.to_move), (vec![Wait::Slots { missing: 1 }], 0));
    script.done.clear();
    script.hear(Event::MemberUp { slot: 2, member: MemberId(3), executor: "executor 2".into(), executors: 3 });
    let watch = Effect::WatchCommit { query: QUERY.into(), epoch: 0 };
    assert_eq!(script.done, [watch], "before the commit the originals are needed");
    let facts = script.engine.rescaling().expect("it runs");
    assert_eq!((facts.waits, facts.moved, facts.to_move), (vec![last], 0, 1));
    script.hold = vec!["Migrate"];
    script.hear(Event::Committed { query: QUERY.into(), epoch: 0 });
    let facts = script.engine.rescaling().expect("it runs");
    assert_eq!((facts.waits, facts.to_move), (vec![Wait::Moves { query: QUERY.into() }], 1));
    script.let_go();
    assert!(script.done.contains(&Effect::Rescaled { handle: 1, outcome: Ok(3), moved: 1 }), "{:?}", script.done);
    assert_eq!(script.engine.rescaling(), None);
    assert_eq!(BTreeSet::from_iter(script.owners()), BTreeSet::from([0, 1, 2]));
    // And back, told of during a batch.
    script.hold = vec!["Sink"];
    script.batch(1);
    script.hear(Event::Rescale { handle: 2, workers: 1, free: 0 });
    let waits = |script: &Script| script.engine.rescaling().expect("it runs").waits;
    assert_eq!(waits(&script), [Wait::Epoch { query: QUERY.into(), epoch: 1 }]);
    script.hold.clear();
    script.sunk();
    assert!(script.done.ends_with(&[Effect::WatchCommit { query: QUERY.into(), epoch: 1 }]), "{:?}", script.done);
    script.done.clear();
    // Whoever only has to go gives bins away at once, and goes in the generation after.
    script.hear(Event::Committed { query: QUERY.into(), epoch: 1 });
    assert!(script.done.contains(&Effect::Rescaled { handle: 2, outcome: Ok(1), moved: 2 }), "{:?}", script.done);
    assert_eq!(script.owners(), [0; 4]);
    assert!(completes(&script.batch(2), 2));
}

#[test]
fn a_query_whose_batch_failed_holds_no_rescale_up() {
    let restart = || vec![Wait::Restart { query: QUERY.into() }];
    let rescaled = |handle, workers| Effect::Rescaled { handle, outcome: Ok(workers), moved: 0 };
    let up = |slot: u32| {
        let (member, executor) = (MemberId(u64::from(slot) + 1), format!("executor {slot}"));
        Event::MemberUp { slot, member, executor, executors: slot + 1 }
    };
    for durable in [false, true] {
        // Its first batch fails, or the sink of a later one: Spark has ended the query.
        for first in [true, false] {
            let mut script = if durable { Script::durable(2) } else { Script::new(2) };
            if !first {
                script.batch(0);
            }
            let epoch = u64::from(!first);
            script.hold = vec!["Sink"];
            script.batch(epoch);
            let failed = script.sinks.last().map(|effect| match effect {
                Effect::Sink { ticket, .. } => *ticket,
                effect => panic!("{effect:?}"),
            });
            let reason = || Failure { kind: Kind::User, message: "a typo".into() };
            script.hear(Event::Sunk { ticket: failed.expect("it was called"), outcome: Err(reason()) });
            assert_eq!(script.errors(), [EngineError::Sink { epoch, reason: "a typo".into(), returned: false }]);
            script.hold.clear();
            // Who comes is there for the next batch, should one come.
            script.done.clear();
            script.hear(Event::Rescale { handle: 1, workers: 3, free: 1 });
            script.hear(up(2));
            assert!(script.done.contains(&rescaled(1, 3)), "{:?}", script.done);
            // State that nothing but a member has is not given up; that of a checkpoint is read again.
            script.done.clear();
            script.hear(Event::Rescale { handle: 2, workers: 1, free: 0 });
            if durable {
                assert!(script.done.contains(&rescaled(2, 1)), "{:?}", script.done);
                assert_eq!(requests(&script.done), ["Drop"]);
                // The store of this script reads no files.
                let batch = script.batch(epoch);
                assert!(batch.iter().any(|effect| matches!(effect, Effect::ReadCheckpoint { .. })), "{batch:?}");
            } else {
                assert_eq!(script.engine.rescaling().expect("it runs").waits, restart());
                script.hear(Event::CancelRescale { handle: 2 });
                assert!(script.done.contains(&rescaled(2, 2)), "{:?}", script.done);
                assert!(completes(&script.batch(epoch), epoch));
            }
        }
    }
}

#[test]
fn a_query_that_was_stopped_before_the_commit_holds_no_rescale_up() {
    let mut script = Script::durable(2);
    script.batch(0);
    script.done.clear();
    script.hear(Event::Rescale { handle: 1, workers: 1, free: 0 });
    assert_eq!(script.done, [Effect::WatchCommit { query: QUERY.into(), epoch: 0 }]);
    let rests = |epoch| Event::Rests { query: QUERY.into(), epoch };
    script.hear(rests(7));
    assert!(script.engine.rescaling().is_some(), "another batch is meant");
    script.hear(rests(0));
    assert!(script.done.contains(&Effect::Rescaled { handle: 1, outcome: Ok(1), moved: 0 }), "{:?}", script.done);
    // It comes again, and is no news by then.
    assert!(completes(&script.batch(0), 0));
    script.hear(rests(0));
    assert!(completes(&script.batch(1), 1));
}

#[test]
fn a_query_that_gave_way_is_not_finished_without_its_last_batch() {
    let mut script = Script::durable(2);
    script.batch(0);
    script.hear(Event::Rescale { handle: 1, workers: 1, free: 0 });
    script.hear(Event::Rests { query: QUERY.into(), epoch: 0 });
    assert!(script.engine.rescaling().is_none());
    script.finish(None);
    script.done.clear();
    let done = script.finish(None);
    let uncommitted = EngineError::Uncommitted { epoch: 0 };
    assert!(
        done.iter().any(|effect| matches!(effect, Effect::Fail { error, .. } if *error == uncommitted)),
        "{done:?}"
    );
    assert!(completes(&script.batch(0), 0));
    let done = script.finish(Some(0));
    assert!(completes(&done, 1), "{done:?}");
}

/// The feed of the last batch that was asked for.
fn feed_of(done: &[Effect]) -> u64 {
    let feed = |effect: &Effect| match effect {
        Effect::Feed { ticket, .. } => Some(*ticket),
        _ => None,
    };
    done.iter().rev().find_map(feed).expect("rows are asked for")
}

/// A batch that fails where the last one is committed: what was before it moves, and whoever leaves does.
#[test]
fn a_batch_that_fails_while_workers_leave_lets_them_go() {
    for (durable, leaves) in [(false, false), (true, false), (false, true), (true, true)] {
        let mut script = if durable { Script::durable(2) } else { Script::new(2) };
        assert!(completes(&script.batch(0), 0));
        script.hold = vec!["Feed"];
        let ticket = feed_of(&script.batch(1));
        script.hear(match leaves {
            true => Event::Leaving { member: MemberId(2) },
            false => Event::Rescale { handle: 1, workers: 1, free: 0 },
        });
        script.hold.clear();
        script.done.clear();
        script.hear(Event::Fed { ticket, outcome: Err(Failure::new(Kind::Data, "no column v")) });
        let (told, done) = (requests(&script.done), format!("{:?}", script.done));
        assert!(done.contains("no column v"), "{done}");
        assert!(told.iter().filter(|name| *name == "Start").count() > 0, "a generation without it: {told:?}");
        if !leaves {
            assert!(script.engine.rescaling().is_none(), "{durable}: {told:?}");
        }
        let goes = |effect: &Effect| matches!(effect, Effect::RetireResident { slot: 1 });
        assert!(script.done.iter().any(goes), "{done}");
        assert!(completes(&script.batch(1), 1));
    }
}

/// Those who cannot be grouped anew have all that they have in a checkpoint, or nothing at all.
#[test]
fn workers_that_cannot_be_grouped_anew_go_where_nothing_is_lost_with_them() {
    let failed = |kind, message: &str| Err(Failure::new(kind, message));
    // The functions of the query are wrong.
    let mut script = Script::durable(2);
    assert!(completes(&script.batch(0), 0));
    script.program.functions = 7;
    script.open();
    script.hold = vec!["Start"];
    script.batch(1);
    let (ticket, ..) = script.held.remove(0);
    script.hear(Event::Answer { ticket, answer: failed(Kind::User, "a typo") });
    assert!(script.errors().iter().any(|error| error.to_string().contains("a typo")));
    script.held.clear();
    script.hear(Event::Rescale { handle: 1, workers: 1, free: 0 });
    let (ticket, ..) = script.held.remove(0);
    script.done.clear();
    script.hear(Event::Answer { ticket, answer: failed(Kind::User, "a typo") });
    assert!(script.engine.rescaling().is_none(), "{:?}", script.done);
    script.hold.clear();
    assert!(completes(&script.batch(1), 1), "the checkpoint has all");
    // Nothing came of the first batch.
    let mut script = Script::new(2);
    script.hold = vec!["Feed"];
    let ticket = feed_of(&script.batch(0));
    script.hear(Event::Fed { ticket, outcome: Err(Failure::new(Kind::Data, "no column v")) });
    script.hold.clear();
    script.hear(Event::Rescale { handle: 1, workers: 1, free: 0 });
    assert!(script.engine.rescaling().is_none(), "{:?}", script.done);
    assert!(completes(&script.batch(0), 0));
}

#[test]
fn a_query_is_not_finished_without_a_batch_whose_results_were_given_up() {
    let uncommitted = EngineError::Uncommitted { epoch: 1 };
    // Its sink failed, part of the results went with a member, and its next attempt ended early.
    let mut script = Script::durable(2);
    assert!(completes(&script.batch(0), 0));
    script.hold = vec!["Sink"];
    script.batch(1);
    let Some(Effect::Sink { ticket, .. }) = script.sinks.last().cloned() else { panic!("it was called") };
    script.hear(Event::Sunk { ticket, outcome: Err(Failure::new(Kind::User, "a typo")) });
    script.hear(Event::MemberLost { member: MemberId(2), reason: "killed".into() });
    script.hold = vec!["Stop"];
    script.batch(1);
    script.hear(Event::Stop { query: QUERY.into() });
    (script.hold, script.held) = (Vec::new(), Vec::new());
    let done = script.finish(Some(0));
    assert!(
        done.iter().any(|effect| matches!(effect, Effect::Fail { error, .. } if *error == uncommitted)),
        "{done:?}"
    );
    assert!(completes(&script.batch(1), 1));
    assert!(completes(&script.finish(Some(1)), 2));
    // What was made of it was given up, and its next attempt ended early.
    let mut script = Script::durable(2);
    assert!(completes(&script.batch(0), 0));
    assert!(completes(&script.batch(1), 1));
    script.hear(Event::Rescale { handle: 1, workers: 1, free: 0 });
    script.hear(Event::Rests { query: QUERY.into(), epoch: 1 });
    assert!(script.engine.rescaling().is_none());
    script.hold = vec!["Load", "Start"];
    script.batch(1);
    script.hear(Event::Stop { query: QUERY.into() });
    (script.hold, script.held) = (Vec::new(), Vec::new());
    let done = script.finish(Some(0));
    assert!(
        done.iter().any(|effect| matches!(effect, Effect::Fail { error, .. } if *error == uncommitted)),
        "{done:?}"
    );
}

/// The driver died in the sink of batch 1: Spark asks for it again, whoever knows of it.
#[test]
fn a_query_is_not_finished_without_a_batch_that_another_engine_has_shown() {
    let uncommitted = EngineError::Uncommitted { epoch: 1 };
    let refused = |done: &[Effect]| {
        assert!(done.iter().any(|one| matches!(one, Effect::Fail { error, .. } if *error == uncommitted)), "{done:?}");
    };
    let mut script = Script::durable(1);
    assert!(completes(&script.batch(0), 0));
    script.hold = vec!["Sink"];
    script.batch(1);
    let store = script.store.take();
    let begun = |store: &Option<Contents>| {
        let mut script = Script::durable(1);
        script.store.clone_from(store);
        script
    };
    let mut script = begun(&store);
    refused(&script.finish(Some(0)));
    assert!(completes(&script.batch(1), 1));
    assert!(completes(&script.finish(Some(1)), 2));
    // Its replay ends early.
    let mut script = begun(&store);
    script.hold = vec!["Feed"];
    script.batch(1);
    script.hear(Event::Stop { query: QUERY.into() });
    script.hold.clear();
    refused(&script.finish(Some(0)));
    assert!(completes(&script.batch(1), 1));
    assert!(completes(&script.finish(Some(1)), 2));
}

/// Two programs on one checkpoint: nobody will ask this one for that batch again.
#[test]
fn a_query_is_finished_behind_a_batch_that_failed_here_and_was_done_elsewhere() {
    let mut script = Script::durable(1);
    assert!(completes(&script.batch(0), 0));
    script.hold = vec!["Sink"];
    script.batch(1);
    let Some(Effect::Sink { ticket, .. }) = script.sinks.last().cloned() else { panic!("it was called") };
    script.hear(Event::Sunk { ticket, outcome: Err(Failure::new(Kind::User, "a typo")) });
    script.hold.clear();
    let mut other = Script::durable(1);
    other.store.clone_from(&script.store);
    assert!(completes(&other.batch(1), 1));
    script.store = other.store;
    let done = script.finish(Some(1));
    assert!(completes(&done, 2), "{done:?}");
    let asked = requests(&done);
    assert!(asked.contains(&"Load".to_owned()) && asked.contains(&"Release".to_owned()), "{asked:?}");
}

/// Whoever is displaced may come further until it notices.
#[test]
fn a_checkpoint_that_is_taken_over_is_read_again_once_it_is() {
    for last in [0, 1] {
        let mut displaced = Script::durable(1);
        assert!(completes(&displaced.batch(0), 0));
        let mut script = Script::with(Setup { workers: 1, bits: 2, takeover: true, nonce: 9, ..Setup::default() });
        (script.program.durable, script.hold) = (true, vec!["CreateClaim"]);
        script.open();
        script.store.clone_from(&displaced.store);
        script.store.as_mut().expect("just set").held = true;
        let done = script.batch(1);
        let claim = done.last().cloned().expect("it is claimed");
        assert!(matches!(claim, Effect::CreateClaim { .. }), "{done:?}");
        for epoch in 1..=last {
            assert!(completes(&displaced.batch(epoch), epoch));
        }
        assert!(completes(&displaced.finish(Some(last)), last + 1));
        script.store = displaced.store;
        script.hold.clear();
        script.keep(claim);
        assert_eq!(script.errors(), [EngineError::Finished { after: last, asked: 1 }]);
        assert!(script.sinks.is_empty(), "its rows, and the end, have come out");
    }
    // Where it came no further, what was read serves, and the claim is that which was made.
    let mut displaced = Script::durable(1);
    assert!(completes(&displaced.batch(0), 0));
    let mut script = Script::with(Setup { workers: 1, bits: 2, takeover: true, nonce: 9, ..Setup::default() });
    script.program.durable = true;
    script.open();
    script.store = displaced.store;
    script.store.as_mut().expect("just set").held = true;
    let done = script.batch(1);
    assert!(completes(&done, 1), "{done:?}");
    let claims = done.iter().filter(|effect| matches!(effect, Effect::CreateClaim { .. }));
    assert_eq!(claims.count(), 1);
}

#[test]
fn an_end_that_comes_too_early_breaks_nothing() {
    let mut script = Script::durable(2);
    assert!(completes(&script.batch(0), 0));
    let done = script.finish(None);
    assert!(done.iter().any(|effect| matches!(effect, Effect::Fail { .. })), "{done:?}");
    let done = script.batch(1);
    let begun = ["Stop", "Start"].map(String::from);
    assert!(completes(&done, 1) && !requests(&done).iter().any(|one| begun.contains(one)), "{done:?}");
}

/// Nobody asks for another batch of it.
#[test]
fn workers_that_leave_a_query_at_rest_go_also_where_it_cannot_be_grouped_anew() {
    let mut script = Script::durable(2);
    assert!(completes(&script.batch(0), 0));
    script.hold = vec!["Start"];
    script.hear(Event::Leaving { member: MemberId(2) });
    script.hear(Event::MemberUp { slot: 2, member: MemberId(3), executor: "another".into(), executors: 3 });
    script.hear(Event::Committed { query: QUERY.into(), epoch: 0 });
    script.done.clear();
    let at = script.held.iter().position(|(_, member, _)| *member == MemberId(3)).expect("it is to take part");
    script.fail(at, Kind::User, "no module of that name");
    let goes = |effect: &Effect| matches!(effect, Effect::RetireResident { slot: 1 });
    assert!(script.done.iter().any(goes), "{:?}", script.done);
    (script.hold, script.held) = (Vec::new(), Vec::new());
    assert!(completes(&script.batch(1), 1));
}

/// What is broken and has lost a worker for good hears of its commit, too.
#[test]
fn workers_that_leave_a_broken_query_at_rest_go_when_its_batch_is_committed() {
    let mut script = Script::durable(3);
    assert!(completes(&script.batch(0), 0));
    script.hear(Event::MemberLost { member: MemberId(3), reason: "its node is gone".into() });
    script.done.clear();
    script.hear(Event::Leaving { member: MemberId(2) });
    assert!(script.done.contains(&Effect::WatchCommit { query: QUERY.into(), epoch: 0 }), "{:?}", script.done);
    script.hear(Event::Committed { query: QUERY.into(), epoch: 0 });
    let goes = |effect: &Effect| matches!(effect, Effect::RetireResident { slot: 1 });
    assert!(script.done.iter().any(goes), "{:?}", script.done);
    assert!(completes(&script.batch(1), 1));
}

#[test]
fn a_batch_behind_the_end_does_not_wait_for_its_commit() {
    let mut script = Script::durable(1);
    assert!(completes(&script.batch(0), 0));
    assert!(completes(&script.finish(Some(0)), 1));
    // As a new engine finds it.
    let store = script.store.take();
    let mut script = Script::durable(1);
    script.store = store;
    let done = script.batch(1);
    let finished = EngineError::Finished { after: 0, asked: 1 };
    assert!(done.iter().any(|effect| matches!(effect, Effect::Fail { error, .. } if *error == finished)), "{done:?}");
    assert!(completes(&script.finish(Some(0)), 1));
}

/// That the end is refused says nothing of a batch that Spark is about to commit.
#[test]
fn an_end_that_is_refused_gives_nothing_up() {
    let mut script = Script::durable(2);
    assert!(completes(&script.batch(0), 0));
    script.hear(Event::Rescale { handle: 1, workers: 1, free: 0 });
    let done = script.finish(None);
    assert!(done.iter().any(|effect| matches!(effect, Effect::Fail { .. })), "{done:?}");
    assert_eq!(requests(&done), [""; 0], "state stays where it is");
    assert!(script.engine.rescaling().is_some());
    script.hear(Event::Committed { query: QUERY.into(), epoch: 0 });
    assert!(script.engine.rescaling().is_none());
    assert!(completes(&script.batch(1), 1));
}

/// As in a cluster that shrinks: the slot of the one that goes is not filled again.
#[test]
fn whoever_is_left_goes_on_with_a_query_that_gave_way() {
    let mut script = Script::durable(2);
    assert!(completes(&script.batch(0), 0));
    script.hear(Event::Leaving { member: MemberId(2) });
    script.hear(Event::Rests { query: QUERY.into(), epoch: 0 });
    script.hear(Event::MemberLost { member: MemberId(2), reason: "its node is gone".into() });
    assert!(completes(&script.batch(0), 0), "{:?}", script.done);
}

/// What the first try has left undone, such as a deletion, may be done later.
#[test]
fn a_manifest_is_written_again_by_another_name() {
    let written = |script: &Script| {
        let name = |effect: &Effect| match effect {
            Effect::WriteManifest { ticket, manifest, .. } => Some((*ticket, manifest.clone())),
            _ => None,
        };
        script.done.iter().rev().find_map(name).expect("it is written")
    };
    let mut script = Script::durable(1);
    script.hold = vec!["WriteManifest"];
    script.hear(Event::Batch { query: QUERY.into(), epoch: 0, clock_ms: 0, planned_ms: None, committed: None });
    let (ticket, first) = written(&script);
    script.hear(Event::Stored { ticket, outcome: Err(StoreError::Unavailable("it is away".into())) });
    script.ring_after(100);
    let (ticket, second) = written(&script);
    assert_ne!(first.name(), second.name());
    assert_eq!(*first, Manifest { nonce: first.nonce, ..(*second).clone() });
    script.hold.clear();
    script.keep(Effect::WriteManifest { ticket, query: QUERY.into(), manifest: second });
    assert!(completes(&script.done, 0));
}

#[test]
fn what_came_of_the_end_of_the_input_is_not_given_up() {
    let mut script = Script::durable(2);
    script.batch(0);
    // Its manifest may be there.
    script.hold = vec!["WriteManifest"];
    script.finish(Some(0));
    script.hear(Event::Stop { query: QUERY.into() });
    script.hold.clear();
    script.done.clear();
    script.hear(Event::Rescale { handle: 1, workers: 1, free: 0 });
    assert_eq!(requests(&script.done), [""; 0]);
    assert_eq!(script.engine.rescaling().expect("it runs").waits, [Wait::Finish { query: QUERY.into() }]);
    assert!(completes(&script.finish(Some(0)), 1));
    assert!(script.engine.rescaling().is_none());
}

#[test]
fn a_worker_that_dies_while_a_query_rests_costs_the_others_nothing() {
    let mut script = Script::durable(2);
    script.batch(0);
    script.hold = vec!["Sink"];
    script.batch(1);
    script.hear(Event::Stop { query: QUERY.into() });
    script.hold.clear();
    script.done.clear();
    script.hear(Event::MemberLost { member: MemberId(2), reason: "killed".into() });
    script.hear(Event::MemberUp { slot: 1, member: MemberId(3), executor: "executor 1".into(), executors: 2 });
    assert_eq!(requests(&script.done), [""; 0]);
}

#[test]
fn workers_that_cannot_begin_are_not_asked_to_for_ever() {
    for durable in [false, true] {
        let mut script = if durable { Script::durable(2) } else { Script::new(2) };
        script.batch(0);
        script.program.functions = 2;
        script.open();
        script.hold = vec!["Start"];
        script.batch(1);
        for _ in 0..9 {
            if script.held.is_empty() {
                break;
            }
            script.fail(0, Kind::User, "a typo");
        }
        assert_eq!(script.held, [], "nobody asks again");
        assert_eq!(script.errors().len(), 1);
        // Nor when somebody comes, more than once.
        script.hear(Event::Rescale { handle: 1, workers: 3, free: 1 });
        script.hear(Event::MemberUp { slot: 2, member: MemberId(3), executor: "executor 2".into(), executors: 3 });
        for _ in 0..9 {
            if script.held.is_empty() {
                break;
            }
            script.fail(0, Kind::User, "a typo");
        }
        assert_eq!(script.held, []);
        assert!(script.engine.rescaling().is_none(), "it is no obstacle");
    }
}

#[test]
fn a_rescale_that_is_cancelled_waits_for_nobody_who_is_missing() {
    let mut script = Script::new(2);
    script.batch(0);
    script.hear(Event::Rescale { handle: 1, workers: 4, free: 2 });
    // Its executor goes for good, and those that were asked for never come.
    script.hear(Event::MemberLost { member: MemberId(1), reason: "its executor was taken away".into() });
    script.done.clear();
    script.hear(Event::CancelRescale { handle: 1 });
    let retire = |slot| Effect::RetireResident { slot };
    assert_eq!(script.done, [retire(2), retire(3), Effect::Rescaled { handle: 1, outcome: Ok(2), moved: 0 }]);
    // To do with those that there are is no rescale that waits.
    script.done.clear();
    script.hear(Event::Rescale { handle: 2, workers: 1, free: 0 });
    assert!(script.done.contains(&retire(0)), "the one that nobody serves: {:?}", script.done);
}

/// Between two batches there may be no further one: whatever comes while workers begin is looked at when they have begun.
#[test]
fn who_comes_or_is_to_go_while_workers_begin_waits_for_no_batch() {
    let up = |slot: u32| {
        let (member, executor) = (MemberId(u64::from(slot) + 1), format!("executor {slot}"));
        Event::MemberUp { slot, member, executor, executors: 9 }
    };
    let begins = |mut script: Script, workers: u32| {
        script.batch(0);
        script.hear(Event::Committed { query: QUERY.into(), epoch: 0 });
        script.hear(Event::Rescale { handle: 1, workers, free: 9 });
        script.hold = vec!["Start"];
        script.hear(up(script.engine.facts(QUERY).unwrap().workers));
        script
    };
    let goes_on = |mut script: Script| {
        script.hold.clear();
        while !script.held.is_empty() {
            script.let_go();
        }
        assert_eq!(script.engine.rescaling(), None, "{:?}", script.done);
        script
    };
    // One who comes; no bins move for it.
    let mut stateless = Script::new(1);
    stateless.program.plan.operators.clear();
    stateless.open();
    let mut script = begins(stateless, 3);
    script.hear(up(2));
    assert_eq!(goes_on(script).engine.facts(QUERY).unwrap().workers, 3);
    // One who is to go again.
    for script in [Script::new(2), Script::durable(2)] {
        let mut script = begins(script, 3);
        script.hear(Event::CancelRescale { handle: 1 });
        assert!(!script.done.contains(&Effect::RetireResident { slot: 2 }));
        let mut script = goes_on(script);
        assert!(script.done.contains(&Effect::RetireResident { slot: 2 }), "{:?}", script.done);
        assert!(completes(&script.batch(1), 1));
    }
}

/// A sink may wait for what it asks for, and what it is called with is of a generation that is over.
#[test]
fn nothing_waits_for_the_generation_behind_a_sink() {
    let mut script = Script::new(2);
    script.batch(0);
    script.hold = vec!["Sink"];
    script.batch(1);
    script.hear(Event::MemberLost { member: MemberId(2), reason: "killed".into() });
    script.done.clear();
    script.migrate(1, Wish::Moves(vec![(Range::new(0, 2).unwrap(), 0)]), 1);
    let told = "the query goes back to its last completed epoch at the next batch: its bins cannot move now";
    assert_eq!(script.moved(), [(1, Err(told.to_owned()))].into());
    script.hold.clear();
    script.sunk();
    assert!(completes(&script.done, 1));
}

#[test]
fn what_ends_a_migration_is_told() {
    let wish = || Wish::Moves(vec![(Range::new(0, 2).unwrap(), 1)]);
    // The end of the query.
    let mut script = Script::new(2);
    script.batch(0);
    script.batch(1);
    script.prepare(&[(1, QUERY, wish())], 1, Some(100));
    script.hear(Event::Finish { query: QUERY.into(), clock_ms: 0, committed: Some(1) });
    assert_eq!(script.moved()[&1], Err("the migration was cut off: the query is finished".to_owned()));
    // Who joins, when the next batch comes.
    let mut script = Script::new(2);
    script.batch(0);
    script.hold = vec!["Migrate"];
    script.migrate(2, wish(), 1);
    script.hear(Event::Rescale { handle: 9, workers: 3, free: 5 });
    script.hear(Event::MemberUp { slot: 2, member: MemberId(3), executor: "executor 2".into(), executors: 3 });
    script.hear(Event::Batch { query: QUERY.into(), epoch: 1, clock_ms: 0, planned_ms: None, committed: Some(0) });
    assert_eq!(script.moved()[&2], Err("the migration was cut off: its workers change".to_owned()));
}

/// However often a query whose state is lost is started again.
#[test]
fn the_reason_of_a_loss_stays_as_it_is() {
    let mut script = Script::new(2);
    script.batch(0);
    script.batch(1);
    script.hear(Event::MemberLost { member: MemberId(2), reason: "killed".into() });
    script.hold = vec!["Stop"];
    let mut told = BTreeSet::new();
    for _ in 0..3 {
        script.hear(Event::Batch { query: QUERY.into(), epoch: 2, clock_ms: 0, planned_ms: None, committed: Some(1) });
        while let Some((ticket, ..)) = script.held.pop() {
            script.hear(Event::Answer { ticket, answer: Ok(Answer::Inventory(Ranges::new())) });
        }
        script.hear(Event::MemberUp { slot: 1, member: MemberId(3), executor: "executor 1".into(), executors: 2 });
        told.extend(script.errors().iter().map(ToString::to_string));
    }
    assert_eq!(told.len(), 1, "{told:#?}");
}

#[test]
fn a_rescale_that_is_cancelled_goes_back_as_far_as_the_slots_that_are_held() {
    // While nobody has come: nothing but the slots.
    let mut script = Script::new(2);
    script.batch(0);
    script.hear(Event::Rescale { handle: 1, workers: 4, free: 2 });
    script.done.clear();
    script.hear(Event::CancelRescale { handle: 7 });
    assert_eq!(script.done, [], "another one is meant");
    script.hear(Event::CancelRescale { handle: 1 });
    let back = |handle, workers, moved| Effect::Rescaled { handle, outcome: Ok(workers), moved };
    let retire = |slot| Effect::RetireResident { slot };
    assert_eq!(script.done, [retire(2), retire(3), back(1, 2, 0)]);
    // While bins move to who has come: they come back, and it goes.
    script.hear(Event::Rescale { handle: 2, workers: 3, free: 2 });
    script.hear(Event::MemberUp { slot: 2, member: MemberId(3), executor: "executor 2".into(), executors: 3 });
    script.hold = vec!["Migrate"];
    script.hear(Event::Committed { query: QUERY.into(), epoch: 0 });
    assert_eq!(script.held.len(), 1);
    script.done.clear();
    script.hear(Event::CancelRescale { handle: 2 });
    assert_eq!(requests(&script.done), ["CancelMigration"]);
    assert!(script.engine.rescaling().is_some_and(|facts| facts.cancelled && facts.workers == 2 && facts.leaving == 1));
    script.hold.clear();
    script.let_go();
    assert!(script.done.contains(&back(2, 2, 2)) && script.done.contains(&retire(2)), "{:?}", script.done);
    assert_eq!(BTreeSet::from_iter(script.owners()), BTreeSet::from([0, 1]));
    assert!(completes(&script.batch(1), 1));
    // While those that are to go are there, they stay, and get back what they gave.
    script.hold = vec!["Migrate"];
    script.hear(Event::Rescale { handle: 3, workers: 1, free: 0 });
    script.hear(Event::Committed { query: QUERY.into(), epoch: 1 });
    script.hear(Event::CancelRescale { handle: 3 });
    script.hold.clear();
    script.done.clear();
    script.let_go();
    assert_eq!(script.done.last(), Some(&back(3, 2, 4)), "{:?}", script.done);
    assert_eq!(script.owners().iter().filter(|owner| **owner == 0).count(), 2);
    // Who has gone stays away.
    script.hear(Event::Rescale { handle: 4, workers: 1, free: 0 });
    script.hold = vec!["Drop"];
    script.batch(2);
    script.batch(3);
    assert!(script.done.is_empty() && script.engine.rescaling().is_none());
    script.done.clear();
    script.hear(Event::CancelRescale { handle: 4 });
    assert_eq!(script.done, [], "it has ended");
}

#[test]
fn a_rescale_whose_slots_do_not_come_goes_back_and_says_so() {
    let mut script = Script::new(1);
    script.batch(0);
    script.done.clear();
    script.hear(Event::Rescale { handle: 1, workers: 3, free: 9 });
    let timer = |effect: &Effect| match effect {
        Effect::Timer { ticket, after_ms: 300_000 } => Some(*ticket),
        _ => None,
    };
    let ticket = script.done.iter().find_map(timer).expect("a timer");
    script.hear(Event::MemberUp { slot: 1, member: MemberId(2), executor: "executor 1".into(), executors: 2 });
    script.done.clear();
    script.hear(Event::Timer { ticket });
    assert_eq!(script.done[..2], [1, 2].map(|slot| Effect::RetireResident { slot }), "both, also who has come");
    let late = EngineError::SlotsLate { missing: 1, wanted: 3, waited_ms: 300_000 };
    assert_eq!(late.to_string(), "rescale(3): 1 of 3 workers have not come in 300 s");
    assert_eq!(script.done[2], Effect::Rescaled { handle: 1, outcome: Err(late), moved: 0 });
    assert!(script.engine.rescaling().is_none() && completes(&script.batch(1), 1));
    // One that has its members is not late, however long its bins take; nor one that gives slots up.
    script.done.clear();
    script.hear(Event::Rescale { handle: 2, workers: 2, free: 1 });
    let ticket = script.done.iter().find_map(timer).expect("a timer");
    script.hear(Event::MemberUp { slot: 1, member: MemberId(3), executor: "executor 1".into(), executors: 2 });
    script.done.clear();
    script.hear(Event::Timer { ticket });
    assert!(script.done.is_empty() && script.engine.rescaling().is_some_and(|facts| !facts.cancelled));
    script.hear(Event::Committed { query: QUERY.into(), epoch: 1 });
    assert!(script.done.contains(&Effect::Rescaled { handle: 2, outcome: Ok(2), moved: 2 }), "{:?}", script.done);
    script.done.clear();
    script.hear(Event::Rescale { handle: 3, workers: 1, free: 0 });
    assert_eq!(script.done.iter().find_map(timer), None);
}

#[test]
fn members_that_are_not_needed_are_told_why() {
    let mut script = Script::new(2);
    script.done.clear();
    let up = |slot, member| Event::MemberUp { slot, member: MemberId(member), executor: "x".into(), executors: 3 };
    script.hear(up(0, 7));
    script.hear(Event::MemberLost { member: MemberId(1), reason: "killed".into() });
    script.hear(Event::MemberUp { slot: 0, member: MemberId(8), executor: "executor 1".into(), executors: 3 });
    let why = |member, why| Effect::Dismiss { member: MemberId(member), why };
    let start = Effect::StartResident { slot: 0 };
    assert_eq!(script.done, [why(7, Dismissal::Spare), start.clone(), why(8, Dismissal::Crowded), start]);
}

/// Whether the engine of such a claim lives cannot be asked, and what else it has written may be of that form, too.
#[test]
fn a_checkpoint_that_a_newer_release_has_claimed_is_refused_also_to_who_would_take_it_over() {
    for takeover in [false, true] {
        let mut script = Script::new(1);
        let setup = Setup { workers: 1, bits: 2, takeover, ..Setup::default() };
        script.engine = Engine::new(setup);
        script.program.durable = true;
        script.open();
        let read = |effect: &Effect| match effect {
            Effect::ReadCheckpoint { ticket, .. } => Some(*ticket),
            _ => None,
        };
        let ticket = script.batch(0).iter().find_map(read).expect("the checkpoint is read");
        let claim = Claim { number: 1, nonce: 7, registry: "h:1".into(), from: None };
        let mut newer = encode(&Claim { number: 2, ..claim.clone() });
        newer[8] = 9;
        let mut contents = Contents::default();
        contents.add(&Claim::name(1), 0, &encode(&claim));
        contents.add(&Claim::name(2), 0, &newer);
        script.hear(Event::Stored { ticket, outcome: Ok(Stored::Contents(contents)) });
        let told = script.errors();
        assert_eq!(
            told.iter().map(ToString::to_string).collect::<Vec<_>>(),
            [
                "claim-00000000000000000002 has version 9; this release reads up to 1: use the release that wrote it, or a later one"
            ]
        );
        assert!(matches!(told[0], EngineError::Damaged { .. }));
    }
}

#[test]
fn a_flow_that_cannot_go_on_is_told_what_helps() {
    let mut script = Script::new(1);
    script.batch(0);
    script.program.plan.operators[0].kind = "min".into();
    script.open();
    script.done = script.batch(1);
    let told = script.errors().remove(0).to_string();
    assert!(
        told.starts_with("the state is of sums (sum of long, version 1), the flow has sums (min of long, version 1): ")
    );
    for remedy in ["Put the step or source back as it was", "has a name= of its own", "a new checkpoint"] {
        assert!(told.contains(remedy), "{told}");
    }
}

/// A clock that is set back, and one that is set ahead: timeouts never see time go back, and a batch that is computed again has its time.
#[test]
fn the_clock_of_a_batch_is_never_before_that_of_the_batch_before() {
    let mut script = Script::new(1);
    let mut clock = |epoch: u64, clock_ms: i64| {
        script.done.clear();
        script.hear(Event::Batch {
            query: QUERY.into(),
            epoch,
            clock_ms,
            planned_ms: None,
            committed: epoch.checked_sub(1),
        });
        script.done.iter().find_map(|effect| match effect {
            Effect::Call { request: Request::Release(release), .. } => Some(release.clock_ms),
            _ => None,
        })
    };
    let told: Vec<Option<i64>> = [(0, 5_000), (1, 4_000), (2, i64::MIN), (3, 5_001), (4, 9_000), (5, 6_000)]
        .into_iter()
        .map(|(epoch, clock_ms)| clock(epoch, clock_ms))
        .collect();
    assert_eq!(told, [5_000, 5_000, 5_000, 5_001, 9_000, 9_000].map(Some));
}

#[test]
fn every_call_ends_also_of_queries_that_never_began() {
    let mut script = Script::new(1);
    let query = || "other".to_owned();
    script.hear(Event::Batch { query: query(), epoch: 0, clock_ms: 0, planned_ms: None, committed: None });
    script.hear(Event::Finish { query: query(), clock_ms: 0, committed: None });
    assert_eq!(script.errors(), vec![EngineError::NotRunning("has not begun"); 2]);
    script.hear(Event::Drop { query: query() });
    assert_eq!(script.done, [Effect::Dropped { query: query(), outcome: Ok(()) }]);
    assert!(completes(&script.finish(None), 0), "nothing was fed");
}

#[test]
fn a_batch_that_is_planned_anew_is_not_answered_with_what_was_before() {
    let batch = |script: &mut Script, epoch: u64, planned_ms: i64| {
        script.done.clear();
        let (clock_ms, planned_ms, committed) = (planned_ms, Some(planned_ms), epoch.checked_sub(1));
        script.hear(Event::Batch { query: QUERY.into(), epoch, clock_ms, planned_ms, committed });
        std::mem::take(&mut script.done)
    };
    for durable in [false, true] {
        let mut script = if durable { Script::durable(2) } else { Script::new(2) };
        for epoch in 0..3 {
            assert!(completes(&batch(&mut script, epoch, 1_000 * epoch as i64), epoch));
        }
        let again = batch(&mut script, 2, 2_000);
        assert!(completes(&again, 2) && !requests(&again).contains(&"Release".to_owned()), "served again: {again:?}");
        let anew = batch(&mut script, 2, 2_500);
        match durable {
            true => {
                assert!(completes(&anew, 2) && requests(&anew).contains(&"Release".to_owned()), "done again: {anew:?}");
                assert!(completes(&batch(&mut script, 3, 3_000), 3));
            }
            false => {
                script.done = anew;
                let errors = script.errors();
                assert!(
                    matches!(&errors[..], [EngineError::Refused(why)] if why.contains("planned anew")),
                    "{errors:?}"
                );
            }
        }
    }
}

#[test]
fn members_free_what_they_kept_of_ranges_that_moved_though_no_batch_comes() {
    let settle = |one: &Effect| matches!(one, Effect::Call { request: Request::Settle { .. }, .. });
    let settles = |done: &[Effect]| done.iter().filter(|one| settle(one)).count();
    let watches = |done: &[Effect]| done.iter().filter(|one| matches!(one, Effect::WatchCommit { .. })).count();
    let mut script = Script::durable(2);
    assert!(completes(&script.batch(0), 0));
    script.done.clear();
    script.migrate(1, Wish::Moves((0..4).map(|bin| (Range::new(bin, 2).unwrap(), 1)).collect()), 4);
    let moved = std::mem::take(&mut script.done);
    assert_eq!((settles(&moved), watches(&moved)), (0, 1), "Spark may ask for batch 0 again: {moved:?}");
    script.hear(Event::Committed { query: QUERY.into(), epoch: 0 });
    assert_eq!(settles(&std::mem::take(&mut script.done)), 2, "each member is told");
    // What moves from now on is free as soon as it is there.
    script.migrate(2, Wish::Even, 4);
    script.hear(Event::Committed { query: QUERY.into(), epoch: 0 });
    let again = std::mem::take(&mut script.done);
    assert_eq!((settles(&again), watches(&again)), (0, 0));
    // What moves while a batch runs is seen to behind it.
    script.hold = vec!["Sink"];
    script.batch(1);
    script.migrate(3, Wish::Moves((0..4).map(|bin| (Range::new(bin, 2).unwrap(), 0)).collect()), 4);
    script.hold.clear();
    script.done.clear();
    script.sunk();
    assert_eq!(watches(&std::mem::take(&mut script.done)), 1);
    script.hear(Event::Committed { query: QUERY.into(), epoch: 1 });
    assert_eq!(settles(&script.done), 2);
}

#[test]
fn a_receipt_that_is_told_twice_is_one() {
    let receipt = |ticket: Ticket, attempt: u64, member: MemberId| Event::Receipt {
        ticket,
        receipt: Receipt { source: 0, partition: 0, attempt, member, rows: 1, max_event_time: None, hash: 7 },
    };
    for (second, refused) in [(1, false), (2, true)] {
        let mut script = Script::new(1);
        script.hold = vec!["Feed"];
        let done = script.batch(0);
        let feed = |one: &Effect| if let Effect::Feed { ticket, .. } = one { Some(*ticket) } else { None };
        let ticket = done.iter().find_map(feed).unwrap();
        script.hear(receipt(ticket, 1, MemberId(1)));
        script.hear(receipt(ticket, second, MemberId(1)));
        script.hear(Event::Fed { ticket, outcome: Ok(()) });
        assert_eq!(script.errors().iter().any(|error| error.to_string().contains("two attempts")), refused);
    }
}

#[test]
fn a_batch_whose_results_were_given_up_may_be_planned_anew() {
    for durable in [false, true] {
        let mut script = if durable { Script::durable(1) } else { Script::new(1) };
        script.hold = vec!["Feed", "Sink"];
        let batch = |script: &mut Script, member: MemberId, planned_ms: i64, hash: u64| {
            script.done.clear();
            let (epoch, committed, planned_ms) = (0, None, Some(planned_ms));
            script.hear(Event::Batch { query: QUERY.into(), epoch, clock_ms: 0, planned_ms, committed });
            let feed = |one: &Effect| if let Effect::Feed { ticket, .. } = one { Some(*ticket) } else { None };
            let ticket = script.done.iter().find_map(feed).expect("it is fed");
            let receipt = Receipt { source: 0, partition: 0, attempt: 1, member, rows: 1, max_event_time: None, hash };
            script.hear(Event::Receipt { ticket, receipt });
            script.hear(Event::Fed { ticket, outcome: Ok(()) });
        };
        batch(&mut script, MemberId(1), 1_000, 7);
        // What the sink was called with goes with its worker, and the user stops before it is made again.
        script.hear(Event::MemberLost { member: MemberId(1), reason: "killed".into() });
        let sink = script
            .sinks
            .iter()
            .rev()
            .find_map(|one| if let Effect::Sink { ticket, .. } = one { Some(*ticket) } else { None });
        let outcome = Err(Failure::new(Kind::Echo, "its worker is gone"));
        script.hear(Event::Sunk { ticket: sink.unwrap(), outcome });
        script.hear(Event::Stop { query: QUERY.into() });
        script.hear(Event::MemberUp { slot: 0, member: MemberId(2), executor: "e".into(), executors: 1 });
        script.sinks.clear();
        batch(&mut script, MemberId(2), 2_000, 8);
        let errors = script.errors();
        if durable {
            let [EngineError::NotReplayable { note: Some(note), .. }] = &errors[..] else { panic!("{errors:?}") };
            let shown = &mut script.store.as_mut().unwrap().shown;
            assert!(shown.iter().any(|(name, _)| name == note), "{note}");
            shown.clear();
            batch(&mut script, MemberId(2), 2_000, 8);
        }
        assert_eq!((script.errors(), script.sinks.len()), (Vec::new(), 1), "durable: {durable}");
    }
}

#[test]
fn results_of_the_end_that_are_gone_are_made_again_and_no_batch_comes_between() {
    for durable in [false, true] {
        let mut script = if durable { Script::durable(1) } else { Script::new(1) };
        assert!(completes(&script.batch(0), 0));
        assert!(completes(&script.finish(Some(0)), 1));
        assert!(completes(&script.finish(Some(0)), 1), "what is there is given again");
        script.hear(Event::MemberLost { member: MemberId(1), reason: "killed".into() });
        script.hear(Event::MemberUp { slot: 0, member: MemberId(2), executor: "e".into(), executors: 1 });
        if !durable {
            for _ in 0..2 {
                script.done = script.finish(Some(0));
                let errors = script.errors();
                assert!(matches!(&errors[..], [EngineError::StateLost { epoch: 1, .. }]), "{errors:?}");
            }
            continue;
        }
        // It is stopped before the end is durable once more: the query is finished all the same.
        script.hold = vec!["Write"];
        script.finish(Some(0));
        script.hear(Event::Stop { query: QUERY.into() });
        script.done = script.batch(1);
        let errors = script.errors();
        assert!(matches!(&errors[..], [EngineError::Finishing { after: 0, asked: 1 }]), "{errors:?}");
        script.hold.clear();
        script.held.clear();
        let again = script.finish(Some(0));
        assert!(completes(&again, 1) && script.sinks.len() > 2, "{again:?}");
        script.done = script.batch(1);
        assert!(matches!(&script.errors()[..], [EngineError::Finished { .. }]));
    }
}
