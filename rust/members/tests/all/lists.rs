//! Lists and requests that no honest member sends.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::machine::list::{Change, Home, ListFault, MAX_IDS, MAX_MEMBERS};
use crate::machine::message::{Range, Request};
use crate::machine::{Failure, Host, Id, Lane, Limits, List, Member, Message, Output, Standing};

const LIMITS: Limits = Limits { join: 10, serve: 10 };

/// Counts nothing.
pub(crate) struct Nobody;

impl Host for Nobody {
    type Part = ();
    fn cast(&mut self, _: u64) -> Option<()> {
        None
    }
    fn absorb(&mut self, _: u64, (): &()) -> bool {
        true
    }
    fn snapshot(&mut self, _: u64) {}
    fn begin(&mut self, _: u64, (): &()) -> bool {
        true
    }
    fn grant(&mut self, _: u64) -> Option<()> {
        None
    }
    fn hand_over(&mut self, _: u64) -> Option<()> {
        None
    }
    fn take(&mut self, _: u64, (): &()) {}
}

/// Three members, of which the last joins.
fn admitted() -> List {
    let founded = List::founded(2);
    let mut list = founded.after(Change::Admitted(vec![2])).unwrap();
    list.homes.insert(2, Home { process: 1, ticket: 1 });
    list
}

#[test]
fn a_list_has_room_for_all_that_it_names() {
    assert_eq!(admitted().check(), Ok(()));
    let fault = |change: fn(&mut List)| {
        let mut list = admitted();
        change(&mut list);
        list.check().unwrap_err()
    };
    assert_eq!(fault(|list| list.next = 1 << 60), ListFault::Next(1 << 60));
    assert_eq!(fault(|list| list.next = MAX_IDS + 1), ListFault::Next(MAX_IDS + 1));
    assert_eq!(fault(|list| list.next = 2), ListFault::Unknown(2));
    assert_eq!(fault(|list| _ = list.speakers.insert(7)), ListFault::Unknown(7));
    assert_eq!(fault(|list| list.version = u64::MAX), ListFault::Version { version: u64::MAX, next: 3 });
    assert_eq!(
        fault(|list| _ = list.homes.insert(1 << 40, Home::default())),
        ListFault::Homes { homes: 4, members: 3 }
    );
    assert_eq!(fault(|list| _ = list.homes.remove(&2)), ListFault::Homes { homes: 2, members: 3 });
    assert_eq!(fault(|list| list.members.values_mut().for_each(|one| *one = Standing::Leaving)), ListFault::NoLead);
    let change = |change: Change| List { change, ..admitted() }.check().unwrap_err();
    assert_eq!(change(Change::Admitted(vec![2, 3])), ListFault::Change(3));
    assert_eq!(change(Change::Withdrawn(1 << 40)), ListFault::Change(1 << 40));
    assert_eq!(change(Change::Withdrawn(2)), ListFault::Change(2));
    assert_eq!(change(Change::Seated { joiner: 2, granter: 0 }), ListFault::Change(2));
    assert_eq!(change(Change::Seated { joiner: 1, granter: 2 }), ListFault::Change(2));
    assert_eq!(change(Change::Leaving(0)), ListFault::Change(0));
    assert_eq!(change(Change::Closed { leaver: usize::MAX, finals: BTreeMap::new() }), ListFault::Change(usize::MAX));
    let crowd = List::founded(MAX_MEMBERS + 1);
    assert_eq!(crowd.check(), Err(ListFault::Members(MAX_MEMBERS + 1)));
}

#[test]
fn nobody_is_admitted_beyond_the_limits() {
    let full = List::founded(MAX_MEMBERS);
    assert_eq!(full.after(Change::Admitted(vec![MAX_MEMBERS])), None);
    let worn = List { next: MAX_IDS, ..List::founded(1) };
    assert_eq!(worn.after(Change::Admitted(vec![MAX_IDS])), None);
    let mut lead = Member::<()>::founder(0, 1, LIMITS);
    let home = Home { process: 1, ticket: 1 };
    for count in [usize::MAX, MAX_MEMBERS + 1, 0] {
        let request = Message::Request(Request::Admit { home, count, linked: BTreeSet::new() });
        lead.accept(1, Lane::Urgent, request, &mut Nobody).unwrap();
        lead.admit_at(home, count, BTreeSet::new());
        lead.tick(0, &mut Nobody).unwrap();
        assert_eq!((lead.outputs(), lead.list().next), (Vec::new(), 1), "{count}");
    }
    assert_eq!(lead.remembers(), None);
    lead.admit_at(home, MAX_MEMBERS, BTreeSet::from([0]));
    lead.tick(0, &mut Nobody).unwrap();
    assert_eq!(lead.outputs(), [Output::Crowded(home)], "it takes part itself");
    assert_eq!((lead.list().version, lead.remembers()), (0, None));
    lead.admit_at(home, MAX_MEMBERS - 1, BTreeSet::from([0]));
    lead.tick(0, &mut Nobody).unwrap();
    assert_eq!((lead.list().members.len(), lead.list().next), (MAX_MEMBERS, MAX_MEMBERS));
}

#[test]
fn who_was_never_admitted_gets_no_answer() {
    let mut member = Member::<()>::founder(0, 2, LIMITS);
    member.open(0);
    let range = Range { dataflow: 0, sender: 1, start: 0, end: u64::MAX };
    for message in [Message::Ask { attempt: 1, range }, Message::Bootstrap { attempt: u64::MAX }] {
        member.accept(4_000_000_000, Lane::Urgent, message, &mut Nobody).unwrap();
    }
    assert_eq!(member.outputs(), []);
    member.accept(1, Lane::Urgent, Message::Ask { attempt: 1, range }, &mut Nobody).unwrap();
    assert!(matches!(member.outputs()[..], [Output::Send { to: 1, .. }]), "one that takes part has an answer");
}

/// Found by the fuzz target `members`: it told others, whom it knew no way to, that it uses the list.
#[test]
fn a_joiner_uses_no_list_before_the_one_that_admits_it() {
    let mut joiner = Member::<()>::joiner(3, None, LIMITS);
    let marker = Message::Marker { list: Arc::new(admitted()), next: BTreeMap::new(), grant: None };
    joiner.accept(0, Lane::Urgent, marker, &mut Nobody).unwrap();
    assert_eq!((joiner.outputs(), joiner.list().version), (vec![], 0));
    assert!(!joiner.is_over());
}

/// The last number of all, in a snapshot and in the words of who is gone.
#[test]
fn numbers_may_be_the_last_ones() {
    let mut member = Member::<()>::founder(0, 3, LIMITS);
    member.open(0);
    let marker = |list: &List| Message::Marker { list: Arc::new(list.clone()), next: BTreeMap::new(), grant: None };
    let leaving = member.list().after(Change::Leaving(2)).unwrap();
    let closed = leaving.after(Change::Closed { leaver: 2, finals: [(0, u64::MAX)].into() }).unwrap();
    let lanes = [Lane::Urgent, Lane::Data, Lane::Behind];
    let mut tell =
        |from: Id, list: &List| lanes.iter().try_for_each(|lane| member.accept(from, *lane, marker(list), &mut Nobody));
    tell(1, &leaving).and_then(|()| tell(2, &leaving)).unwrap();
    let gap = tell(1, &closed).and_then(|()| tell(2, &closed)).unwrap_err();
    assert_eq!(gap.to_string(), format!("dataflow 0: bundle {} of worker 2 came where 0 was expected", u64::MAX));
}

/// All have agreed on its end, and what it sent before has not all come: its progress counts blocks that nobody has.
#[test]
fn a_leaver_whose_link_ends_before_its_last_markers_is_lost() {
    let lanes = [Lane::Urgent, Lane::Data, Lane::Behind];
    for heard in 0..=lanes.len() {
        let mut member = Member::<()>::founder(0, 2, LIMITS);
        member.open(0);
        let leaving = member.list().after(Change::Leaving(1)).unwrap();
        let closed = leaving.after(Change::Closed { leaver: 1, finals: [(0, 0)].into() }).unwrap();
        let mut tell = |list: &List, lane: &Lane| {
            let marker = Message::Marker { list: Arc::new(list.clone()), next: BTreeMap::new(), grant: None };
            member.accept(1, *lane, marker, &mut Nobody)
        };
        lanes.iter().try_for_each(|lane| tell(&leaving, lane)).unwrap();
        lanes[..heard].iter().try_for_each(|lane| tell(&closed, lane)).unwrap();
        let expected = if heard == lanes.len() { Ok(()) } else { Err(Failure::Lost(1)) };
        assert_eq!(member.lost(1, &mut Nobody), expected, "{heard} of its last markers have come");
    }
}
