//! The tests of this crate that need neither a build nor a process of their own, in one program: linking is most of what many cost.
//! `cargo test -p penstock-engine --test all NAME::` runs those of one module.

use penstock_engine as machine;
use penstock_pace as pace;

#[path = "../support/runs.rs"]
mod runs;
#[path = "../support/sim/mod.rs"]
mod sim;

mod layouts;
mod protocol;
mod simulation;
