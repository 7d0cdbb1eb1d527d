//! What the schedulers, queues and buffers of ordered pipelines are worth: the claims of "Scaling Ordered Stream Processing on Shared-Memory
//! Multicores", one by one, on this machine.
//!
//! Owns: three pipelines (light operators; high selectivity; uneven costs), and one case per claim. All variants of a comparison run in turn
//! on the same input, and every run is checked against a serial loop over the same functions. Throughput is of inputs at saturation, with two
//! workers and 64 envelopes in flight; latency is from push to pull there, so that throughput and latency belong together. Where schedulers are
//! compared a run takes at least a second: the adaptive one explores for some 16 ms at a time, which would be most of a short job.

use std::convert::Infallible;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use penstock_ordered::pipeline::{Builder, Mode, NotTaken, Options, Payload, Pipeline, Pulled, QueueKind, ReorderKind};
use penstock_ordered::schedule::SchedulerKind;
use serde_json::{Value, json};

use crate::harness::{self, Better, Case, Paired, Report, median};
use crate::{Numbers, machine};

const WORKERS: usize = 2;
const FIXED: [SchedulerKind; 4] = [SchedulerKind::Qst, SchedulerKind::Lip, SchedulerKind::Et, SchedulerKind::Ct];
const PARTITIONS: usize = 64;
/// What a run takes at least where schedulers are compared; in a quick bench less, and then it says little about the adaptive one.
const JOB: Duration = Duration::from_secs(1);
const QUICK_JOB: Duration = Duration::from_millis(100);

/// Some items, and when they were pushed.
struct Batch {
    born: Instant,
    values: Vec<u64>,
}

impl Payload for Batch {
    fn items(&self) -> usize {
        self.values.len()
    }

    fn bytes(&self) -> usize {
        self.values.len() * 8
    }
}

/// Dependent multiplications: about 100 of them take 100 to 150 ns.
fn work(value: u64, rounds: u32) -> u64 {
    (0..rounds).fold(value, |value, round| value.wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(7) ^ u64::from(round))
}

#[derive(Clone, Copy)]
enum Step {
    /// So many rounds for each item.
    Map(u32),
    /// Each item becomes so many.
    Explode(u32, u64),
    /// Running hashes by partition, with so many rounds.
    Keyed(u32, usize),
    /// A running hash.
    Chain(u32),
}

struct Shape {
    name: &'static str,
    steps: &'static [Step],
    /// Items of an envelope, and envelopes of a run.
    items: usize,
    envelopes: usize,
}

const SHAPES: [Shape; 3] = [
    Shape {
        name: "light operators",
        steps: &[Step::Map(80), Step::Map(80), Step::Chain(20), Step::Map(80)],
        items: 8,
        envelopes: 12_000,
    },
    Shape {
        name: "high selectivity",
        steps: &[Step::Map(100), Step::Explode(10, 16), Step::Map(40), Step::Chain(5)],
        items: 4,
        envelopes: 6_000,
    },
    Shape {
        name: "uneven costs",
        steps: &[Step::Map(50), Step::Keyed(300, PARTITIONS), Step::Map(1500), Step::Chain(30)],
        items: 4,
        envelopes: 4_000,
    },
];

/// The states of a keyed operator, and the key of an item.
fn partition(value: u64, partitions: usize) -> usize {
    // A skewed choice: half of the items go to an eighth of the partitions.
    let many = partitions as u64;
    (if value & 1 == 0 { (value >> 8) % many.div_ceil(8) } else { (value >> 8) % many }) as usize
}

fn build(steps: &[Step], options: Options) -> Pipeline<Batch, Infallible> {
    let builder = steps.iter().fold(Builder::new(), |builder, step| match *step {
        Step::Map(rounds) => builder.stateless("map", move |_, mut batch: Batch| {
            batch.values.iter_mut().for_each(|value| *value = work(*value, rounds));
            Ok(batch)
        }),
        Step::Explode(rounds, times) => builder.stateless("explode", move |_, batch: Batch| {
            let values = batch.values.iter().flat_map(|value| (0..times).map(move |more| work(value + more, rounds)));
            Ok(Batch { values: values.collect(), ..batch })
        }),
        Step::Keyed(rounds, partitions) => {
            let states = (0..partitions).map(|_| Mutex::new(0_u64)).collect::<Vec<_>>();
            builder.partitioned(
                "keyed",
                partitions,
                move |batch: Batch| {
                    // Where an item stood is kept in front of it.
                    let mut parts: Vec<(usize, Batch)> = Vec::new();
                    for (at, value) in batch.values.into_iter().enumerate() {
                        let to = partition(value, partitions);
                        match parts.iter_mut().find(|part| part.0 == to) {
                            Some((_, part)) => part.values.extend([at as u64, value]),
                            None => parts.push((to, Batch { born: batch.born, values: vec![at as u64, value] })),
                        }
                    }
                    Ok(parts)
                },
                move |_, to, mut part: Batch| {
                    let mut state = states[to].lock().expect("no operator panics");
                    for item in part.values.chunks_exact_mut(2) {
                        *state = work(*state ^ item[1], rounds);
                        item[1] = *state;
                    }
                    Ok(part)
                },
                |parts| {
                    let born = parts[0].1.born;
                    let pairs = parts.iter().flat_map(|(_, part)| part.values.chunks_exact(2));
                    let mut pairs = pairs.map(|pair| (pair[0], pair[1])).collect::<Vec<_>>();
                    pairs.sort_unstable();
                    Ok(Batch { born, values: pairs.into_iter().map(|(_, value)| value).collect() })
                },
            )
        }
        Step::Chain(rounds) => {
            let mut state = 0;
            builder.stateful("chain", move |_, mut batch: Batch| {
                for value in &mut batch.values {
                    state = work(state ^ *value, rounds);
                    *value = state;
                }
                Ok(batch)
            })
        }
    });
    builder.build(options).expect("good options")
}

/// The same by a loop; the outputs folded into one number.
fn serial(steps: &[Step], inputs: &[Vec<u64>]) -> u64 {
    let mut states = steps.iter().map(|_| vec![0_u64; PARTITIONS.max(1024)]).collect::<Vec<_>>();
    let mut sum = 0;
    for input in inputs {
        let mut values = input.clone();
        for (step, states) in steps.iter().zip(&mut states) {
            match *step {
                Step::Map(rounds) => values.iter_mut().for_each(|value| *value = work(*value, rounds)),
                Step::Explode(rounds, times) => {
                    values = values.iter().flat_map(|v| (0..times).map(move |more| work(v + more, rounds))).collect();
                }
                Step::Keyed(rounds, partitions) => {
                    for value in &mut values {
                        let state = &mut states[partition(*value, partitions)];
                        *state = work(*state ^ *value, rounds);
                        *value = *state;
                    }
                }
                Step::Chain(rounds) => {
                    for value in &mut values {
                        states[0] = work(states[0] ^ *value, rounds);
                        *value = states[0];
                    }
                }
            }
        }
        sum = fold(sum, &values);
    }
    sum
}

fn fold(sum: u64, values: &[u64]) -> u64 {
    values.iter().fold(sum, |sum, value| sum.rotate_left(5) ^ value)
}

fn inputs(items: usize, envelopes: usize) -> Vec<Vec<u64>> {
    let mut numbers = Numbers(7);
    (0..envelopes).map(|_| numbers.by_ref().take(items).collect()).collect()
}

/// What one run gave.
#[derive(Clone, Copy)]
struct Run {
    seconds: f64,
    /// Thousands of inputs per second.
    rate: f64,
    p50_us: f64,
    p99_us: f64,
    /// Worker time by wall time, in cores.
    cores: f64,
}

/// Pushes all, pulls all; the outputs folded into one number.
fn drive(
    pipeline: &Pipeline<Batch, Infallible>,
    inputs: &[Vec<u64>],
    mut clock: impl FnMut() -> Instant,
    mut seen: impl FnMut(&Batch),
) -> u64 {
    let mut sum = 0;
    let mut waiting = inputs.iter().cloned();
    let mut held: Option<Vec<u64>> = None;
    for _ in 0..inputs.len() {
        while let Some(values) = held.take().or_else(|| waiting.next()) {
            match pipeline.try_push(Batch { born: clock(), values }) {
                Ok(()) => {}
                Err(NotTaken::Full(batch)) => {
                    held = Some(batch.values);
                    break;
                }
                Err(NotTaken::Closed(_)) => unreachable!("it is open"),
            }
        }
        match pipeline.pull(Duration::from_secs(30)) {
            Pulled::Output { payload, .. } => {
                seen(&payload);
                sum = fold(sum, &payload.values);
            }
            Pulled::Error { error, .. } => panic!("{error:?}"),
            Pulled::Nothing | Pulled::End => panic!("an output is missing"),
        }
    }
    sum
}

/// Runs everything through, and checks the result.
fn run(pipeline: &Pipeline<Batch, Infallible>, inputs: &[Vec<u64>], expected: u64) -> Run {
    let mut latencies = Vec::with_capacity(inputs.len());
    let begin = Instant::now();
    let sum = drive(pipeline, inputs, Instant::now, |batch| {
        latencies.push(batch.born.elapsed().as_nanos() as f64 / 1e3);
    });
    let wall = begin.elapsed();
    assert_eq!(sum, expected, "not what a serial run gives");
    latencies.sort_by(f64::total_cmp);
    let at = |share: f64| latencies[((latencies.len() - 1) as f64 * share) as usize];
    let busy = pipeline.stats().operators.iter().map(|operator| operator.busy).sum::<Duration>();
    Run {
        seconds: wall.as_secs_f64(),
        rate: inputs.len() as f64 * inputs[0].len() as f64 / wall.as_secs_f64() / 1e3,
        p50_us: at(0.5),
        p99_us: at(0.99),
        cores: busy.as_secs_f64() / wall.as_secs_f64(),
    }
}

/// The runs of several variants, in turn, until the budget is spent; the first round does not count.
fn rounds(budget: Duration, shape: &Shape, steps: &[Step], variants: &[Options]) -> (Vec<Vec<Run>>, machine::Usage) {
    let inputs = inputs(shape.items, shape.envelopes);
    let expected = serial(steps, &inputs);
    let begin = Instant::now();
    let mut runs = vec![Vec::new(); variants.len()];
    let mut meter = machine::Meter::start();
    for round in 0..100 {
        for at in 0..variants.len() {
            // Nobody is always first.
            let at = (at + round) % variants.len();
            let one = run(&build(steps, variants[at].clone()), &inputs, expected);
            if round > 0 {
                runs[at].push(one);
            }
        }
        if round == 0 {
            meter = machine::Meter::start();
        }
        if begin.elapsed() >= budget && round >= 3 {
            break;
        }
    }
    (runs, meter.stop())
}

fn of(runs: &[Run], figure: impl Fn(&Run) -> f64) -> Vec<f64> {
    runs.iter().map(figure).collect()
}

fn figures(name: &str, runs: &[Run]) -> (String, Value) {
    let middle = |figure: fn(&Run) -> f64| (median(&of(runs, figure)) * 10.0).round() / 10.0;
    let figures = json!({
        "k_items_s": middle(|run| run.rate), "p50_us": middle(|run| run.p50_us), "p99_us": middle(|run| run.p99_us),
        "busy_cores": (median(&of(runs, |run| run.cores)) * 100.0).round() / 100.0,
    });
    (name.to_owned(), figures)
}

/// Throughput and p50 latency of one variant beside another one.
fn beside(report: &mut Report, what: &str, claim: &str, ours: &[Run], peer: &[Run], usage: machine::Usage) {
    let pair = |figure: fn(&Run) -> f64| Paired::new(of(ours, figure), of(peer, figure), usage);
    for (name, unit, better, paired) in [
        ("throughput", "k items/s", Better::Higher, pair(|run| run.rate)),
        ("p50 latency", "µs", Better::Lower, pair(|run| run.p50_us)),
    ] {
        let case = Case::new(format!("{what}: {name}"), unit, better, paired);
        report.case(case.with("claim", claim).with("workers", WORKERS).with("in_flight", 64));
    }
}

fn options() -> Options {
    Options { workers: WORKERS, mode: Mode::Parallel, in_flight: 64, ..Options::default() }
}

/// The same shape with as many envelopes as the fastest variant needs that time for.
fn lasting(time: Duration, shape: &Shape, variants: &[Options]) -> Shape {
    let sample = inputs(shape.items, shape.envelopes);
    let expected = serial(shape.steps, &sample);
    let seconds = |options: &Options| run(&build(shape.steps, options.clone()), &sample, expected).seconds;
    let fastest = variants.iter().map(seconds).fold(f64::INFINITY, f64::min);
    // A quarter more, since a longer job starts its threads once, too.
    let times = (1.25 * time.as_secs_f64() / fastest).ceil().max(1.0) as usize;
    Shape { envelopes: shape.envelopes * times, ..*shape }
}

/// The schedulers against each other, on each pipeline.
fn schedulers(asked: &harness::Options, report: &mut Report, cases: usize) {
    let with = |scheduler| Options { scheduler, ..options() };
    let mut variants = FIXED.map(with).to_vec();
    variants.push(with(SchedulerKind::Adaptive));
    for shape in &SHAPES {
        let shape = &lasting(if asked.quick { QUICK_JOB } else { JOB }, shape, &variants);
        let (runs, usage) = rounds(asked.budget(cases) * 2, shape, shape.steps, &variants);
        let job_s = runs.iter().flatten().map(|run| run.seconds).fold(f64::INFINITY, f64::min);
        let rate = |at: usize| median(&of(&runs[at], |run| run.rate));
        let by_rate = |among: &[usize]| {
            let mut order = among.to_vec();
            order.sort_by(|a, b| rate(*b).total_cmp(&rate(*a)));
            (order[0], order[order.len() - 1])
        };
        let (best, worst) = by_rate(&[0, 1, 2, 3]);
        let (narrow, spread) = (by_rate(&[0, 1]).0, by_rate(&[2, 3]).0);
        let name = |at: usize| FIXED[at].name();
        let all = FIXED.iter().map(|kind| kind.name()).chain(["adaptive"]).zip(&runs);
        let all = all.map(|(name, runs)| figures(name, runs)).collect::<serde_json::Map<_, _>>();
        let pair = |a: usize, b: usize| Paired::new(of(&runs[a], |run| run.rate), of(&runs[b], |run| run.rate), usage);
        let case =
            Case::new(format!("{}: adaptive vs best fixed", shape.name), "k items/s", Better::Higher, pair(4, best));
        report.case(case.with("best", name(best)).with("all", Value::Object(all)).with("shortest_job_s", job_s));
        let case =
            Case::new(format!("{}: best vs worst fixed", shape.name), "k items/s", Better::Higher, pair(best, worst));
        let case = case.with("claim", "equal worker time still gives unequal throughput");
        report.case(case.with("best", name(best)).with("worst", name(worst)));
        let what = format!("{}: spreading ({}) vs one at a time ({})", shape.name, name(spread), name(narrow));
        let claim = "spreading heuristics beat one-operator-at-a-time ones in both metrics";
        beside(report, &what, claim, &runs[spread], &runs[narrow], usage);
    }
}

/// Queues before a keyed operator.
fn queues(asked: &harness::Options, report: &mut Report, cases: usize) {
    let shape = Shape { name: "keyed", steps: &[], items: 4, envelopes: 4_000 };
    let variants = [QueueKind::Hybrid, QueueKind::Partitioned].map(|queue| Options { queue, ..options() });
    for partitions in [8, 512] {
        let steps = [Step::Map(50), Step::Keyed(800, partitions), Step::Chain(10)];
        let (runs, usage) = rounds(asked.budget(cases), &shape, &steps, &variants);
        let claim = "hybrid affords finer partitions and balances better; partitioned raises latency";
        beside(report, &format!("hybrid vs partitioned, {partitions} partitions"), claim, &runs[0], &runs[1], usage);
    }
}

/// Buffers behind light operators.
fn buffers(asked: &harness::Options, report: &mut Report, cases: usize) {
    let variants = [ReorderKind::NonBlocking, ReorderKind::Locked].map(|reorder| Options { reorder, ..options() });
    for shape in &SHAPES[..2] {
        let (runs, usage) = rounds(asked.budget(cases), shape, shape.steps, &variants);
        let claim = "non-blocking wins with light operators and high selectivity";
        beside(report, &format!("{}: non-blocking vs locked", shape.name), claim, &runs[0], &runs[1], usage);
    }
}

/// The whole beside a loop: what a pipeline costs where it cannot help, and gains where it can.
fn fallback(asked: &harness::Options, report: &mut Report, cases: usize) {
    for (label, rounds_each, envelopes) in
        [("0.1 us", 80, 200_000), ("1 us", 800, 60_000), ("10 us", 8_000, 6_000), ("100 us", 80_000, 600)]
    {
        let steps = [Step::Map(rounds_each), Step::Chain(4)];
        let inputs = inputs(1, envelopes);
        let expected = serial(&steps, &inputs);
        let rate = |begin: Instant| envelopes as f64 / begin.elapsed().as_secs_f64() / 1e3;
        let mut inline = 0.0;
        let paired = harness::compare(
            asked.budget(cases),
            || {
                let pipeline = build(&steps, Options { mode: Mode::Auto, ..options() });
                let begin = Instant::now();
                assert_eq!(drive(&pipeline, &inputs, || begin, |_| {}), expected, "not what a serial run gives");
                let rate = rate(begin);
                inline = pipeline.stats().inline as f64 / envelopes as f64;
                rate
            },
            || {
                let begin = Instant::now();
                assert_eq!(serial(&steps, &inputs), expected);
                rate(begin)
            },
        );
        let case = Case::new(
            format!("auto, {label} an envelope of one item, vs serial loop"),
            "k items/s",
            Better::Higher,
            paired,
        );
        report.case(case.with("inline_share", inline).with("workers", WORKERS));
    }
}

/// Runs the bench.
pub fn run_all(asked: &harness::Options, report: &mut Report) {
    // Schedulers count twice: they have five variants.
    let cases = 2 * SHAPES.len() + 2 + 2 + 4;
    fallback(asked, report, cases);
    schedulers(asked, report, cases);
    queues(asked, report, cases);
    buffers(asked, report, cases);
}
