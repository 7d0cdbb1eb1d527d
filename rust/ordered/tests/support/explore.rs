//! How loom is run, and what it said.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

fn asked(name: &str) -> Option<usize> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name}={text:?}: a number")))
}

fn builder(bound: Option<usize>) -> loom::model::Builder {
    let mut builder = loom::model::Builder::new();
    builder.max_branches = 20_000;
    builder.preemption_bound = match (bound, asked("PENSTOCK_LOOM_BOUND")) {
        (None, _) | (_, Some(0)) => None,
        (Some(least), asked) => Some(asked.unwrap_or(least).max(least)),
    };
    builder.max_duration = asked("PENSTOCK_LOOM_SECONDS").map(|seconds| Duration::from_secs(seconds as u64));
    builder
}

/// Runs the model in every interleaving (with at most `bound` preemptions) and says how many there were.
pub fn explore(what: &str, bound: Option<usize>, model: impl Fn() + Sync + Send + 'static) -> usize {
    let count = Arc::new(AtomicUsize::new(0));
    let counted = count.clone();
    let builder = builder(bound);
    let bound = builder.preemption_bound.map_or("all".to_owned(), |bound| format!("{bound} preemptions"));
    let begin = std::time::Instant::now();
    builder.check(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        model();
    });
    let count = count.load(Ordering::Relaxed);
    println!("loom: {what}: {count} executions ({bound}), {:.1} s", begin.elapsed().as_secs_f64());
    count
}

/// At which execution the model fails, if it does: a deadlock, an assertion, a data race.
pub fn fails(bound: Option<usize>, model: impl Fn() + Sync + Send + 'static) -> Option<usize> {
    let count = Arc::new(AtomicUsize::new(0));
    let counted = count.clone();
    let mut builder = builder(bound);
    builder.max_branches = 2_000;
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        builder.check(move || {
            counted.fetch_add(1, Ordering::Relaxed);
            model();
        });
    }));
    outcome.err().map(|_| count.load(Ordering::Relaxed))
}
