//! The native state of one bin under a join: the rows of both sides by key.
//!
//! A row is known by its side, its key, its time (0 where the join has no interval) and a number that tells rows of one time apart, in the
//! order in which they came. The rows of a key and side stand in that order ([`Sorted`]), so what an interval holds is one stretch, and what is over
//! goes from the front; one that comes in the middle moves few others, however many there are. Bytes of rows and names of keys lie in an [`Arena`]; a
//! key has no allocation of its own before a second row of a side comes.
//!
//! Where left rows say until when they are valid, the bytes of each begin with the last time at which one can meet it; their ends are in no order.
//! Where a right row meets at most one left row, right rows that have met are not kept. Those that have met none, and go with the watermark, stand
//! in no index ([`Waiting`]) before a left row comes that may meet them, or an epoch is marked: so those of an epoch that nobody asks for leave no
//! trace in the log.
//!
//! Undo: while marked, a log has what undoes what happens, applied from its end. What has changed are the rows that it names: those that are
//! there are told as they are, the others as gone. It costs what happened, however many rows a key has.
//!
//! Invariants: rows of a key and side ascend by time and number; a key has rows, or the log names it; while marked keys stay where they are;
//! each key with rows that can be over has an entry in `due` at or before the first of them; the bytes of a row that the log brings back are
//! not dropped; rows that wait have come since the mark, and their numbers are below `next`, as are those of all right rows.

use std::collections::HashMap;
use std::ops::Range;

use hashbrown::HashTable;
use penstock_bins::{Encoding, Extent};
use penstock_files::{Chunk, ChunkWriter, Entry};

use super::arena::Arena;
use super::ends::Ends;
use super::waiting::{Waiting, Waits};
use crate::common::{Common, Lease, Lent, Shared};
use crate::error::StateFault;
use crate::panes::CHUNK_BYTES;
use crate::room::spare;
use crate::sorted::Sorted;
use crate::spec::JoinHow;
use crate::state::State;
use crate::wire::{Reader, put_blob, put_i64};

const TAG: u8 = b'J';
const VERSION: u8 = 1;
/// Of the entries.
const ENTRIES_VERSION: u8 = 1;
/// Entries for which the log keeps its memory, and rows that go.
const LOG_KEPT: usize = 1 << 10;
/// Entries of `due` that are not worth being looked through.
const LEAST_DUE: usize = 64;
/// Where more rows wait on behind a watermark they get an index.
const WAIT_ON: usize = if cfg!(test) { 4 } else { 256 };
/// Rows of a side of a key that lie side by side; of more, one that comes or goes moves so many at most.
const MANY: usize = if cfg!(test) { 4 } else { 256 };

/// What a join does with rows, as its state needs to know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rules {
    pub(crate) how: JoinHow,
    /// With an interval: how long after its time a row of each side can still meet one, in microseconds.
    pub(crate) hold: Option<[i64; 2]>,
    /// Whether left rows say themselves when they are over.
    pub(crate) until: bool,
    /// Whether a right row meets at most one left row.
    pub(crate) once: bool,
}

impl Rules {
    /// `within` are the least and the greatest time of a right row behind that of the left one.
    pub(crate) fn new(how: JoinHow, within: Option<(i64, i64)>) -> Self {
        Self { how, hold: within.map(|(lower, upper)| [upper, -lower]), until: false, once: false }
    }

    /// Whether what is written of a row has its time and whether it has met one.
    fn marks(self) -> bool {
        self.hold.is_some() || self.once
    }

    /// Whether a row of a side comes out that has met none.
    pub(crate) fn keeps(self, side: usize) -> bool {
        match self.how {
            JoinHow::Inner | JoinHow::Semi => false,
            JoinHow::Left | JoinHow::Anti => side == 0,
            JoinHow::Right => side == 1,
            JoinHow::Full => true,
        }
    }

    fn filters(self) -> bool {
        self.how.is_filter()
    }

    /// Whether a row says itself whether it has met one. Without an interval those of its key say it.
    fn flags(self, side: usize) -> bool {
        self.marks() && self.keeps(side) && !self.filters()
    }

    /// Whether rows go but by undo.
    fn drops(self) -> bool {
        self.marks() || self.filters()
    }

    /// Whether a right row that has met none can do without an index at first.
    fn waits(self) -> bool {
        self.once && self.hold.is_some()
    }

    /// When a row that does not say it itself is over: when the watermark is behind this.
    fn end(self, side: usize, time: i64) -> i64 {
        self.hold.map_or(i64::MAX, |hold| time.saturating_add(hold[side]))
    }
}

/// A row that is kept.
#[derive(Clone, Copy)]
struct Row {
    time: i64,
    /// When it is over: when the watermark is behind this.
    end: i64,
    number: u32,
    /// The mark at which it was last logged, whether it was born then, and whether it has met one.
    logged: u32,
    /// Where its bytes are.
    at: u64,
}

const MET: u32 = 1;
const BORN: u32 = 2;
const MARK: u32 = 4;

impl Row {
    fn id(&self) -> (i64, u32) {
        (self.time, self.number)
    }

    fn met(&self) -> bool {
        self.logged & MET > 0
    }
}

/// The rows of a side of a key, by time and number.
type Rows = Sorted<Row, MANY>;

/// Where a row of a time goes that comes behind all others of it.
#[inline]
fn behind(rows: &Rows, time: i64) -> usize {
    match rows.last() {
        Some(last) if last.time > time => rows.partition_point(|row| row.time <= time),
        _ => rows.end(),
    }
}

/// What undoes a change of a row.
#[derive(Clone, Copy)]
enum Was {
    /// It was not there.
    Absent,
    /// It had met none.
    Unmet,
    /// It was there.
    There { met: bool, at: u64 },
    /// It has moved here, or its end has, since the mark: it stays so.
    Stays,
}

struct Logged {
    key: u32,
    side: u8,
    time: i64,
    number: u32,
    was: Was,
}

/// A row that the log names: its key, side, time and number, and whether it is told as gone if it is not there.
type Changed = (u32, u8, i64, u32, bool);

struct Key {
    hash: u64,
    /// Where its name is.
    name: u64,
    /// When it stands in `due` next.
    due: i64,
    rows: [Rows; 2],
}

impl Key {
    fn is_empty(&self) -> bool {
        self.rows.iter().all(|rows| rows.is_empty())
    }

    fn find(&self, side: usize, id: (i64, u32)) -> Result<usize, usize> {
        self.rows[side].search(|row| row.id().cmp(&id))
    }

    fn has(&self, side: usize, time: i64) -> bool {
        self.rows[side].search(|row| row.time.cmp(&time)).is_ok()
    }
}

/// See the module.
pub(crate) struct Sides {
    shape: u64,
    rules: Rules,
    /// By hash, with the hash, where each key is.
    index: HashTable<(u64, u32)>,
    keys: Vec<Key>,
    arena: Arena,
    /// Of all keys, without those that wait.
    rows: usize,
    /// Right rows that have met none.
    waiting: Box<Waiting>,
    /// The number of the next one.
    next: u32,
    /// Keys, by their hashes, of which rows may be over when the watermark is behind this.
    due: Ends,
    /// Whether changes are told apart and can be undone.
    marked: bool,
    /// Changes with each mark and undo, by [`MARK`]: rows carry it.
    mark: u32,
    log: Vec<Logged>,
    /// Rows that go.
    gone: Vec<Row>,
    /// In place of all rows while they are elsewhere. There is no undo then.
    lent: Option<Lease<Self>>,
}

/// How far an encoding is: the key, side and row that the next chunk begins with; of what has changed how many are told.
#[derive(Default)]
struct Place {
    same: Option<(usize, usize, usize)>,
    begun: bool,
    changed: Option<Vec<Changed>>,
    told: usize,
    /// The first of the rows that wait.
    waiting: usize,
}

/// What becomes of a row that came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Own {
    /// It was told with those that it met, if any.
    Told,
    /// It comes out by itself, once.
    Alone,
    /// A left row of which there is one already, where a right row meets at most one.
    Twice,
}

/// The last time at which a row that begins with it can be met.
fn last_of(row: &[u8]) -> i64 {
    i64::from_le_bytes(*row.first_chunk().expect("a row begins with its end"))
}

/// Bytes of that time.
const LAST: usize = size_of::<i64>();

impl Sides {
    pub(crate) fn new(shape: u64, rules: Rules) -> Self {
        Self {
            shape,
            rules,
            index: HashTable::new(),
            keys: Vec::new(),
            arena: Arena::default(),
            rows: 0,
            waiting: Box::default(),
            next: 0,
            due: Ends::default(),
            marked: false,
            mark: MARK,
            log: Vec::new(),
            gone: Vec::new(),
            lent: None,
        }
    }

    #[cfg(test)]
    pub(super) fn is_lent(&self) -> bool {
        self.lent.is_some()
    }

    /// Takes lent rows back.
    #[inline]
    pub(crate) fn home(&mut self) {
        if let Some(lease) = self.lent.take() {
            *self = lease.end();
        }
    }

    /// Takes a copy of the rows of a key of another state, none of which is logged.
    fn copy_key(&mut self, other: &Self, key: &Key) {
        let at = self.place(key.hash, other.arena.get(key.name));
        for (side, rows) in key.rows.iter().enumerate() {
            for row in rows.iter() {
                let bytes = self.arena.put(other.arena.get(row.at));
                self.put(at, side, row.id(), u32::from(row.met()), bytes);
            }
        }
    }

    fn copy_waiting(&mut self, waits: Waits<'_>) {
        self.next = self.next.max(waits.number + 1);
        self.waiting.push(waits);
    }

    /// Where a key is kept: until one goes, which no row that comes makes one do.
    #[inline]
    pub(crate) fn find(&self, hash: u64, name: &[u8]) -> Option<u32> {
        let is_named = |at: u32| {
            let key = &self.keys[at as usize];
            if name.is_empty() { key.name == Arena::NOTHING } else { self.arena.get(key.name) == name }
        };
        self.index.find(hash, |&(of, at)| of == hash && is_named(at)).map(|found| found.1)
    }

    /// Reads what is read when a row of this key comes. Of many keys these reads are under way at once.
    #[inline]
    pub(crate) fn touch(&self, at: u32, side: usize) -> u32 {
        let key = &self.keys[at as usize];
        let own = key.rows[side].last().map_or(0, |row| row.number);
        let other = key.rows[1 - side].first().and_then(|row| self.arena.get(row.at).first());
        own.wrapping_add(other.copied().unwrap_or_default().into())
    }

    /// Where a key is kept; a new one is made.
    fn place(&mut self, hash: u64, name: &[u8]) -> usize {
        if let Some(at) = self.find(hash, name) {
            return at as usize;
        }
        let at = u32::try_from(self.keys.len()).expect("a bin has less than 2^32 keys");
        let name = self.arena.put(name);
        self.keys.push(Key { hash, name, due: i64::MAX, rows: Default::default() });
        self.index.insert_unique(hash, (hash, at), |(hash, _)| *hash);
        at as usize
    }

    /// Notes what undoes a change, if it can be undone.
    fn log(&mut self, at: usize, side: usize, (time, number): (i64, u32), was: Was) {
        if self.marked {
            self.log.push(Logged { key: at as u32, side: side as u8, time, number, was });
        }
    }

    /// The rows that the log names, each once, by key.
    fn changed(&self) -> Vec<Changed> {
        let id = |l: &Logged| (l.key, l.side, l.time, l.number, matches!(l.was, Was::Absent));
        let mut ids: Vec<_> = self.log.iter().map(id).collect();
        // Of one row what is no birth comes first.
        ids.sort_unstable();
        ids.dedup_by_key(|id| (id.0, id.1, id.2, id.3));
        ids.iter_mut().for_each(|(.., born)| *born = !*born);
        ids
    }

    /// Whether what undoes all that happens to a row of this mark is logged, but its going.
    fn is_logged(&self, row: &Row) -> bool {
        self.marked && row.logged & !(MET | BORN) == self.mark
    }

    /// Has a key looked at when its first row is over.
    fn schedule(&mut self, at: usize, end: i64) {
        let key = &mut self.keys[at];
        if end < key.due {
            key.due = end;
            self.due.push(end, key.hash);
        }
        // Each row of a key that ends before one that stays leaves an entry of that one's behind.
        if self.due.len() > 2 * self.keys.len() + LEAST_DUE {
            self.due = Ends::default();
            for key in self.keys.iter().filter(|key| key.due != i64::MAX) {
                self.due.push(key.due, key.hash);
            }
        }
    }

    /// A row comes, of a key that was [found](Self::find) if it was there: `meets` gets those of the other side that come out with it (of a semi-join those that come out now), and where
    /// they are kept unless they go now. Then it is kept, if one that comes can meet it.
    pub(crate) fn add(
        &mut self,
        side: usize,
        (hash, name, found): (u64, &[u8], Option<u32>),
        (time, last): (i64, Option<i64>),
        row: &[u8],
        mut meets: impl FnMut(Option<u64>, &[u8]),
    ) -> Own {
        let (rules, other) = (self.rules, 1 - side);
        if side == 0 {
            self.wake(hash);
        }
        if rules.filters() && side == 0 {
            // Kept while it has met none.
            let at = found.or_else(|| self.find(hash, name));
            let met = at.is_some_and(|at| !self.within(at as usize, side, (time, last)).is_empty());
            match (met, rules.how) {
                (true, JoinHow::Semi) => return Own::Alone,
                (true, _) => return Own::Told,
                (false, _) => {}
            }
        }
        let at = found.map_or_else(|| self.place(hash, name), |at| at as usize);
        let mut met = false;
        if rules.filters() && side == 1 {
            let found = self.within(at, side, (time, last));
            let mut gone = match rules.until {
                true => self.take_those(at, other, found, |row| row.end >= time),
                false => self.take(at, other, found),
            };
            for row in gone.drain(..) {
                if rules.how == JoinHow::Semi {
                    meets(None, self.bytes_of(other, &row));
                }
                self.leave(at, other, row);
            }
            self.gone = gone;
            // One of a time is as good as many.
            if self.keys[at].has(side, time) {
                return Own::Told;
            }
        } else {
            if rules.once && side == 0 && self.is_there(at, (time, last)) {
                return Own::Twice;
            }
            met = self.meet(at, side, (time, last), meets);
            if rules.once && side == 1 && met {
                return Own::Told;
            }
        }
        let rows = &self.keys[at].rows[side];
        let place = behind(rows, time);
        let before = rows.before(place).filter(|last| last.time == time);
        let number =
            before.map_or(0, |last| last.number.checked_add(1).expect("less than 2^32 rows of a key and time"));
        let logged = self.mark | BORN | if met && rules.flags(side) { MET } else { 0 };
        self.log(at, side, (time, number), Was::Absent);
        let row = match last {
            Some(last) => self.arena.put_behind(&last.to_le_bytes(), row),
            None => self.arena.put(row),
        };
        let end = last.unwrap_or(rules.end(side, time));
        self.keys[at].rows[side].insert(place, Row { time, end, number, logged, at: row });
        self.rows += 1;
        self.schedule(at, end);
        Own::Told
    }

    /// A right row that has met none is kept, where one meets at most one left row.
    pub(crate) fn wait(&mut self, (hash, name): (u64, &[u8]), time: i64, row: &[u8]) {
        if self.rules.waits() && self.next < u32::MAX {
            self.waiting.push(Waits { hash, name, time, number: self.next, row });
            self.next += 1;
        } else {
            self.place_waiting();
            self.add(1, (hash, name, None), (time, None), row, |_, _| {});
        }
    }

    /// A left row comes: those that wait for its key get an index.
    #[inline]
    fn wake(&mut self, hash: u64) {
        if self.waiting.has(hash) {
            self.with_waiting(|this, waiting| waiting.take(hash, |waits| this.place_one(waits)));
        }
    }

    /// Puts all rows that wait among the others.
    fn place_waiting(&mut self) {
        self.with_waiting(|this, waiting| {
            waiting.iter(0).for_each(|(_, waits)| this.place_one(waits));
            waiting.clear();
        });
    }

    fn with_waiting(&mut self, does: impl FnOnce(&mut Self, &mut Waiting)) {
        let mut waiting = std::mem::take(&mut self.waiting);
        does(self, &mut waiting);
        self.waiting = waiting;
    }

    fn place_one(&mut self, waits: Waits<'_>) {
        let at = self.place(waits.hash, waits.name);
        self.log(at, 1, (waits.time, waits.number), Was::Absent);
        let bytes = self.arena.put(waits.row);
        self.put(at, 1, (waits.time, waits.number), self.mark | BORN, bytes);
    }

    /// A row comes that meets those of the other side, if there are any, and is not kept yet.
    fn meet(
        &mut self,
        at: usize,
        side: usize,
        (time, last): (i64, Option<i64>),
        mut meets: impl FnMut(Option<u64>, &[u8]),
    ) -> bool {
        let (rules, other) = (self.rules, 1 - side);
        let mut found = self.within(at, side, (time, last));
        if rules.once && side == 0 {
            let mut gone = self.take(at, other, found);
            let met = !gone.is_empty();
            for row in gone.drain(..) {
                meets(None, self.bytes_of(other, &row));
                self.leave(at, other, row);
            }
            self.gone = gone;
            return met;
        }
        let mut met = false;
        while let Some(run) = self.keys[at].rows[other].run(&mut found) {
            for place in run {
                let row = self.keys[at].rows[other][place];
                if rules.until && side == 1 && row.end < time {
                    continue;
                }
                met = true;
                meets(Some(row.at), self.bytes_of(other, &row));
                if rules.flags(other) && !row.met() {
                    self.note_met(at, other, place);
                }
            }
        }
        met
    }

    /// Where the left row is kept that a right row meets, of those of a key, where it meets at most one.
    #[inline]
    pub(crate) fn meet_one(&mut self, at: u32, time: i64) -> Option<u64> {
        let found = self.within(at as usize, 1, (time, None));
        let rows = &self.keys[at as usize].rows[0];
        let place = match self.rules.until {
            // Those that are not empty are apart: if any, it is the one that began last.
            true => rows.rfind(found, |row| row.time <= row.end)?,
            false => Some(found.start).filter(|_| !found.is_empty())?,
        };
        let row = rows[place];
        if self.rules.until && row.end < time {
            return None;
        }
        if self.rules.flags(0) && !row.met() {
            self.note_met(at as usize, 0, place);
        }
        Some(row.at)
    }

    /// The columns of a row of a side, from where it is kept.
    #[inline]
    pub(crate) fn row_at(&self, side: usize, place: u64) -> &[u8] {
        let bytes = self.arena.get(place);
        if self.rules.until && side == 0 { &bytes[LAST..] } else { bytes }
    }

    /// A row that says itself whether it has met one has.
    fn note_met(&mut self, at: usize, side: usize, place: usize) {
        let row = self.keys[at].rows[side][place];
        if !self.is_logged(&row) {
            self.log(at, side, row.id(), Was::Unmet);
            self.keys[at].rows[side][place].logged = self.mark;
        }
        self.keys[at].rows[side][place].logged |= MET;
    }

    /// Whether a left row is there that one could meet which meets another of these times.
    fn is_there(&self, at: usize, (time, last): (i64, Option<i64>)) -> bool {
        let rows = &self.keys[at].rows[0];
        let Some(last) = last else {
            // Windows of one start have ends of their own where a zone leaves a day out.
            return if self.rules.hold.is_some() { self.keys[at].has(0, time) } else { !rows.is_empty() };
        };
        // Those that are not empty are apart, so of those that begin before this one ends the last also ends last.
        let begun = 0..rows.partition_point(|row| row.time <= last);
        time <= last && rows.rfind(begun, |row| row.time <= row.end).is_some_and(|place| time <= rows[place].end)
    }

    /// The columns of a row.
    #[inline]
    fn bytes_of(&self, side: usize, row: &Row) -> &[u8] {
        self.row_at(side, row.at)
    }

    /// Where the rows of the other side are that one of this side meets; of left rows that say when they are over, those that have begun.
    #[inline]
    fn within(&self, at: usize, side: usize, (time, last): (i64, Option<i64>)) -> Range<usize> {
        let rows = &self.keys[at].rows[1 - side];
        let Some(hold) = self.rules.hold else { return 0..rows.end() };
        let first = time.saturating_sub(hold[1 - side]);
        let last = last.unwrap_or(time.saturating_add(hold[side]));
        if let Some(only) = rows.only() {
            return 0..usize::from((first..=last).contains(&only.time));
        }
        let begin = rows.partition_point(|row| row.time < first);
        begin..rows.partition_point_from(begin, |row| row.time <= last)
    }

    /// Takes rows away; each is to [leave](Self::leave).
    fn take(&mut self, at: usize, side: usize, range: Range<usize>) -> Vec<Row> {
        let mut gone = std::mem::take(&mut self.gone);
        gone.clear();
        self.keys[at].rows[side].cut(range, |row| gone.push(row));
        self.rows -= gone.len();
        gone
    }

    /// Takes those away of which something holds.
    fn take_those(&mut self, at: usize, side: usize, range: Range<usize>, goes: impl Fn(&Row) -> bool) -> Vec<Row> {
        let mut gone = std::mem::take(&mut self.gone);
        gone.clear();
        self.keys[at].rows[side].cut_those(range, goes, |row| gone.push(row));
        self.rows -= gone.len();
        gone
    }

    /// A row was taken away.
    fn leave(&mut self, at: usize, side: usize, row: Row) {
        // One that was born since the mark leaves no trace but its birth.
        if !self.marked || (self.is_logged(&row) && row.logged & BORN > 0) {
            self.arena.drop(row.at);
        } else {
            self.log(at, side, row.id(), Was::There { met: row.met(), at: row.at });
        }
    }

    /// Takes a row away for good.
    fn remove(&mut self, at: usize, side: usize, place: usize) {
        let row = self.keys[at].rows[side].remove(place);
        self.arena.drop(row.at);
        self.rows -= 1;
    }

    /// Puts a row where it belongs, whose bytes are in the arena. Says whether there was one.
    fn put(&mut self, key: usize, side: usize, (time, number): (i64, u32), logged: u32, at: u64) -> bool {
        let end = match self.rules.until && side == 0 {
            true => last_of(self.arena.get(at)),
            false => self.rules.end(side, time),
        };
        if side == 1 {
            self.next = self.next.max(number.saturating_add(1));
        }
        let row = Row { time, end, number, logged, at };
        let replaced = match self.keys[key].find(side, row.id()) {
            Ok(place) => {
                let before = std::mem::replace(&mut self.keys[key].rows[side][place], row);
                self.arena.drop(before.at);
                true
            }
            Err(place) => {
                self.keys[key].rows[side].insert(place, row);
                self.rows += 1;
                false
            }
        };
        self.schedule(key, end);
        replaced
    }

    fn drop_key(&mut self, at: usize) {
        let hash = self.keys[at].hash;
        if let Ok(entry) = self.index.find_entry(hash, |(_, other)| *other == at as u32) {
            entry.remove();
        }
        let key = self.keys.swap_remove(at);
        self.arena.drop(key.name);
        if let Some(moved) = self.keys.get(at) {
            let last = self.keys.len() as u32;
            if let Some(entry) = self.index.find_mut(moved.hash, |(_, other)| *other == last) {
                entry.1 = at as u32;
            }
        }
    }

    /// Behind which watermark [`fire`](Self::fire) has something to do; none while nothing can be over.
    pub(crate) fn next_due(&self) -> Option<i64> {
        let waits = self.waiting.times().map(|(least, _)| self.rules.end(1, least));
        self.due.first().into_iter().chain(waits).min()
    }

    /// Drops the rows that can meet none any more; those that come out by that are given to `alone`. Gives up after a key with which `alone` has
    /// had enough, and then says false: come again.
    pub(crate) fn fire<E>(
        &mut self,
        watermark: i64,
        mut alone: impl FnMut(usize, &[u8]) -> Result<bool, E>,
    ) -> Result<bool, E> {
        if !self.stop_waiting(watermark, &mut alone)? {
            return Ok(false);
        }
        let mut same = Vec::<u32>::new();
        while let Some(hash) = self.due.pop_before(watermark) {
            let mut enough = false;
            // Keys of one hash: nearly always one.
            let is_due = |&&(of, at): &&(u64, u32)| of == hash && self.keys[at as usize].due < watermark;
            same.extend(self.index.iter_hash(hash).filter(is_due).map(|found| found.1));
            same.sort_unstable();
            for at in same.drain(..).rev().map(|at| at as usize) {
                self.keys[at].due = i64::MAX;
                for side in [0, 1] {
                    let rules = self.rules;
                    let rows = &self.keys[at].rows[side];
                    let mut gone = if rules.until && side == 0 {
                        let all = 0..rows.end();
                        self.take_those(at, side, all, |row| row.end < watermark)
                    } else {
                        let over = rows.partition_point(|row| row.end < watermark);
                        self.take(at, side, 0..over)
                    };
                    for row in gone.drain(..) {
                        if rules.keeps(side) && !row.met() {
                            enough |= alone(side, self.bytes_of(side, &row))?;
                        }
                        self.leave(at, side, row);
                    }
                    self.gone = gone;
                    let left = &self.keys[at].rows[side];
                    let next = match rules.until && side == 0 {
                        true => left.iter().map(|row| row.end).min(),
                        false => left.first().map(|row| row.end),
                    };
                    if let Some(end) = next {
                        self.schedule(at, end);
                    }
                }
                if self.keys[at].is_empty() && !self.marked {
                    self.drop_key(at);
                }
            }
            if enough {
                return Ok(false);
            }
        }
        self.tidy();
        Ok(true)
    }

    /// As [`fire`](Self::fire), of the rows that wait: they have come since the mark, so that none was there leaves no trace.
    fn stop_waiting<E>(
        &mut self,
        watermark: i64,
        alone: &mut impl FnMut(usize, &[u8]) -> Result<bool, E>,
    ) -> Result<bool, E> {
        let (rules, mut enough) = (self.rules, false);
        match self.waiting.times() {
            Some((least, _)) if rules.end(1, least) < watermark => {}
            _ => return Ok(true),
        }
        if !rules.keeps(1) && self.waiting.times().is_some_and(|(_, most)| rules.end(1, most) < watermark) {
            self.waiting.clear();
            return Ok(true);
        }
        self.waiting.retain(|waits| {
            if enough || rules.end(1, waits.time) >= watermark {
                return Ok(true);
            }
            if rules.keeps(1) {
                enough = alone(1, waits.row)?;
            }
            Ok(false)
        })?;
        if !enough && self.waiting.len() > WAIT_ON {
            self.place_waiting();
        }
        Ok(!enough)
    }

    /// The rows that have met none, of a join without an interval, by the number of their key from `key` on: at the end of input. Gives up as
    /// [`fire`](Self::fire) does, and says where to go on.
    pub(crate) fn unmet<E>(
        &self,
        mut key: usize,
        mut alone: impl FnMut(usize, &[u8]) -> Result<bool, E>,
    ) -> Result<Option<usize>, E> {
        let kept = [0, 1].map(|side| self.rules.keeps(side));
        if kept == [false; 2] {
            return Ok(None);
        }
        while let Some(at) = self.keys.get(key) {
            key += 1;
            let mut enough = false;
            for side in [0, 1] {
                // One that met is known by the others, or says it itself.
                let flags = self.rules.flags(side);
                if kept[side] && (flags || self.rules.filters() || at.rows[1 - side].is_empty()) {
                    for row in at.rows[side].iter().filter(|row| !flags || !row.met()) {
                        enough |= alone(side, self.bytes_of(side, row))?;
                    }
                }
            }
            if enough {
                return Ok(Some(key));
            }
        }
        Ok(None)
    }

    /// The next chunk; none after the last.
    pub(crate) fn encode(&self, encoding: &mut Encoding) -> Option<Vec<u8>> {
        if let Some(lease) = &self.lent {
            return lease.shown(|share| share.encode(encoding));
        }
        let extent = encoding.extent();
        let place = encoding.place(Place::default);
        match (extent, self.marked) {
            (Extent::All, _) => self.encode_rows(place, false),
            (Extent::Marked, true) => self.encode_rows(place, true).or_else(|| self.encode_changes(place, false)),
            // Never marked: all has changed.
            (Extent::Marked, false) | (Extent::Changed, _) => self.encode_changes(place, !self.marked),
            (Extent::Anew, _) => self.encode_changes(place, true),
        }
    }

    /// The next chunk of rows, without those that have changed if they are told apart.
    fn encode_rows(&self, place: &mut Place, apart: bool) -> Option<Vec<u8>> {
        let (mut key, mut side, mut from) = match (place.begun, place.same.take()) {
            (true, None) => return None,
            (_, next) => next.unwrap_or_default(),
        };
        place.begun = true;
        let mut out = vec![TAG, VERSION];
        put_i64(&mut out, self.shape as i64);
        let empty = out.len();
        let put =
            |out: &mut Vec<u8>, (hash, name): (u64, &[u8]), side: usize, (time, number): (i64, u32), (met, row)| {
                put_i64(out, hash as i64);
                out.push(side as u8);
                if self.rules.marks() {
                    put_i64(out, time);
                    out.push(u8::from(met));
                }
                put_i64(out, number.into());
                put_blob(out, name);
                put_blob(out, row);
            };
        while let Some(kept) = self.keys.get(key) {
            let told = |row: &Row| !apart || !self.is_logged(row);
            let name = self.arena.get(kept.name);
            for (at, row) in kept.rows[side].iter_from(from).filter(|(_, row)| told(row)) {
                let bytes = self.arena.get(row.at);
                if out.len() > empty && out.len() + 48 + name.len() + bytes.len() > CHUNK_BYTES {
                    place.same = Some((key, side, at));
                    return Some(out);
                }
                put(&mut out, (kept.hash, name), side, row.id(), (row.met(), bytes));
            }
            (key, side, from) = if side == 0 { (key, 1, 0) } else { (key + 1, 0, 0) };
        }
        // They have come since the mark.
        for (at, waits) in self.waiting.iter(place.waiting).filter(|_| !apart) {
            if out.len() > empty && out.len() + 48 + waits.name.len() + waits.row.len() > CHUNK_BYTES {
                place.same = Some((key, 0, 0));
                return Some(out);
            }
            place.waiting = at + 1;
            put(&mut out, (waits.hash, waits.name), 1, (waits.time, waits.number), (false, waits.row));
        }
        (out.len() > empty).then_some(out)
    }

    fn entries_shape(&self) -> Vec<u8> {
        let mut shape = vec![TAG, ENTRIES_VERSION];
        put_i64(&mut shape, self.shape as i64);
        shape
    }

    /// The next chunk of entries: a key is a side, the time and number of a row and the name of its key, a value the row, of one with a time
    /// behind whether it has met one. Of all rows, or of those that have changed.
    fn encode_changes(&self, place: &mut Place, all: bool) -> Option<Vec<u8>> {
        let mut writer = ChunkWriter::new(&self.entries_shape());
        let (mut name, mut value) = (Vec::new(), Vec::new());
        let mut put = |writer: &mut ChunkWriter,
                       (hash, of): (u64, &[u8]),
                       side: usize,
                       id: (i64, u32),
                       row: Option<(bool, &[u8])>| {
            name.clear();
            name.push(side as u8);
            if self.rules.marks() {
                name.extend_from_slice(&(id.0 as u64 ^ 1 << 63).to_be_bytes());
            }
            name.extend_from_slice(&u64::from(id.1).to_be_bytes());
            name.extend_from_slice(of);
            let Some((met, row)) = row else {
                return writer.push(Entry::Gone { hash, key: &name });
            };
            value.clear();
            if self.rules.marks() {
                value.push(u8::from(met));
            }
            value.extend_from_slice(row);
            writer.push(Entry::Put { hash, key: &name, value: &value });
        };
        let of = |key: &Key| (key.hash, self.arena.get(key.name));
        let told = |row: &Row| Some((row.met(), self.arena.get(row.at)));
        if !all {
            let changed = place.changed.get_or_insert_with(|| self.changed());
            for &(key, side, time, number, gone) in &changed[place.told..] {
                if writer.len() >= CHUNK_BYTES {
                    return Some(writer.finish());
                }
                place.told += 1;
                let (kept, side, id) = (&self.keys[key as usize], usize::from(side), (time, number));
                match kept.find(side, id) {
                    Ok(at) => put(&mut writer, of(kept), side, id, told(&kept.rows[side][at])),
                    Err(_) if gone => put(&mut writer, of(kept), side, id, None),
                    Err(_) => {}
                }
            }
        } else {
            let (mut key, mut side, mut from) = place.same.unwrap_or_default();
            while let Some(kept) = self.keys.get(key) {
                for (at, row) in kept.rows[side].iter_from(from) {
                    if writer.len() >= CHUNK_BYTES {
                        place.same = Some((key, side, at));
                        return Some(writer.finish());
                    }
                    put(&mut writer, of(kept), side, row.id(), told(row));
                }
                (key, side, from) = if side == 0 { (key, 1, 0) } else { (key + 1, 0, 0) };
            }
            place.same = Some((key, 0, 0));
        }
        for (at, waits) in self.waiting.iter(place.waiting) {
            if writer.len() >= CHUNK_BYTES {
                return Some(writer.finish());
            }
            place.waiting = at + 1;
            put(&mut writer, (waits.hash, waits.name), 1, (waits.time, waits.number), Some((false, waits.row)));
        }
        (!writer.is_empty()).then(|| writer.finish())
    }

    /// Takes one chunk of rows that have not changed.
    pub(crate) fn absorb(&mut self, chunk: &[u8]) -> Result<(), StateFault> {
        let mut reader = Reader::new(chunk);
        if reader.u8()? != TAG {
            return Err(StateFault::Shape { what: "not the state of a join" });
        }
        let version = reader.u8()?;
        if version != VERSION {
            return Err(StateFault::Version { found: version, supported: VERSION });
        }
        if reader.i64()? != self.shape as i64 {
            return Err(StateFault::Shape { what: "the joined rows" });
        }
        let mut rows = Vec::new();
        while !reader.is_empty() {
            let (hash, side) = (reader.i64()? as u64, side_of(reader.u8()?)?);
            let (time, met) = match self.rules.marks() {
                true => (reader.i64()?, met_of(reader.u8()?)?),
                false => (0, 0),
            };
            let number = number_of(reader.i64()? as u64)?;
            let name = reader.blob()?;
            let bytes = self.checked(side, reader.blob()?)?;
            rows.push((hash, name, side, (time, number), met, bytes));
        }
        for (hash, name, side, id, met, bytes) in rows {
            let at = self.place(hash, name);
            let bytes = self.arena.put(bytes);
            if self.put(at, side, id, met, bytes) {
                return Err(StateFault::Corrupt { what: "a row came twice" });
            }
        }
        Ok(())
    }

    /// The bytes of a row, if they begin as they should.
    fn checked<'a>(&self, side: usize, bytes: &'a [u8]) -> Result<&'a [u8], StateFault> {
        match self.rules.until && side == 0 && bytes.len() < LAST {
            true => Err(StateFault::Corrupt { what: "a row without its end" }),
            false => Ok(bytes),
        }
    }

    /// Takes one chunk of entries.
    pub(crate) fn absorb_changes(&mut self, chunk: &[u8]) -> Result<(), StateFault> {
        let chunk = Chunk::parse(chunk)?;
        if *chunk.shape() != *self.entries_shape() {
            return Err(match chunk.shape() {
                [TAG, found, ..] if *found > ENTRIES_VERSION => {
                    StateFault::Version { found: *found, supported: ENTRIES_VERSION }
                }
                [TAG, ..] => StateFault::Shape { what: "the joined rows" },
                _ => StateFault::Shape { what: "not the state of a join" },
            });
        }
        let mut rows = Vec::new();
        for entry in chunk.entries() {
            let (hash, key, value) = match entry? {
                Entry::Put { hash, key, value } => (hash, key, Some(value)),
                Entry::Gone { hash, key } if self.rules.drops() => (hash, key, None),
                _ => return Err(StateFault::Corrupt { what: "an entry that a join does not make" }),
            };
            let mut reader = Reader::new(key);
            let side = side_of(reader.u8()?)?;
            let time = match self.rules.marks() {
                true => (u64::from_be_bytes(reader.array()?) ^ 1 << 63) as i64,
                false => 0,
            };
            let id = (time, number_of(u64::from_be_bytes(reader.array()?))?);
            let row = match (value, self.rules.marks()) {
                (None, _) => None,
                (Some(value), false) => Some((0, value)),
                (Some(value), true) => {
                    let (met, bytes) = value.split_first().ok_or(StateFault::Corrupt { what: "a row is cut off" })?;
                    Some((met_of(*met)?, self.checked(side, bytes)?))
                }
            };
            rows.push((hash, side, id, reader.rest(), row));
        }
        for (hash, side, id, name, row) in rows {
            if row.is_none() && !self.marked && self.find(hash, name).is_none() {
                continue;
            }
            let at = self.place(hash, name);
            // Undone, it stays.
            self.log(at, side, id, Was::Stays);
            match row {
                Some((met, bytes)) => {
                    let logged = if self.marked { self.mark | met } else { met };
                    let bytes = self.arena.put(bytes);
                    self.put(at, side, id, logged, bytes);
                }
                None => {
                    if let Ok(place) = self.keys[at].find(side, id) {
                        self.remove(at, side, place);
                    }
                    if self.keys[at].is_empty() && !self.marked {
                        self.drop_key(at);
                    }
                }
            }
        }
        self.tidy();
        Ok(())
    }

    pub(crate) fn bytes(&self) -> usize {
        if let Some(lease) = &self.lent {
            return lease.bytes();
        }
        let rows = (self.rows + self.gone.capacity()) * size_of::<Row>() + self.arena.bytes();
        let keys = self.keys.capacity() * size_of::<Key>() + self.index.allocation_size() + self.due.bytes();
        rows + keys + self.waiting.bytes() + self.log.capacity() * size_of::<Logged>()
    }

    /// Writes the bytes anew where most of them are of rows that have gone, and gives back the room of keys that have.
    pub(crate) fn tidy(&mut self) {
        if self.gone.capacity() > LOG_KEPT {
            self.gone = Vec::new();
        }
        if self.marked {
            return;
        }
        if let Some(room) = spare(self.keys.len(), self.keys.capacity()) {
            self.keys.shrink_to(room);
            self.index.shrink_to(room, |(hash, _)| *hash);
        }
        if self.rows == 0 && self.waiting.is_empty() {
            self.next = 0;
        }
        if !self.arena.is_sparse() {
            return;
        }
        let mut arena = Arena::default();
        for key in &mut self.keys {
            key.name = arena.put(self.arena.get(key.name));
            for row in key.rows.iter_mut().flat_map(Rows::iter_mut) {
                row.at = arena.put(self.arena.get(row.at));
            }
        }
        self.arena = arena;
    }

    /// Keys held, of either side.
    pub(crate) fn keys(&self) -> usize {
        self.lent.as_ref().map_or_else(|| self.hashes().count(), Lease::keys)
    }

    pub(crate) fn is_empty(&self) -> bool {
        match &self.lent {
            Some(lease) => lease.keys() == 0,
            None => self.keys.is_empty() && self.waiting.is_empty(),
        }
    }

    pub(crate) fn mark(&mut self) {
        // What waits behind the mark has come behind it.
        self.place_waiting();
        self.settle();
        self.marked = true;
    }

    /// What was logged is of another mark.
    fn renew(&mut self) {
        self.mark = self.mark.checked_add(MARK).unwrap_or(MARK);
    }

    /// Keeps no undo until the next mark.
    pub(crate) fn settle(&mut self) {
        let mut log = std::mem::take(&mut self.log);
        let mut empty = Vec::new();
        for Logged { key, was, .. } in log.drain(..) {
            if let Was::There { at, .. } = was {
                self.arena.drop(at);
            }
            if self.keys[key as usize].is_empty() {
                empty.push(key);
            }
        }
        if log.capacity() <= LOG_KEPT {
            self.log = log;
        }
        self.drop_keys(empty);
        self.renew();
        self.marked = false;
        self.tidy();
    }

    /// From the end, so that those before them stay where they are.
    fn drop_keys(&mut self, mut keys: Vec<u32>) {
        keys.sort_unstable();
        keys.dedup();
        keys.into_iter().rev().for_each(|at| self.drop_key(at as usize));
    }

    pub(crate) fn rollback(&mut self) {
        if !self.marked {
            // Never marked: back to how it was made.
            *self = Self::new(self.shape, self.rules);
            return;
        }
        self.waiting.clear();
        let mut log = std::mem::take(&mut self.log);
        let mut touched = Vec::new();
        for Logged { key, side, time, number, was } in log.drain(..).rev() {
            let (at, side, id) = (key as usize, usize::from(side), (time, number));
            let found = self.keys[at].find(side, id);
            match (was, found) {
                (Was::Absent, Ok(place)) => self.remove(at, side, place),
                (Was::Unmet, Ok(place)) => self.keys[at].rows[side][place].logged &= !MET,
                (Was::There { met, at: bytes }, _) => {
                    self.put(at, side, id, u32::from(met), bytes);
                }
                (Was::Absent | Was::Unmet, Err(_)) | (Was::Stays, _) => {}
            }
            touched.push(key);
        }
        touched.retain(|at| self.keys[*at as usize].is_empty());
        self.drop_keys(touched);
        self.renew();
    }

    /// The rows of a side.
    pub(crate) fn side(&self, side: usize) -> impl Iterator<Item = &[u8]> {
        let waiting = self.waiting.iter(0).filter(move |_| side == 1).map(|(_, waits)| waits.row);
        let rows = self.keys.iter().flat_map(move |key| key.rows[side].iter()).map(move |row| self.bytes_of(side, row));
        rows.chain(waiting)
    }
}

impl Lent for Sides {
    fn of(state: &mut State) -> Option<&mut Self> {
        state.sides_mut()
    }

    fn lend(&mut self, common: &mut Common<Self>, shared: &Shared<Self>, bin: u32) {
        let Some(all) = common.whole().filter(|_| !self.marked && self.lent.is_none()) else { return };
        self.keys.iter().for_each(|key| all.copy_key(self, key));
        self.waiting.iter(0).for_each(|(_, waits)| all.copy_waiting(waits));
        common.admit(bin);
        *self = Self { lent: Some(Lease::new(shared, bin)), ..Self::new(self.shape, self.rules) };
    }

    fn divided(&self, bins: impl Iterator<Item = u32>, bin_of: impl Fn(u64) -> u32) -> HashMap<u32, Self> {
        let mut shares: HashMap<u32, Self> = bins.map(|bin| (bin, Self::new(self.shape, self.rules))).collect();
        let told = "rows are of bins that lend";
        for key in &self.keys {
            shares.get_mut(&bin_of(key.hash)).expect(told).copy_key(self, key);
        }
        for (_, waits) in self.waiting.iter(0) {
            shares.get_mut(&bin_of(waits.hash)).expect(told).copy_waiting(waits);
        }
        shares
    }

    fn rows(&self) -> usize {
        self.rows + self.waiting.len()
    }

    fn keys(&self) -> usize {
        Self::keys(self)
    }

    fn hashes(&self) -> impl Iterator<Item = u64> {
        let mut waiting: Vec<u64> = self.waiting.iter(0).map(|(_, waits)| waits.hash).collect();
        waiting.sort_unstable();
        waiting.dedup();
        let keys = self.keys.iter().map(|key| key.hash);
        let is_key = |hash: u64| self.index.find(hash, |(of, _)| *of == hash).is_some();
        keys.chain(waiting.into_iter().filter(move |hash| !is_key(*hash)))
    }

    fn bytes(&self) -> usize {
        Self::bytes(self)
    }
}

fn side_of(byte: u8) -> Result<usize, StateFault> {
    if byte < 2 { Ok(byte.into()) } else { Err(StateFault::Corrupt { what: "a side of a join" }) }
}

fn met_of(byte: u8) -> Result<u32, StateFault> {
    if byte < 2 { Ok(byte.into()) } else { Err(StateFault::Corrupt { what: "whether a row has met one" }) }
}

fn number_of(number: u64) -> Result<u32, StateFault> {
    // Behind the last one there is room for another.
    let number = u32::try_from(number).ok().filter(|number| *number < u32::MAX);
    number.ok_or(StateFault::Corrupt { what: "the number of a row" })
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use penstock_files::is_entries;
    use proptest::prelude::*;

    use super::*;
    use crate::common::lock;
    use crate::sorted::MOVED;

    /// Behind it there would be no room for the next.
    #[test]
    fn a_row_with_the_last_number_is_refused() {
        assert_eq!(number_of(u64::from(u32::MAX) - 1).ok(), Some(u32::MAX - 1));
        for number in [u64::from(u32::MAX), u64::MAX] {
            assert!(matches!(number_of(number), Err(StateFault::Corrupt { what: "the number of a row" })));
        }
    }

    #[derive(Clone, Debug)]
    enum Deed {
        /// Its key, its time, and how long it can be met.
        Left(u64, i64, i64),
        Right(u64, i64),
        Watermark(i64),
        Mark,
        Undo,
        Move,
    }

    fn deed() -> impl Strategy<Value = Deed> {
        let (key, time) = (|| 0u64..4, || 0i64..30);
        prop_oneof![
            3 => (key(), time(), 0i64..9).prop_map(|(key, time, long)| Deed::Left(key, time, long)),
            12 => (key(), time()).prop_map(|(key, time)| Deed::Right(key, time)),
            1 => time().prop_map(Deed::Watermark),
            1 => Just(Deed::Mark),
            1 => Just(Deed::Undo),
            1 => Just(Deed::Move),
        ]
    }

    /// Rows by what is in them, with their key and times, and what the watermark is.
    #[derive(Clone, Default)]
    struct Twin {
        left: Vec<(u32, u64, i64, i64)>,
        right: Vec<(u32, u64, i64)>,
        watermark: i64,
    }

    fn number(row: &[u8]) -> u32 {
        u32::from_le_bytes(row.try_into().expect("four bytes"))
    }

    fn numbers(sides: &Sides, side: usize) -> Vec<u32> {
        let mut all: Vec<u32> = sides.side(side).map(number).collect();
        all.sort_unstable();
        all
    }

    fn is_like(sides: &Sides, twin: &Twin) -> bool {
        let keys: std::collections::BTreeSet<u64> =
            twin.left.iter().map(|row| row.1).chain(twin.right.iter().map(|row| row.1)).collect();
        let left: Vec<u32> = twin.left.iter().map(|row| row.0).collect();
        let right: Vec<u32> = twin.right.iter().map(|row| row.0).collect();
        // While marked, keys that were there at the mark stay.
        let keys = if sides.marked { sides.keys() >= keys.len() } else { sides.keys() == keys.len() };
        keys && numbers(sides, 0) == left && numbers(sides, 1) == right
    }

    /// What a state tells, as one that takes it.
    fn told(from: &Sides, extent: Extent, mut to: Sides) -> Sides {
        let mut encoding = Encoding::of(extent);
        while let Some(chunk) = from.encode(&mut encoding) {
            let taken = if is_entries(&chunk) { to.absorb_changes(&chunk) } else { to.absorb(&chunk) };
            taken.expect("what was just made");
        }
        to
    }

    proptest! {
        /// Rows that wait are there for whoever meets them, moves, undoes, records or counts them.
        #[test]
        fn rows_that_wait_are_kept_like_others(deeds in prop::collection::vec(deed(), 0..120), keeps: bool) {
            let how = if keeps { JoinHow::Right } else { JoinHow::Inner };
            let rules = Rules { until: true, once: true, ..Rules::new(how, Some((0, i64::MAX))) };
            let new = || Sides::new(7, rules);
            let (mut sides, mut files) = (new(), new());
            let (mut twin, mut saved) = (Twin::default(), Twin::default());
            for (id, deed) in (0u32..).zip(deeds) {
                let (row, mut met) = (id.to_le_bytes(), Vec::new());
                match deed {
                    Deed::Left(key, time, long) if time >= twin.watermark => {
                        let (name, last) = (&[key as u8][..key as usize % 2], time + long);
                        let twice = twin.left.iter().any(|of| of.1 == key && time <= of.3 && of.2 <= last);
                        let found = (key, name, sides.find(key, name));
                        let own = sides.add(0, found, (time, Some(last)), &row, |_, other| met.push(number(other)));
                        prop_assert_eq!(own, if twice { Own::Twice } else { Own::Told });
                        let meets = |of: &(u32, u64, i64)| !twice && of.1 == key && (time..=last).contains(&of.2);
                        let mut expected: Vec<u32> = twin.right.iter().filter(|of| meets(of)).map(|of| of.0).collect();
                        expected.sort_by_key(|id| (twin.right.iter().find(|of| of.0 == *id).map(|of| of.2), *id));
                        prop_assert_eq!(met, expected);
                        twin.right.retain(|of| !meets(of));
                        if !twice {
                            twin.left.push((id, key, time, last));
                        }
                    }
                    Deed::Right(key, time) if time >= twin.watermark => {
                        let name = &[key as u8][..key as usize % 2];
                        let found = sides.find(key, name);
                        match found.and_then(|at| sides.meet_one(at, time)) {
                            Some(place) => met.push(number(sides.row_at(0, place))),
                            None => sides.wait((key, name), time, &row),
                        }
                        let found = twin.left.iter().find(|of| of.1 == key && (of.2..=of.3).contains(&time));
                        prop_assert_eq!(met, Vec::from_iter(found.map(|of| of.0)));
                        if found.is_none() {
                            twin.right.push((id, key, time));
                        }
                    }
                    Deed::Left(..) | Deed::Right(..) => {}
                    Deed::Watermark(watermark) => {
                        twin.watermark = twin.watermark.max(watermark);
                        let mut alone = Vec::new();
                        let mut take = |side: usize, row: &[u8]| {
                            alone.push((side, number(row)));
                            Ok::<_, Infallible>(row[0] & 1 > 0)
                        };
                        while sides.fire(twin.watermark, &mut take) != Ok(true) {}
                        alone.sort_unstable();
                        let over = twin.right.iter().filter(|of| keeps && of.2 < twin.watermark).map(|of| (1, of.0));
                        prop_assert_eq!(alone, Vec::from_iter(over));
                        twin.left.retain(|of| of.3 >= twin.watermark);
                        twin.right.retain(|of| of.2 >= twin.watermark);
                        prop_assert!(sides.next_due().is_none_or(|due| due >= twin.watermark));
                    }
                    Deed::Mark => {
                        files = told(&sides, Extent::Changed, files);
                        prop_assert!(is_like(&files, &twin), "in files");
                        sides.mark();
                        saved = twin.clone();
                    }
                    Deed::Undo => {
                        sides.rollback();
                        twin = saved.clone();
                    }
                    Deed::Move if sides.marked => {
                        let mut to = new();
                        to.mark();
                        prop_assert!(is_like(&told(&sides, Extent::Marked, to), &twin), "moved");
                    }
                    Deed::Move => {
                        sides = told(&sides, Extent::All, new());
                        let shared = Common::shared(0, new());
                        sides.lend(&mut lock(&shared), &shared, 0);
                        prop_assert!(lock(&shared).whole().is_some_and(|whole| is_like(whole, &twin)), "lent");
                        let counted = (sides.keys(), sides.is_empty());
                        prop_assert!(is_like(&told(&sides, Extent::All, new()), &twin), "shown");
                        sides.home();
                        prop_assert_eq!(counted, (sides.keys(), sides.is_empty()));
                    }
                }
                prop_assert!(is_like(&sides, &twin));
            }
        }
    }

    /// A row that is kept of a side, as it is known outside.
    #[derive(Clone, Copy, Debug)]
    struct Came {
        id: u32,
        key: u64,
        time: i64,
        /// The last time at which one can meet it.
        last: i64,
        met: bool,
    }

    /// What a join of two sides keeps, one behind the other as they came.
    #[derive(Clone, Default)]
    struct Kept {
        sides: [Vec<Came>; 2],
        watermark: i64,
    }

    const NEAR: (i64, i64) = (-6, 9);

    impl Kept {
        fn is_met(left: &Came, right: &Came, until: bool) -> bool {
            let near = if until { 0..=left.last - left.time } else { NEAR.0..=NEAR.1 };
            left.key == right.key && near.contains(&(right.time - left.time))
        }

        /// The rows of the other side that one meets, by time.
        fn meets(&self, side: usize, one: &Came, until: bool) -> Vec<u32> {
            let is_met = |other: &&Came| match side {
                0 => Self::is_met(one, other, until),
                _ => Self::is_met(other, one, until),
            };
            let mut met: Vec<&Came> = self.sides[1 - side].iter().filter(is_met).collect();
            met.sort_by_key(|other| other.time);
            met.iter().map(|other| other.id).collect()
        }

        /// What comes out by itself where rows go, by side and number.
        fn drop_before(&mut self, watermark: i64, rules: Rules) -> Vec<(usize, u32)> {
            self.watermark = watermark;
            let mut alone = Vec::new();
            for side in [0, 1] {
                let (over, stay): (Vec<_>, Vec<_>) = self.sides[side].iter().partition(|row| row.last < watermark);
                self.sides[side] = stay;
                alone.extend(over.iter().filter(|row| rules.keeps(side) && !row.met).map(|row| (side, row.id)));
            }
            alone.sort_unstable();
            alone
        }

        fn is_kept_by(&self, sides: &Sides) -> bool {
            let ids = |side: usize| self.sides[side].iter().map(|row| row.id).collect::<Vec<_>>();
            numbers(sides, 0) == ids(0) && numbers(sides, 1) == ids(1)
        }
    }

    /// What is over, until there is nothing more.
    fn fired(sides: &mut Sides, watermark: i64) -> Vec<(usize, u32)> {
        let mut alone = Vec::new();
        let mut take = |side: usize, row: &[u8]| {
            alone.push((side, number(row)));
            Ok::<_, Infallible>(row[0] & 1 > 0)
        };
        while sides.fire(watermark, &mut take) != Ok(true) {}
        alone.sort_unstable();
        alone
    }

    proptest! {
        /// Rows in any order, of few keys: each side of one has many.
        #[test]
        fn rows_meet_those_that_are_near_in_whatever_order_they_come(
            deeds in prop::collection::vec((0u8..40, 0u64..2, 0i64..200, 0i64..20), 0..300),
            how in prop::sample::select(vec![JoinHow::Inner, JoinHow::Full, JoinHow::Semi, JoinHow::Anti]),
            until: bool,
        ) {
            let rules = match until {
                true => Rules { until, ..Rules::new(how, Some((0, i64::MAX))) },
                false => Rules::new(how, Some(NEAR)),
            };
            let new = || Sides::new(7, rules);
            let (mut sides, mut files, mut kept, mut saved) = (new(), new(), Kept::default(), Kept::default());
            for (id, (deed, key, time, long)) in (0u32..).zip(deeds) {
                let side = usize::from(deed % 2);
                match deed {
                    0 => {
                        let watermark = kept.watermark.max(time / 4);
                        prop_assert_eq!(fired(&mut sides, watermark), kept.drop_before(watermark, rules));
                    }
                    1 | 2 => {
                        // One without a mark tells all that is there.
                        files = told(&sides, Extent::Changed, if sides.marked { files } else { new() });
                        prop_assert!(kept.is_kept_by(&files), "in files");
                        sides.mark();
                        saved = kept.clone();
                        if deed == 2 && long < 5 {
                            sides.settle();
                            saved = Kept::default();
                        }
                    }
                    3 => {
                        sides.rollback();
                        kept = saved.clone();
                    }
                    4 if sides.marked => {
                        let mut to = new();
                        to.mark();
                        prop_assert!(kept.is_kept_by(&told(&sides, Extent::Marked, to)), "moved");
                    }
                    4 => sides = told(&sides, Extent::All, new()),
                    _ if time < kept.watermark => {}
                    _ => {
                        let last = match (until, side) {
                            (true, 0) => time + long,
                            (true, _) => time,
                            (false, _) => time + [NEAR.1, -NEAR.0][side],
                        };
                        let mut one = Came { id, key, time, last, met: false };
                        let found = (key, &[key as u8][..], sides.find(key, &[key as u8]));
                        let (mut met, times) = (Vec::new(), (time, (until && side == 0).then_some(last)));
                        let own = sides.add(side, found, times, &id.to_le_bytes(), |_, other| met.push(number(other)));
                        let expected = kept.meets(side, &one, until);
                        let is_met = |row: &Came| expected.contains(&row.id);
                        match (how, side) {
                            (JoinHow::Semi | JoinHow::Anti, 0) => {
                                let alone = how == JoinHow::Semi && !expected.is_empty();
                                prop_assert_eq!(own, if alone { Own::Alone } else { Own::Told });
                                prop_assert!(met.is_empty());
                                if expected.is_empty() {
                                    kept.sides[0].push(one);
                                }
                            }
                            (JoinHow::Semi | JoinHow::Anti, _) => {
                                prop_assert_eq!(met, if how == JoinHow::Semi { expected.clone() } else { Vec::new() });
                                kept.sides[0].retain(|row| !is_met(row));
                                if !kept.sides[1].iter().any(|row| (row.key, row.time) == (key, time)) {
                                    kept.sides[1].push(one);
                                }
                            }
                            _ => {
                                prop_assert_eq!((own, &met), (Own::Told, &expected));
                                kept.sides[1 - side].iter_mut().filter(|row| is_met(row)).for_each(|row| row.met = true);
                                one.met = !expected.is_empty();
                                kept.sides[side].push(one);
                            }
                        }
                    }
                }
                prop_assert!(kept.is_kept_by(&sides));
            }
            prop_assert_eq!(fired(&mut sides, i64::MAX), kept.drop_before(i64::MAX, rules));
        }
    }

    /// Numbers below one, each once, in no order.
    fn shuffled(count: i64) -> impl Iterator<Item = i64> {
        (0..count).map(move |number| number * 1_000_003 % count)
    }

    #[test]
    fn rows_that_come_in_any_order_move_few_others() {
        const COUNT: i64 = 20_000;
        let none = |_: Option<u64>, _: &[u8]| {};
        for how in [JoinHow::Inner, JoinHow::Semi] {
            for numbers in
                [&mut (0..COUNT) as &mut dyn Iterator<Item = i64>, &mut (0..COUNT).rev(), &mut shuffled(COUNT)]
            {
                let (mut sides, before) = (Sides::new(7, Rules::new(how, Some((-5, 5)))), MOVED.get().0);
                for number in numbers {
                    // One of a pair is behind the other, so that those of a semi-join wait for each other.
                    for (side, time) in [(0, number * 10), (1, (COUNT - number) * 10)] {
                        let at = sides.find(7, &[]);
                        sides.add(side, (7, &[], at), (time, None), &[0; 4], none);
                    }
                }
                let moved = MOVED.get().0 - before;
                assert!(moved <= 40 * COUNT as usize, "{moved} rows were moved for {COUNT} of each side: {how:?}");
                assert!(sides.rows >= COUNT as usize);
            }
        }
    }

    #[test]
    fn what_is_written_of_many_rows_does_not_tell_the_order_in_which_they_came() {
        const COUNT: i64 = 20_000;
        let rules = Rules::new(JoinHow::Full, Some((-5, 5)));
        let filled = |numbers: &mut dyn Iterator<Item = i64>| {
            let mut sides = Sides::new(7, rules);
            for number in numbers {
                let at = sides.find(7, b"key");
                sides.add((number % 2) as usize, (7, b"key", at), (number * 10, None), &[number as u8; 100], |_, _| {});
            }
            sides
        };
        let (sides, other) = (filled(&mut (0..COUNT)), filled(&mut shuffled(COUNT)));
        for extent in [Extent::All, Extent::Anew] {
            let chunks = |sides: &Sides| {
                let mut encoding = Encoding::of(extent);
                std::iter::from_fn(|| sides.encode(&mut encoding)).collect::<Vec<_>>()
            };
            let written = chunks(&sides);
            assert!(written.len() > 2 && written == chunks(&other));
            assert!(chunks(&told(&other, extent, Sides::new(7, rules))) == written);
        }
    }

    /// Of those that have begun half have ended, which stay until the watermark comes.
    #[test]
    fn rows_go_from_between_others_that_stay() {
        const COUNT: i64 = 5_000;
        let rules = Rules { until: true, ..Rules::new(JoinHow::Semi, Some((0, i64::MAX))) };
        let (mut sides, mut met) = (Sides::new(7, rules), 0);
        for number in shuffled(COUNT) {
            let last = if number % 2 == 0 { number } else { 2 * COUNT };
            let at = sides.find(7, &[]);
            sides.add(0, (7, &[], at), (number, Some(last)), &[0; 4], |_, _| {});
        }
        let before = MOVED.get().0;
        let at = sides.find(7, &[]);
        sides.add(1, (7, &[], at), (COUNT, None), &[0; 4], |_, _| met += 1);
        let moved = MOVED.get().0 - before;
        assert_eq!((met, sides.rows), (COUNT / 2, COUNT as usize / 2 + 1));
        assert!(moved <= 4 * COUNT as usize, "{moved} rows were moved where half of {COUNT} go");
    }

    /// A row of each key, whose time is given.
    fn add_keys(sides: &mut Sides, keys: Range<u64>, time: i64) {
        for key in keys {
            sides.add(0, (key, &key.to_le_bytes(), None), (time, None), &[0; 4], |_, _| {});
        }
    }

    #[test]
    fn keys_that_have_gone_take_no_memory() {
        const COUNT: u64 = 20_000;
        let marks: [fn(&mut Sides); 2] = [|_| (), Sides::mark];
        for mark in marks {
            let mut sides = Sides::new(7, Rules::new(JoinHow::Inner, Some((0, 5))));
            mark(&mut sides);
            add_keys(&mut sides, 0..COUNT, 0);
            add_keys(&mut sides, COUNT..COUNT + 100, 100);
            let most = sides.bytes();
            assert!(most > COUNT as usize * size_of::<Key>());
            mark(&mut sides);
            assert!(fired(&mut sides, 50).is_empty());
            // What was is known until it cannot come back.
            sides.settle();
            assert_eq!((sides.keys(), sides.rows), (100, 100));
            assert!(sides.keys.capacity() <= 1_000 && sides.index.num_buckets() <= 1_000);
            assert!(sides.bytes() < most / 50, "{} of {most} bytes are left", sides.bytes());
            assert!((COUNT..COUNT + 100).all(|key| sides.find(key, &key.to_le_bytes()).is_some()));
            assert!(fired(&mut sides, 200).is_empty() && sides.is_empty());
            assert!(sides.bytes() < most / 50, "{} of {most} bytes are left of nothing", sides.bytes());
        }
    }

    /// As many as went come again, in time.
    #[test]
    fn the_memory_of_keys_that_come_and_go_stays() {
        let mut sides = Sides::new(7, Rules::new(JoinHow::Inner, Some((0, 5))));
        let mut room = None;
        for epoch in 0..40_u64 {
            add_keys(&mut sides, epoch * 1_000..epoch * 1_000 + 1_000, epoch as i64 * 10);
            assert!(fired(&mut sides, epoch as i64 * 10 - 4).is_empty());
            assert!((1_000..=2_000).contains(&sides.keys()));
            let now = (sides.keys.as_ptr(), sides.index.num_buckets());
            assert!(epoch < 5 || room == Some(now), "at {epoch}");
            room = Some(now);
        }
    }

    /// A row for ever, and one of its key in each epoch: what is known of ends stays as large as what is kept.
    #[test]
    fn rows_that_go_leave_no_ends_behind() {
        let rules = Rules { until: true, ..Rules::new(JoinHow::Inner, Some((0, i64::MAX))) };
        let mut sides = Sides::new(7, rules);
        let none = |_: Option<u64>, _: &[u8]| {};
        for key in 0..4 {
            assert_eq!(sides.add(0, (key, &[], None), (0, Some(i64::MAX - 1)), &[0; 4], none), Own::Told);
        }
        for time in 1..5_000 {
            for key in 0..4 {
                let at = sides.find(key, &[]);
                sides.add(1, (key, &[], at), (time, None), &[1; 4], none);
            }
            while sides.fire(time + 1, |_, _| Ok::<_, Infallible>(false)) != Ok(true) {}
            assert!(sides.due.len() <= 2 * 4 + LEAST_DUE + 1, "{} ends of 4 keys at {time}", sides.due.len());
        }
        assert_eq!(sides.rows, 4);
        while sides.fire(i64::MAX, |_, _| Ok::<_, Infallible>(false)) != Ok(true) {}
        assert_eq!((sides.rows, sides.due.len()), (0, 0));
    }
}
