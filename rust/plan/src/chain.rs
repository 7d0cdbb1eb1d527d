//! Steps without state, as a plan holds them: maps, flat maps, bounded parts and loops, nested to any depth; and their compilation.
//!
//! Nothing here runs: `host::chain` makes scopes of it. A flat map is always metered: it is the expansion at the ingress of a bounded
//! scope that reaches to the end of its chain, under the bounds of the part that it stands in.
//!
//! Departures: a flat map outside of a bounded part is under bounds that are found; k flat maps in a part hold k
//! windows of N x B rows, one behind the other. Bounds that are found grow up to 16 batches of 65,536 rows, not 64 of
//! 2^20: rows of a flow are wider than records of a program.

use arrow_schema::{DataType, Field, Schema, SchemaRef};
use penstock_bounded::{Bounds, BoundsError, Limits};

use crate::error::{PlanError, StepName};
use crate::foreign::MapCall;
use crate::plan::unique;
use crate::spec::{OnFailure, SideSpec, StepSpec};

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
    /// Declared side outputs.
    pub sides: Vec<SideSpec>,
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
        let limits = Limits { batches: (2, 4, 16), batch_size: (64, 1024, 1 << 16), ..Limits::default() };
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
fn body_schema(columns: &Schema, again: &str) -> Schema {
    let fields = columns.fields().iter().cloned();
    Schema::new(fields.chain([Field::new(again, DataType::Boolean, true).into()]).collect::<Vec<_>>())
}

/// Whether some steps are more than maps.
pub(crate) fn is_metered(steps: &[Stateless]) -> bool {
    steps.iter().any(Stateless::is_metered)
}

/// Compiles a step without state; with the columns that leave it.
///
/// # Errors
/// A [`PlanError`] that names the step by its place, those around it included.
pub(crate) fn stateless(
    step: StepName,
    spec: &StepSpec,
    schema: &SchemaRef,
) -> Result<(Stateless, SchemaRef), PlanError> {
    match spec {
        StepSpec::MapBatches { call, schema, sides } => {
            unique(&step, schema)?;
            let made = MapCall { step, call: *call, schema: schema.clone(), sides: sides.clone() };
            Ok((Stateless::Map(made), schema.clone()))
        }
        StepSpec::FlatMap { call, schema, rows, sides } => {
            unique(&step, schema)?;
            let made = FlatMapCall { step, call: *call, schema: schema.clone(), rows: *rows, sides: sides.clone() };
            Ok((Stateless::FlatMap(made), schema.clone()))
        }
        StepSpec::Bounded { batches, batch_size, memory, on_failure, body } => {
            let skip = *on_failure == OnFailure::Skip;
            let bound = Bound { batches: *batches, batch_size: *batch_size, memory: *memory, skip };
            bound.bounds().map_err(|source| PlanError::Bounds { step: step.clone(), source })?;
            let (body, schema) = inside(&step, body, schema)?;
            Ok((Stateless::Bounded(BoundedPart { step, bound, body }), schema))
        }
        StepSpec::Iterate { again, body } => {
            let expected = body_schema(schema, again);
            unique(&step, &expected)?;
            let (body, found) = inside(&step, body, schema)?;
            let like = |a: &Field, b: &Field| a.name() == b.name() && a.data_type().equals_datatype(b.data_type());
            let fits = found.fields().len() == expected.fields().len()
                && found.fields().iter().zip(expected.fields()).all(|(a, b)| like(a, b));
            if !fits {
                let (expected, found) = crate::ddl::both(&expected, &found);
                return Err(PlanError::LoopColumns { step, expected, found });
            }
            let made = Loop { step, body, again: schema.fields().len(), schema: schema.clone() };
            Ok((Stateless::Iterate(made), schema.clone()))
        }
        StepSpec::KeyBy { .. }
        | StepSpec::Window { .. }
        | StepSpec::Agg { .. }
        | StepSpec::StatefulMap { .. }
        | StepSpec::GroupState { .. }
        | StepSpec::Aggregate { .. }
        | StepSpec::Top { .. }
        | StepSpec::Distinct { .. }
        | StepSpec::Union {}
        | StepSpec::Join { .. } => {
            let reason = "a bounded part or a loop holds steps without state only: its batches are finished one after \
                          the other, a keyed step needs all rows of a time; put it behind";
            Err(PlanError::Misplaced { step, reason })
        }
    }
}

/// The steps of a body and the columns that leave it.
fn inside(around: &StepName, body: &[StepSpec], schema: &SchemaRef) -> Result<(Vec<Stateless>, SchemaRef), PlanError> {
    let (mut steps, mut schema) = (Vec::new(), schema.clone());
    for (index, spec) in body.iter().enumerate() {
        let (step, columns) = stateless(around.inside(index, spec.op()), spec, &schema)?;
        steps.push(step);
        schema = columns;
    }
    Ok((steps, schema))
}
