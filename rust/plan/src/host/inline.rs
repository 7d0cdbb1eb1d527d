//! One worker in the caller's thread: a whole plan, or one of its pieces, inside a Spark task.
//!
//! Owns a fabric of one worker and starts no thread, so it is safe in a forked Python worker. All input is
//! one epoch, each pushed block one slice of it; the watermark is infinite at its end.
//!
//! It works only while it is pulled. Where the plan is metered, a pull ends as soon as there is something worth handing on, and what
//! is not expanded yet stays where it is until the next pull: so a consumer that does not take holds everything up, and
//! what waits is what the bounded scopes admit and no more. Otherwise a pull ends when the block that was pushed has gone through.

use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow_array::RecordBatch;
use arrow_select::concat::concat_batches;
use penstock_dataflow::{Worker, fabric};
use penstock_progress::FlowTime;

use super::CLOSE;
use super::build::{self, Built, Shared};
use super::chain::bytes_of;
use super::group::{GroupConfig, HostError};
use super::resident::Resident;
use super::stats::ScopeStats;
use crate::block::FlowBlock;
use crate::callback::Callbacks;
use crate::error::OpError;
use crate::plan::Plan;

/// log2 of the bins of an inline worker: state never moves here, so few bins serve.
const BITS: u8 = 6;
/// Rows, or bytes, that are worth handing on.
const MADE_ROWS: usize = 8192;
const MADE_BYTES: usize = 2 << 20;

/// What a pull gives.
#[derive(Debug)]
pub enum Pulled {
    /// Output; there may be more.
    Made(Vec<RecordBatch>),
    /// Nothing yet, and the time is over.
    Working,
    /// Everything that was pushed has gone through.
    Idle,
}

/// See the module.
pub struct Inline {
    worker: Worker,
    built: Built,
    slice: u32,
    finished: bool,
    metered: bool,
    made: Vec<RecordBatch>,
    rows: usize,
    bytes: usize,
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
        let metered = !built.monitors.is_empty();
        Ok(Inline { worker, built, slice: 0, finished: false, metered, made: Vec::new(), rows: 0, bytes: 0 })
    }

    /// Takes one block in. Nothing happens before the next pull.
    ///
    /// # Errors
    /// `Finished` after [`finish`](Self::finish).
    pub fn push(&mut self, batch: &RecordBatch) -> Result<(), HostError> {
        if self.finished || self.slice == CLOSE - 1 {
            return Err(HostError::Finished);
        }
        self.built.input().send(FlowBlock::rows(batch.clone()));
        self.slice += 1;
        self.advance(self.slice);
        Ok(())
    }

    /// Ends the input: pulls then also give everything that was still open. Late rows cannot exist here.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    pub fn finish(&mut self) -> Result<(), HostError> {
        if std::mem::replace(&mut self.finished, true) {
            return Err(HostError::Finished);
        }
        self.advance(CLOSE);
        self.built.input().send(FlowBlock::Watermark(i64::MAX));
        self.built.input().send(FlowBlock::EndEpoch);
        drop(self.built.input.take());
        Ok(())
    }

    /// Works on what was pushed until there is output to hand on, everything has gone through, or `limit` is over.
    ///
    /// # Errors
    /// The failure of a step; the object is of no further use.
    pub fn pull(&mut self, limit: Duration) -> Result<Pulled, HostError> {
        let begun = Instant::now();
        loop {
            let idle = match self.finished {
                true => self.built.probes.output.done(),
                false => !self.built.probes.output.less_than(&FlowTime::new(0, self.slice)),
            };
            let enough = self.metered && (self.rows >= MADE_ROWS || self.bytes >= MADE_BYTES);
            if (idle || enough) && !self.made.is_empty() {
                return self.hand_on().map(Pulled::Made);
            }
            if idle {
                return Ok(Pulled::Idle);
            }
            if begun.elapsed() >= limit {
                return Ok(Pulled::Working);
            }
            self.worker.step()?;
            self.gather();
        }
    }

    /// The bounded scopes, as of now.
    pub fn scopes(&self) -> Vec<ScopeStats> {
        self.built.monitors.stats()
    }

    fn advance(&mut self, slice: u32) {
        self.built.advance(FlowTime::new(0, slice));
    }

    fn gather(&mut self) {
        for batch in self.built.outputs.take_all() {
            if self.metered {
                self.rows += batch.num_rows();
                self.bytes += bytes_of(&batch);
            }
            self.made.push(batch);
        }
    }

    /// What was made; small blocks of a metered plan as one.
    fn hand_on(&mut self) -> Result<Vec<RecordBatch>, HostError> {
        (self.rows, self.bytes) = (0, 0);
        let made = std::mem::take(&mut self.made);
        if !self.metered || made.len() == 1 {
            return Ok(made);
        }
        let joined = concat_batches(&made[0].schema(), &made).map_err(OpError::from)?;
        Ok(vec![joined])
    }
}
