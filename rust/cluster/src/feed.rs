//! Bringing rows to a member.

use std::time::Duration;

use arrow_array::RecordBatch;
use arrow_schema::Schema;
use penstock_plan::Content;
use serde::{Deserialize, Serialize};

use crate::columns::Encoder;
use crate::error::ClusterError;
use crate::message::FeedContext;
use crate::session::{Keys, Limits, Role, Session};

/// What a member has staged. It counts once the epoch is released with it.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
pub struct Receipt {
    /// Rows staged.
    pub rows: u64,
    /// CRC-32 of the Arrow stream, equal on both sides.
    pub checksum: u32,
    /// Greatest event time in microseconds; None without rows or event time.
    pub max_event_time: Option<i64>,
    /// The member that has them.
    pub member: u64,
}

/// One attempt to bring the rows of one partition. Dropped before [`Feed::finish`], it leaves
/// nothing behind.
pub struct Feed {
    session: Session,
    encoder: Encoder,
    peer: String,
    silence: Duration,
    content: Option<Content>,
}

impl Feed {
    /// Connects to the data port of a member.
    ///
    /// # Errors
    /// [`ClusterError::Refused`] with kind `unknown_query`, `epoch` (complete already) or
    /// `staging` (this attempt is here already); [`ClusterError::NoKey`] when the key is of another epoch or query;
    /// [`ClusterError::Handshake`]; others of the network.
    pub fn connect(
        address: &str,
        keys: &Keys,
        query: &str,
        epoch: u64,
        partition: u32,
        attempt: u64,
        schema: &Schema,
    ) -> Result<Self, ClusterError> {
        let context = FeedContext { query: query.to_owned(), epoch, source: 0, partition, attempt };
        Self::connect_with(address, keys, &context, None, schema, Limits::default())
    }

    /// [`Feed::connect`] with other limits, to this member and no other where one is named.
    ///
    /// # Errors
    /// As [`Feed::connect`]; [`ClusterError::Protocol`] when another member answers.
    pub fn connect_with(
        address: &str,
        keys: &Keys,
        context: &FeedContext,
        member: Option<u64>,
        schema: &Schema,
        limits: Limits,
    ) -> Result<Self, ClusterError> {
        let (scope, context) = (context.scope(), serde_json::to_value(context).expect("names and numbers are JSON"));
        let peer = format!("the member at {address}");
        let mut session = Session::dial(address, keys, Role::Feed, &scope, &context, &limits)
            .map_err(|error| error.silent(&peer, limits.handshake_time))?;
        session.set_read_timeout(Some(limits.silence))?;
        session.receive_answer_of(member, &peer).map_err(|error| error.silent(&peer, limits.silence))?;
        Ok(Feed { session, encoder: Encoder::new(schema)?, peer, silence: limits.silence, content: None })
    }

    /// Hashes the rows as well, so that another feed of the batch can be compared; before the first [`Feed::push`].
    #[must_use]
    pub fn hashing(mut self, schema: &Schema) -> Self {
        self.content = Some(Content::new(schema));
        self
    }

    /// Of what was pushed, where it is hashed: the same for equal rows, whatever their batches and order.
    #[must_use]
    pub fn content(&self) -> Option<&Content> {
        self.content.as_ref()
    }

    /// Sends a batch. Waits only for the network and for the disk of a member that spills.
    ///
    /// # Errors
    /// The reason of the member when it refuses the rows, as soon as that is known;
    /// [`ClusterError::Silent`] when it does not read; others of the network. The feed is over then.
    pub fn push(&mut self, batch: &RecordBatch) -> Result<(), ClusterError> {
        if self.session.has_input()? {
            // A member speaks before the end only to refuse.
            self.session.receive_answer()?;
            return Err(ClusterError::Protocol("a receipt before the end of a feed".into()));
        }
        if let Some(content) = &mut self.content {
            content.add(batch);
        }
        let sent = self.encoder.push(&mut self.session, batch);
        sent.map_err(|error| self.reason(error))
    }

    /// Completes the attempt: the member has all rows and has checked them.
    ///
    /// # Errors
    /// As [`Feed::push`]; then nothing is staged.
    pub fn finish(mut self) -> Result<Receipt, ClusterError> {
        if let Err(error) = self.encoder.finish(&mut self.session) {
            return Err(self.reason(error));
        }
        let answer = self.session.receive_answer().map_err(|error| error.silent(&self.peer, self.silence))?;
        serde_json::from_value(answer).map_err(|error| ClusterError::Protocol(error.to_string()))
    }

    /// A member that refuses says why before it closes.
    fn reason(&mut self, error: ClusterError) -> ClusterError {
        if !matches!(error, ClusterError::Frame(_)) {
            return error;
        }
        let error = error.silent(&self.peer, self.silence);
        if matches!(error, ClusterError::Silent { .. }) {
            return error; // it says nothing either
        }
        match self.session.receive_answer() {
            Err(refused @ ClusterError::Refused(_)) => refused,
            _ => error,
        }
    }
}
