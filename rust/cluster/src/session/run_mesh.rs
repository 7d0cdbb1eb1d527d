//! The mesh of a run: its processes connect with each other, when everybody knows everybody's address.
//!
//! There is one run to a listener, and it is known before anybody dials. Members of an engine serve many queries on one port and learn
//! of their generations at different moments: their meshes are made by the member (module `generation_mesh`).
//!
//! Each process listens ([`MeshPort`]), the addresses are told around by whoever starts the run, and then every process calls
//! [`MeshPort::connect`]: the lower one dials, the higher one accepts. Both ends of every connection prove the run's key,
//! and name the run, themselves, the process that is meant and the shape that they expect: a connection of another run, or
//! to an address that was given to somebody else meanwhile, is refused by name.
//!
//! Processes that join a run later dial all of it, at a port that each has for that ([`MeshPort::welcome`], [`join_mesh`]).

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::acceptor::{Accepted, Acceptor};
use super::{HandshakeError, Keys, Limits, Metrics, Role, Session, Stream};
use crate::error::{ClusterError, Failure};
use crate::message::MESH_SCOPE;

/// How long one wait lasts before cancellation is looked at again.
const LOOK: Duration = Duration::from_millis(20);
/// How long a peer may take to read why it was refused.
const REFUSAL_PATIENCE: Duration = Duration::from_secs(1);

/// Who takes part in a run, and as what.
#[derive(Clone, Debug)]
pub struct MeshPlan {
    /// Name of the run, equal for all.
    pub group: String,
    /// Index of this process.
    pub process: usize,
    /// Workers of each process, equal for all.
    pub threads: usize,
    /// Address of each process, this one's included.
    pub addresses: Vec<String>,
}

/// Why a mesh did not come about.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MeshError {
    /// A process could not be reached or refused the connection.
    #[error("process {process} at {address}: {source}")]
    Peer {
        /// The process.
        process: usize,
        /// Where it was expected.
        address: String,
        /// What happened.
        source: Box<ClusterError>,
    },
    /// A process did not come in time.
    #[error("process {process} did not connect within {seconds:.1} s")]
    Absent {
        /// The process.
        process: usize,
        /// How long it was waited for.
        seconds: f64,
    },
    /// This process is not in the plan.
    #[error("there is no process {process} among {count}")]
    Shape {
        /// Its index.
        process: usize,
        /// How many addresses there are.
        count: usize,
    },
    /// The wait was cancelled.
    #[error("cancelled")]
    Cancelled,
    /// The listener failed.
    #[error(transparent)]
    Port(#[from] Box<ClusterError>),
}

/// What the dialling side says about itself; covered by both proofs.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Introduction {
    group: String,
    from: usize,
    to: usize,
    processes: usize,
    threads: usize,
}

/// Reads what the dialling side says about itself, and what it wrote of it again; whether it is that. For fuzzing.
#[doc(hidden)]
#[must_use]
pub fn fuzz_introduction(context: &[u8]) -> bool {
    let Ok(said) = serde_json::from_slice::<Introduction>(context) else { return false };
    let again = serde_json::to_vec(&said).expect("names and numbers are JSON");
    assert_eq!(serde_json::from_slice::<Introduction>(&again).expect("what was written can be read"), said);
    true
}

impl MeshPlan {
    fn introduction(&self, to: usize) -> Introduction {
        let (group, from, processes) = (self.group.clone(), self.process, self.addresses.len());
        Introduction { group, from, to, processes, threads: self.threads }
    }
}

/// A listener for one run.
#[derive(Debug)]
pub struct MeshPort {
    listener: TcpListener,
    address: SocketAddr,
}

impl MeshPort {
    /// Listens on `host`; port 0 lets the system choose. Nobody is served before [`MeshPort::connect`].
    ///
    /// # Errors
    /// [`ClusterError::Io`] when the address cannot be bound.
    pub fn bind(host: &str, port: u16) -> Result<Self, ClusterError> {
        let name = || format!("listen on {host}:{port}");
        let listener = TcpListener::bind((super::without_brackets(host), port)).map_err(ClusterError::io(name()))?;
        let address = listener.local_addr().map_err(ClusterError::io(name()))?;
        Ok(MeshPort { listener, address })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// One connection to every other process, `None` in our own place. Returns when all are there, the time is over, or
    /// `cancelled` is set.
    ///
    /// # Errors
    /// [`MeshError`], which names the process that is missing or refused.
    pub fn connect(
        self,
        plan: &MeshPlan,
        keys: &Keys,
        patience: Duration,
        cancelled: &AtomicBool,
    ) -> Result<Vec<Option<Stream>>, MeshError> {
        self.connect_within(plan, keys, patience, cancelled, Limits::default())
    }

    fn connect_within(
        self,
        plan: &MeshPlan,
        keys: &Keys,
        patience: Duration,
        cancelled: &AtomicBool,
        limits: Limits,
    ) -> Result<Vec<Option<Stream>>, MeshError> {
        let (count, me) = (plan.addresses.len(), plan.process);
        if me >= count {
            return Err(MeshError::Shape { process: me, count });
        }
        let deadline = Instant::now() + patience;
        let limits = Limits { handshake_time: patience.min(limits.handshake_time), ..limits };
        let mut mesh: Vec<Option<Stream>> = plan.addresses.iter().map(|_| None).collect();
        let (arrived, arrivals) = channel();
        let port = (me > 0)
            .then(|| {
                let (plan, arrived) = (plan.clone(), Mutex::new(arrived));
                let handler = move |accepted: Accepted| {
                    if let Some(welcome) = admit(accepted, &plan) {
                        let arrived = arrived.lock().unwrap_or_else(PoisonError::into_inner);
                        // Nobody waits any more: the connection is not needed.
                        let _ = arrived.send(welcome);
                    }
                };
                Acceptor::start(
                    self.listener,
                    "penstock-mesh",
                    keys.clone(),
                    &[Role::Mesh],
                    limits.clone(),
                    Arc::new(Metrics::default()),
                    Box::new(handler),
                )
            })
            .transpose()
            .map_err(Box::new)?;
        let stopped = || cancelled.load(Ordering::Acquire);
        for (process, address) in plan.addresses.iter().enumerate().skip(me + 1) {
            let dialled = reach(address, keys, &plan.introduction(process), &limits, deadline, cancelled)?;
            mesh[process] = Some(dialled.map_err(|source| peer(process, address, source))?);
        }
        while let Some(process) = (0..me).find(|&process| mesh[process].is_none()) {
            if stopped() {
                return Err(MeshError::Cancelled);
            }
            match next(&arrivals, deadline) {
                Some((from, session)) => {
                    let stream = session.into_stream().map_err(Box::new)?;
                    // From here on it is ours: closing the port must not end it.
                    if let Some(port) = &port {
                        port.disown(&stream);
                    }
                    mesh[from] = Some(stream);
                }
                None if Instant::now() < deadline => {}
                None => return Err(MeshError::Absent { process, seconds: patience.as_secs_f64() }),
            }
        }
        Ok(mesh)
    }
}

/// A listener for processes that join a run, until it is dropped: what [`MeshPort::welcome`] returns.
#[derive(Debug)]
pub struct MeshDoor {
    /// Nothing ends the thread.
    arrived: Sender<Option<(usize, Session)>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for MeshDoor {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.arrived.send(None);
        if let Some(thread) = self.thread.take() {
            // A panic there has been reported by the panic hook.
            drop(thread.join());
        }
    }
}

impl MeshPort {
    /// Takes in processes that join the run `group` later ([`join_mesh`]): hands over their numbers and connections, from a thread of its own.
    ///
    /// # Errors
    /// [`ClusterError::Io`] when a thread cannot be started.
    pub fn welcome(
        self,
        group: &str,
        process: usize,
        keys: &Keys,
        mut joins: impl FnMut(usize, Stream) + Send + 'static,
    ) -> Result<MeshDoor, ClusterError> {
        let (arrived, arrivals) = channel();
        let plan = Joining { group: group.to_owned(), process };
        let comes = arrived.clone();
        let handler = move |accepted: Accepted| {
            if let Some(welcome) = plan.admit(accepted) {
                let _ = comes.send(Some(welcome));
            }
        };
        let (limits, metrics) = (Limits::default(), Arc::new(Metrics::default()));
        let (name, handler) = ("penstock-join", Box::new(handler));
        let port = Acceptor::start(self.listener, name, keys.clone(), &[Role::Mesh], limits, metrics, handler)?;
        let hand_over = move || {
            while let Ok(Some((from, session))) = arrivals.recv() {
                if let Ok(stream) = session.into_stream() {
                    // From here on it is theirs: closing the port must not end it.
                    port.disown(&stream);
                    joins(from, stream);
                }
            }
        };
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(hand_over);
        let thread = thread.map_err(ClusterError::io("start the thread that takes in processes"))?;
        Ok(MeshDoor { arrived, thread: Some(thread) })
    }
}

/// Connects a process that joins a run with the processes whose doors are given ([`MeshPort::welcome`]): all that run or join. One that does not
/// listen any more has left, and has no connection in the answer.
///
/// # Errors
/// [`MeshError::Peer`] when one refuses, or does not answer in time; [`MeshError::Cancelled`].
pub fn join_mesh(
    group: &str,
    process: usize,
    doors: &[(usize, String)],
    keys: &Keys,
    patience: Duration,
    cancelled: &AtomicBool,
) -> Result<Vec<(usize, Stream)>, MeshError> {
    let deadline = Instant::now() + patience;
    let mut mesh = Vec::new();
    for (to, address) in doors {
        let said = Introduction { group: group.to_owned(), from: process, to: *to, processes: 0, threads: 0 };
        match reach(address, keys, &said, &Limits::default(), deadline, cancelled)? {
            Ok(stream) => mesh.push((*to, stream)),
            Err(ClusterError::Io { source, .. }) if source.kind() == ErrorKind::ConnectionRefused => {}
            Err(source) => return Err(peer(*to, address, source)),
        }
    }
    Ok(mesh)
}

/// Who takes in processes that join.
struct Joining {
    group: String,
    process: usize,
}

impl Joining {
    /// As [`admit`].
    fn admit(&self, accepted: Accepted) -> Option<(usize, Session)> {
        let Accepted { mut session, scope, context, .. } = accepted;
        let said = serde_json::from_slice::<Introduction>(&context).ok();
        let fits = |said: &Introduction| {
            said.group == self.group && scope == MESH_SCOPE && said.to == self.process && said.processes == 0
        };
        let Some(said) = said.filter(fits) else {
            let message =
                format!("process {} here belongs to another run, or the dialling one does not join", self.process);
            let _ = session.answer(&Err(Failure::new("wrong_group", message)));
            session.linger(REFUSAL_PATIENCE);
            return None;
        };
        session.answer(&Ok(serde_json::json!({"ok": true}))).ok()?;
        Some((said.from, session))
    }
}

fn next(arrivals: &Receiver<(usize, Session)>, deadline: Instant) -> Option<(usize, Session)> {
    let wait = LOOK.min(deadline.saturating_duration_since(Instant::now()));
    arrivals.recv_timeout(wait).ok()
}

/// Answers an authenticated connection; none when it does not belong here.
fn admit(accepted: Accepted, plan: &MeshPlan) -> Option<(usize, Session)> {
    let Accepted { mut session, scope, context, .. } = accepted;
    let refuse = |mut session: Session, kind: &str, message: String| {
        // The peer may be gone; then there is nobody to tell.
        let _ = session.answer(&Err(Failure::new(kind, message)));
        session.linger(REFUSAL_PATIENCE);
        None
    };
    let Ok(said) = serde_json::from_slice::<Introduction>(&context) else {
        return refuse(session, "protocol", "this is not an introduction".to_owned());
    };
    let (count, me) = (plan.addresses.len(), plan.process);
    if said.group != plan.group || scope != MESH_SCOPE {
        return refuse(session, "wrong_group", format!("process {me} here belongs to another run"));
    }
    if said.to != me || said.from >= me || said.processes != count || said.threads != plan.threads {
        let message = format!(
            "process {} of {} with {} workers meant process {}; here is process {me} of {count} with {}",
            said.from, said.processes, said.threads, said.to, plan.threads
        );
        return refuse(session, "wrong_shape", message);
    }
    session.answer(&Ok(serde_json::json!({"ok": true}))).ok()?;
    Some((said.from, session))
}

fn peer(process: usize, address: &str, source: ClusterError) -> MeshError {
    MeshError::Peer { process, address: address.to_owned(), source: Box::new(source) }
}

/// Dials until the deadline. A port that is bound and not served yet takes connections, and answers when one handshake may be over.
///
/// # Errors
/// [`MeshError::Cancelled`]; within, why there is no connection.
fn reach(
    address: &str,
    keys: &Keys,
    said: &Introduction,
    limits: &Limits,
    deadline: Instant,
    cancelled: &AtomicBool,
) -> Result<Result<Stream, ClusterError>, MeshError> {
    let context = serde_json::to_value(said).expect("names and numbers are JSON");
    loop {
        if cancelled.load(Ordering::Acquire) {
            return Err(MeshError::Cancelled);
        }
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let (connect_time, dial_time) = (left.min(limits.connect_time), left.min(limits.dial_time));
        let limits =
            Limits { connect_time, dial_time, handshake_time: left.min(limits.handshake_time), ..limits.clone() };
        match Session::dial_mesh(address, keys, MESH_SCOPE, &context, &limits, (left, Duration::ZERO)) {
            Err(ClusterError::Handshake(HandshakeError::Timeout)) if Instant::now() < deadline => {}
            dialled => return Ok(dialled),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::thread;

    use super::super::Secret;
    use super::*;

    fn secret(byte: u8) -> Keys {
        let mut bytes = [byte; 32];
        bytes[0] ^= 1;
        Keys::all(&Secret::new(bytes).unwrap())
    }

    fn ports(count: usize) -> (Vec<MeshPort>, Vec<String>) {
        let ports: Vec<_> = (0..count).map(|_| MeshPort::bind("127.0.0.1", 0).unwrap()).collect();
        let addresses = ports.iter().map(|port| port.address().to_string()).collect();
        (ports, addresses)
    }

    fn plan(process: usize, addresses: &[String]) -> MeshPlan {
        MeshPlan { group: "run".to_owned(), process, threads: 1, addresses: addresses.to_vec() }
    }

    const PATIENCE: Duration = Duration::from_secs(20);

    #[test]
    fn three_processes_get_a_full_mesh_that_outlives_the_ports() {
        let (ports, addresses) = ports(3);
        let threads: Vec<_> = ports
            .into_iter()
            .enumerate()
            .map(|(process, port)| {
                let plan = plan(process, &addresses);
                thread::spawn(move || {
                    let mesh = port.connect(&plan, &secret(7), PATIENCE, &AtomicBool::new(false)).unwrap();
                    for stream in mesh.iter().flatten() {
                        (&mut &*stream).write_all(&[process as u8]).unwrap();
                    }
                    let mut seen = Vec::new();
                    for (other, stream) in mesh.iter().enumerate().filter_map(|(o, s)| Some((o, s.as_ref()?))) {
                        let mut byte = [0];
                        (&mut &*stream).read_exact(&mut byte).unwrap();
                        assert_eq!(usize::from(byte[0]), other);
                        seen.push(other);
                    }
                    seen
                })
            })
            .collect();
        let seen: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert_eq!(seen, [vec![1, 2], vec![0, 2], vec![0, 1]]);
    }

    /// What the one that dials gets, and then the one that waits, which is cancelled when the other is done.
    fn pair(first: (MeshPlan, Keys), second: (MeshPlan, Keys), ports: Vec<MeshPort>) -> [Result<(), MeshError>; 2] {
        let [dials, waits]: [MeshPort; 2] = ports.try_into().unwrap();
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            let waiting = scope.spawn(|| waits.connect(&second.0, &second.1, PATIENCE, &over).map(drop));
            let dialled = dials.connect(&first.0, &first.1, PATIENCE, &AtomicBool::new(false)).map(drop);
            over.store(true, std::sync::atomic::Ordering::Relaxed);
            [dialled, waiting.join().unwrap()]
        })
    }

    #[test]
    fn another_secret_is_refused_on_both_sides() {
        let (ports, addresses) = ports(2);
        let [dialled, waited] = pair((plan(0, &addresses), secret(7)), (plan(1, &addresses), secret(8)), ports);
        assert!(matches!(dialled, Err(MeshError::Peer { process: 1, source, .. }) if source.is_authentication()));
        assert!(matches!(waited, Err(MeshError::Cancelled)), "who was refused is still awaited: {waited:?}");
    }

    #[test]
    fn another_run_and_another_shape_are_refused_by_name() {
        for (change, kind) in [
            (
                Box::new(|plan: &mut MeshPlan| plan.group = "other".to_owned()) as Box<dyn Fn(&mut MeshPlan)>,
                "wrong_group",
            ),
            (Box::new(|plan: &mut MeshPlan| plan.threads = 2), "wrong_shape"),
        ] {
            let (ports, addresses) = ports(2);
            let mut other = plan(0, &addresses);
            change(&mut other);
            let [dialled, _] = pair((other, secret(7)), (plan(1, &addresses), secret(7)), ports);
            let Err(MeshError::Peer { source, .. }) = dialled else { panic!("{dialled:?}") };
            let ClusterError::Refused(failure) = *source else { panic!("{source:?}") };
            assert_eq!(failure.kind, kind);
        }
    }

    #[test]
    fn a_wait_ends_or_is_cancelled_and_a_wrong_index_is_refused() {
        let (mut ports, addresses) = ports(3);
        let nobody = ports.pop().unwrap().connect(
            &plan(2, &addresses),
            &secret(7),
            Duration::from_millis(10),
            &AtomicBool::new(false),
        );
        assert!(matches!(nobody, Err(MeshError::Absent { process: 0, .. })));
        let cancelled = AtomicBool::new(true);
        let waited = ports.pop().unwrap().connect(&plan(1, &addresses), &secret(7), PATIENCE, &cancelled);
        assert!(matches!(waited, Err(MeshError::Cancelled)));
        let wrong = ports.pop().unwrap().connect(&plan(3, &addresses), &secret(7), PATIENCE, &cancelled);
        assert!(matches!(wrong, Err(MeshError::Shape { process: 3, count: 3 })));
    }

    /// Limits that a handshake with who does not serve its port soon exceeds.
    fn hasty() -> Limits {
        Limits { handshake_time: Duration::from_millis(20), ..Limits::default() }
    }

    #[test]
    fn who_is_not_served_yet_dials_until_it_is() {
        let (ports, addresses) = ports(2);
        let [dials, waits]: [MeshPort; 2] = ports.try_into().unwrap();
        let dialling = {
            let plan = plan(0, &addresses);
            thread::spawn(move || dials.connect_within(&plan, &secret(7), PATIENCE, &AtomicBool::new(false), hasty()))
        };
        // The second one comes after the first was given up.
        let given_up: Vec<_> = (0..2).map(|_| waits.listener.accept().unwrap()).collect();
        waits.connect(&plan(1, &addresses), &secret(7), PATIENCE, &AtomicBool::new(false)).unwrap();
        dialling.join().unwrap().unwrap();
        drop(given_up);
    }

    #[test]
    fn who_is_never_served_ends_when_cancelled_or_late() {
        let (mut ports, addresses) = ports(3);
        let waits = ports.pop().unwrap();
        let (plan, cancelled) = (plan(1, &addresses), AtomicBool::new(false));
        thread::scope(|scope| {
            let dials = ports.pop().unwrap();
            let dialling =
                scope.spawn(|| dials.connect_within(&plan, &secret(7), Duration::from_secs(3600), &cancelled, hasty()));
            let _first = waits.listener.accept().unwrap();
            cancelled.store(true, Ordering::Release);
            assert!(matches!(dialling.join().unwrap(), Err(MeshError::Cancelled)));
        });
        let never = AtomicBool::new(false);
        let doors = [(2, addresses[2].clone())];
        let late = join_mesh("run", 3, &doors, &secret(7), Duration::from_millis(50), &never);
        assert!(matches!(late, Err(MeshError::Peer { process: 2, .. })), "{late:?}");
    }
}
