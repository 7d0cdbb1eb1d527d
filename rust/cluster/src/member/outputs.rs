//! Frozen outputs: what an epoch produced here, re-readable until it is closed.
//!
//! Piece `i` is the output of the `i`-th worker of this process. A sink may read a piece twice, its
//! tasks may be retried: reading takes shared copies. The rows are in the member's store, beyond its budget in files. Running an epoch again replaces its outputs.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::error::Failure;
use crate::host::Rows;
use crate::message::{DrainContext, Which};

/// The output of one worker for one epoch.
#[derive(Clone, Debug, Default)]
pub(crate) struct Piece {
    pub(crate) rows: Arc<[Rows]>,
    /// Late rows and those of side outputs.
    pub(crate) beside: Arc<[Rows]>,
    pub(crate) late_rows: u64,
    /// By side output.
    pub(crate) side_rows: Vec<u64>,
}

impl Piece {
    pub(crate) fn row_count(&self) -> u64 {
        self.rows.iter().map(|batch| batch.num_rows() as u64).sum()
    }
}

/// The frozen outputs of one query.
#[derive(Debug, Default)]
pub(crate) struct Outputs {
    epochs: BTreeMap<u64, Vec<Piece>>,
}

impl Outputs {
    /// An epoch is complete.
    pub(crate) fn freeze(&mut self, epoch: u64, pieces: Vec<Piece>) {
        self.epochs.insert(epoch, pieces);
    }

    /// Forgets this epoch and those before.
    pub(crate) fn close(&mut self, epoch: u64) {
        self.epochs.retain(|held, _| *held > epoch);
    }

    /// Forgets this epoch and those after: they will be run again.
    pub(crate) fn reopen(&mut self, epoch: u64) {
        self.epochs.retain(|held, _| *held < epoch);
    }

    /// The batches of a piece.
    pub(crate) fn read(&self, drain: &DrainContext) -> Result<Arc<[Rows]>, Failure> {
        let fail = |kind: &str, message: String| {
            Err(Failure::new(kind, message).with("epoch", drain.epoch).with("piece", drain.piece))
        };
        let Some(pieces) = self.epochs.get(&drain.epoch) else {
            return fail("epoch", format!("there are no outputs of epoch {} here", drain.epoch));
        };
        match pieces.get(drain.piece as usize) {
            Some(piece) if drain.which == Which::Rows => Ok(Arc::clone(&piece.rows)),
            Some(piece) => Ok(Arc::clone(&piece.beside)),
            None => fail("piece", format!("epoch {} has {} pieces", drain.epoch, pieces.len())),
        }
    }

    /// Epochs and rows held.
    pub(crate) fn size(&self) -> (usize, u64) {
        let rows = self.epochs.values().flatten().map(Piece::row_count).sum();
        (self.epochs.len(), rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drain(epoch: u64, piece: u32) -> DrainContext {
        DrainContext { query: "q".into(), epoch, piece, which: Which::Beside }
    }

    #[test]
    fn pieces_live_from_freeze_to_close() {
        let mut outputs = Outputs::default();
        for epoch in 0..4 {
            outputs.freeze(epoch, vec![Piece::default(); 2]);
        }
        assert!(outputs.read(&drain(1, 1)).is_ok());
        assert!(outputs.read(&drain(1, 1)).is_ok());
        assert_eq!(outputs.read(&drain(1, 2)).unwrap_err().kind, "piece");
        outputs.close(1);
        assert_eq!(outputs.read(&drain(1, 0)).unwrap_err().kind, "epoch");
        outputs.reopen(3);
        assert_eq!(outputs.read(&drain(3, 0)).unwrap_err().kind, "epoch");
        assert!(outputs.read(&drain(2, 0)).is_ok());
    }
}
