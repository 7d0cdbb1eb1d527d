//! Steps without state, as a plan holds them: maps, flat maps, bounded parts and loops, nested to any depth.
//!
//! Nothing here runs: `host::chain` makes scopes of it. A flat map is always metered: it is the expansion at the ingress of a bounded
//! scope that reaches to the end of its chain, under the bounds of the part that it stands in.

use arrow_schema::{DataType, Field, Schema, SchemaRef};
use penstock_bounded::{Bounds, BoundsError, Limits};

use crate::error::StepName;
use crate::foreign::MapCall;

/// One step without state.
#[derive(Clone, Debug, PartialEq)]
pub enum Stateless {
    /// A function from block to block.
    Map(MapCall),
    /// A function from inputs to lazily made rows.
    FlatMap(FlatMapCall),
    /// Steps that hold so much at a time.
    Bounded(BoundedPart),
    /// Steps that rows go through again and again.
    Iterate(Loop),
}

impl Stateless {
    /// The step.
    pub fn step(&self) -> &StepName {
        match self {
            Stateless::Map(map) => &map.step,
            Stateless::FlatMap(call) => &call.step,
            Stateless::Bounded(part) => &part.step,
            Stateless::Iterate(part) => &part.step,
        }
    }

    /// Whether it is more than a map.
    pub fn is_metered(&self) -> bool {
        !matches!(self, Stateless::Map(_))
    }
}

/// A function of the user's from inputs to rows that come one after the other.
#[derive(Clone, Debug, PartialEq)]
pub struct FlatMapCall {
    /// The step.
    pub step: StepName,
    /// Number of the call.
    pub call: usize,
    /// Declared output.
    pub schema: SchemaRef,
    /// Whether an input is a row; else it is a block.
    pub rows: bool,
}

/// How much a part of a flow may hold on each worker; what is not given is found while running.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bound {
    /// Batches that may be unfinished.
    pub batches: Option<u64>,
    /// Rows of a batch.
    pub batch_size: Option<u64>,
    /// Bytes that the process may hold; what is found keeps away from it.
    pub memory: Option<u64>,
    /// Whether an input whose expansion fails is left out; else the flow stops.
    pub skip: bool,
}

impl Bound {
    /// What a bounded scope takes.
    ///
    /// # Errors
    /// [`BoundsError`] of numbers that cannot be kept.
    pub fn bounds(&self) -> Result<Bounds, BoundsError> {
        // Rows of a flow are wider than records of a program, and what waits before a scope within a scope is up to N x B.
        let limits = Limits { batches: (1, 4, 16), batch_size: (1, 1024, 1 << 16), ..Limits::default() };
        Bounds::given(self.batches, self.batch_size, self.memory, limits)
    }
}

/// A part of a flow with bounds of its own.
#[derive(Clone, Debug, PartialEq)]
pub struct BoundedPart {
    /// The step.
    pub step: StepName,
    /// Its bounds.
    pub bound: Bound,
    /// What is in it.
    pub body: Vec<Stateless>,
}

/// A part of a flow that rows go through until they leave.
#[derive(Clone, Debug, PartialEq)]
pub struct Loop {
    /// The step.
    pub step: StepName,
    /// What is in it.
    pub body: Vec<Stateless>,
    /// Column of the body's output that says whether a row goes around again; it is not kept.
    pub again: usize,
    /// Columns of the rows that enter, go around and leave.
    pub schema: SchemaRef,
}

/// The columns that the body of a loop must give back: those of the loop and one of truth values.
pub(crate) fn body_schema(columns: &Schema, again: &str) -> Schema {
    let fields = columns.fields().iter().cloned();
    Schema::new(fields.chain([Field::new(again, DataType::Boolean, true).into()]).collect::<Vec<_>>())
}

/// Whether some steps are more than maps.
pub(crate) fn is_metered(steps: &[Stateless]) -> bool {
    steps.iter().any(Stateless::is_metered)
}
