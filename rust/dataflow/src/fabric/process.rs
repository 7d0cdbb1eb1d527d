//! A fabric over several processes: one sending and one receiving thread per connection, and one that watches.
//!
//! Leaving: the guard queues a goodbye behind all that waits, and closes the writing half. Who receives a goodbye stops
//! sending to that process and closes its own writing half at once, so leaving takes one round trip however busy the others
//! are; only a hung process costs the linger time, after which the stream is cut. A stream that ends without a goodbye, or
//! carries a frame that is none, aborts all workers of this process, and through them the others. One more thread watches
//! for processes that are connected but hung: see [`super::watch`].

use std::io::{BufReader, Read};
use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::frame::{self, Header, Kind, ReadError};
use super::limits::Limits;
use super::link::Outbox;
use super::stream::{Duplex, Hangup};
use super::verdict::Cause;
use super::watch::{Ear, Heard, Stop, Watched, watch};
use super::{Endpoint, Envelope, Mailbox, Payload, Progress, Route, Shared, mailbox, seats};
use crate::error::{Error, ProtocolFault, Report};
use crate::wire::decode_serde;

/// How long leaving waits for a process that does not answer.
const LINGER: Duration = Duration::from_secs(5);

/// Which run of which query the frames of a fabric belong to; frames of another are refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FabricTag {
    /// The query.
    pub query: u64,
    /// The generation of its group of processes.
    pub generation: u64,
}

/// Counts running threads, so that leaving can wait for them with a limit.
#[derive(Default)]
struct Running {
    count: Mutex<usize>,
    ended: Condvar,
}

struct RunningMark(Arc<Running>);

impl Running {
    fn mark(self: &Arc<Self>) -> RunningMark {
        *self.count.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) += 1;
        RunningMark(self.clone())
    }

    fn wait(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        let mut count = self.count.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        while *count > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            count = self.ended.wait_timeout(count, left).unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
        true
    }
}

impl Drop for RunningMark {
    fn drop(&mut self) {
        *self.0.count.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) -= 1;
        self.0.ended.notify_all();
    }
}

/// Owns the threads of a fabric over processes. Dropping it leaves the fabric and ends them; it is to be dropped after the
/// workers of this process. Leaving with an unfinished dataflow, or before all workers were made, aborts the other processes.
#[must_use = "dropping the guard leaves the fabric"]
pub struct FabricGuard {
    shared: Arc<Shared>,
    links: Vec<(Arc<Outbox>, Arc<Hangup>)>,
    leaving: Arc<AtomicBool>,
    running: Arc<Running>,
    stop: Arc<Stop>,
    threads: Vec<JoinHandle<()>>,
}

impl FabricGuard {
    /// Stops the fabric from outside, for example for a rollback: every worker of it, here and elsewhere, reports `error`.
    pub fn abort(&self, error: Error) {
        self.shared.abort(error);
    }
}

impl std::fmt::Debug for FabricGuard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FabricGuard").field("links", &self.links.len()).finish()
    }
}

impl Drop for FabricGuard {
    fn drop(&mut self) {
        self.leaving.store(true, Ordering::Release);
        self.stop.stop();
        let unfinished = if self.shared.vacant.load(Ordering::Acquire) > 0 {
            Some("its process left before its workers were made")
        } else if self.shared.live.load(Ordering::Acquire) > 0 {
            Some("its process left with unfinished dataflows")
        } else {
            None
        };
        if let Some(reason) = unfinished {
            self.shared.abort(Error::Aborted { worker: self.shared.first_local, reason: reason.to_string() });
        }
        for (outbox, _) in &self.links {
            outbox.close();
        }
        if !self.running.wait(LINGER) {
            for (_, hangup) in &self.links {
                hangup(Shutdown::Both);
            }
        }
        for thread in self.threads.drain(..) {
            // A panic there has been reported by the panic hook; a drop cannot do more.
            drop(thread.join());
        }
    }
}

/// Seats for the workers of this process in a fabric of `streams.len()` processes with `threads` workers each.
///
/// `streams[i]` is a connected and authenticated stream to process `i`, `None` for this one. Worker `t` of process `p` has index
/// `p * threads + t`. Starts two threads per stream, and one.
///
/// # Errors
/// [`Error::Setup`] when the shape is wrong, or a stream or thread cannot be set up.
pub fn processes(
    process: usize,
    threads: usize,
    streams: Vec<Option<Box<dyn Duplex>>>,
    tag: FabricTag,
) -> Result<(Vec<Endpoint>, FabricGuard), Error> {
    processes_with(process, threads, streams, tag, Limits::default())
}

/// As [`processes`], with other limits than the usual.
///
/// # Errors
/// As [`processes`]; also when a limit makes no sense.
pub fn processes_with(
    process: usize,
    threads: usize,
    streams: Vec<Option<Box<dyn Duplex>>>,
    tag: FabricTag,
    limits: Limits,
) -> Result<(Vec<Endpoint>, FabricGuard), Error> {
    limits.check()?;
    let setup = |reason: String| Error::Setup { reason };
    let count = streams.len();
    if threads == 0 || process >= count {
        return Err(setup(format!("process {process} of {count} with {threads} workers")));
    }
    if let Some(wrong) = (0..count).find(|other| (*other == process) != streams[*other].is_none()) {
        return Err(setup(format!("process {process} needs a stream to each other process: see the one to {wrong}")));
    }
    let (boxes, parkers): (Vec<_>, Vec<_>) = (0..threads).map(|_| mailbox()).unzip();
    let outboxes: Vec<Arc<Outbox>> =
        (0..count).map(|other| Arc::new(Outbox::new(other, tag, limits.link_bytes))).collect();
    let routes = (0..count * threads)
        .map(|worker| match worker / threads {
            home if home == process => Route::Local(boxes[worker % threads].clone()),
            other => Route::Remote(outboxes[other].clone()),
        })
        .collect();
    let links = outboxes.iter().enumerate().filter(|(other, _)| *other != process);
    let links = links.map(|(_, outbox)| outbox.clone()).collect();
    let shared = Arc::new(Shared::new(routes, links, process, process * threads, None));
    let mut watched = Vec::new();
    let mut guard = FabricGuard {
        shared: shared.clone(),
        links: Vec::new(),
        leaving: Arc::new(AtomicBool::new(false)),
        running: Arc::new(Running::default()),
        stop: Arc::new(Stop::default()),
        threads: Vec::new(),
    };
    for (other, stream) in streams.into_iter().enumerate() {
        let Some(stream) = stream else { continue };
        let failed = |error: std::io::Error| setup(format!("stream to process {other}: {error}"));
        let hangup = Arc::new(stream.hangup().map_err(failed)?);
        let (reader, writer) = stream.split().map_err(failed)?;
        let outbox = outboxes[other].clone();
        guard.links.push((outbox.clone(), hangup.clone()));
        let ear = Arc::new(Ear::new());
        let reader = Box::new(Heard { stream: reader, ear: ear.clone() });
        watched.push(Watched::new(outbox.clone(), hangup.clone(), ear));

        let (mark, sender_shared, sender_hangup) = (guard.running.mark(), shared.clone(), hangup.clone());
        let sender_outbox = outbox.clone();
        let sender = std::thread::Builder::new()
            .name(format!("penstock-send-{other}"))
            .spawn(move || {
                let _mark = mark;
                if let Err(error) = sender_outbox.run(writer, &**sender_hangup) {
                    sender_shared.abort(Error::PeerLost { process: other, reason: error.to_string() });
                }
            })
            .map_err(failed)?;
        guard.threads.push(sender);

        let inbound = Inbound { process: other, threads, first: process * threads, boxes: boxes.clone(), outbox, tag };
        let (mark, shared, leaving) = (guard.running.mark(), shared.clone(), guard.leaving.clone());
        let receiver = std::thread::Builder::new()
            .name(format!("penstock-receive-{other}"))
            .spawn(move || {
                let _mark = mark;
                if let Err(error) = inbound.run(reader, &shared)
                    && !leaving.load(Ordering::Acquire)
                {
                    shared.abort(error);
                }
                shared.verdict.ended(other);
                // Nothing that still comes on this stream is of use: let a blocked sender on either side end.
                hangup(Shutdown::Read);
            })
            .map_err(failed)?;
        guard.threads.push(receiver);
    }
    if !watched.is_empty() {
        let (shared, stop) = (shared.clone(), guard.stop.clone());
        let watcher = std::thread::Builder::new()
            .name("penstock-watch".to_string())
            .spawn(move || watch(watched, limits, &shared, &stop))
            .map_err(|error| setup(error.to_string()))?;
        guard.threads.push(watcher);
    }
    Ok((seats(shared, boxes, parkers), guard))
}

/// The receiving side of one connection.
struct Inbound {
    process: usize,
    threads: usize,
    first: usize,
    boxes: Vec<Arc<Mailbox>>,
    outbox: Arc<Outbox>,
    tag: FabricTag,
}

impl Inbound {
    /// Reads until the stream ends. `Ok` only after a goodbye.
    fn run(&self, stream: Box<dyn Read + Send>, shared: &Shared) -> Result<(), Error> {
        let mut stream = BufReader::with_capacity(64 * 1024, stream);
        let mut goodbye = false;
        loop {
            let (header, body) = match frame::read(&mut stream, self.tag) {
                Ok(frame) => frame,
                Err(_) if goodbye => return Ok(()),
                Err(ReadError::End) => return Err(self.lost("closed the connection without a goodbye".to_string())),
                Err(ReadError::Io(error)) => return Err(self.lost(error.to_string())),
                Err(ReadError::Fault(fault)) => return Err(self.broken(fault)),
            };
            match header.kind {
                Kind::Data => self.deliver(header, Payload::Bytes(body))?,
                Kind::Behind => self.deliver(header, Payload::Behind(body))?,
                Kind::Progress => self.deliver(header, Payload::Progress(Progress::Bytes(body)))?,
                Kind::Beat => {}
                Kind::Credit => match self.outbox.credit(self.number(&body)?) {
                    Some(true) => shared.wake_all(),
                    Some(false) => {}
                    None => return Err(self.broken(ProtocolFault::Body(0))),
                },
                Kind::Leave => {
                    self.check_sender(&header)?;
                    shared.leave(header.from, self.number(&body)?);
                }
                Kind::Abort => {
                    let (origin, report): (usize, Report) =
                        decode_serde(&body).map_err(|_| self.broken(ProtocolFault::Body(0)))?;
                    shared.stop(Some(self.process), Cause { origin, error: report.into_error() });
                }
                Kind::Goodbye => {
                    goodbye = true;
                    self.outbox.depart();
                    shared.verdict.ended(self.process);
                    shared.wake_all();
                }
            }
        }
    }

    fn check_sender(&self, header: &Header) -> Result<(), Error> {
        if header.from / self.threads == self.process {
            return Ok(());
        }
        Err(self.broken(ProtocolFault::Sender(header.from)))
    }

    /// The body of a frame that carries one number.
    fn number(&self, body: &[u8]) -> Result<u64, Error> {
        let bytes = body.try_into().map_err(|_| self.broken(ProtocolFault::Body(0)))?;
        Ok(u64::from_le_bytes(bytes))
    }

    fn deliver(&self, header: Header, payload: Payload) -> Result<(), Error> {
        self.check_sender(&header)?;
        let mailbox = header.to.checked_sub(self.first).and_then(|thread| self.boxes.get(thread));
        let Some(mailbox) = mailbox else { return Err(self.broken(ProtocolFault::Receiver(header.to))) };
        mailbox.push(Envelope { channel: header.channel, from: header.from, payload });
        Ok(())
    }

    fn lost(&self, reason: String) -> Error {
        Error::PeerLost { process: self.process, reason }
    }

    fn broken(&self, fault: ProtocolFault) -> Error {
        Error::Protocol { process: self.outbox.process(), fault }
    }
}
