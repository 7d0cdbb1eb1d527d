//! Sequencers: one order for everyone, nothing before its time, and nobody who waits for a silent or a departed worker.

#[path = "../common/naive.rs"]
mod naive;

use std::time::Duration;

use crate::support::{Link, everywhere, join, mesh, on_mesh};
use naive::{Naive, Placed};
use penstock_coord::{Barrier, CoordError, Sequencer};
use penstock_dataflow::{BoxError, Error, Exchange, OperatorBuilder, Worker, execute, fabric};
use proptest::prelude::*;
use serde::{Deserialize, Serialize};

const LONG: Duration = Duration::from_secs(60);

fn workers(count: usize) -> Vec<Worker> {
    fabric::threads(count).into_iter().map(Worker::new).collect()
}

fn sequencers<T>(workers: &mut [Worker]) -> Vec<Sequencer<T>>
where
    T: Serialize + for<'a> Deserialize<'a> + Send + Clone + 'static,
{
    workers.iter_mut().map(Sequencer::new).collect()
}

/// Steps all workers, in turns, until none has anything to do.
fn settle(workers: &mut [Worker]) {
    while workers.iter().any(Worker::has_work) {
        for worker in &mut *workers {
            worker.step().unwrap();
        }
    }
}

fn read<T>(sequencer: &mut Sequencer<T>, log: &mut Vec<Placed<T>>) {
    while let Some(entry) = sequencer.next_entry() {
        log.push((entry.time, entry.worker, entry.index, entry.element));
    }
}

/// A generator of the tests' own: equal on all machines.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound
    }
}

proptest! {
    /// Any schedule of pushes and steps gives every worker the log of the naive twin, and nothing before its time.
    #[test]
    fn logs_equal_the_naive_twin_under_any_schedule(
        count in 1usize..=16,
        seed in any::<u64>(),
        actions in 1usize..600,
    ) {
        let mut random = Random(seed);
        let mut workers = workers(count);
        let mut sequencers = sequencers::<u64>(&mut workers);
        let mut twin = Naive::new(count);
        let mut logs = vec![Vec::new(); count];
        // Each worker's weight: some are nearly silent, some hardly step.
        let weights: Vec<(u64, u64)> = (0..count).map(|_| (random.below(4), 1 + random.below(6))).collect();
        for value in 0..actions as u64 {
            let worker = random.below(count as u64) as usize;
            for place in 0..random.below(weights[worker].0 + 1) {
                sequencers[worker].push(value * 10 + place).unwrap();
                twin.push(worker, value * 10 + place);
            }
            if random.below(weights[worker].1) == 0 {
                workers[worker].step().unwrap();
                twin.step(worker);
                let had = logs[worker].len();
                read(&mut sequencers[worker], &mut logs[worker]);
                // Whoever could still send something before it has moved beyond it.
                let least = sequencers.iter().filter_map(Sequencer::time).min().unwrap();
                for released in &logs[worker][had..] {
                    prop_assert!(released.0 < least, "released {released:?} while someone is at {least}");
                }
            }
            for (sequencer, counter) in sequencers.iter().zip(&twin.counters) {
                prop_assert_eq!(sequencer.time(), Some(*counter));
            }
        }
        // Each round may let one more worker tell what it kept back while it could move no frontier.
        let rounds = 4 + count;
        for round in 1..=rounds {
            for worker in 0..count {
                workers[worker].step().unwrap();
                twin.step(worker);
                read(&mut sequencers[worker], &mut logs[worker]);
            }
            prop_assert!(round < rounds || !workers.iter().any(Worker::has_work));
        }
        let expected = twin.log();
        for log in &logs {
            prop_assert_eq!(log, &expected);
        }
        drop(sequencers);
        settle(&mut workers);
        prop_assert!(workers.iter().all(|worker| worker.dataflows() == 0));
    }
}

proptest! {
    #![proptest_config(penstock_cases::cases(128))]

    /// Messages take any number of steps and overtake each other: still one log, in the order of places, and what was
    /// pushed after something was read comes after it.
    #[test]
    fn logs_are_one_when_messages_come_late(
        count in 2usize..=6,
        seed in any::<u64>(),
        actions in 1usize..300,
    ) {
        let mut random = Random(seed);
        let mut workers: Vec<Worker> = fabric::shuffled(count, seed).into_iter().map(Worker::new).collect();
        let mut sequencers = sequencers::<u64>(&mut workers);
        let mut logs: Vec<Vec<Placed<u64>>> = vec![Vec::new(); count];
        let mut pushed = vec![Vec::new(); count];
        // Of each value, how many entries its worker had read when it pushed it: these come before it.
        let mut known: Vec<(usize, usize)> = Vec::new();
        let mut late = 0;
        for value in 0..actions as u64 {
            let worker = random.below(count as u64) as usize;
            if random.below(3) == 0 {
                sequencers[worker].push(value).unwrap();
                pushed[worker].push(value);
            } else {
                workers[worker].step().unwrap();
            }
            known.push((worker, logs[worker].len()));
            read(&mut sequencers[worker], &mut logs[worker]);
            late += usize::from(logs.iter().any(|log| log.len() < logs[worker].len()));
        }
        let mut turns = 0;
        while workers.iter().any(Worker::has_work) {
            turns += 1;
            prop_assert!(turns < 100_000, "no end");
            let worker = random.below(count as u64) as usize;
            workers[worker].step().unwrap();
            read(&mut sequencers[worker], &mut logs[worker]);
        }
        let log = &logs[0];
        prop_assert!(log.windows(2).all(|pair| {
            let place = |entry: &Placed<u64>| (entry.0, entry.1, entry.2);
            place(&pair[0]) < place(&pair[1])
        }), "not in order: {log:?}");
        for other in &logs[1..] {
            prop_assert_eq!(other, log);
        }
        for (worker, own) in pushed.iter().enumerate() {
            let found: Vec<u64> = log.iter().filter(|entry| entry.1 == worker).map(|entry| entry.3).collect();
            prop_assert_eq!(&found, own, "pushes of worker {}", worker);
        }
        for (at, entry) in log.iter().enumerate() {
            let (worker, read) = known[entry.3 as usize];
            prop_assert!(entry.1 == worker && at >= read, "{:?} was pushed after {} entries were read", entry, read);
        }
        // Not an assertion on one case: with one action nobody is late.
        prop_assert!(actions < 200 || late > 0, "nothing came late: this tested nothing");
        drop(sequencers);
        while workers.iter().any(Worker::has_work) {
            for worker in &mut workers {
                worker.step().unwrap();
            }
        }
        prop_assert!(workers.iter().all(|worker| worker.dataflows() == 0));
    }
}

/// Not ordered, nor equal to itself.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Unordered(f64);

#[test]
fn own_pushes_keep_their_order_and_elements_need_none() {
    let mut pair = workers(2);
    let mut words = sequencers::<String>(&mut pair);
    let mut numbers = sequencers::<Unordered>(&mut pair);
    for word in ["z", "a"] {
        words[1].push(word.to_string()).unwrap();
    }
    numbers[0].push(Unordered(f64::NAN)).unwrap();
    numbers[0].push(Unordered(-1.0)).unwrap();
    settle(&mut pair);
    for worker in 0..2 {
        assert_eq!(words[worker].next().as_deref(), Some("z"));
        assert_eq!(words[worker].next().as_deref(), Some("a"));
        assert_eq!(words[worker].next(), None);
        assert!(numbers[worker].next().unwrap().0.is_nan());
        assert_eq!(numbers[worker].next().unwrap().0, -1.0);
    }
    drop((words, numbers));
    settle(&mut pair);
}

#[test]
fn one_step_sends_one_block() {
    let mut pair = workers(2);
    let mut logs = sequencers::<u32>(&mut pair);
    for value in 0..64 {
        logs[0].push(value).unwrap();
    }
    settle(&mut pair);
    let places: Vec<(u64, usize)> =
        std::iter::from_fn(|| logs[1].next_entry()).map(|entry| (entry.time, entry.index)).collect();
    assert_eq!(places, (0..64).map(|index| (0, index)).collect::<Vec<_>>());
    assert_eq!((logs[0].time(), logs[1].time()), (Some(1), Some(1)));
    drop(logs);
    settle(&mut pair);
}

/// Pushes at random moments, reads until everything came, and returns the log.
fn chatter(worker: &mut Worker, pushes: u64, pause: Duration) -> Result<Vec<(usize, u64)>, BoxError> {
    let mut random = Random(worker.index() as u64 + 77);
    let mut sequencer = Sequencer::new(worker);
    let mut log = Vec::new();
    let (mut next, total) = (0, pushes as usize * worker.peers());
    while log.len() < total {
        while next < pushes && random.below(3) > 0 {
            sequencer.push((worker.index(), next))?;
            next += 1;
        }
        if random.below(4) == 0 {
            // Part of what is tested: workers that are slow at random.
            std::thread::sleep(pause.mul_f64(random.below(100) as f64 / 100.0));
        }
        worker.step_or_park(Some(pause))?;
        log.extend(std::iter::from_fn(|| sequencer.next()));
    }
    Ok(log)
}

fn assert_one_log(fabric: &str, logs: &[Vec<(usize, u64)>], pushes: u64) {
    for log in logs {
        assert_eq!(log, &logs[0], "{fabric}");
        for worker in 0..logs.len() {
            let own: Vec<u64> = log.iter().filter(|(from, _)| *from == worker).map(|(_, value)| *value).collect();
            assert_eq!(own, (0..pushes).collect::<Vec<_>>(), "{fabric}: pushes of worker {worker}");
        }
    }
}

#[test]
fn threads_read_one_log_under_random_sleeps() {
    for count in [2, 3, 5, 8, 16] {
        let threads = execute(fabric::threads(count), |worker| chatter(worker, 40, Duration::from_millis(1)));
        let logs: Vec<_> = join(threads).into_iter().map(Result::unwrap).collect();
        assert_one_log(&format!("{count} threads"), &logs, 40);
    }
}

#[test]
fn processes_read_one_log_under_random_sleeps() {
    for (processes, threads, link) in [(2, 1, Link::Tcp), (2, 3, Link::Unix), (4, 1, Link::Tcp)] {
        let program = |worker: &mut Worker| chatter(worker, 40, Duration::from_millis(1));
        let logs: Vec<_> = on_mesh(mesh(processes, threads, link), program).into_iter().map(Result::unwrap).collect();
        assert_one_log(&format!("{processes} processes over {link:?}"), &logs, 40);
    }
}

#[test]
fn silent_workers_follow_while_they_are_parked() {
    for (fabric, logs) in everywhere(|worker| {
        let mut barrier = Barrier::new(worker);
        let mut sequencer = Sequencer::new(worker);
        let mut log = Vec::new();
        if worker.index() == 0 {
            // One at a time: each needs that the silent workers have moved.
            for value in 0..200 {
                sequencer.push(value)?;
                log.extend(sequencer.wait_next(worker, Some(LONG))?);
            }
        }
        // The others never touch their sequencer, only their steps carry it on.
        barrier.wait_timeout(worker, LONG)?;
        // The last of it may still be on its way from a third worker.
        while log.len() < 200 {
            log.extend(sequencer.wait_next(worker, Some(LONG))?);
        }
        Ok::<Vec<u64>, BoxError>(log)
    }) {
        for log in logs {
            assert_eq!(log, (0..200).collect::<Vec<_>>(), "{fabric}");
        }
    }
}

#[test]
fn a_counter_far_ahead_delays_nobody() {
    let mut pair = workers(2);
    let mut logs = sequencers::<String>(&mut pair);
    for _ in 0..10_000 {
        logs[0].push("ahead".into()).unwrap();
        pair[0].step().unwrap();
    }
    assert_eq!((logs[0].time(), logs[1].time(), logs[0].next()), (Some(10_000), Some(0), None));
    // A step of the silent worker is enough for all of it.
    pair[1].step().unwrap();
    pair[0].step().unwrap();
    assert_eq!(std::iter::from_fn(|| logs[0].next()).count(), 10_000);
    logs[1].push("behind".into()).unwrap();
    settle(&mut pair);
    let last = std::iter::from_fn(|| logs[1].next_entry()).last().unwrap();
    assert_eq!((last.time, last.worker, last.element.as_str()), (10_000, 1, "behind"));
    drop(logs);
    settle(&mut pair);
}

#[test]
fn the_others_go_on_after_a_drop_and_get_what_was_pushed_before_it() {
    let mut three = workers(3);
    let mut logs = sequencers::<u32>(&mut three);
    logs[2].push(1).unwrap();
    let last = logs.pop().unwrap();
    drop(last);
    logs[0].push(2).unwrap();
    settle(&mut three);
    let both: Vec<Vec<u32>> = logs.iter_mut().map(|log| std::iter::from_fn(|| log.next()).collect()).collect();
    assert_eq!(both, [[2, 1], [2, 1]]);
    assert!(!logs[0].is_finished());
    logs[0].close();
    logs[0].close();
    assert!(matches!(logs[0].push(3), Err(CoordError::Closed { worker: 0, .. })));
    logs[1].push(4).unwrap();
    logs[1].close();
    settle(&mut three);
    assert!(logs.iter().all(|log| !log.is_finished() && log.time().is_none()));
    for (log, worker) in logs.iter_mut().zip(&mut three) {
        assert_eq!(log.wait_next(worker, None).unwrap(), Some(4));
        assert_eq!(log.wait_next(worker, None).unwrap(), None);
        assert!(log.is_finished());
    }
    assert!(three.iter().all(|worker| worker.dataflows() == 0));
    assert!(matches!(logs[1].push(5), Err(CoordError::Closed { .. })));
}

#[test]
fn failures_and_misuse_are_errors() {
    let mut pair = workers(2);
    let mut logs = sequencers::<u32>(&mut pair);
    let silence = logs[0].wait_next(&mut pair[0], Some(Duration::from_millis(5)));
    assert!(matches!(silence, Err(CoordError::Silence { .. })), "{silence:?}");
    let other = logs[0].wait_next(&mut pair[1], None);
    assert!(matches!(other, Err(CoordError::OtherWorker { owner: 0, worker: 1, .. })), "{other:?}");
    pair[1].abort(Error::Aborted { worker: 1, reason: "enough".to_string() });
    for _ in 0..2 {
        let stopped = logs[0].wait_next(&mut pair[0], None);
        assert!(matches!(stopped, Err(CoordError::Worker(Error::Aborted { worker: 1, .. }))), "{stopped:?}");
    }
    assert!(matches!(logs[0].push(1), Err(CoordError::Gone { what: "sequencer", worker: 0 })));
    assert_eq!(logs[0].time(), None);
}

/// A peer with the same graph and another program.
#[test]
fn an_element_at_the_last_time_ends_the_run_with_its_cause() {
    let program = |worker: &mut Worker| {
        if worker.index() == 0 {
            let mut sequencer = Sequencer::<u64>::new(worker);
            return Ok(sequencer.wait_next(worker, None)?);
        }
        let mut input = worker.dataflow::<u64, _>("sequencer", |scope| {
            let (input, stream) = scope.new_input::<Vec<u64>>();
            OperatorBuilder::new(scope, "source").build(|_| |_| Ok(()));
            let mut builder = OperatorBuilder::new(scope, "sink");
            let mut all = builder
                .input(&stream, Exchange::new(|_: &u64, block, route: &mut dyn FnMut(usize, _)| route(0, block)));
            builder.build(|_| {
                move |_| {
                    all.for_each(|_, _| ());
                    Ok(())
                }
            });
            input
        });
        input.advance_to(u64::MAX)?;
        input.send(vec![1]);
        while worker.step_or_park(None)? {}
        Ok::<_, BoxError>(None)
    };
    for result in join(execute(fabric::threads(2), program)) {
        let told = "at time 18446744073709551615, and there is none after it";
        assert!(
            matches!(&result, Err(Error::Operator { name, worker: 0, source }) if name == "sequencer/sink" && source.to_string().ends_with(told)),
            "{result:?}"
        );
    }
}

#[test]
fn a_panic_ends_the_waits_of_the_others() {
    let program = |worker: &mut Worker| {
        let mut sequencer = Sequencer::<u64>::new(worker);
        if worker.index() == 1 {
            sequencer.push(1)?;
            sequencer.wait_next(worker, None)?;
            panic!("enough");
        }
        while sequencer.wait_next(worker, None)?.is_some() {}
        Ok::<_, BoxError>(())
    };
    let mut results = join(execute(fabric::threads(3), program));
    results.extend(on_mesh(mesh(2, 1, Link::Tcp), program));
    for result in results {
        assert!(matches!(&result, Err(Error::Panic { worker: 1, message, .. }) if message == "enough"), "{result:?}");
    }
}

#[test]
fn a_pusher_pushes_from_logic_while_its_sequencer_waits_and_ends_with_it() {
    let mut worker = workers(1).remove(0);
    let mut sequencer = Sequencer::new(&mut worker);
    let (logic, beside) = (sequencer.pusher(), sequencer.pusher());
    let mut input = worker.dataflow::<u64, _>("flow", |scope| {
        let (input, stream) = scope.new_input::<u64>();
        stream.inspect(move |_, value| {
            logic.push(*value).unwrap();
            if *value == 2 {
                logic.close();
            }
            assert!(!logic.is_finished());
        });
        input
    });
    input.send(1);
    input.send(2);
    let entry = sequencer.wait_entry(&mut worker, Some(LONG)).unwrap().unwrap();
    assert_eq!((entry.worker, entry.index, entry.element), (0, 0, 1));
    assert_eq!(sequencer.wait_next(&mut worker, Some(LONG)).unwrap(), Some(2));
    assert_eq!(sequencer.wait_next(&mut worker, Some(LONG)).unwrap(), None);
    assert!(beside.is_finished());
    assert!(matches!(beside.push(3), Err(CoordError::Closed { .. })));

    let sequencer = Sequencer::<u64>::new(&mut worker);
    let beside = sequencer.pusher();
    drop(sequencer);
    assert!(matches!(beside.push(3), Err(CoordError::Closed { .. })));
}
