//! Pieces of work: ranges of prefixes of two attributes.
//!
//! A prefix is a place (root, place in the list that proposes the second attribute); places ascend, and a [`Unit`] is the
//! range from one place up to another. So a heavy vertex is cut anywhere inside its list, many light ones share a unit,
//! and units one after the other give the matches in the order of one search. Units depend on the index and the query alone.

use crate::csr::View;
use crate::query::Query;

/// A place: number of the root, and place in its list. (`(roots, 0)` is the end.)
pub type Place = (u32, u32);

/// Prefixes from one place up to another, which is not part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Unit {
    /// The first place.
    pub from: Place,
    /// The place after the last.
    pub to: Place,
}

impl Unit {
    /// All prefixes of a query.
    #[must_use]
    pub fn whole(query: &Query) -> Self {
        Self { from: (0, 0), to: (query.roots().len() as u32, 0) }
    }

    /// Whether both of its places are some of this query, in order.
    #[must_use]
    pub fn is_of(&self, query: &Query) -> bool {
        let (roots, views) = (query.roots().len() as u32, query.views());
        let is_place = |(root, place): Place| match root < roots {
            true => place <= width(query, &views, root),
            false => (root, place) == (roots, 0),
        };
        self.from <= self.to && is_place(self.from) && is_place(self.to)
    }

    /// Whether there is nothing in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.from >= self.to
    }
}

/// Hands out units of so many prefixes each, one after the other.
#[derive(Clone, Debug)]
pub struct Cursor {
    rest: Unit,
    prefixes: usize,
}

impl Cursor {
    /// Over `unit`, at most `prefixes` (at least 1) at a time.
    #[must_use]
    pub fn new(unit: Unit, prefixes: usize) -> Self {
        Self { rest: unit, prefixes: prefixes.max(1) }
    }

    /// What is left.
    #[must_use]
    pub fn rest(&self) -> Unit {
        self.rest
    }

    /// The next unit, and how many prefixes it has. A root without prefixes costs a step, too.
    pub fn next(&mut self, query: &Query, views: &[View<'_>]) -> Option<(Unit, usize)> {
        if self.rest.is_empty() {
            return None;
        }
        let (mut taken, mut steps) = (0, 0);
        let (mut root, mut place) = self.rest.from;
        while (root, place) < self.rest.to && taken < self.prefixes && steps < self.prefixes + 1024 {
            let end = if root == self.rest.to.0 { self.rest.to.1 } else { width(query, views, root) };
            let more = (end.saturating_sub(place) as usize).min(self.prefixes - taken) as u32;
            (taken, steps, place) = (taken + more as usize, steps + 1, place + more);
            if place >= end {
                (root, place) = if root == self.rest.to.0 { self.rest.to } else { (root + 1, 0) };
            }
        }
        let unit = Unit { from: self.rest.from, to: (root, place).min(self.rest.to) };
        self.rest.from = unit.to;
        Some((unit, taken))
    }
}

/// How many places a root has.
fn width(query: &Query, views: &[View<'_>], root: u32) -> u32 {
    if query.levels().len() < 2 {
        return 1;
    }
    query.proposer(views, query.roots()[root as usize]).1.len() as u32
}

/// Cuts all prefixes into at most `parts` units of about the same estimated work, fewer where there is less to do.
///
/// The estimate of a prefix is one more than the shortest list that votes at the third level. Linear in the prefixes.
#[must_use]
pub fn split(query: &Query, parts: usize) -> Vec<Unit> {
    let views = query.views();
    let roots = query.roots();
    let costs = roots.iter().enumerate().map(|(at, &root)| {
        if at % (1 << 16) == 0 {
            query.index().release(); // who cuts the work need not keep the pages of who does it
        }
        cost(query, &views, root)
    });
    let mut costs = costs.collect::<Vec<_>>();
    let total = costs.iter().sum::<u64>();
    let each = total.div_ceil(parts.max(1) as u64).max(1);
    let mut units = Vec::new();
    let (mut begin, mut spent) = ((0, 0), 0);
    for (at, whole) in costs.drain(..).enumerate() {
        if spent + whole < each {
            spent += whole;
            continue;
        }
        // The unit ends inside this root, and perhaps some more begin and end there.
        let last = width(query, &views, at as u32);
        let mut walk = |place: u32, more: u64| {
            spent += more;
            if spent >= each {
                let to = if place + 1 == last { (at as u32 + 1, 0) } else { (at as u32, place + 1) };
                units.push(Unit { from: begin, to });
                (begin, spent) = (to, 0);
            }
        };
        prefixes(query, &views, roots[at], &mut walk);
    }
    let end = Unit::whole(query).to;
    if begin < end && spent > 0 {
        units.push(Unit { from: begin, to: end });
    } else if let Some(last) = units.last_mut() {
        last.to = end;
    }
    units
}

fn cost(query: &Query, views: &[View<'_>], root: u32) -> u64 {
    let mut sum = 0;
    prefixes(query, views, root, &mut |_, more| sum += more);
    sum
}

/// Place and estimated work of each prefix of a root.
fn prefixes(query: &Query, views: &[View<'_>], root: u32, each: &mut dyn FnMut(u32, u64)) {
    let levels = query.levels();
    if levels.len() < 2 {
        return each(0, 1);
    }
    for (place, &second) in query.proposer(views, root).1.iter().enumerate() {
        let mut work = 1;
        if let Some(third) = levels.get(2) {
            let bound = [root, second];
            let lists = third.voters.iter().map(|voter| views[voter.list].degree(bound[voter.position]));
            work += lists.min().unwrap_or(0) as u64;
        }
        each(place as u32, work);
    }
}
