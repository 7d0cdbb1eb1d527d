//! `cliques`: directed 3- and 4-cliques by GenericJoin, beside a hand-written loop and beside GenericJoin on timely.
//!
//! *hand loop*: sorted adjacency, nested loops, merges of two lists, the list of common neighbours of the first two nodes
//! kept for the third; the last level is counted, as on our side. *rows*: both sides write every match down, in batches of
//! 8,192. *timely*: count, propose and validate as operators, a prefix with its candidates per record, all workers reading
//! one index without exchange, edges fed 1,024 at a time and awaited, which keeps its memory flat; that is the
//! fastest form of it that we know. Building the index is timed on no side. All counts are compared before anything is timed.
//!
//! Graphs are R-MAT as in the generator shared with the test data: counter based, so equal in every language.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use penstock_graph::crew::{self, Crew, Matches};
use penstock_graph::{Builder, Loops, Query, Repeats, cliques, intersect};
use timely::container::CapacityContainerBuilder;
use timely::dataflow::channels::pact::Pipeline;
use timely::dataflow::operators::core::{Concatenate as _, Input as _};
use timely::dataflow::operators::vec::{Map as _, Partition as _};
use timely::dataflow::operators::{Operator as _, Probe as _};
use timely::dataflow::{ProbeHandle, StreamVec};

use crate::harness::{Better, Case, Options, Report, compare};

/// Edges per round of the dataflow.
const ROUND: usize = 1024;
/// Rows per batch of an enumeration.
const ROWS: usize = 8192;

/// Runs the bench.
///
/// # Panics
/// When two sides find different numbers of cliques.
pub fn run(options: &Options, report: &mut Report) {
    let graph = if options.quick {
        Lists::rmat("2^14 200k edges", 14, 200_000, 42, [0.45, 0.22, 0.22])
    } else {
        Lists::rmat("2^16 900k edges", 16, 900_000, 42, [0.54, 0.19, 0.19])
    };
    let graph = Arc::new(graph);
    let queries = [3, 4].map(|size| query(&graph, size));
    let cases = 8;
    for (size, query) in [3, 4].into_iter().zip(&queries) {
        let found = hand(&graph, size);
        assert_eq!(ours(query, 1).1, found, "cliques of {size}");
        assert_eq!(on_timely(&graph, size, 1).1, found, "cliques of {size} on timely");
        for workers in [1, 2] {
            let paired = compare(
                options.budget(cases),
                || ours(query, workers).0,
                || timed(|| hand(&graph, size)).0, // one core, whatever the workers
            );
            let case = format!("w{workers} size={size} {} vs hand loop", graph.name);
            report.case(facts(Case::new(case, "ms", Better::Lower, paired), &graph, found));
            let paired =
                compare(options.budget(cases), || ours(query, workers).0, || on_timely(&graph, size, workers).0);
            let case = format!("w{workers} size={size} {} vs timely 0.31 GenericJoin", graph.name);
            report.case(facts(Case::new(case, "ms", Better::Lower, paired), &graph, found));
        }
    }
    let [triangles, _] = &queries;
    let found = hand(&graph, 3);
    assert_eq!((rows(triangles).1, hand_rows(&graph)), (found, found));
    let paired = compare(options.budget(cases), || rows(triangles).0, || timed(|| hand_rows(&graph)).0);
    let case = format!("w1 size=3 rows {} vs hand loop", graph.name);
    report.case(facts(Case::new(case, "ms", Better::Lower, paired), &graph, found));
}

fn facts(case: Case, graph: &Lists, cliques: u64) -> Case {
    case.with("edges", graph.targets.len()).with("cliques", cliques)
}

/// Milliseconds, and what was found.
fn timed(work: impl FnOnce() -> u64) -> (f64, u64) {
    let begin = Instant::now();
    let found = work();
    (begin.elapsed().as_secs_f64() * 1e3, found)
}

/// Sorted adjacency as the peers use it.
pub struct Lists {
    name: &'static str,
    offsets: Vec<usize>,
    targets: Vec<u32>,
}

impl Lists {
    /// Distinct edges without self-loops of an R-MAT graph.
    #[must_use]
    pub fn rmat(name: &'static str, scale: u32, edges: u64, seed: u64, odds: [f64; 3]) -> Self {
        let mut all = rmat(scale, edges, seed, odds);
        all.sort_unstable();
        all.dedup();
        let mut offsets = vec![0; (1 << scale) + 1];
        all.iter().for_each(|(from, _)| offsets[*from as usize + 1] += 1);
        (0..1 << scale).for_each(|node| offsets[node + 1] += offsets[node]);
        Self { name, offsets, targets: all.into_iter().map(|(_, to)| to).collect() }
    }

    #[inline]
    fn list(&self, node: u32) -> &[u32] {
        &self.targets[self.offsets[node as usize]..self.offsets[node as usize + 1]]
    }

    fn edges(&self) -> impl Iterator<Item = (u32, u32)> {
        (0..self.offsets.len() as u32 - 1).flat_map(|from| self.list(from).iter().map(move |&to| (from, to)))
    }
}

/// The edges of an R-MAT graph without self-loops, repeats and all.
#[must_use]
pub fn rmat(scale: u32, edges: u64, seed: u64, [a, b, c]: [f64; 3]) -> Vec<(u32, u32)> {
    let mask = (1_u64 << scale) - 1;
    let edge = |at: u64| {
        let (mut from, mut to) = (0_u64, 0_u64);
        for level in 0..u64::from(scale) {
            let step = at.wrapping_mul(u64::from(scale)).wrapping_add(level + 1);
            let mut z = seed.wrapping_add(0x9E37_79B9_7F4A_7C15_u64.wrapping_mul(step));
            z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            let odds = ((z ^ (z >> 31)) >> 11) as f64 * 2_f64.powi(-53);
            let high = odds >= a + b;
            let low = (odds >= a && odds < a + b) || odds >= a + b + c;
            (from, to) = (2 * from + u64::from(high), 2 * to + u64::from(low));
        }
        let scrambled = |node: u64| (node.wrapping_mul(0x9E37_79B1) & mask) as u32;
        (scrambled(from), scrambled(to))
    };
    (0..edges).map(edge).filter(|(from, to)| from != to).collect()
}

fn query(graph: &Lists, size: usize) -> Query {
    let (from, to): (Vec<u64>, Vec<u64>) = graph.edges().map(|(from, to)| (u64::from(from), u64::from(to))).unzip();
    let mut builder = Builder::numbers();
    builder.relation("e", Loops::Drop, Repeats::Drop);
    builder.numbers_in("e", &from, &to).expect("columns of one length");
    let index = Arc::new(builder.finish_forward().expect("few nodes"));
    let pattern = cliques::pattern("e", size).expect("a size");
    let order = pattern.variables.iter().map(String::as_str).collect::<Vec<_>>();
    Query::new(index, &pattern, Some(&order)).expect("a pattern over e")
}

fn ours(query: &Query, workers: usize) -> (f64, u64) {
    let crew = Crew { workers, ..Crew::default() };
    timed(|| crew::count(query, &crew).expect("it runs").count)
}

fn rows(query: &Query) -> (f64, u64) {
    let crew = Crew { rows: ROWS, ..Crew::default() };
    timed(|| Matches::start(query, &crew).expect("it runs").map(|rows| rows.expect("it runs").len() as u64).sum())
}

/// Both lists' values, by a merge.
#[inline]
fn common(a: &[u32], b: &[u32], mut each: impl FnMut(u32)) {
    let (mut i, mut j) = (0, 0);
    while i < a.len() && j < b.len() {
        match a[i].cmp(&b[j]) {
            std::cmp::Ordering::Less => i += 1,
            std::cmp::Ordering::Greater => j += 1,
            std::cmp::Ordering::Equal => {
                each(a[i]);
                (i, j) = (i + 1, j + 1);
            }
        }
    }
}

fn hand(graph: &Lists, size: usize) -> u64 {
    let mut found = 0;
    let mut both = Vec::new();
    for first in 0..graph.offsets.len() as u32 - 1 {
        let list = graph.list(first);
        for &second in list {
            if size == 3 {
                common(list, graph.list(second), |_| found += 1);
                continue;
            }
            both.clear();
            common(list, graph.list(second), |third| both.push(third));
            for &third in &both {
                common(&both, graph.list(third), |_| found += 1);
            }
        }
    }
    found
}

/// Triangles written down by column, in batches that are dropped.
fn hand_rows(graph: &Lists) -> u64 {
    let mut found = 0;
    let mut columns: [Vec<u32>; 3] = std::array::from_fn(|_| Vec::with_capacity(ROWS));
    for first in 0..graph.offsets.len() as u32 - 1 {
        let list = graph.list(first);
        for &second in list {
            common(list, graph.list(second), |third| {
                columns[0].push(first);
                columns[1].push(second);
                columns[2].push(third);
                if columns[0].len() == ROWS {
                    found += std::hint::black_box(&columns)[2].len() as u64;
                    columns.iter_mut().for_each(Vec::clear);
                }
            });
        }
    }
    found + columns[0].len() as u64
}

type Prefixes<'scope, P> = StreamVec<'scope, u64, P>;
type Records<P> = CapacityContainerBuilder<Vec<P>>;

/// Prefixes with the candidates for one more node: the lists of all `keys` vote.
fn extend<'scope, P: Copy + 'static>(
    prefixes: Prefixes<'scope, P>,
    graph: &Arc<Lists>,
    keys: &'static [fn(&P) -> u32],
) -> Prefixes<'scope, (P, Vec<u32>)> {
    let mut counted = prefixes.map(|prefix| (prefix, usize::MAX, 0_u64));
    for (at, key) in keys.iter().enumerate() {
        let graph = graph.clone();
        counted = counted.unary::<Records<_>, _, _, _>(Pipeline, "count", move |_, _| {
            move |input, output| {
                input.for_each_time(|time, blocks| {
                    let mut session = output.session(&time);
                    blocks.for_each(|block| {
                        for (prefix, least, by) in block.drain(..) {
                            let length = graph.list(key(&prefix)).len();
                            let best = if length < least { (length, at as u64) } else { (least, by) };
                            if best.0 > 0 {
                                session.give((prefix, best.0, best.1));
                            }
                        }
                    });
                });
            }
        });
    }
    let scope = counted.scope();
    let parts = counted.partition(keys.len() as u64, |(prefix, _, by)| (by, prefix));
    let extended = parts.into_iter().enumerate().map(|(by, part)| {
        let lists = graph.clone();
        let mut proposed = part.unary::<Records<_>, _, _, _>(Pipeline, "propose", move |_, _| {
            move |input, output| {
                input.for_each_time(|time, blocks| {
                    let mut session = output.session(&time);
                    blocks.for_each(|block| {
                        block
                            .drain(..)
                            .for_each(|prefix| session.give((prefix, lists.list(keys[by](&prefix)).to_vec())));
                    });
                });
            }
        });
        for key in keys.iter().enumerate().filter(|(at, _)| *at != by).map(|(_, key)| key) {
            let lists = graph.clone();
            proposed = proposed.unary::<Records<_>, _, _, _>(Pipeline, "validate", move |_, _| {
                move |input, output| {
                    input.for_each_time(|time, blocks| {
                        let mut session = output.session(&time);
                        blocks.for_each(|block| {
                            for (prefix, mut candidates) in block.drain(..) {
                                intersect::retain(&mut candidates, lists.list(key(&prefix)));
                                if !candidates.is_empty() {
                                    session.give((prefix, candidates));
                                }
                            }
                        });
                    });
                }
            });
        }
        proposed
    });
    scope.concatenate(extended.collect::<Vec<_>>())
}

type Pair = (u32, u32);

/// Adds up the candidates.
fn total<'scope, P: 'static>(
    extended: Prefixes<'scope, (P, Vec<u32>)>,
    found: Arc<AtomicU64>,
    probe: &ProbeHandle<u64>,
) {
    let counted = extended.unary::<Records<u64>, _, _, _>(Pipeline, "total", move |_, _| {
        move |input, _output| {
            input.for_each_time(|_, blocks| {
                blocks.for_each(|block| {
                    let sum = block.drain(..).map(|(_, candidates)| candidates.len() as u64).sum();
                    found.fetch_add(sum, Ordering::Relaxed);
                });
            });
        }
    });
    counted.probe_with(probe);
}

fn on_timely(graph: &Arc<Lists>, size: usize, workers: usize) -> (f64, u64) {
    let found = Arc::new(AtomicU64::new(0));
    let (graph, sum) = (graph.clone(), found.clone());
    let guards = timely::execute(timely::Config::process(workers), move |worker| {
        let probe = ProbeHandle::new();
        let mut input = worker.dataflow::<u64, _, _>(|scope| {
            let (input, edges) = scope.new_input::<Vec<Pair>>();
            let third = extend::<Pair>(edges, &graph, &[|edge| edge.0, |edge| edge.1]);
            if size == 3 {
                total(third, sum.clone(), &probe);
            } else {
                let triangles = third.flat_map(|(edge, thirds)| thirds.into_iter().map(move |third| (edge, third)));
                let fourth =
                    extend::<(Pair, u32)>(triangles, &graph, &[|prefix| prefix.0.0, |prefix| prefix.0.1, |p| p.1]);
                total(fourth, sum.clone(), &probe);
            }
            input
        });
        let mine = graph.edges().skip(worker.index()).step_by(workers).collect::<Vec<_>>();
        let begin = Instant::now();
        for (round, edges) in mine.chunks(ROUND).enumerate() {
            input.send_batch(&mut edges.to_vec());
            input.advance_to(round as u64 + 1);
            // Another worker may have fewer rounds: it closes its input then.
            worker.step_while(|| probe.less_than(&(round as u64)));
        }
        input.close();
        worker.step_while(|| !probe.done());
        begin.elapsed().as_secs_f64() * 1e3
    });
    let times = guards.expect("threads").join().into_iter().map(|time| time.expect("no panic"));
    (times.fold(0.0, f64::max), found.load(Ordering::Relaxed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_sides_find_what_is_known_of_the_generated_graph() {
        let graph = Arc::new(Lists::rmat("2^14", 14, 200_000, 42, [0.45, 0.22, 0.22]));
        assert_eq!(graph.targets.len(), 198_472);
        for (size, known) in [(3, 150_786), (4, 61_074)] {
            let query = query(&graph, size);
            assert_eq!((hand(&graph, size), ours(&query, 2).1), (known, known));
            assert_eq!((on_timely(&graph, size, 1).1, on_timely(&graph, size, 2).1), (known, known));
        }
        assert_eq!((hand_rows(&graph), rows(&query(&graph, 3)).1), (150_786, 150_786));
    }
}
