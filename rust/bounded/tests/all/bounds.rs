//! F-01 to F-06 on one, two and four workers: results are the same with and without bounds, admission stays within them.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::support::{self, everywhere, run};
use penstock_bounded::{
    Batched, BoundedStream, Bounds, BoundsError, Egress, Event, Expand, Failure, Faucet, Fault, Limits, Memory,
    OnFailure, Phase,
};
use penstock_dataflow::{BoxError, Error, Pipeline, Worker, execute, fabric};

type Row = (u64, u64);

/// Numbers of several epochs, expanded, exchanged and filtered; by a bounded scope or without.
fn spread(worker: &mut Worker, bounds: Option<Bounds>) -> Result<Vec<Row>, BoxError> {
    let rows = Rc::new(RefCell::new(Vec::new()));
    let sink = rows.clone();
    let mut input = worker.dataflow::<u64, _>("spread", |scope| {
        let (input, stream) = scope.new_input::<Vec<u64>>();
        let expand = |many: u64| (0..many).map(move |at| 1000 * many + at);
        let out = match bounds {
            Some(bounds) => {
                let body = |_: &mut _, items: penstock_dataflow::Stream<Batched<u64>, Vec<u64>>| {
                    items
                        .exchange_by(|item| *item)
                        .map_blocks(|block| block.into_iter().filter(|item| item % 3 != 0).collect::<Vec<_>>())
                };
                stream.bounded_flat_map(bounds, expand, body).0
            }
            None => stream
                .map_blocks(move |block| block.into_iter().flat_map(expand).collect::<Vec<_>>())
                .exchange_by(|item| *item)
                .map_blocks(|block| block.into_iter().filter(|item| item % 3 != 0).collect::<Vec<_>>()),
        };
        out.inspect(move |time, block| sink.borrow_mut().extend(block.iter().map(|item| (*time, *item))));
        input
    });
    for epoch in 0..4 {
        input.send((0..20 + epoch).map(|at| (at * 7 + worker.index() as u64) % 50).collect());
        input.send(vec![]);
        input.send(vec![0, 0, 400]);
        input.advance_to(epoch + 1)?;
        worker.step()?;
    }
    input.close();
    while worker.step_or_park(None)? {}
    Ok(rows.take())
}

#[test]
fn outputs_and_outer_times_are_those_without_bounds() {
    for workers in [1, 2, 4] {
        let free = sorted(run(workers, |worker| spread(worker, None)));
        assert!(free.len() > 1000);
        for (batches, size) in [(1, 1), (1, 100), (2, 7), (5, 1), (4, 100_000)] {
            let bounded = run(workers, move |worker| spread(worker, Some(Bounds::fixed(batches, size)?)));
            assert_eq!(sorted(bounded), free, "{workers} workers, {batches} batches of {size}");
        }
        let adaptive = run(workers, |worker| spread(worker, Some(Bounds::adaptive())));
        assert_eq!(sorted(adaptive), free, "{workers} workers, adaptive");
    }
}

fn sorted(rows: Vec<Vec<Row>>) -> Vec<Row> {
    let mut rows = rows.concat();
    rows.sort_unstable();
    rows
}

/// Events of one worker: (outer time, batch, items admitted; none where the batch finished).
type Log = Vec<(u64, u64, Option<u64>)>;

/// Runs a scope around an exchange and returns its log and figures.
fn logged(
    worker: &mut Worker,
    (batches, size): (u64, u64),
    feed: impl Fn(usize, u64) -> Vec<u64>,
) -> Result<(Log, penstock_bounded::Stats), BoxError> {
    let log: Rc<RefCell<Log>> = Rc::default();
    let sink = log.clone();
    let bounds = Bounds::fixed(batches, size)?;
    let (mut input, monitor) = worker.dataflow::<u64, _>("logged", |scope| {
        let (input, stream) = scope.new_input::<Vec<u64>>();
        let faucet = Faucet::<Batched<u64>, Vec<u64>>::new(bounds).observed(move |event| {
            sink.borrow_mut().push(match event {
                Event::Admitted { time, items } => (time.outer, time.inner.0, Some(items.len() as u64)),
                Event::Finished { time } => (time.outer, time.inner.0, None),
            });
        });
        let (_, monitor) = faucet.expanding(&stream, |many| 0..many, |_, items| items.exchange_by(|item| *item));
        (input, monitor)
    });
    for epoch in 0..3 {
        input.send(feed(worker.index(), epoch));
        input.advance_to(epoch + 1)?;
    }
    input.close();
    while worker.step_or_park(None)? {}
    let log = log.take();
    Ok((log, monitor.stats()))
}

/// The most batches unfinished at a time, as the log has it.
fn most_unfinished(log: &Log) -> u64 {
    let (mut open, mut most) = (std::collections::BTreeSet::new(), 0);
    for (outer, batch, items) in log {
        match items {
            Some(_) => drop(open.insert((*outer, *batch))),
            None => assert!(open.remove(&(*outer, *batch)), "finished without having begun"),
        }
        most = most.max(open.len() as u64);
    }
    assert!(open.is_empty(), "{open:?} never finished");
    most
}

#[test]
fn every_outer_time_counts_its_batches_from_zero_and_fills_them() {
    for workers in [1, 2, 4] {
        for (log, stats) in run(workers, |worker| logged(worker, (2, 10), |_, epoch| vec![10 * epoch + 25])) {
            for epoch in 0..3 {
                let items = 10 * epoch + 25;
                let mut sizes = std::collections::BTreeMap::new();
                for (_, batch, count) in log.iter().filter(|entry| entry.0 == epoch) {
                    *sizes.entry(*batch).or_insert(0) += count.unwrap_or(0);
                }
                let expected: Vec<u64> = (0..items.div_ceil(10)).map(|batch| (items - 10 * batch).min(10)).collect();
                assert_eq!(sizes.keys().copied().collect::<Vec<_>>(), (0..expected.len() as u64).collect::<Vec<_>>());
                assert_eq!(sizes.into_values().collect::<Vec<_>>(), expected, "{workers} workers, epoch {epoch}");
            }
            assert_eq!((stats.admitted, stats.admitted_items, stats.unfinished), (3 + 4 + 5, 25 + 35 + 45, 0));
        }
    }
}

#[test]
fn at_most_n_batches_are_unfinished_and_n_are_when_saturated() {
    for workers in [1, 2, 4] {
        for batches in [1, 2, 3, 7] {
            let results = run(workers, move |worker| logged(worker, (batches, 5), |_, _| vec![500, 1000]));
            for (log, stats) in results {
                assert_eq!(most_unfinished(&log), batches, "{workers} workers");
                assert_eq!((stats.maximum, stats.maximum_items), (batches, 5 * batches));
                assert_eq!((stats.unfinished, stats.buffered, stats.holding), (0, 0, None));
            }
        }
    }
}

/// Counts itself while it lives.
struct Live(Rc<Cell<(u64, u64)>>);

impl Live {
    fn new(count: &Rc<Cell<(u64, u64)>>) -> Self {
        let (now, most) = count.get();
        count.set((now + 1, most.max(now + 1)));
        Live(count.clone())
    }
}

impl Clone for Live {
    fn clone(&self) -> Self {
        Live::new(&self.0)
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        let (now, most) = self.0.get();
        self.0.set((now - 1, most));
    }
}

#[test]
fn one_input_of_a_million_items_keeps_memory_flat() {
    let count: Rc<Cell<(u64, u64)>> = Rc::default();
    let results = Rc::new(Cell::new(0u64));
    let mut worker = Worker::new(fabric::threads(1).remove(0));
    let (live, sum) = (count.clone(), results.clone());
    let mut input = worker.dataflow::<u64, _>("surge", |scope| {
        let (input, stream) = scope.new_input::<Vec<u64>>();
        let expand = move |many: u64| {
            let live = live.clone();
            (0..many).map(move |_| Rc::new(Live::new(&live)))
        };
        let (out, _) = stream.bounded_flat_map(Bounds::fixed(3, 50).unwrap(), expand, |_, items| {
            // Two copies of every item are on their way to the end of the scope.
            items.concat(&items).map_blocks(|block| vec![block.len() as u64])
        });
        out.inspect(move |_, counts| sum.set(sum.get() + counts.iter().sum::<u64>()));
        input
    });
    input.send(vec![1_000_000]);
    input.close();
    while worker.step().unwrap() {}
    assert_eq!(results.get(), 2_000_000);
    let (now, most) = count.get();
    assert!(now == 0 && (50..=150).contains(&most), "{most} items at a time");
}

#[test]
fn what_all_workers_have_admitted_stays_within_their_windows() {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicI64, Ordering};
    for workers in [1, 2, 4] {
        let (batches, size) = (3, 20);
        let counts = Arc::new((AtomicI64::new(0), AtomicI64::new(0)));
        let shared = counts.clone();
        run(workers, move |worker| {
            let (counts, bounds) = (shared.clone(), Bounds::fixed(batches, size)?);
            let mut open = std::collections::BTreeMap::new();
            let mut input = worker.dataflow::<u64, _>("shared", |scope| {
                let (input, stream) = scope.new_input::<Vec<u64>>();
                let faucet = Faucet::<Batched<u64>, Vec<u64>>::new(bounds).observed(move |event| match event {
                    Event::Admitted { time, items } => {
                        let items = items.len() as i64;
                        let now = items + counts.0.fetch_add(items, Ordering::SeqCst);
                        counts.1.fetch_max(now, Ordering::SeqCst);
                        *open.entry(*time).or_insert(0) += items;
                    }
                    Event::Finished { time } => {
                        counts.0.fetch_sub(open.remove(time).unwrap_or(0), Ordering::SeqCst);
                    }
                });
                faucet.expanding(&stream, |many| 0..many, |_, items| items.exchange_by(|item| *item));
                input
            });
            input.send(vec![3_000, 2_000]);
            input.close();
            while worker.step_or_park(None)? {}
            Ok(())
        });
        let (left, most) = (counts.0.load(Ordering::SeqCst), counts.1.load(Ordering::SeqCst));
        assert_eq!(left, 0);
        assert!(most <= (workers as u64 * batches * size) as i64, "{most} items with {workers} workers");
    }
}

#[test]
fn a_worker_without_data_stalls_nobody() {
    for workers in [2, 4] {
        let results =
            run(workers, |worker| logged(worker, (2, 3), |index, _| if index == 0 { vec![100, 1] } else { vec![] }));
        let admitted: Vec<u64> = results.iter().map(|(_, stats)| stats.admitted_items).collect();
        assert_eq!(admitted[0], 303);
        assert!(admitted[1..].iter().all(|items| *items == 0));
    }
}

#[test]
fn an_open_epoch_gets_its_first_batches_and_the_rest_when_it_closes() {
    let mut worker = Worker::new(fabric::threads(1).remove(0));
    let (mut input, monitor, probe) = worker.dataflow::<u64, _>("open", |scope| {
        let (input, stream) = scope.new_input::<Vec<u64>>();
        let (out, monitor) = stream.bounded(Bounds::fixed(2, 3).unwrap(), |_, items| items);
        (input, monitor, out.probe().0)
    });
    input.send((0..100).collect());
    for _ in 0..50 {
        worker.step().unwrap();
    }
    let stats = monitor.stats();
    assert_eq!((stats.admitted_items, stats.buffered, stats.unfinished), (6, 94, 2));
    assert_eq!(stats.holding.as_deref(), Some("(0, batch 0)"));
    input.advance_to(1).unwrap();
    while probe.less_than(&1) {
        worker.step().unwrap();
    }
    let stats = monitor.stats();
    assert_eq!((stats.admitted_items, stats.buffered, stats.unfinished), (100, 0, 0));
    // A later epoch is not held by what is open before it.
    input.send(vec![1]);
    for _ in 0..5 {
        worker.step().unwrap();
    }
    assert_eq!(monitor.stats().admitted_items, 101);
}

#[test]
fn an_earlier_epoch_that_comes_later_is_served_first_and_is_not_locked_out() {
    // A batch of epoch 5 fills the window; it can finish only when epoch 2, which comes after it, has.
    let mut worker = Worker::new(fabric::threads(1).remove(0));
    let (mut early, mut late, monitor, probe) = worker.dataflow::<u64, _>("order", |scope| {
        let (early, one) = scope.new_input::<Vec<u64>>();
        let (late, two) = scope.new_input::<Vec<u64>>();
        let (out, monitor) = one.concat(&two).bounded(Bounds::fixed(1, 1).unwrap(), |_, items| items);
        (early, late, monitor, out.probe().0)
    });
    late.advance_to(5).unwrap();
    late.send(vec![1, 2, 3]);
    late.close();
    for _ in 0..10 {
        worker.step().unwrap();
    }
    assert_eq!((monitor.stats().admitted, monitor.stats().unfinished), (1, 1));
    early.advance_to(2).unwrap();
    early.send(vec![7, 8, 9]);
    early.close();
    while !probe.done() {
        worker.step().unwrap();
    }
    while worker.step().unwrap() {}
    assert_eq!((monitor.stats().admitted, monitor.stats().unfinished, monitor.stats().maximum), (6, 0, 1));
}

#[test]
fn bounds_that_say_nothing_are_refused() {
    assert_eq!(Bounds::fixed(0, 1).unwrap_err(), BoundsError::Zero { what: "batches" });
    assert_eq!(Bounds::fixed(1, 0).unwrap_err(), BoundsError::Zero { what: "batch_size" });
    for (batches, batch_size) in [(u64::MAX, 1), (2, u64::MAX), (1 << 33, 1), (1 << 20, 1 << 40)] {
        assert_eq!(Bounds::fixed(batches, batch_size).unwrap_err(), BoundsError::Overflow { batches, batch_size });
    }
    assert!(Bounds::fixed(1 << 32, 1 << 16).is_ok());
    let reversed = Limits { batches: (4, 2, 8), ..Limits::default() };
    assert!(matches!(Bounds::adaptive().within(reversed), Err(BoundsError::Reversed { .. })));
    let error = Bounds::fixed(0, 1).unwrap_err().to_string();
    assert_eq!(error, "batches is 0, so nothing could ever be admitted: give 1 or more");
}

#[test]
fn bounds_shrink_while_memory_is_short_and_grow_again_when_there_is_room() {
    const PERIOD_NS: u64 = 50_000_000;
    let (share, now_ns) = (Arc::new(Mutex::new(0.9)), Arc::new(AtomicU64::new(0)));
    let (meter, clock) = (share.clone(), now_ns.clone());
    let limits = Limits { batches: (1, 4, 8), batch_size: (2, 16, 64), rest: 3, ..Limits::default() };
    let bounds = Bounds::adaptive()
        .within(limits)
        .unwrap()
        .with_memory(Memory::reading(move || Some(*meter.lock().unwrap())))
        .with_clock(Arc::new(move || clock.load(Ordering::Relaxed)));
    let mut worker = Worker::new(fabric::threads(1).remove(0));
    let (mut input, monitor) = worker.dataflow::<u64, _>("metered", |scope| {
        let (input, stream) = scope.new_input::<Vec<u64>>();
        let (_, monitor) = stream.bounded_flat_map(bounds, |many| 0..many, |_, items| items);
        (input, monitor)
    });
    input.send(vec![100_000]);
    input.close();
    let mut periods = |until: &dyn Fn(&penstock_bounded::Stats) -> bool| {
        let mut seen = vec![monitor.stats()];
        while !until(seen.last().unwrap()) {
            now_ns.fetch_add(PERIOD_NS, Ordering::Relaxed);
            assert!(worker.step().unwrap(), "the input has ended first: {:?}", seen.last());
            let stats = monitor.stats();
            assert!(stats.maximum <= 8 && stats.maximum_items <= 8 * 64, "{stats:?}");
            if (stats.batches, stats.batch_size) != seen.last().map(|last| (last.batches, last.batch_size)).unwrap() {
                seen.push(stats);
            } else {
                *seen.last_mut().unwrap() = stats;
            }
        }
        seen.into_iter().map(|stats| (stats.batches, stats.batch_size)).collect::<Vec<_>>()
    };
    let shrunk = periods(&|stats| stats.batches * stats.batch_size == 2);
    assert_eq!(shrunk, [(4, 16), (4, 8), (4, 4), (4, 2), (2, 2), (1, 2)]);
    *share.lock().unwrap() = 0.8;
    let left = monitor.stats();
    assert_eq!((left.phase, left.shrinks, left.raises), (Phase::Short, 5, 0));
    *share.lock().unwrap() = 0.2;
    periods(&|stats| stats.raises > 0);
    worker.drop_dataflows();
}

#[test]
fn the_workers_of_a_process_are_under_the_same_bounds() {
    const WORKERS: usize = 3;
    let now_ns = Arc::new(AtomicU64::new(0));
    let mut members: Vec<_> = fabric::threads(WORKERS)
        .into_iter()
        .map(|seat| {
            let clock = now_ns.clone();
            let limits = Limits { batches: (1, 2, 4), batch_size: (1, 16, 1024), rest: 2, ..Limits::default() };
            let bounds = Bounds::adaptive()
                .within(limits)
                .unwrap()
                .with_memory(Memory::reading(|| None))
                .with_clock(Arc::new(move || clock.load(Ordering::Relaxed)));
            let sizes = Rc::new(RefCell::new(Vec::new()));
            let seen = sizes.clone();
            let mut worker = Worker::new(seat);
            let (mut input, monitor) = worker.dataflow::<u64, _>("common", |scope| {
                let (input, stream) = scope.new_input::<Vec<u64>>();
                let faucet = Faucet::<Batched<u64>, Vec<u64>>::new(bounds).observed(move |event| {
                    if let Event::Admitted { items, .. } = event {
                        seen.borrow_mut().push(items.len() as u64);
                    }
                });
                let (_, monitor) = faucet.expanding(&stream, |many| 0..many, |_, items| items);
                (input, monitor)
            });
            input.send(vec![1 << 40]);
            input.close();
            (worker, monitor, sizes)
        })
        .collect();
    let mut used: [BTreeSet<(u64, u64)>; WORKERS] = Default::default();
    let mut random = support::Random(11);
    for _ in 0..60_000 {
        now_ns.fetch_add(1_000_000, Ordering::Relaxed);
        // One worker is on a slower core.
        let at = [0, 0, 0, 0, 1, 1, 1, 2][random.below(8) as usize];
        let [before, first] = [&members[at].1, &members[0].1].map(penstock_bounded::Monitor::stats);
        assert_eq!((before.batches, before.batch_size), (first.batches, first.batch_size));
        let (worker, _, sizes) = &mut members[at];
        worker.step().expect("nothing fails");
        for size in sizes.take() {
            assert_eq!(size, before.batch_size, "a batch of worker {at}");
            used[at].insert((before.batches, size));
        }
    }
    let moves = members[0].1.stats();
    assert!(moves.raises + moves.shrinks > 0 && used[0].len() > 2, "nothing was tried: {moves:?}, {:?}", used[0]);
    // What was tried was tried on all of them.
    assert_eq!((&used[1], &used[2]), (&used[0], &used[0]));
    members.iter_mut().for_each(|(worker, ..)| worker.drop_dataflows());
}

fn failing(worker: &mut Worker, on_failure: OnFailure) -> Result<(Vec<u64>, u64, Vec<Failure>), BoxError> {
    let rows = Rc::new(RefCell::new(Vec::new()));
    let sink = rows.clone();
    let bounds = Bounds::fixed(2, 4)?;
    let (mut input, monitor) = worker.dataflow::<u64, _>("failing", |scope| {
        let (input, stream) = scope.new_input::<Vec<u64>>();
        let expand = |many: u64| {
            (0..many).map(move |at| match (many, at) {
                (13, 9) => Err("unlucky".to_string()),
                (14, 2) => panic!("worse"),
                _ => Ok(at),
            })
        };
        let faucet = Faucet::<Batched<u64>, Vec<u64>>::new(bounds).on_failure(on_failure);
        let (out, monitor) = faucet.trying(&stream, expand, |_, items| items);
        out.inspect(move |_, block| sink.borrow_mut().extend(block));
        (input, monitor)
    });
    input.advance_to(3)?;
    if worker.index() == 0 {
        input.send(vec![5, 13, 3, 14, 2]);
    }
    input.close();
    while worker.step_or_park(None)? {}
    let rows = rows.take();
    Ok((rows, monitor.stats().failed, monitor.failures()))
}

#[test]
fn a_failing_iterator_names_its_input_and_the_others_go_on() {
    for workers in [1, 2, 4] {
        let results = run(workers, |worker| failing(worker, OnFailure::GoOn));
        let (rows, failed, failures) = &results[0];
        let expected: Vec<u64> = (0..5).chain(0..9).chain(0..3).chain(0..2).chain(0..2).collect();
        assert_eq!((rows, *failed), (&expected, 2));
        let told: Vec<String> = failures.iter().map(Failure::to_string).collect();
        assert_eq!(
            told,
            [
                "the expansion of 13 at 3 failed after 9 items: unlucky",
                "the expansion of 14 at 3 failed after 2 items: worse"
            ]
        );
    }
}

#[test]
fn a_failing_iterator_stops_all_workers_with_its_input() {
    for workers in [1, 2, 4] {
        let threads = execute(fabric::threads(workers), |worker| failing(worker, OnFailure::Stop));
        for thread in threads {
            let error = thread.join().unwrap().unwrap_err();
            let Error::Operator { name, worker: 0, source } = error else { panic!("{error}") };
            assert_eq!(name, "failing/bounded/batcher");
            assert_eq!(source.to_string(), "the expansion of 13 at 3 failed after 9 items: unlucky");
        }
    }
}

#[test]
fn a_panic_in_an_expansion_that_cannot_fail_is_an_error_of_the_batcher() {
    let threads = execute(fabric::threads(2), |worker: &mut Worker| {
        let mut input = worker.dataflow::<u64, _>("panicking", |scope| {
            let (input, stream) = scope.new_input::<Vec<u64>>();
            let expand = |many: u64| (0..many).inspect(|at| assert!(*at < 7, "seven"));
            stream.bounded_flat_map(
                Bounds::fixed(1, 2).unwrap(),
                expand,
                |_, items: penstock_dataflow::Stream<_, Vec<u64>>| items,
            );
            input
        });
        input.send(vec![worker.index() as u64 * 10]);
        input.close();
        while worker.step_or_park(None)? {}
        Ok::<_, BoxError>(())
    });
    for thread in threads {
        let error = thread.join().unwrap().unwrap_err();
        assert!(matches!(&error, Error::Panic { message, .. } if message == "seven"), "{error}");
    }
}

#[test]
fn a_body_that_never_answers_is_named() {
    // It waits for the end of the epoch before it sends anything, so its first batch cannot finish.
    let mut worker = Worker::new(fabric::threads(1).remove(0));
    let (mut input, monitor) = worker.dataflow::<u64, _>("holding", |scope| {
        let (input, stream) = scope.new_input::<Vec<u64>>();
        let body = |_: &mut _, items: penstock_dataflow::Stream<Batched<u64>, Vec<u64>>| {
            items.unary::<Vec<u64>, _>(Pipeline, "hold", |_| {
                let mut held = Vec::new();
                move |input, _, _| {
                    input.for_each(|capability, _| held.push(capability.retain()));
                    Ok(())
                }
            })
        };
        let (_, monitor) = stream.bounded(Bounds::fixed(2, 10).unwrap(), body);
        (input, monitor)
    });
    input.advance_to(6).unwrap();
    input.send((0..50).collect());
    input.close();
    for _ in 0..100 {
        assert!(worker.step().unwrap(), "it must not finish");
    }
    assert!(!worker.has_work(), "and it must not spin");
    let stats = monitor.stats();
    assert_eq!((stats.unfinished, stats.buffered, stats.holding.as_deref()), (2, 30, Some("(6, batch 0)")));
    worker.drop_dataflows();
}

#[test]
fn a_loop_that_would_leave_its_batch_is_refused() {
    use penstock_progress::timestamp::Product;
    let mut worker = Worker::new(fabric::threads(1).remove(0));
    worker.dataflow::<u64, _>("short cut", |scope| {
        let (_, stream) = scope.new_input::<Vec<u64>>();
        stream.bounded(Bounds::fixed(1, 1).unwrap(), |inner, items| {
            let (feedback, back) = inner.feedback(Product::new(0, ()));
            let all = items.concat(&back);
            all.connect_loop(feedback);
            all
        });
    });
    let error = worker.step().unwrap_err();
    assert!(matches!(error, Error::Graph { .. }), "{error}");
}

#[test]
fn results_are_the_same_over_processes() {
    let expected = sorted(run(4, |worker| spread(worker, None)));
    for (name, rows) in everywhere(|worker| spread(worker, Some(Bounds::fixed(2, 9)?))) {
        if rows.len() == 4 {
            assert_eq!(sorted(rows), expected, "{name}");
        }
    }
}

/// Takes long for an item, gives every other time none, and counts how often it is asked.
struct Slow(Rc<Cell<usize>>);

impl Expand<Vec<u64>> for Slow {
    type Inputs = u64;
    type Gathered = Vec<u64>;
    type Block = Vec<u64>;

    fn load(&mut self, block: Vec<u64>) -> Result<u64, BoxError> {
        Ok(block.len() as u64)
    }

    fn left(&self, inputs: &u64) -> u64 {
        *inputs
    }

    fn fill(&mut self, inputs: &mut u64, _: usize, items: &mut Vec<u64>) -> (usize, Result<(), Fault>) {
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_millis(20) {
            std::hint::spin_loop();
        }
        self.0.set(self.0.get() + 1);
        *inputs -= 1;
        let count = usize::from(inputs.is_multiple_of(2));
        items.extend(vec![*inputs; count]);
        (count, Ok(()))
    }

    fn seal(&mut self, items: Vec<u64>, give: &mut dyn FnMut(Vec<u64>)) -> Result<(), BoxError> {
        give(items);
        Ok(())
    }
}

#[test]
fn a_run_ends_in_time_where_items_are_long_in_coming() {
    let mut worker = Worker::new(fabric::threads(1).remove(0));
    let (asked, got) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
    let (expand, counted) = (Slow(asked.clone()), got.clone());
    let mut input = worker.dataflow::<u64, _>("slow", |scope| {
        let (input, numbers) = scope.new_input::<Vec<u64>>();
        let faucet = Faucet::<Batched<u64>, Vec<u64>>::new(Bounds::fixed(2, 64).unwrap());
        let (_, items, mut gate, _) = faucet.open(&numbers, expand);
        let seen = items.inspect(move |_, block| counted.set(counted.get() + block.len()));
        Egress::leave(seen, &mut gate);
        input
    });
    input.send((0..6).collect());
    drop(input);
    let mut most = 0;
    loop {
        let before = (asked.get(), got.get());
        let more = worker.step().unwrap();
        most = most.max(asked.get() - before.0);
        if !more {
            break;
        }
    }
    assert_eq!((asked.get(), got.get(), most), (6, 3, 1), "one look each step, in which all else has its turn");
}
