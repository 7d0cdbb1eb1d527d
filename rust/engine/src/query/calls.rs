//! Losses of members, further attempts, and the ends of calls.
//!
//! Invariants: a loss is answered in the phase in which it is noticed, or when what is under way there has ended by itself; every call ends, after so
//! many attempts at the latest.

use super::{Asked, At, Call, Phase, Query, Status, View, What};
use crate::error::{EngineError, Failure, Kind};
use crate::protocol::{Effect, Event, MemberId, Request};

impl Query {
    // Losses

    pub(crate) fn member_lost(&mut self, member: MemberId, reason: &str, view: &mut View<'_>) {
        if !self.members.contains(&member) {
            return;
        }
        let reason = format!("member {} is gone: {reason}", member.0);
        self.gone = Some(member);
        self.broke(&reason, view);
        let Some(call) = &mut self.call else { return };
        match &mut call.phase {
            Phase::Stopping { waiting, .. } => {
                waiting.remove(&member);
                self.all_stopped(view);
            }
            Phase::Loading { .. }
            | Phase::Starting { .. }
            | Phase::Discarding { .. }
            | Phase::FeedFailed { .. }
            | Phase::Releasing { .. }
            | Phase::Puzzled { .. } => self.again(reason, view),
            Phase::Serving(_) => self.serve(view),
            // The stage or the wait ends by itself.
            Phase::Feeding { .. } | Phase::Gathering { .. } | Phase::Claiming => {}
        }
    }

    /// The generation has come to its end before its time.
    pub(super) fn broke(&mut self, reason: &str, view: &mut View<'_>) {
        self.trouble = reason.to_owned();
        if self.status == Status::Running {
            self.status = Status::Broken;
        }
        self.cut_off(view);
    }

    pub(super) fn any_lost(&self, view: &View<'_>) -> bool {
        self.members.iter().any(|member| !view.roster.alive(*member))
    }

    /// Attempt once more, with another generation.
    pub(super) fn again(&mut self, reason: String, view: &mut View<'_>) {
        if self.status == Status::Running {
            self.status = Status::Broken;
        }
        let Some(call) = &mut self.call else { return };
        call.tries += 1;
        let (epoch, tries) = (call.epoch, call.tries);
        if tries >= view.setup.tries {
            return self.fail(EngineError::Broken { epoch, tries, reason }, view);
        }
        self.thaw(epoch);
        self.begin_generation(view);
    }

    /// A member cannot go on with what the attempt asked of it.
    pub(super) fn hindered(&mut self, failure: Failure, view: &mut View<'_>) {
        match failure.kind {
            Kind::User | Kind::Data | Kind::Store => {
                self.broke(&failure.message, view);
                self.fail(EngineError::Member(failure), view);
            }
            _ if self.any_lost(view) => self.again(failure.message, view),
            _ => {
                let Some(call) = &mut self.call else { return };
                if let Phase::Puzzled { failure: first } = &mut call.phase {
                    if first.kind == Kind::Echo {
                        *first = failure;
                    }
                    return;
                }
                // Another member has failed, and says so itself, or is gone: the driver's own connection tells which.
                call.phase = Phase::Puzzled { failure: failure.clone() };
                self.asked.retain(|_, asked| !matches!(asked, Asked::Stop(_) | Asked::Load { .. } | Asked::Pause(_)));
                self.broke(&failure.message, view);
                self.timer(Asked::Loss, view.setup.loss_ms, view);
            }
        }
    }

    pub(super) fn no_loss(&mut self, view: &mut View<'_>) {
        let Some(call) = &mut self.call else { return };
        match &mut call.phase {
            // Ours: trying again would give the same.
            Phase::Puzzled { failure } if failure.kind == Kind::Internal => {
                let failure = failure.clone();
                self.fail(EngineError::Member(failure), view);
            }
            Phase::Puzzled { failure } => {
                let reason = failure.message.clone();
                self.again(reason, view);
            }
            Phase::FeedFailed { failure } => {
                let (epoch, reason) = (call.epoch, failure.message.clone());
                self.fail(EngineError::Feed { epoch, reason }, view);
            }
            Phase::Serving(serving) => {
                serving.patient = true;
                self.serve(view);
            }
            _ => {}
        }
    }

    // Ends of calls

    pub(super) fn stop(&mut self, view: &mut View<'_>) {
        if let Some(epoch) = self.take_next() {
            view.out.push(Effect::Fail { query: self.id.clone(), epoch, error: EngineError::Abandoned { epoch } });
        }
        if let Some(Call { what: What::Batch | What::Finish, epoch, .. }) = self.call {
            self.fail(EngineError::Abandoned { epoch }, view);
        }
    }

    pub(super) fn fail(&mut self, error: EngineError, view: &mut View<'_>) {
        let Some(call) = self.call.take() else { return };
        self.forget_questions();
        self.taken = None;
        // Nothing was asked of the workers before the release, and nothing is under way behind it.
        if !matches!(call.phase, Phase::Claiming | Phase::Serving(_) | Phase::Feeding { .. } | Phase::FeedFailed { .. })
            && self.status == Status::Running
        {
            self.broke(&error.to_string(), view);
        }
        if matches!(error, EngineError::Fenced { .. } | EngineError::StateLost { .. }) {
            self.lose(&error, view);
        }
        // What waited for a generation that has not begun is told so.
        self.next_turn(view);
        if call.what == What::Regroup {
            self.ungrouped = true;
            return self.go_on(view);
        }
        if matches!(error, EngineError::Finished { .. }) {
            self.uncommitted = None; // nor will it be
        }
        // Of a batch that Spark may commit at any moment nothing is known yet.
        self.rests |= !matches!(error, EngineError::Uncommitted { .. });
        let goes_on = self.next.is_none() && !matches!(error, EngineError::Closed);
        view.out.push(Effect::Fail { query: self.id.clone(), epoch: call.epoch, error });
        match goes_on && self.any_goes(view) {
            // They waited for the end of the call. Those who could not be grouped anew are not asked again and again.
            true => self.regroup(view),
            false => self.go_on(view),
        }
    }

    pub(super) fn complete(&mut self, view: &mut View<'_>) {
        let Some(call) = self.call.take() else { return };
        self.forget_questions();
        if call.what != What::Regroup {
            if let Some(frozen) = &mut self.frozen {
                frozen.returned = true;
            }
            self.uncommitted = None;
            view.out.push(Effect::Complete { query: self.id.clone(), epoch: call.epoch });
            if call.what == What::Finish && self.status != Status::Finished {
                (self.status, self.ends_again) = (Status::Finished, false);
                "the query is finished".clone_into(&mut self.trouble);
                self.give_up_moves(view);
                for member in self.members.clone() {
                    self.tell(member, Request::Conclude, view);
                }
            } else if call.what == What::Batch && !self.program.durable {
                // What a lost member takes along is lost; whatever else happens, the epoch is served as it is.
                for member in self.members.clone() {
                    self.tell(member, Request::Settle { epoch: call.epoch }, view);
                }
            }
        }
        // What waited for a generation that has not begun is told so.
        self.next_turn(view);
        match call.what == What::Regroup && self.next.is_none() {
            // Who came or is to go meanwhile has not been taken in: no batch need come.
            true => self.regroup(view),
            false => self.go_on(view),
        }
    }

    /// Takes away what waits for the end of a regroup; its epoch.
    fn take_next(&mut self) -> Option<u64> {
        match self.next.take()? {
            Event::Batch { epoch, .. } => Some(epoch),
            _ => Some(self.next_epoch()),
        }
    }

    /// What waited for the end of a call.
    fn go_on(&mut self, view: &mut View<'_>) {
        match self.next.take() {
            Some(event) => self.step(event, view),
            None if self.gives_way(view) => {}
            None => {
                self.settle(view);
                self.watch(view);
            }
        }
    }

    /// The state is no longer ours.
    fn lose(&mut self, error: &EngineError, view: &mut View<'_>) {
        self.trouble = match error {
            // It is told in such an error again.
            EngineError::StateLost { reason, .. } => reason.clone(),
            other => other.to_string(),
        };
        self.start_over(view);
        self.status = if matches!(error, EngineError::Fenced { .. }) { Status::Fresh } else { Status::Lost };
    }

    /// Forgets everything here and at the members: what is durable is read again.
    pub(super) fn start_over(&mut self, view: &mut View<'_>) {
        if self.trouble.is_empty() {
            "its state is read again".clone_into(&mut self.trouble);
        }
        self.give_up_moves(view);
        for member in std::mem::take(&mut self.members) {
            if view.roster.alive(member) {
                self.tell(member, Request::Drop, view);
            }
        }
        self.status = Status::Fresh;
        self.claim = None;
        self.layouts.clear();
        self.base = At::default();
        self.frozen = None;
        self.kept.clear();
        self.shares.clear();
        (self.shown, self.note, self.noted, self.fed, self.merged) = (None, None, None, None, None);
        (self.uneven, self.reread, self.keeps, self.settled) = (false, false, false, None);
        (self.unmerged, self.merge_from) = (0, 0);
    }

    pub(crate) fn close(&mut self, view: &mut View<'_>) {
        if self.trouble.is_empty() {
            self.trouble = EngineError::Closed.to_string();
        }
        self.give_up_moves(view);
        if let Some(epoch) = self.take_next() {
            view.out.push(Effect::Fail { query: self.id.clone(), epoch, error: EngineError::Closed });
        }
        self.fail(EngineError::Closed, view);
    }
}
