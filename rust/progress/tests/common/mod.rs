//! Seeded random numbers, times and dataflow graphs.

#![allow(dead_code, unreachable_pub, reason = "each test binary uses its part")]

use penstock_progress::nest::Nest;
use penstock_progress::{
    Antichain, FlowSummary, FlowTime, GraphBuilder, GraphError, Location, Product, Source, Target, Timestamp, Tracker,
};

/// SplitMix64.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    pub fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }
}

/// Times and summaries in a small space, so that they collide.
pub trait SmallTime: Timestamp {
    fn small(random: &mut Random) -> Self;
    fn summary(random: &mut Random, advancing: bool) -> Self::Summary;
}

impl SmallTime for u64 {
    fn small(random: &mut Random) -> Self {
        random.next() % 6
    }
    fn summary(random: &mut Random, advancing: bool) -> u64 {
        u64::from(advancing) + random.next() % 2
    }
}

impl SmallTime for FlowTime {
    fn small(random: &mut Random) -> Self {
        FlowTime::new(random.next() % 3, (random.next() % 4) as u32)
    }
    fn summary(random: &mut Random, advancing: bool) -> FlowSummary {
        match random.below(3) + usize::from(advancing) {
            0 | 1 => FlowSummary::new(0, u32::from(advancing)),
            2 => FlowSummary::new(0, 2),
            _ => FlowSummary::new(1, (random.next() % 2) as u32),
        }
    }
}

impl<A: SmallTime, B: SmallTime> SmallTime for Product<A, B> {
    fn small(random: &mut Random) -> Self {
        Product::new(A::small(random), B::small(random))
    }
    fn summary(random: &mut Random, advancing: bool) -> Self::Summary {
        let outer = random.chance(50);
        Product::new(A::summary(random, advancing && outer), B::summary(random, advancing && !outer))
    }
}

/// Of up to three scopes; an advancing summary advances one of them.
impl<const ODD: bool> SmallTime for Nest<ODD> {
    fn small(random: &mut Random) -> Self {
        Nest::from((0..random.below(4)).map(|_| random.next() % 3).collect::<Vec<_>>())
    }
    fn summary(random: &mut Random, advancing: bool) -> Self {
        let mut coordinates = vec![0; 1 + random.below(3)];
        let chosen = random.below(coordinates.len());
        coordinates[chosen] = u64::from(advancing) + random.next() % 2;
        Nest::from(coordinates)
    }
}

/// Summaries of a node by input and output.
pub type Summaries<T> = Vec<Vec<Antichain<<T as Timestamp>::Summary>>>;

/// A dataflow graph as plain data. Nodes are numbered 0, 10, 20.., so that a position is no node number.
pub struct Graph<T: Timestamp> {
    pub nodes: Vec<(usize, usize, Summaries<T>)>,
    pub edges: Vec<(Source, Target)>,
}

impl<T: SmallTime> Graph<T> {
    /// A graph with cycles, all of them through nodes that advance time; with `reckless`, any.
    pub fn random(random: &mut Random, reckless: bool) -> Self {
        let count = 1 + random.below(5);
        let mut nodes = Vec::new();
        let mut advances = Vec::new();
        for _ in 0..count {
            let (inputs, outputs) = (random.below(4), random.below(3) + 1);
            let advancing = random.chance(40);
            let mut summary = vec![vec![Antichain::new(); outputs]; inputs];
            for antichain in summary.iter_mut().flatten() {
                for _ in 0..random.below(3) {
                    let advancing = advancing || (reckless && random.chance(70));
                    antichain.insert(T::summary(random, advancing));
                }
            }
            nodes.push((inputs, outputs, summary));
            advances.push(advancing);
        }
        let mut edges = Vec::new();
        for _ in 0..random.below(4 * count) {
            let (from, to) = (random.below(count), random.below(count));
            if nodes[to].0 > 0 && (from < to || advances[from] || reckless) {
                let source = Source::new(10 * from, random.below(nodes[from].1));
                edges.push((source, Target::new(10 * to, random.below(nodes[to].0))));
            }
        }
        Self { nodes, edges }
    }

    pub fn build(&self) -> Result<Tracker<T>, GraphError> {
        let mut builder = GraphBuilder::new();
        for (at, (inputs, outputs, summary)) in self.nodes.iter().enumerate() {
            builder.add_node(10 * at, *inputs, *outputs, summary.clone());
        }
        for (from, to) in &self.edges {
            builder.add_edge(*from, *to);
        }
        builder.build()
    }

    pub fn sources(&self) -> Vec<Source> {
        let ports = |(at, node): (usize, &(usize, usize, _))| (0..node.1).map(move |port| Source::new(10 * at, port));
        self.nodes.iter().enumerate().flat_map(ports).collect()
    }

    pub fn targets(&self) -> Vec<Target> {
        let ports = |(at, node): (usize, &(usize, usize, _))| (0..node.0).map(move |port| Target::new(10 * at, port));
        self.nodes.iter().enumerate().flat_map(ports).collect()
    }

    pub fn locations(&self) -> Vec<Location> {
        let sources = self.sources().into_iter().map(Location::from);
        sources.chain(self.targets().into_iter().map(Location::from)).collect()
    }

    /// Every step of a path: start, end, summary.
    pub fn paths(&self) -> Vec<(Location, Location, T::Summary)> {
        let mut paths = Vec::new();
        for (from, to) in &self.edges {
            paths.push(((*from).into(), (*to).into(), T::Summary::default()));
        }
        for (at, (_, _, summary)) in self.nodes.iter().enumerate() {
            for (input, row) in summary.iter().enumerate() {
                for (output, antichain) in row.iter().enumerate() {
                    for summary in antichain.elements() {
                        let from = Target::new(10 * at, input).into();
                        paths.push((from, Source::new(10 * at, output).into(), summary.clone()));
                    }
                }
            }
        }
        paths
    }
}
