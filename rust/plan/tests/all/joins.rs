//! Joins of every kind, with intervals, in windows and without, against the oracle of `property`: what comes out of each epoch, and what is late in it, on
//! some workers whose bins move and whose number changes, while epochs are broken off and undone, or all is lost but files.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::common::cells;
use crate::group::{Cluster, PATIENCE, Random, config, file, fresh, loaded, moves};
use crate::property::{Oracle, expected, told};
use arrow_array::cast::AsArray;
use arrow_array::types::Int64Type;
use arrow_array::{ArrayRef, Int64Array, RecordBatch};
use arrow_schema::{DataType, Field, Schema, SchemaRef};
use penstock_files::Range;
use penstock_plan::host::{Event, Rows};
use penstock_plan::spec::{NodeSpec, PLAN_VERSION, SourceSpec, Validate, WindowKind};
use penstock_plan::{Beside, CallError, Callbacks, ForeignState, JoinHow, Plan, PlanSpec, SideRows, StepSpec};
use proptest::prelude::*;

struct NoCalls;

impl Callbacks for NoCalls {
    fn map(&self, _: usize, _: &RecordBatch, _: &mut SideRows) -> Result<RecordBatch, CallError> {
        unreachable!("no step calls")
    }

    fn new_state(&self, _: usize) -> Box<dyn ForeignState> {
        unreachable!("no step has state of its own")
    }
}

const HOWS: [JoinHow; 6] = [JoinHow::Inner, JoinHow::Left, JoinHow::Right, JoinHow::Full, JoinHow::Semi, JoinHow::Anti];
/// Columns of the sides; times are in milliseconds. Some joins have the same ones on both sides.
fn columns(how: JoinHow, side: usize) -> [&'static str; 3] {
    match (how, side) {
        (JoinHow::Inner | JoinHow::Full | JoinHow::Anti, _) | (_, 0) => ["k", "t", "v"],
        _ => ["k", "u", "w"],
    }
}

/// What bounds the times of rows that meet, in milliseconds.
#[derive(Clone, Copy, Debug)]
enum Near {
    Whenever,
    Within(i64, i64),
    /// Left rows until a time so much behind their number.
    Until,
    Windows(i64, i64),
}

/// Key, time and number of a row.
type Row = [Option<i64>; 3];

#[derive(Clone, Debug)]
struct Epoch {
    rows: [Vec<Row>; 2],
    /// In milliseconds.
    watermark: Option<i64>,
    /// Whether it is begun once more, and whether it was done then.
    undone: Option<bool>,
    workers: usize,
}

fn schema(how: JoinHow, side: usize) -> SchemaRef {
    Arc::new(Schema::new(columns(how, side).map(|name| Field::new(name, DataType::Int64, true)).to_vec()))
}

fn block(how: JoinHow, side: usize, rows: &[Row]) -> RecordBatch {
    let columns = (0..3).map(|at| -> ArrayRef { Arc::new(rows.iter().map(|row| row[at]).collect::<Int64Array>()) });
    RecordBatch::try_new(schema(how, side), columns.collect()).unwrap()
}

fn plan(how: JoinHow, near: Near, once: bool) -> Plan {
    let sources = [0, 1].map(|side| SourceSpec {
        name: format!("s{side}"),
        schema: schema(how, side),
        event_time: Some(columns(how, side)[1].into()),
        lateness_ms: 0,
        order_by: Vec::new(),
        idle_after_ms: None,
    });
    let on = || vec!["k".to_owned()];
    let (within, windowed) = match near {
        Near::Within(lower, upper) => (Some((lower * 1_000, upper * 1_000)), false),
        Near::Windows(..) => (None, true),
        Near::Whenever | Near::Until => (None, false),
    };
    let until = matches!(near, Near::Until).then(|| "v".to_owned());
    let join = StepSpec::Join {
        left: on(),
        right: on(),
        how,
        within,
        until,
        validate: once.then_some(Validate::OneToMany),
        windowed,
        suffix: Some("_right".into()),
        operator: None,
    };
    let mut steps = Vec::new();
    if let Near::Windows(size, every) = near {
        steps.extend([0, 1].map(|input| {
            let (size_us, every_us) = (size * 1_000, Some(every * 1_000));
            NodeSpec {
                inputs: vec![input],
                step: StepSpec::Window { kind: WindowKind::Sliding, size_us, every_us, offset_us: None, zone: None },
            }
        }));
    }
    let first = steps.len();
    steps.push(NodeSpec { inputs: vec![first, first + 1], step: join });
    let spec = PlanSpec { version: PLAN_VERSION, sources: sources.into(), steps };
    assert_eq!(PlanSpec::from_json(&spec.to_json()).unwrap(), spec);
    Plan::compile(spec).unwrap()
}

/// Without a journal bins lend their rows to the worker.
fn run(how: JoinHow, (near, once): (Near, bool), epochs: &[Epoch], seed: u64, journal: bool) {
    let plan = Arc::new(plan(how, near, once));
    let calls: Arc<dyn Callbacks> = Arc::new(NoCalls);
    let mut random = Random(seed);
    let (mut oracle, mut reached) = (Oracle::new(plan.spec(), &[]), i64::MIN);
    let start = |epoch: u64, workers: usize, watermark: i64, residents| {
        let mut config = config(&plan, &calls, workers);
        (config.journal, config.record, config.epoch) = (journal, journal, epoch);
        config.watermark = (watermark > i64::MIN).then_some(watermark.saturating_mul(1_000));
        Cluster::start(&config, 1, workers, 1 + epoch, residents)
    };
    let (mut workers, mut files) = (epochs[0].workers, Vec::new());
    let mut cluster = start(0, workers, i64::MIN, fresh(1));
    for (number, epoch) in (0..).zip(epochs) {
        let blocks: Vec<_> = (0..2)
            .flat_map(|side| {
                let (one, other) = epoch.rows[side].split_at(epoch.rows[side].len() / 2);
                [one, other].map(|rows| (side as u8, block(how, side, rows)))
            })
            .collect();
        let watermark = epoch.watermark.map(|watermark| watermark.saturating_mul(1_000));
        if let Some(done) = epoch.undone {
            cluster.release_of(number, &blocks, watermark);
            cluster.groups[0].0.migrate(number, moves(&mut random, workers, number % 3), None);
            if done {
                cluster.done(number, &mut 0).unwrap();
            }
            let (mut residents, errors) = cluster.stop();
            assert!(errors.is_empty(), "{errors:?}");
            if random.below(2) == 0 {
                residents = vec![loaded(&plan, &calls, &files, (0..16).map(|bin| Range::new(bin, 4).unwrap()))];
            }
            workers = epoch.workers;
            cluster = start(number, workers, reached, residents);
        }
        cluster.release_of(number, &blocks, watermark);
        cluster.groups[0].0.migrate(100 + number, moves(&mut random, workers, number % 3), None);
        let done = cluster.done(number, &mut 0).unwrap();
        let sources = [0, 1].map(|side| cells(&block(how, side, &epoch.rows[side])));
        let expected = expected(&plan, &oracle.epoch(&sources, epoch.watermark));
        assert_eq!(told(&plan, &done), expected, "epoch {number} on {workers} workers");
        files.push(file(&plan, number, done.records));
        reached = epoch.watermark.unwrap_or(reached);
        if journal {
            cluster.groups[0].0.settle(number);
        }
    }
    let rest: u64 = cluster.groups[0].0.stats().workers.iter().map(|worker| worker.keys).sum();
    // With an end to all times nothing is left.
    assert!(matches!(near, Near::Whenever) || rest == 0, "{rest} keys");
    assert!(cluster.stop().1.is_empty());
}

fn rows() -> impl Strategy<Value = Vec<Row>> {
    let some = |of: std::ops::Range<i64>, none: u32| prop_oneof![none => Just(None), 15 => of.prop_map(Some)];
    let row = (some(0..5, 1), some(-10..60, 1), some(0..100, 1));
    prop::collection::vec(row.prop_map(|(key, time, number)| [key, time, number]), 0..14)
}

fn epochs() -> impl Strategy<Value = Vec<Epoch>> {
    let watermark = prop_oneof![1 => Just(None), 4 => (-10i64..60).prop_map(Some)];
    let undone = prop_oneof![3 => Just(None), 1 => any::<bool>().prop_map(Some)];
    let workers = prop_oneof![Just(1usize), Just(2), Just(4)];
    let epoch = (rows(), rows(), watermark, undone, workers).prop_map(|(left, right, watermark, undone, workers)| {
        Epoch { rows: [left, right], watermark, undone, workers }
    });
    prop::collection::vec(epoch, 1..6).prop_map(|mut epochs| {
        let mut last = i64::MIN;
        for epoch in &mut epochs {
            // It never goes back.
            epoch.watermark = epoch.watermark.map(|watermark| watermark.max(last));
            last = epoch.watermark.unwrap_or(last);
        }
        // The end, and an epoch at whose mark nothing is left to undo.
        for watermark in [Some(i64::MAX), None] {
            epochs.push(Epoch { rows: [Vec::new(), Vec::new()], watermark, undone: None, workers: 1 });
        }
        epochs
    })
}

fn near() -> impl Strategy<Value = Near> {
    let within = (-15i64..15, 0i64..20).prop_map(|(lower, length)| Near::Within(lower, lower + length));
    let windows =
        prop_oneof![Just((10, 10)), Just((20, 5)), Just((5, 15))].prop_map(|(size, every)| Near::Windows(size, every));
    prop_oneof![1 => Just(Near::Whenever), 2 => within, 1 => Just(Near::Until), 1 => windows]
}

proptest! {
    #![proptest_config(penstock_cases::cases(120))]
    #[test]
    fn joins_equal_the_oracle_at_every_epoch(
        how in 0..HOWS.len(),
        near in near(),
        once: bool,
        epochs in epochs(),
        seed in any::<u64>(),
        journal: bool,
    ) {
        let (how, mut epochs) = (HOWS[how], epochs);
        let once = once && !matches!(how, JoinHow::Semi | JoinHow::Anti) && !matches!(near, Near::Within(..));
        if once {
            // Of left rows of a key at most one: what meets, then, is all that differs.
            for (number, epoch) in (0..).zip(&mut epochs) {
                let mut keys = BTreeSet::new();
                epoch.rows[0].retain_mut(|row| {
                    row[0] = row[0].map(|key| key + 5 * number);
                    row[0].is_none_or(|key| keys.insert(key))
                });
                epoch.rows[1].iter_mut().for_each(|row| row[0] = row[0].map(|key| key + 5 * (number - key % 2)));
            }
        }
        if !journal {
            epochs.iter_mut().for_each(|epoch| epoch.undone = None);
        }
        run(how, (near, once), &epochs, seed, journal);
    }
}

/// Left rows of a key may follow one another, but not be there at one time.
#[test]
fn two_left_rows_for_one_right_row_are_refused_where_there_is_one() {
    let says = |near: Near, left: &[Row]| -> Option<String> {
        let plan = Arc::new(plan(JoinHow::Left, near, true));
        let calls: Arc<dyn Callbacks> = Arc::new(NoCalls);
        let cluster = Cluster::start(&config(&plan, &calls, 1), 1, 1, 1, fresh(1));
        cluster.release_of(0, &[(0, block(JoinHow::Left, 0, left))], Some(i64::MAX));
        let said = match cluster.groups[0].1.recv_timeout(PATIENCE).unwrap() {
            Event::EpochDone { .. } => None,
            Event::Failed { error } => Some(error.to_string()),
            other => panic!("{other:?}"),
        };
        cluster.stop();
        said
    };
    let row = |key: i64, time: i64, until: i64| [Some(key), Some(time), Some(until)];
    assert_eq!(says(Near::Until, &[row(1, 0, 5), row(2, 0, 9), row(1, 5, 9), row(1, 7, 7)]), None);
    assert_eq!(says(Near::Windows(5, 5), &[row(1, 0, 0), row(1, 5, 0)]), None);
    for (near, second) in [(Near::Until, 4), (Near::Whenever, 99), (Near::Windows(5, 5), 4)] {
        let said = says(near, &[row(1, 0, 5), row(1, second, 9)]).unwrap();
        assert!(said.contains("k = 1") && said.contains("row 1"), "{near:?}: {said}");
    }
}

/// Feeds all at once to a group that tells what it makes, and returns how many rows came out, the most at once, and the sums of the columns.
fn tell(how: JoinHow, near: Near, workers: usize, sides: [Vec<Row>; 2]) -> (usize, usize, Vec<i64>) {
    let plan = Arc::new(plan(how, near, false));
    let calls: Arc<dyn Callbacks> = Arc::new(NoCalls);
    let mut config = config(&plan, &calls, workers);
    (config.eager, config.slice_rows) = (true, 1 << 14);
    assert!(plan.is_metered(), "what comes out is told as it comes");
    let cluster = Cluster::start(&config, 1, workers, 1, fresh(1));
    let blocks: Vec<_> = (0..2).map(|side| (side as u8, block(how, side, &sides[side]))).collect();
    cluster.release_of(0, &blocks, Some(i64::MAX));
    let (group, events) = &cluster.groups[0];
    let (mut told, mut most, mut left) = (0, 0, workers);
    let mut sums = vec![0; plan.output_schema().fields().len()];
    while left > 0 {
        let batches = match events.recv_timeout(PATIENCE).unwrap() {
            Event::Rows { worker, rows, bytes, .. } => {
                group.taken(worker, bytes);
                vec![rows]
            }
            Event::EpochDone { outputs, .. } => {
                left -= 1;
                outputs.into_iter().map(Rows::into_here).collect()
            }
            other => panic!("{other:?}"),
        };
        for batch in batches {
            (told, most) = (told + batch.num_rows(), most.max(batch.num_rows()));
            for (sum, column) in sums.iter_mut().zip(batch.columns()) {
                *sum += column.as_primitive::<Int64Type>().iter().flatten().sum::<i64>();
            }
        }
    }
    assert!(cluster.stop().1.is_empty());
    (told, most, sums)
}

/// Rows that meet as many as would not fit into one round: nothing is lost between rounds, and they are rounds.
#[test]
fn a_frequent_key_comes_out_in_rounds() {
    let rows = |count: i64| -> Vec<Row> { (0..count).map(|at| [Some(7), Some(0), Some(at)]).collect() };
    let (told, most, sums) = tell(JoinHow::Full, Near::Within(-1, 1), 2, [rows(1_500), rows(1_000)]);
    assert_eq!(told, 1_500_000);
    let sum = |count: i64| (0..count).sum::<i64>();
    assert_eq!(sums, [7 * 1_500_000, 0, sum(1_500) * 1_000, 0, sum(1_000) * 1_500]);
    assert!(most < 500_000, "{most} rows at once");
}

/// So do rows that have met none, at the end of input and when they are over.
#[test]
fn what_has_met_none_comes_out_in_rounds() {
    for (how, near) in [(JoinHow::Anti, Near::Whenever), (JoinHow::Left, Near::Within(0, 5))] {
        let rows = (0..150_000).map(|at| [Some(at), Some(0), Some(1)]).collect();
        let (told, most, sums) = tell(how, near, 1, [rows, Vec::new()]);
        assert_eq!((told, sums[0], sums[2]), (150_000, (0..150_000).sum(), 150_000));
        assert!(most < 140_000, "{most} rows at once");
    }
}

/// Hosts that declare the columns of late rows know them: those of both sides, in windows behind their bounds.
#[test]
fn late_rows_are_declared() {
    let names = |how, near| -> Vec<Vec<String>> {
        let plan = plan(how, near, false);
        let names = |schema: &SchemaRef| schema.fields().iter().map(|field| field.name().clone()).collect();
        plan.late_outputs().iter().map(|output| names(&output.schema)).collect()
    };
    assert!(names(JoinHow::Left, Near::Whenever).is_empty());
    // By source, as structs where there are several.
    let plan = plan(JoinHow::Left, Near::Within(0, 1), false);
    let outputs = plan.late_outputs();
    assert_eq!(outputs.iter().map(|output| &*output.name).collect::<Vec<_>>(), ["s0", "s1"]);
    assert_eq!(outputs[1].of, [(0, 1)]);
    let beside = Beside::of(&plan);
    let rows = block(JoinHow::Left, 1, &[[Some(1), None, Some(2)]]);
    let packed = beside.pack(beside.late(0, 1), rows.clone()).unwrap();
    assert_eq!((packed.schema(), packed.column(0).null_count()), (beside.schema().clone(), 1));
    let (kind, unpacked) = beside.unpack(&packed);
    assert_eq!((kind, unpacked.columns()), (1, rows.columns()));
    assert_eq!(names(JoinHow::Semi, Near::Within(0, 1)), [0, 1].map(|side| columns(JoinHow::Semi, side).to_vec()));
    let windowed = |side: [&'static str; 3]| [&["window_start", "window_end"][..], &side[..]].concat();
    assert_eq!(names(JoinHow::Left, Near::Windows(5, 5)), [0, 1].map(|side| windowed(columns(JoinHow::Left, side))));
    // Those of a top over raw rows are behind the bounds, too.
    let schema = penstock_plan::spec::schema_to_text(&schema(JoinHow::Left, 0));
    let top = Plan::from_json(&format!(
        r#"{{"version":2,"sources":[{{"schema":"{schema}","event_time":"t"}}],"steps":[
        {{"op":"window","kind":"tumbling","size_us":5000}},{{"op":"top","n":1,"by":"v","per":"window"}}]}}"#
    ));
    let top = top.unwrap();
    let late: Vec<_> = top.late_outputs()[0].schema.fields().iter().map(|field| field.name().clone()).collect();
    assert_eq!(late, windowed(columns(JoinHow::Left, 0)));
}
