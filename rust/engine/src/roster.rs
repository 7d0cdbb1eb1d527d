//! Who is there: slots, the members that serve them, and how many are wanted.
//!
//! Invariants: a member's id is never used again; a slot has at most one member that is alive; a slot that is not wanted gets none.

use std::collections::{BTreeMap, BTreeSet};

use crate::protocol::{Dismissal, MemberId};

/// How often the member of one slot is sent away for a better place before it may stay anywhere.
const TRIES: u32 = 25;

/// The residents of an engine.
#[derive(Clone, Debug)]
pub(crate) struct Roster {
    wanted: u32,
    seats: BTreeMap<u32, Seat>,
}

#[derive(Clone, Debug, Default)]
struct Seat {
    /// While it is alive, and where it runs.
    member: Option<(MemberId, String)>,
    tries: u32,
}

impl Seat {
    fn member(&self) -> Option<MemberId> {
        self.member.as_ref().map(|(member, _)| *member)
    }
}

impl Roster {
    pub(crate) fn new(wanted: u32) -> Roster {
        Roster { wanted, seats: (0..wanted).map(|slot| (slot, Seat::default())).collect() }
    }

    /// How many are to serve.
    pub(crate) fn wanted(&self) -> u32 {
        self.wanted
    }

    /// Slots that are held, those of leavers included.
    pub(crate) fn held(&self) -> u32 {
        self.seats.len() as u32
    }

    /// Slots from the first on that are held without a gap: so many members need no further slot.
    pub(crate) fn unbroken(&self) -> u32 {
        (0..).take_while(|slot| self.seats.contains_key(slot)).count() as u32
    }

    /// Wants another number; returns the slots that are new.
    pub(crate) fn want(&mut self, wanted: u32) -> Vec<u32> {
        self.wanted = wanted;
        let new: Vec<u32> = (0..wanted).filter(|slot| !self.seats.contains_key(slot)).collect();
        self.seats.extend(new.iter().map(|slot| (*slot, Seat::default())));
        new
    }

    /// A member comes, to one of so many executors; it stays unless it is told why not. Members spread over executors.
    pub(crate) fn up(
        &mut self,
        slot: u32,
        member: MemberId,
        executor: String,
        executors: u32,
    ) -> Result<(), Dismissal> {
        let taken: BTreeSet<&String> = self.seats.values().filter_map(|seat| Some(&seat.member.as_ref()?.1)).collect();
        let crowded = taken.contains(&executor) && executors as usize > taken.len();
        let wanted = slot < self.wanted;
        let seat = self.seats.get_mut(&slot).filter(|_| wanted).ok_or(Dismissal::Unneeded)?;
        if seat.member.is_some() {
            return Err(Dismissal::Spare);
        }
        if crowded && seat.tries < TRIES {
            seat.tries += 1;
            return Err(Dismissal::Crowded);
        }
        *seat = Seat { member: Some((member, executor)), tries: 0 };
        Ok(())
    }

    /// A member has gone; returns its slot.
    pub(crate) fn lost(&mut self, member: MemberId) -> Option<u32> {
        let (slot, seat) = self.seats.iter_mut().find(|(_, seat)| seat.member() == Some(member))?;
        seat.member = None;
        Some(*slot)
    }

    /// Gives a slot up.
    pub(crate) fn retire(&mut self, slot: u32) {
        self.seats.remove(&slot);
    }

    pub(crate) fn alive(&self, member: MemberId) -> bool {
        self.seats.values().any(|seat| seat.member() == Some(member))
    }

    /// Whether a member is to stay.
    pub(crate) fn stays(&self, member: MemberId) -> bool {
        self.serving().any(|one| one == member)
    }

    /// Members that are to stay, by slot.
    pub(crate) fn serving(&self) -> impl Iterator<Item = MemberId> {
        self.seats.iter().filter(|(slot, _)| **slot < self.wanted).filter_map(|(_, seat)| seat.member())
    }

    /// Slots that nobody wants any more, with the member that is still there.
    pub(crate) fn leaving(&self) -> impl Iterator<Item = (u32, Option<MemberId>)> {
        self.seats.iter().filter(|(slot, _)| **slot >= self.wanted).map(|(slot, seat)| (*slot, seat.member()))
    }

    /// Whether every wanted slot has a member.
    pub(crate) fn complete(&self) -> bool {
        self.serving().count() == self.wanted as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_spread_over_executors_and_only_one_serves_a_slot() {
        let mut roster = Roster::new(2);
        let mut ids = (1..).map(MemberId);
        let mut up = |roster: &mut Roster, slot, place: &str, executors| {
            roster.up(slot, ids.next().unwrap(), place.to_owned(), executors)
        };
        assert_eq!(up(&mut roster, 0, "a", 2), Ok(()));
        assert_eq!(up(&mut roster, 0, "b", 2), Err(Dismissal::Spare));
        assert_eq!(up(&mut roster, 2, "b", 2), Err(Dismissal::Unneeded));
        assert_eq!(up(&mut roster, 1, "a", 2), Err(Dismissal::Crowded));
        assert_eq!(up(&mut roster, 1, "b", 2), Ok(()));
        assert_eq!(roster.lost(MemberId(5)), Some(1));
        // An executor that never gets a task is not waited for, nor one that is not there.
        for _ in 0..TRIES {
            assert_eq!(up(&mut roster, 1, "a", 2), Err(Dismissal::Crowded));
        }
        assert_eq!(up(&mut roster, 1, "a", 2), Ok(()));
        assert_eq!(roster.lost(MemberId(1)), Some(0));
        assert_eq!(up(&mut roster, 0, "a", 1), Ok(()));
    }
}
