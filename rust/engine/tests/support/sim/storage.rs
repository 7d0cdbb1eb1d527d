//! A store of files, and the simulated form of a data file.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::flow::Record;
use super::ledger::{Value, hash};
use crate::machine::{Claim, Contents, DataFile, Named, Range, StoreError, decode, encode};

/// Names and bytes, and what is wrong with the store now.
#[derive(Default)]
pub struct Storage {
    pub files: BTreeMap<String, Vec<u8>>,
    /// Nothing works until then.
    pub down_until: u64,
}

/// Changes of one range of one operator.
#[derive(Debug, Serialize, Deserialize)]
struct Segment {
    operator: String,
    prefix: u32,
    length: u8,
    entries: Vec<(u64, Option<Value>)>,
}

impl Storage {
    /// Writes what an epoch changed.
    pub fn segments(record: &Record) -> Vec<u8> {
        let segments: Vec<Segment> = record
            .iter()
            .map(|(range, entries)| Segment {
                operator: "sums".into(),
                prefix: range.prefix(),
                length: range.length(),
                entries: entries.clone(),
            })
            .collect();
        postcard::to_stdvec(&segments).expect("plain data")
    }

    pub fn put(&mut self, name: String, bytes: Vec<u8>, epoch: u64, generation: u64) -> DataFile {
        let (length, checksum) = (bytes.len() as u64, crc32fast::hash(&bytes));
        self.files.insert(name.clone(), bytes);
        DataFile { name, length, checksum, epoch, generation }
    }

    /// The keys of all files, newest per key.
    pub fn state(&self, files: &[DataFile]) -> Result<BTreeMap<u64, Option<Value>>, StoreError> {
        let mut state = BTreeMap::new();
        for file in files {
            let damaged = |reason: &str| StoreError::Damaged { name: file.name.clone(), reason: reason.into() };
            let bytes = self.files.get(&file.name).ok_or_else(|| damaged("is not there"))?;
            if bytes.len() as u64 != file.length || crc32fast::hash(bytes) != file.checksum {
                return Err(damaged("has other bytes than were written"));
            }
            let segments: Vec<Segment> = postcard::from_bytes(bytes).map_err(|_| damaged("cannot be read"))?;
            for segment in segments {
                let range = Range::new(segment.prefix, segment.length).expect("written by us");
                assert_eq!(segment.operator, "sums");
                for (key, value) in segment.entries {
                    assert!(range.contains(hash(&key)), "key {key} is not of range {range}");
                    state.insert(key, value);
                }
            }
        }
        Ok(state)
    }

    /// Those that are there.
    pub fn restored(&self, files: &[DataFile]) -> Result<BTreeMap<u64, Value>, StoreError> {
        Ok(self.state(files)?.into_iter().filter_map(|(key, value)| Some((key, value?))).collect())
    }

    /// All files as one, or as two.
    pub fn merged(&self, files: &[DataFile], parts: u32) -> Result<Vec<Vec<u8>>, StoreError> {
        let state = self.state(files)?;
        let part = |prefix| {
            let length = parts.trailing_zeros() as u8;
            let range = Range::new(prefix, length).expect("one of them");
            let own = state.iter().filter(|(key, _)| range.contains(hash(key)));
            let entries = own.map(|(key, value)| (*key, *value)).collect();
            postcard::to_stdvec(&vec![Segment { operator: "sums".into(), prefix, length, entries }])
        };
        Ok((0..parts).map(|prefix| part(prefix).expect("plain data")).collect())
    }

    pub fn newest_claim(&self) -> u64 {
        let numbers = self.files.keys().filter_map(|name| name.strip_prefix("claim-")?.parse().ok());
        numbers.max().unwrap_or(0)
    }

    pub fn claim(&mut self, claim: &Claim) -> bool {
        let name = Claim::name(claim.number);
        match self.files.get(&name) {
            Some(bytes) => decode::<Claim>(bytes).is_ok_and(|there| there.nonce == claim.nonce),
            None => {
                self.files.insert(name, encode(claim));
                true
            }
        }
    }

    pub fn has(&self, claim: &Claim) -> bool {
        self.files.get(&Claim::name(claim.number)) == Some(&encode(claim))
    }

    /// The newest claim's nonce.
    pub fn holder(&self) -> Option<u64> {
        decode::<Claim>(self.files.get(&Claim::name(self.newest_claim()))?).ok().map(|claim| claim.nonce)
    }

    /// What is there; manifests and notes of batches before `since`, and those that are known, by name only.
    pub fn contents(&self, held: bool, since: u64, known: &[String]) -> Contents {
        let mut contents = Contents { held, ..Contents::default() };
        for (name, bytes) in &self.files {
            match Named::parse(name) {
                Some(Named::Manifest { batch } | Named::Shown { batch }) if batch < since || known.contains(name) => {
                    contents.list(name, bytes.len() as u64);
                }
                _ => contents.add(name, bytes.len() as u64, bytes),
            }
        }
        contents
    }
}
