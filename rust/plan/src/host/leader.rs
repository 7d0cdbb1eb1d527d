//! The leader's half of time: the control input and the migrations that travel on it.
//!
//! Owns the control input of worker 0 and the queue of migrations. A [`Migration`] says which step comes next and whether it
//! may, the [`ControlInput`] whether its moves are possible; they share one time, that of the control held. Control stays
//! a window ahead of the data, never at an epoch's first slice, which seals the one before, and reaches the next epoch only when the
//! output probe stands at this epoch's last slice, so a migration asked for in the middle of an epoch takes effect there; where epochs overlap, when the leader begins to feed
//! the next.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use penstock_balance::PauseLimit;
use penstock_bins::{ControlError, ControlInput, Migration, ScheduleError};
use penstock_progress::{FlowTime, ProbeHandle};
use serde::{Deserialize, Serialize};

use super::stats::unix_ns;
use super::{CLOSE, MARK, SEAL};

/// A migration as the host hands it in.
#[derive(Clone, Debug)]
pub(crate) struct Order {
    pub(crate) handle: u64,
    pub(crate) steps: Vec<Vec<(u32, u32)>>,
    /// Steps are taken together as long as they pause for no longer.
    pub(crate) max_pause: Option<Duration>,
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
    /// How long nothing was applied for it, nanoseconds: from the end of all that was before it to its own.
    pub paused_ns: u64,
    /// Steps of the migration's list that were taken together.
    pub planned: u32,
}

/// A migration that has ended.
#[derive(Clone, Debug)]
pub(crate) struct Migrated {
    pub(crate) handle: u64,
    /// The completed steps.
    pub(crate) steps: Vec<StepReport>,
    /// Why the step behind them was refused: nothing of it moved, and no further step was issued.
    pub(crate) refused: Option<ControlError>,
}

/// What the workers can see of time.
pub(crate) struct Probes {
    /// The least data that any worker has still to send.
    pub(crate) input: ProbeHandle<FlowTime>,
    /// The least control that the leader has still to send.
    pub(crate) control: ProbeHandle<FlowTime>,
    /// The least time of which output may still come.
    pub(crate) output: ProbeHandle<FlowTime>,
}

/// The frontier, which is one time or none: flow time is totally ordered.
pub(crate) fn first(probe: &ProbeHandle<FlowTime>) -> Option<FlowTime> {
    probe.with_frontier(|frontier| frontier.first().copied())
}

struct Running {
    handle: u64,
    migration: Migration<FlowTime>,
    /// The steps issued; the last may be under way.
    steps: Vec<StepReport>,
    /// When all before the step under way was done.
    reached: Option<Instant>,
    limit: Option<PauseLimit>,
}

/// See the module.
pub(crate) struct Leader {
    control: ControlInput<FlowTime>,
    window: u32,
    queue: VecDeque<Running>,
    running: Option<Running>,
}

impl Leader {
    pub(crate) fn new(control: ControlInput<FlowTime>, window: u32) -> Self {
        Leader { control, window, queue: VecDeque::new(), running: None }
    }

    /// Queues a migration. A step is one batch of control, which names a bin once: of several moves the last counts.
    pub(crate) fn order(&mut self, order: Order) {
        let steps = order.steps.into_iter().map(|step| {
            let latest = step.into_iter().collect::<BTreeMap<u32, u32>>();
            latest.into_iter().collect()
        });
        let migration = Migration::from_steps(steps.collect());
        let limit = order.max_pause.map(PauseLimit::new);
        self.queue.push_back(Running { handle: order.handle, migration, steps: Vec::new(), reached: None, limit });
    }

    /// Issues no further step of a migration.
    pub(crate) fn cancel(&mut self, handle: u64) {
        let known = self.running.iter_mut().chain(&mut self.queue);
        known.filter(|running| running.handle == handle).for_each(|running| running.migration.cancel());
    }

    /// Where control stands.
    pub(crate) fn time(&self) -> FlowTime {
        *self.control.time().expect("the control input is open as long as its leader")
    }

    /// Advances control behind the probe and drives the migration under way.
    pub(crate) fn turn(&mut self, probes: &Probes, feeding: Option<u64>, done: &mut dyn FnMut(Migrated)) -> bool {
        self.pace(probes, feeding) | self.migrate(&probes.output, done)
    }

    fn advance(&mut self, time: FlowTime) {
        self.control.advance_to(time).expect("control moves forward: every target is checked against the time held");
    }

    /// Keeps control a window ahead of the least data that any worker has still to send, so that no block waits to be routed;
    /// and goes on to the next epoch when all else of this one is done: until then a migration can still take effect in it.
    fn pace(&mut self, probes: &Probes, feeding: Option<u64>) -> bool {
        let held = self.time();
        if held.slice == SEAL {
            self.advance(FlowTime::new(held.epoch, SEAL + 1));
            return true;
        }
        let Some(epoch) = feeding.filter(|epoch| *epoch >= held.epoch) else { return false };
        let (Some(sent), Some(reached)) = (first(&probes.input), first(&probes.output)) else { return false };
        let target = if reached == FlowTime::new(epoch, CLOSE) {
            FlowTime::new(epoch + 1, SEAL + 1)
        } else if sent <= FlowTime::new(epoch, MARK) {
            FlowTime::new(epoch, MARK + 1)
        } else if sent.epoch == epoch {
            FlowTime::new(epoch, sent.slice.saturating_add(self.window))
        } else {
            FlowTime::new(epoch, CLOSE)
        };
        if target <= held {
            return false;
        }
        self.advance(target);
        true
    }

    fn migrate(&mut self, probe: &ProbeHandle<FlowTime>, done: &mut dyn FnMut(Migrated)) -> bool {
        let time = self.time();
        if self.running.is_none() {
            self.running = self.queue.pop_front();
        }
        let Some(running) = &mut self.running else { return false };
        let at = Instant::now();
        let flying = running.migration.progress().in_flight;
        if running.reached.is_none() && flying.is_some_and(|time| first(probe).is_none_or(|reached| reached >= time)) {
            running.reached = Some(at);
        }
        let mut busy = running.migration.observe(probe);
        let mut refused = None;
        let now = unix_ns(at);
        if busy && let Some(step) = running.steps.last_mut() {
            let paused = at - running.reached.take().unwrap_or(at);
            (step.ended_ns, step.paused_ns) = (now, paused.as_nanos() as u64);
            if let Some(limit) = &mut running.limit {
                limit.took(step.planned as usize, paused);
            }
        }
        // At the epoch's last slice there is no later slice to advance to: wait for the next epoch.
        if time.slice < CLOSE
            && let Some(commands) = running.migration.issue(time, running.limit.as_ref().map_or(1, PauseLimit::groups))
        {
            let (step, bins) = (running.steps.len() as u32, commands.len() as u32);
            let told: u32 = running.steps.iter().map(|step| step.planned).sum();
            let planned = running.migration.progress().steps_issued as u32 - told;
            debug_assert!(time.slice > SEAL, "nothing moves at a seal");
            match self.control.schedule(time, commands) {
                Ok(()) => {
                    let report = StepReport { step, bins, started_ns: now, ended_ns: now, paused_ns: 0, planned };
                    running.steps.push(report);
                }
                Err(ScheduleError::Control(error)) => refused = Some(error),
                Err(late) => unreachable!("scheduled for the time at which control stands: {late}"),
            }
            if refused.is_none() && bins > 0 {
                self.advance(FlowTime::new(time.epoch, time.slice + 1));
            }
            busy = true;
        }
        let over = |running: &mut Running| refused.is_some() || running.migration.is_done();
        if let Some(Running { handle, steps, .. }) = self.running.take_if(over) {
            done(Migrated { handle, steps, refused });
            busy = true;
        }
        busy
    }
}
