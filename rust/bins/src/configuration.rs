//! The configuration function over time: F's protocol state, without any dataflow.
//!
//! Control comes in at its time and waits until the control frontier has passed it; then its batch is checked and
//! becomes a *pending* configuration. A record at `t` follows the newest configuration at or before `t`, known as soon as the
//! control frontier has passed `t`, whether or not the bins have moved yet. The first pending configuration *starts*
//! once nothing before its time can come out of S any more: it leaves the list and is the *active* one.
//!
//! Invariants: pending configurations have ascending times, none of them in advance of the control frontier; a refused
//! batch changes nothing; configurations start in time order; `cursor` is the active routing with the first `cursor_at`
//! pending configurations applied.
//!
//! Source: Megaphone §3.3–3.5 and §4.3; M-02, M-05, M-08, M-13. Departure: configurations are kept as changes, not as
//! full maps, so that thousands prepared ahead cost what they move; a cursor walks along them as data time moves.

use std::collections::{BTreeMap, VecDeque};

use penstock_dataflow::wire::{decode_serde, encode_serde};
use serde::{Deserialize, Serialize};

use crate::control::{Changes, Control, are_changes_of, check_batch};
use crate::error::{BinsError, ControlError};
use crate::routing::{Routing, whole};

/// A change of the routing at a time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Configuration<T> {
    /// From when it holds.
    pub time: T,
    /// The changes; none for a no-op.
    pub changes: Changes,
}

/// What became of the control batches that the control frontier has passed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome<T> {
    /// Accepted; pending from now on.
    Pending(Configuration<T>),
    /// Refused; as if it had never been sent.
    Rejected {
        /// Its time.
        time: T,
        /// Why.
        error: ControlError,
    },
}

/// The configuration function of one operator on one worker.
///
/// # Examples
/// ```
/// use penstock_bins::{Command, Configurations, Control, Routing};
/// let mut f = Configurations::new(Routing::new(1, 1)?);
/// f.stage(45u64, Control::batch(0, vec![Command::Move { bin: 0, worker: 1 }]));
/// f.advance(&[45], |worker| worker < 2);
/// assert_eq!(f.routing_at(&44).unwrap().owner_of(0), 0);
/// assert!(f.routing_at(&45).is_none(), "more control may come for 45");
/// f.advance(&[46], |worker| worker < 2);
/// assert_eq!(f.routing_at(&45).unwrap().owner_of(0), 1);
/// assert!(f.start(|time| 44 < *time).is_none(), "S is still at 44");
/// assert!(f.start(|time| 45 < *time).is_some());
/// # Ok::<(), penstock_bins::BinsError>(())
/// ```
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(into = "Taught<T>", try_from = "Taught<T>")]
#[serde(bound(serialize = "T: Serialize + Clone", deserialize = "T: Deserialize<'de> + Ord + Clone"))]
pub struct Configurations<T> {
    active: Routing,
    newest: Routing,
    cursor: Routing,
    cursor_at: usize,
    pending: VecDeque<Configuration<T>>,
    staged: BTreeMap<T, Vec<Control>>,
    /// What of it a peer has told and has not come here: it may still do so, or was sent before there was anybody here.
    learnt: BTreeMap<T, Vec<Control>>,
    frontier: Frontier<T>,
    next_sequence: u64,
    divisible: bool,
}

/// What a joiner is told: what the rest follows from. Divisible is what its own operator is.
#[derive(Serialize, Deserialize)]
#[serde(bound(serialize = "T: Serialize", deserialize = "T: Deserialize<'de> + Ord"))]
struct Taught<T> {
    #[serde(with = "whole")]
    active: Routing,
    pending: VecDeque<Configuration<T>>,
    staged: BTreeMap<T, Vec<Control>>,
    frontier: Frontier<T>,
    next_sequence: u64,
}

impl<T> From<Configurations<T>> for Taught<T> {
    fn from(told: Configurations<T>) -> Self {
        let Configurations { active, pending, staged, frontier, next_sequence, .. } = told;
        Taught { active, pending, staged, frontier, next_sequence }
    }
}

impl<T: Ord + Clone> TryFrom<Taught<T>> for Configurations<T> {
    type Error = BinsError;

    fn try_from(heard: Taught<T>) -> Result<Self, BinsError> {
        let Taught { active, pending, staged, frontier, next_sequence } = heard;
        let count = pending.len();
        // Each of them was a batch, and there will be more.
        if next_sequence < count as u64 || next_sequence > u64::MAX / 2 {
            return Err(BinsError::Lesson { at: count, count });
        }
        let mut newest = active.clone();
        for (at, Configuration { time, changes }) in pending.iter().enumerate() {
            let follows = at.checked_sub(1).is_none_or(|before| pending[before].time < *time);
            if !follows || !are_changes_of(changes, &newest) {
                return Err(BinsError::Lesson { at, count });
            }
            newest.forward(changes);
        }
        let told = Self { newest, pending, staged, frontier, next_sequence, ..Self::new(active) };
        Ok(told)
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
enum Frontier<T> {
    /// Nothing heard yet: everything may still come.
    Unknown,
    /// Nothing before this.
    At(T),
    /// Nothing at all.
    Closed,
}

impl<T: Ord + Clone> Configurations<T> {
    /// Starts with `initial` in force and sequence 0 expected.
    #[must_use]
    pub fn new(initial: Routing) -> Self {
        Self {
            newest: initial.clone(),
            cursor: initial.clone(),
            active: initial,
            cursor_at: 0,
            pending: VecDeque::new(),
            staged: BTreeMap::new(),
            learnt: BTreeMap::new(),
            frontier: Frontier::Unknown,
            next_sequence: 0,
            divisible: true,
        }
    }

    /// Bins of this operator cannot be split: such batches are refused.
    #[must_use]
    pub fn indivisible(mut self) -> Self {
        self.divisible = false;
        self
    }

    /// Begins where a peer stands. What it had staged and what was or will be staged here counts once; a peer whose control frontier has passed a
    /// time has had all of it, and so has this worker.
    ///
    /// # Errors
    /// [`BinsError::BitsDiffer`], and [`BinsError::Lesson`] where bins are split there that cannot be here; nothing changes.
    pub fn learn(&mut self, mut peer: Self) -> Result<(), BinsError> {
        let (expected, found) = (self.active.bits(), peer.active.bits());
        if expected != found {
            return Err(BinsError::BitsDiffer { expected, found });
        }
        let recut = peer.pending.iter().position(|pending| !pending.changes.recuts.is_empty());
        let split = recut.or(peer.active.is_split().then_some(0)).filter(|_| !self.divisible);
        if let Some(at) = split {
            return Err(BinsError::Lesson { at, count: peer.pending.len() });
        }
        peer.divisible = self.divisible;
        peer.learnt = peer.staged.clone();
        for (time, staged) in std::mem::take(&mut self.staged) {
            if peer.frontier.may_bring(&time) {
                peer.stage(time, staged);
            }
        }
        *self = peer;
        Ok(())
    }

    /// Whether something of this time is staged, or pending and takes bins from this worker.
    #[must_use]
    pub fn concerns(&self, time: &T, worker: u32) -> bool {
        let concerns = |Changes { moves, recuts }: &Changes| {
            moves.iter().any(|m| m.from == worker) || recuts.iter().any(|recut| recut.worker == worker)
        };
        let pending = |pending: &Configuration<T>| pending.time == *time && concerns(&pending.changes);
        self.staged.contains_key(time) || self.pending.iter().any(pending)
    }

    /// The routing by which bins lie in the tables now.
    #[must_use]
    pub fn active(&self) -> &Routing {
        &self.active
    }

    /// The routing once everything pending has started.
    #[must_use]
    pub fn newest(&self) -> &Routing {
        &self.newest
    }

    /// Accepted configurations that have not started, times ascending.
    pub fn pending(&self) -> impl ExactSizeIterator<Item = &Configuration<T>> {
        self.pending.iter()
    }

    /// Stashes control until its time is certain.
    pub fn stage(&mut self, time: T, mut controls: Vec<Control>) {
        if let Some(learnt) = self.learnt.get_mut(&time) {
            controls.retain(|control| {
                let known = learnt.iter().position(|other| other == control);
                known.map(|at| learnt.swap_remove(at)).is_none()
            });
        }
        if !controls.is_empty() {
            self.staged.entry(time).or_default().append(&mut controls);
        }
    }

    /// The control frontier moved: compiles what it has passed, times ascending. Cost: the staged commands concerned.
    ///
    /// `present` tells members from absent workers.
    pub fn advance(&mut self, frontier: &[T], present: impl Fn(u32) -> bool) -> Vec<Outcome<T>> {
        self.frontier = match frontier.iter().min() {
            Some(time) => Frontier::At(time.clone()),
            None => Frontier::Closed,
        };
        let mut outcomes = Vec::new();
        while let Some(entry) = self.staged.first_entry() {
            if self.frontier.may_bring(entry.key()) {
                break;
            }
            let (time, batch) = entry.remove_entry();
            self.learnt.remove(&time);
            let checked = check_batch(&batch, &self.newest, &present, self.next_sequence);
            let checked = checked.and_then(|changes| match changes.recuts.first() {
                Some(recut) if !self.divisible => Err(ControlError::Indivisible { bin: self.newest.name(recut.bin) }),
                _ => Ok(changes),
            });
            outcomes.push(match checked {
                Err(error) => Outcome::Rejected { time, error },
                Ok(changes) => {
                    self.next_sequence += 1;
                    self.newest.forward(&changes);
                    let configuration = Configuration { time, changes };
                    self.pending.push_back(configuration.clone());
                    Outcome::Pending(configuration)
                }
            });
        }
        outcomes
    }

    /// True when the configuration at `time` can still change, so that its records must wait.
    #[must_use]
    pub fn uncertain(&self, time: &T) -> bool {
        self.frontier.may_bring(time)
    }

    /// The configuration of `time`; `None` while control may still come for it. Cost: the moves between this time and
    /// the one last asked for.
    pub fn routing_at(&mut self, time: &T) -> Option<&Routing> {
        if self.uncertain(time) {
            return None;
        }
        while let Some(next) = self.pending.get(self.cursor_at).filter(|next| next.time <= *time) {
            self.cursor.forward(&next.changes);
            self.cursor_at += 1;
        }
        while let Some(last) = self.cursor_at.checked_sub(1).filter(|last| self.pending[*last].time > *time) {
            self.cursor.backward(&self.pending[last].changes);
            self.cursor_at = last;
        }
        Some(&self.cursor)
    }

    /// The active configuration is that of every time from its own on and before this; of all from then on where there is none.
    pub(crate) fn holds_until(&self) -> Option<&T> {
        let certain = match &self.frontier {
            Frontier::At(time) => Some(time),
            Frontier::Unknown | Frontier::Closed => None,
        };
        self.pending.front().map(|next| &next.time).into_iter().chain(certain).min()
    }

    /// Starts the first pending configuration if S has finished everything before it: `busy_before(time)` says whether
    /// S's output frontier still has a time before `time`. Returns the configuration, active from now on.
    pub fn start(&mut self, busy_before: impl Fn(&T) -> bool) -> Option<Configuration<T>> {
        if busy_before(&self.pending.front()?.time) {
            return None;
        }
        let started = self.pending.pop_front()?;
        self.active.forward(&started.changes);
        if self.cursor_at == 0 {
            self.cursor.forward(&started.changes);
        } else {
            self.cursor_at -= 1;
        }
        Some(started)
    }
}

impl<T: Ord> Frontier<T> {
    fn may_bring(&self, time: &T) -> bool {
        match self {
            Self::Unknown => true,
            Self::At(frontier) => frontier <= time,
            Self::Closed => false,
        }
    }
}

/// Reads what a joiner is told, and routes by it as one does; whether it is that. For fuzzing.
#[doc(hidden)]
#[must_use]
pub fn fuzz_lesson(bytes: &[u8]) -> bool {
    let Ok(told) = decode_serde::<Configurations<u64>>(bytes) else { return false };
    let mut out = Vec::new();
    encode_serde(&told, &mut out);
    let again: Configurations<u64> = decode_serde(&out).expect("what was read can be written and read");
    assert_eq!((again.newest(), again.next_sequence), (told.newest(), told.next_sequence));
    let mut f = Configurations::new(Routing::new(told.active().bits(), 2).expect("as many bins as it is told"));
    assert!(
        f.clone().indivisible().learn(told.clone()).is_ok() || told.active().is_split() || told.pending().len() > 0
    );
    f.learn(told).expect("as many bins as it has");
    let owners = |routing: &Routing| {
        for hash in [0, 1 << 62, u64::MAX / 3, 1 << 63, u64::MAX] {
            assert_eq!(routing.owner_at(routing.bin_of(hash)), Some(routing.owner(hash)));
        }
    };
    let times: Vec<u64> = f.pending().map(|pending| pending.time).chain([0, u64::MAX]).collect();
    f.advance(&[], |worker| worker < 1 << 16);
    times.iter().chain(times.iter().rev()).for_each(|time| owners(f.routing_at(time).expect("control is closed")));
    while f.start(|_| false).is_some() {
        owners(f.active());
        owners(f.routing_at(&0).expect("control is closed"));
    }
    assert_eq!(f.active(), f.newest());
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::Command;
    use crate::routing::SPLIT;
    use proptest::prelude::*;

    fn moves(sequence: u64, list: &[(u32, u32)]) -> Vec<Control> {
        Control::batch(sequence, list.iter().map(|&(bin, worker)| Command::Move { bin, worker }).collect())
    }

    #[test]
    fn a_reject_leaves_everything_and_the_sequence_as_it_was() {
        let mut f = Configurations::new(Routing::new(2, 2).unwrap());
        f.stage(3, moves(0, &[(0, 5)]));
        f.stage(4, moves(0, &[(0, 1)]));
        f.stage(5, moves(0, &[(1, 0)]));
        let outcomes = f.advance(&[9], |worker| worker < 2);
        assert!(matches!(&outcomes[0], Outcome::Rejected { time: 3, error: ControlError::AbsentWorker { worker: 5 } }));
        assert!(matches!(&outcomes[1], Outcome::Pending(c) if c.time == 4));
        assert!(matches!(
            &outcomes[2],
            Outcome::Rejected { time: 5, error: ControlError::Sequence { found: 0, expected: 1 } }
        ));
        assert_eq!(f.newest().owners(), [1, 1, 0, 1]);
        assert_eq!(f.active().owners(), [0, 1, 0, 1]);
        assert_eq!(f.pending().len(), 1);
    }

    #[test]
    fn who_joins_begins_where_a_peer_stands_and_counts_nothing_twice() {
        let mut peer = Configurations::new(Routing::new(2, 2).unwrap());
        let (first, second, third) = (moves(0, &[(0, 1)]), moves(1, &[(1, 2)]), moves(2, &[(2, 2), (0, 2)]));
        peer.stage(3, first);
        peer.stage(5, second.clone());
        peer.stage(7, third[..1].to_vec());
        assert_eq!(peer.advance(&[6], |_| true).len(), 2);
        // The joiner was sent the second batch, and the other half of the third, and all of it but for the first again: before it learns or after.
        for after in [0, 1, third.len()] {
            let mut f = Configurations::new(Routing::new(2, 2).unwrap());
            f.stage(5, second.clone());
            let (before, after) = third.split_at(third.len() - after);
            f.stage(7, before.to_vec());
            f.learn(peer.clone()).unwrap();
            f.stage(7, after.to_vec());
            assert!(f.concerns(&7, 2) && f.concerns(&5, 1) && !f.concerns(&5, 2));
            let outcomes = f.advance(&[8], |_| true);
            assert!(matches!(outcomes[..], [Outcome::Pending(_)]), "{outcomes:?}");
            assert_eq!(f.newest().owners(), [2, 2, 2, 1]);
            assert_eq!(f.routing_at(&4).unwrap().owners(), [1, 1, 0, 1]);
        }
    }

    #[test]
    fn a_joiner_believes_only_what_commands_make() {
        let mut f = Configurations::new(Routing::new(2, 2).unwrap());
        f.stage(3, moves(0, &[(0, 1)]));
        f.stage(5, Control::batch(1, vec![Command::Split { bin: 3, bits: 2 }, Command::Move { bin: 1, worker: 0 }]));
        f.stage(6, Control::batch(2, vec![Command::Merge { bin: 3 }]));
        f.stage(9, moves(3, &[(2, 1)]));
        assert_eq!(f.advance(&[7], |_| true).len(), 3);
        f.start(|_| false).unwrap();
        f.routing_at(&5).unwrap();
        let heard = |taught: &Taught<u64>| {
            let mut bytes = Vec::new();
            encode_serde(taught, &mut bytes);
            decode_serde::<Configurations<u64>>(&bytes)
        };
        let mut told = heard(&f.clone().into()).unwrap();
        assert_eq!((told.active(), told.newest()), (f.active(), f.newest()));
        assert!(told.pending().eq(f.pending()));
        assert_eq!(told.routing_at(&5), f.routing_at(&5));
        type Wrong = (&'static str, fn(&mut Taught<u64>));
        let wrong: [Wrong; 11] = [
            ("times that do not ascend", |taught| taught.pending[1].time = 5),
            ("a bin that is not there", |taught| taught.pending[0].changes.moves[0].bin = 1 << 30),
            ("another owner before", |taught| taught.pending[0].changes.moves[0].from = 7),
            ("an owner that marks bins that are split", |taught| taught.pending[0].changes.moves[0].to = SPLIT),
            ("a bin twice", |taught| {
                let again = taught.pending[0].changes.moves[0];
                taught.pending[0].changes.moves.push(again);
            }),
            ("no parts", |taught| taught.pending[0].changes.recuts[0].parts.clear()),
            ("other parts", |taught| taught.pending[0].changes.recuts[0].parts[2] = u32::MAX),
            ("a worker that has it not", |taught| taught.pending[0].changes.recuts[0].worker = 0),
            ("a merge of what is whole", |taught| taught.pending.swap_remove_front(0).map_or((), drop)),
            ("fewer batches than are pending", |taught| taught.next_sequence = 1),
            ("more batches than there ever are", |taught| taught.next_sequence = u64::MAX),
        ];
        for (what, change) in wrong {
            let mut taught = Taught::from(f.clone());
            change(&mut taught);
            assert!(heard(&taught).is_err(), "{what}");
        }
    }

    #[test]
    fn who_joins_learns_of_bins_like_its_own_only() {
        let fresh = |bits| Configurations::<u64>::new(Routing::new(bits, 2).unwrap());
        let mut f = fresh(2);
        let differ = f.learn(fresh(3));
        assert!(matches!(differ, Err(BinsError::BitsDiffer { expected: 2, found: 3 })), "{differ:?}");
        let mut peer = fresh(2);
        peer.stage(3, Control::batch(0, vec![Command::Split { bin: 3, bits: 1 }]));
        peer.advance(&[4], |_| true);
        let pending = fresh(2).indivisible().learn(peer.clone());
        assert!(matches!(pending, Err(BinsError::Lesson { at: 0, count: 1 })), "{pending:?}");
        peer.start(|_| false).unwrap();
        let split = fresh(2).indivisible().learn(peer.clone());
        assert!(matches!(split, Err(BinsError::Lesson { at: 0, count: 0 })), "{split:?}");
        f.learn(peer).unwrap();
        assert!(f.active().is_split());
    }

    #[test]
    fn a_batch_waits_for_all_its_commands() {
        let mut f = Configurations::new(Routing::new(2, 2).unwrap());
        let batch = moves(0, &[(0, 1), (1, 0)]);
        f.stage(3, batch[..1].to_vec());
        assert!(f.advance(&[3], |_| true).is_empty());
        f.stage(3, batch[1..].to_vec());
        assert_eq!(f.advance(&[], |_| true).len(), 1);
        assert_eq!(f.routing_at(&7).unwrap().owners(), [1, 0, 0, 1]);
        assert_eq!(f.routing_at(&2).unwrap().owners(), [0, 1, 0, 1]);
    }

    #[test]
    fn nothing_is_certain_before_the_first_frontier() {
        let mut f = Configurations::<u64>::new(Routing::new(0, 1).unwrap());
        assert!(f.routing_at(&0).is_none());
        f.advance(&[0], |_| true);
        assert!(f.routing_at(&0).is_none());
        f.advance(&[1], |_| true);
        assert!(f.routing_at(&0).is_some());
    }

    proptest! {
        /// The cursor gives what applying every configuration up to `t` to the initial map gives.
        #[test]
        fn cursor_equals_replay(
            batches in prop::collection::vec(prop::collection::btree_map(0u32..8, 0u32..3, 1..5), 0..12),
            asks in prop::collection::vec((0u64..40, any::<bool>()), 1..40),
        ) {
            let initial = Routing::new(3, 3).unwrap();
            let mut f = Configurations::new(initial.clone());
            for (i, batch) in batches.iter().enumerate() {
                let list: Vec<_> = batch.iter().map(|(b, w)| (*b, *w)).collect();
                f.stage(3 * i as u64, moves(i as u64, &list));
            }
            f.advance(&[], |_| true);
            let mut started = 0;
            for (time, start) in asks {
                let mut expected = initial.owners().to_vec();
                for (i, batch) in batches.iter().enumerate() {
                    if i < started || 3 * i as u64 <= time {
                        batch.iter().for_each(|(b, w)| expected[*b as usize] = *w);
                    }
                }
                prop_assert_eq!(f.routing_at(&time).unwrap().owners(), &expected[..]);
                if start && f.start(|t| *t > time).is_some() {
                    started += 1;
                }
            }
        }
    }
}
