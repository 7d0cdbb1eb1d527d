//! The simplest block and the simplest state: rows of (key, value), and a hash map per bin.
//!
//! For programs at the level of single records, and as the naive twin of columnar blocks and states.
//!
//! Invariant of the map's undo: while marked, `undo` holds for every key written since the mark what it was at the mark. Of keys that were
//! written before the map came here it holds what they were when they came.
//!
//! A chunk is a byte and entries: after [`KEYS`] keys with their states, after [`CHANGES`] keys with what they are now, if anything.

use std::collections::HashMap;
use std::hash::Hash;

use penstock_dataflow::wire::{Wire, WireError, decode_serde, encode_serde};
use penstock_files::Range;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::bin::{BinState, Encoding, Extent};
use crate::block::Block;
use crate::error::StateError;
use crate::recut::dealt_to;

/// Bytes after which [`KeyedMap`] begins a new chunk.
const CHUNK_BYTES: usize = 64 * 1024;

const KEYS: u8 = 0;
const CHANGES: u8 = 1;

/// A block of (key, value) rows with the hashes of the keys.
///
/// # Examples
/// ```
/// use penstock_bins::{Block, Keyed};
/// let block = Keyed::new(vec![(7u64, "a".to_string())], |key| key << 60);
/// assert_eq!(block.hashes(), Some(&[7 << 60][..]));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Keyed<K, V> {
    hashes: Option<Vec<u64>>,
    rows: Vec<(K, V)>,
}

impl<K, V> Keyed<K, V> {
    /// A block whose rows follow the hashes of their keys.
    pub fn new(rows: Vec<(K, V)>, hash: impl Fn(&K) -> u64) -> Self {
        Self { hashes: Some(rows.iter().map(|(key, _)| hash(key)).collect()), rows }
    }

    /// A block that stays on its worker.
    #[must_use]
    pub fn local(rows: Vec<(K, V)>) -> Self {
        Self { hashes: None, rows }
    }

    /// Whether it has hashes, so that its rows can be routed.
    #[must_use]
    pub fn is_hashed(&self) -> bool {
        self.hashes.is_some()
    }

    /// The rows.
    #[must_use]
    pub fn rows(&self) -> &[(K, V)] {
        &self.rows
    }

    /// The rows, each with its hash; without hashes, with 0.
    pub fn into_hashed_rows(self) -> impl Iterator<Item = (u64, K, V)> {
        let hashes = self.hashes.unwrap_or_default().into_iter().chain(std::iter::repeat(0));
        hashes.zip(self.rows).map(|(hash, (key, value))| (hash, key, value))
    }
}

impl<K, V> Wire for Keyed<K, V>
where
    K: Serialize + DeserializeOwned + Send + 'static,
    V: Serialize + DeserializeOwned + Send + 'static,
{
    fn encode(&self, out: &mut Vec<u8>) {
        encode_serde(self, out);
    }

    fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let block: Self = decode_serde(bytes)?;
        match &block.hashes {
            Some(hashes) if hashes.len() != block.rows.len() => {
                Err(WireError(format!("{} hashes for {} rows", hashes.len(), block.rows.len())))
            }
            _ => Ok(block),
        }
    }
}

impl<K, V> Block for Keyed<K, V>
where
    K: Serialize + DeserializeOwned + Send + 'static,
    V: Serialize + DeserializeOwned + Send + 'static,
{
    fn len(&self) -> usize {
        self.rows.len()
    }

    fn hashes(&self) -> Option<&[u64]> {
        self.hashes.as_deref()
    }

    fn split(self, workers: &[u32], emit: &mut dyn FnMut(u32, Self)) {
        let mut parts: Vec<(u32, Self)> = Vec::new();
        for ((hash, key, value), &worker) in self.into_hashed_rows().zip(workers) {
            let at = parts.iter().position(|(owner, _)| *owner == worker).unwrap_or_else(|| {
                parts.push((worker, Self { hashes: Some(Vec::new()), rows: Vec::new() }));
                parts.len() - 1
            });
            let part = &mut parts[at].1;
            part.hashes.get_or_insert_default().push(hash);
            part.rows.push((key, value));
        }
        for (worker, part) in parts {
            emit(worker, part);
        }
    }
}

/// A bin's state as a hash map from key to per-key state.
#[derive(Clone, Debug)]
pub struct KeyedMap<K, A> {
    map: HashMap<K, A>,
    /// Without it the map cannot be divided.
    hash: Option<fn(&K) -> u64>,
    /// `None` until the first mark: before it there is nothing to return to but emptiness.
    undo: Option<HashMap<K, Option<A>>>,
}

impl<K, A> Default for KeyedMap<K, A> {
    fn default() -> Self {
        Self { map: HashMap::new(), hash: None, undo: None }
    }
}

impl<K, A> KeyedMap<K, A> {
    /// An empty map that knows the hashes of its keys, so that its bin can be split.
    #[must_use]
    pub fn hashed(hash: fn(&K) -> u64) -> Self {
        Self { hash: Some(hash), ..Self::default() }
    }
}

impl<K: Eq + Hash + Clone, A: Clone> KeyedMap<K, A> {
    /// The state of a key.
    pub fn get(&self, key: &K) -> Option<&A> {
        self.map.get(key)
    }

    /// The state of a key, new if there is none, to change.
    pub fn entry(&mut self, key: K) -> &mut A
    where
        A: Default,
    {
        self.save(&key);
        self.map.entry(key).or_default()
    }

    /// Forgets a key.
    pub fn remove(&mut self, key: &K) -> Option<A> {
        self.save(key);
        self.map.remove(key)
    }

    /// All keys with their states, in no order.
    pub fn iter(&self) -> impl Iterator<Item = (&K, &A)> {
        self.map.iter()
    }

    /// What an extent has of keys that have not changed, and of those that have.
    fn parts(&self, extent: Extent) -> [Vec<K>; 2] {
        match (extent, &self.undo) {
            (Extent::All, _) => [self.map.keys().cloned().collect(), Vec::new()],
            (_, None) | (Extent::Anew, _) => [Vec::new(), self.map.keys().cloned().collect()],
            (Extent::Changed, Some(undo)) => [Vec::new(), undo.keys().cloned().collect()],
            (Extent::Marked, Some(undo)) => {
                let same = self.map.keys().filter(|key| !undo.contains_key(key));
                [same.cloned().collect(), undo.keys().cloned().collect()]
            }
        }
    }

    fn save(&mut self, key: &K) {
        if let Some(undo) = &mut self.undo
            && !undo.contains_key(key)
        {
            undo.insert(key.clone(), self.map.get(key).cloned());
        }
    }
}

fn take<E: DeserializeOwned>(bytes: &[u8]) -> Result<(E, &[u8]), StateError> {
    postcard::take_from_bytes(bytes).map_err(StateError::from_source)
}

impl<K, A> BinState for KeyedMap<K, A>
where
    K: Eq + Hash + Clone + Serialize + DeserializeOwned + Send + 'static,
    A: Clone + Serialize + DeserializeOwned + Send + 'static,
{
    fn encode(&self, encoding: &mut Encoding) -> Result<Option<Vec<u8>>, StateError> {
        // A hash map cannot be entered in the middle: the keys that are left.
        let extent = encoding.extent();
        let [keys, changes] = encoding.place(|| self.parts(extent));
        let mut out = Vec::new();
        while out.len() < CHUNK_BYTES
            && let Some(key) = keys.pop()
        {
            let state = self.map.get(&key).ok_or_else(|| StateError::new("a key went while it was encoded"))?;
            out.extend(out.is_empty().then_some(KEYS));
            out = postcard::to_extend(&(&key, state), out).map_err(StateError::from_source)?;
        }
        while (out.is_empty() || out[0] == CHANGES)
            && out.len() < CHUNK_BYTES
            && let Some(key) = changes.pop()
        {
            out.extend(out.is_empty().then_some(CHANGES));
            out = postcard::to_extend(&(&key, self.map.get(&key)), out).map_err(StateError::from_source)?;
        }
        Ok((!out.is_empty()).then_some(out))
    }

    fn absorb(&mut self, chunk: &[u8]) -> Result<(), StateError> {
        let Some((kind, mut rest)) = chunk.split_first() else { return Err(StateError::new("a chunk without bytes")) };
        while !rest.is_empty() {
            match *kind {
                KEYS => {
                    let ((key, state), after) = take::<(K, A)>(rest)?;
                    rest = after;
                    if self.map.insert(key, state).is_some() {
                        return Err(StateError::new("a key came twice"));
                    }
                }
                CHANGES => {
                    let ((key, state), after) = take::<(K, Option<A>)>(rest)?;
                    rest = after;
                    if let Some(undo) = &mut self.undo {
                        undo.insert(key.clone(), state.clone());
                    }
                    match state {
                        Some(state) => _ = self.map.insert(key, state),
                        None => _ = self.map.remove(&key),
                    }
                }
                kind => return Err(StateError::new(format!("a chunk of kind {kind}"))),
            }
        }
        Ok(())
    }

    fn divide(&self, ranges: &[Range], extent: Extent, new: &dyn Fn() -> Self) -> Result<Vec<Self>, StateError> {
        let hash = self.hash.ok_or_else(|| StateError::new("a map that does not know the hashes of its keys"))?;
        let mut parts: Vec<Self> = ranges.iter().map(|_| new()).collect();
        let part_of = dealt_to(ranges);
        let of = |key: &K| {
            let hash = hash(key);
            part_of(hash).ok_or_else(|| StateError::new(format!("a key with the hash {hash:#x}, which no part has")))
        };
        for (key, state) in &self.map {
            _ = parts[of(key)?].map.insert(key.clone(), state.clone());
        }
        if extent == Extent::Marked {
            parts.iter_mut().for_each(BinState::mark);
            let touched: Vec<&K> =
                self.undo.as_ref().map_or_else(|| self.map.keys().collect(), |undo| undo.keys().collect());
            for key in touched {
                let was = self.map.get(key).cloned();
                _ = parts[of(key)?].undo.get_or_insert_default().insert(key.clone(), was);
            }
        }
        Ok(parts)
    }

    fn bytes(&self) -> usize {
        self.map.capacity() * (size_of::<(K, A)>() + 1)
    }

    fn keys(&self) -> usize {
        self.map.len()
    }

    fn mark(&mut self) {
        self.undo.get_or_insert_default().clear();
    }

    fn settle(&mut self) {
        self.undo = None;
    }

    fn rollback(&mut self) -> Result<(), StateError> {
        match &mut self.undo {
            None => self.map.clear(),
            Some(undo) => {
                for (key, before) in undo.drain() {
                    match before {
                        Some(state) => _ = self.map.insert(key, state),
                        None => _ = self.map.remove(&key),
                    }
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn copy(state: &KeyedMap<u16, String>) -> (KeyedMap<u16, String>, usize) {
        let (mut copy, mut chunks) = (KeyedMap::default(), 0);
        let mut encoding = Encoding::new();
        while let Some(chunk) = state.encode(&mut encoding).unwrap() {
            copy.absorb(&chunk).unwrap();
            chunks += 1;
        }
        (copy, chunks)
    }

    #[test]
    fn many_chunks_give_the_same_state() {
        let mut state = KeyedMap::default();
        assert_eq!(copy(&state).1, 0, "an empty state needs no chunk");
        for i in 0..5000u16 {
            *state.entry(i) = "x".repeat(i as usize % 100);
        }
        let (copied, chunks) = copy(&state);
        assert!(chunks > 3, "{chunks}");
        assert_eq!(copied.map, state.map);
    }

    #[test]
    fn bad_chunks_are_refused() {
        let mut state = KeyedMap::<u16, String>::default();
        *state.entry(3) = "three".into();
        let chunk = state.encode(&mut Encoding::new()).unwrap().unwrap();
        assert!(state.clone().absorb(&chunk).is_err(), "a key twice");
        for cut in (0..chunk.len()).filter(|cut| *cut != 1) {
            assert!(KeyedMap::<u16, String>::default().absorb(&chunk[..cut]).is_err(), "cut at {cut}");
        }
    }

    /// What looks at all parts for each key does not come to an end here.
    #[test]
    fn many_keys_are_divided_among_many_parts() {
        let mut state = KeyedMap::<u64, ()>::hashed(|key| key << 44);
        let range = |prefix| Range::new(prefix, 18).unwrap();
        let ranges: Vec<Range> = (0..1 << 18).rev().map(range).collect();
        (0..1 << 18).for_each(|key| *state.entry(key << 2) = ());
        let parts = state.divide(&ranges, Extent::All, &KeyedMap::default).unwrap();
        assert!((0..1 << 18).rev().zip(&parts).all(|(key, part)| part.keys() == 1 && part.get(&(key << 2)).is_some()));
        assert!(state.divide(&ranges[1..], Extent::All, &KeyedMap::default).is_err(), "one key is left");
    }

    #[test]
    fn a_block_with_too_few_hashes_is_refused() {
        let mut bytes = Vec::new();
        Keyed { hashes: Some(vec![1]), rows: vec![(1u8, 1u8), (2, 2)] }.encode(&mut bytes);
        assert!(Keyed::<u8, u8>::decode(&bytes).is_err());
    }

    proptest! {
        /// What each epoch changed, absorbed by a twin, gives the state, wherever it was meanwhile.
        #[test]
        fn changes_make_up_the_state_while_it_moves(deeds in prop::collection::vec((0u8..8, 0u8..6, any::<u32>()), 0..150)) {
            let mut state = KeyedMap::<u8, u32>::default();
            let mut twin = KeyedMap::<u8, u32>::default();
            let chunks = |state: &KeyedMap<u8, u32>, extent| {
                let mut encoding = Encoding::of(extent);
                std::iter::from_fn(|| state.encode(&mut encoding).unwrap()).collect::<Vec<_>>()
            };
            state.mark();
            for (deed, key, value) in deeds {
                match deed {
                    0 | 1 => _ = state.remove(&key),
                    2 if value % 2 == 0 => {
                        chunks(&state, Extent::Changed).iter().for_each(|chunk| twin.absorb(chunk).unwrap());
                        prop_assert_eq!(&twin.map, &state.map);
                        state.mark();
                    }
                    3 if value % 2 == 0 => {
                        let mut moved = KeyedMap::default();
                        moved.mark();
                        chunks(&state, Extent::Marked).iter().for_each(|chunk| moved.absorb(chunk).unwrap());
                        prop_assert_eq!(&moved.map, &state.map);
                        let before = moved.map.clone();
                        *moved.entry(key) = value;
                        moved.rollback().unwrap();
                        prop_assert_eq!(&moved.map, &before, "undone, what has come stays");
                        chunks(&state, Extent::Changed).iter().for_each(|chunk| moved.absorb(chunk).unwrap());
                        state = moved;
                    }
                    _ => *state.entry(key) = value,
                }
            }
            chunks(&state, Extent::Changed).iter().for_each(|chunk| twin.absorb(chunk).unwrap());
            prop_assert_eq!(&twin.map, &state.map);
        }

        #[test]
        fn rollback_equals_a_copy_at_the_mark(deeds in prop::collection::vec((0u8..4, 0u8..6, any::<u32>()), 0..100)) {
            let mut state = KeyedMap::<u8, u32>::default();
            let mut at_mark = HashMap::new();
            for (deed, key, value) in deeds {
                match deed {
                    0 => _ = state.remove(&key),
                    1 if value % 4 == 0 => {
                        state.mark();
                        at_mark = state.map.clone();
                    }
                    2 if value % 4 == 0 => {
                        state.rollback().unwrap();
                        prop_assert_eq!(&state.map, &at_mark);
                    }
                    _ => *state.entry(key) = value,
                }
            }
            state.rollback().unwrap();
            prop_assert_eq!(&state.map, &at_mark);
        }
    }
}
