//! Barriers: nobody passes before the last has arrived, nothing else stops meanwhile, and failures end every wait.

use std::net::Shutdown;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::support::{Link, TAG, everywhere, join, mesh, on_mesh, tcp_pair};
use penstock_coord::{Barrier, CoordError};
use penstock_dataflow::fabric::Duplex;
use penstock_dataflow::{BoxError, Error, Worker, execute, fabric};
use proptest::prelude::*;

const LONG: Duration = Duration::from_secs(60);

/// The workers of one fabric, all on this thread.
fn workers(count: usize) -> Vec<Worker> {
    fabric::threads(count).into_iter().map(Worker::new).collect()
}

#[test]
fn one_shot_barriers_release_after_the_last_arrival() {
    for (fabric, results) in everywhere({
        move |worker| {
            // Shared by all workers of all fabrics, which run one after another: each counts up and down again.
            static HERE: AtomicUsize = AtomicUsize::new(0);
            let peers = worker.peers();
            for _ in 0..50 {
                HERE.fetch_add(1, Ordering::SeqCst);
                Barrier::once(worker)?;
                let arrived = HERE.load(Ordering::SeqCst);
                if arrived < peers {
                    return Err(format!("{arrived} of {peers} had arrived").into());
                }
                Barrier::once(worker)?;
                HERE.fetch_sub(1, Ordering::SeqCst);
                Barrier::once(worker)?;
            }
            Ok::<_, BoxError>(worker.dataflows())
        }
    }) {
        assert!(results.iter().all(|live| *live == 0), "{fabric}: {results:?}");
    }
}

#[test]
fn every_round_waits_for_everyone_on_every_fabric() {
    everywhere(|worker| {
        // The last round that each worker arrived for. The fabrics run one after another, and have no more than four workers.
        static ARRIVED: [AtomicUsize; 4] = [const { AtomicUsize::new(0) }; 4];
        ARRIVED[worker.index()].store(0, Ordering::SeqCst);
        let mut barrier = Barrier::new(worker);
        barrier.wait(worker)?;
        for round in 2..=300 {
            ARRIVED[worker.index()].store(round, Ordering::SeqCst);
            if barrier.wait(worker)? != round as u64 {
                return Err("another round".into());
            }
            let others = ARRIVED[..worker.peers()].iter().map(|arrived| arrived.load(Ordering::SeqCst));
            if others.into_iter().any(|arrived| arrived < round) {
                return Err(format!("released from round {round} before everyone arrived").into());
            }
        }
        Ok(())
    });
}

#[test]
fn a_hundred_thousand_rounds_use_one_dataflow() {
    let arrived = Arc::new([AtomicUsize::new(0), AtomicUsize::new(0)]);
    let threads = execute(fabric::threads(2), move |worker| {
        let mut barrier = Barrier::new(worker);
        let (own, other) = (worker.index(), 1 - worker.index());
        for round in 1..=100_000 {
            arrived[own].store(round, Ordering::SeqCst);
            barrier.wait(worker)?;
            let seen = arrived[other].load(Ordering::SeqCst);
            if seen != round && seen != round + 1 {
                return Err(format!("released in round {round} while the other was in {seen}").into());
            }
            if worker.dataflows() != 1 {
                return Err("a dataflow more".into());
            }
        }
        Ok::<_, BoxError>(barrier.round())
    });
    for result in join(threads) {
        assert_eq!(result.unwrap(), 100_000);
    }
}

proptest! {
    /// Workers arrive and step in any order: a round is reached exactly when all have arrived for it and that is known.
    #[test]
    fn a_round_is_reached_after_all_arrived(
        count in 1usize..=16,
        schedule in prop::collection::vec((any::<prop::sample::Index>(), any::<bool>()), 1..400),
        late in any::<Option<u64>>(),
    ) {
        // At once, or after any number of steps and overtaking each other.
        let mut workers = late.map_or_else(
            || workers(count),
            |seed| fabric::shuffled(count, seed).into_iter().map(Worker::new).collect(),
        );
        let mut barriers: Vec<Barrier> = workers.iter_mut().map(Barrier::new).collect();
        for (pick, arrive) in schedule {
            let chosen = pick.index(count);
            if arrive {
                barriers[chosen].advance();
            }
            workers[chosen].step().unwrap();
            let complete = barriers.iter().map(Barrier::round).min().unwrap();
            for barrier in &barriers {
                prop_assert!(!barrier.reached(complete + 1));
            }
        }
        // Once everyone has heard of everything, what is complete is reached everywhere, and nothing else.
        while workers.iter().any(Worker::has_work) {
            for worker in &mut workers {
                worker.step().unwrap();
            }
        }
        let complete = barriers.iter().map(Barrier::round).min().unwrap();
        for barrier in &barriers {
            prop_assert!(barrier.reached(complete) && !barrier.reached(complete + 1));
        }
        drop(barriers);
        for worker in &mut workers {
            while worker.step().unwrap() && worker.has_work() {}
        }
    }
}

#[test]
fn other_dataflows_progress_while_two_workers_wait_for_a_third() {
    let done = join(execute(fabric::threads(3), |worker: &mut Worker| {
        let mut barrier = Barrier::new(worker);
        let (mut input, probe) = worker.dataflow::<u64, _>("flow", |scope| {
            let (input, stream) = scope.new_input::<Vec<u64>>();
            // Twenty hops: each needs a step of another worker.
            let hops = (0..20).fold(stream, |stream, _| {
                stream
                    .exchange_by(|value| *value)
                    .map_blocks(|block| block.into_iter().map(|value| value + 1).collect())
            });
            (input, hops.probe().0)
        });
        input.send((0..10).collect());
        input.close();
        if worker.index() == 2 {
            // Arrives only when the others have worked all of it off while they were waiting.
            worker.step_until(None, || probe.done())?;
        }
        barrier.wait_timeout(worker, LONG)?;
        Ok::<_, BoxError>(probe.done())
    }));
    assert!(done[2].as_ref().is_ok_and(|done| *done), "{done:?}");
    assert!(done.iter().all(Result::is_ok), "{done:?}");
}

#[test]
fn a_dropped_handle_counts_as_arrived() {
    for (fabric, results) in everywhere(|worker| {
        let mut barrier = Barrier::new(worker);
        if worker.index() == 1 {
            barrier.wait(worker)?;
            drop(barrier);
            return Ok(1);
        }
        for _ in 0..100 {
            barrier.wait_timeout(worker, LONG)?;
        }
        Ok(barrier.round())
    }) {
        assert!(
            results.iter().enumerate().all(|(index, rounds)| *rounds == if index == 1 { 1 } else { 100 }),
            "{fabric}"
        );
    }
}

/// Worker 1 panics in its second round, while the others wait in theirs.
fn panicking(worker: &mut Worker) -> Result<(), BoxError> {
    let mut barrier = Barrier::new(worker);
    barrier.wait(worker)?;
    assert!(worker.index() != 1, "enough");
    barrier.wait(worker)?;
    Ok(())
}

#[test]
fn a_panic_ends_the_waits_of_the_others_with_its_cause() {
    let mut results = join(execute(fabric::threads(3), panicking));
    results.extend(on_mesh(mesh(3, 1, Link::Tcp), panicking));
    results.extend(on_mesh(mesh(2, 2, Link::Unix), panicking));
    for result in results {
        assert!(
            matches!(&result, Err(Error::Panic { worker: 1, message, .. }) if message == "enough"),
            "the cause itself, not what the program made of it: {result:?}"
        );
    }
}

#[test]
fn a_lost_process_ends_the_waits_of_the_others() {
    let (left, right) = tcp_pair();
    let cut = left.try_clone().unwrap();
    let streams: [Vec<Option<Box<dyn Duplex>>>; 2] =
        [vec![None, Some(Box::new(left))], vec![Some(Box::new(right)), None]];
    let mut seats =
        streams.into_iter().enumerate().map(|(own, streams)| fabric::processes(own, 1, streams, TAG).unwrap());
    let (mut here, guard) = seats.next().unwrap();
    let (_there, _other_guard) = seats.next().unwrap();
    let mut worker = Worker::new(here.remove(0));
    let mut barrier = Barrier::new(&mut worker);
    assert!(matches!(
        barrier.wait_timeout(&mut worker, Duration::from_millis(20)),
        Err(CoordError::Timeout { round: 1, .. })
    ));
    cut.shutdown(Shutdown::Both).unwrap();
    for _ in 0..2 {
        let outcome = barrier.wait(&mut worker);
        assert!(matches!(outcome, Err(CoordError::Worker(Error::PeerLost { process: 1, .. }))), "{outcome:?}");
    }
    drop((barrier, worker, guard));
}

#[test]
fn after_a_timeout_the_same_round_goes_on() {
    let mut pair = workers(2);
    let mut barriers: Vec<Barrier> = pair.iter_mut().map(Barrier::new).collect();
    let begin = Instant::now();
    for limit in [Duration::from_millis(30), Duration::ZERO, Duration::from_millis(1)] {
        match barriers[0].wait_timeout(&mut pair[0], limit) {
            Err(CoordError::Timeout { round: 1, waited }) => assert_eq!(waited, limit),
            other => panic!("{other:?}"),
        }
    }
    assert!(begin.elapsed() >= Duration::from_millis(31));
    assert_eq!(barriers[0].round(), 1);
    barriers[1].advance();
    pair[1].step().unwrap();
    assert_eq!(barriers[0].wait_timeout(&mut pair[0], LONG).unwrap(), 1);
    // The next one is a new round.
    assert!(matches!(
        barriers[0].wait_timeout(&mut pair[0], Duration::ZERO),
        Err(CoordError::Timeout { round: 2, .. })
    ));
    drop(barriers);
    while pair.iter_mut().filter_map(|worker| worker.step().unwrap().then_some(())).count() > 0 {}
}

#[test]
fn a_timeout_ends_while_another_dataflow_never_rests() {
    let mut pair = workers(2);
    for worker in &mut pair {
        worker.dataflow::<u64, _>("restless", |scope| {
            let mut builder = penstock_dataflow::OperatorBuilder::new(scope, "restless");
            let activator = builder.activator();
            let (_, _stream) = builder.output::<()>();
            builder.build(|capabilities| {
                move |_| {
                    let _ = &capabilities;
                    activator.activate();
                    Ok(())
                }
            });
        });
    }
    let mut barriers: Vec<Barrier> = pair.iter_mut().map(Barrier::new).collect();
    let outcome = barriers[0].wait_timeout(&mut pair[0], Duration::from_millis(5));
    assert!(matches!(outcome, Err(CoordError::Timeout { .. })), "{outcome:?}");
    pair.iter_mut().for_each(Worker::drop_dataflows);
}

#[test]
fn misuse_is_refused_and_changes_nothing() {
    let mut pair = workers(2);
    let mut barriers: Vec<Barrier> = pair.iter_mut().map(Barrier::new).collect();
    let refused = barriers[0].wait_for(&mut pair[0], 3, None);
    assert!(matches!(refused, Err(CoordError::NotArrived { asked: 3, arrived: 0 })), "{refused:?}");
    let refused = barriers[0].wait(&mut pair[1]);
    assert!(matches!(refused, Err(CoordError::OtherWorker { owner: 0, worker: 1, .. })), "{refused:?}");
    assert_eq!(barriers[0].round(), 0);
    pair.iter_mut().for_each(Worker::drop_dataflows);
    let refused = barriers[0].wait(&mut pair[0]);
    assert!(matches!(refused, Err(CoordError::Gone { what: "barrier", worker: 0 })), "{refused:?}");
}

#[test]
fn waiting_long_uses_no_processor() {
    let times = join(execute(fabric::threads(2), |worker: &mut Worker| {
        let mut barrier = Barrier::new(worker);
        barrier.wait(worker)?;
        if worker.index() == 1 {
            // The thing under test is the wait of the other worker, which lasts as long as this.
            std::thread::sleep(Duration::from_millis(400));
        }
        let (before, begin) = (thread_time(), Instant::now());
        barrier.wait(worker)?;
        Ok::<_, BoxError>((thread_time() - before, begin.elapsed()))
    }));
    // Who looks again and again has a processor, or what others leave of one, for all that time.
    let (used, waited) = times.into_iter().next().unwrap().unwrap();
    // Time is told in ticks of 10 ms, and the wait is short where this worker was put aside before it.
    assert!(used <= waited / 8 + Duration::from_millis(20), "{used:?} of processor time in a wait of {waited:?}");
}

/// Processor time of this thread, to 10 ms.
fn thread_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    let ticks: u64 = [11, 12].iter().map(|at| fields[*at].parse::<u64>().unwrap()).sum();
    Duration::from_millis(ticks * 10)
}
