//! The machine of one worker. See the crate page for the protocol.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use penstock_progress::caster::{Caster, Gap};

use crate::joining::Joining;
use crate::list::{Change, Home, Id, List, Standing};
use crate::message::{Bundle, Grant, LANES, Lane, Message, Request};
use crate::serving::Record;

/// What the worker does for its member: the books of its dataflows.
pub trait Host {
    /// Counts or capabilities of one dataflow, as they travel. A clone costs little.
    type Part: Clone;
    /// What the others have not been told of a dataflow, if anything.
    fn cast(&mut self, dataflow: u64) -> Option<Self::Part>;
    /// Takes in a bundle of another worker; false when it is of another graph.
    fn absorb(&mut self, dataflow: u64, part: &Self::Part) -> bool;
    /// All counts in force. Nothing is untold.
    fn snapshot(&mut self, dataflow: u64) -> Self::Part;
    /// Begins a dataflow that counts nothing with a snapshot; false when it is of another graph.
    fn begin(&mut self, dataflow: u64, snapshot: &Self::Part) -> bool;
    /// Counts, for a joiner, one more of each capability that this worker holds, and names them; `None` when it holds none.
    fn grant(&mut self, dataflow: u64) -> Option<Self::Part>;
    /// Gives up all capabilities without a change of counts, for the lead; `None` when there are none.
    fn hand_over(&mut self, dataflow: u64) -> Option<Self::Part>;
    /// Holds these capabilities from now on; they are counted already.
    fn take(&mut self, dataflow: u64, capabilities: &Self::Part);
    /// A joiner has all that it was granted: of what it holds nothing it will hold nothing, whoever leaves later.
    fn seat(&mut self) {}
}

/// How long things may take, in the unit of [`Member::tick`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Limits {
    /// A join, from the list that admits until all progress is there.
    pub join: u64,
    /// A server's answers, until the joiner asks another one.
    pub serve: u64,
}

/// Why the run ends for this worker.
#[derive(Clone, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Failure {
    /// A bundle is missing or came twice.
    #[error("dataflow {dataflow}: {gap}")]
    Gap {
        /// Which dataflow.
        dataflow: u64,
        /// What.
        gap: Gap,
    },
    /// A member is lost.
    #[error("worker {0} was lost, which took part in the run")]
    Lost(Id),
    /// Another graph was built there.
    #[error("dataflow {dataflow} is another one at worker {peer}, or was not built here before the bootstrap")]
    Mismatch {
        /// Which dataflow.
        dataflow: u64,
        /// Where.
        peer: Id,
    },
    /// A list came before the one that it follows.
    #[error("worker {peer} uses member list {got}, and {here} is used here")]
    Skipped {
        /// Who sent it.
        peer: Id,
        /// Version here.
        here: u64,
        /// Version there.
        got: u64,
    },
}

/// What a member wants done, in this order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Output<P> {
    /// Put this on a lane of a link, behind what was put there before.
    Send {
        /// To whom.
        to: Id,
        /// Where.
        lane: Lane,
        /// What.
        message: Message<P>,
    },
    /// From here on blocks are routed by this list.
    Adopted(Arc<List>),
    /// All that was sent under the list before this one has come, in all lanes.
    Settled(Arc<List>),
    /// Said at the lead: the answer to a request to admit.
    Admitted {
        /// Of the request.
        ticket: u64,
        /// For the joiners.
        joiners: Vec<Id>,
    },
    /// Said at the lead: there is no room for those who were to be admitted there.
    Crowded(Home),
    /// This joiner is a full member and holds its capabilities: it may send.
    Seated,
    /// This joiner was withdrawn.
    Refused,
    /// This leaver is gone: nobody sends to it any more.
    Closed,
    /// This member asked to leave and is the last one: it stays, and takes part as before.
    Alone,
}

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Member<P> {
    pub(crate) id: Id,
    pub(crate) limits: Limits,
    pub(crate) list: Arc<List>,
    pub(crate) casters: BTreeMap<u64, Caster>,
    /// By dataflow: what the next bundle rests on.
    afters: BTreeMap<u64, Vec<(Id, u64)>>,
    /// By dataflow and sender: bundles that wait for others.
    pub(crate) held: BTreeMap<(u64, Id), VecDeque<Bundle<P>>>,
    /// By dataflow and sender: how many bundles the snapshot had that this member began with.
    pub(crate) covered: BTreeMap<(u64, Id), u64>,
    /// The version of the last marker.
    seen: BTreeMap<(Id, Lane), u64>,
    /// Leavers that are closed and whose marker of that list has not come, with its version.
    pub(crate) departing: BTreeMap<Id, u64>,
    /// Of a joiner: lists that came before the one that they follow, from workers that joined with them.
    early: BTreeMap<u64, Arc<List>>,
    /// Lists in use whose markers have not all come, oldest first: one may follow before all have settled here.
    unsettled: VecDeque<Arc<List>>,
    /// Whether it may count and cast.
    pub(crate) seated: bool,
    /// It has asked to leave, and was not told that it is the last one.
    pub(crate) leaves: bool,
    /// It has handed over everything.
    drained: bool,
    /// It takes part in nothing any more.
    over: bool,
    /// What a joiner is given, until it is current and has the bundles that count it.
    granted: Option<Grant<P>>,
    /// What leavers left to this lead, until it has the bundles that count it.
    legacies: Vec<Grant<P>>,
    pub(crate) joining: Option<Joining<P>>,
    /// Joiners that are lost: the list may make them full members yet.
    pub(crate) mourned: BTreeSet<Id>,
    /// By joiner: what it is served.
    pub(crate) records: BTreeMap<Id, Record<P>>,
    /// Joiners that asked for a snapshot too early.
    pub(crate) askers: BTreeMap<Id, u64>,
    /// By joiner and sender: the numbers with which the sender's progress goes to the joiner itself, by dataflow.
    pub(crate) ends: BTreeMap<Id, BTreeMap<Id, BTreeMap<u64, u64>>>,
    /// By joiner: how long it takes, from the first tick after its list was adopted on. Messages bring no time, and the tick before may be long ago.
    pub(crate) waited: BTreeMap<Id, Option<u64>>,
    /// The last tick.
    pub(crate) looked: u64,
    pub(crate) requests: VecDeque<Request>,
    out: Vec<Output<P>>,
}

impl<P: Clone> Member<P> {
    fn new(id: Id, list: List, limits: Limits) -> Self {
        Member {
            id,
            limits,
            list: Arc::new(list),
            casters: BTreeMap::new(),
            afters: BTreeMap::new(),
            held: BTreeMap::new(),
            covered: BTreeMap::new(),
            seen: BTreeMap::new(),
            departing: BTreeMap::new(),
            early: BTreeMap::new(),
            unsettled: VecDeque::new(),
            seated: true,
            leaves: false,
            drained: false,
            over: false,
            granted: None,
            legacies: Vec::new(),
            joining: None,
            mourned: BTreeSet::new(),
            records: BTreeMap::new(),
            askers: BTreeMap::new(),
            ends: BTreeMap::new(),
            waited: BTreeMap::new(),
            looked: 0,
            requests: VecDeque::new(),
            out: Vec::new(),
        }
    }

    /// One of `founders`, with ids from 0 on.
    pub fn founder(id: Id, founders: usize, limits: Limits) -> Self {
        Self::new(id, List::founded(founders), limits)
    }

    /// One of `founders`, so many of each process, with ids from 0 on.
    pub fn founder_at(id: Id, founders: usize, threads: usize, limits: Limits) -> Self {
        Self::new(id, List::founded_at(founders, threads), limits)
    }

    /// A joiner with an id that a lead gave out. It asks `server` first, if one is named.
    pub fn joiner(id: Id, server: Option<Id>, limits: Limits) -> Self {
        let mut member = Self::new(id, List::founded(0), limits);
        member.seated = false;
        member.joining = Some(Joining::new(server));
        member
    }

    /// Begins a dataflow: before the first message at a joiner, in the same order everywhere.
    pub fn open(&mut self, dataflow: u64) {
        self.casters.entry(dataflow).or_default();
    }

    /// The list in use.
    pub fn list(&self) -> &List {
        &self.list
    }

    /// Whether this worker may count, send and cast.
    pub fn is_seated(&self) -> bool {
        self.seated && !self.drained && !self.over
    }

    /// Whether its counts include all that its peers sent before it was admitted.
    pub fn is_current(&self) -> bool {
        self.joining.as_ref().is_none_or(Joining::is_installed)
    }

    /// Whether there is nobody to tell anything.
    pub fn is_alone(&self) -> bool {
        self.list.members.len() <= 1
    }

    /// Whether it takes part in nothing any more.
    pub fn is_over(&self) -> bool {
        self.over
    }

    /// Whether all that was sent under the list before has come.
    pub fn is_settled(&self) -> bool {
        self.unsettled.is_empty()
    }

    /// What is kept for a join or for somebody who is gone, if anything: nothing between joins and leaves.
    pub fn remembers(&self) -> Option<String> {
        let stays = |id: &Id| *id == self.id || self.list.members.contains_key(id);
        let senders = self.casters.values().flat_map(Caster::senders).find(|id| !stays(id));
        senders
            .map(|id| format!("the numbers of worker {id}"))
            .or_else(|| self.held.keys().next().map(|key| format!("bundles of {key:?}")))
            .or_else(|| self.records.keys().next().map(|joiner| format!("a record for worker {joiner}")))
            .or_else(|| self.ends.keys().next().map(|joiner| format!("where the links to worker {joiner} begin")))
            .or_else(|| self.requests.front().map(|_| "a request".to_string()))
            .or_else(|| self.legacies.first().map(|_| "the capabilities of a leaver".to_string()))
            .or_else(|| self.departing.keys().next().map(|id| format!("worker {id}, which is closed")))
            .or_else(|| {
                self.seen.keys().find(|(id, _)| !stays(id)).map(|(id, _)| format!("the markers of worker {id}"))
            })
    }

    /// The numbers of a dataflow.
    pub fn caster(&self, dataflow: u64) -> Option<&Caster> {
        self.casters.get(&dataflow)
    }

    /// Takes what is to be done.
    pub fn outputs(&mut self) -> Vec<Output<P>> {
        std::mem::take(&mut self.out)
    }

    /// As [`Member::outputs`], into a vector whose memory is used again.
    pub fn outputs_into(&mut self, out: &mut Vec<Output<P>>) {
        if !self.out.is_empty() {
            out.append(&mut self.out);
        }
    }

    pub(crate) fn say(&mut self, output: Output<P>) {
        self.out.push(output);
    }

    pub(crate) fn send(&mut self, to: Id, message: Message<P>) {
        self.say(Output::Send { to, lane: Lane::Urgent, message });
    }

    /// Tells all members what they have not been told of a dataflow.
    pub fn cast(&mut self, dataflow: u64, host: &mut impl Host<Part = P>) {
        if !self.is_seated() {
            return;
        }
        let (Some(part), Some(caster)) = (host.cast(dataflow), self.casters.get_mut(&dataflow)) else { return };
        let number = caster.number();
        let after = self.afters.remove(&dataflow).unwrap_or_default();
        let bundle = Bundle { number, after, part };
        for to in self.list.members.keys().copied().filter(|id| *id != self.id) {
            let message = Message::Bundle(dataflow, bundle.clone());
            self.out.push(Output::Send { to, lane: Lane::Urgent, message });
        }
    }

    /// Takes a message.
    ///
    /// # Errors
    /// Why the run ends.
    pub fn accept(
        &mut self,
        from: Id,
        lane: Lane,
        message: Message<P>,
        host: &mut impl Host<Part = P>,
    ) -> Result<(), Failure> {
        if self.over {
            return Ok(());
        }
        match message {
            Message::Marker { list, next, grant } => self.marked(from, lane, &list, next, grant, host)?,
            Message::Mark(version) => self.passed(from, lane, version),
            // A joiner that was withdrawn, and does not know.
            _ if self.is_gone(from) => return Ok(()),
            Message::Bundle(dataflow, bundle) => return self.hear(from, dataflow, bundle, host),
            Message::Bootstrap { attempt } => self.asked_for_snapshot(from, attempt, host),
            Message::Ask { attempt, range } => self.asked_for_range(from, attempt, range),
            Message::Done { attempt } => {
                self.records.retain(|joiner, record| *joiner != from || record.attempt > attempt)
            }
            Message::Snapshot { attempt, states } => {
                if let Some(joining) = &mut self.joining {
                    joining.begin(attempt, states);
                }
            }
            Message::Answer { attempt, range, bundles } => {
                if let Some(joining) = &mut self.joining {
                    joining.answered(attempt, range, bundles);
                }
            }
            Message::Request(request) => self.take_request(request),
            Message::Legacy(legacy) => self.legacies.push(legacy),
        }
        self.check(host)
    }

    /// Takes a bundle, as [`Member::accept`] does: most of what comes, when nobody joins or leaves nearly all. Then nothing waits for
    /// it, and it is counted at once.
    ///
    /// # Errors
    /// As [`Member::accept`].
    pub fn hear(
        &mut self,
        from: Id,
        dataflow: u64,
        bundle: Bundle<P>,
        host: &mut impl Host<Part = P>,
    ) -> Result<(), Failure> {
        if self.over || self.is_gone(from) {
            return Ok(());
        }
        let ready = bundle.after.is_empty() && self.casters.contains_key(&dataflow);
        if ready && self.is_calm() && !self.is_covered(dataflow, from, bundle.number) {
            return self.take_in(dataflow, from, &bundle, host);
        }
        self.held.entry((dataflow, from)).or_default().push_back(bundle);
        self.release(dataflow, host)?;
        self.check(host)
    }

    /// Whether nothing waits for bundles: one that is taken in makes nothing else possible.
    fn is_calm(&self) -> bool {
        let given = self.granted.is_some() || !self.legacies.is_empty();
        let served = !self.records.is_empty() || !self.askers.is_empty();
        self.held.is_empty() && !given && !served && self.is_current()
    }

    /// Whether this member began with counts that have that bundle.
    fn is_covered(&self, dataflow: u64, sender: Id, number: u64) -> bool {
        self.covered.get(&(dataflow, sender)).is_some_and(|first| number < *first)
    }

    /// Whether everything of that worker has come, and nothing of it counts any more.
    pub(crate) fn is_gone(&self, id: Id) -> bool {
        id < self.list.next && !self.list.members.contains_key(&id) && !self.departing.contains_key(&id)
    }

    fn marked(
        &mut self,
        from: Id,
        lane: Lane,
        list: &Arc<List>,
        next: BTreeMap<u64, u64>,
        grant: Option<Grant<P>>,
        host: &mut impl Host<Part = P>,
    ) -> Result<(), Failure> {
        let admits = |list: &List| matches!(&list.change, Change::Admitted(joiners) if joiners.contains(&self.id));
        let fresh = self.list.members.is_empty();
        if lane == Lane::Urgent {
            if let Some(joining) = &mut self.joining {
                joining.starts(from, next.clone());
            }
            // Admitted and not there any more: lists in between may never come.
            let withdrawn = self.id < list.next && !list.members.contains_key(&self.id);
            if !self.seated && withdrawn && list.version > self.list.version {
                self.over = true;
                self.say(Output::Refused);
                return Ok(());
            }
            if if fresh { admits(list) } else { list.version == self.list.version + 1 } {
                self.adopt(list.clone(), host);
            } else if list.version > self.list.version && self.seated {
                return Err(Failure::Skipped { peer: from, here: self.list.version, got: list.version });
            } else if fresh || list.version > self.list.version {
                // A joiner, for whom nobody waits, may hear of a later list first, from who joined with that one.
                self.early.insert(list.version, list.clone());
            }
            // The first one has to admit it.
            while !self.over
                && !self.list.members.is_empty()
                && let Some(list) = self.early.remove(&(self.list.version + 1))
            {
                self.adopt(list, host);
            }
            if grant.is_some() {
                self.granted = grant;
            }
            if let Change::Admitted(joiners) = &list.change {
                for joiner in joiners.iter().filter(|joiner| self.list.standing(**joiner) == Some(Standing::Joining)) {
                    self.ends.entry(*joiner).or_default().insert(from, next.clone());
                }
            }
        }
        self.passed(from, lane, list.version);
        if lane == Lane::Urgent && self.departing.get(&from).is_some_and(|version| *version <= list.version) {
            self.departing.remove(&from);
        }
        Ok(())
    }

    /// What follows in that lane is sent under the list of this version.
    fn passed(&mut self, from: Id, lane: Lane, version: u64) {
        // One that was withdrawn may still speak.
        if !self.is_gone(from) || self.unsettled.iter().any(|list| list.speakers.contains(&from)) {
            let seen = self.seen.entry((from, lane)).or_default();
            *seen = (*seen).max(version);
        }
    }

    /// Uses a list from now on, and tells everybody where that begins.
    pub(crate) fn adopt(&mut self, list: Arc<List>, host: &mut impl Host<Part = P>) {
        let mut grant = match list.change {
            Change::Seated { joiner, granter } if granter == self.id => Some((joiner, self.grant(host))),
            _ => None,
        };
        let mut others: BTreeSet<Id> = self.list.members.keys().chain(list.members.keys()).copied().collect();
        others.remove(&self.id);
        match list.change {
            Change::Withdrawn(joiner) => {
                others.remove(&joiner);
                if self.list.lead() == Some(self.id) {
                    // Perhaps it is only late.
                    let marker = Message::Marker { list: list.clone(), next: BTreeMap::new(), grant: None };
                    self.send(joiner, marker);
                }
            }
            Change::Closed { leaver, .. }
                if leaver != self.id && self.seen.get(&(leaver, Lane::Urgent)) < Some(&list.version) =>
            {
                self.departing.insert(leaver, list.version);
            }
            _ => {}
        }
        let lead = self.list.lead();
        self.list = list.clone();
        self.unsettled.push_back(list.clone());
        let next: BTreeMap<u64, u64> =
            self.casters.iter().map(|(dataflow, caster)| (*dataflow, caster.next())).collect();
        for to in others {
            let grant = match &mut grant {
                Some((joiner, grant)) if *joiner == to => Some(std::mem::take(grant)),
                _ => None,
            };
            self.send(to, Message::Marker { list: list.clone(), next: next.clone(), grant });
            for lane in [Lane::Data, Lane::Behind] {
                self.say(Output::Send { to, lane, message: Message::Mark(list.version) });
            }
        }
        let joins = |joiner: &Id| list.standing(*joiner) == Some(Standing::Joining);
        self.records.retain(|joiner, _| joins(joiner));
        self.askers.retain(|joiner, _| joins(joiner));
        self.ends.retain(|joiner, _| joins(joiner));
        self.waited.retain(|joiner, _| joins(joiner));
        for joiner in list.joining() {
            self.waited.entry(joiner).or_insert(None);
        }
        if !list.members.contains_key(&self.id) && self.joining.is_some() && !self.seated {
            self.over = true;
            self.say(Output::Refused);
            return;
        }
        if let Some(joining) = &mut self.joining {
            joining.adopted(&list, lead);
        }
        self.say(Output::Adopted(list));
    }

    /// Counts capabilities for a joiner, and tells all that they are counted before any list with it is in use here.
    fn grant(&mut self, host: &mut impl Host<Part = P>) -> Grant<P> {
        let dataflows: Vec<u64> = self.casters.keys().copied().collect();
        let mut grant = Grant::new();
        for dataflow in dataflows {
            if let Some(part) = host.grant(dataflow) {
                self.cast(dataflow, host);
                grant.insert(dataflow, (part, self.counted(dataflow)));
            }
        }
        grant
    }

    /// The bundles that count what this worker holds: its last one, and what it was given since.
    fn counted(&self, dataflow: u64) -> Vec<(Id, u64)> {
        let last = self.casters.get(&dataflow).and_then(|caster| caster.next().checked_sub(1));
        let given = self.afters.get(&dataflow).into_iter().flatten();
        last.map(|last| (self.id, last)).into_iter().chain(given.copied()).collect()
    }

    /// Whether this worker counts what it is to be given: who holds what it does not count lets frontiers pass it.
    fn counts(&self, capabilities: &Grant<P>) -> bool {
        capabilities.iter().all(|(dataflow, (_, afters))| afters.iter().all(|after| self.has(*dataflow, *after)))
    }

    fn inherit(&mut self, capabilities: Grant<P>, host: &mut impl Host<Part = P>) {
        for (dataflow, (part, afters)) in capabilities {
            host.take(dataflow, &part);
            self.afters.entry(dataflow).or_default().extend(afters);
        }
    }

    /// Takes in what is held and may be now.
    pub(crate) fn release(&mut self, dataflow: u64, host: &mut impl Host<Part = P>) -> Result<(), Failure> {
        if !self.is_current() || !self.casters.contains_key(&dataflow) {
            return Ok(());
        }
        loop {
            let mut moved = false;
            let senders: Vec<Id> =
                self.held.range((dataflow, 0)..=(dataflow, Id::MAX)).map(|((_, sender), _)| *sender).collect();
            for sender in senders {
                while let Some(bundle) = self.held.get(&(dataflow, sender)).and_then(|queue| queue.front()).cloned() {
                    let covered = self.is_covered(dataflow, sender, bundle.number);
                    if !covered && !bundle.after.iter().all(|after| self.has(dataflow, *after)) {
                        break;
                    }
                    if !covered {
                        self.take_in(dataflow, sender, &bundle, host)?;
                        moved = true;
                    }
                    if let Some(queue) = self.held.get_mut(&(dataflow, sender)) {
                        queue.pop_front();
                    }
                }
                if self.held.get(&(dataflow, sender)).is_some_and(VecDeque::is_empty) {
                    self.held.remove(&(dataflow, sender));
                }
            }
            if !moved {
                return Ok(());
            }
        }
    }

    /// Whether that bundle was taken in.
    fn has(&self, dataflow: u64, (sender, number): (Id, u64)) -> bool {
        let Some(caster) = self.casters.get(&dataflow) else { return false };
        let taken = if sender == self.id { caster.next() } else { caster.expected(sender) };
        taken > number || (sender != self.id && self.is_gone(sender) && !self.held.contains_key(&(dataflow, sender)))
    }

    pub(crate) fn take_in(
        &mut self,
        dataflow: u64,
        sender: Id,
        bundle: &Bundle<P>,
        host: &mut impl Host<Part = P>,
    ) -> Result<(), Failure> {
        let Some(caster) = self.casters.get_mut(&dataflow) else { return Ok(()) };
        caster.admit(sender, bundle.number).map_err(|gap| Failure::Gap { dataflow, gap })?;
        if !host.absorb(dataflow, &bundle.part) {
            return Err(Failure::Mismatch { dataflow, peer: sender });
        }
        self.record(dataflow, sender, bundle);
        Ok(())
    }

    /// Does what has become possible.
    pub(crate) fn check(&mut self, host: &mut impl Host<Part = P>) -> Result<(), Failure> {
        self.mourned.retain(|id| *id >= self.list.next || self.list.members.contains_key(id));
        if let Some(lost) = self.list.full().find(|id| self.mourned.contains(id)) {
            return Err(Failure::Lost(lost));
        }
        self.ask_again();
        while !self.over {
            if let Some(list) = self.unsettled.front() {
                let seen = |id: &Id| self.has_seen(*id, list);
                if list.speakers.iter().filter(|id| **id != self.id).all(seen) {
                    self.settle()?;
                    continue;
                }
            }
            let Some(list) = self.decide() else { break };
            self.adopt(Arc::new(list), host);
        }
        if self.over {
            return Ok(());
        }
        self.answer();
        if !self.is_current() {
            self.advance_join(host)?;
        }
        // What was granted comes first.
        let legacies = std::mem::take(&mut self.legacies).into_iter();
        let (ready, wait): (Vec<_>, Vec<_>) = legacies.partition(|legacy| self.seated && self.counts(legacy));
        self.legacies = wait;
        ready.into_iter().for_each(|legacy| self.inherit(legacy, host));
        let full = self.list.standing(self.id) == Some(Standing::Full);
        let counted = self.granted.as_ref().is_none_or(|grant| self.counts(grant));
        if !self.seated
            && full
            && counted
            && self.is_current()
            && let Some(grant) = self.granted.take()
        {
            self.inherit(grant, host);
            host.seat();
            self.seated = true;
            self.say(Output::Seated);
            return self.check(host);
        }
        if self.may_serve() {
            for (joiner, attempt) in std::mem::take(&mut self.askers) {
                self.asked_for_snapshot(joiner, attempt, host);
            }
        }
        Ok(())
    }

    /// Whether all that was sent by that worker under the list before this one has come.
    fn has_seen(&self, id: Id, list: &List) -> bool {
        LANES.iter().all(|lane| self.seen.get(&(id, *lane)) >= Some(&list.version))
    }

    /// Whether something that was sent by that worker under an old list has not come.
    fn awaits(&self, id: Id) -> bool {
        self.unsettled.iter().any(|list| list.speakers.contains(&id) && !self.has_seen(id, list))
    }

    /// All that was sent under the list before has come.
    fn settle(&mut self) -> Result<(), Failure> {
        let Some(list) = self.unsettled.pop_front() else { return Ok(()) };
        if let Change::Closed { leaver, finals } = &list.change
            && *leaver != self.id
            && self.is_current()
        {
            for (dataflow, last) in finals {
                let waits = self.held.get(&(*dataflow, *leaver)).map_or(0, |queue| queue.len() as u64);
                let expected = self.casters.get(dataflow).map_or(*last, |caster| caster.expected(*leaver));
                let expected = expected.saturating_add(waits);
                if expected != *last {
                    let gap = Gap { worker: *leaver, expected, got: *last };
                    return Err(Failure::Gap { dataflow: *dataflow, gap });
                }
            }
        }
        if !list.members.contains_key(&self.id) {
            self.over = true;
            self.say(Output::Closed);
            return Ok(());
        }
        if self.is_settled() && list.joining().next().is_none() {
            self.forget();
        }
        self.say(Output::Settled(list));
        Ok(())
    }

    /// Forgets who is gone: no joiner needs their numbers.
    fn forget(&mut self) {
        let gone: BTreeSet<Id> = self
            .casters
            .values()
            .flat_map(Caster::senders)
            .filter(|id| self.is_gone(*id) && !self.held.keys().any(|(_, sender)| sender == id))
            .collect();
        for caster in self.casters.values_mut() {
            gone.iter().for_each(|id| caster.forget(*id));
        }
        let stays = |id: &Id| !gone.contains(id);
        self.covered.retain(|(_, id), _| stays(id));
        self.seen.retain(|(id, _), _| self.list.members.contains_key(id) || self.departing.contains_key(id));
    }

    /// A link ended without a word of its process. What came over it has been taken in.
    ///
    /// # Errors
    /// [`Failure::Lost`] when that worker took part, or had left and not all that it sent before has come.
    pub fn lost(&mut self, peer: Id, host: &mut impl Host<Part = P>) -> Result<(), Failure> {
        if self.over {
            return Ok(());
        }
        match self.list.standing(peer) {
            Some(Standing::Joining) => {
                self.mourned.insert(peer);
                self.requests.push_back(Request::Withdraw(peer));
                self.check(host)
            }
            Some(Standing::Full | Standing::Leaving) => Err(Failure::Lost(peer)),
            None if self.list.members.is_empty() || self.departing.contains_key(&peer) => Err(Failure::Lost(peer)),
            // Blocks of it were counted, and nobody has them.
            None if self.awaits(peer) => Err(Failure::Lost(peer)),
            None if self.is_gone(peer) => Ok(()),
            None => {
                self.mourned.insert(peer);
                Ok(())
            }
        }
    }

    /// A worker says that it does not join after all.
    ///
    /// # Errors
    /// [`Failure::Lost`] when it was made a full member before.
    pub fn given_up(&mut self, joiner: Id, host: &mut impl Host<Part = P>) -> Result<(), Failure> {
        if self.list.members.is_empty() && !self.over {
            // Another one that joins knows of nobody yet.
            self.mourned.insert(joiner);
            return Ok(());
        }
        self.lost(joiner, host)
    }

    /// Time passes. What is measured begins with the tick after it began, so ticks come while somebody joins.
    ///
    /// # Errors
    /// As [`Member::accept`].
    pub fn tick(&mut self, now: u64, host: &mut impl Host<Part = P>) -> Result<(), Failure> {
        if self.over {
            return Ok(());
        }
        self.withdraw_late(now);
        let serve = self.limits.serve;
        if let Some(joining) = &mut self.joining {
            joining.tick(now, serve);
        }
        self.check(host)
    }

    /// Asks to leave. Nothing is routed here once the list says so; then [`Member::drained`]. The last one is told that it stays
    /// ([`Output::Alone`]), at once or when the others who asked are leaving.
    ///
    /// # Errors
    /// As [`Member::accept`].
    pub fn leave(&mut self, host: &mut impl Host<Part = P>) -> Result<(), Failure> {
        self.leaves = true;
        self.requests.push_back(Request::Leave(self.id));
        self.check(host)
    }

    /// Whether what this leaver still has may be handed over: nothing can come for it any more.
    pub fn may_drain(&self) -> bool {
        let empty = self.legacies.is_empty();
        self.list.standing(self.id) == Some(Standing::Leaving) && self.is_settled() && self.is_seated() && empty
    }

    /// Hands over the capabilities that this leaver holds now, before all is worked off: what it still has, or what another leaver has, may
    /// wait for times that they hold back. False when it is too early.
    ///
    /// # Errors
    /// As [`Member::accept`].
    pub fn bequeath(&mut self, host: &mut impl Host<Part = P>) -> Result<bool, Failure> {
        let Some(heir) = self.list.lead().filter(|_| self.may_drain()) else { return Ok(false) };
        let dataflows: Vec<u64> = self.casters.keys().copied().collect();
        let mut early = Grant::new();
        for dataflow in dataflows {
            if let Some(part) = host.hand_over(dataflow) {
                self.cast(dataflow, host);
                early.insert(dataflow, (part, self.counted(dataflow)));
            }
        }
        if !early.is_empty() {
            self.send(heir, Message::Legacy(early));
        }
        self.check(host)?;
        Ok(true)
    }

    /// This leaver has worked off everything that came: tells its last counts, hands over its capabilities and asks to be closed. False
    /// when it is too early.
    ///
    /// # Errors
    /// As [`Member::accept`].
    pub fn drained(&mut self, host: &mut impl Host<Part = P>) -> Result<bool, Failure> {
        let Some(heir) = self.list.lead().filter(|_| self.may_drain()) else { return Ok(false) };
        let dataflows: Vec<u64> = self.casters.keys().copied().collect();
        let mut legacy = Grant::new();
        for dataflow in dataflows {
            self.cast(dataflow, host);
            if let Some(part) = host.hand_over(dataflow) {
                legacy.insert(dataflow, (part, self.counted(dataflow)));
            }
        }
        self.drained = true;
        self.send(heir, Message::Legacy(legacy));
        let finals = self.casters.iter().map(|(dataflow, caster)| (*dataflow, caster.next())).collect();
        self.requests.push_back(Request::Close { leaver: self.id, finals });
        self.check(host)?;
        Ok(true)
    }

    pub(crate) fn leads(&self) -> bool {
        self.is_settled() && self.is_seated() && self.list.lead() == Some(self.id)
    }
}
