//! Chunks of entries: state key by key, in a form that is merged and divided without its operator.
//!
//! A key is its hash and its bytes together, so what its hash says its bytes may leave out.
//!
//! Invariant: equal keys have equal bytes, and a key's bytes never depend on when or where they were made.

use crate::error::Damage;
use crate::range::Range;

const TAG: u8 = b'E';
const VERSION: u8 = 1;

const GONE: u8 = 0;
const PUT: u8 = 1;
const GONE_ALL: u8 = 2;
const SHARED: u8 = 3;

/// One change of state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry<'a> {
    /// What a key is from now on.
    Put {
        /// Hash of the key.
        hash: u64,
        /// Its bytes.
        key: &'a [u8],
        /// Its value's.
        value: &'a [u8],
    },
    /// A key is gone.
    Gone {
        /// Hash of the key.
        hash: u64,
        /// Its bytes.
        key: &'a [u8],
    },
    /// All keys whose bytes begin so are gone.
    GoneAll {
        /// The beginning.
        prefix: &'a [u8],
    },
    /// What the keys of the range share from now on. Where ranges were merged there may be several, of which the operator makes one.
    Shared {
        /// What.
        value: &'a [u8],
    },
}

impl Entry<'_> {
    /// Bytes that it takes, or a few less.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match self {
            Self::Put { key, value, .. } => 11 + key.len() + value.len(),
            Self::Gone { key, .. } => 10 + key.len(),
            Self::GoneAll { prefix: blob } | Self::Shared { value: blob } => 2 + blob.len(),
        }
    }
}

/// Makes one chunk.
///
/// # Examples
/// ```
/// use penstock_files::{Chunk, ChunkWriter, Entry};
/// let entry = Entry::Put { hash: 7, key: b"k", value: b"v" };
/// let mut writer = ChunkWriter::new(b"counts");
/// writer.push(entry);
/// let bytes = writer.finish();
/// let chunk = Chunk::parse(&bytes)?;
/// assert_eq!(chunk.shape(), b"counts");
/// assert_eq!(chunk.entries().collect::<Result<Vec<_>, _>>()?, [entry]);
/// # Ok::<(), penstock_files::Damage>(())
/// ```
#[derive(Debug)]
pub struct ChunkWriter {
    bytes: Vec<u8>,
    head: usize,
}

impl ChunkWriter {
    /// A chunk without entries; `shape` tells an operator whether a chunk is its own.
    #[must_use]
    pub fn new(shape: &[u8]) -> Self {
        let mut bytes = vec![TAG, VERSION];
        put_blob(&mut bytes, shape);
        Self { head: bytes.len(), bytes }
    }

    /// Adds an entry.
    pub fn push(&mut self, entry: Entry<'_>) {
        let out = &mut self.bytes;
        match entry {
            Entry::Put { hash, key, value } => {
                out.push(PUT);
                out.extend_from_slice(&hash.to_le_bytes());
                put_blob(out, key);
                put_blob(out, value);
            }
            Entry::Gone { hash, key } => {
                out.push(GONE);
                out.extend_from_slice(&hash.to_le_bytes());
                put_blob(out, key);
            }
            Entry::GoneAll { prefix } => {
                out.push(GONE_ALL);
                put_blob(out, prefix);
            }
            Entry::Shared { value } => {
                out.push(SHARED);
                put_blob(out, value);
            }
        }
    }

    /// Bytes so far.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether there is no entry.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes.len() == self.head
    }

    /// The chunk.
    #[must_use]
    pub fn finish(self) -> Vec<u8> {
        self.bytes
    }
}

/// Whether a chunk of state is one of entries; other chunks of state begin otherwise.
#[must_use]
pub fn is_entries(bytes: &[u8]) -> bool {
    bytes.first() == Some(&TAG)
}

/// A chunk that was read.
#[derive(Clone, Copy, Debug)]
pub struct Chunk<'a> {
    shape: &'a [u8],
    entries: &'a [u8],
}

impl<'a> Chunk<'a> {
    /// Takes a chunk apart; its entries only when they are asked for.
    ///
    /// # Errors
    /// It is no chunk of entries, or of a newer version.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, Damage> {
        let mut reader = Reader(bytes);
        if reader.u8() != Ok(TAG) {
            return Err(Damage::Content { what: "a chunk is none of entries" });
        }
        match reader.u8()? {
            0 => return Err(Damage::Content { what: "the version of a chunk" }),
            VERSION => {}
            found => return Err(Damage::Newer { found: found.into() }),
        }
        let shape = reader.blob()?;
        Ok(Self { shape, entries: reader.0 })
    }

    /// What its operator knows it by.
    #[must_use]
    pub fn shape(&self) -> &'a [u8] {
        self.shape
    }

    /// Its entries, up to the first that is damaged.
    #[must_use]
    pub fn entries(&self) -> Entries<'a> {
        Entries { left: Reader(self.entries) }
    }

    /// The same with those keys only whose hash `keep` names; none when nothing is left.
    ///
    /// # Errors
    /// A damaged entry.
    pub fn filtered(&self, keep: impl Fn(u64) -> bool) -> Result<Option<Vec<u8>>, Damage> {
        Ok(self.dealt(1, |hash| keep(hash).then_some(0))?.swap_remove(0))
    }

    /// So many chunks of these keys, each with those whose hashes `to` gives to it; none where nothing is given.
    ///
    /// # Errors
    /// A damaged entry.
    pub fn dealt(&self, count: usize, to: impl Fn(u64) -> Option<usize>) -> Result<Vec<Option<Vec<u8>>>, Damage> {
        let mut writers: Vec<ChunkWriter> = (0..count).map(|_| ChunkWriter::new(self.shape)).collect();
        for entry in self.entries() {
            match entry? {
                entry @ (Entry::Put { hash, .. } | Entry::Gone { hash, .. }) => {
                    to(hash).into_iter().for_each(|place| writers[place].push(entry));
                }
                entry => writers.iter_mut().for_each(|writer| writer.push(entry)),
            }
        }
        Ok(writers.into_iter().map(|writer| (!writer.is_empty()).then(|| writer.finish())).collect())
    }

    /// Refuses keys that are not of a range.
    ///
    /// # Errors
    /// There is one, or a damaged entry.
    pub fn check(&self, range: Range) -> Result<(), Damage> {
        for entry in self.entries() {
            match entry? {
                Entry::Put { hash, .. } | Entry::Gone { hash, .. } if !range.contains(hash) => {
                    return Err(Damage::Content { what: "a key is not of the range of its segment" });
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// The entries of a chunk.
#[derive(Clone, Debug)]
pub struct Entries<'a> {
    left: Reader<'a>,
}

impl<'a> Iterator for Entries<'a> {
    type Item = Result<Entry<'a>, Damage>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.left.0.is_empty() {
            return None;
        }
        let entry = self.left.entry();
        if entry.is_err() {
            self.left.0 = &[];
        }
        Some(entry)
    }
}

fn put_blob(out: &mut Vec<u8>, bytes: &[u8]) {
    let mut left = bytes.len() as u64;
    while left >= 0x80 {
        out.push(left as u8 | 0x80);
        left >>= 7;
    }
    out.push(left as u8);
    out.extend_from_slice(bytes);
}

const SHORT: Damage = Damage::Content { what: "a chunk ends early" };

#[derive(Clone, Debug)]
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn u8(&mut self) -> Result<u8, Damage> {
        let (&first, rest) = self.0.split_first().ok_or(SHORT)?;
        self.0 = rest;
        Ok(first)
    }

    fn hash(&mut self) -> Result<u64, Damage> {
        let (hash, rest) = self.0.split_first_chunk().ok_or(SHORT)?;
        self.0 = rest;
        Ok(u64::from_le_bytes(*hash))
    }

    fn blob(&mut self) -> Result<&'a [u8], Damage> {
        let mut len = 0_u64;
        for shift in (0..64).step_by(7) {
            let byte = self.u8()?;
            let low = u64::from(byte & 0x7f);
            if shift == 63 && low > 1 {
                break;
            }
            len |= low << shift;
            if byte < 0x80 {
                let len = usize::try_from(len).ok().filter(|len| *len <= self.0.len()).ok_or(SHORT)?;
                let (blob, rest) = self.0.split_at(len);
                self.0 = rest;
                return Ok(blob);
            }
        }
        Err(Damage::Content { what: "a length in a chunk" })
    }

    fn entry(&mut self) -> Result<Entry<'a>, Damage> {
        Ok(match self.u8()? {
            GONE => Entry::Gone { hash: self.hash()?, key: self.blob()? },
            PUT => Entry::Put { hash: self.hash()?, key: self.blob()?, value: self.blob()? },
            GONE_ALL => Entry::GoneAll { prefix: self.blob()? },
            SHARED => Entry::Shared { value: self.blob()? },
            _ => return Err(Damage::Content { what: "an entry of an unknown kind" }),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn entries_come_back_and_every_cut_is_noticed_or_an_end() {
        let long = [9; 300];
        let entries = [
            Entry::Put { hash: u64::MAX, key: b"", value: &long },
            Entry::Gone { hash: 0, key: b"k" },
            Entry::GoneAll { prefix: b"pre" },
            Entry::Shared { value: b"all" },
        ];
        let mut writer = ChunkWriter::new(b"shape");
        let mut ends = vec![writer.len()];
        for entry in entries {
            writer.push(entry);
            ends.push(writer.len());
        }
        let bytes = writer.finish();
        let read =
            |bytes: &[u8]| Chunk::parse(bytes)?.entries().map(|entry| entry.map(drop)).collect::<Result<Vec<_>, _>>();
        assert_eq!(Chunk::parse(&bytes).unwrap().entries().map(Result::unwrap).collect::<Vec<_>>(), entries);
        for cut in 0..bytes.len() {
            assert_eq!(read(&bytes[..cut]).is_ok(), ends.contains(&cut), "cut at {cut}");
        }
        let kept = Chunk::parse(&bytes).unwrap().filtered(|hash| hash > 0).unwrap().unwrap();
        let kept = Chunk::parse(&kept).unwrap().entries().map(Result::unwrap).collect::<Vec<_>>();
        assert_eq!(kept, [entries[0], entries[2], entries[3]]);
        let newer = [TAG, 9];
        assert!(matches!(Chunk::parse(&newer), Err(Damage::Newer { found: 9 })));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let framed = [&[TAG, VERSION][..], &bytes].concat();
            for bytes in [&bytes, &framed] {
                if let Ok(chunk) = Chunk::parse(bytes) {
                    let read = chunk.entries().take_while(Result::is_ok).count();
                    prop_assert!(read <= bytes.len());
                    _ = chunk.filtered(|hash| hash % 2 == 0);
                }
            }
        }
    }
}
