//! Changes of edges to changes of matches: each epoch gives exactly the matches that came and those that went.
//!
//! For every atom of the pattern the changed edges of its relation bind two variables, and the others follow by GenericJoin
//! over the rest: atoms before it read their relation as it is after the change, atoms after it as it was before
//! (so that a match made of several changed edges is found once). An epoch is two such changes, first all edges that go, then
//! all that come: all matches of one change have one sign, nothing cancels, and nothing needs to be collected to
//! find that out.
//!
//! Invariants: relations are sets; an edge that comes though it is there, or goes though it is not, changes nothing; between
//! epochs matches given and taken add up to the matches of the edges that are there. What an epoch changed is held beside the
//! edges until the next one begins, so its matches are found as often as somebody asks, by a [`Cursor`] that stops wherever
//! its caller has enough: memory holds the edges, the lists of nodes whose edges change, and one list per level. Cost of an
//! epoch: those lists are made anew; then the search, which does not depend on the size of the graph otherwise.
//! Nodes stay numbered for as long as the object lives: one that has no edge any more takes two empty lists per relation.
//!
//! Departures: deletions before insertions; what an epoch changed is held until the next, so a sink that failed gets
//! its matches again.

use std::collections::HashMap;

use crate::error::GraphError;
use crate::intersect;
use crate::pattern::{Pattern, PatternError};

/// Lists of neighbours of one direction: as they were, after edges have gone, and after others have come.
#[derive(Debug, Default)]
struct Lists {
    lists: Vec<Vec<u32>>,
    changed: [HashMap<u32, Vec<u32>>; 2],
}

impl Lists {
    /// As it is after so many (0 to 2) of the epoch's two changes.
    fn get(&self, node: u32, changes: usize) -> &[u32] {
        let changed = self.changed[..changes].iter().rev().find_map(|changed| changed.get(&node));
        let list = changed.or_else(|| self.lists.get(node as usize));
        list.map_or(&[], Vec::as_slice)
    }

    /// Makes the lists after a change; its edges ascend, and each changes something.
    fn change(&mut self, change: usize, edges: &[(u32, u32)]) {
        for group in edges.chunk_by(|one, other| one.0 == other.0) {
            let node = group[0].0;
            let before = self.get(node, change);
            // Exactly: edges that go are there, and those that come are not. Lists that were long do not stay large.
            let length = if change == GOES { before.len() - group.len() } else { before.len() + group.len() };
            let mut after = Vec::with_capacity(length);
            if change == GOES {
                let mut goes = group.iter().peekable();
                for &other in before {
                    if goes.next_if(|edge| edge.1 == other).is_none() {
                        after.push(other);
                    }
                }
            } else {
                let mut there = before.iter().peekable();
                for &(_, comes) in group {
                    while let Some(&other) = there.next_if(|other| **other < comes) {
                        after.push(other);
                    }
                    after.push(comes);
                }
                after.extend(there);
            }
            self.changed[change].insert(node, after);
        }
    }

    /// Makes what the epoch changed the lists as they were.
    fn settle(&mut self) {
        for changed in &mut self.changed {
            for (node, list) in changed.drain() {
                if self.lists.len() <= node as usize {
                    self.lists.resize_with(node as usize + 1, Vec::new);
                }
                self.lists[node as usize] = list;
            }
            changed.shrink_to(KEPT);
        }
    }
}

/// What tables keep room for between epochs; one large epoch does not stay in memory.
const KEPT: usize = 1024;

/// The first change of an epoch, and the second.
const GOES: usize = 0;
const COMES: usize = 1;

#[derive(Debug, Default)]
struct Relation {
    name: String,
    forward: Lists,
    reverse: Lists,
    /// The edges of each change, ascending.
    edges: [Vec<(u32, u32)>; 2],
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

/// How far somebody is with the matches of an epoch.
#[derive(Clone, Debug)]
pub struct Cursor {
    epoch: u64,
    change: usize,
    atom: usize,
    edge: usize,
    row: Vec<u32>,
    /// Candidates of each step that is under way, and how many are behind.
    stack: Vec<(Vec<u32>, usize)>,
}

/// A pattern over edges that change.
#[derive(Debug)]
pub struct Deltas {
    pattern: Pattern,
    /// Relation of each atom.
    of: Vec<usize>,
    relations: Vec<Relation>,
    plans: Vec<Plan>,
    /// What the epoch to come changes, by relation and edge.
    pending: HashMap<(usize, u32, u32), i64>,
    epoch: u64,
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
        Self { pattern: pattern.clone(), of, relations, plans, pending: HashMap::new(), epoch: 0 }
    }

    /// What is looked for.
    #[must_use]
    pub fn pattern(&self) -> &Pattern {
        &self.pattern
    }

    /// Notes that an edge comes (`times` above 0) or goes (below) in the epoch to come; what comes and goes in one epoch
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

    /// Forgets what was noted of the epoch to come.
    pub fn discard(&mut self) {
        self.pending.clear();
        self.pending.shrink_to(KEPT);
    }

    /// Begins the epoch of what was noted; the one before is over, and cursors of it are of no use.
    pub fn begin(&mut self) {
        let mut edges = vec![[Vec::new(), Vec::new()]; self.relations.len()];
        for relation in &mut self.relations {
            relation.forward.settle();
            relation.reverse.settle();
        }
        for ((at, from, to), times) in self.pending.drain() {
            let there = self.relations[at].forward.get(from, 0).binary_search(&to).is_ok();
            match times {
                times if times > 0 && !there => edges[at][COMES].push((from, to)),
                times if times < 0 && there => edges[at][GOES].push((from, to)),
                _ => {}
            }
        }
        self.pending.shrink_to(KEPT);
        for (relation, mut edges) in self.relations.iter_mut().zip(edges) {
            for change in [GOES, COMES] {
                edges[change].sort_unstable();
                relation.forward.change(change, &edges[change]);
                let mut back = edges[change].iter().map(|&(from, to)| (to, from)).collect::<Vec<_>>();
                back.sort_unstable();
                relation.reverse.change(change, &back);
            }
            relation.edges = edges;
        }
        self.epoch += 1;
    }

    /// Before the first match of the epoch.
    #[must_use]
    pub fn cursor(&self) -> Cursor {
        let row = vec![0; self.pattern.variables.len()];
        Cursor { epoch: self.epoch, change: GOES, atom: 0, edge: 0, row, stack: Vec::new() }
    }

    /// Gives the next matches of the epoch, at most `most`, and looks at no more than `steps` nodes for them. Whether there
    /// may be more. Those that went come first; none comes twice.
    ///
    /// # Errors
    /// [`GraphError::Over`] when another epoch has begun.
    pub fn next(&self, at: &mut Cursor, most: usize, steps: usize, each: Each<'_>) -> Result<bool, GraphError> {
        if at.epoch != self.epoch {
            return Err(GraphError::Over);
        }
        let (mut most, mut steps) = (most, steps);
        while at.change <= COMES {
            if most == 0 || steps == 0 {
                return Ok(true);
            }
            steps -= 1;
            let Some(plan) = self.plans.get(at.atom) else {
                (at.change, at.atom, at.edge) = (at.change + 1, 0, 0);
                continue;
            };
            let depth = at.stack.len();
            let found = if let Some((candidates, behind)) = at.stack.last_mut() {
                let Some(&node) = candidates.get(*behind) else {
                    at.stack.pop();
                    continue;
                };
                *behind += 1;
                let step = &plan.steps[depth - 1];
                at.row[step.variable] = node;
                step.loops.iter().all(|&atom| self.holds(atom, at))
            } else {
                let Some(&(from, to)) = self.relations[self.of[at.atom]].edges[at.change].get(at.edge) else {
                    (at.atom, at.edge) = (at.atom + 1, 0);
                    continue;
                };
                at.edge += 1;
                let atom = &self.pattern.body[at.atom];
                (at.row[atom.from], at.row[atom.to]) = (from, to);
                (atom.from != atom.to || from == to) && plan.checks.iter().all(|&atom| self.holds(atom, at))
            };
            match plan.steps.get(depth) {
                _ if !found => {}
                Some(step) => at.stack.push((self.candidates(step, at), 0)),
                None => {
                    each(&at.row, at.change == COMES);
                    most -= 1;
                }
            }
        }
        Ok(false)
    }

    /// Begins the epoch of what was noted and gives all its matches.
    pub fn commit(&mut self, each: Each<'_>) {
        self.begin();
        let mut cursor = self.cursor();
        while self.next(&mut cursor, usize::MAX, usize::MAX, each).expect("the epoch has just begun") {}
    }

    /// The list of an atom's relation, as it is for a search that starts at the atom of the cursor.
    fn list(&self, atom: usize, at: &Cursor, node: u32, backwards: bool) -> &[u32] {
        let relation = &self.relations[self.of[atom]];
        let lists = if backwards { &relation.reverse } else { &relation.forward };
        lists.get(node, at.change + usize::from(atom < at.atom))
    }

    fn holds(&self, atom: usize, at: &Cursor) -> bool {
        let (from, to) = (self.pattern.body[atom].from, self.pattern.body[atom].to);
        self.list(atom, at, at.row[from], false).binary_search(&at.row[to]).is_ok()
    }

    fn candidates(&self, step: &Step, at: &Cursor) -> Vec<u32> {
        let lists = step.voters.iter().map(|&(atom, bound, back)| self.list(atom, at, at.row[bound], back));
        let mut lists = lists.collect::<Vec<_>>();
        lists.sort_by_key(|list| list.len());
        let mut candidates = lists[0].to_vec();
        lists[1..].iter().for_each(|list| intersect::retain(&mut candidates, list));
        candidates
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Room that is taken for neighbours, and for what is noted.
    fn room(deltas: &Deltas) -> usize {
        let both = deltas.relations.iter().flat_map(|relation| [&relation.forward, &relation.reverse]);
        let lists = both.flat_map(|lists| lists.lists.iter().chain(lists.changed.iter().flat_map(HashMap::values)));
        lists.map(Vec::capacity).sum::<usize>() + deltas.pending.capacity()
    }

    #[test]
    fn memory_is_that_of_the_edges_that_are_there() {
        let mut deltas = Deltas::new(&Pattern::parse("p(a,b) :- e(a,b)").expect("a pattern"));
        let mut epoch = |edges: std::ops::Range<u32>, times: i64| {
            edges.for_each(|at| deltas.change("e", at % 50, 50 + at, times).expect("e is there"));
            deltas.begin();
            room(&deltas)
        };
        let all = epoch(0..50_000, 1);
        assert!(all >= 100_000);
        epoch(100..50_000, -1);
        assert!(epoch(0..0, 1) < 5_000, "lists and tables are as large as when there were 500 times as many edges");
        // Stays so however many come and go.
        for first in 1..5 {
            epoch(50_000 * first..50_000 * (first + 1), 1);
            epoch(50_000 * first..50_000 * (first + 1), -1);
        }
        assert!(epoch(0..0, 1) < 5_000);
        // Nor does an epoch that is given up stay.
        (0..50_000).for_each(|at| deltas.change("e", at, at, 1).expect("e is there"));
        deltas.discard();
        assert!(room(&deltas) < 5_000);
    }
}
