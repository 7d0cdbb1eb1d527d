//! Many files as one: what of them is of a range, and all of them merged. Files and segments count in their order; the newest counts.
//!
//! A merge holds one range in memory at a time: of the ranges in the files one that no other holds.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::CHUNK_BYTES;
use crate::entry::{Chunk, ChunkWriter, Entry};
use crate::error::{Damage, FileError};
use crate::range::Range;
use crate::read::{File, Placed, ReadAt};
use crate::write::Segment;

/// Chunks, each with the name of its file.
type Chunks<'a> = Box<dyn Iterator<Item = Result<(&'a str, Vec<u8>), FileError>> + 'a>;

/// See [`select`].
pub struct Select<'a> {
    chunks: Chunks<'a>,
    file: Option<&'a str>,
}

/// What files have of a range of an operator: absorbed one after the other, the chunks give its state. Files in which ranges are not
/// smaller are read as the chunks are asked for; else all of the range is merged at once. After an error there are no more.
pub fn select<'a, R: ReadAt>(files: &'a [File<R>], operator: &'a str, range: Range) -> Select<'a> {
    let sources = sources(files, operator, range);
    if sources.iter().all(|source| source.placed.range.holds(range)) {
        let chunks = sources.into_iter().flat_map(move |source| {
            let name = source.file.name();
            source.chunks(range).map(move |chunk| Ok((name, chunk?)))
        });
        return Select { chunks: Box::new(until_error(chunks)), file: None };
    }
    let newest = sources.last().map_or("", |source| source.file.name());
    let chunks: Chunks<'a> = match merged(&sources, operator, range) {
        Ok(chunks) => Box::new(chunks.into_iter().map(move |chunk| Ok((newest, chunk)))),
        Err(error) => Box::new(std::iter::once(Err(error))),
    };
    Select { chunks, file: None }
}

impl<'a> Select<'a> {
    /// The file of the last chunk; where files were merged, the newest of them.
    #[must_use]
    pub fn file(&self) -> Option<&'a str> {
        self.file
    }
}

impl Iterator for Select<'_> {
    type Item = Result<Vec<u8>, FileError>;

    fn next(&mut self) -> Option<Self::Item> {
        let next = self.chunks.next()?;
        Some(next.map(|(file, chunk)| {
            self.file = Some(file);
            chunk
        }))
    }
}

fn until_error<T, E>(items: impl Iterator<Item = Result<T, E>>) -> impl Iterator<Item = Result<T, E>> {
    let mut failed = false;
    items.take_while(move |item| {
        let ended = failed;
        failed |= item.is_err();
        !ended
    })
}

/// See [`merge`].
pub struct Merge<'a, R> {
    files: &'a [File<R>],
    left: std::vec::IntoIter<(Arc<str>, Range)>,
}

/// Files as one that stands for them where they are all there is: its segments are bases, and what is gone leaves no trace. After an
/// error there are no more segments.
pub fn merge<R: ReadAt>(files: &[File<R>]) -> Merge<'_, R> {
    Merge { files, left: ranges(files).into_iter() }
}

/// The ranges that files have something of, by operator: disjoint, in order, and none is held by another one's. What is selected of all of them is all
/// that there is.
pub fn ranges<R: ReadAt>(files: &[File<R>]) -> Vec<(Arc<str>, Range)> {
    let placed = files.iter().flat_map(File::segments);
    let all: BTreeSet<(Arc<str>, u64, Range)> =
        placed.map(|placed| (placed.operator.clone(), placed.range.first(), placed.range)).collect();
    // By first hash, then by length: what holds a range stands before it.
    let mut left: Vec<(Arc<str>, Range)> = Vec::new();
    for (operator, _, range) in all {
        let last = left.last().filter(|(other, last)| *other == operator && last.holds(range));
        if last.is_none() {
            left.retain(|(other, smaller)| *other != operator || !range.holds(*smaller));
            left.push((operator, range));
        }
    }
    left
}

impl<R: ReadAt> Iterator for Merge<'_, R> {
    type Item = Result<Segment, FileError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let (operator, range) = self.left.next()?;
            let chunks = merged(&sources(self.files, &operator, range), &operator, range);
            if chunks.is_err() {
                self.left = Vec::new().into_iter();
            }
            match chunks {
                Ok(chunks) if chunks.is_empty() => {}
                chunks => {
                    let operator = operator.to_string();
                    return Some(chunks.map(|chunks| Segment { operator, range, base: true, chunks }));
                }
            }
        }
    }
}

/// A segment that has something of a range.
struct Source<'a, R> {
    file: &'a File<R>,
    number: usize,
    placed: &'a Placed,
    /// Newer bases say all of these ranges.
    void: Vec<Range>,
}

fn sources<'a, R: ReadAt>(files: &'a [File<R>], operator: &str, range: Range) -> Vec<Source<'a, R>> {
    let placed = files.iter().flat_map(|file| (0..).zip(file.segments()).map(move |(at, placed)| (file, at, placed)));
    let wanted = placed.filter(|(_, _, placed)| &*placed.operator == operator && placed.range.intersects(range));
    let (mut sources, mut void) = (Vec::new(), Vec::new());
    for (file, number, placed) in wanted.collect::<Vec<_>>().into_iter().rev() {
        if !void.iter().any(|newer: &Range| newer.holds(placed.range) || newer.holds(range)) {
            sources.push(Source { file, number, placed, void: void.clone() });
        }
        void.extend(placed.base.then_some(placed.range));
    }
    sources.reverse();
    sources
}

impl<'a, R: ReadAt> Source<'a, R> {
    /// Its chunks, with keys of `range` that are not void.
    fn chunks(self, range: Range) -> impl Iterator<Item = Result<Vec<u8>, FileError>> + 'a {
        self.file.chunks(self.number).filter_map(move |read| {
            let filtered = |bytes| self.filtered(bytes, range).map_err(|damage| self.file.damaged(damage));
            read.and_then(filtered).transpose()
        })
    }

    fn filtered(&self, bytes: Vec<u8>, range: Range) -> Result<Option<Vec<u8>>, Damage> {
        let chunk = Chunk::parse(&bytes)?;
        chunk.check(self.placed.range)?;
        let whole = range.holds(self.placed.range) && self.void.is_empty();
        let keep = |hash| range.contains(hash) && !self.void.iter().any(|void| void.contains(hash));
        if whole { Ok(Some(bytes)) } else { chunk.filtered(keep) }
    }
}

/// Values by key: its bytes and its hash.
type Values = BTreeMap<(Box<[u8]>, u64), Box<[u8]>>;

/// The state of a range as chunks of a base.
fn merged<R: ReadAt>(sources: &[Source<'_, R>], operator: &str, range: Range) -> Result<Vec<Vec<u8>>, FileError> {
    let (mut shape, mut values) = (None, Values::new());
    // What keys share is newest by range: of two ranges neither's counts for the keys of the other.
    let mut shared: BTreeMap<Range, BTreeSet<Box<[u8]>>> = BTreeMap::new();
    for source in sources {
        let mut told = BTreeSet::new();
        for read in source.file.chunks(source.number) {
            let damaged = |damage| source.file.damaged(damage);
            let Some(bytes) = source.filtered(read?, range).map_err(damaged)? else { continue };
            let chunk = Chunk::parse(&bytes).map_err(damaged)?;
            if *shape.get_or_insert_with(|| chunk.shape().to_vec()) != *chunk.shape() {
                return Err(damaged(Damage::Shape { operator: operator.to_owned() }));
            }
            for entry in chunk.entries() {
                match entry.map_err(damaged)? {
                    Entry::Put { hash, key, value } => _ = values.insert((key.into(), hash), value.into()),
                    Entry::Gone { hash, key } => _ = values.remove(&(key.into(), hash)),
                    Entry::GoneAll { prefix } => forget(&mut values, prefix, source.placed.range),
                    Entry::Shared { value } => _ = told.insert(value.into()),
                }
            }
        }
        if !told.is_empty() {
            shared.retain(|older, _| !source.placed.range.holds(*older));
            shared.insert(source.placed.range, told);
        }
    }
    let Some(shape) = shape.filter(|_| !values.is_empty()) else { return Ok(Vec::new()) };
    let shared: BTreeSet<_> = shared.values().flatten().collect();
    let shared = shared.into_iter().map(|value| Entry::Shared { value });
    let puts = values.iter().map(|((key, hash), value)| Entry::Put { hash: *hash, key, value });
    let mut cutter = Cutter::new(&shape);
    shared.chain(puts).for_each(|entry| cutter.push(entry));
    Ok(cutter.finish())
}

/// Drops the keys of a range that begin with `prefix`.
fn forget(values: &mut Values, prefix: &[u8], range: Range) {
    let from = values.range((prefix.into(), 0)..).map(|(key, _)| key).take_while(|(key, _)| key.starts_with(prefix));
    let gone: Vec<(Box<[u8]>, u64)> = from.filter(|(_, hash)| range.contains(*hash)).cloned().collect();
    gone.iter().for_each(|key| _ = values.remove(key));
}

/// Cuts entries into chunks.
struct Cutter<'a> {
    shape: &'a [u8],
    writer: ChunkWriter,
    chunks: Vec<Vec<u8>>,
}

impl<'a> Cutter<'a> {
    fn new(shape: &'a [u8]) -> Self {
        Self { shape, writer: ChunkWriter::new(shape), chunks: Vec::new() }
    }

    fn push(&mut self, entry: Entry<'_>) {
        if !self.writer.is_empty() && self.writer.len() + entry.bytes() > CHUNK_BYTES {
            let full = std::mem::replace(&mut self.writer, ChunkWriter::new(self.shape));
            self.chunks.push(full.finish());
        }
        self.writer.push(entry);
    }

    fn finish(mut self) -> Vec<Vec<u8>> {
        self.chunks.extend((!self.writer.is_empty()).then(|| self.writer.finish()));
        self.chunks
    }
}
