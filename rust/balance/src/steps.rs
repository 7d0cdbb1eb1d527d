//! A migration as a list of steps: what moves at one time, one after the other.
//!
//! The fewer bins in a step, the shorter its pause and the longer the whole migration. Every strategy reaches the same owners.
//!
//! Source: Megaphone sections 3.3 and 4.4; M-14, M-15.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{Shift, matched};

/// How to cut a migration into steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Strategy {
    /// Everything in one step: the shortest migration and the longest pause.
    AllAtOnce,
    /// One bin a step: the shortest pauses and the longest migration.
    Fluid,
    /// So many bins a step, in the order of the moves.
    Batched {
        /// At least one.
        size: usize,
    },
    /// A step in which each worker sends to at most one other, and receives from at most one, so many bins; as few such steps as there
    /// can be. No worker serialises or installs for two at a time, so the worst pause is that of one pair, and pairs move side by side.
    Matched {
        /// Bins of a pair, at least one.
        size: usize,
    },
}

/// A strategy that makes no sense.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StrategyError {
    /// Steps of no bins.
    #[error("steps of 0 bins would never end: batch_size is at least 1")]
    Empty,
    /// Not the name of one.
    #[error("strategy '{0}' is none of {names}", names = Strategy::NAMES.join(", "))]
    Unknown(String),
}

impl Strategy {
    /// What users call them.
    pub const NAMES: [&str; 4] = ["batched", "all-at-once", "fluid", "matched"];

    /// The strategy of that name, with that size where it has one.
    ///
    /// # Errors
    /// [`StrategyError`].
    pub fn parse(name: &str, size: usize) -> Result<Self, StrategyError> {
        let strategy = match name {
            "all-at-once" => Self::AllAtOnce,
            "fluid" => Self::Fluid,
            "batched" => Self::Batched { size },
            "matched" => Self::Matched { size },
            other => return Err(StrategyError::Unknown(other.to_owned())),
        };
        strategy.check().map(|()| strategy)
    }

    /// Refuses steps of nothing.
    ///
    /// # Errors
    /// [`StrategyError::Empty`].
    pub fn check(self) -> Result<(), StrategyError> {
        match self {
            Self::Batched { size: 0 } | Self::Matched { size: 0 } => Err(StrategyError::Empty),
            _ => Ok(()),
        }
    }
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AllAtOnce => f.write_str("all-at-once"),
            Self::Fluid => f.write_str("fluid"),
            Self::Batched { size } => write!(f, "batched:{size}"),
            Self::Matched { size } => write!(f, "matched:{size}"),
        }
    }
}

impl FromStr for Strategy {
    type Err = StrategyError;

    fn from_str(text: &str) -> Result<Self, StrategyError> {
        let (name, size) = text.split_once(':').unwrap_or((text, "16"));
        Self::parse(name, size.parse().map_err(|_| StrategyError::Unknown(text.to_owned()))?)
    }
}

/// The steps of these moves: 1, as many as there are moves, that divided by the size and rounded up, or for [`Strategy::Matched`] the most
/// that one worker has to send or to receive, in groups of the size to one other; none of none.
///
/// # Errors
/// [`StrategyError::Empty`].
///
/// # Examples
/// ```
/// use penstock_balance::{Shift, Strategy, steps};
/// let moves = [(0, 0, 1), (1, 0, 1), (2, 1, 0)].map(|(what, from, to)| Shift { what, from, to });
/// assert_eq!(steps(Strategy::Fluid, &moves)?.len(), 3);
/// assert_eq!(steps(Strategy::Matched { size: 1 }, &moves)?, [vec![moves[0], moves[2]], vec![moves[1]]]);
/// # Ok::<(), penstock_balance::StrategyError>(())
/// ```
pub fn steps<B: Copy>(strategy: Strategy, moves: &[Shift<B>]) -> Result<Vec<Vec<Shift<B>>>, StrategyError> {
    strategy.check()?;
    Ok(match strategy {
        _ if moves.is_empty() => Vec::new(),
        Strategy::AllAtOnce => vec![moves.to_vec()],
        Strategy::Fluid => moves.chunks(1).map(<[_]>::to_vec).collect(),
        Strategy::Batched { size } => moves.chunks(size).map(<[_]>::to_vec).collect(),
        Strategy::Matched { size } => matched::steps(moves, size),
    })
}
