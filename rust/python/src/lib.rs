//! The extension module `penstock._native`: what Python sees of the Rust workspace.
//!
//! One file per wrapped thing. Rules that hold for all of them: native classes are frozen handles that refuse
//! pickling; long calls go through [`enter`]; every error is mapped in [`errors`]; data crosses as Arrow capsules
//! ([`arrow`]) once per block, never per row; importing the module starts no thread and opens nothing. A panic
//! reaches Python as `PanicException`, outside `Exception`, and poisons the handle it happened in.

mod arrow;
mod enter;
mod errors;
mod fork;
mod nexmark;
mod tokenize;

/// Native half of penstock. Import `penstock`, not this module.
#[pyo3::pymodule]
mod _native {
    #[pymodule_export]
    use crate::arrow::{RecordBatch, Schema};
    #[pymodule_export]
    use crate::nexmark::Nexmark;
    #[pymodule_export]
    use crate::tokenize::tokenize;
    use pyo3::prelude::*;

    /// Version of penstock, as in the package metadata.
    #[pyfunction]
    fn version() -> &'static str {
        env!("CARGO_PKG_VERSION")
    }
}
