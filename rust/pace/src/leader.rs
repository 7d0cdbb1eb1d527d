//! The leader's half of time: the control input and the migrations that travel on it.
//!
//! Owns the control input of worker 0 and the queue of migrations. A [`Migration`] says which step comes next and whether it
//! may, the [`ControlInput`] whether its moves are possible; they share one time, that of the control held. Control stays
//! a window ahead of the data, never at an epoch's first slice, which seals the one before, and reaches the next epoch only when the
//! output probe stands at this epoch's last slice, so a migration asked for in the middle of an epoch takes effect there; where epochs overlap, when the leader begins to feed
//! the next.
//!
//! A migration that is *prepared* for an epoch begins when control is there, before any row of the epoch is routed, whatever else is under way;
//! all that are prepared for one epoch begin at one time.
//!
//! *The gap.* What has been sent within an epoch when a step is complete is before the next step in any case: control stands a window ahead of the
//! input frontier, and no bin leaves before the output frontier is at the time of its step. What has been handed in and not sent, since the step held
//! the window up, waits for the next step as well. A migration that [drains](Cadence::drains) leaves a gap for it: when a step is complete the last
//! epoch handed in is noted, and control of the next step is issued when the output frontier has passed the last slice of that. What is handed in
//! later does not count, so rows that come faster than they are worked off hold no step up; and where nothing waits there is no gap.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use penstock_balance::{PauseLimit, Shift, Strategy, steps};
use penstock_bins::{Command, ControlError, ControlInput, Migration, Routing, ScheduleError};
use penstock_progress::{FlowTime, ProbeHandle};
use serde::{Deserialize, Serialize};

use crate::anchor::unix_ns;
use crate::{CLOSE, MARK, Probes, behind_seal, first};

/// How the steps of a migration follow one another. By default one by one, each as soon as the one before is complete.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cadence {
    /// Steps are taken together as long as they pause for no longer: the more, the quicker they prove.
    pub max_pause: Option<Duration>,
    /// Each but the first waits until what had been handed in when the one before was complete, and was not done, is done. So no row waits for
    /// two of them, and where input does not end, a migration takes as many epochs as steps.
    pub drains: bool,
}

impl From<Option<Duration>> for Cadence {
    fn from(max_pause: Option<Duration>) -> Self {
        Self { max_pause, drains: false }
    }
}

/// A migration as the host hands it in.
#[derive(Clone, Debug)]
pub struct Order {
    /// Names it.
    pub handle: u64,
    /// What moves.
    pub plan: Moves,
    /// How its steps follow one another.
    pub cadence: Cadence,
    /// The epoch that it is prepared for; by default it begins when those asked for before have ended.
    pub at_epoch: Option<u64>,
}

/// What a migration moves.
#[derive(Clone, Debug)]
pub enum Moves {
    /// These bins to these workers, step by step.
    Steps(Vec<Vec<(u32, u32)>>),
    /// Those of these bins that are elsewhere when it begins, in steps that are planned then.
    Then(Vec<(u32, u32)>, Strategy),
    /// Splits and merges, at one time between two epochs, when no rows wait in bins for the end of theirs.
    Recut(Vec<Command>),
}

impl Moves {
    /// The steps. Each is one batch of control, which names a bin once: of several moves the last counts.
    fn steps(self, routing: impl FnOnce() -> Routing) -> Migration<FlowTime> {
        let latest = |step: Vec<(u32, u32)>| step.into_iter().collect::<BTreeMap<u32, u32>>().into_iter();
        let steps = match self {
            Moves::Recut(commands) => return Migration::of_commands(commands),
            Moves::Steps(steps) => steps.into_iter().map(|step| latest(step).collect()).collect(),
            Moves::Then(moves, strategy) => {
                let routing = routing();
                let from = |bin| routing.owner_at(bin);
                // A bin that is not there stays in the list: control refuses it by name.
                let shifts = latest(moves).filter(|(bin, to)| from(*bin) != Some(*to));
                let shifts = shifts.map(|(what, to)| Shift { what, from: from(what).unwrap_or(to), to });
                let list = steps(strategy, &shifts.collect::<Vec<_>>()).expect("checked by who asked");
                list.into_iter().map(|step| step.into_iter().map(|shift| (shift.what, shift.to)).collect()).collect()
            }
        };
        Migration::from_steps(steps)
    }
}

/// Why a step, or a whole migration, was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Its moves are impossible.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// It was prepared for an epoch of which rows were routed before it came.
    #[error("epoch {at_epoch} has passed: control is at epoch {now}")]
    Passed {
        /// The epoch that it was prepared for.
        at_epoch: u64,
        /// The one that control is at.
        now: u64,
    },
}

/// One completed step of a migration.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StepReport {
    /// Its number, from 0.
    pub step: u32,
    /// Moves in the step.
    pub bins: u32,
    /// When its control was sent, nanoseconds since the Unix epoch.
    pub started_ns: u64,
    /// When the probe passed it, nanoseconds since the Unix epoch.
    pub ended_ns: u64,
    /// How long it held up the rows of its bins and what speaks of all bins at most, nanoseconds: from the end of all that was before it to its own.
    pub paused_ns: u64,
    /// Steps of the migration's list that were taken together.
    pub planned: u32,
    /// The epoch from which it holds, and the slice of it: at most [`MARK`]` + 1` where that is all of the epoch.
    pub epoch: u64,
    /// See `epoch`.
    pub slice: u32,
}

/// A migration that has ended.
#[derive(Clone, Debug)]
pub struct Migrated {
    /// Names it.
    pub handle: u64,
    /// The completed steps.
    pub steps: Vec<StepReport>,
    /// Why the step behind them was refused: nothing of it moved, and no further step was issued.
    pub refused: Option<Refusal>,
}

struct Running {
    handle: u64,
    migration: Migration<FlowTime>,
    /// The steps issued; the last may be under way.
    steps: Vec<StepReport>,
    /// When all before the step under way was done.
    reached: Option<Instant>,
    limit: Option<PauseLimit>,
    drains: bool,
    /// The last epoch of what waited when the latest step was complete, where that is to be done before the next.
    waiting: Option<u64>,
    /// It takes effect between two epochs only.
    between: bool,
}

impl Running {
    fn new(handle: u64, migration: Migration<FlowTime>, cadence: Cadence, between: bool) -> Self {
        let Cadence { max_pause, drains } = cadence;
        let limit = max_pause.map(PauseLimit::new);
        Running { handle, migration, steps: Vec::new(), reached: None, limit, drains, waiting: None, between }
    }

    /// Whether it waits for control to be between two epochs.
    fn waits(&self, time: FlowTime) -> bool {
        self.between && time.slice >= MARK && self.migration.next_step().is_some()
    }

    /// Whether something is to be done before the next step.
    fn is_draining(&self, probe: &ProbeHandle<FlowTime>) -> bool {
        self.waiting.is_some_and(|epoch| probe.less_equal(&FlowTime::new(epoch, CLOSE)))
    }

    /// Looks whether the step under way is complete; `given` is the last epoch handed in.
    fn observe(&mut self, probe: &ProbeHandle<FlowTime>, given: Option<u64>, at: Instant) -> bool {
        let flying = self.migration.progress().in_flight;
        if self.reached.is_none() && flying.is_some_and(|time| first(probe).is_none_or(|reached| reached >= time)) {
            self.reached = Some(at);
        }
        let over = self.migration.observe(probe);
        if over && let Some(step) = self.steps.last_mut() {
            self.waiting = given.filter(|_| self.drains);
            let paused = at - self.reached.take().unwrap_or(at);
            (step.ended_ns, step.paused_ns) = (unix_ns(at), paused.as_nanos() as u64);
            if let Some(limit) = &mut self.limit {
                limit.took(step.planned as usize, paused);
            }
        }
        over
    }

    /// Schedules the next step at the time of control; says whether there was one, and whether control must leave that time for it.
    fn issue(&mut self, control: &mut ControlInput<FlowTime>, at: Instant) -> Result<Option<bool>, ControlError> {
        let time = *control.time().expect("the control input is open as long as its leader");
        let groups = self.limit.as_ref().map_or(1, PauseLimit::groups);
        let Some(commands) = self.migration.issue(time, groups) else { return Ok(None) };
        let (step, bins) = (self.steps.len() as u32, commands.len() as u32);
        let told: u32 = self.steps.iter().map(|step| step.planned).sum();
        let planned = self.migration.progress().steps_issued as u32 - told;
        debug_assert!(time >= behind_seal(time.epoch), "nothing moves at a seal");
        match control.schedule(time, commands) {
            Ok(()) => {
                let now = unix_ns(at);
                let (started_ns, ended_ns, paused_ns) = (now, now, 0);
                let (epoch, slice) = (time.epoch, time.slice);
                self.steps.push(StepReport { step, bins, started_ns, ended_ns, paused_ns, planned, epoch, slice });
                Ok(Some(bins > 0))
            }
            Err(ScheduleError::Control(error)) => Err(error),
            Err(late) => unreachable!("scheduled for the time at which control stands: {late}"),
        }
    }
}

/// See the module.
pub struct Leader {
    control: ControlInput<FlowTime>,
    /// Migrations that wait for those before to end.
    queue: VecDeque<Order>,
    /// Migrations that wait for their epoch, in the order in which they were asked for.
    prepared: Vec<(u64, Order)>,
    /// At most one that has waited for others, and any number that were prepared.
    running: Vec<Running>,
    /// The one that has.
    turn: Option<u64>,
    /// The last epoch handed in.
    given: Option<u64>,
    /// Nothing moves at this time or before it: a worker that came may not have been told what was sent then.
    held: Option<FlowTime>,
}

impl Leader {
    /// Leads with this input; what is to move is asked for later.
    #[must_use]
    pub fn new(control: ControlInput<FlowTime>) -> Self {
        let (queue, prepared, running) = Default::default();
        Leader { control, queue, prepared, running, turn: None, given: None, held: None }
    }

    /// An epoch, or a part of one, was handed in to this worker, and to the others their shares.
    pub(crate) fn give(&mut self, epoch: u64) {
        self.given = self.given.max(Some(epoch));
    }

    /// Queues a migration.
    pub(crate) fn order(&mut self, order: Order) {
        match order.at_epoch {
            Some(epoch) => self.prepared.push((epoch, order)),
            None => self.queue.push_back(order),
        }
    }

    /// Issues no further step of a migration.
    pub(crate) fn cancel(&mut self, handle: u64) {
        let nothing = || Moves::Steps(Vec::new());
        self.queue.iter_mut().filter(|order| order.handle == handle).for_each(|order| order.plan = nothing());
        if let Some(at) = self.prepared.iter().position(|(_, order)| order.handle == handle) {
            let (_, order) = self.prepared.remove(at);
            self.running.push(Running::new(order.handle, Migration::from_steps(Vec::new()), order.cadence, false));
        }
        self.running.iter_mut().filter(|one| one.handle == handle).for_each(|one| one.migration.cancel());
    }

    /// From now on nothing moves that does not move later than this.
    pub(crate) fn hold(&mut self, time: FlowTime) {
        self.held = self.held.max(Some(time));
    }

    /// Where control stands.
    pub(crate) fn time(&self) -> FlowTime {
        *self.control.time().expect("the control input is open as long as its leader")
    }

    /// Advances control behind the probe and drives the migration under way.
    pub(crate) fn turn(
        &mut self,
        probes: &Probes,
        feeding: Option<u64>,
        window: u32,
        now: Instant,
        done: &mut dyn FnMut(Migrated),
    ) -> bool {
        self.pace(probes, feeding, window) | self.migrate(&probes.output, now, done)
    }

    fn advance(&mut self, time: FlowTime) {
        self.control.advance_to(time).expect("control moves forward: every target is checked against the time held");
    }

    /// Keeps control a window ahead of the least data that any worker has still to send, so that no block waits to be routed;
    /// and goes on to the next epoch when all else of this one is done: until then a migration can still take effect in it.
    fn pace(&mut self, probes: &Probes, feeding: Option<u64>, window: u32) -> bool {
        let held = self.time();
        let begin = behind_seal(held.epoch);
        if held < begin {
            self.advance(begin);
            return true;
        }
        let Some(epoch) = feeding.filter(|epoch| *epoch >= held.epoch) else { return false };
        let (Some(sent), Some(reached)) = (first(&probes.input), first(&probes.output)) else { return false };
        let target = if reached == FlowTime::new(epoch, CLOSE) {
            behind_seal(epoch + 1)
        } else if sent <= FlowTime::new(epoch, MARK) {
            FlowTime::new(epoch, MARK + 1)
        } else if sent.epoch == epoch {
            FlowTime::new(epoch, sent.slice.saturating_add(window))
        } else {
            FlowTime::new(epoch, CLOSE)
        };
        // What is prepared for an epoch begins before its rows are routed.
        let due =
            self.prepared.iter().map(|(epoch, _)| FlowTime::new(*epoch, MARK + 1)).filter(|due| *due > held).min();
        let target = due.map_or(target, |due| target.min(due));
        // What takes effect between two epochs waits for the next such time.
        let between = self.running.iter().any(|running| running.waits(held));
        let target = if between { target.min(behind_seal(held.epoch + 1)) } else { target };
        if target <= held {
            return false;
        }
        self.advance(target);
        true
    }

    fn migrate(&mut self, probe: &ProbeHandle<FlowTime>, at: Instant, done: &mut dyn FnMut(Migrated)) -> bool {
        if let Some(held) = self.held {
            // Also when nothing is to move: what was sent at that time waits for it, and who leaves for what it has of that. Within its
            // epoch control may always go on; the next one comes when all else of this one is done.
            let (now, next) = (self.time(), FlowTime::new(held.epoch, held.slice.saturating_add(1)));
            if now <= held && now.epoch == held.epoch && next.slice < CLOSE {
                self.advance(next);
            }
        }
        let time = self.time();
        let mut busy = false;
        let mut refused = BTreeMap::new();
        let (mut begin, mut prepared) = (Vec::new(), Vec::new());
        for (epoch, order) in std::mem::take(&mut self.prepared) {
            if time < behind_seal(epoch) {
                prepared.push((epoch, order));
                continue;
            }
            if time > FlowTime::new(epoch, MARK + 1) {
                refused.insert(order.handle, Refusal::Passed { at_epoch: epoch, now: time.epoch });
            }
            begin.push(order);
        }
        self.prepared = prepared;
        if self.turn.is_none()
            && let Some(order) = self.queue.pop_front()
        {
            self.turn = Some(order.handle);
            begin.push(order);
        }
        // What is prepared for one epoch begins at one time; else one step is issued at a time, so that none names a bin of another.
        let together = begin.iter().any(|order| order.at_epoch.is_some());
        let old = self.running.len();
        for Order { handle, plan, cadence, .. } in begin {
            let (between, passed) = (matches!(plan, Moves::Recut(_)), refused.contains_key(&handle));
            let plan = if passed { Moves::Steps(Vec::new()) } else { plan };
            let migration = plan.steps(|| self.control.routing());
            self.running.push(Running::new(handle, migration, cadence, between));
        }
        let mut leave = false;
        for (place, running) in self.running.iter_mut().enumerate() {
            busy |= running.observe(probe, self.given, at);
            let waits = if together { place < old || self.turn == Some(running.handle) } else { leave };
            let waits = waits || running.waits(time) || running.is_draining(probe);
            // At the epoch's last slice there is no later slice to advance to: wait for the next epoch.
            if waits || time.slice == CLOSE || self.held.is_some_and(|held| time <= held) {
                continue;
            }
            match running.issue(&mut self.control, at) {
                Ok(issued) => {
                    busy |= issued.is_some();
                    leave |= issued == Some(true);
                }
                Err(error) => drop(refused.insert(running.handle, error.into())),
            }
        }
        if leave {
            self.advance(FlowTime::new(time.epoch, time.slice + 1));
        }
        let over = |one: &mut Running| refused.contains_key(&one.handle) || one.migration.is_done();
        for Running { handle, steps, .. } in self.running.extract_if(.., over).collect::<Vec<_>>() {
            self.turn.take_if(|turn| *turn == handle);
            done(Migrated { handle, steps, refused: refused.remove(&handle) });
            busy = true;
        }
        busy
    }
}
