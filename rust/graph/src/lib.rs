//! Worst-case-optimal joins over sorted adjacency: cliques and any conjunctive pattern of binary relations.
//!
//! | module | owns |
//! |---|---|
//! | [`pattern`] | a pattern as text or as objects, and what is wrong with it |
//! | [`domain`] | the identifiers of users as dense numbers, and back |
//! | [`csr`] | one direction of a relation: sorted adjacency |
//! | [`index`] | relations that share a domain; built in memory, or mapped from a file ([`file`]) |
//! | [`large`] | an index file of more edges than memory holds, by way of scratch files |
//! | [`mod@write`] | index files, section by section |
//! | [`order`] | in which order attributes are bound, by statistics |
//! | [`query`] | a pattern made ready for one index: who votes at which level |
//! | [`intersect`] | merge and galloping over sorted lists |
//! | [`rows`] | matches by column |
//! | [`search`] | GenericJoin, depth first, suspended whenever its caller has enough rows |
//! | `near` | cliques below one root, in its neighbourhood as bits |
//! | [`units`] | prefixes cut into pieces of work; heavy vertices are cut, too |
//! | [`crew`] | threads that share the units: a count, or rows in order or as they come |
//! | [`cliques`] | cliques of edges as they stand, or of an undirected graph by orientation |
//! | [`delta`] | changes of edges to changes of matches |
//! | [`text`] | edge lists as text |
//!
//! Memory holds the index and one list per level and thread, whatever the number of matches: enumeration is depth first
//! and stops in the middle of a prefix when a batch is full. No module knows of dataflow, Arrow or Python.
//!
//! ```
//! use std::sync::Arc;
//! use penstock_graph::{Builder, Pattern, Query, crew};
//!
//! let mut edges = Builder::numbers();
//! edges.numbers_in("e", &[1, 1, 2, 3], &[2, 3, 3, 1])?;
//! let index = Arc::new(edges.finish()?);
//! let triangles = Pattern::parse("tri(a, b, c) :- e(a, b), e(a, c), e(b, c)")?;
//! let query = Query::new(index, &triangles, None)?;
//! assert_eq!(crew::count(&query, &crew::Crew::default())?.count, 1);
//! # Ok::<(), penstock_graph::GraphError>(())
//! ```
//!
//! Source: GenericJoin as the Faucet paper uses it (§2), after Ngo, Ré and Rudra; the attribute order is ours.

pub mod cliques;
pub mod crew;
pub mod csr;
pub mod delta;
pub mod domain;
pub mod error;
pub mod file;
pub mod index;
pub mod intersect;
pub mod large;
mod map;
mod near;
pub mod order;
pub mod pattern;
pub mod query;
pub mod rows;
mod scratch;
pub mod search;
mod sorter;
pub mod text;
pub mod units;
pub mod write;

pub use error::GraphError;
pub use index::{Builder, Index, Loops, Repeats};
pub use large::LargeBuilder;
pub use pattern::{Atom, Pattern, PatternError};
pub use query::Query;
pub use rows::Rows;
pub use search::Search;
pub use units::Unit;
