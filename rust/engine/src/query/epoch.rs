//! An epoch: rows come, workers run, then files are written while the sink runs, then the manifest, then the call returns.
//!
//! Invariants: state, output and manifest of a batch are of one attempt; a manifest is written when all files are and the sink has returned, never
//! before; claims are read again before sink, manifest and return. A sink is called again only for the loss of a member, and so often.

use std::collections::{BTreeMap, BTreeSet};

use super::{Asked, At, Call, Frozen, Phase, Query, Rows, Serving, Sink, Stage, View, What};
use crate::error::{EngineError, Failure, Kind};
use crate::manifest::{Manifest, Shown};
use crate::protocol::{Answer, Commit, Effect, MemberId, Piece, Receipt, Release, Request};

impl Query {
    // Rows come

    pub(super) fn feed(&mut self, view: &mut View<'_>) {
        let Some(call) = &mut self.call else { return };
        let epoch = call.epoch;
        if call.what == What::Finish {
            call.phase = Phase::Feeding { receipts: Default::default(), twice: false };
            return self.release(view);
        }
        let Some(fed) = self.fed.replace(epoch) else { return self.feed_now(view) };
        call.phase = Phase::Discarding { waiting: self.members.iter().copied().collect() };
        for member in self.members.clone() {
            self.call_member(member, Asked::Discard(member), Request::Discard { epoch: fed }, view);
        }
    }

    pub(super) fn discarded(&mut self, member: MemberId, view: &mut View<'_>) {
        let Some(Call { phase: Phase::Discarding { waiting }, .. }) = &mut self.call else { return };
        waiting.remove(&member);
        if waiting.is_empty() {
            self.feed_now(view);
        }
    }

    fn feed_now(&mut self, view: &mut View<'_>) {
        let Some(call) = &mut self.call else { return };
        let epoch = call.epoch;
        call.phase = Phase::Feeding { receipts: Default::default(), twice: false };
        let ticket = self.ask(Asked::Feed, view);
        let members = self.members.clone();
        view.out.push(Effect::Feed { ticket, query: self.id.clone(), epoch, members });
    }

    pub(super) fn receipt(&mut self, receipt: Receipt) {
        if let Some(Call { phase: Phase::Feeding { receipts, twice }, .. }) = &mut self.call {
            let before = receipts.insert((receipt.source, receipt.partition), receipt);
            // The same one told again is no other attempt.
            *twice |= before.is_some_and(|before| before != receipt);
        }
    }

    pub(super) fn fed(&mut self, outcome: Result<(), Failure>, view: &mut View<'_>) {
        let Some(Call { phase: Phase::Feeding { receipts, twice }, epoch, .. }) = &mut self.call else { return };
        let epoch = *epoch;
        if let Err(failure) = outcome {
            if self.any_lost(view) {
                return self.again(failure.message, view);
            }
            if matches!(failure.kind, Kind::User | Kind::Data | Kind::Store) {
                let reason = failure.message;
                return self.fail(EngineError::Feed { epoch, reason }, view);
            }
            let wait = patience(&failure, view);
            if let Some(call) = &mut self.call {
                call.phase = Phase::FeedFailed { failure };
            }
            return self.timer(Asked::Loss, wait, view);
        }
        if *twice {
            let reason = "Spark delivered two attempts of one partition".to_owned();
            return self.fail(EngineError::Feed { epoch, reason }, view);
        }
        let stray = receipts.values().any(|receipt| !self.members.contains(&receipt.member));
        if stray || self.status != super::Status::Running {
            let reason = self.trouble.clone();
            return self.again(reason, view);
        }
        let now = receipts
            .values()
            .fold((0, 0u64), |(rows, hash), receipt| (rows + receipt.rows, hash.wrapping_add(weighed(receipt))));
        if let Some((shown, before)) = self.shown
            && shown == epoch
            && before != now
        {
            let note = self.note.clone();
            self.reread = note.is_some();
            return self.fail(EngineError::NotReplayable { epoch, before: before.0, now: now.0, note }, view);
        }
        self.release(view);
    }

    // The epoch runs

    fn release(&mut self, view: &mut View<'_>) {
        let Some(Call { phase: Phase::Feeding { receipts, .. }, what, epoch, clock_ms, .. }) = &mut self.call else {
            return;
        };
        let (receipts, finish, epoch) = (std::mem::take(receipts), *what == What::Finish, *epoch);
        let mut rows: Rows = (0, 0);
        let mut feeds: BTreeMap<MemberId, Vec<Commit>> = BTreeMap::new();
        for receipt in receipts.values() {
            feeds.entry(receipt.member).or_default().push(Commit {
                source: receipt.source,
                partition: receipt.partition,
                attempt: receipt.attempt,
                rows: receipt.rows,
                rows_before: rows.0,
            });
            rows = (rows.0 + receipt.rows, rows.1.wrapping_add(weighed(receipt)));
        }
        // Each never goes back, and moves only with rows.
        let mut watermarks = self.base.watermarks.clone();
        watermarks.resize(self.program.lateness_us.len(), None);
        for receipt in receipts.values() {
            let source = usize::from(receipt.source);
            if let (Some(time), Some(Some(lateness))) = (receipt.max_event_time, self.program.lateness_us.get(source)) {
                watermarks[source] = watermarks[source].max(Some(time.saturating_sub(*lateness)));
            }
        }
        let clock_ms = (*clock_ms).max(self.base.clock_ms);
        let mut heard_ms = Vec::new();
        if self.program.may_be_idle() {
            heard_ms.clone_from(&self.base.heard_ms);
            heard_ms.resize(self.program.lateness_us.len(), Some(clock_ms));
            for receipt in receipts.values().filter(|receipt| receipt.max_event_time.is_some()) {
                heard_ms.iter_mut().skip(usize::from(receipt.source)).take(1).for_each(|at| *at = Some(clock_ms));
            }
        }
        let reached = self.program.watermark(&watermarks, &heard_ms, clock_ms).max(self.base.watermark);
        let late_rows = self.base.late_rows;
        let at = At { epoch: Some(epoch), watermarks, watermark: reached, heard_ms, clock_ms, late_rows };
        let waiting: BTreeSet<MemberId> = self.members.iter().copied().collect();
        if let Some(call) = &mut self.call {
            call.phase = Phase::Releasing { waiting, pieces: Vec::new(), at, rows };
        }
        self.due(epoch, view);
        for member in self.members.clone() {
            let release = Release {
                stamp: self.stamp,
                epoch,
                feeds: feeds.remove(&member).unwrap_or_default(),
                watermark: if finish { Some(i64::MAX) } else { reached },
                clock_ms,
                finish,
            };
            self.call_member(member, Asked::Release(member), Request::Release(release), view);
        }
    }

    pub(super) fn released(&mut self, member: MemberId, answer: Result<Answer, Failure>, view: &mut View<'_>) {
        let told = match answer {
            Ok(Answer::Released { pieces }) => pieces,
            Ok(_) => Vec::new(),
            Err(failure) => return self.hindered(failure, view),
        };
        let Some(Call { phase: Phase::Releasing { waiting, pieces, at, rows }, epoch, what, planned_ms, .. }) =
            &mut self.call
        else {
            return;
        };
        waiting.remove(&member);
        for (number, rows, late_rows, side_rows) in told {
            at.late_rows += late_rows;
            pieces.push(Piece { member, number, rows, late_rows, side_rows });
        }
        if !waiting.is_empty() {
            return;
        }
        pieces.sort_by_key(|piece| (piece.member, piece.number));
        let (rows, epoch) = (*rows, *epoch);
        // With the epoch what was staged for it has gone everywhere.
        self.fed = None;
        self.frozen = Some(Frozen {
            stamp: self.stamp,
            members: self.members.clone(),
            at: at.clone(),
            planned_ms: *planned_ms,
            finish: *what == What::Finish,
            output: self.program.output.clone(),
            pieces: std::mem::take(pieces),
            files: Default::default(),
            durable: false,
            sealing: false,
            returned: false,
        });
        // The final epoch has no rows, and the batch of its number some, if input goes on after all.
        if !self.frozen.as_ref().is_some_and(|frozen| frozen.finish)
            && self.shown.is_none_or(|(shown, _)| shown != epoch)
        {
            (self.shown, self.note) = (Some((epoch, rows)), None);
            self.shown_ms = self.frozen.as_ref().and_then(|frozen| frozen.planned_ms);
        }
        if let Some(call) = &mut self.call {
            call.phase =
                Phase::Serving(Serving { sink: Sink::Checking, gone: None, patient: false, stage: Stage::Sinking });
        }
        self.begin_serving(view);
    }

    // Files and sink

    /// Members write while the sink runs.
    pub(super) fn begin_serving(&mut self, view: &mut View<'_>) {
        let Some(frozen) = &self.frozen else { return };
        if self.program.durable && !frozen.durable {
            let open: Vec<MemberId> =
                frozen.members.iter().copied().filter(|member| !frozen.files.contains_key(member)).collect();
            for member in open {
                self.write(member, 1, view);
            }
        }
        self.check(view);
    }

    pub(super) fn write(&mut self, member: MemberId, tries: u32, view: &mut View<'_>) {
        let Some(frozen) = &self.frozen else { return };
        let request = Request::Write { stamp: frozen.stamp, epoch: frozen.at.epoch.unwrap_or(0) };
        self.call_member(member, Asked::Write { member, tries }, request, view);
    }

    pub(super) fn written(
        &mut self,
        member: MemberId,
        tries: u32,
        answer: Result<Answer, Failure>,
        view: &mut View<'_>,
    ) {
        match answer {
            Ok(Answer::Written(files)) => {
                if let Some(frozen) = &mut self.frozen {
                    frozen.files.insert(member, files);
                }
            }
            Err(failure) if failure.kind == Kind::Store => {
                return self.pause(Asked::Write { member, tries }, tries, "writing state", failure.message, view);
            }
            answer => {
                let reason = answer.err().map_or_else(|| "it wrote nothing".to_owned(), |failure| failure.message);
                if let Some(Call { phase: Phase::Serving(serving), .. }) = &mut self.call {
                    serving.gone = Some(format!("member {} could not write its state: {reason}", member.0));
                }
            }
        }
        self.serve(view);
    }

    fn check(&mut self, view: &mut View<'_>) {
        match self.program.durable {
            true => self.check_claim(1, view),
            false => self.allowed(view),
        }
    }

    /// The newest claim, read again. Two engines may have made one of the same number, where a store does not tell them apart or the folder was
    /// put back in between: it is of who wrote last.
    pub(super) fn checked(&mut self, newest: u64, nonce: Option<u64>, view: &mut View<'_>) {
        let claim = self.claim.as_ref().map_or(0, |claim| claim.number);
        if newest != claim || nonce.is_some_and(|nonce| nonce != view.setup.nonce) {
            return self.fail(EngineError::Fenced { claim, by: newest }, view);
        }
        self.allowed(view);
    }

    fn allowed(&mut self, view: &mut View<'_>) {
        if let Some(Call { phase: Phase::Loading { refused, .. }, .. }) = &mut self.call {
            // Nobody has shut us out: it is as the member says.
            if let Some(failure) = refused.take() {
                self.hindered(failure, view);
            }
            return;
        }
        let Some(Call { phase: Phase::Serving(serving), .. }) = &mut self.call else { return };
        match serving.stage {
            Stage::Sinking => self.call_sink(view),
            Stage::CheckingManifest => {
                serving.stage = Stage::Writing;
                *view.tickets += 1;
                let manifest = self.manifest(view);
                self.write_manifest(Box::new(manifest), 1, view);
            }
            Stage::CheckingReturn => self.complete(view),
            Stage::Writing => {}
        }
    }

    fn call_sink(&mut self, view: &mut View<'_>) {
        let ticket = self.ask(Asked::Sink, view);
        let Some(Call { phase: Phase::Serving(serving), sink_calls, epoch, .. }) = &mut self.call else { return };
        let Some(frozen) = &self.frozen else { return };
        serving.sink = Sink::Called;
        *sink_calls += 1;
        let (epoch, pieces) = (*epoch, frozen.pieces.clone());
        if let Some((shown, (rows, hash))) = self.shown
            && shown == epoch
            && self.program.durable
            && self.note.is_none()
            && self.noted.replace(epoch) != Some(epoch)
        {
            let shown = Shown {
                query: self.id.clone(),
                batch: epoch,
                generation: frozen.stamp.generation,
                nonce: view.setup.nonce,
                rows,
                hash,
                columns: self.program.columns.clone(),
            };
            view.out.push(Effect::WriteShown { query: self.id.clone(), shown });
        }
        view.out.push(Effect::Sink { ticket, query: self.id.clone(), epoch, pieces });
    }

    pub(super) fn sunk(&mut self, outcome: Result<(), Failure>, view: &mut View<'_>) {
        let Some(Call { phase: Phase::Serving(serving), .. }) = &mut self.call else { return };
        serving.sink = match outcome {
            Ok(()) => Sink::Returned,
            Err(failure) => Sink::Failed(failure),
        };
        self.serve(view);
    }

    /// Goes on when the sink and all files are done; begins again when a member took its part along.
    pub(super) fn serve(&mut self, view: &mut View<'_>) {
        let Some(frozen) = &self.frozen else { return };
        let open = |member: &&MemberId| self.program.durable && !frozen.durable && !frozen.files.contains_key(member);
        let lost = frozen.members.iter().any(|member| !view.roster.alive(*member));
        let waiting = frozen.members.iter().filter(open).any(|member| view.roster.alive(*member));
        let unwritten = frozen.members.iter().filter(open).any(|member| !view.roster.alive(*member));
        let Some(Call { phase: Phase::Serving(serving), sink_calls, epoch, .. }) = &mut self.call else { return };
        let (epoch, calls) = (*epoch, *sink_calls);
        let torn = serving.gone.is_some() || unwritten;
        let retry = view.setup.retry_sink && calls < view.setup.sink_tries;
        match &serving.sink {
            Sink::Checking | Sink::Called => {}
            Sink::Failed(failure) if lost || torn => {
                let reason = failure.message.clone();
                match retry {
                    true => self.again(reason, view),
                    false => self.fail(EngineError::Sink { epoch, reason, returned: false }, view),
                }
            }
            Sink::Failed(failure) if serving.patient || failure.kind == Kind::User => {
                let reason = failure.message.clone();
                self.fail(EngineError::Sink { epoch, reason, returned: false }, view);
            }
            // Perhaps it read from a member that is gone.
            Sink::Failed(failure) => {
                let wait = patience(failure, view);
                self.timer(Asked::Loss, wait, view);
            }
            Sink::Returned if torn && serving.stage == Stage::Sinking => {
                let lost = || "a member was lost before its state was written".to_owned();
                let reason = serving.gone.clone().unwrap_or_else(lost);
                match retry {
                    true => self.again(reason, view),
                    false => self.fail(EngineError::Sink { epoch, reason, returned: true }, view),
                }
            }
            Sink::Returned if waiting || serving.stage != Stage::Sinking => {}
            Sink::Returned if self.program.durable && !frozen.durable => {
                serving.stage = Stage::CheckingManifest;
                self.check(view);
            }
            Sink::Returned => {
                serving.stage = Stage::CheckingReturn;
                self.check(view);
            }
        }
    }

    // The manifest

    fn manifest(&self, view: &View<'_>) -> Manifest {
        let frozen = self.frozen.as_ref().expect("the epoch is served");
        let epoch = frozen.at.epoch.unwrap_or(0);
        let parent = self.base.epoch.and_then(|last| self.kept.get(&last));
        let mut files = parent.map(|parent| parent.files.clone()).unwrap_or_default();
        if let Some((names, merged)) = &self.merged
            && names.iter().all(|name| files.iter().any(|file| file.name == *name))
        {
            files.retain(|file| !names.contains(&file.name));
            files.splice(0..0, merged.iter().cloned());
        }
        files.extend(frozen.files.values().flatten().cloned());
        Manifest {
            query: self.id.clone(),
            batch: if frozen.finish { epoch - 1 } else { epoch },
            finished: frozen.finish,
            claim: self.claim.as_ref().map_or(0, |claim| claim.number),
            generation: frozen.stamp.generation,
            nonce: self.nonce(view),
            plan: self.program.plan.clone(),
            watermarks: frozen.at.watermarks.clone(),
            watermark: Some(frozen.at.watermark),
            heard_ms: frozen.at.heard_ms.clone(),
            clock_ms: frozen.at.clock_ms,
            late_rows: frozen.at.late_rows,
            parent: parent.map(Manifest::name),
            files,
            parts: self.parts(),
        }
    }

    /// Tells manifests of this engine apart: each has asked for another ticket before.
    pub(super) fn nonce(&self, view: &View<'_>) -> u64 {
        view.setup.nonce.wrapping_add(*view.tickets)
    }

    pub(super) fn write_manifest(&mut self, manifest: Box<Manifest>, tries: u32, view: &mut View<'_>) {
        if let Some(frozen) = &mut self.frozen {
            frozen.sealing = true;
        }
        let ticket = self.ask(Asked::Manifest { manifest: manifest.clone(), tries }, view);
        view.out.push(Effect::WriteManifest { ticket, query: self.id.clone(), manifest });
    }

    /// The manifest is written.
    pub(super) fn sealed(&mut self, manifest: Manifest, view: &mut View<'_>) {
        let Some(frozen) = &mut self.frozen else { return };
        frozen.durable = true;
        // A final epoch that has to be run again begins where it began, not where it ended.
        if !manifest.finished {
            self.kept.insert(manifest.batch, manifest);
        }
        if let Some(Call { phase: Phase::Serving(serving), .. }) = &mut self.call {
            serving.stage = Stage::CheckingReturn;
            self.check(view);
        }
    }
}

/// What the rows of a receipt say, and of which source they are: a row that another source gives is another row.
fn weighed(receipt: &Receipt) -> u64 {
    receipt.hash.wrapping_mul(2 * u64::from(receipt.source) + 1)
}

/// How long a loss may take to be noticed, milliseconds.
fn patience(failure: &Failure, view: &View<'_>) -> u64 {
    let silent = if failure.kind == Kind::Echo { view.setup.silence_ms } else { 0 };
    view.setup.loss_ms + silent
}
