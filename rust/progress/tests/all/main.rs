//! The tests of this crate that need neither a build nor a process of their own, in one program: linking is most of what many cost.
//! `cargo test -p penstock-progress --test all NAME::` runs those of one module.

#[path = "../common/mod.rs"]
mod common;

mod cost;
mod laws;
mod naive;
mod simulation;
