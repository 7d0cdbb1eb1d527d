//! The oracle: what a plan gives, step by step from its text, in one thread, over lists of rows. It shares nothing with the operators but the
//! text of the plan and the user's functions.
//!
//! An epoch goes through the steps in their order, all of its rows at once, and each step ends it before the next one sees what came out: so what
//! comes of an epoch is a function of its rows and of the watermarks before and after it. Times are in milliseconds; windows are searched, groups are
//! sorted, rows that meet are looked for among all.

mod days;
mod groups;
mod join;
mod sketches;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use arrow_schema::{DataType, Field, Schema, SchemaRef};
use penstock_plan::spec::{AggSpec, Per, SideSpec, SourceSpec, WindowKind};
use penstock_plan::{Emit, PlanSpec, StepSpec};

use self::days::Days;
use self::join::Join;
use super::functions::{Call, Gather, Group, Groups, Memory};
use super::{Bag, PLAIN, Row, schema};
use crate::common::Cell;

/// How event time is cut, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Cut {
    Windows { size: i64, every: i64, offset: i64 },
    Days(Days),
    Sessions(i64),
}

impl Cut {
    /// The windows of a time, ascending; of sessions the one that a row would be alone.
    fn of(self, time: i64) -> Vec<(i64, i64)> {
        match self {
            Self::Sessions(gap) => vec![(time, time + gap)],
            Self::Windows { size, every, offset } => {
                let last = time - (time - offset).rem_euclid(every);
                let starts = (0..=size / every).rev().map(|before| last - before * every);
                starts.filter(|start| time < start + size).map(|start| (start, start + size)).collect()
            }
            Self::Days(days) => days.of(time),
        }
    }
}

/// What is known of the rows of a node.
#[derive(Clone, Debug)]
pub(super) struct Shape {
    pub(super) schema: SchemaRef,
    /// The column with the event time.
    pub(super) time: Option<usize>,
    /// Whether its rows are of windows, of which two columns are the bounds.
    pub(super) windowed: bool,
    /// Whether rows replace those of their key before.
    pub(super) updates: bool,
    /// What `key_by` and `window` have said that no step has used.
    key: Vec<usize>,
    cut: Option<Cut>,
}

impl Shape {
    pub(super) fn of_source(source: &SourceSpec) -> Self {
        let schema = source.schema.clone();
        let time = source.event_time.as_ref().map(|name| schema.index_of(name).unwrap());
        Self { schema, time, windowed: false, updates: false, key: Vec::new(), cut: None }
    }

    fn at(&self, name: &str) -> usize {
        self.schema.index_of(name).unwrap()
    }

    fn all_at(&self, names: &[String]) -> Vec<usize> {
        names.iter().map(|name| self.at(name)).collect()
    }

    fn kind(&self, at: usize) -> (String, DataType) {
        let field = self.schema.field(at);
        (field.name().clone(), field.data_type().clone())
    }

    fn kinds(&self) -> Vec<(String, DataType)> {
        (0..self.schema.fields().len()).map(|at| self.kind(at)).collect()
    }

    /// The column with the event time, where another schema still has it.
    fn time_in(&self, schema: &SchemaRef) -> Option<usize> {
        schema.index_of(self.schema.field(self.time?).name()).ok()
    }

    /// Whether rows are still of windows, with another schema.
    fn windowed_in(&self, schema: &SchemaRef) -> bool {
        self.windowed && ["window_start", "window_end"].iter().all(|name| schema.index_of(name).is_ok())
    }

    /// Rows behind a step that takes those of these shapes.
    pub(super) fn behind(step: &StepSpec, inputs: &[&Shape]) -> Shape {
        let input = inputs[0];
        let plain = Shape { key: Vec::new(), cut: None, ..input.clone() };
        let bounds = || input.cut.iter().flat_map(|_| ["window_start", "window_end"]);
        let bounds = bounds().map(|name| (name.to_owned(), DataType::Int64));
        let of = |kinds: Vec<(String, DataType)>| -> SchemaRef {
            Arc::new(Schema::new(
                kinds.into_iter().map(|(name, kind)| Field::new(name, kind, true)).collect::<Vec<_>>(),
            ))
        };
        match step {
            StepSpec::MapBatches { schema, .. } | StepSpec::FlatMap { schema, .. } => {
                let (time, windowed) = (input.time_in(schema), input.windowed_in(schema));
                Shape { schema: schema.clone(), time, windowed, ..plain }
            }
            StepSpec::Bounded { .. } | StepSpec::Iterate { .. } => plain,
            StepSpec::StatefulMap { schema, .. } | StepSpec::GroupState { schema, .. } => {
                let time = input.time_in(schema);
                Shape { schema: schema.clone(), time, windowed: false, updates: false, ..plain }
            }
            StepSpec::KeyBy { columns, .. } => Shape { key: input.all_at(columns), ..input.clone() },
            StepSpec::Window { kind, size_us, every_us, offset_us, zone } => {
                let ms = |us: i64| us / 1_000;
                let (size, every) = (ms(*size_us), ms(every_us.unwrap_or(*size_us)));
                let offset = ms(offset_us.unwrap_or(0));
                let cut = match (kind, zone) {
                    (WindowKind::Session, _) => Cut::Sessions(size),
                    (_, Some(zone)) => Cut::Days(Days::new(zone, size, every, offset)),
                    (_, None) => Cut::Windows { size, every, offset },
                };
                Shape { cut: Some(cut), ..input.clone() }
            }
            StepSpec::Agg { emit, aggs, .. } => {
                let made = aggs.iter().map(|agg| {
                    let kind = match (&*agg.function, &agg.column) {
                        ("mean" | "variance" | "stddev_pop" | "approx_quantile", _) => DataType::Float64,
                        ("min" | "max" | "min_by" | "max_by" | "first" | "last", Some(column)) => {
                            input.kind(input.at(column)).1
                        }
                        _ => DataType::Int64,
                    };
                    (agg.name.clone(), kind)
                });
                let kinds = bounds.chain(input.key.iter().map(|at| input.kind(*at))).chain(made).collect();
                let updates = *emit == Some(Emit::Update);
                Shape { schema: of(kinds), time: None, windowed: input.cut.is_some(), updates, ..plain }
            }
            StepSpec::Aggregate { emit, schema, .. } => {
                let (updates, windowed) = (*emit == Some(Emit::Update), input.cut.is_some());
                Shape { schema: schema.clone(), time: None, windowed, updates, ..plain }
            }
            StepSpec::Distinct { columns, .. } => {
                let kinds = bounds.chain(input.all_at(columns).into_iter().map(|at| input.kind(at))).collect();
                let schema = of(kinds);
                let time = input.time_in(&schema).filter(|_| input.cut.is_none());
                let windowed = input.cut.is_some() || input.windowed_in(&schema);
                Shape { schema, time, windowed, updates: false, ..plain }
            }
            StepSpec::Top { per, .. } => {
                let kinds = bounds.chain(input.kinds()).collect();
                let windowed = input.windowed || input.cut.is_some();
                let in_window = match per {
                    Per::All => false,
                    Per::Window => true,
                    Per::Columns(names) => names.iter().any(|name| name == "window_end"),
                };
                Shape { schema: of(kinds), time: None, windowed: windowed && in_window, updates: false, ..plain }
            }
            StepSpec::Union {} => {
                let time = input.time.filter(|_| inputs.iter().all(|input| input.time.is_some()));
                let windowed = inputs.iter().all(|input| input.windowed);
                Shape { time, windowed, updates: inputs.iter().any(|input| input.updates), ..plain }
            }
            StepSpec::Join { left, right, how, windowed, suffix, .. } => {
                let mut kinds: Vec<_> = bounds.filter(|_| *windowed).chain(input.kinds()).collect();
                if !how.is_filter() {
                    for (at, (name, kind)) in inputs[1].kinds().into_iter().enumerate() {
                        if same_key(left, right, inputs, at) {
                            continue;
                        }
                        let taken = kinds.iter().any(|(other, _)| *other == name);
                        let name = if taken { name + suffix.as_deref().unwrap_or("") } else { name };
                        kinds.push((name, kind));
                    }
                }
                Shape { schema: of(kinds), time: None, windowed: *windowed, updates: false, ..plain }
            }
        }
    }
}

/// Whether a column of the right side is a key that has the name of the one that it equals.
fn same_key(left: &[String], right: &[String], inputs: &[&Shape], at: usize) -> bool {
    left.iter().zip(right).any(|(left, right)| left == right && inputs[1].at(right) == at)
}

/// What a step keeps.
#[derive(Clone)]
enum Work {
    /// Nothing, and it changes no row: sources, and what only describes the next step.
    None,
    Function(Call),
    Loop(Call),
    Stateful(Call, bool, Memory),
    Groups(Groups, BTreeMap<Row, Group>),
    /// Rows by window.
    Windows(BTreeMap<(i64, i64), Bag>),
    Sessions(Bag),
    Running(Bag),
    New(BTreeSet<Row>),
    /// Rows by the end of their window, if they have one, and group.
    Top(BTreeMap<(Option<i64>, Row), Bag>),
    Join([Vec<Kept>; 2]),
}

/// A row of a join, in windows with the bounds of one.
#[derive(Clone, Debug)]
struct Kept {
    row: Row,
    window: (i64, i64),
    met: bool,
    told: bool,
}

#[derive(Clone)]
struct Node {
    step: Option<StepSpec>,
    inputs: Vec<usize>,
    shape: Shape,
    work: Work,
    /// The user's aggregate of its step.
    gather: Option<Gather>,
    /// The number of its operator.
    keyed: usize,
}

/// What an epoch gives: rows, the late ones by operator and side, and those of side outputs by their names.
#[derive(Debug, Default)]
pub(crate) struct Given {
    pub(super) rows: Bag,
    pub(super) late: BTreeMap<(usize, usize), Bag>,
    pub(super) aside: BTreeMap<String, Bag>,
}

/// See the module.
#[derive(Clone)]
pub(crate) struct Oracle {
    nodes: Vec<Node>,
    watermark: i64,
}

/// The watermarks around an epoch, whether it ends with one, and its processing time, which a batch job and what is behind the end do not have.
#[derive(Clone, Copy)]
struct Around {
    before: i64,
    after: i64,
    told: bool,
    clock: Option<i64>,
}

impl Around {
    /// Whether what ends at a time ends now, or ended before.
    fn has_ended(self, end: i64) -> bool {
        self.after == i64::MAX || end <= self.after
    }
}

impl Oracle {
    pub(crate) fn new(spec: &PlanSpec, calls: &[Call]) -> Self {
        let source = |source| {
            let (shape, inputs) = (Shape::of_source(source), Vec::new());
            Node { step: None, inputs, shape, work: Work::None, gather: None, keyed: 0 }
        };
        let mut nodes: Vec<Node> = spec.sources.iter().map(source).collect();
        let mut count = 0;
        for node in &spec.steps {
            let inputs = if node.inputs.is_empty() { vec![nodes.len() - 1] } else { node.inputs.clone() };
            let shapes: Vec<&Shape> = inputs.iter().map(|at| &nodes[*at].shape).collect();
            let body = |body: &[StepSpec]| match body {
                [StepSpec::MapBatches { call, .. } | StepSpec::FlatMap { call, .. }] => calls[*call].clone(),
                other => panic!("no plan has a body of {other:?}"),
            };
            let work = match &node.step {
                StepSpec::MapBatches { call, .. } | StepSpec::FlatMap { call, .. } => {
                    Work::Function(calls[*call].clone())
                }
                StepSpec::Bounded { body: inside, .. } => Work::Function(body(inside)),
                StepSpec::Iterate { body: inside, .. } => Work::Loop(body(inside)),
                StepSpec::StatefulMap { call, ends, .. } => {
                    Work::Stateful(calls[*call].clone(), *ends, Memory::new(schema(&PLAIN[..1], false)))
                }
                StepSpec::GroupState { call, .. } => match &calls[*call] {
                    Call::Groups(groups) => Work::Groups(groups.clone(), BTreeMap::new()),
                    other => panic!("{other:?} is no function of groups"),
                },
                StepSpec::Agg { .. } | StepSpec::Aggregate { .. } | StepSpec::Distinct { .. } => match shapes[0].cut {
                    Some(Cut::Windows { .. } | Cut::Days(_)) => Work::Windows(BTreeMap::new()),
                    Some(Cut::Sessions(_)) => Work::Sessions(Vec::new()),
                    None if matches!(node.step, StepSpec::Distinct { .. }) => Work::New(BTreeSet::new()),
                    None => Work::Running(Vec::new()),
                },
                StepSpec::Top { .. } => Work::Top(BTreeMap::new()),
                StepSpec::Join { .. } => Work::Join([Vec::new(), Vec::new()]),
                _ => Work::None,
            };
            let gather = match &node.step {
                StepSpec::Aggregate { call, .. } => match &calls[*call] {
                    Call::Gather(gather) => Some(gather.clone()),
                    other => panic!("{other:?} is no aggregate"),
                },
                _ => None,
            };
            let (shape, keyed) = (Shape::behind(&node.step, &shapes), count);
            count += usize::from(!matches!(work, Work::None | Work::Function(_) | Work::Loop(_)));
            nodes.push(Node { step: Some(node.step.clone()), inputs, shape, work, gather, keyed });
        }
        Self { nodes, watermark: i64::MIN }
    }

    pub(super) fn shape(&self) -> &Shape {
        &self.nodes.last().unwrap().shape
    }

    /// An epoch with these rows of the sources, that ends with a watermark.
    pub(crate) fn epoch(&mut self, sources: &[Bag], watermark: Option<i64>) -> Given {
        self.epoch_at(sources, watermark, None)
    }

    /// The same at a processing time, which functions with timeouts see.
    pub(crate) fn epoch_at(&mut self, sources: &[Bag], watermark: Option<i64>, clock: Option<i64>) -> Given {
        let after = watermark.unwrap_or(i64::MIN).max(self.watermark);
        let around = Around { before: self.watermark, after, told: watermark.is_some(), clock };
        self.watermark = around.after;
        let (mut made, mut given) = (sources.to_vec(), Given::default());
        for at in sources.len()..self.nodes.len() {
            let (before, rest) = self.nodes.split_at_mut(at);
            let node = &mut rest[0];
            let shapes: Vec<&Shape> = node.inputs.iter().map(|at| &before[*at].shape).collect();
            let inputs: Vec<&Bag> = node.inputs.iter().map(|at| &made[*at]).collect();
            let mut late = [Bag::new(), Bag::new()];
            let step = node.step.as_ref().unwrap();
            let sides: Vec<SideSpec> = step.body().iter().chain([step]).flat_map(StepSpec::sides).cloned().collect();
            let mut seen = |row: &Row| {
                if let Some((side, row)) = Call::aside(row, sides.len()) {
                    given.aside.entry(sides[side].name.clone()).or_default().push(row);
                }
            };
            let out = node.epoch(&shapes, &inputs, around, &mut late, &mut seen);
            for (side, late) in late.into_iter().enumerate().filter(|(_, late)| !late.is_empty()) {
                given.late.insert((node.keyed, side), late);
            }
            assert!(out.iter().all(|row| row.len() == node.shape.schema.fields().len()));
            made.push(out);
        }
        given.rows = made.pop().unwrap();
        given
    }
}

impl Node {
    /// `seen` is told of all rows that a function with side outputs sees.
    fn epoch(
        &mut self,
        shapes: &[&Shape],
        inputs: &[&Bag],
        around: Around,
        late: &mut [Bag; 2],
        seen: &mut dyn FnMut(&Row),
    ) -> Bag {
        let (shape, rows) = (shapes[0], inputs[0]);
        let gather = self.gather.as_ref();
        let mut out = Bag::new();
        match (&mut self.work, self.step.as_ref().unwrap()) {
            (Work::None, _) => out.extend(inputs.iter().flat_map(|rows| rows.iter().cloned())),
            (Work::Function(call), _) => {
                rows.iter().for_each(&mut *seen);
                out.extend(rows.iter().flat_map(|row| call.rows(row)));
            }
            (Work::Loop(call), _) => {
                let mut round = rows.clone();
                while !round.is_empty() {
                    round.iter().for_each(&mut *seen);
                    for mut row in std::mem::take(&mut round).iter().flat_map(|row| call.rows(row)) {
                        let again = row.pop() == Some(Cell::Int(1));
                        if again { round.push(row) } else { out.push(row) }
                    }
                }
            }
            (Work::Stateful(call, ends, memory), _) => {
                rows.iter().for_each(&mut *seen);
                out.extend(rows.iter().map(|row| memory.apply(call, row)));
                if *ends {
                    let ended = memory.end_epoch(around.after);
                    ended.iter().for_each(&mut *seen);
                    out.extend(ended);
                }
            }
            (Work::Groups(call, groups), StepSpec::GroupState { event_time, .. }) => {
                let behind = |row: &Row| {
                    let time = event_time.then(|| &row[shape.time.unwrap()]).filter(|time| **time != Cell::Null);
                    around.before > i64::MIN && time.is_some_and(|time| int(time) <= around.before)
                };
                let (behind, rows): (Bag, Bag) = rows.iter().cloned().partition(behind);
                late[0].extend(behind);
                groups::epoch(call, groups, &rows, around, seen, &mut out);
            }
            (Work::Windows(open), step) => {
                let cut = shape.cut.unwrap();
                for row in rows {
                    for window in assigned(shape, cut, row, around.before, late, gather.is_some()) {
                        open.entry(window).or_default().push(row.clone());
                    }
                }
                let ended = open.extract_if(.., |(_, end), _| around.has_ended(*end));
                for ((start, end), rows) in ended.collect::<Vec<_>>() {
                    out.extend(grouped(step, gather, shape, &rows).into_iter().map(|row| bounded(start, end, row)));
                }
            }
            (Work::Sessions(open), step) => {
                let Some(Cut::Sessions(gap)) = shape.cut else { unreachable!("sessions") };
                for row in rows {
                    if !assigned(shape, Cut::Sessions(gap), row, around.before, late, gather.is_some()).is_empty() {
                        open.push(row.clone());
                    }
                }
                let time = |row: &Row| int(&row[shape.time.unwrap()]);
                let mut keys: BTreeMap<Row, Bag> = BTreeMap::new();
                for row in std::mem::take(open) {
                    keys.entry(shape.key.iter().map(|at| row[*at].clone()).collect()).or_default().push(row);
                }
                for mut rows in keys.into_values() {
                    rows.sort_by_key(time);
                    for session in rows.chunk_by(|one, next| time(next) - time(one) <= gap) {
                        let (first, end) = (time(&session[0]), time(&session[session.len() - 1]) + gap);
                        if around.after == i64::MAX || end < around.after {
                            let rows = grouped(step, gather, shape, session).into_iter();
                            out.extend(rows.map(|row| bounded(first, end, row)));
                        } else {
                            open.extend_from_slice(session);
                        }
                    }
                }
            }
            (Work::Running(all), step @ (StepSpec::Agg { emit, .. } | StepSpec::Aggregate { emit, .. })) => {
                let key = |row: &Row| -> Row { shape.key.iter().map(|at| row[*at].clone()).collect() };
                all.extend(rows.iter().cloned());
                match emit {
                    Some(Emit::Update) => {
                        let touched: BTreeSet<Row> = rows.iter().map(key).collect();
                        let mut told = all.clone();
                        told.retain(|row| touched.contains(&key(row)));
                        out.extend(grouped(step, gather, shape, &told));
                    }
                    _ if around.after == i64::MAX => out.extend(grouped(step, gather, shape, &std::mem::take(all))),
                    _ => {}
                }
            }
            (Work::New(seen), StepSpec::Distinct { columns, .. }) => {
                let at = shape.all_at(columns);
                let values = rows.iter().map(|row| -> Row { at.iter().map(|at| row[*at].clone()).collect() });
                out.extend(values.filter(|row| seen.insert(row.clone())));
            }
            (Work::Top(groups), StepSpec::Top { n, by, descending, per, .. }) => {
                let names: Vec<&str> = self.shape.schema.fields().iter().map(|field| field.name().as_str()).collect();
                let at = |name: &str| names.iter().position(|other| *other == name).unwrap();
                let group = match per {
                    Per::All => Vec::new(),
                    Per::Window => vec![at("window_start"), at("window_end")],
                    Per::Columns(names) => names.iter().map(|name| at(name)).collect(),
                };
                let routed: Bag = match shape.cut {
                    None => rows.clone(),
                    Some(cut) => {
                        let mut assign = |row: &Row| -> Bag {
                            let windows = assigned(shape, cut, row, around.before, late, true);
                            windows.into_iter().map(|(start, end)| bounded(start, end, row.clone())).collect()
                        };
                        rows.iter().flat_map(&mut assign).collect()
                    }
                };
                for row in routed {
                    // What is ranked within windows is complete when these are.
                    let end = self.shape.windowed.then(|| int(&row[at("window_end")]));
                    let name = group.iter().map(|at| row[*at].clone()).collect();
                    groups.entry((end, name)).or_default().push(row);
                }
                let over = |(end, _): &(Option<i64>, Row)| around.has_ended(end.unwrap_or(i64::MAX));
                for (_, rows) in groups.extract_if(.., |group, _| over(group)) {
                    let by = at(by);
                    // Nulls are behind all, whichever way.
                    let better = |one: &Row, other: &Row| match (&one[by], &other[by]) {
                        (Cell::Null, _) => false,
                        (_, Cell::Null) => true,
                        (one, other) => {
                            if *descending {
                                one > other
                            } else {
                                one < other
                            }
                        }
                    };
                    let rank = |row: &&Row| rows.iter().filter(|other| better(other, row)).count() as u64;
                    out.extend(rows.iter().filter(|row| rank(row) < *n).cloned());
                }
            }
            (Work::Join(sides), step @ StepSpec::Join { .. }) => {
                let join = Join::new(step, shapes);
                join.epoch(sides, inputs, around, late, &mut out);
            }
            (_, step) => unreachable!("{step:?}"),
        }
        out
    }
}

fn int(cell: &Cell) -> i64 {
    match cell {
        Cell::Int(value) => *value as i64,
        other => panic!("{other:?} is no number"),
    }
}

fn bounded(start: i64, end: i64, row: Row) -> Row {
    [vec![Cell::Int(start.into()), Cell::Int(end.into())], row].concat()
}

/// The open windows of a row. One that has windows, but none that is open, is late, and so is one without a time; with the bounds of its last window
/// where that is how rows reach the operator.
fn assigned(
    shape: &Shape,
    cut: Cut,
    row: &Row,
    before: i64,
    late: &mut [Bag; 2],
    with_bounds: bool,
) -> Vec<(i64, i64)> {
    let Cell::Int(time) = row[shape.time.unwrap()] else {
        let nulls = if with_bounds { vec![Cell::Null; 2] } else { Vec::new() };
        late[0].push([nulls, row.clone()].concat());
        return Vec::new();
    };
    let all = cut.of(time as i64);
    let open: Vec<_> = all.iter().copied().filter(|(_, end)| *end > before).collect();
    if let (true, Some(&(start, end))) = (open.is_empty(), all.last()) {
        late[0].push(if with_bounds { bounded(start, end, row.clone()) } else { row.clone() });
    }
    open
}

/// A row for each key of some rows: the key, and what an `agg` or a user's aggregate says of its rows.
fn grouped(step: &StepSpec, gather: Option<&Gather>, shape: &Shape, rows: &[Row]) -> Bag {
    let (key, aggs) = match step {
        StepSpec::Agg { aggs, .. } => (shape.key.clone(), &aggs[..]),
        StepSpec::Aggregate { .. } => (shape.key.clone(), &[][..]),
        StepSpec::Distinct { columns, .. } => (shape.all_at(columns), &[][..]),
        other => unreachable!("{other:?}"),
    };
    let mut groups: BTreeMap<Row, Vec<&Row>> = BTreeMap::new();
    for row in rows {
        groups.entry(key.iter().map(|at| row[*at].clone()).collect()).or_default().push(row);
    }
    let gathered = |rows: &[&Row]| -> Row {
        let all = rows.iter().map(|row| Gather::of(row));
        Gather::finish(&all.reduce(|one, other| Gather::merge(&one, &other)).unwrap())
    };
    let row = |(key, rows): (Row, Vec<&Row>)| -> Row {
        let users = gather.iter().flat_map(|_| gathered(&rows));
        key.into_iter().chain(aggs.iter().map(|agg| aggregate(agg, shape, &rows))).chain(users).collect()
    };
    groups.into_iter().map(row).collect()
}

fn aggregate(agg: &AggSpec, shape: &Shape, rows: &[&Row]) -> Cell {
    let Some(at) = agg.column.as_ref().map(|name| shape.at(name)) else { return Cell::Int(rows.len() as i128) };
    let values: Vec<&Cell> = rows.iter().map(|row| &row[at]).filter(|cell| **cell != Cell::Null).collect();
    let numbers = || values.iter().map(|cell| int(cell)).collect::<Vec<i64>>();
    let or_null = |cell: Option<&Cell>| cell.cloned().unwrap_or(Cell::Null);
    // Among those where the other is the least or greatest, the least or greatest value, of which a null is the least.
    let by = || {
        let by = agg.by.as_ref().map_or_else(|| shape.time.unwrap(), |name| shape.at(name));
        rows.iter().map(move |row| (&row[by], &row[at])).filter(|(by, _)| **by != Cell::Null)
    };
    let moments = || {
        let numbers = numbers();
        let (n, mean) = (numbers.len() as f64, numbers.iter().sum::<i64>() as f64 / numbers.len() as f64);
        (n, numbers.iter().map(|value| (*value as f64 - mean).powi(2)).sum::<f64>())
    };
    match &*agg.function {
        "count" => Cell::Int(values.len() as i128),
        "approx_count_distinct" => Cell::Int(sketches::distinct(&values, agg.error.unwrap_or(0.02)).into()),
        "count_distinct" => Cell::Int(values.iter().collect::<BTreeSet<_>>().len() as i128),
        "min" => or_null(values.into_iter().min()),
        "max" => or_null(values.into_iter().max()),
        "min_by" | "first" => or_null(by().min().map(|(_, value)| value)),
        "max_by" | "last" => or_null(by().max().map(|(_, value)| value)),
        "variance" if values.len() > 1 => Cell::float(moments().1 / (moments().0 - 1.0)),
        "variance" => Cell::Null,
        _ if values.is_empty() => Cell::Null,
        "approx_quantile" => Cell::float(sketches::quantile(numbers(), agg.q.unwrap(), agg.error.unwrap_or(0.01))),
        "stddev_pop" => Cell::float((moments().1 / moments().0).sqrt()),
        "sum" => Cell::Int(numbers().into_iter().map(i128::from).sum()),
        "mean" => Cell::float(numbers().iter().sum::<i64>() as f64 / values.len() as f64),
        other => panic!("no plan has {other}"),
    }
}
