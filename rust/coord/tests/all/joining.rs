//! A barrier and a sequencer across joins and leaves, of threads and of processes over TCP.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use penstock_coord::{Barrier, CoordError, Entry, Sequencer};
use penstock_dataflow::{BoxError, Error, Worker, execute_joinable};

use crate::linked::Linked;

/// Runs a program on so many founders; one worker more joins when `come` says so. The results by worker.
fn run<R: Send + 'static>(
    apart: bool,
    founders: usize,
    come: &mpsc::Receiver<()>,
    program: impl Fn(&mut Worker) -> Result<R, BoxError> + Send + Sync + 'static,
) -> Vec<Result<R, Error>> {
    let results = if apart {
        let mut run = Linked::found(founders, 1, program);
        come.recv().unwrap();
        assert_eq!(run.join(1), [founders]);
        run.finish()
    } else {
        let mut run = execute_joinable(founders, program);
        come.recv().unwrap();
        assert_eq!(run.join(1).unwrap(), [founders]);
        run.finish()
    };
    results.into_iter().map(|(_, result)| result).collect()
}

/// Nobody passes a round before everybody who takes part has arrived for it; joiners begin with the round of their peer, and a leaver is not waited for.
#[test]
fn rounds_are_those_of_all_who_take_part() {
    [false, true].into_iter().for_each(rounds);
}

fn rounds(apart: bool) {
    let arrived: Arc<Mutex<BTreeMap<usize, u64>>> = Arc::default();
    let (third, come) = mpsc::channel();
    let (rounds, third) = (arrived.clone(), Mutex::new(third));
    let ends = run(apart, 2, &come, move |worker: &mut Worker| {
        let mut barrier = Barrier::new(worker);
        let index = worker.index();
        let joined = worker.bootstrap()?;
        rounds.lock().unwrap().insert(index, barrier.round());
        assert_eq!(barrier.round(), if joined { 3 } else { 0 });
        while barrier.round() < 20 {
            if index == 0 && barrier.round() == 3 {
                third.lock().unwrap().send(()).unwrap();
                while worker.peers() < 3 {
                    worker.step_or_park(None)?;
                }
            }
            if index == 0 && barrier.round() == 10 {
                rounds.lock().unwrap().remove(&index);
                worker.leave()?;
                return Ok(10);
            }
            rounds.lock().unwrap().insert(index, barrier.round() + 1);
            let round = barrier.wait(worker)?;
            let late = rounds.lock().unwrap().iter().find(|(_, arrived)| **arrived < round).map(|(who, _)| *who);
            assert_eq!(late, None, "worker {index} has passed round {round}");
        }
        Ok(barrier.round())
    });
    let ends: Vec<u64> = ends.into_iter().map(Result::unwrap).collect();
    assert_eq!(ends, [10, 20, 20]);
}

/// A barrier that a joiner's peer had closed is closed for it, too: it says so, and its rounds are heard by nobody.
#[test]
fn a_barrier_that_was_closed_is_of_no_use_to_who_joins() {
    let (third, come) = mpsc::channel();
    let third = Mutex::new(third);
    let ends = run(false, 1, &come, move |worker: &mut Worker| {
        // Another one, so that the run is not over.
        let (mut barrier, open) = (Some(Barrier::new(worker)), Barrier::new(worker));
        let joined = worker.bootstrap()?;
        if !joined {
            assert!(open.usable().is_ok() && barrier.take().is_some_and(|barrier| barrier.usable().is_ok()));
            worker.step()?;
            third.lock().unwrap().send(())?;
        }
        while worker.peers() < 2 {
            worker.step_or_park(None)?;
        }
        assert!(open.usable().is_ok());
        let Some(mut barrier) = barrier else { return Ok(false) };
        assert!(matches!(barrier.usable(), Err(CoordError::Ended { what: "barrier", worker: 1 })));
        assert!(matches!(barrier.wait(worker), Err(CoordError::Ended { .. })));
        Ok(joined)
    });
    assert_eq!(ends.into_iter().map(Result::unwrap).collect::<Vec<_>>(), [false, true]);
}

/// A round that was not reached when the worker has left will not be: the wait has an end.
#[test]
fn who_leaves_does_not_wait_for_a_round_for_ever() {
    let (over, left) = mpsc::channel();
    let (over, left) = (Mutex::new(over), Mutex::new(left));
    let run = execute_joinable(2, move |worker: &mut Worker| {
        let mut barrier = Barrier::new(worker);
        worker.bootstrap()?;
        if worker.index() == 0 {
            worker.start_leaving()?;
            let waited = barrier.wait_timeout(worker, Duration::from_secs(60));
            over.lock().unwrap().send(())?;
            assert!(matches!(waited, Err(CoordError::Gone { what: "barrier", worker: 0 })), "{waited:?}");
            assert!(worker.has_left());
        } else {
            // Its handle lives, and has not arrived.
            while left.lock().unwrap().try_recv().is_err() {
                worker.step_or_park(Some(Duration::from_millis(1)))?;
            }
        }
        Ok::<_, BoxError>(barrier.round())
    });
    let rounds: Vec<u64> = run.finish().into_iter().map(|(_, result)| result.unwrap()).collect();
    assert_eq!(rounds, [1, 0]);
}

/// One order for all: what a joiner reads is the end of what the others read, what a leaver reads its beginning, and nothing that was pushed is missing.
#[test]
fn a_joiner_reads_on_where_its_peer_stood() {
    [false, true].into_iter().for_each(one_order);
}

fn one_order(apart: bool) {
    let (some, come) = mpsc::channel();
    let some = Mutex::new(some);
    type Log = Vec<Entry<(usize, u64)>>;
    let logs = run(apart, 3, &come, move |worker: &mut Worker| {
        let mut sequencer: Sequencer<(usize, u64)> = Sequencer::new(worker);
        let index = worker.index();
        worker.bootstrap()?;
        let mut log: Log = Vec::new();
        for number in 0..200 {
            sequencer.push((index, number))?;
            worker.step()?;
            log.extend(std::iter::from_fn(|| sequencer.next_entry()));
            if index == 1 && number == 50 {
                some.lock().unwrap().send(()).unwrap();
            }
            // Nobody leaves before all know the joiner.
            while number == 51 && index < 3 && worker.peers() < 4 {
                worker.step_or_park(None)?;
            }
            if index == 0 && number == 150 {
                worker.leave()?;
                log.extend(std::iter::from_fn(|| sequencer.next_entry()));
                return Ok(log);
            }
        }
        sequencer.close();
        while worker.step_or_park(None)? {}
        log.extend(std::iter::from_fn(|| sequencer.next_entry()));
        Ok(log)
    });
    let mut logs: Vec<Log> = logs.into_iter().map(Result::unwrap).collect();
    let (joiner, leaver) = (logs.remove(3), logs.remove(0));
    assert_eq!(logs[0], logs[1]);
    assert_eq!(logs[0].len(), 151 + 3 * 200);
    assert!(logs[0].starts_with(&leaver), "a leaver reads the beginning");
    assert!(logs[0].ends_with(&joiner) && joiner.len() > 200, "a joiner reads the end");
    for pusher in 0..4 {
        let pushed: Vec<u64> = logs[0].iter().filter(|e| e.element.0 == pusher).map(|e| e.element.1).collect();
        assert_eq!(pushed, (0..if pusher == 0 { 151 } else { 200 }).collect::<Vec<_>>());
    }
}

/// All inputs close before the joiner has learnt what stands in the log: it waits for that, and reads the end of the log.
#[test]
fn a_log_that_all_close_at_once_has_an_end_for_the_joiner() {
    for round in 0..60 {
        let (third, come) = mpsc::channel();
        let third = Mutex::new(third);
        let logs = run(round % 4 == 3, 2, &come, move |worker: &mut Worker| {
            let mut log: Sequencer<u64> = Sequencer::new(worker);
            worker.bootstrap()?;
            if worker.index() == 0 {
                third.lock().unwrap().send(())?;
            }
            if round % 3 == 1 && worker.index() == 1 {
                log.push(7)?;
            }
            while worker.peers() < 3 {
                worker.step_or_park(None)?;
            }
            if round % 2 == 0 && worker.index() == 0 {
                log.push(9)?;
            }
            log.close();
            let mut read = Vec::new();
            while let Some(element) = log.wait_next(worker, None)? {
                read.push(element);
            }
            Ok(read)
        });
        let logs: Vec<Vec<u64>> = logs.into_iter().map(Result::unwrap).collect();
        assert_eq!(logs[0], logs[1], "round {round}");
        assert!(logs[0].ends_with(&logs[2]), "round {round}: {logs:?}");
        assert_eq!(logs[0].len(), usize::from(round % 3 == 1) + usize::from(round % 2 == 0), "round {round}: {logs:?}");
    }
}

/// A log that was over before the joiner came is over for it as well.
#[test]
fn a_log_that_is_over_is_over_for_who_joins() {
    for apart in [false, true] {
        let (third, come) = mpsc::channel();
        let third = Mutex::new(third);
        let logs = run(apart, 2, &come, move |worker: &mut Worker| {
            let mut log: Sequencer<u64> = Sequencer::new(worker);
            let mut other: Sequencer<u64> = Sequencer::new(worker);
            let joined = worker.bootstrap()?;
            let mut read = Vec::new();
            if !joined {
                log.push(worker.index() as u64)?;
            }
            log.close();
            while let Some(element) = log.wait_next(worker, None)? {
                read.push(element);
            }
            if worker.index() == 0 {
                third.lock().unwrap().send(())?;
            }
            while worker.peers() < 3 {
                worker.step_or_park(None)?;
            }
            other.close();
            while other.wait_next(worker, None)?.is_some() {}
            Ok(read)
        });
        let lengths: Vec<usize> = logs.into_iter().map(|log| log.unwrap().len()).collect();
        assert_eq!(lengths, [2, 2, 0], "apart {apart}");
    }
}
