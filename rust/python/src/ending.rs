//! The end of the interpreter, and threads that run Python code below Rust.
//!
//! Until 3.14 Python ends any thread that asks for the interpreter once that is ending: where it stands, by unwinding its stack.
//! pyo3 lets a thread hang that comes back to Python from Rust; one in Python code that Rust has called is unwound through frames of
//! Rust, which aborts the process. It is a daemon thread, or one of ours: all others have been waited for.
//!
//! Owns: the count of threads in Python code that Rust has called ([`Inside`]), and when the interpreter is about to end
//! ([`await_others`], the last of its `atexit` functions that is of this package). Invariant: from then on no thread gets in, and
//! none that is in gets farther than to the next [`pause`], but for the one that ends the interpreter.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use pyo3::prelude::*;

/// How long functions of users' that are under way may take.
const GRACE: Duration = Duration::from_secs(2);
/// Between two looks.
const LOOK: Duration = Duration::from_millis(2);

/// The thread that ends the interpreter, once one does; the first number is 1.
static ENDER: AtomicU64 = AtomicU64::new(0);
/// Threads inside, each as often as it is.
static INSIDE: AtomicUsize = AtomicUsize::new(0);
static NUMBERS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static NUMBER: u64 = NUMBERS.fetch_add(1, Ordering::Relaxed) + 1;
    /// How often this thread is inside.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
}

/// Whether another thread ends the interpreter.
fn is_over() -> bool {
    let ender = ENDER.load(Ordering::SeqCst);
    ender != 0 && NUMBER.with(|number| *number != ender)
}

/// The calling thread runs Python code below frames of Rust.
pub(crate) struct Inside(());

impl Inside {
    pub(crate) fn new() -> Self {
        DEPTH.set(DEPTH.get() + 1);
        INSIDE.fetch_add(1, Ordering::SeqCst);
        Self(())
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        DEPTH.set(DEPTH.get() - 1);
        INSIDE.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Runs `work` attached, in a thread of ours; None when the interpreter is ending.
pub(crate) fn attach<R>(work: impl FnOnce(Python<'_>) -> R) -> Option<R> {
    let _inside = Inside::new();
    if is_over() { None } else { Python::try_attach(work) }
}

/// Keeps a thread of Python's here for good when the interpreter is ending: nothing of it runs any more, as with all daemon threads.
pub(crate) fn pause(py: Python<'_>) {
    if is_over() {
        py.detach(|| {
            INSIDE.fetch_sub(DEPTH.get(), Ordering::SeqCst);
            loop {
                std::thread::park();
            }
        });
    }
}

/// For loops that wait in Python: see `pause`.
#[pyfunction]
#[pyo3(name = "pause_at_end")]
pub(crate) fn pause_at_end(py: Python<'_>) {
    pause(py);
}

/// Whether the interpreter ends, and threads that are started now would come to nothing.
#[pyfunction]
pub(crate) fn is_ending() -> bool {
    ENDER.load(Ordering::SeqCst) != 0
}

/// The interpreter ends after this: waits a moment for the threads that are in Python code below Rust.
#[pyfunction]
pub(crate) fn await_others(py: Python<'_>) -> PyResult<()> {
    ENDER.store(NUMBER.with(|number| *number), Ordering::SeqCst);
    let until = Instant::now() + GRACE;
    while INSIDE.load(Ordering::SeqCst) > DEPTH.get() && Instant::now() < until {
        py.detach(|| std::thread::sleep(LOOK));
        py.check_signals()?;
    }
    Ok(())
}

/// A forked child has none of the other threads.
#[pyfunction]
pub(crate) fn only_this_thread() {
    ENDER.store(0, Ordering::SeqCst);
    INSIDE.store(DEPTH.get(), Ordering::SeqCst);
}

/// Has Python call them.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    py.import("atexit")?.call_method1("register", (wrap_pyfunction!(await_others, module)?,))?;
    let facts = pyo3::types::PyDict::new(py);
    facts.set_item("after_in_child", wrap_pyfunction!(only_this_thread, module)?)?;
    py.import("os")?.call_method("register_at_fork", (), Some(&facts))?;
    Ok(())
}
