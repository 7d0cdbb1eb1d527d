//! Bins on their way in: S's half of the protocol, without any dataflow.
//!
//! A bin is announced by Prepare, filled by chunks of State and by its post-dated records, and complete with the End that counts both; within a
//! process the ticket of the shelf comes last. Then the bin is *in service* (see `table`), whatever else is under way: F may even have to send it on
//! before S runs again. When the state frontier has passed the time of its move all of it must be here.
//!
//! Invariants: state and records are accepted only between the Prepare of their bin and what completes it, at the Prepare's
//! time; a Prepare never meets a bin that is here. Violations are fatal (M-10).

use std::collections::BTreeMap;

use crate::bin::BinState;
use crate::error::BinsError;
use crate::message::BinPart;
use crate::parts::range_of;
use crate::pending::Pending;
use crate::shelf::Shelf;
use crate::stats::BinEvent;
use crate::table::BinTable;

/// Bins prepared but not complete.
pub(crate) struct Arrivals<T> {
    prepared: BTreeMap<u32, Coming<T>>,
}

/// A bin on its way in.
struct Coming<T> {
    /// When it moves.
    time: T,
    /// The worker of another process that sends it.
    from: Option<usize>,
    /// Post-dated records that have come.
    records: u64,
    /// What has come of a chunk that is longer than a message.
    unfinished: Vec<u8>,
}

/// Where arrivals go.
pub(crate) struct Destination<'a, T, S: BinState, P> {
    pub(crate) name: &'a str,
    pub(crate) table: &'a mut BinTable<S>,
    pub(crate) pending: &'a mut Pending<T, P>,
    pub(crate) shelf: &'a Shelf<S>,
    pub(crate) new_state: &'a dyn Fn() -> S,
    /// Whether what comes keeps undo, which tells what the rest of the epoch changes.
    pub(crate) record: bool,
}

impl<T: Ord + Clone> Arrivals<T> {
    pub(crate) fn new() -> Self {
        Self { prepared: BTreeMap::new() }
    }

    /// Whether nothing is on its way, as far as was announced.
    pub(crate) fn is_empty(&self) -> bool {
        self.prepared.is_empty()
    }

    /// The worker of another process from which a bin comes that is not complete.
    pub(crate) fn sender(&self, bin: u32) -> Option<usize> {
        self.prepared.get(&bin)?.from
    }

    /// Takes one part; `from` is its sender, if that is of another process. Tells what it was, with bytes, for the statistics, and whether the bin
    /// is complete.
    pub(crate) fn part<S: BinState, P>(
        &mut self,
        time: &T,
        from: Option<usize>,
        part: BinPart<T, P>,
        to: &mut Destination<'_, T, S, P>,
        mut told: impl FnMut(u32, BinEvent, usize),
    ) -> Result<(), BinsError> {
        match part {
            BinPart::Prepare { bin, epoch } => {
                if range_of(bin, to.table.bits()).is_none() {
                    return Err(BinsError::Absent { bin });
                }
                if to.table.get(bin).is_some() || self.prepared.contains_key(&bin) {
                    return Err(BinsError::Occupied { bin });
                }
                if epoch != to.table.epoch() {
                    return Err(BinsError::EpochDiffers { bin, here: to.table.epoch(), there: epoch });
                }
                self.prepared.insert(bin, Coming { time: time.clone(), from, records: 0, unfinished: Vec::new() });
                if from.is_some() {
                    to.table.announced(bin)?;
                }
            }
            BinPart::Shelved { bin, ticket } => {
                self.expect(bin, time)?;
                let held = to.shelf.take(to.name, bin, ticket)?;
                to.table.install_held(bin, held)?;
                self.prepared.remove(&bin);
                told(bin, BinEvent::State, 0);
                told(bin, BinEvent::Installed, 0);
            }
            BinPart::Piece { bin, bytes } => {
                self.expect(bin, time)?.unfinished.extend_from_slice(&bytes);
                told(bin, BinEvent::State, bytes.len());
            }
            BinPart::State { bin, chunk } => {
                let (bytes, mut whole) = (chunk.len(), std::mem::take(&mut self.expect(bin, time)?.unfinished));
                let chunk = if whole.is_empty() {
                    chunk
                } else {
                    whole.extend_from_slice(&chunk);
                    whole
                };
                let new = || new_state(to.new_state, to.record);
                let state = to.table.chunk_came(bin, new).ok_or(BinsError::Unprepared { bin })?;
                state.absorb(&chunk).map_err(|source| BinsError::Chunk { bin, source })?;
                told(bin, BinEvent::State, bytes);
            }
            BinPart::Pending { bin, records } => {
                let coming = self.expect(bin, time)?;
                if records.iter().any(|(at, _)| at < time) {
                    // Whatever was due before the move was the sender's to apply.
                    return Err(BinsError::Unprepared { bin });
                }
                coming.records += records.len() as u64;
                for (at, record) in records {
                    to.pending.push(bin, at, record);
                }
                told(bin, BinEvent::Pending, 0);
            }
            BinPart::End { bin, chunks, records } => {
                let coming = self.expect(bin, time)?;
                let arrived = to.table.coming(bin).ok_or(BinsError::Unprepared { bin })?;
                if arrived != chunks || !coming.unfinished.is_empty() {
                    return Err(BinsError::Incomplete { bin, arrived, announced: Some(chunks) });
                }
                if coming.records != records {
                    return Err(BinsError::RecordsDiffer { bin, arrived: coming.records, announced: records });
                }
                to.table.all_came(bin, || new_state(to.new_state, to.record))?;
                self.prepared.remove(&bin);
                told(bin, BinEvent::Installed, 0);
            }
        }
        Ok(())
    }

    /// The state frontier has passed the times for which `passed` says so: nothing more can come of their bins. `arrived` says how many chunks of
    /// one that is coming have come.
    ///
    /// # Errors
    /// [`BinsError::Incomplete`]: a bin of which something is missing.
    pub(crate) fn settle(
        &self,
        arrived: impl Fn(u32) -> Option<u64>,
        passed: impl Fn(&T) -> bool,
    ) -> Result<(), BinsError> {
        match self.prepared.iter().find(|(_, coming)| passed(&coming.time)) {
            Some((&bin, _)) => Err(BinsError::Incomplete { bin, arrived: arrived(bin).unwrap_or(0), announced: None }),
            None => Ok(()),
        }
    }

    fn expect(&mut self, bin: u32, time: &T) -> Result<&mut Coming<T>, BinsError> {
        match self.prepared.get_mut(&bin) {
            Some(coming) if coming.time == *time => Ok(coming),
            _ => Err(BinsError::Unprepared { bin }),
        }
    }
}

/// The state of a bin of which nothing has come.
fn new_state<S: BinState>(new: &dyn Fn() -> S, record: bool) -> S {
    let mut state = new();
    if record {
        state.mark();
    }
    state
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bin::Encoding;
    use crate::keyed::KeyedMap;
    use crate::routing::Routing;

    type Counts = KeyedMap<u64, u64>;

    struct Rig {
        arrivals: Arrivals<u64>,
        table: BinTable<Counts>,
        pending: Pending<u64, char>,
        shelf: Shelf<Counts>,
    }

    impl Rig {
        fn new() -> Self {
            let routing = Routing::new(2, 2).unwrap();
            Self {
                arrivals: Arrivals::new(),
                table: BinTable::fresh(&routing, 0, &Counts::default),
                pending: Pending::default(),
                shelf: Shelf::new(),
            }
        }

        fn with<R>(&mut self, act: impl FnOnce(&mut Arrivals<u64>, &mut Destination<'_, u64, Counts, char>) -> R) -> R {
            let mut to = Destination {
                name: "count",
                table: &mut self.table,
                pending: &mut self.pending,
                shelf: &self.shelf,
                new_state: &Counts::default,
                record: false,
            };
            act(&mut self.arrivals, &mut to)
        }

        fn part(&mut self, time: u64, part: BinPart<u64, char>) -> Result<(), BinsError> {
            self.with(|arrivals, to| arrivals.part(&time, Some(1), part, to, |_, _, _| {}))
        }

        fn settle(&mut self, frontier: u64) -> Result<(), BinsError> {
            self.arrivals.settle(|bin| self.table.coming(bin), |time| *time < frontier)
        }
    }

    fn chunks(keys: std::ops::Range<u64>) -> Vec<u8> {
        let mut state = Counts::default();
        keys.for_each(|key| *state.entry(key) = key);
        state.encode(&mut Encoding::new()).unwrap().unwrap()
    }

    #[test]
    fn a_chunk_comes_in_pieces() {
        let mut rig = Rig::new();
        let chunk = chunks(0..9);
        assert!(matches!(
            rig.part(5, BinPart::Piece { bin: 1, bytes: chunk[..3].to_vec() }),
            Err(BinsError::Unprepared { bin: 1 })
        ));
        rig.part(5, BinPart::Prepare { bin: 1, epoch: None }).unwrap();
        for piece in [&chunk[..3], &chunk[3..9]] {
            rig.part(5, BinPart::Piece { bin: 1, bytes: piece.to_vec() }).unwrap();
        }
        let early = rig.part(5, BinPart::End { bin: 1, chunks: 0, records: 0 });
        assert!(matches!(early, Err(BinsError::Incomplete { bin: 1, arrived: 0, announced: Some(0) })), "{early:?}");
        rig.part(5, BinPart::State { bin: 1, chunk: chunk[9..].to_vec() }).unwrap();
        rig.part(5, BinPart::State { bin: 1, chunk: chunks(9..12) }).unwrap();
        rig.part(5, BinPart::End { bin: 1, chunks: 2, records: 0 }).unwrap();
        let state = rig.table.get(1).unwrap();
        assert_eq!(
            (0..12).map(|key| state.get(&key).copied()).collect::<Vec<_>>(),
            (0..12).map(Some).collect::<Vec<_>>()
        );
    }

    #[test]
    fn a_bin_is_in_service_with_the_last_of_it() {
        let mut rig = Rig::new();
        rig.part(5, BinPart::Prepare { bin: 1, epoch: None }).unwrap();
        rig.part(5, BinPart::State { bin: 1, chunk: chunks(0..3) }).unwrap();
        rig.part(5, BinPart::State { bin: 1, chunk: chunks(3..7) }).unwrap();
        rig.part(5, BinPart::Pending { bin: 1, records: vec![(9, 'z'), (5, 'a')] }).unwrap();
        assert!(rig.table.get(1).is_none() && rig.table.owned().all(|(bin, _)| bin != 1) && rig.settle(5).is_ok());
        rig.part(5, BinPart::End { bin: 1, chunks: 2, records: 2 }).unwrap();
        assert!(rig.settle(6).is_ok());
        assert_eq!(rig.table.get(1).unwrap().keys(), 7);
        assert_eq!(rig.pending.take_due(&20), [(1, 'a'), (1, 'z')]);
        assert!(matches!(
            rig.part(5, BinPart::State { bin: 1, chunk: chunks(8..9) }),
            Err(BinsError::Unprepared { bin: 1 })
        ));
        rig.table.rollback_all().unwrap();
        assert!(rig.table.get(1).is_none(), "what arrived from another process is dropped");
    }

    #[test]
    fn an_empty_bin_moves() {
        let mut rig = Rig::new();
        rig.part(5, BinPart::Prepare { bin: 3, epoch: None }).unwrap();
        rig.part(5, BinPart::End { bin: 3, chunks: 0, records: 0 }).unwrap();
        assert!(rig.table.get(3).unwrap().is_empty(), "at once: it may have to move on");
        assert!(rig.settle(6).is_ok());
    }

    #[test]
    fn a_bin_that_has_come_in_part_is_not_deposited() {
        for came in 0..=3 {
            let mut rig = Rig::new();
            rig.table.attach(rig.shelf.clone(), "count".into());
            rig.part(5, BinPart::Prepare { bin: 1, epoch: None }).unwrap();
            for chunk in [chunks(0..3), chunks(3..7)].into_iter().take(came) {
                rig.part(5, BinPart::State { bin: 1, chunk }).unwrap();
            }
            if came == 3 {
                rig.part(5, BinPart::End { bin: 1, chunks: 2, records: 0 }).unwrap();
            }
            let Rig { table, shelf, .. } = rig;
            drop(table);
            let whole = if came == 3 { vec![0, 1, 2] } else { vec![0, 2] };
            assert_eq!(shelf.inventory("count", 0), whole, "{came} of two chunks and the end came");
        }
    }

    #[test]
    fn chunks_and_records_are_counted() {
        let begun = |came: u64| {
            let mut rig = Rig::new();
            rig.part(5, BinPart::Prepare { bin: 1, epoch: None }).unwrap();
            for key in 0..came {
                rig.part(5, BinPart::State { bin: 1, chunk: chunks(key..key + 1) }).unwrap();
            }
            rig
        };
        for (came, announced) in [(0, 1), (1, 2), (2, 1), (1, 0)] {
            let refused = begun(came).part(5, BinPart::End { bin: 1, chunks: announced, records: 0 });
            assert!(
                matches!(refused, Err(BinsError::Incomplete { bin: 1, arrived, announced: Some(a) }) if (arrived, a) == (came, announced)),
                "{refused:?}"
            );
        }
        for (came, announced) in [(0, 1), (2, 1), (1, 0)] {
            let mut rig = begun(0);
            rig.part(5, BinPart::Pending { bin: 1, records: vec![(7, 'a'); came] }).unwrap();
            let refused = rig.part(5, BinPart::End { bin: 1, chunks: 0, records: announced });
            assert!(
                matches!(refused, Err(BinsError::RecordsDiffer { bin: 1, arrived, announced: a }) if (arrived as usize, a) == (came, announced)),
                "{refused:?}"
            );
        }
        let unfinished = begun(2).settle(6);
        assert!(
            matches!(unfinished, Err(BinsError::Incomplete { bin: 1, arrived: 2, announced: None })),
            "{unfinished:?}"
        );
        let mut rig = begun(1);
        rig.part(5, BinPart::End { bin: 1, chunks: 1, records: 0 }).unwrap();
        let more = rig.part(5, BinPart::State { bin: 1, chunk: chunks(8..9) });
        assert!(matches!(more, Err(BinsError::Unprepared { bin: 1 })), "{more:?}");
        // A ticket that never comes.
        let mut rig = Rig::new();
        let prepare = BinPart::Prepare { bin: 3, epoch: None };
        rig.with(|arrivals, to| arrivals.part(&5, None, prepare, to, |_, _, _| {})).unwrap();
        assert!(matches!(rig.settle(6), Err(BinsError::Incomplete { bin: 3, arrived: 0, announced: None })));
    }

    #[test]
    fn breaches_are_fatal() {
        let mut rig = Rig::new();
        assert!(matches!(
            rig.part(5, BinPart::Prepare { bin: 1, epoch: Some(3) }),
            Err(BinsError::EpochDiffers { bin: 1, here: None, there: Some(3) })
        ));
        assert!(matches!(rig.part(5, BinPart::Prepare { bin: 0, epoch: None }), Err(BinsError::Occupied { bin: 0 })));
        assert!(matches!(rig.part(5, BinPart::Prepare { bin: 4, epoch: None }), Err(BinsError::Absent { bin: 4 })));
        let chunk = chunks(0..1);
        assert!(matches!(
            rig.part(5, BinPart::State { bin: 1, chunk: chunk.clone() }),
            Err(BinsError::Unprepared { bin: 1 })
        ));
        assert!(matches!(
            rig.part(5, BinPart::Pending { bin: 1, records: vec![(5, 'a')] }),
            Err(BinsError::Unprepared { bin: 1 })
        ));
        rig.part(5, BinPart::Prepare { bin: 1, epoch: None }).unwrap();
        assert!(matches!(rig.part(5, BinPart::Prepare { bin: 1, epoch: None }), Err(BinsError::Occupied { bin: 1 })));
        assert!(matches!(rig.part(6, BinPart::State { bin: 1, chunk }), Err(BinsError::Unprepared { bin: 1 })));
        assert!(matches!(
            rig.part(5, BinPart::State { bin: 1, chunk: vec![255; 3] }),
            Err(BinsError::Chunk { bin: 1, .. })
        ));
        assert!(matches!(
            rig.part(5, BinPart::Shelved { bin: 1, ticket: 0 }),
            Err(BinsError::NotShelved { bin: 1, ticket: 0, .. })
        ));
        assert!(matches!(
            rig.part(5, BinPart::Pending { bin: 1, records: vec![(4, 'a')] }),
            Err(BinsError::Unprepared { bin: 1 })
        ));
    }
}
