//! Compiling a flow: from steps that name things to stages that are cut at exchanges.
//!
//! A stage is some steps without state and then at most one keyed operator behind an exchange. Only the last stage may have none. Compilation
//! resolves every column and type, so that running a plan can fail only on data. Windows and keys wait for the step that uses them.

use std::collections::{HashMap, HashSet};
use std::fmt::Write;
use std::sync::Arc;

use arrow_row::{RowConverter, SortField};
use arrow_schema::{DataType, Field, Schema, SchemaRef};

use crate::agg::{Aggregate, Function};
use crate::chain::{Stateless, is_metered, stateless};
use crate::column::{EVENT_TIME_LIMIT_US, EventTime, plain_type};
use crate::error::{PlanError, StepName};
use crate::keyed::{KeyedKind, KeyedSpec};
use crate::running::Emit;
use crate::spec::{AggSpec, Nulls, PLAN_VERSION, Per, PlanSpec, StepSpec, WindowKind};
use crate::top::Top;
use crate::window::Windows;

/// Name of the column with a window's start.
pub const WINDOW_START: &str = "window_start";
/// Name of the column with a window's end.
pub const WINDOW_END: &str = "window_end";

/// Steps without state and then at most one keyed operator.
#[derive(Clone, Debug, PartialEq)]
pub struct Stage {
    /// Columns that enter.
    pub input: SchemaRef,
    /// Steps without state, before the exchange.
    pub pre: Vec<Stateless>,
    /// The operator behind the exchange.
    pub keyed: Option<KeyedSpec>,
    /// Columns that leave.
    pub output: SchemaRef,
}

/// A compiled flow; equal on every worker that compiles the same text.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    spec: PlanSpec,
    event_time: Option<EventTime>,
    stages: Vec<Stage>,
}

/// What is known of the flow at one step.
struct Point {
    schema: SchemaRef,
    event_time: Option<EventTime>,
    /// Event time that the window columns are read by, while rows still carry them.
    window: Option<EventTime>,
    /// Whether rows are values that later rows replace.
    updates: bool,
}

/// `key_by` and `window` steps that wait for the step they describe.
#[derive(Default)]
struct Waiting {
    key: Option<(StepName, Vec<usize>, Nulls)>,
    windows: Option<(StepName, Windows)>,
}

fn column(step: &StepName, schema: &Schema, name: &str) -> Result<usize, PlanError> {
    schema.index_of(name).map_err(|_| PlanError::MissingColumn {
        step: step.clone(),
        column: name.into(),
        available: schema.fields().iter().map(|field| field.name().clone()).collect(),
    })
}

fn wrong_type(step: &StepName, field: &Field, need: &'static str) -> PlanError {
    PlanError::ColumnType {
        step: step.clone(),
        column: field.name().clone(),
        found: field.data_type().to_string(),
        need,
    }
}

pub(crate) fn unique(step: &StepName, schema: &Schema) -> Result<(), PlanError> {
    let mut names = HashSet::new();
    match schema.fields().iter().find(|field| !names.insert(field.name())) {
        Some(field) => Err(PlanError::DuplicateColumn { step: step.clone(), column: field.name().clone() }),
        None => Ok(()),
    }
}

/// Whether a type, or one that it is made of, is like this.
fn contains(data_type: &DataType, like: fn(&DataType) -> bool) -> bool {
    like(data_type)
        || match data_type {
            DataType::List(field)
            | DataType::LargeList(field)
            | DataType::FixedSizeList(field, _)
            | DataType::ListView(field)
            | DataType::LargeListView(field)
            | DataType::Map(field, _) => contains(field.data_type(), like),
            DataType::Struct(fields) => fields.iter().any(|field| contains(field.data_type(), like)),
            _ => false,
        }
}

fn is_encoded(data_type: &DataType) -> bool {
    matches!(data_type, DataType::Dictionary(_, _) | DataType::RunEndEncoded(_, _))
}

/// A column whose values are kept as bytes and come back with their own type.
fn storable(step: &StepName, field: &Field) -> Result<(), PlanError> {
    if contains(field.data_type(), is_encoded) {
        return Err(wrong_type(
            step,
            field,
            "which does not keep its type in state: convert it to its value type first",
        ));
    }
    let ordered = !contains(field.data_type(), |data_type| matches!(data_type, DataType::Union(_, _)));
    match ordered && RowConverter::supports_fields(&[SortField::new(field.data_type().clone())]) {
        true => Ok(()),
        false => Err(wrong_type(step, field, "which has no order or equality")),
    }
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
        let source = StepName::new(0, "source");
        let schema = spec.source.schema.clone();
        unique(&source, &schema)?;
        let event_time = match &spec.source.event_time {
            None => None,
            Some(name) => {
                let at = column(&source, &schema, name)?;
                let field = schema.field(at);
                if !EventTime::supports(field.data_type()) {
                    return Err(wrong_type(&source, field, "event time needs a timestamp, or int64 in milliseconds"));
                }
                Some(EventTime { name: name.clone(), column: at, data_type: field.data_type().clone() })
            }
        };
        if !(0..=EVENT_TIME_LIMIT_US / 1_000).contains(&spec.source.lateness_ms) {
            return Err(PlanError::Range { step: source, name: "lateness_ms", value: spec.source.lateness_ms });
        }
        for name in &spec.source.order_by {
            storable(&source, schema.field(column(&source, &schema, name)?))?;
        }
        let mut compiler = Compiler {
            point: Point { schema: schema.clone(), event_time: event_time.clone(), window: None, updates: false },
            waiting: Waiting::default(),
            stages: Vec::new(),
            stage: Stage { input: schema.clone(), pre: Vec::new(), keyed: None, output: schema },
        };
        for (index, step) in spec.steps.iter().enumerate() {
            compiler.step(StepName::new(index, step.op()), step)?;
        }
        let mut stages = compiler.finish()?;
        name_operators(&spec, &mut stages)?;
        Ok(Self { spec, event_time, stages })
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

    /// The stages, in order; at least one.
    pub fn stages(&self) -> &[Stage] {
        &self.stages
    }

    /// The keyed steps, in order.
    pub fn keyed(&self) -> impl Iterator<Item = &KeyedSpec> {
        self.stages.iter().filter_map(|stage| stage.keyed.as_ref())
    }

    /// Number of keyed steps.
    pub fn keyed_ops(&self) -> usize {
        self.keyed().count()
    }

    /// Columns of the input.
    pub fn input_schema(&self) -> &SchemaRef {
        &self.spec.source.schema
    }

    /// Columns of the output.
    pub fn output_schema(&self) -> &SchemaRef {
        &self.stages.last().expect("a plan has a stage").output
    }

    /// The event-time column of the input.
    pub fn event_time(&self) -> Option<&EventTime> {
        self.event_time.as_ref()
    }

    /// How far the watermark stays behind the greatest event time, in microseconds.
    pub fn lateness_us(&self) -> i64 {
        self.spec.source.lateness_ms * 1_000
    }

    /// Whether the order of input rows can change the output: a stateful user function sees it.
    pub fn needs_order(&self) -> bool {
        self.keyed().any(|keyed| matches!(keyed.kind, KeyedKind::StatefulMap { .. } | KeyedKind::GroupState { .. }))
    }

    /// Whether it calls functions of the user.
    pub fn has_calls(&self) -> bool {
        self.needs_order() || self.stages.iter().any(|stage| !stage.pre.is_empty())
    }

    /// Whether a part of it holds back: a flat map, a bounded part or a loop.
    pub fn is_metered(&self) -> bool {
        self.stages.iter().any(|stage| is_metered(&stage.pre))
    }

    /// The plan in words: a line per operator with its exchange, key, windows and state.
    pub fn explain(&self) -> String {
        crate::explain::explain(self)
    }
}

struct Compiler {
    point: Point,
    waiting: Waiting,
    stages: Vec<Stage>,
    stage: Stage,
}

impl Compiler {
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
                self.stage.pre.push(made);
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
            StepSpec::Window { kind, size_us, every_us } => self.window(step, *kind, *size_us, *every_us),
            StepSpec::Agg { emit, aggs, .. } => self.agg(step, *emit, aggs),
            StepSpec::StatefulMap { call, columns, schema, name, .. } => {
                let name = if name.is_empty() { "stateful_map" } else { name };
                self.foreign(step, columns, schema, name, |_| KeyedKind::StatefulMap { call: *call })
            }
            StepSpec::GroupState { call, columns, schema, name, event_time, .. } => {
                if *event_time && self.point.event_time.is_none() {
                    return Err(PlanError::NoEventTime { step });
                }
                let name = if name.is_empty() { "group_state" } else { name };
                self.foreign(step, columns, schema, name, |point| KeyedKind::GroupState {
                    call: *call,
                    late_by: point.event_time.clone().filter(|_| *event_time),
                })
            }
            StepSpec::Top { n, by, descending, per, .. } => self.top(step, *n, by, *descending, per),
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
        size_us: i64,
        every_us: Option<i64>,
    ) -> Result<(), PlanError> {
        if self.waiting.windows.is_some() {
            return Err(PlanError::Misplaced { step, reason: "the flow is windowed already" });
        }
        let Some(event_time) = &self.point.event_time else { return Err(PlanError::NoEventTime { step }) };
        let wrong = |name, value, reason| PlanError::Window { step: step.clone(), name, value, reason };
        let every = every_us.unwrap_or(size_us);
        match kind {
            WindowKind::Tumbling if every != size_us => {
                return Err(wrong(
                    "every_us",
                    every,
                    "a tumbling window has no period of its own; use a sliding window",
                ));
            }
            WindowKind::Sliding if every_us.is_none() => {
                return Err(wrong("every_us", 0, "a sliding window needs a period"));
            }
            _ => {}
        }
        let windows = Windows::new(size_us, every)
            .map_err(|(name, reason)| wrong(name, if name == "size_us" { size_us } else { every }, reason))?;
        for (name, value) in [("size_us", size_us), ("every_us", every)] {
            if value % event_time.resolution_us() != 0 {
                return Err(wrong(name, value, "is not a multiple of the event-time column's unit"));
            }
        }
        self.waiting.windows = Some((step, windows));
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
        if self.point.updates {
            return misplaced(
                "its input replaces earlier values, which would be counted again; write emit='final' in the agg before it",
            );
        }
        let Waiting { key, windows } = std::mem::take(&mut self.waiting);
        let schema = self.point.schema.clone();
        let (keys, nulls) = key.map_or((Vec::new(), Nulls::Group), |(_, keys, nulls)| (keys, nulls));
        let aggregates = aggs.iter().map(|agg| aggregate(&step, &schema, agg)).collect::<Result<Vec<_>, _>>()?;
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
        fields.extend(aggregates.iter().map(|aggregate| {
            Field::new(&aggregate.name, aggregate.output.clone(), aggregate.function != Function::Count)
        }));
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
                (KeyedKind::Window { windows, event_time, aggregates }, false)
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
        });
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
        if let Some(&nested) = keys.iter().find(|&&at| schema.field(at).data_type().is_nested()) {
            let need = "the key of a stateful function must be hashable in Python: make text or bytes of it first";
            return Err(wrong_type(&step, schema.field(nested), need));
        }
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
        });
        self.point.window = None;
        self.point.updates = false;
        self.keep_times(&schema);
        Ok(())
    }

    fn top(&mut self, step: StepName, n: u64, by: &str, descending: bool, per: &Per) -> Result<(), PlanError> {
        let misplaced = |reason| Err(PlanError::Misplaced { step: step.clone(), reason });
        let count = usize::try_from(n).ok().filter(|&n| (1..=1 << 31).contains(&n));
        let Some(count) = count else { return Err(PlanError::Range { step, name: "n", value: n as i64 }) };
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
        let assign =
            windows.map(|(_, windows)| (windows, self.point.event_time.clone().expect("a window step needs it")));
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
        });
        Ok(())
    }

    /// Ends the stage with a keyed operator.
    fn close(&mut self, keyed: KeyedSpec) {
        let output = keyed.output.clone();
        self.point.schema = output.clone();
        let next = Stage { input: output.clone(), pre: Vec::new(), keyed: None, output: output.clone() };
        let done = std::mem::replace(&mut self.stage, next);
        self.stages.push(Stage { keyed: Some(keyed), output, ..done });
    }

    fn finish(mut self) -> Result<Vec<Stage>, PlanError> {
        let unused = match (self.waiting.key, self.waiting.windows) {
            (Some((step, ..)), _) | (None, Some((step, _))) => Some(step),
            (None, None) => None,
        };
        if let Some(step) = unused {
            return Err(PlanError::Misplaced { step, reason: "nothing follows that uses it" });
        }
        if !self.stage.pre.is_empty() || self.stages.is_empty() {
            self.stages.push(Stage { output: self.point.schema, ..self.stage });
        }
        Ok(self.stages)
    }
}

/// Words of steps that keep state.
const KEYED: [&str; 4] = ["agg", "group_state", "stateful_map", "top"];
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
        keyed.operator = match spec.steps[step.index].operator() {
            Some(name) => match wrong_name(name, op) {
                Some(reason) => return refused(name, reason),
                None => name.to_owned(),
            },
            None => {
                let number = unnamed.entry(op).or_default();
                *number += 1;
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

/// What is wrong with the name that a user gives to the operator of a step. One that a step of its kind has without a name is right: so
/// steps that get names go on from state without them.
fn wrong_name(name: &str, op: &str) -> Option<String> {
    let word = name.split_once('-').filter(|(_, number)| number.parse::<u32>().is_ok()).map_or(name, |(word, _)| word);
    let reason = if name.is_empty() {
        "is empty"
    } else if name.chars().count() > LONGEST_NAME {
        "is longer than 100 characters"
    } else if name.contains('/') {
        "has a slash"
    } else if name.chars().any(char::is_control) || name.trim() != name {
        "has control characters, or blanks around it"
    } else if word != op && KEYED.contains(&word) {
        return Some(format!("is kept for steps of kind {word}: choose another one"));
    } else {
        return None;
    };
    Some(format!("{reason}: a name is 1 to {LONGEST_NAME} printable characters without a slash"))
}

fn aggregate(step: &StepName, schema: &Schema, agg: &AggSpec) -> Result<Aggregate, PlanError> {
    let Some(function) = Function::parse(&agg.function) else {
        let (name, function) = (agg.name.clone(), agg.function.clone());
        return Err(PlanError::Function { step: step.clone(), name, function });
    };
    let at = agg.column.as_ref().map(|name| column(step, schema, name)).transpose()?;
    let field = at.map(|at| schema.field(at));
    if field.is_none() && function != Function::Count {
        return Err(PlanError::NoColumn { step: step.clone(), name: agg.name.clone() });
    }
    Aggregate::resolve(&agg.name, function, at.zip(field.map(|field| field.data_type())))
        .map_err(|need| wrong_type(step, field.expect("only columns have wrong types"), need))
}

/// Names of some columns, for messages.
pub(crate) fn names(schema: &Schema, columns: &[usize]) -> String {
    let mut words = String::new();
    for (at, &column) in columns.iter().enumerate() {
        let _ = write!(words, "{}{}", if at > 0 { ", " } else { "" }, schema.field(column).name());
    }
    words
}
