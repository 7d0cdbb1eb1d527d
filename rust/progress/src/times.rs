//! Values by time, in `Ord` order, from which the first time that nothing blocks is found without passing over the rest.
//!
//! What blocks a time blocks every later one: an element of a frontier that is less than or equal to it. Under total
//! orders the first entry therefore decides and a B-tree is all it takes. Under partial orders blocked and free times
//! alternate in `Ord` order, so the entries form a search tree whose every subtree knows a time at or before all of its
//! times ([`PartialOrder::lower_bound`]); a subtree whose bound is blocked is skipped as a whole. For pairs of totally
//! ordered coordinates a search visits O(w log n) nodes for a frontier of width w; without known bounds it visits every
//! entry up to the one that it finds.
//!
//! Invariants of the tree: in order by time, heap-ordered by priority (random, so its depth is O(log n) whatever
//! the times are), and every bound is that of its subtree. Source: treaps (Seidel and Aragon 1996). Departure: the bounds.

use std::cmp::Ordering;
use std::collections::{BTreeMap, btree_map};

use crate::order::PartialOrder;

/// Values by time.
#[derive(Clone, Debug)]
pub(crate) enum Times<T, V> {
    /// For total orders.
    Map(BTreeMap<T, V>),
    /// For all others.
    Tree(Tree<T, V>),
}

impl<T, V> Times<T, V> {
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Map(map) => map.len(),
            Self::Tree(tree) => tree.length,
        }
    }
}

impl<T: PartialOrder + Ord + Clone, V> Times<T, V> {
    pub(crate) fn new() -> Self {
        if T::DIMENSION <= 1 { Self::Map(BTreeMap::new()) } else { Self::Tree(Tree::new()) }
    }

    pub(crate) fn get(&self, time: &T) -> Option<&V> {
        match self {
            Self::Map(map) => map.get(time),
            Self::Tree(tree) => tree.get(time),
        }
    }

    /// The value of a time, made where there is none.
    pub(crate) fn entry(&mut self, time: T, make: impl FnOnce() -> V) -> &mut V {
        match self {
            Self::Map(map) => map.entry(time).or_insert_with(make),
            Self::Tree(tree) => tree.entry(time, make),
        }
    }

    pub(crate) fn remove(&mut self, time: &T) -> Option<V> {
        match self {
            Self::Map(map) => map.remove(time),
            Self::Tree(tree) => tree.remove(time),
        }
    }

    /// The first entry behind `after` that is not blocked. `blocked` must hold for every time that lies at
    /// or after one for which it holds.
    pub(crate) fn first_free(&self, after: Option<&T>, blocked: impl Fn(&T) -> bool) -> Option<(&T, &V)> {
        match self {
            Self::Map(map) => {
                use std::ops::Bound::{Excluded, Unbounded};
                // Whatever follows a blocked time is blocked as well.
                map.range((after.map_or(Unbounded, Excluded), Unbounded)).next().filter(|entry| !blocked(entry.0))
            }
            Self::Tree(tree) => search(&tree.root, after, &blocked).map(|node| (&node.time, &node.value)),
        }
    }

    /// All entries, ascending.
    pub(crate) fn iter(&self) -> Entries<'_, T, V> {
        match self {
            Self::Map(map) => Entries::Map(map.iter()),
            Self::Tree(tree) => Entries::Tree(Walk::from(&tree.root)),
        }
    }
}

impl<T: PartialOrder + Ord + Clone, V> FromIterator<(T, V)> for Times<T, V> {
    fn from_iter<I: IntoIterator<Item = (T, V)>>(entries: I) -> Self {
        match Self::new() {
            Self::Map(_) => Self::Map(entries.into_iter().collect()),
            Self::Tree(mut tree) => {
                for (time, value) in entries {
                    tree.entry(time, || value);
                }
                Self::Tree(tree)
            }
        }
    }
}

/// The entries of [`Times`], ascending.
#[derive(Debug)]
pub(crate) enum Entries<'a, T, V> {
    Map(btree_map::Iter<'a, T, V>),
    Tree(Walk<'a, T, V>),
}

impl<'a, T, V> Iterator for Entries<'a, T, V> {
    type Item = (&'a T, &'a V);
    fn next(&mut self) -> Option<Self::Item> {
        match self {
            Self::Map(entries) => entries.next(),
            Self::Tree(walk) => walk.next(),
        }
    }
}

type Link<T, V> = Option<Box<Node<T, V>>>;

#[derive(Clone, Debug)]
struct Node<T, V> {
    time: T,
    value: V,
    /// A time at or before every time of this subtree, where one is known.
    bound: Option<T>,
    priority: u64,
    left: Link<T, V>,
    right: Link<T, V>,
}

#[derive(Clone, Debug)]
pub(crate) struct Tree<T, V> {
    root: Link<T, V>,
    length: usize,
    /// Where the sequence of priorities stands.
    random: u64,
}

impl<T: PartialOrder + Ord + Clone, V> Tree<T, V> {
    fn new() -> Self {
        Self { root: None, length: 0, random: 0x9E37_79B9_7F4A_7C15 }
    }

    fn get(&self, time: &T) -> Option<&V> {
        let mut link = &self.root;
        while let Some(node) = link {
            link = match time.cmp(&node.time) {
                Ordering::Less => &node.left,
                Ordering::Greater => &node.right,
                Ordering::Equal => return Some(&node.value),
            };
        }
        None
    }

    fn entry(&mut self, time: T, make: impl FnOnce() -> V) -> &mut V {
        if self.get(&time).is_none() {
            // Xorshift: priorities need to be spread, not secret.
            self.random ^= self.random << 13;
            self.random ^= self.random >> 7;
            self.random ^= self.random << 17;
            let (value, bound) = (make(), Some(time.clone()));
            let node = Node { time: time.clone(), value, bound, priority: self.random, left: None, right: None };
            insert(&mut self.root, Box::new(node));
            self.length += 1;
        }
        let mut link = &mut self.root;
        loop {
            let node = link.as_mut().expect("the time was found or has just been inserted");
            link = match time.cmp(&node.time) {
                Ordering::Less => &mut node.left,
                Ordering::Greater => &mut node.right,
                Ordering::Equal => return &mut node.value,
            };
        }
    }

    fn remove(&mut self, time: &T) -> Option<V> {
        let removed = remove(&mut self.root, time);
        self.length -= usize::from(removed.is_some());
        removed
    }
}

impl<T: PartialOrder + Clone, V> Node<T, V> {
    fn refresh(&mut self) {
        let mut bound = Some(self.time.clone());
        for child in [&self.left, &self.right].into_iter().flatten() {
            bound = bound.and_then(|bound| bound.lower_bound(child.bound.as_ref()?));
        }
        self.bound = bound;
    }
}

fn insert<T: PartialOrder + Ord + Clone, V>(link: &mut Link<T, V>, mut node: Box<Node<T, V>>) {
    match link {
        Some(here) if here.priority >= node.priority => {
            insert(if node.time < here.time { &mut here.left } else { &mut here.right }, node);
            here.refresh();
        }
        _ => {
            (node.left, node.right) = split(link.take(), &node.time);
            node.refresh();
            *link = Some(node);
        }
    }
}

/// What is before a time, and the rest.
fn split<T: PartialOrder + Ord + Clone, V>(link: Link<T, V>, time: &T) -> (Link<T, V>, Link<T, V>) {
    let Some(mut node) = link else { return (None, None) };
    if node.time < *time {
        let (left, right) = split(node.right.take(), time);
        node.right = left;
        node.refresh();
        (Some(node), right)
    } else {
        let (left, right) = split(node.left.take(), time);
        node.left = right;
        node.refresh();
        (left, Some(node))
    }
}

fn remove<T: PartialOrder + Ord + Clone, V>(link: &mut Link<T, V>, time: &T) -> Option<V> {
    let node = link.as_mut()?;
    let removed = match time.cmp(&node.time) {
        Ordering::Less => remove(&mut node.left, time),
        Ordering::Greater => remove(&mut node.right, time),
        Ordering::Equal => {
            let node = *link.take()?;
            *link = join(node.left, node.right);
            return Some(node.value);
        }
    };
    if removed.is_some() {
        node.refresh();
    }
    removed
}

/// One tree of two, all of the first before all of the second.
fn join<T: PartialOrder + Clone, V>(first: Link<T, V>, second: Link<T, V>) -> Link<T, V> {
    match (first, second) {
        (None, link) | (link, None) => link,
        (Some(mut first), Some(mut second)) => Some(if first.priority >= second.priority {
            first.right = join(first.right.take(), Some(second));
            first.refresh();
            first
        } else {
            second.left = join(Some(first), second.left.take());
            second.refresh();
            second
        }),
    }
}

fn search<'a, T: Ord, V>(
    link: &'a Link<T, V>,
    after: Option<&T>,
    blocked: &impl Fn(&T) -> bool,
) -> Option<&'a Node<T, V>> {
    let node = link.as_ref()?;
    if node.bound.as_ref().is_some_and(blocked) {
        return None;
    }
    if after.is_some_and(|after| node.time <= *after) {
        return search(&node.right, after, blocked);
    }
    search(&node.left, after, blocked)
        .or_else(|| (!blocked(&node.time)).then_some(&**node))
        .or_else(|| search(&node.right, None, blocked))
}

/// The entries of a tree in order: a stack of nodes whose left side is done.
#[derive(Debug)]
pub(crate) struct Walk<'a, T, V>(Vec<&'a Node<T, V>>);

impl<'a, T, V> Walk<'a, T, V> {
    fn from(link: &'a Link<T, V>) -> Self {
        let mut walk = Self(Vec::new());
        walk.descend(link);
        walk
    }

    fn descend(&mut self, mut link: &'a Link<T, V>) {
        while let Some(node) = link {
            self.0.push(node);
            link = &node.left;
        }
    }
}

impl<'a, T, V> Iterator for Walk<'a, T, V> {
    type Item = (&'a T, &'a V);
    fn next(&mut self) -> Option<Self::Item> {
        let node = self.0.pop()?;
        self.descend(&node.right);
        Some((&node.time, &node.value))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use proptest::prelude::*;

    use super::*;
    use crate::timestamp::Product;

    type Pair = Product<u64, u64>;

    fn checked<T: PartialOrder + Ord + Clone + std::fmt::Debug, V>(link: &Link<T, V>) -> Vec<T> {
        let Some(node) = link else { return Vec::new() };
        for child in [&node.left, &node.right].into_iter().flatten() {
            assert!(child.priority <= node.priority);
        }
        let mut times = checked(&node.left);
        times.push(node.time.clone());
        times.extend(checked(&node.right));
        assert!(times.is_sorted());
        let bound = node.bound.as_ref().expect("products of integers have bounds");
        assert!(times.iter().all(|time| bound.less_equal(time)), "{bound:?} of {times:?}");
        times
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn the_twin_is_a_map(steps in prop::collection::vec((0..12u64, 0..12u64, 0..3u8, 0..12u64, 0..12u64), 0..120)) {
            let (mut ours, mut naive) = (Times::<Pair, u64>::new(), BTreeMap::new());
            for (step, (outer, inner, what, a, b)) in (0u64..).zip(steps) {
                let time = Product::new(outer, inner);
                match what {
                    0 => prop_assert_eq!(ours.remove(&time), naive.remove(&time)),
                    _ => {
                        *ours.entry(time, || 0) += step;
                        *naive.entry(time).or_insert(0) += step;
                    }
                }
                let Times::Tree(tree) = &ours else { panic!("pairs are no total order") };
                prop_assert_eq!(checked(&tree.root).len(), naive.len());
                prop_assert_eq!(ours.len(), naive.len());
                prop_assert_eq!(ours.get(&time), naive.get(&time));
                let frontier = [Product::new(a, b), Product::new(b, a)];
                let blocked = |time: &Pair| frontier.iter().any(|element| element.less_equal(time));
                for after in [None, Some(&time)] {
                    let found = ours.first_free(after, blocked);
                    let mut expected = naive.iter().filter(|entry| after.is_none_or(|after| after < entry.0));
                    prop_assert_eq!(found, expected.find(|entry| !blocked(entry.0)));
                }
            }
            prop_assert!(ours.iter().eq(naive.iter()));
        }
    }

    /// The work of a search is counted in questions asked of the frontier, not in seconds.
    #[test]
    fn a_search_among_many_blocked_times_asks_little() {
        let mut times = Times::<Pair, ()>::new();
        let side = if cfg!(miri) { 16 } else { 256 };
        for at in 0..side * side {
            times.entry(Product::new(at % side, at / side), || ());
        }
        let asked = Cell::new(0u64);
        let frontier = [Product::new(3, 9), Product::new(4, 4), Product::new(9, 1)];
        let blocked = |time: &Pair| {
            asked.set(asked.get() + 1);
            frontier.iter().any(|element| element.less_equal(time))
        };
        let mut after = None;
        let mut found = 0;
        while let Some((time, ())) = times.first_free(after.as_ref(), blocked) {
            assert!(!frontier.iter().any(|element| element.less_equal(time)));
            after = Some(*time);
            found += 1;
        }
        assert_eq!(found, 3 * side + 9 + 5 * 4 + (side - 9));
        assert!(asked.get() < 120 * (found + 1), "{} questions for {found} times", asked.get());
        let before = asked.get();
        let row = |time: &Pair| blocked(time) || time.inner > 0 || time.outer > 9;
        assert_eq!(times.first_free(Some(&Product::new(9, side)), row), None);
        assert!(asked.get() - before < 400, "{} questions for nothing", asked.get() - before);
    }
}
