//! Partial and total orders on times.
//!
//! `std::cmp::PartialOrd` is tied to `<` and to a consistent `Ord`; logical times need a partial order beside a linear
//! one that sorts and indexes them. So the partial order is a trait of its own.
//!
//! Laws, for all `a`, `b`, `c` (checked for every implementation here by `tests/all/laws.rs`):
//! reflexive, antisymmetric (`a ≤ b` and `b ≤ a` imply `a == b`), transitive; and where the type is also `Ord`, the linear
//! order *extends* the partial one: `a ≤ b` implies `a.cmp(&b) != Greater`. Walking times in `Ord` order therefore never
//! meets a time before one below it.

/// A partial order.
pub trait PartialOrder: Eq {
    /// The order dimension, where known: how many linear orders it takes such that `a ≤ b` exactly if every one of them
    /// agrees. 0 for a single value, 1 for a total order, 2 for pairs of totally ordered coordinates; `usize::MAX` says
    /// unknown. `Ord` must be one of those linear orders. Structures use it to stop searching early: a wrong value gives
    /// wrong frontiers, the default is always right.
    const DIMENSION: usize = usize::MAX;

    /// Whether `self` precedes or equals `other`.
    fn less_equal(&self, other: &Self) -> bool;

    /// Whether `self` precedes `other` and differs from it.
    fn less_than(&self, other: &Self) -> bool {
        self != other && self.less_equal(other)
    }

    /// A value at or before both, the later the better; `None` where none is known. Structures use it to pass over many
    /// elements at once: too late a value gives wrong answers, the default is always right.
    fn lower_bound(&self, other: &Self) -> Option<Self>
    where
        Self: Sized,
    {
        let _ = other;
        None
    }
}

/// A partial order in which any two elements are comparable, in agreement with `Ord` where the type has it.
pub trait TotalOrder: PartialOrder {}

macro_rules! natural_order {
    ($($integer:ty),*) => {$(
        impl PartialOrder for $integer {
            const DIMENSION: usize = 1;
            #[inline]
            fn less_equal(&self, other: &Self) -> bool { self <= other }
            #[inline]
            fn less_than(&self, other: &Self) -> bool { self < other }
            #[inline]
            fn lower_bound(&self, other: &Self) -> Option<Self> { Some(*self.min(other)) }
        }
        impl TotalOrder for $integer {}
    )*};
}

natural_order!(u8, u16, u32, u64, u128, usize, i8, i16, i32, i64, i128, isize);

impl PartialOrder for () {
    const DIMENSION: usize = 0;
    #[inline]
    fn less_equal(&self, _: &Self) -> bool {
        true
    }
    #[inline]
    fn less_than(&self, _: &Self) -> bool {
        false
    }
    #[inline]
    fn lower_bound(&self, (): &Self) -> Option<Self> {
        Some(())
    }
}

impl TotalOrder for () {}
