//! `cliques`: 3- and 4-cliques of undirected graphs, beside a hand-written loop and beside GenericJoin on timely.
//!
//! *rows*: both sides write every clique down, by column, in batches of 8,192 that are dropped. *count*: both sides take
//! the last vertex by the length of the list that it is in; every prefix is enumerated. Building the index is timed on no
//! side; all sides read the same one, each edge turned to its end of higher degree. What a side finds is compared in every
//! turn, outside of its time. The loop runs on one core, whatever our workers. *memory* is the peak of the resident set above the loaded graph, of a process of its own.
//!
//! Graphs are R-MAT as in the generator that is shared with the test data, and the edge lists (`*.txt`) in the folder that
//! [`FOLDER`] names. The peers are described in [`crate::clique_peers`].

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_graph::Query;
use penstock_graph::crew::{self, Crew, Matches};

use crate::clique_child::{SEED, Side, Taken, Task};
use crate::clique_peers::{Feed, ROWS, hand_count, hand_rows, on_timely};
use crate::graphs::{Graph, rmat};
use crate::harness::{Better, Case, Options, Paired, Report, compare, end_in, median};
use crate::machine::{self, Meter};

/// The environment variable that names a folder of edge lists.
pub const FOLDER: &str = "PENSTOCK_BENCH_GRAPHS";

/// Draws of the graph that the targets are stated for: 2^17 nodes, 928,490 edges, 87 M 4-cliques.
const DRAWS: u64 = 1_000_000;
/// The peer that runs on one core, whatever our workers.
const LOOP: &str = "hand loop";
/// Processes of each side whose memory is measured.
const MEMORY_TURNS: usize = 5;
/// Seconds after which one turn per case is enough, unless another budget was asked for.
const FULL_S: f64 = 130.0;

/// Runs the bench.
///
/// # Panics
/// When two sides find different numbers of cliques, or a graph of the folder cannot be read.
pub fn run(options: &Options, report: &mut Report) {
    if !options.quick {
        end_in(Duration::from_secs_f64(options.seconds.unwrap_or(FULL_S)));
    }
    let scale = if options.quick { 13 } else { 17 };
    let draws = if options.quick { 7 << scale } else { DRAWS };
    let graph = Arc::new(Graph::rmat(scale, draws, SEED));
    let mut bench = Bench { options, report, cases: if options.quick { 20 } else { 40 } };
    for size in [3, 4] {
        bench.whole(&graph, size);
    }
    for size in [3, 4] {
        bench.memory(scale, draws, size, 1);
        if !options.quick {
            bench.memory(scale, draws, size, 2);
        }
    }
    for path in files() {
        let graph = Arc::new(Graph::read(&path).unwrap_or_else(|problem| panic!("{problem}")));
        for size in [3, 4] {
            bench.enumeration(&graph, size, !options.quick);
        }
    }
    if options.quick {
        return;
    }
    // Growing graphs of one density; as they grow, so does the share of the hubs.
    for (scale, sizes) in [(13, &[3, 4][..]), (15, &[3, 4]), (17, &[3]), (19, &[3])] {
        let graph = Arc::new(Graph::rmat(scale, 7 << scale, SEED));
        for &size in sizes {
            bench.enumeration(&graph, size, scale < 19);
        }
    }
    // Edges as they stand: hubs keep their long lists.
    for (scale, draws, size) in [(16, 900_000, 3), (15, 300_000, 4)] {
        let edges = rmat(scale, draws, SEED, [0.54, 0.19, 0.19]);
        let graph = Arc::new(Graph::directed(&format!("R-MAT 2^{scale} directed"), &edges));
        bench.enumeration(&graph, size, false);
    }
}

/// The edge lists of the folder, by name.
fn files() -> Vec<PathBuf> {
    let Some(folder) = std::env::var_os(FOLDER) else { return Vec::new() };
    let entries = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{FOLDER}={}: {error}", folder.display()));
    let paths = entries.flatten().map(|entry| entry.path());
    let mut files = paths.filter(|path| path.extension().is_some_and(|end| end == "txt")).collect::<Vec<_>>();
    files.sort();
    files
}

struct Bench<'a> {
    options: &'a Options,
    report: &'a mut Report,
    /// For sharing the budget; about how many there are.
    cases: usize,
}

impl Bench<'_> {
    /// Rows and counts, one worker and two, beside everybody.
    fn whole(&mut self, graph: &Arc<Graph>, size: usize) {
        let query = graph.query(size);
        let found = hand_count(graph, size);
        assert_eq!(hand_rows(graph, size), found, "rows of the loop");
        for workers in [1, 2] {
            assert_eq!((rows(&query, workers).1, count(&query, workers).1), (found, found), "cliques of {size}");
        }
        for workers in [1, 2] {
            let ours = || rows(&query, workers);
            self.case(graph, size, found, format!("w{workers} rows"), LOOP, ours, || timed(|| hand_rows(graph, size)));
            self.case(graph, size, found, format!("w{workers} rows"), "timely 0.31 GenericJoin", ours, || {
                on_timely(graph, size, workers, true, Feed::Rounds)
            });
        }
        let one = || rows(&query, 1);
        for workers in std::iter::once(2).chain(machine::wide()) {
            let name = format!("w{workers} rows");
            self.case(graph, size, found, name, "itself on one worker", || rows(&query, workers), one);
        }
        for workers in [1, 2] {
            let ours = || count(&query, workers);
            self.case(graph, size, found, format!("w{workers} count"), LOOP, ours, || {
                timed(|| hand_count(graph, size))
            });
        }
        self.case(
            graph,
            size,
            found,
            "w1 count".into(),
            "timely 0.31 GenericJoin",
            || count(&query, 1),
            || on_timely(graph, size, 1, false, Feed::Rounds),
        );
    }

    /// Rows on one worker.
    fn enumeration(&mut self, graph: &Arc<Graph>, size: usize, timely: bool) {
        let query = graph.query(size);
        let found = hand_rows(graph, size);
        assert_eq!(rows(&query, 1).1, found, "cliques of {size} of {}", graph.name());
        let ours = || rows(&query, 1);
        self.case(graph, size, found, "w1 rows".into(), LOOP, ours, || timed(|| hand_rows(graph, size)));
        if timely {
            self.case(graph, size, found, "w1 rows".into(), "timely 0.31 GenericJoin", ours, || {
                on_timely(graph, size, 1, true, Feed::Rounds)
            });
        }
    }

    #[expect(clippy::too_many_arguments, reason = "what a case consists of")]
    fn case(
        &mut self,
        graph: &Graph,
        size: usize,
        found: u64,
        what: String,
        peer: &str,
        mut ours: impl FnMut() -> (f64, u64),
        mut theirs: impl FnMut() -> (f64, u64),
    ) {
        let checked = |(time, these): (f64, u64), side: &str| {
            assert_eq!(these, found, "{what} of {size} by {side}");
            time
        };
        let paired =
            compare(self.options.budget(self.cases), || checked(ours(), "penstock"), || checked(theirs(), peer));
        let case = Case::new(format!("{what} size={size} {} vs {peer}", graph.name()), "ms", Better::Lower, paired);
        let case = case.with("edges", graph.edges()).with("cliques", found);
        self.report.case(if peer == LOOP { case.with("peer_workers", 1) } else { case });
    }

    /// The resident set above the loaded graph while rows are written, of processes of their own.
    fn memory(&mut self, scale: u32, draws: u64, size: usize, workers: usize) {
        let meter = Meter::start();
        // In turn, so that what stands beside each other was measured beside each other.
        let sides = [Side::Ours, Side::Timely, Side::Unbounded];
        let turns = if self.options.quick { 1 } else { MEMORY_TURNS };
        let turns: Vec<_> =
            (0..turns).map(|_| sides.map(|side| Task { side, size, workers, scale, draws }.in_child())).collect();
        let found = turns[0][0].cliques;
        assert!(turns.iter().flatten().all(|taken| taken.cliques == found), "all find the same");
        let of =
            |side: usize, figure: fn(&Taken) -> f64| turns.iter().map(|turn| figure(&turn[side])).collect::<Vec<_>>();
        let peers = [(1, "timely 0.31 GenericJoin"), (2, "timely without flow control")];
        for (side, name) in peers {
            let paired = Paired::new(of(0, |taken| taken.peak_mib), of(side, |taken| taken.peak_mib), meter.look());
            let [seconds, peer_seconds] = [0, side].map(|side| median(&of(side, |taken| taken.seconds)));
            let case = format!("w{workers} memory of rows size={size} R-MAT 2^{scale} vs {name}");
            self.report.case(
                Case::new(case, "MiB", Better::Lower, paired)
                    .with("cliques", found)
                    .with("seconds", seconds)
                    .with("peer_seconds", peer_seconds)
                    .with("time_ratio", peer_seconds / seconds),
            );
        }
    }
}

/// Milliseconds, and what was found.
fn timed(work: impl FnOnce() -> u64) -> (f64, u64) {
    let begin = Instant::now();
    let found = work();
    (begin.elapsed().as_secs_f64() * 1e3, found)
}

/// Counts by threads of ours: milliseconds, and how many.
fn count(query: &Query, workers: usize) -> (f64, u64) {
    let crew = Crew { workers, ..Crew::default() };
    timed(|| crew::count(query, &crew).expect("it runs").count)
}

/// Has threads of ours write all cliques down, and drops the batches: milliseconds, and how many.
///
/// # Panics
/// When a thread does not start.
#[must_use]
pub fn rows(query: &Query, workers: usize) -> (f64, u64) {
    let crew = Crew { workers, rows: ROWS, ..Crew::default() };
    timed(|| {
        let batches = Matches::start(query, &crew).expect("it runs");
        batches.map(|rows| std::hint::black_box(rows.expect("it runs")).len() as u64).sum()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_and_counts_are_what_the_loop_finds() {
        for graph in [Graph::rmat(10, 7 << 10, 1), Graph::directed("", &rmat(9, 5000, 1, [0.54, 0.19, 0.19]))] {
            for size in [3, 4] {
                let (query, found) = (graph.query(size), hand_count(&graph, size));
                assert!(found > 0);
                for workers in [1, 2] {
                    assert_eq!((count(&query, workers).1, rows(&query, workers).1), (found, found));
                }
            }
        }
    }
}
