//! The panes of many bins of a worker as one: of each pane one table for all of them, and one sum that is rolled.
//!
//! Of windows that bins have few keys of it is bins that cost: each has its tables, by pane, in memory of their own, which are found, made, added up and
//! let go of one by one. Bins lend their panes to the operator when they have fired as far as it has, so a block is added to one table and a window is
//! fired once, whatever the number of bins.
//!
//! Invariants: the panes of a bin are either in its state or in one `Common`, and then the state has the lease; all bins in it have fired equally far.
//! Whatever a state is asked for besides adding and firing it answers with its own panes. The first that is asked divides all: one pass over all rows, behind which each
//! state takes its share, or shows it. Nothing is added to what has been divided: the operator sees it, and begins another one after a while.
//! So bins move, are recorded and undone one by one as ever.
//!
//! Only panes of tables whose keys are their hashes, whose values are words, and whose changes are neither listed nor undone are lent, as to a
//! [pool](crate::pool); and at most [`MOST_KEYS`], since who moves one bin waits for all to be divided.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::panes::Panes;
use crate::partition::bin_of;
use crate::record::Shape;

/// Keys, counted once per pane, up to which bins are taken in. With twice as many all are divided: some ms.
pub(crate) const MOST_KEYS: usize = 1 << 17;

/// See the module.
pub(crate) struct Common {
    bits: u8,
    /// The bins that lend.
    lent: Vec<bool>,
    held: Held,
}

enum Held {
    /// The panes, and how many keys of them each bin has, where they were counted.
    Whole(Box<Panes>, Option<Vec<usize>>),
    /// By bin, those that are not taken yet.
    Divided(HashMap<u32, Panes>),
}

/// As an operator and the states that lend to it share it. Only one thread ever asks: the worker's.
pub(crate) type Shared = Arc<Mutex<Common>>;

pub(crate) fn lock(common: &Shared) -> MutexGuard<'_, Common> {
    // No code of others runs under the lock: a panic ends the worker.
    common.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a state has in place of its panes.
pub(crate) struct Lease {
    common: Shared,
    bin: u32,
}

impl Lease {
    pub(crate) fn new(common: &Shared, bin: u32) -> Self {
        Self { common: common.clone(), bin }
    }

    pub(crate) fn keys(&self) -> usize {
        lock(&self.common).keys_of(self.bin)
    }

    /// Of what all bins hold as much as this one has of their keys.
    pub(crate) fn bytes(&self) -> usize {
        lock(&self.common).bytes_of(self.bin)
    }

    /// What `show` says of the panes.
    pub(crate) fn shown<T>(&self, show: impl FnOnce(&Panes) -> T) -> T {
        show(lock(&self.common).divided().get(&self.bin).expect("a bin that lends has a share"))
    }

    /// The panes, which are not lent any more.
    pub(crate) fn end(self) -> Panes {
        let common = &mut *lock(&self.common);
        let share = common.divided().remove(&self.bin).expect("a bin that lends has a share");
        common.lent[self.bin as usize] = false;
        share
    }
}

impl Common {
    /// Of bins of `2^bits`, which have fired up to here.
    pub(crate) fn shared(shape: &Shape, bits: u8, fired: i64) -> Shared {
        let mut panes = Panes::new(shape.clone());
        panes.set_fired(fired);
        let held = Held::Whole(Box::new(panes), None);
        Arc::new(Mutex::new(Self { bits, lent: vec![false; 1 << bits], held }))
    }

    /// Whether panes of this shape can be lent.
    pub(crate) fn suits(shape: &Shape) -> bool {
        !shape.key.has_bytes() && !shape.track && shape.blobs().next().is_none()
    }

    /// Whether a bin lends; parts of bins do not.
    #[inline]
    pub(crate) fn has(&self, bin: u32) -> bool {
        self.lent.get(bin as usize).is_some_and(|lent| *lent)
    }

    /// Whether any bin lends.
    pub(crate) fn is_used(&self) -> bool {
        self.lent.contains(&true)
    }

    /// All panes, to be added to or fired; none when they are divided.
    pub(crate) fn whole(&mut self) -> Option<&mut Panes> {
        match &mut self.held {
            Held::Whole(panes, keys) => {
                *keys = None;
                Some(panes)
            }
            Held::Divided(_) => None,
        }
    }

    /// A bin lends from now on; its panes are among [all](Self::whole).
    pub(crate) fn admit(&mut self, bin: u32) {
        self.lent[bin as usize] = true;
    }

    /// Divides the panes among the bins that lend.
    pub(crate) fn divide(&mut self) {
        self.divided();
    }

    /// The panes by bin, one for each that lends.
    fn divided(&mut self) -> &mut HashMap<u32, Panes> {
        if let Held::Whole(panes, _) = &self.held {
            let bits = self.bits;
            let bins = (0..).zip(&self.lent).filter(|(_, lent)| **lent).map(|(bin, _)| bin);
            self.held = Held::Divided(panes.divided(bins, |hash| bin_of(hash, bits)));
        }
        match &mut self.held {
            Held::Divided(shares) => shares,
            Held::Whole(..) => unreachable!("divided above"),
        }
    }

    fn keys_of(&mut self, bin: u32) -> usize {
        let bits = self.bits;
        match &mut self.held {
            Held::Divided(shares) => shares.get(&bin).map_or(0, Panes::keys),
            Held::Whole(panes, keys) => {
                let count = || {
                    let mut keys = vec![0; 1 << bits];
                    panes.hashes().for_each(|hash| keys[bin_of(hash, bits) as usize] += 1);
                    keys
                };
                keys.get_or_insert_with(count)[bin as usize]
            }
        }
    }

    fn bytes_of(&mut self, bin: u32) -> usize {
        let keys = self.keys_of(bin);
        match &self.held {
            Held::Divided(shares) => shares.get(&bin).map_or(0, Panes::bytes),
            Held::Whole(panes, _) => (panes.bytes() as u128 * keys as u128 / panes.keys().max(1) as u128) as usize,
        }
    }
}
