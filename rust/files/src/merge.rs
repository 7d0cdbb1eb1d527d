//! Many files as one: what of them is of a range, and all of them merged. Files and segments count in their order; the newest counts.
//!
//! A merge holds one range in memory at a time: of the ranges in the files one that no other holds, or a part of it where the files have too much of
//! it. So ranges become finer as state grows, whatever they were when it was small, and neither a merge nor who loads a part of one reads much more
//! than that.
//!
//! Ranges are nested or disjoint, so what intersects a range holds it, of which there is one a length, or stands in one stretch of the order by
//! first hash. An [`Index`] is made once for all ranges: selecting one looks at its own segments only.

use std::collections::{BTreeMap, BTreeSet, HashMap};
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

/// Bytes of files that are read before they are wanted, together; some more where several workers have written one file.
const AHEAD_BYTES: u64 = 64 << 20;
/// Bytes of chunks from which a merge makes one range; of more it makes parts, one after the other.
const RANGE_BYTES: u64 = 64 << 20;
/// A merge halves a range so many times at most: what is of all of it is read once for each part. The next merge goes on from there.
const HALVINGS: u8 = 4;
/// Bytes of one read: many of these cost the store's time for bytes, not for requests.
const PIECE_BYTES: u64 = 8 << 20;

/// [`Index::select`] of one range.
pub fn select<'a, R: ReadAt>(files: &'a [File<R>], operator: &'a str, range: Range) -> Select<'a> {
    Index::of(files).select(files, operator, range)
}

/// By [place](Range::place): numbers of files and segments, in order.
type Places = BTreeMap<(u64, u8), Vec<(usize, usize)>>;

/// Where the segments of files are: for who selects many ranges of the same files.
#[derive(Debug, Default)]
pub struct Index {
    /// By operator.
    places: HashMap<Arc<str>, Places>,
    #[cfg(test)]
    looked: std::cell::Cell<usize>,
}

impl Index {
    /// Of all segments of these files.
    #[must_use]
    pub fn of<R: ReadAt>(files: &[File<R>]) -> Index {
        let mut index = Index::default();
        for (file, segments) in files.iter().map(File::segments).enumerate() {
            for (number, placed) in segments.iter().enumerate() {
                let places = index.places.entry(placed.operator.clone()).or_default();
                places.entry(placed.range.place()).or_default().push((file, number));
            }
        }
        index
    }

    /// The segments that have something of a range, in order.
    fn intersecting(&self, operator: &str, range: Range) -> Vec<(usize, usize)> {
        let Some(places) = self.places.get(operator) else { return Vec::new() };
        let above = range.holders().skip(1).filter_map(|holder| places.get(&holder.place()));
        let mut found: Vec<_> = above.chain(places.range(range.held()).map(|(_, of)| of)).flatten().copied().collect();
        found.sort_unstable();
        #[cfg(test)]
        self.looked.set(self.looked.get() + found.len());
        found
    }

    /// Tells files what will be selected of them, each operator and range once, so that what lies together in a file is read at once. It is
    /// selected in any order; in this one the least is kept in memory. Large segments of which parts are wanted are not kept for the next part.
    ///
    /// # Panics
    /// May, when these are not the files that it was made of.
    pub fn expect<'o, R: ReadAt>(&self, files: &[File<R>], wanted: impl IntoIterator<Item = (&'o str, Range)>) {
        for (operator, range) in wanted {
            let sources = self.sources(files, operator, range).into_iter();
            for source in sources.filter(|source| source.is_within(range) || source.placed.length() <= PIECE_BYTES) {
                source.file.expect(source.number);
            }
        }
        let most = (AHEAD_BYTES / files.len().max(1) as u64).min(PIECE_BYTES);
        files.iter().for_each(|file| file.arrange(most));
    }

    /// What files have of a range of an operator: absorbed one after the other, the chunks give its state. Where changes in the files are of no
    /// smaller range they are read as the chunks are asked for, and smaller bases one by one; where all are smaller it is merged half by half; else at
    /// once. After an error there are no more.
    ///
    /// # Panics
    /// May, when these are not the files that it was made of.
    pub fn select<'a, R: ReadAt>(&self, files: &'a [File<R>], operator: &'a str, range: Range) -> Select<'a> {
        selected(self.sources(files, operator, range), operator, range)
    }
}

fn selected<'a, R: ReadAt>(sources: Vec<Source<'a, R>>, operator: &'a str, range: Range) -> Select<'a> {
    // What says that keys are gone says it of all that have come, so of no more than its own range. Of a base nothing is gone, once it is merged by itself.
    if sources.iter().all(|source| source.placed.base || source.placed.range.holds(range)) {
        let chunks = sources.into_iter().flat_map(move |source| -> Chunks<'a> {
            let name = source.file.name();
            match source.placed.range.holds(range) {
                true => Box::new(source.chunks(range).map(move |chunk| Ok((name, chunk?)))),
                false => in_memory(&[source], operator, range),
            }
        });
        return Select { chunks: Box::new(until_error(chunks)), file: None };
    }
    Select { chunks: by_halves(sources, operator, range), file: None }
}

/// Merged, as small a range at a time as all of these allow. What goes with the keys of a range is said for these alone by then: chunks of parts
/// are not those of the whole.
fn by_halves<'a, R: ReadAt>(sources: Vec<Source<'a, R>>, operator: &'a str, range: Range) -> Chunks<'a> {
    let is_part = |source: &Source<'a, R>| source.placed.range != range && source.is_within(range);
    if let Some([low, high]) = range.split().filter(|_| sources.iter().all(is_part)) {
        let (lower, upper): (Vec<_>, Vec<_>) = sources.into_iter().partition(|source| source.is_within(low));
        let halves = [(low, lower), (high, upper)].into_iter().filter(|(_, sources)| !sources.is_empty());
        let chunks = halves.flat_map(move |(half, sources)| by_halves(sources, operator, half));
        return Box::new(until_error(chunks));
    }
    in_memory(&sources, operator, range)
}

/// Merged at once.
fn in_memory<'a, R: ReadAt>(sources: &[Source<'a, R>], operator: &'a str, range: Range) -> Chunks<'a> {
    let newest = sources.last().map_or("", |source| source.file.name());
    match merged(sources, operator, range) {
        Ok(chunks) => Box::new(chunks.into_iter().map(move |chunk| Ok((newest, chunk)))),
        Err(error) => Box::new(std::iter::once(Err(error))),
    }
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
    index: Index,
    left: std::vec::IntoIter<(Arc<str>, Range)>,
}

/// Files as one that stands for them where they are all there is: its segments are bases, and what is gone leaves no trace. After an
/// error there are no more segments.
pub fn merge<R: ReadAt>(files: &[File<R>]) -> Merge<'_, R> {
    merge_by(files, RANGE_BYTES)
}

/// In ranges of about so many bytes.
fn merge_by<R: ReadAt>(files: &[File<R>], most: u64) -> Merge<'_, R> {
    let index = Index::of(files);
    let all = match files.iter().flat_map(File::segments).map(Placed::length).sum::<u64>() > most {
        true => {
            let mut parts = Vec::new();
            for (operator, range) in ranges(files) {
                let least = range.length().saturating_add(HALVINGS);
                index.cut(files, &operator, (range, least), most, &mut parts);
            }
            parts
        }
        false => ranges(files),
    };
    index.expect(files, all.iter().map(|(operator, range)| (&**operator, *range)));
    Merge { files, index, left: all.into_iter() }
}

/// The ranges that files have something of, by operator: disjoint, in order, and none is held by another one's. What is selected of all of them is all
/// that there is.
pub fn ranges<R: ReadAt>(files: &[File<R>]) -> Vec<(Arc<str>, Range)> {
    let placed = files.iter().flat_map(File::segments);
    let all: BTreeSet<(Arc<str>, (u64, u8), Range)> =
        placed.map(|placed| (placed.operator.clone(), placed.range.place(), placed.range)).collect();
    // What holds a range stands before it.
    let mut left: Vec<(Arc<str>, Range)> = Vec::new();
    for (operator, _, range) in all {
        let last = left.last().filter(|(other, last)| *other == operator && last.holds(range));
        if last.is_none() {
            left.push((operator, range));
        }
    }
    left
}

impl Index {
    /// A range, or its parts of `least` bits at most that have about `most` bytes each.
    fn cut<R: ReadAt>(
        &self,
        files: &[File<R>],
        operator: &Arc<str>,
        (range, least): (Range, u8),
        most: u64,
        parts: &mut Vec<(Arc<str>, Range)>,
    ) {
        let share = |(file, number): (usize, usize)| {
            let placed: &Placed = &files[file].segments()[number];
            // Of one that holds the range, as if its keys were spread evenly.
            placed.length() >> range.length().saturating_sub(placed.range.length())
        };
        let bytes = || self.intersecting(operator, range).into_iter().map(share).sum::<u64>();
        match range.split().filter(|_| range.length() < least && bytes() > most) {
            Some(halves) => halves.into_iter().for_each(|half| self.cut(files, operator, (half, least), most, parts)),
            None => parts.push((operator.clone(), range)),
        }
    }
}

impl<R: ReadAt> Iterator for Merge<'_, R> {
    type Item = Result<Segment, FileError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let (operator, range) = self.left.next()?;
            let chunks = merged(&self.index.sources(self.files, &operator, range), &operator, range);
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
    /// Newer bases say all of these ranges, which it holds; by first hash, disjoint.
    void: Vec<Range>,
}

impl Index {
    fn sources<'a, R: ReadAt>(&self, files: &'a [File<R>], operator: &str, range: Range) -> Vec<Source<'a, R>> {
        let mut sources = Vec::new();
        // Newer bases, by place.
        let mut void = BTreeMap::<(u64, u8), Range>::new();
        for (file, number) in self.intersecting(operator, range).into_iter().rev() {
            let file = &files[file];
            let placed = &file.segments()[number];
            let is_void = |range: Range| range.holders().any(|holder| void.contains_key(&holder.place()));
            if is_void(range) {
                break; // so is all before
            }
            if !is_void(placed.range) {
                let mut own = Vec::<Range>::new();
                for (_, newer) in void.range(placed.range.held()) {
                    if own.last().is_none_or(|last| !last.holds(*newer)) {
                        own.push(*newer);
                    }
                }
                sources.push(Source { file, number, placed, void: own });
            }
            if placed.base {
                void.insert(placed.range.place(), placed.range);
            }
        }
        sources.reverse();
        sources
    }
}

impl<'a, R: ReadAt> Source<'a, R> {
    /// Whether all of it is of a range.
    fn is_within(&self, range: Range) -> bool {
        range.holds(self.placed.range)
    }

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
        let is_void = |hash| {
            let before = self.void.partition_point(|void| void.first() <= hash);
            before > 0 && self.void[before - 1].contains(hash)
        };
        let keep = |hash| range.contains(hash) && !is_void(hash);
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

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;
    use crate::write::write;

    fn file(name: &str, bits: u8, base: bool) -> File<Vec<u8>> {
        let segment = |bin: u32| {
            let range = Range::new(bin, bits).unwrap();
            let mut chunk = ChunkWriter::new(b"s");
            chunk.push(Entry::Put { hash: range.last(), key: name.as_bytes(), value: b"v" });
            Segment { operator: "op".into(), range, base, chunks: vec![chunk.finish()] }
        };
        let bytes = write((0..1 << bits).map(|bin| Ok::<_, Infallible>(segment(bin))));
        File::open(name, bytes.flat_map(Result::unwrap).collect::<Vec<_>>()).unwrap()
    }

    /// Whoever reads all ranges looks at each segment once, or as often as it is divided.
    #[test]
    fn all_ranges_together_look_at_each_segment_once() {
        let files = [file("a", 12, true), file("b", 12, false), file("c", 10, false), file("d", 12, false)];
        let index = Index::of(&files);
        let segments: usize = files.iter().map(|file| file.segments().len()).sum();
        for (bits, expected) in [(10, segments), (4, segments), (0, segments), (12, segments + 3 * (1 << 10))] {
            index.looked.set(0);
            for bin in 0..1 << bits {
                let range = Range::new(bin, bits).unwrap();
                assert_eq!(index.sources(&files, "op", range).len(), index.intersecting("op", range).len());
            }
            // Both have looked.
            assert_eq!(index.looked.get(), 2 * expected, "{bits} bits");
        }
        let mut merging = merge(&files);
        assert_eq!(merging.by_ref().map(Result::unwrap).count(), 1 << 10);
        assert_eq!(merging.index.looked.get(), 2 * segments, "once to tell the files");
    }

    /// Beside one that looks at everything.
    #[test]
    fn what_is_void_is_what_newer_bases_say() {
        let files = [("z", 1, false), ("a", 3, true), ("b", 2, false), ("c", 4, true), ("d", 1, false), ("e", 0, true)];
        let files = files.map(|(name, bits, base)| file(name, bits, base));
        for newest in 1..=files.len() {
            let files = &files[..newest];
            let index = Index::of(files);
            for bits in 0..=5 {
                for bin in 0..1 << bits {
                    let range = Range::new(bin, bits).unwrap();
                    let found = index.sources(files, "op", range);
                    let mut expected = Vec::new();
                    let mut void: Vec<Range> = Vec::new();
                    for (at, file) in files.iter().enumerate().rev() {
                        for (number, placed) in file.segments().iter().enumerate().rev() {
                            if placed.range.intersects(range) {
                                let gone = |newer: &Range| newer.holds(placed.range) || newer.holds(range);
                                if !void.iter().any(gone) {
                                    let mut own = void.clone();
                                    own.retain(|newer| placed.range.holds(*newer));
                                    let all = own.clone();
                                    own.retain(|one| !all.iter().any(|other| other != one && other.holds(*one)));
                                    own.sort_unstable();
                                    own.dedup();
                                    expected.push((at, number, own));
                                }
                                void.extend(placed.base.then_some(placed.range));
                            }
                        }
                    }
                    expected.reverse();
                    let told = |source: &Source<'_, Vec<u8>>| {
                        let at = files.iter().position(|file| file.name() == source.file.name()).unwrap();
                        (at, source.number, source.void.clone())
                    };
                    assert_eq!(found.iter().map(told).collect::<Vec<_>>(), expected, "{range} of {newest} files");
                }
            }
        }
    }

    /// Files of one operator with ranges of so many bits, whose keys are spread over the hashes.
    fn spread(all: &[(&str, u8, bool)]) -> Vec<File<Vec<u8>>> {
        let file = |(name, bits, base): &(&str, u8, bool)| {
            let segment = |bin: u32| {
                let range = Range::new(bin, *bits).unwrap();
                let hashes =
                    (0..64_u64).map(|at| at << 58 | u64::from(name.as_bytes()[0])).filter(|hash| range.contains(*hash));
                let chunks = hashes.map(|hash| {
                    let mut chunk = ChunkWriter::new(b"s");
                    // Keys of all files, and keys of each.
                    for key in [hash.to_be_bytes().to_vec(), (hash >> 58).to_be_bytes().to_vec()] {
                        let hash = if key[7] < 64 { hash >> 58 << 58 } else { hash };
                        chunk.push(Entry::Put { hash, key: &key, value: name.as_bytes() });
                    }
                    chunk.finish()
                });
                Segment { operator: "op".into(), range, base: *base, chunks: chunks.collect() }
            };
            let bytes = write((0..1 << bits).map(|bin| Ok::<_, Infallible>(segment(bin))));
            File::open(*name, bytes.flat_map(Result::unwrap).collect::<Vec<_>>()).unwrap()
        };
        all.iter().map(file).collect()
    }

    /// Keys with their values.
    fn told(chunks: impl Iterator<Item = Vec<u8>>) -> BTreeMap<Vec<u8>, Vec<u8>> {
        let mut told = BTreeMap::new();
        for bytes in chunks {
            for entry in Chunk::parse(&bytes).unwrap().entries() {
                let Entry::Put { key, value, .. } = entry.unwrap() else { panic!("only what was put") };
                told.insert(key.to_vec(), value.to_vec());
            }
        }
        told
    }

    #[test]
    fn a_merge_makes_parts_of_what_is_too_large_and_they_give_the_same() {
        let files = spread(&[("x", 1, true), ("y", 3, false), ("z", 0, false)]);
        let whole: Vec<Segment> = merge(&files).map(Result::unwrap).collect();
        assert_eq!(whole.iter().map(|one| one.range.length()).collect::<Vec<_>>(), [0]);
        let expected = told(whole.into_iter().flat_map(|one| one.chunks));
        assert_eq!(expected.len(), 4 * 64);
        let bytes: u64 = files.iter().flat_map(File::segments).map(Placed::length).sum();
        for (most, length) in [(bytes, 0), (bytes / 2, 1), (bytes / 5, 3), (1, HALVINGS)] {
            let parts: Vec<Segment> = merge_by(&files, most).map(Result::unwrap).collect();
            assert_eq!(parts.iter().map(|one| one.range.length()).max(), Some(length), "{most} of {bytes} bytes");
            assert!(parts.iter().is_sorted_by_key(|one| one.range.first()) && parts.len() == 1 << length);
            let again = write(parts.into_iter().map(Ok::<_, Infallible>)).flat_map(Result::unwrap).collect::<Vec<_>>();
            let merged = [File::open("merged", again).unwrap()];
            // Of ranges that are wider than its own, as wide, and narrower.
            for bits in 0..6 {
                let ranges = (0..1 << bits).map(|bin| Range::new(bin, bits).unwrap());
                for range in ranges {
                    let found = told(select(&merged, "op", range).map(Result::unwrap));
                    let of_it = told(select(&files, "op", range).map(Result::unwrap));
                    assert!(found == of_it && found.len() == 4 * (64 >> bits), "{range}: {found:?} and {of_it:?}");
                }
            }
        }
    }

    /// A wide range of narrow ones is handed out half by half: only what meets the wide one too is merged in memory.
    #[test]
    fn a_wide_range_of_narrow_segments_is_not_merged_at_once() {
        let files = spread(&[("x", 5, true), ("y", 4, false)]);
        let chunks: Vec<_> = select(&files, "op", Range::ALL).map(Result::unwrap).collect();
        assert!(chunks.len() >= 16, "{} chunks", chunks.len());
        assert_eq!(told(chunks.into_iter()), told(merge(&files).flat_map(|one| one.unwrap().chunks)));
    }

    /// As after a merge that has made parts of a bin, and batches behind it.
    #[test]
    fn bases_of_parts_and_changes_of_all_are_not_merged_in_memory() {
        let files = spread(&[("x", 4, true), ("y", 0, false), ("z", 0, false)]);
        let Select { chunks, .. } = select(&files, "op", Range::ALL);
        let chunks: Vec<_> = chunks.map(Result::unwrap).collect();
        let names: Vec<&str> = chunks.iter().map(|(name, _)| *name).collect();
        assert!(names.is_sorted() && names.iter().filter(|name| **name == "x").count() >= 16, "{names:?}");
        let expected = told(merge(&files).flat_map(|one| one.unwrap().chunks));
        assert_eq!(told(chunks.into_iter().map(|(_, chunk)| chunk)), expected);
        // Parts of which some were written again.
        let again = spread(&[("w", 0, true), ("x", 4, true), ("y", 2, true), ("z", 0, false)]);
        let expected = told(merge(&again).flat_map(|one| one.unwrap().chunks));
        assert_eq!(told(select(&again, "op", Range::ALL).map(Result::unwrap)), expected);
    }

    #[test]
    fn ranges_know_their_ends() {
        for range in [Range::ALL, Range::new(1, 1).unwrap(), Range::new(5, 3).unwrap(), Range::new(0, 20).unwrap()] {
            assert!(range.contains(range.first()) && range.contains(range.last()), "{range}");
            assert!(range.last() == u64::MAX || !range.contains(range.last() + 1), "{range}");
            assert!(
                range.holders().all(|holder| holder.holds(range))
                    && range.holders().count() == range.length() as usize + 1
            );
        }
    }
}
