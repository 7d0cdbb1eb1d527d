//! The tests of this crate that need neither a build nor a process of their own, in one program: linking is most of what many cost.
//! `cargo test -p penstock-bins --test all NAME::` runs those of one module.

#[path = "../common/mod.rs"]
mod common;
#[path = "../../../dataflow/tests/support/linked.rs"]
mod linked;

mod binary;
mod joining;
mod migration;
mod naive;
mod protocol;
mod recut;
mod rollback;
mod shipping;
