//! How much a bounded scope may hold: N batches of at most B items per worker, fixed or found while running.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::controller::Limits;
use crate::memory::Memory;

/// The most batches: their numbers and counts stay far from overflow.
pub const MOST_BATCHES: u64 = 1 << 32;
/// The most items that all admitted batches of a worker may have.
pub const MOST_ITEMS: u64 = 1 << 48;

/// Bounds that cannot be kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BoundsError {
    /// Nothing could ever be admitted.
    #[error("{what} is 0, so nothing could ever be admitted: give 1 or more")]
    Zero {
        /// `batches`, `batch_size` or `budget_bytes`.
        what: &'static str,
    },
    /// More than can be counted.
    #[error(
        "{batches} batches of {batch_size} items are more than can be counted: at most {MOST_BATCHES} batches and {MOST_ITEMS} items in all"
    )]
    Overflow {
        /// Batches asked for.
        batches: u64,
        /// Items per batch asked for.
        batch_size: u64,
    },
    /// A lower limit above its upper one.
    #[error("the least {what} is {least}, above the most, {most}")]
    Reversed {
        /// `batches` or `batch_size`.
        what: &'static str,
        /// Lower limit.
        least: u64,
        /// Upper limit.
        most: u64,
    },
}

/// Checks a number of batches and their size.
pub(crate) fn check(batches: u64, batch_size: u64) -> Result<(), BoundsError> {
    for (what, value) in [("batches", batches), ("batch_size", batch_size)] {
        if value == 0 {
            return Err(BoundsError::Zero { what });
        }
    }
    let items = batches.checked_mul(batch_size);
    if batches > MOST_BATCHES || items.is_none_or(|items| items > MOST_ITEMS) {
        return Err(BoundsError::Overflow { batches, batch_size });
    }
    Ok(())
}

/// Nanoseconds since some moment, the same for all threads that ask; what it reads must not go back.
pub type Clock = Arc<dyn Fn() -> u64 + Send + Sync>;

/// The bounds of one scope for each of its workers, checked. In a process those hold that the worker gives which builds the scope first.
///
/// ```
/// use penstock_bounded::{Bounds, BoundsError};
///
/// assert!(Bounds::fixed(4, 1_000).is_ok());
/// assert_eq!(Bounds::fixed(4, 0).unwrap_err(), BoundsError::Zero { what: "batch_size" });
/// assert!(matches!(Bounds::fixed(1 << 30, u64::MAX), Err(BoundsError::Overflow { .. })));
/// ```
#[derive(Clone)]
pub struct Bounds {
    pub(crate) policy: Policy,
}

#[derive(Clone)]
pub(crate) enum Policy {
    Fixed { batches: u64, batch_size: u64 },
    Adaptive(Adaptive),
}

#[derive(Clone)]
pub(crate) struct Adaptive {
    pub(crate) limits: Limits,
    pub(crate) memory: Memory,
    pub(crate) clock: Clock,
}

impl Bounds {
    /// At most `batches` unfinished batches of at most `batch_size` items each.
    ///
    /// # Errors
    /// [`BoundsError::Zero`], [`BoundsError::Overflow`].
    pub fn fixed(batches: u64, batch_size: u64) -> Result<Self, BoundsError> {
        check(batches, batch_size)?;
        Ok(Bounds { policy: Policy::Fixed { batches, batch_size } })
    }

    /// Fixed where both numbers are given; else what is not given is found while running, within `limits`, keeping away from a budget of
    /// bytes that the process may hold.
    ///
    /// # Errors
    /// [`BoundsError`].
    pub fn given(
        batches: Option<u64>,
        batch_size: Option<u64>,
        budget_bytes: Option<u64>,
        mut limits: Limits,
    ) -> Result<Self, BoundsError> {
        let memory = budget_bytes.map(Memory::budget).transpose()?;
        if let (Some(batches), Some(batch_size)) = (batches, batch_size) {
            return Bounds::fixed(batches, batch_size);
        }
        if let Some(batches) = batches {
            limits.batches = (batches, batches, batches);
        }
        if let Some(size) = batch_size {
            limits.batch_size = (size, size, size);
        }
        let bounds = Bounds::adaptive().within(limits)?;
        Ok(match memory {
            Some(memory) => bounds.with_memory(memory),
            None => bounds,
        })
    }

    /// Found while running: both grow until more throughput does not come of it, and shrink while memory is short.
    pub fn adaptive() -> Self {
        let start = Instant::now();
        let clock: Clock = Arc::new(move || u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX));
        let (limits, memory) = (Limits::default(), Memory::host());
        Bounds { policy: Policy::Adaptive(Adaptive { limits, memory, clock }) }
    }

    /// Adaptive bounds within these limits. Fixed bounds stay as they are.
    ///
    /// # Errors
    /// [`BoundsError`] when the limits say nothing.
    pub fn within(mut self, limits: Limits) -> Result<Self, BoundsError> {
        limits.check()?;
        if let Policy::Adaptive(adaptive) = &mut self.policy {
            adaptive.limits = limits;
        }
        Ok(self)
    }

    /// Adaptive bounds by another reading of memory. Fixed bounds stay as they are.
    pub fn with_memory(mut self, memory: Memory) -> Self {
        if let Policy::Adaptive(adaptive) = &mut self.policy {
            adaptive.memory = memory;
        }
        self
    }

    /// Adaptive bounds by another clock. Fixed bounds stay as they are.
    pub fn with_clock(mut self, clock: Clock) -> Self {
        if let Policy::Adaptive(adaptive) = &mut self.policy {
            adaptive.clock = clock;
        }
        self
    }
}

impl std::fmt::Debug for Bounds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.policy {
            Policy::Fixed { batches, batch_size } => write!(f, "Bounds({batches} batches of {batch_size})"),
            Policy::Adaptive(adaptive) => write!(f, "Bounds(adaptive, {:?})", adaptive.limits),
        }
    }
}

/// How long an adaptive controller watches before it judges: see [`Limits::period`].
pub(crate) const PERIOD: Duration = Duration::from_millis(50);
