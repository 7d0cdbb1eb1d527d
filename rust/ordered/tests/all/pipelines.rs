//! Pipelines beside a serial run: the same values in the same order, whatever the workers, delays, schedulers, queues and bounds.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use penstock_ordered::pipeline::{
    BuildError, Builder, Fault, Mode, NotTaken, OnError, Options, Partitioned, Payload, Pipeline, Pulled, QueueKind,
    ReorderKind, Stateful, Turn,
};
use penstock_ordered::schedule::{Load, Scheduler, SchedulerKind};
use proptest::prelude::*;

const LONG: Duration = Duration::from_secs(60);

/// A batch of numbers, each with its place in the envelope that was split.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Batch(Vec<(usize, u64)>);

impl Batch {
    fn of(values: impl IntoIterator<Item = u64>) -> Self {
        Self(values.into_iter().enumerate().collect())
    }

    fn values(&self) -> impl Iterator<Item = u64> + '_ {
        self.0.iter().map(|(_, value)| *value)
    }
}

impl Payload for Batch {
    fn items(&self) -> usize {
        self.0.len()
    }

    fn bytes(&self) -> usize {
        self.0.len() * 16
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Bad(u64);

#[derive(Clone, Debug)]
enum Step {
    /// Multiplies; drops one residue; repeats another one.
    Map { times: u64, drop: u64, twice: u64 },
    /// Running sums, by `value % partitions`.
    Sums { partitions: usize, fail: u64 },
    /// A running hash of everything so far.
    Chain { fail: u64 },
}

/// A pseudorandom delay, without a clock.
fn delay(seed: u64, number: u64) {
    let spins = (number.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ seed).wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 52;
    match spins % 8 {
        0 => std::thread::yield_now(),
        few => (0..few * spins / 8).for_each(|_| std::hint::spin_loop()),
    }
}

fn map(times: u64, drop: u64, twice: u64, batch: &Batch) -> Batch {
    Batch::of(batch.values().flat_map(|value| {
        let copies = if value % 7 == drop { 0 } else { 1 + usize::from(value % 7 == twice) };
        std::iter::repeat_n(value.wrapping_mul(times).wrapping_add(1), copies)
    }))
}

fn fails(batch: &Batch, fail: u64) -> Option<Bad> {
    batch.values().find(|value| value % 1009 == fail).map(Bad)
}

/// What a pipeline has to give for each input.
fn serial(steps: &[Step], inputs: &[Batch]) -> Vec<Result<Batch, Bad>> {
    let mut outcomes = inputs.iter().cloned().map(Ok).collect::<Vec<Result<Batch, Bad>>>();
    for step in steps {
        let mut sums = HashMap::new();
        let mut chain = 7_u64;
        for outcome in &mut outcomes {
            let Ok(batch) = outcome else { continue };
            match step {
                Step::Map { times, drop, twice } => *outcome = Ok(map(*times, *drop, *twice, batch)),
                Step::Sums { partitions, fail } => {
                    let mut failed = None;
                    let mut order = Vec::new();
                    for value in batch.values() {
                        let partition = value as usize % partitions;
                        if !order.contains(&partition) {
                            order.push(partition);
                        }
                    }
                    let mut made = batch.clone();
                    for partition in order {
                        let part = Batch(
                            batch.0.iter().copied().filter(|(_, v)| *v as usize % partitions == partition).collect(),
                        );
                        match fails(&part, *fail) {
                            Some(bad) => drop(failed.get_or_insert(bad)),
                            None => part.0.iter().for_each(|(at, value)| {
                                let sum = sums.entry(partition).or_insert(0_u64);
                                *sum = sum.wrapping_mul(31).wrapping_add(*value);
                                made.0[*at].1 = *sum;
                            }),
                        }
                    }
                    *outcome = failed.map_or(Ok(made), Err);
                }
                Step::Chain { fail } => match fails(batch, *fail) {
                    Some(bad) => *outcome = Err(bad),
                    None => {
                        let linked = batch.values().map(|value| {
                            chain = chain.wrapping_mul(131).wrapping_add(value);
                            chain
                        });
                        *outcome = Ok(Batch::of(linked));
                    }
                },
            }
        }
    }
    outcomes
}

/// Notes when two are inside at a time.
#[derive(Default)]
struct Alone(AtomicBool);

impl Alone {
    fn within<R>(&self, act: impl FnOnce() -> R) -> R {
        assert!(!self.0.swap(true, Ordering::SeqCst), "two workers in one partition");
        let result = act();
        assert!(self.0.swap(false, Ordering::SeqCst));
        result
    }
}

fn builder(steps: &[Step], seed: u64) -> Builder<Batch, Bad> {
    steps.iter().enumerate().fold(Builder::new(), |builder, (at, step)| match step.clone() {
        Step::Map { times, drop, twice } => builder.stateless(format!("map {at}"), move |turn: Turn, batch: Batch| {
            delay(seed, turn.number);
            Ok(map(times, drop, twice, &batch))
        }),
        Step::Sums { partitions, fail } => {
            let sums = (0..partitions).map(|_| (Alone::default(), Mutex::new((0_u64, 0_u64)))).collect::<Vec<_>>();
            builder.partitioned(
                format!("sums {at}"),
                partitions,
                move |batch: Batch| {
                    let mut parts: Vec<(usize, Batch)> = Vec::new();
                    for (at, value) in batch.0 {
                        let partition = value as usize % partitions;
                        match parts.iter_mut().find(|part| part.0 == partition) {
                            Some((_, part)) => part.0.push((at, value)),
                            None => parts.push((partition, Batch(vec![(at, value)]))),
                        }
                    }
                    Ok(parts)
                },
                move |turn, partition, part: Batch| {
                    let (alone, state) = &sums[partition];
                    alone.within(|| {
                        delay(seed ^ partition as u64, turn.number);
                        let mut state = state.lock().expect("nothing panics inside");
                        assert!(state.1 <= turn.number, "a partition goes back from {} to {}", state.1, turn.number);
                        state.1 = turn.number;
                        if let Some(bad) = fails(&part, fail) {
                            return Err(bad);
                        }
                        let sums = part.0.into_iter().map(|(at, value)| {
                            state.0 = state.0.wrapping_mul(31).wrapping_add(value);
                            (at, state.0)
                        });
                        Ok(Batch(sums.collect()))
                    })
                },
                |parts| {
                    let mut all = parts.into_iter().flat_map(|(_, part)| part.0).collect::<Vec<_>>();
                    all.sort_unstable_by_key(|(at, _)| *at);
                    Ok(Batch(all))
                },
            )
        }
        Step::Chain { fail } => {
            let (alone, mut chain, mut before) = (Alone::default(), 7_u64, 0);
            builder.stateful(format!("chain {at}"), move |turn, batch: Batch| {
                alone.within(|| {
                    delay(seed, turn.number);
                    assert!(before <= turn.number, "from {before} to {}", turn.number);
                    before = turn.number;
                    if let Some(bad) = fails(&batch, fail) {
                        return Err(bad);
                    }
                    Ok(Batch::of(batch.values().map(|value| {
                        chain = chain.wrapping_mul(131).wrapping_add(value);
                        chain
                    })))
                })
            })
        }
    })
}

/// Pushes all and pulls all, in one thread; checks the numbers.
fn drive<P: Payload>(pipeline: &Pipeline<P, Bad>, inputs: impl IntoIterator<Item = P>) -> Vec<Result<P, Fault<Bad>>> {
    let mut inputs = inputs.into_iter();
    let mut waiting = inputs.next();
    let mut outputs = Vec::new();
    loop {
        while let Some(input) = waiting.take() {
            match pipeline.try_push(input) {
                Ok(()) => waiting = inputs.next(),
                Err(NotTaken::Full(input)) => {
                    waiting = Some(input);
                    break;
                }
                Err(NotTaken::Closed(_)) => break,
            }
        }
        if waiting.is_none() {
            pipeline.close();
        }
        match pipeline.pull(LONG) {
            Pulled::Output { number, payload } => {
                assert_eq!(number, outputs.len() as u64);
                outputs.push(Ok(payload));
            }
            Pulled::Error { number, error } => {
                assert_eq!(number, outputs.len() as u64);
                outputs.push(Err(error));
            }
            Pulled::End => return outputs,
            Pulled::Nothing => panic!("nothing for {LONG:?}: {:#?}", pipeline.stats()),
        }
    }
}

fn plain(outcome: Result<Batch, Fault<Bad>>) -> Result<Batch, Bad> {
    outcome.map_err(|fault| match fault {
        Fault::Failed { error, .. } => error,
        other => panic!("{other:?}"),
    })
}

/// Names operators at random, also ones that cannot run, or nobody; from a seed.
struct Adversary(AtomicUsize);

impl Scheduler for Adversary {
    fn pick(&self, loads: &[Load]) -> Option<usize> {
        let seed = self.0.fetch_add(0x9E37_79B9, Ordering::Relaxed);
        let choice = (seed ^ (seed >> 15)).wrapping_mul(0x2C1B_3C6D) >> 7;
        match choice % 5 {
            0 => None,
            1 => Some(loads.len() + choice % 3),
            2 => loads.iter().position(Load::runnable),
            _ => Some(choice / 5 % loads.len()),
        }
    }

    fn name(&self) -> String {
        "adversary".into()
    }
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        (1_u64..9, 0_u64..9, 0_u64..9).prop_map(|(times, drop, twice)| Step::Map { times, drop, twice }),
        (1_usize..20, 0_u64..1100).prop_map(|(partitions, fail)| Step::Sums { partitions, fail }),
        (0_u64..1100).prop_map(|fail| Step::Chain { fail }),
    ];
    prop::collection::vec(step, 1..5)
}

fn inputs() -> impl Strategy<Value = Vec<Batch>> {
    prop::collection::vec(prop::collection::vec(0_u64..5000, 0..6).prop_map(Batch::of), 0..120)
}

#[derive(Clone, Debug)]
struct Ways {
    options: Options,
    adversary: Option<usize>,
}

fn ways() -> impl Strategy<Value = Ways> {
    let workers = prop_oneof![0_usize..5, Just(16), Just(64)];
    let in_flight = prop_oneof![Just(1_usize), 2_usize..5, Just(64)];
    let scheduler = prop::sample::select(SchedulerKind::ALL.to_vec());
    let queue = prop::sample::select(vec![QueueKind::Hybrid, QueueKind::Partitioned]);
    let reorder = prop::sample::select(vec![ReorderKind::NonBlocking, ReorderKind::Flagged, ReorderKind::Locked]);
    let mode = prop::sample::select(vec![Mode::Auto, Mode::Inline, Mode::Parallel, Mode::Parallel]);
    let on_error = prop::sample::select(vec![OnError::Stop, OnError::GoOn]);
    let items = prop_oneof![Just(usize::MAX), 1_usize..20];
    let adversary = prop::option::of(any::<usize>());
    (workers, in_flight, scheduler, queue, reorder, mode, on_error, items, adversary).prop_map(
        |(workers, in_flight, scheduler, queue, reorder, mode, on_error, in_flight_items, adversary)| Ways {
            options: Options {
                workers,
                in_flight,
                in_flight_items,
                scheduler,
                queue,
                reorder,
                mode,
                on_error,
                ..Options::default()
            },
            adversary,
        },
    )
}

proptest! {
    #![proptest_config(penstock_cases::cases(160))]

    #[test]
    fn a_pipeline_gives_what_a_serial_run_gives(steps in steps(), inputs in inputs(), ways in ways(), seed: u64) {
        let mut expected = serial(&steps, &inputs);
        let builder = builder(&steps, seed);
        let options = ways.options.clone();
        let stops = options.on_error == OnError::Stop;
        let pipeline = match ways.adversary {
            Some(from) => builder.build_with(options, Box::new(Adversary(AtomicUsize::new(from)))),
            None => builder.build(options),
        };
        let outputs = drive(&pipeline.expect("good options"), inputs).into_iter().map(plain).collect::<Vec<_>>();
        if stops && let Some(at) = expected.iter().position(Result::is_err) {
            expected.truncate(at + 1);
        }
        prop_assert_eq!(outputs, expected);
    }
}

fn parallel(workers: usize, in_flight: usize) -> Options {
    Options { workers, in_flight, mode: Mode::Parallel, ..Options::default() }
}

#[test]
fn bad_options_are_told() {
    let build = |options| Builder::<Batch, Bad>::new().stateful("s", |_, b| Ok(b)).build(options).expect_err("bad");
    assert_eq!(Builder::<Batch, Bad>::new().build(Options::default()).expect_err("empty"), BuildError::Empty);
    assert_eq!(build(parallel(1025, 1)).to_string(), "1025 workers: at most 1024");
    assert_eq!(build(parallel(2, 0)).to_string(), "in_flight is 0: give it 1 to 8388608");
    assert!(matches!(build(Options { in_flight_items: 0, ..parallel(2, 1) }), BuildError::Bound { value: 0, .. }));
    let shared = build(Options { queue: QueueKind::Shared, ..parallel(2, 1) });
    assert_eq!(shared, BuildError::SharedQueue { name: "s".into() });
    let none = Builder::<Batch, Bad>::new().partitioned("p", 0, |_| Ok(vec![]), |_, _, b| Ok(b), |_| Ok(Batch::of([])));
    assert_eq!(
        none.build(Options::default()).expect_err("bad"),
        BuildError::Partitions { name: "p".into(), partitions: 0 }
    );
}

#[test]
fn a_panic_is_an_error_at_its_place_and_the_rest_goes_on() {
    for options in [parallel(3, 8), Options { mode: Mode::Inline, ..parallel(3, 8) }] {
        let pipeline = Builder::<Batch, Bad>::new()
            .stateless("odd", |turn, batch| if turn.number == 5 { panic!("no {}", turn.number) } else { Ok(batch) })
            .stateful("sad", |turn, batch| if turn.number == 7 { panic!("late") } else { Ok(batch) })
            .build(Options { on_error: OnError::GoOn, ..options })
            .expect("good options");
        let outputs = drive(&pipeline, (0..20).map(|value| Batch::of([value])));
        assert_eq!(outputs.len(), 20);
        for (at, output) in outputs.into_iter().enumerate() {
            match (at, output) {
                (5, output) => {
                    assert_eq!(
                        output,
                        Err(Fault::Panicked { operator: 0, name: "odd".into(), message: "no 5".into() })
                    );
                }
                (7, output) => {
                    assert_eq!(
                        output,
                        Err(Fault::Panicked { operator: 1, name: "sad".into(), message: "late".into() })
                    );
                }
                (_, output) => assert_eq!(output, Ok(Batch::of([at as u64]))),
            }
        }
    }
}

#[test]
fn a_nudge_ends_one_wait_and_costs_nothing() {
    let options = parallel(2, 4);
    let pipeline = Builder::<Batch, Bad>::new().stateless("s", |_, b| Ok(b)).build(options).expect("good options");
    std::thread::scope(|scope| {
        // Before the wait, or during it: either way it ends, and brings nothing.
        scope.spawn(|| pipeline.nudge());
        assert!(matches!(pipeline.pull(Duration::from_secs(60)), Pulled::Nothing));
    });
    pipeline.nudge();
    pipeline.try_push(Batch::of([3])).expect("there is room");
    let output = std::iter::from_fn(|| Some(pipeline.pull(Duration::from_secs(60))))
        .find(|pulled| !matches!(pulled, Pulled::Nothing));
    assert!(matches!(output, Some(Pulled::Output { number: 0, payload }) if payload == Batch::of([3])));
}

#[test]
fn a_split_that_names_no_partition_fails_at_its_place() {
    let pipeline = Builder::<Batch, Bad>::new()
        .partitioned("p", 2, |b: Batch| Ok(vec![(b.0.len(), b)]), |_, _, b| Ok(b), |mut parts| Ok(parts.remove(0).1))
        .build(Options { on_error: OnError::GoOn, ..parallel(2, 4) })
        .expect("good options");
    let outputs = drive(&pipeline, [Batch::of([1]), Batch::of([1, 2]), Batch::of([3])]);
    let wrong = Fault::NoSuchPartition { operator: 0, name: "p".into(), partition: 2, partitions: 2 };
    assert_eq!(outputs, [Ok(Batch::of([1])), Err(wrong), Ok(Batch::of([3]))]);
}

/// Sums by partition, and says them at the end.
struct Totals(Vec<Mutex<u64>>);

impl Partitioned<Batch, Bad> for Totals {
    fn split(&self, batch: Batch) -> Result<Vec<(usize, Batch)>, Bad> {
        let partitions = self.0.len();
        let part = |at| batch.0.iter().copied().filter(|(_, v)| *v as usize % partitions == at).collect::<Vec<_>>();
        Ok((0..partitions).map(|at| (at, Batch(part(at)))).filter(|(_, part)| !part.0.is_empty()).collect())
    }

    fn operate(&self, _: Turn, partition: usize, part: Batch) -> Result<Batch, Bad> {
        *self.0[partition].lock().expect("nothing panics inside") += part.values().sum::<u64>();
        Ok(Batch::of([]))
    }

    fn merge(&self, parts: Vec<(usize, Batch)>) -> Result<Batch, Bad> {
        Ok(Batch::of(parts.iter().flat_map(|(_, part)| part.values())))
    }

    fn finishes(&self) -> bool {
        true
    }

    fn finish(&self, _: Turn, partition: usize) -> Result<Option<Batch>, Bad> {
        let total = *self.0[partition].lock().expect("nothing panics inside");
        Ok((total > 0).then(|| Batch::of([total])))
    }
}

/// Counts what passes, and says so at the end.
struct Count(u64);

impl Stateful<Batch, Bad> for Count {
    fn operate(&mut self, _: Turn, batch: Batch) -> Result<Batch, Bad> {
        self.0 += batch.0.len() as u64;
        Ok(batch)
    }

    fn finishes(&self) -> bool {
        true
    }

    fn finish(&mut self, _: Turn) -> Result<Option<Batch>, Bad> {
        Ok(Some(Batch::of([1_000_000 + self.0])))
    }
}

#[test]
fn the_end_of_the_input_reaches_operators_in_their_order() {
    for mode in [Mode::Parallel, Mode::Inline, Mode::Auto] {
        let pipeline = Builder::new()
            .partitioned_operator("totals", 3, Totals((0..3).map(|_| Mutex::new(0)).collect()))
            .stateful_operator("count", Count(0))
            .build(Options { mode, ..parallel(2, 4) })
            .expect("good options");
        let outputs = drive(&pipeline, (0..30).map(|value| Batch::of([value % 2])));
        let (early, end) = outputs.split_at(30);
        assert!(early.iter().all(|output| output.as_ref().is_ok_and(|batch| batch.0.is_empty())));
        // Only partition 1 has a sum; the count has seen the totals before it says its own.
        assert_eq!(end, [Ok(Batch::of([15])), Ok(Batch::of([1_000_001]))]);
    }
}

/// Waits for a condition, with a limit.
fn until(what: &str, condition: impl Fn() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < LONG, "not in {LONG:?}: {what}");
        std::thread::yield_now();
    }
}

/// Keeps whoever comes until it is opened.
#[derive(Clone, Default)]
struct Barred(Arc<(Mutex<bool>, std::sync::Condvar, AtomicUsize)>);

impl Barred {
    fn pass(&self) {
        self.0.2.fetch_add(1, Ordering::SeqCst);
        let open = self.0.0.lock().expect("nothing panics inside");
        drop(self.0.1.wait_while(open, |open| !*open).expect("nothing panics inside"));
    }

    fn open(&self) {
        *self.0.0.lock().expect("nothing panics inside") = true;
        self.0.1.notify_all();
    }

    fn waiting(&self) -> usize {
        self.0.2.load(Ordering::SeqCst)
    }
}

fn straggling(barred: &Barred, options: Options) -> Pipeline<Batch, Bad> {
    let barred = barred.clone();
    Builder::new()
        .stateless("explode", move |turn, batch: Batch| {
            if turn.number == 0 {
                barred.pass();
            }
            Ok(Batch::of(batch.values().flat_map(|value| std::iter::repeat_n(value, 100))))
        })
        .stateful("pass", |_, batch| Ok(batch))
        .build(options)
        .expect("good options")
}

#[test]
fn a_straggler_cannot_grow_memory() {
    let barred = Barred::default();
    let bytes = 64 << 10;
    let pipeline = straggling(&barred, Options { in_flight_bytes: bytes, ..parallel(2, 1000) });
    let input = || Batch::of([1]);
    let mut pushed = 0_usize;
    let settled = |pushed: usize| {
        // Everything but the straggler has gone through the first operator.
        until("all others are done", || pipeline.stats().operators[0].envelopes_out + 1 >= pushed as u64);
    };
    loop {
        match pipeline.try_push(input()) {
            Ok(()) => pushed += 1,
            Err(NotTaken::Full(_)) => {
                settled(pushed);
                if pipeline.try_push(input()).is_err() {
                    break;
                }
                pushed += 1;
            }
            Err(NotTaken::Closed(_)) => unreachable!("it is open"),
        }
        settled(pushed);
    }
    until("nobody else has one in hand", || pipeline.stats().in_hand.len() == 1);
    // 1600 bytes each once they have exploded.
    let stats = pipeline.stats();
    assert!(pushed > 30 && stats.bytes <= bytes + 1600, "{pushed} pushed, {} bytes", stats.bytes);
    assert_eq!(stats.in_hand.iter().map(|held| (held.operator, held.number)).collect::<Vec<_>>(), [(0, 0)]);
    barred.open();
    let outputs = drive(&pipeline, []);
    assert_eq!(outputs.len(), pushed);
    assert_eq!((pipeline.stats().bytes, pipeline.stats().items, pipeline.stats().in_flight), (0, 0, 0));
}

#[test]
fn an_envelope_above_all_bounds_goes_alone() {
    let options = Options { in_flight_bytes: 8, in_flight_items: 1, ..parallel(2, 8) };
    let pipeline = Builder::<Batch, Bad>::new().stateless("pass", |_, batch| Ok(batch)).build(options);
    let pipeline = pipeline.expect("good options");
    assert_eq!(drive(&pipeline, (0..9).map(|value| Batch::of([value, value]))).len(), 9);
}

#[test]
fn a_full_pipeline_is_aborted_and_dropped() {
    for abort in [true, false] {
        let barred = Barred::default();
        let pipeline = straggling(&barred, parallel(2, 4));
        while pipeline.try_push(Batch::of([1])).is_ok() {}
        assert_eq!(pipeline.stats().in_flight, 4);
        until("the straggler is in hand", || barred.waiting() == 1);
        assert!(matches!(pipeline.push_wait(Batch::of([2]), Duration::from_millis(5)), Err(NotTaken::Full(_))));
        assert!(matches!(pipeline.pull(Duration::from_millis(5)), Pulled::Nothing));
        if abort {
            std::thread::scope(|scope| {
                let waiting = scope.spawn(|| pipeline.pull(LONG));
                pipeline.abort();
                assert!(matches!(waiting.join().expect("no panic"), Pulled::End));
            });
            assert!(matches!(pipeline.try_push(Batch::of([3])), Err(NotTaken::Closed(_))));
        }
        barred.open();
        let begin = Instant::now();
        drop(pipeline);
        assert!(begin.elapsed() < LONG / 2);
    }
}

/// As long as it is somewhere, its token has one more reference.
struct Live(Arc<()>);

impl Payload for Live {
    fn items(&self) -> usize {
        1
    }

    fn bytes(&self) -> usize {
        8
    }
}

/// All that a pipeline takes in, with a token to count it by.
fn filled(pipeline: &Pipeline<Live, Bad>) -> Arc<()> {
    let token = Arc::new(());
    while pipeline.try_push(Live(Arc::clone(&token))).is_ok() {}
    token
}

/// Whether the pipeline, which is still there, holds nothing that was given to it.
fn is_empty(pipeline: &Pipeline<Live, Bad>, token: &Arc<()>) -> bool {
    let stats = pipeline.stats();
    Arc::strong_count(token) == 1 && (stats.in_flight, stats.items, stats.bytes) == (0, 0, 0)
}

fn both(live: Live) -> Result<Vec<(usize, Live)>, Bad> {
    Ok(vec![(0, Live(Arc::clone(&live.0))), (1, live)])
}

#[test]
fn what_waits_is_dropped_behind_an_abort_also_where_the_handle_stays() {
    for (at, reorder, queue) in (0..3).flat_map(|at| {
        let reorders = [ReorderKind::NonBlocking, ReorderKind::Flagged, ReorderKind::Locked];
        reorders.into_iter().flat_map(move |r| [QueueKind::Hybrid, QueueKind::Partitioned].map(|q| (at, r, q)))
    }) {
        let barred = Barred::default();
        let pass = |operator| {
            let barred = barred.clone();
            move |turn: Turn, partition, live| {
                if (turn.number, operator, partition) == (1, at, 0) {
                    barred.pass();
                }
                Ok(live)
            }
        };
        let (free, kept) = (pass(0), pass(2));
        let pipeline = Builder::<Live, Bad>::new()
            .stateless("free", move |turn, live| free(turn, 0, live))
            .partitioned("parted", 2, both, pass(1), |mut parts| Ok(parts.remove(0).1))
            .stateful("kept", move |turn, live| kept(turn, 0, live))
            .build(Options { reorder, queue, ..parallel(2, 16) })
            .expect("good options");
        let token = filled(&pipeline);
        // One is ready, one is in hand, the others wait before and behind an operator.
        until("number 1 is in hand", || barred.waiting() == 1);
        until("number 0 is ready", || pipeline.stats().operators[2].envelopes_out >= 1);
        pipeline.abort();
        barred.open();
        pipeline.join();
        assert!(is_empty(&pipeline, &token), "{at} {reorder:?} {queue:?}: {:#?}", pipeline.stats());
        assert!(matches!(pipeline.pull(LONG), Pulled::End));
    }
}

#[test]
fn what_waits_is_dropped_behind_an_error_that_ends_the_pipeline() {
    let pipeline = Builder::<Live, Bad>::new()
        .stateful("fail", |turn, live| if turn.number == 1 { Err(Bad(1)) } else { Ok(live) })
        .build(parallel(2, 16))
        .expect("good options");
    let token = filled(&pipeline);
    assert!(matches!(pipeline.pull(LONG), Pulled::Output { number: 0, .. }));
    assert!(matches!(pipeline.pull(LONG), Pulled::Error { number: 1, .. }));
    pipeline.join();
    assert!(is_empty(&pipeline, &token), "{:#?}", pipeline.stats());
}

#[test]
fn what_waits_on_the_thread_that_pulls_is_dropped_behind_an_abort() {
    /// Gives its token at the end.
    struct Last(Option<Live>);
    impl Stateful<Live, Bad> for Last {
        fn operate(&mut self, _: Turn, live: Live) -> Result<Live, Bad> {
            Ok(live)
        }

        fn finishes(&self) -> bool {
            true
        }

        fn finish(&mut self, _: Turn) -> Result<Option<Live>, Bad> {
            Ok(self.0.take())
        }
    }
    let build = |token: &Arc<()>| {
        let last = || Last(Some(Live(Arc::clone(token))));
        let builder = Builder::new().stateful_operator("one", last()).stateful_operator("two", last());
        builder.build(Options { mode: Mode::Inline, ..parallel(2, 4) }).expect("good options")
    };
    let token = Arc::new(());
    // The only envelope.
    let pipeline = build(&token);
    pipeline.try_push(Live(Arc::clone(&token))).map_err(|_| ()).expect("there is room");
    pipeline.abort();
    assert_eq!((Arc::strong_count(&token), pipeline.stats().in_flight), (3, 0), "the two operators have theirs");
    drop(pipeline);
    // The second of what comes at the end.
    let pipeline = build(&token);
    pipeline.close();
    assert!(matches!(pipeline.pull(LONG), Pulled::Output { number: 0, .. }));
    pipeline.abort();
    assert!(is_empty(&pipeline, &token));
    assert!(matches!(pipeline.pull(LONG), Pulled::End));
}

#[test]
fn what_operators_give_at_their_end_is_dropped_where_it_is_aborted_meanwhile() {
    /// Gives its token at the end, once it may.
    struct Late(Option<Live>, mpsc::Sender<()>, mpsc::Receiver<()>);
    impl Stateful<Live, Bad> for Late {
        fn operate(&mut self, _: Turn, live: Live) -> Result<Live, Bad> {
            Ok(live)
        }

        fn finishes(&self) -> bool {
            true
        }

        fn finish(&mut self, _: Turn) -> Result<Option<Live>, Bad> {
            self.1.send(()).expect("the test waits");
            self.2.recv().expect("the test goes on");
            Ok(self.0.take())
        }
    }
    let ((begun, begins), (go, goes), token) = (mpsc::channel(), mpsc::channel(), Arc::new(()));
    let late = Late(Some(Live(Arc::clone(&token))), begun, goes);
    let pipeline = Builder::new().stateful_operator("late", late).build(parallel(2, 4)).expect("good options");
    pipeline.close();
    std::thread::scope(|scope| {
        let pulls = scope.spawn(|| pipeline.pull(LONG));
        begins.recv().expect("it finishes");
        pipeline.abort();
        pipeline.join();
        go.send(()).expect("it waits");
        assert!(matches!(pulls.join().expect("no panic"), Pulled::End));
    });
    assert!(is_empty(&pipeline, &token), "{:#?}", pipeline.stats());
}

#[test]
fn behind_a_close_workers_end_when_all_has_come_out() {
    let pipeline = Builder::new().stateful_operator("count", Count(0)).build(parallel(2, 4)).expect("good options");
    pipeline.push_wait(Batch::of([0]), LONG).expect("there is room");
    pipeline.close();
    let came = std::iter::from_fn(|| match pipeline.pull(LONG) {
        Pulled::Output { number, .. } => Some(number),
        Pulled::End => None,
        other => panic!("{other:?}"),
    });
    assert_eq!(came.min(), Some(0));
    pipeline.join();
}

/// Parts that were dropped are never missed by a merge.
#[test]
fn an_envelope_whose_parts_were_dropped_is_not_merged() {
    let (first, second, fewest) = (Barred::default(), Barred::default(), Arc::new(AtomicUsize::new(usize::MAX)));
    let (bars, seen) = ([first.clone(), second.clone()], Arc::clone(&fewest));
    let pipeline = Builder::<Live, Bad>::new()
        .partitioned(
            "parted",
            2,
            both,
            move |turn, partition, live| {
                match (turn.number, partition) {
                    (0, 1) => bars[0].pass(),
                    (1, 0) => bars[1].pass(),
                    _ => {}
                }
                Ok(live)
            },
            move |mut parts| {
                seen.fetch_min(parts.len(), Ordering::SeqCst);
                Ok(parts.remove(0).1)
            },
        )
        .build(parallel(2, 2))
        .expect("good options");
    let token = filled(&pipeline);
    until("a part of each is in hand", || (first.waiting(), second.waiting()) == (1, 1));
    pipeline.abort();
    first.open();
    until("the other part of number 1 was dropped", || pipeline.stats().operators[0].load.input == 0);
    second.open();
    pipeline.join();
    assert!(is_empty(&pipeline, &token), "{:#?}", pipeline.stats());
    assert!(fewest.load(Ordering::SeqCst) >= 2, "a merge of one part of two");
}

/// Workers drop what is ready while it is pulled: there is no gap in what comes, and the operators' end is not asked for.
#[test]
fn what_is_pulled_while_another_thread_aborts_has_no_gap() {
    for _ in 0..200 {
        let pipeline =
            Builder::new().stateful_operator("count", Count(0)).build(parallel(2, 64)).expect("good options");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut next = 0;
                loop {
                    match pipeline.pull(LONG) {
                        Pulled::Output { number, payload } => {
                            assert_eq!((number, payload), (next, Batch::of([next])));
                            next += 1;
                        }
                        Pulled::End => return,
                        other => panic!("{other:?}"),
                    }
                }
            });
            for value in 0..100 {
                pipeline.push_wait(Batch::of([value]), LONG).expect("it is pulled");
            }
            pipeline.abort();
        });
    }
}

#[test]
fn two_threads_push_and_pull() {
    let pipeline = Builder::<Batch, Bad>::new().stateless("pass", |_, b| Ok(b)).build(parallel(2, 3)).expect("good");
    std::thread::scope(|scope| {
        let (pipeline, pulling) = (&pipeline, &pipeline);
        scope.spawn(move || {
            for value in 0..2000 {
                pipeline.push_wait(Batch::of([value]), LONG).expect("it is pulled");
            }
            pipeline.close();
        });
        for value in 0..2000 {
            match pulling.pull(LONG) {
                Pulled::Output { number, payload } => assert_eq!((number, payload), (value, Batch::of([value]))),
                other => panic!("{other:?}"),
            }
        }
        assert!(matches!(pulling.pull(LONG), Pulled::End));
    });
}

#[test]
fn nothing_is_started_for_what_runs_inline() {
    for options in [parallel(1, 4), parallel(0, 4), Options { mode: Mode::Inline, ..parallel(4, 4) }] {
        let pipeline = Builder::<Batch, Bad>::new().stateless("pass", |_, b| Ok(b)).build(options).expect("good");
        pipeline.try_push(Batch::of([1])).expect("there is room");
        assert!(matches!(pipeline.try_push(Batch::of([2])), Err(NotTaken::Full(_))), "one at a time");
        assert_eq!(drive(&pipeline, []).len(), 1);
        let stats = pipeline.stats();
        assert_eq!((stats.threads, stats.inline, stats.pushed, stats.pulled), (0, 1, 1, 1));
    }
}

#[test]
fn tiny_work_never_starts_a_thread() {
    // A pause of the machine looks like work: one round in ten has none that lasts.
    let inline = || {
        let pipeline =
            Builder::<Batch, Bad>::new().stateless("pass", |_, b| Ok(b)).build(Options::default()).expect("good");
        drive(&pipeline, (0..1000).map(|value| Batch::of([value])));
        pipeline.stats().inline
    };
    let rounds: Vec<_> = (0..10).map(|_| inline()).collect();
    assert!(rounds.iter().any(|inline| *inline > 900), "{rounds:?}");
}
