//! The tests of this crate that need neither a build nor a process of their own, in one program: linking is most of what many cost.
//! `cargo test -p penstock-coord --test all NAME::` runs those of one module.

#[path = "../../../dataflow/tests/support/linked.rs"]
mod linked;
#[path = "../../../dataflow/tests/support/mod.rs"]
mod support;

mod barrier;
mod dynamic;
mod joining;
mod sequencer;
mod spread;
