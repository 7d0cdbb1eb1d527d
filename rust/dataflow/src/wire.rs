//! How a block becomes bytes when it crosses a process boundary.
//!
//! Between the threads of one process blocks travel as they are; [`Wire`] is called for the others only.

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Bytes that are not a block.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot decode a block: {0}")]
pub struct WireError(pub String);

/// A block that can cross a process boundary. `decode(encode(x))` equals `x`.
///
/// Every value that serde can serialize gets the methods from [`encode_serde`] and [`decode_serde`].
pub trait Wire: Send + 'static {
    /// Appends the bytes of this block to `out`.
    fn encode(&self, out: &mut Vec<u8>);
    /// The block of these bytes.
    fn decode(bytes: &[u8]) -> Result<Self, WireError>
    where
        Self: Sized;
}

/// Appends the postcard encoding of `value` to `out`.
///
/// # Panics
/// When `Serialize` of the value itself fails.
pub fn encode_serde<X: Serialize + ?Sized>(value: &X, out: &mut Vec<u8>) {
    *out = postcard::to_extend(value, std::mem::take(out))
        .expect("serializing into memory fails only in a user's Serialize");
}

/// Decodes what [`encode_serde`] wrote; trailing bytes are an error.
pub fn decode_serde<X: DeserializeOwned>(bytes: &[u8]) -> Result<X, WireError> {
    borrow_serde(bytes)
}

/// As [`decode_serde`], for values that borrow from the bytes.
pub(crate) fn borrow_serde<'a, X: serde::Deserialize<'a>>(bytes: &'a [u8]) -> Result<X, WireError> {
    match postcard::take_from_bytes(bytes) {
        Ok((value, [])) => Ok(value),
        Ok((_, rest)) => Err(WireError(format!("{} bytes too many", rest.len()))),
        Err(error) => Err(WireError(error.to_string())),
    }
}

macro_rules! wire_by_serde {
    ($($kind:ty),* $(,)?) => {
        $(impl Wire for $kind {
            fn encode(&self, out: &mut Vec<u8>) {
                encode_serde(self, out);
            }
            fn decode(bytes: &[u8]) -> Result<Self, WireError> {
                decode_serde(bytes)
            }
        })*
    };
}

wire_by_serde!((), bool, u8, u32, u64, i64, usize, f64, char, String);

impl<X: Serialize + DeserializeOwned + Send + 'static> Wire for Vec<X> {
    fn encode(&self, out: &mut Vec<u8>) {
        encode_serde(self, out);
    }
    fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        decode_serde(bytes)
    }
}

impl<A, B> Wire for (A, B)
where
    A: Serialize + DeserializeOwned + Send + 'static,
    B: Serialize + DeserializeOwned + Send + 'static,
{
    fn encode(&self, out: &mut Vec<u8>) {
        encode_serde(self, out);
    }
    fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        decode_serde(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trip_appends() {
        let mut out = vec![9];
        let block = vec![("a".to_string(), 1u64), ("b".to_string(), u64::MAX)];
        block.encode(&mut out);
        assert_eq!(out[0], 9);
        assert_eq!(Vec::<(String, u64)>::decode(&out[1..]), Ok(block));
    }

    #[test]
    fn truncated_and_trailing_bytes_are_errors() {
        let mut out = Vec::new();
        vec![1u64, 2, 3].encode(&mut out);
        for cut in 0..out.len() {
            assert!(Vec::<u64>::decode(&out[..cut]).is_err(), "cut at {cut}");
        }
        out.push(0);
        assert!(Vec::<u64>::decode(&out).is_err());
    }
}
