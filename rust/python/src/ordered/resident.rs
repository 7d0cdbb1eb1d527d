//! A worker thread stays known to the interpreter from its first call until it ends.
//!
//! A native thread is a stranger to Python each time that it attaches: it gets a new thread state, which is thrown away
//! when it detaches, and with it every `threading.local` of the user's functions (their sessions, connections, caches).
//! [`stay`] holds one more reference to that state, which the end of the thread gives back.
//!
//! Owns: the only unsafe code of the ordered runtime's bindings. Invariant: per thread one reference at most, given back
//! by the thread that took it, while it is attached.

#![allow(unsafe_code)]

use std::cell::RefCell;

use pyo3::prelude::*;

struct Stay(pyo3::ffi::PyGILState_STATE);

impl Drop for Stay {
    fn drop(&mut self) {
        // Where the interpreter is ending nobody needs the state any more.
        let _ = Python::try_attach(|_| {
            // SAFETY: this thread is attached (the closure runs), and took this reference in `stay`: a thread-local is
            // dropped by its own thread, once. The reference that `try_attach` holds outlives this one.
            unsafe { pyo3::ffi::PyGILState_Release(self.0) }
        });
    }
}

thread_local! {
    static STAY: RefCell<Option<Stay>> = const { RefCell::new(None) };
}

/// Keeps the thread state of the calling worker, who is attached.
pub(crate) fn stay(_attached: Python<'_>) {
    STAY.with_borrow_mut(|held| {
        held.get_or_insert_with(|| {
            // SAFETY: the thread is attached (`_attached`), so this only counts one more user of its state; it neither
            // waits nor changes who holds the interpreter. `Stay` gives it back.
            Stay(unsafe { pyo3::ffi::PyGILState_Ensure() })
        });
    });
}
