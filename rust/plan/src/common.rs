//! The rows of many bins of a worker as one: the panes of windows (of each pane one table for all bins, and one sum that is rolled), and the sides of joins.
//!
//! Where bins have few keys it is bins that cost: each has its tables in memory of their own, which are found, made, filled and let go of one by one.
//! Bins lend their rows to the operator, windows those that have fired as far as it has, so a block is added to one table and a watermark
//! is looked at once, whatever the number of bins.
//!
//! Invariants: the rows of a bin are either in its state or in one `Common`, and then the state has the lease; all bins in it have fired equally far.
//! Whatever a state is asked for besides adding and firing it answers with its own rows. The first that is asked divides all: one pass over all rows, behind which each
//! state takes its share, or shows it. Nothing is added to what has been divided: the operator sees it, and begins another one after a while.
//! So bins move, are recorded and undone one by one as ever.
//!
//! Only rows whose changes are neither listed nor undone are lent, and at most [`MOST_ROWS`], since who moves one bin waits for all to be divided.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::op::Bins;
use crate::partition::bin_of;
use crate::state::State;

/// Rows up to which bins are taken in. With twice as many all are divided: some ms.
const MOST_ROWS: usize = 1 << 17;
/// Epochs or watermarks after which bins are asked whether they lend. Those that have just been taken home may go on moving.
pub(crate) const ASK_AGAIN: u32 = 64;

/// What bins lend.
pub(crate) trait Lent: Sized {
    /// That of a state, if it is such.
    fn of(state: &mut State) -> Option<&mut Self>;
    /// Puts all of it into what is [common](Common::whole), as that of bin `bin`, and keeps the lease, where it can.
    fn lend(&mut self, common: &mut Common<Self>, shared: &Shared<Self>, bin: u32);
    /// Its rows by bin, for these bins and of no others.
    fn divided(&self, bins: impl Iterator<Item = u32>, bin_of: impl Fn(u64) -> u32) -> HashMap<u32, Self>;
    /// How many rows it has.
    fn rows(&self) -> usize;
    fn keys(&self) -> usize;
    /// Of each key.
    fn hashes(&self) -> impl Iterator<Item = u64>;
    fn bytes(&self) -> usize;
}

/// See the module.
pub(crate) struct Common<T> {
    bits: u8,
    /// The bins that lend, and how many these are.
    lent: Vec<bool>,
    lenders: usize,
    held: Held<T>,
}

enum Held<T> {
    /// All rows, and how many keys of them each bin has, and all bins, where they were counted.
    Whole(Box<T>, Option<(Vec<usize>, usize)>),
    /// By bin, those that are not taken yet.
    Divided(HashMap<u32, T>),
}

/// As an operator and the states that lend to it share it. Only one thread ever asks: the worker's.
pub(crate) type Shared<T> = Arc<Mutex<Common<T>>>;

pub(crate) fn lock<T>(common: &Shared<T>) -> MutexGuard<'_, Common<T>> {
    // No code of others runs under the lock: a panic ends the worker.
    common.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What an operator has borrowed.
pub(crate) struct Borrowed<T> {
    common: Option<Shared<T>>,
    /// How often to [wait](Self::wait) before bins are asked.
    pause: u32,
}

impl<T> Default for Borrowed<T> {
    fn default() -> Self {
        Self { common: None, pause: 0 }
    }
}

impl<T: Lent> Borrowed<T> {
    /// What the bins that lend have lent, unless it was divided.
    pub(crate) fn whole(&mut self) -> Option<Shared<T>> {
        self.take_divided();
        self.common.clone()
    }

    /// The bins of what was lent and has been divided since: each takes its share when it is asked for anything. Said once.
    pub(crate) fn take_divided(&mut self) -> Vec<u32> {
        let divided = |common: &mut Shared<T>| lock(common).whole().is_none();
        let Some(common) = self.common.take_if(divided) else { return Vec::new() };
        self.pause = ASK_AGAIN;
        lock(&common).lenders().collect()
    }

    /// Has all divided where it is more than should be.
    pub(crate) fn limit(&mut self) {
        if let Some(common) = &self.common {
            let mut common = lock(common);
            if common.whole().is_some_and(|whole| whole.rows() > 2 * MOST_ROWS) {
                common.divided();
            }
        }
    }

    /// An epoch has ended, or a watermark passed.
    pub(crate) fn wait(&mut self) {
        self.pause = self.pause.saturating_sub(1);
    }

    /// Asks all bins here whether they lend, if none were asked for a while. `new` is what has no rows.
    pub(crate) fn ask(&mut self, bins: &mut dyn Bins, new: impl FnOnce() -> T) {
        if self.pause > 0 {
            return;
        }
        self.pause = ASK_AGAIN;
        if bins.is_split() {
            return;
        }
        let shared = self.common.get_or_insert_with(|| Common::shared(bins.bits(), new())).clone();
        let mut common = lock(&shared);
        let mut rows = common.whole().map_or(0, |whole| whole.rows());
        let others: Vec<u32> = bins.held().into_iter().filter(|bin| !common.has(*bin)).collect();
        for bin in &others {
            rows += bins.state(*bin).and_then(T::of).map_or(0, |own| own.rows());
        }
        for bin in others.into_iter().filter(|_| rows <= MOST_ROWS) {
            if let Some(own) = bins.state(bin).and_then(T::of) {
                own.lend(&mut common, &shared, bin);
            }
        }
        if common.lenders == 0 {
            self.common = None;
        }
    }
}

/// What a state has in place of its rows.
pub(crate) struct Lease<T> {
    common: Shared<T>,
    bin: u32,
}

impl<T: Lent> Lease<T> {
    pub(crate) fn new(common: &Shared<T>, bin: u32) -> Self {
        Self { common: common.clone(), bin }
    }

    pub(crate) fn keys(&self) -> usize {
        lock(&self.common).keys_of(self.bin).0
    }

    /// Of what all bins hold as much as this one has of their keys.
    pub(crate) fn bytes(&self) -> usize {
        lock(&self.common).bytes_of(self.bin)
    }

    /// What `show` says of the rows.
    pub(crate) fn shown<S>(&self, show: impl FnOnce(&T) -> S) -> S {
        show(lock(&self.common).divided().get(&self.bin).expect("a bin that lends has a share"))
    }

    /// The rows, which are not lent any more.
    pub(crate) fn end(self) -> T {
        let common = &mut *lock(&self.common);
        let share = common.divided().remove(&self.bin).expect("a bin that lends has a share");
        common.lent[self.bin as usize] = false;
        common.lenders -= 1;
        share
    }
}

impl<T: Lent> Common<T> {
    /// Of bins of `2^bits`, of which none lends yet.
    pub(crate) fn shared(bits: u8, new: T) -> Shared<T> {
        let held = Held::Whole(Box::new(new), None);
        Arc::new(Mutex::new(Self { bits, lent: vec![false; 1 << bits], lenders: 0, held }))
    }

    /// Whether a bin lends; parts of bins do not.
    #[inline]
    pub(crate) fn has(&self, bin: u32) -> bool {
        self.lent.get(bin as usize).is_some_and(|lent| *lent)
    }

    /// Whether all bins there are lend, so that whoever has this has them.
    pub(crate) fn is_of_all(&self) -> bool {
        self.lenders == self.lent.len()
    }

    fn lenders(&self) -> impl Iterator<Item = u32> {
        (0..).zip(&self.lent).filter(|(_, lent)| **lent).map(|(bin, _)| bin)
    }

    /// All rows, to be added to or fired, and which bins lend; none when they are divided.
    pub(crate) fn parts(&mut self) -> Option<(&mut T, &[bool])> {
        match &mut self.held {
            Held::Whole(whole, keys) => {
                *keys = None;
                Some((whole, &self.lent))
            }
            Held::Divided(_) => None,
        }
    }

    /// As [`parts`](Self::parts).
    pub(crate) fn whole(&mut self) -> Option<&mut T> {
        self.parts().map(|(whole, _)| whole)
    }

    /// A bin lends from now on; its rows are among [all](Self::whole).
    pub(crate) fn admit(&mut self, bin: u32) {
        self.lenders += usize::from(!std::mem::replace(&mut self.lent[bin as usize], true));
    }

    /// The rows by bin, a share for each that lends.
    pub(crate) fn divided(&mut self) -> &mut HashMap<u32, T> {
        if let Held::Whole(whole, _) = &self.held {
            let bits = self.bits;
            self.held = Held::Divided(whole.divided(self.lenders(), |hash| bin_of(hash, bits)));
        }
        match &mut self.held {
            Held::Divided(shares) => shares,
            Held::Whole(..) => unreachable!("divided above"),
        }
    }

    /// The keys of a bin that lends, and of all of them.
    fn keys_of(&mut self, bin: u32) -> (usize, usize) {
        let bits = self.bits;
        match &mut self.held {
            Held::Divided(shares) => (shares.get(&bin).map_or(0, T::keys), 0),
            Held::Whole(whole, keys) => {
                let count = || {
                    let (mut keys, mut all) = (vec![0; 1 << bits], 0);
                    whole.hashes().for_each(|hash| {
                        keys[bin_of(hash, bits) as usize] += 1;
                        all += 1;
                    });
                    (keys, all)
                };
                let (keys, all) = keys.get_or_insert_with(count);
                (keys[bin as usize], *all)
            }
        }
    }

    fn bytes_of(&mut self, bin: u32) -> usize {
        let (keys, all) = self.keys_of(bin);
        match &self.held {
            Held::Divided(shares) => shares.get(&bin).map_or(0, T::bytes),
            Held::Whole(whole, _) => (whole.bytes() as u128 * keys as u128 / all.max(1) as u128) as usize,
        }
    }
}
