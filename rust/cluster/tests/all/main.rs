//! The tests of this crate that need neither a build nor a process of their own, in one program: linking is most of what many cost.
//! `cargo test -p penstock-cluster --test all NAME::` runs those of one module.

#[path = "../common/mod.rs"]
mod common;

mod cluster;
mod durable;
mod engine;
mod frames;
mod tls;
