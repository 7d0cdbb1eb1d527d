//! Plans: a migration from one routing to another as a list of steps, and driving it.
//!
//! A step is a set of moves that take effect at one time; how they are cut is `penstock-balance`'s.
//!
//! Source: Megaphone §3.3; M-14.

mod migration;

pub use migration::{Migration, MigrationProgress};

use penstock_balance::{Shift, Strategy};

use crate::control::Command;
use crate::error::BinsError;
use crate::routing::Routing;

/// One step: bins and their new owners.
pub type PlanStep = Vec<(u32, u32)>;

/// The steps from one routing to another; none when the routings are equal.
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
    let moves: Vec<Shift<u32>> =
        from.moves_to(to)?.into_iter().map(|m| Shift { what: m.bin, from: m.from, to: m.to }).collect();
    let list = penstock_balance::steps(strategy, &moves).map_err(|_| BinsError::StepSize)?;
    Ok(list.into_iter().map(|step| step.into_iter().map(|shift| (shift.what, shift.to)).collect()).collect())
}

/// The commands of a step.
#[must_use]
pub fn commands(step: &[(u32, u32)]) -> Vec<Command> {
    step.iter().map(|&(bin, worker)| Command::Move { bin, worker }).collect()
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
            let sized = [Strategy::Batched { size }, Strategy::Matched { size }];
            for strategy in [Strategy::AllAtOnce, Strategy::Fluid].into_iter().chain(sized) {
                let list = steps(strategy, &from, &to).unwrap();
                prop_assert_eq!(list.iter().map(Vec::len).sum::<usize>(), moved, "each bin moves once");
                let mut routing = from.clone();
                for step in &list {
                    for command in commands(step) {
                        prop_assert_eq!(routing.apply(&command).unwrap().moves.len(), 1);
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
