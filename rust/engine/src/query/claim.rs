//! Reading a checkpoint, claiming it, and which batch may be asked for.
//!
//! Invariants: state belongs to one Spark query id. Served are the batch after the last one, and the last one again. A manifest serves only
//! who asks for the batch after its own: anything else would drop a committed batch silently.

use super::{Asked, At, Call, Frozen, Phase, Query, Serving, Sink, Stage, Status, View, What};
use crate::error::EngineError;
use crate::manifest::{CLAIM_BITS, Claim, Contents, Shown};
use crate::protocol::{Effect, MemberId, Request};

impl Query {
    /// Spark calls with a batch.
    pub(super) fn batch(
        &mut self,
        epoch: u64,
        (clock_ms, planned_ms): (i64, Option<i64>),
        committed: Option<u64>,
        view: &mut View<'_>,
    ) {
        if let Some(call) = &self.call {
            let error = EngineError::Busy { running: call.epoch, asked: epoch };
            return view.out.push(Effect::Fail { query: self.id.clone(), epoch, error });
        }
        let (what, phase) = (What::Batch, Phase::Claiming);
        self.call = Some(Call { what, epoch, clock_ms, planned_ms, tries: 0, sink_calls: 0, phase });
        // Who keeps the log tells how far it goes: one that was put back from a copy ends before what was known here.
        self.committed = if self.program.durable { committed } else { self.committed.max(committed) };
        (self.watched, self.rests, self.ungrouped) = (None, false, false);
        if let Some(error) = self.misfit.clone() {
            return self.fail(error, view);
        }
        if self.program.durable && committed != epoch.checked_sub(1) {
            let last = committed.map_or_else(|| "is empty".to_owned(), |last| format!("ends with batch {last}"));
            let reason = format!(
                "batch {epoch} is asked for while Spark's commit log {last}: it was changed by hand, or written behind the \
                 batches (asyncProgressTrackingEnabled), where state cannot be durable; put it back, or turn that off"
            );
            return self.fail(EngineError::Refused(reason), view);
        }
        if self.program.durable && self.claim.is_none() {
            return self.read_checkpoint(1, view);
        }
        if std::mem::take(&mut self.reread) && self.program.durable {
            self.start_over(view);
            return self.read_checkpoint(1, view);
        }
        if self.shown_of_another(epoch, planned_ms) {
            // Its results are undone. What its sink had is for the checkpoint's note to tell; in memory nothing depends on it.
            match self.program.durable {
                true => {
                    self.start_over(view);
                    return self.read_checkpoint(1, view);
                }
                false => (self.shown, self.note) = (None, None),
            }
        }
        if self.is_planned_anew(epoch, planned_ms) {
            // Its offsets were removed, or put back from a copy of before: what was made of it is of other rows.
            if self.program.durable {
                self.start_over(view);
                return self.read_checkpoint(1, view);
            }
            if self.program.plan.operators.is_empty() {
                // Nothing depends on what was before.
                self.frozen = None;
                (self.shown, self.note) = (None, None);
                self.base.epoch = epoch.checked_sub(1);
                return self.go(view);
            }
            let reason = format!(
                "batch {epoch} was planned anew: Spark's log was put back to before it, and the state in memory is that \
                 after it; begin again with another engine, or engine.drop the query"
            );
            return self.fail(EngineError::Refused(reason), view);
        }
        match self.admit(epoch) {
            Ok(()) => self.go(view),
            // Logs and state have gone different ways, through another engine or by hand: what is durable decides.
            Err(EngineError::OutOfOrder { .. } | EngineError::StateLost { .. }) if self.program.durable => {
                self.start_over(view);
                self.read_checkpoint(1, view);
            }
            Err(error) => self.fail(error, view),
        }
    }

    /// The user ends the input.
    pub(super) fn finish(&mut self, clock_ms: i64, committed: Option<u64>, view: &mut View<'_>) {
        // A final epoch whose sink failed is served again.
        let again = self.frozen.as_ref().is_some_and(|frozen| frozen.finish);
        let at = self.frozen.as_ref().filter(|_| !again).map_or(&self.base, |frozen| &frozen.at).clone();
        let durable = self.program.durable;
        let behind = durable && self.status != Status::Finished && (self.claim.is_none() || at.epoch < committed);
        let known = if behind { committed } else { at.epoch };
        let epoch = match (self.status, &self.frozen) {
            // An engine before this one has run it.
            (Status::Finished, None) => self.base.epoch.unwrap_or(0),
            _ => known.or(committed).map_or(0, |last| last + 1),
        };
        if let Some(call) = &self.call {
            let error = EngineError::Busy { running: call.epoch, asked: epoch };
            return view.out.push(Effect::Fail { query: self.id.clone(), epoch, error });
        }
        let (what, phase) = (What::Finish, Phase::Claiming);
        self.call = Some(Call { what, epoch, clock_ms, planned_ms: None, tries: 0, sink_calls: 0, phase });
        match self.status {
            Status::Finished => match self.lost_result(view) {
                None => return self.complete(view),
                // It comes of the batch before once more.
                Some(_) if durable => {
                    self.start_over(view);
                    self.ends_again = true;
                    return self.read_checkpoint(1, view);
                }
                Some(member) => {
                    // What others have stays, as far as it goes.
                    self.call = None;
                    let reason = format!("member {} is gone with a part of the results", member.0);
                    let error = EngineError::StateLost { epoch, reason, member: Some(member) };
                    return view.out.push(Effect::Fail { query: self.id.clone(), epoch, error });
                }
            },
            Status::Lost => {
                let (reason, member) = (self.trouble.clone(), self.gone);
                return self.fail(EngineError::StateLost { epoch, reason, member }, view);
            }
            _ => {}
        }
        // Another engine's sink may have been called with it.
        let noted = self.shown.map(|(epoch, _)| epoch).filter(|_| self.note.is_some());
        if let Some(epoch) = self.uncommitted.max(noted).filter(|epoch| Some(*epoch) > committed) {
            return self.fail(EngineError::Uncommitted { epoch }, view);
        }
        match (known, committed) {
            (None, Some(_)) => return self.fail(nothing_held(epoch), view),
            (None, None) => {
                self.call = None;
                return view.out.push(Effect::Complete { query: self.id.clone(), epoch });
            }
            _ => {}
        }
        let waits = self.frozen.as_ref().is_some_and(|frozen| !frozen.returned) && !again;
        // Another engine has done the batch that failed here, and Spark has committed it: nobody asks for it again.
        let elsewhere = durable && waits && committed >= at.epoch;
        if (behind && self.claim.is_some()) || elsewhere {
            self.start_over(view);
        }
        if (waits && !elsewhere) || (durable && committed != known) {
            return self.fail(EngineError::Uncommitted { epoch: epoch - 1 }, view);
        }
        (self.rests, self.ungrouped) = (false, false);
        if durable && self.claim.is_none() {
            return self.read_checkpoint(1, view);
        }
        if !again {
            self.advance();
        }
        self.go(view);
    }

    /// A member that is gone with rows of the final epoch.
    fn lost_result(&self, view: &View<'_>) -> Option<MemberId> {
        let pieces = self.frozen.iter().filter(|frozen| frozen.finish).flat_map(|frozen| &frozen.pieces);
        let had = pieces.filter(|piece| piece.rows + piece.late_rows + piece.side_rows.iter().sum::<u64>() > 0);
        had.map(|piece| piece.member).find(|member| !view.roster.alive(*member))
    }

    /// The last epoch is final: what undoes it, and its outputs, are no longer needed.
    pub(super) fn advance(&mut self) {
        if let Some(frozen) = self.frozen.take() {
            self.base = frozen.at;
            (self.shown, self.note) = (None, None);
        }
    }

    /// Whether the batch that was done last is another one than that of its number now.
    fn is_planned_anew(&self, epoch: u64, planned_ms: Option<i64>) -> bool {
        let last = self.frozen.as_ref().filter(|last| !last.finish && last.at.epoch == Some(epoch));
        last.is_some_and(|last| differ(last.planned_ms, planned_ms))
    }

    /// Whether the sink was called with another batch of that number here, which came to nothing.
    fn shown_of_another(&self, epoch: u64, planned_ms: Option<i64>) -> bool {
        let shown = self.shown.filter(|(shown, _)| *shown == epoch && self.note.is_none() && self.frozen.is_none());
        shown.is_some() && differ(self.shown_ms, planned_ms)
    }

    /// Refuses any batch that the state does not belong to.
    fn admit(&mut self, epoch: u64) -> Result<(), EngineError> {
        let at = self.frozen.as_ref().map_or(self.base.epoch, |frozen| frozen.at.epoch);
        if self.ends_again {
            // The query is finished, whatever became of making its results again.
            return Err(EngineError::Finishing { after: self.base.epoch.unwrap_or(0), asked: epoch });
        }
        match self.status {
            Status::Finished => {
                let after = at.and_then(|at| at.checked_sub(1)).unwrap_or(0);
                return Err(EngineError::Finished { after, asked: epoch });
            }
            Status::Lost if epoch > 0 => {
                return Err(EngineError::StateLost { epoch, reason: self.trouble.clone(), member: self.gone });
            }
            Status::Lost => self.status = Status::Fresh,
            _ => {}
        }
        if let Some(frozen) = self.frozen.as_ref().filter(|frozen| frozen.finish) {
            if frozen.sealing {
                // Its manifest may be there, or come yet: the next engine would take the query for finished.
                let after = at.and_then(|at| at.checked_sub(1)).unwrap_or(0);
                return Err(EngineError::Finishing { after, asked: epoch });
            }
            // A final epoch that came to nothing is undone: input goes on.
            self.frozen = None;
            self.status = Status::Broken;
        }
        match &self.frozen {
            Some(frozen) if frozen.at.epoch == Some(epoch) => return Ok(()),
            Some(frozen)
                if frozen.at.epoch.map(|last| last + 1) == Some(epoch) && (frozen.returned || frozen.durable) =>
            {
                self.advance();
                return Ok(());
            }
            Some(_) => {}
            None if self.base.epoch.map_or(0, |last| last + 1) == epoch => return Ok(()),
            None if self.base.epoch.is_none() && self.program.plan.operators.is_empty() => {
                self.base.epoch = epoch.checked_sub(1);
                return Ok(());
            }
            None => {}
        }
        match at {
            Some(at) => Err(EngineError::OutOfOrder { asked: epoch, at }),
            None => Err(nothing_held(epoch)),
        }
    }

    /// Admitted: serve again, feed, or have workers first.
    pub(super) fn go(&mut self, view: &mut View<'_>) {
        let Some(call) = &self.call else { return };
        let epoch = call.epoch;
        if let Some(frozen) = self.frozen.as_ref().filter(|frozen| frozen.at.epoch == Some(epoch)) {
            if frozen.returned && !self.program.durable && frozen.output != self.program.output {
                // Nothing undoes it any more.
                return self.fail(EngineError::OtherOutput { epoch }, view);
            }
            if self.frozen.as_ref().is_some_and(|frozen| self.servable(frozen, view)) {
                return self.serve_again(view);
            }
            self.thaw(epoch);
            return self.begin_generation(view);
        }
        if let Some(last) = self.base.epoch {
            for member in self.members.clone() {
                self.tell(member, Request::CloseEpoch { epoch: last }, view);
            }
        }
        self.keeps = self.moves();
        self.retain(view);
        match self.status == Status::Running && self.is_grouped(view.roster) {
            true => {
                self.even_out(view);
                self.feed(view);
            }
            false => self.begin_generation(view),
        }
    }

    /// What came of an epoch is given up, to be made again; the sink may have had it.
    pub(super) fn thaw(&mut self, epoch: u64) {
        if let Some(frozen) = self.frozen.take_if(|frozen| frozen.at.epoch == Some(epoch))
            && !frozen.finish
        {
            self.uncommitted = Some(epoch);
        }
    }

    /// Whether outputs and records of an epoch still stand, all of them, and are of the columns that are wanted now.
    fn servable(&self, frozen: &Frozen, view: &View<'_>) -> bool {
        frozen.stamp == self.stamp
            && frozen.output == self.program.output
            && frozen.members.iter().all(|member| view.roster.alive(*member))
    }

    fn serve_again(&mut self, view: &mut View<'_>) {
        if let Some(call) = &mut self.call {
            call.phase =
                Phase::Serving(Serving { sink: Sink::Checking, gone: None, patient: false, stage: Stage::Sinking });
        }
        self.begin_serving(view);
    }

    // The checkpoint

    pub(super) fn read_checkpoint(&mut self, tries: u32, view: &mut View<'_>) {
        let ticket = self.ask(Asked::Checkpoint { tries }, view);
        // A manifest serves only who asks for the batch after its own.
        let since = self.call.as_ref().map_or(0, |call| call.epoch.saturating_sub(1));
        view.out.push(Effect::ReadCheckpoint { ticket, query: self.id.clone(), since, known: Vec::new() });
    }

    /// Restore from here, if it is ours.
    pub(super) fn read(&mut self, contents: &Contents, view: &mut View<'_>) {
        let Some(call) = &self.call else { return };
        let (what, epoch) = (call.what, call.epoch);
        let taken = self.taken.take();
        let by = contents.newest_claim();
        if let Some(claim) = taken.as_ref().map(|taken| taken.number).filter(|claim| *claim < by) {
            return self.fail(EngineError::Fenced { claim, by }, view);
        }
        let ends = contents.manifests.iter().filter_map(|(_, read)| read.as_ref().ok()).find(|one| one.finished);
        if let Some(end) = ends.filter(|end| taken.is_some() && what == What::Batch && end.batch >= epoch) {
            return self.fail(EngineError::Finished { after: end.batch, asked: epoch }, view);
        }
        match self.restore_point(contents, epoch, what, view) {
            Ok(Some(from)) if taken.as_ref().is_some_and(|taken| taken.from == from) => {
                self.claim = taken;
                self.go(view);
            }
            Ok(Some(from)) => {
                let setup = view.setup;
                self.displaces = taken.is_none() && contents.held;
                // In a checkpoint that was put back claims are older than those this engine has made: no generation comes twice.
                let newest = contents.newest_claim().max(self.stamp.generation >> CLAIM_BITS);
                let (number, nonce, registry) = (newest + 1, setup.nonce, setup.registry.clone());
                self.make_claim(Claim { number, nonce, registry, from }, 1, view);
            }
            Ok(None) => {
                self.status = Status::Finished;
                self.complete(view);
            }
            Err(error) => self.fail(error, view),
        }
    }

    /// Takes over what the batch before `epoch` left; returns the manifest's name, or None where the final epoch that is asked for
    /// has run.
    fn restore_point(
        &mut self,
        contents: &Contents,
        epoch: u64,
        what: What,
        view: &View<'_>,
    ) -> Result<Option<Option<String>>, EngineError> {
        if let Some(newer) = contents.newer_claim() {
            return Err(newer.into());
        }
        if contents.held && !view.setup.takeover {
            return Err(EngineError::Held { claim: contents.newest_claim() });
        }
        let read = contents.manifests.iter().filter_map(|(_, read)| read.as_ref().ok());
        if let Some(other) = read.map(|manifest| &manifest.query).find(|query| **query != self.id) {
            return Err(EngineError::OtherQuery { query: self.id.clone(), found: other.clone() });
        }
        self.base = At::default();
        self.kept.clear();
        let told = contents.shown(epoch).filter(|told| told.columns == self.program.columns && what == What::Batch);
        self.shown = told.map(|told| (epoch, (told.rows, told.hash)));
        self.note = told.map(Shown::name);
        let Some(before) = epoch.checked_sub(1) else { return Ok(Some(None)) };
        let ends_again = what == What::Finish && self.ends_again;
        let serving = if ends_again { contents.unfinished(before)? } else { contents.serving(before)? };
        let Some(manifest) = serving else {
            return match self.program.plan.operators.is_empty() {
                true => {
                    self.base.epoch = Some(before);
                    Ok(Some(None))
                }
                false => Err(EngineError::NoManifest { asked: epoch, newest: contents.newest_batch() }),
            };
        };
        manifest.plan.check(&self.program.plan)?;
        if manifest.finished {
            return match what {
                What::Finish => {
                    self.base.epoch = Some(epoch);
                    Ok(None)
                }
                _ => Err(EngineError::Finished { after: before, asked: epoch }),
            };
        }
        if what == What::Finish && contents.shown(epoch).is_some() {
            // The final epoch writes no note: the sink was called with a batch of that number, which Spark has not committed.
            return Err(EngineError::Uncommitted { epoch });
        }
        // Where a batch may follow, somebody has taken the end back by hand.
        self.ends_again &= what == What::Finish;
        self.base = At {
            epoch: Some(before),
            watermarks: manifest.watermarks.clone(),
            watermark: manifest.watermark.unwrap_or_else(|| self.program.watermark(&manifest.watermarks, &[], 0)),
            heard_ms: manifest.heard_ms.clone(),
            clock_ms: manifest.clock_ms,
            late_rows: manifest.late_rows,
        };
        self.kept.insert(before, manifest.clone());
        Ok(Some(Some(manifest.name())))
    }

    pub(super) fn make_claim(&mut self, claim: Claim, tries: u32, view: &mut View<'_>) {
        let ticket = self.ask(Asked::Claim { claim: claim.clone(), tries }, view);
        view.out.push(Effect::CreateClaim { ticket, query: self.id.clone(), claim });
    }

    pub(super) fn claimed(&mut self, claim: Claim, made: bool, view: &mut View<'_>) {
        if !made {
            // Somebody else was faster, and serves now.
            return match view.setup.takeover {
                true => self.read_checkpoint(1, view),
                false => self.fail(EngineError::Held { claim: claim.number }, view),
            };
        }
        self.stamp.generation = claim.number << CLAIM_BITS;
        if std::mem::take(&mut self.displaces) {
            // Whoever served until then may have come further since the checkpoint was read, and comes no further now.
            self.taken = Some(claim);
            return self.read_checkpoint(1, view);
        }
        self.claim = Some(claim);
        self.go(view);
    }

    /// Reads the claims again, before something that only one engine may do.
    pub(super) fn check_claim(&mut self, tries: u32, view: &mut View<'_>) {
        let ticket = self.ask(Asked::Claims { tries }, view);
        let claim = self.claim.as_ref().map_or(0, |claim| claim.number);
        view.out.push(Effect::ReadClaims { ticket, query: self.id.clone(), claim });
    }
}

/// Whether two times of Spark's for a batch of one number are of two batches, as far as both are known.
fn differ(then: Option<i64>, now: Option<i64>) -> bool {
    matches!((then, now), (Some(then), Some(now)) if then != now)
}

fn nothing_held(epoch: u64) -> EngineError {
    let reason =
        "this engine holds none of the batches before it; it died with the engine that ran them, or was dropped";
    EngineError::StateLost { epoch, reason: reason.to_owned(), member: None }
}
