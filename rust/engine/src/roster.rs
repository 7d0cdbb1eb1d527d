//! Who is there: slots, the members that serve them, and how many are wanted.
//!
//! Invariants: a member's id is never used again; a slot has at most one member that is alive; a slot that is not wanted gets none.

use std::collections::BTreeMap;

use crate::protocol::MemberId;

/// The residents of an engine.
#[derive(Clone, Debug)]
pub(crate) struct Roster {
    wanted: u32,
    /// By slot: its member, while that is alive.
    seats: BTreeMap<u32, Option<MemberId>>,
}

impl Roster {
    pub(crate) fn new(wanted: u32) -> Roster {
        Roster { wanted, seats: (0..wanted).map(|slot| (slot, None)).collect() }
    }

    /// How many are to serve.
    pub(crate) fn wanted(&self) -> u32 {
        self.wanted
    }

    /// Slots that are held, those of leavers included.
    pub(crate) fn held(&self) -> u32 {
        self.seats.len() as u32
    }

    /// Wants another number; returns the slots that are new.
    pub(crate) fn want(&mut self, wanted: u32) -> Vec<u32> {
        self.wanted = wanted;
        let new: Vec<u32> = (0..wanted).filter(|slot| !self.seats.contains_key(slot)).collect();
        self.seats.extend(new.iter().map(|slot| (*slot, None)));
        new
    }

    /// A member comes; false when it is not needed.
    pub(crate) fn up(&mut self, slot: u32, member: MemberId) -> bool {
        match self.seats.get_mut(&slot) {
            Some(seat) if seat.is_none() && slot < self.wanted => {
                *seat = Some(member);
                true
            }
            _ => false,
        }
    }

    /// A member has gone; returns its slot.
    pub(crate) fn lost(&mut self, member: MemberId) -> Option<u32> {
        let (slot, seat) = self.seats.iter_mut().find(|(_, seat)| **seat == Some(member))?;
        *seat = None;
        Some(*slot)
    }

    /// Gives a slot up.
    pub(crate) fn retire(&mut self, slot: u32) {
        self.seats.remove(&slot);
    }

    pub(crate) fn alive(&self, member: MemberId) -> bool {
        self.seats.values().any(|seat| *seat == Some(member))
    }

    /// Whether a member is to stay.
    pub(crate) fn stays(&self, member: MemberId) -> bool {
        self.serving().any(|one| one == member)
    }

    /// Members that are to stay, by slot.
    pub(crate) fn serving(&self) -> impl Iterator<Item = MemberId> {
        self.seats.iter().filter(|(slot, _)| **slot < self.wanted).filter_map(|(_, seat)| *seat)
    }

    /// Slots that nobody wants any more, with the member that is still there.
    pub(crate) fn leaving(&self) -> impl Iterator<Item = (u32, Option<MemberId>)> {
        self.seats.iter().filter(|(slot, _)| **slot >= self.wanted).map(|(slot, seat)| (*slot, *seat))
    }

    /// Whether every wanted slot has a member.
    pub(crate) fn complete(&self) -> bool {
        self.serving().count() == self.wanted as usize
    }
}
