//! The extension module `penstock._native`: what Python sees of the Rust workspace.
//!
//! One file per wrapped thing. Rules that hold for all of them: native classes are frozen handles that refuse
//! pickling; long calls go through [`enter`]; every error is mapped in [`errors`]; data crosses as Arrow capsules
//! ([`arrow`]) once per block, never per row; importing the module starts no thread and opens nothing. A panic
//! reaches Python as `PanicException`, outside `Exception`, and poisons the handle it happened in.

mod arrow;
mod aside;
mod balance;
mod calls;
mod checkpoint;
mod convert;
mod crew;
mod dataflow;
mod ending;
mod engine;
mod enter;
mod errors;
mod feed;
mod fork;
mod graph;
mod handover;
mod inline;
mod local;
mod member;
mod nexmark;
mod ordered;
mod plan;
mod registry;
mod store;
mod tokenize;
mod trial;

/// Native half of penstock. Import `penstock`, not this module.
#[pyo3::pymodule]
mod _native {
    #[pymodule_export]
    use crate::arrow::{RecordBatch, Schema};
    #[pymodule_export]
    use crate::balance::{Balancer, Sizer, balanced_owners, evened_owners};
    #[pymodule_export]
    use crate::checkpoint::{CheckpointFiles, checkpoint_columns, checkpoint_manifests};
    #[pymodule_export]
    use crate::crew::FlowCrew;
    #[pymodule_export]
    use crate::dataflow::{
        DataflowBarrier, DataflowCapability, DataflowGate, DataflowInput, DataflowListener, DataflowLoop,
        DataflowPorts, DataflowProbe, DataflowScope, DataflowSeats, DataflowSequencer, DataflowStream, DataflowWorker,
        dataflow_alone, dataflow_join, hash_keys,
    };
    #[pymodule_export]
    use crate::ending::{is_ending, pause_at_end};
    #[pymodule_export]
    use crate::engine::{EngineProtocol, checkpoint_contents, checkpoint_file, checkpoint_reads, registry_answers};
    #[pymodule_export]
    use crate::feed::{Drain, Feed};
    #[pymodule_export]
    use crate::graph::{
        GraphBuilder, GraphChanges, GraphDeltas, GraphFileBuilder, GraphIndex, GraphSearch, GraphText, graph_clique,
        graph_pattern,
    };
    #[pymodule_export]
    use crate::handover::Handover;
    #[pymodule_export]
    use crate::inline::InlineRun;
    #[pymodule_export]
    use crate::local::LocalRun;
    #[pymodule_export]
    use crate::member::Member;
    #[pymodule_export]
    use crate::nexmark::Nexmark;
    #[pymodule_export]
    use crate::ordered::OrderedRun;
    #[pymodule_export]
    use crate::plan::{exchange_hashes, hash_columns, max_event_time, migration_steps, plan_check, plan_narrowed};
    #[pymodule_export]
    use crate::registry::{Registry, claim_of, key_of};
    #[pymodule_export]
    use crate::tokenize::tokenize;
    #[pymodule_export]
    use crate::trial::{Allowance, Trial};
    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        crate::ending::register(module)
    }

    /// Version of penstock, as in the package metadata.
    #[pyfunction]
    fn version() -> &'static str {
        env!("CARGO_PKG_VERSION")
    }

    /// How the module was built, by Cargo.toml's profiles: ``"release"``; ``"setup"``, a quick build; ``"dev"``, slow.
    #[pyfunction]
    fn profile() -> &'static str {
        env!("PENSTOCK_PROFILE")
    }
}
