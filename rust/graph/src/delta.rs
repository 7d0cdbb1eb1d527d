//! Changes of edges to changes of matches: each epoch gives exactly the matches that came and those that went.
//!
//! For every atom of the pattern the changed edges of its relation bind two variables, and the others follow by GenericJoin
//! over the rest: atoms before it read their relation as it is after the change, atoms after it as it was before
//! (so that a match made of several changed edges is found once). An epoch is two such changes, first all edges that go, then
//! all that come: all matches of one change have one sign, nothing cancels, and nothing needs to be collected to
//! find that out.
//!
//! Invariants: relations are sets; an edge that comes though it is there, or goes though it is not, changes nothing; between
//! epochs matches given and taken add up to the matches of the edges that are there. Cost of an epoch: the lists of
//! nodes whose edges change are copied; then the search, which does not depend on the size of the graph otherwise.
//! Nodes stay numbered for as long as the object lives.

use std::collections::HashMap;

use crate::error::GraphError;
use crate::intersect;
use crate::pattern::{Pattern, PatternError};

/// Lists of neighbours of one direction, before and after the change under way.
#[derive(Debug, Default)]
struct Lists {
    lists: Vec<Vec<u32>>,
    changed: HashMap<u32, Vec<u32>>,
}

impl Lists {
    fn get(&self, node: u32, after: bool) -> &[u32] {
        match self.changed.get(&node).filter(|_| after) {
            Some(list) => list,
            None => self.lists.get(node as usize).map_or(&[], Vec::as_slice),
        }
    }

    fn change(&mut self, node: u32, other: u32, comes: bool) {
        let list =
            self.changed.entry(node).or_insert_with(|| self.lists.get(node as usize).cloned().unwrap_or_default());
        match (list.binary_search(&other), comes) {
            (Err(at), true) => list.insert(at, other),
            (Ok(at), false) => drop(list.remove(at)),
            _ => {}
        }
    }

    fn settle(&mut self) {
        for (node, list) in self.changed.drain() {
            if self.lists.len() <= node as usize {
                self.lists.resize_with(node as usize + 1, Vec::new);
            }
            self.lists[node as usize] = list;
        }
    }
}

#[derive(Debug, Default)]
struct Relation {
    name: String,
    forward: Lists,
    reverse: Lists,
}

/// How the rest is bound once an atom is.
#[derive(Debug)]
struct Plan {
    /// Atoms that the two variables decide.
    checks: Vec<usize>,
    steps: Vec<Step>,
}

#[derive(Debug)]
struct Step {
    variable: usize,
    /// Atom, its bound variable, and whether its relation is read backwards.
    voters: Vec<(usize, usize, bool)>,
    /// Atoms from the variable to itself.
    loops: Vec<usize>,
}

/// Gets a match, as nodes by variable, and whether it came (else it went).
pub type Each<'a> = &'a mut dyn FnMut(&[u32], bool);

/// A pattern over edges that change.
#[derive(Debug)]
pub struct Deltas {
    pattern: Pattern,
    /// Relation of each atom.
    of: Vec<usize>,
    relations: Vec<Relation>,
    plans: Vec<Plan>,
    /// What this epoch changes, by relation and edge.
    pending: HashMap<(usize, u32, u32), i64>,
}

impl Deltas {
    /// No edges yet.
    #[must_use]
    pub fn new(pattern: &Pattern) -> Self {
        let names = pattern.relations();
        let of = pattern.body.iter().map(|atom| names.iter().position(|name| *name == atom.relation));
        let of = of.map(|at| at.expect("it is one of them")).collect();
        let relations = names.iter().map(|name| Relation { name: (*name).to_owned(), ..Relation::default() }).collect();
        let plans = (0..pattern.body.len()).map(|atom| plan(pattern, atom)).collect();
        Self { pattern: pattern.clone(), of, relations, plans, pending: HashMap::new() }
    }

    /// What is looked for.
    #[must_use]
    pub fn pattern(&self) -> &Pattern {
        &self.pattern
    }

    /// Notes that an edge comes (`times` above 0) or goes (below) in the epoch under way; what comes and goes in one epoch
    /// adds up.
    ///
    /// # Errors
    /// [`PatternError::UnknownRelation`].
    pub fn change(&mut self, relation: &str, from: u32, to: u32, times: i64) -> Result<(), GraphError> {
        let Some(at) = self.relations.iter().position(|known| known.name == relation) else {
            let known = self.relations.iter().map(|known| known.name.as_str()).collect::<Vec<_>>().join(", ");
            return Err(PatternError::UnknownRelation { place: 0, relation: relation.into(), known }.into());
        };
        let sum = self.pending.entry((at, from, to)).or_default();
        *sum = sum.saturating_add(times);
        Ok(())
    }

    /// Forgets the changes of the epoch under way.
    pub fn discard(&mut self) {
        self.pending.clear();
    }

    /// Ends the epoch: `each` gets every match that went, then every match that came, once each.
    pub fn commit(&mut self, each: Each<'_>) {
        let mut pending = self.pending.drain().filter(|(_, times)| *times != 0).collect::<Vec<_>>();
        pending.sort_unstable(); // so that the order of matches does not depend on the hash
        for comes in [false, true] {
            let mut edges = vec![Vec::new(); self.relations.len()];
            for &((at, from, to), times) in &pending {
                let relation = &mut self.relations[at];
                let there = relation.forward.get(from, false).binary_search(&to).is_ok();
                if (times > 0) == comes && there != comes {
                    edges[at].push((from, to));
                    relation.forward.change(from, to, comes);
                    relation.reverse.change(to, from, comes);
                }
            }
            let mut row = vec![0; self.pattern.variables.len()];
            for (atom, plan) in self.plans.iter().enumerate() {
                let (from, to) = (self.pattern.body[atom].from, self.pattern.body[atom].to);
                for &(begin, end) in &edges[self.of[atom]] {
                    if from == to && begin != end {
                        continue;
                    }
                    (row[from], row[to]) = (begin, end);
                    if plan.checks.iter().all(|&other| self.holds(other, atom, &row)) {
                        self.extend(atom, &plan.steps, &mut row, &mut |row| each(row, comes));
                    }
                }
            }
            for relation in &mut self.relations {
                relation.forward.settle();
                relation.reverse.settle();
            }
        }
    }

    /// The list of an atom's relation, as it is for a search that starts at atom `start`.
    fn list(&self, atom: usize, start: usize, node: u32, backwards: bool) -> &[u32] {
        let relation = &self.relations[self.of[atom]];
        let lists = if backwards { &relation.reverse } else { &relation.forward };
        lists.get(node, atom < start)
    }

    fn holds(&self, atom: usize, start: usize, row: &[u32]) -> bool {
        let (from, to) = (self.pattern.body[atom].from, self.pattern.body[atom].to);
        self.list(atom, start, row[from], false).binary_search(&row[to]).is_ok()
    }

    fn extend(&self, start: usize, steps: &[Step], row: &mut Vec<u32>, each: &mut dyn FnMut(&[u32])) {
        let Some((step, rest)) = steps.split_first() else { return each(row) };
        let mut lists = step.voters.iter().map(|&(atom, bound, back)| self.list(atom, start, row[bound], back));
        let mut lists = lists.by_ref().collect::<Vec<_>>();
        lists.sort_by_key(|list| list.len());
        let mut candidates = lists[0].to_vec();
        lists[1..].iter().for_each(|list| intersect::retain(&mut candidates, list));
        for node in candidates {
            row[step.variable] = node;
            if step.loops.iter().all(|&atom| self.holds(atom, start, row)) {
                self.extend(start, rest, row, each);
            }
        }
    }
}

/// The order after an atom: always the variable that most atoms join to those that are bound.
fn plan(pattern: &Pattern, start: usize) -> Plan {
    let first = &pattern.body[start];
    let mut bound = vec![first.from, first.to];
    let inside = |atom: usize, bound: &[usize]| {
        bound.contains(&pattern.body[atom].from) && bound.contains(&pattern.body[atom].to)
    };
    let atoms = || (0..pattern.body.len()).filter(|atom| *atom != start);
    let checks = atoms().filter(|&atom| inside(atom, &bound)).collect();
    let mut steps = Vec::new();
    loop {
        let voters = |variable: usize| {
            let joins = |atom: usize| {
                let (from, to) = (pattern.body[atom].from, pattern.body[atom].to);
                match (bound.contains(&from), bound.contains(&to)) {
                    (true, false) if to == variable => Some((atom, from, false)),
                    (false, true) if from == variable => Some((atom, to, true)),
                    _ => None,
                }
            };
            atoms().filter_map(joins).collect::<Vec<_>>()
        };
        let open = (0..pattern.variables.len()).filter(|variable| !bound.contains(variable));
        let best = open.map(|variable| (variable, voters(variable))).max_by_key(|(_, voters)| voters.len());
        let Some((variable, voters)) = best else { return Plan { checks, steps } };
        let on_itself = |&atom: &usize| pattern.body[atom].from == variable && pattern.body[atom].to == variable;
        steps.push(Step { variable, voters, loops: atoms().filter(on_itself).collect() });
        bound.push(variable);
    }
}
