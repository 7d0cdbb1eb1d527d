//! Which fault is planted now, in this thread.

use std::cell::Cell;

thread_local! {
    static FAULT: Cell<&'static str> = const { Cell::new("") };
}

pub(crate) fn planted(name: &str) -> bool {
    FAULT.with(|fault| fault.get() == name)
}

/// Runs with a fault.
#[allow(dead_code, reason = "only the test of mutants plants any")]
pub(crate) fn with<R>(name: &'static str, run: impl FnOnce() -> R) -> R {
    FAULT.with(|fault| fault.set(name));
    let result = run();
    FAULT.with(|fault| fault.set(""));
    result
}
