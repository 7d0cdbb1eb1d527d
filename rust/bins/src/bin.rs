//! Bins: keys that share the top bits of their hash, and the state a bin carries.
//!
//! Owns the mapping hash → bin and the contract a bin's state must honour to move and to be rolled back.
//!
//! Invariants: the bin of a hash depends on nothing but the hash and the number of bits; the number of bits is fixed
//! while a dataflow runs.
//!
//! Source: Megaphone §4.2 (top bits, since low bits index the tables inside a bin). Departures: a state marks and
//! undoes an epoch by itself, so that a failed epoch needs no second copy of everything.

use std::any::Any;

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
pub trait BinState: Send + 'static {
    /// Makes the next chunk of the state; `None` after the last, which is at once for an empty state. Chunks of 64 KiB to 1 MiB
    /// keep frames small. The state does not change while an encoding of it is under way.
    ///
    /// # Errors
    /// What of it cannot be encoded. The worker stops with it, and the state stays where it is.
    fn encode(&self, encoding: &mut Encoding) -> Result<Option<Vec<u8>>, StateError>;

    /// Adds the content of one chunk.
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
}

/// An encoding under way: how far it is. Belongs to one state, which keeps in it what it likes.
#[derive(Default)]
pub struct Encoding(Option<Box<dyn Any>>);

impl Encoding {
    /// At the beginning.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// What the state has kept here; `begin` makes it at the first call.
    ///
    /// # Panics
    /// When a state of another type has begun this encoding.
    pub fn place<P: 'static>(&mut self, begin: impl FnOnce() -> P) -> &mut P {
        let place = self.0.get_or_insert_with(|| Box::new(begin()));
        place.downcast_mut().expect("an encoding is of one state")
    }
}

impl std::fmt::Debug for Encoding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Encoding").field("begun", &self.0.is_some()).finish()
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
