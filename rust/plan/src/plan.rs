//! Compiling a flow: from steps that name things to stages that are cut at exchanges.
//!
//! A *node* is a source or a step; nodes are numbered, and a step takes the rows of nodes before it, so a cycle cannot be written. The last
//! node is the output and every other one is used. A *stage* is what runs between two exchanges: for each of its sides an [`Inlet`] (whose
//! rows enter, and the steps without state that they pass), and then at most one keyed operator, behind one exchange for all sides. A stage
//! without an operator is where paths meet or part: the output, a union's inputs, and a node that several steps use, which so runs
//! once. Stages stand behind those whose rows they take. A line has a stage for each keyed step, and one for what is left at its end.
//!
//! A keyed step is the *operator* that manifests name: by its word, numbered from the second on of the plan in the order of its nodes.
//!
//! Time is one for all paths. All sources are fed at the same flow times, and an operator sees the least of the frontiers of its
//! sides, so it applies a time when no side has rows of it any more. Watermarks and ends of epochs are one for all, too, made by the host
//! (the least of what the sources have reached); where paths meet they pass along the first one and the others bring rows alone, so each
//! operator sees each mark once, after all rows of its time.
//!
//! Compilation resolves every column and type, so that running a plan can fail only on data. Windows and keys wait for the step that uses
//! them. A union keeps event time and window columns where all its inputs have them; a pair of a join has two event times and so none.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt::Write;
use std::sync::Arc;

use arrow_schema::{DataType, Field, Schema, SchemaRef, TimeUnit};

use crate::agg::{Aggregate, Function};
use crate::chain::{Stateless, is_metered, stateless};
use crate::column::{EVENT_TIME_LIMIT_US, EventTime, plain_type};
use crate::ddl::ddl;
use crate::error::{PlanError, StepName};
use crate::join::{Join, Joined};
use crate::keyed::{KeyedKind, KeyedSpec};
use crate::running::Emit;
use crate::spec::{
    AggSpec, JoinHow, Nulls, PLAN_VERSION, Per, PlanSpec, SideSpec, SourceSpec, StepSpec, Validate, WindowKind,
};
use crate::top::Top;
use crate::window::{Best, Cut, Windows};
use crate::zone::Zone;

/// Name of the column with a window's start.
pub const WINDOW_START: &str = "window_start";
/// Name of the column with a window's end.
pub const WINDOW_END: &str = "window_end";

/// The most sources of a plan: blocks carry the number of theirs in a byte.
pub const MOST_SOURCES: usize = 256;

/// An input of a plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Source {
    /// What hosts and manifests call it.
    pub name: String,
    /// Its columns.
    pub schema: SchemaRef,
    /// Its event-time column.
    pub event_time: Option<EventTime>,
    /// How far the watermark stays behind its greatest event time, in microseconds.
    pub lateness_us: i64,
    /// How long it may have no rows before the watermark goes on without it, in milliseconds of processing time.
    pub idle_after_ms: Option<i64>,
}

/// Where rows come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A source, by its number.
    Source(usize),
    /// What leaves a stage, by its number.
    Stage(usize),
}

/// What enters a stage on one side.
#[derive(Clone, Debug, PartialEq)]
pub struct Inlet {
    /// Whose rows; those of several are one stream. At least one.
    pub from: Vec<Origin>,
    /// Columns that enter.
    pub input: SchemaRef,
    /// Steps without state, before the exchange.
    pub pre: Vec<Stateless>,
}

/// Steps without state and then at most one keyed operator.
#[derive(Clone, Debug, PartialEq)]
pub struct Stage {
    /// What enters, by side: one, unless the operator has several.
    pub inlets: Vec<Inlet>,
    /// The operator behind the exchange.
    pub keyed: Option<KeyedSpec>,
    /// Columns that leave.
    pub output: SchemaRef,
}

/// A compiled flow; equal on every worker that compiles the same text.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    spec: PlanSpec,
    sources: Vec<Source>,
    stages: Vec<Stage>,
    event_time: Option<String>,
}

/// Rows of one kind that may come too late.
#[derive(Clone, Debug, PartialEq)]
pub struct LateOutput {
    /// What users call it: the source whose rows they are; where that does not tell kinds apart, or there are several, the operator, and the side
    /// of a join.
    pub name: String,
    /// Columns, as they come to the step.
    pub schema: SchemaRef,
    /// The keyed steps that find them, by number, and their sides.
    pub of: Vec<(usize, usize)>,
}

/// An output of a step's function beside the main one.
#[derive(Clone, Debug, PartialEq)]
pub struct SideOutput {
    /// What users call it.
    pub name: String,
    /// Columns.
    pub schema: SchemaRef,
    /// The step.
    pub step: StepName,
}

/// Columns of the late rows of a step, by side; none where no row is late.
fn late_sides(keyed: &KeyedSpec) -> Vec<&SchemaRef> {
    match &keyed.kind {
        KeyedKind::Window { .. }
        | KeyedKind::Session { .. }
        | KeyedKind::GroupState { late_by: Some(_), .. }
        | KeyedKind::Aggregate { windows: Some(_), .. }
        | KeyedKind::Top(Top { assign: Some(_), .. }) => vec![&keyed.routed],
        KeyedKind::Join(join) if join.within.is_some() => join.sides.iter().map(|side| &side.routed).collect(),
        _ => Vec::new(),
    }
}

/// What is known of the rows at one node.
#[derive(Clone)]
struct Point {
    schema: SchemaRef,
    event_time: Option<EventTime>,
    /// Event time that the window columns are read by, while rows still carry them.
    window: Option<EventTime>,
    /// Whether rows are values that later rows replace.
    updates: bool,
}

const SESSIONS: &str =
    "sessions are of keys, and only agg and aggregate take them: write .key_by(...).window(session).agg(...)";

/// `key_by` and `window` steps that wait for the step they describe.
#[derive(Clone, Default)]
struct Waiting {
    key: Option<(StepName, Vec<usize>, Nulls)>,
    windows: Option<(StepName, Cut)>,
}

fn column(step: &StepName, schema: &Schema, name: &str) -> Result<usize, PlanError> {
    schema.index_of(name).map_err(|_| PlanError::MissingColumn {
        step: step.clone(),
        column: name.into(),
        available: schema.fields().iter().map(|field| field.name().clone()).collect(),
    })
}

fn wrong_type(step: &StepName, field: &Field, need: &'static str) -> PlanError {
    PlanError::ColumnType { step: step.clone(), column: field.name().clone(), found: ddl(field.data_type()), need }
}

/// Whether values that differ are different keys of a dict in Python.
fn distinct_in_python(step: &StepName, field: &Field) -> Result<(), PlanError> {
    let need = match plain_type(field.data_type()) {
        nested if nested.is_nested() => {
            "the key of a function must be hashable in Python: make text or bytes of it first"
        }
        DataType::Timestamp(_, Some(zone)) if has_clock_changes(zone) => {
            "when the clocks of that zone go back, instants that are an hour apart are the same key to a function in Python: cast it to \
             timestamp in UTC first"
        }
        DataType::Time64(TimeUnit::Nanosecond) => {
            "to a function in Python times of the same microsecond are the same key: cast it to time64[us], or to a whole number, first"
        }
        _ => return Ok(()),
    };
    Err(wrong_type(step, field, need))
}

/// Of a zone by name; those of an offset, and UTC, have none.
fn has_clock_changes(zone: &str) -> bool {
    !zone.starts_with(['+', '-'])
        && !["UTC", "Etc/UTC", "GMT", "Etc/GMT", "Z", "Zulu", "Etc/UCT", "UCT"].contains(&zone)
}

/// Columns of what a join gives, at most.
const MOST_COLUMNS: usize = 1 << 14;

pub(crate) fn unique(step: &StepName, schema: &Schema) -> Result<(), PlanError> {
    let mut names = HashSet::new();
    match schema.fields().iter().find(|field| !names.insert(field.name())) {
        Some(field) => Err(PlanError::DuplicateColumn { step: step.clone(), column: field.name().clone() }),
        None => Ok(()),
    }
}

/// A column whose values are kept as bytes and come back with their own type.
fn storable(step: &StepName, field: &Field) -> Result<(), PlanError> {
    crate::column::storable(field.data_type()).map_err(|need| wrong_type(step, field, need))
}

fn key_columns(step: &StepName, schema: &Schema, names: &[String]) -> Result<Vec<usize>, PlanError> {
    let mut seen = HashSet::new();
    names
        .iter()
        .map(|name| {
            let at = column(step, schema, name)?;
            let field = schema.field(at);
            storable(step, &field.clone().with_data_type(plain_type(field.data_type()).clone()))?;
            match seen.insert(at) {
                true => Ok(at),
                false => Err(PlanError::DuplicateColumn { step: step.clone(), column: name.clone() }),
            }
        })
        .collect()
}

impl Plan {
    /// Compiles a flow.
    ///
    /// # Errors
    /// A [`PlanError`] that names the step and the column.
    pub fn compile(spec: PlanSpec) -> Result<Self, PlanError> {
        if spec.version != PLAN_VERSION {
            return Err(PlanError::Version { found: spec.version, supported: PLAN_VERSION });
        }
        let count = spec.sources.len();
        if !(1..=MOST_SOURCES).contains(&count) {
            return Err(PlanError::Sources { found: count, most: MOST_SOURCES });
        }
        let sources = spec.sources.iter().enumerate().map(source).collect::<Result<Vec<_>, _>>()?;
        let mut names = HashSet::new();
        if let Some(again) = sources.iter().find(|source| !names.insert(&source.name)) {
            return Err(PlanError::DuplicateSource { name: again.name.clone() });
        }
        name_sides(&spec)?;
        let (mut stages, output, event_time) = Compiler::new(&spec, &sources)?.compile(&spec)?;
        name_operators(&spec, &mut stages)?;
        tell_best(&mut stages, output);
        debug_assert_eq!(output, stages.len() - 1, "the last node's rows leave the last stage");
        Ok(Self { spec, sources, stages, event_time })
    }

    /// Reads and compiles a plan.
    ///
    /// # Errors
    /// Those of [`PlanSpec::from_json`] and [`Plan::compile`].
    pub fn from_json(text: &str) -> Result<Self, PlanError> {
        Self::compile(PlanSpec::from_json(text)?)
    }

    /// The flow it was compiled from.
    pub fn spec(&self) -> &PlanSpec {
        &self.spec
    }

    /// The stages, each behind those whose rows it takes; at least one. What leaves the last is the output.
    pub fn stages(&self) -> &[Stage] {
        &self.stages
    }

    /// The sources; at least one.
    pub fn sources(&self) -> &[Source] {
        &self.sources
    }

    /// The column of the output that has the event time, where no step took it away.
    pub fn event_time(&self) -> Option<&str> {
        self.event_time.as_deref()
    }

    /// Whether it is one path: each stage takes the rows of the one before it, the first those of the only source.
    pub fn is_line(&self) -> bool {
        let before = |at: usize| if at == 0 { Origin::Source(0) } else { Origin::Stage(at - 1) };
        let follows = |(at, stage): (usize, &Stage)| matches!(&stage.inlets[..], [one] if one.from == [before(at)]);
        self.sources.len() == 1 && self.stages.iter().enumerate().all(follows)
    }

    /// The keyed steps, in order.
    pub fn keyed(&self) -> impl Iterator<Item = &KeyedSpec> {
        self.stages.iter().filter_map(|stage| stage.keyed.as_ref())
    }

    /// Number of keyed steps.
    pub fn keyed_ops(&self) -> usize {
        self.keyed().count()
    }

    /// Columns of the output.
    pub fn output_schema(&self) -> &SchemaRef {
        &self.stages.last().expect("a plan has a stage").output
    }

    /// The kinds of rows that may come too late; those of one source and schema are one.
    pub fn late_outputs(&self) -> Vec<LateOutput> {
        // For each stage the sources whose rows leave it; then of each side that may have late rows its only source, and what else it is called.
        let mut sources: Vec<BTreeSet<usize>> = Vec::new();
        let mut found = Vec::new();
        let mut number = 0;
        for stage in &self.stages {
            let entered = stage.inlets.iter().map(|inlet| -> BTreeSet<usize> {
                let each = inlet.from.iter().map(|origin| match origin {
                    Origin::Source(number) => [*number].into(),
                    Origin::Stage(number) => sources[*number].clone(),
                });
                each.flatten().collect()
            });
            let entered: Vec<_> = entered.collect();
            if let Some(keyed) = &stage.keyed {
                for (side, schema) in late_sides(keyed).into_iter().enumerate() {
                    let only = entered[side].first().filter(|_| entered[side].len() == 1).copied();
                    let name = match stage.inlets.len() {
                        1 => keyed.operator.clone(),
                        _ => format!("{} {}", keyed.operator, ["left", "right"][side]),
                    };
                    found.push((only, name, schema, (number, side)));
                }
                number += 1;
            }
            sources.push(entered.into_iter().flatten().collect());
        }
        let mut outputs: Vec<LateOutput> = Vec::new();
        for (only, name, schema, of) in &found {
            let alike = |source| found.iter().all(|(other, _, columns, _)| *other != Some(source) || columns == schema);
            let name = match only.filter(|source| alike(*source)) {
                Some(source) => self.sources[source].name.clone(),
                None => name.clone(),
            };
            match outputs.iter_mut().find(|output| output.name == name && output.schema == **schema) {
                Some(output) => output.of.push(*of),
                None => outputs.push(LateOutput { name, schema: (*schema).clone(), of: vec![*of] }),
            }
        }
        // A source may be called like an operator.
        for at in 1..outputs.len() {
            while outputs[..at].iter().any(|output| output.name == outputs[at].name) {
                outputs[at].name.push('\'');
            }
        }
        outputs
    }

    /// The outputs of functions beside the main one, in the order of the steps.
    pub fn side_outputs(&self) -> Vec<SideOutput> {
        let mut outputs = Vec::new();
        each_side(&self.spec, &mut |step, side| {
            outputs.push(SideOutput { name: side.name.clone(), schema: side.schema.clone(), step: step.clone() });
            Ok(())
        })
        .expect("nothing is refused");
        outputs
    }

    fn pre(&self) -> impl Iterator<Item = &[Stateless]> {
        self.stages.iter().flat_map(|stage| &stage.inlets).map(|inlet| &inlet.pre[..])
    }

    /// Whether the order of input rows can change the output: a stateful user function sees it.
    pub fn needs_order(&self) -> bool {
        self.keyed().any(|keyed| matches!(keyed.kind, KeyedKind::StatefulMap { .. } | KeyedKind::GroupState { .. }))
    }

    fn aggregates_by_call(&self) -> bool {
        self.keyed().any(|keyed| matches!(keyed.kind, KeyedKind::Aggregate { .. }))
    }

    /// Whether it calls functions of the user.
    pub fn has_calls(&self) -> bool {
        self.needs_order() || self.aggregates_by_call() || self.pre().any(|steps| !steps.is_empty())
    }

    /// Whether a part of it holds back: a flat map, a bounded part, a loop or a join.
    pub fn is_metered(&self) -> bool {
        self.expands() || self.keyed().any(|keyed| matches!(keyed.kind, KeyedKind::Join(_)))
    }

    /// Whether windows of it overlap, so that its epochs may give many times what came in.
    pub fn overlaps(&self) -> bool {
        self.keyed().any(|keyed| match &keyed.kind {
            KeyedKind::Window { windows, .. } => windows.size_us() > windows.every_us(),
            _ => false,
        })
    }

    /// Whether a step without state of it holds back.
    pub fn expands(&self) -> bool {
        self.pre().any(is_metered)
    }

    /// The plan in words: a line per operator with its exchange, key, windows and state.
    pub fn explain(&self) -> String {
        crate::explain::explain(self)
    }

    /// The plan as a drawing: text for Graphviz, with each way that rows take.
    pub fn dot(&self) -> String {
        crate::dot::dot(self)
    }
}

fn source((index, spec): (usize, &SourceSpec)) -> Result<Source, PlanError> {
    let (step, schema) = (StepName::new(index, "source"), spec.schema.clone());
    unique(&step, &schema)?;
    let event_time = match &spec.event_time {
        None => None,
        Some(name) => {
            let at = column(&step, &schema, name)?;
            let field = schema.field(at);
            if !EventTime::supports(field.data_type()) {
                return Err(wrong_type(&step, field, "event time needs a timestamp, or int64 in milliseconds"));
            }
            Some(EventTime { name: name.clone(), column: at, data_type: field.data_type().clone() })
        }
    };
    if !(0..=EVENT_TIME_LIMIT_US / 1_000).contains(&spec.lateness_ms) {
        return Err(PlanError::Range { step, name: "lateness_ms", value: spec.lateness_ms });
    }
    if let Some(value) = spec.idle_after_ms.filter(|value| *value < 1) {
        return Err(PlanError::Range { step, name: "idle_after_ms", value });
    }
    for name in &spec.order_by {
        storable(&step, schema.field(column(&step, &schema, name)?))?;
    }
    let (lateness_us, idle_after_ms) = (spec.lateness_ms * 1_000, spec.idle_after_ms);
    Ok(Source { name: spec.name.clone(), schema, event_time, lateness_us, idle_after_ms })
}

/// A node as those behind it see it.
#[derive(Clone)]
struct Node {
    point: Point,
    waiting: Waiting,
    /// The stage that is not cut yet.
    open: Inlet,
}

impl Node {
    fn of_source(number: usize, source: &Source) -> Self {
        let (schema, event_time) = (source.schema.clone(), source.event_time.clone());
        let open = Inlet { from: vec![Origin::Source(number)], input: schema.clone(), pre: Vec::new() };
        Self { point: Point { schema, event_time, window: None, updates: false }, waiting: Waiting::default(), open }
    }
}

struct Compiler {
    /// The sources and the steps so far, but those that no step takes any more.
    nodes: Vec<Option<Node>>,
    /// How many steps have still to take each node.
    left: Vec<usize>,
    /// How many steps take the rows of each node.
    uses: Vec<usize>,
    /// For each step the nodes whose rows it takes.
    inputs: Vec<Vec<usize>>,
    stages: Vec<Stage>,
    // The step that is compiled: what it takes, and then what it makes of it.
    point: Point,
    waiting: Waiting,
    open: Inlet,
    /// What enters on a second side.
    right: Option<Inlet>,
}

/// Which rows of a join meet, and come out.
struct Meet<'a> {
    how: JoinHow,
    within: Option<(i64, i64)>,
    until: Option<&'a str>,
    once: bool,
    windowed: bool,
}

impl Compiler {
    fn new(spec: &PlanSpec, sources: &[Source]) -> Result<Self, PlanError> {
        let nodes: Vec<_> =
            sources.iter().enumerate().map(|(number, source)| Some(Node::of_source(number, source))).collect();
        let mut uses = vec![0; nodes.len() + spec.steps.len()];
        let mut inputs = Vec::new();
        for (index, node) in spec.steps.iter().enumerate() {
            let (step, last) = (StepName::new(index, node.step.op()), nodes.len() + index - 1);
            let named = if node.inputs.is_empty() { vec![last] } else { node.inputs.clone() };
            if let Some(&input) = named.iter().find(|input| **input > last) {
                return Err(PlanError::NoSuchInput { step, input, last });
            }
            let (fits, need) = match node.step {
                StepSpec::Union {} => (named.len() > 1, "two inputs or more"),
                StepSpec::Join { .. } => (named.len() == 2, "two inputs"),
                _ => (named.len() == 1, "one input"),
            };
            if !fits {
                return Err(PlanError::Inputs { step, found: named.len(), need });
            }
            named.iter().for_each(|input| uses[*input] += 1);
            inputs.push(named);
        }
        let Node { point, waiting, open } = Node::of_source(0, &sources[0]);
        let (left, stages) = (uses.clone(), Vec::new());
        Ok(Self { nodes, left, uses, inputs, stages, point, waiting, open, right: None })
    }

    /// A node, for a step that takes its rows or, of the last one, for the output. Steps that are not cut off are copied only to several
    /// takers, so a line costs what it is long.
    fn node(&mut self, at: usize) -> Node {
        self.left[at] = self.left[at].saturating_sub(1);
        let node = if self.left[at] == 0 { self.nodes[at].take() } else { self.nodes[at].clone() };
        node.expect("taken as often as counted")
    }

    /// Makes a node what the step that is compiled takes.
    fn open(&mut self, at: usize) {
        let Node { point, waiting, open } = self.node(at);
        (self.point, self.waiting, self.open) = (point, waiting, open);
    }

    /// The stages, which of them gives the output, and the event time of that.
    fn compile(mut self, spec: &PlanSpec) -> Result<(Vec<Stage>, usize, Option<String>), PlanError> {
        let last = self.uses.len() - 1;
        let name = |node: usize| match node.checked_sub(spec.sources.len()) {
            None => StepName::new(node, "source"),
            Some(index) => StepName::new(index, spec.steps[index].step.op()),
        };
        if let Some(node) = (0..last).find(|node| self.uses[*node] == 0) {
            return Err(PlanError::Misplaced { step: name(node), reason: "no step takes its rows; leave it out" });
        }
        for (index, node) in spec.steps.iter().enumerate() {
            let step = StepName::new(index, node.step.op());
            let inputs = std::mem::take(&mut self.inputs[index]);
            self.open(inputs[0]);
            match &node.step {
                StepSpec::Union {} => self.union(step, &inputs)?,
                StepSpec::Join { left, right, how, within, until, validate, windowed, suffix, .. } => {
                    let once = *validate == Some(Validate::OneToMany);
                    let rows = Meet { how: *how, within: *within, until: until.as_deref(), once, windowed: *windowed };
                    self.join(step, inputs[1], [left, right], rows, suffix.as_deref().unwrap_or(""))?;
                }
                other => self.step(step, other)?,
            }
            // What several steps use runs once, and paths that meet once do not meet again in each of them.
            if self.uses[self.nodes.len()] > 1 && (!self.open.pre.is_empty() || self.open.from.len() > 1) {
                self.cut(None, self.point.schema.clone());
            }
            let empty = Inlet { from: Vec::new(), input: self.open.input.clone(), pre: Vec::new() };
            let (point, waiting) = (self.point.clone(), std::mem::take(&mut self.waiting));
            self.nodes.push(Some(Node { point, waiting, open: std::mem::replace(&mut self.open, empty) }));
        }
        self.open(last);
        self.none_waits("nothing follows that uses it")?;
        if !self.open.pre.is_empty() || !matches!(self.open.from[..], [Origin::Stage(_)]) {
            self.cut(None, self.point.schema.clone());
        }
        let [Origin::Stage(output)] = self.open.from[..] else { unreachable!("what was cut is a stage") };
        Ok((self.stages, output, self.point.event_time.map(|time| time.name)))
    }

    /// Refuses a key or a window that no step has used.
    fn none_waits(&self, reason: &'static str) -> Result<(), PlanError> {
        let key = self.waiting.key.as_ref().map(|(step, ..)| step);
        match key.or(self.waiting.windows.as_ref().map(|(step, _)| step)) {
            Some(step) => Err(PlanError::Misplaced { step: step.clone(), reason }),
            None => Ok(()),
        }
    }

    /// Ends the stage, behind its operator if it has one.
    fn cut(&mut self, keyed: Option<KeyedSpec>, output: SchemaRef) {
        let next = Inlet { from: vec![Origin::Stage(self.stages.len())], input: output.clone(), pre: Vec::new() };
        let inlets = [Some(std::mem::replace(&mut self.open, next)), self.right.take()].into_iter().flatten().collect();
        self.stages.push(Stage { inlets, keyed, output });
    }

    /// Rows of the node that is open and of another one that meet.
    fn join(
        &mut self,
        step: StepName,
        other: usize,
        names: [&[String]; 2],
        Meet { how, within, until, once, windowed }: Meet<'_>,
        suffix: &str,
    ) -> Result<(), PlanError> {
        let [left_names, right_names] = names;
        if left_names.len() != right_names.len() || left_names.is_empty() {
            return Err(PlanError::JoinColumns { step, left: left_names.len(), right: right_names.len() });
        }
        let misplaced = |reason| Err(PlanError::Misplaced { step: step.clone(), reason });
        let Node { point, waiting, open } = self.node(other);
        let mut windows = [None, None];
        for (windows, waiting) in windows.iter_mut().zip([std::mem::take(&mut self.waiting), waiting]) {
            self.waiting = waiting;
            if windowed {
                *windows = match self.waiting.windows.take() {
                    Some((_, Cut::Sessions(_))) => return misplaced(SESSIONS),
                    Some((_, Cut::Windows(cut))) => Some(cut),
                    None => None,
                };
            }
            self.none_waits("join names its keys itself; leave this out")?;
        }
        let windows = match windows {
            [Some(left), Some(right)] if left == right => Some(left),
            [None, None] if !windowed => None,
            _ => return misplaced("a join in windows needs the same window directly before it on both sides"),
        };
        if windowed && within.is_some() {
            return misplaced("rows of one window meet, whatever their times; leave the interval out");
        }
        if until.is_some() && (within.is_some() || windowed) {
            return misplaced(
                "until says up to when a row of the left side meets others; leave within and the window out",
            );
        }
        if once && within.is_some() {
            return misplaced(
                "validate='1:m' goes with until, with a window, or with neither; within has no such check",
            );
        }
        if once && how.is_filter() {
            return misplaced("how='semi' and 'anti' ask whether there is any row; leave validate out");
        }
        if self.point.updates || point.updates {
            return misplaced(
                "a side of it replaces earlier values, which would be joined as well; write emit='final' in the agg before it",
            );
        }
        if let Some((lower_us, upper_us)) = within {
            let wrong = |reason| PlanError::JoinWithin { step: step.clone(), lower_us, upper_us, reason };
            let limit = -EVENT_TIME_LIMIT_US..=EVENT_TIME_LIMIT_US;
            if lower_us > upper_us {
                return Err(wrong("ends before it begins, so nothing would meet"));
            }
            if !limit.contains(&lower_us) || !limit.contains(&upper_us) {
                return Err(wrong("is longer than the range of event times"));
            }
        }
        let until = match until {
            None => None,
            Some(name) => {
                let at = column(&step, &self.point.schema, name)?;
                let field = self.point.schema.field(at);
                if !EventTime::supports(field.data_type()) {
                    return Err(wrong_type(&step, field, "until needs a timestamp, or int64 in milliseconds"));
                }
                let (name, data_type) = (name.to_owned(), field.data_type().clone());
                Some(Box::new(EventTime { name, column: at, data_type }))
            }
        };
        let timed = within.is_some() || windowed || until.is_some();
        let side = |point: &Point, names: &[String]| -> Result<Joined, PlanError> {
            let input = point.schema.clone();
            let on = key_columns(&step, &input, names)?;
            // Rows are kept as bytes of all their columns.
            input.fields().iter().try_for_each(|field| storable(&step, field))?;
            let time = match (&point.event_time, timed) {
                (None, true) => return Err(PlanError::NoEventTime { step: step.clone() }),
                (time, _) => time.clone().filter(|_| timed),
            };
            let bounds = time.iter().filter(|_| windowed).flat_map(|time| {
                [WINDOW_START, WINDOW_END].map(|name| Arc::new(Field::new(name, time.data_type.clone(), true)))
            });
            let fields: Vec<_> = bounds.chain(input.fields().iter().cloned()).collect();
            let behind = fields.len() - input.fields().len();
            let routed: SchemaRef = Arc::new(Schema::new(fields));
            unique(&step, &routed)?;
            let time = time.map(|time| EventTime { column: time.column + behind, ..time });
            let all: Vec<usize> = (0..routed.fields().len()).collect();
            let on = on.into_iter().map(|at| at + behind).collect();
            Ok(Joined { input, routed, on, time, kept: all.clone(), taken: all })
        };
        let (left, mut right) = (side(&self.point, left_names)?, side(&point, right_names)?);
        let behind = if windowed { 2 } else { 0 };
        for (one, other) in (0..behind).zip(0..).chain(left.on.iter().copied().zip(right.on.iter().copied())) {
            let (one, other) = (left.routed.field(one), right.routed.field(other));
            if plain_type(one.data_type()) != plain_type(other.data_type()) {
                let (left, right) = (Box::new(one.clone()), Box::new(other.clone()));
                return Err(PlanError::JoinTypes { step, left, right });
            }
        }
        // A key that has one name comes out once.
        let name = |side: &Joined, at: usize| side.routed.field(at).name().clone();
        let same = |at: &usize| {
            let mut keys = left.on.iter().zip(&right.on);
            *at < behind || keys.any(|(l, r)| r == at && name(&left, *l) == name(&right, *r))
        };
        let taken = right.taken.iter().copied().filter(|at| !how.is_filter() && !same(at)).collect();
        right.taken = taken;
        if how.is_filter() {
            // Whether there is one is all that is asked.
            right.kept = right.on.clone();
        }
        // Joined with itself again and again a flow has twice as many each time.
        let columns = left.taken.len() + right.taken.len();
        if columns > MOST_COLUMNS {
            return Err(PlanError::Range { step, name: "the number of columns that come out", value: columns as i64 });
        }
        let (lone_right, lone_left) = match how {
            JoinHow::Left => (false, true),
            JoinHow::Right => (true, false),
            JoinHow::Full => (true, true),
            JoinHow::Inner | JoinHow::Semi | JoinHow::Anti => (false, false),
        };
        let field = |schema: &Schema, at: usize, lone: bool| {
            let field = schema.field(at);
            let nullable = at >= behind && (field.is_nullable() || lone);
            Arc::new(field.clone().with_nullable(nullable))
        };
        // A column that both sides have keeps its name on the left.
        let names: HashSet<&String> = left.routed.fields().iter().map(|field| field.name()).collect();
        let renamed = |field: Arc<Field>| match names.contains(field.name()) {
            true => Arc::new(field.as_ref().clone().with_name(format!("{}{suffix}", field.name()))),
            false => field,
        };
        let fields = left.taken.iter().map(|at| field(&left.routed, *at, lone_right));
        let fields = fields.chain(right.taken.iter().map(|at| renamed(field(&right.routed, *at, lone_left))));
        let output: SchemaRef = Arc::new(Schema::new(fields.collect::<Vec<_>>()));
        unique(&step, &output)?;
        let window = self.point.event_time.take().filter(|_| windowed);
        (self.point.window, self.right) = (window, Some(open));
        // A window's start tells its end.
        let keys = left.on.iter().copied().chain(windowed.then_some(0)).collect();
        let within = match (windowed, &until) {
            (true, _) => Some((0, 0)),
            (false, Some(_)) => Some((0, i64::MAX)),
            (false, None) => within,
        };
        self.close(KeyedSpec {
            name: "join".into(),
            input: left.input.clone(),
            routed: left.routed.clone(),
            output,
            keys,
            reject_nulls: false,
            kind: KeyedKind::Join(Join { how, sides: [left, right], within, until, once, windows, own: 0 }),
            step,
            operator: String::new(),
            reads: None,
        });
        Ok(())
    }

    /// The rows of several nodes as one stream.
    fn union(&mut self, step: StepName, inputs: &[usize]) -> Result<(), PlanError> {
        let mut from = Vec::new();
        let first = self.point.clone();
        for (at, &input) in inputs.iter().enumerate() {
            // The first is open.
            let point = match at {
                0 => first.clone(),
                _ => {
                    let Node { point, waiting, open } = self.node(input);
                    (self.waiting, self.open) = (waiting, open);
                    point
                }
            };
            self.none_waits("union joins whole rows; put it behind the step that this describes, or before it")?;
            let like = |a: &Field, b: &Field| a.name() == b.name() && a.data_type() == b.data_type();
            let fields = |point: &Point| point.schema.fields().clone();
            let same = fields(&point).len() == fields(&first).len()
                && fields(&point).iter().zip(&fields(&first)).all(|(a, b)| like(a, b));
            if !same {
                let (expected, found) = crate::ddl::both(&first.schema, &point.schema);
                return Err(PlanError::UnionColumns { step, expected, found });
            }
            if !self.open.pre.is_empty() {
                self.cut(None, point.schema.clone());
            }
            from.append(&mut self.open.from);
            let Point { event_time, window, updates, schema } = &mut self.point;
            *event_time = event_time.take().filter(|time| point.event_time.as_ref() == Some(time));
            *window = window.take().filter(|time| point.window.as_ref() == Some(time));
            *updates |= point.updates;
            let nullable = |(a, b): (&Arc<Field>, &Arc<Field>)| {
                a.as_ref().clone().with_nullable(a.is_nullable() || b.is_nullable())
            };
            let fields = schema.fields().iter().zip(point.schema.fields()).map(nullable);
            *schema = Arc::new(Schema::new(fields.collect::<Vec<_>>()));
        }
        self.open = Inlet { from, input: self.point.schema.clone(), pre: Vec::new() };
        Ok(())
    }

    fn step(&mut self, step: StepName, spec: &StepSpec) -> Result<(), PlanError> {
        let misplaced = |reason| Err(PlanError::Misplaced { step: step.clone(), reason });
        match spec {
            StepSpec::MapBatches { .. }
            | StepSpec::FlatMap { .. }
            | StepSpec::Bounded { .. }
            | StepSpec::Iterate { .. } => {
                if self.waiting.key.is_some() || self.waiting.windows.is_some() {
                    return misplaced(
                        "key_by and window must be followed by the step they describe; move this before them",
                    );
                }
                let before = self.point.schema.clone();
                let (made, schema) = stateless(step, spec, &before)?;
                self.point.schema = schema;
                self.keep_times(&before);
                self.open.pre.push(made);
                Ok(())
            }
            StepSpec::KeyBy { columns, nulls } => {
                if self.waiting.key.is_some() {
                    return misplaced("the flow is keyed already; name all key columns in one key_by");
                }
                if columns.is_empty() {
                    return misplaced("a key needs a column; leave key_by out to aggregate everything");
                }
                let columns = key_columns(&step, &self.point.schema, columns)?;
                self.waiting.key = Some((step, columns, *nulls));
                Ok(())
            }
            StepSpec::Window { kind, size_us, every_us, offset_us, zone } => {
                self.window(step, *kind, (*size_us, *every_us, *offset_us), zone.as_deref())
            }
            StepSpec::Agg { emit, aggs, .. } => self.agg(step, *emit, aggs),
            StepSpec::Distinct { columns, .. } => self.distinct(step, columns),
            StepSpec::StatefulMap { call, columns, schema, name, ends, sides, .. } => {
                let name = if name.is_empty() { "stateful_map" } else { name };
                self.foreign(step, columns, schema, name, |_| KeyedKind::StatefulMap {
                    call: *call,
                    ends: *ends,
                    sides: sides.clone(),
                })
            }
            StepSpec::Aggregate { call, emit, schema, name, .. } => self.aggregate(step, *call, *emit, schema, name),
            StepSpec::GroupState { call, columns, schema, name, event_time, sides, .. } => {
                if *event_time && self.point.event_time.is_none() {
                    return Err(PlanError::NoEventTime { step });
                }
                let name = if name.is_empty() { "group_state" } else { name };
                self.foreign(step, columns, schema, name, |point| KeyedKind::GroupState {
                    call: *call,
                    late_by: point.event_time.clone().filter(|_| *event_time),
                    sides: sides.clone(),
                })
            }
            StepSpec::Top { n, by, descending, per, .. } => self.top(step, *n, by, *descending, per),
            StepSpec::Union {} | StepSpec::Join { .. } => unreachable!("a step of several inputs"),
        }
    }

    /// After a user function, event time and window columns survive when name and type do.
    fn keep_times(&mut self, before: &Schema) {
        let schema = &self.point.schema;
        let survives = |name: &str| match (schema.field_with_name(name), before.field_with_name(name)) {
            (Ok(now), Ok(then)) => now.data_type() == then.data_type(),
            _ => false,
        };
        self.point.event_time = self.point.event_time.take().filter(|time| survives(&time.name)).map(|time| {
            let column = schema.index_of(&time.name).expect("it survives");
            EventTime { column, ..time }
        });
        self.point.window = self.point.window.take().filter(|_| survives(WINDOW_START) && survives(WINDOW_END));
    }

    fn window(
        &mut self,
        step: StepName,
        kind: WindowKind,
        (size_us, every_us, offset_us): (i64, Option<i64>, Option<i64>),
        zone: Option<&str>,
    ) -> Result<(), PlanError> {
        if self.waiting.windows.is_some() {
            return Err(PlanError::Misplaced { step, reason: "the flow is windowed already" });
        }
        let Some(event_time) = &self.point.event_time else { return Err(PlanError::NoEventTime { step }) };
        let wrong = |name, value, reason| PlanError::Window { step: step.clone(), name, value, reason };
        let every = every_us.unwrap_or(size_us);
        if kind == WindowKind::Session {
            if every != size_us || offset_us.is_some() || zone.is_some() {
                return Err(PlanError::Misplaced {
                    step,
                    reason: "a session has a gap, and no period, offset or zone",
                });
            }
            if size_us < 1 {
                return Err(wrong("size_us", size_us, "the gap of sessions must be positive"));
            }
            if size_us > EVENT_TIME_LIMIT_US {
                return Err(wrong("size_us", size_us, "is longer than the range of event times"));
            }
            if size_us % event_time.resolution_us() != 0 {
                return Err(wrong("size_us", size_us, "is not a multiple of the event-time column's unit"));
            }
            self.waiting.windows = Some((step, Cut::Sessions(size_us)));
            return Ok(());
        }
        match kind {
            WindowKind::Tumbling if every != size_us => {
                return Err(wrong(
                    "every_us",
                    every,
                    "a tumbling window has no period of its own; use a sliding window",
                ));
            }
            WindowKind::Sliding if every_us.is_none() => {
                return Err(PlanError::Misplaced { step, reason: "a sliding window needs a period: give every_us" });
            }
            _ => {}
        }
        let offset = offset_us.unwrap_or(0);
        let zone =
            zone.map(|name| Zone::find(name).ok_or_else(|| PlanError::Zone { step: step.clone(), zone: name.into() }));
        let zone = zone.transpose()?;
        let all = [("size_us", size_us), ("every_us", every), ("offset_us", offset)];
        let windows = Windows::new(size_us, every).and_then(|windows| windows.placed(offset, zone));
        let windows = windows.map_err(|(name, reason)| {
            let (_, value) = all.into_iter().find(|(known, _)| *known == name).expect("one of the options");
            wrong(name, value, reason)
        })?;
        for (name, value) in all {
            if value % event_time.resolution_us() != 0 {
                return Err(wrong(name, value, "is not a multiple of the event-time column's unit"));
            }
        }
        self.waiting.windows = Some((step, Cut::Windows(windows)));
        Ok(())
    }

    fn agg(&mut self, step: StepName, emit: Option<Emit>, aggs: &[AggSpec]) -> Result<(), PlanError> {
        let misplaced = |reason| Err(PlanError::Misplaced { step: step.clone(), reason });
        if aggs.is_empty() {
            return misplaced("agg needs at least one aggregate");
        }
        if aggs.len() > 255 {
            return Err(PlanError::Range { step, name: "aggs", value: aggs.len() as i64 });
        }
        if emit == Some(Emit::New) {
            return misplaced(
                "agg gives keys with their values, so emit is 'final' or 'update'; distinct gives new keys",
            );
        }
        if self.point.updates {
            return misplaced(
                "its input replaces earlier values, which would be counted again; write emit='final' in the agg before it",
            );
        }
        let Waiting { key, windows } = std::mem::take(&mut self.waiting);
        let schema = self.point.schema.clone();
        let (keys, nulls) = key.map_or((Vec::new(), Nulls::Group), |(_, keys, nulls)| (keys, nulls));
        let aggregates = aggs.iter().map(|agg| aggregate(&step, &self.point, agg)).collect::<Result<Vec<_>, _>>()?;
        let mut fields = Vec::new();
        if windows.is_some() {
            let time = self.point.event_time.as_ref().expect("a window step needs it");
            fields.extend([WINDOW_START, WINDOW_END].map(|name| Field::new(name, time.data_type.clone(), false)));
        }
        fields.extend(keys.iter().map(|&at| {
            let field = schema.field(at).clone();
            let data_type = plain_type(field.data_type()).clone();
            field.with_data_type(data_type)
        }));
        fields.extend(aggregates.iter().map(|aggregate| aggregate.field(!aggregate.function.is_count())));
        let output: SchemaRef = Arc::new(Schema::new(fields));
        unique(&step, &output)?;
        let event_time = self.point.event_time.take();
        let (kind, updates) = match windows {
            Some((_, windows)) => {
                if emit == Some(Emit::Update) {
                    return misplaced("a windowed aggregate speaks when a window closes; leave emit out");
                }
                let event_time = event_time.expect("a window step needs it");
                self.point.window = Some(event_time.clone());
                let kind = match windows {
                    Cut::Windows(windows) => KeyedKind::Window { windows, event_time, aggregates, best: None },
                    Cut::Sessions(gap_us) => KeyedKind::Session { gap_us, event_time, aggregates },
                };
                (kind, false)
            }
            None => {
                let emit = emit.unwrap_or(Emit::Final);
                self.point.window = None;
                (KeyedKind::Running { emit, aggregates }, emit == Emit::Update)
            }
        };
        self.point.updates = updates;
        self.close(KeyedSpec {
            name: "agg".into(),
            input: schema.clone(),
            routed: schema,
            output,
            keys,
            reject_nulls: nulls == Nulls::Reject,
            kind,
            step,
            operator: String::new(),
            reads: None,
        });
        Ok(())
    }

    /// Each combination of values once: in a window, when it closes; without one, when it first comes.
    fn distinct(&mut self, step: StepName, names: &[String]) -> Result<(), PlanError> {
        let misplaced = |reason| Err(PlanError::Misplaced { step: step.clone(), reason });
        let Waiting { key, windows } = std::mem::take(&mut self.waiting);
        if key.is_some() {
            return misplaced("distinct names its columns itself; leave key_by out");
        }
        if self.point.updates {
            return misplaced(
                "its input replaces earlier values, which would come out as well; write emit='final' in the agg before it",
            );
        }
        if names.is_empty() {
            return misplaced("distinct needs a column");
        }
        let schema = self.point.schema.clone();
        let keys = key_columns(&step, &schema, names)?;
        let mut fields = Vec::new();
        let event_time = self.point.event_time.clone();
        if windows.is_some() {
            let time = event_time.as_ref().expect("a window step needs it");
            fields.extend([WINDOW_START, WINDOW_END].map(|name| Field::new(name, time.data_type.clone(), false)));
        }
        fields.extend(keys.iter().map(|&at| {
            let field = schema.field(at).clone();
            let data_type = plain_type(field.data_type()).clone();
            field.with_data_type(data_type)
        }));
        let output: SchemaRef = Arc::new(Schema::new(fields));
        unique(&step, &output)?;
        let windowed = event_time.clone().filter(|_| windows.is_some());
        let kind = match windows {
            Some((_, Cut::Sessions(_))) => return misplaced(SESSIONS),
            Some((_, Cut::Windows(windows))) => {
                let event_time = event_time.expect("a window step needs it");
                KeyedKind::Window { windows, event_time, aggregates: Vec::new(), best: None }
            }
            None => KeyedKind::Running { emit: Emit::New, aggregates: Vec::new() },
        };
        self.close(KeyedSpec {
            name: "distinct".into(),
            input: schema.clone(),
            routed: schema.clone(),
            output,
            keys,
            reject_nulls: false,
            kind,
            step,
            operator: String::new(),
            reads: None,
        });
        match windowed {
            Some(time) => (self.point.event_time, self.point.window) = (None, Some(time)),
            None => self.keep_times(&schema),
        }
        Ok(())
    }

    /// User code with state per key.
    fn foreign(
        &mut self,
        step: StepName,
        columns: &[String],
        output: &SchemaRef,
        name: &str,
        kind: impl FnOnce(&Point) -> KeyedKind,
    ) -> Result<(), PlanError> {
        let misplaced = |reason| Err(PlanError::Misplaced { step: step.clone(), reason });
        let Waiting { key, windows } = std::mem::take(&mut self.waiting);
        if windows.is_some() {
            return misplaced("a stateful function has no windows; keep them in its state");
        }
        let schema = self.point.schema.clone();
        unique(&step, output)?;
        let named = key_columns(&step, &schema, columns)?;
        let (keys, nulls) = match key {
            Some((_, keys, nulls)) if named.is_empty() || named == keys => (keys, nulls),
            Some(_) => return misplaced("its key columns differ from those of key_by"),
            None if named.is_empty() => return misplaced("it needs a key: put key_by before it"),
            None => (named, Nulls::Group),
        };
        keys.iter().try_for_each(|&at| storable(&step, schema.field(at)))?;
        keys.iter().try_for_each(|&at| distinct_in_python(&step, schema.field(at)))?;
        let kind = kind(&self.point);
        self.close(KeyedSpec {
            name: name.into(),
            input: schema.clone(),
            routed: schema.clone(),
            output: output.clone(),
            keys,
            reject_nulls: nulls == Nulls::Reject,
            kind,
            step,
            operator: String::new(),
            reads: None,
        });
        self.point.window = None;
        self.point.updates = false;
        self.keep_times(&schema);
        Ok(())
    }

    /// User code that aggregates blocks by key and window.
    fn aggregate(
        &mut self,
        step: StepName,
        call: usize,
        emit: Option<Emit>,
        output: &SchemaRef,
        name: &str,
    ) -> Result<(), PlanError> {
        let misplaced = |reason| Err(PlanError::Misplaced { step: step.clone(), reason });
        if self.point.updates {
            return misplaced(
                "its input replaces earlier values, which would be counted again; write emit='final' in the agg before it",
            );
        }
        let Waiting { key, windows } = std::mem::take(&mut self.waiting);
        let (keys, nulls) = key.map_or_else(|| (Vec::new(), Nulls::Group), |(_, keys, nulls)| (keys, nulls));
        let input = self.point.schema.clone();
        keys.iter().try_for_each(|&at| distinct_in_python(&step, input.field(at)))?;
        let windows = match windows {
            Some((_, cut)) => Some((cut, self.point.event_time.clone().expect("a window step needs it"))),
            None => None,
        };
        let bounds: Vec<Field> = match &windows {
            None => Vec::new(),
            Some((_, time)) => [WINDOW_START, WINDOW_END].map(|n| Field::new(n, time.data_type.clone(), true)).into(),
        };
        if emit == Some(Emit::New) || (windows.is_some() && emit == Some(Emit::Update)) {
            return misplaced("it speaks when a window closes, and without windows emit is 'final' or 'update'");
        }
        let behind = bounds.len();
        let fields = bounds.iter().cloned().map(Arc::new).chain(input.fields().iter().cloned());
        let routed: SchemaRef = Arc::new(Schema::new(fields.collect::<Vec<_>>()));
        unique(&step, &routed)?;
        unique(&step, output)?;
        let keyed = keys.iter().map(|&at| (input.field(at).name(), plain_type(input.field(at).data_type())));
        let head = bounds.iter().map(|field| (field.name(), field.data_type())).chain(keyed);
        let head: Vec<_> = head.collect();
        let found = output.fields().iter().map(|field| (field.name(), field.data_type()));
        if output.fields().len() <= head.len() || !found.zip(&head).all(|(found, head)| found == *head) {
            return misplaced("its columns are the bounds of its window, its keys, and at least one more");
        }
        let window = windows.as_ref().map(|(_, time)| time.clone());
        self.close(KeyedSpec {
            name: if name.is_empty() { "aggregate" } else { name }.into(),
            input,
            routed,
            output: output.clone(),
            keys: keys.into_iter().map(|at| at + behind).collect(),
            reject_nulls: nulls == Nulls::Reject,
            kind: KeyedKind::Aggregate { call, windows },
            step,
            operator: String::new(),
            reads: None,
        });
        self.point.updates = window.is_none() && emit == Some(Emit::Update);
        (self.point.event_time, self.point.window) = (None, window);
        Ok(())
    }

    fn top(&mut self, step: StepName, n: u64, by: &str, descending: bool, per: &Per) -> Result<(), PlanError> {
        let misplaced = |reason| Err(PlanError::Misplaced { step: step.clone(), reason });
        let count = usize::try_from(n).ok().filter(|&n| (1..=1 << 31).contains(&n));
        let Some(count) = count else {
            let value = i64::try_from(n).unwrap_or(i64::MAX);
            return Err(PlanError::Range { step, name: "n", value });
        };
        if self.point.updates {
            return misplaced(
                "its input replaces earlier values, which would be ranked again; write emit='final' in the agg before it",
            );
        }
        let Waiting { key, windows } = std::mem::take(&mut self.waiting);
        if key.is_some() {
            return misplaced("top groups by per=; leave key_by out");
        }
        let input = self.point.schema.clone();
        let windows = match windows {
            Some((_, Cut::Sessions(_))) => return misplaced(SESSIONS),
            Some((_, Cut::Windows(windows))) => Some(windows),
            None => None,
        };
        let assign = windows.map(|windows| (windows, self.point.event_time.clone().expect("a window step needs it")));
        let (routed, output, window) = match &assign {
            None => (input.clone(), input.clone(), self.point.window.clone()),
            Some((_, time)) => {
                let with = |nullable| -> SchemaRef {
                    let bounds = [WINDOW_START, WINDOW_END]
                        .map(|name| Arc::new(Field::new(name, time.data_type.clone(), nullable)));
                    Arc::new(Schema::new(bounds.into_iter().chain(input.fields().iter().cloned()).collect::<Vec<_>>()))
                };
                (with(true), with(false), Some(time.clone()))
            }
        };
        unique(&step, &routed)?;
        let by = column(&step, &routed, by)?;
        if routed.field(by).data_type().is_nested() {
            return Err(wrong_type(&step, routed.field(by), "ranking needs a column with an order"));
        }
        let group = match per {
            Per::All if assign.is_some() => {
                return misplaced("after window, top needs per='window' or columns with window_end");
            }
            Per::All => Vec::new(),
            Per::Window if window.is_none() => {
                return misplaced(
                    "there is no window here; put window before it, or a windowed agg that keeps its window columns",
                );
            }
            Per::Window => vec![column(&step, &routed, WINDOW_START)?, column(&step, &routed, WINDOW_END)?],
            Per::Columns(names) => key_columns(&step, &routed, names)?,
        };
        // A group with a window's end is complete when the watermark passes it.
        let end = match (&window, routed.index_of(WINDOW_END)) {
            (Some(time), Ok(at)) if group.contains(&at) => {
                Some(EventTime { name: WINDOW_END.into(), column: at, data_type: time.data_type.clone() })
            }
            _ => None,
        };
        if assign.is_some() && end.is_none() {
            return misplaced("after window, top needs per='window' or columns with window_end");
        }
        // Candidates are kept as bytes of all their columns.
        routed.fields().iter().try_for_each(|field| storable(&step, field))?;
        // A window's start tells its end: hashing one column of the two is enough, and cheaper.
        let keys = match per {
            Per::Window => group[..1].to_vec(),
            _ => group.clone(),
        };
        self.point.window = end.as_ref().and(window);
        self.point.event_time = None;
        let top = Top { n: count, by, descending, group, end, assign };
        self.close(KeyedSpec {
            name: "top".into(),
            input,
            routed,
            output,
            keys,
            reject_nulls: false,
            kind: KeyedKind::Top(top),
            step,
            operator: String::new(),
            reads: None,
        });
        Ok(())
    }

    /// Ends the stage with a keyed operator.
    fn close(&mut self, keyed: KeyedSpec) {
        let output = keyed.output.clone();
        self.point.schema = output.clone();
        self.cut(Some(keyed), output);
    }
}

/// Tells windowed aggregates of which a top step alone takes the rows, as they are, which of them it wants: those that it ranks by a count within a window.
fn tell_best(stages: &mut [Stage], output: usize) {
    for at in 0..stages.len() {
        let Some(KeyedSpec { kind: KeyedKind::Top(top), .. }) = &stages[at].keyed else { continue };
        let [Inlet { from, pre, .. }] = &stages[at].inlets[..] else { continue };
        let [Origin::Stage(source)] = from[..] else { continue };
        let taken = stages.iter().flat_map(|stage| &stage.inlets).flat_map(|inlet| &inlet.from);
        let alone = source != output && taken.filter(|from| **from == Origin::Stage(source)).count() == 1;
        let Some(KeyedSpec { kind: KeyedKind::Window { aggregates, .. }, keys, .. }) = &stages[source].keyed else {
            continue;
        };
        // What comes out are the bounds of the window, the keys and the aggregates.
        let counts = |at: &usize| aggregates.get(*at).is_some_and(|aggregate| aggregate.kind.counts());
        let ranked = top.by.checked_sub(2 + keys.len()).filter(counts);
        let (true, true, Some(aggregate)) = (alone && pre.is_empty(), top.group == [0, 1], ranked) else { continue };
        let wanted = Best { n: top.n, aggregate, descending: top.descending };
        if let Some(KeyedSpec { kind: KeyedKind::Window { best, .. }, .. }) = &mut stages[source].keyed {
            *best = Some(wanted);
        }
    }
}

/// Characters of a name: it stands in every file.
const LONGEST_NAME: usize = 100;

/// Gives each keyed step the name of its operator.
fn name_operators(spec: &PlanSpec, stages: &mut [Stage]) -> Result<(), PlanError> {
    let mut unnamed: HashMap<&str, usize> = HashMap::new();
    let mut taken: HashMap<String, StepName> = HashMap::new();
    for keyed in stages.iter_mut().filter_map(|stage| stage.keyed.as_mut()) {
        let (step, op) = (keyed.step.clone(), keyed.step.op);
        let refused = |name: &str, reason: String| {
            Err(PlanError::OperatorName { step: step.clone(), name: name.to_owned(), reason })
        };
        keyed.operator = match spec.steps[step.index].step.operator() {
            Some(name) => match wrong_name(name) {
                Some(reason) => return refused(name, reason),
                None => name.to_owned(),
            },
            None => {
                let number = unnamed.entry(op).or_default();
                *number += 1;
                keyed.reads = Some(keyed.columns_read());
                if *number == 1 { op.to_owned() } else { format!("{op}-{number}") }
            }
        };
        if let Some(other) = taken.insert(keyed.operator.clone(), step.clone()) {
            return refused(
                &keyed.operator,
                format!("is that of {other} already: give each of them a name of its own"),
            );
        }
    }
    Ok(())
}

/// The side outputs of all steps, those of bodies included.
fn each_side(
    spec: &PlanSpec,
    take: &mut dyn FnMut(&StepName, &SideSpec) -> Result<(), PlanError>,
) -> Result<(), PlanError> {
    fn of(
        step: &StepName,
        spec: &StepSpec,
        take: &mut dyn FnMut(&StepName, &SideSpec) -> Result<(), PlanError>,
    ) -> Result<(), PlanError> {
        spec.sides().iter().try_for_each(|side| take(step, side))?;
        (0..).zip(spec.body()).try_for_each(|(at, inner)| of(&step.inside(at, inner.op()), inner, take))
    }
    (0..).zip(&spec.steps).try_for_each(|(at, node)| of(&StepName::new(at, node.step.op()), &node.step, take))
}

/// Refuses side outputs without a name of their own, or without columns.
fn name_sides(spec: &PlanSpec) -> Result<(), PlanError> {
    let mut taken: HashMap<String, StepName> = HashMap::new();
    each_side(spec, &mut |step, side| {
        let refused = |reason| Err(PlanError::SideOutput { step: step.clone(), name: side.name.clone(), reason });
        if let Some(reason) = wrong_name(&side.name) {
            return refused(reason);
        }
        if side.schema.fields().is_empty() {
            return refused("has no columns".to_owned());
        }
        unique(step, &side.schema)?;
        match taken.insert(side.name.clone(), step.clone()) {
            Some(other) => refused(format!("is that of {other} already: give each of them a name of its own")),
            None => Ok(()),
        }
    })
}

/// What is wrong with the name that a user gives to the operator of a step. One that a step has without a name is right: so steps that get
/// names go on from state without them. That two steps of a plan have one is another fault.
fn wrong_name(name: &str) -> Option<String> {
    let reason = if name.is_empty() {
        "is empty"
    } else if name.chars().count() > LONGEST_NAME {
        "is longer than 100 characters"
    } else if name.contains('/') {
        "has a slash"
    } else if name.chars().any(char::is_control) || name.trim() != name {
        "has control characters, or blanks around it"
    } else {
        return None;
    };
    Some(format!("{reason}: a name is 1 to {LONGEST_NAME} printable characters without a slash"))
}

fn aggregate(step: &StepName, point: &Point, agg: &AggSpec) -> Result<Aggregate, PlanError> {
    let schema = &point.schema;
    let option = |(option, value, need)| PlanError::AggregateOption {
        step: step.clone(),
        name: agg.name.clone(),
        option,
        value,
        need,
    };
    let function = match Function::parse(&agg.function, agg.q, agg.error) {
        Some(function) => function.map_err(option)?,
        None => {
            let (name, function) = (agg.name.clone(), agg.function.clone());
            return Err(PlanError::Function { step: step.clone(), name, function });
        }
    };
    let by = match (&agg.by, function.reads_two(), function.is_timed()) {
        (_, true, true) => match &point.event_time {
            Some(time) => Some(time.column),
            None => return Err(PlanError::NoEventTime { step: step.clone() }),
        },
        (Some(by), true, false) => Some(column(step, schema, by)?),
        (None, true, false) => return Err(option(("by", "none".into(), "names the column by which a value is found"))),
        (_, false, _) => None,
    };
    let at = agg.column.as_ref().map(|name| column(step, schema, name)).transpose()?;
    let field = at.map(|at| schema.field(at));
    if field.is_none() && function != Function::Count {
        return Err(PlanError::NoColumn { step: step.clone(), name: agg.name.clone() });
    }
    let by = by.map(|at| (at, schema.field(at)));
    let types = (at.zip(field.map(Field::data_type)), by.map(|(at, field)| (at, field.data_type())));
    let found = Aggregate::resolve(&agg.name, function, types.0, types.1);
    found.map(|aggregate| aggregate.of(field)).map_err(|need| {
        let wrong = if need.starts_with("the column by which") { by.map(|(_, field)| field) } else { field };
        wrong_type(step, wrong.expect("only columns have wrong types"), need)
    })
}

/// Names of some columns, for messages.
pub(crate) fn names(schema: &Schema, columns: &[usize]) -> String {
    let mut words = String::new();
    for (at, &column) in columns.iter().enumerate() {
        let _ = write!(words, "{}{}", if at > 0 { ", " } else { "" }, schema.field(column).name());
    }
    words
}
