//! Several workers in one thread, stepped, fed and broken in an order that a seed decides, with messages that take as long as it
//! wants: the same seed gives the same run. Graphs have an exchange, a notificator, a loop in a nested scope and a second dataflow.
//!
//! `PENSTOCK_SEEDS=10000 cargo test -p penstock-dataflow --test all simulation` tries more seeds than the usual 300; a seed that
//! fails says how to run it again.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;

use penstock_dataflow::{Error, InputHandle, OperatorBuilder, Pipeline, Worker, fabric};
use penstock_progress::notificator::Notificator;
use penstock_progress::probe::ProbeHandle;
use penstock_progress::timestamp::Product;

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

/// What goes wrong: at the `at`-th chance, on one worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    None,
    /// An operator panics or returns an error in one of its runs.
    Panic,
    Error,
    /// The program calls for the end, or drops its worker.
    Abort,
    Drop,
}

/// The chance that a fault waits for.
#[derive(Clone)]
struct Trigger {
    armed: Option<Fault>,
    left: Rc<Cell<u64>>,
}

impl Trigger {
    fn pull(&self, fault: Fault) -> bool {
        if self.armed != Some(fault) || self.left.get() == 0 {
            return false;
        }
        self.left.set(self.left.get() - 1);
        self.left.get() == 0
    }

    fn run(&self) -> Result<(), &'static str> {
        assert!(!self.pull(Fault::Panic), "planned");
        if self.pull(Fault::Error) { Err("planned") } else { Ok(()) }
    }
}

type Row = (u64, u64, u64);

/// One worker of the simulation and what it must keep to.
struct Member {
    worker: Option<Worker>,
    numbers: Option<InputHandle<u64, Vec<u64>>>,
    /// The probe behind everything, and the least time that it may stand at.
    probe: ProbeHandle<u64>,
    reached: u64,
    pulse: Option<InputHandle<u64, ()>>,
    rows: Rc<RefCell<Vec<Row>>>,
    trigger: Trigger,
    /// Held by every operator.
    held: Rc<()>,
}

/// Numbers are exchanged, count down in a loop until they are below ten (by their last digit and one, each round on
/// another worker), and are summed by remainder and epoch. Rows: epoch, remainder, sum.
fn build(mut worker: Worker, trigger: Trigger) -> Member {
    let (rows, held) = (Rc::new(RefCell::new(Vec::new())), Rc::new(()));
    let (sink, own) = (rows.clone(), held.clone());
    let pulled = trigger.clone();
    let (numbers, probe) = worker.dataflow::<u64, _>("sums", |scope| {
        let (handle, stream) = scope.new_input::<Vec<u64>>();
        let small = scope.nested::<Product<u64, u64>, _>("rounds", |inner| {
            let (feedback, back) = inner.feedback(Product::new(0, 1));
            let all = stream.enter(inner).concat(&back).exchange_by(|value| value / 3);
            let mut builder = OperatorBuilder::new(inner, "step");
            let mut input = builder.input(&all, Pipeline);
            let (mut again, next) = builder.output::<Vec<u64>>();
            let (mut end, ends) = builder.output::<Vec<u64>>();
            let (own, pulled) = (own.clone(), pulled.clone());
            builder.build(move |_| {
                move |_| {
                    let _held = &own;
                    pulled.run()?;
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
        let sums = small.exchange_by(|value| *value).unary::<Vec<Row>, _>(Pipeline, "sum", move |_| {
            let mut notificator = Notificator::new();
            let mut open: BTreeMap<u64, BTreeMap<u64, u64>> = BTreeMap::new();
            let mut closed = BTreeSet::new();
            move |input, output, frontiers| {
                let _held = &own;
                pulled.run()?;
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
    let pulse = worker.dataflow::<u64, _>("pulse", |scope| {
        let (handle, stream) = scope.new_input::<()>();
        stream.exchange(|_, (), route| route(0, ()));
        handle
    });
    let (numbers, pulse) = (Some(numbers), Some(pulse));
    Member { worker: Some(worker), numbers, probe, reached: 0, pulse, rows, trigger, held }
}

const EPOCHS: u64 = 6;

/// Steps a worker; true while it has more to do.
fn step(member: &mut Member) -> Result<bool, Error> {
    let Some(worker) = &mut member.worker else { return Ok(false) };
    let more = worker.step()?;
    let stands = member.probe.with_frontier(|frontier| frontier.first().copied().unwrap_or(u64::MAX));
    assert!(stands >= member.reached, "the probe went from {} back to {stands}", member.reached);
    member.reached = stands;
    Ok(more)
}

/// One run. `Err` holds what the first worker that failed reported.
fn simulate(seed: u64, workers: usize, fault: Fault) {
    let mut random = Random(seed);
    let (victim, chance) = (random.below(workers as u64) as usize, 1 + random.below(40));
    let seats = fabric::shuffled(workers, seed).into_iter();
    let mut members: Vec<Member> = seats
        .map(|seat| {
            let armed = (seat.index() == victim && fault != Fault::None).then_some(fault);
            build(Worker::new(seat), Trigger { armed, left: Rc::new(Cell::new(chance)) })
        })
        .collect();
    let mut expected: BTreeMap<(u64, u64), u64> = BTreeMap::new();
    let mut errors: BTreeMap<usize, Error> = BTreeMap::new();
    let mut turns = 0;
    while errors.len() < workers
        && members.iter().any(|member| member.worker.as_ref().is_some_and(|w| w.dataflows() > 0))
    {
        turns += 1;
        assert!(turns < 1_000_000, "no end after a million turns");
        let chosen = random.below(workers as u64) as usize;
        let slowest = members.iter().filter_map(|member| Some(*member.numbers.as_ref()?.time())).min();
        let member = &mut members[chosen];
        // Nothing may be announced that an open input can still reach.
        if let Some(slowest) = slowest.filter(|_| errors.is_empty()) {
            assert!(member.reached <= slowest, "the probe stands at {} and an input at {slowest}", member.reached);
        }
        match random.below(8) {
            0 | 1 => {
                if let Some(input) = &mut member.numbers {
                    let block: Vec<u64> = (0..random.below(8)).map(|_| random.below(100)).collect();
                    for mut value in block.iter().copied() {
                        while value >= 10 {
                            value = value - value % 10 - 1;
                        }
                        *expected.entry((*input.time(), value)).or_insert(0) += value;
                    }
                    input.send(block);
                }
            }
            2 => {
                if let Some(input) = &mut member.numbers {
                    let next = input.time() + 1 + random.below(2);
                    if next > EPOCHS {
                        member.numbers = None;
                    } else {
                        input.advance_to(next).expect("a later time");
                    }
                }
            }
            3 => {
                if let Some(input) = &mut member.pulse {
                    input.send(());
                    if random.below(4) == 0 {
                        member.pulse = None;
                    }
                }
            }
            4 if member.trigger.pull(Fault::Abort) => {
                if let Some(worker) = &member.worker {
                    worker.abort(Error::Aborted { worker: chosen, reason: "planned".to_string() });
                }
            }
            4 if member.trigger.pull(Fault::Drop) => {
                let left = member.worker.take().map(|worker| worker.dataflows());
                let reason = "the worker was dropped with unfinished dataflows".to_string();
                if left != Some(0) {
                    errors.insert(chosen, Error::Aborted { worker: chosen, reason });
                }
            }
            _ => {
                if let Err(error) = step(member) {
                    errors.insert(chosen, error);
                }
            }
        }
    }
    if errors.is_empty() {
        for member in &members {
            assert!(member.worker.is_none() || (member.probe.done() && Rc::strong_count(&member.held) == 1));
        }
        let mut found = BTreeMap::new();
        for (epoch, key, sum) in members.iter().flat_map(|member| member.rows.take()) {
            assert_eq!(found.insert((epoch, key), sum), None, "two sums of {key} in epoch {epoch}");
        }
        assert_eq!(found, expected);
        return;
    }
    // Everyone has the same cause, and keeps it; nobody holds anything any more.
    assert_ne!(fault, Fault::None, "{errors:?}");
    let texts: BTreeSet<String> = errors.values().map(Error::to_string).collect();
    assert_eq!(texts.len(), 1, "{texts:?}");
    let text = texts.first().map_or("", String::as_str);
    assert!(text.contains("planned") || fault == Fault::Drop, "{text}");
    assert!(text.contains(&format!("worker {victim}")), "{text} does not name worker {victim}");
    for member in &mut members {
        // Who had finished both dataflows before has no more to say than the cause.
        assert!(member.worker.as_mut().is_none_or(|worker| worker.step().is_err() && worker.dataflows() == 0));
        assert_eq!(Rc::strong_count(&member.held), 1, "an operator lives on");
    }
}

/// The seeds to try: `PENSTOCK_SEED` alone, or `PENSTOCK_SEEDS` from 0 on.
fn seeds() -> Range<u64> {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().expect("a number of seeds"));
    if let Some(seed) = number("PENSTOCK_SEED") {
        return seed..seed + 1;
    }
    if cfg!(miri) {
        return 1..2; // two workers
    }
    0..number("PENSTOCK_SEEDS").unwrap_or(300)
}

fn try_all(test: &str, run: impl Fn(u64)) {
    for seed in seeds() {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| run(seed))) {
            eprintln!("replay: PENSTOCK_SEED={seed} cargo test -p penstock-dataflow --test all simulation::{test}");
            std::panic::resume_unwind(panic);
        }
    }
}

#[test]
fn any_number_of_workers_gives_the_sums_of_one() {
    try_all("any_number_of_workers_gives_the_sums_of_one", |seed| {
        simulate(seed, 1 + seed as usize % 5, Fault::None);
    });
}

#[test]
fn a_fault_at_any_turn_ends_all_workers_with_its_cause() {
    let hook = std::panic::take_hook();
    // Planned panics are many, and not news.
    std::panic::set_hook(Box::new(move |info| {
        if !info.payload_as_str().is_some_and(|text| text.contains("planned")) {
            hook(info);
        }
    }));
    try_all("a_fault_at_any_turn_ends_all_workers_with_its_cause", |seed| {
        let fault = [Fault::Panic, Fault::Error, Fault::Abort, Fault::Drop][seed as usize % 4];
        simulate(seed, 1 + seed as usize / 4 % 4, fault);
    });
}
