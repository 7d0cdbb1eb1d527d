//! Authenticated connections: the only way bytes enter or leave this crate.
//!
//! Every connection, whatever its role, starts with a handshake ([`Client`], [`Server`]) and then
//! carries [`Frame`]s; a mesh connection is handed to the dataflow after its first
//! answer. [`Session`] is the one type that owns a socket, so that transport encryption can later
//! be put in here without touching anything else. Until then the secret authenticates the ends of
//! a connection, and a checksum (not a key) guards what follows: the bytes are neither hidden from
//! nor protected against someone who controls the network between two hosts.
//!
//! Departures: heartbeats, since the standard library offers neither TCP keepalive nor a user timeout. A silent member
//! sends a frame every sixth of the time after which silence counts as loss (60 s), at most every 10 s; links between
//! members take one and a half times that, so that the registry says first who it is. The end of a process is still
//! seen at once by the end of its socket. And the secret authenticates the ends of a connection only: frames carry a
//! CRC, not a MAC, until there is TLS.

mod acceptor;
mod frame;
mod handshake;
mod metrics;
mod run_mesh;

use std::fmt;
use std::io;
use std::net::{IpAddr, Shutdown, SocketAddr, TcpStream, ToSocketAddrs};
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

pub use frame::{Frame, FrameError, Kind, read_frame, write_frame};
pub use handshake::{Client, HandshakeError, NONCE_BYTES, Role, Server};
pub use metrics::{Metrics, MetricsSnapshot};
pub use run_mesh::{MeshError, MeshPlan, MeshPort};

pub(crate) use acceptor::{Accepted, Acceptor};

use crate::error::{ClusterError, Failure};
use serde_json::Value;

/// Pauses before a dial that was turned away is tried again: the first, doubling, up to the second.
const PAUSES: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(500));

/// The secret of one engine: 256 bits that every process of it knows. Never printed.
#[derive(Clone)]
pub struct Secret([u8; 32]);

impl Secret {
    /// Takes the bytes of a secret.
    ///
    /// # Errors
    /// [`ClusterError::WeakSecret`] when all bytes are equal, as in a buffer nobody filled.
    pub fn new(bytes: [u8; 32]) -> Result<Self, ClusterError> {
        if bytes.iter().all(|byte| *byte == bytes[0]) {
            return Err(ClusterError::WeakSecret);
        }
        Ok(Secret(bytes))
    }

    pub(crate) fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// Bounds in bytes, connections and time. The defaults are those of the design.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Most bytes that one side reads before the other has authenticated itself.
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
    /// Longest time to build the mesh of one generation.
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
            mesh_time: Duration::from_secs(30),
            grace: Duration::from_secs(5),
            staging_bytes: 256 << 20,
            spill_folders: Vec::new(),
        }
    }
}

impl Limits {
    /// The defaults for members that are given up when they are silent for so long: nothing waits longer for one of them.
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
            ..limits
        }
    }
}

/// One authenticated connection.
#[derive(Debug)]
pub struct Session {
    stream: TcpStream,
    frame_bytes: usize,
}

impl Session {
    /// Dials `address` and authenticates both ends. `context` is what the connection is for, as
    /// JSON; both proofs cover it. The server's own answer to it follows as a frame.
    ///
    /// A listener that serves as many handshakes as it may turns this one away. It is tried again then, after pauses
    /// that grow and differ between dials, for at most [`Limits::dial_time`].
    ///
    /// # Errors
    /// [`ClusterError::Address`], [`ClusterError::Io`] or [`ClusterError::Handshake`];
    /// [`ClusterError::TurnedAway`] when there was no room all the time.
    pub fn dial(
        address: &str,
        secret: &Secret,
        role: Role,
        context: &Value,
        limits: &Limits,
    ) -> Result<Self, ClusterError> {
        let began = Instant::now();
        let mut pause = PAUSES.0;
        for tries in 1.. {
            match Self::dial_once(address, secret, role, context, limits) {
                Err(ClusterError::Handshake(HandshakeError::Truncated)) => {}
                done => return done,
            }
            let waited = began.elapsed();
            if waited >= limits.dial_time {
                return Err(ClusterError::TurnedAway { address: address.to_owned(), tries, waited });
            }
            // Who was turned away together comes back one by one.
            let share = f64::from(handshake::nonce()?[0]) / 255.0;
            thread::sleep(pause.mul_f64(0.5 + 0.5 * share).min(limits.dial_time - waited));
            pause = (2 * pause).min(PAUSES.1);
        }
        unreachable!("the tries are not counted to their end")
    }

    fn dial_once(
        address: &str,
        secret: &Secret,
        role: Role,
        context: &Value,
        limits: &Limits,
    ) -> Result<Self, ClusterError> {
        let context = context.to_string();
        let (client, hello) = Client::hello(secret, role, context.as_bytes(), handshake::nonce()?);
        handshake::fits(&hello, limits)?;
        let mut stream = connect(address, limits.connect_time)?;
        let mut wire = handshake::Wire::new(&mut stream, limits);
        wire.send(&hello)?;
        let challenge = wire.receive()?;
        let proof = client.answer(&challenge)?;
        wire.send(&proof)?;
        Session::new(stream, limits)
    }

    /// Whether somebody listens at `host:port` that speaks as we do, whatever its secret. Waits at most `patience` for the connection, and as
    /// long for its first words.
    #[must_use]
    pub fn answers(address: &str, patience: Duration) -> bool {
        let limits = Limits { connect_time: patience, handshake_time: patience, ..Limits::default() };
        let ask = || -> Result<bool, ClusterError> {
            let secret = Secret::new(handshake::nonce()?)?;
            // A member it is not: the proof that is due then never comes.
            let (client, hello) = Client::hello(&secret, Role::Member, b"", handshake::nonce()?);
            let mut stream = connect(address, limits.connect_time)?;
            let mut wire = handshake::Wire::new(&mut stream, &limits);
            wire.send(&hello)?;
            let challenge = wire.receive()?;
            Ok(matches!(client.answer(&challenge), Err(HandshakeError::Proof)))
        };
        ask().unwrap_or(false)
    }

    /// Dials for a connection of a mesh and gives its socket away once the other end has answered, which it has `patience` to do.
    pub(crate) fn dial_mesh(
        address: &str,
        secret: &Secret,
        context: &Value,
        limits: &Limits,
        patience: Duration,
    ) -> Result<TcpStream, ClusterError> {
        let mut session = Self::dial(address, secret, Role::Mesh, context, limits)?;
        session.set_read_timeout(Some(patience))?;
        session.receive_answer()?;
        session.into_stream()
    }

    fn new(stream: TcpStream, limits: &Limits) -> Result<Self, ClusterError> {
        let set = || -> io::Result<()> {
            stream.set_nodelay(true)?;
            stream.set_read_timeout(None)?;
            stream.set_write_timeout(Some(limits.write_time))
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

    /// Sends the answer to the connection's purpose: `{"ok": true, ..}` or a failure.
    pub fn answer(&mut self, answer: &Result<Value, Failure>) -> Result<(), ClusterError> {
        match answer {
            Ok(body) => self.send_body(Kind::Answer, 0, &body.to_string(), &[]),
            Err(failure) => {
                let body = failure.to_body().to_string();
                self.send_body(Kind::Answer, 0, &body, &failure.attachment)
            }
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
                match Failure::from_body(&body.json, body.attachment) {
                    Some(failure) => Err(ClusterError::Refused(failure)),
                    None => Ok(body.json),
                }
            }
            Some(frame) => Err(ClusterError::Protocol(format!("{:?} instead of an answer", frame.kind))),
            None => Err(ClusterError::Closed("the peer closed without an answer".into())),
        }
    }

    /// Whether something, or the end, can be received without waiting.
    pub fn has_input(&self) -> Result<bool, ClusterError> {
        let look = || -> io::Result<bool> {
            self.stream.set_nonblocking(true)?;
            let seen = self.stream.peek(&mut [0]);
            self.stream.set_nonblocking(false)?;
            match seen {
                Ok(_) => Ok(true),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
                Err(error) => Err(error),
            }
        };
        look().map_err(ClusterError::io("look for input"))
    }

    /// From now on a read that gets nothing for this long fails; None waits for ever.
    pub fn set_read_timeout(&self, timeout: Option<Duration>) -> Result<(), ClusterError> {
        self.stream.set_read_timeout(timeout).map_err(ClusterError::io("prepare a socket"))
    }

    /// The local address of the connection.
    pub fn local_ip(&self) -> Result<IpAddr, ClusterError> {
        let address = self.stream.local_addr().map_err(ClusterError::io("name a socket"))?;
        Ok(address.ip())
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
            if left.is_zero() || self.stream.set_read_timeout(Some(left)).is_err() {
                return;
            }
            match io::Read::read(&mut &self.stream, &mut waste) {
                Ok(0) => return,
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    }

    /// Gives the socket away, without time limits: the mesh speaks its own frames.
    pub fn into_stream(self) -> Result<TcpStream, ClusterError> {
        let set = || -> io::Result<()> {
            self.stream.set_read_timeout(None)?;
            self.stream.set_write_timeout(None)
        };
        set().map_err(ClusterError::io("prepare a socket"))?;
        Ok(self.stream)
    }
}

fn connect(address: &str, patience: Duration) -> Result<TcpStream, ClusterError> {
    let candidates: Vec<SocketAddr> =
        address.to_socket_addrs().map_err(|_| ClusterError::Address { address: address.to_owned() })?.collect();
    let mut last = None;
    for candidate in candidates {
        match TcpStream::connect_timeout(&candidate, patience) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = Some(error),
        }
    }
    match last {
        Some(source) => Err(ClusterError::Io { doing: format!("connect to {address}"), source }),
        None => Err(ClusterError::Address { address: address.to_owned() }),
    }
}
