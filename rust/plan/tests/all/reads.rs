//! Which columns plans read, and that they say the same of those alone.

use std::sync::Arc;
use std::time::Duration;

use crate::common::TestCalls;
use arrow_array::cast::AsArray;
use arrow_array::types::Int64Type;
use arrow_array::{ArrayRef, Int64Array, RecordBatch, TimestampMillisecondArray};
use arrow_schema::{DataType, Field, Schema, SchemaRef, TimeUnit};
use penstock_plan::host::{Inline, Pulled};
use penstock_plan::spec::{PlanSpec, schema_to_text};
use penstock_plan::{Plan, StepSpec};

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

/// Columns of all tests: one that nothing names stands first.
const NAMES: [&str; 5] = ["x", "k", "v", "t", "w"];

fn schema() -> SchemaRef {
    let fields = NAMES.map(|name| match name {
        "t" => Field::new(name, DataType::Timestamp(TimeUnit::Millisecond, None), true),
        _ => Field::new(name, DataType::Int64, true),
    });
    Arc::new(Schema::new(fields.to_vec()))
}

/// A plan whose sources have these options.
fn plan(sources: &[&str], steps: &str) -> Plan {
    let schema = schema_to_text(&schema());
    let sources: Vec<String> =
        (0..).zip(sources).map(|(at, more)| format!(r#"{{"name":"s{at}","schema":"{schema}"{more}}}"#)).collect();
    let text = format!(r#"{{"version":2,"sources":[{}],"steps":[{steps}]}}"#, sources.join(","));
    Plan::from_json(&text).unwrap()
}

fn read(plan: &Plan, late: bool) -> Vec<String> {
    let names = |(columns, source): (Vec<usize>, &penstock_plan::Source)| {
        columns.into_iter().map(|at| source.schema.field(at).name().as_str()).collect::<Vec<_>>().join(" ")
    };
    plan.reads(late).into_iter().zip(plan.sources()).map(names).collect()
}

const TIMED: &str = r#","event_time":"t","lateness_ms":5"#;
const SUM: &str = r#"{"op":"agg","aggs":[{"name":"s","fn":"sum","column":"v"}]}"#;
const BY_K: &str = r#"{"op":"key_by","columns":["k"]}"#;
const WINDOW: &str = r#"{"op":"window","kind":"tumbling","size_us":10000}"#;

#[test]
fn what_steps_name_is_read_and_what_they_give_back_whole() {
    let schema = schema_to_text(&schema());
    let map = format!(r#"{{"op":"map_batches","call":0,"schema":"{schema}"}}"#);
    let stateful = format!(r#"{{"op":"stateful_map","call":0,"columns":["k"],"schema":"{schema}"}}"#);
    let all = "x k v t w";
    let semi =
        |inputs: &str, more: &str| format!(r#"{{"op":"join","left":["k"],"right":["w"],"how":"semi"{inputs}{more}}}"#);
    for (sources, steps, alone, late) in [
        (&[""][..], [BY_K, SUM].join(","), &["k v"][..], &["k v"][..]),
        (&[TIMED], [BY_K, SUM].join(","), &["k v t"], &["k v t"]),
        (&[TIMED], [BY_K, WINDOW, SUM].join(","), &["k v t"], &[all]),
        (&[r#","order_by":["w"]"#], [BY_K, SUM].join(","), &["k v w"], &["k v w"]),
        (&[""], r#"{"op":"agg","aggs":[{"name":"n","fn":"count"}]}"#.into(), &["x"], &["x"]),
        (&[""], r#"{"op":"agg","aggs":[{"name":"n","fn":"max_by","column":"w","by":"x"}]}"#.into(), &["x w"], &["x w"]),
        (&[""], r#"{"op":"distinct","columns":["w","k"]}"#.into(), &["k w"], &["k w"]),
        (&[""], r#"{"op":"top","n":2,"by":"v"}"#.into(), &[all], &[all]),
        (&[""], String::new(), &[all], &[all]),
        (&[""], [&map, BY_K, SUM].join(","), &[all], &[all]),
        (&[""], stateful, &[all], &[all]),
        // All of the left rows come out, or what is asked of them later: state is made of them as they were.
        (&["", ""], semi("", r#","inputs":[0,1]"#), &[all, "w"], &[all, "w"]),
        (&[TIMED, TIMED], semi(r#","within":[-5,5]"#, r#","inputs":[0,1]"#), &[all, "t w"], &[all, all]),
    ] {
        let plan = plan(sources, &steps);
        assert_eq!(
            (read(&plan, false), read(&plan, true)),
            (alone.iter().map(|s| s.to_string()).collect(), late.iter().map(|s| s.to_string()).collect()),
            "{steps}"
        );
        let told = plan.explain();
        assert_eq!(told.contains("  read: "), alone.iter().any(|read| *read != all), "{told}");
    }
    let told = plan(&[TIMED], &[BY_K, WINDOW, SUM].join(",")).explain();
    assert!(told.contains("  read: k, v, t; where late rows are taken x, k, v, t, w\n"), "{told}");
}

/// Rows that meet keep the same columns, whatever else reads one of their sources.
#[test]
fn sources_of_a_union_are_read_alike() {
    let total = |inputs: &str, column: &str| {
        format!(
            r#"{{"op":"key_by","columns":["k"]{inputs}}},{{"op":"agg","emit":"final","aggs":[{{"name":"v","fn":"sum","column":"{column}"}}]}}"#
        )
    };
    // 0, 1, 2: sources. 3: both. 4, 5: sums of v of both. 6, 7: sums of w of the first. 8, 9: of x of the third. 10: all.
    let steps = [
        r#"{"op":"union","inputs":[0,1]}"#.into(),
        total("", "v"),
        total(r#","inputs":[0]"#, "w"),
        total(r#","inputs":[2]"#, "x"),
        r#"{"op":"union","inputs":[5,7,9]}"#.into(),
    ];
    let plan = plan(&["", TIMED, ""], &steps.join(","));
    assert_eq!(read(&plan, false), ["k v t w", "k v t w", "x k"]);
    Plan::compile(plan.narrowed(false)).unwrap();
}

#[test]
fn columns_without_nulls_are_read_since_a_null_is_an_error() {
    let mut spec = plan(&[""], &[BY_K, SUM].join(",")).spec().clone();
    let wide = schema();
    let fields = wide.fields().iter().map(|field| field.as_ref().clone().with_nullable(field.name() != "w"));
    spec.sources[0].schema = Arc::new(Schema::new(fields.collect::<Vec<_>>()));
    assert_eq!(read(&Plan::compile(spec).unwrap(), false), ["k v w"]);
}

/// A union that another one takes has what its own sources are read of anyway.
#[test]
fn a_union_of_a_union_is_read_alike() {
    let count = |inputs: &str| {
        format!(
            r#"{{"op":"key_by","columns":["k"]{inputs}}},{{"op":"agg","emit":"final","aggs":[{{"name":"n","fn":"count"}}]}}"#
        )
    };
    // 0, 1, 2: sources, of which the first two have a column without nulls. 3: those two. 4: all. 5, 6 and 7, 8: counts. 9: both.
    let steps = [
        r#"{"op":"union","inputs":[0,1]}"#.into(),
        r#"{"op":"union","inputs":[3,2]}"#.into(),
        count(r#","inputs":[4]"#),
        count(r#","inputs":[3]"#),
        r#"{"op":"union","inputs":[6,8]}"#.into(),
    ];
    let mut spec = plan(&["", "", ""], &steps.join(",")).spec().clone();
    for source in &mut spec.sources[..2] {
        let wide = schema();
        let fields = wide.fields().iter().map(|field| field.as_ref().clone().with_nullable(field.name() != "w"));
        source.schema = Arc::new(Schema::new(fields.collect::<Vec<_>>()));
    }
    let plan = Plan::compile(spec).unwrap();
    assert_eq!(read(&plan, false), ["k w", "k w", "k w"]);
    Plan::compile(plan.narrowed(false)).unwrap();
}

/// State is the same whatever is read: of joins that only ask whether there is a row their right side is less than the whole.
#[test]
fn state_of_filter_joins_is_that_of_the_whole_plan() {
    for how in ["semi", "anti", "inner", "left"] {
        for more in [r#","within":[-5,5]"#, r#","until":"v""#, ""] {
            let join = format!(
                r#"{{"op":"join","left":["k"],"right":["w"],"how":"{how}","inputs":[0,1],"suffix":"_r"{more}}}"#
            );
            let whole = plan(&[TIMED, TIMED], &join);
            let kept = |plan: &Plan| plan.keyed().map(|op| op.kept().types()).collect::<Vec<_>>();
            for late in [false, true] {
                let narrowed = Plan::compile(whole.narrowed(late)).unwrap();
                assert_eq!(kept(&narrowed), kept(&whole), "{how}{more}, late: {late}");
            }
        }
    }
}

/// A graph of wide sources: they meet, are filtered by each other, and summed.
fn random_graph(random: &mut Random) -> Plan {
    let sources = 1 + random.below(3) as usize;
    let (mut nodes, mut wide, mut used) = (sources, (0..sources).collect::<Vec<_>>(), vec![false; sources]);
    let mut steps: Vec<String> = Vec::new();
    for _ in 0..random.below(4) {
        let [one, other] = [0, 1].map(|_| wide[random.below(wide.len() as u64) as usize]);
        steps.push(match random.below(3) {
            0 | 1 => format!(r#"{{"op":"union","inputs":[{one},{other}]}}"#),
            _ => format!(r#"{{"op":"join","left":["k"],"right":["w"],"how":"anti","inputs":[{one},{other}]}}"#),
        });
        (used[one], used[other]) = (true, true);
        wide.push(nodes);
        used.push(false);
        nodes += 1;
    }
    let mut sums = Vec::new();
    for (at, node) in wide.iter().enumerate() {
        if used[at] && random.below(3) > 0 {
            continue;
        }
        let [key, column] = [0, 1].map(|_| ["x", "k", "v", "w"][random.below(4) as usize]);
        let aggs = [
            format!(r#"[{{"name":"a","fn":"sum","column":"{column}"}}]"#),
            format!(r#"[{{"name":"a","fn":"min_by","column":"{column}","by":"{key}"}}]"#),
        ];
        let aggs = &aggs[random.below(2) as usize];
        steps.push(format!(r#"{{"op":"key_by","columns":["{key}"],"inputs":[{node}]}}"#));
        steps.push(format!(r#"{{"op":"agg","emit":"final","aggs":{aggs}}}"#));
        // Sums of different keys have different names.
        steps.push(
            r#"{"op":"agg","emit":"final","aggs":[{"name":"n","fn":"count"},{"name":"a","fn":"sum","column":"a"}]}"#
                .into(),
        );
        nodes += 3;
        sums.push(nodes - 1);
    }
    if sums.len() > 1 {
        let all: Vec<String> = sums.iter().map(ToString::to_string).collect();
        steps.push(format!(r#"{{"op":"union","inputs":[{}]}}"#, all.join(",")));
    }
    plan(&vec![""; sources], &steps.join(","))
}

fn given(plan: Plan, blocks: &[(u8, RecordBatch)]) -> Vec<Vec<i64>> {
    let schemas: Vec<_> = plan.sources().iter().map(|source| source.schema.clone()).collect();
    let mut run = Inline::new(Arc::new(plan), Arc::new(TestCalls), None).unwrap();
    let mut made = Vec::new();
    let mut drain = |run: &mut Inline| loop {
        match run.pull(Duration::from_secs(1)).unwrap() {
            Pulled::Made(batches) => made.extend(batches),
            Pulled::Idle => return,
            Pulled::Working => {}
        }
    };
    for (source, block) in blocks {
        let columns =
            schemas[usize::from(*source)].fields().iter().map(|field| block.schema().index_of(field.name()).unwrap());
        run.push(*source, &block.project(&columns.collect::<Vec<_>>()).unwrap()).unwrap();
        drain(&mut run);
    }
    run.finish().unwrap();
    drain(&mut run);
    let value = |column: &ArrayRef, row: usize| column.as_primitive::<Int64Type>().value(row);
    let rows = made.iter().flat_map(|batch| {
        (0..batch.num_rows()).map(move |row| batch.columns().iter().map(|column| value(column, row)).collect())
    });
    let mut rows: Vec<Vec<i64>> = rows.collect();
    rows.sort();
    rows
}

#[test]
fn narrowed_random_graphs_give_the_same_rows_and_keep_the_same_state() {
    let mut narrower = 0;
    for seed in 0..200 {
        let mut random = Random(seed);
        let whole = random_graph(&mut random);
        let narrow = Plan::compile(whole.narrowed(false)).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        assert_eq!(whole.output_schema(), narrow.output_schema(), "seed {seed}");
        let kept = |plan: &Plan| plan.keyed().map(|keyed| (keyed.operator.clone(), keyed.kept())).collect::<Vec<_>>();
        assert_eq!(kept(&whole), kept(&narrow), "seed {seed}");
        let columns = |plan: &Plan| plan.sources().iter().map(|source| source.schema.fields().len()).sum::<usize>();
        narrower += usize::from(columns(&narrow) < columns(&whole));
        let mut blocks = Vec::new();
        for source in 0..whole.sources().len() as u8 {
            let rows = random.below(60) as usize;
            let columns: Vec<ArrayRef> = NAMES
                .iter()
                .map(|name| -> ArrayRef {
                    let values: Vec<i64> = (0..rows).map(|_| random.below(20) as i64).collect();
                    match *name {
                        "t" => Arc::new(TimestampMillisecondArray::from(values)),
                        _ => Arc::new(Int64Array::from(values)),
                    }
                })
                .collect();
            blocks.push((source, RecordBatch::try_new(schema(), columns).unwrap()));
        }
        let text = whole.explain();
        assert_eq!(given(whole, &blocks), given(narrow, &blocks), "seed {seed}\n{text}");
    }
    assert!(narrower > 100, "{narrower} of 200 read fewer columns");
}

/// What is narrowed reads all that it has.
#[test]
fn a_narrowed_plan_is_not_narrowed_further() {
    for seed in 0..50 {
        let narrow: PlanSpec = random_graph(&mut Random(seed)).narrowed(false);
        assert!(!narrow.steps.iter().any(|node| matches!(node.step, StepSpec::MapBatches { .. })));
        assert_eq!(Plan::compile(narrow.clone()).unwrap().narrowed(false), narrow, "seed {seed}");
    }
}
