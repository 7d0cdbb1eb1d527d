//! Cutting a plan at its exchanges, for a host whose shuffle lies between the pieces.
//!
//! A [`Piece`] leads from where rows begin (a source, or a keyed step) over steps without state to where they end (an exchange, which is
//! a side of a keyed step, or the output). Paths that part behind a step are pieces of their own, each of which runs that step; paths
//! that meet again before the next exchange are one piece. Rows of several pieces meet at the exchange that these lead to: since steps
//! without state take each row for itself, nothing has to meet before.
//!
//! Invariant: pieces stand in the order of where they begin, sources first. So all that lead to a keyed step stand before those that begin with
//! it, and piece `n` of a line begins with its keyed step `n - 1`.
//!
//! Departure: what crosses a shuffle are the rows of the keyed step with their hash, not the rows of the map before it.

use std::collections::BTreeSet;

use arrow_array::RecordBatch;
use arrow_schema::SchemaRef;

use crate::error::OpError;
use crate::keyed::KeyedSpec;
use crate::plan::{Inlet, Origin, Plan};

/// Where the rows of a piece come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Begin {
    /// A source, by its number.
    Source(usize),
    /// A keyed step, by its number: what it makes of the rows behind its exchange.
    Keyed(usize),
}

/// Where the rows of a piece go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum End {
    /// The exchange in front of a keyed step.
    Keyed {
        /// Its number.
        op: usize,
        /// Which of its inputs.
        side: usize,
    },
    /// The output.
    Output,
}

/// See the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Piece {
    /// Where rows come from.
    pub begin: Begin,
    /// Where they go.
    pub end: End,
}

impl Plan {
    /// The pieces between exchanges; at least one.
    #[must_use]
    pub fn pieces(&self) -> Vec<Piece> {
        let (mut found, mut made, mut ops) = (BTreeSet::new(), Vec::<BTreeSet<Begin>>::new(), 0);
        for stage in self.stages() {
            let of = |inlet: &Inlet| -> BTreeSet<Begin> {
                let begins = inlet.from.iter().map(|origin| match origin {
                    Origin::Source(number) => [Begin::Source(*number)].into(),
                    Origin::Stage(number) => made[*number].clone(),
                });
                begins.flatten().collect()
            };
            if stage.keyed.is_none() {
                made.push(of(&stage.inlets[0]));
                continue;
            }
            for (side, inlet) in stage.inlets.iter().enumerate() {
                found.extend(of(inlet).into_iter().map(|begin| Piece { begin, end: End::Keyed { op: ops, side } }));
            }
            made.push([Begin::Keyed(ops)].into());
            ops += 1;
        }
        let last = made.pop().expect("a plan has a stage");
        found.extend(last.into_iter().map(|begin| Piece { begin, end: End::Output }));
        found.into_iter().collect()
    }

    /// Columns that enter a piece, by the side of the keyed step that it begins with: those of a source, or the rows that were routed.
    ///
    /// # Panics
    /// When there is no such source or step.
    #[must_use]
    pub fn piece_inputs(&self, piece: Piece) -> Vec<SchemaRef> {
        match piece.begin {
            Begin::Source(number) => vec![self.sources()[number].schema.clone()],
            Begin::Keyed(op) => {
                let stage = self.stages().iter().filter(|stage| stage.keyed.is_some()).nth(op);
                let sides = stage.expect("a keyed step of the plan").inlets.len();
                (0..sides).map(|side| self.keyed_side(op, side).routed).collect()
            }
        }
    }

    /// Columns that leave a piece: rows on their way into a keyed step, or the output.
    ///
    /// # Panics
    /// When there is no such step.
    #[must_use]
    pub fn piece_output(&self, piece: Piece) -> SchemaRef {
        match piece.end {
            End::Keyed { op, side } => self.keyed_side(op, side).routed,
            End::Output => self.output_schema().clone(),
        }
    }

    /// Hashes, one per row, of rows that leave a piece: rows of one key have one hash and must meet. None where they leave the flow.
    ///
    /// # Errors
    /// A null key where nulls are rejected.
    ///
    /// # Panics
    /// When there is no such step.
    pub fn exchange_hashes(&self, piece: Piece, routed: &RecordBatch) -> Result<Option<Vec<u64>>, OpError> {
        match piece.end {
            End::Keyed { op, side } => self.keyed_side(op, side).hashes(routed).map(Some),
            End::Output => Ok(None),
        }
    }

    fn keyed_side(&self, op: usize, side: usize) -> KeyedSpec {
        self.keyed().nth(op).expect("a keyed step of the plan").side(side)
    }

    /// Greatest event time of a block of a source, in microseconds; `None` without event time or rows.
    ///
    /// # Panics
    /// When there is no such source.
    #[must_use]
    pub fn max_event_time(&self, source: usize, batch: &RecordBatch) -> Option<i64> {
        self.sources()[source].event_time.as_ref().and_then(|event_time| event_time.max_us(batch))
    }
}
