//! One worker in the caller's thread: a whole plan, or one of its pieces, inside a Spark task.
//!
//! Owns a fabric of one worker and starts no thread, so it is safe in a forked Python worker. All input is
//! one epoch, each pushed block one slice of it, or several where the plan expands it; the watermark is infinite at its end.
//!
//! It works only while it is pulled. Where the plan is metered, a pull ends as soon as there is something worth handing on, and what
//! is not expanded yet stays where it is until the next pull: so a consumer that does not take holds everything up, and
//! what waits is what the bounded scopes admit and no more. Otherwise a pull ends when the block that was pushed has gone through.
//!
//! Departure: a partition is driven by its consumer. A pull of a metered plan ends when 8,192 rows or 2 MiB are made,
//! and expansion rests in the batcher as everywhere, because nobody steps: there is no second mechanism of admission.

use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow_array::RecordBatch;
use penstock_dataflow::{Worker, fabric};
use penstock_pace::CLOSE;
use penstock_progress::FlowTime;

use super::build::{self, Built, Shared, WORTH_TELLING, Worth};
use super::group::{GroupConfig, HostError};
use super::pieces::Piece;
use super::resident::Resident;
use super::stats::ScopeStats;
use crate::block::FlowBlock;
use crate::callback::Callbacks;
use crate::plan::Plan;

/// log2 of the bins of an inline worker: state never moves here, so few bins serve.
const BITS: u8 = 6;
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
    slice_rows: usize,
    finished: bool,
    /// Whether output is handed on before all that was pushed has gone through.
    eager: bool,
}

impl Inline {
    /// Runs all of `plan`, or one of its [pieces](Plan::pieces).
    ///
    /// # Errors
    /// Those of [`Group::start`](super::Group::start).
    pub fn new(plan: Arc<Plan>, callbacks: Arc<dyn Callbacks>, piece: Option<Piece>) -> Result<Self, HostError> {
        let mut config = GroupConfig::founding(plan, callbacks, BITS, 1);
        config.wanted = Some(Vec::new()); // a pull gives rows of one schema
        config.eager = config.plan.is_metered() || config.plan.overlaps();
        let shared = Shared::new(&config, &[0], &mut Resident::fresh())?;
        let endpoint = fabric::threads(1).into_iter().next().expect("a fabric of one worker has one endpoint");
        let mut worker = Worker::new(endpoint);
        let mut built = build::build(&mut worker, &config, &shared, piece)?;
        drop(built.control.take()); // nothing moves: a closed control input routes at once
        let slice_rows = if config.plan.is_metered() { config.slice_rows } else { usize::MAX };
        Ok(Inline { worker, built, slice: 0, slice_rows, finished: false, eager: config.eager })
    }

    /// Takes one block in: of a source of the plan, or of a side of the keyed step that the piece begins with. Nothing happens before the
    /// next pull.
    ///
    /// # Errors
    /// `Finished` after [`finish`](Self::finish).
    pub fn push(&mut self, input: u8, batch: &RecordBatch) -> Result<(), HostError> {
        let pieces = batch.num_rows().div_ceil(self.slice_rows).max(1);
        let last =
            u32::try_from(pieces).ok().and_then(|pieces| self.slice.checked_add(pieces)).filter(|last| *last < CLOSE);
        let Some(_) = last.filter(|_| !self.finished) else { return Err(HostError::Finished) };
        for piece in 0..pieces {
            let from = piece * self.slice_rows;
            let rows = batch.slice(from, self.slice_rows.min(batch.num_rows() - from));
            self.built.input().send(FlowBlock::rows(rows).of(input));
            self.slice += 1;
            self.advance(self.slice);
        }
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
            let made = match self.eager {
                true => {
                    let worth = if idle { Worth::default() } else { WORTH_TELLING };
                    self.built.outputs.take_worth(worth)?.map(|(_, rows)| rows).into_iter().collect()
                }
                false if idle => self.built.outputs.take_all(),
                false => Vec::new(),
            };
            if !made.is_empty() {
                return Ok(Pulled::Made(made));
            }
            if idle {
                return Ok(Pulled::Idle);
            }
            if begun.elapsed() >= limit {
                return Ok(Pulled::Working);
            }
            self.worker.step()?;
        }
    }

    /// The bounded scopes, as of now.
    pub fn scopes(&self) -> Vec<ScopeStats> {
        self.built.monitors.stats()
    }

    fn advance(&mut self, slice: u32) {
        self.built.advance(FlowTime::new(0, slice));
    }
}
