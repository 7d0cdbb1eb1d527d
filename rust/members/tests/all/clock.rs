//! What is measured from when. Messages bring no time, and nobody ticks a member while nobody joins: the tick before may be long ago.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::lists::Nobody;
use crate::machine::list::{Change, Home};
use crate::machine::message::{LANES, Request};
use crate::machine::{Id, Lane, Limits, List, Member, Message, Output, Standing};

const LIMITS: Limits = Limits { join: 10, serve: 10 };

fn tell(member: &mut Member<()>, from: Id, list: &List) {
    for lane in LANES {
        let marker = Message::Marker { list: Arc::new(list.clone()), next: BTreeMap::new(), grant: None };
        member.accept(from, lane, marker, &mut Nobody).unwrap();
    }
}

/// The same list with all at home.
fn housed(mut list: List) -> List {
    list.homes = list.members.keys().map(|id| (*id, Home { process: *id, ticket: 1 })).collect();
    list
}

/// Whom a joiner asked since the last look.
fn asked(joiner: &mut Member<()>) -> Vec<Id> {
    let asks = |output| match output {
        Output::Send { to, message: Message::Bootstrap { .. }, .. } => Some(to),
        _ => None,
    };
    joiner.outputs().into_iter().filter_map(asks).collect()
}

#[test]
fn a_join_that_was_asked_for_by_message_begins_with_the_next_tick() {
    let mut lead = Member::<()>::founder(0, 1, LIMITS);
    lead.tick(0, &mut Nobody).unwrap();
    let home = Home { process: 1, ticket: 1 };
    let request = Message::Request(Request::Admit { home, count: 1, linked: BTreeSet::from([0]) });
    lead.accept(1, Lane::Urgent, request, &mut Nobody).unwrap();
    for now in [90_000, 90_005, 90_009] {
        lead.tick(now, &mut Nobody).unwrap();
        assert_eq!(lead.list().standing(1), Some(Standing::Joining), "at {now}");
    }
    lead.tick(90_010, &mut Nobody).unwrap();
    assert_eq!(lead.list().change, Change::Withdrawn(1));
}

#[test]
fn who_becomes_the_lead_counts_from_its_own_tick() {
    let mut member = Member::<()>::founder(1, 2, LIMITS);
    member.tick(0, &mut Nobody).unwrap();
    let admitted = housed(member.list().after(Change::Admitted(vec![2])).unwrap());
    tell(&mut member, 0, &admitted);
    tell(&mut member, 0, &admitted.after(Change::Leaving(0)).unwrap());
    for now in [90_000, 90_005, 90_009] {
        member.tick(now, &mut Nobody).unwrap();
        assert_eq!(member.list().standing(2), Some(Standing::Joining), "at {now}");
    }
    member.tick(90_010, &mut Nobody).unwrap();
    assert_eq!(member.list().change, Change::Withdrawn(2));
}

/// A member that is in a call of a minute keeps a joiner waiting as long: the others have not the list, and the joiner cannot be seated.
#[test]
fn a_joiner_is_not_withdrawn_for_what_others_keep_it_waiting() {
    let mut lead = Member::<()>::founder(0, 2, LIMITS);
    lead.tick(0, &mut Nobody).unwrap();
    let home = Home { process: 2, ticket: 1 };
    let request = Message::Request(Request::Admit { home, count: 1, linked: BTreeSet::from([0, 1]) });
    lead.accept(1, Lane::Urgent, request, &mut Nobody).unwrap();
    let admitted = lead.list().clone();
    assert_eq!(admitted.standing(2), Some(Standing::Joining));
    (0..40).for_each(|now| lead.tick(now, &mut Nobody).unwrap());
    tell(&mut lead, 1, &admitted);
    for now in [40, 45] {
        lead.tick(now, &mut Nobody).unwrap();
        assert_eq!(lead.list().standing(2), Some(Standing::Joining), "at {now}");
    }
    lead.accept(2, Lane::Urgent, Message::Request(Request::Seat { joiner: 2, granter: 1 }), &mut Nobody).unwrap();
    assert_eq!(lead.list().standing(2), Some(Standing::Full));
}

/// Nor for a call of the lead's own, in which it has not looked.
#[test]
fn a_lead_that_has_not_looked_for_long_looks_once_more() {
    let mut lead = Member::<()>::founder(0, 1, LIMITS);
    let home = Home { process: 1, ticket: 1 };
    let request = Message::Request(Request::Admit { home, count: 1, linked: BTreeSet::from([0]) });
    lead.accept(1, Lane::Urgent, request, &mut Nobody).unwrap();
    for now in [1, 70, 74] {
        lead.tick(now, &mut Nobody).unwrap();
        assert_eq!(lead.list().standing(1), Some(Standing::Joining), "at {now}");
    }
    lead.tick(75, &mut Nobody).unwrap();
    assert_eq!(lead.list().change, Change::Withdrawn(1));
}

/// Its program may take longer to build than a server has.
#[test]
fn a_joiner_gives_its_server_time_from_its_first_tick_on() {
    let admitted = || housed(List::founded(2).after(Change::Admitted(vec![2])).unwrap());
    let mut joiner = Member::<()>::joiner(2, Some(1), LIMITS);
    tell(&mut joiner, 0, &admitted());
    assert_eq!(asked(&mut joiner), [], "the first marker of its server has not come");
    tell(&mut joiner, 1, &admitted());
    assert_eq!(asked(&mut joiner), [1]);
    joiner.tick(12_000, &mut Nobody).unwrap();
    joiner.tick(12_009, &mut Nobody).unwrap();
    assert_eq!(asked(&mut joiner), []);
    joiner.tick(12_010, &mut Nobody).unwrap();
    assert_eq!(asked(&mut joiner), [0], "the next one");

    let mut joiner = Member::<()>::joiner(2, Some(1), LIMITS);
    joiner.tick(12_000, &mut Nobody).unwrap();
    joiner.tick(12_009, &mut Nobody).unwrap();
    tell(&mut joiner, 0, &admitted());
    assert_eq!(asked(&mut joiner), [], "it waits for its server");
    joiner.tick(12_010, &mut Nobody).unwrap();
    assert_eq!(asked(&mut joiner), [0], "not for ever");
}
