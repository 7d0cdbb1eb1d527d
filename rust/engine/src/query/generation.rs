//! Generations: ending one everywhere, who owns what in the next, restoring what nobody has, beginning it.
//!
//! A generation begins with the state at the beginning of the epoch that is asked for. What members kept comes from them, undone where that
//! epoch had begun; what no survivor has comes from the manifest of the batch before. Lost is what is in no inventory, not
//! what the dead member owned: an original may survive elsewhere.
//!
//! Its ranges are those of the one before, but where its epoch began before one was split or merged: what is held of that time. One that begins with
//! a manifest has the parts of that again, where its own bins are not shorter.
//!
//! Invariants: every range has one owner, who has its state or loads it; all operators have the same ranges; none is wider than the engine's bins; a
//! member that leaves goes only when the others have everything.

use std::collections::{BTreeMap, BTreeSet};

use super::{Asked, Phase, Query, Status, View, What};
use crate::error::{EngineError, Failure, Kind};
use crate::manifest::DataFile;
use crate::protocol::{Answer, MemberId, Ranges, Request, Start};
use crate::range::{Layout, Range, found, refined};
use crate::roster::Roster;

/// By operator: each range with the member and thread that has it, where one does.
type Places = BTreeMap<String, Vec<(Range, Option<(MemberId, u32)>)>>;

impl Query {
    /// Ends the present generation and begins the next, for the epoch of the call.
    pub(super) fn begin_generation(&mut self, view: &mut View<'_>) {
        self.forget_questions();
        if self.status == Status::Running {
            "its workers change".clone_into(&mut self.trouble);
        }
        self.cut_off(view);
        self.merged = None;
        // A merge of an ended generation is not used, and who was asked for it may be gone.
        self.asked.retain(|_, asked| !matches!(asked, Asked::Merge { .. }));
        if self.status == Status::Running {
            self.status = Status::Broken;
        }
        self.stamp.generation += 1;
        let Some(call) = &mut self.call else { return };
        let epoch = call.epoch;
        let survivors: BTreeSet<MemberId> =
            self.members.iter().copied().filter(|member| view.roster.alive(*member)).collect();
        call.phase = Phase::Stopping { waiting: survivors.clone(), inventories: BTreeMap::new() };
        let stamp = self.stamp;
        for member in survivors {
            self.call_member(member, Asked::Stop(member), Request::Stop { stamp, epoch }, view);
        }
        self.all_stopped(view);
    }

    pub(super) fn stopped(&mut self, member: MemberId, answer: Result<Answer, Failure>, view: &mut View<'_>) {
        let Some(super::Call { phase: Phase::Stopping { waiting, inventories }, .. }) = &mut self.call else { return };
        waiting.remove(&member);
        // A member that cannot say what it has has nothing.
        if let Ok(Answer::Inventory(ranges)) = answer {
            inventories.insert(member, ranges);
        }
        self.all_stopped(view);
    }

    pub(super) fn all_stopped(&mut self, view: &mut View<'_>) {
        let Some(super::Call { phase: Phase::Stopping { waiting, inventories }, .. }) = &mut self.call else { return };
        if !waiting.is_empty() {
            return;
        }
        let inventories = std::mem::take(inventories);
        self.gather(inventories, view);
    }

    /// Waits for members: for all before the first have run, then for any.
    fn gather(&mut self, inventories: BTreeMap<MemberId, Ranges>, view: &mut View<'_>) {
        let enough = match self.status {
            Status::Fresh if !self.has_run => view.roster.complete(),
            _ => view.roster.serving().next().is_some(),
        };
        let Some(call) = &mut self.call else { return };
        let waits = matches!(call.phase, Phase::Gathering { .. });
        call.phase = Phase::Gathering { inventories };
        if enough {
            self.forget_questions();
            self.assign(view);
        } else if !waits {
            self.timer(Asked::Members, view.setup.start_ms, view);
        }
    }

    /// Somebody came, or fewer are wanted.
    pub(crate) fn member_up(&mut self, view: &mut View<'_>) {
        if let Some(super::Call { phase: Phase::Gathering { inventories }, .. }) = &mut self.call {
            let inventories = std::mem::take(inventories);
            self.gather(inventories, view);
        } else {
            self.regroup(view);
        }
    }

    pub(super) fn nobody_came(&mut self, view: &mut View<'_>) {
        let wanted = view.roster.wanted();
        let missing = wanted - view.roster.serving().count() as u32;
        self.fail(EngineError::NoMembers { missing, wanted }, view);
    }

    /// Gives every range to a member that has it, or to one that loads it.
    fn assign(&mut self, view: &mut View<'_>) {
        let Some(super::Call { phase: Phase::Gathering { inventories }, epoch, .. }) = &mut self.call else { return };
        let (mut inventories, epoch) = (std::mem::take(inventories), *epoch);
        inventories.retain(|member, _| view.roster.alive(*member));
        let threads = view.setup.threads;
        let operators: Vec<String> = self.program.plan.operators.iter().map(|operator| operator.name.clone()).collect();
        let fresh = self.base.epoch.is_none();
        if fresh {
            inventories.values_mut().for_each(Ranges::clear);
        }
        // Whoever served goes on with its rank where it can; those that leave stay while they have something.
        let mut members: Vec<MemberId> =
            self.members.iter().copied().filter(|member| view.roster.alive(*member)).collect();
        members.extend(view.roster.serving().filter(|member| !self.members.contains(member)));
        let ranges = found(self.ranges(), &held(&operators, &inventories));
        let dealt = Layout::dealt(ranges.clone(), members.len() as u32 * threads).expect("the ranges of a layout");
        let sets: BTreeMap<MemberId, BTreeMap<&str, BTreeSet<Range>>> = inventories
            .iter()
            .map(|(member, all)| {
                (*member, all.iter().map(|(name, some)| (&**name, some.iter().copied().collect())).collect())
            })
            .collect();
        let mut places: Places = BTreeMap::new();
        for name in &operators {
            let layout = self.layouts.get(name).unwrap_or(&dealt);
            let place = |range: &Range| {
                let owner = layout.owner(range.first());
                let has = |member: &MemberId| {
                    sets.get(member).and_then(|all| all.get(&**name)).is_some_and(|some| some.contains(range))
                };
                // A range cut off on its way between epochs is where it was and perhaps where it goes: equal copies.
                let last = self.members.get((owner / threads) as usize).copied().filter(has);
                let holder = last.map(|member| (member, owner % threads)).or_else(|| {
                    let other = members.iter().copied().find(has)?;
                    Some((other, range.prefix() % threads))
                });
                (*range, holder)
            };
            places.insert(name.clone(), ranges.iter().map(place).collect());
        }
        let holds = |member: &MemberId| {
            places.values().flatten().any(|(_, holder)| holder.is_some_and(|(holder, _)| holder == *member))
        };
        members.retain(|member| view.roster.stays(*member) || holds(member));
        let changed = members != self.members;
        let missing = deal(&mut places, &members, threads, view.roster);
        let lost: usize = missing.values().flat_map(BTreeMap::values).map(Vec::len).sum();
        let source = self.base.epoch.and_then(|last| self.kept.get(&last)).map(|manifest| manifest.files.clone());
        if lost > 0 && !fresh && source.is_none() {
            let reason = match self.trouble.is_empty() {
                true => format!("{lost} ranges are at no member"),
                false => format!("{lost} ranges are at no member; {}", self.trouble),
            };
            let member = self.gone;
            return self.fail(EngineError::StateLost { epoch, reason, member }, view);
        }
        for leaver in self.members.clone().iter().filter(|member| !members.contains(member)) {
            if view.roster.alive(*leaver) {
                self.tell(*leaver, Request::Drop, view);
            }
        }
        let ranked: BTreeMap<MemberId, u32> = members.iter().copied().zip(0..).collect();
        self.layouts = places
            .into_iter()
            .map(|(name, ranges)| {
                let owner = |(member, thread): (MemberId, u32)| ranked[&member] * threads + thread;
                let ranges = ranges.into_iter().filter_map(|(range, holder)| Some((range, owner(holder?))));
                (name, Layout::new(ranges.collect()).expect("the ranges of a layout, each with an owner"))
            })
            .collect();
        self.uneven |= changed && !fresh;
        if changed {
            self.stamp.membership += 1;
        }
        self.members = members;
        self.threads = threads;
        // Whoever comes to a checkpoint sees first that it is the driver's folder.
        let mut readers = if fresh { BTreeMap::new() } else { missing };
        if self.program.durable {
            for member in self.members.iter().filter(|member| !self.shares.contains(*member)) {
                readers.entry(*member).or_default();
            }
        }
        match readers.is_empty() {
            true => self.start(view),
            false => self.read_state(readers, &source.unwrap_or_default(), view),
        }
    }

    /// The ranges that there were last, or are to be: all operators have the same.
    fn ranges(&self) -> Vec<Range> {
        match self.layouts.values().next() {
            Some(layout) => layout.ranges().iter().map(|(range, _)| *range).collect(),
            None => {
                let base = self.base.epoch.and_then(|last| self.kept.get(&last));
                refined(self.bits, base.map_or(&[], |manifest| &manifest.parts))
            }
        }
    }

    /// Those that are parts of bins.
    pub(super) fn parts(&self) -> Vec<Range> {
        let all = self.layouts.values().next().map_or(&[][..], Layout::ranges).iter().map(|(range, _)| *range);
        all.filter(|range| range.length() > self.bits).collect()
    }

    // Restoring

    fn read_state(&mut self, readers: BTreeMap<MemberId, Ranges>, files: &[DataFile], view: &mut View<'_>) {
        if let Some(call) = &mut self.call {
            call.phase = Phase::Loading { waiting: readers.keys().copied().collect(), refused: None };
        }
        for (member, ranges) in readers {
            let files = if ranges.is_empty() { Vec::new() } else { files.to_vec() };
            self.load(member, ranges, files, 1, view);
        }
    }

    pub(super) fn load(
        &mut self,
        member: MemberId,
        ranges: Ranges,
        files: Vec<DataFile>,
        tries: u32,
        view: &mut View<'_>,
    ) {
        let Some(claim) = self.claim.clone() else { return };
        let request = Request::Load { stamp: self.stamp, claim, ranges: ranges.clone(), files: files.clone() };
        self.call_member(member, Asked::Load { member, ranges, files, tries }, request, view);
    }

    pub(super) fn loaded(
        &mut self,
        member: MemberId,
        ranges: Ranges,
        files: Vec<DataFile>,
        tries: u32,
        answer: Result<Answer, Failure>,
        view: &mut View<'_>,
    ) {
        match answer {
            Ok(_) => {
                self.shares.insert(member);
                let Some(super::Call { phase: Phase::Loading { waiting, .. }, .. }) = &mut self.call else { return };
                waiting.remove(&member);
                if waiting.is_empty() {
                    self.start(view);
                }
            }
            Err(failure) if failure.kind == Kind::Store => {
                let again = Asked::Load { member, ranges, files, tries };
                self.pause(again, tries, "reading state", failure.message, view);
            }
            Err(failure) if failure.kind == Kind::Damaged => {
                let (name, reason) = failure.message.split_once(' ').unwrap_or((&failure.message, "is damaged"));
                let (name, reason) = (name.to_owned(), reason.to_owned());
                self.fail(EngineError::Damaged { name, reason }, view);
            }
            Err(failure) if failure.kind == Kind::Data => {
                let Some(super::Call { phase: Phase::Loading { refused, .. }, .. }) = &mut self.call else { return };
                if refused.replace(failure).is_none() {
                    self.check_claim(1, view);
                }
            }
            Err(failure) => self.hindered(failure, view),
        }
    }

    // Beginning

    fn start(&mut self, view: &mut View<'_>) {
        let Some(call) = &mut self.call else { return };
        call.phase = Phase::Starting { waiting: self.members.iter().copied().collect() };
        let epoch = call.epoch;
        self.started_with = self.program.functions;
        for (rank, member) in (0..).zip(self.members.clone()) {
            let start = Start {
                stamp: self.stamp,
                members: self.members.clone(),
                rank,
                threads: view.setup.threads,
                bits: self.bits,
                layouts: self.layouts.clone(),
                epoch,
                watermark: self.base.watermark,
                fresh: self.base.epoch.is_none(),
            };
            self.call_member(member, Asked::Start(member), Request::Start(start), view);
        }
    }

    pub(super) fn started(&mut self, member: MemberId, answer: Result<Answer, Failure>, view: &mut View<'_>) {
        if let Err(failure) = answer {
            return self.hindered(failure, view);
        }
        let Some(super::Call { phase: Phase::Starting { waiting }, what, .. }) = &mut self.call else { return };
        let what = *what;
        waiting.remove(&member);
        if !waiting.is_empty() {
            return;
        }
        self.status = Status::Running;
        (self.has_run, self.ungrouped) = (true, false);
        self.trouble.clear();
        self.gone = None;
        if self.started_with != self.program.functions {
            // A query that was started again while nothing but its members changed brought others.
            self.broke("its functions have changed", view);
            return match what {
                What::Batch | What::Finish => self.begin_generation(view),
                What::Regroup => self.complete(view),
            };
        }
        self.even_out(view);
        self.next_turn(view);
        match what {
            What::Batch | What::Finish => self.feed(view),
            What::Regroup => self.complete(view),
        }
    }

    /// Whether those who serve are those who are to serve, and nobody is there that could go.
    pub(super) fn is_grouped(&self, roster: &Roster) -> bool {
        self.has_all(roster)
            && self.members.iter().all(|member| roster.stays(*member) || (roster.alive(*member) && self.owns(*member)))
    }

    /// Whether all who are to serve take part. Nobody does twice, so it is enough to count them.
    pub(super) fn has_all(&self, roster: &Roster) -> bool {
        self.members.iter().filter(|member| roster.stays(**member)).count() == roster.serving().count()
    }

    pub(super) fn owns(&self, member: MemberId) -> bool {
        let Some(rank) = self.members.iter().position(|one| *one == member) else { return false };
        let mine = |owner: u32| (owner / self.threads) as usize == rank;
        self.layouts.values().any(|layout| layout.ranges().iter().any(|(_, owner)| mine(*owner)))
    }
}

/// What members hold, by operator.
fn held(operators: &[String], inventories: &BTreeMap<MemberId, Ranges>) -> BTreeMap<String, BTreeSet<Range>> {
    let of = |name: &String| inventories.values().filter_map(|all| all.get(name)).flatten().copied().collect();
    operators.iter().map(|name| (name.clone(), of(name))).collect()
}

/// Gives ranges without a holder to the members that have the least; returns what each has to load.
fn deal(places: &mut Places, members: &[MemberId], threads: u32, roster: &Roster) -> BTreeMap<MemberId, Ranges> {
    let takers: Vec<MemberId> = members.iter().copied().filter(|member| roster.stays(*member)).collect();
    let mut missing: BTreeMap<MemberId, Ranges> = BTreeMap::new();
    for (name, ranges) in places {
        let mut shares: BTreeMap<(MemberId, u32), usize> =
            (0..threads).flat_map(|thread| takers.iter().map(move |member| ((*member, thread), 0))).collect();
        for (_, holder) in ranges.iter() {
            if let Some(share) = holder.and_then(|holder| shares.get_mut(&holder)) {
                *share += 1;
            }
        }
        for (range, holder) in ranges.iter_mut().filter(|(_, holder)| holder.is_none()) {
            let Some((taker, share)) =
                shares.iter_mut().min_by_key(|((member, thread), share)| (**share, *thread, *member))
            else {
                continue;
            };
            *share += 1;
            *holder = Some(*taker);
            missing.entry(taker.0).or_default().entry(name.clone()).or_default().push(*range);
        }
    }
    missing
}
