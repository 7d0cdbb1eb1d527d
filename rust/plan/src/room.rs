//! Memory of what was many and is few: lists keep room for as many items as they ever had, and that is given back.

/// So many items are always given room.
const KEPT: usize = 256;

/// For how many items there is to be room where most of it is for such as have gone; none where it is of use. What is moved by that is less than
/// what has gone.
#[inline]
pub(crate) fn spare(len: usize, capacity: usize) -> Option<usize> {
    (capacity > 4 * len + KEPT).then_some(2 * len)
}
