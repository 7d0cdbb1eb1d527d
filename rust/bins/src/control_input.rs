//! The control input, kept by one worker.
//!
//! Commands are scheduled for any time that control has not left, however far ahead, and are checked at once. A batch
//! enters the dataflow when control time leaves its time: no configuration could be certain earlier, and until then more
//! commands may join it.
//!
//! Invariant: every batch that is emitted is acceptable to F (given the members it was checked against).
//!
//! Source: Megaphone §3.3; M-05, M-06.

use std::collections::BTreeMap;

use penstock_dataflow::{InputHandle, Scope};
use penstock_progress::{Timestamp, TotalOrder};

use crate::control::{Command, Control, check_commands};
use crate::error::{ControlError, ScheduleError};
use crate::routing::Routing;

/// Schedules commands into the control stream of one or more operators.
///
/// Dropping it closes the control input without emitting what is still scheduled.
pub struct ControlInput<T: Timestamp> {
    input: Option<InputHandle<T, Vec<Control>>>,
    schedule: BTreeMap<T, Vec<Command>>,
    emitted: Routing,
    /// Tells members from absent workers.
    present: Box<dyn Fn(u32) -> bool>,
    next_sequence: u64,
}

impl<T: Timestamp + TotalOrder> ControlInput<T> {
    /// Takes the input; `routing` is the initial one of the operators (of any, where there are several: checks ask only how many bins
    /// there are), `peers` the number of workers.
    #[must_use]
    pub fn new(input: InputHandle<T, Vec<Control>>, routing: Routing, peers: usize) -> Self {
        let present = Box::new(move |worker: u32| (worker as usize) < peers);
        Self { input: Some(input), schedule: BTreeMap::new(), emitted: routing, present, next_sequence: 0 }
    }

    /// As [`ControlInput::new`], among the workers that take part when a command is scheduled, by their index, in a run that workers join and
    /// leave. All control of such a run comes from one worker, since sequence numbers go on from one batch to the next.
    #[must_use]
    pub fn among(input: InputHandle<T, Vec<Control>>, routing: Routing, scope: &Scope<T>) -> Self {
        let members = scope.clone();
        let present = Box::new(move |worker: u32| members.has_member(worker as usize));
        Self { input: Some(input), schedule: BTreeMap::new(), emitted: routing, present, next_sequence: 0 }
    }

    /// Where control stands; `None` once closed.
    #[must_use]
    pub fn time(&self) -> Option<&T> {
        self.input.as_ref().map(InputHandle::time)
    }

    /// The routing once everything scheduled has taken effect.
    #[must_use]
    pub fn routing(&self) -> Routing {
        let mut routing = self.emitted.clone();
        for command in self.schedule.values().flatten() {
            _ = routing.apply(command).expect("checked when it was scheduled");
        }
        routing
    }

    /// Schedules commands for `time`, beside those already scheduled for it.
    ///
    /// # Errors
    /// [`ScheduleError::Late`] for a time that control has left, [`ScheduleError::Control`] for commands that F would
    /// refuse; nothing changes.
    pub fn schedule(&mut self, time: T, mut commands: Vec<Command>) -> Result<(), ScheduleError<T>> {
        if self.time().is_none_or(|held| time < *held) {
            return Err(self.late(time));
        }
        let before = self.schedule.get(&time).map(Vec::as_slice).unwrap_or_default();
        if u32::try_from(before.len() + commands.len()).is_err() {
            let present = before.len() + commands.len();
            return Err(ControlError::Count { announced: u32::MAX, present }.into());
        }
        let present = &self.present;
        let recuts = |command: &Command| matches!(command, Command::Split { .. } | Command::Merge { .. });
        let cut = self.emitted.is_split() || self.schedule.values().flatten().chain(&commands).any(recuts);
        if cut {
            // Which bins there are depends on what comes before, and what comes after on this.
            let mut routing = self.emitted.clone();
            let mut all: BTreeMap<&T, Vec<&Command>> =
                self.schedule.iter().map(|(time, commands)| (time, commands.iter().collect())).collect();
            all.entry(&time).or_default().extend(&commands);
            for batch in all.into_values() {
                let changes = check_commands(batch.into_iter(), &routing, present)?;
                routing.forward(&changes);
            }
        } else {
            check_commands(before.iter().chain(&commands), &self.emitted, present)?;
        }
        if !commands.is_empty() {
            self.schedule.entry(time).or_default().append(&mut commands);
        }
        Ok(())
    }

    /// Moves control to `time` and emits the batches of all times before it.
    ///
    /// # Errors
    /// [`ScheduleError::Late`] for a time before the present one; nothing changes.
    pub fn advance_to(&mut self, time: T) -> Result<(), ScheduleError<T>> {
        if self.time().is_none_or(|held| time < *held) {
            return Err(self.late(time));
        }
        let later = self.schedule.split_off(&time);
        let due = std::mem::replace(&mut self.schedule, later);
        self.emit(due);
        if let Some(input) = &mut self.input {
            input.advance_to(time).expect("control time was compared above");
        }
        Ok(())
    }

    /// Emits everything scheduled, then closes the control input.
    pub fn close(&mut self) {
        let due = std::mem::take(&mut self.schedule);
        self.emit(due);
        if let Some(input) = self.input.take() {
            input.close();
        }
    }

    fn emit(&mut self, due: BTreeMap<T, Vec<Command>>) {
        let Some(input) = &mut self.input else { return };
        for (time, commands) in due {
            for command in &commands {
                _ = self.emitted.apply(command).expect("checked when it was scheduled");
            }
            input.advance_to(time).expect("scheduled times are not before control time and ascend");
            input.send(Control::batch(self.next_sequence, commands));
            self.next_sequence += 1;
        }
    }

    #[cold]
    fn late(&self, asked: T) -> ScheduleError<T> {
        ScheduleError::Late { held: self.time().cloned(), asked }
    }
}
