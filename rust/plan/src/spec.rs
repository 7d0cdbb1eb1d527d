//! The plan as plain data: versioned JSON that every worker and every language writes the same way.
//!
//! A plan is a graph: its nodes are the sources and then the steps, numbered in the order in which they stand. A step takes the rows of nodes
//! before it, so there is no way to write a cycle; where it names none it takes those of the node before, so a line is a list. The last
//! node gives the output.
//!
//! Nothing here is checked against anything but its form; [`Plan::compile`](crate::Plan::compile) checks meaning. Schemas travel as base64
//! (RFC 4648, padded) of an Arrow IPC schema message; user functions as call numbers.

use arrow_ipc::writer::StreamWriter;
use arrow_schema::{DataType, Field, FieldRef, Schema, SchemaRef};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::PlanError;
use crate::running::Emit;

/// The version of plans that this release reads and writes.
pub const PLAN_VERSION: u32 = 2;

/// A flow as written by the user.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlanSpec {
    /// Format version, [`PLAN_VERSION`].
    pub version: u32,
    /// What flows in, each under a name of its own.
    pub sources: Vec<SourceSpec>,
    /// What happens to it, each step behind those whose rows it takes.
    #[serde(default)]
    pub steps: Vec<NodeSpec>,
}

/// A step in the graph.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NodeSpec {
    /// The nodes whose rows it takes, in the order of its sides; none: the node before it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub inputs: Vec<usize>,
    /// What it does.
    #[serde(flatten)]
    pub step: StepSpec,
}

impl From<StepSpec> for NodeSpec {
    fn from(step: StepSpec) -> Self {
        Self { inputs: Vec::new(), step }
    }
}

/// An input of a flow.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceSpec {
    /// What hosts and manifests call it.
    #[serde(default = "input")]
    pub name: String,
    /// Columns of the input.
    #[serde(with = "schema_text")]
    pub schema: SchemaRef,
    /// The event-time column.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub event_time: Option<String>,
    /// How far the watermark stays behind the greatest event time, in milliseconds.
    #[serde(default)]
    pub lateness_ms: i64,
    /// Columns that fix the order of rows within an epoch.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "none_is_empty")]
    pub order_by: Vec<String>,
    /// How long it may have no rows before the watermark goes on without it, in milliseconds of processing time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_after_ms: Option<i64>,
}

/// An output of a step's function beside the main one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SideSpec {
    /// What users call it; no other one of the plan has that name.
    pub name: String,
    /// Declared columns.
    #[serde(with = "schema_text")]
    pub schema: SchemaRef,
}

/// One step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case", deny_unknown_fields)]
pub enum StepSpec {
    /// Applies user code to blocks.
    MapBatches {
        /// Number of the call.
        call: usize,
        /// Declared output.
        #[serde(with = "schema_text")]
        schema: SchemaRef,
        /// Outputs of its function beside the main one.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        sides: Vec<SideSpec>,
    },
    /// Expands inputs by user code, lazily.
    FlatMap {
        /// Number of the call.
        call: usize,
        /// Declared output.
        #[serde(with = "schema_text")]
        schema: SchemaRef,
        /// Whether an input is a row; else it is a block.
        #[serde(default)]
        rows: bool,
        /// Outputs of its function beside the main one.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        sides: Vec<SideSpec>,
    },
    /// Holds so much of its body's rows at a time.
    Bounded {
        /// Batches that may be unfinished.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        batches: Option<u64>,
        /// Rows of a batch.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        batch_size: Option<u64>,
        /// Bytes that the process may hold.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        memory: Option<u64>,
        /// What happens when an expansion fails.
        #[serde(default)]
        on_failure: OnFailure,
        /// Steps without state.
        body: Vec<StepSpec>,
    },
    /// Sends rows through its body until they leave.
    Iterate {
        /// Boolean column of the body's output: whether a row goes around again.
        again: String,
        /// Steps without state.
        body: Vec<StepSpec>,
    },
    /// Names the key of the next keyed step.
    KeyBy {
        /// Key columns.
        columns: Vec<String>,
        /// What to do with null keys.
        #[serde(default)]
        nulls: Nulls,
    },
    /// Names the windows of the next `agg` or `top`.
    Window {
        /// Tumbling, sliding or sessions.
        kind: WindowKind,
        /// Length in microseconds.
        size_us: i64,
        /// Distance of starts in microseconds; for tumbling windows absent or equal to the size.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        every_us: Option<i64>,
        /// How much later than at multiples of that distance they start, in microseconds.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        offset_us: Option<i64>,
        /// The time zone whose days they are, by its IANA name.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        zone: Option<String>,
    },
    /// Aggregates by key and window.
    Agg {
        /// When a running aggregate speaks, by default at the end of input: a host of streams writes out what it takes for the default.
        /// A windowed one speaks when a window closes.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        emit: Option<Emit>,
        /// The output columns.
        aggs: Vec<AggSpec>,
        /// What the user calls the operator.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        operator: Option<String>,
    },
    /// Applies user code with state per key.
    StatefulMap {
        /// Number of the call.
        call: usize,
        /// Whether it is called at the ends of epochs, too: it has timers, states that expire, or something to say at the end of input.
        #[serde(default, skip_serializing_if = "is_false")]
        ends: bool,
        /// Key columns; may be empty when `key_by` named them.
        #[serde(default, deserialize_with = "none_is_empty")]
        columns: Vec<String>,
        /// Declared output.
        #[serde(with = "schema_text")]
        schema: SchemaRef,
        /// Name shown to the user.
        #[serde(default)]
        name: String,
        /// What the user calls the operator.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        operator: Option<String>,
        /// Outputs of its function beside the main one.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        sides: Vec<SideSpec>,
    },
    /// Applies user code to the groups of each epoch, with state and a timeout per key.
    GroupState {
        /// Number of the call.
        call: usize,
        /// Key columns; may be empty when `key_by` named them.
        #[serde(default, deserialize_with = "none_is_empty")]
        columns: Vec<String>,
        /// Declared output.
        #[serde(with = "schema_text")]
        schema: SchemaRef,
        /// Name shown to the user.
        #[serde(default)]
        name: String,
        /// What the user calls the operator.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        operator: Option<String>,
        /// Whether timeouts are in event time; then rows at or before the watermark are late.
        #[serde(default)]
        event_time: bool,
        /// Outputs of its function beside the main one.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        sides: Vec<SideSpec>,
    },
    /// Aggregates by key and window, with user code over blocks.
    Aggregate {
        /// Number of the call.
        call: usize,
        /// When it speaks, as of `agg`; the function is told the same.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        emit: Option<Emit>,
        /// Declared output: window bounds where there are windows, the key columns, what the function makes.
        #[serde(with = "schema_text")]
        schema: SchemaRef,
        /// Name shown to the user.
        #[serde(default)]
        name: String,
        /// What the user calls the operator.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        operator: Option<String>,
    },
    /// Keeps the rows of rank at most `n`, ties included.
    Top {
        /// Greatest rank kept.
        n: u64,
        /// The ranked column.
        by: String,
        /// Whether the greatest value has rank 1.
        #[serde(default = "yes")]
        descending: bool,
        /// The groups.
        #[serde(default)]
        per: Per,
        /// What the user calls the operator.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        operator: Option<String>,
    },
    /// Each combination of values of some columns once.
    Distinct {
        /// The columns, which are those of its output.
        columns: Vec<String>,
        /// What the user calls the operator.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        operator: Option<String>,
    },
    /// The rows of all its inputs, which have the same columns.
    Union {},
    /// Each row of its first input with each row of its second that has the same key.
    Join {
        /// Key columns of the first input.
        left: Vec<String>,
        /// Those of the second that equal them, in their order.
        right: Vec<String>,
        /// Which rows come out.
        #[serde(default, skip_serializing_if = "JoinHow::is_inner")]
        how: JoinHow,
        /// The least and the greatest event time of a row of the second behind that of the row of the first that it meets, in microseconds.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        within: Option<(i64, i64)>,
        /// The column of the first with the event time up to which, without it, its row meets rows of the second from its own event time on.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        until: Option<String>,
        /// What is promised of the rows that meet.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        validate: Option<Validate>,
        /// Whether only rows of one window meet: both inputs end in equal windows.
        #[serde(default, skip_serializing_if = "is_false")]
        windowed: bool,
        /// What is put behind the name of a column of the second that one of the first has, too, where both come out.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        suffix: Option<String>,
        /// What the user calls the operator.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        operator: Option<String>,
    },
}

impl StepSpec {
    /// The outputs of its function beside the main one.
    pub fn sides(&self) -> &[SideSpec] {
        match self {
            Self::MapBatches { sides, .. }
            | Self::FlatMap { sides, .. }
            | Self::StatefulMap { sides, .. }
            | Self::GroupState { sides, .. } => sides,
            _ => &[],
        }
    }

    /// The steps in it.
    pub fn body(&self) -> &[StepSpec] {
        match self {
            Self::Bounded { body, .. } | Self::Iterate { body, .. } => body,
            _ => &[],
        }
    }

    /// The step's `op` word.
    pub fn op(&self) -> &'static str {
        match self {
            Self::MapBatches { .. } => "map_batches",
            Self::FlatMap { .. } => "flat_map",
            Self::Bounded { .. } => "bounded",
            Self::Iterate { .. } => "iterate",
            Self::KeyBy { .. } => "key_by",
            Self::Window { .. } => "window",
            Self::Agg { .. } => "agg",
            Self::StatefulMap { .. } => "stateful_map",
            Self::GroupState { .. } => "group_state",
            Self::Aggregate { .. } => "aggregate",
            Self::Top { .. } => "top",
            Self::Distinct { .. } => "distinct",
            Self::Union {} => "union",
            Self::Join { .. } => "join",
        }
    }

    /// What the user calls the operator of a step that keeps state.
    pub fn operator(&self) -> Option<&str> {
        match self {
            Self::Agg { operator, .. }
            | Self::Distinct { operator, .. }
            | Self::StatefulMap { operator, .. }
            | Self::GroupState { operator, .. }
            | Self::Aggregate { operator, .. }
            | Self::Top { operator, .. }
            | Self::Join { operator, .. } => operator.as_deref(),
            _ => None,
        }
    }
}

/// Which rows come out of a join.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum JoinHow {
    /// Pairs.
    #[default]
    Inner,
    /// Pairs, and left rows that meet none.
    Left,
    /// Pairs, and right rows that meet none.
    Right,
    /// Pairs, and rows of either side that meet none.
    Full,
    /// Left rows that meet any, once.
    Semi,
    /// Left rows that meet none.
    Anti,
}

impl JoinHow {
    /// Its word.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Inner => "inner",
            Self::Left => "left",
            Self::Right => "right",
            Self::Full => "full",
            Self::Semi => "semi",
            Self::Anti => "anti",
        }
    }

    /// Whether left rows come out alone, or not, by whether they meet any.
    #[must_use]
    pub fn is_filter(self) -> bool {
        matches!(self, Self::Semi | Self::Anti)
    }

    fn is_inner(&self) -> bool {
        *self == Self::Inner
    }
}

/// What is promised of the rows that meet, and checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Validate {
    /// Each row of the second input meets at most one of the first.
    #[serde(rename = "1:m")]
    OneToMany,
}

/// What happens when the expansion of an input fails.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnFailure {
    /// The flow stops.
    #[default]
    Stop,
    /// The input is left out, the others go on.
    Skip,
}

/// What to do with null keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Nulls {
    /// A null is a key of its own.
    #[default]
    Group,
    /// A null is an error of the data.
    Reject,
}

/// The kinds of windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WindowKind {
    /// Side by side.
    Tumbling,
    /// Overlapping.
    Sliding,
    /// Of each key, as long as rows follow each other closely; the size is the gap that ends one.
    Session,
}

/// One aggregate.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AggSpec {
    /// Name of the output column.
    pub name: String,
    /// The name of a [`Function`](crate::Function).
    #[serde(rename = "fn")]
    pub function: String,
    /// Input column; may be absent for `count`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub column: Option<String>,
    /// Of `min_by` and `max_by`: the column by which the value is found.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
    /// Of `approx_quantile`: the share of values at or below what it gives.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub q: Option<f64>,
    /// Of what is approximate: its relative error, which for a count of distinct values is the standard error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<f64>,
}

/// The groups of a `top`: `null`, `"window"` or a list of columns.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Per {
    /// One group: the whole input.
    #[default]
    All,
    /// Each window.
    Window,
    /// Each combination of values.
    Columns(Vec<String>),
}

impl Serialize for Per {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::All => serializer.serialize_none(),
            Self::Window => serializer.serialize_str("window"),
            Self::Columns(columns) => columns.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Per {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Form {
            Word(String),
            Columns(Vec<String>),
        }
        match Option::<Form>::deserialize(deserializer)? {
            None => Ok(Self::All),
            Some(Form::Word(word)) if word == "window" => Ok(Self::Window),
            Some(Form::Word(word)) => {
                Err(serde::de::Error::custom(format!("per is \"window\", null or a list of columns, not \"{word}\"")))
            }
            Some(Form::Columns(columns)) => Ok(Self::Columns(columns)),
        }
    }
}

fn input() -> String {
    "input".into()
}

fn yes() -> bool {
    true
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "as serde calls it")]
fn is_false(value: &bool) -> bool {
    !value
}

fn none_is_empty<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    Ok(Option::<Vec<String>>::deserialize(deserializer)?.unwrap_or_default())
}

impl PlanSpec {
    /// A flow of one source and one path.
    pub fn line(source: SourceSpec, steps: Vec<StepSpec>) -> Self {
        let steps = steps.into_iter().map(NodeSpec::from).collect();
        Self { version: PLAN_VERSION, sources: vec![source], steps }
    }

    /// Reads a plan.
    ///
    /// # Errors
    /// [`PlanError::Json`] for text of another form, [`PlanError::Version`] for another version (checked first).
    pub fn from_json(text: &str) -> Result<Self, PlanError> {
        #[derive(Deserialize)]
        struct Head {
            version: u32,
        }
        let wrong = |error: serde_json::Error| PlanError::Json { message: error.to_string() };
        let head: Head = serde_json::from_str(text).map_err(wrong)?;
        if head.version != PLAN_VERSION {
            return Err(PlanError::Version { found: head.version, supported: PLAN_VERSION });
        }
        serde_json::from_str(text).map_err(wrong)
    }

    /// Writes the plan.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("a plan has only strings, numbers and lists")
    }
}

const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

fn to_base64(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let word = group.iter().enumerate().fold(0u32, |word, (at, &byte)| word | u32::from(byte) << (16 - 8 * at));
        for at in 0..4 {
            let digit = char::from(DIGITS[(word >> (18 - 6 * at)) as usize & 63]);
            text.push(if at <= group.len() { digit } else { '=' });
        }
    }
    text
}

fn from_base64(text: &str) -> Option<Vec<u8>> {
    let text = text.as_bytes();
    if !text.len().is_multiple_of(4) {
        return None;
    }
    let padding = text.iter().rev().take_while(|&&digit| digit == b'=').count();
    if padding > 2 {
        return None;
    }
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    for (at, group) in text.chunks(4).enumerate() {
        let pad = if (at + 1) * 4 == text.len() { padding } else { 0 };
        let mut word = 0u32;
        for &digit in &group[..4 - pad] {
            word = word << 6 | DIGITS.iter().position(|&known| known == digit)? as u32;
        }
        word <<= 6 * pad;
        bytes.extend_from_slice(&word.to_be_bytes()[1..4 - pad]);
    }
    Some(bytes)
}

/// A schema as the text that plans carry.
pub fn schema_to_text(schema: &Schema) -> String {
    let mut bytes = Vec::new();
    StreamWriter::try_new(&mut bytes, schema).and_then(|mut writer| writer.finish()).expect("writing to memory");
    to_base64(&bytes)
}

/// The schema of a text made by [`schema_to_text`] or by any Arrow library's IPC schema message in base64.
///
/// # Errors
/// What is wrong, in words.
pub fn schema_from_text(text: &str) -> Result<SchemaRef, String> {
    let bytes = from_base64(text).ok_or("the schema is not base64")?;
    let schema = crate::ipc::schema(&bytes).map_err(|error| format!("the schema: {error}"))?;
    let schema = schema.ok_or("the schema is cut off")?;
    schema.fields().iter().try_for_each(|field| values_in(field).map(drop))?;
    Ok(schema)
}

/// Bytes and items of which a value has a fixed number, at most: one is made of each column, be it null.
const MOST_FIXED: usize = 1 << 24;

/// How many items a value of a column has where its type says it.
fn values_in(field: &Field) -> Result<usize, String> {
    use DataType::{
        FixedSizeBinary, FixedSizeList, LargeList, LargeListView, List, ListView, Map, RunEndEncoded, Struct, Union,
    };
    let data_type = field.data_type();
    let sum = |fields: &mut dyn Iterator<Item = &FieldRef>| {
        fields.map(|field| values_in(field)).try_fold(1_usize, |sum, more| Ok::<_, String>(sum.saturating_add(more?)))
    };
    let count = match data_type {
        FixedSizeBinary(size) => usize::try_from(*size).ok(),
        FixedSizeList(item, size) => {
            usize::try_from(*size).ok().zip(Some(values_in(item)?)).map(|(n, each)| n.saturating_mul(each))
        }
        Struct(fields) => Some(sum(&mut fields.iter())?),
        Union(fields, _) => Some(sum(&mut fields.iter().map(|(_, field)| field))?),
        // As many as a value says itself.
        List(item) | LargeList(item) | ListView(item) | LargeListView(item) | Map(item, _) | RunEndEncoded(_, item) => {
            Some(values_in(item)?)
        }
        _ => Some(1),
    };
    let count = count.filter(|count| *count <= MOST_FIXED);
    count.ok_or_else(|| {
        format!("column '{}' is {data_type}, of which a value has no or more than {MOST_FIXED} items", field.name())
    })
}

pub(crate) mod schema_text {
    use super::*;

    pub(crate) fn serialize<S: Serializer>(schema: &SchemaRef, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&schema_to_text(schema))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SchemaRef, D::Error> {
        schema_from_text(&String::deserialize(deserializer)?).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow_schema::{DataType, Field};
    use std::sync::Arc;

    #[test]
    fn base64_matches_the_standard() {
        for (bytes, text) in [(&b""[..], ""), (b"f", "Zg=="), (b"fo", "Zm8="), (b"foo", "Zm9v"), (b"foob", "Zm9vYg==")]
        {
            assert_eq!(to_base64(bytes), text);
            assert_eq!(from_base64(text).unwrap(), bytes);
        }
        for bad in ["Z", "Zg=", "Zg=a", "Z===", "Z!=="] {
            assert_eq!(from_base64(bad), None, "{bad}");
        }
    }

    #[test]
    fn types_of_which_no_value_can_be_made_are_refused() {
        let item = |data_type| Arc::new(Field::new("item", data_type, true));
        let read = |data_type| {
            schema_from_text(&schema_to_text(&Arc::new(Schema::new(vec![Field::new("c", data_type, true)])))).map(drop)
        };
        let list = |of: DataType, size| DataType::FixedSizeList(item(of), size);
        for good in [
            list(DataType::Float32, 1_536),
            DataType::FixedSizeBinary(16),
            DataType::List(item(list(DataType::Int8, 4))),
            DataType::Struct(vec![item(DataType::Int8)].into()),
        ] {
            assert_eq!(read(good), Ok(()));
        }
        for bad in [
            list(DataType::Int32, -1),
            list(list(DataType::Int8, 1 << 20), 1 << 20),
            DataType::FixedSizeBinary(-7),
            DataType::FixedSizeBinary(i32::MAX),
            DataType::List(item(list(DataType::Int8, -4))),
            DataType::Struct(vec![item(list(DataType::Int8, i32::MAX)), item(DataType::Int8)].into()),
        ] {
            let told = read(bad.clone()).expect_err("it has no values");
            assert!(
                told.contains("has no or more than 16777216 items") || told.contains("the schema"),
                "{bad}: {told}"
            );
        }
    }

    #[test]
    fn json_round_trips_and_names_faults() {
        let schema: SchemaRef = Arc::new(Schema::new(vec![Field::new("k", DataType::Utf8, true)]));
        let text = schema_to_text(&schema);
        let json = format!(
            r#"{{"version":2,"sources":[{{"schema":"{text}","lateness_ms":5}}],"steps":[
            {{"op":"key_by","columns":["k"],"nulls":"reject"}},
            {{"op":"agg","emit":"update","aggs":[{{"name":"n","fn":"count"}}]}},
            {{"op":"top","n":2,"by":"n","per":null}},
            {{"op":"top","n":2,"by":"n","descending":false,"per":"window"}},
            {{"op":"top","n":2,"by":"n","per":["k"],"inputs":[3]}}]}}"#
        );
        let spec = PlanSpec::from_json(&json).unwrap();
        assert_eq!((&spec.sources[0].schema, spec.sources[0].name.as_str()), (&schema, "input"));
        assert_eq!(PlanSpec::from_json(&spec.to_json()).unwrap(), spec);
        let StepSpec::Top { descending, per, .. } = &spec.steps[2].step else { panic!() };
        assert!(*descending && *per == Per::All);
        assert_eq!((&spec.steps[3].inputs[..], &spec.steps[4].inputs[..]), (&[][..], &[3][..]));
        for bad in [
            json.replace("\"n\":2", "\"n\":\"2\""),
            json.replace("\"window\"", "\"windows\""),
            json.replace("lateness_ms", "lateness"),
            json.replace("key_by", "key"),
            json.replace("inputs", "input"),
            json.replace("\"nulls\"", "\"null\""),
            json.replace(&text, "AAAA"),
            "{".into(),
        ] {
            assert!(matches!(PlanSpec::from_json(&bad), Err(PlanError::Json { .. })), "{bad}");
        }
        let older = json.replace("\"version\":2", "\"version\":1");
        assert_eq!(PlanSpec::from_json(&older), Err(PlanError::Version { found: 1, supported: 2 }));
    }
}
