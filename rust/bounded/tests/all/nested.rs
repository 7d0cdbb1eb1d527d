//! F-07 to F-10: bounded scopes in bounded scopes, loops in the body, surges.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use crate::support::{everywhere, run};
use penstock_bounded::{Batched, BoundedStream, Bounds, Event, Faucet};
use penstock_dataflow::{BoxError, OperatorBuilder, Pipeline, Scope, Stream, Worker, execute, fabric};
use penstock_progress::timestamp::{Product, Timestamp};

/// The example of the paper: a1 is extended to (a1, a2), which is extended to (a1, a2, a3), each by a bounded scope.
fn trace(worker: &mut Worker) -> Result<Vec<String>, BoxError> {
    let log = Rc::new(RefCell::new(Vec::new()));
    let (outer_log, inner_log) = (log.clone(), log.clone());
    let bounds = || Bounds::fixed(1, 1);
    let (outer_bounds, inner_bounds) = (bounds()?, bounds()?);
    let mut input = worker.dataflow::<u64, _>("trace", |scope| {
        let (input, stream) = scope.new_input::<Vec<String>>();
        let outer = Faucet::<Batched<u64>, Vec<String>>::new(outer_bounds).named("u").observed(move |event| {
            let line = match event {
                Event::Admitted { time, items } => format!("{items:?} @ u{}", time.inner.0 + 1),
                Event::Finished { time } => format!("end of u{}", time.inner.0 + 1),
            };
            outer_log.borrow_mut().push(line);
        });
        outer.around(&stream, |_, prefixes| {
            let inner =
                Faucet::<Batched<Batched<u64>>, Vec<String>>::new(inner_bounds).named("v").observed(move |event| {
                    let name =
                        |time: &Batched<Batched<u64>>| format!("(u{}, v{})", time.outer.inner.0 + 1, time.inner.0 + 1);
                    let line = match event {
                        Event::Admitted { time, items } => format!("{items:?} @ {}", name(time)),
                        Event::Finished { time } => format!("end of {}", name(time)),
                    };
                    inner_log.borrow_mut().push(line);
                });
            // Two extensions of a11 and one of a12; none of them has extensions itself.
            let extend = |prefix: String| {
                let second = if prefix == "a11" { vec!["a21", "a22"] } else { vec!["a23"] };
                second.into_iter().map(move |next| format!("{prefix} {next}"))
            };
            inner.expanding(&prefixes, extend, |_, pairs| pairs.map_blocks(|_| Vec::<String>::new())).0
        });
        input
    });
    if worker.index() == 0 {
        input.send(vec!["a11".to_string(), "a12".to_string()]);
    }
    input.close();
    while worker.step_or_park(None)? {}
    Ok(log.take())
}

#[test]
fn the_admission_log_is_that_of_the_paper() {
    // The ends are those that the batcher of each scope sees, so those of different scopes are not in order.
    let within =
        |log: &[String], scope: fn(&&String) -> bool| -> Vec<String> { log.iter().filter(scope).cloned().collect() };
    for workers in [1, 2, 4] {
        let logs = run(workers, trace);
        let admitted = within(&logs[0], |line| line.contains('@'));
        let expected = [
            r#"["a11"] @ u1"#,
            r#"["a11 a21"] @ (u1, v1)"#,
            r#"["a11 a22"] @ (u1, v2)"#,
            r#"["a12"] @ u2"#,
            r#"["a12 a23"] @ (u2, v1)"#,
        ];
        assert_eq!(admitted, expected, "{workers} workers");
        let outer = within(&logs[0], |line| !line.contains('v'));
        assert_eq!(outer, [expected[0], "end of u1", expected[3], "end of u2"]);
        let inner = within(&logs[0], |line| line.contains('v'));
        let ends = ["end of (u1, v1)", "end of (u1, v2)", "end of (u2, v1)"];
        assert_eq!(inner, [expected[1], ends[0], expected[2], ends[1], expected[4], ends[2]]);
        assert!(logs[1..].iter().all(Vec::is_empty));
    }
}

/// Binary numbers of ten digits: each level appends one digit in a bounded scope of its own.
macro_rules! levels {
    ($stream:expr, $bounds:expr,) => { $stream };
    ($stream:expr, $bounds:expr, $level:ident $($more:ident)*) => {
        $stream
            .bounded_flat_map($bounds, |number: u64| [2 * number, 2 * number + 1].into_iter(), |_, $level| {
                let spread = $level.exchange_by(|number| number / 3);
                levels!(spread, $bounds, $($more)*)
            })
            .0
    };
}

fn ten_levels(worker: &mut Worker) -> Result<Vec<u64>, BoxError> {
    let rows = Rc::new(RefCell::new(Vec::new()));
    let sink = rows.clone();
    let bounds = Bounds::fixed(2, 1)?;
    let mut input = worker.dataflow::<u64, _>("ten", |scope| {
        let (input, stream) = scope.new_input::<Vec<u64>>();
        let all = levels!(stream, bounds.clone(), a b c d e f g h i j);
        all.inspect(move |_, block| sink.borrow_mut().extend(block));
        input
    });
    if worker.index() == 0 {
        input.send(vec![0]);
    }
    input.close();
    while worker.step_or_park(None)? {}
    Ok(rows.take())
}

#[test]
fn ten_levels_build_and_run() {
    for workers in [1, 2] {
        let mut numbers = run(workers, ten_levels).concat();
        numbers.sort_unstable();
        assert_eq!(numbers, (0..1024).collect::<Vec<_>>());
    }
}

#[test]
fn an_inner_scope_holds_at_most_its_window_for_every_batch_of_the_outer_one() {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicI64, Ordering};
    let (outer, inner) = ((3, 4), (2, 5));
    for workers in [1, 2, 4] {
        let counts = Arc::new((AtomicI64::new(0), AtomicI64::new(0)));
        let shared = counts.clone();
        run(workers, move |worker| {
            let counts = shared.clone();
            let (outer, inner) = (Bounds::fixed(outer.0, outer.1)?, Bounds::fixed(inner.0, inner.1)?);
            let mut open = std::collections::BTreeMap::new();
            let mut input = worker.dataflow::<u64, _>("two", |scope| {
                let (input, stream) = scope.new_input::<Vec<u64>>();
                stream.bounded_flat_map(
                    outer,
                    |many| 0..many,
                    |_, items| {
                        let faucet =
                            Faucet::<Batched<Batched<u64>>, Vec<u64>>::new(inner).observed(move |event| match event {
                                Event::Admitted { time, items } => {
                                    let items = items.len() as i64;
                                    counts.1.fetch_max(
                                        items + counts.0.fetch_add(items, Ordering::SeqCst),
                                        Ordering::SeqCst,
                                    );
                                    *open.entry(*time).or_insert(0) += items;
                                }
                                Event::Finished { time } => {
                                    counts.0.fetch_sub(open.remove(time).unwrap_or(0), Ordering::SeqCst);
                                }
                            });
                        let items = items.exchange_by(|item| *item);
                        faucet.expanding(&items, |item| 0..item % 7, |_, items| items.exchange_by(|item| *item)).0
                    },
                );
                input
            });
            input.send(vec![400]);
            input.close();
            while worker.step_or_park(None)? {}
            Ok(())
        });
        let most = counts.1.load(Ordering::SeqCst);
        assert!(most <= (outer.0 * inner.0 * inner.1) as i64 * workers as i64, "{most} items");
        // In this order of arrival the batches of the outer scope share one window.
        assert_eq!(counts.0.load(Ordering::SeqCst), 0);
    }
}

/// Numbers go around the loop until they are below ten; what leaves is exchanged in every round. Built inside any scope.
fn countdown<T: Timestamp>(scope: &Scope<T>, numbers: &Stream<T, Vec<u64>>) -> Stream<T, Vec<u64>> {
    scope.nested::<Product<T, u64>, _>("rounds", |inner| {
        let (feedback, back) = inner.feedback(Product::new(T::Summary::default(), 1));
        let all = numbers.enter(inner).concat(&back).exchange_by(|number| number / 3);
        let mut builder = OperatorBuilder::new(inner, "step");
        let mut input = builder.input(&all, Pipeline);
        let (mut again, next) = builder.output::<Vec<u64>>();
        let (mut end, ends) = builder.output::<Vec<u64>>();
        builder.build(move |_| {
            move |_| {
                while let Some((capability, block)) = input.next() {
                    let (going, done): (Vec<u64>, Vec<u64>) = block.into_iter().partition(|number| *number >= 10);
                    if !done.is_empty() {
                        end.session(&capability).give(done);
                    }
                    if !going.is_empty() {
                        // Every number becomes two that go on.
                        again.session(&capability).give(going.iter().flat_map(|n| [n / 2, n - n / 2]).collect());
                    }
                }
                Ok(())
            }
        });
        next.connect_loop(feedback);
        ends.leave(scope)
    })
}

fn loops(worker: &mut Worker, bounds: Option<Bounds>) -> Result<Vec<u64>, BoxError> {
    let rows = Rc::new(RefCell::new(Vec::new()));
    let sink = rows.clone();
    let mut input = worker.dataflow::<u64, _>("loops", |scope| {
        let (input, stream) = scope.new_input::<Vec<u64>>();
        let all = match bounds {
            Some(bounds) => stream.bounded(bounds, |inner, numbers| countdown(inner, &numbers)).0,
            None => countdown(scope, &stream),
        };
        all.inspect(move |_, block| sink.borrow_mut().extend(block));
        input
    });
    input.send((0..30).map(|at| 10 * at + worker.index() as u64).collect());
    input.close();
    while worker.step_or_park(None)? {}
    Ok(rows.take())
}

#[test]
fn a_loop_in_the_body_terminates_with_the_tightest_bounds() {
    for workers in [1, 2, 4] {
        let sort = |rows: Vec<Vec<u64>>| {
            let mut rows = rows.concat();
            rows.sort_unstable();
            rows
        };
        let free = sort(run(workers, |worker| loops(worker, None)));
        let tight = sort(run(workers, |worker| loops(worker, Some(Bounds::fixed(1, 1)?))));
        assert!(free.len() > 500 && free == tight);
    }
}

/// The comparator: operators joined by channels that block their sender when full, as in edge-by-edge backpressure. Each has
/// one block that it could not send yet; it reads nothing more until that is gone. Stops when nobody can do anything.
fn loop_over_bounded_channels(numbers: &[u64], capacity: usize) -> Result<Vec<u64>, String> {
    let mut entry: VecDeque<u64> = numbers.iter().copied().collect();
    let (mut forward, mut back): (VecDeque<u64>, VecDeque<u64>) = Default::default();
    let mut unsent: VecDeque<u64> = VecDeque::new();
    let mut out = Vec::new();
    loop {
        let mut moved = false;
        // The merge at the head of the loop takes from both sides in turn while there is room behind it.
        for source in [&mut back, &mut entry] {
            if forward.len() < capacity
                && let Some(number) = source.pop_front()
            {
                forward.push_back(number);
                moved = true;
            }
        }
        // The step: its two outputs per number go back as room allows.
        while back.len() < capacity
            && let Some(number) = unsent.pop_front()
        {
            back.push_back(number);
            moved = true;
        }
        if unsent.is_empty()
            && let Some(number) = forward.pop_front()
        {
            moved = true;
            match number {
                0..10 => out.push(number),
                _ => unsent.extend([number / 2, number - number / 2]),
            }
        }
        if !moved {
            return match (entry.len(), forward.len(), back.len(), unsent.len()) {
                (0, 0, 0, 0) => Ok(out),
                held => Err(format!("locked up with {held:?} at entry, head, feedback and step")),
            };
        }
    }
}

#[test]
fn bounded_channels_lock_up_on_the_loop_that_a_bounded_scope_ends() {
    let numbers: Vec<u64> = (0..30).map(|at| 10 * at).collect();
    let mut expected = loop_over_bounded_channels(&numbers, usize::MAX).expect("without limits it ends");
    for capacity in [1, 2, 8, 64] {
        let held = loop_over_bounded_channels(&numbers, capacity).expect_err("it locks up");
        assert!(held.starts_with("locked up"), "{held}");
    }
    let mut bounded = run(1, |worker| loops(worker, Some(Bounds::fixed(1, 1)?))).concat();
    expected.sort_unstable();
    bounded.sort_unstable();
    assert_eq!(bounded, expected);
}

/// The most items alive between the expansion and the end when one tuple among many becomes 100,000: with a source that sends one
/// tuple at a time and waits for its end, and with a bounded scope.
fn surge(bounds: Option<Bounds>) -> (u64, u64) {
    let live: Rc<Cell<(u64, u64)>> = Rc::default();
    let seen = Rc::new(Cell::new(0));
    let expand = |many: u64| 0..many;
    let enters = |live: &Rc<Cell<(u64, u64)>>, items: u64| {
        let (now, most) = live.get();
        live.set((now + items, most.max(now + items)));
    };
    let mut worker = Worker::new(fabric::threads(1).remove(0));
    let (begin, end, sum) = (live.clone(), live.clone(), seen.clone());
    let (mut input, probe) = worker.dataflow::<u64, _>("surge", |scope| {
        let (input, stream) = scope.new_input::<Vec<u64>>();
        let out = match bounds {
            Some(bounds) => {
                let body = |_: &mut _, items: Stream<Batched<u64>, Vec<u64>>| {
                    items.inspect(move |_, block| enters(&begin, block.len() as u64))
                };
                stream.bounded_flat_map(bounds, expand, body).0
            }
            None => stream
                .map_blocks(move |block| block.into_iter().flat_map(expand).collect::<Vec<_>>())
                .inspect(move |_, block| enters(&begin, block.len() as u64)),
        };
        let out = out.inspect(move |_, block| {
            let (now, most) = end.get();
            end.set((now - block.len() as u64, most));
            sum.set(sum.get() + block.len() as u64);
        });
        (input, out.probe().0)
    });
    for (epoch, many) in [3, 1, 100_000, 2].into_iter().enumerate() {
        input.send(vec![many]);
        input.advance_to(epoch as u64 + 1).unwrap();
        // The source is as slow as can be: it waits until everything before has ended.
        while probe.less_than(&(epoch as u64 + 1)) {
            worker.step().unwrap();
        }
    }
    input.close();
    while worker.step().unwrap() {}
    (seen.get(), live.get().1)
}

#[test]
fn a_surge_that_no_source_could_prevent_is_contained() {
    assert_eq!(surge(None), (100_006, 100_000));
    let (seen, most) = surge(Some(Bounds::fixed(2, 10).unwrap()));
    assert!(seen == 100_006 && most <= 20, "{most} items at a time");
}

#[test]
fn bounded_loops_give_the_same_over_processes() {
    let expected = |workers: u64| {
        let mut rows = Vec::new();
        for worker in 0..workers {
            let numbers: Vec<u64> = (0..30).map(|at| 10 * at + worker).collect();
            rows.extend(loop_over_bounded_channels(&numbers, usize::MAX).unwrap());
        }
        rows.sort_unstable();
        rows
    };
    for (name, rows) in everywhere(|worker| loops(worker, Some(Bounds::fixed(2, 3)?))) {
        let workers = rows.len() as u64;
        let mut rows = rows.concat();
        rows.sort_unstable();
        assert_eq!(rows, expected(workers), "{name}");
    }
}

#[test]
fn a_bounded_scope_inside_a_loop_and_a_loop_inside_that() {
    // Each round of the outer loop expands, runs an inner loop in a bounded scope, and sends what is large around again.
    let program = |worker: &mut Worker, bounded: bool| {
        let rows = Rc::new(RefCell::new(Vec::new()));
        let sink = rows.clone();
        let bounds = Bounds::fixed(1, 2)?;
        let mut input = worker.dataflow::<u64, _>("around", |scope| {
            let (input, stream) = scope.new_input::<Vec<u64>>();
            let all = scope.nested::<Product<u64, u64>, _>("outer", |inner| {
                let (feedback, back) = inner.feedback(Product::new(0, 1));
                let all = stream.enter(inner).concat(&back);
                let expand = |number: u64| [number, number / 2].into_iter();
                let small = match bounded {
                    true => all.bounded_flat_map(bounds, expand, |deep, numbers| countdown(deep, &numbers)).0,
                    false => {
                        countdown(inner, &all.map_blocks(move |block| block.into_iter().flat_map(expand).collect()))
                    }
                };
                let again = small.map_blocks(|block| block.into_iter().filter(|n| *n > 4).map(|n| n - 4).collect());
                again.connect_loop(feedback);
                small.leave(scope)
            });
            all.inspect(move |_, block| sink.borrow_mut().extend(block));
            input
        });
        input.send((0..12).map(|at| 7 * at + worker.index() as u64).collect());
        input.close();
        while worker.step_or_park(None)? {}
        let rows = rows.take();
        Ok::<_, BoxError>(rows)
    };
    for workers in [1, 2, 4] {
        let sort = |bounded| {
            let threads = execute(fabric::threads(workers), move |worker| program(worker, bounded));
            let rows = threads.into_iter().map(|thread| thread.join().unwrap().unwrap());
            let mut rows: Vec<u64> = rows.flatten().collect();
            rows.sort_unstable();
            rows
        };
        let free = sort(false);
        assert!(free.len() >= 90 * workers, "{} numbers", free.len());
        assert_eq!(sort(true), free, "{workers} workers");
    }
}
