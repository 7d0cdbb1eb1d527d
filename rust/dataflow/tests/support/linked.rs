//! A run over TCP that processes join. They are threads here, and share nothing but sockets of loopback. For tests of several crates.
#![allow(dead_code, unreachable_pub)]

use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread::JoinHandle;

use penstock_dataflow::fabric::{self, Duplex};
use penstock_dataflow::{BoxError, Door, Endpoint, Error, FabricGuard, FabricTag, Limits, Worker, execute};

const TAG: FabricTag = FabricTag { query: 12, generation: 1 };

type Program<R> = Arc<dyn Fn(&mut Worker) -> Result<R, BoxError> + Send + Sync>;

/// What the workers of one process returned, by index.
type Results<R> = Vec<(usize, Result<R, Error>)>;

/// See the module.
pub struct Linked<R> {
    doors: Vec<Door>,
    program: Program<R>,
    processes: Vec<JoinHandle<Results<R>>>,
}

fn pair() -> (Box<dyn Duplex>, Box<dyn Duplex>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (Box::new(ours), Box::new(listener.accept().unwrap().0))
}

impl<R: Send + 'static> Linked<R> {
    /// Founds processes of `threads` workers each.
    pub fn found(
        processes: usize,
        threads: usize,
        program: impl Fn(&mut Worker) -> Result<R, BoxError> + Send + Sync + 'static,
    ) -> Self {
        let mut run = Linked { doors: Vec::new(), program: Arc::new(program), processes: Vec::new() };
        let empty = || (0..processes).map(|_| None).collect::<Vec<Option<Box<dyn Duplex>>>>();
        let mut streams: Vec<_> = (0..processes).map(|_| empty()).collect();
        for (one, two) in (0..processes).flat_map(|one| (one + 1..processes).map(move |two| (one, two))) {
            let (left, right) = pair();
            (streams[one][two], streams[two][one]) = (Some(left), Some(right));
        }
        for (process, streams) in streams.into_iter().enumerate() {
            let (seats, door, guard) = fabric::joinable_processes(process, threads, streams, TAG).unwrap();
            run.doors.push(door);
            run.start(seats, guard);
        }
        run
    }

    fn start(&mut self, seats: Vec<Endpoint>, guard: FabricGuard) {
        let program = self.program.clone();
        self.processes.push(std::thread::spawn(move || {
            let indices: Vec<usize> = seats.iter().map(Endpoint::index).collect();
            let threads = execute(seats, move |worker: &mut Worker| program(worker));
            let results = threads.into_iter().map(|thread| thread.join().expect("workers catch panics"));
            let results = indices.into_iter().zip(results).collect();
            drop(guard);
            results
        }));
    }

    /// Lets a process of so many workers join, and returns their indices.
    pub fn join(&mut self, count: usize) -> Vec<usize> {
        let process = self.doors.len();
        let dial = |(other, door): (usize, &Door)| {
            let (ours, theirs) = pair();
            door.link(process, theirs).unwrap();
            (other, ours)
        };
        let streams = self.doors.iter().enumerate().map(dial).collect();
        let (door, guard) = fabric::join_processes(process, streams, TAG, Limits::default()).unwrap();
        self.doors.push(door.clone());
        let seats = door.ask(count).unwrap().seats().unwrap();
        let indices = seats.iter().map(Endpoint::index).collect();
        self.start(seats, guard);
        indices
    }

    /// Waits for the end of all programs: what each worker returned, by index.
    pub fn finish(self) -> Results<R> {
        let mut results: Results<R> =
            self.processes.into_iter().flat_map(|process| process.join().expect("no panic")).collect();
        results.sort_by_key(|(index, _)| *index);
        results
    }
}
