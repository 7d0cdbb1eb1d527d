//! The typed errors of this crate.
//!
//! [`PlanError`] is what a flow description can get wrong: it is raised before anything runs and names the step and the column.
//! [`OpError`] is what data can get wrong while a plan runs. [`StateFault`] is what the state of a bin can get wrong when it moves or goes back.

use std::fmt;

use arrow_schema::Field;

use crate::callback::CallError;
use crate::ddl::told_apart;

/// A step of a plan, named the way messages show it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct StepName {
    /// Positions of the steps around it, outermost first.
    pub within: Vec<usize>,
    /// Position in the plan's list of steps, or in that of the step around it, counted from 0.
    pub index: usize,
    /// The step's `op` word, or `source`.
    pub op: &'static str,
}

impl StepName {
    /// Names step `index` with operation `op`.
    pub fn new(index: usize, op: &'static str) -> Self {
        Self { within: Vec::new(), index, op }
    }

    /// Names step `index` of the body of this step.
    pub fn inside(&self, index: usize, op: &'static str) -> Self {
        Self { within: self.within.iter().copied().chain([self.index]).collect(), index, op }
    }
}

impl fmt::Display for StepName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("step ")?;
        self.within.iter().try_for_each(|index| write!(f, "{index}."))?;
        write!(f, "{} ({})", self.index, self.op)
    }
}

/// Why a flow description is not a plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// The text is not JSON of this form.
    #[error("the plan is not valid: {message}")]
    Json {
        /// What the parser says, with line and column.
        message: String,
    },
    /// The plan was written by a release with another format.
    #[error("plan version {found} is not supported, this release reads version {supported}")]
    Version {
        /// Version in the text.
        found: u32,
        /// The version this release reads.
        supported: u32,
    },
    /// A column does not exist where a step needs it.
    #[error("{step}: column '{column}' does not exist; there are: {}", available.join(", "))]
    MissingColumn {
        /// The step.
        step: StepName,
        /// The column asked for.
        column: String,
        /// The columns at this point of the flow.
        available: Vec<String>,
    },
    /// A column's type does not fit its use.
    #[error("{step}: column '{column}' has type {found}, {need}")]
    ColumnType {
        /// The step.
        step: StepName,
        /// The column.
        column: String,
        /// Its type.
        found: String,
        /// What the step needs, in words.
        need: &'static str,
    },
    /// Two output columns would have one name.
    #[error("{step}: the output would have two columns named '{column}'")]
    DuplicateColumn {
        /// The step.
        step: StepName,
        /// The name.
        column: String,
    },
    /// The name of an operator is none, or another step's.
    #[error("{step}: the name '{}' {reason}", name.escape_debug())]
    OperatorName {
        /// The step.
        step: StepName,
        /// The name.
        name: String,
        /// What is wrong with it, and what to do.
        reason: String,
    },
    /// The name of a side output is none, or another one's, or it has no columns.
    #[error("{step}: the side output '{}' {reason}", name.escape_debug())]
    SideOutput {
        /// The step.
        step: StepName,
        /// The name.
        name: String,
        /// What is wrong with it, and what to do.
        reason: String,
    },
    /// A step stands where it has no meaning.
    #[error("{step}: {reason}")]
    Misplaced {
        /// The step.
        step: StepName,
        /// Why, and what to write instead.
        reason: &'static str,
    },
    /// Two sources have one name.
    #[error("two sources are named '{name}'; give each a name of its own")]
    DuplicateSource {
        /// The name.
        name: String,
    },
    /// A plan has no source, or too many.
    #[error("a plan has 1 to {most} sources, not {found}")]
    Sources {
        /// How many there are.
        found: usize,
        /// How many there may be.
        most: usize,
    },
    /// A step takes the rows of something that does not stand before it.
    #[error(
        "{step}: it takes the rows of node {input}, and only nodes 0 to {last} stand before it: a plan has no cycles"
    )]
    NoSuchInput {
        /// The step.
        step: StepName,
        /// What it names.
        input: usize,
        /// The node before it.
        last: usize,
    },
    /// A step has too few inputs or too many.
    #[error("{step}: it takes {need}, {found} are named")]
    Inputs {
        /// The step.
        step: StepName,
        /// How many are named.
        found: usize,
        /// How many it takes, in words.
        need: &'static str,
    },
    /// A join names other numbers of columns on its sides, or none.
    #[error(
        "{step}: it equals {left} columns of the left side with {right} of the right one; name as many on both sides, at least one"
    )]
    JoinColumns {
        /// The step.
        step: StepName,
        /// Columns named of the left side.
        left: usize,
        /// Columns named of the right side.
        right: usize,
    },
    /// Columns that a join compares have different types.
    #[error(
        "{step}: columns of different types are never equal: '{}' has type {}, '{}' has {}; convert one of them first",
        left.name(), told_apart(left.data_type(), right.data_type()), right.name(), told_apart(right.data_type(), left.data_type())
    )]
    JoinTypes {
        /// The step.
        step: StepName,
        /// Column of the left side.
        left: Box<Field>,
        /// Column of the right side.
        right: Box<Field>,
    },
    /// The interval of a join is none.
    #[error("{step}: within {lower_us} us to {upper_us} us {reason}")]
    JoinWithin {
        /// The step.
        step: StepName,
        /// Its beginning.
        lower_us: i64,
        /// Its end.
        upper_us: i64,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The inputs of a union have different columns.
    #[error("{step}: its inputs must have the same columns; the first has ({expected}), another one ({found})")]
    UnionColumns {
        /// The step.
        step: StepName,
        /// Columns of the first input.
        expected: String,
        /// Columns of the other one.
        found: String,
    },
    /// A step needs an event-time column and there is none at this point.
    #[error(
        "{step}: there is no event-time column here; declare event_time in the source and keep that column up to this step"
    )]
    NoEventTime {
        /// The step.
        step: StepName,
    },
    /// A window's size or period is out of range or not a multiple of the event-time unit.
    #[error("{step}: {name} = {value} us: {reason}")]
    Window {
        /// The step.
        step: StepName,
        /// `size_us`, `every_us` or `offset_us`.
        name: &'static str,
        /// The value.
        value: i64,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// There is no time zone of this name.
    #[error("{step}: there is no time zone '{zone}'; give a name of the IANA database, such as Europe/Berlin")]
    Zone {
        /// The step.
        step: StepName,
        /// The name.
        zone: String,
    },
    /// The body of a loop gives back other columns than go around.
    #[error("{step}: the body must give back ({expected}), it gives ({found})")]
    LoopColumns {
        /// The step.
        step: StepName,
        /// Columns that it must give back.
        expected: String,
        /// Columns that it gives.
        found: String,
    },
    /// Bounds that cannot be kept.
    #[error("{step}: {source}")]
    Bounds {
        /// The step.
        step: StepName,
        /// Why.
        source: penstock_bounded::BoundsError,
    },
    /// A number of the plan is out of range.
    #[error("{step}: {name} = {value} is out of range")]
    Range {
        /// The step.
        step: StepName,
        /// The option.
        name: &'static str,
        /// The value.
        value: i64,
    },
    /// An aggregate function is unknown.
    #[error(
        "{step}: aggregate '{name}': unknown function '{function}' (count, sum, min, max, mean, min_by, max_by, first, last, variance, var_pop, stddev, stddev_pop, count_distinct, approx_count_distinct, approx_quantile)"
    )]
    Function {
        /// The step.
        step: StepName,
        /// The aggregate's output name.
        name: String,
        /// The function asked for.
        function: String,
    },
    /// An option of an aggregate is missing or out of range.
    #[error("{step}: aggregate '{name}': {option} = {value}; it {need}")]
    AggregateOption {
        /// The step.
        step: StepName,
        /// The aggregate's output name.
        name: String,
        /// The option.
        option: &'static str,
        /// Its value.
        value: Box<str>,
        /// What it must be.
        need: &'static str,
    },
    /// An aggregate needs a column and names none.
    #[error("{step}: aggregate '{name}' needs a column")]
    NoColumn {
        /// The step.
        step: StepName,
        /// The aggregate's output name.
        name: String,
    },
}

/// What has more room than sums of this type have.
fn more_room(data_type: &str) -> &'static str {
    match data_type.strip_prefix("decimal(38,").map(|scale| scale.trim().trim_end_matches(')').parse::<i8>()) {
        None => "make the column decimal(38, 0) or double before",
        Some(Ok(1..)) => "give the column a smaller scale, or make it double, before",
        Some(_) => "make the column double before",
    }
}

/// What data can get wrong while a plan runs.
#[derive(Debug, thiserror::Error)]
pub enum OpError {
    /// The value of a sum does not fit its column's type.
    #[error(
        "{step}: the sum in column '{column}'{} overflows {data_type}; {}",
        key.iter().map(|key| format!(" of {key}")).collect::<String>(),
        more_room(data_type)
    )]
    Overflow {
        /// The step.
        step: StepName,
        /// The output column.
        column: String,
        /// Its type.
        data_type: String,
        /// The key whose sum it is, in words; none where there is no key, or no row of the output yet.
        key: Option<String>,
    },
    /// The distinct values of one key are too many to be kept.
    #[error(
        "{step}: the distinct values in column '{column}' of one key reach 4 GiB; use approx_count_distinct, or a finer key"
    )]
    TooManyDistinct {
        /// The step.
        step: StepName,
        /// The output column.
        column: String,
    },
    /// A key is null where the step rejects nulls.
    #[error(
        "{step}: key column '{column}' is null in row {row} and nulls are rejected; mend the source, or key_by(..., nulls=\"group\")"
    )]
    NullKey {
        /// The step.
        step: StepName,
        /// The key column.
        column: String,
        /// Row of the block.
        row: usize,
    },
    /// Of windows that come as columns the end is null, though the step tells windows apart by it.
    #[error(
        "{step}: column '{column}' is null in row {row}, and tops are of windows by it; leave it as the window made it"
    )]
    NoWindow {
        /// The step.
        step: StepName,
        /// The column.
        column: String,
        /// Row of the block.
        row: usize,
    },
    /// Two left rows could meet one right row, where at most one may.
    #[error(
        "{step}: validate='1:m' says that a row of the right side meets at most one of the left, and there are two with the key {key} (row {row} of a \
         block is the second); leave validate out, or keep one of them"
    )]
    Twice {
        /// The step.
        step: StepName,
        /// The key, in words.
        key: String,
        /// Row of the block.
        row: usize,
    },
    /// An event time, or an end of its window, is beyond what can be told.
    #[error("{step}: event time {value} in column '{column}', row {row}, is out of range, or its window is")]
    EventTime {
        /// The step.
        step: StepName,
        /// The event-time column.
        column: String,
        /// Row of the block.
        row: usize,
        /// The value in the column's unit.
        value: i64,
    },
    /// A block has another schema than the plan declares.
    #[error("{step}: block has columns {found}, declared are {expected}")]
    Schema {
        /// The step.
        step: StepName,
        /// Declared columns.
        expected: String,
        /// Columns of the block.
        found: String,
    },
    /// A block carries another number of hashes than rows.
    #[error("a block of {rows} rows carries {hashes} hashes")]
    Hashes {
        /// Rows of the block.
        rows: usize,
        /// Hashes beside it.
        hashes: usize,
    },
    /// A block names a side that its operator does not have.
    #[error("a block is of side {side}, and a join has sides 0 and 1")]
    Side {
        /// What it names.
        side: usize,
    },
    /// A record reached a worker that does not hold its bin.
    #[error("bin {bin} is not held by this worker")]
    BinMissing {
        /// The bin.
        bin: u32,
    },
    /// A bin holds state of another operator.
    #[error("bin {bin} holds state of another kind")]
    StateKind {
        /// The bin.
        bin: u32,
    },
    /// User code failed.
    #[error(transparent)]
    Call(#[from] CallError),
    /// Arrow refused an operation.
    #[error("arrow: {0}")]
    Arrow(#[from] arrow_schema::ArrowError),
}

/// What the state of a bin can get wrong when it moves or goes back.
#[derive(Clone, Debug, thiserror::Error)]
pub enum StateFault {
    /// Written by a release with another format.
    #[error("state format {found} is not supported, this release reads {supported}")]
    Version {
        /// Version in the bytes.
        found: u8,
        /// The version this release reads.
        supported: u8,
    },
    /// The state belongs to another operator or another set of columns.
    #[error("the state has another shape: {what}")]
    Shape {
        /// What differs.
        what: &'static str,
    },
    /// The bytes end early, are too long or contradict themselves.
    #[error("corrupt state: {what}")]
    Corrupt {
        /// What is wrong.
        what: &'static str,
    },
    /// The user's state could not be written, restored, or brought back.
    #[error("the user's state: {0}")]
    Foreign(#[source] CallError),
}

impl From<penstock_files::Damage> for StateFault {
    fn from(damage: penstock_files::Damage) -> Self {
        match damage {
            penstock_files::Damage::Content { what } => Self::Corrupt { what },
            penstock_files::Damage::Newer { found } => Self::Version {
                found: u8::try_from(found).unwrap_or(u8::MAX),
                supported: penstock_files::VERSION as u8,
            },
            _ => Self::Corrupt { what: "a chunk of entries" },
        }
    }
}
