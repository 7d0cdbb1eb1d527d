//! Plans: a migration from one routing to another as a list of steps.
//!
//! A step is a set of moves that take effect at one time. The fewer bins in a step, the shorter its pause and the longer the
//! whole migration. Every strategy reaches the same final map.
//!
//! Source: Megaphone §3.3; M-14.

mod all_at_once;
mod batched;
mod fluid;
mod migration;

pub use migration::{Migration, MigrationProgress};

use serde::{Deserialize, Serialize};

use crate::control::{Command, Move};
use crate::error::BinsError;
use crate::routing::Routing;

/// How to cut a migration into steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Strategy {
    /// Everything in one step.
    AllAtOnce,
    /// One bin a step, each awaited.
    Fluid,
    /// Groups of bins, each awaited.
    Batched {
        /// Bins in a step, at least one.
        size: usize,
    },
}

/// One step: bins and their new owners.
pub type PlanStep = Vec<(u32, u32)>;

/// The steps from one routing to another: 1, the number of bins moved, or that divided by the size, rounded up; none when
/// the routings are equal.
///
/// # Errors
/// [`BinsError::BitsDiffer`], [`BinsError::StepSize`].
///
/// # Examples
/// ```
/// use penstock_bins::{Routing, Strategy, steps};
/// let (from, to) = (Routing::new(2, 1)?, Routing::new(2, 2)?);
/// assert_eq!(steps(Strategy::Fluid, &from, &to)?, [vec![(1, 1)], vec![(3, 1)]]);
/// assert_eq!(steps(Strategy::AllAtOnce, &from, &to)?, [vec![(1, 1), (3, 1)]]);
/// # Ok::<(), penstock_bins::BinsError>(())
/// ```
pub fn steps(strategy: Strategy, from: &Routing, to: &Routing) -> Result<Vec<PlanStep>, BinsError> {
    let moves = from.moves_to(to)?;
    match strategy {
        Strategy::AllAtOnce => Ok(all_at_once::steps(&moves)),
        Strategy::Fluid => Ok(fluid::steps(&moves)),
        Strategy::Batched { size: 0 } => Err(BinsError::StepSize),
        Strategy::Batched { size } => Ok(batched::steps(&moves, size)),
    }
}

/// The commands of a step.
#[must_use]
pub fn commands(step: &[(u32, u32)]) -> Vec<Command> {
    step.iter().map(|&(bin, worker)| Command::Move { bin, worker }).collect()
}

fn plain(moves: &[Move]) -> PlanStep {
    moves.iter().map(|m| (m.bin, m.to)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::{prop, prop_assert_eq, proptest};

    proptest! {
        #[test]
        fn every_strategy_ends_at_the_same_map(
            from in prop::collection::vec(0u32..5, 32),
            to in prop::collection::vec(0u32..5, 32),
            size in 1usize..40,
        ) {
            let (from, to) = (Routing::from_owners(from).unwrap(), Routing::from_owners(to).unwrap());
            let moved = from.moves_to(&to).unwrap().len();
            for (strategy, expected) in [
                (Strategy::AllAtOnce, moved.min(1)),
                (Strategy::Fluid, moved),
                (Strategy::Batched { size }, moved.div_ceil(size)),
            ] {
                let list = steps(strategy, &from, &to).unwrap();
                prop_assert_eq!(list.len(), expected);
                prop_assert_eq!(list.iter().map(Vec::len).sum::<usize>(), moved, "each bin moves once");
                let mut routing = from.clone();
                for step in &list {
                    for command in commands(step) {
                        prop_assert_eq!(routing.apply(&command).unwrap().len(), 1);
                    }
                }
                prop_assert_eq!(&routing, &to);
            }
        }
    }

    #[test]
    fn bad_plans_are_refused() {
        let (a, b) = (Routing::new(2, 1).unwrap(), Routing::new(3, 1).unwrap());
        assert!(matches!(steps(Strategy::Fluid, &a, &b), Err(BinsError::BitsDiffer { expected: 2, found: 3 })));
        assert!(matches!(steps(Strategy::Batched { size: 0 }, &a, &a), Err(BinsError::StepSize)));
    }
}
