//! What the tests share: fabrics of several kinds, and joining of their threads.
#![allow(dead_code, unreachable_pub)]

use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::thread::JoinHandle;

use penstock_dataflow::fabric::{self, Duplex, Endpoint, FabricGuard, FabricTag};
use penstock_dataflow::{BoxError, Error, Limits, Worker, execute};

pub const TAG: FabricTag = FabricTag { query: 11, generation: 4 };

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    Tcp,
    Unix,
}

pub fn tcp_pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (one, listener.accept().unwrap().0)
}

fn pair(link: Link) -> (Box<dyn Duplex>, Box<dyn Duplex>) {
    match link {
        Link::Tcp => {
            let (one, two) = tcp_pair();
            (Box::new(one), Box::new(two))
        }
        Link::Unix => {
            let (one, two) = UnixStream::pair().unwrap();
            (Box::new(one), Box::new(two))
        }
    }
}

/// Seats and guards by process, all in this test process, over real sockets.
pub fn mesh(processes: usize, threads: usize, link: Link) -> Vec<(Vec<Endpoint>, FabricGuard)> {
    mesh_with(processes, threads, link, Limits::default())
}

pub fn mesh_with(processes: usize, threads: usize, link: Link, limits: Limits) -> Vec<(Vec<Endpoint>, FabricGuard)> {
    let empty = || (0..processes).map(|_| None).collect();
    let mut streams: Vec<Vec<Option<Box<dyn Duplex>>>> = (0..processes).map(|_| empty()).collect();
    for (one, two) in (0..processes).flat_map(|one| (one + 1..processes).map(move |two| (one, two))) {
        let (left, right) = pair(link);
        streams[one][two] = Some(left);
        streams[two][one] = Some(right);
    }
    let seats = streams.into_iter().enumerate();
    seats.map(|(process, streams)| fabric::processes_with(process, threads, streams, TAG, limits).unwrap()).collect()
}

pub fn join<R>(threads: Vec<JoinHandle<Result<R, Error>>>) -> Vec<Result<R, Error>> {
    threads.into_iter().map(|thread| thread.join().expect("workers catch panics")).collect()
}

/// Runs a program on every kind of fabric: one thread, several, processes over TCP and Unix sockets. The results by fabric.
pub fn everywhere<R, F>(program: F) -> Vec<(String, Vec<R>)>
where
    R: Send + 'static,
    F: Fn(&mut Worker) -> Result<R, BoxError> + Send + Sync + Clone + 'static,
{
    let mut results = Vec::new();
    for workers in [1, 2, 3] {
        let done = join(execute(fabric::threads(workers), program.clone()));
        results.push((format!("{workers} threads"), done.into_iter().map(Result::unwrap).collect()));
    }
    // Sockets are not for miri.
    let meshes = if cfg!(miri) { 0 } else { 3 };
    for (processes, threads, link) in
        [(2, 1, Link::Tcp), (2, 2, Link::Unix), (3, 1, Link::Unix)].into_iter().take(meshes)
    {
        let name = format!("{processes} processes of {threads} over {link:?}");
        results.push((
            name,
            on_mesh(mesh(processes, threads, link), program.clone()).into_iter().map(Result::unwrap).collect(),
        ));
    }
    results
}

/// Runs a program on all workers of a mesh; the guards leave, each from its own thread, once its workers are done.
pub fn on_mesh<R, F>(mesh: Vec<(Vec<Endpoint>, FabricGuard)>, program: F) -> Vec<Result<R, Error>>
where
    R: Send + 'static,
    F: Fn(&mut Worker) -> Result<R, BoxError> + Send + Sync + Clone + 'static,
{
    let processes = mesh.into_iter().map(|(endpoints, guard)| {
        let program = program.clone();
        std::thread::spawn(move || {
            let results = join(execute(endpoints, program));
            drop(guard);
            results
        })
    });
    let processes: Vec<_> = processes.collect();
    processes.into_iter().flat_map(|process| process.join().unwrap()).collect()
}
