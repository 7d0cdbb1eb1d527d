//! Frames: the unit on a byte stream between processes.
//!
//! A header of 56 bytes with its own checksum, then a body with another. All integers are little-endian:
//! magic u32, version u8, kind u8, zero u16, query u64, generation u64, channel u64, from u32, to u32, body length u64,
//! body checksum u32, header checksum u32. A header is checked completely before its length is believed, and a body is
//! allocated as its bytes arrive.

use std::io::{self, Read};

use super::FabricTag;
use crate::error::ProtocolFault;

/// Greatest body of a frame, in bytes: 256 MiB.
pub const MAX_BODY_BYTES: usize = 1 << 28;

pub(super) const HEADER_BYTES: usize = 56;
const MAGIC: u32 = 0x7065_6e73;
const VERSION: u8 = 3;

/// What a frame is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Data = 0,
    Progress = 1,
    Abort = 2,
    Goodbye = 3,
    /// Nothing; the sender lives.
    Beat = 4,
    /// How many bytes of data the sender's workers have taken in all.
    Credit = 5,
    /// A worker leaves, and how many dataflows it has built.
    Leave = 6,
    /// Data that went behind other data and is not charged.
    Behind = 7,
    /// What members tell each other. In place of the channel the header has the lane.
    Member = 8,
    /// A worker does not join after all.
    GivenUp = 9,
    /// A process asks for workers: see the module `door`.
    Ask = 10,
    /// The sender uses this link, and how many workers the run began with, if it knows.
    Welcome = 11,
    /// All dataflows are finished.
    Over = 12,
    /// There is no room for what was asked for with that ticket.
    Crowded = 13,
}

impl Kind {
    /// All of them, each at its number.
    pub(super) const ALL: [Kind; 14] = [
        Kind::Data,
        Kind::Progress,
        Kind::Abort,
        Kind::Goodbye,
        Kind::Beat,
        Kind::Credit,
        Kind::Leave,
        Kind::Behind,
        Kind::Member,
        Kind::GivenUp,
        Kind::Ask,
        Kind::Welcome,
        Kind::Over,
        Kind::Crowded,
    ];
}

/// A checked header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) kind: Kind,
    pub(super) channel: u64,
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) length: usize,
    checksum: u32,
}

/// A frame ready to be written.
pub(super) struct Frame {
    pub(super) header: [u8; HEADER_BYTES],
    pub(super) body: Vec<u8>,
}

impl Frame {
    pub(super) fn new(tag: FabricTag, kind: Kind, channel: u64, from: usize, to: usize, body: Vec<u8>) -> Self {
        let mut header = [0; HEADER_BYTES];
        header[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        header[4] = VERSION;
        header[5] = kind as u8;
        header[8..16].copy_from_slice(&tag.query.to_le_bytes());
        header[16..24].copy_from_slice(&tag.generation.to_le_bytes());
        header[24..32].copy_from_slice(&channel.to_le_bytes());
        header[32..36].copy_from_slice(&(from as u32).to_le_bytes());
        header[36..40].copy_from_slice(&(to as u32).to_le_bytes());
        header[40..48].copy_from_slice(&(body.len() as u64).to_le_bytes());
        header[48..52].copy_from_slice(&crc32fast::hash(&body).to_le_bytes());
        let checksum = crc32fast::hash(&header[..52]);
        header[52..56].copy_from_slice(&checksum.to_le_bytes());
        Frame { header, body }
    }

    /// Size on the stream.
    pub(super) fn bytes(&self) -> u64 {
        (HEADER_BYTES + self.body.len()) as u64
    }
}

/// Why no frame could be read.
#[derive(Debug)]
pub(super) enum ReadError {
    /// The stream ended between two frames.
    End,
    /// The stream failed or ended within a frame.
    Io(io::Error),
    /// The bytes are no frame of this fabric.
    Fault(ProtocolFault),
}

fn u32_at(bytes: &[u8; HEADER_BYTES], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn u64_at(bytes: &[u8; HEADER_BYTES], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

impl Header {
    fn parse(bytes: &[u8; HEADER_BYTES], tag: FabricTag) -> Result<Self, ProtocolFault> {
        let magic = u32_at(bytes, 0);
        if magic != MAGIC {
            return Err(ProtocolFault::Magic(magic));
        }
        if bytes[4] != VERSION {
            return Err(ProtocolFault::Version(bytes[4]));
        }
        if crc32fast::hash(&bytes[..52]) != u32_at(bytes, 52) {
            return Err(ProtocolFault::Checksum);
        }
        let kind = *Kind::ALL.get(usize::from(bytes[5])).ok_or(ProtocolFault::Kind(bytes[5]))?;
        if u64_at(bytes, 8) != tag.query {
            return Err(ProtocolFault::Query(u64_at(bytes, 8)));
        }
        if u64_at(bytes, 16) != tag.generation {
            return Err(ProtocolFault::Generation(u64_at(bytes, 16)));
        }
        let length = u64_at(bytes, 40);
        if length > MAX_BODY_BYTES as u64 {
            return Err(ProtocolFault::Length(length));
        }
        Ok(Header {
            kind,
            channel: u64_at(bytes, 24),
            from: u32_at(bytes, 32) as usize,
            to: u32_at(bytes, 36) as usize,
            length: length as usize,
            checksum: u32_at(bytes, 48),
        })
    }
}

/// Reads one frame, blocking.
pub(super) fn read(stream: &mut impl Read, tag: FabricTag) -> Result<(Header, Vec<u8>), ReadError> {
    let mut header = [0; HEADER_BYTES];
    let mut filled = 0;
    while filled < HEADER_BYTES {
        match stream.read(&mut header[filled..]) {
            Ok(0) if filled == 0 => return Err(ReadError::End),
            Ok(0) => return Err(ReadError::Io(io::ErrorKind::UnexpectedEof.into())),
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(ReadError::Io(error)),
        }
    }
    let header = Header::parse(&header, tag).map_err(ReadError::Fault)?;
    let mut body = Vec::with_capacity(header.length.min(1 << 20));
    stream.take(header.length as u64).read_to_end(&mut body).map_err(ReadError::Io)?;
    if body.len() < header.length {
        return Err(ReadError::Io(io::ErrorKind::UnexpectedEof.into()));
    }
    if crc32fast::hash(&body) != header.checksum {
        return Err(ReadError::Fault(ProtocolFault::Checksum));
    }
    Ok((header, body))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TAG: FabricTag = FabricTag { query: 7, generation: 3 };

    fn bytes(frame: &Frame) -> Vec<u8> {
        [&frame.header[..], &frame.body].concat()
    }

    #[test]
    fn a_frame_comes_back() {
        let frame = Frame::new(TAG, Kind::Progress, 1 << 40, 5, 2, vec![1, 2, 3]);
        let (header, body) = read(&mut &bytes(&frame)[..], TAG).expect("a good frame");
        assert_eq!((header.kind, header.channel, header.from, header.to), (Kind::Progress, 1 << 40, 5, 2));
        assert_eq!(body, [1, 2, 3]);
    }

    #[test]
    fn kinds_stand_at_their_numbers() {
        assert!(Kind::ALL.iter().enumerate().all(|(at, kind)| *kind as usize == at));
        let mut frame = bytes(&Frame::new(TAG, Kind::Over, 0, 0, 0, vec![]));
        frame[5] = Kind::ALL.len() as u8;
        let checksum = crc32fast::hash(&frame[..52]);
        frame[52..56].copy_from_slice(&checksum.to_le_bytes());
        let read = read(&mut &frame[..], TAG);
        assert!(matches!(read, Err(ReadError::Fault(ProtocolFault::Kind(kind))) if kind == frame[5]));
    }

    #[test]
    fn another_query_generation_or_version_is_refused() {
        let frame = bytes(&Frame::new(TAG, Kind::Data, 0, 0, 0, vec![]));
        let fault = |tag, frame: &[u8]| match read(&mut &frame[..], tag) {
            Err(ReadError::Fault(fault)) => fault,
            other => panic!("{other:?}"),
        };
        assert_eq!(fault(FabricTag { query: 8, generation: 3 }, &frame), ProtocolFault::Query(7));
        assert_eq!(fault(FabricTag { query: 7, generation: 4 }, &frame), ProtocolFault::Generation(3));
        let mut version = frame.clone();
        version[4] = 9; // the checksum is not reached
        assert_eq!(fault(TAG, &version), ProtocolFault::Version(9));
    }

    #[test]
    fn an_oversize_length_is_refused_before_the_body() {
        let mut frame = Frame::new(TAG, Kind::Data, 0, 0, 0, vec![]);
        frame.header[40..48].copy_from_slice(&(MAX_BODY_BYTES as u64 + 1).to_le_bytes());
        let checksum = crc32fast::hash(&frame.header[..52]);
        frame.header[52..56].copy_from_slice(&checksum.to_le_bytes());
        assert!(matches!(
            read(&mut &frame.header[..], TAG),
            Err(ReadError::Fault(ProtocolFault::Length(length))) if length == MAX_BODY_BYTES as u64 + 1
        ));
    }

    proptest! {
        #[test]
        fn any_flipped_bit_or_cut_is_noticed(body in proptest::collection::vec(any::<u8>(), 0..40), at in any::<prop::sample::Index>(), bit in 0u8..8) {
            let good = bytes(&Frame::new(TAG, Kind::Data, 11, 1, 0, body));
            let mut bad = good.clone();
            let index = at.index(bad.len());
            bad[index] ^= 1 << bit;
            prop_assert!(read(&mut &bad[..], TAG).is_err());
            prop_assert!(read(&mut &good[..index], TAG).is_err());
        }
    }
}
