//! Cliques as patterns, and the orientations that make undirected ones cheap.
//!
//! A clique of `k` nodes is the pattern with an edge from every node to every later one. On directed edges as they stand
//! its matches are the paper's self-join; on an oriented undirected graph each set of nodes matches once. With nodes
//! numbered by (degree, number), or by degeneracy, no node has more later neighbours than about the square root of twice
//! the edges, or than the degeneracy: hubs come last.

use crate::csr::View;
use crate::error::GraphError;
use crate::pattern::Pattern;

/// Which of two neighbours comes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Orientation {
    /// The one with fewer neighbours.
    #[default]
    Degree,
    /// The one that is taken first when always a node with the fewest remaining neighbours is taken.
    Degeneracy,
}

/// Least and most nodes of a clique.
pub const SIZES: std::ops::RangeInclusive<usize> = 2..=16;

/// The pattern of cliques of `size` nodes over `relation`; columns `a1` to `ak`, which is also the order to bind them in.
///
/// # Errors
/// When the size is outside [`SIZES`].
pub fn pattern(relation: &str, size: usize) -> Result<Pattern, GraphError> {
    if !SIZES.contains(&size) {
        return Err(GraphError::Argument { name: "size", value: size as u64, wanted: "a clique has 2 to 16 nodes" });
    }
    let names = (1..=size).map(|at| format!("a{at}")).collect::<Vec<_>>();
    let names = names.iter().map(String::as_str).collect::<Vec<_>>();
    let later = |from: usize| (from + 1..size).map(move |to| (from, to));
    let atoms = (0..size).flat_map(later).map(|(from, to)| (relation, names[from], names[to])).collect::<Vec<_>>();
    Ok(Pattern::new(&format!("cliques{size}"), &names, &atoms)?)
}

/// The nodes of a symmetric graph in the order of the orientation.
#[must_use]
pub fn ranked(graph: View<'_>, orientation: Orientation) -> Vec<u32> {
    let nodes = graph.nodes() as u32;
    match orientation {
        Orientation::Degree => {
            let mut order = (0..nodes).collect::<Vec<_>>();
            order.sort_unstable_by_key(|&node| (graph.degree(node), node));
            order
        }
        Orientation::Degeneracy => degeneracy(graph),
    }
}

/// Nodes in the order in which they are peeled off: always one of least remaining degree. Linear in nodes and edges.
fn degeneracy(graph: View<'_>) -> Vec<u32> {
    let nodes = graph.nodes();
    let mut degree = (0..nodes as u32).map(|node| graph.degree(node)).collect::<Vec<_>>();
    let most = degree.iter().copied().max().unwrap_or(0);
    // Nodes sorted by remaining degree; `begin[d]` is where those of degree d begin.
    let mut begin = vec![0_usize; most + 2];
    degree.iter().for_each(|&d| begin[d + 1] += 1);
    for d in 0..=most {
        begin[d + 1] += begin[d];
    }
    let (mut order, mut place, mut next) = (vec![0_u32; nodes], vec![0_usize; nodes], begin.clone());
    for node in 0..nodes {
        place[node] = next[degree[node]];
        order[place[node]] = node as u32;
        next[degree[node]] += 1;
    }
    for at in 0..nodes {
        let node = order[at];
        for &other in graph.list(node) {
            let (other, d) = (other as usize, degree[other as usize]);
            if d <= degree[node as usize] {
                continue; // taken already, or as low as nodes get from here on
            }
            // To the front of its degree, which then begins one later: it has one less.
            let first = begin[d].max(at + 1);
            let moved = order[first] as usize;
            order.swap(place[other], first);
            (place[moved], place[other]) = (place[other], first);
            begin[d] = first + 1;
            degree[other] = d - 1;
        }
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::csr::Csr;

    #[test]
    fn a_size_that_is_no_clique_is_refused() {
        for size in [0, 1, 17] {
            assert!(pattern("e", size).unwrap_err().to_string().contains("2 to 16"), "{size}");
        }
        assert_eq!(pattern("e", 4).unwrap().body.len(), 6);
    }

    /// Peels by the definition.
    fn naive(graph: View<'_>) -> usize {
        let mut left = (0..graph.nodes() as u32).collect::<Vec<_>>();
        let mut worst = 0;
        while !left.is_empty() {
            let degree = |node: u32| graph.list(node).iter().filter(|other| left.contains(other)).count();
            let (at, least) =
                left.iter().enumerate().map(|(at, &node)| (at, degree(node))).min_by_key(|x| x.1).unwrap();
            worst = worst.max(least);
            left.remove(at);
        }
        worst
    }

    #[test]
    fn degeneracy_leaves_no_node_with_more_later_neighbours_than_needed() {
        let mut seed = 7_u64;
        let mut random = |most: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % most
        };
        for _ in 0..200 {
            let nodes = 1 + random(24);
            let edges = (0..random(90)).map(|_| (random(nodes) as u32, random(nodes) as u32));
            let edges = edges.filter(|(a, b)| a != b).flat_map(|(a, b)| [(a, b), (b, a)]).collect::<Vec<_>>();
            let csr = Csr::new(nodes as usize, edges.iter().copied());
            let order = ranked(csr.view(), Orientation::Degeneracy);
            let rank = |node: u32| order.iter().position(|&other| other == node).expect("every node is there");
            let later = |node: u32| csr.view().list(node).iter().filter(|&&other| rank(other) > rank(node)).count();
            let worst = (0..nodes as u32).map(later).max().unwrap_or(0);
            assert_eq!(worst, naive(csr.view()));
        }
    }
}
