//! A barrier and a sequencer across joins and leaves, of threads and of processes over TCP.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use penstock_coord::{Barrier, CoordError, Entry, Pusher, Sequencer};
use penstock_dataflow::fabric::Endpoint;
use penstock_dataflow::{
    BoxError, Error, InputHandle, MemberFault, OperatorBuilder, Pipeline, Worker, execute_joinable, fabric,
};

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

/// Also where it has handed over what it would need for another one.
#[test]
fn a_leaver_has_reached_what_all_have_reached() {
    let run = execute_joinable(2, |worker: &mut Worker| {
        let mut barrier = Barrier::new(worker);
        worker.bootstrap()?;
        let round = barrier.advance();
        barrier.wait_for(worker, round, None)?;
        if worker.index() == 0 {
            worker.start_leaving()?;
            while barrier.usable().is_ok() && !worker.has_left() {
                worker.step_or_park(None)?;
            }
        }
        barrier.wait_for(worker, round, None)?;
        Ok::<_, BoxError>(round)
    });
    let rounds: Vec<u64> = run.finish().into_iter().map(|(_, result)| result.unwrap()).collect();
    assert_eq!(rounds, [1, 1]);
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

/// A worker of two on this thread, with a log and a flow whose logic pushes to it: what was pushed, and how it was refused.
struct Pushing {
    worker: Worker,
    log: Sequencer<u64>,
    input: InputHandle<u64, Vec<u64>>,
    outcome: Outcome,
}

type Outcome = Rc<RefCell<(Vec<u64>, Option<CoordError>)>>;

/// Pushes unless it was refused before; whether it was not refused.
fn push(pusher: &Pusher<u64>, element: u64, outcome: &Outcome) -> bool {
    let (pushed, refused) = &mut *outcome.borrow_mut();
    if refused.is_none() {
        match pusher.push(element) {
            Ok(()) => pushed.push(element),
            Err(error) => *refused = Some(error),
        }
    }
    refused.is_none()
}

/// `flow` builds what pushes.
fn pushing(flow: impl Fn(&mut Worker, Pusher<u64>, Outcome) -> InputHandle<u64, Vec<u64>>) -> Vec<Pushing> {
    let make = |seat| {
        let (mut worker, outcome) = (Worker::new(seat), Outcome::default());
        // Its source runs before what pushes.
        let log = Sequencer::new(&mut worker);
        let input = flow(&mut worker, log.pusher(), outcome.clone());
        worker.bootstrap().unwrap();
        Pushing { worker, log, input, outcome }
    };
    fabric::joinable(2).0.into_iter().map(make).collect()
}

/// The first one leaves, the other one does `each` between two steps of theirs, and reads all that was pushed.
fn leave_and_read(mut workers: Vec<Pushing>, mut each: impl FnMut(&mut Pushing)) -> (Vec<u64>, Option<CoordError>) {
    workers[0].worker.start_leaving().unwrap();
    for _ in 0..2_000 {
        each(&mut workers[1]);
        workers[1].worker.step().unwrap();
        workers[0].worker.step().unwrap();
    }
    let Pushing { mut worker, mut log, input, .. } = workers.pop().unwrap();
    let Pushing { worker: leaver, outcome, .. } = workers.pop().unwrap();
    assert!(leaver.has_left());
    drop(input);
    log.close();
    while worker.step().unwrap() {}
    let read: Vec<u64> = std::iter::from_fn(|| log.next()).collect();
    let (pushed, refused) = outcome.take();
    assert_eq!(read, pushed);
    (read, refused)
}

/// The last block comes for the leaver together with what says that nothing comes any more; its logic pushes once it has read it.
#[test]
fn what_logic_pushes_while_its_worker_leaves_is_read() {
    let workers = pushing(|worker, pusher, outcome| {
        let leaves = worker.index() == 0;
        worker.dataflow("flow", |scope| {
            let (input, stream) = scope.new_input::<Vec<u64>>();
            stream.exchange_by(|_| 0).inspect(move |_, block| {
                block.iter().filter(|_| leaves).for_each(|number| assert!(push(&pusher, *number, &outcome)));
            });
            input
        })
    });
    let mut sent = 0;
    let (read, refused) = leave_and_read(workers, |peer| {
        if peer.worker.peers() == 2 {
            peer.input.send(vec![sent]);
            sent += 1;
        }
    });
    assert!(sent > 0 && refused.is_none(), "{refused:?}");
    assert_eq!(read, (0..sent).collect::<Vec<_>>());
}

/// The same where it reads a block a run, and has some left when nothing comes any more.
#[test]
fn what_logic_pushes_that_reads_a_block_a_run_is_read() {
    let workers = pushing(|worker, pusher, outcome| {
        let leaves = worker.index() == 0;
        worker.dataflow("flow", |scope| {
            let (input, stream) = scope.new_input::<Vec<u64>>();
            let mut builder = OperatorBuilder::new(scope, "slow");
            let mut blocks = builder.input(&stream.exchange_by(|_| 0), Pipeline);
            let again = builder.activator();
            builder.build(|_| {
                move |_| {
                    if let Some((_, block)) = blocks.next() {
                        block.iter().filter(|_| leaves).for_each(|number| assert!(push(&pusher, *number, &outcome)));
                        again.activate();
                    }
                    Ok(())
                }
            });
            input
        })
    });
    let mut sent = 0;
    let (read, refused) = leave_and_read(workers, |peer| {
        for _ in 0..3 {
            if peer.worker.peers() == 2 {
                peer.input.send(vec![sent]);
                sent += 1;
            }
        }
    });
    assert!(sent > 0 && refused.is_none(), "{refused:?}");
    assert_eq!(read, (0..sent).collect::<Vec<_>>());
}

/// Logic that pushes in every step does not keep its worker from leaving: it is refused, and what was not is read.
#[test]
fn logic_that_pushes_for_ever_is_refused_when_its_worker_leaves() {
    let workers = pushing(|worker, pusher, outcome| {
        let leaves = worker.index() == 0;
        worker.dataflow("flow", |scope| {
            let (input, stream) = scope.new_input::<Vec<u64>>();
            let mut builder = OperatorBuilder::new(scope, "ticks");
            let mut nothing = builder.input(&stream, Pipeline);
            let again = builder.activator();
            builder.build(|_| {
                let mut ticks = 0;
                move |_| {
                    nothing.for_each(|_, _| ());
                    if leaves && push(&pusher, ticks, &outcome) {
                        ticks += 1;
                        again.activate();
                    }
                    Ok(())
                }
            });
            input
        })
    });
    let (read, refused) = leave_and_read(workers, |_| {});
    assert!(!read.is_empty());
    assert!(matches!(refused, Some(CoordError::Ended { what: "sequencer", worker: 0 })), "{refused:?}");
}

/// What a joiner has pushed before it has its place, to a log that its peer had closed, is not dropped without a word.
#[test]
fn what_cannot_be_sent_stops_the_run() {
    let (second, come) = mpsc::channel();
    let second = Mutex::new(second);
    let ends = run(false, 1, &come, move |worker: &mut Worker| {
        let (mut log, mut open) = (Sequencer::<u64>::new(worker), Barrier::new(worker));
        if worker.index() == 1 {
            log.push(7)?;
        }
        if !worker.bootstrap()? {
            log.close();
            worker.step()?;
            second.lock().unwrap().send(())?;
        }
        while worker.peers() < 2 {
            worker.step_or_park(None)?;
        }
        Ok(open.wait(worker)?)
    });
    for end in ends {
        let Err(Error::Operator { name, worker: 1, source }) = &end else { panic!("{end:?}") };
        assert!(matches!(source.downcast_ref(), Some(CoordError::Ended { what: "sequencer", worker: 1 })), "{source}");
        assert_eq!(name, "sequencer/source");
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
        // Pushed when it was a member already.
        assert!(round % 2 == 1 || logs[2].ends_with(&[9]), "round {round}: {logs:?}");
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

/// A member that reads its log on this thread.
struct Reading {
    worker: Worker,
    log: Sequencer<u64>,
    seated: bool,
    closed: bool,
    read: Vec<u64>,
}

impl Reading {
    fn new(seat: Endpoint) -> Self {
        let mut worker = Worker::new(seat);
        let log = Sequencer::new(&mut worker);
        Reading { worker, log, seated: false, closed: false, read: Vec::new() }
    }

    /// One step; false when it has read all. Pushes its number where it is told to, when there are three, and closes.
    fn go(&mut self, pushes: bool) -> Result<bool, Error> {
        if !self.seated {
            self.seated = self.worker.try_bootstrap()?.is_some();
            return Ok(true);
        }
        if !self.closed && self.worker.peers() == 3 {
            if pushes {
                self.log.push(self.worker.index() as u64).expect("it takes part");
            }
            self.log.close();
            self.closed = true;
        }
        let goes_on = self.worker.step()?;
        self.read.extend(std::iter::from_fn(|| self.log.next()));
        Ok(goes_on || !self.closed)
    }
}

/// What is pushed when a joiner is a member is read by it, whatever of it others have read before they teach it. What is sent takes as long, and overtakes, as the
/// seed wants.
#[test]
fn a_joiner_reads_all_that_is_pushed_since_it_is_a_member() {
    for seed in 0..400 {
        let (seats, door) = fabric::joinable_shuffled(2, seed);
        let mut members: Vec<Reading> = seats.into_iter().map(Reading::new).collect();
        let mut random = seed;
        let mut below = |bound: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % bound
        };
        let (pushes, mut ticket, mut turns) = (below(8), Some(door.ask(1).unwrap()), 0);
        let mut at_work = vec![true; 2];
        while at_work.contains(&true) || ticket.is_some() {
            turns += 1;
            assert!(turns < 100_000, "seed {seed}: it goes on and on");
            if let Some(mut seats) = ticket.as_ref().and_then(|ticket| ticket.try_seats().unwrap()) {
                members.push(Reading::new(seats.remove(0)));
                at_work.push(true);
                ticket = None;
            }
            // Some are slow for a while.
            let chosen = below(members.len() as u64) as usize;
            for _ in 0..below(6) {
                at_work[chosen] = members[chosen].go(pushes & 1 << chosen != 0).unwrap();
            }
        }
        let pushed: Vec<u64> = (0..3).filter(|worker| pushes & 1 << worker != 0).collect();
        for member in &members {
            let mut read = member.read.clone();
            assert_eq!(read, members[0].read, "seed {seed}");
            read.sort_unstable();
            assert_eq!(read, pushed, "seed {seed}");
        }
    }
}

/// What the members of a run have in which others come and go.
trait Part {
    /// Uses it in some way.
    fn act(&mut self, chance: u64);
    fn close(&mut self);
    fn is_closed(&self) -> bool;
    /// After each turn of its member.
    fn look(&mut self) {}
}

struct Wanderer<X> {
    /// None when it has ended, or has left.
    worker: Option<Worker>,
    part: X,
    seated: bool,
    leaving: bool,
    left: bool,
}

/// A run in which members come and go, by seed, and what they have at its end, founders first; `check` looks at all of them after each turn.
fn wander<X: Part>(
    seed: u64,
    build: impl Fn(&mut Worker) -> X,
    mut check: impl FnMut(&[Wanderer<X>]),
) -> (usize, Vec<Wanderer<X>>) {
    let mut random: u64 = seed ^ 0x5eed;
    let mut below = |bound: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % bound
    };
    // Both founders may leave, of whom the first has closed what it has: a joiner that it lets in has none.
    let bereft = seed % 5 == 4;
    let founders = if bereft { 2 } else { 1 + below(3) as usize };
    let (mut joins, mut leaves) = if bereft { (2, 2) } else { (below(3), below(3)) };
    let (seats, door) = fabric::joinable_shuffled(founders, seed);
    let begin = |seat| {
        let mut worker = Worker::new(seat);
        let part = build(&mut worker);
        Wanderer { worker: Some(worker), part, seated: false, leaving: false, left: false }
    };
    let mut members: Vec<Wanderer<X>> = seats.into_iter().map(begin).collect();
    if bereft {
        members[0].part.close();
    }
    let mut tickets: Vec<fabric::Ticket> = Vec::new();
    for _ in 0..200_000 {
        let works = members.iter().any(|member| member.worker.is_some());
        if !works && tickets.is_empty() {
            return (founders, members);
        }
        if works && joins > 0 && below(30) == 0 {
            joins -= 1;
            tickets.push(door.ask(1).unwrap());
        }
        tickets.retain(|ticket| match ticket.try_seats() {
            Ok(seats) => seats.is_none_or(|seats| {
                members.extend(seats.into_iter().map(begin));
                false
            }),
            Err(_) => false,
        });
        let chosen = below(members.len() as u64) as usize;
        let Wanderer { worker: here, part, seated, leaving, left } = &mut members[chosen];
        let Some(worker) = here else { continue };
        if !*seated {
            match worker.try_bootstrap() {
                Ok(joined) => *seated = joined.is_some(),
                // It came too late.
                Err(Error::Member { fault: MemberFault::Over | MemberFault::Withdrawn, .. }) => *here = None,
                Err(error) => panic!("seed {seed}: {error}"),
            }
            continue;
        }
        match below(12) {
            0 if !part.is_closed() => part.act(below(100)),
            1 if !part.is_closed() && below(8) == 0 => part.close(),
            2 if leaves > 0 && !*leaving && below(8) == 0 => {
                if worker.dataflows() > 0 && worker.start_leaving().is_ok() {
                    leaves -= 1;
                    *leaving = true;
                }
            }
            _ => {
                let goes_on = worker.step().unwrap_or_else(|error| panic!("seed {seed}: {error}"));
                *left = worker.has_left();
                if !goes_on && (part.is_closed() || *left) {
                    *here = None;
                }
            }
        }
        part.look();
        check(&members);
    }
    panic!("seed {seed}: it goes on and on");
}

/// A log, what was read of it, and what was pushed to it here.
struct Log {
    log: Sequencer<u64>,
    closed: bool,
    read: Vec<u64>,
    pushed: Vec<u64>,
    /// Of all members.
    pushes: Rc<Cell<u64>>,
}

impl Part for Log {
    fn act(&mut self, _: u64) {
        let element = self.pushes.get();
        if self.log.push(element).is_ok() {
            self.pushes.set(element + 1);
            self.pushed.push(element);
        }
    }

    fn close(&mut self) {
        self.log.close();
        self.closed = true;
    }

    fn is_closed(&self) -> bool {
        self.closed
    }

    fn look(&mut self) {
        self.read.extend(std::iter::from_fn(|| self.log.next()));
    }
}

/// One order, of which all read a stretch: who is there all the time reads all, a joiner the end, a leaver the beginning. What is pushed is in it once, and read by
/// who pushed it.
#[test]
fn a_log_is_one_while_members_come_and_go() {
    let mut seen = [0; 3];
    for seed in 0..150 {
        let pushes = Rc::new(Cell::new(0));
        let build = |worker: &mut Worker| {
            let (log, pushes) = (Sequencer::new(worker), pushes.clone());
            Log { log, closed: false, read: Vec::new(), pushed: Vec::new(), pushes }
        };
        let (founders, members) = wander(seed, build, |_| {});
        // Somebody was there all the time, or the pieces cannot be put together.
        let Some(whole) = members[..founders].iter().find(|member| !member.leaving) else { continue };
        let all = &whole.part.read;
        let mut sorted = all.clone();
        sorted.sort_unstable();
        assert!(sorted.into_iter().eq(0..pushes.get()), "seed {seed}: what was pushed is read once");
        seen[2] += all.len();
        for (at, member) in members.iter().enumerate() {
            let (read, own) = (&member.part.read, &member.part.pushed);
            seen[0] += usize::from(at >= founders && !read.is_empty());
            seen[1] += usize::from(member.leaving && !read.is_empty());
            let fits = match (at < founders, member.leaving) {
                (true, false) => read == all,
                (true, true) => all.starts_with(read),
                (false, false) => all.ends_with(read),
                (false, true) => read.is_empty() || all.windows(read.len()).any(|piece| piece == read.as_slice()),
            };
            assert!(fits, "seed {seed}: {at} reads {read:?} of {all:?}");
            assert!(
                member.leaving || own.iter().all(|one| read.contains(one)),
                "seed {seed}: {at} misses what it pushed"
            );
        }
    }
    // Joiners and leavers that read something, and what was read.
    assert!(seen[0] > 50 && seen[1] > 30 && seen[2] > 2_000, "{seen:?}");
}

impl Part for Option<Barrier> {
    fn act(&mut self, chance: u64) {
        if let Some(barrier) = self.as_mut().filter(|barrier| barrier.usable().is_ok()) {
            (0..1 + chance / 50).for_each(|_| {
                barrier.advance();
            });
        }
    }

    fn close(&mut self) {
        *self = None;
    }

    fn is_closed(&self) -> bool {
        self.is_none()
    }
}

/// Nobody sees a round reached before all who take part have arrived for it, and in the end all see it.
#[test]
fn a_round_is_of_all_who_take_part_while_members_come_and_go() {
    let mut seen = [0; 2];
    for seed in 0..150 {
        let build = |worker: &mut Worker| Some(Barrier::new(worker));
        let mut void = BTreeSet::new();
        wander(seed, build, |members| {
            let runs = |worker: &Option<Worker>| worker.as_ref().is_some_and(|worker| worker.dataflows() > 0);
            let seated = || members.iter().filter(|member| member.seated && !member.left && runs(&member.worker));
            for (at, member) in members.iter().enumerate().filter(|(_, member)| member.seated && runs(&member.worker)) {
                match member.part.as_ref().is_none_or(|barrier| barrier.usable().is_ok()) {
                    true => assert!(member.part.is_none() || !void.contains(&at), "seed {seed}: {at} has one again"),
                    false => _ = void.insert(at),
                }
            }
            let barriers = || seated().filter_map(|member| member.part.as_ref());
            let Some(least) = barriers().filter(|one| one.usable().is_ok()).map(Barrier::round).min() else { return };
            for barrier in barriers() {
                assert!(
                    !barrier.reached(least + 1),
                    "seed {seed}: round {} is reached, and somebody is at {least}",
                    least + 1
                );
                seen[0] = seen[0].max(least);
                seen[1] += u64::from(least > 0 && barrier.reached(least));
            }
        });
    }
    assert!(seen[0] > 5 && seen[1] > 1_000, "{seen:?}");
}
