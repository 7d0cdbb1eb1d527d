//! Messages that come late and interleaved at random, for simulations: what a network may do, without one.
//!
//! Kept is what every fabric promises: from one sender to one receiver progress arrives in order, and data arrives in order.
//! All else is up to the seed: how long a message takes, and what overtakes what.

use std::collections::{BTreeMap, VecDeque};

use crossbeam::queue::SegQueue;

use super::{Envelope, MemberLane, Payload};

/// What is on its way to one worker.
pub(super) struct Shuffle {
    random: u64,
    /// By sender, and whether it is progress.
    lanes: BTreeMap<(usize, bool), VecDeque<Envelope>>,
    count: usize,
}

impl Shuffle {
    pub(super) fn new(seed: u64) -> Self {
        Shuffle { random: seed, lanes: BTreeMap::new(), count: 0 }
    }

    /// Below `bound`, which is not 0 (splitmix64).
    fn below(&mut self, bound: usize) -> usize {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.random;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % bound as u64) as usize
    }

    /// Takes over what was sent, and says how much of it arrives now.
    pub(super) fn arriving(&mut self, sent: &SegQueue<Envelope>) -> usize {
        while let Some(envelope) = sent.pop() {
            let progress = matches!(
                envelope.payload,
                Payload::Progress(_)
                    | Payload::Bundle(_)
                    | Payload::Member(MemberLane::Urgent, _)
                    | Payload::MemberBytes(MemberLane::Urgent, _)
                    | Payload::Lost
            );
            self.lanes.entry((envelope.from, progress)).or_default().push_back(envelope);
            self.count += 1;
        }
        self.below(self.count + 1)
    }

    /// The oldest message of some lane.
    pub(super) fn next(&mut self) -> Option<Envelope> {
        let chosen = self.below(self.lanes.len().max(1));
        let lane = *self.lanes.keys().nth(chosen)?;
        let waiting = self.lanes.get_mut(&lane)?;
        let envelope = waiting.pop_front();
        if waiting.is_empty() {
            self.lanes.remove(&lane);
        }
        self.count -= usize::from(envelope.is_some());
        envelope
    }

    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }
}
