//! Control: commands that change the routing at a time, and what makes a batch of them acceptable.
//!
//! All commands of one time form a batch. They carry one sequence number and the size of the batch, so that a batch
//! torn by a faulty sender is recognised. Sequence numbers count the accepted batches of a generation: 0, 1, 2 …
//! A batch is either one full map or moves of different bins (no-ops aside), so its meaning does not depend on the
//! order in which its commands arrive.
//!
//! Invariant: a refused batch leaves the configuration and the expected sequence as they were.
//!
//! Source: Megaphone §3.3, §4.2; M-05, M-06.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::error::ControlError;
use crate::routing::Routing;

/// One change of the routing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Command {
    /// The owner of every bin.
    Map(Vec<u32>),
    /// One bin goes to a worker.
    Move {
        /// The bin.
        bin: u32,
        /// Its new owner.
        worker: u32,
    },
    /// Nothing; holds a place in the sequence.
    Noop,
}

/// A command as it travels: its time is that of the message that carries it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Control {
    /// Which batch.
    pub sequence: u64,
    /// How many commands that batch has.
    pub count: u32,
    /// What to do.
    pub command: Command,
}

impl Control {
    /// Wraps the commands of one time as batch number `sequence`.
    #[must_use]
    pub fn batch(sequence: u64, commands: Vec<Command>) -> Vec<Self> {
        let count = commands.len() as u32;
        commands.into_iter().map(|command| Self { sequence, count, command }).collect()
    }
}

/// One bin that changes its owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Move {
    /// The bin.
    pub bin: u32,
    /// Its owner before.
    pub from: u32,
    /// Its owner from then on.
    pub to: u32,
}

/// Checks a complete batch against the routing it changes; returns the real changes, bins ascending.
///
/// `present` tells members from absent workers; `expected` is the next sequence number.
///
/// # Errors
/// Every [`ControlError`]; nothing changes.
pub fn check_batch(
    batch: &[Control],
    routing: &Routing,
    present: impl Fn(u32) -> bool,
    expected: u64,
) -> Result<Vec<Move>, ControlError> {
    for control in batch {
        if control.sequence != expected {
            return Err(ControlError::Sequence { found: control.sequence, expected });
        }
        if control.count as usize != batch.len() {
            return Err(ControlError::Count { announced: control.count, present: batch.len() });
        }
    }
    check_commands(batch.iter().map(|control| &control.command), routing, present)
}

/// Checks the commands of one time, sequence and count aside.
pub(crate) fn check_commands<'a>(
    commands: impl Iterator<Item = &'a Command> + Clone,
    routing: &Routing,
    present: impl Fn(u32) -> bool,
) -> Result<Vec<Move>, ControlError> {
    let acting = commands.clone().filter(|command| **command != Command::Noop).count();
    let mut bins = BTreeSet::new();
    let mut moves = Vec::new();
    for command in commands {
        moves.append(&mut routing.changes(command)?);
        match command {
            Command::Noop => {}
            Command::Move { bin, worker } => {
                if !present(*worker) {
                    return Err(ControlError::AbsentWorker { worker: *worker });
                }
                if !bins.insert(*bin) {
                    return Err(ControlError::MovedTwice { bin: *bin });
                }
            }
            Command::Map(map) => {
                if acting > 1 {
                    return Err(ControlError::MapNotAlone { others: acting - 1 });
                }
                if let Some(worker) = map.iter().find(|worker| !present(**worker)) {
                    return Err(ControlError::AbsentWorker { worker: *worker });
                }
            }
        }
    }
    moves.sort_unstable_by_key(|m| m.bin);
    Ok(moves)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(batch: &[Control]) -> Result<Vec<Move>, ControlError> {
        check_batch(batch, &Routing::new(2, 2).unwrap(), |worker| worker < 2, 7)
    }

    fn moved(bin: u32, worker: u32) -> Command {
        Command::Move { bin, worker }
    }

    #[test]
    fn real_changes_only() {
        let batch = Control::batch(7, vec![moved(3, 0), Command::Noop, moved(0, 0), moved(1, 0)]);
        let moves = [Move { bin: 1, from: 1, to: 0 }, Move { bin: 3, from: 1, to: 0 }];
        assert_eq!(check(&batch), Ok(moves.to_vec()));
        let batch = Control::batch(7, vec![Command::Map(vec![1, 1, 0, 1]), Command::Noop]);
        assert_eq!(check(&batch), Ok(vec![Move { bin: 0, from: 0, to: 1 }]));
    }

    #[test]
    fn every_reject() {
        let one = |command| Control::batch(7, vec![command]);
        assert_eq!(check(&one(Command::Map(vec![0; 8]))), Err(ControlError::MapLength { length: 8, bins: 4 }));
        assert_eq!(check(&one(moved(4, 0))), Err(ControlError::BinOutOfRange { bin: 4, bins: 4 }));
        assert_eq!(check(&one(moved(0, 2))), Err(ControlError::AbsentWorker { worker: 2 }));
        assert_eq!(check(&one(Command::Map(vec![0, 0, 9, 0]))), Err(ControlError::AbsentWorker { worker: 9 }));
        assert_eq!(
            check(&Control::batch(8, vec![Command::Noop])),
            Err(ControlError::Sequence { found: 8, expected: 7 })
        );
        assert_eq!(
            check(&Control::batch(6, vec![Command::Noop])),
            Err(ControlError::Sequence { found: 6, expected: 7 })
        );
        let mut mixed = Control::batch(7, vec![Command::Noop, Command::Noop]);
        mixed[1].sequence = 9;
        assert_eq!(check(&mixed), Err(ControlError::Sequence { found: 9, expected: 7 }));
        let mut torn = Control::batch(7, vec![moved(0, 1), moved(1, 0), moved(2, 1)]);
        torn.pop();
        assert_eq!(check(&torn), Err(ControlError::Count { announced: 3, present: 2 }));
        let mut uneven = Control::batch(7, vec![Command::Noop, Command::Noop]);
        uneven[1].count = 1;
        assert_eq!(check(&uneven), Err(ControlError::Count { announced: 1, present: 2 }));
        assert_eq!(check(&Control::batch(7, vec![moved(2, 1), moved(2, 0)])), Err(ControlError::MovedTwice { bin: 2 }));
        assert_eq!(
            check(&Control::batch(7, vec![moved(2, 1), Command::Map(vec![0; 4])])),
            Err(ControlError::MapNotAlone { others: 1 })
        );
    }
}
