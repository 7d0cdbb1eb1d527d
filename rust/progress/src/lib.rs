//! The pure half of progress tracking: which logical times may still appear where.
//!
//! | module | owns |
//! |---|---|
//! | [`order`] | partial and total orders |
//! | [`timestamp`] | timestamps, path summaries, flow time, nesting |
//! | [`change_batch`] | lazily compacted signed counts |
//! | [`antichain`] | frontiers, as sets and maintained from counts |
//! | [`reachability`] | the dataflow graph and what each live pointstamp can still reach |
//! | [`ledger`] | the counts of one scope, and which changes the others must be told |
//! | [`caster`] | the numbers of bundles, sent and taken in |
//! | [`capability`] | the right to send |
//! | [`meter`] | what capabilities and messages change, until it is collected |
//! | [`notificator`] | delivery of times that a frontier has passed |
//! | [`post_dated`] | records for later times |
//! | [`probe`] | read-only frontiers |
//!
//! Nothing here knows threads, clocks, channels or wires: every structure takes values and returns values, so the
//! whole crate tests in one thread.

pub mod antichain;
pub mod capability;
pub mod caster;
pub mod change_batch;
mod counts;
pub mod ledger;
pub mod meter;
pub mod nest;
pub mod notificator;
pub mod order;
mod outgoing;
pub mod post_dated;
pub mod probe;
pub mod reachability;
mod times;
pub mod timestamp;

pub use antichain::{Antichain, MutableAntichain};
pub use capability::{Capability, CapabilityError};
pub use caster::Caster;
pub use change_batch::{ChangeBatch, Drain};
pub use ledger::Ledger;
pub use meter::Meter;
pub use notificator::Notificator;
pub use order::{PartialOrder, TotalOrder};
pub use post_dated::PostDated;
pub use probe::ProbeHandle;
pub use reachability::{GraphBuilder, GraphError, Location, Port, Source, Target, Tracker, UnknownLocation};
pub use timestamp::{FlowSummary, FlowTime, PathSummary, Product, Refines, Timestamp};
