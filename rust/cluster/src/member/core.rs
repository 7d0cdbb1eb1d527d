//! What the threads of a member share.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arrow_array::RecordBatch;
use crossbeam::channel::Sender;
use penstock_dataflow::BoxError;
use serde_json::Value;

use super::lobby::Lobby;
use super::outputs::Outputs;
use super::staging::Staging;
use crate::error::Failure;
use crate::host::{Host, Keep, Rows};
use crate::session::{Keys, Limits, Metrics};
use crate::spill::{SpillError, Store};

/// What goes to the registry.
#[derive(Debug)]
pub(super) enum Outgoing {
    Reply { call: u64, body: Value, attachment: Vec<u8> },
    Message { body: Value, attachment: Vec<u8> },
    Close,
}

pub(super) struct Core<H: Host> {
    pub(super) host: H,
    pub(super) member: u64,
    pub(super) keys: Keys,
    pub(super) limits: Limits,
    pub(super) metrics: Arc<Metrics>,
    pub(super) lobby: Lobby,
    pub(super) outgoing: Sender<Outgoing>,
    pub(super) store: Arc<Store>,
    /// The first request for figures that somebody waits for; it is of the control loop.
    pub(super) awaited: AtomicU64,
    queries: Mutex<HashMap<String, Arc<Query<H>>>>,
    /// What queries are to be started with, by name.
    loaded: Mutex<HashMap<String, Loaded<H::Program>>>,
}

/// A program that was loaded before anybody starts it, and of what.
struct Loaded<P> {
    plan: Value,
    attachment: Vec<u8>,
    program: P,
}

/// Locks, also when a holder panicked: all that is locked here changes in single steps.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<H: Host> Core<H> {
    pub(super) fn new(host: H, member: u64, keys: Keys, limits: Limits, outgoing: Sender<Outgoing>) -> Self {
        let (metrics, lobby, awaited, queries, loaded) = Default::default();
        let store = Arc::new(Store::new(limits.staging_bytes, &limits.spill_folders));
        Core { host, member, keys, limits, metrics, lobby, outgoing, store, awaited, queries, loaded }
    }

    pub(super) fn query(&self, name: &str) -> Result<Arc<Query<H>>, Failure> {
        lock(&self.queries)
            .get(name)
            .cloned()
            .ok_or_else(|| Failure::new("unknown_query", format!("query {name:?} is not here")).with("query", name))
    }

    pub(super) fn add_query(&self, name: &str) -> Arc<Query<H>> {
        Arc::clone(lock(&self.queries).entry(name.to_owned()).or_insert_with(|| {
            let (fence, program, staging, outputs) = Default::default();
            let shelf =
                Arc::new(QueryStore { store: Arc::clone(&self.store), piece_rows: AtomicUsize::new(PIECE_ROWS) });
            Arc::new(Query { name: name.to_owned(), fence, program, staging, outputs, shelf })
        }))
    }

    pub(super) fn remove_query(&self, name: &str) {
        lock(&self.queries).remove(name);
        lock(&self.loaded).remove(name);
    }

    /// Loads what a query is to be started with. Takes as long as the user's modules do.
    pub(super) fn load(&self, query: String, plan: Value, attachment: Vec<u8>) -> Result<(), Failure> {
        let program = self.host.load(&plan, &attachment)?;
        lock(&self.loaded).insert(query, Loaded { plan, attachment, program });
        Ok(())
    }

    /// The program of a start: what was loaded for the query, where it is of the same plan and callables.
    pub(super) fn program(&self, query: &str, plan: &Value, attachment: &[u8]) -> Result<H::Program, Failure> {
        let loaded = lock(&self.loaded).remove(query);
        match loaded.filter(|loaded| loaded.plan == *plan && loaded.attachment == attachment) {
            Some(loaded) => Ok(loaded.program),
            None => self.host.load(plan, attachment),
        }
    }

    /// Keeps what a start was to run with for the next one, unless the query is forgotten.
    pub(super) fn keep(&self, query: &str, plan: Value, attachment: Vec<u8>, program: H::Program) {
        let mut loaded = lock(&self.loaded);
        // Who forgets it does so here at last.
        if lock(&self.queries).contains_key(query) {
            loaded.insert(query.to_owned(), Loaded { plan, attachment, program });
        }
    }

    pub(super) fn reply(&self, call: u64, answer: Result<Value, Failure>) {
        let (body, attachment) = match answer {
            Ok(body) => (body, Vec::new()),
            Err(failure) => (failure.to_body(), failure.attachment),
        };
        // The writer is gone only when the registry is: then nobody waits for answers.
        let _ = self.outgoing.send(Outgoing::Reply { call, body, attachment });
    }
}

/// The newest generation that was heard of.
#[derive(Clone, Copy, Debug, Default)]
struct Fence {
    heard: u64,
    /// The query is forgotten.
    over: bool,
}

/// One query, as the control loop, its own thread and the data port see it.
pub(super) struct Query<H: Host> {
    pub(super) name: String,
    fence: Mutex<Fence>,
    program: Mutex<Option<Arc<H::Program>>>,
    staging: Mutex<Staging>,
    outputs: Mutex<Outputs>,
    pub(super) shelf: Arc<QueryStore>,
}

/// Rows of a spilled piece before a generation has said how long a slice is.
const PIECE_ROWS: usize = 16_384;

/// The member's store as one query uses it: what it spills is cut like its slices.
pub(super) struct QueryStore {
    store: Arc<Store>,
    piece_rows: AtomicUsize,
}

impl QueryStore {
    /// Slices of at most so many rows are read from now on.
    pub(super) fn cut(&self, slice_rows: Option<usize>) {
        self.piece_rows.store(slice_rows.unwrap_or(PIECE_ROWS), Relaxed);
    }

    /// Keeps a staged batch, in one block or in pieces.
    pub(super) fn stage(&self, batch: RecordBatch) -> Result<Vec<Rows>, SpillError> {
        self.store.keep(batch, self.piece_rows.load(Relaxed))
    }
}

impl Keep for QueryStore {
    fn keep(&self, batch: RecordBatch) -> Result<Rows, BoxError> {
        let mut kept = self.store.keep(batch, usize::MAX)?;
        kept.pop().ok_or_else(|| "a block without rows is not kept".into())
    }
}

impl<H: Host> Query<H> {
    pub(super) fn staging(&self) -> MutexGuard<'_, Staging> {
        lock(&self.staging)
    }

    pub(super) fn outputs(&self) -> MutexGuard<'_, Outputs> {
        lock(&self.outputs)
    }

    pub(super) fn set_program(&self, program: Arc<H::Program>) {
        *lock(&self.program) = Some(program);
    }

    pub(super) fn program(&self) -> Result<Arc<H::Program>, Failure> {
        lock(&self.program).clone().ok_or_else(|| {
            let message = format!("query {:?} has not started here", self.name);
            Failure::new("unknown_query", message).with("query", self.name.as_str())
        })
    }

    /// A generation is heard of: connections of every older one are of no use any more.
    pub(super) fn hear(&self, generation: u64) {
        let mut fence = lock(&self.fence);
        fence.heard = fence.heard.max(generation);
    }

    /// The query is forgotten.
    pub(super) fn retire(&self) {
        lock(&self.fence).over = true;
    }

    /// May a mesh connection of this generation still be of use?
    pub(super) fn admit(&self, generation: u64) -> Result<(), Failure> {
        let Fence { heard, over } = *lock(&self.fence);
        if generation >= heard && !over {
            return Ok(());
        }
        let message = format!("generation {generation} of query {:?} is not the present one", self.name);
        Err(Failure::new("stale_generation", message).with("given", generation).with("current", heard))
    }
}

/// What the threads of a member share without one, with a host that loads nothing; and what would go to the registry.
#[cfg(test)]
pub(super) fn bare() -> (Arc<Core<crate::GroupHost>>, crossbeam::channel::Receiver<Outgoing>) {
    use penstock_plan::{CallError, Callbacks};

    struct Nothing;

    impl crate::Loader for Nothing {
        fn load(&self, _: &[u8]) -> Result<Arc<dyn Callbacks>, CallError> {
            Err(CallError::new("load", "there is nothing to load"))
        }
    }

    let keys =
        Keys::all(&crate::session::Secret::new(std::array::from_fn(|at| at as u8)).expect("it is random enough"));
    let (outgoing, outbox) = crossbeam::channel::unbounded();
    (Arc::new(Core::new(crate::GroupHost::new(Arc::new(Nothing)), 1, keys, Limits::default(), outgoing)), outbox)
}
