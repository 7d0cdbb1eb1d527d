//! Random bodies with and without bounds, on workers of one thread that are stepped and fed in an order that a seed decides, over
//! messages that take as long as it wants. Results equal those of a plain interpretation at every outer time, windows hold,
//! and every run ends.
//!
//! `PROPTEST_CASES=20000 cargo test -p penstock-bounded --test all simulation` searches longer.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::{Arc, Mutex};

use crate::support::Random;
use penstock_bounded::{BoundedStream, Bounds, Limits, Memory, Monitor};
use penstock_dataflow::{InputHandle, Scope, Stream, Worker, fabric};
use penstock_progress::timestamp::{Product, Timestamp};
use proptest::prelude::*;

/// A step of a body.
#[derive(Clone, Copy, Debug)]
enum Op {
    Add(u64),
    Drop(u64),
    Exchange(u64),
    /// Each number and the one behind it.
    Twice,
    /// Around a loop, halved until it is below the limit.
    Halve(u64),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        (1u64..50).prop_map(Op::Add),
        (2u64..6).prop_map(Op::Drop),
        (1u64..4).prop_map(Op::Exchange),
        Just(Op::Twice),
        (1u64..40).prop_map(Op::Halve),
    ]
}

/// What a body makes of one number.
fn interpret(ops: &[Op], number: u64) -> Vec<u64> {
    let each = |numbers: Vec<u64>, op: &Op| -> Vec<u64> {
        match *op {
            Op::Add(more) => numbers.into_iter().map(|number| number + more).collect(),
            Op::Drop(divisor) => numbers.into_iter().filter(|number| number % divisor != 0).collect(),
            Op::Exchange(_) => numbers,
            Op::Twice => numbers.into_iter().flat_map(|number| [number, number + 1]).collect(),
            Op::Halve(limit) => numbers
                .into_iter()
                .map(|mut number| {
                    while number >= limit {
                        number /= 2;
                    }
                    number
                })
                .collect(),
        }
    };
    ops.iter().fold(vec![number], each)
}

/// The same as dataflow.
fn apply<T: Timestamp>(scope: &Scope<T>, stream: Stream<T, Vec<u64>>, ops: &[Op]) -> Stream<T, Vec<u64>> {
    ops.iter().fold(stream, |stream, op| match *op {
        Op::Add(more) => stream.map_blocks(move |block| block.into_iter().map(|number| number + more).collect()),
        Op::Drop(divisor) => {
            stream.map_blocks(move |block| block.into_iter().filter(|number| number % divisor != 0).collect())
        }
        Op::Exchange(divisor) => stream.exchange_by(move |number| number / divisor),
        Op::Twice => stream.map_blocks(|block| block.into_iter().flat_map(|number| [number, number + 1]).collect()),
        Op::Halve(limit) => scope.nested::<Product<T, u64>, _>("halve", |inner| {
            let (feedback, back) = inner.feedback(Product::new(T::Summary::default(), 1));
            let all = stream.enter(inner).concat(&back);
            let part = |keep: fn(u64, u64) -> bool, all: &Stream<Product<T, u64>, Vec<u64>>| {
                all.map_blocks(move |block| block.into_iter().filter(|number| keep(*number, limit)).collect::<Vec<_>>())
            };
            let large = part(|number, limit| number >= limit, &all);
            // What has become empty goes no further, or the loop never ends.
            let halved = large.unary::<Vec<u64>, _>(penstock_dataflow::Pipeline, "half", |_| {
                |input, output, _| {
                    input.for_each(|capability, block: Vec<u64>| {
                        if !block.is_empty() {
                            output.session(&capability).give(block.into_iter().map(|number| number / 2).collect());
                        }
                    });
                    Ok(())
                }
            });
            halved.exchange_by(|number| *number).connect_loop(feedback);
            part(|number, limit| number < limit, &all).leave(scope)
        }),
    })
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Free,
    Fixed(u64, u64),
    /// Bounds that move at every run of the batcher, on a clock and a memory of their own.
    Restless(u64),
}

fn bounds(kind: Kind) -> Option<Bounds> {
    match kind {
        Kind::Free => None,
        Kind::Fixed(batches, size) => Some(Bounds::fixed(batches, size).unwrap()),
        Kind::Restless(seed) => {
            let (clock, memory) = (Mutex::new((0, Random(seed))), Mutex::new(Random(seed + 1)));
            let limits = Limits { batches: (1, 2, 4), batch_size: (1, 2, 50), rest: 1, ..Limits::default() };
            let clock = Arc::new(move || {
                let (now, random) = &mut *clock.lock().unwrap();
                *now += random.below(40_000_000);
                *now
            });
            let memory = Memory::reading(move || Some(memory.lock().unwrap().below(100) as f64 / 100.0));
            Some(Bounds::adaptive().within(limits).unwrap().with_clock(clock).with_memory(memory))
        }
    }
}

type Row = (u64, u64);

struct Member {
    worker: Worker,
    input: Option<InputHandle<u64, Vec<u64>>>,
    rows: Rc<RefCell<Vec<Row>>>,
    monitor: Option<Monitor>,
}

fn build(mut worker: Worker, ops: &[Op], kind: Kind) -> Member {
    let rows = Rc::new(RefCell::new(Vec::new()));
    let sink = rows.clone();
    let (input, monitor) = worker.dataflow::<u64, _>("random", |scope| {
        let (input, stream) = scope.new_input::<Vec<u64>>();
        let expand = |many: u64| 0..many;
        let (out, monitor) = match bounds(kind) {
            Some(bounds) => {
                let (out, monitor) = stream.bounded_flat_map(bounds, expand, |inner, items| apply(inner, items, ops));
                (out, Some(monitor))
            }
            None => {
                let items = stream.map_blocks(move |block| block.into_iter().flat_map(expand).collect());
                (apply(scope, items, ops), None)
            }
        };
        out.inspect(move |time, block| sink.borrow_mut().extend(block.iter().map(|number| (*time, *number))));
        (input, monitor)
    });
    Member { worker, input: Some(input), rows, monitor }
}

const EPOCHS: u64 = 4;

fn simulate(seed: u64, workers: usize, ops: &[Op], kind: Kind) {
    let mut random = Random(seed);
    let seats = fabric::shuffled(workers, seed).into_iter();
    let mut members: Vec<Member> = seats.map(|seat| build(Worker::new(seat), ops, kind)).collect();
    let mut expected: Vec<Row> = Vec::new();
    let mut turns = 0;
    while members.iter().any(|member| member.worker.dataflows() > 0) {
        turns += 1;
        assert!(turns < 1_000_000, "no end after a million turns");
        let member = &mut members[random.below(workers as u64) as usize];
        match (random.below(8), &mut member.input) {
            (0, Some(input)) => {
                let block: Vec<u64> = (0..random.below(4)).map(|_| random.below(30)).collect();
                let epoch = *input.time();
                let items = block.iter().flat_map(|many| 0..*many);
                expected.extend(items.flat_map(|item| interpret(ops, item)).map(|number| (epoch, number)));
                input.send(block);
            }
            (1, Some(input)) => {
                let next = input.time() + 1 + random.below(2);
                if next > EPOCHS {
                    member.input = None;
                } else {
                    input.advance_to(next).expect("a later time");
                }
            }
            _ => drop(member.worker.step().expect("nothing fails")),
        }
        if let (Some(monitor), Kind::Fixed(batches, size)) = (&member.monitor, kind) {
            let stats = monitor.stats();
            assert!(stats.maximum <= batches && stats.unfinished_items <= size * stats.unfinished, "{stats:?}");
        }
    }
    for member in &members {
        if let Some(stats) = member.monitor.as_ref().map(Monitor::stats) {
            assert_eq!((stats.unfinished, stats.buffered, &stats.holding), (0, 0, &None), "{stats:?}");
        }
    }
    let mut rows: Vec<Row> = members.iter().flat_map(|member| member.rows.take()).collect();
    rows.sort_unstable();
    expected.sort_unstable();
    assert_eq!(rows, expected);
}

fn kind() -> impl Strategy<Value = Kind> {
    prop_oneof![
        1 => Just(Kind::Free),
        4 => (1u64..5, 1u64..20).prop_map(|(batches, size)| Kind::Fixed(batches, size)),
        1 => any::<u32>().prop_map(|seed| Kind::Restless(u64::from(seed))),
    ]
}

proptest! {
    #![proptest_config(penstock_cases::cases(150))]

    #[test]
    fn any_body_gives_the_same_within_any_bounds(
        seed in any::<u64>(),
        workers in 1usize..5,
        ops in proptest::collection::vec(op(), 0..6),
        kind in kind(),
    ) {
        simulate(seed, workers, &ops, kind);
    }
}
