//! Random graphs with random nesting: several workers in one thread, fed and stepped in an order that a seed decides, with messages
//! that take as long as it wants, do what one worker does alone.
//!
//! Scopes lie in scopes to any depth, with streams that enter and leave, loops, notifications, delays, operators with several inputs
//! and outputs and with inputs that lead nowhere. Every input of every operator checks that its frontier never goes back and that no
//! block comes from behind it; some inputs of the program stay behind the others, so that much news is held back.
//!
//! `PENSTOCK_SEEDS=10000 cargo test -p penstock-dataflow --test all graphs` tries more seeds than the usual 200; a seed that fails says how
//! to run it again.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;

use penstock_dataflow::{
    Exchange, Frontiers, Input, InputHandle, OperatorBuilder, Output, Pact, Pipeline, Scope, Stream, Worker, fabric,
};
use penstock_progress::antichain::Antichain;
use penstock_progress::capability::Capability;
use penstock_progress::nest::Nest;
use penstock_progress::notificator::Notificator;
use penstock_progress::timestamp::{PathSummary, Product, Refines, Timestamp};

struct Random(u64);

fn mix(mut mixed: u64) -> u64 {
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
}

/// Times of scopes of any depth.
trait Level: Timestamp {
    /// Those of a scope within.
    type Inner: Level + Refines<Self>;
    /// One round, or epoch, more: of this scope, or (by the number) of one around it.
    fn advance(number: usize) -> Self::Summary;
}

impl Level for u64 {
    type Inner = Product<u64, u64>;
    fn advance(_: usize) -> u64 {
        1
    }
}

impl Level for Product<u64, u64> {
    type Inner = Nest<true>;
    fn advance(number: usize) -> Self {
        if number.is_multiple_of(3) { Product::new(1, 0) } else { Product::new(0, 1) }
    }
}

impl Level for Nest<true> {
    type Inner = Nest<false>;
    fn advance(number: usize) -> Self {
        outward(number)
    }
}

impl Level for Nest<false> {
    type Inner = Nest<true>;
    fn advance(number: usize) -> Self {
        outward(number)
    }
}

/// Such times have three coordinates at least.
fn outward<const ODD: bool>(number: usize) -> Nest<ODD> {
    let mut coordinates = vec![0; 3];
    coordinates[[0, 0, 0, 1, 1, 2][number % 6]] = 1;
    Nest::from(coordinates)
}

/// A value, and how many rounds of loops it may still go.
type Row = (u64, u64);
type Rows = Vec<Row>;
/// What came to an end of the graph: which end, when, what.
type Seen = Rc<RefCell<Vec<(usize, String, u64)>>>;

/// What the inputs of one operator have promised.
struct Watch<T> {
    frontiers: Vec<Antichain<T>>,
}

impl<T: Timestamp> Watch<T> {
    fn new(inputs: usize) -> Self {
        Watch { frontiers: vec![Antichain::from_elem(T::minimum()); inputs] }
    }

    /// The frontiers only move on.
    fn look(&mut self, frontiers: &Frontiers<'_, T>) {
        for (input, known) in self.frontiers.iter_mut().enumerate() {
            let now: Antichain<T> = frontiers.frontier(input).iter().cloned().collect();
            assert!(now.elements().iter().all(|time| known.less_equal(time)), "{known:?} went back to {now:?}");
            *known = now;
        }
    }

    /// A block is not behind them.
    fn block(&self, input: usize, time: &T) {
        let known = &self.frontiers[input];
        assert!(known.less_equal(time), "a block at {time:?} after the frontier moved to {known:?}");
    }
}

/// Makes the graph that its random numbers say, the same on every worker.
struct Maker {
    random: Random,
    /// How many operators may still be made.
    left: usize,
    depth: usize,
    deepest: usize,
    ends: usize,
    seen: Seen,
}

fn by_value<T: Timestamp>(peers: usize) -> impl Pact<T, Rows> {
    Exchange::new(move |_: &T, rows: Rows, route: &mut dyn FnMut(usize, Rows)| {
        let mut parts: BTreeMap<usize, Rows> = BTreeMap::new();
        for row in rows {
            parts.entry((key(row.0) as usize * 7 + 3) % peers).or_default().push(row);
        }
        parts.into_iter().for_each(|(worker, part)| route(worker, part));
    })
}

fn key(value: u64) -> u64 {
    value % 5
}

impl Maker {
    fn salt(&mut self) -> u64 {
        self.random.next()
    }

    /// An operator with two inputs (of which the second may be the first) whose logic sees rows one by one; their time is kept, or
    /// moves on.
    fn rows<T: Level>(
        &mut self,
        one: &Stream<T, Rows>,
        two: Option<&Stream<T, Rows>>,
        each: impl Fn(usize, Row) -> Option<Row> + 'static,
    ) -> Stream<T, Rows> {
        let scope = one.scope().clone();
        let peers = scope.peers();
        let mut builder = OperatorBuilder::new(&scope, "rows");
        let add = |builder: &mut OperatorBuilder<T>, stream: &Stream<T, Rows>, exchanged: bool| match exchanged {
            true => builder.input(stream, by_value(peers)),
            false => builder.input(stream, Pipeline),
        };
        let mut inputs: Vec<Input<T, Rows>> = vec![add(&mut builder, one, self.random.below(2) == 0)];
        if let Some(two) = two {
            inputs.push(add(&mut builder, two, self.random.below(2) == 0));
        }
        let (declared, advance) = (self.random.below(4) == 0, T::advance(self.random.below(12)));
        let (mut output, stream) = match declared {
            true => builder.output_with(vec![Antichain::from_elem(advance); inputs.len()]),
            false => builder.output(),
        };
        // Later than declared.
        let (delayed, delay) = (self.random.below(4) == 0, T::advance(self.random.below(12)));
        let mut watch = Watch::new(inputs.len());
        builder.build(move |_| {
            move |frontiers| {
                watch.look(frontiers);
                for (index, input) in inputs.iter_mut().enumerate() {
                    while let Some((capability, rows)) = input.next() {
                        watch.block(index, capability.time());
                        let rows: Rows = rows.into_iter().filter_map(|row| each(index, row)).collect();
                        let mut held = capability.retain();
                        if delayed {
                            let later = delay.results_in(held.time()).ok_or("beyond all times")?;
                            held.downgrade(&later)?;
                        }
                        if !rows.is_empty() {
                            output.session(&held).give(rows);
                        }
                    }
                }
                Ok(())
            }
        });
        stream
    }

    /// Sums by key and time, sent once nothing more can come for that; with a gate, when nothing at that time can come there either.
    fn sums<T: Level>(&mut self, stream: &Stream<T, Rows>, gate: Option<&Stream<T, Rows>>) -> Stream<T, Rows> {
        let scope = stream.scope().clone();
        let salt = self.salt();
        let mut builder = OperatorBuilder::new(&scope, "sums");
        let mut input = builder.input(stream, by_value(scope.peers()));
        let mut gates: Vec<Input<T, Rows>> = gate.iter().map(|gate| builder.input(gate, Pipeline)).collect();
        // No path leads from the gate to the output.
        let mut paths = vec![Antichain::from_elem(T::Summary::default())];
        paths.extend(gates.iter().map(|_| Antichain::new()));
        let (mut output, sums) = builder.output_with(paths);
        let mut watch = Watch::new(1 + gates.len());
        let mut notificator = Notificator::new();
        let mut open: BTreeMap<T, BTreeMap<u64, Row>> = BTreeMap::new();
        let mut closed: BTreeSet<T> = BTreeSet::new();
        builder.build(move |_| {
            move |frontiers| {
                watch.look(frontiers);
                gates.iter_mut().for_each(|gate| gate.for_each(|capability, _| watch.block(1, capability.time())));
                while let Some((capability, rows)) = input.next() {
                    let time = capability.time();
                    watch.block(0, time);
                    assert!(!closed.contains(time), "a block at {time:?}, which was announced");
                    if !open.contains_key(time) {
                        notificator.notify_at(capability.retain());
                    }
                    let sums = open.entry(time.clone()).or_default();
                    for (value, fuel) in rows {
                        let (sum, least) = sums.entry(key(value)).or_insert((0, u64::MAX));
                        (*sum, *least) = (sum.wrapping_add(mix(value)), fuel.min(*least));
                    }
                }
                while let Some(capability) = notificator.next(&frontiers.all()) {
                    let time = capability.time().clone();
                    assert!(closed.insert(time.clone()), "{time:?} was announced twice");
                    let sums = open.remove(&time).ok_or("announced without a request")?;
                    let rows = sums.into_values().map(|(sum, fuel)| (mix(sum ^ salt), fuel)).collect();
                    output.session(&capability).give(rows);
                }
                Ok(())
            }
        });
        sums
    }

    /// Even values and odd ones.
    fn split<T: Level>(&mut self, stream: &Stream<T, Rows>) -> [Stream<T, Rows>; 2] {
        let mut builder = OperatorBuilder::new(stream.scope(), "split");
        let mut input = builder.input(stream, Pipeline);
        let (mut even, evens) = builder.output::<Rows>();
        let (mut odd, odds) = builder.output::<Rows>();
        let mut watch = Watch::new(1);
        builder.build(move |_| {
            move |frontiers| {
                watch.look(frontiers);
                while let Some((capability, rows)) = input.next() {
                    watch.block(0, capability.time());
                    let (some, others): (Rows, Rows) = rows.into_iter().partition(|row| row.0 % 2 == 0);
                    give(&mut even, &capability.retain_for(0), some);
                    give(&mut odd, &capability.retain_for(1), others);
                }
                Ok(())
            }
        });
        [evens, odds]
    }

    /// An end of the graph.
    fn end<T: Level>(&mut self, stream: &Stream<T, Rows>) {
        let (end, seen) = (self.ends, self.seen.clone());
        self.ends += 1;
        let mut watch = Watch::new(1);
        stream.sink(Pipeline, "end", move |input, frontiers| {
            watch.look(frontiers);
            while let Some((capability, rows)) = input.next() {
                watch.block(0, capability.time());
                let time = format!("{:?}", capability.time());
                seen.borrow_mut().extend(rows.into_iter().map(|row| (end, time.clone(), row.0)));
            }
            Ok(())
        });
    }

    /// Makes some operators behind these streams, and scopes and loops of more; what is left open at the end is returned.
    fn grow<T: Level>(&mut self, scope: &Scope<T>, mut open: Vec<Stream<T, Rows>>) -> Vec<Stream<T, Rows>> {
        for _ in 0..1 + self.random.below(4) {
            if self.left == 0 {
                break;
            }
            self.left -= 1;
            let one = open[self.random.below(open.len())].clone();
            let two = open[self.random.below(open.len())].clone();
            let salt = self.salt();
            match self.random.below(10) {
                0 | 1 => open.push(self.rows(&one, None, move |_, (value, fuel)| Some((mix(value ^ salt), fuel)))),
                // Every other row, so that what is used twice does not become more and more.
                2 => open.push(self.rows(&one, Some(&two), move |input, (value, fuel)| {
                    let value = mix(value ^ salt ^ input as u64);
                    value.is_multiple_of(2).then_some((value, fuel))
                })),
                3 => open.push(self.sums(&one, None)),
                4 => open.push(self.sums(&one, Some(&two))),
                5 => open.extend(self.split(&one)),
                6 | 7 => open.push(self.turn(scope, &one)),
                _ => open.extend(self.nest(scope, &one, &two)),
            }
        }
        open
    }

    /// A loop: rows go round while they may, and each round is seen behind it.
    fn turn<T: Level>(&mut self, scope: &Scope<T>, stream: &Stream<T, Rows>) -> Stream<T, Rows> {
        let (handle, back) = scope.feedback::<Rows>(T::advance(self.random.below(12)));
        let all = stream.concat(&back);
        let body = self.grow(scope, vec![all]);
        let chosen = body[self.random.below(body.len())].clone();
        let salt = self.salt();
        let again = self.rows(&chosen, None, move |_, (value, fuel)| Some((mix(value ^ salt), fuel.checked_sub(1)?)));
        again.connect_loop(handle);
        self.rows(&chosen, None, |_, (value, fuel)| value.is_multiple_of(2).then_some((value, fuel)))
    }

    /// A scope that one or two streams enter; some of what is in it leaves, some ends there.
    fn nest<T: Level>(
        &mut self,
        scope: &Scope<T>,
        one: &Stream<T, Rows>,
        two: &Stream<T, Rows>,
    ) -> Vec<Stream<T, Rows>> {
        if self.depth == 4 {
            return vec![self.sums(one, Some(two))];
        }
        self.depth += 1;
        self.deepest = self.deepest.max(self.depth);
        let leaving = scope.nested::<T::Inner, _>("nest", |inner| {
            let mut streams = vec![one.enter(inner)];
            if self.random.below(2) == 0 {
                streams.push(two.enter(inner));
            }
            if self.random.below(2) == 0 {
                streams = vec![self.turn(inner, &streams[0])];
            }
            let mut streams = self.grow(inner, streams);
            let last = streams.split_off(streams.len() - 1);
            if let Some(ends) = streams.pop() {
                self.end(&ends);
            }
            last.iter().map(|stream| stream.leave(scope)).collect()
        });
        self.depth -= 1;
        leaving
    }
}

fn give<T: Level>(output: &mut Output<T, Rows>, capability: &Capability<T>, rows: Rows) {
    if !rows.is_empty() {
        output.session(capability).give(rows);
    }
}

/// What is fed: by input and epoch the blocks, each for one worker.
type Feed = Vec<Vec<Vec<(usize, Rows)>>>;

const EPOCHS: usize = 5;

struct Source {
    handle: Option<InputHandle<u64, Rows>>,
    /// Blocks of its epoch that were fed.
    fed: usize,
    /// How many of a hundred chances to go on it takes.
    pace: usize,
}

struct Member {
    worker: Worker,
    inputs: Vec<Source>,
    seen: Seen,
}

fn member(seed: u64, mut worker: Worker, inputs: usize) -> (Member, usize) {
    let seen = Seen::default();
    let (random, ends) = (Random(seed), seen.clone());
    let left = 4 + seed as usize % 9;
    let mut maker = Maker { random, left, depth: 0, deepest: 0, ends: 0, seen: ends };
    let handles = worker.dataflow::<u64, _>("random", |scope| {
        let (handles, streams): (Vec<_>, Vec<_>) = (0..inputs).map(|_| scope.new_input::<Rows>()).unzip();
        let open = maker.grow(scope, streams);
        open.iter().for_each(|stream| maker.end(stream));
        handles
    });
    let inputs = handles.into_iter().map(|handle| Source { handle: Some(handle), fed: 0, pace: 100 }).collect();
    (Member { worker, inputs, seen }, maker.deepest)
}

impl Member {
    /// Feeds the next block of an input, or ends its epoch.
    fn feed(&mut self, me: Option<usize>, feed: &Feed, input: usize) {
        let Source { handle, fed, .. } = &mut self.inputs[input];
        let Some(open) = handle else { return };
        let blocks = &feed[input][*open.time() as usize];
        while let Some((worker, rows)) = blocks.get(*fed) {
            *fed += 1;
            if me.is_none_or(|me| me == *worker) {
                return open.send(rows.clone());
            }
        }
        let next = *open.time() + 1;
        *fed = 0;
        if next == EPOCHS as u64 {
            *handle = None;
        } else {
            open.advance_to(next).expect("a later epoch");
        }
    }
}

fn sorted(seen: impl Iterator<Item = Seen>) -> Vec<(usize, String, u64)> {
    let mut all: Vec<_> = seen.flat_map(|seen| seen.take()).collect();
    all.sort_unstable();
    all
}

/// What a run was like.
#[derive(Default)]
struct Told {
    deepest: usize,
    rows: usize,
}

fn simulate(seed: u64, told: &mut Told) {
    let mut random = Random(mix(seed));
    let (workers, inputs) = (2 + random.below(3), 1 + random.below(2));
    let mut block = |_| {
        let rows = (0..random.below(4)).map(|_| (random.next(), random.next() % 4)).collect();
        (random.below(workers), rows)
    };
    let mut epoch = |_| (0..6).map(&mut block).collect();
    let feed: Feed = (0..inputs).map(|_| (0..EPOCHS).map(&mut epoch).collect()).collect();

    let (mut alone, deepest) = member(seed, Worker::new(fabric::threads(1).remove(0)), inputs);
    while alone.inputs.iter().any(|input| input.handle.is_some()) {
        (0..inputs).for_each(|input| alone.feed(None, &feed, input));
        alone.worker.step().expect("no operator fails");
    }
    let mut turns = 0;
    while alone.worker.step().expect("no operator fails") {
        turns += 1;
        assert!(turns < 10_000, "one worker does not end");
    }
    let expected = sorted(std::iter::once(alone.seen));
    told.deepest = told.deepest.max(deepest);
    told.rows += expected.len();

    let seats = fabric::shuffled(workers, seed).into_iter();
    let mut members: Vec<Member> = seats.map(|seat| member(seed, Worker::new(seat), inputs).0).collect();
    // Some inputs stay behind.
    for member in &mut members {
        member.inputs.iter_mut().for_each(|input| input.pace = [100, 100, 30, 3][random.below(4)]);
    }
    let mut turns = 0;
    while members.iter().any(|member| member.worker.dataflows() > 0) {
        turns += 1;
        assert!(turns < 300_000, "no end after {turns} turns");
        let chosen = random.below(workers);
        let member = &mut members[chosen];
        let input = random.below(inputs);
        if random.below(3) == 0 && random.below(100) < member.inputs[input].pace {
            member.feed(Some(chosen), &feed, input);
        } else {
            member.worker.step().expect("no operator fails");
        }
    }
    let found = sorted(members.into_iter().map(|member| member.seen));
    assert!(found == expected, "{} rows instead of {}", found.len(), expected.len());
}

#[test]
fn random_graphs_do_what_one_worker_does() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().expect("a number"));
    let seeds = match number("PENSTOCK_SEED") {
        Some(seed) => seed..seed + 1,
        None if cfg!(miri) => 0..1,
        None => 0..number("PENSTOCK_SEEDS").unwrap_or(200),
    };
    let mut told = Told::default();
    let many = seeds.end - seeds.start >= 100;
    for seed in seeds {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| simulate(seed, &mut told))) {
            eprintln!("replay: PENSTOCK_SEED={seed} cargo test -p penstock-dataflow --test all graphs");
            std::panic::resume_unwind(panic);
        }
    }
    assert!(!many || told.deepest == 4 && told.rows > 10_000, "{} deep, {} rows", told.deepest, told.rows);
}
