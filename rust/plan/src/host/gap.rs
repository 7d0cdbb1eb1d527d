//! How the steps of a migration follow one another, on two workers turn by turn (see `penstock_pace`).

use std::time::Duration;

use penstock_pace::{Cadence, MARK, Moves, Order};

use super::seal::Pair;
use super::worker::Command;

const DRAINS: Cadence = Cadence { max_pause: None, drains: true };

/// Turns of both workers after which something hangs.
const PATIENCE: usize = 100_000;

impl Pair {
    /// Rows of twenty slices of each worker.
    fn fill(&mut self, epoch: u64) {
        let keys: Vec<i64> = (0..40).collect();
        self.release(epoch, [&keys, &keys]);
    }

    /// Asks for a step for each bin, when the first rows are under way.
    fn ask(&mut self, cadence: Cadence) {
        while self.loops[0].under_way() == 0 {
            self.both();
        }
        let plan = Moves::Steps((0..4).map(|bin| vec![(bin, (bin + 1) % 2)]).collect());
        self.loops[0].command(Command::Migrate(Order { handle: 7, plan, cadence, at_epoch: None }));
    }

    fn both(&mut self) {
        self.turn(0);
        self.turn(1);
    }

    /// Epochs that both workers have done.
    fn done(&self) -> u64 {
        self.records.values().filter(|records| records.len() == 2).count() as u64
    }

    /// Turns until the migration has ended; in which epoch each step took effect, and whether between it and the one before.
    fn steps(&mut self, mut between: impl FnMut(&mut Self)) -> Vec<(u64, bool)> {
        let mut turns = 0;
        while self.migrated == 0 {
            turns += 1;
            assert!(turns < PATIENCE, "the migration does not end");
            for worker in [0, 1] {
                self.turn(worker);
                between(self);
            }
        }
        self.steps.iter().map(|step| (step.epoch, step.slice < MARK)).collect()
    }
}

#[test]
fn a_step_waits_for_what_waited_when_the_one_before_was_complete() {
    for (cadence, expected) in [
        (Cadence::default(), [(0, false); 4]),
        // Three epochs have been handed in. Behind them nothing waits.
        (DRAINS, [(0, false), (3, true), (3, true), (3, true)]),
    ] {
        let mut pair = Pair::new(2);
        (0..3).for_each(|epoch| pair.fill(epoch));
        pair.ask(cadence);
        assert_eq!(pair.steps(|_| {}), expected, "{cadence:?}");
    }
}

/// Also without a gap: two steps are further apart than slices can be under way.
#[test]
fn what_has_been_sent_is_done_before_the_next_step() {
    let mut pair = Pair::new(2);
    pair.fill(0);
    pair.ask(Cadence::default());
    pair.steps(|_| {});
    let slices: Vec<u32> = pair.steps.iter().map(|step| step.slice).collect();
    // Of two slices, and while bins move of one.
    assert!(slices[1] > slices[0] + 2 && slices[1..].windows(2).all(|pair| pair[1] > pair[0] + 1), "{slices:?}");
}

/// Two epochs are handed in for each that is done, so something always waits, and ever more.
#[test]
fn rows_that_come_faster_than_they_are_worked_off_hold_no_step_up() {
    let mut pair = Pair::new(2);
    (0..3).for_each(|epoch| pair.fill(epoch));
    pair.ask(DRAINS);
    let mut given = 3;
    let steps = pair.steps(|pair| {
        while given < 3 + 2 * pair.done() {
            pair.fill(given);
            given += 1;
        }
    });
    // A step that took effect when `n` epochs were done waited for the last of the 3 + 2 n that had been handed in.
    assert_eq!(steps, [(0, false), (3, true), (9, true), (21, true)]);
}

#[test]
fn a_migration_that_is_cancelled_in_a_gap_ends_there() {
    let mut pair = Pair::new(2);
    (0..3).for_each(|epoch| pair.fill(epoch));
    pair.ask(DRAINS);
    while pair.done() == 0 {
        pair.both();
    }
    assert_eq!(pair.migrated, 0);
    pair.loops[0].command(Command::Cancel(7));
    assert_eq!(pair.steps(|_| {}), [(0, false)]);
    assert_eq!(pair.done(), 1, "it did not wait for the rest");
}

/// The pauses are real: they are short beside an hour.
#[test]
fn steps_are_taken_together_while_they_cost_little() {
    let mut pair = Pair::new(2);
    pair.fill(0);
    pair.ask(Some(Duration::from_secs(3600)).into());
    pair.steps(|_| {});
    assert_eq!(pair.steps.iter().map(|step| step.planned).collect::<Vec<_>>(), [1, 2, 1]);
}
