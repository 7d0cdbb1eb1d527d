//! Membership, authenticated registry, feeds, drains and meshes of resident workers.
//!
//! The driver owns a [`Registry`]; each resident process runs a [`Member`] that joins it. The driver
//! sends [`message::Message`]s, which carry the requests of the engine's protocol, and gets answers as events. Rows reach a member through a [`Feed`],
//! are staged by partition and attempt, count once their epoch is released, and leave through a
//! [`drain()`] until the epoch is closed. Members of one generation of a query connect to each other
//! themselves. Every connection is authenticated first: see [`session`].
//!
//! Blocking sockets and threads only; whoever closes a registry or member gets all threads back.

mod columns;
mod drain;
mod durable;
mod error;
mod feed;
mod group;
pub mod host;
mod member;
pub mod message;
mod registry;
pub mod session;
mod spill;

#[doc(hidden)]
pub use columns::fuzz_columns;
pub use drain::{Drain, drain, drain_with};
pub use durable::{Segment, Source, Store, Use, unreadable};
pub use error::{ClusterError, Failure};
pub use feed::{Feed, Receipt};
pub use group::{GroupHost, Loader};
pub use host::Host;
pub use member::{End, Member};
pub use registry::{MemberInfo, Registry, RegistryEvent};
#[doc(hidden)]
pub use spill::fuzz_piece;
pub use spill::{SpillError, SpillFigures};
