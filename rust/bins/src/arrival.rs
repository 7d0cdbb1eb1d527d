//! Bins on their way in: S's half of the protocol, without any dataflow.
//!
//! A bin is announced by Prepare, filled by State (chunks and an End that counts them, or a ticket of the shelf), followed by its
//! post-dated records, and *settled* when the state frontier has passed the time of its move: then all of it must be here. Every
//! part is installed at once, an empty bin by its Prepare: F may have to send the bin on before S runs again.
//!
//! Invariants: state and records are accepted only between the Prepare and the settling of their bin, at the Prepare's
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

/// Bins prepared but not settled.
pub(crate) struct Arrivals<T> {
    prepared: BTreeMap<u32, Coming<T>>,
}

/// A bin on its way in.
struct Coming<T> {
    /// When it moves.
    time: T,
    /// Whether all of its state has come.
    whole: bool,
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

    /// Takes one part; `foreign` says that it comes from another process. Returns bin, event and bytes for the statistics.
    pub(crate) fn part<S: BinState, P>(
        &mut self,
        time: &T,
        foreign: bool,
        part: BinPart<T, P>,
        to: &mut Destination<'_, T, S, P>,
    ) -> Result<Option<(u32, BinEvent, usize)>, BinsError> {
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
                self.prepared.insert(bin, Coming { time: time.clone(), whole: false });
                if foreign {
                    let mut state = Box::new((to.new_state)());
                    if to.record {
                        state.mark();
                    }
                    to.table.install_coming(bin, state)?;
                }
                Ok(None)
            }
            BinPart::Shelved { bin, ticket } => {
                let coming = self.expect(bin, time)?;
                let held = to.shelf.take(to.name, bin, ticket)?;
                to.table.install_held(bin, held)?;
                coming.whole = true;
                Ok(Some((bin, BinEvent::State, 0)))
            }
            BinPart::State { bin, chunk } => {
                let coming = self.expect(bin, time)?;
                let state = to.table.get_mut(bin).filter(|_| !coming.whole).ok_or(BinsError::Unprepared { bin })?;
                state.absorb(&chunk).map_err(|source| BinsError::Chunk { bin, source })?;
                to.table.chunk_came(bin);
                Ok(Some((bin, BinEvent::State, chunk.len())))
            }
            BinPart::End { bin, chunks } => {
                let coming = self.expect(bin, time)?;
                let arrived = to.table.coming(bin).ok_or(BinsError::Unprepared { bin })?;
                if arrived != chunks {
                    return Err(BinsError::Incomplete { bin, arrived, announced: Some(chunks) });
                }
                coming.whole = true;
                to.table.all_came(bin);
                Ok(None)
            }
            BinPart::Pending { bin, records } => {
                self.expect(bin, time)?;
                if records.iter().any(|(at, _)| at < time) {
                    // Whatever was due before the move was the sender's to apply.
                    return Err(BinsError::Unprepared { bin });
                }
                for (at, record) in records {
                    to.pending.push(bin, at, record);
                }
                Ok(Some((bin, BinEvent::Pending, 0)))
            }
        }
    }

    /// Settles the bins whose time the state frontier has passed: `passed(time)`. `arrived` says how many chunks of one that is coming
    /// have come.
    ///
    /// # Errors
    /// [`BinsError::Incomplete`]: a bin of which something is missing, although nothing more can come.
    pub(crate) fn settle(
        &mut self,
        arrived: impl Fn(u32) -> Option<u64>,
        passed: impl Fn(&T) -> bool,
    ) -> Result<Vec<(u32, T)>, BinsError> {
        if self.prepared.is_empty() {
            return Ok(Vec::new());
        }
        let all = std::mem::take(&mut self.prepared).into_iter();
        let (settled, waiting) = all.partition::<BTreeMap<_, _>, _>(|(_, coming)| passed(&coming.time));
        self.prepared = waiting;
        let whole = |(bin, coming): (u32, Coming<T>)| match coming.whole {
            true => Ok((bin, coming.time)),
            false => Err(BinsError::Incomplete { bin, arrived: arrived(bin).unwrap_or(0), announced: None }),
        };
        settled.into_iter().map(whole).collect()
    }

    fn expect(&mut self, bin: u32, time: &T) -> Result<&mut Coming<T>, BinsError> {
        match self.prepared.get_mut(&bin) {
            Some(coming) if coming.time == *time => Ok(coming),
            _ => Err(BinsError::Unprepared { bin }),
        }
    }
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
            self.with(|arrivals, to| arrivals.part(&time, true, part, to)).map(drop)
        }

        fn settle(&mut self, frontier: u64) -> Result<Vec<(u32, u64)>, BinsError> {
            self.arrivals.settle(|bin| self.table.coming(bin), |time| *time < frontier)
        }
    }

    fn chunks(keys: std::ops::Range<u64>) -> Vec<u8> {
        let mut state = Counts::default();
        keys.for_each(|key| *state.entry(key) = key);
        state.encode(&mut Encoding::new()).unwrap().unwrap()
    }

    #[test]
    fn several_chunks_make_a_bin_and_settle_once() {
        let mut rig = Rig::new();
        rig.part(5, BinPart::Prepare { bin: 1, epoch: None }).unwrap();
        rig.part(5, BinPart::State { bin: 1, chunk: chunks(0..3) }).unwrap();
        rig.part(5, BinPart::State { bin: 1, chunk: chunks(3..7) }).unwrap();
        rig.part(5, BinPart::Pending { bin: 1, records: vec![(9, 'z'), (5, 'a')] }).unwrap();
        rig.part(5, BinPart::End { bin: 1, chunks: 2 }).unwrap();
        assert!(rig.settle(5).unwrap().is_empty());
        assert_eq!(rig.settle(6).unwrap(), [(1, 5)]);
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
        assert!(rig.table.get(3).unwrap().is_empty(), "at once: it may have to move on");
        rig.part(5, BinPart::End { bin: 3, chunks: 0 }).unwrap();
        assert_eq!(rig.settle(6).unwrap(), [(3, 5)]);
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
                rig.part(5, BinPart::End { bin: 1, chunks: 2 }).unwrap();
            }
            let Rig { table, shelf, .. } = rig;
            drop(table);
            let whole = if came == 3 { vec![0, 1, 2] } else { vec![0, 2] };
            assert_eq!(shelf.inventory("count", 0), whole, "{came} of two chunks and the end came");
        }
    }

    #[test]
    fn chunks_are_counted() {
        let begun = |came: u64| {
            let mut rig = Rig::new();
            rig.part(5, BinPart::Prepare { bin: 1, epoch: None }).unwrap();
            for key in 0..came {
                rig.part(5, BinPart::State { bin: 1, chunk: chunks(key..key + 1) }).unwrap();
            }
            rig
        };
        for (came, announced) in [(0, 1), (1, 2), (2, 1), (1, 0)] {
            let refused = begun(came).part(5, BinPart::End { bin: 1, chunks: announced });
            assert!(
                matches!(refused, Err(BinsError::Incomplete { bin: 1, arrived, announced: Some(a) }) if (arrived, a) == (came, announced)),
                "{refused:?}"
            );
        }
        let unfinished = begun(2).settle(6);
        assert!(
            matches!(unfinished, Err(BinsError::Incomplete { bin: 1, arrived: 2, announced: None })),
            "{unfinished:?}"
        );
        let mut rig = begun(1);
        rig.part(5, BinPart::End { bin: 1, chunks: 1 }).unwrap();
        let more = rig.part(5, BinPart::State { bin: 1, chunk: chunks(8..9) });
        assert!(matches!(more, Err(BinsError::Unprepared { bin: 1 })), "{more:?}");
        // A ticket that never comes.
        let mut rig = Rig::new();
        rig.with(|arrivals, to| arrivals.part(&5, false, BinPart::Prepare { bin: 3, epoch: None }, to)).unwrap();
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
