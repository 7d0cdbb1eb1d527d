//! The models that mutants have to fail, by name.

use super::models;
use crate::explore::fails;

/// At which execution the gate notices the fault, if it does.
///
/// # Panics
/// When there is no such gate.
pub fn run(gate: &str) -> Option<usize> {
    match gate {
        "two threads" => fails(Some(3), || models::in_order(models::non_blocking, 2, 4, 2, false, false)),
        "reversed" => fails(Some(2), || models::in_order(models::non_blocking, 1, 2, 1, true, false)),
        "one slot" => fails(Some(3), || models::in_order(models::non_blocking, 2, 4, 1, false, false)),
        "three threads" => fails(Some(3), || models::in_order(models::non_blocking, 3, 3, 3, false, false)),
        "three threads, twice" => fails(Some(2), || models::in_order(models::non_blocking, 3, 6, 6, false, false)),
        "flagged" => fails(Some(3), || models::in_order(models::flagged, 2, 2, 2, false, false)),
        "locked" => fails(Some(3), || models::in_order(models::locked, 2, 4, 2, false, false)),
        "next" => fails(None, || models::next_is_a_lower_bound(models::non_blocking)),
        "repeated" => fails(Some(3), || models::taken_once(models::non_blocking, 2)),
        "late repetition" => fails(None, models::late_repetition),
        "panic" => fails(None, || models::broken(models::non_blocking, 0)),
        "hybrid" => fails(Some(2), || models::hybrid(&[0, 0, 1], 2, 9)),
        "hybrid, quantum 1" => fails(Some(3), || models::hybrid(&[1, 1, 1], 1, 1)),
        "partitioned" => fails(Some(3), || models::partitioned(&[0, 0], 2, 9)),
        _ => panic!("no gate {gate:?}"),
    }
}

/// All of them.
pub const ALL: [&str; 14] = [
    "two threads",
    "reversed",
    "one slot",
    "three threads",
    "three threads, twice",
    "flagged",
    "locked",
    "next",
    "repeated",
    "late repetition",
    "panic",
    "hybrid",
    "hybrid, quantum 1",
    "partitioned",
];
