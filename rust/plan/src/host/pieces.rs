//! Cutting a plan at its exchanges, for a host whose shuffle lies between the pieces. Only a [line](Plan::is_line) is cut.
//!
//! Departure: what crosses a shuffle are the rows of the keyed step with their hash, not the rows of the map before it.

use arrow_array::RecordBatch;
use arrow_schema::SchemaRef;

use crate::error::OpError;
use crate::plan::Plan;

impl Plan {
    /// Number of pieces between exchanges: one more than there are keyed steps.
    #[must_use]
    pub fn pieces(&self) -> usize {
        self.keyed_ops() + 1
    }

    /// Columns that enter piece `piece`: those of the input, or the routed rows of the keyed step it begins with. `None`
    /// beyond the last piece.
    #[must_use]
    pub fn piece_input_schema(&self, piece: usize) -> Option<SchemaRef> {
        match piece.checked_sub(1) {
            None => Some(self.input_schema().clone()),
            Some(op) => self.keyed().nth(op).map(|keyed| keyed.routed.clone()),
        }
    }

    /// Columns that leave piece `piece`: the routed rows of the next keyed step, or the output. `None` beyond the last piece.
    #[must_use]
    pub fn piece_output_schema(&self, piece: usize) -> Option<SchemaRef> {
        match piece.cmp(&self.keyed_ops()) {
            std::cmp::Ordering::Less => self.piece_input_schema(piece + 1),
            std::cmp::Ordering::Equal => Some(self.output_schema().clone()),
            std::cmp::Ordering::Greater => None,
        }
    }

    /// Hashes, one per row, of rows on their way into piece `piece`: rows of one key have one hash and must meet.
    ///
    /// # Errors
    /// A null key where nulls are rejected.
    ///
    /// # Panics
    /// When there is no exchange before `piece`.
    pub fn exchange_hashes(&self, piece: usize, routed: &RecordBatch) -> Result<Vec<u64>, OpError> {
        let keyed = piece.checked_sub(1).and_then(|op| self.keyed().nth(op));
        keyed.expect("a piece behind an exchange").hashes(routed)
    }

    /// Greatest event time of a block of the first source, in microseconds; `None` without event time or rows.
    #[must_use]
    pub fn max_event_time(&self, batch: &RecordBatch) -> Option<i64> {
        self.event_time().and_then(|event_time| event_time.max_us(batch))
    }
}
