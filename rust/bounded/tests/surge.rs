//! F-04 by the system's own count: one input becomes millions of items, and the resident set of the process stays where it was.
//!
//! In a program of its own, so that no other test adds to the peak. `PENSTOCK_SURGE=100000000 cargo test --release -p penstock-bounded
//! --test surge` runs the size of the paper's claim.

use std::cell::Cell;
use std::fs;
use std::rc::Rc;

use penstock_bounded::{BoundedStream, Bounds};
use penstock_dataflow::{Worker, fabric};

/// Bytes behind one item.
const ITEM: usize = 512;

fn peak_bytes() -> Option<u64> {
    let text = fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kilobytes| kilobytes * 1024)
}

#[test]
#[cfg(not(miri))]
fn one_input_of_many_items_leaves_the_resident_set_where_it_was() {
    let asked = std::env::var("PENSTOCK_SURGE").ok().and_then(|text| text.parse().ok());
    let items: u64 = asked.unwrap_or(4_000_000);
    let seen = Rc::new(Cell::new(0u64));
    let sum = seen.clone();
    let mut worker = Worker::new(fabric::threads(1).remove(0));
    let (mut input, monitor) = worker.dataflow::<u64, _>("surge", |scope| {
        let (input, stream) = scope.new_input::<Vec<u64>>();
        let expand = |many: u64| (0..many).map(|at| vec![at as u8; ITEM]);
        let (out, monitor) = stream.bounded_flat_map(Bounds::fixed(4, 1_000).unwrap(), expand, |_, items| {
            items.map_blocks(|block: Vec<Vec<u8>>| vec![block.iter().filter(|item| item.len() == ITEM).count() as u64])
        });
        out.inspect(move |_, counts| sum.set(sum.get() + counts.iter().sum::<u64>()));
        (input, monitor)
    });
    let before = peak_bytes();
    input.send(vec![items]);
    input.close();
    while worker.step().unwrap() {}
    assert_eq!((seen.get(), monitor.stats().admitted_items), (items, items));
    assert!(monitor.stats().maximum_items <= 4_000);
    // Where the system does not tell, the count of live items in `all/bounds.rs` has to do.
    if let (Some(before), Some(after)) = (before, peak_bytes()) {
        let grown = after - before;
        // Four thousand items are 2 MiB; all of them would be 2 GiB.
        assert!(grown < 32 << 20, "{} KiB more for {} MiB of items", grown >> 10, (items * ITEM as u64) >> 20);
    }
}
