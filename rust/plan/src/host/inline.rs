//! One worker in the caller's thread: a whole plan, or one of its pieces, inside a Spark task.
//!
//! Owns a fabric of one worker and starts no thread, so it is safe in a forked Python worker. All input is
//! one epoch, each pushed block one slice of it; the watermark is infinite at its end.

use std::sync::Arc;

use arrow_array::RecordBatch;
use penstock_dataflow::{Worker, fabric};
use penstock_progress::FlowTime;

use super::CLOSE;
use super::build::{self, Built, Shared};
use super::group::{GroupConfig, HostError};
use super::resident::Resident;
use crate::block::FlowBlock;
use crate::callback::Callbacks;
use crate::plan::Plan;

/// log2 of the bins of an inline worker: state never moves here, so few bins serve.
const BITS: u8 = 6;

/// See the module.
pub struct Inline {
    worker: Worker,
    built: Built,
    slice: u32,
    finished: bool,
}

impl Inline {
    /// Runs all of `plan`, or the piece between two exchanges with number `piece`.
    ///
    /// # Errors
    /// Those of [`Group::start`](super::Group::start).
    pub fn new(plan: Arc<Plan>, callbacks: Arc<dyn Callbacks>, piece: Option<usize>) -> Result<Self, HostError> {
        let config = GroupConfig::founding(plan, callbacks, BITS, 1);
        let shared = Shared::new(&config, &[0], &Resident::fresh())?;
        let endpoint = fabric::threads(1).into_iter().next().expect("a fabric of one worker has one endpoint");
        let mut worker = Worker::new(endpoint);
        let mut built = build::build(&mut worker, &config, &shared, piece)?;
        drop(built.control.take()); // nothing moves: a closed control input routes at once
        Ok(Inline { worker, built, slice: 0, finished: false })
    }

    /// Applies one block and returns what it makes at once.
    ///
    /// # Errors
    /// The failure of a step; the object is of no further use. `Finished` after [`finish`](Self::finish).
    pub fn push(&mut self, batch: &RecordBatch) -> Result<Vec<RecordBatch>, HostError> {
        if self.finished || self.slice == CLOSE - 1 {
            return Err(HostError::Finished);
        }
        let time = FlowTime::new(0, self.slice);
        self.built.input().send(FlowBlock::rows(batch.clone()));
        self.slice += 1;
        self.advance(self.slice);
        while self.built.probes.output.less_equal(&time) {
            self.worker.step()?;
        }
        Ok(self.taken())
    }

    /// Ends the input and returns everything that was still open. Late rows cannot exist here.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    pub fn finish(&mut self) -> Result<Vec<RecordBatch>, HostError> {
        if std::mem::replace(&mut self.finished, true) {
            return Err(HostError::Finished);
        }
        self.advance(CLOSE);
        self.built.input().send(FlowBlock::Watermark(i64::MAX));
        self.built.input().send(FlowBlock::EndEpoch);
        drop(self.built.input.take());
        while !self.built.probes.output.done() {
            self.worker.step()?;
        }
        Ok(self.taken())
    }

    fn advance(&mut self, slice: u32) {
        self.built.advance(FlowTime::new(0, slice));
    }

    fn taken(&mut self) -> Vec<RecordBatch> {
        self.built.outputs.take_all()
    }
}
