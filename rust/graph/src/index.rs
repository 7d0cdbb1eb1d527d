//! Relations over one domain, ready to be joined.
//!
//! Owns: how edges become an [`Index`]. Invariants: every relation is a set of edges over the same dense nodes; what a
//! relation says of self-loops and repeated edges ([`Loops`], [`Repeats`]) was applied. An oriented index numbers its nodes
//! by the orientation; `labels` leads back to the domain.

use std::collections::HashSet;

use crate::cliques::{self, Orientation};
use crate::csr::{Csr, Section};
use crate::domain::{Domain, Ranks, Texts, turned};
use crate::error::GraphError;
use crate::large::Shape;

/// What happens to edges from a node to itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Loops {
    /// They are edges like others.
    #[default]
    Keep,
    /// They are left out; their nodes stay.
    Drop,
    /// They are an error.
    Refuse,
}

/// What happens to edges that come more than once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Repeats {
    /// They count once.
    #[default]
    Drop,
    /// They are an error.
    Refuse,
}

/// A relation by name.
#[derive(Clone, Debug)]
pub struct Relation {
    /// As patterns call it.
    pub name: String,
    /// From sources to targets.
    pub forward: Csr,
    /// From targets to sources; not there when nobody asks for it.
    pub reverse: Option<Csr>,
    /// Nodes with an edge to themselves, ascending.
    pub loops: Section<u32>,
}

/// Relations over one domain.
#[derive(Clone, Debug)]
pub struct Index {
    /// What nodes are called.
    pub domain: Domain,
    /// Place in the domain by node; `None`: nodes are numbered as the domain is.
    pub labels: Option<Section<u32>>,
    /// In the order in which they were named.
    pub relations: Vec<Relation>,
}

impl Index {
    /// How many nodes there are.
    #[must_use]
    pub fn nodes(&self) -> usize {
        self.domain.len()
    }

    /// How many edges all relations have together.
    #[must_use]
    pub fn edges(&self) -> u64 {
        self.relations.iter().map(|relation| relation.forward.view().targets.len() as u64).sum()
    }

    /// Gives the pages of a mapped file back to the system; they come back when they are read. A process that has looked
    /// at a large index and goes on without it stays small.
    pub fn release(&self) {
        let forward = self.relations.iter().map(|relation| &relation.forward);
        forward.chain(self.relations.iter().filter_map(|relation| relation.reverse.as_ref())).for_each(|lists| {
            lists.offsets.release();
            lists.targets.release();
        });
    }

    /// Place of a node in the domain.
    #[must_use]
    pub fn place(&self, node: u32) -> u32 {
        self.labels.as_ref().map_or(node, |labels| labels.get()[node as usize])
    }
}

struct Raw {
    name: String,
    from: Vec<u64>,
    to: Vec<u64>,
    loops: Loops,
    repeats: Repeats,
}

/// Edges as dense nodes.
pub(crate) type Pairs = Vec<(u32, u32)>;
/// A relation with its edges.
type Ranked = (Raw, Pairs);
/// Asked between the steps of a build; its error ends it.
type GoOn<'a> = &'a dyn Fn() -> Result<(), GraphError>;

/// Collects edges.
pub struct Builder {
    signed: bool,
    texts: Option<Texts>,
    relations: Vec<Raw>,
}

impl Builder {
    /// Nodes are 64-bit numbers.
    #[must_use]
    pub fn numbers() -> Self {
        Self { signed: false, texts: None, relations: Vec::new() }
    }

    /// Nodes are signed 64-bit numbers.
    #[must_use]
    pub fn signed() -> Self {
        Self { signed: true, ..Self::numbers() }
    }

    /// Nodes are texts.
    #[must_use]
    pub fn texts() -> Self {
        Self { texts: Some(Texts::default()), ..Self::numbers() }
    }

    /// Says what happens to self-loops and repeated edges of a relation; it then exists, also without edges.
    pub fn relation(&mut self, name: &str, loops: Loops, repeats: Repeats) {
        let raw = self.raw(name);
        (raw.loops, raw.repeats) = (loops, repeats);
    }

    fn raw(&mut self, name: &str) -> &mut Raw {
        let at = self.relations.iter().position(|raw| raw.name == name).unwrap_or_else(|| {
            let (loops, repeats) = Default::default();
            self.relations.push(Raw { name: name.into(), from: Vec::new(), to: Vec::new(), loops, repeats });
            self.relations.len() - 1
        });
        &mut self.relations[at]
    }

    /// Adds edges between numbers.
    ///
    /// # Errors
    /// When the columns differ in length or nodes are something else.
    pub fn numbers_in(&mut self, name: &str, from: &[u64], to: &[u64]) -> Result<(), GraphError> {
        self.coded(name, from.iter().copied(), to.iter().copied(), false)
    }

    /// Adds edges between signed numbers.
    ///
    /// # Errors
    /// As [`Builder::numbers_in`].
    pub fn signed_in(&mut self, name: &str, from: &[i64], to: &[i64]) -> Result<(), GraphError> {
        self.coded(name, from.iter().map(|&id| turned(id)), to.iter().map(|&id| turned(id)), true)
    }

    fn coded(
        &mut self,
        name: &str,
        from: impl ExactSizeIterator<Item = u64>,
        to: impl ExactSizeIterator<Item = u64>,
        signed: bool,
    ) -> Result<(), GraphError> {
        if self.texts.is_some() || self.signed != signed {
            return Err(edges(name, "its nodes are numbers of another kind than those of the index".into()));
        }
        if from.len() != to.len() {
            return Err(edges(name, format!("{} sources, but {} targets", from.len(), to.len())));
        }
        let raw = self.raw(name);
        raw.from.extend(from);
        raw.to.extend(to);
        Ok(())
    }

    /// Adds an edge between texts.
    ///
    /// # Errors
    /// When nodes are numbers, or there are too many.
    pub fn text_in(&mut self, name: &str, from: &str, to: &str) -> Result<(), GraphError> {
        let Some(texts) = &mut self.texts else {
            return Err(edges(name, "its nodes are texts, but those of the index are numbers".into()));
        };
        let (from, to) = (u64::from(texts.number(from)?), u64::from(texts.number(to)?));
        let raw = self.raw(name);
        raw.from.push(from);
        raw.to.push(to);
        Ok(())
    }

    /// How many edges are held, and how many texts of how many bytes.
    pub(crate) fn held(&self) -> (usize, usize, usize) {
        let (texts, bytes) = self.texts.as_ref().map_or((0, 0), Texts::held);
        (self.relations.iter().map(|raw| raw.from.len()).sum(), texts, bytes)
    }

    /// The domain, and the edges of each relation as dense nodes, after what relations refuse.
    pub(crate) fn checked(self) -> Result<(Domain, Vec<Pairs>), GraphError> {
        let (domain, relations) = self.ranked(&|| Ok(()))?;
        let checked = relations.into_iter().map(|(raw, pairs)| check(&raw, &domain, &pairs).map(|()| pairs));
        let checked = checked.collect::<Result<Vec<_>, _>>()?;
        Ok((domain, checked))
    }

    /// Builds both directions of every relation.
    ///
    /// # Errors
    /// When there are too many nodes, or a self-loop or repeated edge that a relation refuses.
    pub fn finish(self) -> Result<Index, GraphError> {
        self.build(true, &|| Ok(()))
    }

    /// Builds the direction from sources to targets only, which is enough for cliques of directed edges.
    ///
    /// # Errors
    /// As [`Builder::finish`].
    pub fn finish_forward(self) -> Result<Index, GraphError> {
        self.build(false, &|| Ok(()))
    }

    /// Builds what `shape` says; the error of `go_on`, which is asked between the steps, ends it.
    pub(crate) fn finish_while(self, shape: Shape, go_on: GoOn<'_>) -> Result<Index, GraphError> {
        match shape {
            Shape::Both => self.build(true, go_on),
            Shape::Forward => self.build(false, go_on),
            Shape::Oriented(orientation) => self.oriented(orientation, go_on),
        }
    }

    fn build(self, both: bool, go_on: GoOn<'_>) -> Result<Index, GraphError> {
        let (domain, relations) = self.ranked(go_on)?;
        let nodes = domain.len();
        let built = relations.into_iter().map(|(raw, pairs)| {
            let drop = raw.loops == Loops::Drop;
            check(&raw, &domain, &pairs)?;
            go_on()?;
            let forward = Csr::new(nodes, pairs.iter().copied().filter(|(from, to)| !drop || from != to));
            std::mem::drop(pairs);
            go_on()?;
            let reverse = both.then(|| forward.reversed());
            go_on()?;
            let view = forward.view();
            let loops = (0..nodes as u32).filter(|&node| view.list(node).binary_search(&node).is_ok());
            let loops = if drop { Vec::new().into() } else { loops.collect::<Vec<_>>().into() };
            Ok(Relation { name: raw.name, forward, reverse, loops })
        });
        let relations = built.collect::<Result<Vec<_>, GraphError>>()?;
        Ok(Index { domain, labels: None, relations })
    }

    /// Builds the undirected graph of all relations' edges, oriented: each edge once, from the node that comes first by
    /// `orientation` to the other. Self-loops are dropped unless they are refused; an edge in the other direction, or in another
    /// relation, is a repeated one.
    ///
    /// # Errors
    /// As [`Builder::finish`].
    pub fn finish_oriented(self, orientation: Orientation) -> Result<Index, GraphError> {
        self.oriented(orientation, &|| Ok(()))
    }

    fn oriented(self, orientation: Orientation, go_on: GoOn<'_>) -> Result<Index, GraphError> {
        let (domain, relations) = self.ranked(go_on)?;
        let nodes = domain.len();
        let name = relations.first().map_or_else(|| "e".to_owned(), |(raw, _)| raw.name.clone());
        for (raw, pairs) in &relations {
            check_loops(raw, &domain, pairs)?;
        }
        check_undirected(&relations, &domain)?;
        let pairs = relations.iter().flat_map(|(_, pairs)| pairs.iter().copied()).filter(|(from, to)| from != to);
        let both = Csr::new(nodes, pairs.flat_map(|(from, to)| [(from, to), (to, from)]));
        drop(relations);
        go_on()?;
        let labels = cliques::ranked_while(both.view(), orientation, go_on)?;
        let mut ranks = vec![0_u32; nodes];
        for (rank, &node) in labels.iter().enumerate() {
            ranks[node as usize] = rank as u32;
        }
        go_on()?;
        let oriented = both.view().edges().map(|(from, to)| (ranks[from as usize], ranks[to as usize]));
        let forward = Csr::new(nodes, oriented.filter(|(from, to)| from < to));
        let relation = Relation { name, forward, reverse: None, loops: Vec::new().into() };
        Ok(Index { domain, labels: Some(labels.into()), relations: vec![relation] })
    }

    /// The domain, and each relation's edges as dense nodes.
    fn ranked(self, go_on: GoOn<'_>) -> Result<(Domain, Vec<Ranked>), GraphError> {
        let mut relations = self.relations;
        let dense: Dense;
        let domain = match self.texts {
            Some(texts) => {
                let (domain, ranks) = texts.finish();
                dense = Dense::Texts(ranks);
                domain
            }
            None => {
                let all = relations.iter().flat_map(|raw| raw.from.iter().chain(&raw.to)).copied();
                let ranks = Ranks::new(all)?;
                let sorted = ranks.sorted.clone();
                dense = Dense::Numbers(ranks);
                if self.signed { Domain::Signed(sorted.into()) } else { Domain::Numbers(sorted.into()) }
            }
        };
        let mut built = Vec::new();
        for mut raw in relations.drain(..) {
            go_on()?;
            let (from, to) = (std::mem::take(&mut raw.from), std::mem::take(&mut raw.to));
            let pairs = from.into_iter().zip(to).map(|(from, to)| (dense.of(from), dense.of(to))).collect();
            built.push((raw, pairs));
        }
        Ok((domain, built))
    }
}

/// Identifiers as collected to dense nodes.
enum Dense {
    Numbers(Ranks),
    Texts(Vec<u32>),
}

impl Dense {
    fn of(&self, id: u64) -> u32 {
        match self {
            Self::Numbers(ranks) => ranks.of(id),
            Self::Texts(ranks) => ranks[id as usize],
        }
    }
}

fn edges(relation: &str, problem: String) -> GraphError {
    GraphError::Edges { relation: relation.into(), problem }
}

/// Refuses what the relation does not want.
fn check(raw: &Raw, domain: &Domain, pairs: &[(u32, u32)]) -> Result<(), GraphError> {
    check_loops(raw, domain, pairs)?;
    if raw.repeats == Repeats::Refuse {
        let mut seen = HashSet::new();
        if let Some(&pair) = pairs.iter().find(|pair| !seen.insert(**pair)) {
            return Err(repeated(raw, domain, pair, ""));
        }
    }
    Ok(())
}

fn check_loops(raw: &Raw, domain: &Domain, pairs: &[(u32, u32)]) -> Result<(), GraphError> {
    if raw.loops == Loops::Refuse
        && let Some(&(node, _)) = pairs.iter().find(|(from, to)| from == to)
    {
        return Err(GraphError::SelfLoop { relation: raw.name.clone(), node: domain.show(node) });
    }
    Ok(())
}

/// Refuses an edge that has come before in any relation, in either direction, where its relation does not want it.
fn check_undirected(relations: &[Ranked], domain: &Domain) -> Result<(), GraphError> {
    if relations.iter().all(|(raw, _)| raw.repeats == Repeats::Drop) {
        return Ok(());
    }
    let mut seen = HashSet::new();
    for (raw, pairs) in relations {
        for &(from, to) in pairs {
            if !seen.insert((from.min(to), from.max(to))) && raw.repeats == Repeats::Refuse {
                let counting = " in the undirected graph of all relations";
                return Err(repeated(raw, domain, (from, to), counting));
            }
        }
    }
    Ok(())
}

fn repeated(raw: &Raw, domain: &Domain, pair: (u32, u32), counting: &'static str) -> GraphError {
    let (from, to) = (domain.show(pair.0), domain.show(pair.1));
    GraphError::Repeated { relation: raw.name.clone(), from, to, counting }
}
