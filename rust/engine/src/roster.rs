//! Who is there: slots, the members that serve them, and which of them are wanted.
//!
//! Invariants: a member's id is never used again; a slot has at most one member that is alive; a slot that is not wanted gets none. A slot whose
//! executor is going is never wanted again; another one is wanted in its place. `slots` has the slot of every member that is alive, and no other: it is
//! written where a member comes (`up`) and goes (`lost`, `retire`). Every event asks after members: one is looked up, and never looked for.

use std::collections::{BTreeMap, BTreeSet};

use crate::protocol::{Dismissal, MemberId};

/// How often the member of one slot is sent away for a better place before it may stay anywhere.
///
/// Some seconds, if Spark has no slot elsewhere: an executor may be full of the queries' own tasks, which is not seen here and may be free a moment
/// later. 25 kills of one of two members beside two free executors never came to it.
const TRIES: u32 = 25;

/// The residents of an engine.
#[derive(Clone, Debug)]
pub(crate) struct Roster {
    seats: BTreeMap<u32, Seat>,
    slots: BTreeMap<MemberId, u32>,
}

#[derive(Clone, Debug, Default)]
struct Seat {
    /// While it is alive, and where it runs.
    member: Option<(MemberId, String)>,
    tries: u32,
    wish: Wish,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Wish {
    #[default]
    Wanted,
    /// Fewer are wanted; more may be again.
    Unwanted,
    /// Its executor is going.
    Drains,
}

impl Seat {
    fn member(&self) -> Option<MemberId> {
        self.member.as_ref().map(|(member, _)| *member)
    }
}

impl Roster {
    pub(crate) fn new(wanted: u32) -> Roster {
        Roster { seats: (0..wanted).map(|slot| (slot, Seat::default())).collect(), slots: BTreeMap::new() }
    }

    /// How many are to serve.
    pub(crate) fn wanted(&self) -> u32 {
        self.seats().filter(|(_, seat)| seat.wish == Wish::Wanted).count() as u32
    }

    /// Slots that are held, those of leavers included. Those of executors that are going are nobody's soon.
    pub(crate) fn held(&self) -> u32 {
        self.seats().filter(|(_, seat)| seat.wish != Wish::Drains).count() as u32
    }

    /// Wants another number, of the slots that are held first, and of these those that have a member; returns the slots that are new.
    pub(crate) fn want(&mut self, wanted: u32) -> Vec<u32> {
        let mut staying: Vec<&mut Seat> = self.seats.values_mut().filter(|seat| seat.wish != Wish::Drains).collect();
        staying.sort_by_key(|seat| seat.member.is_none());
        for (place, seat) in (0..).zip(staying) {
            seat.wish = if place < wanted { Wish::Wanted } else { Wish::Unwanted };
        }
        (self.wanted()..wanted).map(|_| self.add()).collect()
    }

    /// One slot more, the first that there is not.
    fn add(&mut self) -> u32 {
        let slot = (0..).find(|slot| !self.seats.contains_key(slot)).expect("there are fewer slots than numbers");
        self.seats.insert(slot, Seat::default());
        slot
    }

    /// The executor of a member is going; returns the slot that is wanted in its place, if one is.
    pub(crate) fn drain(&mut self, member: MemberId) -> Option<u32> {
        let seat = self.seats.get_mut(self.slots.get(&member)?)?;
        let before = std::mem::replace(&mut seat.wish, Wish::Drains);
        (before == Wish::Wanted).then(|| self.add())
    }

    /// A member comes, to one of so many executors; it stays unless it is told why not. Members spread over the executors that there are: whoever
    /// comes while one is being started again stays beside another, and nobody moves when that one is back, since moving costs more.
    pub(crate) fn up(
        &mut self,
        slot: u32,
        member: MemberId,
        executor: String,
        executors: u32,
    ) -> Result<(), Dismissal> {
        let taken: BTreeSet<&String> = self.seats().filter_map(|(_, seat)| Some(&seat.member.as_ref()?.1)).collect();
        let crowded = taken.contains(&executor) && executors as usize > taken.len();
        let seat = self.seats.get_mut(&slot).ok_or(Dismissal::Unneeded)?;
        // Also of a slot that is not wanted: once one attempt returns, Spark ends the one that still has state.
        if seat.member.is_some() {
            return Err(Dismissal::Spare);
        }
        if seat.wish != Wish::Wanted {
            return Err(Dismissal::Unneeded);
        }
        if crowded && seat.tries < TRIES {
            seat.tries += 1;
            return Err(Dismissal::Crowded);
        }
        *seat = Seat { member: Some((member, executor)), ..Seat::default() };
        self.slots.insert(member, slot);
        Ok(())
    }

    /// A member has gone; returns its slot where that is still wanted.
    pub(crate) fn lost(&mut self, member: MemberId) -> Option<u32> {
        let slot = self.slots.remove(&member)?;
        let seat = self.seats.get_mut(&slot)?;
        seat.member = None;
        (seat.wish == Wish::Wanted).then_some(slot)
    }

    /// Gives a slot up.
    pub(crate) fn retire(&mut self, slot: u32) {
        if let Some(member) = self.seats.remove(&slot).and_then(|seat| seat.member()) {
            self.slots.remove(&member);
        }
    }

    pub(crate) fn alive(&self, member: MemberId) -> bool {
        self.seat(member).is_some()
    }

    /// Whether a member is to stay.
    pub(crate) fn stays(&self, member: MemberId) -> bool {
        self.seat(member).is_some_and(|seat| seat.wish == Wish::Wanted)
    }

    /// That of a member that is alive.
    fn seat(&self, member: MemberId) -> Option<&Seat> {
        #[cfg(test)]
        looked();
        self.seats.get(self.slots.get(&member)?)
    }

    /// All of them, by slot.
    fn seats(&self) -> impl Iterator<Item = (u32, &Seat)> {
        self.seats.iter().map(|(slot, seat)| {
            #[cfg(test)]
            looked();
            (*slot, seat)
        })
    }

    /// Members that are to stay, by slot.
    pub(crate) fn serving(&self) -> impl Iterator<Item = MemberId> {
        self.seats().filter(|(_, seat)| seat.wish == Wish::Wanted).filter_map(|(_, seat)| seat.member())
    }

    /// Slots that nobody wants any more, with the member that is still there.
    pub(crate) fn leaving(&self) -> impl Iterator<Item = (u32, Option<MemberId>)> {
        self.seats().filter(|(_, seat)| seat.wish != Wish::Wanted).map(|(slot, seat)| (slot, seat.member()))
    }

    /// Whether every wanted slot has a member.
    pub(crate) fn complete(&self) -> bool {
        self.seats().all(|(_, seat)| seat.wish != Wish::Wanted || seat.member.is_some())
    }
}

#[cfg(test)]
thread_local! {
    /// How many seats have been looked at: what an event costs, in no unit of time.
    pub(crate) static LOOKED: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

#[cfg(test)]
fn looked() {
    LOOKED.set(LOOKED.get() + 1);
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

    #[test]
    fn a_slot_whose_executor_goes_is_replaced_once_and_not_wanted_again() {
        let mut roster = Roster::new(2);
        for slot in 0..2 {
            roster.up(slot, MemberId(u64::from(slot)), format!("{slot}"), 2).unwrap();
        }
        assert_eq!(roster.drain(MemberId(7)), None);
        assert_eq!([roster.drain(MemberId(0)), roster.drain(MemberId(0))], [Some(2), None]);
        assert_eq!((roster.wanted(), roster.held(), roster.complete()), (2, 2, false));
        assert_eq!(roster.leaving().collect::<Vec<_>>(), [(0, Some(MemberId(0)))]);
        assert_eq!(roster.up(0, MemberId(3), "2".to_owned(), 3), Err(Dismissal::Spare));
        // One that was to go anyway needs nobody in its place.
        assert!(roster.want(1).is_empty());
        assert_eq!(roster.serving().collect::<Vec<_>>(), [MemberId(1)]);
        assert_eq!(roster.want(3), [3]);
        assert!(roster.want(1).is_empty());
        assert_eq!(roster.lost(MemberId(0)), None);
        assert_eq!(roster.up(0, MemberId(4), "2".to_owned(), 3), Err(Dismissal::Unneeded));
        assert_eq!(roster.drain(MemberId(1)), Some(4));
        assert_eq!((roster.wanted(), roster.held()), (1, 3));
        assert!(roster.want(1).is_empty(), "the first that is held comes first");
        assert_eq!(roster.leaving().map(|(slot, _)| slot).collect::<Vec<_>>(), [0, 1, 3, 4]);
    }

    #[test]
    fn whoever_has_gone_is_nowhere() {
        let mut roster = Roster::new(3);
        for slot in 0..3 {
            roster.up(slot, MemberId(u64::from(slot)), "a".to_owned(), 1).unwrap();
        }
        let alive = |roster: &Roster| (0..4).filter(|member| roster.alive(MemberId(*member))).collect::<Vec<_>>();
        let stays = |roster: &Roster| (0..4).filter(|member| roster.stays(MemberId(*member))).collect::<Vec<_>>();
        assert_eq!(roster.lost(MemberId(1)), Some(1));
        assert_eq!((alive(&roster), roster.lost(MemberId(1))), (vec![0, 2], None));
        roster.up(1, MemberId(3), "a".to_owned(), 1).unwrap();
        assert!(roster.want(2).is_empty());
        assert_eq!((alive(&roster), stays(&roster)), (vec![0, 2, 3], vec![0, 3]));
        roster.retire(2);
        assert_eq!((alive(&roster), roster.lost(MemberId(2)), roster.drain(MemberId(2))), (vec![0, 3], None, None));
    }
}
