//! The models that mutants have to fail, by name.
//!
//! A gate is a macro of the copy of the code that it is for, so that of each copy no more is compiled than its own gate runs.

/// Says at which execution a gate notices the fault of a copy, if it does.
pub type Gate = fn() -> Option<usize>;

/// The gate of that name for the copy in that module, a `Gate`.
macro_rules! gate {
    ($copy:ident, "two threads") => {
        gate!($copy, Some(3), in_order(non_blocking, 2, 4, 2, false, false))
    };
    ($copy:ident, "reversed") => {
        gate!($copy, Some(2), in_order(non_blocking, 1, 2, 1, true, false))
    };
    ($copy:ident, "one slot") => {
        gate!($copy, Some(3), in_order(non_blocking, 2, 4, 1, false, false))
    };
    ($copy:ident, "three threads") => {
        gate!($copy, Some(3), in_order(non_blocking, 3, 3, 3, false, false))
    };
    ($copy:ident, "three threads, twice") => {
        gate!($copy, Some(2), in_order(non_blocking, 3, 6, 6, false, false))
    };
    ($copy:ident, "flagged") => {
        gate!($copy, Some(3), in_order(flagged, 2, 2, 2, false, false))
    };
    ($copy:ident, "locked") => {
        gate!($copy, Some(3), in_order(locked, 2, 4, 2, false, false))
    };
    ($copy:ident, "next") => {
        gate!($copy, None, next_is_a_lower_bound(non_blocking))
    };
    ($copy:ident, "repeated") => {
        gate!($copy, Some(3), taken_once(non_blocking, 2))
    };
    ($copy:ident, "late repetition") => {
        gate!($copy, None, late_repetition())
    };
    ($copy:ident, "panic") => {
        gate!($copy, None, broken(non_blocking, 0))
    };
    ($copy:ident, "hybrid") => {
        gate!($copy, Some(2), hybrid(&[0, 0, 1], 2, 9))
    };
    ($copy:ident, "hybrid, quantum 1") => {
        gate!($copy, Some(3), hybrid(&[1, 1, 1], 1, 1))
    };
    ($copy:ident, "partitioned") => {
        gate!($copy, Some(3), partitioned(&[0, 0], 2, 9))
    };
    ($copy:ident, $bound:expr, $model:expr) => {
        || {
            use $copy::models::*;
            $crate::explore::fails($bound, || $model)
        }
    };
}

/// All of them for a copy, each with its name.
macro_rules! every_gate {
    ($copy:ident) => {
        every_gate!(
            $copy,
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
            "partitioned"
        )
    };
    ($copy:ident, $($name:tt),*) => {
        [$(($name, gate!($copy, $name) as Gate)),*]
    };
}
