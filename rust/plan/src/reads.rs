//! Which columns of its sources a plan reads: hosts ask for no others.
//!
//! A column is read when the output, the state, a watermark or a check depends on it: of an aggregate its keys, inputs and event time, of a step that
//! gives rows back whole, or gives them to a function, all. Late rows are whole, too, where somebody takes them. Event time and `order_by` of a source
//! are read, and columns that must have no nulls, since one is an error.
//!
//! Invariants: [`Plan::narrowed`] gives the same rows and the same state as the plan, each kept as before; rows that meet in a union have the same
//! columns. A source is left a column: rows without any cannot be counted.

use std::collections::BTreeSet;
use std::sync::Arc;

use arrow_schema::{Schema, SchemaRef};

use crate::keyed::{KeyedKind, KeyedSpec};
use crate::plan::{Origin, Plan};
use crate::spec::PlanSpec;

type Columns = BTreeSet<usize>;

fn all(schema: &Schema) -> Columns {
    (0..schema.fields().len()).collect()
}

/// What a keyed step reads of the rows that enter on a side.
fn of_step(keyed: &KeyedSpec, side: usize, late: bool) -> Columns {
    let keyed = keyed.side(side);
    let aggregated = |aggregates: &[crate::agg::Aggregate], time: Option<usize>| -> Columns {
        let inputs = aggregates.iter().flat_map(crate::agg::Aggregate::columns);
        inputs.chain(keyed.keys.iter().copied()).chain(time).collect()
    };
    match &keyed.kind {
        KeyedKind::Running { aggregates, .. } => aggregated(aggregates, None),
        KeyedKind::Window { event_time, aggregates, .. } | KeyedKind::Session { event_time, aggregates, .. }
            if !late =>
        {
            aggregated(aggregates, Some(event_time.column))
        }
        // Whether there is one is all that is asked.
        KeyedKind::Join(join) if side == 1 && join.how.is_filter() && !(late && join.within.is_some()) => {
            let right = &join.sides[1];
            let bounds = right.routed.fields().len() - right.input.fields().len();
            let time = right.time.iter().map(|time| time.column);
            right.on.iter().copied().chain(time).filter_map(|at| at.checked_sub(bounds)).collect()
        }
        _ => all(&keyed.input),
    }
}

impl Plan {
    /// The columns that are read of each source, by number, in order; `late` where somebody takes late rows.
    pub fn reads(&self, late: bool) -> Vec<Vec<usize>> {
        let stages = self.stages();
        // What is asked of a source or of a stage that passes rows on as they are. What another one gives is what it gives.
        let passes = |at: usize| stages[at].keyed.is_none() && stages[at].inlets[0].pre.is_empty();
        let mut of_stage: Vec<Columns> = vec![Columns::new(); stages.len()];
        of_stage[stages.len() - 1] = all(self.output_schema());
        let checked = |at: usize| {
            let (source, spec) = (&self.sources()[at], &self.spec().sources[at]);
            let named = spec.order_by.iter().filter_map(|name| source.schema.index_of(name).ok());
            let whole = source.schema.fields().iter().enumerate().filter(|(_, field)| !field.is_nullable());
            let time = source.event_time.iter().map(|time| time.column);
            named.chain(whole.map(|(at, _)| at)).chain(time).collect::<Columns>()
        };
        let mut of_source: Vec<Columns> = (0..self.sources().len()).map(checked).collect();
        loop {
            let mut grown = false;
            for (at, stage) in stages.iter().enumerate().rev() {
                for (side, inlet) in stage.inlets.iter().enumerate() {
                    let mut asked = match &stage.keyed {
                        _ if !inlet.pre.is_empty() => all(&inlet.input),
                        Some(keyed) => of_step(keyed, side, late),
                        None => of_stage[at].clone(),
                    };
                    if inlet.from.len() > 1 {
                        for origin in &inlet.from {
                            match *origin {
                                Origin::Source(number) => asked.extend(&of_source[number]),
                                Origin::Stage(number) if passes(number) => asked.extend(&of_stage[number]),
                                Origin::Stage(_) => asked = all(&inlet.input),
                            }
                        }
                    }
                    let mut extend = |known: &mut Columns| {
                        let before = known.len();
                        known.extend(&asked);
                        grown |= known.len() > before;
                    };
                    for origin in &inlet.from {
                        extend(match *origin {
                            Origin::Source(number) => &mut of_source[number],
                            Origin::Stage(number) => &mut of_stage[number],
                        });
                    }
                    if passes(at) {
                        // What one of those that meet here is read of anyway comes out of it, for others to know.
                        extend(&mut of_stage[at]);
                    }
                }
            }
            if !grown {
                break;
            }
        }
        let left = of_source.into_iter().zip(self.sources()).map(|(columns, source)| match columns.is_empty() {
            false => columns.into_iter().collect(),
            true => vec![narrowest(&source.schema)],
        });
        left.collect()
    }

    /// The same flow of sources that have only the columns that are read, see [`reads`](Self::reads).
    pub fn narrowed(&self, late: bool) -> PlanSpec {
        let mut spec = self.spec().clone();
        for (source, read) in spec.sources.iter_mut().zip(self.reads(late)) {
            source.schema = Arc::new(source.schema.project(&read).expect("columns of the schema"));
        }
        spec
    }
}

/// The column whose values are the fewest bytes.
fn narrowest(schema: &SchemaRef) -> usize {
    let width = |at: &usize| schema.field(*at).data_type().primitive_width().unwrap_or(usize::MAX);
    (0..schema.fields().len()).min_by_key(width).unwrap_or(0)
}
