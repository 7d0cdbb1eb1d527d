//! Authenticated connections: the only way bytes enter or leave this crate.
//!
//! Every connection, whatever its role, starts with a handshake ([`Client`], [`Server`]) and then
//! carries [`Frame`]s; a mesh connection is handed to the dataflow after its first
//! answer. Connections that leave the host, and with [`Keys::always_encrypted`] all, are TLS 1.3 below that: hidden, and each
//! record authenticated ([`Stream`]). Within a host the ends prove their keys, bound to the address at which
//! the server listens, and a checksum (not a key) guards what follows: who could read or change it there is root.
//!
//! Departures: heartbeats, since the standard library offers neither TCP keepalive nor a user timeout. A silent member
//! sends a frame every sixth of the time after which silence counts as loss (60 s), at most every 10 s; links between
//! members take one and a half times that, so that the registry says first who it is. The end of a process is still
//! seen at once by the end of its socket.

mod acceptor;
mod certificates;
mod frame;
mod handshake;
mod keys;
mod metrics;
mod run_mesh;
mod stream;
mod tls;

use std::cell::Cell;
use std::io;
use std::net::{IpAddr, Shutdown, SocketAddr, TcpStream, ToSocketAddrs};
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

pub use frame::{Frame, FrameError, Kind, read_frame, write_frame};
#[doc(hidden)]
pub use handshake::fuzz_alive;
pub use handshake::{Client, HandshakeError, NONCE_BYTES, Proved, Role, Server, listening_at};
pub use keys::{Keys, Secret};
pub use metrics::{Metrics, MetricsSnapshot};
#[doc(hidden)]
pub use run_mesh::fuzz_introduction;
pub use run_mesh::{MeshDoor, MeshError, MeshPlan, MeshPort, join_mesh};
pub use stream::Stream;

pub(crate) use acceptor::{Accepted, Acceptor};

use crate::error::{ClusterError, Failure};
use serde_json::Value;

/// Pauses before a dial that was turned away is tried again: the first, doubling, up to the second.
const PAUSES: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(500));

/// Bounds in bytes, connections and time. The defaults are those of the design.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Most bytes that one side reads before the other has authenticated itself; of TLS, where it is spoken, as many again.
    pub handshake_bytes: usize,
    /// Longest duration of a handshake.
    pub handshake_time: Duration,
    /// Most connections of one listener that are still in their handshake.
    pub pending: usize,
    /// Largest payload of one frame.
    pub frame_bytes: usize,
    /// Longest time to establish a connection.
    pub connect_time: Duration,
    /// For how long a dial that a crowded listener turns away tries again.
    pub dial_time: Duration,
    /// Longest time that one write may be blocked by a peer that does not read.
    pub write_time: Duration,
    /// How often an otherwise silent member says that it lives.
    pub heartbeat: Duration,
    /// A member that says nothing for this long is lost, and so is one that leaves a feed or drain without an answer.
    /// Death of its process is seen at once; this is for one that is stopped or hung, and for a host that vanished.
    pub silence: Duration,
    /// How long the members of a generation wait for each other, each of which loads functions before. Who has begun gives up others that
    /// say nothing for one and a half times [`Limits::silence`].
    pub mesh_time: Duration,
    /// How long a member that ends waits for the threads of its queries before it leaves them.
    pub grace: Duration,
    /// Bytes of staged rows and frozen outputs that a member keeps in memory; more goes to files.
    pub staging_bytes: u64,
    /// Where those files are; the system's temporary directory when empty.
    pub spill_folders: Vec<PathBuf>,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            handshake_bytes: 4096,
            handshake_time: Duration::from_secs(5),
            pending: 64,
            frame_bytes: 256 << 20,
            connect_time: Duration::from_secs(10),
            dial_time: Duration::from_secs(30),
            write_time: Duration::from_secs(30),
            heartbeat: Duration::from_secs(10),
            silence: Duration::from_secs(60),
            mesh_time: Duration::from_secs(90),
            grace: Duration::from_secs(5),
            staging_bytes: 256 << 20,
            spill_folders: Vec::new(),
        }
    }
}

impl Limits {
    /// How long a connection may wait for its generation to begin: whoever dialled gives it up then, and what is taken later is dead.
    pub(crate) fn parked(&self) -> Duration {
        self.mesh_time.min(self.silence * 3 / 2)
    }

    /// The defaults for members that are given up when they are silent for so long: nothing waits longer for one of them, but for functions
    /// that load.
    #[must_use]
    pub fn patient(silence: Duration) -> Self {
        let limits = Limits::default();
        Limits {
            handshake_time: limits.handshake_time.min(silence),
            connect_time: limits.connect_time.min(silence),
            dial_time: limits.dial_time.min(silence),
            write_time: silence,
            heartbeat: limits.heartbeat.min(silence / 6),
            silence,
            mesh_time: Duration::from_secs(30).max(silence * 3 / 2),
            ..limits
        }
    }
}

/// One authenticated connection.
#[derive(Debug)]
pub struct Session {
    stream: Stream,
    frame_bytes: usize,
}

impl Session {
    /// Dials `address` and authenticates both ends with the key of `role` under `scope`. `context` is what the connection is
    /// for, as JSON; both proofs cover it. The server's own answer to it follows as a frame.
    ///
    /// A listener that serves as many handshakes as it may turns this one away. It is tried again then, after pauses
    /// that grow and differ between dials, for at most [`Limits::dial_time`].
    ///
    /// # Errors
    /// [`ClusterError::Address`], [`ClusterError::Io`] or [`ClusterError::Handshake`];
    /// [`ClusterError::NoKey`] when the key is not among `keys`;
    /// [`ClusterError::TurnedAway`] when there was no room all the time.
    pub fn dial(
        address: &str,
        keys: &Keys,
        role: Role,
        scope: &str,
        context: &Value,
        limits: &Limits,
    ) -> Result<Self, ClusterError> {
        insisting(address, limits.dial_time, is_turned_away, || {
            Self::dial_once(address, keys, role, scope, context, limits)
        })
    }

    fn dial_once(
        address: &str,
        keys: &Keys,
        role: Role,
        scope: &str,
        context: &Value,
        limits: &Limits,
    ) -> Result<Self, ClusterError> {
        let context = context.to_string();
        let nonce = handshake::nonce()?;
        let (client, hello) = Client::hello(keys, role, scope, context.as_bytes(), nonce)
            .ok_or_else(|| ClusterError::NoKey { role, scope: scope.to_owned() })?;
        handshake::fits(&hello, limits)?;
        let socket = connect(address, limits.connect_time)?;
        let deadline = Instant::now() + limits.handshake_time;
        let peer = socket.peer_addr().map_err(HandshakeError::Io)?;
        let (stream, binding) = match keys.identity() {
            identity if identity.is_due(peer.ip()) => {
                let leaf = identity.dialler(role, scope);
                let secured = tls::dial(&socket, &identity.authority, &leaf, role, deadline, limits)?;
                (Stream::secured(socket, secured.connection), secured.binding.to_vec())
            }
            _ => (Stream::plain(socket), handshake::listening_at(peer)),
        };
        let mut wire = handshake::Wire::new(&stream, deadline, limits);
        wire.send(&hello)?;
        let challenge = wire.receive()?;
        let proof = client.answer(&challenge, &binding)?;
        wire.send(&proof)?;
        Session::new(stream, limits)
    }

    /// Whether the registry at `host:port` is that of the engine whose claims have this number: who has taken the port since does not know it.
    /// Until nobody listens there, or something answers, it is asked again for so long as `patience`, and counts as that engine's in the end where
    /// it has said that it is crowded: that is no sign of its death. Who ends the connection without a word is somebody else, and who is out of
    /// reach is gone. Waits at most as long once more for a connection, and for an answer.
    ///
    /// # Errors
    /// [`ClusterError::Address`], and [`ClusterError::Io`] or [`ClusterError::Handshake`] where this end cannot ask: they say nothing of who is
    /// asked.
    pub fn answers(address: &str, claim: u64, patience: Duration) -> Result<bool, ClusterError> {
        let crowded = Cell::new(false);
        let asked = insisting(
            address,
            patience,
            |error| !is_verdict(error),
            || {
                let asked = Self::ask_once(address, claim, patience);
                crowded.set(crowded.get() || matches!(asked, Err(ClusterError::Handshake(HandshakeError::Crowded))));
                asked
            },
        );
        match asked {
            Ok(answers) => Ok(answers),
            Err(error) if is_verdict(&error) => Ok(false),
            // The next time it may be too busy to say even that.
            Err(_) if crowded.get() => Ok(true),
            Err(error) if is_ours(&error) => Err(error),
            Err(_) => Ok(false),
        }
    }

    fn ask_once(address: &str, claim: u64, patience: Duration) -> Result<bool, ClusterError> {
        let (alive, ask) = handshake::Alive::ask(claim, handshake::nonce()?);
        let (stream, limits) = (Stream::plain(connect(address, patience)?), Limits::default());
        let mut wire = handshake::Wire::new(&stream, Instant::now() + patience, &limits);
        wire.send(&ask)?;
        Ok(alive.is_answered(&wire.receive()?))
    }

    /// Dials for a connection of a mesh and gives its socket away once the other end has answered, all of which has `patience`, and the answer
    /// at least so long from when the call was taken.
    pub(crate) fn dial_mesh(
        address: &str,
        keys: &Keys,
        scope: &str,
        context: &Value,
        limits: &Limits,
        (patience, least): (Duration, Duration),
    ) -> Result<Stream, ClusterError> {
        let deadline = Instant::now() + patience;
        let mut session = Self::dial(address, keys, Role::Mesh, scope, context, limits)?;
        let left = deadline.saturating_duration_since(Instant::now());
        session.set_read_timeout(Some(left.max(least).max(Duration::from_millis(1))))?;
        session.receive_answer()?;
        session.into_stream()
    }

    fn new(stream: Stream, limits: &Limits) -> Result<Self, ClusterError> {
        let set = || -> io::Result<()> {
            stream.socket().set_nodelay(true)?;
            stream.socket().set_read_timeout(None)?;
            stream.socket().set_write_timeout(Some(limits.write_time))
        };
        set().map_err(ClusterError::io("prepare a socket"))?;
        Ok(Session { stream, frame_bytes: limits.frame_bytes })
    }

    /// A second handle of the same connection, for another thread.
    pub fn try_clone(&self) -> Result<Self, ClusterError> {
        let stream = self.stream.try_clone().map_err(ClusterError::io("share a socket"))?;
        Ok(Session { stream, frame_bytes: self.frame_bytes })
    }

    /// Sends one frame whose payload is the concatenation of `parts`.
    ///
    /// # Errors
    /// [`FrameError::TooLong`] without sending anything, or [`FrameError::Io`].
    pub fn send(&mut self, kind: Kind, parts: &[&[u8]]) -> Result<(), ClusterError> {
        Ok(write_frame(&mut self.stream, kind, parts, self.frame_bytes)?)
    }

    /// Sends a JSON body with an attachment; `call` ties answers to questions.
    pub fn send_body(&mut self, kind: Kind, call: u64, body: &str, attachment: &[u8]) -> Result<(), ClusterError> {
        let head = frame::body_head(call, body)?;
        self.send(kind, &[&head, body.as_bytes(), attachment])
    }

    /// Sends the answer to the connection's purpose: `{"ok": true, ..}` or a failure, without its attachment.
    pub fn answer(&mut self, answer: &Result<Value, Failure>) -> Result<(), ClusterError> {
        match answer {
            Ok(body) => self.send_body(Kind::Answer, 0, &body.to_string(), &[]),
            Err(failure) => self.send_body(Kind::Answer, 0, &failure.to_body().to_string(), &[]),
        }
    }

    /// Waits for the next frame; None at the end of the connection between two frames.
    pub fn receive(&mut self) -> Result<Option<Frame>, ClusterError> {
        Ok(read_frame(&mut self.stream, self.frame_bytes)?)
    }

    /// Waits for an answer.
    ///
    /// # Errors
    /// [`ClusterError::Refused`] when it is a failure.
    pub fn receive_answer(&mut self) -> Result<Value, ClusterError> {
        match self.receive()? {
            Some(frame) if frame.kind == Kind::Answer => {
                let body = frame.into_body()?;
                // Attachments may be exceptions, to be unpickled. None goes with an answer: whoever has the key of a feed runs no
                // code in others.
                match Failure::from_body(&body.json, Vec::new()) {
                    Some(failure) => Err(ClusterError::Refused(failure)),
                    None => Ok(body.json),
                }
            }
            Some(frame) => Err(ClusterError::Protocol(format!("{:?} instead of an answer", frame.kind))),
            None => Err(ClusterError::Closed("the peer closed without an answer".into())),
        }
    }

    /// Waits for the answer of a member that was meant: every member lets these keys in, and the address of one that has gone, or what
    /// stands on the way, may lead to another.
    ///
    /// # Errors
    /// As [`Session::receive_answer`]; [`ClusterError::Protocol`] when another member answers.
    pub(crate) fn receive_answer_of(&mut self, member: Option<u64>, peer: &str) -> Result<Value, ClusterError> {
        let answer = self.receive_answer()?;
        match (member, answer["member"].as_u64()) {
            (Some(meant), found) if found != Some(meant) => {
                let found = found.map_or_else(|| "nobody that has a number".into(), |found| format!("member {found}"));
                Err(ClusterError::Protocol(format!("{peer} was to be member {meant}, and {found} answers")))
            }
            _ => Ok(answer),
        }
    }

    /// Whether something, or the end, can be received without waiting.
    pub fn has_input(&self) -> Result<bool, ClusterError> {
        self.stream.has_input().map_err(ClusterError::io("look for input"))
    }

    /// From now on a read that gets nothing for this long fails; None waits for ever.
    pub fn set_read_timeout(&self, timeout: Option<Duration>) -> Result<(), ClusterError> {
        self.stream.socket().set_read_timeout(timeout).map_err(ClusterError::io("prepare a socket"))
    }

    /// From now on a write of which nothing is taken for this long fails; None waits for ever.
    pub fn set_write_timeout(&self, timeout: Option<Duration>) -> Result<(), ClusterError> {
        self.stream.socket().set_write_timeout(timeout).map_err(ClusterError::io("prepare a socket"))
    }

    /// Whether what goes over it is encrypted.
    #[must_use]
    pub fn is_encrypted(&self) -> bool {
        self.stream.is_encrypted()
    }

    /// The local address of the connection.
    pub fn local_ip(&self) -> Result<IpAddr, ClusterError> {
        let address = self.stream.socket().local_addr().map_err(ClusterError::io("name a socket"))?;
        Ok(address.ip())
    }

    /// Ends what comes, for all handles, as if the peer had broken off. Pending reads return at once; the peer can still be told why.
    pub(crate) fn stop_reading(&self) {
        // It may have ended already.
        let _ = self.stream.shutdown(Shutdown::Read);
    }

    /// Ends the connection for all its handles. Pending reads return at once.
    pub fn shutdown(&self) {
        // A connection that is gone already cannot be ended again: nothing to report.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Says that nothing more comes and waits until the peer has read what was sent: it closes,
    /// or `patience` ends. Without this, closing a socket with unread input destroys output that
    /// the peer has not seen yet.
    pub fn linger(self, patience: Duration) {
        let _ = self.stream.shutdown(Shutdown::Write);
        let deadline = Instant::now() + patience;
        let mut waste = [0u8; 16 << 10];
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let mut socket = self.stream.socket();
            if left.is_zero() || socket.set_read_timeout(Some(left)).is_err() {
                return;
            }
            match io::Read::read(&mut socket, &mut waste) {
                Ok(0) => return,
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    }

    /// Gives the socket away, without time limits: the mesh speaks its own frames.
    pub fn into_stream(self) -> Result<Stream, ClusterError> {
        let set = || -> io::Result<()> {
            self.stream.socket().set_read_timeout(None)?;
            self.stream.socket().set_write_timeout(None)
        };
        set().map_err(ClusterError::io("prepare a socket"))?;
        Ok(self.stream)
    }
}

/// Whether [`Session::send_body`] would send it.
///
/// # Errors
/// [`FrameError::TooLong`].
pub(crate) fn fits(body: &str, attachment: &[u8], limits: &Limits) -> Result<(), ClusterError> {
    Ok(frame::body_fits(body, attachment, limits.frame_bytes)?)
}

/// A host that is to be bound: Spark writes an IPv6 address in brackets, which no resolver knows.
pub(crate) fn without_brackets(host: &str) -> &str {
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

/// Whether a crowded listener says it, or one that has no room even for that.
fn is_turned_away(error: &ClusterError) -> bool {
    matches!(error, ClusterError::Handshake(HandshakeError::Truncated | HandshakeError::Crowded))
}

/// Whether it comes from what was dialled and stays so: nobody listens there, or somebody else.
fn is_verdict(error: &ClusterError) -> bool {
    match error {
        ClusterError::Io { source, .. } => source.kind() == io::ErrorKind::ConnectionRefused,
        ClusterError::Handshake(error) => {
            use HandshakeError::{Crowded, Io, Random, Timeout, Truncated};
            !matches!(error, Io(_) | Timeout | Truncated | Crowded | Random(_))
        }
        _ => false,
    }
}

/// Whether it is about this end alone: its resolver, its network, what it may open.
fn is_ours(error: &ClusterError) -> bool {
    match error {
        ClusterError::Address { .. } | ClusterError::Handshake(HandshakeError::Random(_)) => true,
        ClusterError::Io { source, .. } | ClusterError::Handshake(HandshakeError::Io(source)) => is_local(source),
        _ => false,
    }
}

/// All but what the other end, or the lack of one, brings about.
fn is_local(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, NotConnected, UnexpectedEof, WouldBlock};
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, HostUnreachable, TimedOut};
    !matches!(
        error.kind(),
        ConnectionAborted
            | ConnectionRefused
            | ConnectionReset
            | HostUnreachable
            | TimedOut
            | BrokenPipe
            | NotConnected
            | UnexpectedEof
            | WouldBlock
    )
}

/// Tries again what fails in a way that may pass, after pauses that grow and differ between those who try, for so long.
fn insisting<T>(
    address: &str,
    patience: Duration,
    passes: impl Fn(&ClusterError) -> bool,
    attempt: impl Fn() -> Result<T, ClusterError>,
) -> Result<T, ClusterError> {
    let began = Instant::now();
    let mut pause = PAUSES.0;
    for tries in 1.. {
        let error = match attempt() {
            Err(error) if passes(&error) => error,
            done => return done,
        };
        let waited = began.elapsed();
        if waited >= patience {
            return Err(match is_turned_away(&error) {
                true => ClusterError::TurnedAway { address: address.to_owned(), tries, waited },
                false => error,
            });
        }
        // Who was turned away together comes back one by one.
        let share = f64::from(handshake::nonce()?[0]) / 255.0;
        thread::sleep(pause.mul_f64(0.5 + 0.5 * share).min(patience - waited));
        pause = (2 * pause).min(PAUSES.1);
    }
    unreachable!("the tries are not counted to their end")
}

fn connect(address: &str, patience: Duration) -> Result<TcpStream, ClusterError> {
    let candidates: Vec<SocketAddr> =
        address.to_socket_addrs().map_err(|_| ClusterError::Address { address: address.to_owned() })?.collect();
    let mut last: Option<io::Error> = None;
    for candidate in candidates {
        match TcpStream::connect_timeout(&candidate, patience) {
            Ok(stream) => return Ok(stream),
            // A name may have addresses of a family that this host has no network for.
            Err(error) if is_local(&error) && last.is_some() => {}
            Err(error) => last = Some(error),
        }
    }
    match last {
        Some(source) => Err(ClusterError::Io { doing: format!("connect to {address}"), source }),
        None => Err(ClusterError::Address { address: address.to_owned() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_pass_is_tried_again_and_what_was_said_is_not() {
        let failed = |kind: io::ErrorKind| ClusterError::io("connect")(kind.into());
        let named = || ClusterError::Address { address: "a:1".into() };
        // Whether it is tried again, and whether it says nothing of who is dialled where no try has another end.
        let told: [(&dyn Fn() -> ClusterError, bool, bool); 8] = [
            (&named, true, true),
            (&|| failed(io::ErrorKind::NetworkUnreachable), true, true),
            (&|| failed(io::ErrorKind::AddrNotAvailable), true, true),
            (&|| failed(io::ErrorKind::HostUnreachable), true, false),
            (&|| failed(io::ErrorKind::TimedOut), true, false),
            (&|| HandshakeError::Truncated.into(), true, false),
            (&|| failed(io::ErrorKind::ConnectionRefused), false, false),
            (&|| HandshakeError::Magic { found: *b"HTTP" }.into(), false, false),
        ];
        for (error, again, ours) in told {
            let tries = Cell::new(0);
            let tried = insisting(
                "a:1",
                Duration::from_secs(60),
                |error| !is_verdict(error),
                || {
                    tries.set(tries.get() + 1);
                    if tries.get() < 3 { Err(error()) } else { Ok(()) }
                },
            );
            assert_eq!((tried.is_ok(), tries.get()), if again { (true, 3) } else { (false, 1) }, "{}", error());
            assert_eq!(is_ours(&error()), ours, "{}", error());
        }
    }
}
