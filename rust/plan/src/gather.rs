//! What an aggregate gathers of many values in one byte value of its row: a set, registers, a histogram.
//!
//! All three are plain bytes that are changed where they lie, so tables undo, move and write them as they do a text. What a table writes
//! is packed: without the room that is kept for more. Reading checks all of it, so no bytes from outside can do harm later. None depends on the order
//! in which values come, but for the order in which a set is written.
//!
//! Departure: own structures instead of a sketch crate, which keeps its state in objects of its own. What is here must lie in a row, be equal on
//! every machine and never change its form.

pub(crate) mod histogram;
pub(crate) mod registers;
pub(crate) mod set;

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn set_word(bytes: &mut [u8], at: usize, word: u32) {
    bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
}
