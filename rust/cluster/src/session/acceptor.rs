//! A listener: one thread that accepts, one thread per connection.
//!
//! A connection is authenticated on its own thread and, once it is, served there by the handler.
//! At most [`Limits::pending`] of them are unauthenticated at a time. No host gets the last quarter of the places
//! alone, hosts that have not authenticated themselves here before do not get it at all, and a single one of these gets
//! half of the rest. Where there is no place, who has said nothing for longest gives its own up: an honest peer says who
//! it is as soon as it is connected. Else one more is told so and turned away, and an honest peer tries again
//! ([`Session::dial`]). Whatever goes wrong before authentication closes this one connection and counts.
//! [`Acceptor::close`] ends every connection and joins every thread.

use std::collections::{BTreeMap, HashMap};
use std::io::{ErrorKind, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
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
/// One place in so many is kept for hosts that are known, and for others than one of them.
const KEPT_SHARE: usize = 4;
/// Of the places for strangers a single host takes one in so many.
const HOST_SHARE: usize = 2;
/// How many hosts are known at most, and for how long after they have proved a key: addresses go from one to another.
const MOST_KNOWN: usize = 4096;
const KNOWN_TIME: Duration = Duration::from_secs(24 * 3600);
/// Who has said nothing for so long gives its place to whoever comes: so few take turns that no honest peer is hurried.
const SILENCE: Duration = Duration::from_millis(250);
/// And for so long to who has said something: honest peers among many that do not speak come in at once.
const SHORT_SILENCE: Duration = Duration::from_millis(100);
/// How long who finds no place has to say something: the first message of an honest peer is at the heels of its connection.
const FIRST_WORD: Duration = Duration::from_micros(200);
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

impl Open {
    /// A place for one more of `host`, and who has given it up, having said nothing for at least `silence`.
    fn enter(&mut self, host: IpAddr, places: usize, silence: Duration) -> Option<(u64, Option<TcpStream>)> {
        let (host, now) = (host.to_canonical(), Instant::now());
        let idle = match self.room.has_place(host, places, now, None) {
            true => None,
            false => Some(self.room.idlest(host, places, now, silence)?),
        };
        let left = idle.and_then(|idle| {
            self.room.leave(idle, false, now);
            self.streams.remove(&idle)
        });
        let id = self.next;
        self.next += 1;
        self.room.enter(id, host, now);
        Some((id, left))
    }
}

/// Who is in a handshake: as many as there are places, some of which only known hosts take.
#[derive(Debug, Default)]
struct Room {
    /// By number, so in the order in which they came.
    pending: BTreeMap<u64, Pending>,
    /// Hosts that have proved a key, so only those of our own cluster, and when they last did.
    known: HashMap<IpAddr, Instant>,
}

#[derive(Debug)]
struct Pending {
    host: IpAddr,
    since: Instant,
    /// Nothing has come of it.
    silent: bool,
}

impl Room {
    /// Whether one more handshake with `host` may begin, once `gone` has left.
    fn has_place(&self, host: IpAddr, places: usize, now: Instant, gone: Option<u64>) -> bool {
        let there = || self.pending.iter().filter(|(id, _)| Some(**id) != gone);
        let (taken, own) = (there().count(), there().filter(|(_, one)| one.host == host).count());
        let open = places - places / KEPT_SHARE;
        match self.known.get(&host) {
            Some(since) if now.duration_since(*since) < KNOWN_TIME => taken < places && own < open,
            _ => taken < open && own < open.div_ceil(HOST_SHARE),
        }
    }

    /// Who has said nothing for longest, for at least `silence`, where its place would be one for `host`.
    fn idlest(&self, host: IpAddr, places: usize, now: Instant, silence: Duration) -> Option<u64> {
        let idle = |one: &Pending| one.silent && now.duration_since(one.since) >= silence;
        let mut pending = self.pending.iter();
        let found = pending.find(|(id, one)| idle(one) && self.has_place(host, places, now, Some(**id)));
        found.map(|(id, _)| *id)
    }

    fn enter(&mut self, id: u64, host: IpAddr, now: Instant) {
        self.pending.insert(id, Pending { host, since: now, silent: true });
    }

    /// It has said something, or ended; false where it has no place any more.
    fn heard(&mut self, id: u64) -> bool {
        self.pending.get_mut(&id).map(|one| one.silent = false).is_some()
    }

    /// A handshake has ended, in which the host has `proved` a key or not.
    fn leave(&mut self, id: u64, proved: bool, now: Instant) {
        let Some(Pending { host, .. }) = self.pending.remove(&id) else { return };
        if !proved {
            return;
        }
        if self.known.len() >= MOST_KNOWN && !self.known.contains_key(&host) {
            let oldest = self.known.iter().min_by_key(|(_, since)| **since).map(|(host, _)| *host);
            oldest.map(|oldest| self.known.remove(&oldest));
        }
        self.known.insert(host, now);
    }
}

/// A place in the room: given back when the handshake ends, however it does.
struct RoomGuard<'a> {
    shared: &'a Shared,
    id: u64,
    proved: bool,
}

impl Drop for RoomGuard<'_> {
    fn drop(&mut self) {
        self.shared.open().room.leave(self.id, self.proved, Instant::now());
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
    let metrics = &shared.metrics;
    let mut exhausted = false;
    loop {
        let (stream, host) = match listener.accept() {
            Ok((stream, peer)) => (stream, peer.ip()),
            Err(error) => {
                if shared.closed.load(SeqCst) {
                    return;
                }
                if !matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) {
                    // Once for as long as it lasts: it is the same connection that waits.
                    if !std::mem::replace(&mut exhausted, true) {
                        metrics.refuse(&metrics.refused_exhausted);
                    }
                    thread::sleep(EXHAUSTED_PAUSE);
                }
                continue;
            }
        };
        exhausted = false;
        if shared.closed.load(SeqCst) {
            return;
        }
        let Some(id) = enter(&stream, host, shared) else {
            turn_away(&stream, metrics, &metrics.refused_crowded);
            continue;
        };
        if let Err(stream) = spawn(stream, id, host, shared, name) {
            shared.open().room.leave(id, false, Instant::now());
            turn_away(&stream, metrics, &metrics.refused_exhausted);
        }
    }
}

/// The number of the place that a connection gets, if it does.
fn enter(stream: &TcpStream, host: IpAddr, shared: &Shared) -> Option<u64> {
    let places = shared.limits.pending;
    let mut entered = shared.open().enter(host, places, SILENCE);
    if entered.is_none() && speaks(stream) {
        entered = shared.open().enter(host, places, SHORT_SILENCE);
    }
    let (id, left) = entered?;
    if let Some(idle) = left {
        turn_away(&idle, &shared.metrics, &shared.metrics.refused_crowded);
    }
    Some(id)
}

/// Whether something has come of a connection that nobody serves yet.
fn speaks(stream: &TcpStream) -> bool {
    thread::sleep(FIRST_WORD);
    let look = || {
        stream.set_nonblocking(true)?;
        let said = stream.peek(&mut [0]);
        stream.set_nonblocking(false)?;
        said
    };
    matches!(look(), Ok(1))
}

/// Says that there is no room, and ends the connection.
fn turn_away(mut stream: &TcpStream, metrics: &Metrics, reason: &AtomicU64) {
    // It is all that this socket has to take. Who has gone need not know.
    let _ = stream.write_all(&handshake::crowded());
    let _ = stream.shutdown(Shutdown::Both);
    metrics.refuse(reason);
}

/// Serves a connection on a thread of its own; gives it back where the system has none, or no descriptor.
fn spawn(stream: TcpStream, id: u64, host: IpAddr, shared: &Arc<Shared>, name: &str) -> Result<(), TcpStream> {
    let Ok(twin) = stream.try_clone() else { return Err(stream) };
    let mut open = shared.open();
    open.threads.retain(|thread| !thread.is_finished());
    let owned = Arc::clone(shared);
    let thread = thread::Builder::new().name(name.to_owned()).spawn(move || {
        let _entry = Entry { shared: &owned, id };
        serve(stream, id, host, &owned);
    });
    let Ok(thread) = thread else { return Err(twin) };
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

fn serve(stream: TcpStream, id: u64, host: IpAddr, shared: &Shared) {
    let mut guard = RoomGuard { shared, id, proved: false };
    let deadline = Instant::now() + shared.limits.handshake_time;
    let first = first_byte(&stream, deadline);
    if !shared.open().room.heard(id) {
        return; // who was turned away is counted
    }
    let authenticated = first.and_then(|first| authenticate(stream, first, deadline, host, shared));
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

fn authenticate(
    stream: TcpStream,
    first: u8,
    deadline: Instant,
    host: IpAddr,
    shared: &Shared,
) -> Result<(Stream, Proved), HandshakeError> {
    let limits = &shared.limits;
    if first == tls::FIRST_BYTE {
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

    /// Takes a place that is free.
    fn enter(open: &mut Open, host: IpAddr, places: usize) -> Option<u64> {
        open.enter(host, places, Duration::MAX).map(|(id, _)| id)
    }

    /// Takes as many as there are.
    fn fill(open: &mut Open, host: IpAddr, places: usize) -> Vec<u64> {
        std::iter::from_fn(|| enter(open, host, places)).collect()
    }

    fn known(host: IpAddr) -> Open {
        let mut open = Open::default();
        let id = enter(&mut open, host, 8).unwrap();
        open.room.leave(id, true, Instant::now());
        open
    }

    #[test]
    fn strangers_do_not_take_the_last_quarter_of_the_places() {
        let mut open = known(OURS);
        let leave = |open: &mut Open, id| open.room.leave(id, false, Instant::now());
        let theirs = fill(&mut open, THEIRS, 8);
        assert_eq!(theirs.len(), 3, "half of what is for strangers");
        let others = fill(&mut open, OTHERS, 8);
        assert_eq!(others.len(), 3);
        let ours = fill(&mut open, OURS, 8);
        assert_eq!(ours.len(), 2, "places that are kept for us, and nobody gets more than there are");
        leave(&mut open, theirs[0]);
        assert_eq!(enter(&mut open, THEIRS, 8), None, "7 of 8 are taken, 6 of them are for strangers");
        let more = enter(&mut open, OURS, 8).unwrap();
        // Room comes back to the host that left it.
        ours.into_iter().chain([more]).for_each(|id| leave(&mut open, id));
        let again = fill(&mut open, THEIRS, 8);
        assert_eq!(again.len(), 1);
        theirs.into_iter().chain(others).chain(again).for_each(|id| leave(&mut open, id));
        assert!(open.room.pending.is_empty());
    }

    #[test]
    fn a_known_host_does_not_take_all_places_of_the_others() {
        let mut open = known(OURS);
        assert_eq!(fill(&mut open, OURS, 8).len(), 6);
        assert_eq!(enter(&mut open, THEIRS, 8), None, "what is left is for those who are known");
        open.room.known.insert(OTHERS, Instant::now());
        assert_eq!(fill(&mut open, OTHERS, 8).len(), 2);
    }

    #[test]
    fn who_has_said_nothing_for_longest_gives_its_place_to_who_comes() {
        let mut open = known(OURS);
        let there = fill(&mut open, OURS, 8);
        let spoke = there[0];
        assert!(open.room.heard(spoke));
        assert!(open.enter(OURS, 8, SILENCE).is_none(), "all have just come");
        for one in open.room.pending.values_mut() {
            one.since -= SILENCE;
        }
        let (first, left) = open.enter(OURS, 8, SILENCE).unwrap();
        assert!(left.is_none() && open.room.pending.contains_key(&spoke));
        assert!(!open.room.pending.contains_key(&there[1]) && !open.room.heard(there[1]), "it is told once");
        for _ in &there[2..] {
            assert!(open.enter(OURS, 8, SILENCE).is_some());
        }
        assert!(open.enter(OURS, 8, SILENCE).is_none(), "those that are left have just come, or have spoken");
        assert!(open.room.pending.contains_key(&spoke) && open.room.pending.contains_key(&first));
        assert_eq!(open.room.pending.len(), there.len());
    }

    #[test]
    fn a_place_that_is_given_up_is_one_for_who_comes() {
        let mut open = known(OURS);
        let theirs = fill(&mut open, THEIRS, 8);
        let ours = [(); 3].map(|()| enter(&mut open, OURS, 8).unwrap());
        let age = |open: &mut Open, id: u64| open.room.pending.get_mut(&id).unwrap().since -= SILENCE;
        age(&mut open, ours[0]);
        assert!(open.enter(THEIRS, 8, SILENCE).is_none(), "a host has no more than its share");
        age(&mut open, theirs[2]);
        assert!(open.enter(THEIRS, 8, SILENCE).is_some());
        assert!(!open.room.pending.contains_key(&theirs[2]) && open.room.pending.contains_key(&ours[0]));
    }

    #[test]
    fn a_host_is_known_by_its_proof_in_either_notation() {
        let mut open = Open::default();
        let id = enter(&mut open, THEIRS, 4).unwrap();
        open.room.leave(id, false, Instant::now());
        assert!(open.room.known.is_empty(), "it has proved nothing");
        let mapped = IpAddr::V6(Ipv4Addr::new(10, 0, 0, 1).to_ipv6_mapped());
        let id = enter(&mut open, mapped, 4).unwrap();
        open.room.leave(id, true, Instant::now());
        assert_eq!(fill(&mut open, OURS, 4).len(), 3);
    }

    #[test]
    fn hosts_are_known_for_a_day_and_not_too_many() {
        let (mut room, now) = (Room::default(), Instant::now());
        let host = |number: u32| IpAddr::V4(Ipv4Addr::from_bits(number));
        for number in 0..MOST_KNOWN as u32 + 2 {
            let (id, then) = (number.into(), now + Duration::from_secs(number.into()));
            room.enter(id, host(number), then);
            room.leave(id, true, then);
        }
        assert_eq!(room.known.len(), MOST_KNOWN);
        assert!(!room.known.contains_key(&host(1)) && room.known.contains_key(&host(2)), "the oldest go");
        let places = |then| {
            let mut room = Room { known: [(OURS, now)].into(), ..Room::default() };
            (0..8)
                .take_while(|id| {
                    room.has_place(OURS, 8, then, None) && {
                        room.enter(*id, OURS, then);
                        true
                    }
                })
                .count()
        };
        assert_eq!((places(now + KNOWN_TIME / 2), places(now + KNOWN_TIME)), (6, 3));
    }

    #[test]
    fn a_single_place_is_for_everybody() {
        let mut open = Open::default();
        assert_eq!(fill(&mut open, THEIRS, 1).len(), 1);
    }
}
