//! Bytes of many rows in few allocations: each stands behind its length in a chunk and is known by where it stands.
//!
//! What is dropped stays until its chunk has nothing else, so what comes and goes in order (rows of windows) takes no more than it needs; where
//! more is dead than alive the owner writes all anew ([`Arena::is_sparse`]).
//!
//! Invariant: a place is that of bytes that were put and not yet dropped.

/// A chunk takes no more when it has so many bytes; longer ones have a chunk of their own.
const CHUNK: usize = 1 << 16;
/// So many dead bytes are not worth writing the others anew.
const LEAST_DEAD: usize = 1 << 12;
const HEAD: usize = size_of::<u32>();

#[derive(Default)]
struct Chunk {
    bytes: Vec<u8>,
    /// How many are alive.
    alive: u32,
}

/// See the module.
#[derive(Default)]
pub(super) struct Arena {
    chunks: Vec<Chunk>,
    /// The chunk that takes the next.
    open: usize,
    /// Chunks with nothing in them.
    free: Vec<usize>,
    /// Bytes of all chunks, and those of them that are dead.
    len: usize,
    dead: usize,
}

impl Arena {
    /// No bytes, which stand nowhere.
    pub(super) const NOTHING: u64 = u64::MAX;

    /// Keeps bytes and says where.
    #[inline]
    pub(super) fn put(&mut self, bytes: &[u8]) -> u64 {
        self.put_behind(&[], bytes)
    }

    /// The same of two pieces as one.
    #[inline]
    pub(super) fn put_behind(&mut self, first: &[u8], bytes: &[u8]) -> u64 {
        let len = first.len() + bytes.len();
        if len == 0 {
            return Self::NOTHING;
        }
        let need = HEAD + len;
        let len = u32::try_from(len).expect("a row is below 4 GiB");
        if self.chunks.get(self.open).is_none_or(|open| !open.bytes.is_empty() && open.bytes.len() + need > CHUNK) {
            self.open = self.free.pop().unwrap_or_else(|| {
                self.chunks.push(Chunk::default());
                self.chunks.len() - 1
            });
        }
        let chunk = &mut self.chunks[self.open];
        let at = chunk.bytes.len();
        chunk.bytes.extend_from_slice(&len.to_le_bytes());
        chunk.bytes.extend_from_slice(first);
        chunk.bytes.extend_from_slice(bytes);
        chunk.alive += 1;
        self.len += need;
        (self.open as u64) << 32 | at as u64
    }

    #[inline]
    pub(super) fn get(&self, place: u64) -> &[u8] {
        if place == Self::NOTHING {
            return &[];
        }
        let (head, rest) = self.chunks[(place >> 32) as usize].bytes[place as u32 as usize..]
            .split_first_chunk::<HEAD>()
            .expect("a place has a length");
        &rest[..u32::from_le_bytes(*head) as usize]
    }

    /// Lets go of what stands there.
    pub(super) fn drop(&mut self, place: u64) {
        if place == Self::NOTHING {
            return;
        }
        self.dead += HEAD + self.get(place).len();
        let at = (place >> 32) as usize;
        let chunk = &mut self.chunks[at];
        chunk.alive -= 1;
        if chunk.alive == 0 {
            (self.len, self.dead) = (self.len - chunk.bytes.len(), self.dead - chunk.bytes.len());
            if at == self.open && chunk.bytes.capacity() <= CHUNK {
                chunk.bytes.clear();
            } else {
                chunk.bytes = Vec::new();
                if at != self.open {
                    self.free.push(at);
                }
            }
        }
    }

    /// Whether to put what is alive into another arena.
    pub(super) fn is_sparse(&self) -> bool {
        self.dead > LEAST_DEAD && self.dead > self.len / 2
    }

    /// Bytes that it takes.
    pub(super) fn bytes(&self) -> usize {
        self.len + self.chunks.len() * size_of::<Chunk>()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_was_put_is_there_until_it_is_dropped(
            deeds in prop::collection::vec((0usize..3, prop_oneof![8 => 0usize..60, 1 => 0usize..200_000], any::<usize>()), 0..200),
        ) {
            let (mut arena, mut kept) = (Arena::default(), Vec::<(u64, Vec<u8>)>::new());
            for (deed, len, seed) in deeds {
                if deed > 0 || kept.is_empty() {
                    let bytes = vec![seed as u8; len];
                    kept.push((arena.put(&bytes), bytes));
                } else {
                    let (place, _) = kept.swap_remove(seed % kept.len());
                    arena.drop(place);
                }
                for (place, bytes) in &kept {
                    prop_assert_eq!(arena.get(*place), &bytes[..]);
                }
                let alive: usize = kept.iter().filter(|kept| !kept.1.is_empty()).map(|kept| HEAD + kept.1.len()).sum();
                prop_assert_eq!(arena.len - arena.dead, alive);
                prop_assert_eq!(arena.len, arena.chunks.iter().map(|chunk| chunk.bytes.len()).sum::<usize>());
            }
            kept.drain(..).for_each(|(place, _)| arena.drop(place));
            prop_assert_eq!((arena.len, arena.dead), (0, 0));
        }
    }
}
