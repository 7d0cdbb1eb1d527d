//! Megaphone bins: keyed state that moves while the dataflow runs.
//!
//! Keys are grouped into bins by the top bits of their hash. A stateful operator is a pair: F routes records by the configuration of
//! their time and starts migrations, S hosts the bins and applies records in time order. A migration is a control
//! command with a time; logical time alone coordinates it, so records flow while bins move, and every update happens on the
//! worker that the configuration of its time names.
//!
//! | module | owns |
//! |---|---|
//! | `bin` | hash → bin, what a bin's state must do ([`BinState`]) |
//! | `parts`, `recut` | bins that are split: numbers and look-up; splitting and merging states |
//! | `routing`, `control` | who owns which bin; commands and what makes a batch acceptable |
//! | `configuration` | the configuration function over time, F's protocol state |
//! | `route`, `state` | the operators F and S |
//! | `shipment`, `arrival`, `message` | bins on their way out, in; what travels from F to S |
//! | `pending` | post-dated records, by bin |
//! | `table`, `shelf` | bins of a worker; bins at rest in a process, undo of a failed epoch |
//! | `stateful`, `binary`, `state_machine` | building the operator: of one input, of two, of one fold per key |
//! | `control_input`, `plan` | control input; migrations as steps: [`Strategy`], [`Migration`] |
//! | `block`, `keyed` | blocks that can be routed; rows of (key, value), a hash map as a bin |
//! | `stats` | counters and the log of migrations |
//!
//! # Life of an epoch
//!
//! A host that can lose a process works in epochs. At the end of one, all inputs go to the first instant of the next, which lets
//! S's output leave the old one. When it has, and the host has committed the epoch, each worker calls
//! [`BinTable::mark_all`], and only then moves its data input beyond that instant; so every record and every
//! migration of the new epoch waits for every worker's mark, provided that no control is scheduled for the first
//! instant itself (else [`BinsError::EpochDiffers`]). [`Shelf::close_epoch`] frees what only the old epoch needed. Should
//! an epoch fail, all workers end, their tables deposit their bins on the shelf, and [`Shelf::rebuild`] makes the tables
//! of the new generation as they were when the epoch began.
//! A bin that moves between two epochs ([`Config::begins`]) leaves an original that serves until the move is complete, so that
//! the end of a generation loses no bin in flight; and longer while the epoch before may be undone ([`Shelf::settle_epoch`]).
//! Post-dated records are not undone: a flow that is to be rolled back keeps its timers in its bins.
//!
//! Where epochs are recorded ([`Config::record`]), each worker takes what its bins changed ([`Extent::Changed`]) when S's output has left the epoch,
//! before any move of the next: so the first instant of an epoch is left neither by control nor by a worker's input before that worker has. A
//! bin that moves within an epoch takes along which keys the epoch touched. So each change is told once: by the worker that has the bin at the
//! end of the epoch. The original of a bin that left in it tells none, nor does the copy of one that leaves between two epochs.
//!
//! Source: Megaphone (Hoffmann et al.), §3 and §4. Departures are in the modules.

mod arrival;
mod bin;
mod binary;
mod block;
mod configuration;
mod control;
mod control_input;
mod error;
mod keyed;
mod message;
mod parts;
mod pending;
mod plan;
mod recut;
mod route;
mod routing;
mod shelf;
mod shipment;
mod state;
mod state_machine;
mod stateful;
mod stats;
mod table;

pub use bin::{BinState, Encoding, Extent, MAX_BITS, bin};
pub use binary::{Both, Side, distribute, stateful_binary};
pub use block::Block;
#[doc(hidden)]
pub use configuration::fuzz_lesson;
pub use configuration::{Configuration, Configurations, Outcome};
pub use control::{Changes, Command, Control, Move, Recut, check_batch};
pub use control_input::ControlInput;
pub use error::{BinsError, BoxError, ControlError, ScheduleError, StateError};
pub use keyed::{Keyed, KeyedMap};
pub use message::Record;
#[doc(hidden)]
pub use message::fuzz_parts;
pub use parts::{BinName, number_of, range_of};
pub use pending::Pending;
pub use penstock_balance::Strategy;
pub use penstock_files::Range;
pub use plan::{Migration, MigrationProgress, PlanStep, commands, steps};
pub use recut::dealt_to;
pub use routing::Routing;
pub use shelf::{Rebuilt, Shelf};
pub use state::{Later, Moment, Outbox};
pub use state_machine::{StateMachine, state_machine};
pub use stateful::{Config, Divide, EpochOf, SHIP_BYTES, Stateful, stateful, stateful_divided};
pub use stats::{BinEvent, Costs, Counters, LOG_ENTRIES, LogEntry, Meter, SAMPLE, Stats};
pub use table::BinTable;
