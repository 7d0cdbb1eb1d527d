//! The tests of this crate that need neither a build nor a process of their own, in one program: linking is most of what many cost.
//! `cargo test -p penstock-members --test all NAME::` runs those of one module.

use penstock_members as machine;

#[path = "../../../progress/tests/common/mod.rs"]
mod common;
#[path = "../support/faults.rs"]
mod faults;
#[path = "../support/runs.rs"]
mod runs;
#[path = "../support/world.rs"]
mod world;

mod clock;
mod lists;
mod model;
mod simulation;
