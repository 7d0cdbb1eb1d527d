//! The tests of this crate that need neither a build nor a process of their own, in one program: linking is most of what many cost.
//! `cargo test -p penstock-balance --test all NAME::` runs those of one module.

mod dividing;
mod planning;
mod traces;
