//! Rank with ties: of each group the rows whose rank by a column is at most n, where rank = 1 + number of strictly better rows.
//!
//! A group is a window, a set of column values or everything. Groups that carry a window's end fire when the watermark reaches it, others
//! at the end of input. Those of sessions come when it has passed their end, and fire with it. Nulls rank last; floats rank in their total order.
//!
//! A bin keeps only candidates: rows that can still be in the top n, as arrow-row bytes. A block is cut to its own candidates before it is
//! exchanged, so a window of many keys costs the network n rows per worker; raw rows before windows are assigned to them, but for those that may be late. Ties at rank n are all kept; they bound memory.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::ops::Bound;
use std::sync::Arc;

use arrow_array::{Array, ArrayRef, RecordBatch, RecordBatchOptions};
use arrow_row::{RowConverter, Rows, SortField};
use arrow_schema::{DataType, Schema, SchemaRef, SortOptions};

use penstock_bins::{Encoding, Extent};
use penstock_files::{Chunk, ChunkWriter, Entry};
use smallvec::SmallVec;

use crate::column::{Codes, EventTime, codes, one_zero};
use crate::error::{OpError, StateFault, StepName};
use crate::hash::hash_bytes;
use crate::op::{
    BLOCK_BYTES, BLOCK_ROWS, Bins, KeyedOp, Output, Sink, bin_among, check_hashes, conform, send, take_rows,
};
use crate::panes::CHUNK_BYTES;
use crate::row_format;
use crate::state::groups_of;
use crate::window::{Cut, Windows, beyond, event_times};
use crate::wire::{Reader, put_blob, put_i64};

const TAG: u8 = b'T';
const VERSION: u8 = 2;
/// Of the entries.
const ENTRIES_VERSION: u8 = 1;

/// Columns of a window's bounds before those of the rows in it.
const BOUNDS: usize = 2;

/// What a top step ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct Top {
    /// Ranks up to this are kept; at least 1.
    pub n: usize,
    /// The ranked column of the routed schema.
    pub by: usize,
    /// Whether the greatest value has rank 1.
    pub descending: bool,
    /// Columns of the routed schema that name the group; none: one group.
    pub group: Vec<usize>,
    /// The column that holds the group's window end, when it has one, and how to read it.
    pub end: Option<EventTime>,
    /// The windows that raw rows are assigned to on their way in, by the event time of the stage's input.
    pub assign: Option<(Windows, EventTime)>,
}

impl Top {
    fn order_converter(&self, schema: &Schema) -> Result<RowConverter, OpError> {
        let options = SortOptions { descending: self.descending, nulls_first: false };
        let data_type = schema.field(self.by).data_type().clone();
        Ok(RowConverter::new(vec![SortField::new_with_options(data_type, options)])?)
    }

    fn group_rows(&self, batch: &RecordBatch) -> Result<Option<Rows>, OpError> {
        if self.group.is_empty() {
            return Ok(None);
        }
        let columns = self.group.iter().map(|&at| one_zero(batch.column(at))).collect::<Result<Vec<_>, _>>()?;
        let fields = columns.iter().map(|column| SortField::new(column.data_type().clone())).collect();
        Ok(Some(RowConverter::new(fields)?.convert_columns(&columns)?))
    }

    /// The rows of a block that can be in the top n as far as the block alone tells.
    pub(crate) fn cut(&self, batch: &RecordBatch) -> Result<RecordBatch, OpError> {
        let rows = self.candidates(batch, 0..batch.num_rows() as u32)?;
        if rows.len() == batch.num_rows() { Ok(batch.clone()) } else { take_rows(batch, &rows) }
    }

    /// The raw rows of a block that can be in the top n of a window, or are late when windows have closed up to a watermark; none where all are, or where
    /// it is not raw integers in groups that are windows that are ranked.
    pub(crate) fn cut_raw(
        &self,
        step: &StepName,
        batch: &RecordBatch,
        watermark: i64,
    ) -> Result<Option<RecordBatch>, OpError> {
        let Some((windows, event_time)) = &self.assign else { return Ok(None) };
        let by = self.by.checked_sub(BOUNDS).filter(|_| self.group.iter().all(|at| *at < BOUNDS));
        let Some(ranks) = by.and_then(|by| self.ranks(batch.column(by))) else { return Ok(None) };
        let (mut times, absent) = event_times(step, event_time, event_time.column, batch)?;
        windows.to_axis(&mut times);
        let open = windows.first_open(watermark);
        let mut absent = absent.into_iter().peekable();
        let (mut rows, mut row) = (Vec::new(), 0);
        while let Some(&time) = times.get(row as usize) {
            if absent.next_if_eq(&row).is_some() {
                rows.push(row);
                row += 1;
                continue;
            }
            // Rows of one stretch are in the same windows: who is out in one is out in all.
            let within = windows.stretch(time);
            let run = times[row as usize..].iter().take_while(|time| within.contains(*time)).count() as u32;
            let these = row..row + run;
            row += run;
            if windows.starts(time).next().is_some_and(|first| first < open) {
                rows.extend(these);
            } else {
                let rank = |row: u32| ranks[row as usize];
                rows.append(&mut candidates(self.n, (|_, _| true, |_| ()), rank, these));
            }
        }
        if rows.len() == batch.num_rows() { Ok(None) } else { take_rows(batch, &rows).map(Some) }
    }

    /// Of `rows` of a block those with fewer than `n` strictly better ones in their group. Integers are compared as such, other values as
    /// arrow-row bytes.
    fn candidates(&self, batch: &RecordBatch, rows: impl Iterator<Item = u32>) -> Result<Vec<u32>, OpError> {
        let ranks = self.ranks(batch.column(self.by));
        let names: Option<Vec<Codes>> = self.group.iter().map(|&at| whole(batch.column(at))).collect();
        if let (Some(ranks), Some(names)) = (ranks, names) {
            let rank = |row: u32| ranks[row as usize];
            let same = |a: u32, b: u32| names.iter().all(|name| name.values[a as usize] == name.values[b as usize]);
            let name = |row: u32| -> Name { names.iter().map(|name| name.values[row as usize]).collect() };
            return Ok(candidates(self.n, (same, name), rank, rows));
        }
        let orders = self.order_converter(&batch.schema())?.convert_columns(&[one_zero(batch.column(self.by))?])?;
        let groups = self.group_rows(batch)?;
        let bytes = |row: u32| groups.as_ref().map_or(&[][..], |groups| groups.row(row as usize).data());
        let rank = |row: u32| orders.row(row as usize);
        Ok(candidates(self.n, (|a, b| bytes(a) == bytes(b), bytes), rank, rows))
    }

    /// Numbers in the order of a column's values, the best first; none where it holds nulls or no integers.
    fn ranks(&self, column: &ArrayRef) -> Option<Vec<i64>> {
        let flip = match column.data_type() {
            DataType::UInt64 => i64::MIN,
            _ => 0,
        } ^ -i64::from(self.descending);
        Some(whole(column)?.values.iter().map(|code| code ^ flip).collect())
    }

    /// A block with a row per window of each row, window bounds first; of sessions the one that the row would be alone. Rows without an event time get null bounds.
    pub(crate) fn assign_windows(
        step: &StepName,
        cut: &Cut,
        event_time: &EventTime,
        routed: &SchemaRef,
        batch: &RecordBatch,
    ) -> Result<RecordBatch, OpError> {
        let (mut times, absent) = event_times(step, event_time, event_time.column, batch)?;
        if let Cut::Windows(windows) = cut {
            windows.to_axis(&mut times);
        }
        let mut absent = absent.into_iter().peekable();
        let (mut rows, mut starts, mut ends, mut valid) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let bound = |row: u32, us: i64| {
            event_time.from_us(us).ok_or_else(|| beyond(step, event_time, event_time.column, batch, row))
        };
        // Of rows that come together nearly all are in the same windows.
        let (mut within, mut bounds) = (0..0, Vec::new());
        let mut once = true;
        let mut row = 0;
        while let Some(&time) = times.get(row as usize) {
            if absent.next_if_eq(&row).is_some() {
                rows.push(row);
                starts.push(0);
                ends.push(0);
                valid.push(false);
                row += 1;
                continue;
            }
            if !within.contains(&time) {
                bounds.clear();
                match cut {
                    Cut::Windows(windows) => {
                        for start in windows.starts(time) {
                            let end = windows.instant(start + windows.size_us());
                            bounds.push((bound(row, windows.instant(start))?, bound(row, end)?));
                        }
                        within = windows.stretch(time);
                    }
                    Cut::Sessions(gap_us) => {
                        bounds.push((bound(row, time)?, bound(row, time + gap_us)?));
                        within = time..time + 1;
                    }
                }
            }
            let run = times[row as usize..].iter().take_while(|time| within.contains(*time)).count();
            once &= bounds.len() == 1;
            if let [(start, end)] = bounds[..] {
                rows.extend(row..row + run as u32);
                starts.extend(std::iter::repeat_n(start, run));
                ends.extend(std::iter::repeat_n(end, run));
                valid.extend(std::iter::repeat_n(true, run));
            } else {
                for row in row..row + run as u32 {
                    for &(start, end) in &bounds {
                        rows.push(row);
                        starts.push(start);
                        ends.push(end);
                        valid.push(true);
                    }
                }
            }
            row += run as u32;
        }
        let nulls = valid.contains(&false).then(|| arrow_buffer::NullBuffer::from(valid));
        let mut columns = vec![
            crate::column::from_codes(&event_time.data_type, starts, nulls.clone())?,
            crate::column::from_codes(&event_time.data_type, ends, nulls)?,
        ];
        let rows = if once { batch.clone() } else { take_rows(batch, &rows)? };
        columns.extend_from_slice(rows.columns());
        Ok(RecordBatch::try_new(routed.clone(), columns)?)
    }
}

/// The name of a group as codes.
type Name = SmallVec<[i64; 2]>;

/// The codes of a column that has them and no nulls.
fn whole(column: &ArrayRef) -> Option<Codes> {
    codes(column).filter(|codes| codes.nulls.is_none())
}

/// Of `rows`, those with fewer than `n` strictly better rows in their group; in no particular order of groups. Groups are told by whether two
/// rows are of one, and by their names; the least rank is best.
fn candidates<N: Hash + Eq, R: Ord + Copy>(
    n: usize,
    (same, name): (impl Fn(u32, u32) -> bool, impl Fn(u32) -> N),
    rank: impl Fn(u32) -> R,
    rows: impl Iterator<Item = u32>,
) -> Vec<u32> {
    struct Local<R> {
        rows: Vec<u32>,
        /// Rank n: anything worse is out.
        cutoff: Option<R>,
    }
    impl<R: Ord + Copy> Local<R> {
        fn prune(&mut self, n: usize, rank: impl Fn(u32) -> R) {
            if self.rows.len() > n {
                self.rows.select_nth_unstable_by(n - 1, |a, b| rank(*a).cmp(&rank(*b)));
                let cutoff = rank(self.rows[n - 1]);
                self.rows.retain(|row| rank(*row) <= cutoff);
                self.cutoff = Some(cutoff);
            }
        }
    }
    let mut locals: Vec<Local<R>> = Vec::new();
    let mut names: HashMap<N, usize> = HashMap::new();
    let mut last: Option<(u32, usize)> = None;
    for row in rows {
        let at = match last {
            Some((before, at)) if same(before, row) => at,
            _ => *names.entry(name(row)).or_insert_with(|| {
                locals.push(Local { rows: Vec::new(), cutoff: None });
                locals.len() - 1
            }),
        };
        last = Some((row, at));
        let local = &mut locals[at];
        if local.cutoff.is_some_and(|cutoff| rank(row) > cutoff) {
            continue;
        }
        local.rows.push(row);
        if local.rows.len() >= n.saturating_mul(2).saturating_add(64) && local.rows.len().is_power_of_two() {
            local.prune(n, &rank);
        }
    }
    let mut kept = Vec::new();
    for mut local in locals {
        local.prune(n, &rank);
        kept.append(&mut local.rows);
    }
    kept.sort_unstable();
    kept
}

/// (Order bytes, row bytes); smaller order is better.
type Candidate = (Box<[u8]>, Box<[u8]>);

/// The candidates of one group.
#[derive(Clone, Default)]
struct Group {
    /// Hash of its key.
    hash: u64,
    rows: Vec<Candidate>,
    cutoff: Option<Box<[u8]>>,
    /// Prune when this many rows are held.
    limit: usize,
    /// What they take.
    bytes: usize,
}

/// What a candidate takes.
fn size((order, row): &Candidate) -> usize {
    32 + order.len() + row.len()
}

/// What a group takes beside its candidates.
fn head(name: &[u8]) -> usize {
    64 + name.len()
}

impl Group {
    fn admits(&self, order: &[u8]) -> bool {
        self.cutoff.as_deref().is_none_or(|cutoff| order <= cutoff)
    }

    fn push(&mut self, n: usize, order: Box<[u8]>, row: Box<[u8]>) {
        let candidate = (order, row);
        self.bytes += size(&candidate);
        self.rows.push(candidate);
        if self.rows.len() > self.limit.max(n.saturating_mul(2)) {
            self.prune(n);
            self.limit = self.rows.len() * 2;
        }
    }

    /// The candidates that pruning leaves, in their order.
    fn top(&self, n: usize) -> impl Iterator<Item = &Candidate> {
        let mut rows: Vec<&Candidate> = self.rows.iter().collect();
        rows.sort_unstable();
        let cutoff = rows.get(n - 1).copied().map(|(order, _)| order);
        rows.into_iter().take_while(move |(order, _)| cutoff.is_none_or(|cutoff| order <= cutoff))
    }

    fn prune(&mut self, n: usize) {
        if self.rows.len() > n {
            self.rows.select_nth_unstable_by(n - 1, |a, b| a.0.cmp(&b.0));
            let cutoff = self.rows[n - 1].0.clone();
            self.rows.retain(|(order, _)| *order <= cutoff);
            self.bytes = self.rows.iter().map(size).sum();
            self.cutoff = Some(cutoff);
        }
    }
}

type Ends = BTreeMap<i64, BTreeMap<Box<[u8]>, Group>>;

/// The native state of one bin under a top step: groups by the end of their window (`i64::MAX` without one) and name.
pub(crate) struct Groups {
    n: usize,
    shape: u64,
    fired: i64,
    live: Ends,
    /// What `live` takes: counted as it changes, since it is asked for at every end of an epoch.
    bytes: usize,
    undo: Option<Undo>,
}

/// How far an encoding is.
#[derive(Default)]
struct Place {
    /// The end, group and row that the next chunk begins with; the first of all when there is none.
    next: Option<(i64, Box<[u8]>, usize)>,
    /// Whether a chunk was made.
    begun: bool,
    /// Whether the last one was.
    done: bool,
    /// Of what has changed: the groups that are left.
    changes: Option<std::vec::IntoIter<(i64, Box<[u8]>)>>,
}

struct Undo {
    fired: i64,
    /// Groups touched since the mark, as they were then.
    saved: BTreeMap<(i64, Box<[u8]>), Saved>,
}

/// A group as it was.
#[derive(Clone)]
struct Saved {
    hash: u64,
    group: Option<Group>,
}

impl Groups {
    pub(crate) fn new(n: usize, shape: u64) -> Self {
        Self { n, shape, fired: i64::MIN, live: BTreeMap::new(), bytes: 0, undo: None }
    }

    /// Puts a group in the place of what has its name.
    fn put(&mut self, end: i64, name: Box<[u8]>, group: Group) {
        self.bytes += head(&name) + group.bytes;
        let taken = head(&name);
        if let Some(before) = self.live.entry(end).or_default().insert(name, group) {
            self.bytes -= taken + before.bytes;
        }
    }

    fn add(&mut self, end: i64, (hash, name): (u64, &[u8]), order: &[u8], row: &[u8]) {
        let group = self.live.get(&end).and_then(|names| names.get(name));
        if group.is_some_and(|group| !group.admits(order)) {
            return;
        }
        if let Some(undo) = &mut self.undo {
            undo.saved.entry((end, name.into())).or_insert_with(|| Saved { hash, group: group.cloned() });
        }
        let names = self.live.entry(end).or_default();
        if !names.contains_key(name) {
            names.insert(name.into(), Group { hash, ..Group::default() });
            self.bytes += head(name);
        }
        let group = names.get_mut(name).expect("inserted above");
        let before = group.bytes;
        group.push(self.n, order.into(), row.into());
        self.bytes = self.bytes + group.bytes - before;
    }

    /// Takes out the groups whose window ended by `watermark` and hands their top rows to `row`.
    fn fire(&mut self, watermark: i64, mut row: impl FnMut(Box<[u8]>) -> Result<(), OpError>) -> Result<(), OpError> {
        while let Some(entry) = self.live.first_entry().filter(|entry| *entry.key() <= watermark) {
            let (end, names) = entry.remove_entry();
            for (name, mut group) in names {
                self.bytes -= head(&name) + group.bytes;
                if let Some(undo) = &mut self.undo {
                    let hash = group.hash;
                    undo.saved.entry((end, name)).or_insert_with(|| Saved { hash, group: Some(group.clone()) });
                }
                group.prune(self.n);
                group.rows.into_iter().try_for_each(|(_, bytes)| row(bytes))?;
            }
        }
        self.fired = self.fired.max(watermark);
        Ok(())
    }

    /// The next chunk; none after the last.
    pub(crate) fn encode(&self, encoding: &mut Encoding) -> Option<Vec<u8>> {
        let extent = encoding.extent();
        let place = encoding.place(Place::default);
        let same = match (extent, &self.undo) {
            (Extent::All, _) => self.encode_rows(place, None),
            (Extent::Marked, Some(undo)) => self.encode_rows(place, Some(undo)),
            // Never marked: all has changed.
            (Extent::Marked, None) | (Extent::Changed | Extent::Anew, _) => None,
        };
        match extent {
            Extent::All => same,
            Extent::Anew => self.encode_changes(place, None),
            _ => same.or_else(|| self.encode_changes(place, self.undo.as_ref())),
        }
    }

    fn entries_shape(&self) -> Vec<u8> {
        let mut shape = vec![TAG, ENTRIES_VERSION];
        put_i64(&mut shape, self.shape as i64);
        shape
    }

    /// The next chunk of entries. A key is the end of the window and the name of the group, a value its top rows: equal for equal
    /// states, whenever they were pruned. What has changed by what it is undone by, or all.
    fn encode_changes(&self, place: &mut Place, undo: Option<&Undo>) -> Option<Vec<u8>> {
        let mut writer = ChunkWriter::new(&self.entries_shape());
        let changes = place.changes.get_or_insert_with(|| {
            let all = || self.live.iter().flat_map(|(end, names)| names.keys().map(|name| (*end, name.clone())));
            let changes: Vec<_> = undo.map_or_else(|| all().collect(), |undo| undo.saved.keys().cloned().collect());
            // A group that has fired is gone: with no such change, what has fired says nothing.
            if !changes.is_empty() {
                writer.push(Entry::Shared { value: &self.fired.to_le_bytes() });
            }
            changes.into_iter()
        });
        let mut value = Vec::new();
        for (end, name) in changes.by_ref() {
            let key = [&end.to_le_bytes(), &*name].concat();
            value.clear();
            match self.live.get(&end).and_then(|names| names.get(&name)) {
                Some(group) => {
                    for (order, row) in group.top(self.n) {
                        put_blob(&mut value, order);
                        put_blob(&mut value, row);
                    }
                    writer.push(Entry::Put { hash: group.hash, key: &key, value: &value });
                }
                None => {
                    let saved = undo.and_then(|undo| undo.saved.get(&(end, name)));
                    writer.push(Entry::Gone { hash: saved.map_or(0, |saved| saved.hash), key: &key });
                }
            }
            if writer.len() >= CHUNK_BYTES {
                break;
            }
        }
        (!writer.is_empty()).then(|| writer.finish())
    }

    /// Takes one chunk of entries.
    pub(crate) fn absorb_changes(&mut self, chunk: &[u8]) -> Result<(), StateFault> {
        let chunk = Chunk::parse(chunk)?;
        if *chunk.shape() != *self.entries_shape() {
            return Err(match chunk.shape() {
                [TAG, found, ..] if *found > ENTRIES_VERSION => {
                    StateFault::Version { found: *found, supported: ENTRIES_VERSION }
                }
                [TAG, ..] => StateFault::Shape { what: "the ranked rows" },
                _ => StateFault::Shape { what: "not the state of a top step" },
            });
        }
        let (mut fired, mut changes) = (None, Vec::new());
        for entry in chunk.entries() {
            let (hash, key, value) = match entry? {
                Entry::Put { hash, key, value } => (hash, key, Some(value)),
                Entry::Gone { hash, key } => (hash, key, None),
                Entry::Shared { value } => {
                    let mut reader = Reader::new(value);
                    fired = fired.max(Some(reader.i64()?));
                    reader.finish()?;
                    continue;
                }
                Entry::GoneAll { .. } => {
                    return Err(StateFault::Corrupt { what: "an entry that a top step does not make" });
                }
            };
            let mut reader = Reader::new(key);
            let (end, name) = (reader.i64()?, reader.rest());
            let group = value.map(|value| self.group(hash, value)).transpose()?;
            changes.push(((end, Box::from(name)), Saved { hash, group }));
        }
        for ((end, name), saved) in changes {
            match &saved.group {
                Some(group) => self.put(end, Box::clone(&name), group.clone()),
                None => self.forget(end, &name),
            }
            // Undone, it stays.
            self.undo.iter_mut().for_each(|undo| _ = undo.saved.insert((end, name.clone()), saved.clone()));
        }
        if let Some(fired) = fired {
            self.fired = self.fired.max(fired);
            self.undo.iter_mut().for_each(|undo| undo.fired = self.fired);
        }
        Ok(())
    }

    fn group(&self, hash: u64, value: &[u8]) -> Result<Group, StateFault> {
        let mut group = Group { hash, ..Group::default() };
        let mut reader = Reader::new(value);
        while !reader.is_empty() {
            let (order, row) = (reader.blob()?, reader.blob()?);
            group.push(self.n, order.into(), row.into());
        }
        Ok(group)
    }

    fn forget(&mut self, end: i64, name: &[u8]) {
        if let Some(names) = self.live.get_mut(&end) {
            if let Some(group) = names.remove(name) {
                self.bytes -= head(name) + group.bytes;
            }
            if names.is_empty() {
                self.live.remove(&end);
            }
        }
    }

    /// The next chunk of rows, without those of groups that `without` has saved.
    fn encode_rows(&self, place: &mut Place, without: Option<&Undo>) -> Option<Vec<u8>> {
        let mut out = vec![TAG, VERSION];
        put_i64(&mut out, self.shape as i64);
        put_i64(&mut out, self.fired);
        let empty = out.len();
        if place.done {
            return None;
        }
        let from = place.next.take();
        let (first, name, skipped) = from.as_ref().map_or((i64::MIN, &[][..], 0), |(end, name, at)| (*end, name, *at));
        // The first group may be begun: the rows that were sent of it are skipped.
        let groups = self.live.range(first..).flat_map(|(end, names)| {
            let least = if *end == first { name } else { &[][..] };
            names
                .range::<[u8], _>((Bound::Included(least), Bound::Unbounded))
                .map(move |(name, group)| (end, name, group))
        });
        let mut sent = skipped;
        let changed =
            |end: i64, name: &[u8]| without.is_some_and(|undo| undo.saved.contains_key(&(end, Box::from(name))));
        for (end, name, group) in groups.filter(|(end, name, _)| !changed(**end, name)) {
            for (at, (order, row)) in group.rows.iter().enumerate().skip(std::mem::take(&mut sent)) {
                // Flat entries: a group of many ties may span chunks.
                let more = 16 + 12 + name.len() + order.len() + row.len();
                if out.len() > empty && out.len() + more > CHUNK_BYTES {
                    place.next = Some((*end, name.clone(), at));
                    place.begun = true;
                    return Some(out);
                }
                put_i64(&mut out, *end);
                put_i64(&mut out, group.hash as i64);
                put_blob(&mut out, name);
                put_blob(&mut out, order);
                put_blob(&mut out, row);
            }
        }
        place.done = true;
        // Rows, or what has fired of a bin that has none.
        (out.len() > empty || (self.fired > i64::MIN && !place.begun)).then_some(out)
    }

    /// Takes one chunk of rows that have not changed. What has come so far becomes the state that a rollback returns to; groups that had
    /// changed still count as changed, since bins that are merged come one after the other.
    pub(crate) fn absorb(&mut self, chunk: &[u8]) -> Result<(), StateFault> {
        let mut reader = Reader::new(chunk);
        if reader.u8()? != TAG {
            return Err(StateFault::Shape { what: "not the state of a top step" });
        }
        let version = reader.u8()?;
        if version != VERSION {
            return Err(StateFault::Version { found: version, supported: VERSION });
        }
        if reader.i64()? != self.shape as i64 {
            return Err(StateFault::Shape { what: "the ranked rows" });
        }
        let fired = reader.i64()?;
        let mut entries = Vec::new();
        while !reader.is_empty() {
            let end = reader.i64()?;
            let hash = reader.i64()? as u64;
            entries.push((end, (hash, reader.blob()?), reader.blob()?, reader.blob()?));
        }
        let undo = self.undo.take();
        for (end, name, order, row) in entries {
            self.add(end, name, order, row);
        }
        self.fired = self.fired.max(fired);
        self.undo = undo.map(|mut undo| {
            undo.fired = self.fired;
            for ((end, name), saved) in &mut undo.saved {
                saved.group = self.live.get(end).and_then(|names| names.get(name)).cloned();
            }
            undo
        });
        Ok(())
    }

    /// Cost: the groups that this epoch has touched.
    pub(crate) fn bytes(&self) -> usize {
        let saved = self.undo.iter().flat_map(|undo| undo.saved.values()).flat_map(|saved| &saved.group);
        self.bytes + saved.map(|group| group.bytes).sum::<usize>()
    }

    /// Groups held. How many candidate rows they hold depends on when they were last pruned; `bytes` shows it.
    pub(crate) fn keys(&self) -> usize {
        self.live.values().map(BTreeMap::len).sum()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.live.is_empty()
    }

    pub(crate) fn mark(&mut self) {
        self.undo = Some(Undo { fired: self.fired, saved: BTreeMap::new() });
    }

    /// Keeps no undo until the next mark.
    pub(crate) fn settle(&mut self) {
        self.undo = None;
    }

    pub(crate) fn rollback(&mut self) {
        let Some(undo) = &mut self.undo else {
            // Never marked: back to how it was made.
            self.fired = i64::MIN;
            self.live.clear();
            self.bytes = 0;
            return;
        };
        self.fired = undo.fired;
        for ((end, name), saved) in std::mem::take(&mut undo.saved) {
            match saved.group {
                Some(group) => self.put(end, name, group),
                None => self.forget(end, &name),
            }
        }
    }
}

/// See the module.
pub(crate) struct TopOp {
    step: StepName,
    top: Top,
    routed: SchemaRef,
    schema: SchemaRef,
    orders: RowConverter,
    rows: RowConverter,
    watermark: i64,
}

impl TopOp {
    pub(crate) fn new(step: StepName, top: Top, routed: SchemaRef, schema: SchemaRef) -> Result<Self, OpError> {
        let orders = top.order_converter(&routed)?;
        let fields = routed.fields().iter().map(|field| SortField::new(field.data_type().clone())).collect();
        Ok(Self { step, top, orders, rows: RowConverter::new(fields)?, routed, schema, watermark: i64::MIN })
    }

    /// Window ends by row, `None` where a window stage found no event time.
    fn ends(&self, batch: &RecordBatch) -> Result<Vec<Option<i64>>, OpError> {
        let Some(end) = &self.top.end else { return Ok(vec![Some(i64::MAX); batch.num_rows()]) };
        let (times, absent) = event_times(&self.step, end, end.column, batch)?;
        let mut ends: Vec<Option<i64>> = times.into_iter().map(Some).collect();
        // Without an event time a raw row is in no window, and late; a window that another step made has an end.
        if let (Some(&row), None) = (absent.first(), &self.top.assign) {
            let (step, column) = (self.step.clone(), end.name.clone());
            return Err(OpError::NoWindow { step, column, row: row as usize });
        }
        absent.into_iter().for_each(|row| ends[row as usize] = None);
        Ok(ends)
    }

    fn block(&self, rows: &[Box<[u8]>]) -> Result<RecordBatch, OpError> {
        let columns = row_format::columns(&self.rows, rows.iter().map(|row| &**row))?;
        let options = RecordBatchOptions::new().with_row_count(Some(rows.len()));
        let batch = RecordBatch::try_new_with_options(self.routed.clone(), columns, &options)?;
        conform(&self.step, &self.schema, &batch)
    }
}

impl KeyedOp for TopOp {
    fn apply(
        &mut self,
        bins: &mut dyn Bins,
        _: usize,
        batch: &RecordBatch,
        hashes: &[u64],
        out: &mut Sink<'_>,
    ) -> Result<(), OpError> {
        check_hashes(batch, hashes)?;
        let cut = (bins.bits(), bins.is_split());
        let ends = self.ends(batch)?;
        let mut last = None;
        for &hash in hashes {
            let bin = bin_among(bins, cut, hash);
            if last.replace(bin) == Some(bin) {
                continue;
            }
            let fired = groups_of(bins, bin)?.fired;
            self.watermark = self.watermark.max(fired);
        }
        let (mut late, mut rows) = (Vec::new(), Vec::with_capacity(ends.len()));
        // Rows of windows that closed before this step are all there are of these, also if they ended at the watermark before: sessions do.
        let open = |end: i64| end > self.watermark || end == i64::MAX || self.top.assign.is_none();
        for (row, end) in (0u32..).zip(&ends) {
            match end {
                Some(end) if open(*end) => rows.push(row),
                _ => late.push(row),
            }
        }
        if let (Some((windows, event_time)), false) = (&self.top.assign, late.is_empty()) {
            // Of a row's copies only the one in its last window reports it late: that window closes last.
            let (mut times, _) = event_times(&self.step, event_time, event_time.column + 2, batch)?;
            windows.to_axis(&mut times);
            let (starts, _) = event_times(&self.step, event_time, 0, batch)?;
            let last = |row: usize, end: i64| windows.last(times[row]) == (starts[row], end);
            late.retain(|&row| ends[row as usize].is_none_or(|end| last(row as usize, end)));
        }
        let kept = self.top.candidates(batch, rows.into_iter())?;
        let few = take_rows(batch, &kept)?;
        let orders = self.orders.convert_columns(&[one_zero(few.column(self.top.by))?])?;
        let (groups, encoded) = (self.top.group_rows(&few)?, self.rows.convert_columns(few.columns())?);
        for (at, &row) in kept.iter().enumerate() {
            let row = row as usize;
            let name: &[u8] = groups.as_ref().map_or(&[], |groups| groups.row(at).data());
            let end = ends[row].expect("rows without an end are late");
            let bin = bin_among(bins, cut, hashes[row]);
            let state = groups_of(bins, bin)?;
            state.add(end, (hashes[row], name), orders.row(at).data(), encoded.row(at).data());
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
        let mut pending: Vec<Box<[u8]>> = Vec::new();
        let mut bytes = 0;
        for bin in bins.held() {
            groups_of(bins, bin)?.fire(watermark_us, |row| {
                bytes += row.len();
                pending.push(row);
                if pending.len() == BLOCK_ROWS || bytes >= BLOCK_BYTES {
                    out(Output::Rows(self.block(&pending)?));
                    pending.clear();
                    bytes = 0;
                }
                Ok(())
            })?;
        }
        if !pending.is_empty() {
            out(Output::Rows(self.block(&pending)?));
        }
        Ok(())
    }

    fn end_epoch(&mut self, _: &mut dyn Bins, _: &mut Sink<'_>) -> Result<(), OpError> {
        Ok(())
    }

    fn resume(&mut self, watermark_us: i64) {
        self.watermark = watermark_us;
    }
}

/// What distinguishes the states of two top steps.
pub(crate) fn shape(top: &Top, routed: &Arc<Schema>) -> u64 {
    let columns: Vec<String> = routed.fields().iter().map(|field| field.data_type().to_string()).collect();
    let words = format!("{} {} {} {:?} {}", top.n, top.by, top.descending, top.group, columns.join(","));
    hash_bytes(words.as_bytes())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What it holds, added up.
    fn added_up(groups: &Groups) -> usize {
        let size = |group: &Group| group.rows.iter().map(size).sum::<usize>();
        let saved = groups.undo.iter().flat_map(|undo| undo.saved.values()).flat_map(|saved| &saved.group);
        let live = groups.live.values().flatten().map(|(name, group)| head(name) + size(group));
        live.chain(saved.map(size)).sum()
    }

    proptest! {
        #[test]
        fn bytes_are_counted_as_groups_change(
            n in 1_usize..4,
            steps in prop::collection::vec((0_u8..9, 0_i64..4, 0_u8..3, 0_u8..20, 0_usize..9), 1..80),
        ) {
            let (mut groups, mut other) = (Groups::new(n, 7), Groups::new(n, 7));
            for (what, end, name, order, length) in steps {
                match what {
                    0 => groups.mark(),
                    1 => groups.settle(),
                    2 => groups.rollback(),
                    3 => groups.fire(end, |_| Ok(())).unwrap(),
                    4 => {
                        let mut encoding = Encoding::of(Extent::All);
                        while let Some(chunk) = groups.encode(&mut encoding) {
                            other.absorb(&chunk).unwrap();
                        }
                        prop_assert_eq!(other.bytes(), added_up(&other));
                    }
                    5 => {
                        let mut encoding = Encoding::of(Extent::Changed);
                        while let Some(chunk) = groups.encode(&mut encoding) {
                            other.absorb_changes(&chunk).unwrap();
                        }
                        prop_assert_eq!(other.bytes(), added_up(&other));
                    }
                    _ => groups.add(end, (u64::from(name), &vec![name; usize::from(name)]), &[order], &vec![1; length]),
                }
                prop_assert_eq!(groups.bytes(), added_up(&groups));
            }
        }
    }
}
