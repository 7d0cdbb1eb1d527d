//! The native state of one bin under a join: the rows of both sides by key.
//!
//! A row is known by its side, its key, its time (0 where the join has no interval) and a number that tells rows of one time apart, in the
//! order in which they came. The rows of a key and side stand in that order, so what an interval holds is one stretch, and what is over goes from
//! the front.
//!
//! Undo: while marked, each key that something has happened to has a log of what undoes it, applied from its end. What has changed are the
//! rows that logs name: those that are there are told as they are, the others as gone. It costs what happened, however many rows a key has.
//!
//! Invariants: rows of a key and side ascend by time and number; a key that is kept has rows or a log; each key with rows that can be over has
//! an entry in `due` at or before the first of them.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use hashbrown::HashTable;
use penstock_bins::{Encoding, Extent};
use penstock_files::{Chunk, ChunkWriter, Entry};

use crate::error::StateFault;
use crate::panes::CHUNK_BYTES;
use crate::spec::JoinHow;
use crate::wire::{Reader, put_blob, put_i64};

const TAG: u8 = b'J';
const VERSION: u8 = 1;
/// Of the entries.
const ENTRIES_VERSION: u8 = 1;

/// What a join does with rows, as its state needs to know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rules {
    pub(crate) how: JoinHow,
    /// With an interval: how long after its time a row of each side can still meet one, in microseconds.
    pub(crate) hold: Option<[i64; 2]>,
}

impl Rules {
    /// `within` are the least and the greatest time of a right row behind that of the left one.
    pub(crate) fn new(how: JoinHow, within: Option<(i64, i64)>) -> Self {
        Self { how, hold: within.map(|(lower, upper)| [upper, -lower]) }
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
        self.hold.is_some() && self.keeps(side) && !self.filters()
    }

    /// Whether rows go but by undo.
    fn drops(self) -> bool {
        self.hold.is_some() || self.filters()
    }

    /// When a row is over: when the watermark is behind this.
    fn end(self, side: usize, time: i64) -> i64 {
        self.hold.map_or(i64::MAX, |hold| time.saturating_add(hold[side]))
    }
}

/// A row that is kept.
struct Row {
    time: i64,
    number: u32,
    /// The mark at which it was last logged, whether it was born then, and whether it has met one.
    logged: u32,
    bytes: Box<[u8]>,
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

    fn weight(&self) -> usize {
        size_of::<Row>() + self.bytes.len()
    }
}

/// What undoes a change of a row.
enum Was {
    /// It was not there.
    Absent,
    /// It had met none.
    Unmet,
    /// It was there.
    There { met: bool, bytes: Box<[u8]> },
    /// It has moved here, or its end has, since the mark: it stays so.
    Stays,
}

struct Logged {
    side: u8,
    time: i64,
    number: u32,
    was: Was,
}

struct Key {
    hash: u64,
    name: Box<[u8]>,
    rows: [Vec<Row>; 2],
    /// When it stands in `due` next.
    due: i64,
    log: Vec<Logged>,
}

impl Key {
    fn is_empty(&self) -> bool {
        self.rows.iter().all(Vec::is_empty)
    }

    fn find(&self, side: usize, id: (i64, u32)) -> Result<usize, usize> {
        self.rows[side].binary_search_by_key(&id, Row::id)
    }

    /// The rows that the log names, each once: where it is, and whether one that is not there is told as gone.
    fn changed(&self) -> Vec<(u8, i64, u32, bool)> {
        let mut ids: Vec<_> =
            self.log.iter().map(|l| (l.side, l.time, l.number, matches!(l.was, Was::Absent))).collect();
        // Of one row what is no birth comes first.
        ids.sort_unstable();
        ids.dedup_by_key(|id| (id.0, id.1, id.2));
        ids.into_iter().map(|(side, time, number, born)| (side, time, number, !born)).collect()
    }
}

/// See the module.
pub(crate) struct Sides {
    shape: u64,
    rules: Rules,
    index: HashTable<u32>,
    keys: Vec<Key>,
    /// Keys, by their hashes, of which rows may be over when the watermark is behind this.
    due: BinaryHeap<Reverse<(i64, u64)>>,
    /// Whether changes are told apart and can be undone.
    marked: bool,
    /// Changes with each mark and undo, by [`MARK`]: rows carry it.
    mark: u32,
    /// Keys with a log.
    touched: Vec<u32>,
    bytes: usize,
}

/// How far an encoding is: the key, side and row that the next chunk begins with; the key and the row of its log.
#[derive(Default)]
struct Place {
    same: Option<(usize, usize, usize)>,
    begun: bool,
    changed: (usize, usize),
}

/// What becomes of a row that came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Own {
    /// It was told with those that it met, if any.
    Told,
    /// It comes out by itself, once.
    Alone,
}

impl Sides {
    pub(crate) fn new(shape: u64, rules: Rules) -> Self {
        Self {
            shape,
            rules,
            index: HashTable::new(),
            keys: Vec::new(),
            due: BinaryHeap::new(),
            marked: false,
            mark: MARK,
            touched: Vec::new(),
            bytes: 0,
        }
    }

    fn find(&self, hash: u64, name: &[u8]) -> Option<usize> {
        let same = |at: &u32| self.keys[*at as usize].hash == hash && *self.keys[*at as usize].name == *name;
        self.index.find(hash, same).map(|at| *at as usize)
    }

    /// Where a key is kept; a new one is made.
    fn place(&mut self, hash: u64, name: &[u8]) -> usize {
        if let Some(at) = self.find(hash, name) {
            return at;
        }
        let at = u32::try_from(self.keys.len()).expect("a bin has less than 2^32 keys");
        self.keys.push(Key { hash, name: name.into(), rows: Default::default(), due: i64::MAX, log: Vec::new() });
        self.bytes += size_of::<Key>() + name.len();
        let keys = &self.keys;
        self.index.insert_unique(hash, at, |at| keys[*at as usize].hash);
        at as usize
    }

    /// Notes what undoes a change, if it can be undone.
    fn log(&mut self, at: usize, side: usize, (time, number): (i64, u32), was: Was) {
        if !self.marked {
            return;
        }
        let key = &mut self.keys[at];
        if key.log.is_empty() {
            self.touched.push(at as u32);
        }
        key.log.push(Logged { side: side as u8, time, number, was });
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
            self.due.push(Reverse((end, key.hash)));
        }
    }

    /// A row comes: `meets` gets those of the other side that come out with it (of a semi-join those that come out now), and then it is kept,
    /// if one that comes can meet it.
    pub(crate) fn add(
        &mut self,
        side: usize,
        (hash, name): (u64, &[u8]),
        time: i64,
        row: &[u8],
        mut meets: impl FnMut(&[u8]),
    ) -> Own {
        let (rules, other) = (self.rules, 1 - side);
        if rules.filters() && side == 0 {
            // Kept while it has met none.
            let met = self.find(hash, name).is_some_and(|at| !self.within(at, side, time).is_empty());
            match (met, rules.how) {
                (true, JoinHow::Semi) => return Own::Alone,
                (true, _) => return Own::Told,
                (false, _) => {}
            }
        }
        let at = self.place(hash, name);
        let mut met = false;
        let found = self.within(at, side, time);
        if rules.filters() && side == 1 {
            let gone: Vec<Row> = self.keys[at].rows[other].drain(found).collect();
            for row in gone {
                if rules.how == JoinHow::Semi {
                    meets(&row.bytes);
                }
                self.leave(at, other, row);
            }
            // One of a time is as good as many.
            if self.keys[at].rows[side].binary_search_by_key(&time, |row| row.time).is_ok() {
                return Own::Told;
            }
        } else {
            met = !found.is_empty();
            for place in found {
                let row = &self.keys[at].rows[other][place];
                meets(&row.bytes);
                if rules.flags(other) && !row.met() {
                    let id = row.id();
                    if !self.is_logged(row) {
                        self.log(at, other, id, Was::Unmet);
                        self.keys[at].rows[other][place].logged = self.mark;
                    }
                    self.keys[at].rows[other][place].logged |= MET;
                }
            }
        }
        let rows = &self.keys[at].rows[side];
        let place = rows.partition_point(|row| row.time <= time);
        let before = place.checked_sub(1).map(|last| &rows[last]).filter(|last| last.time == time);
        let number =
            before.map_or(0, |last| last.number.checked_add(1).expect("less than 2^32 rows of a key and time"));
        let logged = self.mark | BORN | if met && rules.flags(side) { MET } else { 0 };
        self.log(at, side, (time, number), Was::Absent);
        let row = Row { time, number, logged, bytes: row.into() };
        self.bytes += row.weight();
        self.keys[at].rows[side].insert(place, row);
        self.schedule(at, rules.end(side, time));
        Own::Told
    }

    /// The rows of the other side that one of this side meets.
    fn within(&self, at: usize, side: usize, time: i64) -> std::ops::Range<usize> {
        let rows = &self.keys[at].rows[1 - side];
        let Some(hold) = self.rules.hold else { return 0..rows.len() };
        let (first, last) = (time.saturating_sub(hold[1 - side]), time.saturating_add(hold[side]));
        let begin = rows.partition_point(|row| row.time < first);
        begin..begin + rows[begin..].partition_point(|row| row.time <= last)
    }

    /// A row was taken away.
    fn leave(&mut self, at: usize, side: usize, row: Row) {
        self.bytes -= row.weight();
        // One that was born since the mark leaves no trace but its birth.
        if !self.marked || (self.is_logged(&row) && row.logged & BORN > 0) {
            return;
        }
        let (id, met) = (row.id(), row.met());
        self.log(at, side, id, Was::There { met, bytes: row.bytes });
    }

    /// Puts a row where it belongs. Says whether there was one.
    fn put(&mut self, at: usize, side: usize, row: Row) -> bool {
        self.bytes += row.weight();
        let end = self.rules.end(side, row.time);
        let replaced = match self.keys[at].find(side, row.id()) {
            Ok(place) => {
                let before = std::mem::replace(&mut self.keys[at].rows[side][place], row);
                self.bytes -= before.weight();
                true
            }
            Err(place) => {
                self.keys[at].rows[side].insert(place, row);
                false
            }
        };
        self.schedule(at, end);
        replaced
    }

    fn drop_key(&mut self, at: usize) {
        let hash = self.keys[at].hash;
        if let Ok(entry) = self.index.find_entry(hash, |other| *other == at as u32) {
            entry.remove();
        }
        let key = self.keys.swap_remove(at);
        self.bytes -= size_of::<Key>() + key.name.len();
        if let Some(moved) = self.keys.get(at) {
            let last = self.keys.len() as u32;
            if let Some(entry) = self.index.find_mut(moved.hash, |other| *other == last) {
                *entry = at as u32;
            }
        }
    }

    /// Drops the rows that can meet none any more; those that come out by that are given to `alone`. Gives up after a key with which `alone` has
    /// had enough, and then says false: come again.
    pub(crate) fn fire<E>(
        &mut self,
        watermark: i64,
        mut alone: impl FnMut(usize, &[u8]) -> Result<bool, E>,
    ) -> Result<bool, E> {
        while let Some(&Reverse((end, hash))) = self.due.peek() {
            if end >= watermark {
                break;
            }
            self.due.pop();
            let mut enough = false;
            // Keys of one hash: nearly always one.
            let mut same: Vec<u32> = self.index.iter_hash(hash).copied().collect();
            same.retain(|at| self.keys[*at as usize].hash == hash && self.keys[*at as usize].due < watermark);
            same.sort_unstable();
            for at in same.into_iter().rev().map(|at| at as usize) {
                self.keys[at].due = i64::MAX;
                for side in [0, 1] {
                    let rules = self.rules;
                    let over = self.keys[at].rows[side].partition_point(|row| rules.end(side, row.time) < watermark);
                    let over: Vec<Row> = self.keys[at].rows[side].drain(..over).collect();
                    for row in over {
                        if rules.keeps(side) && !row.met() {
                            enough |= alone(side, &row.bytes)?;
                        }
                        self.leave(at, side, row);
                    }
                    if let Some(next) = self.keys[at].rows[side].first() {
                        let end = rules.end(side, next.time);
                        self.schedule(at, end);
                    }
                }
                if self.keys[at].is_empty() && self.keys[at].log.is_empty() {
                    self.drop_key(at);
                }
            }
            if enough {
                return Ok(false);
            }
        }
        Ok(true)
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
                if kept[side] && (self.rules.filters() || at.rows[1 - side].is_empty()) {
                    for row in &at.rows[side] {
                        enough |= alone(side, &row.bytes)?;
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
        let extent = encoding.extent();
        let place = encoding.place(Place::default);
        match (extent, self.marked) {
            (Extent::All, _) => self.encode_rows(place, false),
            (Extent::Marked, true) => self.encode_rows(place, true).or_else(|| self.encode_changes(place)),
            // Never marked: all has changed.
            (Extent::Marked, false) | (Extent::Changed, _) => self.encode_changes(place),
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
        while let Some(kept) = self.keys.get(key) {
            let told = |row: &Row| !apart || !self.is_logged(row);
            for (at, row) in kept.rows[side].iter().enumerate().skip(from).filter(|(_, row)| told(row)) {
                if out.len() > empty && out.len() + 48 + kept.name.len() + row.bytes.len() > CHUNK_BYTES {
                    place.same = Some((key, side, at));
                    return Some(out);
                }
                put_i64(&mut out, kept.hash as i64);
                out.push(side as u8);
                if self.rules.hold.is_some() {
                    put_i64(&mut out, row.time);
                    out.push(u8::from(row.met()));
                }
                put_i64(&mut out, row.number.into());
                put_blob(&mut out, &kept.name);
                put_blob(&mut out, &row.bytes);
            }
            (key, side, from) = if side == 0 { (key, 1, 0) } else { (key + 1, 0, 0) };
        }
        (out.len() > empty).then_some(out)
    }

    fn entries_shape(&self) -> Vec<u8> {
        let mut shape = vec![TAG, ENTRIES_VERSION];
        put_i64(&mut shape, self.shape as i64);
        shape
    }

    /// The next chunk of entries: a key is a side, the time and number of a row and the name of its key, a value the row, of one with a time
    /// behind whether it has met one.
    fn encode_changes(&self, place: &mut Place) -> Option<Vec<u8>> {
        let mut writer = ChunkWriter::new(&self.entries_shape());
        let count = if self.marked { self.touched.len() } else { self.keys.len() };
        let (mut name, mut value) = (Vec::new(), Vec::new());
        let (ref mut number, ref mut from) = place.changed;
        while *number < count {
            let kept = &self.keys[if self.marked { self.touched[*number] as usize } else { *number }];
            let mut put = |writer: &mut ChunkWriter, side: usize, id: (i64, u32), row: Option<&Row>| {
                name.clear();
                name.push(side as u8);
                if self.rules.hold.is_some() {
                    name.extend_from_slice(&(id.0 as u64 ^ 1 << 63).to_be_bytes());
                }
                name.extend_from_slice(&u64::from(id.1).to_be_bytes());
                name.extend_from_slice(&kept.name);
                let Some(row) = row else {
                    return writer.push(Entry::Gone { hash: kept.hash, key: &name });
                };
                value.clear();
                if self.rules.hold.is_some() {
                    value.push(u8::from(row.met()));
                }
                value.extend_from_slice(&row.bytes);
                writer.push(Entry::Put { hash: kept.hash, key: &name, value: &value });
            };
            if self.marked {
                for (side, time, number, gone) in kept.changed().into_iter().skip(*from) {
                    if writer.len() >= CHUNK_BYTES {
                        return Some(writer.finish());
                    }
                    *from += 1;
                    let (side, id) = (usize::from(side), (time, number));
                    match kept.find(side, id) {
                        Ok(at) => put(&mut writer, side, id, Some(&kept.rows[side][at])),
                        Err(_) if gone => put(&mut writer, side, id, None),
                        Err(_) => {}
                    }
                }
            } else {
                for (side, row) in
                    (0..2).flat_map(|side| kept.rows[side].iter().map(move |row| (side, row))).skip(*from)
                {
                    if writer.len() >= CHUNK_BYTES {
                        return Some(writer.finish());
                    }
                    *from += 1;
                    put(&mut writer, side, row.id(), Some(row));
                }
            }
            (*number, *from) = (*number + 1, 0);
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
            let (time, met) = match self.rules.hold {
                Some(_) => (reader.i64()?, met_of(reader.u8()?)?),
                None => (0, 0),
            };
            let number = number_of(reader.i64()? as u64)?;
            let name = reader.blob()?;
            rows.push((hash, name, side, Row { time, number, logged: met, bytes: reader.blob()?.into() }));
        }
        for (hash, name, side, row) in rows {
            let at = self.place(hash, name);
            if self.put(at, side, row) {
                return Err(StateFault::Corrupt { what: "a row came twice" });
            }
        }
        Ok(())
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
            let time = match self.rules.hold {
                Some(_) => (u64::from_be_bytes(reader.array()?) ^ 1 << 63) as i64,
                None => 0,
            };
            let id = (time, number_of(u64::from_be_bytes(reader.array()?))?);
            let row = match (value, self.rules.hold) {
                (None, _) => None,
                (Some(value), None) => Some((0, value)),
                (Some(value), Some(_)) => {
                    let (met, bytes) = value.split_first().ok_or(StateFault::Corrupt { what: "a row is cut off" })?;
                    Some((met_of(*met)?, bytes))
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
            let (time, number) = id;
            match row {
                Some((met, bytes)) => {
                    let logged = if self.marked { self.mark | met } else { met };
                    self.put(at, side, Row { time, number, logged, bytes: bytes.into() });
                }
                None => {
                    if let Ok(place) = self.keys[at].find(side, id) {
                        let gone = self.keys[at].rows[side].remove(place);
                        self.bytes -= gone.weight();
                    }
                    if self.keys[at].is_empty() && self.keys[at].log.is_empty() {
                        self.drop_key(at);
                    }
                }
            }
        }
        Ok(())
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes + 8 * self.index.capacity() + 16 * self.due.len()
    }

    /// Keys held, of either side.
    pub(crate) fn keys(&self) -> usize {
        self.keys.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    pub(crate) fn mark(&mut self) {
        self.settle();
        self.marked = true;
    }

    /// What was logged is of another mark.
    fn renew(&mut self) {
        self.mark = self.mark.checked_add(MARK).unwrap_or(MARK);
    }

    /// Keeps no undo until the next mark.
    pub(crate) fn settle(&mut self) {
        let mut touched = std::mem::take(&mut self.touched);
        // Keys that go are taken from the end, so that those before them stay where they are.
        touched.sort_unstable();
        for at in touched.into_iter().rev().map(|at| at as usize) {
            self.keys[at].log = Vec::new();
            if self.keys[at].is_empty() {
                self.drop_key(at);
            }
        }
        self.renew();
        self.marked = false;
    }

    pub(crate) fn rollback(&mut self) {
        if !self.marked {
            // Never marked: back to how it was made.
            *self = Self::new(self.shape, self.rules);
            return;
        }
        let mut touched = std::mem::take(&mut self.touched);
        touched.sort_unstable();
        for at in touched.into_iter().rev().map(|at| at as usize) {
            for Logged { side, time, number, was } in std::mem::take(&mut self.keys[at].log).into_iter().rev() {
                let (side, id) = (usize::from(side), (time, number));
                let found = self.keys[at].find(side, id);
                match (was, found) {
                    (Was::Absent, Ok(place)) => {
                        let gone = self.keys[at].rows[side].remove(place);
                        self.bytes -= gone.weight();
                    }
                    (Was::Unmet, Ok(place)) => self.keys[at].rows[side][place].logged &= !MET,
                    (Was::There { met, bytes }, _) => {
                        self.put(at, side, Row { time, number, logged: u32::from(met), bytes });
                    }
                    (Was::Absent | Was::Unmet, Err(_)) | (Was::Stays, _) => {}
                }
            }
            if self.keys[at].is_empty() {
                self.drop_key(at);
            }
        }
        self.renew();
    }

    /// The rows of a side.
    pub(crate) fn side(&self, side: usize) -> impl Iterator<Item = &[u8]> {
        self.keys.iter().flat_map(move |key| &key.rows[side]).map(|row| &*row.bytes)
    }
}

fn side_of(byte: u8) -> Result<usize, StateFault> {
    if byte < 2 { Ok(byte.into()) } else { Err(StateFault::Corrupt { what: "a side of a join" }) }
}

fn met_of(byte: u8) -> Result<u32, StateFault> {
    if byte < 2 { Ok(byte.into()) } else { Err(StateFault::Corrupt { what: "whether a row has met one" }) }
}

fn number_of(number: u64) -> Result<u32, StateFault> {
    u32::try_from(number).map_err(|_| StateFault::Corrupt { what: "the number of a row" })
}
