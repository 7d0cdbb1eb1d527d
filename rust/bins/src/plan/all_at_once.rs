//! One step for everything: the shortest migration and the longest pause (M-14).

use super::{PlanStep, plain};
use crate::control::Move;

pub(super) fn steps(moves: &[Move]) -> Vec<PlanStep> {
    if moves.is_empty() { Vec::new() } else { vec![plain(moves)] }
}
