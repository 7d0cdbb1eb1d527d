//! Change batches and maintained frontiers. Time per iteration; throughput counts updates or moves.

#![allow(missing_docs)] // the macros of criterion make public items without any

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use penstock_benches::Numbers;
use penstock_progress::{ChangeBatch, MutableAntichain};

/// 16,384 updates one by one, then a drain, over 1, 16 or only distinct times.
fn change_batch(criterion: &mut Criterion) {
    const UPDATES: usize = 16_384;
    let mut group = criterion.benchmark_group("change-batch");
    group.throughput(Throughput::Elements(UPDATES as u64));
    for (name, modulus) in [("1", 1), ("16", 16), ("distinct", u64::MAX)] {
        let times = Numbers(1).take(UPDATES).map(|number| number % modulus).collect::<Vec<_>>();
        group.bench_function(BenchmarkId::new("times", name), |bencher| {
            let mut batch = ChangeBatch::new();
            bencher.iter(|| {
                for time in &times {
                    batch.update(black_box(*time), 1);
                }
                batch.drain().count()
            });
        });
    }
    group.finish();
}

/// The frontier moves by one: the least of `live` times goes, a new greatest one comes.
fn frontier(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("frontier");
    group.throughput(Throughput::Elements(1));
    for live in [1_u64, 16, 256, 4_096] {
        group.bench_function(BenchmarkId::new("live", live), |bencher| {
            let mut antichain = MutableAntichain::new();
            antichain.update_iter((0..live).map(|time| (time, 1))).count();
            let mut least = 0;
            bencher.iter(|| {
                let changes = antichain.update_iter([(least + live, 1), (least, -1)]).count();
                least += 1;
                changes
            });
        });
    }
    // The consumption of later times is heard of first, while one live time stays.
    for owed in [256_u64, 4_096] {
        group.bench_function(BenchmarkId::new("owed", owed), |bencher| {
            let mut antichain = MutableAntichain::new();
            antichain.update_iter((0..=owed).map(|time| (time, if time == 0 { 1 } else { -1 }))).count();
            let mut first = 1;
            bencher.iter(|| {
                let changes = antichain.update_iter([(first + owed, -1), (first, 1)]).count();
                first += 1;
                changes
            });
        });
    }
    group.finish();
}

criterion_group!(benches, change_batch, frontier);
criterion_main!(benches);
