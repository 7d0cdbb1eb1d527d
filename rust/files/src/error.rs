//! What can be wrong with a file.

use crate::VERSION;

/// Bytes that no release has written so.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Damage {
    /// They do not begin as ours do.
    #[error("is no data file of penstock")]
    Foreign,
    /// A newer release wrote them.
    #[error("has version {found}; this release reads up to {VERSION}: use the release that wrote it, or a later one")]
    Newer {
        /// Their version.
        found: u16,
    },
    /// There are fewer or more than there should be.
    #[error("has {found} bytes of {what} where {expected} are announced")]
    Length {
        /// Of what.
        what: &'static str,
        /// Bytes that are there.
        found: u64,
        /// Bytes that should be.
        expected: u64,
    },
    /// They have changed.
    #[error("has checksum {found:08x} of {what} where it says {expected:08x}")]
    Checksum {
        /// Of what.
        what: &'static str,
        /// Of the bytes that are there.
        found: u32,
        /// As announced.
        expected: u32,
    },
    /// They contradict themselves.
    #[error("contradicts itself: {what}")]
    Content {
        /// Where.
        what: &'static str,
    },
    /// Other files have another kind of state under the same name.
    #[error("has state of {operator:?} in another shape than files before it")]
    Shape {
        /// The operator.
        operator: String,
    },
}

/// Why a file could not be read.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// Storage failed.
    #[error("file {name} cannot be read: {source}")]
    Read {
        /// Its name.
        name: String,
        /// What storage says.
        source: std::io::Error,
    },
    /// Its bytes are wrong.
    #[error("file {name} {damage}")]
    Damage {
        /// Its name.
        name: String,
        /// What is wrong.
        damage: Damage,
    },
}
