//! The state of a bin as that of Python functions is: a map by key, and rows that wait for the end of their epoch. It undoes, tells what has changed,
//! and comes back from files.

use std::any::Any;
use std::collections::{BTreeMap, VecDeque};

use arrow_schema::SchemaRef;
use penstock_files::{Chunk, ChunkWriter, Entry, is_entries};
use penstock_plan::hash::hash_columns_of;
use penstock_plan::{Encoding, Extent, ForeignState, StateFault};

use super::super::{Bag, Row};
use super::block;
use crate::common::Cell;

/// What a key has.
pub(in crate::property) trait Value: Any + Clone + Default + Send {
    /// As numbers.
    fn put(&self) -> Vec<i64>;
    fn read(numbers: &[i64]) -> Self;
}

/// See the module.
#[derive(Clone, Debug)]
pub(in crate::property) struct Bin<V> {
    /// Columns of keys.
    names: SchemaRef,
    pub(super) keys: BTreeMap<Row, V>,
    /// What keys were at the mark that were changed since; none before there was one.
    changed: Option<BTreeMap<Row, Option<V>>>,
    /// What of the epoch under way its end needs: rows, or keys. It moves with the bin, and no file has it.
    pub(super) waiting: Bag,
}

impl<V: Value> Bin<V> {
    pub(in crate::property) fn new(names: SchemaRef) -> Self {
        Self { names, keys: BTreeMap::new(), changed: None, waiting: Vec::new() }
    }

    /// What a key has, to be changed.
    pub(super) fn change(&mut self, key: &Row) -> &mut V {
        self.touch(key);
        self.keys.entry(key.clone()).or_default()
    }

    /// Notes what a key was.
    pub(super) fn touch(&mut self, key: &Row) {
        if let Some(changed) = &mut self.changed {
            changed.entry(key.clone()).or_insert_with(|| self.keys.get(key).cloned());
        }
    }

    /// Changes as a chunk of entries.
    fn entries(&self, keys: &[Row]) -> Vec<u8> {
        let columns = block(&self.names, keys);
        let hashes = hash_columns_of(columns.columns(), keys.len()).unwrap();
        let mut writer = ChunkWriter::new(b"a map");
        for (key, hash) in keys.iter().zip(hashes) {
            let name = row_bytes(key);
            match self.keys.get(key) {
                Some(value) => writer.push(Entry::Put { hash, key: &name, value: &number_bytes(&value.put()) }),
                None => writer.push(Entry::Gone { hash, key: &name }),
            }
        }
        writer.finish()
    }
}

/// What is left to be encoded.
struct Left {
    rows: VecDeque<Row>,
    waiting: VecDeque<Row>,
    entries: VecDeque<Row>,
}

/// Kinds of chunks, beside that of entries.
const KEY: u8 = 0;
const WAITS: u8 = 1;

impl<V: Value> ForeignState for Bin<V> {
    fn encode(&self, encoding: &mut Encoding) -> Result<Option<Vec<u8>>, StateFault> {
        let extent = encoding.extent();
        let left = encoding.place(|| {
            let changed = |key: &Row| self.changed.as_ref().is_none_or(|changed| changed.contains_key(key));
            let all = || self.keys.keys().cloned();
            let told = || self.changed.as_ref().map_or_else(|| all().collect(), |it| it.keys().cloned().collect());
            let (rows, entries) = match extent {
                Extent::All => (all().collect(), VecDeque::new()),
                Extent::Marked => (all().filter(|key| !changed(key)).collect(), told()),
                Extent::Changed => (VecDeque::new(), told()),
                Extent::Anew => (VecDeque::new(), all().collect()),
            };
            let moves = matches!(extent, Extent::All | Extent::Marked);
            assert!(moves || self.waiting.is_empty(), "what waits is in no entry");
            Left { rows, waiting: self.waiting.clone().into(), entries }
        });
        if let Some(key) = left.rows.pop_front() {
            return Ok(Some([vec![KEY], row_bytes(&key), number_bytes(&self.keys[&key].put())].concat()));
        }
        if let Some(row) = left.waiting.pop_front() {
            return Ok(Some([vec![WAITS], row_bytes(&row)].concat()));
        }
        let some: Vec<Row> = left.entries.drain(..left.entries.len().min(3)).collect();
        Ok((!some.is_empty()).then(|| self.entries(&some)))
    }

    fn absorb(&mut self, chunk: &[u8]) -> Result<(), StateFault> {
        if !is_entries(chunk) {
            let mut bytes = &chunk[1..];
            let row = read_row(&mut bytes);
            if chunk[0] == WAITS {
                self.waiting.push(row);
            } else {
                assert!(self.keys.insert(row, V::read(&read_numbers(bytes))).is_none(), "a key came twice");
            }
            return Ok(());
        }
        for entry in Chunk::parse(chunk).unwrap().entries() {
            let (mut key, value) = match entry.unwrap() {
                Entry::Put { key, value, .. } => (key, Some(V::read(&read_numbers(value)))),
                Entry::Gone { key, .. } => (key, None),
                other => panic!("an entry that no map makes: {other:?}"),
            };
            let key = read_row(&mut key);
            // It has changed, and undone it stays.
            if let Some(changed) = &mut self.changed {
                changed.insert(key.clone(), value.clone());
            }
            self.set(key, value);
        }
        Ok(())
    }

    fn bytes(&self) -> usize {
        100 * (self.keys.len() + self.waiting.len())
    }

    fn keys(&self) -> usize {
        self.keys.len()
    }

    fn mark(&mut self) {
        assert!(self.waiting.is_empty(), "an epoch that is over has left something");
        self.changed = Some(BTreeMap::new());
    }

    fn rollback(&mut self) -> Result<(), StateFault> {
        self.waiting.clear();
        for (key, was) in self.changed.replace(BTreeMap::new()).expect("a mark to go back to") {
            self.set(key, was);
        }
        Ok(())
    }
}

impl<V> Bin<V> {
    fn set(&mut self, key: Row, value: Option<V>) {
        match value {
            Some(value) => _ = self.keys.insert(key, value),
            None => _ = self.keys.remove(&key),
        }
    }
}

fn number_bytes(numbers: &[i64]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

fn read_numbers(bytes: &[u8]) -> Vec<i64> {
    bytes.chunks(8).map(|word| i64::from_le_bytes(word.try_into().unwrap())).collect()
}

/// Two numbers for one that there may be.
pub(super) fn option(value: Option<i64>) -> [i64; 2] {
    [i64::from(value.is_some()), value.unwrap_or(0)]
}

pub(super) fn read_option(numbers: &[i64]) -> Option<i64> {
    (numbers[0] == 1).then_some(numbers[1])
}

fn row_bytes(row: &Row) -> Vec<u8> {
    let mut bytes = vec![row.len() as u8];
    for cell in row {
        match cell {
            Cell::Null => bytes.push(0),
            Cell::Int(value) => bytes.extend([&[1][..], &(*value as i64).to_le_bytes()].concat()),
            Cell::Float(bits) => bytes.extend([&[2][..], &bits.to_le_bytes()].concat()),
            Cell::Text(text) => bytes.extend([&[3, text.len() as u8], text.as_bytes()].concat()),
        }
    }
    bytes
}

fn read_row(bytes: &mut &[u8]) -> Row {
    let mut take = |count: usize| {
        let (taken, rest) = bytes.split_at(count);
        *bytes = rest;
        taken
    };
    let count = take(1)[0];
    let mut cell = || match take(1)[0] {
        0 => Cell::Null,
        1 => Cell::Int(i64::from_le_bytes(take(8).try_into().unwrap()).into()),
        2 => Cell::Float(u64::from_le_bytes(take(8).try_into().unwrap())),
        _ => {
            let length = take(1)[0] as usize;
            Cell::text(std::str::from_utf8(take(length)).unwrap())
        }
    };
    (0..count).map(|_| cell()).collect()
}
