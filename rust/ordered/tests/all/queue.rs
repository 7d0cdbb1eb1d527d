//! The partition queues: the order of each partition, nothing lost, no partition twice at a time, and the trace of the slides.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use penstock_ordered::queue::{Hybrid, PartitionQueue, Partitioned, Shared};
use proptest::prelude::*;

/// What the workers of a run saw.
struct Seen {
    /// Per partition, in the order in which it was worked on.
    partitions: Vec<Vec<u64>>,
    /// How often a partition was worked on while another thread was.
    overlaps: usize,
}

/// One thread adds while workers consume, some of them slow now and then.
fn run(queue: &dyn PartitionQueue<u64>, items: &[usize], workers: usize, quantum: usize, seed: u64) -> Seen {
    let partitions = queue.partitions();
    let order: Vec<_> = (0..partitions).map(|_| Mutex::new(Vec::new())).collect();
    let busy: Vec<_> = (0..partitions).map(|_| AtomicBool::new(false)).collect();
    let (overlaps, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let operate = |partition: usize, item: u64| {
        overlaps.fetch_add(usize::from(busy[partition].swap(true, Ordering::SeqCst)), Ordering::SeqCst);
        if (seed ^ item).wrapping_mul(0xD6E8_FEB8_6659_FD93) >> 60 == 0 {
            std::thread::yield_now();
        }
        order[partition].lock().unwrap().push(item);
        busy[partition].store(false, Ordering::SeqCst);
    };
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                while done.load(Ordering::SeqCst) < items.len() {
                    let some = queue.consume(quantum, &mut |partition, item| operate(partition, item));
                    done.fetch_add(some, Ordering::SeqCst);
                    if some == 0 {
                        std::thread::yield_now();
                    }
                }
            });
        }
        for (number, partition) in items.iter().enumerate() {
            queue.add(*partition, number as u64);
        }
    });
    assert_eq!((queue.len(), queue.is_empty()), (0, true));
    let partitions = order.into_iter().map(|order| order.into_inner().unwrap()).collect();
    Seen { partitions, overlaps: overlaps.into_inner() }
}

/// The items of each partition as they were added.
fn expected(items: &[usize], partitions: usize) -> Vec<Vec<u64>> {
    let mut all = vec![Vec::new(); partitions];
    items.iter().enumerate().for_each(|(number, partition)| all[*partition].push(number as u64));
    all
}

proptest! {
    #[test]
    fn each_partition_is_worked_on_in_order_by_one_at_a_time(
        partitions in 1usize..9,
        items in prop::collection::vec(any::<prop::sample::Index>(), 0..if cfg!(miri) { 20 } else { 400 }),
        workers in 1usize..=64,
        quantum in 0usize..5,
        seed in any::<u64>(),
    ) {
        let workers = if cfg!(miri) { workers.min(3) } else { workers };
        let items: Vec<_> = items.iter().map(|index| index.index(partitions)).collect();
        for queue in [&Hybrid::new(partitions) as &dyn PartitionQueue<u64>, &Partitioned::new(partitions)] {
            let seen = run(queue, &items, workers, quantum, seed);
            prop_assert_eq!(seen.overlaps, 0);
            prop_assert_eq!(seen.partitions, expected(&items, partitions));
        }
        // The shared queue loses nothing and locks partitions; what it does not keep is the order.
        let mut seen = run(&Shared::new(partitions), &items, workers, quantum, seed);
        prop_assert_eq!(seen.overlaps, 0);
        seen.partitions.iter_mut().for_each(|partition| partition.sort_unstable());
        prop_assert_eq!(seen.partitions, expected(&items, partitions));
    }
}

/// The trace of the slides: tokens of partitions 2, 1, 1, 3. While the first worker is at the first item of 1, a second worker counts
/// the second token of 1 and takes 3; the first worker then does the second item of 1.
#[test]
fn a_busy_partition_s_token_is_left_to_its_worker() {
    let queue = Hybrid::new(4);
    for (item, partition) in [2, 1, 1, 3].into_iter().enumerate() {
        queue.add(partition, item + 1);
    }
    assert_eq!(queue.len(), 4);
    let trace = RefCell::new(Vec::new());
    let worker = |name: char| {
        queue.consume(usize::MAX, &mut |partition, item| {
            trace.borrow_mut().push((name, partition, item));
            if (name, item) == ('a', 2) {
                let second = queue.consume(usize::MAX, &mut |partition, item| {
                    trace.borrow_mut().push(('b', partition, item));
                });
                assert_eq!(second, 1);
                assert_eq!(queue.consume(1, &mut |_, _| unreachable!("all tokens are taken")), 0);
            }
        })
    };
    assert_eq!((worker('a'), worker('a'), worker('a')), (1, 2, 0));
    let expected = [('a', 2, 1), ('a', 1, 2), ('b', 3, 4), ('a', 1, 3)];
    assert_eq!(*trace.borrow(), expected);
}

/// A partition that keeps one worker busy goes to the end of the queue after a quantum, with all that was left to that worker.
#[test]
fn a_hot_partition_lets_others_through() {
    let queue = Hybrid::new(2);
    [0, 0, 0, 0, 1].into_iter().enumerate().for_each(|(item, partition)| queue.add(partition, item));
    let mut first = Vec::new();
    let mut others = Vec::new();
    let done = queue.consume(2, &mut |_, item| {
        if item == 0 {
            // Meanwhile another worker leaves all items of partition 0 to us and does that of partition 1.
            assert_eq!(queue.consume(2, &mut |partition, item| others.push((partition, item))), 1);
        }
        if item == 1 {
            queue.add(1, 5);
        }
        first.push(item);
    });
    assert_eq!((done, first, others), (2, vec![0, 1], vec![(1, 4)]));
    let mut rest = Vec::new();
    while queue.consume(2, &mut |_, item| rest.push(item)) > 0 {}
    assert_eq!(rest, [5, 2, 3]);
}

/// A panic ends one item, not its partition.
#[test]
fn a_panic_leaves_the_partition_to_others() {
    for queue in [&Hybrid::new(2) as &dyn PartitionQueue<usize>, &Partitioned::new(2), &Shared::new(2)] {
        (0..6).for_each(|item| queue.add(item % 2, item));
        let mut done = Vec::new();
        for _ in 0..20 {
            let _ = catch_unwind(AssertUnwindSafe(|| {
                queue.consume(9, &mut |_, item| {
                    assert!(item != 2);
                    done.push(item);
                })
            }));
        }
        done.sort_unstable();
        assert_eq!((done, queue.len()), (vec![0, 1, 3, 4, 5], 0));
    }
}

#[test]
#[should_panic(expected = "2")]
fn there_is_no_partition_beyond_the_last() {
    Shared::new(2).add(2, ());
}
