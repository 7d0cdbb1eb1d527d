//! GenericJoin over one unit of work, depth first.
//!
//! At each level the shortest voting list proposes (*count*, *propose*) and the others keep what they have, too
//! (*validate*). A [`Search`] is suspended between any two rows: [`Search::fill`] goes on until its batch is full. It holds
//! one list of candidates per level and nothing else, so memory does not depend on how many matches there are.
//! [`Search::count`] takes the last level by the length of what the voters agree on, without writing it down; every prefix
//! of one attribute less is enumerated all the same. Cliques below a root are searched in its neighbourhood (`near`).
//!
//! Invariants: matches come in ascending order of the attributes as they are bound; each once; units one after the other
//! give what the whole gives.
//!
//! Departure: depth first, not a dataflow. There are no intermediate results to bound, so N and B bound the ranges of
//! first edges that are admitted, and the rows that wait.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::csr::View;
use crate::intersect::{self, Marks};
use crate::near::{Count, End, Last as _, Near, Write};
use crate::query::{Query, Voter};
use crate::rows::Rows;
use crate::units::Unit;

/// Candidates of a level: a piece of a list as it stands, or a list of their own.
#[derive(Clone, Debug, Default)]
struct Candidates {
    own: Vec<u32>,
    /// `(list, node, first, end)` when they are part of the list of a node.
    shared: Option<(usize, u32, usize, usize)>,
    /// The next one.
    at: usize,
}

impl Candidates {
    fn get<'a>(&'a self, views: &[View<'a>]) -> &'a [u32] {
        match self.shared {
            Some((list, node, first, end)) => &views[list].list(node)[first..end],
            None => &self.own,
        }
    }
}

/// A suspended search.
#[derive(Clone, Debug)]
pub struct Search {
    query: Query,
    unit: Unit,
    levels: Vec<Candidates>,
    prefix: Vec<u32>,
    /// Level whose candidates are being taken; `None` once all are.
    depth: Option<usize>,
    root: u32,
    /// For counting: the list that every node of the level above the last is met with, as bits.
    marks: Marks,
    /// For cliques: below the present root, where its list is not too long.
    near: Option<Box<Near>>,
    /// Whether the search stands below a root that was entered.
    inside: bool,
    /// Last nodes of the present prefix that did not fit into the batch.
    rest: Vec<u32>,
}

/// Most nodes for which a list is kept as bits: 1 MiB of them.
const MOST_MARKED: usize = 1 << 23;

impl Search {
    /// Over the prefixes of `unit`.
    #[must_use]
    pub fn new(query: &Query, unit: Unit) -> Self {
        let all = query.levels().len();
        let near = (all >= 3 && query.is_clique() && query.index().nodes() <= MOST_MARKED)
            .then(|| Box::new(Near::new(all, query.index().nodes())));
        let mut search = Self {
            query: query.clone(),
            unit,
            levels: vec![Candidates::default(); all],
            prefix: vec![0; all],
            depth: None,
            root: 0,
            marks: Marks::default(),
            near,
            inside: false,
            rest: Vec::new(),
        };
        search.begin(unit);
        search
    }

    /// Gives up what is left and begins with another unit. Memory is used again.
    pub fn begin(&mut self, unit: Unit) {
        self.depth = (!unit.is_empty()).then_some(0);
        (self.unit, self.root, self.inside) = (unit, unit.from.0, false);
        self.rest.clear();
    }

    /// Whether every match has been given.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.depth.is_none()
    }

    /// Appends matches until `rows` has `most`, or there are no more; then the answer is false.
    ///
    /// `stop` is looked at between prefixes; once it is set, the answer is true.
    pub fn fill(&mut self, rows: &mut Rows, most: usize, stop: &AtomicBool) -> bool {
        let query = self.query.clone();
        let views = query.views();
        let last = query.levels().len() - 1;
        while let Some(depth) = self.depth {
            if self.inside {
                self.inside = !self.below_root(&query, &views, rows, most, stop);
                if self.inside {
                    return true;
                }
                continue;
            }
            if depth == 0 {
                if stop.load(Ordering::Relaxed) {
                    return true;
                }
                if !self.next_root(&query) {
                    self.depth = None;
                    return false;
                }
                if last == 0 {
                    if rows.len() >= most {
                        self.root -= 1;
                        return true;
                    }
                    rows.columns[0].push(self.prefix[0]);
                    continue;
                }
                if let Some(mut near) = self.near.take() {
                    self.inside = self.enter(&mut near, &views);
                    self.near = Some(near);
                }
                if self.inside {
                    continue;
                }
                self.extend(&query, &views, 1);
                self.depth = Some(1);
                continue;
            }
            let level = &mut self.levels[depth];
            let candidates = level.get(&views);
            if level.at == candidates.len() {
                self.depth = Some(depth - 1);
                continue;
            }
            if depth == last {
                let room = most.saturating_sub(rows.len());
                if room == 0 {
                    return true;
                }
                let taken = &candidates[level.at..candidates.len().min(level.at + room)];
                rows.columns[last].extend_from_slice(taken);
                let (at, full) = (level.at + taken.len(), rows.columns[last].len());
                self.levels[last].at = at;
                for (column, node) in rows.columns[..last].iter_mut().zip(&self.prefix) {
                    column.resize(full, *node);
                }
                continue;
            }
            let node = candidates[level.at];
            self.levels[depth].at += 1;
            self.prefix[depth] = node;
            if stop.load(Ordering::Relaxed) {
                self.levels[depth].at -= 1;
                return true;
            }
            self.extend(&query, &views, depth + 1);
            self.depth = Some(depth + 1);
        }
        false
    }

    /// Enters the neighbourhood of the present root, where cliques are wanted and it is not too large.
    fn enter(&self, near: &mut Near, views: &[View<'_>]) -> bool {
        let root = self.prefix[0];
        let list = views[0].list(root);
        let fits = near.fits(list);
        if fits {
            let (first, end) = self.cut(list.len());
            near.enter(root, list, first..end);
        }
        fits
    }

    /// Rows below the root that was entered, and below those after it that can be entered as well. Whether there are no
    /// more.
    fn below_root(
        &mut self,
        query: &Query,
        views: &[View<'_>],
        rows: &mut Rows,
        most: usize,
        stop: &AtomicBool,
    ) -> bool {
        let mut near = self.near.take().expect("a root was entered");
        if !self.rest.is_empty() {
            let room = most.saturating_sub(rows.len()).min(self.rest.len());
            let (last, others) = rows.columns.split_last_mut().expect("a match has columns");
            last.extend(self.rest.drain(..room));
            others.iter_mut().zip(&near.prefix).for_each(|(column, node)| column.resize(last.len(), *node));
        }
        let mut end = End::Full;
        if self.rest.is_empty() && rows.len() < most {
            let mut write = Write::new(&mut rows.columns, most);
            end = loop {
                let end = near.walk(views[0], &mut write, stop);
                if end != End::Done {
                    break end;
                }
                write.turn(0, near.prefix[0]);
                if !self.next_root(query) {
                    self.depth = None;
                    break end;
                }
                if !self.enter(&mut near, views) {
                    self.root -= 1; // taken again, as lists
                    break end;
                }
            };
            write.end(&near.prefix, &mut self.rest);
        }
        self.near = Some(near);
        end == End::Done
    }

    /// Takes the next root; false when there is none.
    fn next_root(&mut self, query: &Query) -> bool {
        let (end, cut) = self.unit.to;
        let more = self.root < end || (self.root == end && cut > 0);
        if more {
            self.prefix[0] = query.roots()[self.root as usize];
            self.root += 1;
        }
        more
    }

    /// How many matches the rest of the unit has; `None` when `stop` was set meanwhile.
    pub fn count(&mut self, stop: &AtomicBool) -> Option<u64> {
        let query = self.query.clone();
        let views = query.views();
        let mut found = 0;
        while self.next_root(&query) {
            if stop.load(Ordering::Relaxed) {
                return None;
            }
            if self.levels.len() == 1 {
                found += 1;
                continue;
            }
            if let Some(mut near) = self.near.take() {
                let mut count = Count::default();
                let entered = self.enter(&mut near, &views);
                let end = if entered { near.walk(views[0], &mut count, stop) } else { End::Done };
                self.near = Some(near);
                if end == End::Stopped {
                    return None;
                }
                found += count.0;
                if entered {
                    continue;
                }
            }
            found += match marked(&query) {
                Some(votes) => self.triples(&query, &views, votes, stop)?,
                None => self.below(&query, &views, 1, stop)?,
            };
        }
        Some(found)
    }

    /// Counts below the present root where two lists vote at the last of three levels: that of the root is the same for all
    /// second nodes, so it becomes bits once, and each of the other lists is one probe per value, or looks it up.
    fn triples(
        &mut self,
        query: &Query,
        views: &[View<'_>],
        (root, second): (Voter, Voter),
        stop: &AtomicBool,
    ) -> Option<u64> {
        let list = views[root.list].list(self.prefix[0]);
        self.extend(query, views, 1);
        let nodes = self.levels[1].get(views);
        let bits = nodes.len() >= 8;
        if bits {
            self.marks.reserve(query.index().nodes());
            self.marks.set(list);
        }
        let mut found = 0;
        let mut stopped = false;
        for &node in nodes {
            stopped = stop.load(Ordering::Relaxed);
            if stopped {
                break;
            }
            let other = views[second.list].list(node);
            let probe = bits && other.len() < list.len().saturating_mul(intersect::GALLOP);
            // Values of the other list outside this one's range are not worth a probe.
            found +=
                if probe { self.marks.count(intersect::within(other, list)) } else { intersect::count(list, other) }
                    as u64;
        }
        if bits {
            self.marks.clear(list);
        }
        (!stopped).then_some(found)
    }

    fn below(&mut self, query: &Query, views: &[View<'_>], depth: usize, stop: &AtomicBool) -> Option<u64> {
        if depth == self.levels.len() - 1 {
            return Some(self.agree(query, views, depth));
        }
        self.extend(query, views, depth);
        if let Some(voter) = last_by_base(query, depth) {
            return Some(self.inside(query, views, depth, voter.list));
        }
        let mut found = 0;
        let many = self.levels[depth].get(views).len();
        for at in 0..many {
            if stop.load(Ordering::Relaxed) {
                return None;
            }
            self.prefix[depth] = self.levels[depth].get(views)[at];
            found += self.below(query, views, depth + 1, stop)?;
        }
        Some(found)
    }

    /// Counts the last level where candidates of the level above stand for all voters but the node taken there: they
    /// become bits once. The list of each of them is one probe per value, or looks them up.
    fn inside(&mut self, query: &Query, views: &[View<'_>], depth: usize, list: usize) -> u64 {
        let nodes = self.levels[depth].get(views);
        let bits = nodes.len() >= 8;
        if bits {
            self.marks.reserve(query.index().nodes());
            self.marks.set(nodes);
        }
        let mut found = 0;
        for &node in nodes {
            let other = views[list].list(node);
            let probe = bits && other.len() < nodes.len().saturating_mul(intersect::GALLOP);
            found +=
                if probe { self.marks.count(intersect::within(other, nodes)) } else { intersect::count(nodes, other) }
                    as u64;
        }
        if bits {
            self.marks.clear(nodes);
        }
        found
    }

    /// The places of the unit inside the list that proposes the second attribute of the present root.
    fn cut(&self, whole: usize) -> (usize, usize) {
        let root = self.root - 1; // the one taken last
        let first = if root == self.unit.from.0 { self.unit.from.1 as usize } else { 0 };
        let end = if root == self.unit.to.0 { self.unit.to.1 as usize } else { whole };
        (first.min(whole), end.min(whole))
    }

    /// Finds the candidates of a level for the prefix above it.
    fn extend(&mut self, query: &Query, views: &[View<'_>], depth: usize) {
        let (above, here) = self.levels.split_at_mut(depth);
        let level = &mut here[0];
        (level.at, level.shared) = (0, None);
        level.own.clear();
        let plan = &query.levels()[depth];
        let prefix = &self.prefix;
        let list = |at: usize| {
            let voter = plan.voters[at];
            views[voter.list].list(prefix[voter.position])
        };
        if depth == 1 {
            let (by, proposed) = query.proposer(views, prefix[0]);
            let (first, end) = self.cut(proposed.len());
            let level = &mut self.levels[1];
            if plan.voters.len() == 1 && plan.looped.is_none() {
                level.shared = Some((plan.voters[0].list, self.prefix[0], first, end));
                return;
            }
            level.own.extend_from_slice(&proposed[first..end]);
            for at in (0..plan.voters.len()).filter(|at| *at != by) {
                let voter = plan.voters[at];
                intersect::retain(&mut level.own, views[voter.list].list(self.prefix[voter.position]));
            }
        } else {
            match (plan.base, plan.voters.len()) {
                (Some(base), 0) => level.own.extend_from_slice(above[base].get(views)),
                (Some(base), votes) => {
                    intersect::intersect(above[base].get(views), list(0), &mut level.own);
                    (1..votes).for_each(|at| intersect::retain(&mut level.own, list(at)));
                }
                (None, 1) if plan.looped.is_none() => {
                    let voter = plan.voters[0];
                    let node = prefix[voter.position];
                    level.shared = Some((voter.list, node, 0, views[voter.list].degree(node)));
                    return;
                }
                (None, 1) => level.own.extend_from_slice(list(0)),
                (None, 2) => intersect::intersect(list(0), list(1), &mut level.own),
                (None, votes) => {
                    // The two shortest first: what they agree on bounds the rest.
                    let mut order = (0..votes).collect::<Vec<_>>();
                    order.sort_by_key(|&at| list(at).len());
                    intersect::intersect(list(order[0]), list(order[1]), &mut level.own);
                    order[2..].iter().for_each(|&at| intersect::retain(&mut level.own, list(at)));
                }
            }
        }
        if let Some(looped) = &plan.looped {
            intersect::retain(&mut self.levels[depth].own, looped);
        }
    }

    /// How many candidates the last level has for the prefix above it.
    fn agree(&mut self, query: &Query, views: &[View<'_>], depth: usize) -> u64 {
        let plan = &query.levels()[depth];
        if depth > 1 && plan.looped.is_none() {
            let list = |at: usize| {
                let voter = plan.voters[at];
                views[voter.list].list(self.prefix[voter.position])
            };
            match (plan.base, plan.voters.len()) {
                (Some(base), 1) => return intersect::count(self.levels[base].get(views), list(0)) as u64,
                (None, 2) => return intersect::count(list(0), list(1)) as u64,
                _ => {}
            }
        }
        self.extend(query, views, depth);
        self.levels[depth].get(views).len() as u64
    }
}

/// The two voters of the last of three levels, the root's first, where that is all there is to it.
fn marked(query: &Query) -> Option<(Voter, Voter)> {
    let [_, _, last] = query.levels() else { return None };
    let [a, b] = last.voters[..] else { return None };
    let fits = last.looped.is_none() && a.position != b.position && query.index().nodes() <= MOST_MARKED;
    fits.then_some(if a.position == 0 { (a, b) } else { (b, a) })
}

/// The one voter of the last level whose node is taken at `depth`, right above it, where that level's candidates are the base.
fn last_by_base(query: &Query, depth: usize) -> Option<Voter> {
    let last = query.levels().last().filter(|last| last.base == Some(depth) && last.looped.is_none())?;
    let [voter] = last.voters[..] else { return None };
    let fits = depth + 2 == query.levels().len() && voter.position == depth && query.index().nodes() <= MOST_MARKED;
    fits.then_some(voter)
}
