//! One bin a step: the shortest pauses and the longest migration (M-14).

use super::{PlanStep, batched};
use crate::control::Move;

pub(super) fn steps(moves: &[Move]) -> Vec<PlanStep> {
    batched::steps(moves, 1)
}
