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
//! An epoch is worked out beside the one that is held ([`Deltas::prepare`]), takes its place at once ([`Deltas::turn`]), and
//! what it took the place of becomes part of the edges behind it ([`Deltas::settle`]). The first and the last go in steps, between
//! which everything can be read, and no step is long, however large the epoch: edges are sorted by buckets of nodes.
//!
//! Departures: deletions before insertions; what an epoch changed is held until the next, so a sink that failed gets
//! its matches again.

use std::collections::BTreeMap;
use std::mem::{swap, take};

use crate::error::GraphError;
use crate::intersect;
use crate::pattern::{Pattern, PatternError};

/// Lists of some nodes, which ascend.
#[derive(Debug, Default)]
struct Layer {
    nodes: Vec<u32>,
    lists: Vec<Vec<u32>>,
    /// Where the nodes of each block of numbers begin; empty where nodes are few.
    blocks: Vec<usize>,
}

/// Numbers of a block, as a power of two.
const BLOCK: u32 = 8;

impl Layer {
    fn get(&self, node: u32) -> Option<&[u32]> {
        let all = self.nodes.len();
        let block = |at: u32| self.blocks.get(at as usize).map_or(all, |&begin| begin.min(all));
        let (begin, end) = match self.blocks.is_empty() {
            true => (0, all),
            false => (block(node >> BLOCK), block((node >> BLOCK) + 1)),
        };
        self.nodes[begin..end].binary_search(&node).ok().map(|at| &*self.lists[begin + at])
    }

    /// Adds one behind the others.
    fn push(&mut self, node: u32, list: Vec<u32>) {
        self.nodes.push(node);
        self.lists.push(list);
        let from = match self.nodes.len() {
            FEW => 0,
            more if more > FEW => more - 1,
            _ => return,
        };
        for (at, node) in self.nodes.iter().enumerate().skip(from) {
            self.blocks.resize(self.blocks.len().max((node >> BLOCK) as usize + 1), at);
        }
    }

    fn pop(&mut self) -> Option<(u32, Vec<u32>)> {
        self.nodes.pop().zip(self.lists.pop())
    }

    /// Lets go of the room of one that is empty, but for a little.
    fn tidy(&mut self) {
        self.nodes.shrink_to(KEPT);
        self.lists.shrink_to(KEPT);
        self.blocks = Vec::new();
    }
}

/// Lists after each of an epoch's two changes, of nodes whose edges it changes.
type Changed = [Layer; 2];

/// Edges of each of an epoch's two changes.
type Edges = [Vec<(u32, u32)>; 2];

/// An edge, and how often it comes (above 0) or goes (below).
type Noted = (u32, u32, i64);

/// Edges that come in any order and go in order, some at a time.
#[derive(Debug, Default)]
struct Pile {
    /// Those that came last, or all where they are few.
    few: Vec<Noted>,
    /// By their first nodes.
    buckets: BTreeMap<u32, Bucket>,
}

#[derive(Debug, Default)]
struct Bucket {
    edges: Vec<Noted>,
    /// How many there were when they were added up.
    sums: usize,
}

/// Most edges that are in no bucket.
const FEW: usize = 4096;
/// Nodes of a bucket, as a power of two.
const BUCKET: u32 = 10;

impl Pile {
    fn push(&mut self, edge: Noted) {
        self.few.push(edge);
        if self.few.len() == FEW {
            self.spread();
        }
    }

    fn spread(&mut self) {
        for edge in self.few.drain(..) {
            let Bucket { edges, sums } = self.buckets.entry(edge.0 >> BUCKET).or_default();
            edges.push(edge);
            if edges.len() >= FEW.max(2 * *sums) {
                add_up(edges);
                *sums = edges.len();
            }
        }
    }

    /// The next edges, ascending, each once, with the signs of their sums; nothing comes any more.
    fn pop(&mut self) -> Option<Vec<Noted>> {
        if !self.buckets.is_empty() {
            self.spread();
        }
        let mut edges = match self.buckets.pop_first() {
            Some((_, bucket)) => bucket.edges,
            None => take(&mut self.few),
        };
        add_up(&mut edges);
        edges.dedup_by_key(|&mut (from, to, _)| (from, to));
        (!edges.is_empty()).then_some(edges)
    }

    fn is_empty(&self) -> bool {
        self.few.is_empty() && self.buckets.is_empty()
    }
}

/// Sorts edges, and adds up how often each comes. A sum that is too large for one is left in parts, which have its sign.
fn add_up(edges: &mut Vec<Noted>) {
    edges.sort_by_key(|&(from, to, _)| (from, to));
    let (mut kept, mut at) = (0, 0);
    while let Some(&(from, to, _)) = edges.get(at) {
        let same = edges[at..].iter().take_while(|edge| (edge.0, edge.1) == (from, to));
        let (some, mut sum) = same.fold((0, 0), |(some, sum), edge| (some + 1, sum + i128::from(edge.2)));
        at += some;
        // There are no more of these than there were edges: each had at most as much.
        loop {
            let part = sum.clamp(i64::MIN.into(), i64::MAX.into()) as i64;
            edges[kept] = (from, to, part);
            kept += 1;
            sum -= i128::from(part);
            if sum == 0 {
                break;
            }
        }
    }
    edges.truncate(kept);
}

/// Lists of neighbours of one direction: as they were, after edges have gone, and after others have come.
#[derive(Debug, Default)]
struct Lists {
    lists: Vec<Vec<u32>>,
    /// What the epoch before changed, as far as `lists` do not have it yet.
    past: Changed,
    changed: Changed,
    /// What the epoch to come changes, as far as it is worked out.
    next: Changed,
}

impl Lists {
    /// As it is after so many (0 to 2) of the epoch's two changes.
    fn get(&self, node: u32, changes: usize) -> &[u32] {
        let mut layers = self.changed[..changes].iter().rev().chain(self.past.iter().rev());
        let list = layers.find_map(|layer| layer.get(node));
        list.or_else(|| self.lists.get(node as usize).map(Vec::as_slice)).unwrap_or_default()
    }

    /// Works out the lists after a change of the epoch to come, a node at a time, until `steps` are used up: whether there is
    /// more. Its edges ascend, and each changes something; `behind` are those that are done.
    fn prepare(&mut self, change: usize, edges: &[(u32, u32)], behind: &mut usize, steps: &mut usize) -> bool {
        for group in edges[*behind..].chunk_by(|one, other| one.0 == other.0) {
            if *steps == 0 {
                return true;
            }
            let used = self.change(change, group);
            *behind += group.len();
            *steps = steps.saturating_sub(used);
        }
        false
    }

    /// Makes the list of a node after a change of the epoch to come. How much there was to look at.
    fn change(&mut self, change: usize, group: &[(u32, u32)]) -> usize {
        let node = group[0].0;
        let gone = self.next[..change].iter().find_map(|layer| layer.get(node));
        let before = gone.unwrap_or_else(|| self.get(node, 2));
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
        let used = before.len() + group.len();
        self.next[change].push(node, after);
        used
    }

    /// Lets the epoch to come take the place of the one that is held, behind which nothing is left.
    fn turn(&mut self) {
        swap(&mut self.past, &mut self.changed);
        swap(&mut self.changed, &mut self.next);
    }

    /// Makes what the epoch before changed the lists as they were, until `steps` are used up: whether there is more.
    fn settle(&mut self, steps: &mut usize) -> bool {
        for layer in &mut self.past {
            while let Some((node, list)) = layer.pop() {
                if self.lists.len() <= node as usize {
                    self.lists.resize_with(node as usize + 1, Vec::new);
                }
                self.lists[node as usize] = list;
                *steps = steps.saturating_sub(1);
                if *steps == 0 {
                    return true;
                }
            }
            layer.tidy();
        }
        false
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
    edges: Edges,
    next: Next,
}

/// The edges that the epoch to come changes, as far as that is known.
#[derive(Debug, Default)]
struct Next {
    /// What was noted.
    noted: Pile,
    /// Those of it that change something, ascending.
    edges: Edges,
    /// The same, turned round.
    turned: Pile,
    /// The same, ascending.
    back: Edges,
    /// How many of `edges` are in the lists, and how many of `back`.
    behind: [[usize; 2]; 2],
}

impl Relation {
    /// Works out what the epoch to come changes until `steps` are used up: whether there is more.
    fn prepare(&mut self, steps: &mut usize) -> bool {
        let Next { noted, edges, turned, back, behind: [forth, round] } = &mut self.next;
        while let Some(some) = noted.pop() {
            for &(from, to, times) in &some {
                let there = self.forward.get(from, 2).binary_search(&to).is_ok();
                let change = match times {
                    times if times > 0 && !there => COMES,
                    times if times < 0 && there => GOES,
                    _ => continue,
                };
                edges[change].push((from, to));
                turned.push((to, from, times));
            }
            *steps = steps.saturating_sub(some.len());
            if *steps == 0 {
                return true;
            }
        }
        while let Some(some) = turned.pop() {
            for &(to, from, times) in &some {
                back[if times > 0 { COMES } else { GOES }].push((to, from));
            }
            *steps = steps.saturating_sub(some.len());
            if *steps == 0 {
                return true;
            }
        }
        [GOES, COMES].into_iter().any(|change| {
            self.forward.prepare(change, &edges[change], &mut forth[change], steps)
                || self.reverse.prepare(change, &back[change], &mut round[change], steps)
        })
    }

    fn turn(&mut self) {
        self.forward.turn();
        self.reverse.turn();
        self.edges = take(&mut self.next).edges;
    }

    /// Settles the epoch before until `steps` are used up: whether there is more.
    fn settle(&mut self, steps: &mut usize) -> bool {
        self.forward.settle(steps) || self.reverse.settle(steps)
    }

    /// Forgets what is known of the epoch to come.
    fn discard(&mut self) -> (Next, [Changed; 2]) {
        (take(&mut self.next), [&mut self.forward, &mut self.reverse].map(|lists| take(&mut lists.next)))
    }
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

/// What was noted of an epoch that does not come.
#[derive(Debug)]
#[expect(dead_code, reason = "it is there to be dropped")]
pub struct Discarded(Vec<(Next, [Changed; 2])>);

/// A pattern over edges that change.
#[derive(Debug)]
pub struct Deltas {
    pattern: Pattern,
    /// Relation of each atom.
    of: Vec<usize>,
    relations: Vec<Relation>,
    plans: Vec<Plan>,
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
        Self { pattern: pattern.clone(), of, relations, plans, epoch: 0 }
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
        let Some(relation) = self.relations.iter_mut().find(|known| known.name == relation) else {
            let known = self.relations.iter().map(|known| known.name.as_str()).collect::<Vec<_>>().join(", ");
            return Err(PatternError::UnknownRelation { place: 0, relation: relation.into(), known }.into());
        };
        relation.next.noted.push((from, to, times));
        Ok(())
    }

    /// Forgets what was noted of the epoch to come, worked out or not. What there was of it, if it was something: to drop it may
    /// take a moment.
    pub fn discard(&mut self) -> Option<Discarded> {
        let is_empty = |next: &Next| next.noted.is_empty() && next.edges.iter().all(Vec::is_empty);
        let is_empty = self.relations.iter().all(|relation| is_empty(&relation.next));
        (!is_empty).then(|| Discarded(self.relations.iter_mut().map(Relation::discard).collect()))
    }

    /// Begins the epoch of what was noted; the one before is over, and cursors of it are of no use.
    pub fn begin(&mut self) {
        while self.prepare(usize::MAX) {}
        self.turn();
        while self.settle(usize::MAX) {}
    }

    /// Works out the epoch to come, looking at about so many edges: whether there is more of it. What the epoch held changed is as
    /// it was. Nothing is noted between the first of these steps and the turn; whoever gives up in between discards.
    pub fn prepare(&mut self, steps: usize) -> bool {
        let mut steps = steps.max(1);
        if self.settle(steps) {
            return true;
        }
        self.relations.iter_mut().any(|relation| relation.prepare(&mut steps))
    }

    /// Begins the epoch to come, which is worked out, at once.
    pub fn turn(&mut self) {
        self.relations.iter_mut().for_each(Relation::turn);
        self.epoch += 1;
    }

    /// Lets go of the epoch before, looking at about so many of its edges: whether there is more of it. What is left undone is
    /// done when the next one is worked out.
    pub fn settle(&mut self, steps: usize) -> bool {
        let mut steps = steps.max(1);
        self.relations.iter_mut().any(|relation| relation.settle(&mut steps))
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
        let lists = both.flat_map(|lists| {
            let Lists { lists, past, changed, next } = lists;
            lists.iter().chain([past, changed, next].into_iter().flatten().flat_map(|layer| &layer.lists))
        });
        let lists = lists.map(Vec::capacity).sum::<usize>();
        let edges = deltas.relations.iter().map(|relation| {
            let Next { noted, edges, turned, back, .. } = &relation.next;
            let known = [&relation.edges, edges, back].into_iter().flatten().map(Vec::capacity).sum::<usize>();
            let piled = [noted, turned].into_iter().flat_map(|pile| pile.buckets.values());
            known + piled.map(|bucket| bucket.edges.capacity()).sum::<usize>()
        });
        lists + edges.sum::<usize>()
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
