//! The tests of this crate that need neither a build nor a process of their own, in one program: linking is most of what many cost.
//! `cargo test -p penstock-dataflow --test all NAME::` runs those of one module.

use penstock_dataflow as machine;

#[path = "../support/frame.rs"]
mod frames;
#[path = "../support/rescaling.rs"]
mod runs;
#[path = "../support/mod.rs"]
mod support;

mod ends;
mod failures;
mod flows;
mod graphs;
mod hostile;
mod joining;
mod joining_links;
mod links;
mod markers;
mod nested_probe;
mod progress;
mod rescaling;
mod simulation;
mod turns;
mod user_code;
