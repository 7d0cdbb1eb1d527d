//! A peer that has proved the key of a joinable run and says what no honest one does: the run ends with one cause, or goes on; nothing panics, and
//! no memory is taken for numbers.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::sync::Arc;

use penstock_dataflow::error::ProtocolFault;
use penstock_dataflow::fabric::{self, Duplex};
use penstock_dataflow::wire::encode_serde;
use penstock_dataflow::{Error, JoinError, Worker, execute};
use penstock_members::list::{Change, Home, MAX_MEMBERS};
use penstock_members::message::{Range, Request};
use penstock_members::{List, Message};
use penstock_progress::{Location, Source};
use serde::Serialize;

use crate::frames::frame;
use crate::support::{self, TAG};

/// Of which generation the frames are.
const NOW: u64 = TAG.generation;
const MEMBER: u8 = 8;
const ASK: u8 = 10;
const WELCOME: u8 = 11;

/// What members tell each other of a dataflow: its graph, and bytes by scope.
type Told = (Option<String>, Vec<Vec<u8>>);

fn bytes(value: &impl Serialize) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode_serde(value, &mut bytes);
    bytes
}

fn member(from: u32, to: u32, message: &Message<Told>) -> Vec<u8> {
    frame(MEMBER, NOW, 0, from, to, None, &bytes(message))
}

fn marker(list: List) -> Message<Told> {
    Message::Marker { list: Arc::new(list), next: BTreeMap::new(), grant: None }
}

/// Two founders, one in each process.
fn founded() -> List {
    List::founded_at(2, 1)
}

/// Why worker 0 of two ends, whose peer in another process says this, and then what is no frame.
fn against(said: &[Vec<u8>]) -> Error {
    let (ours, mut theirs) = support::tcp_pair();
    let streams: Vec<Option<Box<dyn Duplex>>> = vec![None, Some(Box::new(ours))];
    let (seats, door, guard) = fabric::joinable_processes(0, 1, streams, TAG).unwrap();
    let threads = execute(seats, |worker: &mut Worker| {
        let _input = worker.dataflow::<u64, _>("flow", |scope| {
            let (handle, stream) = scope.new_input::<Vec<u64>>();
            stream.exchange_by(|value| *value);
            handle
        });
        worker.bootstrap()?;
        while worker.step_or_park(None)? {}
        Ok::<(), Error>(())
    });
    // What it says last ends the link, and is heard by the worker behind all else.
    for frame in said.iter().map(Vec::as_slice).chain([&[0x41; 56][..]]) {
        let _ = theirs.write_all(frame);
    }
    let error = support::join(threads).remove(0).unwrap_err();
    drop((theirs, door, guard));
    error
}

fn fault(said: &[Vec<u8>]) -> ProtocolFault {
    match against(said) {
        Error::Protocol { process: 1, fault } => fault,
        other => panic!("{other:?}"),
    }
}

/// It was heard and ended nothing.
fn goes_on(said: &[Vec<u8>]) {
    assert_eq!(fault(said), ProtocolFault::Magic(0x4141_4141));
}

#[test]
fn lists_that_name_what_cannot_be_are_undecodable() {
    let joiner = || {
        let mut list = founded().after(Change::Admitted(vec![2])).unwrap();
        list.homes.insert(2, Home { process: 0, ticket: 1 });
        list
    };
    let wrong: [fn(&mut List); 7] = [
        |list| list.next = 1 << 60,
        |list| list.next = 1 << 34,
        |list| list.next = 2,
        |list| _ = list.homes.insert(1 << 40, Home { process: 0, ticket: 1 }),
        |list| list.change = Change::Withdrawn(1 << 40),
        |list| list.version = u64::MAX,
        |list| list.members.clear(),
    ];
    for change in wrong {
        let mut list = joiner();
        change(&mut list);
        // To a worker that is there, and to one that the list itself is to introduce.
        for to in [0, 2] {
            let fault = fault(&[member(1, to, &marker(list.clone()))]);
            assert!(matches!(fault, ProtocolFault::Body(_)), "{fault}: {list:?}");
        }
    }
    // A joiner whom nobody here has asked for gives up its place at once.
    goes_on(&[member(1, 2, &marker(joiner()))]);
}

#[test]
fn a_list_of_few_members_may_follow_many_that_are_gone() {
    let speakers = BTreeSet::from([0, 1]);
    let list = List { version: 1, speakers, change: Change::Withdrawn(999), next: 1000, ..founded() };
    goes_on(&[member(1, 0, &marker(list))]);
}

#[test]
fn numbers_of_workers_are_those_that_a_run_can_have() {
    #[derive(Serialize)]
    struct Ask {
        ticket: u64,
        count: usize,
        linked: BTreeSet<usize>,
    }
    let linked = BTreeSet::from([0]);
    let ask = |count| frame(ASK, NOW, 0, 0, 0, None, &bytes(&Ask { ticket: 1, count, linked: linked.clone() }));
    let welcome = |founders: u64| frame(WELCOME, NOW, 0, 0, 0, None, &founders.to_le_bytes());
    let most = MAX_MEMBERS as u64;
    for count in [usize::MAX, 1 << 34, MAX_MEMBERS + 1, 0] {
        assert_eq!(fault(&[ask(count)]), ProtocolFault::Workers(count as u64));
        let request = Request::Admit { home: Home { process: 1, ticket: 1 }, count, linked: linked.clone() };
        let fault = fault(&[member(1, 0, &Message::Request(request))]);
        assert!(matches!(fault, ProtocolFault::Body(_)), "{fault}");
    }
    for founders in [u64::MAX, 1 << 60, 1 << 34, most + 1] {
        assert_eq!(fault(&[welcome(founders)]), ProtocolFault::Workers(founders));
    }
    goes_on(&[welcome(0), welcome(most), ask(1)]);
    let (mut seats, door) = fabric::joinable(1);
    assert!(matches!(door.ask(MAX_MEMBERS + 1), Err(JoinError::Many(many)) if many == MAX_MEMBERS + 1));
    let _worker = Worker::new(seats.remove(0));
    let founded = fabric::joinable_processes(0, MAX_MEMBERS + 1, vec![None], TAG);
    assert!(matches!(founded, Err(Error::Setup { .. })));
}

#[test]
fn a_worker_that_was_never_admitted_gets_no_answer() {
    let range = Range { dataflow: 0, sender: 0, start: 0, end: u64::MAX };
    goes_on(&[member(4_000_000_000, 0, &Message::Ask { attempt: 1, range })]);
}

/// As many capabilities as can be counted, which nobody could hand over one by one.
#[test]
fn what_a_leaver_left_is_taken_at_once() {
    for count in [i64::MAX, i64::from(u32::MAX), 0, i64::MIN] {
        // Of the output of the first operator, which the input holds.
        let part = (None, vec![bytes(&vec![(Location::from(Source::new(1, 0)), 0_u64, count)])]);
        goes_on(&[member(1, 0, &Message::Legacy(BTreeMap::from([(0, (part, Vec::new()))])))]);
    }
}
