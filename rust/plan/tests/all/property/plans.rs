//! Random plans: graphs of one to three sources and some steps, in which all that nobody takes comes out at the end.
//!
//! Invariant: what comes out is a function of the rows of each epoch, not of their order, but where a step is asked for that the order of a source's
//! rows changes.
//!
//! Most have times of a few milliseconds around 1970. Some have the same times [in hours](Clock), around a change of clocks in some zone, and windows
//! that are days of it.

use std::sync::Arc;

use arrow_schema::{DataType, Field, Schema, SchemaRef};
use jiff::Timestamp;
use penstock_plan::spec::{
    AggSpec, NodeSpec, Nulls, OnFailure, PLAN_VERSION, Per, SideSpec, SourceSpec, Validate, WindowKind,
};
use penstock_plan::{Emit, JoinHow, PlanSpec, StepSpec};

use super::functions::{Call, Gather, Groups, Timeout};
use super::oracle::Shape;
use super::{PLAIN, schema};
use crate::group::Random;

/// A plan, its functions, and what its times are.
pub(crate) struct Made {
    pub(crate) spec: PlanSpec,
    pub(crate) calls: Vec<Call>,
    pub(crate) clock: Clock,
}

/// The times of a plan: steps from a beginning on, in milliseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    pub(crate) base: i64,
    pub(crate) unit: i64,
    /// Whose days windows may be.
    zone: Option<&'static str>,
}

const HALF_HOUR: i64 = 1_800_000;
const HALVES: i64 = 48;
const DAY: i64 = HALVES * HALF_HOUR;

/// Zones, and instants at which their clocks are changed: by an hour at night, at midnight forwards and back, by half an hour; by a day that is left
/// out, and by one that almost comes twice.
pub(super) const CHANGES: [(&str, &str); 7] = [
    ("Europe/Berlin", "2024-03-31T01:00:00Z"),
    ("Europe/Berlin", "2024-10-27T01:00:00Z"),
    ("America/Sao_Paulo", "2017-10-15T03:00:00Z"),
    ("America/Sao_Paulo", "2018-02-18T02:00:00Z"),
    ("Australia/Lord_Howe", "2024-04-06T15:00:00Z"),
    ("Pacific/Apia", "2011-12-30T10:00:00Z"),
    ("Pacific/Kwajalein", "1969-09-30T13:00:00Z"),
];

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
    clock: Clock,
    spec: PlanSpec,
    calls: Vec<Call>,
    shapes: Vec<Shape>,
    points: Vec<Point>,
}

const HOWS: [JoinHow; 6] = [JoinHow::Inner, JoinHow::Left, JoinHow::Right, JoinHow::Full, JoinHow::Semi, JoinHow::Anti];
/// Sizes and distances of windows: side by side, overlapping by little and by much, and with gaps between them.
const WINDOWS: [(i64, i64); 7] = [(10, 10), (7, 7), (20, 5), (12, 4), (30, 5), (15, 6), (5, 15)];

/// The same of days.
const DAYS: [(i64, i64); 6] = [(1, 1), (2, 1), (3, 1), (2, 2), (3, 2), (1, 2)];

impl Clock {
    fn new(random: &mut Random) -> Self {
        if random.below(4) > 0 {
            return Self { base: 0, unit: 1, zone: None };
        }
        let (zone, change) = CHANGES[random.below(CHANGES.len() as u64) as usize];
        let change = change.parse::<Timestamp>().unwrap().as_millisecond();
        let unit = HALF_HOUR * (1 + random.below(4) as i64);
        // It comes when some rows have come.
        Self { base: change - unit * random.below(30) as i64, unit, zone: Some(zone) }
    }
}

/// A random plan for so many epochs.
pub(crate) fn made(random: &mut Random, epochs: u64) -> Made {
    let clock = Clock::new(random);
    let sources: Vec<SourceSpec> = (0..1 + random.below(3)).map(|at| source(random, at, clock.unit)).collect();
    let shapes = sources.iter().map(Shape::of_source).collect();
    let point = |node| Point { node, rows: 20 * epochs, ordered: true, used: false };
    let points = (0..sources.len()).map(point).collect();
    let spec = PlanSpec { version: PLAN_VERSION, sources, steps: Vec::new() };
    let mut making = Making { random, clock, spec, calls: Vec::new(), shapes, points };
    for _ in 0..2 + making.random.below(5) {
        making.step();
    }
    if !making.spec.steps.iter().any(|node| is_keyed(&node.step)) {
        making.aggregate(0);
    }
    making.end();
    Made { spec: making.spec, calls: making.calls, clock }
}

fn is_keyed(step: &StepSpec) -> bool {
    use StepSpec::*;
    matches!(
        step,
        Agg { .. }
            | Aggregate { .. }
            | Distinct { .. }
            | Top { .. }
            | Join { .. }
            | StatefulMap { .. }
            | GroupState { .. }
    )
}

fn source(random: &mut Random, at: u64, unit: i64) -> SourceSpec {
    let event_time = (random.below(10) > 0).then(|| "t".to_owned());
    let lateness_ms = [0, 5, 20][random.below(3) as usize] * unit;
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
        match self.random.below(21) {
            0 => self.map(at),
            1 => self.some(at),
            2 | 3 => self.expand(at),
            4 => self.union(at),
            5 | 6 => self.stateful(at),
            7 | 8 => self.groups(at),
            9..=12 if small && !shape.updates => self.aggregate(at),
            13 if small && !shape.updates => self.distinct(at),
            14 | 15 if small && !shape.updates => self.top(at),
            16 if small && !shape.updates => self.promised(at),
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
        let after = 15 * self.clock.unit;
        let call = self.call(if in_order { Call::Orders } else { Call::Sums { after } });
        let (columns, schema) = (vec!["k".to_owned()], schema(&PLAIN, false));
        let (name, operator, sides) = ("keeps".to_owned(), None, self.sides(call));
        let step = StepSpec::StatefulMap { call, ends: !in_order, columns, schema, name, operator, sides };
        let made = self.push(&[node], step);
        self.tell(made, if in_order { rows } else { 3 * rows });
    }

    /// A function of the groups of an epoch, with timeouts of either kind or none.
    fn groups(&mut self, at: usize) {
        // Rather one that has rows with times.
        let has_time = |at: &usize| self.shapes[self.points[*at].node].time.is_some();
        let at = (0..=at).rev().find(has_time).unwrap_or(at);
        let Point { node, rows, ordered, .. } = self.points[at];
        self.points[at].used = true;
        let ordered = ordered && self.chance(50);
        let node = self.plain(node);
        let timed = self.shapes[node].time.is_some();
        let timeout = [Timeout::EventTime, Timeout::EventTime, Timeout::Clock, Timeout::None];
        let timeout = timeout[self.random.below(4) as usize];
        let timeout = if timed || timeout != Timeout::EventTime { timeout } else { Timeout::Clock };
        let keys = if self.chance(70) { vec![0] } else { vec![0, 3] };
        let schema = schema(&PLAIN, false);
        let names = Arc::new(schema.project(&keys).unwrap());
        let columns = names.fields().iter().map(|field| field.name().clone()).collect();
        let call = Groups { keys, names, ordered, timeout, unit: self.clock.unit };
        let call = self.call(Call::Groups(call));
        let (event_time, name, operator, sides) =
            (timeout == Timeout::EventTime, "groups".to_owned(), None, self.sides(call));
        let step = StepSpec::GroupState { call, columns, schema, name, operator, event_time, sides };
        let made = self.push(&[node], step);
        self.tell(made, 2 * rows);
    }

    /// A window step behind a node: how often a row is in one.
    fn window(&mut self, node: usize, sessions: bool) -> (StepSpec, u64) {
        assert!(self.shapes[node].time.is_some());
        let unit_us = self.clock.unit * 1_000;
        if sessions {
            let size_us = [5, 8][self.random.below(2) as usize] * unit_us;
            let (kind, every_us, offset_us, zone) = (WindowKind::Session, None, None, None);
            return (StepSpec::Window { kind, size_us, every_us, offset_us, zone }, 1);
        }
        let zone = self.clock.zone.filter(|_| self.chance(70)).map(str::to_owned);
        let (mut windows, mut whole_us, mut parts) = (&WINDOWS[..], unit_us, 1);
        if zone.is_some() {
            (windows, whole_us, parts) = (&DAYS[..], DAY * 1_000, HALVES);
        }
        let (size, every) = windows[self.random.below(windows.len() as u64) as usize];
        let (kind, every_us) = match size == every {
            true => (WindowKind::Tumbling, None),
            false => (WindowKind::Sliding, Some(every * whole_us)),
        };
        let offset = self.chance(50).then(|| self.random.below((every * parts) as u64) as i64);
        let offset_us = offset.map(|offset| offset * (whole_us / parts));
        let step = StepSpec::Window { kind, size_us: size * whole_us, every_us, offset_us, zone };
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
        let sessions = windowed && !keys.is_empty() && self.chance(30);
        let mut emit = None;
        if windowed {
            let (window, times) = self.window(node, sessions);
            rows *= times;
            last = self.push(&[last], window);
        } else {
            emit = Some(if self.chance(50) { Emit::Update } else { Emit::Final });
        }
        let number = self.spec.steps.len();
        let mut counts = None;
        let step = if !keys.is_empty() && self.chance(50) {
            self.gather(node, &keys, (windowed, sessions), emit)
        } else {
            let count = 1 + self.random.below(4);
            let aggs: Vec<AggSpec> = (0..count).map(|at| self.function(node, format!("a{number}_{at}"))).collect();
            counts = aggs.iter().find(|agg| agg.function == "count").map(|agg| agg.name.clone());
            StepSpec::Agg { emit, aggs, operator: None }
        };
        last = self.push(&[last], step);
        if windowed && self.chance(35) {
            let by = counts.unwrap_or_else(|| self.column(last, &KEYS));
            let (n, descending) = (1 + self.random.below(3), self.chance(70));
            last = self.push(&[last], StepSpec::Top { n, by, descending, per: Per::Window, operator: None });
        }
        self.tell(last, rows);
    }

    /// A user's aggregate of rows of a node.
    fn gather(
        &mut self,
        node: usize,
        keys: &[String],
        (windowed, sessions): (bool, bool),
        emit: Option<Emit>,
    ) -> StepSpec {
        let (number, schema) = (self.spec.steps.len(), self.shapes[node].schema.clone());
        let keys: Vec<usize> = keys.iter().map(|name| schema.index_of(name).unwrap()).collect();
        let names = Arc::new(schema.project(&keys).unwrap());
        let bounds = ["window_start", "window_end"].map(|name| Field::new(name, DataType::Int64, true));
        let bounds = bounds.into_iter().filter(|_| windowed);
        let made =
            Gather::MADE.into_iter().enumerate().map(|(at, kind)| Field::new(format!("g{number}_{at}"), kind, true));
        let fields = bounds.chain(names.fields().iter().map(|field| field.as_ref().clone())).chain(made);
        let schema: SchemaRef = Arc::new(Schema::new(fields.collect::<Vec<_>>()));
        let updates = emit == Some(Emit::Update);
        let call = self.call(Call::Gather(Gather { keys, windowed, sessions, updates, names, made: schema.clone() }));
        StepSpec::Aggregate { call, emit, schema, name: "gather".to_owned(), operator: None }
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
            "approx_count_distinct",
            "approx_quantile",
            "min_by",
            "max_by",
            "first",
            "last",
        ];
        let most = if timed { functions.len() } else { functions.len() - 2 };
        agg.function = functions[self.random.below(most as u64) as usize].to_owned();
        if self.clock.zone.is_some() && matches!(&*agg.function, "variance" | "stddev_pop") {
            // Squares of such times have no last bits to leave out.
            agg.function = "mean".to_owned();
        }
        let numeric = matches!(&*agg.function, "sum" | "mean" | "variance" | "stddev_pop" | "approx_quantile");
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
        match &*agg.function {
            "approx_count_distinct" => agg.error = [None, Some(0.26), Some(0.1)][self.random.below(3) as usize],
            "approx_quantile" => {
                agg.q = Some(self.random.below(101) as f64 / 100.0);
                agg.error = [None, Some(0.5), Some(0.03)][self.random.below(3) as usize];
            }
            _ => {}
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
        let upper = lower + self.random.below(20) as i64;
        let within = (near == 1).then(|| [lower, upper].map(|steps| steps * self.clock.unit * 1_000).into());
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

    /// A join that promises `1:m`, behind a step that keeps the promise.
    fn promised(&mut self, at: usize) {
        let other = self.pick();
        let (one, two) = (self.points[at].clone(), self.points[other].clone());
        if two.rows > MOST || self.shapes[two.node].updates {
            return self.stateful(at);
        }
        (self.points[at].used, self.points[other].used) = (true, true);
        let mut nodes = [one.node, two.node].map(|node| self.plain(node));
        let timed = nodes.iter().all(|node| self.shapes[*node].time.is_some());
        let near = if timed { self.random.below(3) } else { 0 };
        let on: Vec<String> =
            ["k", "s"][..1 + self.random.below(2) as usize].iter().map(|name| name.to_string()).collect();
        // Left rows of a key are so far apart that no two of them meet what one meets: there is one, or one at a time, or in a window.
        let window = (near == 2).then(|| self.window(nodes[0], false).0);
        let unit = self.clock.unit;
        let width = match &window {
            None => 8 * unit,
            Some(StepSpec::Window { size_us, zone: None, .. }) => size_us / 1_000,
            // Days are longer where clocks are set back.
            Some(StepSpec::Window { size_us, .. }) => size_us / 1_000 + DAY,
            Some(other) => panic!("{other:?} is no window"),
        };
        let mut columns = on.clone();
        if near > 0 {
            let next = self.chance(70);
            let call = self.call(Call::Apart { width, next });
            let (schema, sides) = (schema(&PLAIN, false), self.sides(call));
            nodes[0] = self.push(&nodes[..1], StepSpec::MapBatches { call, schema, sides });
            columns.push("t".to_owned());
        }
        nodes[0] = self.push(&nodes[..1], StepSpec::Distinct { columns, operator: None });
        let mut until = None;
        if near == 1 {
            let call = self.call(Call::Ends { width, unit });
            let (schema, sides) = (schema(&PLAIN, false), self.sides(call));
            nodes[0] = self.push(&nodes[..1], StepSpec::MapBatches { call, schema, sides });
            until = Some("v".to_owned());
        }
        if let Some(window) = &window {
            nodes = nodes.map(|node| self.push(&[node], window.clone()));
        }
        let how = HOWS[self.random.below(4) as usize];
        let suffix = Some(format!("_{}", self.spec.steps.len()));
        let (left, right, validate, windowed) = (on.clone(), on, Some(Validate::OneToMany), near == 2);
        let (within, operator) = (None, None);
        let step = StepSpec::Join { left, right, how, within, until, validate, windowed, suffix, operator };
        let made = self.push(&nodes, step);
        self.tell(made, one.rows + 3 * two.rows);
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
