//! Probes, notifications, idling and shutting down.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::support::{Link, everywhere, join, mesh, on_mesh};
use penstock_dataflow::{BoxError, Error, OperatorBuilder, Pipeline, Worker, execute, fabric};
use penstock_progress::notificator::Notificator;
use penstock_progress::timestamp::Product;

#[test]
fn a_probe_shows_exactly_what_is_closed() {
    let mut worker = Worker::new(fabric::threads(1).remove(0));
    let seen = Rc::new(Cell::new(0));
    let sink = seen.clone();
    let (mut input, probe) = worker.dataflow::<u64, _>("flow", |scope| {
        let (handle, stream) = scope.new_input::<u64>();
        let (probe, _) = stream.inspect(move |_, block| sink.set(*block)).probe();
        (handle, probe)
    });
    assert!(probe.less_equal(&0) && !probe.less_than(&0));
    input.send(3);
    input.advance_to(2).unwrap();
    assert!(probe.less_than(&1), "nothing moves between steps");
    assert!(worker.step().unwrap());
    assert_eq!(seen.get(), 3);
    assert!(!probe.less_than(&2) && probe.less_equal(&2) && !probe.done());
    input.close();
    assert!(!worker.step().unwrap());
    assert!(probe.done() && !worker.has_work());
}

#[test]
fn a_handle_on_two_streams_shows_the_lower_bound() {
    let mut worker = Worker::new(fabric::threads(1).remove(0));
    let mut probe = penstock_progress::probe::ProbeHandle::new();
    let (mut one, two) = worker.dataflow::<u64, _>("flow", |scope| {
        let (one, first) = scope.new_input::<u64>();
        let (two, second) = scope.new_input::<u64>();
        first.probe_with(&mut probe);
        second.probe_with(&mut probe);
        (one, two)
    });
    one.advance_to(5).unwrap();
    worker.step().unwrap();
    assert!(probe.less_equal(&0));
    two.close();
    worker.step().unwrap();
    assert!(!probe.less_than(&5) && probe.less_equal(&5));
}

#[test]
fn a_probe_wakes_the_operator_that_watches_it() {
    let mut worker = Worker::new(fabric::threads(1).remove(0));
    let log = Rc::new(RefCell::new(Vec::new()));
    let sink = log.clone();
    let mut input = worker.dataflow::<u64, _>("flow", |scope| {
        let (handle, stream) = scope.new_input::<u64>();
        let mut probe = penstock_progress::probe::ProbeHandle::new();
        let mut builder = OperatorBuilder::new(scope, "watcher");
        let activator = builder.activator();
        builder.notify(false);
        let mut input = builder.input(&stream, Pipeline);
        let watched = probe.clone();
        builder.build(|_| {
            move |_| {
                input.for_each(|_, _| ());
                sink.borrow_mut().push(watched.with_frontier(<[u64]>::to_vec));
                Ok(())
            }
        });
        stream.probe_waking(&mut probe, activator);
        handle
    });
    worker.step().unwrap();
    input.advance_to(4).unwrap();
    worker.step().unwrap();
    drop(input);
    while worker.step().unwrap() {}
    assert_eq!(*log.borrow(), [vec![0], vec![4], vec![]]);
}

/// Blocks travel through exchanges while a notificator waits: it must never see a block at a time already announced, on any
/// worker, and must announce each once. Delays: workers skip steps at random.
fn notifications(worker: &mut Worker, open: &[AtomicU64], seed: u64) -> Result<usize, BoxError> {
    let me = worker.index();
    let mut state = seed.wrapping_mul(0x9e37_79b9).wrapping_add(me as u64 + 1);
    let mut random = move |below: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % below
    };
    let announced = Rc::new(RefCell::new(BTreeSet::new()));
    let record = announced.clone();
    let lowest = Arc::new(AtomicU64::new(0));
    let passed = lowest.clone();
    let mut input = worker.dataflow::<u64, _>("flow", |scope| {
        let (handle, stream) = scope.new_input::<Vec<u64>>();
        let hop = stream.exchange_by(|value| *value).exchange_by(|value| value / 3);
        hop.unary::<u64, _>(Pipeline, "notified", |_| {
            let mut notificator = Notificator::new();
            let mut asked = BTreeSet::new();
            move |input, output, frontiers| {
                while let Some((capability, _)) = input.next() {
                    assert!(!record.borrow().contains(capability.time()), "late block at {}", capability.time());
                    if asked.insert(*capability.time()) {
                        notificator.notify_at(capability.retain());
                    }
                }
                while let Some(capability) = notificator.next(&frontiers.all()) {
                    assert!(record.borrow_mut().insert(*capability.time()), "announced twice");
                    passed.fetch_max(*capability.time(), Ordering::SeqCst);
                    output.session(&capability).give(*capability.time());
                }
                Ok(())
            }
        });
        handle
    });
    for epoch in 1..60u64 {
        for _ in 0..random(4) {
            input.send((0..random(6)).map(|value| value + epoch).collect());
        }
        input.advance_to(epoch)?;
        open[me].store(epoch, Ordering::SeqCst);
        for _ in 0..random(4) {
            worker.step()?;
            let slowest = open.iter().map(|open| open.load(Ordering::SeqCst)).min().unwrap_or(0);
            assert!(lowest.load(Ordering::SeqCst) <= slowest, "announced before all inputs passed");
        }
        if random(3) == 0 {
            std::thread::yield_now();
        }
    }
    input.close();
    while worker.step_or_park(None)? {}
    let announced = announced.borrow().len();
    Ok(announced)
}

#[test]
fn notifications_are_never_early_and_come_once() {
    for seed in 1..30 {
        let open: Arc<Vec<AtomicU64>> = Arc::new((0..3).map(|_| AtomicU64::new(0)).collect());
        let shared = open.clone();
        let results =
            join(execute(fabric::threads(3), move |worker: &mut Worker| notifications(worker, &shared, seed)));
        assert!(results.into_iter().map(Result::unwrap).sum::<usize>() > 0, "seed {seed}");
    }
    let open: Arc<Vec<AtomicU64>> = Arc::new((0..4).map(|_| AtomicU64::new(0)).collect());
    for result in on_mesh(mesh(2, 2, Link::Tcp), move |worker| notifications(worker, &open, 77)) {
        result.unwrap();
    }
}

#[test]
fn frontiers_pass_into_nested_scopes_and_out_again() {
    let done = everywhere(|worker| {
        let seen = Rc::new(RefCell::new(Vec::new()));
        let sink = seen.clone();
        let (mut input, inner_probe, outer_probe) = worker.dataflow::<u64, _>("flow", |scope| {
            let (handle, stream) = scope.new_input::<Vec<u64>>();
            scope.nested::<Product<u64, u64>, _>("a", |a| {
                let entered = stream.enter(a);
                let (inner_probe, left) = a.nested::<Product<Product<u64, u64>, u64>, _>("b", |b| {
                    let deep = entered.enter(b).exchange_by(|value| *value);
                    deep.inspect(move |time, block| sink.borrow_mut().push((*time, block.len())));
                    (deep.probe().0, deep.leave(a))
                });
                let (outer_probe, _) = left.leave(scope).probe();
                (handle, inner_probe, outer_probe)
            })
        });
        let at = |epoch| Product::new(Product::new(epoch, 0), 0);
        for epoch in 0..10 {
            input.send(vec![epoch; 3]);
            input.advance_to(epoch + 1)?;
            worker.step_until(None, || !outer_probe.less_than(&(epoch + 1)))?;
            assert!(!inner_probe.less_than(&at(epoch + 1)), "outer passed {epoch}, inner {inner_probe:?}");
            assert!(seen.borrow().iter().all(|(time, _)| *time <= at(9)));
        }
        input.close();
        while worker.step_or_park(None)? {}
        assert!(inner_probe.done() && outer_probe.done());
        let total: usize = seen.borrow().iter().map(|(_, count)| count).sum();
        Ok(total)
    });
    for (name, totals) in done {
        assert_eq!(totals.iter().sum::<usize>(), 30 * totals.len(), "{name}");
    }
}

#[test]
fn a_scope_in_an_outer_loop_does_not_hold_itself_back() {
    let done = everywhere(|worker| {
        let seen = Rc::new(RefCell::new(Vec::new()));
        let sink = seen.clone();
        let (mut input, probe) = worker.dataflow::<u64, _>("flow", |scope| {
            let (handle, stream) = scope.new_input::<Vec<u64>>();
            let (feedback, back) = scope.feedback(1);
            let merged = stream.concat(&back);
            let inside = scope.nested::<Product<u64, u32>, _>("inner", |inner| {
                let entered = merged.enter(inner).exchange_by(|value| *value);
                entered
                    .map_blocks(|block| block.into_iter().filter(|v| *v > 0).map(|v| v - 1).collect::<Vec<u64>>())
                    .leave(scope)
            });
            let (probe, looped) = inside.probe();
            looped
                .inspect(move |time, block| sink.borrow_mut().extend(block.iter().map(|value| (*time, *value))))
                .unary(Pipeline, "drop empty", |_| {
                    move |input, output, _| {
                        input.for_each(|capability, block: Vec<u64>| {
                            if !block.is_empty() {
                                output.session(&capability).give(block);
                            }
                        });
                        Ok(())
                    }
                })
                .connect_loop(feedback);
            (handle, probe)
        });
        input.send(vec![9, 4]);
        // It stays open far ahead, so that nothing but the loop could hold the loop back; each turn takes one time.
        input.advance_to(100)?;
        if !worker.step_until(Some(Duration::from_secs(60)), || !probe.less_than(&100))? {
            return Err(format!("held back at {probe:?}").into());
        }
        assert!(!probe.done(), "the input can still send");
        input.close();
        while worker.step_or_park(None)? {}
        assert!(probe.done());
        Ok(seen.take())
    });
    let turns = |first: u64| (0..first).map(move |turn| (turn, first - 1 - turn));
    for (name, seen) in done {
        let expected: Vec<(u64, u64)> = seen.iter().flat_map(|_| turns(9).chain(turns(4))).collect();
        let sorted = |mut all: Vec<(u64, u64)>| {
            all.sort_unstable();
            all
        };
        assert_eq!(sorted(seen.concat()), sorted(expected), "{name}");
    }
}

#[test]
fn a_hundred_thousand_empty_epochs() {
    let epochs = if cfg!(miri) { 100 } else { 100_000 };
    let mut worker = Worker::new(fabric::threads(1).remove(0));
    let (mut input, probe) = worker.dataflow::<u64, _>("flow", |scope| {
        let (handle, stream) = scope.new_input::<Vec<u64>>();
        (handle, stream.exchange_by(|value| *value).inspect(|_, _| ()).probe().0)
    });
    for epoch in 1..=epochs {
        input.advance_to(epoch).unwrap();
        let mut steps = 0;
        while probe.less_than(&epoch) {
            worker.step().unwrap();
            steps += 1;
        }
        assert_eq!(steps, 1, "one worker needs one step per epoch");
    }
}

#[test]
fn dropped_dataflows_release_what_they_own_and_late_messages_are_ignored() {
    let mut seats = fabric::threads(2);
    let mut two = Worker::new(seats.remove(1));
    let mut one = Worker::new(seats.remove(0));
    let owned = Rc::new(());
    let build = |worker: &mut Worker, owned: Rc<()>| {
        worker.dataflow::<u64, _>("flow", |scope| {
            let (handle, stream) = scope.new_input::<Vec<u64>>();
            // Logic that owns its own scope and stream: a cycle that dropping must break.
            let (scope_again, stream_again) = (scope.clone(), stream.clone());
            stream.exchange_by(|value| *value).inspect(move |_, _| {
                let _ = (&owned, scope_again.index(), &stream_again);
            });
            handle
        })
    };
    let mut input = build(&mut one, owned.clone());
    let other = build(&mut two, owned.clone());
    one.step().unwrap();
    two.step().unwrap();
    assert_eq!(Rc::strong_count(&owned), 3);
    two.drop_dataflows();
    assert_eq!(Rc::strong_count(&owned), 2);
    input.send(vec![0, 1, 2, 3]);
    one.step().unwrap();
    assert!(!two.step().unwrap());
    one.drop_dataflows();
    assert_eq!(Rc::strong_count(&owned), 1);
    drop((input, other));
    assert!(!one.step().unwrap());
}

#[test]
fn messages_for_a_dataflow_that_is_built_later_are_kept() {
    let mut seats = fabric::threads(2);
    let mut two = Worker::new(seats.remove(1));
    let mut one = Worker::new(seats.remove(0));
    let build = |worker: &mut Worker| {
        let seen = Rc::new(RefCell::new(Vec::new()));
        let sink = seen.clone();
        let input = worker.dataflow::<u64, _>("flow", |scope| {
            let (handle, stream) = scope.new_input::<Vec<u64>>();
            stream.exchange_by(|value| *value).inspect(move |_, block| sink.borrow_mut().extend(block.clone()));
            handle
        });
        (input, seen)
    };
    let (mut input, _) = build(&mut one);
    input.send(vec![1]);
    input.close();
    one.step().unwrap();
    two.step().unwrap();
    let (input, seen) = build(&mut two);
    input.close();
    while two.step().unwrap() | one.step().unwrap() {}
    assert_eq!(*seen.borrow(), [1]);
}

#[test]
fn every_operator_runs_once_more_when_its_inputs_end() {
    let ends = Rc::new(Cell::new(0));
    let count = ends.clone();
    let mut worker = Worker::new(fabric::threads(1).remove(0));
    worker.dataflow::<u64, _>("chain", |scope| {
        let mut stream = scope.new_input::<u64>().1;
        for _ in 0..5 {
            let count = count.clone();
            stream = stream.unary(Pipeline, "link", |capability| {
                let mut held = Some(capability);
                move |input, _, frontiers| {
                    input.for_each(|_, _: u64| ());
                    if frontiers.frontier(0).is_empty() && held.take().is_some() {
                        count.set(count.get() + 1);
                    }
                    Ok(())
                }
            });
        }
        let count = count.clone();
        stream.sink(Pipeline, "end", move |_, frontiers| {
            if frontiers.frontier(0).is_empty() {
                count.set(count.get() + 100);
            }
            Ok(())
        });
    });
    while worker.step().unwrap() {}
    assert_eq!(ends.get(), 105);
}

#[test]
fn work_in_a_scope_without_exit_keeps_its_dataflow_alive() {
    let done = everywhere(|worker| {
        let seen = Rc::new(Cell::new(0));
        let count = seen.clone();
        let mut input = worker.dataflow::<u64, _>("flow", |scope| {
            let (handle, stream) = scope.new_input::<Vec<u64>>();
            scope.nested::<Product<u64, u64>, _>("loop", |inner| {
                let (feedback, back) = inner.feedback(Product::new(0, 1));
                let all = stream.enter(inner).concat(&back).exchange_by(|value| *value);
                all.unary(Pipeline, "less", |_| {
                    move |input, output, _| {
                        input.for_each(|capability, block: Vec<u64>| {
                            count.set(count.get() + block.len());
                            let rest = block.into_iter().filter(|value| *value > 0);
                            let rest: Vec<u64> = rest.map(|value| value - 1).collect();
                            if !rest.is_empty() {
                                output.session(&capability).give(rest);
                            }
                        });
                        Ok(())
                    }
                })
                .connect_loop(feedback);
            });
            handle
        });
        input.send(vec![30]);
        input.close();
        while worker.step_or_park(None)? {}
        Ok(seen.get())
    });
    for (name, counts) in done {
        assert_eq!(counts.iter().sum::<usize>(), 31 * counts.len(), "{name}");
    }
}

#[test]
fn a_wait_ends_when_its_condition_holds_its_limit_is_over_or_the_worker_stops() {
    let mut worker = Worker::new(fabric::threads(1).remove(0));
    assert!(worker.step_until(None, || true).unwrap(), "what holds already is not waited for");
    assert!(!worker.step_until(Some(Duration::ZERO), || false).unwrap());
    let (input, probe) = worker.dataflow::<u64, _>("flow", |scope| {
        let (handle, stream) = scope.new_input::<u64>();
        (handle, stream.probe().0)
    });
    let (limit, begin) = (Duration::from_millis(20), Instant::now());
    assert!(!worker.step_until(Some(limit), || probe.done()).unwrap(), "the input is open");
    assert!(begin.elapsed() >= limit);
    // Another thread makes it hold while this one is parked, and wakes it.
    let (flag, waker) = (Arc::new(AtomicU64::new(0)), worker.waker());
    let set = flag.clone();
    let other = std::thread::spawn(move || {
        set.store(1, Ordering::SeqCst);
        waker.wake();
    });
    assert!(worker.step_until(None, || flag.load(Ordering::SeqCst) == 1).unwrap());
    other.join().unwrap();
    worker.abort(Error::Aborted { worker: 0, reason: "enough".into() });
    assert!(matches!(worker.step_until(None, || false), Err(Error::Aborted { .. })));
    drop(input);
}
