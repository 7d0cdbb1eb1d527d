//! What a bounded scope is doing on this worker.

use std::cell::RefCell;
use std::fmt::Debug;
use std::rc::Rc;

use crate::controller::{Controller, Phase};
use crate::error::Failure;
use crate::regulator::Regulator;
use crate::window::Window;

/// Failures that are kept; all are counted.
const KEPT: usize = 100;

/// Figures of one bounded scope on one worker.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Stats {
    /// N: batches that may be unfinished, now.
    pub batches: u64,
    /// B: items per batch, now.
    pub batch_size: u64,
    /// What the controller is doing: the one of all workers of this process, whose figures follow.
    pub phase: Phase,
    /// How often a bound was raised to stay.
    pub raises: u64,
    /// How often a bound shrank.
    pub shrinks: u64,
    /// Items per second in the last period that the controller judged.
    pub rate: Option<f64>,
    /// Batches admitted so far, and their items.
    pub admitted: u64,
    /// See `admitted`.
    pub admitted_items: u64,
    /// Batches admitted and not finished, and their items.
    pub unfinished: u64,
    /// See `unfinished`.
    pub unfinished_items: u64,
    /// The most batches that were unfinished at their outer times and before: at most N.
    pub maximum: u64,
    /// The most items that were unfinished.
    pub maximum_items: u64,
    /// Inputs that wait before the scope, one that has begun included.
    pub buffered: u64,
    /// Inputs whose expansion failed.
    pub failed: u64,
    /// The batch that is unfinished for longest: its time. None when none is.
    pub holding: Option<String>,
}

/// Asks the probe about a batch.
type Asked<O> = Box<dyn Fn(&O, u64) -> bool>;

/// What batcher and monitor share.
pub(crate) struct Shared<O> {
    pub(crate) window: Window<O>,
    pub(crate) regulator: Regulator,
    pub(crate) buffered: u64,
    pub(crate) failed: u64,
    pub(crate) failures: Vec<Failure>,
    /// Whether a batch is unfinished.
    pub(crate) unfinished: Asked<O>,
    /// Shows the time of a batch.
    pub(crate) show: fn(&O, u64) -> String,
}

impl<O: Ord + Clone> Shared<O> {
    pub(crate) fn fail(&mut self, failure: Failure) {
        self.failed += 1;
        if self.failures.len() < KEPT {
            self.failures.push(failure);
        }
    }

    fn stats(&self) -> Stats {
        let Shared { window, regulator, .. } = self;
        // The batcher may not have run since the probe moved.
        let (unfinished, unfinished_items, oldest) = window.standing(&self.unfinished);
        let ((maximum, maximum_items), (admitted, admitted_items)) = (window.most(), window.admitted());
        let controller = regulator.controller();
        let (batches, batch_size) = controller.as_ref().map_or_else(|bounds| *bounds, Controller::bounds);
        let (raises, shrinks) = controller.as_ref().map_or((0, 0), Controller::moves);
        Stats {
            batches,
            batch_size,
            phase: controller.as_ref().map_or(Phase::Fixed, Controller::phase),
            raises,
            shrinks,
            rate: controller.ok().and_then(|controller| controller.rate()),
            admitted,
            admitted_items,
            unfinished,
            unfinished_items,
            maximum,
            maximum_items,
            buffered: self.buffered,
            failed: self.failed,
            holding: oldest.map(|(outer, number)| (self.show)(outer, number)),
        }
    }
}

trait View {
    fn stats(&self) -> Stats;
    fn failures(&self) -> Vec<Failure>;
}

impl<O: Ord + Clone> View for RefCell<Shared<O>> {
    fn stats(&self) -> Stats {
        self.borrow().stats()
    }
    fn failures(&self) -> Vec<Failure> {
        self.borrow().failures.clone()
    }
}

/// A view of one bounded scope on this worker. Outlives the dataflow. Clones see the same scope.
#[derive(Clone)]
pub struct Monitor(Rc<dyn View>);

impl Monitor {
    pub(crate) fn new<O: Ord + Clone + 'static>(shared: Rc<RefCell<Shared<O>>>) -> Self {
        Monitor(shared)
    }

    /// The figures as of now.
    pub fn stats(&self) -> Stats {
        self.0.stats()
    }

    /// The first hundred failures; [`Stats::failed`] counts all.
    pub fn failures(&self) -> Vec<Failure> {
        self.0.failures()
    }
}

impl Debug for Monitor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Monitor").field(&self.stats()).finish()
    }
}
