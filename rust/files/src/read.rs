//! Reading a file: its index, then those chunks that are wanted, in few reads ([`Ahead`]).

use std::io;
use std::sync::Arc;

use crate::ahead::Ahead;
use crate::error::{Damage, FileError};
use crate::range::Range;
use crate::write::head;
use crate::{DATA, HEAD, MAGIC, TAIL, VERSION};

/// Bytes that can be read anywhere.
pub trait ReadAt {
    /// How many there are.
    ///
    /// # Errors
    /// Storage's.
    fn length(&self) -> io::Result<u64>;

    /// `length` bytes from `offset` on; there are so many by [`length`](Self::length).
    ///
    /// # Errors
    /// Storage's; also when there are fewer after all.
    fn read_at(&self, offset: u64, length: usize) -> io::Result<Vec<u8>>;
}

impl<B: AsRef<[u8]>> ReadAt for B {
    fn length(&self) -> io::Result<u64> {
        Ok(self.as_ref().len() as u64)
    }

    fn read_at(&self, offset: u64, length: usize) -> io::Result<Vec<u8>> {
        let part =
            usize::try_from(offset).ok().and_then(|offset| self.as_ref().get(offset..offset.checked_add(length)?));
        part.map(<[u8]>::to_vec).ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }
}

/// A segment in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placed {
    /// Name of the operator.
    pub operator: Arc<str>,
    /// Which hashes.
    pub range: Range,
    /// Whether it is all of their state.
    pub base: bool,
    /// Where its chunks begin.
    offset: u64,
    /// Length and checksum of each.
    chunks: Vec<(u32, u32)>,
}

impl Placed {
    /// Bytes of its chunks.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.chunks.iter().map(|(length, _)| u64::from(*length)).sum()
    }
}

/// An open file: its index is read and right. Of a large one nothing else is before it is asked for.
#[derive(Debug)]
pub struct File<R> {
    name: String,
    source: Ahead<R>,
    segments: Vec<Placed>,
    checksum: u32,
}

impl<R: ReadAt> File<R> {
    /// Reads head, tail and index: one read of a small file, two of a larger one, three where its index is large.
    ///
    /// # Errors
    /// Storage's, or what is wrong with them. `name` is for messages.
    pub fn open(name: impl Into<String>, source: R) -> Result<Self, FileError> {
        let (name, source) = (name.into(), Ahead::new(source));
        match index(&source) {
            Ok((segments, checksum)) => {
                source.drop_end();
                Ok(Self { name, source, segments, checksum })
            }
            Err(fault) => Err(fault.of(&name)),
        }
    }

    /// For messages.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// CRC-32 of the whole file, as [`Summary`](crate::Summary) has it, if its chunks are those of the index, which is seen when they are read.
    #[must_use]
    pub fn checksum(&self) -> u32 {
        self.checksum
    }

    /// What it holds, in order.
    #[must_use]
    pub fn segments(&self) -> &[Placed] {
        &self.segments
    }

    /// The chunks of a segment, by its number. After an error there are no more.
    ///
    /// # Panics
    /// When there is no such segment.
    pub fn chunks(&self, segment: usize) -> impl Iterator<Item = Result<Vec<u8>, FileError>> {
        let Placed { offset, chunks, .. } = &self.segments[segment];
        let (mut offset, mut chunks) = (*offset, chunks.iter());
        std::iter::from_fn(move || {
            let (length, checksum) = chunks.next()?;
            let read = self.chunk(offset, *length, *checksum);
            offset += u64::from(*length);
            if read.is_err() {
                chunks = [].iter();
            }
            Some(read)
        })
    }

    /// The chunks of a segment will be read, once more than was told before.
    pub(crate) fn expect(&self, segment: usize) {
        let Placed { offset, chunks, .. } = &self.segments[segment];
        let mut offset = *offset;
        self.source.expect(chunks.iter().map(|(length, _)| {
            let at = offset;
            offset += u64::from(*length);
            (at, *length)
        }));
    }

    /// What is expected is read in pieces of at most so many bytes.
    pub(crate) fn arrange(&self, most: u64) {
        self.source.arrange(most);
    }

    fn chunk(&self, offset: u64, length: u32, expected: u32) -> Result<Vec<u8>, FileError> {
        let bytes = exactly(&self.source, offset, length as usize, "a chunk").map_err(|fault| fault.of(&self.name))?;
        match crc32fast::hash(&bytes) {
            found if found == expected => Ok(bytes),
            found => Err(self.damaged(Damage::Checksum { what: "a chunk", found, expected })),
        }
    }

    pub(crate) fn damaged(&self, damage: Damage) -> FileError {
        FileError::Damage { name: self.name.clone(), damage }
    }
}

/// A fault whose file has no name yet.
enum Fault {
    Read(io::Error),
    Damage(Damage),
}

impl Fault {
    fn of(self, name: &str) -> FileError {
        let name = name.to_owned();
        match self {
            Self::Read(source) => FileError::Read { name, source },
            Self::Damage(damage) => FileError::Damage { name, damage },
        }
    }
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Self {
        Self::Read(error)
    }
}

impl From<Damage> for Fault {
    fn from(damage: Damage) -> Self {
        Self::Damage(damage)
    }
}

/// Storage may give fewer bytes, or more.
fn exactly(source: &impl ReadAt, offset: u64, length: usize, what: &'static str) -> Result<Vec<u8>, Fault> {
    let bytes = source.read_at(offset, length)?;
    match bytes.len() == length {
        true => Ok(bytes),
        false => Err(Damage::Length { what, found: bytes.len() as u64, expected: length as u64 }.into()),
    }
}

/// The segments, and the checksum of all.
fn index<R: ReadAt>(source: &Ahead<R>) -> Result<(Vec<Placed>, u32), Fault> {
    let least = (HEAD + TAIL) as u64;
    let length = source.length()?;
    source.read_end(length)?;
    let short = |found| Damage::Length { what: "head and tail", found, expected: least };
    let found = exactly(source, 0, length.min(HEAD as u64) as usize, "head")?;
    if !found.starts_with(&MAGIC[..MAGIC.len().min(found.len())]) || found.is_empty() {
        return Err(Damage::Foreign.into());
    }
    if length < least {
        return Err(short(length).into());
    }
    if found[HEAD - 1] != DATA {
        return Err(Damage::Foreign.into());
    }
    let version = u16::from_le_bytes([found[MAGIC.len()], found[MAGIC.len() + 1]]);
    if version > VERSION {
        return Err(Damage::Newer { found: version }.into());
    }
    let tail = exactly(source, length - TAIL as u64, TAIL, "tail")?;
    let mut reader = Reader(&tail);
    let (announced, expected) = (u64::from_le_bytes(reader.array()?), reader.u32()?);
    let there = length - least;
    if announced > there {
        return Err(Damage::Length { what: "index", found: there, expected: announced }.into());
    }
    let bytes = exactly(source, length - TAIL as u64 - announced, announced as usize, "index")?;
    let mut hasher = crc32fast::Hasher::new();
    [&found, &bytes, &tail[..8]].into_iter().for_each(|part| hasher.update(part));
    let checksum = hasher.finalize();
    if checksum != expected {
        return Err(Damage::Checksum { what: "the index", found: checksum, expected }.into());
    }
    if found != head() {
        return Err(Damage::Content { what: "the head" }.into());
    }
    let segments = segments(&bytes, there - announced)?;
    let mut whole = crc32fast::Hasher::new();
    whole.update(&found);
    for (length, checksum) in segments.iter().flat_map(|placed| &placed.chunks) {
        whole.combine(&crc32fast::Hasher::new_with_initial_len(*checksum, u64::from(*length)));
    }
    whole.update(&bytes);
    whole.update(&tail);
    Ok((segments, whole.finalize()))
}

/// The segments by an index; their chunks fill `body` bytes.
fn segments(index: &[u8], body: u64) -> Result<Vec<Placed>, Damage> {
    let mut reader = Reader(index);
    let mut operators: Vec<Arc<str>> = Vec::new();
    for _ in 0..reader.count(4)? {
        let length = reader.u32()? as usize;
        let name = std::str::from_utf8(reader.take(length)?);
        operators.push(name.map_err(|_| Damage::Content { what: "the name of an operator" })?.into());
    }
    let mut segments = Vec::new();
    let mut offset = HEAD as u64;
    for _ in 0..reader.count(18)? {
        let operator = operators.get(reader.u32()? as usize).cloned();
        let operator = operator.ok_or(Damage::Content { what: "the number of an operator" })?;
        let (prefix, [length, base]) = (reader.u32()?, reader.array()?);
        let range = Range::new(prefix, length).ok_or(Damage::Content { what: "a range" })?;
        if base > 1 {
            return Err(Damage::Content { what: "the kind of a segment" });
        }
        let chunks = (0..reader.count(8)?).map(|_| Ok((reader.u32()?, reader.u32()?)));
        let chunks = chunks.collect::<Result<Vec<_>, Damage>>()?;
        let placed = Placed { operator, range, base: base == 1, offset, chunks };
        offset += placed.length();
        segments.push(placed);
    }
    if !reader.0.is_empty() {
        return Err(Damage::Content { what: "the end of the index" });
    }
    match offset - HEAD as u64 {
        chunks if chunks == body => Ok(segments),
        expected => Err(Damage::Length { what: "chunks", found: body, expected }),
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, length: usize) -> Result<&'a [u8], Damage> {
        let (head, rest) = self.0.split_at_checked(length).ok_or(Damage::Content { what: "the index ends early" })?;
        self.0 = rest;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Damage> {
        Ok(self.take(N)?.try_into().expect("take returns N bytes"))
    }

    fn u32(&mut self) -> Result<u32, Damage> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    /// A number of things of at least so many bytes each: no more than there is room for.
    fn count(&mut self, least: usize) -> Result<usize, Damage> {
        let count = self.u32()? as usize;
        match count <= self.0.len() / least {
            true => Ok(count),
            false => Err(Damage::Content { what: "a number in the index" }),
        }
    }
}
