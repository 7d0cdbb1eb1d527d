//! Frozen outputs: what an epoch produced here, re-readable until it is closed.
//!
//! Piece `i` is the output of the `i`-th worker of this process. A sink may read a piece twice, its
//! tasks may be retried: reading takes shared copies. The rows are in the member's store, beyond its budget in files. Running an epoch again replaces its outputs.
//!
//! Whoever still reads outputs that go is broken off: a sink that hangs reads no more and does not end, and its copies would
//! keep the rows for as long as its process lives.

use std::collections::BTreeMap;
use std::fmt;
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

/// A read under way, and what breaks it off.
struct Reading {
    epoch: u64,
    stop: Box<dyn Fn() + Send>,
}

impl fmt::Debug for Reading {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Reading").field(&self.epoch).finish()
    }
}

/// The frozen outputs of one query.
#[derive(Debug, Default)]
pub(crate) struct Outputs {
    epochs: BTreeMap<u64, Vec<Piece>>,
    tickets: u64,
    /// By ticket. A read that comes to its end takes itself out.
    reading: BTreeMap<u64, Reading>,
}

impl Outputs {
    /// An epoch is complete.
    pub(crate) fn freeze(&mut self, epoch: u64, pieces: Vec<Piece>) {
        self.break_off(|read| read == epoch);
        self.epochs.insert(epoch, pieces);
    }

    /// Forgets this epoch and those before.
    pub(crate) fn close(&mut self, epoch: u64) {
        self.break_off(|read| read <= epoch);
        self.epochs.retain(|held, _| *held > epoch);
    }

    /// Forgets this epoch and those after: they will be run again.
    pub(crate) fn reopen(&mut self, epoch: u64) {
        self.break_off(|read| read >= epoch);
        self.epochs.retain(|held, _| *held < epoch);
    }

    /// The batches of a piece, and the ticket of who reads them. `stop` breaks that off, from any thread.
    pub(crate) fn read(
        &mut self,
        drain: &DrainContext,
        stop: impl Fn() + Send + 'static,
    ) -> Result<(u64, Arc<[Rows]>), Failure> {
        let blocks = self.find(drain)?;
        self.tickets += 1;
        self.reading.insert(self.tickets, Reading { epoch: drain.epoch, stop: Box::new(stop) });
        Ok((self.tickets, blocks))
    }

    /// A read has ended.
    pub(crate) fn ended(&mut self, ticket: u64) {
        self.reading.remove(&ticket);
    }

    fn break_off(&mut self, over: impl Fn(u64) -> bool) {
        for (_, read) in self.reading.extract_if(.., |_, read| over(read.epoch)) {
            (read.stop)();
        }
    }

    /// Reads under way.
    pub(crate) fn reads(&self) -> usize {
        self.reading.len()
    }

    fn find(&self, drain: &DrainContext) -> Result<Arc<[Rows]>, Failure> {
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

    fn read(outputs: &mut Outputs, drain: &DrainContext) -> Result<Arc<[Rows]>, Failure> {
        outputs.read(drain, || {}).map(|(_, blocks)| blocks)
    }

    #[test]
    fn pieces_live_from_freeze_to_close() {
        let mut outputs = Outputs::default();
        for epoch in 0..4 {
            outputs.freeze(epoch, vec![Piece::default(); 2]);
        }
        assert!(read(&mut outputs, &drain(1, 1)).is_ok());
        assert!(read(&mut outputs, &drain(1, 1)).is_ok());
        assert_eq!(read(&mut outputs, &drain(1, 2)).unwrap_err().kind, "piece");
        outputs.close(1);
        assert_eq!(read(&mut outputs, &drain(1, 0)).unwrap_err().kind, "epoch");
        outputs.reopen(3);
        assert_eq!(read(&mut outputs, &drain(3, 0)).unwrap_err().kind, "epoch");
        assert!(read(&mut outputs, &drain(2, 0)).is_ok());
    }

    #[test]
    fn who_reads_what_goes_is_broken_off() {
        let (mut outputs, broken) = (Outputs::default(), Arc::new(std::sync::Mutex::new(Vec::new())));
        let told = || std::mem::take(&mut *broken.lock().unwrap());
        (0..6).for_each(|epoch| outputs.freeze(epoch, vec![Piece::default()]));
        for (epoch, name) in [(0, "first"), (1, "ended"), (2, "again"), (3, "stays"), (4, "later"), (5, "last")] {
            let list = Arc::clone(&broken);
            let (ticket, _) = outputs.read(&drain(epoch, 0), move || list.lock().unwrap().push(name)).unwrap();
            if name == "ended" {
                outputs.ended(ticket);
            }
        }
        assert!(outputs.read(&drain(6, 0), || unreachable!("it was never read")).is_err());
        outputs.close(1);
        assert_eq!(told(), ["first"]);
        outputs.freeze(2, vec![Piece::default()]);
        assert_eq!(told(), ["again"]);
        outputs.reopen(4);
        assert_eq!((told(), outputs.reads()), (vec!["later", "last"], 1));
        outputs.close(u64::MAX);
        assert_eq!((told(), outputs.reads()), (vec!["stays"], 0));
    }
}
