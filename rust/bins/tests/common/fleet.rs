//! Workers for tests: threads of one process, or of several processes that talk over TCP or only pretend to be apart.

use std::net::{TcpListener, TcpStream};
use std::sync::Arc;

use penstock_bins::{BinState, Shelf, Stats};
use penstock_dataflow::fabric::{self, Duplex};
use penstock_dataflow::{BoxError, Endpoint, Error, FabricGuard, FabricTag, Worker, execute};

/// How the workers are spread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// All in one process.
    Threads(usize),
    /// Threads of this process that treat each other as `processes` processes: bins cross as chunks, originals are retained.
    Apart { processes: usize, threads: usize },
    /// Over loopback TCP.
    Tcp { processes: usize, threads: usize },
}

impl Layout {
    pub fn workers(self) -> usize {
        self.processes() * self.threads()
    }

    pub fn processes(self) -> usize {
        match self {
            Self::Threads(_) => 1,
            Self::Apart { processes, .. } | Self::Tcp { processes, .. } => processes,
        }
    }

    pub fn threads(self) -> usize {
        match self {
            Self::Threads(threads) | Self::Apart { threads, .. } | Self::Tcp { threads, .. } => threads,
        }
    }

    pub fn process_of(self, worker: usize) -> usize {
        worker / self.threads()
    }
}

/// What the workers of one process share.
pub struct Process<S: BinState> {
    pub layout: Layout,
    pub shelf: Shelf<S>,
    pub stats: Arc<Stats<u64>>,
}

impl<S: BinState> Clone for Process<S> {
    fn clone(&self) -> Self {
        Self { layout: self.layout, shelf: self.shelf.clone(), stats: Arc::clone(&self.stats) }
    }
}

/// Counters by process.
pub type ProcessStats = Vec<Arc<Stats<u64>>>;

/// Runs `program` on all workers; the results by worker. `shelves` has one per process.
pub fn run<S, R>(
    layout: Layout,
    shelves: &[Shelf<S>],
    program: impl Fn(&mut Worker, &Process<S>) -> Result<R, BoxError> + Clone + Send + Sync + 'static,
) -> (Vec<Result<R, Error>>, ProcessStats)
where
    S: BinState,
    R: Send + 'static,
{
    assert_eq!(shelves.len(), layout.processes());
    let processes: Vec<Process<S>> =
        shelves.iter().map(|shelf| Process { layout, shelf: shelf.clone(), stats: Arc::new(Stats::new()) }).collect();
    let stats = processes.iter().map(|process| Arc::clone(&process.stats)).collect();
    let threads: Vec<_> = fabrics(layout)
        .into_iter()
        .map(|(endpoints, guard)| {
            let (processes, program) = (processes.clone(), program.clone());
            std::thread::spawn(move || {
                let program = move |worker: &mut Worker| program(worker, &processes[layout.process_of(worker.index())]);
                let results: Vec<_> = execute(endpoints, program).into_iter().map(|t| t.join().unwrap()).collect();
                drop(guard);
                results
            })
        })
        .collect();
    (threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect(), stats)
}

fn fabrics(layout: Layout) -> Vec<(Vec<Endpoint>, Option<FabricGuard>)> {
    let Layout::Tcp { processes, threads } = layout else {
        return vec![(fabric::threads(layout.workers()), None)];
    };
    let mut streams: Vec<Vec<Option<Box<dyn Duplex>>>> =
        (0..processes).map(|_| (0..processes).map(|_| None).collect()).collect();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    for (one, other) in (0..processes).flat_map(|one| (0..one).map(move |other| (one, other))) {
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        streams[one][other] = Some(Box::new(near));
        streams[other][one] = Some(Box::new(listener.accept().unwrap().0));
    }
    let tag = FabricTag { query: 7, generation: 1 };
    let build = |(process, streams)| fabric::processes(process, threads, streams, tag).unwrap();
    streams.into_iter().enumerate().map(build).map(|(endpoints, guard)| (endpoints, Some(guard))).collect()
}

/// A shelf for each process.
pub fn shelves<S: BinState>(layout: Layout) -> Vec<Shelf<S>> {
    (0..layout.processes()).map(|_| Shelf::new()).collect()
}
