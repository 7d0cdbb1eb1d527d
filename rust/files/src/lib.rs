//! Data files of durable state, without any IO of their own.
//!
//! A file holds what an epoch changed, or, merged from many, a whole state. It is a list of segments: of an operator, by name, and of a
//! range of the key hash, either its *base* (all of it: whatever came before is void) or a *delta*. A segment is a list of chunks of
//! [`Entry`]s: keys with their hashes and values, and keys that are gone. Nobody but an operator knows what keys and values
//! are; still every segment can be merged with others and divided by hash, so that state comes back on any number of bins.
//!
//! | module | owns |
//! |---|---|
//! | `range` | which hashes: [`Range`] |
//! | `entry` | chunks: [`ChunkWriter`], [`Chunk`] |
//! | `write`, `read` | files: [`write`](fn@write), [`File`] over [`ReadAt`] |
//! | `ahead` | reading in few pieces |
//! | `merge` | what of many files is of a range ([`select`]), and all of them as one ([`merge`](fn@merge)) |
//!
//! # Format, version 1
//!
//! Numbers are little-endian; a *varint* is LEB128 of at most 64 bits, a *blob* its length as a varint and its bytes.
//!
//! | part | content |
//! |---|---|
//! | head | `penstock`, version (2 bytes), `D` |
//! | body | chunks, back to back |
//! | index | number of operators (4); each: length (4), name in UTF-8 |
//! | | number of segments (4); each: number of its operator (4), prefix (4), length of the prefix (1), 1 for a base and 0 for a delta (1), number of chunks (4); each: length (4), CRC-32 (4) |
//! | tail | length of the index (8), CRC-32 of head, index and that length (4) |
//!
//! Segments and chunks lie in the body in the order of the index, without gaps. A chunk is `E`, its version (1), a blob that its
//! operator makes to know its own (the *shape*), and entries:
//!
//! | byte | entry | then |
//! |---|---|---|
//! | 0 | a key is gone | hash (8), key (blob) |
//! | 1 | a key with its value | hash (8), key (blob), value (blob) |
//! | 2 | all keys that begin so are gone | prefix (blob) |
//! | 3 | what all keys share | value (blob) |
//!
//! Entries count in their order, segments in that of the files and of their indices, files in that of the caller: the newest counts.
//!
//! A release reads the version that it writes and all before. Whoever changes what is written raises a version, keeps reading the old one, and
//! adds a file of it to `tests/data`.
//!
//! Invariants: reading never trusts a length: it is compared with what is there before anything is allocated or read. Every byte
//! that is handed on was covered by a checksum.

mod ahead;
mod entry;
mod error;
mod merge;
mod range;
mod read;
mod write;

pub use entry::{Chunk, ChunkWriter, Entries, Entry, is_entries};
pub use error::{Damage, FileError};
pub use merge::{Index, Merge, Select, merge, ranges, select};
pub use range::{MAX_LENGTH, Range};
pub use read::{File, Placed, ReadAt};
pub use write::{Segment, Summary, Write, write};

/// What this release writes; it reads this and all before.
pub const VERSION: u16 = 1;
/// Chunks stay at or below this size, but for single entries that exceed it.
pub const CHUNK_BYTES: usize = 1 << 20;

pub(crate) const MAGIC: &[u8; 8] = b"penstock";
pub(crate) const DATA: u8 = b'D';
pub(crate) const HEAD: usize = MAGIC.len() + 2 + 1;
pub(crate) const TAIL: usize = 8 + 4;
