//! What a worker counted in one region and has not told its peers.
//!
//! Changes of one step are summed first: most cancel, such as those of a block that was made and read in it. What is left is told
//! at once when some of it may move a frontier, else kept. What is kept may be much, when a peer is far behind, so it is never
//! looked through: per location its minimal times are known, and while each of these is behind another live time, everything is.
//!
//! Departure: news that cannot move a frontier waits, and one bundle a step is sent at most; news about times beyond
//! the frontier come a hop later.

use crate::antichain::Antichain;
use crate::change_batch::ChangeBatch;
use crate::reachability::Location;
use crate::timestamp::Timestamp;

#[derive(Clone, Debug)]
pub(crate) struct Outgoing<T> {
    /// Changes since the last question.
    fresh: ChangeBatch<(Location, T)>,
    kept: ChangeBatch<(Location, T)>,
    /// By location of what is kept: the minimal times, by location. They may have been cancelled since.
    least: Vec<(Location, Antichain<T>)>,
}

impl<T: Timestamp> Outgoing<T> {
    pub(crate) fn new() -> Self {
        Outgoing { fresh: ChangeBatch::new(), kept: ChangeBatch::new(), least: Vec::new() }
    }

    pub(crate) fn update(&mut self, location: Location, time: T, diff: i64) {
        self.fresh.update((location, time), diff);
    }

    /// Whether a change is there that may move a frontier, as `moves` says; else keeps them all.
    pub(crate) fn must_share(&mut self, moves: impl Fn(&Location, &T) -> bool) -> bool {
        if self.fresh.iter().any(|((location, time), _)| moves(location, time)) {
            return true;
        }
        for ((location, time), diff) in self.fresh.drain() {
            match self.least.binary_search_by(|(other, _)| other.cmp(&location)) {
                Ok(at) => drop(self.least[at].1.insert(time.clone())),
                Err(at) => self.least.insert(at, (location, Antichain::from_elem(time.clone()))),
            }
            self.kept.update((location, time), diff);
        }
        self.least.iter().any(|(location, times)| times.elements().iter().any(|time| moves(location, time)))
    }

    /// Whether nothing is left to be told.
    pub(crate) fn is_empty(&mut self) -> bool {
        self.fresh.is_empty() && self.kept.is_empty()
    }

    /// Hands out everything, summed.
    pub(crate) fn share(&mut self, mut each: impl FnMut(Location, T, i64)) {
        if self.least.is_empty() {
            self.fresh.drain().for_each(|((location, time), diff)| each(location, time, diff));
            return;
        }
        self.kept.extend(self.fresh.drain());
        self.kept.drain().for_each(|((location, time), diff)| each(location, time, diff));
        self.least.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::order::PartialOrder;
    use crate::reachability::{Port, Source};
    use crate::timestamp::Product;
    use proptest::prelude::*;

    fn place(node: usize) -> Location {
        Source { node, port: 0 }.into()
    }

    fn shared<T: Timestamp>(outgoing: &mut Outgoing<T>) -> Vec<(usize, T, i64)> {
        let mut all = Vec::new();
        outgoing.share(|location, time, diff| all.push((location.node, time, diff)));
        all
    }

    #[test]
    fn what_can_move_nothing_is_kept_until_it_can_and_cancels_meanwhile() {
        let mut outgoing = Outgoing::<u64>::new();
        for (time, diff) in [(5, 1), (6, 2), (5, -1)] {
            outgoing.update(place(1), time, diff);
            assert!(!outgoing.must_share(|_, time| *time <= 4));
        }
        outgoing.update(place(2), 9, 1);
        assert!(outgoing.must_share(|location, time| location.node == 2 && *time <= 9));
        assert_eq!(shared(&mut outgoing), [(1, 6, 2), (2, 9, 1)]);
        assert!(!outgoing.must_share(|_, _| true), "nothing is left");
    }

    type Time = Product<u64, u64>;

    proptest! {
        /// Exactly when some change of the step may move a frontier, or the minimal kept ones may, and nothing is ever lost.
        #[test]
        fn it_answers_as_a_list_of_all_changes_would(
            steps in proptest::collection::vec((
                proptest::collection::vec((0usize..3, 0u64..4, 0u64..4, -2i64..=2), 0..6),
                (0u64..4, 0u64..4),
            ), 1..30),
        ) {
            let mut outgoing = Outgoing::<Time>::new();
            let (mut told, mut counted) = (ChangeBatch::new(), ChangeBatch::new());
            let mut kept: Vec<(Location, Time)> = Vec::new();
            for (changes, (outer, inner)) in steps {
                let live = Product::new(outer, inner);
                let moves = |location: &Location, time: &Time| {
                    let behind = live.less_than(time);
                    !behind && matches!(location.port, Port::Source(0))
                };
                let mut step = ChangeBatch::new();
                for (node, outer, inner, diff) in changes {
                    let time = Product::new(outer, inner);
                    outgoing.update(place(node), time, diff);
                    step.update((place(node), time), diff);
                    counted.update((node, time), diff);
                }
                kept.extend(step.drain().map(|(key, _)| key));
                let must = kept.iter().any(|(location, time)| moves(location, time));
                prop_assert_eq!(outgoing.must_share(moves), must);
                if must {
                    kept.clear();
                    told.extend(shared(&mut outgoing).into_iter().map(|(node, time, diff)| ((node, time), diff)));
                }
            }
            told.extend(shared(&mut outgoing).into_iter().map(|(node, time, diff)| ((node, time), diff)));
            prop_assert_eq!(told.drain().collect::<Vec<_>>(), counted.drain().collect::<Vec<_>>());
        }
    }
}
