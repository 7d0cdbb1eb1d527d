//! What a manifest says of an operator is enough to read its state: the rows are those that the operator itself gives at its end.

use std::sync::Arc;

use crate::common;
use crate::common::bag;
use arrow_array::cast::AsArray;
use arrow_array::{ArrayRef, Int64Array, RecordBatch, StringArray};
use arrow_schema::{DataType, Field, Schema, TimeUnit};
use penstock_bins::{BinState, BinTable, Encoding, Extent, Routing};
use penstock_files::{ChunkWriter, Entry, FileError};
use penstock_plan::spec::schema_to_text;
use penstock_plan::{Callbacks, Kept, KeptError, KeyedSpec, Output, Plan};

/// Steps, whether they speak at the end of an epoch, and what is said of their types.
const PLANS: [(&str, bool, &str); 15] = [
    (
        r#"{"op":"key_by","columns":["k"]},{"op":"window","kind":"tumbling","size_us":10000},{"op":"agg","aggs":[{"name":"m","fn":"max","column":"k"},{"name":"n","fn":"count"}]}"#,
        false,
        "Utf8 -> max(Utf8), count in windows of 10 ms every 10 ms",
    ),
    (
        r#"{"op":"key_by","columns":["i"]},{"op":"window","kind":"sliding","size_us":20000,"every_us":5000},{"op":"agg","aggs":[{"name":"s","fn":"sum","column":"t"}]}"#,
        false,
        "Int64 -> sum(Int64) in windows of 20 ms every 5 ms",
    ),
    (
        r#"{"op":"key_by","columns":["i"]},{"op":"agg","emit":"update","aggs":[{"name":"s","fn":"sum","column":"t"},{"name":"m","fn":"min","column":"k"},{"name":"a","fn":"mean","column":"i"}]}"#,
        true,
        "Int64 -> sum(Int64), min(Utf8), mean(Int64) with updates",
    ),
    (
        r#"{"op":"key_by","columns":["k","i"]},{"op":"agg","emit":"final","aggs":[{"name":"n","fn":"count","column":"k"}]}"#,
        false,
        "Utf8, Int64 -> count(Utf8)",
    ),
    (r#"{"op":"agg","emit":"update","aggs":[{"name":"n","fn":"count"}]}"#, true, "count with updates"),
    (r#"{"op":"agg","emit":"final","aggs":[{"name":"n","fn":"count"}]}"#, false, "count"),
    (
        r#"{"op":"window","kind":"sliding","size_us":20000,"every_us":10000},{"op":"top","n":2,"by":"i","per":"window"}"#,
        false,
        "Int64 -> the 2 greatest by column 3 of groups [0, 1] of (Int64, Int64, Utf8, Int64, Int64); windows of 20 ms every 10 ms \
         by column 4",
    ),
    (
        r#"{"op":"top","n":2,"by":"i","per":["k"]}"#,
        false,
        "Utf8 -> the 2 greatest by column 1 of groups [0] of (Utf8, Int64, Int64)",
    ),
    (
        r#"{"op":"key_by","columns":["i"]},{"op":"window","kind":"sliding","size_us":5000,"every_us":20000},{"op":"agg","aggs":[{"name":"a","fn":"min","column":"t"}]}"#,
        false,
        "Int64 -> min(Int64) in windows of 5 ms every 20 ms",
    ),
    (
        r#"{"op":"key_by","columns":["i"]},{"op":"agg","emit":"update","aggs":[{"name":"b","fn":"min_by","column":"k","by":"t"},{"name":"l","fn":"last","column":"i"},{"name":"d","fn":"count_distinct","column":"k"},{"name":"a","fn":"approx_count_distinct","column":"t"},{"name":"q","fn":"approx_quantile","column":"t","q":0.9},{"name":"s","fn":"stddev","column":"t"}]}"#,
        true,
        "Int64 -> min_by(Utf8 by Int64), last(Int64 by Int64), count_distinct(Utf8), approx_count_distinct 12(Int64), \
         approx_quantile 0.9 6(Int64), stddev(Int64) with updates",
    ),
    (
        r#"{"op":"window","kind":"tumbling","size_us":10000},{"op":"distinct","columns":["k"]}"#,
        false,
        "Utf8 -> nothing in windows of 10 ms every 10 ms",
    ),
    (
        r#"{"op":"key_by","columns":["k"]},{"op":"agg","emit":"final","aggs":[{"name":"n","fn":"count_distinct","column":"t"}]}"#,
        false,
        "Utf8 -> count_distinct(Int64)",
    ),
    (
        r#"{"op":"key_by","columns":["k"]},{"op":"window","kind":"session","size_us":3000},{"op":"agg","aggs":[{"name":"n","fn":"count_distinct","column":"t"},{"name":"b","fn":"max_by","column":"i","by":"t"},{"name":"c","fn":"count"}]}"#,
        false,
        "Utf8 -> count_distinct(Int64), max_by(Int64 by Int64), count in sessions with gaps of 3 ms",
    ),
    (
        r#"{"op":"key_by","columns":["i"]},{"op":"window","kind":"sliding","size_us":20000,"every_us":5000,"offset_us":2000},{"op":"agg","aggs":[{"name":"s","fn":"sum","column":"t"}]}"#,
        false,
        "Int64 -> sum(Int64) in windows of 20 ms every 5 ms from 2 ms",
    ),
    (
        r#"{"op":"key_by","columns":["i"]},{"op":"window","kind":"tumbling","size_us":172800000000,"zone":"america/new_york"},{"op":"agg","aggs":[{"name":"s","fn":"sum","column":"t"}]}"#,
        false,
        "Int64 -> sum(Int64) in windows of 48 h every 48 h in America/New_York",
    ),
];

fn block() -> RecordBatch {
    let numbers = 0..60_i64;
    RecordBatch::try_from_iter_with_nullable([
        (
            "k",
            Arc::new(numbers.clone().map(|n| (n % 4 > 0).then(|| format!("k{}", n % 4))).collect::<StringArray>())
                as ArrayRef,
            true,
        ),
        ("i", Arc::new(numbers.clone().map(|n| (n % 5 > 0).then_some(n % 5)).collect::<Int64Array>()) as _, true),
        ("t", Arc::new(numbers.collect::<Int64Array>()) as _, false),
    ])
    .unwrap()
}

fn keyed(steps: &str) -> KeyedSpec {
    let schema = schema_to_text(&block().schema());
    let text = format!(r#"{{"version":2,"sources":[{{"schema":"{schema}","event_time":"t"}}],"steps":[{steps}]}}"#);
    Plan::from_json(&text).unwrap().keyed().next().unwrap().clone()
}

/// Copies of long texts for many windows would not fit into one column.
#[test]
fn blocks_are_assigned_to_many_windows_in_parts() {
    let texts = (0..16).map(|row| "x".repeat(if row < 8 { 1 << 20 } else { row }));
    let block = RecordBatch::try_from_iter([
        ("t", Arc::new(Int64Array::from_iter_values(0..16)) as ArrayRef),
        ("s", Arc::new(StringArray::from_iter_values(texts)) as _),
    ])
    .unwrap();
    let schema = schema_to_text(&block.schema());
    for (every, parts) in [(1_000_000, vec![4, 4, 8]), (20_000_000, vec![16]), (60_000_000, vec![16])] {
        let steps = format!(
            r#"{{"op":"window","kind":"sliding","size_us":60000000,"every_us":{every}}},
               {{"op":"top","n":100,"by":"t","descending":true,"per":"window"}}"#
        );
        let text = format!(r#"{{"version":2,"sources":[{{"schema":"{schema}","event_time":"t"}}],"steps":[{steps}]}}"#);
        let keyed = Plan::from_json(&text).unwrap().keyed().next().unwrap().clone();
        let cut = keyed.parts(block.clone());
        assert_eq!(cut.iter().map(RecordBatch::num_rows).collect::<Vec<_>>(), parts);
        assert_eq!(arrow_select::concat::concat_batches(&block.schema(), &cut).unwrap(), block);
    }
}

#[test]
fn rows_are_those_of_the_operator_at_its_end() {
    for (steps, updates, types) in PLANS {
        let keyed = keyed(steps);
        let calls: Arc<dyn Callbacks> = Arc::new(common::TestCalls);
        let routing = Routing::from_owners(vec![0; 4]).unwrap();
        let mut table = BinTable::fresh(&routing, 0, &|| keyed.new_state(&calls));
        let mut op = keyed.operator(&calls).unwrap();
        let routed = keyed.assign(&block()).unwrap();
        let hashes = keyed.hashes(&routed).unwrap();
        op.apply(&mut table, 0, &keyed.carry(routed).unwrap(), &hashes, &mut |_| {}).unwrap();
        op.watermark(&mut table, 25_000, &mut |_| {}).unwrap();

        let kept = Kept::from_json(&keyed.kept().to_json()).unwrap();
        assert_eq!((&kept, &*kept.types()), (&keyed.kept(), types), "{steps}");
        let mut chunks: Vec<Result<Vec<u8>, FileError>> = Vec::new();
        for (_, state) in table.owned() {
            let mut encoding = Encoding::of(Extent::Changed);
            chunks.extend(std::iter::from_fn(|| state.encode(&mut encoding).unwrap()).map(Ok));
        }
        assert!(!chunks.is_empty(), "{steps}");
        let told = kept.rows(chunks.into_iter()).unwrap();

        let mut expected = Vec::new();
        let mut take = |output| match output {
            Output::Rows(rows) => expected.push(rows),
            Output::Late(_) | Output::Side(..) => {}
        };
        match updates {
            true => op.end_epoch(&mut table, &mut take).unwrap(),
            false => op.watermark(&mut table, i64::MAX, &mut take).unwrap(),
        }
        assert!(!expected.is_empty() && bag(&told) == bag(&expected), "{steps}: {told:?} {expected:?}");
        let names = |schema: &Schema| schema.fields().iter().map(|field| field.name().clone()).collect::<Vec<_>>();
        let schema = kept.schema().unwrap();
        assert_eq!((names(&schema), &schema), (names(&keyed.output), &told[0].schema()), "{steps}");
    }
}

/// A value of a column is of its type, also where that is one of those that only metadata tell.
#[test]
fn values_of_an_extension_type_are_of_that_type() {
    let uuid = [("ARROW:extension:name", "arrow.uuid"), ("ARROW:extension:metadata", "")];
    let column = Field::new("k", DataType::FixedSizeBinary(16), true).with_metadata(uuid);
    let mut more = column.metadata().clone();
    more.insert("PARQUET:field_id", "3");
    let schema = Schema::new(vec![column.clone().with_metadata(more), Field::new("t", DataType::Int64, true)]);
    let flow = |steps: &str| {
        let source = format!(r#"{{"schema":"{}","event_time":"t"}}"#, schema_to_text(&Arc::new(schema.clone())));
        Plan::from_json(&format!(r#"{{"version":2,"sources":[{source}],"steps":[{steps}]}}"#)).unwrap()
    };
    let values = r#"{"name":"a","fn":"min","column":"k"},{"name":"b","fn":"max","column":"k"},{"name":"c","fn":"first","column":"k"},{"name":"d","fn":"last","column":"k"},{"name":"e","fn":"min_by","column":"k","by":"t"},{"name":"f","fn":"max_by","column":"k","by":"t"}"#;
    let others = r#"{"name":"n","fn":"count","column":"k"},{"name":"u","fn":"count_distinct","column":"k"}"#;
    for window in [
        "",
        r#"{"op":"window","kind":"tumbling","size_us":10000},"#,
        r#"{"op":"window","kind":"session","size_us":10000},"#,
    ] {
        let plan = flow(&format!(r#"{window}{{"op":"agg","aggs":[{values},{others}]}}"#));
        let keyed = plan.keyed().next().unwrap();
        let kept = Kept::from_json(&keyed.kept().to_json()).unwrap();
        assert_eq!(kept, keyed.kept());
        for schema in [keyed.output.clone(), kept.schema().unwrap()] {
            for name in ["a", "b", "c", "d", "e", "f"] {
                let field = schema.field_with_name(name).unwrap();
                assert_eq!((field.data_type(), field.metadata()), (column.data_type(), column.metadata()), "{name}");
            }
            assert!(["n", "u"].iter().all(|name| schema.field_with_name(name).unwrap().metadata().is_empty()));
        }
    }
}

/// Found by fuzzing: rows in the format of `arrow-row` panicked when they were read, long after they had been taken. Checksums are right
/// here, as in a file that somebody has made.
#[test]
fn state_with_any_byte_wrong_is_an_error_or_other_state() {
    for (steps, ..) in PLANS {
        let keyed = keyed(steps);
        let calls: Arc<dyn Callbacks> = Arc::new(common::TestCalls);
        let routing = Routing::from_owners(vec![0]).unwrap();
        let mut table = BinTable::fresh(&routing, 0, &|| keyed.new_state(&calls));
        let mut op = keyed.operator(&calls).unwrap();
        let routed = keyed.assign(&block().slice(0, 6)).unwrap();
        let hashes = keyed.hashes(&routed).unwrap();
        op.apply(&mut table, 0, &keyed.carry(routed).unwrap(), &hashes, &mut |_| {}).unwrap();
        let mut encoding = Encoding::of(Extent::Changed);
        let state = table.get_mut(0).unwrap();
        let chunks: Vec<Vec<u8>> = std::iter::from_fn(|| state.encode(&mut encoding).unwrap()).collect();
        let (kept, mut refused) = (keyed.kept(), 0);
        for chunk in &chunks {
            for at in 0..chunk.len() {
                for mask in [0x01, 0x80, 0xff] {
                    let mut chunk = chunk.clone();
                    chunk[at] ^= mask;
                    refused += usize::from(kept.rows([Ok(chunk)].into_iter()).is_err());
                }
            }
        }
        assert!(refused > 0, "{steps}");
    }
}

#[test]
fn state_of_another_operator_is_refused() {
    let writer = |shape: &[u8]| {
        let mut writer = ChunkWriter::new(shape);
        writer.push(Entry::Put { hash: 1, key: b"\0\0", value: b"12345678" });
        writer.finish()
    };
    let kept = keyed(PLANS[5].0).kept();
    for chunk in [writer(b"F\x01"), writer(b"P\x01\x02\x00"), b"torn".to_vec()] {
        assert!(matches!(kept.rows([Ok(chunk)].into_iter()), Err(KeptError::State(_))));
    }
    for (bad, good) in [("\"count\"", "\"median\""), ("\"holds\":\"aggregates\"", "\"holds\":\"sketch\"")] {
        let json = kept.to_json().replace(bad, good);
        assert_ne!(json, kept.to_json());
        let read = Kept::from_json(&json).and_then(|kept| kept.schema());
        assert!(matches!(read, Err(KeptError::Unknown(_))), "{json}");
    }
}

/// Words of types stand in manifests and are compared: a release of Arrow that writes them otherwise must not refuse old state.
#[test]
fn words_of_types_stay() {
    let item = Arc::new(Field::new("item", DataType::Int32, true));
    for (data_type, word) in [
        (DataType::Int8, "Int8"),
        (DataType::UInt64, "UInt64"),
        (DataType::Float32, "Float32"),
        (DataType::Boolean, "Boolean"),
        (DataType::LargeUtf8, "LargeUtf8"),
        (DataType::Binary, "Binary"),
        (DataType::FixedSizeBinary(3), "FixedSizeBinary(3)"),
        (DataType::Decimal128(38, 2), "Decimal128(38, 2)"),
        (DataType::Date32, "Date32"),
        (DataType::Timestamp(TimeUnit::Microsecond, None), "Timestamp(µs)"),
        (DataType::Timestamp(TimeUnit::Millisecond, Some("UTC".into())), "Timestamp(ms, \"UTC\")"),
        (DataType::Duration(TimeUnit::Nanosecond), "Duration(ns)"),
        (DataType::List(item), "List(Int32)"),
    ] {
        let schema = Arc::new(Schema::new(vec![Field::new("k", data_type, true)]));
        let schema = schema_to_text(&schema);
        let flow = format!(
            r#"{{"version":2,"sources":[{{"schema":"{schema}"}}],"steps":[{{"op":"key_by","columns":["k"]}},{{"op":"agg","emit":"final","aggs":[{{"name":"n","fn":"count"}}]}}]}}"#
        );
        let types = Plan::from_json(&flow).unwrap().keyed().next().unwrap().kept().types();
        assert_eq!(types, format!("{word} -> count"));
    }
}

/// With windows groups go when these are over; behind a function of a user their bounds are columns like others.
#[test]
fn a_top_of_windows_does_not_go_on_from_one_of_their_bounds() {
    let schema = schema_to_text(&block().schema());
    let routed = |steps: &str| {
        let flow = format!(
            r#"{{"version":2,"sources":[{{"schema":"{schema}","event_time":"t"}}],"steps":[
            {{"op":"key_by","columns":["k"]}},{{"op":"window","kind":"tumbling","size_us":1000}},
            {{"op":"agg","aggs":[{{"name":"n","fn":"count"}}]}},{steps}{{"op":"top","n":2,"by":"n","per":["window_start","window_end"]}}]}}"#
        );
        let plan = Plan::from_json(&flow).unwrap();
        (plan.keyed().last().unwrap().kept(), plan.keyed().next().unwrap().output.clone())
    };
    let (of_windows, columns) = routed("");
    let text = schema_to_text(&columns);
    let same = format!(r#"{{"op":"key_by","columns":["k"]}},{{"op":"stateful_map","call":0,"schema":"{text}"}},"#);
    let (of_columns, _) = routed(&same);
    assert_ne!(of_windows.types(), of_columns.types());
    assert!(of_columns.types().contains("which stay"), "{}", of_columns.types());
}

#[test]
fn what_no_state_can_be_is_not_known() {
    let text = schema_to_text(&block().schema());
    let join = format!(
        r#"{{"keys":"{text}","holds":"join","left":"{text}","right":"{text}","on":[[0],[0]],"within":[-9223372036854775808,0]}}"#
    );
    let many = vec!["\"count\""; 300].join(",");
    let nulls = Arc::new(Schema::new(vec![Field::new("n", DataType::Null, true); 300]));
    let nulls = schema_to_text(&nulls);
    let aggregates = format!(
        r#"{{"keys":"{text}","holds":"aggregates","functions":[{many}],"inputs":"{nulls}","windows":null,"emit":"final"}}"#
    );
    for (json, says) in [(join, "interval"), (aggregates, "more than 255")] {
        let error = Kept::from_json(&json).unwrap().schema().expect_err("it is no state").to_string();
        assert!(error.contains(says), "{error}");
    }
}

#[test]
fn a_join_tells_the_rows_of_both_sides() {
    let right = Arc::new(Schema::new(vec![
        Field::new("person", DataType::Int64, true),
        Field::new("name", DataType::Utf8, true),
    ]));
    let (left_text, right_text) = (schema_to_text(&block().schema()), schema_to_text(&right));
    let text = format!(
        r#"{{"version":2,"sources":[{{"name":"l","schema":"{left_text}"}},{{"name":"r","schema":"{right_text}"}}],
        "steps":[{{"op":"join","left":["i"],"right":["person"],"inputs":[0,1]}}]}}"#
    );
    let keyed = Plan::from_json(&text).unwrap().keyed().next().unwrap().clone();
    assert_eq!(keyed.operator, "join");
    let calls: Arc<dyn Callbacks> = Arc::new(common::TestCalls);
    let routing = Routing::from_owners(vec![0; 4]).unwrap();
    let mut table = BinTable::fresh(&routing, 0, &|| keyed.new_state(&calls));
    let mut op = keyed.operator(&calls).unwrap();
    let people = RecordBatch::try_new(
        right,
        vec![
            Arc::new(Int64Array::from(vec![Some(2), None, Some(9)])),
            Arc::new(StringArray::from(vec!["two", "none", "nine"])),
        ],
    );
    let mut pairs = Vec::new();
    for (side, batch) in [(0, block()), (1, people.unwrap())] {
        let spec = keyed.side(side);
        let routed = spec.assign(&batch).unwrap();
        let hashes = spec.hashes(&routed).unwrap();
        op.apply(&mut table, side, &spec.carry(routed).unwrap(), &hashes, &mut |output| match output {
            Output::Rows(rows) => pairs.push(rows),
            Output::Late(_) | Output::Side(..) => panic!("nothing is late"),
        })
        .unwrap();
    }
    let names: Vec<_> = keyed.output.fields().iter().map(|field| field.name().as_str()).collect();
    assert_eq!(names, ["k", "i", "t", "person", "name"]);
    assert_eq!(pairs.iter().map(RecordBatch::num_rows).sum::<usize>(), 12, "a fifth of 60 rows is person 2");

    let kept = Kept::from_json(&keyed.kept().to_json()).unwrap();
    assert_eq!(
        (&kept, &*kept.types()),
        (&keyed.kept(), "Int64 -> rows (Utf8, Int64, Int64) by [1] that meet (Int64, Utf8) by [0]")
    );
    let mut chunks: Vec<Result<Vec<u8>, FileError>> = Vec::new();
    for (_, state) in table.owned() {
        let mut encoding = Encoding::of(Extent::Changed);
        chunks.extend(std::iter::from_fn(|| state.encode(&mut encoding).unwrap()).map(Ok));
    }
    let told = kept.rows(chunks.into_iter()).unwrap();
    let count = |side: &str| {
        let sides = told.iter().flat_map(|rows| rows.column(0).as_string::<i32>().iter().flatten());
        sides.filter(|one| *one == side).count()
    };
    // A null meets nothing and is not kept: of i a fifth, of the people one.
    assert_eq!((count("left"), count("right")), (48, 2));
    assert_eq!(told[0].schema(), kept.schema().unwrap());
}
