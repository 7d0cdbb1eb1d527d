//! Bins: keys that share the top bits of their hash, and the state a bin carries.
//!
//! Owns the mapping hash → bin and the contract a bin's state must honour to move and to be rolled back.
//!
//! Invariants: the bin of a hash depends on nothing but the hash and the number of bits, which is fixed while a dataflow runs; a bin that is
//! split has parts (see `parts`).
//!
//! Source: Megaphone §4.2 (top bits, since low bits index the tables inside a bin). Departures: a state marks and
//! undoes an epoch by itself, so that a failed epoch needs no second copy of everything; and what it undoes by is what tells the changes of
//! an epoch, so that there is one record of them.

use std::any::Any;

use penstock_files::Range;

use crate::error::{BinsError, StateError};

/// The most bits a bin number may have.
pub const MAX_BITS: u8 = 20;

/// The bin of `hash` among `2^bits` bins: its top `bits` bits; 0 when `bits` is 0.
///
/// # Examples
/// ```
/// use penstock_bins::bin;
/// assert_eq!(bin(0xF000_0000_0000_0000, 4), 15);
/// assert_eq!(bin(u64::MAX, 0), 0);
/// ```
#[inline]
#[must_use]
pub const fn bin(hash: u64, bits: u8) -> u32 {
    debug_assert!(bits <= MAX_BITS);
    if bits == 0 { 0 } else { (hash >> (64 - bits as u32)) as u32 }
}

/// Refuses a number of bits above [`MAX_BITS`].
pub(crate) fn check_bits(bits: u8) -> Result<(), BinsError> {
    if bits > MAX_BITS { Err(BinsError::Bits { bits }) } else { Ok(()) }
}

/// The state of one bin: all keys whose hashes share the bin's prefix.
///
/// A state moves between processes as chunks: `absorb`ing the chunks of `encode`, in order, into a new state must give
/// an equal one. Between the threads of one process the object itself moves and none of this is called.
///
/// Where epochs are recorded, a state that is encoded as [`Extent::Changed`] makes chunks of what has changed since the last mark; absorbed
/// by a state as it was at the mark they give this one. What a state was at its marks is not asked for: whoever absorbs the chunks of all
/// epochs, one after the other, has the state. One that moves within an epoch is encoded as [`Extent::Marked`], so that its changes
/// since the mark are its receiver's, too. States of flows that are never recorded need not tell the parts apart.
pub trait BinState: Send + 'static {
    /// Makes the next chunk of the encoding's [extent](Encoding::extent); `None` after the last, which is at once where there is nothing.
    /// Chunks of 64 KiB to 1 MiB keep frames small. The state does not change while an encoding of it is under way. What has
    /// changed costs in proportion to the keys that were touched.
    ///
    /// # Errors
    /// What of it cannot be encoded. The worker stops with it, and the state stays where it is.
    fn encode(&self, encoding: &mut Encoding) -> Result<Option<Vec<u8>>, StateError>;

    /// Takes one chunk, of whichever extent. What it says of keys that have changed replaces what is here, and where this state is marked
    /// they count as changed; other keys do not, and must not be here yet. Undone, what has come stays.
    ///
    /// # Errors
    /// A chunk that `encode` cannot have produced; the receiving worker stops with it.
    fn absorb(&mut self, chunk: &[u8]) -> Result<(), StateError>;

    /// Approximate size in memory, in bytes.
    fn bytes(&self) -> usize;

    /// Number of keys held.
    fn keys(&self) -> usize;

    /// True when the state holds nothing.
    fn is_empty(&self) -> bool {
        self.keys() == 0
    }

    /// An epoch begins: forgets how to undo what came before. Cheap; copying waits for the first write.
    fn mark(&mut self);

    /// Returns to what the state was at the last mark (or at its creation, if there was none).
    ///
    /// # Errors
    /// Why it cannot: the state is of no use then, unless a further attempt succeeds.
    fn rollback(&mut self) -> Result<(), StateError>;

    /// Nothing will be undone until the next mark: keeps no undo from here on. By default like [`mark`](Self::mark).
    fn settle(&mut self) {
        self.mark();
    }

    /// The keys whose hashes are in each of these ranges, which hold all of them, as states that `new` makes: how a bin is split. Of
    /// [`Extent::Marked`] the parts know which keys have changed since the last mark, as if they had come from elsewhere in the middle of an epoch.
    ///
    /// # Errors
    /// What of it cannot be divided; by default always. Operators of such states are built without [`Divide`](crate::Divide), and refuse splits.
    fn divide(&self, ranges: &[Range], extent: Extent, new: &dyn Fn() -> Self) -> Result<Vec<Self>, StateError>
    where
        Self: Sized,
    {
        let _ = (ranges, extent, new);
        Err(StateError::new("this state does not know the hashes of its keys"))
    }

    /// Gives its keys as they are to `parts`, by their hashes: how bins are split and merged where nothing is undone and this one is dropped behind it.
    /// False, and nothing was given, where it cannot; then they go by [`divide`](Self::divide), or by chunks.
    ///
    /// # Errors
    /// What of it cannot be given.
    fn hand_over(&self, part_of: &dyn Fn(u64) -> Option<usize>, parts: &mut [Self]) -> Result<bool, StateError>
    where
        Self: Sized,
    {
        let _ = (part_of, parts);
        Ok(false)
    }

    /// The state leaves the table of its worker, or the table ends: from here on it may need nothing of the worker.
    fn leave(&mut self) {}
}

/// What of a state is encoded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Extent {
    /// All of it.
    #[default]
    All,
    /// All of it, so that the receiver knows what has changed since the last mark: first what has not, then as [`Changed`](Self::Changed).
    Marked,
    /// What has changed since the last mark, or since the beginning where there was none: keys with what they are now, and keys that are gone.
    Changed,
    /// All of it as [`Changed`](Self::Changed) would be where there was no mark.
    Anew,
}

/// An encoding under way: of which extent, and how far it is. Belongs to one state, which keeps in it what it likes.
#[derive(Default)]
pub struct Encoding {
    extent: Extent,
    place: Option<Box<dyn Any>>,
}

impl Encoding {
    /// Of all of a state, at the beginning.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Of some extent of it.
    #[must_use]
    pub fn of(extent: Extent) -> Self {
        Self { extent, place: None }
    }

    /// Which extent.
    #[must_use]
    pub fn extent(&self) -> Extent {
        self.extent
    }

    /// What the state has kept here; `begin` makes it at the first call.
    ///
    /// # Panics
    /// When a state of another type has begun this encoding.
    pub fn place<P: 'static>(&mut self, begin: impl FnOnce() -> P) -> &mut P {
        let place = self.place.get_or_insert_with(|| Box::new(begin()));
        place.downcast_mut().expect("an encoding is of one state")
    }
}

impl std::fmt::Debug for Encoding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Encoding").field("extent", &self.extent).field("begun", &self.place.is_some()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn low_bit_equal_keys_spread() {
        let bins: std::collections::BTreeSet<u32> = (0..256u64).map(|i| bin(i << 56, 8)).collect();
        assert_eq!(bins.len(), 256);
        assert_eq!(bin(0xFFFF_FFFF, 20), 0, "low bits never choose the bin");
        assert_eq!(bin(u64::MAX, 20), (1 << 20) - 1);
    }

    #[test]
    fn bits_beyond_the_maximum_are_refused() {
        assert!(check_bits(20).is_ok());
        assert!(matches!(check_bits(21), Err(BinsError::Bits { bits: 21 })));
    }
}
