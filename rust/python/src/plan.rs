//! Questions about a plan: does it compile, what comes out, where do rows go.
//!
//! Plans travel as JSON text; each call here compiles one (microseconds) so that a Spark task can ask without a handle.

use std::sync::Arc;

use arrow_array::{ArrayRef, Int64Array, RecordBatch as Batch, UInt64Array};
use arrow_schema::{DataType, Field, Schema as ArrowSchema, SchemaRef};
use penstock_bins::{Routing, Strategy, steps};
use penstock_plan::hash::hash_columns_of;
use penstock_plan::host::{Begin, End, Piece};
use penstock_plan::{Beside, KeyedKind, KeyedSpec, Plan};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arrow::{RecordBatch, Schema, import_batch};
use crate::calls::declared;
use crate::errors::{self, Kind};

/// Compiles the JSON text of a plan.
pub(crate) fn compile(plan: &str) -> PyResult<Plan> {
    Plan::from_json(plan).map_err(|error| errors::from_plan(&error))
}

/// A piece by its number.
pub(crate) fn piece_of(plan: &Plan, number: usize) -> PyResult<Piece> {
    let pieces = plan.pieces();
    pieces.get(number).copied().ok_or_else(|| {
        let message = format!("the plan has {} pieces, there is no piece {number}", pieces.len());
        errors::raise(Kind::Value, &message)
    })
}

/// Compiles a plan and tells about it: ``{"output_schema", "needs_order", "pieces", "late_outputs", "side_outputs", "beside_schema", "operators", "explain", "dot"}``.
#[pyfunction]
pub(crate) fn plan_check<'py>(py: Python<'py>, plan: &str) -> PyResult<Bound<'py, PyDict>> {
    let plan = compile(plan)?;
    let facts = PyDict::new(py);
    facts.set_item("output_schema", Schema::new(plan.output_schema().clone()).into_pyobject(py)?)?;
    facts.set_item("needs_order", plan.needs_order())?;
    facts.set_item("event_time", plan.event_time())?;
    facts.set_item("pieces", pieces(py, &plan)?)?;
    let late = plan.late_outputs().into_iter().map(|output| (output.name, Schema::new(output.schema)));
    facts.set_item("late_outputs", late.collect::<Vec<_>>())?;
    let sides = plan.side_outputs().into_iter().map(|output| (output.name, Schema::new(output.schema)));
    facts.set_item("side_outputs", sides.collect::<Vec<_>>())?;
    facts.set_item("beside_schema", Schema::new(Beside::of(&plan).schema().clone()))?;
    facts.set_item("operators", operators(py, &plan)?)?;
    facts.set_item("explain", plan.explain())?;
    facts.set_item("dot", plan.dot())?;
    Ok(facts)
}

/// The same plan of sources with the columns that are read alone, and these columns of each; `late` where somebody takes late rows.
#[pyfunction]
pub(crate) fn plan_narrowed(plan: &str, late: bool) -> PyResult<(String, Vec<Schema>)> {
    let narrowed = compile(plan)?.narrowed(late);
    let read = narrowed.sources.iter().map(|source| Schema::new(source.schema.clone()));
    Ok((narrowed.to_json(), read.collect()))
}

/// The pieces between exchanges, each with its columns: ``{"source"}`` or ``{"operator"}`` that it begins with, ``{"inputs"}`` by side, and
/// ``{"end"}``, which is (operator, side) or None for the output.
fn pieces<'py>(py: Python<'py>, plan: &Plan) -> PyResult<Vec<Bound<'py, PyDict>>> {
    let told = |piece: Piece| {
        let facts = PyDict::new(py);
        match piece.begin {
            Begin::Source(number) => facts.set_item("source", number)?,
            Begin::Keyed(number) => facts.set_item("operator", number)?,
        }
        let end = match piece.end {
            End::Keyed { op, side } => Some((op, side)),
            End::Output => None,
        };
        facts.set_item("end", end)?;
        let inputs = plan.piece_inputs(piece).into_iter().map(Schema::new);
        facts.set_item("inputs", inputs.collect::<Vec<_>>())?;
        facts.set_item("output", Schema::new(plan.piece_output(piece)))?;
        Ok(facts)
    };
    plan.pieces().into_iter().map(told).collect()
}

/// The steps that keep state as manifests name them: ``{"name", "kind", "types", "version", "columns", "reads"}``, and the number of the ``call`` of those with a
/// function.
fn operators<'py>(py: Python<'py>, plan: &Plan) -> PyResult<Vec<Bound<'py, PyDict>>> {
    let told = |keyed: &KeyedSpec| {
        let (facts, kept) = (PyDict::new(py), keyed.kept());
        facts.set_item("name", &keyed.operator)?;
        facts.set_item("kind", keyed.step.op)?;
        facts.set_item("types", kept.types())?;
        facts.set_item("version", KeyedSpec::STATE_VERSION)?;
        facts.set_item("columns", kept.to_json())?;
        facts.set_item("reads", &keyed.reads)?;
        if let KeyedKind::StatefulMap { call, .. }
        | KeyedKind::GroupState { call, .. }
        | KeyedKind::Aggregate { call, .. } = keyed.kind
        {
            facts.set_item("call", call)?;
        }
        Ok(facts)
    };
    plan.keyed().map(told).collect()
}

/// Cuts the way from one assignment of bins to workers to another into steps of moves ``(bin, worker)``.
#[pyfunction]
pub(crate) fn migration_steps(
    owners: Vec<u32>,
    target: Vec<u32>,
    strategy: &str,
    batch_bins: usize,
) -> PyResult<Vec<Vec<(u32, u32)>>> {
    let refused = |error: &dyn std::fmt::Display| errors::raise(Kind::Config, &error.to_string());
    let strategy = Strategy::parse(strategy, batch_bins).map_err(|error| refused(&error))?;
    let routing = |owners| Routing::from_owners(owners).map_err(|error| refused(&error));
    steps(strategy, &routing(owners)?, &routing(target)?).map_err(|error| refused(&error))
}

/// Hash of the key of each row that leaves a piece, as one int64 column `hash`.
#[pyfunction]
pub(crate) fn exchange_hashes(
    py: Python<'_>,
    plan: &str,
    piece: usize,
    batch: &Bound<'_, PyAny>,
) -> PyResult<RecordBatch> {
    let plan = compile(plan)?;
    let number = piece;
    let piece = piece_of(&plan, number)?;
    let batch = fitting(&import_batch(batch)?, &plan.piece_output(piece))?;
    let hashes = py.detach(|| plan.exchange_hashes(piece, &batch)).map_err(|error| errors::from_op(&error))?;
    let Some(hashes) = hashes else {
        return Err(errors::raise(Kind::Value, &format!("there is no exchange behind piece {number}")));
    };
    let signed = hashes.into_iter().map(|hash| hash as i64).collect::<Int64Array>();
    one_column("hash", DataType::Int64, Arc::new(signed))
}

/// Greatest event time of a batch of a source, in microseconds since 1970; None without rows or event time.
#[pyfunction]
#[pyo3(signature = (plan, batch, source=0))]
pub(crate) fn max_event_time(plan: &str, batch: &Bound<'_, PyAny>, source: usize) -> PyResult<Option<i64>> {
    let plan = compile(plan)?;
    let Some(one) = plan.sources().get(source) else {
        let message = format!("the plan has {} sources, there is no source {source}", plan.sources().len());
        return Err(errors::raise(Kind::Value, &message));
    };
    let batch = fitting(&import_batch(batch)?, &one.schema)?;
    Ok(plan.max_event_time(source, &batch))
}

/// A batch of input under the flow's schema; a SchemaError that names the column when it does not fit.
pub(crate) fn fitting(batch: &Batch, schema: &SchemaRef) -> PyResult<Batch> {
    declared(batch, schema)
        .map_err(|reason| errors::raise(Kind::Schema, &format!("the input does not fit the flow: {reason}")))
}

/// The format's 64-bit hash of each row over `columns`, as one uint64 column `hash`.
#[pyfunction]
pub(crate) fn hash_columns(py: Python<'_>, batch: &Bound<'_, PyAny>, columns: Vec<String>) -> PyResult<RecordBatch> {
    let batch = import_batch(batch)?;
    let columns = columns
        .iter()
        .map(|name| {
            batch
                .column_by_name(name)
                .cloned()
                .ok_or_else(|| errors::raise(Kind::Schema, &format!("the batch has no column {name:?}")))
        })
        .collect::<PyResult<Vec<_>>>()?;
    let hashes = py.detach(|| hash_columns_of(&columns, batch.num_rows())).map_err(|error| errors::arrow(&error))?;
    one_column("hash", DataType::UInt64, Arc::new(UInt64Array::from(hashes)))
}

fn one_column(name: &str, kind: DataType, column: ArrayRef) -> PyResult<RecordBatch> {
    let schema = ArrowSchema::new(vec![Field::new(name, kind, false)]);
    Batch::try_new(Arc::new(schema), vec![column]).map(RecordBatch::new).map_err(|error| errors::arrow(&error))
}
