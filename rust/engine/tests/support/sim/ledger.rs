//! The state that the simulated flow keeps: sums per key, with what tells a wrong attempt, clock or batch apart.
//!
//! One record of what an epoch changed: before-images undo, the touched keys are the delta. A bin that is copied to another process takes the list of
//! touched keys along; before-images stay with the original.

use std::collections::{BTreeMap, BTreeSet};

use penstock_bins::{BinState, Encoding, Extent, Range, StateError};
use serde::{Deserialize, Serialize};

use super::planted;

/// One row of the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Row {
    pub key: u64,
    pub amount: i64,
    pub time: i64,
    /// The last row of its key for now: the key is dropped with it.
    pub last: bool,
}

/// A row on its way, with what the attempt adds to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tagged {
    pub row: Row,
    pub salt: u64,
    pub clock: i64,
    pub epoch: u64,
}

/// State of a key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Value {
    pub sum: i64,
    /// The last epoch that changed it, and the sum at its beginning.
    pub epoch: u64,
    pub base: i64,
    /// The attempt and the processing time of that epoch.
    pub salt: u64,
    pub clock: i64,
}

/// One output row: key, amount, sum at the beginning of the epoch, processing time; and the attempt.
pub type Out = (u64, i64, i64, i64, u64);

impl Value {
    pub fn take(&mut self, tagged: Tagged) -> Out {
        if self.epoch != tagged.epoch + 1 {
            (self.base, self.epoch) = (self.sum, tagged.epoch + 1);
        }
        self.sum += tagged.row.amount;
        (self.salt, self.clock) = (tagged.salt, tagged.clock);
        (tagged.row.key, tagged.row.amount, self.base, tagged.clock, tagged.salt)
    }
}

pub fn hash(key: &u64) -> u64 {
    let mixed = (key ^ (key >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed ^ (mixed >> 32)
}

/// State of a bin.
#[derive(Debug, Default)]
pub struct Ledger {
    map: BTreeMap<u64, Value>,
    /// What touched keys were at the mark.
    undo: Option<BTreeMap<u64, Option<Value>>>,
    /// Keys that the epoch touched, here and where the bin was before.
    touched: BTreeSet<u64>,
}

impl Ledger {
    pub fn of(map: BTreeMap<u64, Value>) -> Ledger {
        Ledger { map, ..Ledger::default() }
    }

    pub fn entry(&mut self, key: u64) -> &mut Value {
        self.touch(key);
        self.map.entry(key).or_default()
    }

    pub fn remove(&mut self, key: u64) {
        self.touch(key);
        self.map.remove(&key);
    }

    pub fn iter(&self) -> impl Iterator<Item = (&u64, &Value)> {
        self.map.iter()
    }

    /// What the epoch changed.
    pub fn delta(&self) -> Vec<(u64, Option<Value>)> {
        let touched: Box<dyn Iterator<Item = &u64>> =
            match (&self.undo, planted("the receiver writes what it touched itself")) {
                (Some(undo), true) => Box::new(undo.keys()),
                (None, true) => Box::new([].iter()),
                (_, false) => Box::new(self.touched.iter()),
            };
        touched.map(|key| (*key, self.map.get(key).copied())).collect()
    }

    fn touch(&mut self, key: u64) {
        if let Some(undo) = &mut self.undo
            && !undo.contains_key(&key)
        {
            undo.insert(key, self.map.get(&key).copied());
        }
        self.touched.insert(key);
    }
}

impl BinState for Ledger {
    fn encode(&self, encoding: &mut Encoding) -> Result<Option<Vec<u8>>, StateError> {
        // First the touched keys, then a few entries at a time.
        let (begun, next) = encoding.place(|| (false, 0));
        let touched: Vec<u64> = match *begun || planted("the touched keys stay behind") {
            true => Vec::new(),
            false => self.touched.iter().copied().collect(),
        };
        *begun = true;
        let entries: Vec<(u64, Value)> = self.map.range(*next..).take(3).map(|(key, value)| (*key, *value)).collect();
        if touched.is_empty() && entries.is_empty() {
            return Ok(None);
        }
        *next = entries.last().map_or(*next, |(key, _)| key + 1);
        postcard::to_stdvec(&(touched, entries)).map(Some).map_err(StateError::from_source)
    }

    fn absorb(&mut self, chunk: &[u8]) -> Result<(), StateError> {
        let (touched, entries): (Vec<u64>, Vec<(u64, Value)>) =
            postcard::from_bytes(chunk).map_err(StateError::from_source)?;
        self.touched.extend(touched);
        self.map.extend(entries);
        Ok(())
    }

    fn divide(&self, ranges: &[Range], extent: Extent, new: &dyn Fn() -> Self) -> Result<Vec<Self>, StateError> {
        let part = |range: &Range| {
            let mut part = new();
            part.map.extend(self.map.iter().filter(|(key, _)| range.contains(hash(key))));
            if extent == Extent::Marked {
                part.touched.extend(self.touched.iter().filter(|key| range.contains(hash(key))));
            }
            part
        };
        Ok(ranges.iter().map(part).collect())
    }

    fn bytes(&self) -> usize {
        self.map.len() * size_of::<Value>()
    }

    fn keys(&self) -> usize {
        self.map.len()
    }

    fn mark(&mut self) {
        self.undo = Some(BTreeMap::new());
        self.touched.clear();
    }

    fn rollback(&mut self) -> Result<(), StateError> {
        self.touched.clear();
        match self.undo.replace(BTreeMap::new()) {
            None => self.map.clear(),
            Some(undo) => {
                for (key, before) in undo {
                    match before {
                        Some(value) => _ = self.map.insert(key, value),
                        None => _ = self.map.remove(&key),
                    }
                }
            }
        }
        Ok(())
    }
}
