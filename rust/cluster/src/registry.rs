//! The registry at the driver: who is a member, requests to them, their answers.
//!
//! Ids are given here, counting up from 1, and never used twice. A member is lost the moment its
//! connection ends; everything it had not answered then is named in the event. One thread accepts,
//! one thread per member reads and one writes: who sends waits for no member, however much it sends to one that does not read.

use std::collections::{BTreeMap, BTreeSet};
use std::net::TcpListener;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crossbeam::channel::{Receiver, Sender, unbounded};
use serde_json::{Value, json};

use crate::error::{ClusterError, Failure};
use crate::message::slot_scope;
use crate::session::{
    Accepted, Acceptor, Keys, Kind, Limits, Metrics, MetricsSnapshot, Role, Secret, Session, fits, without_brackets,
};

/// What the registry has to tell.
#[derive(Clone, Debug, PartialEq)]
pub enum RegistryEvent {
    /// A member has come.
    Joined {
        /// Its id.
        member: u64,
        /// What it said about itself, with `address`, its data port.
        info: Value,
    },
    /// A member is gone.
    Lost {
        /// Its id.
        member: u64,
        /// Why.
        reason: String,
        /// Requests that it will never answer.
        calls: Vec<u64>,
    },
    /// A request was answered.
    Reply {
        /// By whom.
        member: u64,
        /// The id that [`Registry::send`] returned.
        call: u64,
        /// `{"ok": true, ..}` or `{"error": {..}}`.
        body: Value,
        /// What goes with it.
        attachment: Vec<u8>,
    },
    /// A member says something unasked.
    Message {
        /// Who.
        member: u64,
        /// What.
        body: Value,
        /// What goes with it.
        attachment: Vec<u8>,
    },
}

/// A member that is connected now.
#[derive(Clone, Debug, PartialEq)]
pub struct MemberInfo {
    /// Its id.
    pub member: u64,
    /// What it said about itself, with `address`, its data port.
    pub info: Value,
}

/// What is to be written to a member.
struct Outgoing {
    kind: Kind,
    call: u64,
    body: String,
    attachment: Vec<u8>,
}

struct Entry {
    info: Value,
    writer: Sender<Outgoing>,
    calls: BTreeSet<u64>,
    dismissed: Option<String>,
}

struct Shared {
    members: Mutex<BTreeMap<u64, Entry>>,
    ids: AtomicU64,
    calls: AtomicU64,
    events: Sender<RegistryEvent>,
    limits: Limits,
    metrics: Arc<Metrics>,
}

impl Shared {
    fn members(&self) -> MutexGuard<'_, BTreeMap<u64, Entry>> {
        // Every change to the table is one step: it is consistent even after a panic.
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The driver's end of all members.
pub struct Registry {
    acceptor: Mutex<Acceptor>,
    address: String,
    shared: Arc<Shared>,
    events: Receiver<RegistryEvent>,
    metrics: Arc<Metrics>,
}

impl Registry {
    /// Listens on `bind_host:port` (0: any port). `advertise` is the host that members dial,
    /// by default the one that is bound.
    ///
    /// # Errors
    /// [`ClusterError::WeakSecret`], [`ClusterError::NothingToAdvertise`], [`ClusterError::Io`].
    pub fn bind(bind_host: &str, port: u16, advertise: Option<&str>, secret: [u8; 32]) -> Result<Self, ClusterError> {
        Self::bind_with(bind_host, port, advertise, Keys::all(&Secret::new(secret)?), Limits::default())
    }

    /// [`Registry::bind`] with keys, which are all of a secret, and other limits.
    pub fn bind_with(
        bind_host: &str,
        port: u16,
        advertise: Option<&str>,
        keys: Keys,
        limits: Limits,
    ) -> Result<Self, ClusterError> {
        let doing = format!("listen on {bind_host}:{port}");
        let listener = TcpListener::bind((without_brackets(bind_host), port)).map_err(ClusterError::io(doing))?;
        let bound = listener.local_addr().map_err(ClusterError::io("name a listener"))?;
        let address = match advertise {
            Some(host) if host.contains(':') && !host.starts_with('[') => {
                format!("[{host}]:{}", bound.port())
            }
            Some(host) => format!("{host}:{}", bound.port()),
            None if bound.ip().is_unspecified() => {
                return Err(ClusterError::NothingToAdvertise { host: bind_host.to_owned() });
            }
            None => bound.to_string(),
        };
        let (sender, events) = unbounded();
        let metrics = Arc::new(Metrics::default());
        let shared = Arc::new(Shared {
            members: Mutex::default(),
            ids: AtomicU64::new(1),
            calls: AtomicU64::new(1),
            events: sender,
            limits: limits.clone(),
            metrics: Arc::clone(&metrics),
        });
        let owned = Arc::clone(&shared);
        let acceptor = Acceptor::start(
            listener,
            "penstock-reg",
            keys,
            &[Role::Member],
            limits,
            Arc::clone(&metrics),
            Box::new(move |accepted| serve(accepted, &owned)),
        )?;
        Ok(Registry { acceptor: Mutex::new(acceptor), address, shared, events, metrics })
    }

    /// What members dial, as `host:port`.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// The members that are connected now, by id.
    pub fn members(&self) -> Vec<MemberInfo> {
        let members = self.shared.members();
        members.iter().map(|(id, e)| MemberInfo { member: *id, info: e.info.clone() }).collect()
    }

    /// Sends a request, without waiting for the member, and returns its call id; the answer comes as [`RegistryEvent::Reply`], or
    /// the call is named by [`RegistryEvent::Lost`].
    ///
    /// # Errors
    /// [`ClusterError::UnknownMember`]; [`ClusterError::Frame`] when it is too long.
    pub fn send(&self, member: u64, body: String, attachment: Vec<u8>) -> Result<u64, ClusterError> {
        let (kind, call) = (Kind::Request, self.shared.calls.fetch_add(1, SeqCst));
        let mut members = self.shared.members();
        let entry = members.get_mut(&member).ok_or(ClusterError::UnknownMember { member })?;
        fits(&body, &attachment, &self.shared.limits)?;
        entry.calls.insert(call);
        // Where the writer has ended the member is lost, and the loss names the call.
        let _ = entry.writer.send(Outgoing { kind, call, body, attachment });
        Ok(call)
    }

    /// Waits up to `timeout` for something to happen; returns everything that has, in order.
    pub fn poll(&self, timeout: Duration) -> Vec<RegistryEvent> {
        let mut events = Vec::new();
        events.extend(self.events.recv_timeout(timeout).ok());
        events.extend(self.events.try_iter());
        events
    }

    /// Tells a member to go; its end comes as [`RegistryEvent::Lost`].
    ///
    /// # Errors
    /// [`ClusterError::UnknownMember`].
    pub fn dismiss(&self, member: u64, reason: &str) -> Result<(), ClusterError> {
        let mut members = self.shared.members();
        let entry = members.get_mut(&member).ok_or(ClusterError::UnknownMember { member })?;
        entry.dismissed = Some(reason.to_owned());
        let body = json!({ "reason": reason }).to_string();
        let _ = entry.writer.send(Outgoing { kind: Kind::Dismiss, call: 0, body, attachment: Vec::new() });
        Ok(())
    }

    /// Counters of the listener.
    pub fn metrics(&self) -> MetricsSnapshot {
        self.metrics.snapshot()
    }

    /// Ends all connections (members then end themselves) and joins all threads. Idempotent; what
    /// happened before can still be polled.
    pub fn close(&self) {
        self.acceptor.lock().unwrap_or_else(PoisonError::into_inner).close();
    }
}

/// Writes what is sent to a member, until it is lost.
fn write(session: &mut Session, outgoing: &Receiver<Outgoing>) {
    for Outgoing { kind, call, body, attachment } in outgoing {
        if session.send_body(kind, call, &body, &attachment).is_err() {
            // Half a frame may be out: the reader sees the end and reports the loss.
            return session.shutdown();
        }
    }
}

fn serve(accepted: Accepted, shared: &Shared) {
    let mut session = accepted.session;
    let Ok((member, writer)) = admit(&mut session, &accepted.scope, shared) else { return };
    let reason = listen(&mut session, member, shared);
    session.shutdown();
    let (calls, dismissed) = match shared.members().remove(&member) {
        Some(entry) => (entry.calls.into_iter().collect(), entry.dismissed),
        None => (Vec::new(), None),
    };
    // Its socket and its queue have ended.
    let _ = writer.join();
    let reason = match dismissed {
        // It may never have read that it is to go.
        Some(why) if reason.starts_with(SILENT) => format!("{reason}; dismissed: {why}"),
        Some(why) => format!("dismissed: {why}"),
        None => reason,
    };
    // Nobody listens any more when the registry itself is gone.
    let _ = shared.events.send(RegistryEvent::Lost { member, reason, calls });
}

/// Hears who it is and gives it an id.
fn admit(session: &mut Session, scope: &str, shared: &Shared) -> Result<(u64, JoinHandle<()>), ClusterError> {
    session.set_read_timeout(Some(shared.limits.handshake_time))?;
    let body = match session.receive()? {
        Some(frame) if frame.kind == Kind::Join => frame.into_body()?,
        _ => return Err(ClusterError::Protocol("a member has to join first".into())),
    };
    session.set_read_timeout(Some(shared.limits.silence))?;
    let info = body.json;
    if slot_scope(&info) != scope {
        shared.metrics.refuse(&shared.metrics.refused_role);
        let message = format!("the key is for slot {scope:?}, not for {:?}", slot_scope(&info));
        session.answer(&Err(Failure::new("wrong_scope", message)))?;
        return Err(ClusterError::Protocol("a member of another slot".into()));
    }
    let member = shared.ids.fetch_add(1, SeqCst);
    let (writer, outgoing) = unbounded();
    let thread = match start_writer(session, member, outgoing) {
        Ok(thread) => thread,
        Err(error) => {
            shared.metrics.refuse(&shared.metrics.refused_exhausted);
            let message = format!(
                "the driver has no room for one more member: {error}. Raise the limits of its process (ulimit -n for open files, \
                 -u for threads)"
            );
            session.answer(&Err(Failure::new("exhausted", message)))?;
            return Err(error);
        }
    };
    // The answer goes first, so that no request can overtake it.
    if let Err(error) = session.answer(&Ok(json!({ "ok": true, "member": member }))) {
        drop(writer);
        // Nothing was to be written, so it has ended.
        let _ = thread.join();
        return Err(error);
    }
    let entry = Entry { info: info.clone(), writer, calls: BTreeSet::new(), dismissed: None };
    shared.members().insert(member, entry);
    let _ = shared.events.send(RegistryEvent::Joined { member, info });
    Ok((member, thread))
}

fn start_writer(session: &Session, member: u64, outgoing: Receiver<Outgoing>) -> Result<JoinHandle<()>, ClusterError> {
    let mut twin = session.try_clone()?;
    let thread = thread::Builder::new().name(format!("penstock-reg-{member}"));
    thread.spawn(move || write(&mut twin, &outgoing)).map_err(ClusterError::io("start a thread"))
}

/// How the reason begins where a member said nothing for too long: its process may still be there.
const SILENT: &str = "connected but silent";

/// Reads until the member is gone; says why.
fn listen(session: &mut Session, member: u64, shared: &Shared) -> String {
    loop {
        let frame = match session.receive() {
            Ok(Some(frame)) => frame,
            Ok(None) => return "its connection ended".into(),
            Err(ClusterError::Frame(error)) if error.is_timeout() => {
                return format!(
                    "{SILENT} for {:?}: hung or stopped, or its host is gone (member_timeout)",
                    shared.limits.silence
                );
            }
            Err(error) => return error.to_string(),
        };
        let kind = frame.kind;
        if kind == Kind::Heartbeat {
            continue;
        }
        let body = match frame.into_body() {
            Ok(body) => body,
            Err(error) => return error.to_string(),
        };
        let (call, body, attachment) = (body.call, body.json, body.attachment);
        let event = match kind {
            Kind::Reply => {
                let mut members = shared.members();
                let known = members.get_mut(&member).is_some_and(|e| e.calls.remove(&call));
                if !known {
                    return format!("it answered call {call}, which it was not asked");
                }
                RegistryEvent::Reply { member, call, body, attachment }
            }
            Kind::Message => RegistryEvent::Message { member, body, attachment },
            other => return format!("it sent {other:?}, which members do not send"),
        };
        let _ = shared.events.send(event);
    }
}
