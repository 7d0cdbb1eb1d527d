//! Which batches were admitted, and which of them are unfinished. Pure.
//!
//! A batch may be admitted when fewer than N batches of this worker at its outer time or before it (in the linear order) are
//! unfinished. That includes the rule of the paper, that batch `b - N` of the same outer time is finished before batch `b` comes,
//! because batches of one outer time finish in order. Later outer times are left out: a batch of theirs may have been
//! admitted already and can finish only after this one.
//!
//! **It always goes on.** Take the least time (outer, then number) at which any worker may still send something inside the scope. A
//! block or an operator of the body there is never held by a window, so say it is the batcher of some worker, about to send
//! batch `b` of outer time `e`. What could hold it are its own unfinished batches at `e` or before. Each of those is unfinished
//! because of something at or before it in the partial order, hence in the linear one; that is not before `(e, b)`, so the
//! batch is one of `e` itself with a number of at least `b`, but its own batches have smaller numbers: there is none.
//!
//! Departure: unfinished batches are counted over all outer times, instead of a look at batch `b - N` of one: many
//! short epochs share one window.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;

/// A batch that is not finished.
#[derive(Clone, Copy, Debug)]
struct Unfinished {
    number: u64,
    items: u64,
}

/// See the module. `O`: outer times.
#[derive(Debug)]
pub(crate) struct Window<O> {
    /// By outer time: the next number. Kept as long as data may still come at that time.
    next: BTreeMap<O, u64>,
    unfinished: BTreeMap<O, VecDeque<Unfinished>>,
    unfinished_batches: u64,
    unfinished_items: u64,
    most_batches: u64,
    most_items: u64,
    finished_batches: u64,
    finished_items: u64,
}

impl<O: Ord + Clone> Window<O> {
    pub(crate) fn new() -> Self {
        Window {
            next: BTreeMap::new(),
            unfinished: BTreeMap::new(),
            unfinished_batches: 0,
            unfinished_items: 0,
            most_batches: 0,
            most_items: 0,
            finished_batches: 0,
            finished_items: 0,
        }
    }

    /// The number that the next batch of an outer time gets.
    pub(crate) fn next(&self, outer: &O) -> u64 {
        self.next.get(outer).copied().unwrap_or(0)
    }

    /// Whether a batch of this outer time may be admitted where N is `batches`.
    pub(crate) fn has_room(&self, outer: &O, batches: u64) -> bool {
        self.until(outer) < batches
    }

    /// Unfinished batches at an outer time or before it.
    fn until(&self, outer: &O) -> u64 {
        let later = self.unfinished.range((Bound::Excluded(outer), Bound::Unbounded));
        self.unfinished_batches - later.map(|(_, batches)| batches.len() as u64).sum::<u64>()
    }

    /// Admits a batch; its number.
    pub(crate) fn admit(&mut self, outer: &O, items: u64) -> u64 {
        let number = self.next(outer);
        self.next.insert(outer.clone(), number + 1);
        let batches = match self.unfinished.get_mut(outer) {
            Some(batches) => batches,
            None => self.unfinished.entry(outer.clone()).or_default(),
        };
        batches.push_back(Unfinished { number, items });
        self.unfinished_batches += 1;
        self.unfinished_items += items;
        self.most_batches = self.most_batches.max(self.until(outer));
        self.most_items = self.most_items.max(self.unfinished_items);
        number
    }

    /// Adds items to the batch that was admitted last at an outer time.
    pub(crate) fn extend(&mut self, outer: &O, items: u64) {
        if let Some(last) = self.unfinished.get_mut(outer).and_then(VecDeque::back_mut) {
            last.items += items;
            self.unfinished_items += items;
            self.most_items = self.most_items.max(self.unfinished_items);
        }
    }

    /// Takes out the batches that have finished; `unfinished` says of one whether it is not.
    pub(crate) fn retire(&mut self, unfinished: impl Fn(&O, u64) -> bool, mut each: impl FnMut(&O, u64)) {
        let Window {
            unfinished: times, unfinished_batches, unfinished_items, finished_batches, finished_items, ..
        } = self;
        let mut emptied = false;
        for (outer, batches) in times.iter_mut() {
            while let Some(first) = batches.front().copied().filter(|first| !unfinished(outer, first.number)) {
                batches.pop_front();
                *unfinished_batches -= 1;
                *unfinished_items -= first.items;
                *finished_batches += 1;
                *finished_items += first.items;
                each(outer, first.number);
            }
            emptied |= batches.is_empty();
        }
        if emptied {
            times.retain(|_, batches| !batches.is_empty());
        }
    }

    /// Forgets the numbers of outer times at which no batch can come any more.
    pub(crate) fn forget(&mut self, over: impl Fn(&O) -> bool) {
        self.next.retain(|outer, _| !over(outer));
    }

    /// What is unfinished now, as `unfinished` says: batches, their items, and the one that began first.
    pub(crate) fn standing(&self, unfinished: impl Fn(&O, u64) -> bool) -> (u64, u64, Option<(&O, u64)>) {
        let (mut batches, mut items, mut oldest) = (0, 0, None);
        for (outer, admitted) in &self.unfinished {
            for batch in admitted.iter().filter(|batch| unfinished(outer, batch.number)) {
                batches += 1;
                items += batch.items;
                oldest = oldest.or(Some((outer, batch.number)));
            }
        }
        (batches, items, oldest)
    }

    /// Batches admitted and their items.
    pub(crate) fn admitted(&self) -> (u64, u64) {
        (self.unfinished_batches + self.finished_batches, self.unfinished_items + self.finished_items)
    }

    /// The most unfinished batches at a batch's outer time and before it when it was admitted; the most unfinished items.
    pub(crate) fn most(&self) -> (u64, u64) {
        (self.most_batches, self.most_items)
    }

    /// Finished batches and their items.
    pub(crate) fn finished(&self) -> (u64, u64) {
        (self.finished_batches, self.finished_items)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_outer_times_count_on_their_own() {
        let mut window = Window::new();
        assert_eq!([window.admit(&5, 1), window.admit(&5, 1), window.admit(&9, 1), window.admit(&5, 1)], [0, 1, 0, 2]);
        assert_eq!((window.next(&5), window.next(&9), window.next(&7)), (3, 1, 0));
        window.forget(|outer| *outer == 5);
        assert_eq!((window.next(&5), window.next(&9)), (0, 1));
    }

    #[test]
    fn room_is_for_n_and_a_later_time_takes_none_of_it() {
        let mut window = Window::new();
        window.admit(&9, 10);
        window.admit(&9, 10);
        assert!(!window.has_room(&9, 2) && window.has_room(&9, 3));
        assert!(window.has_room(&5, 2), "what is later cannot finish before");
        window.admit(&5, 7);
        window.admit(&5, 7);
        assert!(!window.has_room(&5, 2) && !window.has_room(&7, 2) && window.has_room(&7, 3));
        assert_eq!((window.admitted(), window.most()), ((4, 34), (2, 34)));
        assert_eq!(window.standing(|_, _| true), (4, 34, Some((&5, 0))));
        assert_eq!(window.standing(|outer, number| (*outer, number) != (5, 0)), (3, 27, Some((&5, 1))));
    }

    #[test]
    fn batches_retire_in_order_and_are_counted() {
        let mut window = Window::new();
        for _ in 0..3 {
            window.admit(&1, 1);
            window.extend(&1, 3);
        }
        window.admit(&2, 5);
        let mut gone = Vec::new();
        window.retire(|outer, number| *outer == 1 && number >= 2, |outer, number| gone.push((*outer, number)));
        assert_eq!(gone, [(1, 0), (1, 1), (2, 0)]);
        assert_eq!((window.admitted(), window.finished(), window.most()), ((4, 17), (3, 13), (4, 17)));
        assert_eq!(window.standing(|_, _| true), (1, 4, Some((&1, 2))));
        window.retire(|_, _| false, |_, _| ());
        assert_eq!((window.standing(|_, _| true), window.finished()), ((0, 0, None), (4, 17)));
    }
}
