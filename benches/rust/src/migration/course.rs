//! One worker over its course: it owes a block of records at each tick, counts what comes, and, if it leads, has bins moved.
//!
//! Open loop: a block is due when its tick comes, whatever became of those before. Workers make their load themselves.

use std::cell::RefCell;
use std::io::Write;
use std::rc::Rc;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use penstock_bins::{
    BinState, BinTable, BoxError, Config, ControlInput, Encoding, Keyed, KeyedMap, Migration, Moment, Routing, Shelf,
    Stateful, Stats, Strategy, bin, stateful,
};
use penstock_dataflow::Worker;

use super::seen::{Latencies, Span};
use crate::Numbers;
use crate::machine::memory_bytes;

/// When blocks fall due.
pub(super) const TICK: Duration = Duration::from_micros(500);
/// Ticks by which control is ahead of data, so that no block waits to be routed.
pub(super) const LEAD: u64 = 4;
/// How often memory is read.
const WATCH: Duration = Duration::from_millis(10);

pub(super) type Counts = KeyedMap<u64, u64>;
pub(super) type Bins = Vec<(u32, Box<Counts>)>;

/// Which keys there are, in which bins, and which of them half of the rows are for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Domain {
    pub(super) keys: u64,
    pub(super) bits: u8,
    /// Whether half of the rows are for the keys of a few bins that move; else all keys are alike.
    pub(super) skewed: bool,
}

/// Workers, each a thread or a process.
pub(super) const WORKERS: usize = 2;
/// Bins that half of the rows are for, in a skewed domain.
const HOT: usize = 4;

impl Domain {
    /// Where bins are at first.
    pub(super) fn home(self) -> Routing {
        Routing::new(self.bits, WORKERS).expect("few bins")
    }

    /// The routing with half the bins of worker 0 at worker 1.
    pub(super) fn moved(self) -> Routing {
        let mut turn = false;
        let owner = |owner: &u32| {
            turn ^= *owner == 0;
            if *owner == 0 && turn { 1 } else { *owner }
        };
        Routing::from_owners(self.home().owners().iter().map(owner).collect()).expect("the same workers")
    }

    /// Of the bins that move those that half of the rows are for: the last of each quarter, in the order in which they move.
    fn hot(self) -> Vec<u32> {
        let moves = self.home().moves_to(&self.moved()).expect("the same bins");
        let count = if self.skewed { HOT.min(moves.len()) } else { 0 };
        (1..=count).map(|part| moves[part * moves.len() / count - 1].bin).collect()
    }

    /// The class of each bin, as [`Seen::rows`](super::seen::Seen) has them.
    fn classes(self) -> Vec<u8> {
        let (home, moved, hot) = (self.home(), self.moved(), self.hot());
        let class = |bin: u32| match (home.owner_of(bin) == moved.owner_of(bin), hot.contains(&bin)) {
            (true, _) => 0,
            (false, true) => 1,
            (false, false) => 2,
        };
        (0..1 << self.bits).map(class).collect()
    }

    /// The keys that half of the rows are for.
    fn hot_keys(self) -> Vec<u64> {
        let hot = self.hot();
        match hot.is_empty() {
            true => Vec::new(),
            false => (0..self.keys).filter(|key| hot.contains(&bin(mixed(*key), self.bits))).collect(),
        }
    }

    /// The keys of a worker with no counts.
    pub(super) fn filled(self, worker: usize) -> Bins {
        let mut table = BinTable::fresh(&self.home(), worker as u32, &Counts::default);
        for key in 0..self.keys {
            if let Some(state) = table.get_mut(bin(mixed(key), self.bits)) {
                *state.entry(key) = 0;
            }
        }
        table.take_all()
    }
}

/// Spreads keys over all bits.
pub(super) fn mixed(key: u64) -> u64 {
    Numbers(key).next().expect("no end")
}

/// When the blocks of a tick fall due, seconds.
pub(super) fn due(tick: u64) -> f64 {
    tick as f64 * TICK.as_secs_f64()
}

pub(super) fn ticks(time: Duration) -> u64 {
    (time.as_secs_f64() / TICK.as_secs_f64()).ceil() as u64
}

/// The tick at which a run ends, as soon as its leader knows.
#[derive(Clone, Default)]
pub(super) struct End {
    tick: Arc<OnceLock<u64>>,
    /// The process that has to be told.
    other: Option<Tell>,
}

/// The way to another process.
pub(super) type Tell = Arc<Mutex<dyn Write + Send>>;

impl End {
    /// Of a run with a worker in a process that reads from here.
    pub(super) fn told_to(other: Tell) -> Self {
        Self { other: Some(other), ..Self::default() }
    }

    /// Says it to all; the first time counts.
    pub(super) fn set(&self, tick: u64) {
        if self.tick.set(tick).is_ok()
            && let Some(other) = &self.other
        {
            let mut other = other.lock().expect("nobody panics with it");
            writeln!(other, "end {tick}").and_then(|()| other.flush()).expect("the other process reads");
        }
    }

    pub(super) fn get(&self) -> Option<u64> {
        self.tick.get().copied()
    }
}

/// What a worker is to do from one tick on.
#[derive(Clone)]
pub(super) struct Course {
    pub(super) domain: Domain,
    /// Records of a block.
    pub(super) rows: usize,
    /// When the first tick of all was due, or is.
    pub(super) clock: Instant,
    pub(super) first: u64,
    /// Ticks to rest before, between and after moves.
    pub(super) rest: u64,
    /// Routings to move to, one after the other.
    pub(super) to: Vec<Routing>,
    pub(super) strategy: Strategy,
    /// Whether ticks are waited for.
    pub(super) paced: bool,
    /// How state is shipped: so many bytes under way, and whether bins are asked for that rows wait for.
    pub(super) ship_bytes: usize,
    pub(super) hot_first: bool,
    pub(super) end: End,
}

impl Course {
    /// When the clock of a run begins whose workers are ready: blocks fall due when they have started.
    pub(super) fn begins(&self) -> Instant {
        Instant::now() + Duration::from_millis(if self.paced { 100 } else { 0 })
    }
}

/// What a worker has at the end of its course.
#[derive(Debug, Default)]
pub(super) struct Driven {
    pub(super) blocks: Latencies,
    /// See [`Seen::rows`](super::seen::Seen).
    pub(super) rows: [Latencies; 3],
    pub(super) moves: Vec<Span>,
    pub(super) sent: u64,
    /// What its bins have counted in all.
    pub(super) counted: u64,
    /// The first tick that was not sent.
    pub(super) next: u64,
    pub(super) added_mib: f64,
}

/// The greatest memory of this process beyond that at the beginning.
pub(super) struct Watch {
    begin: u64,
    most: u64,
    last: Instant,
}

impl Watch {
    pub(super) fn new() -> Self {
        let begin = memory_bytes().unwrap_or(0);
        Self { begin, most: begin, last: Instant::now() }
    }

    pub(super) fn look(&mut self, now: bool) {
        if now || self.last.elapsed() >= WATCH {
            self.last = Instant::now();
            self.most = self.most.max(memory_bytes().unwrap_or(0));
        }
    }

    pub(super) fn added_mib(&self) -> f64 {
        (self.most - self.begin) as f64 / f64::from(1 << 20)
    }
}

/// The chunks of bins, of which nothing is left.
pub(super) fn encoded(bins: Bins) -> impl Iterator<Item = (u32, Vec<u8>)> {
    bins.into_iter().flat_map(|(bin, state)| {
        let mut encoding = Encoding::new();
        let next = move || Some((bin, state.encode(&mut encoding).expect("counts can be written")?));
        std::iter::from_fn(next)
    })
}

/// The bins that a routing gives a worker, of the chunks of all.
pub(super) fn decoded<'a>(
    routing: &Routing,
    worker: usize,
    chunks: impl IntoIterator<Item = (u32, std::borrow::Cow<'a, [u8]>)>,
) -> Bins {
    let mut table: BinTable<Counts> = BinTable::fresh(routing, worker as u32, &Counts::default);
    for (bin, chunk) in chunks {
        table.get_mut(bin).expect("it is the owner").absorb(&chunk).expect("what was just written");
    }
    table.take_all()
}

/// One worker over its course, from these bins on; over TCP the others are in other processes. The bins are those that it has at the end.
pub(super) fn drive(
    worker: &mut Worker,
    course: &Course,
    routing: &Routing,
    bins: Bins,
    shelf: Shelf<Counts>,
    tcp: bool,
) -> Result<(Driven, Bins), BoxError> {
    let (index, bits) = (worker.index(), routing.bits());
    let mut table = BinTable::new(bits)?;
    for (bin, state) in bins {
        table.install(bin, state)?;
    }
    let mut config = Config::in_process("count", routing.clone(), index, shelf, Arc::new(Stats::new()));
    config.table = Rc::new(RefCell::new(table));
    config.local = Rc::new(move |other| !tcp || other == index);
    (config.ship_bytes, config.hot_first) = (course.ship_bytes, course.hot_first);
    let clock = course.clock;
    let now = move || Instant::now().saturating_duration_since(clock).as_secs_f64();
    // By class of bin the ticks of which rows were counted, and when.
    let counted = Rc::new(RefCell::new(<[Vec<(u64, f64)>; 3]>::default()));
    let classes = if course.domain.skewed { course.domain.classes() } else { Vec::new() };
    let counting = Rc::clone(&counted);
    let (data, mut control, counts) = worker.dataflow::<u64, _>("count", |scope| {
        let (data, blocks) = scope.new_input::<Keyed<u64, ()>>();
        let (control, commands) = scope.new_input();
        let logic = move |moment: Moment<'_, u64, Keyed<u64, ()>, Counts, (), ()>| {
            let mut met = [false; 3];
            for (hash, key, ()) in moment.blocks.into_iter().flat_map(Keyed::into_hashed_rows) {
                let bin = bin(hash, bits);
                *moment.bins.get_mut(bin).ok_or("a bin that is not here")?.entry(key) += 1;
                if let Some(class) = classes.get(bin as usize) {
                    met[usize::from(*class)] = true;
                }
            }
            let end = if classes.is_empty() { 0.0 } else { now() };
            for (counted, _) in counting.borrow_mut().iter_mut().zip(met).filter(|(_, met)| *met) {
                counted.push((*moment.time, end));
            }
            Ok(())
        };
        let counts: Stateful<u64, Counts, ()> = stateful(&blocks, &commands, config, logic)?;
        Ok::<_, penstock_bins::BinsError>((data, ControlInput::new(control, routing.clone(), scope.peers()), counts))
    })?;
    let leads = index == 0;
    let start = course.first;
    let mut data = Some(data);
    data.iter_mut().try_for_each(|data| data.advance_to(start))?;
    match leads {
        true => control.advance_to(start + LEAD)?,
        false => control.close(),
    }
    let (hot, keys) = (course.domain.hot_keys(), course.domain.keys);
    let mut numbers = Numbers(index as u64 + 1);
    let mut key = || {
        let number = numbers.next().expect("no end");
        // The lowest bit says which half it is of.
        let of = if number & 1 == 0 { hot.len() as u64 } else { 0 };
        if of == 0 { (number >> 1) % keys } else { hot[((number >> 1) % of) as usize] }
    };
    let (mut next, mut done, mut sent, mut ends) = (start, start, 0, None);
    let (mut blocks, mut spans, mut watch) = (Vec::new(), Vec::<Span>::new(), Watch::new());
    let (mut at, mut migration, mut calm) = (routing.clone(), None::<Migration<u64>>, start + course.rest);
    let mut to = course.to.iter();
    loop {
        // What is due goes out, late or not; without a pace, a few blocks ahead.
        let mut most = 16;
        while let Some(data) = &mut data
            && ends.is_none_or(|end| next < end)
            && most > 0
            && (if course.paced { due(next) <= now() } else { next < done + 2 * LEAD })
        {
            let rows = (0..course.rows).map(|_| (key(), ())).collect();
            data.send(Keyed::new(rows, |key| mixed(*key)));
            (sent, next, most) = (sent + course.rows as u64, next + 1, most - 1);
            data.advance_to(next)?;
        }
        if leads && data.is_some() {
            let reached = next.max(done) + LEAD;
            if control.time().is_some_and(|time| *time < reached) {
                control.advance_to(reached)?;
            }
            if ends.is_some() {
                // Nothing more is begun.
            } else if let Some(moving) = &mut migration {
                if moving.observe(&counts.probe) && moving.is_done() {
                    spans.last_mut().expect("it began").end = now();
                    (migration, calm) = (None, next + course.rest);
                }
            } else if next >= calm {
                match to.next() {
                    Some(routing) => {
                        migration = Some(Migration::new(course.strategy, &at, routing)?);
                        at = routing.clone();
                        spans.push(Span { begin: now(), end: f64::INFINITY });
                    }
                    // All stop at the same tick, which the others have not reached.
                    None => course.end.set(next + 2 * ticks(Duration::from_millis(5)) + LEAD),
                }
            }
            let time = *control.time().expect("it is open");
            if let Some(commands) = migration.as_mut().and_then(|moving| moving.issue(time, 1)) {
                control.schedule(time, commands)?;
                control.advance_to(time + 1)?;
            }
        }
        if leads || tcp {
            watch.look(false);
        }
        ends = ends.or(course.end.get().map(|end| end.max(next)));
        if ends.is_some_and(|end| next >= end) && data.take().is_some() {
            control.close();
        }
        let wait = if course.paced && data.is_some() { due(next) - now() } else { 0.0 };
        let alive = match wait > 0.0 {
            true => worker.step_or_park(Some(Duration::from_secs_f64(wait)))?,
            false => worker.step()?,
        };
        while done < next && !counts.probe.less_equal(&done) {
            let end = now();
            // Without a pace nothing is due: what counts is when it ended.
            blocks.push(if course.paced { (due(done), end - due(done)) } else { (due(done), end) });
            done += 1;
        }
        if !alive && done == next && data.is_none() {
            break;
        }
    }
    let bins = counts.table.borrow_mut().take_all();
    let in_all = bins.iter().flat_map(|(_, state)| state.iter()).map(|(_, count)| count).sum();
    let rows =
        counted.take().map(|counted| counted.into_iter().map(|(tick, end)| (due(tick), end - due(tick))).collect());
    let added_mib = watch.added_mib();
    Ok((Driven { blocks, rows, moves: spans, sent, counted: in_all, next, added_mib }, bins))
}
