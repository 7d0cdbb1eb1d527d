//! Windowed and running aggregates against a naive twin: all rows in a list, every window computed from scratch.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::common::{self, Cell, Cluster, Move};
use arrow_array::builder::StringBuilder;
use arrow_array::cast::AsArray;
use arrow_array::types::Int64Type;
use arrow_array::*;
use arrow_buffer::{Buffer, NullBuffer};
use arrow_schema::{DataType, Field, Schema, SchemaRef, TimeUnit};
use penstock_plan::spec::{AggSpec, Nulls, PlanSpec, SourceSpec, StepSpec, WindowKind};
use penstock_plan::{Emit, OpError};
use proptest::prelude::*;

#[derive(Clone, Debug)]
struct Row {
    time: Option<i64>,
    key: Option<u8>,
    value: Option<i16>,
}

#[derive(Clone, Debug)]
struct Epoch {
    rows: Vec<Row>,
    cut: usize,
    moves: Vec<Move>,
    abort: bool,
}

/// Time units: whole milliseconds in the column's own unit.
#[derive(Clone, Copy, Debug)]
enum Time {
    Int,
    Milli,
    Micro,
    Nano,
}

impl Time {
    fn unit(self, ms: i64) -> i64 {
        match self {
            Self::Int | Self::Milli => ms,
            Self::Micro => ms * 1_000,
            Self::Nano => ms * 1_000_000,
        }
    }

    fn array(self, ms: impl Iterator<Item = Option<i64>>) -> ArrayRef {
        let codes: Vec<Option<i64>> = ms.map(|ms| ms.map(|ms| self.unit(ms))).collect();
        match self {
            Self::Int => Arc::new(Int64Array::from(codes)),
            Self::Milli => Arc::new(TimestampMillisecondArray::from(codes)),
            Self::Micro => Arc::new(TimestampMicrosecondArray::from(codes).with_timezone("UTC")),
            Self::Nano => Arc::new(TimestampNanosecondArray::from(codes)),
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Key {
    None,
    Int,
    Date,
    Bool,
    Text,
    Pair,
}

impl Key {
    fn columns(self) -> Vec<String> {
        let names: &[&str] = match self {
            Self::None => &[],
            Self::Int => &["ki"],
            Self::Date => &["kd"],
            Self::Bool => &["kb"],
            Self::Text => &["ks"],
            Self::Pair => &["ks", "ki"],
        };
        names.iter().map(|name| name.to_string()).collect()
    }

    fn cells(self, key: Option<u8>) -> Vec<Cell> {
        let int = Cell::maybe(key.map(|key| i64::from(key) - 2));
        let text = key.map_or(Cell::Null, |key| Cell::text(&text(key)));
        match self {
            Self::None => vec![],
            Self::Int | Self::Date => vec![int],
            Self::Bool => vec![Cell::maybe(key.map(|key| i64::from(key % 2)))],
            Self::Text => vec![text],
            Self::Pair => vec![text, int],
        }
    }
}

fn text(key: u8) -> String {
    // Shared prefixes longer than arrow-row's blocks, and the empty string.
    if key == 0 { String::new() } else { "x".repeat(30 + usize::from(key)) }
}

fn batch(rows: &[Row], time: Time) -> RecordBatch {
    let ints = rows.iter().map(|row| row.key.map(|key| i64::from(key) - 2));
    let mut texts = StringBuilder::new();
    rows.iter().for_each(|row| texts.append_option(row.key.map(text)));
    let float = |value: i16| if value == 7 { f64::NAN } else { f64::from(value) / 4.0 };
    let mut names = StringBuilder::new();
    rows.iter().for_each(|row| names.append_option(row.value.map(|value| format!("v{value}"))));
    let wide = rows.iter().map(|row| row.value.map(|value| i64::from(value) as u64));
    let decimals: Decimal128Array = rows.iter().map(|row| row.value.map(i128::from)).collect();
    RecordBatch::try_from_iter_with_nullable(vec![
        ("ki", Arc::new(Int64Array::from_iter(ints.clone())) as ArrayRef, true),
        ("kd", Arc::new(Date32Array::from_iter(ints.map(|key| key.map(|key| key as i32)))) as _, true),
        ("kb", Arc::new(BooleanArray::from_iter(rows.iter().map(|row| row.key.map(|key| key % 2 == 1)))) as _, true),
        ("ks", Arc::new(texts.finish()) as _, true),
        ("t", time.array(rows.iter().map(|row| row.time)), true),
        ("v", Arc::new(Int16Array::from_iter(rows.iter().map(|row| row.value))) as _, true),
        ("u", Arc::new(UInt64Array::from_iter(wide)) as _, true),
        ("f", Arc::new(Float64Array::from_iter(rows.iter().map(|row| row.value.map(float)))) as _, true),
        ("s", Arc::new(names.finish()) as _, true),
        ("d", Arc::new(decimals.with_precision_and_scale(10, 2).unwrap()) as _, true),
    ])
    .unwrap()
}

fn aggs() -> Vec<AggSpec> {
    [
        ("n", "count", ""),
        ("nv", "count", "v"),
        ("sum_v", "sum", "v"),
        ("min_v", "min", "v"),
        ("max_v", "max", "v"),
        ("mean_v", "mean", "v"),
        ("min_u", "min", "u"),
        ("max_u", "max", "u"),
        ("sum_f", "sum", "f"),
        ("min_f", "min", "f"),
        ("max_f", "max", "f"),
        ("min_s", "min", "s"),
        ("max_s", "max", "s"),
        ("sum_d", "sum", "d"),
        ("mean_d", "mean", "d"),
        ("max_d", "max", "d"),
        ("max_t", "max", "t"),
        ("min_by_f", "min_by", "s by f"),
        ("max_by_v", "max_by", "f by v"),
        ("first_v", "first", "v"),
        ("last_s", "last", "s"),
        ("variance_v", "variance", "v"),
        ("var_pop_d", "var_pop", "d"),
        ("stddev_f", "stddev", "f"),
        ("stddev_pop_u", "stddev_pop", "v"),
        ("distinct_f", "count_distinct", "f"),
        ("distinct_s", "count_distinct", "s"),
        ("distinct_d", "count_distinct", "d"),
        ("about_s", "approx_count_distinct", "s"),
        ("median_f", "approx_quantile", "f"),
    ]
    .into_iter()
    .map(|(name, function, column)| {
        let (column, by) = column.split_once(" by ").map_or((column, None), |(column, by)| (column, Some(by)));
        AggSpec {
            name: name.into(),
            function: function.into(),
            column: (!column.is_empty()).then(|| column.into()),
            by: by.map(Into::into),
            q: (function == "approx_quantile").then_some(0.5),
            // 2^14 registers, of which the 40 texts that there are take 40; 7 digits.
            error: match function {
                "approx_count_distinct" => Some(0.009),
                "approx_quantile" => Some(0.004),
                _ => None,
            },
        }
    })
    .collect()
}

/// The middle of the bucket of 7 digits that holds a value.
fn middle(value: f64) -> f64 {
    if value == 0.0 || value.is_nan() {
        return value;
    }
    let width = 2f64.powi(value.abs().log2().floor() as i32 - 7);
    ((value.abs() / width).floor() + 0.5) * width * value.signum()
}

fn variance(values: &[f64], sample: bool) -> Option<f64> {
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (values.len() > usize::from(sample)).then(|| squares / (n - f64::from(u8::from(sample))))
}

/// Whether rows are equal, but for the last bits of floats.
fn assert_near(got: &[Vec<Cell>], expected: &[Vec<Cell>]) {
    let near = |pair: (&Cell, &Cell)| match pair {
        (Cell::Float(a), Cell::Float(b)) => {
            let (a, b) = (f64::from_bits(*a), f64::from_bits(*b));
            a == b || a.is_nan() && b.is_nan() || (a - b).abs() <= 1e-9 * a.abs().max(1e-6)
        }
        (a, b) => a == b,
    };
    let same = got.len() == expected.len()
        && got.iter().zip(expected).all(|(a, b)| a.len() == b.len() && a.iter().zip(b).all(near));
    assert!(same, "{got:#?}\nis not\n{expected:#?}");
}

/// The same aggregates over a list.
fn naive(rows: &[&Row], time: Time) -> Vec<Cell> {
    let values: Vec<i64> = rows.iter().filter_map(|row| row.value).map(i64::from).collect();
    let floats: Vec<f64> = values.iter().map(|&v| if v == 7 { f64::NAN } else { v as f64 / 4.0 }).collect();
    let names: Vec<String> = values.iter().map(|v| format!("v{v}")).collect();
    let wide: Vec<u64> = values.iter().map(|&v| v as u64).collect();
    let some = |cell: Cell| if values.is_empty() { Cell::Null } else { cell };
    let plain: Vec<f64> = values.iter().map(|&v| v as f64).collect();
    let float = |value: Option<f64>| value.map_or(Cell::Null, Cell::float);
    let mut sorted = floats.clone();
    sorted.sort_by(|a, b| a.is_nan().cmp(&b.is_nan()).then(a.total_cmp(b)));
    let distinct = Cell::Int(values.iter().collect::<std::collections::BTreeSet<_>>().len() as i128);
    // Nulls are less than all values.
    let timed = rows.iter().filter_map(|row| row.time.map(|at| (at, row.value)));
    let last = timed.clone().map(|(at, v)| (at, v.map(|v| format!("v{v}")))).max();
    let last = last.and_then(|(_, text)| text).map_or(Cell::Null, |text| Cell::text(&text));
    let sum: i64 = values.iter().sum();
    let count = values.len() as f64;
    let order =
        |a: &&f64, b: &&f64| a.is_nan().cmp(&b.is_nan()).then(a.partial_cmp(b).unwrap_or(std::cmp::Ordering::Equal));
    vec![
        Cell::Int(rows.len() as i128),
        Cell::Int(values.len() as i128),
        some(Cell::Int(sum.into())),
        Cell::maybe(values.iter().min().copied()),
        Cell::maybe(values.iter().max().copied()),
        some(Cell::float(sum as f64 / count)),
        Cell::maybe(wide.iter().min().copied()),
        Cell::maybe(wide.iter().max().copied()),
        some(Cell::float(floats.iter().fold(0.0, |sum, f| sum + f))),
        floats.iter().min_by(order).map_or(Cell::Null, |&f| Cell::float(f)),
        floats.iter().max_by(order).map_or(Cell::Null, |&f| Cell::float(f)),
        names.iter().min().map_or(Cell::Null, |s| Cell::text(s)),
        names.iter().max().map_or(Cell::Null, |s| Cell::text(s)),
        some(Cell::Int(sum.into())),
        some(Cell::float(sum as f64 / 100.0 / count)),
        Cell::maybe(values.iter().max().copied()),
        Cell::maybe(rows.iter().filter_map(|row| row.time).max().map(|ms| time.unit(ms))),
        names_by(&values, |value| (value == 7, value), false),
        values.iter().max().map_or(Cell::Null, |&v| Cell::float(if v == 7 { f64::NAN } else { v as f64 / 4.0 })),
        timed.clone().min().map_or(Cell::Null, |(_, v)| Cell::maybe(v)),
        last,
        float(variance(&plain, true)),
        float(variance(&plain.iter().map(|v| v / 100.0).collect::<Vec<_>>(), false)),
        float(variance(&floats, true).map(f64::sqrt)),
        float(variance(&plain, false).map(f64::sqrt)),
        distinct.clone(),
        distinct.clone(),
        distinct.clone(),
        distinct,
        some(Cell::float(middle(sorted.get(sorted.len().div_ceil(2).saturating_sub(1)).copied().unwrap_or(0.0)))),
    ]
}

/// The text of the value that is least or greatest by something.
fn names_by<T: Ord>(values: &[i64], by: impl Fn(i64) -> T, greatest: bool) -> Cell {
    let best = if greatest { values.iter().max_by_key(|v| by(**v)) } else { values.iter().min_by_key(|v| by(**v)) };
    best.map_or(Cell::Null, |v| Cell::text(&format!("v{v}")))
}

/// Size, distance and offset of windows in milliseconds; a distance of 0 means sessions.
type Cut = (i64, i64, i64);

fn window_step((size, every, offset): Cut) -> StepSpec {
    let (kind, every_us) = match every {
        0 => (WindowKind::Session, None),
        every => (WindowKind::Sliding, Some(every * 1_000)),
    };
    let offset_us = Some(offset * 1_000).filter(|us| *us > 0);
    StepSpec::Window { kind, size_us: size * 1_000, every_us, offset_us, zone: None }
}

fn spec(schema: SchemaRef, key: Key, window: Option<Cut>, emit: Option<Emit>) -> PlanSpec {
    let mut steps = Vec::new();
    if !key.columns().is_empty() {
        steps.push(StepSpec::KeyBy { columns: key.columns(), nulls: Nulls::Group });
    }
    steps.extend(window.map(window_step));
    steps.push(StepSpec::Agg { emit, aggs: aggs(), operator: None });
    let source = SourceSpec {
        name: "input".into(),
        schema,
        event_time: Some("t".into()),
        lateness_ms: 0,
        order_by: vec![],
        idle_after_ms: None,
    };
    PlanSpec::line(source, steps)
}

fn rows(max: usize, times: std::ops::Range<i64>) -> impl Strategy<Value = Vec<Row>> {
    let row = (
        prop::option::weighted(0.95, times),
        prop::option::weighted(0.9, 0u8..6),
        prop::option::weighted(0.8, -20i16..20),
    );
    prop::collection::vec(row.prop_map(|(time, key, value)| Row { time, key, value }), 0..max)
}

fn epochs() -> impl Strategy<Value = Vec<Epoch>> {
    let moved = (0usize..2, 0u32..64, 0u32..4, any::<bool>()).prop_map(|(stage, bin, to, through_bytes)| Move {
        stage,
        bin,
        to,
        through_bytes,
    });
    let epoch = (rows(30, -60..240), 1usize..9, prop::collection::vec(moved, 0..5), prop::bool::weighted(0.3))
        .prop_map(|(rows, cut, moves, abort)| Epoch { rows, cut, moves, abort });
    prop::collection::vec(epoch, 1..6)
}

fn times() -> impl Strategy<Value = Time> {
    prop::sample::select(vec![Time::Int, Time::Milli, Time::Micro, Time::Nano])
}

fn keys() -> impl Strategy<Value = Key> {
    prop::sample::select(vec![Key::None, Key::Int, Key::Date, Key::Bool, Key::Text, Key::Pair])
}

/// Runs an epoch's rows; in a run that is thrown away bins move by pointer only.
fn run(cluster: &mut Cluster, epoch: &Epoch, time: Time, discard: bool) {
    for (at, rows) in epoch.rows.chunks(epoch.cut).enumerate() {
        if let Some(moved) = epoch.moves.get(at) {
            cluster.relocate(&Move { through_bytes: moved.through_bytes && !discard, ..moved.clone() });
        }
        cluster.feed(0, batch(rows, time)).unwrap();
    }
}

/// Feeds epochs, some of them twice with a rollback between, and gives each epoch's output to `check`.
fn drive(
    cluster: &mut Cluster,
    epochs: &[Epoch],
    time: Time,
    lateness: i64,
    mut check: impl FnMut(&[Row], i64, i64, Vec<Vec<Cell>>, Vec<Vec<Cell>>),
) {
    let mut greatest = i64::MIN;
    let mut before = i64::MIN;
    let end = Epoch { rows: vec![], cut: 1, moves: vec![], abort: true };
    for (at, epoch) in epochs.iter().chain([&end]).enumerate() {
        greatest = epoch.rows.iter().filter_map(|row| row.time).fold(greatest, i64::max);
        let last = at == epochs.len();
        let after = if last { i64::MAX } else { before.max(greatest.saturating_sub(lateness).saturating_mul(1_000)) };
        if epoch.abort {
            cluster.mark();
            run(cluster, epoch, time, true);
            // The thrown-away run may even get as far as firing.
            if epoch.cut % 2 == 0 || last {
                cluster.close(after).unwrap();
            }
            cluster.take();
            cluster.rollback(before, epoch.cut % 3 == 0);
        }
        run(cluster, epoch, time, false);
        cluster.close(after).unwrap();
        let (rows, late) = cluster.take();
        check(&epoch.rows, before, after, rows, late);
        before = after;
    }
}

proptest! {
    #![proptest_config(penstock_cases::cases(200))]

    #[test]
    fn windows_equal_their_naive_twin(
        epochs in epochs(), time in times(), key in keys(),
        every in 1i64..40, size in 1i64..120, offset in 0i64..40, lateness in 0i64..60, bits in 0u8..4, workers in 1u32..5,
    ) {
        let offset = offset % every;
        let mut cluster = Cluster::new(spec(batch(&[], time).schema(), key, Some((size, every, offset)), None), bits, workers);
        // Window start -> key -> rows that came while it was open.
        let mut open: BTreeMap<i64, BTreeMap<Vec<Cell>, Vec<Row>>> = BTreeMap::new();
        drive(&mut cluster, &epochs, time, lateness, |rows, before, after, got, late| {
            let ended = |start: i64, watermark: i64| watermark == i64::MAX || (start + size) * 1_000 <= watermark;
            let mut late_rows = Vec::new();
            for row in rows {
                let (mut taken, mut between) = (false, row.time.is_some());
                if let Some(at) = row.time {
                    // Every window there could be.
                    let starts = (-1_000 / every..1_000 / every).map(|start| start * every + offset);
                    for start in starts.filter(|start| (*start..start + size).contains(&at)) {
                        between = false;
                        if !ended(start, before) {
                            taken = true;
                            let keys = open.entry(start).or_default();
                            keys.entry(key.cells(row.key)).or_default().push(row.clone());
                        }
                    }
                }
                // What lies between windows has none to be late for.
                if !taken && !between {
                    late_rows.push(row.clone());
                }
            }
            let mut expected = Vec::new();
            open.retain(|&start, keys| {
                if ended(start, after) {
                    for (key, rows) in keys {
                        let bounds = [start, start + size].map(|ms| Cell::Int(time.unit(ms).into()));
                        let rows: Vec<&Row> = rows.iter().collect();
                        expected.push([bounds.to_vec(), key.clone(), naive(&rows, time)].concat());
                    }
                }
                !ended(start, after)
            });
            expected.sort();
            assert_near(&got, &expected);
            let late_rows = if late_rows.is_empty() { vec![] } else { common::bag(&[batch(&late_rows, time)]) };
            assert_eq!(late, late_rows);
        });
        prop_assert_eq!(cluster.keys(), 0, "all panes are dropped at the end");
    }

    #[test]
    fn sessions_equal_their_naive_twin(
        epochs in epochs(), time in times(), key in keys(), gap in 1i64..40, lateness in 0i64..60, bits in 0u8..4, workers in 1u32..5,
    ) {
        let mut cluster = Cluster::new(spec(batch(&[], time).schema(), key, Some((gap, 0, 0)), None), bits, workers);
        let mut open: BTreeMap<Vec<Cell>, Vec<Row>> = BTreeMap::new();
        drive(&mut cluster, &epochs, time, lateness, |rows, before, after, got, late| {
            let ended = |last: i64, watermark: i64| watermark == i64::MAX || (last + gap).saturating_mul(1_000) < watermark;
            let is_late = |at: i64| before == i64::MAX || (at + gap) * 1_000 <= before;
            let (now, late_rows): (Vec<&Row>, Vec<&Row>) =
                rows.iter().partition(|row| row.time.is_some_and(|at| !is_late(at)));
            for row in now {
                open.entry(key.cells(row.key)).or_default().push(row.clone());
            }
            let mut expected = Vec::new();
            for (key, rows) in &mut open {
                rows.sort_by_key(|row| row.time);
                let sessions: Vec<Vec<Row>> = rows
                    .chunk_by(|a, b| b.time.unwrap() - a.time.unwrap() <= gap)
                    .map(<[Row]>::to_vec)
                    .collect();
                rows.clear();
                for session in sessions {
                    let (first, last) = (session[0].time.unwrap(), session[session.len() - 1].time.unwrap());
                    if !ended(last, after) {
                        rows.extend(session);
                        continue;
                    }
                    let bounds = [first, last + gap].map(|ms| Cell::Int(time.unit(ms).into()));
                    let all: Vec<&Row> = session.iter().collect();
                    expected.push([bounds.to_vec(), key.clone(), naive(&all, time)].concat());
                }
            }
            open.retain(|_, rows| !rows.is_empty());
            expected.sort();
            assert_near(&got, &expected);
            let late_rows: Vec<Row> = late_rows.into_iter().cloned().collect();
            let late_rows = if late_rows.is_empty() { vec![] } else { common::bag(&[batch(&late_rows, time)]) };
            assert_eq!(late, late_rows);
        });
        prop_assert_eq!(cluster.keys(), 0, "all sessions are dropped at the end");
    }

    #[test]
    fn running_aggregates_equal_their_naive_twin(
        epochs in epochs(), key in keys(), update in any::<bool>(), bits in 0u8..4, workers in 1u32..5,
    ) {
        let time = Time::Micro;
        let emit = if update { Emit::Update } else { Emit::Final };
        let mut cluster = Cluster::new(spec(batch(&[], time).schema(), key, None, Some(emit)), bits, workers);
        let mut all: BTreeMap<Vec<Cell>, Vec<Row>> = BTreeMap::new();
        drive(&mut cluster, &epochs, time, 0, |rows, _, after, got, late| {
            let mut changed = std::collections::BTreeSet::new();
            for row in rows {
                changed.insert(key.cells(row.key));
                all.entry(key.cells(row.key)).or_default().push(row.clone());
            }
            if !update {
                changed = if after == i64::MAX { all.keys().cloned().collect() } else { Default::default() };
            }
            let mut expected: Vec<Vec<Cell>> = changed
                .into_iter()
                .map(|key| [key.clone(), naive(&all[&key].iter().collect::<Vec<_>>(), time)].concat())
                .collect();
            expected.sort();
            assert_near(&got, &expected);
            assert_eq!(late, Vec::<Vec<Cell>>::new());
        });
    }

    #[test]
    fn distinct_equals_its_naive_twin(
        epochs in epochs(), key in keys(), window in prop::option::of((1i64..40, 1i64..90)), bits in 0u8..4, workers in 1u32..5,
    ) {
        let time = Time::Milli;
        let columns = if key.columns().is_empty() { vec!["v".to_owned()] } else { key.columns() };
        let cells = |row: &Row| match key {
            Key::None => vec![Cell::maybe(row.value)],
            key => key.cells(row.key),
        };
        let mut steps = Vec::new();
        steps.extend(window.map(|(every, size)| window_step((size, every, 0))));
        steps.push(StepSpec::Distinct { columns, operator: None });
        let (schema, event_time) = (batch(&[], time).schema(), Some("t".into()));
        let source = SourceSpec { name: "input".into(), schema, event_time, lateness_ms: 0, order_by: vec![], idle_after_ms: None };
        let mut cluster = Cluster::new(PlanSpec::line(source, steps), bits, workers);
        let mut seen = std::collections::BTreeSet::new();
        drive(&mut cluster, &epochs, time, 0, |rows, before, after, got, _| {
            let mut expected = Vec::new();
            for row in rows {
                let Some((every, size)) = window else {
                    expected.extend(seen.insert(cells(row)).then(|| cells(row)));
                    continue;
                };
                for start in (-1_000 / every..1_000 / every).map(|start| start * every) {
                    let open = before < i64::MAX && (start + size).saturating_mul(1_000) > before;
                    if open && row.time.is_some_and(|at| (start..start + size).contains(&at)) {
                        let bounds = [start, start + size].map(|ms| Cell::Int(time.unit(ms).into()));
                        seen.insert([bounds.to_vec(), cells(row)].concat());
                    }
                }
            }
            if let Some((_, size)) = window {
                let ended = |row: &Vec<Cell>| {
                    let Cell::Int(start) = row[0] else { panic!("a start") };
                    after == i64::MAX || (start as i64 + size) * 1_000 <= after
                };
                expected = seen.iter().filter(|row| ended(row)).cloned().collect();
                seen.retain(|row| !ended(row));
            }
            expected.sort();
            assert_eq!(got, expected);
        });
        prop_assert_eq!(cluster.keys(), if window.is_some() { 0 } else { seen.len() });
    }
}

fn sums(schema: SchemaRef, column: &str) -> PlanSpec {
    sums_by(schema, &[], column)
}

fn sums_by(schema: SchemaRef, keys: &[&str], column: &str) -> PlanSpec {
    let aggs = vec![AggSpec {
        name: "total".into(),
        function: "sum".into(),
        column: Some(column.into()),
        ..AggSpec::default()
    }];
    let source = SourceSpec {
        name: "input".into(),
        schema,
        event_time: None,
        lateness_ms: 0,
        order_by: vec![],
        idle_after_ms: None,
    };
    let columns = keys.iter().map(ToString::to_string).collect::<Vec<_>>();
    let key_by = (!keys.is_empty()).then_some(StepSpec::KeyBy { columns, nulls: Nulls::Group });
    let agg = StepSpec::Agg { emit: Some(Emit::Update), aggs, operator: None };
    PlanSpec::line(source, key_by.into_iter().chain([agg]).collect())
}

#[test]
fn a_sum_overflows_by_its_value_not_its_order() {
    let batch =
        |values: Vec<i64>| RecordBatch::try_from_iter([("x", Arc::new(Int64Array::from(values)) as _)]).unwrap();
    let mut cluster = Cluster::new(sums(batch(vec![]).schema(), "x"), 2, 1);
    cluster.feed(0, batch(vec![i64::MAX, 1])).unwrap();
    cluster.feed(0, batch(vec![-1])).unwrap();
    cluster.close(0).unwrap();
    assert_eq!(cluster.take().0, [[Cell::Int(i64::MAX.into())]]);
    cluster.feed(0, batch(vec![1])).unwrap();
    match cluster.close(1) {
        Err(OpError::Overflow { step, column, data_type, key: None }) => {
            assert_eq!(
                (step.to_string().as_str(), column.as_str(), data_type.as_str()),
                ("step 0 (agg)", "total", "bigint")
            );
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_sum_that_overflows_says_whose_it_is() {
    let columns = |user: i64, page: Option<&str>, x: i64| {
        let columns: [(&str, ArrayRef); 3] = [
            ("user", Arc::new(Int64Array::from(vec![1, user]))),
            ("page", Arc::new(StringArray::from(vec![Some("a"), page]))),
            ("x", Arc::new(Int64Array::from(vec![1, x]))),
        ];
        RecordBatch::try_from_iter_with_nullable(columns.map(|(name, column)| (name, column, true))).unwrap()
    };
    for (page, says) in [(Some("home"), "user = 7, page = \"home\""), (None, "user = 7, page = null")] {
        let batch = columns(7, page, i64::MAX);
        let mut cluster = Cluster::new(sums_by(batch.schema(), &["user", "page"], "x"), 2, 1);
        cluster.feed(0, batch.clone()).unwrap();
        cluster.feed(0, batch).unwrap();
        let error = cluster.close(0).unwrap_err().to_string();
        let begins = format!("step 1 (agg): the sum in column 'total' of {says} overflows bigint; ");
        assert!(error.starts_with(&begins), "{error}");
    }
}

#[test]
fn unsigned_and_decimal_sums_overflow_too() {
    let batch =
        |values: Vec<u64>| RecordBatch::try_from_iter([("x", Arc::new(UInt64Array::from(values)) as _)]).unwrap();
    let mut cluster = Cluster::new(sums(batch(vec![]).schema(), "x"), 0, 1);
    cluster.feed(0, batch(vec![u64::MAX])).unwrap();
    cluster.close(0).unwrap();
    assert_eq!(cluster.take().0, [[Cell::Int(u64::MAX.into())]]);
    cluster.feed(0, batch(vec![1])).unwrap();
    assert!(matches!(cluster.close(1), Err(OpError::Overflow { .. })));

    let most = 10i128.pow(38) - 1;
    let batch = |value: i128| {
        let values = Decimal128Array::from(vec![value]).with_precision_and_scale(38, 0).unwrap();
        RecordBatch::try_from_iter([("x", Arc::new(values) as _)]).unwrap()
    };
    let mut cluster = Cluster::new(sums(batch(0).schema(), "x"), 0, 1);
    cluster.feed(0, batch(most)).unwrap();
    cluster.close(0).unwrap();
    assert_eq!(cluster.take().0, [[Cell::Int(most)]]);
    // One more leaves the 38 digits, and a second one 128 bits.
    cluster.feed(0, batch(1)).unwrap();
    assert!(matches!(cluster.close(1), Err(OpError::Overflow { .. })));
    assert!(matches!(cluster.feed(0, batch(most)), Err(OpError::Overflow { .. })));
}

#[test]
fn an_event_time_out_of_range_is_an_error_and_changes_nothing() {
    let row = |time| Row { time: Some(time), key: Some(1), value: Some(1) };
    let schema = batch(&[], Time::Int).schema();
    let mut cluster = Cluster::new(spec(schema, Key::Int, Some((10, 10, 0)), None), 2, 2);
    match cluster.feed(0, batch(&[row(3), row(i64::MAX)], Time::Int)) {
        Err(OpError::EventTime { column, row, value, .. }) => {
            assert_eq!((column.as_str(), row, value), ("t", 1, i64::MAX))
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(cluster.keys(), 0);
}

#[test]
fn null_keys_can_be_rejected() {
    let row = |key| Row { time: Some(0), key, value: Some(1) };
    for key in [Key::Int, Key::Text, Key::Pair] {
        let mut spec = spec(batch(&[], Time::Int).schema(), key, Some((10, 10, 0)), None);
        spec.steps[0] = StepSpec::KeyBy { columns: key.columns(), nulls: Nulls::Reject }.into();
        let mut cluster = Cluster::new(spec, 2, 2);
        cluster.feed(0, batch(&[row(Some(1))], Time::Int)).unwrap();
        match cluster.feed(0, batch(&[row(Some(1)), row(Some(2)), row(None)], Time::Int)) {
            Err(OpError::NullKey { step, column, row }) => {
                assert_eq!((step.index, column, row), (2, key.columns()[0].clone(), 2));
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn big_outputs_come_in_bounded_blocks_and_big_bins_in_bounded_chunks() {
    let rows = 150_000i64;
    let keys = Int64Array::from_iter_values(0..rows);
    let texts = StringArray::from_iter_values((0..rows).map(|key| format!("{:>20}", key * 7)));
    let batch = RecordBatch::try_from_iter([("k", Arc::new(keys) as ArrayRef), ("s", Arc::new(texts) as _)]).unwrap();
    for column in ["k", "s"] {
        let aggs = vec![AggSpec {
            name: "most".into(),
            function: "max".into(),
            column: Some("s".into()),
            ..AggSpec::default()
        }];
        let source = SourceSpec {
            name: "input".into(),
            schema: batch.schema(),
            event_time: None,
            lateness_ms: 0,
            order_by: vec![],
            idle_after_ms: None,
        };
        let steps = vec![
            StepSpec::KeyBy { columns: vec![column.into()], nulls: Nulls::Group },
            StepSpec::Agg { emit: Some(Emit::Final), aggs, operator: None },
        ];
        let mut cluster = Cluster::new(PlanSpec::line(source, steps), 1, 2);
        cluster.feed(0, batch.clone()).unwrap();
        for bin in 0..2 {
            cluster.relocate(&Move { stage: 0, bin, to: 0, through_bytes: true });
        }
        cluster.close(i64::MAX).unwrap();
        assert_eq!(cluster.rows.len(), 3);
        let (got, _) = cluster.take();
        assert_eq!(got.len(), rows as usize);
        assert!(got.iter().all(|row| match (&row[0], &row[1]) {
            (Cell::Int(key), Cell::Text(most)) => most.trim() == (key * 7).to_string(),
            (key, most) => key == most,
        }));
    }
}

#[test]
fn window_bounds_keep_the_type_of_event_time() {
    let time = Time::Micro;
    let cluster = Cluster::new(spec(batch(&[], time).schema(), Key::Int, Some((10, 5, 0)), None), 2, 1);
    let output = cluster.plan().output_schema();
    let bound = DataType::Timestamp(TimeUnit::Microsecond, Some("UTC".into()));
    assert_eq!(output.field(0).data_type(), &bound);
    assert_eq!(output.field_with_name("window_end").unwrap().data_type(), &bound);
    assert_eq!(output.field(2).name(), "ki");
}

#[test]
fn a_mark_within_an_epoch_keeps_what_changed_before_it() {
    let time = Time::Int;
    let row = |key| Row { time: Some(0), key: Some(key), value: Some(1) };
    let mut cluster = Cluster::new(spec(batch(&[], time).schema(), Key::Int, None, Some(Emit::Update)), 1, 1);
    cluster.feed(0, batch(&[row(1), row(2)], time)).unwrap();
    cluster.close(0).unwrap();
    cluster.take();
    cluster.feed(0, batch(&[row(1)], time)).unwrap();
    cluster.mark();
    cluster.feed(0, batch(&[row(2), row(3)], time)).unwrap();
    cluster.rollback(0, true);
    cluster.close(1).unwrap();
    let (rows, _) = cluster.take();
    let counts: Vec<&[Cell]> = rows.iter().map(|row| &row[..2]).collect();
    assert_eq!(counts, [[Cell::Int(-1), Cell::Int(2)]], "key 1 with two rows, and no other");
}

fn session_plan(key: DataType, time: DataType, gap_us: i64) -> PlanSpec {
    let schema = Schema::new(vec![Field::new("k", key, true), Field::new("t", time, true)]);
    let source = SourceSpec {
        name: "input".into(),
        schema: Arc::new(schema),
        event_time: Some("t".into()),
        lateness_ms: 0,
        order_by: vec![],
        idle_after_ms: None,
    };
    let count = AggSpec { name: "n".into(), function: "count".into(), column: None, ..AggSpec::default() };
    let kind = WindowKind::Session;
    PlanSpec::line(
        source,
        vec![
            StepSpec::KeyBy { columns: vec!["k".into()], nulls: Nulls::Group },
            StepSpec::Window { kind, size_us: gap_us, every_us: None, offset_us: None, zone: None },
            StepSpec::Agg { emit: None, aggs: vec![count], operator: None },
        ],
    )
}

/// What lies under a null says nothing: one session, and one that can be read where it comes to.
#[test]
fn sessions_of_a_null_key_move_whatever_lies_under_the_null() {
    let mut cluster = Cluster::new(session_plan(DataType::FixedSizeBinary(4), DataType::Int64, 5_000), 0, 2);
    let nulls = NullBuffer::from(vec![true, false, false]);
    let keys = FixedSizeBinaryArray::try_new(4, Buffer::from(b"aaaabbbbcccc"), Some(nulls)).unwrap();
    let columns: Vec<ArrayRef> = vec![Arc::new(keys), Arc::new(Int64Array::from(vec![1, 2, 3]))];
    let schema = cluster.plan().sources()[0].schema.clone();
    cluster.feed(0, RecordBatch::try_new(schema, columns).unwrap()).unwrap();
    cluster.relocate(&Move { stage: 0, bin: 0, to: 1, through_bytes: true });
    cluster.close(i64::MAX).unwrap();
    let counts: Vec<i64> = cluster
        .rows
        .iter()
        .flat_map(|rows| rows.column_by_name("n").unwrap().as_primitive::<Int64Type>().values().to_vec())
        .collect();
    assert_eq!((counts.len(), counts.iter().max()), (2, Some(&2)));
}

/// A window whose end no nanosecond tells is refused with its row, not when it closes.
#[test]
fn nanoseconds_near_their_end_are_refused_where_they_come_in() {
    let nanoseconds = DataType::Timestamp(TimeUnit::Nanosecond, None);
    let mut windowed = session_plan(DataType::Int64, nanoseconds.clone(), 5_000_000);
    windowed.steps[1].step = StepSpec::Window {
        kind: WindowKind::Sliding,
        size_us: 5_000_000,
        every_us: Some(5_000_000),
        offset_us: None,
        zone: None,
    };
    for plan in [session_plan(DataType::Int64, nanoseconds.clone(), 5_000_000), windowed] {
        let mut cluster = Cluster::new(plan, 1, 1);
        let schema = cluster.plan().sources()[0].schema.clone();
        let batch = |times: Vec<i64>| {
            let keys: ArrayRef = Arc::new(Int64Array::from_iter_values(0..times.len() as i64));
            RecordBatch::try_new(schema.clone(), vec![keys, Arc::new(TimestampNanosecondArray::from(times))]).unwrap()
        };
        let error = cluster.feed(0, batch(vec![0, i64::MAX])).unwrap_err().to_string();
        assert!(error.contains("event time 9223372036854775807 in column 't', row 1, is out of range"), "{error}");
        cluster.feed(0, batch(vec![0, i64::MAX - 20_000_000_000])).unwrap();
        cluster.close(i64::MAX).unwrap();
        assert_eq!(cluster.rows.iter().map(RecordBatch::num_rows).sum::<usize>(), 2);
    }
}

/// Rows of a table are in any order, and all its windows are open until it ends.
#[test]
fn thousands_of_windows_in_any_order_are_those_in_order() {
    const WINDOWS: i64 = 1_500;
    let block = |windows: &[i64]| {
        let of = |value: fn(i64) -> i64| -> ArrayRef {
            Arc::new(Int64Array::from_iter_values(windows.iter().map(|at| value(*at))))
        };
        RecordBatch::try_from_iter([("k", of(|at| at % 3)), ("t", of(|at| 10 * at + at % 7))]).unwrap()
    };
    let source = SourceSpec {
        name: "input".into(),
        schema: block(&[]).schema(),
        event_time: Some("t".into()),
        lateness_ms: 0,
        order_by: vec![],
        idle_after_ms: None,
    };
    let steps = vec![
        StepSpec::KeyBy { columns: vec!["k".into()], nulls: Nulls::Group },
        StepSpec::Window { kind: WindowKind::Tumbling, size_us: 10_000, every_us: None, offset_us: None, zone: None },
        StepSpec::Agg {
            emit: None,
            aggs: vec![AggSpec { name: "n".into(), function: "count".into(), ..AggSpec::default() }],
            operator: None,
        },
    ];
    let spec = PlanSpec::line(source, steps);
    let orders: [fn(i64) -> i64; 3] = [|at| at, |at| WINDOWS - 1 - at, |at| at * 7_919 % WINDOWS];
    let mut told = Vec::new();
    for order in orders {
        let windows: Vec<i64> = (0..WINDOWS).map(order).collect();
        let (early, late) = windows.split_at(windows.len() / 2);
        let mut cluster = Cluster::new(spec.clone(), 2, 2);
        cluster.feed(0, block(early)).unwrap();
        cluster.mark();
        // Undone: some are new, others have one more.
        cluster.feed(0, block(late)).unwrap();
        cluster.feed(0, block(early)).unwrap();
        cluster.rollback(i64::MIN, true);
        for bin in 0..4 {
            cluster.relocate(&Move { stage: 0, bin, to: bin + 1, through_bytes: bin % 2 == 0 });
        }
        cluster.feed(0, block(late)).unwrap();
        assert_eq!(cluster.keys(), WINDOWS as usize);
        let mut rows = Vec::new();
        for watermark in [3_000_000, 3_000_000 + 1, 9_995_000, i64::MAX] {
            cluster.close(watermark).unwrap();
            rows.push(cluster.take());
        }
        assert_eq!(cluster.keys(), 0);
        told.push(rows);
    }
    let rows: usize = told[0].iter().map(|(rows, late)| rows.len() + 1_000_000 * late.len()).sum();
    assert_eq!((rows, told[0][0].0.len()), (WINDOWS as usize, 300));
    assert_eq!(told[0], told[1]);
    assert_eq!(told[0], told[2]);
}
