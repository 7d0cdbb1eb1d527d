//! Three queues of frames to one process, emptied by one thread: what waits in the urgent one is taken first, then data, then what
//! goes behind data. Putting never blocks. So that data which never ends does not hold up what is behind it for ever, one frame of
//! that goes first when four times its size has gone before it.
//!
//! Data is charged when it is put and credited when the receiver tells so; above the limit the lanes are over, until half of
//! it is free again. Whoever ends that is told, so that it wakes the sources that wait. Invariants: what is put before the lanes close
//! is taken; once everything charged is credited the lanes are not over. All of it changes under one lock, except that
//! [`Lanes::is_over`] only looks at a flag.
//!
//! Explored by `tests/models.rs`.

use std::collections::VecDeque;

use super::sync::{AtomicBool, Condvar, Mutex, MutexGuard, Ordering};

/// How far a link is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Frames are accepted.
    Open,
    /// This process leaves: what waits is sent, then the goodbye.
    Closing,
    /// The other process said goodbye: nothing more is sent to it.
    Departed,
}

/// Which queue a frame waits in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lane {
    /// Progress, credits, beats, aborts: before all else.
    Urgent,
    /// Data, which is charged.
    Data,
    /// What keeps its place among data and is not charged.
    Mark,
    /// What need not come soon, such as state that moves: not charged, since who sends it bounds it.
    Behind,
}

/// How much data goes before a frame behind it, in sizes of that frame.
const DATA_SHARE: u64 = 4;

/// A frame with its size.
type Sized<F> = (F, u64);

struct State<F> {
    urgent: VecDeque<Sized<F>>,
    data: VecDeque<Sized<F>>,
    behind: VecDeque<Sized<F>>,
    /// Bytes of data that went before the first frame behind.
    before: u64,
    phase: Phase,
    /// Bytes of all frames ever put, less those that were dropped unsent.
    offered: u64,
    /// Bytes of data ever put, and what of them the receiver has taken.
    charged: u64,
    credited: u64,
}

pub(crate) struct Lanes<F> {
    limit: u64,
    state: Mutex<State<F>>,
    ready: Condvar,
    over: AtomicBool,
}

impl<F> Lanes<F> {
    pub(crate) fn new(limit: u64) -> Self {
        let (urgent, data, behind) = (VecDeque::new(), VecDeque::new(), VecDeque::new());
        let (phase, before, offered, charged, credited) = (Phase::Open, 0, 0, 0, 0);
        let state = State { urgent, data, behind, before, phase, offered, charged, credited };
        Lanes { limit, state: Mutex::new(state), ready: Condvar::new(), over: AtomicBool::new(false) }
    }

    fn state(&self) -> MutexGuard<'_, State<F>> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Adds a frame if the lanes are open; the phase says whether they were.
    pub(crate) fn put(&self, lane: Lane, frame: F, bytes: u64) -> Phase {
        let mut state = self.state();
        if state.phase != Phase::Open {
            return state.phase;
        }
        state.offered += bytes;
        match lane {
            Lane::Urgent => state.urgent.push_back((frame, bytes)),
            Lane::Behind => state.behind.push_back((frame, bytes)),
            Lane::Mark => state.data.push_back((frame, bytes)),
            Lane::Data => {
                state.charged += bytes;
                if state.charged - state.credited > self.limit {
                    self.over.store(true, Ordering::Release);
                }
                state.data.push_back((frame, bytes));
            }
        }
        drop(state);
        self.ready.notify_one();
        Phase::Open
    }

    /// The receiver has taken this much data in all; true when that ended the excess, `None` when it cannot be.
    pub(crate) fn credit(&self, total: u64) -> Option<bool> {
        let mut state = self.state();
        if total > state.charged {
            return None;
        }
        // Two workers there may have told in the other order.
        state.credited = state.credited.max(total);
        let room = state.charged - state.credited <= self.limit / 2;
        Some(room && self.over.swap(false, Ordering::AcqRel))
    }

    /// Lets the next frame behind data go first, as if much data had gone before it, or not at all while data waits: for simulations, whose
    /// blocks are small.
    pub(crate) fn favour_behind(&self, favour: bool) {
        self.state().before = if favour { u64::MAX } else { 0 };
    }

    /// How many frames wait.
    pub(crate) fn waiting(&self) -> usize {
        let state = self.state();
        state.urgent.len() + state.data.len() + state.behind.len()
    }

    /// Whether more data is under way than the limit.
    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// Bytes ever put and not dropped.
    pub(crate) fn offered(&self) -> u64 {
        self.state().offered
    }

    pub(crate) fn is_departed(&self) -> bool {
        self.state().phase == Phase::Departed
    }

    /// Drops the data that waits, and what is behind it.
    pub(crate) fn drop_data(&self) {
        let mut state = self.state();
        let State { data, behind, .. } = &mut *state;
        let dropped = data.drain(..).chain(behind.drain(..)).map(|(_, bytes)| bytes).sum::<u64>();
        state.offered -= dropped;
    }

    /// Accepts no more; what waits can still be taken.
    pub(crate) fn close(&self) {
        let mut state = self.state();
        if state.phase == Phase::Open {
            state.phase = Phase::Closing;
        }
        drop(state);
        self.ready.notify_one();
    }

    /// Accepts no more and drops what waits.
    pub(crate) fn depart(&self) {
        let mut state = self.state();
        state.phase = Phase::Departed;
        // With their room: the lanes of who has left are kept.
        (state.urgent, state.data, state.behind) = Default::default();
        self.over.store(false, Ordering::Release);
        drop(state);
        self.ready.notify_one();
    }

    /// Takes all urgent frames, else data of about `bytes`, or one frame behind it; when there is nothing, waits if it may, and at last returns the phase.
    pub(crate) fn take(&self, frames: &mut Vec<F>, bytes: u64, may_wait: bool) -> Option<Phase> {
        let mut state = self.state();
        loop {
            if !state.urgent.is_empty() {
                frames.extend(state.urgent.drain(..).map(|(frame, _)| frame));
                return None;
            }
            let turn = |(_, size): &Sized<F>| state.data.is_empty() || state.before / DATA_SHARE >= *size;
            if state.behind.front().is_some_and(turn)
                && let Some((frame, _)) = state.behind.pop_front()
            {
                state.before = 0;
                frames.push(frame);
                return None;
            }
            let mut taken = 0;
            while taken < bytes
                && let Some((frame, size)) = state.data.pop_front()
            {
                taken += size;
                frames.push(frame);
            }
            if taken > 0 {
                if !state.behind.is_empty() {
                    state.before += taken;
                }
                return None;
            }
            if state.phase != Phase::Open || !may_wait {
                return Some(state.phase);
            }
            state = self.ready.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
    }
}
