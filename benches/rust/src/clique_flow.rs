//! Cliques as a dataflow, for the benches of flow control: GenericJoin over a relation of edges that is indexed at every worker.
//!
//! A prefix is extended by one vertex in the steps of the paper: each relation that has an opinion counts its extensions, the one
//! with the fewest proposes them, the others keep what they have as well. Every step is an exchange to the worker that owns the
//! vertex which is looked up. Graphs are R-MAT, made undirected, with every edge pointing to the end of higher degree.
//!
//! Source: Faucet §2, §4.1 (F-11): the first extension feeds the second, each in a bounded scope of its own where that is asked.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use penstock_bounded::{BoundedStream, Bounds, Monitor, Stats};
use penstock_dataflow::{BoxError, Pipeline, Stream, Worker, execute, fabric};
use penstock_progress::timestamp::Timestamp;

pub use crate::graphs::Graph;

/// The vertices of a clique so far; what is not known yet is 0.
pub type Prefix = [u32; 4];

/// Keeps what is in both ascending lists.
fn keep(list: &mut Vec<u32>, other: &[u32]) {
    penstock_graph::intersect::retain(list, other);
}

/// A prefix, the fewest extensions that a vertex of it has, and which one.
type Counted = (Prefix, u32, u32);

/// A prefix, which of its vertices proposes, and what is proposed.
type Proposal = (Prefix, u32, Vec<u32>);

/// Extends prefixes of `length` vertices by one.
fn extend<T: Timestamp>(
    stream: &Stream<T, Vec<Prefix>>,
    graph: &Arc<Graph>,
    length: usize,
) -> Stream<T, Vec<Proposal>> {
    let owner = move |vertex: u32| u64::from(vertex);
    let counts = (0..length).fold(None, |counts: Option<Stream<T, Vec<Counted>>>, at| {
        let graph = graph.clone();
        let degree = move |prefix: &Prefix| graph.neighbours(prefix[at]).len() as u32;
        Some(match counts {
            None => stream.exchange_by(move |prefix| owner(prefix[at])).map_blocks(move |block| {
                let counted = block.into_iter().map(|prefix| (prefix, degree(&prefix), at as u32));
                counted.filter(|counted| counted.1 > 0).collect()
            }),
            Some(counts) => counts.exchange_by(move |counted| owner(counted.0[at])).map_blocks(move |mut block| {
                block.retain_mut(|(prefix, least, by)| {
                    let degree = degree(prefix);
                    if degree < *least {
                        (*least, *by) = (degree, at as u32);
                    }
                    degree > 0
                });
                block
            }),
        })
    });
    let counts = counts.expect("a prefix has a vertex");
    let relation = graph.clone();
    let proposed = counts.exchange_by(move |counted| owner(counted.0[counted.2 as usize])).map_blocks(move |block| {
        let propose = |(prefix, _, by): Counted| (prefix, by, relation.neighbours(prefix[by as usize]).to_vec());
        block.into_iter().map(propose).collect::<Vec<Proposal>>()
    });
    (1..length).fold(proposed, |proposed, turn| {
        let graph = graph.clone();
        // The relations other than the one that proposed, in turn.
        let at = move |by: u32| if turn <= by as usize { turn - 1 } else { turn };
        proposed.exchange_by(move |(prefix, by, _)| owner(prefix[at(*by)])).map_blocks(move |mut block| {
            block.retain_mut(|(prefix, by, list)| {
                keep(list, graph.neighbours(prefix[at(*by)]));
                !list.is_empty()
            });
            block
        })
    })
}

/// How a flow is held back.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Control {
    /// Not at all.
    Free,
    /// N and B of the scope around the whole join, and of a scope around the second extension, where there is one.
    Bounded((u64, u64), Option<(u64, u64)>),
    /// N and B found while running, at both.
    Adaptive,
}

impl Control {
    pub(crate) fn bounds(self) -> (Option<Bounds>, Option<Bounds>) {
        let fixed = |(batches, size)| Bounds::fixed(batches, size).expect("benches ask for sensible bounds");
        match self {
            Self::Free => (None, None),
            Self::Bounded(outer, inner) => (Some(fixed(outer)), inner.map(fixed)),
            Self::Adaptive => (Some(Bounds::adaptive()), Some(Bounds::adaptive())),
        }
    }
}

/// The join from edges to the lists of last vertices.
fn join<T: Timestamp>(
    edges: &Stream<T, Vec<Prefix>>,
    graph: &Arc<Graph>,
    size: usize,
    inner: Option<Bounds>,
) -> Stream<T, Vec<u64>> {
    let counted = |lists: Stream<T, Vec<Proposal>>| {
        lists.map_blocks(|block| vec![block.iter().map(|(_, _, list)| list.len() as u64).sum()])
    };
    let triangles = extend(edges, graph, 2);
    if size == 3 {
        return counted(triangles);
    }
    let flat = |([one, two, ..], _, list): Proposal| list.into_iter().map(move |three| [one, two, three, 0]);
    match inner {
        None => {
            counted(extend(&triangles.map_blocks(move |block| block.into_iter().flat_map(flat).collect()), graph, 3))
        }
        Some(bounds) => {
            let body = |_: &mut _, triples: Stream<_, Vec<Prefix>>| {
                extend(&triples, graph, 3)
                    .map_blocks(|block| vec![block.iter().map(|(_, _, list)| list.len() as u64).sum()])
            };
            triangles.bounded_flat_map(bounds, flat, body).0
        }
    }
}

/// What one run found and took.
#[derive(Clone, Debug)]
pub struct Run {
    /// Cliques found, or items.
    pub found: u64,
    /// From the first input to the end of the slowest worker.
    pub seconds: f64,
    /// Figures of the outer scope, by worker; none when free.
    pub stats: Vec<Stats>,
}

impl Run {
    /// From what each worker found, how long it took, and its figures.
    pub(crate) fn of(workers: impl Iterator<Item = (u64, f64, Option<Stats>)>) -> Self {
        let mut whole = Self { found: 0, seconds: 0.0, stats: Vec::new() };
        for (found, seconds, stats) in workers {
            whole.found += found;
            whole.seconds = whole.seconds.max(seconds);
            whole.stats.extend(stats);
        }
        whole
    }
}

/// Runs the join on so many threads. Each worker brings the edges of its share of the vertices.
///
/// # Panics
/// When a worker fails.
#[must_use]
pub fn run(graph: &Arc<Graph>, size: usize, workers: usize, control: Control) -> Run {
    assert!((3..=4).contains(&size), "cliques of {size}");
    let graph = graph.clone();
    let program = move |worker: &mut Worker| work(worker, &graph, size, control);
    let threads = execute(fabric::threads(workers), program);
    let results =
        threads.into_iter().map(|thread| thread.join().expect("workers catch panics").expect("no step fails"));
    Run::of(results)
}

fn work(
    worker: &mut Worker,
    graph: &Arc<Graph>,
    size: usize,
    control: Control,
) -> Result<(u64, f64, Option<Stats>), BoxError> {
    let (index, peers) = (worker.index() as u32, worker.peers());
    let found = Rc::new(Cell::new(0));
    let sum = found.clone();
    let (mut input, monitor) = worker.dataflow::<u64, _>("cliques", |scope| {
        let (input, shares) = scope.new_input::<Vec<u32>>();
        let (outer, inner) = control.bounds();
        let whole = graph.clone();
        let edges = move |first: u32| {
            let graph = whole.clone();
            (first..graph.vertices()).step_by(peers).flat_map(move |one| {
                let graph = graph.clone();
                (0..graph.neighbours(one).len()).map(move |at| [one, graph.neighbours(one)[at], 0, 0])
            })
        };
        let (counts, monitor): (_, Option<Monitor>) = match outer {
            Some(bounds) => {
                let body = |_: &mut _, edges: Stream<_, Vec<Prefix>>| join(&edges, graph, size, inner);
                let (counts, monitor) = shares.bounded_flat_map(bounds, edges, body);
                (counts, Some(monitor))
            }
            None => (join(&blocks(&shares, edges), graph, size, inner), None),
        };
        counts.sink(Pipeline, "sum", move |input, _| {
            input.for_each(|_, block| sum.set(sum.get() + block.iter().sum::<u64>()));
            Ok(())
        });
        (input, monitor)
    });
    let begin = Instant::now();
    input.send(vec![index]);
    input.close();
    while worker.step_or_park(None)? {}
    Ok((found.get(), begin.elapsed().as_secs_f64(), monitor.map(|monitor| monitor.stats())))
}

/// Everything at once, in blocks as large as those of a batcher.
pub(crate) fn blocks<X: 'static, I: Iterator<Item: Clone> + 'static>(
    inputs: &Stream<u64, Vec<X>>,
    expand: impl Fn(X) -> I + 'static,
) -> Stream<u64, Vec<I::Item>> {
    inputs.unary(Pipeline, "expand", move |_| {
        move |input, output, _| {
            input.for_each(|capability, block| {
                let mut items = block.into_iter().flat_map(&expand);
                let mut session = output.session(&capability);
                loop {
                    let block: Vec<I::Item> = items.by_ref().take(penstock_bounded::batcher::QUANTUM).collect();
                    if block.is_empty() {
                        break;
                    }
                    session.give(block);
                }
            });
            Ok(())
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn brute_force(vertices: u32, edges: &[(u32, u32)], size: usize) -> u64 {
        let linked = |one: u32, two: u32| edges.contains(&(one, two)) || edges.contains(&(two, one));
        fn grow(
            from: u32,
            vertices: u32,
            clique: &mut Vec<u32>,
            size: usize,
            linked: &dyn Fn(u32, u32) -> bool,
        ) -> u64 {
            if clique.len() == size {
                return 1;
            }
            let mut found = 0;
            for vertex in from..vertices {
                if clique.iter().all(|other| linked(*other, vertex)) {
                    clique.push(vertex);
                    found += grow(vertex + 1, vertices, clique, size, linked);
                    clique.pop();
                }
            }
            found
        }
        grow(0, vertices, &mut Vec::new(), size, &linked)
    }

    #[test]
    fn every_way_counts_what_brute_force_does() {
        let mut numbers = crate::Numbers(5);
        for vertices in [1u32, 5, 14] {
            // Loops, repeats and both directions among them.
            let mut vertex = || (numbers.next().unwrap() % u64::from(vertices)) as u32;
            let edges: Vec<(u32, u32)> = (0..6 * vertices).map(|_| (vertex(), vertex())).collect();
            let graph = Arc::new(Graph::undirected("", &edges));
            for size in [3, 4] {
                let expected = brute_force(vertices, &edges, size);
                assert_eq!(graph.count(size), expected);
                for workers in [1, 2] {
                    let ways = [
                        Control::Free,
                        Control::Bounded((1, 1), Some((1, 1))),
                        Control::Bounded((2, 3), None),
                        Control::Adaptive,
                    ];
                    for control in ways {
                        let run = run(&graph, size, workers, control);
                        assert_eq!(run.found, expected, "{size}-cliques of {vertices} on {workers}, {control:?}");
                        assert_eq!(run.stats.len(), if control == Control::Free { 0 } else { workers });
                    }
                }
            }
        }
    }
}
