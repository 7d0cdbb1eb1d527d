//! Random plans: graphs of one to three sources and some steps, in which all that nobody takes comes out at the end.
//!
//! Invariant: what comes out is a function of the rows of each epoch, not of their order, but where a step is asked for that the order of a source's
//! rows changes.

use arrow_schema::{DataType, SchemaRef};
use penstock_plan::spec::{AggSpec, NodeSpec, Nulls, OnFailure, PLAN_VERSION, Per, SideSpec, SourceSpec, WindowKind};
use penstock_plan::{Emit, JoinHow, PlanSpec, StepSpec};

use super::functions::Call;
use super::oracle::Shape;
use super::{PLAIN, schema};
use crate::group::Random;

/// A plan and its functions.
pub(crate) struct Made {
    pub(crate) spec: PlanSpec,
    pub(crate) calls: Vec<Call>,
}

/// Rows that the steps of a plan may have, about: the oracle looks at all pairs.
const MOST: u64 = 1_200;

/// A node that a step may take.
#[derive(Clone)]
struct Point {
    node: usize,
    /// About how many rows there are in all.
    rows: u64,
    /// Whether its rows have the order of those of a source.
    ordered: bool,
    used: bool,
}

struct Making<'a> {
    random: &'a mut Random,
    spec: PlanSpec,
    calls: Vec<Call>,
    shapes: Vec<Shape>,
    points: Vec<Point>,
}

const HOWS: [JoinHow; 6] = [JoinHow::Inner, JoinHow::Left, JoinHow::Right, JoinHow::Full, JoinHow::Semi, JoinHow::Anti];
/// Sizes and distances of windows: side by side, overlapping by little and by much, and with gaps between them.
const WINDOWS: [(i64, i64); 7] = [(10, 10), (7, 7), (20, 5), (12, 4), (30, 5), (15, 6), (5, 15)];

/// A random plan for so many epochs.
pub(crate) fn made(random: &mut Random, epochs: u64) -> Made {
    let sources: Vec<SourceSpec> = (0..1 + random.below(3)).map(|at| source(random, at)).collect();
    let shapes = sources.iter().map(Shape::of_source).collect();
    let point = |node| Point { node, rows: 20 * epochs, ordered: true, used: false };
    let points = (0..sources.len()).map(point).collect();
    let spec = PlanSpec { version: PLAN_VERSION, sources, steps: Vec::new() };
    let mut making = Making { random, spec, calls: Vec::new(), shapes, points };
    for _ in 0..2 + making.random.below(5) {
        making.step();
    }
    if !making.spec.steps.iter().any(|node| is_keyed(&node.step)) {
        making.aggregate(0);
    }
    making.end();
    Made { spec: making.spec, calls: making.calls }
}

fn is_keyed(step: &StepSpec) -> bool {
    use StepSpec::*;
    matches!(step, Agg { .. } | Distinct { .. } | Top { .. } | Join { .. } | StatefulMap { .. })
}

fn source(random: &mut Random, at: u64) -> SourceSpec {
    let event_time = (random.below(10) > 0).then(|| "t".to_owned());
    let lateness_ms = [0, 5, 20][random.below(3) as usize];
    let idle_after_ms = (random.below(3) == 0).then_some(150);
    let schema = schema(&PLAIN, false);
    SourceSpec { name: format!("s{at}"), schema, event_time, lateness_ms, order_by: Vec::new(), idle_after_ms }
}

impl Making<'_> {
    fn chance(&mut self, percent: u64) -> bool {
        self.random.below(100) < percent
    }

    fn push(&mut self, inputs: &[usize], step: StepSpec) -> usize {
        let shapes: Vec<&Shape> = inputs.iter().map(|at| &self.shapes[*at]).collect();
        self.shapes.push(Shape::behind(&step, &shapes));
        self.spec.steps.push(NodeSpec { inputs: inputs.to_vec(), step });
        self.shapes.len() - 1
    }

    /// A node that later steps may take.
    fn tell(&mut self, mut node: usize, rows: u64) {
        if !KEYS.iter().any(|kind| self.has_any(node, kind)) {
            node = self.plain(node);
        }
        self.points.push(Point { node, rows, ordered: false, used: false });
    }

    /// A point, rather a late one, that a step takes.
    fn pick(&mut self) -> usize {
        let count = self.points.len() as u64;
        self.random.below(count).max(self.random.below(count)) as usize
    }

    fn call(&mut self, call: Call) -> usize {
        self.calls.push(call);
        self.calls.len() - 1
    }

    /// Up to two side outputs of a call: mostly none.
    fn sides(&mut self, call: usize) -> Vec<SideSpec> {
        let count = [0, 0, 0, 0, 1, 2][self.random.below(6) as usize];
        let side = |at| SideSpec { name: format!("side {call}.{at}"), schema: schema(&PLAIN, false) };
        (0..count).map(side).collect()
    }

    /// A column of some types, by its name.
    fn column(&mut self, node: usize, kinds: &[DataType]) -> String {
        let fields = self.shapes[node].schema.fields().iter().filter(|field| kinds.contains(field.data_type()));
        let names: Vec<String> = fields.map(|field| field.name().clone()).collect();
        assert!(!names.is_empty(), "no column of {kinds:?}");
        names[self.random.below(names.len() as u64) as usize].clone()
    }

    fn has_any(&self, node: usize, kind: &DataType) -> bool {
        self.shapes[node].schema.fields().iter().any(|field| field.data_type() == kind)
    }

    /// Some columns that may be keys.
    fn keys(&mut self, node: usize, count: u64) -> Vec<String> {
        let mut keys: Vec<String> = (0..count).map(|_| self.column(node, &KEYS)).collect();
        keys.sort_unstable();
        keys.dedup();
        keys
    }

    /// The node with the plain columns.
    fn plain(&mut self, node: usize) -> usize {
        let shape = self.shapes[node].clone();
        let names = |schema: &SchemaRef| -> Vec<String> { schema.fields().iter().map(|f| f.name().clone()).collect() };
        let plain = schema(&PLAIN, false);
        if names(&shape.schema) == names(&plain) && shape.schema.field(2).data_type() == &DataType::Int64 {
            return node;
        }
        let at = |kind: DataType| {
            let fields = shape.schema.fields().iter().enumerate();
            fields.filter(|(_, field)| *field.data_type() == kind).map(|(at, _)| at).collect::<Vec<_>>()
        };
        let (ints, texts) = (at(DataType::Int64), at(DataType::Utf8));
        let key = ints.iter().copied().find(|at| Some(*at) != shape.time).filter(|_| self.chance(70));
        let call = self.call(Call::Plain { key, time: shape.time, text: texts.first().copied() });
        let sides = self.sides(call);
        self.push(&[node], StepSpec::MapBatches { call, schema: plain, sides })
    }

    fn step(&mut self) {
        let at = self.pick();
        let point = self.points[at].clone();
        let shape = self.shapes[point.node].clone();
        let small = point.rows <= MOST;
        match self.random.below(17) {
            0 => self.map(at),
            1 => self.some(at),
            2 | 3 => self.expand(at),
            4 => self.union(at),
            5 | 6 => self.stateful(at),
            7..=9 if small && !shape.updates => self.aggregate(at),
            10 if small && !shape.updates => self.distinct(at),
            11 | 12 if small && !shape.updates => self.top(at),
            _ if small && !shape.updates => self.join(at),
            _ => self.stateful(at),
        }
    }

    fn map(&mut self, at: usize) {
        let Point { node, rows, .. } = self.points[at];
        self.points[at].used = true;
        let time = self.shapes[node].time;
        let call = self.call(Call::Plain { key: None, time, text: None });
        let sides = self.sides(call);
        let made = self.push(&[node], StepSpec::MapBatches { call, schema: schema(&PLAIN, false), sides });
        self.tell(made, rows);
    }

    fn some(&mut self, at: usize) {
        let Point { node, rows, ordered, .. } = self.points[at];
        self.points[at].used = true;
        let schema = self.shapes[node].schema.clone();
        let call = self.call(Call::Some(schema.clone()));
        let sides = self.sides(call);
        let made = self.push(&[node], StepSpec::MapBatches { call, schema, sides });
        self.points.push(Point { node: made, rows, ordered, used: false });
    }

    /// A flat map, the same where it is bounded, or a loop.
    fn expand(&mut self, at: usize) {
        let Point { node, rows, .. } = self.points[at];
        self.points[at].used = true;
        let node = self.plain(node);
        let (which, each) = (self.random.below(3), self.chance(50));
        let call = self.call(if which == 2 { Call::Halves } else { Call::Copies { each } });
        let sides = self.sides(call);
        let flat = StepSpec::FlatMap { call, schema: schema(&PLAIN, false), rows: each, sides: sides.clone() };
        let step = match which {
            0 => flat,
            1 => {
                let (batches, batch_size) = (Some(1 + self.random.below(3)), Some(1 + self.random.below(4)));
                StepSpec::Bounded { batches, batch_size, memory: None, on_failure: OnFailure::Stop, body: vec![flat] }
            }
            _ => {
                let body = vec![StepSpec::MapBatches { call, schema: schema(&PLAIN, true), sides }];
                StepSpec::Iterate { again: "again".into(), body }
            }
        };
        let made = self.push(&[node], step);
        self.tell(made, rows);
    }

    fn union(&mut self, at: usize) {
        let mut all = vec![at];
        for _ in 0..=self.random.below(2) {
            all.push(self.pick());
        }
        let mut rows = 0;
        let mut nodes = Vec::new();
        for at in all {
            self.points[at].used = true;
            rows += self.points[at].rows;
            nodes.push(self.plain(self.points[at].node));
        }
        let made = self.push(&nodes, StepSpec::Union {});
        self.tell(made, rows);
    }

    fn stateful(&mut self, at: usize) {
        let Point { node, rows, ordered, .. } = self.points[at];
        self.points[at].used = true;
        let in_order = ordered && self.chance(50);
        let node = self.plain(node);
        let call = self.call(if in_order { Call::Orders } else { Call::Sums });
        let (columns, schema) = (vec!["k".to_owned()], schema(&PLAIN, false));
        let (name, operator, sides) = ("keeps".to_owned(), None, self.sides(call));
        let step = StepSpec::StatefulMap { call, ends: !in_order, columns, schema, name, operator, sides };
        let made = self.push(&[node], step);
        self.tell(made, if in_order { rows } else { 3 * rows });
    }

    /// A window step behind a node: how often a row is in one.
    fn window(&mut self, node: usize, sessions: bool) -> (StepSpec, u64) {
        assert!(self.shapes[node].time.is_some());
        if sessions {
            let size_us = [5_000, 8_000][self.random.below(2) as usize];
            let (kind, every_us, offset_us, zone) = (WindowKind::Session, None, None, None);
            return (StepSpec::Window { kind, size_us, every_us, offset_us, zone }, 1);
        }
        let (size, every) = WINDOWS[self.random.below(WINDOWS.len() as u64) as usize];
        let (kind, every_us) = match size == every {
            true => (WindowKind::Tumbling, None),
            false => (WindowKind::Sliding, Some(every * 1_000)),
        };
        let offset_us = self.chance(50).then(|| self.random.below(every as u64) as i64 * 1_000);
        let step = StepSpec::Window { kind, size_us: size * 1_000, every_us, offset_us, zone: None };
        (step, (size / every).max(1) as u64)
    }

    fn aggregate(&mut self, at: usize) {
        let Point { node, mut rows, .. } = self.points[at];
        self.points[at].used = true;
        let timed = self.shapes[node].time.is_some();
        let mut last = node;
        let keys = self.random.below(3);
        let keys = self.keys(node, keys);
        if !keys.is_empty() {
            last = self.push(&[last], StepSpec::KeyBy { columns: keys.clone(), nulls: Nulls::Group });
        }
        let windowed = timed && self.chance(75);
        let mut emit = None;
        if windowed {
            let sessions = !keys.is_empty() && self.chance(30);
            let (window, times) = self.window(node, sessions);
            rows *= times;
            last = self.push(&[last], window);
        } else {
            emit = Some(if self.chance(50) { Emit::Update } else { Emit::Final });
        }
        let number = self.spec.steps.len();
        let count = 1 + self.random.below(4);
        let aggs: Vec<AggSpec> = (0..count).map(|at| self.function(node, format!("a{number}_{at}"))).collect();
        let counts = aggs.iter().find(|agg| agg.function == "count").map(|agg| agg.name.clone());
        last = self.push(&[last], StepSpec::Agg { emit, aggs, operator: None });
        if windowed && self.chance(35) {
            let by = counts.unwrap_or_else(|| self.column(last, &KEYS));
            let (n, descending) = (1 + self.random.below(3), self.chance(70));
            last = self.push(&[last], StepSpec::Top { n, by, descending, per: Per::Window, operator: None });
        }
        self.tell(last, rows);
    }

    fn function(&mut self, node: usize, name: String) -> AggSpec {
        let timed = self.shapes[node].time.is_some();
        let mut agg = AggSpec { name, ..AggSpec::default() };
        let functions = [
            "count",
            "count",
            "sum",
            "sum",
            "min",
            "max",
            "mean",
            "variance",
            "stddev_pop",
            "count_distinct",
            "min_by",
            "max_by",
            "first",
            "last",
        ];
        let most = if timed { functions.len() } else { functions.len() - 2 };
        agg.function = functions[self.random.below(most as u64) as usize].to_owned();
        let numeric = matches!(&*agg.function, "sum" | "mean" | "variance" | "stddev_pop");
        let kinds = if numeric && self.has_any(node, &DataType::Int64) { &KEYS[..1] } else { &KEYS[..] };
        if numeric && kinds.len() > 1 {
            agg.function = "count".to_owned();
        }
        if agg.function != "count" || self.chance(40) {
            agg.column = Some(self.column(node, kinds));
        }
        if matches!(&*agg.function, "min_by" | "max_by") {
            agg.by = Some(self.column(node, &KEYS));
        }
        agg
    }

    fn distinct(&mut self, at: usize) {
        let Point { node, mut rows, .. } = self.points[at];
        self.points[at].used = true;
        let count = 1 + self.random.below(3);
        let columns = self.keys(node, count);
        let mut last = node;
        if self.shapes[node].time.is_some() && self.chance(50) {
            let (window, times) = self.window(node, false);
            rows *= times;
            last = self.push(&[node], window);
        }
        let made = self.push(&[last], StepSpec::Distinct { columns, operator: None });
        self.tell(made, rows);
    }

    fn top(&mut self, at: usize) {
        let Point { node, mut rows, .. } = self.points[at];
        self.points[at].used = true;
        let (n, descending, by) = (1 + self.random.below(3), self.chance(50), self.column(node, &KEYS));
        let mut per = match self.random.below(2) {
            0 => Per::All,
            _ => Per::Columns(self.keys(node, 1)),
        };
        let (mut last, shape) = (node, self.shapes[node].clone());
        let raw = shape.time.is_some() && self.chance(75);
        if raw {
            let (window, times) = self.window(node, false);
            rows *= times;
            last = self.push(&[node], window);
        }
        if raw || shape.windowed && self.chance(75) {
            per = match self.random.below(3) {
                0 => {
                    let mut columns = self.keys(node, 1);
                    columns.retain(|name| name != "window_end");
                    columns.push("window_end".into());
                    Per::Columns(columns)
                }
                _ => Per::Window,
            };
        }
        let made = self.push(&[last], StepSpec::Top { n, by, descending, per, operator: None });
        self.tell(made, rows);
    }

    fn join(&mut self, at: usize) {
        let other = self.pick();
        let (one, two) = (self.points[at].clone(), self.points[other].clone());
        if two.rows > MOST || self.shapes[two.node].updates {
            return self.stateful(at);
        }
        (self.points[at].used, self.points[other].used) = (true, true);
        let wide = |making: &Self, node: usize| making.shapes[node].schema.fields().len() > 9;
        let mut nodes = [one.node, two.node];
        for node in &mut nodes {
            if wide(self, *node) {
                *node = self.plain(*node);
            }
        }
        let timed = nodes.iter().all(|node| self.shapes[*node].time.is_some());
        let both = |kind: &DataType| nodes.iter().all(|node| self.has_any(*node, kind));
        let mut kinds: Vec<DataType> = KEYS.iter().filter(|kind| both(kind)).cloned().collect();
        if kinds.is_empty() {
            nodes = nodes.map(|node| self.plain(node));
            kinds = KEYS.to_vec();
        }
        let mut how = HOWS[self.random.below(6) as usize];
        let near = if timed { self.random.below(4) } else { 0 };
        let mut rows = one.rows * two.rows / if near == 0 { 8 } else { 24 };
        if rows > MOST {
            how = HOWS[4 + self.random.below(2) as usize];
        }
        if how.is_filter() {
            rows = one.rows;
        }
        let (mut left, mut right) = (Vec::new(), Vec::new());
        let keyed = nodes.iter().all(|node| self.shapes[*node].schema.index_of("k").is_ok());
        if keyed && self.chance(70) {
            left.push("k".to_owned());
            right.push("k".to_owned());
        }
        for _ in 0..if left.is_empty() { 1 } else { u64::from(self.chance(20)) } {
            let kind = &kinds[self.random.below(kinds.len() as u64) as usize..][..1];
            let [one, two] = nodes.map(|node| self.column(node, kind));
            if !left.contains(&one) && !right.contains(&two) {
                left.push(one);
                right.push(two);
            }
        }
        let lower = self.random.below(30) as i64 - 15;
        let within = (near == 1).then(|| (lower * 1_000, (lower + self.random.below(20) as i64) * 1_000));
        let until = (near == 2).then(|| self.column(nodes[0], &KEYS[..1]));
        if near == 3 {
            let (window, times) = self.window(nodes[0], false);
            rows *= times;
            nodes = nodes.map(|node| self.push(&[node], window.clone()));
        }
        let suffix = Some(format!("_{}", self.spec.steps.len()));
        let (validate, windowed, operator) = (None, near == 3, None);
        let step = StepSpec::Join { left, right, how, within, until, validate, windowed, suffix, operator };
        let made = self.push(&nodes, step);
        self.tell(made, rows);
    }

    /// Brings all that nobody takes to one end.
    fn end(&mut self) {
        let unused: Vec<usize> = self.points.iter().filter(|point| !point.used).map(|point| point.node).collect();
        if let [only] = unused[..] {
            assert_eq!(only, self.shapes.len() - 1, "the last node");
            return;
        }
        let nodes: Vec<usize> = unused.into_iter().map(|node| self.plain(node)).collect();
        self.push(&nodes, StepSpec::Union {});
    }
}

/// Types of columns that may be keys.
const KEYS: [DataType; 2] = [DataType::Int64, DataType::Utf8];
