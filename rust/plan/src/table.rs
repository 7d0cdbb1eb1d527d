//! A keyed table: distinct keys in slots, accumulators in dense columns beside them, and an index of hashes.
//!
//! The index is open addressing with linear probing over the low 32 bits of the hash, which it stores, so growing touches nothing else.
//! The top bits chose the bin and would all fall into one part of the index (measured 4 times slower), so they are not used.
//!
//! Slots are only ever appended. Undo therefore costs what was touched: the length at the mark and, on the first write to an older slot,
//! a copy of its accumulators. The same trick lists the slots changed within an epoch when `track` is on.

use std::ops::Range;

use crate::agg::{Acc, Input, Kind, Wrapped};
use crate::error::StateFault;
use crate::hash::{NULL_HASH, hash_int};
use crate::key::{KeyKind, KeyStore, Keys};
use crate::wire::{Reader, put_items, put_u32};

/// What a table holds; equal on both sides of a move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) key: KeyKind,
    pub(crate) accs: Vec<Kind>,
    /// Whether changed slots are listed.
    pub(crate) track: bool,
}

/// A set of slots that remembers insertion order and empties in the time of its size.
#[derive(Clone, Default)]
struct SlotSet {
    bits: Vec<u64>,
    list: Vec<u32>,
}

impl SlotSet {
    fn insert(&mut self, slot: u32) -> bool {
        let (word, bit) = (slot as usize / 64, 1u64 << (slot % 64));
        if word >= self.bits.len() {
            self.bits.resize(word + 1, 0);
        }
        let fresh = self.bits[word] & bit == 0;
        if fresh {
            self.bits[word] |= bit;
            self.list.push(slot);
        }
        fresh
    }

    fn contains(&self, slot: u32) -> bool {
        self.bits.get(slot as usize / 64).is_some_and(|word| word >> (slot % 64) & 1 == 1)
    }

    fn clear(&mut self) {
        for &slot in &self.list {
            self.bits[slot as usize / 64] = 0;
        }
        self.list.clear();
    }

    fn bytes(&self) -> usize {
        self.bits.capacity() * 8 + self.list.capacity() * 4
    }
}

/// Entries are `hash_low << 32 | slot + 1`; 0 is vacant. Never more than 3/4 full.
#[derive(Clone, Default)]
struct Index {
    entries: Vec<u64>,
    used: usize,
}

impl Index {
    fn reserve_one(&mut self) {
        if (self.used + 1) * 4 <= self.entries.len() * 3 {
            return;
        }
        let len = (self.entries.len() * 2).max(16);
        let old = std::mem::replace(&mut self.entries, vec![0; len]);
        for entry in old {
            if entry != 0 {
                let at = self.vacancy((entry >> 32) as u32);
                self.entries[at] = entry;
            }
        }
    }

    fn vacancy(&self, low: u32) -> usize {
        let mask = self.entries.len() - 1;
        let mut at = low as usize & mask;
        while self.entries[at] != 0 {
            at = (at + 1) & mask;
        }
        at
    }

    /// The slot of a key, or the vacancy where `insert` may put it. Requires `reserve_one` before.
    #[inline]
    fn find(&self, hash: u64, is_key: impl Fn(usize) -> bool) -> Result<u32, usize> {
        let mask = self.entries.len() - 1;
        let low = hash as u32;
        let mut at = low as usize & mask;
        loop {
            let entry = self.entries[at];
            if entry == 0 {
                return Err(at);
            }
            if (entry >> 32) as u32 == low && is_key((entry as u32 - 1) as usize) {
                return Ok(entry as u32 - 1);
            }
            at = (at + 1) & mask;
        }
    }

    fn insert(&mut self, at: usize, hash: u64, slot: usize) {
        let slot = u32::try_from(slot + 1).expect("one bin holds fewer than 2^32 keys");
        self.entries[at] = u64::from(hash as u32) << 32 | u64::from(slot);
        self.used += 1;
    }
}

#[derive(Clone)]
struct Undo {
    len: usize,
    touched: SlotSet,
    /// Accumulators of `touched.list`, as they were at the mark.
    saved: Vec<Acc>,
    changed: Vec<u32>,
}

/// See the module.
#[derive(Clone)]
pub(crate) struct Table {
    keys: KeyStore,
    accs: Vec<Acc>,
    index: Index,
    changed: Option<SlotSet>,
    undo: Option<Undo>,
    slots: Vec<u32>,
}

impl Table {
    pub(crate) fn new(shape: &Shape) -> Self {
        Self {
            keys: KeyStore::new(shape.key),
            accs: shape.accs.iter().map(|&kind| Acc::new(kind)).collect(),
            index: Index::default(),
            changed: shape.track.then(SlotSet::default),
            undo: None,
            slots: Vec::new(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.keys.len()
    }

    pub(crate) fn keys(&self) -> &KeyStore {
        &self.keys
    }

    pub(crate) fn accs(&self) -> &[Acc] {
        &self.accs
    }

    fn slot_of_int(&mut self, key: Option<i64>, hash: u64) -> u32 {
        let KeyStore::Int { values, nulls } = &mut self.keys else { unreachable!("keys and store of one kind") };
        // A null is not in the index: at most one slot holds it.
        let Some(key) = key else {
            return match nulls.first() {
                Some(&slot) => slot,
                None => {
                    nulls.push(values.len() as u32);
                    values.push(0);
                    nulls[0]
                }
            };
        };
        self.index.reserve_one();
        // The null's slot is not in the index, so its stored 0 is never compared.
        match self.index.find(hash, |slot| values[slot] == key) {
            Ok(slot) => slot,
            Err(at) => {
                self.index.insert(at, hash, values.len());
                values.push(key);
                values.len() as u32 - 1
            }
        }
    }

    fn slot_of_row(&mut self, row: &[u8], hash: u64) -> u32 {
        self.index.reserve_one();
        let keys = &self.keys;
        match self.index.find(hash, |slot| keys.row_bytes(slot) == row) {
            Ok(slot) => slot,
            Err(at) => {
                self.index.insert(at, hash, self.keys.len());
                self.keys.push_row(row, hash);
                self.keys.len() as u32 - 1
            }
        }
    }

    /// Adds the block's `rows` to the table. Rows of one key keep their order.
    pub(crate) fn update(
        &mut self,
        keys: &Keys,
        hashes: &[u64],
        inputs: &[Input],
        rows: &[u32],
    ) -> Result<(), (usize, Wrapped)> {
        let mut slots = std::mem::take(&mut self.slots);
        slots.clear();
        slots.reserve(rows.len());
        match keys {
            Keys::Unit if !rows.is_empty() => {
                let slot = self.slot_of_int(Some(0), hash_int(0));
                slots.resize(rows.len(), slot);
            }
            Keys::Unit => {}
            Keys::Int(codes) => slots.extend(rows.iter().map(|&row| {
                let row = row as usize;
                let valid = codes.nulls.as_ref().is_none_or(|nulls| nulls.is_valid(row));
                self.slot_of_int(valid.then(|| codes.values[row]), hashes[row])
            })),
            Keys::Rows(encoded) => slots.extend(rows.iter().map(|&row| {
                let row = row as usize;
                self.slot_of_row(encoded.row(row).as_ref(), hashes[row])
            })),
        }
        self.prepare_write(&slots);
        let done = self
            .accs
            .iter_mut()
            .zip(inputs)
            .enumerate()
            .try_for_each(|(at, (acc, input))| acc.update(input, rows, &slots).map_err(|wrapped| (at, wrapped)));
        self.slots = slots;
        done
    }

    /// Adds all of `other` to this table.
    pub(crate) fn merge(&mut self, other: &Self) -> Result<(), (usize, Wrapped)> {
        let mut slots = std::mem::take(&mut self.slots);
        slots.clear();
        match &other.keys {
            KeyStore::Int { .. } => slots.extend((0..other.len()).map(|slot| {
                let key = other.keys.int(slot);
                self.slot_of_int(key, key.map_or(NULL_HASH, hash_int))
            })),
            KeyStore::Rows { hashes, .. } => {
                slots.extend((0..other.len()).map(|slot| self.slot_of_row(other.keys.row_bytes(slot), hashes[slot])))
            }
        }
        self.prepare_write(&slots);
        let done = self
            .accs
            .iter_mut()
            .zip(&other.accs)
            .enumerate()
            .try_for_each(|(at, (acc, more))| acc.merge(more, &slots).map_err(|wrapped| (at, wrapped)));
        self.slots = slots;
        done
    }

    /// Grows the accumulators over new keys, saves what a rollback needs and lists what changed.
    fn prepare_write(&mut self, slots: &[u32]) {
        let len = self.keys.len();
        self.accs.iter_mut().for_each(|acc| acc.resize(len));
        if let Some(undo) = &mut self.undo {
            for &slot in slots {
                if (slot as usize) < undo.len && undo.touched.insert(slot) {
                    undo.saved.iter_mut().zip(&self.accs).for_each(|(saved, acc)| saved.push_from(acc, slot as usize));
                }
            }
        }
        if let Some(changed) = &mut self.changed {
            for &slot in slots {
                changed.insert(slot);
            }
        }
    }

    /// The slots changed since the last `settle`; empty when the table does not track.
    pub(crate) fn changed(&self) -> &[u32] {
        self.changed.as_ref().map_or(&[], |changed| &changed.list)
    }

    /// Forgets what changed.
    pub(crate) fn settle(&mut self) {
        if let Some(changed) = &mut self.changed {
            changed.clear();
        }
    }

    /// Starts recording undo from here. Cost: what was touched since the last mark.
    pub(crate) fn mark(&mut self) {
        let len = self.keys.len();
        let changed = self.changed().to_vec();
        match &mut self.undo {
            Some(undo) => {
                undo.len = len;
                undo.touched.clear();
                undo.saved.iter_mut().for_each(|saved| saved.truncate(0));
                undo.changed = changed;
            }
            None => {
                let saved = self.accs.iter().map(Acc::fresh).collect();
                self.undo = Some(Undo { len, touched: SlotSet::default(), saved, changed });
            }
        }
    }

    /// Keeps no undo until the next mark.
    pub(crate) fn keep_no_undo(&mut self) {
        self.undo = None;
    }

    /// Back to the last mark; without one, nothing happens.
    pub(crate) fn rollback(&mut self) {
        let Some(undo) = &mut self.undo else { return };
        for (at, &slot) in undo.touched.list.iter().enumerate() {
            for (acc, saved) in self.accs.iter_mut().zip(&undo.saved) {
                acc.copy_from(slot as usize, saved, at);
            }
        }
        undo.touched.clear();
        undo.saved.iter_mut().for_each(|saved| saved.truncate(0));
        if let Some(changed) = &mut self.changed {
            changed.clear();
            undo.changed.iter().for_each(|&slot| {
                changed.insert(slot);
            });
        }
        if undo.len < self.keys.len() {
            let len = undo.len;
            self.keys.truncate(len);
            self.accs.iter_mut().for_each(|acc| acc.truncate(len));
            self.reindex();
        }
    }

    fn is_null_slot(&self, slot: usize) -> bool {
        matches!(&self.keys, KeyStore::Int { nulls, .. } if nulls.first() == Some(&(slot as u32)))
    }

    fn reindex(&mut self) {
        self.index = Index::default();
        for slot in 0..self.keys.len() {
            if !self.is_null_slot(slot) {
                self.index.reserve_one();
                let hash = self.keys.hash(slot);
                let at = self.index.vacancy(hash as u32);
                self.index.insert(at, hash, slot);
            }
        }
    }

    /// Empties the table, keeping its memory; only for scratch tables without undo.
    pub(crate) fn clear(&mut self) {
        self.keys.truncate(0);
        self.accs.iter_mut().for_each(|acc| acc.truncate(0));
        self.index.entries.fill(0);
        self.index.used = 0;
        self.settle();
    }

    /// Bytes held, by capacity.
    pub(crate) fn bytes(&self) -> usize {
        let undo = self.undo.as_ref().map_or(0, |undo| {
            undo.touched.bytes() + undo.changed.capacity() * 4 + undo.saved.iter().map(Acc::bytes).sum::<usize>()
        });
        self.keys.bytes()
            + self.accs.iter().map(Acc::bytes).sum::<usize>()
            + self.index.entries.capacity() * 8
            + self.changed.as_ref().map_or(0, SlotSet::bytes)
            + self.slots.capacity() * 4
            + undo
    }

    /// Cuts the slots into ranges that encode to at most `limit` bytes each (a single slot may exceed it).
    pub(crate) fn cut(&self, limit: usize) -> Vec<Range<usize>> {
        let mut cuts = Vec::new();
        let (mut start, mut size) = (0, 0);
        for slot in 0..self.len() {
            let more =
                5 + self.keys.encoded_len(slot) + self.accs.iter().map(|acc| acc.encoded_len(slot)).sum::<usize>();
            if size + more > limit && slot > start {
                cuts.push(start..slot);
                (start, size) = (slot, 0);
            }
            size += more;
        }
        if start < self.len() {
            cuts.push(start..self.len());
        }
        cuts
    }

    pub(crate) fn encode(&self, slots: Range<usize>, out: &mut Vec<u8>) {
        put_u32(out, slots.len() as u32);
        self.keys.encode(slots.clone(), out);
        self.accs.iter().for_each(|acc| acc.encode(slots.clone(), out));
        if let Some(changed) = &self.changed {
            let flags: Vec<u8> = slots.map(|slot| u8::from(changed.contains(slot as u32))).collect();
            put_items(out, &flags, |flag| [flag]);
        }
    }

    /// Reads slots written by `encode`.
    pub(crate) fn decode(shape: &Shape, reader: &mut Reader<'_>) -> Result<Self, StateFault> {
        let count = reader.u32()? as usize;
        let mut table = Self::new(shape);
        let keys = KeyStore::decode(shape.key, reader, count)?;
        for (acc, &kind) in table.accs.iter_mut().zip(&shape.accs) {
            *acc = Acc::decode(kind, reader, count)?;
        }
        table.append_keys(&keys)?;
        if let Some(changed) = &mut table.changed {
            let mut flags = Vec::new();
            reader.items(count, &mut flags, |[flag]: [u8; 1]| flag)?;
            (0u32..).zip(flags).filter(|&(_, flag)| flag != 0).for_each(|(slot, _)| {
                changed.insert(slot);
            });
        }
        Ok(table)
    }

    /// Appends the slots of `other`, none of which this table holds. Both together become the state that a rollback returns to.
    pub(crate) fn adopt(&mut self, mut other: Self) -> Result<(), StateFault> {
        let start = self.len() as u32;
        self.append_keys(&other.keys)?;
        self.accs.iter_mut().zip(&mut other.accs).for_each(|(acc, more)| acc.append(more));
        if let Some(changed) = &mut self.changed {
            other.changed().iter().for_each(|&slot| {
                changed.insert(start + slot);
            });
        }
        if self.undo.is_some() {
            self.mark();
        }
        Ok(())
    }

    /// Appends keys; on a key that is there already nothing changes.
    fn append_keys(&mut self, keys: &KeyStore) -> Result<(), StateFault> {
        let start = self.len();
        for slot in 0..keys.len() {
            let found = match keys {
                KeyStore::Int { .. } => {
                    let key = keys.int(slot);
                    self.slot_of_int(key, key.map_or(NULL_HASH, hash_int))
                }
                KeyStore::Rows { hashes, .. } => self.slot_of_row(keys.row_bytes(slot), hashes[slot]),
            };
            if found as usize != start + slot {
                self.keys.truncate(start);
                self.reindex();
                return Err(StateFault::Corrupt { what: "a key comes twice" });
            }
        }
        Ok(())
    }
}
