//! Session windows: aggregates by key over rows that follow each other closely.
//!
//! A row alone is the session `[t, t + gap)`; sessions of a key that overlap or touch are one, as in Spark, so rows are in one session exactly if no more
//! than the gap is between each and the next. A session fires when the watermark is behind its end, which is the time of its last row plus the gap, and is dropped:
//! not at its end, where a row of just that time would still join. A row is late when the session that it would be alone ends at or before the
//! watermark, whatever it might have joined; so what is late depends on the watermark alone, as in Spark. It goes to the side output, as do rows
//! without an event time.
//!
//! A block is cut into sessions of its own first, its accumulators filled column by column, and those are merged into the sessions of
//! their keys. So the order of rows makes no difference but to the last bits of floats.
//!
//! A bin keeps its keys with their open sessions, ascending, each with the words of its accumulators. In whatever order rows come, to change one costs
//! little more where a key has many ([`Sorted`]). Undo keeps of a key that is touched the sessions that have changed since the mark.
//!
//! When the watermark comes only keys are looked at that may have a session behind it, by a heap of ends in which a key stands once: one whose sessions
//! grow is put back when it comes up. What an epoch costs is what has changed in it, however many sessions are open.
//!
//! Invariants: the sessions of a key ascend and more than the gap is between them; a key without sessions is kept only while it is touched, and is
//! among the `vacant`; a key with sessions is `due` by the end of its first one, and the heap has it there; while marked, a key is touched exactly if
//! undo has it, and its sessions are what they were but for those that begin where undo has something.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use arrow_array::RecordBatch;
use hashbrown::HashTable;
use penstock_bins::{Encoding, Extent};
use penstock_files::{Chunk, ChunkWriter, Entry};

use crate::acc::{At, Blobs, Input, Place, Wrapped};
use crate::column::{EVENT_TIME_LIMIT_US, EventTime};
use crate::error::{OpError, StateFault};
use crate::group::GroupBy;
use crate::key::Keys;
use crate::op::{Bins, KeyedOp, Output, Sink, bin_among, check_hashes, send, take_rows};
use crate::panes::CHUNK_BYTES;
use crate::record::Shape;
use crate::room::spare;
use crate::sorted::Sorted;
use crate::state::sessions_of;
use crate::window::{beyond, event_times};
use crate::wire::{Reader, put_blob, put_i64, put_u32};

const TAG: u8 = b'W';
const VERSION: u8 = 1;
/// Of the entries.
const ENTRIES_VERSION: u8 = 1;
/// Sessions of a key that lie side by side; of more, one that comes or goes moves so many at most.
const MANY: usize = if cfg!(test) { 4 } else { 64 };

/// An open session: its rows are from `first` to `last`.
#[derive(Clone)]
pub(crate) struct Session {
    pub(crate) first: i64,
    pub(crate) last: i64,
    words: Box<[u64]>,
    blobs: Blobs,
}

impl Session {
    /// Adds the accumulators at `from` of `words`.
    fn add(&mut self, shape: &Shape, (words, blobs): (&[u64], &Blobs), from: u32) -> Result<(), (usize, Wrapped)> {
        let stride = self.words.len();
        for (index, (kind, offset)) in shape.cells().enumerate() {
            let place = Place { kind, stride, offset };
            let merged = place.merge(&mut self.words, &mut self.blobs, (words, blobs), &[from], &[0]);
            merged.map_err(|wrapped| (index, wrapped))?;
        }
        Ok(())
    }

    fn bytes(&self) -> usize {
        size_of::<Self>() + self.words.len() * 8 + self.blobs.heap_bytes()
    }
}

/// The open sessions of a key.
type Open = Sorted<Session, MANY>;

fn bytes_of(sessions: &Open) -> usize {
    sessions.iter().map(Session::bytes).sum()
}

/// What began at a time when the epoch was marked; none where nothing did.
struct Was {
    first: i64,
    session: Option<Session>,
}

/// Of a key what was there at the mark where something has changed since, by time.
type Changed = Sorted<Was, MANY>;

/// Keeps what was there, if that is not known yet.
fn keep(changed: &mut Option<&mut Changed>, first: i64, session: impl FnOnce() -> Option<Session>) {
    if let Some(changed) = changed
        && let Err(place) = changed.search(|was| was.first.cmp(&first))
    {
        changed.insert(place, Was { first, session: session() });
    }
}

/// What a key is found by: its hash, whether it is the null, and its bytes, if it has any beside its hash.
type Name<'a> = (u64, bool, &'a [u8]);

/// Hashes of one bin begin alike, and by how they begin a table tells keys apart without reading them.
fn spread(hash: u64) -> u64 {
    hash.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Of a row of a block. A null has no bytes: those that lie under it say nothing.
fn name_of<'a>(keys: &'a Keys, hashes: &[u64], row: usize) -> Name<'a> {
    let null = keys.is_null(row);
    (hashes[row], null, if null { &[] } else { keys.bytes(row) })
}

struct Key {
    hash: u64,
    null: bool,
    name: Box<[u8]>,
    open: Open,
    touched: bool,
    /// Its end in the heap; `i64::MAX` when it is not there. Others that the heap has of its place are of before.
    due: i64,
}

/// The native state of one bin under sessions.
pub(crate) struct Sessions {
    shape: Box<Shape>,
    gap_us: i64,
    fired: i64,
    /// When keys may have a session that is over, with their places.
    ends: BinaryHeap<Reverse<(i64, u32)>>,
    /// Places of keys that have no sessions, or had none.
    vacant: Vec<u32>,
    index: HashTable<u32>,
    keys: Vec<Key>,
    /// Keys with sessions.
    live: usize,
    bytes: usize,
    undo: Option<Box<Undo>>,
}

#[derive(Default)]
struct Undo {
    fired: i64,
    /// Of the keys that are touched what they were, by their place.
    saved: BTreeMap<u32, Changed>,
}

/// How far an encoding is.
#[derive(Default)]
struct Progress {
    rows: usize,
    told: bool,
    begun: bool,
    changes: usize,
}

impl Sessions {
    pub(crate) fn new(shape: Shape, gap_us: i64) -> Self {
        Self {
            shape: Box::new(shape),
            gap_us,
            fired: i64::MIN,
            ends: BinaryHeap::new(),
            vacant: Vec::new(),
            index: HashTable::new(),
            keys: Vec::new(),
            live: 0,
            bytes: 0,
            undo: None,
        }
    }

    /// Words of a session's accumulators.
    fn width(&self) -> usize {
        self.shape.accs.iter().map(|kind| kind.words()).sum()
    }

    fn find(&self, (hash, null, name): Name<'_>) -> Option<usize> {
        let keys = &self.keys;
        let same = |at: &u32| {
            let key = &keys[*at as usize];
            key.hash == hash && key.null == null && *key.name == *name
        };
        self.index.find(spread(hash), same).map(|at| *at as usize)
    }

    /// Where a key is kept; a new one is made.
    fn place(&mut self, of: Name<'_>) -> usize {
        self.find(of).unwrap_or_else(|| {
            let (hash, null, name) = of;
            let at = u32::try_from(self.keys.len()).expect("a bin has less than 2^32 keys");
            self.keys.push(Key { hash, null, name: name.into(), open: Open::default(), touched: false, due: i64::MAX });
            self.vacant.push(at);
            self.bytes += size_of::<Key>() + name.len();
            let keys = &self.keys;
            self.index.insert_unique(spread(hash), at, |at| spread(keys[*at as usize].hash));
            at as usize
        })
    }

    /// Changes sessions of a key, and keeps count. `change` is to [keep] what was there, if that is asked for; what it says beside is what it has
    /// changed: bytes of sessions before, and after.
    ///
    /// Cost: that of what changes, and a place in the heap where the first session of the key ends earlier now.
    fn change<T>(&mut self, at: usize, change: impl FnOnce(&mut Open, Option<&mut Changed>) -> (T, usize, usize)) -> T {
        let key = &mut self.keys[at];
        let changed = self.undo.as_mut().map(|undo| {
            key.touched = true;
            undo.saved.entry(at as u32).or_default()
        });
        let before = !key.open.is_empty();
        let (done, gone, come) = change(&mut key.open, changed);
        self.bytes = self.bytes + come - gone;
        self.live = self.live + usize::from(!key.open.is_empty()) - usize::from(before);
        if before && key.open.is_empty() {
            self.vacant.push(at as u32);
        }
        self.expect(at);
        done
    }

    /// Puts a key into the heap where it stands nowhere, or later than its first session ends.
    fn expect(&mut self, at: usize) {
        let key = &mut self.keys[at];
        if let Some(end) = key.open.first().map(|first| first.last + self.gap_us).filter(|end| *end < key.due) {
            key.due = end;
            self.ends.push(Reverse((end, at as u32)));
        }
    }

    /// Drops keys without sessions; their places are taken by others, so nothing may be touched.
    fn purge(&mut self) {
        let mut vacant = std::mem::take(&mut self.vacant);
        // The last one takes the place of one that goes: from behind, no place that is still to be looked at changes.
        vacant.sort_unstable_by_key(|at| Reverse(*at));
        vacant.dedup();
        for at in vacant.drain(..).map(|at| at as usize) {
            if !self.keys[at].open.is_empty() {
                continue;
            }
            let hash = self.keys[at].hash;
            if let Ok(entry) = self.index.find_entry(spread(hash), |other| *other == at as u32) {
                entry.remove();
            }
            let key = self.keys.swap_remove(at);
            self.bytes -= size_of::<Key>() + key.name.len();
            if let Some(moved) = self.keys.get(at) {
                let last = self.keys.len() as u32;
                if let Some(entry) = self.index.find_mut(spread(moved.hash), |other| *other == last) {
                    *entry = at as u32;
                }
                self.ends.push(Reverse((moved.due, at as u32)));
            }
        }
        self.vacant = vacant;
        // What the heap has of keys that are elsewhere, or gone, comes up late or never.
        if self.ends.len() > 2 * self.keys.len() + 64 {
            let all = self.keys.iter().zip(0..).map(|(key, at)| Reverse((key.due, at)));
            self.ends = all.collect();
        }
        if let Some(room) = spare(self.keys.len(), self.keys.capacity()) {
            self.keys.shrink_to(room);
            let keys = &self.keys;
            self.index.shrink_to(room, |at| spread(keys[*at as usize].hash));
            self.ends.shrink_to(2 * room);
            self.vacant = Vec::new();
        }
    }

    /// Merges a session of a block, whose accumulators are at `from` of `words`, into those of its key. `Err` names the accumulator that wrapped.
    fn merge(
        &mut self,
        of: Name<'_>,
        (first, last): (i64, i64),
        from: u32,
        (words, blobs): (&[u64], &Blobs),
    ) -> Result<(), (usize, Wrapped)> {
        let at = self.place(of);
        let (shape, gap, width) = (self.shape.clone(), self.gap_us, self.width());
        self.change(at, |open, mut changed| {
            let begin = open.partition_point(|one| first - one.last > gap);
            let end = open.partition_point_from(begin, |one| one.first - last <= gap);
            if begin == end {
                let mut session = Session { first, last, words: vec![0; width].into(), blobs: Blobs::default() };
                let done = session.add(&shape, (words, blobs), from);
                keep(&mut changed, first, || None);
                let come = session.bytes();
                open.insert(begin, session);
                return (done, 0, come);
            }
            let mut others = Vec::new();
            open.cut(open.behind(begin)..end, |other| others.push(other));
            // Where some go, others move.
            let begin = if others.is_empty() { begin } else { open.partition_point(|one| first - one.last > gap) };
            let session = &mut open[begin];
            let mut gone = session.bytes();
            keep(&mut changed, session.first, || Some(session.clone()));
            let mut done = Ok(());
            for other in others {
                gone += other.bytes();
                done = done.and(session.add(&shape, (&other.words, &other.blobs), 0));
                session.last = session.last.max(other.last);
                keep(&mut changed, other.first, || Some(other));
            }
            done = done.and(session.add(&shape, (words, blobs), from));
            session.first = session.first.min(first);
            session.last = session.last.max(last);
            keep(&mut changed, session.first, || None);
            (done, gone, session.bytes())
        })
    }

    /// Gives the sessions that end before a watermark and drops them.
    fn fire(
        &mut self,
        watermark: i64,
        mut give: impl FnMut(&Session, Name<'_>) -> Result<(), OpError>,
    ) -> Result<(), OpError> {
        self.fired = self.fired.max(watermark);
        let gap = self.gap_us;
        while let Some(Reverse((end, at))) = self.ends.peek().copied().filter(|Reverse((end, _))| *end < watermark) {
            let at = at as usize;
            if self.keys.get(at).is_some_and(|key| key.due == end) {
                let key = &self.keys[at];
                let over = key.open.partition_point(|session| session.last + gap < watermark);
                for (_, session) in key.open.iter_from(0).take_while(|(place, _)| *place < over) {
                    give(session, (key.hash, key.null, &key.name))?;
                }
                self.keys[at].due = i64::MAX;
                self.ends.pop();
                if over > 0 {
                    self.change(at, |open, mut changed| {
                        let mut gone = 0;
                        open.cut(0..over, |session| {
                            gone += session.bytes();
                            keep(&mut changed, session.first, || Some(session));
                        });
                        ((), gone, 0)
                    });
                }
                self.expect(at);
            } else {
                self.ends.pop();
            }
        }
        if self.undo.is_none() {
            self.purge();
        }
        Ok(())
    }

    /// The bytes of a key's name and of its sessions, as entries and rows have them.
    fn put(&self, key: &Key, name: &mut Vec<u8>, value: &mut Vec<u8>) {
        name.clear();
        value.clear();
        name.push(u8::from(key.null));
        name.extend_from_slice(&key.name);
        put_u32(value, u32::try_from(key.open.len()).expect("fewer than 2^32 sessions of a key"));
        for session in key.open.iter() {
            put_i64(value, session.first);
            put_i64(value, session.last);
            for (kind, at) in self.shape.cells() {
                for (index, word) in session.words[at..at + kind.words()].iter().enumerate() {
                    let is_number = kind.has_blob() && index == 1;
                    put_i64(value, if is_number { i64::from(*word != 0) } else { *word as i64 });
                }
                if kind.has_blob() && session.words[at + 1] != 0 {
                    put_blob(value, kind.pack(session.blobs.get(session.words[at + 1])));
                }
            }
        }
    }

    /// The sessions of a key as they were written.
    fn read(&self, value: &[u8]) -> Result<Open, StateFault> {
        let corrupt = |what| Err(StateFault::Corrupt { what });
        let mut reader = Reader::new(value);
        let (count, mut open) = (reader.u32()?, Open::default());
        for _ in 0..count {
            let (first, last) = (reader.i64()?, reader.i64()?);
            let far = EVENT_TIME_LIMIT_US * 2;
            let follows = open.last().is_none_or(|before: &Session| first.saturating_sub(before.last) > self.gap_us);
            if first > last || !follows || first < -far || last > far {
                return corrupt("the times of a session");
            }
            let mut session = Session { first, last, words: vec![0; self.width()].into(), blobs: Blobs::default() };
            for (kind, at) in self.shape.cells() {
                let cell = &mut session.words[at..at + kind.words()];
                for word in cell.iter_mut() {
                    *word = reader.i64()? as u64;
                }
                if !kind.has_blob() {
                    continue;
                }
                if cell[1] != u64::from(cell[0] > 0) {
                    return corrupt("the values of a session");
                }
                if std::mem::take(&mut cell[1]) != 0 {
                    let Some(blob) = kind.unpack(cell, reader.blob()?) else {
                        return corrupt("what a session has gathered");
                    };
                    session.blobs.put(&mut cell[1], &blob);
                }
            }
            open.insert(open.end(), session);
        }
        reader.finish()?;
        if open.is_empty() { corrupt("a key without sessions") } else { Ok(open) }
    }

    fn name<'a>(&self, hash: u64, key: &'a [u8]) -> Result<Name<'a>, StateFault> {
        let null = match key.first() {
            Some(0) => false,
            // Early releases wrote the bytes that lay under a null, too.
            Some(1) if self.shape.key.has_null() => return Ok((hash, true, &[])),
            _ => return Err(StateFault::Corrupt { what: "the key of a session" }),
        };
        match key.len() > 1 && !self.shape.key.has_bytes() {
            true => Err(StateFault::Corrupt { what: "the key of a session" }),
            false => Ok((hash, null, &key[1..])),
        }
    }

    fn shape_bytes(&self, version: u8) -> Vec<u8> {
        let mut shape = vec![TAG, version, self.shape.key as u8];
        put_i64(&mut shape, self.gap_us);
        shape.extend(self.shape.accs.iter().map(|kind| kind.byte()));
        shape
    }

    /// The next chunk; none after the last.
    pub(crate) fn encode(&self, encoding: &mut Encoding) -> Option<Vec<u8>> {
        let extent = encoding.extent();
        let place = encoding.place(Progress::default);
        match (extent, &self.undo) {
            (Extent::All, _) => self.encode_rows(place, false),
            (Extent::Marked, Some(_)) => self.encode_rows(place, true).or_else(|| self.encode_changes(place, false)),
            // Never marked: all has changed.
            (Extent::Marked, None) | (Extent::Changed, _) => self.encode_changes(place, self.undo.is_none()),
            (Extent::Anew, _) => self.encode_changes(place, true),
        }
    }

    /// The next chunk of keys, of all or of those that have not changed.
    fn encode_rows(&self, place: &mut Progress, same: bool) -> Option<Vec<u8>> {
        let mut out = Vec::new();
        put_blob(&mut out, &self.shape_bytes(VERSION));
        out.splice(0..0, [TAG]);
        put_i64(&mut out, self.fired);
        let empty = out.len();
        let (mut name, mut value) = (Vec::new(), Vec::new());
        while let Some(key) = self.keys.get(place.rows) {
            let left_out = key.open.is_empty() || same && key.touched;
            if !left_out {
                self.put(key, &mut name, &mut value);
                if out.len() > empty && out.len() + name.len() + value.len() + 16 > CHUNK_BYTES {
                    break;
                }
                put_i64(&mut out, key.hash as i64);
                put_blob(&mut out, &name);
                put_blob(&mut out, &value);
            }
            place.rows += 1;
        }
        let tells = !std::mem::replace(&mut place.told, true) && !same && self.fired > i64::MIN;
        (out.len() > empty || tells).then_some(out)
    }

    /// The next chunk of entries, of all keys or of those that have changed.
    fn encode_changes(&self, place: &mut Progress, all: bool) -> Option<Vec<u8>> {
        let mut writer = ChunkWriter::new(&self.shape_bytes(ENTRIES_VERSION));
        let (mut name, mut value) = (Vec::new(), Vec::new());
        let begin = place.changes as u32;
        let mut touched = self.undo.iter().flat_map(move |undo| undo.saved.range(begin..)).map(|(at, _)| *at);
        let mut next = |from: usize| match all {
            true => (from..self.keys.len()).find(|at| !self.keys[*at].open.is_empty()),
            false => touched.next().map(|at| at as usize),
        };
        while let Some(at) = next(place.changes) {
            if writer.len() >= CHUNK_BYTES {
                place.changes = at;
                break;
            }
            let key = &self.keys[at];
            if !std::mem::replace(&mut place.begun, true) {
                writer.push(Entry::Shared { value: &self.fired.to_le_bytes() });
            }
            self.put(key, &mut name, &mut value);
            writer.push(match key.open.is_empty() {
                true => Entry::Gone { hash: key.hash, key: &name },
                false => Entry::Put { hash: key.hash, key: &name, value: &value },
            });
            place.changes = at + 1;
        }
        (!writer.is_empty()).then(|| writer.finish())
    }

    fn is_mine(&self, shape: &[u8], version: u8) -> Result<(), StateFault> {
        if *shape == *self.shape_bytes(version) {
            return Ok(());
        }
        Err(match shape {
            [TAG, found, ..] if *found > version => StateFault::Version { found: *found, supported: version },
            [TAG, ..] => StateFault::Shape { what: "the key, the gap or the aggregates" },
            _ => StateFault::Shape { what: "not the state of sessions" },
        })
    }

    /// Takes one chunk of keys that have not changed. What has come so far becomes the state that a rollback returns to.
    pub(crate) fn absorb(&mut self, chunk: &[u8]) -> Result<(), StateFault> {
        let mut reader = Reader::new(chunk);
        if reader.u8()? != TAG {
            return Err(StateFault::Shape { what: "not the state of sessions" });
        }
        self.is_mine(reader.blob()?, VERSION)?;
        let (fired, mut keys) = (reader.i64()?, Vec::new());
        while !reader.is_empty() {
            let hash = reader.i64()? as u64;
            keys.push((self.name(hash, reader.blob()?)?, self.read(reader.blob()?)?));
        }
        if keys.iter().any(|(name, _)| self.find(*name).is_some_and(|at| !self.keys[at].open.is_empty())) {
            return Err(StateFault::Corrupt { what: "a key comes twice" });
        }
        for (name, open) in keys {
            self.set(name, open, false);
        }
        self.fired = self.fired.max(fired);
        if let Some(undo) = &mut self.undo {
            undo.fired = self.fired;
        }
        Ok(())
    }

    /// Gives a key these sessions, which undone it keeps; they count as changed or not.
    fn set(&mut self, name: Name<'_>, open: Open, changed: bool) {
        let at = self.place(name);
        self.change(at, |now, _| {
            let (gone, come) = (bytes_of(now), bytes_of(&open));
            *now = open;
            ((), gone, come)
        });
        if let Some(undo) = &mut self.undo {
            self.keys[at].touched = changed;
            match changed {
                true => _ = undo.saved.insert(at as u32, Changed::default()),
                false => _ = undo.saved.remove(&(at as u32)),
            }
        }
    }

    /// Takes one chunk of entries.
    pub(crate) fn absorb_changes(&mut self, chunk: &[u8]) -> Result<(), StateFault> {
        let chunk = Chunk::parse(chunk)?;
        self.is_mine(chunk.shape(), ENTRIES_VERSION)?;
        // Read before anything is taken.
        let (mut fired, mut keys) = (None, Vec::new());
        for entry in chunk.entries() {
            match entry? {
                Entry::Put { hash, key, value } => keys.push((self.name(hash, key)?, self.read(value)?)),
                Entry::Gone { hash, key } => keys.push((self.name(hash, key)?, Open::default())),
                Entry::Shared { value } => {
                    let mut reader = Reader::new(value);
                    fired = fired.max(Some(reader.i64()?));
                    reader.finish()?;
                }
                Entry::GoneAll { .. } => {
                    return Err(StateFault::Corrupt { what: "an entry that sessions do not make" });
                }
            }
        }
        for (name, open) in keys {
            self.set(name, open, true);
        }
        if let Some(fired) = fired {
            self.fired = self.fired.max(fired);
            self.undo.iter_mut().for_each(|undo| undo.fired = self.fired);
        }
        if self.undo.is_none() {
            self.purge();
        }
        Ok(())
    }

    pub(crate) fn fired(&self) -> i64 {
        self.fired
    }

    fn set_fired(&mut self, fired: i64) {
        self.fired = self.fired.max(fired);
    }

    pub(crate) fn bytes(&self) -> usize {
        let room = (self.keys.capacity() - self.keys.len()) * size_of::<Key>() + 4 * self.vacant.capacity();
        self.bytes + room + self.index.allocation_size() + 16 * self.ends.capacity()
    }

    /// Keys with open sessions.
    pub(crate) fn keys(&self) -> usize {
        self.live
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.live == 0
    }

    pub(crate) fn mark(&mut self) {
        self.settle();
        self.undo = Some(Box::new(Undo { fired: self.fired, saved: BTreeMap::new() }));
    }

    /// Keeps no undo until the next mark.
    pub(crate) fn settle(&mut self) {
        if let Some(undo) = self.undo.take() {
            undo.saved.keys().for_each(|at| self.keys[*at as usize].touched = false);
        }
        self.purge();
    }

    pub(crate) fn rollback(&mut self) {
        let Some(undo) = self.undo.take() else {
            // Never marked: back to how it was made.
            *self = Self::new((*self.shape).clone(), self.gap_us);
            return;
        };
        self.fired = undo.fired;
        for (at, mut changed) in undo.saved {
            self.change(at as usize, |open, _| {
                let (mut gone, mut come) = (0, 0);
                changed.cut(0..changed.end(), |Was { first, session }| {
                    let place = open.search(|one| one.first.cmp(&first));
                    gone += place.map_or(0, |place| open[place].bytes());
                    come += session.as_ref().map_or(0, Session::bytes);
                    match (place, session) {
                        (Ok(place), Some(session)) => open[place] = session,
                        (Ok(place), None) => _ = open.remove(place),
                        (Err(place), Some(session)) => open.insert(place, session),
                        (Err(_), None) => {}
                    }
                });
                ((), gone, come)
            });
            self.keys[at as usize].touched = false;
        }
        self.purge();
        self.undo = Some(Box::new(Undo { fired: self.fired, saved: BTreeMap::new() }));
    }
}

/// See the module.
pub(crate) struct SessionOp {
    group_by: GroupBy,
    gap_us: i64,
    event_time: EventTime,
    watermark: i64,
}

/// A session of a block: the place of its first row among the sorted ones, and its times.
struct Local {
    at: usize,
    first: i64,
    last: i64,
}

impl SessionOp {
    pub(crate) fn new(group_by: GroupBy, gap_us: i64, event_time: EventTime) -> Self {
        Self { group_by, gap_us, event_time, watermark: i64::MIN }
    }

    fn is_late(&self, time: i64) -> bool {
        time.saturating_add(self.gap_us) <= self.watermark
    }

    /// The rows by key and time, which session each is of, and the sessions.
    fn cut(&self, keys: &Keys, hashes: &[u64], times: &[i64], mut rows: Vec<u32>) -> (Vec<u32>, Vec<u32>, Vec<Local>) {
        let name = |row: u32| name_of(keys, hashes, row as usize);
        rows.sort_unstable_by_key(|&row| (hashes[row as usize], times[row as usize], row));
        // Keys with one hash are seldom several: only then they are told apart by what they are.
        rows.chunk_by_mut(|&a, &b| hashes[a as usize] == hashes[b as usize]).for_each(|run| {
            if run.iter().any(|&row| name(row) != name(run[0])) {
                run.sort_by(|&a, &b| name(a).cmp(&name(b)));
            }
        });
        let (mut of, mut sessions) = (Vec::with_capacity(rows.len()), Vec::<Local>::new());
        for (at, &row) in rows.iter().enumerate() {
            let time = times[row as usize];
            match sessions.last_mut() {
                Some(session) if time - session.last <= self.gap_us && name(rows[at - 1]) == name(row) => {
                    session.last = time
                }
                _ => sessions.push(Local { at, first: time, last: time }),
            }
            of.push(sessions.len() as u32 - 1);
        }
        (rows, of, sessions)
    }

    /// The accumulators of the sessions of a block.
    fn fill(&self, inputs: &[Input], rows: &[u32], of: &[u32], count: usize) -> Result<(Vec<u64>, Blobs), OpError> {
        let shape = &self.group_by.shape;
        let width: usize = shape.accs.iter().map(|kind| kind.words()).sum();
        let (mut words, mut blobs) = (vec![0; width * count], Blobs::default());
        for (index, ((kind, offset), input)) in shape.cells().zip(inputs).enumerate() {
            let place = Place { kind, stride: width, offset };
            let mut cells = At { words: &mut words, at: of };
            place.update(&mut cells, &mut blobs, input, rows).map_err(|Wrapped| self.group_by.wrapped(index))?;
        }
        Ok((words, blobs))
    }
}

impl KeyedOp for SessionOp {
    fn apply(
        &mut self,
        bins: &mut dyn Bins,
        _: usize,
        batch: &RecordBatch,
        hashes: &[u64],
        out: &mut Sink<'_>,
    ) -> Result<(), OpError> {
        check_hashes(batch, hashes)?;
        let (times, mut late) = event_times(&self.group_by.step, &self.event_time, self.event_time.column, batch)?;
        let (keys, inputs) = self.group_by.prepare(batch)?;
        let cut = (bins.bits(), bins.is_split());
        let mut touched: Vec<u32> = hashes.iter().map(|&hash| bin_among(bins, cut, hash)).collect();
        touched.sort_unstable();
        touched.dedup();
        for bin in touched {
            // The watermark is one for all workers; a bin that has seen it proves it to a worker that joined later.
            self.watermark = self.watermark.max(sessions_of(bins, bin)?.fired());
        }
        let mut absent = std::mem::take(&mut late).into_iter().peekable();
        let mut rows = Vec::with_capacity(times.len());
        for (row, &time) in (0u32..).zip(&times) {
            let lost = absent.next_if_eq(&row).is_some() || self.is_late(time);
            if lost { late.push(row) } else { rows.push(row) }
        }
        let bounds = |time: i64| self.event_time.from_us(time).and(self.event_time.from_us(time + self.gap_us));
        if let Some(&row) = rows.iter().find(|&&row| bounds(times[row as usize]).is_none()) {
            return Err(beyond(&self.group_by.step, &self.event_time, self.event_time.column, batch, row));
        }
        let (rows, of, local) = self.cut(&keys, hashes, &times, rows);
        let (words, blobs) = self.fill(&inputs, &rows, &of, local.len())?;
        for (number, session) in (0u32..).zip(&local) {
            let row = rows[session.at] as usize;
            let bin = bin_among(bins, cut, hashes[row]);
            let state = sessions_of(bins, bin)?;
            state.set_fired(self.watermark);
            let name = name_of(&keys, hashes, row);
            let merged = state.merge(name, (session.first, session.last), number, (&words, &blobs));
            merged.map_err(|(at, _)| self.group_by.wrapped(at))?;
        }
        if !late.is_empty() {
            send(take_rows(batch, &late)?, Output::Late, out);
        }
        Ok(())
    }

    fn watermark(&mut self, bins: &mut dyn Bins, watermark_us: i64, out: &mut Sink<'_>) -> Result<(), OpError> {
        if watermark_us <= self.watermark {
            return Ok(());
        }
        self.watermark = watermark_us;
        let (group_by, gap_us) = (&mut self.group_by, self.gap_us);
        for bin in bins.held() {
            sessions_of(bins, bin)?.fire(watermark_us, |session, name| {
                let cells = (&*session.words, &session.blobs);
                group_by.emit_session((session.first, session.last + gap_us), name, cells, out)
            })?;
        }
        self.group_by.flush(out)
    }

    fn end_epoch(&mut self, _: &mut dyn Bins, _: &mut Sink<'_>) -> Result<(), OpError> {
        Ok(())
    }

    fn resume(&mut self, watermark_us: i64) {
        self.watermark = watermark_us;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use smallvec::smallvec;

    use super::*;
    use crate::acc::Kind;
    use crate::key::KeyKind;
    use crate::sorted::MOVED;

    const GAP: i64 = 5;

    fn sessions() -> Sessions {
        Sessions::new(Shape { key: KeyKind::Bytes, accs: smallvec![Kind::Rows], track: false }, GAP)
    }

    fn add(sessions: &mut Sessions, key: u8, at: i64) {
        let name = [key];
        assert!(sessions.merge((u64::from(key), false, &name), (at, at), 0, (&[1], &Blobs::default())).is_ok());
    }

    /// The last row of one, and how many there are.
    fn told(session: &Session) -> (i64, u64) {
        (session.last, session.words[0])
    }

    /// Sessions that are open, by key and first row.
    fn open(sessions: &Sessions) -> BTreeMap<(u8, i64), (i64, u64)> {
        let of = |key: &Key| key.open.iter().map(|one| ((key.name[0], one.first), told(one))).collect::<Vec<_>>();
        sessions.keys.iter().flat_map(of).collect()
    }

    fn check(sessions: &Sessions) {
        for (at, key) in (0..).zip(&sessions.keys) {
            let stands = sessions.ends.iter().any(|Reverse(one)| *one == (key.due, at));
            assert_eq!(stands, key.due < i64::MAX, "key {at}");
            match key.open.first() {
                Some(first) => assert!(key.due <= first.last + GAP),
                None => assert!(sessions.vacant.contains(&at)),
            }
        }
        let touched: Vec<u32> = (0..).zip(&sessions.keys).filter(|(_, key)| key.touched).map(|(at, _)| at).collect();
        assert!(sessions.undo.iter().flat_map(|undo| undo.saved.keys()).eq(&touched));
        let names: usize =
            sessions.keys.iter().map(|key| size_of::<Key>() + key.name.len() + bytes_of(&key.open)).sum();
        assert_eq!(sessions.bytes, names);
    }

    proptest! {
        #[test]
        fn what_is_over_is_found_without_a_look_at_what_is_not(
            steps in prop::collection::vec((0_u8..30, 0_u8..3, 0_i64..300), 1..300),
        ) {
            let (mut sessions, mut marked, mut watermark) = (sessions(), BTreeMap::new(), 0);
            for (what, key, at) in steps {
                match what {
                    0 => {
                        sessions.mark();
                        marked = open(&sessions);
                    }
                    1 => {
                        sessions.rollback();
                        prop_assert_eq!(&open(&sessions), &marked);
                    }
                    2 => {
                        sessions.settle();
                        marked = BTreeMap::new();
                    }
                    3 | 4 => {
                        watermark = watermark.max(at);
                        let mut expected = open(&sessions);
                        expected.retain(|_, (last, _)| *last + GAP < watermark);
                        let mut fired = BTreeMap::new();
                        sessions
                            .fire(watermark, |one, (_, _, name)| {
                                fired.insert((name[0], one.first), told(one));
                                Ok(())
                            })
                            .unwrap();
                        prop_assert_eq!(fired, expected);
                    }
                    _ => add(&mut sessions, key, at),
                }
                check(&sessions);
            }
        }
    }

    /// Numbers below one, each once, in no order.
    fn shuffled(count: i64) -> impl Iterator<Item = i64> {
        (0..count).map(move |number| number * 1_000_003 % count)
    }

    #[test]
    fn rows_of_a_key_may_come_in_any_order() {
        const COUNT: i64 = 20_000;
        for numbers in [&mut (0..COUNT) as &mut dyn Iterator<Item = i64>, &mut (0..COUNT).rev(), &mut shuffled(COUNT)] {
            let (mut sessions, before) = (sessions(), MOVED.get().0);
            numbers.for_each(|number| add(&mut sessions, 0, number * 10));
            let moved = MOVED.get().0 - before;
            assert!(moved <= 40 * COUNT as usize, "{moved} sessions were moved for {COUNT} rows");
            check(&sessions);
            assert!(open(&sessions).into_keys().eq((0..COUNT).map(|number| (0, number * 10))));
            // Each row that comes between two makes them one.
            let before = MOVED.get().0;
            shuffled(COUNT - 1).for_each(|number| add(&mut sessions, 0, number * 10 + 5));
            let moved = MOVED.get().0 - before;
            assert!(moved <= 40 * COUNT as usize, "{moved} sessions were moved where {COUNT} became one");
            assert_eq!(open(&sessions), BTreeMap::from([((0, 0), (COUNT * 10 - 10, 2 * COUNT as u64 - 1))]));
            check(&sessions);
        }
    }

    #[test]
    fn keys_that_have_gone_take_no_memory() {
        const COUNT: u64 = 20_000;
        let add = |sessions: &mut Sessions, keys: std::ops::Range<u64>, at: i64| {
            for key in keys {
                let name = (key, false, &key.to_le_bytes()[..]);
                assert!(sessions.merge(name, (at, at), 0, (&[1], &Blobs::default())).is_ok());
            }
        };
        let marks: [fn(&mut Sessions); 2] = [|_| (), Sessions::mark];
        for mark in marks {
            let mut sessions = sessions();
            mark(&mut sessions);
            add(&mut sessions, 0..COUNT, 0);
            add(&mut sessions, COUNT..COUNT + 100, 100);
            let most = sessions.bytes();
            mark(&mut sessions);
            let mut given = 0;
            let mut fire = |sessions: &mut Sessions, watermark: i64| {
                sessions.fire(watermark, |_, _| {
                    given += 1;
                    Ok(())
                })
            };
            fire(&mut sessions, 50).unwrap();
            // What was is known until it cannot come back.
            sessions.settle();
            check(&sessions);
            assert_eq!((sessions.keys(), sessions.keys.len()), (100, 100));
            assert!(sessions.keys.capacity() <= 1_000 && sessions.index.num_buckets() <= 1_000);
            assert!(sessions.bytes() < most / 20, "{} of {most} bytes are left", sessions.bytes());
            fire(&mut sessions, 200).unwrap();
            assert!(sessions.is_empty() && given == COUNT + 100);
            assert!(sessions.bytes() < most / 20, "{} of {most} bytes are left of nothing", sessions.bytes());
        }
    }

    #[test]
    fn undo_keeps_the_sessions_that_change_and_not_those_of_their_key() {
        const COUNT: i64 = 5_000;
        let mut sessions = sessions();
        (0..COUNT).for_each(|number| add(&mut sessions, 0, number * 20));
        for number in shuffled(COUNT - 1).take(100) {
            sessions.mark();
            let before = open(&sessions);
            // One that is new, one that becomes longer, and two that become one.
            for time in [10, 4, 15] {
                add(&mut sessions, 0, number * 20 + time);
            }
            let undo = sessions.undo.as_ref().unwrap();
            let kept: usize = undo.saved.values().map(Sorted::len).sum();
            assert!(kept <= 4, "{kept} of {COUNT} sessions of a key are kept for 3 rows");
            sessions.rollback();
            assert_eq!(open(&sessions), before);
            add(&mut sessions, 0, number * 20 + 3);
        }
        check(&sessions);
    }

    #[test]
    fn an_epoch_looks_at_keys_that_come_up_alone() {
        let mut sessions = sessions();
        let of = |number: i64| number.to_le_bytes();
        for number in 0..10_000 {
            let name = of(number);
            let merged = sessions.merge((number as u64, false, &name), (number, number), 0, (&[1], &Blobs::default()));
            assert!(merged.is_ok());
        }
        assert_eq!(sessions.ends.len(), 10_000);
        for number in 0..1_000 {
            let mut fired = 0;
            sessions
                .fire(number + GAP + 1, |_, _| {
                    fired += 1;
                    Ok(())
                })
                .unwrap();
            assert_eq!(
                (fired, sessions.keys.len(), sessions.ends.peek().map(|Reverse((end, _))| *end)),
                (1, 9_999 - number as usize, Some(number + 1 + GAP))
            );
        }
        // Each key that has gone has another in its place, which stands in the heap twice: these are swept out.
        assert!(sessions.ends.len() <= 2 * 9_000 + 64);
    }
}
