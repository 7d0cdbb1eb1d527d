//! Splitting a bin into parts and merging parts into one, on the worker that has them.
//!
//! It happens when F starts the configuration, when S has applied all that is before its time: no key changes its worker, and whoever applies
//! records finds the bin of a key by its hash, so it is invisible to the logic. What moves away later moves part by part.
//!
//! New states are made of the old ones, which stay on the shelf for as long as an epoch may be undone, or the next begins with them: as if the
//! bin had gone to another process and its parts had come from there. So undoing an epoch, and what an epoch has changed, need nothing of
//! their own (see `shelf`).
//!
//! Cost: a copy of the state of the bin, at one time, on one worker; of states that hand over what they have none, where nothing is retained. Memory: twice
//! the state of the bin until the epoch is settled, where epochs are marked; else until the call returns.

use std::sync::atomic::Ordering::Relaxed;

use penstock_files::Range;
use penstock_progress::Timestamp;

use crate::bin::{BinState, Encoding, Extent};
use crate::control::Recut;
use crate::error::BinsError;
use crate::message::Record;
use crate::parts::range_of;
use crate::route::Shared;
use crate::stats::BinEvent;
use crate::table::Held;

/// Which of these ranges a hash is in.
pub fn dealt_to(ranges: &[Range]) -> impl Fn(u64) -> Option<usize> {
    let mut sorted: Vec<(Range, usize)> = ranges.iter().copied().zip(0..).collect();
    sorted.sort_unstable_by_key(|(range, _)| range.first());
    move |hash| {
        let at = sorted.partition_point(|(range, _)| range.last() < hash);
        sorted.get(at).filter(|(range, _)| range.contains(hash)).map(|(_, part)| *part)
    }
}

/// The hash of the key of a post-dated record, where bins may be split.
pub type Divide<P> = Option<std::rc::Rc<dyn Fn(&P) -> u64>>;

impl<T: Timestamp, S: BinState, P: Record> Shared<T, S, P> {
    /// Makes one bin its parts, or the parts one.
    pub(crate) fn recut(&self, recut: &Recut, time: &T, hash_of: &Divide<P>) -> Result<(), BinsError> {
        let whole = [recut.bin];
        let (from, to): (&[u32], &[u32]) = if recut.merges { (&recut.parts, &whole) } else { (&whole, &recut.parts) };
        let mut table = self.table.borrow_mut();
        if let Some((bin, arrived)) = from.iter().find_map(|bin| Some((*bin, table.coming(*bin)?))) {
            return Err(BinsError::Incomplete { bin, arrived, announced: None });
        }
        let begins = (self.begins)(time);
        let extent = if self.record && begins.is_none() { Extent::Marked } else { Extent::All };
        let bits = table.bits();
        let range = |bin: &u32| range_of(*bin, bits).ok_or(BinsError::Absent { bin: *bin });
        let ranges = to.iter().map(range).collect::<Result<Vec<_>, _>>()?;
        // What is retained may come back, and must share nothing with what changes from now on.
        let is_dropped = extent == Extent::All && begins.is_none() && table.epoch().is_none();
        let made = {
            let state = |bin: &u32| table.get(*bin).ok_or(BinsError::Absent { bin: *bin });
            if recut.merges {
                let mut made = vec![(self.new_state)()];
                if self.record {
                    made[0].mark();
                }
                for bin in from {
                    let (state, mut encoding) = (state(bin)?, Encoding::of(extent));
                    let failed = |source| BinsError::Encode { bin: *bin, source };
                    if is_dropped && state.hand_over(&|_| Some(0), &mut made).map_err(failed)? {
                        continue;
                    }
                    while let Some(chunk) = state.encode(&mut encoding).map_err(failed)? {
                        made[0].absorb(&chunk).map_err(|source| BinsError::Chunk { bin: *bin, source })?;
                    }
                }
                made
            } else {
                let (state, failed) = (state(&recut.bin)?, |source| BinsError::Divide { bin: recut.bin, source });
                let mut parts: Vec<S> = ranges.iter().map(|_| (self.new_state)()).collect();
                match is_dropped && state.hand_over(&dealt_to(&ranges), &mut parts).map_err(failed)? {
                    true => parts,
                    false => state.divide(&ranges, extent, &*self.new_state).map_err(failed)?,
                }
            }
        };
        let mut kept = false;
        for bin in from {
            let mut held = table.uninstall_held(*bin).ok_or(BinsError::Absent { bin: *bin })?;
            held.begins = begins;
            if held.epoch.is_some() || begins.is_some() {
                kept = true;
                self.shelf.retain(&self.name, *bin, held)?;
                self.left.borrow_mut().push(*bin);
            }
        }
        let epoch = table.epoch();
        let held =
            |state| Held { state: Box::new(state), arrived: kept, came: false, epoch, begins: None, copied: false };
        let mut come = to.iter().zip(made.into_iter().map(held));
        come.try_for_each(|(bin, held)| table.install_held(*bin, held))?;
        to.iter().for_each(|bin| self.stats.record(self.index, *bin, time.clone(), BinEvent::Cut, 0));
        self.stats.owned.fetch_add(to.len() as u64, Relaxed);
        self.stats.owned.fetch_sub(from.len() as u64, Relaxed);
        let mut pending = self.pending.borrow_mut();
        for (at, record) in from.iter().flat_map(|bin| pending.take_bin(*bin)).collect::<Vec<_>>() {
            let hash = hash_of.as_ref().map(|hash| hash(&record));
            let bin = match (recut.merges, hash) {
                (true, _) => recut.bin,
                (false, Some(hash)) => table.bin_of(hash),
                (false, None) => return Err(BinsError::Absent { bin: recut.bin }),
            };
            pending.push(bin, at, record);
        }
        Ok(())
    }
}
