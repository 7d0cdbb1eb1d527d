//! Requests of the driver, and what connections at a member's data port are for. All JSON.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A request to a member, told apart by `"do"`.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[serde(tag = "do", rename_all = "snake_case")]
pub enum Request {
    /// Begin a generation of a query. The attachment holds the callables.
    Start(Box<Start>),
    /// Run an epoch on staged rows; answered when it is complete here.
    Release(Release),
    /// Move bins; answered when they have moved. To the member of worker 0 only.
    Migrate {
        /// The query.
        query: String,
        /// Its generation.
        generation: u64,
        /// Names the migration.
        handle: u64,
        /// Bin and its new worker, step by step.
        steps: Vec<Vec<(u32, u32)>>,
    },
    /// Let a migration end after the step under way; its own answer tells what was done.
    CancelMigration {
        /// The query.
        query: String,
        /// Its generation.
        generation: u64,
        /// The migration.
        handle: u64,
    },
    /// Forget the outputs of this epoch and those before.
    CloseEpoch {
        /// The query.
        query: String,
        /// The last epoch to forget.
        epoch: u64,
    },
    /// This epoch is complete at all members and its outputs have been used: it will not be undone. What the workers keep for that
    /// alone may go.
    SettleEpoch {
        /// The query.
        query: String,
        /// The epoch.
        epoch: u64,
    },
    /// Forget what is staged for an epoch.
    Discard {
        /// The query.
        query: String,
        /// The epoch.
        epoch: u64,
    },
    /// End a generation and say which bins are here.
    StopQuery {
        /// The query.
        query: String,
        /// Its generation.
        generation: u64,
        /// Keep the bins for the next generation.
        keep: bool,
        /// The epoch that the next generation begins with; by default the one after the last that
        /// was completed here.
        #[serde(default)]
        epoch: Option<u64>,
    },
    /// End a query and forget everything about it.
    DropQuery {
        /// The query.
        query: String,
    },
    /// Report figures.
    Stats {
        /// One query, or all.
        #[serde(default)]
        query: Option<String>,
    },
    /// End the member.
    Stop {},
}

/// Begin a generation. What the workers get of it is their [`GroupConfig`](penstock_plan::host::GroupConfig).
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
pub struct Start {
    /// The query.
    pub query: String,
    /// The generation; greater than every earlier one.
    pub generation: u64,
    /// The plan.
    pub plan: Value,
    /// All members in process order.
    pub members: Vec<Peer>,
    /// Index of this member in `members`.
    pub process: usize,
    /// Workers of each member.
    pub threads: usize,
    /// Logarithm of the number of bins.
    pub bits: u8,
    /// Owner of each bin, as worker index, for each keyed step.
    pub owners: Vec<Vec<u32>>,
    /// The next epoch.
    pub epoch: u64,
    /// The watermark so far, in microseconds.
    #[serde(default)]
    pub watermark: Option<i64>,
    /// Which bins to start from.
    pub resume: Resume,
    /// Keep what a rollback needs.
    #[serde(default)]
    pub journal: bool,
    /// Slices that may be under way at once; the engine's default when absent.
    #[serde(default)]
    pub window: Option<u32>,
    /// Greatest size of a slice; the engine's default when absent.
    #[serde(default)]
    pub slice_rows: Option<usize>,
}

impl Start {
    /// Says what does not fit together.
    pub fn check(&self) -> Result<(), String> {
        let processes = self.processes();
        if self.process >= processes {
            return Err(format!("process {} of {processes}", self.process));
        }
        if self.threads == 0 || self.threads > 1 << 16 {
            return Err(format!("{} threads", self.threads));
        }
        if self.window == Some(0) || self.slice_rows == Some(0) {
            return Err("an empty window or slice".into());
        }
        if self.bits > 20 {
            return Err(format!("2^{} bins", self.bits));
        }
        if let Some(step) = self.owners.iter().find(|step| step.len() != 1 << self.bits) {
            return Err(format!("{} owners for 2^{} bins", step.len(), self.bits));
        }
        let workers = processes * self.threads;
        match self.owners.iter().flatten().find(|owner| **owner as usize >= workers) {
            Some(owner) => Err(format!("owner {owner} among {workers} workers")),
            None => Ok(()),
        }
    }

    /// Number of processes.
    pub fn processes(&self) -> usize {
        self.members.len()
    }

    /// A number for the query that is equal in all members (FNV-1a of its name); frames of
    /// different queries do not mix even if a connection were confused.
    pub fn query_number(&self) -> u64 {
        self.query
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
    }
}

/// A member, as another one reaches it.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq, Eq)]
pub struct Peer {
    /// Its id.
    pub id: u64,
    /// Its data port.
    pub address: String,
}

/// Which bins a generation starts from.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Resume {
    /// None.
    Fresh,
    /// Those kept when the last generation stopped, as they were when the epoch began that this
    /// generation begins with.
    #[serde(alias = "rollback")]
    Resident,
}

/// Run an epoch.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
pub struct Release {
    /// The query.
    pub query: String,
    /// Its generation.
    pub generation: u64,
    /// The epoch.
    pub epoch: u64,
    /// The attempts that count, staged here.
    #[serde(default)]
    pub feeds: Vec<FeedCommit>,
    /// The watermark at the end of the epoch, in microseconds.
    #[serde(default)]
    pub watermark: Option<i64>,
    /// Processing time of the epoch, in milliseconds since 1970.
    #[serde(default)]
    pub clock_ms: Option<i64>,
    /// This is the end of input.
    #[serde(default)]
    pub finish: bool,
}

/// One committed feed.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
pub struct FeedCommit {
    /// Spark's partition.
    pub partition: u32,
    /// The attempt that succeeded.
    pub attempt: u64,
    /// Its rows, by its receipt.
    pub rows: u64,
    /// Rows of all smaller partitions in all members.
    #[serde(default)]
    pub rows_before: u64,
}

/// What a feed connection is for.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq, Eq)]
pub struct FeedContext {
    /// The query.
    pub query: String,
    /// The epoch.
    pub epoch: u64,
    /// Spark's partition.
    pub partition: u32,
    /// Spark's task attempt.
    pub attempt: u64,
}

/// What a drain connection is for.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq, Eq)]
pub struct DrainContext {
    /// The query.
    pub query: String,
    /// The epoch.
    pub epoch: u64,
    /// The piece of it.
    pub piece: u32,
    /// Rows, or late rows.
    pub which: Which,
}

/// Which rows of a piece.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Which {
    /// The results.
    Rows,
    /// Rows that came too late.
    Late,
}

/// What a mesh connection is for.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq, Eq)]
pub struct MeshContext {
    /// The query.
    pub query: String,
    /// Its generation.
    pub generation: u64,
    /// Process that dials.
    pub from: usize,
    /// Process that is meant.
    pub to: usize,
    /// Member that is meant.
    pub member: u64,
}

/// The end of an Arrow stream.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
pub struct StreamEnd {
    /// Rows in it.
    pub rows: u64,
    /// CRC-32 of its bytes.
    pub checksum: u32,
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn requests_have_the_agreed_form() {
        let parse = |json: Value| serde_json::from_value::<Request>(json);
        assert_eq!(parse(json!({"do": "stop"})).unwrap(), Request::Stop {});
        assert_eq!(parse(json!({"do": "stats"})).unwrap(), Request::Stats { query: None });
        let release = json!({"do": "release", "query": "q", "generation": 1, "epoch": 4,
            "feeds": [{"partition": 0, "attempt": 9, "rows": 3, "rows_before": 0}],
            "watermark": null, "finish": true});
        let Request::Release(release) = parse(release).unwrap() else { panic!("a release") };
        assert_eq!((release.epoch, release.feeds[0].attempt, release.finish), (4, 9, true));
        assert!(parse(json!({"do": "release"})).is_err());
        assert!(parse(json!({"do": "format_disk"})).is_err());
        assert!(parse(json!("stop")).is_err());
    }

    #[test]
    fn a_start_that_does_not_fit_together_is_refused() {
        let good = Start {
            query: "q".into(),
            generation: 1,
            plan: Value::Null,
            members: vec![Peer { id: 1, address: "a:1".into() }],
            process: 0,
            threads: 2,
            bits: 1,
            owners: vec![vec![0, 1]; 2],
            epoch: 0,
            watermark: None,
            resume: Resume::Fresh,
            journal: true,
            window: None,
            slice_rows: None,
        };
        assert_eq!(good.check(), Ok(()));
        assert!(Start { process: 1, ..good.clone() }.check().is_err());
        assert!(Start { threads: 0, ..good.clone() }.check().is_err());
        assert!(Start { owners: vec![vec![0]], ..good.clone() }.check().is_err());
        assert!(Start { owners: vec![vec![0, 2]], ..good.clone() }.check().is_err());
        assert!(Start { window: Some(0), ..good.clone() }.check().is_err());
        assert!(Start { bits: 21, ..good }.check().is_err());
    }
}
