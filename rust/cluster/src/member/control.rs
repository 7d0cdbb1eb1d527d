//! The control loop's memory: which queries have a thread, who waits for figures.
//!
//! Nothing here waits for a query: requests are handed to the thread of the query they name, and
//! what needs no thread is answered at once.
//!
//! Some figures are told once (what a generation ended with, slices, moves): those of a query that is busy stay with its
//! thread, which passes over requests that have been answered, and those that come too late all the same are kept here for
//! its next answer.

use std::collections::{BTreeSet, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam::channel::{Sender, unbounded};
use penstock_engine::Request;
use serde_json::{Map, Value, json};

use super::Incoming;
use super::actor::{Actor, Command, ENDED};
use super::core::{Core, Query};
use crate::error::Failure;
use crate::host::Host;
use crate::message::{Ask, Message, Order};

/// A query that has not told its figures by then is reported as busy.
const STATS_PATIENCE: Duration = Duration::from_secs(1);
/// How often ending threads are looked at.
const END_PAUSE: Duration = Duration::from_millis(2);

/// A query as the control loop sees it.
struct QueryHandle<H: Host> {
    query: Arc<Query<H>>,
    commands: Sender<Command>,
    thread: JoinHandle<()>,
}

/// A request for figures that waits for threads.
struct Gather {
    call: u64,
    ticket: u64,
    waiting: BTreeSet<String>,
    queries: Map<String, Value>,
    deadline: Instant,
}

pub(super) struct ControlLoop<H: Host> {
    core: Arc<Core<H>>,
    incoming: Sender<Incoming>,
    queries: HashMap<String, QueryHandle<H>>,
    /// Threads of dropped queries, and of what is loaded, that may not have ended yet.
    retired: Vec<JoinHandle<()>>,
    /// In the order of their tickets.
    gathers: Vec<Gather>,
    tickets: u64,
    /// What came of a query when its request had been answered, for the next one.
    late: HashMap<String, Vec<Value>>,
    since: Instant,
}

impl<H: Host> ControlLoop<H> {
    pub(super) fn new(core: Arc<Core<H>>, incoming: Sender<Incoming>) -> Self {
        let (queries, retired, gathers, late) = Default::default();
        ControlLoop { core, incoming, queries, retired, gathers, tickets: 0, late, since: Instant::now() }
    }

    /// Takes a request; true when the member is to end.
    pub(super) fn request(&mut self, call: u64, body: Value, attachment: Vec<u8>) -> bool {
        let done =
            Message::parse(body).map_err(|error| Failure::new("protocol", error.to_string())).and_then(|message| {
                match message {
                    Message::Ask(ask) => self.dispatch(call, ask, attachment),
                    Message::Order(Order::Stats { query, loads }) => self.figures(call, query, loads),
                    Message::Order(Order::Load { query, plan }) => self.load(call, query, plan, attachment),
                    Message::Order(Order::Stop {}) => Ok(Done::Stop),
                }
            });
        match done {
            Ok(Done::Later) => false,
            Ok(Done::Stop) => {
                self.core.reply(call, Ok(json!({ "ok": true })));
                true
            }
            Err(failure) => {
                self.core.reply(call, Err(failure));
                false
            }
        }
    }

    /// Hands a request to the thread of its query. One that begins or ends a generation makes the thread, and is heard of at once: a
    /// thread that waits for peers of an older one stops waiting.
    fn dispatch(&mut self, call: u64, ask: Box<Ask>, attachment: Vec<u8>) -> Result<Done, Failure> {
        let name = ask.query.clone();
        let begins = match &ask.ask {
            Request::Stop { stamp, .. } | Request::Load { stamp, .. } => Some(*stamp),
            Request::Start(start) => Some(start.stamp),
            _ => None,
        };
        if let Some(stamp) = begins {
            if !self.queries.contains_key(&name) {
                let entry = self.spawn(&name)?;
                self.queries.insert(name.clone(), entry);
            }
            self.queries[&name].query.hear(stamp.generation);
            if let Some(older) = stamp.generation.checked_sub(1) {
                self.core.lobby.wake(&name, older);
            }
        }
        if ask.ask != Request::Drop {
            return self.find(&name)?.tell(Command::Ask { call, ask, attachment });
        }
        self.find(&name)?;
        let entry = self.remove(&name).expect("just found");
        let told = entry.tell(Command::Ask { call, ask, attachment });
        self.retired.retain(|thread| !thread.is_finished());
        self.retired.push(entry.thread);
        told
    }

    /// Loads what a query runs on a thread of its own: other queries are served meanwhile.
    fn load(&mut self, call: u64, query: String, plan: Value, attachment: Vec<u8>) -> Result<Done, Failure> {
        let core = Arc::clone(&self.core);
        let work = move || {
            let outcome = catch_unwind(AssertUnwindSafe(|| core.load(query, plan, attachment)));
            let panicked = || Failure::new("internal", "loading a program panicked; see the member's log");
            let answer = outcome.unwrap_or_else(|_| Err(panicked()));
            core.reply(call, answer.map(|()| json!({ "ok": true })));
        };
        let thread = thread::Builder::new()
            .name("penstock-load".into())
            .spawn(work)
            .map_err(|error| Failure::new("internal", format!("start a thread: {error}")))?;
        self.retired.retain(|thread| !thread.is_finished());
        self.retired.push(thread);
        Ok(Done::Later)
    }

    fn figures(&mut self, call: u64, query: Option<String>, loads: bool) -> Result<Done, Failure> {
        if let Some(query) = &query {
            self.find(query)?;
        }
        self.gather(call, query, loads);
        Ok(Done::Later)
    }

    fn find(&self, query: &str) -> Result<&QueryHandle<H>, Failure> {
        self.queries
            .get(query)
            .ok_or_else(|| Failure::new("unknown_query", format!("query {query:?} is not here")).with("query", query))
    }

    fn spawn(&self, name: &str) -> Result<QueryHandle<H>, Failure> {
        let query = self.core.add_query(name);
        let (commands, inbox) = unbounded();
        let (core, incoming) = (Arc::clone(&self.core), self.incoming.clone());
        let actor = Actor::new(core, Arc::clone(&query), inbox, incoming);
        let thread = thread::Builder::new()
            .name("penstock-query".into())
            .spawn(move || actor.run())
            .map_err(|error| Failure::new("internal", format!("start a thread: {error}")))?;
        Ok(QueryHandle { query, commands, thread })
    }

    /// Forgets a query: whoever waits for a mesh of it stops waiting.
    fn remove(&mut self, name: &str) -> Option<QueryHandle<H>> {
        let entry = self.queries.remove(name)?;
        self.late.remove(name);
        self.core.remove_query(name);
        entry.query.retire();
        self.core.lobby.wake(name, u64::MAX);
        Some(entry)
    }

    fn gather(&mut self, call: u64, query: Option<String>, loads: bool) {
        let ticket = self.tickets;
        self.tickets += 1;
        let mut gather = Gather {
            call,
            ticket,
            waiting: BTreeSet::new(),
            queries: Map::new(),
            deadline: Instant::now() + STATS_PATIENCE,
        };
        for (name, entry) in &self.queries {
            if query.as_ref().is_none_or(|query| query == name) {
                match entry.tell(Command::Stats { ticket, loads }) {
                    Ok(_) => drop(gather.waiting.insert(name.clone())),
                    Err(failure) => drop(gather.queries.insert(name.clone(), failure.to_body())),
                }
            }
        }
        self.gathers.push(gather);
        self.settle();
    }

    /// Takes the figures of a query.
    pub(super) fn stats(&mut self, ticket: u64, query: String, mut body: Value) {
        if let Some(gather) = self.gathers.iter_mut().find(|gather| gather.ticket == ticket) {
            let late = self.late.remove(&query).unwrap_or_default();
            body["ended"] = late.into_iter().chain(ended(&mut body)).collect();
            gather.waiting.remove(&query);
            gather.queries.insert(query, body);
        } else if self.queries.contains_key(&query) {
            let late = self.late.entry(query).or_default();
            late.extend(ended(&mut body));
            if body.get("group").is_some() {
                late.push(json!({ "generation": body["generation"], "group": body["group"] }));
            }
            late.drain(..late.len().saturating_sub(ENDED));
        }
        self.settle();
    }

    /// Answers requests for figures that are complete or have waited long enough, and forgets connections that have.
    pub(super) fn settle(&mut self) {
        let now = Instant::now();
        self.core.lobby.expire(self.core.limits.parked());
        let ready = self.gathers.extract_if(.., |g| g.waiting.is_empty() || g.deadline <= now);
        for mut gather in ready.collect::<Vec<_>>() {
            for query in std::mem::take(&mut gather.waiting) {
                gather.queries.insert(query, json!({ "busy": true }));
            }
            let process = self.process();
            let body = json!({
                "ok": true,
                "member": self.core.member,
                "process": process,
                "queries": gather.queries,
            });
            self.core.reply(gather.call, Ok(body));
        }
        let awaited = self.gathers.first().map_or(self.tickets, |gather| gather.ticket);
        self.core.awaited.store(awaited, Relaxed);
    }

    fn process(&self) -> Value {
        let metrics = self.core.metrics.snapshot();
        json!({
            "pid": std::process::id(),
            "rss_bytes": resident_bytes(),
            "uptime_s": self.since.elapsed().as_secs_f64(),
            "refused_connections": metrics.refused,
            "connections": metrics,
            "staging": self.core.store.figures(),
        })
    }

    /// Ends all queries. Threads that do not end within `grace` are left to the process's end.
    pub(super) fn end(mut self, grace: Duration) {
        let names: Vec<String> = self.queries.keys().cloned().collect();
        for name in names {
            if let Some(entry) = self.remove(&name) {
                // A thread that is gone needs no telling.
                let _ = entry.tell(Command::End);
                self.retired.push(entry.thread);
            }
        }
        let deadline = Instant::now() + grace;
        while self.retired.iter().any(|thread| !thread.is_finished()) && Instant::now() < deadline {
            thread::sleep(END_PAUSE);
        }
        for thread in self.retired {
            if thread.is_finished() {
                // A panic has been reported by the panic hook.
                let _ = thread.join();
            }
        }
    }
}

impl<H: Host> QueryHandle<H> {
    fn tell(&self, command: Command) -> Result<Done, Failure> {
        match self.commands.send(command) {
            Ok(()) => Ok(Done::Later),
            Err(_) => Err(Failure::new("internal", "the thread of this query has ended")),
        }
    }
}

/// Takes out of the figures of a query those of generations that have ended.
fn ended(body: &mut Value) -> Vec<Value> {
    match body["ended"].take() {
        Value::Array(ended) => ended,
        _ => Vec::new(),
    }
}

enum Done {
    /// Answered by someone else.
    Later,
    /// To be answered with a plain ok, and the member ends.
    Stop,
}

/// Resident memory of this process in bytes; None where the system does not tell.
fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kilobytes * 1024)
}

#[cfg(test)]
mod tests {
    use penstock_engine::Stamp;

    use super::super::core::{Outgoing, bare};
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    /// It had begun to tell when its request was answered without it.
    #[test]
    fn figures_that_come_too_late_are_told_with_the_next() {
        let (core, outbox) = bare();
        let (incoming, inbox) = unbounded();
        let mut control = ControlLoop::new(core, incoming);
        let stop = Request::Stop { stamp: Stamp { generation: 3, membership: 0 }, epoch: 0 };
        assert!(!control.request(0, json!({ "query": "q", "ask": stop }), Vec::new()));
        let told = |generation: u64| json!({ "generation": generation, "group": { "rows": 10 * generation } });
        let late = json!({ "ended": [told(1)], "generation": 2, "group": told(2)["group"] });
        control.stats(7, "q".into(), late.clone());
        control.stats(7, "gone".into(), late);
        for (call, ended) in [(1, json!([told(1), told(2)])), (2, json!([]))] {
            assert!(!control.request(call, json!({ "do": "stats" }), Vec::new()));
            let Ok(Incoming::Stats { ticket, query, body }) = inbox.recv_timeout(PATIENCE) else {
                panic!("no figures")
            };
            control.stats(ticket, query, body);
            let body = loop {
                match outbox.recv_timeout(PATIENCE).expect("an answer") {
                    Outgoing::Reply { call: answered, body, .. } if answered == call => break body,
                    _ => {}
                }
            };
            assert_eq!(body["queries"].as_object().map(Map::len), Some(1), "{body}");
            assert_eq!(body["queries"]["q"]["ended"], ended);
        }
        control.end(PATIENCE);
    }
}
