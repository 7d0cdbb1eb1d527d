//! Frames under arbitrary bytes: no panic, no memory beyond what was received or allowed.

use std::io::{self, Read};

use penstock_cluster::session::{Client, Frame, Keys, Kind, Role, Secret, Server, read_frame, write_frame};
use proptest::prelude::*;

const STEP: usize = 1 << 20;

/// Hands out its bytes; remembers how much memory it was ever offered beyond what it had given.
struct Watched<'a> {
    bytes: &'a [u8],
    given: usize,
    excess: usize,
}

impl Read for Watched<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.excess = self.excess.max(into.len().saturating_sub(self.given.max(STEP)));
        let read = self.bytes.read(into)?;
        self.given += read;
        Ok(read)
    }
}

fn kind() -> impl Strategy<Value = Kind> {
    use Kind::*;
    prop::sample::select(vec![Request, Reply, Message, Join, Dismiss, Heartbeat, Answer, Data, End])
}

/// Bytes that look like frames far enough to be interesting.
fn almost_frames() -> impl Strategy<Value = Vec<u8>> {
    let header = (any::<u8>(), any::<u32>(), any::<u32>(), prop::collection::vec(any::<u8>(), 0..64)).prop_map(
        |(kind, length, crc, rest)| {
            let mut bytes = b"PF\x01".to_vec();
            bytes.push(kind % 12);
            bytes.extend_from_slice(&length.to_le_bytes());
            bytes.extend_from_slice(&crc.to_le_bytes());
            bytes.extend_from_slice(&rest);
            bytes
        },
    );
    prop_oneof![prop::collection::vec(any::<u8>(), 0..64), header]
}

proptest! {
    #[test]
    fn any_bytes_are_frames_or_errors(bytes in almost_frames(), limit in 0usize..1 << 31) {
        let mut input = Watched { bytes: &bytes, given: 0, excess: 0 };
        while let Ok(Some(frame)) = read_frame(&mut input, limit) {
            prop_assert!(frame.payload.len() <= limit.min(bytes.len()));
            let _ = frame.into_body();
        }
        prop_assert_eq!(input.excess, 0);
    }

    #[test]
    fn what_was_written_is_read(
        frames in prop::collection::vec(
            (kind(), (any::<u8>(), 0usize..80_000).prop_map(|(byte, length)| vec![byte; length])),
            0..4,
        ),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut bytes = Vec::new();
        for (kind, payload) in &frames {
            let (left, right) = payload.split_at(payload.len() / 3);
            write_frame(&mut bytes, *kind, &[left, right], 1 << 20).unwrap();
        }
        let mut input = &bytes[..];
        for (kind, payload) in &frames {
            let frame = read_frame(&mut input, 1 << 20).unwrap().unwrap();
            prop_assert_eq!(frame, Frame { kind: *kind, payload: payload.clone() });
        }
        prop_assert!(read_frame(&mut input, 1 << 20).unwrap().is_none());
        // Cut anywhere: whole frames, then an end or an error, never a wrong frame.
        let mut input = &bytes[..if bytes.is_empty() { 0 } else { cut.index(bytes.len()) }];
        for (_, payload) in &frames {
            match read_frame(&mut input, 1 << 20) {
                Ok(Some(frame)) => prop_assert_eq!(&frame.payload, payload),
                _ => break,
            }
        }
    }

    #[test]
    fn any_bytes_are_handshakes_or_errors(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let keys = Keys::all(&Secret::new(std::array::from_fn(|i| i as u8)).unwrap());
        prop_assert!(Server::challenge(&keys, &bytes, [9; 32], b"").is_err() || bytes.starts_with(b"pnsk"));
        let (client, hello) = Client::hello(&keys, Role::Feed, "q 1", &bytes, [1; 32]).unwrap();
        prop_assert!(client.answer(&bytes, b"").is_err());
        let (server, _) = Server::challenge(&keys, &hello, [9; 32], b"").unwrap();
        prop_assert!(server.verify(&bytes).is_err());
    }
}
