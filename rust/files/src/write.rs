//! Writing a file, piece by piece.

use crate::range::Range;
use crate::{DATA, HEAD, MAGIC, VERSION};

/// Chunks of one range of one operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Name of the operator.
    pub operator: String,
    /// Which hashes.
    pub range: Range,
    /// Whether it is all of their state: what came before is void.
    pub base: bool,
    /// Chunks of entries.
    pub chunks: Vec<Vec<u8>>,
}

/// What a manifest tells of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Bytes.
    pub length: u64,
    /// CRC-32 of them.
    pub checksum: u32,
}

/// A file on its way out: its bytes, piece after piece.
#[derive(Debug)]
pub struct Write<I> {
    segments: I,
    state: State,
    hasher: crc32fast::Hasher,
    length: u64,
    operators: Vec<String>,
    index: Vec<u8>,
    count: u32,
}

#[derive(Debug)]
enum State {
    Head,
    Body(std::vec::IntoIter<Vec<u8>>),
    Ended,
}

/// A file of these segments, in their order. The pieces are its bytes; after the last, [`Write::summary`] tells what they are in sum.
/// A failure of the segments ends it: what was written then is no file.
///
/// # Examples
/// ```
/// use penstock_files::{ChunkWriter, Entry, File, Range, Segment, write};
/// let mut chunk = ChunkWriter::new(b"counts");
/// chunk.push(Entry::Put { hash: 7, key: b"k", value: b"v" });
/// let chunks = vec![chunk.finish()];
/// let segment = Segment { operator: "count".into(), range: Range::ALL, base: true, chunks: chunks.clone() };
/// let mut writing = write([Ok::<_, std::convert::Infallible>(segment)]);
/// let bytes = writing.by_ref().collect::<Result<Vec<_>, _>>()?.concat();
/// assert_eq!(writing.summary().map(|summary| summary.length), Some(bytes.len() as u64));
/// let file = File::open("data-0", bytes)?;
/// assert_eq!(&*file.segments()[0].operator, "count");
/// assert_eq!(file.chunks(0).collect::<Result<Vec<_>, _>>()?, chunks);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn write<I, E>(segments: I) -> Write<I::IntoIter>
where
    I: IntoIterator<Item = Result<Segment, E>>,
{
    Write {
        segments: segments.into_iter(),
        state: State::Head,
        hasher: crc32fast::Hasher::new(),
        length: 0,
        operators: Vec::new(),
        index: Vec::new(),
        count: 0,
    }
}

impl<I> Write<I> {
    /// What was written, once all of it was; `None` before.
    #[must_use]
    pub fn summary(&self) -> Option<Summary> {
        let ended = matches!(self.state, State::Ended);
        ended.then(|| Summary { length: self.length, checksum: self.hasher.clone().finalize() })
    }

    fn made(&mut self, piece: Vec<u8>) -> Vec<u8> {
        self.length += piece.len() as u64;
        self.hasher.update(&piece);
        piece
    }

    /// Lists a segment in the index.
    fn list(&mut self, segment: &Segment) {
        let number = self.operators.iter().position(|name| *name == segment.operator).unwrap_or_else(|| {
            self.operators.push(segment.operator.clone());
            self.operators.len() - 1
        });
        let index = &mut self.index;
        index.extend_from_slice(&(number as u32).to_le_bytes());
        index.extend_from_slice(&segment.range.prefix().to_le_bytes());
        index.push(segment.range.length());
        index.push(u8::from(segment.base));
        index.extend_from_slice(&size(segment.chunks.len()));
        for chunk in &segment.chunks {
            index.extend_from_slice(&size(chunk.len()));
            index.extend_from_slice(&crc32fast::hash(chunk).to_le_bytes());
        }
        self.count += 1;
    }

    /// Index and tail.
    fn end(&mut self) -> Vec<u8> {
        let mut index = size(self.operators.len()).to_vec();
        for name in &self.operators {
            index.extend_from_slice(&size(name.len()));
            index.extend_from_slice(name.as_bytes());
        }
        index.extend_from_slice(&self.count.to_le_bytes());
        index.append(&mut self.index);
        let length = index.len() as u64;
        index.extend_from_slice(&length.to_le_bytes());
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&head());
        hasher.update(&index);
        index.extend_from_slice(&hasher.finalize().to_le_bytes());
        index
    }
}

impl<I, E> Iterator for Write<I>
where
    I: Iterator<Item = Result<Segment, E>>,
{
    type Item = Result<Vec<u8>, E>;

    fn next(&mut self) -> Option<Self::Item> {
        if let State::Head = self.state {
            self.state = State::Body(Vec::new().into_iter());
            return Some(Ok(self.made(head().to_vec())));
        }
        loop {
            let State::Body(chunks) = &mut self.state else { return None };
            if let Some(chunk) = chunks.next() {
                return Some(Ok(self.made(chunk)));
            }
            match self.segments.next() {
                Some(Ok(segment)) => {
                    self.list(&segment);
                    self.state = State::Body(segment.chunks.into_iter());
                }
                Some(Err(error)) => return Some(Err(error)),
                None => {
                    let end = self.end();
                    self.state = State::Ended;
                    return Some(Ok(self.made(end)));
                }
            }
        }
    }
}

pub(crate) fn head() -> [u8; HEAD] {
    let mut head = [DATA; HEAD];
    head[..MAGIC.len()].copy_from_slice(MAGIC);
    head[MAGIC.len()..HEAD - 1].copy_from_slice(&VERSION.to_le_bytes());
    head
}

fn size(size: usize) -> [u8; 4] {
    u32::try_from(size).expect("chunks, names and lists of them are below 4 GiB").to_le_bytes()
}
