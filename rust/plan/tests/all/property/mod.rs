//! All operators in random plans, on workers whose bins move, are split and merged, and whose epochs fail, against an [oracle]: after each epoch
//! what came out of it, what was late in it, and what its functions gave to side outputs (M-01 to M-03).
//!
//! A seed makes a plan, its rows by epochs (late ones, rows without a time or key, sources that are silent), and what happens: on how many
//! workers of how many processes it runs, which bins move when, which epochs are broken off, fail or are done for nothing and come again, from what
//! the processes still have or from files, then on other workers and bins; what was in vain may have had other rows. [Plans](plans) are chained and
//! branch: maps and filters, flat maps, bounded parts and loops, unions, aggregates by key and without, sketches and those that users write among
//! them, in windows of all kinds, which may be days of a time zone, in sessions, finals and updates, distinct, top, joins of all kinds, also such as
//! promise `1:m`, functions with state, and functions of groups with timeouts in event time and processing time. Users' functions are
//! [in Rust](functions), and do what those in Python do. Left to tests of their own: promises that are not kept, and columns of other types
//! than whole numbers and texts. The threads are real: how far they are when an epoch is broken off, or a bin moves, no seed says.
//!
//! `PENSTOCK_SEEDS=10000 cargo test -p penstock-plan --test all property` tries more seeds than the usual 56; a seed that fails says how to run it
//! again, and is found in [`FOUND`] from then on.

mod functions;
mod oracle;
mod pieces;
pub(crate) mod plans;

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use arrow_schema::{DataType, Field, Schema, SchemaRef};
use penstock_bins::{Command, Range, Routing, bin, range_of};
use penstock_files::File;
use penstock_plan::host::{GroupConfig, HostError, PartitionRows, Resident, Watermarks};
use penstock_plan::spec::AggSpec;
use penstock_plan::{Beside, Callbacks, Plan, StepSpec};

use self::functions::{Functions, block};
use self::oracle::Given;
pub(crate) use self::oracle::Oracle;
use self::plans::Clock;
use crate::common::{Cell, cells};
use crate::group::{Cluster, Deed, Done, Random, config, deeds, file, fresh};

/// Seeds that have found something, and are always tried.
const FOUND: &[u64] = &[37, 245, 1383];
const USUAL: u64 = 56;

type Row = Vec<Cell>;
type Bag = Vec<Row>;

/// Columns that sources have, and most functions make: a key, a time in milliseconds, a value and a text.
const PLAIN: [(&str, DataType); 4] =
    [("k", DataType::Int64), ("t", DataType::Int64), ("v", DataType::Int64), ("s", DataType::Utf8)];

fn schema(columns: &[(&str, DataType)], again: bool) -> SchemaRef {
    let again = again.then_some(("again", DataType::Boolean));
    let all = columns.iter().cloned().chain(again);
    Arc::new(Schema::new(all.map(|(name, kind)| Field::new(name, kind, true)).collect::<Vec<_>>()))
}

/// A cell to compare: floats without their last bits, which depend on the order of rows.
fn plain(cell: Cell) -> Cell {
    match cell {
        // No value that there is lies between two of these.
        Cell::Float(bits) => Cell::Int((f64::from_bits(bits) * 1_234_567.890_123).round() as i128),
        other => other,
    }
}

/// The rows that workers tell of an epoch, and the late ones and those of side outputs by their kinds, sorted.
pub(crate) fn told(plan: &Plan, done: &Done) -> Vec<(String, Bag)> {
    let beside = Beside::of(plan);
    let mut kinds = vec![Bag::new(); beside.kinds()];
    for batch in &done.beside {
        let (kind, batch) = beside.unpack(batch);
        kinds[kind].extend(cells(&batch));
    }
    named(plan, done.rows.iter().flat_map(cells).collect(), kinds)
}

/// Rows, and those beside them by kind: all sorted, with the names of what they are.
fn named(plan: &Plan, rows: Bag, kinds: Vec<Bag>) -> Vec<(String, Bag)> {
    let lates = plan.late_outputs().into_iter().map(|output| output.name);
    let names = lates.chain(plan.side_outputs().into_iter().map(|side| side.name));
    let beside = names.zip(kinds).map(|(name, rows)| (name, sorted(rows)));
    [("rows".to_owned(), sorted(rows))].into_iter().chain(beside).collect()
}

/// The same of what the oracle gives.
pub(crate) fn expected(plan: &Plan, given: &Given) -> Vec<(String, Bag)> {
    let (lates, sides) = (plan.late_outputs(), plan.side_outputs());
    let mut kinds = vec![Bag::new(); lates.len() + sides.len()];
    for (of, rows) in &given.late {
        let kind = lates.iter().position(|output| output.of.contains(of));
        kinds[kind.unwrap_or_else(|| panic!("late rows of {of:?}"))].extend(rows.iter().cloned());
    }
    for (name, rows) in &given.aside {
        let kind = sides.iter().position(|side| side.name == *name);
        kinds[lates.len() + kind.unwrap_or_else(|| panic!("rows of {name}"))].extend(rows.iter().cloned());
    }
    named(plan, given.rows.clone(), kinds)
}

fn sorted(rows: Bag) -> Bag {
    let mut rows: Bag = rows.into_iter().map(|row| row.into_iter().map(plain).collect()).collect();
    rows.sort_unstable();
    rows
}

/// Rows of a source in an epoch: their times are around the epoch's, some behind what the watermark may have reached.
fn rows(random: &mut Random, clock: Clock, epoch: u64) -> Bag {
    let (keys, count) = ([3, 12, 40][random.below(3) as usize], 1 + random.below(25));
    // Where times are far apart, much ends just where a watermark is.
    let unit = [1, 5][random.below(2) as usize];
    let mut row = || {
        let (key, time, value) = (random.below(keys), 10 * epoch + unit * random.below(30 / unit), random.below(16));
        let text = ["", "b", "ccc", "a longer text than fits into a word"][random.below(4) as usize];
        let mut row = vec![
            Cell::Int(key.into()),
            Cell::Int((clock.base + clock.unit * (time as i64 - 15)).into()),
            Cell::Int(i128::from(value) - 3),
            Cell::text(text),
        ];
        for (cell, one_in) in row.iter_mut().zip([16, 25, 10, 12]) {
            if random.below(one_in) == 0 {
                *cell = Cell::Null;
            }
        }
        row
    };
    (0..count).map(|_| row()).collect()
}

/// Rows by source, and the same as blocks of theirs.
fn fed(random: &mut Random, clock: Clock, epoch: u64, sources: usize) -> (Vec<Bag>, Vec<(u8, Bag)>) {
    let (mut all, mut blocks) = (vec![Bag::new(); sources], Vec::new());
    for (source, all) in all.iter_mut().enumerate() {
        for _ in 0..[0, 1, 1, 2, 3][random.below(5) as usize] {
            let rows = rows(random, clock, epoch);
            all.extend(rows.iter().cloned());
            blocks.push((source as u8, rows));
        }
    }
    (all, blocks)
}

/// The watermark by its definition: of the sources with event time that are not silent for too long the least of what they have reached.
struct Reached {
    /// Of each source its lateness, where it has event time, and how long it may be silent.
    sources: Vec<(Option<i64>, Option<i64>)>,
    greatest: Vec<Option<i64>>,
    /// When rows of it were last known of: at the first look after them.
    heard: Vec<Option<i64>>,
    spoke: Vec<bool>,
    now: Option<i64>,
}

impl Reached {
    fn new(plan: &Plan) -> Self {
        let sources: Vec<_> = plan
            .spec()
            .sources
            .iter()
            .map(|source| (source.event_time.as_ref().map(|_| source.lateness_ms), source.idle_after_ms))
            .collect();
        let count = sources.len();
        Self { sources, greatest: vec![None; count], heard: vec![None; count], spoke: vec![false; count], now: None }
    }

    /// After an epoch with these rows, at a time of the clock.
    fn after(&mut self, clock: i64, sources: &[Bag]) -> Option<i64> {
        let mut least = Vec::new();
        for (at, rows) in sources.iter().enumerate() {
            if self.heard[at].is_none() || self.spoke[at] {
                self.heard[at] = Some(clock);
            }
            let times = rows.iter().filter_map(|row| match row[1] {
                Cell::Int(time) => Some(time as i64),
                _ => None,
            });
            let greatest = times.max();
            self.spoke[at] = greatest.is_some();
            self.greatest[at] = self.greatest[at].max(greatest);
            let (lateness, silent) = self.sources[at];
            let idle = !self.spoke[at] && silent.is_some_and(|silent| clock - self.heard[at].unwrap() >= silent);
            if let (Some(lateness), false) = (lateness, idle) {
                least.push(self.greatest[at].map(|greatest| greatest - lateness));
            }
        }
        self.now = self.now.max(least.into_iter().min().flatten());
        self.now
    }
}

/// What happened in runs.
#[derive(Clone, Debug, Default)]
struct Seen {
    /// Steps by their words.
    steps: BTreeMap<&'static str, usize>,
    rows: usize,
    late: usize,
    /// Of side outputs.
    aside: usize,
    moves: usize,
    splits: usize,
    merges: usize,
    broken: usize,
    failed: usize,
    undone: usize,
    loaded: usize,
}

impl Seen {
    fn note(&mut self, deeds: &[Deed]) {
        for deed in deeds {
            match deed {
                Deed::Moves(_) => self.moves += 1,
                Deed::Recut(commands) if matches!(commands.first(), Some(Command::Merge { .. })) => self.merges += 1,
                Deed::Recut(_) => self.splits += 1,
            }
        }
    }

    fn add(&mut self, mut other: Seen) {
        other.steps.iter().for_each(|(word, count)| *self.steps.entry(word).or_default() += count);
        for (sum, count) in self.counts_mut().into_iter().zip(other.counts_mut()) {
            *sum += *count;
        }
    }

    fn counts_mut(&mut self) -> [&mut usize; 10] {
        let Self { steps: _, rows, late, aside, moves, splits, merges, broken, failed, undone, loaded } = self;
        [rows, late, aside, moves, splits, merges, broken, failed, undone, loaded]
    }
}

/// One run of a plan.
struct Run {
    random: Random,
    plan: Arc<Plan>,
    functions: Arc<Functions>,
    config: GroupConfig,
    processes: usize,
    threads: usize,
    cluster: Cluster,
    /// Where what was asked for leads, how much of it there was since the cluster began, and how much is complete.
    routing: Routing,
    asked: usize,
    migrated: usize,
    generation: u64,
    files: Vec<File<Vec<u8>>>,
    seen: Seen,
}

fn calls(functions: &Arc<Functions>) -> Arc<dyn Callbacks> {
    functions.clone()
}

impl Run {
    /// Some splits, moves and merges, asked for before or after `release`.
    fn release(&mut self, epoch: u64, blocks: &[(u8, Bag)], watermark: Option<i64>, clock: Option<i64>) {
        let doing = deeds(&mut self.random, &mut self.routing, self.processes * self.threads);
        self.seen.note(&doing);
        self.asked += doing.len();
        let early = self.random.below(2) == 0;
        if early {
            self.cluster.ask(epoch, &doing);
            if self.random.below(3) == 0 {
                self.cluster.rest(self.asked, &mut self.migrated);
            }
        }
        let watermark = watermark.map(|ms| ms.saturating_mul(1_000));
        for (process, (group, _)) in self.cluster.groups.iter().enumerate() {
            let mine = blocks.iter().enumerate().filter(|(at, _)| at % self.processes == process);
            let input = mine.map(|(at, (source, rows))| PartitionRows {
                source: *source,
                partition: at as u32,
                batches: vec![block(&schema(&PLAIN, false), rows).into()],
                rows_before: blocks[..at].iter().map(|(_, rows)| rows.len() as u64).sum(),
            });
            group.release_at(epoch, input.collect(), watermark, clock).unwrap();
        }
        if !early {
            self.cluster.ask(epoch, &doing);
        }
    }

    /// What came of an epoch is what the oracle says.
    fn check(&self, epoch: u64, done: &Done, given: &Given) {
        for ((what, given), (_, expected)) in told(&self.plan, done).into_iter().zip(expected(&self.plan, given)) {
            if given == expected {
                continue;
            }
            let without = |these: &Bag, those: &Bag| -> Bag {
                let mut left = those.clone();
                let is_more = |row: &&Row| match left.iter().position(|other| other == *row) {
                    Some(at) => (left.swap_remove(at), false).1,
                    None => true,
                };
                these.iter().filter(is_more).take(20).cloned().collect()
            };
            panic!(
                "{what} of epoch {epoch}, on {} x {} workers: {} rows, not {}\nmore: {:?}\nmissing: {:?}\n{}\n{:?}",
                self.processes,
                self.threads,
                given.len(),
                expected.len(),
                without(&given, &expected),
                without(&expected, &given),
                self.plan.explain(),
                self.plan.spec().steps,
            );
        }
    }

    /// An epoch is begun, and all of it is in vain: it is broken off, a function fails in it, or it is done, but does not count.
    fn in_vain(
        &mut self,
        epoch: u64,
        blocks: &[(u8, Bag)],
        watermark: Option<i64>,
        clock: Option<i64>,
        expected: &Given,
    ) {
        let how = [0, 1, 1, 2][self.random.below(4) as usize];
        if how == 0 {
            self.functions.fail_after(self.random.below(8) as i64);
        }
        self.release(epoch, blocks, watermark, clock);
        let done = (how < 2).then(|| self.cluster.done(epoch, &mut self.migrated));
        let failed = how == 0 && self.functions.has_failed();
        match done {
            Some(Err(_)) if failed => self.seen.failed += 1,
            Some(Err(error)) => panic!("epoch {epoch}: {error}"),
            Some(Ok(done)) if !failed => {
                self.check(epoch, &done, expected);
                self.seen.undone += 1;
            }
            Some(Ok(_)) => panic!("a call that failed is not told of in epoch {epoch}"),
            None => self.seen.broken += 1,
        }
    }

    /// The next generation, on what the processes have of the beginning of `epoch`, or on files.
    fn again(self, epoch: u64, watermark: Option<i64>) -> Self {
        let Self { mut random, plan, functions, mut config, mut processes, cluster, files, mut seen, .. } = self;
        let (mut residents, errors) = cluster.stop();
        let told = |error: &&HostError| !error.to_string().contains("it was told to fail");
        assert_eq!(errors.iter().filter(told).map(ToString::to_string).collect::<Vec<_>>(), Vec::<String>::new());
        let threads;
        if random.below(2) == 0 {
            (processes, threads) = workers(&mut random);
            config.bits = 1 + random.below(5) as u8;
            let mut routing = Routing::new(config.bits, processes * threads).unwrap();
            deeds(&mut random, &mut routing, processes * threads);
            config.routings = vec![routing; plan.keyed_ops()];
            let mine = |process: usize| {
                let here = |(_, owner): &(u32, u32)| *owner as usize / threads == process;
                let ranges: Vec<Range> = config.routings[0]
                    .bins_owned()
                    .filter(here)
                    .map(|(bin, _)| range_of(bin, config.bits).unwrap())
                    .collect();
                crate::group::loaded(&plan, &calls(&functions), &files, ranges.into_iter())
            };
            residents = (0..processes).map(mine).collect();
            seen.loaded += 1;
        } else {
            threads = 1 + random.below(if processes == 1 { 4 } else { 2 }) as usize;
            config.routings = routings(&mut random, &residents, epoch, &config, threads);
        }
        config.epoch = epoch;
        config.watermark = watermark.map(|ms| ms.saturating_mul(1_000));
        let generation = self.generation + 1;
        let cluster = Cluster::start(&config, processes, threads, generation, residents);
        let (routing, asked, migrated) = (config.routings[0].clone(), 0, 0);
        Self {
            random,
            plan,
            functions,
            config,
            processes,
            threads,
            cluster,
            routing,
            asked,
            migrated,
            generation,
            files,
            seen,
        }
    }
}

/// Owners of bins, each in the process that can bring it back. All operators have the same ranges, as in an engine: of a bin that was split before, and
/// all whose parts are there as well, either comes.
fn routings(
    random: &mut Random,
    residents: &[Resident],
    epoch: u64,
    config: &GroupConfig,
    threads: usize,
) -> Vec<Routing> {
    let finest = random.below(2) == 0;
    let inventories: Vec<_> = residents.iter().map(|resident| resident.inventory(epoch)).collect();
    let salt = random.below(7) as u32;
    let process_of = |op: usize, range: Range| inventories.iter().position(|all| all[op].1.contains(&range));
    let ops = 0..config.plan.keyed_ops();
    let of_first = inventories.iter().flat_map(|inventory| inventory.first()).flat_map(|(_, ranges)| ranges);
    let common: BTreeSet<Range> =
        of_first.copied().filter(|range| ops.clone().all(|op| process_of(op, *range).is_some())).collect();
    let chosen =
        cover(Range::ALL, &common, finest).unwrap_or_else(|| panic!("of {common:?} nothing is whole: {inventories:?}"));
    let routing = |op: usize| {
        let owned = chosen.iter().map(|range| {
            let process = process_of(op, *range).expect("all operators have it");
            let thread = (bin(range.first(), 10) + salt) as usize % threads;
            (*range, (process * threads + thread) as u32)
        });
        Routing::of_ranges(config.bits, &owned.collect::<Vec<_>>()).unwrap()
    };
    ops.clone().map(routing).collect()
}

/// A range by those that are there: itself, or its halves, each so. Of one that was split while it moved one part may be missing, and its whole there.
fn cover(range: Range, there: &BTreeSet<Range>, finest: bool) -> Option<Vec<Range>> {
    let itself = || there.contains(&range).then(|| vec![range]);
    let is_within = |other: &Range| *other != range && range.holds(*other);
    let halves = || {
        let [first, second] = there.iter().any(is_within).then(|| range.split()).flatten()?;
        Some([cover(first, there, finest)?, cover(second, there, finest)?].concat())
    };
    if finest { halves().or_else(itself) } else { itself().or_else(halves) }
}

/// How many processes, and threads of each.
fn workers(random: &mut Random) -> (usize, usize) {
    [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1)][random.below(7) as usize]
}

/// What a step is, and what of it is apart from other such steps.
fn words(step: &StepSpec) -> Vec<&'static str> {
    let sketch = |agg: &AggSpec| match &*agg.function {
        "approx_count_distinct" => Some("approx_count_distinct"),
        "approx_quantile" => Some("approx_quantile"),
        _ => None,
    };
    let more = match step {
        StepSpec::Agg { aggs, .. } => aggs.iter().filter_map(sketch).collect(),
        StepSpec::GroupState { event_time: true, .. } => vec!["group_state in event time"],
        StepSpec::Window { zone: Some(_), .. } => vec!["window in a zone"],
        StepSpec::Join { validate: Some(_), .. } => vec!["join 1:m"],
        _ => Vec::new(),
    };
    [vec![step.op()], more].concat()
}

/// One run; panics when something is wrong.
fn simulate(seed: u64) -> Seen {
    let mut random = Random::seeded(seed);
    let epochs = 3 + random.below(4);
    let made = plans::made(&mut random, epochs);
    let plan = Plan::from_json(&made.spec.to_json()).unwrap_or_else(|error| panic!("{error}: {:?}", made.spec.steps));
    let plan = Arc::new(plan);
    let mut oracle = Oracle::new(&made.spec, &made.calls);
    let names = |schema: &SchemaRef| -> Vec<_> {
        schema.fields().iter().map(|field| (field.name().clone(), field.data_type().clone())).collect()
    };
    assert_eq!(names(plan.output_schema()), names(&oracle.shape().schema));
    let functions = Arc::new(Functions::new(&made));
    let (processes, threads) = workers(&mut random);
    let mut config = config(&plan, &calls(&functions), processes * threads);
    let journal = random.below(4) > 0;
    (config.journal, config.record) = (journal, journal);
    (config.slice_rows, config.window) = (4 + random.below(40) as usize, 1 + random.below(4) as u32);
    config.ship_bytes = 1 + random.below(200) as usize;
    let cluster = Cluster::start(&config, processes, threads, 1, fresh(processes));
    let routing = config.routings[0].clone();
    let mut seen = Seen::default();
    for word in made.spec.steps.iter().flat_map(|node| words(&node.step)) {
        *seen.steps.entry(word).or_default() += 1;
    }
    let (asked, migrated, generation, files) = (0, 0, 1, Vec::new());
    let mut run = Run {
        random,
        plan: plan.clone(),
        functions,
        config,
        processes,
        threads,
        cluster,
        routing,
        asked,
        migrated,
        generation,
        files,
        seen,
    };
    let (mut naive, mut watermarks) = (Reached::new(&plan), Watermarks::of(&plan));
    let (mut clock, mut watermark) = (0, None);
    // The last epoch is one behind the end, at whose mark nothing is left to undo.
    for epoch in 0..=epochs {
        let count = plan.sources().len();
        let (sources, blocks) = match epoch < epochs {
            true => fed(&mut run.random, made.clock, epoch, count),
            false => (vec![Bag::new(); count], Vec::new()),
        };
        clock += 40 + run.random.below(90) as i64;
        let before = watermark;
        watermark = naive.after(clock, &sources);
        watermarks.tick(clock);
        for (source, rows) in sources.iter().enumerate() {
            for row in rows {
                if let Cell::Int(time) = row[1] {
                    watermarks.reach(source, time as i64 * 1_000);
                }
            }
        }
        assert_eq!(watermarks.now(), watermark.map(|ms| ms * 1_000));
        if epoch + 1 >= epochs {
            watermark = Some(i64::MAX);
        }
        // Behind the end there are no times.
        let told = watermark.filter(|_| epoch < epochs);
        let told_clock = Some(clock).filter(|_| epoch < epochs);
        if journal && run.random.below(2) == 0 {
            // With these rows, or with others, of which nothing may stay, nor of where they have led.
            let (mut sources, mut blocks, mut told, mut clock) = (sources.clone(), blocks.clone(), told, told_clock);
            if epoch < epochs && run.random.below(3) > 0 {
                (sources, blocks) = fed(&mut run.random, made.clock, epoch, count);
                told = told.map(|ms| ms.saturating_add(made.clock.unit * run.random.below(30) as i64));
                clock = clock.map(|clock| clock + run.random.below(90) as i64);
            }
            let expected = oracle.clone().epoch_at(&sources, told, clock);
            run.in_vain(epoch, &blocks, told, clock, &expected);
            run = run.again(epoch, before);
        }
        let expected = oracle.epoch_at(&sources, told, told_clock);
        run.release(epoch, &blocks, told, told_clock);
        let done = run.cluster.done(epoch, &mut run.migrated).unwrap_or_else(|error| panic!("epoch {epoch}: {error}"));
        run.check(epoch, &done, &expected);
        run.seen.rows += expected.rows.len();
        run.seen.late += expected.late.values().map(Bag::len).sum::<usize>();
        run.seen.aside += expected.aside.values().map(Bag::len).sum::<usize>();
        run.files.push(file(&plan, epoch, done.records));
        if journal {
            run.cluster.groups.iter().for_each(|(group, _)| group.settle(epoch));
        }
    }
    run.cluster.rest(run.asked, &mut run.migrated);
    let (_, errors) = run.cluster.stop();
    assert!(errors.is_empty(), "{errors:?}");
    run.seen
}

/// Tries seeds: `PENSTOCK_SEED` alone, or those that have found something and `PENSTOCK_SEEDS` from 0 on, and returns what they gave.
fn try_all<T>(test: &str, usual: u64, run: impl Fn(u64) -> T) -> Vec<T> {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().expect("a number of seeds"));
    let seeds: Vec<u64> = match number("PENSTOCK_SEED") {
        Some(seed) => vec![seed],
        None => {
            let all = 0..number("PENSTOCK_SEEDS").unwrap_or(usual);
            FOUND.iter().copied().filter(|seed| !all.contains(seed)).chain(all.clone()).collect()
        }
    };
    let try_one = |seed: u64| match catch_unwind(AssertUnwindSafe(|| run(seed))) {
        Ok(made) => made,
        Err(panic) => {
            eprintln!("replay: PENSTOCK_SEED={seed} cargo test -p penstock-plan --test all property::{test}");
            std::panic::resume_unwind(panic);
        }
    };
    seeds.into_iter().map(try_one).collect()
}

#[test]
fn random_plans_give_what_the_oracle_says_at_every_epoch() {
    let seen = try_all("random_plans_give", USUAL, simulate);
    let many = seen.len() as u64 >= USUAL;
    let mut all = Seen::default();
    seen.into_iter().for_each(|seen| all.add(seen));
    println!("{all:?}");
    if many {
        assert!(all.counts_mut().into_iter().all(|count| *count > 5), "few of a kind");
        assert!(all.steps.len() == 19 && all.steps.values().all(|count| *count > 1), "few of a kind");
    }
}
