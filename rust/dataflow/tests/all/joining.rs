//! Threads join a running dataflow in the middle of an epoch, with capabilities, and leave it; what is refused, and how.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use penstock_dataflow::{
    BoxError, Error, Exchange, JoinError, MemberFault, OperatorBuilder, Pipeline, Worker, execute_joinable, fabric,
};
use penstock_members::list::MAX_MEMBERS;
use penstock_progress::notificator::Notificator;
use penstock_progress::timestamp::Product;

/// Where each number went: (number, worker).
type Log = Arc<Mutex<Vec<(u64, usize)>>>;

fn log() -> Log {
    Arc::default()
}

fn sorted(log: &Log) -> Vec<(u64, usize)> {
    let mut seen = log.lock().unwrap().clone();
    seen.sort_unstable();
    seen
}

/// Builds: numbers to the worker of that rank, which notes them.
fn numbers(
    worker: &mut Worker,
    log: &Log,
) -> (penstock_dataflow::InputHandle<u64, Vec<u64>>, penstock_progress::ProbeHandle<u64>) {
    let (index, log) = (worker.index(), log.clone());
    worker.dataflow::<u64, _>("numbers", |scope| {
        let (input, stream) = scope.new_input::<Vec<u64>>();
        let noted = stream.exchange_by(|number| *number).inspect(move |_, block| {
            log.lock().unwrap().extend(block.iter().map(|number| (*number, index)));
        });
        (input, noted.probe().0)
    })
}

/// two founders, integers 0 to 9, a worker joins after 5.
#[test]
fn a_worker_joins_after_five_of_ten_numbers() {
    let log = log();
    let (half, come) = mpsc::channel();
    let seen = log.clone();
    let half = Mutex::new(half);
    let mut run = execute_joinable(2, move |worker| {
        let (mut input, probe) = numbers(worker, &seen);
        let joined = worker.bootstrap()?;
        if joined {
            assert_eq!((worker.index(), worker.rank(), *input.time()), (2, Some(2), 5), "in the middle of epoch 5");
        }
        if worker.index() == 0 {
            for number in 0..10 {
                if number == 6 {
                    half.lock().unwrap().send(()).unwrap();
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
        Ok::<_, BoxError>(joined)
    });
    come.recv().unwrap();
    assert_eq!(run.join(1).unwrap(), [2]);
    let joined: Vec<(usize, bool)> = run.finish().into_iter().map(|(index, result)| (index, result.unwrap())).collect();
    assert_eq!(joined, [(0, false), (1, false), (2, true)]);
    let before = (0..6).map(|number| (number, number as usize % 2));
    let after = (6..10).map(|number| (number, number as usize % 3));
    assert_eq!(sorted(&log), before.chain(after).collect::<Vec<_>>());
}

/// The first worker leaves in the middle of an epoch, and those who stay go on in it: no number is lost.
#[test]
fn the_first_worker_leaves_in_the_middle_of_an_epoch() {
    let log = log();
    let seen = log.clone();
    let run = execute_joinable(3, move |worker| {
        let (mut input, probe) = numbers(worker, &seen);
        worker.bootstrap()?;
        input.advance_to(3)?;
        match worker.index() {
            0 => {
                input.send((0..30).collect());
                worker.leave()?;
                assert!(worker.has_left() && worker.dataflows() == 0 && input.has_ended());
                input.send(vec![99]);
                assert!(input.try_send(vec![99]).is_err());
                return Ok(());
            }
            1 => {
                while worker.peers() == 3 {
                    worker.step_or_park(None)?;
                }
                assert_eq!((worker.index(), worker.rank()), (1, Some(0)));
                assert!(probe.less_equal(&3));
                input.send((30..60).collect());
            }
            _ => {}
        }
        input.advance_to(4)?;
        worker.step_until(None, || !probe.less_than(&4))?;
        assert_eq!((worker.rank(), worker.peers()), (Some(worker.index() - 1), 2));
        Ok::<_, BoxError>(())
    });
    for (index, result) in run.finish() {
        result.unwrap_or_else(|error| panic!("worker {index}: {error}"));
    }
    let seen = sorted(&log);
    assert_eq!(seen.iter().map(|(number, _)| *number).collect::<Vec<_>>(), (0..60).collect::<Vec<_>>());
    let rank = |(number, worker): &(u64, usize)| *worker == 1 + *number as usize % 2;
    assert!(seen[30..].iter().all(rank), "routed by rank among those who stayed");
}

/// What a worker sends to itself by its index, as F does with marks, it gets, though all have heard by then that it leaves.
#[test]
fn a_leaver_sends_to_itself_what_it_held() {
    let log = log();
    let seen = log.clone();
    let run = execute_joinable(2, move |worker| {
        let (index, seen) = (worker.index(), seen.clone());
        let (mut input, probe) = worker.dataflow::<u64, _>("held", |scope| {
            let (input, stream) = scope.new_input::<Vec<u64>>();
            let mut builder = OperatorBuilder::new(scope, "hold");
            let mut numbers = builder.input(&stream, Pipeline);
            let (mut output, held) = builder.output::<Vec<u64>>();
            let (again, members, mut holds) = (builder.activator(), scope.clone(), Vec::new());
            builder.build(|_| {
                move |_| {
                    while let Some((capability, block)) = numbers.next() {
                        holds.push((capability.retain(), block));
                    }
                    if members.peers() == 2 {
                        again.activate();
                        return Ok(());
                    }
                    for (capability, block) in holds.drain(..) {
                        output.session(&capability).give(block);
                    }
                    Ok(())
                }
            });
            let mine = Exchange::new(move |_: &u64, block: Vec<u64>, route: &mut dyn FnMut(usize, Vec<u64>)| {
                route(index, block);
            });
            let came = held.unary(mine.by_index(), "mine", |_| {
                move |input, output, _| {
                    while let Some((capability, block)) = input.next() {
                        output.session(&capability).give(block);
                    }
                    Ok(())
                }
            });
            let noted = came.inspect(move |_, block: &Vec<u64>| {
                seen.lock().unwrap().extend(block.iter().map(|number| (*number, index)));
            });
            (input, noted.probe().0)
        });
        worker.bootstrap()?;
        input.send(vec![index as u64]);
        if index == 0 {
            worker.leave()?;
            assert!(worker.has_left());
            return Ok(());
        }
        input.advance_to(1)?;
        worker.step_until(None, || !probe.less_than(&1))?;
        Ok::<_, BoxError>(())
    });
    for (index, result) in run.finish() {
        result.unwrap_or_else(|error| panic!("worker {index}: {error}"));
    }
    assert_eq!(sorted(&log), [(0, 0), (1, 1)]);
}

/// who is to teach a joiner leaves when it has, however late its operator can.
#[test]
fn a_leaver_teaches_first() {
    let (see, seen) = mpsc::channel();
    let (see, seen) = (Mutex::new(see), Mutex::new(seen));
    let mut run = execute_joinable(1, move |worker| {
        let (index, can, learned) = (worker.index(), Rc::new(Cell::new(false)), Rc::new(Cell::new(None)));
        let (teaches, learns) = (can.clone(), learned.clone());
        let (input, activator) = worker.dataflow::<u64, _>("lessons", |scope| {
            let (input, stream) = scope.new_input::<Vec<u64>>();
            let mut builder = OperatorBuilder::new(scope, "school");
            let mut numbers = builder.input(&stream, Pipeline);
            let (lesson, activator) = (builder.lesson::<u64>(), builder.activator());
            builder.build(|_| {
                move |_| {
                    while numbers.next().is_some() {}
                    if let Some(came) = lesson.learn() {
                        learns.set(Some(came));
                    }
                    if teaches.get() {
                        lesson.pupils().into_iter().for_each(|pupil| lesson.teach(pupil, 7));
                    }
                    Ok(())
                }
            });
            (input, activator)
        });
        worker.bootstrap()?;
        if index == 1 {
            while worker.peers() == 2 {
                worker.step_or_park(None)?;
            }
            see.lock().unwrap().send(())?;
            while learned.get().is_none() {
                worker.step_or_park(None)?;
            }
            drop(input);
            return Ok(learned.get());
        }
        while worker.peers() < 2 {
            worker.step_or_park(None)?;
        }
        worker.start_leaving()?;
        while seen.lock().unwrap().try_recv().is_err() {
            worker.step()?;
        }
        // The other one sees only itself: nothing more comes.
        for _ in 0..1_000 {
            worker.step()?;
        }
        assert!(!worker.has_left(), "it has not taught");
        can.set(true);
        activator.activate();
        while !worker.has_left() {
            worker.step_or_park(None)?;
        }
        Ok::<_, BoxError>(None)
    });
    run.join(1).unwrap();
    let learned: Vec<Option<u64>> = run.finish().into_iter().map(|(_, result)| result.unwrap()).collect();
    assert_eq!(learned, [None, Some(7)]);
}

/// two dataflows, a loop in a nested scope, and a broadcast; two join at once, a founder leaves.
#[test]
fn scopes_loops_and_broadcasts_are_joined() {
    let log = log();
    let heard = Arc::new(Mutex::new(Vec::new()));
    let (seen, hear) = (log.clone(), heard.clone());
    let mut run = execute_joinable(2, move |worker| {
        let index = worker.index();
        let (notes, hear) = (seen.clone(), hear.clone());
        let (mut halves, halved) = worker.dataflow::<u64, _>("halves", |scope| {
            let (input, stream) = scope.new_input::<Vec<u64>>();
            let ones = scope.nested::<Product<u64, u64>, _>("loop", |inner| {
                let (feedback, back) = inner.feedback(Product::new(0, 1));
                let all = stream.enter(inner).concat(&back).exchange_by(|number| *number);
                let next = all.map_blocks(|block| block.into_iter().map(|number| number / 2).collect::<Vec<_>>());
                next.map_blocks(|block| block.into_iter().filter(|number| *number > 1).collect())
                    .connect_loop(feedback);
                next.map_blocks(|block| block.into_iter().filter(|number| *number == 1).collect::<Vec<_>>())
                    .leave(scope)
            });
            let noted =
                ones.inspect(move |_, block| notes.lock().unwrap().extend(block.iter().map(|one| (*one, index))));
            (input, noted.probe().0)
        });
        let mut says = worker.dataflow::<u64, _>("says", |scope| {
            let (input, stream) = scope.new_input::<u64>();
            let members = scope.clone();
            let all = stream.exchange(move |_, word, route| (0..members.peers()).for_each(|rank| route(rank, word)));
            all.inspect(move |_, word| hear.lock().unwrap().push((*word, index)));
            input
        });
        // Who joins may hear of the fourth and of the leaver at once.
        let joined = worker.bootstrap()?;
        while !joined && worker.peers() < 4 {
            worker.step_or_park(None)?;
        }
        halves.send((2..100).collect());
        if index == 1 {
            worker.leave()?;
            return Ok(());
        }
        while worker.has_member(1) || !worker.has_member(2) {
            worker.step_or_park(None)?;
        }
        halves.send((2..100).collect());
        halves.advance_to(1)?;
        if index == 3 {
            says.send(7);
        }
        says.advance_to(1)?;
        worker.step_until(None, || !halved.less_than(&1))?;
        Ok::<_, BoxError>(())
    });
    assert_eq!(run.join(2).unwrap(), [2, 3]);
    for (index, result) in run.finish() {
        result.unwrap_or_else(|error| panic!("worker {index}: {error}"));
    }
    assert_eq!(log.lock().unwrap().len(), 7 * 98);
    let mut heard = heard.lock().unwrap().clone();
    heard.sort_unstable();
    assert_eq!(heard, [(7, 0), (7, 2), (7, 3)]);
}

/// members that are parked, one of them without anything to do, are woken.
#[test]
fn idle_workers_are_joined() {
    let mut run = execute_joinable(1, |worker| {
        let (input, probe) = numbers(worker, &log());
        worker.bootstrap()?;
        while worker.peers() < 4 {
            worker.step_or_park(None)?;
        }
        drop(input);
        worker.step_until(None, || probe.done())?;
        Ok::<_, BoxError>(worker.index())
    });
    for joiner in 1..4 {
        assert_eq!(run.join(1).unwrap(), [joiner]);
    }
    let finished: Vec<usize> = run.finish().into_iter().map(|(_, result)| result.unwrap()).collect();
    assert_eq!(finished, [0, 1, 2, 3]);
}

/// A founder that waits for others to come, and ends when they have gone.
fn host(worker: &mut Worker, until: &Mutex<mpsc::Receiver<()>>) -> Result<(), BoxError> {
    let (input, probe) = numbers(worker, &log());
    worker.bootstrap()?;
    while until.lock().unwrap().try_recv().is_err() {
        worker.step_or_park(Some(Duration::from_millis(1)))?;
    }
    drop(input);
    worker.step_until(None, || probe.done())?;
    Ok(())
}

/// a joiner that built another graph, one that steps, sends or leaves before its place, one that fails: each is alone with its error.
#[test]
fn a_joiner_that_cannot_join_ends_alone() {
    type Way = fn(&mut Worker) -> Result<(), BoxError>;
    let ways: [(Way, &str); 6] = [
        (
            |worker| {
                worker.dataflow::<u64, _>("numbers", |scope| scope.new_input::<Vec<u64>>().1.probe().0);
                Ok(worker.bootstrap().map(drop)?)
            },
            "worker 1 built another graph than worker 0: dataflow number 1: the graphs differ: node 2",
        ),
        (
            |worker| {
                numbers(worker, &log());
                numbers(worker, &log());
                Ok(worker.bootstrap().map(drop)?)
            },
            "worker 1 built another graph than worker 0: dataflow number 2: one of both did not build it before",
        ),
        (
            |worker| {
                numbers(worker, &log());
                Ok(worker.step().map(drop)?)
            },
            "worker 1: call bootstrap() once all dataflows are built",
        ),
        (
            |worker| {
                let (mut input, _) = numbers(worker, &log());
                input.send(vec![1]);
                Ok(worker.bootstrap().map(drop)?)
            },
            "worker 1: call bootstrap() once all dataflows are built",
        ),
        (
            |worker| {
                numbers(worker, &log());
                Ok(worker.leave()?)
            },
            "worker 1: it does not take part now, so it cannot leave",
        ),
        (|_| Err("enough".into()), "program of worker 1 failed: enough"),
    ];
    for (way, expected) in ways {
        let (end, until) = mpsc::channel();
        let (end, until) = (Mutex::new(end), Mutex::new(until));
        let mut run = execute_joinable(1, move |worker| {
            if worker.index() == 0 {
                return host(worker, &until);
            }
            let result = way(worker);
            end.lock().unwrap().send(()).unwrap();
            result
        });
        assert_eq!(run.join(1).unwrap(), [1]);
        let results = run.finish();
        assert!(results[0].1.is_ok(), "{:?}", results[0].1);
        let error = results[1].1.as_ref().unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}");
    }
}

/// a joiner's operator that sends with what its constructor got stops the run, with its name.
#[test]
fn constructors_of_joiners_have_no_capability() {
    let mut run = execute_joinable(1, |worker| {
        let joins = worker.index() > 0;
        let input = worker.dataflow::<u64, _>("flow", |scope| {
            let (input, stream) = scope.new_input::<()>();
            let mut builder = OperatorBuilder::new(scope, "source");
            let mut ticks = builder.input(&stream, penstock_dataflow::Pipeline);
            let (mut output, numbers) = builder.output::<u64>();
            builder.build(|mut capabilities| {
                let capability = capabilities.remove(0);
                move |_| {
                    while ticks.next().is_some() {}
                    if joins {
                        output.session(&capability).give(1);
                    }
                    Ok(())
                }
            });
            numbers.probe();
            input
        });
        worker.bootstrap()?;
        while worker.step_or_park(None)? {}
        drop(input);
        Ok::<_, BoxError>(())
    });
    run.join(1).unwrap();
    for (_, result) in run.finish() {
        let error = result.unwrap_err();
        assert!(matches!(&error, Error::WrongCapability { name, worker: 1, .. } if name == "flow/source"), "{error}");
    }
}

/// One of two that leave at the same time goes; the other one is told that it is the last one, and goes on as before.
#[test]
fn the_last_of_those_who_leave_at_the_same_time_stays() {
    for order in [[0, 1], [1, 0]] {
        let log = log();
        let (seats, _door) = fabric::joinable(2);
        let mut workers: Vec<Worker> = seats.into_iter().map(Worker::new).collect();
        let mut built: Vec<_> = workers.iter_mut().map(|worker| numbers(worker, &log)).collect();
        for worker in &mut workers {
            assert!(!worker.bootstrap().unwrap());
            worker.step().unwrap();
        }
        for index in order {
            workers[index].start_leaving().unwrap();
        }
        while !workers.iter().any(Worker::has_left) {
            for index in order {
                let _ = workers[index].step().unwrap();
            }
        }
        let gone = workers.iter().position(Worker::has_left).expect("one of both leaves");
        let stays = &mut workers[1 - gone];
        let alone = Error::Member { worker: 1 - gone, fault: MemberFault::Alone };
        while stays.is_leaving().is_ok() {
            assert!(stays.step().unwrap());
        }
        assert_eq!(stays.is_leaving().unwrap_err().to_string(), alone.to_string());
        assert_eq!((stays.peers(), stays.rank(), stays.has_left()), (1, Some(0), false));
        assert_eq!(stays.leave().unwrap_err().to_string(), alone.to_string(), "and when it asks again");
        built[1 - gone].0.send(vec![5, 6]);
        let (_, probe) = built.swap_remove(1 - gone);
        drop(built);
        while workers[1 - gone].step().unwrap() {}
        assert!(probe.done());
        assert_eq!(sorted(&log), [(5, 1 - gone), (6, 1 - gone)]);
    }
}

/// Each of two leavers has a sum that waits for the input of the other one, whose program does nothing but leave.
#[test]
fn those_who_leave_at_the_same_time_do_not_wait_for_each_other() {
    for order in [[0, 1], [1, 0]] {
        let log = log();
        let (seats, _door) = fabric::joinable(3);
        let mut workers: Vec<Worker> = seats.into_iter().map(Worker::new).collect();
        let build = |worker: &mut Worker| {
            let (index, log) = (worker.index(), log.clone());
            worker.dataflow::<u64, _>("sums", |scope| {
                let (input, stream) = scope.new_input::<Vec<u64>>();
                let sums = stream.unary(Pipeline, "sum", |_| {
                    let (mut notificator, mut sums) = (Notificator::new(), BTreeMap::new());
                    move |input, output, frontiers| {
                        while let Some((capability, block)) = input.next() {
                            *sums.entry(*capability.time()).or_insert(0) += block.iter().sum::<u64>();
                            notificator.notify_at(capability.retain());
                        }
                        while let Some(capability) = notificator.next(&frontiers.all()) {
                            output.session(&capability).give(sums.remove(capability.time()).unwrap());
                        }
                        Ok(())
                    }
                });
                sums.inspect(move |_, sum| log.lock().unwrap().push((*sum, index)));
                input
            })
        };
        let mut inputs: Vec<_> = workers.iter_mut().map(build).collect();
        for (worker, input) in workers.iter_mut().zip(&mut inputs) {
            assert!(!worker.bootstrap().unwrap());
            input.send(vec![1, worker.index() as u64]);
            assert!(worker.step().unwrap());
        }
        for index in order {
            workers[index].start_leaving().unwrap();
        }
        drop(inputs.pop());
        for _ in 0..1000 {
            for worker in &mut workers {
                let _ = worker.step().unwrap();
            }
        }
        let left: Vec<bool> = workers.iter().map(Worker::has_left).collect();
        assert_eq!((left, workers[2].dataflows()), (vec![true, true, false], 0));
        assert!(inputs.iter().all(|input| input.has_ended()));
        assert_eq!(sorted(&log), [(1, 0), (2, 1), (3, 2)]);
    }
}

#[test]
fn misuse_is_refused_and_changes_nothing() {
    let (seats, door) = fabric::joinable(1);
    assert!(matches!(door.ask(0), Err(JoinError::Nobody)));
    let crowd = door.ask(MAX_MEMBERS).unwrap();
    let mut worker = Worker::new(seats.into_iter().next().unwrap());
    let fault = |error: Error| match error {
        Error::Member { worker: 0, fault } => fault,
        other => panic!("{other}"),
    };
    let (input, probe) = numbers(&mut worker, &log());
    assert_eq!(fault(worker.step().unwrap_err()), MemberFault::NotBootstrapped);
    assert_eq!(fault(worker.leave().unwrap_err()), MemberFault::NotSeated);
    assert!(!worker.bootstrap().unwrap() && !worker.bootstrap().unwrap());
    assert_eq!(fault(worker.leave().unwrap_err()), MemberFault::Alone);
    assert!(worker.step().unwrap());
    assert!(matches!(crowd.try_seats(), Err(JoinError::Many(MAX_MEMBERS))), "with the one that is there");
    let ticket = door.ask(1).unwrap();
    assert!(ticket.try_seats().unwrap().is_none());
    worker.step().unwrap();
    let seat = ticket.try_seats().unwrap().unwrap().remove(0);
    assert!(seat.joins() && seat.index() == 1);
    // It is given up, and another one can come.
    drop(seat);
    drop(input);
    while worker.step().unwrap() {}
    assert!(probe.done());
    drop(worker);
    assert!(matches!(ticket.try_seats(), Err(JoinError::Over)));
    assert!(matches!(door.ask(1).unwrap().seats(), Err(JoinError::Over)));

    let mut fixed = Worker::new(fabric::threads(1).remove(0));
    assert!(!fixed.bootstrap().unwrap());
    assert_eq!(fault(fixed.leave().unwrap_err()), MemberFault::Fixed);

    let mut late = Worker::new(fabric::joinable(1).0.remove(0));
    late.bootstrap().unwrap();
    let (_input, _) = numbers(&mut late, &log());
    assert_eq!(fault(late.step().unwrap_err()), MemberFault::BuiltLate("numbers".to_string()));
}

/// A member that fails ends the run for all with its cause, who waits at the door too.
#[test]
fn a_member_that_fails_ends_the_run_for_joiners_too() {
    let mut run = execute_joinable(2, |worker| {
        let (_input, _) = numbers(worker, &log());
        worker.bootstrap()?;
        while worker.peers() < 3 {
            worker.step_or_park(None)?;
        }
        if worker.index() == 2 {
            return Err("enough".into());
        }
        while worker.step_or_park(None)? {}
        Ok::<(), BoxError>(())
    });
    run.join(1).unwrap();
    let texts: Vec<String> = {
        let asked = loop {
            match run.join(1) {
                Err(error) => break error,
                Ok(_) => continue,
            }
        };
        assert!(matches!(asked, JoinError::Stopped(Error::Program { worker: 2, .. })), "{asked}");
        run.finish().into_iter().map(|(_, result)| result.unwrap_err().to_string()).collect()
    };
    assert!(texts.iter().all(|text| text == "program of worker 2 failed: enough"), "{texts:?}");
}

/// However far a join has come when the run ends, it ends well for all who took part.
#[test]
fn a_run_that_ends_while_somebody_joins_has_not_failed() {
    let mut over = 0;
    for rounds in 0..20 {
        let (seats, door) = fabric::joinable(2);
        let mut workers: Vec<Worker> = seats.into_iter().map(Worker::new).collect();
        let built: Vec<_> = workers.iter_mut().map(|worker| numbers(worker, &log())).collect();
        let ticket = door.ask(1).unwrap();
        workers.iter_mut().for_each(|worker| assert!(!worker.bootstrap().unwrap()));
        let seat = loop {
            workers.iter_mut().for_each(|worker| assert!(worker.step().unwrap()));
            if let Some(mut seats) = ticket.try_seats().unwrap() {
                break seats.remove(0);
            }
        };
        let mut joiner = Worker::new(seat);
        let _built = numbers(&mut joiner, &log());
        let mut joined = joiner.try_bootstrap().unwrap();
        for _ in 0..rounds {
            workers.iter_mut().for_each(|worker| _ = worker.step().unwrap());
            joined = joined.or_else(|| joiner.try_bootstrap().unwrap());
        }
        if joined.is_some() {
            break;
        }
        // The second one ends before the first hears what the joiner said last.
        drop(built);
        assert!(workers[0].step().unwrap_or_else(|error| panic!("after {rounds} rounds: {error}")));
        joined = joiner.try_bootstrap().unwrap();
        while workers[1].step().unwrap() {
            let _ = workers[0].step().unwrap();
        }
        drop(workers.pop());
        match joined.map_or_else(|| joiner.try_bootstrap(), |joined| Ok(Some(joined))) {
            Err(Error::Member { fault: MemberFault::Over, .. }) => over += 1,
            other => drop(other.unwrap()),
        }
        while workers[0].step().unwrap_or_else(|error| panic!("after {rounds} rounds: {error}")) {
            let _ = joiner.try_bootstrap();
        }
    }
    assert!(over > 0);
}

/// Those who could let somebody in have ended, with nothing built and no place taken.
#[test]
fn nobody_waits_for_who_has_ended() {
    let (seats, door) = fabric::joinable(2);
    let ticket = door.ask(1).unwrap();
    let mut workers: Vec<Worker> = seats.into_iter().map(Worker::new).collect();
    workers.pop();
    assert!(ticket.try_seats().unwrap().is_none(), "one is there");
    workers.pop();
    for ticket in [ticket, door.ask(1).unwrap()] {
        let answer = ticket.try_seats();
        assert!(matches!(answer, Err(JoinError::Over)), "{answer:?}");
    }
}

/// Who is late is withdrawn by a lead that looks at the clock in its steps: so it takes some, though nobody wakes it.
#[test]
fn a_parked_lead_looks_at_the_clock_while_somebody_joins() {
    let (seats, door) = fabric::joinable(1);
    let (tell, told) = mpsc::channel();
    let ticket = door.ask(1).unwrap();
    std::thread::spawn(move || {
        let mut worker = Worker::new(seats.into_iter().next().unwrap());
        let (_input, _probe) = numbers(&mut worker, &log());
        worker.bootstrap().unwrap();
        while worker.step_or_park(None).unwrap() && tell.send(()).is_ok() {}
    });
    let seat = ticket.seats().unwrap().remove(0);
    let limit = Duration::from_secs(60);
    // More than the rings and the mail that there are.
    (0..10).for_each(|_| told.recv_timeout(limit).expect("it looks at the clock"));
    drop((told, seat));
}

#[test]
fn a_joiner_that_is_dropped_before_it_builds_is_withdrawn() {
    let (seats, door) = fabric::joinable(2);
    let mut workers: Vec<Worker> = seats.into_iter().map(Worker::new).collect();
    let built: Vec<_> = workers.iter_mut().map(|worker| numbers(worker, &log())).collect();
    workers.iter_mut().for_each(|worker| assert!(!worker.bootstrap().unwrap()));
    let ticket = door.ask(1).unwrap();
    let joiner = loop {
        workers.iter_mut().for_each(|worker| assert!(worker.step().unwrap()));
        if let Some(mut seats) = ticket.try_seats().unwrap() {
            break Worker::new(seats.remove(0));
        }
    };
    drop(joiner);
    // The last one is told so when nobody joins any more.
    for worker in &mut workers {
        worker.start_leaving().unwrap();
    }
    for _ in 0..1_000 {
        workers.iter_mut().for_each(|worker| _ = worker.step().unwrap());
    }
    let left = workers.iter().filter(|worker| worker.has_left()).count();
    let stays = workers.iter().find(|worker| !worker.has_left()).expect("one stays");
    assert_eq!(left, 1);
    assert!(stays.is_leaving().is_err(), "it still waits for who joins");
    drop(built);
}
