//! What the search for cliques is measured beside: a hand-written loop, and GenericJoin as a dataflow on timely.
//!
//! *hand loop*: nested loops over the same adjacency; the list of common neighbours of the first two vertices is kept for
//! the third; merges, and steps that double where one list is more than eight times longer. *timely*: count, propose and
//! validate as operators, a prefix with its candidates per record, all workers reading one index without exchange, edges
//! fed [`ROUND`] at a time: the fastest form of it that we know. Each comes twice: one takes the last level by its
//! length, as counts do, the other writes every clique down by column, in batches that are dropped.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use timely::container::CapacityContainerBuilder;
use timely::dataflow::channels::pact::Pipeline;
use timely::dataflow::operators::core::{Concatenate as _, Input as _};
use timely::dataflow::operators::vec::{Map as _, Partition as _};
use timely::dataflow::operators::{Operator as _, Probe as _};
use timely::dataflow::{ProbeHandle, StreamVec};

use crate::graphs::Graph;

/// Edges per round of the dataflow on timely.
pub const ROUND: usize = 1000;
/// Rounds under way at a time.
pub const ROUNDS: u64 = 4;
/// Rows per batch of an enumeration.
pub const ROWS: usize = 8192;

/// Keeps the values that the other list has, too.
#[inline]
fn keep(list: &mut Vec<u32>, mut other: &[u32]) {
    if other.len() > 8 * list.len() {
        list.retain(|&value| {
            let mut reach = 1;
            while reach <= other.len() && other[reach - 1] < value {
                reach *= 2;
            }
            let (low, high) = (reach / 2, reach.min(other.len()));
            other = &other[low + other[low..high].partition_point(|&node| node < value)..];
            other.first() == Some(&value)
        });
        return;
    }
    let mut at = 0;
    list.retain(|&value| {
        while at < other.len() && other[at] < value {
            at += 1;
        }
        at < other.len() && other[at] == value
    });
}

/// Sets `both` to what two lists share.
#[inline]
fn common(one: &[u32], other: &[u32], both: &mut Vec<u32>) {
    let (short, long) = if one.len() < other.len() { (one, other) } else { (other, one) };
    both.clear();
    both.extend_from_slice(short);
    keep(both, long);
}

/// The loop. `each` gets all vertices but the last, and the list of the last.
#[inline]
fn hand(graph: &Graph, size: usize, mut each: impl FnMut(&[u32], &[u32])) {
    assert!((3..=4).contains(&size), "cliques of {size}");
    let view = graph.view();
    let (mut both, mut all) = (Vec::new(), Vec::new());
    for one in 0..view.nodes() as u32 {
        let list = view.list(one);
        for &two in list {
            common(list, view.list(two), &mut both);
            if size == 3 {
                each(&[one, two], &both);
                continue;
            }
            for &three in &both {
                all.clear();
                all.extend_from_slice(&both);
                keep(&mut all, view.list(three));
                each(&[one, two, three], &all);
            }
        }
    }
}

/// Counts cliques of three or four vertices; the last level by its length.
#[must_use]
pub fn hand_count(graph: &Graph, size: usize) -> u64 {
    let mut found = 0;
    hand(graph, size, |_, last| found += last.len() as u64);
    found
}

/// Writes cliques of three or four vertices down.
#[must_use]
pub fn hand_rows(graph: &Graph, size: usize) -> u64 {
    let mut rows = Written::new(size);
    hand(graph, size, |prefix, last| rows.put(prefix, last));
    rows.total()
}

/// Rows by column, in batches that are dropped.
#[derive(Debug)]
struct Written {
    columns: Vec<Vec<u32>>,
    dropped: u64,
}

impl Written {
    fn new(size: usize) -> Self {
        Self { columns: vec![Vec::with_capacity(2 * ROWS); size], dropped: 0 }
    }

    #[inline]
    fn put(&mut self, prefix: &[u32], last: &[u32]) {
        if last.is_empty() {
            return;
        }
        let (end, before) = self.columns.split_last_mut().expect("cliques have vertices");
        end.extend_from_slice(last);
        before.iter_mut().zip(prefix).for_each(|(column, vertex)| column.resize(end.len(), *vertex));
        if end.len() >= ROWS {
            self.dropped += std::hint::black_box(&self.columns)[0].len() as u64;
            self.columns.iter_mut().for_each(Vec::clear);
        }
    }

    fn total(&self) -> u64 {
        self.dropped + self.columns[0].len() as u64
    }
}

type Prefixes<'scope, P> = StreamVec<'scope, u64, P>;
type Records<P> = CapacityContainerBuilder<Vec<P>>;
type Pair = (u32, u32);
type Triple = (Pair, u32);

/// Prefixes with the candidates for one more vertex: the lists of all `keys` vote.
fn extend<'scope, P: Copy + 'static>(
    prefixes: Prefixes<'scope, P>,
    graph: &Arc<Graph>,
    keys: &'static [fn(&P) -> u32],
) -> Prefixes<'scope, (P, Vec<u32>)> {
    let mut counted = prefixes.map(|prefix| (prefix, usize::MAX, 0_u64));
    for (at, key) in keys.iter().enumerate() {
        let graph = graph.clone();
        counted = counted.unary::<Records<_>, _, _, _>(Pipeline, "count", move |_, _| {
            move |input, output| {
                let view = graph.view();
                input.for_each_time(|time, blocks| {
                    let mut session = output.session(&time);
                    blocks.for_each(|block| {
                        for (prefix, least, by) in block.drain(..) {
                            let length = view.degree(key(&prefix));
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
                let view = lists.view();
                input.for_each_time(|time, blocks| {
                    let mut session = output.session(&time);
                    let propose = |prefix: P| (prefix, view.list(keys[by](&prefix)).to_vec());
                    blocks.for_each(|block| block.drain(..).for_each(|prefix| session.give(propose(prefix))));
                });
            }
        });
        for key in keys.iter().enumerate().filter(|(at, _)| *at != by).map(|(_, key)| key) {
            let lists = graph.clone();
            proposed = proposed.unary::<Records<_>, _, _, _>(Pipeline, "validate", move |_, _| {
                move |input, output| {
                    let view = lists.view();
                    input.for_each_time(|time, blocks| {
                        let mut session = output.session(&time);
                        blocks.for_each(|block| {
                            for (prefix, mut candidates) in block.drain(..) {
                                keep(&mut candidates, view.list(key(&prefix)));
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

/// Takes the last level: adds up its lengths, or writes it down.
fn total<'scope, P: 'static>(
    extended: Prefixes<'scope, (P, Vec<u32>)>,
    mut written: Option<Written>,
    prefix: impl Fn(&P) -> [u32; 3] + 'static,
    found: Arc<AtomicU64>,
    probe: &ProbeHandle<u64>,
) {
    let counted = extended.unary::<Records<u64>, _, _, _>(Pipeline, "total", move |_, _| {
        move |input, _output| {
            input.for_each_time(|_, blocks| {
                blocks.for_each(|block| {
                    let mut sum = 0;
                    for (known, candidates) in block.drain(..) {
                        sum += candidates.len() as u64;
                        if let Some(written) = &mut written {
                            written.put(&prefix(&known), &candidates);
                        }
                    }
                    found.fetch_add(sum, Ordering::Relaxed);
                });
            });
        }
    });
    counted.probe_with(probe);
}

/// How the dataflow on timely is fed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Feed {
    /// [`ROUND`] edges at a time, at most [`ROUNDS`] rounds under way.
    Rounds,
    /// All edges at once.
    Whole,
}

/// Cliques of three or four vertices on timely: milliseconds, and how many.
///
/// # Panics
/// When a worker does.
#[must_use]
pub fn on_timely(graph: &Arc<Graph>, size: usize, workers: usize, rows: bool, feed: Feed) -> (f64, u64) {
    assert!((3..=4).contains(&size), "cliques of {size}");
    let found = Arc::new(AtomicU64::new(0));
    let (graph, sum) = (graph.clone(), found.clone());
    let guards = timely::execute(timely::Config::process(workers), move |worker| {
        let probe = ProbeHandle::new();
        let written = rows.then(|| Written::new(size));
        let mut input = worker.dataflow::<u64, _, _>(|scope| {
            let (input, edges) = scope.new_input::<Vec<Pair>>();
            let third = extend::<Pair>(edges, &graph, &[|edge| edge.0, |edge| edge.1]);
            if size == 3 {
                total(third, written, |edge| [edge.0, edge.1, 0], sum.clone(), &probe);
            } else {
                let triangles = third.flat_map(|(edge, thirds)| thirds.into_iter().map(move |third| (edge, third)));
                let keys: &'static [fn(&Triple) -> u32] = &[|known| known.0.0, |known| known.0.1, |known| known.1];
                let fourth = extend::<Triple>(triangles, &graph, keys);
                total(fourth, written, |known| [known.0.0, known.0.1, known.1], sum.clone(), &probe);
            }
            input
        });
        // Read where they are, as our side reads them: a list of them would count as memory of the dataflow.
        let mut mine = graph.view().edges().skip(worker.index()).step_by(workers);
        let begin = Instant::now();
        let most = if feed == Feed::Whole { usize::MAX } else { ROUND };
        for round in 1.. {
            let mut edges = mine.by_ref().take(most).collect::<Vec<_>>();
            if edges.is_empty() {
                break;
            }
            input.send_batch(&mut edges);
            input.advance_to(round);
            // Another worker may have fewer rounds: it closes its input then.
            worker.step_while(|| probe.less_than(&round.saturating_sub(ROUNDS - 1)));
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
    use crate::graphs::rmat;

    #[test]
    fn all_peers_find_the_same_and_write_it_down() {
        let graph = Arc::new(Graph::undirected("", &rmat(9, 4000, 42, [0.45, 0.22, 0.22])));
        for size in [3, 4] {
            let found = hand_count(&graph, size);
            assert!(found > 0);
            assert_eq!(hand_rows(&graph, size), found);
            for (workers, rows) in [(1, false), (2, false), (1, true), (2, true)] {
                for feed in [Feed::Rounds, Feed::Whole] {
                    assert_eq!(
                        on_timely(&graph, size, workers, rows, feed).1,
                        found,
                        "{size} {workers} {rows} {feed:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn common_vertices_are_found_by_merging_and_by_leaping() {
        let other: Vec<u32> = (0..500).map(|at| 3 * at).collect();
        for list in [vec![], vec![0], vec![1], vec![3, 4, 5, 6, 1497, 1498, 5000], (0..1500).collect::<Vec<u32>>()] {
            let expected: Vec<u32> = list.iter().copied().filter(|vertex| other.contains(vertex)).collect();
            let mut both = vec![9];
            common(&list, &other, &mut both);
            assert_eq!(both, expected);
        }
    }
}
