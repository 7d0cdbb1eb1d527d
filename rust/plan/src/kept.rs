//! What the state of a keyed step is made of, as plain data that stands in a manifest: it says whether another flow can go on from the state,
//! and it is enough to read the state without the flow.
//!
//! Rows come out as the step itself would give them if its input ended now: a mean is a mean and not a sum and a number, a window that slides
//! is merged of its panes. Only a join, which gives nothing then, tells the rows that it keeps. So there is one way from state to rows, that of the operators. What a function keeps are bytes here.
//!
//! Invariants: [`Kept::types`] is equal for two steps exactly if each can go on from the other's state, but for what functions keep; it has no names
//! of columns, which may change. Its words and [`Kept::to_json`] are part of the format.

use std::collections::BTreeMap;
use std::sync::Arc;

use arrow_array::{ArrayRef, BinaryArray, RecordBatch};
use arrow_schema::{DataType, Field, Schema, SchemaRef};
use penstock_bins::{BinState, BinTable, Routing, StateError};
use penstock_files::{Chunk, Damage, Entry, FileError};
use serde::{Deserialize, Serialize};

use crate::agg::{Aggregate, Function};
use crate::column::{EVENT_TIME_LIMIT_US, EventTime};
use crate::error::{OpError, StepName};
use crate::explain;
use crate::group::{GroupBy, shape};
use crate::join::{self, Rules, Sides};
use crate::keyed::{KeyedKind, KeyedSpec};
use crate::op::{BLOCK_ROWS, KeyedOp, Output};
use crate::panes::Panes;
use crate::plan::{WINDOW_END, WINDOW_START};
use crate::running::{Emit, RunningOp};
use crate::session::{SessionOp, Sessions};
use crate::spec::{JoinHow, schema_text};
use crate::state::State;
use crate::top::{self, Groups, Top, TopOp};
use crate::window::{WindowOp, Windows};
use crate::zone::Zone;

/// See the module.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Kept {
    /// Names and types of the keys.
    #[serde(with = "schema_text")]
    keys: SchemaRef,
    #[serde(flatten)]
    holds: Holds,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "holds", rename_all = "snake_case")]
enum Holds {
    Aggregates {
        functions: Vec<String>,
        /// For each, by its name, the type that it reads: null where it reads none.
        #[serde(with = "schema_text")]
        inputs: SchemaRef,
        windows: Option<OfWindows>,
        /// When it speaks: `final` in windows.
        emit: Emit,
    },
    Sessions {
        functions: Vec<String>,
        #[serde(with = "schema_text")]
        inputs: SchemaRef,
        gap_us: i64,
        /// The column of event time.
        #[serde(with = "schema_text")]
        time: SchemaRef,
    },
    Top {
        n: usize,
        by: usize,
        descending: bool,
        group: Vec<usize>,
        /// The column with the end of a group's window.
        end: Option<usize>,
        /// Those that raw rows are assigned to here.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        windows: Option<OfWindows>,
        #[serde(with = "schema_text")]
        rows: SchemaRef,
    },
    Join {
        #[serde(with = "schema_text")]
        left: SchemaRef,
        #[serde(with = "schema_text")]
        right: SchemaRef,
        /// Places of the keys on each side.
        on: [Vec<usize>; 2],
        #[serde(default)]
        how: JoinHow,
        within: Option<(i64, i64)>,
        /// Whether left rows begin with when they are over.
        #[serde(default, skip_serializing_if = "is_false")]
        until: bool,
        /// Whether a right row meets at most one left row.
        #[serde(default, skip_serializing_if = "is_false")]
        once: bool,
        /// What else the state depends on, in words.
        #[serde(default)]
        rule: String,
    },
    Values {},
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct OfWindows {
    size_us: i64,
    every_us: i64,
    #[serde(default, skip_serializing_if = "is_zero")]
    offset_us: i64,
    /// Whose days they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    zone: Option<String>,
    /// The column of event time.
    #[serde(with = "schema_text")]
    time: SchemaRef,
}

impl OfWindows {
    fn new(windows: &Windows, event_time: &EventTime) -> Self {
        let (size_us, every_us, offset_us) = (windows.size_us(), windows.every_us(), windows.offset_us());
        OfWindows { size_us, every_us, offset_us, zone: windows.zone().map(Into::into), time: time_of(event_time) }
    }

    fn words(&self) -> String {
        let place = explain::place(self.offset_us, self.zone.as_deref());
        format!("windows of {} every {}{place}", explain::time(self.size_us), explain::time(self.every_us))
    }
}

fn is_zero(us: &i64) -> bool {
    *us == 0
}

fn is_false(value: &bool) -> bool {
    !value
}

/// Why state cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum KeptError {
    /// A file cannot be read, or is damaged.
    #[error(transparent)]
    File(#[from] FileError),
    /// What a file has is not the state that its manifest says.
    #[error("{0}")]
    State(#[from] StateError),
    /// What a chunk has is no state.
    #[error("the state {0}")]
    Damage(#[from] Damage),
    /// A value that the step could not give, such as a sum that is too large.
    #[error(transparent)]
    Value(#[from] OpError),
    /// A newer release wrote the manifest.
    #[error("what the state is made of is not known to this release: {0}")]
    Unknown(String),
}

impl KeyedSpec {
    /// Version of the form of all states: raised where one is written in a way that the release before cannot take.
    pub const STATE_VERSION: u32 = 1;

    /// What its state is made of.
    pub fn kept(&self) -> Kept {
        let fields = self.keys.iter().zip(self.key_types());
        let fields = fields.map(|(&at, data_type)| self.routed.field(at).clone().with_data_type(data_type));
        let keys = Arc::new(Schema::new(fields.collect::<Vec<_>>()));
        let aggregates = |aggregates: &[Aggregate], emit, windows| Holds::Aggregates {
            functions: functions(aggregates),
            inputs: inputs(aggregates),
            emit,
            windows,
        };
        let holds = match &self.kind {
            KeyedKind::Window { windows, event_time, aggregates: all, .. } => {
                aggregates(all, Emit::Final, Some(OfWindows::new(windows, event_time)))
            }
            KeyedKind::Session { gap_us, event_time, aggregates } => Holds::Sessions {
                functions: functions(aggregates),
                inputs: inputs(aggregates),
                gap_us: *gap_us,
                time: time_of(event_time),
            },
            KeyedKind::Running { emit, aggregates: all } => aggregates(all, *emit, None),
            KeyedKind::StatefulMap { .. } | KeyedKind::GroupState { .. } | KeyedKind::Aggregate { .. } => {
                Holds::Values {}
            }
            KeyedKind::Top(Top { n, by, descending, group, end, assign, .. }) => Holds::Top {
                n: *n,
                by: *by,
                descending: *descending,
                group: group.clone(),
                end: end.as_ref().map(|end| end.column),
                windows: assign.as_ref().map(|(windows, event_time)| OfWindows::new(windows, event_time)),
                rows: self.routed.clone(),
            },
            KeyedKind::Join(join) => {
                let [left, right] = &join.sides;
                Holds::Join {
                    left: left.schema(),
                    right: right.schema(),
                    on: [left.keys(), right.keys()],
                    how: join.how,
                    within: join.within,
                    until: join.until.is_some(),
                    once: join.once,
                    rule: join.rule(),
                }
            }
        };
        Kept { keys, holds }
    }
}

fn functions(aggregates: &[Aggregate]) -> Vec<String> {
    aggregates.iter().map(|one| one.function.kept()).collect()
}

fn inputs(aggregates: &[Aggregate]) -> SchemaRef {
    Arc::new(Schema::new(aggregates.iter().map(input).collect::<Vec<_>>()))
}

fn time_of(event_time: &EventTime) -> SchemaRef {
    Arc::new(Schema::new(vec![Field::new(&event_time.name, event_time.data_type.clone(), true)]))
}

/// What an aggregate reads; a struct of two where it finds a value by another column.
fn input(aggregate: &Aggregate) -> Field {
    let of = aggregate.input.clone().unwrap_or(DataType::Null);
    let of = |name: &str| Field::new(name, of, true).with_metadata(aggregate.extension.clone());
    match &aggregate.by {
        None => of(&aggregate.name),
        Some((_, by)) => {
            let both = [of("value"), Field::new("by", by.clone(), true)];
            Field::new(&aggregate.name, DataType::Struct(both.into_iter().collect()), true)
        }
    }
}

/// Functions and what they read, in words.
fn words_of(functions: &[String], inputs: &Schema) -> String {
    let each = functions.iter().zip(inputs.fields()).map(|(function, input)| match input.data_type() {
        DataType::Null => function.clone(),
        DataType::Struct(both) if reads_two(function) => {
            let types: Vec<_> = both.iter().map(|field| field.data_type().to_string()).collect();
            format!("{function}({})", types.join(" by "))
        }
        data_type => format!("{function}({data_type})"),
    });
    if functions.is_empty() { "nothing".into() } else { each.collect::<Vec<_>>().join(", ") }
}

fn reads_two(function: &str) -> bool {
    Function::read(function).is_some_and(Function::reads_two)
}

impl Kept {
    /// As a manifest has it.
    ///
    /// # Panics
    /// Never: it is plain data.
    #[must_use]
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("plain data becomes JSON")
    }

    /// Reads what [`to_json`](Self::to_json) wrote.
    ///
    /// # Errors
    /// [`KeptError::Unknown`].
    pub fn from_json(text: &str) -> Result<Self, KeptError> {
        serde_json::from_str(text).map_err(|error| KeptError::Unknown(error.to_string()))
    }

    /// Names and types of the keys.
    #[must_use]
    pub fn keys(&self) -> &SchemaRef {
        &self.keys
    }

    /// Whether the values are bytes of a function.
    #[must_use]
    pub fn is_values(&self) -> bool {
        matches!(self.holds, Holds::Values {})
    }

    /// Types of keys and values in words, see the module.
    #[must_use]
    pub fn types(&self) -> String {
        let types = |schema: &Schema| {
            let types: Vec<_> = schema.fields().iter().map(|field| field.data_type().to_string()).collect();
            types.join(", ")
        };
        let values = match &self.holds {
            Holds::Values {} => return types(&self.keys),
            Holds::Sessions { functions, inputs, gap_us, .. } => {
                format!("{} in sessions with gaps of {}", words_of(functions, inputs), explain::time(*gap_us))
            }
            Holds::Aggregates { functions, inputs, windows, emit } => {
                let each = words_of(functions, inputs);
                match (windows, emit) {
                    (Some(of), _) => format!("{each} in {}", of.words()),
                    (None, Emit::Update) => format!("{each} with updates"),
                    (None, Emit::Final) => each,
                    (None, Emit::New) => "nothing, for ever".into(),
                }
            }
            Holds::Join { left, right, on: [one, other], rule, .. } => {
                let rule = if rule.is_empty() { String::new() } else { format!(" ({rule})") };
                format!("rows ({}) by {one:?} that meet ({}) by {other:?}{rule}", types(left), types(right))
            }
            Holds::Top { n, by, descending, group, end, windows, rows } => {
                // Groups of windows go with these. Whose times are columns like others stay.
                let is_window = |at: &usize| rows.fields().get(*at).is_some_and(|field| field.name() == WINDOW_END);
                let stay = if end.is_none() && group.iter().any(is_window) { ", which stay," } else { "" };
                let (least, group) = (if *descending { "greatest" } else { "least" }, format!("{group:?}"));
                // Which rows stand in which of them depends on these.
                let windows = windows.as_ref().map_or_else(String::new, |of| {
                    let at = of.time.fields().first().and_then(|time| rows.index_of(time.name()).ok());
                    let by = at.map_or_else(String::new, |at| format!(" by column {at}"));
                    format!("; {}{by}", of.words())
                });
                format!("the {n} {least} by column {by} of groups {group}{stay} of ({}){windows}", types(rows))
            }
        };
        match self.keys.fields().is_empty() {
            true => values,
            false => format!("{} -> {values}", types(&self.keys)),
        }
    }

    /// The rows of a state from its chunks, in blocks of at most [`BLOCK_ROWS`]: those that the step would give if the input ended, behind
    /// `window_start` and `window_end` where it has windows. Of a function: its keys and values as bytes, `key` and `value`, once per key. The chunks are those that
    /// [`select`](penstock_files::select) gives for one range.
    ///
    /// # Errors
    /// That of a chunk, or why what it has is not this state.
    pub fn rows(
        &self,
        chunks: impl Iterator<Item = Result<Vec<u8>, FileError>>,
    ) -> Result<Vec<RecordBatch>, KeptError> {
        if self.is_values() {
            return values(chunks);
        }
        let Telling { new_state, mut op, .. } = self.telling()?;
        let routing = Routing::from_owners(vec![0]).expect("one bin is a power of two");
        let mut table = BinTable::fresh(&routing, 0, &*new_state);
        for chunk in chunks {
            table.get_mut(0).expect("the bin of all hashes").absorb(&chunk?)?;
        }
        let mut blocks = Vec::new();
        op.watermark(&mut table, i64::MAX, &mut |output| {
            blocks.extend(match output {
                Output::Rows(block) => Some(block),
                Output::Late(_) | Output::Side(..) => None,
            });
        })?;
        Ok(blocks)
    }

    /// Columns of [`rows`](Self::rows).
    ///
    /// # Errors
    /// [`KeptError::Unknown`].
    pub fn schema(&self) -> Result<SchemaRef, KeptError> {
        if self.is_values() { Ok(values_schema()) } else { Ok(self.telling()?.schema) }
    }

    /// Columns of aggregates, behind window bounds where there is event time.
    fn told(&self, time: Option<&EventTime>, aggregates: &[Aggregate]) -> SchemaRef {
        let bounds = time
            .into_iter()
            .flat_map(|time| [WINDOW_START, WINDOW_END].map(|name| Field::new(name, time.data_type.clone(), false)));
        let keys = self.keys.fields().iter().map(|field| field.as_ref().clone());
        let values = aggregates.iter().map(|one| one.field(true));
        Arc::new(Schema::new(bounds.chain(keys).chain(values).collect::<Vec<_>>()))
    }

    fn telling(&self) -> Result<Telling, KeptError> {
        let unknown = |what: &str| KeptError::Unknown(what.to_owned());
        let step = StepName::new(0, "state");
        let types: Vec<DataType> = self.keys.fields().iter().map(|field| field.data_type().clone()).collect();
        match &self.holds {
            Holds::Values {} => Err(unknown("values of a function are no rows")),
            Holds::Sessions { functions, inputs, gap_us, time } => {
                let aggregates = resolved(functions, inputs)?;
                let time = time_in(time)?;
                if *gap_us < 1 || *gap_us > EVENT_TIME_LIMIT_US {
                    return Err(unknown("the gap of sessions"));
                }
                let (schema, columns) = (self.told(Some(&time), &aggregates), (0..types.len()).collect());
                let (kept, gap_us) = (shape(&types, &aggregates, false), *gap_us);
                let new_state = Box::new(move || State::sessions(Sessions::new(kept.clone(), gap_us)));
                let bounds = Some((time.clone(), None));
                let group_by = GroupBy::new(step, columns, types, &aggregates, Arc::clone(&schema), bounds, false)?;
                Ok(Telling { new_state, op: Box::new(SessionOp::new(group_by, gap_us, time)), schema })
            }
            Holds::Aggregates { functions, inputs, windows, emit } => {
                let aggregates = resolved(functions, inputs)?;
                let track = windows.is_none() && emit.tracks();
                let of = match windows {
                    None => None,
                    Some(of) => {
                        let zone = of.zone.as_ref().map(|name| Zone::find(name).ok_or_else(|| unknown(name)));
                        let zone = zone.transpose()?;
                        let windows = Windows::new(of.size_us, of.every_us);
                        let windows = windows.and_then(|windows| windows.placed(of.offset_us, zone));
                        let windows = windows.map_err(|(name, reason)| unknown(&format!("{name} {reason}")))?;
                        Some((windows, time_in(&of.time)?))
                    }
                };
                let schema = self.told(of.as_ref().map(|(_, time)| time), &aggregates);
                let kept = shape(&types, &aggregates, track);
                let new_state = Box::new(move || State::panes(Panes::new(kept.clone())));
                let columns = (0..types.len()).collect();
                let bounds = of.as_ref().map(|(windows, time)| (time.clone(), Some(*windows)));
                let group_by = GroupBy::new(step, columns, types, &aggregates, Arc::clone(&schema), bounds, track)?;
                let op: Box<dyn KeyedOp> = match of {
                    Some((windows, time)) => Box::new(WindowOp::new(group_by, windows, time, None)),
                    None => Box::new(RunningOp::new(group_by, Emit::Final)),
                };
                Ok(Telling { new_state, op, schema })
            }
            Holds::Join { left, right, on, how, within, until, once, rule } => {
                let fits = |schema: &Schema, on: &[usize]| on.iter().all(|at| *at < schema.fields().len());
                if !fits(left, &on[0]) || !fits(right, &on[1]) {
                    return Err(unknown("a column that its rows do not have"));
                }
                if within.is_some_and(|(lower, _)| lower.checked_neg().is_none()) {
                    return Err(unknown("the interval within which rows meet"));
                }
                let shape = join::shape((left, &on[0]), (right, &on[1]), rule);
                let rules = Rules { until: *until, once: *once, ..Rules::new(*how, *within) };
                let new_state = Box::new(move || State::sides(Sides::new(shape, rules)));
                let schema = join::Told::columns(left, right);
                Ok(Telling { new_state, op: Box::new(join::Told::new(left, right)?), schema })
            }
            Holds::Top { n, by, descending, group, end, rows, .. } => {
                let columns = rows.fields().len();
                if *n == 0 || group.iter().chain(end).chain([by]).any(|at| *at >= columns) {
                    return Err(unknown("a column that its rows do not have"));
                }
                let end = end.map(|column| {
                    let (name, data_type) = (rows.field(column).name().clone(), rows.field(column).data_type().clone());
                    EventTime { name, column, data_type }
                });
                let (n, by, descending) = (*n, *by, *descending);
                let top = Top { n, by, descending, group: group.clone(), end, assign: None };
                let shape = top::shape(&top, rows);
                let op = TopOp::new(step, top, rows.clone(), rows.clone())?;
                let new_state = Box::new(move || State::groups(Groups::new(n, shape)));
                Ok(Telling { new_state, op: Box::new(op), schema: Arc::clone(rows) })
            }
        }
    }
}

/// The aggregates of these names.
fn resolved(functions: &[String], inputs: &Schema) -> Result<Vec<Aggregate>, KeptError> {
    let unknown = |what: &str| KeptError::Unknown(what.to_owned());
    if functions.len() != inputs.fields().len() {
        return Err(unknown("as many functions as inputs"));
    }
    if functions.len() > usize::from(u8::MAX) {
        return Err(unknown("more than 255 aggregates"));
    }
    let aggregates = functions.iter().zip(inputs.fields()).enumerate().map(|(at, (name, input))| {
        let function = Function::read(name).ok_or_else(|| unknown(name))?;
        let (of, by) = match input.data_type() {
            DataType::Struct(both) if function.reads_two() => match &both[..] {
                [of, by] => (of, Some((at, by.data_type()))),
                _ => return Err(unknown("a column and that by which its value is found")),
            },
            _ => (input, None),
        };
        let column = Some((at, of.data_type())).filter(|(_, of)| **of != DataType::Null);
        let aggregate = Aggregate::resolve(input.name(), function, column, by).map_err(unknown)?;
        Ok(aggregate.of(Some(of)))
    });
    aggregates.collect()
}

/// The column of event time.
fn time_in(schema: &Schema) -> Result<EventTime, KeptError> {
    let time = schema.fields().first().filter(|time| EventTime::supports(time.data_type()));
    let time = time.ok_or_else(|| KeptError::Unknown("the type of event time".into()))?;
    Ok(EventTime { name: time.name().clone(), column: 0, data_type: time.data_type().clone() })
}

/// An operator that tells a state all at once, an empty state for it, and the columns of its rows.
struct Telling {
    new_state: Box<dyn Fn() -> State>,
    op: Box<dyn KeyedOp>,
    schema: SchemaRef,
}

fn values_schema() -> SchemaRef {
    Arc::new(Schema::new(["key", "value"].map(|name| Field::new(name, DataType::Binary, false)).to_vec()))
}

/// Values by key: its bytes and its hash.
type Values = BTreeMap<(Box<[u8]>, u64), Box<[u8]>>;

/// Keys and values as bytes, the newest of each key.
fn values(chunks: impl Iterator<Item = Result<Vec<u8>, FileError>>) -> Result<Vec<RecordBatch>, KeptError> {
    let mut values = Values::new();
    for chunk in chunks {
        let chunk = chunk?;
        for entry in Chunk::parse(&chunk)?.entries() {
            match entry? {
                Entry::Put { hash, key, value } => _ = values.insert((key.into(), hash), value.into()),
                Entry::Gone { hash, key } => _ = values.remove(&(key.into(), hash)),
                Entry::GoneAll { .. } | Entry::Shared { .. } => {
                    return Err(Damage::Content { what: "an entry that a function does not make" }.into());
                }
            }
        }
    }
    let schema = values_schema();
    let mut blocks = Vec::new();
    let mut values = values.into_iter().peekable();
    while values.peek().is_some() {
        let (mut keys, mut bodies) = (Vec::new(), Vec::new());
        let mut bytes = 0;
        while let Some(((key, _), value)) = values.next_if(|_| keys.len() < BLOCK_ROWS && bytes < 1 << 30) {
            bytes += key.len().max(value.len());
            keys.push(key);
            bodies.push(value);
        }
        let column = |all: &[Box<[u8]>]| -> ArrayRef { Arc::new(BinaryArray::from_iter_values(all)) };
        let block = RecordBatch::try_new(Arc::clone(&schema), vec![column(&keys), column(&bodies)]);
        blocks.push(block.map_err(OpError::from)?);
    }
    Ok(blocks)
}
