//! Processes join a running dataflow over TCP in the middle of an epoch, with capabilities, and leave it; who dies on the way, and who hears of it.
//! The processes are threads here, but nothing is shared between them except sockets.

use std::collections::BTreeMap;
use std::io::{self, Cursor, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use penstock_dataflow::fabric::{self, Duplex, FabricGuard, Hangup, Wire};
use penstock_dataflow::wire::encode_serde;
use penstock_dataflow::{BoxError, Door, Endpoint, Error, InputHandle, JoinError, Limits, Ticket, Worker, execute};
use penstock_members::list::{Change, MAX_MEMBERS};
use penstock_members::message::Bundle;
use penstock_members::{List, Message};
use penstock_progress::{Location, ProbeHandle, Source, Target};

use crate::frames::frame;
use crate::support::{self, TAG, tcp_pair};

/// Where each number went: (number, worker).
type Log = Arc<Mutex<Vec<(u64, usize)>>>;

fn sorted(log: &Log) -> Vec<(u64, usize)> {
    let mut seen = log.lock().unwrap().clone();
    seen.sort_unstable();
    seen
}

/// Builds: numbers to the worker of that rank, which notes them.
fn numbers(worker: &mut Worker, log: &Log) -> (InputHandle<u64, Vec<u64>>, ProbeHandle<u64>) {
    let (index, log) = (worker.index(), log.clone());
    worker.dataflow::<u64, _>("numbers", |scope| {
        let (input, stream) = scope.new_input::<Vec<u64>>();
        let noted = stream.exchange_by(|number| *number).inspect(move |_, block| {
            log.lock().unwrap().extend(block.iter().map(|number| (*number, index)));
        });
        (input, noted.probe().0)
    })
}

fn limits() -> Limits {
    Limits { link_bytes: 1 << 16, ..Limits::default() }
}

type Results<R> = JoinHandle<Vec<Result<R, Error>>>;

/// The processes of a run, as what starts them sees them.
struct Cluster {
    /// By process: its door, and a second handle of its sockets, for ending them.
    doors: Vec<Option<Door>>,
    sockets: Vec<Vec<TcpStream>>,
}

/// Runs a program on the seats of one process, which leaves at its end.
fn run<R, F>(seats: Vec<Endpoint>, guard: FabricGuard, program: F) -> Results<R>
where
    R: Send + 'static,
    F: Fn(&mut Worker) -> Result<R, BoxError> + Send + Sync + 'static,
{
    std::thread::spawn(move || {
        let results = support::join(execute(seats, program));
        drop(guard);
        results
    })
}

impl Cluster {
    /// Founders: seats and guards by process.
    fn found(processes: usize, threads: usize) -> (Self, Vec<(Vec<Endpoint>, FabricGuard)>) {
        let mut cluster = Cluster { doors: Vec::new(), sockets: (0..processes).map(|_| Vec::new()).collect() };
        let empty = || (0..processes).map(|_| None).collect::<Vec<Option<Box<dyn Duplex>>>>();
        let mut streams: Vec<_> = (0..processes).map(|_| empty()).collect();
        for (one, two) in (0..processes).flat_map(|one| (one + 1..processes).map(move |two| (one, two))) {
            let (left, right) = cluster.pair(one, two);
            streams[one][two] = Some(left);
            streams[two][one] = Some(right);
        }
        let mut founded = Vec::new();
        for (process, streams) in streams.into_iter().enumerate() {
            let (seats, door, guard) =
                fabric::joinable_processes_with(process, threads, streams, TAG, limits()).unwrap();
            cluster.doors.push(Some(door));
            founded.push((seats, guard));
        }
        (cluster, founded)
    }

    fn pair(&mut self, one: usize, two: usize) -> (Box<dyn Duplex>, Box<dyn Duplex>) {
        let (left, right) = tcp_pair();
        self.sockets[one].push(left.try_clone().unwrap());
        self.sockets[two].push(right.try_clone().unwrap());
        (Box::new(left), Box::new(right))
    }

    /// One more process, connected with all that are there.
    fn dial(&mut self) -> (Door, FabricGuard) {
        let process = self.doors.len();
        self.sockets.push(Vec::new());
        let mut streams = Vec::new();
        for other in 0..process {
            let Some(door) = self.doors[other].clone() else { continue };
            let (ours, theirs) = self.pair(process, other);
            door.link(process, theirs).unwrap();
            streams.push((other, ours));
        }
        let (door, guard) = fabric::join_processes(process, streams, TAG, limits()).unwrap();
        self.doors.push(Some(door.clone()));
        (door, guard)
    }

    /// Ends the process as a signal would: all its sockets close, with no goodbye.
    fn kill(&mut self, process: usize) {
        // Its threads live on here: what they see of that its links can tell nobody. Its workers must not step meanwhile.
        for how in [Shutdown::Write, Shutdown::Both] {
            for socket in &self.sockets[process] {
                let _ = socket.shutdown(how);
            }
        }
        self.doors[process] = None;
    }
}

fn signal() -> (Arc<Mutex<Sender<()>>>, Receiver<()>) {
    let (told, heard) = mpsc::channel();
    (Arc::new(Mutex::new(told)), heard)
}

fn tell(signal: &Arc<Mutex<Sender<()>>>) {
    signal.lock().unwrap().send(()).unwrap();
}

const PATIENCE: Duration = Duration::from_secs(60);

/// two processes of one worker; one with a worker more joins after 5 of the integers 0 to 9.
#[test]
fn a_process_joins_after_five_of_ten_numbers() {
    let log = Log::default();
    let (half, come) = signal();
    let (mut cluster, founded) = Cluster::found(2, 1);
    let seen = log.clone();
    let program = move |worker: &mut Worker| {
        let (mut input, probe) = numbers(worker, &seen);
        let joined = worker.bootstrap()?;
        if joined {
            assert_eq!((worker.index(), worker.rank(), *input.time()), (2, Some(2), 5), "in the middle of epoch 5");
        }
        if worker.index() == 0 {
            for number in 0..10 {
                if number == 6 {
                    tell(&half);
                    while worker.peers() < 3 {
                        worker.step_or_park(None)?;
                    }
                }
                input.send(vec![number]);
                if number != 5 {
                    input.advance_to(number + 1)?;
                }
                worker.step()?;
            }
        }
        drop(input);
        worker.step_until(None, || probe.done())?;
        Ok(joined)
    };
    let running: Vec<_> = founded.into_iter().map(|(seats, guard)| run(seats, guard, program.clone())).collect();
    come.recv_timeout(PATIENCE).unwrap();
    let (door, guard) = cluster.dial();
    let seats = door.ask(1).unwrap().seats().unwrap();
    assert_eq!(seats.iter().map(Endpoint::index).collect::<Vec<_>>(), [2]);
    let joiner = run(seats, guard, program);
    let joined: Vec<bool> = running
        .into_iter()
        .chain([joiner])
        .flat_map(|process| process.join().unwrap().into_iter().map(Result::unwrap))
        .collect();
    assert_eq!(joined, [false, false, true]);
    let before = (0..6).map(|number| (number, number as usize % 2));
    let after = (6..10).map(|number| (number, number as usize % 3));
    assert_eq!(sorted(&log), before.chain(after).collect::<Vec<_>>());
    assert!(matches!(cluster.dial_late(), Err(JoinError::Over)), "there is nothing to join any more");
}

impl Cluster {
    /// A process that finds nobody any more.
    fn dial_late(&mut self) -> Result<Vec<Endpoint>, JoinError> {
        self.doors[0].clone().unwrap().ask(1)?.seats()
    }
}

/// Every worker sends from an epoch in which the others are; the first process leaves, with both of its workers, after another has joined; what each
/// sends goes to those who are there, and nothing is lost.
#[test]
fn processes_join_together_and_the_first_leaves() {
    let log = Log::default();
    let (up, come) = signal();
    let (mut cluster, founded) = Cluster::found(2, 2);
    let seen = log.clone();
    let program = move |worker: &mut Worker| {
        let (mut input, probe) = numbers(worker, &seen);
        let joined = worker.bootstrap()?;
        if worker.index() == 3 {
            tell(&up);
        }
        while worker.peers() < 7 && worker.index() < 2 {
            worker.step_or_park(None)?;
        }
        let mine = worker.index() as u64 * 100;
        if worker.index() < 2 {
            input.send((mine..mine + 50).collect());
            worker.leave()?;
            assert!(worker.has_left() && worker.dataflows() == 0);
            return Ok(joined);
        }
        // Two processes have come, and the first one is gone.
        while worker.has_member(0) || worker.has_member(1) || !(4..7).all(|joiner| worker.has_member(joiner)) {
            worker.step_or_park(None)?;
        }
        assert_eq!((worker.peers(), worker.rank()), (5, Some(worker.index() - 2)));
        input.send((mine..mine + 50).collect());
        input.advance_to(1)?;
        worker.step_until(None, || !probe.less_than(&1))?;
        drop(input);
        worker.step_until(None, || probe.done())?;
        Ok(joined)
    };
    let mut running: Vec<_> = founded.into_iter().map(|(seats, guard)| run(seats, guard, program.clone())).collect();
    come.recv_timeout(PATIENCE).unwrap();
    // Both dial before either asks, and the second one asks first.
    let (one, one_guard) = cluster.dial();
    let (two, two_guard) = cluster.dial();
    let (two, one) = (two.ask(1).unwrap(), one.ask(2).unwrap());
    for (ticket, guard) in [(one, one_guard), (two, two_guard)] {
        running.push(run(ticket.seats().unwrap(), guard, program.clone()));
    }
    let mut results: Vec<bool> = Vec::new();
    for process in running {
        results.extend(process.join().unwrap().into_iter().map(Result::unwrap));
    }
    assert_eq!(results, [false, false, false, false, true, true, true]);
    let mut expected: Vec<u64> = (0..7).flat_map(|worker| worker * 100..worker * 100 + 50).collect();
    expected.sort_unstable();
    assert_eq!(sorted(&log).iter().map(|(number, _)| *number).collect::<Vec<_>>(), expected);
}

/// A process whose workers have no room hears of it; and one of whose links ends before its welcome came asks the others then.
#[test]
fn a_process_hears_that_there_is_no_room_and_does_not_wait_for_the_dead() {
    let (mut cluster, founded) = Cluster::found(1, 1);
    let program = move |worker: &mut Worker| {
        let (input, probe) = numbers(worker, &Log::default());
        worker.bootstrap()?;
        while worker.peers() < 2 {
            worker.step_or_park(None)?;
        }
        drop(input);
        worker.step_until(None, || probe.done())?;
        Ok(())
    };
    let mut running: Vec<_> = founded.into_iter().map(|(seats, guard)| run(seats, guard, program)).collect();
    let (crowd, crowd_guard) = cluster.dial();
    assert!(matches!(crowd.ask(MAX_MEMBERS).unwrap().seats(), Err(JoinError::Many(MAX_MEMBERS))));
    drop(crowd_guard);
    // Process 2 dies with no word, and was no member.
    cluster.sockets.resize_with(4, Vec::new);
    let (ours, theirs) = cluster.pair(3, 0);
    cluster.doors[0].clone().unwrap().link(3, theirs).unwrap();
    let (silent, dead) = tcp_pair();
    let streams: Vec<(usize, Box<dyn Duplex>)> = vec![(0, ours), (2, Box::new(silent))];
    let (door, guard) = fabric::join_processes(3, streams, TAG, limits()).unwrap();
    let ticket = door.ask(1).unwrap();
    assert!(ticket.try_seats().unwrap().is_none());
    drop(dead);
    running.push(run(ticket.seats().unwrap(), guard, program));
    running.into_iter().for_each(|process| process.join().unwrap().into_iter().for_each(|result| result.unwrap()));
}

/// Threads join processes that run already, by the door of any of them.
#[test]
fn a_thread_joins_the_second_process() {
    let log = Log::default();
    let (cluster, founded) = Cluster::found(2, 1);
    let seen = log.clone();
    let program = move |worker: &mut Worker| {
        let (mut input, probe) = numbers(worker, &seen);
        worker.bootstrap()?;
        while worker.peers() < 3 {
            worker.step_or_park(None)?;
        }
        input.send((0..30).collect());
        drop(input);
        worker.step_until(None, || probe.done())?;
        Ok::<_, BoxError>(worker.index())
    };
    let (mut founders, mut guards) = (Vec::new(), Vec::new());
    for (seats, guard) in founded {
        founders.extend(execute(seats, program.clone()));
        guards.push(guard);
    }
    let seats = cluster.doors[1].clone().unwrap().ask(1).unwrap().seats().unwrap();
    founders.extend(execute(seats, program));
    let results: Vec<usize> = support::join(founders).into_iter().map(Result::unwrap).collect();
    assert_eq!(results, [0, 1, 2]);
    // Each leaves from a thread of its own: it waits for the others.
    let leaving: Vec<_> = guards.into_iter().map(|guard| std::thread::spawn(move || drop(guard))).collect();
    leaving.into_iter().for_each(|left| left.join().unwrap());
    assert_eq!(sorted(&log).len(), 90);
}

/// A process dies after it was admitted and before it is a full member: the run goes on, and the next one joins.
#[test]
fn a_joiner_that_dies_in_its_bootstrap_is_withdrawn() {
    let log = Log::default();
    let (mut cluster, founded) = Cluster::found(2, 1);
    let seen = log.clone();
    let program = move |worker: &mut Worker| {
        let (mut input, probe) = numbers(worker, &seen);
        worker.bootstrap()?;
        while worker.peers() < 3 {
            worker.step_or_park(None)?;
        }
        input.send((0..30).collect());
        drop(input);
        worker.step_until(None, || probe.done())?;
        Ok(worker.index())
    };
    let mut running: Vec<_> = founded.into_iter().map(|(seats, guard)| run(seats, guard, program.clone())).collect();
    // One that has a seat and never builds; one that dies before it has one; one whose program errs.
    let (door, guard) = cluster.dial();
    let seats = door.ask(1).unwrap().seats().unwrap();
    cluster.kill(2);
    let (door, early) = cluster.dial();
    cluster.kill(3);
    drop(door.ask(1));
    drop((seats, guard, early));
    let (door, guard) = cluster.dial();
    let seats = door.ask(1).unwrap().seats().unwrap();
    let wrong = run(seats, guard, |worker| {
        let _other = worker.dataflow::<u64, _>("other", |scope| scope.new_input::<Vec<u64>>().0);
        worker.bootstrap()?;
        Ok(())
    });
    assert!(matches!(wrong.join().unwrap()[..], [Err(Error::GraphMismatch { .. })]), "it ends alone");
    cluster.doors[4] = None;
    let (door, guard) = cluster.dial();
    let joiner = run(door.ask(1).unwrap().seats().unwrap(), guard, program);
    running.push(joiner);
    let results: Vec<usize> =
        running.into_iter().flat_map(|process| process.join().unwrap()).map(Result::unwrap).collect();
    assert!(results[..2] == [0, 1] && results[2] >= 4, "{results:?}");
    assert_eq!(sorted(&log).len(), 90);
}

/// A process of the run dies while another joins: all who are left report that, the joiner too.
#[test]
fn a_server_that_dies_ends_the_run_for_the_joiner_too() {
    let log = Log::default();
    let (up, come) = signal();
    let (mut cluster, founded) = Cluster::found(3, 1);
    let (dying, gate) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(())));
    let held = gate.lock().unwrap();
    let (seen, dies, wait) = (log.clone(), dying.clone(), gate.clone());
    let program = move |worker: &mut Worker| {
        let (_input, probe) = numbers(worker, &seen);
        worker.bootstrap()?;
        tell(&up);
        if worker.index() == 0 {
            while !dies.load(Ordering::SeqCst) {
                worker.step_or_park(Some(Duration::from_millis(1)))?;
            }
            tell(&up);
            drop(wait.lock());
        }
        worker.step_until(None, || probe.done())?;
        Ok(())
    };
    let running: Vec<_> = founded.into_iter().map(|(seats, guard)| run(seats, guard, program.clone())).collect();
    (0..3).for_each(|_| come.recv_timeout(PATIENCE).unwrap());
    let (door, guard) = cluster.dial();
    let seats = door.ask(1).unwrap().seats().unwrap();
    // The one that would serve it.
    dying.store(true, Ordering::SeqCst);
    come.recv_timeout(PATIENCE).unwrap();
    cluster.kill(0);
    let joiner = run(seats, guard, program);
    let of = |process: Results<()>| process.join().unwrap().remove(0).unwrap_err();
    let mut running = running.into_iter();
    let dead = running.next();
    let errors: Vec<Error> = running.map(of).chain([of(joiner)]).collect();
    drop(held);
    drop(dead.map(of));
    for error in errors {
        assert!(matches!(&error, Error::PeerLost { process: 0, .. }), "{error}");
    }
}

/// What the members are told when a process errs: one cause, also for one that joins.
#[test]
fn one_cause_is_told_to_who_joins() {
    let log = Log::default();
    let (up, come) = signal();
    let (mut cluster, founded) = Cluster::found(2, 1);
    let gate = Arc::new(Mutex::new(()));
    let held = gate.lock().unwrap();
    let (seen, wait) = (log.clone(), gate.clone());
    let program = move |worker: &mut Worker| {
        let (_input, probe) = numbers(worker, &seen);
        worker.bootstrap()?;
        tell(&up);
        if worker.index() == 1 {
            drop(wait.lock());
            return Err("no more".into());
        }
        worker.step_until(None, || probe.done())?;
        Ok(())
    };
    let running: Vec<_> = founded.into_iter().map(|(seats, guard)| run(seats, guard, program.clone())).collect();
    (0..2).for_each(|_| come.recv_timeout(PATIENCE).unwrap());
    let (door, guard) = cluster.dial();
    // Nobody of process 1 confirms while it is held, so the join is under way when the run ends.
    let ticket = door.ask(1).unwrap();
    let seats = ticket.seats().unwrap();
    let joiner = run(seats, guard, program);
    drop(held);
    for process in running.into_iter().chain([joiner]) {
        let error = process.join().unwrap().remove(0).unwrap_err();
        assert!(matches!(&error, Error::Program { worker: 1, .. }), "{error}");
    }
}

/// A link that would be the second to a process is refused, and the run goes on.
#[test]
fn numbers_of_processes_are_not_used_again() {
    let (mut cluster, founded) = Cluster::found(2, 1);
    let running: Vec<_> = founded
        .into_iter()
        .map(|(seats, guard)| {
            run(seats, guard, |worker| {
                let (_input, _) = worker.dataflow::<u64, _>("none", |scope| scope.new_input::<Vec<u64>>());
                worker.bootstrap()?;
                Ok(())
            })
        })
        .collect();
    for process in [0, 1] {
        let (ours, _theirs) = tcp_pair();
        let refused = cluster.doors[0].clone().unwrap().link(process, Box::new(ours));
        assert!(matches!(refused, Err(Error::Setup { .. })), "{refused:?}");
    }
    assert!(fabric::join_processes(2, Vec::new(), TAG, limits()).is_err());
    cluster.doors.clear();
    running.into_iter().for_each(|process| process.join().unwrap().remove(0).unwrap());
}

/// The seats, which others have to be asked for.
fn soon(ticket: &Ticket) -> Vec<Endpoint> {
    let began = Instant::now();
    loop {
        if let Some(seats) = ticket.try_seats().unwrap() {
            return seats;
        }
        assert!(began.elapsed() < PATIENCE, "nobody is asked");
        std::thread::yield_now();
    }
}

/// The only worker of a process has left, or has ended alone, and is not dropped: others let in who asks at its door.
#[test]
fn the_door_of_workers_that_have_ended_leads_to_others() {
    let log = Log::default();
    let (left, come) = signal();
    let (mut cluster, founded) = Cluster::found(2, 1);
    let gate = Arc::new(Mutex::new(()));
    let held = gate.lock().unwrap();
    let (seen, wait) = (log.clone(), gate.clone());
    let program = move |worker: &mut Worker| {
        let (input, probe) = numbers(worker, &seen);
        worker.bootstrap()?;
        if worker.index() == 1 {
            worker.leave()?;
            tell(&left);
            drop(wait.lock());
            return Ok(());
        }
        while !worker.has_member(2) || worker.peers() < 3 {
            worker.step_or_park(None)?;
        }
        drop(input);
        worker.step_until(None, || probe.done())?;
        Ok::<_, BoxError>(())
    };
    let running: Vec<_> = founded.into_iter().map(|(seats, guard)| run(seats, guard, program.clone())).collect();
    come.recv_timeout(PATIENCE).unwrap();
    let mut joiners = execute(soon(&cluster.doors[1].clone().unwrap().ask(1).unwrap()), program.clone());
    let (door, guard) = cluster.dial();
    let mut wrong = Worker::new(soon(&door.ask(1).unwrap()).remove(0));
    let _other = wrong.dataflow::<u64, _>("other", |scope| scope.new_input::<Vec<u64>>().0);
    assert!(matches!(wrong.bootstrap(), Err(Error::GraphMismatch { .. })));
    joiners.extend(execute(soon(&door.ask(1).unwrap()), program));
    support::join(joiners).into_iter().for_each(|result| result.unwrap());
    drop((held, wrong));
    let leaving = std::thread::spawn(move || drop(guard));
    running.into_iter().for_each(|process| process.join().unwrap().into_iter().for_each(|result| result.unwrap()));
    leaving.join().unwrap();
}

/// A link of whose other end only the words are there, and the end is held back. Where nobody takes what is said to it, writing fails, and all
/// words are held back until then.
struct Said {
    words: Vec<u8>,
    breaks: bool,
    open: Sender<()>,
    gate: Receiver<()>,
}

impl Said {
    fn new(words: Vec<u8>, breaks: bool) -> Self {
        let (open, gate) = mpsc::channel();
        Said { words, breaks, open, gate }
    }
}

impl Duplex for Said {
    fn hangup(&self) -> io::Result<Hangup> {
        let open = self.open.clone();
        Ok(Box::new(move |how| {
            if how != Shutdown::Write {
                let _ = open.send(());
            }
        }))
    }

    fn split(self: Box<Self>) -> io::Result<(Box<dyn Read + Send>, Box<dyn Write + Send>)> {
        let reader = Words { words: Cursor::new(self.words), first: self.breaks, gate: self.gate };
        Ok((Box::new(reader), Box::new(Deaf(self.breaks))))
    }
}

struct Words {
    words: Cursor<Vec<u8>>,
    /// Whether the gate is before the words.
    first: bool,
    gate: Receiver<()>,
}

impl Read for Words {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if std::mem::take(&mut self.first) {
            let _ = self.gate.recv();
        }
        let count = self.words.read(into)?;
        if count == 0 {
            let _ = self.gate.recv();
        }
        Ok(count)
    }
}

struct Deaf(bool);

impl Write for Deaf {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0 { Err(io::ErrorKind::BrokenPipe.into()) } else { Ok(bytes.len()) }
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What the second of two workers, in a process of its own, says when it leaves, up to its last markers, of which it says so many. Where one is
/// missing a block is, which its progress counts.
fn farewell(last: usize) -> Vec<u8> {
    type Told = (Option<String>, Vec<Vec<u8>>);
    let say = |lane: u64, message: &Message<Told>| {
        let mut body = Vec::new();
        encode_serde(message, &mut body);
        frame(8, TAG.generation, lane, 1, 0, None, &body)
    };
    let marker = |list: &List| Message::Marker { list: Arc::new(list.clone()), next: BTreeMap::new(), grant: None };
    let leaving = List::founded_at(2, 1).after(Change::Leaving(1)).unwrap();
    let closed = leaving.after(Change::Closed { leaver: 1, finals: BTreeMap::from([(0, 1)]) }).unwrap();
    let held = [1, 2, 3].map(|node| (Location::from(Source::new(node, 0)), 0_u64, -1_i64));
    let mut counts = Vec::from(held);
    if last < 3 {
        counts.push((Location::from(Target::new(2, 0)), 0, 1));
    }
    let mut part = Vec::new();
    encode_serde(&counts, &mut part);
    let bundle = Bundle { number: 0, after: Vec::new(), part: (None, vec![part]) };
    let marker = |lane, list: &List| if lane == 0 { marker(list) } else { Message::Mark(list.version) };
    let mut words: Vec<_> = (0..3).map(|lane| say(lane, &marker(lane, &leaving))).collect();
    words.push(say(0, &Message::Bundle(0, bundle)));
    words.extend((0..last as u64).map(|lane| say(lane, &marker(lane, &closed))));
    words.concat()
}

/// What becomes of the first of two workers, which waits until it is alone and all is done.
fn stays(link: Said) -> Result<(), Error> {
    let open = Mutex::new(link.open.clone());
    let (seats, _door, guard) = fabric::joinable_processes(0, 1, vec![None, Some(Box::new(link))], TAG).unwrap();
    let threads = execute(seats, move |worker: &mut Worker| {
        let (input, probe) = numbers(worker, &Log::default());
        worker.bootstrap()?;
        while worker.peers() > 1 {
            worker.step_or_park(None)?;
        }
        // Nothing more is said.
        let _ = open.lock().unwrap().send(());
        drop(input);
        if worker.step_until(Some(PATIENCE), || probe.done())? {
            return Ok(());
        }
        Err::<_, BoxError>("it waits for ever".into())
    });
    let result = support::join(threads).remove(0);
    drop(guard);
    result
}

/// All have agreed that a worker is gone, and its link ends before all that it sent has come: its peers would wait for ever for what is lost.
#[test]
fn a_leaver_that_is_cut_off_is_missed() {
    for last in 1..3 {
        let result = stays(Said::new(farewell(last), false));
        assert!(matches!(&result, Err(Error::PeerLost { process: 1, .. })), "{last} of its last markers: {result:?}");
    }
}

/// Who sends sees first that the other process is gone. That one had left, as its last words say.
#[test]
fn what_came_before_a_link_broke_is_read() {
    let goodbye = frame(3, TAG.generation, 0, 1, 0, None, &[]);
    stays(Said::new([farewell(3), goodbye].concat(), true)).unwrap();
}

/// A link whose other end reads nothing, and says what is no frame when the first write blocks.
struct Stuck {
    blocks: (Sender<()>, Receiver<()>),
    gate: (Sender<()>, Receiver<()>),
    /// Dropped with the half that writes.
    writes: Sender<()>,
}

impl Duplex for Stuck {
    fn hangup(&self) -> io::Result<Hangup> {
        let open = self.gate.0.clone();
        Ok(Box::new(move |how| {
            // As for sockets: a write that is blocked goes on being so when only reading ends.
            if how != Shutdown::Read {
                let _ = open.send(());
            }
        }))
    }

    fn split(self: Box<Self>) -> io::Result<(Box<dyn Read + Send>, Box<dyn Write + Send>)> {
        let writer = Blocked { blocks: self.blocks.0, gate: self.gate.1, over: false, _writes: self.writes };
        Ok((Box::new(Garbage(self.blocks.1)), Box::new(writer)))
    }
}

struct Blocked {
    blocks: Sender<()>,
    gate: Receiver<()>,
    over: bool,
    _writes: Sender<()>,
}

impl Write for Blocked {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        if !std::mem::replace(&mut self.over, true) {
            let _ = self.blocks.send(());
            let _ = self.gate.recv();
        }
        Err(io::ErrorKind::BrokenPipe.into())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct Garbage(Receiver<()>);

impl Read for Garbage {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let _ = self.0.recv();
        into.fill(0x41);
        Ok(into.len())
    }
}

/// A process that wants to join breaks the protocol, and reads nothing: the run goes on, and nothing of its link stays.
#[test]
fn nothing_stays_of_a_link_that_broke_the_protocol() {
    let (cluster, mut founded) = Cluster::found(1, 1);
    let (_seats, guard) = founded.remove(0);
    let (writes, gone) = mpsc::channel();
    let stuck = Stuck { blocks: mpsc::channel(), gate: mpsc::channel(), writes };
    cluster.doors[0].clone().unwrap().link(1, Box::new(stuck)).unwrap();
    assert_eq!(gone.recv_timeout(PATIENCE), Err(mpsc::RecvTimeoutError::Disconnected), "its sending thread is there");
    drop(guard);
}

/// Links of simulated processes, whose frames a test moves: by process, and the one at the other end.
#[derive(Default)]
struct Wires(BTreeMap<(usize, usize), Wire>);

impl Wires {
    fn link(&mut self, one: (usize, &Door), two: (usize, &Door)) {
        self.0.insert((one.0, two.0), one.1.wire(two.0).unwrap());
        self.0.insert((two.0, one.0), two.1.wire(one.0).unwrap());
    }

    /// Whether something waits there.
    fn waits(&self, from: usize, to: usize) -> bool {
        self.0[&(from, to)].waiting() > 0
    }

    /// Moves all that waits.
    fn carry(&self, from: usize, to: usize) -> Result<(), Error> {
        let (here, there) = (&self.0[&(from, to)], &self.0[&(to, from)]);
        while here.waiting() > 0 {
            here.take(false);
        }
        here.carry(there, here.under_way())
    }

    /// The same in all directions but that one.
    fn carry_all_but(&self, held: Option<(usize, usize)>) {
        let moved = self.0.keys().filter(|link| Some(**link) != held);
        moved.for_each(|(from, to)| self.carry(*from, *to).unwrap_or_else(|error| panic!("{from} to {to}: {error}")));
    }
}

/// Tries until there is something.
fn until<X>(mut attempt: impl FnMut() -> Option<X>) -> X {
    let began = Instant::now();
    loop {
        if let Some(found) = attempt() {
            return found;
        }
        assert!(began.elapsed() < PATIENCE, "it never comes");
    }
}

/// Two processes join at the same time. The worker of the first is a full member, and gets data of the second one's, before it has read anything
/// of that one: its process has to know the sender all the same.
#[test]
fn data_of_a_joiner_may_come_before_a_worker_has_read_of_it() {
    let (log, mut wires) = (Log::default(), Wires::default());
    let (mut seats, founder, guard) = fabric::simulated_process(0, 1, 1, TAG, 1).unwrap();
    let mut lead = Worker::new(seats.remove(0));
    let (lead_input, _) = numbers(&mut lead, &log);
    lead.bootstrap().unwrap();
    let (_, door, first) = fabric::simulated_process(1, 0, 0, TAG, 2).unwrap();
    wires.link((1, &door), (0, &founder));
    let ticket = door.ask(1).unwrap();
    let seats = until(|| {
        wires.carry_all_but(None);
        lead.step().unwrap();
        ticket.try_seats().unwrap()
    });
    let mut early = Worker::new(seats.into_iter().next().unwrap());
    let (early_input, _) = numbers(&mut early, &log);
    // It asks for a snapshot, then, with its last word, for its place: that is held back, and nothing more is read there.
    for held in [false, true] {
        until(|| {
            assert_eq!(early.try_bootstrap().unwrap(), None);
            let says = wires.waits(1, 0);
            wires.carry_all_but(held.then_some((1, 0)));
            lead.step().unwrap();
            says.then_some(())
        });
    }

    let (_, other, second) = fabric::simulated_process(2, 0, 0, TAG, 3).unwrap();
    wires.link((2, &other), (0, &founder));
    wires.link((2, &other), (1, &door));
    let late_ticket = other.ask(1).unwrap();
    let seats = until(|| {
        wires.carry_all_but(Some((1, 0)));
        lead.step().unwrap();
        late_ticket.try_seats().unwrap()
    });
    let mut late = Worker::new(seats.into_iter().next().unwrap());
    let (mut late_input, _) = numbers(&mut late, &log);
    until(|| {
        wires.carry_all_but(Some((1, 0)));
        lead.step().unwrap();
        late.try_bootstrap().unwrap()
    });
    assert!(!late.has_member(1), "what it asked for was held back");
    until(|| {
        wires.carry_all_but(None);
        lead.step().unwrap();
        late.step().unwrap();
        late.has_member(1).then_some(())
    });
    late_input.send((0..30).collect());
    wires.carry(2, 1).unwrap();

    drop((lead_input, late_input));
    let mut input = Some(early_input);
    until(|| {
        wires.carry_all_but(None);
        let more = [lead.step().unwrap(), late.step().unwrap()];
        if input.is_some() && early.try_bootstrap().unwrap().is_some() {
            input = None;
        }
        let goes_on = input.is_some() || early.step().unwrap() || more.contains(&true);
        (!goes_on).then_some(())
    });
    assert_eq!(sorted(&log), (0..30).map(|number| (number, number as usize % 3)).collect::<Vec<_>>());
    drop((lead, early, late, guard, first, second));
}
