//! Frames: `"PF" version kind length:u32 crc32:u32 payload`, little endian.
//!
//! The checksum covers the eight bytes before it and the payload. A length is checked against the
//! limit before anything is allocated, and memory then grows with the bytes that arrived, at most
//! twice of them and never past the announced length: an announcement alone costs
//! [`STEP_BYTES`] at most.

use std::io::{self, Read, Write};

use serde_json::Value;
use thiserror::Error;

const MAGIC: [u8; 2] = *b"PF";
const VERSION: u8 = 1;
const HEADER_BYTES: usize = 12;
/// First allocation for a payload.
const STEP_BYTES: usize = 1 << 20;
/// Up to here a frame is copied into one buffer and sent in one write.
const JOIN_BYTES: usize = 64 << 10;
/// Bytes of [`body_head`].
const BODY_HEAD_BYTES: usize = 12;

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Registry to member: do something; answered by a [`Kind::Reply`].
    Request = 1,
    /// Member to registry: what became of a request.
    Reply = 2,
    /// Member to registry, unasked.
    Message = 3,
    /// Member to registry, first: who I am.
    Join = 4,
    /// Registry to member, last: go away, and why.
    Dismiss = 5,
    /// I am alive; no payload.
    Heartbeat = 6,
    /// The server's decision on a connection, and the receipt of a feed.
    Answer = 7,
    /// A piece of an Arrow stream.
    Data = 8,
    /// The Arrow stream is complete; counts and checksum.
    End = 9,
}

impl Kind {
    /// All of them, from 1 on.
    pub const ALL: [Kind; 9] = [
        Kind::Request,
        Kind::Reply,
        Kind::Message,
        Kind::Join,
        Kind::Dismiss,
        Kind::Heartbeat,
        Kind::Answer,
        Kind::Data,
        Kind::End,
    ];

    fn from_byte(byte: u8) -> Option<Kind> {
        Kind::ALL.into_iter().find(|kind| *kind as u8 == byte)
    }
}

/// A frame that could not be written or read. After any of these the connection is unusable,
/// except after [`FrameError::TooLong`] on the side that sends.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum FrameError {
    /// The socket failed, or a time limit passed.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The connection ended within a frame.
    #[error("the connection ended within a frame")]
    Truncated,
    /// These are not our frames.
    #[error("wrong magic {found:02x?}")]
    Magic {
        /// The bytes in its place.
        found: [u8; 2],
    },
    /// Another version of the format.
    #[error("frame version {found}, not 1")]
    Version {
        /// The version byte.
        found: u8,
    },
    /// No such kind.
    #[error("unknown frame kind {found}")]
    UnknownKind {
        /// The kind byte.
        found: u8,
    },
    /// Longer than allowed.
    #[error("frame of {bytes} bytes, at most {limit} are allowed")]
    TooLong {
        /// Announced length.
        bytes: u64,
        /// The limit.
        limit: usize,
    },
    /// The checksum does not match: damage on the way.
    #[error("frame checksum does not match")]
    Checksum,
    /// The payload is not a body: JSON with an attachment.
    #[error("frame body: {0}")]
    Body(String),
}

impl FrameError {
    /// True when a time limit passed.
    pub fn is_timeout(&self) -> bool {
        matches!(self, FrameError::Io(error)
            if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut))
    }
}

/// A received frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// What it is.
    pub kind: Kind,
    /// Its bytes.
    pub payload: Vec<u8>,
}

/// The payload of a control frame.
#[derive(Clone, Debug, PartialEq)]
pub struct Body {
    /// Ties an answer to its question.
    pub call: u64,
    /// The body.
    pub json: Value,
    /// What goes with it.
    pub attachment: Vec<u8>,
}

impl Frame {
    /// Takes the payload as call id, JSON and attachment.
    ///
    /// # Errors
    /// [`FrameError::Body`].
    pub fn into_body(mut self) -> Result<Body, FrameError> {
        let bad = |what: &str| FrameError::Body(what.to_owned());
        let head = self.payload.get(..BODY_HEAD_BYTES).ok_or_else(|| bad("too short"))?;
        let call = u64::from_le_bytes(head[..8].try_into().expect("eight bytes"));
        let length = u32::from_le_bytes(head[8..].try_into().expect("four bytes")) as usize;
        let rest = &self.payload[BODY_HEAD_BYTES..];
        let json = rest.get(..length).ok_or_else(|| bad("its JSON is cut off"))?;
        let json = serde_json::from_slice(json).map_err(|error| bad(&error.to_string()))?;
        let attachment = self.payload.split_off(BODY_HEAD_BYTES + length);
        Ok(Body { call, json, attachment })
    }
}

pub(super) fn body_head(call: u64, body: &str) -> Result<[u8; BODY_HEAD_BYTES], FrameError> {
    let length = u32::try_from(body.len())
        .map_err(|_| FrameError::TooLong { bytes: body.len() as u64, limit: u32::MAX as usize })?;
    let mut head = [0; BODY_HEAD_BYTES];
    head[..8].copy_from_slice(&call.to_le_bytes());
    head[8..].copy_from_slice(&length.to_le_bytes());
    Ok(head)
}

/// The length of a payload, unless it is too long.
fn fits(total: usize, limit: usize) -> Result<u32, FrameError> {
    match u32::try_from(total) {
        Ok(length) if total <= limit => Ok(length),
        _ => Err(FrameError::TooLong { bytes: total as u64, limit }),
    }
}

/// Whether a body with an attachment can be sent.
///
/// # Errors
/// [`FrameError::TooLong`].
pub(super) fn body_fits(body: &str, attachment: &[u8], limit: usize) -> Result<(), FrameError> {
    fits(BODY_HEAD_BYTES + body.len() + attachment.len(), limit).map(drop)
}

/// Writes one frame whose payload is the concatenation of `parts`.
///
/// # Errors
/// [`FrameError::TooLong`] with nothing written; [`FrameError::Io`].
pub fn write_frame(out: &mut impl Write, kind: Kind, parts: &[&[u8]], limit: usize) -> Result<(), FrameError> {
    let total: usize = parts.iter().map(|part| part.len()).sum();
    let length = fits(total, limit)?;
    let mut header = [0u8; HEADER_BYTES];
    header[..2].copy_from_slice(&MAGIC);
    header[2] = VERSION;
    header[3] = kind as u8;
    header[4..8].copy_from_slice(&length.to_le_bytes());
    let mut crc = crc32fast::Hasher::new();
    crc.update(&header[..8]);
    parts.iter().for_each(|part| crc.update(part));
    header[8..].copy_from_slice(&crc.finalize().to_le_bytes());
    if total <= JOIN_BYTES {
        let mut joined = Vec::with_capacity(HEADER_BYTES + total);
        joined.extend_from_slice(&header);
        parts.iter().for_each(|part| joined.extend_from_slice(part));
        out.write_all(&joined)?;
    } else {
        out.write_all(&header)?;
        for part in parts {
            out.write_all(part)?;
        }
    }
    Ok(out.flush()?)
}

/// Reads one frame; None when the input ends before its first byte.
///
/// # Errors
/// Every [`FrameError`] but `Body`.
pub fn read_frame(input: &mut impl Read, limit: usize) -> Result<Option<Frame>, FrameError> {
    let mut header = [0u8; HEADER_BYTES];
    let first = loop {
        match input.read(&mut header) {
            Ok(0) => return Ok(None),
            Ok(read) => break read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    };
    fill(input, &mut header[first..])?;
    if header[..2] != MAGIC {
        return Err(FrameError::Magic { found: [header[0], header[1]] });
    }
    if header[2] != VERSION {
        return Err(FrameError::Version { found: header[2] });
    }
    let kind = Kind::from_byte(header[3]).ok_or(FrameError::UnknownKind { found: header[3] })?;
    let length = u32::from_le_bytes(header[4..8].try_into().expect("four bytes")) as usize;
    if length > limit {
        return Err(FrameError::TooLong { bytes: length as u64, limit });
    }
    let mut payload = Vec::new();
    while payload.len() < length {
        let have = payload.len();
        let step = have.max(STEP_BYTES).min(length - have);
        payload.reserve_exact(step);
        payload.resize(have + step, 0);
        fill(input, &mut payload[have..])?;
    }
    let mut crc = crc32fast::Hasher::new();
    crc.update(&header[..8]);
    crc.update(&payload);
    if crc.finalize().to_le_bytes() != header[8..] {
        return Err(FrameError::Checksum);
    }
    Ok(Some(Frame { kind, payload }))
}

fn fill(input: &mut impl Read, into: &mut [u8]) -> Result<(), FrameError> {
    input.read_exact(into).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => FrameError::Truncated,
        _ => FrameError::Io(error),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(kind: Kind, parts: &[&[u8]]) -> Vec<u8> {
        let mut out = Vec::new();
        write_frame(&mut out, kind, parts, 1 << 24).unwrap();
        out
    }

    #[test]
    fn frames_follow_each_other() {
        let big = vec![7u8; 3 << 20];
        let mut bytes = written(Kind::Request, &[b"ab", b"", b"c"]);
        bytes.extend(written(Kind::Heartbeat, &[]));
        bytes.extend(written(Kind::Data, &[&big, b"x"]));
        let mut input = &bytes[..];
        let mut next = || read_frame(&mut input, 1 << 24).unwrap();
        assert_eq!(next().unwrap(), Frame { kind: Kind::Request, payload: b"abc".to_vec() });
        assert_eq!(next().unwrap(), Frame { kind: Kind::Heartbeat, payload: vec![] });
        assert_eq!(next().unwrap().payload.len(), (3 << 20) + 1);
        assert_eq!(next(), None);
    }

    #[test]
    fn every_single_byte_change_is_noticed() {
        let good = written(Kind::Reply, &[b"penstock"]);
        for at in 0..good.len() {
            for flip in [1u8, 0x80] {
                let mut bad = good.clone();
                bad[at] ^= flip;
                assert!(read_frame(&mut &bad[..], 1 << 20).is_err(), "byte {at}");
            }
        }
        for end in 1..good.len() {
            let cut = read_frame(&mut &good[..end], 1 << 20);
            assert!(matches!(cut, Err(FrameError::Truncated)), "cut at {end}");
        }
    }

    #[test]
    fn a_length_past_the_limit_is_refused_on_both_sides() {
        let mut out = Vec::new();
        let error = write_frame(&mut out, Kind::Data, &[&[0; 11]], 10).unwrap_err();
        assert!(matches!(error, FrameError::TooLong { bytes: 11, limit: 10 }));
        assert!(out.is_empty());
        let bytes = written(Kind::Data, &[&[0; 11]]);
        let error = read_frame(&mut &bytes[..], 10).unwrap_err();
        assert!(matches!(error, FrameError::TooLong { bytes: 11, limit: 10 }));
    }

    #[test]
    fn a_body_keeps_call_json_and_attachment() {
        let text = r#"{"do":"stop"}"#;
        let head = body_head(9, text).unwrap();
        let bytes = written(Kind::Request, &[&head, text.as_bytes(), b"\0\xff"]);
        let body = read_frame(&mut &bytes[..], 1 << 20).unwrap().unwrap().into_body().unwrap();
        assert_eq!((body.call, &body.attachment[..]), (9, &b"\0\xff"[..]));
        assert_eq!(body.json, serde_json::json!({"do": "stop"}));
        for end in 0..BODY_HEAD_BYTES + text.len() {
            let mut payload = head.to_vec();
            payload.extend_from_slice(text.as_bytes());
            payload.truncate(end);
            assert!(Frame { kind: Kind::Request, payload }.into_body().is_err());
        }
    }
}
