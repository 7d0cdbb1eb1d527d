//! An empty epoch allocates nothing once it is running. A test program of its own: it counts the allocations of the process.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use penstock_dataflow::{Endpoint, Worker, fabric};

struct Counting;

static COUNT: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator unchanged; counting touches no memory that it hands out.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller keeps to the contract of `alloc`, which is the system's.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: `at` came from `alloc` above, hence from the system, with this layout.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Allocations per epoch of workers that one thread steps in turns.
fn per_epoch(seats: Vec<Endpoint>) -> f64 {
    let mut workers: Vec<Worker> = seats.into_iter().map(Worker::new).collect();
    let mut ends: Vec<_> = workers
        .iter_mut()
        .map(|worker| {
            worker.dataflow::<u64, _>("flow", |scope| {
                let (handle, stream) = scope.new_input::<Vec<u64>>();
                (handle, stream.exchange_by(|value| *value).map_blocks(|block| block).probe().0)
            })
        })
        .collect();
    workers.iter_mut().for_each(|worker| assert!(!worker.bootstrap().unwrap()));
    let mut run = |epochs: std::ops::Range<u64>| {
        for epoch in epochs {
            for (input, _) in &mut ends {
                input.advance_to(epoch).unwrap();
            }
            while ends.iter().any(|(_, probe)| probe.less_than(&epoch)) {
                for worker in &mut workers {
                    worker.step().unwrap();
                }
            }
        }
    };
    run(1..100);
    let before = COUNT.load(Ordering::Relaxed);
    run(100..1100);
    (COUNT.load(Ordering::Relaxed) - before) as f64 / 1000.0
}

#[test]
fn an_empty_epoch_allocates_next_to_nothing() {
    // The queue of a mailbox makes a block for each 31 messages.
    let (one, two) = (per_epoch(fabric::threads(1)), per_epoch(fabric::threads(2)));
    println!("{one} at one worker, {two} at two");
    assert!(one < 0.01 && two < 0.1, "{one} at one worker, {two} at two");
    // Where others may join each bundle is one: servers may have to keep it.
    let (one, two) = (per_epoch(fabric::joinable(1).0), per_epoch(fabric::joinable(2).0));
    println!("{one} at one joinable worker, {two} at two");
    assert!(one < 0.01 && two < 2.2, "{one} at one joinable worker, {two} at two");
}
