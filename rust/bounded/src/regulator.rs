//! The bounds in force: constant, or those of the one controller that a scope has in a process.
//!
//! Owns [`Regulator`], which a batcher asks, and [`Common`], which the workers of a process share: the controller, what has been admitted and
//! finished by all of them, their clock and their reading of memory. Invariants:
//!
//! - All workers of a process are under the same bounds: those of the worker that builds the scope first, or what the one controller makes of them.
//! - A look at the bounds is one load, and a run of the batcher a few counts. Who wins an exchange decides, once per period, and reads
//!   memory before it takes the lock; others take the lock only when the bounds have changed, to copy them.
//! - A period in which some worker ran out of input, or got input again, says nothing about the bounds. One that has none all the
//!   time has no say.
//!
//! Processes have a controller each. N and B are bounds per worker, so nothing has to agree between processes; memory, which shrinks
//! them, is a process's own; and rates are compared with those of the same process moments before.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::bounds::{Adaptive, Bounds, Clock, Policy};
use crate::controller::{Controller, Progress};
use crate::memory::Memory;

/// No time, and no number of batches, comes to this.
const NEVER: u64 = u64::MAX;

/// What the workers of a process share of a scope's bounds.
pub(crate) enum Common {
    Fixed(u64, u64),
    Adaptive(Box<Shared>),
}

impl Common {
    pub(crate) fn new(bounds: &Bounds) -> Self {
        match &bounds.policy {
            Policy::Fixed { batches, batch_size } => Common::Fixed(*batches, *batch_size),
            Policy::Adaptive(adaptive) => Common::Adaptive(Box::new(Shared::new(adaptive))),
        }
    }
}

/// The controller and what it is told.
pub(crate) struct Shared {
    controller: Mutex<Controller>,
    /// How often the bounds have changed.
    version: AtomicU64,
    /// When the period is over. Who exchanges it for [`NEVER`] decides.
    due_ns: AtomicU64,
    /// When so many batches have finished, those of older bounds have. Who exchanges it for [`NEVER`] says so.
    settles_at: AtomicU64,
    admitted: AtomicU64,
    finished: AtomicU64,
    finished_items: AtomicU64,
    /// Whether some worker ran out of input, or got some again, in this period.
    uneven: AtomicBool,
    memory: Memory,
    clock: Clock,
}

impl Shared {
    fn new(Adaptive { limits, memory, clock }: &Adaptive) -> Self {
        let controller = Controller::new(limits.clone(), clock());
        let zero = || AtomicU64::new(0);
        Shared {
            version: zero(),
            due_ns: AtomicU64::new(controller.due_ns()),
            settles_at: AtomicU64::new(NEVER),
            controller: Mutex::new(controller),
            admitted: zero(),
            finished: zero(),
            finished_items: zero(),
            uneven: AtomicBool::new(false),
            memory: memory.clone(),
            clock: clock.clone(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Controller> {
        self.controller.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The counts may be of slightly different moments.
    fn progress(&self) -> Progress {
        let batches = self.finished.load(Ordering::Relaxed);
        Progress {
            batches,
            items: self.finished_items.load(Ordering::Relaxed),
            unfinished: self.admitted.load(Ordering::Relaxed).saturating_sub(batches),
        }
    }

    /// One worker of those that see it due.
    fn turn(&self, counter: &AtomicU64, reached: u64) -> bool {
        let due = counter.load(Ordering::Relaxed);
        reached >= due && counter.compare_exchange(due, NEVER, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    fn observe(&self) {
        let now_ns = (self.clock)();
        if self.turn(&self.settles_at, self.finished.load(Ordering::Relaxed)) {
            self.tell(|controller| {
                self.uneven.store(false, Ordering::Relaxed);
                controller.settle(now_ns, self.progress());
            });
        }
        if self.turn(&self.due_ns, now_ns) {
            let share = self.memory.share();
            self.tell(|controller| {
                if self.uneven.swap(false, Ordering::Relaxed) {
                    controller.starved();
                }
                controller.observe(now_ns, self.progress(), share);
            });
        }
    }

    /// Tells the controller, and what it says to all workers.
    fn tell(&self, tell: impl FnOnce(&mut Controller)) {
        let mut controller = self.lock();
        let before = controller.bounds();
        tell(&mut controller);
        self.settles_at.store(controller.settles_at().unwrap_or(NEVER), Ordering::Relaxed);
        self.due_ns.store(controller.due_ns(), Ordering::Relaxed);
        if controller.bounds() != before {
            self.version.fetch_add(1, Ordering::Release);
        }
    }
}

/// What one worker has told so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Told {
    /// Batches admitted.
    pub(crate) admitted: u64,
    /// Batches finished, and their items.
    pub(crate) finished: u64,
    pub(crate) finished_items: u64,
    /// Whether more waits to be admitted.
    pub(crate) waiting: bool,
}

/// The bounds of a scope as one worker sees them.
pub(crate) struct Regulator {
    common: Arc<Common>,
    /// The bounds as of this version.
    version: u64,
    bounds: (u64, u64),
    told: Told,
}

impl Regulator {
    pub(crate) fn new(common: Arc<Common>) -> Self {
        let mut regulator = Regulator { common, version: NEVER, bounds: (0, 0), told: Told::default() };
        if let Common::Fixed(batches, batch_size) = &*regulator.common {
            regulator.bounds = (*batches, *batch_size);
        }
        regulator
    }

    /// N and B now.
    pub(crate) fn bounds(&mut self) -> (u64, u64) {
        if let Common::Adaptive(shared) = &*self.common
            && shared.version.load(Ordering::Acquire) != self.version
        {
            let controller = shared.lock();
            (self.version, self.bounds) = (shared.version.load(Ordering::Relaxed), controller.bounds());
        }
        self.bounds
    }

    /// The controller as it is now, if there is one; else the constant bounds.
    pub(crate) fn controller(&self) -> Result<Controller, (u64, u64)> {
        match &*self.common {
            Common::Adaptive(shared) => Ok(shared.lock().clone()),
            Common::Fixed(..) => Err(self.bounds),
        }
    }

    /// Tells what this worker has done so far.
    pub(crate) fn observe(&mut self, told: Told) {
        let before = std::mem::replace(&mut self.told, told);
        let Common::Adaptive(shared) = &*self.common else { return };
        let counts = [
            (&shared.admitted, told.admitted - before.admitted),
            (&shared.finished, told.finished - before.finished),
            (&shared.finished_items, told.finished_items - before.finished_items),
        ];
        for (count, more) in counts {
            if more > 0 {
                count.fetch_add(more, Ordering::Relaxed);
            }
        }
        shared.observe();
        if told.waiting != before.waiting || !told.waiting && told.admitted > before.admitted {
            shared.uneven.store(true, Ordering::Relaxed);
        }
    }
}
