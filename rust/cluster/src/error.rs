//! What can go wrong between driver and members.
//!
//! [`ClusterError`] is what our own calls return. [`Failure`] is what travels: the answer of one
//! side to a request that it could not serve, as a JSON body `{"error": {"kind", "message", ..}}`
//! and an optional attachment (for example a pickled exception).

use std::fmt;
use std::io;
use std::time::Duration;

use penstock_engine::Kind;
use serde_json::{Map, Value};
use thiserror::Error;

use crate::session::{FrameError, HandshakeError, Role};

/// An error of the registry, a member, a feed or a drain.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ClusterError {
    /// A socket call failed.
    #[error("{doing}: {source}")]
    Io {
        /// What was being done, and with whom.
        doing: String,
        /// The cause.
        source: io::Error,
    },
    /// An address does not have the form `host:port` or names no host.
    #[error("address {address:?} is not a reachable host:port")]
    Address {
        /// The text as given.
        address: String,
    },
    /// The registry listens on every interface but was not told which address to advertise.
    #[error("binding {host:?} needs an address to advertise")]
    NothingToAdvertise {
        /// The host that was to be bound.
        host: String,
    },
    /// The secret is not one: all its bytes are equal.
    #[error("the secret is not random: all 32 bytes are equal")]
    WeakSecret,
    /// These bytes are neither keys nor a secret.
    #[error("{bytes} bytes that are no key: neither the 32 of a secret nor what was made of one")]
    BadKey {
        /// How many there are.
        bytes: usize,
    },
    /// The key is for something else.
    #[error("this process has no key for {role:?} of {scope:?}: its key is for something else")]
    NoKey {
        /// What it wanted to be.
        role: Role,
        /// Of what.
        scope: String,
    },
    /// Mutual authentication failed.
    #[error("handshake: {0}")]
    Handshake(#[from] HandshakeError),
    /// A frame was malformed, damaged or too long.
    #[error("frame: {0}")]
    Frame(#[from] FrameError),
    /// The peer knows the key and refused the request.
    #[error("refused: {0}")]
    Refused(Failure),
    /// No such member is connected.
    #[error("member {member} is not connected")]
    UnknownMember {
        /// The id that was named.
        member: u64,
    },
    /// A peer is connected and neither reads nor answers.
    #[error("{peer} is silent for {silence:?}: it is hung or stopped, or its host is gone (member_timeout)")]
    Silent {
        /// Who.
        peer: String,
        /// For how long.
        silence: Duration,
    },
    /// A listener has closed every connection before it looked at it.
    #[error(
        "{address} has turned away {tries} connections in {waited:.1?} before the handshake: more of them come than it \
         serves at a time, it has no open files left, or it is not a penstock of this version. Let fewer tasks feed or \
         read at once, or see who else connects there (penstock_refused_connections_total with reason slow, crowded or \
         exhausted, penstock_member_refused_connections_total)"
    )]
    TurnedAway {
        /// Who.
        address: String,
        /// How many there were.
        tries: u32,
        /// For how long.
        waited: Duration,
    },
    /// The peer sent something that the protocol does not allow here.
    #[error("protocol: {0}")]
    Protocol(String),
    /// Arrow data could not be written or read.
    #[error("arrow: {0}")]
    Arrow(String),
    /// The handle was closed before, or its connection is gone.
    #[error("the connection is closed: {0}")]
    Closed(String),
}

impl ClusterError {
    pub(crate) fn io(doing: impl Into<String>) -> impl FnOnce(io::Error) -> ClusterError {
        let doing = doing.into();
        move |source| ClusterError::Io { doing, source }
    }

    /// Names the peer of an error that is a passed time limit.
    pub(crate) fn silent(self, peer: &str, silence: Duration) -> Self {
        let timeout = match &self {
            ClusterError::Frame(error) => error.is_timeout(),
            ClusterError::Handshake(error) => matches!(error, HandshakeError::Timeout),
            ClusterError::Io { source, .. } => source.kind() == io::ErrorKind::TimedOut,
            _ => false,
        };
        if timeout { ClusterError::Silent { peer: peer.to_owned(), silence } } else { self }
    }

    /// True when the peer did not prove that it knows the key, refused ours, or we have none.
    pub fn is_authentication(&self) -> bool {
        matches!(self, ClusterError::NoKey { .. })
            || matches!(self, ClusterError::Handshake(error) if error.is_authentication())
    }
}

impl From<arrow_schema::ArrowError> for ClusterError {
    fn from(error: arrow_schema::ArrowError) -> Self {
        ClusterError::Arrow(error.to_string())
    }
}

/// A request that failed, in the form in which it is sent.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Failure {
    /// Machine-readable kind: `user_function`, `stale_generation`, `unknown_query`, `peer_lost`,
    /// `plan`, `state`, `schema`, `staging`, `epoch`, `protocol`, `internal`, ...
    pub kind: String,
    /// One sentence for a person.
    pub message: String,
    /// Further facts, such as `step`, `file`, `line`, `row`, `given`, `current`.
    pub fields: Map<String, Value>,
    /// Bytes that go with it, empty when there are none.
    pub attachment: Vec<u8>,
}

impl Failure {
    /// What the engine does about it.
    pub fn why(&self) -> Kind {
        match self.kind.as_str() {
            "user_function" => Kind::User,
            "null_key" | "schema" | "data" | "plan" | "too_large" | "epoch_too_large" | "not_durable"
            | "not_shared" | "unreadable" => Kind::Data,
            "storage" | "store" => Kind::Store,
            "damaged" => Kind::Damaged,
            "peer_lost" | "aborted" | "stopped" | "operator" => Kind::Echo,
            "stale_generation" => Kind::Stale,
            "state" | "state_lost" => Kind::State,
            _ => Kind::Internal,
        }
    }

    /// In the words of the protocol.
    pub fn told(&self) -> penstock_engine::Failure {
        penstock_engine::Failure::new(self.why(), self.message.clone())
    }

    /// A failure that the protocol itself found.
    pub fn of(told: penstock_engine::Failure) -> Self {
        let kind = match told.kind {
            Kind::User => "user_function",
            Kind::Data => "data",
            Kind::Echo => "stopped",
            Kind::Stale => "stale_generation",
            Kind::State => "state_lost",
            Kind::Store => "store",
            Kind::Damaged => "damaged",
            Kind::Internal => "internal",
        };
        Failure::new(kind, told.message)
    }

    /// A failure without further facts.
    pub fn new(kind: &str, message: impl Into<String>) -> Self {
        Failure { kind: kind.to_owned(), message: message.into(), ..Failure::default() }
    }

    /// Adds one fact.
    pub fn with(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.fields.insert(name.to_owned(), value.into());
        self
    }

    /// The body to send.
    pub fn to_body(&self) -> Value {
        let mut fields = self.fields.clone();
        fields.insert("kind".into(), self.kind.clone().into());
        fields.insert("message".into(), self.message.clone().into());
        fields.insert("why".into(), serde_json::to_value(self.why()).expect("a name is JSON"));
        serde_json::json!({ "error": fields })
    }

    /// Reads a body written by [`Failure::to_body`]; None when the body is not a failure.
    pub fn from_body(body: &Value, attachment: Vec<u8>) -> Option<Self> {
        let mut fields = body.get("error")?.as_object()?.clone();
        let mut text = |name: &str| match fields.remove(name) {
            Some(Value::String(text)) => text,
            Some(other) => other.to_string(),
            None => String::new(),
        };
        let (kind, message) = (text("kind"), text("message"));
        fields.remove("why");
        Some(Failure { kind, message, fields, attachment })
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind, self.message)
    }
}

impl std::error::Error for Failure {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_survives_its_body() {
        let failure =
            Failure { attachment: vec![1, 2], ..Failure::new("user_function", "division by zero").with("line", 7) };
        let body = failure.to_body();
        assert_eq!(body["error"]["kind"], "user_function");
        assert_eq!(Failure::from_body(&body, vec![1, 2]), Some(failure));
        assert_eq!(Failure::from_body(&serde_json::json!({"ok": true}), vec![]), None);
    }
}
