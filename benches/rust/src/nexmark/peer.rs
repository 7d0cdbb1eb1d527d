//! NEXMark in native timely: the peer of `nexmark`.
//!
//! Each query says what the flow of ours says, row for row: q4 an average per category at the end of the input, q5 every window that holds a bid, with
//! all ties, q7 all ties, q8 a row for each auction. Events are plain structs in blocks of 256 (8 KiB of bids, timely's default) that are
//! moved into the inputs, worker by worker; maps are hash maps with the fast hash of `keyed-count`. State is dropped as soon as event time
//! allows, which is the timestamp of the dataflow.

use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, VecDeque};
use std::hash::BuildHasherDefault;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use timely::dataflow::channels::pact::{Exchange, Pipeline};
use timely::dataflow::operators::vec::{Filter, Map};
use timely::dataflow::operators::{Capability, Input as _, Operator as _, Probe as _};
use timely::dataflow::{ProbeHandle, StreamVec};
use timely::progress::frontier::MutableAntichain;
use timely::synchronization::Barrier;

use super::events::{Answer, Auction, Bid, Events, Person, Plain, word};
use crate::keyed_count::Fast;

/// Epochs that may be under way.
const SLACK: usize = 2;
/// Records of a block.
const BLOCK: usize = 256;

type FoldMap<K, V> = HashMap<K, V, BuildHasherDefault<Fast>>;
type Rows<'s, R> = StreamVec<'s, u64, R>;

/// What is asked, with the lengths of windows in ms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Query {
    Q1,
    Q2,
    Q3,
    Q4,
    Q5 { size: i64, every: i64 },
    Q7 { size: i64 },
    Q8 { size: i64 },
}

impl Query {
    /// Which tables it reads: people, auctions, bids.
    pub(crate) fn reads(self) -> [bool; 3] {
        match self {
            Self::Q1 | Self::Q2 | Self::Q5 { .. } | Self::Q7 { .. } => [false, false, true],
            Self::Q3 | Self::Q8 { .. } => [true, true, false],
            Self::Q4 => [false, true, true],
        }
    }
}

/// Seconds from the first event to the last answer, and the answer.
///
/// # Panics
/// When a worker of timely does.
pub(crate) fn run(query: Query, workers: usize, epochs: &Arc<Vec<Plain>>, of: &Events) -> (f64, Answer) {
    let (epochs, begin, epoch_ms) = (epochs.clone(), of.begin as u64, of.epoch_ms as u64);
    let guards = timely::execute(timely::Config::process(workers), move |worker| {
        let (index, peers) = (worker.index(), worker.peers());
        let mine = epochs.iter().map(|epoch| share(epoch, index, peers)).collect::<Vec<_>>();
        let probe = ProbeHandle::new();
        let (mut people, mut auctions, mut bids, answer) = worker.dataflow::<u64, _, _>(|scope| {
            let reads = query.reads();
            let (people_in, people) = reads[0].then(|| scope.new_input::<Vec<Person>>()).unzip();
            let (auctions_in, auctions) = reads[1].then(|| scope.new_input::<Vec<Auction>>()).unzip();
            let (bids_in, bids) = reads[2].then(|| scope.new_input::<Vec<Bid>>()).unzip();
            let answer = dataflow(query, people, auctions, bids, &probe);
            (people_in, auctions_in, bids_in, answer)
        });
        Barrier::new(worker).wait();
        let start = Instant::now();
        for (at, blocks) in mine.into_iter().enumerate() {
            let end = |epochs: usize| begin + epochs as u64 * epoch_ms;
            if let Some(input) = &mut people {
                blocks.0.into_iter().for_each(|mut block| input.send_batch(&mut block));
                input.advance_to(end(at + 1));
            }
            if let Some(input) = &mut auctions {
                blocks.1.into_iter().for_each(|mut block| input.send_batch(&mut block));
                input.advance_to(end(at + 1));
            }
            if let Some(input) = &mut bids {
                blocks.2.into_iter().for_each(|mut block| input.send_batch(&mut block));
                input.advance_to(end(at + 1));
            }
            while at + 1 > SLACK && probe.less_than(&end(at + 1 - SLACK)) {
                worker.step();
            }
        }
        drop((people, auctions, bids));
        while !probe.done() {
            worker.step();
        }
        (start.elapsed().as_secs_f64(), answer())
    });
    let done = guards.expect("timely starts").join().into_iter().map(|done| done.expect("a worker of timely panicked"));
    done.fold((0.0, Answer::default()), |(most, sum), (seconds, answer)| (f64::max(most, seconds), sum.plus(answer)))
}

type Blocks<T> = Vec<Vec<T>>;

/// A worker's part of an epoch, in blocks of its own.
fn share(epoch: &Plain, index: usize, peers: usize) -> (Blocks<Person>, Blocks<Auction>, Blocks<Bid>) {
    fn part<T: Clone>(rows: &[T], index: usize, peers: usize) -> Blocks<T> {
        let mine = rows.chunks(rows.len().div_ceil(peers).max(1)).nth(index).unwrap_or_default();
        mine.chunks(BLOCK).map(<[T]>::to_vec).collect()
    }
    (part(&epoch.people, index, peers), part(&epoch.auctions, index, peers), part(&epoch.bids, index, peers))
}

/// A row of an answer.
trait Row: Clone + 'static {
    fn add_to(&self, answer: &mut Answer);
}

impl<const N: usize> Row for [i64; N] {
    fn add_to(&self, answer: &mut Answer) {
        answer.add(self.iter().map(|&cell| cell as u64));
    }
}

impl Row for (String, String, String, i64) {
    fn add_to(&self, answer: &mut Answer) {
        answer.add([word(&self.0), word(&self.1), word(&self.2), self.3 as u64]);
    }
}

/// A person who sells: the window, who, and what.
impl Row for ([i64; 2], i64, String, [i64; 2]) {
    fn add_to(&self, answer: &mut Answer) {
        let ([start, end], id, name, [auction, reserve]) = self;
        answer.add([*start as u64, *end as u64, *id as u64, word(name), *auction as u64, *reserve as u64]);
    }
}

type Asked = Box<dyn Fn() -> Answer>;

fn dataflow<'s>(
    query: Query,
    people: Option<Rows<'s, Person>>,
    auctions: Option<Rows<'s, Auction>>,
    bids: Option<Rows<'s, Bid>>,
    probe: &ProbeHandle<u64>,
) -> Asked {
    let reads = "a query has what it reads";
    match query {
        Query::Q1 => {
            let rows =
                bids.expect(reads).map(|bid| [bid.auction, bid.bidder, (bid.price * 89).div_euclid(100), bid.at]);
            kept(rows, probe)
        }
        Query::Q2 => {
            kept(bids.expect(reads).filter(|bid| bid.auction % 123 == 0).map(|bid| [bid.auction, bid.price]), probe)
        }
        Query::Q3 => kept(q3(people.expect(reads), auctions.expect(reads)), probe),
        Query::Q4 => kept(q4(auctions.expect(reads), bids.expect(reads)), probe),
        Query::Q5 { size, every } => kept(q5(bids.expect(reads), size, every), probe),
        Query::Q7 { size } => kept(q7(bids.expect(reads), size), probe),
        Query::Q8 { size } => kept(q8(people.expect(reads), auctions.expect(reads), size), probe),
    }
}

/// Keeps what comes out, as we do; the answer is made of it when the time has been taken.
fn kept<R: Row>(rows: Rows<'_, R>, probe: &ProbeHandle<u64>) -> Asked {
    let all = Rc::new(RefCell::new(Vec::<Vec<R>>::new()));
    let into = all.clone();
    rows.unary(Pipeline, "kept", move |_, _| {
        move |input, output| {
            input.for_each_time(|time, blocks| {
                let _ = output.session(&time);
                into.borrow_mut().extend(blocks.map(std::mem::take));
            });
        }
    })
    .container::<Vec<()>>()
    .probe_with(probe);
    Box::new(move || {
        let mut answer = Answer::default();
        all.borrow().iter().flatten().for_each(|row| row.add_to(&mut answer));
        answer
    })
}

/// The frontier as event time; the greatest there is when the input has ended.
fn low(frontier: &MutableAntichain<u64>) -> i64 {
    frontier.frontier().first().map_or(i64::MAX, |&time| time as i64)
}

/// Lets go of what is not needed before `done`.
fn lower(capability: &mut Option<Capability<u64>>, done: i64) {
    if done == i64::MAX {
        *capability = None;
    } else if let Some(capability) = capability.as_mut().filter(|capability| *capability.time() < done as u64) {
        capability.downgrade(&(done as u64));
    }
}

fn q3<'s>(people: Rows<'s, Person>, auctions: Rows<'s, Auction>) -> Rows<'s, (String, String, String, i64)> {
    let auctions = auctions.filter(|auction| auction.category == 10);
    let people = people.filter(|person| matches!(person.state.as_str(), "OR" | "ID" | "CA"));
    let by_seller = Exchange::new(|auction: &Auction| auction.seller as u64);
    let by_id = Exchange::new(|person: &Person| person.id as u64);
    auctions
        .binary(people, by_seller, by_id, "q3", |_, _| {
            let mut sold = FoldMap::<i64, Vec<i64>>::default();
            let mut known = FoldMap::<i64, Person>::default();
            move |auctions, people, output| {
                auctions.for_each_time(|time, blocks| {
                    let mut session = output.session(&time);
                    for auction in blocks.flat_map(|block| block.drain(..)) {
                        if let Some(person) = known.get(&auction.seller) {
                            let Person { name, city, state, .. } = person.clone();
                            session.give((name, city, state, auction.id));
                        }
                        sold.entry(auction.seller).or_default().push(auction.id);
                    }
                });
                people.for_each_time(|time, blocks| {
                    let mut session = output.session(&time);
                    for person in blocks.flat_map(|block| block.drain(..)) {
                        for &id in sold.get(&person.id).into_iter().flatten() {
                            let Person { name, city, state, .. } = person.clone();
                            session.give((name, city, state, id));
                        }
                        known.insert(person.id, person);
                    }
                });
            }
        })
        .container::<Vec<_>>()
}

/// An auction as long as it is open: itself once it was seen, its best valid bid, and bids that came before it.
#[derive(Default)]
struct Open {
    auction: Option<Auction>,
    best: Option<i64>,
    early: Vec<Bid>,
}

impl Open {
    fn bid(&mut self, bid: &Bid) {
        if let Some(auction) = &self.auction
            && bid.price >= auction.reserve
            && (auction.at..auction.expires).contains(&bid.at)
        {
            self.best = self.best.max(Some(bid.price));
        }
    }
}

/// Auctions that close with a bid: category and price.
fn closed<'s>(auctions: Rows<'s, Auction>, bids: Rows<'s, Bid>) -> Rows<'s, (i64, i64)> {
    let by_auction = Exchange::new(|bid: &Bid| bid.auction as u64);
    let by_id = Exchange::new(|auction: &Auction| auction.id as u64);
    bids.binary_frontier(auctions, by_auction, by_id, "closed", |_, _| {
        let mut open = FoldMap::<i64, Open>::default();
        let mut closes = BinaryHeap::<Reverse<(i64, i64)>>::new();
        let mut early = BinaryHeap::<Reverse<(i64, i64)>>::new();
        let mut capability: Option<Capability<u64>> = None;
        move |(bids, bids_end), (auctions, auctions_end), output| {
            auctions.for_each_time(|time, blocks| {
                for auction in blocks.flat_map(|block| block.drain(..)) {
                    if capability.as_ref().is_none_or(|capability| capability.time() > time.time()) {
                        capability = Some(time.retain(0));
                    }
                    closes.push(Reverse((auction.expires, auction.id)));
                    let entry = open.entry(auction.id).or_default();
                    entry.auction = Some(auction);
                    let before = std::mem::take(&mut entry.early);
                    before.iter().for_each(|bid| entry.bid(bid));
                }
            });
            bids.for_each_time(|_, blocks| {
                for bid in blocks.flat_map(|block| block.drain(..)) {
                    let entry = open.entry(bid.auction).or_default();
                    if entry.auction.is_some() {
                        entry.bid(&bid);
                    } else {
                        entry.early.push(bid);
                        early.push(Reverse((bid.at, bid.auction)));
                    }
                }
            });
            let done = low(bids_end).min(low(auctions_end));
            if let Some(capability) = &capability {
                let mut session = output.session(capability);
                while let Some(&Reverse((_, id))) = closes.peek().filter(|Reverse((at, _))| *at < done) {
                    closes.pop();
                    if let Some(Open { auction: Some(auction), best: Some(price), .. }) = open.remove(&id) {
                        session.give((auction.category, price));
                    }
                }
            }
            if closes.is_empty() {
                capability = None;
            }
            lower(&mut capability, done);
            while let Some(&Reverse((at, id))) = early.peek().filter(|Reverse((at, _))| *at < done) {
                early.pop();
                if let Some(entry) = open.get_mut(&id).filter(|entry| entry.auction.is_none()) {
                    entry.early.retain(|bid| bid.at > at);
                    if entry.early.is_empty() {
                        open.remove(&id);
                    }
                }
            }
        }
    })
    .container::<Vec<_>>()
}

fn q4<'s>(auctions: Rows<'s, Auction>, bids: Rows<'s, Bid>) -> Rows<'s, [i64; 4]> {
    let by_category = Exchange::new(|closed: &(i64, i64)| closed.0 as u64);
    closed(auctions, bids)
        .unary_frontier(by_category, "q4", |capability, _| {
            let mut capability = Some(capability);
            let mut sums = FoldMap::<i64, (i64, i64)>::default();
            move |(input, end), output| {
                input.for_each_time(|_, blocks| {
                    for (category, price) in blocks.flat_map(|block| block.drain(..)) {
                        let (sum, n) = sums.entry(category).or_default();
                        (*sum, *n) = (*sum + price, *n + 1);
                    }
                });
                let done = low(end);
                if let Some(capability) = capability.as_ref().filter(|_| done == i64::MAX) {
                    let mut session = output.session(capability);
                    sums.drain().for_each(|(category, (sum, n))| session.give([category, sum, n, sum / n]));
                }
                lower(&mut capability, done);
            }
        })
        .container::<Vec<_>>()
}

/// Bids of an auction in a slice, or in a window.
type Counts = FoldMap<i64, i64>;

fn q5(bids: Rows<'_, Bid>, size: i64, every: i64) -> Rows<'_, [i64; 4]> {
    /// An auction with as many bids as any here, of the window that ends with a slice.
    #[derive(Clone, Copy, Serialize, Deserialize)]
    struct Hot {
        slice: i64,
        auction: i64,
        n: i64,
    }
    let by_auction = Exchange::new(|bid: &(i64, i64)| bid.0 as u64);
    let by_slice = Exchange::new(|hot: &Hot| hot.slice as u64);
    bids.map(move |bid| (bid.auction, bid.at.div_euclid(every)))
        .unary_frontier(by_auction, "q5 counts", |capability, _| {
            let mut capability = Some(capability);
            let mut slices = BTreeMap::<i64, Counts>::new();
            let (mut window, mut counts) = (VecDeque::<(i64, Counts)>::new(), Counts::default());
            let mut next = 0;
            move |(input, end), output| {
                input.for_each_time(|_, blocks| {
                    for block in blocks {
                        // Events come in order: one look at the slices for each run of one.
                        for same in block.chunk_by(|a, b| a.1 == b.1) {
                            let slice = slices.entry(same[0].1).or_default();
                            same.iter().for_each(|(auction, _)| *slice.entry(*auction).or_insert(0) += 1);
                        }
                        block.clear();
                    }
                });
                let done = low(end);
                // Slice after slice while there are any, and then until the window has passed the last.
                loop {
                    let first = slices.first_key_value().map(|(slice, _)| *slice);
                    let slice = if window.is_empty() { first } else { Some(next) };
                    let Some(slice) = slice else { break };
                    if (slice + 1) * every > done {
                        break;
                    }
                    if let Some(new) = slices.remove(&slice) {
                        new.iter().for_each(|(&auction, &n)| *counts.entry(auction).or_insert(0) += n);
                        window.push_back((slice, new));
                    }
                    while window.front().is_some_and(|(first, _)| first + size / every <= slice) {
                        for (auction, n) in window.pop_front().expect("there is one").1 {
                            if let std::collections::hash_map::Entry::Occupied(mut entry) = counts.entry(auction) {
                                *entry.get_mut() -= n;
                                if *entry.get() == 0 {
                                    entry.remove();
                                }
                            }
                        }
                    }
                    if let (Some(&most), Some(capability)) = (counts.values().max(), &capability) {
                        let mut session = output.session(capability);
                        let hot = counts.iter().filter(|(_, n)| **n == most);
                        hot.for_each(|(&auction, &n)| session.give(Hot { slice, auction, n }));
                    }
                    next = slice + 1;
                }
                lower(&mut capability, done);
            }
        })
        .container::<Vec<Hot>>()
        .unary_frontier(by_slice, "q5 most", move |capability, _| {
            let mut capability = Some(capability);
            let mut windows = BTreeMap::<i64, Vec<Hot>>::new();
            move |(input, end), output| {
                input.for_each_time(|_, blocks| {
                    blocks
                        .flat_map(|block| block.drain(..))
                        .for_each(|hot| windows.entry(hot.slice).or_default().push(hot));
                });
                let done = low(end);
                while let Some(window) = windows.first_entry().filter(|window| (window.key() + 1) * every <= done) {
                    let (slice, all) = window.remove_entry();
                    let most = all.iter().map(|hot| hot.n).max();
                    let end = (slice + 1) * every;
                    if let Some(capability) = &capability {
                        let mut session = output.session(capability);
                        let hot = all.iter().filter(|hot| Some(hot.n) == most);
                        hot.for_each(|hot| session.give([end - size, end, hot.auction, hot.n]));
                    }
                }
                lower(&mut capability, done);
            }
        })
        .container::<Vec<_>>()
}

/// The best bids of windows.
#[derive(Default)]
struct Best(BTreeMap<i64, Vec<Bid>>);

impl Best {
    fn add(&mut self, window: i64, bid: &Bid) {
        let best = self.0.entry(window).or_default();
        match best.first().map_or(std::cmp::Ordering::Greater, |first| bid.price.cmp(&first.price)) {
            std::cmp::Ordering::Less => {}
            std::cmp::Ordering::Equal => best.push(*bid),
            std::cmp::Ordering::Greater => {
                best.clear();
                best.push(*bid);
            }
        }
    }

    /// Those of the first window, where it has ended.
    fn ended(&mut self, size: i64, done: i64) -> Option<(i64, Vec<Bid>)> {
        // (window + 1) * size <= done, without an overflow.
        Some(self.0.first_entry().filter(|window| *window.key() < done.div_euclid(size))?.remove_entry())
    }
}

fn q7(bids: Rows<'_, Bid>, size: i64) -> Rows<'_, [i64; 6]> {
    let by_window = Exchange::new(|bid: &(i64, Bid)| bid.0 as u64);
    bids.unary_frontier(Pipeline, "q7 here", move |capability, _| {
        let mut capability = Some(capability);
        let mut best = Best::default();
        move |(input, end), output| {
            input.for_each_time(|_, blocks| {
                for block in blocks {
                    block.iter().for_each(|bid| best.add(bid.at.div_euclid(size), bid));
                    block.clear();
                }
            });
            let done = low(end);
            while let Some((window, bids)) = best.ended(size, done) {
                if let Some(capability) = &capability {
                    let mut session = output.session(capability);
                    bids.into_iter().for_each(|bid| session.give((window, bid)));
                }
            }
            lower(&mut capability, done);
        }
    })
    .container::<Vec<(i64, Bid)>>()
    .unary_frontier(by_window, "q7 of all", move |capability, _| {
        let mut capability = Some(capability);
        let mut best = Best::default();
        move |(input, end), output| {
            input.for_each_time(|_, blocks| {
                blocks.flat_map(|block| block.drain(..)).for_each(|(window, bid)| best.add(window, &bid));
            });
            let done = low(end);
            while let Some((window, bids)) = best.ended(size, done) {
                let start = window * size;
                if let Some(capability) = &capability {
                    let mut session = output.session(capability);
                    let row = |bid: Bid| [start, start + size, bid.price, bid.auction, bid.bidder, bid.at];
                    bids.into_iter().for_each(|bid| session.give(row(bid)));
                }
            }
            lower(&mut capability, done);
        }
    })
    .container::<Vec<_>>()
}

fn q8<'s>(
    people: Rows<'s, Person>,
    auctions: Rows<'s, Auction>,
    size: i64,
) -> Rows<'s, ([i64; 2], i64, String, [i64; 2])> {
    let by_id = Exchange::new(|person: &(i64, i64, String)| person.0 as u64);
    let by_seller = Exchange::new(|auction: &[i64; 4]| auction[0] as u64);
    let people = people.map(move |person| (person.id, person.at.div_euclid(size), person.name));
    let auctions = auctions.map(move |sold| [sold.seller, sold.at.div_euclid(size), sold.id, sold.reserve]);
    people
        .binary_frontier(auctions, by_id, by_seller, "q8", move |capability, _| {
            let mut capability = Some(capability);
            // By window: names by id, and what is sold by whom.
            let mut windows = BTreeMap::<i64, (FoldMap<i64, String>, Vec<[i64; 4]>)>::new();
            move |(people, people_end), (auctions, auctions_end), output| {
                people.for_each_time(|_, blocks| {
                    for (id, window, name) in blocks.flat_map(|block| block.drain(..)) {
                        windows.entry(window).or_default().0.insert(id, name);
                    }
                });
                auctions.for_each_time(|_, blocks| {
                    for sold in blocks.flat_map(|block| block.drain(..)) {
                        windows.entry(sold[1]).or_default().1.push(sold);
                    }
                });
                let done = low(people_end).min(low(auctions_end));
                while let Some(window) = windows.first_entry().filter(|window| *window.key() < done.div_euclid(size)) {
                    let (window, (names, sold)) = window.remove_entry();
                    if let Some(capability) = &capability {
                        let mut session = output.session(capability);
                        let bounds = [window * size, (window + 1) * size];
                        for [seller, _, id, reserve] in sold {
                            if let Some(name) = names.get(&seller) {
                                session.give((bounds, seller, name.clone(), [id, reserve]));
                            }
                        }
                    }
                }
                lower(&mut capability, done);
            }
        })
        .container::<Vec<_>>()
}
