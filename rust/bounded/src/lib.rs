//! Flow control of parts of a dataflow by progress alone: Faucet.
//!
//! A bounded scope holds at most N batches of B items per worker in its body; what is more waits at its ingress, as inputs that are
//! not expanded yet. It is a composition of what every program has: a nested scope, an operator that holds back, a probe.
//! So bodies may exchange, loop and contain bounded scopes themselves, and an edge that is full blocks nobody: there is no
//! such edge.
//!
//! | module | owns |
//! |---|---|
//! | [`faucet`] | the wrapper: enter, batcher, body, probe, leave |
//! | [`batcher`] | the operator at the ingress, its events |
//! | `window` | which batches are admitted and unfinished; why it always goes on |
//! | [`expand`] | from inputs to items, lazily |
//! | [`bounds`] | N and B: fixed or adaptive, checked |
//! | [`controller`], [`memory`] | finding N and B while running |
//! | `regulator` | one controller for the workers of a process |
//! | [`batch`] | the coordinate of times that numbers batches |
//! | [`monitor`], [`error`] | figures, failures |
//!
//! ```
//! use penstock_bounded::{BoundedStream, Bounds};
//! use penstock_dataflow::{BoxError, execute, fabric};
//!
//! let threads = execute(fabric::threads(2), |worker| {
//!     let bounds = Bounds::fixed(4, 1_000)?;
//!     let (mut input, monitor) = worker.dataflow::<u64, _>("surge", |scope| {
//!         let (input, numbers) = scope.new_input::<Vec<u64>>();
//!         // Two inputs become two million items, of which eight thousand at most exist at a time.
//!         let (_, monitor) = numbers.bounded_flat_map(bounds, |many| 0..many, |_, items| items.exchange_by(|item| *item));
//!         (input, monitor)
//!     });
//!     input.send(vec![1_000_000]);
//!     input.close();
//!     while worker.step_or_park(None)? {}
//!     Ok::<_, BoxError>(monitor.stats())
//! });
//! for thread in threads {
//!     let stats = thread.join().unwrap()?;
//!     assert_eq!((stats.admitted_items, stats.unfinished), (1_000_000, 0));
//!     assert!(stats.maximum <= 4 && stats.maximum_items <= 4_000);
//! }
//! # Ok::<(), penstock_dataflow::Error>(())
//! ```
//!
//! **What is bounded.** Items admitted and unfinished: at most `N * B` per worker, over all outer times together unless an earlier
//! outer time gets input after a later one was begun. Memory is what a body makes of them. Input of an outer time that is still
//! open, beyond N batches, waits as it came; feed in epochs that close. What has left the scope is not bounded by it.
//!
//! **What never finishes.** A body that holds a batch for ever, for example by waiting for the end of the outer time before it answers,
//! holds the window shut: [`Stats::holding`] says which batch. Such an operator belongs behind the scope.
//!
//! # Beyond flow control
//!
//! A bounded scope is an operator that holds back, a coordinate that names what it let through, and a probe that says when
//! that is over. None of it is known to the engine, so other patterns fit the same three places (F-15):
//!
//! - *Other orders.* What is served next is one line of the batcher: the least outer time. By priority, by deadline or round robin
//!   over keys would stand there as well; what must stay is that nothing holds the least time that can still finish
//!   (the argument is in `window`). A stage that is limited by slots of something else, connections or devices, takes N = slots.
//! - *Buffers.* A batch that has finished is free of buffers on every worker, so N sets of them suffice, and [`Event::Finished`]
//!   is where they would be handed back. Not done: what a scope holds beside stacks and code is small already.
//! - *Punctuations.* All that is needed of an engine is to say that everything of a batch has left. Where there is no progress tracking,
//!   one marker per batch over all channels says it too (aligned barriers, ends of transactions), at the price of that round per
//!   batch; so does an epoch that all members have reported, which is how staged batches of Spark are released to resident workers.
//!
//! Source: Lattuada, McSherry, Chothia: Faucet (BeyondMR 2016), F-01 to F-10, §6 and §7. Beyond it: N and B that adapt.

pub mod batch;
pub mod batcher;
pub mod bounds;
pub mod controller;
pub mod error;
pub mod expand;
pub mod faucet;
pub mod memory;
pub mod monitor;
mod regulator;
mod window;

pub use batch::{Batch, BatchTime, Batched};
pub use batcher::{Event, Observer};
pub use bounds::{Bounds, BoundsError, Clock};
pub use controller::{Controller, Limits, Phase, Progress};
pub use error::{Failure, OnFailure};
pub use expand::{Broken, Expand, Fault, Itself};
pub use faucet::{BoundedStream, Egress, Faucet, Gate};
pub use memory::Memory;
pub use monitor::{Monitor, Stats};
