//! Fetching frozen results from a member.

use std::collections::VecDeque;
use std::time::Duration;

use arrow_array::RecordBatch;
use arrow_schema::SchemaRef;

use crate::columns::Decoder;
use crate::error::{ClusterError, Failure};
use crate::message::{DrainContext, StreamEnd, Which};
use crate::session::{Keys, Kind, Limits, Role, Session};

/// Connects to the data port of a member and reads one piece of an epoch; may be done again until
/// the epoch is closed, with the same rows in the same order.
///
/// # Errors
/// [`ClusterError::Refused`] with kind `unknown_query`, `epoch` (not complete, or closed) or
/// `piece`; [`ClusterError::NoKey`]; [`ClusterError::Handshake`]; [`ClusterError::Silent`]; others of the network.
pub fn drain(
    address: &str,
    keys: &Keys,
    query: &str,
    epoch: u64,
    piece: u32,
    which: Which,
) -> Result<Drain, ClusterError> {
    let context = DrainContext { query: query.to_owned(), epoch, piece, which };
    drain_with(address, keys, &context, None, &Limits::default())
}

/// [`drain`] with other limits, of this member and no other where one is named.
///
/// # Errors
/// As [`drain`]; [`ClusterError::Protocol`] when another member answers.
pub fn drain_with(
    address: &str,
    keys: &Keys,
    context: &DrainContext,
    member: Option<u64>,
    limits: &Limits,
) -> Result<Drain, ClusterError> {
    let (scope, context) = (context.scope(), serde_json::to_value(context).expect("names and numbers are JSON"));
    let peer = format!("the member at {address}");
    let mut session = Session::dial(address, keys, Role::Drain, &scope, &context, limits)
        .map_err(|error| error.silent(&peer, limits.handshake_time))?;
    session.set_read_timeout(Some(limits.silence))?;
    session.receive_answer_of(member, &peer).map_err(|error| error.silent(&peer, limits.silence))?;
    let (decoder, ready) = Default::default();
    let mut drain = Drain { session, decoder, ready, schema: None, ended: false, peer, silence: limits.silence };
    while drain.schema.is_none() {
        drain.pull()?;
        drain.schema = drain.decoder.schema();
        if drain.ended && drain.schema.is_none() {
            return Err(ClusterError::Protocol("a stream without a schema".into()));
        }
    }
    Ok(drain)
}

/// The batches of a piece. It ends early only with an error: a stream that breaks off is noticed.
pub struct Drain {
    session: Session,
    decoder: Decoder,
    ready: VecDeque<RecordBatch>,
    schema: Option<SchemaRef>,
    ended: bool,
    peer: String,
    silence: Duration,
}

impl Drain {
    /// The schema of all batches.
    pub fn schema(&self) -> SchemaRef {
        self.schema.clone().expect("a drain is made once its schema is known")
    }

    fn pull(&mut self) -> Result<(), ClusterError> {
        let frame = self.session.receive().map_err(|error| error.silent(&self.peer, self.silence))?;
        let frame = frame.ok_or_else(|| ClusterError::Closed("the member ended within a piece".into()))?;
        match frame.kind {
            Kind::Data => {
                let mut arrived = Vec::new();
                self.decoder.push(frame.payload, &mut arrived)?;
                for batch in arrived {
                    self.decoder.count(batch.num_rows());
                    self.ready.push_back(batch);
                }
            }
            Kind::End => {
                let end: StreamEnd = serde_json::from_value(frame.into_body()?.json)
                    .map_err(|error| ClusterError::Protocol(error.to_string()))?;
                self.decoder.finish(end)?;
                self.ended = true;
            }
            Kind::Answer => {
                let body = frame.into_body()?;
                // As in an answer: nothing that could be unpickled.
                let failure = Failure::from_body(&body.json, Vec::new());
                let failure = failure.ok_or_else(|| ClusterError::Protocol("an answer within a piece".into()))?;
                return Err(ClusterError::Refused(failure));
            }
            other => return Err(ClusterError::Protocol(format!("{other:?} within a piece"))),
        }
        Ok(())
    }
}

impl Iterator for Drain {
    type Item = Result<RecordBatch, ClusterError>;

    fn next(&mut self) -> Option<Self::Item> {
        while self.ready.is_empty() && !self.ended {
            if let Err(error) = self.pull() {
                self.ended = true;
                return Some(Err(error));
            }
        }
        self.ready.pop_front().map(Ok)
    }
}
