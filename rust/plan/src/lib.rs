//! Flow plans: keyed aggregates, windows and Python steps compiled to dataflow operators.
//!
//! The pure half: [`spec`] is the plan as JSON, [`plan`] compiles it to stages, [`keyed`] is one keyed stage: routing by [`hash`], the
//! [`state`] of its bins, and the [`op`]erator on them.

mod acc;
mod agg;
mod beside;
mod bytes;
mod column;
mod common;
mod content;
mod ddl;
mod dot;
mod explain;
mod foreign;
mod gather;
mod group;
mod ipc;
mod join;
mod kept;
mod key;
mod own;
mod panes;
mod partition;
mod record;
mod room;
mod row_format;
mod running;
mod session;
mod slots;
mod sorted;
mod table;
mod top;
mod window;
mod wire;
mod zone;

pub mod block;
pub mod callback;
pub mod chain;
mod error;
pub mod hash;
pub mod host;
pub mod keyed;
pub mod op;
pub mod plan;
mod pool;
mod reads;
pub mod spec;
pub mod state;

pub use agg::{Aggregate, Function};
pub use beside::Beside;
pub use block::FlowBlock;
pub use callback::{
    CallError, Callbacks, EpochEnd, Expansion, ForeignState, Grouped, SideRows, Spoiled, States, Unreadable,
};
pub use chain::{Bound, BoundedPart, FlatMapCall, Loop, Stateless};
pub use column::EventTime;
pub use content::Content;
pub use ddl::ddl;
pub use error::{OpError, PlanError, StateFault, StepName};
pub use foreign::MapCall;
pub use hash::{NULL_HASH, hash_bytes, hash_columns, hash_int};
pub use ipc::{BATCH_ROWS, limited, read_batch};
pub use join::{Join, Joined};
pub use kept::{Kept, KeptError};
pub use keyed::{KeyedKind, KeyedSpec};
pub use op::{BLOCK_ROWS, Bins, KeyedOp, Output, Sink, conform};
pub use own::owned;
pub use penstock_bins::{Encoding, Extent};
pub use plan::{Inlet, LateOutput, MOST_SOURCES, Origin, Plan, SideOutput, Source, Stage, WINDOW_END, WINDOW_START};
pub use running::Emit;
pub use spec::{JoinHow, NodeSpec, PlanSpec, SideSpec, StepSpec};
pub use state::State;
pub use top::Top;
pub use window::{Best, Cut, Windows};
