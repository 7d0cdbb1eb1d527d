//! A connected, authenticated byte stream: a socket, or TLS on one.
//!
//! Handles share the connection, and one thread may read while another writes: the state of TLS is locked only while bytes are
//! encrypted or decrypted, never while the socket is waited for. The order of records is that of the writers, who hold the lock
//! of what goes out until the socket has it.
//!
//! The end of a socket is an end, whether TLS was told of it before or not: every protocol here says in a frame that it is
//! complete, so bytes that are cut off are never taken for all.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use penstock_dataflow::fabric::{Duplex, Hangup};
use rustls::Connection;

/// Bytes that are read from a socket at once.
const READ_BYTES: usize = 64 << 10;
/// Bytes that are encrypted at once.
const WRITE_BYTES: usize = 64 << 10;

/// One handle of a connection.
#[derive(Debug)]
pub struct Stream {
    socket: TcpStream,
    tls: Option<Arc<Tls>>,
}

struct Tls {
    connection: Mutex<Connection>,
    incoming: Mutex<Incoming>,
    /// Records that the socket has not taken.
    outgoing: Mutex<Vec<u8>>,
}

/// Bytes of the socket that were not decrypted yet.
#[derive(Default)]
struct Incoming {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tls(..)")
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic in between leaves a connection whose next record does not decrypt: an error, not a wrong byte.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn broken(error: rustls::Error) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, error)
}

impl Stream {
    /// A socket as it is.
    pub(super) fn plain(socket: TcpStream) -> Self {
        Stream { socket, tls: None }
    }

    /// A socket with a connection whose handshake is over.
    pub(super) fn secured(socket: TcpStream, connection: Connection) -> Self {
        let (incoming, outgoing) = Default::default();
        let tls = Tls { connection: Mutex::new(connection), incoming, outgoing };
        Stream { socket, tls: Some(Arc::new(tls)) }
    }

    /// Whether what goes over it is encrypted.
    #[must_use]
    pub fn is_encrypted(&self) -> bool {
        self.tls.is_some()
    }

    /// A second handle, for another thread.
    ///
    /// # Errors
    /// Those of the system.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Stream { socket: self.socket.try_clone()?, tls: self.tls.clone() })
    }

    /// Ends it for all handles: blocked reads and writes return.
    ///
    /// # Errors
    /// When it has ended already.
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        self.socket.shutdown(how)
    }

    /// The other end.
    ///
    /// # Errors
    /// When it is gone.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.socket.peer_addr()
    }

    pub(super) fn socket(&self) -> &TcpStream {
        &self.socket
    }

    /// Looks at who shows itself there; false without TLS.
    pub(super) fn shows(&self, is: impl FnOnce(&Connection) -> bool) -> bool {
        self.tls.as_ref().is_some_and(|tls| is(&locked(&tls.connection)))
    }

    /// Reads what there is, at least a byte, or the end: 0. The deadline is for all of it.
    pub(super) fn read_by(&self, into: &mut [u8], deadline: Option<Instant>) -> io::Result<usize> {
        let wait = || -> io::Result<()> {
            let Some(deadline) = deadline else { return Ok(()) };
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ErrorKind::TimedOut.into());
            }
            self.socket.set_read_timeout(Some(left))
        };
        let Some(tls) = &self.tls else {
            wait()?;
            return (&self.socket).read(into);
        };
        let mut incoming = locked(&tls.incoming);
        loop {
            if let Some(read) = tls.decrypted(&mut incoming, into)? {
                return Ok(read);
            }
            wait()?;
            if !incoming.receive(&self.socket)? {
                return Ok(0);
            }
        }
    }

    /// Whether a read would return at once.
    pub(super) fn has_input(&self) -> io::Result<bool> {
        let Some(tls) = &self.tls else {
            return Ok(self.without_waiting(|socket| socket.peek(&mut [0]))?.is_some());
        };
        let mut incoming = locked(&tls.incoming);
        loop {
            // Records that carry nothing for us are no input.
            if tls.decrypt(&mut incoming)? {
                return Ok(true);
            }
            match self.without_waiting(|socket| incoming.receive(socket))? {
                None => return Ok(false),
                Some(false) => return Ok(true), // the end
                Some(true) => {}
            }
        }
    }

    fn without_waiting<T>(&self, look: impl FnOnce(&TcpStream) -> io::Result<T>) -> io::Result<Option<T>> {
        self.socket.set_nonblocking(true)?;
        let seen = look(&self.socket);
        self.socket.set_nonblocking(false)?;
        match seen {
            Ok(seen) => Ok(Some(seen)),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl Incoming {
    /// Takes what the socket has; false at its end. Nothing is left from before.
    fn receive(&mut self, mut socket: &TcpStream) -> io::Result<bool> {
        self.bytes.resize(READ_BYTES, 0);
        (self.start, self.end) = (0, socket.read(&mut self.bytes)?);
        Ok(self.end > 0)
    }
}

impl Tls {
    /// Decrypts until there is something to read; true when there is. At most one round of what rustls buffers is decrypted.
    fn decrypt(&self, incoming: &mut Incoming) -> io::Result<bool> {
        self.advance(&mut locked(&self.connection), incoming)
    }

    fn advance(&self, connection: &mut Connection, incoming: &mut Incoming) -> io::Result<bool> {
        loop {
            let state = connection.process_new_packets().map_err(broken)?;
            if state.plaintext_bytes_to_read() > 0 || state.peer_has_closed() {
                return Ok(true);
            }
            if incoming.start == incoming.end {
                return Ok(false);
            }
            let mut rest = &incoming.bytes[incoming.start..incoming.end];
            incoming.start += connection.read_tls(&mut rest)?;
        }
    }

    /// Reads what is decrypted, or can be without the socket; None when that is nothing.
    fn decrypted(&self, incoming: &mut Incoming, into: &mut [u8]) -> io::Result<Option<usize>> {
        let mut connection = locked(&self.connection);
        let mut filled = 0;
        while filled < into.len() && self.advance(&mut connection, incoming)? {
            match connection.reader().read(&mut into[filled..]) {
                Ok(0) => return Ok(Some(filled)),
                Ok(read) => filled += read,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        Ok((filled > 0 || into.is_empty()).then_some(filled))
    }

    fn write(&self, mut socket: &TcpStream, bytes: &[u8]) -> io::Result<usize> {
        let mut outgoing = locked(&self.outgoing);
        // What a write before this one could not send goes first.
        send(&mut socket, &mut outgoing)?;
        let taken = {
            let mut connection = locked(&self.connection);
            let taken = connection.writer().write(&bytes[..bytes.len().min(WRITE_BYTES)])?;
            while connection.wants_write() {
                connection.write_tls(&mut *outgoing)?;
            }
            taken
        };
        send(&mut socket, &mut outgoing)?;
        Ok(taken)
    }
}

fn send(socket: &mut &TcpStream, outgoing: &mut Vec<u8>) -> io::Result<()> {
    let mut sent = 0;
    while sent < outgoing.len() {
        match socket.write(&outgoing[sent..]) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(taken) => sent += taken,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => {
                outgoing.drain(..sent);
                return Err(error);
            }
        }
    }
    outgoing.clear();
    Ok(())
}

impl Read for &Stream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.read_by(into, None)
    }
}

impl Write for &Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &self.tls {
            None => (&self.socket).write(bytes),
            Some(tls) => tls.write(&self.socket, bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Read for Stream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        (&*self).read(into)
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        (&*self).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Duplex for Stream {
    fn hangup(&self) -> io::Result<Hangup> {
        self.socket.hangup()
    }

    fn split(self: Box<Self>) -> io::Result<(Box<dyn Read + Send>, Box<dyn Write + Send>)> {
        self.socket.set_nonblocking(false)?;
        self.socket.set_read_timeout(None::<Duration>)?;
        self.socket.set_write_timeout(None::<Duration>)?;
        self.socket.set_nodelay(true)?;
        if self.tls.is_none() {
            // Nothing between the workers and the socket.
            return Box::new(self.socket).split();
        }
        Ok((Box::new(self.try_clone()?), self))
    }
}
