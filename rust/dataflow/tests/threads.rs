//! Threads and sockets end with their fabric. A test program of its own, and one test: it counts those of the whole process.

mod support;

use std::time::Instant;

use penstock_dataflow::fabric::{self, Duplex, FabricGuard};
use penstock_dataflow::{BoxError, Door, Endpoint, Limits, Worker};
use support::{Link, TAG, mesh, on_mesh, tcp_pair};

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

fn sockets() -> usize {
    let open = std::fs::read_dir("/proc/self/fd").unwrap();
    let links = open.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
    links.filter(|target| target.to_string_lossy().starts_with("socket:")).count()
}

/// A thread that was joined may be listed for a moment longer.
fn wait_for_threads(expected: usize) {
    let begun = Instant::now();
    while threads() != expected {
        assert!(begun.elapsed().as_secs() < 20, "{} threads where {expected} are to be", threads());
        std::thread::yield_now();
    }
}

#[test]
fn threads_and_sockets_end_with_their_fabric() {
    no_thread_or_socket_is_left_after_success_failure_or_an_unused_fabric();
    fifty_fabrics_leave_no_socket_though_their_doors_are_kept();
    processes_that_came_and_went_leave_no_socket_in_a_run_that_goes_on();
}

fn no_thread_or_socket_is_left_after_success_failure_or_an_unused_fabric() {
    let (before, sockets_before) = (threads(), sockets());
    #[derive(Clone, Copy, PartialEq)]
    enum Fails {
        Not,
        Program,
        Operator,
        Constructor,
    }
    let program = |fails: Fails| {
        move |worker: &mut Worker| -> Result<(), BoxError> {
            let worker_is_bad = worker.index() == 1;
            let mut input = worker.dataflow::<u64, _>("flow", |scope| {
                let (handle, stream) = scope.new_input::<Vec<u64>>();
                let bad = worker_is_bad;
                stream.exchange_by(|value| *value).inspect(move |_, _| assert!(!bad || fails != Fails::Operator));
                assert!(!bad || fails != Fails::Constructor);
                handle
            });
            for epoch in 1..20 {
                input.send((0..100).collect());
                input.advance_to(epoch)?;
                worker.step()?;
                if fails == Fails::Program && worker_is_bad && epoch == 10 {
                    return Err("enough".into());
                }
            }
            Ok(())
        }
    };
    for link in [Link::Tcp, Link::Unix] {
        assert!(on_mesh(mesh(3, 2, link), program(Fails::Not)).iter().all(Result::is_ok));
        for fails in [Fails::Program, Fails::Operator, Fails::Constructor] {
            assert!(on_mesh(mesh(3, 2, link), program(fails)).iter().all(Result::is_err));
        }
        let unused = mesh(2, 1, link);
        wait_for_threads(before + 6);
        drop(unused);
    }
    wait_for_threads(before);
    assert_eq!(sockets(), sockets_before);
}

fn boxed((one, two): (std::net::TcpStream, std::net::TcpStream)) -> (Box<dyn Duplex>, Box<dyn Duplex>) {
    (Box::new(one), Box::new(two))
}

/// Two founders of one worker each.
fn founders() -> Vec<(Vec<Endpoint>, Door, FabricGuard)> {
    let (left, right) = boxed(tcp_pair());
    let streams = [vec![None, Some(left)], vec![Some(right), None]];
    let founded = streams.into_iter().enumerate();
    founded.map(|(process, streams)| fabric::joinable_processes(process, 1, streams, TAG).unwrap()).collect()
}

fn fifty_fabrics_leave_no_socket_though_their_doors_are_kept() {
    let before = sockets();
    let doors: Vec<Door> = (0..50)
        .flat_map(|_| {
            drop(mesh(2, 1, Link::Tcp));
            let (doors, fabrics): (Vec<_>, Vec<_>) =
                founders().into_iter().map(|(seats, door, guard)| (door, (guard, seats))).unzip();
            // Each leaves from its own thread: they answer each other.
            let leaving: Vec<_> = fabrics.into_iter().map(|fabric| std::thread::spawn(move || drop(fabric))).collect();
            leaving.into_iter().for_each(|thread| thread.join().unwrap());
            doors
        })
        .collect();
    assert_eq!((doors.len(), sockets()), (100, before));
}

/// What a process that left leaves behind is one socket a link, until the next one comes.
fn processes_that_came_and_went_leave_no_socket_in_a_run_that_goes_on() {
    let founders = founders();
    let (threads_before, sockets_before) = (threads(), sockets());
    for process in 2..52 {
        let mut streams = Vec::new();
        for (other, (_, door, _)) in founders.iter().enumerate() {
            let (ours, theirs) = boxed(tcp_pair());
            door.link(process, theirs).unwrap();
            streams.push((other, ours));
        }
        drop(fabric::join_processes(process, streams, TAG, Limits::default()).unwrap());
        wait_for_threads(threads_before);
        // Two, where the threads of the one before were not seen to be over when this one came.
        let most = sockets_before + 2 * founders.len();
        assert!(sockets() <= most, "{} sockets, {sockets_before} before", sockets());
    }
}
