//! Rank with ties against a naive twin: sort everything, count the strictly better rows.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::common::{Cell, Cluster, Move};
use arrow_array::*;
use penstock_plan::Emit;
use penstock_plan::spec::{AggSpec, Nulls, Per, PlanSpec, SourceSpec, StepSpec, WindowKind};
use proptest::prelude::*;

#[derive(Clone, Debug)]
struct Bid {
    time: Option<i64>,
    auction: i64,
    price: Option<i8>,
}

fn batch(bids: &[Bid]) -> RecordBatch {
    let names = StringArray::from_iter_values(bids.iter().map(|bid| format!("a{}", bid.auction)));
    RecordBatch::try_from_iter_with_nullable(vec![
        ("auction", Arc::new(Int64Array::from_iter_values(bids.iter().map(|bid| bid.auction))) as ArrayRef, false),
        ("t", Arc::new(Int64Array::from_iter(bids.iter().map(|bid| bid.time))) as _, true),
        ("price", Arc::new(Int16Array::from_iter(bids.iter().map(|bid| bid.price.map(i16::from)))) as _, true),
        ("name", Arc::new(names) as _, false),
    ])
    .unwrap()
}

fn bid_cells(bid: &Bid) -> Vec<Cell> {
    let name = Cell::Text(format!("a{}", bid.auction));
    vec![Cell::Int(bid.auction.into()), Cell::maybe(bid.time), Cell::maybe(bid.price), name]
}

/// The rows with fewer than `n` strictly better ones; nulls are worse than everything else.
fn best<T: Clone>(n: usize, descending: bool, rows: &[T], by: impl Fn(&T) -> Option<i64>) -> Vec<T> {
    let rank = |row: &T| by(row).map_or((1, 0), |value| (0, if descending { -value } else { value }));
    let better = |row: &T| rows.iter().filter(|other| rank(other) < rank(row)).count();
    rows.iter().filter(|row| better(row) < n).cloned().collect()
}

fn plan(steps: Vec<StepSpec>) -> PlanSpec {
    let source = SourceSpec {
        name: "input".into(),
        schema: batch(&[]).schema(),
        event_time: Some("t".into()),
        lateness_ms: 0,
        order_by: vec![],
        idle_after_ms: None,
    };
    PlanSpec::line(source, steps)
}

fn window(size: i64, every: i64) -> StepSpec {
    let (size_us, every_us) = (size * 1_000, Some(every * 1_000));
    StepSpec::Window { kind: WindowKind::Sliding, size_us, every_us, offset_us: None, zone: None }
}

fn starts(time: i64, size: i64, every: i64) -> Vec<i64> {
    (-1_000 / every..1_000 / every)
        .map(|at| at * every)
        .filter(|start| (*start..start + size).contains(&time))
        .collect()
}

#[derive(Clone, Debug)]
struct Epoch {
    bids: Vec<Bid>,
    cut: usize,
    moves: Vec<Move>,
    abort: bool,
}

fn epochs(absent: bool) -> impl Strategy<Value = Vec<Epoch>> {
    let time = prop::option::weighted(0.95, -40i64..200).prop_map(move |time| time.or((!absent).then_some(0)));
    let bid = (time, 0i64..5, prop::option::weighted(0.9, -3i8..4)).prop_map(|(time, auction, price)| Bid {
        time,
        auction,
        price,
    });
    let moved = (0usize..2, 0u32..16, 0u32..4, any::<bool>()).prop_map(|(stage, bin, to, through_bytes)| Move {
        stage,
        bin,
        to,
        through_bytes,
    });
    let epoch = (prop::collection::vec(bid, 0..40), 1usize..20, prop::collection::vec(moved, 0..4), any::<bool>())
        .prop_map(|(bids, cut, moves, abort)| Epoch { bids, cut, moves, abort });
    prop::collection::vec(epoch, 1..5)
}

fn drive(
    cluster: &mut Cluster,
    epochs: &[Epoch],
    mut check: impl FnMut(&[Bid], i64, i64, Vec<Vec<Cell>>, Vec<Vec<Cell>>),
) {
    let run = |cluster: &mut Cluster, epoch: &Epoch, discard: bool| {
        for (at, bids) in epoch.bids.chunks(epoch.cut).enumerate() {
            if let Some(moved) = epoch.moves.get(at) {
                cluster.relocate(&Move { through_bytes: moved.through_bytes && !discard, ..moved.clone() });
            }
            cluster.feed(0, batch(bids)).unwrap();
        }
    };
    let end = Epoch { bids: vec![], cut: 1, moves: vec![], abort: true };
    let (mut before, mut greatest) = (i64::MIN, i64::MIN);
    for (at, epoch) in epochs.iter().chain([&end]).enumerate() {
        greatest = epoch.bids.iter().filter_map(|bid| bid.time).fold(greatest, i64::max);
        let after = if at == epochs.len() { i64::MAX } else { greatest.saturating_sub(20).saturating_mul(1_000) };
        if epoch.abort {
            cluster.mark();
            run(cluster, epoch, true);
            cluster.close(after).unwrap();
            cluster.take();
            cluster.rollback(before, epoch.cut % 2 == 0);
        }
        run(cluster, epoch, false);
        cluster.close(after).unwrap();
        let (rows, late) = cluster.take();
        check(&epoch.bids, before, after, rows, late);
        before = after;
    }
    assert_eq!(cluster.keys(), 0, "nothing is left at the end");
}

fn bags(mut rows: Vec<Vec<Cell>>) -> Vec<Vec<Cell>> {
    rows.sort();
    rows
}

proptest! {
    #![proptest_config(penstock_cases::cases(200))]

    /// The shape of NEXMark's q7: the best raw rows of each window, whole rows, all ties.
    #[test]
    fn raw_rows_per_window(
        epochs in epochs(true), every in 5i64..40, size in 1i64..70, n in 1u64..4, descending in any::<bool>(),
        bits in 0u8..4, workers in 1u32..5,
    ) {
        let top = StepSpec::Top { n, by: "price".into(), descending, per: Per::Window, operator: None };
        let mut cluster = Cluster::new(plan(vec![window(size, every), top]), bits, workers);
        let mut open: BTreeMap<i64, Vec<Bid>> = BTreeMap::new();
        drive(&mut cluster, &epochs, |bids, before, after, got, late| {
            let ended = |start: i64, watermark: i64| watermark == i64::MAX || (start + size) * 1_000 <= watermark;
            let mut expected_late = Vec::new();
            for bid in bids {
                let Some(time) = bid.time else {
                    expected_late.push([vec![Cell::Null; 2], bid_cells(bid)].concat());
                    continue;
                };
                let all = starts(time, size, every);
                all.iter().filter(|start| !ended(**start, before)).for_each(|start| {
                    open.entry(*start).or_default().push(bid.clone());
                });
                // A bid between two windows has none.
                let Some(&last) = all.last() else { continue };
                if ended(last, before) {
                    let bounds = vec![Cell::Int(last.into()), Cell::Int((last + size).into())];
                    expected_late.push([bounds, bid_cells(bid)].concat());
                }
            }
            let mut expected = Vec::new();
            open.retain(|&start, bids| {
                if ended(start, after) {
                    for bid in best(n as usize, descending, bids, |bid| bid.price.map(i64::from)) {
                        let bounds = vec![Cell::Int(start.into()), Cell::Int((start + size).into())];
                        expected.push([bounds, bid_cells(&bid)].concat());
                    }
                }
                !ended(start, after)
            });
            assert_eq!(got, bags(expected));
            assert_eq!(late, bags(expected_late));
        });
    }

    /// The shape of NEXMark's q5: the keys with the greatest count of each window, all ties.
    #[test]
    fn hot_items_per_window(
        epochs in epochs(false), every in 5i64..40, size in 1i64..120, n in 1u64..3, bits in 0u8..4, workers in 1u32..5,
    ) {
        let count = AggSpec { name: "num".into(), function: "count".into(), column: None, ..AggSpec::default() };
        let mut cluster = Cluster::new(plan(vec![
            StepSpec::KeyBy { columns: vec!["auction".into()], nulls: Nulls::Group },
            window(size, every),
            StepSpec::Agg { emit: None, aggs: vec![count], operator: None },
            StepSpec::Top { n, by: "num".into(), descending: true, per: Per::Window, operator: None },
        ]), bits, workers);
        let mut open: BTreeMap<i64, BTreeMap<i64, i64>> = BTreeMap::new();
        drive(&mut cluster, &epochs, |bids, before, after, got, late| {
            let ended = |start: i64, watermark: i64| watermark == i64::MAX || (start + size) * 1_000 <= watermark;
            let mut expected_late = 0;
            for bid in bids {
                let mut all = starts(bid.time.unwrap(), size, every);
                let between = all.is_empty();
                all.retain(|start| !ended(*start, before));
                expected_late += usize::from(all.is_empty() && !between);
                all.iter().for_each(|start| *open.entry(*start).or_default().entry(bid.auction).or_default() += 1);
            }
            let mut expected = Vec::new();
            open.retain(|&start, counts| {
                if ended(start, after) {
                    let counts: Vec<(i64, i64)> = counts.iter().map(|(&auction, &num)| (auction, num)).collect();
                    for (auction, num) in best(n as usize, true, &counts, |count| Some(count.1)) {
                        expected.push([start, start + size, auction, num].map(|value| Cell::Int(value.into())).to_vec());
                    }
                }
                !ended(start, after)
            });
            assert_eq!(got, bags(expected));
            assert_eq!(late.len(), expected_late);
        });
    }

    /// The same over sums of panes that come to the limits of their tables, and shrink.
    #[test]
    fn hot_items_of_panes_of_many_keys(
        panes in prop::collection::vec(prop::collection::vec((0i64..64, 1usize..3), 0..24), 4..24), every in 1i64..3, bits in 0u8..2,
    ) {
        let count = AggSpec { name: "num".into(), function: "count".into(), column: None, ..AggSpec::default() };
        let size = 4 * every;
        let mut cluster = Cluster::new(plan(vec![
            StepSpec::KeyBy { columns: vec!["auction".into()], nulls: Nulls::Group },
            window(size, every),
            StepSpec::Agg { emit: None, aggs: vec![count], operator: None },
            StepSpec::Top { n: 1, by: "num".into(), descending: true, per: Per::Window, operator: None },
        ]), bits, 1);
        let mut open: BTreeMap<i64, BTreeMap<i64, i64>> = BTreeMap::new();
        for (at, pane) in panes.iter().map(Some).chain([None]).enumerate() {
            let time = at as i64 * every;
            let bids: Vec<Bid> = pane.into_iter().flatten()
                .flat_map(|&(auction, times)| vec![Bid { time: Some(time), auction, price: None }; times])
                .collect();
            for bid in &bids {
                for start in starts(time, size, every) {
                    *open.entry(start).or_default().entry(bid.auction).or_default() += 1;
                }
            }
            let after = if pane.is_some() { (time + every) * 1_000 } else { i64::MAX };
            cluster.feed(0, batch(&bids)).unwrap();
            cluster.close(after).unwrap();
            let mut expected = Vec::new();
            open.retain(|&start, counts| {
                let ended = after == i64::MAX || (start + size) * 1_000 <= after;
                if ended {
                    let counts: Vec<(i64, i64)> = counts.iter().map(|(&auction, &num)| (auction, num)).collect();
                    for (auction, num) in best(1, true, &counts, |count| Some(count.1)) {
                        expected.push([start, start + size, auction, num].map(|value| Cell::Int(value.into())).to_vec());
                    }
                }
                !ended
            });
            assert_eq!(cluster.take().0, bags(expected));
        }
    }

    /// Groups without a window speak at the end of input.
    #[test]
    fn columns_and_everything(
        epochs in epochs(true), all in any::<bool>(), n in 1u64..5, descending in any::<bool>(), bits in 0u8..4, workers in 1u32..5,
    ) {
        let per = if all { Per::All } else { Per::Columns(vec!["name".into()]) };
        let mut cluster = Cluster::new(plan(vec![StepSpec::Top { n, by: "price".into(), descending, per, operator: None }]), bits, workers);
        let mut seen: Vec<Bid> = Vec::new();
        drive(&mut cluster, &epochs, |bids, _, after, got, late| {
            seen.extend_from_slice(bids);
            let mut expected = Vec::new();
            if after == i64::MAX {
                for auction in 0..5 {
                    let group: Vec<Bid> = seen.iter().filter(|bid| all || bid.auction == auction).cloned().collect();
                    expected.extend(best(n as usize, descending, &group, |bid| bid.price.map(i64::from)).iter().map(bid_cells));
                    if all {
                        break;
                    }
                }
            }
            assert_eq!(got, bags(expected));
            assert!(late.is_empty());
        });
    }
}

#[test]
fn many_rows_keep_only_candidates() {
    let bids: Vec<Bid> =
        (0..100_000).map(|at| Bid { time: Some(0), auction: at, price: Some((at % 100) as i8) }).collect();
    let spec = plan(vec![
        window(10, 10),
        StepSpec::Top { n: 1, by: "price".into(), descending: true, per: Per::Window, operator: None },
    ]);
    let mut cluster = Cluster::new(spec, 2, 2);
    for bids in bids.chunks(7_000) {
        cluster.feed(0, batch(bids)).unwrap();
    }
    // All rows would take more than 10 MB.
    assert!(cluster.keys() == 1 && cluster.bytes() < 400_000, "{} bytes kept", cluster.bytes());
    for bin in 0..4 {
        cluster.relocate(&Move { stage: 0, bin, to: 1, through_bytes: true });
    }
    cluster.close(10_000).unwrap();
    let (got, _) = cluster.take();
    assert_eq!(got.len(), 1_000, "all ties");
    assert!(got.iter().all(|row| row[4] == Cell::Int(99)));
}

#[test]
fn a_top_over_a_final_aggregate_sees_final_values() {
    let sum =
        AggSpec { name: "total".into(), function: "sum".into(), column: Some("price".into()), ..AggSpec::default() };
    let mut cluster = Cluster::new(
        plan(vec![
            StepSpec::KeyBy { columns: vec!["auction".into()], nulls: Nulls::Group },
            StepSpec::Agg { emit: Some(Emit::Final), aggs: vec![sum], operator: None },
            StepSpec::Top { n: 1, by: "total".into(), descending: false, per: Per::All, operator: None },
        ]),
        3,
        3,
    );
    let bid = |auction, price| Bid { time: None, auction, price: Some(price) };
    cluster.feed(0, batch(&[bid(1, 5), bid(2, 1), bid(3, 9)])).unwrap();
    cluster.close(0).unwrap();
    cluster.feed(0, batch(&[bid(2, 4), bid(3, -4)])).unwrap();
    cluster.close(i64::MAX).unwrap();
    let row = |auction: i64| vec![Cell::Int(auction.into()), Cell::Int(5)];
    assert_eq!(cluster.take().0, [row(1), row(2), row(3)]);
}

/// A session that ends where the watermark is goes on: it comes to the top of its window when the watermark has passed that end, and is not late there.
#[test]
fn a_top_over_sessions_has_those_that_ended_at_a_watermark() {
    let count = AggSpec { name: "num".into(), function: "count".into(), column: None, ..AggSpec::default() };
    let session =
        StepSpec::Window { kind: WindowKind::Session, size_us: 5_000, every_us: None, offset_us: None, zone: None };
    let mut cluster = Cluster::new(
        plan(vec![
            StepSpec::KeyBy { columns: vec!["auction".into()], nulls: Nulls::Group },
            session,
            StepSpec::Agg { emit: None, aggs: vec![count], operator: None },
            StepSpec::Top { n: 1, by: "num".into(), descending: true, per: Per::Window, operator: None },
        ]),
        3,
        2,
    );
    let bid = |auction, time| Bid { time: Some(time), auction, price: None };
    cluster.feed(0, batch(&[bid(1, 10), bid(2, 10), bid(2, 10)])).unwrap();
    cluster.close(15_000).unwrap();
    assert_eq!(cluster.take(), Default::default());
    cluster.close(16_000).unwrap();
    assert_eq!(cluster.take(), (vec![[10, 15, 2, 2].map(Cell::Int).to_vec()], vec![]));
    assert_eq!(cluster.keys(), 0);
}
