//! Owns no code, only the features in its manifest.
