//! Registry and members with the real engine: keyed counts over two members, against an oracle.

mod common;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicI64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread;

use arrow_array::cast::AsArray;
use arrow_array::types::Int64Type;
use arrow_array::{ArrayRef, Int64Array, RecordBatch};
use arrow_schema::{DataType, Field, Schema, SchemaRef};
use common::{Begin, Driver, MemberThread, SECRET, ask, stamp, stop};
use penstock_cluster::message::Which;
use penstock_cluster::{End, Feed, GroupHost, Loader, Member, RegistryEvent, drain};
use penstock_engine::{Commit, Layout, Range, Release, Request};
use penstock_plan::spec::SourceSpec;
use penstock_plan::{CallError, Callbacks, ForeignState};
use serde_json::{Value, json};

const BITS: u8 = 4;
const OPERATOR: &str = "step 2 (agg)";

fn schema() -> SchemaRef {
    Arc::new(Schema::new(vec![Field::new("k", DataType::Int64, true), Field::new("v", DataType::Int64, true)]))
}

fn batch(rows: &[(i64, i64)]) -> RecordBatch {
    let column = |values: Vec<i64>| -> ArrayRef { Arc::new(Int64Array::from(values)) };
    let columns = vec![column(rows.iter().map(|row| row.0).collect()), column(rows.iter().map(|row| row.1).collect())];
    RecordBatch::try_new(schema(), columns).unwrap()
}

/// Passes rows through; raises at one value.
struct Through(Arc<AtomicI64>);

impl Callbacks for Through {
    fn map(&self, _: usize, batch: &RecordBatch) -> Result<RecordBatch, CallError> {
        let poison = self.0.load(SeqCst);
        let values = batch.column(1).as_primitive::<Int64Type>();
        match values.values().iter().position(|value| *value == poison) {
            Some(row) => Err(CallError { row: Some(row), line: 12, ..CallError::new("through", "it is poison") }),
            None => Ok(batch.clone()),
        }
    }

    fn new_state(&self, _: usize) -> Box<dyn ForeignState> {
        unreachable!("the plan has no state of its own")
    }
}

struct Callables(Arc<AtomicI64>);

impl Loader for Callables {
    fn load(&self, attachment: &[u8]) -> Result<Arc<dyn Callbacks>, CallError> {
        match attachment {
            b"through" => Ok(Arc::new(Through(self.0.clone()))),
            _ => Err(CallError::new("load", "not callables")),
        }
    }

    fn write_origin(&self, error: &CallError) -> Vec<u8> {
        error.message.clone().into_bytes()
    }
}

struct Cluster {
    driver: Driver,
    poison: Arc<AtomicI64>,
    totals: BTreeMap<i64, (i64, i64)>,
    generation: u64,
}

impl Cluster {
    fn new(members: usize) -> Self {
        let mut driver = Driver::new(0);
        let poison = Arc::new(AtomicI64::new(i64::MIN));
        for _ in 0..members {
            let loader = Arc::new(Callables(poison.clone()));
            let member = Member::<GroupHost>::connect(driver.registry.address(), SECRET, json!({}), loader).unwrap();
            let (id, address) = (member.id(), member.address().to_owned());
            let thread = thread::spawn(move || member.run(&|| false));
            driver.await_event(|event| matches!(event, RegistryEvent::Joined { member, .. } if *member == id));
            driver.members.push(MemberThread { id, address, stop: Arc::new(Mutex::new(false)), thread });
        }
        Cluster { driver, poison, totals: BTreeMap::new(), generation: 0 }
    }

    fn seats(&self) -> Vec<usize> {
        (0..self.driver.members.len()).collect()
    }

    fn plan(&self) -> Value {
        let source = SourceSpec { schema: schema(), event_time: None, lateness_ms: 0, order_by: vec![] };
        let source = serde_json::to_value(source).unwrap();
        let steps = json!([
            {"op": "map_batches", "call": 0, "schema": source["schema"]},
            {"op": "key_by", "columns": ["k"]},
            {"op": "agg", "emit": "update", "aggs": [
                {"name": "n", "fn": "count"}, {"name": "s", "fn": "sum", "column": "v"}]},
        ]);
        json!({"version": 1, "source": source, "steps": steps})
    }

    fn start(&mut self, epoch: u64, owners: &[u32], fresh: bool) -> Vec<Value> {
        if fresh {
            self.generation += 1;
        }
        let bits = owners.len().ilog2() as u8;
        let ranges = (0..).zip(owners).map(|(bin, owner)| (Range::new(bin, bits).unwrap(), *owner));
        let layout = serde_json::to_value(Layout::new(ranges.collect()).unwrap()).unwrap();
        let plan = self.plan();
        let seats = self.seats();
        let calls: Vec<u64> = seats
            .iter()
            .map(|seat| {
                let begin = Begin { generation: self.generation, epoch, fresh, plan: plan.clone() };
                let mut body = self.driver.start_body("q", &seats, *seat, &begin);
                body["ask"]["Start"]["layouts"] = json!({ OPERATOR: layout });
                self.driver.send_with(*seat, &body, b"through")
            })
            .collect();
        calls.into_iter().map(|call| self.driver.reply(call)).collect()
    }

    /// Feeds one partition to each member.
    fn feed(&self, epoch: u64, parts: &[Vec<(i64, i64)>]) {
        for (seat, rows) in parts.iter().enumerate() {
            let address = &self.driver.members[seat].address;
            let mut feed = Feed::connect(address, SECRET, "q", epoch, seat as u32, 7, &schema()).unwrap();
            rows.chunks(10).for_each(|chunk| feed.push(&batch(chunk)).unwrap());
            assert_eq!(feed.finish().unwrap().rows, rows.len() as u64);
        }
    }

    fn release(&mut self, epoch: u64, parts: &[Vec<(i64, i64)>]) -> Vec<u64> {
        let stamp = stamp(self.generation);
        let send = |(seat, rows): (usize, &Vec<(i64, i64)>)| {
            let feeds = vec![Commit { partition: seat as u32, attempt: 7, rows: rows.len() as u64, rows_before: 0 }];
            let release = Release { stamp, epoch, feeds, watermark: None, clock_ms: 0, finish: false };
            self.driver.send(seat, &ask("q", Request::Release(release)))
        };
        parts.iter().enumerate().map(send).collect()
    }

    /// All rows that an epoch put out, by key.
    fn drained(&self, epoch: u64) -> BTreeMap<i64, (i64, i64)> {
        let mut found = BTreeMap::new();
        for seat in &self.driver.members {
            for piece in 0..2 {
                for batch in drain(&seat.address, SECRET, "q", epoch, piece, Which::Rows).unwrap() {
                    let batch = batch.unwrap();
                    let column = |at: usize| batch.column(at).as_primitive::<Int64Type>().values().to_vec();
                    for ((key, n), s) in column(0).into_iter().zip(column(1)).zip(column(2)) {
                        assert_eq!(found.insert(key, (n, s)), None, "key {key} came from two places");
                    }
                }
            }
        }
        found
    }

    /// Runs an epoch and compares its output with the oracle, twice.
    fn epoch(&mut self, epoch: u64, parts: &[Vec<(i64, i64)>]) {
        self.feed(epoch, parts);
        for call in self.release(epoch, parts) {
            let body = self.driver.reply(call);
            assert_eq!(body["ok"], true, "{body}");
        }
        self.check(epoch, parts);
    }

    fn check(&mut self, epoch: u64, parts: &[Vec<(i64, i64)>]) {
        let mut touched = BTreeMap::new();
        for (key, value) in parts.iter().flatten() {
            let total = self.totals.entry(*key).or_default();
            *total = (total.0 + 1, total.1 + value);
            touched.insert(*key, *total);
        }
        assert_eq!(self.drained(epoch), touched);
        assert_eq!(self.drained(epoch), touched);
    }

    /// Ends the generation; owners for the next one by what each process holds.
    fn stop(&mut self, epoch: u64) -> Vec<u32> {
        self.generation += 1;
        let answers = self.driver.ask_all(&stop("q", self.generation, epoch));
        let mut owners = vec![u32::MAX; 1 << BITS];
        for (process, answer) in answers.iter().enumerate() {
            assert_eq!(answer["ok"], true, "{answer}");
            for range in answer["answer"]["Inventory"][OPERATOR].as_array().unwrap() {
                let bin = range[0].as_u64().unwrap() as usize;
                assert_eq!(owners[bin], u32::MAX, "bin {bin} is in two places");
                owners[bin] = 2 * process as u32 + (bin % 2) as u32;
            }
        }
        assert!(owners.iter().all(|owner| *owner != u32::MAX), "{owners:?}");
        owners
    }

    fn migrate(&self, handle: u64, steps: &[&[(u32, u32)]]) -> Value {
        let range = |(bin, worker): &(u32, u32)| (Range::new(*bin, BITS).unwrap(), *worker);
        let steps = steps.iter().map(|step| step.iter().map(range).collect()).collect();
        ask("q", Request::Migrate { stamp: stamp(self.generation), handle, steps })
    }
}

impl Cluster {
    /// Waits until the members keep so many originals.
    fn await_originals(&mut self, expected: u64) {
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        loop {
            let stats = self.driver.ask_all(&json!({"do": "stats", "query": "q"}));
            let kept =
                stats.iter().map(|body| body["queries"]["q"]["group"]["originals"].as_u64().unwrap()).sum::<u64>();
            if kept == expected {
                return;
            }
            assert!(std::time::Instant::now() < deadline, "{kept} originals, not {expected}");
        }
    }
}

fn parts(epoch: i64) -> Vec<Vec<(i64, i64)>> {
    (0..2).map(|seat| (0..50).map(|row| ((row * 7 + epoch) % 40, row + 1000 * seat)).collect()).collect()
}

#[test]
fn counts_over_two_members_survive_migrations_and_generations() {
    let mut cluster = Cluster::new(2);
    let owners: Vec<u32> = (0..1 << BITS).map(|bin| bin % 4).collect();
    let started = cluster.start(0, &owners, true);
    assert_eq!(started, vec![json!({"ok": true, "answer": "Done", "keys": 0}); 2]);
    cluster.epoch(0, &parts(0));

    // Every bin moves to the other process, in two steps, while an epoch is fed.
    let moves: Vec<(u32, u32)> = (0..1 << BITS).map(|bin| (bin, (bin + 2) % 4)).collect();
    let (first, second) = moves.split_at(7);
    let call = cluster.driver.send(0, &cluster.migrate(3, &[first, second]));
    cluster.epoch(1, &parts(1));
    let moved = cluster.driver.reply(call);
    assert_eq!((&moved["ok"], &moved["report"]["moved"]), (&json!(true), &json!(16)));
    assert_eq!(moved["answer"], json!({"Migrated": {"steps": 2, "refused": null}}));
    cluster.epoch(2, &parts(2));
    let stats = cluster.driver.ask(1, &json!({"do": "stats", "query": "q"}));
    let group = &stats["queries"]["q"]["group"];
    // Four bins each, as before. What grows with the bins does not travel with every sample.
    assert_eq!([&group["workers"][0]["bins"], &group["workers"][1]["bins"]], [&json!([4]); 2]);
    assert_eq!(group["owners"], Value::Null);

    // Between the epochs they move back. What undoes the last epoch is kept until the driver says that it will not be undone.
    let back: Vec<(u32, u32)> = moves.iter().map(|(bin, worker)| (*bin, (worker + 2) % 4)).collect();
    let there: Vec<(u32, u32)> = moves.clone();
    for (handle, steps) in [(4, back), (5, there)] {
        let body = cluster.migrate(handle, &[&steps]);
        assert_eq!(cluster.driver.ask(0, &body)["ok"], true);
    }
    for (epoch, kept) in [(1, 16), (2, 0)] {
        let settled = cluster.driver.ask_all(&ask("q", Request::Settle { epoch }));
        assert_eq!(settled, vec![json!({"ok": true, "answer": "Done"}); 2]);
        cluster.await_originals(kept);
    }

    let owners = cluster.stop(3);
    assert_eq!(owners[0] / 2, 1, "it moved to the second process");
    let started = cluster.start(3, &owners, false);
    let keys: u64 = started.iter().map(|body| body["keys"].as_u64().unwrap()).sum();
    assert_eq!(keys, cluster.totals.len() as u64, "{started:?}");
    cluster.epoch(3, &parts(3));
    cluster.driver.ask_all(&json!({"do": "stop"}));
    assert_eq!(cluster.driver.close(), [End::Stopped, End::Stopped]);
}

#[test]
fn an_epoch_in_which_the_user_raised_runs_again_from_its_beginning() {
    let mut cluster = Cluster::new(2);
    let owners: Vec<u32> = (0..1 << BITS).map(|bin| bin % 4).collect();
    cluster.start(0, &owners, true);
    cluster.epoch(0, &parts(0));
    cluster.poison.store(1049, SeqCst);
    cluster.feed(1, &parts(1));
    let calls = cluster.release(1, &parts(1));
    let kept =
        cluster.driver.await_event(|event| matches!(event, RegistryEvent::Reply { call, .. } if *call == calls[1]));
    let RegistryEvent::Reply { body, attachment, .. } = kept else { unreachable!("matched") };
    let error = &body["error"];
    assert_eq!(error["kind"], "user_function", "{body}");
    assert_eq!((&error["step"], &error["line"]), (&json!("through"), &json!(12)));
    assert_eq!(attachment, b"it is poison");
    let other = cluster.driver.reply(calls[0]);
    assert!(other["error"]["message"].as_str().unwrap().contains("it is poison"), "{other}");

    cluster.poison.store(i64::MIN, SeqCst);
    let owners = cluster.stop(1);
    cluster.start(1, &owners, false);
    // The rows are staged still.
    for call in cluster.release(1, &parts(1)) {
        let body = cluster.driver.reply(call);
        assert_eq!(body["ok"], true, "{body}");
    }
    cluster.check(1, &parts(1));
    cluster.epoch(2, &parts(2));
    cluster.driver.close();
}

#[test]
fn what_cannot_start_says_why() {
    let mut cluster = Cluster::new(1);
    let refused = cluster.start(0, &[0, 9], true);
    assert_eq!(refused[0]["error"]["kind"], "protocol", "{refused:?}");
    let body = cluster.driver.start_body("r", &[0], 0, &Begin::plan(json!({"version": 99})));
    let answer = cluster.driver.ask(0, &body);
    assert_eq!(answer["error"]["kind"], "plan", "{answer}");
    let mut other = cluster.driver.start_body("r", &[0], 0, &Begin::default());
    other["plan"] = cluster.plan();
    let answer = cluster.driver.send_with(0, &other, b"through");
    let answer = cluster.driver.reply(answer);
    assert!(answer["error"]["message"].as_str().unwrap().contains("operator echo"), "{answer}");
    let started = cluster.start(0, &[0; 16], true);
    assert_eq!(started[0]["ok"], true, "{started:?}");
    cluster.driver.close();
}

/// A member that never held a bin of the query is refused the bins that it is to go on with, and does not make empty ones.
#[test]
fn a_joiner_without_bins_is_told_so() {
    let mut cluster = Cluster::new(2);
    let owners: Vec<u32> = (0..1 << BITS).map(|bin| bin % 4).collect();
    let refused = cluster.start(3, &owners, false);
    for answer in &refused {
        assert_eq!(answer["error"]["kind"], "state", "{refused:?}");
        assert_eq!(answer["error"]["bins"].as_array().map(Vec::len), Some(8), "{refused:?}");
    }
    // Neither after a beginning from nothing that failed, or one whose state was forgotten.
    let refused = cluster.start(0, &[0, 9], true);
    assert_eq!(refused[0]["error"]["kind"], "protocol", "{refused:?}");
    cluster.start(0, &owners, true);
    let answers = cluster.driver.ask_all(&ask("q", Request::Conclude));
    assert!(answers.iter().all(|answer| answer["ok"] == true), "{answers:?}");
    let refused = cluster.start(0, &owners, false);
    assert_eq!(refused[1]["error"]["kind"], "state", "{refused:?}");
    cluster.start(0, &owners, true);
    cluster.epoch(0, &parts(0));
    cluster.driver.close();
}
