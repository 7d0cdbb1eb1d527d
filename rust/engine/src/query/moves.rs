//! Moving, splitting and merging ranges, changing the set of members between two batches, and keeping what is durable small.
//!
//! What is asked for while a generation is being begun waits for its beginning. What is split or merged waits for its turn like what moves, and is
//! checked when it is asked for against what there will be then. Parts that are merged come together first, as steps of the same turn. What is
//! prepared for an epoch takes no turn: where it names a range that is being split, or takes parts apart that are being merged, the workers refuse
//! the later of the two, by name, and nothing of it takes place. A prepared one of several steps may end after what was split or merged between two
//! of them: what it has moved before is by then parts, or part of something. Or after a later one that has moved the same: so an answer says when
//! each step took place.
//!
//! Invariants: members join and leave between the request for a batch and its mark, or on an idle query whose last batch Spark is known to have
//! committed: before that the originals that undo the batch are needed. A durable query that nobody asks for a batch gives up what members hold when
//! some of them are to go. A manifest goes when Spark has committed a later one, `keep` further ones stay,
//! whichever engine wrote them. A file goes when no manifest names it and it belongs to a generation before the present one, or to an epoch before the
//! oldest manifest while nothing is merged: a merged file belongs to the last epoch that it is made of, and is there before the engine hears of it.
//! Merged files are used by the next manifest; when one that names them has been committed, the next are merged. A merge writes all state anew, so it
//! waits until what was written since comes to half of what was merged last, but not for ever. It does not wait for many files where twice that has
//! come since: of a state that changes wholly each batch is as large as all of it.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use penstock_balance::{Shift, Strategy, steps};

use super::{Asked, Call, Cut, Phase, Query, Status, Steps, Turn, View, Wait, What};
use crate::error::{EngineError, Failure};
use crate::manifest::{CLAIM_BITS, Claim, Contents, DataFile, Manifest, Named};
use crate::protocol::{Answer, Effect, Handle, MemberId, Recut, Request, Wish};
use crate::range::{Layout, LayoutError, Range};
use crate::roster::Roster;

impl Query {
    // Migrations

    /// What is wrong with a migration whatever moves before it; of one that is not `alone` nothing may be left to find out.
    pub(crate) fn refuses(&self, wish: &Wish, cut: Cut, alone: bool, roster: &Roster) -> Option<EngineError> {
        let waits = alone && self.begins();
        let planned = match (self.expected(), wish) {
            _ if self.status != Status::Running && !waits => Err(EngineError::NotRunning(self.status.told())),
            (_, Wish::Recut(_)) if cut.at_epoch.is_some() => {
                Err(refused("what is split or merged takes effect between two epochs: it is prepared for none"))
            }
            // Whom it can go to is known when they have begun.
            _ if waits => Ok(()),
            (None, _) => self.plan(wish, cut.strategy, roster).map(drop),
            (Some(layout), Wish::Recut(recut)) => self.together(recut, &layout, roster).map(drop),
            (Some(layout), _) => self.targets(wish, &layout, roster).map(drop),
        };
        if let Err(error) = planned.and_then(|()| self.strategic(cut.strategy)) {
            return Some(error);
        }
        let released = self.call.as_ref().filter(|call| {
            !matches!(
                call.phase,
                Phase::Claiming
                    | Phase::Gathering { .. }
                    | Phase::Stopping { .. }
                    | Phase::Loading { .. }
                    | Phase::Starting { .. }
                    | Phase::Discarding { .. }
                    | Phase::Feeding { .. }
                    | Phase::FeedFailed { .. }
            )
        });
        let last = self.epoch().max(released.map(|call| call.epoch))?;
        let at = cut.at_epoch.filter(|at| *at <= last)?;
        let next = last + 1;
        Some(EngineError::Refused(format!(
            "epoch {at} has passed: {next} is the first that something can be prepared for"
        )))
    }

    /// Takes up a migration that is not refused.
    pub(crate) fn migrate(&mut self, handle: Handle, wish: Wish, cut: Cut, view: &mut View<'_>) {
        self.turns.push_back(Turn { handle, wish, cut });
        self.next_turn(view);
    }

    /// Orders what was prepared for the epoch that is released next, all of it: nothing else holds it up.
    pub(super) fn due(&mut self, epoch: u64, view: &mut View<'_>) {
        let is_due = |turn: &Turn| turn.cut.at_epoch.is_some_and(|at| at <= epoch);
        let (due, rest): (VecDeque<Turn>, _) = std::mem::take(&mut self.turns).into_iter().partition(is_due);
        self.turns = rest;
        for turn in due {
            self.begin(turn, view);
        }
    }

    /// Whether a generation is being begun: what is asked for meanwhile takes its turn then. While the sink has the results of one that is broken
    /// none is: a sink that waited for it would wait for itself.
    fn begins(&self) -> bool {
        self.status == Status::Broken && self.call.as_ref().is_some_and(|call| !matches!(call.phase, Phase::Serving(_)))
    }

    /// Begins the next migration that has something to move, when none is under way; refuses all where none can be.
    pub(super) fn next_turn(&mut self, view: &mut View<'_>) {
        while !self.moves() && !self.begins() {
            let Some(at) = self.turns.iter().position(|turn| turn.cut.at_epoch.is_none()) else { return };
            let Some(turn) = self.turns.remove(at) else { return };
            self.begin(turn, view);
        }
    }

    fn begin(&mut self, Turn { handle, wish, mut cut }: Turn, view: &mut View<'_>) {
        if let Wish::Recut(_) = wish {
            // However many parts come together, that takes no longer at one time than shares of who came may.
            (cut.strategy, cut.max_pause_ms) = (view.setup.shares, view.setup.max_pause_ms);
        }
        let steps = match self.plan(&wish, cut.strategy, view.roster) {
            Ok(steps) => steps,
            Err(error) => return view.out.push(Effect::Moved { handle, outcome: Err(error) }),
        };
        let moving = steps.iter().map(Vec::len).sum::<usize>() as u32;
        let (ranges, then) = match wish {
            Wish::Recut(recut) => (moving + recut.ranges().len() as u32, Some(recut)),
            _ => (moving, None),
        };
        view.out.push(Effect::Moving { handle, ranges });
        match (steps.is_empty(), then) {
            (false, then) => self.order(Some(handle), steps, then, cut, view),
            (true, Some(recut)) => self.order_recut(handle, recut, view),
            (true, None) => view.out.push(Effect::Moved { handle, outcome: Ok(0) }),
        }
    }

    /// Whether ranges move, or are split or merged.
    pub(super) fn moves(&self) -> bool {
        self.asked.values().any(|asked| matches!(asked, Asked::Migrate { .. } | Asked::Recut { .. }))
    }

    /// The layout whose ranges are those that there are when all that takes turns is done, whoever has them; none of a query without state.
    fn expected(&self) -> Option<Layout> {
        let mut layout = self.layouts.values().next()?.clone();
        let under_way = self.asked.values().filter_map(|asked| match asked {
            Asked::Migrate { then, .. } => then.as_ref(),
            Asked::Recut { recut, .. } => Some(recut),
            _ => None,
        });
        let waiting = self.turns.iter().filter_map(|turn| match &turn.wish {
            Wish::Recut(recut) => Some(recut),
            _ => None,
        });
        // One that will be refused when its turn comes changes nothing.
        for recut in under_way.chain(waiting) {
            let mut after = layout.clone();
            if recut.apply(&mut after).is_ok() {
                layout = after;
            }
        }
        Some(layout)
    }

    /// Whether steps can be cut so.
    fn strategic(&self, strategy: Strategy) -> Result<(), EngineError> {
        strategy.check().map_err(|error| EngineError::Refused(error.to_string()))
    }

    /// The steps from the present layouts to what is wished for, or to where it can be merged; all operators move alike.
    fn plan(&self, wish: &Wish, strategy: Strategy, roster: &Roster) -> Result<Steps, EngineError> {
        if self.status != Status::Running {
            return Err(EngineError::NotRunning(self.status.told()));
        }
        let Some(layout) = self.layouts.values().next() else {
            return match wish {
                Wish::Moves(moves) if !moves.is_empty() => Err(refused("the query keeps no state: nothing can move")),
                Wish::Recut(_) => Err(refused("the query keeps no state: it has no bins")),
                _ => Ok(Vec::new()),
            };
        };
        let moves = match wish {
            Wish::Recut(recut) => self.together(recut, layout, roster)?,
            _ => self.targets(wish, layout, roster)?,
        };
        self.cut(strategy, moves)
    }

    /// Whether each worker is to stay: what is to be elsewhere soon goes to none of the others.
    fn keeps(&self, roster: &Roster) -> Vec<bool> {
        let of_member = |member: &MemberId| std::iter::repeat_n(roster.stays(*member), self.threads as usize);
        self.members.iter().flat_map(of_member).collect()
    }

    /// Workers whose members are to go.
    pub(super) fn leaving(&self, roster: &Roster) -> Vec<u32> {
        (0..).zip(self.keeps(roster)).filter(|(_, keeps)| !keeps).map(|(worker, _)| worker).collect()
    }

    /// Where the parts of what is merged come together: with the worker that has most of them, of those that stay. Nothing of what is split moves.
    fn together(&self, recut: &Recut, layout: &Layout, roster: &Roster) -> Result<Vec<(Range, u32)>, EngineError> {
        self.no_wider(recut.ranges().iter())?;
        recut.apply(&mut layout.clone()).map_err(|error| refused(error.to_string()))?;
        let Recut::Merge { ranges } = recut else { return Ok(Vec::new()) };
        let (mut moves, keeps) = (Vec::new(), self.keeps(roster));
        let stays = |owner: u32| keeps.get(owner as usize) == Some(&true);
        for range in ranges {
            let parts = layout.within(*range);
            let mut owners: BTreeMap<u32, usize> = BTreeMap::new();
            parts.iter().for_each(|(_, owner)| *owners.entry(*owner).or_default() += 1);
            let rank = |(owner, parts): &(&u32, &usize)| (stays(**owner), **parts, Reverse(**owner));
            let home = owners.iter().max_by_key(rank).map(|(owner, _)| *owner);
            moves.extend(parts.iter().filter_map(|(part, _)| Some((*part, home?))));
        }
        Ok(moves)
    }

    /// Refuses what holds several bins.
    fn no_wider<'a>(&self, mut ranges: impl Iterator<Item = &'a Range>) -> Result<(), EngineError> {
        match ranges.find(|range| range.length() < self.bits) {
            Some(range) => Err(refused(format!("there can be no bin {range}: bins have {} bits", self.bits))),
            None => Ok(()),
        }
    }

    /// Where ranges are to be: with workers that stay, or where they are.
    fn targets(&self, wish: &Wish, layout: &Layout, roster: &Roster) -> Result<Vec<(Range, u32)>, EngineError> {
        let keeps = self.keeps(roster);
        let workers = keeps.len() as u32;
        let ranges = || layout.ranges().iter().map(|(range, _)| *range);
        let bits = self.bits;
        let moves = match wish {
            Wish::Even => {
                let mut even = layout.clone();
                for (range, worker) in layout.balanced(&keeps) {
                    even.give(range, worker).expect("a range of the layout");
                }
                even.ranges().to_vec()
            }
            Wish::To(owners) if owners.len() != 1 << bits => {
                let given = owners.len();
                return Err(refused(format!("{given} workers are named for {} bins", 1 << bits)));
            }
            // Parts go where the bin is to be.
            Wish::To(owners) => {
                let bin = |range: Range| (range.prefix() >> (range.length() - bits)) as usize;
                ranges().map(|range| (range, owners[bin(range)])).collect()
            }
            Wish::Moves(moves) => {
                self.no_wider(moves.iter().map(|(range, _)| range))?;
                let mut parts = Vec::new();
                for (range, worker) in moves {
                    let named = layout.within(*range);
                    if named.is_empty() {
                        return Err(refused(LayoutError::Absent(*range).to_string()));
                    }
                    parts.extend(named.iter().map(|(part, _)| (*part, *worker)));
                }
                parts
            }
            Wish::Recut(_) => Vec::new(),
        };
        let mut seen = BTreeSet::new();
        for (range, worker) in &moves {
            if *worker >= workers {
                let last = workers - 1;
                return Err(refused(format!("there is no worker {worker}: the query has workers 0 to {last}")));
            }
            if layout.owner_of(*range) != Some(*worker) && !keeps[*worker as usize] {
                return Err(refused(format!("worker {worker} leaves: nothing moves to it any more")));
            }
            if !seen.insert(*range) {
                return Err(refused(format!("bin {} is to move twice", told(*range, bits))));
            }
        }
        Ok(moves)
    }

    /// Those of the moves that change an owner, in steps.
    fn cut(&self, strategy: Strategy, moves: Vec<(Range, u32)>) -> Result<Steps, EngineError> {
        let mut shifts = Vec::new();
        for (range, to) in moves {
            let mut owners = self.layouts.values().filter_map(|layout| layout.owner_of(range));
            // A range that is on its way may be elsewhere by then.
            if let Some(from) = owners.find(|owner| *owner != to).or_else(|| self.on_the_way(range)) {
                shifts.push(Shift { what: range, from, to });
            }
        }
        let list = steps(strategy, &shifts).map_err(|error| EngineError::Refused(error.to_string()))?;
        Ok(list.into_iter().map(|step| step.into_iter().map(|shift| (shift.what, shift.to)).collect()).collect())
    }

    /// Where a range that moves is to go, by itself or with what it was part of.
    fn on_the_way(&self, range: Range) -> Option<u32> {
        let steps = self.asked.values().filter_map(|asked| match asked {
            Asked::Migrate { steps, .. } => Some(steps),
            _ => None,
        });
        let mut moves = steps.flatten().flatten();
        moves.find(|(one, _)| one.intersects(range)).map(|(_, to)| *to)
    }

    fn order(
        &mut self,
        handle: Option<Handle>,
        steps: Steps,
        then: Option<Recut>,
        Cut { max_pause_ms, drains, at_epoch, .. }: Cut,
        view: &mut View<'_>,
    ) {
        let ticket = self.ask(Asked::Migrate { handle, steps: steps.clone(), then }, view);
        let (stamp, leader) = (self.stamp, self.members[0]);
        let request = Request::Migrate { stamp, handle: ticket, steps, max_pause_ms, drains, at_epoch };
        view.out.push(Effect::Call { ticket, member: leader, query: self.id.clone(), request });
        self.keeps = true;
        self.settle(view);
    }

    fn order_recut(&mut self, handle: Handle, recut: Recut, view: &mut View<'_>) {
        let ticket = self.ask(Asked::Recut { handle, recut: recut.clone() }, view);
        let (stamp, leader) = (self.stamp, self.members[0]);
        let request = Request::Recut { stamp, handle: ticket, recut };
        view.out.push(Effect::Call { ticket, member: leader, query: self.id.clone(), request });
        self.keeps = true;
        self.settle(view);
    }

    pub(crate) fn cancel_migration(&mut self, handle: Handle, view: &mut View<'_>) {
        if let Some(at) = self.turns.iter().position(|turn| turn.handle == handle) {
            self.turns.remove(at);
            return view.out.push(Effect::Moved { handle, outcome: Ok(0) });
        }
        let under_way = self.asked.iter_mut().find_map(|(ticket, asked)| match asked {
            Asked::Migrate { handle: Some(one), then, .. } if *one == handle => {
                *then = None;
                Some(*ticket)
            }
            Asked::Recut { handle: one, .. } if *one == handle => Some(*ticket),
            _ => None,
        });
        if let Some(ticket) = under_way {
            let (stamp, leader) = (self.stamp, self.members[0]);
            self.tell(leader, Request::CancelMigration { stamp, handle: ticket }, view);
        }
    }

    pub(super) fn migrated(
        &mut self,
        handle: Option<Handle>,
        steps: &[Vec<(Range, u32)>],
        then: Option<Recut>,
        answer: Result<Answer, Failure>,
        view: &mut View<'_>,
    ) {
        let outcome = match answer {
            Ok(Answer::Migrated { times, refused }) => {
                let done = steps.iter().zip(&times);
                if handle.is_none() {
                    self.shifted += done.clone().map(|(step, _)| step.len()).sum::<usize>() as u32;
                }
                let moved = done.flat_map(|(step, time)| step.iter().map(|(range, to)| (*time, *range, *to)));
                self.have_moved(moved.collect());
                refused.map_or(Ok(times.len() as u32), |failure| Err(EngineError::CutOff(failure.message)))
            }
            Ok(_) => Ok(0),
            Err(failure) => Err(EngineError::CutOff(failure.message)),
        };
        if !self.asked.values().any(|asked| matches!(asked, Asked::Migrate { .. })) {
            self.moved.clear();
        }
        if let (Some(handle), Some(recut), Ok(_)) = (handle, then, &outcome) {
            // They are together.
            return self.order_recut(handle, recut, view);
        }
        if let Some(handle) = handle {
            view.out.push(Effect::Moved { handle, outcome });
        }
        self.next_turn(view);
        self.regroup(view);
    }

    /// Writes moves down in the order in which they took place. Of what is prepared, one that was begun first may answer last: then it moves nothing
    /// again that others have moved since.
    fn have_moved(&mut self, moved: Vec<((u64, u32), Range, u32)>) {
        self.moved.extend(moved);
        self.moved.sort_by_key(|(time, ..)| *time);
        for (_, range, worker) in &self.moved {
            self.layouts.values_mut().for_each(|layout| layout.hand(*range, *worker));
        }
    }

    pub(super) fn was_recut(
        &mut self,
        handle: Handle,
        recut: &Recut,
        answer: Result<Answer, Failure>,
        view: &mut View<'_>,
    ) {
        let outcome = match answer {
            Ok(Answer::Migrated { refused: Some(failure), .. }) | Err(failure) => {
                Err(EngineError::CutOff(failure.message))
            }
            Ok(Answer::Migrated { times, .. }) if times.len() == 1 => {
                for layout in self.layouts.values_mut() {
                    recut.apply(layout).expect("the workers have checked it, too");
                }
                Ok(1)
            }
            Ok(_) => Ok(0),
        };
        view.out.push(Effect::Moved { handle, outcome });
        self.next_turn(view);
        self.regroup(view);
    }

    /// Nothing moves any more, whatever it was prepared for.
    pub(super) fn give_up_moves(&mut self, view: &mut View<'_>) {
        self.turns.iter_mut().for_each(|turn| turn.cut.at_epoch = None);
        self.cut_off(view);
    }

    /// Migrations do not outlive their generation; what is prepared for an epoch to come waits for it in the next one.
    pub(super) fn cut_off(&mut self, view: &mut View<'_>) {
        let ends = |asked: &Asked| matches!(asked, Asked::Migrate { .. } | Asked::Recut { .. });
        let gone = self.asked.extract_if(.., |_, asked| ends(asked)).collect::<Vec<_>>();
        self.moved.clear();
        for (_, asked) in gone {
            match asked {
                Asked::Migrate { handle: Some(handle), .. } => {
                    let error = EngineError::CutOff(self.trouble.clone());
                    view.out.push(Effect::Moved { handle, outcome: Err(error) });
                }
                Asked::Recut { handle, .. } => {
                    let error = EngineError::CutOff(self.trouble.clone());
                    view.out.push(Effect::Moved { handle, outcome: Err(error) });
                }
                _ => self.uneven = true,
            }
        }
        let (kept, cut) = std::mem::take(&mut self.turns).into_iter().partition(|turn| turn.cut.at_epoch.is_some());
        self.turns = kept;
        let cut: VecDeque<Turn> = cut;
        for Turn { handle, .. } in cut {
            let error = EngineError::CutOff(self.trouble.clone());
            view.out.push(Effect::Moved { handle, outcome: Err(error) });
        }
    }

    /// Gives those who came their share, and takes it from those who go.
    pub(super) fn even_out(&mut self, view: &mut View<'_>) {
        let leaves = self.members.iter().any(|member| !view.roster.stays(*member));
        if !(self.uneven || leaves) || self.moves() {
            return;
        }
        self.uneven = false;
        let keeps = self.keeps(view.roster);
        let mut seen = BTreeSet::new();
        let moves: Vec<(Range, u32)> = self
            .layouts
            .values()
            .flat_map(|layout| layout.balanced(&keeps))
            .filter(|(range, _)| seen.insert(*range))
            .collect();
        let (strategy, max_pause_ms) = (view.setup.shares, view.setup.max_pause_ms);
        let cut = Cut { strategy, max_pause_ms, drains: false, at_epoch: None };
        let steps = self.cut(cut.strategy, moves).expect("the engine's own strategy has steps");
        if !steps.is_empty() {
            self.order(None, steps, None, cut, view);
        }
    }

    // Another set of members

    /// Between two batches, once Spark has committed the last: takes in who came, lets go who may.
    pub(super) fn regroup(&mut self, view: &mut View<'_>) {
        let started = !self.members.is_empty() && matches!(self.status, Status::Running | Status::Broken);
        if self.call.is_some() || !started {
            return;
        }
        if self.gives_way(view) || self.moves() {
            return;
        }
        if !self.is_proven() || self.frozen.as_ref().is_some_and(|frozen| frozen.finish) {
            return self.watch(view);
        }
        if self.status == Status::Running && self.is_grouped(view.roster) {
            // Shares of leavers that are not under way yet.
            return self.even_out(view);
        }
        if view.roster.serving().next().is_none() {
            return;
        }
        self.advance();
        let epoch = self.base.epoch.map_or(0, |last| last + 1);
        self.call = Some(Call {
            what: What::Regroup,
            epoch,
            clock_ms: 0,
            planned_ms: None,
            tries: 0,
            sink_calls: 0,
            phase: Phase::Claiming,
        });
        if let Some(last) = self.base.epoch {
            for member in self.members.clone() {
                self.tell(member, Request::CloseEpoch { epoch: last }, view);
            }
        }
        self.begin_generation(view);
    }

    /// Members that leave would wait for the next batch of a query that nobody asks for one: where its checkpoint has all that it has, or it has
    /// nothing yet, it gives up what is at members.
    pub(super) fn gives_way(&mut self, view: &mut View<'_>) -> bool {
        // The end of the input may be durable, and what came out of it is at members only.
        let ends = self.frozen.as_ref().is_some_and(|frozen| frozen.finish && frozen.sealing);
        let is_elsewhere = self.program.durable && (!self.is_proven() || self.ungrouped) && !ends;
        let has_nothing = self.frozen.is_none() && self.base.epoch.is_none();
        // Behind a batch that is committed the next one may not come, either.
        let rests = self.rests || (self.ungrouped && self.is_proven());
        let waits = self.call.is_none() && rests && (is_elsewhere || has_nothing);
        if !waits || !self.any_goes(view) {
            return false;
        }
        let uncommitted = self.frozen.as_ref().and_then(|frozen| frozen.at.epoch.filter(|_| !frozen.finish));
        self.trouble = "its last batch failed or was not committed, and workers leave".to_owned();
        self.start_over(view);
        self.uncommitted = uncommitted.or(self.uncommitted);
        true
    }

    /// Whether one of its members is there and leaves.
    pub(super) fn any_goes(&self, view: &View<'_>) -> bool {
        self.members.iter().any(|member| goes(view.roster, *member))
    }

    /// Whether nothing goes back to before the last epoch any more.
    fn is_proven(&self) -> bool {
        match &self.frozen {
            Some(frozen) => frozen.returned && self.committed >= frozen.at.epoch,
            None => self.base.epoch.is_some(),
        }
    }

    /// Where ranges have moved: lets members free what they keep to go back with, as soon as nothing goes back to before the last batch. The
    /// next one would tell them, too, and may never come. Without durable state they hear of it with each batch.
    pub(super) fn settle(&mut self, view: &mut View<'_>) {
        let last = self.frozen.as_ref().filter(|frozen| frozen.returned && !frozen.finish);
        let Some(epoch) = last.and_then(|frozen| frozen.at.epoch) else { return };
        if !self.program.durable || !self.keeps || self.call.is_some() || self.settled >= Some(epoch) {
            return;
        }
        if self.committed >= Some(epoch) {
            self.settled = Some(epoch);
            for member in self.members.clone() {
                self.tell(member, Request::Settle { epoch }, view);
            }
        } else if self.watched != Some(epoch) {
            self.watched = Some(epoch);
            view.out.push(Effect::WatchCommit { query: self.id.clone(), epoch });
        }
    }

    /// Between two batches, when members come or go and nothing but Spark's commit of the last one is missing: asks to be told of it.
    pub(super) fn watch(&mut self, view: &mut View<'_>) {
        let Some(Wait::Commit { query, epoch }) = self.unsettled(view.roster) else { return };
        // What broke is mended at the next batch, or when all are back; those who leave wait for neither.
        let is_mended_later = self.status == Status::Broken && !view.roster.complete() && !self.any_goes(view);
        if self.watched == Some(epoch) || is_mended_later {
            return;
        }
        self.watched = Some(epoch);
        view.out.push(Effect::WatchCommit { query, epoch });
    }

    /// The engine is to have another number of members.
    pub(crate) fn resize(&mut self, view: &mut View<'_>) {
        self.shifted = 0;
        self.member_up(view);
    }

    /// It is to have the number from before after all: what has moved since moves back.
    pub(crate) fn turn_back(&mut self, view: &mut View<'_>) {
        let mut moves = self.asked.iter().filter(|(_, asked)| matches!(asked, Asked::Migrate { handle: None, .. }));
        let under_way = moves.next().map(|(ticket, _)| *ticket);
        self.uneven |= self.shifted > 0 || under_way.is_some();
        if let Some(ticket) = under_way {
            let (stamp, leader) = (self.stamp, self.members[0]);
            self.tell(leader, Request::CancelMigration { stamp, handle: ticket }, view);
        }
        self.member_up(view);
    }

    /// Whether this query is what the roster wants.
    pub(crate) fn has_settled(&self, roster: &Roster) -> bool {
        self.unsettled(roster).is_none()
    }

    /// Whether it goes back to the last epoch when it goes on.
    pub(crate) fn is_broken(&self) -> bool {
        self.status == Status::Broken && self.call.is_none()
    }

    /// What has to come before this query is what the roster wants.
    pub(crate) fn unsettled(&self, roster: &Roster) -> Option<Wait> {
        let query = || self.id.clone();
        let moves = self.asked.values().any(|asked| matches!(asked, Asked::Migrate { handle: None, .. }));
        let stays = |member: &MemberId| roster.stays(*member);
        let settled = self.status == Status::Running
            && !moves
            && !self.uneven
            && self.has_all(roster)
            && self.members.iter().all(stays);
        match &self.call {
            _ if settled => None,
            Some(Call { what: What::Regroup, .. }) => Some(Wait::Generation { query: query() }),
            Some(call) => Some(Wait::Epoch { query: query(), epoch: call.epoch }),
            None if matches!(self.status, Status::Fresh | Status::Lost | Status::Finished) => None,
            // Who has come takes part with its next batch, should there be one.
            None if self.rests
                && !(self.is_proven() && self.moves())
                && !self.members.iter().any(|member| goes(roster, *member)) =>
            {
                None
            }
            None if self.moves() => Some(Wait::Moves { query: query() }),
            None => match &self.frozen {
                Some(frozen) if self.rests && frozen.finish && frozen.sealing => Some(Wait::Finish { query: query() }),
                _ if self.rests && !self.is_proven() => Some(Wait::Restart { query: query() }),
                Some(frozen) if frozen.returned && !frozen.finish => {
                    Some(Wait::Commit { query: query(), epoch: frozen.at.epoch.unwrap_or(0) })
                }
                _ => Some(Wait::Batch { query: query() }),
            },
        }
    }

    /// Ranges that have moved for equal shares since the last rescale began, and that will.
    pub(crate) fn shifts(&self, roster: &Roster) -> (u32, u32) {
        let own = |asked: &Asked| match asked {
            Asked::Migrate { handle: None, steps, .. } => Some(steps.iter().map(Vec::len).sum::<usize>()),
            _ => None,
        };
        if let Some(ranges) = self.asked.values().find_map(own) {
            return (self.shifted, ranges as u32);
        }
        if self.has_settled(roster) || !matches!(self.status, Status::Running | Status::Broken) {
            return (self.shifted, 0);
        }
        // As if those who are there now took part.
        let joining = roster.serving().filter(|member| !self.members.contains(member));
        let members = self.members.iter().copied().chain(joining);
        let keeps = members.flat_map(|member| std::iter::repeat_n(roster.stays(member), self.threads as usize));
        let keeps: Vec<bool> = keeps.collect();
        let ranges: BTreeSet<Range> =
            self.layouts.values().flat_map(|layout| layout.balanced(&keeps)).map(|(range, _)| range).collect();
        (self.shifted, ranges.len() as u32)
    }

    // What is durable

    /// Lets manifests go that nobody can ask for any more, and begins to merge files where they are many.
    pub(super) fn retain(&mut self, view: &mut View<'_>) {
        let Some(committed) = self.committed.filter(|_| self.program.durable && self.claim.is_some()) else { return };
        let oldest = self.oldest(committed, view);
        self.kept.retain(|batch, _| *batch >= oldest);
        // A store that is slow to delete is not asked for the same again before it has answered.
        self.uncollected = self.is_collecting();
        if !self.uncollected {
            self.ask_collect(oldest, view);
        }
        let Some(base) = self.base.epoch.and_then(|last| self.kept.get(&last)) else { return };
        let running = self.status == Status::Running && self.is_grouped(view.roster);
        // Taken in by the manifest, or made of what it no longer names.
        let named = |name: &String| base.files.iter().any(|file| file.name == *name);
        self.merged.take_if(|(names, _)| !names.iter().all(named));
        if running
            && self.merged.is_none()
            && !self.is_merging()
            && base.batch >= self.merge_from
            && is_worth_merging(&base.files, view.setup.merge_files, self.members.len())
        {
            let files = base.files.clone();
            let names = files.iter().map(|file| file.name.clone()).collect();
            let (stamp, member) = (self.stamp, self.members[base.batch as usize % self.members.len()]);
            self.call_member(member, Asked::Merge { names }, Request::Merge { stamp, files }, view);
        }
    }

    fn is_collecting(&self) -> bool {
        self.asked.values().any(|asked| matches!(asked, Asked::Collect { .. } | Asked::Delete))
    }

    fn ask_collect(&mut self, oldest: u64, view: &mut View<'_>) {
        let ticket = self.ask(Asked::Collect { newest: self.kept.values().next_back().map(Manifest::name) }, view);
        let known = self.kept.values().map(Manifest::name).chain(self.read_before.keys().cloned()).collect();
        view.out.push(Effect::ReadCheckpoint { ticket, query: self.id.clone(), since: oldest, known });
    }

    /// What could not be looked at since this was under way is looked at now: no later batch may come.
    pub(super) fn collected(&mut self, view: &mut View<'_>) {
        let Some(committed) = self.committed.filter(|_| self.uncollected && !self.is_collecting()) else { return };
        self.uncollected = false;
        if self.claim.is_some() {
            self.ask_collect(self.oldest(committed, view), view);
        }
    }

    /// The oldest batch whose manifest is kept: never one behind that of the state.
    fn oldest(&self, committed: u64, view: &View<'_>) -> u64 {
        committed.saturating_sub(u64::from(view.setup.keep.max(1))).min(self.base.epoch.unwrap_or(0))
    }

    fn is_merging(&self) -> bool {
        self.asked.values().any(|asked| matches!(asked, Asked::Merge { .. }))
    }

    /// A merged file of a generation that has ended is not used.
    pub(super) fn merged_files(&mut self, names: BTreeSet<String>, answer: Result<Answer, Failure>) {
        match answer {
            Ok(Answer::Written(files)) => {
                let of_now = files.iter().all(|file| file.generation == self.stamp.generation);
                self.merged = (of_now && !files.is_empty()).then_some((names, files));
                self.unmerged = 0;
            }
            // It reads and writes all state: what cannot be read, or has no room, is not tried at every batch.
            _ => {
                self.unmerged = (self.unmerged + 1).min(LONGEST_PAUSE);
                self.merge_from = self.base.epoch.unwrap_or(0) + (1 << self.unmerged);
            }
        }
    }

    /// Deletes what the listing shows and nothing needs; `newest` is the manifest that was the last when it was asked for.
    pub(super) fn collect(&mut self, contents: &Contents, newest: Option<&String>, view: &mut View<'_>) {
        let Some(oldest) = self.committed.map(|committed| self.oldest(committed, view)) else { return };
        let ours = self.claim.as_ref().map(|claim| claim.number);
        let of_old = |name: &str| matches!(Named::parse(name), Some(Named::Manifest { batch }) if batch < oldest);
        let unreadable = || contents.manifests.iter().filter(|(_, read)| read.is_err()).map(|(name, _)| name);
        let own: BTreeSet<String> = self.kept.values().map(Manifest::name).collect();
        // Which were wanted was asked for when other ones may have been known.
        let unknown = |name: &&String| {
            matches!(Named::parse(name), Some(Named::Manifest { batch }) if batch >= oldest)
                && !own.contains(*name)
                && !self.read_before.contains_key(*name)
        };
        let unread = contents.unread.iter().find(unknown);
        let made = contents.claims.iter().rev().find(|(number, _)| Some(*number) == ours);
        let is_ours = ours == Some(contents.newest_made())
            && made.is_some_and(|(_, claim)| claim.as_ref().is_ok_and(|claim| claim.nonce == view.setup.nonce));
        let listed = |name: &String| {
            contents.unread.contains(name) || contents.manifests.iter().any(|(manifest, _)| manifest == name)
        };
        // A copy that was put back has none of it.
        let is_of_now = newest.is_none_or(listed);
        if !is_ours || !is_of_now || unread.is_some() || unreadable().any(|name| !of_old(name)) {
            return; // not ours any more, or nobody knows what is needed
        }
        let read = || contents.manifests.iter().filter_map(|(name, read)| Some((name, read.as_ref().ok()?)));
        let stays = |manifest: &Manifest| manifest.batch >= oldest;
        let past = read().filter(|(_, one)| !stays(one)).map(|(name, _)| name);
        let mut names: Vec<String> = past.chain(unreadable()).cloned().collect();
        let listed_only = contents.shown.iter().map(|(name, _)| name).chain(&contents.unread);
        let gone = listed_only.filter(|name| match Named::parse(name) {
            Some(Named::Manifest { batch } | Named::Shown { batch }) => batch < oldest,
            _ => false,
        });
        names.extend(gone.cloned());
        let files = |one: &Manifest| one.files.iter().map(|file| file.name.clone()).collect();
        let others = read().filter(|(name, one)| stays(one) && !own.contains(*name));
        let mut read_before: BTreeMap<String, Vec<String>> =
            others.map(|(name, one)| (name.clone(), files(one))).collect();
        for name in contents.unread.iter().filter(|name| !of_old(name)) {
            read_before.extend(self.read_before.remove_entry(name));
        }
        self.read_before = read_before;
        let listed = read().map(|(_, one)| one).filter(|one| stays(one));
        let mut needed: BTreeSet<&str> =
            listed.chain(self.kept.values()).flat_map(|one| &one.files).map(|file| file.name.as_str()).collect();
        needed.extend(self.read_before.values().flatten().map(String::as_str));
        needed.extend(self.merged.iter().flat_map(|(_, files)| files).map(|file| file.name.as_str()));
        if let Some(frozen) = &self.frozen {
            needed.extend(frozen.files.values().flatten().map(|file| file.name.as_str()));
        }
        let written = !self.is_merging();
        let of_old = |file: &&DataFile| {
            let mine = Some(file.generation >> CLAIM_BITS) <= ours;
            file.generation < self.stamp.generation || (written && mine && file.epoch < oldest)
        };
        let unnamed = contents.files.iter().filter(of_old).filter(|file| !needed.contains(file.name.as_str()));
        names.extend(unnamed.map(|file| file.name.clone()));
        let older = contents.claims.iter().map(|(number, _)| *number).filter(|number| Some(*number) < ours);
        names.extend(older.map(Claim::name));
        if !names.is_empty() {
            let ticket = self.ask(Asked::Delete, view);
            view.out.push(Effect::Delete { ticket, query: self.id.clone(), names });
        }
    }
}

impl Recut {
    fn ranges(&self) -> &[Range] {
        match self {
            Recut::Split { ranges, .. } | Recut::Merge { ranges } => ranges,
        }
    }

    /// The ranges of a layout become the others; in part, where it is refused.
    fn apply(&self, layout: &mut Layout) -> Result<(), LayoutError> {
        let mut sorted = self.ranges().to_vec();
        sorted.sort_unstable_by_key(|range| (range.first(), range.length()));
        if let Some(pair) = sorted.windows(2).find(|pair| pair[0].intersects(pair[1])) {
            return Err(LayoutError::Overlap(pair[0], pair[1]));
        }
        self.ranges().iter().try_for_each(|range| match self {
            Recut::Split { by, .. } => layout.split(*range, *by),
            Recut::Merge { .. } => layout.merge(*range),
        })
    }
}

/// Files are merged whatever that costs when so many times as many have come as are to be: a manifest names them all.
const TOO_MANY: usize = 8;
/// Each member writes a file a batch: so many of each may be there before that, where members are many.
const OF_EACH: usize = 64;
/// After a merge that failed so many batches pass, to the power of two, before the next.
const LONGEST_PAUSE: u32 = 8;
/// What has come is much from here on, however few files it is in: 64 MiB.
const MUCH: u64 = 64 << 20;
/// Of what is less so many may be there: it takes no room, and a merge takes requests.
const FEW: usize = 16;

/// Whether so much has come, or in so many files, that it pays to write all of it anew.
fn is_worth_merging(files: &[DataFile], many: usize, members: usize) -> bool {
    let sum = |files: &[DataFile]| files.iter().map(|file| file.length).fold(0, u64::saturating_add);
    // What was merged last is in front, of one epoch and generation; or else what the first batch wrote.
    let of_first =
        |file: &DataFile| files.first().map(|one| (one.epoch, one.generation)) == Some((file.epoch, file.generation));
    let merged = files.iter().take_while(|file| of_first(file)).count();
    let came = files.len() - merged;
    let largest = files.iter().map(|file| file.length).max().unwrap_or(0);
    let base = sum(&files[..merged]).max(largest);
    let rest = sum(files) - base;
    let pays = rest.saturating_mul(2) >= base;
    // Of a state that changes wholly each batch adds all of it: it would be there as often as there may be files.
    let outgrown = rest / 2 >= base && (rest >= MUCH || came >= FEW);
    outgrown || (came >= many && (pays || came >= (TOO_MANY * many).max(OF_EACH * members.saturating_sub(1))))
}

/// Whether a member is there and leaves.
fn goes(roster: &Roster, member: MemberId) -> bool {
    roster.alive(member) && !roster.stays(member)
}

fn refused(reason: impl Into<String>) -> EngineError {
    EngineError::Refused(reason.into())
}

/// A range as people name it: the number of a bin, or prefix and bits of a part.
fn told(range: Range, bits: u8) -> String {
    match range.length() == bits {
        true => range.prefix().to_string(),
        false => format!("({}, {})", range.prefix(), range.length()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Files of these lengths, each of another epoch.
    fn files(lengths: impl IntoIterator<Item = u64>) -> Vec<DataFile> {
        (0..).zip(lengths).flat_map(|(epoch, length)| of_epoch(epoch, [length])).collect()
    }

    /// Files of these lengths that one epoch has, or one merge.
    fn of_epoch(epoch: u64, lengths: impl IntoIterator<Item = u64>) -> Vec<DataFile> {
        let file = |length| DataFile { name: String::new(), length, checksum: 0, epoch, generation: 0 };
        lengths.into_iter().map(file).collect()
    }

    #[test]
    fn state_is_written_anew_when_half_of_it_has_changed_or_files_are_too_many() {
        let grown =
            |large: u64, small: usize| is_worth_merging(&files([large].into_iter().chain(vec![10; small])), 64, 2);
        assert!(!grown(1_000, 63), "few files");
        assert!(grown(1_000, 64));
        assert!(!grown(1_000_000, 64) && !grown(1_000_000, 511), "all of it for 5 KB");
        assert!(grown(1_000_000, 512));
        assert!(!grown(2_000, 99) && grown(2_000, 100));
    }

    /// Of a state of 16 gigabytes, all of which each batch changes, on all members or on one; what is merged is one file, or several.
    #[test]
    fn a_state_that_changes_wholly_is_there_few_times() {
        const STATE: u64 = 16 << 30;
        for (members, writers, parts) in
            [(1, 1, 1), (2, 2, 1), (4, 4, 1), (16, 16, 1), (16, 1, 1), (1, 1, 4), (4, 4, 4), (1, 1, 100)]
        {
            let (mut held, mut peak, mut written, mut changed) = (Vec::new(), 0, 0, 0);
            for epoch in 1..=400 {
                if is_worth_merging(&held, 64, members) {
                    held = of_epoch(epoch - 1, vec![STATE / parts as u64; parts]);
                    written += STATE;
                }
                held.extend(of_epoch(epoch, vec![STATE / writers as u64; writers]));
                changed += STATE;
                peak = peak.max(held.iter().map(|file| file.length).sum());
            }
            assert!(
                peak <= 4 * STATE,
                "{} times with {members} members, {writers} of which write, and {parts} parts",
                peak / STATE
            );
            assert!(written <= changed, "{written} bytes were written anew for {changed}");
        }
    }

    /// Each batch adds keys of its own: nothing becomes less by a merge. The files of what is merged are no reason for the next one.
    #[test]
    fn a_state_that_only_grows_is_written_anew_for_what_has_come() {
        const BATCH: u64 = 1 << 28;
        for (members, part) in [(1, u64::MAX), (2, u64::MAX), (1, 1 << 28), (2, 1 << 26)] {
            let (mut held, mut written, mut state) = (Vec::new(), 0, 0);
            for epoch in 1..=400 {
                if is_worth_merging(&held, 64, members) {
                    let size = state.min(part);
                    held = of_epoch(epoch - 1, vec![size; (state / size) as usize]);
                    written += state;
                }
                held.extend(of_epoch(epoch, vec![BATCH / members as u64; members]));
                state += BATCH;
            }
            assert!(written <= 3 * state, "{written} bytes were written anew for {state}");
        }
    }

    #[test]
    fn few_files_of_little_are_left_as_they_are() {
        let wholly = |state: u64, batches: usize| is_worth_merging(&files(vec![state; 1 + batches]), 64, 1);
        assert!(!wholly(1_000, 15) && wholly(1_000, 16), "15 KB need no request");
        assert!(!wholly(1 << 26, 1) && wholly(1 << 26, 2));
        let batches = |count| (0..count).flat_map(|epoch| of_epoch(epoch, [1 << 30; 16])).collect::<Vec<_>>();
        assert!(!is_worth_merging(&batches(2), 64, 16) && is_worth_merging(&batches(3), 64, 16));
        assert!(!is_worth_merging(&of_epoch(9, [1 << 32; 1_000]), 64, 1), "one merge that made a thousand");
        assert!(!is_worth_merging(&[], 64, 1));
    }

    #[test]
    fn lengths_that_no_file_has_are_not_added_up() {
        assert!(is_worth_merging(&files([i64::MAX as u64; 65]), 64, 2));
    }

    /// Of a state of a million bytes, of which each batch changes some.
    #[test]
    fn what_is_written_anew_is_some_times_what_has_changed() {
        for changes in [100, 3_000, 100_000] {
            let (mut held, mut written, mut changed) = (files([1_000_000]), 0, 0);
            for _ in 0..5_000 {
                held.extend(files([changes]));
                changed += changes;
                if is_worth_merging(&held, 64, 1) {
                    held = files([1_000_000]);
                    written += 1_000_000;
                }
            }
            // At most one in 8 * 64 batches, or for half of the state.
            let most = 2 * changed + 1_000_000 * (5_000 / 512);
            assert!(written <= most, "{written} bytes were written anew for {changed}");
        }
    }
}
