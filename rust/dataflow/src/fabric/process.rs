//! A fabric over several processes: one sending and one receiving thread per connection, and one that watches.
//!
//! A joinable one has connections that come later ([`Door::link`]). There a connection that ends is the end of the run only to those for whom its process
//! takes part: each worker is told and knows what it is to it; else all are aborted, as follows.
//!
//! Leaving: the guard queues a goodbye behind all that waits, and closes the writing half. Who receives a goodbye stops
//! sending to that process and closes its own writing half at once, so leaving takes as long as the others need to read what waits for
//! them, and one round trip, however busy their workers are. The stream to one that says nothing for [`Limits::silence`] is cut; when none takes
//! anything for [`Limits::stall`], or for the linger time in a fabric that has stopped, all are. Only a hung process costs that, and
//! [`FabricGuard::leave`] tells which. A stream that ends without a goodbye, or carries a frame that is none, aborts all workers of this process,
//! and through them the others. One more thread watches for processes that are connected but hung, until this one leaves: see [`super::watch`].

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io::{BufReader, Read};
use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use penstock_members::Message;
use penstock_members::list::MAX_MEMBERS;

use super::door::{Ask, Door, Hall};
use super::frame::{self, Frame, Header, Kind, ReadError};
use super::lanes::Phase;
use super::limits::Limits;
use super::link::Outbox;
use super::stream::{Duplex, Hangup};
use super::verdict::Cause;
use super::watch::{Ear, Heard, Stop, Watched, suspended, watch};
use super::{Endpoint, Envelope, Mailbox, MemberLane, Payload, Progress, Route, Routes, Shared, mailbox, seats};
use crate::error::{Error, ProtocolFault, Report};
use crate::membership::Told;
use crate::wire::decode_serde;

/// How long leaving waits at least for processes that take nothing and do not answer; no longer where the fabric has stopped.
const LINGER: Duration = Duration::from_secs(5);

/// How often leaving looks whether they take something.
const LOOK: Duration = Duration::from_millis(100);

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

/// What serves one connection.
struct Link {
    process: usize,
    /// Holds the socket open.
    hangup: Arc<Hangup>,
    ear: Arc<Ear>,
    threads: Vec<JoinHandle<()>>,
}

impl Link {
    fn has_ended(&self) -> bool {
        self.threads.iter().all(JoinHandle::is_finished)
    }
}

/// The links of a process and their threads.
pub(super) struct Hub {
    pub(super) shared: Arc<Shared>,
    tag: FabricTag,
    limits: Limits,
    /// Those whose threads have not ended, and some that ended since the last one was started. None once it has left.
    links: Mutex<Vec<Link>>,
    watcher: Mutex<Option<JoinHandle<()>>>,
    leaving: Arc<AtomicBool>,
    running: Arc<Running>,
    stop: Arc<Stop>,
}

fn locked<X>(mutex: &Mutex<X>) -> MutexGuard<'_, X> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn setup(reason: String) -> Error {
    Error::Setup { reason }
}

fn left(other: usize) -> Error {
    setup(format!("process {other} joins, and this process has left the fabric"))
}

impl Hub {
    fn new(shared: Arc<Shared>, tag: FabricTag, limits: Limits) -> Self {
        Hub {
            shared,
            tag,
            limits,
            links: Mutex::default(),
            watcher: Mutex::default(),
            leaving: Arc::new(AtomicBool::new(false)),
            running: Arc::new(Running::default()),
            stop: Arc::new(Stop::default()),
        }
    }

    /// Starts the threads of a link whose outbox the fabric knows.
    fn start(&self, outbox: &Arc<Outbox>, stream: Box<dyn Duplex>) -> Result<(), Error> {
        let other = outbox.process();
        let failed = |error: std::io::Error| setup(format!("stream to process {other}: {error}"));
        let hangup = Arc::new(stream.hangup().map_err(failed)?);
        let (reader, writer) = stream.split().map_err(failed)?;
        let mut links = locked(&self.links);
        if self.leaving.load(Ordering::Acquire) {
            return Err(left(other));
        }
        links.retain(|link| !link.has_ended());
        let at = links.len();
        let ear = Arc::new(Ear::new());
        links.push(Link { process: other, hangup: hangup.clone(), ear: ear.clone(), threads: Vec::new() });
        let reader = Box::new(Heard { stream: reader, ear: ear.clone() });
        self.stop.add(Watched::new(outbox.clone(), &hangup, ear));

        let broken: Arc<OnceLock<String>> = Arc::default();
        let (mark, sender_hangup, sender_broken) = (self.running.mark(), hangup.clone(), broken.clone());
        let sender_outbox = outbox.clone();
        let sender = std::thread::Builder::new()
            .name(format!("penstock-send-{other}"))
            .spawn(move || {
                let _mark = mark;
                if let Err(error) = sender_outbox.run(writer, &**sender_hangup) {
                    // What has come and is not read yet may end in a goodbye, and counts in any case: who reads it tells of the end.
                    let _ = sender_broken.set(error.to_string());
                    sender_hangup(Shutdown::Read);
                }
            })
            .map_err(failed)?;
        links[at].threads.push(sender);
        let inbound = self.inbound(outbox);
        let (mark, leaving) = (self.running.mark(), self.leaving.clone());
        let receiver = std::thread::Builder::new()
            .name(format!("penstock-receive-{other}"))
            .spawn(move || {
                let _mark = mark;
                let result = inbound.run(reader);
                let failed = result.is_err();
                if let Err(error) = result
                    && !leaving.load(Ordering::Acquire)
                {
                    let reason = broken.get().filter(|_| matches!(error, Error::PeerLost { .. }));
                    let told = reason.map(|reason| inbound.lost(reason.clone()));
                    inbound.shared.link_lost(other, told.unwrap_or(error));
                }
                inbound.shared.verdict.ended(other);
                // Nothing that still comes on this stream is of use: let a blocked sender of the other side end. Ours, if it is blocked, ends by
                // the other half; where this link ends the run it has the cause to tell before, and the watcher sees to it.
                let gone = failed && inbound.outbox.is_departed();
                hangup(if gone { Shutdown::Both } else { Shutdown::Read });
            })
            .map_err(failed)?;
        links[at].threads.push(receiver);
        Ok(())
    }

    fn watch(&self) -> Result<(), Error> {
        let (shared, stop, limits) = (self.shared.clone(), self.stop.clone(), self.limits);
        let watcher = std::thread::Builder::new()
            .name("penstock-watch".to_string())
            .spawn(move || watch(limits, &shared, &stop))
            .map_err(|error| setup(error.to_string()))?;
        *locked(&self.watcher) = Some(watcher);
        Ok(())
    }

    fn inbound(&self, outbox: &Arc<Outbox>) -> Inbound {
        let routes = RefCell::new(self.shared.routes());
        let (process, tag, shared) = (outbox.process(), self.tag, self.shared.clone());
        Inbound { process, outbox: outbox.clone(), tag, shared, routes, goodbye: Cell::new(false) }
    }

    /// One more process.
    fn meet(&self, process: usize) -> Result<Arc<Outbox>, Error> {
        if self.leaving.load(Ordering::Acquire) {
            return Err(left(process));
        }
        let mut links = locked(&self.shared.links);
        if process == self.shared.process || links.iter().any(|outbox| outbox.process() == process) {
            let reason = "numbers of processes are never used again; give it one that is greater than all before";
            return Err(setup(format!("there is, or was, a process {process}: {reason}")));
        }
        let outbox = Arc::new(Outbox::new(process, self.tag, self.limits.link_bytes));
        Arc::make_mut(&mut links).push(outbox.clone());
        drop(links);
        self.shared.verdict.begin(process);
        Ok(outbox)
    }

    /// See [`Door::link`].
    pub(super) fn link(&self, process: usize, stream: Box<dyn Duplex>) -> Result<(), Error> {
        let outbox = self.meet(process)?;
        if let Err(error) = self.start(&outbox, stream) {
            self.shared.link_lost(process, error.clone());
            return Err(error);
        }
        self.shared.greet(&outbox);
        Ok(())
    }

    /// See [`Door::wire`].
    pub(super) fn wire(&self, process: usize) -> Result<Wire, Error> {
        let known = self.shared.links().iter().find(|outbox| outbox.process() == process).cloned();
        let outbox = known.map_or_else(|| self.meet(process), Ok)?;
        self.shared.greet(&outbox);
        let inbound = self.inbound(&outbox);
        Ok(Wire { inbound, stream: RefCell::default(), ended: Cell::new(false) })
    }

    /// Waits until all links have ended, and cuts off those that say nothing; false when the others have taken nothing for too long.
    fn part(&self, links: &[Link], tell: &mut dyn FnMut(&str)) -> bool {
        let outboxes = self.shared.links();
        let taken = || outboxes.iter().map(|outbox| outbox.accepted()).sum::<u64>();
        let Limits { silence, stall, .. } = self.limits;
        let (began, mut told) = (Instant::now(), false);
        let (mut last, mut since, mut looked) = (taken(), began, began);
        let mut waited: Vec<&Link> = links.iter().collect();
        while !self.running.wait(LOOK) {
            let (now, here) = (Instant::now(), taken());
            waited.retain(|link| !link.has_ended());
            // As for who watches: this process was stopped itself, and nobody else is to blame.
            if suspended(now.duration_since(looked), LOOK, &self.limits) {
                waited.iter().for_each(|link| link.ear.hear());
                since = now;
            }
            looked = now;
            if here != last {
                (last, since) = (here, now);
            }
            if !told && now.duration_since(began) >= LINGER.min(silence / 2) {
                told = true;
                for link in &waited {
                    let silent = link.ear.silent().as_secs_f64();
                    tell(&format!(
                        "leaving waits for process {}, which has said nothing for {silent:.1} s",
                        link.process
                    ));
                }
            }
            waited.retain(|link| {
                let silent = link.ear.silent();
                if silent < silence {
                    return true;
                }
                let (process, seconds) = (link.process, silent.as_secs_f64());
                tell(&format!(
                    "leaving waits no longer for process {process}: nothing was heard from it for {seconds:.1} s"
                ));
                (link.hangup)(Shutdown::Both);
                false
            });
            // What waits is of use to nobody in a fabric that has stopped.
            let limit = if self.shared.is_aborted() { LINGER } else { LINGER.max(stall) };
            if since.elapsed() >= limit {
                for link in &waited {
                    let (process, seconds) = (link.process, since.elapsed().as_secs_f64());
                    tell(&format!(
                        "leaving waits no longer for process {process}: nothing was taken for {seconds:.1} s"
                    ));
                }
                return false;
            }
        }
        true
    }

    fn leave(&self, tell: &mut dyn FnMut(&str)) {
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
            let worker = self.shared.first_local.load(Ordering::Acquire);
            self.shared.abort(Error::Aborted { worker, reason: reason.to_string() });
        }
        self.shared.links().iter().for_each(|outbox| outbox.close());
        // None comes after these, and who keeps the door keeps no socket.
        let links = std::mem::take(&mut *locked(&self.links));
        if !self.part(&links, tell) {
            links.iter().for_each(|link| (link.hangup)(Shutdown::Both));
        }
        let watcher = locked(&self.watcher).take();
        for thread in links.into_iter().flat_map(|link| link.threads).chain(watcher) {
            // A panic there has been reported by the panic hook; a drop cannot do more.
            drop(thread.join());
        }
    }
}

/// Owns the threads of a fabric over processes. Dropping it leaves the fabric and ends them; it is to be dropped after the
/// workers of this process. Leaving with an unfinished dataflow, or before all workers were made, aborts the other processes.
#[must_use = "dropping the guard leaves the fabric"]
pub struct FabricGuard {
    hub: Arc<Hub>,
}

impl FabricGuard {
    /// Stops the fabric from outside, for example for a rollback: every worker of it, here and elsewhere, reports `error`.
    pub fn abort(&self, error: Error) {
        self.hub.shared.abort(error);
    }

    /// Leaves as a drop does, and tells which processes that waits for, when it lasts, and which it has given up: those hang.
    pub fn leave(self, mut tell: impl FnMut(&str)) {
        self.hub.leave(&mut tell);
    }
}

impl std::fmt::Debug for FabricGuard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FabricGuard").field("links", &self.hub.shared.links().len()).finish()
    }
}

impl Drop for FabricGuard {
    fn drop(&mut self) {
        self.hub.leave(&mut |_| ());
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
    found(process, threads, streams, tag, limits, None)
}

/// As [`processes`], for a run that workers may join and leave: threads of these processes, and other processes, which come with
/// [`Door::link`] here and [`join_processes`] there. Every worker calls [`Worker::bootstrap`](crate::Worker::bootstrap) when all of its dataflows are
/// built.
///
/// # Errors
/// As [`processes`].
pub fn joinable_processes(
    process: usize,
    threads: usize,
    streams: Vec<Option<Box<dyn Duplex>>>,
    tag: FabricTag,
) -> Result<(Vec<Endpoint>, Door, FabricGuard), Error> {
    joinable_processes_with(process, threads, streams, tag, Limits::default())
}

/// As [`joinable_processes`], with other limits than the usual.
///
/// # Errors
/// As [`processes_with`].
pub fn joinable_processes_with(
    process: usize,
    threads: usize,
    streams: Vec<Option<Box<dyn Duplex>>>,
    tag: FabricTag,
    limits: Limits,
) -> Result<(Vec<Endpoint>, Door, FabricGuard), Error> {
    let (seats, guard) = found(process, threads, streams, tag, limits, Some(Hall::new(None)))?;
    Ok((seats, Door::of(&guard.hub), guard))
}

/// A process that joins a run which [`joinable_processes`] began. `streams`, by process, are connected and authenticated: to every process of
/// the run, and to every one that joins it with a lower number. Each of those is given its end by [`Door::link`]; this process, those of
/// processes with greater numbers that join later. Ask at the door for its workers.
///
/// Until a worker of it is a full member it stops nobody.
///
/// # Errors
/// [`Error::Setup`] when there are no streams, two are to one process, or a stream or thread cannot be set up.
pub fn join_processes(
    process: usize,
    streams: Vec<(usize, Box<dyn Duplex>)>,
    tag: FabricTag,
    limits: Limits,
) -> Result<(Door, FabricGuard), Error> {
    limits.check()?;
    if streams.is_empty() {
        return Err(setup(format!("process {process} joins with no stream to any process of the run")));
    }
    let shared = Arc::new(Shared::new(Vec::new(), Vec::new(), process, 0, Some(Hall::new(None))));
    let guard = FabricGuard { hub: Arc::new(Hub::new(shared, tag, limits)) };
    let outboxes: Vec<_> = streams.iter().map(|(other, _)| guard.hub.meet(*other)).collect::<Result<_, _>>()?;
    for (outbox, (_, stream)) in outboxes.iter().zip(streams) {
        guard.hub.start(outbox, stream)?;
    }
    outboxes.iter().for_each(|outbox| guard.hub.shared.greet(outbox));
    guard.hub.watch()?;
    Ok((Door::of(&guard.hub), guard))
}

/// The same for a simulation, in which somebody moves the frames between wires ([`Door::wire`]): founders of `processes` processes with `threads`
/// workers each, or with 0 a process that joins.
#[doc(hidden)]
pub fn simulated_process(
    process: usize,
    processes: usize,
    threads: usize,
    tag: FabricTag,
    seed: u64,
) -> Result<(Vec<Endpoint>, Door, FabricGuard), Error> {
    let hall = Some(Hall::new(Some(seed)));
    let limits = Limits::default();
    let (seats, hub) = if processes > 0 {
        let (seats, hub, _) = place(process, processes, threads, tag, limits, hall)?;
        (seats, hub)
    } else {
        let shared = Arc::new(Shared::new(Vec::new(), Vec::new(), process, 0, hall));
        (Vec::new(), Arc::new(Hub::new(shared, tag, limits)))
    };
    let seats = seats.into_iter().map(Endpoint::shaken).collect();
    Ok((seats, Door::of(&hub), FabricGuard { hub }))
}

type Place = (Vec<Endpoint>, Arc<Hub>, Vec<Arc<Outbox>>);

fn found(
    process: usize,
    threads: usize,
    streams: Vec<Option<Box<dyn Duplex>>>,
    tag: FabricTag,
    limits: Limits,
    hall: Option<Hall>,
) -> Result<(Vec<Endpoint>, FabricGuard), Error> {
    limits.check()?;
    let count = streams.len();
    if threads == 0 || process >= count {
        return Err(setup(format!("process {process} of {count} with {threads} workers")));
    }
    if let Some(wrong) = (0..count).find(|other| (*other == process) != streams[*other].is_none()) {
        return Err(setup(format!("process {process} needs a stream to each other process: see the one to {wrong}")));
    }
    let joinable = hall.is_some();
    if joinable && count.checked_mul(threads).is_none_or(|founders| founders > MAX_MEMBERS) {
        return Err(setup(format!(
            "{count} processes with {threads} workers each; a run that others join has at most {MAX_MEMBERS}"
        )));
    }
    let (seats, hub, outboxes) = place(process, count, threads, tag, limits, hall)?;
    // Leaves what was set up, should the rest fail.
    let guard = FabricGuard { hub };
    for (outbox, stream) in outboxes.iter().zip(streams) {
        let Some(stream) = stream else { continue };
        guard.hub.start(outbox, stream)?;
        if joinable {
            guard.hub.shared.greet(outbox);
        }
    }
    if joinable || count > 1 {
        guard.hub.watch()?;
    }
    Ok((seats, guard))
}

fn place(
    process: usize,
    count: usize,
    threads: usize,
    tag: FabricTag,
    limits: Limits,
    hall: Option<Hall>,
) -> Result<Place, Error> {
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
    let shared = Arc::new(Shared::new(routes, links, process, process * threads, hall));
    let hub = Arc::new(Hub::new(shared.clone(), tag, limits));
    Ok((seats(&shared, boxes, parkers), hub, outboxes))
}

/// The receiving side of one connection.
struct Inbound {
    process: usize,
    outbox: Arc<Outbox>,
    tag: FabricTag,
    shared: Arc<Shared>,
    /// The table that was used last.
    routes: RefCell<Routes>,
    goodbye: Cell<bool>,
}

impl Inbound {
    /// Reads until the stream ends. `Ok` only after a goodbye.
    fn run(&self, stream: Box<dyn Read + Send>) -> Result<(), Error> {
        let mut stream = BufReader::with_capacity(64 * 1024, stream);
        loop {
            let (header, body) = match frame::read(&mut stream, self.tag) {
                Ok(frame) => frame,
                Err(_) if self.goodbye.get() => return Ok(()),
                Err(ReadError::End) => return Err(self.lost("closed the connection without a goodbye".to_string())),
                Err(ReadError::Io(error)) => return Err(self.lost(error.to_string())),
                Err(ReadError::Fault(fault)) => return Err(self.broken(fault)),
            };
            self.accept(header, body)?;
        }
    }

    /// Takes one frame.
    fn accept(&self, header: Header, body: Vec<u8>) -> Result<(), Error> {
        let shared = &self.shared;
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
                let (origin, report): (usize, Report) = self.decoded(&body)?;
                shared.stop(Some(self.process), Cause { origin, error: report.into_error() });
            }
            Kind::Goodbye => {
                self.goodbye.set(true);
                self.outbox.depart();
                shared.verdict.ended(self.process);
                shared.cut(self.process, None);
                shared.wake_all();
            }
            kind if shared.hall.is_none() => return Err(self.broken(ProtocolFault::Kind(kind as u8))),
            Kind::Member => {
                let lane = match header.channel {
                    0 => MemberLane::Urgent,
                    1 => MemberLane::Data,
                    2 => MemberLane::Behind,
                    _ => return Err(self.broken(ProtocolFault::Body(header.channel))),
                };
                self.deliver(header, Payload::MemberBytes(lane, body))?;
            }
            Kind::GivenUp => self.deliver(header, Payload::Lost)?,
            Kind::Ask => {
                let ask: Ask = self.decoded(&body)?;
                self.workers(ask.count as u64, 1)?;
                shared.asked(self.process, ask);
            }
            Kind::Welcome => shared.welcomed(self.process, self.workers(self.number(&body)?, 0)?),
            Kind::Over => shared.end(),
            Kind::Crowded => shared.crowded(self.number(&body)?),
        }
        Ok(())
    }

    fn decoded<X: serde::de::DeserializeOwned>(&self, body: &[u8]) -> Result<X, Error> {
        decode_serde(body).map_err(|_| self.broken(ProtocolFault::Body(0)))
    }

    fn check_sender(&self, header: &Header) -> Result<(), Error> {
        let fits = || match self.routes.borrow().get(header.from) {
            Some(Route::Remote(outbox)) => outbox.process() == self.process,
            // One that this process has not heard of yet, or that has left: what it says is for members to judge.
            None | Some(Route::Gone) => matches!(header.kind, Kind::Member | Kind::GivenUp | Kind::Leave),
            Some(Route::Local(_)) => false,
        };
        if matches!(self.routes.borrow().get(header.from), None | Some(Route::Gone)) {
            self.look_up();
        }
        let joinable = self.shared.hall.is_some();
        if fits() && (joinable || header.from < self.shared.founders()) {
            return Ok(());
        }
        Err(self.broken(ProtocolFault::Sender(header.from)))
    }

    fn look_up(&self) {
        *self.routes.borrow_mut() = self.shared.routes();
    }

    /// The body of a frame that carries one number.
    fn number(&self, body: &[u8]) -> Result<u64, Error> {
        let bytes = body.try_into().map_err(|_| self.broken(ProtocolFault::Body(0)))?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// A number of workers that a run can have, or that is not known where `least` is 0.
    fn workers(&self, number: u64, least: usize) -> Result<usize, Error> {
        let fits = usize::try_from(number).ok().filter(|count| (least..=MAX_MEMBERS).contains(count));
        fits.ok_or_else(|| self.broken(ProtocolFault::Workers(number)))
    }

    fn deliver(&self, header: Header, payload: Payload) -> Result<(), Error> {
        self.check_sender(&header)?;
        let mut found = self.mailbox(header.to);
        if (found.is_none() || !self.knows(header.from)) && self.shared.hall.is_some() {
            self.introduce(&payload)?;
            self.look_up();
            found = self.mailbox(header.to);
        }
        match found {
            Some(mailbox) => mailbox.push(Envelope { channel: header.channel, from: header.from, payload }),
            // It has left, or never came.
            None if matches!(self.routes.borrow().get(header.to), Some(Route::Gone)) => {}
            None => return Err(self.broken(ProtocolFault::Receiver(header.to))),
        }
        Ok(())
    }

    fn mailbox(&self, to: usize) -> Option<Arc<Mailbox>> {
        match self.routes.borrow().get(to) {
            Some(Route::Local(mailbox)) => Some(mailbox.clone()),
            _ => None,
        }
    }

    /// Whether that worker is heard of, so that data may come from it.
    fn knows(&self, from: usize) -> bool {
        matches!(self.routes.borrow().get(from), Some(Route::Remote(_)))
    }

    /// The first thing that a joiner is sent has a list that it is in; so has the first that it says, before all its data. Workers read the
    /// latter when they come to it, which may be after the data.
    fn introduce(&self, payload: &Payload) -> Result<(), Error> {
        if let Payload::MemberBytes(MemberLane::Urgent, body) = payload
            && let Message::<Told>::Marker { list, .. } = self.decoded(body)?
        {
            self.shared.extend(&list);
        }
        Ok(())
    }

    fn lost(&self, reason: String) -> Error {
        Error::PeerLost { process: self.process, reason }
    }

    fn broken(&self, fault: ProtocolFault) -> Error {
        Error::Protocol { process: self.outbox.process(), fault }
    }
}

/// One end of a link in a simulation: see [`Door::wire`]. A frame waits in its lane until it is taken onto the stream, as by the thread that
/// sends, and on the stream, which keeps the order, until it is carried over; whoever holds the wires decides when. So what is taken
/// early goes before what comes later to a better lane, and what waits is overtaken.
#[doc(hidden)]
pub struct Wire {
    inbound: Inbound,
    stream: RefCell<VecDeque<Frame>>,
    ended: Cell<bool>,
}

impl Wire {
    /// How many frames wait in the lanes from here.
    pub fn waiting(&self) -> usize {
        self.inbound.outbox.waiting()
    }

    /// How many frames are on the stream from here.
    pub fn under_way(&self) -> usize {
        self.stream.borrow().len()
    }

    /// Takes what goes next onto the stream: all urgent frames, else one of data or of what is behind data, as is asked for; at last the goodbye.
    pub fn take(&self, behind: bool) {
        let mut frames = Vec::new();
        let phase = self.inbound.outbox.take_frames(&mut frames, behind);
        if phase == Some(Phase::Closing) && !self.ended.replace(true) {
            frames.push(self.inbound.outbox.goodbye());
        }
        self.stream.borrow_mut().extend(frames);
    }

    /// Moves up to so many frames of the stream to the other end, as bytes.
    ///
    /// # Errors
    /// Why the other end cannot take one.
    pub fn carry(&self, to: &Wire, count: usize) -> Result<(), Error> {
        for _ in 0..count {
            let Some(frame) = self.stream.borrow_mut().pop_front() else { break };
            let bytes = [&frame.header[..], &frame.body].concat();
            let read = frame::read(&mut &bytes[..], to.inbound.tag);
            let (header, body) = read.map_err(|_| to.inbound.broken(ProtocolFault::Checksum))?;
            to.inbound.accept(header, body)?;
        }
        Ok(())
    }

    /// Takes a frame here as if the other process had sent it: for fuzzing, since nobody there would.
    ///
    /// # Errors
    /// Why it cannot be taken.
    pub fn hear(&self, kind: u8, channel: u64, from: usize, to: usize, body: Vec<u8>) -> Result<(), Error> {
        let kind = *Kind::ALL.get(usize::from(kind)).ok_or_else(|| self.inbound.broken(ProtocolFault::Kind(kind)))?;
        let Frame { header, body } = Frame::new(self.inbound.tag, kind, channel, from, to, body);
        let read = frame::read(&mut &[&header[..], &body].concat()[..], self.inbound.tag);
        let (header, body) = read.map_err(|_| self.inbound.broken(ProtocolFault::Checksum))?;
        self.inbound.accept(header, body)
    }

    /// The link ends as it does when the other process dies.
    pub fn cut(&self) {
        self.stream.borrow_mut().clear();
        self.inbound.shared.link_lost(self.inbound.process, self.inbound.lost("it died".to_string()));
    }
}

impl std::fmt::Debug for Wire {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Wire").field("process", &self.inbound.process).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn nothing_of_a_fabric_that_was_left_stays() {
        let tag = FabricTag { query: 3, generation: 1 };
        let (ours, theirs) = UnixStream::pair().unwrap();
        let streams: [Vec<Option<Box<dyn Duplex>>>; 2] =
            [vec![None, Some(Box::new(ours))], vec![Some(Box::new(theirs)), None]];
        let founded = streams.into_iter().enumerate();
        let fabrics: Vec<_> = founded.map(|(process, streams)| processes(process, 1, streams, tag).unwrap()).collect();
        let hubs: Vec<_> = fabrics.iter().map(|(_, guard)| Arc::downgrade(&guard.hub)).collect();
        let shared: Vec<_> = fabrics.iter().map(|(_, guard)| Arc::downgrade(&guard.hub.shared)).collect();
        drop(fabrics);
        assert!(hubs.iter().all(|hub| hub.upgrade().is_none()));
        assert!(
            shared.iter().all(|shared| shared.upgrade().is_none()),
            "its mailboxes, and what was not taken from them"
        );
    }
}
