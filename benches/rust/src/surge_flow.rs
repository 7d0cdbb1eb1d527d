//! One input that becomes as many items as asked for, for the benches of flow control (F-04, F-10).
//!
//! The items are numbers that cross to the worker they belong to and are counted there. Without bounds all of them are made
//! before the first one is counted, as an operator does that sends what it has.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Instant;

use penstock_bounded::{BoundedStream, Monitor};
use penstock_dataflow::{BoxError, Pipeline, Stream, Worker, execute, fabric};
use penstock_progress::timestamp::Timestamp;

use crate::clique_flow::{Control, Run, blocks};

/// Runs it on so many threads; the first one has the input.
///
/// # Panics
/// When a worker fails.
#[must_use]
pub fn run(items: u64, workers: usize, control: Control) -> Run {
    let threads = execute(fabric::threads(workers), move |worker: &mut Worker| work(worker, items, control));
    let results =
        threads.into_iter().map(|thread| thread.join().expect("workers catch panics").expect("no step fails"));
    Run::of(results)
}

fn counted<T: Timestamp>(items: &Stream<T, Vec<u64>>) -> Stream<T, Vec<u64>> {
    items.exchange_by(|item| *item).map_blocks(|block| vec![block.len() as u64])
}

fn work(
    worker: &mut Worker,
    items: u64,
    control: Control,
) -> Result<(u64, f64, Option<penstock_bounded::Stats>), BoxError> {
    let found = Rc::new(Cell::new(0));
    let sum = found.clone();
    let (mut input, monitor) = worker.dataflow::<u64, _>("surge", |scope| {
        let (input, stream) = scope.new_input::<Vec<u64>>();
        let expand = |many: u64| 0..many;
        let (counts, monitor): (_, Option<Monitor>) = match control.bounds().0 {
            Some(bounds) => {
                let (counts, monitor) = stream.bounded_flat_map(bounds, expand, |_, items| counted(&items));
                (counts, Some(monitor))
            }
            None => (counted(&blocks(&stream, expand)), None),
        };
        counts.sink(Pipeline, "sum", move |input, _| {
            input.for_each(|_, block| sum.set(sum.get() + block.iter().sum::<u64>()));
            Ok(())
        });
        (input, monitor)
    });
    let begin = Instant::now();
    if worker.index() == 0 {
        input.send(vec![items]);
    }
    input.close();
    while worker.step_or_park(None)? {}
    Ok((found.get(), begin.elapsed().as_secs_f64(), monitor.map(|monitor| monitor.stats())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_counted_once() {
        for workers in [1, 2] {
            for control in [Control::Free, Control::Bounded((2, 100), None), Control::Adaptive] {
                assert_eq!(run(12_345, workers, control).found, 12_345, "{workers} workers, {control:?}");
            }
        }
    }
}
