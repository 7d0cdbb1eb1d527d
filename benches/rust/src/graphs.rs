//! The graphs of the benches of cliques, as the index of `penstock-graph` that is searched.
//!
//! R-MAT is counter based, so any language makes the same edges from the same numbers.

use std::path::Path;
use std::sync::Arc;

use penstock_graph::cliques::{self, Orientation};
use penstock_graph::csr::View;
use penstock_graph::{Builder, Index, Loops, Query, Repeats};

/// How likely the quadrants are of the graphs that the Faucet paper's figures are compared with.
pub const SKEWED: [f64; 3] = [0.57, 0.19, 0.19];

/// Distinct edges without self-loops, sorted by both ends.
#[derive(Clone, Debug)]
pub struct Graph {
    name: String,
    index: Arc<Index>,
}

impl Graph {
    /// Edges as they stand.
    ///
    /// # Panics
    /// When there are more nodes than an index has numbers for.
    #[must_use]
    pub fn directed(name: &str, edges: &[(u32, u32)]) -> Self {
        let index = builder(edges).finish_forward().expect("few nodes");
        Self { name: name.into(), index: Arc::new(index) }
    }

    /// Edges without direction, each turned to its end of higher degree. A clique of nodes is then one of edges.
    ///
    /// # Panics
    /// As [`Graph::directed`].
    #[must_use]
    pub fn undirected(name: &str, edges: &[(u32, u32)]) -> Self {
        let index = builder(edges).finish_oriented(Orientation::Degree).expect("few nodes");
        Self { name: name.into(), index: Arc::new(index) }
    }

    /// An undirected R-MAT graph of at most `2^scale` nodes from so many draws.
    #[must_use]
    pub fn rmat(scale: u32, draws: u64, seed: u64) -> Self {
        Self::undirected(&format!("R-MAT 2^{scale}"), &rmat(scale, draws, seed, SKEWED))
    }

    /// An undirected graph from an edge list: two numbers per line.
    ///
    /// # Errors
    /// When the file cannot be read, or a line is something else.
    pub fn read(path: &Path) -> Result<Self, String> {
        let told = |what: &str| format!("{}: {what}", path.display());
        let text = std::fs::read_to_string(path).map_err(|error| told(&error.to_string()))?;
        let edge = |(at, line): (usize, &str)| {
            let mut ends = line.split_whitespace().map(str::parse::<u32>);
            let (Some(Ok(from)), Some(Ok(to)), None) = (ends.next(), ends.next(), ends.next()) else {
                return Err(told(&format!("line {} is no edge: {line:?}", at + 1)));
            };
            Ok((from, to))
        };
        let edges = text.lines().enumerate().map(edge).collect::<Result<Vec<_>, _>>()?;
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        Ok(Self::undirected(&name, &edges))
    }

    /// What people call it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// For reading; take it out of loops.
    #[must_use]
    pub fn view(&self) -> View<'_> {
        self.index.relations[0].forward.view()
    }

    /// Where the edges of a vertex lead, ascending.
    #[must_use]
    pub fn neighbours(&self, vertex: u32) -> &[u32] {
        self.view().list(vertex)
    }

    /// Number of vertices that have edges.
    #[must_use]
    pub fn vertices(&self) -> u32 {
        self.view().nodes() as u32
    }

    /// Number of edges.
    #[must_use]
    pub fn edges(&self) -> usize {
        self.view().targets.len()
    }

    /// The search for cliques of `size` vertices.
    ///
    /// # Panics
    /// When that is no size of a clique.
    #[must_use]
    pub fn query(&self, size: usize) -> Query {
        let pattern = cliques::pattern("e", size).expect("a size");
        let order = pattern.variables.iter().map(String::as_str).collect::<Vec<_>>();
        Query::new(self.index.clone(), &pattern, Some(&order)).expect("a pattern over e")
    }

    /// Cliques of three or four vertices, by the hand-written loop.
    #[must_use]
    pub fn count(&self, size: usize) -> u64 {
        crate::clique_peers::hand_count(self, size)
    }
}

fn builder(edges: &[(u32, u32)]) -> Builder {
    let (from, to): (Vec<u64>, Vec<u64>) = edges.iter().map(|&(from, to)| (u64::from(from), u64::from(to))).unzip();
    let mut builder = Builder::numbers();
    builder.relation("e", Loops::Drop, Repeats::Drop);
    builder.numbers_in("e", &from, &to).expect("columns of one length");
    builder
}

/// The edges of an R-MAT graph without self-loops, repeats and all.
#[must_use]
pub fn rmat(scale: u32, draws: u64, seed: u64, [a, b, c]: [f64; 3]) -> Vec<(u32, u32)> {
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
    (0..draws).map(edge).filter(|(from, to)| from != to).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_generated_graph_is_the_one_that_is_known() {
        let graph = Graph::directed("", &rmat(14, 200_000, 42, [0.45, 0.22, 0.22]));
        assert_eq!((graph.edges(), graph.vertices()), (198_472, 15_622));
        assert_eq!((graph.count(3), graph.count(4)), (150_786, 61_074));
        let graph = Graph::undirected("", &rmat(14, 200_000, 42, [0.45, 0.22, 0.22]));
        assert_eq!((graph.count(3), graph.count(4)), (175_237, 83_574));
    }

    #[test]
    fn a_file_is_read_and_what_is_no_edge_is_told() {
        let path = std::env::temp_dir().join(format!("penstock-graphs-{}.txt", std::process::id()));
        std::fs::write(&path, "1\t2\n2\t1\n 3 3\n2 9\n1 9\n").unwrap();
        let graph = Graph::read(&path).unwrap();
        assert_eq!((graph.vertices(), graph.edges(), graph.count(3)), (4, 3, 1));
        for wrong in ["1 2\n1\n", "1 2\nx y\n", "1 2\n1 2 3\n"] {
            std::fs::write(&path, wrong).unwrap();
            assert!(Graph::read(&path).unwrap_err().contains("line 2 is no edge"));
        }
        std::fs::remove_file(&path).unwrap();
        assert!(Graph::read(&path).is_err());
    }
}
