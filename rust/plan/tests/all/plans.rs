//! What compilation accepts, what it says of the rest, and user code in plans.

use std::sync::Arc;

use crate::common::{Cell, Cluster, Move};
use arrow_array::{ArrayRef, Int64Array, RecordBatch};
use arrow_schema::{DataType, Field, Schema, SchemaRef, TimeUnit};
use penstock_plan::spec::schema_to_text;
use penstock_plan::{OpError, Plan, PlanError, PlanSpec};

fn schema() -> SchemaRef {
    let dictionary = DataType::Dictionary(Box::new(DataType::Int32), Box::new(DataType::Utf8));
    Arc::new(Schema::new(vec![
        Field::new("k", DataType::Utf8, true),
        Field::new("t", DataType::Timestamp(TimeUnit::Millisecond, Some("UTC".into())), true),
        Field::new("v", DataType::Int64, true),
        Field::new("code", dictionary, true),
        Field::new("list", DataType::List(Arc::new(Field::new_list_field(DataType::Int64, true))), true),
    ]))
}

fn compile(steps: &str) -> Result<Plan, PlanError> {
    compile_with(r#""event_time":"t","lateness_ms":5"#, steps)
}

fn compile_with(source: &str, steps: &str) -> Result<Plan, PlanError> {
    let schema = schema_to_text(&schema());
    Plan::from_json(&format!(r#"{{"version":2,"sources":[{{"schema":"{schema}",{source}}}],"steps":[{steps}]}}"#))
}

const KEY: &str = r#"{"op":"key_by","columns":["k"]}"#;
const WINDOW: &str = r#"{"op":"window","kind":"sliding","size_us":60000000,"every_us":1000000}"#;
const COUNT: &str = r#"{"op":"agg","aggs":[{"name":"n","fn":"count"}]}"#;
const TOP: &str = r#"{"op":"top","n":1,"by":"n","per":"window"}"#;

fn says(error: Result<Plan, PlanError>, words: &str) {
    match error {
        Ok(plan) => panic!("accepted:\n{}", plan.explain()),
        Err(error) => assert!(error.to_string().contains(words), "{error}\ndoes not say: {words}"),
    }
}

#[test]
fn the_example_of_the_front_page_compiles() {
    let plan = compile(&[KEY, WINDOW, COUNT, TOP].join(",")).unwrap();
    assert_eq!(plan.stages().len(), 2);
    assert_eq!(plan.keyed_ops(), 2);
    assert!(!plan.needs_order());
    assert_eq!(plan.sources()[0].lateness_us, 5_000);
    let names: Vec<&str> = plan.output_schema().fields().iter().map(|field| field.name().as_str()).collect();
    assert_eq!(names, ["window_start", "window_end", "k", "n"]);
    let text = plan.explain();
    for words in [
        "event time t, lateness 5 ms",
        "exchange: by hash of k",
        "step 2 (agg): sliding 1 min every 1 s on t: n = count()",
        "exchange: by hash of window_start",
        "step 3 (top): greatest 1 by n per window_start, window_end, with ties",
        "candidate rows",
    ] {
        assert!(text.contains(words), "{text}\ndoes not say: {words}");
    }
}

#[test]
fn a_flow_without_steps_passes_its_input() {
    let plan = compile("").unwrap();
    assert_eq!(plan.stages().len(), 1);
    assert_eq!(plan.output_schema(), &schema());
    assert!(plan.stages()[0].keyed.is_none());
}

#[test]
fn errors_name_the_step_and_the_column() {
    let error = compile(r#"{"op":"key_by","columns":["kk"]}"#).unwrap_err();
    let PlanError::MissingColumn { step, column, available } = &error else { panic!("{error}") };
    assert_eq!((step.to_string().as_str(), column.as_str(), available.len()), ("step 0 (key_by)", "kk", 5));
    let join = |steps: &[&str]| compile(&steps.join(","));
    let agg = |function: &str| format!(r#"{{"op":"agg","aggs":[{{"name":"x",{function}}}]}}"#);
    says(join(&[KEY, &agg(r#""fn":"median","column":"v""#)]), "step 1 (agg): aggregate 'x': unknown function 'median'");
    says(join(&[KEY, &agg(r#""fn":"top","column":"v""#)]), "unknown function 'top'");
    says(join(&[KEY, &agg(r#""fn":"sum""#)]), "aggregate 'x' needs a column");
    says(join(&[KEY, &agg(r#""fn":"sum","column":"k""#)]), "column 'k' has type string, a sum or mean needs");
    says(join(&[KEY, &agg(r#""fn":"sum","column":"t""#)]), "column 't'");
    says(join(&[KEY, &agg(r#""fn":"min","column":"list""#)]), "column 'list'");
    says(join(&[KEY, &agg(r#""fn":"min","column":"code""#)]), "dictionary");
    says(join(&[KEY, &agg(r#""fn":"sum","column":"w""#)]), "column 'w' does not exist; there are: k, t, v");
    says(join(&[KEY, &agg(r#""fn":"min_by","column":"v""#)]), "aggregate 'x': by = none; it names the column");
    says(
        join(&[KEY, &agg(r#""fn":"min_by","column":"v","by":"list""#)]),
        "column 'list' has type array<bigint>, the column by",
    );
    says(join(&[KEY, &agg(r#""fn":"max_by","column":"code","by":"v""#)]), "column 'code'");
    says(join(&[KEY, &agg(r#""fn":"max_by","column":"v","by":"w""#)]), "column 'w' does not exist");
    says(join(&[KEY, COUNT, KEY, &agg(r#""fn":"last","column":"n""#)]), "there is no event-time column here");
    says(join(&[KEY, &agg(r#""fn":"variance","column":"k""#)]), "column 'k' has type string, a variance");
    says(join(&[KEY, &agg(r#""fn":"approx_quantile","column":"v","q":1.5"#)]), "q = 1.5; it is a share from 0 to 1");
    says(join(&[KEY, &agg(r#""fn":"approx_quantile","column":"v""#)]), "q = none; it is a share");
    says(
        join(&[KEY, &agg(r#""fn":"approx_quantile","column":"v","q":1,"error":0"#)]),
        "error = 0; it is at least 0.00001",
    );
    says(join(&[KEY, &agg(r#""fn":"approx_quantile","column":"t","q":1"#)]), "column 't'");
    says(
        join(&[KEY, &agg(r#""fn":"approx_count_distinct","column":"v","error":0.001"#)]),
        "error = 0.001; it is at least 0.0021",
    );
    assert!(join(&[KEY, &agg(r#""fn":"count_distinct","column":"code""#)]).is_ok());
    let distinct = r#"{"op":"distinct","columns":["k","t"]}"#;
    assert!(join(&[distinct, WINDOW, COUNT]).is_ok(), "event time is still there");
    says(join(&[r#"{"op":"distinct","columns":["k"]}"#, WINDOW, COUNT]), "no event-time column");
    says(join(&[KEY, distinct]), "leave key_by out");
    says(join(&[r#"{"op":"distinct","columns":[]}"#]), "distinct needs a column");
    says(join(&[r#"{"op":"distinct","columns":["w"]}"#]), "column 'w' does not exist");
    assert!(
        join(&[
            WINDOW,
            r#"{"op":"distinct","columns":["k"]}"#,
            TOP.replace("\"n\"", "\"k\"").replace("\"k\":1", "\"n\":1").as_str()
        ])
        .is_ok()
    );
    says(join(&[KEY, r#"{"op":"agg","aggs":[{"name":"k","fn":"count"}]}"#]), "two columns named 'k'");
    says(join(&[KEY, r#"{"op":"agg","aggs":[]}"#]), "at least one aggregate");
    says(join(&[KEY, r#"{"op":"agg","emit":"new","aggs":[{"name":"n","fn":"count"}]}"#]), "distinct gives new keys");
    let by_code = r#"{"op":"key_by","columns":["code"]}"#;
    assert_eq!(join(&[by_code, COUNT]).unwrap().output_schema().field(0).data_type(), &DataType::Utf8);
    let stateful = format!(r#"{{"op":"stateful_map","call":0,"schema":"{}"}}"#, schema_to_text(&schema()));
    says(join(&[by_code, &stateful]), "column 'code' has type Dictionary(Int32, Utf8), which does not keep its type");
    says(join(&[r#"{"op":"key_by","columns":["k","k"]}"#]), "two columns named 'k'");
    says(join(&[r#"{"op":"key_by","columns":[]}"#]), "a key needs a column");
    says(join(&[KEY, KEY, COUNT]), "step 1 (key_by): the flow is keyed already");
    says(join(&[KEY]), "step 0 (key_by): nothing follows");
    says(join(&[WINDOW]), "step 0 (window): nothing follows");
    says(join(&[WINDOW, WINDOW]), "windowed already");
    says(join(&[KEY, WINDOW, COUNT, WINDOW]), "step 3 (window): there is no event-time column here");
    says(compile_with(r#""event_time":"k""#, ""), "step 0 (source): column 'k' has type string, event time needs");
    says(compile_with(r#""event_time":"x""#, ""), "column 'x' does not exist");
    says(compile_with(r#""order_by":["x"]"#, ""), "column 'x' does not exist");
    says(compile_with(r#""lateness_ms":-1"#, ""), "lateness_ms = -1");
    says(compile_with(r#""lateness_ms":0"#, &[WINDOW, COUNT].join(",")), "no event-time column");
}

/// Each join of a flow with itself has twice as many columns: a short text would name more than there is memory for.
#[test]
fn a_join_of_too_many_columns_is_refused() {
    let columns = ["k", "v", "w"].map(|name| Field::new(name, DataType::Int64, true));
    let schema = schema_to_text(&Arc::new(Schema::new(columns.to_vec())));
    let joins = (0..40)
        .map(|at| format!(r#"{{"op":"join","left":["k"],"right":["k"],"inputs":[{at},{at}],"suffix":"_{at}"}}"#));
    let steps = joins.collect::<Vec<_>>().join(",");
    let text = format!(r#"{{"version":2,"sources":[{{"schema":"{schema}"}}],"steps":[{steps}]}}"#);
    let error = Plan::from_json(&text).expect_err("it is too wide").to_string();
    assert!(error.contains("the number of columns that come out = "), "{error}");
}

#[test]
fn windows_are_checked() {
    let window = |words: &str| compile(&format!(r#"{{"op":"window",{words}}},{COUNT}"#));
    assert!(window(r#""kind":"tumbling","size_us":1000"#).is_ok());
    assert!(window(r#""kind":"tumbling","size_us":1000,"every_us":1000"#).is_ok());
    says(window(r#""kind":"tumbling","size_us":2000,"every_us":1000"#), "use a sliding window");
    says(window(r#""kind":"sliding","size_us":2000"#), "needs a period");
    assert!(window(r#""kind":"sliding","size_us":1000,"every_us":2000"#).is_ok(), "windows may lie apart");
    says(
        window(r#""kind":"sliding","size_us":1000,"every_us":9000000000000000000"#),
        "longer than the range of event times",
    );
    says(window(r#""kind":"tumbling","size_us":0"#), "size_us = 0 us: must be positive");
    says(window(r#""kind":"sliding","size_us":1000,"every_us":-1000"#), "must be positive");
    says(window(r#""kind":"tumbling","size_us":1500"#), "not a multiple of the event-time column's unit");
    says(window(r#""kind":"tumbling","size_us":9223372036854775000"#), "longer than the range");
    // A period in another unit than the size.
    says(
        window(r#""kind":"sliding","size_us":86400000000,"every_us":1000"#),
        "every_us = 1000 us: makes each row one of more than 1,048,576 windows; is its unit that of the size?",
    );
    says(
        window(r#""kind":"sliding","size_us":3600000000,"every_us":7001000"#),
        "every_us = 7001000 us: cuts a window into more than 1,048,576 parts; choose one that divides the size",
    );
    assert!(window(r#""kind":"sliding","size_us":3600000000,"every_us":7000000"#).is_ok());
    assert!(window(r#""kind":"tumbling","size_us":9000,"offset_us":8000"#).is_ok());
    says(window(r#""kind":"tumbling","size_us":9000,"offset_us":9000"#), "offset_us = 9000 us: is from 0 to less");
    says(window(r#""kind":"tumbling","size_us":9000,"offset_us":-1000"#), "offset_us = -1000 us");
    says(window(r#""kind":"tumbling","size_us":9000,"offset_us":1"#), "offset_us = 1 us: is not a multiple");
    let zone = |words: &str| window(&format!(r#"{words},"zone":"Europe/Berlin""#));
    let day = 86_400_000_000_i64;
    assert!(zone(&format!(r#""kind":"sliding","size_us":{},"every_us":{day},"offset_us":1000"#, 7 * day)).is_ok());
    says(zone(r#""kind":"tumbling","size_us":3600000000"#), "size_us = 3600000000 us: is no number of whole days");
    says(
        zone(&format!(r#""kind":"sliding","size_us":{day},"every_us":1000000"#)),
        "every_us = 1000000 us: is no number",
    );
    says(window(&format!(r#""kind":"tumbling","size_us":{day},"zone":"Mars/Olympus""#)), "no time zone 'Mars/Olympus'");
    assert!(compile(&format!(r#"{KEY},{{"op":"window","kind":"session","size_us":1000}},{COUNT}"#)).is_ok());
    says(window(r#""kind":"session","size_us":0"#), "size_us = 0 us: the gap of sessions must be positive");
    says(
        window(r#""kind":"session","size_us":2592000000000000000"#),
        "size_us = 2592000000000000000 us: is longer than the range of event times",
    );
    says(window(r#""kind":"session","size_us":1500"#), "not a multiple of the event-time column's unit");
    says(window(r#""kind":"session","size_us":1000,"offset_us":1000"#), "no period, offset or zone");
    says(compile(r#"{"op":"window","kind":"session","size_us":1000},{"op":"distinct","columns":["k"]}"#), "only agg");
}

#[test]
fn top_is_checked() {
    let top = |words: &str| format!(r#"{{"op":"top",{words}}}"#);
    let join = |steps: &[&str]| compile(&steps.join(","));
    says(join(&[&top(r#""n":0,"by":"v""#)]), "n = 0 is out of range");
    says(join(&[&top(r#""n":1,"by":"w""#)]), "column 'w' does not exist");
    says(join(&[&top(r#""n":1,"by":"v","per":"window""#)]), "there is no window here");
    let updates = COUNT.replace(r#""op":"agg""#, r#""op":"agg","emit":"update""#);
    says(join(&[KEY, &updates, &top(r#""n":1,"by":"n""#)]), "replaces earlier values");
    says(join(&[KEY, &updates, COUNT]), "replaces earlier values");
    let plan = join(&[KEY, COUNT, &top(r#""n":1,"by":"n""#)]).unwrap();
    assert!(plan.explain().contains("all keys at the end, on a stream changed keys each epoch"));
    // The source has a dictionary column, whose rows would come back with another type.
    says(join(&[WINDOW, &top(r#""n":1,"by":"v","per":"window""#)]), "column 'code'");
    says(join(&[KEY, WINDOW, COUNT, KEY, TOP]), "leave key_by out");
    says(join(&[KEY, WINDOW, r#"{"op":"agg","emit":"update","aggs":[{"name":"n","fn":"count"}]}"#]), "leave emit out");
    let plan = join(&[KEY, WINDOW, COUNT, &top(r#""n":3,"by":"n","per":["k"]"#)]).unwrap();
    assert!(plan.explain().contains("exchange: by hash of k"));
}

#[test]
fn other_versions_are_refused() {
    let mut spec = PlanSpec::from_json(&compile("").unwrap().spec().to_json()).unwrap();
    spec.version = 9;
    assert_eq!(Plan::compile(spec), Err(PlanError::Version { found: 9, supported: 2 }));
}

fn numbers(rows: &[(i64, i64)]) -> RecordBatch {
    let column = |f: fn(&(i64, i64)) -> i64| Arc::new(Int64Array::from_iter_values(rows.iter().map(f))) as ArrayRef;
    RecordBatch::try_from_iter([("k", column(|row| row.0)), ("v", column(|row| row.1))]).unwrap()
}

fn stateful(output: &SchemaRef) -> PlanSpec {
    let (input, output) = (schema_to_text(&numbers(&[]).schema()), schema_to_text(output));
    PlanSpec::from_json(&format!(
        r#"{{"version":2,"sources":[{{"schema":"{input}"}}],"steps":[
            {{"op":"map_batches","call":0,"schema":"{input}"}},
            {{"op":"stateful_map","call":1,"columns":["k"],"schema":"{output}","name":"count"}},
            {{"op":"map_batches","call":0,"schema":"{output}"}}]}}"#
    ))
    .unwrap()
}

fn seen() -> SchemaRef {
    Arc::new(Schema::new(vec![Field::new("k", DataType::Int64, false), Field::new("seen", DataType::Int64, false)]))
}

#[test]
fn user_state_sees_each_key_in_order_wherever_its_bin_is() {
    let mut cluster = Cluster::new(stateful(&seen()), 2, 3);
    assert!(cluster.plan().needs_order());
    assert_eq!(cluster.plan().stages().len(), 2);
    let mut twin = std::collections::BTreeMap::new();
    let mut expected = Vec::new();
    for round in 0..40i64 {
        let rows: Vec<(i64, i64)> = (0..round % 9).map(|at| ((at * at + round) % 5, at + round)).collect();
        cluster.relocate(&Move { stage: 0, bin: round as u32, to: (round / 3) as u32, through_bytes: round % 2 == 0 });
        if round % 4 == 0 {
            cluster.mark();
            cluster.feed(0, numbers(&[(1, 5), (2, 6)])).unwrap();
            cluster.take();
            cluster.rollback(i64::MIN, false);
        }
        for &(key, value) in &rows {
            let state = twin.entry(key).or_insert(1i64);
            *state = state.wrapping_mul(31).wrapping_add(value);
            expected.push(vec![Cell::Int(key.into()), Cell::Int((*state).into())]);
        }
        cluster.feed(0, numbers(&rows)).unwrap();
        let rows = cluster.take().0;
        let mut now = std::mem::take(&mut expected);
        now.sort();
        assert_eq!(rows, now);
    }
}

#[test]
fn user_errors_and_wrong_schemas_are_typed() {
    let mut cluster = Cluster::new(stateful(&seen()), 0, 1);
    match cluster.feed(0, numbers(&[(1, 1), (1, -1)])) {
        Err(OpError::Call(error)) => assert_eq!((error.row, error.message.as_str()), (Some(1), "minus one")),
        other => panic!("{other:?}"),
    }
    let other =
        Arc::new(Schema::new(vec![Field::new("k", DataType::Int64, false), Field::new("seen", DataType::Utf8, false)]));
    let mut cluster = Cluster::new(stateful(&other), 0, 1);
    match cluster.feed(0, numbers(&[(1, 1)])) {
        Err(OpError::Schema { step, expected, found }) => {
            assert_eq!(step.to_string(), "step 1 (stateful_map)");
            assert_eq!((expected.as_str(), found.as_str()), ("(k Int64, seen Utf8)", "(k Int64, seen Int64)"));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn operators_are_called_as_the_user_says() {
    let agg =
        |name: &str| format!(r#"{{"op":"agg","emit":"final","operator":{name},"aggs":[{{"name":"n","fn":"count"}}]}}"#);
    let plain = r#"{"op":"agg","emit":"final","aggs":[{"name":"n","fn":"count"}]}"#.to_owned();
    let names = |aggs: &[String]| {
        compile(&aggs.join(",")).map(|plan| plan.keyed().map(|keyed| keyed.operator.clone()).collect::<Vec<_>>())
    };
    assert_eq!(names(&[plain.clone(), plain.clone()]).unwrap(), ["agg", "agg-2"]);
    // A name is no number less for the others.
    assert_eq!(names(&[agg(r#""rows, all""#), plain.clone(), plain.clone()]).unwrap(), ["rows, all", "agg", "agg-2"]);
    // Words of other steps are names like others.
    assert_eq!(names(&[agg(r#""join""#), agg(r#""top-2""#)]).unwrap(), ["join", "top-2"]);
    // Steps that get names go on from the state that they had without, in other places too.
    assert_eq!(names(&[agg(r#""agg-2""#), agg(r#""agg""#)]).unwrap(), ["agg-2", "agg"]);
    for (aggs, words) in [
        (
            vec![agg(r#""a""#), plain.clone(), agg(r#""a""#)],
            "step 2 (agg): the name 'a' is that of step 0 (agg) already",
        ),
        (
            vec![agg(r#""agg""#), plain.clone()],
            "step 1 (agg): the name 'agg' is that of step 0 (agg) already: give each",
        ),
        (vec![agg(r#""""#)], "the name '' is empty: a name is 1 to 100 printable characters without a slash"),
        (vec![agg(r#""a/b""#)], "has a slash"),
        (vec![agg(r#""a\nb""#)], r"the name 'a\nb' has control characters"),
        (vec![agg(r#"" a""#)], "blanks around it"),
        (vec![agg(&format!("{:?}", "x".repeat(101)))], "is longer than 100 characters"),
    ] {
        says(compile(&aggs.join(",")), words);
    }
    let plan = compile(&agg(r#""orders""#)).unwrap();
    assert!(plan.explain().contains("  state of orders: accumulators per key"), "{}", plan.explain());
    assert_eq!(PlanSpec::from_json(&plan.spec().to_json()).unwrap(), *plan.spec());
    assert!(!compile(&plain).unwrap().spec().to_json().contains("operator"), "as before");
}
