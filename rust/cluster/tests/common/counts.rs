//! Members with the real engine: keyed counts, against an oracle; and a store for their files.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread;

use arrow_array::cast::AsArray;
use arrow_array::types::Int64Type;
use arrow_array::{ArrayRef, Int64Array, RecordBatch};
use arrow_schema::{DataType, Field, Schema, SchemaRef};
use penstock_cluster::message::Which;
use penstock_cluster::{Failure, Feed, GroupHost, Loader, Member, RegistryEvent, Store, drain};
use penstock_engine::{Commit, Layout, Range, Recut, Release, Request};
use penstock_plan::spec::SourceSpec;
use penstock_plan::{CallError, Callbacks, ForeignState, SideRows};
use serde_json::{Value, json};

use super::{Begin, Driver, MemberThread, ask, keys, member_keys, stamp, stop};

pub const BITS: u8 = 4;
pub const OPERATOR: &str = "agg";

pub fn schema() -> SchemaRef {
    Arc::new(Schema::new(vec![Field::new("k", DataType::Int64, true), Field::new("v", DataType::Int64, true)]))
}

pub fn batch(rows: &[(i64, i64)]) -> RecordBatch {
    let column = |values: Vec<i64>| -> ArrayRef { Arc::new(Int64Array::from(values)) };
    let columns = vec![column(rows.iter().map(|row| row.0).collect()), column(rows.iter().map(|row| row.1).collect())];
    RecordBatch::try_new(schema(), columns).unwrap()
}

/// Passes rows through; raises at one value.
pub struct Through(Arc<AtomicI64>);

impl Callbacks for Through {
    fn map(&self, _: usize, batch: &RecordBatch, _: &mut SideRows) -> Result<RecordBatch, CallError> {
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

pub struct Callables {
    poison: Arc<AtomicI64>,
    store: Arc<Memory>,
}

impl Loader for Callables {
    fn load(&self, attachment: &[u8]) -> Result<Arc<dyn Callbacks>, CallError> {
        match attachment {
            b"through" => Ok(Arc::new(Through(self.poison.clone()))),
            _ => Err(CallError::new("load", "not callables")),
        }
    }

    fn write_origin(&self, error: &CallError) -> Vec<u8> {
        error.message.clone().into_bytes()
    }

    fn store(&self, checkpoint: &str) -> Result<Arc<dyn Store>, Failure> {
        match checkpoint {
            "memory" => Ok(self.store.clone()),
            other => Err(Failure::new("data", format!("{other:?} names no store"))),
        }
    }
}

/// Files in memory, with faults to order.
#[derive(Default)]
pub struct Memory {
    pub files: Mutex<BTreeMap<String, Vec<u8>>>,
    /// So many of the next calls fail.
    pub failing: AtomicUsize,
    /// Reads wait while somebody holds it.
    pub busy: Mutex<()>,
    /// Bytes read, by file.
    pub read: Mutex<BTreeMap<String, usize>>,
    /// How often something was read.
    pub reads: AtomicUsize,
    /// The next write panics.
    pub panics: AtomicBool,
}

impl Memory {
    fn fails(&self) -> io::Result<()> {
        let failing = self.failing.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1));
        failing.map_or(Ok(()), |_| Err(io::Error::other("the store is down")))
    }
}

impl Store for Memory {
    fn read_at(&self, name: &str, offset: u64, length: usize) -> io::Result<Vec<u8>> {
        drop(self.busy.lock().unwrap());
        self.reads.fetch_add(1, SeqCst);
        self.fails()?;
        let files = self.files.lock().unwrap();
        let file = files.get(name).ok_or(io::ErrorKind::NotFound)?;
        let part = file.iter().skip(offset as usize).take(length).copied().collect::<Vec<u8>>();
        *self.read.lock().unwrap().entry(name.to_owned()).or_default() += part.len();
        Ok(part)
    }

    fn write(&self, name: &str, pieces: &mut dyn Iterator<Item = io::Result<Vec<u8>>>) -> io::Result<u64> {
        assert!(!self.panics.swap(false, SeqCst), "it wishes to panic");
        let bytes = pieces.collect::<io::Result<Vec<_>>>()?.concat();
        self.fails()?;
        let length = bytes.len() as u64;
        assert!(self.files.lock().unwrap().insert(name.to_owned(), bytes).is_none(), "{name} is written twice");
        Ok(length)
    }
}

pub struct Cluster {
    pub driver: Driver,
    pub poison: Arc<AtomicI64>,
    pub store: Arc<Memory>,
    /// Goes with each start.
    pub checkpoint: Option<String>,
    pub totals: BTreeMap<i64, (i64, i64)>,
    pub generation: u64,
}

impl Cluster {
    pub fn new(members: usize) -> Self {
        Self::with(members, Arc::default())
    }

    pub fn with(members: usize, store: Arc<Memory>) -> Self {
        let mut driver = Driver::new(0);
        let poison = Arc::new(AtomicI64::new(i64::MIN));
        for _ in 0..members {
            let loader = Arc::new(Callables { poison: poison.clone(), store: store.clone() });
            let member =
                Member::<GroupHost>::connect(driver.registry.address(), member_keys(), json!({}), loader).unwrap();
            let (id, address) = (member.id(), member.address().to_owned());
            let thread = thread::spawn(move || member.run(&|| false));
            driver.await_event(|event| matches!(event, RegistryEvent::Joined { member, .. } if *member == id));
            driver.members.push(MemberThread { id, address, stop: Arc::new(Mutex::new(false)), thread });
        }
        Cluster { driver, poison, store, checkpoint: None, totals: BTreeMap::new(), generation: 0 }
    }

    pub fn seats(&self) -> Vec<usize> {
        (0..self.driver.members.len()).collect()
    }

    pub fn plan(&self) -> Value {
        let source = SourceSpec {
            name: "input".into(),
            schema: schema(),
            event_time: None,
            lateness_ms: 0,
            order_by: vec![],
            idle_after_ms: None,
        };
        let source = serde_json::to_value(source).unwrap();
        let steps = json!([
            {"op": "map_batches", "call": 0, "schema": source["schema"]},
            {"op": "key_by", "columns": ["k"]},
            {"op": "agg", "emit": "update", "aggs": [
                {"name": "n", "fn": "count"}, {"name": "s", "fn": "sum", "column": "v"}]},
        ]);
        json!({"version": 2, "sources": [source], "steps": steps})
    }

    pub fn start(&mut self, epoch: u64, owners: &[u32], fresh: bool) -> Vec<Value> {
        if fresh {
            self.generation += 1;
        }
        let bits = owners.len().ilog2() as u8;
        let ranges = (0..).zip(owners).map(|(bin, owner)| (Range::new(bin, bits).unwrap(), *owner));
        self.start_with(epoch, bits, &Layout::new(ranges.collect()).unwrap(), fresh)
    }

    /// Begins with ranges of any length, none wider than bins.
    pub fn start_with(&mut self, epoch: u64, bits: u8, layout: &Layout, fresh: bool) -> Vec<Value> {
        let layout = serde_json::to_value(layout).unwrap();
        let plan = self.plan();
        let seats = self.seats();
        let calls: Vec<u64> = seats
            .iter()
            .map(|seat| {
                let begin = Begin { generation: self.generation, epoch, fresh, plan: plan.clone() };
                let mut body = self.driver.start_body("q", &seats, *seat, &begin);
                body["ask"]["Start"]["bits"] = json!(bits);
                body["ask"]["Start"]["layouts"] = json!({ OPERATOR: layout });
                if let Some(checkpoint) = &self.checkpoint {
                    body["checkpoint"] = json!(checkpoint);
                }
                self.driver.send_with(*seat, &body, b"through")
            })
            .collect();
        calls.into_iter().map(|call| self.driver.reply(call)).collect()
    }

    /// Feeds one partition to each member.
    pub fn feed(&self, epoch: u64, parts: &[Vec<(i64, i64)>]) {
        for (seat, rows) in parts.iter().enumerate() {
            let address = &self.driver.members[seat].address;
            let mut feed = Feed::connect(address, &keys(), "q", epoch, seat as u32, 7, &schema()).unwrap();
            rows.chunks(10).for_each(|chunk| feed.push(&batch(chunk)).unwrap());
            assert_eq!(feed.finish().unwrap().rows, rows.len() as u64);
        }
    }

    pub fn release(&mut self, epoch: u64, parts: &[Vec<(i64, i64)>]) -> Vec<u64> {
        let stamp = stamp(self.generation);
        let send = |(seat, rows): (usize, &Vec<(i64, i64)>)| {
            let feeds =
                vec![Commit { source: 0, partition: seat as u32, attempt: 7, rows: rows.len() as u64, rows_before: 0 }];
            let release = Release { stamp, epoch, feeds, watermark: None, clock_ms: 0, finish: false };
            self.driver.send(seat, &ask("q", Request::Release(release)))
        };
        parts.iter().enumerate().map(send).collect()
    }

    /// All rows that an epoch put out, by key.
    pub fn drained(&self, epoch: u64) -> BTreeMap<i64, (i64, i64)> {
        let mut found = BTreeMap::new();
        for seat in &self.driver.members {
            for piece in 0..2 {
                for batch in drain(&seat.address, &keys(), "q", epoch, piece, Which::Rows).unwrap() {
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
    pub fn epoch(&mut self, epoch: u64, parts: &[Vec<(i64, i64)>]) {
        self.feed(epoch, parts);
        for call in self.release(epoch, parts) {
            let body = self.driver.reply(call);
            assert_eq!(body["ok"], true, "{body}");
        }
        self.check(epoch, parts);
    }

    pub fn check(&mut self, epoch: u64, parts: &[Vec<(i64, i64)>]) {
        let mut touched = BTreeMap::new();
        for (key, value) in parts.iter().flatten() {
            let total = self.totals.entry(*key).or_default();
            *total = (total.0 + 1, total.1 + value);
            touched.insert(*key, *total);
        }
        assert_eq!(self.drained(epoch), touched);
        assert_eq!(self.drained(epoch), touched);
    }

    /// Ends the generation; what each process holds of the epoch that begins next.
    pub fn inventories(&mut self, epoch: u64) -> Vec<Vec<Range>> {
        self.generation += 1;
        let answers = self.driver.ask_all(&stop("q", self.generation, epoch));
        let held = |answer: &Value| {
            assert_eq!(answer["ok"], true, "{answer}");
            serde_json::from_value(answer["answer"]["Inventory"][OPERATOR].clone()).unwrap()
        };
        answers.iter().map(held).collect()
    }

    /// Ends the generation; owners for the next one by what each process holds.
    pub fn stop(&mut self, epoch: u64) -> Vec<u32> {
        let mut owners = vec![u32::MAX; 1 << BITS];
        for (process, held) in self.inventories(epoch).into_iter().enumerate() {
            for range in held {
                assert_eq!(range.length(), BITS);
                let bin = range.prefix() as usize;
                assert_eq!(owners[bin], u32::MAX, "bin {bin} is in two places");
                owners[bin] = 2 * process as u32 + (bin % 2) as u32;
            }
        }
        assert!(owners.iter().all(|owner| *owner != u32::MAX), "{owners:?}");
        owners
    }

    pub fn recut(&self, handle: u64, recut: Recut) -> Value {
        ask("q", Request::Recut { stamp: stamp(self.generation), handle, recut })
    }

    pub fn migrate(&self, handle: u64, steps: &[&[(u32, u32)]]) -> Value {
        let range = |(bin, worker): &(u32, u32)| (Range::new(*bin, BITS).unwrap(), *worker);
        let steps = steps.iter().map(|step| step.iter().map(range).collect()).collect();
        let stamp = stamp(self.generation);
        ask("q", Request::Migrate { stamp, handle, steps, max_pause_ms: None, drains: false, at_epoch: None })
    }
}

impl Cluster {
    /// Waits until the members keep so many originals.
    pub fn await_originals(&mut self, expected: u64) {
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

pub fn parts(epoch: i64) -> Vec<Vec<(i64, i64)>> {
    (0..2).map(|seat| (0..50).map(|row| ((row * 7 + epoch) % 40, row + 1000 * seat)).collect()).collect()
}
