//! What travels from F to S.
//!
//! Data: [`Addressed`] blocks, each with its worker. State: Prepare(bin), State(bin, chunk), Pending(bin, time, record) (M-10), End(bin, chunks,
//! records), from one F in that order, a State behind as many Piece(bin, bytes) as its chunk is longer than a message may be; between threads of one process a ticket for the shelf is in place of the chunks and the End. How many there
//! are is known when the last one is made, so the End tells it: with it, or with the ticket, all of the bin is there.
//!
//! Back from S to F: [`Told`].
//!
//! On the wire numbers are little-endian; a chunk is copied once, never taken apart.

use penstock_dataflow::wire::{Wire, WireError, decode_serde, encode_serde};
use penstock_progress::Timestamp;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// What a post-dated record must be able to do: travel with its bin.
pub trait Record: Serialize + DeserializeOwned + Send + 'static {}

impl<P: Serialize + DeserializeOwned + Send + 'static> Record for P {}

/// A block on its way to a worker.
#[derive(Clone, Debug)]
pub(crate) struct Addressed<D> {
    pub(crate) to: u32,
    pub(crate) content: D,
}

impl<D: Wire> Wire for Addressed<D> {
    fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.to.to_le_bytes());
        self.content.encode(out);
    }

    fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let (to, rest) = number(bytes)?;
        Ok(Self { to, content: D::decode(rest)? })
    }
}

/// One part of a bin that moves.
#[derive(Debug)]
pub(crate) enum BinPart<T, P> {
    /// The bin comes; it is empty until its state follows.
    Prepare {
        bin: u32,
        /// The epoch of the sender's mark.
        epoch: Option<u64>,
    },
    /// Its state lies on the shelf of this process; all else of it has been sent.
    Shelved { bin: u32, ticket: u64 },
    /// The beginning of a chunk of its state, or more of it; the chunk ends with the next State.
    Piece { bin: u32, bytes: Vec<u8> },
    /// A chunk of its state.
    State { bin: u32, chunk: Vec<u8> },
    /// All of it has been sent.
    End {
        bin: u32,
        /// How many chunks of state there were.
        chunks: u64,
        /// How many post-dated records.
        records: u64,
    },
    /// Post-dated records of it.
    Pending { bin: u32, records: Vec<(T, P)> },
}

/// What S tells the F that sends it bins.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Told {
    /// So many bytes were taken in.
    Taken(u64),
    /// Rows wait for these bins, for the first of them most: a hint, with which nothing but their order changes.
    Wanted(Vec<u32>),
}

impl Wire for Told {
    fn encode(&self, out: &mut Vec<u8>) {
        encode_serde(self, out);
    }

    fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        decode_serde(bytes)
    }
}

/// What a post-dated record counts for while it is under way, in bytes.
const RECORD_BYTES: u64 = 64;

impl<T, P> BinPart<T, P> {
    /// What it counts for while it is under way between processes, in bytes.
    pub(crate) fn weight(&self) -> u64 {
        match self {
            Self::State { chunk: bytes, .. } | Self::Piece { bytes, .. } => bytes.len() as u64,
            Self::Pending { records, .. } => records.len() as u64 * RECORD_BYTES,
            Self::Prepare { .. } | Self::Shelved { .. } | Self::End { .. } => 0,
        }
    }
}

const PREPARE: u8 = 1;
const STATE: u8 = 2;
const PENDING: u8 = 3;
const END: u8 = 4;
const PIECE: u8 = 5;

impl<T: Timestamp, P: Record> Wire for BinPart<T, P> {
    fn encode(&self, out: &mut Vec<u8>) {
        let mut head = |kind: u8, bin: &u32| {
            out.push(kind);
            out.extend_from_slice(&bin.to_le_bytes());
        };
        match self {
            Self::Prepare { bin, epoch } => {
                head(PREPARE, bin);
                encode_serde(epoch, out);
            }
            Self::Shelved { bin, .. } => {
                // A ticket means nothing elsewhere. Sent as a kind that nobody decodes, it stops the receiver.
                head(0, bin);
            }
            Self::Piece { bin, bytes } => {
                head(PIECE, bin);
                out.extend_from_slice(bytes);
            }
            Self::State { bin, chunk } => {
                head(STATE, bin);
                out.extend_from_slice(chunk);
            }
            Self::End { bin, chunks, records } => {
                head(END, bin);
                encode_serde(&(chunks, records), out);
            }
            Self::Pending { bin, records } => {
                head(PENDING, bin);
                encode_serde(records, out);
            }
        }
    }

    fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let (&kind, rest) = bytes.split_first().ok_or_else(|| WireError("no bytes".into()))?;
        let (bin, rest) = number(rest)?;
        match kind {
            PREPARE => Ok(Self::Prepare { bin, epoch: decode_serde(rest)? }),
            STATE => Ok(Self::State { bin, chunk: rest.to_vec() }),
            PIECE => Ok(Self::Piece { bin, bytes: rest.to_vec() }),
            END => {
                let (chunks, records) = decode_serde(rest)?;
                Ok(Self::End { bin, chunks, records })
            }
            PENDING => Ok(Self::Pending { bin, records: decode_serde(rest)? }),
            other => Err(WireError(format!("part of kind {other}"))),
        }
    }
}

fn number(bytes: &[u8]) -> Result<(u32, &[u8]), WireError> {
    let (head, rest) = bytes.split_first_chunk().ok_or_else(|| WireError(format!("{} bytes of 4", bytes.len())))?;
    Ok((u32::from_le_bytes(*head), rest))
}

/// Reads a part of a bin that moves, a block for a worker, or what S tells F, and what it wrote of it again; whether it is one. For fuzzing.
#[doc(hidden)]
#[must_use]
pub fn fuzz_parts(bytes: &[u8]) -> bool {
    type Part = BinPart<u64, Vec<(i64, Option<String>)>>;
    let part = Part::decode(bytes);
    if let Ok(part) = &part {
        let mut out = Vec::new();
        part.encode(&mut out);
        let again = Part::decode(&out).expect("what was read can be written and read");
        assert_eq!(format!("{again:?}"), format!("{part:?}"));
        assert!(part.weight() <= RECORD_BYTES * bytes.len() as u64);
    }
    let block = Addressed::<Vec<u64>>::decode(bytes);
    let told = Addressed::<Told>::decode(bytes);
    if let Ok(Addressed { to, content }) = &told {
        let mut out = Vec::new();
        Addressed { to: *to, content: content.clone() }.encode(&mut out);
        let again = Addressed::<Told>::decode(&out).expect("what was read can be written and read");
        assert_eq!((again.to, &again.content), (*to, content));
    }
    part.is_ok() | block.is_ok() | told.is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(part: &BinPart<u64, String>) -> Vec<u8> {
        let mut out = Vec::new();
        part.encode(&mut out);
        out
    }

    #[test]
    fn parts_survive_the_wire() {
        for epoch in [None, Some(u64::MAX)] {
            let prepare = BinPart::<u64, String>::decode(&bytes(&BinPart::Prepare { bin: 7, epoch }));
            assert!(matches!(prepare, Ok(BinPart::Prepare { bin: 7, epoch: e }) if e == epoch));
        }
        let end = BinPart::<u64, String>::decode(&bytes(&BinPart::End { bin: 7, chunks: u64::MAX, records: 3 }));
        assert!(matches!(end, Ok(BinPart::End { bin: 7, chunks: u64::MAX, records: 3 })));
        let state = bytes(&BinPart::State { bin: 8, chunk: vec![1, 2, 3] });
        assert!(
            matches!(BinPart::<u64, String>::decode(&state), Ok(BinPart::State { bin: 8, chunk }) if chunk == [1, 2, 3])
        );
        let piece = bytes(&BinPart::Piece { bin: 8, bytes: vec![1, 2] });
        assert!(
            matches!(BinPart::<u64, String>::decode(&piece), Ok(BinPart::Piece { bin: 8, bytes }) if bytes == [1, 2])
        );
        let records = vec![(4u64, "a".to_string()), (9, "b".to_string())];
        let pending = bytes(&BinPart::Pending { bin: 9, records: records.clone() });
        assert!(
            matches!(BinPart::<u64, String>::decode(&pending), Ok(BinPart::Pending { bin: 9, records: r }) if r == records)
        );
        for cut in 0..pending.len() {
            assert!(BinPart::<u64, String>::decode(&pending[..cut]).is_err());
        }
    }

    #[test]
    fn tickets_and_unknown_kinds_do_not_cross() {
        assert!(BinPart::<u64, String>::decode(&bytes(&BinPart::Shelved { bin: 7, ticket: 1 })).is_err());
        assert!(BinPart::<u64, String>::decode(&[9, 0, 0, 0, 0]).is_err());
        let mut long = bytes(&BinPart::Prepare { bin: 1, epoch: None });
        long.push(0);
        assert!(BinPart::<u64, String>::decode(&long).is_err());
    }

    #[test]
    fn what_is_told_survives_the_wire() {
        for told in [Told::Taken(u64::MAX), Told::Wanted(Vec::new()), Told::Wanted(vec![7, u32::MAX, 0])] {
            let mut out = Vec::new();
            Addressed { to: 4, content: told.clone() }.encode(&mut out);
            let read = Addressed::<Told>::decode(&out).unwrap();
            assert_eq!((read.to, read.content), (4, told));
            assert!((0..out.len()).all(|cut| Addressed::<Told>::decode(&out[..cut]).is_err()));
        }
    }

    #[test]
    fn addressed_blocks_keep_their_worker() {
        let mut out = Vec::new();
        Addressed { to: 4, content: vec![5u64, 6] }.encode(&mut out);
        let block = Addressed::<Vec<u64>>::decode(&out).unwrap();
        assert_eq!((block.to, block.content), (4, vec![5, 6]));
        assert!(Addressed::<Vec<u64>>::decode(&out[..3]).is_err());
    }
}
