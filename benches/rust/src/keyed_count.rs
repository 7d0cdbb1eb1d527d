//! `keyed-count`: how often each of many integer keys has come, beside the same count in timely.
//!
//! Uniform keys, all of them there before the time is taken; an epoch has 65,536 records. Ours takes Arrow blocks through a plan
//! (256 bins); timely takes vectors through an exchange into one operator with a hash map from `std`, either with a fast hash
//! (multiply and fold) or with the default SipHash. Both have up to three epochs under way, but ours has one where it has one worker
//! (`penstock_pace`: there is nobody to wait for). Both keep their workers from repeat to repeat, count the same records, and are asked for
//! the counts of all keys at the end, which must be equal.
//!
//! *changes* gives back, at the end of each epoch, the keys that it changed with their counts, and both sides add up key times
//! count, which must come to the same; the others give back nothing before the end, on both sides. Epochs are under way there as in the
//! others; in timely the blocks of one wait until those before it are counted.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, BuildHasherDefault, Hasher, RandomState};
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use crossbeam::channel::{Receiver, Sender, unbounded};
use penstock_plan::Emit;
use timely::communication::WorkerGuards;
use timely::container::CapacityContainerBuilder;
use timely::dataflow::channels::pact::{Exchange, ParallelizationContract};
use timely::dataflow::operators::{Input as _, Operator as _, Probe as _};
use timely::dataflow::{ProbeHandle, Stream};

use crate::counting::{Emitted, KeyedCount};
use crate::harness::{Better, Case, Options, Report, compare, millions_per_second};
use crate::{Numbers, block, machine};

/// Records of an epoch.
const ROWS: usize = 1 << 16;
/// Epochs of a repeat.
const EPOCHS: usize = 16;
/// Records in one message to timely, its own default: 8 KiB.
const MESSAGE: usize = 1024;
/// Epochs that timely may have under way beside the one that is sent.
const SLACK: u64 = 2;
/// Epochs that ours may have under way, each a slice of every worker: that of `penstock_pace` where several workers overlap epochs.
const OVERLAP: u64 = 3;
/// Bits of our bins: the default of a flow.
const BITS: u8 = 8;

/// Multiply and fold: about the cheapest hash whose bits are all good enough for a hash map.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Fast(u64);

impl Hasher for Fast {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(u64::from(byte)));
    }

    fn write_u64(&mut self, word: u64) {
        let product = u128::from(word ^ self.0) * 0x9E37_79B9_7F4A_7C15;
        let folded = ((product as u64) ^ (product >> 64) as u64).wrapping_mul(0xD6E8_FEB8_6659_FD93);
        self.0 = folded ^ (folded >> 32);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hash {
    Fast,
    Sip,
}

/// Runs the bench.
///
/// # Panics
/// When a worker fails, or the two sides have counted differently.
pub fn run(options: &Options, report: &mut Report) {
    use Hash::{Fast, Sip};
    let full: &[(u32, &[Hash])] = &[(10, &[Fast, Sip]), (16, &[Fast, Sip]), (20, &[Fast, Sip]), (24, &[Fast, Sip])];
    // The quick one leaves out what takes long to fill.
    let quick: &[(u32, &[Hash])] = &[(10, &[Fast]), (16, &[Fast]), (20, &[Fast, Sip]), (24, &[Fast])];
    // How it scales, where there are cores for it.
    let wide: &[(u32, &[Hash])] = &[(10, &[Fast]), (20, &[Fast]), (24, &[Fast])];
    let sizes = |workers: usize| match (options.quick, workers) {
        (false, 1 | 2) => full,
        (false, _) => wide,
        (true, 1) => quick,
        (true, _) => &quick[..3],
    };
    let more = machine::wide().filter(|_| !options.quick);
    let workers = [1, 2].into_iter().chain(more).collect::<Vec<_>>();
    let cases =
        workers.iter().map(|&workers| sizes(workers).iter().map(|(_, hashes)| hashes.len()).sum::<usize>() + 1).sum();
    for workers in workers {
        for &(bits, hashes) in sizes(workers) {
            for &hash in hashes {
                case(options, report, cases, (workers, bits, hash, Emit::Final));
            }
        }
        case(options, report, cases, (workers, 20, Fast, Emit::Update));
    }
}

fn case(options: &Options, report: &mut Report, cases: usize, of: (usize, u32, Hash, Emit)) {
    let (workers, bits, hash, emit) = of;
    let begin = Instant::now();
    let keys = 1_usize << bits;
    let mut numbers = Numbers(7).map(|number| number % keys as u64);
    let input = (0..EPOCHS).map(|_| Arc::new(numbers.by_ref().take(ROWS).collect::<Vec<u64>>())).collect::<Vec<_>>();
    let signed = |keys: &[u64]| block(&keys.iter().map(|&key| key as i64).collect::<Vec<_>>());
    let blocks = input.iter().map(|keys| signed(keys)).collect::<Vec<_>>();
    let all = (0..keys as u64).collect::<Vec<_>>();
    let mut ours = KeyedCount::start(workers, BITS, emit);
    let peer = Peer::start(workers, hash, emit);
    for some in all.chunks(ROWS) {
        ours.count(&signed(some));
        peer.count_all(&[Arc::new(some.to_vec())]);
    }
    let paired = compare(
        options.budget(cases).saturating_sub(begin.elapsed()),
        || millions_per_second(EPOCHS * ROWS, || ours.count_all(&blocks)),
        || millions_per_second(EPOCHS * ROWS, || peer.count_all(&input)),
    );
    let emitted = ours.emitted();
    if emit == Emit::Final {
        let counts = ours.finish(keys);
        let (expected, _) = peer.finish(keys);
        assert!(counts == expected, "the two sides have counted differently");
    } else {
        assert_eq!(emitted, peer.finish(keys).1, "the two sides have given back other changes");
    }
    let (what, name) = match (emit, hash) {
        (Emit::Update | Emit::New, _) => (" changes", "fast hash"),
        (Emit::Final, Hash::Fast) => ("", "fast hash"),
        (Emit::Final, Hash::Sip) => ("", "SipHash"),
    };
    let case = format!("w{workers} keys=2^{bits}{what} vs timely 0.31 {name}");
    report.case(
        Case::new(case, "M records/s", Better::Higher, paired)
            .with("rows_an_epoch", ROWS)
            .with("bins", 1 << BITS)
            .with("epochs_under_way", if workers == 1 { 1 } else { OVERLAP })
            .with("peer_epochs_under_way", SLACK + 1),
    );
}

/// What a worker of the peer has at the end: the count of each key, and how many changes it gave back.
type Counted = (Vec<(u64, u64)>, Emitted);

/// The count in timely; its workers wait for blocks without spinning.
pub(crate) struct Peer {
    blocks: Vec<Sender<Vec<Arc<Vec<u64>>>>>,
    done: Receiver<()>,
    guards: WorkerGuards<Counted>,
}

impl Peer {
    pub(crate) fn start(workers: usize, hash: Hash, emit: Emit) -> Self {
        let (blocks, receivers): (Vec<_>, Vec<_>) = (0..workers).map(|_| unbounded()).unzip();
        let receivers = Arc::new(Mutex::new(receivers.into_iter().map(Some).collect::<Vec<_>>()));
        let (finished, done) = unbounded();
        let guards = timely::execute(timely::Config::process(workers), move |worker| {
            let mine = receivers.lock().expect("nobody panics with it")[worker.index()].take();
            let mine = mine.expect("every worker takes its blocks once");
            match (hash, emit) {
                (Hash::Fast, Emit::Final) => peer(worker, &mine, &finished, count::<BuildHasherDefault<Fast>>),
                (Hash::Sip, Emit::Final) => peer(worker, &mine, &finished, count::<RandomState>),
                (Hash::Fast, Emit::Update | Emit::New) => {
                    peer(worker, &mine, &finished, changes::<BuildHasherDefault<Fast>>)
                }
                (Hash::Sip, Emit::Update | Emit::New) => peer(worker, &mine, &finished, changes::<RandomState>),
            }
        });
        Self { blocks, done, guards: guards.expect("timely starts") }
    }

    pub(crate) fn count_all(&self, blocks: &[Arc<Vec<u64>>]) {
        self.blocks.iter().for_each(|worker| worker.send(blocks.to_vec()).expect("the worker waits for it"));
        self.blocks.iter().for_each(|_| self.done.recv().expect("a worker of timely panicked"));
    }

    pub(crate) fn finish(self, keys: usize) -> (Vec<u64>, Emitted) {
        drop(self.blocks);
        let mut counts = vec![0; keys];
        let mut emitted = Emitted::default();
        for counted in self.guards.join() {
            let (of_keys, changes) = counted.expect("a worker of timely panicked");
            of_keys.into_iter().for_each(|(key, n)| counts[key as usize] += n);
            emitted.rows += changes.rows;
            emitted.sum = emitted.sum.wrapping_add(changes.sum);
        }
        (counts, emitted)
    }
}

/// One worker of the peer.
fn peer<E: Entry, H: BuildHasher + Default + 'static>(
    worker: &mut timely::worker::Worker,
    blocks: &Receiver<Vec<Arc<Vec<u64>>>>,
    done: &Sender<()>,
    operator: impl for<'scope> FnOnce(Keys<'scope>, Counts<E, H>, Rc<RefCell<Emitted>>) -> Pairs<'scope>,
) -> Counted {
    let (index, peers) = (worker.index(), worker.peers());
    let probe = ProbeHandle::new();
    let counts = Rc::new(RefCell::new(HashMap::<u64, E, H>::default()));
    let emitted = Rc::new(RefCell::new(Emitted::default()));
    let (into, given) = (counts.clone(), emitted.clone());
    let mut input = worker.dataflow::<u64, _, _>(|scope| {
        let (input, stream) = scope.new_input::<Vec<u64>>();
        operator(stream, into, given).probe_with(&probe);
        input
    });
    let mut epoch = 0;
    while let Ok(blocks) = blocks.recv() {
        for block in &blocks {
            let share = block.len().div_ceil(peers);
            let mine = block.chunks(share).nth(index).unwrap_or_default();
            for message in mine.chunks(MESSAGE) {
                input.send_batch(&mut message.to_vec());
            }
            epoch += 1;
            input.advance_to(epoch);
            while probe.less_than(&epoch.saturating_sub(SLACK)) {
                worker.step();
            }
        }
        while probe.less_than(&epoch) {
            worker.step();
        }
        done.send(()).expect("the bench waits for it");
    }
    let counted = counts.borrow_mut().iter_mut().map(|(&key, entry)| (key, *entry.n())).collect();
    (counted, *emitted.borrow())
}

/// What a key has in the peer's map: its count, and the last epoch that changed it where that is asked for.
trait Entry: Default + Copy + 'static {
    fn n(&mut self) -> &mut u64;
}

impl Entry for u64 {
    fn n(&mut self) -> &mut u64 {
        self
    }
}

impl Entry for (u64, u64) {
    fn n(&mut self) -> &mut u64 {
        &mut self.0
    }
}

type Counts<E, H> = Rc<RefCell<HashMap<u64, E, H>>>;
type Keys<'scope> = Stream<'scope, u64, Vec<u64>>;
type Pairs<'scope> = Stream<'scope, u64, Vec<(u64, u64)>>;

/// Counts, and gives back nothing.
fn count<'scope, H: BuildHasher + 'static>(
    stream: Keys<'scope>,
    counts: Counts<u64, H>,
    _: Rc<RefCell<Emitted>>,
) -> Pairs<'scope> {
    stream.unary::<CapacityContainerBuilder<_>, _, _, _>(by_key(), "count", move |_, _| {
        move |input, _| {
            let mut counts = counts.borrow_mut();
            input.for_each_time(|_, blocks| {
                blocks.flat_map(|block| block.drain(..)).for_each(|key| *counts.entry(key).or_insert(0) += 1);
            });
        }
    })
}

/// Counts, and gives back the keys of each epoch once it is complete. A count that is given back must not have seen the next epoch, so blocks of
/// later ones wait; those of the first that is not complete are counted as they come.
fn changes<'scope, H: BuildHasher + 'static>(
    stream: Keys<'scope>,
    counts: Counts<(u64, u64), H>,
    given: Rc<RefCell<Emitted>>,
) -> Pairs<'scope> {
    let mut changed = Vec::new();
    let mut waiting = BTreeMap::<u64, Vec<Vec<u64>>>::new();
    stream.unary_notify::<CapacityContainerBuilder<_>, _, _>(
        by_key(),
        "changes",
        [],
        move |input, output, notificator| {
            let mut counts = counts.borrow_mut();
            input.for_each_time(|time, blocks| {
                let waiting = waiting.entry(*time.time()).or_insert_with(|| {
                    notificator.notify_at(time.retain(output.output_index()));
                    Vec::new()
                });
                waiting.extend(blocks.map(std::mem::take));
            });
            notificator.for_each(|time, _, _| {
                let blocks = waiting.remove(time.time()).unwrap_or_default();
                apply(&mut counts, *time.time(), blocks, &mut changed);
                let (mut session, mut given) = (output.session(&time), given.borrow_mut());
                for key in changed.drain(..) {
                    let count = counts[&key].0;
                    given.add(key, count);
                    session.give((key, count));
                }
            });
            let first = waiting.first_entry().filter(|first| !notificator.frontier(0).less_than(first.key()));
            if let Some(mut first) = first {
                let blocks = std::mem::take(first.get_mut());
                apply(&mut counts, *first.key(), blocks, &mut changed);
            }
        },
    )
}

/// Counts the keys of an epoch, and notes those that are new in it.
fn apply<H: BuildHasher>(
    counts: &mut HashMap<u64, (u64, u64), H>,
    now: u64,
    blocks: Vec<Vec<u64>>,
    changed: &mut Vec<u64>,
) {
    for key in blocks.into_iter().flatten() {
        let (n, epoch) = counts.entry(key).or_insert((0, u64::MAX));
        *n += 1;
        if std::mem::replace(epoch, now) != now {
            changed.push(key);
        }
    }
}

fn by_key() -> impl ParallelizationContract<u64, Vec<u64>> {
    Exchange::new(|key: &u64| *key)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Epochs are under way beside each other, and each gives back what its keys had at its end.
    #[test]
    fn changes_of_the_peer_have_not_seen_the_next_epoch() {
        const EPOCHS: u64 = 40;
        let blocks: Vec<_> = (0..EPOCHS).map(|_| Arc::new((0..100).collect::<Vec<u64>>())).collect();
        let mut wanted = Emitted::default();
        (1..=EPOCHS).for_each(|count| (0..100).for_each(|key| wanted.add(key, count)));
        for workers in [1, 2, 3] {
            let peer = Peer::start(workers, Hash::Fast, Emit::Update);
            peer.count_all(&blocks[..30]);
            peer.count_all(&blocks[30..]);
            let (counts, emitted) = peer.finish(100);
            assert_eq!((counts, emitted), (vec![EPOCHS; 100], wanted), "w{workers}");
        }
    }
}
