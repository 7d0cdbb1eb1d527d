//! One query: the way of a batch from Spark's call to its return, whatever breaks off in between.
//!
//! | module | owns |
//! |---|---|
//! | here | what is asked for and what is waited for |
//! | `calls` | losses of members, further attempts, ends of calls |
//! | `claim` | reading a checkpoint, claiming it, which batch may be asked for |
//! | `generation` | ending a generation, who owns what in the next one, restoring, beginning it |
//! | `epoch` | feeding, releasing, sink, files, manifest |
//! | `moves` | migrations, growing and shrinking, retention, merging |

mod calls;
mod claim;
mod epoch;
mod generation;
mod moves;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use penstock_balance::Strategy;

use crate::engine::Setup;
use crate::error::{EngineError, Failure, StoreError};
use crate::manifest::{Changed, Claim, DataFile, Manifest};
use crate::protocol::{
    Answer, Effect, Event, Facts, Handle, MemberId, Piece, Program, QueryId, Ranges, Receipt, Recut, Request, Stamp,
    Stored, Ticket, Wait, Wish,
};
use crate::range::{Layout, MAX_LENGTH, Range};
use crate::roster::Roster;

/// What a query sees of its engine, and where it says what to do.
pub(crate) struct View<'a> {
    pub(crate) setup: &'a Setup,
    pub(crate) roster: &'a Roster,
    pub(crate) tickets: &'a mut Ticket,
    pub(crate) out: &'a mut Vec<Effect>,
}

/// What may be asked of the workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Status {
    /// There are none, and no state but what the checkpoint has.
    Fresh,
    /// They run.
    Running,
    /// The next call begins a generation.
    Broken,
    /// The state is gone, and nothing has it.
    Lost,
    /// The final epoch has run.
    Finished,
}

impl Status {
    fn told(self) -> &'static str {
        match self {
            Status::Fresh => "has not begun",
            Status::Running => "runs",
            Status::Broken => "goes back to its last completed epoch at the next batch",
            Status::Lost => "has lost its state",
            Status::Finished => "is finished",
        }
    }
}

/// Where the query stands at the end of an epoch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct At {
    /// The epoch; none before the first.
    epoch: Option<u64>,
    /// Watermark reached, by source; those behind the end have reached nothing.
    watermarks: Vec<Option<i64>>,
    /// That of the flow.
    watermark: Option<i64>,
    /// When each source was first waited for or last had rows, milliseconds; empty where none may be idle.
    heard_ms: Vec<Option<i64>>,
    clock_ms: i64,
    late_rows: u64,
}

/// A completed epoch whose outputs stand at the members, with what is durable of it.
#[derive(Clone, Debug)]
struct Frozen {
    stamp: Stamp,
    members: Vec<MemberId>,
    at: At,
    /// Spark's time of the batch, where it told.
    planned_ms: Option<i64>,
    finish: bool,
    /// The columns of what came out.
    output: String,
    pieces: Vec<Piece>,
    files: BTreeMap<MemberId, Vec<DataFile>>,
    /// Whether the manifest of this attempt is written.
    durable: bool,
    /// Whether it was to be written, and may be there, whatever became of that.
    sealing: bool,
    /// Whether the call has returned.
    returned: bool,
}

/// Rows and order-free hash of a feed.
type Rows = (u64, u64);

/// What Spark or the user waits for.
#[derive(Debug)]
struct Call {
    what: What,
    epoch: u64,
    clock_ms: i64,
    planned_ms: Option<i64>,
    /// Attempts that broke off.
    tries: u32,
    sink_calls: u32,
    phase: Phase,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Batch,
    Finish,
    /// Another set of members, between two batches.
    Regroup,
}

/// How far a call is.
#[derive(Debug)]
enum Phase {
    /// Reads the checkpoint, then claims it.
    Claiming,
    /// Waits for members, with what those that stopped have.
    Gathering { inventories: BTreeMap<MemberId, Ranges> },
    /// Ends a generation.
    Stopping { waiting: BTreeSet<MemberId>, inventories: BTreeMap<MemberId, Ranges> },
    /// Members see the claim, and ranges come from files; `refused` by one that does not see it, which may be since there is a newer one.
    Loading { waiting: BTreeSet<MemberId>, refused: Option<Failure> },
    /// Begins a generation.
    Starting { waiting: BTreeSet<MemberId> },
    /// What an earlier feed of the epoch left is forgotten: its end is waited for, since rows come on other connections.
    Discarding { waiting: BTreeSet<MemberId> },
    /// Rows come; receipts by source and partition.
    Feeding { receipts: BTreeMap<(u8, u32), Receipt>, twice: bool },
    /// Feeding failed; perhaps a member is gone.
    FeedFailed { failure: Failure },
    /// The epoch runs.
    Releasing { waiting: BTreeSet<MemberId>, pieces: Vec<Piece>, at: At, rows: Rows },
    /// Something broke that only repeats what another member says, or that nobody can say; who is it?
    Puzzled { failure: Failure },
    /// The epoch is complete: files are written, the sink runs, then manifest and return.
    Serving(Serving),
}

#[derive(Debug)]
struct Serving {
    sink: Sink,
    /// Why a member's part cannot be written any more.
    gone: Option<String>,
    /// The loss of a member has been waited for.
    patient: bool,
    stage: Stage,
}

#[derive(Debug, PartialEq, Eq)]
enum Sink {
    Checking,
    Called,
    Returned,
    Failed(Failure),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Sinking,
    CheckingManifest,
    Writing,
    CheckingReturn,
}

/// How a migration goes: what moves at one time, for how long that may pause, whether rows that wait then go first, and the epoch that it is
/// prepared for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cut {
    pub(crate) strategy: Strategy,
    pub(crate) max_pause_ms: Option<u32>,
    pub(crate) drains: bool,
    pub(crate) at_epoch: Option<u64>,
}

/// A user's migration, split or merge that waits for its turn, or for its epoch.
#[derive(Debug)]
struct Turn {
    handle: Handle,
    wish: Wish,
    cut: Cut,
}

/// Ranges and their new workers, step by step.
type Steps = Vec<Vec<(Range, u32)>>;

/// A question, by its ticket.
#[derive(Debug)]
enum Asked {
    Checkpoint { tries: u32 },
    Claim { claim: Claim, tries: u32 },
    Members,
    Stop(MemberId),
    Load { member: MemberId, ranges: Ranges, files: Vec<DataFile>, tries: u32 },
    Start(MemberId),
    Discard(MemberId),
    Feed,
    Loss,
    Release(MemberId),
    Write { member: MemberId, tries: u32 },
    Sink,
    Claims { tries: u32 },
    Manifest { manifest: Box<Manifest>, tries: u32 },
    Pause(Box<Asked>),
    // Those that a new generation does not end:
    Migrate { handle: Option<Handle>, steps: Steps, then: Option<Recut> },
    Recut { handle: Handle, recut: Recut },
    Merge { names: BTreeSet<String> },
    Collect { newest: Option<String> },
    Delete,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Query {
    id: QueryId,
    program: Program,
    status: Status,
    /// Ours, once made.
    claim: Option<Claim>,
    /// Whether the claim that is being made displaces an engine that answers; and that claim once made, until the checkpoint was read again.
    displaces: bool,
    taken: Option<Claim>,
    stamp: Stamp,
    members: Vec<MemberId>,
    /// Workers of each member.
    threads: u32,
    /// The functions that they were started with.
    started_with: u64,
    /// Of a bin: no range is wider.
    bits: u8,
    layouts: BTreeMap<String, Layout>,
    /// Where the last epoch ended whose batch Spark has committed.
    base: At,
    frozen: Option<Frozen>,
    /// Manifests that are kept, by batch.
    kept: BTreeMap<u64, Manifest>,
    /// Files of others that a collection has read, by the name of the manifest: of earlier engines and attempts.
    read_before: BTreeMap<String, Vec<String>>,
    /// Members that have seen the claim: the checkpoint is one folder for them and the driver.
    shares: BTreeSet<MemberId>,
    /// What the sink has seen of an epoch, and Spark's time of that.
    shown: Option<(u64, Rows)>,
    shown_ms: Option<i64>,
    /// Where another engine wrote that.
    note: Option<String>,
    /// The epoch of which this engine wrote it.
    noted: Option<u64>,
    /// The epoch of which rows are staged.
    fed: Option<u64>,
    /// The last batch that Spark is known to have committed.
    committed: Option<u64>,
    call: Option<Call>,
    /// A call that came during a regroup.
    next: Option<Event>,
    asked: BTreeMap<Ticket, Asked>,
    /// Migrations that wait for their turn.
    turns: VecDeque<Turn>,
    /// What has moved where, and from which epoch and slice on, while others are under way that may have moved the same.
    moved: Vec<((u64, u32), Range, u32)>,
    /// Members were added or are leaving: shares are to be made equal.
    uneven: bool,
    /// Whether somebody was asked to mend the checkpoint: it is read before the next batch.
    reread: bool,
    /// Ranges that have moved for equal shares since the last rescale began.
    shifted: u32,
    /// The batch whose commit is watched for.
    watched: Option<u64>,
    /// Whether members may keep what they had of ranges that have moved since the last batch was settled, and the batch of which they were
    /// last told that nothing goes back to before its end.
    keeps: bool,
    settled: Option<u64>,
    /// Whether the end of the input is asked for again since members that had its results are gone.
    ends_again: bool,
    /// Whether no call comes by itself: the last one failed, or Spark has stopped the query before it committed.
    rests: bool,
    /// Whether members could not be grouped anew since the last batch.
    ungrouped: bool,
    /// Whether workers have run here: then those that are there are enough to go on.
    has_run: bool,
    /// The batch whose sink was called, and what was made of it was given up: Spark asks for it again.
    uncommitted: Option<u64>,
    /// Files that stand for those of these names.
    merged: Option<(BTreeSet<String>, Vec<DataFile>)>,
    /// Merges that failed, one after the other, and the batch from which on the next may be tried.
    unmerged: u32,
    merge_from: u64,
    /// Whether a batch has left manifests behind since older ones were being looked for, or deleted.
    uncollected: bool,
    trouble: String,
    /// The member whose loss it was, if one's.
    gone: Option<MemberId>,
    /// Why the flow that is asked for cannot go on from the state here.
    misfit: Option<EngineError>,
}

impl Query {
    /// Its generations are above `floor`: nobody takes them for those of an earlier life.
    pub(crate) fn new(id: QueryId, program: Program, floor: u64, bits: u8) -> Query {
        Query {
            id,
            program,
            status: Status::Fresh,
            claim: None,
            displaces: false,
            taken: None,
            stamp: Stamp { generation: floor, membership: 0 },
            members: Vec::new(),
            threads: 1,
            started_with: 0,
            bits: bits.min(MAX_LENGTH),
            layouts: BTreeMap::new(),
            base: At::default(),
            frozen: None,
            kept: BTreeMap::new(),
            read_before: BTreeMap::new(),
            shares: BTreeSet::new(),
            shown: None,
            shown_ms: None,
            note: None,
            noted: None,
            fed: None,
            committed: None,
            call: None,
            next: None,
            asked: BTreeMap::new(),
            turns: VecDeque::new(),
            moved: Vec::new(),
            uneven: false,
            reread: false,
            shifted: 0,
            watched: None,
            keeps: false,
            settled: None,
            ends_again: false,
            rests: false,
            ungrouped: false,
            has_run: false,
            uncommitted: None,
            merged: None,
            unmerged: 0,
            merge_from: 0,
            uncollected: false,
            trouble: String::new(),
            gone: None,
            misfit: None,
        }
    }

    pub(crate) fn waits_for(&self, ticket: Ticket) -> bool {
        self.asked.contains_key(&ticket)
    }

    /// The flow is to be this one: its functions may have changed, what its state was made under may not.
    pub(crate) fn open(&mut self, program: Program) {
        let holds =
            matches!(self.status, Status::Running | Status::Broken) && self.base.epoch.max(self.epoch()).is_some();
        let other = self.program.plan.check(&program.plan).err().or_else(|| {
            // What is kept at members is by position: an operator more has none.
            let more = self.program.plan.operators.len() != program.plan.operators.len();
            let told = |plan: &crate::manifest::Plan| format!("{} operators with state", plan.operators.len());
            (more && !program.durable).then(|| Changed::new(told(&self.program.plan), told(&program.plan)))
        });
        self.misfit = other.filter(|_| holds).map(EngineError::from);
        if self.misfit.is_some() {
            return;
        }
        if program.columns != self.program.columns {
            // What is fed now cannot be compared with what was.
            (self.shown, self.note, self.noted) = (None, None, None);
        }
        if program.functions != self.program.functions && self.status == Status::Running {
            self.status = Status::Broken;
            self.trouble = "its functions have changed".to_owned();
        }
        self.program = program;
    }

    /// The last epoch that was completed.
    fn epoch(&self) -> Option<u64> {
        self.frozen.as_ref().map_or(self.base.epoch, |frozen| frozen.at.epoch)
    }

    pub(crate) fn facts(&self, roster: &Roster) -> Facts {
        let at = self.frozen.as_ref().map_or(&self.base, |frozen| &frozen.at);
        Facts {
            status: self.status.told(),
            running: self.status == Status::Running,
            finished: self.status == Status::Finished,
            lost: self.status == Status::Lost,
            functions: self.program.functions,
            epoch: at.epoch,
            late_rows: at.late_rows,
            workers: self.members.len() as u32 * self.threads,
            leaving: self.leaving(roster),
        }
    }

    /// Who owns what, by operator in the order of the flow.
    pub(crate) fn layouts(&self) -> Vec<&Layout> {
        let names = self.program.plan.operators.iter().map(|operator| &operator.name);
        names.filter_map(|name| self.layouts.get(name)).collect()
    }

    /// Forgets everything; returns who was asked to do so too, and the last generation.
    pub(crate) fn drop_all(&mut self, view: &mut View<'_>) -> Result<(Vec<(Ticket, MemberId)>, u64), EngineError> {
        let calls = self.call.as_ref().filter(|call| call.what != What::Regroup);
        if let Some(epoch) = calls.map(|call| call.epoch).or_else(|| self.next.is_some().then(|| self.next_epoch())) {
            return Err(EngineError::Busy { running: epoch, asked: epoch });
        }
        self.trouble = "the query was dropped".to_owned();
        self.give_up_moves(view);
        let mut open = Vec::new();
        for member in std::mem::take(&mut self.members) {
            if view.roster.alive(member) {
                *view.tickets += 1;
                open.push((*view.tickets, member));
                let (ticket, query) = (*view.tickets, self.id.clone());
                view.out.push(Effect::Call { ticket, member, query, request: Request::Drop });
            }
        }
        Ok((open, self.stamp.generation))
    }

    fn next_epoch(&self) -> u64 {
        self.base.epoch.map_or(0, |last| last + 1)
    }

    /// Whether a member takes part: it holds state, outputs that a sink may ask for, or a vote in what runs.
    pub(crate) fn needs(&self, member: MemberId) -> bool {
        let present = !matches!(self.status, Status::Fresh | Status::Lost | Status::Finished) || self.call.is_some();
        present && self.members.contains(&member)
    }

    pub(crate) fn step(&mut self, event: Event, view: &mut View<'_>) {
        match event {
            Event::Batch { epoch, clock_ms, planned_ms, committed, .. } => {
                if self.call.as_ref().is_some_and(|call| call.what == What::Regroup) {
                    self.next = Some(event);
                } else {
                    self.batch(epoch, (clock_ms, planned_ms), committed, view);
                }
            }
            Event::Finish { clock_ms, committed, .. } => {
                if self.call.as_ref().is_some_and(|call| call.what == What::Regroup) {
                    self.next = Some(event);
                } else {
                    self.finish(clock_ms, committed, view);
                }
            }
            Event::Committed { epoch, .. } => {
                self.committed = self.committed.max(Some(epoch));
                self.settle(view);
                self.regroup(view);
            }
            Event::Rests { epoch, .. } => {
                let last = self.frozen.as_ref().and_then(|frozen| frozen.at.epoch);
                if self.call.is_none() && self.watched == Some(epoch) && last == Some(epoch) {
                    self.rests = true;
                    self.regroup(view);
                }
            }
            Event::Stop { .. } => self.stop(view),
            Event::GroupFailed { stamp, failure, .. } if stamp == self.stamp && self.status == Status::Running => {
                self.broke(&failure.message, view);
            }
            Event::Answer { ticket, answer } => {
                if let Some(asked) = self.asked.remove(&ticket) {
                    self.answered(asked, answer, view);
                }
            }
            Event::Stored { ticket, outcome } => {
                if let Some(asked) = self.asked.remove(&ticket) {
                    self.stored(asked, outcome, view);
                }
            }
            Event::Receipt { receipt, .. } => self.receipt(receipt),
            Event::Fed { ticket, outcome } => {
                self.asked.remove(&ticket);
                self.fed(outcome, view);
            }
            Event::Sunk { ticket, outcome } => {
                self.asked.remove(&ticket);
                self.sunk(outcome, view);
            }
            Event::Timer { ticket } => {
                if let Some(asked) = self.asked.remove(&ticket) {
                    self.rang(asked, view);
                }
            }
            _ => {}
        }
    }

    // Asking

    fn ask(&mut self, asked: Asked, view: &mut View<'_>) -> Ticket {
        *view.tickets += 1;
        self.asked.insert(*view.tickets, asked);
        *view.tickets
    }

    fn call_member(&mut self, member: MemberId, asked: Asked, request: Request, view: &mut View<'_>) -> Ticket {
        let ticket = self.ask(asked, view);
        view.out.push(Effect::Call { ticket, member, query: self.id.clone(), request });
        ticket
    }

    /// Asks without caring for the answer.
    fn tell(&mut self, member: MemberId, request: Request, view: &mut View<'_>) {
        *view.tickets += 1;
        view.out.push(Effect::Call { ticket: *view.tickets, member, query: self.id.clone(), request });
    }

    fn timer(&mut self, asked: Asked, after_ms: u64, view: &mut View<'_>) {
        let ticket = self.ask(asked, view);
        view.out.push(Effect::Timer { ticket, after_ms });
    }

    /// Asks again after a pause that doubles; fails the call when it was tried often enough.
    fn pause(&mut self, asked: Asked, tries: u32, what: &'static str, reason: String, view: &mut View<'_>) {
        // It may be the only one that cannot reach the store.
        let reason = match &asked {
            Asked::Load { member, .. } | Asked::Write { member, .. } => format!("member {}: {reason}", member.0),
            _ => reason,
        };
        if tries >= view.setup.store_tries {
            return self.fail(EngineError::Store { what, tries, reason }, view);
        }
        let after = view.setup.backoff_ms << (tries - 1).min(6);
        self.timer(Asked::Pause(Box::new(asked)), after, view);
    }

    /// What was asked for the present attempt is moot.
    fn forget_questions(&mut self) {
        self.asked.retain(|_, asked| {
            use Asked::*;
            matches!(asked, Migrate { .. } | Recut { .. } | Merge { .. } | Collect { .. } | Delete)
        });
    }

    // What comes back

    fn answered(&mut self, asked: Asked, answer: Result<Answer, Failure>, view: &mut View<'_>) {
        match asked {
            Asked::Stop(member) => self.stopped(member, answer, view),
            Asked::Load { member, ranges, files, tries } => self.loaded(member, ranges, files, tries, answer, view),
            Asked::Start(member) => self.started(member, answer, view),
            Asked::Discard(member) => self.discarded(member, view),
            Asked::Release(member) => self.released(member, answer, view),
            Asked::Write { member, tries } => self.written(member, tries, answer, view),
            Asked::Migrate { handle, steps, then } => self.migrated(handle, &steps, then, answer, view),
            Asked::Recut { handle, recut } => self.was_recut(handle, &recut, answer, view),
            Asked::Merge { names } => self.merged_files(names, answer),
            _ => {}
        }
    }

    fn stored(&mut self, asked: Asked, outcome: Result<Stored, StoreError>, view: &mut View<'_>) {
        match (asked, outcome) {
            (Asked::Collect { newest }, Ok(Stored::Contents(contents))) => {
                self.collect(&contents, newest.as_ref(), view);
                self.collected(view);
            }
            (Asked::Collect { .. } | Asked::Delete, _) => self.collected(view),
            (asked, Err(error @ StoreError::Damaged { .. })) => {
                let StoreError::Damaged { name, reason } = error else { unreachable!("just matched") };
                drop(asked);
                self.fail(EngineError::Damaged { name, reason }, view);
            }
            (asked, Err(StoreError::Unavailable(reason))) => self.unavailable(asked, reason, view),
            (Asked::Checkpoint { .. }, Ok(Stored::Contents(contents))) => self.read(&contents, view),
            (Asked::Claim { claim, .. }, Ok(Stored::Claimed(made))) => self.claimed(claim, made, view),
            (Asked::Claims { .. }, Ok(Stored::NewestClaim { number, nonce })) => self.checked(number, nonce, view),
            (Asked::Manifest { manifest, .. }, Ok(Stored::Written)) => self.sealed(*manifest, view),
            _ => {}
        }
    }

    fn unavailable(&mut self, asked: Asked, reason: String, view: &mut View<'_>) {
        let (what, tries) = match &asked {
            Asked::Checkpoint { tries } => ("reading the checkpoint", *tries),
            Asked::Claim { tries, .. } => ("claiming the checkpoint", *tries),
            Asked::Claims { tries } => ("reading the claims", *tries),
            Asked::Manifest { tries, .. } => ("writing the manifest", *tries),
            _ => return,
        };
        self.pause(asked, tries, what, reason, view);
    }

    fn rang(&mut self, asked: Asked, view: &mut View<'_>) {
        match asked {
            Asked::Members => self.nobody_came(view),
            Asked::Loss => self.no_loss(view),
            Asked::Pause(asked) => match *asked {
                Asked::Checkpoint { tries } => self.read_checkpoint(tries + 1, view),
                Asked::Claim { claim, tries } => self.make_claim(claim, tries + 1, view),
                Asked::Claims { tries } => self.check_claim(tries + 1, view),
                Asked::Manifest { mut manifest, tries } => {
                    // By another name: what the last try has left undone, such as a deletion, may be done yet.
                    manifest.nonce = self.nonce(view);
                    self.write_manifest(manifest, tries + 1, view);
                }
                Asked::Load { member, ranges, files, tries } => self.load(member, ranges, files, tries + 1, view),
                Asked::Write { member, tries } => self.write(member, tries + 1, view),
                _ => {}
            },
            _ => {}
        }
    }
}
