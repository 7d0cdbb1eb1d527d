//! Groups of workers against a sequential oracle: any number of workers and processes, migrations while
//! epochs run and between them, rollback after a failure.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::group::{Cluster, PATIENCE, Random, config, fresh, moves, read, rows};
use arrow_array::RecordBatch;
use crossbeam::channel::unbounded;
use penstock_bins::{BinName, ControlError, Range, Routing};
use penstock_dataflow::{BoxError, fabric};
use penstock_plan::host::{
    Event, Group, GroupConfig, HostError, Inline, Keep, NotStarted, PartitionRows, Pulled, Refusal, Resident, Rows,
    Stored,
};
use penstock_plan::{CallError, Callbacks, Encoding, ForeignState, Grouped, Plan, SideRows, StateFault};

fn schema_text(columns: &[&str]) -> String {
    let batch = rows(columns, &[]);
    let mut bytes = Vec::new();
    arrow_ipc::writer::StreamWriter::try_new(&mut bytes, &batch.schema()).unwrap();
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let word = chunk.iter().fold(0_u32, |word, byte| word << 8 | u32::from(*byte)) << (8 * (3 - chunk.len()));
        for digit in 0..4 {
            let sextet = (word >> (18 - 6 * digit)) as usize & 63;
            text.push(if digit <= chunk.len() { DIGITS[sextet] as char } else { '=' });
        }
    }
    text
}

fn plan(columns: &[&str], event_time: bool, steps: &str) -> Arc<Plan> {
    let event_time = if event_time { r#""event_time":"ts","# } else { "" };
    let schema = schema_text(columns);
    let text =
        format!(r#"{{"version":2,"sources":[{{{event_time}"schema":"{schema}","lateness_ms":0}}],"steps":[{steps}]}}"#);
    Arc::new(Plan::from_json(&text).unwrap())
}

pub(crate) fn counting(emit: &str) -> Arc<Plan> {
    plan(
        &["k", "v"],
        false,
        &format!(
            r#"{{"op":"key_by","columns":["k"]}},
               {{"op":"agg","emit":"{emit}","aggs":[{{"name":"n","fn":"count"}},{{"name":"s","fn":"sum","column":"v"}}]}}"#
        ),
    )
}

fn sequences() -> Arc<Plan> {
    let schema = schema_text(&["k", "at", "v"]);
    plan(
        &["k", "v"],
        false,
        &format!(
            r#"{{"op":"key_by","columns":["k"]}},{{"op":"stateful_map","call":0,"schema":"{schema}","name":"number"}}"#
        ),
    )
}

/// User code: numbers the rows of each key, with undo; fails at a value when told to.
#[derive(Default)]
struct Numbers {
    poison: Arc<Mutex<Option<i64>>>,
    /// Its state cannot be encoded.
    stuck: Arc<Mutex<Option<i64>>>,
    applied: Arc<AtomicU64>,
}

#[derive(Clone, Default)]
struct Numbering {
    seen: BTreeMap<i64, i64>,
    saved: Option<BTreeMap<i64, i64>>,
    poison: Arc<Mutex<Option<i64>>>,
    stuck: Arc<Mutex<Option<i64>>>,
    applied: Arc<AtomicU64>,
}

impl Callbacks for Numbers {
    fn map(&self, _: usize, batch: &RecordBatch, _: &mut SideRows) -> Result<RecordBatch, CallError> {
        Ok(batch.clone())
    }

    fn new_state(&self, _: usize) -> Box<dyn ForeignState> {
        let (poison, stuck, applied) = (self.poison.clone(), self.stuck.clone(), self.applied.clone());
        Box::new(Numbering { poison, stuck, applied, ..Numbering::default() })
    }

    fn apply(&self, _: usize, block: &mut Grouped<'_>, _: &mut SideRows) -> Result<RecordBatch, CallError> {
        block.each(Numbering::apply)
    }
}

impl Numbering {
    fn apply(&mut self, batch: &RecordBatch) -> Result<RecordBatch, CallError> {
        if self.saved.is_none() {
            self.saved = Some(self.seen.clone());
        }
        let mut out = Vec::new();
        for row in read(std::slice::from_ref(batch)) {
            if *self.poison.lock().unwrap() == Some(row[1]) {
                return Err(CallError::new("number", "poisoned"));
            }
            let at = self.seen.entry(row[0]).or_default();
            out.push(vec![row[0], *at, row[1]]);
            *at += 1;
            self.applied.fetch_add(1, Ordering::Relaxed);
        }
        Ok(rows(&["k", "at", "v"], &out))
    }
}

impl ForeignState for Numbering {
    fn encode(&self, encoding: &mut Encoding) -> Result<Option<Vec<u8>>, StateFault> {
        let left = encoding.place(|| self.seen.clone().into_iter());
        match left.next() {
            Some((key, _)) if *self.stuck.lock().unwrap() == Some(key) => {
                Err(StateFault::Foreign(CallError::new("number", format!("the state of {key} is stuck"))))
            }
            next => Ok(next.map(|(key, count)| [key.to_le_bytes(), count.to_le_bytes()].concat())),
        }
    }

    fn absorb(&mut self, chunk: &[u8]) -> Result<(), StateFault> {
        let number = |at: usize| i64::from_le_bytes(chunk[at..at + 8].try_into().unwrap());
        self.seen.insert(number(0), number(8));
        Ok(())
    }

    fn bytes(&self) -> usize {
        16 * self.seen.len()
    }

    fn keys(&self) -> usize {
        self.seen.len()
    }

    fn mark(&mut self) {
        self.saved = None;
    }

    fn rollback(&mut self) -> Result<(), StateFault> {
        if let Some(saved) = self.saved.take() {
            self.seen = saved;
        }
        Ok(())
    }
}

#[test]
fn counts_equal_the_oracle_while_bins_move() {
    let none: Arc<dyn Callbacks> = Arc::new(Numbers::default());
    for (processes, threads) in [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2)] {
        for strategy in 0..3 {
            let workers = processes * threads;
            let config = config(&counting("update"), &none, workers);
            let cluster = Cluster::start(&config, processes, threads, 1, fresh(processes));
            let mut random = Random(7 + strategy);
            let mut oracle: BTreeMap<i64, (i64, i64)> = BTreeMap::new();
            let mut latest: BTreeMap<i64, (i64, i64)> = BTreeMap::new();
            let (mut asked, mut migrated) = (0, 0);
            for epoch in 0..8 {
                let count = random.below(1500) as usize;
                let values =
                    (0..count).map(|_| vec![random.below(300) as i64, random.below(9) as i64]).collect::<Vec<_>>();
                for row in &values {
                    let entry = oracle.entry(row[0]).or_default();
                    *entry = (entry.0 + 1, entry.1 + row[1]);
                }
                cluster.release(epoch, &["k", "v"], &values, None);
                cluster.groups[0].0.migrate(epoch, moves(&mut random, workers, strategy), None);
                asked += 1;
                let outputs = cluster.complete(epoch, &mut migrated).unwrap();
                let mut seen = std::collections::BTreeSet::new();
                for row in read(&outputs) {
                    assert!(seen.insert(row[0]), "key {} is reported twice in epoch {epoch}", row[0]);
                    latest.insert(row[0], (row[1], row[2]));
                }
                assert_eq!(latest, oracle, "{processes} x {threads}, strategy {strategy}, epoch {epoch}");
            }
            // Migrations that reach over the last epoch finish without data.
            while migrated < asked {
                match cluster.groups[0].1.recv_timeout(PATIENCE).expect("an idle migration finishes") {
                    Event::MigrationDone { .. } => migrated += 1,
                    other => panic!("{other:?}"),
                }
            }
            let (residents, errors) = cluster.stop();
            assert!(errors.is_empty(), "{errors:?}");
            let mut held = residents.iter().flat_map(|it| it.inventory(8).remove(0).1).collect::<Vec<_>>();
            held.sort_unstable();
            assert_eq!(held, (0..16).map(whole).collect::<Vec<_>>());
            let keys: u64 = residents.iter().map(Resident::keys).sum();
            assert_eq!(keys, oracle.len() as u64);
        }
    }
}

#[test]
fn the_order_of_rows_does_not_depend_on_workers() {
    let numbers: Arc<dyn Callbacks> = Arc::new(Numbers::default());
    let mut random = Random(3);
    let values = (0..3000).map(|v| vec![random.below(40) as i64, v]).collect::<Vec<_>>();
    let mut expected = Vec::new();
    let mut at: HashMap<i64, i64> = HashMap::new();
    for row in &values {
        let at = at.entry(row[0]).or_default();
        expected.push(vec![row[0], *at, row[1]]);
        *at += 1;
    }
    expected.sort_unstable();
    for (processes, threads) in [(1, 1), (1, 3), (2, 2), (3, 1)] {
        let config = config(&sequences(), &numbers, processes * threads);
        let cluster = Cluster::start(&config, processes, threads, 1, fresh(processes));
        let mut got = Vec::new();
        for (epoch, values) in values.chunks(1100).enumerate() {
            cluster.release(epoch as u64, &["k", "v"], values, None);
            cluster.groups[0].0.migrate(0, moves(&mut random, processes * threads, 1), None);
            got.extend(read(&cluster.complete(epoch as u64, &mut 0).unwrap()));
        }
        got.sort_unstable();
        assert_eq!(got, expected, "{processes} x {threads}");
        assert!(cluster.stop().1.is_empty());
    }
}

/// One of 16 bins.
fn whole(bin: u32) -> Range {
    Range::new(bin, 4).unwrap()
}

fn routing(owners: impl IntoIterator<Item = u32>) -> Routing {
    Routing::from_owners(owners.into_iter().collect()).unwrap()
}

/// Next owners after a failure: each bin in the process that can bring it back.
fn owners_at(residents: &[Resident], epoch: u64, threads: usize) -> Vec<Routing> {
    let inventories = residents.iter().map(|it| it.inventory(epoch)).collect::<Vec<_>>();
    let owner = |op: usize, bin: u32| {
        let having = (0..residents.len()).filter(|p| inventories[*p][op].1.contains(&whole(bin))).collect::<Vec<_>>();
        assert_eq!(having.len(), 1, "bin {bin} comes back once, from {having:?}");
        (having[0] * threads + bin as usize % threads) as u32
    };
    (0..inventories[0].len()).map(|op| routing((0..16).map(|bin| owner(op, bin)))).collect()
}

#[test]
fn a_failed_epoch_is_undone_and_replayed_with_the_same_rows() {
    for (processes, threads, seed) in [(1, 1, 1), (1, 3, 2), (2, 1, 3), (2, 2, 4), (3, 1, 5)] {
        let poison = Arc::new(Mutex::new(None));
        let numbers: Arc<dyn Callbacks> = Arc::new(Numbers { poison: poison.clone(), ..Numbers::default() });
        let workers = processes * threads;
        let mut config = config(&sequences(), &numbers, workers);
        config.journal = true;
        let mut random = Random(seed);
        let mut cluster = Cluster::start(&config, processes, threads, 1, fresh(processes));
        let mut at: HashMap<i64, i64> = HashMap::new();
        for epoch in 0..12_u64 {
            let values = (0..800).map(|v| vec![random.below(60) as i64, v]).collect::<Vec<_>>();
            let mut expected = Vec::new();
            for row in &values {
                let at = at.entry(row[0]).or_default();
                expected.push(vec![row[0], *at, row[1]]);
                *at += 1;
            }
            expected.sort_unstable();
            if epoch % 3 == 1 {
                *poison.lock().unwrap() = Some(random.below(800) as i64);
                cluster.groups[0].0.migrate(epoch, moves(&mut random, workers, epoch % 2), None);
                cluster.release(epoch, &["k", "v"], &values, None);
                let error = cluster.complete(epoch, &mut 0).unwrap_err();
                assert!(error.to_string().contains("poisoned"), "{error}");
                *poison.lock().unwrap() = None;
                let (residents, errors) = cluster.stop();
                assert!(errors.iter().any(|error| matches!(error, HostError::Call(call) if call.step == "number")));
                config.routings = owners_at(&residents, epoch, threads);
                config.epoch = epoch;
                cluster = Cluster::start(&config, processes, threads, epoch + 2, residents);
            }
            cluster.release(epoch, &["k", "v"], &values, None);
            cluster.groups[0].0.migrate(epoch, moves(&mut random, workers, 1), None);
            let mut got = read(&cluster.complete(epoch, &mut 0).unwrap());
            got.sort_unstable();
            let differ = got.iter().zip(&expected).find(|(got, expected)| got != expected);
            assert_eq!((got.len(), differ), (expected.len(), None), "{processes} x {threads}, epoch {epoch}");
        }
        assert!(cluster.stop().1.is_empty());
    }
}

#[test]
fn windows_close_with_the_watermark_on_any_number_of_workers() {
    let none: Arc<dyn Callbacks> = Arc::new(Numbers::default());
    let plan = plan(
        &["ts", "k"],
        true,
        r#"{"op":"key_by","columns":["k"]},{"op":"window","kind":"sliding","size_us":10000,"every_us":5000},
           {"op":"agg","aggs":[{"name":"n","fn":"count"}]},{"op":"top","n":1,"by":"n","per":"window"}"#,
    );
    let mut random = Random(9);
    let values = (0..4000).map(|i| vec![i / 20 + random.below(4) as i64, random.below(12) as i64]).collect::<Vec<_>>();
    let mut counts: BTreeMap<(i64, i64), i64> = BTreeMap::new();
    for row in &values {
        for start in [row[0].div_euclid(5) * 5, row[0].div_euclid(5) * 5 - 5] {
            *counts.entry((start, row[1])).or_default() += 1;
        }
    }
    let most = |start: i64| counts.range((start, 0)..(start + 1, 0)).map(|(_, n)| *n).max();
    let hottest = counts.iter().filter(|((start, _), n)| most(*start) == Some(**n));
    let mut expected = hottest.map(|((start, key), n)| vec![*start, start + 10, *key, *n]).collect::<Vec<_>>();
    expected.sort_unstable();
    for (processes, threads) in [(1, 1), (1, 4), (2, 1)] {
        let config = config(&plan, &none, processes * threads);
        let cluster = Cluster::start(&config, processes, threads, 1, fresh(processes));
        let mut got = Vec::new();
        let chunks = values.chunks(500).collect::<Vec<_>>();
        for (epoch, values) in chunks.iter().enumerate() {
            let last = epoch + 1 == chunks.len();
            let seen = values.iter().map(|row| row[0] - 4).max().unwrap() * 1000;
            cluster.release(epoch as u64, &["ts", "k"], values, Some(if last { i64::MAX } else { seen }));
            cluster.groups[0].0.migrate(0, moves(&mut random, processes * threads, 0), None);
            got.extend(read(&cluster.complete(epoch as u64, &mut 0).unwrap()));
        }
        got.sort_unstable();
        assert_eq!(got, expected, "{processes} x {threads}");
        assert!(cluster.stop().1.is_empty());
    }
    // In pieces, as a batch host runs it: rows of one hash meet in one second piece.
    let batch = rows(&["ts", "k"], &values);
    let mut rows_in: Vec<RecordBatch> = vec![batch];
    let pieces = plan.pieces();
    for (number, piece) in pieces.iter().copied().enumerate() {
        let mut out = Vec::new();
        for part in 0..2 {
            let mut inline = Inline::new(plan.clone(), none.clone(), Some(piece)).unwrap();
            for batch in &rows_in {
                let mine = match number {
                    0 if part == 0 => batch.clone(),
                    0 => batch.slice(0, 0),
                    _ => {
                        let hashes = plan.exchange_hashes(pieces[number - 1], batch).unwrap().unwrap();
                        let keep = (0..batch.num_rows() as u32).filter(|row| hashes[*row as usize] % 2 == part);
                        let keep = arrow_array::UInt32Array::from_iter_values(keep);
                        arrow_select::take::take_record_batch(batch, &keep).unwrap()
                    }
                };
                inline.push(0, &mine).unwrap();
                out.extend(pulled(&mut inline));
            }
            inline.finish().unwrap();
            out.extend(pulled(&mut inline));
            assert!(matches!(inline.finish(), Err(HostError::Finished)));
        }
        let schema = plan.piece_output(piece);
        assert!(out.iter().all(|batch| batch.schema() == schema), "piece {number}");
        rows_in = out;
    }
    let mut got = read(&rows_in);
    got.sort_unstable();
    assert_eq!(got, expected);
}

/// What is released in parts is one epoch: each key is told once, and no row comes after the watermark.
#[test]
fn an_epoch_in_parts_has_one_end() {
    let none: Arc<dyn Callbacks> = Arc::new(Numbers::default());
    let windows = plan(
        &["k", "ts"],
        true,
        r#"{"op":"key_by","columns":["k"]},{"op":"window","kind":"tumbling","size_us":1000000},
           {"op":"agg","aggs":[{"name":"n","fn":"count"}]}"#,
    );
    let values: Vec<Vec<i64>> = (0..600).map(|i| vec![i % 3, (600 - i) * 10]).collect();
    for (plan, columns) in [(counting("update"), ["k", "v"]), (windows, ["k", "ts"])] {
        let mut seen = Vec::new();
        for (threads, part) in [(1, 600), (1, 7), (3, 100)] {
            let cluster = Cluster::start(&config(&plan, &none, threads), 1, threads, 1, fresh(1));
            let (group, _) = &cluster.groups[0];
            let parts = values.chunks(part);
            let end = parts.len() as u64;
            for (epoch, values) in (0..).zip(parts) {
                let batches = vec![rows(&columns, values).into()];
                group
                    .release_part(epoch, vec![PartitionRows { source: 0, partition: 0, batches, rows_before: 0 }])
                    .unwrap();
                let made = cluster.complete(epoch, &mut 0).unwrap();
                assert_eq!(read(&made), Vec::<Vec<i64>>::new(), "the epoch is not over");
            }
            group.release(end, Vec::new(), Some(i64::MAX)).unwrap();
            let mut got = read(&cluster.complete(end, &mut 0).unwrap());
            got.sort_unstable();
            seen.push(got);
            assert!(cluster.stop().1.is_empty());
        }
        assert!(seen[0].len() >= 3 && seen.iter().all(|got| *got == seen[0]), "{seen:?}");
        assert_eq!(seen[0].iter().map(|row| row[row.len() - if columns[1] == "v" { 2 } else { 1 }]).sum::<i64>(), 600);
    }
}

fn pulled(inline: &mut Inline) -> Vec<RecordBatch> {
    let mut all = Vec::new();
    loop {
        match inline.pull(Duration::from_secs(60)).unwrap() {
            Pulled::Made(made) => all.extend(made),
            Pulled::Working => panic!("a minute has passed"),
            Pulled::Idle => return all,
        }
    }
}

#[test]
fn state_that_is_not_there_is_refused() {
    let none: Arc<dyn Callbacks> = Arc::new(Numbers::default());
    let mut config = config(&counting("final"), &none, 2);
    let cluster = Cluster::start(&config, 1, 2, 1, fresh(1));
    let (mut residents, _) = cluster.stop();
    let (events, _inbox) = unbounded();
    let resident = residents.pop().unwrap();
    config.routings = vec![routing(vec![0; 8])];
    let refused = Group::start(config.clone(), fabric::threads(2), resident, events.clone());
    let NotStarted { error, resident } = *refused.err().expect("8 owners of 16 bins");
    assert!(matches!(error, HostError::Owners { given: 1, bins: 8, steps: 1, expected: 16 }));
    // The bins are as they were: where half of them is expected elsewhere, and where they all are at home.
    config.routings = vec![routing((0..16).map(|bin| bin % 2))];
    let refused = Group::start(config.clone(), fabric::threads(1), resident, events.clone());
    let NotStarted { error, resident } = *refused.err().expect("bins of worker 1 are here");
    assert!(matches!(error, HostError::Bins(_)), "{error}");
    assert_eq!(resident.inventory(0)[0].1, (0..16).map(whole).collect::<Vec<_>>());
    let group = Group::start(config.clone(), fabric::threads(2), resident, events.clone()).unwrap();
    assert!(group.stop().1.is_none());
    config.routings = vec![routing(vec![0; 16])];
    let mut empty = Cluster::start(&config, 1, 1, 1, fresh(1)).stop().0;
    let mut narrow = config.clone();
    narrow.routings = vec![routing((0..16).map(|bin| bin % 2))];
    // Worker 1's bins never were in this process.
    drop(empty.pop());
    let (residents, _) = Cluster::start(&narrow, 2, 1, 1, fresh(2)).stop();
    let alone = residents.into_iter().next().unwrap();
    let refused = Group::start(config, fabric::threads(1), alone, events);
    let NotStarted { error, resident: alone } = *refused.err().expect("half of the bins is elsewhere");
    assert!(matches!(error, HostError::MissingBins { op: 0, bins } if bins.len() == 8));
    assert_eq!(alone.inventory(0)[0].1.len(), 8);
}

impl Cluster {
    /// Runs one migration between epochs; returns bins and bytes reported.
    fn migrate(&self, handle: u64, steps: Vec<Vec<(u32, u32)>>) -> (u32, u64) {
        self.groups[0].0.migrate(handle, steps, None);
        match self.groups[0].1.recv_timeout(PATIENCE).expect("an idle migration finishes") {
            Event::MigrationDone { handle: done, moved, bytes, .. } => {
                assert_eq!(done, handle);
                (moved, bytes)
            }
            other => panic!("{other:?}"),
        }
    }

    /// Waits until the workers tell these numbers of bins.
    fn await_bins(&self, expected: &[u32]) {
        let deadline = std::time::Instant::now() + PATIENCE;
        loop {
            let stats = self.groups.iter().flat_map(|(group, _)| group.stats().workers);
            let bins = stats.flat_map(|worker| worker.bins).collect::<Vec<_>>();
            if bins == expected {
                return;
            }
            assert!(std::time::Instant::now() < deadline, "the workers tell {bins:?}");
            std::thread::yield_now();
        }
    }
}

#[test]
fn steps_without_moves_and_bins_named_twice_do_no_harm() {
    let none: Arc<dyn Callbacks> = Arc::new(Numbers::default());
    let cluster = Cluster::start(&config(&counting("update"), &none, 2), 1, 2, 1, fresh(1));
    assert_eq!(cluster.migrate(1, vec![vec![], vec![(0, 1)], vec![]]).0, 1);
    cluster.await_bins(&[7, 9]);
    // The last word on a bin counts.
    assert_eq!(cluster.migrate(2, vec![vec![(2, 0), (2, 1)], vec![(4, 1)]]).0, 2);
    cluster.await_bins(&[5, 11]);
    cluster.release(0, &["k", "v"], &[vec![1, 1]], None);
    assert_eq!(read(&cluster.complete(0, &mut 0).unwrap()), [[1, 1, 1]]);
    assert!(cluster.stop().1.is_empty());
}

#[test]
fn a_refused_step_is_told_and_the_next_migration_works() {
    let none: Arc<dyn Callbacks> = Arc::new(Numbers::default());
    let count = |name| {
        format!(
            r#"{{"op":"key_by","columns":["k"]}},{{"op":"agg","emit":"final","aggs":[{{"name":"{name}","fn":"count"}}]}}"#
        )
    };
    let two_steps = plan(&["k", "v"], false, &format!("{},{}", count("n"), count("m")));
    for plan in [counting("update"), two_steps] {
        let cluster = Cluster::start(&config(&plan, &none, 2), 1, 2, 1, fresh(1));
        let keyed = plan.keyed_ops();
        for (handle, wrong, expected) in [
            (1, (0, 9), ControlError::AbsentWorker { worker: 9 }),
            (2, (99, 0), ControlError::BinOutOfRange { bin: BinName::new(99, 4), bins: 16 }),
        ] {
            // The first step moves, the second is refused as a whole, the third is not issued.
            let back = handle as u32 % 2;
            cluster.groups[0].0.migrate(handle, vec![vec![(0, back)], vec![(2, 1), wrong], vec![(4, 1)]], None);
            match cluster.groups[0].1.recv_timeout(PATIENCE).expect("a refused migration ends") {
                Event::MigrationRefused { handle: told, error, steps } => {
                    assert_eq!((told, error, steps.len()), (handle, Refusal::Control(expected), 1));
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(cluster.migrate(3, vec![vec![(6, 1)], vec![(8, 1)]]).0, 2);
        cluster.await_bins(&[vec![6; keyed], vec![10; keyed]].concat());
        cluster.release(0, &["k", "v"], &[vec![1, 1]], None);
        cluster.complete(0, &mut 0).unwrap();
        assert!(cluster.stop().1.is_empty());
    }
}

#[test]
fn a_process_without_bins_is_told_so_when_it_is_to_own_some() {
    let none: Arc<dyn Callbacks> = Arc::new(Numbers::default());
    let config = config(&counting("update"), &none, 1);
    let (events, _inbox) = unbounded();
    let refused = Group::start(config, fabric::threads(1), Resident::nothing(), events);
    let NotStarted { error, resident } = *refused.err().expect("it has no bins");
    assert!(matches!(error, HostError::MissingBins { op: 0, bins } if bins.len() == 16));
    assert!(resident.inventory(0).is_empty());
    // It joins where its bins are to come from others.
    let mut wide = self::config(&counting("update"), &none, 2);
    wide.routings = vec![routing(vec![0; 16])];
    let cluster = Cluster::start(&wide, 2, 1, 1, vec![Resident::fresh(), Resident::nothing()]);
    cluster.migrate(1, vec![(0..16).map(|bin| (bin, bin % 2)).collect()]);
    cluster.await_bins(&[8, 8]);
    cluster.stop();
}

#[test]
fn counters_of_all_workers_follow_an_idle_migration() {
    let none: Arc<dyn Callbacks> = Arc::new(Numbers::default());
    for (processes, threads) in [(1, 3), (3, 1)] {
        let cluster = Cluster::start(&config(&counting("update"), &none, 3), processes, threads, 1, fresh(processes));
        cluster.await_bins(&[6, 5, 5]);
        cluster.migrate(1, vec![vec![(1, 2), (4, 2)]]);
        cluster.await_bins(&[6, 3, 7]);
        // One in, one out.
        cluster.migrate(2, vec![vec![(2, 1), (7, 2)]]);
        for (group, _) in &cluster.groups {
            let deadline = std::time::Instant::now() + PATIENCE;
            while (group.owners()[0][2], group.owners()[0][7]) != (1, 2) {
                assert!(std::time::Instant::now() < deadline, "{:?}", group.owners());
                std::thread::yield_now();
            }
        }
        assert!(cluster.stop().1.is_empty());
    }
}

#[test]
fn a_dropped_group_ends_its_threads() {
    let none: Arc<dyn Callbacks> = Arc::new(Numbers::default());
    let (events, inbox) = unbounded();
    let config = config(&counting("update"), &none, 2);
    let group = Group::start(config, fabric::threads(2), Resident::fresh(), events).unwrap();
    drop(group);
    let last =
        std::iter::from_fn(|| inbox.recv_timeout(PATIENCE).map_err(|e| assert!(e.is_disconnected(), "{e}")).ok());
    assert_eq!(last.count(), 0);
}

#[test]
fn bins_that_move_before_a_repeated_epoch_come_back_once() {
    let poison = Arc::new(Mutex::new(None));
    let numbers: Arc<dyn Callbacks> = Arc::new(Numbers { poison: poison.clone(), ..Numbers::default() });
    let mut config = config(&sequences(), &numbers, 2);
    config.journal = true;
    let values = (0..200).map(|v| vec![v % 40, v]).collect::<Vec<_>>();
    let fail = |cluster: Cluster| {
        *poison.lock().unwrap() = Some(150);
        cluster.release(1, &["k", "v"], &values, None);
        assert!(cluster.complete(1, &mut 0).is_err());
        *poison.lock().unwrap() = None;
        cluster.stop().0
    };
    let mut cluster = Cluster::start(&config, 2, 1, 1, fresh(2));
    cluster.release(0, &["k", "v"], &values, None);
    cluster.complete(0, &mut 0).unwrap();
    config.epoch = 1;
    for generation in 2..5 {
        let residents = fail(cluster);
        config.routings = owners_at(&residents, 1, 1);
        cluster = Cluster::start(&config, 2, 1, generation, residents);
        let swapped = (0..16).map(|bin| (bin, 1 - config.routings[0].owner_of(bin))).collect();
        assert_eq!(cluster.migrate(generation, vec![swapped]).0, 16);
    }
    cluster.release(1, &["k", "v"], &values, None);
    let mut got = read(&cluster.complete(1, &mut 0).unwrap());
    got.sort_unstable();
    let mut expected = values.iter().map(|row| vec![row[0], 5 + row[1] / 40, row[1]]).collect::<Vec<_>>();
    expected.sort_unstable();
    assert_eq!(got, expected);
    assert!(cluster.stop().1.is_empty());
}

/// Next owners where bins were moving between epochs: each bin in one of the processes that can bring it back.
fn owners_among(residents: &[Resident], epoch: u64, random: &mut Random) -> Vec<Routing> {
    let inventories = residents.iter().map(|it| it.inventory(epoch)).collect::<Vec<_>>();
    let owner = |bin: u32| {
        let having = (0..residents.len()).filter(|p| inventories[*p][0].1.contains(&whole(bin))).collect::<Vec<_>>();
        assert!(!having.is_empty(), "bin {bin} is nowhere");
        having[random.below(having.len() as u64) as usize] as u32
    };
    vec![routing((0..16).map(owner))]
}

#[test]
fn bins_in_flight_between_epochs_come_back_when_the_generation_ends() {
    let stuck = Arc::new(Mutex::new(None));
    let numbers: Arc<dyn Callbacks> = Arc::new(Numbers { stuck: stuck.clone(), ..Numbers::default() });
    let mut config = config(&sequences(), &numbers, 3);
    config.journal = true;
    config.ship_bytes = 48;
    let mut random = Random(11);
    let values = (0..200).map(|v| vec![v % 40, v]).collect::<Vec<_>>();
    let mut cluster = Cluster::start(&config, 3, 1, 1, fresh(3));
    for epoch in 0..25 {
        cluster.release(epoch, &["k", "v"], &values, None);
        let mut got = read(&cluster.complete(epoch, &mut 0).unwrap());
        got.sort_unstable();
        let mut expected =
            values.iter().map(|row| vec![row[0], 5 * epoch as i64 + row[1] / 40, row[1]]).collect::<Vec<_>>();
        expected.sort_unstable();
        assert_eq!(got, expected, "epoch {epoch}");
        if random.below(2) == 0 {
            cluster.groups.iter().for_each(|(group, _)| group.settle(epoch));
        }
        // A round over all workers, then moves by chance; cut off by a state that cannot move, or by a stop.
        let rounds = (1..4)
            .flat_map(|by| (0..4).map(move |part| (part * 4..part * 4 + 4).map(|bin| (bin, (bin + by) % 3)).collect()));
        let mut steps = rounds.collect::<Vec<_>>();
        steps.extend(moves(&mut random, 3, epoch % 3));
        if epoch % 2 == 0 {
            *stuck.lock().unwrap() = Some(random.below(40) as i64);
            cluster.groups[0].0.migrate(epoch, steps, None);
            let failures = cluster.groups.iter().filter_map(|(_, inbox)| match inbox.recv_timeout(PATIENCE) {
                Ok(Event::Failed { error }) => Some(error),
                _ => None,
            });
            // The process whose bin it is says why, with what the user's code said; the others repeat it.
            let told = failures.filter(|error| match error {
                HostError::Call(call) => call.message.contains("is stuck"),
                _ => false,
            });
            assert_eq!(told.count(), 1, "a stuck bin has to move");
            *stuck.lock().unwrap() = None;
        } else {
            cluster.groups[0].0.migrate(epoch, steps, None);
            let pause = std::time::Duration::from_micros(random.below(3000));
            let _ = cluster.groups[0].1.recv_timeout(pause);
        }
        let (residents, _) = cluster.stop();
        config.routings = owners_among(&residents, epoch + 1, &mut random);
        config.epoch = epoch + 1;
        cluster = Cluster::start(&config, 3, 1, epoch + 2, residents);
    }
    assert!(cluster.stop().1.is_empty());
}

#[test]
fn originals_go_while_the_stream_is_idle() {
    let numbers: Arc<dyn Callbacks> = Arc::new(Numbers::default());
    let mut config = config(&sequences(), &numbers, 2);
    config.journal = true;
    let values = (0..200).map(|v| vec![v % 40, v]).collect::<Vec<_>>();
    let cluster = Cluster::start(&config, 2, 1, 1, fresh(2));
    // A worker learns a little after the leader that its bins have come.
    let await_originals = |expected: usize| {
        let deadline = std::time::Instant::now() + PATIENCE;
        loop {
            let originals = cluster.groups.iter().map(|(group, _)| group.stats().originals).sum::<usize>();
            if originals == expected {
                return;
            }
            assert!(std::time::Instant::now() < deadline, "{originals} originals stay, not {expected}");
            std::thread::yield_now();
        }
    };
    let all_to = |worker: u32| vec![(0..16).map(|bin| (bin, worker)).collect::<Vec<_>>()];
    cluster.release(0, &["k", "v"], &values, None);
    cluster.complete(0, &mut 0).unwrap();
    // Moves between the epochs: the first leaves what undoes epoch 0, which may still happen.
    assert_eq!(cluster.migrate(1, all_to(1)).0, 16);
    assert_eq!(cluster.migrate(2, all_to(0)).0, 16);
    cluster.await_bins(&[16, 0]);
    // Of either worker the bins that it had at the mark.
    await_originals(16);
    for (group, _) in &cluster.groups {
        group.settle(0);
    }
    await_originals(0);
    // Nothing undoes it any more, so later moves leave nothing as soon as they are complete.
    assert_eq!(cluster.migrate(3, all_to(1)).0, 16);
    cluster.await_bins(&[0, 16]);
    await_originals(0);
    cluster.release(1, &["k", "v"], &values, None);
    assert_eq!(cluster.complete(1, &mut 0).unwrap().iter().map(RecordBatch::num_rows).sum::<usize>(), 200);
    cluster.stop();
}

#[test]
fn a_cancelled_migration_ends_after_its_step() {
    let none: Arc<dyn Callbacks> = Arc::new(Numbers::default());
    let cluster = Cluster::start(&config(&counting("update"), &none, 2), 1, 2, 1, fresh(1));
    let group = &cluster.groups[0].0;
    let there = |worker: u32| (0..16).cycle().take(100_000).map(|bin| vec![(bin, worker)]).collect::<Vec<_>>();
    let (first, second) = (there(1), there(0));
    group.migrate(1, first, None);
    group.migrate(2, second, None);
    group.cancel(2);
    group.cancel(1);
    group.cancel(7);
    for handle in [1, 2] {
        let event = cluster.groups[0].1.recv_timeout(PATIENCE).expect("a cancelled migration is told");
        let Event::MigrationDone { handle: done, moved, steps, .. } = event else { panic!("{event:?}") };
        assert_eq!((done, moved as usize), (handle, steps.len()));
        assert!(if handle == 1 { steps.len() < 100_000 } else { steps.is_empty() }, "{} steps", steps.len());
    }
    assert_eq!(cluster.migrate(3, there(1)[..16].to_vec()).0, 16);
    cluster.await_bins(&[0, 16]);
    assert!(cluster.stop().1.is_empty());
}

#[test]
fn without_a_journal_rebuilt_bins_keep_no_undo() {
    let none: Arc<dyn Callbacks> = Arc::new(Numbers::default());
    let mut config = config(&counting("final"), &none, 1);
    let bytes = |journal: bool, config: &mut GroupConfig| {
        config.journal = true;
        config.epoch = 0;
        let values = (0..4000).map(|v| vec![v, v]).collect::<Vec<_>>();
        let cluster = Cluster::start(config, 1, 1, 1, fresh(1));
        cluster.release(0, &["k", "v"], &values, None);
        cluster.complete(0, &mut 0).unwrap();
        let residents = cluster.stop().0;
        (config.journal, config.epoch) = (journal, 1);
        let cluster = Cluster::start(config, 1, 1, 2, residents);
        cluster.release(1, &["k", "v"], &values, None);
        cluster.complete(1, &mut 0).unwrap();
        cluster.stop().0[0].bytes()
    };
    let (with, without) = (bytes(true, &mut config), bytes(false, &mut config));
    assert!(without < with, "{without} bytes without undo, {with} with");
}

/// A store that counts what is out of it, and may lose or refuse rows.
#[derive(Debug, Default)]
struct Store {
    lost: std::sync::atomic::AtomicBool,
    full: std::sync::atomic::AtomicBool,
    reads: AtomicU64,
    kept: AtomicU64,
}

#[derive(Debug)]
struct Shelved(RecordBatch, Arc<Store>);

impl Stored for Shelved {
    fn num_rows(&self) -> usize {
        self.0.num_rows()
    }

    fn read(&self) -> Result<RecordBatch, BoxError> {
        if self.1.lost.load(Ordering::Relaxed) {
            return Err("the rows are lost".into());
        }
        self.1.reads.fetch_add(1, Ordering::Relaxed);
        Ok(self.0.clone())
    }
}

struct Keeper(Arc<Store>);

impl Keep for Keeper {
    fn keep(&self, batch: RecordBatch) -> Result<Rows, BoxError> {
        if self.0.full.load(Ordering::Relaxed) {
            return Err("the store is full".into());
        }
        self.0.kept.fetch_add(batch.num_rows() as u64, Ordering::Relaxed);
        Ok(Rows::Stored(Arc::new(Shelved(batch, self.0.clone()))))
    }
}

#[test]
fn rows_may_lie_elsewhere_until_they_are_due_and_once_they_are_made() {
    let store = Arc::new(Store::default());
    let numbers: Arc<dyn Callbacks> = Arc::new(Numbers::default());
    let mut config = config(&sequences(), &numbers, 2);
    config.journal = true;
    config.keep = Some(Arc::new(Keeper(store.clone())));
    let values = (0..600).map(|v| vec![v % 40, v]).collect::<Vec<_>>();
    // Blocks of one slice, and one that is longer.
    let cuts = [0, 50, 100, 130, 290, 340, 600];
    let blocks = || {
        let block = |ends: &[usize]| rows(&["k", "v"], &values[ends[0]..ends[1]]);
        cuts.windows(2).map(|ends| Rows::Stored(Arc::new(Shelved(block(ends), store.clone())))).collect()
    };
    let release = |group: &Group| {
        let input = PartitionRows { source: 0, partition: 0, batches: blocks(), rows_before: 0 };
        group.release(0, vec![input], None).unwrap();
    };
    let failing = [(&store.lost, "the rows are lost"), (&store.full, "the store is full")];
    let mut resident = Resident::fresh();
    for (generation, (broken, says)) in failing.into_iter().enumerate() {
        let (events, inbox) = unbounded();
        let group = Group::start(config.clone(), fabric::threads(2), resident, events).unwrap();
        broken.store(true, Ordering::Relaxed);
        release(&group);
        let Event::Failed { error } = inbox.recv_timeout(PATIENCE).unwrap() else { panic!("{says}") };
        let text = error.to_string();
        assert!(text.contains(says) || matches!(error, HostError::Dataflow(_)), "{generation}: {text}");
        broken.store(false, Ordering::Relaxed);
        let (left, error) = group.stop();
        assert!(error.unwrap().to_string().contains(says));
        resident = left;
    }
    let (events, inbox) = unbounded();
    let group = Group::start(config, fabric::threads(2), resident, events).unwrap();
    release(&group);
    let mut got = Vec::new();
    for _ in 0..2 {
        let event = inbox.recv_timeout(PATIENCE).unwrap();
        let Event::EpochDone { outputs, .. } = event else { panic!("{event:?}") };
        for block in outputs {
            assert!(matches!(block, Rows::Stored(_)));
            got.extend(read(&[block.read().unwrap()]));
        }
    }
    got.sort_unstable();
    let mut expected = values.iter().map(|row| vec![row[0], row[1] / 40, row[1]]).collect::<Vec<_>>();
    expected.sort_unstable();
    assert_eq!(got, expected);
    assert_eq!(store.kept.load(Ordering::Relaxed), 600);
    assert!(group.stop().1.is_none());
}
