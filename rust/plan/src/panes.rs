//! The native state of one bin under a windowed or running aggregate: tables by pane.
//!
//! A pane is a stretch of event time that no window cuts; a running aggregate has the single pane 0. Chunks carry one pane's slots each.
//! Undo: each table undoes itself; panes born since the mark go, panes dropped since come back.
//!
//! Windows that overlap much are [rolled](Panes::roll): the sum of the panes of the last window is kept, and the next one takes away what it does not hold and
//! adds what is new. That sum is no state: it is made again when a pane of it has changed, moved or come back. Where only the rows with most of a word are
//! wanted, it is kept in mind which these are as panes come and go, and searched for only when all of them have lost something.
//!
//! What has changed since the mark is told as entries. The key of a row begins with its pane, so that a pane goes with one entry: a varint
//! of its start (zigzag), 1 for the null key and else 0, and the bytes of the key, if it has any beside its hash.

mod live;

use std::collections::{HashMap, VecDeque};
use std::ops::Range;

use penstock_bins::{Encoding, Extent};
use penstock_files::{Chunk, ChunkWriter, Entry};

use self::live::Live;
use crate::common::{self, Common};
use crate::error::{OpError, StateFault};
use crate::group::GroupBy;
use crate::pool::{self, Pool};
use crate::record::Shape;
use crate::slots::Slots;
use crate::state::State;
use crate::table::{Row, Table};
use crate::wire::{Reader, put_i64, put_zigzag};

/// Chunks stay at or below this size, but for single keys that exceed it.
pub(crate) const CHUNK_BYTES: usize = 1 << 20;
pub(crate) const TAG: u8 = b'P';
const VERSION: u8 = 2;
/// Of the entries.
const ENTRIES_VERSION: u8 = 1;
const HEADER_BYTES: usize = 64;
/// A sum of fewer keys keeps those of which nothing is left.
const LEAST_SIFTED: usize = 32;

struct Pane {
    start: i64,
    table: Table,
    /// Whether it was born since the mark.
    fresh: bool,
}

/// See the module.
pub(crate) struct Panes {
    live: Live,
    /// In place of the panes while their rows are elsewhere. There is no undo then.
    lent: Option<Box<Lent>>,
    /// Windows that end at or before this have fired here, in microseconds.
    fired: i64,
    // Apart, so that what an update reads of thousands of bins fits into the caches.
    shape: Box<Shape>,
    undo: Option<Box<Undo>>,
    rolled: Option<Box<Rolled>>,
}

/// Where rows are lent to.
enum Lent {
    /// Those of the only pane, 0.
    Pool(pool::Lease),
    /// Those of all panes.
    Common(common::Lease<Panes>),
}

/// The sum of the panes in a stretch.
pub(crate) struct Rolled {
    sum: Table,
    within: Range<i64>,
    /// The word of which it is kept in mind which rows have most.
    word: Option<usize>,
    /// No row has more of it.
    most: u64,
    /// The positions of those that have as much; none when they must be searched.
    first: Vec<usize>,
    /// Keys when those of which nothing was left were last left out.
    kept: usize,
}

impl Lent {
    fn keys(&self) -> usize {
        match self {
            Self::Pool(lease) => lease.keys(),
            Self::Common(lease) => lease.keys(),
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Pool(lease) => lease.bytes(),
            Self::Common(lease) => lease.bytes(),
        }
    }
}

impl Rolled {
    fn new(shape: &Shape, start: i64, word: Option<usize>) -> Self {
        Self { sum: Table::new(shape), within: start..start, word, most: 0, first: Vec::new(), kept: LEAST_SIFTED }
    }

    pub(crate) fn sum(&self) -> &Table {
        &self.sum
    }

    /// What no row has more of in the word that is asked for.
    pub(crate) fn most(&self) -> u64 {
        self.most
    }

    /// Searches for the rows with most, unless they are known. `left` is as for [`Panes::roll`].
    pub(crate) fn search(&mut self, word: usize, left: usize) {
        // Of rows with nothing some may be left over.
        if self.first.is_empty() || self.most == 0 {
            self.most = self.sum.most(word, Some(left), &mut self.first);
        }
    }

    /// How much the rows with most have, and the positions that were found.
    pub(crate) fn first(&self) -> (u64, &[usize]) {
        (self.most, &self.first)
    }

    /// Adds a table.
    fn add(&mut self, group_by: &mut GroupBy, table: &Table) -> Result<(), OpError> {
        let size = self.sum.positions();
        self.sum.make_room(table.len());
        group_by.roll(&mut self.sum, table, false)?;
        if self.sum.positions() != size {
            self.first.clear();
        }
        let Some(word) = self.word else { return Ok(()) };
        for (from, at) in group_by.met() {
            let count = self.sum.row(at)[word];
            if count > self.most {
                self.most = count;
                self.first.clear();
                self.first.push(at);
            } else if count == self.most && !self.first.is_empty() && table.row(from)[word] > 0 {
                // It had less before, so it is not among them.
                self.first.push(at);
            }
        }
        Ok(())
    }

    /// Takes a table away that was added.
    fn part(&mut self, group_by: &mut GroupBy, table: &Table) -> Result<(), OpError> {
        let size = self.sum.positions();
        group_by.roll(&mut self.sum, table, true)?;
        // Rows that were left out come back, or might: room is made for all.
        if self.sum.positions() != size {
            self.first.clear();
        }
        if let Some(word) = self.word {
            let Self { sum, first, most, .. } = self;
            first.retain(|&at| sum.row(at)[word] == *most);
        }
        Ok(())
    }

    /// Leaves out rows of which nothing is left, where they may be half of all.
    fn sift(&mut self, left: usize) {
        if self.sum.len() > 2 * self.kept {
            self.sum.sift(left);
            self.first.clear();
            self.kept = self.sum.len().max(LEAST_SIFTED);
        }
    }
}

struct Undo {
    fired: i64,
    /// Whether windows have fired since the mark of which panes are left.
    spoke: bool,
    dropped: Vec<Pane>,
    /// Panes that were dropped since the mark where this state was before.
    gone: Vec<i64>,
}

/// How far an encoding is.
#[derive(Default)]
struct Place {
    /// The pane that is begun.
    pane: Option<i64>,
    /// What is left of it.
    left: VecDeque<Range<usize>>,
    /// Of a bin without panes: whether it was told what has fired.
    told: bool,
    changes: Changes,
}

/// How far the encoding of what has changed is.
#[derive(Default)]
struct Changes {
    begun: bool,
    /// Whether there is nothing to tell.
    none: bool,
    /// The pane that is begun.
    pane: Option<i64>,
    /// What is left of it.
    left: std::vec::IntoIter<u32>,
}

impl common::Lent for Panes {
    fn of(state: &mut State) -> Option<&mut Self> {
        state.panes_mut()
    }

    /// Where they have fired as far, and changes cannot be undone.
    fn lend(&mut self, common: &mut Common<Self>, shared: &common::Shared<Self>, bin: u32) {
        let fits = |all: &&mut Self| self.undo.is_none() && self.lent.is_none() && self.fired == all.fired;
        let Some(all) = common.whole().filter(fits) else { return };
        self.rolled = None;
        for Pane { start, table, .. } in self.live.take() {
            all.table_mut(start).copy_from(&table, table.taken());
        }
        common.admit(bin);
        self.lent = Some(Box::new(Lent::Common(common::Lease::new(shared, bin))));
    }

    fn divided(&self, bins: impl Iterator<Item = u32>, bin_of: impl Fn(u64) -> u32) -> HashMap<u32, Self> {
        let mut shares: HashMap<u32, Self> = bins.map(|bin| (bin, Self::new(Shape::clone(&self.shape)))).collect();
        shares.values_mut().for_each(|share| share.fired = self.fired);
        for Pane { start, table, .. } in self.live.iter() {
            for (bin, table) in table.divided(&self.shape, &bin_of) {
                let share = shares.get_mut(&bin).expect("rows are of bins that lend");
                share.live.add(std::iter::once(Pane { start: *start, table, fresh: false }));
            }
        }
        shares
    }

    fn rows(&self) -> usize {
        self.keys()
    }

    fn keys(&self) -> usize {
        Self::keys(self)
    }

    fn hashes(&self) -> impl Iterator<Item = u64> {
        self.live.iter().flat_map(|pane| pane.table.taken().map(|position| pane.table.hash_at(position)))
    }

    fn bytes(&self) -> usize {
        Self::bytes(self)
    }
}

impl Panes {
    pub(crate) fn new(shape: Shape) -> Self {
        Self { shape: Box::new(shape), fired: i64::MIN, live: Live::default(), lent: None, undo: None, rolled: None }
    }

    /// Lends the rows of pane 0 to a pool, as bin `bin` of it, where that is all there is; says whether it did.
    pub(crate) fn lend(&mut self, pool: &mut Pool, shared: &pool::Shared, bin: u32) -> bool {
        if self.undo.is_some() || self.lent.is_some() {
            return false;
        }
        let lent = match self.live.only() {
            Some(Pane { start: 0, table, .. }) => {
                table.lendable().is_some_and(|(rows, keys)| pool.borrow(bin, rows, keys))
            }
            None if self.live.is_empty() => {
                Table::new(&self.shape).lendable().is_some_and(|(rows, keys)| pool.borrow(bin, rows, keys))
            }
            _ => false,
        };
        if lent {
            self.live = Live::default();
            self.lent = Some(Box::new(Lent::Pool(pool::lease(shared, bin))));
        }
        lent
    }

    /// Whether panes of this shape can be lent: their keys are their hashes, and their values words.
    pub(crate) fn can_lend(shape: &Shape) -> bool {
        !shape.key.has_bytes() && !shape.track && shape.blobs().next().is_none()
    }

    #[cfg(test)]
    pub(crate) fn is_lent(&self) -> bool {
        self.lent.is_some()
    }

    /// Takes lent rows back.
    pub(crate) fn home(&mut self) {
        match self.lent.take().map(|lent| *lent) {
            Some(Lent::Pool(lease)) => {
                let table = lease.end(&self.shape);
                self.put_back(table);
            }
            Some(Lent::Common(lease)) => {
                let share = lease.end();
                (self.live, self.fired) = (share.live, share.fired);
            }
            None => {}
        }
    }

    /// The same for whoever has the lock of the pool.
    pub(crate) fn take_home(&mut self, pool: &mut Pool, shared: &pool::Shared) {
        match self.lent.take().map(|lent| *lent) {
            Some(Lent::Pool(lease)) => match lease.end_in(pool, shared, &self.shape) {
                Ok(table) => self.put_back(table),
                Err(lease) => self.lent = Some(Box::new(Lent::Pool(lease))),
            },
            other => self.lent = other.map(Box::new),
        }
    }

    fn put_back(&mut self, table: Table) {
        if table.len() > 0 {
            self.live.add(std::iter::once(Pane { start: 0, table, fresh: false }));
        }
    }

    /// These panes with a copy of the rows that are lent to a pool.
    fn whole(&self, lease: &pool::Lease) -> Self {
        let mut whole = Self::new(Shape::clone(&self.shape));
        whole.fired = self.fired;
        whole.put_back(lease.copy(&self.shape));
        whole
    }

    pub(crate) fn fired(&self) -> i64 {
        self.fired
    }

    pub(crate) fn set_fired(&mut self, fired: i64) {
        self.fired = self.fired.max(fired);
    }

    /// A window has fired that holds something.
    pub(crate) fn speak(&mut self) {
        self.undo.iter_mut().for_each(|undo| undo.spoke = true);
    }

    /// The table of a pane, made when there is none.
    #[inline]
    pub(crate) fn table_mut(&mut self, start: i64) -> &mut Table {
        if self.rolled.as_ref().is_some_and(|rolled| start < rolled.within.end) {
            self.rolled = None;
        }
        let Self { live, shape, undo, .. } = self;
        let pane = live.get_or_make(start, |last| {
            let mut table = Table::new(shape);
            // As many keys as in the one before.
            if let Some(last) = last {
                table.make_room(last.table.len());
            }
            Pane { start, table, fresh: undo.is_some() }
        });
        &mut pane.table
    }

    /// The table of a pane, when there is one.
    #[inline]
    pub(crate) fn table(&self, start: i64) -> Option<&Table> {
        Some(&self.live.get(start)?.table)
    }

    pub(crate) fn first_pane_at(&self, at_least: i64) -> Option<i64> {
        self.live.first_at(at_least)
    }

    pub(crate) fn range(&self, panes: Range<i64>) -> impl Iterator<Item = &Table> {
        self.live.range(panes).map(|pane| &pane.table)
    }

    /// Brings the sum of panes to those of a window that is not before the last one. `left` is the word of a row that is 0 where nothing is left of
    /// it: such rows may be among those of the sum. Of `word`, which must be the same each time, it is kept in mind which rows have most.
    pub(crate) fn roll(
        &mut self,
        group_by: &mut GroupBy,
        window: Range<i64>,
        left: usize,
        word: Option<usize>,
    ) -> Result<&mut Rolled, OpError> {
        let before = self.rolled.take().filter(|rolled| rolled.within.contains(&window.start));
        let mut rolled = before.unwrap_or_else(|| Box::new(Rolled::new(&self.shape, window.start, word)));
        self.leave(group_by, &mut rolled, window.start, left)?;
        self.range(rolled.within.end..window.end).try_for_each(|table| rolled.add(group_by, table))?;
        rolled.within = window;
        Ok(self.rolled.insert(rolled))
    }

    /// What no row of the last window that was rolled had more of.
    pub(crate) fn most(&self) -> u64 {
        self.rolled.as_ref().map_or(0, |rolled| rolled.most)
    }

    /// Takes the panes before `start` out of the sum.
    fn leave(&self, group_by: &mut GroupBy, rolled: &mut Rolled, start: i64, left: usize) -> Result<(), OpError> {
        self.range(rolled.within.start..start).try_for_each(|table| rolled.part(group_by, table))?;
        rolled.within.start = start;
        rolled.sift(left);
        Ok(())
    }

    /// Before panes go that are before `end`: takes them out of the sum, or forgets it where nothing would be left.
    pub(crate) fn roll_past(&mut self, group_by: &mut GroupBy, end: i64, left: usize) -> Result<(), OpError> {
        let more = self.live.last().is_some_and(|pane| pane.start >= end);
        if let Some(mut rolled) = self.rolled.take().filter(|rolled| more && end < rolled.within.end) {
            let start = end.max(rolled.within.start);
            self.leave(group_by, &mut rolled, start, left)?;
            self.rolled = Some(rolled);
        }
        Ok(())
    }

    pub(crate) fn existing_mut(&mut self, start: i64) -> Option<&mut Table> {
        self.rolled = None;
        Some(&mut self.live.get_mut(start)?.table)
    }

    /// Drops the panes before `end`.
    pub(crate) fn drop_before(&mut self, end: i64) {
        let gone = self.live.take_before(end);
        match &mut self.undo {
            Some(undo) => undo.dropped.extend(gone.filter(|pane| !pane.fresh)),
            None => gone.for_each(drop),
        }
    }

    /// The next chunk; none after the last.
    pub(crate) fn encode(&self, encoding: &mut Encoding) -> Option<Vec<u8>> {
        match self.lent.as_deref() {
            Some(Lent::Pool(lease)) => return self.whole(lease).encode(encoding),
            Some(Lent::Common(lease)) => return lease.shown(|share| share.encode(encoding)),
            None => {}
        }
        let extent = encoding.extent();
        let place = encoding.place(Place::default);
        let same = match (extent, &self.undo) {
            (Extent::All, _) => self.encode_rows(place, false),
            (Extent::Marked, Some(_)) => self.encode_rows(place, true),
            // Never marked: all has changed.
            (Extent::Marked, None) | (Extent::Changed | Extent::Anew, _) => None,
        };
        match extent {
            Extent::All => same,
            Extent::Anew => self.encode_changes(&mut place.changes, None),
            _ => same.or_else(|| self.encode_changes(&mut place.changes, self.undo.as_deref())),
        }
    }

    /// Rows of a pane that have changed since the mark, by what they are undone by; `None` for all.
    fn changed<'a>(undo: Option<&Undo>, pane: &'a Pane) -> Option<&'a Slots> {
        undo.filter(|_| !pane.fresh).and(pane.table.touched())
    }

    /// The next chunk of entries: what has changed by what it is undone by, or all.
    fn encode_changes(&self, place: &mut Changes, undo: Option<&Undo>) -> Option<Vec<u8>> {
        if place.none {
            return None;
        }
        let mut writer = ChunkWriter::new(&self.entries_shape());
        if !std::mem::replace(&mut place.begun, true) {
            let gone = undo
                .iter()
                .flat_map(|undo| undo.dropped.iter().map(|pane| pane.start).chain(undo.gone.iter().copied()));
            let gone: Vec<i64> = gone.collect();
            let is_touched =
                |pane| Self::changed(undo, pane).map_or(pane.table.len() > 0, |rows| !rows.list().is_empty());
            // Where no window with rows has fired, what has fired says nothing: a watermark that passes is no change of this bin.
            let fired = undo.is_some_and(|undo| undo.spoke) && !self.live.is_empty();
            if gone.is_empty() && !fired && !self.live.iter().any(is_touched) {
                place.none = true;
                return None;
            }
            writer.push(Entry::Shared { value: &self.fired.to_le_bytes() });
            for start in gone {
                let mut prefix = Vec::new();
                put_zigzag(&mut prefix, start);
                writer.push(Entry::GoneAll { prefix: &prefix });
            }
        }
        let (mut key, mut value) = (Vec::new(), Vec::new());
        loop {
            let Some(position) = place.left.next() else {
                let Some(pane) = self.live.behind(place.pane) else { break };
                place.pane = Some(pane.start);
                let mut positions = match Self::changed(undo, pane) {
                    Some(touched) => touched.list().to_vec(),
                    None => pane.table.taken().map(|position| position as u32).collect(),
                };
                positions.sort_unstable();
                place.left = positions.into_iter();
                continue;
            };
            let pane = self.begun(place.pane);
            key.clear();
            value.clear();
            put_zigzag(&mut key, pane.start);
            let hash = pane.table.put_row(position as usize, &mut key, &mut value);
            writer.push(Entry::Put { hash, key: &key, value: &value });
            if writer.len() >= CHUNK_BYTES - HEADER_BYTES {
                break;
            }
        }
        (!writer.is_empty()).then(|| writer.finish())
    }

    /// The pane that an encoding has begun: nothing changes meanwhile.
    fn begun(&self, start: Option<i64>) -> &Pane {
        start.and_then(|start| self.live.get(start)).expect("a pane that was begun is there")
    }

    fn entries_shape(&self) -> Vec<u8> {
        let mut shape = vec![TAG, ENTRIES_VERSION, self.shape.key as u8, u8::from(self.shape.track)];
        shape.extend(self.shape.accs.iter().map(|kind| kind.byte()));
        shape
    }

    /// The next chunk of rows, of all or of those that have not changed.
    fn encode_rows(&self, place: &mut Place, same: bool) -> Option<Vec<u8>> {
        let header = |pane: i64| {
            let mut out = Vec::new();
            out.extend_from_slice(&[TAG, VERSION, self.shape.key as u8, u8::from(self.shape.track)]);
            out.push(u8::try_from(self.shape.accs.len()).expect("a plan has at most 255 aggregates in a step"));
            out.extend(self.shape.accs.iter().map(|kind| kind.byte()));
            put_i64(&mut out, self.fired);
            put_i64(&mut out, pane);
            out
        };
        if self.live.is_empty() && self.fired > i64::MIN && !std::mem::replace(&mut place.told, true) {
            let mut out = header(0);
            Table::new(&self.shape).encode(0..0, None, &mut out);
            return Some(out);
        }
        loop {
            if let Some(positions) = place.left.pop_front() {
                let pane = self.begun(place.pane);
                let mut out = header(pane.start);
                let without = Self::changed(self.undo.as_deref(), pane).filter(|_| same);
                match pane.table.encode(positions, without, &mut out) {
                    0 => continue,
                    _ => return Some(out),
                }
            }
            let pane = self.live.behind(place.pane)?;
            place.pane = Some(pane.start);
            if same && Self::changed(self.undo.as_deref(), pane).is_none() {
                continue;
            }
            place.left = pane.table.cut(CHUNK_BYTES - HEADER_BYTES - self.shape.accs.len()).into();
        }
    }

    /// Takes one chunk of entries.
    pub(crate) fn absorb_changes(&mut self, chunk: &[u8]) -> Result<(), StateFault> {
        self.rolled = None;
        let chunk = Chunk::parse(chunk)?;
        if *chunk.shape() != *self.entries_shape() {
            return Err(match chunk.shape() {
                [TAG, found, ..] if *found > ENTRIES_VERSION => {
                    StateFault::Version { found: *found, supported: ENTRIES_VERSION }
                }
                [TAG, ..] => StateFault::Shape { what: "the key, the aggregates or the emit mode" },
                _ => StateFault::Shape { what: "not the state of an aggregate" },
            });
        }
        // Read before anything is taken.
        let (mut fired, mut gone, mut rows) = (None, Vec::new(), Vec::<(i64, Vec<Row<'_>>)>::new());
        for entry in chunk.entries() {
            match entry? {
                Entry::Put { hash, key, value } => {
                    let mut reader = Reader::new(key);
                    let pane = reader.zigzag()?;
                    let null = match reader.u8()? {
                        0 => false,
                        1 => true,
                        _ => return Err(StateFault::Corrupt { what: "the key of a row" }),
                    };
                    let row = Row { hash, null, key: reader.rest(), value };
                    match rows.last_mut().filter(|(last, _)| *last == pane) {
                        Some((_, rows)) => rows.push(row),
                        None => rows.push((pane, vec![row])),
                    }
                }
                Entry::GoneAll { prefix } if rows.is_empty() => {
                    let mut reader = Reader::new(prefix);
                    gone.push(reader.zigzag()?);
                    reader.finish()?;
                }
                Entry::Shared { value } => {
                    let mut reader = Reader::new(value);
                    fired = fired.max(Some(reader.i64()?));
                    reader.finish()?;
                }
                Entry::Gone { .. } | Entry::GoneAll { .. } => {
                    return Err(StateFault::Corrupt { what: "an entry that an aggregate does not make" });
                }
            }
        }
        for start in gone {
            self.live.remove(start);
            self.undo.iter_mut().for_each(|undo| undo.gone.push(start));
        }
        if let Some(fired) = fired {
            self.fired = self.fired.max(fired);
            self.undo.iter_mut().for_each(|undo| undo.fired = self.fired);
        }
        for (start, rows) in rows {
            let Self { live, shape, undo, .. } = self;
            let pane = live.get_or_make(start, |_| {
                let mut table = Table::new(shape);
                if undo.is_some() {
                    table.mark();
                }
                Pane { start, table, fresh: false }
            });
            pane.table.take_rows(&rows)?;
        }
        Ok(())
    }

    /// Takes one chunk of rows. What has come so far becomes the state that a rollback returns to.
    pub(crate) fn absorb(&mut self, chunk: &[u8]) -> Result<(), StateFault> {
        self.rolled = None;
        let mut reader = Reader::new(chunk);
        if reader.u8()? != TAG {
            return Err(StateFault::Shape { what: "not the state of an aggregate" });
        }
        let version = reader.u8()?;
        if version != VERSION {
            return Err(StateFault::Version { found: version, supported: VERSION });
        }
        if reader.u8()? != self.shape.key as u8 {
            return Err(StateFault::Shape { what: "the key" });
        }
        if reader.u8()? != u8::from(self.shape.track) {
            return Err(StateFault::Shape { what: "the emit mode" });
        }
        let count = usize::from(reader.u8()?);
        if !reader.take(count)?.iter().copied().eq(self.shape.accs.iter().map(|kind| kind.byte())) {
            return Err(StateFault::Shape { what: "the aggregates" });
        }
        let fired = reader.i64()?;
        let start = reader.i64()?;
        match self.live.get_mut(start) {
            Some(pane) => pane.table.absorb(&self.shape, &mut reader)?,
            None => {
                let mut table = Table::new(&self.shape);
                table.absorb(&self.shape, &mut reader)?;
                if table.len() > 0 {
                    if self.undo.is_some() {
                        table.mark();
                    }
                    self.live.add(std::iter::once(Pane { start, table, fresh: false }));
                }
            }
        }
        self.fired = self.fired.max(fired);
        if let Some(undo) = &mut self.undo {
            undo.fired = self.fired;
        }
        Ok(())
    }

    pub(crate) fn bytes(&self) -> usize {
        let dropped = self.undo.as_ref().map_or(0, |undo| undo.dropped.iter().map(|pane| pane.table.bytes()).sum());
        let lent = self.lent.as_ref().map_or(0, |lent| lent.bytes());
        let rolled = self.rolled.as_ref().map_or(0, |rolled| rolled.sum.bytes());
        self.live.iter().map(|pane| pane.table.bytes()).sum::<usize>() + dropped + lent + rolled
    }

    /// Keys held, counted once per pane.
    pub(crate) fn keys(&self) -> usize {
        let lent = self.lent.as_ref().map_or(0, |lent| lent.keys());
        self.live.iter().map(|pane| pane.table.len()).sum::<usize>() + lent
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.live.is_empty() && self.lent.as_ref().is_none_or(|lent| lent.keys() == 0)
    }

    pub(crate) fn mark(&mut self) {
        self.undo = Some(Box::new(Undo { fired: self.fired, spoke: false, dropped: Vec::new(), gone: Vec::new() }));
        for pane in self.live.iter_mut() {
            pane.fresh = false;
            pane.table.mark();
        }
    }

    /// Keeps no undo until the next mark.
    pub(crate) fn settle(&mut self) {
        self.undo = None;
        self.live.iter_mut().for_each(|pane| pane.table.keep_no_undo());
    }

    pub(crate) fn rollback(&mut self) {
        self.rolled = None;
        let Some(undo) = &mut self.undo else {
            // Never marked: back to how it was made.
            self.fired = i64::MIN;
            self.live = Live::default();
            return;
        };
        self.fired = undo.fired;
        undo.spoke = false;
        undo.gone.clear();
        self.live.retain(|pane| !pane.fresh);
        self.live.add(undo.dropped.drain(..));
        self.live.iter_mut().for_each(|pane| pane.table.rollback());
    }
}
