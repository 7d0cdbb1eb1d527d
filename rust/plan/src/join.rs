//! Inner join of two sides on columns: each row meets all rows of the other side with its key, whichever comes first, for ever.
//!
//! A bin keeps the rows of both sides by key, as arrow-row bytes. A row that comes is first joined with what is kept of the other side and
//! then kept itself, so each pair comes out once, at the time of its later row. Rows with a null in their key meet none, as in SQL; they are left
//! out before the exchange.
//!
//! Each row of a key and side has a number, from 0 in the order in which they came. Nothing is ever taken away but by undo, so what an epoch has
//! changed are the rows from a number on, and it costs what came in it, however many rows a key has.
//!
//! Invariants: the numbers of a key's rows ascend on each side; a key that is kept has rows; while marked, `touched` has exactly the keys
//! whose `since` is set.

use std::sync::Arc;

use arrow_array::{ArrayRef, BooleanArray, RecordBatch, StringArray, StructArray, UInt32Array};
use arrow_buffer::NullBuffer;
use arrow_row::{RowConverter, SortField};
use arrow_schema::{DataType, Field, Schema, SchemaRef};
use arrow_select::filter::filter_record_batch;
use arrow_select::take::take;
use hashbrown::HashTable;
use penstock_bins::{Encoding, Extent};
use penstock_files::{Chunk, ChunkWriter, Entry};

use crate::column::plain;
use crate::error::{OpError, StateFault};
use crate::hash::hash_bytes;
use crate::key::KeyCodec;
use crate::op::{BLOCK_ROWS, Bins, KeyedOp, Output, Sink, check_hashes};
use crate::panes::CHUNK_BYTES;
use crate::partition::bin_of;
use crate::row_format;
use crate::state::sides_of;
use crate::wire::{Reader, put_blob, put_i64};

/// Of the pairs that come out together, about: a long text is in each pair of its row.
const BLOCK_BYTES: usize = 4 << 20;
const TAG: u8 = b'J';
const VERSION: u8 = 1;
/// Of the entries.
const ENTRIES_VERSION: u8 = 1;

/// What a join matches: the rows of the step's own columns and keys, which are those of the left side, with these.
#[derive(Clone, Debug, PartialEq)]
pub struct Join {
    /// Columns of the right side.
    pub right: SchemaRef,
    /// Its columns that equal the keys, in their order.
    pub on: Vec<usize>,
    /// Its columns that come out, behind those of the left side.
    pub taken: Vec<usize>,
}

impl Join {
    /// The rows whose key has no null.
    pub(crate) fn whole_keys(keys: &[usize], batch: &RecordBatch) -> Result<RecordBatch, OpError> {
        let mut valid: Option<NullBuffer> = None;
        for &at in keys {
            valid = NullBuffer::union(valid.as_ref(), plain(batch.column(at))?.logical_nulls().as_ref());
        }
        match valid.filter(|valid| valid.null_count() > 0) {
            None => Ok(batch.clone()),
            Some(valid) => Ok(filter_record_batch(batch, &BooleanArray::new(valid.into_inner(), None))?),
        }
    }
}

/// What distinguishes the states of two joins.
pub(crate) fn shape(left: (&Schema, &[usize]), right: (&Schema, &[usize])) -> u64 {
    let words = [left, right].map(|(schema, keys)| {
        let types: Vec<String> = schema.fields().iter().map(|field| field.data_type().to_string()).collect();
        format!("{} by {keys:?}", types.join(","))
    });
    hash_bytes(words.join(" with ").as_bytes())
}

/// A row that is kept.
#[derive(Clone)]
struct Row {
    number: u64,
    bytes: Box<[u8]>,
}

/// What has happened to a key since the mark, by side: numbers of rows.
#[derive(Clone, Copy)]
struct Since {
    /// Rows from here on have come since.
    changed: [u64; 2],
    /// Rows from here on go when it is undone. What has moved here stays, though it may have changed.
    undone: [u64; 2],
}

struct Key {
    hash: u64,
    name: Box<[u8]>,
    rows: [Vec<Row>; 2],
    since: Option<Since>,
}

impl Key {
    fn next(&self, side: usize) -> u64 {
        self.rows[side].last().map_or(0, |row| row.number + 1)
    }

    fn changed_from(&self, side: usize) -> u64 {
        self.since.map_or(u64::MAX, |since| since.changed[side])
    }
}

/// The native state of one bin under a join.
pub(crate) struct Sides {
    shape: u64,
    index: HashTable<u32>,
    keys: Vec<Key>,
    /// Whether changes are told apart and can be undone.
    marked: bool,
    touched: Vec<u32>,
    bytes: usize,
}

/// How far an encoding is: the key, side and row that the next chunk begins with.
#[derive(Default)]
struct Place {
    same: Option<(usize, usize, usize)>,
    begun: bool,
    changed: (usize, usize, u64),
}

impl Sides {
    pub(crate) fn new(shape: u64) -> Self {
        Self { shape, index: HashTable::new(), keys: Vec::new(), marked: false, touched: Vec::new(), bytes: 0 }
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
        self.keys.push(Key { hash, name: name.into(), rows: [Vec::new(), Vec::new()], since: None });
        self.bytes += size_of::<Key>() + name.len();
        let keys = &self.keys;
        self.index.insert_unique(hash, at, |at| keys[*at as usize].hash);
        at as usize
    }

    /// What has happened to a key since the mark; from now on something has.
    fn touch(&mut self, at: usize) -> Option<&mut Since> {
        let key = &mut self.keys[at];
        if self.marked && key.since.is_none() {
            let now = [key.next(0), key.next(1)];
            key.since = Some(Since { changed: now, undone: now });
            self.touched.push(at as u32);
        }
        key.since.as_mut()
    }

    /// The rows of the other side that a row of `side` meets, and then it is kept.
    fn add(&mut self, side: usize, (hash, name): (u64, &[u8]), row: &[u8], mut meets: impl FnMut(&[u8])) {
        let at = self.place(hash, name);
        self.touch(at);
        let key = &mut self.keys[at];
        key.rows[1 - side].iter().for_each(|other| meets(&other.bytes));
        let number = key.next(side);
        key.rows[side].push(Row { number, bytes: row.into() });
        self.bytes += size_of::<Row>() + row.len();
    }

    /// Puts a row where its number belongs. Says whether there was one.
    fn put(&mut self, at: usize, side: usize, number: u64, bytes: &[u8]) -> bool {
        let rows = &mut self.keys[at].rows[side];
        let row = Row { number, bytes: bytes.into() };
        self.bytes += size_of::<Row>() + bytes.len();
        if rows.last().is_none_or(|last| last.number < number) {
            rows.push(row);
            return false;
        }
        match rows.binary_search_by_key(&number, |row| row.number) {
            Ok(place) => {
                let before = std::mem::replace(&mut rows[place], row);
                self.bytes -= size_of::<Row>() + before.bytes.len();
                true
            }
            Err(place) => {
                rows.insert(place, row);
                false
            }
        }
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
            let end = if apart { kept.changed_from(side) } else { u64::MAX };
            for (at, row) in kept.rows[side].iter().enumerate().skip(from).take_while(|(_, row)| row.number < end) {
                if out.len() > empty && out.len() + 32 + kept.name.len() + row.bytes.len() > CHUNK_BYTES {
                    place.same = Some((key, side, at));
                    return Some(out);
                }
                put_i64(&mut out, kept.hash as i64);
                out.push(side as u8);
                put_i64(&mut out, row.number as i64);
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

    /// The next chunk of entries: a key is a side, the number of a row and the name of its key, a value the row.
    fn encode_changes(&self, place: &mut Place) -> Option<Vec<u8>> {
        let mut writer = ChunkWriter::new(&self.entries_shape());
        let count = if self.marked { self.touched.len() } else { self.keys.len() };
        let mut name = Vec::new();
        let (ref mut key, ref mut side, ref mut from) = place.changed;
        while *key < count {
            let kept = &self.keys[if self.marked { self.touched[*key] as usize } else { *key }];
            let begin = if self.marked { kept.changed_from(*side).max(*from) } else { *from };
            let first = kept.rows[*side].partition_point(|row| row.number < begin);
            for row in &kept.rows[*side][first..] {
                if writer.len() >= CHUNK_BYTES {
                    *from = row.number;
                    return Some(writer.finish());
                }
                name.clear();
                name.push(*side as u8);
                name.extend_from_slice(&row.number.to_be_bytes());
                name.extend_from_slice(&kept.name);
                writer.push(Entry::Put { hash: kept.hash, key: &name, value: &row.bytes });
            }
            (*key, *side, *from) = if *side == 0 { (*key, 1, 0) } else { (*key + 1, 0, 0) };
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
            let (hash, side, number) = (reader.i64()? as u64, reader.u8()?, reader.i64()? as u64);
            rows.push((hash, side_of(side)?, number, reader.blob()?, reader.blob()?));
        }
        for (hash, side, number, name, bytes) in rows {
            let at = self.place(hash, name);
            if self.put(at, side, number, bytes) {
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
            let Entry::Put { hash, key, value } = entry? else {
                return Err(StateFault::Corrupt { what: "an entry that a join does not make" });
            };
            let mut reader = Reader::new(key);
            let (side, number) = (side_of(reader.u8()?)?, u64::from_be_bytes(reader.array()?));
            rows.push((hash, side, number, reader.rest(), value));
        }
        for (hash, side, number, name, bytes) in rows {
            let at = self.place(hash, name);
            // Undone, it stays.
            if let Some(since) = self.touch(at) {
                since.changed[side] = since.changed[side].min(number);
                since.undone[side] = since.undone[side].max(number.saturating_add(1));
            }
            self.put(at, side, number, bytes);
        }
        Ok(())
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes + 8 * self.index.capacity()
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

    /// Keeps no undo until the next mark.
    pub(crate) fn settle(&mut self) {
        self.touched.drain(..).for_each(|at| self.keys[at as usize].since = None);
        self.marked = false;
    }

    pub(crate) fn rollback(&mut self) {
        if !self.marked {
            // Never marked: back to how it was made.
            *self = Self::new(self.shape);
            return;
        }
        let mut touched = std::mem::take(&mut self.touched);
        // Keys that go are taken from the end, so that those before them stay where they are.
        touched.sort_unstable();
        for at in touched.into_iter().rev().map(|at| at as usize) {
            let key = &mut self.keys[at];
            let Some(since) = key.since.take() else { continue };
            for (rows, undone) in key.rows.iter_mut().zip(since.undone) {
                let stay = rows.partition_point(|row| row.number < undone);
                self.bytes -= rows.drain(stay..).map(|row| size_of::<Row>() + row.bytes.len()).sum::<usize>();
            }
            if key.rows.iter().all(Vec::is_empty) {
                self.drop_key(at);
            }
        }
    }

    /// The rows of a side.
    fn side(&self, side: usize) -> impl Iterator<Item = &[u8]> {
        self.keys.iter().flat_map(move |key| &key.rows[side]).map(|row| &*row.bytes)
    }
}

fn side_of(byte: u8) -> Result<usize, StateFault> {
    if byte < 2 { Ok(byte.into()) } else { Err(StateFault::Corrupt { what: "a side of a join" }) }
}

/// A side of the operator.
struct Half {
    keys: KeyCodec,
    rows: RowConverter,
    /// Columns that come out.
    taken: Vec<usize>,
}

fn converter(schema: &Schema) -> Result<RowConverter, OpError> {
    Ok(RowConverter::new(schema.fields().iter().map(|field| SortField::new(field.data_type().clone())).collect())?)
}

/// See the module.
pub(crate) struct JoinOp {
    halves: [Half; 2],
    output: SchemaRef,
}

/// Pairs that are to come out: rows of the block, and bytes of rows of the other side.
#[derive(Default)]
struct Pairs {
    /// Bytes of the rows of both sides.
    weight: usize,
    mine: Vec<u32>,
    theirs: Vec<u8>,
    ends: Vec<usize>,
}

impl JoinOp {
    pub(crate) fn new(
        left: (&Schema, &[usize]),
        join: &Join,
        types: Vec<DataType>,
        output: SchemaRef,
    ) -> Result<Self, OpError> {
        let half = |schema: &Schema, keys: &[usize], taken| -> Result<Half, OpError> {
            Ok(Half { keys: KeyCodec::new(keys.to_vec(), types.clone())?, rows: converter(schema)?, taken })
        };
        let whole = (0..left.0.fields().len()).collect();
        Ok(Self { halves: [half(left.0, left.1, whole)?, half(&join.right, &join.on, join.taken.clone())?], output })
    }

    fn give(&self, side: usize, batch: &RecordBatch, pairs: &mut Pairs, out: &mut Sink<'_>) -> Result<(), OpError> {
        if pairs.mine.is_empty() {
            return Ok(());
        }
        let Pairs { mine, theirs, ends, .. } = std::mem::take(pairs);
        let mine = UInt32Array::from(mine);
        let [own, other] = [&self.halves[side], &self.halves[1 - side]];
        let own = own.taken.iter().map(|at| take(batch.column(*at), &mine, None)).collect::<Result<Vec<_>, _>>()?;
        let begins = [0].into_iter().chain(ends.iter().copied());
        let found = row_format::columns(&other.rows, begins.zip(&ends).map(|(begin, end)| &theirs[begin..*end]))?;
        let found: Vec<ArrayRef> = other.taken.iter().map(|at| found[*at].clone()).collect();
        let columns = if side == 0 { [own, found] } else { [found, own] };
        out(Output::Rows(RecordBatch::try_new(self.output.clone(), columns.concat())?));
        Ok(())
    }
}

impl KeyedOp for JoinOp {
    fn apply(
        &mut self,
        bins: &mut dyn Bins,
        side: usize,
        batch: &RecordBatch,
        hashes: &[u64],
        out: &mut Sink<'_>,
    ) -> Result<(), OpError> {
        check_hashes(batch, hashes)?;
        let bits = bins.bits();
        for &hash in hashes {
            sides_of(bins, bin_of(hash, bits))?;
        }
        let half = self.halves.get(side).ok_or(OpError::Side { side })?;
        let keys = half.keys.encode(batch)?;
        let rows = half.rows.convert_columns(batch.columns())?;
        let mut pairs = Pairs::default();
        for (row, &hash) in hashes.iter().enumerate() {
            let key = (hash, keys.bytes(row));
            let own = rows.row(row).data().len();
            let mut failed = Ok(());
            sides_of(bins, bin_of(hash, bits))?.add(side, key, rows.row(row).data(), |other| {
                pairs.weight += own + other.len();
                pairs.mine.push(row as u32);
                pairs.theirs.extend_from_slice(other);
                pairs.ends.push(pairs.theirs.len());
                if (pairs.mine.len() == BLOCK_ROWS || pairs.weight >= BLOCK_BYTES) && failed.is_ok() {
                    failed = self.give(side, batch, &mut pairs, out);
                }
            });
            failed?;
        }
        self.give(side, batch, &mut pairs, out)
    }

    fn watermark(&mut self, _: &mut dyn Bins, _: i64, _: &mut Sink<'_>) -> Result<(), OpError> {
        Ok(())
    }

    fn end_epoch(&mut self, _: &mut dyn Bins, _: &mut Sink<'_>) -> Result<(), OpError> {
        Ok(())
    }

    fn resume(&mut self, _: i64) {}
}

/// Tells what a join keeps: its rows with their side, `left` or `right`, as a value of the column of that name.
pub(crate) struct Told {
    halves: [(SchemaRef, RowConverter); 2],
    schema: SchemaRef,
}

impl Told {
    pub(crate) fn new(left: &SchemaRef, right: &SchemaRef) -> Result<Self, OpError> {
        let halves = [(left.clone(), converter(left)?), (right.clone(), converter(right)?)];
        Ok(Self { halves, schema: Self::columns(left, right) })
    }

    pub(crate) fn columns(left: &Schema, right: &Schema) -> SchemaRef {
        let row = |name: &str, schema: &Schema| {
            let fields = schema.fields().iter().map(|field| field.as_ref().clone().with_nullable(true));
            Field::new(name, DataType::Struct(fields.collect()), true)
        };
        Arc::new(Schema::new(vec![Field::new("side", DataType::Utf8, false), row("left", left), row("right", right)]))
    }

    fn block(&self, side: usize, rows: &[&[u8]]) -> Result<RecordBatch, OpError> {
        let values = row_format::columns(&self.halves[side].1, rows.iter().copied())?;
        let names = vec![["left", "right"][side]; rows.len()];
        let mut columns: Vec<ArrayRef> = vec![Arc::new(StringArray::from(names))];
        for at in [0, 1] {
            let DataType::Struct(fields) = self.schema.field(at + 1).data_type() else {
                unreachable!("a side is a struct")
            };
            columns.push(match at == side {
                true => Arc::new(StructArray::try_new(fields.clone(), values.clone(), None)?),
                false => Arc::new(StructArray::new_null(fields.clone(), rows.len())),
            });
        }
        Ok(RecordBatch::try_new(self.schema.clone(), columns)?)
    }
}

impl KeyedOp for Told {
    fn apply(
        &mut self,
        _: &mut dyn Bins,
        _: usize,
        _: &RecordBatch,
        _: &[u64],
        _: &mut Sink<'_>,
    ) -> Result<(), OpError> {
        Ok(())
    }

    fn watermark(&mut self, bins: &mut dyn Bins, _: i64, out: &mut Sink<'_>) -> Result<(), OpError> {
        for bin in bins.held() {
            let sides = sides_of(bins, bin)?;
            for side in [0, 1] {
                let rows: Vec<&[u8]> = sides.side(side).collect();
                for rows in rows.chunks(BLOCK_ROWS) {
                    out(Output::Rows(self.block(side, rows)?));
                }
            }
        }
        Ok(())
    }

    fn end_epoch(&mut self, _: &mut dyn Bins, _: &mut Sink<'_>) -> Result<(), OpError> {
        Ok(())
    }

    fn resume(&mut self, _: i64) {}
}
