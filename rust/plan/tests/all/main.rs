//! The tests of this crate that need neither a build nor a process of their own, in one program: linking is most of what many cost.
//! `cargo test -p penstock-plan --test all NAME::` runs those of one module.

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/group.rs"]
mod group;

mod aggregates;
mod chain;
mod changes;
mod crew;
mod format;
mod graph;
mod host;
mod joins;
mod kept;
mod keys;
mod overlap;
mod plans;
mod property;
mod reads;
mod recut;
mod top;
mod windows;
