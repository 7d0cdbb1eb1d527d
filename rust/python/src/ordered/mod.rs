//! Ordered pipelines over Python objects: [`OrderedRun`].
//!
//! The pipeline's worker threads are native; they hold the interpreter only while they call an operator. An envelope is
//! a chunk of `penstock.ordered`, or a part of one: what it holds is the business of the Python side, here it is an
//! object with a `weight` (values in it).

mod payload;
mod resident;
mod run;

pub(crate) use run::OrderedRun;
