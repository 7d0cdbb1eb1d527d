//! Plans that are graphs: what compilation makes of them, and random ones on workers whose bins move, against an oracle of bags.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::group::{Cluster, Random, config, fresh, moves, read, rows};
use arrow_array::RecordBatch;
use arrow_schema::{DataType, Field, Schema, SchemaRef};
use penstock_plan::host::{Begin, End, Inline, Piece, Pulled};
use penstock_plan::spec::{AggSpec, NodeSpec, Nulls, PLAN_VERSION, SourceSpec};
use penstock_plan::{CallError, Callbacks, Emit, ForeignState, JoinHow, Origin, Plan, PlanError, PlanSpec, StepSpec};

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
    StepSpec::MapBatches { call, schema: columns(names) }
}

fn by_key() -> StepSpec {
    StepSpec::KeyBy { columns: vec!["k".into()], nulls: Nulls::Group }
}

fn total(emit: Emit) -> StepSpec {
    let sum = AggSpec { name: "v".into(), function: "sum".into(), column: Some("v".into()), ..AggSpec::default() };
    StepSpec::Agg { emit: Some(emit), aggs: vec![sum], operator: None }
}

fn joined(left: &[&str], right: &[&str]) -> StepSpec {
    joined_how(left, right, JoinHow::Inner)
}

fn joined_how(left: &[&str], right: &[&str], how: JoinHow) -> StepSpec {
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    let (left, right) = (names(left), names(right));
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

/// Call 0 adds one to v, 1 names it w, 2 makes one of v and w.
struct Calls;

impl Callbacks for Calls {
    fn map(&self, call: usize, batch: &RecordBatch) -> Result<RecordBatch, CallError> {
        let mut all = read(std::slice::from_ref(batch));
        match call {
            0 => all.iter_mut().for_each(|row| row[1] += 1),
            1 => return Ok(rows(&["k", "w"], &all)),
            2 => all = all.iter().map(|row| mixed(row[0], row[1], row[2])).collect(),
            call => panic!("call {call}"),
        }
        Ok(rows(&["k", "v"], &all))
    }

    fn new_state(&self, _: usize) -> Box<dyn ForeignState> {
        unreachable!("no step has state of its own")
    }
}

fn mixed(key: i64, v: i64, w: i64) -> Vec<i64> {
    vec![key, (31 * v + w) % 1_000]
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
    assert!(plan.explain().starts_with("source: k Int64, v Int64\nstep 0 (map_batches)"), "{}", plan.explain());
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
        ["source a: k Int64", "source b: ", "stage 0: rows of source a", "rows of stage 0 and source b and stage 1"]
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
            "the first has (k Int64, w Int64), another one (k Int64, v Int64)",
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

/// What a plan gives of these rows in pieces, between which rows meet by their hash in one of two parts.
fn in_pieces(plan: &Arc<Plan>, sources: &[Bag]) -> Bag {
    let mut routed: BTreeMap<(usize, usize), Vec<RecordBatch>> = BTreeMap::new();
    let mut output = Vec::new();
    for piece in plan.pieces() {
        let mut made = Vec::new();
        for part in 0..2 {
            let mut inline = Inline::new(plan.clone(), calls(), Some(piece)).unwrap();
            let mut given = Vec::new();
            match piece.begin {
                Begin::Source(number) => {
                    let whole = rows(&["k", "v"], &sources[number]);
                    let half = whole.num_rows() / 2;
                    given.push((
                        0,
                        if part == 0 { whole.slice(0, half) } else { whole.slice(half, whole.num_rows() - half) },
                    ));
                }
                Begin::Keyed(op) => {
                    for side in 0..plan.piece_inputs(piece).len() {
                        let leads = Piece { end: End::Keyed { op, side }, ..piece };
                        for batch in routed.get(&(op, side)).into_iter().flatten() {
                            let hashes = plan.exchange_hashes(leads, batch).unwrap().unwrap();
                            let here = (0..batch.num_rows() as u32).filter(|row| hashes[*row as usize] % 2 == part);
                            let here = arrow_array::UInt32Array::from_iter_values(here);
                            given.push((side as u8, arrow_select::take::take_record_batch(batch, &here).unwrap()));
                        }
                    }
                }
            }
            for (input, batch) in given {
                inline.push(input, &batch).unwrap();
                drain(&mut inline, &mut made);
            }
            inline.finish().unwrap();
            drain(&mut inline, &mut made);
        }
        match piece.end {
            End::Keyed { op, side } => routed.entry((op, side)).or_default().extend(made),
            End::Output => output.extend(made),
        }
    }
    read(&output)
}

fn drain(inline: &mut Inline, made: &mut Vec<RecordBatch>) {
    loop {
        match inline.pull(std::time::Duration::from_secs(1)).unwrap() {
            Pulled::Made(batches) => made.extend(batches),
            Pulled::Idle => return,
            Pulled::Working => {}
        }
    }
}

#[test]
fn random_graphs_in_pieces_equal_the_oracle() {
    for seed in 0..60 {
        let mut random = Random(7_000 + seed);
        let made = made(&mut random);
        let plan = Arc::new(Plan::compile(made.spec.clone()).unwrap());
        let bag = |random: &mut Random| -> Bag {
            (0..random.below(200)).map(|_| vec![random.below(60) as i64, random.below(9) as i64]).collect()
        };
        let sources: Vec<Bag> = plan.sources().iter().map(|_| bag(&mut random)).collect();
        let mut expected = oracle(&made.words, &sources).pop().unwrap();
        let mut given = in_pieces(&plan, &sources);
        expected.sort();
        given.sort();
        assert_eq!(given, expected, "seed {seed}: {}", plan.explain());
        // Whole, in one thread.
        let mut whole = Inline::new(plan.clone(), calls(), None).unwrap();
        let mut all = Vec::new();
        for (number, bag) in (0..).zip(&sources) {
            whole.push(number, &rows(&["k", "v"], bag)).unwrap();
            drain(&mut whole, &mut all);
        }
        whole.finish().unwrap();
        drain(&mut whole, &mut all);
        let mut all = read(&all);
        all.sort();
        assert_eq!(all, expected, "seed {seed}");
    }
}

type Bag = Vec<Vec<i64>>;

/// A plan, and what is computed at each of its nodes, in words that an oracle reads.
struct Made {
    spec: PlanSpec,
    words: Vec<Word>,
}

enum Word {
    Source(usize),
    Map(usize),
    Union(Vec<usize>),
    Total(usize),
    /// Of what comes out of a join with another node.
    Join(usize, usize, JoinHow),
    /// What only tells the next step something.
    Key,
}

/// A random graph in which every node has rows (k, v).
fn made(random: &mut Random) -> Made {
    let sources: Vec<String> = (0..1 + random.below(3)).map(|at| format!("s{at}")).collect();
    let mut words: Vec<Word> = (0..sources.len()).map(Word::Source).collect();
    let mut steps = Vec::new();
    // Nodes with rows.
    let mut whole: Vec<usize> = (0..sources.len()).collect();
    for _ in 0..2 + random.below(5) {
        let mut pick = || whole[random.below(whole.len() as u64) as usize];
        let (one, other, third) = (pick(), pick(), pick());
        let word = match random.below(5) {
            // Once, so that pairs of pairs do not fill memory.
            4 if !words.iter().any(|word| matches!(word, Word::Join(..))) => {
                Word::Join(one, other, HOWS[random.below(6) as usize])
            }
            0 => Word::Map(one),
            1 => Word::Total(one),
            2 => Word::Union(vec![one, other]),
            _ => Word::Union(vec![one, other, third]),
        };
        add(word, &mut steps, &mut words);
        whole.push(words.len() - 1);
    }
    // All that nobody takes comes out.
    let used: BTreeSet<usize> = words.iter().flat_map(inputs).collect();
    let unused: Vec<usize> = whole.into_iter().filter(|node| !used.contains(node)).collect();
    if unused.len() > 1 {
        add(Word::Union(unused), &mut steps, &mut words);
    }
    let names: Vec<&str> = sources.iter().map(String::as_str).collect();
    Made { spec: graph(&names, steps), words }
}

fn inputs(word: &Word) -> Vec<usize> {
    match word {
        Word::Source(_) | Word::Key => Vec::new(),
        Word::Map(one) | Word::Total(one) => vec![*one],
        Word::Join(one, other, _) => vec![*one, *other],
        Word::Union(all) => all.clone(),
    }
}

fn add(word: Word, steps: &mut Vec<NodeSpec>, words: &mut Vec<Word>) {
    match &word {
        Word::Source(_) | Word::Key => unreachable!("not chosen"),
        Word::Map(one) => steps.push(node(&[*one], map(0, &["k", "v"]))),
        Word::Union(all) => steps.push(node(all, StepSpec::Union {})),
        Word::Join(one, other, how) => {
            let at = words.len();
            steps.push(node(&[*other], map(1, &["k", "w"])));
            steps.push(node(&[*one, at], joined_how(&["k"], &["k"], *how)));
            steps.push(node(&[at + 1], map(if how.is_filter() { 0 } else { 2 }, &["k", "v"])));
            words.extend([Word::Key, Word::Key]);
        }
        Word::Total(one) => {
            steps.push(node(&[*one], by_key()));
            words.push(Word::Key);
            steps.push(total(Emit::Final).into());
        }
    }
    words.push(word);
}

/// Rows (k, v, w) of rows (k, v) and (k, w).
fn pairs<'a>(left: &'a Bag, right: &'a Bag) -> impl Iterator<Item = Vec<i64>> + 'a {
    let with = move |l: &'a Vec<i64>| right.iter().filter(move |r| r[0] == l[0]).map(move |r| vec![l[0], l[1], r[1]]);
    left.iter().flat_map(with)
}

const HOWS: [JoinHow; 6] = [JoinHow::Inner, JoinHow::Left, JoinHow::Right, JoinHow::Full, JoinHow::Semi, JoinHow::Anti];

/// What comes out of a join at the end: pairs (k, v, w), rows of one side with 0 for what the other would say, or left rows.
fn met(left: &Bag, right: &Bag, how: JoinHow) -> Bag {
    let has = |bag: &Bag, row: &[i64]| bag.iter().any(|other| other[0] == row[0]);
    let lone_left = || left.iter().filter(|row| !has(right, row)).map(|row| vec![row[0], row[1], 0]);
    let lone_right = || right.iter().filter(|row| !has(left, row)).map(|row| vec![row[0], 0, row[1]]);
    match how {
        JoinHow::Inner => pairs(left, right).collect(),
        JoinHow::Left => pairs(left, right).chain(lone_left()).collect(),
        JoinHow::Right => pairs(left, right).chain(lone_right()).collect(),
        JoinHow::Full => pairs(left, right).chain(lone_left()).chain(lone_right()).collect(),
        JoinHow::Semi => left.iter().filter(|row| has(right, row)).cloned().collect(),
        JoinHow::Anti => left.iter().filter(|row| !has(right, row)).cloned().collect(),
    }
}

/// The rows of each node, all at once.
fn oracle(words: &[Word], sources: &[Bag]) -> Vec<Bag> {
    let mut bags: Vec<Bag> = Vec::new();
    for word in words {
        bags.push(match word {
            Word::Source(number) => sources[*number].clone(),
            Word::Map(one) => bags[*one].iter().map(|row| vec![row[0], row[1] + 1]).collect(),
            Word::Union(all) => all.iter().flat_map(|one| bags[*one].clone()).collect(),
            Word::Total(one) => {
                let mut sums = BTreeMap::<i64, i64>::new();
                bags[*one].iter().for_each(|row| *sums.entry(row[0]).or_default() += row[1]);
                sums.into_iter().map(|(key, sum)| vec![key, sum]).collect()
            }
            Word::Join(one, other, how) => {
                let all = met(&bags[*one], &bags[*other], *how).into_iter();
                match how.is_filter() {
                    true => all.map(|row| vec![row[0], row[1] + 1]).collect(),
                    false => all.map(|pair| mixed(pair[0], pair[1], pair[2])).collect(),
                }
            }
            Word::Key => Vec::new(),
        });
    }
    bags
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
            "'k' has type Int64, 'k' has Utf8",
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

#[test]
fn random_graphs_equal_the_oracle_while_bins_move() {
    let mut joins = 0;
    for seed in 0..40 {
        let (processes, threads) = [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2)][seed as usize % 5];
        let mut random = Random(1_000 + seed);
        let made = made(&mut random);
        let plan = Arc::new(Plan::compile(made.spec.clone()).unwrap());
        let workers = processes * threads;
        joins += made.words.iter().filter(|word| matches!(word, Word::Join(..))).count();
        let cluster = Cluster::start(&config(&plan, &calls(), workers), processes, threads, 1, fresh(processes));
        let mut fed: Vec<Bag> = vec![Vec::new(); plan.sources().len()];
        let (mut given, mut migrated) = (Bag::new(), 0);
        for epoch in 0..4 {
            let mut blocks = Vec::new();
            for (number, fed) in fed.iter_mut().enumerate() {
                for _ in 0..random.below(3) {
                    let block: Bag =
                        (0..random.below(120)).map(|_| vec![random.below(60) as i64, random.below(9) as i64]).collect();
                    blocks.push((number as u8, rows(&["k", "v"], &block)));
                    fed.extend(block);
                }
            }
            cluster.release_of(epoch, &blocks, (epoch == 3).then_some(i64::MAX));
            cluster.groups[0].0.migrate(epoch, moves(&mut random, workers, epoch % 3), None);
            given.extend(read(&cluster.complete(epoch, &mut migrated).unwrap()));
        }
        let mut expected = oracle(&made.words, &fed).pop().unwrap();
        expected.sort();
        given.sort();
        assert!(given == expected, "seed {seed}: {} rows, not {}\n{}", given.len(), expected.len(), plan.explain());
        let (_, errors) = cluster.stop();
        assert!(errors.is_empty(), "seed {seed}: {errors:?}");
    }
    assert!(joins > 5, "{joins} joins in all");
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
        let plan = Plan::compile(made(&mut Random(seed)).spec).unwrap();
        let drawing = plan.dot();
        assert_eq!(edges(&drawing), ways(&plan), "seed {seed}: {drawing}");
        let is_node = |name: &String| drawing.contains(&format!("  {name} ["));
        assert!(edges(&drawing).iter().all(|(from, to)| is_node(from) && is_node(to)), "seed {seed}: {drawing}");
        let keyed = plan.keyed().count();
        assert_eq!(drawing.matches("state: ").count(), keyed, "seed {seed}: {drawing}");
        assert!(drawing.matches("exchange ").count() >= keyed, "seed {seed}: {drawing}");
    }
}

#[test]
fn a_drawing_says_what_is_exchanged_by_which_columns_and_what_is_kept() {
    let renamed = StepSpec::MapBatches { call: 0, schema: columns(&["w", "x"]) };
    let steps = vec![node(&[1], renamed), node(&[0, 2], joined(&["k"], &["w"]))];
    let mut spec = graph(&["a\"\\", "b"], steps);
    spec.sources[0].schema = columns(&["k", "v"]);
    let drawing = Plan::compile(spec).unwrap().dot();
    for words in [
        r#"source0 [shape=oval, label="source a\"\\\lk Int64, v Int64\l"]"#,
        r#"source0 -> stage0 [style=bold, label="exchange left, by hash of k"]"#,
        "source1 -> inlet0_1;",
        r#"inlet0_1 -> stage0 [style=bold, label="exchange right, by hash of w"]"#,
        "state: the rows of both sides, for ever; in bins, movable",
        "stage0 -> output;",
    ] {
        assert!(drawing.contains(words), "{drawing}\ndoes not say: {words}");
    }
}
