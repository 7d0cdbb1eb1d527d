//! A pattern made ready for one index: at each level, who proposes and who votes.
//!
//! Invariants: at level 0 every atom with the first attribute votes by the nodes that it has edges for; at each later level
//! exactly the atoms whose other attribute is bound vote (F-11), so every level has a voter; an atom from a variable to
//! itself votes once, by its self-loops. Where the voters of an earlier level all vote again (as in cliques), the list that
//! they agreed on stands for them: [`Level::base`]. An oriented index, whose matches are sets, is asked for cliques only.
//!
//! Departure: the list that stands for its voters, which counts use as bits.

use std::sync::Arc;

use crate::cliques;
use crate::csr::View;
use crate::error::GraphError;
use crate::index::{Index, Relation};
use crate::intersect;
use crate::order;
use crate::pattern::{Pattern, PatternError};

/// Votes by the neighbours of a bound node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Voter {
    /// Which list of [`Query::views`].
    pub list: usize,
    /// Level of the bound node.
    pub position: usize,
}

/// How one attribute is bound.
#[derive(Clone, Debug, Default)]
pub struct Level {
    /// Who votes; each list once.
    pub voters: Vec<Voter>,
    /// An earlier level whose candidates stand for its voters, which are left out of `voters`.
    pub base: Option<usize>,
    /// Nodes that must have self-loops; ascending.
    pub looped: Option<Arc<Vec<u32>>>,
}

/// A pattern ready to be searched for. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Query {
    index: Arc<Index>,
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    names: Vec<String>,
    /// Level by column of the result.
    head: Vec<usize>,
    order: Vec<String>,
    /// Relation, and whether it is read backwards.
    lists: Vec<(usize, bool)>,
    levels: Vec<Level>,
    roots: Vec<u32>,
    clique: bool,
}

impl Query {
    /// Checks the pattern against the relations of the index and fixes the order of its attributes.
    ///
    /// # Errors
    /// [`PatternError::UnknownRelation`]; [`PatternError::NoClique`] where the index is oriented; [`GraphError::Order`] for an
    /// order that cannot be used.
    pub fn new(index: Arc<Index>, pattern: &Pattern, order: Option<&[&str]>) -> Result<Self, GraphError> {
        for atom in &pattern.body {
            if !index.relations.iter().any(|relation| relation.name == atom.relation) {
                let known = index.relations.iter().map(|relation| relation.name.as_str()).collect::<Vec<_>>();
                let known = if known.is_empty() { "none".into() } else { known.join(", ") };
                let (place, relation) = (atom.place, atom.relation.clone());
                return Err(PatternError::UnknownRelation { place, relation, known }.into());
            }
        }
        if index.labels.is_some() {
            cliques::check(pattern)?;
        }
        let order = order::choose(&index, pattern, order)?;
        let level_of = |variable: usize| order.iter().position(|&at| at == variable).expect("all are ordered");
        let mut lists: Vec<(usize, bool)> = Vec::new();
        let mut levels = vec![Level::default(); order.len()];
        let mut roots: Option<Vec<u32>> = None;
        let vote = |list: &[u32], so_far: Option<Vec<u32>>| {
            let Some(so_far) = so_far else { return list.to_vec() };
            let mut both = Vec::new();
            intersect::intersect(&so_far, list, &mut both);
            both
        };
        for atom in &pattern.body {
            let at = index.relations.iter().position(|relation| relation.name == atom.relation).expect("checked");
            let relation = &index.relations[at];
            let (from, to) = (level_of(atom.from), level_of(atom.to));
            if from == to {
                let both = vote(relation.loops.get(), levels[from].looped.as_deref().cloned());
                levels[from].looped = Some(Arc::new(both));
                continue;
            }
            let (level, voter) = if from < to { (to, from) } else { (from, to) };
            let key = (at, from > to);
            if key.1 && relation.reverse.is_none() {
                let order = order.iter().map(|&at| pattern.variables[at].clone()).collect();
                let problem =
                    format!("it needs {:?} backwards, and the index has only the other direction", relation.name);
                return Err(GraphError::Order { order, problem });
            }
            let list = lists.iter().position(|known| *known == key).unwrap_or_else(|| {
                lists.push(key);
                lists.len() - 1
            });
            let voter = Voter { list, position: voter };
            if !levels[level].voters.contains(&voter) {
                levels[level].voters.push(voter);
            }
            if voter.position == 0 {
                roots = Some(vote(&sources(relation, key.1), roots));
            }
        }
        let clique = is_clique(&levels);
        if let Some(looped) = levels[0].looped.take() {
            roots = Some(vote(&looped, roots));
        }
        reuse(&mut levels);
        let inner = Inner {
            names: pattern.columns().map(String::from).collect(),
            head: pattern.head.iter().map(|&variable| level_of(variable)).collect(),
            order: order.iter().map(|&at| pattern.variables[at].clone()).collect(),
            lists,
            levels,
            roots: roots.expect("the first attribute is in an atom"),
            clique,
        };
        Ok(Self { index, inner: Arc::new(inner) })
    }

    /// What is searched.
    #[must_use]
    pub fn index(&self) -> &Arc<Index> {
        &self.index
    }

    /// Names of the columns of the result.
    #[must_use]
    pub fn columns(&self) -> &[String] {
        &self.inner.names
    }

    /// Level by column of the result.
    #[must_use]
    pub fn head(&self) -> &[usize] {
        &self.inner.head
    }

    /// The attributes in the order in which they are bound.
    #[must_use]
    pub fn order(&self) -> &[String] {
        &self.inner.order
    }

    /// How each attribute is bound.
    #[must_use]
    pub fn levels(&self) -> &[Level] {
        &self.inner.levels
    }

    /// The nodes that the first attribute may be, ascending.
    #[must_use]
    pub fn roots(&self) -> &[u32] {
        &self.inner.roots
    }

    /// Whether each level's voters are all earlier nodes' lists of one direction of one relation.
    #[must_use]
    pub fn is_clique(&self) -> bool {
        self.inner.clique
    }

    /// The lists that voters read, for as long as the index is held.
    #[must_use]
    pub fn views(&self) -> Vec<View<'_>> {
        let view = |&(relation, backwards): &(usize, bool)| {
            let relation = &self.index.relations[relation];
            match (&relation.reverse, backwards) {
                (Some(reverse), true) => reverse.view(),
                _ => relation.forward.view(),
            }
        };
        self.inner.lists.iter().map(view).collect()
    }

    /// The shortest list that proposes the second attribute for a root, and which voter's it is.
    #[must_use]
    pub fn proposer<'a>(&self, views: &[View<'a>], root: u32) -> (usize, &'a [u32]) {
        let lists = self.inner.levels[1].voters.iter().map(|voter| views[voter.list].list(root));
        lists.enumerate().min_by_key(|(_, list)| list.len()).expect("every level has a voter")
    }
}

/// Nodes with a neighbour in that direction.
fn sources(relation: &Relation, backwards: bool) -> Vec<u32> {
    let csr = if backwards { relation.reverse.as_ref().expect("checked") } else { &relation.forward };
    let view = csr.view();
    (0..view.nodes() as u32).filter(|&node| view.degree(node) > 0).collect()
}

fn is_clique(levels: &[Level]) -> bool {
    levels.len() >= 2
        && levels.iter().enumerate().all(|(at, level)| {
            level.looped.is_none() && level.voters.len() == at && level.voters.iter().all(|voter| voter.list == 0)
        })
}

/// Lets candidates of earlier levels stand for voters. Not those of level 1, which a unit of work cuts.
fn reuse(levels: &mut [Level]) {
    let votes = levels.iter().map(|level| level.voters.clone()).collect::<Vec<_>>();
    for at in 3..levels.len() {
        let fits = |&earlier: &usize| {
            votes[earlier].len() >= 2
                && levels[earlier].looped.is_none()
                && votes[earlier].iter().all(|voter| votes[at].contains(voter))
        };
        let Some(base) = (2..at).filter(fits).max_by_key(|&earlier| votes[earlier].len()) else { continue };
        levels[at].base = Some(base);
        levels[at].voters.retain(|voter| !votes[base].contains(voter));
    }
}
