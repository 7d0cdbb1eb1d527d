//! Which worker owns which bin.
//!
//! Invariants: exactly `2^bits` owners, those of bins that are split aside; applying a refused command changes nothing.
//!
//! Source: Megaphone §3.2 (configuration function), §4.2.

use penstock_files::Range;
use serde::{Deserialize, Serialize};

use crate::bin::{MAX_BITS, bin, check_bits};
use crate::control::{Changes, Command, Move, Recut};
use crate::error::{BinsError, ControlError};
use crate::parts::{BinName, Parts, number_of, range_of};

/// In place of the owner of a bin that is split.
pub(crate) const SPLIT: u32 = u32::MAX;

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
    /// Owners of the parts of bins that are split.
    parts: Parts,
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
        let owners = (0..1usize << bits).map(|b| (b % peers) as u32).collect();
        Ok(Self { bits, owners, parts: Parts::new(bits) })
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
        Ok(Self { bits: bits as u8, owners, parts: Parts::new(bits as u8) })
    }

    /// A routing of `2^bits` bins, some of them split, from the owner of each range.
    ///
    /// # Errors
    /// [`BinsError::Bits`] above 20, [`BinsError::Ranges`] unless each range is a bin or part of one, and they have every hash once.
    pub fn of_ranges(bits: u8, ranges: &[(Range, u32)]) -> Result<Self, BinsError> {
        check_bits(bits)?;
        let (mut owners, mut parts) = (vec![SPLIT; 1 << bits], Parts::new(bits));
        let mut sorted = ranges.to_vec();
        sorted.sort_unstable_by_key(|(range, _)| (range.first(), range.length()));
        if let Some(pair) = sorted.windows(2).find(|pair| pair[0].0.intersects(pair[1].0)) {
            return Err(BinsError::Ranges { range: pair[1].0 });
        }
        let whole = |range: Range| bin(range.first(), bits);
        for same in sorted.chunk_by(|one, other| whole(one.0) == whole(other.0)) {
            let numbered = |&(range, owner): &(Range, u32)| {
                let number = number_of(range, bits).filter(|_| owner != SPLIT);
                Ok((number.ok_or(BinsError::Ranges { range })?, owner))
            };
            let numbered = same.iter().map(numbered).collect::<Result<Vec<_>, BinsError>>()?;
            match owners.get_mut(numbered[0].0 as usize) {
                Some(slot) => *slot = numbered[0].1,
                None => numbered.iter().for_each(|(part, owner)| parts.set(*part, *owner)),
            }
        }
        let width: u64 = ranges.iter().map(|(range, _)| range.width()).sum();
        if width != Range::ALL.width() {
            return Err(BinsError::Ranges { range: Range::ALL });
        }
        Ok(Self { bits, owners, parts })
    }

    /// A routing from the owner of each bin, [`SPLIT`] in the place of one that has parts, and these with theirs.
    fn with_parts(owners: Vec<u32>, parts: Vec<(u32, u32)>) -> Result<Self, BinsError> {
        let Self { bits, owners, .. } = Self::from_owners(owners)?;
        let whole = (0u32..).zip(owners).filter(|(_, owner)| *owner != SPLIT);
        let ranged = |(bin, owner)| Ok((range_of(bin, bits).ok_or(BinsError::Absent { bin })?, owner));
        let ranges = whole.chain(parts).map(ranged).collect::<Result<Vec<_>, BinsError>>()?;
        Self::of_ranges(bits, &ranges)
    }

    /// Bits of a bin number, as the dataflow began.
    #[must_use]
    pub fn bits(&self) -> u8 {
        self.bits
    }

    /// Number of bins, as the dataflow began.
    #[must_use]
    pub fn bins(&self) -> u32 {
        1 << self.bits
    }

    /// Owner by bin; of a bin that is split, `u32::MAX`.
    #[must_use]
    pub fn owners(&self) -> &[u32] {
        &self.owners
    }

    /// Whether any bin is split.
    #[inline]
    #[must_use]
    pub fn is_split(&self) -> bool {
        self.parts.any()
    }

    /// All bins with their owners: those that are whole ascending, then the parts of the others by hash.
    pub fn bins_owned(&self) -> impl Iterator<Item = (u32, u32)> {
        let whole = (0u32..).zip(self.owners.iter().copied()).filter(|(_, owner)| *owner != SPLIT);
        whole.chain(self.parts.all())
    }

    /// The bin, or part of one, that the key with this hash is in.
    #[must_use]
    pub fn bin_of(&self, hash: u64) -> u32 {
        let found = if self.parts.any() { self.parts.find(hash) } else { None };
        found.map_or_else(|| bin(hash, self.bits), |(part, _)| part)
    }

    /// Owner of the key with this hash.
    #[inline]
    #[must_use]
    pub fn owner(&self, hash: u64) -> u32 {
        match self.owners[bin(hash, self.bits) as usize] {
            SPLIT => self.parts.find(hash).expect("a bin that is split has all its parts").1,
            owner => owner,
        }
    }

    /// Owner of a bin, or of a part of one.
    ///
    /// # Panics
    /// When there is no such bin now.
    #[must_use]
    pub fn owner_of(&self, bin: u32) -> u32 {
        self.owner_at(bin).expect("there is such a bin")
    }

    /// Owner of a bin, or of a part of one; `None` when there is none.
    #[must_use]
    pub fn owner_at(&self, bin: u32) -> Option<u32> {
        match self.owners.get(bin as usize) {
            Some(&owner) => Some(owner).filter(|owner| *owner != SPLIT),
            None => self.parts.get(bin),
        }
    }

    /// Applies one command and returns the changes it makes, bins ascending.
    ///
    /// # Errors
    /// Wrong map length or bin out of range; nothing changes. Workers are not checked here: a routing knows no members.
    pub fn apply(&mut self, command: &Command) -> Result<Changes, ControlError> {
        let changes = self.changes(command)?;
        self.forward(&changes);
        Ok(changes)
    }

    /// What `command` would change, bins ascending.
    pub(crate) fn changes(&self, command: &Command) -> Result<Changes, ControlError> {
        let (mut moves, mut recuts) = (Vec::new(), Vec::new());
        match command {
            Command::Noop => {}
            &Command::Move { bin, worker } => {
                let from = self.present(bin)?;
                moves.extend(Some(Move { bin, from, to: worker }).filter(|m| m.from != m.to));
            }
            Command::Map(map) => {
                if map.len() != self.owners.len() {
                    return Err(ControlError::MapLength { length: map.len(), bins: self.bins() });
                }
                // The parts of a bin go where the map says of the bin.
                let of = |part: u32| self.parts.whole(part).filter(|_| part >= self.bins()).unwrap_or(part);
                let all = self.bins_owned().map(|(bin, from)| Move { bin, from, to: map[of(bin) as usize] });
                moves.extend(all.filter(|m| m.from != m.to));
            }
            &Command::Split { bin, bits } => {
                let worker = self.present(bin)?;
                let range = range_of(bin, self.bits).expect("it is present");
                let length = range.length().saturating_add(bits);
                if bits == 0 || length > MAX_BITS {
                    return Err(ControlError::TooFine { bin: self.name(bin), bits });
                }
                let first = range.prefix() << bits;
                let parts = (first..first + (1 << bits)).map(|prefix| 1 << length | prefix).collect();
                recuts.push(Recut { bin, parts, worker, merges: false });
            }
            &Command::Merge { bin } => {
                let range = match self.present(bin) {
                    Ok(_) => return Err(ControlError::Whole { bin: self.name(bin) }),
                    Err(ControlError::Split { .. }) => range_of(bin, self.bits).expect("it has parts"),
                    Err(error) => return Err(error),
                };
                let parts: Vec<(u32, u32)> = self.parts_of(range);
                let (_, one) = *parts.first().expect("a bin that is split has parts");
                if let Some((_, other)) = parts.iter().find(|(_, worker)| *worker != one) {
                    return Err(ControlError::Apart { bin: self.name(bin), one, other: *other });
                }
                let parts = parts.into_iter().map(|(part, _)| part).collect();
                recuts.push(Recut { bin, parts, worker: one, merges: true });
            }
        }
        Ok(Changes { moves, recuts })
    }

    /// What users call a bin, for errors.
    pub(crate) fn name(&self, bin: u32) -> BinName {
        BinName::new(bin, self.bits)
    }

    /// The owner of a bin that is there.
    fn present(&self, bin: u32) -> Result<u32, ControlError> {
        if let Some(owner) = self.owner_at(bin) {
            return Ok(owner);
        }
        let split = range_of(bin, self.bits).is_some_and(|range| !self.parts_of(range).is_empty());
        let bin = self.name(bin);
        Err(if split { ControlError::Split { bin } } else { ControlError::BinOutOfRange { bin, bins: self.bins() } })
    }

    /// The parts that a range holds, with their owners.
    fn parts_of(&self, range: Range) -> Vec<(u32, u32)> {
        let held = |part: u32| range_of(part, self.bits).is_some_and(|part| range.holds(part));
        self.parts.of(range).filter(|(part, _)| held(*part)).collect()
    }

    /// The moves that turn this routing into `to`, bins ascending.
    ///
    /// # Errors
    /// [`BinsError::BitsDiffer`]; [`BinsError::Absent`] for a bin that is split there.
    pub fn moves_to(&self, to: &Self) -> Result<Vec<Move>, BinsError> {
        if self.bits != to.bits {
            return Err(BinsError::BitsDiffer { expected: self.bits, found: to.bits });
        }
        let mut moves = Vec::new();
        for (bin, from) in self.bins_owned() {
            let to = to.owner_at(bin).ok_or(BinsError::Absent { bin })?;
            moves.extend(Some(Move { bin, from, to }).filter(|m| m.from != m.to));
        }
        Ok(moves)
    }

    /// These changes take place.
    pub(crate) fn forward(&mut self, changes: &Changes) {
        self.change(changes, true);
    }

    /// They are taken back.
    pub(crate) fn backward(&mut self, changes: &Changes) {
        self.change(changes, false);
    }

    fn change(&mut self, Changes { moves, recuts }: &Changes, forward: bool) {
        for m in moves {
            self.give(m.bin, if forward { m.to } else { m.from });
        }
        for Recut { bin, parts, worker, merges } in recuts {
            let range = range_of(*bin, self.bits).expect("it was checked");
            if *merges == forward {
                self.parts.unset(range);
                self.give(*bin, *worker);
            } else {
                self.owners[crate::bin::bin(range.first(), self.bits) as usize] = SPLIT;
                parts.iter().for_each(|part| self.parts.set(*part, *worker));
            }
        }
    }

    fn give(&mut self, bin: u32, worker: u32) {
        match self.owners.get_mut(bin as usize) {
            Some(owner) => *owner = worker,
            None => self.parts.set(bin, worker),
        }
    }
}

impl TryFrom<Vec<u32>> for Routing {
    type Error = BinsError;

    fn try_from(owners: Vec<u32>) -> Result<Self, BinsError> {
        Self::from_owners(owners)
    }
}

impl From<Routing> for Vec<u32> {
    /// Without parts: who writes a routing has merged them.
    fn from(routing: Routing) -> Self {
        debug_assert!(!routing.is_split(), "the parts of bins are not written");
        routing.owners
    }
}

/// A routing with the parts of its bins, as a joiner is told it: the owners of bins, then the parts of those that are split.
pub(crate) mod whole {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use super::Routing;

    pub(crate) fn serialize<S: Serializer>(routing: &Routing, serializer: S) -> Result<S::Ok, S::Error> {
        (&routing.owners, routing.parts.all().collect::<Vec<_>>()).serialize(serializer)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Routing, D::Error> {
        let (owners, parts) = Deserialize::deserialize(deserializer)?;
        Routing::with_parts(owners, parts).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_dataflow::wire::{decode_serde, encode_serde};

    /// What costs all parts of a bin for each of them does not come to an end here.
    #[test]
    fn a_bin_becomes_as_many_parts_as_there_can_be() {
        let mut routing = Routing::new(0, 1).unwrap();
        routing.apply(&Command::Split { bin: 0, bits: MAX_BITS }).unwrap();
        let ranges: Vec<_> = routing.bins_owned().map(|(bin, owner)| (range_of(bin, 0).unwrap(), owner)).collect();
        assert_eq!(ranges.len(), 1 << MAX_BITS);
        assert!(Routing::of_ranges(0, &ranges).unwrap() == routing);
    }

    /// Nor here.
    #[test]
    fn many_parts_move_at_once_and_are_merged_two_by_two() {
        let mut routing = Routing::new(0, 1).unwrap();
        let number = |prefix, length| number_of(Range::new(prefix, length).unwrap(), 0).unwrap();
        routing.apply(&Command::Split { bin: 0, bits: 18 }).unwrap();
        let split = routing.clone();
        let changes = routing.apply(&Command::Map(vec![3])).unwrap();
        assert_eq!((changes.moves.len(), routing.owner(u64::MAX)), (1 << 18, 3));
        routing.backward(&changes);
        assert!(routing == split);
        for pair in 0..1 << 17 {
            routing.apply(&Command::Merge { bin: number(pair, 17) }).unwrap();
        }
        assert_eq!((routing.bins_owned().count(), routing.bin_of(1 << 47)), (1 << 17, number(1, 17)));
    }

    #[test]
    fn a_joiner_is_told_the_parts_of_bins() {
        #[derive(Debug, PartialEq, Serialize, Deserialize)]
        struct Told(#[serde(with = "whole")] Routing);
        let mut routing = Routing::new(2, 2).unwrap();
        routing.apply(&Command::Split { bin: 1, bits: 1 }).unwrap();
        let part = number_of(Range::new(0b011, 3).unwrap(), 2).unwrap();
        routing.apply(&Command::Move { bin: part, worker: 0 }).unwrap();
        let (told, mut bytes) = (Told(routing), Vec::new());
        encode_serde(&told, &mut bytes);
        let heard: Told = decode_serde(&bytes).unwrap();
        assert_eq!(heard, told);
        assert_eq!((heard.0.owner(0b010 << 61), heard.0.owner(0b011 << 61)), (1, 0));
        for (wrong, owners, parts) in [
            ("three bins", vec![0; 3], vec![]),
            ("a bin that is split and has no parts", vec![0, SPLIT], vec![]),
            ("a part that is missing", vec![0, SPLIT], vec![(0b110, 1)]),
            ("a part twice", vec![0, SPLIT], vec![(0b110, 1), (0b111, 1), (0b111, 0)]),
            ("parts of a bin that is whole", vec![0, 1], vec![(0b110, 1), (0b111, 1)]),
            ("a part without an owner", vec![0, SPLIT], vec![(0b110, 1), (0b111, SPLIT)]),
            ("a number of no bin", vec![0, SPLIT], vec![(0b110, 1), (u32::MAX, 1)]),
            ("a part that is too fine", vec![0, SPLIT], vec![(0b110, 1), (1 << 21, 1)]),
        ] {
            let mut bytes = Vec::new();
            encode_serde::<(Vec<u32>, Vec<(u32, u32)>)>(&(owners, parts), &mut bytes);
            assert!(decode_serde::<Told>(&bytes).is_err(), "{wrong}");
        }
    }

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
            Err(ControlError::BinOutOfRange { bin: BinName::new(4, 2), bins: 4 })
        );
        assert_eq!(routing, before);
    }

    #[test]
    fn moves_turn_one_into_the_other_and_back() {
        let from = Routing::new(3, 3).unwrap();
        let to = Routing::new(3, 2).unwrap();
        let changes = Changes { moves: from.moves_to(&to).unwrap(), recuts: Vec::new() };
        let mut routing = from.clone();
        routing.forward(&changes);
        assert_eq!(routing, to);
        routing.backward(&changes);
        assert_eq!(routing, from);
        assert!(matches!(
            from.moves_to(&Routing::new(2, 1).unwrap()),
            Err(BinsError::BitsDiffer { expected: 3, found: 2 })
        ));
    }

    proptest::proptest! {
        /// Splits, merges and moves, and back: the owner of a hash is that of the one bin that has it.
        #[test]
        fn every_hash_has_one_owner(
            bits in 0u8..4,
            deeds in proptest::collection::vec((0u8..4, proptest::prelude::any::<u64>(), 1u8..4), 0..30),
            hashes in proptest::collection::vec(proptest::prelude::any::<u64>(), 30),
        ) {
            let mut routing = Routing::new(bits, 3).unwrap();
            let mut stages = vec![(routing.clone(), Changes::default())];
            for (deed, hash, more) in deeds {
                let bin = routing.bin_of(hash);
                let command = match deed {
                    0 => Command::Split { bin, bits: more },
                    1 => Command::Move { bin, worker: u32::from(more) % 3 },
                    2 => Command::Map((0..routing.bins()).map(|bin| (bin ^ u32::from(more)) % 3).collect()),
                    _ => {
                        let range = range_of(bin, bits).unwrap();
                        let length = range.length().saturating_sub(more).max(bits);
                        let wider = Range::new(range.prefix() >> (range.length() - length), length).unwrap();
                        Command::Merge { bin: number_of(wider, bits).unwrap() }
                    }
                };
                let before = routing.clone();
                match routing.apply(&command) {
                    Ok(changes) => stages.push((routing.clone(), changes)),
                    Err(_) => proptest::prop_assert_eq!(&routing, &before),
                }
                let all: Vec<_> = routing.bins_owned().collect();
                let mut ranges: Vec<_> = all.iter().map(|(bin, owner)| (range_of(*bin, bits).unwrap(), *owner)).collect();
                proptest::prop_assert_eq!(Routing::of_ranges(bits, &ranges).unwrap(), routing.clone());
                let last = ranges.pop().unwrap();
                proptest::prop_assert!(Routing::of_ranges(bits, &ranges).is_err());
                ranges.extend([last, last]);
                proptest::prop_assert!(Routing::of_ranges(bits, &ranges).is_err());
                for &hash in &hashes {
                    let has = |(bin, _): &&(u32, u32)| range_of(*bin, bits).unwrap().contains(hash);
                    let found: Vec<_> = all.iter().filter(has).copied().collect();
                    proptest::prop_assert_eq!(&found, &[(routing.bin_of(hash), routing.owner(hash))]);
                    proptest::prop_assert_eq!(routing.owner_at(found[0].0), Some(found[0].1));
                }
            }
            while let Some((after, changes)) = stages.pop() {
                proptest::prop_assert_eq!(&routing, &after);
                routing.backward(&changes);
            }
            proptest::prop_assert!(!routing.is_split());
        }
    }
}
