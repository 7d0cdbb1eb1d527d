//! Byte streams between processes.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};

#[cfg(unix)]
use std::os::unix::net::UnixStream;

/// Closes a stream from any thread: a blocked read or write on it ends.
pub type Hangup = Box<dyn Fn(Shutdown) + Send + Sync>;

/// A connected, authenticated byte stream between two processes.
pub trait Duplex: Send {
    /// A handle that closes the stream while its halves are in use.
    fn hangup(&self) -> io::Result<Hangup>;
    /// The reading and the writing half; both block.
    #[allow(clippy::type_complexity)]
    fn split(self: Box<Self>) -> io::Result<(Box<dyn Read + Send>, Box<dyn Write + Send>)>;
}

impl Duplex for TcpStream {
    fn hangup(&self) -> io::Result<Hangup> {
        let stream = self.try_clone()?;
        Ok(Box::new(move |how| drop(stream.shutdown(how))))
    }

    fn split(self: Box<Self>) -> io::Result<(Box<dyn Read + Send>, Box<dyn Write + Send>)> {
        self.set_nonblocking(false)?;
        self.set_read_timeout(None)?;
        self.set_write_timeout(None)?;
        self.set_nodelay(true)?;
        Ok((Box::new(self.try_clone()?), self))
    }
}

#[cfg(unix)]
impl Duplex for UnixStream {
    fn hangup(&self) -> io::Result<Hangup> {
        let stream = self.try_clone()?;
        Ok(Box::new(move |how| drop(stream.shutdown(how))))
    }

    fn split(self: Box<Self>) -> io::Result<(Box<dyn Read + Send>, Box<dyn Write + Send>)> {
        self.set_nonblocking(false)?;
        self.set_read_timeout(None)?;
        self.set_write_timeout(None)?;
        Ok((Box::new(self.try_clone()?), self))
    }
}
