//! A host without a dataflow, and a driver for tests.
//!
//! The host's workers echo the rows of every epoch: worker `t` those of the partitions `p` with
//! `p % threads == t`; negative values are late. They greet each other over the mesh and report a
//! lost peer. The plan is a JSON object of wishes: see [`Wishes`].

#![allow(dead_code, unreachable_pub, reason = "each test uses a part")]

pub mod counts;

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use arrow_array::cast::AsArray;
use arrow_array::types::Int64Type;
use arrow_array::{ArrayRef, Int64Array, RecordBatch};
use arrow_schema::{DataType, Field, Schema, SchemaRef};
use crossbeam::channel::{Receiver, Sender, unbounded};
use penstock_cluster::host::{Cadence, Host, HostEvent, Keep, Launch, PartitionRows, Rows};
use penstock_cluster::session::{Keys, Limits, Secret, Stream};
use penstock_cluster::{End, Failure, Member, Registry, RegistryEvent, Store};
use penstock_engine::{Commit, Layout, MemberId, Range, Ranges, Recut, Release, Request, Stamp, Start};
use serde_json::{Value, json};

pub const SECRET: [u8; 32] = *b"0123456789abcdefghijklmnopqrstuv";
/// All keys of the driver.
pub fn keys() -> Keys {
    Keys::all(&Secret::new(SECRET).unwrap())
}

/// Those of a member that names no slot.
pub fn member_keys() -> Keys {
    Keys::member(&Secret::new(SECRET).unwrap(), "")
}

pub const PATIENCE: Duration = Duration::from_secs(20);

pub fn limits() -> Limits {
    Limits {
        grace: Duration::from_millis(300),
        mesh_time: PATIENCE,
        handshake_time: PATIENCE,
        heartbeat: Duration::from_millis(50),
        ..Limits::default()
    }
}

pub fn schema() -> SchemaRef {
    Arc::new(Schema::new(vec![Field::new("v", DataType::Int64, true)]))
}

pub fn batch(values: &[i64]) -> RecordBatch {
    let column: ArrayRef = Arc::new(Int64Array::from(values.to_vec()));
    RecordBatch::try_new(schema(), vec![column]).unwrap()
}

pub fn values<'a>(batches: impl IntoIterator<Item = &'a RecordBatch>) -> Vec<i64> {
    let columns = batches.into_iter().map(|batch| batch.column(0).as_primitive::<Int64Type>());
    columns.flat_map(|column| column.values().to_vec()).collect()
}

/// What a test wants of a query.
#[derive(Clone, Debug, Default, serde::Deserialize)]
#[serde(default)]
pub struct Wishes {
    /// Loading fails.
    pub unloadable: bool,
    /// The epoch fails with a user's error.
    pub fail_epoch: Option<u64>,
    /// The epoch waits until the gate opens.
    pub stuck_epoch: Option<u64>,
    /// Releasing panics.
    pub panic_epoch: Option<u64>,
}

/// Closed until opened, then open for ever.
#[derive(Default)]
pub struct Gate {
    open: Mutex<bool>,
    changed: Condvar,
}

impl Gate {
    pub fn open(&self) {
        *self.open.lock().unwrap() = true;
        self.changed.notify_all();
    }

    fn wait(&self) {
        let mut open = self.open.lock().unwrap();
        while !*open {
            open = self.changed.wait(open).unwrap();
        }
    }
}

#[derive(Clone, Default)]
pub struct Echo {
    pub gate: Arc<Gate>,
    /// Programs that were loaded.
    pub loads: Arc<AtomicUsize>,
    /// All bins that there are refer to it.
    pub bins: Arc<()>,
}

/// "Keys" are the rows seen, by epoch.
#[derive(Clone, Debug)]
pub struct EchoBins {
    rows: BTreeMap<u64, u64>,
    _counted: Arc<()>,
}

struct Work {
    epoch: u64,
    inputs: Vec<PartitionRows>,
    watermark: Option<i64>,
}

pub struct EchoGroup {
    work: Vec<Sender<Work>>,
    threads: Vec<JoinHandle<()>>,
    watchers: Vec<JoinHandle<()>>,
    mesh: Vec<Option<Stream>>,
    bins: Arc<Mutex<EchoBins>>,
    events: Sender<HostEvent>,
    wishes: Wishes,
    last_watermark: Arc<Mutex<Option<i64>>>,
}

impl Host for Echo {
    type Program = Wishes;
    type Bins = EchoBins;
    type Loaded = ();
    type Group = EchoGroup;
    type Event = HostEvent;

    fn load(&self, plan: &Value, attachment: &[u8]) -> Result<Wishes, Failure> {
        self.loads.fetch_add(1, Relaxed);
        let wishes: Wishes =
            serde_json::from_value(plan.clone()).map_err(|error| Failure::new("plan", error.to_string()))?;
        if wishes.unloadable {
            let failure = Failure::new("plan", "it wishes not to be loaded");
            return Err(Failure { attachment: attachment.to_vec(), ..failure });
        }
        Ok(wishes)
    }

    fn input_schema(&self, _: &Wishes, source: u8) -> Result<SchemaRef, Failure> {
        match source {
            0 => Ok(schema()),
            _ => Err(Failure::new("plan", "there is one source")),
        }
    }

    fn output_schema(&self, _: &Wishes, _beside: bool) -> SchemaRef {
        schema()
    }

    fn max_event_time(&self, _: &Wishes, _: u8, batch: &RecordBatch) -> Result<Option<i64>, Failure> {
        Ok(values([batch]).into_iter().max())
    }

    fn empty(&self) -> EchoBins {
        self.nothing()
    }

    fn nothing(&self) -> EchoBins {
        EchoBins { rows: BTreeMap::new(), _counted: self.bins.clone() }
    }

    fn inventory(&self, bins: &EchoBins, epoch: u64) -> Ranges {
        let range = |(epoch, _): (&u64, _)| Range::new(*epoch as u32, 3).expect("few epochs");
        [("echo".to_owned(), bins.rows.range(..epoch).map(range).collect())].into()
    }

    fn keys(&self, bins: &EchoBins) -> u64 {
        bins.rows.values().sum()
    }

    fn start(
        &self,
        program: &Arc<Wishes>,
        launch: &Launch,
        mesh: Vec<Option<Stream>>,
        mut bins: EchoBins,
        keep: Arc<dyn Keep>,
        events: Sender<HostEvent>,
    ) -> Result<EchoGroup, (Failure, Option<EchoBins>)> {
        assert_eq!(mesh.len(), launch.processes);
        assert!(mesh[launch.process].is_none());
        bins.rows.retain(|epoch, _| *epoch < launch.epoch);
        let tag = launch.query_number() ^ launch.stamp.generation;
        let mut watchers = Vec::new();
        for (process, stream) in mesh.iter().enumerate() {
            let Some(stream) = stream else { continue };
            let (mut reader, mut writer) = (stream.try_clone().unwrap(), stream.try_clone().unwrap());
            writer.write_all(&[launch.process as u8]).unwrap();
            writer.write_all(&tag.to_le_bytes()).unwrap();
            let events = events.clone();
            watchers.push(named("echo-watch", move || {
                let mut hello = [0; 9];
                let expected = [&[process as u8][..], &tag.to_le_bytes()].concat();
                if reader.read_exact(&mut hello).is_ok() && hello[..] == expected {
                    // Nothing more is sent: this ends with the connection.
                    let _ = reader.read(&mut [0]);
                }
                let failure = Failure::new("peer_lost", format!("process {process}"));
                let _ = events.send(HostEvent::Failed { failure });
            }));
        }
        let bins = Arc::new(Mutex::new(bins));
        let last_watermark = Arc::new(Mutex::new(launch.watermark));
        let (mut work, mut threads) = (Vec::new(), Vec::new());
        for thread in 0..launch.threads {
            let (sender, receiver) = unbounded();
            let worker = Worker {
                index: launch.process * launch.threads + thread,
                thread,
                threads: launch.threads,
                wishes: Wishes::clone(program),
                gate: self.gate.clone(),
                bins: bins.clone(),
                events: events.clone(),
                watermark: last_watermark.clone(),
                keep: keep.clone(),
            };
            work.push(sender);
            threads.push(named("echo-worker", move || worker.run(&receiver)));
        }
        let wishes = Wishes::clone(program);
        Ok(EchoGroup { work, threads, watchers, mesh, bins, events, wishes, last_watermark })
    }

    fn translate(&self, _: &EchoGroup, event: HostEvent) -> HostEvent {
        event
    }

    fn release(
        &self,
        group: &EchoGroup,
        epoch: u64,
        inputs: Vec<PartitionRows>,
        watermark: Option<i64>,
        _: i64,
    ) -> Result<(), Failure> {
        assert_ne!(group.wishes.panic_epoch, Some(epoch), "it wishes to panic");
        for work in &group.work {
            let inputs = inputs.clone();
            work.send(Work { epoch, inputs, watermark }).unwrap();
        }
        Ok(())
    }

    fn migrate(&self, group: &EchoGroup, handle: u64, steps: Vec<Vec<(Range, u32)>>, _: Cadence, _: Option<u64>) {
        let moved: usize = steps.iter().map(Vec::len).sum();
        let plain = |step: &Vec<(Range, u32)>| -> Vec<(u32, u32)> {
            step.iter().map(|(range, worker)| (range.prefix(), *worker)).collect()
        };
        let report = json!({ "moved": moved, "bytes": 8, "steps": steps.iter().map(plain).collect::<Vec<_>>() });
        let times = vec![(0, 1); steps.len()];
        group.events.send(HostEvent::MigrationDone { handle, times, report }).unwrap();
    }

    fn recut(&self, group: &EchoGroup, handle: u64, recut: &Recut) {
        let (Recut::Split { ranges, .. } | Recut::Merge { ranges }) = recut;
        let report = json!({ "moved": ranges.len(), "bytes": 0, "steps": [ranges] });
        group.events.send(HostEvent::MigrationDone { handle, times: vec![(0, 1)], report }).unwrap();
    }

    fn cancel(&self, _: &EchoGroup, _: u64) {}

    fn settle(&self, _: &EchoGroup, _: u64) {}

    fn loads(&self, _: &EchoGroup) -> Value {
        json!([])
    }

    fn stats(&self, group: &EchoGroup) -> Value {
        json!({ "watermark": *group.last_watermark.lock().unwrap() })
    }

    fn stop(&self, group: EchoGroup) -> (EchoBins, Option<Failure>) {
        drop(group.work);
        group.threads.into_iter().for_each(|thread| thread.join().unwrap());
        for stream in group.mesh.iter().flatten() {
            let _ = stream.shutdown(Shutdown::Both);
        }
        group.watchers.into_iter().for_each(|thread| thread.join().unwrap());
        let bins = group.bins.lock().unwrap().clone();
        (bins, None)
    }

    fn store(&self, _: &str) -> Result<Arc<dyn Store>, Failure> {
        self.gate.wait();
        Err(Failure::new("store", "it has hung until now"))
    }

    fn keep_loaded(&self, _: &mut EchoBins, (): ()) {}

    fn drop_loaded(&self, _: &mut EchoBins) {}
}

fn named(name: &str, run: impl FnOnce() + Send + 'static) -> JoinHandle<()> {
    thread::Builder::new().name(name.into()).spawn(run).unwrap()
}

struct Worker {
    index: usize,
    thread: usize,
    threads: usize,
    wishes: Wishes,
    gate: Arc<Gate>,
    bins: Arc<Mutex<EchoBins>>,
    events: Sender<HostEvent>,
    watermark: Arc<Mutex<Option<i64>>>,
    keep: Arc<dyn Keep>,
}

impl Worker {
    fn kept(&self, values: &[i64]) -> Vec<Rows> {
        if values.is_empty() { vec![] } else { vec![self.keep.keep(batch(values)).unwrap()] }
    }

    fn run(&self, work: &Receiver<Work>) {
        for Work { epoch, inputs, watermark } in work {
            if self.wishes.stuck_epoch == Some(epoch) {
                self.gate.wait();
            }
            let mine = |staged: &&PartitionRows| staged.partition as usize % self.threads == self.thread;
            let blocks = inputs.iter().filter(mine).flat_map(|staged| &staged.batches);
            let read: Result<Vec<RecordBatch>, _> = blocks.map(Rows::read).collect();
            let batches = match read {
                Ok(batches) => batches,
                Err(error) => {
                    let failure = Failure::new("storage", error.to_string());
                    let _ = self.events.send(HostEvent::Failed { failure });
                    return;
                }
            };
            let (rows, late): (Vec<i64>, Vec<i64>) = values(&batches).into_iter().partition(|value| *value >= 0);
            {
                let mut bins = self.bins.lock().unwrap();
                *bins.rows.entry(epoch).or_default() += (rows.len() + late.len()) as u64;
            }
            if self.wishes.fail_epoch == Some(epoch) {
                let failure = Failure::new("user_function", "division by zero").with("line", 3);
                let failure = Failure { attachment: b"pickled".to_vec(), ..failure };
                let _ = self.events.send(HostEvent::Failed { failure });
                return;
            }
            *self.watermark.lock().unwrap() = watermark;
            // Before it is told: who hears it may look whether it is gone.
            drop((inputs, batches));
            let _ = self.events.send(HostEvent::EpochDone {
                epoch,
                worker: self.index,
                late_rows: late.len() as u64,
                rows: self.kept(&rows),
                side_rows: Vec::new(),
                beside: self.kept(&late),
                record: Vec::new(),
            });
        }
    }
}

/// A member that runs on its own thread.
pub struct MemberThread {
    pub id: u64,
    pub address: String,
    pub stop: Arc<Mutex<bool>>,
    pub thread: JoinHandle<End>,
}

/// A registry with members, and the events that nobody asked for yet.
pub struct Driver {
    pub registry: Registry,
    pub limits: Limits,
    pub keys: Keys,
    pub members: Vec<MemberThread>,
    pub gate: Arc<Gate>,
    /// Programs that all members have loaded.
    pub loads: Arc<AtomicUsize>,
    bins: Arc<()>,
    pub events: Vec<RegistryEvent>,
}

impl Driver {
    pub fn new(members: usize) -> Self {
        Driver::with(members, limits())
    }

    pub fn with(count: usize, limits: Limits) -> Self {
        Driver::with_keys(count, limits, &keys(), &member_keys())
    }

    /// With keys of the driver and of its members.
    pub fn with_keys(count: usize, limits: Limits, keys: &Keys, member_keys: &Keys) -> Self {
        let registry = Registry::bind_with("127.0.0.1", 0, None, keys.clone(), limits.clone()).unwrap();
        let (members, gate, loads, bins, events) = Default::default();
        let mut driver = Driver { registry, limits, keys: member_keys.clone(), members, gate, loads, bins, events };
        for _ in 0..count {
            driver.join();
        }
        driver
    }

    /// Adds a member; returns its place among the members.
    pub fn join(&mut self) -> usize {
        let host = Echo { gate: self.gate.clone(), loads: self.loads.clone(), bins: self.bins.clone() };
        let info = json!({ "host": "here" });
        let member =
            Member::connect_to(self.registry.address(), self.keys.clone(), info, host, self.limits.clone()).unwrap();
        let (id, address) = (member.id(), member.address().to_owned());
        let stop = Arc::new(Mutex::new(false));
        let asked = stop.clone();
        let thread = thread::spawn(move || member.run(&|| *asked.lock().unwrap()));
        self.await_event(|event| matches!(event, RegistryEvent::Joined { member, .. } if *member == id));
        self.members.push(MemberThread { id, address, stop, thread });
        self.members.len() - 1
    }

    /// How many bins there are at all members.
    pub fn bins(&self) -> usize {
        Arc::strong_count(&self.bins) - 1 - self.members.len()
    }

    pub fn send(&self, place: usize, body: &Value) -> u64 {
        self.send_with(place, body, &[])
    }

    pub fn send_with(&self, place: usize, body: &Value, attachment: &[u8]) -> u64 {
        self.registry.send(self.members[place].id, body.to_string(), attachment.to_vec()).unwrap()
    }

    /// Waits for an event, keeping the others.
    pub fn await_event(&mut self, wanted: impl Fn(&RegistryEvent) -> bool) -> RegistryEvent {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(at) = self.events.iter().position(&wanted) {
                return self.events.remove(at);
            }
            assert!(Instant::now() < deadline, "no such event among {:?}", self.events);
            self.events.extend(self.registry.poll(Duration::from_millis(100)));
        }
    }

    pub fn reply(&mut self, call: u64) -> Value {
        let event =
            self.await_event(|event| matches!(event, RegistryEvent::Reply { call: answered, .. } if *answered == call));
        let RegistryEvent::Reply { body, .. } = event else { unreachable!("matched above") };
        body
    }

    /// Asks and waits for the answer.
    pub fn ask(&mut self, place: usize, body: &Value) -> Value {
        let call = self.send(place, body);
        self.reply(call)
    }

    pub fn ask_all(&mut self, body: &Value) -> Vec<Value> {
        let calls: Vec<u64> = (0..self.members.len()).map(|place| self.send(place, body)).collect();
        calls.into_iter().map(|call| self.reply(call)).collect()
    }

    /// The start of a generation on the members at these places, two workers each, two bins per worker.
    pub fn start_body(&self, query: &str, places: &[usize], rank: usize, begin: &Begin) -> Value {
        let peers: Vec<Value> = places
            .iter()
            .map(|place| json!({ "id": self.members[*place].id, "address": self.members[*place].address }))
            .collect();
        let start = Start {
            stamp: stamp(begin.generation),
            members: places.iter().map(|place| MemberId(self.members[*place].id)).collect(),
            rank: rank as u32,
            threads: 2,
            bits: 3,
            layouts: [("echo".to_owned(), Layout::even(3, 2 * places.len() as u32))].into(),
            epoch: begin.epoch,
            watermark: None,
            fresh: begin.fresh,
        };
        let mut body = ask(query, Request::Start(start));
        body["plan"] = begin.plan.clone();
        body["peers"] = peers.into();
        body
    }

    /// Starts a generation on the members at these places.
    pub fn start(&mut self, query: &str, places: &[usize], begin: &Begin) -> Vec<Value> {
        let calls: Vec<u64> = places
            .iter()
            .enumerate()
            .map(|(rank, place)| self.send(*place, &self.start_body(query, places, rank, begin)))
            .collect();
        calls.into_iter().map(|call| self.reply(call)).collect()
    }

    /// Ends everything; returns how each member ended.
    pub fn close(self) -> Vec<End> {
        self.gate.open();
        self.registry.close();
        self.members.into_iter().map(|seat| seat.thread.join().unwrap()).collect()
    }
}

/// Waits until something holds.
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "never: {what}");
        thread::yield_now();
    }
}

/// What a generation begins with.
#[derive(Clone, Debug)]
pub struct Begin {
    pub generation: u64,
    pub epoch: u64,
    pub fresh: bool,
    pub plan: Value,
}

impl Default for Begin {
    fn default() -> Self {
        Begin { generation: 1, epoch: 0, fresh: true, plan: json!({}) }
    }
}

impl Begin {
    pub fn plan(plan: Value) -> Self {
        Begin { plan, ..Begin::default() }
    }

    /// Goes on from what the generation before has left.
    pub fn again(generation: u64, epoch: u64) -> Self {
        Begin { generation, epoch, fresh: false, ..Begin::default() }
    }
}

pub fn stamp(generation: u64) -> Stamp {
    Stamp { generation, membership: 0 }
}

/// A request about a query.
pub fn ask(query: &str, request: Request) -> Value {
    json!({ "query": query, "ask": request })
}

/// Ends what is older than a generation, which begins with an epoch.
pub fn stop(query: &str, generation: u64, epoch: u64) -> Value {
    ask(query, Request::Stop { stamp: stamp(generation), epoch })
}

/// Runs an epoch on committed partitions: partition, attempt, rows.
pub fn release(query: &str, generation: u64, epoch: u64, feeds: &[(u32, u64, u64)]) -> Value {
    let commit = |(partition, attempt, rows): &(u32, u64, u64)| Commit {
        source: 0,
        partition: *partition,
        attempt: *attempt,
        rows: *rows,
        rows_before: 0,
    };
    let feeds = feeds.iter().map(commit).collect();
    let (stamp, watermark) = (stamp(generation), Some(7));
    ask(query, Request::Release(Release { stamp, epoch, feeds, watermark, clock_ms: 0, finish: false }))
}

/// The kind of a refusal.
pub fn kind(body: &Value) -> &str {
    body["error"]["kind"].as_str().unwrap_or("no error")
}
