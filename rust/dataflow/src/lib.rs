//! Timely dataflow workers: scopes, operators, channels, transports.
//!
//! A program is run by several workers. Each builds the same graph, feeds its part of the input, and steps; blocks of data carry
//! logical times, and every worker knows which times may still come where. One message is one block and one progress update.
//!
//! | module | owns |
//! |---|---|
//! | [`fabric`] | mailboxes of workers; threads, processes, frames |
//! | [`worker`] | the step loop, parking, errors |
//! | [`scope`], [`stream`] | graph building, nested scopes, loops, common operators |
//! | [`operator`] | building operators: inputs, outputs, capabilities, frontiers |
//! | [`channel`] | how an edge spreads blocks over workers |
//! | [`input`] | feeding a dataflow |
//! | [`lesson`] | what operators of joiners learn of their peers |
//! | [`wire`], [`error`] | encoding of blocks, errors |
//!
//! **Feeding.** Sending never blocks. Between processes data is bounded by asking the sources to wait: a program that feeds much
//! calls [`Worker::wait_for_room`] before a block, or looks at [`Worker::is_congested`] and goes on with something else.
//! Operators never wait for room: a loop of them would deadlock. Within a process, and across an epoch, a probe bounds what is under
//! way.
//!
//! **Failing.** An error or a panic in any code of the user stops all workers, with the operator and the worker where it began; so does
//! a lost process, and one that is connected but says nothing or reads nothing ([`fabric::Limits`]). Everything that operators
//! held is dropped then. Handles that outlive their dataflow refuse ([`InputHandle::try_send`], [`Output::try_session`]).
//!
//! Counting words on two workers:
//!
//! ```
//! use std::collections::BTreeMap;
//! use penstock_dataflow::{execute, fabric, Error};
//!
//! let text = ["the quick brown fox", "jumps over the lazy dog", "the end"];
//! let threads = execute(fabric::threads(2), move |worker| {
//!     let counts = std::rc::Rc::new(std::cell::RefCell::new(BTreeMap::new()));
//!     let seen = counts.clone();
//!     let (mut lines, probe) = worker.dataflow::<u64, _>("words", |scope| {
//!         let (handle, lines) = scope.new_input::<Vec<String>>();
//!         let (probe, _) = lines
//!             .map_blocks(|lines| lines.iter().flat_map(|line| line.split(' ')).map(String::from).collect::<Vec<_>>())
//!             .exchange_by(|word| word.len() as u64)
//!             .inspect(move |_, words| words.iter().for_each(|word| *seen.borrow_mut().entry(word.clone()).or_insert(0) += 1))
//!             .probe();
//!         (handle, probe)
//!     });
//!     if worker.index() == 0 {
//!         lines.send(text.map(String::from).to_vec());
//!     }
//!     lines.advance_to(1)?;
//!     worker.step_until(None, || !probe.less_than(&1))?;
//!     let counts = counts.take();
//!     Ok::<_, penstock_dataflow::BoxError>(counts)
//! });
//! let mut total = BTreeMap::new();
//! for thread in threads {
//!     total.extend(thread.join().unwrap()?);
//! }
//! assert_eq!(total["the"], 3);
//! assert_eq!(total.values().sum::<i32>(), 11);
//! # Ok::<(), Error>(())
//! ```

pub mod activate;
pub mod channel;
mod core;
mod dataflow;
pub mod error;
pub mod fabric;
pub mod input;
pub mod lesson;
mod membership;
mod nested;
pub mod operator;
mod patience;
mod region;
pub mod scope;
pub mod stream;
pub mod wire;
pub mod worker;

pub use activate::Activator;
pub use channel::{Exchange, Pact, Pipeline};
pub use error::{BoxError, Ended, Error, InputError, LoopEnd, MemberFault, SessionError};
pub use fabric::{Door, Endpoint, FabricGuard, FabricTag, JoinError, Limits, Ticket, Waker};
pub use input::InputHandle;
pub use lesson::Lesson;
pub use operator::{CapabilityRef, Frontiers, Grant, Input, OperatorBuilder, Output, Session};
pub use scope::Scope;
pub use stream::{FeedbackHandle, Stream};
pub use wire::{Wire, WireError};
pub use worker::{Building, Joinable, Worker, execute, execute_joinable};
