//! Requests of the driver, and what connections at a member's data port are for. All JSON.
//!
//! What is asked about a query is the engine's protocol ([`penstock_engine::Request`], [`penstock_engine::Answer`]) in a frame that
//! names the query: [`Ask`]. Here is what is not protocol: figures, the end of the member, feeds, drains and meshes.

use penstock_engine::{Layout, MAX_LENGTH, Request, Stamp, Start};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::host::Launch;

/// What the driver sends to a member.
#[derive(Clone, Debug, PartialEq)]
pub enum Message {
    /// About a query.
    Ask(Box<Ask>),
    /// About the member.
    Order(Order),
}

impl Message {
    /// Reads the body of a frame.
    ///
    /// # Errors
    /// When it is neither.
    pub fn parse(body: Value) -> Result<Message, serde_json::Error> {
        match body.get("ask") {
            Some(_) => serde_json::from_value(body).map(|ask| Message::Ask(Box::new(ask))),
            None => serde_json::from_value(body).map(Message::Order),
        }
    }
}

/// A request of the engine about a query. The attachment of a start, and of what reads state, holds the callables.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
pub struct Ask {
    /// The query.
    pub query: String,
    /// What is asked.
    pub ask: Request,
    /// With a start, and with what reads state: the plan.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub plan: Value,
    /// With a start: how to reach its members, in the order of ranks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub peers: Vec<Peer>,
    /// With a start: slices that may be under way at once; the member's default when absent.
    #[serde(default)]
    pub window: Option<u32>,
    /// With a start: greatest size of a slice; the member's default when absent.
    #[serde(default)]
    pub slice_rows: Option<usize>,
    /// With a start, and with what reads or merges state: URL or path of the folder with its files; none where it is not durable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<String>,
}

impl Ask {
    /// How to start the workers of a generation here.
    ///
    /// # Errors
    /// What does not fit together.
    pub fn launch(&self, start: &Start) -> Result<Launch, String> {
        let processes = start.members.len();
        let (process, threads) = (start.rank as usize, start.threads as usize);
        if process >= processes {
            return Err(format!("rank {process} of {processes}"));
        }
        if !self.peers.iter().map(|peer| peer.id).eq(start.members.iter().map(|member| member.0)) {
            return Err(format!("{} addresses for {processes} members, or of others", self.peers.len()));
        }
        if threads == 0 || threads > 1 << 16 {
            return Err(format!("{threads} threads"));
        }
        if self.window == Some(0) || self.slice_rows == Some(0) {
            return Err("an empty window or slice".into());
        }
        let bits = start.bits;
        if bits > MAX_LENGTH {
            return Err(format!("bins of {bits} bits"));
        }
        let mut first: Option<&Layout> = None;
        for (operator, layout) in &start.layouts {
            let ranges = layout.ranges();
            if let Some((range, _)) = ranges.iter().find(|(range, _)| range.length() < bits) {
                return Err(format!("{operator} has range {range} where bins have {bits} bits"));
            }
            let same = |first: &Layout| first.ranges().iter().map(|one| one.0).eq(ranges.iter().map(|one| one.0));
            if !same(first.get_or_insert(layout)) {
                return Err(format!("{operator} has other ranges than the operators before it"));
            }
            if let Some((range, owner)) = ranges.iter().find(|(_, owner)| *owner as usize >= processes * threads) {
                return Err(format!("{operator} has range {range} at worker {owner} of {}", processes * threads));
            }
        }
        Ok(Launch {
            query: self.query.clone(),
            stamp: start.stamp,
            process,
            processes,
            threads,
            bits,
            layouts: start.layouts.clone(),
            epoch: start.epoch,
            watermark: start.watermark,
            window: self.window,
            slice_rows: self.slice_rows,
            checkpoint: self.checkpoint.clone(),
        })
    }
}

/// What concerns the member itself, told apart by `"do"`.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq)]
#[serde(tag = "do", rename_all = "snake_case")]
pub enum Order {
    /// Report figures.
    Stats {
        /// One query, or all.
        #[serde(default)]
        query: Option<String>,
        /// The rows of each bin too.
        #[serde(default)]
        loads: bool,
    },
    /// Load what a query runs, for its next start; the attachment holds the callables.
    Load {
        /// The query.
        query: String,
        /// The plan.
        plan: Value,
    },
    /// End the member.
    Stop {},
}

/// A member, as another one reaches it.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq, Eq)]
pub struct Peer {
    /// Its id.
    pub id: u64,
    /// Its data port.
    pub address: String,
}

/// What a feed connection is for.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq, Eq)]
pub struct FeedContext {
    /// The query.
    pub query: String,
    /// The epoch.
    pub epoch: u64,
    /// Number of the source.
    #[serde(default)]
    pub source: u8,
    /// Spark's partition.
    pub partition: u32,
    /// Spark's task attempt.
    pub attempt: u64,
}

impl FeedContext {
    /// What the key of its feed is for.
    #[must_use]
    pub fn scope(&self) -> String {
        epoch_scope(&self.query, self.epoch)
    }
}

/// The scope of the keys of feeds and drains: one epoch of one query.
#[must_use]
pub fn epoch_scope(query: &str, epoch: u64) -> String {
    format!("{query} {epoch}")
}

/// The scope of a member's key: the slot that it fills, of what it says about itself; empty where it names none.
#[must_use]
pub fn slot_scope(info: &Value) -> String {
    info.get("slot").map(Value::to_string).unwrap_or_default()
}

/// The scope of mesh keys: all of an engine, or of a run, which has a secret of its own.
pub(crate) const MESH_SCOPE: &str = "";

/// What a drain connection is for.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq, Eq)]
pub struct DrainContext {
    /// The query.
    pub query: String,
    /// The epoch.
    pub epoch: u64,
    /// The piece of it.
    pub piece: u32,
    /// Rows, or those beside them.
    pub which: Which,
}

impl DrainContext {
    /// What the key of its drain is for.
    #[must_use]
    pub fn scope(&self) -> String {
        epoch_scope(&self.query, self.epoch)
    }
}

/// Which rows of a piece.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Which {
    /// The results.
    Rows,
    /// Late rows and those of side outputs.
    Beside,
}

/// What a mesh connection is for.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq, Eq)]
pub struct MeshContext {
    /// The query.
    pub query: String,
    /// Of its generation.
    pub stamp: Stamp,
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
    use penstock_engine::{MemberId, Range};
    use serde_json::json;

    #[test]
    fn frames_have_the_agreed_form() {
        assert_eq!(Message::parse(json!({"do": "stop"})).unwrap(), Message::Order(Order::Stop {}));
        assert_eq!(
            Message::parse(json!({"do": "stats"})).unwrap(),
            Message::Order(Order::Stats { query: None, loads: false })
        );
        let release = json!({"query": "q", "ask": {"Release": {"stamp": {"generation": 1, "membership": 0}, "epoch": 4,
            "feeds": [{"partition": 0, "attempt": 9, "rows": 3, "rows_before": 0}],
            "watermark": null, "clock_ms": 5, "finish": true}}});
        let Message::Ask(ask) = Message::parse(release).unwrap() else { panic!("about a query") };
        let Request::Release(release) = ask.ask else { panic!("a release") };
        assert_eq!((release.epoch, release.feeds[0].attempt, release.finish), (4, 9, true));
        assert_eq!(Message::parse(json!({"query": "q", "ask": "Drop"})).unwrap(), {
            let (plan, peers, window, slice_rows, checkpoint) = Default::default();
            let (query, ask) = ("q".into(), Request::Drop);
            Message::Ask(Box::new(Ask { query, ask, plan, peers, window, slice_rows, checkpoint }))
        });
        assert!(Message::parse(json!({"query": "q", "ask": {"Release": {}}})).is_err());
        assert!(Message::parse(json!({"do": "format_disk"})).is_err());
        assert!(Message::parse(json!("stop")).is_err());
    }

    #[test]
    fn a_start_that_does_not_fit_together_is_refused() {
        let layout = |owner| Layout::new(vec![(Range::ALL, owner)]).unwrap();
        let start = Start {
            stamp: Stamp::default(),
            members: vec![MemberId(1)],
            rank: 0,
            threads: 2,
            bits: 0,
            layouts: [("a".to_owned(), layout(0)), ("b".to_owned(), layout(1))].into(),
            epoch: 0,
            watermark: None,
            fresh: true,
        };
        let good = Ask {
            query: "q".into(),
            ask: Request::Drop,
            plan: Value::Null,
            peers: vec![Peer { id: 1, address: "a:1".into() }],
            window: None,
            slice_rows: None,
            checkpoint: None,
        };
        let launch = good.launch(&start).unwrap();
        assert_eq!((launch.bits, launch.layouts["b"].owner(0)), (0, 1));
        let refused = |start: Start| good.launch(&start).unwrap_err();
        assert_eq!(refused(Start { rank: 1, ..start.clone() }), "rank 1 of 1");
        assert_eq!(refused(Start { threads: 0, ..start.clone() }), "0 threads");
        let others = Start { members: vec![MemberId(2)], ..start.clone() };
        assert!(refused(others).contains("of others"));
        let mixed = Layout::even(1, 2);
        let mixed = Start { layouts: [("a".to_owned(), layout(0)), ("b".to_owned(), mixed)].into(), ..start.clone() };
        assert!(refused(mixed).contains("other ranges than"));
        assert!(refused(Start { bits: 1, ..start.clone() }).contains("range 0/0 where bins have 1 bits"));
        assert_eq!(refused(Start { bits: 21, ..start.clone() }), "bins of 21 bits");
        let unknown = Start { layouts: [("a".to_owned(), layout(2))].into(), ..start.clone() };
        assert!(refused(unknown).contains("at worker 2 of 2"));
        assert!(Ask { window: Some(0), ..good.clone() }.launch(&start).is_err());
    }
}
