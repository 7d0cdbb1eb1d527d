//! The dataflow layer for Python: workers, scopes, streams, capabilities.
//!
//! | module | owns |
//! |---|---|
//! | [`home`] | where a thread's things live, and handles to them |
//! | [`time`] | ints and tuples as times, of any depth |
//! | [`block`] | lists and record batches, within a process and between |
//! | [`worker`], [`roll`] | seats, steps, parking; that all workers build the same |
//! | [`stream`], [`exchange`], [`operator`] | building: streams and scopes, exchanges, logic in Python |
//! | [`bounded`] | bounded scopes |
//! | [`input`], [`probe`] | feeding and watching |
//! | [`coordination`] | barriers and sequencers |
//! | [`mesh`] | connecting the processes of a run |
//! | [`hash`], [`failure`] | stable hashes of keys, errors |

mod block;
mod bounded;
mod coordination;
mod exchange;
mod failure;
mod hash;
mod home;
mod input;
mod mesh;
mod operator;
mod probe;
mod roll;
mod stream;
mod time;
mod worker;

pub(crate) use bounded::DataflowGate;
pub(crate) use coordination::{DataflowBarrier, DataflowSequencer};
pub(crate) use hash::hash_keys;
pub(crate) use input::DataflowInput;
pub(crate) use mesh::{DataflowListener, dataflow_alone, dataflow_join};
pub(crate) use operator::{DataflowCapability, DataflowPorts};
pub(crate) use probe::DataflowProbe;
pub(crate) use stream::{DataflowLoop, DataflowScope, DataflowStream};
pub(crate) use worker::{DataflowSeats, DataflowWorker};
