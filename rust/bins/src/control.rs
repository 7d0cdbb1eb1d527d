//! Control: commands that change the routing at a time, and what makes a batch of them acceptable.
//!
//! All commands of one time form a batch. They carry one sequence number and the size of the batch, so that a batch
//! torn by a faulty sender is recognised. Sequence numbers count the accepted batches of a generation: 0, 1, 2 …
//! A batch is either one full map or moves, splits and merges of different bins (no-ops aside), so its meaning does not depend on the
//! order in which its commands arrive.
//!
//! Invariant: a refused batch leaves the configuration and the expected sequence as they were.
//!
//! Source: Megaphone §3.3, §4.2; M-05, M-06.

use std::collections::BTreeSet;

use penstock_files::Range;
use serde::{Deserialize, Serialize};

use crate::error::ControlError;
use crate::parts::{number_of, range_of};
use crate::routing::{Routing, SPLIT};

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
    /// One bin becomes `2^bits`, by the next bits of the hash, with the same owner. See [`number_of`](crate::number_of).
    Split {
        /// The bin, or part of one.
        bin: u32,
        /// Bits by which its parts are longer.
        bits: u8,
    },
    /// All parts of one bin, or of a part, become one again; one worker has all of them.
    Merge {
        /// What they are parts of.
        bin: u32,
    },
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

/// A bin that becomes its parts, or the other way round.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Recut {
    /// The coarser one.
    pub bin: u32,
    /// The finer ones, by hash.
    pub parts: Vec<u32>,
    /// Their owner.
    pub worker: u32,
    /// Whether the parts become one.
    pub merges: bool,
}

/// What the commands of one time change. A bin, and what is part of it, is named once.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Changes {
    /// Bins that change their owner, ascending.
    pub moves: Vec<Move>,
    /// Bins that are split or merged.
    pub recuts: Vec<Recut>,
}

impl Changes {
    /// Whether nothing changes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.moves.is_empty() && self.recuts.is_empty()
    }
}

/// Checks a complete batch against the routing it changes; returns the real changes.
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
) -> Result<Changes, ControlError> {
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
) -> Result<Changes, ControlError> {
    let acting = commands.clone().filter(|command| **command != Command::Noop).count();
    let mut bins = BTreeSet::new();
    let mut all = Changes::default();
    for command in commands {
        let Changes { mut moves, mut recuts } = routing.changes(command)?;
        all.moves.append(&mut moves);
        all.recuts.append(&mut recuts);
        match command {
            Command::Noop => {}
            Command::Move { bin, worker } => {
                if !present(*worker) {
                    return Err(ControlError::AbsentWorker { worker: *worker });
                }
                if !bins.insert(*bin) {
                    return Err(ControlError::MovedTwice { bin: routing.name(*bin) });
                }
            }
            Command::Split { bin, .. } | Command::Merge { bin } => {
                if !bins.insert(*bin) {
                    return Err(ControlError::MovedTwice { bin: routing.name(*bin) });
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
    all.moves.sort_unstable_by_key(|m| m.bin);
    if !all.recuts.is_empty() {
        // A merge names what else is part of the bin.
        let mut ranges: Vec<Range> = bins.iter().filter_map(|bin| range_of(*bin, routing.bits())).collect();
        ranges.sort_unstable_by_key(|range| (range.first(), range.length()));
        if let Some(pair) = ranges.windows(2).find(|pair| pair[0].intersects(pair[1])) {
            let bin = number_of(pair[1], routing.bits()).expect("it has a number");
            return Err(ControlError::MovedTwice { bin: routing.name(bin) });
        }
    }
    Ok(all)
}

/// Whether these are what commands of one time change, members aside: who joins is told changes, not commands.
pub(crate) fn are_changes_of(changes: &Changes, routing: &Routing) -> bool {
    let moves = changes.moves.iter().map(|m| Command::Move { bin: m.bin, worker: m.to });
    let recuts = changes.recuts.iter().map(|recut| match (recut.merges, recut.parts.len().checked_ilog2()) {
        (true, _) => Command::Merge { bin: recut.bin },
        (false, bits) => Command::Split { bin: recut.bin, bits: bits.unwrap_or(0) as u8 },
    });
    let commands: Vec<Command> = moves.chain(recuts).collect();
    check_commands(commands.iter(), routing, |worker| worker != SPLIT).is_ok_and(|made| made == *changes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::BinName;

    fn check(batch: &[Control]) -> Result<Vec<Move>, ControlError> {
        let changes = check_batch(batch, &Routing::new(2, 2).unwrap(), |worker| worker < 2, 7)?;
        assert_eq!(changes.recuts, []);
        Ok(changes.moves)
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
        assert_eq!(check(&one(moved(4, 0))), Err(ControlError::BinOutOfRange { bin: BinName::new(4, 2), bins: 4 }));
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
        assert_eq!(
            check(&Control::batch(7, vec![moved(2, 1), moved(2, 0)])),
            Err(ControlError::MovedTwice { bin: BinName::new(2, 2) })
        );
        assert_eq!(
            check(&Control::batch(7, vec![moved(2, 1), Command::Map(vec![0; 4])])),
            Err(ControlError::MapNotAlone { others: 1 })
        );
    }

    #[test]
    fn splits_and_merges_that_make_no_sense() {
        let mut routing = Routing::new(2, 2).unwrap();
        let part = |prefix, length| number_of(Range::new(prefix, length).unwrap(), 2).unwrap();
        routing.apply(&Command::Split { bin: 3, bits: 2 }).unwrap();
        routing.apply(&Command::Split { bin: part(0b1101, 4), bits: 1 }).unwrap();
        routing.apply(&Command::Move { bin: part(0b1100, 4), worker: 0 }).unwrap();
        let check = |commands: &[Command]| {
            check_batch(&Control::batch(7, commands.to_vec()), &routing, |worker| worker < 2, 7)
                .map(|changes| changes.recuts.len())
        };
        let out = |bin| Err(ControlError::BinOutOfRange { bin: BinName::new(bin, 2), bins: 4 });
        let fine = |bin, bits| Err(ControlError::TooFine { bin: BinName::new(bin, 2), bits });
        for (command, expected) in [
            (moved(3, 0), Err(ControlError::Split { bin: BinName::new(3, 2) })),
            (moved(part(0b1101, 4), 0), Err(ControlError::Split { bin: BinName::new(part(0b1101, 4), 2) })),
            (moved(part(0b110, 3), 0), Err(ControlError::Split { bin: BinName::new(part(0b110, 3), 2) })),
            (moved(part(0b1000, 4), 0), out(part(0b1000, 4))),
            (moved(part(0b11110, 5), 0), out(part(0b11110, 5))),
            (moved(5, 0), out(5)),
            (Command::Split { bin: 3, bits: 1 }, Err(ControlError::Split { bin: BinName::new(3, 2) })),
            (Command::Split { bin: 9, bits: 1 }, out(9)),
            (Command::Split { bin: 1, bits: 0 }, fine(1, 0)),
            (Command::Split { bin: 1, bits: 19 }, fine(1, 19)),
            (Command::Split { bin: part(0b1100, 4), bits: 17 }, fine(part(0b1100, 4), 17)),
            (Command::Split { bin: part(0b1100, 4), bits: 250 }, fine(part(0b1100, 4), 250)),
            (Command::Merge { bin: 1 }, Err(ControlError::Whole { bin: BinName::new(1, 2) })),
            (
                Command::Merge { bin: part(0b1111, 4) },
                Err(ControlError::Whole { bin: BinName::new(part(0b1111, 4), 2) }),
            ),
            (Command::Merge { bin: part(0b11111, 5) }, out(part(0b11111, 5))),
            (Command::Merge { bin: 1 << 25 }, out(1 << 25)),
            (Command::Merge { bin: 3 }, Err(ControlError::Apart { bin: BinName::new(3, 2), one: 0, other: 1 })),
            (Command::Merge { bin: part(0b1101, 4) }, Ok(1)),
            (Command::Merge { bin: part(0b111, 3) }, Ok(1)),
            (Command::Split { bin: 1, bits: 18 }, Ok(1)),
        ] {
            assert_eq!(check(std::slice::from_ref(&command)), expected, "{command:?}");
        }
        let merge = Command::Merge { bin: part(0b111, 3) };
        let twice = Err(ControlError::MovedTwice { bin: BinName::new(part(0b1111, 4), 2) });
        assert_eq!(check(&[merge.clone(), moved(part(0b1111, 4), 0)]), twice);
        assert_eq!(check(&[moved(part(0b1111, 4), 0), merge.clone()]), twice);
        assert_eq!(
            check(&[merge.clone(), merge.clone()]),
            Err(ControlError::MovedTwice { bin: BinName::new(part(0b111, 3), 2) })
        );
        assert_eq!(check(&[merge.clone(), Command::Map(vec![0; 4])]), Err(ControlError::MapNotAlone { others: 1 }));
        assert_eq!(check(&[merge, Command::Split { bin: 2, bits: 1 }, moved(1, 0)]), Ok(2));
    }
}
