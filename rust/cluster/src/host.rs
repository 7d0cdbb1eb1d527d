//! What a member needs from the engine that runs queries in its process.
//!
//! The member owns connections, staging, frozen outputs and the order of requests; a [`Host`] owns
//! the dataflow. The real one is [`GroupHost`](crate::GroupHost); tests use one that echoes.

use std::net::TcpStream;
use std::sync::Arc;

use arrow_array::RecordBatch;
use arrow_schema::SchemaRef;
use crossbeam::channel::Sender;
pub use penstock_plan::host::{Keep, PartitionRows, Rows, Stored};
use serde_json::Value;

use crate::error::Failure;
use crate::message::Start;

/// Compiles plans and runs them on the workers of this process.
pub trait Host: Send + Sync + 'static {
    /// A compiled plan with its callables.
    type Program: Send + Sync + 'static;
    /// The bins of one query in this process, between generations.
    type Bins: Send + 'static;
    /// The workers of this process for one query and generation.
    type Group: Send + 'static;
    /// What its workers report, in their own words.
    type Event: Send + 'static;

    /// Compiles a plan; `attachment` holds the user's callables.
    fn load(&self, plan: &Value, attachment: &[u8]) -> Result<Self::Program, Failure>;

    /// Schema of the rows that go in.
    fn input_schema(&self, program: &Self::Program) -> SchemaRef;

    /// Schema of the rows (`late` false) or of the late rows (true) that come out.
    fn output_schema(&self, program: &Self::Program, late: bool) -> SchemaRef;

    /// Greatest event time of a batch in microseconds; None without rows or event time.
    fn max_event_time(&self, program: &Self::Program, batch: &RecordBatch) -> Result<Option<i64>, Failure>;

    /// No keys: a generation that starts with this makes the bins that it owns.
    fn empty(&self) -> Self::Bins;

    /// No bins: a generation that starts with this may own none.
    fn nothing(&self) -> Self::Bins;

    /// Which bins are here as they were when `epoch` began, as JSON for the driver.
    fn inventory(&self, bins: &Self::Bins, epoch: u64) -> Value;

    /// How many keys.
    fn keys(&self, bins: &Self::Bins) -> u64;

    /// Starts the workers with the bins as they were when epoch `start.epoch` began. `mesh[i]` is the connection to process `i`, None for our own. What
    /// comes out goes to `keep` at once. Every worker reports to `events`.
    ///
    /// # Errors
    /// The bins come back when nothing touched them.
    fn start(
        &self,
        program: &Arc<Self::Program>,
        start: &Start,
        mesh: Vec<Option<TcpStream>>,
        bins: Self::Bins,
        keep: Arc<dyn Keep>,
        events: Sender<Self::Event>,
    ) -> Result<Self::Group, (Failure, Option<Self::Bins>)>;

    /// Puts a report of the workers into the member's words.
    fn translate(&self, event: Self::Event) -> HostEvent;

    /// Lets an epoch run; does not wait. One [`HostEvent::EpochDone`] per local worker follows.
    ///
    /// # Errors
    /// When the epoch cannot run; nothing was released then.
    fn release(
        &self,
        group: &Self::Group,
        epoch: u64,
        inputs: Vec<PartitionRows>,
        watermark: Option<i64>,
        clock_ms: Option<i64>,
    ) -> Result<(), Failure>;

    /// Moves bins step by step; does not wait. [`HostEvent::MigrationDone`] follows, or [`HostEvent::MigrationFailed`].
    fn migrate(&self, group: &Self::Group, handle: u64, steps: Vec<Vec<(u32, u32)>>);

    /// Ends a migration after the step under way; [`HostEvent::MigrationDone`] tells what was done.
    fn cancel(&self, group: &Self::Group, handle: u64);

    /// This epoch and those before will not be undone; does not wait.
    fn settle(&self, group: &Self::Group, epoch: u64);

    /// Figures about the workers, as JSON.
    fn stats(&self, group: &Self::Group) -> Value;

    /// Ends the workers, also after a failure, and returns the bins. May block while a function of
    /// the user runs.
    fn stop(&self, group: Self::Group) -> (Self::Bins, Option<Failure>);
}

/// What the workers report.
#[derive(Debug)]
pub enum HostEvent {
    /// A worker has completed an epoch.
    EpochDone {
        /// The epoch.
        epoch: u64,
        /// Absolute index of the worker.
        worker: usize,
        /// What came out.
        rows: Vec<Rows>,
        /// Rows that came too late.
        late: Vec<Rows>,
        /// How many those are, whether or not they are kept.
        late_rows: u64,
    },
    /// All steps of a migration are complete.
    MigrationDone {
        /// The handle given to [`Host::migrate`].
        handle: u64,
        /// Figures: `moved`, `bytes`, `steps`.
        report: Value,
    },
    /// A migration has ended early; the workers go on.
    MigrationFailed {
        /// The handle given to [`Host::migrate`].
        handle: u64,
        /// Why.
        failure: Failure,
    },
    /// The workers have failed; only [`Host::stop`] is useful now.
    Failed {
        /// Why.
        failure: Failure,
    },
}
