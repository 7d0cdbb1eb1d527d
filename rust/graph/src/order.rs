//! In which order the attributes of a pattern are bound.
//!
//! A search that binds a node meets lists; what it costs is the sum over all levels of (prefixes so far) times (the shortest
//! list that votes). The estimate takes lists at their average length, as seen by whoever arrives there by an edge (long
//! lists are met more often), and lets every further vote keep its share of the nodes. All connected orders are compared
//! up to [`EXHAUSTIVE`] attributes, above it the cheapest next attribute is taken.

use crate::error::GraphError;
use crate::index::Index;
use crate::pattern::{Atom, Pattern};

/// Most attributes for which every order is tried.
pub const EXHAUSTIVE: usize = 7;

/// What the choice knows of one direction of a relation.
#[derive(Clone, Copy, Debug, Default)]
struct Lists {
    /// How many are not empty.
    some: f64,
    /// Average length of those.
    mean: f64,
    /// Average length as met by following an edge of the other direction, supposing degrees of both are alike.
    met: f64,
}

struct Facts {
    nodes: f64,
    /// By atom: forward and reverse.
    atoms: Vec<[Lists; 2]>,
    /// By atom: whether the index has no reverse lists of its relation.
    one_way: Vec<bool>,
}

impl Facts {
    /// Whether `next` can be bound after `bound`; `any` also by lists that the index does not have.
    fn can_follow(&self, pattern: &Pattern, bound: &[usize], next: usize, any: bool) -> bool {
        // Who is led to by lists of one direction comes behind who leads there: so what is left can always go on.
        let early = |(atom, one_way): (&Atom, &bool)| {
            *one_way && atom.to == next && atom.from != next && !bound.contains(&atom.from)
        };
        (bound.is_empty() || joined(pattern, bound, next))
            && (any || !pattern.body.iter().zip(&self.one_way).any(early))
    }
}

/// The order to bind the attributes of `pattern` in, as numbers of variables.
///
/// # Errors
/// When `given` does not name every variable once, or names one that nothing joins to those before it.
pub fn choose(index: &Index, pattern: &Pattern, given: Option<&[&str]>) -> Result<Vec<usize>, GraphError> {
    match given {
        Some(names) => check(pattern, names),
        None => Ok(cheapest(&facts(index, pattern), pattern)),
    }
}

fn check(pattern: &Pattern, names: &[&str]) -> Result<Vec<usize>, GraphError> {
    let refuse =
        |problem: String| GraphError::Order { order: names.iter().map(|name| (*name).into()).collect(), problem };
    let mut order: Vec<usize> = Vec::new();
    for name in names {
        let at = pattern.variables.iter().position(|known| known == name);
        let at = at.ok_or_else(|| refuse(format!("the pattern has no variable {name:?}")))?;
        if order.contains(&at) {
            return Err(refuse(format!("{name:?} is named twice")));
        }
        if !order.is_empty() && !joined(pattern, &order, at) {
            return Err(refuse(format!("nothing joins {name:?} to the variables before it")));
        }
        order.push(at);
    }
    match (0..pattern.variables.len()).find(|at| !order.contains(at)) {
        Some(missing) => Err(refuse(format!("it leaves out {:?}", pattern.variables[missing]))),
        None => Ok(order),
    }
}

fn joined(pattern: &Pattern, bound: &[usize], next: usize) -> bool {
    pattern
        .body
        .iter()
        .any(|atom| (atom.from == next && bound.contains(&atom.to)) || (atom.to == next && bound.contains(&atom.from)))
}

fn facts(index: &Index, pattern: &Pattern) -> Facts {
    let lists = |degrees: &mut dyn Iterator<Item = usize>| {
        let (mut some, mut sum, mut squares) = (0.0, 0.0, 0.0);
        for degree in degrees.filter(|degree| *degree > 0).map(|degree| degree as f64) {
            (some, sum, squares) = (some + 1.0, sum + degree, squares + degree * degree);
        }
        if some == 0.0 { Lists::default() } else { Lists { some, mean: sum / some, met: squares / sum } }
    };
    let known = index.relations.iter().map(|relation| {
        let forward = relation.forward.view();
        let mut sources = vec![0_usize; index.nodes()];
        for piece in forward.targets.chunks(1 << 22) {
            piece.iter().for_each(|&to| sources[to as usize] += 1);
            index.release();
        }
        let mut degrees = (0..index.nodes() as u32).map(|node| forward.degree(node));
        [lists(&mut degrees), lists(&mut sources.into_iter())]
    });
    let known = known.collect::<Vec<_>>();
    let of = |name: &str| index.relations.iter().position(|relation| relation.name == name);
    let atoms = pattern.body.iter().map(|atom| of(&atom.relation).map_or([Lists::default(); 2], |at| known[at]));
    let one_way = |atom: &Atom| of(&atom.relation).is_some_and(|at| index.relations[at].reverse.is_none());
    let one_way = pattern.body.iter().map(one_way).collect();
    Facts { nodes: (index.nodes() as f64).max(1.0), atoms: atoms.collect(), one_way }
}

/// Lists met when `next` is bound after `bound`; the factor by which prefixes grow, and the length of the shortest list.
fn level(facts: &Facts, pattern: &Pattern, bound: &[usize], next: usize) -> (f64, f64) {
    let (mut shortest, mut kept) = (f64::INFINITY, 1.0);
    for (atom, lists) in pattern.body.iter().zip(&facts.atoms) {
        let length = match bound.is_empty() {
            true if atom.from == next => lists[0].some,
            true if atom.to == next => lists[1].some,
            _ => {
                let (list, end) = match (atom.from, atom.to) {
                    (from, to) if to == next && bound.contains(&from) => (&lists[0], from),
                    (from, to) if from == next && bound.contains(&to) => (&lists[1], to),
                    _ => continue,
                };
                if end == bound[0] { list.mean } else { list.met }
            }
        };
        kept *= length / facts.nodes;
        shortest = shortest.min(length);
    }
    (kept * facts.nodes, shortest)
}

/// Where no order does with the lists that there are, the cheapest of all, which says what is missing.
fn cheapest(facts: &Facts, pattern: &Pattern) -> Vec<usize> {
    let found = [false, true].into_iter().find_map(|any| {
        if pattern.variables.len() > EXHAUSTIVE {
            return step_by_step(facts, pattern, any);
        }
        let mut best = (f64::INFINITY, Vec::new());
        extend(facts, pattern, &mut Vec::new(), 1.0, 0.0, any, &mut best);
        (!best.1.is_empty()).then_some(best.1)
    });
    found.expect("a pattern is connected")
}

/// The cheapest next attribute each time, from the first beginning from which that leads to an end.
fn step_by_step(facts: &Facts, pattern: &Pattern, any: bool) -> Option<Vec<usize>> {
    let all = pattern.variables.len();
    let cheaper = |bound: &[usize], a: usize, b: usize| {
        let cost = |next| level(facts, pattern, bound, next);
        cost(a).partial_cmp(&cost(b)).unwrap_or(std::cmp::Ordering::Equal)
    };
    let mut first: Vec<usize> = (0..all).filter(|&first| facts.can_follow(pattern, &[], first, any)).collect();
    first.sort_by(|&a, &b| cheaper(&[], a, b));
    first.into_iter().find_map(|first| {
        let mut bound = vec![first];
        while bound.len() < all {
            let open = (0..all).filter(|next| !bound.contains(next));
            let open = open.filter(|&next| facts.can_follow(pattern, &bound, next, any));
            bound.push(open.min_by(|&a, &b| cheaper(&bound, a, b))?);
        }
        Some(bound)
    })
}

fn extend(
    facts: &Facts,
    pattern: &Pattern,
    bound: &mut Vec<usize>,
    prefixes: f64,
    cost: f64,
    any: bool,
    best: &mut (f64, Vec<usize>),
) {
    // The first of equal orders stays, which is the order of the text.
    if bound.len() == pattern.variables.len() {
        if best.1.is_empty() || cost < best.0 * 0.999 {
            *best = (cost, bound.clone());
        }
        return;
    }
    for next in 0..pattern.variables.len() {
        if bound.contains(&next) || !facts.can_follow(pattern, bound, next, any) {
            continue;
        }
        let (growth, shortest) = level(facts, pattern, bound, next);
        bound.push(next);
        extend(facts, pattern, bound, prefixes * growth, cost + prefixes * shortest, any, best);
        bound.pop();
    }
}
