//! What it costs that all members tell all others of a list.

use std::collections::BTreeSet;

use penstock_dataflow::wire::encode_serde;
use penstock_members::list::Home;
use penstock_members::{Host, Lane, Limits, Member, Output};
use serde::Serialize;

/// Counts nothing.
struct Nobody;

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

fn bytes(value: &impl Serialize) -> usize {
    let mut bytes = Vec::new();
    encode_serde(value, &mut bytes);
    bytes.len()
}

/// Markers are what grows with the cube of the number of members: each has the list once for each other.
#[test]
fn a_list_goes_over_each_link_once() {
    for members in [4, 16, 64] {
        let mut lead = Member::<()>::founder_at(0, members, 1, Limits { join: 10, serve: 10 });
        lead.open(0);
        lead.admit_at(Home { process: members, ticket: 1 }, 1, (0..members).collect::<BTreeSet<_>>());
        lead.tick(0, &mut Nobody).unwrap();
        let (mut told, mut lanes) = (0, Vec::new());
        for output in lead.outputs() {
            if let Output::Send { to: 1, lane, message } = output {
                told += bytes(&message);
                lanes.push(lane);
            }
        }
        assert_eq!(lanes, [Lane::Urgent, Lane::Data, Lane::Behind], "a marker in each");
        let list = bytes(lead.list());
        println!(
            "{members} members: a list has {list} bytes, its markers to one {told}, in all {}",
            told * members * members
        );
        assert!(told <= list + 12, "{members} members: {told} bytes for a list of {list}");
    }
}
