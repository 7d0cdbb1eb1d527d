//! The engine: which residents there are, and the queries that they serve.
//!
//! Owns the roster and the users' rescales; what happens to a query is its own (`query`). A step takes one event and returns the effects
//! of it; nothing else goes in or out.

use std::collections::BTreeMap;

use serde::Deserialize;

use penstock_balance::Strategy;

use crate::error::EngineError;
use crate::protocol::{Dismissal, Effect, Event, Facts, Handle, MemberId, Moving, QueryId, RescaleFacts, Ticket, Wait};
use crate::query::{Cut, Query, View};
use crate::range::Layout;
use crate::roster::Roster;

/// What an engine is made with.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Setup {
    /// Residents at the start.
    pub workers: u32,
    /// Worker threads of each.
    pub threads: u32,
    /// State begins cut into `2^bits` ranges.
    pub bits: u8,
    /// Manifests kept below the last committed batch; at least 1.
    pub keep: u32,
    /// Whether to take over a checkpoint whose engine answers.
    pub takeover: bool,
    /// Whether a sink may be called again after the loss of a member.
    pub retry_sink: bool,
    /// Tells engines apart; random.
    pub nonce: u64,
    /// Address of its registry.
    pub registry: String,
    /// Attempts at one call.
    pub tries: u32,
    /// Calls of a sink within one call.
    pub sink_tries: u32,
    /// Attempts at one thing with storage.
    pub store_tries: u32,
    /// Pause before the second of them; it doubles.
    pub backoff_ms: u64,
    /// How long to wait for a loss to be noticed after something failed for no reason of its own.
    pub loss_ms: u64,
    /// How much longer where somebody could not reach a member: what is connected and silent for so long is lost.
    pub silence_ms: u64,
    /// How long to wait for members.
    pub start_ms: u64,
    /// Files of a manifest above which they are merged, as soon as that pays.
    pub merge_files: usize,
    /// How ranges move when the engine gives members their shares.
    pub shares: Strategy,
    /// See [`Event::Migrate`], for these moves.
    pub max_pause_ms: Option<u32>,
}

impl Default for Setup {
    fn default() -> Setup {
        Setup {
            workers: 2,
            threads: 1,
            bits: 8,
            keep: 1,
            takeover: false,
            retry_sink: true,
            nonce: 0,
            registry: String::new(),
            tries: 8,
            sink_tries: 3,
            store_tries: 5,
            backoff_ms: 100,
            loss_ms: 3_000,
            silence_ms: 0,
            start_ms: 300_000,
            merge_files: 64,
            shares: Strategy::Matched { size: 1 },
            max_pause_ms: Some(50),
        }
    }
}

/// A user's rescale that is under way.
#[derive(Clone, Copy, Debug)]
struct Rescale {
    handle: Handle,
    /// How many there were to be before.
    from: u32,
    cancelled: bool,
    /// Rings when those that are missing have had their time.
    timer: Ticket,
    /// How many had not come by then, of how many.
    late: Option<(u32, u32)>,
}

/// See the module.
///
/// # Examples
/// ```
/// use penstock_engine::{Effect, Engine, Event, Setup};
/// let mut engine = Engine::new(Setup { workers: 1, ..Setup::default() });
/// assert_eq!(engine.begin(), [Effect::StartResident { slot: 0 }]);
/// assert_eq!(engine.step(Event::Timer { ticket: 99 }), [], "nobody waits for it");
/// ```
#[derive(Debug)]
pub struct Engine {
    setup: Setup,
    roster: Roster,
    queries: BTreeMap<QueryId, Query>,
    tickets: Ticket,
    rescale: Option<Rescale>,
    /// Queries that are being forgotten: who has still to say so.
    dropping: BTreeMap<QueryId, BTreeMap<Ticket, MemberId>>,
    /// No generation of a query that was forgotten is above it.
    floor: u64,
    closed: bool,
}

impl Engine {
    /// An engine that has not begun.
    #[must_use]
    pub fn new(setup: Setup) -> Engine {
        let roster = Roster::new(setup.workers);
        let (queries, dropping) = Default::default();
        Engine { setup, roster, queries, tickets: 0, rescale: None, dropping, floor: 0, closed: false }
    }

    /// What to do first.
    #[must_use]
    pub fn begin(&mut self) -> Vec<Effect> {
        (0..self.setup.workers).map(|slot| Effect::StartResident { slot }).collect()
    }

    /// Takes an event; returns what to do, in order.
    pub fn step(&mut self, event: Event) -> Vec<Effect> {
        let mut out = Vec::new();
        if self.closed {
            refuse(event, EngineError::Closed, &mut out);
            return out;
        }
        match event {
            Event::MemberUp { slot, member, executor, executors } => {
                match self.roster.up(slot, member, executor, executors) {
                    Ok(()) => self.each(&mut out, Query::member_up),
                    Err(why) => {
                        out.push(Effect::Dismiss { member, why });
                        if why == Dismissal::Crowded {
                            out.push(Effect::StartResident { slot });
                        }
                    }
                }
            }
            Event::MemberLost { member, reason } => {
                self.forgotten(|_, holder| holder == member, &mut out);
                let slot = self.roster.lost(member);
                self.each(&mut out, |query, view| query.member_lost(member, &reason, view));
                out.extend(slot.map(|slot| Effect::StartResident { slot }));
            }
            Event::Leaving { member } => {
                // Its bins go to those who are there already: nobody knows how long its executor waits.
                let slot = self.roster.drain(member);
                out.extend(slot.map(|slot| Effect::StartResident { slot }));
                self.each(&mut out, Query::member_up);
            }
            Event::Open { query, program } => {
                let (floor, bits) = (self.floor, self.setup.bits);
                let made = || Query::new(query.clone(), program.clone(), floor, bits);
                self.queries.entry(query.clone()).or_insert_with(made).open(program);
            }
            Event::Drop { query } => self.drop_query(query, &mut out),
            Event::Rescale { handle, workers, free } => self.rescale(handle, workers, free, &mut out),
            Event::CancelRescale { handle } => self.cancel_rescale(handle, &mut out),
            Event::CancelMigration { handle } => {
                self.each(&mut out, |query, view| query.cancel_migration(handle, view));
            }
            Event::Close => {
                self.close(&mut out);
                return out;
            }
            Event::Answer { ticket, .. } if self.dropping.values().any(|open| open.contains_key(&ticket)) => {
                self.forgotten(|one, _| one == ticket, &mut out);
            }
            Event::Timer { ticket } if self.rescale.is_some_and(|one| one.timer == ticket) => {
                self.too_late(ticket, &mut out);
            }
            Event::Answer { ticket, .. }
            | Event::Receipt { ticket, .. }
            | Event::Fed { ticket, .. }
            | Event::Sunk { ticket, .. }
            | Event::Stored { ticket, .. }
            | Event::Timer { ticket } => {
                let asker = self.queries.iter().find(|(_, query)| query.waits_for(ticket));
                if let Some(id) = asker.map(|(id, _)| id.clone()) {
                    self.told(&id, event, &mut out);
                }
            }
            Event::GroupFailed { ref query, .. }
            | Event::Batch { ref query, .. }
            | Event::Committed { ref query, .. }
            | Event::Rests { ref query, .. }
            | Event::Finish { ref query, .. }
            | Event::Stop { ref query } => {
                let id = query.clone();
                self.told(&id, event, &mut out);
            }
            Event::Migrate { moves, strategy, max_pause_ms, drains, at_epoch } => {
                self.migrate(moves, Cut { strategy, max_pause_ms, drains, at_epoch }, &mut out);
            }
        }
        self.retire(&mut out);
        out
    }

    /// How a query stands; None for one that never asked.
    #[must_use]
    pub fn facts(&self, query: &str) -> Option<Facts> {
        self.queries.get(query).map(|query| query.facts(&self.roster))
    }

    /// Who owns the ranges of a query, by operator in the order of the flow; owners are worker indices.
    #[must_use]
    pub fn layouts(&self, query: &str) -> Vec<&Layout> {
        self.queries.get(query).map(Query::layouts).unwrap_or_default()
    }

    /// How the rescale under way stands, if there is one.
    #[must_use]
    pub fn rescaling(&self) -> Option<RescaleFacts> {
        let Rescale { handle, cancelled, .. } = self.rescale?;
        let (workers, serving) = (self.roster.wanted(), self.roster.serving().count() as u32);
        let missing = workers - serving;
        let mut waits = Vec::from_iter((missing > 0).then_some(Wait::Slots { missing }));
        waits.extend(self.queries.values().filter_map(|query| query.unsettled(&self.roster)));
        let (moved, to_move) = self
            .queries
            .values()
            .map(|query| query.shifts(&self.roster))
            .fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        let leaving = self.roster.leaving().count() as u32;
        Some(RescaleFacts { handle, workers, cancelled, serving, leaving, moved, to_move, waits })
    }

    fn drop_query(&mut self, id: QueryId, out: &mut Vec<Effect>) {
        let Some(query) = self.queries.get_mut(&id) else {
            return out.push(Effect::Dropped { query: id, outcome: Ok(()) });
        };
        let mut view = View { setup: &self.setup, roster: &self.roster, tickets: &mut self.tickets, out };
        match query.drop_all(&mut view) {
            Err(error) => out.push(Effect::Dropped { query: id, outcome: Err(error) }),
            Ok((open, generation)) => {
                self.floor = self.floor.max(generation);
                self.queries.remove(&id);
                self.dropping.entry(id).or_default().extend(open);
                self.forgotten(|_, _| false, out);
            }
        }
    }

    /// Somebody has forgotten a query, or is gone.
    fn forgotten(&mut self, done: impl Fn(Ticket, MemberId) -> bool, out: &mut Vec<Effect>) {
        for open in self.dropping.values_mut() {
            open.retain(|ticket, member| !done(*ticket, *member));
        }
        for (query, _) in self.dropping.extract_if(.., |_, open| open.is_empty()) {
            out.push(Effect::Dropped { query, outcome: Ok(()) });
        }
    }

    fn told(&mut self, id: &QueryId, event: Event, out: &mut Vec<Effect>) {
        match self.queries.get_mut(id) {
            Some(query) => {
                let mut view = View { setup: &self.setup, roster: &self.roster, tickets: &mut self.tickets, out };
                query.step(event, &mut view);
            }
            None => refuse(event, EngineError::NotRunning("has not begun"), out),
        }
    }

    fn each(&mut self, out: &mut Vec<Effect>, mut act: impl FnMut(&mut Query, &mut View<'_>)) {
        let mut view = View { setup: &self.setup, roster: &self.roster, tickets: &mut self.tickets, out };
        self.queries.values_mut().for_each(|query| act(query, &mut view));
    }

    /// Takes up the moves of all these queries, or of none.
    fn migrate(&mut self, moves: Vec<Moving>, cut: Cut, out: &mut Vec<Effect>) {
        let alone = moves.len() == 1;
        let wrong = |one: &Moving| match self.queries.get(&one.query) {
            Some(query) => query.refuses(&one.wish, cut, alone, &self.roster),
            None => Some(EngineError::NotRunning("has not begun")),
        };
        if let Some((at, error)) = moves.iter().enumerate().find_map(|(at, one)| Some((at, wrong(one)?))) {
            for (place, Moving { handle, .. }) in moves.iter().enumerate() {
                let other = || EngineError::Refused(format!("nothing moves: query {}: {error}", moves[at].query));
                let error = if place == at { error.clone() } else { other() };
                out.push(Effect::Moved { handle: *handle, outcome: Err(error) });
            }
            return;
        }
        for Moving { query, handle, wish } in moves {
            let Some(query) = self.queries.get_mut(&query) else { continue };
            let mut view = View { setup: &self.setup, roster: &self.roster, tickets: &mut self.tickets, out };
            query.migrate(handle, wish, cut, &mut view);
        }
    }

    /// New residents start beside those that serve; leavers stay until no query needs them.
    fn rescale(&mut self, handle: Handle, workers: u32, free: u32, out: &mut Vec<Effect>) {
        let held = self.roster.held();
        let refused = if workers == 0 {
            let reason = "rescale(0): an engine has at least one worker; close it to end it";
            Some(EngineError::Refused(reason.to_owned()))
        } else if workers > held + free {
            Some(EngineError::NoSlots { workers, held, free })
        } else if self.rescale.is_some() {
            Some(EngineError::Rescaling { workers, to: self.roster.wanted() })
        } else {
            None
        };
        if let Some(error) = refused {
            out.push(Effect::Rescaled { handle, outcome: Err(error), moved: 0 });
            return;
        }
        self.tickets += 1;
        let timer = self.tickets;
        self.rescale = Some(Rescale { handle, from: self.roster.wanted(), cancelled: false, timer, late: None });
        self.setup.workers = workers;
        let new = self.roster.want(workers);
        if !new.is_empty() {
            out.push(Effect::Timer { ticket: timer, after_ms: self.setup.start_ms });
        }
        out.extend(new.into_iter().map(|slot| Effect::StartResident { slot }));
        self.each(out, Query::resize);
    }

    /// Task slots that were to be had, and did not come.
    fn too_late(&mut self, ticket: Ticket, out: &mut Vec<Effect>) {
        let (wanted, missing) = (self.roster.wanted(), self.roster.wanted() - self.roster.serving().count() as u32);
        let waiting = |one: &&mut Rescale| one.timer == ticket && !one.cancelled && missing > 0;
        let Some(rescale) = self.rescale.as_mut().filter(waiting) else { return };
        rescale.late = Some((missing, wanted));
        let handle = rescale.handle;
        self.cancel_rescale(handle, out);
    }

    /// Goes back to the number before. Who has gone stays away, and who has not come is not waited for: a cancel asks for no task slot, so it
    /// always comes to an end.
    fn cancel_rescale(&mut self, handle: Handle, out: &mut Vec<Effect>) {
        let Some(rescale) = self.rescale.as_mut().filter(|one| one.handle == handle && !one.cancelled) else { return };
        rescale.cancelled = true;
        let workers = rescale.from.min(self.roster.held());
        self.setup.workers = workers;
        let new = self.roster.want(workers);
        assert!(new.is_empty(), "a rescale that is cancelled asks for slots {new:?}");
        self.each(out, Query::turn_back);
    }

    /// Lets leavers go that no query needs, and ends a rescale.
    fn retire(&mut self, out: &mut Vec<Effect>) {
        let needs = |member: MemberId| self.queries.values().any(|query| query.needs(member));
        let free: Vec<u32> =
            self.roster.leaving().filter(|(_, seat)| !seat.is_some_and(needs)).map(|(slot, _)| slot).collect();
        for slot in free {
            self.roster.retire(slot);
            out.push(Effect::RetireResident { slot });
        }
        let Some(Rescale { handle, late, cancelled, .. }) = self.rescale else { return };
        // What broke when a member went takes nobody in before that one is back, and is mended then.
        let rests = |query: &Query| query.has_settled(&self.roster) || (cancelled && query.is_broken());
        let settled = (cancelled || self.roster.complete())
            && self.roster.leaving().next().is_none()
            && self.queries.values().all(rests);
        if settled {
            self.rescale = None;
            let moved = self.queries.values().map(|query| query.shifts(&self.roster).0).sum();
            let waited_ms = self.setup.start_ms;
            let error = late.map(|(missing, wanted)| EngineError::SlotsLate { missing, wanted, waited_ms });
            out.push(Effect::Rescaled { handle, outcome: error.map_or(Ok(self.roster.wanted()), Err), moved });
        }
    }

    fn close(&mut self, out: &mut Vec<Effect>) {
        self.closed = true;
        self.each(out, Query::close);
        if let Some(Rescale { handle, .. }) = self.rescale.take() {
            out.push(Effect::Rescaled { handle, outcome: Err(EngineError::Closed), moved: 0 });
        }
        for query in std::mem::take(&mut self.dropping).into_keys() {
            out.push(Effect::Dropped { query, outcome: Ok(()) });
        }
        self.roster.want(0);
        for (slot, _) in self.roster.leaving() {
            out.push(Effect::RetireResident { slot });
        }
    }
}

/// Every call ends, also those that come too late or too early.
fn refuse(event: Event, error: EngineError, out: &mut Vec<Effect>) {
    match event {
        Event::MemberUp { member, .. } => out.push(Effect::Dismiss { member, why: Dismissal::Unneeded }),
        Event::Batch { query, epoch, .. } => out.push(Effect::Fail { query, epoch, error }),
        Event::Finish { query, .. } => out.push(Effect::Fail { query, epoch: 0, error }),
        Event::Migrate { moves, .. } => {
            let moved = |Moving { handle, .. }| Effect::Moved { handle, outcome: Err(error.clone()) };
            out.extend(moves.into_iter().map(moved));
        }
        Event::Rescale { handle, .. } => out.push(Effect::Rescaled { handle, outcome: Err(error), moved: 0 }),
        Event::Drop { query } => out.push(Effect::Dropped { query, outcome: Ok(()) }),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;
    use crate::manifest::Contents;
    use crate::protocol::{Answer, Program, Receipt, Request, Stored};
    use crate::roster::LOOKED;

    const MEMBERS: u32 = 64;
    const QUERIES: u32 = 8;

    /// An engine and all around it, which does at once what it is asked.
    struct Run {
        engine: Engine,
        /// How many seats were looked at in the step in which that was most.
        most: usize,
    }

    impl Run {
        fn hear(&mut self, event: Event) {
            let mut heard = VecDeque::from([event]);
            while let Some(event) = heard.pop_front() {
                let before = LOOKED.get();
                let effects = self.engine.step(event);
                self.most = self.most.max(LOOKED.get() - before);
                heard.extend(effects.into_iter().flat_map(answers));
            }
        }

        /// A batch of each query.
        fn batch(&mut self, epoch: u64) {
            let committed = epoch.checked_sub(1);
            for query in queries() {
                let event = Event::Batch { query: query.clone(), epoch, clock_ms: 0, planned_ms: None, committed };
                self.hear(event);
                let facts = self.engine.facts(&query).expect("it is there");
                assert_eq!((facts.running, facts.epoch), (true, Some(epoch)));
            }
        }
    }

    fn queries() -> impl Iterator<Item = QueryId> {
        (0..QUERIES).map(|number| format!("query {number}"))
    }

    fn answers(effect: Effect) -> Vec<Event> {
        let stored = |ticket, what| Event::Stored { ticket, outcome: Ok(what) };
        let event = match effect {
            Effect::Call { ticket, request, .. } => {
                let answer = match request {
                    Request::Release(_) => Answer::Released { pieces: vec![(0, 1, 0, Vec::new())] },
                    Request::Write { .. } => Answer::Written(Vec::new()),
                    _ => Answer::Done,
                };
                Event::Answer { ticket, answer: Ok(answer) }
            }
            Effect::Feed { ticket, members, .. } => {
                let receipt = |(partition, member)| Receipt {
                    source: 0,
                    partition,
                    attempt: 0,
                    member,
                    rows: 1,
                    max_event_time: None,
                    hash: 0,
                };
                let receipts = (0..).zip(members).map(receipt).map(|receipt| Event::Receipt { ticket, receipt });
                return receipts.chain([Event::Fed { ticket, outcome: Ok(()) }]).collect();
            }
            Effect::Sink { ticket, .. } => Event::Sunk { ticket, outcome: Ok(()) },
            Effect::ReadCheckpoint { ticket, .. } => stored(ticket, Stored::Contents(Contents::default())),
            Effect::CreateClaim { ticket, .. } => stored(ticket, Stored::Claimed(true)),
            Effect::ReadClaims { ticket, claim, .. } => {
                stored(ticket, Stored::NewestClaim { number: claim, nonce: None })
            }
            Effect::WriteManifest { ticket, .. } => stored(ticket, Stored::Written),
            Effect::Delete { ticket, .. } => stored(ticket, Stored::Deleted),
            _ => return Vec::new(),
        };
        vec![event]
    }

    /// A batch has several events of each member: looks that are as many as the members of all queries, or their square, are seconds of each batch
    /// where there are hundreds.
    #[test]
    fn an_event_looks_at_each_member_few_times_whatever_there_is_besides() {
        let mut run = Run { engine: Engine::new(Setup { workers: MEMBERS, ..Setup::default() }), most: 0 };
        for slot in 0..MEMBERS {
            let (member, executor) = (MemberId(u64::from(slot)), format!("executor {slot}"));
            run.hear(Event::MemberUp { slot, member, executor, executors: MEMBERS });
        }
        for query in queries() {
            run.hear(Event::Open { query, program: Program { durable: true, ..Program::default() } });
        }
        run.batch(0);
        run.most = 0;
        run.hear(Event::Timer { ticket: Ticket::MAX });
        assert!(run.most <= 2 * MEMBERS as usize, "{} looks for nothing", run.most);
        run.batch(1);
        assert!(run.most <= 12 * MEMBERS as usize, "{} looks for one event of a batch", run.most);
    }
}
