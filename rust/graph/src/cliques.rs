//! Cliques as patterns, and the orientations that make undirected ones cheap.
//!
//! A clique of `k` nodes is the pattern with an edge from every node to every later one. On directed edges as they stand
//! its matches are the paper's self-join; on an oriented undirected graph each set of nodes matches once. With nodes
//! numbered by (degree, number), or by degeneracy, no node has more later neighbours than about the square root of twice
//! the edges, or than the degeneracy: hubs come last.

use std::convert::Infallible;

use crate::csr::View;
use crate::error::GraphError;
use crate::pattern::{Pattern, PatternError};

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

/// Refuses what an oriented index has no answer for: whatever is no clique, or does not give all its nodes. Of anything else
/// the orientation, which says nothing about the graph, would choose the matches.
///
/// # Errors
/// [`PatternError::NoClique`].
pub(crate) fn check(pattern: &Pattern) -> Result<(), PatternError> {
    let refuse = |place: usize, problem: String| Err(PatternError::NoClique { place, problem });
    let (variables, count) = (&pattern.variables, pattern.variables.len());
    let mut joined = vec![false; count * count];
    for atom in &pattern.body {
        let shown = format!("{}({}, {})", atom.relation, variables[atom.from], variables[atom.to]);
        if atom.relation != pattern.body[0].relation {
            return refuse(atom.place, format!("{shown} is not of the relation of the first atom"));
        }
        if atom.from == atom.to {
            return refuse(atom.place, format!("{shown} asks for a self-loop"));
        }
        if joined[atom.to * count + atom.from] {
            return refuse(atom.place, format!("{shown} joins what another atom joins the other way round"));
        }
        joined[atom.from * count + atom.to] = true;
    }
    let mut pairs = (0..count).flat_map(|one| (one + 1..count).map(move |other| (one, other)));
    if let Some((one, other)) = pairs.find(|&(one, other)| !joined[one * count + other] && !joined[other * count + one])
    {
        return refuse(0, format!("nothing joins {:?} and {:?}", variables[one], variables[other]));
    }
    // With every two joined once there is an order exactly when no two lead to equally many.
    let mut later = joined.chunks(count).map(|to| to.iter().filter(|to| **to).count()).collect::<Vec<_>>();
    later.sort_unstable();
    if later.windows(2).any(|pair| pair[0] == pair[1]) {
        return refuse(0, "its atoms lead in a circle".into());
    }
    match (0..count).find(|variable| !pattern.head.contains(variable)) {
        Some(left_out) => refuse(0, format!("the head leaves out {:?}", variables[left_out])),
        None => Ok(()),
    }
}

/// The nodes of a symmetric graph in the order of the orientation.
#[must_use]
pub fn ranked(graph: View<'_>, orientation: Orientation) -> Vec<u32> {
    let Ok(order) = ranked_while(graph, orientation, &|| Ok::<_, Infallible>(()));
    order
}

/// The same; `go_on` is asked now and then, and ends it by its error.
pub(crate) fn ranked_while<E>(
    graph: View<'_>,
    orientation: Orientation,
    go_on: &dyn Fn() -> Result<(), E>,
) -> Result<Vec<u32>, E> {
    let nodes = graph.nodes() as u32;
    match orientation {
        Orientation::Degree => {
            let mut order = (0..nodes).collect::<Vec<_>>();
            order.sort_unstable_by_key(|&node| (graph.degree(node), node));
            Ok(order)
        }
        Orientation::Degeneracy => degeneracy(graph, go_on),
    }
}

/// Nodes that are peeled off before `go_on` is asked again.
const PEELED: usize = 1 << 16;

/// Nodes in the order in which they are peeled off: always one of least remaining degree. Linear in nodes and edges.
fn degeneracy<E>(graph: View<'_>, go_on: &dyn Fn() -> Result<(), E>) -> Result<Vec<u32>, E> {
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
        if at % PEELED == 0 {
            go_on()?;
        }
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
    Ok(order)
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
