//! Workers join and leave in the middle of running dataflows, at moments that a seed decides, over messages that take as long as it wants;
//! the result is that of a serial computation. The real workers (or a copy of them with a fault: `tests/mutants.rs`), in one thread: the same
//! seed gives the same run.
//!
//! Graphs have exchanges, one of them behind data, a notificator, a loop in a nested scope, and a second dataflow with a broadcast, of which
//! joiners are taught what was before. Members come and go in the middle of epochs, several at once, the first one too; seats are given up, workers end before others. Once as threads of one process, and once as processes that share nothing:
//! then all they tell each other is encoded, and the seed moves the frames. Processes join and leave, threads join processes, and who has not
//! taken its seat dies.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use penstock_progress::notificator::Notificator;
use penstock_progress::probe::ProbeHandle;
use penstock_progress::timestamp::Product;

use crate::machine::fabric::{FabricGuard, FabricTag, Wire};
use crate::machine::{
    Door, Endpoint, Error, Exchange, InputHandle, MemberFault, OperatorBuilder, Pipeline, Ticket, Worker, fabric,
};

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

type Row = (u64, u64, u64);

/// What all members of a run add to.
#[derive(Clone, Default)]
struct Tally {
    rows: Rc<RefCell<Vec<Row>>>,
    /// How many pulses were given, sent and received.
    pulses: Rc<Cell<u64>>,
    sent: Rc<Cell<u64>>,
    came: Rc<Cell<u64>>,
}

/// Inputs of numbers and of pulses that are void.
type Ended = (Option<InputHandle<u64, Vec<u64>>>, Option<InputHandle<u64, u64>>);

/// One worker of the simulation and what it must keep to.
struct Member {
    worker: Option<Worker>,
    seated: bool,
    leaving: bool,
    numbers: Option<InputHandle<u64, Vec<u64>>>,
    probe: ProbeHandle<u64>,
    reached: u64,
    pulse: Option<InputHandle<u64, u64>>,
    /// What its peer had ended when it came.
    ended: Ended,
    /// The pulses that it has heard of, and whether it was taught those from before it came.
    known: Rc<RefCell<BTreeSet<u64>>>,
    taught: Rc<Cell<bool>>,
    /// Held by every operator.
    held: Rc<()>,
}

/// Numbers are exchanged, count down in a loop until they are below ten (by their last digit and one, each round on
/// another worker), and are summed by remainder and epoch, where they are. A pulse goes to everybody, and joiners are taught those before.
fn build(mut worker: Worker, tally: &Tally) -> Member {
    let held = Rc::new(());
    let (sink, own) = (tally.rows.clone(), held.clone());
    let (numbers, probe) = worker.dataflow::<u64, _>("sums", |scope| {
        let (handle, stream) = scope.new_input::<Vec<u64>>();
        let small = scope.nested::<Product<u64, u64>, _>("rounds", |inner| {
            let (feedback, back) = inner.feedback(Product::new(0, 1));
            let all = stream.enter(inner).concat(&back).exchange_by(|value| value / 3);
            let mut builder = OperatorBuilder::new(inner, "step");
            let mut input = builder.input(&all, Pipeline);
            let (mut again, next) = builder.output::<Vec<u64>>();
            let (mut end, ends) = builder.output::<Vec<u64>>();
            let own = own.clone();
            builder.build(move |_| {
                move |_| {
                    let _held = &own;
                    while let Some((capability, block)) = input.next() {
                        let (going, done): (Vec<u64>, Vec<u64>) = block.into_iter().partition(|value| *value >= 10);
                        if !done.is_empty() {
                            end.session(&capability).give(done);
                        }
                        if !going.is_empty() {
                            again
                                .session(&capability)
                                .give(going.into_iter().map(|value| value - value % 10 - 1).collect());
                        }
                    }
                    Ok(())
                }
            });
            next.connect_loop(feedback);
            ends.leave(scope)
        });
        let members = scope.clone();
        let by_value = Exchange::new(move |_: &u64, block: Vec<u64>, route: &mut dyn FnMut(usize, Vec<u64>)| {
            let mut parts: BTreeMap<usize, Vec<u64>> = BTreeMap::new();
            let peers = members.peers() as u64;
            block.into_iter().for_each(|value| parts.entry((value % peers) as usize).or_default().push(value));
            parts.into_iter().for_each(|(rank, part)| route(rank, part));
        });
        let sums = small.unary::<Vec<Row>, _>(by_value.behind_data(), "sum", move |_| {
            let mut notificator = Notificator::new();
            let mut open: BTreeMap<u64, BTreeMap<u64, u64>> = BTreeMap::new();
            let mut closed = BTreeSet::new();
            move |input, output, frontiers| {
                let _held = &own;
                while let Some((capability, block)) = input.next() {
                    let epoch = *capability.time();
                    assert!(!closed.contains(&epoch), "a block of epoch {epoch}, which was announced");
                    if !open.contains_key(&epoch) {
                        notificator.notify_at(capability.retain());
                    }
                    let sums = open.entry(epoch).or_default();
                    block.into_iter().for_each(|value| *sums.entry(value).or_insert(0) += value);
                }
                while let Some(capability) = notificator.next(&frontiers.all()) {
                    let epoch = *capability.time();
                    assert!(closed.insert(epoch), "epoch {epoch} was announced twice");
                    let sums = open.remove(&epoch).ok_or("announced without a request")?;
                    output.session(&capability).give(sums.into_iter().map(|(key, sum)| (epoch, key, sum)).collect());
                }
                Ok(())
            }
        });
        (handle, sums.inspect(move |_, block| sink.borrow_mut().extend(block)).probe().0)
    });
    let (sent, came) = (tally.sent.clone(), tally.came.clone());
    let (known, taught) = (Rc::new(RefCell::new(BTreeSet::new())), Rc::new(Cell::new(false)));
    let (knows, learnt) = (known.clone(), taught.clone());
    let pulse = worker.dataflow::<u64, _>("pulse", |scope| {
        let (handle, stream) = scope.new_input::<u64>();
        let members = scope.clone();
        let everywhere = Exchange::new(move |_: &u64, number: u64, route: &mut dyn FnMut(usize, u64)| {
            sent.set(sent.get() + members.peers() as u64);
            (0..members.peers()).for_each(|rank| route(rank, number));
        });
        let mut builder = OperatorBuilder::new(scope, "know");
        let mut input = builder.input(&stream, everywhere);
        let lesson = builder.lesson::<BTreeSet<u64>>();
        builder.build(move |_| {
            move |_| {
                while let Some((_, number)) = input.next() {
                    came.set(came.get() + 1);
                    // What it was taught may hold some of what comes to itself as well.
                    knows.borrow_mut().insert(number);
                }
                if let Some(before) = lesson.learn() {
                    knows.borrow_mut().extend(before);
                }
                learnt.set(!lesson.is_due());
                for pupil in lesson.pupils() {
                    lesson.teach(pupil, knows.borrow().clone());
                }
                Ok(())
            }
        });
        handle
    });
    let (numbers, pulse) = (Some(numbers), Some(pulse));
    let (worker, reached) = (Some(worker), 0);
    let ended = (None, None);
    Member { worker, seated: false, leaving: false, numbers, probe, reached, pulse, ended, known, taught, held }
}

const EPOCHS: u64 = 6;

/// What happened in runs.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Seen {
    pub joined: usize,
    pub left: usize,
    pub first_left: usize,
    pub stayed: usize,
    pub refused: usize,
    pub died: usize,
    pub rows: usize,
}

/// Steps a member, or goes on with its join; true while it has more to do.
fn step(member: &mut Member, seen: &mut Seen) -> Result<bool, Error> {
    let Some(worker) = &mut member.worker else { return Ok(false) };
    if !member.seated {
        match worker.try_bootstrap()? {
            None => return Ok(true),
            Some(joined) => {
                member.seated = true;
                seen.joined += usize::from(joined);
                // Of what its peer had ended it has none, and never will.
                let numbers = member.numbers.take_if(|input| input.has_ended());
                member.ended = (numbers, member.pulse.take_if(|input| input.has_ended()));
            }
        }
    }
    let more = worker.step()?;
    let (numbers, pulse) = &member.ended;
    let ended = numbers.iter().all(|input| input.has_ended()) && pulse.iter().all(|input| input.has_ended());
    assert!(ended, "what had ended goes on");
    let stands = member.probe.with_frontier(|frontier| frontier.first().copied().unwrap_or(u64::MAX));
    if !worker.has_left() {
        assert!(stands >= member.reached, "the probe went from {} back to {stands}", member.reached);
        member.reached = stands;
    }
    Ok(more)
}

const TAG: FabricTag = FabricTag { query: 5, generation: 1 };

/// The processes of a run, and who moves what they send.
#[derive(Default)]
struct Processes {
    seed: u64,
    /// None for one that has left or died.
    doors: Vec<Option<Door>>,
    guards: Vec<Option<FabricGuard>>,
    /// By process, and the one at the other end.
    wires: BTreeMap<(usize, usize), Wire>,
    /// Of members.
    homes: BTreeMap<usize, usize>,
}

impl Processes {
    /// One more process with links to all others; with 0 founding processes one that joins.
    fn start(&mut self, founding: usize, threads: usize) -> Vec<Endpoint> {
        let process = self.doors.len();
        let seed = self.seed ^ (process as u64) << 48;
        let (seats, door, guard) = fabric::simulated_process(process, founding, threads, TAG, seed).unwrap();
        for (other, there) in self.doors.iter().enumerate() {
            let Some(there) = there else { continue };
            self.wires.insert((process, other), door.wire(other).unwrap());
            self.wires.insert((other, process), there.wire(process).unwrap());
        }
        self.homes.extend(seats.iter().map(|seat| (seat.index(), process)));
        self.doors.push(Some(door));
        self.guards.push(Some(guard));
        seats
    }

    /// Some frames of some link leave their lanes, and some arrive.
    fn carry(&self, random: &mut Random) {
        let Some((from, to)) = self.wires.keys().nth(random.below(self.wires.len().max(1) as u64) as usize) else {
            return;
        };
        if let (Some(here), Some(there)) = (self.wires.get(&(*from, *to)), self.wires.get(&(*to, *from))) {
            // Few at a time, so that some wait when a process closes; also where none does, for the goodbye stands in no lane.
            (0..random.below(3)).for_each(|_| here.take(random.chance(50)));
            let count = random.below(here.under_way() as u64 + 1);
            here.carry(there, count as usize).unwrap_or_else(|error| panic!("from {from} to {to}: {error}"));
        }
    }

    /// Ends a process as a signal does.
    fn kill(&mut self, process: usize) {
        self.doors[process] = None;
        for other in 0..self.doors.len() {
            if let Some(wire) = self.wires.remove(&(other, process)) {
                wire.cut();
            }
            self.wires.remove(&(process, other));
        }
    }

    fn living(&self) -> Vec<usize> {
        (0..self.doors.len()).filter(|process| self.doors[*process].is_some()).collect()
    }
}

struct Run {
    random: Random,
    /// Of threads of one process; else one of the processes'.
    door: Option<Door>,
    processes: Processes,
    tally: Tally,
    members: Vec<Member>,
    /// With their processes.
    tickets: Vec<(usize, Ticket)>,
    expected: BTreeMap<(u64, u64), u64>,
    seen: Seen,
    joins: u64,
    leaves: u64,
    give_ups: u64,
    /// Whether who has asked to leave only steps, as [`Worker::leave`] does: its program sends nothing more and ends no epoch.
    sits: bool,
}

impl Run {
    fn new(seed: u64, linked: bool) -> Self {
        let mut random = Random(seed);
        let founders = 1 + random.below(3) as usize;
        let (joins, leaves, give_ups) = (random.below(5), random.below(4), random.below(if linked { 3 } else { 2 }));
        // Both founders may leave, of whom the first has ended its numbers: who joins by it has none, whoever leaves them to it.
        let bereft = seed % 5 == 4;
        let (founders, joins, leaves) = if bereft { (2, joins.max(1), 2) } else { (founders, joins, leaves) };
        let (mut door, mut processes) = (None, Processes { seed, ..Processes::default() });
        let seats = if linked {
            let (founding, threads) = if founders == 2 { (1 + random.below(2) as usize, 1) } else { (founders, 1) };
            let threads = if founding == 1 { founders } else { threads };
            (0..founding).flat_map(|_| processes.start(founding, threads)).collect()
        } else {
            let (seats, only) = fabric::joinable_shuffled(founders, seed);
            door = Some(only);
            seats
        };
        let tally = Tally::default();
        let mut members: Vec<Member> = seats.into_iter().map(|seat| build(Worker::new(seat), &tally)).collect();
        if bereft {
            members[0].numbers = None;
        }
        let (expected, seen) = (BTreeMap::new(), Seen::default());
        let (tickets, sits) = (Vec::new(), seed.is_multiple_of(2));
        Run { random, door, processes, tally, members, tickets, expected, seen, joins, leaves, give_ups, sits }
    }

    /// Asks for so many workers, in this process or another, which may only start.
    fn ask(&mut self, count: usize) {
        let (process, door) = match &self.door {
            Some(door) => (0, door.clone()),
            None => {
                if self.random.chance(70) {
                    self.processes.start(0, 0);
                }
                let living = self.processes.living();
                let newest = if self.random.chance(70) { living.len().saturating_sub(1) } else { 0 };
                let Some(process) = living.get(newest) else { return };
                (*process, self.processes.doors[*process].clone().expect("it lives"))
            }
        };
        self.tickets.push((process, door.ask(count).expect("more than none")));
    }

    /// Processes leave when nobody is there any more.
    fn close(&mut self) {
        for process in self.processes.living() {
            let works = |(id, home): (&usize, &usize)| *home == process && self.members[*id].worker.is_some();
            let busy = self.processes.homes.iter().any(works) || self.tickets.iter().any(|(home, _)| *home == process);
            if !busy && self.random.chance(5) {
                self.processes.doors[process] = None;
                self.processes.guards[process] = None;
            }
        }
    }

    fn goes_on(&self) -> bool {
        let works =
            |member: &Member| member.seated && member.worker.as_ref().is_some_and(|worker| worker.dataflows() > 0);
        self.members.iter().any(|member| works(member) || !member.seated && member.numbers.is_some())
    }

    /// Joiners take their seats when those are there.
    fn seat(&mut self) {
        let tally = self.tally.clone();
        let (mut seats, mut waiting) = (Vec::new(), Vec::new());
        for (process, ticket) in self.tickets.drain(..) {
            match ticket.try_seats() {
                Ok(Some(given)) => seats.extend(given.into_iter().map(|seat| (process, seat))),
                Ok(None) => waiting.push((process, ticket)),
                Err(_) => self.seen.refused += 1,
            }
        }
        self.tickets = waiting;
        self.processes.homes.extend(seats.iter().map(|(process, seat): &(usize, Endpoint)| (seat.index(), *process)));
        for (process, seat) in seats {
            let index = seat.index();
            assert!(seat.joins());
            assert!(self.door.is_none() || index == self.members.len());
            while self.members.len() <= index {
                self.members.push(gone());
            }
            let alone = self.processes.homes.values().filter(|home| **home == process).count() == 1;
            if self.door.is_none() && alone && self.give_ups > 0 && self.random.chance(60) {
                self.give_ups -= 1;
                self.processes.kill(process);
                self.tickets.retain(|(home, _)| *home != process);
                self.seen.died += 1;
                continue;
            }
            if self.give_ups > 0 && self.random.chance(30) {
                self.give_ups -= 1;
                // Before a worker is made of it, or after that has begun to build.
                let member = self.random.chance(50).then(|| build(Worker::new(seat), &tally));
                drop(member);
                self.seen.refused += 1;
                continue;
            }
            self.members[index] = build(Worker::new(seat), &tally);
        }
    }

    fn act(&mut self) {
        self.seat();
        if self.door.is_none() {
            self.close();
            (0..self.random.below(4)).for_each(|_| self.processes.carry(&mut self.random));
        }
        let chosen = self.random.below(self.members.len() as u64) as usize;
        let slowest = self.members.iter().filter(|member| member.seated);
        let slowest = slowest.filter_map(|member| member.numbers.as_ref().filter(|input| !input.has_ended()));
        let slowest = slowest.map(|input| *input.time()).min();
        let pending = self.joins > 0 || !self.tickets.is_empty() || self.members.iter().any(|member| !member.seated);
        let member = &mut self.members[chosen];
        if let Some(slowest) = slowest.filter(|_| member.seated && !member.leaving) {
            assert!(member.reached <= slowest, "the probe stands at {} and an input at {slowest}", member.reached);
        }
        if member.leaving {
            member.numbers = member.numbers.take().filter(|input| !input.has_ended());
            member.pulse = member.pulse.take().filter(|input| !input.has_ended());
        }
        match self.random.below(10) {
            _ if self.sits && member.leaving => self.step(chosen),
            0 | 1 => {
                if let Some(input) = member.numbers.as_mut().filter(|_| member.seated) {
                    let block: Vec<u64> = (0..self.random.below(8)).map(|_| self.random.below(100)).collect();
                    for mut value in block.iter().copied() {
                        while value >= 10 {
                            value = value - value % 10 - 1;
                        }
                        *self.expected.entry((*input.time(), value)).or_insert(0) += value;
                    }
                    input.send(block);
                }
            }
            2 if !pending || self.random.chance(15) => {
                if let Some(input) = member.numbers.as_mut().filter(|_| member.seated) {
                    let next = input.time() + 1 + self.random.below(2);
                    // Some end theirs long before the others: who joins by them has none.
                    if next > EPOCHS || self.random.chance(10) {
                        member.numbers = None;
                    } else {
                        input.advance_to(next).expect("a later time");
                    }
                }
            }
            3 => {
                if let Some(input) = member.pulse.as_mut().filter(|_| member.seated) {
                    input.send(self.tally.pulses.replace(self.tally.pulses.get() + 1));
                    if !pending && self.random.below(4) == 0 {
                        member.pulse = None;
                    }
                }
            }
            4 if self.joins > 0 && self.random.chance(20) => {
                let count = 1 + self.random.below(self.joins.min(3));
                self.joins -= count;
                self.ask(count as usize);
            }
            5 if self.leaves > 0 && member.seated && !member.leaving && self.random.chance(20) => {
                if let Some(worker) = member.worker.as_mut().filter(|worker| worker.dataflows() > 0) {
                    match worker.start_leaving() {
                        Ok(()) => {
                            self.leaves -= 1;
                            member.leaving = true;
                        }
                        Err(Error::Member { fault: MemberFault::Alone, .. }) => {}
                        Err(error) => panic!("worker {chosen} cannot leave: {error}"),
                    }
                }
            }
            _ => self.step(chosen),
        }
    }

    fn step(&mut self, chosen: usize) {
        let member = &mut self.members[chosen];
        match step(member, &mut self.seen) {
            Ok(more) => {
                let Some(worker) = &member.worker else { return };
                let ends = member.seated && !more && worker.dataflows() == 0;
                if member.leaving && worker.is_leaving().is_err() {
                    member.leaving = false;
                    self.seen.stayed += 1;
                }
                if worker.has_left() {
                    self.seen.left += 1;
                    self.seen.first_left += usize::from(chosen == 0);
                }
                if ends && (worker.has_left() || self.random.chance(50)) {
                    assert_eq!(Rc::strong_count(&member.held), 1, "an operator of worker {chosen} lives on");
                    (member.worker, member.numbers, member.pulse) = (None, None, None);
                }
            }
            Err(Error::Member { fault: MemberFault::Over | MemberFault::Withdrawn, worker }) if !member.seated => {
                assert_eq!(worker, chosen);
                self.seen.refused += 1;
                (member.worker, member.numbers, member.pulse) = (None, None, None);
                // It is not waited for.
                member.seated = true;
            }
            Err(error) => panic!("worker {chosen}: {error}"),
        }
    }

    fn check(&mut self) {
        let mut found = BTreeMap::new();
        for (epoch, key, sum) in self.tally.rows.take() {
            self.seen.rows += 1;
            *found.entry((epoch, key)).or_insert(0) += sum;
        }
        assert_eq!(found, self.expected);
        assert_eq!(self.tally.came, self.tally.sent, "broadcasts");
        let all = self.tally.pulses.get();
        for (index, member) in self.members.iter().enumerate().filter(|(_, member)| !member.leaving) {
            if member.worker.is_some() {
                assert!(member.taught.get(), "worker {index} has learnt nothing");
                let missing = (0..all).find(|number| !member.known.borrow().contains(number));
                assert_eq!(missing, None, "a pulse that worker {index} does not know");
            }
        }
    }
}

impl Seen {
    pub(crate) fn add(&mut self, other: Seen) {
        self.joined += other.joined;
        self.left += other.left;
        self.first_left += other.first_left;
        self.stayed += other.stayed;
        self.refused += other.refused;
        self.died += other.died;
        self.rows += other.rows;
    }
}

/// Who never took its seat.
fn gone() -> Member {
    let (probe, held) = (ProbeHandle::new(), Rc::new(()));
    let (known, taught) = (Rc::default(), Rc::default());
    Member {
        worker: None,
        seated: true,
        leaving: false,
        numbers: None,
        probe,
        reached: 0,
        pulse: None,
        ended: (None, None),
        known,
        taught,
        held,
    }
}

/// One run; panics when something is wrong.
pub(crate) fn simulate(seed: u64, linked: bool) -> Seen {
    let mut run = Run::new(seed, linked);
    let mut turns = 0;
    while run.goes_on() {
        turns += 1;
        assert!(turns < 2_000_000, "no end after {turns} turns: {}", describe(&run));
        run.act();
    }
    run.check();
    run.seen
}

fn describe(run: &Run) -> String {
    let member = |member: &Member| {
        let dataflows = member.worker.as_ref().map(Worker::dataflows);
        let input = member.numbers.as_ref().map(|input| *input.time());
        let leaving = member.worker.as_ref().map(Worker::is_leaving);
        format!(
            "{dataflows:?} dataflows, input {input:?}, seated {}, leaving {} {leaving:?}",
            member.seated, member.leaving
        )
    };
    let tickets: Vec<usize> = run.tickets.iter().map(|(process, _)| *process).collect();
    let members = run.members.iter().map(member).collect::<Vec<_>>().join("; ");
    format!("{members}; tickets of processes {tickets:?}; living {:?}", run.processes.living())
}
