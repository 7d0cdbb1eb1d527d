//! Flat maps, bounded parts and loops against the obvious recursion, on groups of workers and inline; what is refused.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use arrow_array::cast::AsArray;
use arrow_array::types::Int64Type;
use arrow_array::{ArrayRef, BooleanArray, Int64Array, RecordBatch};
use arrow_schema::{DataType, Field, Schema, SchemaRef};
use crossbeam::channel::{Receiver, unbounded};
use penstock_dataflow::fabric;
use penstock_plan::host::{
    Event, Group, GroupConfig, HostError, Inline, PartitionRows, Pulled, Resident, Rows, ScopeStats,
};
use penstock_plan::spec::{OnFailure, SourceSpec};
use penstock_plan::{
    CallError, Callbacks, Expansion, ForeignState, Plan, PlanError, PlanSpec, SideRows, Spoiled, StepSpec,
};
use proptest::prelude::*;

const PATIENCE: Duration = Duration::from_secs(60);
const POISON: i64 = -7;

fn columns(again: bool) -> SchemaRef {
    let n = Field::new("n", DataType::Int64, false);
    let fields = if again { vec![n, Field::new("again", DataType::Boolean, true)] } else { vec![n] };
    Arc::new(Schema::new(fields))
}

fn batch(values: impl IntoIterator<Item = i64>) -> RecordBatch {
    let column: ArrayRef = Arc::new(Int64Array::from_iter_values(values));
    RecordBatch::try_new(columns(false), vec![column]).unwrap()
}

fn values(rows: &RecordBatch) -> Vec<i64> {
    rows.column(0).as_primitive::<Int64Type>().values().to_vec()
}

/// Three kinds of functions: each value plus one; as many rows of each value as it has left over by four; a round of a loop that halves.
#[derive(Default)]
struct Functions {
    drawn: Arc<AtomicU64>,
}

const PLUS: usize = 0;
const FLAT: usize = 1;
const HALVE: usize = 2;
const ENDLESS: usize = 3;

fn flat(value: i64) -> Vec<i64> {
    (0..value.rem_euclid(4)).map(|at| 3 * value + at).collect()
}

impl Callbacks for Functions {
    fn map(&self, call: usize, batch: &RecordBatch, _: &mut SideRows) -> Result<RecordBatch, CallError> {
        let n = batch.column(0).as_primitive::<Int64Type>();
        if call == PLUS {
            return Ok(self::batch(n.values().iter().map(|n| n + 1)));
        }
        let halves: Int64Array = n.values().iter().map(|n| n / 2).collect();
        let again: BooleanArray = halves.values().iter().map(|n| if *n > 9 { Some(true) } else { None }).collect();
        Ok(RecordBatch::try_new(columns(true), vec![Arc::new(halves), Arc::new(again)]).unwrap())
    }

    fn new_state(&self, _: usize) -> Box<dyn ForeignState> {
        unreachable!("no step keeps state")
    }

    fn expand(&self, call: usize, batch: &RecordBatch, _: bool) -> Result<Box<dyn Expansion>, CallError> {
        Ok(match call {
            ENDLESS => Box::new(Endless(self.drawn.clone())),
            _ => Box::new(Each { inputs: values(batch).into(), made: VecDeque::new() }),
        })
    }
}

struct Each {
    inputs: VecDeque<i64>,
    made: VecDeque<i64>,
}

impl Expansion for Each {
    fn left(&self) -> u64 {
        self.inputs.len() as u64 + u64::from(!self.made.is_empty())
    }

    fn draw(&mut self, room: usize, _: &mut SideRows) -> (Vec<RecordBatch>, Result<(), Spoiled>) {
        let mut rows = Vec::new();
        let mut outcome = Ok(());
        while rows.len() < room && outcome.is_ok() {
            match (self.made.pop_front(), self.inputs.front()) {
                (Some(made), _) => rows.push(made),
                (None, None) => break,
                (None, Some(&POISON)) => {
                    let input = Some((POISON.to_string(), 0));
                    outcome = Err(Spoiled { input, error: CallError::new("flat", "poisoned") });
                    self.inputs.pop_front();
                }
                (None, Some(&input)) => {
                    self.made.extend(flat(input));
                    self.inputs.pop_front();
                }
            }
        }
        (vec![batch(rows)], outcome)
    }
}

struct Endless(Arc<AtomicU64>);

impl Expansion for Endless {
    fn left(&self) -> u64 {
        1
    }

    fn draw(&mut self, room: usize, _: &mut SideRows) -> (Vec<RecordBatch>, Result<(), Spoiled>) {
        let from = self.0.fetch_add(room as u64, Ordering::Relaxed) as i64;
        (vec![batch(from..from + room as i64)], Ok(()))
    }
}

// Chains

#[derive(Clone, Debug)]
enum Op {
    Plus,
    Flat,
    Bounded(Option<u64>, Option<u64>, Vec<Op>),
    Loop(Vec<Op>),
}

fn steps(ops: &[Op]) -> Vec<StepSpec> {
    let step = |op: &Op| match op {
        Op::Plus => StepSpec::MapBatches { call: PLUS, schema: columns(false), sides: vec![] },
        Op::Flat => StepSpec::FlatMap { call: FLAT, schema: columns(false), rows: true, sides: vec![] },
        Op::Bounded(batches, batch_size, body) => bounded(*batches, *batch_size, OnFailure::Stop, steps(body)),
        Op::Loop(body) => {
            let round = StepSpec::MapBatches { call: HALVE, schema: columns(true), sides: vec![] };
            StepSpec::Iterate { again: "again".into(), body: steps(body).into_iter().chain([round]).collect() }
        }
    };
    ops.iter().map(step).collect()
}

fn bounded(batches: Option<u64>, batch_size: Option<u64>, on_failure: OnFailure, body: Vec<StepSpec>) -> StepSpec {
    StepSpec::Bounded { batches, batch_size, memory: None, on_failure, body }
}

fn naive(ops: &[Op], value: i64) -> Vec<i64> {
    let Some((first, rest)) = ops.split_first() else { return vec![value] };
    let made = match first {
        Op::Plus => vec![value + 1],
        Op::Flat => flat(value),
        Op::Bounded(.., body) => naive(body, value),
        Op::Loop(body) => {
            let (mut around, mut done) = (vec![value], Vec::new());
            while let Some(value) = around.pop() {
                for half in naive(body, value).into_iter().map(|made| made / 2) {
                    if half > 9 { around.push(half) } else { done.push(half) }
                }
            }
            done
        }
    };
    made.into_iter().flat_map(|made| naive(rest, made)).collect()
}

fn has_loop(ops: &[Op]) -> bool {
    ops.iter().any(|op| match op {
        Op::Loop(_) => true,
        Op::Bounded(.., body) => has_loop(body),
        _ => false,
    })
}

fn chains() -> impl Strategy<Value = Vec<Op>> {
    let leaf = prop_oneof![Just(Op::Plus), Just(Op::Flat)];
    let bound = || proptest::option::of(1_u64..4);
    let op = leaf.prop_recursive(4, 12, 3, move |inner| {
        let body = prop::collection::vec(inner, 0..3);
        prop_oneof![
            3 => (bound(), bound(), body.clone()).prop_map(|(n, b, body)| Op::Bounded(n, b, body)),
            // In a loop what is made must not grow as fast as it is halved.
            1 => body.prop_map(|body| Op::Loop(body.into_iter().filter(|op| !matches!(op, Op::Flat | Op::Loop(_))).collect())),
        ]
    });
    prop::collection::vec(op, 1..4).prop_filter("loops end", |ops| ops.iter().all(ends))
}

/// Whether a loop in it has no flat map anywhere: three times a value is more than what halving takes away.
fn ends(op: &Op) -> bool {
    fn flat_free(ops: &[Op]) -> bool {
        ops.iter().all(|op| match op {
            Op::Plus => true,
            Op::Flat => false,
            Op::Bounded(.., body) | Op::Loop(body) => flat_free(body),
        })
    }
    match op {
        Op::Loop(body) => flat_free(body),
        Op::Bounded(.., body) => body.iter().all(ends),
        _ => true,
    }
}

fn spec(steps: Vec<StepSpec>) -> PlanSpec {
    let source = SourceSpec {
        name: "input".into(),
        schema: columns(false),
        event_time: None,
        lateness_ms: 0,
        order_by: Vec::new(),
        idle_after_ms: None,
    };
    PlanSpec::line(source, steps)
}

fn plan(steps: Vec<StepSpec>) -> Arc<Plan> {
    let spec = spec(steps);
    assert_eq!(PlanSpec::from_json(&spec.to_json()).unwrap(), spec);
    Arc::new(Plan::compile(spec).unwrap())
}

// Hosts

fn start(plan: &Arc<Plan>, functions: Functions, workers: usize, eager: bool) -> (Group, Receiver<Event>) {
    let mut config = GroupConfig::founding(plan.clone(), Arc::new(functions), 4, workers as u32);
    (config.eager, config.slice_rows) = (eager, 7);
    let (send, events) = unbounded();
    let group = Group::start(config, fabric::threads(workers), Resident::fresh(), send);
    (group.map_err(|refused| refused.error).unwrap(), events)
}

fn release(group: &Group, epoch: u64, rows: &[i64], last: bool) {
    let input =
        PartitionRows { source: 0, partition: 0, batches: vec![batch(rows.iter().copied()).into()], rows_before: 0 };
    group.release(epoch, vec![input], last.then_some(i64::MAX)).unwrap();
}

/// What a group makes of some epochs, and the figures of its scopes.
fn by_group(plan: &Arc<Plan>, epochs: &[Vec<i64>], workers: usize, eager: bool) -> (Vec<i64>, Vec<ScopeStats>) {
    let (group, events) = start(plan, Functions::default(), workers, eager);
    for (epoch, rows) in epochs.iter().enumerate() {
        release(&group, epoch as u64, rows, epoch + 1 == epochs.len());
    }
    let (mut got, mut done) = (Vec::new(), 0);
    while done < epochs.len() * workers {
        match events.recv_timeout(PATIENCE).expect("nothing hangs") {
            Event::EpochDone { outputs, .. } => {
                assert!(!eager || outputs.is_empty());
                got.extend(outputs.into_iter().map(Rows::into_here).flat_map(|rows| values(&rows)));
                done += 1;
            }
            Event::Rows { rows, worker, bytes, .. } => {
                got.extend(values(&rows));
                group.taken(worker, bytes);
            }
            other => panic!("{other:?}"),
        }
    }
    let scopes = group.stats().workers.into_iter().flat_map(|worker| worker.scopes).collect();
    assert!(group.stop().1.is_none());
    (got, scopes)
}

fn pulled(inline: &mut Inline) -> Result<Vec<i64>, HostError> {
    let mut all = Vec::new();
    loop {
        match inline.pull(PATIENCE)? {
            Pulled::Made(made) => all.extend(made.iter().flat_map(values)),
            Pulled::Working => panic!("a minute has passed"),
            Pulled::Idle => return Ok(all),
        }
    }
}

proptest! {
    #![proptest_config(penstock_cases::cases(48))]
    #[test]
    fn any_chain_is_the_obvious_recursion(
        ops in chains(),
        epochs in prop::collection::vec(prop::collection::vec(0_i64..100, 0..20), 1..4),
        workers in 1_usize..4,
        eager in any::<bool>(),
    ) {
        let plan = plan(steps(&ops));
        let mut expected: Vec<i64> = epochs.iter().flatten().flat_map(|value| naive(&ops, *value)).collect();
        let (mut got, scopes) = by_group(&plan, &epochs, workers, eager);
        for scope in &scopes {
            prop_assert!(scope.unfinished == 0 && scope.buffered == 0 && scope.holding.is_none(), "{scope:?}");
            if scope.phase == "fixed" {
                prop_assert!(scope.maximum <= scope.batches, "{scope:?}");
                // Behind a loop a time may get rows after a later one was begun, and has a window of its own then.
                let most = scope.batches * scope.batch_size;
                prop_assert!(scope.maximum_rows <= most || has_loop(&ops), "{scope:?}");
            }
        }
        let mut inline = Inline::new(plan, Arc::new(Functions::default()), None).unwrap();
        let mut one = Vec::new();
        for rows in &epochs {
            inline.push(0, &batch(rows.iter().copied())).unwrap();
            one.extend(pulled(&mut inline).unwrap());
        }
        inline.finish().unwrap();
        one.extend(pulled(&mut inline).unwrap());
        if has_loop(&ops) || workers > 1 {
            got.sort_unstable();
        }
        if has_loop(&ops) {
            one.sort_unstable();
        }
        let in_order = expected.clone();
        expected.sort_unstable();
        prop_assert_eq!(&one, if has_loop(&ops) { &expected } else { &in_order });
        prop_assert_eq!(&got, if has_loop(&ops) || workers > 1 { &expected } else { &in_order });
    }
}

#[test]
fn a_flow_that_nobody_takes_stands_still() {
    let endless = || StepSpec::FlatMap { call: ENDLESS, schema: columns(false), rows: false, sides: vec![] };
    let plan = plan(vec![endless()]);
    let functions = Functions::default();
    let drawn = functions.drawn.clone();
    let mut inline = Inline::new(plan.clone(), Arc::new(functions), None).unwrap();
    inline.push(0, &batch([1])).unwrap();
    assert_eq!(drawn.load(Ordering::Relaxed), 0, "nothing happens before a pull");
    let mut rows = 0;
    for _ in 0..3 {
        let Pulled::Made(made) = inline.pull(PATIENCE).unwrap() else { panic!("there is always more") };
        rows += made.iter().map(RecordBatch::num_rows).sum::<usize>() as u64;
        assert!(drawn.load(Ordering::Relaxed) <= rows + 2_048, "{drawn:?} for {rows}");
    }

    let functions = Functions::default();
    let drawn = functions.drawn.clone();
    let (group, events) = start(&plan, functions, 1, true);
    release(&group, 0, &[1], true);
    // Eight megabytes of nine bytes a row, and what one more turn makes.
    let limit = (8 << 20) / 9 + 20_000;
    let (mut rows, mut told) = (0, Vec::new());
    while rows * 9 < 8 << 20 {
        let Event::Rows { worker, rows: made, bytes, .. } = events.recv_timeout(PATIENCE).unwrap() else { panic!() };
        rows += made.num_rows() as u64;
        told.push((worker, bytes));
    }
    assert!(events.recv_timeout(Duration::from_millis(200)).is_err(), "told more than may be untaken");
    assert!(drawn.load(Ordering::Relaxed) < limit);
    for (worker, bytes) in told {
        group.taken(worker, bytes);
    }
    assert!(matches!(events.recv_timeout(PATIENCE), Ok(Event::Rows { .. })));
    assert!(group.stop().1.is_none(), "a group that waits for its host can be stopped");
}

#[test]
fn an_input_that_fails_stops_the_flow_or_is_left_out() {
    let flat = || vec![StepSpec::FlatMap { call: FLAT, schema: columns(false), rows: true, sides: vec![] }];
    let run = |on_failure| {
        let plan = plan(vec![bounded(Some(1), Some(2), on_failure, flat())]);
        let mut inline = Inline::new(plan, Arc::new(Functions::default()), None).unwrap();
        inline.push(0, &batch([3, POISON, 2])).unwrap();
        (pulled(&mut inline), inline.scopes())
    };
    let (outcome, _) = run(OnFailure::Stop);
    assert!(matches!(outcome, Err(HostError::Call(error)) if error.message == "poisoned"));
    let (outcome, scopes) = run(OnFailure::Skip);
    assert_eq!(outcome.unwrap(), [9, 10, 11, 6, 7]);
    assert_eq!((scopes.len(), scopes[0].failed, scopes[0].failures.len()), (1, 1, 1));
    assert!(scopes[0].failures[0].contains("-7") && scopes[0].failures[0].contains("poisoned"), "{scopes:?}");
}

#[test]
fn what_cannot_be_is_refused_by_name() {
    let refused = |steps: Vec<StepSpec>| Plan::compile(spec(steps)).unwrap_err();
    let keyed = StepSpec::KeyBy { columns: vec!["n".into()], nulls: Default::default() };
    let deep =
        vec![bounded(None, None, OnFailure::Stop, vec![bounded(None, None, OnFailure::Stop, vec![keyed.clone()])])];
    let error = refused(deep);
    assert!(matches!(error, PlanError::Misplaced { .. }));
    assert!(error.to_string().starts_with("step 0.0.0 (key_by): a bounded part or a loop holds steps without state"));
    for (batches, batch_size) in [(Some(0), None), (Some(1), Some(0)), (Some(1 << 40), None), (None, Some(1 << 60))] {
        let error = refused(vec![bounded(batches, batch_size, OnFailure::Stop, Vec::new())]);
        assert!(matches!(error, PlanError::Bounds { .. }), "{error}");
    }
    let loop_ = |body| vec![StepSpec::Iterate { again: "again".into(), body }];
    let error = refused(loop_(vec![StepSpec::MapBatches { call: PLUS, schema: columns(false), sides: vec![] }]));
    assert_eq!(
        error.to_string(),
        "step 0 (iterate): the body must give back (n bigint, again boolean), it gives (n bigint)"
    );
    let error = refused(vec![StepSpec::Iterate { again: "n".into(), body: Vec::new() }]);
    assert!(matches!(error, PlanError::DuplicateColumn { .. }));
    let error = refused(vec![keyed, bounded(None, None, OnFailure::Stop, Vec::new())]);
    assert!(matches!(error, PlanError::Misplaced { .. }));
}
