//! Groups of bins: between fluid and all at once (M-14).

use super::{PlanStep, plain};
use crate::control::Move;

pub(super) fn steps(moves: &[Move], size: usize) -> Vec<PlanStep> {
    moves.chunks(size).map(plain).collect()
}
