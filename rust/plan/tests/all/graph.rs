//! Plans that are graphs: what compilation makes of them, and where marks and joins stand in them. Random ones are in `property`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::group::{Cluster, Random, config, fresh, moves, read, rows};
use crate::property::plans::made;
use arrow_array::RecordBatch;
use arrow_schema::{DataType, Field, Schema, SchemaRef};
use penstock_plan::host::{Begin, End, Piece};
use penstock_plan::spec::{AggSpec, NodeSpec, Nulls, PLAN_VERSION, SourceSpec};
use penstock_plan::{
    CallError, Callbacks, Emit, ForeignState, JoinHow, Origin, Plan, PlanError, PlanSpec, SideRows, StepSpec,
};

fn columns(names: &[&str]) -> SchemaRef {
    Arc::new(Schema::new(names.iter().map(|name| Field::new(*name, DataType::Int64, true)).collect::<Vec<_>>()))
}

fn source(name: &str) -> SourceSpec {
    let schema = columns(&["k", "v"]);
    SourceSpec {
        name: name.into(),
        schema,
        event_time: None,
        lateness_ms: 0,
        order_by: Vec::new(),
        idle_after_ms: None,
    }
}

fn node(inputs: &[usize], step: StepSpec) -> NodeSpec {
    NodeSpec { inputs: inputs.to_vec(), step }
}

fn map(call: usize, names: &[&str]) -> StepSpec {
    StepSpec::MapBatches { call, schema: columns(names), sides: vec![] }
}

fn by_key() -> StepSpec {
    StepSpec::KeyBy { columns: vec!["k".into()], nulls: Nulls::Group }
}

fn total(emit: Emit) -> StepSpec {
    let sum = AggSpec { name: "v".into(), function: "sum".into(), column: Some("v".into()), ..AggSpec::default() };
    StepSpec::Agg { emit: Some(emit), aggs: vec![sum], operator: None }
}

fn joined(left: &[&str], right: &[&str]) -> StepSpec {
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    let (left, right, how) = (names(left), names(right), JoinHow::Inner);
    let (within, until, validate) = (None, None, None);
    StepSpec::Join { left, right, how, within, until, validate, windowed: false, suffix: None, operator: None }
}

fn graph(sources: &[&str], steps: Vec<NodeSpec>) -> PlanSpec {
    let spec = PlanSpec { version: PLAN_VERSION, sources: sources.iter().map(|name| source(name)).collect(), steps };
    assert_eq!(PlanSpec::from_json(&spec.to_json()).unwrap(), spec);
    spec
}

fn refused(sources: &[&str], steps: Vec<NodeSpec>) -> String {
    Plan::compile(graph(sources, steps)).map(|plan| plan.explain()).unwrap_err().to_string()
}

/// Call 0 adds one to v, 1 names it w.
struct Calls;

impl Callbacks for Calls {
    fn map(&self, call: usize, batch: &RecordBatch, _: &mut SideRows) -> Result<RecordBatch, CallError> {
        let mut all = read(std::slice::from_ref(batch));
        match call {
            0 => all.iter_mut().for_each(|row| row[1] += 1),
            1 => return Ok(rows(&["k", "w"], &all)),
            call => panic!("call {call}"),
        }
        Ok(rows(&["k", "v"], &all))
    }

    fn new_state(&self, _: usize) -> Box<dyn ForeignState> {
        unreachable!("no step has state of its own")
    }
}

fn calls() -> Arc<dyn Callbacks> {
    Arc::new(Calls)
}

#[test]
fn a_line_has_the_stages_of_a_line() {
    let steps = vec![map(0, &["k", "v"]), by_key(), total(Emit::Final), map(0, &["k", "v"])];
    let plan = Plan::compile(PlanSpec::line(source("input"), steps)).unwrap();
    let from: Vec<_> = plan.stages().iter().map(|stage| stage.inlets[0].from.clone()).collect();
    assert_eq!(from, [[Origin::Source(0)], [Origin::Stage(0)]]);
    assert!(plan.is_line() && plan.stages()[0].keyed.is_some() && plan.stages()[1].keyed.is_none());
    assert!(plan.explain().starts_with("source: k bigint, v bigint\nstep 0 (map_batches)"), "{}", plan.explain());
}

#[test]
fn what_several_steps_use_is_one_stage() {
    // a, b; the map of a goes into a union and into a sum.
    let steps = vec![
        node(&[0], map(0, &["k", "v"])),
        node(&[2, 1], StepSpec::Union {}),
        node(&[2], by_key()),
        node(&[4], total(Emit::Final)),
        node(&[3, 5], StepSpec::Union {}),
    ];
    let plan = Plan::compile(graph(&["a", "b"], steps)).unwrap();
    assert!(!plan.is_line());
    let from: Vec<_> = plan.stages().iter().map(|stage| stage.inlets[0].from.clone()).collect();
    let (a, b) = (Origin::Source(0), Origin::Source(1));
    assert_eq!(from, [vec![a], vec![Origin::Stage(0)], vec![Origin::Stage(0), b, Origin::Stage(1)]]);
    assert_eq!(plan.keyed().map(|keyed| keyed.operator.as_str()).collect::<Vec<_>>(), ["agg"]);
    let text = plan.explain();
    for words in
        ["source a: k bigint", "source b: ", "stage 0: rows of source a", "rows of stage 0 and source b and stage 1"]
    {
        assert!(text.contains(words), "{text}\ndoes not say: {words}");
    }
}

#[test]
fn unions_of_unions_do_not_grow_with_the_paths() {
    // 2^40 paths.
    let steps = (0..40).map(|at| node(&[at, at], StepSpec::Union {})).collect();
    let plan = Plan::compile(graph(&["s"], steps)).unwrap();
    assert_eq!(plan.stages().len(), 40);
    assert!(plan.stages().iter().all(|stage| stage.inlets.iter().all(|inlet| inlet.from.len() == 2)));
}

#[test]
fn a_union_of_lists_of_other_items_is_refused() {
    let sources = ["item", "element"].map(|item| {
        let list = DataType::List(Arc::new(Field::new(item, DataType::Int64, true)));
        let schema = Arc::new(Schema::new(vec![Field::new("l", list, true)]));
        SourceSpec {
            name: item.into(),
            schema,
            event_time: None,
            lateness_ms: 0,
            order_by: Vec::new(),
            idle_after_ms: None,
        }
    });
    let steps = vec![node(&[0, 1], StepSpec::Union {})];
    let spec = PlanSpec { version: PLAN_VERSION, sources: sources.into(), steps };
    let error = Plan::compile(spec).unwrap_err().to_string();
    assert!(error.contains("(l List(Int64, field: 'element'))"), "{error}");
}

#[test]
fn graphs_that_make_no_sense_are_refused() {
    let union = |inputs: &[usize]| node(inputs, StepSpec::Union {});
    let same = |inputs: &[usize]| node(inputs, map(0, &["k", "v"]));
    assert_eq!(Plan::compile(graph(&[], vec![])), Err(PlanError::Sources { found: 0, most: 256 }));
    for (said, words) in [
        (refused(&["a", "a"], vec![union(&[0, 1])]), "two sources are named 'a'"),
        (refused(&["a", "b"], vec![same(&[0])]), "step 1 (source): no step takes its rows"),
        (refused(&["a"], vec![same(&[0]), same(&[0])]), "step 0 (map_batches): no step takes its rows"),
        (refused(&["a"], vec![same(&[1])]), "the rows of node 1, and only nodes 0 to 0 stand before it"),
        (refused(&["a"], vec![same(&[2]), same(&[1])]), "a plan has no cycles"),
        (refused(&["a"], vec![union(&[0])]), "step 0 (union): it takes two inputs or more, 1 are named"),
        (refused(&["a", "b"], vec![same(&[0, 1])]), "step 0 (map_batches): it takes one input, 2 are named"),
        (
            refused(&["a", "b"], vec![node(&[0], map(0, &["k", "w"])), union(&[2, 1])]),
            "the first has (k bigint, w bigint), another one (k bigint, v bigint)",
        ),
        (refused(&["a", "b"], vec![node(&[0], by_key()), union(&[2, 1])]), "step 0 (key_by): union joins whole rows"),
    ] {
        assert!(said.contains(words), "{said}\ndoes not say: {words}");
    }
}

#[test]
fn pieces_lead_from_exchange_to_exchange() {
    // The map of a goes into a union with b, and into a sum; what comes of both is one output.
    let steps = vec![
        node(&[0], map(0, &["k", "v"])),
        node(&[2, 1], StepSpec::Union {}),
        node(&[2], by_key()),
        node(&[4], total(Emit::Final)),
        node(&[3, 5], StepSpec::Union {}),
    ];
    let plan = Plan::compile(graph(&["a", "b"], steps)).unwrap();
    let (sum, output) = (End::Keyed { op: 0, side: 0 }, End::Output);
    let piece = |begin, end| Piece { begin, end };
    let (a, b) = (Begin::Source(0), Begin::Source(1));
    let expected = [piece(a, sum), piece(a, output), piece(b, output), piece(Begin::Keyed(0), output)];
    assert_eq!(plan.pieces(), expected);
    let steps = vec![node(&[1], map(1, &["k", "w"])), node(&[0, 2], joined(&["k"], &["k"]))];
    let plan = Plan::compile(graph(&["a", "b"], steps)).unwrap();
    let side = |side| End::Keyed { op: 0, side };
    let pairs = piece(Begin::Keyed(0), output);
    assert_eq!(plan.pieces(), [piece(a, side(0)), piece(b, side(1)), pairs]);
    let names = |schema: &SchemaRef| schema.fields().iter().map(|field| field.name().clone()).collect::<Vec<_>>();
    assert_eq!(plan.piece_inputs(pairs).iter().map(names).collect::<Vec<_>>(), [["k", "v"], ["k", "w"]]);
    assert_eq!(names(&plan.piece_output(plan.pieces()[1])), ["k", "w"]);
    let one_path = vec![map(0, &["k", "v"]), by_key(), total(Emit::Final), by_key(), total(Emit::Final)];
    let line = Plan::compile(PlanSpec::line(source("input"), one_path)).unwrap();
    let begins: Vec<_> = line.pieces().iter().map(|piece| piece.begin).collect();
    assert_eq!(begins, [Begin::Source(0), Begin::Keyed(0), Begin::Keyed(1)]);
}

type Bag = Vec<Vec<i64>>;

/// Rows (k, v, w) of rows (k, v) and (k, w).
fn pairs<'a>(left: &'a Bag, right: &'a Bag) -> impl Iterator<Item = Vec<i64>> + 'a {
    let with = move |l: &'a Vec<i64>| right.iter().filter(move |r| r[0] == l[0]).map(move |r| vec![l[0], l[1], r[1]]);
    left.iter().flat_map(with)
}

#[test]
fn joins_of_columns_that_do_not_fit_are_refused() {
    let join = |inputs: &[usize], left: &[&str], right: &[&str]| node(inputs, joined(left, right));
    let renamed = node(&[1], map(1, &["k", "w"]));
    let text = StepSpec::MapBatches {
        call: 1,
        schema: Arc::new(Schema::new(vec![
            Field::new("k", DataType::Utf8, true),
            Field::new("w", DataType::Int64, true),
        ])),
        sides: vec![],
    };
    let of = |step: NodeSpec| vec![renamed.clone(), step];
    for (said, words) in [
        (refused(&["a", "b"], of(join(&[0, 2], &[], &[]))), "0 columns of the left side with 0 of the right"),
        (
            refused(&["a", "b"], of(join(&[0, 2], &["k", "v"], &["k"]))),
            "2 columns of the left side with 1 of the right",
        ),
        (
            refused(&["a", "b"], of(join(&[0, 2], &["x"], &["k"]))),
            "step 1 (join): column 'x' does not exist; there are: k, v",
        ),
        (refused(&["a", "b"], of(join(&[0, 2], &["k"], &["v"]))), "column 'v' does not exist; there are: k, w"),
        (refused(&["a", "b"], of(join(&[0, 2], &["k", "k"], &["k", "w"]))), "two columns named 'k'"),
        (
            refused(&["a", "b"], vec![node(&[1], text), join(&[0, 2], &["k"], &["k"])]),
            "'k' has type bigint, 'k' has string",
        ),
        (refused(&["a", "b"], vec![join(&[0, 1], &["k"], &["k"])]), "the output would have two columns named 'v'"),
        (refused(&["a", "b"], vec![join(&[0], &["k"], &["k"])]), "it takes two inputs, 1 are named"),
        (
            refused(&["a", "b"], vec![node(&[0], by_key()), renamed.clone(), join(&[2, 3], &["k"], &["k"])]),
            "leave this out",
        ),
        (
            refused(
                &["a", "b"],
                vec![renamed.clone(), node(&[0], by_key()), total(Emit::Update).into(), join(&[4, 2], &["k"], &["k"])],
            ),
            "replaces earlier values",
        ),
    ] {
        assert!(said.contains(words), "{said}\ndoes not say: {words}");
    }
    let plan = Plan::compile(graph(&["a", "b"], of(join(&[0, 2], &["v"], &["w"])))).unwrap_err();
    assert!(plan.to_string().contains("two columns named 'k'"), "{plan}");
    let plan = Plan::compile(graph(&["a", "b"], of(join(&[0, 2], &["k"], &["k"])))).unwrap();
    let text = plan.explain();
    for words in
        ["rows of source a", "exchange: by hash of k", "step 1 (join): pairs with k = k", "both sides, for ever"]
    {
        assert!(text.contains(words), "{text}\ndoes not say: {words}");
    }
}

/// An epoch fails after some of its blocks, on all workers; the next generation repeats it, and gives what the first would have given.
#[test]
fn a_join_goes_back_to_where_the_epoch_began() {
    let steps = vec![node(&[1], map(1, &["k", "w"])), node(&[0, 2], joined(&["k"], &["k"]))];
    let plan = Arc::new(Plan::compile(graph(&["a", "b"], steps)).unwrap());
    for seed in 0..6 {
        let mut random = Random(seed);
        let mut config = config(&plan, &calls(), 3);
        config.journal = true;
        let mut cluster = Cluster::start(&config, 1, 3, 1, fresh(1));
        let mut fed: [Bag; 2] = [Vec::new(), Vec::new()];
        for epoch in 0..6 {
            let blocks = [0, 1].map(|_| -> Bag {
                (0..random.below(90)).map(|_| vec![random.below(30) as i64, random.below(9) as i64]).collect()
            });
            let given: Vec<_> = (0..).zip(&blocks).map(|(side, block)| (side, rows(&["k", "v"], block))).collect();
            if random.below(2) == 0 {
                // Begun and broken off: bins move as well.
                cluster.release_of(epoch, &given, None);
                cluster.groups[0].0.migrate(epoch, moves(&mut random, 3, epoch % 3), None);
                if random.below(2) == 0 {
                    cluster.complete(epoch, &mut 0).unwrap();
                }
                let (residents, errors) = cluster.stop();
                assert!(errors.is_empty(), "{errors:?}");
                config.epoch = epoch;
                cluster = Cluster::start(&config, 1, 3, 2 + epoch, residents);
            }
            cluster.release_of(epoch, &given, None);
            let mut met = read(&cluster.complete(epoch, &mut 0).unwrap());
            let before = fed.clone();
            fed.iter_mut().zip(&blocks).for_each(|(fed, block)| fed.extend(block.clone()));
            let mut expected: Bag = pairs(&fed[0], &fed[1]).collect();
            for pair in pairs(&before[0], &before[1]) {
                let at = expected.iter().position(|one| *one == pair).unwrap();
                expected.swap_remove(at);
            }
            expected.sort();
            met.sort();
            assert_eq!(met, expected, "seed {seed}, epoch {epoch}");
            cluster.groups[0].0.settle(epoch);
        }
        assert!(cluster.stop().1.is_empty());
    }
}

/// With updates, each key speaks once at the end of each epoch, on however many paths its rows came.
#[test]
fn marks_pass_each_operator_once() {
    for seed in 0..10 {
        let mut random = Random(seed);
        let steps = vec![
            node(&[0], map(0, &["k", "v"])),
            node(&[2, 1, 2, 0], StepSpec::Union {}),
            by_key().into(),
            total(Emit::Update).into(),
        ];
        let plan = Arc::new(Plan::compile(graph(&["a", "b"], steps)).unwrap());
        let cluster = Cluster::start(&config(&plan, &calls(), 3), 1, 3, 1, fresh(1));
        let mut sums = BTreeMap::<i64, i64>::new();
        for epoch in 0..5 {
            let mut touched = BTreeSet::new();
            let blocks = [0_u8, 1].map(|source| {
                let block: Bag =
                    (0..random.below(40)).map(|_| vec![random.below(20) as i64, random.below(9) as i64]).collect();
                for row in &block {
                    // Of a: twice as it is mapped, and as it is.
                    *sums.entry(row[0]).or_default() += if source == 0 { 3 * row[1] + 2 } else { row[1] };
                    touched.insert(row[0]);
                }
                (source, rows(&["k", "v"], &block))
            });
            cluster.release_of(epoch, &blocks, None);
            cluster.groups[0].0.migrate(epoch, moves(&mut random, 3, epoch % 3), None);
            let mut given = read(&cluster.complete(epoch, &mut 0).unwrap());
            given.sort();
            let expected: Bag = touched.into_iter().map(|key| vec![key, sums[&key]]).collect();
            assert_eq!(given, expected, "seed {seed}, epoch {epoch}");
        }
        assert!(cluster.stop().1.is_empty());
    }
}

/// The edges of a drawing, as often as they are there.
fn edges(drawing: &str) -> Vec<(String, String)> {
    let edge = |line: &str| {
        let (from, rest) = line.trim().split_once(" -> ")?;
        Some((from.to_owned(), rest.split([' ', ';']).next()?.to_owned()))
    };
    let mut edges: Vec<_> = drawing.lines().filter_map(edge).collect();
    edges.sort();
    edges
}

/// Those that a plan has: rows come to the steps of an inlet, or where there are none to its operator.
fn ways(plan: &Plan) -> Vec<(String, String)> {
    let mut ways = vec![(format!("stage{}", plan.stages().len() - 1), "output".to_owned())];
    for (number, stage) in plan.stages().iter().enumerate() {
        for (side, inlet) in stage.inlets.iter().enumerate() {
            let (steps, end) = (format!("inlet{number}_{side}"), format!("stage{number}"));
            let apart = stage.keyed.is_some() && !inlet.pre.is_empty();
            for origin in &inlet.from {
                let from = match origin {
                    Origin::Source(number) => format!("source{number}"),
                    Origin::Stage(number) => format!("stage{number}"),
                };
                ways.push((from, if apart { steps.clone() } else { end.clone() }));
            }
            if apart {
                ways.push((steps, end));
            }
        }
    }
    ways.sort();
    ways
}

#[test]
fn a_drawing_has_every_edge_between_nodes_that_it_has() {
    for seed in 0..300 {
        let plan = Plan::compile(made(&mut Random(seed), 4).spec).unwrap();
        let drawing = plan.dot();
        let (aside, ahead): (Vec<_>, Vec<_>) = edges(&drawing).into_iter().partition(|(_, to)| to.starts_with("side"));
        assert_eq!(ahead, ways(&plan), "seed {seed}: {drawing}");
        let mut sides: Vec<String> = aside.into_iter().map(|(_, to)| to).collect();
        sides.sort_by_key(|name| name[4..].parse::<usize>().unwrap());
        let all: Vec<String> = (0..plan.side_outputs().len()).map(|side| format!("side{side}")).collect();
        assert_eq!(sides, all, "seed {seed}: {drawing}");
        let is_node = |name: &String| drawing.contains(&format!("  {name} ["));
        assert!(edges(&drawing).iter().all(|(from, to)| is_node(from) && is_node(to)), "seed {seed}: {drawing}");
        let keyed = plan.keyed().count();
        assert_eq!(drawing.matches("state: ").count(), keyed, "seed {seed}: {drawing}");
        assert!(drawing.matches("exchange ").count() >= keyed, "seed {seed}: {drawing}");
    }
}

#[test]
fn a_drawing_says_what_is_exchanged_by_which_columns_and_what_is_kept() {
    let renamed = StepSpec::MapBatches { call: 0, schema: columns(&["w", "x"]), sides: vec![] };
    let steps = vec![node(&[1], renamed), node(&[0, 2], joined(&["k"], &["w"]))];
    let mut spec = graph(&["a\"\\", "b"], steps);
    spec.sources[0].schema = columns(&["k", "v"]);
    let drawing = Plan::compile(spec).unwrap().dot();
    for words in [
        r#"source0 [shape=oval, label="source a\"\\\lk bigint, v bigint\l"]"#,
        r#"source0 -> stage0 [style=bold, label="exchange left, by hash of k"]"#,
        "source1 -> inlet0_1;",
        r#"inlet0_1 -> stage0 [style=bold, label="exchange right, by hash of w"]"#,
        "state: the rows of both sides, for ever; in bins, movable",
        "stage0 -> output;",
    ] {
        assert!(drawing.contains(words), "{drawing}\ndoes not say: {words}");
    }
}
