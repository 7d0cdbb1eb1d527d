//! A member's control side for one query: what is asked of it becomes work for the workers of its process, whose results become answers.
//!
//! The member owns no state of the flow: it says when workers start, end and run, and what is read and written; a host does it. Nothing
//! here waits: while workers start or end, requests stand in line.
//!
//! Invariants: every request is answered once, in the order of what it waits for; a request of a generation before the newest one heard of is
//! refused as stale and changes nothing; an epoch is answered when all workers here have completed it, each having taken its
//! record of it; a generation begins only where the one before has ended.

use std::collections::{BTreeMap, VecDeque};

use crate::error::{Failure, Kind};
use crate::manifest::{Claim, DataFile};
use crate::protocol::{Answer, Handle, Ranges, Recut, Release, Request, Stamp, Start, Ticket};
use crate::range::Range;

/// What a member hears.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemberEvent {
    /// The engine asks.
    Asked {
        /// The question.
        ticket: Ticket,
        /// What.
        request: Request,
    },
    /// The workers have started, or not.
    Started(Result<(), Failure>),
    /// The workers have ended; their state at the beginning of the epoch asked for is here for these ranges.
    Ended(Ranges),
    /// The output frontier has passed an epoch at a worker, which has taken its record of it.
    EpochDone {
        /// The epoch.
        epoch: u64,
        /// The worker.
        worker: u32,
        /// Rows of its output.
        rows: u64,
        /// Rows that came too late.
        late_rows: u64,
        /// Rows of each side output.
        side_rows: Vec<u64>,
    },
    /// A migration has ended after so many steps.
    MigrationDone {
        /// Which.
        handle: Handle,
        /// The epoch and slice from which each of them holds.
        times: Vec<(u64, u32)>,
        /// Why no more, where it was refused; the workers go on.
        refused: Option<Failure>,
    },
    /// The workers failed, or a peer of theirs is gone.
    Failed(Failure),
    /// Reading or writing has ended.
    Stored {
        /// The question.
        ticket: Ticket,
        /// Files written; none of what was read.
        outcome: Result<Vec<DataFile>, Failure>,
    },
}

/// What a member asks of its host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemberEffect {
    /// Answer the engine.
    Reply {
        /// The question.
        ticket: Ticket,
        /// The answer.
        answer: Result<Answer, Failure>,
    },
    /// Tell the engine that the workers failed while nothing was asked of them.
    Tell {
        /// Of which generation.
        stamp: Stamp,
        /// Why.
        failure: Failure,
    },
    /// End the workers, if any, undo what is of `epoch` or later, drop what was loaded; then say [`MemberEvent::Ended`].
    EndGroup {
        /// The epoch that begins next.
        epoch: u64,
    },
    /// See that the claim is there, and read ranges from files, for the next start; then say [`MemberEvent::Stored`].
    LoadRanges {
        /// The question.
        ticket: Ticket,
        /// The engine's.
        claim: Claim,
        /// What.
        ranges: Ranges,
        /// From where.
        files: Vec<DataFile>,
    },
    /// Start workers with what is kept and loaded; then say [`MemberEvent::Started`].
    StartGroup(Start),
    /// Give the workers their rows; each marks its state before its first one.
    ReleaseInput(Release),
    /// Move ranges; then say [`MemberEvent::MigrationDone`].
    Migrate {
        /// Names it.
        handle: Handle,
        /// Step by step.
        steps: Vec<Vec<(Range, u32)>>,
        /// See [`Event::Migrate`](crate::Event::Migrate).
        max_pause_ms: Option<u32>,
        /// See [`Event::Migrate`](crate::Event::Migrate).
        drains: bool,
        /// See [`Request::Migrate`].
        at_epoch: Option<u64>,
    },
    /// Split or merge ranges between two epochs; then say [`MemberEvent::MigrationDone`].
    Recut {
        /// Names it.
        handle: Handle,
        /// What.
        recut: Recut,
    },
    /// End a migration after the step under way.
    CancelMigration {
        /// Which.
        handle: Handle,
    },
    /// Write the records that the workers took of an epoch, under a name that no other write has: one that was given up may
    /// still be under way. Then say [`MemberEvent::Stored`].
    WriteFiles {
        /// The question.
        ticket: Ticket,
        /// Of the generation.
        stamp: Stamp,
        /// Of the epoch.
        epoch: u64,
    },
    /// Merge files; then say [`MemberEvent::Stored`].
    MergeFiles {
        /// The question.
        ticket: Ticket,
        /// Of the generation.
        stamp: Stamp,
        /// Which.
        files: Vec<DataFile>,
    },
    /// Forget outputs of this epoch and those before, and what would undo them: Spark has committed it.
    CloseOutputs {
        /// The epoch.
        epoch: u64,
    },
    /// Forget what would undo this epoch and those before: nothing undoes them any more.
    SettleEpoch {
        /// The epoch.
        epoch: u64,
    },
    /// Forget what is staged for an epoch.
    DiscardStaged {
        /// The epoch.
        epoch: u64,
    },
    /// End the workers, if any, and forget the state; outputs stay.
    DropState,
    /// End the workers and forget everything.
    DropAll,
}

/// See the module.
///
/// # Examples
/// ```
/// use penstock_engine::{Member, MemberEffect, MemberEvent, Request, Stamp};
/// let mut member = Member::new();
/// let stop = Request::Stop { stamp: Stamp { generation: 2, membership: 0 }, epoch: 5 };
/// assert_eq!(member.step(MemberEvent::Asked { ticket: 1, request: stop }), [MemberEffect::EndGroup { epoch: 5 }]);
/// ```
#[derive(Debug, Default)]
pub struct Member {
    /// The newest generation heard of.
    stamp: Stamp,
    workers: Workers,
    /// What came while workers start or end.
    line: VecDeque<(Ticket, Request)>,
    /// Requests that wait for reading (false) or writing.
    storing: BTreeMap<Ticket, bool>,
}

#[derive(Debug, Default)]
enum Workers {
    #[default]
    None,
    /// With the failure of those that have started already.
    Starting(Ticket, Box<Start>, Option<Failure>),
    Running(Running),
    Ending(Ticket),
}

/// Rows, late rows and those of side outputs, by worker.
type Made = BTreeMap<u32, (u64, u64, Vec<u64>)>;

#[derive(Debug)]
struct Running {
    stamp: Stamp,
    threads: u32,
    next: u64,
    /// Epochs under way: who asked, and what workers have made.
    epochs: BTreeMap<u64, (Ticket, Made)>,
    migrations: BTreeMap<Handle, Ticket>,
    /// The last epoch that was completed here: its records can be written.
    completed: Option<u64>,
    failed: Option<Failure>,
}

impl Member {
    /// A member that has heard of nothing.
    #[must_use]
    pub fn new() -> Member {
        Member::default()
    }

    /// Takes an event; returns what to do, in order.
    pub fn step(&mut self, event: MemberEvent) -> Vec<MemberEffect> {
        let mut out = Vec::new();
        match event {
            MemberEvent::Asked { ticket, request } => {
                self.line.push_back((ticket, request));
                self.work(&mut out);
            }
            MemberEvent::Started(outcome) => self.started(outcome, &mut out),
            MemberEvent::Ended(ranges) => {
                if let Workers::Ending(ticket) = self.workers {
                    self.workers = Workers::None;
                    out.push(MemberEffect::Reply { ticket, answer: Ok(Answer::Inventory(ranges)) });
                    self.work(&mut out);
                }
            }
            MemberEvent::EpochDone { epoch, worker, rows, late_rows, side_rows } => {
                self.epoch_done(epoch, worker, (rows, late_rows, side_rows), &mut out);
            }
            MemberEvent::MigrationDone { handle, times, refused } => {
                if let Workers::Running(running) = &mut self.workers
                    && let Some(ticket) = running.migrations.remove(&handle)
                {
                    out.push(MemberEffect::Reply { ticket, answer: Ok(Answer::Migrated { times, refused }) });
                }
            }
            MemberEvent::Failed(failure) => self.failed(failure, &mut out),
            MemberEvent::Stored { ticket, outcome } => {
                if let Some(writes) = self.storing.remove(&ticket) {
                    let answer = outcome.map(|files| if writes { Answer::Written(files) } else { Answer::Done });
                    out.push(MemberEffect::Reply { ticket, answer });
                }
            }
        }
        out
    }

    /// Takes requests while none of them has to be waited for.
    fn work(&mut self, out: &mut Vec<MemberEffect>) {
        while !matches!(self.workers, Workers::Starting(..) | Workers::Ending(_)) {
            let Some((ticket, request)) = self.line.pop_front() else { return };
            if let Err(failure) = self.take(ticket, request, out) {
                out.push(MemberEffect::Reply { ticket, answer: Err(failure) });
            }
        }
    }

    fn take(&mut self, ticket: Ticket, request: Request, out: &mut Vec<MemberEffect>) -> Result<(), Failure> {
        match request {
            Request::Stop { stamp, epoch } => {
                self.hear(stamp)?;
                self.end(out);
                self.workers = Workers::Ending(ticket);
                out.push(MemberEffect::EndGroup { epoch });
            }
            Request::Load { stamp, claim, ranges, files } => {
                self.hear(stamp)?;
                self.storing.insert(ticket, false);
                out.push(MemberEffect::LoadRanges { ticket, claim, ranges, files });
            }
            Request::Start(start) => {
                self.hear(start.stamp)?;
                if let Workers::Running(_) = self.workers {
                    return Err(Failure::new(Kind::Internal, "the generation before has not ended"));
                }
                self.workers = Workers::Starting(ticket, Box::new(start.clone()), None);
                out.push(MemberEffect::StartGroup(start));
            }
            Request::Release(release) => {
                let running = self.able(release.stamp)?;
                if release.epoch != running.next {
                    let message = format!("epoch {} cannot be released, {} is next", release.epoch, running.next);
                    return Err(Failure::new(Kind::Internal, message));
                }
                running.epochs.insert(release.epoch, (ticket, BTreeMap::new()));
                running.next += 1;
                out.push(MemberEffect::ReleaseInput(release));
            }
            Request::Write { stamp, epoch } => {
                let stale = || Failure::new(Kind::Stale, format!("the record of epoch {epoch} is not here"));
                match &self.workers {
                    Workers::Running(running) if running.stamp == stamp && running.completed == Some(epoch) => {}
                    _ => return Err(stale()),
                }
                self.storing.insert(ticket, true);
                out.push(MemberEffect::WriteFiles { ticket, stamp, epoch });
            }
            Request::Merge { stamp, files } => {
                self.hear(stamp)?;
                self.storing.insert(ticket, true);
                out.push(MemberEffect::MergeFiles { ticket, stamp, files });
            }
            Request::Migrate { stamp, handle, steps, max_pause_ms, drains, at_epoch } => {
                self.able(stamp)?.migrations.insert(handle, ticket);
                out.push(MemberEffect::Migrate { handle, steps, max_pause_ms, drains, at_epoch });
            }
            Request::Recut { stamp, handle, recut } => {
                self.able(stamp)?.migrations.insert(handle, ticket);
                out.push(MemberEffect::Recut { handle, recut });
            }
            Request::CancelMigration { stamp, handle } => {
                self.able(stamp)?;
                out.push(MemberEffect::CancelMigration { handle });
                out.push(MemberEffect::Reply { ticket, answer: Ok(Answer::Done) });
            }
            Request::CloseEpoch { epoch } => {
                out.push(MemberEffect::CloseOutputs { epoch });
                out.push(MemberEffect::Reply { ticket, answer: Ok(Answer::Done) });
            }
            Request::Settle { epoch } => {
                out.push(MemberEffect::SettleEpoch { epoch });
                out.push(MemberEffect::Reply { ticket, answer: Ok(Answer::Done) });
            }
            Request::Discard { epoch } => {
                out.push(MemberEffect::DiscardStaged { epoch });
                out.push(MemberEffect::Reply { ticket, answer: Ok(Answer::Done) });
            }
            Request::Conclude => {
                self.end(out);
                out.push(MemberEffect::DropState);
                out.push(MemberEffect::Reply { ticket, answer: Ok(Answer::Done) });
            }
            Request::Drop => {
                self.end(out);
                out.push(MemberEffect::DropAll);
                out.push(MemberEffect::Reply { ticket, answer: Ok(Answer::Done) });
            }
        }
        Ok(())
    }

    /// A generation is heard of; an older one is over.
    fn hear(&mut self, stamp: Stamp) -> Result<(), Failure> {
        if stamp.generation < self.stamp.generation {
            let (given, now) = (stamp.generation, self.stamp.generation);
            return Err(Failure::new(Kind::Stale, format!("generation {given} has ended, {now} has begun")));
        }
        self.stamp = stamp;
        Ok(())
    }

    /// The workers, where they can take requests of this generation.
    fn able(&mut self, stamp: Stamp) -> Result<&mut Running, Failure> {
        self.hear(stamp)?;
        match &mut self.workers {
            Workers::Running(running) if running.stamp == stamp => match &running.failed {
                None => Ok(running),
                Some(failure) => Err(failure.clone()),
            },
            _ => Err(Failure::new(Kind::Stale, format!("generation {} does not run", stamp.generation))),
        }
    }

    fn started(&mut self, outcome: Result<(), Failure>, out: &mut Vec<MemberEffect>) {
        match std::mem::take(&mut self.workers) {
            Workers::Starting(ticket, start, failed) => {
                if outcome.is_ok() {
                    self.workers = Workers::Running(Running {
                        stamp: start.stamp,
                        threads: start.threads,
                        next: start.epoch,
                        epochs: BTreeMap::new(),
                        migrations: BTreeMap::new(),
                        completed: None,
                        failed: None,
                    });
                }
                out.push(MemberEffect::Reply { ticket, answer: outcome.map(|()| Answer::Done) });
                if let Some(failure) = failed {
                    self.failed(failure, out);
                }
                self.work(out);
            }
            other => self.workers = other,
        }
    }

    fn epoch_done(&mut self, epoch: u64, worker: u32, made: (u64, u64, Vec<u64>), out: &mut Vec<MemberEffect>) {
        let Workers::Running(running) = &mut self.workers else { return };
        let Some((_, pieces)) = running.epochs.get_mut(&epoch) else { return };
        pieces.insert(worker, made);
        if pieces.len() < running.threads as usize {
            return;
        }
        if let Some((ticket, pieces)) = running.epochs.remove(&epoch) {
            running.completed = Some(epoch);
            let pieces = pieces.into_iter().map(|(worker, (rows, late, sides))| (worker, rows, late, sides)).collect();
            out.push(MemberEffect::Reply { ticket, answer: Ok(Answer::Released { pieces }) });
        }
    }

    /// Ends what runs: whoever waits for it is told.
    fn end(&mut self, out: &mut Vec<MemberEffect>) {
        if let Workers::Running(running) = std::mem::take(&mut self.workers) {
            let failure = running.failed.unwrap_or_else(|| Failure::new(Kind::Echo, "the generation was ended"));
            let epochs = running.epochs.into_values().map(|(ticket, _)| ticket);
            for ticket in epochs.chain(running.migrations.into_values()) {
                out.push(MemberEffect::Reply { ticket, answer: Err(failure.clone()) });
            }
        }
    }

    fn failed(&mut self, failure: Failure, out: &mut Vec<MemberEffect>) {
        if let Workers::Starting(_, _, failed) = &mut self.workers {
            failed.get_or_insert(failure);
            return;
        }
        let Workers::Running(running) = &mut self.workers else { return };
        if running.failed.is_some() {
            return;
        }
        running.failed = Some(failure.clone());
        let epochs = std::mem::take(&mut running.epochs).into_values().map(|(ticket, _)| ticket);
        let waiting: Vec<Ticket> = epochs.chain(std::mem::take(&mut running.migrations).into_values()).collect();
        if waiting.is_empty() {
            out.push(MemberEffect::Tell { stamp: running.stamp, failure });
            return;
        }
        for ticket in waiting {
            out.push(MemberEffect::Reply { ticket, answer: Err(failure.clone()) });
        }
    }
}
