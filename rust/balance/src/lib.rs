//! Which bins are to move where, in which steps, and when that is worth it.
//!
//! | module | owns |
//! |---|---|
//! | `shares` | target owners: equal shares of bins, or equal loads within a tolerance, with few moves |
//! | `steps`, `matched` | a migration as steps, each of which moves at one time: [`Strategy`] |
//! | `pause` | how many of them to take at once so that none pauses for longer than it may |
//! | `balancer` | watching loads, and evening them out without oscillating |
//! | `divider` | watching loads and sizes, and saying which bins to split and which to make one again |
//! | `sizer` | how many workers the rates that come to all queries need |
//!
//! Pure: workers and bins are numbers, loads are what the caller measured, time is what the caller says. Nothing here moves anything; who does
//! is `bins` in a process and the engine's protocol beyond it.
//!
//! Source: Megaphone (VLDB 2019), sections 3.3 and 4.4; DS2 (OSDI 2018) for [`Sizer`].

mod balancer;
mod divider;
mod matched;
mod pause;
mod shares;
mod sizer;
mod steps;

pub use balancer::{Balancer, Policy, Verdict, Why};
pub use divider::{Bin, Divider, Division, Fate, Large};
pub use pause::PauseLimit;
pub use shares::{balanced, evened, skew};
pub use sizer::{Demand, Size, Sizer, SizerPolicy};
pub use steps::{Strategy, StrategyError, steps};

/// Something that changes its worker: a bin by its number, or a range of the hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Shift<B> {
    /// What moves.
    pub what: B,
    /// The worker that has it.
    pub from: u32,
    /// The worker that is to have it.
    pub to: u32,
}
