//! Keys of every Arrow type: groups equal those of a map over plain numbers, whatever the layout, the workers and the moves.
//!
//! A key is a class 0..6 or a null per column; each type turns classes into values of its own, equal ones in ways that must not matter
//! (zeros of both signs, odd NaNs, other offsets, other dictionaries). What comes out is turned back into classes by comparing values.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::common::{Cluster, Move};
use arrow_array::builder::{FixedSizeListBuilder, Int32Builder, LargeListBuilder, ListBuilder};
use arrow_array::cast::AsArray;
use arrow_array::types::*;
use arrow_array::*;
use arrow_buffer::i256;
use arrow_schema::{DataType, Field, Fields, IntervalUnit, TimeUnit, UnionFields, UnionMode};
use penstock_plan::spec::{AggSpec, Nulls, PlanSpec, SourceSpec, StepSpec};
use penstock_plan::{Emit, Plan};
use proptest::prelude::*;

const CLASSES: u8 = 6;

type Class = Option<u8>;

/// Every type that can be a key.
fn types() -> Vec<DataType> {
    use DataType::*;
    let item = |data_type| Arc::new(Field::new_list_field(data_type, true));
    let mut types = vec![
        Boolean,
        Int8,
        Int16,
        Int32,
        Int64,
        UInt8,
        UInt16,
        UInt32,
        UInt64,
        Float16,
        Float32,
        Float64,
        Date32,
        Date64,
        Utf8,
        LargeUtf8,
        Utf8View,
        Binary,
        LargeBinary,
        BinaryView,
        FixedSizeBinary(3),
        Null,
        Decimal32(5, 1),
        Decimal64(9, 2),
        Decimal128(30, 4),
        Decimal256(60, 5),
        Interval(IntervalUnit::YearMonth),
        Interval(IntervalUnit::DayTime),
        Interval(IntervalUnit::MonthDayNano),
        List(item(Int32)),
        List(item(Float64)),
        ListView(item(Int32)),
        LargeList(item(Int32)),
        FixedSizeList(item(Int32), 2),
        Struct(Fields::from(vec![Field::new("i", Int32, true), Field::new("s", Utf8, true)])),
        Dictionary(Box::new(Int8), Box::new(Utf8)),
        Dictionary(Box::new(UInt32), Box::new(Int64)),
    ];
    types.extend([TimeUnit::Second, TimeUnit::Millisecond].map(Time32));
    types.extend([TimeUnit::Microsecond, TimeUnit::Nanosecond].map(Time64));
    for unit in [TimeUnit::Second, TimeUnit::Millisecond, TimeUnit::Microsecond, TimeUnit::Nanosecond] {
        types.extend([Timestamp(unit, None), Timestamp(unit, Some("UTC".into())), Duration(unit)]);
    }
    types
}

/// What a class is in types of fewer values.
fn folded(data_type: &DataType, class: Class) -> Class {
    match data_type {
        DataType::Boolean => class.map(|class| class % 2),
        DataType::Null => None,
        _ => class,
    }
}

/// A small number per class; class 0 is 0, some are negative.
fn number(class: u8) -> i64 {
    [0, 1, -1, 77, -77, 100][usize::from(class)]
}

fn float(class: u8, odd: bool) -> f64 {
    match (class, odd) {
        (0, true) => -0.0,
        (1, true) => f64::from_bits(0xfff8_0000_0000_0001),
        (1, false) => f64::NAN,
        (2, _) => f64::NEG_INFINITY,
        _ => number(class) as f64 / 4.0,
    }
}

fn text(class: u8) -> String {
    ["", "a", "b", "longer than twelve bytes", "longer than twelve bytez", "ü"][usize::from(class)].into()
}

/// A column of classes. `odd` writes equal values in another way.
fn column(data_type: &DataType, classes: &[Class], odd: bool) -> ArrayRef {
    use DataType::*;
    let numbers = || classes.iter().map(|class| class.map(number));
    let texts = || classes.iter().map(|class| class.map(text));
    macro_rules! ints {
        ($kind:ty) => {
            Arc::new(
                numbers()
                    .map(|n| n.map(|n| n as <$kind as ArrowPrimitiveType>::Native))
                    .collect::<PrimitiveArray<$kind>>()
                    .with_data_type(data_type.clone()),
            )
        };
    }
    let wide = || -> ArrayRef {
        let plain = numbers().collect::<Int64Array>().into_data().into_builder();
        make_array(plain.data_type(data_type.clone()).build().unwrap())
    };
    let narrow = || -> ArrayRef {
        let plain = numbers().map(|n| n.map(|n| n as i32)).collect::<Int32Array>().into_data().into_builder();
        make_array(plain.data_type(data_type.clone()).build().unwrap())
    };
    match data_type {
        Null => Arc::new(NullArray::new(classes.len())),
        Boolean => Arc::new(classes.iter().map(|class| class.map(|class| class % 2 == 1)).collect::<BooleanArray>()),
        Int8 => ints!(Int8Type),
        Int16 => ints!(Int16Type),
        UInt8 => ints!(UInt8Type),
        UInt16 => ints!(UInt16Type),
        UInt32 => ints!(UInt32Type),
        Int64 | UInt64 | Date64 | Time64(_) | Timestamp(_, _) | Duration(_) | Decimal64(_, _) => wide(),
        Int32 | Date32 | Time32(_) | Decimal32(_, _) | Interval(IntervalUnit::YearMonth) => narrow(),
        Decimal128(_, _) => ints!(Decimal128Type),
        Decimal256(_, _) => {
            let values = numbers().map(|n| n.map(|n| i256::from_i128(n.into()))).collect::<Decimal256Array>();
            Arc::new(values.with_data_type(data_type.clone()))
        }
        Interval(IntervalUnit::DayTime) => {
            let value = |n: i64| IntervalDayTimeType::make_value(n as i32, 7);
            Arc::new(numbers().map(|n| n.map(value)).collect::<IntervalDayTimeArray>())
        }
        Interval(IntervalUnit::MonthDayNano) => {
            let value = |n: i64| IntervalMonthDayNanoType::make_value(3, n as i32, n);
            Arc::new(numbers().map(|n| n.map(value)).collect::<IntervalMonthDayNanoArray>())
        }
        Float16 | Float32 | Float64 => {
            let values = || classes.iter().map(|class| class.map(|class| float(class, odd)));
            match data_type {
                Float64 => Arc::new(values().collect::<Float64Array>()),
                Float32 => Arc::new(values().map(|value| value.map(|value| value as f32)).collect::<Float32Array>()),
                _ => {
                    type Half = <Float16Type as ArrowPrimitiveType>::Native;
                    Arc::new(values().map(|value| value.map(Half::from_f64)).collect::<Float16Array>())
                }
            }
        }
        Utf8 => Arc::new(texts().collect::<StringArray>()),
        LargeUtf8 => Arc::new(texts().collect::<LargeStringArray>()),
        Utf8View => Arc::new(texts().collect::<StringViewArray>()),
        Binary => Arc::new(texts().map(|text| text.map(String::into_bytes)).collect::<BinaryArray>()),
        LargeBinary => Arc::new(texts().map(|text| text.map(String::into_bytes)).collect::<LargeBinaryArray>()),
        BinaryView => Arc::new(texts().map(|text| text.map(String::into_bytes)).collect::<BinaryViewArray>()),
        FixedSizeBinary(width) => {
            let values = classes.iter().map(|class| class.map(|class| [class, 0, 7]));
            Arc::new(FixedSizeBinaryArray::try_from_sparse_iter_with_size(values, *width).unwrap())
        }
        List(item) if item.data_type() == &Float64 => {
            let value = |class: u8| (0..usize::from(class)).map(|_| Some(float(class, odd))).chain([None]).collect();
            Arc::new(ListArray::from_iter_primitive::<Float64Type, Vec<_>, _>(
                classes.iter().map(|class| class.map(value)),
            ))
        }
        List(_) => {
            let mut lists = ListBuilder::new(Int32Builder::new());
            for class in classes {
                (0..class.unwrap_or(0)).for_each(|at| lists.values().append_option((at != 2).then_some(i32::from(at))));
                lists.append(class.is_some());
            }
            Arc::new(lists.finish())
        }
        ListView(item) => {
            let lists = column(&List(item.clone()), classes, odd);
            Arc::new(ListViewArray::from(lists.as_list::<i32>().clone()))
        }
        LargeList(_) => {
            let mut lists = LargeListBuilder::new(Int32Builder::new());
            for class in classes {
                (0..class.unwrap_or(0)).for_each(|at| lists.values().append_value(at.into()));
                lists.append(class.is_some());
            }
            Arc::new(lists.finish())
        }
        FixedSizeList(_, _) => {
            let mut lists = FixedSizeListBuilder::new(Int32Builder::new(), 2);
            for class in classes {
                // What lies under a null must not matter.
                lists.values().append_value(class.map_or(i32::from(odd), i32::from));
                lists.values().append_option(class.filter(|class| *class > 1).map(|_| 5));
                lists.append(class.is_some());
            }
            Arc::new(lists.finish())
        }
        Struct(fields) => {
            let inner = |of: u8| classes.iter().map(move |class| class.filter(|class| class % 2 == of));
            let columns =
                [column(&Int32, &inner(0).collect::<Vec<_>>(), odd), column(&Utf8, &inner(1).collect::<Vec<_>>(), odd)];
            let nulls = classes.iter().map(Option::is_some).collect::<Vec<_>>();
            Arc::new(StructArray::new(fields.clone(), columns.to_vec(), Some(nulls.into())))
        }
        Dictionary(key, value) => {
            // The dictionary has all classes in one order or the other, and a null of its own.
            let mut order: Vec<Class> = (0..CLASSES).map(Some).chain([None]).collect();
            if odd {
                order.reverse();
            }
            let values = column(value, &order, false);
            let place = |class: Class| order.iter().position(|other| *other == class).unwrap();
            let keys = classes.iter().map(|class| (class.is_some() || odd).then(|| place(*class)));
            match **key {
                Int8 => {
                    let keys = keys.map(|key| key.map(|key| key as i8)).collect::<Int8Array>();
                    Arc::new(DictionaryArray::try_new(keys, values).unwrap())
                }
                _ => {
                    let keys = keys.map(|key| key.map(|key| key as u32)).collect::<UInt32Array>();
                    Arc::new(DictionaryArray::try_new(keys, values).unwrap())
                }
            }
        }
        other => panic!("no values of {other}"),
    }
}

/// The classes of a column of keys that came out.
fn classes(data_type: &DataType, found: &ArrayRef) -> Vec<Class> {
    let value = match data_type {
        DataType::Dictionary(_, value) => value,
        plain => plain,
    };
    assert_eq!(found.data_type(), value, "keys come back with their type, those of dictionaries as plain values");
    let all: Vec<Class> = (0..CLASSES).map(Some).chain([None]).collect();
    let known = column(value, &all, false);
    let is = |row: usize, at: usize| found.slice(row, 1).to_data() == known.slice(at, 1).to_data();
    let float = |row: usize| {
        let plain = found.as_primitive_opt::<Float64Type>().map(|found| found.value(row));
        plain.or_else(|| found.as_primitive_opt::<Float32Type>().map(|found| found.value(row).into()))
    };
    (0..found.len())
        .map(|row| {
            let nan = found.is_valid(row) && float(row).is_some_and(f64::is_nan);
            let at = (0..all.len()).find(|&at| is(row, at) || (nan && all[at] == Some(1)));
            folded(
                data_type,
                all[at.unwrap_or_else(|| panic!("{data_type}: {:?} was not put in", found.slice(row, 1)))],
            )
        })
        .collect()
}

#[derive(Clone, Debug)]
struct Block {
    rows: Vec<(Vec<Class>, i16)>,
    odd: bool,
    /// Rows cut off in front and behind, after the columns were made.
    cut: (usize, usize),
    moves: Vec<Move>,
}

#[derive(Clone, Debug)]
struct Case {
    types: Vec<DataType>,
    blocks: Vec<Block>,
    workers: u32,
    bits: u8,
}

fn a_move() -> impl Strategy<Value = Move> {
    (any::<u32>(), any::<u32>(), any::<bool>()).prop_map(|(bin, to, through_bytes)| Move {
        stage: 0,
        bin,
        to,
        through_bytes,
    })
}

fn case(of: impl Strategy<Value = Vec<DataType>>) -> impl Strategy<Value = Case> {
    (of, 1u32..5, 0u8..4).prop_flat_map(|(types, workers, bits)| {
        let class = prop_oneof![1 => Just(None), 5 => (0..CLASSES).prop_map(Some)];
        let row = (prop::collection::vec(class, types.len()), any::<i16>());
        let block = (
            prop::collection::vec(row, 0..40),
            any::<bool>(),
            (0usize..4, 0usize..4),
            prop::collection::vec(a_move(), 0..3),
        );
        let block = block.prop_map(|(rows, odd, cut, moves)| Block { rows, odd, cut, moves });
        let blocks = prop::collection::vec(block, 1..6);
        blocks.prop_map(move |blocks| Case { types: types.clone(), blocks, workers, bits })
    })
}

fn names(types: &[DataType]) -> Vec<String> {
    (0..types.len()).map(|at| format!("k{at}")).collect()
}

fn batch(types: &[DataType], block: &Block) -> RecordBatch {
    let keys = types.iter().enumerate().map(|(at, data_type)| {
        let classes = block.rows.iter().map(|(classes, _)| classes[at]).collect::<Vec<_>>();
        (format!("k{at}"), column(data_type, &classes, block.odd), true)
    });
    let values = block.rows.iter().map(|(_, value)| *value).collect::<Int16Array>();
    let columns = keys.chain([("v".to_owned(), Arc::new(values) as ArrayRef, true)]).collect::<Vec<_>>();
    let whole = RecordBatch::try_from_iter_with_nullable(columns).unwrap();
    let front = block.cut.0.min(whole.num_rows());
    let rows = (whole.num_rows() - front).saturating_sub(block.cut.1);
    whole.slice(front, rows)
}

fn plan(types: &[DataType]) -> PlanSpec {
    let schema = batch(types, &Block { rows: vec![], odd: false, cut: (0, 0), moves: vec![] }).schema();
    let agg = |name: &str, function: &str, column: Option<&str>| AggSpec {
        name: name.into(),
        function: function.into(),
        column: column.map(Into::into),
        ..AggSpec::default()
    };
    let steps = vec![
        StepSpec::KeyBy { columns: names(types), nulls: Nulls::Group },
        StepSpec::Agg {
            emit: Some(Emit::Final),
            aggs: vec![agg("n", "count", None), agg("sum", "sum", Some("v")), agg("last", "max", Some("v"))],
            operator: None,
        },
    ];
    let source = SourceSpec {
        name: "input".into(),
        schema,
        event_time: None,
        lateness_ms: 0,
        order_by: vec![],
        idle_after_ms: None,
    };
    PlanSpec::line(source, steps)
}

fn groups_are_those_of_a_map(case: &Case) {
    let mut cluster = Cluster::new(plan(&case.types), case.bits, case.workers);
    let mut expected: BTreeMap<Vec<Class>, (i64, i64, i16)> = BTreeMap::new();
    for block in &case.blocks {
        let rows = batch(&case.types, block);
        let front = block.cut.0.min(block.rows.len());
        for (classes, value) in &block.rows[front..front + rows.num_rows()] {
            let key = classes.iter().zip(&case.types).map(|(class, of)| folded(of, *class)).collect();
            let group = expected.entry(key).or_insert((0, 0, i16::MIN));
            *group = (group.0 + 1, group.1 + i64::from(*value), group.2.max(*value));
        }
        if rows.num_rows() > 0 {
            cluster.feed(0, rows).unwrap();
        }
        block.moves.iter().for_each(|moved| cluster.relocate(moved));
    }
    assert_eq!(cluster.keys(), expected.len());
    cluster.close(i64::MAX).unwrap();
    let mut found = BTreeMap::new();
    for rows in std::mem::take(&mut cluster.rows) {
        let keys: Vec<Vec<Class>> =
            case.types.iter().zip(rows.columns()).map(|(of, column)| classes(of, column)).collect();
        let [n, sum] = [0, 1].map(|at| rows.column(case.types.len() + at).as_primitive::<Int64Type>().clone());
        let greatest = rows.column(case.types.len() + 2).as_primitive::<Int16Type>();
        for row in 0..rows.num_rows() {
            let key: Vec<Class> = keys.iter().map(|column| column[row]).collect();
            let before = found.insert(key, (n.value(row), sum.value(row), greatest.value(row)));
            assert_eq!(before, None, "a key comes once");
        }
    }
    assert_eq!(found, expected);
}

proptest! {
    #![proptest_config(penstock_cases::cases(400))]

    #[test]
    fn single_keys(case in case(prop::sample::select(types()).prop_map(|of| vec![of]))) {
        groups_are_those_of_a_map(&case);
    }

    #[test]
    fn composite_keys(case in case(prop::collection::vec(prop::sample::select(types()), 2..4))) {
        groups_are_those_of_a_map(&case);
    }
}

#[test]
fn every_type_is_a_key() {
    let row = |class| (vec![class], 3);
    let rows: Vec<_> = (0..CLASSES).map(Some).chain([None, Some(1), None]).map(row).collect();
    for data_type in types() {
        let moves = vec![Move { stage: 0, bin: 1, to: 2, through_bytes: true }];
        let block = |odd| Block { rows: rows.clone(), odd, cut: (1, 0), moves: moves.clone() };
        let blocks = vec![block(false), block(true)];
        groups_are_those_of_a_map(&Case { types: vec![data_type], blocks, workers: 3, bits: 2 });
    }
}

#[test]
fn a_type_that_cannot_be_a_key_is_named() {
    let union = UnionFields::try_new([0], [Field::new("i", DataType::Int32, true)]).unwrap();
    let dictionary = DataType::Dictionary(Box::new(DataType::Int32), Box::new(DataType::Utf8));
    let ends = Arc::new(Field::new("run_ends", DataType::Int32, false));
    let types = [
        DataType::List(Arc::new(Field::new_list_field(dictionary.clone(), true))),
        DataType::RunEndEncoded(ends, Arc::new(Field::new("values", DataType::Utf8, true))),
        DataType::ListView(Arc::new(Field::new_list_field(dictionary.clone(), true))),
        DataType::Union(union, UnionMode::Sparse),
    ];
    for data_type in types {
        let mut spec = plan(&[DataType::Int64]);
        let fields = vec![Field::new("odd", data_type.clone(), true), Field::new("v", DataType::Int16, true)];
        spec.sources[0].schema = Arc::new(arrow_schema::Schema::new(fields));
        spec.steps[0] = StepSpec::KeyBy { columns: vec!["odd".into()], nulls: Nulls::Group }.into();
        let Err(error) = Plan::compile(spec) else { panic!("{data_type} is accepted") };
        let error = error.to_string();
        let told = format!("step 0 (key_by): column 'odd' has type {}, ", penstock_plan::ddl(&data_type));
        assert!(error.starts_with(&told), "{error}");
    }
}
