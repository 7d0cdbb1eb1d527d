//! Threads that share the work of a query.
//!
//! Owns: admission. Work is handed out as units of at most `batch_size` prefixes of two attributes (tuples of the first
//! level that a join over dataflow would make), and at most `batches` units are admitted and unfinished at any time,
//! whatever the number of threads; the most that ever were admitted at once is measured ([`Done::admitted_maximum`]), not
//! computed. Rows leave in batches that wait in a bounded place: a thread whose rows nobody takes suspends its search.
//!
//! Invariants: the sum over units is the whole; with [`Crew::in_order`] rows come exactly as one thread would give them;
//! dropping [`Matches`] stops and joins every thread.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::error::GraphError;
use crate::query::Query;
use crate::rows::Rows;
use crate::search::Search;
use crate::units::{Cursor, Unit};

/// How the work is shared.
#[derive(Clone, Debug)]
pub struct Crew {
    /// Threads, at least 1.
    pub workers: usize,
    /// Units that may be admitted and unfinished at a time, at least 1.
    pub batches: usize,
    /// Prefixes of two attributes per unit, at least 1.
    pub batch_size: usize,
    /// Rows per batch of the result, at least 1.
    pub rows: usize,
    /// Whether rows come as from one thread.
    pub in_order: bool,
    /// Which prefixes; `None`: all.
    pub unit: Option<Unit>,
}

impl Default for Crew {
    fn default() -> Self {
        Self { workers: 1, batches: 64, batch_size: 1024, rows: 8192, in_order: false, unit: None }
    }
}

impl Crew {
    fn check(&self) -> Result<(), GraphError> {
        let wanted = "at least 1 is needed";
        for (name, value) in
            [("workers", self.workers), ("batches", self.batches), ("batch_size", self.batch_size), ("rows", self.rows)]
        {
            if value == 0 {
                return Err(GraphError::Argument { name, value: 0, wanted });
            }
        }
        if self.workers > 4096 {
            let (name, value, wanted) = ("workers", self.workers as u64, "at most 4096 threads");
            return Err(GraphError::Argument { name, value, wanted });
        }
        self.batches.checked_mul(self.batch_size).map(|_| ()).ok_or(GraphError::Argument {
            name: "batches",
            value: self.batches as u64,
            wanted: "batches times batch_size must fit in 64 bits",
        })
    }
}

/// What a finished search tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Done {
    /// Matches.
    pub count: u64,
    /// Prefixes that were handed out.
    pub prefixes: u64,
    /// Most prefixes that were admitted and unfinished at once.
    pub admitted_maximum: u64,
    /// Most units that were admitted and unfinished at once.
    pub batches_maximum: u64,
}

/// What the threads share.
struct Shared {
    query: Query,
    crew: Crew,
    stop: AtomicBool,
    count: AtomicU64,
    desk: Mutex<Desk>,
    /// Something was taken, finished or stopped.
    room: Condvar,
    /// Rows, an end or a failure came.
    news: Condvar,
}

struct Desk {
    cursor: Cursor,
    next: u64,
    /// Units that are admitted and unfinished: someone searches there, or rows of it wait.
    lanes: BTreeMap<u64, Lane>,
    running: usize,
    done: Done,
    failure: Option<String>,
}

struct Lane {
    prefixes: usize,
    waiting: VecDeque<Rows>,
    ended: bool,
}

impl Shared {
    fn desk(&self) -> MutexGuard<'_, Desk> {
        // No code that can panic runs under the lock.
        self.desk.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// The next unit, once one may be admitted; `None` at the end or when stopped.
    fn admit(&self) -> Option<(u64, Unit)> {
        let mut desk = self.desk();
        while desk.lanes.len() >= self.crew.batches && !self.stop.load(Ordering::Relaxed) {
            desk = self.room.wait(desk).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
        if self.stop.load(Ordering::Relaxed) {
            return None;
        }
        let views = self.query.views();
        let (unit, prefixes) = desk.cursor.next(&self.query, &views)?;
        let number = desk.next;
        desk.next += 1;
        desk.lanes.insert(number, Lane { prefixes, waiting: VecDeque::new(), ended: false });
        let admitted = desk.lanes.values().map(|lane| lane.prefixes as u64).sum();
        let units = desk.lanes.len() as u64;
        let done = &mut desk.done;
        done.prefixes += prefixes as u64;
        done.admitted_maximum = done.admitted_maximum.max(admitted);
        done.batches_maximum = done.batches_maximum.max(units);
        Some((number, unit))
    }

    /// Nobody searches there any more; the unit is finished once nobody waits there either.
    fn finish(&self, number: u64) {
        let mut desk = self.desk();
        if let Some(lane) = desk.lanes.get_mut(&number) {
            lane.ended = true;
            if lane.waiting.is_empty() {
                desk.lanes.remove(&number);
            }
        }
        drop(desk);
        self.room.notify_all();
        self.news.notify_all();
    }

    /// The thread's search, at the beginning of a unit.
    fn begun<'a>(&self, search: &'a mut Option<Search>, unit: Unit) -> &'a mut Search {
        match search {
            Some(search) => {
                search.begin(unit);
                search
            }
            None => search.insert(Search::new(&self.query, unit)),
        }
    }

    fn count(&self) {
        let mut search: Option<Search> = None;
        while let Some((number, unit)) = self.admit() {
            if let Some(found) = self.begun(&mut search, unit).count(&self.stop) {
                self.count.fetch_add(found, Ordering::Relaxed);
            }
            self.finish(number);
        }
    }

    fn rows(&self) {
        let mut search: Option<Search> = None;
        while let Some((number, unit)) = self.admit() {
            let search = self.begun(&mut search, unit);
            let mut more = true;
            while more && !self.stop.load(Ordering::Relaxed) {
                let mut rows = Rows::new(&self.query);
                more = search.fill(&mut rows, self.crew.rows, &self.stop);
                if !rows.is_empty() && !self.put(number, rows) {
                    return;
                }
            }
            self.finish(number);
        }
    }

    /// Leaves rows for whoever takes them; waits while two batches of this unit wait already.
    fn put(&self, number: u64, rows: Rows) -> bool {
        let mut desk = self.desk();
        let full = |desk: &Desk| desk.lanes.get(&number).is_some_and(|lane| lane.waiting.len() >= 2);
        while full(&desk) && !self.stop.load(Ordering::Relaxed) {
            desk = self.room.wait(desk).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
        desk.done.count += rows.len() as u64;
        if let Some(lane) = desk.lanes.get_mut(&number) {
            lane.waiting.push_back(rows);
        }
        drop(desk);
        self.news.notify_all();
        !self.stop.load(Ordering::Relaxed)
    }
}

/// Threads at work.
struct Threads {
    shared: Arc<Shared>,
    handles: Vec<JoinHandle<()>>,
}

impl Threads {
    fn start(query: &Query, crew: &Crew, work: fn(&Shared)) -> Result<Self, GraphError> {
        crew.check()?;
        let cursor = Cursor::new(crew.unit.unwrap_or_else(|| Unit::whole(query)), crew.batch_size);
        let desk = Desk {
            cursor,
            next: 0,
            lanes: BTreeMap::new(),
            running: crew.workers,
            done: Done::default(),
            failure: None,
        };
        let shared = Arc::new(Shared {
            query: query.clone(),
            crew: crew.clone(),
            stop: AtomicBool::new(false),
            count: AtomicU64::new(0),
            desk: Mutex::new(desk),
            room: Condvar::new(),
            news: Condvar::new(),
        });
        let mut threads = Self { shared, handles: Vec::new() };
        for at in 0..crew.workers {
            let shared = threads.shared.clone();
            let body = move || {
                let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(&shared)));
                let mut desk = shared.desk();
                desk.running -= 1;
                if let Err(panic) = outcome {
                    let text = panic.downcast_ref::<String>().map(String::as_str);
                    let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic");
                    desk.failure.get_or_insert_with(|| text.to_owned());
                    shared.stop.store(true, Ordering::Relaxed);
                }
                drop(desk);
                shared.room.notify_all();
                shared.news.notify_all();
            };
            let started = thread::Builder::new().name(format!("penstock-graph-{at}")).spawn(body);
            threads.handles.push(started.map_err(|error| GraphError::Thread(error.to_string()))?);
        }
        Ok(threads)
    }

    fn stop(&self) {
        // Under the lock, so that nobody between its look at the flag and its wait misses it.
        let desk = self.shared.desk();
        self.shared.stop.store(true, Ordering::Relaxed);
        drop(desk);
        self.shared.room.notify_all();
        self.shared.news.notify_all();
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.stop();
        for handle in self.handles.drain(..) {
            let _ = handle.join(); // panics were caught and told
        }
    }
}

/// A count under way.
pub struct Counting(Threads);

impl Counting {
    /// Starts the threads.
    ///
    /// # Errors
    /// When the crew has no sense, or a thread does not start.
    pub fn start(query: &Query, crew: &Crew) -> Result<Self, GraphError> {
        Threads::start(query, crew, Shared::count).map(Self)
    }

    /// Waits at most `wait` for the end; `None` when it has not come.
    ///
    /// # Errors
    /// When a thread failed.
    pub fn wait(&self, wait: Duration) -> Result<Option<Done>, GraphError> {
        let shared = &self.0.shared;
        let deadline = Instant::now() + wait;
        let mut desk = shared.desk();
        while desk.running > 0 && Instant::now() < deadline {
            let left = deadline.saturating_duration_since(Instant::now());
            desk = shared.news.wait_timeout(desk, left).unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
        if let Some(failure) = &desk.failure {
            return Err(GraphError::Thread(failure.clone()));
        }
        let count = shared.count.load(Ordering::Relaxed);
        Ok((desk.running == 0).then_some(Done { count, ..desk.done }))
    }

    /// Roots that are behind, of all: for showing how far it is.
    #[must_use]
    pub fn progress(&self) -> (u64, u64) {
        progress(&self.0.shared)
    }
}

fn progress(shared: &Shared) -> (u64, u64) {
    (u64::from(shared.desk().cursor.rest().from.0), shared.query.roots().len() as u64)
}

/// Counts the matches.
///
/// # Errors
/// As [`Counting::start`] and [`Counting::wait`].
pub fn count(query: &Query, crew: &Crew) -> Result<Done, GraphError> {
    let counting = Counting::start(query, crew)?;
    loop {
        if let Some(done) = counting.wait(Duration::from_secs(3600))? {
            return Ok(done);
        }
    }
}

/// What comes next of an enumeration.
#[derive(Debug)]
pub enum Next {
    /// Some matches.
    Rows(Rows),
    /// None yet.
    Nothing,
    /// No more.
    End(Done),
}

/// Matches of a query as threads find them; an iterator over batches of rows.
pub struct Matches(Threads);

impl Matches {
    /// Starts the threads.
    ///
    /// # Errors
    /// As [`Counting::start`].
    pub fn start(query: &Query, crew: &Crew) -> Result<Self, GraphError> {
        Threads::start(query, crew, Shared::rows).map(Self)
    }

    /// The next rows, waiting at most `wait` for them.
    ///
    /// # Errors
    /// When a thread failed.
    pub fn next_in(&self, wait: Duration) -> Result<Next, GraphError> {
        let shared = &self.0.shared;
        let deadline = Instant::now() + wait;
        let mut desk = shared.desk();
        loop {
            if let Some(failure) = &desk.failure {
                return Err(GraphError::Thread(failure.clone()));
            }
            if let Some(rows) = take(&mut desk, shared.crew.in_order) {
                drop(desk);
                shared.room.notify_all();
                return Ok(Next::Rows(rows));
            }
            if desk.running == 0 && desk.lanes.is_empty() {
                return Ok(Next::End(desk.done));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(Next::Nothing);
            }
            desk = shared.news.wait_timeout(desk, left).unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
    }

    /// Roots that are behind, of all.
    #[must_use]
    pub fn progress(&self) -> (u64, u64) {
        progress(&self.0.shared)
    }

    /// What is known so far.
    #[must_use]
    pub fn done(&self) -> Done {
        self.0.shared.desk().done
    }
}

impl Iterator for Matches {
    type Item = Result<Rows, GraphError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.next_in(Duration::from_secs(3600)) {
                Ok(Next::Rows(rows)) => return Some(Ok(rows)),
                Ok(Next::Nothing) => {}
                Ok(Next::End(_)) => return None,
                Err(error) => return Some(Err(error)),
            }
        }
    }
}

/// Takes rows that may go: of the oldest unfinished unit when in order, else of any.
fn take(desk: &mut Desk, in_order: bool) -> Option<Rows> {
    let among = if in_order { 1 } else { usize::MAX };
    let (&number, lane) = desk.lanes.iter_mut().take(among).find(|(_, lane)| !lane.waiting.is_empty())?;
    let rows = lane.waiting.pop_front();
    if lane.ended && lane.waiting.is_empty() {
        desk.lanes.remove(&number);
    }
    rows
}
