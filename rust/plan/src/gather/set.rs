//! A set of byte strings, all of 8 bytes or each behind its length.
//!
//! `[members, bytes of members, slots][slots: 1 + where a member begins][members end to end, and room]`, words of 4 bytes, little-endian. Packed: the
//! members alone. Slots are a power of two, at most 3/4 of them taken; a member is found by the low bits of its hash, linearly.

use super::{set_word, word};
use crate::hash::hash_bytes;

const HEAD: usize = 12;
const LEAST_SLOTS: usize = 4;
const LEAST_ROOM: usize = 32;
/// Bytes of a member when all have as many.
const FIXED: usize = 8;

fn members(set: &[u8]) -> usize {
    word(set, 0) as usize
}

fn used(set: &[u8]) -> usize {
    word(set, 4) as usize
}

fn slots(set: &[u8]) -> usize {
    word(set, 8) as usize
}

fn arena(slots: usize) -> usize {
    HEAD + slots * 4
}

/// The member that begins at a place of the members, and where the next one does; `None` if they end before it does.
fn member(members: &[u8], at: usize, fixed: bool) -> Option<(&[u8], usize)> {
    let (from, len) = match fixed {
        true => (at, FIXED),
        false => (at.checked_add(4)?, u32::from_le_bytes(members.get(at..at + 4)?.try_into().ok()?) as usize),
    };
    let to = from.checked_add(len)?;
    Some((members.get(from..to)?, to))
}

/// The slot of a value, and whether it is taken.
fn find(set: &[u8], value: &[u8], fixed: bool) -> (usize, bool) {
    let mask = slots(set) - 1;
    let all = &set[arena(mask + 1)..];
    let mut slot = hash_bytes(value) as usize & mask;
    loop {
        match word(set, HEAD + slot * 4) {
            0 => return (slot, false),
            at if member(all, at as usize - 1, fixed).is_some_and(|(member, _)| member == value) => {
                return (slot, true);
            }
            _ => slot = (slot + 1) & mask,
        }
    }
}

/// The members of one set would reach 4 GiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Full;

/// Adds a value to a set, which may be no bytes at all; says whether it is new.
///
/// # Errors
/// [`Full`]: the set is as it was.
pub(crate) fn insert(set: &mut Box<[u8]>, value: &[u8], fixed: bool) -> Result<bool, Full> {
    insert_below(set, value, fixed, u32::MAX as usize)
}

/// As [`insert`], with so many bytes of members at most.
fn insert_below(set: &mut Box<[u8]>, value: &[u8], fixed: bool, most: usize) -> Result<bool, Full> {
    if set.is_empty() {
        *set = with_room(&[], 0, LEAST_SLOTS, LEAST_ROOM, fixed);
    }
    let (mut slot, found) = find(set, value, fixed);
    if found {
        return Ok(false);
    }
    let more = value.len() + if fixed { 0 } else { 4 };
    let (count, end, mut have) = (members(set), used(set), slots(set));
    if end + more > most {
        return Err(Full);
    }
    let room = set.len() - arena(have);
    if (count + 1) * 4 > have * 3 || end + more > room {
        let wanted = if (count + 1) * 4 > have * 3 { have * 2 } else { have };
        let room = if end + more > room { (room * 2).max(end + more).min(most) } else { room };
        *set = with_room(packed(set), count, wanted, room, fixed);
        (slot, _) = find(set, value, fixed);
        have = wanted;
    }
    let begin = end as u32 + 1;
    let at = arena(have) + end;
    if !fixed {
        set_word(set, at, value.len() as u32);
    }
    set[at + more - value.len()..at + more].copy_from_slice(value);
    set_word(set, HEAD + slot * 4, begin);
    set_word(set, 0, count as u32 + 1);
    set_word(set, 4, (end + more) as u32);
    Ok(true)
}

/// A set of these members with so many slots and bytes of room.
fn with_room(packed: &[u8], count: usize, slots: usize, room: usize, fixed: bool) -> Box<[u8]> {
    let mut set = vec![0; arena(slots) + room].into_boxed_slice();
    set_word(&mut set, 0, count as u32);
    set_word(&mut set, 4, packed.len() as u32);
    set_word(&mut set, 8, u32::try_from(slots).expect("fewer than 2^32 members"));
    set[arena(slots)..arena(slots) + packed.len()].copy_from_slice(packed);
    let mut at = 0;
    while let Some((value, next)) = member(packed, at, fixed).filter(|_| at < packed.len()) {
        let (slot, _) = find(&set, value, fixed);
        set_word(&mut set, HEAD + slot * 4, at as u32 + 1);
        at = next;
    }
    set
}

/// The members end to end, in the order in which they came.
pub(crate) fn packed(set: &[u8]) -> &[u8] {
    if set.is_empty() { set } else { &set[arena(slots(set))..][..used(set)] }
}

/// The members one by one.
pub(crate) fn iter(set: &[u8], fixed: bool) -> impl Iterator<Item = &[u8]> {
    let all = packed(set);
    let mut at = 0;
    std::iter::from_fn(move || {
        let (value, next) = member(all, at, fixed).filter(|_| at < all.len())?;
        at = next;
        Some(value)
    })
}

/// The set of packed members, and how many they are; `None` if they are cut off, or one comes twice.
pub(crate) fn unpack(packed: &[u8], fixed: bool) -> Option<(Box<[u8]>, u64)> {
    let mut set = Box::default();
    let mut at = 0;
    while at < packed.len() {
        let (value, next) = member(packed, at, fixed)?;
        if insert(&mut set, value, fixed) != Ok(true) {
            return None;
        }
        at = next;
    }
    let count = if set.is_empty() { 0 } else { members(&set) };
    Some((set, count as u64))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn one_that_is_full_stays_as_it_is() {
        for fixed in [false, true] {
            let (mut set, most) = (Box::default(), 40);
            let value = |number: u64| number.to_le_bytes();
            let room = most / if fixed { 8 } else { 12 };
            for number in 0..room as u64 {
                assert_eq!(insert_below(&mut set, &value(number), fixed, most), Ok(true));
            }
            let before = set.clone();
            assert_eq!(insert_below(&mut set, &value(99), fixed, most), Err(Full));
            assert_eq!(insert_below(&mut set, &value(0), fixed, most), Ok(false), "one that is there is");
            assert_eq!(set, before);
        }
    }

    proptest! {
        #[test]
        fn equals_a_set(values in prop::collection::vec(prop::collection::vec(0u8..3, 0..6), 0..300), fixed in any::<bool>()) {
            let (mut set, mut twin) = (Box::default(), BTreeSet::new());
            for mut value in values {
                if fixed {
                    value.resize(FIXED, 0);
                }
                prop_assert_eq!(insert(&mut set, &value, fixed), Ok(twin.insert(value)));
            }
            let members: BTreeSet<Vec<u8>> = iter(&set, fixed).map(<[u8]>::to_vec).collect();
            prop_assert_eq!(&members, &twin);
            prop_assert_eq!(iter(&set, fixed).count(), twin.len());
            let (again, count) = unpack(packed(&set), fixed).unwrap();
            prop_assert_eq!((packed(&again), count), (packed(&set), twin.len() as u64));
            let twice = [packed(&set), packed(&set)].concat();
            prop_assert_eq!(unpack(&twice, fixed).is_none(), !twin.is_empty());
            prop_assert!(packed(&set).is_empty() || unpack(&packed(&set)[1..], fixed).is_none_or(|(_, other)| other <= count));
        }
    }
}
