//! How runs end together: one cause when several fail, seats without workers, graphs without sources.

use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use crate::support::{Link, TAG, join, mesh, on_mesh, tcp_pair};
use penstock_dataflow::fabric::Duplex;
use penstock_dataflow::{BoxError, Error, InputHandle, Pipeline, Worker, execute, fabric};
use penstock_progress::timestamp::Product;

#[derive(Debug, thiserror::Error)]
#[error("value {0} is not wanted")]
struct Unwanted(u64);

/// All workers fail at the same moment, each with a cause of its own.
#[test]
fn failures_at_the_same_time_have_one_cause() {
    let rounds = if cfg!(miri) { 1 } else { 15 };
    let program = |begin: Arc<Barrier>, in_operator: bool| {
        move |worker: &mut Worker| -> Result<(), BoxError> {
            let me = worker.index() as u64;
            let mut input = worker.dataflow::<u64, _>("flow", |scope| {
                let (handle, stream) = scope.new_input::<u64>();
                stream.sink(Pipeline, "picky", move |input, _| match input.next() {
                    Some(_) => Err(Unwanted(me).into()),
                    None => Ok(()),
                });
                handle
            });
            begin.wait();
            if !in_operator {
                return Err(Unwanted(me).into());
            }
            input.send(1);
            while worker.step_or_park(None)? {}
            Ok(())
        }
    };
    for round in 0..rounds {
        let in_operator = round % 2 == 0;
        let begin = || Arc::new(Barrier::new(4));
        let mut all = vec![join(execute(fabric::threads(4), program(begin(), in_operator)))];
        if !cfg!(miri) {
            all.push(on_mesh(mesh(4, 1, Link::Unix), program(begin(), in_operator)));
            all.push(on_mesh(mesh(2, 2, Link::Tcp), program(begin(), in_operator)));
        }
        for results in all {
            let texts: Vec<String> = results.into_iter().map(|result| result.unwrap_err().to_string()).collect();
            assert!(texts.iter().all(|text| *text == texts[0]), "round {round}: {texts:?}");
            assert!(texts[0].contains("is not wanted"), "{texts:?}");
        }
    }
}

/// Nothing holds back a graph in which nothing can happen, so one process could be done before another has built it.
#[test]
fn a_graph_without_sources_ends_when_all_have_built_it() {
    let mut sides = mesh(2, 1, Link::Unix).into_iter();
    let ((mut here, guard), (mut there, other)) = (sides.next().unwrap(), sides.next().unwrap());
    let build = |worker: &mut Worker| worker.dataflow::<u64, _>("empty", |_| ());
    let (mut first, mut second) = (Worker::new(here.remove(0)), Worker::new(there.remove(0)));
    build(&mut first);
    assert!(matches!(first.step(), Ok(true)), "the other process has not built it");
    build(&mut second);
    for worker in [&mut first, &mut second] {
        while worker.step_or_park(Some(Duration::from_secs(20))).unwrap() {}
    }
    let leaves = std::thread::spawn(move || drop(guard));
    drop((first, second, other));
    leaves.join().unwrap();
    // Processes that build it at any moment, and leave at once.
    for _ in 0..10 {
        let program = move |worker: &mut Worker| -> Result<(), BoxError> {
            build(worker);
            while worker.step_or_park(None)? {}
            build(worker);
            Ok(())
        };
        assert!(on_mesh(mesh(3, 1, Link::Unix), program).iter().all(Result::is_ok));
        assert!(join(execute(fabric::threads(3), program)).iter().all(Result::is_ok));
    }
}

#[test]
fn a_graph_without_sources_that_differs_is_noticed() {
    let program = |worker: &mut Worker| -> Result<(), BoxError> {
        let odd = worker.index() == 1;
        worker.dataflow::<u64, _>("empty", |scope| {
            if odd {
                scope.nested::<Product<u64, u64>, _>("inner", |_| ());
            }
        });
        while worker.step_or_park(None)? {}
        Ok(())
    };
    let mut results = join(execute(fabric::threads(2), program));
    results.extend(on_mesh(mesh(2, 1, Link::Unix), program));
    for result in results {
        // Over processes the news may come as an abort that carries it.
        let error = result.unwrap_err();
        assert!(matches!(error, Error::GraphMismatch { .. } | Error::Aborted { .. }), "{error:?}");
        assert!(error.to_string().contains("the graphs differ"), "{error}");
    }
}

/// Steps until the worker reports an error, never parking for long: what is never reported ends the test.
fn until_error(worker: &mut Worker) -> Error {
    let begin = Instant::now();
    loop {
        match worker.step_or_park(Some(Duration::from_millis(50))) {
            Ok(_) => assert!(begin.elapsed() < Duration::from_secs(20), "it waits for ever"),
            Err(error) => return error,
        }
    }
}

fn waiting(worker: &mut Worker) -> InputHandle<u64, Vec<u64>> {
    worker.dataflow::<u64, _>("flow", |scope| scope.new_input::<Vec<u64>>().0)
}

fn is_about(error: &Error, index: usize, what: &str) -> bool {
    matches!(error, Error::Aborted { worker, reason } if *worker == index && reason.contains(what))
}

#[test]
fn a_seat_without_a_worker_stops_its_peers() {
    let mut seats = fabric::threads(2);
    let mut stays = Worker::new(seats.remove(0));
    let _input = waiting(&mut stays);
    drop(seats);
    let error = until_error(&mut stays);
    assert!(is_about(&error, 1, "its seat was dropped"), "{error:?}");
    // Seats of whose workers none was made end nothing but themselves.
    drop(fabric::threads(3));
}

#[test]
fn a_seat_without_a_worker_stops_the_other_processes() {
    // The seat goes before its guard, and after it.
    for guard_first in [false, true] {
        let mut sides = mesh(2, 2, Link::Unix).into_iter();
        let ((mut here, guard), (there, other)) = (sides.next().unwrap(), sides.next().unwrap());
        let mut stays = Worker::new(here.remove(0));
        let mut beside = Worker::new(here.remove(0));
        let _inputs = (waiting(&mut stays), waiting(&mut beside));
        // Its own thread: leaving waits for the goodbye of the side that is stepped here.
        let leaves = std::thread::spawn(move || if guard_first { drop((other, there)) } else { drop((there, other)) });
        let wanted = if guard_first { "left before its workers were made" } else { "its seat was dropped" };
        for worker in [&mut stays, &mut beside] {
            let error = until_error(worker);
            assert!(is_about(&error, 2, wanted), "{error:?}");
        }
        drop((stays, beside, guard));
        leaves.join().unwrap();
    }
}

#[test]
fn a_process_whose_set_up_fails_says_no_goodbye() {
    let (ours, theirs) = tcp_pair();
    let (seats, guard) = fabric::processes(0, 1, vec![None, Some(Box::new(ours))], TAG).unwrap();
    let fails = std::thread::spawn(move || {
        // The stream to process 0 is set up, the one to process 2 is not there.
        struct Broken;
        impl Duplex for Broken {
            fn split(
                self: Box<Self>,
            ) -> std::io::Result<(Box<dyn std::io::Read + Send>, Box<dyn std::io::Write + Send>)> {
                Err(std::io::Error::other("broken"))
            }
            fn hangup(&self) -> std::io::Result<fabric::Hangup> {
                Ok(Box::new(|_| ()))
            }
        }
        let error =
            fabric::processes(1, 1, vec![Some(Box::new(theirs)), None, Some(Box::new(Broken))], TAG).unwrap_err();
        assert!(matches!(error, Error::Setup { .. }), "{error:?}");
    });
    let mut stays = Worker::new(seats.into_iter().next().unwrap());
    let _input = waiting(&mut stays);
    let error = until_error(&mut stays);
    assert!(is_about(&error, 1, "left before its workers were made"), "{error:?}");
    drop((stays, guard));
    fails.join().unwrap();
}
