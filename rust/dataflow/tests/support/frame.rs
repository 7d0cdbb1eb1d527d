//! Frames between processes, for tests that speak for a peer.

/// A frame as the format is documented, written without the crate's own code.
pub(crate) fn frame(
    kind: u8,
    generation: u64,
    channel: u64,
    from: u32,
    to: u32,
    length: Option<u64>,
    body: &[u8],
) -> Vec<u8> {
    let mut bytes = vec![0x73, 0x6e, 0x65, 0x70, 3, kind, 0, 0];
    bytes.extend(11u64.to_le_bytes());
    bytes.extend(generation.to_le_bytes());
    bytes.extend(channel.to_le_bytes());
    bytes.extend(from.to_le_bytes());
    bytes.extend(to.to_le_bytes());
    bytes.extend(length.unwrap_or(body.len() as u64).to_le_bytes());
    bytes.extend(crc32fast::hash(body).to_le_bytes());
    bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
    bytes.extend(body);
    bytes
}
