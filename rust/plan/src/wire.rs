//! Little-endian plain data: how state is written to and read from chunks. Version and shape are the caller's.

use arrow_buffer::ToByteSlice;

use crate::error::StateFault;

/// Reads what the `put_*` functions wrote; every read is bounded by the chunk.
pub(crate) struct Reader<'a> {
    bytes: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes }
    }

    pub(crate) fn take(&mut self, len: usize) -> Result<&'a [u8], StateFault> {
        if len > self.bytes.len() {
            return Err(StateFault::Corrupt { what: "the chunk ends early" });
        }
        let (head, tail) = self.bytes.split_at(len);
        self.bytes = tail;
        Ok(head)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], StateFault> {
        Ok(self.take(N)?.try_into().expect("take returns N bytes"))
    }

    pub(crate) fn u8(&mut self) -> Result<u8, StateFault> {
        Ok(self.array::<1>()?[0])
    }

    pub(crate) fn u32(&mut self) -> Result<u32, StateFault> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(crate) fn i64(&mut self) -> Result<i64, StateFault> {
        Ok(i64::from_le_bytes(self.array()?))
    }

    /// A number as [`put_zigzag`] writes it, in one way only.
    pub(crate) fn zigzag(&mut self) -> Result<i64, StateFault> {
        let mut value = 0_u64;
        for shift in (0..64).step_by(7) {
            let byte = self.u8()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                let canonical = (byte > 0 || shift == 0) && (shift < 63 || byte < 2);
                let number = (value >> 1) as i64 ^ -((value & 1) as i64);
                return canonical.then_some(number).ok_or(StateFault::Corrupt { what: "a number" });
            }
        }
        Err(StateFault::Corrupt { what: "a number" })
    }

    /// Bytes behind their length, as [`put_blob`] writes them.
    pub(crate) fn blob(&mut self) -> Result<&'a [u8], StateFault> {
        let len = self.u32()? as usize;
        self.take(len)
    }

    /// All that is left.
    pub(crate) fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.bytes)
    }

    /// `count` fixed-size items of `N` bytes; the length is checked before anything is allocated.
    pub(crate) fn items<const N: usize, T>(
        &mut self,
        count: usize,
        into: &mut Vec<T>,
        convert: impl Fn([u8; N]) -> T,
    ) -> Result<(), StateFault> {
        let bytes = self.take(count.checked_mul(N).ok_or(StateFault::Corrupt { what: "a length overflows" })?)?;
        into.extend(bytes.chunks_exact(N).map(|item| convert(item.try_into().expect("chunks of N bytes"))));
        Ok(())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    pub(crate) fn finish(&self) -> Result<(), StateFault> {
        if self.bytes.is_empty() { Ok(()) } else { Err(StateFault::Corrupt { what: "bytes left over in the chunk" }) }
    }
}

pub(crate) fn put_u32(out: &mut Vec<u8>, value: u32) {
    out.extend_from_slice(&value.to_le_bytes());
}

pub(crate) fn put_i64(out: &mut Vec<u8>, value: i64) {
    out.extend_from_slice(&value.to_le_bytes());
}

/// A varint of at most ten bytes that no other begins with; numbers near 0 are short.
pub(crate) fn put_zigzag(out: &mut Vec<u8>, value: i64) {
    let mut left = (value << 1 ^ value >> 63) as u64;
    while left >= 0x80 {
        out.push(left as u8 | 0x80);
        left >>= 7;
    }
    out.push(left as u8);
}

pub(crate) fn put_items<const N: usize, T: Copy>(out: &mut Vec<u8>, items: &[T], convert: impl Fn(T) -> [u8; N]) {
    let start = out.len();
    out.resize(start + items.len() * N, 0);
    for (to, &item) in out[start..].chunks_exact_mut(N).zip(items) {
        to.copy_from_slice(&convert(item));
    }
}

/// Words as they lie in memory, where that is little-endian.
#[inline]
pub(crate) fn put_words(out: &mut Vec<u8>, words: &[u64]) {
    if cfg!(target_endian = "little") {
        out.extend_from_slice(words.to_byte_slice());
    } else {
        put_items(out, words, u64::to_le_bytes);
    }
}

/// Writes `bytes` behind its length.
pub(crate) fn put_blob(out: &mut Vec<u8>, bytes: &[u8]) {
    put_u32(out, u32::try_from(bytes.len()).expect("one encoded row is below 4 GiB"));
    out.extend_from_slice(bytes);
}
