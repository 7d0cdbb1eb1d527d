//! The extension module `penstock._native` as a file. No code: what is linked here must have all its dependencies compiled
//! before it begins, so the bindings are a library of their own (`penstock-python`), which is compiled beside them.

use penstock_python as _;
