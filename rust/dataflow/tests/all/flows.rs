//! The same program gives the same results however many workers run it and however they are connected.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use crate::support::everywhere;
use penstock_dataflow::{BoxError, Exchange, OperatorBuilder, Pipeline, Worker};
use penstock_progress::notificator::Notificator;
use penstock_progress::timestamp::Product;

fn mix(value: u64) -> u64 {
    (value ^ (value >> 31)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
}

/// Sums per key and epoch; each worker feeds the numbers that are its share.
fn sums(worker: &mut Worker) -> Result<Vec<(u64, u64, u64)>, BoxError> {
    let out = Rc::new(RefCell::new(Vec::new()));
    let sink = out.clone();
    let (mut input, probe) = worker.dataflow::<u64, _>("sums", |scope| {
        let (handle, stream) = scope.new_input::<Vec<u64>>();
        let peers = scope.peers();
        let route = Exchange::new(move |_: &u64, block: Vec<u64>, route: &mut dyn FnMut(usize, Vec<u64>)| {
            for value in block {
                route(mix(value % 17) as usize % peers, vec![value]);
            }
        });
        let mut builder = OperatorBuilder::new(scope, "sum");
        let mut input = builder.input(&stream, route);
        let (mut output, sums) = builder.output::<Vec<(u64, u64, u64)>>();
        builder.build(|capabilities| {
            drop(capabilities);
            let mut notificator = Notificator::new();
            let mut pending: BTreeMap<u64, BTreeMap<u64, u64>> = BTreeMap::new();
            move |frontiers| {
                input.for_each(|capability, block| {
                    if !pending.contains_key(capability.time()) {
                        notificator.notify_at(capability.retain());
                    }
                    let sums = pending.entry(*capability.time()).or_default();
                    block.into_iter().for_each(|value| *sums.entry(value % 17).or_insert(0) += value);
                });
                while let Some(capability) = notificator.next(&frontiers.all()) {
                    let epoch = *capability.time();
                    let sums = pending.remove(&epoch).ok_or("notified twice")?;
                    output.session(&capability).give(sums.into_iter().map(|(key, sum)| (epoch, key, sum)).collect());
                }
                Ok(())
            }
        });
        let (probe, _) = sums.inspect(move |_, block| sink.borrow_mut().extend(block)).probe();
        (handle, probe)
    });
    for epoch in 0..20 {
        let share = (0..200u64).filter(|value| *value as usize % worker.peers() == worker.index());
        input.send(share.map(|value| epoch * 1000 + value).collect());
        input.advance_to(epoch + 1)?;
        if epoch % 3 == 0 {
            worker.step_until(None, || !probe.less_than(&(epoch + 1)))?;
        }
    }
    input.close();
    while worker.step_or_park(None)? {}
    assert!(probe.done());
    Ok(out.take())
}

#[test]
fn one_worker_and_many_give_equal_sums() {
    let mut expected = BTreeMap::new();
    for epoch in 0..20 {
        for value in 0..200 {
            *expected.entry((epoch, (epoch * 1000 + value) % 17)).or_insert(0) += epoch * 1000 + value;
        }
    }
    for (name, results) in everywhere(sums) {
        let mut all: Vec<_> = results.concat();
        all.sort();
        let found: BTreeMap<_, _> = all.iter().map(|(epoch, key, sum)| ((*epoch, *key), *sum)).collect();
        assert_eq!(found.len(), all.len(), "{name}: a key was reported twice");
        assert_eq!(found, expected, "{name}");
    }
}

/// Collatz: numbers go around, exchanged each round, until they reach one; the rounds are counted.
fn collatz(worker: &mut Worker) -> Result<Vec<(u64, u64)>, BoxError> {
    let out = Rc::new(RefCell::new(Vec::new()));
    let sink = out.clone();
    let mut input = worker.dataflow::<u64, _>("collatz", |scope| {
        let (handle, stream) = scope.new_input::<Vec<(u64, u64, u64)>>();
        let ends = scope.nested::<Product<u64, u64>, _>("rounds", |inner| {
            let (feedback, back) = inner.feedback(Product::new(0, 1));
            let all = stream.enter(inner).concat(&back).exchange_by(|(_, now, _)| *now);
            let mut builder = OperatorBuilder::new(inner, "step");
            let mut input = builder.input(&all, Pipeline);
            let (mut again, next) = builder.output::<Vec<(u64, u64, u64)>>();
            let (mut end, ends) = builder.output::<Vec<(u64, u64)>>();
            builder.build(|_| {
                move |_| {
                    while let Some((capability, block)) = input.next() {
                        let (done, going): (Vec<_>, Vec<_>) = block.into_iter().partition(|(_, now, _)| *now == 1);
                        for (start, _, rounds) in &done {
                            assert_eq!(capability.time().inner, *rounds);
                            end.session(&capability).give(vec![(*start, *rounds)]);
                        }
                        if !going.is_empty() {
                            let step = |now: u64| if now.is_multiple_of(2) { now / 2 } else { 3 * now + 1 };
                            let stepped = going.into_iter().map(|(start, now, rounds)| (start, step(now), rounds + 1));
                            again.session(&capability).give(stepped.collect());
                        }
                    }
                    Ok(())
                }
            });
            next.connect_loop(feedback);
            ends.leave(scope)
        });
        ends.inspect(move |time, block| {
            assert_eq!(*time, block[0].0 % 5);
            sink.borrow_mut().extend(block.iter().copied());
        });
        handle
    });
    for epoch in 0..5 {
        input.advance_to(epoch)?;
        let share = (1..60u64).filter(|n| n % 5 == epoch && *n as usize % worker.peers() == worker.index());
        share.for_each(|n| input.send(vec![(n, n, 0)]));
    }
    input.close();
    while worker.step_or_park(None)? {}
    Ok(out.take())
}

#[test]
fn a_loop_in_a_nested_scope_ends_with_equal_results() {
    let rounds = |mut now: u64| {
        let mut count = 0;
        while now != 1 {
            now = if now.is_multiple_of(2) { now / 2 } else { 3 * now + 1 };
            count += 1;
        }
        count
    };
    let expected: Vec<(u64, u64)> = (1..60).map(|start| (start, rounds(start))).collect();
    for (name, results) in everywhere(collatz) {
        let mut all = results.concat();
        all.sort();
        assert_eq!(all, expected, "{name}");
    }
}

/// The same loop without a scope of its own: the outer times advance.
fn countdown(worker: &mut Worker) -> Result<Vec<(u64, u64)>, BoxError> {
    let out = Rc::new(RefCell::new(Vec::new()));
    let sink = out.clone();
    let (mut input, probe) = worker.dataflow::<u64, _>("countdown", |scope| {
        let (handle, stream) = scope.new_input::<Vec<u64>>();
        let (feedback, back) = scope.feedback(1);
        let all = stream.concat(&back).exchange_by(|value| *value);
        let (probe, _) = all.probe();
        let seen = all.inspect(move |time, block| sink.borrow_mut().extend(block.iter().map(|value| (*time, *value))));
        seen.unary(Pipeline, "less", |_| {
            move |input, output, _| {
                input.for_each(|capability, block| {
                    let less: Vec<u64> = block.into_iter().filter(|value| *value > 0).map(|value| value - 1).collect();
                    if !less.is_empty() {
                        output.session(&capability).give(less);
                    }
                });
                Ok(())
            }
        })
        .connect_loop(feedback);
        (handle, probe)
    });
    if worker.index() == 0 {
        input.send(vec![100, 50]);
    }
    input.close();
    while worker.step_or_park(None)? {}
    assert!(probe.done());
    Ok(out.take())
}

#[test]
fn a_feedback_loop_terminates() {
    let mut expected: Vec<(u64, u64)> = (0..=100).map(|time| (time, 100 - time)).collect();
    expected.extend((0..=50).map(|time| (time, 50 - time)));
    expected.sort();
    for (name, results) in everywhere(countdown) {
        let mut all = results.concat();
        all.sort();
        assert_eq!(all, expected, "{name}");
    }
}

#[test]
fn a_dataflow_without_anything_to_do_finishes_by_parking() {
    let threads = penstock_dataflow::execute(penstock_dataflow::fabric::threads(2), |worker: &mut Worker| {
        worker.dataflow::<u64, _>("empty", |_| ());
        worker.dataflow::<u64, _>("hollow", |scope| scope.nested::<Product<u64, u64>, _>("inside", |_| ()));
        while worker.step_or_park(None)? {}
        Ok::<_, BoxError>(worker.dataflows())
    });
    for thread in threads {
        assert_eq!(thread.join().unwrap().unwrap(), 0);
    }
}

#[test]
fn a_dataflow_may_be_built_piece_by_piece() {
    let threads = penstock_dataflow::execute(penstock_dataflow::fabric::threads(2), |worker: &mut Worker| {
        let building = worker.open::<u64>("pieces");
        let (mut handle, stream) = building.scope().new_input::<Vec<u64>>();
        let seen = Rc::new(RefCell::new(Vec::<u64>::new()));
        let sink = seen.clone();
        let (probe, _) =
            stream.exchange_by(|value| *value).inspect(move |_, block| sink.borrow_mut().extend(block)).probe();
        worker.start(building);
        assert!(worker.failure().is_none());
        handle.send((0..10).collect());
        handle.advance_to(1)?;
        worker.step_until(None, || !probe.less_than(&1))?;
        handle.close();
        let building = worker.open::<u64>("broken");
        let (_, looped) = building.scope().feedback::<Vec<u64>>(0);
        drop(looped);
        worker.start(building);
        let failure = worker.failure().map(|error| error.to_string());
        let seen = seen.take();
        Ok::<_, BoxError>((worker.index() as u64, seen, failure))
    });
    for thread in threads {
        // The second graph is refused, so the program ends with that error.
        let error = thread.join().unwrap().unwrap_err().to_string();
        assert!(error.contains("\"broken\"") && error.contains("feedback"), "{error}");
    }
}
