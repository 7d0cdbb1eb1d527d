//! A listener: one thread that accepts, one thread per connection.
//!
//! A connection is authenticated on its own thread and, once it is, served there by the handler.
//! At most [`Limits::pending`] of them are unauthenticated at a time, a quarter of which is kept for
//! hosts that have authenticated themselves here before, and of the rest a single host that has not
//! gets half; one more is told so and turned away, and an honest peer tries again ([`Session::dial`]). Whatever goes wrong before authentication closes this one
//! connection and counts. [`Acceptor::close`] ends every connection and joins every thread.

use std::collections::{HashMap, HashSet};
use std::io::{ErrorKind, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::handshake::Proved;
use super::handshake::{self, Alive, Server, Wire, left};
use super::stream::Stream;
use super::{HandshakeError, Keys, Limits, Metrics, Role, Session, tls};
use crate::error::{ClusterError, Failure};

/// How long a thread that accepts is woken before it is left behind, and the pause between two tries.
const WAKE_TIME: Duration = Duration::from_secs(5);
const WAKE_PAUSE: Duration = Duration::from_millis(1);
/// Pause after the system refused to accept (no file descriptors, no memory).
const EXHAUSTED_PAUSE: Duration = Duration::from_millis(20);
/// One place in so many is kept for hosts that are known.
const KEPT_SHARE: usize = 4;
/// Of the places for strangers a single host takes one in so many.
const HOST_SHARE: usize = 2;
/// How long a refused peer may take to read why.
const REFUSAL_PATIENCE: Duration = Duration::from_secs(1);

/// An authenticated connection, as the handler gets it.
pub(crate) struct Accepted {
    pub(crate) session: Session,
    pub(crate) role: Role,
    /// What the peer's key is for: to be compared with the context.
    pub(crate) scope: String,
    /// What it is for; JSON from someone who knows the key.
    pub(crate) context: Vec<u8>,
}

type Handler = dyn Fn(Accepted) + Send + Sync;

struct Shared {
    keys: Keys,
    tls: Arc<rustls::ServerConfig>,
    limits: Limits,
    roles: &'static [Role],
    metrics: Arc<Metrics>,
    handler: Box<Handler>,
    closed: AtomicBool,
    open: Mutex<Open>,
}

#[derive(Default)]
struct Open {
    next: u64,
    streams: HashMap<u64, TcpStream>,
    threads: Vec<JoinHandle<()>>,
    room: Room,
}

/// Who may be in a handshake: as many as there are places, some of which only known hosts take.
#[derive(Debug, Default)]
struct Room {
    taken: usize,
    /// Of these, by host.
    by_host: HashMap<IpAddr, usize>,
    /// Hosts that have proved a key, so only those of our own cluster.
    known: HashSet<IpAddr>,
}

impl Room {
    /// Whether one more handshake may begin; if so, it has taken its place.
    fn enter(&mut self, host: IpAddr, places: usize) -> bool {
        let host = host.to_canonical();
        let own = self.by_host.get(&host).copied().unwrap_or(0);
        let free = match self.known.contains(&host) {
            true => self.taken < places,
            false => {
                let open = places - places / KEPT_SHARE;
                self.taken < open && own < open.div_ceil(HOST_SHARE)
            }
        };
        if free {
            self.taken += 1;
            self.by_host.insert(host, own + 1);
        }
        free
    }

    /// A handshake with `host` has ended, which has `proved` a key in it or not.
    fn leave(&mut self, host: IpAddr, proved: bool) {
        let host = host.to_canonical();
        self.taken -= 1;
        match self.by_host.get_mut(&host) {
            Some(own) if *own > 1 => *own -= 1,
            _ => _ = self.by_host.remove(&host),
        }
        if proved {
            self.known.insert(host);
        }
    }
}

/// A place in the room: given back when the handshake ends, however it does.
struct RoomGuard<'a> {
    shared: &'a Shared,
    host: IpAddr,
    proved: bool,
}

impl Drop for RoomGuard<'_> {
    fn drop(&mut self) {
        self.shared.open().room.leave(self.host, self.proved);
    }
}

impl Shared {
    fn open(&self) -> MutexGuard<'_, Open> {
        // The table stays consistent even if a holder panicked: every change to it is one step.
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A running listener.
pub(crate) struct Acceptor {
    address: SocketAddr,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Acceptor {
    /// Serves `roles` on `listener`; `name` is that of its threads.
    pub(crate) fn start(
        listener: TcpListener,
        name: &str,
        keys: Keys,
        roles: &'static [Role],
        limits: Limits,
        metrics: Arc<Metrics>,
        handler: Box<Handler>,
    ) -> Result<Self, ClusterError> {
        let address = listener.local_addr().map_err(ClusterError::io("name a listener"))?;
        let identity = keys.identity();
        let tls = tls::server(&identity.authority, &identity.listener())?;
        let shared = Arc::new(Shared {
            keys,
            tls,
            limits,
            roles,
            metrics,
            handler,
            closed: AtomicBool::new(false),
            open: Mutex::default(),
        });
        let (owned, session_name) = (Arc::clone(&shared), format!("{name}-conn"));
        let thread = thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || accept(&listener, &owned, &session_name))
            .map_err(ClusterError::io("start a thread"))?;
        Ok(Acceptor { address, shared, thread: Some(thread) })
    }

    /// Gives up a connection that a handler has passed on: [`Acceptor::close`] leaves it alone.
    pub(crate) fn disown(&self, stream: &Stream) {
        // A stream without a peer is gone already.
        if let Ok(peer) = stream.peer_addr() {
            self.shared.open().streams.retain(|_, twin| twin.peer_addr().ok() != Some(peer));
        }
    }

    /// Ends the listener and all its connections, and joins their threads. Idempotent.
    pub(crate) fn close(&mut self) {
        self.shared.closed.store(true, SeqCst);
        if let Some(thread) = self.thread.take() {
            let until = Instant::now() + WAKE_TIME;
            while !thread.is_finished() && Instant::now() < until {
                wake(self.address);
            }
            // Where the address has gone, or no descriptor is left, nothing wakes it: it is left behind, and ends with whoever connects next.
            if thread.is_finished() {
                // A panic of the accepting thread has been reported by the panic hook.
                let _ = thread.join();
            }
        }
        loop {
            let threads = {
                let mut open = self.shared.open();
                for stream in open.streams.values() {
                    let _ = stream.shutdown(Shutdown::Both);
                }
                std::mem::take(&mut open.threads)
            };
            if threads.is_empty() {
                return;
            }
            threads.into_iter().for_each(|thread| drop(thread.join()));
        }
    }
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        self.close();
    }
}

/// Lets a blocked accept return: connects to it.
fn wake(mut address: SocketAddr) {
    if address.ip().is_unspecified() {
        match address {
            SocketAddr::V4(_) => address.set_ip(Ipv4Addr::LOCALHOST.into()),
            SocketAddr::V6(_) => address.set_ip(Ipv6Addr::LOCALHOST.into()),
        }
    }
    // Failing may mean that the backlog is full: then accept returns without our help.
    let _ = TcpStream::connect_timeout(&address, Duration::from_secs(1));
    thread::sleep(WAKE_PAUSE);
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>, name: &str) {
    loop {
        let (stream, host) = match listener.accept() {
            Ok((stream, peer)) => (stream, peer.ip()),
            Err(error) => {
                if shared.closed.load(SeqCst) {
                    return;
                }
                if !matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) {
                    thread::sleep(EXHAUSTED_PAUSE);
                }
                continue;
            }
        };
        if shared.closed.load(SeqCst) {
            return;
        }
        let entered = shared.open().room.enter(host, shared.limits.pending);
        if !entered {
            // It is all that this socket has to take. Who has gone need not know.
            let _ = (&stream).write_all(&handshake::crowded());
            shared.metrics.refuse(&shared.metrics.refused_crowded);
            continue;
        }
        if spawn(stream, host, shared, name).is_err() {
            shared.open().room.leave(host, false);
            shared.metrics.refuse(&shared.metrics.refused_crowded);
        }
    }
}

fn spawn(stream: TcpStream, host: IpAddr, shared: &Arc<Shared>, name: &str) -> std::io::Result<()> {
    let twin = stream.try_clone()?;
    let mut open = shared.open();
    open.threads.retain(|thread| !thread.is_finished());
    let id = open.next;
    open.next += 1;
    let owned = Arc::clone(shared);
    let thread = thread::Builder::new().name(name.to_owned()).spawn(move || {
        let _entry = Entry { shared: &owned, id };
        serve(stream, host, &owned);
    })?;
    open.streams.insert(id, twin);
    open.threads.push(thread);
    Ok(())
}

/// Takes the connection out of the table when its thread ends, even by a panic.
struct Entry<'a> {
    shared: &'a Shared,
    id: u64,
}

impl Drop for Entry<'_> {
    fn drop(&mut self) {
        self.shared.open().streams.remove(&self.id);
    }
}

fn serve(stream: TcpStream, host: IpAddr, shared: &Shared) {
    let mut guard = RoomGuard { shared, host, proved: false };
    let authenticated = authenticate(stream, host, shared);
    guard.proved = authenticated.is_ok();
    drop(guard);
    let metrics = &shared.metrics;
    let (stream, Proved { role, scope, context }) = match authenticated {
        Ok(peer) => peer,
        Err(HandshakeError::Asked) => return,
        Err(error) => {
            metrics.refuse(match error {
                HandshakeError::Proof | HandshakeError::Certificate(_) => &metrics.refused_secret,
                HandshakeError::TlsDue => &metrics.refused_plain,
                HandshakeError::NoKey { .. } => &metrics.refused_role,
                HandshakeError::Timeout => &metrics.refused_slow,
                _ => &metrics.refused_malformed,
            });
            return;
        }
    };
    let Ok(mut session) = Session::new(stream, &shared.limits) else { return };
    if !shared.roles.contains(&role) {
        metrics.refuse(&metrics.refused_role);
        let failure = Failure::new("wrong_role", format!("{role:?} is not served on this port"));
        // A peer that is gone need not know.
        let _ = session.answer(&Err(failure));
        session.linger(REFUSAL_PATIENCE);
        return;
    }
    metrics.accepted.fetch_add(1, SeqCst);
    (shared.handler)(Accepted { session, role, scope, context });
}

fn authenticate(stream: TcpStream, host: IpAddr, shared: &Shared) -> Result<(Stream, Proved), HandshakeError> {
    let limits = &shared.limits;
    let deadline = Instant::now() + limits.handshake_time;
    if first_byte(&stream, deadline)? == tls::FIRST_BYTE {
        let tls::Secured { connection, binding } = tls::accept(&stream, &shared.tls, deadline, limits)?;
        let stream = Stream::secured(stream, connection);
        let mut wire = Wire::new(&stream, deadline, limits);
        let hello = wire.receive()?;
        let proved = prove(wire, &hello, &binding, shared)?;
        if !stream.shows(|connection| tls::is_of(connection, proved.role, &proved.scope)) {
            let Proved { role, scope, .. } = proved;
            return Err(HandshakeError::Certificate(format!("it is not that of {role:?} of {scope:?}")));
        }
        return Ok((stream, proved));
    }
    let binding = handshake::listening_at(stream.local_addr().map_err(HandshakeError::Io)?);
    let stream = Stream::plain(stream);
    let mut wire = Wire::new(&stream, deadline, limits);
    let hello = wire.receive()?;
    if let Some(reply) = shared.keys.claim().and_then(|claim| Alive::reply(claim, &hello)) {
        wire.send(&reply)?;
        return Err(HandshakeError::Asked);
    }
    if shared.keys.identity().is_due(host) {
        wire.send(&handshake::tls_due())?;
        return Err(HandshakeError::TlsDue);
    }
    let proved = prove(wire, &hello, &binding, shared)?;
    Ok((stream, proved))
}

fn first_byte(stream: &TcpStream, deadline: Instant) -> Result<u8, HandshakeError> {
    let mut byte = [0];
    loop {
        stream.set_read_timeout(Some(left(deadline)?)).map_err(HandshakeError::Io)?;
        match stream.peek(&mut byte) {
            Ok(0) => return Err(HandshakeError::Truncated),
            Ok(_) => return Ok(byte[0]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(HandshakeError::from_io(error)),
        }
    }
}

fn prove(mut wire: Wire<'_>, hello: &[u8], binding: &[u8], shared: &Shared) -> Result<Proved, HandshakeError> {
    let (server, challenge) = Server::challenge(&shared.keys, hello, handshake::nonce()?, binding)?;
    wire.send(&challenge)?;
    let answer = wire.receive().map_err(|error| server.missed(error))?;
    server.verify(&answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OURS: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
    const THEIRS: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2));
    const OTHERS: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 3));

    #[test]
    fn strangers_do_not_take_the_last_quarter_of_the_places() {
        let mut room = Room::default();
        assert!(room.enter(OURS, 8));
        room.leave(OURS, true);
        assert_eq!((0..20).filter(|_| room.enter(THEIRS, 8)).count(), 3, "half of what is for strangers");
        assert_eq!((0..20).filter(|_| room.enter(OTHERS, 8)).count(), 3);
        assert!(room.enter(OURS, 8) && room.enter(OURS, 8), "places that are kept for us");
        assert!(!room.enter(OURS, 8) && !room.enter(THEIRS, 8), "nobody gets more than there are");
        room.leave(THEIRS, false);
        assert!(!room.enter(THEIRS, 8), "7 of 8 are taken, 6 of them are for strangers");
        assert!(room.enter(OURS, 8));
        // Room comes back to the host that left it.
        for _ in 0..3 {
            room.leave(OURS, false);
        }
        assert!(room.enter(THEIRS, 8) && !room.enter(THEIRS, 8));
        for host in [THEIRS, THEIRS, THEIRS, OTHERS, OTHERS, OTHERS] {
            room.leave(host, false);
        }
        assert!(room.taken == 0 && room.by_host.is_empty());
    }

    #[test]
    fn a_host_is_known_by_its_proof_in_either_notation() {
        let mut room = Room::default();
        assert!(room.enter(THEIRS, 4));
        room.leave(THEIRS, false);
        assert!(room.known.is_empty(), "it has proved nothing");
        let mapped = IpAddr::V6(Ipv4Addr::new(10, 0, 0, 1).to_ipv6_mapped());
        assert!(room.enter(mapped, 4));
        room.leave(mapped, true);
        assert_eq!((0..9).filter(|_| room.enter(OURS, 4)).count(), 4);
    }

    #[test]
    fn a_single_place_is_for_everybody() {
        let mut room = Room::default();
        assert!(room.enter(THEIRS, 1) && !room.enter(THEIRS, 1));
    }
}
