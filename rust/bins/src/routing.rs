//! Which worker owns which bin.
//!
//! Invariants: exactly `2^bits` owners; applying a refused command changes nothing.
//!
//! Source: Megaphone §3.2 (configuration function), §4.2.

use serde::{Deserialize, Serialize};

use crate::bin::{bin, check_bits};
use crate::control::{Command, Move};
use crate::error::{BinsError, ControlError};

/// The owner of every bin.
///
/// # Examples
/// ```
/// use penstock_bins::{Command, Routing};
/// let mut routing = Routing::new(2, 2)?;
/// assert_eq!(routing.owners(), [0, 1, 0, 1]);
/// routing.apply(&Command::Move { bin: 3, worker: 0 })?;
/// assert_eq!(routing.owner(u64::MAX), 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<u32>", into = "Vec<u32>")]
pub struct Routing {
    bits: u8,
    owners: Vec<u32>,
}

impl Routing {
    /// `2^bits` bins dealt to workers `0..peers`: bin modulo peers (M-07).
    ///
    /// # Errors
    /// [`BinsError::Bits`] above 20, [`BinsError::NoPeers`].
    pub fn new(bits: u8, peers: usize) -> Result<Self, BinsError> {
        check_bits(bits)?;
        if peers == 0 {
            return Err(BinsError::NoPeers);
        }
        Ok(Self { bits, owners: (0..1usize << bits).map(|b| (b % peers) as u32).collect() })
    }

    /// A routing from the owner of each bin.
    ///
    /// # Errors
    /// [`BinsError::Owners`] unless there are `2^k` of them, k in 0..=20.
    pub fn from_owners(owners: Vec<u32>) -> Result<Self, BinsError> {
        let length = owners.len();
        let bits = length.trailing_zeros();
        if !length.is_power_of_two() || bits > u32::from(crate::MAX_BITS) {
            return Err(BinsError::Owners { length });
        }
        Ok(Self { bits: bits as u8, owners })
    }

    /// Bits of a bin number.
    #[must_use]
    pub fn bits(&self) -> u8 {
        self.bits
    }

    /// Number of bins.
    #[must_use]
    pub fn bins(&self) -> u32 {
        1 << self.bits
    }

    /// Owner by bin.
    #[must_use]
    pub fn owners(&self) -> &[u32] {
        &self.owners
    }

    /// Owner of the key with this hash.
    #[inline]
    #[must_use]
    pub fn owner(&self, hash: u64) -> u32 {
        self.owners[bin(hash, self.bits) as usize]
    }

    /// Owner of a bin.
    ///
    /// # Panics
    /// When `bin` is not below [`bins`](Self::bins).
    #[must_use]
    pub fn owner_of(&self, bin: u32) -> u32 {
        self.owners[bin as usize]
    }

    /// Applies one command and returns the changes it makes, bins ascending.
    ///
    /// # Errors
    /// Wrong map length or bin out of range; nothing changes. Workers are not checked here: a routing knows no members.
    pub fn apply(&mut self, command: &Command) -> Result<Vec<Move>, ControlError> {
        let moves = self.changes(command)?;
        self.forward(&moves);
        Ok(moves)
    }

    /// What `command` would change, bins ascending.
    pub(crate) fn changes(&self, command: &Command) -> Result<Vec<Move>, ControlError> {
        match command {
            Command::Noop => Ok(Vec::new()),
            Command::Move { bin, worker } => {
                let from = *self
                    .owners
                    .get(*bin as usize)
                    .ok_or(ControlError::BinOutOfRange { bin: *bin, bins: self.bins() })?;
                let change = Move { bin: *bin, from, to: *worker };
                Ok(if from == *worker { Vec::new() } else { vec![change] })
            }
            Command::Map(map) => {
                if map.len() != self.owners.len() {
                    return Err(ControlError::MapLength { length: map.len(), bins: self.bins() });
                }
                Ok(differences(&self.owners, map))
            }
        }
    }

    /// The moves that turn this routing into `to`, bins ascending.
    ///
    /// # Errors
    /// [`BinsError::BitsDiffer`].
    pub fn moves_to(&self, to: &Self) -> Result<Vec<Move>, BinsError> {
        if self.bits != to.bits {
            return Err(BinsError::BitsDiffer { expected: self.bits, found: to.bits });
        }
        Ok(differences(&self.owners, &to.owners))
    }

    pub(crate) fn forward(&mut self, moves: &[Move]) {
        for m in moves {
            self.owners[m.bin as usize] = m.to;
        }
    }

    pub(crate) fn backward(&mut self, moves: &[Move]) {
        for m in moves {
            self.owners[m.bin as usize] = m.from;
        }
    }
}

fn differences(from: &[u32], to: &[u32]) -> Vec<Move> {
    (0u32..)
        .zip(from.iter().zip(to))
        .filter(|(_, (from, to))| from != to)
        .map(|(bin, (&from, &to))| Move { bin, from, to })
        .collect()
}

impl TryFrom<Vec<u32>> for Routing {
    type Error = BinsError;

    fn try_from(owners: Vec<u32>) -> Result<Self, BinsError> {
        Self::from_owners(owners)
    }
}

impl From<Routing> for Vec<u32> {
    fn from(routing: Routing) -> Self {
        routing.owners
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_shapes_are_refused() {
        assert!(matches!(Routing::new(21, 1), Err(BinsError::Bits { bits: 21 })));
        assert!(matches!(Routing::new(3, 0), Err(BinsError::NoPeers)));
        for length in [0, 3, 12] {
            assert!(
                matches!(Routing::from_owners(vec![0; length]), Err(BinsError::Owners { length: l }) if l == length)
            );
        }
        assert!(Routing::from_owners(vec![0; 1 << 20]).is_ok());
        assert!(Routing::from_owners(vec![0; 1 << 21]).is_err());
        assert!(postcard::from_bytes::<Routing>(&postcard::to_stdvec(&vec![1u32, 2, 3]).unwrap()).is_err());
    }

    #[test]
    fn refused_commands_change_nothing() {
        let mut routing = Routing::new(2, 2).unwrap();
        let before = routing.clone();
        assert_eq!(routing.apply(&Command::Map(vec![0; 3])), Err(ControlError::MapLength { length: 3, bins: 4 }));
        assert_eq!(
            routing.apply(&Command::Move { bin: 4, worker: 0 }),
            Err(ControlError::BinOutOfRange { bin: 4, bins: 4 })
        );
        assert_eq!(routing, before);
    }

    #[test]
    fn moves_turn_one_into_the_other_and_back() {
        let from = Routing::new(3, 3).unwrap();
        let to = Routing::new(3, 2).unwrap();
        let moves = from.moves_to(&to).unwrap();
        let mut routing = from.clone();
        routing.forward(&moves);
        assert_eq!(routing, to);
        routing.backward(&moves);
        assert_eq!(routing, from);
        assert!(matches!(
            from.moves_to(&Routing::new(2, 1).unwrap()),
            Err(BinsError::BitsDiffer { expected: 3, found: 2 })
        ));
    }
}
