//! Keyed count through the whole path on worker threads: slices, hash, route by bin, apply in time order, progress.
//! Each iteration is one epoch of 65,536 uniform keys; throughput counts rows. All keys are preloaded.

#![allow(missing_docs)] // the macros of criterion make public items without any

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use penstock_benches::counting::KeyedCount;
use penstock_benches::{Numbers, block};
use penstock_plan::Emit;

const ROWS: usize = 65_536;

fn keyed_count(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("keyed-count");
    group.throughput(Throughput::Elements(ROWS as u64));
    for workers in [1, 2] {
        for keys in [1_i64 << 16, 1 << 20] {
            let mut count = KeyedCount::start(workers, 8, Emit::Final);
            let all = (0..keys).collect::<Vec<_>>();
            all.chunks(ROWS).for_each(|chunk| count.count(&block(chunk)));
            let mut numbers = Numbers(7).map(|number| (number % keys as u64) as i64);
            let blocks = (0..32).map(|_| block(&numbers.by_ref().take(ROWS).collect::<Vec<_>>())).collect::<Vec<_>>();
            let mut next = blocks.iter().cycle();
            group.bench_function(BenchmarkId::new(format!("workers-{workers}"), keys), |bencher| {
                bencher.iter(|| count.count(next.next().expect("a cycle has no end")));
            });
            assert_eq!(count.keys(), keys as u64);
        }
    }
    group.finish();
}

criterion_group!(benches, keyed_count);
criterion_main!(benches);
