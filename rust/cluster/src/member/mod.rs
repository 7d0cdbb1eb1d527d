//! A member: the resident end of the registry in a worker process.
//!
//! Threads: the caller's runs the control loop; one reads from the registry, one writes to it; one
//! accepts on the data port and one serves each connection there; one per query. The control loop
//! hands work on and never waits for it. When the loop ends, all of them end; only a query that is
//! stuck in a user's function is left behind after a grace time, to end with the process.

mod actor;
mod control;
mod core;
mod data;
mod generation_mesh;
mod lobby;
mod outputs;
mod staging;

use std::net::TcpListener;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crossbeam::channel::{Receiver, RecvTimeoutError, Sender, unbounded};
use serde_json::Value;

use self::control::ControlLoop;
use self::core::{Core, Outgoing};
use crate::error::{ClusterError, Failure};
use crate::host::Host;
use crate::message::slot_scope;
use crate::session::{Acceptor, FrameError, Keys, Kind, Limits, MetricsSnapshot, Role, Session};

/// The control loop looks up at least this often.
const TURN: Duration = Duration::from_millis(25);

/// What reaches the control loop.
enum Incoming {
    Request { call: u64, body: Value, attachment: Vec<u8> },
    Dismissed { reason: String },
    Lost { reason: String },
    Stats { ticket: u64, query: String, body: Value },
}

/// Why a member has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// The driver asked it to stop.
    Stopped,
    /// The driver sent it away.
    Dismissed {
        /// Why.
        reason: String,
    },
    /// The connection to the registry broke.
    RegistryLost {
        /// How.
        reason: String,
    },
    /// The caller wanted to end.
    Interrupted,
}

/// A connected member. Dropping it ends it.
pub struct Member<H: Host> {
    core: Arc<Core<H>>,
    address: String,
    incoming: Receiver<Incoming>,
    control: Option<ControlLoop<H>>,
    acceptor: Acceptor,
    session: Session,
    reader: Option<JoinHandle<()>>,
    writer: Option<JoinHandle<()>>,
}

impl<H: Host> Member<H> {
    /// Joins the registry at `host:port`. `info` is a JSON object that describes this process; it
    /// gains `address`, the data port, bound on the local address of this connection.
    ///
    /// # Errors
    /// [`ClusterError::Handshake`] when the secrets differ; [`ClusterError::NoKey`] when the key is for another `slot` than that
    /// of `info`; [`ClusterError::Refused`]; others of the network.
    pub fn connect_to(
        registry: &str,
        keys: Keys,
        mut info: Value,
        host: H,
        limits: Limits,
    ) -> Result<Self, ClusterError> {
        if !info.is_object() {
            return Err(ClusterError::Protocol("a member's info is a JSON object".into()));
        }
        let mut session = Session::dial(registry, &keys, Role::Member, &slot_scope(&info), &Value::Null, &limits)?;
        let listener = TcpListener::bind((session.local_ip()?, 0)).map_err(ClusterError::io("listen for feeds"))?;
        let address = listener.local_addr().map_err(ClusterError::io("name a listener"))?;
        let address = address.to_string();
        info["address"] = address.as_str().into();
        session.send_body(Kind::Join, 0, &info.to_string(), &[])?;
        session.set_read_timeout(Some(limits.handshake_time))?;
        let welcome = session.receive_answer()?;
        session.set_read_timeout(None)?;
        let member =
            welcome["member"].as_u64().ok_or_else(|| ClusterError::Protocol("the registry gave no id".into()))?;

        let (outgoing, outbox) = unbounded();
        let (inbox, incoming) = unbounded();
        let core = Arc::new(Core::new(host, member, keys.clone(), limits.clone(), outgoing));
        let serving = Arc::clone(&core);
        let acceptor = Acceptor::start(
            listener,
            "penstock-data",
            keys,
            &[Role::Feed, Role::Drain, Role::Mesh],
            limits.clone(),
            Arc::clone(&core.metrics),
            Box::new(move |accepted| data::serve(accepted, &serving)),
        )?;
        let control = Some(ControlLoop::new(Arc::clone(&core), inbox.clone()));
        let (input, output) = (session.try_clone()?, session.try_clone()?);
        // From here on a failure drops the member, which ends what has been started.
        let (reader, writer) = (None, None);
        let mut made = Member { core, address, incoming, control, acceptor, session, reader, writer };
        made.reader = Some(spawn("penstock-read", move || read(input, &inbox))?);
        let heartbeat = limits.heartbeat;
        made.writer = Some(spawn("penstock-write", move || write(output, &outbox, heartbeat))?);
        Ok(made)
    }

    /// The id that the registry gave.
    pub fn id(&self) -> u64 {
        self.core.member
    }

    /// The data port, as `host:port`.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Counters of the data port.
    pub fn metrics(&self) -> MetricsSnapshot {
        self.core.metrics.snapshot()
    }

    /// Serves until the driver or the caller ends it. `interrupted` is asked at least every 50 ms,
    /// on the calling thread.
    pub fn run(mut self, interrupted: &dyn Fn() -> bool) -> End {
        let end = self.turns(interrupted);
        self.close();
        end
    }

    fn turns(&mut self, interrupted: &dyn Fn() -> bool) -> End {
        let Some(control) = &mut self.control else { return End::Interrupted };
        loop {
            if interrupted() {
                return End::Interrupted;
            }
            match self.incoming.recv_timeout(TURN) {
                Ok(Incoming::Request { call, body, attachment }) => {
                    if control.request(call, body, attachment) {
                        return End::Stopped;
                    }
                }
                Ok(Incoming::Stats { ticket, query, body }) => control.stats(ticket, query, body),
                Ok(Incoming::Dismissed { reason }) => return End::Dismissed { reason },
                Ok(Incoming::Lost { reason }) => return End::RegistryLost { reason },
                Err(RecvTimeoutError::Timeout) => control.settle(),
                // Not while the control itself holds a sender.
                Err(RecvTimeoutError::Disconnected) => {
                    return End::RegistryLost { reason: "its reader ended".into() };
                }
            }
        }
    }

    fn close(&mut self) {
        if let Some(control) = self.control.take() {
            control.end(self.core.limits.grace);
        }
        self.core.lobby.clear();
        self.acceptor.close();
        // Answers that are still queued go out before the connection ends.
        let _ = self.core.outgoing.send(Outgoing::Close);
        // A panic of either has been reported by the panic hook.
        self.writer.take().map(JoinHandle::join);
        self.session.shutdown();
        self.reader.take().map(JoinHandle::join);
    }
}

impl<H: Host> Drop for Member<H> {
    fn drop(&mut self) {
        self.close();
    }
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, ClusterError> {
    let builder = thread::Builder::new().name(name.to_owned());
    builder.spawn(run).map_err(ClusterError::io("start a thread"))
}

fn read(mut session: Session, inbox: &Sender<Incoming>) {
    loop {
        let reason = match session.receive() {
            Ok(Some(frame)) if frame.kind == Kind::Heartbeat => continue,
            Ok(Some(frame)) => {
                let kind = frame.kind;
                match (kind, frame.into_body()) {
                    (Kind::Request, Ok(body)) => {
                        let (call, body, attachment) = (body.call, body.json, body.attachment);
                        if inbox.send(Incoming::Request { call, body, attachment }).is_err() {
                            return;
                        }
                        continue;
                    }
                    (Kind::Dismiss, Ok(body)) => {
                        let reason = body.json["reason"].as_str().unwrap_or_default().to_owned();
                        let _ = inbox.send(Incoming::Dismissed { reason });
                        continue;
                    }
                    (other, Ok(_)) => format!("it sent {other:?}"),
                    (_, Err(error)) => error.to_string(),
                }
            }
            Ok(None) => "it closed the connection".to_owned(),
            Err(error) => error.to_string(),
        };
        session.shutdown();
        // The control loop has ended: it knows.
        let _ = inbox.send(Incoming::Lost { reason });
        return;
    }
}

/// What is attached is an exception, of which the body has the facts: one that is too long stays here.
fn send(session: &mut Session, kind: Kind, call: u64, body: &str, attachment: &[u8]) -> Result<(), ClusterError> {
    match session.send_body(kind, call, body, attachment) {
        Err(ClusterError::Frame(FrameError::TooLong { .. })) if !attachment.is_empty() => {
            session.send_body(kind, call, body, &[])
        }
        sent => sent,
    }
}

fn write(mut session: Session, outbox: &Receiver<Outgoing>, heartbeat: Duration) {
    loop {
        let sent = match outbox.recv_timeout(heartbeat) {
            Ok(Outgoing::Reply { call, body, attachment }) => {
                match send(&mut session, Kind::Reply, call, &body.to_string(), &attachment) {
                    Err(ClusterError::Frame(FrameError::TooLong { bytes, limit })) => {
                        let message = format!("an answer of {bytes} bytes, {limit} are allowed");
                        let body = Failure::new("internal", message).to_body().to_string();
                        session.send_body(Kind::Reply, call, &body, &[])
                    }
                    sent => sent,
                }
            }
            Ok(Outgoing::Message { body, attachment }) => {
                send(&mut session, Kind::Message, 0, &body.to_string(), &attachment)
            }
            Err(RecvTimeoutError::Timeout) => session.send(Kind::Heartbeat, &[]),
            Ok(Outgoing::Close) | Err(RecvTimeoutError::Disconnected) => return,
        };
        if sent.is_err() {
            // The reader sees the end and reports it.
            session.shutdown();
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::registry::{Registry, RegistryEvent};
    use crate::session::Secret;

    /// Unasked or asked: what happened is told, and the member goes on.
    #[test]
    fn an_exception_that_is_too_long_stays_and_its_facts_go() {
        let keys = Keys::all(&Secret::new(std::array::from_fn(|at| at as u8)).unwrap());
        let registry = Registry::bind_with("127.0.0.1", 0, None, keys.clone(), Limits::default()).unwrap();
        let short = Limits { frame_bytes: 1 << 10, ..Limits::default() };
        let mut session = Session::dial(registry.address(), &keys, Role::Member, "", &Value::Null, &short).unwrap();
        session.send_body(Kind::Join, 0, "{}", &[]).unwrap();
        session.receive_answer().unwrap();
        let mut events = Vec::new();
        let mut take = |count: usize| {
            while events.len() < count {
                let more = registry.poll(Duration::from_secs(60));
                assert!(!more.is_empty());
                events.extend(more);
            }
            events.drain(..count).collect::<Vec<_>>()
        };
        assert!(matches!(take(1)[..], [RegistryEvent::Joined { member: 1, .. }]));
        let call = registry.send(1, "{}".to_owned(), Vec::new()).unwrap();
        let (outgoing, outbox) = unbounded();
        let pickled = |bytes: usize| vec![7; bytes];
        let told = [
            Outgoing::Message { body: json!({"said": 1}), attachment: pickled(1 << 20) },
            Outgoing::Reply { call, body: json!({"said": 2}), attachment: pickled(1 << 20) },
            Outgoing::Message { body: json!({"said": 3}), attachment: pickled(5) },
            Outgoing::Close,
        ];
        told.into_iter().for_each(|one| outgoing.send(one).unwrap());
        write(session, &outbox, Duration::from_secs(60));
        let heard = take(3).into_iter().map(|event| match event {
            RegistryEvent::Message { body, attachment, .. } | RegistryEvent::Reply { body, attachment, .. } => {
                (body["said"].as_u64(), attachment)
            }
            other => panic!("{other:?}"),
        });
        assert_eq!(heard.collect::<Vec<_>>(), [(Some(1), vec![]), (Some(2), vec![]), (Some(3), pickled(5))]);
    }
}
