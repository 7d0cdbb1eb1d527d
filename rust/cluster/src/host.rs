//! What a member needs from the engine that runs queries in its process.
//!
//! The member owns connections, staging, frozen outputs and the order of requests; a [`Host`] owns
//! the dataflow. The real one is [`GroupHost`](crate::GroupHost); tests use one that echoes.

use std::collections::BTreeMap;
use std::sync::Arc;

use arrow_array::RecordBatch;
use arrow_schema::SchemaRef;
use crossbeam::channel::Sender;
use penstock_engine::{Layout, Range, Ranges, Recut, Stamp};
use penstock_files::File;
pub use penstock_plan::host::{Cadence, Keep, PartitionRows, Rows, Stored};
use serde_json::Value;

use crate::durable::{Segment, Source, Store, Use};
use crate::error::Failure;
use crate::session::Stream;

/// Compiles plans and runs them on the workers of this process.
pub trait Host: Send + Sync + 'static {
    /// A compiled plan with its callables.
    type Program: Send + Sync + 'static;
    /// The bins of one query in this process, between generations.
    type Bins: Send + 'static;
    /// Bins that were made from files.
    type Loaded: Send + 'static;
    /// The workers of this process for one query and generation.
    type Group: Send + 'static;
    /// What its workers report, in their own words.
    type Event: Send + 'static;

    /// Compiles a plan; `attachment` holds the user's callables.
    fn load(&self, plan: &Value, attachment: &[u8]) -> Result<Self::Program, Failure>;

    /// Schema of the rows of a source.
    ///
    /// # Errors
    /// There is no source of that number.
    fn input_schema(&self, program: &Self::Program, source: u8) -> Result<SchemaRef, Failure>;

    /// Schema of the rows (`beside` false) that come out, or of those beside them (true).
    fn output_schema(&self, program: &Self::Program, beside: bool) -> SchemaRef;

    /// Greatest event time of a batch of a source in microseconds; None without rows or event time.
    ///
    /// # Errors
    /// There is no source of that number.
    fn max_event_time(&self, program: &Self::Program, source: u8, batch: &RecordBatch) -> Result<Option<i64>, Failure>;

    /// No keys: a generation that starts with this makes the bins that it owns.
    fn empty(&self) -> Self::Bins;

    /// No bins: a generation that starts with this may own none.
    fn nothing(&self) -> Self::Bins;

    /// Which bins, or parts of them, are here as they were when `epoch` began, by the name of their operator.
    fn inventory(&self, bins: &Self::Bins, epoch: u64) -> Ranges;

    /// How many keys.
    fn keys(&self, bins: &Self::Bins) -> u64;

    /// Starts the workers with the bins as they were when epoch `launch.epoch` began. `mesh[i]` is the connection to process `i`, None for our own. What
    /// comes out goes to `keep` at once. Every worker reports to `events`.
    ///
    /// # Errors
    /// The bins come back when nothing touched them.
    fn start(
        &self,
        program: &Arc<Self::Program>,
        launch: &Launch,
        mesh: Vec<Option<Stream>>,
        bins: Self::Bins,
        keep: Arc<dyn Keep>,
        events: Sender<Self::Event>,
    ) -> Result<Self::Group, (Failure, Option<Self::Bins>)>;

    /// Puts a report of the workers of a group into the member's words.
    fn translate(&self, group: &Self::Group, event: Self::Event) -> HostEvent;

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
        clock_ms: i64,
    ) -> Result<(), Failure>;

    /// Moves bins and parts of them step by step; does not wait. [`HostEvent::MigrationDone`] follows, or [`HostEvent::MigrationFailed`].
    /// Prepared for an epoch, which is released next, the first step takes effect before its rows, whatever else is under way.
    fn migrate(
        &self,
        group: &Self::Group,
        handle: u64,
        steps: Vec<Vec<(Range, u32)>>,
        cadence: Cadence,
        at_epoch: Option<u64>,
    );

    /// Splits or merges bins between two epochs; does not wait. Told, and cancelled, as a migration of one step.
    fn recut(&self, group: &Self::Group, handle: u64, recut: &Recut);

    /// Ends a migration after the step under way; [`HostEvent::MigrationDone`] tells what was done.
    fn cancel(&self, group: &Self::Group, handle: u64);

    /// This epoch and those before will not be undone; does not wait.
    fn settle(&self, group: &Self::Group, epoch: u64);

    /// Figures about the workers, as JSON.
    fn stats(&self, group: &Self::Group) -> Value;

    /// Rows of each bin that the workers here have routed, by operator, and those of parts beside them, and the bytes of state of those that they hold,
    /// as JSON.
    fn loads(&self, group: &Self::Group) -> Value;

    /// Ends the workers, also after a failure, and returns the bins. May block while a function of
    /// the user runs.
    fn stop(&self, group: Self::Group) -> (Self::Bins, Option<Failure>);

    /// Opens a checkpoint, which is a URL or path. Not on the thread of the query: it may take long.
    ///
    /// # Errors
    /// There is none for such a place, or it cannot be reached.
    fn store(&self, checkpoint: &str) -> Result<Arc<dyn Store>, Failure> {
        let _ = checkpoint;
        Err(not_durable())
    }

    /// Makes the state of ranges from files, newest last. Not on the thread of the query: it may take long, and ends early when it
    /// is of no more use.
    ///
    /// # Errors
    /// What is wrong with the store or a file, or of no more use; nothing is loaded then.
    fn load_ranges(
        &self,
        program: &Self::Program,
        ranges: &Ranges,
        files: &[File<Source>],
        wanted: &Use,
    ) -> Result<Self::Loaded, Failure> {
        let _ = (program, ranges, files, wanted);
        Err(not_durable())
    }

    /// Puts what was loaded beside the bins, for the start that misses it.
    fn keep_loaded(&self, bins: &mut Self::Bins, loaded: Self::Loaded);

    /// Forgets what was loaded and has not been started with.
    fn drop_loaded(&self, bins: &mut Self::Bins);
}

pub(crate) fn not_durable() -> Failure {
    Failure::new("not_durable", "state is not durable here: no checkpoint was given")
}

/// How to start the workers of one generation here: what the protocol asks for, with what came along. What they get of it is their
/// [`GroupConfig`](penstock_plan::host::GroupConfig).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// The query; its number for the mesh is [`Launch::query_number`].
    pub query: String,
    /// The generation, and its member list.
    pub stamp: Stamp,
    /// Index of this process.
    pub process: usize,
    /// Number of processes.
    pub processes: usize,
    /// Workers of every process.
    pub threads: usize,
    /// Logarithm of the number of bins: no range is wider.
    pub bits: u8,
    /// For each operator the absolute worker index of each range's owner; all have the same ranges.
    pub layouts: BTreeMap<String, Layout>,
    /// The next epoch.
    pub epoch: u64,
    /// The watermark so far, in microseconds.
    pub watermark: Option<i64>,
    /// Slices that may be under way at once; None: the host's default.
    pub window: Option<u32>,
    /// Greatest size of a slice; None: the host's default.
    pub slice_rows: Option<usize>,
    /// URL or path of the folder to which what an epoch changes is written; None: state is not durable, and nobody takes note.
    pub checkpoint: Option<String>,
}

impl Launch {
    /// A number for the query that is equal in all members (FNV-1a of its name); frames of
    /// different queries do not mix even if a connection were confused.
    pub fn query_number(&self) -> u64 {
        self.query
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
    }
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
        /// Rows beside those: that came too late, and of side outputs.
        beside: Vec<Rows>,
        /// How many came too late.
        late_rows: u64,
        /// How many are of each side output, in the order of the plan.
        side_rows: Vec<u64>,
        /// What it changed in the bins of this worker; nothing where state is not durable.
        record: Vec<Segment>,
    },
    /// All steps of a migration are complete.
    MigrationDone {
        /// The handle given to [`Host::migrate`].
        handle: u64,
        /// The epoch and slice from which each step of the list that was done holds.
        times: Vec<(u64, u32)>,
        /// Figures: `moved`, `bytes`, `steps`, one entry for each step as it was taken.
        report: Value,
    },
    /// A migration has ended early; the workers go on.
    MigrationFailed {
        /// The handle given to [`Host::migrate`].
        handle: u64,
        /// The epoch and slice from which each step of the list that was done holds.
        times: Vec<(u64, u32)>,
        /// Figures of what was done before, as of a migration that is complete.
        report: Value,
        /// Why.
        failure: Failure,
    },
    /// The workers have failed; only [`Host::stop`] is useful now.
    Failed {
        /// Why.
        failure: Failure,
    },
}
